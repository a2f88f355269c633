"""The cost model against known results: of matrix products, of the papers, of compiled kernels."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import sympy

import weft
from tests.planned import both, planned
from weft.codegen.targets.cpu import kernels as cpu_kernels
from weft.codegen.targets.cpu.cost import beside_products, causal_fraction
from weft.codegen.targets.hopper.forms import HopperForm
from weft.codegen.targets.hopper.kernels.forward import FLASH_FORWARD as HOPPER_FORWARD
from weft.codegen.targets.triton.forms import Tiling
from weft.codegen.targets.triton.kernels.measures import Visitor, ends_kernel, long_spans_kernel, spans_kernel
from weft.codegen.targets.triton.target import KERNELS
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import MeasuredAxis, Measuring, TileCounts, Traits
from weft.compiler.planning.cost import (
    HEADS_TOGETHER,
    CountTiles,
    KernelCost,
    Times,
    predict,
    sizes_of,
    sram_bytes,
)
from weft.compiler.planning.form import Form
from weft.compiler.planning.formulas import formula_text
from weft.compiler.planning.kernel import Kernel
from weft.compiler.planning.machines.hardware import A100, B200, CPU, H200, MI300X, Hardware
from weft.compiler.planning.quantities import Sizes, row_bytes
from weft.compiler.planning.records import Shape
from weft.compiler.planning.segments import for_heads, for_latent
from weft.ir.attention import Attention
from weft.ir.expr import symbol, tensor

FLASH = KERNELS["flash"]
CPU_FLASH = (cpu_kernels.FLASH_FORWARD, cpu_kernels.FLASH_BACKWARD)

GPT2 = Shape(64, 16, 16, 1024, 1024, 64, 64, "fp16")
ONE_TENSOR = 64 * 16 * 1024 * 64 * 2  # bytes of Q, K, V or O
BY_NAME = {k.name: k for kernels in KERNELS.values() for k in kernels}
MEASURING = Measuring(by_head=True, kv=MeasuredAxis(2, 2, 2), q=MeasuredAxis(3, 1, 1))
FORWARD = Visitor("flash_forward", "kv", "forward", "forward")
KEYS = Visitor("flash_dkey_dvalue", "q", "backward", "backward_kv")
SPANS = {
    "kv_spans": spans_kernel(FORWARD, MEASURING),
    "kv_long_spans": long_spans_kernel(FORWARD, MEASURING),
    "kv_ends": ends_kernel(FORWARD, MEASURING),
    "q_ends": ends_kernel(KEYS, MEASURING),
    "q_spans": spans_kernel(KEYS, MEASURING),
}
PRINTED = BY_NAME | SPANS | {"flash_backward": CPU_FLASH[1]}


def costs_of(
    shape: Shape, algorithm: str = "flash", hardware: Hardware = H200, count: CountTiles | None = None,
    target: str = "triton", form: Form | None = None,
) -> tuple[KernelCost, ...]:  # fmt: skip
    """Costs of the kernels of both directions as they are chosen for the shape, or all in one form."""
    codes = [code for found in both(shape, hardware, target, algorithm) for code in found.code.kernels]
    kernels = [(code.kernel, form or code.form) for code in codes]
    return predict(shape, kernels, hardware, for_heads(shape.head_dim, shape.value_dim), count=count)


def letters(**changes: float) -> Sizes:
    """One head, square, one byte an element, no L2."""
    base = dict.fromkeys("B Hq Hkv L T D Dv C Cv Du Cu e bq bkv s n nq nkv k owned_in_sram".split(), 1)
    return Sizes(**{**base, "score_bytes": 0, "neighbours_miss": 1, "nonlinear": 0, **changes})


def square_product(n: int, block: int) -> float:
    """Elements that the scores of n queries and keys of width n fetch, with block x block output tiles."""
    tiles = n // block
    sizes = letters(L=n, T=n, D=n, bq=block, bkv=block, n=tiles * tiles, nq=tiles, nkv=tiles)
    return BY_NAME["standard_scores"].read(sizes)


# -- known results ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [8, 64])
def test_a_matrix_product_fetches_2n3_without_reuse_and_2n2_with_all_of_it(n: int) -> None:
    assert square_product(n, 1) == 2 * n**3
    assert square_product(n, n) == 2 * n**2
    assert square_product(n, 4) == 2 * n**3 / 4


def test_nine_query_tiles_by_five_key_tiles_take_108_moves_where_rows_stay() -> None:
    """K and V for each of 45 pairs, Q and the output once for each query tile."""
    sizes = letters(L=9, T=5, n=45, nq=9, nkv=5)
    flash = BY_NAME["flash_forward"]
    assert flash.read(sizes) + flash.written(sizes) - row_bytes(sizes) == 108


def paper_tiling(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """(rows of Q, rows of K) of FlashAttention's algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(Bc, d)."""
    rows = ceil(sram_elements / (4 * head_dim))
    return min(rows, head_dim), rows


