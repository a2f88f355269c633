"""Hopper kernels of latent attention through Triton's compiler: they fit, products overlap, no loop spills."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.codegen.ahead import compilations
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import FEW_QUERIES, Dtypes, Signature, Widths
from weft.compiler.planning.sources import kind_named
from weft.runtime.call import Call, Choices, Dense, Lengths, PackedPaged, Paged
from weft.runtime.driver import compile_kernels

from ..support import mostly
from .ahead import compile_ahead, count_opcode, stale_addresses
from .ahead import compiled as compiled_of_widths
from .test_ahead import PLAN_SLACK, check_full_loops, check_wgmma

pytestmark = pytest.mark.compiles

CAUSAL = weft.Attention(mask=masks.causal, latent=weft.Latent(512, 64), scale=0.1, name="latent_causal")
ALIBI = weft.Attention(
    score + weft.tensor("slopes", 1)[head] * (kv_pos - q_pos), masks.causal, latent=weft.Latent(512, 64), scale=0.1,
    name="latent_alibi",
)  # fmt: skip
FAR = weft.Attention(
    score + weft.tensor("pad", 2)[batch, kv_pos], masks.causal, latent=weft.Latent(512, 64), scale=0.1,
    sink=weft.tensor("sinks", 2)[batch, head], name="latent_far",
)  # fmt: skip
RANK_256 = CAUSAL.replace(latent=weft.Latent(256, 32), name="latent_256")
RANK_384 = CAUSAL.replace(latent=weft.Latent(384, 32), name="latent_384")
ALL_SWITCHES = "64x64p11+ordered+prefetch"


def compiled(variant, kind, heads, q_len, page, form, few_queries=True, descale=None):
    """The kernels of a call, compiled. descale: of keys in FP8, "head" or "token"; None: keys are bf16."""
    machine, rank = by_name("h200"), variant.latent.rank
    width = rank + variant.latent.rope
    by_rows = frozenset({"k_descale"} if descale == "token" else ())
    offset = "number" if kind == "dense" else "bottom_right"
    signature = Signature(
        "forward",
        "sm_90",
        Dtypes.of("bf16", "e4m3" if descale else "bf16", None),
        Widths(width, rank, variant.latent.rope if descale else 0, True),
        sequences=kind_named(kind),
        offset=offset,
        few_queries=few_queries,
        options=frozenset({"k_descale"} if descale else ()),
        scaled_rows=by_rows,
    )
    query, out = (torch.empty(2, heads, q_len, n, dtype=torch.bfloat16) for n in (width, rank))
    if kind == "packed_paged":
        query, out = (t.transpose(1, 2).reshape(1, 2 * q_len, heads, -1).transpose(1, 2) for t in (query, out))
    keys = torch.empty(2, 1, page or 256, width, dtype=torch.bfloat16)
    key, rope, read = keys, None, None
    if descale:
        key, rope = keys[..., :rank].to(torch.float8_e4m3fn), keys[..., rank:].contiguous()
        read = {"k_descale": torch.ones(2, 1, page or 256, 1) if by_rows else torch.ones(1, 1, 1, 1)}
    lens, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    kinds = {
        "dense": Dense(0), "lengths": Lengths(None, lens, None), "paged": Paged(None, lens, table, page, None),
        "packed_paged": PackedPaged(starts, lens, table, page, None),
    }  # fmt: skip
    operands = {p.name: torch.empty([2] * (p.rank - 1) + [heads]) for p in variant.canonical.parameters}
    call = Call(query, key, None, rope, operands, kinds[kind], Choices(), width, read)
    made = compile_kernels(variant, signature, machine, None, f"split_kv/split_forward=hopper:{form}")
    results = {"out": out, "lse": torch.empty(*([2] if facts_of(variant).scores_lie_far else []), *out.shape[:3])}
    found = compilations(made.resolved.target, made.modules, made.resolved.code, facts_of(variant), call, results)
    return {seen.name: compile_ahead(seen, machine) for seen in found}


CASES = [
    (CAUSAL, "dense", 128, 1, 0, "64x64p11"),
    (CAUSAL, "lengths", 16, 4, 0, "64x64p11+ordered"),
    (CAUSAL, "paged", 128, 1, 64, ALL_SWITCHES),
    (ALIBI, "paged", 64, 2, 16, "64x64p11+ordered"),
    (CAUSAL, "packed_paged", 128, 2, 64, ALL_SWITCHES),
    (ALIBI, "packed_paged", 16, 2, 16, "64x64p11"),
    (FAR, "dense", 128, 1, 0, ALL_SWITCHES),
    (FAR, "packed_paged", 64, 4, 64, "64x64p11"),
    (RANK_256, "paged", 64, 1, 64, "64x64p11"),
    (RANK_384, "dense", 128, 1, 0, "64x64p22+ordered+prefetch+narrow"),
]


CHUNKS = [
    (CAUSAL, "packed_paged", 128, 40, 64, ALL_SWITCHES),
    (ALIBI, "packed_paged", 16, 40, 16, ALL_SWITCHES),
    (FAR, "packed_paged", 64, 40, 64, ALL_SWITCHES),
    (CAUSAL, "dense", 128, 40, 0, ALL_SWITCHES),
    (CAUSAL, "paged", 16, 40, 16, ALL_SWITCHES),
]


@pytest.mark.parametrize(
    ("variant", "kind", "heads", "q_len", "page", "form"), mostly([CASES[3], CHUNKS[1]], [*CASES, *CHUNKS])
)
def test_latent_tiles_fit_and_overlap(variant, kind, heads, q_len, page, form, recorded):
    kernels = compiled(variant, kind, heads, q_len, page, form, few_queries=q_len <= FEW_QUERIES)
    assert kernels.keys() == {"split_forward", "join_parts"}
    split = kernels["split_forward"]
    assert split.sram <= by_name("h200").sram_per_block and not split.serialised
    assert split.product_loops() and (variant is FAR or not split.spills_in_loops())
    recorded("split_forward", spilled=split.spilled, in_loops=split.spills_in_loops())
    assert split.count("cp.async.bulk.tensor") >= 9 and split.count("wgmma.mma_async")
    recorded("join_parts", spilled=kernels["join_parts"].spilled)
    lines = split.count(r"prefetch\.")
    assert lines == split.count(r"prefetch\.global\.L2")  # bulk prefetches of lanes go one after the other
    is_early = "prefetch" in form and q_len <= FEW_QUERIES
    row = 2 * (variant.latent.rank + variant.latent.rope)
    assert lines == (-(-row // 128) if is_early or "paged" in kind else 0)
    texts = [text for _, text in split.sass]
    last = max(i for i, text in enumerate(texts) if "UTMALDG" in text)
    waited = max(i for i in range(last) if "SYNCS.PHASECHK" in texts[i])
    assert not any("LDG.E" in text for text in texts[waited:last])  # no copy stands behind a look at a table


FP8_CASES = [
    (CAUSAL, "dense", 128, 1, 0, "64x64p8r6", "head"),
    (CAUSAL, "paged", 128, 1, 64, "64x64p8r6", "token"),
    (ALIBI, "packed_paged", 16, 2, 16, "64x64p8r6", "token"),
    (FAR, "lengths", 64, 4, 0, "64x64p9r4+ordered", "token"),
    (RANK_384, "paged", 128, 1, 64, "64x64p16r12+narrow", "head"),
    (RANK_256, "dense", 64, 40, 0, "64x64p8r6", "token"),
]


@pytest.mark.parametrize(
    ("variant", "kind", "heads", "q_len", "page", "form", "descale"), mostly([FP8_CASES[1]], FP8_CASES)
)
def test_latent_tiles_in_fp8_are_made_fp16(variant, kind, heads, q_len, page, form, descale, recorded):
    kernels = compiled(variant, kind, heads, q_len, page, form, q_len <= FEW_QUERIES, descale)
    split = kernels["split_forward"]
    assert split.sram <= by_name("h200").sram_per_block and not split.serialised
    # Of descales of rows a weigher with more registers spills less and leaves too few to converters (docs/experiments).
    few = 12 if descale == "token" else 8
    assert split.product_loops() and (variant in (FAR, ALIBI) or split.spills_in_loops() <= few)
    recorded("split_forward", spilled=split.spilled, in_loops=split.spills_in_loops())
    # A thread of a converter has 256 numbers of a piece of 128 columns: it converts pairs, and stores 8 at a time.
    numbers = (2 if "r4" in form else 3) * (128 if "narrow" in form else 256)
    assert split.count(r"cvt\.rn\.f16x2\.e4m3x2") == numbers // 2
    unpacked = [n for n, (_, text) in enumerate(split.sass) if "F2FP.F16.E4M3.UNPACK_B" in text]
    stored = [text for _, text in split.sass[unpacked[0] : unpacked[-1] + 40] if "STS" in text]
    assert sum("STS.128" in text for text in stored) == len(stored) == numbers // 8


EXPANDED = {
    "causal": CAUSAL.replace(scale=None),
    "softcap": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, latent=weft.Latent(512, 64), name="capped"),
    "narrow": weft.Attention(mask=masks.causal, latent=weft.Latent(256, 32), name="narrow"),
    "alibi": ALIBI.replace(scale=None),
}
MAIN = frozenset({"query", "key", "value", "rope"})


@pytest.mark.parametrize(
    ("name", "head_dim", "value_dim"),
    mostly(
        [("causal", 192, 128)], [("causal", 192, 128), ("softcap", 192, 128), ("alibi", 192, 128), ("narrow", 96, 64)]
    ),
)
def test_keys_in_two_tensors_fit_and_overlap(name, head_dim, value_dim):
    module = compiled_of_widths(EXPANDED[name], "forward", head_dim, value_dim=value_dim, target="hopper")
    (kernel,) = module.kernels.values()
    assert kernel.sram <= by_name("h200").sram_per_block and not kernel.spilled
    check_wgmma(kernel)
    check_full_loops(kernel)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "head_dim", "value_dim"),
    mostly([("causal", 192, 128)], [("causal", 192, 128), ("softcap", 192, 128), ("narrow", 96, 64)]),
)
def test_gradients_of_keys_in_two_tensors_fit_and_overlap(name, head_dim, value_dim, deterministic, recorded):
    module = compiled_of_widths(
        EXPANDED[name], "backward", head_dim, value_dim=value_dim, target="hopper", wanted=MAIN,
        deterministic=deterministic,
    )  # fmt: skip
    main = next(n for n in ("flash_backward", "flash_dkey_dvalue") if n in module.kernels)
    assert main == ("flash_backward" if head_dim <= 128 and not deterministic else "flash_dkey_dvalue")
    for kernel in module.kernels.values():
        assert kernel.sram <= by_name("h200").sram_per_block and not kernel.spills_in_loops()
        if head_dim > 128:  # a share of dQ lies in as many columns as the larger of two
            assert kernel.sram <= module.plans[kernel.name].sram_bytes.value + PLAN_SLACK, kernel.name
        recorded(kernel.name, spilled=kernel.spilled)
        if kernel.name in (main, "flash_dquery"):
            check_wgmma(kernel)
    added = module.kernels[main].count(r"cp\.reduce\.async\.bulk\.tensor")
    assert bool(added) != deterministic


OF_LENGTHS = [
    ("causal", 192, 128, "packed", False), ("causal", 192, 128, "lengths", True), ("narrow", 96, 64, "packed", False),
    ("narrow", 96, 64, "lengths", True), ("softcap", 192, 128, "packed", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "head_dim", "value_dim", "sequences", "deterministic"), mostly(OF_LENGTHS[:1], OF_LENGTHS)
)
def test_lengths_cost_gradients_of_keys_in_two_tensors_nothing(
    name, head_dim, value_dim, sequences, deterministic, recorded
):
    """Loops are those of dense calls; a rotary key and the sum of its gradient lie where the sequence does."""
    dense, made = (
        compiled_of_widths(
            EXPANDED[name], "backward", head_dim, value_dim=value_dim, target="hopper", wanted=MAIN,
            deterministic=deterministic, sequences=kind,
        ).kernels
        for kind in ("dense", sequences)
    )  # fmt: skip
    assert dense.keys() == made.keys() - {"query_work", "key_work"}
    for name, kernel in dense.items():
        own = made[name]
        assert not own.serialised and not stale_addresses(own) and own.spills_in_loops() == 0, name
        recorded(name, more_sram=own.sram - kernel.sram, spilled=own.spilled)
        for pattern in ("wgmma.mma_async", "cp.async.bulk.tensor", r"cp\.reduce\.async\.bulk\.tensor"):
            assert own.count(pattern) == kernel.count(pattern), f"{name}: {pattern}"
        for ours, theirs in zip(own.product_loops(), kernel.product_loops(), strict=True):
            assert len(ours) <= 1.06 * len(theirs), name


def test_tiles_of_queries_see_no_padding_of_keys():
    module = compiled_of_widths(EXPANDED["causal"], "backward", 192, value_dim=128, target="hopper", wanted=MAIN)
    # S by 16 columns, dP, dQ of two pieces by 16 keys; S, dP, dV, dK of two pieces by 16 queries
    for name, products in (("flash_dquery", 12 + 8 + 4 + 4), ("flash_dkey_dvalue", 12 + 8 + 2 + 4)):
        loops = module.kernels[name].product_loops()
        assert [count_opcode("HGMMA", loop) for loop in loops] == [products] * 2
