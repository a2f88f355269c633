"""Whether kernels can compute with sizes and numbers of a call: no index leaves its tensor, no integer its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...codegen.launch.binding import function
from ...compiler.analysis.tiles.facts import Facts
from ...compiler.analysis.values.ranges import IndexProblem, Ranges, check_integers, computes_ints, floats_in_ints
from ...ir.errors import collected
from ...ir.expr import INT32_MAX, Expr, Scalar, TensorOperand
from ...ir.operators import Range
from ...ir.sequences import Rows
from ..call import Call, Dense, Ragged
from ..settings import checks_values
from .operands import FLOAT32_MAX, LARGEST_OFFSET, scalar_problems
from .values import check_entries, check_offsets, computed_with, known_offsets

MOST_PROVEN = 4096  # sizes, or kinds of them, remembered for each variant
_Names = Callable[[Call], tuple[object, object] | None]


# Of a tensor on a device nothing is known. Positions of sequences with lengths end at a number, or at lengths less 1.
_OF_SIZES = """
def NAME(call):
    sequences = call.sequences
    at = sequences.q_offset
    batches, heads, q_len, _ = call.query.shape
    _, kv_heads, kv_len, _ = call.key.shape
    READ
    if isinstance(at, Tensor):
        at = known_offsets(at)
    if type(sequences) is Dense:
        sizes = batches, heads, q_len, kv_heads, kv_len, call.head_dim, at, EXACT
        at = (at.bit_length(), at < 0) if type(at) is int else octaves(at)
        bucket = (
            batches.bit_length(), heads, q_len.bit_length(), kv_heads, kv_len.bit_length(), call.head_dim, at, ROUGH
        )
    elif isinstance(sequences, Dense) or sequences.on_host or checks_values():
        return NONE
    else:
        batches, kv_len = sequences.number(call.query), call.kv_rows
        at = (at, q_len) if type(at) is int else type(sequences.q_offset)
        sizes = type(sequences), batches, heads, q_len, kv_heads, kv_len, call.head_dim, at, EXACT
        bucket = (
            type(sequences), max(batches - 1, 0).bit_length(), heads, q_len.bit_length(), (q_len - 1).bit_length(),
            kv_heads, kv_len.bit_length(), (kv_len - 1).bit_length(), call.head_dim, at, ROUGH
        )
    return RESULT
