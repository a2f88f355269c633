"""Expressions printed as source: one table a dialect (Triton, Gluon, torch), one printer for all.

Integers on a GPU divide towards zero, the language divides towards minus infinity: `//` and `%` print as calls of
`floor_div` and `floor_mod` unless both sides are never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..ir.errors import InternalError
from ..ir.expr import OPS, Call, Const, Expr, Load, Scalar, Symbol
from ..ir.walk import nodes

_NEVER_NEGATIVE = frozenset({"kv_pos", "head", "kv_head", "group", "batch", "q_len", "kv_len", "head_dim", "block"})
# Symbols that are one number for a whole tile, so that plain Python arithmetic serves.
_UNIFORM = frozenset({"q_len", "kv_len", "head_dim", "group"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_FLOAT_FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos")


@dataclass(frozen=True)
class Dialect:
    """How leaves and functions are written; infix operators are the same everywhere."""

    name: str
    functions: Mapping[str, str]  # op -> format string over the printed operands
    load: Callable[[Printer, Load], str]
    to_float: str  # format string that turns an int value into a float
    floors: bool  # `//` and `%` already round towards minus infinity
    uniform: Mapping[str, str] = field(default_factory=dict)  # functions of plain numbers, where they differ


@dataclass(frozen=True)
class Printer:
    """Prints expressions in one dialect; `names` maps symbols to the variables that hold them."""

    dialect: Dialect
    names: Mapping[str, str] = field(default_factory=dict)
    scalar_code: bool = False  # every value is one number (tile programs)
    compared: bool = False  # the value goes into a comparison, with no arithmetic between

    def __call__(self, node: Expr, outer: int = 0) -> str:
        match node:
            case Const(value):
                text = _number(value)
                return f"({text})" if text.startswith("-") and outer > OPS["add"].precedence else text
            case Symbol(name):
                return self.names.get(name, name)
            case Scalar(name):
                return f"arg_{name}"
            case Load():
                return self.dialect.load(self, node)
            case Call(op, args):
                return self._inside(op)._call(op, args, node, outer)
            case _:
                raise InternalError(f"{self.dialect.name} printer: unknown node {type(node).__name__}")

    def _inside(self, op: str) -> Printer:
        """The printer of the operands of `op`."""
        if op in ("minimum", "maximum", "where") or self.compared == (op in _COMPARISONS):
            return self
        return replace(self, compared=not self.compared)

    def _call(self, name: str, args: tuple[Expr, ...], node: Call, outer: int) -> str:
        op = OPS[name]
        if name in ("floordiv", "mod") and not (self.dialect.floors or _rounds_alike(args)):
            return f"floor_{'div' if name == 'floordiv' else 'mod'}({self(args[0])}, {self(args[1])})"
        uniform = self.scalar_code or is_uniform(node)
        written = (
            self.dialect.functions.get(name)
            if not uniform
            else self.dialect.uniform.get(name, self.dialect.functions.get(name))
        )
        if written is None and op.symbol is None:
            raise InternalError(f"{self.dialect.name} printer: no way to write {name}")
        if written is not None:
            if name in ("minimum", "maximum") and not uniform and self.dialect.name == "torch":
                written = _torch_extreme(name, args)
            return written.format(*(self._operand(name, a) for a in args))
        if op.arity == 1:
            text = f"{op.symbol}{self(args[0], op.precedence)}"
        else:
            left = op.precedence + 1 if op.gives == "bool" and op.takes != "bool" else op.precedence
            text = f"{self(args[0], left)} {op.symbol} {self(args[1], op.precedence + 1)}"
        return f"({text})" if op.precedence < outer else text

    def _operand(self, op: str, node: Expr) -> str:
        if op in _FLOAT_FUNCTIONS and node.dtype == "int":
            return self.dialect.to_float.format(self(node, OPS["mul"].precedence))
        return self(node)


def _number(value: int | float | bool) -> str:
    if isinstance(value, float) and math.isinf(value):
        return 'float("inf")' if value > 0 else '-float("inf")'
    return repr(value)


def _torch_extreme(name: str, args: tuple[Expr, ...]) -> str:
    """torch.minimum wants two tensors; with a plain number on one side, clamp does the same."""
    bound = "max" if name == "minimum" else "min"
    for k, other in ((0, 1), (1, 0)):
        if is_uniform(args[k]):
            return f"torch.clamp({{{other}}}, {bound}={{{k}}})"
    return f"torch.{name}({{0}}, {{1}})"


def _rounds_alike(args: tuple[Expr, ...]) -> bool:
    """Division towards zero and towards minus infinity agree: nothing is negative.

    Tile programs divide by the tile size only what they made so.
    """
    by_block = isinstance(args[1], Symbol) and args[1].name == "block"
    return by_block or all(map(never_negative, args))


def never_negative(node: Expr) -> bool:
    """True when the value of an int expression is provably not negative."""
    match node:
        case Const(value):
            return value >= 0
        case Symbol(name):
            return name in _NEVER_NEGATIVE
        case Call("add" | "mul" | "floordiv" | "mod" | "minimum", args):
            return all(map(never_negative, args))
        case Call("maximum", args):
            return any(map(never_negative, args))
        case Call("abs"):
            return True
        case _:
            return False


def is_uniform(node: Expr) -> bool:
    """True when the value is one number for the whole call: constants, lengths, scalar operands."""
    return all(
        isinstance(n, (Const, Scalar, Call)) or (isinstance(n, Symbol) and n.name in _UNIFORM) for n in nodes(node)
    )


# -- Triton and Gluon -------------------------------------------------------------------------------------------------
def _pointer_load(language: str) -> Callable[[Printer, Load], str]:
    def load(printer: Printer, node: Load) -> str:
        # Kernels clamp positions to real ones and the caller proves indices to be in range, so no read needs a mask.
        name = f"arg_{node.tensor.name}"
        offset = " + ".join(f"{printer(index, 7)} * {name}_s{d}" for d, index in enumerate(node.index))
        value = f"{language}.load({name} + {offset})"
        if node.dtype == "int" and printer.scalar_code and not printer.compared:
            return f"as_bound({value})"
        if node.dtype == "int":
            return f"as_int({value})"  # ids of 64 bits keep them: two must not meet because their low halves do
        return f"{value}.to({language}.{'float32' if node.dtype == 'float' else 'int1'})"

    return load


def _gpu(language: str) -> Dialect:
    functions = {name: f"{language}.{name}({{0}})" for name in _FLOAT_FUNCTIONS}
    functions |= {
        "tanh": "tanh({0})",
        "sigmoid": f"(1.0 / (1.0 + {language}.exp(-({{0}}))))",
        "where": f"{language}.where({{0}}, {{1}}, {{2}})",
        "minimum": f"{language}.minimum({{0}}, {{1}})",
        "maximum": f"{language}.maximum({{0}}, {{1}})",
        "abs": f"{language}.abs({{0}})",
        "floor": f"{language}.floor({{0}}).to({language}.int32)",
    }
    return Dialect(
        name="triton" if language == "tl" else "gluon",
        functions=functions,
        load=_pointer_load(language),
        to_float="{0} * 1.0",
        floors=False,
    )


TRITON = _gpu("tl")
GLUON = _gpu("gl")


# -- torch ------------------------------------------------------------------------------------------------------------
def _torch_load(printer: Printer, node: Load) -> str:
    text = f"arg_{node.tensor.name}[{', '.join(printer(i) for i in node.index)}]"
    if printer.scalar_code:
        return f"int({text})"
    return f"{text}.long()" if node.dtype == "int" else text  # small ints must not overflow in arithmetic


TORCH = Dialect(
    name="torch",
    functions={
        **{name: f"torch.{name}({{0}})" for name in _FLOAT_FUNCTIONS},
        "where": "torch.where({0}, {1}, {2})",
        "minimum": "",  # see _torch_extreme
        "maximum": "",
        "abs": "abs({0})",
        "floor": "torch.floor({0}).long()",
    },
    uniform={
        **{name: f"math.{name}({{0}})" for name in ("exp", "log", "log2", "tanh", "sqrt", "sin", "cos")},
        "exp2": "(2.0 ** ({0}))",
        "sigmoid": "(1.0 / (1.0 + math.exp(-({0}))))",
        "rsqrt": "(1.0 / math.sqrt({0}))",
        "where": "({1} if {0} else {2})",
        "minimum": "min({0}, {1})",
        "maximum": "max({0}, {1})",
        "abs": "abs({0})",
        "floor": "math.floor({0})",
        "not": "(not {0})",
    },
    load=_torch_load,
    to_float="{0}",
    floors=True,
)