def _streaming_elements(length: int, width: int, sram: int) -> float:
    """Algorithmic reads of FlashAttention with the block sizes of its algorithm 1."""
    rows, columns = paper_tiling(sram, width)
    nq, nkv = length // rows, length // columns
    sizes = letters(L=length, T=length, D=width, Dv=width, Du=width, bq=rows, bkv=columns, n=nq * nkv, nq=nq, nkv=nkv)
    return BY_NAME["streaming_forward"].read(sizes)


def test_paper_block_sizes() -> None:
    assert paper_tiling(25_600, 64) == (64, 100)
    assert paper_tiling(25_601, 64) == (64, 101)  # rounded up
    assert paper_tiling(4096, 128) == (8, 8)


def test_theorem_2_reads_fall_as_one_over_sram_and_grow_as_length_squared() -> None:
    small, large = _streaming_elements(1 << 16, 64, 1 << 14), _streaming_elements(1 << 16, 64, 1 << 16)
    assert small / large == pytest.approx(4, rel=0.02)
    longer = _streaming_elements(1 << 17, 64, 1 << 14)
    assert longer / small == pytest.approx(4, rel=0.02)
    wider = _streaming_elements(1 << 16, 128, 1 << 14)  # d^2 / M: twice the width, half the block
    assert wider / small == pytest.approx(4, rel=0.1)


def test_standard_traffic_is_quadratic_whatever_the_sram() -> None:
    def forward(length: int) -> float:
        sizes = replace(GPT2, batch=1, q_len=length, kv_len=length)
        return sum(c.read + c.written for c in costs_of(sizes, "standard")[:3])

    assert forward(16384) / forward(8192) == pytest.approx(4, rel=0.05)


# -- the layer of GPT-2 medium ---------------------------------------------------------------------------------------
def moved(algorithm: str, direction: str) -> float:
    return sum(c.read + c.written for c in costs_of(GPT2, algorithm) if c.kernel.direction == direction) / ONE_TENSOR


def test_gpt2_layer_traffic_in_units_of_one_tensor() -> None:
    row = 1 / 32  # one float32 a row
    assert moved("flash", "forward") == pytest.approx(4 + row)
    assert moved("flash", "backward") == pytest.approx((2 + 3 * row) + (4 + 2 * row + 1) + (4 + 2 * row + 2))
    assert moved("standard", "forward") == pytest.approx(4 * 16 + 4 + row)
    assert moved("standard", "backward") == pytest.approx(8 * 16 + 12, rel=0.01)
    for direction in ("forward", "backward"):
        assert moved("flash", direction) < moved("standard", direction) / 5
        assert moved("flash", direction) < moved("streaming", direction) < moved("standard", direction)


def test_streaming_rereads_its_rows_once_a_key_tile() -> None:
    tiling = Tiling(64, 128, 4, 2)
    forward = costs_of(GPT2, "streaming", form=tiling)[0]
    assert forward.traffic / ONE_TENSOR == pytest.approx(
        44.2, rel=0.01
    )  # 8 visits: (8 + 16 + 2 + ...) + (16 + 1 + ...)
    assert 0.8 < forward.sizes.k < 1  # 264 programs sweep over 100 MB: L2 keeps little
    small = replace(GPT2, batch=2)
    assert (
        costs_of(small, "streaming", form=tiling)[0].sizes.k == 0
    )  # 32 programs sweep over 12 MB: L2 keeps everything


# -- the model of L2 -------------------------------------------------------------------------------------------------
def test_keys_that_fit_l2_are_read_once_and_longer_ones_once_a_wave() -> None:
    assert costs_of(GPT2)[0].sizes.k == 0
    long = Shape(1, 16, 16, 1 << 18, 1 << 18, 64, 64, "fp16")
    cost = costs_of(long)[0]
    once = 4 * 16 * (1 << 18) * 64 * 2
    assert 1.5 * once < cost.read + cost.written < cost.traffic / 4


