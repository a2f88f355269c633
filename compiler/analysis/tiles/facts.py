"""What is proven about a variant, each fact worked out when first asked for.

A warm start needs the cheap facts only; the derivatives, which need sympy, are asked for by code generation alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce

from ....ir.attention import Attention
from ....ir.canonical import canonical
from ....ir.expr import Call, Const, Expr, Load, Symbol, call, symbol
from ....ir.walk import loads, nodes, substitute, symbols
from ..values.affine import const, make
from ..values.defined import is_below_inf, is_below_inf_at_last, is_clearly_positive, is_number, largest
from ..values.distances import DISTANCE, ByDistance, parts_by_distance, with_tables
from ..values.magnitudes import NEAR_0, holds, size
from ..values.places import POSITIONS, by_difference, index_symbols, rows_of_boxes
from .bounds import anywhere, kv_bounds, q_bounds
from .measured import measuring
from .pair_work import slope_work_of, torch_slope_work_of, torch_work_of, work_of
from .programs import tile_program
from .results import (
    BehindRows,
    Bounds,
    GradientKind,
    Measuring,
    OperandGradient,
    TileProgram,
    TileSource,
    TorchWork,
    Traits,
    Work,
)
from .survey import Survey, survey


@dataclass(frozen=True)
class Facts:
    """Facts about one variant; see "The symbolic border" in docs/design.md."""

    attention: Attention
    in_order: bool = True  # positions of keys and queries are row numbers, so that they bound tiles of rows

    @cached_property
    def _unordered(self) -> Facts:
        return Facts(self.attention, in_order=False)

    def with_order(self, in_order: bool) -> Facts:
        """The facts where rows have positions in order, or else in any order: then tiles tell nothing of positions."""
        return self if in_order == self.in_order else self._unordered if self.in_order else facts_of(self.attention)

    @cached_property
    def linear_scale(self) -> Expr | None:
        """c when the score is c * qk, however it is written, with a c that is one number for a head; else None."""
        written = _linear_factor(self.attention.canonical.folded_score)
        return self._slope_where_linear if written is None else written

    @cached_property
    def _slope_where_linear(self) -> Expr | None:
        """d score / d qk where that is one number for a head, and the score is 0 where q.k is."""
        score = self.attention.canonical.folded_score
        if not _may_be_linear(score):
            return None
        from ..values.symbolic import simplify  # lazy: imports sympy, which plain scores do without

        slope = self.score_derivative
        if symbols(slope) & {"qk", "q_pos", "kv_pos"}:
            return None
        rest = simplify(call("sub", score, call("mul", slope, symbol("qk"))))
        return slope if isinstance(rest, Const) and rest.value == 0 else None

    @cached_property
    def scale_and_rest(self) -> tuple[Expr, Expr] | None:
        """(c, rest) where the score is c * qk + rest: c is one number for a head, and rest knows nothing of q.k.

        None for other scores, where there is no rest, and where c is read from a tensor. Found without sympy: calls are
        prepared by it.
        """
        factor, rest = self._factor_and_rest
        return None if factor is None or not rest or loads(factor) else (factor, reduce(partial(call, "add"), rest))

    @cached_property
    def _factor_and_rest(self) -> tuple[Expr | None, list[Expr]]:
        """c, where one term of the score has q.k, and is c * qk with a c that is one number for a head; other terms."""
        terms = [*_terms(self.attention.canonical.folded_score)]
        with_qk = [term for term in terms if "qk" in symbols(term)]
        factor = _linear_factor(with_qk[0]) if len(with_qk) == 1 else None
        return factor, [term for term in terms if "qk" not in symbols(term)]

    @cached_property
    def scale_sign_unknown(self) -> bool:
        """Whether the factor of a linear score may be negative or 0 at run time, by underflow too."""
        return self.linear_scale is not None and not is_clearly_positive(self.linear_scale)

    @cached_property
    def scores_lie_far(self) -> bool:
        """Whether all scores of a row may lie so far from 0 that their log-sum-exp cannot be told in 32 bits.

        As under a bias of -1e9 for padding. Then the row's maximum and the log of its sum are saved apart. Where every
        query sees the key at its own position, it is enough that this score is near: what falls with distance, as
        ALiBi does, leaves it there.
        """
        score, mask = self.attention.canonical.folded_score, self.attention.canonical.folded_mask
        if not self.attention.canonical.weighs.saves_lse or self.linear_scale is not None or size(score) <= NEAR_0:
            return False
        own = {"kv_pos": symbol("q_pos")}
        return not (holds(substitute(mask, own)) and size(substitute(score, own)) <= NEAR_0)

    @cached_property
    def first_key_is_seen(self) -> bool:
        """Whether every query, at a position of 0 or more, sees key 0 for certain."""
        # an absolute value is known to be no less than 0, which a position is not
        return holds(
            substitute(
                self.attention.canonical.folded_mask, {"kv_pos": const(0), "q_pos": make("abs", symbol("q_pos"))}
            )
        )

    @cached_property
    def kv_bounds(self) -> Bounds:
        bounded = self.in_order or not self.attention.canonical.is_masked
        return kv_bounds(self.attention.canonical.folded_mask) if bounded else anywhere("kv")

    @cached_property
    def q_bounds(self) -> Bounds:
        bounded = self.in_order or not self.attention.canonical.is_masked
        return q_bounds(self.attention.canonical.folded_mask) if bounded else anywhere("q")

    @cached_property
    def kv_tiles(self) -> TileProgram:
        return tile_program(self.kv_bounds)

    @cached_property
    def q_tiles(self) -> TileProgram:
        return tile_program(self.q_bounds)

    @cached_property
    def survey(self) -> Survey | None:
        """What to measure on the device to narrow the ranges of tiles; None where positions alone say all, or nothing.

        For masks that read tensors by position, whose values no bound can know before the call.
        """
        reads = loads(self.attention.canonical.folded_mask) if self.in_order else ()
        if not any(symbols(index) & {"q_pos", "kv_pos"} for load in reads for index in load.index):
            return None
        if self.kv_bounds.closed_form and self.q_bounds.closed_form:
            return None
        found = survey(self.attention.canonical.folded_mask)
        measured = (*found.q_values, *found.kv_values) if found else ()
        joins = found is not None and found.joins_reads
        return found if joins or any(loads(value) for value in measured) else None

    @cached_property
    def tile_source(self) -> TileSource:
        """Where kernels for GPUs learn which tiles to visit.

        From positions alone; from runs of tiles that are measured in each call; or, where a tensor is read by both
        positions, so that what a tile sees may lie anywhere, from lists of tiles.
        """
        if self.survey is None:
            return "program"
        return "lists" if self.survey.joins_reads else "spans"

    def _measuring(self) -> Measuring | None:
        if self.survey is None:  # tiles are asked for below only: a warm start does without
            return None
        return measuring(self.survey, self.kv_tiles, self.q_tiles, by_head=self.mask_differs_by_head)

    @cached_property
    def mask_differs_by_head(self) -> bool:
        return bool(symbols(self.attention.canonical.folded_mask) & {"head", "kv_head"})

    @cached_property
    def gradient_kinds(self) -> tuple[tuple[Load, GradientKind], ...]:
        """Each read of a float tensor in the score, and then in the sink, and how its gradient is reduced."""
        reads = self.attention.canonical.gradient_loads
        of_score: list[tuple[Load, GradientKind]] = [(r, _gradient_kind(r, self.in_order)) for r in reads]
        return (*of_score, *((load, "sink") for load in self.attention.canonical.sink_loads))

    @cached_property
    def score_derivative(self) -> Expr:
        """d score / d qk."""
        from ..values.symbolic import derivative  # lazy: imports sympy

        return derivative(self.attention.canonical.folded_score, symbol("qk"))

    @cached_property
    def score_by_distance(self) -> tuple[ByDistance, ...]:
        """Parts of the score that are worth a table by q_pos - kv_pos."""
        return parts_by_distance([self.attention.canonical.folded_score]) if self.in_order else ()

    @cached_property
    def boxed_read(self) -> Load | None:
        """The first read of the score of which a tile of pairs reads a box of a tensor."""
        reads = loads(self.attention.canonical.folded_score) if self.in_order else ()
        return next((r for r in reads if r.dtype == "float" and rows_of_boxes(r) is not None), None)

    @cached_property
    def scale_beside_box(self) -> Expr | None:
        """c, where the score is c * qk, plus what `boxed_read` reads, plus what knows of neither; else None.

        c is one number for a launch: neither heads nor reads decide it. Found without sympy: calls are prepared by it.
        """
        read = self.boxed_read
        if read is None:
            return None
        factor, rest = self._factor_and_rest
        others = [term for term in rest if term.text != read.text]
        is_read_elsewhere = any(load.text == read.text for term in others for load in loads(term))
        return None if len(rest) - len(others) != 1 or is_read_elsewhere else _of_a_launch(factor)

    def score_of_levels(self, tables: Sequence[ByDistance]) -> tuple[Expr, Expr] | None:
        """(c, rest), where the score is c * qk + rest, and rest is one number for a head wherever these tables are.

        c is one number for a launch. The rest is over the symbols of the tables. Found without sympy, as above.
        """
        factor, terms = self._factor_and_rest
        factor, rest = _of_a_launch(factor), [with_tables(term, tables) for term in terms]
        if factor is None or not rest or any(symbols(term) & POSITIONS for term in rest):
            return None
        return factor, reduce(partial(call, "add"), rest)

    def slope_with(self, tables: Sequence[ByDistance]) -> Expr:
        """d score / d qk over the symbols of these tables: none of them has qk in it."""
        if not tables:
            return self.score_derivative
        from ..values.symbolic import derivative  # lazy: imports sympy

        return derivative(with_tables(self.attention.canonical.folded_score, tables), symbol("qk"))

    @cached_property
    def largest_slope(self) -> float:
        """A bound on d score / d qk for all run-time values; inf where none is known."""
        return largest(self.score_derivative)

    def slope_is_finite(self, empty: bool = False) -> bool:
        """Whether d score / d qk is finite for all run-time values; else 0 * inf may be NaN where a weight is 0.

        empty: also in sequences of length 0.
        """
        if self.linear_scale is not None:
            return True
        return self.largest_slope < math.inf and (not empty or largest(self.score_derivative, empty) < math.inf)

    def behind_rows(self, tables: Sequence[ByDistance] = ()) -> BehindRows:
        """What scores are behind the last row, where kernels evaluate them, too, if all of rows have a value.

        tables: what they read by distance, which goes on behind the last row, and holds what pairs need not have read.
        """
        if self.linear_scale is not None:
            return "numbers"
        reads = any(DISTANCE in symbols(index) for t in tables for load in loads(t.value) for index in load.index)
        return "anything" if tables and (reads or self._behind_rows != "numbers") else self._behind_rows

    @cached_property
    def _behind_rows(self) -> BehindRows:
        score = self.attention.canonical.folded_score
        return "numbers" if is_below_inf(score) else "as the last" if is_below_inf_at_last(score) else "anything"

    def factor_is_defined(self, tables: Sequence[ByDistance] = ()) -> bool:
        """Whether the factors of q.k that are one number for a head are finite, also in a sequence of length 0."""
        levels = self.score_of_levels(tables)
        known = (self.linear_scale, self.scale_beside_box, None if levels is None else levels[0])
        return all(f is None or is_number(f) or not symbols(f) & {"q_len", "kv_len"} for f in known)

    def sums_pairs(self, wanted: frozenset[str]) -> bool:
        """Whether a wanted gradient of an operand may be summed faster in any order."""
        return any(kind == "pair" and load.tensor.name in wanted for load, kind in self.gradient_kinds)

    def operand_gradients(self, operands: frozenset[str]) -> tuple[OperandGradient, ...]:
        """Gradients of the reads of these tensor operands, the sink's last."""
        known = self._load_derivatives
        found = [(load, kind) for load, kind in self.gradient_kinds if load.tensor.name in operands]
        if not found:
            return ()
        from ..values.symbolic import derivative  # lazy: imports sympy, which a score without reads does without

        for load, kind in found:
            if (load.text, kind) not in known:
                root = self.attention.canonical.folded_sink if kind == "sink" else self.attention.canonical.folded_score
                assert root is not None
                known[load.text, kind] = derivative(root, load)
        return tuple(OperandGradient(load, kind, known[load.text, kind]) for load, kind in found)

    @cached_property
    def _load_derivatives(self) -> dict[tuple[str, GradientKind], Expr]:
        """d score / d load or d sink / d load, by the load's text and kind: each is asked for in every backward."""
        return {}

    @cached_property
    def bounds_differ_by_head(self) -> bool:
        """Whether the tiles to visit depend on the head or the batch row."""
        values = [line.value for line in self.kv_tiles.body + self.q_tiles.body]
        return any(symbols(value) & {"head", "kv_head", "batch"} or loads(value) for value in values)

    @cached_property
    def score_reads_positions(self) -> bool:
        return bool(symbols(self.attention.canonical.folded_score) & {"q_pos", "kv_pos"})

    @cached_property
    def loads_at_positions(self) -> bool:
        """Whether the score or the mask reads a tensor by position."""
        reads = loads(self.attention.canonical.folded_score) + loads(self.attention.canonical.folded_mask)
        return any(symbols(index) & {"q_pos", "kv_pos"} for load in reads for index in load.index)

    def _reading(self, traits: Traits, tables: Sequence[ByDistance] = (), doubles: bool = False) -> Traits:
        """With the bytes that score and mask read for each pair, head and key, key, and query.

        Each element is as wide as its kind can be in SRAM. doubles: floats may have 64 bits.
        """
        widths = {"float": 8 if doubles else 4, "int": 8, "bool": 1}
        score = with_tables(self.attention.canonical.folded_score, tables)
        found = dict.fromkeys(("pair", "head", "key", "query"), 0)
        for load in {load.text: load for load in loads(score) + loads(self.attention.canonical.folded_mask)}.values():
            read_at = frozenset[str]().union(*(symbols(index) for index in load.index))
            if "kv_pos" in read_at:
                other = "pair" if "q_pos" in read_at else "head" if "head" in read_at else "key"
                found[other] += widths[load.dtype]
            elif "q_pos" in read_at:
                found["query"] += widths[load.dtype]
        return replace(
            traits, pair_bytes=found["pair"], head_bytes=found["head"], key_bytes=found["key"],
            query_bytes=found["query"],
        )  # fmt: skip

    def traits_with(self, tables: Sequence[ByDistance], doubles: bool = False) -> Traits:
        """The traits of kernels that read these tables: nothing of them passes through SRAM. doubles: as above."""
        return self._reading(self.traits, tables, doubles) if tables or doubles else self.traits

    @cached_property
    def traits(self) -> Traits:
        """What the scheduler and the cost model need to know."""
        made = Traits(
            linear=self.linear_scale is not None,
            adds=self.scale_and_rest is not None,
            masked=self.attention.canonical.is_masked,
            operand_gradients=len(self.attention.canonical.gradient_loads),
            positional=self.score_reads_positions or self.loads_at_positions,
            normalizer=self.attention.canonical.weighs,
            sink=self.attention.canonical.folded_sink is not None,
            drops=self.attention.canonical.drops,
            far=self.scores_lie_far,
            measured=self._measuring(),
            score_work=self._works[0],
            slope_work=self._works[1],
            mask_work=self._works[2],
            score_torch=TorchWork()
            if self.linear_scale is not None
            else torch_work_of([self.attention.canonical.folded_score]),
            slope_torch=TorchWork()
            if self.linear_scale is not None
            else torch_slope_work_of(self.attention.canonical.folded_score),
            mask_torch=torch_work_of([self.attention.canonical.folded_mask]),
        )
        return self._reading(made)

    @cached_property
    def _works(self) -> tuple[Work, Work, Work]:
        """What score, slope and mask of a pair take, where parts of the score are read by distance."""
        score, mask = self.attention.canonical.folded_score, self.attention.canonical.folded_mask
        if self.linear_scale is not None:
            return Work(), Work(), work_of([mask])
        parts = self.score_by_distance
        score = with_tables(score, parts)
        return work_of([score], tables=len(parts)), slope_work_of(score), work_of([mask])


