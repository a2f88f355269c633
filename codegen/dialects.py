"""Expressions printed as source, in Triton, Gluon or torch; how an operator is written there stands in its record.

Integers on a GPU divide towards zero, the language divides towards minus infinity: `//` and `%` print as calls of
`floor_div` and `floor_mod` unless both sides are never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..ir.errors import InternalError
from ..ir.expr import Call, Const, Expr, Load, Scalar, Symbol
from ..ir.operators import OPERATORS, Operator
from ..ir.walk import nodes

_NEVER_NEGATIVE = frozenset({"kv_pos", "head", "kv_head", "group", "batch", "q_len", "kv_len", "head_dim", "block"})
# Symbols that are one number for a whole tile, so that plain Python arithmetic serves.
_UNIFORM = frozenset({"q_len", "kv_len", "head_dim", "group"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


@dataclass(frozen=True)
class Dialect:
    """How leaves and operators are written; what has a sign and no text of its own is written by its sign."""

    name: str
    tiles: Callable[[Operator], str]  # format string over the printed operands, "" for none
    numbers: Callable[[Operator], str]  # the same where every operand is one number for the whole tile
    mixed: Callable[[Operator], str]  # the same on a tile {0} and a number {1}, "" where that is no different
    load: Callable[[Printer, Load], str]
    to_float: str  # format string that turns an int value into a float
    lifted: str  # format string that makes a tile of a number of the type {1}
    module: str = ""  # of the GPU language: tl, gl


@dataclass(frozen=True)
class Printer:
    """Prints expressions in one dialect; `names` maps symbols to the variables that hold them."""

    dialect: Dialect
    names: Mapping[str, str] = field(default_factory=dict)
    scalar_code: bool = False  # every value is one number (tile programs)
    compared: bool = False  # the value goes into a comparison, with no arithmetic between
    wide: bool = True  # places in a tensor operand may lie 2**31 elements apart

    def __call__(self, node: Expr, outer: int = 0) -> str:
        match node:
            case Const(value):
                text = _number(value)
                return f"({text})" if text.startswith("-") and outer > OPERATORS["add"].precedence else text
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
        if OPERATORS[op].chooses or self.compared == (op in _COMPARISONS):
            return self
        return replace(self, compared=not self.compared)

    def _call(self, name: str, args: tuple[Expr, ...], node: Call, outer: int) -> str:
        op = OPERATORS[name]
        number = self.scalar_code or is_uniform(node)
        written, args = self._written(op, args, number)
        if written:
            operands = [self._operand(op, a) for a in args]
            if not number:
                operands = [self._lifted(op, n, a, text) for n, (a, text) in enumerate(zip(args, operands))]
            return written.format(*operands, m=self.dialect.module)
        if op.sign is None:
            raise InternalError(f"{self.dialect.name} printer: no way to write {name}")
        if op.arity == 1:
            text = f"{op.sign}{self(args[0], op.precedence)}"
        else:
            left = op.precedence + 1 if op.gives == "bool" and op.takes != "bool" else op.precedence
            text = f"{self(args[0], left)} {op.sign} {self(args[1], op.precedence + 1)}"
        return f"({text})" if op.precedence < outer else text

    def _written(self, op: Operator, args: tuple[Expr, ...], number: bool) -> tuple[str, tuple[Expr, ...]]:
        """The format string of an operator, "" for its sign, and the operands in the order of its places."""
        if op.name in ("floordiv", "mod") and _rounds_alike(args):
            return "", args
        if number:
            return self.dialect.numbers(op), args
        if self.dialect.mixed(op) and any(map(is_uniform, args)):
            return self.dialect.mixed(op), args[::-1] if is_uniform(args[0]) else args
        return self.dialect.tiles(op), args

    def _operand(self, op: Operator, node: Expr) -> str:
        if op.computes_floats and node.dtype == "int":
            return self.dialect.to_float.format(self(node, OPERATORS["mul"].precedence))
        return self(node)

    def _lifted(self, op: Operator, place: int, node: Expr, text: str) -> str:
        """An operand beside tiles: a plain number is made a tile where the function takes nothing else."""
        if is_uniform(node) and (op.computes_floats or (op.name == "where" and place == 0)):
            return self.dialect.lifted.format(text, "bool" if node.dtype == "bool" else "float64")
        return text


def _number(value: int | float | bool) -> str:
    if isinstance(value, float) and math.isinf(value):
        return 'float("inf")' if value > 0 else '-float("inf")'
    return repr(value)


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
    def place(printer: Printer, index: Expr, stride: str) -> str:
        # A tensor may have more than 2**31 elements. Both factors are extended from 32 bits, which the product is for
        # the compiler to make use of.
        if not printer.wide:
            return f"{printer(index, OPERATORS['mul'].precedence)} * {stride}"
        return f"{language}.cast({printer(index)}, {language}.int64) * {stride}"

    def load(printer: Printer, node: Load) -> str:
        # Kernels clamp positions to real ones and the caller proves indices to be in range, so no read needs a mask.
        name = f"arg_{node.tensor.name}"
        offset = " + ".join(place(printer, index, f"{name}_s{d}") for d, index in enumerate(node.index))
        value = f"{language}.load({name} + {offset})"
        if node.dtype == "int" and printer.scalar_code and not printer.compared:
            return f"as_bound({value})"
        if node.dtype == "int":
            return f"as_int({value})"  # ids of 64 bits keep them: two must not meet because their low halves do
        return f"{value}.to({language}.{'float32' if node.dtype == 'float' else 'int1'})"

    return load


def _gpu(name: str, module: str, written: Callable[[Operator], str]) -> Dialect:
    return Dialect(
        name=name,
        tiles=written,
        numbers=written,
        mixed=lambda op: "",
        load=_pointer_load(module),
        to_float="{0} * 1.0",
        lifted="{0}",
        module=module,
    )


TRITON = _gpu("triton", "tl", lambda op: op.gpu)
GLUON = _gpu("gluon", "gl", lambda op: op.gluon or op.gpu)


# -- torch ------------------------------------------------------------------------------------------------------------
def _torch_load(printer: Printer, node: Load) -> str:
    text = f"arg_{node.tensor.name}[{', '.join(printer(i) for i in node.index)}]"
    if printer.scalar_code:
        return f"int({text})"
    return f"{text}.long()" if node.dtype == "int" else text  # small ints must not overflow in arithmetic


TORCH = Dialect(
    name="torch",
    tiles=lambda op: op.tile,
    numbers=lambda op: op.number,
    mixed=lambda op: op.tile_and_number,
    load=_torch_load,
    to_float="{0}",
    lifted="torch.tensor({0}, dtype=torch.{1})",  # of no dimension: the tile's dtype is that of the result
)
