"""Measured tuning: the fastest form of each kernel is found, kept, found again, shown by plans and used by calls."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import weft
from tests.planned import DENSE, chosen, signature
from weft.codegen.targets.cpu.forms import CpuForm
from weft.codegen.targets.triton.forms import Tiling
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.form import Form
from weft.compiler.planning.machines import hardware
from weft.compiler.planning.machines.hardware import H200
from weft.compiler.planning.records import Shape
from weft.compiler.planning.schedule import Schedule
from weft.compiler.planning.signature import LengthClass, class_of, in_words
from weft.compiler.planning.tuner import LEAST_ROUNDS, MOST_ROUNDS, Spread, Tuned, search
from weft.ir.errors import WeftError
from weft.runtime import driver
from weft.runtime.run.variant import variant_of
from weft.runtime.settings import settings
from weft.runtime.store.tuned import FOLDER, TuneKey, forget, key_of, remember, remembered
from weft.tools import tuning

SHAPE = Shape(2, 8, 2, 1024, 1024, 128, 128)
START = chosen(SHAPE, H200, "triton")
SIGNATURE = signature(SHAPE, "sm_90")
KEY = key_of(DENSE, SIGNATURE, H200, "triton")
HERE = class_of(SHAPE.q_len, SHAPE.kv_len)
FAST, SLOW, BROKEN = Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 2), Tiling(128, 128, 8, 4)
CHOICES = {"flash_forward": [SLOW, FAST, BROKEN], "flash_dkey_dvalue": [SLOW, FAST]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path):
    driver.forget()
    with settings(cache_dir=tmp_path):
        yield tmp_path / FOLDER
    driver.forget()


def stopwatch(schedule: Schedule, kernel: str) -> float:
    form = schedule.form(kernel)
    if form == BROKEN:
        raise RuntimeError("out of resource: shared memory")
    return {FAST: 1e-3, SLOW: 2e-3}[form]


def found_by_search(choices=CHOICES, clock=stopwatch, start: Schedule = START, **options) -> Tuned:
    return search(start, choices, clock, **{"progress": False, **options})


def kept(key: TuneKey = KEY, lengths: LengthClass = HERE) -> Schedule | None:
    """What is remembered for a key."""
    kind = replace(SIGNATURE, direction=key.direction)
    return remembered(DENSE, kind, replace(H200, name=key.hardware), key.target).get(lengths)


# -- searching ---------------------------------------------------------------------------------------------------------
def test_the_fastest_of_each_kernel_is_kept() -> None:
    found = remember(KEY, HERE, found_by_search)
    assert found.schedule == START.with_form("flash_forward", FAST).with_form("flash_dkey_dvalue", FAST)
    assert found.seconds == {"flash_forward": 1e-3, "flash_dkey_dvalue": 1e-3}
    assert found.tried == 5
    assert list(found.failed.values()) == ["RuntimeError: out of resource: shared memory"]
    assert list(found.failed) == [str(START.with_form("flash_forward", BROKEN))]
    assert kept() == found.schedule


def test_one_kernel_is_changed_at_a_time() -> None:
    seen: list[tuple[str, Schedule]] = []

    def clock(schedule: Schedule, kernel: str) -> float:
        seen.append((kernel, schedule))
        return stopwatch(schedule, kernel)

    found_by_search(clock=clock)
    kernels = [kernel for kernel, _ in seen]
    assert kernels == sorted(kernels, key=list(CHOICES).index)
    for kernel, schedule in seen:
        best = START if kernel == "flash_forward" else START.with_form("flash_forward", FAST)
        assert schedule == best.with_form(kernel, schedule.form(kernel))
    first = kernels.index("flash_dkey_dvalue")
    assert [schedule.form(kernel) for kernel, schedule in seen[:3]] == [SLOW, FAST, BROKEN]  # each once, to compile it
    assert sorted(str(s.form(k)) for k, s in seen[3:first]) == sorted([str(SLOW), str(FAST)] * LEAST_ROUNDS)


# -- noise -------------------------------------------------------------------------------------------------------------
def noisy(means: dict[Form, float], noise: float, seed: int = 0):
    """A clock whose runs scatter, and drift for all forms alike."""
    draws = random.Random(seed)
    hour = itertools.count()

    def clock(schedule: Schedule, kernel: str) -> float:
        drift = 1 + 0.2 * math.sin(next(hour) / 40)
        return means[schedule.form(kernel)] * drift * (1 + noise * abs(draws.gauss(0, 1)))

    return clock


OTHER = Tiling(32, 64, 4, 3)
FORMS = {"flash_forward": [START.form("flash_forward"), FAST, OTHER]}


@pytest.mark.parametrize("seed", range(5))
def test_a_difference_within_the_noise_is_a_tie_that_keeps_the_default(seed: int) -> None:
    default = START.form("flash_forward")
    clock = noisy({default: 1.0, FAST: 1.0, OTHER: 2.0}, noise=0.3, seed=seed)
    found = found_by_search(FORMS, clock)
    outcome = found.outcomes["flash_forward"]
    assert (found.schedule, outcome.chosen) == (START, default)
    assert default in outcome.tied and OTHER not in outcome.tied
    assert len(outcome.spreads[OTHER].runs) < MOST_ROUNDS  # it left when it was surely slower
    low, high = outcome.spreads[default].quartiles
    assert low < outcome.spreads[default].median == found.seconds["flash_forward"] < high


@pytest.mark.parametrize("seed", range(5))
def test_a_difference_that_few_runs_hide_is_found_by_more(seed: int) -> None:
    default = START.form("flash_forward")
    found = found_by_search(FORMS, noisy({default: 1.25, FAST: 1.0, OTHER: 1.25}, noise=0.3, seed=seed))
    outcome = found.outcomes["flash_forward"]
    assert outcome.chosen == FAST and outcome.tied == (FAST,) and not outcome.is_tie
    assert len(outcome.spreads[FAST].runs) > LEAST_ROUNDS


def test_a_clear_difference_takes_the_least_rounds() -> None:
    outcome = found_by_search().outcomes["flash_forward"]
    assert {len(spread.runs) for spread in outcome.spreads.values()} == {LEAST_ROUNDS}
    assert outcome.chosen == FAST and BROKEN not in outcome.spreads


def test_the_rounds_of_a_kernel_take_only_so_long(monkeypatch) -> None:
    from weft.compiler.planning import tuner

    monkeypatch.setattr(tuner, "SECONDS", 0.0)
    outcome = found_by_search({"flash_forward": [SLOW, FAST]}, lambda *_: 1.0).outcomes["flash_forward"]
    assert outcome.is_tie and {len(spread.runs) for spread in outcome.spreads.values()} == {LEAST_ROUNDS}
    assert outcome.chosen == outcome.tied[0]  # the default was not among them


def test_the_interval_of_a_median_holds_it_nineteen_times_of_twenty() -> None:
    draws = random.Random(1)
    for count in (LEAST_ROUNDS, 20, MOST_ROUNDS):
        inside = 0
        for _ in range(1000):
            low, high = Spread(tuple(draws.expovariate(1) for _ in range(count))).of_median
            inside += low <= math.log(2) <= high
        assert inside >= 930, count
    assert Spread((1.0, 2.0, 3.0, 4.0, 5.0)).quartiles == (2.0, 4.0) and Spread((1.0,)).quartiles == (1.0, 1.0)


def test_nothing_that_can_be_timed() -> None:
    with pytest.raises(
        WeftError, match=r"tune: no form of flash_forward could be timed; the last one failed with RuntimeError: out of"
    ):
        remember(KEY, HERE, lambda: found_by_search({"flash_forward": [BROKEN]}))
    assert kept() is None


def test_progress_is_shown(folder: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    remember(KEY, HERE, lambda: found_by_search(progress=True, console=console))
    shown = console.file.getvalue()
    assert "tuning flash_dkey_dvalue" in shown and "5/5" in shown
    assert [p.suffix for p in folder.iterdir() if p.name.endswith(".tmp")] == []


# -- on disk -----------------------------------------------------------------------------------------------------------
def test_another_key_remembers_nothing() -> None:
    remember(KEY, HERE, found_by_search)
    for change in (
        {"hardware": "h100"},
        {"generator": "other"},
        {"triton": "9"},
        {"torch": "9"},
        {"variant": "ffff"},
        {"widths": "d64"},
        {"direction": "backward"},
        {"target": "hopper"},
    ):
        assert replace(KEY, **change).file_name != KEY.file_name
    assert kept() is not None
    assert remembered(weft.Attention(mask=weft.masks.causal), SIGNATURE, H200, "triton") == {}
    assert remembered(DENSE, signature(replace(SHAPE, dtype="fp16"), "sm_90"), H200, "triton") == {}
    assert remembered(DENSE, signature(SHAPE, "sm_90", "backward"), H200, "triton") == {}
    assert remembered(DENSE, SIGNATURE, hardware.H100, "triton") == {}
    assert remembered(DENSE, SIGNATURE, H200, "hopper") == {}
    forget(KEY)
    assert kept() is None


@pytest.mark.parametrize("part", ["generator", "triton", "torch"])
def test_another_version_remembers_nothing(part, monkeypatch) -> None:
    from weft.runtime.store import tuned

    remember(KEY, HERE, found_by_search)
    monkeypatch.setattr(tuned, "TuneKey", lambda *known: TuneKey(*known, **{part: "other"}))
    assert kept() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "schedule": "flash"}', "\x00"])
def test_a_torn_or_foreign_file_counts_as_absent(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / KEY.file_name).write_text(content)
    assert kept() is None


def test_a_file_of_another_key_under_this_name_counts_as_absent(folder: Path) -> None:
    remember(KEY, HERE, found_by_search)
    path = folder / KEY.file_name
    content = json.loads(path.read_text())
    content["key"]["hardware"] = "a100"
    path.write_text(json.dumps(content))
    assert kept() is None


def test_a_schedule_of_an_older_form_counts_as_absent(folder: Path) -> None:
    remember(KEY, HERE, found_by_search)
    path = folder / KEY.file_name
    content = json.loads(path.read_text())
    content["lengths"]["1024x1024"]["schedule"] = "flash/triton/64x64w4s3/64x64w4s3/64x64w4s3"
    path.write_text(json.dumps(content))
    assert kept() is None


def test_a_file_of_before_lengths_counted_counts_as_absent(folder: Path) -> None:
    remember(KEY, HERE, found_by_search)
    path = folder / KEY.file_name
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"key": content["key"], **content["lengths"]["1024x1024"]}))
    assert kept() is None
    remember(KEY, HERE, found_by_search)
    assert kept() is not None


def test_keys_ignore_lengths_and_heads_and_name_widths() -> None:
    other = replace(SHAPE, batch=9, heads=3, kv_heads=1, q_len=1, kv_len=77)
    assert key_of(DENSE, signature(other, "sm_90"), H200, "triton") == KEY
    assert KEY.widths == "d128-bf16"
    wide = Shape(1, 16, 16, 8, 8, 192, 128, "fp16")
    assert key_of(DENSE, signature(wide, "sm_90"), H200, "triton").widths == "d192v128-fp16"


def test_tuning_one_algorithm_leaves_the_others_as_they_were(on_a_cpu, monkeypatch) -> None:
    """What calls find that ask for nothing is of flash: a search among streaming kernels must not write over it."""
    monkeypatch.setattr(hardware, "this_machine", lambda: H200)
    monkeypatch.setattr(tuning, "_clock", lambda *_: lambda schedule, kernel: float(schedule.form(kernel).num_stages))
    variant, sizes = tuned_variant("tuned_algorithms"), weft.shape(heads=8, q_len=1024, head_dim=128)
    untuned = chosen(SHAPE, H200, "triton", attention=variant)
    flash = tuning.tune(variant, sizes, {}, target="triton", progress=False).schedule
    assert flash.form("flash_forward") != untuned.form("flash_forward")
    assert variant.plan(sizes, target="triton").schedule == flash
    streaming = tuning.tune(variant, sizes, {}, target="triton", algorithm="streaming", progress=False).schedule
    assert streaming.algorithm == "streaming"
    assert variant.plan(sizes, target="triton").schedule == flash


# -- in calls and plans ------------------------------------------------------------------------------------------------
SMALL = weft.shape(heads=1, q_len=96, head_dim=16, dtype="fp32")
KERNELS = ("flash_forward", "flash_backward")


@pytest.fixture
def on_a_cpu(monkeypatch) -> hardware.Hardware:
    """Whatever this machine is, tuning and plans are of its CPU."""
    cpu = hardware.for_device("cpu")
    monkeypatch.setattr(hardware, "this_machine", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return cpu


def tuned_variant(name: str) -> weft.Attention:
    return weft.Attention(mask=weft.masks.causal & (weft.q_pos - weft.kv_pos < 77), name=name)


def decided(monkeypatch, variant: weft.Attention) -> dict[str, CpuForm]:
    """A clock on which other forms win than those that are chosen without one, whatever is tried on this machine; these
    forms, once they were timed."""
    before, won = variant.plan(SMALL).schedule, {}

    def clock(schedule, kernel):
        form = schedule.form(kernel)
        if form != before.form(kernel):
            won.setdefault(kernel, form)
        return 1.0 if form == won.get(kernel) else 2.0

    monkeypatch.setattr(tuning, "_clock", lambda *_: clock)
    return won


def used(variant: weft.Attention, monkeypatch, length: int = 96) -> Schedule:
    """The schedule of what a call launches, forward and backward."""

    def call() -> None:
        query = torch.randn(1, 1, length, 16, requires_grad=True)
        out = variant(query, query, query)
        assert out.shape == query.shape
        out.sum().backward()

    forward, backward = launched_by(call, variant, monkeypatch)
    return forward.joined(backward)


def launched_by(call: Callable[[], object], variant: weft.Attention, monkeypatch) -> list[Schedule]:
    """The schedules of what a call launches, by any way."""
    from weft.codegen.targets.cpu.launcher import CpuLauncher

    launched: list[Schedule] = []

    def told(way, launcher: CpuLauncher):
        def launch(*arguments):
            found = way(*arguments)
            launched.extend([launcher.code.schedule] * (found is not None))
            return found

        return launch

    call()  # prepares what is launched: a first call may take a fast way at once
    prepared = variant_of(variant)
    with monkeypatch.context() as patched:
        run = CpuLauncher.__call__
        patched.setattr(
            CpuLauncher, "__call__", lambda self, *rest: told(lambda *given: run(self, *given), self)(*rest)
        )
        for ready in (*prepared._forwards.values(), *prepared._backwards.values()):
            ways = ready.launcher.fast
            hooked = {n: told(getattr(ways, n), ready.launcher) for n in ("direct", "keeping")}
            patched.setattr(ready.launcher, "fast", ways._replace(**hooked))
        call()
    return launched


def resolved_now(variant: weft.Attention, machine: hardware.Hardware) -> Schedule:
    codes = [
        driver.resolve(variant, signature(SMALL, "cpu", direction), machine).code
        for direction in ("forward", "backward")
    ]
    return codes[0].schedule.joined(codes[1].schedule)


def test_a_tuned_schedule_is_the_one_that_plans_show_and_calls_use(on_a_cpu, monkeypatch) -> None:
    variant = tuned_variant("tuned_once")
    won, before = decided(monkeypatch, variant), variant.plan(SMALL).schedule
    found = tuning.tune(variant, SMALL, {}, progress=False)
    assert all(isinstance(won[name], CpuForm) and before.form(name) != won[name] for name in KERNELS)
    assert {name: found.schedule.form(name) for name in KERNELS} == won and found.tried == 10
    assert found.schedule == variant.plan(SMALL).schedule == resolved_now(variant, on_a_cpu)
    again = weft.Attention(variant.score, variant.mask, name="tuned_once")
    assert used(again, monkeypatch) == found.schedule
    for other in (SMALL, replace(SMALL, batch=3, heads=2, q_len=100)):
        assert again.plan(other).schedule == found.schedule
    assert f"flash_forward=cpu:{won['flash_forward']}" in variant.explain(SMALL)
    assert variant.plan(SMALL, schedule="flash").schedule == found.schedule != before
    # what a call asks for comes before what was timed
    part = variant.plan(SMALL, schedule="flash/flash_forward=cpu:32x32").schedule
    assert part.form("flash_forward") == CpuForm(32, 32)


def test_a_tuned_schedule_serves_calls_that_were_prepared_before(on_a_cpu, monkeypatch) -> None:
    variant = tuned_variant("tuned_after_a_call")
    decided(monkeypatch, variant)
    before = used(variant, monkeypatch)
    found = tuning.tune(variant, SMALL, {}, progress=False)
    assert before != found.schedule
    assert used(variant, monkeypatch) == variant.plan(SMALL).schedule == found.schedule


# -- classes of lengths ------------------------------------------------------------------------------------------------
def test_a_class_has_lengths_up_to_a_square_root_of_two_away() -> None:
    for length in (1, 2, 3, 5, 7, 96, 181, 182, 256, 362, 363, 4096, 2**31 - 1):
        nearest, _ = class_of(length, 1)
        assert nearest.bit_count() == 1
        assert nearest**2 <= 2 * length**2 <= 4 * nearest**2, length  # within a factor of sqrt(2)
    assert class_of(0, 7) == (0, 8) and in_words((128, 4096)) == "128 x 4096"


def test_each_class_of_lengths_keeps_a_form_of_its_own() -> None:
    remember(KEY, HERE, found_by_search)
    assert kept(lengths=(512, 1024)) is kept(lengths=(1024, 4096)) is None
    slow = found_by_search({"flash_forward": [SLOW]})
    remember(KEY, (4096, 4096), lambda: slow)
    assert kept().form("flash_forward") == FAST and kept(lengths=(4096, 4096)) == slow.schedule
    remember(KEY, HERE, lambda: slow)
    assert kept() == kept(lengths=(4096, 4096)) == slow.schedule


def test_a_form_that_was_timed_at_short_lengths_is_not_that_of_long_ones(on_a_cpu, monkeypatch) -> None:
    """Of plans, of calls and of calls that were prepared before, forward and backward, in any order of lengths."""
    variant = tuned_variant("tuned_at_96")
    long = replace(SMALL, q_len=400, kv_len=400)
    before, before_long = used(variant, monkeypatch), variant.plan(long).schedule
    decided(monkeypatch, variant)
    found = tuning.tune(variant, SMALL, {}, progress=False).schedule
    assert found != before == before_long
    assert variant.plan(SMALL).schedule == found and variant.plan(long).schedule == before_long
    for length, want in ((96, found), (400, before_long), (96, found), (120, found), (380, before_long)):
        assert used(variant, monkeypatch, length) == want, length
    text = variant.explain(SMALL)
    assert "forms of the forward are those that `weft tune` found for about 128 x 128 queries and keys" in flowed(text)
    assert "`weft tune` timed the backward for about 128 x 128 queries and keys alone" in flowed(variant.explain(long))


def test_repeated_calls_of_many_lengths_prepare_no_more_than_the_classes_that_were_timed(on_a_cpu, monkeypatch) -> None:
    variant = tuned_variant("tuned_and_many_lengths")
    decided(monkeypatch, variant)
    found = tuning.tune(variant, SMALL, {}, progress=False).schedule
    for length in (96, 400):
        used(variant, monkeypatch, length)
    built = driver.builds()
    for length in (100, 96, 300, 96, 128, 333, 170, 96):
        want = found if class_of(length, length) == (128, 128) else variant.plan(replace(SMALL, q_len=400)).schedule
        for _ in range(3):
            assert used(variant, monkeypatch, length) == want, length
    assert driver.builds() == built


@pytest.mark.parametrize("kind", ["lengths", "packed"])
def test_sequences_of_their_own_lengths_have_the_class_of_their_room_or_their_mean(on_a_cpu, monkeypatch, kind) -> None:
    variant = tuned_variant(f"tuned_{kind}")
    decided(monkeypatch, variant)
    found = tuning.tune(variant, SMALL, {}, progress=False).schedule
    for length in (96, 400):
        rows = torch.randn(1, 1, 2 * length, 16) if kind == "packed" else torch.randn(2, 1, length, 16)
        starts = torch.tensor([0, length - 7, 2 * length], dtype=torch.int32)
        own = {"q_lens": starts.diff(), "kv_lens": starts.diff()}
        if kind == "packed":
            own = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        else:
            own = {name: lens.clamp(max=length) for name, lens in own.items()}
        (launched,) = launched_by(lambda rows=rows, own=own: variant(rows, rows, rows, **own), variant, monkeypatch)
        assert variant.plan(rows, rows, rows, **own).schedule.form("flash_forward") == launched.form("flash_forward")
        assert (launched.form("flash_forward") == found.form("flash_forward")) == (length == 96)


def flowed(text: str) -> str:
    return " ".join(text.split())


def test_tuning_by_the_clock(on_a_cpu) -> None:
    variant = tuned_variant("tuned_by_the_clock")
    found = tuning.tune(variant, SMALL, {}, progress=False)
    assert not found.failed and all(0 < seconds < 60 for seconds in found.seconds.values())
    assert [*found.schedule.kernels] == [*found.seconds] == ["flash_forward", "flash_backward"]
    assert variant.plan(SMALL).schedule == resolved_now(variant, on_a_cpu) == found.schedule


def test_operands_that_do_not_fit_the_machine_are_said_before_anything_is_timed(on_a_cpu) -> None:
    with pytest.raises(
        WeftError, match=r"dense: tune: query, key and value of these sizes take [\d,]+ GiB and cannot be"
    ):
        tuning.tune(
            weft.Attention(name="dense"), weft.shape(heads=512, q_len=1 << 30, head_dim=256), {}, progress=False
        )


def test_no_bar_is_shown_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    found_by_search(progress=True, console=console)
    assert console.file.getvalue() == ""


def test_tensor_operands_are_drawn_where_they_are_not_given(on_a_cpu, monkeypatch) -> None:
    """All that a call can want has its gradient; what is given is used as it is."""
    slopes, ids = weft.tensor("slopes", 1), weft.tensor("ids", 2, int)
    seen_with_ids = ids[weft.batch, weft.q_pos] == ids[weft.batch, weft.kv_pos]
    variant = weft.Attention(weft.score + slopes[weft.head] * weft.kv_pos, seen_with_ids, name="tuned_with_tensors")
    drawn = tuning.with_drawn(variant, replace(SMALL, batch=3, heads=2), {})
    assert {n: (tuple(t.shape), t.dtype, t.requires_grad) for n, t in drawn.items()} == {
        "slopes": ((2,), torch.float32, True), "ids": ((3, 96), torch.int32, False),
    }  # fmt: skip
    given = {"ids": torch.zeros(1, 96, dtype=torch.int64)}
    assert tuning.with_drawn(variant, SMALL, given)["ids"] is given["ids"]
    before = variant.plan(SMALL, **given).schedule
    called: list[frozenset[str]] = []
    backward = variant_of(variant).backward
    monkeypatch.setattr(variant_of(variant), "backward", lambda b: called.append(b.wanted) or backward(b))
    monkeypatch.setattr("weft.compiler.planning.tuner.SECONDS", 0.0)
    found = tuning.tune(variant, SMALL, given, progress=False)
    assert not found.failed and found.schedule.kernels.keys() == before.kernels.keys()
    assert set(called) == {frozenset({"query", "key", "value", "slopes"})}
    assert variant.plan(SMALL, **given).schedule == found.schedule


def with_own(monkeypatch) -> None:
    """A machine on which torch's own attention is there, and is timed beside tiles whatever is predicted of it."""
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_attention", lambda: torch.bmm)
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_backward", lambda: torch.bmm)


