"""Expressions printed as source, in Triton, Gluon or torch; how an operator is written there stands in its record.

Every value has a type (int, float, bool), and is either one *number* for all that a function computes at once, or a
*tile*. Torch code holds numbers as Python's own: floats of them have infinities and NaN where Python raises (`ieee`),
and where they meet a tile they take its type. Ints among floats are cast in so many words, because torch would take
its default dtype.

Integers on a GPU divide towards zero, the language divides towards minus infinity: `//` and `%` print as calls of
helpers unless both sides are never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ..compiler.analysis.values.defined import is_clearly_positive, never_negative
from ..ir.errors import InternalError
from ..ir.expr import Call, Const, Expr, Load, Scalar, Symbol
from ..ir.operators import OPERATORS, Operator
from ..ir.walk import nodes, symbols

# Symbols that are one number for the whole call, so that plain Python arithmetic serves.
_UNIFORM = frozenset({"q_len", "kv_len", "head_dim", "group"})
_VARYING = frozenset({"q_pos", "kv_pos", "qk", "score"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_ATOM = 10  # precedence of what needs no parentheses before a method call
_LARGEST, _SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126  # float32, leaving denormal numbers out


Text = Callable[[int], str]  # of an operand, given the precedence of what stands around it


@dataclass(frozen=True)
class Dialect:
    """How leaves, operators and functions are written; an operator without a text of its own is written by its sign."""

    name: str
    tiles: Callable[[Operator], str]  # format string over the printed operands, "" for none
    numbers: Callable[[Operator], str]  # the same where every operand is one number
    mixed: Callable[[Operator], str]  # the same on a tile {0} and a number {1}, "" where that is no different
    load: Callable[[Printer, Load], str]
    rounds_down: bool  # the language's own // and % do
    module: str = ""  # of the GPU language: tl, gl; "" where numbers are Python's
    decorator: str = ""  # line above each function, "" for none

    @property
    def is_gpu(self) -> bool:
        return bool(self.module)


@dataclass(frozen=True)
class Printer:
    """Prints expressions in one dialect; `names` maps symbols to the variables that hold them."""

    dialect: Dialect
    names: Mapping[str, str] = field(default_factory=dict)
    floats: str = "torch.float32"  # torch: the type that floats are computed in
    numbers: frozenset[str] = frozenset()  # symbols that are numbers, besides those that always are
    scalar_code: bool = False  # every int and bool is one number (tile programs)
    compared: bool = False  # the value goes into a comparison, with no arithmetic between
    added: bool = False  # the value goes into a sum or product
    decides: bool = False  # a comparison or floor reads the value, so that all targets must round it alike
    offsets_64: bool = True  # places in a tensor operand may lie 2**31 elements apart

    def __call__(self, node: Expr, outer: int = 0) -> str:
        match node:
            case Const(value):
                text = self._constant(value)
                return f"({text})" if text.startswith("-") and outer > OPERATORS["add"].precedence else text
            case Symbol(name):
                return self.names.get(name, name)
            case Scalar(name):
                return f"arg_{name}"
            case Load():
                return self.dialect.load(self, node)
            case Call(op, args) if self._must_round(node):
                return self._inside(op)._rounded(OPERATORS[op], args)
            case Call(op, args):
                return self._inside(op)._call(OPERATORS[op], args, node, outer)
            case _:
                raise InternalError(f"{self.dialect.name} printer: unknown node {type(node).__name__}")

    def is_number(self, node: Expr) -> bool:
        """Whether the value is one number: of the whole call, in tile programs also what is not read from floats."""
        if self.scalar_code:
            return node.dtype != "float" or not any(isinstance(n, Load) and n.dtype == "float" for n in nodes(node))
        return is_uniform(node, self.numbers)

    def _inside(self, op: str) -> Printer:
        """The printer of the operands of `op`."""
        compares, record = op in _COMPARISONS, OPERATORS[op]
        adds = not record.is_function and not compares and record.takes != "bool"
        decides = self.decides or record.decides
        if record.chooses or (self.compared, self.added, self.decides) == (compares, adds, decides):
            return self
        return replace(self, compared=compares, added=adds, decides=decides)

    # -- constants -----------------------------------------------------------------------------------------------------
    def _constant(self, value: int | float | bool) -> str:
        if isinstance(value, float) and (self.dialect.is_gpu or self.floats == "torch.float32"):
            value = self._in_range(value)
        if isinstance(value, float) and math.isinf(value):
            return 'float("inf")' if value > 0 else '-float("inf")'
        return repr(value)

    def _in_range(self, value: float) -> float:
        """As float32 has it. Triton takes a constant that is not normal there for one of 64 bits."""
        if abs(value) > _LARGEST:
            return math.copysign(math.inf, value)
        return math.copysign(_SMALLEST, value) if self.dialect.is_gpu and 0 < abs(value) < _SMALLEST else value

    # -- operators -----------------------------------------------------------------------------------------------------
    def _call(self, op: Operator, args: tuple[Expr, ...], node: Call, outer: int) -> str:
        if op.makes_ints and args[0].dtype == "int":
            return self(args[0], outer)  # floor of an int
        if self.dialect.is_gpu:
            written = self._division(op, args, self.dialect.tiles(op))
            if op.name == "not" and is_uniform(args[0], symbols(args[0]) - _VARYING):
                written = "(({0}) ^ True)"  # what Triton knows while it compiles is Python's bool: ~True is -2
            return self._signed(op, [self._gpu_operand(op, a) for a in args], outer, written)
        if self.scalar_code and node.dtype != "float" and not all(map(self.is_number, args)):
            on_tensors = replace(self, scalar_code=False, numbers=symbols(node))
            return f"{node.dtype}({on_tensors._tiles(op, args, node, 0)})"
        if all(map(self.is_number, args)):
            return self._plain(op, args, outer)
        return self._tiles(op, args, node, outer)

    def _signed(self, op: Operator, texts: list[Text], outer: int, written: str) -> str:
        """An operator by its text, else by its sign."""
        if written:
            return written.format(*(text(0) for text in texts), m=self.dialect.module)
        if op.sign is None:
            raise InternalError(f"{self.dialect.name} printer: no way to write {op.name}")
        if op.arity == 1:
            text = f"{op.sign}{texts[0](op.precedence)}"
        else:
            left = op.precedence + 1 if op.gives == "bool" and op.takes != "bool" else op.precedence
            text = f"{texts[0](left)} {op.sign} {texts[1](op.precedence + 1)}"
        return f"({text})" if op.precedence < outer else text

    # -- on a GPU ------------------------------------------------------------------------------------------------------
    def _gpu_operand(self, op: Operator, node: Expr) -> Text:
        if op.computes_floats and node.dtype == "int":
            return lambda outer: f"{self(node, OPERATORS['mul'].precedence)} * 1.0"
        return partial(self, node)

    def _must_round(self, node: Call) -> bool:
        """Whether a quotient, or a product that is added to something, decides: GPUs would round it in other ways."""
        if not self.decides or not self.dialect.is_gpu or node.dtype != "float":
            return False
        return node.op == "div" or (node.op == "mul" and self.added and not any(map(_is_power_of_2, node.args)))

    def _rounded(self, op: Operator, args: tuple[Expr, ...]) -> str:
        """An operator on floats, as its record has it where the value decides something."""
        if op.name == "div" and isinstance(args[1], Const) and _is_power_of_2(args[1]):
            # the same to the last bit
            return f"({self(args[0], OPERATORS['mul'].precedence)} * {self._constant(1.0 / args[1].value)})"
        floats = [Const(float(a.value)) if isinstance(a, Const) else a for a in args]
        texts = [self(a) if a.dtype == "float" else f"{self(a, OPERATORS['mul'].precedence)} * 1.0" for a in floats]
        return op.gpu_rounded.format(*texts, m=self.dialect.module)

    def _division(self, op: Operator, args: tuple[Expr, ...], written: str) -> str:
        """The text of an operator, "" for its sign; `//` and `%` have one where the language's own would not do."""
        if not op.divides_ints:
            return written
        # tile programs divide by the tile size only what they made not negative
        by_block = isinstance(args[1], Symbol) and args[1].name == "block"
        return "" if self.dialect.rounds_down or by_block or all(map(never_negative, args)) else written

    # -- in torch ------------------------------------------------------------------------------------------------------
    def _plain(self, op: Operator, args: tuple[Expr, ...], outer: int) -> str:
        """An operator on Python's own numbers."""
        written = self._division(op, args, self.dialect.numbers(op))
        if not _may_raise(op, args):
            return self._signed(op, [partial(self, a) for a in args], outer, written)
        names = ", ".join(op.operands)
        plain = written.format(*op.operands) if written else f" {op.sign} ".join(op.operands)
        tensors = self.dialect.tiles(op).format(*op.operands) or f"torch.{op.torch}({names})"
        operands = ", ".join(self(a) for a in args)
        return f"ieee(lambda {names}: {plain}, lambda {names}: {tensors}, {operands})"

    def _tiles(self, op: Operator, args: tuple[Expr, ...], node: Call, outer: int) -> str:
        """An operator where an operand, at least, is a tile."""
        floats = node.dtype == "float" or any(a.dtype == "float" for a in args)
        if op.name == "where" and self.is_number(args[0]):
            chosen = [
                self._lifted(_as_float(a) if floats else a) if self.is_number(a) else self._tile(a, floats)(0)
                for a in args[1:]
            ]
            return f"({chosen[0]} if {self(args[0])} else {chosen[1]})"
        written = self._division(op, args, self.dialect.tiles(op))
        if self.dialect.mixed(op) and any(map(self.is_number, args)):
            written, args = self.dialect.mixed(op), args[::-1] if self.is_number(args[0]) else args
        texts = [self._tile(a, floats and a.dtype != "bool") for a in args]
        if written and floats:
            branches = range(1, 3) if op.name == "where" else range(len(args))
            alone = all(self.is_number(args[n]) for n in branches)
            for n in branches:
                if self.is_number(args[n]) and (alone or not isinstance(args[n], Const)):
                    texts[n] = partial(self._lifted, args[n])
        return self._signed(op, texts, outer, written)

    def _tile(self, node: Expr, floats: bool) -> Text:
        """An operand of an operator on tiles; an int among floats is cast."""
        if floats and node.dtype == "int" and not self.is_number(node):
            return lambda outer: f"{self(node, _ATOM)}.to({self.floats})"
        return partial(self, node)

    def _lifted(self, node: Expr, outer: int = 0) -> str:
        """A number as a tensor without dimensions, whose type is that of tiles: what exceeds it is infinite."""
        dtype = {"float": self.floats, "int": "torch.int64", "bool": "torch.bool"}[node.dtype]
        return f'torch.tensor({self(node)}, dtype={dtype}, device="cpu")'

    def tile(self, node: Expr) -> str:
        """The value of a function that gives a float tile, or what broadcasts to one."""
        if self.is_number(node):
            return self._lifted(_as_float(node))
        return self._tile(node, True)(0)


