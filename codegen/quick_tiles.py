"""Usual operations on tiles in Triton's interpreter, computed at once.

For an addition the interpreter asks some fifty questions of types and shapes before numpy adds. Where tiles have types
that numpy has too, the answers are known. Whatever else comes is left to Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _interpreter

_Numpy = Callable[..., Any]
_Override = tuple[object, str, object]  # holder, attribute, value

_FLOATS = {"fp32": np.dtype("f4")}
_SIGNED = {"int32": np.dtype("i4"), "int64": np.dtype("i8")}
_INTS = {**_SIGNED, "uint32": np.dtype("u4")}
_NUMBERS, _BITS = {**_FLOATS, **_INTS}, {**_INTS, "int1": np.dtype("?")}
_ALL = {**_NUMBERS, **_BITS}
_HALVES = {"fp16": np.dtype("f2"), "bf16": np.dtype("u2")}  # numpy has the bits of the second
_STORED = {**_NUMBERS, **_HALVES, "fp64": np.dtype("f8")}  # what memory holds
_MULTIPLIED = {**_FLOATS, "fp16": _HALVES["fp16"]}
_PRECISIONS = (None, "tf32", "tf32x3", "ieee")
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
        yield _of_two(f"__{name}__", _usual(compute, types))
        yield _of_two(f"__r{name}__", _usual(_swapped(compute), types))
    for name, compute in _COMPARISONS.items():
        yield _of_two(f"__{name}__", _usual(compute, _NUMBERS, tl.int1))
    yield _of_two("__getitem__", _with_new_axes)
    yield _of_two("to", _cast)
    yield _in_place_of(tl, "cast", _cast)
    yield _in_place_of(tl, "arange", _arange)
    yield _in_place_of(tl, "dot", _dot, ("acc", "input_precision"))
    yield _in_place_of(tl, "load", _load, ("mask", "other"))
    yield _in_place_of(tl, "store", _store, ("mask",))
    yield _in_place_of(tl, "minimum", _usual(np.minimum, _NUMBERS))
    yield _in_place_of(tl, "maximum", _usual(np.maximum, _NUMBERS))
    yield _in_place_of(tl, "where", _where)


def _of_two(name: str, ours: Callable[[Any, Any], Any]) -> _Override:
    """A method of a tile with one argument."""
    theirs = getattr(tl.tensor, name)

    @functools.wraps(theirs)
    def found(tile: Any, other: Any, *more: Any, **options: Any) -> Any:
        made = None if more or options else ours(tile, other)
        return theirs(tile, other, *more, **options) if made is None else made

    return tl.tensor, name, found


def _in_place_of(holder: object, name: str, ours: Callable[..., Any], known: Collection[str] = ()) -> _Override:
    """known: options that it takes."""
    theirs, most = getattr(holder, name), ours.__code__.co_argcount

    @functools.wraps(theirs)
    def found(*given: Any, **options: Any) -> Any:
        takes = len(given) <= most and all(option in known for option in options)
        made = ours(*given, **options) if takes else None
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
    """As tl.tensor(TensorHandle(data, dtype), type), which look again whether these belong together."""
    kind, shape, numel = _kind(dtype, data.shape if is_block else None)
    handle, tile = TensorHandle.__new__(TensorHandle), tl.tensor.__new__(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tile.handle, tile.type, tile.dtype, tile.shape, tile.numel = handle, kind, dtype, shape, numel
    return tile


_kinds: dict[tuple[str, tuple[int, ...] | None], tuple[Any, Any, Any]] = {}


def _kind(dtype: Any, sizes: tuple[int, ...] | None) -> tuple[Any, Any, Any]:
    """Type, shape and number of elements of a tile, or of a number."""
    found = _kinds.get((dtype.name, sizes))
    if found is None:
        kind = dtype if sizes is None else tl.block_type(dtype, list(sizes))
        alike = tl.tensor(None, kind)
        found = _kinds[dtype.name, sizes] = kind, alike.shape, alike.numel
    return found


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
    return _made(data, tile.dtype, tile.type.is_block() or offset.type.is_block())


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
    return _made(data[index], tile.dtype, True)


def _keeps_all(part: Any) -> bool:
    return part is None or (type(part) is slice and part.start is part.stop is part.step is None)


def _arange(start: Any, end: Any) -> Any:
    first, last = (n.value if type(n) is tl.constexpr else n for n in (start, end))
    if type(first) is not int or type(last) is not int or not 0 <= first < last < 2**31:
        return None
    length = last - first
    return None if length & (length - 1) else _made(np.arange(first, last, dtype=np.int32), tl.int32, True)


def _cast(tile: Any, to: Any) -> Any:
    dtype = to.value if type(to) is tl.constexpr else to
    if type(tile) is not tl.tensor or type(dtype) is not tl.dtype:
        return None
    own, name = _ALL.get(tile.dtype.name), dtype.name
    if own is None or name not in _NUMBERS or tile.handle.data.dtype != own:
        return None
    return (
        tile if tile.dtype.name == name else _made(tile.handle.data.astype(_NUMBERS[name]), dtype, tile.type.is_block())
    )


def _dot(one: Any, other: Any, acc: Any = None, input_precision: Any = None) -> Any:
    """A product of matrices, whose precision is a matter of GPUs."""
    if type(one) is not tl.tensor or type(other) is not tl.tensor or input_precision not in _PRECISIONS:
        return None
    left, right, name = one.handle.data, other.handle.data, one.dtype.name
    own = _MULTIPLIED.get(name)
    if own is None or other.dtype.name != name or left.dtype != own or right.dtype != own:
        return None
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        return None
    if not (one.type.is_block() and other.type.is_block()):
        return None
    so_far: Any = np.float32(0)
    if acc is not None:
        if type(acc) is not tl.tensor or acc.dtype.name != "fp32" or acc.handle.data.dtype != _FLOATS["fp32"]:
            return None
        so_far = acc.handle.data
        if so_far.shape != (left.shape[0], right.shape[1]) or not acc.type.is_block():
            return None
    return _made(np.matmul(left, right, dtype=np.float32) + so_far, tl.float32, True)


def _load(pointer: Any, mask: Any = None, other: Any = None) -> Any:
    """Of addresses under a mask that is no larger, with a number elsewhere."""
    if type(pointer) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    element, places = pointer.dtype.element_ty, pointer.handle.data
    own, shown = _STORED.get(element.name), _shown(mask, pointer)
    if own is None or shown is None or (mask is None and other is not None):
        return None
    instead = _instead(other, element.name, own)
    if instead is None:
        return None
    return _made(
        _interpreter.load(places, shown, np.full(places.shape, instead), own), element, pointer.type.is_block()
    )


def _store(pointer: Any, value: Any, mask: Any = None) -> Any:
    """Of a tile of the type and shape that its addresses have."""
    if type(pointer) is not tl.tensor or type(value) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    element, places, data = pointer.dtype.element_ty, pointer.handle.data, value.handle.data
    shown = _shown(mask, pointer)
    if shown is None or value.dtype.name != element.name or data.dtype != _STORED.get(element.name):
        return None
    if data.shape != places.shape or value.type.is_block() != pointer.type.is_block():
        return None
    return tl.tensor(_interpreter.store(places, data, shown), tl.void)


def _shown(mask: Any, pointer: Any) -> Any:
    """Which of these addresses are meant; None where Triton should say it."""
    places = pointer.handle.data
    if mask is None:
        return np.ones(places.shape, np.bool_)
    if type(mask) is not tl.tensor or mask.handle.data.dtype != np.bool_ or mask.dtype.name != "int1":
        return None
    data = mask.handle.data
    if data.shape == places.shape and mask.type.is_block() == pointer.type.is_block():
        return data
    if not pointer.type.is_block() or not _fits(mask, pointer):
        return None
    smaller = all(size in (1, whole) for size, whole in zip(data.shape, places.shape)) or not mask.type.is_block()
    return np.broadcast_to(data, places.shape) if smaller else None


def _instead(other: Any, name: str, own: Any) -> Any:
    """The number where a mask hides, in the type of what is loaded; None for what Triton should convert."""
    value = other.value if type(other) is tl.constexpr else other
    if value is None or (type(value) in (int, float) and value == 0):
        return own.type(0)
    return _number(value, name, own) if name in _NUMBERS else None
