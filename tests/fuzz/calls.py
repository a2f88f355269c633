"""Calls of a variant as small records, and the tensors they stand for.

Tensors are described by lines of Python, which the fuzzer runs and a script prints: both hold the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .dense import Environment, Precision, Undefined, evaluate
from .sequences import Lens, Pages
from .tree import INTS, Kind, Node, Num, Read, Scalar, nodes

ON_A_GPU = ("triton", "hopper")
CACHED_RANKS = (256, 512)  # of latent caches as models have them, with 64 rotary columns: kernels of their own
MOST_ELEMENTS = 10_000_000  # of an operand
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
# What has a descale: nothing, a tensor (a Python number), a head ([B, H, 1, 1], or [H] for "heads"), a row or 64 or 128
DESCALED = ("", "number", "head", "heads", "token", "64", "128")
# What every script begins with.
HELPERS = """
def rand(seed, *shape): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
def ints(seed, low, high, *shape): return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
nan = float("nan")
"""


@dataclass(frozen=True)
class Latent:
    rank: int
    rope: int


@dataclass(frozen=True)
class Variant:
    """A declaration."""

    score: Node
    mask: Node
    scale: Node | None = None
    latent: Latent | None = None
    sink: Node | None = None
    dropout: Num | Scalar | None = None
    normalizer: str = "softmax"

    @property
    def trees(self) -> tuple[Node, ...]:
        return tuple(tree for tree in (self.score, self.mask, self.scale, self.sink) if tree is not None)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        found = [n for tree in self.trees for n in nodes(tree) if isinstance(n, Read)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def scalars(self) -> dict[str, Kind]:
        found = {n.name: n.kind for tree in self.trees for n in nodes(tree) if isinstance(n, Scalar)}
        if isinstance(self.dropout, Scalar):
            found[self.dropout.name] = self.dropout.kind
        return dict(sorted(found.items()))

    @cached_property
    def tensors(self) -> dict[str, tuple[Kind, int]]:
        """Kind and rank of tensor operands; those that index others come first."""
        found: dict[str, tuple[Kind, int]] = {}

        def visit(read: Read) -> None:
            for inner in (n for i in read.index for n in nodes(i) if isinstance(n, Read)):
                visit(inner)
            found.setdefault(read.name, (read.kind, len(read.index)))

        for read in self.reads:
            visit(read)
        return found


@dataclass(frozen=True)
class Given:
    """How a tensor is made."""

    fill: str  # a key of FILLS
    dtype: str  # of torch
    layout: str  # a key of LAYOUTS
    seed: int
    slack: int = 0  # entries of a dimension beyond those that are read, NaN


@dataclass(frozen=True)
class Call:
    """A call of a variant: sizes, tensors by how they are made, and options."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int  # of query; with latent: nope + rope
    value_dim: int
    dtype: str
    main: tuple[Given, ...]  # query, key, value; query, cache, uk, uv; query, cache
    scalars: tuple[tuple[str, int | float], ...] = ()
    tensors: tuple[tuple[str, Given], ...] = ()
    q_offset: int | tuple[int, ...] | None = None
    lens: Lens | None = None
    pages: Pages | None = None  # of key and value, or cache; kv_len is then what these are as rows
    target: str = "cpu"  # or "reference", which is no target of Weft but its own definition
    schedule: str | None = None
    form: str | None = None
    lse: bool = False
    wanted: tuple[str, ...] = ()
    dout: str = "plain"  # layout of the gradient of out; "none": that of lse is the only one
    seed: int = 0
    train: bool = True
    fp8: tuple[tuple[str, str, str], ...] = ()  # operand, a key of FORMATS, what has a descale: one of DESCALED
    columns: bool = False  # the columns of an FP8 value are contiguous
    apart: bool = False  # the rotary columns of a latent cache are a tensor of their own

    @property
    def out_dtype(self) -> str | None:
        """Of a call with FP8 operands, the option: None where it is left out, as what it would say is the default."""
        is_default = len(self.fp8) < len(self.main[:3]) or self.dtype == "bfloat16"
        return self.dtype if self.fp8 and not (is_default and self.seed % 2) else None

    @property
    def named_target(self) -> str | None:
        """The option: for FP8 operands Weft chooses, as hopper multiplies some; None for the definition, too."""
        chooses = self.target == "reference" or (self.target == "hopper" and self.fp8)
        return None if chooses else self.target

    @property
    def drop_seed(self) -> int:
        """The seed of dropout, of 64 bits and either sign."""
        return (self.seed * 0x9E3779B97F4A7C15 + 1) % 2**64 - 2**63

    def dropping(self, device: str) -> dict[str, str]:
        """Text of the options of a call of a variant that drops weights."""
        seed = str(self.drop_seed)
        if self.seed % 4 == 1:
            seed = f"torch.tensor([{seed}]" + ("" if device == "cpu" else f", device={device!r}") + ")"
        return {"seed": seed} if self.train else {"seed": seed, "train": "False"}

    def lengths(self, device: str) -> dict[str, str]:
        """Texts of the options that say where sequences lie."""
        return {} if self.lens is None else self.lens.options(device, self.q_len, self.kv_len, self.pages)

    @property
    def deterministic(self) -> bool | None:
        return (None, True, False)[self.seed % 3] if self.wanted else None

    @property
    def pairs(self) -> int:
        return self.batch * self.heads * self.q_len * self.kv_len


