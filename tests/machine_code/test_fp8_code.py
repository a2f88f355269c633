"""FP8 operands, compiled: how many instructions make numbers of a product of stored ones, and that nothing spills."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

import weft
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed, Paged
from weft.runtime.descales import OF, read_by_kernels
from weft.runtime.driver import compile_kernels
from weft.runtime.options import PLAIN
from weft.runtime.variant import variant_of

from . import ahead

CAUSAL = weft.Attention(mask=weft.masks.causal, name="causal")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def compiled(
    dtypes=(torch.bfloat16, E4M3, E4M3),
    per="head",
    schedule=None,
    sequences="dense",
    q_len=256,
    width=128,
    device="h100",
) -> dict[str, ahead.Kernel]:
    """The kernels of a forward of target triton, with descales of the FP8 operands."""
    variant, machine = CAUSAL, by_name(device)
    rows = (q_len, 64 if sequences == "paged" else 512, 64 if sequences == "paged" else 512)
    main = {n: torch.empty(4 if r == 64 else 1, 8 if n == "query" else 2, r, width).to(d)
            for n, r, d in zip(OF, rows, dtypes)}  # fmt: skip
    main["query"] = main["query"][:1]
    blocks = {"head": lambda rows: 1, "token": lambda rows: rows}[per]
    given = {OF[n]: torch.ones(1 if blocks(t.shape[2]) == 1 else t.shape[0], t.shape[1], blocks(t.shape[2]), 1)
             for n, t in main.items() if t.dtype in (E4M3, E5M2)}  # fmt: skip
    read = read_by_kernels("causal", main, PLAIN.having(**given), sequences == "paged")
    lens = torch.zeros(2, dtype=torch.int32)
    kinds = {
        "dense": Dense(0), "lengths": Lengths(None, lens[1:], None), "packed": Packed(lens, lens, None),
        "paged": Paged(None, lens[1:], torch.zeros(1, 4, dtype=torch.int32), 64, None),
    }  # fmt: skip
    call = Call(main["query"], main["key"], main["value"], None, {}, kinds[sequences], Choices(), width, read)
    signature = replace(variant_of(variant).signature("forward", call), arch=machine.arch)
    out, lse = (p.beside(call.query) for p in variant_of(variant).forward_places(*[*main.values()], call.choices))
    with tempfile.TemporaryDirectory() as folder, weft.settings(cache_dir=folder):
        made = compile_kernels(variant, signature, machine, "triton", schedule)
        code, results = made.resolved.code, {"out": out, "lse": lse}
        found = ahead.compilations(made.resolved.target, made.modules, code, facts_of(variant), call, results)
        return {seen.name: ahead.compile_ahead(seen, machine) for seen in found}


def test_a_pair_of_an_fp8_cache_is_converted_by_one_instruction() -> None:
    """Converted to bf16, which takes five, a decode would wait for conversions and not for its cache."""
    split = compiled(schedule="split_kv", q_len=1)["split_forward"]
    assert split.count(r"cvt\.rn\.f16x2\.e4m3x2") > 0
    assert split.count(r"cvt\.rn\.bf16") <= split.count(r"cvt\.rn\.f16x2\.e4m3x2") // 8  # of the output alone
    assert not split.spilled
