"""Operations that `interpret` computes at once, beside Triton's own of the same tiles and numbers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from weft.codegen import interpret, quick_tiles

DTYPES = {
    tl.float32: "f4", tl.float16: "f2", tl.float64: "f8", tl.bfloat16: "u2", tl.int32: "i4", tl.int64: "i8",
    tl.uint32: "u4", tl.int16: "i2", tl.int1: "?",
}  # fmt: skip
STORED = {**DTYPES, tl.uint8: "u1"}
SHAPES = [(), (8,), (1,), (1, 8), (4, 1), (4, 8), (2, 8)]  # the last two do not fit each other
NUMBERS = [0, 1, -1, 7, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 0.5, -0.0, 1e-42, 1e39, np.inf, np.nan, True]
FLOATS = [0.0, -0.0, 1.0, -2.5, 3e38, 1e-40, np.inf, np.nan]
INTS = [0, 1, -1, 5, 2**31 - 1, -(2**31), 7, -9]


def tile(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    drawn = np.random.default_rng(seed).choice(FLOATS if dtype.is_floating() else INTS, shape or (1,))
    data = drawn.astype("f4" if dtype == tl.bfloat16 else "i8" if not dtype.is_floating() else "f8")
    data = (data.view("u4") >> 16).astype("u2") if dtype == tl.bfloat16 else data.astype(STORED[dtype])
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def addresses(shape: tuple[int, ...]) -> Any:
    dtype = tl.pointer_type(tl.float32)
    data = np.arange(4096, 4096 + 4 * int(np.prod(shape or (1,))), 4, dtype=np.uint64).reshape(shape or (1,))
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def said(operation: Any, given: tuple[Any, ...]) -> Any:
    """The result: type, numbers and bits; or that there is none."""
    try:
        made = operation(*given)
    except Exception:
        return "an error"
    data = made.handle.data
    return str(made.type), str(made.dtype), str(made.handle.dtype), data.dtype, data.shape, data.tobytes()


def compare(name: str, operation: Any, every: list[tuple[Any, ...]]) -> int:
    """How many Triton computes; all as it does."""
    computed = 0
    for given in every:
        expected = said(operation.__wrapped__, given)
        assert said(operation, given) == expected, (name, [getattr(g, "type", g) for g in given])
        computed += expected != "an error"
    return computed


def of_two() -> list[tuple[Any, ...]]:
    tiles = [tile(dtype, shape, n) for n, (dtype, shape) in enumerate(itertools.product(DTYPES, SHAPES))]
    pairs = [(a, b) for n, (a, b) in enumerate(itertools.product(tiles, tiles)) if a.dtype == b.dtype or n % 19 == 0]
    numbers = [*NUMBERS, tl.constexpr(3), tl.constexpr(0.25)]
    places = [addresses(shape) for shape in SHAPES]
    few = [tile(dtype, shape, 5) for dtype in DTYPES for shape in ((), (1,), (4, 8))]
    return [*pairs, *itertools.product(few, numbers), *itertools.product(places, [*few, *places, 3])]


def of_three() -> list[tuple[Any, ...]]:
    conditions = [tile(tl.int1, shape, 7) for shape in SHAPES] + [tile(tl.int32, (8,), 7)]
    kinds = (tl.float32, tl.int32, tl.int1, tl.bfloat16)
    parts = [*(tile(dtype, shape, 3) for dtype in kinds for shape in SHAPES[::2]), 0, -1, 0.5, -np.inf]
    return list(itertools.product(conditions, parts, parts))


def casts() -> list[tuple[Any, ...]]:
    tiles = [tile(dtype, shape, 3) for dtype in DTYPES for shape in ((), (8,), (4, 8))]
    return list(itertools.product([*tiles, addresses((8,)), 3, 0.5], [*DTYPES, tl.constexpr(tl.float32), tl.uint8]))


def ranges() -> list[tuple[Any, ...]]:
    ends = [-4, 0, 1, 4, 8, 12, 64, 2**31, 2**33, tl.constexpr(16), 8.0, None]
    return list(itertools.product(ends, ends))


@functools.cache
def memory(dtype: Any) -> np.ndarray[Any, Any]:
    return tile(dtype, (64,), 9).handle.data


def places(dtype: Any, shape: tuple[int, ...], kept: np.ndarray[Any, Any]) -> Any:
    """Addresses of a tile, or of one number: every other one, from the last to the first."""
    number = int(np.prod(shape or (1,)))
    at = kept.ctypes.data + kept.itemsize * np.arange(2 * number - 1, 0, -2, dtype=np.uint64)
    pointer, data = tl.pointer_type(dtype), at.astype(np.uint64).reshape(shape or (1,))
    return tl.tensor(TensorHandle(data, pointer), tl.block_type(pointer, list(shape)) if shape else pointer)


def masks() -> list[Any]:
    return [None, True, *(tile(tl.int1, shape, 7) for shape in SHAPES), tile(tl.int32, (8,), 7)]


def loads() -> list[tuple[Any, ...]]:
    pointers = [places(d, shape, memory(d)) for d in STORED for shape in ((), (8,), (1,), (4, 8))]
    others = [None, 0, 0.0, -0.0, -1, 2.5, -np.inf, 2**40, True, tl.constexpr(7), tile(tl.float32, (8,), 3)]
    return list(itertools.product([*pointers, 5], masks(), others))


def dots() -> list[tuple[Any, ...]]:
    """With every precision that there is, and one that there is not."""
    shapes = [(16, 32), (32, 16), (16, 16), (32, 32), (32,), (1, 16, 16)]
    drawn = {d: [tile(d, shape, n) for n, shape in enumerate(shapes)] for d in (tl.float32, tl.float16, tl.int32)}
    pairs = [pair for tiles in drawn.values() for pair in itertools.product(tiles, tiles)]
    sums = [None, 0.0, *(tile(tl.float32, (16, 16), 1), tile(tl.float32, (32, 32), 2), tile(tl.int32, (16, 16), 3))]
    precisions = [None, "ieee", tl.constexpr("ieee"), "tf32", "other"]
    mixed = [(drawn[tl.float32][0], drawn[tl.float16][1]), (drawn[tl.float32][2], 3)]
    return [(*pair, acc, how) for pair in (*pairs, *mixed) for acc in sums for how in precisions]


OTHERS = {"dot": dots, "to": casts, "cast": casts, "arange": ranges, "load": loads}


@pytest.mark.filterwarnings("ignore")  # of numbers that a type has not
def test_stores_are_those_of_triton() -> None:
    def in_a_launch() -> None:
        computed = 0
        for dtype, shape in itertools.product(STORED, ((), (8,), (4, 8))):
            values = [tile(other, sizes, 3) for other in (dtype, tl.float32) for sizes in ((), (8,), (4, 8))]
            for value, mask in itertools.product([*values, 3], masks()):
                found = []
                for store in (tl.store, tl.store.__wrapped__):
                    kept = memory(dtype).copy()
                    try:
                        assert store(places(dtype, shape, kept), value, mask=mask).type == tl.void
                    except Exception:
                        found.append("an error")
                    else:
                        found.append(kept.tobytes())
                        computed += store is tl.store
                assert found[0] == found[1], (dtype, shape, getattr(value, "type", value), getattr(mask, "type", mask))
        assert computed > 300

    interpret._isolated(in_a_launch)()


@pytest.mark.filterwarnings("ignore")  # of a condition that is no bool
def test_all_are_those_of_triton() -> None:
    def in_a_launch() -> None:
        ours = [(name, getattr(holder, name)) for holder, name, _ in quick_tiles.operations()]
        assert all(hasattr(operation, "__wrapped__") for _, operation in ours)
        pairs, triples = of_two(), of_three()
        for name, operation in ours:
            if name == "where":
                assert compare(name, operation, triples) > 500
            elif name in OTHERS:
                assert compare(name, operation, OTHERS[name]()) >= 10
            elif name not in ("__getitem__", "store"):
                assert compare(name, operation, pairs) > 300

    interpret._isolated(in_a_launch)()


def test_new_axes_are_those_of_triton() -> None:
    def in_a_launch() -> None:
        tiles = [*(tile(dtype, shape, 3) for dtype in DTYPES for shape in SHAPES), *map(addresses, SHAPES)]
        every = slice(None)
        places: list[Any] = [
            None,
            every,
            (None, every),
            (every, None),
            (every, None, every),
            (every, 0),
            (slice(1, 2),),
        ]
        assert compare("[]", tl.tensor.__getitem__, list(itertools.product(tiles, places))) > 100

    interpret._isolated(in_a_launch)()
