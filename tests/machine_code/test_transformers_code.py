"""Variants that models of transformers ask for compile for a GPU that is not here, on the target for large heads."""

from __future__ import annotations

import pytest
import torch

import weft

pytest.importorskip("triton")
masking = pytest.importorskip("transformers.masking_utils")  # the extra weft-attention[transformers]
from weft.integrations.masking import Mask  # noqa: E402
from weft.integrations.rules import mask, placed  # noqa: E402
from weft.integrations.traced import kind_of  # noqa: E402
from weft.integrations.transformers import DECLARED, declared  # noqa: E402

from .ahead import compiled  # noqa: E402

pytestmark = pytest.mark.compiles

IDS, SEEN = torch.zeros(2, 8, dtype=torch.long), torch.tensor([[False] + [True] * 7] * 2)
FUNCTIONS = {
    "a padded window": masking.sliding_window_causal_mask_function(4),
    "images": masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(IDS)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_with_padding(name: str) -> None:
    rule = mask(2, 8, 8, mask_function=FUNCTIONS[name], attention_mask=SEEN)
    assert isinstance(rule, Mask)
    text, operands, _ = placed(rule.rule, by_row=False)
    kinds = tuple((name, kind_of(given)) for name, given in (*operands.items(), ("sinks", torch.zeros(16))))
    variant: weft.Attention = getattr(DECLARED, declared(text, kinds, (), 50.0, 0.0625))
    assert "flash_forward=hopper" in variant.explain(weft.shape(heads=16, q_len=4096, head_dim=128), device="h200")
    module = compiled(variant, "forward", 128)
    assert module.kernels["flash_forward"].count("wgmma.mma_async") and "kv_spans" in module.kernels
