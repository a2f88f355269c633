"""Ranges of integers at call time: proof that no index leaves its tensor and no integer leaves its bits.

Sizes and scalar values are known numbers here; the rest is interval arithmetic (Moore, Interval Analysis, 1966). Sums
of positions are kept linear, so that `q_pos - kv_pos + n` has its true range, and a branch of `where` is looked at
under its condition, so that `where(n < 8, n, 8 + floor(log(n / 8)))` has. Ints have 32 bits; where a sum or product
holds an int that was read from a tensor it is computed in 64 (codegen/dialects.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TypeAlias

from ....ir.errors import counted
from ....ir.expr import INT32_MAX, Call, Const, Expr, Load, Scalar, Symbol
from ....ir.operators import LARGEST_FLOOR, OPERATORS, Range
from ....ir.walk import children, nodes, scalars, symbols
from .floats import Interval, applied, in_range

Ranges: TypeAlias = dict[str, Range]  # of symbols and int scalars, by name
Extents: TypeAlias = Mapping[str, tuple[int, ...]]  # shapes of tensor operands, by name

# An int read from a tensor can be anything; in arithmetic it is trusted to be below 2**30 in size, and in an index and
# as a divisor it is not trusted.
_LOADED = (-(2**30) + 1, 2**30 - 1)
_FLOORED = (-LARGEST_FLOOR, LARGEST_FLOOR)
_WHOLE = (-INT32_MAX - 1, INT32_MAX)


class IndexProblem(str):
    """What `check_integers` says of an index that can leave its tensor."""


def check_integers(root: Expr, env: Ranges, extents: Extents, floats: Mapping[str, float] | None = None) -> list[str]:
    """What could go wrong with the integers of `root` for these sizes; empty when all is proven.

    env: range of every symbol and int scalar. extents: the shape of every tensor operand. floats: values of float
    scalars, as far as they are known. Problems are integers beyond their bits, divisors that can be 0, and indices that
    can leave their tensor. A branch that is not taken is computed too, so that its reads and divisions must be sound
    as well.
    """
    if not computes_ints(root):
        return []
    known = _Evaluation(env, floats=floats)
    return list(dict.fromkeys(p for node in _parts(root) for p in _problems(node, known, extents)))


@lru_cache(maxsize=4096)
def computes_ints(root: Expr) -> bool:
    """Whether sizes could make it wrong; not where ints are compared and chosen among only, as in `kv_pos <= q_pos`."""
    computed = (isinstance(n, Call) and n.dtype == "int" and not OPERATORS[n.op].chooses for n in nodes(root))
    return any(computed) or any(isinstance(n, Load) for n in nodes(root))


def range_of(node: Expr, env: Ranges, floats: Mapping[str, float] | None = None) -> Range:
    """The range of an int expression."""
    return _Evaluation(env, floats=floats).of_int(node)


def floats_in_ints(root: Expr) -> frozenset[str]:
    """Names of the float scalars of which ints are made, as by floor: ranges depend on their values."""
    made = [n for n in nodes(root) if isinstance(n, Call) and OPERATORS[n.op].makes_ints]
    return frozenset(s.name for n in made for s in scalars(n) if s.dtype == "float")


@lru_cache(maxsize=4096)
def _parts(root: Expr) -> tuple[Expr, ...]:
    """The different nodes that compute or read, operands first."""
    found = {n.text: n for n in nodes(root) if isinstance(n, (Load, Call))}
    return tuple(reversed(found.values()))


@lru_cache(maxsize=4096)
def has_64_bits(node: Expr) -> bool:
    """Whether an int is computed in 64 bits: an int that was read from a tensor is part of the sum or product."""
    if isinstance(node, Load):
        return node.dtype == "int"
    operands = children(node)[1 if isinstance(node, Call) and node.op == "where" else 0 :]
    return node.dtype == "int" and any(has_64_bits(operand) for operand in operands)


# -- whatever the call ------------------------------------------------------------------------------------------------
_LONGEST = 2**30
_SIZES: Ranges = {
    "q_len": (0, _LONGEST), "kv_len": (0, _LONGEST), "q_offset": (-_LONGEST, _LONGEST), "length": (0, _LONGEST),
    **{name: (0, INT32_MAX) for name in ("head", "kv_head", "batch", "group", "head_dim")},
    **{end: (-_LONGEST, INT32_MAX) for end in ("q_first", "q_last", "kv_first", "kv_last")},
}  # fmt: skip
_CUT_READ = (-(2**31) - 1, 2**31)  # as tile programs of GPU kernels cut what they read
_ROOM = 2**32  # for a few positions that are added


@lru_cache(maxsize=16384)
def fits_64_bits(node: Expr, known: frozenset[str] = frozenset()) -> bool:
    """Whether no int in it leaves 64 bits in a tile program of any call.

    known: texts of ints of 32 bits, and of conditions that a call is checked for.
    """
    most = 2**63 - _ROOM
    if node.text in known:
        return True
    if node.dtype == "int" and not all(-most <= end <= most for end in _widest(node, known)):
        return False
    return all(fits_64_bits(child, known) for child in children(node))


@lru_cache(maxsize=16384)
def _widest(node: Expr, known: frozenset[str]) -> Range:
    if node.text in known:
        return _WHOLE
    match node:
        case Const(value):
            return int(value), int(value)
        case Symbol(name):
            return _SIZES.get(name, _WHOLE)
        case Load():
            return _CUT_READ
        case Call("mul", (Call("floordiv", (x, d)), other)) if d.text == other.text:  # x - x % d, or 0
            (low, high), size = _widest(x, known), max(map(abs, _widest(d, known)))
            return min(low - size, 0), max(high + size, 0)
        case Call("where", (_, a, b)):
            (a_low, a_high), (b_low, b_high) = _widest(a, known), _widest(b, known)
            return min(a_low, b_low), max(a_high, b_high)
        case Call(op, args) if not OPERATORS[op].makes_ints:
            rule = OPERATORS[op].int_range
            return rule(*(_widest(a, known) for a in args)) if rule else _WHOLE
        case _:
            return _WHOLE


# -- intervals ---------------------------------------------------------------------------------------------------------
class _Evaluation:
    """Ranges of the parts of an expression, each found once; `limits` are known besides, by the text of the part."""

    def __init__(
        self, env: Ranges, limits: Mapping[str, Range] | None = None, floats: Mapping[str, float] | None = None
    ) -> None:
        self._limits = dict(limits or {})
        self._floats = floats or {}
        self.env = {n: _both(r, self._limits.get(n, r)) for n, r in env.items()}
        self._ints: dict[str, Range] = {}

    def of_int(self, node: Expr) -> Range:
        """The range of an int; of a bool or a float it is everything."""
        found = self._ints.get(node.text)
        if found is None:
            found = self._int(node)
            if limit := self._limits.get(node.text):
                found = _both(found, limit)
            self._ints[node.text] = found
        return found

    def _int(self, node: Expr) -> Range:
        if node.dtype != "int":
            return _WHOLE
        linear = _linear(node)
        if linear is not None:
            return _sum_range(linear, self.env)
        match node:
            case Load():
                return _LOADED
            case Call("where", (condition, a, b)):
                either = [self._under(condition, taken).of_int(value) for value, taken in self._taken(condition, a, b)]
                return min(low for low, _ in either), max(high for _, high in either)
            case Call(op, args) if OPERATORS[op].makes_ints:
                found = self.of_float(args[0])
                return _FLOORED if op != "floor" or found is None else (_floored(found[0]), _floored(found[1]))
            case Call(op, args):
                rule = OPERATORS[op].int_range
                return rule(*map(self.of_int, args)) if rule else _WHOLE
            case _:
                return _WHOLE

    def of_float(self, node: Expr) -> Interval | None:
        """The interval of a number, roundings in 32 bits included."""
        if node.dtype == "int":
            return Interval(*self.of_int(node))
        match node:
            case Const(value):
                return _given(value)
            case Scalar(name) if name in self._floats:
                return _given(self._floats[name])
            case Call("where", (condition, a, b)):
                known = [self._under(condition, taken).of_float(value) for value, taken in self._taken(condition, a, b)]
            case Call(_, args):
                known = [self.of_float(a) for a in args]
            case _:
                return None
        return None if None in known else applied(node.op, [k for k in known if k is not None], _rounded)

    def _taken(self, condition: Expr, a: Expr, b: Expr) -> list[tuple[Expr, bool]]:
        """The branches of where(condition, a, b) that may be taken, each with what the condition is then."""
        both = [(a, True), (b, False)]
        return [branch for branch in both if not self._is_impossible(condition, branch[1])] or both

    def _is_impossible(self, condition: Expr, holds: bool) -> bool:
        """Whether it cannot hold, or cannot fail to, as `abs(q_pos - kv_pos) >= 4` where both are 0."""
        own = [(self.of_int(node), found) for node, found in self._learned(condition, holds)]
        return any(max(low, least) > min(high, most) for (low, high), (least, most) in own)

    def _under(self, condition: Expr, holds: bool) -> _Evaluation:
        """The same where a condition is known to hold, or not to."""
        limits = dict(self._limits)
        for node, found in self._learned(condition, holds):
            limits[node.text] = _both(found, limits.get(node.text, found))
        return self if limits == self._limits else _Evaluation(self.env, limits, self._floats)

    def _learned(self, condition: Expr, holds: bool) -> Iterator[tuple[Expr, Range]]:
        match condition:
            case Call("not", (inner,)):
                yield from self._learned(inner, not holds)
            case Call("and", args) if holds:
                for arg in args:
                    yield from self._learned(arg, True)
            case Call("or", args) if not holds:
                for arg in args:
                    yield from self._learned(arg, False)
            case Call("lt" | "le" | "gt" | "ge" as comparison, (a, b)) if a.dtype == b.dtype == "int":
                op: str = comparison
                if op in ("gt", "ge"):
                    op, a, b = {"gt": "lt", "ge": "le"}[op], b, a
                if not holds:  # not a < b: b <= a
                    op, a, b = {"lt": "le", "le": "lt"}[op], b, a
                gap = 1 if op == "lt" else 0
                (low, _), (_, high) = self.of_int(a), self.of_int(b)
                yield a, (-(2**63), high - gap)
                yield b, (low + gap, 2**63)


def _both(a: Range, b: Range) -> Range:
    """What lies in both; `a` where nothing does, as in a branch that is never taken."""
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else a


def _floored(x: float) -> int:
    return math.floor(min(max(x, -LARGEST_FLOOR), LARGEST_FLOOR))


def _given(value: float) -> Interval | None:
    return None if math.isnan(value) else _rounded(Interval(value, value), 1e-5, 0.0)


def _rounded(x: Interval, relative: float, absolute: float) -> Interval:
    """Wider by what float32, and the functions of GPUs, may be off."""
    low = x.low if math.isinf(x.low) else x.low - abs(x.low) * relative - absolute
    high = x.high if math.isinf(x.high) else x.high + abs(x.high) * relative + absolute
    return in_range(Interval(low, high), 1.2e-38, 3.3e38)


def _sum_range(terms: Mapping[str, int], env: Ranges) -> Range:
    low = high = 0
    for name, factor in terms.items():
        a, b = env[name] if name else (1, 1)
        low, high = low + min(a * factor, b * factor), high + max(a * factor, b * factor)
    return low, high


@lru_cache(maxsize=4096)
def _linear(node: Expr) -> dict[str, int] | None:
    """Coefficients by name ("" the number) of a sum of symbols and scalars times numbers; None for anything else."""
    match node:
        case Const(value):
            return {"": int(value)}
        case Symbol(name) | Scalar(name):
            return {name: 1}
        case Call("add" | "sub" as op, (a, b)):
            left, right = _linear(a), _linear(b)
            if left is None or right is None:
                return None
            sign = 1 if op == "add" else -1
            return {n: left.get(n, 0) + sign * right.get(n, 0) for n in {**left, **right}}
        case Call("neg", (a,)):
            inner = _linear(a)
            return None if inner is None else {n: -c for n, c in inner.items()}
        case Call("mul", (Const(factor), other)) | Call("mul", (other, Const(factor))):
            inner = _linear(other)
            return None if inner is None else {n: c * int(factor) for n, c in inner.items()}
        case _:
            return None


# -- problems ----------------------------------------------------------------------------------------------------------
def _problems(node: Expr, known: _Evaluation, extents: Extents) -> Iterator[str]:
    if isinstance(node, Load):
        yield from _index_problems(node, [known.of_int(i) for i in node.index], known, extents)
    elif isinstance(node, Call) and node.dtype == "int":
        if OPERATORS[node.op].divides_ints:
            yield from _divisor_problems(node.args[1], node, known)
        low, high = known.of_int(node)
        bits = 64 if has_64_bits(node) else 32
        most = 2 ** (bits - 1)
        if low < -most or high >= most:
            yield (
                f"integer overflow: `{node}` reaches {low if low < -most else high} in this call, beyond {bits} "
                f"bits; {_cure(node, known)}, or write 1.0 * ... to compute in floats"
            )


def _cure(node: Expr, known: _Evaluation) -> str:
    """What keeps an int within its bits: limits for a part that is made of floats of which nothing is known."""
    for part in nodes(node):
        if isinstance(part, Call) and OPERATORS[part.op].makes_ints and known.of_int(part) == _FLOORED:
            return f"`{part}` may be anything: clamp it, as in weft.minimum(weft.maximum({part}, 0), 99)"
    return "use smaller values, compare differences of positions instead of sums"


def _divisor_problems(divisor: Expr, node: Expr, known: _Evaluation) -> Iterator[str]:
    low, high = known.of_int(divisor)
    if low <= 0 <= high:
        guard = f", or use weft.maximum({divisor}, 1)" if low == 0 < high else ""  # else it would change other values
        yield (
            f"`{node}`: the divisor `{divisor}` can be 0 in this call (it ranges from {low} to {high}); give a "
            f"positive value{guard}"
        )


def _index_problems(node: Load, indices: list[Range], known: _Evaluation, extents: Extents) -> Iterator[str]:
    tensor = node.tensor.name
    for d, (index, (low, high), extent) in enumerate(zip(node.index, indices, extents[tensor])):
        if isinstance(index, Load) or low < 0 or high >= extent:
            found = "is read from a tensor" if isinstance(index, Load) else f"ranges from {low} to {high} in this call"
            found = "" if isinstance(index, Const) else f" {found},"
            yield IndexProblem(
                f"`{node}`: index {d}, `{index}`,{found} but {tensor} has {counted(extent, 'entry')} there; "
                f"{cure_of_index(index, (low, high), extent, known.env)}"
            )


def cure_of_index(index: Expr, reached: Range, extent: int, env: Ranges) -> str:
    """What is done about an index that leaves the extent of its tensor there.

    reached: the least and the greatest index. env: range of every symbol and int scalar in the call.
    """
    (low, high), clamped = reached, f"weft.minimum(weft.maximum({index}, 0), {extent - 1})"
    if isinstance(index, Const) and extent > 1:
        return f"entries count from 0: write an index from 0 to {extent - 1}, or pass a larger tensor"
    if isinstance(index, Load):
        return f"clamp the index: {clamped}"
    cures = []
    if _is_of_query_rows(index, extent, env):
        cures.append(
            "it fits query rows that count from 0: pass q_offset=0 where the first query stands at the first key, or "
            "write weft.q_pos - (weft.kv_len - weft.q_len) in place of weft.q_pos"
        )
    if extent == 1:
        cures.append("index it with 0, or pass x.expand(...), a view with as many entries: nothing is broadcast")
    if cures:
        return "; or ".join(cures)
    if low >= 0 and high == extent:  # a clamp would hide the mistake
        return f"it is one entry short: pass a tensor with {high + 1} entries there"
    return f"pass a larger tensor, or clamp the index: {clamped}"


def _is_of_query_rows(index: Expr, extent: int, env: Ranges) -> bool:
    """Whether a tensor has just the entries that are read where the first query has position 0, and now it has not."""
    if "q_pos" not in symbols(index) or "q_pos" not in env or env["q_pos"][0] == 0:
        return False
    first, last = env["q_pos"]
    return range_of(index, env | {"q_pos": (0, last - first)}) == (0, extent - 1)