"""


class SizeChecks:
    """Proof for a call that no index leaves its tensor and no integer leaves 32 bits.

    Most calls are within sizes that were proven before: lengths and batch up to a power of two, int scalars within one.
    Float scalars count as they are, and only where ints are made of them.
    Offsets in a tensor count as numbers where their values are known (values.py). Elsewhere an index relies on
    the caller's promise, that positions stay inside the keys, and arithmetic on their 31 bits alone.
    """

    def __init__(self, facts: Facts, parameters: Sequence[Scalar | TensorOperand]) -> None:
        attention = facts.attention
        self._name = str(attention.name)
        self._expressions: tuple[Expr, ...] = attention.canonical.expressions
        self._of_pairs = (attention.canonical.folded_score, attention.canonical.folded_mask)
        self._of_rows = self._expressions[len(self._of_pairs) :]  # a sink, which rows see that have no key too
        self._ints = [p for p in parameters if isinstance(p, Scalar) and p.dtype == "int"]
        self._numbers = [p for p in parameters if isinstance(p, Scalar) and p.dtype == "float"]
        self._floats = sorted(frozenset().union(*map(floats_in_ints, self._expressions)))
        self._tensors = [p.name for p in parameters if isinstance(p, TensorOperand)]
        self._computed = computed_with(attention)
        ranges = any(computes_ints(e) for e in self._expressions)
        self._ranges_needed = ranges
        self._of_sizes = ranges or bool(self._ints)  # else every size is sound
        self.needed = self._of_sizes or bool(self._numbers)
        self._proven: set[object] = set()
        self._names, self._is_known = self._functions(parameters)

    def _functions(self, parameters: Sequence[Scalar | TensorOperand]) -> tuple[_Names, Callable[[Call], bool]]:
        """What a call is remembered by, its sizes and the bucket of calls that they are proven with, or None where
        lengths are numbers that are looked at; and whether one of the two was proven.

        Generated, as this is asked at every call.
        """
        values = {p.name: f"v{n}" for n, p in enumerate(parameters)}
        own = [values[name] for name in self._floats] + [f"*{values[name]}.shape" for name in self._tensors]
        ints = [values[scalar.name] for scalar in self._ints]
        pieces = {
            "READ": "; ".join([f"{v} = call.operands[{name!r}]" for name, v in values.items()]) or "pass",
            "EXACT": "".join([f"{text}, " for text in (*ints, *own)]),
            "ROUGH": "".join([f"{text}, " for text in (*(f"{v}.bit_length(), {v} < 0" for v in ints), *own)]),
        }
        tools = {"Tensor": Tensor, "Dense": Dense, "known_offsets": known_offsets, "octaves": _octaves,
                 "checks_values": checks_values, "proven": self._proven}  # fmt: skip

        def made(name: str, result: str, none: str) -> Callable[..., Any]:
            text = _OF_SIZES
            for piece, found in {**pieces, "NAME": name, "RESULT": result, "NONE": none}.items():
                text = text.replace(piece, found)
            return function(text.strip(), name, tools)

        return (
            made("names", "sizes, bucket", "None"),
            made("is_known", "sizes in proven or bucket in proven", "False"),
        )

    def check(self, call: Call) -> None:
        """Raise WeftError for sizes and values that kernels could not compute with, whatever tensors hold."""
        for number in self._numbers:
            if not -FLOAT32_MAX <= call.operands[number.name] <= FLOAT32_MAX:
                self._check_number(number, call)
        if not self._of_sizes:
            return
        looked_at = bool(self._computed) and checks_values()
        if self._ranges_needed and not looked_at and self._is_known(call):
            return
        for scalar in self._ints:
            if not -INT32_MAX <= call.operands[scalar.name] <= INT32_MAX:
                self._check_number(scalar, call)
        offset = call.sequences.q_offset
        if isinstance(offset, Tensor) or (offset is not None and not -LARGEST_OFFSET <= offset <= LARGEST_OFFSET):
            check_offsets(self._name, offset)
        if not self._ranges_needed:
            return
        if looked_at:
            check_entries(self._name, call.operands, self._computed)
            if self._is_known(call):
                return
        sequences = call.ragged
        if sequences is not None:
            is_rough = self._prove_ragged(call, sequences)
        else:
            assert offset is not None
            is_rough = self._prove(call, offset)
        if (names := self._names(call)) is not None:
            self._remember(names[1] if is_rough else names[0])

    def _check_number(self, scalar: Scalar, call: Call) -> None:
        """Raise WeftError for a number that kernels of the call do not have."""
        if problems := scalar_problems(scalar, call.operands[scalar.name], call.query.dtype):
            raise collected(self._name, problems)

    def _remember(self, sound: object) -> None:
        if len(self._proven) >= MOST_PROVEN:
            self._proven.clear()
        self._proven.add(sound)

    def _prove_ragged(self, call: Call, sequences: Ragged) -> bool:
        """Of sequences with lengths: by the ranges of these where they are known, else by all that fit. Whether all
        calls of the bucket are sound."""
        rows = _known_rows(call, sequences)
        seeing = None if rows is None else [r for r in rows if r.kv_len]
        ends = _ragged_ranges(call, sequences, seeing)
        is_rough = self._prove_sequences(call, sequences, self._of_pairs, seeing, ends)
        if self._of_rows:
            ends = _ragged_ranges(call, sequences, rows, least_keys=0)
            is_rough &= self._prove_sequences(call, sequences, self._of_rows, rows, ends)
        return is_rough

    def _prove_sequences(
        self, call: Call, sequences: Ragged, expressions: tuple[Expr, ...], rows: Sequence[Rows] | None,
        ranges: tuple[Ranges, Range | None],
    ) -> bool:  # fmt: skip
        """Raise WeftError where it is not sound. Whether ranges around these are sound, too."""
        exact, far = ranges
        ints = {s.name: int(call.operands[s.name]) for s in self._ints}
        here = {name: (value, value) for name, value in ints.items()}
        rounded = {name: _rounded(ends) for name, ends in exact.items()}
        if not self._ragged_problems(call, expressions, rounded | {n: _octave(v) for n, v in ints.items()}, far):
            return True
        problems = self._ragged_problems(call, expressions, exact | here, far)
        if not problems:
            return False
        if rows is None:
            raise collected(self._name, problems)
        for r in rows:  # each by itself, as its lengths and positions belong together
            own = _ragged_ranges(call, sequences, [r])[0] | here
            if problems := self._ragged_problems(call, expressions, own, None):
                raise collected(self._name, [f"sequence {r.number}: {problem}" for problem in problems])
        return False

    def _ragged_problems(self, call: Call, expressions: tuple[Expr, ...], env: Ranges, far: Range | None) -> list[str]:
        """What is not sound in these ranges; sound ones are remembered. far: of q_pos where nobody knows it."""
        extents = {name: tuple(call.operands[name].shape) for name in self._tensors}  # type: ignore[union-attr]
        floats = self._floats_of(call)
        known = ("ragged", expressions is self._of_rows, *env.values(), far, *floats.values(), *extents.values())
        if known in self._proven:
            return []
        found = [p for expression in expressions for p in check_integers(expression, env, extents, floats)]
        if far is not None:
            anywhere = env | {"q_pos": _rounded(far)}
            more = [p for e in expressions for p in check_integers(e, anywhere, extents, floats)]
            found += [f"{p}; {_UNKNOWN_LENGTHS}" for p in more if not isinstance(p, IndexProblem)]
        if not found:
            self._remember(known)
        return list(dict.fromkeys(found))

    def _prove(self, call: Call, offset: int | Tensor) -> bool:
        """Of a dense call. Whether all calls of the bucket are sound."""
        offsets = known_offsets(offset) if isinstance(offset, Tensor) else (offset, offset)
        extents = {name: tuple(call.operands[name].shape) for name in self._tensors}  # type: ignore[union-attr]
        ints = [int(call.operands[s.name]) for s in self._ints]
        exact = self._problems(call, offsets, ints, extents, rounded=False)
        if exact:
            if isinstance(offset, Tensor) and offsets is not None:
                self._prove_rows(call, offset, ints, extents)
                return False
            raise collected(self._name, exact)
        return not self._problems(call, offsets, ints, extents, rounded=True)

    def _prove_rows(
        self, call: Call, offset: Tensor, ints: Sequence[int], extents: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Each row by itself, where the range of all of them has problems: the message then names the row."""
        for row, value in enumerate(offset.tolist()):
            problems = self._problems(call, (value, value), ints, extents, rounded=False)
            if problems:
                raise collected(self._name, [f"q_offset[{row}] is {value}: {problem}" for problem in problems])

    def _problems(
        self, call: Call, offsets: Range | None, ints: Sequence[int], extents: Mapping[str, tuple[int, ...]],
        rounded: bool,
    ) -> list[str]:  # fmt: skip
        env, floats, expressions = self._ranges(call, offsets, ints, rounded), self._floats_of(call), self._read(call)
        found = [p for expression in expressions for p in check_integers(expression, env, extents, floats)]
        if offsets is None:
            far = (-LARGEST_OFFSET, LARGEST_OFFSET + env["q_len"][1])
            env |= {"q_pos": far}
            everywhere = [p for e in expressions for p in check_integers(e, env, extents, floats)]
            found += [f"{p}; {_UNKNOWN_OFFSETS}" for p in everywhere if not isinstance(p, IndexProblem)]
        return list(dict.fromkeys(found))

    def _read(self, call: Call) -> tuple[Expr, ...]:
        """What a dense call computes: nothing without queries, and without keys what rows see."""
        batch, _, q_len, _ = call.query.shape
        if batch == 0 or q_len == 0:
            return ()
        return self._expressions if call.key.shape[2] else self._of_rows

    def _floats_of(self, call: Call) -> dict[str, float]:
        """Values of the scalars of which ints are made."""
        return {name: float(call.operands[name]) for name in self._floats}

    def _ranges(self, call: Call, given: Range | None, ints: Sequence[int], rounded: bool) -> Ranges:
        """Range of every symbol and int scalar: as they are, or of all calls in the same bucket."""

        def upto(value: int) -> tuple[int, int]:
            size = value.bit_length()
            return (1 << size >> 1, (1 << size) - 1) if rounded else (value, value)

        def around(value: int) -> tuple[int, int]:
            low, high = upto(abs(value))
            return (low, high) if value >= 0 else (-high, -low)

        batch, heads, q_len = call.query.shape[:3]
        kv_heads, kv_len = call.key.shape[1:3]
        q_lens, kv_lens, batches = upto(q_len), upto(kv_len), upto(batch)
        assert isinstance(call.sequences, Dense)
        last_q, last_kv = (max(upto(span)[1] - 1, 0) for span in call.sequences.spans(q_len, kv_len))
        if given is None:
            first, last = 0, last_kv
        else:
            first, last = around(given[0])[0], around(given[1])[1] + last_q
        env: Ranges = {
            "q_pos": (first, last), "kv_pos": (0, last_kv), "batch": (0, max(batches[1] - 1, 0)),
            "head": (0, heads - 1), "kv_head": (0, kv_heads - 1), "group": (heads // kv_heads,) * 2,
            "q_len": q_lens, "kv_len": kv_lens, "head_dim": (call.head_dim, call.head_dim),
        }  # fmt: skip
        return env | {scalar.name: around(value) for scalar, value in zip(self._ints, ints)}


def _known_rows(call: Call, sequences: Ragged) -> list[Rows] | None:
    """The sequences with queries; None where they lie on a device and no check was asked for."""
    given = [*sequences.tensors.values(), sequences.q_offset]
    if not (checks_values() or all(t.is_cpu for t in given if isinstance(t, Tensor))):
        return None
    return [r for r in sequences.rows(call.query, call.key) if r.q_len]


def _ragged_ranges(
    call: Call, sequences: Ragged, rows: Sequence[Rows] | None, least_keys: int = 1
) -> tuple[Ranges, Range | None]:
    """Range of every symbol in these sequences; and of q_pos as it may be, where nobody knows them.

    least_keys: of a sequence, where nobody knows. As for offsets on a device, an index relies on the caller's promise
    that positions stay inside the keys there.
    """
    heads, q_rows = call.query.shape[1:3]
    kv_heads, kv_rows = call.key.shape[1], call.kv_rows
    offset, far = sequences.q_offset, None
    numbers = 0, max(sequences.number(call.query) - 1, 0)
    q_lens, kv_lens = (1, max(q_rows, 1)), (least_keys, max(kv_rows, 1))
    if rows is not None:
        rows = rows or [Rows(0, 0, 0, 1, 0, 1, 0)]
        numbers = min(r.number for r in rows), max(r.number for r in rows)
        q_lens = min(r.q_len for r in rows), max(r.q_len for r in rows)
        kv_lens = min(r.kv_len for r in rows), max(r.kv_len for r in rows)
        q_pos = min(r.q_offset for r in rows), max(r.q_offset + r.q_len - 1 for r in rows)
    elif isinstance(offset, int):
        q_pos = offset, offset + q_lens[1] - 1
    else:
        q_pos = 0, kv_lens[1] - 1
        far = (1 - q_lens[1], kv_lens[1] - 1) if offset is None else (-LARGEST_OFFSET, LARGEST_OFFSET + q_lens[1])
    return {
        "q_pos": q_pos, "kv_pos": (0, kv_lens[1] - 1), "batch": numbers, "head": (0, heads - 1),
        "kv_head": (0, kv_heads - 1), "group": (heads // kv_heads,) * 2, "q_len": q_lens, "kv_len": kv_lens,
        "head_dim": (call.head_dim,) * 2,
    }, far  # fmt: skip


def _octaves(offsets: Range | None) -> object:
    """Signs and numbers of bits of the least and the highest offset."""
    return None if offsets is None else tuple([(n.bit_length(), n < 0) for n in offsets])


def _octave(value: int) -> Range:
    """Numbers of as many bits."""
    size = abs(value).bit_length()
    low, high = 1 << size >> 1, (1 << size) - 1
    return (low, high) if value >= 0 else (-high, -low)


def _rounded(ends: Range) -> Range:
    """A range around this one that many calls share: ends are 0, 1, or a power of 2 less 1."""
    low, high = ends
    if low == high and low >= 0 and low < 512:
        return ends  # numbers of heads and the like
    return (min(low, 1) if low >= 0 else 1 - (1 << (-low).bit_length())), (1 << max(high, 0).bit_length()) - 1


_UNKNOWN_LENGTHS = (
    "lengths lie on the device, where positions may be any that fit the operands: give them on the host, or have them "
    "looked at with weft.settings(check=True)"
)


_UNKNOWN_OFFSETS = (
    "q_offset is a tensor on the device, whose values may be anything within 31 bits: give an int, or have the values "
    "looked at with weft.settings(check=True)"
)