FILLS = {
    "normal": "rand({seed}, {shape})",
    "small": "0.25 * rand({seed}, {shape})",
    "quarters": "(2 * rand({seed}, {shape})).round() / 4",
    "positive": "rand({seed}, {shape}).abs() + 0.25",
    "zero": "torch.zeros({shape})",
    "some -1e4": "torch.where(rand({seed}, {shape}) > 0.5, -1e4, 0.0)",
    "some -1e9": "torch.where(rand({seed}, {shape}) > 0.5, -1e9, 0.0)",
    "some -inf": "torch.where(rand({seed}, {shape}) > 1.0, -float('inf'), 0.0)",
    "all -1e4": "torch.full(({shape},), -1e4)",
    "all -1e9": "torch.full(({shape},), -1e9)",
    "some least": "torch.where(rand({seed}, {shape}) > 0.5, torch.finfo({dtype}).min, 0.0)",
    "all least": "torch.full(({shape},), torch.finfo({dtype}).min)",
    "tiny ints": "ints({seed}, 0, 3, {shape})",
    "ints": "ints({seed}, 0, 9, {shape})",
    "signed": "ints({seed}, -9, 30, {shape})",
    "documents": "ints({seed}, 0, 4, {shape}).sort(-1).values",
    "ids": "ints({seed}, 0, 3, {shape}) * (2**40 + 1)",
    "bits": "rand({seed}, {shape}) > -0.7",
}
PADDING = ("some -1e4", "some -1e9", "some -inf", "all -1e4", "all -1e9", "some least", "all least")
# Lines that change where `x` lies, not what it holds; the memory between is NaN (or a number that no test expects).
LAYOUTS = {
    "plain": "",
    "none": "",
    "rows first": "{x} = {x}.transpose(1, 2).contiguous().transpose(1, 2)",
    "padded": "{x} = torch.nn.functional.pad({x}, (8, 8, 3, 2), value={poison})[..., 3:-2, 8:-8]",
    "odd": "{x} = torch.nn.functional.pad({x}, (1, 2, 1, 0), value={poison})[..., 1:, 1:-2]",
    "offset": "{x} = torch.nn.functional.pad({x}.flatten(), (3, 0), value={poison})[3:].view({x}.shape)",
    "one head": "{x} = {x}[:, :1].expand({x}.shape)",
    "one batch": "{x} = {x}[:1].expand({x}.shape)",
    "one row": "{x} = {x}[..., :1, :].expand({x}.shape)",
    "stepped": "{x} = torch.stack([{x}, torch.full_like({x}, {poison})], -1)[..., 0]",
    "reversed": "{x} = {x}.permute(*range({x}.dim())[::-1]).contiguous().permute(*range({x}.dim())[::-1])",
    "repeated": "{x} = {x}[:1].expand({x}.shape)",
}
MAIN_LAYOUTS = ("plain", "rows first", "padded", "odd", "offset", "one head", "one batch", "one row")
UNALIGNED = ("odd", "offset")  # of these
OPERAND_LAYOUTS = ("plain", "stepped", "reversed", "offset", "repeated")


@dataclass
class Built:
    """A call with its tensors."""

    variant: Variant
    call: Call
    names: tuple[str, ...]  # of the main tensors
    tensors: dict[str, Tensor]  # main tensors and tensor operands
    lines: list[str] = field(default_factory=list)  # that make them
    # operands as the call takes them, by name, where `tensors` has the real numbers; and what stands beside, by option
    stored: dict[str, Tensor | float] = field(default_factory=dict)


