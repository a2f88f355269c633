"""Products of FP8 operands on `hopper`: the text of its kernels, run by gluon.py, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed, Sequences
from weft.runtime.descales import OF, dequantized, read_by_kernels
from weft.runtime.driver import compile_kernels
from weft.runtime.options import PLAIN
from weft.runtime.run.key import signature_of_call

from ..support import mostly
from .gluon import OnACpu

pytest.importorskip("triton")

E4M3 = torch.float8_e4m3fn
slopes, doc = weft.tensor("slopes", 1), weft.tensor("doc", 2, int)
VARIANTS = {
    "full": {},
    "causal": {"mask": masks.causal},
    "window": {"mask": masks.sliding_window(100)},
    "cap": {"score": 20.0 * weft.tanh(score / 20.0), "mask": masks.causal},
    "alibi": {"score": score + slopes[head] * (kv_pos - q_pos), "mask": masks.causal},
    "sink": {"sink": slopes[head], "mask": masks.causal},
    "documents": {"mask": masks.causal & masks.document(doc)},
}


def quantized(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, value_dim: int, layout: str,
              per: str | int, seed: int = 0, device: str = "cpu") -> dict[str, weft.fp8.Quantized]:  # fmt: skip
    """query, key and value; the first of "token" where `per` says so, the others by head, or by "tensor" or 128 rows.

    Numbers of neighbours among blocks of 128 rows are far apart, where these have descales.
    """
    torch.manual_seed(q_len + kv_len + dim + 1000 * seed)
    query, key = torch.randn(batch, heads, q_len, dim), 3 * torch.randn(batch, kv_heads, kv_len, dim)
    value = torch.randn(batch, kv_heads, kv_len, value_dim) * torch.linspace(0.1, 5, kv_heads)[:, None, None]
    if per == 128:
        block = torch.arange(kv_len) // 128
        key, value = key * (2.0 ** -(block % 3))[:, None], value * (100.0 ** (block % 2))[:, None]
    query, key, value = (x.to(device) for x in (query, key, value))
    others = "head" if per == "token" else per
    return {
        "query": weft.fp8.quantize(query, per=per),
        "key": weft.fp8.quantize(key, per=others),
        "value": weft.fp8.quantize(value, per=others, layout=layout),
    }  # fmt: skip


def operands_of(name: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """What a variant reads."""
    found = {"slopes": torch.linspace(-0.3, 0.6, sizes[1])} if name in ("alibi", "sink") else {}
    return found | ({"doc": torch.arange(sizes[4]).expand(sizes[0], -1) // 50} if name == "documents" else {})


def computed(
    declared: weft.Attention, given: dict[str, weft.fp8.Quantized], operands: dict[str, Tensor], sequences: Sequences,
    out_dtype: str | None = None, schedule: str | None = None, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, by kernels that find NaN wherever nobody has written."""
    main = {n: x.data for n, x in given.items()}
    read = read_by_kernels("fp8", main, PLAIN.having(**{OF[n]: x.descale for n, x in given.items()}), pooled=False)
    query, value = main["query"], main["value"]
    choices = Choices(out=out_dtype)
    call = Call(query, main["key"], value, None, operands, sequences, choices, query.shape[3], read)
    signature = replace(signature_of_call(facts_of(declared), "forward", call), arch="sm_90")
    made = compile_kernels(declared, signature, by_name("h200"), "hopper", schedule)
    assert made.resolved.target.name == "hopper" and "+fp8" in str(made.resolved.code.schedule)
    launcher = OnACpu.of(made, declared, seed)
    dtype = {None: torch.bfloat16, "fp16": torch.float16}[out_dtype]
    out = torch.full((*query.shape[:3], value.shape[3]), float("nan"), dtype=dtype)
    results = {"out": out, "lse": torch.full(query.shape[:3], float("nan"))}
    partition = launcher.partition(call, results)
    workspace = {n: p.beside(query) for n, p in launcher.workspace(call, results, partition).items()}
    for tensor in workspace.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**31))
    launcher(call, results, workspace, partition)
    return results["out"], results["lse"]


