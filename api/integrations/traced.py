"""A mask function of indices, as transformers and FlexAttention have them, taken down as text of the language.

`mask(batch, head, q, kv)` is called once, with indices that write down what is done to them. That is text, and no
expression yet, because torch.compile traces it too: what it makes of text are constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MaskFunction = Callable[..., Any]  # (batch, head, q, kv) -> whether the query sees the key

_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Untraceable(Exception):
    """A function that does something with an index which the language has no word for."""


class Index:
    """A number or a bool that depends on indices, as text with the names `batch`, `q_idx` and `kv_idx`.

    shift: how much it grows where both positions grow by 1. That is 1 for a position, and 0 for a difference of two
    and for a bool that stays as it is; None where it is no one number.
    is_bool: whether it is a bool.
    indexes: whether a tensor may be read at it: a position or the batch row as it is. Any other might be negative,
    which torch counts from the end.
    causal: of a bool, whether it holds only where kv_idx <= q_idx.
    tensors: those read so far, by all indices of one function; `t0` in the text is the first.
    """

    __hash__ = None  # type: ignore[assignment]
    device = None  # mask functions move bools to where others are

    def __init__(
        self, text: str, tensors: list[Tensor], shift: int | None = 0, *, is_bool: bool = False, indexes: bool = False,
        causal: bool = False,
    ) -> None:  # fmt: skip
        self.text, self.tensors, self.shift = text, tensors, shift
        self.is_bool, self.indexes, self.causal = is_bool, indexes, causal

    def to(self, place: Any) -> Index:
        if isinstance(place, torch.dtype) and not (self.is_bool and place is torch.bool):
            raise Untraceable("an index is cast")
        return self

    def new_ones(self, size: Any, dtype: Any = None) -> Index:
        return self._filled(size, dtype, "True")

    def new_zeros(self, size: Any, dtype: Any = None) -> Index:
        return self._filled(size, dtype, "False")

    def _filled(self, size: Any, dtype: Any, text: str) -> Index:
        if len(size) != 0 or dtype is not torch.bool:
            raise Untraceable("a tensor is made like an index")
        return Index(text, self.tensors, is_bool=True)

    def __bool__(self) -> bool:
        raise Untraceable("an index decides what is run next")

    # -- numbers
    def _joined(self, sign: str, first: Any, second: Any) -> Index:
        a, b = self.other(first), self.other(second)
        if a.is_bool or b.is_bool:
            raise Untraceable(f"{sign} is applied to bools")
        shift: int | None = 0 if a.shift == 0 and b.shift == 0 else None
        if sign in "+-" and a.shift is not None and b.shift is not None:
            shift = a.shift + b.shift if sign == "+" else a.shift - b.shift
        return Index(f"({a.text} {sign} {b.text})", self.tensors, shift)

    def __add__(self, other: Any) -> Index:
        return self._joined("+", self, other)

    def __radd__(self, other: Any) -> Index:
        return self._joined("+", other, self)

    def __sub__(self, other: Any) -> Index:
        return self._joined("-", self, other)

    def __rsub__(self, other: Any) -> Index:
        return self._joined("-", other, self)

    def __mul__(self, other: Any) -> Index:
        return self._joined("*", self, other)

    def __rmul__(self, other: Any) -> Index:
        return self._joined("*", other, self)

    def __floordiv__(self, other: Any) -> Index:
        return self._joined("//", self, other)

    def __mod__(self, other: Any) -> Index:
        return self._joined("%", self, other)

    def __neg__(self) -> Index:
        return self._joined("-", 0, self)

    def __abs__(self) -> Index:
        if self.is_bool:
            raise Untraceable("abs is applied to a bool")
        return Index(f"abs({self.text})", self.tensors, 0 if self.shift == 0 else None)

    # -- comparisons
    def _compared(self, sign: str, other: Any) -> Index:
        a, b = self, self.other(other)
        if a.is_bool != b.is_bool or (a.is_bool and sign not in ("==", "!=")):
            raise Untraceable(f"{sign} is applied to bools")
        if sign == ">=" and a.indexes and b.text == "0":  # how transformers writes that all is seen
            return Index("True", self.tensors, is_bool=True)
        shift = 0 if a.shift is not None and a.shift == b.shift else None
        causal = f"{a.text} {sign} {b.text}" in ("kv_idx <= q_idx", "q_idx >= kv_idx")
        return Index(f"({a.text} {sign} {b.text})", self.tensors, shift, is_bool=True, causal=causal)

    def __le__(self, other: Any) -> Index:
        return self._compared("<=", other)

    def __lt__(self, other: Any) -> Index:
        return self._compared("<", other)

    def __ge__(self, other: Any) -> Index:
        return self._compared(">=", other)

    def __gt__(self, other: Any) -> Index:
        return self._compared(">", other)

    def __eq__(self, other: Any) -> Index:  # type: ignore[override]
        return self._compared("==", other)

    def __ne__(self, other: Any) -> Index:  # type: ignore[override]
        return self._compared("!=", other)

    # -- bools
    def _logic(self, sign: str, other: Any) -> Index:
        a, b = self, self.other(other)
        if not (a.is_bool and b.is_bool):
            raise Untraceable(f"{sign} is applied to numbers")
        for one, rest in ((a, b), (b, a)):
            if sign in "&|" and one.text == ("True" if sign == "&" else "False"):
                return rest
        causal = (a.causal or b.causal) if sign == "&" else (a.causal and b.causal and sign == "|")
        shift = 0 if a.shift == 0 and b.shift == 0 else None
        return Index(f"({a.text} {sign} {b.text})", self.tensors, shift, is_bool=True, causal=causal)

    def __and__(self, other: Any) -> Index:
        return self._logic("&", other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Index:
        return self._logic("|", other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Index:
        return self._logic("^", other)

    __rxor__ = __xor__

    def __invert__(self) -> Index:
        if not self.is_bool:
            raise Untraceable("~ is applied to a number")
        return Index(f"(~{self.text})", self.tensors, self.shift, is_bool=True)

    # -- what is no index yet
    def other(self, given: Any) -> Index:
        """Whatever stands beside an index: a number, or a tensor that holds one."""
        if isinstance(given, Index):
            return given
        if isinstance(given, bool):
            return Index(str(given), self.tensors, is_bool=True)
        if isinstance(given, int):
            return Index(str(given), self.tensors)
        if isinstance(given, Tensor) and given.dim() == 0:
            return self.read(given, ())
        raise Untraceable(f"an index is joined with {type(given).__name__}")

    def read(self, tensor: Tensor, at: tuple[Any, ...]) -> Index:
        """An entry of a tensor."""
        indices = [self.other(index) for index in at]
        if tensor.dim() != len(indices):
            raise Untraceable(f"a tensor of {tensor.dim()} dimensions is read by {len(indices)} indices")
        if not all(index.indexes or index.text.isdigit() for index in indices):
            raise Untraceable("a tensor is read at what may be negative, or no whole number")
        known = [number for number, found in enumerate(self.tensors) if found is tensor]
        number = known[0] if known else len(self.tensors)
        if not known:
            self.tensors.append(tensor)
        places = ", ".join([place(index, size) for index, size in zip(indices, tensor.shape)]) if indices else "()"
        shift = 0 if all(index.shift == 0 for index in indices) else None
        return Index(f"t{number}[{places}]", self.tensors, shift, is_bool=tensor.dtype is torch.bool)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch, called with an index."""
        return _applied(function, args, kwargs)


