"""What a value is: one number for a call or a tile, an int or a float, finite or not, near 0 or far from it.

Each case runs on the `cpu` target and in Triton's interpreter, forward and backward, against the reference in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from weft import batch, group, head, head_dim, kv_head, kv_len, kv_pos, q_len, q_pos, score

from ..support import check_errors, check_variant, poisoned

x, y = weft.scalar("x", float), weft.scalar("y", float)
n = weft.scalar("n", int)
w = weft.tensor("w", 1)
ids = weft.tensor("ids", 1, int)
CAUSAL = kv_pos <= q_pos
TARGETS = ("cpu", "interpret")
INF = float("inf")
IDS = torch.tensor([1, 4])
WEIGHTS = torch.tensor([0.77, 0.23])


def tensors(length: int = 40, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(poisoned((1, 2, length, 16), dtype, seed=seed) for seed in range(3))


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    if request.param == "interpret":
        pytest.importorskip("triton")
    return str(request.param)


UNIFORM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a float scalar in a mask": (dict(mask=CAUSAL & (x > 0.5)), {"x": 0.7}),
    "a float scalar hides all": (dict(mask=CAUSAL & (x > 0.5)), {"x": 0.3}),
    "a scalar and lengths choose a tile": (dict(mask=weft.where(n + q_len > 3, CAUSAL, kv_pos >= q_pos)), {"n": 4}),
    "a scalar chooses a score": (dict(score=weft.where(n > 3, score, -score)), {"n": 2}),
    "not of a shared bool": (dict(mask=(~(n > 2) | CAUSAL) | ((n > 2) & (kv_pos == q_pos + 1))), {"n": 3}),
    "a shared number in a function": (dict(score=score * weft.sqrt(x * x + 1.0) / weft.exp(x * x)), {"x": 0.8}),
    "a shared number among ints": (
        dict(mask=(kv_pos <= q_pos + weft.minimum(n * n, 7)) & (kv_pos >= q_pos - n * n)), {"n": 3}
    ),
    "a number among choices": (dict(score=weft.minimum(score, 2.0 * x) + weft.maximum(1.0, x * kv_len)), {"x": 0.1}),
    "two numbers by a tile": (dict(score=score * weft.where(kv_pos % 3 < 1, -1.0, 2 * x)), {"x": 0.4}),
    "log(0)": (dict(score=weft.maximum(score, weft.log(x - 1.0))), {"x": 1.0}),
    "1 / 0": (dict(score=score + weft.minimum(2.0 * kv_pos, 1.0 / (x - 1.0))), {"x": 1.0}),
    "exp(1000)": (dict(score=weft.minimum(score, weft.exp(1000.0 * x))), {"x": 1.0}),
    "sqrt(-1) where it is not taken": (dict(score=weft.where(x > 0.0, score, weft.sqrt(-x))), {"x": 1.0}),
    "floor of a scalar": (dict(mask=kv_pos <= q_pos + weft.floor(x)), {"x": 2.7}),
    "floor of an int": (dict(mask=weft.floor(kv_pos) <= q_pos), {}),
    "floor of infinity": (dict(mask=kv_pos <= q_pos + weft.floor(1.0 / (x - 1.0))), {"x": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNIFORM)
def test_parts_that_are_one_number(case: str, target: str) -> None:
    declared, operands = UNIFORM[case]
    check_variant(weft.Attention(**declared), *tensors(), target=target, operands=operands, label=case)


FLAT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0.0": (dict(score=0.0), {}),
    "an int": (dict(score=3), {}),
    "scale 0": (dict(scale=0.0), {}),
    "scalar": (dict(score=x), {"x": 0.5}),
    "ints": (dict(score=kv_pos % 3), {}),
    "row": (dict(score=0.1 * q_pos), {}),
    "column": (dict(score=0.1 * kv_pos), {}),
    "lengths": (dict(score=1.0 / (kv_len + q_len), mask=CAUSAL), {}),
    "head": (dict(score=head * 1.0 + batch), {}),
    "operand": (dict(score=w[head]), {"w": WEIGHTS}),
    "hidden by -inf": (dict(score=weft.where(kv_pos <= q_pos - 5, score, -INF)), {}),
    "all -inf": (dict(score=weft.where(batch >= 1, 0.0, -INF)), {}),
}


@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
@pytest.mark.parametrize("case", FLAT)
def test_scores_that_are_no_full_tile_or_infinite(case: str, target: str, schedule: str) -> None:
    if target == "cpu" and schedule != "flash":
        return
    declared, operands = FLAT[case]
    variant, given = weft.Attention(**declared), tensors()
    names = [name for name, value in operands.items() if isinstance(value, torch.Tensor)]

    def compute(call: Any, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        leaves = [
            t.to(dtype).requires_grad_() for t in (*(t.detach().clone() for t in given), *map(operands.get, names))
        ]
        out, lse = call(*leaves[:3], return_lse=True, **operands | dict(zip(names, leaves[3:])), **options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        total = (out * weights).sum() + torch.where(lse.isinf(), 0.0, lse).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True)  # the definition's query may be unused
        return [out, lse, *(torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves))]

    exact, plain = compute(variant.reference, torch.float64), compute(variant.reference, torch.float32)
    actual = compute(variant, torch.float32, target=target, schedule=schedule)
    for name, *each in zip(("out", "lse", "dquery", "dkey", "dvalue", *names), actual, exact, plain):
        check_errors(*each, f"{case} {name}")


MASKS: dict[str, tuple[weft.Expr, dict[str, Any]]] = {
    "a float tensor by head": (CAUSAL & (w[head] > 0.5), {"w": WEIGHTS}),
    "its floor": (CAUSAL & (q_pos - kv_pos < weft.floor(w[head] * 10.0)), {"w": WEIGHTS}),
    "float arithmetic": (CAUSAL & (w[head] * q_len - x > 8.0), {"w": WEIGHTS, "x": 1.5}),
    "ints times floats": (kv_pos * 0.37 <= q_pos * x, {"x": 0.71}),
    "sin of positions": (CAUSAL & (weft.sin(0.3 * kv_pos) < 0.5), {}),
    "a position times a head": (CAUSAL | (q_pos * head >= 17), {}),
    "a position times a scalar that is 0": (CAUSAL | (q_pos * n >= 17), {"n": 0}),
    "sums and products of ints read": (kv_pos + 3 * ids[head] <= q_pos + ids[0] * ids[1], {"ids": IDS}),
    "sums of small ints": (kv_pos + ids[head] + ids[0] <= q_pos + 200, {"ids": 30 * IDS.to(torch.int8)}),
}  # fmt: skip


@pytest.mark.parametrize("case", MASKS)
def test_numbers_in_masks(case: str, target: str) -> None:
    mask, operands = MASKS[case]
    length = 200 if target == "cpu" else 70
    check_variant(weft.Attention(mask=mask), *tensors(length), target=target, operands=operands, label=case)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sines_of_angles_of_any_size(name: str, target: str) -> None:
    angles, size = weft.tensor("angles", 1), 10.0 ** torch.arange(-6, 10).repeat_interleave(16)
    given = torch.randn(len(size), generator=torch.Generator().manual_seed(1)) * size
    given = torch.cat([given, torch.arange(-16, 17) * math.pi / 4, torch.tensor([2.0**24 + 2, -(2.0**31), 105615.0])])
    turned = weft.Attention(0.0 * score + getattr(weft, name)(angles[q_pos]), kv_pos == q_pos, name="turned")
    query = torch.zeros(1, 1, len(given), 16)
    _, lse = turned(query, query, query, angles=given, target=target, return_lse=True)
    torch.testing.assert_close(lse[0, 0].double(), getattr(torch, name)(given.double()), rtol=0, atol=5e-7)
    _, lse = turned(query, query, query, angles=given / 0.0, target=target, return_lse=True)
    assert lse.isnan().all()  # as torch has the sine of what is infinite, or no number


def test_a_float_tensor_that_only_the_mask_reads_gets_a_gradient_of_0(target: str) -> None:
    variant = weft.Attention(mask=w[kv_pos] > 0.0)
    read = torch.randn(40, generator=torch.Generator().manual_seed(1))
    check_variant(variant, *tensors(), target=target, operands={"w": read})
    read.requires_grad_()
    for given in (tensors(), [t.requires_grad_() for t in tensors()]):
        variant(*given, w=read, target=target).sum().backward()
    assert read.grad is not None and not read.grad.any()


def test_an_int_that_a_number_chooses_is_a_float_of_the_call() -> None:
    """As an int, torch's functions would compute it in torch's default dtype."""
    variant = weft.Attention(weft.tanh(weft.where(head_dim == 1, score, n)), sink=0.0, name="chosen_number")
    given = tensors(dtype=torch.float64)
    torch.testing.assert_close(variant(*given, n=1), variant.reference(*given, n=1), rtol=0, atol=1e-14)


Q, K = torch.arange(40, dtype=torch.float64)[:, None], torch.arange(40, dtype=torch.float64)
HEAD = torch.arange(1, 3, dtype=torch.float64)[:, None, None]
OF_POSITIONS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "log of a distance": (score + weft.log(q_pos - kv_pos + 1.0), lambda s: s + (Q - K + 1).log()),
    "log of an int": (score + weft.log(q_pos - kv_pos + 1), lambda s: s + (Q - K + 1).log()),
    "a quotient": (score + (kv_pos - q_pos) / 3, lambda s: s + (K - Q) / 3),
    "a number of one": (score + 1.0 / (q_pos + 3), lambda s: s + 1 / (Q + 3)),
    "a multiple": (score + (kv_pos - q_pos) * 0.1, lambda s: s + (K - Q) * 0.1),
    "a factor": (score * weft.sqrt(q_pos + 1), lambda s: s * (Q + 1).sqrt()),
    "a head": (score * weft.exp2(-(head + 1) / 3), lambda s: s * (-HEAD / 3).exp2()),
    "a length": (score + q_pos * weft.rsqrt(kv_len), lambda s: s + Q * 40**-0.5),
    "a width": (score / weft.sqrt(head_dim * 3), lambda s: s / 48**0.5),
    "a scalar": (score + weft.sqrt(x * q_pos), lambda s: s + (0.1 * Q).sqrt()),
    "beside a score": (weft.tanh(score + weft.log(q_pos + 2)), lambda s: (s + (Q + 2).log()).tanh()),
}  # fmt: skip


@pytest.mark.parametrize("schedule", [None, "flash/flash_forward=cpu:16x16+tiles/flash_backward=cpu:16x16+tiles"])
@pytest.mark.parametrize("name", OF_POSITIONS)
def test_functions_of_positions_have_64_bits_where_operands_have(name: str, schedule: str | None) -> None:
    """The definition and the kernels, beside plain torch: in 32 bits they are 1e-8 off."""
    expression, plain = OF_POSITIONS[name]
    variant = weft.Attention(expression, CAUSAL, name="of_positions")
    query, key, value = given = [t.requires_grad_() for t in tensors(dtype=torch.float64)]
    scores = plain(query @ key.mT / 4).masked_fill(K > Q, -INF)
    wanted = scores.softmax(-1) @ value
    numbers = {"x": 0.1} if name == "a scalar" else {}
    for found in (variant.reference(*given, **numbers), variant(*given, target="cpu", schedule=schedule, **numbers)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
        pairs = zip(*(torch.autograd.grad(out.sum(), given, retain_graph=True) for out in (found, wanted)), strict=True)
        for got, exact in pairs:
            torch.testing.assert_close(got, exact, rtol=1e-13, atol=1e-13)


def test_plans_of_float64_are_shown() -> None:
    variant = weft.Attention(mask=CAUSAL, name="plain")
    given = tensors(dtype=torch.float64)
    assert "fp64" in variant.explain(*given) and "def forward_tile" in variant.source(*given)
    assert variant.plan(*given).shape.element_bytes == 8


# -- torch's defaults --------------------------------------------------------------------------------------------------
MIXED = weft.Attention(
    score=weft.maximum(score, -1.5) - 0.3 * (q_pos - kv_pos) + weft.where(kv_pos % 2 < 1, 1.0, weft.log(x - 1.0))
    + weft.sin(kv_pos) / (1 + q_pos) + q_pos * w[head],
    mask=CAUSAL & (kv_pos * 0.5 <= q_pos * 1.0),
    name="mixed",
)  # fmt: skip


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize(
    ("dtype", "default", "device"),
    [(torch.float32, d, "cpu") for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    + [(torch.float64, d, "cpu") for d in (torch.float32, torch.bfloat16, torch.float64)]
    + [(torch.float32, torch.float64, "meta")],
)  # fmt: skip
@pytest.mark.parametrize("length", [5, 300])
def test_no_default_of_torch_reaches_a_result(
    dtype: torch.dtype, default: torch.dtype, device: str, length: int, restored: None
) -> None:
    def run(*given: Any, **options: Any) -> Any:
        torch.set_default_dtype(default)
        torch.set_default_device(device)
        try:
            return MIXED(*given, **options)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)

    operands = {"x": 2.5, "w": torch.tensor([0.3, -0.2], dtype=dtype)}
    if dtype == torch.float32:
        check_variant(MIXED, *tensors(length), operands=operands, run=run, target="cpu", differentiate=("w",))
        return
    leaves = [t.requires_grad_() for t in (*tensors(length, dtype), operands["w"])]
    found, want = (call(*leaves[:3], **operands) for call in (run, MIXED.reference))
    mine, true = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, want))
    for a, b in zip((found.detach(), *mine), (want.detach(), *true)):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))  # in float32 it would be 1e-3


@pytest.mark.usefixtures("restored")
def test_no_default_of_torch_reaches_what_is_said_of_a_call() -> None:
    doc, table = weft.tensor("doc", 1, int), weft.tensor("table", 2)
    packed = weft.Attention(mask=CAUSAL & (doc[q_pos] == doc[kv_pos]), dropout=0.25, name="packed")
    t5 = weft.Attention(weft.scores.t5_bias(table)(score), scale=1.0, name="t5")
    given, ids, rows = tensors(80), torch.arange(80) // 20, torch.ones(2, 32)

    def asked() -> list[str]:
        found = [packed.explain(*given, doc=ids), packed.show_mask(80, 80, doc=ids), t5.explain(*given, table=rows)]
        return [*map(str, found), str(packed.reference(*given, doc=ids, seed=3).sum().item())]

    want = asked()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    assert asked() == want


# -- constants and names -----------------------------------------------------------------------------------------------
CONSTANTS: dict[str, dict[str, Any]] = {
    "scale 1e-40": dict(scale=1e-40),
    "filled with -1e300": dict(score=weft.where(CAUSAL, score, -1e300)),
    "cut off at 1e300": dict(score=weft.minimum(score, 1e300)),
    "cut off at -1e39": dict(score=weft.maximum(score, -1e39)),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_constants_beyond_float32(case: str, target: str) -> None:
    variant = weft.Attention(**CONSTANTS[case])
    given = tensors()
    exact = variant.reference(*(t.double() for t in given))
    if case.startswith("filled"):  # a row of -1e300 is one of -inf in float32, but here each row sees itself
        exact = weft.Attention(mask=CAUSAL).reference(*(t.double() for t in given))
    check_errors(variant(*given, target=target), exact, variant.reference(*given), case)


def test_a_scale_that_underflows_is_0(target: str) -> None:
    given = tensors()
    out = weft.Attention(scale=weft.exp(x))(*given, x=-120.0, target=target)
    check_errors(out, given[2].double().mean(2, keepdim=True).expand(out.shape), out, "underflow")


def test_names_of_operands_meet_no_strides(target: str) -> None:
    s0, doc = weft.scalar("doc_s0", int), weft.tensor("doc", 1, int)
    variant = weft.Attention(score=score + 1.0 * doc[head] * s0)
    check_variant(variant, *tensors(), target=target, operands={"doc": torch.ones(2, dtype=torch.int64), "doc_s0": 1})


@pytest.mark.parametrize("name", ["inf", "nan"])
def test_operands_are_not_called_as_constants_are(name: str) -> None:
    with pytest.raises(weft.WeftError, match=f"the name '{name}' is that of a constant"):
        weft.scalar(name)
    with pytest.raises(weft.WeftError, match=f"the name '{name}' is that of a constant"):
        weft.tensor(name, 1)


# -- operands that nothing depends on ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "declared",
    [dict(score=0.5 * kv_pos, scale=w[head]), dict(score=score + 0.0 * w[head] * 0.0, mask=(x < 1.0) | True)],
)
def test_a_call_may_bring_what_was_declared_and_is_not_read(declared: dict[str, Any]) -> None:
    variant = weft.Attention(**declared)
    given = {p.name: WEIGHTS if p.name == "w" else 0.5 for e in declared.values() for p in (w, x) if p.name in str(e)}
    sizes = weft.shape(heads=2, q_len=40, head_dim=16)
    assert "flash" in variant.explain(sizes, device="cpu", **given)
    assert variant.show_mask(64, 64, **given)
    assert torch.equal(
        variant(*tensors(), **given), variant(*tensors(), **{n: given[n] for n in variant._internals.names})
    )
    check_errors(variant(*tensors(), **given), variant.reference(*(t.double() for t in tensors()), **given),
                 variant.reference(*tensors(), **given), "unread")  # fmt: skip
    with pytest.raises(weft.WeftError, match="y: unknown operand"):
        variant(*tensors(), **given, y=1.0)


# -- scores far from 0 -------------------------------------------------------------------------------------------------
bias = weft.tensor("bias", 2)
FAR = {
    "padded": weft.Attention(score=score + bias[batch, kv_pos]),
    "padded, causal": weft.Attention(score=score + bias[batch, kv_pos], mask=CAUSAL),
    "filled": weft.Attention(score=weft.where(kv_pos < n, score, bias[batch, kv_pos]), mask=CAUSAL),
}
SIZES = (-1e4, -1e9, 1e9, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("schedule", ["flash", "streaming", "standard"])
@pytest.mark.parametrize("case", FAR)
@pytest.mark.parametrize("size", SIZES)
def test_rows_whose_scores_all_lie_far_from_0(case: str, size: float, target: str, schedule: str) -> None:
    """As torch's dense softmax has them: in float32 the scores themselves are rounded, in whatever is computed."""
    if schedule != "flash" and (target == "cpu" or case != "padded, causal" or size > -1e9):
        return  # the cpu target has one schedule; the others share what they do with such rows
    operands: dict[str, Any] = {"bias": torch.full((1, 70), size)} | ({"n": 0} if case == "filled" else {})
    q, k, v = (t.clone().requires_grad_() for t in tensors(70))
    g = torch.randn(v.shape, generator=torch.Generator().manual_seed(5))
    found, want = (
        FAR[case](q, k, v, target=target, schedule=schedule, **operands),
        FAR[case].reference(q, k, v, **operands),
    )
    mine, plain = (torch.autograd.grad(out, (q, k, v), g) for out in (found, want))
    for name, a, b in zip(("out", "dquery", "dkey", "dvalue"), (found, *mine), (want, *plain)):
        assert not a.isnan().any(), name
        assert (a - b).abs().max() <= 2e-5 * max(1.0, b.abs().max()), (name, (a - b).abs().max())


