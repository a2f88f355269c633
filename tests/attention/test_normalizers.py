"""Normalizers that are no softmax, Weft's own and from outside: right on each target, or refused in words."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_pos, score
from weft.codegen import normalizers as texts
from weft.codegen.normalizers import Blocks, Terms
from weft.ir import normalizer as records
from weft.ir.normalizer import Normalizer

from ..machine_code.ahead import compiled
from ..support import check_variant, poisoned
from .test_lengths import KINDS

pytest.importorskip("triton")

# -- two toys, as another package would bring them ---------------------------------------------------------------------
RELU = Normalizer("toy_relu", saves="nothing", weight="maximum(score, 0.0)")
SIGMOID = Normalizer("toy_sigmoid", saves="nothing", weight="sigmoid(score)")


def relu_of_triton(terms: Terms) -> Blocks:
    return Blocks(
        weigh=f"p = tl.maximum({terms.score}, 0.0) * LN_2",
        backward_weight=f"logit = {terms.score}\np = tl.maximum(logit, 0.0) * LN_2",
        backward_score="tl.where(logit > 0.0, dp, 0.0)",
    )


def sigmoid_of_triton(terms: Terms) -> Blocks:
    """Half of each value at score 0: a pair that should be hidden and is not would show."""
    return Blocks(
        weigh=f"p = 1.0 / (1.0 + tl.exp2(-({terms.score})))",
        backward_weight=f"p = 1.0 / (1.0 + tl.exp2(-({terms.score})))",
        backward_score="p * (1.0 - p) * dp",
    )


CLASS = """
class Weighted:
    bias = weighted = None

    def add(self, scores, values):
        weights = {weigh}
        added = product(values.mT, weights.mT)
        self.weighted = added if self.weighted is None else self.weighted + added

    def finish(self):
        return self.weighted, None
