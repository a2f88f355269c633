"""Attention sinks on a CPU: out, lse and every gradient, wherever a sink lies and whatever a row sees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_head, kv_pos, masks, q_pos, score
from weft.runtime.call import SLOTS
from weft.runtime.driver import builds

from ..support import check_variant, mostly, poisoned

pytest.importorskip("triton")

sinks, by_row = weft.tensor("sinks", 1), weft.tensor("by_row", 2)
bias, rate = weft.tensor("bias", 2), weft.scalar("rate")
LEARNED = weft.Attention(mask=masks.causal, sink=sinks[head], name="learned")
VARIANTS = {
    "softmax1": weft.Attention(mask=masks.causal, sink=0.0, name="softmax1"),
    "learned": LEARNED,
    "window": weft.Attention(mask=masks.causal & masks.sliding_window(20), sink=sinks[head], name="windowed"),
    "of_batch": weft.Attention(sink=rate * by_row[batch, kv_head] - sinks[head], name="of_batch"),
    "of_rows": weft.Attention(mask=masks.causal, sink=by_row[batch, 0], name="of_rows"),
    "shared": weft.Attention(  # one operand of score and sink
        score=score + sinks[head] * 0.1 * kv_pos, mask=masks.causal, sink=2.0 * sinks[head], name="shared"
    ),
    "capped": weft.Attention(score=9.0 * weft.tanh(score / 9.0), mask=masks.causal, sink=sinks[head], name="capped"),
    "signed": weft.Attention(scale=rate - 1.0, mask=masks.causal, sink=weft.exp(sinks[head]), name="signed"),
    "far": weft.Attention(score=score + bias[batch, kv_pos], mask=masks.causal, sink=sinks[head], name="far"),
    "first_rows_empty": weft.Attention(mask=kv_pos < q_pos - 9, sink=sinks[head], name="first_rows_empty"),
}


def operands_of(variant: weft.Attention, length: int, batches: int = 2, around: float = 0.0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(5)
    made: dict[str, object] = {
        "sinks": torch.randn(4, generator=generator) + around,
        "by_row": torch.randn(batches, 2, generator=generator),
        "bias": torch.where(torch.rand(batches, length, generator=generator) < 0.3, -1e9, 0.0),
        "rate": 0.7,
    }
    return {p.name: made[p.name] for p in variant.canonical.parameters}


def check(variant: weft.Attention, length: int, dtype: torch.dtype, around: float = 0.0, **options: object) -> None:
    shapes = ((2, 4, length, 24), (2, 2, length + 6, 24), (2, 2, length + 6, 40))
    tensors = [poisoned(shape, dtype, seed=n) for n, shape in enumerate(shapes)]
    operands = operands_of(variant, length + 6, around=around)
    floats = tuple(n for n, value in operands.items() if isinstance(value, Tensor))
    check_variant(variant, *tensors, operands=operands, differentiate=floats, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    check(VARIANTS[name], 70, dtype, target="cpu")
    tiles = "flash/flash_forward=cpu:16x32/flash_backward=cpu:32x16"
    check(VARIANTS[name], 70, dtype, target="cpu", schedule=tiles)


def test_in_float64() -> None:
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    table = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: LEARNED(*x[:3], sinks=x[3], return_lse=True), (*tensors, table))


# in one piece; more scores than that
@pytest.mark.parametrize(
    ("length", "around"), mostly([(140, 0.0), (530, 1e4)], [(140, 0.0), (140, 1e4), (530, 0.0), (530, 1e4)])
)
def test_long_calls_on_a_cpu(length: int, around: float) -> None:
    for variant in (LEARNED, VARIANTS["softmax1"], weft.Attention(sink=0.5), VARIANTS["far"]):
        check(variant, length, torch.float32, around, target="cpu")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_in_the_interpreter(name: str) -> None:
    check(VARIANTS[name], 40, torch.float32, target="interpret")


@pytest.mark.parametrize("schedule", mostly(["streaming"], ["streaming", "standard"]))
@pytest.mark.parametrize("name", ["far", "shared", "first_rows_empty"])
def test_other_schedules(name: str, schedule: str) -> None:
    check(VARIANTS[name], 34, torch.float32, target="interpret", schedule=schedule)


@pytest.mark.parametrize(
    ("target", "around"), [*(("cpu", x) for x in (1e4, -1e4, 1e9, -1e9)), ("interpret", 1e4), ("interpret", -1e9)]
)
@pytest.mark.parametrize("name", ["learned", "far", "first_rows_empty"])
def test_a_sink_far_from_0(name: str, around: float, target: str) -> None:
    """Where it outweighs all keys, or none is seen, the lse is the sink itself, and all of its gradient is dlse."""
    check(VARIANTS[name], 24, torch.float32, around, target=target)


SCHEDULES = [("cpu", None), ("interpret", None), ("interpret", "streaming"), ("interpret", "standard")]


def call(target: str, schedule: str | None, variant: weft.Attention, *tensors: Tensor, **operands: Tensor):
    return variant(*tensors, target=target, schedule=schedule, return_lse=True, **operands)


@pytest.mark.parametrize(("target", "schedule"), SCHEDULES)
def test_rows_that_see_nothing(target: str, schedule: str | None) -> None:
    """0 and the sink, or -inf where that is none; zero gradients, and all of dlse for the sink."""
    variant = weft.Attention(mask=kv_pos < q_pos - 100, sink=sinks[head], name="sees_nothing")
    tensors = [torch.randn(1, 2, 20, 16, requires_grad=True) for _ in "qkv"]
    table = torch.tensor([1.5, -math.inf], requires_grad=True)
    out, lse = call(target, schedule, variant, *tensors, sinks=table)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.tensor([1.5, -math.inf]).view(1, 2, 1).expand(1, 2, 20))
    dlse = torch.ones_like(lse)
    found = torch.autograd.grad([out, lse], [*tensors, table], [torch.ones_like(out), dlse])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in found[:3])
    assert found[3].tolist() == [20.0, 0.0]


@pytest.mark.parametrize(("target", "schedule"), SCHEDULES)
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_sinks_that_are_no_numbers(value: float, target: str, schedule: str | None) -> None:
    """NaN as in torch's softmax with one more column, in that head alone; -inf is none."""
    tensors = [torch.randn(1, 2, 12, 16, requires_grad=True) for _ in "qkv"]
    table = torch.tensor([value, 0.5], requires_grad=True)

    def results(run) -> list[Tensor]:
        out, lse = run(*tensors, sinks=table)
        leaves = [*tensors, table]
        return [out, lse, *torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])]

    found = results(lambda *x, **y: call(target, schedule, LEARNED, *x, **y))
    wanted = results(lambda *x, **y: LEARNED.reference(*x, return_lse=True, **y))
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert wanted[0][0, 0].isnan().any() == (value != -math.inf) and not wanted[0][0, 1].isnan().any()


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_a_sink_that_weighs_nothing_has_no_gradient(target: str) -> None:
    """Whatever its slope: log(0) is no sink."""
    variant = weft.Attention(mask=masks.causal, sink=weft.log(sinks[head]), name="logarithmic")
    tensors = [torch.randn(1, 2, 12, 16) for _ in "qkv"]
    table = torch.tensor([0.0, 2.0], requires_grad=True)
    variant(*tensors, sinks=table, target=target).square().sum().backward()
    assert table.grad is not None and table.grad[0] == 0.0 and table.grad[1].isfinite() and table.grad[1] != 0.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("target", "schedule"), SCHEDULES)
