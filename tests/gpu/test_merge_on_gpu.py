"""`weft.merge` on a GPU: parts over disjoint keys join to the call over all of them, with gradients of everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score

from ..support import check_errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

slopes = weft.tensor("slopes", 1)
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="merged_alibi")
LENGTH = 700


def operands(device: str = "cuda") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {n: torch.randn(2, h, LENGTH, 64, generator=generator) for n, h in (("query", 4), ("key", 2), ("value", 2))}
    return {n: t.to(device) for n, t in made.items()} | {"slopes": torch.linspace(0.1, 0.4, 4, device=device)}


def found(tensors: dict[str, Tensor], cuts: list[int], dtype: torch.dtype, is_defined: bool) -> dict[str, Tensor]:
    """out, lse and gradients of the parts between these cuts. is_defined: by the definition."""
    own = {n: t.detach().to(dtype if n != "slopes" or is_defined else torch.float32) for n, t in tensors.items()}
    query, key, value, slope = (t.requires_grad_() for t in own.values())
    call = ALIBI.reference if is_defined else ALIBI
    parts = [
        call(query, key[:, :, a:b], value[:, :, a:b], q_offset=-a, return_lse=True, slopes=slope)
        for a, b in pairwise([0, *cuts, LENGTH])
    ]
    out, lse = weft.merge(parts)
    generator = torch.Generator(out.device).manual_seed(3)
    dout, dlse = (torch.randn(t.shape, generator=generator, device=out.device) for t in (out, lse))
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    ((out * dout.to(out.dtype)).sum() + (seen * dlse.to(lse.dtype)).sum()).backward()
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": t.grad for n, t in own.items()}}  # type: ignore[dict-item]


@pytest.mark.slow(15)
@pytest.mark.filterwarnings("ignore:.*before the first key")  # a part begins behind some queries
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_join_to_the_whole_with_its_gradients(dtype: torch.dtype) -> None:
    """Queries before a part's first key see nothing of it: 0 and -inf, and no gradient."""
    tensors = operands()
    tensors = {n: t.to(dtype).float() for n, t in tensors.items()}
    exact = found(tensors, [], torch.float64, True)
    for cuts in ([], [7, 300]):
        plain, got = found(tensors, cuts, dtype, True), found(tensors, cuts, dtype, False)
        for n, right in exact.items():
            check_errors(got[n], right, plain[n], f"{dtype} {cuts} {n}", of_few=4.0)
