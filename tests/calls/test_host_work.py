"""What a repeated call costs the host, counted in calls of functions and torch ops, which no busy machine changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen import products
from weft.codegen.launch.fixed import Fixed
from weft.codegen.launch.quantizing import Quantizing

from ..recorded import Recorded
from ..support import calls_of

window, slopes = weft.scalar("window", int), weft.tensor("slopes", 1)
CAUSAL = weft.Attention(mask=masks.causal, name="host_causal")
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="host_recent")
ALIBI = weft.Attention(score=score + slopes[head] * (kv_pos - q_pos), mask=masks.causal, name="host_alibi")
QUERY, KEYS, VALUES = (torch.randn(1, 8, n, 64) for n in (1, 64, 64))
own_kernel = pytest.mark.skipif(products.own_attention() is None, reason="torch's own attention is not there")


def grown(variant: weft.Attention, **operands: Any) -> Callable[[], Any]:
    """A decode whose cache grows by a token a call."""
    length = iter(range(33, 64))

    def step() -> Any:
        now = next(length)
        return variant(QUERY, KEYS[:, :, :now], VALUES[:, :, :now], target="cpu", **operands)

    return step


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


REPEATED = {
    "causal": (CAUSAL, {}),
    "window": (RECENT, {"window": 99}),
    "alibi": (ALIBI, {"slopes": torch.ones(8)}),
}


@own_kernel
@pytest.mark.parametrize("name", REPEATED)
def test_a_decode_of_a_short_cache_on_a_cpu(name: str, recorded: Recorded) -> None:
    """34 and 53 calls of functions, 45 and 73, 132 and 134 in November 2026; 55, 76 and 130 before calls of a CPU
    repeated, 67, 177 and 216 before that."""
    variant, operands = REPEATED[name]
    repeats = calls_of(lambda: variant(QUERY, KEYS, VALUES, target="cpu", **operands))
    recorded("calls", repeats=repeats, grows=calls_of(grown(variant, **operands)))
    assert repeats < 150


@own_kernel
def test_a_short_call_on_a_cpu_is_one_op_that_is_looked_at() -> None:
    """The module's own functions, as the dispatcher is passed by where nothing watches."""
    variant = CAUSAL.replace(name="host_one_op")
    variant(QUERY, KEYS, VALUES)
    (ready,) = variant._variant._forwards.values()
    with torch.no_grad(), Ops() as ops:
        sizes = 1, 8, 8, 1, 64, 64
        out, lse = ready.launcher.module.attended_as_a_whole(QUERY, KEYS, VALUES, (), 63, sizes)
    assert ops.names == ["_scaled_dot_product_flash_attention_for_cpu", "count_nonzero", "_local_scalar_dense"]
    assert out.is_contiguous() and lse.is_contiguous()


@own_kernel
def test_results_lie_as_they_do_where_they_are_made_by_tiles() -> None:
    rows = torch.randn(2, 5, 8, 64).transpose(1, 2)  # [B, L, H, D] in memory
    first, one = torch.randn(5, 2, 8, 64).permute(1, 2, 0, 3), torch.randn(2, 1, 5, 64).expand(2, 8, 5, 64)
    for query in (rows, rows.contiguous(), first, one):  # compiled code relies on what fake tensors have, too
        out, lse = CAUSAL(query, query, query, return_lse=True)
        of_tiles, lse_of_tiles = RECENT(query, query, query, window=4, return_lse=True)
        assert out.stride() == of_tiles.stride()
        assert out.stride() == query.stride() or query is first or query is one
        assert lse.stride() == lse_of_tiles.stride() and lse.dtype == torch.float32


def test_a_step_appended_to_an_fp8_cache_is_a_lookup_and_a_launch() -> None:
    """22 calls of functions in November 2026; 32 before constants of the kernel were kept by the kind of rows."""
    made: list[object] = []
    kernels: Any = SimpleNamespace(  # without a device
        runs={}, interprets=False, starts_early=False, current_stream=int, device=0,
        prepared=lambda *given: made.append(given) or (lambda *given: None, ()),
    )  # fmt: skip
    kernels.launch = partial(Fixed.launch, kernels)
    launches = Quantizing(kernels)
    rows = torch.randn(2, 8, 1, 64)
    pool, descales = torch.zeros(4, 8, 16, 64).to(torch.float8_e4m3fn), torch.ones(4, 8, 16, 1)
    slots = torch.tensor([[3], [17]], dtype=torch.int32)

    def step(by_token: bool = True) -> None:
        launches.append((rows, rows), (pool, pool), slots, (descales, descales), by_token)

    step()
    assert calls_of(step) <= 24
    assert len(made) == 1
    step(by_token=False)
    assert len(made) == 2
