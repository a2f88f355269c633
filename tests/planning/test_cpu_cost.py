"""What plans predict of target `cpu`: operations priced by kind, torch's threads, and torch's own kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft import exp, kv_pos, masks, q_pos, score, tanh
from weft.codegen import products
from weft.codegen.targets.cpu.cost import beside_products, causal_fraction, is_short
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import TorchWork
from weft.compiler.planning.machines import hardware
from weft.compiler.planning.machines.hardware import CPU, cpu_with, on_threads
from weft.compiler.planning.machines.rates import OPERATIONS, CpuRates, ProductRate, guessed_rates
from weft.compiler.planning.plan import KernelPlan, Plan

SIZES = weft.shape(heads=4, q_len=2048, head_dim=64, dtype="fp32")
SCORES = {
    "softcap": 20.0 * tanh(score / 20.0),
    "exponentials": score + exp(-exp(-score)) + weft.log(1.0 + exp(score)),
    "alibi": score - (q_pos - kv_pos) * weft.exp2(-(weft.head + 1.0)),
    "quotient": score / (1.0 + weft.abs(score)),
}
TILES = "flash/flash_forward=cpu:256x256+tiles/flash_backward=cpu:256x256+tiles"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rates_with(**changes: float) -> CpuRates:
    """Rates of a made-up core: products at 100 GFLOP/s in all tiles, exponentials at 1 G/s, passes at 80 GB/s."""
    made = guessed_rates(4, True)
    level = tuple(ProductRate(r.library, r.queries, r.keys, 100e9) for r in made.products)
    return replace(
        made, products=level, exp_per_second=1e9, bandwidths=(80e9,) * 4, call_seconds=1e-6, all_products=3.0,
        all_ram=60e9, operations=tuple(changes.items()),
    )  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """A way to say which CPU this is."""

    def is_one_with(rates: CpuRates, cores: int = 4) -> None:
        record = cpu_with(rates, cores)
        monkeypatch.setattr(hardware, "for_device", lambda device: record)

    return is_one_with


def plan_of(variant: weft.Attention, shape: weft.Shape = SIZES) -> Plan:
    return variant.plan(shape, device="cpu", schedule=TILES)


def kernel_of(plan: Plan, direction: str = "forward") -> KernelPlan:
    return next(k for k in plan.kernels if k.direction == direction)


def variant_of(name: str) -> weft.Attention:
    return weft.Attention(SCORES[name], masks.causal, name=f"priced_{name}")


# -- operations by kind ------------------------------------------------------------------------------------------------
def test_operations_of_scores_are_counted_by_kind() -> None:
    found = {name: facts_of(weft.Attention(s)).traits for name, s in SCORES.items()}
    assert dict(found["softcap"].score_torch.others) == {"tanh": 1}
    assert dict(found["softcap"].slope_torch.others) == {"tanh": 1}  # its slope has it again
    assert dict(found["exponentials"].score_torch.others) == {"exp": 3, "log": 1}
    assert dict(found["exponentials"].slope_torch.others) == {"exp": 3}  # the slope of a logarithm does not read it
    assert found["alibi"].score_torch.shared == (("compare", 1),)  # of positions alone: heads share it
    assert found["alibi"].slope_torch == TorchWork()  # a constant
    assert dict(found["quotient"].slope_torch.others) == {"compare": 2, "mixed choice": 2}  # of the absolute value
    assert facts_of(weft.Attention()).traits.score_torch == TorchWork()


@pytest.mark.parametrize(
    ("name", "kind", "forward", "backward"),
    [("softcap", "tanh", 1, 2), ("exponentials", "exp", 3, 6), ("exponentials", "log", 1, 1)],
)
def test_a_slower_operation_takes_as_much_longer_as_scores_have_of_it(machine, name, kind, forward, backward) -> None:
    variant, before, after = variant_of(name), {}, {}
    for times, rate in ((before, 1e9), (after, 0.5e9)):
        machine(rates_with(**{kind: rate}))
        made = plan_of(variant)
        times.update({d: made.seconds(d) for d in ("forward", "backward")})
        pairs = kernel_of(made).tiles.visited * 256 * 256
    for direction, count in (("forward", forward), ("backward", backward)):
        assert after[direction] - before[direction] == pytest.approx(count * pairs * 1e-9 / 1.0, rel=1e-6)


def test_what_was_not_measured_is_priced_by_shipped_figures(machine) -> None:
    machine(rates_with())
    pairs = kernel_of(plan_of(variant_of("softcap"))).tiles.visited * 256 * 256
    plain = plan_of(weft.Attention(score * 1.0 + kv_pos * 0.0, masks.causal, name="priced_plain"))
    differ = kernel_of(plan_of(variant_of("softcap"))).times.exp - kernel_of(plain).times.exp
    assert differ == pytest.approx(OPERATIONS["tanh"] * pairs * 1e-9, rel=0.1)


def test_a_sigmoid_in_place_of_a_softmax(machine) -> None:
    machine(rates_with(sigmoid=0.25e9))
    softmax, sigmoid = (
        kernel_of(plan_of(weft.Attention(mask=masks.causal, normalizer=n, name=f"priced_{n}"))).times
        for n in ("softmax", "sigmoid")
    )
    mask = softmax.exp - kernel_of(plan_of(weft.Attention(mask=masks.causal))).tiles.visited * 256 * 256 * 1e-9
    assert (sigmoid.exp - mask) / (softmax.exp - mask) == pytest.approx(4.0, rel=1e-6)


def test_the_price_of_a_mask_is_paid_at_its_edge(machine) -> None:
    machine(rates_with())
    causal, full = (plan_of(weft.Attention(mask=m)) for m in (masks.causal, True))
    edge = kernel_of(causal).tiles.edge * 256 * 256
    dear = OPERATIONS["compare"] + (OPERATIONS["choice"] + OPERATIONS["compare"]) / 4
    seen = kernel_of(causal).times.exp - kernel_of(full).times.exp * 36 / 64
    assert seen == pytest.approx(edge * round(dear, 2) * 1e-9, rel=1e-6)


# -- products ----------------------------------------------------------------------------------------------------------
def test_rates_of_products_lie_between_those_of_measured_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of more tiles than it remembers."""
    monkeypatch.setattr("weft.compiler.planning.machines.rates.MOST_KNOWN", 2)
    rates = replace(
        guessed_rates(1),
        products=tuple(
            ProductRate("torch", q, k, flops) for q, k, flops in
            ((64, 64, 10e9), (64, 256, 20e9), (256, 64, 20e9), (256, 256, 40e9))
        ),
    )  # fmt: skip
    for q, k, want in (
        (64, 64, 10),
        (256, 256, 40),
        (64, 128, 1 / (0.5 / 10 + 0.5 / 20)),
        (16, 32, 10),
        (999, 999, 40),
    ):
        assert rates.product_flops("torch", q, k) == pytest.approx(want * 1e9)
    assert 10e9 < rates.product_flops("torch", 128, 128) < 40e9 and rates.product_flops("onednn", 64, 64) is None


