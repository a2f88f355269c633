"""Gradients of what a score reads on `hopper`: the text of its kernels, run by gluon.py, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.compiler.analysis.tiles.facts import facts_of
from weft.runtime.call import Call, Choices, Dense
from weft.runtime.run.gradients import operand_gradients

from ..support import check_errors, mostly, poisoned
from . import test_lengths_on_hopper as ragged
from . import test_levels as levels
from .test_flash_on_hopper import launch

pytest.importorskip("triton")

BATCHES, HEADS, ROOM = 2, 4, 420  # room: positions that operands have entries for
MAIN = ("query", "key", "value")
by_head, by_batch, gains = weft.tensor("by_head", 2), weft.tensor("by_batch", 2), weft.tensor("gains", 2)
entries, slopes, kinds = weft.tensor("entries", 1), weft.tensor("slopes", 1), weft.tensor("kinds", 2, int)


def entry_of(position: weft.Expr) -> weft.Expr:
    """What a tensor of ids, of which no range is known, chooses at a position."""
    return entries[weft.maximum(weft.minimum(kinds[batch, position], 8), 0)]


SCORES = {
    # by key: the pass that owns keys, also the one of one pass
    "of_keys": score + by_head[head, kv_pos],
    "of_all_heads": 0.5 * score + by_batch[batch, kv_pos],
    "gated": score * weft.sigmoid(by_head[head, kv_pos]),
    "looked_up": score + entry_of(kv_pos),
    # by query: the pass that owns queries
    "of_queries": score * (1.0 + gains[head, q_pos]),
    "of_kinds_of_queries": score + weft.tanh(score / 4.0) * entry_of(q_pos),
    # both, and a number a head beside them
    "of_both": score * (1.0 + gains[head, q_pos]) + by_head[head, kv_pos] + slopes[head] * (kv_pos - q_pos),
    "capped": 5.0 * weft.tanh((score + by_head[head, kv_pos]) / 5.0),
}
LEVELS = {n: s for n, s in levels.SCORES.items() if n not in ("with_a_slope", "capped")}
MASKS = {"causal": masks.causal, "none": True, "window": masks.sliding_window(90)}
MASKS["quotients"] = weft.floor(kv_pos / 7) <= weft.floor(q_pos / 7)  # divided as IEEE 754 says


def operands_of(declared: Any, batches: int = BATCHES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = {"by_head": (HEADS, ROOM), "by_batch": (batches, ROOM), "gains": (HEADS, ROOM)}
    sizes |= {"entries": (9,), "slopes": (HEADS,)}
    made = {n: torch.randn(size, generator=generator) * 0.5 for n, size in sizes.items()}
    made["kinds"] = torch.randint(0, 9, (batches, ROOM), generator=generator)
    return {t.name: made[t.name] for t in declared.canonical.tensors}


def check(
    declared: weft.Attention, q_len: int = 130, kv_len: int = 200, dim: int = 64, value_dim: int | None = None,
    kv_heads: int = 2, deterministic: bool = False, leave_out: tuple[str, ...] = (), operands: Any = None,
    seed: int = 0, dlse: bool = True, dtype: torch.dtype = torch.bfloat16, batches: int = BATCHES,
) -> dict[str, Tensor]:  # fmt: skip
    """All gradients of one call but some; its output and log-sum-exp are those of the definition."""
    operands = operands_of(declared, batches) if operands is None else operands
    shapes = ((HEADS, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim or dim))
    tensors = {n: poisoned((batches, *s), dtype, seed=i) for i, (n, s) in enumerate(zip(MAIN, shapes))}
    dout = poisoned((batches, HEADS, q_len, value_dim or dim), dtype, seed=3)
    torch.manual_seed(4)
    of_lse = torch.randn(batches, HEADS, q_len) if dlse else None
    offset = max(0, kv_len - q_len)
    floats = [n for n, t in operands.items() if t.is_floating_point()]
    wanted = [n for n in (*MAIN, *floats) if n not in leave_out]

    def of_definition(kind: torch.dtype) -> dict[str, Tensor]:
        leaves = {n: t.to(kind) if t.is_floating_point() else t for n, t in {**tensors, **operands}.items()}
        leaves |= {n: leaves[n].detach().clone().requires_grad_() for n in wanted}
        given = {n: leaves[n] for n in operands}
        out, lse = declared.reference(*(leaves[n] for n in MAIN), **given, q_offset=offset, return_lse=True)
        above = (dout.to(kind), *([of_lse.to(lse.dtype)] if of_lse is not None else []))
        found = torch.autograd.grad((out, lse)[: len(above)], [leaves[n] for n in wanted], above)
        return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(wanted, found)}}

    exact, usual = of_definition(torch.float64), of_definition(dtype)
    lse = exact["lse"].float()
    lse = torch.stack([lse, torch.zeros_like(lse)]) if facts_of(declared).scores_lie_far else lse
    call = Call(*tensors.values(), None, operands, Dense(offset), Choices(), dim)
    found = {f"d{n}": torch.full_like(tensors[n], torch.nan) for n in wanted if n in MAIN}
    results = {"out": exact["out"].to(dtype), "lse": lse, "dout": dout, "dlse": of_lse, **found}
    sums = launch(declared, call, results, wanted, deterministic, seed)
    bound = declared._variant
    read = bound.facts.operand_gradients(frozenset(wanted))
    found |= {f"d{n}": g for n, g in operand_gradients(call, frozenset(wanted), read, sums).items()}
    assert found.keys() == {f"d{n}" for n in wanted}
    for name, gradient in found.items():
        check_errors(gradient, exact[name], usual[name], f"{declared.name} {name}")
    return found


def variant(name: str, mask: str = "causal") -> weft.Attention:
    return weft.Attention(SCORES[name], MASKS[mask], name=f"{name}_{mask}")


# -- of operands that are read by one position ------------------------------------------------------------------------
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", mostly(["of_keys", "looked_up", "of_queries", "of_both"], list(SCORES)))
def test_reads_by_one_position(name: str, deterministic: bool) -> None:
    check(variant(name), deterministic=deterministic)


@pytest.mark.parametrize("mask", mostly(["none", "quotients"], ["none", "window", "quotients"]))
def test_masks(mask: str) -> None:
    check(variant("of_both", mask), 200, 130)
    check(variant("of_keys", mask), 70, 300, kv_heads=4)


WIDTHS = [(128, 128), (192, 128), (40, 64), (80, 96)]


@pytest.mark.parametrize(("dim", "value_dim"), mostly(WIDTHS[:2], WIDTHS))
def test_widths(dim: int, value_dim: int) -> None:
    check(variant("of_keys"), 130, 140, dim, value_dim)


LEFT_OUT = [MAIN, ("key", "value"), ("query",), ("value",)]


@pytest.mark.parametrize("leave_out", mostly(LEFT_OUT[:2], LEFT_OUT))
def test_gradients_that_nobody_wants_are_left_out(leave_out: tuple[str, ...]) -> None:
    for name in ("of_keys", "of_queries"):
        check(variant(name), 100, 140, leave_out=leave_out)


@pytest.mark.parametrize("kind", ragged.KINDS)
@pytest.mark.parametrize("name", mostly(["of_both", "looked_up"], list(SCORES)))
def test_sequences_of_their_own_lengths(name: str, kind: str) -> None:
    declared = variant(name)
    operands = operands_of(declared, ragged.NUMBER)
    wanted = (*MAIN, *(n for n, t in operands.items() if t.is_floating_point()))
    for deterministic in (False, True):
        ragged.check(
            declared, kind, heads=2, deterministic=deterministic, wanted=wanted, operands=operands,
            offset=3,
        )  # fmt: skip


# -- of tables by distance: level pairs by the pass that owns keys, others by a portable kernel beside it -------------
def by_distance(name: str, mask: str = "causal", far: float = 0.0, **options: Any) -> dict[str, Tensor]:
    declared = weft.Attention(LEVELS[name], MASKS[mask], name=f"{name}_{mask}")
    operands = levels.operands_of(declared, far)
    if "tables" in operands:  # of four heads
        operands["tables"] = torch.cat([operands["tables"], operands["tables"].flip(0), operands["tables"][:, :30]], 1)
    return check(declared, operands=operands, dtype=torch.float16, **options)  # of which the interpreter knows numbers


@pytest.mark.parametrize("name", mostly(["t5_causal", "t5"], list(LEVELS)))
def test_tables_by_distance(name: str) -> None:
    by_distance(name)


LONG = {"q_len": 320, "kv_len": 390, "batches": 1}  # tiles of level pairs alone, and others


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", mostly(["t5"], ["t5", "t5_causal", "clamped", "twice"]))
def test_tiles_of_level_pairs(name: str, deterministic: bool) -> None:
    by_distance(name, "none" if name == "t5" else "causal", deterministic=deterministic, **LONG)


@pytest.mark.parametrize("far", [1000.0, -1e9])
def test_numbers_far_from_0(far: float) -> None:
    """Where weights cannot be found in one step, level tiles are computed as others are."""
    by_distance("t5_causal", far=far, **LONG)


@pytest.mark.parametrize("mask", mostly(["window"], ["none", "window"]))
@pytest.mark.parametrize("dim", mostly([128], [32, 80, 128]))
def test_masks_and_widths_of_tables(mask: str, dim: int) -> None:
    by_distance("t5", mask, q_len=200, kv_len=130, dim=dim, kv_heads=4)


@pytest.mark.parametrize("leave_out", mostly([("key", "value")], [("key", "value"), ("query",), ("tables",)]))
def test_gradients_beside_a_table_that_nobody_wants(leave_out: tuple[str, ...]) -> None:
    by_distance("t5_causal", leave_out=leave_out)


def test_sums_of_tables_repeat() -> None:
    first, second = (by_distance("t5_causal", deterministic=True, seed=seed) for seed in (0, 7))
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("kind", ragged.KINDS)
@pytest.mark.parametrize("name", mostly(["t5_causal"], ["t5_causal", "t5", "clamped", "nowhere_alike"]))
def test_tables_of_sequences_of_their_own_lengths(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "DTYPE", torch.float16)
    declared = weft.Attention(LEVELS[name], MASKS["causal"], name=f"{name}_{kind}")
    operands = levels.operands_of(declared)
    wanted = (*MAIN, *operands)
    for offset, deterministic in ((None, False), (3, True)):
        ragged.check(
            declared, kind, heads=2, deterministic=deterministic, wanted=wanted, operands=operands,
            offset=offset,
        )  # fmt: skip
