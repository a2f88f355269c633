"""Models of Hugging Face transformers on a GPU under attn_implementation="weft": as exact as eager in bf16, and the
same tokens from caches that grow and from static ones, which transformers compiles and replays as CUDA graphs."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..models import test_transformers as small

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs weft-attention[transformers]"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _imported() -> None:
    """When a test begins: every worker collects this module, and few of them run it."""
    global small
    from ..models import test_transformers as small


# heads that the hopper target takes, and a window that is more than a tile
WIDER = {"hidden_size": 256, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 150,
         "attention_chunk_size": 90, "max_position_embeddings": 1024}  # fmt: skip
DENSE = ["Llama", "Mistral", "Gemma2", "Gemma3", "Qwen3"]
EXPERTS = ["GptOss", "DeepseekV3", "Llama4"]  # to others of which rounding sends tokens


def wide(name: str) -> tuple[Any, Any]:
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    sizes = small.WIDTH | small.SIZES[name]
    sizes |= {key: value for key, value in WIDER.items() if key in sizes or key == "hidden_size"}
    config = getattr(small.transformers, f"{name}{text}Config")(**sizes)
    return small.both(lambda: getattr(small.transformers, f"{name}ForCausalLM")(config))


def as_exact_as_eager(made: Callable[[], tuple[Any, Any]], seen: Tensor | None, **inputs: Any) -> None:
    """Logits and gradients in bf16 are at most twice as far from float32 as those of eager in bf16."""
    exact, _ = (model.cuda() for model in made())
    eager, ours = (model.cuda().bfloat16() for model in made())
    found = []
    for model in (exact, eager, ours):
        logits = model(**inputs).logits
        logits = logits[seen.bool()] if seen is not None else logits
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).cuda()
        grads = small.gradients(model, (logits.float() * weight).sum())
        found.append({"logits": logits.detach().float(), **{name: grad.float() for name, grad in grads.items()}})
    wanted, theirs, got = found
    assert got.keys() == wanted.keys()
    largest = max(value.norm() for name, value in wanted.items() if name != "logits")
    for name, value in wanted.items():
        rounding = 0.01 * (value.norm() if name == "logits" else max(value.norm(), 0.01 * largest))
        assert (got[name] - value).norm() <= 2 * (theirs[name] - value).norm() + rounding, name


def long(side: str) -> Tensor:
    seen = torch.ones(2, 300, dtype=torch.long, device="cuda")
    if side == "left":
        seen[0, :70] = 0
    else:
        seen[1, -133:] = 0
    return seen


@pytest.mark.slow(22)
@pytest.mark.sampled(22)
@pytest.mark.parametrize("inputs", ["whole", "left", "right", "packed"])
@pytest.mark.parametrize("name", DENSE)
def test_a_decoder_is_as_exact_as_eager(name: str, inputs: str) -> None:
    ids = small.tokens(2, 300).cuda()
    if inputs in ("left", "right"):
        as_exact_as_eager(lambda: wide(name), long(inputs), input_ids=ids, attention_mask=long(inputs))
    elif inputs == "whole":
        as_exact_as_eager(lambda: wide(name), None, input_ids=ids)
    else:
        packed = torch.cat([torch.arange(70), torch.arange(201), torch.arange(29)])[None].cuda()
        as_exact_as_eager(lambda: wide(name), None, input_ids=ids[:1], position_ids=packed, use_cache=False)


@pytest.mark.slow(22)
def test_t5_is_as_exact_as_eager() -> None:
    ids, answer = small.tokens(2, 300).cuda(), small.tokens(2, 40).cuda()
    as_exact_as_eager(small.t5, None, input_ids=ids, attention_mask=long("right"), decoder_input_ids=answer)


@pytest.mark.slow(8)
@pytest.mark.sampled(19)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_the_same_logits_are_generated(name: str, cache: str) -> None:
    eager, ours = (model.cuda() for model in wide(name))
    assert {*small.SIZES} == {*DENSE, *EXPERTS}
    ids = small.tokens(2, 15).cuda()
    options = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
               "attention_mask": small.padding("left").cuda(), "cache_implementation": cache}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, where it compiles
        expected, got = (model.generate(ids, **options) for model in (eager, ours))
        again = ours.generate(ids, **options)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(torch.stack(again.logits), torch.stack(got.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.slow(39)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch's advice, where it compiles
def test_a_compiled_model_trains() -> None:
    eager, ours = (model.cuda() for model in wide("Gemma2"))
    compiled = torch.compile(ours, fullgraph=True)
    ids, seen = small.tokens(2, 300).cuda(), long("left")
    found = []
    for model, owner in ((eager, eager), (compiled, ours)):
        logits = model(ids, attention_mask=seen, use_cache=False).logits[seen.bool()]
        found.append((logits.detach(), small.gradients(owner, logits.square().mean())))
    torch.testing.assert_close(found[1][0], found[0][0], atol=2e-3, rtol=2e-3)
    largest = max(grad.norm() for grad in found[0][1].values())
    for name, grad in found[0][1].items():
        assert (found[1][1][name] - grad).norm() < 5e-3 * max(grad.norm(), 0.01 * largest), name
