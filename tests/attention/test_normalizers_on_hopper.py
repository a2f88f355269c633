"""Normalizers that are no softmax on `hopper`: the text of its kernels, run by gluon.py, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_len, kv_pos, masks, q_len, q_pos, score
from weft.codegen import normalizers as texts
from weft.codegen.normalizers import Blocks, Terms
from weft.codegen.targets import target_named
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.ir import normalizer as records
from weft.ir.normalizer import Normalizer
from weft.runtime.call import Call, Choices, Dense
from weft.runtime.driver import resolve, why_not
from weft.runtime.run.gradients import operand_gradients

from ..support import check_errors, mostly, poisoned
from . import test_lengths_on_hopper as ragged
from .test_flash_on_hopper import launch

pytest.importorskip("triton")

HEADS, BATCHES = 4, 2
MAIN = ("query", "key", "value")
slopes, rows, columns = weft.tensor("slopes", 1), weft.tensor("rows", 2), weft.tensor("columns", 2)
factor, doc, pair = weft.tensor("factor", 1), weft.tensor("doc", 2, int), weft.tensor("pair", 2)
SHIFTED = Normalizer("toy_squared", saves="nothing", weight="where(score <= 0.0, 0.0, score * score)")


def squared_on_hopper(terms: Terms) -> Blocks:
    """Whose derivative is not found from the weight alone: a tile more is kept."""
    return Blocks(
        weigh=f"positive = gl.maximum({terms.score}, 0.0) * LN2\np = positive * positive",
        backward_weight=f"twice = gl.maximum({terms.score}, 0.0) * (2.0 * LN2)\np = twice * twice * 0.25",
        kept="twice",
        backward_score="twice * dp",
    )


@pytest.fixture(autouse=True)
def from_outside() -> Iterator[None]:
    records.register(SHIFTED)
    texts.register(SHIFTED, "hopper", squared_on_hopper)
    yield
    texts.unregister(SHIFTED)
    records.unregister(SHIFTED.name)


def operands_of(declared: weft.Attention, q_len: int, kv_len: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    room = max(q_len, kv_len) + 40
    sizes = {"slopes": (HEADS,), "rows": (HEADS, room), "columns": (HEADS, room)}
    made = {n: torch.randn(size, generator=generator) * 0.3 for n, size in sizes.items()}
    made["factor"] = torch.tensor([-1.5, 0.7, 0.0, 2.0])
    made["doc"] = (torch.arange(room)[None] // torch.tensor([[30], [47]])).int()
    return {t.name: made[t.name] for t in declared.canonical.tensors}


def check(
    declared: weft.Attention, q_len: int = 130, kv_len: int = 200, dim: int = 64, value_dim: int | None = None,
    kv_heads: int = 2, deterministic: bool = False, leave_out: tuple[str, ...] = (), seed: int = 0,
    dtype: torch.dtype = torch.bfloat16, offset: int | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """A forward and all gradients of one call but some; NaN lies around operands and in results before."""
    operands, value_dim = operands_of(declared, q_len, kv_len), value_dim or dim
    shapes = ((HEADS, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim))
    tensors = {n: poisoned((BATCHES, *s), dtype, seed=i) for i, (n, s) in enumerate(zip(MAIN, shapes))}
    dout = poisoned((BATCHES, HEADS, q_len, value_dim), dtype, seed=3)
    offset = kv_len - q_len if offset is None else offset
    wanted = [n for n in (*MAIN, *(n for n, t in operands.items() if t.is_floating_point())) if n not in leave_out]

    def of_definition(kind: torch.dtype) -> dict[str, Tensor]:
        leaves = {n: t.to(kind) if t.is_floating_point() else t for n, t in {**tensors, **operands}.items()}
        leaves |= {n: leaves[n].detach().clone().requires_grad_() for n in wanted}
        out = declared.reference(*(leaves[n] for n in MAIN), **{n: leaves[n] for n in operands}, q_offset=offset)
        found = torch.autograd.grad(out, [leaves[n] for n in wanted], dout.to(kind)) if wanted else ()
        return {"out": out.detach(), **{f"d{n}": g for n, g in zip(wanted, found)}}

    exact, usual = of_definition(torch.float64), of_definition(dtype)
    call = Call(*tensors.values(), None, operands, Dense(offset), Choices(), dim)
    nothing = torch.full((BATCHES, HEADS, q_len), torch.nan)  # a log-sum-exp, which nobody reads or writes
    found = {"out": torch.full(dout.shape, torch.nan, dtype=dtype)}
    launch(declared, call, {**found, "lse": nothing}, seed=seed)
    if wanted:
        gradients = {f"d{n}": torch.full_like(tensors[n], torch.nan) for n in wanted if n in MAIN}
        results = {"out": exact["out"].to(dtype), "lse": nothing, "dout": dout, "dlse": None, **gradients}
        sums = launch(declared, call, results, wanted, deterministic, seed)
        bound = declared._variant
        read = bound.facts.operand_gradients(frozenset(wanted))
        summed = operand_gradients(call, frozenset(wanted), read, sums)
        found |= gradients | {f"d{n}": g for n, g in summed.items()}
    assert nothing.isnan().all()
    for name, got in found.items():
        check_errors(got, exact[name], usual[name], f"{declared.name} {name}")
    return found


def variant(normalizer: str, name: str = "plain", **changes: Any) -> weft.Attention:
    return weft.Attention(**{"mask": masks.causal, **changes}, name=f"{name}_{normalizer}", normalizer=normalizer)


NORMALIZERS = pytest.mark.parametrize("normalizer", ["sigmoid", "relu", "toy_squared"])
OWN = pytest.mark.parametrize("normalizer", ["sigmoid", "relu"])
DECLARED: dict[str, dict[str, Any]] = {
    "causal": {},
    "dense": {"mask": True},
    "window": {"mask": masks.sliding_window(90)},
    "documents": {"mask": masks.causal & masks.document(doc)},
    "capped": {"score": 5.0 * weft.tanh(score / 5.0) - 0.3},
    "alibi": {"score": score + slopes[head] * (kv_pos - q_pos)},
    "signed": {"score": score * factor[head]},
    "of_papers": {"score": score - weft.log(1.0 * kv_len)},
    "of_both": {"score": score * (1.0 + rows[head, q_pos]) + columns[head, kv_pos]},
    "of_keys": {"score": score + columns[head, kv_pos]},
    "steep": {"score": weft.sqrt(weft.maximum(score, 0.0))},  # whose slope is infinite where many pairs are
}


@NORMALIZERS
@pytest.mark.parametrize("name", mostly(["causal", "capped", "of_both", "steep"], list(DECLARED)))
@pytest.mark.parametrize("deterministic", [False, True])
def test_scores_masks_and_operands(normalizer: str, name: str, deterministic: bool) -> None:
    if (normalizer, name) == ("sigmoid", "steep"):
        pytest.skip("its weight of a score of 0 has a derivative")
    check(variant(normalizer, name, **DECLARED[name]), deterministic=deterministic)


LENGTHS = [(1, 1), (128, 128), (65, 129), (127, 255), (300, 64)]


@OWN
@pytest.mark.parametrize(("q_len", "kv_len"), mostly([LENGTHS[2], LENGTHS[4]], LENGTHS))
@pytest.mark.parametrize("name", ["causal", "dense"])
def test_lengths_at_the_edges_of_tiles(normalizer: str, name: str, q_len: int, kv_len: int) -> None:
    """Where queries are more than keys, causal rows see nothing: they give 0, and have no gradients."""
    found = check(variant(normalizer, name, **DECLARED[name]), q_len, kv_len)
    if name == "causal" and q_len > kv_len:
        assert not found["out"][:, :, : q_len - kv_len].any() and not found["dquery"][:, :, : q_len - kv_len].any()


WIDTHS = [(128, 128), (192, 128), (40, 64), (80, 96), (64, 128), (16, 16)]


@OWN
@pytest.mark.parametrize(("dim", "value_dim"), mostly(WIDTHS[:2], WIDTHS))
@pytest.mark.parametrize("deterministic", [False, True])
def test_widths(normalizer: str, dim: int, value_dim: int, deterministic: bool) -> None:
    check(variant(normalizer), dim=dim, value_dim=value_dim, deterministic=deterministic)


@OWN
@pytest.mark.parametrize("dim", [256])
def test_wide_forwards(normalizer: str, dim: int) -> None:
    check(variant(normalizer), dim=dim, leave_out=MAIN)


FIRST = [  # queries, keys, key heads of 4, offset; first shares of dQ are not stored in groups, or before position 0
    (300, 300, 4, 0), (130, 400, 4, 270), (300, 130, 4, 0), (130, 400, 4, 7), (300, 300, 2, 0), (300, 200, 4, -100),
]  # fmt: skip


@OWN
@pytest.mark.parametrize(("q_len", "kv_len", "kv_heads", "offset"), mostly([FIRST[0], FIRST[3], FIRST[5]], FIRST))
def test_shares_of_first_keys_are_stored(normalizer: str, q_len: int, kv_len: int, kv_heads: int, offset: int) -> None:
    """What counts them begins at 0, and sums of dQ do only where all shares are added."""
    for seed in range(2):
        check(variant(normalizer), q_len, kv_len, kv_heads=kv_heads, offset=offset, seed=seed)


LEFT_OUT = ["query key value", "key value", "query", "value", "query key"]


@OWN
@pytest.mark.parametrize("leave_out", mostly(LEFT_OUT[1:3], LEFT_OUT))
def test_gradients_that_nobody_wants_are_left_out(normalizer: str, leave_out: str) -> None:
    for name in ("causal", "of_both"):
        check(variant(normalizer, name, **DECLARED[name]), 100, 140, leave_out=tuple(leave_out.split()))


@OWN
def test_float16(normalizer: str) -> None:
    check(variant(normalizer), dtype=torch.float16)


# -- sequences of their own lengths: NaN lies behind all of them -------------------------------------------------------
@OWN
@pytest.mark.parametrize("kind", [*ragged.KINDS, "paged"])
@pytest.mark.parametrize("name", ["causal", "capped", "of_papers"])
def test_outputs_of_sequences(normalizer: str, name: str, kind: str) -> None:
    ragged.check_forward(variant(normalizer, name, **DECLARED[name]), kind, 64)


@OWN
@pytest.mark.parametrize("kind", [*ragged.KINDS, "paged"])
def test_outputs_of_measured_tiles(normalizer: str, kind: str) -> None:
    measured = ragged.MEASURED["documents"].replace(normalizer=normalizer, name=f"documents_{normalizer}")
    ragged.check_forward(measured, kind, 64)


@OWN
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ragged.KINDS)
@pytest.mark.parametrize("name", mostly(["causal", "capped"], ["causal", "capped", "of_papers", "dense", "window"]))
def test_gradients_of_sequences(normalizer: str, name: str, kind: str, deterministic: bool) -> None:
    declared = variant(normalizer, name, **DECLARED[name])
    for dim in (64, 128):
        ragged.check(declared, kind, dim, deterministic=deterministic)


@OWN
@pytest.mark.parametrize("kind", ragged.KINDS)
@pytest.mark.parametrize("wanted", ["key value", "query", "value"])
def test_some_gradients_of_sequences(normalizer: str, wanted: str, kind: str) -> None:
    """Without that of the query no program owns queries: packed ones have no list."""
    ragged.check(variant(normalizer), kind, wanted=tuple(wanted.split()))


@OWN
@pytest.mark.parametrize("kind", ragged.KINDS)
def test_gradients_of_measured_tiles_and_of_operands(normalizer: str, kind: str) -> None:
    given = {"slopes": torch.randn(ragged.NUMBER, 2, generator=torch.Generator().manual_seed(6))}
    for name in ("documents", "gain"):
        own = ragged.operands_of(ragged.MEASURED["documents"]) if name == "documents" else {}
        declared = ragged.SUMMED[name].replace(normalizer=normalizer, name=f"{name}_{normalizer}")
        for wanted in (MAIN, (*MAIN, "slopes")):
            ragged.check(declared, kind, 64, deterministic=False, wanted=wanted,
                         operands=given | own)  # fmt: skip


@OWN
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_not_there_has_no_weights(normalizer: str, deterministic: bool) -> None:
    """However large a score would be of keys without queries, and of rows behind the last one, where it is infinite."""
    behind = weft.exp(-1e3 * weft.minimum(q_len - 1 - q_pos, 0))  # 1 of each row that exists, else infinite
    declared = weft.Attention(
        score + behind + weft.where(q_len > 0, 0.0, 1e3 * (1 + kv_pos)),
        name=f"endless_{normalizer}", normalizer=normalizer,
    )  # fmt: skip
    for kind in ragged.KINDS:
        ragged.check(declared, kind, 32, deterministic=deterministic, offset=0)
    check(declared, deterministic=deterministic, offset=0)


# -- what is left to others --------------------------------------------------------------------------------------------
REFUSED = [
    ({"dropout": 0.1}, 64, "forward", "weights that are dropped,"),
    ({"score": score + weft.tensor("pairs", 2)[q_pos, kv_pos]}, 64, "forward", "scores that read a tensor by both"),
    ({}, 256, "backward", "D above 192 or Dv above 128,"),
    ({"score": weft.scores.t5_bias(weft.tensor("table", 2))(score)}, 64, "backward", "that are read by distance"),
]


@pytest.mark.parametrize(("changes", "dim", "direction", "words"), REFUSED)
def test_what_it_leaves_to_triton_it_says(changes: Any, dim: int, direction: str, words: str) -> None:
    declared = variant("sigmoid", "left", **changes)
    wanted = frozenset(MAIN) if direction == "backward" else frozenset()
    signature = Signature(direction, "sm_90", Dtypes.all("bf16"), Widths(dim, dim, 0), wanted=wanted)  # type: ignore[arg-type]
    said = why_not(target_named("hopper"), "flash", signature, facts_of(declared))
    assert said is not None and words in said and said.endswith("of sigmoid are computed by the triton target")
    assert resolve(declared, signature, by_name("h200")).target.name == "triton"
