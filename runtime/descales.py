"""What FP8 operands of a call bring: descales as kernels read them, and the dtype of the output.

A real number is a stored one times its descale. Kernels read one form, float32:

    [B or 1, H or 1, n, 1]: n is 1 for one number a head, or the number of rows, or of blocks of 64 or 128 rows

B is 1 of packed operands, and the number of blocks of a pool. It is what most callers give: no tensor is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..codegen.launch.quantizing import OF_HEAD, OF_TENSOR
from ..codegen.launch.scaled import BLOCKS, OF_TILES, Scaled, by_rows, shift_of
from ..codegen.torch_private import are_plain, under_transform
from ..compiler.planning.dtypes import EIGHTHS, dtype_named, named_by_torch
from ..compiler.planning.signature import usual_out
from ..ir.errors import Problem, collected, shown
from ..ir.numbers import is_int
from .options import READ_BY_KERNELS, CallOptions
from .settings import checks_values

DTYPES = named_by_torch()
_FLOAT32 = torch.finfo(torch.float32)
FP8 = frozenset(dtype_named(name).torch for name in EIGHTHS)
OF = {"query": "q_descale", "key": "k_descale", "value": "v_descale"}  # the option of each operand
NAMES = tuple(OF.values())
Per: TypeAlias = Literal["tensor", "head", 64, 128, "token"]  # what shares a descale
ROWS: dict[Per, int] = {"tensor": OF_TENSOR, "head": OF_HEAD, 64: 64, 128: 128, "token": 1}  # of a descale
Main = Mapping[str, Tensor | None]  # query, key and value


def is_per(value: object) -> bool:
    """Whether this says what shares a descale."""
    return (isinstance(value, str) or is_int(value)) and value in ROWS


def is_fp8(dtype: object) -> bool:
    """Whether this is one of the FP8 dtypes, whatever else a caller may have given."""
    return isinstance(dtype, torch.dtype) and dtype in FP8


def read_by_kernels(name: str, main: Main, options: CallOptions, pooled: bool) -> dict[str, Tensor]:
    """The descales of a call as kernels read them, by option. name: of the variant, for errors. torch traces this.

    Raises WeftError for what is no descale of these operands, naming all that is wrong.
    """
    given = {operand: getattr(options, n) for operand, n in OF.items() if getattr(options, n) is not None}
    problems = [p for operand, descale in given.items() for p in _problems(operand, main, descale, pooled, options)]
    problems += list(_out_problems(main, options.out_dtype))  # torch 2.11 traces no += of a generator
    if problems:
        raise collected(name, problems)
    return {OF[operand]: _in_four(descale, main["query"]) for operand, descale in given.items()}  # type: ignore[arg-type]


def at_hand(options: CallOptions) -> dict[str, Tensor] | None:
    """The same where all are tensors whose values nobody looks at, of which nothing is checked; None for others.

    At each call: a quick look.
    """
    if checks_values():
        return None
    found = {}
    for n in READ_BY_KERNELS:
        tensor = getattr(options, n)
        if tensor is not None:
            if type(tensor) is not Tensor or tensor.requires_grad or are_looked_at(tensor):
                return None
            found[n] = tensor if tensor.dim() == 4 else _in_four(tensor, tensor)
    return found


def are_looked_at(descale: Tensor) -> bool:
    """Whether its values are looked at in each call, as they lie on the host."""
    return descale.is_cpu


OF_CACHE = "_weft_of_cache"  # an attribute of what a cache of FP8 gives: it has descales beside it


def refuse_bare(name: str, main: Main, options: CallOptions) -> None:
    """Raise WeftError for keys or values of a cache whose descales are left behind."""
    bare = [
        OF[operand]
        for operand, tensor in main.items()
        if _is_of_cache(tensor) and getattr(options, OF[operand]) is None
    ]
    if bare:
        what, how = "missing, and the cache that the {} comes from has some", "pass **step.options_of(layer)"
        named = {n: operand for operand, n in OF.items()}
        raise collected(name, [Problem(option=n, what=what.format(named[n]), next_step=how) for n in bare])


def _is_of_cache(tensor: Tensor | None) -> bool:
    """Whether a cache of FP8 gave a tensor, or what it is a view of."""
    if torch.compiler.is_compiling():  # which traces no bases
        return getattr(tensor, OF_CACHE, False)
    return any(getattr(t, OF_CACHE, False) for t in (tensor, getattr(tensor, "_base", None)))


def out_name(options: CallOptions) -> str | None:
    """The dtype of the output as `Choices` has it; None where the call names none."""
    return None if options.out_dtype is None else DTYPES[options.out_dtype]


def _in_four(descale: float | Tensor, beside: Tensor) -> Tensor:
    """A descale as kernels read it. beside: a tensor of its device."""
    if not isinstance(descale, Tensor):
        return torch.full((1, 1, 1, 1), float(descale), dtype=torch.float32, device=beside.device)
    if descale.dim() < 2:
        return descale.reshape(1, -1, 1, 1)
    return descale if descale.dim() > 3 else descale.reshape(*[1] * (4 - descale.dim()), *descale.shape)


def _problems(
    operand: str, main: Main, descale: object, pooled: bool, options: CallOptions
) -> Iterator[Problem]:  # fmt: skip
    """What keeps a value from being the descale of an operand."""
    n, tensor = OF[operand], main[operand]
    if tensor is None:
        what = "the value is columns of the key here, and k_descale is the descale of both"
        yield Problem(option=n, what=what, next_step=f"leave {n} out")
        return
    if tensor.dtype not in FP8:
        how = "descales are of FP8 operands, torch.float8_e4m3fn"
        yield Problem(option=n, expected=f"None, as {operand} is {tensor.dtype}", got=_said(descale), next_step=how)
        return
    if not isinstance(descale, Tensor):
        if isinstance(descale, bool) or not isinstance(descale, (int, float, torch.SymFloat)):
            kind = type(descale)
            got = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            how = f"pass {n}=x.descale" if hasattr(descale, "descale") else ""  # all that weft.fp8.quantize gives
            yield Problem(option=n, expected="a float or a float32 tensor", got=got, next_step=how)
        elif isinstance(descale, (int, float)) and not 0.0 < descale < inf:
            yield Problem(option=n, expected="a positive number", got=shown(descale))
        elif isinstance(descale, (int, float)) and not _FLOAT32.tiny <= descale <= _FLOAT32.max:
            yield Problem(option=n, expected="a number that float32 holds", got=shown(descale))
        return
    if descale.is_nested and descale.layout != torch.jagged:
        yield Problem(option=n, expected="a dense tensor", got="a nested one")
    elif descale.layout != torch.strided and not descale.is_nested:
        got, how = f"layout {descale.layout}", f"pass {n}.to_dense()"
        yield Problem(option=n, expected="a dense tensor", got=got, next_step=how)
    elif descale.dtype != torch.float32 or descale.device != tensor.device:
        got, is_elsewhere = f"{descale.dtype} on {descale.device}", descale.device != tensor.device
        how = f"move it, {n}.to({str(tensor.device)!r})" if is_elsewhere else f"cast it, {n}.float()"
        yield Problem(option=n, expected=f"float32 on {tensor.device}", got=got, next_step=how)
    elif descale.requires_grad and torch.is_grad_enabled():
        yield Problem(option=n, what="a descale has no gradient", next_step=f"pass {n}.detach()")
    elif not fits(operand, tensor, descale, pooled):
        yield Problem(option=n, expected=_shapes(operand, tensor, pooled), got=f"shape {list(descale.shape)}")
    elif torch.compiler.is_compiling() or under_transform() or not are_plain([descale]):  # as fake tensors are not
        return
    else:
        yield from _value_problems(n, descale, tensor, options.lengths)


def _value_problems(
    name: str, descale: Tensor, tensor: Tensor, lengths: Mapping[str, Tensor | None]
) -> Iterator[Problem]:  # fmt: skip
    """What is wrong with its numbers, where these are looked at. lengths: options that say where sequences lie."""
    if not (are_looked_at(descale) or (checks_values() and not descale.is_meta)):
        return
    wrong = ~((descale > 0.0) & (descale < inf))
    if not bool(wrong.any()):
        return
    descale, wrong = _in_four(descale, tensor), _in_four(wrong, tensor)
    if (read := _are_read(name, descale, tensor, lengths)) is not None:
        wrong = wrong & read
    found = descale[wrong]
    if found.numel():
        yield Problem(option=name, expected="positive numbers", got=str(found[0].item()))


def _are_read(
    name: str, descale: Tensor, tensor: Tensor, lengths: Mapping[str, Tensor | None]
) -> Tensor | None:  # fmt: skip
    """Which numbers [B or 1, H or 1, n, 1] a call reads: what is behind lengths may be anything. None for all.

    Of lengths that are none, which are refused later, it says nothing.
    """
    (batch, _, rows, _), number = tensor.shape, descale.shape[2]
    sides = ("q", "kv") if name == NAMES[0] else ("kv", "q")
    table = lengths.get("block_table") if sides[0] == "kv" else None
    starts = [t for side in sides if isinstance(t := lengths.get(f"cu_seqlens_{side}"), Tensor)]  # one stands for both
    lens = starts[0][-1:] if starts and table is None else lengths.get(f"{sides[0]}_lens")
    if not isinstance(lens, Tensor) or lens.dim() != 1 or not len(lens):
        return None
    if table is None and len(descale) > 1 and len(lens) != batch:
        return None
    lens = lens.to(descale.device).clamp(min=0)[:, None]
    if table is not None:
        is_of_rows = number > 1 and isinstance(table, Tensor) and table.shape[:1] == lens.shape[:1]
        return _of_pool(descale, table, lens, rows) if is_of_rows and table.dim() == 2 else None
    block = next((n for n in (1, *BLOCKS) if -(-rows // n) == number), rows)
    read = torch.arange(0, number * block, block, device=descale.device) < lens
    return (read if len(descale) > 1 else read.any(0, keepdim=True))[:, None, :, None]


def _of_pool(descale: Tensor, table: Tensor, lens: Tensor, page: int) -> Tensor:
    """The same of a pool, [blocks, 1, page, 1]: rows of blocks that sequences have."""
    places = torch.arange(table.shape[1] * page, device=descale.device)
    row, place = (places < lens).nonzero(as_tuple=True)
    blocks, found = table[row, place // page].long(), descale.new_zeros(len(descale), page, dtype=torch.bool)
    there = (blocks >= 0) & (blocks < len(descale))
    found[blocks[there], place[there] % page] = True
    return found[:, None, :, None]


def unseen_problems(
    read: Mapping[str, Tensor], main: Sequence[Tensor | None], lengths: Mapping[str, Tensor | None]
) -> list[Problem]:  # fmt: skip
    """The same of descales as kernels read them: nobody sees their numbers while a call is traced or mapped.

    main: query, key and value.
    """
    of = dict(zip(NAMES, main))
    return [
        problem
        for n in NAMES
        if (descale := read.get(n)) is not None and (tensor := of[n]) is not None
        for problem in _value_problems(n, descale, tensor, lengths)
    ]


def _said(descale: object) -> str:
    """A descale in a message: a tensor by its shape."""
    is_sized = isinstance(descale, Tensor) and not descale.is_nested
    return f"a tensor of shape {list(descale.shape)}" if is_sized else shown(descale)  # type: ignore[attr-defined]


def fits(operand: str, tensor: Tensor, descale: Tensor, pooled: bool) -> bool:
    batch, heads, rows, _ = tensor.shape
    if descale.dim() > 4:
        return False
    if descale.dim() < 2:
        return descale.numel() in (1, heads)
    of_batch, of_heads, blocks, width = (*[1] * (4 - descale.dim()), *descale.shape)
    if of_heads not in (1, heads) or width != 1:
        return False
    if pooled and operand != "query":  # of pages of one row nobody could tell the two apart
        return (of_batch, blocks) == (1, 1) or (rows > 1 and (of_batch, blocks) == (batch, rows))
    return of_batch in (1, batch) and (blocks in (1, rows) or blocks in [-(-rows // n) for n in BLOCKS])


def _shapes(operand: str, tensor: Tensor, pooled: bool) -> str:
    batch, heads, rows, _ = tensor.shape
    if pooled and operand != "query":
        by_row = f", or one number a row of the pool, [{batch}, {heads}, {rows}, 1]"
        return f"what broadcasts to [1, {heads}, 1, 1]" + (by_row if rows > 1 else ", as pages have one row")
    blocks = " or ".join(str(n) for n in sorted({rows, *(-(-rows // n) for n in BLOCKS)}))
    return (
        f"what broadcasts to [{batch}, {heads}, 1, 1], or one number a block of 1, 64 or 128 rows, "
        f"[{batch}, {heads}, {blocks}, 1]"
    )


def _out_problems(main: Main, out_dtype: torch.dtype | None) -> Iterator[Problem]:
    """What keeps this from being the dtype of the output."""
    if out_dtype is None:
        return
    query, key, value = main["query"], main["key"], main["value"]
    assert query is not None and key is not None
    if not FP8 & {t.dtype for t in (query, key, value) if t is not None} and out_dtype != query.dtype:
        expected, how = f"{query.dtype} as the query is", "others are for calls with FP8 operands"
        yield Problem(option="out_dtype", expected=expected, got=str(out_dtype), next_step=how)


def out_dtype_of(query: Tensor, key: Tensor, value: Tensor | None, named: str | None = None) -> torch.dtype:
    """The dtype of the output. named: as `Choices` has it."""
    if named is not None:
        return dtype_named(named).torch
    if query.dtype not in FP8:
        return query.dtype
    return dtype_named(usual_out(*(DTYPES[t.dtype] for t in (query, key, key if value is None else value)))).torch


def rows_read(read: Mapping[str, Tensor]) -> frozenset[str]:
    """Of the descales that kernels read, those of keys and values that are numbers of rows."""
    return frozenset(n for n, t in read.items() if n in NAMES[1:] and t.shape[2] > 1)


def tiles_read(read: Mapping[str, Tensor], kv_len: int) -> frozenset[str]:
    """Of these, those that are one number for 128 rows, whose places in a head 32 bits tell."""
    found = {n: read[n] for n in rows_read(read)}
    return frozenset(
        n for n, t in found.items()
        if shift_of(t.shape[2], kv_len) == OF_TILES and t.shape[2] * t.stride(2) < 1 << 31
    )  # fmt: skip


# -- real numbers ------------------------------------------------------------------------------------------------------
def dequantized(tensor: Tensor, descale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored numbers [B, H, rows, columns] times their descale, in any of the forms that a call takes."""
    factor = None if descale is None else by_rows(_in_four(descale, tensor), tensor.shape)
    found = Scaled(tensor, factor, dtype).real()
    return found if found.stride(3) == 1 else found.contiguous()  # a value that is stored in columns


def real_dtype(tensors: Sequence[Tensor], out_dtype: torch.dtype | None) -> torch.dtype:
    """What the definition is computed in: float64 where something of the call is, else float32."""
    wide = torch.float64 in {out_dtype, *(t.dtype for t in tensors)}
    return torch.float64 if wide else torch.float32


def are_quantized(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one is FP8."""
    return not FP8.isdisjoint([t.dtype for t in tensors if t is not None])
