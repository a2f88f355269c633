"""What expressions mean: evaluated over pairs of a query and a key, one vector entry a pair, in any float dtype.

Every float goes with a bound of its rounding error, to first order. From it follow how far a kernel's score may be
off, and whether a condition lies so near to a tie that rounding may decide it: such calls are not used.

`where` evaluates each branch only for the pairs that take it, as the language has it: what is not taken has neither a
value nor a slope. Operators are defined here by hand from docs/language.md and share nothing with Weft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .tree import Node, Num, Op, Read, Scalar, Sym


class Undefined(Exception):
    """The language leaves it open, or rounding may decide it: not a call to judge by."""


@dataclass(frozen=True)
class Value:
    """One number a pair, and for floats how far a kernel's may be off; bound 0: any order of operations is exact."""

    value: Tensor
    bound: Tensor | None = None


@dataclass(frozen=True)
class Precision:
    """Of the floats that kernels compute with."""

    eps: float  # half the distance of floats at 1
    exact: torch.dtype  # what is representable there has no error
    tanh: float = 0.0  # relative error of tanh, where the hardware approximates it


FP32 = Precision(2.0**-24, torch.float32)
FP64 = Precision(2.0**-53, torch.float64)
FAST_TANH = Precision(2.0**-24, torch.float32, tanh=2.0**-10)
TIE = 8.0  # bounds of both sides that a comparison must be away from a tie
FUNCTION = 4.0  # roundings that a function of one float may take


@dataclass
class Gather:
    """A read of a float tensor at some pairs: where gradients of operands come from."""

    name: str
    pairs: Tensor  # which pairs
    places: Tensor  # which element of the flat operand
    values: Tensor


@dataclass
class Environment:
    """Values of leaves: symbols as a vector of ints or one int, scalars as numbers, tensors whole."""

    symbols: Mapping[str, Tensor | int]
    score: Value | None
    scalars: Mapping[str, int | float]
    tensors: Mapping[str, Tensor]
    pairs: int
    dtype: torch.dtype
    precision: Precision | None  # None: no bounds, and no look at ties
    gathers: list[Gather] = field(default_factory=list)


def evaluate(root: Node, env: Environment) -> Value:
    """The value of an expression for each pair; raises Undefined near ties and for indices outside their tensor."""
    return _visit(root, env, torch.arange(env.pairs, device=_device(env)))


def _device(env: Environment) -> torch.device:
    return next((s.device for s in env.symbols.values() if isinstance(s, Tensor)), torch.device("cpu"))


def _visit(node: Node, env: Environment, at: Tensor) -> Value:
    """The value at the pairs `at`."""
    match node:
        case Num(value):
            return _leaf(value, node.kind, env, at)
        case Sym("score"):
            assert env.score is not None
            return Value(env.score.value[at], None if env.score.bound is None else env.score.bound[at])
        case Sym(name):
            given = env.symbols[name]
            return Value(given[at]) if isinstance(given, Tensor) else _leaf(given, "int", env, at)
        case Scalar(name, kind):
            return _leaf(env.scalars[name], kind, env, at)
        case Read():
            return _read(node, env, at)
        case Op("where", (condition, a, b)):
            return _where(_visit(condition, env, at).value, a, b, node.kind, env, at)
        case Op(name, args):
            return _apply(name, [_visit(a, env, at) for a in args], node, env)
        case _:
            raise TypeError(f"no value for {node!r}")


def _leaf(value: float, kind: str, env: Environment, at: Tensor) -> Value:
    dtype = {"int": torch.int64, "float": env.dtype, "bool": torch.bool}[kind]
    filled = torch.full(at.shape, value, dtype=dtype, device=at.device)
    if kind != "float" or env.precision is None:
        return Value(filled)
    rounded = filled.to(env.precision.exact).to(env.dtype)
    return Value(filled, torch.where(rounded == filled, 0.0, env.precision.eps * filled.abs()))


