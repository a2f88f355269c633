"""Normalizers that are no softmax on a GPU: right, and without memory for statistics that they have not."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score

from ..attention.test_normalizers import doc, rows, slopes, toy, toys
from ..support import check_variant, poisoned
from .test_lengths_on_gpu import given as given_lengths

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures(toys.__name__),
]  # fmt: skip


@pytest.mark.parametrize("normalizer", ["toy_relu", "toy_sigmoid"])
def test_a_normalizer_from_outside(normalizer):
    tensors = [poisoned((2, heads, 200, 64), torch.bfloat16, "cuda", seed=n) for n, heads in enumerate((4, 2, 2))]
    check_variant(toy(normalizer=normalizer), *tensors, target="triton", lse=False)


@pytest.mark.sampled(22)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("normalizer", ["relu", "sigmoid"])
def test_widths_and_dtypes(normalizer, width, dtype):
    tensors = [poisoned((2, heads, 200, width), dtype, "cuda", seed=n) for n, heads in enumerate((4, 2, 2))]
    check_variant(toy(normalizer=normalizer), *tensors, lse=False)


CAPPED = {"score": 5.0 * weft.tanh(score / 5.0)}
DECLARED = {
    "biased": {"score": score + slopes[head] * (kv_pos - q_pos) + rows[head, q_pos]},
    "capped": {**CAPPED, "mask": True},
    "window": {**CAPPED, "mask": masks.sliding_window(70)},
    "documents": {**CAPPED, "mask": masks.causal & masks.document(doc)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("normalizer", ["relu", "sigmoid"])
def test_scores_masks_and_operands(normalizer, name):
    tensors = [poisoned((2, heads, 300, 64), torch.bfloat16, "cuda", seed=n) for n, heads in enumerate((4, 2, 2))]
    given = {"slopes": torch.rand(4, device="cuda"), "rows": torch.randn(4, 300, device="cuda")}
    given |= {"doc": (torch.arange(300, device="cuda") // 70).repeat(2, 1)}
    variant = toy(**DECLARED[name], normalizer=normalizer)
    operands = {p.name: given[p.name] for p in variant.canonical.parameters}
    learned = tuple(n for n, t in operands.items() if t.is_floating_point())
    check_variant(variant, *tensors, operands=operands, differentiate=learned, lse=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("normalizer", ["relu", "sigmoid"])
def test_lengths(normalizer, kind):
    made, lengths = given_lengths(kind)
    check_variant(toy(normalizer=normalizer), *made, operands=lengths, lse=False)


def test_a_backward_takes_no_memory_for_statistics(most_memory):
    """They would be a twelfth of the gradients here."""
    leaves = [torch.randn(1, 4, 4096, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    for turn in ("the first call", "one that is ready"):
        out = toy(normalizer="toy_sigmoid")(*leaves, target="triton")
        dout = torch.ones_like(out)
        extra = most_memory(lambda out=out, dout=dout: torch.autograd.grad(out, leaves, dout))
        assert extra == sum(x.numel() * x.element_size() for x in leaves), turn


# -- on hopper ---------------------------------------------------------------------------------------------------------
ON_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
OWN = pytest.mark.parametrize("normalizer", ["relu", "sigmoid"])


@ON_HOPPER
@OWN
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("lengths", [(200, 200), (1000, 1300), (513, 130), (1, 70)], ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (80, 96), (192, 128)], ids=str)
def test_hopper(normalizer, widths, lengths, kv_heads):
    shapes = ((2, 4, lengths[0], widths[0]), (2, kv_heads, lengths[1], widths[0]), (2, kv_heads, lengths[1], widths[1]))
    tensors = [poisoned(shape, torch.bfloat16, "cuda", seed=n) for n, shape in enumerate(shapes)]
    check_variant(toy(normalizer=normalizer), *tensors, target="hopper", lse=False)


@ON_HOPPER
@OWN
@pytest.mark.parametrize("width", [64, 128])
def test_results_repeat_on_hopper(normalizer, width):
    """Bit for bit, but for a gradient of queries to which programs add; in two passes that does, too."""
    leaves = [torch.randn(2, 8, 2048, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    variant = toy(normalizer=normalizer)
    for deterministic in (False, True):
        found = []
        for _ in range(10):
            out = variant(*leaves, target="hopper", deterministic=deterministic)
            dquery, *others = torch.autograd.grad(out, leaves, torch.ones_like(out))
            found.append([out.detach(), *others, *([dquery] if deterministic else [])])
        assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again))


@ON_HOPPER
@pytest.mark.parametrize("width", [64, 128])
def test_small_weights_of_a_sigmoid_have_all_their_digits(width):
    """Those of many keys are small, and each is seen alone here; that of -inf is 0."""
    exponents = -torch.linspace(0.0, 60.0, width, device="cuda")
    of_keys = weft.tensor("of_keys", 1)
    variant = toy(mask=True, score=0.0 * score + of_keys[kv_pos], normalizer="sigmoid")
    given = torch.cat([exponents[:-1], torch.tensor([-torch.inf], device="cuda")])
    query, key = (torch.zeros(1, 1, width, width, device="cuda", dtype=torch.bfloat16) for _ in "qk")
    value = torch.eye(width, device="cuda", dtype=torch.bfloat16)[None, None]
    out = variant(query, key, value, of_keys=given, target="hopper")[0, 0].double()
    exact = torch.sigmoid(given.double())
    assert ((out - exact).abs() <= 2.0**-8 * exact).all() and not out[:, -1].any()