"""


def on_cpu(weigh: str, slope: str) -> texts.Texts:
    def blocks(terms: Terms) -> Blocks:
        return Blocks(
            define=CLASS.format(weigh=weigh.format("scores")),
            init="Weighted()",
            backward_weight=f"weights = {weigh.format(terms.score)}",
            backward_score=f"dscore = product(values, douts).mul_({slope})",
        )

    return blocks


@pytest.fixture(autouse=True)
def toys(tmp_path: Path) -> Iterator[None]:
    """A cache of their own: its keys know the sources of the package, and no texts from outside."""
    records.register(RELU)
    records.register(SIGMOID)
    texts.register(RELU, "triton", relu_of_triton)
    texts.register(RELU, "cpu", on_cpu("{0}.clamp(min=0.0).mul_(LN_2)", "weights > 0.0"))
    texts.register(SIGMOID, "triton", sigmoid_of_triton)
    texts.register(SIGMOID, "cpu", on_cpu("({0} * LN_2).sigmoid_()", "weights * (1.0 - weights)"))
    with weft.settings(cache_dir=tmp_path):
        yield
    for record in (RELU, SIGMOID):
        texts.unregister(record)
        records.unregister(record.name)


def toy(name: str = "toy", mask=masks.causal, normalizer: str = "toy_relu", **changes) -> weft.Attention:
    return weft.Attention(mask=mask, name=name, normalizer=normalizer, **changes)


def tensors(dtype: torch.dtype = torch.float32, q_len: int = 40, kv_len: int = 40, width: int = 16):
    """GQA with two heads a key; more queries than keys: a causal mask then hides all keys from the first."""
    shapes = ((2, 4, q_len, width), (2, 2, kv_len, width), (2, 2, kv_len, 32))
    return [poisoned(shape, dtype, seed=n) for n, shape in enumerate(shapes)]


TARGETS = pytest.mark.parametrize("target", ["cpu", "interpret"])
NORMALIZERS = pytest.mark.parametrize("normalizer", ["relu", "sigmoid"])
TOYS = pytest.mark.parametrize("normalizer", ["toy_relu", "toy_sigmoid"])
slopes, rows, columns = weft.tensor("slopes", 1), weft.tensor("rows", 2), weft.tensor("columns", 2)
factor, doc, pair = weft.tensor("factor", 1), weft.tensor("doc", 2, int), weft.tensor("pair", 2)


# -- results and gradients ---------------------------------------------------------------------------------------------
@pytest.mark.sampled(5)
@TARGETS
@NORMALIZERS
@pytest.mark.parametrize("mask", [True, masks.causal], ids=["unmasked", "causal"])
@pytest.mark.parametrize("lengths", [(40, 40), (50, 33), (1, 70), (70, 100)], ids=str)
def test_linear_scores(target, normalizer, mask, lengths) -> None:
    check_variant(toy(mask=mask, normalizer=normalizer), *tensors(torch.float32, *lengths), target=target, lse=False)


@TARGETS
@NORMALIZERS
def test_rows_that_see_nothing_give_0(target, normalizer) -> None:
    query, key, value = tensors(q_len=50, kv_len=33)
    query = query.detach().requires_grad_()
    variant = toy(normalizer=normalizer)
    out = variant(query, key, value, target=target)
    out.sum().backward()
    assert not out[:, :, :17].any() and out[:, :, 17:].any(-1).float().mean() > 0.9
    assert not query.grad[:, :, :17].any()


@TARGETS
@NORMALIZERS
def test_scores_that_are_not_linear(target, normalizer) -> None:
    capped = toy(score=5.0 * weft.tanh(score / 5.0) - 0.3, normalizer=normalizer)
    check_variant(capped, *tensors(q_len=50, kv_len=33), target=target, lse=False)


def test_a_weight_of_0_may_have_a_gradient() -> None:
    """Where weights are scores: clearing what infinite slopes of hidden pairs leave clears no other pair."""
    identity = Normalizer("toy_identity", saves="nothing", weight="score")
    seen = "torch.where({0} > -1e30, {0} * LN_2, 0.0)"
    records.register(identity)
    texts.register(identity, "cpu", on_cpu(seen, "(logits > -1e30)"))
    try:
        variant = toy("factors", score=pair[q_pos, kv_pos] * score, normalizer="toy_identity")
        query, key, value = tensors()
        query = torch.where(torch.arange(40)[:, None] % 3 == 0, 0.0, query)  # rows whose visible weights are all 0
        hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
        found = []
        for factor in (0.5, -torch.inf):
            leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
            given = torch.where(hidden, factor, 0.5)
            variant(*leaves, pair=given, target="cpu", schedule="flash").sum().backward()
            found.append([x.grad for x in leaves])
        for usual, got in zip(*found):
            torch.testing.assert_close(got, usual)
    finally:
        texts.unregister(identity)
        records.unregister("toy_identity")


@TARGETS
@pytest.mark.parametrize("normalizer", ["relu", "sigmoid", "toy_sigmoid"])
def test_a_score_of_minus_infinity_has_no_gradient(target, normalizer) -> None:
    """Its slope is infinite too; a weight of 0 alone does not say so of every normalizer."""
    hidden = torch.rand((33, 33), generator=torch.Generator().manual_seed(0)) < 0.5
    written = (2.0 + weft.tanh(score)) * pair[q_pos, kv_pos]
    both = [
        toy(score=written, mask=True, normalizer=normalizer),
        toy(score=written, mask=weft.tensor("seen", 2, bool)[q_pos, kv_pos], normalizer=normalizer),
    ]
    gradients = []
    for variant, operands in zip(both, ({}, {"seen": ~hidden})):
        leaves = [t.detach().requires_grad_() for t in tensors(q_len=33, kv_len=33)]
        given = torch.where(hidden, -torch.inf if variant is both[0] else 0.5, 0.5)
        out = variant(*leaves, target=target, pair=given, **operands)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for mine, masked in zip(*gradients):
        torch.testing.assert_close(mine, masked, rtol=1e-5, atol=1e-5)


@TARGETS
@NORMALIZERS
def test_gradients_of_operands(target, normalizer) -> None:
    written = score + slopes[head] * (kv_pos - q_pos) + rows[head, q_pos] + columns[head, kv_pos]
    given = {"slopes": torch.tensor([0.1, -0.2, 0.05, 0.3]), "rows": torch.randn(4, 40), "columns": torch.randn(4, 40)}
    check_variant(
        toy(score=written, normalizer=normalizer), *tensors(), target=target, operands=given, lse=False,
        differentiate=("slopes", "rows", "columns"),
    )  # fmt: skip


@TARGETS
@NORMALIZERS
@pytest.mark.parametrize("differentiate", [(), ("factor",)], ids=["", "dfactor"])
def test_factors_of_any_sign(target, normalizer, differentiate) -> None:
    signs = [-1.5, 0.7, 0.0, 2.0]
    signed = toy(score=score * factor[head], normalizer=normalizer)
    check_variant(
        signed, *tensors(q_len=50, kv_len=33), target=target, operands={"factor": torch.tensor(signs)}, lse=False,
        differentiate=differentiate,
    )  # fmt: skip


@TARGETS
@NORMALIZERS
def test_masks_that_read_tensors(target, normalizer) -> None:
    """On GPUs their tiles are measured; on a CPU the mask is evaluated first."""
    documents = toy(mask=(doc[batch, q_pos] == doc[batch, kv_pos]) & (kv_pos <= q_pos), normalizer=normalizer)
    ids = torch.arange(100)[None] // torch.tensor([[30], [47]])
    check_variant(documents, *tensors(q_len=100, kv_len=100), target=target, operands={"doc": ids.int()}, lse=False)


@TARGETS
@TOYS
def test_those_from_outside(target, normalizer) -> None:
    check_variant(toy(normalizer=normalizer), *tensors(q_len=50, kv_len=33), target=target, lse=False)
    written = toy(score=5.0 * weft.tanh(score / 5.0) + slopes[head], normalizer=normalizer)
    given = {"slopes": torch.tensor([0.1, -0.2, 0.05, 0.3])}
    check_variant(written, *tensors(), target=target, operands=given, differentiate=("slopes",), lse=False)


@TARGETS
@NORMALIZERS
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_sequences_of_their_own_lengths(target, normalizer, kind) -> None:
    """NaN lies behind lengths; sequences without keys give 0."""
    make, lengths = KINDS[kind]
    written = score + rows[head, q_pos] - weft.log(1.0 * kv_len)
    given = {"rows": torch.randn(2, 80)}
    for variant, operands in ((toy(normalizer=normalizer), {}), (toy(score=written, normalizer=normalizer), given)):
        check_variant(variant, *make(), target=target, operands=operands | lengths, lse=False,
                      differentiate=tuple(operands))  # fmt: skip


@TARGETS
@NORMALIZERS
def test_dropout(target, normalizer) -> None:
    capped = toy(score=5.0 * weft.tanh(score / 5.0), normalizer=normalizer, dropout=0.3)
    for variant in (toy(normalizer=normalizer, dropout=0.3), capped):
        check_variant(variant, *tensors(), target=target, operands={"seed": 7}, lse=False)


@TARGETS
@NORMALIZERS
def test_scaled_as_in_the_papers(target, normalizer) -> None:
    """Sigmoid with a bias of -log(n), relu divided by n; and beside the same written in torch."""
    shifted, divided = score - weft.log(1.0 * kv_len), weft.rsqrt(1.0 * weft.head_dim) / kv_len
    given = {"score": shifted} if normalizer == "sigmoid" else {"scale": divided}
    variant = toy(mask=True, normalizer=normalizer, **given)
    query, key, value = tensors(q_len=50, kv_len=33)
    check_variant(variant, query, key, value, target=target, lse=False)
    products = query @ key.repeat_interleave(2, 1).mT / 4
    weights = torch.sigmoid(products - math.log(33)) if normalizer == "sigmoid" else torch.relu(products) / 33
    torch.testing.assert_close(variant(query, key, value, target=target), weights @ value.repeat_interleave(2, 1))


@TARGETS
@pytest.mark.parametrize("schedule", ["flash/flash_forward=cpu:16x32/flash_backward=cpu:32x16", None])
def test_several_tiles(target, schedule) -> None:
    if target == "interpret" and schedule:
        pytest.skip("its tiles are small anyway")
    for normalizer in ("relu", "sigmoid"):
        for variant in (toy(normalizer=normalizer), toy(mask=True, score=score + 0.1 * head, normalizer=normalizer)):
            given = tensors(q_len=130, kv_len=150) if target == "cpu" else tensors(q_len=40, kv_len=70)
            check_variant(variant, *given, target=target, lse=False, schedule=schedule)


@NORMALIZERS
def test_float64_on_a_cpu(normalizer) -> None:
    made = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    written = toy(score=score + slopes[head] * (kv_pos - q_pos), normalizer=normalizer)
    given = torch.rand(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: written(*x[:3], slopes=x[3]), (*made, given))


def of_torch(normalizer: str, scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(scores) if normalizer == "sigmoid" else torch.relu(scores)) @ value


@pytest.mark.parametrize("target", ["cpu", "interpret", "reference"])
@NORMALIZERS
def test_scores_of_0_and_far_from_it(target, normalizer) -> None:
    """As torch's functions and their derivatives: relu has none at 0, and a weight may be infinite."""
    of_keys = weft.tensor("special", 1)[kv_pos]
    variant = toy(mask=True, score=of_keys + 0.0 * score, normalizer=normalizer)
    special = [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 1e30, -1e30, torch.inf, -torch.inf, 88.0, -88.0, -104.0, 17.0]
    given = torch.tensor(special, requires_grad=True)
    query, value = torch.zeros(1, 1, 3, 16), torch.ones(1, 1, len(special), 16)
    for keep in range(len(special)):  # one at a time: sums with an infinity are infinite
        own = torch.zeros_like(value)
        own[:, :, keep] = 1.0
        if not math.isfinite(special[keep]) and normalizer == "relu":
            own[:] = 1.0
        call = variant.reference if target == "reference" else lambda *t, **o: variant(*t, **o, target=target)
        out = call(query, torch.zeros_like(value), own, special=given, q_offset=0)
        exact = of_torch(normalizer, given.expand(3, -1), own[0, 0])[None, None]
        torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-7, equal_nan=True)
        wanted, got = (torch.autograd.grad(x[..., 0].sum(), given)[0] for x in (exact, out))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@TARGETS
