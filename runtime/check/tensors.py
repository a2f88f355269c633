"""Rules of tensors: what can be read at all, how query, key and value fit each other, what a backward starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...codegen.torch_private import is_traced, under_transform
from ...compiler.planning.dtypes import named_by_torch
from ...ir.attention import Attention
from ...ir.errors import Problem, UnavailableError, collected, counted
from .. import descales
from ..call import MAIN, BackwardCall, Call, Pages
from ..options import OPTIONS

MAX_HEAD_DIM = 256
MAX_LENGTH = 2**30  # up to it tile programs are proven, in 32 bits where they compute in these
DTYPES = named_by_torch()
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TAKEN = frozenset({*FLOATS, *descales.FP8})  # of query, key and value
_OPTIONS = {*OPTIONS, "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"}  # and sizes of a shape
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def wrong(
    label: str, expected: str, got: object, next_step: str = "", what: str = "", place: Sequence[int] = ()
) -> Problem:
    """What is wrong with an operand or option of a call."""
    about = {"option" if label in _OPTIONS else "operand": label}
    return Problem(expected=expected, got=str(got), next_step=next_step, what=what, place=tuple(place), **about)  # type: ignore[arg-type]


def missing(label: str, next_step: str, expected: str = "") -> Problem:
    """An operand or option of a call that is not given."""
    about = {"option" if label in _OPTIONS else "operand": label}
    return Problem(what="missing", expected=expected, next_step=next_step, **about)  # type: ignore[arg-type]


# -- one tensor --------------------------------------------------------------------------------------------------------
def form_problem(label: str, tensor: object) -> Problem | None:
    """What keeps a thing from being read as the tensors that kernels take: dense, with strides."""
    if not isinstance(tensor, Tensor):
        made = "torch.from_numpy(x)" if type(tensor).__module__ == "numpy" else "torch.tensor(x)"
        if isinstance(tensor, tuple) and hasattr(tensor, "descale"):  # of weft.fp8.quantize
            beside = f", and {descales.OF[label]}=x.descale" if label in descales.OF else ""
            return wrong(label, "a tensor", type(tensor).__name__, f"pass x.data{beside}")
        has_entries = hasattr(tensor, "__len__") and not isinstance(tensor, str)
        return wrong(label, "a tensor", type(tensor).__name__, f"{made} makes one" * has_entries)
    if tensor.is_nested:
        how = "pad it, torch.nested.to_padded_tensor(x, 0.0)"
        if label in MAIN:
            how += ", and give q_lens= and kv_lens=; or let query, key and value all have layout=torch.jagged"
        return wrong(label, "a dense tensor", "a nested one", how)
    if tensor.is_quantized:
        return wrong(label, "a tensor of floats", f"a quantized one ({tensor.dtype})", "call x.dequantize()")
    if tensor.layout != torch.strided:
        return wrong(label, "a dense tensor", f"layout {tensor.layout}", "call x.to_dense()")
    return None


def place_problems(label: str, tensor: Tensor, device: torch.device | None) -> list[Problem]:
    """A tensor that lies elsewhere than the query. device: of that; any where None."""
    if device is None or tensor.device == device:
        return []
    return [wrong(label, f"device {device} as in query", tensor.device)]


def length_problems(label: str, length: int) -> list[Problem]:
    if length <= MAX_LENGTH:
        return []
    return [wrong(label, "a length up to 2**30", length, what="integer overflow")]


def width_problems(label: str, width: int, noun: str = "dim ") -> list[Problem]:
    if 0 < width <= MAX_HEAD_DIM:
        return []
    how = "wider heads are for latent attention" if width > 0 else ""
    return [wrong(label, f"{noun}1 to {MAX_HEAD_DIM}", width, how)]


def rank_problems(named: Mapping[str, object]) -> list[Problem]:
    """Things that are no tensors of four dimensions: nothing else can be asked of them."""
    found = []
    for label, tensor in named.items():
        if (problem := form_problem(label, tensor)) is not None:
            found.append(problem)
        elif tensor.dim() != 4:  # type: ignore[attr-defined]
            how = "add a batch dimension with [None]"
            if tensor.dim() == 3:  # type: ignore[attr-defined]
                how += (
                    ", or pass x.unflatten(2, (heads, dim)).transpose(1, 2) of [batch, length, heads * dim], "
                    "x.transpose(0, 1)[None] of packed [total, heads, dim]"
                )
            got = f"shape {list(tensor.shape)}"  # type: ignore[attr-defined]
            found.append(wrong(label, "4 dimensions [batch, heads, length, dim]", got, how))
    return found


def dtype_problems(query: Tensor) -> list[Problem]:
    if query.dtype in TAKEN:
        return []
    return [wrong("query", "bfloat16, float16 or float32", query.dtype, "cast it, query.to(torch.float32)")]


def kind_problems(named: Mapping[str, Tensor]) -> list[Problem]:
    """Tensors of four dimensions of which one has another dtype, device or order than kernels read. The first is that
    which the others are compared with: the query."""
    query = next(iter(named.values()))
    found, dtype, device, like = dtype_problems(query), query.dtype, query.device, "query"
    if dtype in descales.FP8:  # those that are not FP8 have one dtype
        like, dtype = next(((n, t.dtype) for n, t in named.items() if t.dtype in FLOATS), (like, dtype))
    for label, tensor in named.items():
        if tensor.dtype != dtype and tensor is not query and tensor.dtype not in descales.FP8:
            how = f"cast one of them, {label}.to({like}.dtype)"
            how += f", or make the cache with rope_dtype={dtype}" if label == "rope" else ""
            found.append(wrong(label, f"dtype {dtype} as in {like}", tensor.dtype, how))
        if tensor is not query and tensor.device != device:
            found += place_problems(label, tensor, device)
        if tensor.stride(3) != 1 and tensor.shape[3] > 1 and not (label == "value" and _in_columns(tensor)):
            got = f"strides {list(tensor.stride())}"
            found.append(wrong(label, "a contiguous last dimension", got, "call .contiguous()"))
    return found


def _in_columns(value: Tensor) -> bool:
    """Whether an FP8 value has its length contiguous, as `weft.fp8.quantize(layout="columns")` makes it."""
    return value.dtype in descales.FP8 and value.stride(2) == 1


def memory_problems(given: Mapping[str, object]) -> list[Problem]:
    """Tensors whose storage was given back, `x.untyped_storage().resize_(0)`: what reads them begins at address 0."""
    found = []
    for label, tensor in given.items():
        if not isinstance(tensor, Tensor) or form_problem(label, tensor) is not None:  # which is told as such
            continue
        if hasattr(tensor, "fake_mode"):  # it stands for one whose memory nobody asks for
            continue
        if tensor.data_ptr() != tensor.storage_offset() * tensor.element_size():
            continue
        if tensor.is_meta or not tensor.numel():
            continue
        if hasattr(tensor, "to_local"):
            how = "distribute the query too, or call on local tensors, x.to_local()"
            found.append(wrong(label, "a plain tensor as query is", "a DTensor", how))
        else:
            got = "one whose storage was resized to 0 bytes, as sharding frees parameters"
            how = "call before it is freed, or after it is filled again"
            found.append(wrong(label, "a tensor with memory", got, how))
    return found


def known_memory_problems(given: Mapping[str, object]) -> list[Problem]:
    """The same where tensors may stand for others, as while torch traces or transforms a function: not asked then."""
    return [] if torch.compiler.is_compiling() or under_transform() else memory_problems(given)


# -- query, key and value ----------------------------------------------------------------------------------------------
def main_problems(
    query: Tensor, key: Tensor, value: Tensor | None, paged: bool = False, longest: int | None = MAX_LENGTH
) -> list[Problem]:
    """query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], one dtype and device, last dim contiguous.

    paged: key [blocks, Hkv, page, D] and value [blocks, Hkv, page, Dv] are pools. longest: what L and T may be; None
    where torch traces them, and would hold an exported program to the answer.
    """
    if value is None:
        return [missing("value", "call it with query, key and value")]
    named = {"query": query, "key": key, "value": value}
    if found := rank_problems(named):
        return found
    return _shape_problems(query, key, value, paged, longest) + kind_problems(named)


def check_tensors(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, paged: bool = False, longest: int | None = MAX_LENGTH
) -> None:
    """Raise WeftError for main tensors that do not fit each other."""
    if problems := main_problems(query, key, value, paged, longest):
        raise collected(name, problems)


def _shape_problems(query: Tensor, key: Tensor, value: Tensor, paged: bool, longest: int | None) -> list[Problem]:
    batch, heads, q_len, dim = query.shape
    key_batch, kv_heads, kv_len, key_dim = key.shape
    value_batch, value_heads, value_len, value_dim = value.shape
    found = []
    if paged:
        if value_batch != key_batch:
            found.append(wrong("value", f"{counted(key_batch, 'block')} as in key", value_batch))
    else:
        for label, number in (("key", key_batch), ("value", value_batch)):
            if number != batch:
                found.append(wrong(label, f"batch {batch} as in query", number))
    if key_dim != dim:
        found.append(wrong("key", f"dim {dim} as in query", key_dim))
    if value_heads != kv_heads:
        found.append(wrong("value", f"{counted(kv_heads, 'head')} as in key", value_heads))
    if value_len != kv_len:
        found.append(wrong("value", f"{'page' if paged else 'length'} {kv_len} as in key", value_len))
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        found.append(_heads_problem(heads, kv_heads, paged))
    if not (0 < dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM):
        found += width_problems("query", dim) + width_problems("value", value_dim)
    if longest is not None and (q_len > longest or kv_len > longest):
        found += length_problems("query", q_len) + length_problems("key", kv_len)
    return found


def _heads_problem(heads: int, kv_heads: int, paged: bool) -> Problem:
    if not heads or not kv_heads:
        return wrong("key" if heads else "query", "at least 1 head", 0)
    rows = (
        "pools are [blocks, heads, page, dim]: pass x.transpose(1, 2) of [blocks, page, heads, dim] pools" if paged
        else "dimensions are [batch, heads, length, dim]: pass x.transpose(1, 2) of [batch, length, heads, dim] tensors"
    )  # fmt: skip
    got = f"{heads} (grouped heads share a key head)"
    return wrong("query", f"a multiple of the key's {counted(kv_heads, 'head')}", got, rows)


def check_no_value(attention: Attention, value: object) -> None:
    """Raise WeftError for a value that is given to latent attention."""
    if value is not None:
        what, how = "latent attention takes query and cache only", "its values come from the cache"
        raise collected(str(attention.name), [Problem(operand="value", what=what, next_step=how)])


# -- latent attention --------------------------------------------------------------------------------------------------
def check_latent(
    attention: Attention, query: Tensor, cache: Tensor, uk: Tensor | None, uv: Tensor | None, paged: bool = False,
    rope: Tensor | None = None,
) -> None:  # fmt: skip
    """query [B, H, L, nope + rope], cache [B, 1, T, rank + rope], uk [H, rank, nope], uv [H, rank, Dv].

    paged: cache [blocks, 1, page, rank + rope] is a pool. rope: [B, 1, T, rope], or a pool; the cache has rank columns.
    """
    name, named = str(attention.name), {"query": query, "cache": cache}
    named |= {} if rope is None else {"rope": rope}
    if problems := rank_problems(named):
        raise collected(name, problems)
    latent = attention.latent
    assert latent is not None
    width, columns = latent.rank + latent.rope, "rank + rope" if rope is None else "rank, with rope="
    own = width if rope is None else latent.rank
    if query.shape[1] == 0:
        problems.append(_heads_problem(0, 1, paged))
    if cache.shape[1] != 1:
        problems.append(wrong("cache", f"1 head [B, 1, T, {columns}]", cache.shape[1]))
    if cache.shape[3] != own:
        problems.append(wrong("cache", f"dim {own} ({columns})", cache.shape[3]))
    if rope is not None:
        problems += _rotary_problems(cache, rope, latent.rope)
    if cache.shape[0] != query.shape[0] and not paged:
        problems.append(wrong("cache", f"batch {query.shape[0]} as in query", cache.shape[0]))
    problems += kind_problems(named)
    if not torch.compiler.is_compiling():  # which would hold an exported program to the answer: the op asks again
        problems += length_problems("query", query.shape[2]) + length_problems("cache", cache.shape[2])
    if uk is None or uv is None:
        problems += _lone_problems(attention, query, width, uk, uv)
    else:
        problems += _projection_problems(latent.rank, latent.rope, query, uk, uv)
    if problems := problems or known_memory_problems({**named, "uk": uk, "uv": uv}):
        raise collected(name, problems)


def _rotary_problems(cache: Tensor, rope: Tensor, columns: int) -> list[Problem]:
    """Of rotary columns that are a tensor of their own beside a latent cache."""
    if not columns:
        return [wrong("rope", "None, as the latent has no rotary columns", f"shape {list(rope.shape)}")]
    expected = [*cache.shape[:3], columns]
    found = [wrong("rope", f"{expected} beside the cache", list(rope.shape))] if [*rope.shape] != expected else []
    if rope.dtype in descales.FP8:
        how = "they have no descale: keep rotary columns in 16 bits"
        found.append(wrong("rope", "16 or 32 bits a number", rope.dtype, how))
    return found


def _lone_problems(
    attention: Attention, query: Tensor, width: int, uk: Tensor | None, uv: Tensor | None
) -> list[Problem]:
    """Of a call that does not give both projections: without any, the query is latent."""
    if uk is not None or uv is not None:
        given, lacking = ("uk", "uv") if uv is None else ("uv", "uk")
        return [missing(lacking, f"it goes with {given}; pass both or neither")]
    found = []
    if attention.scale is None:
        what = "without uk and uv the query is latent and its true width is unknown"
        found.append(Problem(option="scale", what=what, next_step="declare scale="))
    if query.shape[3] != width:
        found.append(wrong("query", f"dim {width} (rank + rope) without uk", query.shape[3]))
    return found


def _projection_problems(rank: int, rope: int, query: Tensor, uk: Tensor, uv: Tensor) -> list[Problem]:
    heads, nope = query.shape[1], query.shape[3] - rope
    found: list[Problem] = []
    if query.dtype in descales.FP8:
        how = "uk multiplies it: pass real numbers, weft.fp8.dequantize(...)"
        return [wrong("query", "16 or 32 bits a number beside uk and uv", query.dtype, how)]
    if nope < 1:
        found.append(wrong("query", f"dim above {rope}, the latent's rope", query.shape[3]))
    for label, tensor in (("uk", uk), ("uv", uv)):
        if (problem := form_problem(label, tensor)) is not None:
            found.append(problem)
        elif tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[1] != rank:
            found.append(wrong(label, f"[{heads}, {rank}, width]", f"shape {list(tensor.shape)}"))
        elif tensor.dtype != query.dtype or tensor.device != query.device:
            expected, got = (f"{t.dtype} on {t.device}" for t in (query, tensor))
            found.append(wrong(label, f"{expected} as in query", got))
        elif label == "uk" and nope > 0 and tensor.shape[2] != nope:
            found.append(wrong("uk", f"width {nope} (query's dim minus rope)", tensor.shape[2]))
        elif tensor.shape[2] < 1:
            found.append(wrong(label, "a width of at least 1", tensor.shape[2]))
    return found


def _latent_problems(call: Call) -> list[Problem]:
    """Of the tensors that kernels of latent attention take: columns of the key, or of key and rope, are the query's."""
    query, key, value, rope = call.query, call.key, call.value, call.rope
    named = call.tensors
    if found := rank_problems(named):
        return found
    found = kind_problems(named)
    batch = key.shape[0] if isinstance(call.sequences, Pages) else query.shape[0]
    width = key.shape[3] + (0 if rope is None else rope.shape[3])
    if query.shape[3] != width:
        found.append(wrong("query", f"dim {width}, the key's columns and rope's", query.shape[3]))
    for label, tensor in named.items():
        if label != "query":
            if tensor.shape[0] != batch or tensor.shape[2] != key.shape[2]:
                rows = f"batch {batch} and length {key.shape[2]}"
                found.append(wrong(label, rows, f"shape {list(tensor.shape)}"))
            if 0 in (tensor.shape[1], query.shape[1]) or query.shape[1] % tensor.shape[1]:
                found.append(_heads_problem(query.shape[1], tensor.shape[1], False))
    if value is not None and value.shape[1] != key.shape[1]:
        found.append(wrong("value", f"{counted(key.shape[1], 'head')} as in key", value.shape[1]))
    return found + length_problems("query", query.shape[2]) + length_problems("key", key.shape[2])


