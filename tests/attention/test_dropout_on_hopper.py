"""Dropout of target hopper on a CPU: its generated text, run by gluon.py, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen.targets import target_named
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.form import parse_form
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.runtime.call import Call, Choices, Dense

from ..support import check_errors, mostly
from . import test_lengths_on_hopper as lengths
from .test_flash_on_hopper import MAIN, launch, operands_of

pytest.importorskip("triton")

share, slopes, sinks = weft.scalar("p", float), weft.tensor("slopes", 1), weft.tensor("sinks", 1)
VARIANTS = {
    "plain": weft.Attention(dropout=0.5, name="plain"),
    "causal": weft.Attention(mask=masks.causal, dropout=0.2, name="dropped"),
    "few_kept": weft.Attention(dropout=0.99, name="few_kept"),
    "given": weft.Attention(mask=masks.causal, dropout=share, name="given"),
    "window": weft.Attention(mask=masks.sliding_window(100), dropout=0.1, name="windowed"),
    "capped": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, dropout=0.3, name="capped"),
    "alibi": weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, dropout=0.3, name="alibi"),
    "far": weft.Attention(score + 1000.0 * (kv_pos % 2), masks.causal, dropout=0.3, name="far"),
    "sink": weft.Attention(mask=masks.causal, sink=sinks[head], dropout=0.3, name="sunk"),
    "few_rows_see": weft.Attention(mask=kv_pos < q_pos - 70, dropout=0.3, name="few_rows_see"),
    "documents": lengths.MEASURED["documents"].replace(dropout=0.3, name="dropped_documents"),
}


def heads_of(name: str) -> tuple[int, int]:
    """Heads of queries and keys of a variant's call: two of keys where nothing but dropout is tested, else a group."""
    return (4, 2) if name in ("plain", "causal") else (2, 1)


def batch_of(name: str, heads: tuple[int, int]) -> int:
    """Batch rows of a call: two where nothing but dropout is tested, or where each row has operands of its own."""
    return 2 if heads == (4, 2) or name == "documents" else 1


def operands(variant: weft.Attention, heads: int, seed: int = 1 << 40 | 7) -> dict[str, Any]:
    torch.manual_seed(5)
    made = {"slopes": torch.rand(heads), "sinks": torch.randn(heads), "p": 0.25, "seed": torch.tensor([seed]),
            "doc": torch.stack([torch.arange(400) // n for n in (30, 50)])}  # fmt: skip
    return {operand.name: made[operand.name] for operand in variant.canonical.parameters}


def check(
    name: str, width: int, dtype: torch.dtype = torch.bfloat16, heads: tuple[int, int] = (4, 2), q_len: int = 130,
    kv_len: int = 200, value_dim: int | None = None, seed: int = 0, offset: int | None = None,
    deterministic: bool = False, wanted: tuple[str, ...] = MAIN[:3], times: float = 1.0,
) -> dict[str, Tensor]:  # fmt: skip
    """A forward, and a backward, on what holds NaN where nobody has written. times: of what comes back."""
    variant, (query_heads, key_heads) = VARIANTS[name], heads
    batch = batch_of(name, heads)
    tensors = operands_of(query_heads, key_heads, q_len, kv_len, width, 0, value_dim or width, batch, dtype=dtype)
    given = operands(variant, query_heads)
    offset = kv_len - q_len if offset is None else offset
    exact, usual = (reference(variant, tensors, given, offset, kind, times) for kind in (torch.float64, dtype))
    call = Call(*tensors.values(), given, Dense(offset), Choices(), width)
    dout, dlse = exact["dout"].to(dtype), exact["dlse"].float()
    rows = exact["lse"].shape
    far = facts_of(variant).scores_lie_far
    results = {"out": torch.full_like(dout, float("nan")), "lse": torch.full((2, *rows) if far else rows, float("nan"))}
    launch(variant, call, results, seed=seed)
    gradients = {f"d{n}": torch.full_like(t, float("nan")) for n, t in tensors.items() if n in wanted}
    launch(variant, call, {**results, "dout": dout, "dlse": dlse, **gradients}, wanted, deterministic, seed)
    if far:
        results["lse"] = results["lse"].sum(0)
    for label, found in {**results, **gradients}.items():
        check_errors(found, exact[label], usual[label], label)
    return gradients


def reference(
    variant: weft.Attention,
    tensors: dict[str, Any],
    given: dict[str, Any],
    offset: int,
    dtype: torch.dtype,
    times: float = 1.0,
) -> dict[str, Tensor]:
    leaves = {n: t.to(dtype).requires_grad_() for n, t in tensors.items() if t is not None}
    given = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
    out, lse = variant.reference(*leaves.values(), return_lse=True, q_offset=offset, **given)
    generator = torch.Generator().manual_seed(3)
    dout = (times * torch.randn(out.shape, generator=generator)).to(tensors["query"].dtype).to(dtype)
    dlse = (times * torch.randn(lse.shape, generator=generator)).to(lse.dtype)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), "dout": dout, "dlse": dlse,
            **{f"d{n}": g for n, g in zip(leaves, found)}}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str) -> None:
    check(name, 64, heads=heads_of(name))


