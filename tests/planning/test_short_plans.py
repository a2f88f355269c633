"""Short calls: which they are, which form their plans, sources, kept schedules and builds have, and what stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen.targets.hopper.forms import HopperForm
from weft.compiler.planning.machines import hardware
from weft.compiler.planning.machines.hardware import H200
from weft.compiler.planning.schedule import Schedule
from weft.compiler.planning.signature import MOST_OF_A_SHORT_CALL, is_short_call
from weft.runtime import build, driver
from weft.runtime.run.variant import forget
from weft.runtime.store import tuned
from weft.tools import tuning

CAUSAL = weft.Attention(mask=masks.causal, name="short_causal")
FULL = weft.Attention(name="short_full")
SLOPES = weft.tensor("slopes", 1)
LONG = "192x128s3q2+pairs"
SHORT = "128x64s4q1+regs+lazy+pairs"
# lengths of queries and of as many keys that are short: of a full call, and under a mask
OF_FULL = [(1, 256)]
OF_MASKED = [(1, 512), (577, 896), (961, 1024)]


def sizes(q_len: int, head_dim: int = 64, kv_len: int | None = None, dtype: str = "bf16", **more: int) -> weft.Shape:
    return weft.shape(heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype, **more)


def form_of(variant: weft.Attention, shape: weft.Shape, **options: object) -> str:
    plan = variant.plan(shape, **{"device": "h200", **options})
    return str(plan.code("forward").form("flash_forward"))


# -- which calls are short ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("masked", "runs"), [(False, OF_FULL), (True, OF_MASKED)])
def test_which_calls_are_short(masked: bool, runs: list[tuple[int, int]]) -> None:
    lengths = range(1, 20_000)
    found = [n for n in lengths if is_short_call(n, n, masked)]
    assert found == [n for n in lengths if any(first <= n <= last for first, last in runs)]
    assert max(found) <= MOST_OF_A_SHORT_CALL


def test_behind_more_keys_than_queries_a_mask_hides_little() -> None:
    for q_len in (1, 128, 200, 256, 400, 512, 640, 1000):
        assert (
            is_short_call(q_len, q_len + 1, True)
            == is_short_call(q_len, q_len + 1, False)
            == is_short_call(q_len, 10**6, False)
        )
        assert is_short_call(q_len, q_len - 1, True) == is_short_call(q_len, q_len, True)


# -- plans, sources and what `explain` says ----------------------------------------------------------------------------
EDGES = (17, 63, 64, 65, 127, 128, 129, 192, 193, 197, 256, 257, 384, 385, 512, 513, 640, 641, 960, 961, 1024, 1025)


@pytest.mark.parametrize("variant", [CAUSAL, FULL], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_plan_has_the_form_of_its_lengths(variant: weft.Attention, dtype: str) -> None:
    for n in (*EDGES, 1026, 2048, 100_000):
        short = is_short_call(n, n, variant.canonical.is_masked)
        assert form_of(variant, sizes(n, dtype=dtype)) == (SHORT if short else LONG), n


@pytest.mark.parametrize("kv_len", [256, 512, 513, 4096])
def test_the_number_of_keys_counts_under_a_mask(kv_len: int) -> None:
    assert form_of(CAUSAL, sizes(512, kv_len=kv_len)) == (SHORT if kv_len <= 512 else LONG)
    assert form_of(FULL, sizes(512, kv_len=kv_len)) == LONG
    assert form_of(FULL, sizes(256, kv_len=kv_len)) == SHORT


@pytest.mark.parametrize("q_len", [200, 512, 2048])
def test_source_and_schedule_are_those_of_the_plan(q_len: int) -> None:
    shape = sizes(q_len)
    plan = CAUSAL.plan(shape, device="h200")
    text = CAUSAL.source(shape, device="h200")
    form = plan.code("forward").form("flash_forward")
    assert f"BLOCK_KV = gl.constexpr({form.block_kv})" in text
    assert f"CONSUMERS = gl.constexpr({form.block_q // 64})" in text
    # asked for, a schedule is that of calls of any length
    for other in (100, 300, 1000, 5000):
        assert form_of(CAUSAL, sizes(other), schedule=str(plan.schedule)) == str(form)
        short = is_short_call(other, other, True)
        assert form_of(CAUSAL, sizes(other), schedule="flash") == (SHORT if short else LONG)


def test_explain_says_whether_a_call_is_short_and_why() -> None:
    said = {n: " ".join(CAUSAL.explain(sizes(n), device="h200").split()) for n in (512, 2048)}
    assert f"flash_forward=hopper:{SHORT}" in said[512] and driver.SHORT_CALL in said[512]
    assert f"flash_forward=hopper:{LONG}" in said[2048] and driver.LONG_CALL in said[2048]
    for text in (CAUSAL.explain(sizes(512, 128), device="h200"), CAUSAL.explain(sizes(512), device="a100")):
        assert "short" not in text.replace("short_causal", "")


def test_a_score_that_reads_positions_and_wider_heads_have_one_form() -> None:
    alibi = weft.Attention(score + SLOPES[head] * (kv_pos - q_pos), masks.causal, name="short_alibi")
    dropped = CAUSAL.replace(dropout=0.1, name="short_dropped")
    documents = CAUSAL.replace(mask=masks.causal & masks.document(weft.tensor("doc", 1, int)), name="short_documents")
    biased = weft.Attention(score + weft.tensor("bias", 4)[weft.batch, head, q_pos, kv_pos], name="short_biased")
    for variant, width in [*((v, 64) for v in (alibi, dropped, documents, biased)), (CAUSAL, 80), (CAUSAL, 128)]:
        found = {variant.plan(sizes(n, width), device="h200").codes[0] for n in (100, 512, 2048)}
        assert len({code.schedule for code in found}) == 1 and {code.signature.short_call for code in found} == {False}


@pytest.mark.parametrize(
    ("device", "options"),
    [("a100", {}), ("b200", {}), ("h200", {"target": "triton"}), ("h200", {"dtype": "fp32"}), ("cpu", {})],
)
def test_other_targets_have_one_form(device: str, options: dict[str, str]) -> None:
    dtype = options.pop("dtype", "bf16")
    plans = [CAUSAL.plan(sizes(n, dtype=dtype), device=device, **options) for n in (100, 512, 2048)]
    assert len({plan.codes[0].schedule for plan in plans}) == 1
    assert not any(plan.codes[0].signature.short_call for plan in plans)


def test_lengths_that_lie_on_the_device_take_the_form_of_long_calls() -> None:
    lens = torch.tensor([100, 512], dtype=torch.int32)
    starts = torch.tensor([0, 100, 512], dtype=torch.int32)
    given = {"device": "h200", "target": "hopper"}
    padded = CAUSAL.plan(sizes(512, batch=2), kv_lens=lens, **given)
    packed = CAUSAL.plan(sizes(512), cu_seqlens_q=starts, **given)
    for plan in (padded, packed):
        assert str(plan.code("forward").form("flash_forward")) == LONG


def test_a_backward_is_the_same_behind_both() -> None:
    codes = [CAUSAL.plan(sizes(n), device="h200").code("backward") for n in (512, 2048)]
    assert codes[0] == codes[1]


def test_sinks_and_softcaps_are_short_as_others_are() -> None:
    capped = weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="short_capped")
    sunk = weft.Attention(mask=masks.causal, sink=weft.tensor("sinks", 1)[head], name="short_sunk")
    for variant in (capped, sunk):
        assert [form_of(variant, sizes(n)) for n in (512, 2048)] == [SHORT, LONG]


# -- built ahead, and tuned --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("width", "group", "kernels"), [(64, 0, 2), (128, 0, 1), (64, 4, 2)])
def test_both_forms_are_built_ahead(width: int, group: int, kernels: int, tmp_path: Path) -> None:
    """Of few queries, keys are divided, whatever else: two kernels."""
    job = build.Job(CAUSAL.canonical.text, "forward", "bf16", width, width, "h200", group=group)
    with weft.settings(cache_dir=tmp_path):
        _, found = build.compilations_of(job)
    names = [c.name for c in found]
    assert names == (["split_forward", "join_parts"] if group else ["flash_forward"] * kernels)
    blocks = {c.function.fn.__globals__["CONSUMERS"].value for c in found if not group}
    assert blocks == ({2, 3} if kernels == 2 and not group else set() if group else {2})


def test_steps_of_few_queries_that_keep_flash_are_built_in_the_form_of_short_calls(tmp_path: Path) -> None:
    job = build.Job(CAUSAL.canonical.text, "forward", "bf16", 64, 64, "h200", schedule="flash", group=4)
    with weft.settings(cache_dir=tmp_path):
        _, (found,) = build.compilations_of(job)
    assert found.function.fn.__globals__["CONSUMERS"].value == 2
    assert form_of(CAUSAL, sizes(1), schedule="flash") == SHORT


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Tuning whose clock prefers forms with few slots for keys, and then with few keys a slot."""
    monkeypatch.setattr(hardware, "this_machine", lambda: H200)

    def seconds(schedule: Schedule, kernel: str) -> float:
        form = schedule.form(kernel)
        return form.stages + form.block_kv / 1024 if isinstance(form, HopperForm) else 1.0

    monkeypatch.setattr(tuning, "_clock", lambda *_: seconds)
    with weft.settings(cache_dir=tmp_path):
        forget()
        yield
    forget()


