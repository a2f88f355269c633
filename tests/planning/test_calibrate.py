"""What `weft calibrate` measures: how it is written and found again, and what forms and `explain` make of it."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import weft
from weft.codegen import products
from weft.codegen.targets import target_named
from weft.codegen.targets.cpu import choice
from weft.codegen.targets.cpu import kernels as cpu_kernels
from weft.codegen.targets.cpu.forms import CpuForm
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines import hardware
from weft.compiler.planning.machines.hardware import (
    CPU,
    H200,
    Hardware,
    calibrated,
    cpu_with,
    for_device,
    machine_of,
    on_threads,
)
from weft.compiler.planning.machines.rates import (
    KIB,
    MIB,
    Calibration,
    CpuRates,
    GpuRates,
    Machine,
    calibration_of,
    guessed_rates,
    rates_in_words,
    text_of,
)
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.ir.errors import WeftError
from weft.runtime.store import calibrated as kept
from weft.tools import calibration
from weft.tools.cli import main

CPU_FLASH = (cpu_kernels.FLASH_FORWARD, cpu_kernels.FLASH_BACKWARD)

RATES = replace(guessed_rates(2), call_seconds=1.25e-6, exp_per_second=3.5e9)
OF_A_CPU = Calibration(Machine("cpu", "Some Processor", 2), "2026-11-22T20:00:00+00:00", "2.11.0", 24.5, RATES)
OF_A_GPU = Calibration(
    Machine("cuda", "NVIDIA H200", 132), "2026-11-22T20:00:00+00:00", "2.11.0", 9.0,
    GpuRates((("bf16", 780e12), ("fp16", 770e12), ("fp32", 50e12)), 4.1e12, 6.5e12, 3.9e12, 1.5e-6),
)  # fmt: skip
CAUSAL = weft.Attention(mask=weft.masks.causal, name="calibrated_causal")
SOFTCAP = weft.Attention(weft.scores.softcap(20.0)(weft.score), weft.masks.causal, name="calibrated_softcap")
SIZES = weft.shape(heads=2, q_len=512, head_dim=64, dtype="fp32")


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    """A cache folder of its own, and what was read before forgotten."""
    monkeypatch.delenv("WEFT_CALIBRATION", raising=False)
    kept.forget()
    with weft.settings(cache_dir=tmp_path / "cache"):
        yield
    kept.forget()


def here(rates: CpuRates = RATES) -> Calibration:
    """A calibration of this machine's CPU."""
    return replace(OF_A_CPU, machine=machine_of("cpu"), rates=rates)


# -- the file ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("found", [OF_A_CPU, OF_A_GPU], ids=["cpu", "gpu"])
def test_a_calibration_reads_back(found: Calibration, tmp_path) -> None:
    assert calibration_of(text_of(found)) == found
    kept.write(found, tmp_path / "here.json")
    assert kept.read(tmp_path / "here.json") == found
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here.json"]


def _changed(change) -> str:
    found = json.loads(text_of(OF_A_CPU))
    change(found)
    return json.dumps(found)


BROKEN = [
    ("{", "it is no JSON"),
    ("[1]", "expected an object"),
    (_changed(lambda c: c.update(format=2)), "expected format 1, got 2"),
    (_changed(lambda c: c.pop("machine")), "machine is missing"),
    (_changed(lambda c: c["machine"].update(kind="tpu")), "expected cpu, cuda or hip, got 'tpu'"),
    (_changed(lambda c: c["machine"].update(units=True)), "machine.units: expected a whole number of at least 0"),
    (_changed(lambda c: c["one_core"].update(call_seconds=0)), "one_core.call_seconds: expected a positive number"),
    (_changed(lambda c: c["one_core"].update(exp_per_second="fast")), "expected a positive number, got 'fast'"),
    (_changed(lambda c: c["one_core"]["product_flops"].update(blas={})), "expected torch and onednn, got 'blas'"),
    (_changed(lambda c: c["one_core"]["product_flops"].pop("torch")), "expected rates of torch"),
    (_changed(lambda c: c["one_core"]["product_flops"]["torch"].update({"64": {"64 keys": 1}})), "as '256 queries'"),
    (_changed(lambda c: c["cache_bytes"].update(L2=0)), "cache_bytes.L2: expected a whole number of at least 1"),
    (text_of(OF_A_GPU).replace('"bf16": 780000000000000.0', '"bf16": NaN'), "product_flops.bf16: expected a positive"),
]


