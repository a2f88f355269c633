"""The kernels that measure which tiles to visit, in Triton's interpreter, against the model that plans count with."""

from __future__ import annotations

import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos
from weft.codegen.targets.triton.kernels.measures import PAIR_CELLS
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.measured import SPAN_ROOM, Measurement, Table, is_listed
from weft.compiler.analysis.tiles.results import TileProgram
from weft.compiler.planning.machines.hardware import for_device
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.runtime.call import Call, Choices, Dense
from weft.runtime.driver import compile_kernels

from .. import fresh
from ..support import long_from

pytest.importorskip("triton")

ids, doc = weft.tensor("ids", 2, int), weft.tensor("doc", 1, int)
valid, weights = weft.tensor("valid", 2, bool), weft.tensor("weights", 1)
limit, window = weft.tensor("limit", 1, int), weft.scalar("window", int)
same = masks.document(ids)

MASKS = {
    "causal_documents": masks.causal & same,
    "documents": masks.document(doc),
    "documents_or_prefix": same | masks.prefix_lm(40),
    "two_ranges": same & masks.global_window(5, 17),
    "three_ranges": same & masks.block_diffusion(48, 8),  # of queries
    "by_head": (ids[batch, kv_pos] <= head) & (kv_pos < q_pos + 20 * head),
    "padding": masks.causal & valid[batch, kv_pos],
    "closed_full_parts": masks.causal & ((abs(q_pos - kv_pos) < window) | same),
    "never_full": same & ((q_pos + kv_pos) % 3 == 0),
    "floats_and_arithmetic": (weights[kv_pos] > 0.25) & (doc[q_pos] // 2 <= weft.maximum(doc[kv_pos], limit[batch])),
    "one_side": masks.sliding_window(window) & (doc[q_pos] % 3 != 1),
    "either": weft.where(valid[batch, q_pos], same, masks.causal),
}
LENGTHS = [(128, 128, None), (70, 101, None), (101, 45, 0), (33, 200, 60), (1, 130, None)]
ROWS = 300  # positions that the operands have values for


def operands(kind: str) -> dict[str, Tensor | int]:
    generator = torch.Generator().manual_seed(4)
    found = torch.randint(0, 6, (2, ROWS), generator=generator)
    runs = torch.randint(0, 90, (2, ROWS // 12), generator=generator).repeat_interleave(12, 1)
    found = {
        "sorted": found.sort().values, "unsorted": found, "padded": found.sort().values * (found > 0), "runs": runs
    }[kind]  # fmt: skip
    flags = torch.arange(ROWS) < torch.tensor([[50], [90]])
    return {
        "ids": found + 2**40, "doc": found[0].to(torch.int8), "valid": flags, "window": 45,
        "weights": torch.rand(ROWS, generator=generator).sort().values, "limit": torch.tensor([3, -1]),
    }  # fmt: skip


def modelled(variant: weft.Attention, given: dict[str, Tensor | int], axis: str, **sizes) -> list[list[list[int]]]:
    """What the kernel of an axis should write, [rows, tiles], as `expected_row` has it."""
    facts = facts_of(variant)
    block_q, block_kv, offsets = sizes["block_q"], sizes["block_kv"], sizes["offsets"]
    lengths = {"q_len": sizes["q_len"], "kv_len": sizes["kv_len"]}
    tiles = -(-lengths["q_len"] // block_q) if axis == "kv" else -(-lengths["kv_len"] // block_kv)
    program = facts.kv_tiles if axis == "kv" else facts.q_tiles
    tables = {n: Table(n, v.tolist) if isinstance(v, Tensor) else v for n, v in given.items()}
    rows = []
    for b in range(2):
        for h in range(4 if facts.mask_differs_by_head else 1):
            env = {**tables, "batch": b, "head": h, "kv_head": h // 2, "group": 2}
            found = Measurement(facts.survey, env, q_offset=offsets[b], **lengths)
            rows.append([expected_row(found, program, block_q, block_kv, tile) for tile in range(tiles)])
    return rows


def expected_row(found: Measurement, program: TileProgram, block_q: int, block_kv: int, tile: int) -> list[int]:
    """The ends of ranges of a tile, whether its tiles are listed, and then these: edge tiles and full ones."""
    spans = found.spans(program, block_q, block_kv)(tile)
    edge, full = found.lists(program, block_q, block_kv)(tile)
    if not is_listed(spans, len(edge) + len(full)):
        return [end for span in spans for end in span] + [0]
    ends = [0, len(edge), len(edge) + len(full), len(edge) + len(full)]
    return ends + [0] * (4 * len(spans) - 4) + [1, *edge, *full]


def written_rows(table: Tensor) -> list[list[list[int]]]:
    """The same of the table of a kernel."""
    rows, tiles, width = table.shape
    ranges, numbers = width - SPAN_ROOM - 4, table.flatten().tolist()
    found = []
    for start in range(0, rows * tiles * (ranges + 1), ranges + 1):
        *ends, place = numbers[start : start + ranges + 1]
        entries = numbers[4 * place : 4 * place + SPAN_ROOM]
        listed = [1, *entries[: ends[1]], *entries[::-1][: ends[3] - ends[1]]] if place else [0]
        found.append([*ends, *listed])
    return [found[n : n + tiles] for n in range(0, rows * tiles, tiles)]


def measured(
    variant: weft.Attention, axis: str, blocks: tuple[int, int], lengths: tuple[int, int], first: int | Tensor,
    given: dict[str, Tensor | int], heads: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    """The table that the kernel of an axis writes where its visitors have these tiles; no other kernel runs."""
    visitor, direction = {"kv": ("flash_forward", "forward"), "q": ("flash_dkey_dvalue", "backward")}[axis]
    machine = for_device("cpu")
    signature = Signature(
        direction, machine.arch, Dtypes.all("fp32"), Widths(16, 16),
        offset="per_row" if isinstance(first, Tensor) else "number",
        wanted=frozenset({"key", "value"} if direction == "backward" else ()),
    )  # fmt: skip
    schedule = f"flash/{visitor}=interpret:{blocks[0]}x{blocks[1]}w4s1"
    made = compile_kernels(variant, signature, machine, "interpret", schedule)
    code = made.resolved.code
    table = f"{axis}_{code.tile_source}"
    names = (f"{axis}_ends", f"{axis}_long_spans", table, PAIR_CELLS)
    alone = replace(code, kernels=tuple(k for k in code.kernels if k.name in names))
    launcher = made.resolved.target.bind(made.modules, alone, facts_of(variant), torch.device("cpu"))
    batches, q_heads, kv_heads = heads
    query, out, dout = (torch.empty(batches, q_heads, lengths[0], 16) for _ in range(3))
    key, value = (torch.empty(batches, kv_heads, lengths[1], 16) for _ in range(2))
    call = Call(query, key, value, None, given, Dense(first), Choices(), 16)
    results = {"out": out, "lse": torch.empty(query.shape[:3])}
    if direction == "backward":
        results |= {"dout": dout, "dkey": torch.empty_like(key), "dvalue": torch.empty_like(value)}
    partition = launcher.partition(call, results)
    places = launcher.workspace(call, results, partition)
    workspace = {name: place.beside(query) for name, place in places.items()}
    launcher(call, results, workspace, partition)
    return workspace[table]


def check(name: str, kind: str, lengths: tuple[int, int, object], blocks: tuple[int, int]) -> None:
    variant = weft.Attention(mask=MASKS[name], name=name)
    (q_len, kv_len, q_offset), (block_q, block_kv) = lengths, blocks
    given = {p.name: operands(kind)[p.name] for p in variant.canonical.parameters}
    first = kv_len - q_len if q_offset is None else q_offset
    offsets = first.tolist() if isinstance(first, Tensor) else [first] * 2
    for axis in ("kv", "q"):
        table = measured(variant, axis, blocks, (q_len, kv_len), first, given, (2, 4, 2))
        assert table.dtype == torch.int32
        expected = modelled(
            variant, given, axis, q_len=q_len, kv_len=kv_len, offsets=offsets, block_q=block_q, block_kv=block_kv
        )
        assert written_rows(table) == expected, f"{name}, {kind}, {axis}, {lengths}, {blocks}"


@pytest.fixture(params=[None, 2, 4], ids=["by_tiles", "by_stretches_of_2", "by_stretches_of_4"])
def stretch(request, monkeypatch) -> int | None:
    """How kernels look at tiles: each of them, or so many at once first, of however few positions."""
    if request.param is not None:
        long_from(monkeypatch, 0, request.param)
    return request.param


@pytest.mark.sampled(23)  # each mask, kind, stretch and pair of lengths
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "padded", "runs"])
@pytest.mark.parametrize("name", MASKS)
def test_the_kernels_write_what_the_model_says(
    name: str, kind: str, lengths: tuple[int, int, int | None], stretch: int | None
) -> None:
    check(name, kind, lengths, (16, 32))


def test_masks_of_several_ranges_are_among_them() -> None:
    ranges = {name: facts_of(weft.Attention(mask=mask, name=name)).traits.measured for name, mask in MASKS.items()}
    assert ranges["two_ranges"].kv.ranges == 2 and ranges["three_ranges"].q.ranges == 3


@pytest.mark.sampled(4)  # each of both
@pytest.mark.parametrize("blocks", [(16, 16), (64, 32), (32, 128)])
@pytest.mark.parametrize("name", ["causal_documents", "two_ranges", "by_head"])
def test_tiles_of_other_sizes(name: str, blocks: tuple[int, int]) -> None:
    check(name, "sorted", (101, 190, None), blocks)
    check(name, "padded", (190, 101, 0), blocks)


@pytest.mark.sampled(4)  # each mask and stretch
@pytest.mark.parametrize("name", ["causal_documents", "two_ranges", "either"])
def test_an_offset_for_each_batch_row(name: str, stretch: int | None) -> None:
    check(name, "sorted", (70, 200, torch.tensor([3, 120], dtype=torch.int32)), (16, 32))


@pytest.mark.parametrize(("length", "other"), [(9000, 256), (40_000, 64)])
def test_axes_longer_than_what_a_program_looks_at_together(length: int, other: int) -> None:
    """First, last and full tiles come from several turns of a loop: of 4096 positions, or of long axes of stretches."""
    mask = masks.causal & masks.document(doc)
    variant = weft.Attention(mask=mask, name="long")
    given = {"doc": (torch.arange(length) // (length // 3 - 100)).to(torch.int16)}
    facts = facts_of(variant)
    env = {"doc": Table("doc", given["doc"].tolist)}
    measurement = Measurement(facts.survey, env, q_len=length, kv_len=length)
    for axis, program, blocks in (("kv", facts.kv_tiles, (1024, other)), ("q", facts.q_tiles, (other, 1024))):
        table = measured(variant, axis, blocks, (length, length), 0, given, (1, 1, 1))
        spans = measurement.spans(program, *blocks)
        (written,) = written_rows(table)
        assert written == [[*spans(tile)[0], 0] for tile in range(-(-length // 1024))]
        lo, full_lo, full_hi, hi, _ = torch.tensor(written).unbind(-1)
        assert (full_hi - full_lo).max() > 4 and (hi - lo).max() > 9


def test_a_warm_start_generates_nothing(tmp_path: Path) -> None:
    code = """
        import sys, torch, weft
        variant = weft.Attention(mask=weft.masks.document(weft.tensor("doc", 1, int)), name="warm")
        rows = torch.randn(1, 1, 40, 16)
        variant(rows, rows, rows, doc=torch.zeros(40, dtype=torch.int64), target="interpret")
        print(sorted({"jinja2", "sympy"} & set(sys.modules)))
    """
    environment = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path)}
    runs = [fresh.run(textwrap.dedent(code), env=environment, check=True) for _ in range(2)]
    assert [run.stdout for run in runs] == ["['jinja2']\n", "[]\n"]
