"""The expression language on one page: five kinds of node, and Python's operators on them (ir/operators.py).

A node never changes and never compares by value: `a == b` *writes* a comparison. Two nodes mean the same when their
`str` is the same; `str(node)` is valid text of the language and `parse` reads it back.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import EllipsisType, NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union

from . import foreign
from .caller import outside_of_graphs, source_line
from .errors import InternalError, Problem, WeftError, counted, shown
from .numbers import is_int
from .operators import OPERATORS, Operator
from .operators import Number as Number
from .page import code_html

if TYPE_CHECKING:
    from pathlib import Path

    from ..compiler.planning.picture import Picture

DType = Literal["int", "float", "bool"]


# Public symbols: what they stand for, and their type. Positions are positions in the sequence, not row numbers.
SYMBOLS: dict[str, DType] = {
    "q_pos": "int", "kv_pos": "int", "head": "int", "kv_head": "int", "group": "int", "batch": "int",
    "q_len": "int", "kv_len": "int", "head_dim": "int", "score": "float",
}  # fmt: skip
# Symbols that only the compiler writes: the raw dot product, the ends (inclusive) of a tile, and what bounds need.
INTERNAL_SYMBOLS: dict[str, DType] = {
    "qk": "float", "q_first": "int", "q_last": "int", "kv_first": "int", "kv_last": "int", "q_offset": "int",
}  # fmt: skip
# Options of the call, those to come too, parameters of the other methods, and fields of a variant.
CALL_OPTIONS = frozenset(
    "query key value cache return_lse target schedule deterministic q_offset kv_lens q_lens cu_seqlens_q cu_seqlens_kv"
    " block_table uk uv rope form seed train operands q_descale k_descale v_descale out_dtype return_max"
    " batch_invariant indices index_block index_lens device direction path block_q block_kv score mask scale sink"
    " dropout latent name normalizer self".split()
)
INT32_MAX = 2**31 - 1

if taken := OPERATORS.keys() & (SYMBOLS.keys() | INTERNAL_SYMBOLS.keys() | CALL_OPTIONS):
    raise InternalError(f"operators: {', '.join(sorted(taken))} are names of symbols or call options; choose others")

NO_TRUTH = (
    "an expression has no truth value while it is being declared; write `a & b` for `and`, `a | b` for `or`, "
    "`~a` for `not`, `weft.where(c, a, b)` for `if`, `(a < b) & (b < c)` for `a < b < c`, and `weft.maximum(a, b)` for "
    "`max(a, b)`"
)
PARENTHESES = "& | ^ bind more tightly than comparisons: write (a <= b) & (c < d)"
SMALLER = (
    "read what differs from a tensor operand that the call gives, such as seen = weft.tensor('seen', 1, bool) and "
    "mask=seen[weft.kv_pos] for a long row of comparisons"
)
_NO_NUMBER = (
    "an expression is not a number yet, so that math.tanh(x), float(x) and range(x) cannot take it, and lists and "
    "arrays cannot be read at it; write weft.tanh(x) for math.tanh(x), and so for weft's other functions, and for "
    'table[x] declare table = weft.tensor("table", 1), whose entries each call gives, table=...'
)


def fail(message: str, where: str | None = None) -> NoReturn:
    raise WeftError.of("", Problem(what=message, where=where or source_line()))


class NoAttributeError(WeftError, AttributeError):
    """A method of tensors that expressions do not have; an AttributeError, so that `hasattr` says False."""


class Foreign:
    """What torch and numpy ask of anything that is handed to their functions."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Expr:
        return _foreign_call("torch", str(getattr(function, "__name__", function)), args, bool(kwargs))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Expr:
        return _foreign_call("numpy", ufunc.__name__, inputs, bool(options) or method != "__call__")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Expr:
        return _foreign_call("numpy", function.__name__, (), True)

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)
            what = f"an expression has no .{name}; {foreign.instead_of(name)}"
            raise NoAttributeError.of("", Problem(what=what, where=source_line()))


def _foreign_call(package: str, name: str, args: Any, special: bool) -> Expr:
    """`array + expression` written down; a function of torch or numpy refused, with what to write in place of it."""
    if name == "__getitem__" and args and foreign.is_array(args[0]):
        fail(foreign.read_hint(args[0], args[1]))
    operator = foreign.operator_named(name)
    if operator is not None and OPERATORS[operator].sign and len(args) == 2 and not special:
        left, right = args[::-1] if name.startswith("__r") or name == "rsub" else args
        if not isinstance(args[0], Foreign):  # a number or an array before the sign, which asks first
            return call(operator, left, right)
    fail(f"`{package}.{name.strip('_')}` computes numbers, and this is an expression; {foreign.instead_of(name)}")


