"""Calls whose FP8 operands become 16-bit ones first, where that is faster: planning/conversion.py says when.

Where a target multiplies FP8 operands as they are stored, they stay so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..codegen.launch.scaled import OF_TILES, shift_of
from ..codegen.torch_private import constant_while_tracing, under_transform
from ..compiler.planning.conversion import OF_HEADS, OF_LATENT, OF_LATENT_IN_SRAM, pays
from ..compiler.planning.machines.hardware import Hardware, for_device
from ..compiler.planning.signature import Described, Signature, Widths, signature_of
from ..compiler.planning.sources import PACKED_PAGED, PAGED, kind_named
from ..compiler.planning.target import Target
from ..ir.errors import collected
from ..runtime import descales, driver
from ..runtime.call import LARGEST_PAGE, Call, choices_of, is_page
from ..runtime.check.sequences import given_sequences, ragged_problems
from ..runtime.ops import dispatch
from ..runtime.ops.quantize import dequantize, dequantize_latent, dequantize_pages, large_table
from ..runtime.options import PLAIN, CallOptions
from ..runtime.run.key import dtypes_of
from ..runtime.run.variant import Variant, variant_of_text
from ..runtime.settings import checks_values, traced_target
from .internals import Main, read_by_kernels

HALF = torch.bfloat16  # fp16 would lose what descales make large or small
MOST_COPIED = 2**30  # bytes of copies of pages: a server has given most of the memory to its pools


def converted(
    variant: Variant, main: Main, options: CallOptions, operands: Mapping[str, Any]
) -> tuple[Main, CallOptions]:
    """The operands in 16 bits, and the options of a call with these; both as they are where that is not faster."""
    if options.schedule is not None or (options.target or traced_target()) is not None:
        return main, options  # before all else, as these are asked at each call
    name = str(variant.name)
    named = {"query": main.query, "key": main.key, "value": main.value}
    arch = _arch_of(main.query.device) if isinstance(main.query, Tensor) else ""
    if are_multiplied(variant, arch, named, options):
        return main, options
    rope = main.rope
    if not is_convertible(named, options, operands, rope) or not is_faster(variant, arch, named, options, rope):
        return main, options
    table, kv_lens = options.block_table, options.kv_lens
    descales.refuse_bare(name, named, options)
    read = descales.read_by_kernels(name, named, options, pooled=table is not None)
    options = options.having(**dict.fromkeys((*descales.NAMES, "out_dtype")))
    stored = {n: t for n, t in named.items() if t is not None and t.dtype in descales.FP8}
    if table is not None and kv_lens is not None:
        if problems := ragged_problems(main.query, main.key, options.lengths, options.q_offset):
            raise collected(name, problems)
        page = main.key.shape[2]
        if table.shape[1] * page % LARGEST_PAGE:  # large pages have room behind the last one of the table
            options = options.having(kv_lens=kv_lens.clamp(max=table.shape[1] * page))
        options = options.having(block_table=large_table(table, page)[0])
    if main.value is None:  # a latent cache: all of its columns become one tensor
        parts = [main.key] if rope is None else [main.key, rope]
        made = dequantize_latent(parts, read.get("k_descale"), table, kv_lens if table is not None else None, HALF)
        return Main(main.query, made, None), options
    if table is not None and kv_lens is not None:
        pools = {n: named[n] for n in ("key", "value")}  # also one in 16 bits: both are read by one table
        factors = [read.get(descales.OF[n]) for n in pools]
        copies = dequantize_pages([*pools.values()], factors, table, kv_lens, HALF)  # type: ignore[list-item]
        main = main._replace(**dict(zip(pools, copies, strict=True)))
        stored = {n: t for n, t in stored.items() if n == "query"}
    real = dequantize([*stored.values()], [read.get(descales.OF[n]) for n in stored], HALF) if stored else []
    return main._replace(**dict(zip(stored, real, strict=True))), options


def scaled(
    variant: Variant, call: Call, options: CallOptions, operands: Mapping[str, Any]
) -> tuple[Call, tuple[Tensor, Any] | None]:  # fmt: skip
    """A call that has no descales yet, and its results where it is like the one before.

    Any other has no results yet, but descales as kernels read them, or copies of its operands.
    """
    name, key, value = str(variant.name), call.key, call.value
    if options.k_descale is None or (options.v_descale is None and value is not None):
        descales.refuse_bare(name, {"key": key, "value": value}, options)
    read = descales.at_hand(options)
    if read is not None:
        call.read = read or None
        found = dispatch.again(variant, call, partial(grows, variant, call, options))
        if found is not None:
            return call, found
    main = Main(call.query, key, value, call.rope)
    made, left = converted(variant, main, options, operands)
    call.read = read_by_kernels(name, *made[:3], left) if left.are_read else None
    if made is main:
        return call, None
    sequences = call.sequences if left.block_table is None else given_sequences(name, made.query, made.key, left)
    asked = call.choices
    choices = choices_of(asked.target, asked.schedule, asked.deterministic, descales.out_name(left))
    return Call(*made, call.operands, sequences, choices, call.head_dim, call.read), None


def grows(variant: Variant, call: Call, options: CallOptions) -> bool:
    """Whether a call that is like one before in all but its keys has descales that fit, and takes no copies either."""
    main, read = {"query": call.query, "key": call.key, "value": call.value}, call.read or {}
    for operand, name in descales.OF.items():
        tensor = main[operand]
        if name in read and (tensor is None or not descales.fits(operand, tensor, read[name], pooled=False)):
            return False
    return not is_faster(variant, _arch_of(call.query.device), main, options, call.rope)


@constant_while_tracing
def _arch_of(device: torch.device) -> str:
    return _known_arch(device)


@cache
def _known_arch(device: torch.device) -> str:
    return for_device(device).arch


def is_convertible(
    main: descales.Main, options: CallOptions, operands: Mapping[str, Any], rope: Tensor | None = None,
    is_planned: bool = False,
) -> bool:  # fmt: skip
    """Whether a call may have copies of its operands: as 16-bit ones they fit, and nobody wants their gradients.

    rope: rotary columns of a latent cache, whose call has no value. is_planned: operands on "meta" stand for others.
    """
    value, given = main["value"], [t for t in (*main.values(), rope) if isinstance(t, Tensor) and t.dim() == 4]
    asks = options.schedule is not None or (options.target or traced_target()) is not None
    if len(given) < (3 if value is not None or rope is not None else 2) or asks:
        return False
    if value is None and (given[0].dtype != HALF or (rope is not None and rope.dtype != HALF)):
        return False
    if value is not None and rope is not None:  # an expanded one
        return False
    if not torch.compiler.is_compiling() and under_transform():
        return False
    if options.block_table is not None and not _are_pages(given, options):
        return False
    if not descales.are_quantized(given) or not {t.dtype for t in given} <= {HALF, *descales.FP8}:
        return False
    places = ("cpu", "cuda", "meta") if is_planned else ("cpu", "cuda")
    if given[0].device.type not in places or options.out_dtype not in (None, HALF) or 0 in given[1].shape:
        return False
    wanted = [t for t in (*given, *operands.values()) if isinstance(t, Tensor) and t.requires_grad]
    return not (wanted and torch.is_grad_enabled())


def are_multiplied(variant: Variant, arch: str, main: descales.Main, options: CallOptions) -> bool:
    """Whether a target multiplies these operands as they are stored. At each call: few look closely."""
    query, key, value = main["query"], main["key"], main["value"]
    if query is None or key is None or value is None or query.dtype not in descales.FP8:
        return False
    if options.block_table is not None:
        return False  # pages are gathered first
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    (_, _, _, head_dim), (_, _, _, value_dim) = query.shape, value.shape
    rows = _rows_of(options.k_descale, key.shape[2]), _rows_of(options.v_descale, key.shape[2])
    dtypes = query.dtype, key.dtype, value.dtype, options.out_dtype
    kind = _kind_of(options)
    if torch.compiler.is_compiling():  # addresses are not known
        return _is_multiplying(variant.text, arch, dtypes, head_dim, value_dim, rows, kind)
    multiplying = _multiplying(variant.text, arch, dtypes, head_dim, value_dim, rows, kind)
    if not multiplying:
        return False
    bits = query.data_ptr() | key.data_ptr() | value.data_ptr()
    for tensor in (query, key, value):
        (batch, head, row, column) = tensor.stride()
        bits |= batch | head | (column if row == 1 else row)
    if bits & 15 == 0 and not options.are_ragged:
        return True
    _, signature = multiplying
    call: Any = SimpleNamespace(query=query, key=key, value=value, rope=None)
    return any(t.misfit(signature, call) is None for t in multiplying[0])


def _is_made_in_sram(
    variant: Variant, arch: str, main: descales.Main, options: CallOptions, rope: Tensor | None
) -> bool:  # fmt: skip
    """Whether a target makes tiles of this latent cache 16-bit numbers in SRAM."""
    query, key = main["query"], main["key"]
    if query is None or key is None or rope is None or not query.dim() == key.dim() == rope.dim() == 4:
        return False
    widths = query.shape[3], key.shape[3], rope.shape[3]
    dtypes = query.dtype, key.dtype, options.out_dtype
    asked = variant.text, arch, dtypes, widths, _has_rows(options.k_descale), _kind_of(options)
    if torch.compiler.is_compiling():  # addresses are not known
        return _is_reading_latents(*asked)
    targets, signature = _reading_latents(*asked)
    call: Any = SimpleNamespace(query=query, key=key, value=None, rope=rope)
    return any(t.misfit(signature, call) is None for t in targets)


@constant_while_tracing
def _is_reading_latents(*asked: Any) -> bool:
    return bool(_reading_latents(*asked)[0])


@lru_cache(maxsize=256)
def _reading_latents(
    text: str, arch: str, dtypes: tuple[Any, ...], widths: tuple[int, int, int], by_rows: bool, kind: str
) -> tuple[tuple[Target, ...], Signature]:
    """The targets that make latent vectors in FP8 16-bit numbers in SRAM, and the signature of such calls."""
    attention, (*given, out) = variant_of_text(text).attention, dtypes
    query, key = (torch.empty(0, dtype=dtype) for dtype in given)
    named = dtypes_of(attention, query, key, None, descales.out_name(PLAIN.having(out_dtype=out)))
    scaled = frozenset({"k_descale"} if by_rows else ())
    own = Widths(widths[0], widths[1], widths[2], value_is_key=True)
    described = Described("forward", arch, named.products, own, kind_named(kind), scaled_rows=scaled, dtypes=named)
    signature = signature_of(described, masked=False, sums_pairs=False)
    return driver.reading_fp8(attention, signature, "split_kv"), signature


def _kind_of(options: CallOptions) -> str:
    """What sequences these options say that a call has, by name."""
    is_packed = options.cu_seqlens_q is not None
    if options.block_table is not None:
        return (PACKED_PAGED if is_packed else PAGED).name
    return "packed" if is_packed else "lengths" if options.are_ragged else "dense"


def _has_rows(descale: Any) -> bool:
    """Whether a descale is that of rows."""
    return isinstance(descale, Tensor) and descale.dim() > 1 and descale.shape[-2] > 1


def _rows_of(descale: Any, kv_len: int) -> int | None:
    """How many rows share a descale, as a power of two; None where all of a head do."""
    return shift_of(descale.shape[-2], kv_len) if _has_rows(descale) else None


@constant_while_tracing
def _is_multiplying(*asked: Any) -> bool:
    return _multiplying(*asked) is not None


@lru_cache(maxsize=256)
def _multiplying(
    text: str,
    arch: str,
    dtypes: tuple[Any, ...],
    head_dim: int,
    value_dim: int,
    rows: tuple[int | None, int | None],
    kind: str,
) -> tuple[tuple[Target, ...], Signature] | None:
    """The targets that multiply FP8 operands of such calls, whose queries are many, and what these have in common."""
    attention, (*given, out) = variant_of_text(text).attention, dtypes
    query, key, value = (torch.empty(0, dtype=dtype) for dtype in given)
    named = dtypes_of(attention, query, key, value, descales.out_name(PLAIN.having(out_dtype=out)))
    shared = dict(zip(descales.NAMES[1:], rows))
    by_rows = frozenset(n for n, shift in shared.items() if shift is not None)
    by_tiles = frozenset(n for n, shift in shared.items() if shift == OF_TILES)
    widths = Widths(head_dim, value_dim)
    sequences = kind_named(kind)
    described = Described(
        "forward", arch, named.products, widths, sequences, scaled_rows=by_rows, scaled_tiles=by_tiles, dtypes=named
    )
    signature = signature_of(described, masked=False, sums_pairs=False)
    targets = driver.reading_fp8(attention, signature, "flash")
    return (targets, signature) if targets else None


def _are_pages(given: Sequence[Tensor], options: CallOptions) -> bool:
    """Whether a table and lengths look like those of pools, and their copies stay within MOST_COPIED. Where values are
    checked, those of the caller's own table are."""
    if checks_values():
        return False
    table, kv_lens = options.block_table, options.kv_lens
    if not isinstance(table, Tensor) or table.dim() != 2 or kv_lens is None or not is_page(given[1].shape[2]):
        return False
    rows = table.shape[0] * table.shape[1] * given[1].shape[2]
    columns = sum(t.shape[3] for t in given[1:])
    return 0 < rows * given[1].shape[1] * columns * HALF.itemsize <= MOST_COPIED