WIDTHS = [(128, torch.bfloat16), (80, torch.float16), (128, torch.float16), (40, torch.bfloat16)]


@pytest.mark.parametrize(("width", "dtype"), mostly(WIDTHS[:2], WIDTHS))
def test_widths_and_types(width: int, dtype: torch.dtype) -> None:
    check("causal", width, dtype, heads=(2, 2), value_dim=64 if width == 40 else None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_few_pairs_that_are_kept_leave_no_gradients_too_small_for_float16(deterministic: bool) -> None:
    """Gradients of scores are as small as the share that is kept: a hundredth here, where float16 has few bits."""
    check("few_kept", 64, torch.float16, q_len=70, kv_len=70, deterministic=deterministic, times=2.0**-17)


EDGES = [(65, 129), (1, 70), (128, 128), (63, 257), (300, 64), (31, 33)]


@pytest.mark.parametrize(("q_len", "kv_len"), mostly(EDGES[:2], EDGES))
def test_lengths_at_the_edges_of_tiles(q_len: int, kv_len: int) -> None:
    check("causal" if q_len <= kv_len else "plain", 64, heads=(2, 1), q_len=q_len, kv_len=kv_len)


@pytest.mark.parametrize("offset", [0, -70, 1 << 20])
def test_positions_of_queries(offset: int) -> None:
    check("plain", 64, heads=(2, 2), q_len=70, kv_len=70, offset=offset)


# -- forwards whose drawers are a warpgroup of their own: the form where heads have more than 64 columns ---------------
def check_drawers(name: str, width: int = 64, form: str = "128x128s3q1+lazy+drawers", **lengths: Any) -> None:
    """A forward as the form in which consumers draw computes it, bit for bit."""
    variant, (heads, key_heads) = VARIANTS[name], heads_of(name)
    sizes, batch = {"q_len": 130, "kv_len": 200, **lengths}, batch_of(name, (heads, key_heads))
    tensors = operands_of(
        heads, key_heads, sizes["q_len"], sizes["kv_len"], width, 0, width, batch, dtype=torch.bfloat16
    )
    offset = max(0, sizes["kv_len"] - sizes["q_len"])
    call = Call(*tensors.values(), operands(variant, heads), Dense(offset), Choices(), width)
    found = []
    for own in (form, form.removesuffix("+drawers")):
        shape = (batch, heads, sizes["q_len"])
        rows = (2, *shape) if facts_of(variant).scores_lie_far else shape
        results = {"out": torch.full((*shape, width), float("nan"), dtype=torch.bfloat16),
                   "lse": torch.full(rows, float("nan"))}  # fmt: skip
        launch(variant, call, results, schedule=f"flash/flash_forward=hopper:{own}")
        found.append(results)
    assert not found[0]["out"].isnan().any()
    assert torch.equal(found[0]["out"], found[1]["out"]) and torch.equal(found[0]["lse"], found[1]["lse"])


@pytest.mark.parametrize("name", mostly(["plain", "few_kept", "given", "window", "documents"], [*VARIANTS]))
def test_drawers_draw_what_consumers_do(name: str) -> None:
    check_drawers(name)


@pytest.mark.parametrize(("q_len", "kv_len"), mostly([(300, 64), (1, 70), (63, 257)], EDGES))
def test_drawers_at_the_edges_of_tiles(q_len: int, kv_len: int) -> None:
    check_drawers("causal" if q_len <= kv_len else "plain", q_len=q_len, kv_len=kv_len)


@pytest.mark.parametrize("form", ["128x64s2q2+regs+lazy+drawers", "128x128s2q1+lazy+inplace+drawers"])
def test_other_forms_with_drawers(form: str) -> None:
    check_drawers("window", form=form, q_len=300, kv_len=400)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("192x64s2q1+drawers", "drawers leave registers to 2 consumers, and hardware barriers to 3 stages"),
        ("128x64s4q1+drawers", "drawers leave registers to 2 consumers"),
        ("128x128s3q2+lazy+drawers", "it needs .* bytes of SRAM"),
    ],
)
def test_forms_that_have_no_drawers(form: str, reason: str) -> None:
    width = 64 if "s3q2" not in form else 128
    with pytest.raises(weft.WeftError, match=reason):
        check_drawers("causal", width, form)


