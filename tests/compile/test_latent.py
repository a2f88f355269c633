"""The Hopper kernel of latent caches through Triton's compiler: it fits, products overlap, no loop spills."""

from __future__ import annotations

import tempfile

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.codegen.ahead import compilations
from weft.compiler.analysis.facts import facts_of
from weft.compiler.planning.hardware import by_name
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.runtime.call import Call, Dense, Lengths, Options, Paged
from weft.runtime.driver import compile_kernels

from ..support import mostly
from .ahead import compile_ahead

CAUSAL = weft.Attention(mask=masks.causal, latent=weft.Latent(512, 64), scale=0.1, name="latent_causal")
ALIBI = weft.Attention(
    score + weft.tensor("slopes", 1)[head] * (kv_pos - q_pos), masks.causal, latent=weft.Latent(512, 64), scale=0.1,
    name="latent_alibi",
)  # fmt: skip
ALL_SWITCHES = "64x64p11+ordered+prefetch"


def compiled(variant, kind, heads, q_len, page, form):
    """The kernels of a call, compiled."""
    machine, width = by_name("h200"), 576
    offset = "number" if kind == "dense" else "bottom_right"
    signature = Signature(
        "forward", "sm_90", Dtypes.all("bf16"), Widths(width, 512, 0, True), sequences=kind, offset=offset, few=True
    )
    query, out = (torch.empty(2, heads, q_len, n, dtype=torch.bfloat16) for n in (width, 512))
    key = torch.empty(2, 1, page or 256, width, dtype=torch.bfloat16)
    lens, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    kinds = {"dense": Dense(0), "lengths": Lengths(None, lens, None), "paged": Paged(None, lens, table, page, None)}
    operands = {p.name: torch.empty(heads) for p in variant.parameters}
    call = Call(query, key, None, None, operands, kinds[kind], Options(), width)
    with tempfile.TemporaryDirectory() as folder, weft.settings(cache_dir=folder):
        made = compile_kernels(variant, signature, machine, None, f"split_kv/split_forward=hopper:{form}")
        results = {"out": out, "lse": torch.empty(2, heads, q_len)}
        found = compilations(made.resolved.target, made.modules, made.resolved.code, facts_of(variant), call, results)
        return {seen.name: compile_ahead(seen, machine) for seen in found}


CASES = [
    (CAUSAL, "dense", 128, 1, 0, "64x64p11"),
    (CAUSAL, "lengths", 16, 4, 0, "64x64p11+ordered"),
    (CAUSAL, "paged", 128, 1, 64, ALL_SWITCHES),
    (ALIBI, "paged", 64, 2, 16, "64x64p11+ordered"),
]


@pytest.mark.parametrize(("variant", "kind", "heads", "q_len", "page", "form"), mostly([CASES[3]], CASES))
def test_latent_tiles_fit_and_overlap(variant, kind, heads, q_len, page, form):
    kernels = compiled(variant, kind, heads, q_len, page, form)
    assert kernels.keys() == {"split_forward", "join_parts"}
    split = kernels["split_forward"]
    assert split.sram <= by_name("h200").sram_per_block and not split.serialised
    assert split.product_loops() and not split.spills_in_loops() and split.spilled < 256
    assert split.count("cp.async.bulk.tensor") >= 18 and split.count("wgmma.mma_async")
    assert not kernels["join_parts"].spilled
