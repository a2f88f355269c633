"""Tiles in words, and the words that stages of kernels share.

Every stage has a key. A template prints the words of a stage as the comment over the code that does it, by
`{{ stage("flash_forward", "load query") }}`, and places each stage of its kernels exactly once, which codegen checks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.tiles.results import Traits
from .form import Form
from .records import Segment, Stage
from .segments import Segments


@dataclass(frozen=True)
class Tiles:
    """Tiles of a kernel in words: "K tile [128, 64 + 16]"."""

    q: int  # rows of a query tile
    kv: int  # rows of a key tile
    parts: Segments
    traits: Traits
    wanted: frozenset[str] = frozenset(("query", "key", "value", "rope"))  # gradients that a backward computes
    sums: frozenset[str] = frozenset()  # how wanted gradients of reads by the score are summed: "total", "freed", ...
    sinks: bool = False  # gradients of what the sink reads are wanted
    ragged: bool = False  # sequences have lengths of their own
    form: Form | None = None  # None of kernels whose words are the same in any form

    def query(self, what: str = "Q") -> str:
        return f"{what} tile [{self.q}, {columns(self.parts.qk)}]"

    def output(self, what: str) -> str:
        return f"{what} tile [{self.q}, {columns(self.parts.v)}]"

    def key(self, what: str = "K") -> str:
        return f"{what} tile [{self.kv}, {columns(self.parts.qk)}]"

    def value(self, what: str = "V") -> str:
        return f"{what} tile [{self.kv}, {columns(self.parts.v)}]"

    def dkey(self) -> str:
        """The gradient of the key: its own columns, the rotary ones, or both."""
        wanted = tuple(s for s in self.parts.qk if ("rope" if s.source == "rope" else "key") in self.wanted)
        return f"dK tile [{self.kv}, {columns(wanted)}]"

    def scores(self, what: str = "S") -> str:
        return f"{what} tile [{self.q}, {self.kv}]"

    def rows(self, what: str) -> str:
        return f"{what} [{self.q}]"

    @property
    def wants_dkey(self) -> bool:
        return "key" in self.wanted or self.wants_shared_dkey

    @property
    def wants_shared_dkey(self) -> bool:
        """Whether the gradient of a key's rotary columns, a tensor that heads share, is computed."""
        return "rope" in self.wanted and any(s.source == "rope" for s in self.parts.qk)

    @property
    def wants_dscores(self) -> bool:
        """Whether a kernel that owns keys needs the gradients of scores."""
        return self.wants_dkey or "column" in self.sums

    @property
    def score_text(self) -> str:
        return "scale * Q K^T" if self.traits.linear else "score(Q K^T)"

    def kept(self, what: str) -> str:
        """Weights, or their gradients, where dropout takes some."""
        return f"drop({what})" if self.traits.drops else what

    @property
    def sink_text(self) -> str:
        return "; the sink is in both" if self.traits.sink else ""

    @property
    def running(self) -> list[str]:
        """What a forward keeps of each row besides the output."""
        return [self.rows("max"), self.rows("sum")] if self.traits.normalizer.saves_lse else []

    @property
    def results(self) -> str:
        """What a forward stores."""
        if self.traits.normalizer.saves_lse:
            return f"{self.output('O / sum')}, {self.rows('lse = max + log(sum)')}{self.sink_text}"
        return self.output("O")

    def saved(self, *names: str) -> list[str]:
        """Those of a row's statistics, lse and delta, that a backward has."""
        return [self.rows(name) for name in names] if self.traits.normalizer.saves_lse else []

    def weights(self, place: str = "") -> str:
        """How a forward finds the weights of a tile, and where they lie if that is worth a word."""
        weight = self.traits.normalizer.weight
        return f"P = {weight}{place}" if weight else f"new max; P = exp2(S - max){place}; sum and O rescaled"

    @property
    def mask_text(self) -> str:
        return "; mask on edge tiles only" if self.traits.masked else "; lengths checked on edge tiles only"


def columns(segments: tuple[Segment, ...]) -> str:
    return " + ".join(f"{s.block}" if s.block == s.width else f"{s.block} ({s.width} used)" for s in segments)


IN, AHEAD, _OUT = "HBM -> SRAM", "HBM -> SRAM, ahead", "registers -> HBM"
EACH_KV, EACH_Q, ONCE = "key tile", "query tile", "program"


def loads(key: str, what: str, per: str, moves: str = IN) -> Stage:
    return Stage(f"load {key}", "load", what, moves, per)


def keeps(key: str, what: str, per: str = ONCE) -> Stage:
    return Stage(f"keep {key}", "keep", what, "registers", per)


def computes(key: str, what: str, per: str) -> Stage:
    return Stage(f"compute {key}", "compute", what, "", per)


def stores(key: str, what: str, per: str = ONCE) -> Stage:
    return Stage(f"store {key}", "store", what, _OUT, per)


KEY_SUMS = "sums for operands, one a key"
SINK_SUMS = "sums over these rows for what the sink reads: -exp(sink - lse) * delta"


def sink_sums(t: Tiles, ragged: bool = False) -> list[Stage]:
    """Rows of sequences with lengths find their sink in the kernel that knows whose they are."""
    return [stores("sinks", SINK_SUMS)] if t.sinks and t.ragged == ragged else []


def error_of_delta(t: Tiles, per: str = ONCE) -> list[Stage]:
    """What rounding took from the output, as sums over a row's keys show it (freed.py)."""
    what = "what rounding of O left in delta, from rowsum(P * dP); sums for operands, less that"
    return [computes("error", what, per)] if "freed" in t.sums else []


def weights_text(t: Tiles) -> str:
    if not t.traits.normalizer.saves_lse:
        return t.weights()
    return f"P = exp2({'scale * S' if t.traits.linear else 'score(S)'} - lse)"


def key_results(t: Tiles) -> list[str]:
    return ([t.dkey()] if t.wants_dkey else []) + ([t.value("dV")] if "value" in t.wanted else [])


def dscore(t: Tiles) -> str:
    dscore = "P * (dP - delta)" if t.traits.normalizer.saves_lse else "P' * dP"
    return dscore + ("" if t.traits.linear else " * score'")