def _as_float(number: Expr) -> Expr:
    """A number that torch is not to take for an int, whose functions would have its default dtype."""
    return number if number.dtype == "float" else Call("mul", (number, Const(1.0)), "float")


def _is_power_of_2(node: Expr) -> bool:
    """A number by which a product is exact."""
    return isinstance(node, Const) and math.frexp(node.value)[0] == 0.5


# -- what is known of a value -----------------------------------------------------------------------------------------
def _may_raise(op: Operator, args: tuple[Expr, ...]) -> bool:
    """Whether Python raises for some values of the operands where floats give infinity or NaN."""
    if op.gives not in ("float", "int") or op.divides_ints:
        return False
    if all(isinstance(a, Const) for a in args):
        try:
            op.python(*(a.value for a in args if isinstance(a, Const)))
            return False
        except (ArithmeticError, ValueError):
            return True
    return not (op.name in ("div", "sqrt", "rsqrt", "log", "log2") and is_clearly_positive(args[-1]))


def is_uniform(node: Expr, names: frozenset[str] = frozenset()) -> bool:
    """True when the value is one number for the whole call: constants, lengths, scalar operands, and these names."""
    return all(
        isinstance(n, (Const, Scalar, Call)) or (isinstance(n, Symbol) and n.name in _UNIFORM | names)
        for n in nodes(node)
    )