def test_the_gradient_alone_and_left_out(target: str, schedule: str | None) -> None:
    """Each subset of gradients has the same bits, also that of the sink alone, and repeats."""
    tensors = [torch.randn(2, 4, 20, 16) for _ in "qkv"]
    table = torch.randn(4)

    def gradients(wanted: tuple[int, ...]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_(n in wanted) for n, t in enumerate((*tensors, table))]
        out, lse = call(target, schedule, LEARNED, *leaves[:3], sinks=leaves[3])
        loss = [out, lse], [leaves[n] for n in wanted], [out.detach().cos(), lse.detach().sin()]
        return list(torch.autograd.grad(*loss))

    whole = gradients((0, 1, 2, 3))
    for wanted in ((0, 1, 2, 3), (3,), (0, 3), (2, 3), (0, 1, 2)):
        for n, g in zip(wanted, gradients(wanted), strict=True):
            same = torch.equal(g, whole[n]) or (target == "cpu" and torch.allclose(g, whole[n], rtol=1e-5, atol=1e-6))
            assert same, (wanted, n)


def test_where_there_is_no_key() -> None:
    for variant in (LEARNED, VARIANTS["far"]):
        more = {"bias": torch.zeros(2, 1)} if variant is not LEARNED else {}
        table = torch.arange(4.0).requires_grad_()
        query, empty = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 0, 8)
        out, lse = variant(query, empty, empty, sinks=table, return_lse=True, **more)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, table.detach().view(1, 4, 1).expand(2, 4, 5))
        (lse * torch.arange(40.0).view(2, 4, 5)).sum().backward()
        assert torch.equal(table.grad, torch.arange(40.0).view(2, 4, 5).sum((0, 2)))


