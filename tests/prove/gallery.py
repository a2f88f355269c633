"""Masks to prove things about: those of weft.masks with arguments of every kind, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_pos
from weft.ir.canonical import canonical
from weft.ir.expr import Expr, expression

window, prefix, size, stride, ahead = (weft.scalar(n, int) for n in ("window", "prefix", "size", "stride", "ahead"))
width, height, radius, columns = (weft.scalar(n, int) for n in ("width", "height", "radius", "columns"))
windows, limits, ids = (weft.tensor(n, 1, int) for n in ("windows", "limits", "ids"))
pages, valid = weft.tensor("pages", 2, int), weft.tensor("valid", 2, bool)
causal = masks.causal
POWERS = (128, 256, 512, 1024, 2048, 4096, 8192)


def library() -> dict[str, Expr]:
    """Every mask of weft.masks, with numbers, scalars and reads of tensors, and what is made of several."""
    found = {"everything": expression(True), "causal": causal, "not causal": ~causal}
    found |= dict(_windows()) | dict(_blocks()) | dict(_neighbourhoods()) | dict(_documents()) | dict(_patterns())
    return {name: canonical(expression(mask)) for name, mask in found.items()}


def _windows() -> Iterator[tuple[str, Expr]]:
    arguments = {**{str(n): n for n in (1, *POWERS)}, "scalar": window, "by head": windows[head]}
    for label, n in (*arguments.items(), ("by batch", windows[batch]), ("half", kv_len // 2), ("stairs", 4 * head + 5)):
        yield f"sliding window {label}", masks.sliding_window(n)
        yield f"causal window {label}", causal & masks.sliding_window(n)
        yield f"prefix {label}", masks.prefix_lm(n)
        yield f"attention sinks {label}", masks.global_window(4, n)
    yield "window ahead", masks.sliding_window(window, ahead=ahead)
    yield "causal window to the end", causal & (q_pos - kv_pos < window)
    yield "causal window 4096 to the end", causal & (q_pos - kv_pos < 4096)
    yield "global window", masks.global_window(prefix, window)
    yield "not global window", ~masks.global_window(prefix, window)
    yield "heads differ in kind", weft.where(head < 2, causal, causal & masks.sliding_window(window))
    yield "lengths by batch", causal & (kv_pos < limits[batch])


def _blocks() -> Iterator[tuple[str, Expr]]:
    for label, n in {**{str(n): n for n in (4, 12, 32, 64, 128)}, "scalar": size}.items():
        yield f"block causal {label}", masks.block_causal(n)
        yield f"block diagonal {label}", masks.block_diagonal(n)
        yield f"causal block diagonal {label}", causal & masks.block_diagonal(n)
        yield f"not block diagonal {label}", ~masks.block_diagonal(n)
    for label, step, reach in (("3", 3, 300), ("2 of 512", 2, 512), ("scalars", stride, window), ("by 2", 2, window)):
        yield f"dilated {label}", masks.dilated(step, reach)
        yield f"strided {label}", masks.strided(reach, step)
    for label, length, block in (("512", 512, 16), ("64", 64, 4), ("scalars", prefix, size), ("of 16", prefix, 16)):
        yield f"block diffusion {label}", masks.block_diffusion(length, block)


def _neighbourhoods() -> Iterator[tuple[str, Expr]]:
    for n in (8, 32, 64):
        yield f"natten {n}", masks.natten_2d(n, 3)
        yield f"natten {n} shifted inward", masks.natten_2d(n, 3, height=n)
        yield f"natten {n} scalar radius", masks.natten_2d(n, radius, columns)
        yield f"natten {n} scalar height", masks.natten_2d(n, 3, 2, height=height)
    yield "natten scalars", masks.natten_2d(width, radius, columns)
    yield "natten scalars shifted inward", masks.natten_2d(width, radius, columns, height=height)


def _documents() -> Iterator[tuple[str, Expr]]:
    for label, mask in (("documents", masks.document(ids)), ("documents by batch", masks.document(pages))):
        yield label, mask
        yield f"causal {label}", causal & mask
        yield f"{label} in a window", causal & mask & masks.sliding_window(window)
        yield f"prefix of {label}", mask & masks.prefix_lm(prefix)
    yield "valid keys", valid[batch, kv_pos]
    yield "causal valid keys", causal & valid[batch, kv_pos]
    yield "causal valid documents", causal & masks.document(pages) & valid[batch, kv_pos]


def _patterns() -> Iterator[tuple[str, Expr]]:
    yield "chunked 8192", masks.chunked(8192)
    for label, n, few in (("128", 128, 8), ("scalars", stride, size)):
        yield f"fixed {label}", masks.fixed(n, few)
    for label, n, few in (("256", 256, 4), ("scalars", window, prefix)):
        yield f"longformer {label}", masks.longformer(n, few)
    yield "longformer of a tensor", masks.longformer(256, weft.tensor("shared", 1, bool))
    yield "bigbird 64", masks.bigbird(64, weft.tensor("drawn", 2, bool))
    for label, rank, sizes in (("64", 2, (64,)), ("128 by head", 3, (128, 64)), ("128", 4, (128,))):
        blocks = masks.block_sparse(weft.tensor("blocks", rank, bool), *sizes)
        yield f"block-sparse {label}", blocks
        yield f"causal block-sparse {label}", causal & blocks
        yield f"causal block-sparse {label} in documents", causal & blocks & masks.document(ids)
    yield "bit-packed", masks.bit_packed(weft.tensor("bits", 2, int))
    yield "bigbird scalar by head", masks.bigbird(size, weft.tensor("drawn", 3, bool))
    for shift in (0, 3):
        yield f"swin 56 shifted {shift}", masks.swin(56, 7, shift)
        yield f"swin 32 shifted {shift}", masks.swin(32, 8, shift)
    yield "natten in a sequence", masks.natten_1d(radius)
    yield "natten in a sequence, dilated", masks.natten_1d(3, dilation=2)
    yield "natten in a sequence, shifted inward", masks.natten_1d(3, length=height)
    yield "natten in a sequence, dilated, shifted inward", masks.natten_1d(3, length=512, dilation=4)
    yield "natten 32, dilated", masks.natten_2d(32, 3, dilation=2)
    yield "natten 32, dilated, shifted inward", masks.natten_2d(32, 3, height=32, dilation=2)
    yield "natten in a volume", masks.natten_3d(16, 16, 1)
    yield "natten in a volume, shifted inward", masks.natten_3d(16, 16, 1, depth=8)
    for label, block, step in (("32", 32, None), ("32 by 16", 32, 16), ("scalars", size, stride)):
        yield f"compressed {label}", masks.compressed(block, step)
    for label, count in (("1", 1), ("scalar", size)):
        yield f"registers {label}", masks.registers(count)
    yield "padding left", causal & masks.padding_left(limits)
    yield "padding right", causal & masks.padding_right(limits)
    yield "documents with prefixes", masks.prefix_document(pages, valid)
    yield "tree", masks.tree(weft.tensor("ancestors", 2, bool))


@cache
def named(name: str) -> Expr:
    """A mask by its name: of the library, or a random one, "random 17" or, with more tensors, "reads 17"."""
    kind, _, number = name.partition(" ")
    return random_mask(kind, int(number)) if kind in ("random", "reads") else library()[name]


def random_mask(kind: str, seed: int) -> Expr:
    """The mask that the tests of bounds, or of surveys, draw from this seed."""
    from tests.analysis import test_bounds, test_survey  # lazy: imports what tests need

    draw = random.Random(seed)
    if kind == "random":
        return canonical(expression(test_bounds.condition(draw, draw.choice([0, 1, 1, 2]))))
    return canonical(expression(test_survey.condition(draw, draw.choice([0, 1, 2, 2, 3]))))