def test_torchs_own_attention_is_one_of_the_forms(on_a_cpu, monkeypatch) -> None:
    """Of a call that it may compute: one form leaves it to torch, the others say that tiles compute it."""
    with_own(monkeypatch)
    for mask, whole in ((weft.masks.causal, True), (weft.masks.causal & (weft.q_pos - weft.kv_pos < 77), False)):
        for length in (64, 96):
            variant, tried = weft.Attention(mask=mask, name=f"tuned_whole_{whole}"), {}

            def clock(schedule, kernel, tried=tried):
                tried.setdefault(kernel, []).append(schedule.form(kernel))
                return 1.0 if not schedule.form(kernel).in_tiles else 2.0

            monkeypatch.setattr(tuning, "_clock", lambda *_, clock=clock: clock)
            found = tuning.tune(variant, replace(SMALL, q_len=length, kv_len=length), {}, progress=False)
            for kernel, forms in tried.items():
                left_to_torch = {form for form in forms if not form.in_tiles}
                if whole:
                    assert len(left_to_torch) == 1 and len(set(forms)) > 1
                    assert found.schedule.form(kernel) in left_to_torch
                else:  # it makes no difference to this call, so that what others of its class get stays
                    assert len({form.in_tiles for form in forms}) == 1


def test_what_cannot_be_tuned() -> None:
    window, table = weft.scalar("window", int), weft.tensor("table", 1)
    with pytest.raises(WeftError, match="tune: expected a variant without latent attention"):
        tuning.tune(weft.Attention(latent=weft.Latent(rank=64, rope=16)), SMALL, {})
    with pytest.raises(WeftError, match="window: missing; pass window=..., which `table"):
        tuning.tune(weft.Attention(weft.score + table[weft.kv_pos + window]), SMALL, {})
    with pytest.raises(WeftError, match="tune: window: missing; pass window="):
        tuning.tune(weft.Attention(mask=weft.q_pos - weft.kv_pos < window), SMALL, {})


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("deterministic", [True, False])
def test_forms_that_are_timed_are_those_of_kernels_with_forms_of_their_own(width: int, deterministic: bool) -> None:
    """Each alone gives a schedule that the driver takes, with what is cut as that kernel is."""
    kind = replace(signature(Shape(1, 4, 4, 512, 512, width, width), "sm_90", "backward"), deterministic=deterministic)
    found = driver.resolve(DENSE, kind, H200, "hopper")
    choices = tuning.choices_of(found, H200, facts_of(DENSE))
    assert choices.keys() == ({"flash_dquery", "flash_dkey_dvalue"} if deterministic else {"flash_backward"})
    for kernel, forms in choices.items():
        assert found.code.form(kernel) == forms[0] and len(set(forms)) == len(forms)
        for form in forms:
            schedule = found.code.schedule.with_form(kernel, form)
            assert driver.resolve(DENSE, kind, H200, "hopper", schedule).code.form(kernel) == form