def test_latent_attention() -> None:
    """Both forms; every head has keys of its own, so that kv_head is head."""
    mla = weft.Attention(
        mask=masks.causal, latent=weft.Latent(rank=32, rope=8), sink=sinks[head] - 0.5 * kv_head, name="mla"
    )
    query, cache = torch.randn(2, 4, 6, 24), torch.randn(2, 1, 9, 40)
    uk, uv, table = torch.randn(4, 32, 16) / 5, torch.randn(4, 32, 16) / 5, torch.randn(4)
    exact = mla.reference(
        query.double(), cache.double(), uk=uk.double(), uv=uv.double(), sinks=table.double(), return_lse=True
    )
    for form in ("expanded", "absorbed"):
        for target in ("cpu", "interpret"):
            found = mla(query, cache, uk=uk, uv=uv, sinks=table, form=form, target=target, return_lse=True)
            for a, b in zip(found, exact, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    table.requires_grad_()
    (found,) = torch.autograd.grad(mla(query, cache, uk=uk, uv=uv, sinks=table).square().sum(), table)
    again = mla.reference(query, cache, uk=uk, uv=uv, sinks=table)
    torch.testing.assert_close(found, torch.autograd.grad(again.square().sum(), table)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize(
    "sink", [rate, weft.scalar("n", int), head, kv_head - 2, sinks[0], weft.tensor("ids", 1, int)[head], 0.5 * batch]
)
def test_what_a_sink_may_be(sink: weft.Expr, target: str) -> None:
    variant = weft.Attention(mask=masks.causal, sink=sink, name="any_sink")
    given = {"rate": 0.7, "n": 2, "sinks": torch.randn(4), "ids": torch.tensor([0, 3, -2, 1])}
    operands = {p.name: given[p.name] for p in variant.canonical.parameters}
    tensors = [poisoned((2, heads, 20, 16), torch.float32, seed=n) for n, heads in enumerate((4, 2, 2))]
    floats = tuple(n for n in operands if n == "sinks")
    check_variant(variant, *tensors, operands=operands, differentiate=floats, target=target)


def test_it_is_what_models_do_by_hand() -> None:
    """GPT-OSS appends a column of sinks to its scores; StreamingLLM's softmax1 divides by 1 + the sum."""
    query, key, value, table = (torch.randn(*s) for s in ((2, 4, 30, 16), (2, 4, 30, 16), (2, 4, 30, 16), (4,)))
    scores = (query @ key.mT / 4).masked_fill(torch.ones(30, 30).triu(1).bool(), -math.inf)
    more = torch.cat([scores, table.view(1, 4, 1, 1).expand(2, 4, 30, 1)], -1)
    torch.testing.assert_close(LEARNED(query, key, value, sinks=table), more.softmax(-1)[..., :-1] @ value)
    one = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(VARIANTS["softmax1"](query, key, value), one @ value)


# -- torch's transforms ------------------------------------------------------------------------------------------------
def inputs() -> list[Tensor]:
    return [torch.randn(s, requires_grad=True) for s in ((2, 4, 20, 16), (2, 2, 20, 16), (2, 2, 20, 8), (4,))]


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    return LEARNED(query, key, value, sinks=table)


def test_opcheck() -> None:
    query, key, value, table = inputs()
    arguments = (query, key, value, None, [table], [], [], 0, *[None] * len(SLOTS), 16, LEARNED.canonical.text, "")
    found = torch.library.opcheck(torch.ops.weft.attention.default, arguments)
    assert set(found.values()) == {"SUCCESS"}, found
    with torch.no_grad():
        out, lse = torch.ops.weft.attention(*arguments)
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    plain[4] = [table.detach()]
    backward = (torch.randn_like(out), torch.randn_like(lse), out, lse, *plain, [True, True, True, False, True])
    found = torch.library.opcheck(torch.ops.weft.attention_backward.default, backward)
    assert set(found.values()) == {"SUCCESS"}, found


def test_compile_and_export() -> None:
    given = inputs()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, wanted = compiled(*given), attend(*given)
    assert torch.equal(out, wanted)
    for a, b in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(wanted.sum(), given), strict=True):
        torch.testing.assert_close(a, b)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.randn(4))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, self.sinks)

    layer, tensors = Layer(), tuple(t.detach() for t in given[:3])
    assert torch.equal(torch.export.export(layer, tensors).module()(*tensors), layer(*tensors))


