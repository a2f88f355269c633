"""What a score has by distance alone is computed once a distance, and read by pairs: against the reference."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_head, kv_len, kv_pos, masks, q_pos, score, scores

from ..support import check_variant, mostly, poisoned
from .test_pages import check as check_pages
from .test_pages import padded

pytest.importorskip("triton")

AWAY = q_pos - kv_pos
table, tables, slopes = weft.tensor("table", 1), weft.tensor("tables", 2), weft.tensor("slopes", 1)
rate, shift = weft.scalar("rate", float), weft.scalar("shift", int)
SCORES = {
    "t5": scores.t5_bias(tables, 16, 20)(score),
    "kerple": score - slopes[head] * weft.log(1.0 + weft.abs(AWAY)),
    "of_nothing": score * weft.exp(-0.01 * weft.abs(AWAY)),
    "of_a_number": score - weft.sqrt(rate * weft.abs(AWAY)) * slopes[kv_head],
    "of_a_batch": score + tables[batch, weft.minimum(weft.abs(AWAY), 40)],
    "of_lengths": score - weft.log(1.0 + weft.abs(AWAY) / kv_len) * slopes[head],
    # two parts, one of them of a factor of the score; a bias by row, which stays where it is
    "two_parts": score * weft.exp(-0.01 * weft.abs(AWAY)) + table[weft.minimum(weft.abs(AWAY), 30)] + slopes[q_pos % 4],
    "capped": 5.0 * weft.tanh((score + tables[head, weft.minimum(weft.abs(AWAY + shift), 50)]) / 5.0),
    # undefined at distances that no visible pair has
    "undefined": score + weft.log(1.0 * weft.maximum(AWAY + 1, 0)) * slopes[head],
}  # fmt: skip
GIVEN = {"rate": 0.3, "shift": -2}


def operands_of(attention: weft.Attention) -> dict[str, torch.Tensor | float | int]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"table": (31,), "tables": (4, 51), "slopes": (4,)}
    made = {t.name: torch.randn(sizes[t.name], generator=generator) * 0.5 for t in attention.canonical.tensors}
    return made | {n: value for n, value in GIVEN.items() if n in {p.name for p in attention.canonical.parameters}}


def floats_of(attention: weft.Attention) -> tuple[str, ...]:
    return tuple(t.name for t in attention.canonical.tensors)


def check(
    name: str, rows: tuple[int, int] = (37, 45), wanted: bool = True, batches: int = 2, **options: object
) -> None:
    attention = weft.Attention(SCORES[name], masks.causal, name=name)
    q_len, kv_len = rows
    shapes = ((batches, 2, q_len, 16), (batches, 1, kv_len, 16), (batches, 1, kv_len, 16))
    tensors = [poisoned(shape, torch.float32, seed=n) for n, shape in enumerate(shapes)]
    learned = floats_of(attention) if wanted else ()
    check_variant(attention, *tensors, operands=operands_of(attention), differentiate=learned, **options)


@pytest.mark.parametrize("name", mostly(("two_parts", "undefined"), list(SCORES)))
def test_in_the_interpreter(name: str) -> None:
    check(name, target="interpret")


def test_with_other_offsets_and_lengths() -> None:
    check("t5", (70, 33), wanted=False, target="interpret", q_offset=5)
    check("kerple", (20, 70), wanted=False, target="interpret", q_offset=-11)


LENGTHS = {"q_lens": torch.tensor([30, 37]), "kv_lens": torch.tensor([33, 45])}
PACKED = {n: torch.tensor(x, dtype=torch.int32) for n, x in (
    ("cu_seqlens_q", [0, 15, 15, 37]), ("cu_seqlens_kv", [0, 18, 20, 45])
)}  # fmt: skip


@pytest.mark.parametrize("name", mostly(("of_a_batch",), ("t5", "of_a_batch", "of_lengths")))
def test_one_table_serves_sequences_of_their_own_lengths(name: str) -> None:
    attention = weft.Attention(SCORES[name], masks.causal, name=name)
    tensors = [poisoned((2, h, n, 16), torch.float32, seed=n) for h, n in ((2, 37), (1, 45), (1, 45))]
    given = operands_of(attention) | LENGTHS
    check_variant(attention, *tensors, operands=given, differentiate=floats_of(attention), target="interpret")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "of_a_batch"])
def test_packed_sequences(name: str) -> None:
    attention = weft.Attention(SCORES[name], masks.causal, name=name)
    tensors = [poisoned((1, h, n, 16), torch.float32, seed=n) for h, n in ((2, 37), (1, 45), (1, 45))]
    given = operands_of(attention) | PACKED
    check_variant(attention, *tensors, operands=given, differentiate=floats_of(attention), target="interpret")


def test_pages() -> None:
    attention = weft.Attention(SCORES["t5"], masks.causal, name="t5")
    check_pages(attention, padded(), 16, "interpret", **operands_of(attention))


def test_a_number_for_all_sequences() -> None:
    attention = weft.Attention(SCORES["t5"], masks.causal, name="t5")
    tensors = [poisoned((2, h, n, 16), torch.float32, seed=n) for h, n in ((2, 37), (1, 45), (1, 45))]
    given = operands_of(attention) | LENGTHS
    check_variant(attention, *tensors, operands=given, gradients=False, target="interpret", q_offset=4)


# -- what is chosen ----------------------------------------------------------------------------------------------------
SIZES = {"heads": 4, "kv_heads": 2, "q_len": 512, "head_dim": 64}


def kernels_of(score: weft.Expr, device: str = "h100", **options: object) -> list[str]:
    plan = weft.Attention(score, masks.causal).plan(weft.shape(**{**SIZES, **options}), device=device)
    return [k.name for k in plan.kernels if k.direction == "forward"]


def test_what_costs_less_than_a_read_has_no_table() -> None:
    made = ["distance_tables", "flash_forward"]
    assert kernels_of(scores.t5_bias(tables)(score)) == made
    assert kernels_of(scores.relative_bias(tables, 30)(score)) == made
    for cheap in (
        scores.alibi(slopes)(score),
        scores.softcap(5.0)(score),
        score + slopes[q_pos] * weft.exp(1.0 * q_pos),
    ):
        assert kernels_of(cheap) == ["flash_forward"]
    few = kernels_of(scores.t5_bias(tables)(score), q_len=1, kv_len=4096)
    assert "distance_tables" not in few, "a few queries have hardly more pairs than distances"


def test_explain_and_source_say_it() -> None:
    t5 = weft.Attention(scores.t5_bias(tables)(score), masks.causal, name="t5")
    shape = weft.shape(**SIZES, dtype="bf16")
    text = str(t5.explain(shape, device="h100"))
    assert "read by distance, q_pos - kv_pos, from a table that is made in each call: tables[head," in text
    assert "compute  what the score adds or multiplies by q_pos - kv_pos alone" in text
    assert "flash_ddiagonals" in text and "computed by the triton target" not in text
    for target in ("triton", "hopper"):
        source = t5.source(shape, device="h100", target=target)
        assert "by_distance0 = read_by_distance(" in source and "log2(" not in source.split("by_distance0")[1]
    rows = t5.source(shape, device="h100", q_offset=torch.zeros(1, dtype=torch.int32))
    assert "read_by_distance" not in rows, "positions that the host does not know: each pair computes its own"