def axes(node: Expr) -> frozenset[str]:
    """Along which of the two positions, "q" and "kv", a value varies."""
    read = symbols(node)
    if read & {"qk", "score"}:
        return frozenset({"q", "kv"})
    return frozenset(axis for axis in ("q", "kv") if f"{axis}_pos" in read)


# -- Triton and Gluon -------------------------------------------------------------------------------------------------
def _pointer_load(language: str) -> Callable[[Printer, Load], str]:
    def place(printer: Printer, index: Expr, stride: str) -> str:
        # A tensor may have more than 2**31 elements. Both factors are extended from 32 bits, which the product is for
        # the compiler to make use of.
        if not printer.offsets_64:
            return f"{printer(index, OPERATORS['mul'].precedence)} * {stride}"
        return f"{language}.cast({printer(index)}, {language}.int64) * {stride}"

    def load(printer: Printer, node: Load) -> str:
        # Kernels clamp positions to real ones and the caller proves indices to be in range, so no read needs a mask.
        name = f"arg_{node.tensor.name}"
        offset = " + ".join(place(printer, index, f"s{d}_{node.tensor.name}") for d, index in enumerate(node.index))
        value = f"{language}.load({name}{' + ' if offset else ''}{offset})"
        if node.dtype == "int" and printer.scalar_code and not printer.compared:
            return f"as_bound({value})"
        if node.dtype == "int" and printer.added:
            return f"{value}.to({language}.int64)"
        if node.dtype == "int":
            return f"as_int({value})"  # ids of 64 bits keep them: two must not meet because their low halves do
        return f"{value}.to({language}.{'float32' if node.dtype == 'float' else 'int1'})"

    return load