@pytest.mark.parametrize(("text", "said"), BROKEN, ids=[said[:30] for _, said in BROKEN])
def test_a_broken_file_is_refused(text: str, said: str, tmp_path, monkeypatch) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(WeftError, match=f"calibration {path}: .*measure again with `weft calibrate`") as raised:
        kept.read(path)
    assert said in str(raised.value)
    monkeypatch.setenv("WEFT_CALIBRATION", str(path))
    with pytest.raises(WeftError, match="calibration"):
        for_device("cpu")


def test_a_broken_file_of_the_cache_folder_is_left_aside_with_a_warning() -> None:
    kept.file_of(machine_of("cpu")).write_text("{")
    with pytest.warns(UserWarning, match=r"no JSON.*measure again with `weft calibrate`. Until then figures are those"):
        assert for_device("cpu").figures == hardware.GUESSED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert for_device("cpu").figures == hardware.GUESSED  # said once


def test_a_file_that_is_not_there_or_of_another_machine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WEFT_CALIBRATION", str(tmp_path / "none.json"))
    with pytest.raises(WeftError, match=r"none.json: cannot be read \(No such file.*weft calibrate -o .*none.json"):
        for_device("cpu")
    other = tmp_path / "other.json"
    kept.write(OF_A_CPU, other)
    monkeypatch.setenv("WEFT_CALIBRATION", str(other))
    with pytest.raises(WeftError, match=r"is of Some Processor \(2 cores\), this is .*; measure with"):
        for_device("cpu")
    kept.write(OF_A_GPU, other)  # says nothing about a CPU
    assert for_device("cpu").figures == hardware.GUESSED
    with pytest.raises(WeftError, match="cannot be written"):
        kept.write(OF_A_CPU, tmp_path / "nowhere" / "x.json")


# -- where it is used --------------------------------------------------------------------------------------------------
def test_what_was_measured_is_what_plans_count_with() -> None:
    before = CAUSAL.plan(SIZES, device="cpu")
    assert before.hardware.figures == hardware.GUESSED
    assert "figures       guessed: `weft calibrate` measures this machine" in CAUSAL.explain(SIZES, device="cpu")
    kept.write(here(), kept.file_of(machine_of("cpu")))
    after = CAUSAL.plan(SIZES, device="cpu")
    assert for_device("cpu") is for_device(torch.device("cpu")) and for_device("cpu").cpu == RATES
    assert after.hardware == on_threads(for_device("cpu"), torch.get_num_threads())
    text = CAUSAL.explain(SIZES, device="cpu")
    assert "figures       calibrated on this machine, 2026-11-22, torch 2.11.0" in text
    assert (
        "exp 3.5G/s of a core" in text
        and f"call {1.25e6 * after.kernels[0].on_cpu.speed.call_seconds / 1.25:.4g} us" in text
    )
    assert "calibrated on this machine" in CliRunner().invoke(main, ["doctor"]).output
    assert "shipped" in CAUSAL.explain(SIZES, device="h200").split("figures", 1)[1].splitlines()[0]


def test_a_setting_names_a_file_in_place_of_the_cache_folders(tmp_path, monkeypatch) -> None:
    kept.write(here(), kept.file_of(machine_of("cpu")))
    kept.write(here(replace(RATES, call_seconds=7e-6)), tmp_path / "own.json")
    assert for_device("cpu").launch_seconds == 1.25e-6
    monkeypatch.setenv("WEFT_CALIBRATION", str(tmp_path / "own.json"))
    assert for_device("cpu").launch_seconds == 7e-6


def test_the_rates_of_a_gpu() -> None:
    found = calibrated(H200, OF_A_GPU)
    assert (found.matrix_flops("bf16"), found.matrix_flops("fp32")) == (780e12, 50e12)
    assert found.matrix_flops("fp64") == H200.matrix_flops("fp64")  # not measured
    assert found.hbm_bytes_per_second == pytest.approx(4.1e12) and found.launch_seconds == 1.5e-6
    assert dict(rates_in_words(OF_A_GPU.rates))["products"] == "bf16 780, fp16 770, fp32 50 TFLOP/s"


