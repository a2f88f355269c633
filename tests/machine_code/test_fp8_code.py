"""FP8 operands, compiled: how many instructions make numbers of a product of stored ones, and that nothing spills."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import weft
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed, Paged
from weft.runtime.descales import OF, read_by_kernels
from weft.runtime.driver import compile_kernels
from weft.runtime.options import PLAIN
from weft.runtime.run.key import signature_of_call
from weft.runtime.run.variant import variant_of

from . import ahead, fixed

pytestmark = pytest.mark.compiles

CAUSAL = weft.Attention(mask=weft.masks.causal, name="causal")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def compiled(
    dtypes=(torch.bfloat16, E4M3, E4M3),
    per="head",
    schedule=None,
    sequences="dense",
    q_len=256,
    width=128,
    value_width=128,
    device="h100",
    variant=CAUSAL,
    rope=0,
    target="triton",
) -> dict[str, ahead.Kernel]:
    """The kernels of a forward, with descales of the FP8 operands.

    rope: rotary columns of a latent cache beside it, in bf16: then `width` is its rank, and there is no value.
    """
    machine = by_name(device)
    rows = (q_len, 64 if sequences == "paged" else 512, 64 if sequences == "paged" else 512)
    columns = {"value": value_width}
    main = {n: torch.empty(4 if r == 64 else 1, 8 if n == "query" else 2, r, columns.get(n, width)).to(d)
            for n, r, d in zip(OF, rows, dtypes)}  # fmt: skip
    main["query"] = main["query"][:1]
    latent = rope > 0
    if latent:
        main |= {"query": torch.empty(1, 128, q_len, width + rope).to(dtypes[0]), "key": main["key"][:, :1]}
        del main["value"]
    blocks = {"head": lambda rows: 1, "token": lambda rows: rows, 128: lambda rows: -(-rows // 128)}[per]
    given = {OF[n]: torch.ones(1 if blocks(t.shape[2]) == 1 else t.shape[0], t.shape[1], blocks(t.shape[2]), 1)
             for n, t in main.items() if t.dtype in (E4M3, E5M2)}  # fmt: skip
    main.setdefault("value", None)
    read = read_by_kernels("causal", main, PLAIN.having(**given), sequences == "paged")
    lens = torch.zeros(2, dtype=torch.int32)
    kinds = {
        "dense": Dense(0), "lengths": Lengths(None, lens[1:], None), "packed": Packed(lens, lens, None),
        "paged": Paged(None, lens[1:], torch.zeros(1, 4, dtype=torch.int32), 64, None),
    }  # fmt: skip
    rotary = main["key"].new_empty(*main["key"].shape[:3], rope, dtype=torch.bfloat16) if latent else None
    call = Call(main["query"], main["key"], main["value"], rotary, {}, kinds[sequences], Choices(), width, read)
    signature = replace(signature_of_call(facts_of(variant), "forward", call), arch=machine.arch)
    out, lse = (p.beside(call.query) for p in variant_of(variant).forward_places(*[*main.values()], call.choices))
    with tempfile.TemporaryDirectory() as folder, weft.settings(cache_dir=folder):
        made = compile_kernels(variant, signature, machine, target, schedule)
        code, results = made.resolved.code, {"out": out, "lse": lse}
        found = ahead.compilations(made.resolved.target, made.modules, code, facts_of(variant), call, results)
        return {seen.name: ahead.compile_ahead(seen, machine) for seen in found}


@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("sequences", ["dense", "paged"])
def test_a_pair_of_an_fp8_cache_is_converted_by_one_instruction(sequences: str, per: str) -> None:
    """Converted to bf16, which takes five, a decode would wait for conversions and not for its cache."""
    split = compiled(schedule="split_kv", q_len=1, sequences=sequences, per=per)["split_forward"]
    assert split.count(r"cvt\.rn\.f16x2\.e4m3x2") >= 64
    assert split.count(r"cvt\.rn\.bf16") <= split.count(r"cvt\.rn\.f16x2\.e4m3x2") // 8  # of the output alone
    assert split.spilled <= 64  # outside of the loops
    assert not split.instructions(r"LDS\.U8")  # a pair of values lies in two rows: single bytes took a third longer


@pytest.mark.parametrize("dtypes", [(torch.float16, E5M2, E5M2), (torch.bfloat16, E4M3, E5M2)])
def test_values_of_other_formats_are_fp16_in_sram_as_well(dtypes) -> None:
    split = compiled(dtypes, schedule="split_kv", q_len=1, sequences="paged")["split_forward"]
    assert split.count(r"cvt\.rn\.f16x2\.e5m2x2") >= 64 and not split.instructions(r"LDS\.U8")


@pytest.mark.parametrize("sequences", ["lengths", "paged"])
def test_descales_of_rows_are_copied_ahead_and_not_loaded_one_by_one(sequences: str) -> None:
    """A thread that has all 64 of a tile, to find the largest, took three times as long as copies of a page did."""
    split = compiled(schedule="split_kv", q_len=1, sequences=sequences, per="token")["split_forward"]
    loops = [loop for loop in split.inner_loops() if ahead.count_opcode("HMMA", loop)]
    assert loops and max(ahead.count_opcode(r"LDG\.", loop) for loop in loops) <= 2  # numbers of blocks


@pytest.mark.parametrize(("widths", "dtypes", "sequences", "q_len", "schedule"), [
    ((64, 16), (torch.bfloat16, E4M3, E4M3), "dense", 256, None),
    ((128, 128), (E4M3, E4M3, E4M3), "dense", 256, None),
    ((64, 128), (torch.float16, torch.float16, E5M2), "dense", 256, None),
    ((80, 32), (torch.bfloat16, E4M3, torch.bfloat16), "paged", 256, None),
    ((192, 128), (torch.bfloat16, E4M3, E4M3), "packed", 256, None),
    ((256, 256), (torch.bfloat16, E4M3, E4M3), "lengths", 256, None),
    ((128, 64), (torch.bfloat16, E4M3, E4M3), "paged", 1, "split_kv"),
    ((128, 128), (torch.bfloat16, E4M3, E4M3), "paged", 16, "split_kv"),
    ((256, 16), (E4M3, E5M2, E5M2), "lengths", 16, "split_kv"),
], ids=str)  # fmt: skip
def test_no_product_of_fp8_operands_is_asynchronous_on_sm_90(widths, dtypes, sequences, q_len, schedule) -> None:
    """Triton 3.6 computes these wrongly where their right operands pass through registers, as converted tiles do."""
    found = compiled(dtypes, "token", schedule, sequences, q_len, *widths)
    assert all(not kernel.count("wgmma") for kernel in found.values())
    (own,) = (kernel for name, kernel in found.items() if name in ("flash_forward", "split_forward"))
    assert own.count(r"mma\.sync") > 0


@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize(("sequences", "q_len"), [("dense", 1), ("paged", 1), ("packed", 256)])
def test_rotary_columns_of_a_latent_cache_stay_in_bf16(sequences: str, q_len: int, per: str) -> None:
    """Their product is one of bf16 beside that of converted columns, which no descale reaches."""
    mla = weft.Attention(mask=weft.masks.causal, latent=weft.Latent(512, 64), scale=0.1, name="mla")
    given = {"schedule": "split_kv" if q_len == 1 else None, "sequences": sequences, "q_len": q_len, "per": per}
    found = compiled((torch.bfloat16, E4M3, E4M3), width=512, variant=mla, rope=64, **given)
    (own,) = (kernel for name, kernel in found.items() if name in ("flash_forward", "split_forward"))
    assert own.count(r"cvt\.rn\.f16x2\.e4m3x2") > 0 and own.spilled <= 64  # outside of the loops
    assert own.count(r"mma\.sync[\w.]*\.bf16\.bf16\.f32") > 0 < own.count(r"mma\.sync[\w.]*\.f16\.f16\.f32")


@pytest.mark.parametrize("tile", ["64x64w4s3", "128x64w8s3"])
@pytest.mark.parametrize(("kernel", "q_len"), [("flash/flash_forward", 256), ("split_kv/split_forward", 1)])
def test_a_schedule_with_asynchronous_products_of_fp8_operands_is_refused(kernel: str, q_len: int, tile: str) -> None:
    with pytest.raises(
        weft.WeftError, match="at most 32 queries a tile for FP8 operands on sm_90: larger ones take wg"
    ):
        compiled(schedule=f"{kernel}=triton:{tile}", q_len=q_len)


def test_small_weights_of_a_sigmoid_keep_their_range() -> None:
    """fp16 rounds weights of scores below -10 coarsely, and no other weight of the row need be larger."""
    flash = compiled(variant=weft.Attention(normalizer="sigmoid", name="sigmoids"))["flash_forward"]
    assert flash.count(r"cvt\.rn\.bf16x2\.f32") > 0
    assert flash.count(r"mma\.sync[\w.]*\.bf16\.bf16\.f32") > 0 < flash.count(r"mma\.sync[\w.]*\.f16\.f16\.f32")


@pytest.mark.parametrize("q_len", [1, 256])
def test_weights_of_fp16_are_scaled_by_the_division_by_the_largest_descale(q_len: int) -> None:
    """2**15 is the numerator of a reciprocal, one a tile; of bf16, whose range is wide, nothing is scaled."""
    found = compiled(per="token", q_len=q_len, schedule="split_kv" if q_len == 1 else None)
    (own,) = (kernel for name, kernel in found.items() if name in ("flash_forward", "split_forward"))
    assert own.count("0f47000000") == 2  # two loops
    sigmoid = weft.Attention(normalizer="sigmoid", name="sigmoids")
    assert compiled(per="token", variant=sigmoid)["flash_forward"].count("0f47000000") == 0


@pytest.mark.parametrize(("device", "dtype"), [("a100", E5M2), ("mi300x", E4M3), ("b200", E4M3)])
def test_other_cards(device: str, dtype: torch.dtype) -> None:
    assert compiled((torch.bfloat16, dtype, dtype), device=device).keys() == {"flash_forward"}


def test_early_cards_have_no_e4m3_and_say_so() -> None:
    with pytest.raises(weft.UnavailableError, match="has e4m3 from compute capability 8.9 on, this is sm_80; quantise"):
        compiled(device="a100")


# -- kernels that quantise ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("rows", "share"), [(32, 1), (64, 64)])
def test_a_tensor_is_read_once_by_wide_loads(rows: int, share: int, columns: bool) -> None:
    made = fixed.quantize_rows(rows, share, columns)
    assert made.count(r"ld\.global\.v4") == made.count(r"ld\.global") > 0 and not made.spilled
    assert made.count(r"st\.global\.v[24]") > 0  # of the numbers; descales are one a row, or a block
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0


@pytest.mark.parametrize("by_token", [False, True])
def test_appended_rows_are_quantised_in_the_launch_that_appends(by_token: bool) -> None:
    made = fixed.append_quantized(by_token)
    assert made.count(r"griddepcontrol\.wait") == made.count(r"griddepcontrol\.launch_dependents") == 1
    assert made.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0 and not made.spilled
    assert made.count(r"ld\.global\.v[24]") >= 2 and made.count(r"st\.global\.(v2|b32|v4)") >= 2


@pytest.mark.parametrize(("width", "value_width", "per"), [(128, 128, "head"), (192, 80, "head"), (64, 64, 128)])
def test_products_of_fp8_on_hopper(width: int, value_width: int, per: str | int) -> None:
    """Nothing moves a weight to another thread, products run beside the rest, and a value is turned by whole words."""
    kernels = compiled((E4M3,) * 3, per, width=width, value_width=value_width, target="hopper")
    forward, turning = kernels["flash_forward"], kernels["turn_values"]
    assert forward.spilled == turning.spilled == 0 and forward.serialised == []
    loops = [loop for loop in forward.inner_loops() if ahead.count_opcode("QGMMA", loop)]
    assert len(loops) >= 4  # of full tiles and of edges, of two consumers
    for loop in loops:
        assert ahead.count_opcode("PRMT", loop) == 0 and ahead.count_opcode("SHFL", loop) == 4  # those of maxima
    assert turning.count(r"ld\.global\.v4") >= 4 and turning.count(r"st\.global\.v4") >= 4


def test_products_of_fp8_in_parts_spill_little() -> None:
    """Sums of 256 columns fill the registers: scores beside the last part spill 1,500 bytes, which costs 15 %."""
    kernels = compiled((E4M3,) * 3, width=256, value_width=256, target="hopper", sequences="packed")
    forward, turning = kernels["flash_forward"], kernels["turn_values"]
    assert forward.spilled <= 300 and turning.spilled == 0 and forward.serialised == []


@pytest.mark.parametrize("name", ["dequantize_rows", "dequantize_pages"])
@pytest.mark.parametrize("width", [128, 512])
def test_copies_in_16_bits_move_16_bytes_at_a_time(width: int, name: str) -> None:
    """And a row's descale is one load of a thread. Numbers that were stored one by one moved at 1.7 TB/s of 4.2."""
    tensors = {"data": E4M3, "x": torch.bfloat16, "descale": torch.float32}
    constants = {"ROWS": 4096 // width, "WIDTH": width, "BLOCK": width, "ALIGNED": True, "SCALED": True, "EVEN": True}
    if name == "dequantize_pages":
        tensors |= {"table": torch.int32, "kv_lens": torch.int32}
        constants |= {"LARGE": 256}
    else:
        constants |= {"SHARE": 1, "COLUMNS": False}
    kernel = fixed.fixed("quantize", name, tensors, constants)
    assert kernel.count(r"st\.global\.v4") == kernel.count(r"st\.global") == 4
    assert kernel.count(r"ld\.global\.v4") == 2 and kernel.spilled == 0 and kernel.count(r"ld\.global") <= 13