# -- a call as kernels take it -----------------------------------------------------------------------------------------
def tensor_problems(call: Call) -> list[Problem]:
    """Main tensors of a call that do not fit each other."""
    if call.value is None or call.rope is not None:
        found = _latent_problems(call)
    else:
        found = main_problems(call.query, call.key, call.value, isinstance(call.sequences, Pages))
    return found or _descale_problems(call)


def _descale_problems(call: Call) -> list[Problem]:
    """Descales that do not fit their operands: a graph reaches the op with what it holds."""
    found, read = [], call.read or {}
    for label, tensor in zip(descales.NAMES, (call.query, call.key, call.value)):
        if (descale := read.get(label)) is None:
            continue
        fits = tensor is not None and descale.dim() == 4 and descale.dtype == torch.float32
        if not fits or descale.shape[3] != 1 or any(n not in (1, m) for n, m in zip(descale.shape[:2], tensor.shape)):  # type: ignore[union-attr]
            found.append(wrong(label, "a descale of its operand", f"{descale.dtype} {list(descale.shape)}"))
    return found


def refuse_tracing(name: str) -> None:
    """Sizes are tensors there, and a trace would keep the numbers of one call."""
    if is_traced():
        raise UnavailableError(f"{name}: torch.jit.trace is not available; use torch.export or torch.compile")