def test_the_command_measures_and_says_what(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "calibrate", lambda device: here() if device == "cpu" else None)
    said = CliRunner().invoke(main, ["calibrate", "--device", "cpu", "-o", str(tmp_path / "here.json")])
    assert said.exit_code == 0, said.output
    assert f"to use it, set WEFT_CALIBRATION={tmp_path / 'here.json'}" in said.output and "2048 KiB" in said.output
    assert kept.read(tmp_path / "here.json") == here()
    said = CliRunner().invoke(main, ["calibrate", "--device", "cpu"])
    assert str(kept.file_of(machine_of("cpu"))) in said.output.replace("\n", "")
    assert for_device("cpu").figures.startswith("calibrated")
    said = CliRunner().invoke(main, ["calibrate", "-o", str(tmp_path / "no" / "file.json")])
    assert said.exit_code == 2 and "is no folder" in said.output


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("tpu", "expected cpu or cuda"),
        ("meta", "expected cpu or cuda, got meta"),
        ("cuda:99", "torch finds no cuda:99 here"),
    ],
)
def test_a_device_that_is_not_there(device: str, said: str) -> None:
    with pytest.raises(WeftError, match=said):
        calibration.calibrate(device)


def test_measuring_this_cpu() -> None:
    """In a second: what it finds is a calibration, whole, and of this machine."""
    threads = torch.get_num_threads()
    found = calibration.calibrate("cpu", seconds=0.3)
    assert torch.get_num_threads() == threads
    assert calibration_of(text_of(found)) == found and found.machine == machine_of("cpu")
    rates = found.rates
    assert isinstance(rates, CpuRates) and rates.caches == hardware.cpu_caches()
    tiles = {(rate.library, rate.queries, rate.keys): rate.flops for rate in rates.products}
    assert len(tiles) == 16 * (1 + (products.one_dnn_linear() is not None))
    assert tiles["torch", 256, 1024] > tiles["torch", 64, 64] / 2 and 1e-7 < rates.call_seconds < 1e-3
    assert 1.0 <= rates.all_products <= found.machine.units and rates.all_ram >= rates.bandwidths[3]
    names = {"fp16", "bf16", "fp32", "fp64"} if products.own_attention() else set()
    assert {dtype for dtype, _ in rates.attention} == names
    assert {dtype for dtype, _ in rates.attention_backward} == (names if products.own_backward() else set())


# -- whether it is to be trusted ---------------------------------------------------------------------------------------
class Watch:
    """A clock that steps turn: how long each takes, run by run; the last for ever."""

    def __init__(self, runs: dict[str, list[float]]) -> None:
        self.now, self.runs = 0.0, runs

    def __call__(self) -> float:
        return self.now

    def steps(self) -> dict[object, calibration.Step]:
        return {name: lambda name=name: self.run(name) for name in self.runs}

    def run(self, name: str) -> None:
        left = self.runs[name]
        self.now += left.pop(0) if len(left) > 1 else left[0]


def test_the_spread_is_that_of_rounds() -> None:
    """Each step takes longer than a turn, so that a round has one run of it; two runs come before the rounds."""
    quiet = Watch({"a": [0.1], "b": [0.2]})
    assert calibration.least(quiet.steps(), 1.0, quiet) == (
        {"a": pytest.approx(0.1), "b": pytest.approx(0.2)},
        pytest.approx(0.0),
    )
    busy = Watch({"a": [0.1, 0.1, *[0.13, 0.1] * 3, 0.13], "b": [0.2, 0.2, *[0.28, 0.24, 0.2] * 3, 0.24]})
    found = calibration.least(busy.steps(), 2.5, busy)
    assert found.seconds == {"a": pytest.approx(0.1), "b": pytest.approx(0.2)}
    assert 0.15 < found.spread < 0.3  # between that of a and of b


