"""What analysis proved about a variant, as small frozen records: what it hands to planning and code generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ....ir.expr import Expr, Load
from ....ir.normalizer import SOFTMAX, Normalizer

Axis = Literal["kv", "q"]
TileSource = Literal["program", "spans", "lists"]  # where the tiles come from that a kernel visits


@dataclass(frozen=True)
class Interval:
    """Positions [lo, hi) outside which a tile of the other axis sees nothing; in [full_lo, full_hi) it sees everything.

    Expressions over the ends of the tile (`q_first`, `q_last` or `kv_first`, `kv_last`, positions, inclusive),
    lengths, heads, batch and operands; any order of the ends may hold at run time (empty when lo >= hi).
    """

    lo: Expr
    hi: Expr
    full_lo: Expr
    full_hi: Expr


@dataclass(frozen=True)
class Bounds:
    """Where a tile must look. Sound: nothing visible lies outside the intervals, nothing hidden in their full parts."""

    axis: Literal["kv", "q"]  # the axis that the intervals lie on
    intervals: tuple[Interval, ...]  # may overlap at run time; the tile program makes them disjoint
    notes: tuple[str, ...]  # the parts of the mask without a closed form, for `explain`

    @property
    def closed_form(self) -> bool:
        return not self.notes


@dataclass(frozen=True)
class Assign:
    """One line of a tile program: `name = value`, integers only."""

    name: str
    value: Expr
    comment: str = ""


@dataclass(frozen=True)
class TileProgram:
    """Straight-line integer code that turns a tile's ends into ranges of tile indices on the other axis.

    Symbols it reads besides those of Bounds: `block` (tile size on the axis), `length` (kv_len, or q_len), and for the
    q axis `q_offset`. Names it defines: n_edge, n_full, and lo<k>, full_lo<k>, full_hi<k>, hi<k> for each interval.
    """

    axis: Literal["kv", "q"]
    body: tuple[Assign, ...]
    outputs: tuple[str, ...]  # ("lo0", "full_lo0", "full_hi0", "hi0", "lo1", ...)
    edge_tile: Expr  # over symbol `i` and the outputs: index of the i-th edge tile
    full_tile: Expr  # likewise: index of the i-th full tile


class MeasuredAxis(NamedTuple):
    """What is measured of the tiles of one axis."""

    ranges: int  # of its tiles that a tile of the other axis may visit
    reads: int  # of tensors at a position
    values: int = 0  # of which the least and greatest in a tile is found: not positions themselves
    bits: int = 0  # those of them of which 64 bits say what is not among them, too


@dataclass(frozen=True)
class Measuring:
    """What the cost of measuring tiles depends on besides sizes (measured.py)."""

    by_head: bool  # for each head, because the mask differs by head; else for each batch row
    kv: MeasuredAxis
    q: MeasuredAxis
    source: Literal["spans", "lists"] = "spans"  # runs of tiles, or lists of them
    cells: int = 0  # conditions that are looked at once a block of pairs
    cell_rows: int = 0  # queries of the smallest of these blocks
    by_pair: bool = False  # and one that is looked at for each pair

    def of(self, axis: Axis) -> MeasuredAxis:
        return self.kv if axis == "kv" else self.q


# Scores of rows that do not exist: numbers or -inf; the same at the position of the last row; or any, also NaN.
BehindRows: TypeAlias = Literal["numbers", "as the last", "anything"]
GradientKind: TypeAlias = Literal["total", "row", "column", "diagonal", "pair", "sink"]
PAIR_KINDS = frozenset({"diagonal", "pair"})  # kinds of reads whose index has both positions


@dataclass(frozen=True)
class OperandGradient:
    """How the gradient of one read of a float tensor is reduced inside the kernels."""

    load: Load
    # indexed by heads and batch only; by q_pos too; by kv_pos too; by q_pos - kv_pos; by both; of the sink
    kind: GradientKind
    derivative: Expr  # d score' / d load, over qk; d sink / d load


@dataclass(frozen=True)
class TileCounts:
    """Tiles of the whole problem by class."""

    empty: int  # never visited
    edge: int  # the mask or the length check is evaluated
    full: int  # no mask code
    level_edge: int = 0  # of the edge tiles, those whose pairs all read alike by distance
    level_full: int = 0  # of the full ones

    @property
    def visited(self) -> int:
        return self.edge + self.full

    @property
    def uneven(self) -> TileCounts:
        """Without tiles of level pairs."""
        level = self.level_edge + self.level_full
        return TileCounts(self.empty + level, self.edge - self.level_edge, self.full - self.level_full)


@dataclass(frozen=True)
class Work:
    """Instructions of one pair of a query and a key."""

    special: int = 0  # results of special function units: exponentials, logarithms, reciprocals
    other: int = 0
    reads: int = 0  # of tensors, an element a pair
    gathers: int = 0  # of tables, at entries that neighbours share
    key_reads: int = 0  # of tensors, an element a key, which a tile of queries reads with each tile of keys
    query_reads: int = 0  # likewise


@dataclass(frozen=True)
class TorchWork:
    """Operations of torch over a tile of scores, whose prices differ by kind (planning/machines/rates.py)."""

    plain: int = 0  # sums, products and what else takes as long as reading and writing
    others: tuple[tuple[str, int], ...] = ()  # by kind: "exp2", "exp", "log", "tanh", ...
    shared: tuple[tuple[str, int], ...] = ()  # of positions alone, which heads share


@dataclass(frozen=True)
class Traits:
    """What the schedule and the cost depend on besides sizes."""

    linear: bool = True  # the score is a positive number times q.k
    adds: bool = False  # the score is a number times q.k, and what knows nothing of q.k is added
    masked: bool = True  # the mask is not True
    operand_gradients: int = 0  # tensor reads in the score that have a gradient
    positional: bool = False  # the score, or a tensor read in score or mask, depends on positions
    pair_bytes: int = 0  # of what score and mask read for each pair of a query and a key
    head_bytes: int = 0  # of what they read for each head and key: for each pair where a tile has rows of several heads
    key_bytes: int = 0  # of what they read for each key, whatever the head
    query_bytes: int = 0  # of what they read for each query
    normalizer: Normalizer = SOFTMAX
    sink: bool = False  # each row has one more logit, without a value
    drops: bool = False  # some weights are dropped
    far: bool = False  # scores may lie far from 0: rows have more statistics
    level_reads: int = 0  # reads whose gradients a backward sums apart where pairs read alike by distance
    level_steps: bool = False  # where a backward's pairs read alike by distance, full tiles have a loop of their own
    measured: Measuring | None = None  # what the mask reads is measured in each call, to find the tiles to visit
    score_work: Work = Work()  # beyond a multiple of q.k
    slope_work: Work = Work()  # of its derivative
    mask_work: Work = Work()
    score_torch: TorchWork = TorchWork()  # the same as torch computes them on a CPU
    slope_torch: TorchWork = TorchWork()
    mask_torch: TorchWork = TorchWork()


PLAIN = Traits()  # of softmax(q.k) without a mask
