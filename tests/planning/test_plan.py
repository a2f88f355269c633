"""Plans: every kernel's stages and figures as data, and that they are those of what runs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import weft
from tests.planned import DENSE, both, planned, resolved, signature
from tests.support import through_python
from weft.codegen.products import own_backward
from weft.codegen.targets import target_named, targets
from weft.codegen.targets.cpu import kernels as cpu_kernels
from weft.codegen.targets.cpu.forms import CpuForm
from weft.codegen.targets.hopper.kernels.backward import FLASH_BACKWARD as HOPPER_BACKWARD
from weft.codegen.targets.hopper.kernels.statistics import ROUND_DQUERY
from weft.codegen.targets.hopper.kernels.statistics import ROW_STATISTICS as HOPPER_STATISTICS
from weft.codegen.targets.triton.kernels.measures import SPANS, Visitor, long_spans_kernel
from weft.codegen.targets.triton.target import KERNELS
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import MeasuredAxis, Measuring, TileCounts
from weft.compiler.planning.cost import predict
from weft.compiler.planning.machines.hardware import A100, CPU, H200, KNOWN
from weft.compiler.planning.plan import CodePlan, Plan, counter, verify_code
from weft.compiler.planning.quantities import five_products_flops
from weft.compiler.planning.records import Shape
from weft.compiler.planning.schedule import ALGORITHMS, parse_schedule
from weft.compiler.planning.segments import for_heads
from weft.ir.attention import Attention, Latent
from weft.ir.errors import InternalError, UnavailableError, WeftError
from weft.ir.expr import scalar, symbol, tensor
from weft.ir.functions import tanh
from weft.runtime import driver

FLASH = KERNELS["flash"]
CPU_FLASH = (cpu_kernels.FLASH_FORWARD, cpu_kernels.FLASH_BACKWARD)

Q_POS, KV_POS, SCORE = symbol("q_pos"), symbol("kv_pos"), symbol("score")
CAUSAL = Attention(mask=KV_POS <= Q_POS, name="causal")
CAPPED = Attention(50.0 * tanh(SCORE / 50.0), name="capped")
LATENT = Attention(latent=Latent(512, 64), name="mla")
GPT2 = Shape(64, 16, 16, 1024, 1024, 64, 64, "fp16")
TARGETS = [target.name for target in targets()]


def causal_plan(shape: Shape, algorithm: str = "flash") -> Plan:
    facts = facts_of(CAUSAL)
    count = counter(facts.kv_tiles, facts.q_tiles, shape)
    return planned(shape, H200, "triton", algorithm, attention=CAUSAL, count=count)


def any_plan(hardware, algorithm: str, target: str | None = None) -> Plan:
    """Of the machine's own target, or of the one that has the algorithm there."""
    if target is None and hardware.kind == "cpu" and algorithm != "flash":
        target = "interpret"
    return planned(GPT2, hardware, target, algorithm)


@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_for_any_machine_without_a_gpu(hardware, algorithm) -> None:
    others = ("interpret",) if hardware.kind == "cpu" else ("triton",)
    for target in (None, *others):
        plan = any_plan(hardware, algorithm, target)
        assert {k.direction for k in plan.kernels} == {"forward", "backward"}
        for kernel in plan.kernels:
            kinds = [s.kind for s in kernel.stages]
            assert "load" in kinds and "compute" in kinds and kinds[-1] == "store"
            assert kernel.seconds > 0 and kernel.programs.value >= 1
        assert plan.hbm_bytes("forward") > 0 and plan.seconds("backward") > 0


@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_has_the_kernels_of_its_schedule(hardware, algorithm) -> None:
    plan = any_plan(hardware, algorithm)
    for kernel in plan.kernels:
        assert plan.schedule.kernels[kernel.code.kernel.follows or kernel.name] == (kernel.target, kernel.form)
        assert kernel.code in plan.code(kernel.direction).kernels
        assert plan.code(kernel.direction).form(kernel.name) == kernel.form
    assert [*plan.schedule.kernels] == [k.name for k in plan.kernels if not k.code.kernel.follows]
    assert parse_schedule(str(plan.schedule)) == plan.schedule
    ways = {"cpu": CPU_FLASH, "hopper": (FLASH[0], HOPPER_STATISTICS, HOPPER_BACKWARD, ROUND_DQUERY)}
    of_flash = algorithm in ("flash", "split_kv")
    names = [k.name for k in ways.get(plan.code("backward").target, FLASH if of_flash else KERNELS[algorithm])]
    if algorithm == "split_kv":  # a backward of its calls is that of flash; what joins parts is left out where none are
        assert plan.code("forward").kernels[1].name == "join_parts"
        joined = [k.name for k in plan.kernels if k.name == "join_parts"]
        names[:1] = ["split_forward", *joined]
    assert [kernel.name for kernel in plan.kernels] == names