@pytest.mark.parametrize(
    ("spread", "load", "cores", "said"),
    [
        (0.03, 0.2, 2, None),
        (0.03, 20.0, 64, None),  # of a large machine, other cores
        (0.03, 1.7, 2, r"1.7 other processes were running before it began, on 2 cores of which it wants 2"),
        (0.03, 63.0, 64, r"63.0 other processes were running"),
        (0.25, 0.2, 2, r"the same steps took 25% longer in the middle of their rounds than in the best, where 10%"),
        (0.25, 0.0, 0, r"the same steps took 25% longer"),  # a system that tells neither load nor cores
    ],
)
def test_figures_of_a_busy_machine_are_not_to_be_trusted(spread, load, cores, said, monkeypatch) -> None:
    """The command says so, and so do plans that count with them; the file keeps both numbers."""
    found = replace(here(), machine=replace(machine_of("cpu"), units=2), spread=spread, load=load, cores=cores)
    assert calibration_of(text_of(found)) == found
    assert len(found.doubts) == (said is not None)
    monkeypatch.setattr(calibration, "calibrate", lambda device: found)
    result = CliRunner().invoke(main, ["calibrate", "--device", "cpu"])
    assert result.exit_code == 0 and f"spread of the same steps {spread:.1%}, load before {load:.1f}" in result.output
    title = "not to be trusted" in found.title
    if said is None:
        assert "trusted" not in result.output and not title
    else:
        assert (
            re.search(f"these figures are not to be trusted: {said}.*Measure again on a quiet", result.output) and title
        )


def test_a_file_from_before_the_spread_was_kept_is_read() -> None:
    found = json.loads(text_of(OF_A_CPU))
    for name in ("spread", "load", "cores"):
        del found[name]
    assert calibration_of(json.dumps(found)).doubts == ()
    found["spread"] = -1
    with pytest.raises(WeftError, match="spread: expected a number from 0 on, got -1"):
        calibration_of(json.dumps(found))


# -- forms -------------------------------------------------------------------------------------------------------------
def first_form(
    machine: Hardware, variant: weft.Attention, direction: str = "forward", dtype: str = "fp32",
    wanted: frozenset[str] = frozenset(),
) -> CpuForm:  # fmt: skip
    kernel = CPU_FLASH[direction == "backward"]
    signature = Signature(kernel.direction, "cpu", Dtypes.all(dtype), Widths(64, 64), wanted=wanted)
    return target_named("cpu").forms(kernel, signature, machine, facts_of(variant))[0]


def with_caches(l2: int, l3: int, cores: int = 4) -> Hardware:
    return cpu_with(guessed_rates(cores, True, (32 * KIB, l2, l3)), cores)


