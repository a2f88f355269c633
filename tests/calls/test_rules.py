"""Every rule of calls: broken alone, it is told of in fields, and the limit that it states is sound."""

from __future__ import annotations

import ast
import pickle
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import WeftError, kv_pos, masks, q_pos, score
from weft.ir.errors import FIELDS, Problem, UnavailableError, collected
from weft.runtime import call, options
from weft.runtime.check import operands, sequences, sizes, tensors, values
from weft.runtime.settings import settings

# modules are written to be read at one place each: the files that hold rules
ROOM = [Path(m.__file__).resolve() for m in (operands, sequences, sizes, tensors, values, call, options)]
window, slope, share = weft.scalar("window", int), weft.scalar("slope", float), weft.scalar("share", float)
bias, seen, doc = weft.tensor("bias", 1), weft.tensor("seen", 1, bool), weft.tensor("doc", 1, int)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
LOCAL = weft.Attention(mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window), name="local")
SLOPED = weft.Attention(score + slope * (kv_pos - q_pos), name="sloped")
BIASED = weft.Attention(score + bias[kv_pos], name="biased")
SEEN = weft.Attention(mask=seen[kv_pos], name="seeing")
COMPUTED = weft.Attention(mask=4 * doc[kv_pos] >= 0, name="computed")
DROPPED = weft.Attention(mask=masks.causal, dropout=share, name="dropped")
DIVIDED = weft.Attention(score + q_pos // window, name="divided")
LATENT = weft.Attention(mask=masks.causal, latent=weft.Latent(32, 8), name="folded")
SCALED = LATENT.replace(scale=0.1, name="scaled")
OP, BACKWARD = torch.ops.weft.attention, torch.ops.weft.attention_backward


def ints(*given: int) -> Tensor:
    return torch.tensor(given, dtype=torch.int32)


class Drawn:
    """A sound call, of sizes that are drawn."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.batch, self.kv_heads = rng.randint(2, 3), rng.randint(2, 3)
        self.heads = self.kv_heads * rng.randint(1, 2)
        self.rows, self.keys = rng.randint(2, 9), rng.randint(9, 12)
        self.dim, self.page = 8 * rng.randint(2, 4), rng.choice([2, 4])
        self.query = torch.randn(self.batch, self.heads, self.rows, self.dim)
        self.key = torch.randn(self.batch, self.kv_heads, self.keys, self.dim)
        self.value = torch.randn(self.batch, self.kv_heads, self.keys, self.dim)
        self.packed = torch.randn(1, self.heads, self.rows, self.dim)
        self.pool = torch.randn(5, self.kv_heads, self.page, self.dim)
        self.lens = ints(*[self.page] * self.batch)
        self.table = torch.zeros(self.batch, 2, dtype=torch.int32)
        self.latent_query = torch.randn(self.batch, self.heads, self.rows, 24)
        self.cache = torch.randn(self.batch, 1, self.keys, 40)
        self.uk, self.uv = torch.randn(self.heads, 32, 16), torch.randn(self.heads, 32, 16)

    def call(self, variant: Any = CAUSAL, **given: Any) -> Any:
        """query, key and value may be given too."""
        main = [given.pop(n, getattr(self, n)) for n in ("query", "key", "value")]
        return variant(*main, **given)

    def paged(self, **given: Any) -> Any:
        main = [given.pop(n, tensor) for n, tensor in (("query", self.query), ("key", self.pool), ("value", self.pool))]
        return CAUSAL(*main, **{"kv_lens": self.lens, "block_table": self.table, **given})

    def of_packed(self, **given: Any) -> Any:
        starts = ints(0, self.rows)
        main = [given.pop(n, self.packed) for n in ("query", "key", "value")]
        return CAUSAL(*main, **{"cu_seqlens_q": starts, "cu_seqlens_kv": starts, **given})

    def latent(self, variant: Any = LATENT, **given: Any) -> Any:
        main = [given.pop(n, tensor) for n, tensor in (("query", self.latent_query), ("cache", self.cache))]
        return variant(*main, **{"uk": self.uk, "uv": self.uv, **given})

    def op(self, *main: Tensor | None, variant: Any = CAUSAL, offset: Any = 0, **given: Any) -> Any:
        """The op, as an exported program calls it."""
        slots = [given.get(n) for n in call.SLOTS]
        width = self.query.shape[3]
        return OP(*main, [], [], [], offset, *slots, width, variant.canonical.text, "target=cpu")

    def backward(self, **given: Any) -> Any:
        out, lse = self.op(self.query, self.key, self.value, None)
        given = {"dout": out, "dlse": None, "out": out, "lse": lse, **given}
        flat = (self.query, self.key, self.value, None, [], [], [], 0, *[None] * len(call.SLOTS), self.query.shape[3])
        return BACKWARD(*given.values(), *flat, CAUSAL.canonical.text, "target=cpu", [True, True, True, False])

    def replaced(self, change: Callable[[Tensor], Tensor]) -> Any:
        query = self.query.clone().requires_grad_()
        out = CAUSAL(query, self.key, self.value)
        query.data = change(query.data)
        return out.sum().backward()

    def freed(self) -> Any:
        value = self.value.clone()
        value.untyped_storage().resize_(0)
        return self.call(value=value)


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[0], x[1, :, :2]])


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def sharded(d: Drawn) -> Any:
    class Shard(Tensor):
        def to_local(self) -> None: ...

    empty = d.key.clone().as_subclass(Shard)
    empty.untyped_storage().resize_(0)
    raise collected("causal", tensors.memory_problems({"key": empty}))


def with_checks(d: Drawn) -> Any:
    with settings(check=True):
        return d.call(COMPUTED, doc=torch.full((d.keys,), 2**30, dtype=torch.int32))


def deep(d: Drawn) -> Any:
    record = call.Call(d.query, d.key, d.value, None, {}, call.Dense(0), call.Choices(), d.dim)
    operands.explain_failure(CAUSAL, record, RecursionError())


def wide(d: Drawn, rows: int) -> Tensor:
    return torch.empty(d.dim).expand(d.batch, d.heads, rows, d.dim)


# what is broken: (the operand or option that is named, the call)
BROKEN: dict[str, tuple[str, Callable[[Drawn], Any]]] = {
    # -- one tensor
    "no tensor": ("key", lambda d: d.call(key=d.key.tolist())),
    "nested": ("value", lambda d: d.call(value=nested(d.value))),
    "quantized": ("query", lambda d: d.call(query=quantized(d.query))),
    "sparse": ("key", lambda d: d.call(key=d.key.to_sparse())),
    "rank": ("query", lambda d: d.call(query=d.query[0])),
    "float8": ("query", lambda d: d.call(
        **{n: getattr(d, n).to(torch.float8_e5m2fnuz) for n in ("query", "key", "value")})),
    "dtype": ("value", lambda d: d.call(value=d.value.half())),
    "device": ("key", lambda d: d.call(key=d.key.to("meta"))),
    "columns apart": ("key", lambda d: d.call(key=d.key.repeat(1, 1, 1, 2)[..., ::2])),
    "length": ("query", lambda d: d.call(query=wide(d, 2**30 + 1))),
    "width": ("value", lambda d: d.call(value=d.value[..., :1].repeat(1, 1, 1, 257))),
    "no width": ("value", lambda d: d.call(value=d.value[..., :0])),
    "no memory": ("value", Drawn.freed),
    "a shard without memory": ("key", sharded),
    # -- query, key and value
    "value missing": ("value", lambda d: CAUSAL(d.query, d.key)),
    "batch of key": ("key", lambda d: d.call(key=d.key[:1])),
    "batch of value": ("value", lambda d: d.call(value=d.value[:1])),
    "dim of key": ("key", lambda d: d.call(key=d.key[..., 1:])),
    "heads of value": ("value", lambda d: d.call(value=d.value[:, :1])),
    "length of value": ("value", lambda d: d.call(value=d.value[:, :, 1:])),
    "heads of query": ("query", lambda d: d.call(query=d.query[:, :1])),
    "no heads": ("query", lambda d: d.call(query=d.query[:, :0])),
    "blocks of value": ("value", lambda d: d.paged(value=d.pool[1:])),
    # -- operands
    "missing": ("window", lambda d: d.call(LOCAL)),
    "unknown": ("windw", lambda d: d.call(LOCAL, window=3, windw=4)),
    "a tensor for a number": ("window", lambda d: d.call(LOCAL, window=ints(3))),
    "no int": ("window", lambda d: d.call(LOCAL, window=3.5)),
    "a bool for an int": ("window", lambda d: d.call(LOCAL, window=True)),
    "32 bits": ("window", lambda d: d.call(LOCAL, window=2**31)),
    "no number": ("slope", lambda d: d.call(SLOPED, slope="steep")),
    "NaN": ("slope", lambda d: d.call(SLOPED, slope=float("nan"))),
    "float overflow": ("slope", lambda d: d.call(SLOPED, slope=1e39)),
    "no tensor operand": ("bias", lambda d: d.call(BIASED, bias=[0.0])),
    "rank of an operand": ("bias", lambda d: d.call(BIASED, bias=torch.zeros(1, d.keys))),
    "dtype of an operand": ("seen", lambda d: d.call(SEEN, seen=torch.zeros(d.keys))),
    "device of an operand": ("bias", lambda d: d.call(BIASED, bias=torch.zeros(d.keys, device="meta"))),
    "form of an operand": ("bias", lambda d: d.call(BIASED, bias=torch.zeros(d.keys).to_sparse())),
    "given twice": ("window", lambda d: d.call(LOCAL, window=3, operands={"window": 3})),
    "no dictionary": ("operands", lambda d: d.call(LOCAL, operands=[("window", 3)])),
    # -- options
    "by position": ("", lambda d: CAUSAL(d.query, d.key, d.value, None)),
    "a flag": ("return_lse", lambda d: d.call(return_lse=1)),
    "a target": ("target", lambda d: d.call(target=3)),
    "a schedule": ("schedule", lambda d: d.call(schedule=3)),
    "a form": ("form", lambda d: d.latent(form="folded")),
    "a form of none": ("form", lambda d: d.call(form="expanded")),
    "q_offset": ("q_offset", lambda d: d.call(q_offset="0")),
    "q_offset of a picture": ("q_offset", lambda d: CAUSAL.show_mask(8, 8, q_offset=ints(0))),
    "q_offset of other rows": ("q_offset", lambda d: d.call(q_offset=torch.zeros(7, dtype=torch.int32))),
    "q_offset of int64": ("q_offset", lambda d: d.call(q_offset=torch.zeros(d.batch, dtype=torch.int64))),
    "q_offset far out": ("q_offset", lambda d: d.call(q_offset=2**30)),
    "a row's q_offset far out": ("q_offset", lambda d: d.call(q_offset=ints(*[0] * (d.batch - 1), -(2**30)))),
    "a seed's dtype": ("seed", lambda d: d.call(DROPPED, share=0.1, seed=ints(1))),
    "no seed": ("seed", lambda d: d.call(DROPPED, share=0.1, seed="1")),
    "a seed's bits": ("seed", lambda d: d.call(DROPPED, share=0.1, seed=2**63)),
    "no share": ("share", lambda d: d.call(DROPPED, share=1.0)),
    "an expression without value": ("window", lambda d: operands.explain_failure(
        LOCAL, call.Call(d.query, d.key, d.value, None, {"window": 0}, call.Dense(0), call.Choices(), d.dim),
        ZeroDivisionError("division by zero"))),
    "too deep": ("", deep),
    # -- sequences
    "lengths of two kinds": ("kv_lens", lambda d: d.of_packed(kv_lens=ints(2))),
    "one cu_seqlens": ("cu_seqlens_kv", lambda d: CAUSAL(d.packed, d.key[:1], d.value[:1], cu_seqlens_q=ints(0, 1))),
    "no lengths": ("kv_lens", lambda d: d.call(kv_lens=[1, 2])),
    "lengths of floats": ("kv_lens", lambda d: d.call(kv_lens=torch.ones(d.batch))),
    "lengths of other rows": ("kv_lens", lambda d: d.call(kv_lens=ints(1))),
    "lengths elsewhere": ("q_lens", lambda d: d.call(q_lens=torch.ones(d.batch, dtype=torch.int32, device="meta"))),
    "no entry": ("cu_seqlens_q", lambda d: d.of_packed(cu_seqlens_q=ints())),
    "padded, not packed": ("query", lambda d: d.of_packed(query=d.query)),
    "other numbers of sequences": ("cu_seqlens_kv", lambda d: d.of_packed(cu_seqlens_kv=ints(0, 1, 2))),
    "packed keys and pages": ("cu_seqlens_kv", lambda d: d.paged(cu_seqlens_kv=ints(0, 1))),
    "q_lens and cu_seqlens_q": ("q_lens", lambda d: d.paged(q_lens=d.lens, cu_seqlens_q=ints(0, 1))),
    "a table alone": ("kv_lens", lambda d: d.paged(kv_lens=None)),
    "a table of int64": ("block_table", lambda d: d.paged(block_table=d.table.long())),
    "a table of other rows": ("block_table", lambda d: d.paged(block_table=d.table[:1])),
    "a page": ("key", lambda d: d.paged(
        key=d.pool[:, :, :1].repeat(1, 1, 3, 1), value=d.pool[:, :, :1].repeat(1, 1, 3, 1))),
    "room of a table": ("block_table", lambda d: d.paged(
        **dict.fromkeys(("key", "value"), torch.randn(1, d.kv_heads, 256, d.dim)),
        block_table=torch.zeros(d.batch, 2**22 + 1, dtype=torch.int32))),
    "half of packed lengths": ("cu_seqlens_kv", lambda d: d.op(
        d.packed, d.packed, d.packed, None, cu_seqlens_q=ints(0, 1))),
    # -- what they hold
    "a length": ("kv_lens", lambda d: d.call(kv_lens=ints(*[1] * (d.batch - 1), d.keys + 1))),
    "a length below 0": ("q_lens", lambda d: d.call(q_lens=ints(-1, *[1] * (d.batch - 1)))),
    "the first row": ("cu_seqlens_q", lambda d: d.of_packed(cu_seqlens_q=ints(1, d.rows))),
    "rows that go back": ("cu_seqlens_q", lambda d: d.of_packed(
        cu_seqlens_q=ints(0, 2, 1), cu_seqlens_kv=ints(0, 1, 2))),
    "the last row": ("cu_seqlens_kv", lambda d: d.of_packed(cu_seqlens_kv=ints(0, d.rows + 1))),
    "a block": ("block_table", lambda d: d.paged(block_table=d.table + 5)),
    "entries that are computed with": ("doc", with_checks),
    "a read of the reference": ("bias", lambda d: BIASED.reference(
        d.query, d.key, d.value, bias=torch.zeros(d.keys - 1))),
    # -- latent attention
    "heads of a cache": ("cache", lambda d: d.latent(cache=d.cache.repeat(1, 2, 1, 1))),
    "dim of a cache": ("cache", lambda d: d.latent(cache=d.cache[..., 1:])),
    "batch of a cache": ("cache", lambda d: d.latent(cache=d.cache[:1])),
    "one projection": ("uk", lambda d: d.latent(uk=None)),
    "a value beside a cache": ("value", lambda d: LATENT.reference(d.query, d.cache, d.cache)),
    "no scale": ("scale", lambda d: LATENT(torch.randn(d.batch, d.heads, d.rows, 40), d.cache)),
    "dim of a latent query": ("query", lambda d: SCALED(d.latent_query, d.cache)),
    "no nope": ("query", lambda d: d.latent(query=d.latent_query[..., :8])),
    "rotary columns of their own": ("rope", lambda d: d.latent(cache=d.cache[..., :32], rope=d.cache[:, :, 1:, 32:])),
    "rotary columns in FP8": ("rope", lambda d: d.latent(
        cache=d.cache[..., :32], rope=d.cache[..., 32:].to(torch.float8_e4m3fn))),
    "no rotary columns": ("rope", lambda d: d.latent(
        weft.Attention(mask=masks.causal, latent=weft.Latent(32, 0), name="norope"), cache=d.cache[..., :32],
        rope=d.cache[..., 32:], uk=torch.randn(d.heads, 32, 24))),
    "FP8 beside uk": ("query", lambda d: d.latent(query=d.latent_query.to(torch.float8_e4m3fn))),
    "shape of uk": ("uk", lambda d: d.latent(uk=d.uk[:, :1])),
    "dtype of uv": ("uv", lambda d: d.latent(uv=d.uv.double())),
    "width of uk": ("uk", lambda d: d.latent(uk=d.uk[..., 1:])),
    "width of uv": ("uv", lambda d: d.latent(uv=d.uv[..., :0])),
    "expanded pages": ("form", lambda d: LATENT.plan(
        d.latent_query, torch.randn(5, 1, 4, 40), uk=d.uk, uv=d.uv, kv_lens=d.lens, block_table=d.table,
        form="expanded")),
    "gradients of latent pages": ("block_table", lambda d: d.latent(
        query=d.latent_query.clone().requires_grad_(), cache=torch.randn(5, 1, 4, 40), kv_lens=d.lens,
        block_table=d.table)),
    "columns of an op": ("query", lambda d: d.op(d.query, d.key[:, :1, :, 1:], None, None, variant=SCALED)),
    "rows of an op": ("rope", lambda d: d.op(
        d.query, d.key[..., 8:], d.value, d.key[:, :1, 1:, :8].contiguous(), variant=LATENT)),
    "heads of an op": ("value", lambda d: d.op(
        d.query, d.key[..., 8:], d.value[:, :1], d.key[:, :1, :, :8].contiguous(), variant=LATENT)),
    # -- FP8
    "what quantize gives": ("key", lambda d: d.call(key=weft.fp8.quantize(d.key))),
    "a descale of an op": ("k_descale", lambda d: d.op(
        d.query, d.key, d.value, None, k_descale=torch.ones(1, 1, 1, 2))),
    "gradients of FP8": ("", lambda d: d.call(
        query=d.query.to(torch.float8_e4m3fn).requires_grad_(),
        **{n: getattr(d, n).to(torch.float8_e4m3fn) for n in ("key", "value")})),
    # -- backwards
    "gradients of pages": ("block_table", lambda d: d.paged(query=d.query.clone().requires_grad_())),
    "gradients of the absorbed form": ("form", lambda d: SCALED(
        torch.randn(d.batch, d.heads, d.rows, 40, requires_grad=True), d.cache)),
    "replaced": ("query", lambda d: d.replaced(lambda x: x[0])),
    "gradient's shape": ("dout", lambda d: d.backward(dout=torch.zeros(d.batch, d.heads, d.rows, d.dim + 8))),
    "statistics' dtype": ("dlse", lambda d: d.backward(
        dlse=torch.zeros(d.batch, d.heads, d.rows, dtype=torch.float64))),
}  # fmt: skip


def problems_of(broken: Callable[[Drawn], Any], seed: int) -> WeftError:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(WeftError) as found:
            broken(Drawn(seed))
    return found.value


@pytest.mark.parametrize("rule", BROKEN)
def test_what_breaks_one_rule_is_told_in_fields(rule: str) -> None:
    label, broken = BROKEN[rule]
    for seed in range(3):
        error = problems_of(broken, seed)
        assert len(error.problems) == 1, str(error)
        (problem,) = error.problems
        assert (problem.operand or problem.option) == label and not (problem.operand and problem.option)
        assert problem.expected or problem.what
        assert problem.got or problem.next_step or problem.named
        assert {name: getattr(error, name) for name in FIELDS} == {name: getattr(problem, name) for name in FIELDS}
        assert not label or label in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and again.problems == error.problems


# -- tensors without memory, in every place: reading one ends the process ---------------------------------------------
def without_memory(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


FREED: dict[str, tuple[str, Callable[[Drawn], Any]]] = {
    "lengths": ("kv_lens", lambda d: d.call(kv_lens=without_memory(d.lens))),
    "first rows": ("cu_seqlens_q", lambda d: d.of_packed(cu_seqlens_q=without_memory(ints(0, d.rows)))),
    "a table": ("block_table", lambda d: d.paged(block_table=without_memory(d.table))),
    "offsets": ("q_offset", lambda d: d.call(q_offset=without_memory(d.lens))),
    "an operand": ("bias", lambda d: d.call(BIASED, bias=without_memory(torch.zeros(d.keys)))),
    "a seed": ("seed", lambda d: d.call(DROPPED, share=0.5, seed=without_memory(torch.tensor([1])))),
    "a projection": ("uv", lambda d: d.latent(uv=without_memory(d.uv))),
    "a cache": ("cache", lambda d: d.latent(cache=without_memory(d.cache))),
    "a key of the reference": ("key", lambda d: CAUSAL.reference(d.query, without_memory(d.key), d.value)),
}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("place", FREED)
def test_a_tensor_without_memory_is_refused(place: str, prepared: bool) -> None:
    label, broken = FREED[place]
    if prepared:  # what is known of sound calls takes no others
        d = Drawn(0)
        for _ in range(6):
            d.call(kv_lens=d.lens), d.of_packed(), d.paged(), d.call(q_offset=d.lens), d.latent()
            d.call(BIASED, bias=torch.zeros(d.keys)), d.call(DROPPED, share=0.5, seed=torch.tensor([1]))
    error = problems_of(broken, 0)
    assert (error.operand or error.option) == label and error.expected == "a tensor with memory"


@pytest.mark.parametrize("kind", ["nested", "sparse", "quantized"])
def test_what_was_prepared_takes_no_tensor_of_another_kind(kind: str) -> None:
    """torch ends a process whose guards ask a nested tensor for strides."""
    d = Drawn(0)
    make = {"nested": nested, "sparse": Tensor.to_sparse, "quantized": quantized}[kind]
    for _ in range(6):
        d.call(), d.call(SEEN, seen=torch.ones(d.keys, dtype=torch.bool)), d.call(BIASED, bias=torch.zeros(d.keys))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that nested tensors are a prototype
        row = torch.zeros(d.keys)
        rows = torch.nested.nested_tensor([row[:2], row[:3]]) if kind == "nested" else make(row)
        for n in ("query", "key", "value"):
            with pytest.raises(WeftError, match=f"{n}: expected a (dense tensor|tensor of floats)"):
                d.call(**{n: make(getattr(d, n))})
        with pytest.raises(WeftError, match="bias: expected a (dense tensor|tensor of floats)"):
            d.call(BIASED, bias=rows)


# -- no rule without a case --------------------------------------------------------------------------------------------
def sites() -> set[tuple[str, int]]:
    """Where the files of rules say that something is wrong."""
    found = set()
    for path in ROOM:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in ("wrong", "missing"):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("wrong", "missing", "Problem"):
                    found.add((path.name, node.lineno))
    return found


@contextmanager
def reached() -> Iterator[set[tuple[str, int]]]:
    """Which of these are come to."""
    makers, found = {f.__code__ for f in (tensors.wrong, tensors.missing, Problem.__init__)}, set()

    def watch(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in makers:
            found.add((Path(frame.f_back.f_code.co_filename).name, frame.f_back.f_lineno))

    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_every_rule_is_broken_by_a_case() -> None:
    with reached() as found:
        for _, broken in BROKEN.values():
            problems_of(broken, 0)
    assert len(sites()) > 70
    assert sorted(sites() - found) == []


# -- limits ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Limit:
    """The most that a rule lets through, and a call with so much."""

    most: int
    make: Callable[[Drawn, int], Any]
    beyond: str  # what is said of one more


def as_planned(**sizes: Any) -> Callable[[Drawn, int], Any]:
    def make(d: Drawn, number: int) -> Any:
        given = {"heads": 1, "q_len": 1, "head_dim": 64, **{n: number for n in sizes}}
        return weft.Attention(name="full").plan(weft.shape(**given), device="h100")

    return make


def of_width(d: Drawn, width: int) -> Any:
    return CAUSAL(*[torch.randn(1, 1, 2, width) for _ in range(3)])


def page_of(d: Drawn, rows: int) -> Any:
    pool = torch.randn(2, d.kv_heads, rows, d.dim)
    return d.paged(key=pool, value=pool, kv_lens=d.lens * 0 + 1)


LIMITS = {
    "width": Limit(256, of_width, "query: expected dim 1 to 256, got 257"),
    "planned width": Limit(256, as_planned(head_dim=0), "head_dim: expected 1 to 256, got 257"),
    "planned length": Limit(2**30, as_planned(kv_len=0), "kv_len: integer overflow: expected a length up to"),
    "rows of no heads": Limit(2**30, lambda d, n: tensors.check_tensors(
        "x", torch.empty(8).expand(1, 1, n, 8), d.key[:1, :1, :, :8], d.value[:1, :1]), "query: integer overflow"),
    "int": Limit(2**31 - 1, lambda d, n: d.call(LOCAL, window=n), "window: integer overflow"),
    "least int": Limit(2**31 - 1, lambda d, n: d.call(LOCAL, window=-n), "window: integer overflow"),
    "q_offset": Limit(2**30 - 1, lambda d, n: d.call(q_offset=n), "q_offset: integer overflow"),
    "least q_offset": Limit(2**30 - 1, lambda d, n: d.call(q_offset=-n), "q_offset: integer overflow"),
    "rows' q_offset": Limit(2**30 - 1, lambda d, n: d.call(q_offset=ints(*[n] * d.batch)), r"q_offset\[0\]: integer"),
    "seed": Limit(2**63 - 1, lambda d, n: d.call(DROPPED, share=0.1, seed=n), "seed: expected an int of 64 bits"),
    "least seed": Limit(2**63, lambda d, n: d.call(DROPPED, share=0.1, seed=-n), "seed: expected an int of 64 bits"),
    "kv_lens": Limit(9,
        lambda d, n: CAUSAL(*[torch.randn(1, 1, 9, 8)] * 3, kv_lens=ints(n)), r"kv_lens\[0\]: expected"),
    "packed rows": Limit(9, lambda d, n: CAUSAL(
        *[torch.randn(1, 1, 9, 8)] * 3, cu_seqlens_q=ints(0, n), cu_seqlens_kv=ints(0, 9)),
        r"cu_seqlens_q\[1\]: expected at most 9, the rows of query"),
    "block": Limit(4, lambda d, n: d.paged(block_table=d.table + n), r"block_table\[0, 0\]: expected a block from 0"),
    "paged rows": Limit(7, lambda d, n: CAUSAL(
        torch.randn(1, 1, 1, 8), *[torch.randn(7, 1, 1, 8)] * 2, kv_lens=ints(n),
        block_table=torch.arange(7, dtype=torch.int32)[None]), r"kv_lens\[0\]: expected a length from 0 to 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_sound_and_one_more_is_not(name: str) -> None:
    limit, drawn = LIMITS[name], Drawn(1)
    limit.make(drawn, limit.most)
    with pytest.raises(WeftError, match=limit.beyond):
        limit.make(drawn, limit.most + 1)


def test_pages_are_powers_of_two_up_to_256() -> None:
    drawn = Drawn(1)
    for rows in range(1, 300):
        if rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            page_of(drawn, rows)
        else:
            with pytest.raises(WeftError, match=rf"key: expected a page of 1, 2, 4 ... 256 rows .* got {rows}"):
                page_of(drawn, rows)


def test_floats_end_where_those_of_the_query_do() -> None:
    d = Drawn(1)
    for dtype, most in ((torch.float32, operands.FLOAT32_MAX), (torch.float64, 2.0**1023)):
        main = {n: getattr(d, n).to(dtype) for n in ("query", "key", "value")}
        for number in (most, -most, float("inf")):
            d.call(SLOPED, slope=number, **main)
        with pytest.raises(WeftError, match="slope: float overflow"):
            d.call(SLOPED, slope=most * 1.5 if dtype == torch.float32 else 2**1024, **main)


# -- errors ------------------------------------------------------------------------------------------------------------
def test_errors_are_what_python_knows_and_survive_a_pickle() -> None:
    problem = Problem(operand="bias", expected="1 dimension", got="2", where="model.py:3")
    error = UnavailableError.of("biased", problem, where="model.py:4")
    again = pickle.loads(pickle.dumps(error))
    for found in (error, again):
        assert isinstance(found, (ValueError, WeftError)) and isinstance(found, NotImplementedError)
        assert (
            str(found)
            == "biased (declared at model.py:4): bias: expected 1 dimension, as declared at model.py:3, got 2"
        )
        assert (found.operand, found.expected, found.where, found.title) == (
            "bias",
            "1 dimension",
            "model.py:3",
            "biased",
        )
    assert isinstance(pickle.loads(pickle.dumps(WeftError("text"))), WeftError) and WeftError("text").problems == ()


def test_a_declaration_says_its_line_in_a_field() -> None:
    with pytest.raises(WeftError, match="mask: expected a bool expression") as found:
        weft.Attention(mask=kv_pos + 1)
    assert found.value.option == "mask" and re.search(r"test_rules\.py:\d+$", found.value.where)
    assert re.search(r"test_rules\.py:\d+$", found.value.declared)


def test_several_problems_are_told_together() -> None:
    d = Drawn(0)
    with pytest.raises(WeftError) as found:
        LOCAL(d.query, d.key[:1], d.value.half(), windw=3)
    assert {p.operand for p in found.value.problems} == {"key", "value", "window", "windw"}
    assert str(found.value) == str(collected("local", found.value.problems))