def _read(node: Read, env: Environment, at: Tensor) -> Value:
    tensor = env.tensors[node.name]
    flat = torch.zeros_like(at)
    for extent, index in zip(tensor.shape, node.index, strict=True):
        place = _visit(index, env, at).value
        if len(place) and not 0 <= int(place.min()) <= int(place.max()) < extent:
            raise Undefined(f"{node.name}: index {int(place.min())} to {int(place.max())} of {extent}")
        flat = flat * extent + place
    values = tensor.reshape(-1)[flat]
    if node.kind == "int":
        return Value(values.to(torch.int64))
    if node.kind == "bool":
        return Value(values)
    values = values.to(env.dtype)
    env.gathers.append(Gather(node.name, at, flat, values))
    if env.precision is None:
        return Value(values)
    rounded = values.to(env.precision.exact).to(env.dtype)  # float64 operands are computed with in float32
    return Value(values, torch.where(rounded == values, 0.0, env.precision.eps * values.abs()))


def _where(condition: Tensor, a: Node, b: Node, kind: str, env: Environment, at: Tensor) -> Value:
    yes, no = condition.nonzero()[:, 0], (~condition).nonzero()[:, 0]
    taken = [_visit(branch, env, at[side]) for branch, side in ((a, yes), (b, no))]
    if kind == "float":
        taken = [_as_float(v, env) for v in taken]
    order = torch.argsort(torch.cat([yes, no]))
    bounds = [v.bound for v in taken]
    bound = None if None in bounds else torch.cat(bounds)[order]  # type: ignore[arg-type]
    return Value(torch.cat([v.value for v in taken])[order], bound)


def _as_float(x: Value, env: Environment) -> Value:
    if x.value.is_floating_point():
        return x
    value = x.value.to(env.dtype)
    if env.precision is None:
        return Value(value)
    rounded = value.to(env.precision.exact).to(env.dtype)
    return Value(value, torch.where(rounded == value, 0.0, env.precision.eps * value.abs()))


# -- operators ---------------------------------------------------------------------------------------------------------
_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}  # fmt: skip
_BOOL: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not,
}  # fmt: skip
_INT: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "neg": torch.neg, "abs": torch.abs,
    "minimum": torch.minimum, "maximum": torch.maximum,
    "floordiv": lambda a, b: torch.div(a - torch.remainder(a, b), b, rounding_mode="trunc"),
    "mod": torch.remainder,
}  # fmt: skip


def _apply(name: str, args: list[Value], node: Op, env: Environment) -> Value:
    if name in _BOOL:
        return Value(_BOOL[name](*(a.value for a in args)))
    if name in _COMPARE:
        return _compared(name, args, env)
    if name == "floor":
        return _floored(args[0], env)
    if node.kind == "int":
        if name in ("floordiv", "mod") and bool((args[1].value == 0).any()):
            raise Undefined("a divisor is 0")
        result = _INT[name](*(a.value for a in args))
        if len(result) and int(result.abs().max()) >= 2**31:
            raise Undefined("an int beyond 32 bits")
        return Value(result)
    return _of_floats(name, [_as_float(a, env) for a in args], env)


def _compared(name: str, args: list[Value], env: Environment) -> Value:
    if any(a.value.is_floating_point() for a in args):
        args = [_as_float(a, env) for a in args]
        _refuse_ties(args[0], args[1])
    return Value(_COMPARE[name](args[0].value, args[1].value))


def _refuse_ties(a: Value, b: Value) -> None:
    """Rounding may not decide which of two floats is larger. Equal infinities, and what is exact, compare alike."""
    if a.bound is None or b.bound is None:
        return
    near = (a.value - b.value).detach().abs() <= TIE * (a.bound + b.bound)
    if bool((near & (a.bound + b.bound > 0)).any()):
        raise Undefined("a comparison of floats near a tie")


def _floored(x: Value, env: Environment) -> Value:
    if not x.value.is_floating_point():
        return x
    if x.bound is not None:
        _refuse_ties(Value(x.value, x.bound), Value(x.value.round(), torch.zeros_like(x.bound)))
    if not bool(x.value.isfinite().all()) or (len(x.value) and float(x.value.detach().abs().max()) >= 2**30 - 64):
        raise Undefined("floor of what is no 32-bit int")
    return Value(x.value.floor().to(torch.int64))


def _of_floats(name: str, args: list[Value], env: Environment) -> Value:
    result = _FLOAT[name](*(a.value for a in args))
    if env.precision is None:
        return Value(result)
    with torch.no_grad():
        return Value(result, _bound(name, args, result, env, env.precision))


