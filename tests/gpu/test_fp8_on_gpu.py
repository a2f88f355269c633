"""FP8 operands on a GPU: right for values of all widths, formats and descales, where lengths end a tile early."""

from __future__ import annotations

import pytest
import torch

from ..attention.test_fp8 import E4M3, E5M2, MASKED, check, with_fp8_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.sampled(60)
@pytest.mark.parametrize("per", [None, "head", 64, "token"])
@pytest.mark.parametrize("value_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("key_is_fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [33, 200])
@pytest.mark.parametrize("value_width", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [64, 128])
def test_widths_formats_and_descales(width, value_width, rows, dtype, key_is_fp8, value_dtype, per) -> None:
    tensors, options = with_fp8_values((width, value_width), rows, dtype, key_is_fp8, value_dtype, per, "cuda")
    check(MASKED, tensors, "triton", **options)