@lru_cache(maxsize=1024)
def facts_of(attention: Attention) -> Facts:
    """The facts of a variant, shared by all its equals."""
    return Facts(attention)


def _linear_factor(score: Expr) -> Expr | None:
    """c of a score that is written as a product c * qk, with a c that is one number for a head."""
    factor = without_qk(score)
    if factor is None or symbols(factor) & {"qk", "q_pos", "kv_pos"}:
        return None
    return canonical(factor)


def _of_a_launch(factor: Expr | None) -> Expr | None:
    """The factor, where it is one number for a launch: neither heads nor reads decide it."""
    if factor is None or symbols(factor) & {"batch", "head", "kv_head"} or loads(factor):
        return None
    return factor


def without_qk(node: Expr) -> Expr | None:
    """What a product multiplies qk by: (2 * qk) / t -> 2 / t. None where the node is no such product."""
    match node:
        case Symbol("qk"):
            return Const(1.0)
        case Call("neg" | "mul" | "div" as op, args):
            over = [n for n, a in enumerate(args) if "qk" in symbols(a)]
            if len(over) == 1 and not (op == "div" and over == [1]):
                inner = without_qk(args[over[0]])
                return None if inner is None else call(op, *(inner if n in over else a for n, a in enumerate(args)))
    return None


def _terms(node: Expr) -> Iterator[Expr]:
    """What a sum adds up."""
    match node:
        case Call("add", args):
            for each in args:
                yield from _terms(each)
        case Call("sub", (a, b)):
            yield from _terms(a)
            yield call("neg", b)
        case _:
            yield node


def _may_be_linear(score: Expr) -> bool:
    """A cheap look: sums, products and quotients of qk and what a head shares."""
    if score.dtype != "float" or symbols(score) & {"q_pos", "kv_pos"}:
        return False
    over_qk = (n for n in nodes(score) if isinstance(n, Call) and "qk" in symbols(n))
    return all(n.op in ("add", "sub", "mul", "div", "neg") for n in over_qk)


def _gradient_kind(load: Load, in_order: bool) -> GradientKind:
    """in_order: the pairs of a diagonal of tiles are at few distances."""
    used = index_symbols(load) & POSITIONS
    if used == POSITIONS:
        return "diagonal" if in_order and by_difference(load) else "pair"
    return "total" if not used else "row" if "q_pos" in used else "column"
