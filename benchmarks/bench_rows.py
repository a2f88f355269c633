"""The rows of the benchmark: shapes, variants, and the work that their masks leave visible."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One shape and variant, bf16, self-attention. Letters: B batch, H heads, S length, D head dim."""

    variant: str  # key of bench_variants.VARIANTS
    batch: int  # B
    heads: int  # H
    length: int  # S
    dim: int  # D
    parameter: int = 0  # window, prefix, length of a document or the cap; 0 where the variant has none

    @property
    def name(self) -> str:
        parameter = f" {self.parameter}" if self.parameter else ""
        return f"D{self.dim} H{self.heads} S{self.length} {self.variant}{parameter}"

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that the mask leaves, in one head."""
        s, n = self.length, self.parameter
        causal = s * (s + 1) // 2
        match self.variant:
            case "full":
                return s * s
            case "causal" | "softcap" | "alibi":
                return causal
            case "window":
                return causal - (s - n) * (s - n + 1) // 2
            case "documents":
                return s // n * (n * (n + 1) // 2)
            case "prefix":
                return causal + n * (n - 1) // 2
            case other:
                raise ValueError(f"variant {other!r}: its visible pairs are not known")

    def flops(self, direction: str) -> float:
        """Two matrix products over the visible pairs forward, five backward; multiply and add count as two."""
        forward = 4.0 * self.batch * self.heads * self.visible_pairs * self.dim
        return forward if direction == "forward" else 2.5 * forward


def _dense(dim: int, length: int, variant: str) -> Row:
    """16k tokens and a model width of 2048, whatever the head dim and the length."""
    return Row(variant, 16384 // length, 2048 // dim, length, dim)


DENSE = (
    _dense(64, 2048, "causal"),
    _dense(64, 8192, "causal"),
    _dense(64, 8192, "full"),
    _dense(128, 2048, "causal"),
    _dense(128, 2048, "full"),
    _dense(128, 8192, "causal"),
    _dense(128, 8192, "full"),
    _dense(256, 8192, "causal"),
    _dense(256, 8192, "full"),
)
VARIANTS = tuple(
    Row(variant, 2, 16, 8192, 128, parameter)
    for variant, parameter in (("softcap", 20), ("alibi", 0), ("window", 1024), ("documents", 1024), ("prefix", 2048))
)
ROWS = DENSE + VARIANTS
QUICK = (DENSE[0], DENSE[5], VARIANTS[0])