def main_names(variant: Variant, call: Call) -> tuple[str, ...]:
    if variant.latent is None:
        return ("query", "key", "value")
    return ("query", "cache", "uk", "uv") if call.form != "latent query" else ("query", "cache")


def main_shapes(variant: Variant, c: Call) -> list[tuple[int, ...]]:
    latent, of_keys = variant.latent, (c.batch, c.kv_len)
    if c.pages is not None:
        assert c.lens is not None
        of_keys = c.pages.blocks(c.lens.kv), c.pages.rows
    query, (blocks, rows) = (c.batch, c.heads, c.q_len, c.dim), of_keys
    if latent is None:
        return [query, (blocks, c.kv_heads, rows, c.dim), (blocks, c.kv_heads, rows, c.value_dim)]
    shapes = [query, (blocks, 1, rows, latent.rank + latent.rope)]
    return [*shapes, (c.heads, latent.rank, c.dim - latent.rope), (c.heads, latent.rank, c.value_dim)]


def build(variant: Variant, call: Call, device: str = "cpu") -> Built:
    """Make the tensors of a call; the shapes of operands are what is read of them. Raises Undefined."""
    names = main_names(variant, call)
    space: dict[str, object] = {"torch": torch}
    exec(HELPERS, space)
    built = Built(variant, call, names, {})
    for name, given, shape in zip(names, call.main, main_shapes(variant, call)):
        _make(built, space, name, given, shape, call.dtype, device)
    tensors = dict(call.tensors)
    read_in = _read_in(built) if tensors else []
    for name in _in_order(variant):
        given = tensors[name]
        _make(built, space, name, given, _extents(built, name, given.slack, read_in), given.dtype, device)
    return built


def _in_order(variant: Variant) -> list[str]:
    """The names of tensors, each behind those that its indices read."""
    needs = {name: set[str]() for name in variant.tensors}
    everything = [*variant.reads, *([] if variant.sink is None else nodes(variant.sink))]
    for read in everything:
        if isinstance(read, Read):
            needs[read.name] |= {n.name for index in read.index for n in nodes(index) if isinstance(n, Read)}
    ordered: list[str] = []
    while len(ordered) < len(needs):
        ready = next((n for n in needs if n not in ordered and needs[n] <= {*ordered, n}), None)
        ordered.append(ready or next(n for n in needs if n not in ordered))
    return ordered


