"""Sources of rows from outside the package: positions that are no row numbers, against the definition in float64.

Each is a record, a template part and a record of calls. The definition knows nothing of them: rows are brought into the
order of their positions first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_pos, score, scores
from weft.codegen import loader
from weft.codegen.targets import target_named
from weft.compiler.planning import sources
from weft.compiler.planning.machines import hardware
from weft.compiler.planning.signature import Described, Widths, signature_of
from weft.compiler.planning.sources import KeySource, Pointer, RowSource, SequenceKind
from weft.ir.errors import UnavailableError, WeftError
from weft.runtime import driver
from weft.runtime.call import BackwardCall, Call, Choices, Dense
from weft.runtime.run.variant import variant_of

from ..support import poisoned

pytest.importorskip("triton")

ZIGZAG = KeySource("zigzag", "zigzag_keys.py.jinja", position="in chunks 0, 3, 1, 2", beside=("dense",))
ORDERED = KeySource(
    "ordered", "ordered_keys.py.jinja", (Pointer("order"),), position="order[row]", is_box=False,
    beside=("dense",),
)  # fmt: skip
STRIPED = RowSource("striped", "striped_queries.py.jinja", position="2 * row", beside=("dense", "zigzag"))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    loader.register_templates(Path(__file__).parent)
    for source in (ZIGZAG, ORDERED, STRIPED):
        sources.register(source)
    yield
    for source in (STRIPED, ORDERED, ZIGZAG):
        sources.unregister(source)
    loader.unregister_templates(Path(__file__).parent)


def chunked(kv_len: int) -> Tensor:
    size = kv_len // 4
    return torch.cat([torch.arange(size) + size * chunk for chunk in (0, 3, 1, 2)])


@dataclass
class Zigzag(Dense):
    kind: ClassVar[SequenceKind]

    def kv_rows(self, kv_len: int, device: torch.device) -> Tensor:
        return chunked(kv_len).to(device)


@dataclass
class Ordered(Dense):
    kind: ClassVar[SequenceKind]
    order: Tensor  # int32 [B, T]

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {"order": self.order}

    def kv_rows(self, kv_len: int, device: torch.device) -> Tensor:
        return self.order[:, None].long()


@dataclass
class Striped(Dense):
    kind: ClassVar[SequenceKind]

    def spans(self, q_len: int, kv_len: int) -> tuple[int, int]:
        return 2 * q_len, kv_len

    def q_rows(self, q_len: int, device: torch.device) -> Tensor:
        return 2 * torch.arange(q_len, device=device)


class StripedZigzag(Striped, Zigzag):
    pass


RECORDS: dict[str, type[Dense]] = {
    "zigzag": Zigzag, "ordered": Ordered, "striped_dense": Striped, "striped_zigzag": StripedZigzag,
}  # fmt: skip
T, BATCHES, HEADS, KV_HEADS, D = 120, 2, 4, 2, 16


def lying(kind: str, q_offset: int, device: str = "cpu") -> Dense:
    """The record of a call of a kind."""
    record = RECORDS[kind]
    record.kind = sources.kind_named(kind)
    if record is not Ordered:
        return record(q_offset)
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(T, generator=generator) for _ in range(BATCHES)])
    return Ordered(q_offset, order.int().to(device))


# -- variants ----------------------------------------------------------------------------------------------------------
window = weft.scalar("window", int)
slopes, table = weft.tensor("slopes", 1), weft.tensor("table", 2)
key_bias, query_bias, bias = weft.tensor("key_bias", 2), weft.tensor("query_bias", 2), weft.tensor("bias", 2)
doc, sinks = weft.tensor("doc", 2, int), weft.tensor("sinks", 1)
VARIANTS = {
    "full": (weft.Attention(name="lying_full"), {}),
    "causal": (weft.Attention(mask=masks.causal, name="lying_causal"), {}),
    "window": (weft.Attention(mask=masks.causal & masks.sliding_window(window), name="lying_window"), {"window": 21}),
    "softcap": (weft.Attention(scores.softcap(5.0)(score + 0.02 * kv_pos), masks.causal, name="lying_softcap"), {}),
    "alibi": (weft.Attention(scores.alibi(slopes)(score), masks.causal, name="lying_alibi"), {"slopes": torch.rand(4)}),
    "far": (weft.Attention(score - 1e5 * (kv_pos % 3), masks.causal, name="lying_far"), {}),
    "sigmoid": (weft.Attention(mask=masks.causal, normalizer="sigmoid", name="lying_sigmoid"), {}),
    "sink": (weft.Attention(mask=masks.causal, sink=sinks[head], name="lying_sink"), {"sinks": torch.randn(4)}),
    "documents": (
        weft.Attention(mask=masks.causal & masks.document(doc), name="lying_documents"),
        {"doc": (torch.arange(120) // 17).expand(2, -1).int()},
    ),
    "key bias": (
        weft.Attention(score + key_bias[batch, kv_pos], masks.causal, name="lying_keys"),
        {"key_bias": torch.randn(2, 120)},
    ),
    "query bias": (
        weft.Attention(score * query_bias[head, q_pos], masks.causal, name="lying_queries"),
        {"query_bias": torch.randn(4, 120)},
    ),
    "pair bias": (
        weft.Attention(score + bias[q_pos, kv_pos], masks.causal, name="lying_bias"),
        {"bias": torch.randn(120, 120)},
    ),
    "t5": (weft.Attention(scores.t5_bias(table)(score), masks.causal, name="lying_t5"), {"table": torch.randn(4, 32)}),
    "dropout": (weft.Attention(mask=masks.causal, dropout=0.4, name="lying_dropped"), {"seed": torch.tensor([11])}),
    "dropout, full": (weft.Attention(dropout=0.4, name="lying_all_dropped"), {"seed": torch.tensor([11])}),
}


# -- a call, and its definition ----------------------------------------------------------------------------------------
def call_of(
    attention: weft.Attention, given: dict[str, Any], kind: str, q_len: int, device: str = "cpu", **options: Any
) -> Call:  # fmt: skip
    sizes = ((HEADS, q_len), (KV_HEADS, T), (KV_HEADS, T))
    query, key, value = (poisoned((BATCHES, *s, D), torch.float32, device, seed=n) for n, s in enumerate(sizes))
    operands = {p.name: given[p.name] for p in attention.canonical.parameters}
    operands = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in operands.items()}
    rows = lying(kind, 30 if kind.startswith("striped") else T - q_len - 7, device)
    target = options.pop("target", "interpret" if device == "cpu" else "triton")
    return Call(query, key, value, None, operands, rows, Choices(target, **options), D)


def in_order(tensor: Tensor, positions: Tensor, extent: int) -> Tensor:
    """Rows at their positions; 0 where there is none."""
    places = positions.expand(tensor.shape[0], 1, tensor.shape[2])[..., None].expand(tensor.shape)
    return tensor.new_zeros((*tensor.shape[:2], extent, tensor.shape[3])).scatter(2, places, tensor)


def defined(attention: weft.Attention, call: Call, floats: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """out, lse where there is one, and what they are of, in float64, of rows in the order of their positions."""
    rows = call.sequences
    assert isinstance(rows, Dense) and isinstance(rows.q_offset, int)
    at = rows.q_rows(call.query.shape[2], call.query.device)
    main = [t.detach().double().requires_grad_() for t in (call.query, call.key, call.value)]  # type: ignore[union-attr]
    operands = dict(call.operands)
    for name in floats:
        operands[name] = operands[name].detach().double().requires_grad_()  # type: ignore[union-attr]
    query = in_order(main[0], at, int(at.max()) + 1)
    key, value = (in_order(t, rows.kv_rows(T, t.device), T) for t in main[1:])
    asked = {"q_offset": rows.q_offset, "return_lse": attention.canonical.weighs.saves_lse, **operands}
    results = attention.reference(query, key, value, **asked)
    found = results if isinstance(results, tuple) else (results,)
    return [t[:, :, at] for t in found], [*main, *(operands[name] for name in floats)]  # type: ignore[list-item]


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    expected = expected.detach()
    error, scale = (found.double() - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 2e-5 * max(1.0, scale), f"{what}: {error} of {scale}"


def check(name: str, kind: str, q_len: int = 40, **options: Any) -> None:
    attention, given = VARIANTS[name]
    call = call_of(attention, given, kind, q_len, **options)
    floats = [n for n, v in call.operands.items() if isinstance(v, Tensor) and v.is_floating_point()]
    (out, *lse), inputs = defined(attention, call, floats)
    variant = variant_of(attention)
    found, statistics = variant.forward(call)
    assert_close(found, out, "out")
    for defined_lse in lse:
        whole = statistics[0] + statistics[1] if variant.facts.scores_lie_far else statistics
        seen = defined_lse.isfinite()
        assert (whole.isfinite() == seen).all()
        assert_close(whole[seen], defined_lse[seen], "lse")
    if options.get("schedule", "").startswith("split_kv"):
        return
    dout = poisoned(tuple(out.shape), torch.float32, str(out.device), seed=4)
    wanted = ["query", "key", "value", *floats]
    expected = torch.autograd.grad(out, inputs, dout.double())
    gradients = variant.backward(BackwardCall(call, found, statistics, dout, None, frozenset(wanted)))
    for of, gradient in zip(wanted, expected):
        assert_close(gradients[of], gradient, f"gradient of {of}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_zigzag_keys(name: str) -> None:
    check(name, "zigzag")


@pytest.mark.parametrize("name", ["window", "alibi", "documents", "key bias", "pair bias", "t5", "dropout"])
@pytest.mark.parametrize("kind", ["ordered", "striped_dense", "striped_zigzag"])
def test_rows_that_lie_otherwise(kind: str, name: str) -> None:
    check(name, kind)


@pytest.mark.parametrize("name", ["full", "window", "alibi", "documents", "sink"])
@pytest.mark.parametrize("kind", ["zigzag", "ordered"])
def test_few_queries(kind: str, name: str) -> None:
    check(name, kind, q_len=3)
    check(name, kind, q_len=3, schedule="split_kv")


# -- what is chosen, and refused ---------------------------------------------------------------------------------------
def gpu_signature(kind: str, direction: Any = "forward") -> Any:
    call = Described(direction, "sm_90", "bf16", Widths(64, 64), sources.kind_named(kind))
    return signature_of(call, masked=True, sums_pairs=False)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["zigzag", "ordered", "striped_dense"])
def test_hopper_leaves_them_to_triton(kind: str, direction: str) -> None:
    attention = VARIANTS["causal"][0]
    signature = gpu_signature(kind, direction)
    found = driver.resolve(attention, signature, hardware.by_name("h200"))
    assert found.target.name == "triton"
    reason = driver.why_not(target_named("hopper"), "flash", signature, variant_of(attention).facts)
    assert reason is not None and "whose positions are" in reason and "computed by the triton target" in reason


def test_cpu_refuses_them() -> None:
    call = call_of(*VARIANTS["causal"], "zigzag", 40, target="cpu")
    words = r"zigzag keys, whose positions are in chunks 0, 3, 1, 2, are computed by targets triton and interpret"
    with pytest.raises(UnavailableError, match=words):
        variant_of(VARIANTS["causal"][0]).forward(call)


def test_schedules_of_papers_refuse_them() -> None:
    call = call_of(*VARIANTS["causal"], "zigzag", 40, schedule="streaming")
    with pytest.raises(UnavailableError, match="computes rows in the order of their positions, got zigzag ones"):
        variant_of(VARIANTS["causal"][0]).forward(call)


def test_masks_are_evaluated_in_all_tiles() -> None:
    """What a mask says of positions, or measures of them, bounds no tile of such rows."""
    attention = VARIANTS["documents"][0]
    names = {
        kind: [
            k.name
            for k in driver.resolve(attention, gpu_signature(kind), hardware.by_name("h200"), "triton").code.kernels
        ]
        for kind in ("dense", "zigzag")
    }
    assert names == {"dense": ["kv_spans", "kv_ends", "kv_long_spans", "flash_forward"], "zigzag": ["flash_forward"]}
    facts = variant_of(attention).facts
    assert facts.with_order(False).with_order(True).in_order and facts.with_order(True) is facts
    assert facts.with_order(False).kv_bounds.notes == ("positions are no row numbers: all tiles are visited",)


def test_lengths_that_rows_do_not_tell_are_refused() -> None:
    shard = KeySource("shard", ZIGZAG.part, position="of a shard", covers=False, beside=("dense",))
    sources.register(shard)
    try:
        signature = gpu_signature("shard")
        declared = {
            n: weft.Attention(mask=m, name=n) for n, m in (("ends", kv_pos < kv_len - 3), ("near", masks.causal))
        }
        why = {
            n: driver.why_not(target_named("triton"), "flash", signature, variant_of(a).facts)
            for n, a in declared.items()
        }
    finally:
        sources.unregister(shard)
    assert why["near"] is None
    assert why["ends"] == "triton: kv_len is not the number of rows of shard sequences, and the variant reads it"


def test_a_source_is_registered_once() -> None:
    with pytest.raises(WeftError, match="sources: zigzag is registered already"):
        sources.register(ZIGZAG)
    assert [str(k) for k in sources.kinds()][5:] == ["zigzag", "ordered", "striped_dense", "striped_zigzag"]
    with pytest.raises(WeftError, match="sequences: expected one of dense, lengths, .*, got 'gathered'"):
        sources.kind_named("gathered")


def test_the_cache_tells_parts_from_outside_apart() -> None:
    dense, zigzag = sources.kind_named("dense"), sources.kind_named("zigzag")
    assert sources.digest(dense) == "" and len(sources.digest(zigzag)) == 64
    assert loader.digest_of_templates([dense.keys.template]) == ""
    assert len(loader.digest_of_templates([zigzag.keys.template])) == 64
