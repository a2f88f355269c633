"""Kernels that are the same for every variant, compiled: of caches, of FP8 numbers, of results and of listed sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weft.codegen.ahead import Compilation
from weft.codegen.launch.launching import parameters_of
from weft.codegen.loader import without_holes
from weft.compiler.planning.machines.hardware import by_name

from .ahead import Kernel, compile_ahead

E4M3 = torch.float8_e4m3fn
_CACHES = dict.fromkeys(("key", "value"), torch.bfloat16) | {"slots": torch.int32}
JOINED = {n: t for name in ("first", "more", "out") for n, t in
          ((name, torch.bfloat16), (f"{name}_lse" if name != "out" else "lse", torch.float32))}  # fmt: skip
_WIDTHS = {"KEY_WIDTH": 128, "KEY_BLOCK": 128, "VALUE_WIDTH": 128, "VALUE_BLOCK": 128}
_OF_STEP = {"ROWS": 8, **_WIDTHS, "ALIGNED": True, "STARTS_EARLY": True}
QUANTIZED = {"x": torch.bfloat16, "data": E4M3, "descale": torch.float32, "largest": torch.float32}
APPENDED = {**_CACHES, "keys": E4M3, "values": E4M3, "k_descale": torch.float32, "v_descale": torch.float32}


def fixed(template: str, name: str, tensors: Mapping[str, torch.dtype], constants: Mapping[str, object]) -> Kernel:
    """A kernel of a template without holes, for an H100. Strides have 64 bits, other numbers 32."""
    kernel = getattr(without_holes(template, False), name)
    sizes = {n: 1 << 40 if "_s" in n else 1 for n in parameters_of(kernel)[0] if n not in tensors}
    return compile_ahead(Compilation(kernel, {**tensors, **sizes, **constants}, {"num_warps": 4}), by_name("h100"))


def quantize_rows(rows: int, share: int, columns: bool = False, reads: int = 0) -> Kernel:
    """The kernel that makes FP8 numbers of a tensor. reads: its pass."""
    constants = {"ROWS": rows, "SHARE": share, "WIDTH": 128, "BLOCK": 128, "MOST": 448.0, "PASS": reads,
                 "OF_TENSOR": False, "COLUMNS": columns, "ALIGNED": True}  # fmt: skip
    return fixed("quantize", "quantize_rows", QUANTIZED, constants)


def append_quantized(by_token: bool) -> Kernel:
    """The kernel that appends rows to a cache of FP8 numbers."""
    return fixed(
        "quantize", "append_quantized", APPENDED, _OF_STEP | {"MOST": 448.0, "BY_TOKEN": by_token, "ROTARY": False}
    )


def join_results(far: bool) -> Kernel:
    """The kernel that joins results over disjoint keys."""
    constants = {"ROWS": 16, "WIDTH": 128, "BLOCK": 128, "FAR": far, "ALIGNED": True}
    return fixed("join_results", "join_results", JOINED, constants)


def each() -> Iterator[tuple[str, Kernel]]:
    """Each of them that takes or makes caches, results or FP8 numbers, in every way of its own."""
    copied = _CACHES | dict.fromkeys(("keys", "values"), torch.bfloat16)
    yield "append_rows", fixed("append_rows", "append_rows", copied, _OF_STEP)
    for far in (False, True):
        yield f"join_results far={far}", join_results(far)
    for by_token in (False, True):
        yield f"append_quantized by_token={by_token}", append_quantized(by_token)
    for rows, share, reads in ((32, 1, 0), (64, 64, 0), (32, 32, 1), (32, 32, 2)):
        yield f"quantize_rows {rows} {share} {reads}", quantize_rows(rows, share, reads=reads)