# -- what a backward starts from ---------------------------------------------------------------------------------------
NO_PAGES = (
    "a call with block_table has no backward: call under torch.no_grad(), or gather the pages into padded operands, "
    "and pass kv_lens= alone, to train"
)
THROUGH = "x + (weft.fp8.dequantize(weft.fp8.quantize(x)) - x).detach() has the numbers of FP8, and gradients"
TRAIN_OTHERWISE = f"call under torch.no_grad(), or train with bf16 operands; {THROUGH}"


def trainable_problems(main: Sequence[Tensor | None], wanted: Iterable[str], paged: bool) -> list[Problem]:
    """Gradients that are wanted and cannot be computed. main: query, key, value and perhaps more."""
    if not wanted:
        return []
    if descales.are_quantized(main):
        return [Problem(what="a call with FP8 operands has no backward", next_step=TRAIN_OTHERWISE)]
    if paged:
        return [Problem(option="block_table", what=NO_PAGES, named=True)]
    if main[2] is None:
        how = "call with uk=, uv= and form='expanded' to train"
        return [Problem(option="form", what="the absorbed form has no backward", next_step=how, named=True)]
    return []


def check_kept(name: str, b: BackwardCall) -> None:
    """Raise WeftError where an operand is no longer what the forward read, as far as dimensions and dtypes tell."""
    how = "keep operands until the backward has run"
    changed = [
        wrong(n, "what the forward read", f"{t.dtype} {list(t.shape)}, put in its place before the backward, as by "
              "x.data = ...", how)
        for n, t in b.call.tensors.items()
        if t.dim() != 4 or t.dtype != b.out.dtype
    ]  # fmt: skip
    if changed:
        raise collected(name, changed)


def check_backward(name: str, b: BackwardCall, pair: bool) -> None:
    """Raise WeftError where what a backward starts from does not fit the forward."""
    if problems := memory_problems({"out": b.out, "lse": b.lse, "dout": b.dout, "dlse": b.dlse}):
        raise collected(name, problems)
    query, value = b.call.query, b.call.value
    width = b.out.shape[3] if value is None else value.shape[3]
    rows = query.shape[:3]
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    for label, tensor, shape, dtype in (
        ("out", b.out, (*rows, width), query.dtype), ("dout", b.dout, (*rows, width), query.dtype),
        ("lse", b.lse, (*((2,) if pair else ()), *rows), statistics),
        ("dlse", b.dlse, (*((2,) if pair else ()), *rows), statistics),
    ):  # fmt: skip
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != query.device:
            got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            problems.append(wrong(label, f"{list(shape)} {dtype} on {query.device}", got))
    if problems:
        raise collected(name, problems)