def check(
    name: str, sizes: tuple[int, ...], layout: str = "rows", per: str | int = "head", offset: int | None = None,
    out_dtype: str | None = None, schedule: str | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Each element within six standard deviations of what the rounding of weights to e4m3 leaves."""
    given = quantized(*sizes, layout, per)
    declared = weft.Attention(**VARIANTS[name], name=f"fp8_{name}")
    operands = operands_of(name, sizes)
    own = sizes[4] - sizes[3] if offset is None else offset
    out, lse = computed(declared, given, operands, Dense(own), out_dtype, schedule, seed)
    check_rounded(declared, given, own, operands, out, lse)


def check_rounded(
    declared: weft.Attention, given: dict[str, weft.fp8.Quantized], offset: int, operands: dict[str, Tensor],
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Whether out and lse are those of these numbers but for weights that are rounded to e4m3."""
    query, key, value = real = [dequantized(x.data, x.descale, torch.float64) for x in given.values()]
    exact, exact_lse = declared.reference(*real, return_lse=True, q_offset=offset, **operands)
    assert float((lse - exact_lse).nan_to_num(0.0, 0.0, 0.0).abs().max()) < 0.05
    assert torch.equal(lse == float("-inf"), exact_lse == float("-inf"))
    # weights as the call has them: with the identity in place of values
    every = torch.eye(key.shape[2], dtype=torch.float64, device=key.device).expand(*key.shape[:2], -1, -1)
    parts = [declared.reference(query, key, part, q_offset=offset, **operands) for part in every.split(256, 3)]
    weights = torch.cat(parts, 3)
    values = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    deviation = 2.0**-4 / 3**0.5 * (weights.square() @ values.square()).sqrt()
    largest = weights.amax(-1, keepdim=True)
    unseen = 2.0**-17 * key.shape[2] * largest * values.abs().amax(2, keepdim=True)
    allowed = 6 * deviation + unseen + 2.0**-8 * exact.abs() + 1e-6
    assert bool(((out.double() - exact).abs() <= allowed).all())


SIZES = {
    "square": (1, 2, 2, 256, 256, 128, 128),
    "ends": (2, 4, 2, 130, 201, 64, 64),
    "narrow values": (1, 2, 1, 200, 233, 128, 80),
    "two pieces": (1, 2, 2, 129, 250, 192, 128),
    "unequal pieces": (1, 1, 1, 70, 140, 96, 32),
    "wide": (1, 2, 1, 140, 250, 256, 256),
    "wide values": (1, 1, 1, 70, 200, 64, 192),
    "wide keys": (1, 1, 1, 70, 200, 256, 64),
    "many tiles": (1, 2, 1, 130, 700, 64, 64),
}


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", mostly(["causal", "cap", "documents"], list(VARIANTS)))
def test_variants(name: str, layout: str) -> None:
    check(name, SIZES["ends"], layout)


@pytest.mark.parametrize("sizes", list(SIZES))
def test_widths_and_lengths(sizes: str) -> None:
    check("causal", SIZES[sizes], "columns" if sizes == "square" else "rows")


@pytest.mark.parametrize("per", ["tensor", "token", 128])
def test_descales_of_a_tensor_of_128_rows_and_of_rows_of_the_query(per: str | int) -> None:
    check("causal", SIZES["ends"], per=per)
    check("cap", SIZES["ends"], per=per)


@pytest.mark.parametrize("sizes", ["narrow values", "wide", "many tiles"])
def test_descales_of_128_rows(sizes: str) -> None:
    check("full", SIZES[sizes], "columns", per=128)


def test_a_descale_may_be_far_below_the_one_before() -> None:
    """Sums in its units stay finite. Values so small count as 0 beside those of others."""
    given = quantized(1, 1, 1, 64, 512, 64, 64, "rows", 128)
    value = given["value"]
    far = value.descale * torch.tensor([1.0, 1e-30, 1.0, 1e-37])[:, None]
    given["value"] = weft.fp8.Quantized(value.data, far.clamp(min=2.0**-126))
    declared = weft.Attention(name="far_descales")
    out, lse = computed(declared, given, {}, Dense(448))
    check_rounded(declared, given, 448, {}, out, lse)


@pytest.mark.parametrize("block", [0, 1, 3])
def test_a_descale_that_is_nan_is_not_lost(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU values may not be checked: then results that read it are NaN, whichever tile has it."""
    given = quantized(1, 1, 1, 64, 512, 64, 64, "rows", 128)

    checked = read_by_kernels

    def spoilt(*call: Any, **options: Any) -> dict[str, Tensor]:
        found = checked(*call, **options)  # which checks them on a CPU
        found["v_descale"][:, :, block] = float("nan")
        return found

    monkeypatch.setitem(globals(), "read_by_kernels", spoilt)
    out, _ = computed(weft.Attention(name="far_descales"), given, {}, Dense(448))
    assert bool(out.isnan().all())


def test_rows_that_see_nothing_and_fp16() -> None:
    check("causal", SIZES["ends"], offset=-40, out_dtype="fp16")


# one sequence without queries, one without keys, one of one token, and ends behind a tile of 128
LENS = ([150, 0, 70, 1, 129, 40], [200, 9, 0, 1, 140, 250])
FIRST = [torch.tensor([0, *n]).cumsum(0).tolist() for n in LENS]


def rows_of(packed: bool, n: int, side: int) -> tuple[slice, slice]:
    """Batch row and rows of sequence n among queries (side 0) or keys."""
    start = FIRST[side][n] if packed else 0
    return slice(0, 1) if packed else slice(n, n + 1), slice(start, start + LENS[side][n])


def of_sequence(given: weft.fp8.Quantized, packed: bool, n: int, side: int) -> weft.fp8.Quantized:
    own, rows = rows_of(packed, n, side)
    descale = given.descale[own if len(given.descale) > 1 else slice(None)]
    if descale.shape[2] > 1:
        by_rows = descale.shape[2] >= given.data.shape[2]
        descale = descale[:, :, rows] if by_rows else descale[:, :, : -(-rows.stop // 128)]
    return weft.fp8.Quantized(given.data[own][:, :, rows], descale)


def ragged(
    packed: bool, name: str, layout: str, per: str | int, widths: tuple[int, int] = (64, 64), device: str = "cpu"
):
    """Operands of sequences that have NaN behind their ends, what the variant reads, and the lengths as options."""
    number, more = len(LENS[0]), (33, 21)
    batch, rows = (1, [sum(n) + m for n, m in zip(LENS, more)]) if packed else (number, [max(n) + 5 for n in LENS])
    sizes = (batch, 4, 2, *rows, *widths)
    given = quantized(*sizes, layout, per, device=device)
    for side, names in enumerate((["query"], ["key", "value"])):
        there = torch.zeros(batch, rows[side], dtype=torch.bool, device=device)
        for n in range(number):
            there[rows_of(packed, n, side)] = True
        for one in names:
            numbers = given[one].data.view(torch.uint8)
            numbers.copy_(torch.where(there[:, None, :, None], numbers, numbers.new_tensor(0x7F)))
    operands = operands_of(name, (number, 4, 2, 0, max(rows)))
    counts = [torch.tensor(n, dtype=torch.int32, device=device) for n in (FIRST if packed else LENS)]
    names = ("cu_seqlens_q", "cu_seqlens_kv") if packed else ("q_lens", "kv_lens")
    return given, {n: t.to(device) for n, t in operands.items()}, dict(zip(names, counts))


def check_ragged(declared: weft.Attention, packed: bool, given, operands, out: Tensor, lse: Tensor) -> None:
    """Each sequence as if it were alone; rows behind the ends are 0."""
    there = torch.zeros(out.shape[0], out.shape[2], dtype=torch.bool, device=out.device)
    for n, (q_len, kv_len) in enumerate(zip(*LENS)):
        own, rows = rows_of(packed, n, 0)
        there[own, rows] = True
        alone = {one: of_sequence(x, packed, n, int(one != "query")) for one, x in given.items()}
        read = {one: t[n : n + 1] if one == "doc" else t for one, t in operands.items()}
        if q_len and kv_len:
            check_rounded(declared, alone, kv_len - q_len, read, out[own][:, :, rows], lse[own][:, :, rows])
        else:
            assert not out[own][:, :, rows].any()
    assert not out.masked_select(~there[:, None, :, None]).any()
    assert bool((lse.masked_select(~there[:, None]) == float("-inf")).all())


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", mostly(["causal", "documents"], list(VARIANTS)))
def test_sequences_of_their_own_lengths(name: str, packed: bool, layout: str) -> None:
    per = "token" if layout == "rows" else "head" if packed else 128
    given, operands, lengths = ragged(packed, name, layout, per)
    declared = weft.Attention(**VARIANTS[name], name=f"fp8_ragged_{name}")
    sequences = Packed(*lengths.values(), None) if packed else Lengths(*lengths.values(), None)
    out, lse = computed(declared, given, operands, sequences)
    check_ragged(declared, packed, given, operands, out, lse)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("packed", [False, True])
def test_plans_of_sequences_of_their_own_lengths(packed: bool, layout: str) -> None:
    """No copies are made of operands that hopper multiplies, also where they would be faster than other kernels."""
    lens = torch.tensor([0, 2048, 8192], dtype=torch.int32)
    made = quantized(1 if packed else 2, 2, 2, 8192, 8192, 64, 64, layout, "head")
    lengths = {"cu_seqlens_q": lens} if packed else {"kv_lens": lens[1:]}
    options = {OF[n]: x.descale for n, x in made.items()} | lengths
    causal = weft.Attention(mask=masks.causal, name="fp8_ragged_plan")
    text = causal.explain(*(x.data for x in made.values()), device="h200", **options)
    assert "+fp8" in text and "made bf16 first" not in text


REFUSED = {  # what other targets compute, or copies in bf16
    "bf16 queries": ({"query": torch.bfloat16}, "query, key and value are all e4m3"),
    "e5m2": ({"key": torch.float8_e5m2}, "query, key and value are all e4m3"),
    "fp32 output": ({"out": "fp32"}, "a bf16 or fp16 output"),
    "rows": ({"per": "token"}, "one k_descale and v_descale a head"),
    "odd pieces": ({"dim": 80}, "D a multiple of 16, not 80 or 144"),
    "dropout": ({"variant": weft.Attention(dropout=0.1, name="fp8_drops")}, "softmax weights, none dropped"),
    "sigmoid": ({"variant": weft.Attention(normalizer="sigmoid", name="fp8_sigmoid")}, "softmax weights"),
    "signed": ({"variant": weft.Attention(score * slopes[head], name="fp8_signed")}, "factor of a score is positive"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_has_no_products_of_fp8(name: str) -> None:
    """The target says why, and the plan names another one."""
    given, words = REFUSED[name]
    dim, per = given.get("dim", 64), given.get("per", "head")
    made = quantized(1, 2, 2, 300, 300, dim, dim, "rows", "head")
    tensors = {n: x.data.to(given.get(n, E4M3)) for n, x in made.items()}
    rows = 300 if per == "token" else 1
    descales = {OF[n]: torch.ones(1, 2, rows, 1) for n, t in tensors.items() if t.dtype != torch.bfloat16}
    options = descales | ({"out_dtype": torch.float32} if "out" in given else {})
    variant = given.get("variant", weft.Attention(mask=masks.causal, name="fp8_refused"))
    operands = {"slopes": torch.ones(2)} if name == "signed" else {}
    text = variant.explain(*tensors.values(), device="h100", **options, **operands)
    assert "+fp8" not in text
    with pytest.raises(weft.UnavailableError, match=f"has FP8 products .*{words}"):
        variant.explain(*tensors.values(), device="h100", target="hopper", **options, **operands)


def test_a_latent_cache_in_fp8_is_planned_for_hopper_cards() -> None:
    latent = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=512, rope=64), scale=0.1, name="fp8_latent_plan")
    cache = weft.fp8.quantize(torch.randn(1, 1, 512, 512), "token")
    query, rope = torch.randn(1, 16, 4, 576, dtype=torch.bfloat16), torch.randn(1, 1, 512, 64, dtype=torch.bfloat16)
    text = latent.explain(query, cache.data, rope=rope, k_descale=cache.descale, device="h100")
    assert "split_forward=hopper" in text and "bf16, keys and values e4m3" in text
    plan = latent.plan(query, cache.data, rope=rope, k_descale=cache.descale, device="h100")
    assert plan.kernels[0].hbm_read.value == 2 * query.numel() + cache.data.numel() + 2 * rope.numel()


def test_values_that_begin_between_16_bytes_are_left_to_others() -> None:
    made = quantized(1, 2, 2, 300, 300, 64, 64, "rows", "head")
    tensors = {n: x.data for n, x in made.items()}
    tensors["value"] = torch.cat([tensors["value"].view(torch.uint8)] * 2, -1).view(E4M3)[..., 3:67]
    options = {OF[n]: x.descale for n, x in made.items()}
    causal = weft.Attention(mask=masks.causal, name="fp8_unaligned")
    assert "+fp8" not in causal.explain(*tensors.values(), device="h100", **options)