def _bound(name: str, args: list[Value], result: Tensor, env: Environment, precision: Precision) -> Tensor:
    values, bounds = [a.value for a in args], [a.bound for a in args if a.bound is not None]
    if name in ("minimum", "maximum"):
        _refuse_ties(*args)
        return torch.where(result == values[0], bounds[0], bounds[1])
    if name == "abs":
        zero = torch.zeros_like(values[0])
        _refuse_ties(args[0], Value(zero, zero))
    bound: Tensor = _BOUND[name](precision, result, *values, *bounds)
    if name in _EXACT:
        exact = result.to(precision.exact).to(env.dtype) == result
        for own in bounds:
            exact = exact & (own == 0)
        bound = torch.where(exact, 0.0, bound)
    _refuse_extremes(name, result, values)
    bound = torch.where(bound.isnan(), math.inf, bound)
    return torch.where(result.isinf(), 0.0, bound)  # an infinity is one in any dtype


def _refuse_extremes(name: str, result: Tensor, values: list[Tensor]) -> None:
    """No NaN, and no overflow or underflow that only the narrower of two dtypes has."""
    if bool(result.isnan().any()):
        raise Undefined(f"{name} gives NaN")
    finite = result.detach()[result.isfinite() & torch.stack([v.isfinite() for v in values]).all(0)].abs()
    if len(finite) and float(finite.max()) > (3.4028235e38 if name in _EXACT else 1e30):
        raise Undefined(f"{name} overflows in float32")
    if bool(((finite < 1e-30) & (finite > 0)).any()):
        raise Undefined(f"{name} underflows in float32")


_FLOAT: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "minimum": torch.minimum, "maximum": torch.maximum, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log,
    "log2": torch.log2, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "sin": torch.sin, "cos": torch.cos, "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "logsigmoid": lambda x: -torch.logaddexp(-x, torch.zeros_like(x)),
}  # fmt: skip
_EXACT = ("add", "sub", "mul", "neg", "abs", "div")  # exact where the result is representable


def _function(slope: Callable[[Tensor, Tensor], Tensor], least: float = 0.0) -> Callable[..., Tensor]:
    """Bound of a function of one float: |slope| times the bound of x, and its own roundings."""

    def bound(p: Precision, y: Tensor, x: Tensor, ex: Tensor) -> Tensor:
        passed = torch.where(ex > 0, slope(y, x).abs() * ex, 0.0)
        return passed + FUNCTION * p.eps * torch.clamp(y.abs(), min=least)

    return bound


# Arguments: precision, result, operands, bounds of the operands. Sums may be reordered, so that each term counts.
_BOUND: dict[str, Callable[..., Tensor]] = {
    "add": lambda p, y, a, b, ea, eb: ea + eb + p.eps * (a.abs() + b.abs()),
    "sub": lambda p, y, a, b, ea, eb: ea + eb + p.eps * (a.abs() + b.abs()),
    "mul": lambda p, y, a, b, ea, eb: a.abs() * eb + b.abs() * ea + p.eps * y.abs(),
    "div": lambda p, y, a, b, ea, eb: (ea + y.abs() * eb) / b.abs() + 2 * p.eps * y.abs(),
    "neg": lambda p, y, x, ex: ex,
    "abs": lambda p, y, x, ex: ex,
    "exp": lambda p, y, x, ex: y * (ex + p.eps * x.abs()) + FUNCTION * p.eps * y,
    "exp2": lambda p, y, x, ex: y * (ex + p.eps * x.abs()) + FUNCTION * p.eps * y,
    "log": _function(lambda y, x: 1 / x, least=1.0),
    "log2": _function(lambda y, x: 1.5 / x, least=1.0),
    "tanh": lambda p, y, x, ex: (1 - y * y) * ex + (FUNCTION * p.eps + p.tanh) * y.abs(),
    "sigmoid": _function(lambda y, x: y * (1 - y)),
    "softplus": _function(lambda y, x: torch.sigmoid(x)),
    "logsigmoid": _function(lambda y, x: torch.sigmoid(-x)),
    "sqrt": _function(lambda y, x: 0.5 / y),
    "rsqrt": _function(lambda y, x: 0.5 * y / x),
    "sin": lambda p, y, x, ex: ex + p.eps * x.abs() + FUNCTION * p.eps,
    "cos": lambda p, y, x, ex: ex + p.eps * x.abs() + FUNCTION * p.eps,
}
