"""Gradients of what pairs of a query and a key read: biases, tables by distance and bucket, Graphormer's; a number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_head, kv_pos, masks, q_pos, score, scores
from weft.codegen import at_once
from weft.codegen.targets.triton.parts import sums

from ..support import check_variant, poisoned

pytest.importorskip("triton")

HEADS, KEY_HEADS, L, T = 4, 2, 37, 45
AWAY = q_pos - kv_pos
one, pairs, of_heads, full = (
    weft.tensor(n, rank) for n, rank in (("one", 0), ("pairs", 2), ("of_heads", 3), ("full", 4))
)
table, tables, apart = weft.tensor("table", 1), weft.tensor("tables", 2), weft.tensor("apart", 3, int)
kinds = weft.tensor("kinds", 2, int)
docs = weft.tensor("docs", 2, int)


def within(index: weft.Expr, last: int) -> weft.Expr:
    return weft.minimum(weft.maximum(index, 0), last)


SCORES = {
    # read once: stored where they were read
    "full": score + full[batch, head, q_pos, kv_pos],
    "swapped": score + full[head, kv_pos, batch, q_pos],
    "shaw": score + full[batch, head, q_pos, AWAY + 63],
    # heads share what one pair reads
    "of_heads": score + of_heads[head, q_pos, kv_pos],
    "of_batches": score + of_heads[batch, q_pos, kv_pos],
    "of_key_heads": score + of_heads[kv_head, kv_pos, q_pos],
    "pairs": score + pairs[q_pos, kv_pos],
    # a diagonal reads one entry
    "t5": scores.t5_bias(tables, 16, 30)(score),
    "t5_causal": scores.t5_bias(tables, 16, 30, bidirectional=False)(score),
    "distance": score + table[AWAY + 63],
    "clamped": score + tables[head, within(2 * AWAY, 20)],
    "of_a_batch": score + tables[batch, weft.abs(AWAY)] * tables[batch, 0],
    # anything else
    "graphormer": score + tables[head, within(apart[batch, q_pos, kv_pos], 5)],
    "swin": score + tables[head, (q_pos // 8 - kv_pos // 8 + 8) * 17 + (q_pos % 8 - kv_pos % 8 + 8)],
    "of_kinds": score + pairs[within(kinds[batch, q_pos], 4), within(kinds[batch, kv_pos], 4)],
    "of_half_the_heads": score + of_heads[head // 2, q_pos, kv_pos],
    "earlier": score + table[weft.minimum(q_pos, kv_pos)],
    # one operand read several times, and not linearly
    "both_ways": score + pairs[q_pos, kv_pos] - 0.5 * pairs[kv_pos, q_pos] + pairs[q_pos, 0],
    "capped": 5.0 * weft.tanh((score + of_heads[head, q_pos, kv_pos]) / 5.0),
    "gain": score * weft.exp(0.1 * tables[head, within(AWAY, 9)]) + 0.3 * of_heads[head, q_pos, kv_pos],
    # a number
    "temperature": score * weft.exp(one),
}
# The interpreter is slow: one of each way that a gradient is summed, and one of each kind of index.
INTERPRETED = (
    "full", "shaw", "of_heads", "of_key_heads", "pairs", "t5", "clamped", "of_a_batch", "graphormer", "swin",
    "both_ways", "gain", "temperature",
)  # fmt: skip


def variant(name: str, mask: weft.Expr | bool = masks.causal) -> weft.Attention:
    return weft.Attention(SCORES[name], mask, name=name)


def operands_of(attention: weft.Attention, batches: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    sizes = {"one": (), "pairs": (64, 64), "of_heads": (4, 64, 64), "table": (128,), "tables": (4, 17 * 17)}
    sizes["full"] = (4, 64, max(4, batches), 128) if attention.name == "swapped" else (max(4, batches), 4, 64, 128)
    made = {n: (torch.randn(size, generator=generator) * 0.5).to(dtype) for n, size in sizes.items()}
    made |= {"apart": torch.randint(-2, 8, (batches, 64, 64), generator=generator)}
    made |= {"kinds": torch.randint(0, 5, (batches, 64), generator=generator)}
    made |= {"docs": torch.randint(0, 3, (batches, 64), generator=generator).sort(-1).values}
    return {t.name: made[t.name] for t in attention.canonical.tensors if t.name in made}


def check(
    attention: weft.Attention, dtype: torch.dtype = torch.float32, more: dict[str, object] | None = None,
    batches: int = 2, of: torch.dtype = torch.float32, **options: object,
) -> None:  # fmt: skip
    """Out and all gradients, with heads in groups and more keys than queries, so that positions begin at 8."""
    heads, key_heads = (HEADS, KEY_HEADS) if options.get("target") != "interpret" else (HEADS // 2, KEY_HEADS // 2)
    shapes = ((batches, heads, L, 16), (batches, key_heads, T, 16), (batches, key_heads, T, 24))
    tensors = [poisoned(shape, dtype, seed=n) for n, shape in enumerate(shapes)]
    operands = operands_of(attention, 2, of)
    floats = tuple(n for n, t in operands.items() if t.is_floating_point())
    given = operands | (more or {})
    check_variant(attention, *tensors, operands=given, differentiate=floats, **options)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- dense calls -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", SCORES)
def test_on_a_cpu(name: str, masked: bool) -> None:
    attention = variant(name, masks.causal if masked else True)
    check(attention, target="cpu")
    check(attention, target="cpu", schedule="flash/flash_backward=cpu:16x16")


@pytest.mark.parametrize("name", INTERPRETED)
def test_in_the_interpreter(name: str) -> None:
    check(variant(name), target="interpret")


@pytest.mark.parametrize("name", ["full", "pairs", "t5"])
def test_without_a_mask_in_the_interpreter(name: str) -> None:
    check(variant(name, True), target="interpret")


@pytest.mark.parametrize(
    ("name", "target"),
    [*((n, "cpu") for n in ("full", "of_heads", "t5", "graphormer")), *((n, "interpret") for n in ("of_heads", "t5"))],
)
def test_masks_that_read_tensors_and_differ_by_head(name: str, target: str) -> None:
    reads = variant(name, masks.causal & (docs[batch, q_pos] == docs[batch, kv_pos]))
    check(reads, target=target)
    if target == "cpu" or name == "t5":
        check(variant(name, (AWAY < 4 * head + 3) & (AWAY > -9)), target=target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["full", "pairs", "t5", "graphormer", "temperature"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """An operand has the dtype of the query, or float32 beside 16 bits."""
    check(variant(name), dtype, target="cpu")
    check(variant(name), dtype, of=dtype, target="cpu")
    if dtype == torch.float16 and name in ("full", "t5"):
        check(variant(name), dtype, of=dtype, target="interpret")


@pytest.mark.parametrize("name", ["full", "of_heads", "t5", "graphormer"])
def test_by_gradcheck(name: str) -> None:
    attention = variant(name)
    operands = operands_of(attention, dtype=torch.float64)
    floats = [n for n, t in operands.items() if t.is_floating_point()]
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    small = {n: operands[n][tuple(slice(0, 20) for _ in operands[n].shape)].clone().requires_grad_() for n in floats}
    if name in ("full", "of_heads"):
        small = {n: t[..., :5, :5].detach().clone().requires_grad_() for n, t in small.items()}
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], **{**operands, **dict(zip(floats, x[3:]))}), (*tensors, *small.values())
    )


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_a_number_of_score_and_sink(target: str) -> None:
    """Its gradient is a sum over all pairs and rows, of terms that cancel."""
    attention = weft.Attention(score + one * weft.tanh(0.1 * AWAY), masks.causal, sink=2.0 * one, name="number")
    tensors = [torch.randn(2, h, 37, 16) for h in (4, 2, 2)]
    number, dout = torch.tensor(0.7, requires_grad=True), torch.randn(2, 4, 37, 16)
    found = torch.autograd.grad(attention(*tensors, one=number, target=target), [number], dout)[0]
    exact = [t.double() for t in tensors]
    expected = torch.autograd.grad(attention.reference(*exact, one=number.double()), [number], dout.double())[0]
    assert found.shape == () and abs(found - expected) < 1e-4 * (1 + abs(expected))


@pytest.mark.parametrize(
    ("name", "target"),
    [*((n, "cpu") for n in ("full", "of_heads", "t5", "graphormer")), *((n, "interpret") for n in ("of_heads", "t5"))],
)
def test_with_dropout(name: str, target: str) -> None:
    """What is dropped has no gradient, in every kernel alike."""
    check(variant(name).replace(dropout=0.3), more={"seed": 5}, target=target)


# -- sequences and offsets ---------------------------------------------------------------------------------------------
PADDED = {"q_lens": torch.tensor([30, 37]), "kv_lens": torch.tensor([33, 45])}
PACKED = {n: torch.tensor(x, dtype=torch.int32) for n, x in (
    ("cu_seqlens_q", [0, 15, 15, 37]), ("cu_seqlens_kv", [0, 18, 20, 45])
)}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((n, "cpu") for n in ("full", "of_heads", "pairs", "t5", "distance", "of_a_batch", "graphormer")),
        *((n, "interpret") for n in ("full", "of_heads", "t5", "graphormer")),
    ],
)
def test_padded_sequences(name: str, target: str) -> None:
    check(variant(name), more=dict(PADDED), target=target)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((n, "cpu") for n in ("full", "t5", "distance", "clamped")),
        *((n, "interpret") for n in ("full", "t5")),
    ],
)
def test_packed_sequences(name: str, target: str) -> None:
    attention = variant(name)
    tensors = [poisoned((1, h, n, 16), torch.float32, seed=h) for h, n in ((2, L), (1, T), (1, T))]
    operands = operands_of(attention, 3)
    floats = tuple(n for n, t in operands.items() if t.is_floating_point())
    check_variant(attention, *tensors, operands=operands | PACKED, differentiate=floats, target=target)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_a_number_in_packed_sequences(target: str) -> None:
    tensors = [torch.randn(1, h, n, 16) for h, n in ((2, L), (1, T), (1, T))]
    number, dout = torch.tensor(0.7, requires_grad=True), torch.randn(1, 2, L, 16)
    found = torch.autograd.grad(variant("temperature")(*tensors, one=number, target=target, **PACKED), [number], dout)[
        0
    ]
    exact = [t.double() for t in tensors]
    out = variant("temperature").reference(*exact, one=number.double(), **PACKED)
    expected = torch.autograd.grad(out, [number], dout.double())[0]
    assert found.shape == () and abs(found - expected) < 1e-4 * (1 + abs(expected))


@pytest.mark.parametrize("name", ["of_heads", "graphormer"])
def test_packed_sequences_that_share_entries(name: str) -> None:
    """In any order of additions, where that is allowed; on a CPU there is one order."""
    attention = variant(name)
    tensors = [poisoned((1, h, n, 16), torch.float32, seed=h) for h, n in ((2, L), (1, T), (1, T))]
    given = operands_of(attention, 3) | PACKED
    floats = tuple(n for n, t in given.items() if t.is_floating_point())
    check_variant(attention, *tensors, operands=given, differentiate=floats, target="cpu")
    check_variant(attention, *tensors, operands=given, differentiate=floats, target="interpret", deterministic=False)
    with pytest.raises(weft.UnavailableError, match="pass deterministic=False to allow them, or padded sequences"):
        check_variant(attention, *tensors, operands=given, differentiate=floats, target="interpret")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((n, "cpu") for n in ("full", "of_heads", "t5", "distance", "graphormer")),
        *((n, "interpret") for n in ("of_heads", "t5")),
    ],
)
def test_offsets_of_rows(name: str, target: str) -> None:
    check(variant(name), q_offset=torch.tensor([8, 3], dtype=torch.int32), target=target)
    if target == "cpu":
        check(variant(name), q_offset=5, target=target)


# -- what is promised of sums ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["graphormer", "both_ways"])
def test_additions_in_any_order(name: str) -> None:
    check(variant(name), target="interpret", deterministic=False)


def gradients(attention: weft.Attention, operands: dict[str, Tensor], rows: int, **options: object) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, h, rows, 16, generator=generator, requires_grad=True) for h in (4, 2, 2)]
    given = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in operands.items()}
    out = attention(*tensors, **given, **options)
    leaves = [*tensors, *(t for t in given.values() if t.requires_grad)]
    return list(torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["full", "of_heads", "t5", "graphormer", "both_ways"])
def test_gradients_repeat_on_a_cpu(name: str, threads: int, one_thread: None) -> None:
    torch.set_num_threads(threads)
    attention = variant(name)
    tiles = "flash/flash_backward=cpu:16x16"
    first, second = (gradients(attention, operands_of(attention), 60, schedule=tiles) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_two_threads_add_to_tables_of_their_own(one_thread: None) -> None:
    """Heads of a long call are divided between threads."""
    torch.manual_seed(0)  # some entries sum thousands of pairs, and how exact plain torch is there is a matter of luck
    torch.set_num_threads(2)
    for name in ("full", "t5", "pairs"):
        attention = variant(name)
        tensors = [torch.randn(1, 4, 60, 8) for _ in "qkv"]
        operands = operands_of(attention)
        floats = tuple(n for n, t in operands.items() if t.is_floating_point())
        many = [t.repeat(1, 1, 1, 1) for t in tensors]
        tiles = "flash/flash_forward=cpu:16x16/flash_backward=cpu:16x16"
        check_variant(attention, *many, operands=operands, differentiate=floats, target="cpu", schedule=tiles)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_mask_reads_does_not_count_where_a_table_is_summed(
    threads: int, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of an image: the mask differs by batch row, and the table has a few thousand reads, so torch records."""
    monkeypatch.setattr(at_once, "MOST_RECORDED", 1 << 16)
    torch.set_num_threads(threads)
    region, table = weft.tensor("region", 2, int), weft.tensor("table", 2)
    same = region[weft.batch, q_pos] == region[weft.batch, kv_pos]
    swin = weft.Attention(score + table[head, abs(q_pos - kv_pos * 2)], same, name="windows")
    tensors = [torch.randn(16, 3, 49, 32, requires_grad=True) for _ in "qkv"]
    given = {"region": (torch.arange(49) // 20).int().expand(16, -1), "table": torch.randn(3, 100, requires_grad=True)}
    dout, leaves = torch.randn(16, 3, 49, 32), [*tensors, given["table"]]
    outs = [swin(*tensors, **given) for _ in range(2)]
    first, second = (torch.autograd.grad(out, leaves, dout) for out in outs)
    assert {type(out.grad_fn).__name__ for out in outs} == {"ViewBackward0"}  # no function of Weft's
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    check_variant(swin, *tensors, operands=given, differentiate=("table",), target="cpu")


@pytest.mark.parametrize(("name", "more"), [("graphormer", {}), ("graphormer", PADDED), ("swin", {})])
def test_lists_are_bounded(name: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more sums than are listed at once, the programs run in parts."""
    monkeypatch.setattr(sums, "MOST_LISTED", 3 * 32 * 32)
    check(variant(name), more=dict(more), target="interpret")


def test_pairs_that_nobody_sees_have_a_gradient_of_0() -> None:
    """Tiles that are never visited too, and entries that no pair reads."""
    attention = variant("of_heads", masks.causal & (AWAY < 8))
    for target in ("cpu", "interpret"):
        bias = torch.randn(4, 110, 101, requires_grad=True)
        tensors = [torch.randn(1, 4, 96, 16) for _ in "qkv"]
        out = attention(*tensors, of_heads=bias, target=target)
        (found,) = torch.autograd.grad(out.square().sum(), [bias])
        rows, columns = torch.arange(110)[:, None], torch.arange(101)
        seen = (columns <= rows) & (rows - columns < 8) & (rows < 96)
        assert found[:, ~seen].eq(0).all() and found[:, seen].ne(0).any()


def test_no_more_pairs_than_rows(one_thread: None) -> None:
    """Calls with nothing to compute: zeros in the shape of each operand."""
    for name in ("full", "t5", "graphormer", "temperature"):
        attention = variant(name)
        operands = {n: t.clone().requires_grad_() if t.is_floating_point() else t
                    for n, t in operands_of(attention).items()}  # fmt: skip
        query, key = torch.randn(2, 4, 0, 16, requires_grad=True), torch.randn(2, 4, 7, 16)
        attention(query, key, key, **operands, q_offset=0).sum().backward()
        for t in operands.values():
            assert not t.is_floating_point() or (t.grad is not None and t.grad.shape == t.shape and not t.grad.any())


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", ["streaming", "standard"])
def test_other_schedules_say_what_to_do(schedule: str) -> None:
    attention = variant("of_heads")
    with pytest.raises(
        weft.UnavailableError, match=rf"schedule {schedule} has no gradient of `of_heads\[.*\]`, whose index has q_pos"
    ):
        gradients(attention, operands_of(attention), 40, target="interpret", schedule=schedule)
    constant = operands_of(attention)["of_heads"]
    tensors = [torch.randn(2, 4, 20, 16, requires_grad=True) for _ in "qkv"]
    attention(*tensors, of_heads=constant, target="interpret", schedule=schedule).sum().backward()
    alone = constant.clone().requires_grad_()  # without a gradient that the schedule has kernels for
    out = attention(*(t.detach() for t in tensors), of_heads=alone, target="interpret", schedule=schedule)
    with pytest.raises(weft.UnavailableError, match=f"schedule {schedule} has no gradient of `of_heads"):
        out.sum().backward()


# -- torch -------------------------------------------------------------------------------------------------------------
def test_views_and_shared_operands_get_gradients_of_their_own() -> None:
    """A transposed table, as T5 keeps it, and a bias that is one for all batch rows by expand."""
    attention = variant("t5")
    weight = torch.randn(16, 4, requires_grad=True)
    tensors = [torch.randn(2, 4, 30, 8) for _ in "qkv"]
    dout = torch.randn(2, 4, 30, 8)
    found = torch.autograd.grad(attention(*tensors, tables=weight.T), [weight], dout)[0]
    exact = [t.double() for t in tensors]
    expected = torch.autograd.grad(attention.reference(*exact, tables=weight.T.double()), [weight], dout.double())[0]
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    shared = torch.randn(1, 1, 30, 30, requires_grad=True)
    biased = variant("full")
    found = torch.autograd.grad(biased(*tensors, full=shared.expand(2, 4, 30, 30)), [shared], dout)[0]
    expected = torch.autograd.grad(
        biased.reference(*exact, full=shared.double().expand(2, 4, 30, 30)), [shared], dout.double()
    )[0]
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_compiled_models_learn_tables() -> None:
    attention = variant("t5")
    tensors = [torch.randn(1, 4, 20, 8) for _ in "qkv"]
    weight = torch.randn(4, 16, requires_grad=True)

    def loss(tables: Tensor) -> Tensor:
        return attention(*tensors, tables=tables).square().sum()

    expected = torch.autograd.grad(loss(weight), [weight])[0]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(weight), [weight])[0], expected)
