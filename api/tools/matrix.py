"""What each target computes, asked of the targets themselves: the table of `weft doctor --matrix`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from .. import masks
from ..attention import Attention
from ..codegen.targets import targets
from ..compiler.planning.plan import Plan
from ..ir.attention import Latent
from ..ir.errors import WeftError
from ..ir.expr import symbol, tensor
from ..ir.functions import maximum, minimum

DEVICES = {"cpu": "cpu", "interpret": "cpu", "triton": "h200", "hopper": "h200"}
Rows = Literal["dense", "padded", "packed", "paged", "packed over pages"]
BATCH, HEADS, LENGTH = 4, 8, 512
batch, head, kv_pos, q_pos, score = map(symbol, ("batch", "head", "kv_pos", "q_pos", "score"))


@dataclass(frozen=True)
class Kind:
    """A kind of calls: a variant, widths and lengths other than the usual ones, how rows lie, and what is given."""

    words: str
    variant: Attention
    dtype: torch.dtype | None = None  # None: bf16 on a GPU, fp32 on a CPU
    stored: torch.dtype | None = None  # of key and value, where they are FP8
    kv_heads: int = HEADS
    dim: int = 64
    value_dim: int = 0  # 0: that of the keys
    queries: int = LENGTH
    rows: Rows = "dense"
    page: int = 16
    operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # sizes of tensors, of floats
    reads: torch.dtype | None = None  # of those; None: as query, key and value
    options: dict[str, Any] = field(default_factory=dict)


def _named(words: str, score: Any = score, mask: Any = masks.causal, **declared: Any) -> Attention:
    return Attention(score, mask, name="of_" + words.replace(" ", "_"), **declared)


def kinds() -> Iterator[Kind]:
    causal, documents = _named("causal"), _documents()
    yield Kind("a causal mask, bf16", causal, torch.bfloat16)
    yield Kind("fp16", causal, torch.float16)
    yield Kind("float32", causal, torch.float32)
    yield Kind("keys and values in e4m3", causal, stored=torch.float8_e4m3fn)
    yield Kind("grouped heads", causal, kv_heads=2)
    yield Kind("D 80", causal, dim=80)
    yield Kind("D 20, no multiple of 8", causal, dim=20)
    yield Kind("D 192, Dv 128", causal, dim=192, value_dim=128)
    yield Kind("D 256", causal, dim=256)
    yield Kind("gradients that repeat", causal, options={"deterministic": True})
    yield Kind("documents by a tensor of ids", documents)
    yield from _reading()
    for name in ("sigmoid", "relu"):
        yield Kind(name, _named(name, normalizer=name))
        yield Kind(f"{name}, D 256", _named(name, normalizer=name), dim=256)
    yield Kind("sigmoid with dropout", _named("both", normalizer="sigmoid", dropout=0.1))
    yield Kind("dropout", _named("dropout", dropout=0.1))
    yield Kind("dropout, D 256", _named("dropout", dropout=0.1), dim=256)
    yield Kind("padded sequences", causal, rows="padded")
    yield Kind("packed sequences", causal, rows="packed")
    yield Kind("a paged cache", causal, rows="paged")
    yield Kind("pages of 4 rows", causal, rows="paged", page=4)
    yield Kind("packed queries over pages", causal, rows="packed over pages")
    yield Kind("documents, packed over pages", documents, rows="packed over pages")
    yield Kind("one query behind keys", causal, queries=1, kv_heads=2)
    latent: dict[str, Any] = {
        "variant": _named("latent", latent=Latent(rank=512, rope=64)),
        "dim": 192,
        "value_dim": 128,
    }
    yield Kind("latent, expanded", **latent, options={"form": "expanded"})
    yield Kind("latent, absorbed", **latent, options={"form": "absorbed"})


def _documents() -> Attention:
    ids = tensor("ids", 2, int)
    return _named("documents", mask=masks.causal & (ids[batch, q_pos] == ids[batch, kv_pos]))


def _reading() -> Iterator[Kind]:
    """Variants that read tensors by head and position; what is of floats gets gradients."""
    blocks, allowed = tensor("blocks", 3, bool), tensor("allowed", 3, bool)
    sloped = score - tensor("slopes", 1)[head] * (q_pos - kv_pos)
    table = tensor("table", 2)[head, minimum(maximum(q_pos - kv_pos, 0), 31)]
    biased = _named("bias", score + tensor("bias", 4)[batch, head, q_pos, kv_pos])
    pairs = {"bias": (BATCH, HEADS, LENGTH, LENGTH)}
    for size in (128, 32):
        sparse = _named("blocks", mask=blocks[head, q_pos // size, kv_pos // size])
        count = LENGTH // size
        yield Kind(f"blocks of {size} x {size}", sparse, operands={"blocks": (HEADS, count, count)})
    each = _named("pairs", mask=allowed[batch, q_pos, kv_pos])
    yield Kind("a bool for each pair", each, operands={"allowed": (BATCH, LENGTH, LENGTH)})
    yield Kind("a slope for each head", _named("slopes", sloped), operands={"slopes": (HEADS,)})
    dropped = _named("dropped_slopes", sloped, dropout=0.1)
    yield Kind("a slope for each head, and dropout", dropped, operands={"slopes": (HEADS,)})
    yield Kind("a table by distance", _named("table", score + table), operands={"table": (HEADS, 32)})
    yield Kind("a bias for each pair", biased, operands=pairs)
    yield Kind("a bias for each pair, float32, D 128", biased, dim=128, operands=pairs, reads=torch.float32)
    yield Kind("a sink for each head", _named("sink", sink=tensor("sinks", 1)[head]), operands={"sinks": (HEADS,)})


# --- what a target says -----------------------------------------------------------------------------------------------
def answers(kind: Kind, target: str) -> tuple[str, str]:
    """Of a forward and of a backward: "yes", or why not."""
    try:
        plan = _plan(kind, target)
    except WeftError as error:
        said = _reason(str(error))
        return said, said
    found = {code.signature.direction: code.target for code in reversed(plan.codes)}  # of two forwards the first
    notes = [_reason(note) for note in plan.notes if note.startswith(f"{target}: ")]
    why = notes[0] if notes else "has no backward"
    forward, backward = ("yes" if found.get(d) == target else why for d in ("forward", "backward"))
    return forward, backward


def _reason(text: str) -> str:
    """Without the names of variant and target before it."""
    return re.sub(r"^([\w ]+: )+", "", text.splitlines()[0]).removesuffix(" is computed by the triton target").strip()


def _plan(kind: Kind, target: str) -> Plan:
    device = DEVICES.get(target, "h200")
    dtype = kind.dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    given: dict[str, Any] = dict(kind.options)
    for operand in kind.variant.canonical.tensors:
        sizes = kind.operands.get(operand.name, (1,) if kind.variant.canonical.drops else (BATCH, LENGTH))
        own = {"float": kind.reads or dtype, "bool": torch.bool}.get(operand.dtype, torch.int64)
        given[operand.name] = torch.zeros(sizes, dtype=own, requires_grad=own.is_floating_point)
    tensors, rows = _tensors(kind, dtype)
    return kind.variant.plan(*tensors, **given, **rows, device=device, target=target)


def _tensors(kind: Kind, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Query, key and value (or a latent cache), and where their rows lie."""
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    ends = torch.arange(BATCH + 1, dtype=torch.int32) * LENGTH
    queries = (1, HEADS, BATCH * kind.queries) if "packed" in kind.rows else (BATCH, HEADS, kind.queries)
    keys, given = (BATCH, kind.kv_heads, LENGTH), dict[str, Any]()
    if kind.rows == "padded":
        given = {"q_lens": lengths, "kv_lens": lengths}
    elif kind.rows == "packed":
        keys, given = (1, kind.kv_heads, BATCH * LENGTH), {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    elif kind.rows != "dense":
        pages = LENGTH // kind.page
        keys = (BATCH * pages, kind.kv_heads, kind.page)
        table = torch.arange(BATCH * pages, dtype=torch.int32).reshape(BATCH, pages)
        given = {"kv_lens": lengths, "block_table": table}
        if kind.rows == "packed over pages":
            given["cu_seqlens_q"] = ends
    value_dim = kind.value_dim or kind.dim
    empty = partial(torch.empty, dtype=dtype)
    query, latent = empty(*queries, kind.dim), kind.variant.latent
    if latent is None:
        return [query, *(empty(*keys, width).to(kind.stored or dtype) for width in (kind.dim, value_dim))], given
    given["uk"] = empty(HEADS, latent.rank, kind.dim - latent.rope)
    given["uv"] = empty(HEADS, latent.rank, value_dim)
    return [query, empty(BATCH, 1, LENGTH, latent.rank + latent.rope)], given


def matrix() -> str:
    """The table as Markdown: a row a kind of calls, a column a target; what is refused has its reason below."""
    names = [target.name for target in targets()]
    reasons: dict[str, str] = {}

    def shown(kind: Kind, target: str) -> str:
        found = answers(kind, target)
        marks = ["yes" if a == "yes" else f"({reasons.setdefault(a, str(len(reasons) + 1))})" for a in found]
        return marks[0] if marks[0] == marks[1] else " / ".join(marks)

    lines = [["forward / backward", *names], ["---"] * (len(names) + 1)]
    lines += [[kind.words, *(shown(kind, name) for name in names)] for kind in kinds()]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return table + "\n" + "".join(f"- ({mark}) {reason}\n" for reason, mark in reasons.items())
