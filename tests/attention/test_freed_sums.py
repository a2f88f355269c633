"""Sums over the keys of a row are right where their derivatives are large and alike, though the output was rounded.

delta is of the rounded output. A slope that multiplies positions has, of its error, as much as positions are large.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.freed import is_freed
from weft.compiler.planning.signature import Dtypes, Signature, Widths

from ..support import check_operands, mostly, poisoned
from . import test_gradients_on_hopper as on_hopper

pytest.importorskip("triton")

slopes, gains, table = weft.tensor("slopes", 1), weft.tensor("gains", 2), weft.tensor("table", 2)
SCORES = {
    "distances": score - slopes[head] * (q_pos - kv_pos),
    "positions": score + slopes[head] * kv_pos,
    "positions_of_rows": score + gains[head, q_pos] * kv_pos,
    "of_batch": score + gains[batch, q_pos] * (1.0 * kv_pos + 100.0),
    "far_positions": score + 1000.0 * slopes[head] * kv_pos,
    "temperature": score * (1.0 + slopes[head]),
    "capped": 5.0 * weft.tanh((score + slopes[head] * (kv_pos - q_pos)) / 5.0),
    "infinite": score + weft.log(slopes[head] * slopes[head] * (1.0 * (q_pos - kv_pos))),  # but for hidden pairs
    "beside_a_table": score + slopes[head] * kv_pos + table[head, weft.minimum(weft.maximum(q_pos - kv_pos, 0), 7)],
}
MASKS = {name: masks.causal for name in SCORES} | {"infinite": kv_pos < q_pos}
L = 150


def variant(name: str, **options: Any) -> weft.Attention:
    return weft.Attention(SCORES[name], MASKS[name], name=name, **options)


def operands_of(declared: weft.Attention, length: int, batches: int, draw: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + draw)
    sizes = {"slopes": (4,), "gains": (4, length), "table": (4, 8), "sinks": (4,)}
    made = {n: torch.rand(size, generator=generator) * 0.1 + 0.01 for n, size in sizes.items()}
    return {t.name: made[t.name] for t in declared.canonical.tensors if t.name in made}  # not a seed


def check(declared: weft.Attention, dtype: torch.dtype, length: int = L, draws: int = 3, **options: Any) -> None:
    """The interpreter computes one batch row: test_sequences has it add up several."""
    batches, for_draw = 1 if options["target"] == "interpret" else 2, []
    for draw in range(draws):
        shapes = ((batches, 4, length, 32), (batches, 2, length, 32), (batches, 2, length, 32))
        tensors = [poisoned(shape, dtype, seed=10 * draw + n) for n, shape in enumerate(shapes)]
        for_draw.append((tensors, operands_of(declared, length, batches, draw)))
    check_operands(declared, for_draw, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    check(variant(name), dtype, target="cpu")


@pytest.mark.parametrize("name", mostly(["positions", "positions_of_rows", "infinite", "capped"], list(SCORES)))
def test_on_interpret(name: str) -> None:
    check(variant(name), torch.float16, 70, target="interpret")


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_with_a_gradient_of_lse(target: str) -> None:
    check(variant("positions"), torch.float16, 70, target=target, lse=True)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_a_row_that_sees_nothing_may_have_any_gradient_of_lse(target: str) -> None:
    """Its log-sum-exp is -inf, of which a gradient may be NaN: nothing of it reaches what others sum."""
    declared = weft.Attention(SCORES["positions"], kv_pos < q_pos, name="rows_without_keys")
    tensors = [torch.randn(1, 4, 40, 16, generator=torch.Generator().manual_seed(n)).half() for n in range(3)]
    found = []
    for of_nothing in (0.0, float("nan")):
        own = torch.full((4,), 0.02, requires_grad=True)
        inputs = [t.clone().requires_grad_() for t in tensors]
        out, lse = declared(*inputs, slopes=own, target=target, return_lse=True)
        dlse = torch.ones_like(lse)
        dlse[:, :, 0] = of_nothing
        found.append(torch.autograd.grad([out, lse], [own], [torch.ones_like(out), dlse])[0])
    assert torch.equal(*found) and found[0].abs().min() > 0


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_beside_a_sink(target: str, lse: bool) -> None:
    declared = variant("positions", sink=weft.tensor("sinks", 1)[head])
    check(declared, torch.float16, 70, target=target, lse=lse)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_beside_dropout(target: str) -> None:
    """The same weights are dropped in the definition."""
    check(variant("positions", dropout=0.3), torch.float16, 70, target=target, given={"seed": 5})


@pytest.mark.parametrize("kind", ["lengths", "packed"])
@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_sequences(target: str, kind: str) -> None:
    lengths = torch.tensor([30, 0, 70])
    declared, for_draw = variant("positions"), []
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    if kind == "lengths":
        options = {"q_lens": lengths.int(), "kv_lens": lengths.int()}
    for draw in range(3):
        rows, batches = (100, 1) if kind == "packed" else (70, 3)
        tensors = [poisoned((batches, 4, rows, 32), torch.float16, seed=10 * draw + n) for n in range(3)]
        for_draw.append((tensors, operands_of(declared, rows, batches, draw)))
    check_operands(declared, for_draw, target=target, given=options, q_offset=0)


@pytest.mark.parametrize("name", mostly(["positions", "capped"], ["positions", "positions_of_rows", "capped"]))
def test_on_hopper(name: str) -> None:
    """The text of its kernels, with and without a gradient of lse."""
    declared = variant(name)
    for draw in range(2):
        on_hopper.check(declared, L, L, operands=operands_of(declared, L, 2, draw), seed=draw, dlse=draw == 1)


def test_which_sums_are_freed() -> None:
    """Of 16 bits, where a softmax has a delta, and not of what q.k alone multiplies, whose mean is small."""

    def freed(declared: weft.Attention, dtype: str = "bf16") -> list[bool]:
        facts, wanted = facts_of(declared), frozenset(t.name for t in declared.canonical.tensors)
        signature = Signature("backward", "sm_90", Dtypes.all(dtype), Widths(64, 64), wanted=wanted)
        return [is_freed(g, signature, facts) for g in facts.operand_gradients(wanted)]

    for name in ("distances", "positions", "positions_of_rows", "capped"):
        assert freed(variant(name)) == freed(variant(name), "fp16") == [True], name
        assert freed(variant(name), "fp32") == [False], name
    assert freed(variant("temperature")) == [False]
    assert freed(variant("beside_a_table")) in ([True, False], [False, True])
    assert freed(weft.Attention(score + table[head, kv_pos], name="by_key")) == [False]
    sigmoid = weft.Attention(SCORES["positions"], normalizer="sigmoid", name="by_sigmoid")
    assert freed(sigmoid) == [False]