def _refused(words: str) -> Callable[..., NoReturn]:
    """An operator of Python that expressions do not have."""

    def operator(*operands: object) -> NoReturn:
        fail(words)

    return operator


class Node(Foreign):
    """Python's operators, written down instead of computed."""

    dtype: DType
    where: str
    __hash__ = object.__hash__  # identity: `==` writes a comparison, so containers must never use it
    __iter__ = None
    __contains__ = None

    # fmt: off
    def __add__(self, other: Operand) -> Expr: return call("add", self, other)
    def __radd__(self, other: Operand) -> Expr: return call("add", other, self)
    def __sub__(self, other: Operand) -> Expr: return call("sub", self, other)
    def __rsub__(self, other: Operand) -> Expr: return call("sub", other, self)
    def __mul__(self, other: Operand) -> Expr: return call("mul", self, other)
    def __rmul__(self, other: Operand) -> Expr: return call("mul", other, self)
    def __truediv__(self, other: Operand) -> Expr: return call("div", self, other)
    def __rtruediv__(self, other: Operand) -> Expr: return call("div", other, self)
    def __floordiv__(self, other: Operand) -> Expr: return call("floordiv", self, other)
    def __rfloordiv__(self, other: Operand) -> Expr: return call("floordiv", other, self)
    def __mod__(self, other: Operand) -> Expr: return call("mod", self, other)
    def __rmod__(self, other: Operand) -> Expr: return call("mod", other, self)
    def __neg__(self) -> Expr: return call("neg", self)
    def __pos__(self) -> Expr: return expression(self)
    def __abs__(self) -> Expr: return call("abs", self)
    def __lt__(self, other: Operand) -> Expr: return call("lt", self, other)
    def __le__(self, other: Operand) -> Expr: return call("le", self, other)
    def __gt__(self, other: Operand) -> Expr: return call("gt", self, other)
    def __ge__(self, other: Operand) -> Expr: return call("ge", self, other)
    def __eq__(self, other: Operand) -> Expr: return call("eq", self, other)  # type: ignore[override]
    def __ne__(self, other: Operand) -> Expr: return call("ne", self, other)  # type: ignore[override]
    def __and__(self, other: Operand) -> Expr: return call("and", self, other)
    def __rand__(self, other: Operand) -> Expr: return call("and", other, self)
    def __or__(self, other: Operand) -> Expr: return call("or", self, other)
    def __ror__(self, other: Operand) -> Expr: return call("or", other, self)
    def __xor__(self, other: Operand) -> Expr: return call("xor", self, other)
    def __rxor__(self, other: Operand) -> Expr: return call("xor", other, self)
    def __invert__(self) -> Expr: return call("not", self)
    # fmt: on

    __pow__ = _refused(
        "`**` is not part of the language; write x * x, weft.sqrt(x) for x**0.5, weft.rsqrt(x) for x**-0.5, or "
        "weft.exp2(y * weft.log2(x)) of x above 0"
    )
    __rshift__ = _refused(
        "`>>` is not part of the language; write x // 2, x // 4, ..., and for places that differ "
        "x // weft.maximum(powers[places], 1), of powers of 2 that the call gives; weft.masks.bit_packed reads bits"
    )
    __lshift__ = _refused(
        "`<<` is not part of the language; write x * 2, x * 4, ..., or x * powers[places], of powers of 2 that the "
        "call gives"
    )
    __matmul__ = _refused("`@` is not part of the language: weft.score is scale * (query . key) already")
    __divmod__ = _refused("divmod is not part of the language; write x // y and x % y")
    __rpow__ = __pow__
    __rrshift__, __rlshift__, __rmatmul__, __rdivmod__ = __rshift__, __lshift__, __matmul__, __divmod__

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        fail(f"`{self}` is an expression and takes no arguments; write it without parentheses after it")

    def __getitem__(self, index: object) -> NoReturn:
        fail(f"`{self}` is one number for each query and key and has no index; weft.tensor declares what has one")

    __bool__ = _refused(NO_TRUTH)
    __index__ = __float__ = __complex__ = _refused(_NO_NUMBER)
    __int__ = _refused(f"an expression is not a number yet; {foreign.instead_of('int')}")
    __round__ = _refused(f"round is not part of the language; {foreign.instead_of('round')}")
    __floor__ = _refused(f"math.floor computes numbers, and this is an expression; {foreign.instead_of('floor')}")
    __ceil__ = _refused(f"math.ceil computes numbers, and this is an expression; {foreign.instead_of('ceil')}")
    __trunc__ = _refused(f"math.trunc computes numbers, and this is an expression; {foreign.instead_of('trunc')}")
    __len__ = _refused("an expression has no length; use weft.q_len or weft.kv_len")

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The expression as a notebook shows it."""
        return code_html(self.text)

    if TYPE_CHECKING:  # api/tools/notebook.py has it: what draws tiles lies in a room above

        def show_mask(
            self, q_len: int, kv_len: int, *, block_q: int | None = None, block_kv: int | None = None,
            path: str | Path | None = None, q_offset: int | None = None, head: int = 0, batch: int = 0, **options: Any,
        ) -> Picture: ...  # fmt: skip

    @cached_property
    def text(self) -> str:
        try:
            return print_expr(self)  # type: ignore[arg-type]
        except RecursionError:
            fail(f"this expression is too deep to be printed; {SMALLER}", self.where)


@dataclass(frozen=True, eq=False, repr=False)
class Const(Node):
    value: Number
    where: str = field(default="", kw_only=True)

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "float"


@dataclass(frozen=True, eq=False, repr=False)
class Symbol(Node):
    name: str
    dtype: DType
    where: str = field(default="", kw_only=True)


@dataclass(frozen=True, eq=False, repr=False)
class Scalar(Node):
    """A number given when the variant is called; changing it compiles nothing."""

    name: str
    dtype: DType
    where: str = field(default="", kw_only=True)


def _of_number(name: str) -> Callable[..., Any]:
    """An operator of tensor operands: one without dimensions is the number that it holds, others want an index."""

    def operator(self: TensorOperand, *others: Any) -> Any:
        return getattr(self[()] if self.rank == 0 else self._unindexed(), name)(*others)

    operator.__name__ = name
    return operator


@dataclass(frozen=True, eq=False)
class TensorOperand(Foreign):
    """A tensor given when the variant is called, read by `operand[index, ...]`."""

    name: str
    rank: int
    dtype: DType = "float"
    where: str = field(default="", kw_only=True, compare=False)

    def __getitem__(self, index: Operand | tuple[Operand, ...]) -> Load:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.rank:
            fail(f"{self.name}: expected {counted(self.rank, 'index')}, got {len(index)}")
        if any(isinstance(i, (slice, EllipsisType, NoneType)) for i in index):
            fail(f"{self.name}: expected an int for each dimension, got a slice, None or `...`; one entry is read")
        nodes = tuple(expression(i) for i in index)
        for node in nodes:
            if node.dtype != "int":
                fail(f"{self.name}[{node}]: expected an int index, got {node.dtype}; weft.floor gives an int")
        return Load(self, nodes, where=source_line())

    def __iter__(self) -> NoReturn:
        fail(f"{self.name}: a tensor operand is read by index expressions, not iterated")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TensorOperand):
            return (self.name, self.rank, self.dtype) == (other.name, other.rank, other.dtype)
        if isinstance(other, (bool, int, float, Node)) or foreign.is_array(other):
            if self.rank == 0:
                return call("eq", self, other)  # type: ignore[return-value, arg-type]
            self._unindexed()  # else `doc == 3` were False, and as a mask would hide everything
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.name, self.rank, self.dtype))

    def __ne__(self, other: object) -> bool:
        if self.rank == 0 and not isinstance(other, TensorOperand):
            return call("ne", self, other)  # type: ignore[return-value, arg-type]
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def _unindexed(self) -> NoReturn:
        fail(f"{self.name} is a tensor: index it, e.g. {self.name}[{', '.join(['head'] * self.rank)}]")

    __add__ = _of_number("__add__")
    __radd__ = _of_number("__radd__")
    __sub__ = _of_number("__sub__")
    __rsub__ = _of_number("__rsub__")
    __mul__ = _of_number("__mul__")
    __rmul__ = _of_number("__rmul__")
    __truediv__ = _of_number("__truediv__")
    __rtruediv__ = _of_number("__rtruediv__")
    __floordiv__ = _of_number("__floordiv__")
    __rfloordiv__ = _of_number("__rfloordiv__")
    __mod__ = _of_number("__mod__")
    __rmod__ = _of_number("__rmod__")
    __pow__ = _of_number("__pow__")
    __rpow__ = _of_number("__rpow__")
    __matmul__ = _of_number("__matmul__")
    __rmatmul__ = _of_number("__rmatmul__")
    __neg__ = _of_number("__neg__")
    __pos__ = _of_number("__pos__")
    __abs__ = _of_number("__abs__")
    __invert__ = _of_number("__invert__")
    __lt__ = _of_number("__lt__")
    __le__ = _of_number("__le__")
    __gt__ = _of_number("__gt__")
    __ge__ = _of_number("__ge__")
    __and__ = _of_number("__and__")
    __rand__ = _of_number("__rand__")
    __or__ = _of_number("__or__")
    __ror__ = _of_number("__ror__")
    __xor__ = _of_number("__xor__")
    __rxor__ = _of_number("__rxor__")
    __bool__ = _of_number("__bool__")
    __len__ = _of_number("__len__")
    __float__ = _of_number("__float__")
    __int__ = _of_number("__int__")
    __index__ = _of_number("__index__")
    __call__ = _of_number("__call__")


@dataclass(frozen=True, eq=False, repr=False)
class Load(Node):
    tensor: TensorOperand
    index: tuple[Expr, ...]
    where: str = field(default="", kw_only=True)

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.tensor.dtype


@dataclass(frozen=True, eq=False, repr=False)
class Call(Node):
    op: str
    args: tuple[Expr, ...]
    dtype: DType
    where: str = field(default="", kw_only=True)


Expr = Union[Const, Symbol, Scalar, Load, Call]
Operand = Union[Expr, Number, Node]


def print_expr(node: Expr, outer: int = 0) -> str:
    """Text of `node`, with parentheses only where precedence asks for them."""
    match node:
        case Const(value):
            text = repr(value)
            return f"({text})" if text.startswith("-") and outer > OPERATORS["add"].precedence else text
        case Symbol(name) | Scalar(name):
            return name
        case Load(tensor, index):
            return f"{tensor.name}[{', '.join(print_expr(i) for i in index) or '()'}]"
        case Call(op, args):
            return _print_call(op, args, outer)
        case _:
            raise InternalError(f"printer: unknown node {type(node).__name__}")


def _print_call(name: str, args: tuple[Expr, ...], outer: int) -> str:
    op = OPERATORS[name]
    if op.sign is None:
        return f"{name}({', '.join(print_expr(a) for a in args)})"
    if op.arity == 1:
        text = f"{op.sign}{print_expr(args[0], op.precedence)}"
    else:
        # Operators group to the left; comparisons do not chain, so both their sides ask for parentheses.
        left = op.precedence + 1 if op.gives == "bool" and op.takes != "bool" else op.precedence
        text = f"{print_expr(args[0], left)} {op.sign} {print_expr(args[1], op.precedence + 1)}"
    return f"({text})" if op.precedence < outer else text


def expression(value: Operand) -> Expr:
    """A node for a number (Python's, numpy's, or in a 0-d tensor without gradient), or the node itself."""
    match value:
        case Const() | Symbol() | Scalar() | Load() | Call():
            return value
        case bool() | int() | float():
            if isinstance(value, int) and abs(value) > INT32_MAX:
                fail(f"integer overflow: the constant {shown(value)} does not fit in 32 bits")
            if isinstance(value, float) and math.isnan(value):
                fail("expected a number, got NaN")
            # subclasses (numpy.float64, an enum) print as something else than a number
            plain = next(kind for kind in (bool, int, float) if isinstance(value, kind))
            return Const(plain(value), where=source_line())
        case TensorOperand(rank=0):
            return Load(value, (), where=source_line())
        case TensorOperand():
            value._unindexed()
        case _:
            number = foreign.number_in(value)
            if number is not None:
                return expression(number)
            fail(f"expected an expression or a number, got {foreign.described(value)}")


_TYPE_HINTS = {
    ("int", "float"): " (weft.floor gives an int)",
    ("number", "bool"): " (write weft.where(c, a, 0) for c * a; what is to be hidden goes into mask=)",
    ("bool", "int"): f" ({PARENTHESES}; bits of an int are x % 2, x // 2 % 2, x // 4 % 2, ...)",
}


def _result(op: Operator, args: tuple[Expr, ...], where: str) -> DType:
    """Type of an operator applied to these operands; raises at the line that wrote it."""
    if op.name == "where":
        if args[0].dtype != "bool":
            fail(f"where: expected a bool condition, got {args[0].dtype} `{args[0]}`", where)
        args = args[1:]
        if {a.dtype for a in args} == {"bool"}:
            return "bool"
    for arg in args:
        allowed = {"int": ("int",), "bool": ("bool",), "number": ("int", "float"), "any": ("int", "float", "bool")}
        if arg.dtype not in allowed[op.takes]:
            hint = _TYPE_HINTS.get((op.takes, arg.dtype), "")
            sign = op.sign or op.name
            fail(f"`{sign}`: expected {' or '.join(allowed[op.takes])}, got {arg.dtype} `{arg}`{hint}", where)
    kinds = {a.dtype for a in args}
    if "bool" in kinds and len(kinds) > 1:
        fail(f"`{op.sign or op.name}`: cannot mix bool and {(kinds - {'bool'}).pop()}", where)
    if op.gives == "same":
        return "int" if kinds == {"int"} else "float"
    return op.gives


def call(name: str, *operands: Operand) -> Expr:
    """Write operator `name` applied to operands; checks types and remembers the source line."""
    if name not in OPERATORS:
        raise InternalError(f"unknown operator {name}")
    where = source_line()
    args = tuple(expression(x) for x in operands)
    if len(args) != OPERATORS[name].arity:
        fail(f"{name}: expected {counted(OPERATORS[name].arity, 'operand')}, got {len(args)}", where)
    return Call(name, args, _result(OPERATORS[name], args, where), where=where)


def symbol(name: str) -> Symbol:
    """The symbol of that name, public or internal."""
    return Symbol(name, SYMBOLS.get(name) or INTERNAL_SYMBOLS[name])


def check_identifier(name: str) -> str:
    """Raise WeftError for what is no name of a variant. Names reach generated source: nothing but a plain ASCII
    identifier may pass. That of a function is one: a variant may be called softplus."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        hint = "" if isinstance(name, str) else "; what it holds is given at each call, name=..."
        fail(f"expected a Python identifier as a name, got {shown(name)}{hint}")
    if name in SYMBOLS or name in INTERNAL_SYMBOLS or name in CALL_OPTIONS:
        fail(f"the name {name!r} is reserved for a symbol, function or call option; choose another")
    if name in ("inf", "nan"):
        fail(f"the name {name!r} is that of a constant; choose another")
    if name.startswith("_"):
        fail(f"the name {name!r} starts with an underscore; choose another")
    return name


