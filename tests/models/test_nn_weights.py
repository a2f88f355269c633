"""Weights of known models: those of transformers load by name, and give what its own modules give."""

from __future__ import annotations

import pytest
import torch

from weft import nn

pytest.importorskip("transformers", reason="needs transformers, whose modules are compared")
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "attn_implementation": "eager"}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_theta": 500_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_theta": 10_000.0, "rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip


def compare(mine, theirs, rotary):
    assert mine.load_state_dict(theirs.state_dict()).missing_keys == []
    x, positions = torch.randn(2, 41, 64), torch.arange(41).repeat(2, 1)
    mask = torch.full((41, 41), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=rotary(x, positions), attention_mask=mask)
    torch.testing.assert_close(mine(x), expected, atol=2e-6, rtol=1e-5)


def test_llama():
    config = LlamaConfig(**GROUPED, rope_parameters=LLAMA3)
    mine = nn.Attention(64, 4, 2, rope=nn.Rotary(16, 500_000.0, nn.Llama3Scaling(8.0, 32)))
    compare(mine, LlamaAttention(config, 0), LlamaRotaryEmbedding(config))


def test_qwen3():
    config = Qwen3Config(**GROUPED, head_dim=32)
    rope = nn.Rotary(32, config.rope_parameters["rope_theta"])
    mine = nn.Attention(64, 4, 2, 32, rope=rope, qk_norm=config.rms_norm_eps)
    compare(mine, Qwen3Attention(config, 0), Qwen3RotaryEmbedding(config))


@pytest.mark.parametrize("q_lora", [None, 24])
def test_deepseek_v3(q_lora):
    config = DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=q_lora, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, max_position_embeddings=4096 * 40, rope_parameters=YARN,
    )  # fmt: skip
    scaling = nn.YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    rope = nn.Rotary(8, scaling=scaling, interleaved=True)
    mine = nn.LatentAttention(64, 4, q_lora=q_lora, kv_lora=32, nope=16, rope_dim=8, value_dim=12, rope=rope)
    compare(mine, DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config))