def test_the_log_sum_exp_of_such_rows_has_a_gradient(target: str) -> None:
    for size in (0.0, -50.0):
        operands = {"bias": torch.full((1, 40), size)}
        check_variant(FAR["padded, causal"], *tensors(), target=target, operands=operands, differentiate=("bias",))


def test_which_scores_may_lie_far_from_0() -> None:
    from weft.compiler.analysis.tiles.facts import facts_of

    near = [
        score, 2.0 * score, score * w[head], 50.0 * weft.tanh(score / 50.0), weft.where(CAUSAL, score, -INF),
        score + weft.sin(0.1 * kv_pos), weft.minimum(score, 3.0), score - 0.5 * (q_pos - kv_pos),
        -weft.sigmoid(score) * 8.0, weft.softplus(score), weft.logsigmoid(2.0 * score) + 1.0,
    ]  # fmt: skip
    far = [
        score + bias[batch, kv_pos], weft.where(CAUSAL, score, -1e4), score + 0.5 * kv_pos, score + x,
        weft.exp(score), 1e4 * weft.tanh(score), weft.softplus(bias[batch, kv_pos]),
    ]  # fmt: skip
    for expected, scores in ((False, near), (True, far)):
        for each in scores:
            assert facts_of(weft.Attention(score=each)).scores_lie_far == expected, str(each)
    alibi, padded = score + w[head] * (kv_pos - q_pos), score + bias[batch, kv_pos]
    sees_itself = {CAUSAL: True, abs(q_pos - kv_pos) <= 5: True, kv_pos < q_pos: False, q_pos - kv_pos < n: False}
    for mask, sees in sees_itself.items():
        assert facts_of(weft.Attention(alibi, mask)).scores_lie_far != sees, str(mask)
        assert facts_of(weft.Attention(padded, mask)).scores_lie_far, str(mask)


