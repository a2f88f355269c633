"""Scores that are NaN or infinite behind the last row or key, or in hidden pairs: nothing of that reaches a result.

Those of `hopper` by the text of its kernels, run by gluon.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_len, q_pos, score

from ..support import check_variant, mostly, poisoned
from . import test_gradients_on_hopper as dense
from . import test_lengths_on_hopper as ragged

pytest.importorskip("triton")

slopes, table = weft.tensor("slopes", 1), weft.tensor("table", 1)
of_rows, of_keys, pad = weft.tensor("of_rows", 2), weft.tensor("of_keys", 2), weft.tensor("pad", 2)
LEFT, AWAY = 1.0 * (kv_len - q_pos), q_pos - kv_pos  # LEFT is above 0 up to the last row
ROWS, NUMBER, ROOM = 130, ragged.NUMBER, 420
CAUSAL = masks.causal
VARIANTS = {
    "factor": weft.Attention(score * weft.rsqrt(LEFT)),
    "added": weft.Attention(score + weft.log(LEFT), CAUSAL),
    "infinite": weft.Attention(score - weft.log(LEFT), CAUSAL),
    "quotient": weft.Attention(score / (kv_len - q_pos), CAUSAL),
    "too_large": weft.Attention(score + 0.1 * weft.exp(-2.0 * LEFT), CAUSAL),
    "of_keys": weft.Attention(score - weft.log(1.0 * (kv_len - kv_pos)), CAUSAL),
    "hidden": weft.Attention(score - slopes[head] * weft.rsqrt(1.0 * AWAY), kv_pos < q_pos),
    "far": weft.Attention(score + pad[batch, kv_pos] + weft.log(LEFT), CAUSAL),
    "sunk": weft.Attention(score * weft.rsqrt(LEFT), CAUSAL, sink=slopes[head]),
    "dropped": weft.Attention(score * weft.rsqrt(LEFT), CAUSAL, dropout=0.2),
    "by_distance": weft.Attention(score - slopes[head] * weft.log(1.0 * (kv_len - AWAY)), CAUSAL),
    # read by distance: entries that no pair has are NaN
    "table": weft.Attention(score + 0.5 * table[weft.minimum(weft.abs(AWAY), 300)]),
    # derivatives by operands: sums over all pairs, over keys, over queries
    "of_a_head": weft.Attention(score + slopes[head] * weft.log(LEFT), CAUSAL),
    "of_each_row": weft.Attention(score + of_rows[head, weft.maximum(q_pos, 0)] * weft.rsqrt(LEFT), CAUSAL),
    "of_each_key": weft.Attention(score + of_keys[head, kv_pos] * weft.rsqrt(LEFT), CAUSAL),
}
# a sequence without queries or without keys has lengths of 0
LENGTHS = {
    "of_queries": weft.Attention(score * weft.rsqrt(1.0 * q_len), CAUSAL),
    "of_the_keys": weft.Attention(0.3 * score * weft.log(1.0 * kv_len), CAUSAL),
    "learned": weft.Attention(score * (slopes[head] / q_len), CAUSAL),
    "capped": weft.Attention(5.0 * weft.tanh(score * weft.rsqrt(1.0 * kv_len) / 5.0), CAUSAL),
}
PAIRWISE = {kind: weft.Attention(score * weft.rsqrt(LEFT), CAUSAL, normalizer=kind) for kind in ("sigmoid", "relu")}
ALL = {name: v.replace(name=f"ends_{name}") for name, v in {**VARIANTS, **LENGTHS, **PAIRWISE}.items()}


def operands_of(attention: weft.Attention, rows: int, batches: int, room: int = ROOM) -> dict[str, Tensor]:
    """NaN in entries that no pair reads."""
    generator = torch.Generator().manual_seed(3)
    made = {
        "slopes": torch.rand(4, generator=generator) + 0.5,
        "table": torch.randn(room, generator=generator), "of_rows": torch.randn(4, room, generator=generator),
        "of_keys": torch.randn(4, room, generator=generator),
        "pad": torch.where(torch.arange(room) % 5 == 3, -1e9, 0.0).repeat(batches, 1),
    }  # fmt: skip
    for name in ("table", "of_rows", "of_keys"):
        made[name][..., rows:] = torch.nan
    return {t.name: made[t.name] for t in attention.canonical.tensors if t.name in made}


# -- hopper ------------------------------------------------------------------------------------------------------------
DENSE = [n for n in ALL if n not in ("dropped", *PAIRWISE)]  # dropout has tests of its own kernels


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", mostly(["factor", "added", "table", "of_a_head", "sunk"], DENSE))
def test_rows_that_are_not_there(name: str, deterministic: bool) -> None:
    operands = operands_of(ALL[name], ROWS, 2)
    dense.check(ALL[name], ROWS, ROWS, deterministic=deterministic, operands=operands, dtype=torch.float16)


@pytest.mark.parametrize("name", mostly(["added"], ["added", "infinite", "of_keys", "far"]))
def test_keys_by_columns(name: str) -> None:
    operands = operands_of(ALL[name], ROWS, 2)
    dense.check(ALL[name], ROWS, ROWS, 256, deterministic=True, operands=operands, leave_out=tuple(operands))


@pytest.mark.parametrize("kind", ragged.KINDS)
@pytest.mark.parametrize("name", mostly(["added", "of_the_keys", "learned", "table"], DENSE))
def test_sequences_of_their_own_lengths(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "DTYPE", torch.float16)
    operands = operands_of(ALL[name], max(ragged.LENS[1]), NUMBER)
    wanted = (*ragged.MAIN, *(n for n in operands if n != "pad"))
    for deterministic in (False, True):
        ragged.check(ALL[name], kind, heads=2, deterministic=deterministic, operands=operands, wanted=wanted)


BEFORE = {
    "log": weft.Attention(score + weft.log(1.0 * (AWAY + 1)), CAUSAL, name="log_before"),
    "root": weft.Attention(score + weft.sqrt(1.0 * q_pos), CAUSAL, name="root_before"),
}


@pytest.mark.parametrize("kind", mostly(["packed"], ragged.KINDS))
@pytest.mark.parametrize("value_dim", mostly([64], [64, 256]))
@pytest.mark.parametrize("name", BEFORE)
def test_a_last_row_that_sees_nothing(name: str, value_dim: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind it have its position in scores, where these may be NaN: they see what it sees, and no more."""
    monkeypatch.setattr(ragged, "DTYPE", torch.float16)
    monkeypatch.setattr(ragged, "LENS", ([3, 81], [92, 58]))
    monkeypatch.setattr(ragged, "NUMBER", 2)
    offset = torch.tensor([-4, 150], dtype=torch.int32)
    for deterministic in (False, True):
        wanted = ("query", "value")
        ragged.check(
            BEFORE[name], kind, 64, value_dim, deterministic=deterministic, wanted=wanted, offset=offset, operands={}
        )