def test_joined_tiles_and_edge_tiles_have_rates_of_their_own(machine) -> None:
    """Products of 1024 keys are twice as fast as those of 256: of a window there are no joined tiles."""
    rates = rates_with()
    twice = tuple(replace(r, flops=r.flops * (2 if r.keys >= 1024 else 1)) for r in rates.products)
    machine(replace(rates, products=twice))
    full, window = (
        kernel_of(plan_of(weft.Attention(mask=m, name=f"joined_{n}")))
        for n, m in (("full", True), ("window", masks.causal & (q_pos - kv_pos < 256)))
    )
    assert full.on_cpu.speed.products == pytest.approx(2e11) and window.on_cpu.speed.products == pytest.approx(1e11)


def test_short_calls_compute_many_heads_by_products_of_torch(machine) -> None:
    machine(rates_with())
    variant, form = weft.Attention(mask=masks.causal, name="short_heads"), "cpu:256x256+onednn+tiles"
    schedule = f"flash/flash_forward={form}/flash_backward={form}"
    if products.one_dnn_linear() is None:
        pytest.skip("this torch has no product of oneDNN")
    for length, library in ((128, "torch"), (2048, "onednn")):
        made = variant.plan(replace(SIZES, q_len=length, kv_len=length), device="cpu", schedule=schedule)
        kernel = kernel_of(made)
        assert kernel.on_cpu.speed.library == library and is_short(kernel.form, kernel.sizes) == (library == "torch")