# -- latent attention --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["expanded", "absorbed", None])
def test_every_head_of_latent_attention_has_keys_of_its_own(form: Any) -> None:
    """kv_head is head and group is 1, whichever form is computed, and where the query is latent already."""
    latent = weft.Latent(rank=16, rope=8)
    mla = weft.Attention(score * (1 + kv_head) / group, (kv_pos <= q_pos + kv_head) & (group < 2), latent=latent)
    sizes = [(1, 4, 9, 20), (1, 1, 9, 24), (4, 16, 12), (4, 16, 8)]
    query, cache, uk, uv = (torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(sizes))
    with torch.no_grad():
        out = mla(query, cache, uk=uk, uv=uv, form=form)
    exact = mla.reference(query.double(), cache.double(), uk=uk.double(), uv=uv.double())
    check_errors(out, exact, mla.reference(query, cache, uk=uk, uv=uv), str(form))
    written = weft.Attention(
        score * (1 + head), kv_pos <= q_pos + head, scale=1 / math.sqrt(20.0) + 0.0 * head_dim, latent=latent
    )
    absorbed = torch.cat([query[..., :12] @ uk.transpose(1, 2), query[..., 12:]], -1)
    served = mla.replace(scale=1 / math.sqrt(20.0))(absorbed, cache) @ uv
    check_errors(served, exact, out, "served")
    check_errors(written(absorbed, cache) @ uv, exact, out, "written")