def place(index: Index, size: int) -> str:
    """An index of a dimension; one that is chosen is written so that it is seen to stay inside."""
    return f"minimum({index.text}, {size - 1})" if index.text.startswith("where(") else index.text


def _applied(function: Any, args: Any, kwargs: Any) -> Index:
    some = [given for given in args if isinstance(given, Index)]
    if some and not kwargs:
        of = some[0].other
        if function is torch.logical_and:
            return of(args[0]) & args[1]
        if function is torch.logical_or:
            return of(args[0]) | args[1]
        if function is torch.logical_not:
            return ~some[0]
        if function is torch.abs:
            return abs(some[0])
        if function is torch.where and len(args) == 3:
            return _chosen(of(args[0]), of(args[1]), of(args[2]))
    raise Untraceable(f"{getattr(function, '__name__', function)} of torch is applied to an index")


def _chosen(condition: Index, a: Index, b: Index) -> Index:
    if not condition.is_bool or a.is_bool != b.is_bool:
        raise Untraceable("where is applied to a number and a bool")
    shift = a.shift if condition.shift == 0 and a.shift == b.shift else None
    indexes = (a.indexes or a.text.isdigit()) and (b.indexes or b.text.isdigit())
    text = f"where({condition.text}, {a.text}, {b.text})"
    return Index(text, condition.tensors, shift, is_bool=a.is_bool, indexes=indexes)


class _Reading(TorchFunctionMode):
    """Sees tensors that are read at an index, or compared with one, which know nothing of it otherwise."""

    def __init__(self, some: Index) -> None:
        super().__init__()
        self.some = some

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, Index) for index in at):
                return self.some.read(args[0], at)
        elif any(isinstance(given, Index) for given in args):
            return _applied(function, args, kwargs)
        return function(*args, **(kwargs or {}))


def traced(mask_function: MaskFunction) -> Index:
    """What a mask function says of a pair, for all heads alike. Raises Untraceable, or what the function raises."""
    tensors: list[Tensor] = []
    batch, head = (Index(text, tensors, indexes=True) for text in ("batch", "0"))
    q, kv = (Index(text, tensors, shift=1, indexes=True) for text in ("q_idx", "kv_idx"))
    with _Reading(batch):
        said = mask_function(batch, head, q, kv)
    if isinstance(said, bool):
        return Index(str(said), tensors, is_bool=True)
    if not isinstance(said, Index) or not said.is_bool:
        raise Untraceable(f"it gives {type(said).__name__} in place of a bool")
    return said


def kind_of(tensor: Tensor) -> str:
    """What a variant declares for a tensor: "bool2", "int1", "float0"."""
    name = "bool" if tensor.dtype is torch.bool else "int" if tensor.dtype in _INTS else "float"
    return f"{name}{tensor.dim()}"


def at_positions(text: str, q_idx: str, kv_idx: str) -> str:
    """Text of the language, with expressions in place of the two indices."""
    return re.sub(r"\bq_idx\b", q_idx, re.sub(r"\bkv_idx\b", kv_idx, text))
