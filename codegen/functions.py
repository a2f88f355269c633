"""The functions of a variant that kernels call: scores, visible, kv_tiles, q_tiles and their derivatives, as source.

Every kernel template, whatever its target, calls the same functions; only the dialect they are printed in differs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..compiler.analysis.tiles.facts import Facts
from ..compiler.analysis.tiles.programs import lookups
from ..compiler.analysis.tiles.results import PAIR_KINDS, Assign, OperandGradient, TileProgram, TileSource
from ..compiler.analysis.tiles.survey import Cells, Survey
from ..compiler.analysis.values.affine import is_bool
from ..compiler.analysis.values.cse import names_that_decide, of_positions, shared
from ..compiler.analysis.values.distances import DISTANCE, ByDistance, with_tables
from ..compiler.analysis.values.places import rows_of_boxes
from ..ir.attention import SEED, Attention
from ..ir.expr import Call, Const, Expr, Load, Scalar, Symbol, TensorOperand, call, symbol
from ..ir.operators import OPERATORS, Operator
from ..ir.philox import ALL_KEPT, TOGETHER, pairs_kept
from ..ir.walk import loads, nodes, rewrite, scalars, substitute, symbols
from .dialects import Dialect, Printer, axes
from .function_lines import AS_BOUND, AS_INT, HERE, IEEE, IN_RANGE, called, commented, returned, taken_from_here
from .function_values import LOG2_E, deciding_helpers, in_base_2, is_constant, last_of, within

_USUAL_SCALE = call("rsqrt", symbol("head_dim"))
# How weights of a tile are drawn: by its place; the same further on; where tiles begin anywhere, each pair by itself.
Draws = Literal["as they lie", "in step", "one by one"]
DESCALE = "descale"  # of products of FP8 numbers, where scores are handed these as they are
BY_PAIR = "by_pair"  # what each pair reads, where a tile of it lies in SRAM
SYMBOL_ARGUMENTS = ("batch", "head", "kv_head", "group", "q_len", "kv_len", "head_dim")


def parameter_names(attention: Attention, strides: bool, tables: Sequence[ByDistance] = ()) -> list[str]:
    """Names of the kernel arguments that carry operands; GPU kernels also take a tensor's strides, s0_<name>, ...

    tables: what they read by distance.
    """
    names = []
    for operand in attention.canonical.parameters:
        names.append(f"arg_{operand.name}")
        if strides and isinstance(operand, TensorOperand):
            names += [f"s{d}_{operand.name}" for d in range(operand.rank)]
    for n, table in enumerate(tables):
        strides_of = {f"distances{n}_sb": table.by_batch, f"distances{n}_sh": table.by_head}
        names += [f"distances{n}", *(stride for stride, read in strides_of.items() if read)]
    return [*names, "first_distance"] if tables else names


def _factor(node: Expr) -> int:
    """A number that divides the value of an int expression; 0 of 0."""
    match node:
        case Const(int() as value):
            return value
        case Call("mul", (Const(int() as value), _)):
            return value
    return 1


def surveyed_by_torch(facts: Facts) -> Survey | None:
    """What a module of torch code measures itself, of masks whose bounds leave some tiles over."""
    found = facts.survey
    return None if facts.kv_bounds.closed_form or found is None or is_bool(found.possible, True) else found


@dataclass(frozen=True)
class FunctionPrinter:
    """Prints the functions of one variant in one language."""

    facts: Facts
    language: Dialect
    approximate: bool = False  # by NVIDIA's tanh.approx.f32, sin.approx.f32: for 16-bit operands only
    source: TileSource = "program"  # of tiles: the functions of `survey` leave runs or lists of them in memory
    offsets_64: bool = False  # places in a tensor operand may lie 2**31 elements apart
    floats: str = "torch.float32"  # torch: the type that floats are computed in
    tables: tuple[ByDistance, ...] = ()  # what scores read by distance
    levels: tuple[Expr, Expr | None] | None = None  # slope and rest of a score where all pairs of a tile read alike
    boxed: Load | None = None  # what pairs read and scores are handed, because a tile of it lies in SRAM
    places_boxed: bool = False  # kernels store a gradient of it entry by entry
    descales: bool = False  # scores are handed products of FP8 numbers, and what these are multiplied by
    adds: bool = False  # score_scale and score_rest in place of scores: what a score is beside a multiple of q.k

    @property
    def base2(self) -> bool:
        """Whether scores are in units of log 2, as exp2 wants them; not those that may lie far from 0."""
        return self.language.is_gpu and not self.facts.scores_lie_far

    @property
    def env(self) -> str:
        """The arguments that each function ends with: on a GPU one, which has the others by their names."""
        return HERE if self.language.is_gpu else ", ".join(self.known)

    @property
    def here(self) -> str:
        """On a GPU: that argument, of the names that kernels have."""
        if not self.language.is_gpu:
            return ""
        line = f"Here({', '.join(self.known)})"
        if len(line) <= 100:
            return line
        return (
            f"Here(\n{textwrap.fill(', '.join(self.known), 110, initial_indent='    ', subsequent_indent='    ')},\n)"
        )

    @property
    def known(self) -> tuple[str, ...]:
        """What each function is told, by name."""
        return *SYMBOL_ARGUMENTS, *parameter_names(self.facts.attention, self.language.is_gpu, self.tables)

    @property
    def parts(self) -> tuple[ByDistance, ...]:
        """Parts of scores that are computed as they are written, by table or not, so that all kernels round alike."""
        return self.tables or (self.facts.score_by_distance if self.language.is_gpu else ())

    def forward(self, algorithm: str = "flash") -> str:
        """scores or score_scale, visible, the tiles that the algorithm visits, and the helpers they need."""
        parts = [*self._scores([]), *self._mask_parts(), *self._sink_parts(), *self._dropout_parts()]
        parts += [self.box(self.boxed)] if self.boxed is not None else []
        match algorithm:
            case "flash" | "split_kv":
                parts += self._tiles_and_lookups(self.facts.kv_tiles)
            case "streaming":
                parts += self._prefixed_tiles(self.facts.q_tiles)
        return self._join([*parts, *self._survey_parts(self.survey_of_torch)])

    def backward(
        self, gradients: tuple[OperandGradient, ...], algorithm: str = "flash", elsewhere: frozenset[int] = frozenset()
    ) -> str:
        """The forward functions, their transpose and the derivatives.

        elsewhere: the numbers of gradients that no kernel of the module sums.
        """
        scale = self.facts.scale_beside_box if self.boxed is not None else None
        known = self.facts.linear_scale is not None or scale is not None or self.levels is not None or self.adds
        derivatives = [] if known else [
            ("dscores", self.facts.slope_with(self.parts), "d score / d (q.k), per natural unit of score.")
        ]  # fmt: skip
        # the gradient of what is handed as a tile is the gradient of the score
        numbered = [(i, g) for i, g in enumerate(gradients) if self.boxed is None or g.load.text != self.boxed.text]
        numbered = [(i, g) for i, g in numbered if i not in elsewhere]
        of_sink = [(f"dload_{i}", g.derivative, f"d sink / d {g.load}.") for i, g in numbered if g.kind == "sink"]
        derivatives += [(f"dload_{i}", g.derivative, f"d score / d {g.load}.") for i, g in numbered if g.kind != "sink"]
        parts = [*self._scores(derivatives), *self._mask_parts(), *self._dropout_parts()]
        if self.language.module != "gl":  # kernels in Gluon leave sums of pairs to others
            parts += [self.place(f"place_{i}", g.load) for i, g in numbered if g.kind in PAIR_KINDS]
        parts += [self.box(self.boxed)] if self.boxed is not None else []
        if self.boxed is not None and self.places_boxed:
            parts.append(self.place("place_of_pairs", self.boxed))
        if scale is not None:
            title = "d score / d (q.k), per natural unit of score: one number."
            parts.append(self.elementwise("score_slope", scale, title, tile=False))
        parts += self._of_levels(*self.levels) if self.levels is not None else []
        if of_sink:
            parts += [*self._sink_parts(), *(self.elementwise(*each, tile=False) for each in of_sink)]
        if algorithm == "flash":
            parts += self._prefixed_tiles(self.facts.kv_tiles)
        if algorithm != "standard" and self.language.is_gpu:
            parts += self._prefixed_tiles(self.facts.q_tiles)
        if self.source != "program" and any(g.kind in PAIR_KINDS for g in gradients):
            parts.append(self.tiles(self.facts.kv_tiles))  # of kernels that visit tiles of other sizes
        return self._join([*parts, *self._survey_parts(self.survey_of_torch)])

    def survey(self, found: Survey) -> str:
        """What measures tiles: q_values, kv_values, the decision `pair`, and the ranges that follow from positions."""
        parts = [*self._survey_parts(found), self.tiles(self.facts.kv_tiles), self.tiles(self.facts.q_tiles)]
        return self._join([*parts, *(self._mask_parts() if found.by_pair else [])])

    def _survey_parts(self, found: Survey | None) -> list[str]:
        if found is None:
            return []
        parts = [self.values("q", found.q_values), self.values("kv", found.kv_values), *self._cells(found.cells)]
        return [part for part in (*parts, self.pair(found) if found.decides else "") if part]

    def _cells(self, found: tuple[Cells, ...]) -> list[str]:
        """cells<n>: the conditions that are looked at once a block of pairs."""
        title = "The same for all pairs of a block of {0.q} queries and {0.kv} keys: {0.condition}."
        return [self.elementwise(f"cells{n}", c.condition, title.format(c), qk=False) for n, c in enumerate(found)]

    @property
    def survey_of_torch(self) -> Survey | None:
        """What a module of torch code measures itself: on a CPU, of masks whose bounds leave some tiles over."""
        return None if self.language.is_gpu else surveyed_by_torch(self.facts)

    def _prefixed_tiles(self, program: TileProgram) -> list[str]:
        return self._tiles_and_lookups(program, prefix=f"{program.axis}_")

    def _tiles_and_lookups(self, program: TileProgram, prefix: str = "") -> list[str]:
        if self.source == "lists":
            return []  # the same for all variants: templates/triton/parts/visits.py.jinja
        if self.source == "program":
            return [self.tiles(program), *self._tile_lookups(program, prefix)]
        return [self.tiles_at(program), *self._tile_lookups(lookups(program), prefix)]

    # -- elementwise functions -----------------------------------------------------------------------------------------
    def _scores(self, derivatives: list[tuple[str, Expr, str]]) -> list[str]:
        """Score or scale, and derivatives by name and title; on a CPU also what these share over all heads."""
        scale = self.facts.linear_scale
        unit = ", times log2(e)" if self.base2 else ""
        texts, found = [], list(derivatives)
        both = self.facts.scale_and_rest if self.adds else None
        if both is not None:
            scale, rest = both
            found.insert(0, ("score_rest", rest, f"What the score is beside score_scale times q.k: {rest}"))
        if scale is not None:
            title = "The score is score_rest and this times q.k." if both else f"The score is this times q.k{unit}."
            texts.append(self.elementwise("score_scale", self._in_units(scale), title, tile=False, is_factor=True))
        else:
            score = self.facts.attention.canonical.folded_score
            products = {"qk": call("mul", symbol("qk"), Symbol(DESCALE, "float"))} if self.descales else {}
            value = self._in_units(self._with_given(substitute(score, products)))
            found.insert(0, ("scores", value, f"The score{unit}: {score}"))
        if self.language.is_gpu or not found:
            return texts + [self.elementwise(*each) for each in found]
        parts, values = of_positions([value for _, value, _ in found])
        names = "".join(f"{name.name}, " for name, _ in parts)
        texts.append(self._parts(parts))
        return texts + [
            self.elementwise(name, value, title, qk=name != "score_rest", parts=names)
            for (name, _, title), value in zip(found, values)
        ]

    def _with_given(self, node: Expr) -> Expr:
        """The expression over what scores are handed: reads by distance, and of pairs."""
        node, boxed = with_tables(node, self.parts), self.boxed
        if boxed is None:
            return node
        return rewrite(node, lambda n: Symbol(BY_PAIR, "float") if n.text == boxed.text else None)

    def _parts(self, parts: list[tuple[Symbol, Expr]]) -> str:
        """of_positions: what scores and derivatives compute from positions alone, a tuple."""
        lines, printer, values = self._assigned([value for _, value in parts])
        texts = [
            printer.tile(value) if name.dtype == "float" else printer(value) for (name, _), value in zip(parts, values)
        ]
        lines.append(f"return ({', '.join(texts)}{',' * (len(texts) == 1)})")
        title = "What scores of all heads share: " + ("; ".join(value.text for _, value in parts) or "nothing") + "."
        return self._function(f"of_positions(q_pos, kv_pos, {self.env})", title, lines)

    def _in_units(self, node: Expr) -> Expr:
        if node.text == _USUAL_SCALE.text:  # as simple as can be, and what most variants have
            return call("mul", Const(LOG2_E), node) if self.base2 else node
        from ..compiler.analysis.values.symbolic import simplify  # lazy: imports sympy, which a warm start does without

        if self.base2 and self.language.module == "gl" and not self.facts.attention.canonical.weighs.saves_lse:
            return in_base_2(simplify(node))  # an instruction a pair is a larger part there
        return simplify(call("mul", node, Const(LOG2_E)) if self.base2 else node)

    def _mask_parts(self) -> list[str]:
        mask = self.facts.attention.canonical.folded_mask
        if not self.facts.attention.canonical.is_masked:
            return []
        title = "True where the query at q_pos sees the key at kv_pos."
        known = self.cells_of_tiles
        if not known:
            return [self.elementwise("visible", mask, title, qk=False)]
        names = {c.condition.text: Symbol(f"in_cells{n}", "bool") for n, c in enumerate(known)}
        mask = rewrite(mask, lambda node: names.get(node.text))
        parts = "".join(f"in_cells{n}, " for n in range(len(known)))
        return [*self._cells(known), self.elementwise("visible", mask, title, qk=False, parts=parts)]

    @property
    def cells_of_tiles(self) -> tuple[Cells, ...]:
        """Conditions of the mask that are the same in blocks of pairs: kernels that visit listed tiles look at them by
        themselves, because a tile lies in few blocks, and a read for each of its pairs wants many registers."""
        found = self.facts.survey
        return found.cells if self.source == "lists" and found is not None else ()

    def _sink_parts(self) -> list[str]:
        sink = self.facts.attention.canonical.folded_sink
        if sink is None:
            return []
        return [self.elementwise("sink_logit", sink, f"The sink of a head, in natural units: {sink}", tile=False)]

    def _dropout_parts(self) -> list[str]:
        """dropout_of: the seed, and how many of 32768 pairs are kept."""
        attention = self.facts.attention
        if not attention.canonical.drops:
            return []
        seed = f"arg_{SEED.name}"
        seed = f"{self.language.module}.load({seed})" if self.language.is_gpu else seed
        if not isinstance(attention.dropout, Scalar):
            kept = str(pairs_kept(attention.dropout))
        elif self.language.is_gpu:
            m = self.language.module
            rate = f"((1.0 - arg_{attention.dropout.name}) * {ALL_KEPT}.0 + 0.5).to({m}.int32)"
            kept = f"{m}.minimum({m}.maximum({rate}, 1), {ALL_KEPT})"
        else:
            kept = f"pairs_kept(arg_{attention.dropout.name})"
        title = f"The seed of this call, and how many of {ALL_KEPT} pairs are kept."
        given = ", ".join(self.dropout_arguments) if self.language.is_gpu else self.env
        return [self._function(f"dropout_of({given})", title, [f"return {seed}, {kept}"]), *self._origin_parts()]

    def _origin_parts(self) -> list[str]:
        """origin_of: where in the whole call a part counts from."""
        if not self.facts.attention.canonical.folded_origin:
            return []
        lines, printer, values = self._assigned(list(self.facts.attention.canonical.folded_origin))
        title = "The position, head and batch row of the whole call that 0 stands for."
        return [self._function(f"origin_of({self.env})", title, [*lines, *returned([printer(v) for v in values])])]

    @property
    def draws(self) -> Draws:
        """By which positions weights are dropped."""
        origin = self.facts.attention.canonical.folded_origin
        return "as they lie" if not origin else "in step" if _factor(origin[0]) % TOGETHER == 0 else "one by one"

    @property
    def dropout_arguments(self) -> tuple[str, ...]:
        """Names of what dropout_of takes on a GPU."""
        rate = self.facts.attention.dropout
        return *((f"arg_{rate.name}",) if isinstance(rate, Scalar) else ()), f"arg_{SEED.name}"

    def elementwise(
        self, name: str, value: Expr, title: str, tile: bool = True, qk: bool = True, parts: str = "",
        is_factor: bool = False,
    ) -> str:  # fmt: skip
        """One function from a tile of scores and positions to a tile, or to what broadcasts to one.

        parts: names of what was computed from positions before. is_factor: kernels multiply by it and by log2(e).
        """
        of_scores = tile and qk
        value = self._with_given(value) if of_scores else value
        lines, printer, (result,) = self._assigned([value])
        lines = [*(self._by_distance(value) if of_scores else []), *lines]
        first = ("qk, " if qk else "") + f"q_pos, kv_pos, {parts}" if tile else ""
        first += f"{DESCALE}, " if of_scores and self.descales else ""
        first += f"{BY_PAIR}, " if of_scores and self.boxed is not None else ""
        first += "apart, " if of_scores and self.tables else ""  # how far the first query and key of a tile are
        text = printer(result) if value.dtype == "bool" or not tile else self._float_tile(printer, result, value)
        if is_factor and scalars(value) and self.floats == "torch.float32" and not self.language.is_gpu:
            text = f"in_range({text})" if printer.is_number(result) else text
        return self._function(f"{name}({first}{self.env})", title, [*lines, f"return {text}"])

    def _by_distance(self, value: Expr, by_tile: bool = True) -> list[str]:
        """Lines that make by_distance<n>, those that an expression has: read from tables, or computed.

        by_tile: by a tile of pairs, else at the distance `apart` alone.
        """
        lines, int64 = [], f"{self.language.module}.int64"
        for n, table in enumerate(self.parts):
            if f"by_distance{n}" not in symbols(value):
                continue
            if not self.tables:
                lines.append(f"by_distance{n} = {self._table_printer(n)(table.part)}")
                continue
            lines += textwrap.wrap(f"# {table.part}", 112, subsequent_indent="# ", break_long_words=False)
            of = {"batch": table.by_batch, "head": table.by_head}
            strides = {"batch": f"distances{n}_sb", "head": f"distances{n}_sh"}
            rows = [f"{self.language.module}.cast({name}, {int64}) * {strides[name]}" for name in of if of[name]]
            row = f"distances{n} + ({' + '.join([*rows, 'apart - first_distance'])})"
            read = f"read_by_distance({row}, q_pos, kv_pos)" if by_tile else f"{self.language.module}.load({row})"
            lines.append(f"by_distance{n} = {read}")
        return lines

    def _of_levels(self, slope: Expr, rest: Expr | None) -> list[str]:
        """level_slope and level_rest: the score at a distance where all pairs of a tile read alike."""
        title = "d score / d (q.k), per natural unit of score: one number."
        texts = [self.elementwise("level_slope", slope, title, tile=False)]
        if rest is None:
            return texts
        lines, printer, (result,) = self._assigned([rest])
        title = "What a score has beside q.k in a tile whose pairs all read alike, at the distance `apart`."
        lines = [*self._by_distance(rest, by_tile=False), *lines, f"return {printer(result)}"]
        return [*texts, self._function(f"level_rest(apart, {self.env})", title, lines)]

    def distance_values(self, indices: Sequence[Expr] = ()) -> str:
        """value<n>: what a table holds at each distance; index<n>: an index of what pairs read there."""
        named = [(f"value{n}", table.value, str(table.part)) for n, table in enumerate(self.tables)]
        named += [(f"index{n}", index, str(index)) for n, index in enumerate(indices)]
        own = replace(self, tables=())
        parts = []
        extents = "".join(f"{name}, " for name in self.extents_with(indices))
        for number, (name, value, text) in enumerate(named):
            lines, printer, (result,) = self._assigned([rewrite(value, within)], self._table_printer(number))
            lines.append(f"return {printer(result)}")
            title = f"Of distance = q_pos - kv_pos: {text}. Reads stay in their tensors."
            parts.append(own._function(f"{name}({DISTANCE}, {extents}{own.env})", title, lines))
        return own._join(parts)

    def extents_with(self, indices: Sequence[Expr] = ()) -> list[str]:
        """Names of the last index of each dimension of what tables, and these, read."""
        values = [*(table.value for table in self.tables), *indices]
        found = {load.text: load for value in values for load in loads(value)}
        return sorted({last_of(load, d) for load in found.values() for d in range(load.tensor.rank)})

    def place(self, name: str, load: Load) -> str:
        """Where a tile of pairs reads an operand: the number of the entry, by extents of all dimensions but the first.

        In torch, where extents are those of a given tensor, a tuple of its indices.
        """
        lines, printer, results = self._assigned(list(load.index))
        title = f"Which entry the pairs read: {load}."
        if not self.language.is_gpu:
            lines.append(f"return ({', '.join(map(printer, results))},)")
            return self._function(f"{name}(q_pos, kv_pos, {self.env})", title, lines)
        extents = [f"extent{d}" for d in range(1, len(results))]
        text = self._entry(printer(results[0])) if results else "0"
        for index, extent in zip(results[1:], extents):
            text = f"({text}) * {extent} + {printer(index, OPERATORS['add'].precedence + 1)}"
        arguments = "".join(f"{extent}, " for extent in extents)
        return self._function(f"{name}(q_pos, kv_pos, {arguments}{self.env})", title, [*lines, f"return {text}"])

    def box(self, load: Load) -> str:
        """Where a tile of pairs reads a box of a tensor, in the order of its descriptor: rows, columns last."""
        rows = rows_of_boxes(load)
        assert rows is not None
        order = [d for d in range(len(load.index) - 1) if d != rows] + [rows, len(load.index) - 1]
        lines, printer, results = self._assigned([load.index[d] for d in order])
        texts = [printer(i) if isinstance(i, Const) else f"gl.cast({printer(i)}, gl.int32)" for i in results]
        title = f"Where the pairs of a tile from q_pos and kv_pos on read {load}: rows and columns last."
        return self._function(f"first_of_box(q_pos, kv_pos, {self.env})", title, [*lines, *returned(texts)])

    def _entry(self, text: str) -> str:
        module = self.language.module
        return f"{module}.cast({text}, {module}.int64)" if self.offsets_64 else text

    def _float_tile(self, printer: Printer, result: Expr, value: Expr) -> str:
        """The result as floats; on a GPU, where a row's maximum is taken of it, of the tile's whole shape."""
        if not self.language.is_gpu:
            return printer.tile(result)
        if axes(value) == {"q", "kv"}:
            return (
                printer(result) if value.dtype == "float" else f"{printer(result, OPERATORS['mul'].precedence)} * 1.0"
            )
        return f"{self.language.module}.zeros_like(qk) + {printer(result, OPERATORS['add'].precedence + 1)}"

    def _table_printer(self, number: int) -> Printer:
        """The printer of what a score has by distance: of a part, and of the same in a table."""
        score = with_tables(self.facts.attention.canonical.folded_score, self.parts)
        return replace(self._printer, decides=f"by_distance{number}" in names_that_decide([], [score]))

    def _assigned(self, values: list[Expr], printer: Printer | None = None) -> tuple[list[str], Printer, list[Expr]]:
        """Lines that compute what values share, a printer that knows their names, and the values in terms of them."""
        assignments, results = shared(values)
        printer = printer or self._printer
        deciding = names_that_decide(assignments, results, printer.decides)
        lines = []
        for name, node in assignments:
            decides = node.dtype == "float" and name in deciding
            lines.append(f"{name} = {(replace(printer, decides=True, added=True) if decides else printer)(node)}")
            if printer.is_number(node):
                printer = replace(printer, numbers=printer.numbers | {name})
        return lines, printer, results

    @property
    def _printer(self) -> Printer:
        return Printer(self.language, offsets_64=self.offsets_64, floats=self.floats)

    # -- tile programs -------------------------------------------------------------------------------------------------
    def tiles(self, program: TileProgram) -> str:
        """kv_tiles or q_tiles: which tiles of the other axis a tile must visit."""
        axis, other = ("KV", "q") if program.axis == "kv" else ("Q", "kv")
        is_gpu, constant = self.language.is_gpu, f": {self.language.module}.constexpr"
        block = f"BLOCK_{axis}" if is_gpu else "block"
        length = "kv_len" if program.axis == "kv" else "q_len"
        printer = replace(self._printer, names={"block": block, "length": length}, scalar_code=True, offsets_64=True)
        lines = self._widened(program, printer)
        for line in program.body:
            lines += commented(f"{line.name} = {printer(line.value)}", line.comment)
        results = ["n_edge", "n_full", *program.outputs]
        lines += returned([self._narrowed(program.body, name) for name in results])
        offset = "q_offset, " if program.axis == "q" else ""
        signature = f"{program.axis}_tiles({other}_first, {other}_last, {self.env}, {offset}{block}{constant * is_gpu})"
        what = "keys" if program.axis == "kv" else "queries (by row)"
        seen = "queries" if program.axis == "kv" else "keys"
        title = (
            f"Tiles of {what} that pair with the {seen} at positions {other}_first to {other}_last: how many edge and "
            "full tiles, then lo, full_lo, full_hi, hi of each range."
        )
        return self._function(signature, title, lines)

    def tiles_at(self, program: TileProgram) -> str:
        """kv_tiles_at or q_tiles_at: the ranges of one tile as they were measured."""
        load = f"{self.language.module}.load"
        lines = [f"{output} = {load}(spans + {n})" for n, output in enumerate(program.outputs)]
        ranges = range(len(program.outputs) // 4)
        lines.append(f"n_full = {' + '.join(f'full_hi{k} - full_lo{k}' for k in ranges)}")
        lines.append(f"n_edge = {' + '.join(f'hi{k} - lo{k}' for k in ranges)} - n_full")
        lines += returned(["n_edge", "n_full", *program.outputs])
        what = "keys" if program.axis == "kv" else "queries (by row)"
        title = (
            f"Tiles of {what} to visit, as measured for the tile at `spans`: how many edge and full tiles, then lo, "
            "full_lo, full_hi, hi of each range."
        )
        return self._function(f"{program.axis}_tiles_at(spans)", title, lines)

    # -- what is measured ----------------------------------------------------------------------------------------------
    def values(self, axis: str, values: tuple[Expr, ...]) -> str:
        """q_values or kv_values: what the mask computes at positions of one axis; "" where that is the position."""
        values = tuple(v for v in values if not isinstance(v, Symbol))
        if not values:
            return ""
        lines, printer, results = self._assigned(list(values))
        what = "queries" if axis == "q" else "keys"
        title = f"What the mask reads at positions of {what}: {'; '.join(v.text for v in values)}."
        lines.append(f"return {', '.join(map(printer, results))}")
        return self._function(f"{axis}_values({axis}_pos, {self.env})", title, lines)

    def pair(self, found: Survey) -> str:
        """Two tiles by the least and greatest values in them."""
        printer = self._printer
        known = "least and greatest values" + (" and by blocks of pairs" if found.cells else "")
        title = f"Whether any pair of two tiles may be visible, and whether every pair is, by {known}."
        given = {
            "q_ends": [f"q{n}_{end}" for n in range(len(found.q_values)) for end in ("low", "high")],
            "kv_ends": [f"kv{n}_{end}" for n in range(len(found.kv_values)) for end in ("low", "high")],
            "in_cells": [f"cells{n}_{some}" for n in range(len(found.cells)) for some in ("any", "all")],
        }
        given = {name: names for name, names in given.items() if names}
        lines = returned([printer(found.possible), printer(found.certain)])
        if self.language.is_gpu:  # each is a tuple
            lines = [f"{', '.join(names)} = {name}" for name, names in given.items()] + lines
            return self._function(f"pair({', '.join([*given, self.env])})", title, lines)
        arguments = [name for names in given.values() for name in names]
        return self._function(f"pair({', '.join([*arguments, self.env])})", title, lines)

    def _widened(self, program: TileProgram, printer: Printer) -> list[str]:
        """Ints enter in 64 bits, so that no bound can overflow."""
        if not self.language.is_gpu:
            return []
        local = {"block", *(line.name for line in program.body)}
        leaves = {n for line in program.body for n in nodes(line.value) if isinstance(n, (Scalar, Symbol))}
        found = {printer(n) for n in leaves if n.dtype == "int" and not (isinstance(n, Symbol) and n.name in local)}
        return [f"{name} = {self.language.module}.cast({name}, {self.language.module}.int64)" for name in sorted(found)]

    def _narrowed(self, body: tuple[Assign, ...], name: str) -> str:
        values = {line.name: line.value for line in body}
        if not self.language.is_gpu or is_constant(values[name], values):
            return name
        return f"{self.language.module}.cast({name}, {self.language.module}.int32)"

    def _tile_lookups(self, program: TileProgram, prefix: str = "") -> list[str]:
        printer = Printer(self.language, scalar_code=True)
        arguments = ", ".join(("i", *program.outputs))
        found = (("edge_tile", "the mask", program.edge_tile), ("full_tile", "no mask", program.full_tile))
        return [
            self._function(
                f"{prefix}{name}({arguments})",
                f"Index of the i-th tile that needs {what}.",
                [f"return {printer(tile)}"],
            )
            for name, what, tile in found
        ]

    # -- text ----------------------------------------------------------------------------------------------------------
    def _function(self, signature: str, title: str, lines: list[str]) -> str:
        head = f"def {signature}:"
        if len(head) > 118:
            name, arguments = signature.split("(", 1)
            wrapped = textwrap.fill(arguments[:-1], 110, initial_indent="    ", subsequent_indent="    ")
            head = f"def {name}(\n{wrapped},\n):"
        doc = textwrap.fill(f'"""{title}"""', 116, subsequent_indent="", break_long_words=False)
        named = self._named(lines) if re.search(rf"\b{HERE}\b", signature) else []
        body = textwrap.indent("\n".join([doc, *named, *lines]), "    ")
        decorator = f"{self.language.decorator}\n" if self.language.decorator else ""
        return f"{decorator}{head}\n{body}\n"

    def _named(self, lines: list[str]) -> list[str]:
        """Lines that take what others read out of `here`."""
        read = set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", re.sub(r"#.*", "", "\n".join(lines))))
        return taken_from_here([name for name in self.known if name in read])

    def _join(self, parts: list[str]) -> str:
        text = "\n\n".join(parts)
        return "\n\n".join([*self._helpers(text), *([self._here()] if self.language.is_gpu else []), text])

    def _here(self) -> str:
        """The record of what functions are told."""
        m = self.language.module
        kinds = {"head_dim": f"{m}.constexpr"}
        fields = "".join(f"    {name}: {kinds.get(name, f'{m}.tensor')}\n" for name in self.known)
        return f'''class Here(NamedTuple):
    """What functions of the variant are told: the head that a tile is of, and operands with their strides."""

{fields}'''

    def _helpers(self, text: str) -> list[str]:
        """What the functions call: reads of ints, and the operators that the language lacks."""
        if not self.language.is_gpu:
            return called([IEEE, IN_RANGE], text)
        given = {"jit": self.language.decorator, "m": self.language.module}
        known = {"as_bound(": AS_BOUND, "as_int(": AS_INT}
        helpers = [helper.format(**given) for name, helper in known.items() if name in text]
        of_operators = dict.fromkeys(self._helper(op) for op in OPERATORS.values() if op.helper)  # some share one
        return [*helpers, *called(list(of_operators), text)]

    def _helper(self, operator: Operator) -> str:
        fast = (
            operator.fast_helper
            if self.approximate and operator.helper not in deciding_helpers(self.facts.attention)
            else ""
        )
        return (fast or operator.helper).format(jit=self.language.decorator, m=self.language.module)
