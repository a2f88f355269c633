"""The rows of the benchmark: shapes, variants, and the work that their masks leave visible."""

import random
from dataclasses import dataclass, replace
from typing import Literal

TOKENS = 16384  # of a row, unless its name says otherwise


@dataclass(frozen=True)
class Row:
    """One shape and variant, bf16 or FP8, self-attention. Letters: B batch, H heads, S length, D and Dv head dims."""

    variant: str  # key of bench_variants.VARIANTS
    batch: int  # B
    heads: int  # H
    length: int  # S
    dim: int  # D
    # window, prefix, length of a document or of a sequence, the cap, how many sequences, buckets, percent of the blocks
    # or of what is dropped, columns of a key that all heads share
    parameter: int = 0  # none
    own_kv_heads: int = 0  # heads of key and value; 0: H
    own_value_dim: int = 0  # Dv; 0: D
    spread: tuple[int, int, int] | None = None  # of how many sequences tokens are packed, from how many to how many
    # of operands in FP8, how values lie: "rows", or "columns", whose length is contiguous; "": operands are bf16
    fp8: Literal["", "rows", "columns"] = ""
    fp8_per: Literal["tensor", 128] = "tensor"  # what shares a descale

    @property
    def kv_heads(self) -> int:
        return self.own_kv_heads or self.heads

    @property
    def value_dim(self) -> int:
        return self.own_value_dim or self.dim

    @property
    def name(self) -> str:
        parameter = f" {self.parameter}" if self.parameter else ""
        width = f"D{self.dim}" + (f"/{self.value_dim}" if self.own_value_dim else "")
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.own_kv_heads else "")
        batch = "" if self.batch * self.length == TOKENS else f" B{self.batch}"
        spread = " {} of {} to {}".format(*self.spread) if self.spread else ""
        fp8 = f" FP8, values by {self.fp8}" if self.fp8 else ""
        fp8 += ", a descale for 128 rows" if self.fp8_per == 128 else ""
        return f"{width} {heads} S{self.length}{batch} {self.variant}{parameter}{spread}{fp8}"

    @property
    def lens(self) -> tuple[int, ...]:
        """Lengths of the sequences that the row's tokens are packed of; () where every batch row is one."""
        n = self.parameter
        if self.variant == "packed":
            return (n,) * (self.length // n)
        if self.spread is None and self.variant != "ragged":
            return ()
        n, least, longest = self.spread or (n, 1, 2 * self.length // n)  # evenly, in no order
        found = [least + i * (longest - least) // (n - 1) for i in range(n)]
        found[n // 2] += self.length - sum(found)
        random.Random(0).shuffle(found)
        return tuple(found)

    @property
    def block(self) -> int:
        """Queries and keys of a block of a block-sparse row."""
        return 128 if self.length >= 1024 else 8

    @property
    def seen_blocks(self) -> int:
        """Blocks of keys that each block of queries sees."""
        return max(1, round(self.length // self.block * self.parameter / 100))

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that the mask leaves, in one head."""
        s, n = self.length, self.parameter
        causal = s * (s + 1) // 2
        if self.lens:
            return sum(length * (length + 1) // 2 for length in self.lens)
        match self.variant:
            case "full" | "bias" | "bias_fp32":
                return s * s
            case "causal" | "softcap" | "alibi" | "sink" | "dropout" | "sigmoid" | "latent":
                return causal
            case "t5" | "bias_by_key" | "factor_by_query":
                return causal
            case "window":
                return causal - (s - n) * (s - n + 1) // 2
            case "documents":
                return s // n * (n * (n + 1) // 2)
            case "blocks":
                return s * self.seen_blocks * self.block
            case "prefix":
                return causal + n * (n - 1) // 2
            case other:
                raise ValueError(f"variant {other!r}: its visible pairs are not known")

    def flops(self, direction: str) -> float:
        """Two matrix products over the visible pairs forward, five backward; multiply and add count as two."""
        columns = self.dim + self.value_dim if direction == "forward" else 3 * self.dim + 2 * self.value_dim
        return 2.0 * self.batch * self.heads * self.visible_pairs * columns


def _dense(dim: int, length: int, variant: str) -> Row:
    """16k tokens and a model width of 2048, whatever the head dim and the length."""
    return Row(variant, TOKENS // length, 2048 // dim, length, dim)


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
    for variant, parameter in (
        ("softcap", 20),
        ("alibi", 0),
        ("sink", 0),
        ("dropout", 10),
        ("sigmoid", 0),
        ("window", 1024),
        ("documents", 1024),
        ("prefix", 2048),
    )
)
SHAPES = (  # widths that are no power of two, grouped heads, many short sequences, one short, one long
    _dense(80, 4096, "causal"),
    _dense(96, 4096, "causal"),
    Row("causal", 4, 16, 4096, 192, own_value_dim=128),
    Row("causal", 2, 32, 8192, 128, own_kv_heads=8),
    Row("causal", 8, 32, 2048, 64, own_kv_heads=4),
    Row("causal", 64, 16, 512, 64),
    Row("causal", 64, 16, 1024, 64),  # a layer of GPT-2 medium
    Row("full", 64, 12, 256, 64),  # of BERT
    Row("causal", 1, 16, 1024, 128),
    Row("causal", 1, 8, 131072, 128),
)
PACKED = (  # causal, with cu_seqlens; sequences of 1 to 16k tokens beside equal ones of as much work
    Row("packed", 1, 16, TOKENS, 128, 1024),
    Row("ragged", 1, 8, 64 * 8192, 128, 64),
    Row("packed", 1, 8, 64 * 9475, 128, 9475),
)
LEARNED = (  # gradients of what the score reads are timed too: a bias [B, H, S, S] in bf16, a table of 32 buckets, a
    # bias [H, S] of keys, a factor [H, S] of queries
    Row("bias", 1, 16, 4096, 64),
    Row("bias_fp32", 1, 16, 4096, 64),
    Row("t5", 2, 16, 8192, 128, 32),
    Row("bias_by_key", 2, 16, 8192, 128),
    Row("factor_by_query", 2, 16, 8192, 128),
    Row("t5", 4, 16, 4096, 64, 32),
    Row("bias_by_key", 4, 16, 4096, 64),
    Row("factor_by_query", 4, 16, 4096, 64),
)
LATENT = (  # expanded: keys of 128 columns a head and 64 that all heads share, from a cache of 512 + 64, values of 128
    Row("latent", 4, 16, 4096, 192, 64, own_value_dim=128),
    Row("latent", 1, 16, 16 * 4608, 192, 64, own_value_dim=128, spread=(16, 1024, 8192)),
)
DROPPED = (Row("dropout", 1, 8, 64 * 2048, 128, 10, spread=(64, 1, 4096)),)
SPARSE = (  # what is visible is a small part: tiles are found on the device in each call
    Row("blocks", 1, 16, 65536, 128, 5),
    Row("documents", 1, 8, 2**20, 128, 1024),
)
ROWS = DENSE + VARIANTS + SHAPES + PACKED + LEARNED + LATENT + DROPPED + SPARSE
_IN_FP8 = (  # forwards alone: FP8 has no backward
    _dense(128, 8192, "causal"),
    _dense(128, 8192, "full"),
    _dense(128, 16384, "causal"),
    _dense(64, 8192, "causal"),
    _dense(256, 8192, "causal"),
    _dense(256, 8192, "full"),
    Row("causal", 2, 16, 8192, 192, own_value_dim=128),
    *(row for row in VARIANTS if row.variant in ("softcap", "alibi", "window", "documents")),
    *PACKED[:2],
)
FP8 = (
    *(replace(row, fp8=layout) for row in _IN_FP8 for layout in ("columns", "rows")),  # type: ignore[arg-type]
    *(replace(row, fp8="columns", fp8_per=128) for row in _IN_FP8 if row.variant in ("causal", "full")),
)
QUICK = (DENSE[0], DENSE[5], VARIANTS[0])