# -- threads -----------------------------------------------------------------------------------------------------------
def test_a_plan_counts_with_the_threads_that_torch_has(machine) -> None:
    machine(rates_with())
    variant, times = weft.Attention(name="threads"), {}
    for threads in (1, 2, 4, 9):
        torch.set_num_threads(threads)
        made = plan_of(variant)
        times[threads] = kernel_of(made).times
        assert made.hardware.sms == min(threads, 4)
        said = f", of which torch uses {threads}" if threads < 4 else ""
        assert made.hardware.title.endswith(f"4 cores{said}") or "rough figures" in made.hardware.title
    for threads, speedup in ((1, 1.0), (2, 1 + 2 / 3), (4, 3.0), (9, 3.0)):
        assert times[1].matrix / times[threads].matrix == pytest.approx(speedup)
        assert times[1].exp / times[threads].exp == pytest.approx(speedup)
    assert times[2].calls > times[1].calls > times[4].calls  # two threads of Python take turns


def test_forms_do_not_depend_on_the_threads_of_the_moment(machine) -> None:
    """What a call has prepared stays when torch gets other threads, and is what plans say."""
    machine(rates_with())
    variant, schedules = weft.Attention(name="threads_and_forms"), set()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        schedules.add(str(variant.plan(SIZES, device="cpu").schedule))
    assert len(schedules) == 1


def test_records_of_gpus_know_no_threads() -> None:
    torch.set_num_threads(1)
    assert on_threads(hardware.H100, 1) is hardware.H100 and on_threads(CPU, 8) is CPU
    assert on_threads(CPU, 1).sms == 1
    assert weft.Attention().plan(SIZES, device="h100").hardware is hardware.H100


# -- torch's own kernel ------------------------------------------------------------------------------------------------
def test_a_call_that_torchs_own_kernel_computes_takes_what_that_takes(machine, monkeypatch) -> None:
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_attention", lambda: products.product)
    monkeypatch.setattr("weft.codegen.targets.cpu.by_torch.own_backward", lambda: products.product)
    machine(replace(rates_with(), attention=(("fp32", 400e9),), attention_backward=(("fp32", 200e9),)), cores=1)
    variant = weft.Attention(mask=masks.causal, name="whole")
    made = variant.plan(SIZES, device="cpu")
    pairs = 4 * 2048 * 2048 * causal_fraction(2048)  # whole blocks of keys
    for direction, flops, rate in (("forward", 4, 400e9), ("backward", 10, 200e9)):
        kernel = kernel_of(made, direction)
        assert kernel.computed_whole and kernel.bound == "torch" and kernel.times.share == 1.0
        rest = beside_products("whole", direction, 4 * 2048, 0.0, made.hardware)
        assert made.seconds(direction) == pytest.approx(flops * pairs * 64 / rate / 3.0 + rest)
    text = " ".join(variant.explain(SIZES, device="cpu").split())
    assert "the forward and the backward of this call are torch's own kernel, which is the faster one" in text
    assert f"predicted {made.seconds('forward') * 1e3:.4f} ms" in text
    ahead = replace(SIZES, q_len=100)  # causal queries that are not all: tiles
    assert not kernel_of(variant.plan(ahead, device="cpu")).computed_whole
    assert "figures are of tiles" in " ".join(variant.explain(ahead, device="cpu").split())
