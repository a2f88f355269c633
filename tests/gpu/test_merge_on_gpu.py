"""Results over disjoint keys on a GPU: `weft.merge`, with gradients of everything, and the kernel of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.runtime.joining import join_results

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


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "width", "n"), [(2, 8, 1000, 128, 1), (1, 3, 77, 40, 7), (3, 1, 1, 512, 2)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_joins_results(
    dtype: torch.dtype, batch: int, heads: int, rows: int, width: int, n: int, far: bool
) -> None:
    """Results of rows that lie apart, some of which have seen nothing, in place, beside float64 on the host."""
    generator = torch.Generator().manual_seed(rows)
    outs = torch.randn(n + 1, batch, rows, heads, width, generator=generator).to(dtype).transpose(2, 3)
    statistics = torch.randn(n + 1, 2, batch, heads, rows, generator=generator)
    statistics[:, 0] *= 1e8 if far else 8.0
    statistics[:, 0][torch.rand(n + 1, batch, heads, rows, generator=generator) < 0.2] = -torch.inf
    statistics[:, 1] = torch.where(statistics[:, 0] == -torch.inf, 0.0, statistics[:, 1].abs())
    statistics = statistics[:, : 1 + far]
    outs = torch.where((statistics[:, 0] == -torch.inf)[..., None], 0.0, outs)
    exact = outs[0].double(), statistics[0].double()
    join_results(exact, (outs[1:].double(), statistics[1:].double()), exact)
    on_gpu, their = outs.cuda(), statistics.cuda()
    first = on_gpu[0], their[0]
    join_results(first, (on_gpu[1:], their[1:]), first)
    assert first[0].dtype == dtype
    allowed = torch.finfo(dtype).eps * exact[0].abs() + 1e-6
    assert bool(((first[0].cpu().double() - exact[0]).abs() <= allowed).all())
    torch.testing.assert_close(first[1].cpu().double(), exact[1], atol=2e-6, rtol=1e-6)