def _make(
    built: Built, space: dict[str, object], name: str, given: Given, shape: tuple[int, ...], dtype: str, device: str
) -> None:  # fmt: skip
    least = "float32" if dtype == "float64" else dtype  # kernels of float32 take what float64 has beyond for infinite
    values = FILLS[given.fill].format(seed=given.seed, shape=", ".join(map(str, shape)), dtype=f"torch.{least}")
    place = "" if device == "cpu" else f"{device!r}, "
    lines = [f"{name} = ({values}).to({place}torch.{dtype})"]
    if given.layout != "one batch":  # which repeats the first batch row, whatever its length
        lines += _behind_lengths(name, built.call)
    if given.slack and "float" in given.dtype:
        lines += [f"{name}.narrow({d}, -{given.slack}, {given.slack}).fill_(nan)" for d in range(len(shape))]
    layout = LAYOUTS[given.layout].format(x=name, poison="nan" if "float" in dtype else "1")
    lines += [layout] if layout else []
    fp8 = next((one for one in built.call.fp8 if one[0] == name), None)
    latent = built.variant.latent
    apart = latent.rank if latent is not None and name == "cache" and built.call.apart else None
    if apart is not None:
        lines += [f"rope, cache = cache[..., {apart}:], cache[..., :{apart}]"]
    if fp8 is not None:
        lines += _as_fp8(fp8, built.call, given, shape, device)
    elif apart is not None:
        lines.append("cache_given = cache")
    if apart is not None:
        lines.append("cache = torch.cat([cache, rope], -1)")
    exec("\n".join(lines), space)
    tensor = space[name]
    for key, made in ((name, f"{name}_given"), (_option(name), _option(name)), ("rope", "rope")):
        if (fp8 or apart) and made in space:
            built.stored[key] = space[made]  # type: ignore[assignment]
    assert isinstance(tensor, Tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise Undefined(f"{name}: the layout {given.layout} does not serve shape {shape}")
    built.tensors[name] = tensor
    built.lines += lines


def _option(name: str) -> str:
    """The descale of an operand."""
    return f"{'k' if name == 'cache' else name[0]}_descale"


def _as_fp8(
    fp8: tuple[str, str, str], call: Call, given: Given, shape: tuple[int, ...], device: str
) -> list[str]:  # fmt: skip
    """Lines that make an operand FP8 as x_given, and x the real numbers that this stands for.

    Descales are powers of two, so that the dtype of the call holds the real numbers exactly.
    """
    name, kind, of = fp8
    pooled = call.pages is not None and name != "query"
    batch, heads, rows, _ = shape
    option, lines, times = _option(name), [], ""
    if of == "number":
        lines, times = [f"{option} = 2.0 ** {given.seed % 7 - 3}"], option
    elif of:
        place = "" if device == "cpu" else f".to({device!r})"
        by_rows = of in ("token", "64", "128") and not (pooled and (rows == 1 or of != "token"))
        n = int(of) if by_rows and of != "token" else 1
        sizes = (batch if by_rows or not pooled else 1, heads, -(-rows // n) if by_rows else 1, 1)
        sizes = (heads,) if of == "heads" else sizes
        lines.append(f"{option} = (2.0 ** ints({given.seed}, -3, 4, {', '.join(map(str, sizes))})){place}")
        if of != "heads" and (layout := LAYOUTS[("plain", "rows first", "stepped")[given.seed % 3]]):
            lines.append(layout.format(x=option, poison="nan"))
        times = f"{option}.view(1, -1, 1, 1)" if of == "heads" else option
        times += f".repeat_interleave({n}, 2)[:, :, :{rows}]" if n > 1 and sizes[2] > 1 else ""
    real = f"({name}.float(){' / ' + times if times else ''}).clamp(-240.0, 240.0)"
    lines.append(f"{name}_given = {real}.to(torch.{FORMATS[kind]})")
    lines.append(f"{name} = ({name}_given.float(){' * ' + times if times else ''}).to(torch.{call.dtype})")
    if call.columns and name == "value":
        lines.append("value_given = value_given.transpose(2, 3).contiguous().transpose(2, 3)")
    elif given.layout in ("rows first", "padded", "odd", "offset"):  # torch pads bytes, and 127 is NaN in both formats
        layout = LAYOUTS[given.layout].format(x=f"{name}_bytes", poison="127")
        lines += [f"{name}_bytes = {name}_given.view(torch.uint8)", layout]
        lines.append(f"{name}_given = {name}_bytes.view(torch.{FORMATS[kind]})")
    return lines


_SIDES = {"query": "q", "key": "kv", "value": "kv", "cache": "kv"}


def _behind_lengths(name: str, call: Call) -> list[str]:
    """Lines that put NaN in rows of no sequence."""
    side, lens = _SIDES.get(name), call.lens
    if lens is None or side is None:
        return []
    if side == "kv" and call.pages is not None:
        ends = call.pages.used(lens.kv)
    elif lens.packed:
        return [f"{name}[:, :, {lens.starts(side)[-1]} :] = nan"]
    else:
        ends = list(getattr(lens, side))
    return [f"for b, n in enumerate({ends}): {name}[b, :, n:] = nan"]


ReadIn = list[tuple[tuple[Read, ...], Environment]]  # reads, and all places where they are read


def _read_in(built: Built) -> ReadIn:
    """Where reads are read; the tensors that indices read are those that `built` has when these are evaluated."""
    variant, call = built.variant, built.call
    some = replace(call, q_len=max(1, call.q_len), kv_len=max(1, call.kv_len))  # Weft proves indices of empty calls too
    found = [(variant.reads, environment(replace(built, call=some), built.tensors))]
    if call.lens is not None and call.target in ON_A_GPU:
        found.append((variant.reads, _roomy_environment(built)))
    if variant.sink is not None:  # which queries of sequences without keys see, too
        of_rows = row_environment(built, sink_rows(call, built.tensors["query"].device), built.tensors)
        found.append((tuple(n for n in nodes(variant.sink) if isinstance(n, Read)), of_rows))
    return found


def _extents(built: Built, name: str, slack: int, read_in: ReadIn) -> tuple[int, ...]:
    """One more than the largest index that any pair has, visible or not: Weft proves indices for all of them."""
    read_by = [(read, env) for reads, env in read_in for read in reads if read.name == name]
    highest: list[int] = []
    for read, own in read_by:
        highest = highest or [0] * len(read.index)
        for d, index in enumerate(read.index):
            places = evaluate(index, own).value
            if len(places) and int(places.min()) < 0:
                raise Undefined(f"{name}: index {d} is negative")
            highest[d] = max(highest[d], int(places.max()) if len(places) else 0)
    if max(highest, default=0) > 4000 or math.prod(h + 1 + slack for h in highest) > MOST_ELEMENTS:
        raise Undefined(f"{name}: larger than a test needs")
    return tuple(h + 1 + slack for h in highest)


def symbol_values(variant: Variant, call: Call, device: torch.device) -> dict[str, Tensor | int]:
    """Every symbol but the score, a vector over all pairs [B, H, L, T] or a number."""
    if call.lens is not None:
        return _ragged_symbols(variant, call, call.lens, device)
    shape = (call.batch, call.heads, call.q_len, call.kv_len)
    group, heads = call.heads // call.kv_heads, torch.arange(call.heads, device=device).view(1, -1, 1, 1)
    if variant.latent is not None:
        group = 1  # every head has keys of its own, whether they are multiplied out or not
    offset = call.kv_len - call.q_len if call.q_offset is None else call.q_offset
    first = torch.tensor(offset, device=device).view(-1, 1, 1, 1)
    grid = {
        "q_pos": first + torch.arange(call.q_len, device=device).view(1, 1, -1, 1),
        "kv_pos": torch.arange(call.kv_len, device=device).view(1, 1, 1, -1),
        "batch": torch.arange(call.batch, device=device).view(-1, 1, 1, 1),
        "head": heads, "kv_head": heads // group,
    }  # fmt: skip
    width = call.dim
    values: dict[str, Tensor | int] = {n: v.expand(shape).flatten() for n, v in grid.items()}
    values |= {"group": group, "q_len": call.q_len, "kv_len": call.kv_len, "head_dim": width}
    assert values.keys() == set(INTS)
    return values


def _rows_of(call: Call, lens: Lens, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every row [B, rows] of a side: the number of its sequence, -1 of none, and its place in it."""
    rows = call.q_len if side == "q" else call.kv_len
    owner = torch.full((call.batch, rows), -1, dtype=torch.int64, device=device)
    place = torch.zeros_like(owner)
    for number, (first, length) in enumerate(zip(lens.starts(side), getattr(lens, side))):
        b = 0 if lens.packed else number
        owner[b, first : first + length] = number
        place[b, first : first + length] = torch.arange(length, device=device)
    return owner, place


def existing(call: Call, device: torch.device) -> Tensor:
    """Which pairs are of one sequence, a vector over all pairs [B, H, L, T]."""
    shape = (call.batch, call.heads, call.q_len, call.kv_len)
    if call.lens is None:
        return torch.ones(shape, dtype=torch.bool, device=device).flatten()
    q, kv = (_rows_of(call, call.lens, side, device)[0] for side in ("q", "kv"))
    same = (q[:, None, :, None] == kv[:, None, None, :]) & (q >= 0)[:, None, :, None]
    return same.expand(shape).flatten()


def _ragged_symbols(variant: Variant, call: Call, lens: Lens, device: torch.device) -> dict[str, Tensor | int]:
    """Symbols of pairs of one sequence; what others have means nothing."""
    shape = (call.batch, call.heads, call.q_len, call.kv_len)
    group = 1 if variant.latent is not None else call.heads // call.kv_heads
    heads = torch.arange(call.heads, device=device).view(1, -1, 1, 1)
    owner, row = _rows_of(call, lens, "q", device)
    _, column = _rows_of(call, lens, "kv", device)
    of = owner.clamp(min=0)
    q_len, kv_len = (torch.tensor([*x, 0], device=device)[of] for x in (lens.q, lens.kv))
    offset = kv_len - q_len
    if isinstance(call.q_offset, int):
        offset = torch.full_like(offset, call.q_offset)
    elif call.q_offset is not None:
        offset = torch.tensor([*call.q_offset, 0], device=device)[of]
    grid = {
        "q_pos": (row + offset)[:, None, :, None], "kv_pos": column[:, None, None, :], "batch": of[:, None, :, None],
        "q_len": q_len[:, None, :, None], "kv_len": kv_len[:, None, :, None], "head": heads, "kv_head": heads // group,
    }  # fmt: skip
    values: dict[str, Tensor | int] = {n: v.expand(shape).flatten() for n, v in grid.items()}
    values |= {"group": group, "head_dim": call.dim}
    assert values.keys() == set(INTS)
    return values


def environment(built: Built, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Environment:
    """Of all pairs that exist, for expressions without the score."""
    call = built.call
    device = built.tensors["query"].device
    symbols, number = symbol_values(built.variant, call, device), call.pairs
    if call.lens is not None:
        exist = existing(call, device)
        symbols, number = {n: v[exist] if isinstance(v, Tensor) else v for n, v in symbols.items()}, int(exist.sum())
    return Environment(symbols, None, dict(call.scalars), tensors, number, dtype, None)


def _roomy_environment(built: Built) -> Environment:
    """Of all pairs that sequences in such operands may have: their lengths, on a device, are not known to Weft."""
    call, lens = built.call, built.call.lens
    assert lens is not None
    kv_rows = call.kv_len if call.pages is None else len(call.pages.table(lens.kv)[0]) * call.pages.rows
    first, q_rows = (call.q_offset, call.q_len) if isinstance(call.q_offset, int) else (0, kv_rows)
    whole = replace(
        call, lens=None, pages=None, batch=len(lens.q), q_len=max(1, q_rows), kv_len=max(1, kv_rows), q_offset=first
    )
    if whole.pairs > MOST_ELEMENTS:
        raise Undefined("more room than a test needs")
    return environment(replace(built, call=whole), built.tensors)


def sink_rows(call: Call, device: torch.device) -> tuple[Tensor, ...]:
    """Batch row, head and row of every query that a sequence has."""
    exist = torch.ones(call.batch, call.q_len, dtype=torch.bool, device=device)
    if call.lens is not None:
        exist = _rows_of(call, call.lens, "q", device)[0] >= 0
    return exist[:, None].expand(call.batch, call.heads, call.q_len).nonzero(as_tuple=True)


def row_environment(
    built: Built, rows: tuple[Tensor, ...], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64,
    precision: Precision | None = None,
) -> Environment:  # fmt: skip
    """Of these rows, for what depends on no key: a sink."""
    call, (b, head, i) = built.call, rows
    group = 1 if built.variant.latent is not None else call.heads // call.kv_heads
    symbols = {"batch": b, "head": head, "kv_head": head // group, "group": group, "head_dim": call.dim}
    if call.lens is None:
        symbols |= {"q_len": call.q_len, "kv_len": call.kv_len}
    else:
        owner = _rows_of(call, call.lens, "q", b.device)[0][b, i]
        lengths = {n: torch.tensor(x, device=b.device) for n, x in (("q_len", call.lens.q), ("kv_len", call.lens.kv))}
        symbols |= {"batch": owner} | {n: x[owner] for n, x in lengths.items()}
    return Environment(symbols, None, dict(call.scalars), tensors, len(head), dtype, precision)


def cleaned(built: Built) -> Built:
    """The call with keys of pages as rows, and 0 in place of what lies behind lengths: nothing may depend on it."""
    call, lens = built.call, built.call.lens
    if lens is None:
        return built
    tensors = dict(built.tensors)
    for name, side in _SIDES.items():
        if name in tensors and side == "kv" and call.pages is not None:
            tensors[name] = _rows_of_pages(tensors[name], call, lens, call.pages)
        elif name in tensors:
            owner, _ = _rows_of(call, lens, side, tensors[name].device)
            tensors[name] = torch.where((owner >= 0)[:, None, :, None], tensors[name], 0.0)
    return replace(built, tensors=tensors)


def _rows_of_pages(pool: Tensor, call: Call, lens: Lens, pages: Pages) -> Tensor:
    """The rows of a pool [blocks, H, rows, D] in the order of sequences, [B, H, T, D]; 0 where none has one."""
    rows = pool.new_zeros(call.batch, pool.shape[1], call.kv_len, pool.shape[3])
    for number, (first, places) in enumerate(zip(lens.starts("kv"), pages.places(lens.kv))):
        if places:
            block, row = torch.tensor(places, device=pool.device).unbind(1)
            own = pool[block, :, row].transpose(0, 1)  # [H, keys, D]
            rows[0 if lens.packed else number, :, first : first + len(places)] = own
    return rows


def offset_text(q_offset: int | Sequence[int], device: str) -> str:
    if isinstance(q_offset, int):
        return str(q_offset)
    place = "" if device == "cpu" else f", device={device!r}"
    return f"torch.tensor({list(q_offset)}, dtype=torch.int32{place})"