def test_the_kernels_of_a_cpu() -> None:
    forward, backward = planned(GPT2, CPU, "cpu").kernels
    assert [(k.name, k.target, k.form, k.direction) for k in (forward, backward)] == [
        ("flash_forward", "cpu", CpuForm(256, 256), "forward"),
        # torch's own backward, were it there, would be the faster one in bf16 with units for that alone
        ("flash_backward", "cpu", CpuForm(256, 256, in_tiles=own_backward() is not None), "backward"),
    ]
    pairs = 64 * 16 * 1024**2
    assert forward.flops.value == 2 * pairs * (64 + 64)
    assert backward.flops.value == 2 * pairs * 5 * 64  # S, dV, dP, dQ, dK, each once
    assert backward.code.kernel.flops is five_products_flops
    assert [s.key for s in backward.stages if s.kind == "store"][-1] == "store dquery"
    assert "dQ += dS K" in " ".join(s.what for s in backward.stages)


def test_counts_are_those_of_all_heads_and_batches() -> None:
    shape = Shape(2, 4, 4, 1024, 1024, 64, 64, "fp16")
    forward = causal_plan(shape).kernels[0]
    q_tiles, kv_tiles = 1024 // forward.form.block_q, 1024 // forward.form.block_kv
    edge = q_tiles * (forward.form.block_q // forward.form.block_kv)
    full = (q_tiles * kv_tiles - edge) // 2
    assert forward.tiles == TileCounts(8 * full, 8 * edge, 8 * full)


def test_causal_attention_costs_about_half_the_work_and_the_same_bytes() -> None:
    long = Shape(4, 16, 16, 8192, 8192, 64, 64, "fp16")
    causal = causal_plan(long).kernels[0]
    dense = planned(long, H200, "triton").kernels[0]
    assert 0.5 < causal.flops.value / dense.flops.value < 0.52
    assert causal.hbm_read.value == dense.hbm_read.value


def test_the_standard_algorithm_computes_what_the_mask_hides() -> None:
    scores = causal_plan(GPT2, "standard").kernels[0]
    assert scores.tiles.empty == 0


def test_a_missing_scalar_is_named() -> None:
    local = Attention(mask=Q_POS - KV_POS < scalar("window", int), name="local")
    facts = facts_of(local)
    count = counter(facts.kv_tiles, facts.q_tiles, GPT2)
    with pytest.raises(WeftError, match="window"):
        planned(GPT2, H200, "triton", attention=local, count=count)


def test_tiles_that_differ_by_head_are_averaged() -> None:
    by_head = Attention(mask=Q_POS - KV_POS < 64 * (symbol("head") + 1), name="by_head")
    facts = facts_of(by_head)
    shape = Shape(1, 8, 8, 1024, 1024, 64, 64)
    averaged = counter(facts.kv_tiles, facts.q_tiles, shape, by_head=True)("kv", 64, 64)
    first_only = counter(facts.kv_tiles, facts.q_tiles, shape)("kv", 64, 64)
    assert facts.bounds_differ_by_head
    assert averaged.visited > first_only.visited
    assert averaged.visited + averaged.empty == 8 * 16 * 16


REFUSED = [  # sizes, options and the words of the message, which are those of a call where it has the same mistake
    ({"head_dim": 320}, {}, "shape: head_dim: expected 1 to 256, got 320; wider heads are for latent attention"),
    ({"value_dim": 512}, {}, "shape: value_dim: expected 1 to 256, got 512; wider heads are for latent attention"),
    ({"q_len": 1 << 31}, {}, "shape: q_len: integer overflow: expected a length up to 2..30, got 2147483648"),
    ({}, {"windw": 5}, "local: windw: unknown operand or option; .* operands are: window; did you mean window?"),
    ({}, {"window": 1.5}, "local: window: expected an int, got 1.5"),
    ({}, {"window": True}, "local: window: expected an int, got True"),
    ({}, {"window": 1 << 40}, "local: window: integer overflow: expected a value within 32 bits"),
    ({}, {"q_offset": 0.5}, "q_offset: expected an int or an int32 tensor .1., got 0.5"),
    ({}, {"q_offset": torch.zeros(3, dtype=torch.int32)}, r"q_offset: expected an int or an int32 tensor .1., got"),
    ({}, {"kv_lens": torch.zeros(1)}, r"local: kv_lens: expected a tensor int32 or int64 .1., got torch.float32 .1."),
    ({}, {"block_table": torch.zeros(1, 2).int()}, "local: kv_lens: missing; with block_table pass the length of each"),
    ({}, {"form": "absorbed"}, "local: form: uk, uv and form belong to variants declared with latent=weft.Latent"),
    ({}, {"target": "abacus"}, "abacus"),
    ({}, {"device": "abacus"}, "hardware: expected one of a100, .*got 'abacus'"),
]  # fmt: skip


@pytest.mark.parametrize("method", ["plan", "explain", "source"])
@pytest.mark.parametrize(("sizes", "options", "message"), REFUSED)
def test_what_a_call_refuses_is_refused_beforehand(method, sizes, options, message) -> None:
    variant = weft.Attention(mask=weft.q_pos - weft.kv_pos < weft.scalar("window", int), name="local")
    shape = weft.shape(**{"heads": 2, "q_len": 64, "head_dim": 64, **sizes})
    with pytest.raises(WeftError, match=message):
        getattr(variant, method)(shape, **{"device": "h100", **options})


@pytest.mark.parametrize("size", ["batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_shape_has_positive_sizes(size, value) -> None:
    """0 is not taken for a size that was left out."""
    with pytest.raises(WeftError, match=f"shape: {size}: expected a positive int, got {value}"):
        weft.shape(**{"heads": 4, "q_len": 64, "head_dim": 64, size: value})


def test_forms_of_latent_attention_are_refused_as_in_calls() -> None:
    latent = weft.Attention(latent=weft.Latent(rank=64, rope=16), name="mla")
    with pytest.raises(WeftError, match="mla: form: expected 'expanded' or 'absorbed', got 'absorb'"):
        latent.plan(weft.shape(heads=2, q_len=64, head_dim=48, value_dim=32), form="absorb")
    with pytest.raises(WeftError, match="mla: shape: head_dim: expected more than 16, the latent's rope, got 16"):
        latent.plan(weft.shape(heads=2, q_len=64, head_dim=16, value_dim=32))
    with pytest.raises(WeftError, match="heads: expected a multiple of kv_heads 3, got 4"):
        DENSE_VARIANT.plan(weft.Shape(1, 4, 3, 64, 64, 64, 64))


DENSE_VARIANT = weft.Attention(name="dense")


@pytest.mark.parametrize(
    "mask",
    [
        weft.kv_pos % weft.scalar("n", int) <= 3,  # the tiles of the q axis alone depend on it
        weft.q_pos % weft.scalar("n", int) <= 3,
        (weft.kv_pos <= weft.q_pos) & (weft.q_pos - weft.kv_pos < weft.scalar("n", int)),
        weft.kv_pos * weft.scalar("n", float) < 2.0,
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["h200", "a100", "cpu"])
def test_a_plan_without_a_scalar_is_one_for_any_value(mask, device) -> None:
    variant = weft.Attention(mask=mask, name="needs_n")
    shape = weft.shape(heads=2, q_len=256, head_dim=64, dtype="fp32" if device == "cpu" else "bf16")
    plan = variant.plan(shape, device=device)
    whole = {k.name: k.tiles.visited + k.tiles.empty for k in plan.kernels}
    note = (
        "tiles are counted as without a mask, an upper limit that holds for any value: give n=... for those of a call"
    )
    by_positions = "tiles are counted by positions alone, an upper limit"
    assert note in plan.notes or any(by_positions in n for n in plan.notes) or "n" in str(plan.notes)
    assert plan.visible is None
    for n in (1, 3, 1000):
        given = variant.plan(shape, device=device, n=n)
        assert note not in given.notes and given.visible is not None
        for kernel, upper in zip(given.kernels, plan.kernels):
            assert kernel.tiles.visited <= upper.tiles.visited
            assert kernel.tiles.visited + kernel.tiles.empty == whole[kernel.name]


def test_tiles_that_depend_on_the_width_are_those_of_the_call() -> None:
    variant = weft.Attention(mask=weft.kv_pos < weft.head_dim, name="as_far_as_wide")
    for width in (32, 128):
        shape = weft.shape(heads=2, q_len=256, head_dim=width)
        forward = variant.plan(shape, device="a100", target="triton").kernels[0]
        assert forward.tiles.visited == 2 * -(-256 // forward.form.block_q) * -(-width // forward.form.block_kv)
    latent = weft.Attention(mask=variant.mask, latent=weft.Latent(rank=64, rope=16), name="latent_width")
    sizes = weft.shape(heads=2, q_len=4, kv_len=512, head_dim=48, value_dim=32)
    forward = latent.plan(sizes, device="h100", target="triton", form="absorbed").kernels[0]
    assert forward.tiles.visited == -(-48 // forward.form.block_kv)  # 48: not the 80 of a cached vector


def test_stages_name_tiles_as_they_are() -> None:
    forward = planned(Shape(1, 2, 2, 64, 64, 80, 80), H200, "triton").kernels[0]
    loads = [s.what for s in forward.stages if s.kind == "load"]
    assert loads == [
        f"{n} tile [{rows}, 64 + 16]"
        for n, rows in (("Q", forward.form.block_q), ("K", forward.form.block_kv), ("V", forward.form.block_kv))
    ]


def test_absorbed_latent_attention_loads_its_tile_once() -> None:
    plan = planned(Shape(1, 16, 1, 64, 4096, 576, 512), H200, "triton", attention=LATENT)
    loads = [s.what for s in plan.kernels[0].stages if s.kind == "load"]
    assert plan.segments.value_is_key and len(loads) == 2 and loads[1].endswith("512 + 64], used as V too")
    assert [kernel.name for kernel in plan.kernels] == ["flash_forward"]  # it has no backward


def test_a_score_that_is_not_linear_shows_its_derivative() -> None:
    plan = planned(GPT2, H200, "triton", attention=CAPPED)
    texts = " ".join(s.what for k in plan.kernels for s in k.stages)
    assert "score(Q K^T)" in texts and "dS = P * (dP - delta) * score'" in texts
    linear = " ".join(s.what for k in planned(GPT2, H200, "triton").kernels for s in k.stages)
    assert "scale * Q K^T" in linear and "score'" not in linear


@pytest.mark.parametrize(
    ("wanted", "names", "of_hopper"),
    [
        ({"query"}, ["row_statistics", "flash_dquery"], ["flash_dquery"]),
        ({"key"}, ["row_statistics", "flash_dkey_dvalue"], ["flash_dkey_dvalue"]),
        ({"value"}, ["row_statistics", "flash_dkey_dvalue"], ["flash_dkey_dvalue"]),
        (
            {"query", "key", "value"},
            ["row_statistics", "flash_dquery", "flash_dkey_dvalue"],
            ["flash_backward", "round_dquery"],
        ),
    ],
)
def test_a_backward_has_the_kernels_of_the_gradients_that_are_wanted(wanted, names, of_hopper) -> None:
    kind = replace(signature(GPT2, "sm_90", "backward"), wanted=frozenset(wanted))
    code = driver.resolve(DENSE, kind, H200, "triton").code
    assert [kernel.name for kernel in code.kernels] == names == [*code.schedule.kernels]
    code = driver.resolve(DENSE, kind, H200).code
    assert [kernel.name for kernel in code.kernels] == ["row_statistics", *of_hopper]
    assert [*code.schedule.kernels] == of_hopper[:1]  # those around it are cut as it is


def test_gradients_that_must_repeat_take_two_passes() -> None:
    one_pass, two_passes = (
        driver.resolve(DENSE, replace(signature(GPT2, "sm_90", "backward"), deterministic=repeats), H200).code
        for repeats in (False, True)
    )
    assert [k.name for k in one_pass.kernels] == ["row_statistics", "flash_backward", "round_dquery"]
    assert [k.name for k in two_passes.kernels] == ["row_statistics", "flash_dquery", "flash_dkey_dvalue"]
    assert {k.target for k in (*one_pass.kernels, *two_passes.kernels)} == {"hopper"}
    assert two_passes.form("row_statistics") == two_passes.form("flash_dkey_dvalue")
    assert "store zeros" not in {s.key for s in two_passes.kernels[0].stages}
    with pytest.raises(WeftError, match="flash_dquery of target hopper runs with deterministic=True only"):
        kind = signature(GPT2, "sm_90", "backward")
        driver.resolve(DENSE, kind, H200, "hopper", "flash/flash_dquery=hopper:128x64s2")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv", "qkv", "qkvt", "t", "qt", "kt"])
@pytest.mark.parametrize("target", ["hopper", "triton"])
def test_tiles_are_measured_before_they_are_visited(target, wanted, deterministic) -> None:
    """For any gradients: what a kernel visits was measured for it by a kernel before it, and by one alone."""
    variant = Attention(SCORE + tensor("t", 1)[symbol("head")], DOCUMENTS.mask, name="with_t")
    names = {"q": "query", "k": "key", "v": "value", "t": "t"}
    of = signature(GPT2, "sm_90", "backward", variant)
    kind = replace(of, wanted=frozenset(names[n] for n in wanted), deterministic=deterministic)
    found = driver.resolve(variant, kind, H200, target)
    assert found.target.name == target
    kernels = [k.name for k in found.code.kernels]
    visitors = {"flash_dquery": "kv_spans", "flash_dkey_dvalue": "q_spans", "flash_backward": "q_spans"}
    visiting = [name for name in kernels if name in visitors]
    assert visiting and sorted(visitors[name] for name in visiting) == sorted(n for n in kernels if n in SPANS)
    for name in visiting:
        assert kernels.index(visitors[name]) < kernels.index(name)
    gives = {"flash_dquery": {"q"}, "flash_dkey_dvalue": {"k", "v"}, "flash_backward": {"q", "k", "v"}}
    assert set(wanted) - {"t"} <= set().union(*(gives[name] for name in visiting))


def test_gradients_of_operands_are_summed_by_the_pass_that_owns_what_they_are_read_by() -> None:
    """Those that are read by both positions are left to the target that has them, also where the call names another."""
    by_head, by_one, by_pair = tensor("slopes", 1), tensor("biases", 1), tensor("pairs", 2)
    alibi = Attention(SCORE + by_head[symbol("head")] * (KV_POS - Q_POS), name="alibi")
    by_query = Attention(SCORE + weft.tanh(SCORE) * by_one[Q_POS], name="by_query")
    by_key = Attention(SCORE + by_one[KV_POS], name="by_key")
    shared = Attention(SCORE + by_pair[Q_POS, KV_POS], name="shared")
    kind = signature(GPT2, "sm_90", "backward")
    passes = ["row_statistics", "flash_dquery", "flash_dkey_dvalue"]
    for target in (None, "hopper"):
        for variant, operand in ((alibi, "slopes"), (by_query, "biases")):
            found = driver.resolve(variant, replace(kind, wanted=kind.wanted | {operand}), H200, target)
            assert (found.target.name, [k.name for k in found.code.kernels]) == ("hopper", passes)
        found = driver.resolve(by_key, replace(kind, wanted=kind.wanted | {"biases"}), H200, target)
        assert (found.target.name, found.code.kernels[1].name) == ("hopper", "flash_backward")
        found = driver.resolve(shared, replace(kind, wanted=kind.wanted | {"pairs"}), H200, target)
        assert found.target.name == "triton"
        said = "hopper: gradients of operands read by both positions (pairs) are computed by the triton target"
        assert found.notes == (said,)
    assert [k.name for k in driver.resolve(alibi, kind, H200).code.kernels][1] == "flash_backward"
    for variant, operand, last in ((alibi, "slopes", passes[1]), (by_key, "biases", passes[2])):
        alone = driver.resolve(variant, replace(kind, wanted=frozenset({operand})), H200)
        assert [k.name for k in alone.code.kernels] == [passes[0], last]
    for target in (None, "hopper"):  # a form that is asked for is used, or refused
        with pytest.raises(UnavailableError, match=r"gradients of operands read by both positions \(pairs\)"):
            text = "flash/flash_backward=hopper:64x128s2"
            driver.resolve(shared, replace(kind, wanted=kind.wanted | {"pairs"}), H200, target, text)


def test_a_backward_by_distance_borrows_the_kernel_that_sums_along_diagonals() -> None:
    """On hopper it is one of triton, in a module of its own; what hopper lacks of it is said."""
    t5 = Attention(weft.scores.t5_bias(tensor("table", 2))(SCORE), name="t5")
    kind = replace(signature(GPT2, "sm_90", "backward"), wanted=frozenset({"query", "key", "value", "table"}))
    found = driver.resolve(t5, kind, H200)
    kernels = ["distance_tables", "row_statistics", "flash_backward", "round_dquery", "flash_ddiagonals"]
    assert (found.target.name, [k.name for k in found.code.kernels]) == ("hopper", kernels)
    assert [k.target for k in found.code.kernels] == ["triton", *["hopper"] * 3, "triton"]
    assert found.code.borrowed and [k.name for k in found.code.own] == kernels[1:4]
    assert driver.resolve(t5, kind, H200, schedule=str(found.code.schedule)).code == found.code
    own = "flash/flash_backward=hopper:64x128s2"
    with pytest.raises(WeftError, match="expected as many queries as keys, of which it has diagonals"):
        driver.resolve(t5, kind, H200, schedule=f"{own}/flash_ddiagonals=triton:64x32w4s2")
    with pytest.raises(WeftError, match="that hopper borrows: write flash_ddiagonals=triton:64x64w4s2"):
        driver.resolve(t5, kind, H200, schedule=f"{own}/flash_ddiagonals=hopper:64x64w4s2")
    assert {k: c.target for k, c in found.code.schedule.kernels.items()} == {
        "flash_backward": "hopper", "flash_ddiagonals": "triton",
    }  # fmt: skip
    frozen = driver.resolve(t5, replace(kind, wanted=kind.wanted - {"table"}), H200)
    assert not frozen.code.borrowed and frozen.target.name == "hopper"
    wide = replace(kind, widths=replace(kind.widths, head_dim=192))
    found = driver.resolve(t5, wide, H200)
    assert found.target.name == "triton" and "with D or Dv above 128" in found.notes[0]
    alone = driver.resolve(t5, replace(kind, wanted=frozenset({"table"})), H200)
    assert alone.target.name == "triton" and "a table's gradient alone (table)" in alone.notes[0]


def test_a_kernel_that_follows_another_has_no_form_of_its_own() -> None:
    kind = signature(GPT2, "sm_90", "backward")
    text = "flash/row_statistics=hopper:64x128s2/flash_backward=hopper:64x128s2"
    with pytest.raises(WeftError, match="row_statistics of target hopper has the form of flash_backward: leave it out"):
        driver.resolve(DENSE, kind, H200, None, text)


def test_code_that_is_no_plan_is_refused() -> None:
    code = resolved(GPT2, H200, "triton", direction="backward").code
    verify_code(code)
    with pytest.raises(InternalError, match="plan: expected different kernels, got "):
        verify_code(replace(code, kernels=(*code.kernels, code.kernels[0])))
    with pytest.raises(InternalError, match="plan: expected different kernels, got "):
        verify_code(replace(code, kernels=()))
    with pytest.raises(InternalError, match="row_statistics belongs to the backward, not the forward"):
        verify_code(replace(code, signature=signature(GPT2, "sm_90")))
    bare = replace(code.kernels[0], stages=code.kernels[0].stages[:-1])
    with pytest.raises(InternalError, match="expected different ones, and a store"):
        verify_code(replace(code, kernels=(bare,)))


# -- the plan is what runs ---------------------------------------------------------------------------------------------
def run_and_record(variant: weft.Attention, monkeypatch, sizes: Shape, **options) -> list[CodePlan]:
    """What a call and its backward compile."""
    found: list[CodePlan] = []
    compile_kernels = driver.compile_kernels

    def recorded(*arguments, **more):
        made = compile_kernels(*arguments, **more)
        found.append(made.resolved.code)
        return made

    monkeypatch.setattr(driver, "compile_kernels", recorded)
    query = torch.randn(sizes.batch, sizes.heads, sizes.q_len, sizes.head_dim, requires_grad=True)
    key, value = (
        torch.randn(sizes.batch, sizes.kv_heads, sizes.kv_len, width, requires_grad=True)
        for width in (sizes.head_dim, sizes.value_dim)
    )
    variant(query, key, value, **options).sum().backward()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(
    ("target", "schedule"),
    [
        ("cpu", None), ("cpu", "flash"), ("cpu", "flash/flash_backward=cpu:32x64"), ("interpret", None),
        ("interpret", "streaming"), ("interpret", "standard"), ("interpret", "flash/flash_dquery=interpret:16x32w4s1"),
    ],
)  # fmt: skip
def test_the_plan_is_what_calls_compile(target, schedule, monkeypatch) -> None:
    name = f"planned_{target}_{TEXT.sub('_', str(schedule))}"
    variant = weft.Attention(mask=weft.masks.causal, name=name)
    sizes = weft.shape(batch=1, heads=2, kv_heads=1, q_len=40, head_dim=16, dtype="fp32")
    options = {"target": target, "schedule": schedule}
    plan = variant.plan(sizes, device="cpu", **options)
    through_python(monkeypatch)  # else a short call needs no backward of ours
    ran = run_and_record(variant, monkeypatch, sizes, **options)
    assert tuple(ran) == plan.codes
    machine = weft.compiler.planning.machines.hardware.for_device("cpu")
    compiled = [
        driver.compile_kernels(variant, code.signature, machine, target, schedule).resolved.code for code in plan.codes
    ]
    assert compiled == ran
    assert plan.schedule == compiled[0].schedule.joined(compiled[1].schedule)
    assert str(schedule or "flash").split("/")[0] == plan.schedule.algorithm
    query, key, value = torch.randn(1, 2, 40, 16), *(torch.randn(1, 1, 40, 16) for _ in range(2))
    assert variant.plan(query, key, value, **options).codes == plan.codes


TEXT = re.compile(r"\W+")


def test_operands_are_differentiated_in_the_plan_as_in_calls(monkeypatch) -> None:
    variant = weft.Attention(weft.score + weft.tensor("slopes", 1)[weft.head] * weft.kv_pos, name="planned_slopes")
    sizes = weft.shape(batch=1, heads=2, q_len=40, head_dim=16, dtype="fp32")
    plan = variant.plan(sizes, device="cpu", target="interpret")
    ran = run_and_record(variant, monkeypatch, sizes, target="interpret", slopes=torch.ones(2, requires_grad=True))
    assert plan.code("backward").signature.wanted == {"query", "key", "value", "slopes"}
    assert tuple(ran) == plan.codes


# -- notes -------------------------------------------------------------------------------------------------------------
def notes_of(variant: weft.Attention = weft.Attention(name="noted"), **options) -> tuple[str, ...]:  # noqa: B008
    sizes = {"heads": 16, "kv_heads": 16, "q_len": 256, "head_dim": 64, "dtype": "bf16"}
    given = {name: options.pop(name) for name in (*sizes, "value_dim") if name in options}
    return variant.plan(weft.shape(**{**sizes, **given}), **options).notes


def test_notes_say_why_a_target_that_comes_before_was_passed_over() -> None:
    short = (driver.SHORT_CALL,)  # that a target lacks a whole direction is no news of this variant
    assert notes_of(device="h200") == short
    needs = "hopper: needs D and Dv to be multiples of 8 from 16 to 256, got D {}, Dv {}"
    assert notes_of(device="h200", head_dim=80) == ()
    assert notes_of(device="h200", head_dim=32) == short
    assert notes_of(device="h200", head_dim=8) == (needs.format(8, 8),)
    assert notes_of(device="h200", head_dim=36) == (needs.format(36, 36),)
    assert notes_of(device="h200", head_dim=192) == ()
    assert notes_of(device="h200", dtype="fp32")[0] == "hopper: needs bf16 or fp16 operands, got fp32"
    assert notes_of(device="a100")[0] == "hopper: needs compute capability 9.0, this is sm_80"
    assert notes_of(device="h200", target="triton") == ()
    assert notes_of(device="h200", schedule="streaming") == ()
    per_row = notes_of(device="h200", q_offset=torch.zeros(1, dtype=torch.int32))
    assert per_row == (*short, "tiles are counted as if the queries were the last positions: q_offset is a tensor")


def test_notes_of_a_plan() -> None:
    assert planned(GPT2, H200, notes=("said",)).notes == ("said",)
    window, sizes = weft.scalar("window", int), weft.shape(heads=1, q_len=64, head_dim=64)
    local = weft.Attention(mask=weft.q_pos - weft.kv_pos < window, name="noted_local")
    assert any(
        "as without a mask, an upper limit that holds for any value: give window=" in n for n in local.plan(sizes).notes
    )
    assert not [note for note in local.plan(sizes, window=8).notes if "counted" in note]
    odd = weft.Attention(mask=(weft.q_pos * weft.kv_pos) % 7 < 3, name="noted_odd")
    assert [note for note in odd.plan(sizes, device="a100").notes if "has no closed form" in note]
    mla = weft.Attention(latent=weft.Latent(512, 64), name="noted_mla")
    decode = weft.shape(heads=16, q_len=1, kv_len=4096, head_dim=192, value_dim=128)
    assert mla.plan(decode, device="h200", form="absorbed").notes[-1].startswith("the absorbed form has no backward")


def test_a_target_that_cannot_is_an_error_and_no_note() -> None:
    with pytest.raises(UnavailableError, match=r"hopper: needs compute capability 9.0, this is sm_80"):
        planned(GPT2, A100, "hopper")


# -- kernels that measure tiles --------------------------------------------------------------------------------------
IDS = tensor("ids", 2, int)
BATCH, HEAD = symbol("batch"), symbol("head")
DOCUMENTS = Attention(mask=(KV_POS <= Q_POS) & (IDS[BATCH, Q_POS] == IDS[BATCH, KV_POS]), name="documents")
BY_HEAD = Attention(mask=(IDS[BATCH, KV_POS] <= HEAD) & (KV_POS <= Q_POS), name="by_head")
LONG = Shape(4, 16, 8, 8192, 8192, 128, 128)


def measured_plan(attention: Attention, target: str = "triton", algorithm: str = "flash") -> Plan:
    hardware = CPU if target in ("cpu", "interpret") else H200
    shape = replace(LONG, dtype="fp16") if target == "interpret" else LONG
    return planned(shape, hardware, target, algorithm, attention=attention)


@pytest.mark.parametrize("target", ["triton", "hopper", "interpret"])
def test_flash_kernels_of_gpu_targets_follow_those_that_measure_their_tiles(target) -> None:
    kernels = measured_plan(DOCUMENTS, target).kernels
    two_passes = ["row_statistics", "kv_spans", "flash_dquery", "q_spans", "flash_dkey_dvalue"]
    one_pass = ["row_statistics", "q_spans", "flash_backward", "round_dquery"]
    assert [k.name for k in kernels if k.direction == "forward"] == ["kv_spans", "flash_forward"]
    names = [k.name for k in kernels if k.direction == "backward"]
    assert names == (one_pass if target == "hopper" else two_passes)


@pytest.mark.parametrize(
    ("attention", "target", "algorithm"),
    [
        (DOCUMENTS, "cpu", "flash"),
        (DOCUMENTS, "triton", "streaming"),
        (DOCUMENTS, "triton", "standard"),
        (CAUSAL, "triton", "flash"),
        (Attention(mask=(Q_POS * KV_POS) % 7 < 3, name="odd"), "triton", "flash"),
    ],
)
def test_other_plans_measure_nothing(attention, target, algorithm) -> None:
    assert not {"kv_spans", "q_spans"} & {k.name for k in measured_plan(attention, target, algorithm).kernels}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("attention", [DOCUMENTS, CAUSAL], ids=lambda a: a.name)
def test_plans_and_code_agree_on_what_is_measured(attention, algorithm, target) -> None:
    hardware = CPU if target in ("cpu", "interpret") else H200
    shape = replace(LONG, dtype="fp16")
    if algorithm != "flash" and target in ("cpu", "hopper"):
        with pytest.raises(UnavailableError, match=rf"{target}: has .*schedule flash only"):
            both(shape, hardware, target, algorithm, attention=attention)
        return
    measures = attention is DOCUMENTS and algorithm in ("flash", "split_kv") and target != "cpu"
    for found in both(shape, hardware, target, algorithm, attention=attention):
        spans = [kernel for kernel in found.code.kernels if kernel.name in SPANS]
        axes = 2 if found.code.signature.direction == "backward" and target != "hopper" else 1
        assert len(spans) == (axes if measures else 0)
        for kernel in spans:
            assert kernel.target == found.target.measured_by == target_named(kernel.target).name
            assert kernel.name not in found.code.schedule.kernels  # they have no form of their own


def test_what_measuring_costs() -> None:
    plan = measured_plan(DOCUMENTS)
    forward, _, _, for_dquery, dquery, for_dkey, dkey = plan.kernels
    assert (forward.programs.formula, forward.programs.value) == ("B*nq", 4 * 8192 // forward.form.block_q)
    assert (for_dkey.programs.formula, for_dkey.programs.value) == ("B*nkv", 4 * 8192 // dkey.form.block_kv)
    assert (for_dquery.form.block_q, for_dquery.form.block_kv) == (dquery.form.block_q, dquery.form.block_kv)
    for kernel in (forward, for_dquery, for_dkey):
        assert (kernel.hbm_read.formula, kernel.hbm_read.value) == ("8*B*(L + T)", 8 * 4 * 2 * 8192)
        assert kernel.hbm_written.value == (16 + 4) * kernel.programs.value
        assert kernel.tiles == TileCounts(0, 0, 0)
        assert (kernel.flops.value, kernel.sram_bytes.value) == (0, 0)
        assert 11e-6 < kernel.seconds < 22e-6  # as measured
        assert [s.kind for s in kernel.stages] == ["load", "load", "compute", "store", "store"]


def test_masks_that_differ_by_head_are_measured_for_each() -> None:
    forward, _, _, _, _, for_dkey, dkey = measured_plan(BY_HEAD).kernels
    assert (forward.programs.formula, forward.programs.value) == ("B*Hq*nq", 4 * 16 * 8192 // forward.form.block_q)
    assert (for_dkey.programs.formula, for_dkey.programs.value) == ("B*Hq*nkv", 4 * 16 * 8192 // dkey.form.block_kv)
    assert forward.hbm_read.formula == "8*B*T"  # nothing is read at a query's position


def test_the_hopper_forward_has_tiles_measured_for_each_consumer() -> None:
    kv_spans, forward, _, q_spans, backward, _ = measured_plan(DOCUMENTS, "hopper").kernels
    assert (forward.form.block_q, kv_spans.form.block_q) == (128, 64)
    assert kv_spans.programs.value == 4 * 8192 // 64
    assert (q_spans.form.block_q, q_spans.form.block_kv) == (backward.form.block_q, backward.form.block_kv) == (64, 128)


def test_each_range_takes_sixteen_bytes_beside_the_flag_of_a_list() -> None:
    near = (KV_POS < 5) | (Q_POS - KV_POS < 17)
    mask = (KV_POS <= Q_POS) & near & (IDS[BATCH, Q_POS] == IDS[BATCH, KV_POS])
    forward, *_, for_dkey, _ = measured_plan(Attention(mask=mask, name="two_ranges")).kernels
    assert (forward.name, forward.hbm_written.formula) == ("kv_spans", "36*B*nq")
    assert (for_dkey.name, for_dkey.hbm_written.formula) == ("q_spans", "20*B*nkv")


def test_long_axes_have_the_ends_of_their_tiles_written_first() -> None:
    length = 1 << 17
    plan = planned(replace(LONG, batch=1, q_len=length, kv_len=length), H200, "triton", attention=DOCUMENTS)
    forward, backward = ([k for k in plan.kernels if k.direction == d] for d in ("forward", "backward"))
    assert [k.name for k in forward] == ["kv_ends", "kv_long_spans", "flash_forward"]
    assert [k.name for k in backward] == [
        "row_statistics", "kv_ends", "kv_long_spans", "flash_dquery", "q_ends", "q_long_spans", "flash_dkey_dvalue"
    ]  # fmt: skip
    ends, spans, _ = forward
    tiles = length / ends.form.block_kv
    assert (ends.programs.formula, ends.programs.value) == ("B*nkv/128", tiles / 128)
    assert (ends.hbm_read.formula, ends.hbm_written.value) == ("8*B*T", (16 + 8) * (tiles + tiles / 128))
    assert (spans.hbm_read.formula, spans.hbm_read.value) == ("8*B*L + 24*B*nkv", 8 * length + 24 * tiles)
    assert [s.kind for s in ends.stages] == ["load", "store"]


def test_measuring_a_long_sequence_takes_longer_than_a_launch() -> None:
    measuring = Measuring(by_head=False, kv=MeasuredAxis(1, 1, 1), q=MeasuredAxis(1, 1, 1))
    kernel, parts = (
        long_spans_kernel(Visitor("flash_forward", "kv", "forward", "forward"), measuring),
        for_heads(128, 128),
    )
    form = measured_plan(DOCUMENTS).kernels[0].form
    seconds = []
    for length in (1 << 17, 1 << 18):
        shape = Shape(1, 16, 16, length, length, 128, 128)
        (cost,) = predict(shape, [(kernel, form)], H200, parts)
        seconds.append(cost.seconds)
    beyond_launch = [s - H200.launch_seconds for s in seconds]
    assert beyond_launch[1] == pytest.approx(2 * beyond_launch[0], rel=0.01)  # each program looks at a few stretches
