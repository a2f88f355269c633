"""Calls whose FP8 operands become 16-bit ones first, where that is faster: planning/conversion.py says when."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .codegen.torch_private import constant_while_tracing
from .compiler.planning.conversion import copied_bytes, pays
from .compiler.planning.machines.hardware import Hardware, for_device
from .dtensors import is_sharded
from .internals import Main
from .runtime import descales
from .runtime.ops.quantize import dequantize
from .runtime.options import CallOptions
from .runtime.settings import traced_target

HALF = torch.bfloat16  # fp16 would lose what descales make large or small


def converted(name: str, main: Main, options: CallOptions, operands: Mapping[str, Any]) -> tuple[Main, CallOptions]:
    """The operands in 16 bits, and the options of a call with these; both as they are where that is not faster.

    name: of the variant, for errors.
    """
    named = {"query": main.query, "key": main.key, "value": main.value}
    if main.rope is not None or not is_convertible(named, options, operands):
        return main, options
    if not is_faster(_arch_of(main.query.device), named, options):
        return main, options
    descales.refuse_bare(name, main.key, options)
    read = descales.read_by_kernels(name, named, options, pooled=False)
    stored = {n: t for n, t in named.items() if t is not None and t.dtype in descales.FP8}
    real = dequantize([*stored.values()], [read.get(descales.OF[n]) for n in stored], HALF)
    made = dict(zip(stored, real, strict=True))
    return main._replace(**made), options.having(**dict.fromkeys((*descales.NAMES, "out_dtype")))


@constant_while_tracing
def _arch_of(device: torch.device) -> str:
    return _known_arch(device)


@cache
def _known_arch(device: torch.device) -> str:
    return for_device(device).arch


def is_convertible(main: descales.Main, options: CallOptions, operands: Mapping[str, Any]) -> bool:
    """Whether a call may have copies of its operands: as 16-bit ones they fit, and nobody wants their gradients."""
    given = [t for t in main.values() if isinstance(t, Tensor) and t.dim() == 4]
    asks = options.schedule is not None or (options.target or traced_target()) is not None
    if len(given) < 3 or asks or options.block_table is not None or is_sharded(given[0]):
        return False
    if not descales.are_quantized(given) or not {t.dtype for t in given} <= {HALF, *descales.FP8}:
        return False
    if given[0].device.type not in ("cpu", "cuda") or options.out_dtype not in (None, HALF) or 0 in given[1].shape:
        return False
    wanted = [t for t in (*given, *operands.values()) if isinstance(t, Tensor) and t.requires_grad]
    return not (wanted and torch.is_grad_enabled())


def is_faster(arch: str, main: descales.Main, options: CallOptions) -> bool:
    """Whether copies pay, as if all pairs of a sequence were visible."""
    query, key, value = main["query"], main["key"], main["value"]
    assert query is not None and key is not None and value is not None
    # rows of keys that a query may see; of packed sequences the mean
    rows = key.shape[2] // (1 if options.cu_seqlens_kv is None else max(1, options.cu_seqlens_kv.shape[0] - 1))
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * rows
    return pays(arch, 2.0 * pairs * (key.shape[3] + value.shape[3]), _elements(main))


def _elements(main: descales.Main) -> int:
    return sum(t.numel() for t in main.values() if t is not None and t.dtype in descales.FP8)


def note(main: descales.Main, machine: Hardware) -> str:
    """What `explain` says of it."""
    size = copied_bytes(_elements(main))
    return (
        f"FP8 operands are made bf16 first: {size / 1e6:.3g} MB are read and written, which takes "
        f"{size / machine.hbm_bytes_per_second * 1e6:.1f} us more. Kernels that read FP8 would be slower"
    )
