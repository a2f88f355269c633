"""FP8 operands on a GPU: right for values of all widths, formats and descales, where lengths end a tile early."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import kv_pos, q_pos

from ..support import check_errors, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MASKED = weft.Attention(mask=(kv_pos // 16 == q_pos // 16) | (kv_pos <= q_pos), name="blocks_or_causal")


@pytest.mark.sampled(60)
@pytest.mark.parametrize("per", [None, "head", 64, "token"])
@pytest.mark.parametrize("value_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("key_is_fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [33, 200])
@pytest.mark.parametrize("value_width", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [64, 128])
def test_widths_formats_and_descales(width, value_width, rows, dtype, key_is_fp8, value_dtype, per) -> None:
    query, key = (poisoned((2, h, rows, width), dtype, "cuda", seed=h) for h in (4, 2))
    value, options = poisoned((2, 2, rows, value_width), torch.float32, "cuda", seed=1), {}
    key = key.to(E4M3) if key_is_fp8 else key
    if per is None:
        value = value.to(value_dtype)
    else:
        value, options["v_descale"] = weft.fp8.quantize(value, per=per, dtype=value_dtype)
    found = MASKED(query, key, value, target="triton", **options)
    exact = MASKED.reference(query.double(), key, value, out_dtype=torch.float64, **options)
    check_errors(found, exact, MASKED.reference(query, key, value, **options), "out")