def test_heads_of_a_group_share_their_keys() -> None:
    grouped = replace(GPT2, kv_heads=2)
    read = costs_of(grouped)[0].read
    assert read / ONE_TENSOR == pytest.approx(1 + 2 / 8)


def test_tiles_that_are_not_visited_are_not_paid() -> None:
    full = costs_of(GPT2)[0]
    visited = int(full.sizes.n)
    half = costs_of(GPT2, count=lambda axis, bq, bkv: TileCounts(visited // 2, 0, visited // 2))[0]
    assert half.sizes.n == full.sizes.n / 2
    assert half.kernel.flops(half.sizes) == full.kernel.flops(full.sizes) / 2
    none = costs_of(GPT2, count=lambda axis, bq, bkv: TileCounts(131072, 0, 0))[0]
    assert none.read == ONE_TENSOR  # the queries


def test_ragged_lengths_have_edge_tiles_on_the_axis_that_is_looped_over() -> None:
    ragged = Shape(1, 2, 2, 250, 300, 64, 64, "fp16")
    forward, _, _, dkv = costs_of(ragged, form=Tiling(128, 64, 4, 2))
    assert forward.tiles == TileCounts(0, 2 * 2, 2 * 2 * 4)
    assert dkv.tiles == TileCounts(0, 2 * 5, 2 * 5)


# -- time ------------------------------------------------------------------------------------------------------------
def test_bounds_are_named() -> None:
    wide = Shape(2, 16, 16, 8192, 8192, 128, 128)
    assert costs_of(wide)[0].bound == "matrix"
    assert costs_of(GPT2, "standard")[1].bound == "memory"
    tiny = Shape(1, 1, 1, 16, 16, 64, 64, "fp16")
    assert costs_of(tiny)[0].bound == "latency"
    narrow = Shape(64, 16, 16, 4096, 4096, 16, 16, "fp16")
    assert costs_of(narrow)[0].bound == "exp"
    decode = Shape(64, 32, 8, 1, 8192, 128, 128)
    assert costs_of(decode)[0].bound in ("memory", "matrix")


def test_a_roofline_is_below_the_best_measured_time() -> None:
    """FACTS: cuDNN computes D128 H16 B2 S8192 full, 4.4 TFLOP, at 604 TFLOP/s on one H200."""
    sizes = Shape(2, 16, 16, 8192, 8192, 128, 128)
    times = costs_of(sizes)[0].times
    flops = 4 * 2 * 16 * 8192**2 * 128
    assert isinstance(times, Times) and 604e12 < flops / times.roofline <= 794e12
    assert flops / times.seconds == pytest.approx(506e12, rel=0.1)  # this kernel, measured


# -- SRAM against Triton 3.6 -----------------------------------------------------------------------------------------
MEASURED = [  # kernel, hardware, D, dtype, tiling, metadata.shared of the kernel compiled ahead of time
    ("flash_forward", H200, 64, "fp16", Tiling(128, 64, 4, 3), 65536),
    ("flash_forward", H200, 80, "bf16", Tiling(128, 128, 8, 2), 102400),
    ("flash_forward", H200, 128, "bf16", Tiling(128, 128, 8, 2), 163840),
    ("flash_forward", H200, 256, "bf16", Tiling(128, 64, 8, 2), 196608),
    ("flash_forward", H200, 64, "fp16", Tiling(16, 64, 4, 3), 36864),
    ("flash_forward", H200, 64, "fp32", Tiling(64, 32, 8, 2), 41216),
    ("flash_forward", A100, 128, "fp16", Tiling(128, 64, 8, 3), 98304),
    ("flash_forward", B200, 128, "bf16", Tiling(128, 128, 8, 2), 164864),
    ("flash_forward", MI300X, 128, "fp16", Tiling(128, 64, 4, 2), 32768),
    ("flash_dquery", H200, 64, "fp16", Tiling(128, 64, 8, 3), 81920),
    ("flash_dquery", H200, 128, "bf16", Tiling(64, 128, 8, 2), 163840),
    ("flash_dquery", A100, 64, "fp16", Tiling(64, 64, 4, 3), 49152),
    ("flash_dkey_dvalue", H200, 64, "fp16", Tiling(128, 64, 8, 3), 116736),
    ("flash_dkey_dvalue", H200, 256, "bf16", Tiling(32, 64, 8, 2), 131328),
    ("flash_dkey_dvalue", A100, 64, "fp16", Tiling(64, 64, 4, 3), 50176),
    ("flash_dkey_dvalue", H200, 64, "fp32", Tiling(32, 32, 8, 2), 41216),
    ("streaming_forward", H200, 64, "fp16", Tiling(64, 128, 4, 2), 49152),
    ("standard_scores", H200, 64, "fp16", Tiling(128, 128, 8, 3), 32768),
    ("standard_output", H200, 64, "fp16", Tiling(128, 128, 8, 3), 147456),
    ("standard_dkey", H200, 64, "fp16", Tiling(128, 128, 8, 3), 147456),
]


@pytest.mark.parametrize(("name", "hardware", "width", "dtype", "tiling", "measured"), MEASURED)
def test_sram_is_what_triton_allocates(name, hardware, width, dtype, tiling, measured) -> None:
    sizes = Shape(1, 1, 1, 128, 128, width, width, dtype)
    assert sram_bytes(BY_NAME[name], tiling, sizes, hardware, for_heads(width, width)) == pytest.approx(
        measured, rel=0.01
    )


def test_a_latent_tile_that_is_key_and_value_is_counted_once() -> None:
    parts = for_latent("absorbed", 512, 64, 128, 128)
    sizes = Shape(1, 16, 1, 64, 4096, 576, 512)
    tiling = Tiling(64, 32, 8, 2)
    assert sram_bytes(FLASH[0], tiling, sizes, H200, parts) == 64 * 576 * 2 + 2 * 32 * 576 * 2
    cost = predict(sizes, [(FLASH[0], tiling)], H200, parts)[0]
    assert cost.read == 2 * (16 * 64 * 576 + 4096 * 576)
    assert cost.kernel.flops(cost.sizes) == 2 * 16 * 64 * 4096 * (576 + 512)


def test_the_model_and_the_launches_agree_on_what_runs_together() -> None:
    from weft.codegen.launch import launcher

    assert launcher.HEAD_BUNCH == HEADS_TOGETHER


# -- formulas --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", PRINTED.values(), ids=list(PRINTED))
def test_the_printed_formula_has_the_value_of_the_number(kernel: Kernel) -> None:
    sizes = sizes_of(kernel, Tiling(64, 128, 4, 2), Shape(3, 8, 2, 250, 521, 80, 64), H200, for_heads(80, 64), 333)
    sizes = sizes._replace(k=0.25, neighbours_miss=1, nonlinear=1)
    values = {sympy.Symbol(name, positive=True): value for name, value in sizes._asdict().items()}
    for formula in (kernel.sram, kernel.read, kernel.written, kernel.flops, kernel.exps, kernel.programs):
        names = {str(symbol): symbol for symbol in values}
        printed = sympy.sympify(formula_text(formula, sizes), locals=names)
        assert float(printed.subs(values)) == pytest.approx(float(formula(sizes)))


def test_a_formula_leaves_out_what_does_not_apply() -> None:
    sizes = letters()._replace(e=2, k=0)
    assert formula_text(FLASH[0].read, sizes) == "2*B*D*Hq*L + 2*B*Hkv*T*(D + Dv)"
    assert "k" in formula_text(FLASH[0].read, sizes._replace(k=0.5))


def test_a_cpu_is_a_machine_too() -> None:
    sizes = Shape(1, 4, 4, 512, 512, 64, 64, "fp32")
    costs = costs_of(sizes, hardware=CPU, target="cpu")
    assert [c.kernel for c in costs] == list(CPU_FLASH)
    assert all(c.seconds > 0 for c in costs)


def test_the_backward_of_a_cpu_sums_the_gradients_of_keys_at_every_visit() -> None:
    """Two query tiles, one head: a row of dK and dV is in memory as float32 until all queries have added to it."""
    sizes = letters(L=2, T=6, D=3, Dv=2, Du=2, C=3, Cv=2, n=4, nq=2, nkv=2, bq=1, bkv=3)
    backward = CPU_FLASH[1]
    rows, columns = 2 * (3 + 2 * 2) + 4 * 2, 6 * (3 + 2)
    assert backward.read(sizes) == rows + 2 * (columns + 4 * columns)
    assert backward.written(sizes) == 2 * 3 + 2 * 4 * columns + columns
    assert backward.flops(sizes) == 2 * 4 * 3 * (3 * 3 + 2 * 2)
    assert backward.flops(sizes) == BY_NAME["streaming_backward"].flops(sizes)


def test_the_asynchronous_kernel_has_a_ring_of_tiles() -> None:
    form, sizes, parts = HopperForm(2, 128, 2), Shape(1, 1, 1, 128, 128, 128, 128), for_heads(128, 128)
    tile = 128 * 128 * 2
    assert sram_bytes(HOPPER_FORWARD, form, sizes, H200, parts) == 6 * tile  # Q, two K, two V, O
    assert sram_bytes(HOPPER_FORWARD, replace(form, query_buffers=2), sizes, H200, parts) == 7 * tile
    assert sram_bytes(HOPPER_FORWARD, replace(form, stages=3), sizes, H200, parts) == 8 * tile
    assert form.programs_per_sm(HOPPER_FORWARD, parts, 6 * tile, H200) == 1


# -- what is read by pair --------------------------------------------------------------------------------------------
BIAS = tensor("bias", 4)[symbol("batch"), symbol("head"), symbol("q_pos"), symbol("kv_pos")]
BIASED = Attention(symbol("score") + BIAS, name="biased")


def test_the_bytes_of_what_is_read_by_pair_count_in_a_cost() -> None:
    shape, parts, tiling = Shape(2, 8, 8, 1024, 1024, 64, 64), for_heads(64, 64), Tiling(64, 64, 4, 2)
    for kernel in (k for k in FLASH if k.weighs):
        plain, paired = (
            predict(shape, [(kernel, tiling)], H200, parts, traits)[0] for traits in (Traits(), Traits(pair_bytes=4))
        )
        assert paired.sram == sram_bytes(kernel, tiling, shape, H200, parts, Traits(pair_bytes=4))
        assert paired.sram - plain.sram == 4 * 64 * 64 * plain.sizes.s > 0


def test_the_sram_of_a_plan_is_what_is_checked() -> None:
    """Also where a variant reads a tensor by pair, whose tiles lie in SRAM beside those of keys and values."""
    shape = Shape(2, 8, 8, 1024, 1024, 128, 128)
    for attention in (Attention(name="dense"), BIASED):
        traits = facts_of(attention).traits
        for kernel in planned(shape, H200, "triton", attention=attention).kernels:
            needed = sram_bytes(kernel.code.kernel, kernel.form, shape, H200, for_heads(128, 128), traits)
            assert kernel.sram_bytes.value == needed, (attention.name, kernel.name)


def test_lists_of_long_axes_have_programs() -> None:
    """Of masks that read pairs, at any length: a list for each tile of queries, and of keys."""
    table = weft.tensor("blocks", 2, bool)
    sparse = weft.Attention(mask=weft.masks.block_sparse(table, 128), name="block_sparse")
    for length in (1 << 13, 1 << 15):
        plan = sparse.plan(weft.shape(heads=4, q_len=length, head_dim=64, dtype="bf16"), device="h200", target="triton")
        found = {k.name: k.programs.value for k in plan.kernels if k.name.endswith("lists")}
        assert set(found) == {"kv_lists", "q_lists"} and all(number >= length // 128 for number in found.values())


def test_what_a_short_call_on_a_cpu_takes_beside_its_products() -> None:
    """The host's operations, whatever the length; rows and masks in proportion; all pairs of one block of keys."""
    none = beside_products("whole", "forward", 0.0, 0.0, CPU)
    assert CPU.cpu is not None and none == 6 * CPU.cpu.call_seconds
    rows = beside_products("whole", "forward", 512.0, 0.0, CPU) - none
    assert beside_products("whole", "forward", 1024.0, 0.0, CPU) == pytest.approx(none + 2 * rows)
    assert beside_products("mask", "forward", 512.0, 4096.0, CPU) > beside_products("mask", "forward", 512.0, 0.0, CPU)
    assert [causal_fraction(keys) for keys in (64, 512, 513, 2048)] == [1.0, 1.0, 0.75, 0.625]
