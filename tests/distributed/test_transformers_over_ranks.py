"""Models of transformers on two ranks: loss, logits and gradients are those of one process under "eager"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from weft.distributed import ContextParallel

from .on_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own start of processes
]
pytest.importorskip("transformers")  # the extra weft-attention[transformers]

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "max_position_embeddings": 128,
}  # fmt: skip


def models(more: dict[str, Any] | None = None, times: int = 1) -> dict[str, tuple[type, Any]]:
    """A window alone; windows and soft caps in turn with all keys; windows and sinks in turn with sinks; chunks.

    more: of other sizes. times: how much wider windows and chunks are.
    """
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
        MistralConfig,
        MistralForCausalLM,
    )  # fmt: skip

    sizes = SIZES | (more or {})
    return {
        "mistral": (MistralForCausalLM, MistralConfig(**sizes, sliding_window=9 * times)),
        "gemma 2": (Gemma2ForCausalLM, Gemma2Config(**sizes, sliding_window=7 * times, attn_logit_softcapping=5.0,
                                                    query_pre_attn_scalar=8)),
        "gpt-oss": (GptOssForCausalLM, GptOssConfig(**sizes, sliding_window=6 * times, num_local_experts=2,
                                                    num_experts_per_tok=1)),
        "llama 4": (Llama4ForCausalLM, Llama4TextConfig(**sizes, intermediate_size_mlp=48, num_local_experts=2,
                                                        attention_chunk_size=10 * times)),
    }  # fmt: skip


def compared(rank: int) -> list[str]:
    cp, made = ContextParallel(), models()
    wrong = [text for name, model in made.items() for text in compared_model(cp, name, *model)]
    return wrong + refused(cp)


def compared_model(
    cp: ContextParallel, name: str, kind: Any, config: Any, device: str = "cpu", length: int = 33, off: float = 1e-5,
    relative: float = 1e-4,
) -> list[str]:  # fmt: skip
    """What differs where a model trains on two ranks."""
    from weft.integrations import transformers as door

    door.register()
    wrong = list[str]()
    tokens = torch.randint(1, 50, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.clone()
    labels[:, 5:8] = -100
    torch.manual_seed(2)
    alone = kind._from_config(config, attn_implementation="eager").to(device)
    divided = kind._from_config(config, attn_implementation="weft").to(device)
    divided.load_state_dict(alone.state_dict())
    if name == "mistral":
        divided.gradient_checkpointing_enable()
    if device == "cpu":  # the transformers of a machine with GPUs may be another one
        assert name == "llama 4" or not alone.supports_context_parallel  # transformers itself does not
    right = alone(tokens, labels=labels, use_cache=False)
    right.loss.backward()
    with door.context_parallel(cp, tokens.shape[1]) as rows:
        found = divided(**rows.inputs(tokens, labels), use_cache=False)
    found.loss.backward()  # layers that are computed again here are outside of the region
    loss = found.loss.detach()
    dist.all_reduce(loss)
    logits = rows.unshard(found.logits.detach())
    if not torch.allclose(loss, right.loss, atol=off):
        wrong.append(f"{name}: loss {loss} in place of {right.loss}")
    if not torch.allclose(logits, right.logits, atol=10 * off):
        wrong.append(f"{name}: logits are off by {(logits - right.logits).abs().max():.1e}")
    for (n, p), q in zip(alone.named_parameters(), divided.parameters(), strict=True):
        gradient = torch.zeros_like(p) if q.grad is None else q.grad
        dist.all_reduce(gradient)
        if p.grad is not None and not torch.allclose(gradient, p.grad, atol=off, rtol=relative):
            wrong.append(f"{name}: gradient of {n} is off by {(gradient - p.grad).abs().max():.1e}")
    return wrong


def refused(cp: ContextParallel) -> list[str]:
    from transformers import T5Config, T5Model

    from weft.integrations import transformers as door

    kind, config = models()["mistral"]
    model = kind._from_config(config, attn_implementation="weft")
    tokens, wrong = torch.randint(1, 50, (2, 32), generator=torch.Generator().manual_seed(1)), []

    def told(expected: str, call: Any) -> None:
        try:
            with door.context_parallel(cp, 32) as rows:
                call(rows)
            wrong.append(f"nothing was said: {expected}")
        except (weft.WeftError, weft.UnavailableError) as error:
            if expected not in str(error):
                wrong.append(f"expected {expected!r}, got {error}")

    told("expected 16 queries and keys, the rows of rank", lambda rows: model(tokens))
    padded = torch.ones(2, 16, dtype=torch.int64)
    padded[0, :3] = 0
    told(
        "padding: an attention_mask of one rank", lambda rows: model(**rows.inputs(tokens) | {"attention_mask": padded})
    )
    starts_anew = {"attention_mask": None, "position_ids": (torch.arange(16) % 7).expand(2, -1), "use_cache": False}
    told("the mask reads a tensor by row", lambda rows: model(**rows.inputs(tokens) | starts_anew))
    told("regions are not put into each other", lambda rows: door.context_parallel(cp, 32).__enter__())
    small = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    biased = T5Model._from_config(small, attn_implementation="weft").encoder
    told("position_bias: not divided over ranks", lambda rows: biased(rows.shard(tokens)))
    pairs = {"attention_mask": torch.ones(2, 1, 16, 16, dtype=torch.bool)}
    told("the mask that transformers makes inside, got a tensor", lambda rows: model(**rows.inputs(tokens) | pairs))
    return wrong


def test_models_that_transformers_does_not_divide(tmp_path: Path) -> None:
    wrong = on_ranks(2, compared, tmp_path)
    assert not any(wrong), "\n".join(wrong)