def tuned_at(variant: weft.Attention, shape: weft.Shape) -> str:
    found = tuning.tune(variant, shape, {}, target="hopper", progress=False).schedule
    return str(found.form("flash_forward"))


def test_what_tuning_finds_is_of_calls_that_are_short_or_not_as_that_one_was(on_an_h200: None) -> None:
    long = tuned_at(FULL, sizes(2048))
    assert long != LONG
    assert form_of(FULL, sizes(1500)) == long and form_of(FULL, sizes(256)) == SHORT
    short = tuned_at(FULL, sizes(256))
    assert short not in (long, SHORT)
    assert form_of(FULL, sizes(1500)) == long and form_of(FULL, sizes(200)) == short
    assert form_of(FULL, sizes(1024)) == LONG and form_of(FULL, sizes(100)) == SHORT  # of other classes of lengths


def test_what_was_kept_at_a_width_with_one_form_serves_its_class_of_lengths(on_an_h200: None) -> None:
    before = form_of(CAUSAL, sizes(512, 128))
    found = tuned_at(CAUSAL, sizes(256, 128))
    assert found != before
    assert {form_of(CAUSAL, sizes(n, 128)) for n in (182, 256, 362)} == {found}
    assert {form_of(CAUSAL, sizes(n, 128)) for n in (100, 512, 4096)} == {before}


def test_keys_of_what_was_kept_are_as_they_were_but_for_short_calls() -> None:
    long, short = (CAUSAL.plan(sizes(n), device="h200").codes[0].signature for n in (2048, 512))
    assert tuned.key_of(CAUSAL, long, H200, "hopper").widths == "d64-bf16"
    assert tuned.key_of(CAUSAL, short, H200, "hopper").widths == "d64-bf16-short"
    assert short == replace(long, short_call=True) and "d64-bf16-short" in str(short)


def test_predicted_times_are_of_the_form_that_is_taken() -> None:
    shape = sizes(256, batch=64)
    default, tall = (
        FULL.plan(shape, device="h200", schedule=text) for text in (None, f"flash/flash_forward=hopper:{LONG}")
    )
    assert default.kernels[0].form == HopperForm(
        2, 64, 4, 1, query_in_registers=True, lazy_rescale=True, pair_maximum=True
    )
    assert default.seconds("forward") < tall.seconds("forward")
