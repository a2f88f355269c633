"""Usual operations on tiles in Triton's interpreter, computed at once.

For an addition the interpreter asks some fifty questions of types and shapes before numpy adds. Where tiles have types
that numpy has too, the answers are known. Whatever else comes is left to Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_Numpy = Callable[..., Any]
_Override = tuple[object, str, object]  # holder, attribute, value

_FLOATS = {"fp32": np.dtype("f4")}
_SIGNED = {"int32": np.dtype("i4"), "int64": np.dtype("i8")}
_INTS = {**_SIGNED, "uint32": np.dtype("u4")}
_NUMBERS, _BITS = {**_FLOATS, **_INTS}, {**_INTS, "int1": np.dtype("?")}
_ALL = {**_NUMBERS, **_BITS}
_INT_RANGES = {"int32": (-(2**31), 2**31), "int64": (-(2**63), 2**63), "uint32": (0, 2**32)}
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # Triton takes others for float64

# what a method of a tile computes, of which types
_ARITHMETIC: tuple[tuple[str, _Numpy, dict[str, Any]], ...] = (
    ("add", np.add, _NUMBERS), ("sub", np.subtract, _NUMBERS), ("mul", np.multiply, _NUMBERS),
    ("truediv", np.divide, _FLOATS), ("mod", np.fmod, _SIGNED),
    ("floordiv", lambda a, b: (a - np.fmod(a, b)) // b, _SIGNED),  # toward 0
    ("and", np.bitwise_and, _BITS), ("or", np.bitwise_or, _BITS), ("xor", np.bitwise_xor, _BITS),
)  # fmt: skip
_COMPARISONS: dict[str, _Numpy] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def operations() -> Iterator[_Override]:
    """What to put in place during a launch, which has put the interpreter's operations there before."""
    for name, compute, types in _ARITHMETIC:
        yield _in_place_of(tl.tensor, f"__{name}__", _usual(compute, types))
        yield _in_place_of(tl.tensor, f"__r{name}__", _usual(_swapped(compute), types))
    for name, compute in _COMPARISONS.items():
        yield _in_place_of(tl.tensor, f"__{name}__", _usual(compute, _NUMBERS, tl.int1))
    yield _in_place_of(tl.tensor, "__getitem__", _with_new_axes)
    yield _in_place_of(tl, "minimum", _usual(np.minimum, _NUMBERS))
    yield _in_place_of(tl, "maximum", _usual(np.maximum, _NUMBERS))
    yield _in_place_of(tl, "where", _where)


def _in_place_of(holder: object, name: str, ours: Callable[..., Any]) -> _Override:
    theirs = getattr(holder, name)

    @functools.wraps(theirs)
    def found(*given: Any, **options: Any) -> Any:
        made = None if options else ours(*given)
        return theirs(*given, **options) if made is None else made

    return holder, name, found


def _swapped(compute: _Numpy) -> _Numpy:
    return lambda one, other: compute(other, one)


def _usual(compute: _Numpy, types: dict[str, Any], result: Any = None) -> Callable[..., Any]:
    """An operation that computes tiles of these types, and says None to others. result: its type, if another."""

    def found(tile: Any, other: Any) -> Any:
        if type(tile) is not tl.tensor:
            return None
        dtype = tile.dtype
        name = dtype.name
        data, own = tile.handle.data, types.get(name)
        if own is None or data.dtype != own:
            return _moved(tile, other) if compute is np.add and type(dtype) is tl.pointer_type else None
        if type(other) is not tl.tensor:
            second = _number(other, name, own)
            if second is None:
                return None
            return _made(compute(data, second), result or dtype, tile.type.is_block())
        second = other.handle.data
        if other.dtype.name != name:
            if name not in _SIGNED or other.dtype.name not in _SIGNED:
                return None
            dtype = tl.int64
        if second.dtype != types[other.dtype.name] or not _fits(tile, other):
            return None
        return _made(compute(data, second), result or dtype, tile.type.is_block() or other.type.is_block())

    return found


def _made(data: Any, dtype: Any, is_block: bool) -> Any:
    return tl.tensor(TensorHandle(data, dtype), _block(dtype, data.shape) if is_block else dtype)


def _fits(one: Any, other: Any) -> bool:
    """Whether numpy broadcasts two tiles as Triton does, which takes tiles of few axes for the last ones too."""
    return one.handle.data.ndim == other.handle.data.ndim or not (one.type.is_block() and other.type.is_block())


def _number(given: Any, name: str, own: Any) -> Any:
    """A number of Python in the type of a tile; None for one that has another type beside it."""
    value = given.value if type(given) is tl.constexpr else given
    if type(value) is int:
        least, end = _INT_RANGES.get(name, (-(2**31), 2**31))
        return own.type(value) if least <= value < end and name != "int1" else None
    if type(value) is float and name == "fp32":
        size = abs(value)
        if _LEAST_FLOAT <= size <= _MOST_FLOAT or size in (0.0, np.inf) or value != value:
            return own.type(value or 0.0)  # a constant of -0 is 0, as in compiled kernels
    return None


def _moved(tile: Any, offset: Any) -> Any:
    """Addresses some elements on."""
    if type(offset) is not tl.tensor or offset.dtype.name not in _SIGNED or not _fits(tile, offset):
        return None
    size = max(1, tile.dtype.element_ty.primitive_bitwidth // 8)
    data = tile.handle.data + size * offset.handle.data.astype(np.uint64)
    is_block = tile.type.is_block() or offset.type.is_block()
    return tl.tensor(TensorHandle(data, tile.handle.dtype), _block(tile.dtype, data.shape) if is_block else tile.dtype)


def _where(condition: Any, x: Any, y: Any) -> Any:
    given = [part for part in (x, y) if type(part) is tl.tensor]
    if not given or type(condition) is not tl.tensor or condition.handle.data.dtype != np.bool_:
        return None
    name = given[0].dtype.name
    own = _ALL.get(name)
    parts = [
        None if own is None
        else _number(part, name, own) if type(part) is not tl.tensor
        else part.handle.data if part.dtype.name == name and part.handle.data.dtype == own and _fits(part, condition)
        else None
        for part in (x, y)
    ]  # fmt: skip
    if any(part is None for part in parts) or not _fits(given[0], given[-1]):
        return None
    is_block = condition.type.is_block() or any(part.type.is_block() for part in given)
    return _made(np.where(condition.handle.data, *parts), given[0].dtype, is_block)


def _with_new_axes(tile: Any, index: Any) -> Any:
    """`tile[:, None]`."""
    data = tile.handle.data
    if type(index) is not tuple or not tile.type.is_block() or not all(map(_keeps_all, index)):
        return None
    if len(index) - index.count(None) != data.ndim:
        return None
    data = data[index]
    return tl.tensor(TensorHandle(data, tile.handle.dtype), _block(tile.dtype, data.shape))


def _keeps_all(part: Any) -> bool:
    return part is None or (type(part) is slice and part.start is part.stop is part.step is None)


_blocks: dict[tuple[str, tuple[int, ...]], Any] = {}


def _block(dtype: Any, shape: tuple[int, ...]) -> Any:
    found = _blocks.get((dtype.name, shape))
    if found is None:
        found = _blocks[dtype.name, shape] = tl.block_type(dtype, list(shape))
    return found
