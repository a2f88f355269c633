"""Memory that Triton kernels need besides operands and results: its places, and what becomes of sums in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...compiler.analysis.facts import Facts
from ...compiler.analysis.measured import LIST_HEAD, LIST_ROOM, LONG_AXIS
from ...compiler.analysis.records import Axis, TileProgram
from ...compiler.analysis.survey import CELL
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.tables import DIAGONAL_PARTS, Way, Ways, ways_of
from ...compiler.planning.target import CallTensors, Place
from .triton.kernels.backward import DQUERY
from .triton.kernels.measures import PAIR_CELLS, STRETCH, span_width
from .triton.kernels.pair_sums import DDIAGONALS, DPAIRS
from .triton.kernels.work import WORK

if TYPE_CHECKING:
    from .triton_launcher import Mode, TritonLauncher


WORK_SIDES = tuple(zip(WORK, ("q", "kv")))


def flat_place(*size: int, fill: float | None = None, dtype: torch.dtype = torch.float32) -> Place:
    """A contiguous tensor."""
    strides = [1]
    for extent in reversed(size[1:]):
        strides.append(strides[-1] * extent)
    return Place(size, tuple(reversed(strides)), dtype, fill)


def tiles_of(length: int, block: int) -> int:
    return -(-length // block)


def workspace_of(launcher: TritonLauncher, call: CallTensors, mode: Mode) -> dict[str, Place]:
    """What the kernels of a schedule need besides operands and results."""
    own = _backward_workspace if launcher.backward else _forward_workspace
    beside = work_of(launcher, call, mode) | measures_of(launcher, call, mode) | distances_of(launcher, call, mode)
    return beside | own(launcher, call, mode)


def distances_of(launcher: TritonLauncher, call: CallTensors, mode: Mode) -> dict[str, Place]:
    """Tables by distance, float32 [B or 1, Hq or 1, 1, distances], and where their levels begin, int32 [..., 2]."""
    batches, heads, q_len, _ = call.query.shape
    number = q_len + call.kv_rows - 1 + 2 * launcher.beyond(mode.aligned)
    places = {
        f"distances{n}": flat_place(batches if t.by_batch else 1, heads if t.by_head else 1, 1, number)
        for n, t in enumerate(launcher.tables)
    }
    if (levels := launcher.levels) is not None:
        size = batches if levels.by_batch else 1, heads if levels.by_head else 1, 1, 2
        places["levels"] = flat_place(*size, fill=0.0, dtype=torch.int32)
    return places


def work_of(launcher: TritonLauncher, call: CallTensors, mode: Mode) -> dict[str, Place]:
    """Lists of the tiles of packed sequences, int32 [slots, 2], and behind them what is counted."""
    sides = [side for name, side in WORK_SIDES if launcher.code.has(name)]
    slots = {s: launcher.slots(s, call, mode.aligned) + launcher.lists_long for s in sides}
    return {f"{s}_work": flat_place(n, 2, dtype=torch.int32) for s, n in slots.items()}


def measures_of(launcher: TritonLauncher, call: CallTensors, mode: Mode) -> dict[str, Place]:
    """What is measured of tiles, int32 [B (* Hq), tiles, ...]: ranges to visit, 4 numbers each, or a list of tiles."""
    batches, heads, q_len, _ = call.query.shape
    kv_len = call.key.shape[2]
    if launcher.sequences == "paged":  # rows of a block
        kv_len *= call.ragged.tensors["table"].shape[1]  # type: ignore[union-attr]
    rows = batches * (heads if launcher.facts.mask_differs_by_head else 1)
    places = {}
    if launcher.code.has(PAIR_CELLS):
        places[PAIR_CELLS] = flat_place(rows, tiles_of(q_len, CELL), tiles_of(kv_len, CELL), dtype=torch.uint8)
    sides: tuple[tuple[Axis, str, TileProgram], ...] = (
        ("kv", "q", launcher.facts.kv_tiles), ("q", "kv", launcher.facts.q_tiles)
    )  # fmt: skip
    for axis, side, program in sides:
        for kernel in (f"{axis}_spans", f"{axis}_lists"):
            if not launcher.code.has(kernel):
                continue
            form = launcher.form(kernel, mode.aligned)
            q_tiles, kv_tiles = tiles_of(q_len, form.block_q), tiles_of(kv_len, form.block_kv)
            own, others = (q_tiles, kv_tiles) if axis == "kv" else (kv_tiles, q_tiles)
            if launcher.sequences == "packed":
                own = launcher.slots(side, call, mode.aligned)
            width = span_width(program) if kernel.endswith("spans") else LIST_HEAD + min(others, LIST_ROOM)
            places[kernel] = flat_place(rows, own, width, dtype=torch.int32)
        if launcher.code.has(f"{axis}_ends"):
            places[f"{axis}_ends"] = _place_of_ends(launcher, call, mode, axis, q_len if axis == "q" else kv_len)
    return places


def _place_of_ends(launcher: TritonLauncher, call: CallTensors, mode: Mode, axis: Axis, extent: int) -> Place:
    """Least and greatest values of tiles and of stretches of them; next to nothing where none are written."""
    if extent <= LONG_AXIS:
        return flat_place(1, dtype=torch.int64)
    batches, heads = call.query.shape[:2]
    rows = heads if launcher.facts.mask_differs_by_head else 1
    block = launcher.rows_of_tiles(axis, mode.aligned)
    if launcher.sequences == "packed":  # each sequence begins a place of its own
        number = call.ragged.number(call.query)  # type: ignore[union-attr]
        places = sum(extent // size + number + 1 for size in (block, STRETCH * block))
    else:
        rows *= batches
        places = sum(tiles_of(extent, size) for size in (block, STRETCH * block))
    return flat_place(rows, launcher.numbers_of_ends(axis), places, dtype=torch.int64)


def cells_of(block: int, cell: int, from_start: bool) -> int:
    """Blocks of `cell` positions that a tile of `block` positions reaches into at most, as a power of 2.

    from_start: tiles begin at multiples of `block`, as those of keys do; queries begin at any position.
    """
    if from_start and cell % block == 0:
        return 1
    most = block // cell if from_start and block % cell == 0 else (block - 2) // cell + 2
    return min(block, 1 << (most - 1).bit_length())


def _matrix(call: CallTensors) -> Place:
    """One number for each pair of a query and a key, rows padded to 16."""
    batches, heads, q_len, _ = call.query.shape
    return flat_place(batches, heads, q_len, _padded(call.key.shape[2], 16), dtype=call.query.dtype)


def _forward_workspace(launcher: TritonLauncher, call: CallTensors, mode: Mode) -> dict[str, Place]:
    code = launcher.code
    batches, heads, q_len, _ = call.query.shape
    match code.schedule.algorithm:
        case "streaming":
            padded = _padded(q_len, launcher.form("streaming_forward", mode.aligned).block_q)
            running = flat_place(batches, heads, padded)
            columns = sum(s.block for s in code.segments.v)
            out = flat_place(batches, heads, padded, columns)
            return {"running_out": out, "running_max": running, "running_sum": running}
        case "standard":
            return {"matrix": _matrix(call)}
        case _:
            return {}


def _backward_workspace(launcher: TritonLauncher, call: CallTensors, mode: Mode) -> dict[str, Place]:
    code, algorithm = launcher.code, launcher.code.schedule.algorithm
    batches, heads, q_len, _ = call.query.shape
    kv_heads, kv_len = call.key.shape[1:3]
    padded = _padded(q_len, launcher.padding(mode))
    statistics = flat_place(batches, heads, padded)
    names = ("lse2", *(("shift",) if launcher.shifts else ()), "delta") if launcher.saves_lse else ()
    names += ("whole2",) if launcher.levels is not None and launcher.levels.score is not None else ()
    places = dict.fromkeys(names, statistics)
    for i in launcher.own_keys:
        # where there is one head too: kernels are compiled for a share in float32, whatever the heads of later calls
        if call.rope is not None:
            places[f"dkey{i}"] = flat_place(batches, kv_heads, kv_len, call.rope.shape[3])
    if algorithm == "streaming":
        places["running_dquery"] = flat_place(batches, heads, padded, sum(s.block for s in code.segments.qk), fill=0.0)
    if algorithm == "standard":
        places["weights"] = places["dweights"] = _matrix(call)
    dense = launcher.sequences == "dense"
    for n, gradient in enumerate(launcher.sums):
        if gradient.kind == "sink" and dense:
            of_tiles = padded // launcher.form("row_statistics", mode.aligned).block_q
            places[f"sum{n}"] = flat_place(batches, heads, of_tiles)
            continue
        if (way := launcher.ways.of_reads[n]) is not None:
            places |= _places_of_pairs(launcher, call, mode, n, way)
            continue
        kind = "total" if gradient.kind == "sink" else gradient.kind
        form = launcher.form(_SUMMED_BY[algorithm, kind == "column"], mode.aligned)
        if launcher.sequences == "packed":
            tiles = launcher.slots("q", call, mode.aligned) if kind == "total" else 0, 0
        else:
            tiles = tiles_of(q_len, form.block_q), tiles_of(kv_len, form.block_kv)
        places[f"sum{n}"] = _sum_place(algorithm, kind, (batches, heads), q_len, kv_len, padded, tiles)
        if not dense:  # programs of what is not there write none
            places[f"sum{n}"] = places[f"sum{n}"]._replace(fill=0.0)
    return places


def _places_of_pairs(
    launcher: TritonLauncher, call: CallTensors, mode: Mode, n: int, way: Way
) -> dict[str, Place]:  # fmt: skip
    """Of the sums of a read of pairs: a tensor in the shape of its operand, or a list of sums and entries."""
    gradient = launcher.sums[n]
    batches, heads, q_len, _ = call.query.shape
    operand = call.operands[gradient.load.tensor.name]
    assert isinstance(operand, torch.Tensor)
    if way.finish != "list":
        alone = sum(g.load.tensor == gradient.load.tensor for g in launcher.sums) == 1
        dtype = operand.dtype if alone and way.finish == "store" else torch.float32
        shares = batches * heads if way.owner == "queries" else launcher.pair_shares(call)
        stored = shares * q_len * call.key.shape[2] if way.finish == "store" else 0
        fill = None if writes_all(launcher, operand.shape, stored) else 0.0
        return {f"sum{n}": flat_place(*operand.shape, fill=fill, dtype=dtype)}
    if way.owner == "pairs":
        form = launcher.form(DPAIRS, mode.aligned)
        size: tuple[int, ...] = (launcher.pair_programs(call, mode)[1], form.block_q, form.block_kv)
    else:
        levels = 0
        if launcher.levels is not None:
            rows = launcher.form(DQUERY, mode.aligned).block_q
            dense = batches * tiles_of(q_len, rows)
            levels = 2 * heads * (launcher.slots("q", call, mode.aligned) if launcher.sequences == "packed" else dense)
        return listed_diagonals(launcher, call, mode, n, levels)
    return _list_of(launcher, n, size)


def writes_all(launcher: TritonLauncher, size: Sequence[int], stored: int) -> bool:
    """Whether a gradient of this size has as many entries as a dense call has pairs that store one each, of which none
    is hidden: no program visits what is."""
    return math.prod(size) == stored and launcher.sequences == "dense" and not launcher.facts.attention.is_masked


def listed_diagonals(launcher: TritonLauncher, call: CallTensors, mode: Mode, n: int, levels: int) -> dict[str, Place]:
    """Of the sums of diagonals, and behind them so many of level pairs: a list of sums and entries."""
    block = launcher.form(DDIAGONALS, mode.aligned).block_q
    tiles = [tiles_of(t.shape[2], block) for t in (call.query, call.key)]
    programs = (sum(tiles) - 1) * call.query.shape[0]
    if launcher.sequences == "packed":
        number = call.ragged.number(call.query)  # type: ignore[union-attr]
        programs = sum(t.shape[2] // block for t in (call.query, call.key)) + 2 * number + 2
    programs *= call.query.shape[1] * DIAGONAL_PARTS
    listed = _list_of(launcher, n, (programs * 2 * block + levels,))
    found = {name: place._replace(fill=None) for name, place in listed.items()}  # but for level pairs: `clear_levels`
    return found | {f"range{n}": listed[f"entry{n}"]._replace(size=(programs, 2), stride=(2, 1))}


def _list_of(launcher: TritonLauncher, n: int, size: tuple[int, ...]) -> dict[str, Place]:
    fill = None if launcher.sequences == "dense" else 0.0  # programs of what is not there list nothing
    entries = torch.int64 if launcher.code.signature.wide else torch.int32
    return {f"sum{n}": flat_place(*size, fill=fill), f"entry{n}": flat_place(*size, fill=fill, dtype=entries)}


_MANY = 64  # sums of an entry on average: of half a million for 512 entries `index_put_` took 350 us, and runs take 70


def add_listed(table: Tensor, entries: Tensor, sums: Tensor) -> None:
    """Add listed sums to the entries that they belong to, in one order."""
    own, entries, sums = table.view(-1), entries.flatten(), sums.flatten()
    if not table.is_cuda:  # from the first to the last, in one thread
        own.scatter_add_(0, entries.long(), sums)
    elif sums.numel() <= _MANY * own.numel():
        own.index_put_((entries.long(),), sums, accumulate=True)  # sorts
    else:
        own += sums_by_entry(entries, sums, own.numel())


def sums_by_entry(entries: Tensor, sums: Tensor, number: int) -> Tensor:
    """What belongs to each of so many entries, [number]: sorted, and each run of one entry added up by a block."""
    narrow = entries.to(torch.int16) if number < 2**15 else entries  # which takes half of the passes over them
    ordered, places = torch.sort(narrow, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(number + 1, device=entries.device, dtype=ordered.dtype))
    return torch.segment_reduce(sums[places], "sum", offsets=starts, unsafe=True)


def ways_in(code: CodePlan, facts: Facts) -> Ways:
    """How the reads with a gradient are summed, in the order of `Facts.operand_gradients`."""
    signature = code.signature
    if signature.direction == "forward":
        return Ways((), frozenset())
    gradients = facts.operand_gradients(signature.wanted)
    return ways_of([(g.load, g.kind) for g in gradients], signature)


def _padded(length: int, block: int) -> int:
    return tiles_of(length, block) * block


_SUMMED_BY = {
    ("flash", False): "flash_dquery", ("flash", True): "flash_dkey_dvalue",
    ("streaming", False): "streaming_backward", ("streaming", True): "streaming_backward",
    ("standard", False): "standard_dscores", ("standard", True): "standard_dscores",
}  # fmt: skip


def _sum_place(
    algorithm: str, kind: str, rows: tuple[int, int], q_len: int, kv_len: int, padded: int, tiles: tuple[int, int]
) -> Place:
    """Partial sums of one read's gradient, as the kernels of a schedule leave them."""
    match algorithm, kind:
        case "flash", "total":
            return flat_place(*rows, tiles[0])
        case "flash", "row":
            return flat_place(*rows, q_len)
        case "streaming", "total" | "row":
            return flat_place(*rows, padded, fill=0.0)
        case "streaming", "column":
            return flat_place(*rows, kv_len, fill=0.0)
        case "standard", "total":
            return flat_place(*rows, tiles[0] * tiles[1])
        case "standard", "row":
            return flat_place(*rows, tiles[1], q_len)
        case "standard", "column":
            return flat_place(*rows, tiles[0], kv_len)
        case _:
            return flat_place(*rows, kv_len)


def reduced(partial: Tensor, algorithm: str, kind: str, q_len: int) -> Tensor:
    """The sums of one read: total and sink [B, Hq], row [B, Hq, L], column [B, Hq, T]."""
    if kind in ("total", "sink"):
        return partial.sum(-1)
    if algorithm == "standard":
        return partial.sum(2)
    return partial[..., :q_len] if algorithm == "streaming" and kind == "row" else partial


def by_sequence(partial: Tensor, owner: Tensor, number: int) -> Tensor:
    """Sums [1, Hq, n] of tiles or rows as sums of the sequences that own them, [number, Hq], always in one order."""
    owner = owner.long().clamp(0, number - 1)  # what belongs to none is 0
    shares = partial[0].T
    total = shares.new_zeros(number, shares.shape[1])
    if total.is_cuda:
        return total.index_put_((owner,), shares, accumulate=True)  # sorts
    return total.index_add_(0, owner, shares)