def test_steps_of_a_cpu_are_those_of_a_cpu_whatever_torchs_defaults() -> None:
    steps = [calibration._pass(64), calibration._heads(1), calibration._attention(torch.bfloat16)]
    want = [step() for step in steps]
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        found = [calibration._pass(64)(), calibration._heads(1)(), calibration._attention(torch.bfloat16)()]
        calibration._two_products("torch", 64, 64)()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    kinds = [[(t.dtype, t.device) for t in of if isinstance(t, torch.Tensor)] for of in (want, found)]
    assert len(kinds[0]) == 2 and kinds[0] == kinds[1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("variant", [CAUSAL, SOFTCAP], ids=["causal", "softcap"])
def test_tiles_follow_the_cache(direction: str, variant: weft.Attention, monkeypatch) -> None:
    """Those that are predicted to be best: of what the model cannot tell apart the usual ones are taken."""
    assert first_form(with_caches(2 * MIB, 32 * MIB), variant, direction) == CpuForm(256, 256)
    assert first_form(CPU, variant, direction) == CpuForm(256, 256)
    monkeypatch.setattr(choice, "WITHIN", 0.0)
    choice._cpu_forms.cache_clear()
    sizes = [first_form(with_caches(l2, 32 * MIB), variant, direction) for l2 in (4 * MIB, MIB, 256 * KIB)]
    kib = [form.cache_kib for form in sizes]
    assert kib == sorted(kib, reverse=True) and kib[0] > kib[-1]
    assert sizes[0].block_q * sizes[0].block_kv >= sizes[-1].block_q * sizes[-1].block_kv
    choice._cpu_forms.cache_clear()


def test_many_cores_share_an_l3() -> None:
    """Tiles that are no longer in a core's L2 are then in RAM."""
    few, many = (with_caches(1 * MIB, 64 * MIB, cores).cpu.pass_bytes_per_second(4 * MIB, cores) for cores in (4, 64))
    assert few > 1.2 * many


def test_products_are_those_that_were_faster(monkeypatch) -> None:
    monkeypatch.setattr("weft.codegen.targets.cpu.target.one_dnn_linear", lambda: products.product)
    twice = tuple(
        replace(rate, flops=2 * rate.flops / 0.7) if rate.library == "onednn" else rate for rate in RATES.products
    )
    faster = cpu_with(replace(RATES, products=twice), 2)
    assert not first_form(cpu_with(RATES, 2), SOFTCAP).one_dnn
    assert first_form(faster, SOFTCAP).one_dnn and first_form(faster, SOFTCAP, "backward").one_dnn
    assert not first_form(faster, SOFTCAP, dtype="fp64").one_dnn  # it takes float32
    monkeypatch.setattr("weft.codegen.targets.cpu.target.one_dnn_linear", lambda: None)
    assert not first_form(faster, SOFTCAP).one_dnn


def test_torchs_own_attention_where_it_is_faster(monkeypatch) -> None:
    """As on a processor without units for bf16, where torch's kernel in that type is slow."""
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_attention", lambda: products.product)
    slow = cpu_with(replace(RATES, attention=(("fp32", 90e9), ("bf16", 10e9))), 2)
    assert not first_form(slow, CAUSAL).in_tiles and first_form(slow, CAUSAL, dtype="bf16").in_tiles
    assert not first_form(slow, SOFTCAP, dtype="bf16").in_tiles  # torch has no such score
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_attention", lambda: None)
    assert not first_form(slow, CAUSAL, dtype="bf16").in_tiles


ALL = frozenset({"query", "key", "value"})


def test_torchs_own_backward_where_it_is_faster(monkeypatch) -> None:
    """Where all is wanted that it computes; in 16 bits without a calibration on processors with units for these."""
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_backward", lambda: products.product)

    def in_tiles(rates: CpuRates, dtype: str, wanted: frozenset[str] = ALL, variant: weft.Attention = CAUSAL) -> bool:
        return first_form(cpu_with(rates, 2), variant, "backward", dtype, wanted).in_tiles

    for units in ((), ("bf16",), ("bf16", "fp16")):
        rates = guessed_rates(2, matrix_units=units)
        found = {dtype for dtype in ("fp32", "fp64", "fp16", "bf16") if not in_tiles(rates, dtype)}
        assert found == {"fp32", "fp64", *units}
    assert in_tiles(rates, "fp32", frozenset({"query"})) and in_tiles(rates, "fp32", frozenset({"value"}))
    assert not in_tiles(rates, "fp32", variant=SOFTCAP) and not in_tiles(rates, "fp32", ALL | {"sink"})
    slow = replace(rates, attention_backward=(("fp32", 10e9), ("bf16", 90e9)))
    assert in_tiles(slow, "fp32") and not in_tiles(slow, "bf16")
    before = replace(rates, attention_backward=(), attention=(("fp32", 90e9), ("bf16", 10e9)))
    assert not in_tiles(before, "fp32") and in_tiles(before, "bf16")  # a calibration from before it was measured
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_backward", lambda: None)
    assert not in_tiles(slow, "fp32")


def test_a_calibration_without_backwards_is_read() -> None:
    found = json.loads(text_of(OF_A_CPU))
    assert found["one_core"].pop("attention_backward_flops")
    rates = calibration_of(json.dumps(found)).rates
    assert isinstance(rates, CpuRates) and rates.attention_backward == ()
    assert "backward" in dict(rates_in_words(RATES))["own attention"]
    assert "backward" not in dict(rates_in_words(rates))["own attention"]


def test_units_are_those_that_the_system_lists(tmp_path, monkeypatch) -> None:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "_CPU_INFO", path)
    assert hardware.matrix_units() == ()
    for flags, units in (("fpu avx512_bf16 avx512_fp16", ()), ("amx_tile amx_bf16", ("bf16",)),
                         ("amx_fp16 amx_bf16", ("bf16", "fp16"))):  # fmt: skip
        path.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t:\n\nprocessor\t: 1\n")
        assert hardware.matrix_units() == units
    path.write_text("Features\t: fp asimd\n")
    assert hardware.matrix_units() == ()