def _gpu(name: str, module: str, written: Callable[[Operator], str]) -> Dialect:
    load, decorator = _pointer_load(module), f"@{name}.jit"
    return Dialect(name, written, written, lambda op: "", load, rounds_down=False, module=module, decorator=decorator)


TRITON = _gpu("triton", "tl", lambda op: op.gpu)
GLUON = _gpu("gluon", "gl", lambda op: op.gluon or op.gpu)


# -- torch ------------------------------------------------------------------------------------------------------------
def is_block(node: Load) -> bool:
    """Whether a tile reads a block of a tensor, by positions, heads and batch rows as they are: it can be a view."""
    names = [i.name for i in node.index if isinstance(i, Symbol)]
    if not len(set(names)) == len(names) == len(node.index):
        return False
    return {"q_pos", "kv_pos"} & set(names) != set() and set(names) <= {"batch", "head", "q_pos", "kv_pos"}


def _torch_load(printer: Printer, node: Load) -> str:
    index = ", ".join(printer(i) for i in node.index) or "()"
    text = f"arg_{node.tensor.name}[{index}]"
    if is_block(node) and not printer.scalar_code:
        text = f"read(arg_{node.tensor.name}, {index})"
    if printer.scalar_code and node.dtype != "float":
        return f"{node.dtype}({text})"
    return f"{text}.long()" if node.dtype == "int" else text  # small ints must not overflow in arithmetic


TORCH = Dialect(
    name="torch",
    tiles=lambda op: op.tile,
    numbers=lambda op: op.number,
    mixed=lambda op: op.tile_and_number,
    load=_torch_load,
    rounds_down=True,
)