@pytest.mark.parametrize("name", mostly(["sigmoid"], list(PAIRWISE)))
def test_weights_of_pairs_alone(name: str) -> None:
    ragged.check(ALL[name], "padded", deterministic=False)


def test_scores_that_have_a_value_everywhere_cost_nothing() -> None:
    """Positions are cut where a score may be undefined behind the last row. Tiles over it are edge tiles, which ask
    whether rows exist, only where it may be undefined at any position."""
    shape = weft.shape(heads=4, q_len=512, head_dim=64)
    alibi = weft.Attention(score + slopes[head] * (kv_pos - q_pos), CAUSAL, name="alibi")
    cases = {"added": (True, False), "by_distance": (False, True), "table": (False, True)}
    for attention, (cuts, looks) in ((alibi, (False, False)), *((ALL[n], case) for n, case in cases.items())):
        text = attention.source(shape, direction="backward", device="h200", target="hopper")
        assert ("known_row = gl.minimum(q_pos, last_position)" in text) == cuts
        assert ("keep & (q_rows <= last_position)" in text) == looks
        assert ("is_edge | (query_tile * BLOCK_Q + BLOCK_Q > q_len)" in text) == looks


# -- triton's kernels in the interpreter, and cpu ----------------------------------------------------------------------
SHORT = 37
WAYS: dict[str, dict[str, Any]] = {
    "dense": {}, "lengths": {"q_lens": torch.tensor([33, 0]), "kv_lens": torch.tensor([33, 7])},
    "no_keys": {"q_lens": torch.tensor([33, 5]), "kv_lens": torch.tensor([33, 0])},
}  # fmt: skip


@pytest.mark.parametrize("way", mostly(["no_keys"], list(WAYS)))
@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize("name", mostly(["added", "hidden", "table", "of_the_keys"], list(ALL)))
def test_other_targets(name: str, target: str, way: str) -> None:
    attention = ALL[name]
    operands = operands_of(attention, SHORT, 2, 310 if name == "table" else 90)
    tensors = [poisoned((2, heads, SHORT, 16), torch.float32, seed=n) for n, heads in enumerate((4, 2, 2))]
    learned = tuple(n for n in operands if n not in ("pad", "table"))
    seeded = {"seed": 7} if name == "dropped" else {}
    given = {**operands, **WAYS[way], **seeded}
    lse = attention.canonical.weighs.saves_lse
    check_variant(attention, *tensors, operands=given, differentiate=learned, target=target, lse=lse)


@pytest.mark.parametrize("schedule", mostly(["standard"], ["standard", "streaming"]))
@pytest.mark.parametrize("name", mostly(["added", "hidden"], ["factor", "added", "infinite", "hidden", "far", "sunk"]))
def test_other_schedules(name: str, schedule: str) -> None:
    operands = operands_of(ALL[name], SHORT, 2, 90)
    tensors = [poisoned((2, heads, SHORT, 16), torch.float32, seed=n) for n, heads in enumerate((4, 2, 2))]
    check_variant(ALL[name], *tensors, operands=operands, target="interpret", schedule=schedule)


@pytest.mark.parametrize("name", mostly(["added", "of_keys"], ["factor", "added", "of_keys", "hidden", "sunk", "far"]))
def test_divided_keys(name: str) -> None:
    operands = operands_of(ALL[name], 70, 2, 90)
    tensors = [poisoned((2, heads, n, 16), torch.float32, seed=n) for heads, n in ((4, 3), (2, 70), (2, 70))]
    check_variant(ALL[name], *tensors, operands=operands, gradients=False, target="interpret", schedule="split_kv")