@pytest.mark.parametrize("form", ["64x128c32", "128x64c512+onednn+tiles", "32x32c1"])
def test_every_form_computes_the_same(form: str) -> None:
    if "onednn" in form and products.one_dnn_linear() is None:
        form = form.replace("+onednn", "")
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 300, 16, requires_grad=True) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    schedule = f"flash/flash_forward=cpu:{form}/flash_backward=cpu:{form}"
    for variant in (CAUSAL, SOFTCAP):
        out, exact = variant(*tensors, schedule=schedule), variant.reference(*wide)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        dout = torch.randn_like(exact)
        found = torch.autograd.grad(out, tensors, dout.float())
        for got, wanted in zip(found, torch.autograd.grad(exact, wide, dout), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
        assert f"flash_forward=cpu:{form}" in variant.explain(SIZES, device="cpu", schedule=schedule)


def test_a_core_with_avx512_is_taken_for_a_faster_one(tmp_path, monkeypatch) -> None:
    plain, wide = guessed_rates(2), guessed_rates(2, wide=True)
    assert wide.exp_per_second > 1.5 * plain.exp_per_second and wide.products[0].flops > 1.5 * plain.products[0].flops
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "_CPU_INFO", path)
    peaks = []
    for flags in ("avx2", "avx2 avx512f"):
        path.write_text(f"flags\t\t: {flags}\n")
        hardware._for_device.cache_clear()
        peaks.append(hardware._for_device(torch.device("cpu")).peaks)
    hardware._for_device.cache_clear()
    assert peaks[1] > peaks[0]


# -- what a system reports ---------------------------------------------------------------------------------------------
def test_caches_are_those_that_the_system_lists(tmp_path, monkeypatch) -> None:
    listed = [
        ("Data", 1, "48K"),
        ("Instruction", 1, "32K"),
        ("Unified", 2, "2048K"),
        ("Unified", 3, "300M"),
        ("Odd", 4, ""),
    ]
    for number, words in enumerate(listed):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, word in zip(("type", "level", "size"), words, strict=True):
            (folder / name).write_text(f"{word}\n")
    monkeypatch.setattr(hardware, "_CPU_CACHES", tmp_path)
    assert hardware.cpu_caches() == (48 * KIB, 2 * MIB, 300 * MIB)
    monkeypatch.setattr(hardware, "_CPU_CACHES", tmp_path / "none")
    sizes = {"SC_LEVEL1_DCACHE_SIZE": 64 * KIB, "SC_LEVEL2_CACHE_SIZE": 12 * MIB}
    monkeypatch.setattr(hardware.os, "sysconf", lambda name: sizes.get(name, 0))
    assert hardware.cpu_caches() == (64 * KIB, 12 * MIB, 0)
    monkeypatch.setattr(hardware.os, "sysconf", lambda name: 0)
    assert hardware.cpu_caches() == guessed_rates(1).caches
    assert cpu_with(guessed_rates(4, True, (64 * KIB, 12 * MIB, 0)), 4).l2_bytes == 48 * MIB


def test_a_processor_is_named_as_the_system_names_it(tmp_path, monkeypatch) -> None:
    for text, name in (
        ("processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor\n", "Intel(R) Xeon(R) Processor"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "0x41 0xd4f"),
    ):
        path = tmp_path / "cpuinfo"
        Path(path).write_text(text)
        monkeypatch.setattr(hardware, "_CPU_INFO", path)
        hardware.processor.cache_clear()
        assert hardware.processor().endswith(name)
    monkeypatch.setattr(hardware, "_CPU_INFO", tmp_path / "none")
    hardware.processor.cache_clear()
    assert hardware.processor()
    hardware.processor.cache_clear()