def is_faster(
    variant: Variant, arch: str, main: descales.Main, options: CallOptions, rope: Tensor | None = None
) -> bool:  # fmt: skip
    """Whether copies pay, as if all pairs of a sequence were visible, and all pages of a table used."""
    query, key, value = main["query"], main["key"], main["value"]
    assert query is not None and key is not None
    starts = options.cu_seqlens_q if options.cu_seqlens_kv is None else options.cu_seqlens_kv  # one stands for both
    # rows of keys that a query may see; of packed sequences the mean. What is no tensor is refused later
    rows = key.shape[2] // (max(1, starts.shape[0] - 1) if isinstance(starts, Tensor) and starts.dim() else 1)
    if options.block_table is not None:
        rows = options.block_table.shape[1] * key.shape[2]
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * rows
    columns = key.shape[3] + (key if value is None else value).shape[3] + (0 if rope is None else rope.shape[3])
    flops, copied = 2.0 * pairs * columns, _copied_bytes(main, options, rope)
    if value is not None:
        return pays(arch, flops, copied, OF_HEADS)
    if not pays(arch, flops, copied, OF_LATENT):
        return False
    return pays(arch, flops, copied, OF_LATENT_IN_SRAM) or not _is_made_in_sram(variant, arch, main, options, rope)


def _copied_bytes(main: descales.Main, options: CallOptions, rope: Tensor | None) -> int:
    """What copies read and write; of a pool as much as its table has pages for."""
    table, found = options.block_table, 0
    for name, t in (*main.items(), ("rope", rope)):
        if t is not None and (t.dtype in descales.FP8 or name == "rope"):
            elements = table.numel() * t[0].numel() if table is not None and name != "query" else t.numel()
            found += elements * (t.element_size() + HALF.itemsize)
    return found


def note(main: descales.Main, machine: Hardware, options: CallOptions, rope: Tensor | None = None) -> str:
    """What `explain` says of it."""
    size = _copied_bytes(main, options, rope)
    return (
        f"FP8 operands are made bf16 first: {size / 1e6:.3g} MB are read and written, which takes "
        f"{size / machine.hbm_bytes_per_second * 1e6:.1f} us more. Kernels that read FP8 would be slower"
    )
