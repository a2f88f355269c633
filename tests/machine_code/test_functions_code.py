"""Functions of the language that kernels compute by helpers of their own: they compile, and nothing spills for them."""

from __future__ import annotations

import pytest

import weft
from weft import kv_pos, q_pos, score

from ..support import mostly
from .ahead import compiled, count_opcode

pytest.importorskip("triton")

pytestmark = pytest.mark.compiles

MOST = {"flash_backward": 8, "flash_dkey_dvalue": 160}  # bytes of a thread, as with tanh
SOFT = weft.Attention(weft.softplus(score), kv_pos <= q_pos, name="soft")


@pytest.mark.parametrize("direction", mostly(("forward",), ("forward", "backward")))
@pytest.mark.parametrize(("device", "target"), [("h200", "triton"), ("h200", "hopper"), ("a100", "triton")])
def test_softplus_and_logsigmoid(direction: str, device: str, target: str) -> None:
    """No logarithm and no division in the loop: one exponential, and a polynomial."""
    wanted = frozenset({"query", "key", "value"}) if direction == "backward" else frozenset()
    module = compiled(SOFT, direction, 64, target=target, device=device, wanted=wanted)
    for kernel in module.kernels.values():
        assert device == "a100" or kernel.spilled <= MOST.get(kernel.name, 0), kernel.name
    if direction == "forward":
        loops = module.kernels["flash_forward"].product_loops()
        assert not any(count_opcode("MUFU.(LG2|RCP)", loop) for loop in loops)