def test_autocast() -> None:
    given = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*given)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert given[3].grad is not None and given[3].grad.dtype == torch.float32


def test_new_sinks_build_nothing() -> None:
    attend(*inputs()).sum().backward()
    before = builds()
    attend(*inputs()).sum().backward()
    assert builds() == before


def test_reads_outside_of_an_operand_are_refused() -> None:
    query, key, value, _ = inputs()
    with pytest.raises(weft.WeftError, match=r"`sinks\[head\]`: index 0, `head`, ranges from 0 to 3 in this call, but"):
        LEARNED(query, key, value, sinks=torch.zeros(3))
    with pytest.raises(weft.WeftError, match=r"`sinks\[head\]`: index 0, `head`, is 3 in this call, but sinks has 3"):
        LEARNED.reference(query, key, value, sinks=torch.zeros(3))
    numbered = weft.Attention(sink=1.0 * (weft.tensor("ids", 1, int)[head] * 3), name="numbered")
    with weft.settings(check=True), pytest.raises(weft.WeftError, match=r"ids\[1\]: integer overflow"):
        numbered(query, key, value, ids=torch.tensor([0, 2**31, 0, 0]))


def test_words() -> None:
    """`explain` prints the sink, and the kernels print the words of their stages."""
    shape = weft.shape(heads=4, q_len=256, head_dim=64, dtype="fp32")
    assert "sink          sinks[head]" in LEARNED.explain(shape, target="cpu")
    words = [stage.what for kernel in LEARNED.plan(shape, target="cpu").kernels for stage in kernel.stages]
    assert sum("the sink is in both" in text for text in words) == 1
    assert "sums over these rows for what the sink reads: -exp(sink - lse) * delta" in words
    for target in ("cpu", "interpret"):
        source = LEARNED.source(shape, target=target, direction="backward")
        assert "sums over these rows for what the sink reads" in source
        constant = VARIANTS["softmax1"].source(shape, target=target, direction="backward")
        assert "sink_logit" not in constant  # weights come from the lse, which has it
    on_hopper = LEARNED.plan(weft.shape(heads=4, q_len=512, head_dim=128), device="h100")
    assert {kernel.target for kernel in on_hopper.kernels} == {"hopper"}