def _check_name(name: str) -> str:
    """The same for an operand, which expressions read by its name."""
    if isinstance(name, str) and name in OPERATORS:
        fail(f"the name {name!r} is reserved for a symbol, function or call option; choose another")
    return check_identifier(name)


@outside_of_graphs
def scalar(name: str, dtype: type = float) -> Scalar:
    """Declare a number that is given at each call, `variant(q, k, v, name=...)`; a new value compiles nothing.

    name: a Python identifier. dtype: int (32 bits) or float (float32 in kernels).

    >>> scalar("window", int)
    window
    """
    _check_name(name)
    if not isinstance(dtype, type) or dtype not in (int, float):
        hint = f"; its value is given at each call, {name}={shown(dtype)}" if isinstance(dtype, (int, float)) else ""
        fail(f"scalar {name!r}: expected dtype int or float, got {shown(dtype)}{hint}")
    return Scalar(name, "int" if dtype is int else "float", where=source_line())


@outside_of_graphs
def tensor(name: str, rank: int, dtype: type = float) -> TensorOperand:
    """Declare a tensor that is given at each call and read by index: `slopes[head]`, `doc[batch, q_pos]`.

    name: a Python identifier. rank: number of dimensions, 0 to 4. dtype: float (gradients flow), int or bool. One of
    rank 0 holds one number, and is read by its name alone (`score / temperature`), or as `temperature[()]`.

    >>> tensor("slopes", 1)[symbol("head")]
    slopes[head]
    """
    _check_name(name)
    if not isinstance(dtype, type) or dtype not in (int, float, bool):
        fail(f"tensor {name!r}: expected dtype float, int or bool, got {shown(dtype)}")
    if not is_int(rank, 0, 4):
        hint = "; the rank is the number of dimensions" if isinstance(rank, (tuple, list)) else ""
        fail(f"tensor {name!r}: expected a rank from 0 to 4, got {shown(rank)}{hint}")
    kind: DType = "bool" if dtype is bool else "int" if dtype is int else "float"
    return TensorOperand(name, rank, kind, where=source_line())