def test_drawers_are_where_weights_are_dropped() -> None:
    facts, hopper = facts_of(weft.Attention(mask=masks.causal, name="kept")), target_named("hopper")
    signature = Signature("forward", "sm_90", Dtypes.all("bf16"), Widths(128, 128))
    (kernel,) = hopper.kernels("flash", signature, facts)
    form = parse_form("128x128s2q1+lazy+drawers")
    with pytest.raises(weft.WeftError, match="no weights are dropped"):
        hopper.check(kernel, form, signature, by_name("h200"), facts)


def test_gradients_of_keys_do_not_depend_on_who_comes_first() -> None:
    first, second = (check("window", 64, heads=(2, 1), seed=seed) for seed in (0, 7))
    assert all(torch.equal(first[n], second[n]) for n in ("dkey", "dvalue"))


# -- in two passes: drawers beside that of keys, numbers of a consumer's own pairs in that of queries -----------------
@pytest.mark.parametrize("name", mostly(["given", "window", "capped", "far"], VARIANTS))
def test_every_variant_in_two_passes(name: str) -> None:
    check(name, 64, heads=heads_of(name), deterministic=True)


APART = [(128, 128, torch.bfloat16), (192, 128, torch.bfloat16), (144, 80, torch.float16), (40, 40, torch.float16)]


@pytest.mark.parametrize(("width", "value_dim", "dtype"), mostly(APART[:2], APART))
def test_widths_in_two_passes(width: int, value_dim: int, dtype: torch.dtype) -> None:
    """Visited tiles have 32 queries, which one warp draws, above D 128."""
    lengths = {"q_len": 150, "kv_len": 330}  # slots are given back, and filled again
    check("causal", width, dtype, heads=(2, 1), value_dim=value_dim, deterministic=True, **lengths)


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("key", "value")], ids=" ".join)
def test_gradients_that_nobody_wants_are_left_out(wanted: tuple[str, ...]) -> None:
    check("causal", 64, heads=(2, 1), wanted=wanted)


def test_two_passes_repeat_bit_for_bit() -> None:
    first, second = (check("window", 64, heads=(2, 1), seed=seed, deterministic=True) for seed in (0, 7))
    assert all(torch.equal(first[n], second[n]) for n in first)


# -- sequences with lengths: positions are those within a sequence ----------------------------------------------------
def check_sequences(name: str, kind: str, *widths: int, deterministic: bool = False, **options: Any) -> None:
    variant = VARIANTS[name]
    given = operands(variant, 2)
    if name == "documents":
        given |= lengths.operands_of(lengths.MEASURED["documents"])
    lengths.check(variant, kind, *widths, deterministic=deterministic, operands=given, **options)


OF_SEQUENCES = ["causal", "window", "capped", "few_rows_see", "documents"]


@pytest.mark.parametrize("kind", lengths.KINDS)
@pytest.mark.parametrize("name", mostly(["causal", "documents"], OF_SEQUENCES))
def test_sequences_of_their_own_lengths(name: str, kind: str) -> None:
    check_sequences(name, kind, 64)


@pytest.mark.parametrize("kind", lengths.KINDS)
@pytest.mark.parametrize(("name", "widths"), [("causal", (192, 128)), ("documents", (64,))])
def test_sequences_in_two_passes(name: str, widths: tuple[int, ...], kind: str) -> None:
    check_sequences(name, kind, *widths, deterministic=True)


@pytest.mark.parametrize("kind", lengths.KINDS)
@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32)], ids=["int", "tensor"])
def test_positions_of_sequences(offset: Any, kind: str) -> None:
    check_sequences("causal", kind, 128, offset=offset)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"widths": Widths(192, 192)}, "with D above 192 or Dv above 128"),
        ({"widths": Widths(256, 256)}, "with D above 192 or Dv above 128"),
    ],
)
def test_what_is_left_to_triton(changes: dict[str, Any], reason: str) -> None:
    signature = Signature("backward", "sm_90", Dtypes.all("bf16"), Widths(64, 64), wanted=frozenset(MAIN[:3]))
    hopper, facts = target_named("hopper"), facts_of(VARIANTS["causal"])
    (_, main, *_) = hopper.kernels("flash", signature, facts)
    assert hopper.supports(main, signature, facts) is None
    refused = replace(signature, **changes)
    (_, main, *_) = hopper.kernels("flash", refused, facts)
    expected = f"hopper: the backward of dropout {reason} is computed by the triton target"
    assert hopper.supports(main, refused, facts) == expected


def test_beside_a_bias_of_pairs_it_is_left_to_triton() -> None:
    biased = weft.Attention(score + weft.tensor("bias", 2)[q_pos, kv_pos], masks.causal, dropout=0.1, name="biased")
    signature = Signature("backward", "sm_90", Dtypes.all("bf16"), Widths(64, 64), wanted=frozenset(MAIN[:3]))
    hopper, facts = target_named("hopper"), facts_of(biased)
    _, main, *_ = hopper.kernels("flash", signature, facts)
    assert "the backward of dropout beside what each pair reads is" in str(hopper.supports(main, signature, facts))