@NORMALIZERS
def test_a_derivative_at_0_is_that_of_torch(target, normalizer) -> None:
    query = torch.randn(1, 1, 8, 16)
    query[:, :, ::2] = 0.0  # all scores of these rows are 0
    leaves = [query, torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16)]
    found = []
    for call in (toy(mask=True, normalizer=normalizer), None):
        own = [x.clone().requires_grad_() for x in leaves]
        out = call(*own, target=target) if call else of_torch(normalizer, own[0] @ own[1].mT / 4, own[2])
        found.append([out, *torch.autograd.grad(out.sin().sum(), own)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert normalizer != "relu" or not found[0][1][:, :, ::2].any()


@TARGETS
@NORMALIZERS
def test_nan_of_hidden_pairs_and_of_visible_ones(target, normalizer) -> None:
    """A hidden score may be anything; a visible one that is NaN shows."""
    hides = toy(score=score * pair[q_pos, kv_pos], normalizer=normalizer)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    made = tensors()
    usual = hides(*made, pair=torch.ones(40, 40), target=target)
    for junk in (torch.nan, torch.inf, -torch.inf):
        leaves = [x.detach().clone().requires_grad_() for x in made]
        given = torch.where(hidden, junk, 1.0).requires_grad_(False)
        out = hides(*leaves, pair=given, target=target)
        torch.testing.assert_close(out, usual)
        assert all(not g.isnan().any() for g in torch.autograd.grad(out.sum(), leaves))
    given = torch.ones(40, 40)
    given[7, 3] = torch.nan
    out = hides(*made, pair=given, target=target)
    assert out[:, :, 7].isnan().all() and not out[:, :, :7].isnan().any() and not out[:, :, 8:].isnan().any()


@TARGETS
def test_half_precision_and_widths_of_several_segments(target) -> None:
    for normalizer in ("sigmoid", "relu"):
        check_variant(toy(normalizer=normalizer), *tensors(torch.float16, width=24), target=target, lse=False)
        if target == "cpu":
            check_variant(toy(normalizer=normalizer), *tensors(torch.bfloat16, width=24), target=target, lse=False)


@TARGETS
@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",)], ids=str)
def test_some_gradients_only(target, wanted) -> None:
    inputs = dict(zip(("query", "key", "value"), (t.detach() for t in tensors())))
    variant = toy(normalizer="sigmoid")
    gradients = []
    for call, dtype in ((variant, torch.float32), (variant.reference, torch.float64)):
        leaves = {n: t.to(dtype).requires_grad_(n in wanted) for n, t in inputs.items()}
        out = call(*leaves.values(), **({"target": target} if dtype == torch.float32 else {}))
        gradients.append(torch.autograd.grad(out.square().sum(), [leaves[n] for n in wanted]))
    for mine, exact in zip(*gradients):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@TARGETS
def test_latent_attention(target) -> None:
    mla = toy(latent=weft.Latent(rank=32, rope=16), normalizer="sigmoid")
    query, cache = torch.randn(2, 4, 20, 48), torch.randn(2, 1, 35, 48)
    uk, uv = torch.randn(4, 32, 32) / 6, torch.randn(4, 32, 16) / 6
    exact = mla.reference(query.double(), cache.double(), uk=uk.double(), uv=uv.double())
    for form in ("expanded", "absorbed"):
        out = mla(query, cache, uk=uk, uv=uv, form=form, target=target)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


# -- what it is part of ------------------------------------------------------------------------------------------------
def test_it_is_explained_and_reads_back_in_each_way() -> None:
    sizes = weft.shape(heads=4, q_len=512, head_dim=64)
    for name in ("sigmoid", "relu"):
        variant = weft.Attention(mask=masks.causal, normalizer=name, name="own")
        assert f"normalizer    {name}" in variant.explain(sizes, device="h100")
        assert weft.parse_attention(str(variant)) == variant != variant.replace(normalizer="softmax")
        with pytest.raises(weft.WeftError, match=f"own: return_lse: the normalizer {name} has no log-sum-exp"):
            variant(*tensors(), return_lse=True)
        with pytest.raises(weft.WeftError, match=f"sink: the normalizer {name} has no denominator that it could"):
            variant.replace(sink=0.0)
        assert "flash_forward=hopper" in variant.explain(sizes, device="h100")
        for schedule in ("streaming", "standard"):
            with pytest.raises(weft.UnavailableError, match=f"schedule {schedule} has the normalizer softmax only"):
                variant(*tensors(), target="interpret", schedule=schedule)


def test_text_digest_and_copies_keep_it() -> None:
    variant = toy()
    plain = variant.replace(normalizer="softmax")
    assert 'normalizer="toy_relu"' in str(variant) and 'normalizer="toy_relu"' in variant.canonical.text
    assert "normalizer" not in str(plain) + plain.canonical.text
    assert variant != plain and variant.canonical.digest != plain.canonical.digest
    for again in (
        weft.parse_attention(str(variant)), weft.parse_attention(variant.canonical.text), copy.deepcopy(variant),
        pickle.loads(pickle.dumps(variant)), plain.replace(normalizer="toy_relu"),
    ):  # fmt: skip
        assert (
            again == variant and again.normalizer == "toy_relu" and again.canonical.digest == variant.canonical.digest
        )
        assert isinstance(again, weft.Attention)


def test_a_program_of_torch_compile_keeps_it() -> None:
    variant = toy(normalizer="toy_sigmoid")
    call = torch.compile(lambda *t: variant(*t), backend="eager", fullgraph=True)
    inputs = tensors()
    torch.testing.assert_close(call(*inputs), variant(*inputs))


def test_kernels_hold_no_statistics_and_say_what_they_do() -> None:
    sizes = weft.shape(heads=4, kv_heads=2, q_len=512, head_dim=64, dtype="fp32")
    for target, device in (("cpu", "cpu"), ("triton", "h100")):
        for direction in ("forward", "backward"):
            source = toy().source(sizes, direction=direction, target=target, device=device)
            assert "P = maximum(score, 0.0)" in source
            for word in ("lse2", "delta", "row_statistics", "row_max", "logsumexp", "Softmax"):
                assert word not in source, (target, direction, word)
    assert "row_statistics" not in toy().explain(sizes, device="h100")


@pytest.mark.compiles
@pytest.mark.parametrize("normalizer", ["relu", "sigmoid"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_compile_for_a_gpu(normalizer, direction) -> None:
    """And spill no register in a loop, where the softmax does not either."""
    capped = toy(score=5.0 * weft.tanh(score / 5.0), normalizer=normalizer)
    names = {"forward": {"flash_forward"}, "backward": {"flash_dquery", "flash_dkey_dvalue"}}
    for variant, device in ((toy(normalizer=normalizer), "h200"), (capped, "a100" if normalizer == "relu" else "h200")):
        kernels = compiled(variant, direction, 64, device=device).kernels
        assert set(kernels) == names[direction]
        for kernel in kernels.values():
            assert kernel.spills_in_loops() == 0 and not kernel.serialised, (device, kernel.name)


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_there_is_no_lse_to_return() -> None:
    for call in (toy(), toy().reference):
        with pytest.raises(weft.WeftError, match="toy: return_lse: the normalizer toy_relu has no log-sum-exp"):
            call(*tensors(), return_lse=True)


def test_there_is_no_denominator_for_a_sink() -> None:
    with pytest.raises(weft.WeftError, match="sink: the normalizer toy_relu has no denominator that it could"):
        toy(sink=0.0)


@pytest.mark.parametrize("name", ["toy_rule", None, ["softmax"]])
def test_an_unknown_name_is_refused_with_the_known_ones(name) -> None:
    message = "normalizer: expected one of softmax, sigmoid, relu, toy_relu, toy_sigmoid, got"
    with pytest.raises(weft.WeftError, match=message):
        weft.Attention(normalizer=name)
    with pytest.raises(weft.WeftError, match=message):
        toy().replace(normalizer=name)


def test_hopper_says_which_it_has_and_triton_takes_the_call() -> None:
    sizes = weft.shape(heads=4, q_len=512, head_dim=64)
    with pytest.raises(weft.UnavailableError, match="hopper: has the normalizers softmax, sigmoid, relu only"):
        toy().plan(sizes, device="h100", target="hopper")
    text = toy().explain(sizes, device="h100")
    assert "hopper: has the normalizers softmax, sigmoid, relu only" in text and "flash_forward" in text
    assert "hopper: has" not in toy(normalizer="softmax").explain(sizes, device="h100")


@pytest.mark.parametrize("schedule", ["streaming", "standard"])
def test_other_schedules_say_that_they_have_softmax_only(schedule) -> None:
    with pytest.raises(weft.UnavailableError, match=f"interpret: schedule {schedule} has the normalizer softmax only"):
        toy()(*tensors(), target="interpret", schedule=schedule)


def test_a_target_without_its_text_says_which_normalizers_it_has() -> None:
    texts.unregister(RELU)
    with pytest.raises(
        weft.UnavailableError, match="cpu: has the normalizers softmax, sigmoid, relu, toy_sigmoid only"
    ):
        toy(name="unwritten")(*tensors(), target="cpu")


def test_a_name_means_one_normalizer() -> None:
    records.register(Normalizer("toy_relu", saves="nothing", weight="maximum(score, 0.0)"))
    with pytest.raises(weft.WeftError, match="'toy_relu' is another one already"):
        records.register(Normalizer("toy_relu", saves="nothing", weight="exp(score)"))
    with pytest.raises(weft.WeftError, match="of `score` alone, got 'score [*] q_pos', which reads q_pos, score"):
        records.register(Normalizer("toy_other", saves="nothing", weight="score * q_pos"))
    with pytest.raises(weft.WeftError, match="an expression of `score` alone, got 'score [+]'$"):
        records.register(Normalizer("toy_other", saves="nothing", weight="score +"))
    assert "toy_other" not in records.normalizers()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "no name", "saves": "lse"}, "expected name to be an identifier, got 'no name'"),
        ({"name": "other", "saves": "max"}, "expected saves to be 'lse' or 'nothing', got 'max'"),
        ({"name": "other", "saves": "nothing"}, "expected weight=, an expression of `score`"),
        ({"name": "other", "saves": "lse", "weight": "exp(score)"}, "expected weight=, an expression of `score`"),
    ],
)
def test_records_that_make_no_sense_are_refused(given, message) -> None:
    with pytest.raises(weft.WeftError, match=message):
        Normalizer(**given)
