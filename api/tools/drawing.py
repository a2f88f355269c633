"""`show_mask`: the picture of the tile classes of a variant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..compiler.analysis.tiles.facts import Facts, facts_of
from ..compiler.analysis.tiles.measured import Measurement
from ..compiler.analysis.tiles.programs import tile_runs
from ..compiler.analysis.tiles.results import TileProgram
from ..compiler.planning import picture
from ..compiler.planning.pairs import pair_blocks
from ..compiler.planning.records import Shape
from ..ir.attention import Attention
from ..ir.errors import Problem, WeftError, collected, counted, shown
from ..ir.numbers import is_int
from ..ir.reference import dense_mask, positions
from ..ir.walk import scalars, symbols, tensors
from ..plans.request import check_read, environment, ranges_of, to_give
from ..runtime.check.operands import check_q_offset, described

MOST_TILES = 1 << 26  # of a picture: half a gigabyte while it is drawn


def show_mask(
    attention: Attention, q_len: int, kv_len: int, block_q: int, block_kv: int, path: str | Path | None,
    q_offset: int | None, head: int, batch: int, options: Mapping[str, Any],
) -> picture.Picture:  # fmt: skip
    """Of `options`, heads, kv_heads and head_dim are sizes as in `weft.shape`, unless they are operands' names."""
    facts, name = facts_of(attention), f"{attention.name}: show_mask"
    operands = {p.name for p in attention.canonical.parameters}
    sizes = {n: options[n] for n in _PICTURE_SIZES if n in options and n not in operands}
    options = {n: value for n, value in options.items() if n not in sizes}
    counts = {"q_len": q_len, "kv_len": kv_len, "block_q": block_q, "block_kv": block_kv}
    _check_counts(name, {**counts, **{n: size for n, size in sizes.items() if size is not None}}, least=1)
    _check_counts(name, {"head": head, "batch": batch}, least=0)
    tiles = -(-q_len // block_q) * -(-kv_len // block_kv)
    if tiles > MOST_TILES:
        raise WeftError(
            f"{name}: expected up to {MOST_TILES} tiles to draw, got {tiles}: {q_len} x {kv_len} pairs in tiles of "
            f"{block_q} x {block_kv}; pass a larger block_q and block_kv, or shorter lengths"
        )
    if path is not None:
        if not isinstance(path, (str, Path)):
            raise WeftError(f"{name}: path: expected the name of a picture such as 'mask.png', got {shown(path)}")
        picture.check_path(path)
    options = described(attention, {**options, "q_offset": q_offset}, None, None, ("q_offset",))
    q_offset = options.pop("q_offset")
    _check_drawable(attention, facts.kv_tiles, options)
    if q_offset is not None:
        check_q_offset(str(attention.name), q_offset, 1, torch.device("cpu"))
    offset, missing = kv_len - q_len if q_offset is None else q_offset, to_give(attention, options)
    drawn = _drawn_head(attention, name, head, **sizes)
    env = {**drawn, "q_len": q_len, "kv_len": kv_len, "q_offset": offset, "batch": batch,
           **environment(attention, options)}  # fmt: skip

    one = Shape(1, 1, 1, q_len, kv_len, drawn["head_dim"], drawn["head_dim"])
    here = {name: (value, value) for name, value in (*drawn.items(), ("batch", batch))}
    check_read(attention, {**ranges_of(one, offset), **here}, options)
    title = f"{attention.name}: {counted(q_len, 'query')}, {counted(kv_len, 'key')}{_which(attention, drawn, batch)}"
    if facts.survey is not None and missing:
        title += f"; by positions alone, give {missing} for the tiles of a call"
    measured = facts.survey is not None and not missing
    ranges = (
        _measured_ranges(facts, env, block_q, block_kv, options)
        if measured
        else _ranges_by_position(facts, env, block_q, block_kv)
    )
    grid = picture.grid_of(ranges, q_len, kv_len, block_q, block_kv)
    is_drawn = not missing and (path is not None or q_len * kv_len <= picture.SMALL)
    drawing = picture.Picture.of(grid, title, _dense(attention, {**env, **options}) if is_drawn else None)
    if path is not None:
        drawing.save(path)
    return drawing


_PICTURE_SIZES = ("heads", "kv_heads", "head_dim")


def _drawn_head(
    attention: Attention, name: str, head: int, heads: int | None = None, kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """What the mask may read of the head that is drawn. Sizes that it needs are asked for, and never made up."""
    read = symbols(attention.canonical.folded_mask)
    grouped = read & ({"group", "kv_head"} if head else {"group"})  # head 0 reads key head 0, however many there are
    if grouped and heads is None:
        reads = ", ".join(sorted(grouped))
        raise WeftError(f"{name}: the mask reads {reads}: pass heads=..., and kv_heads=... where keys have fewer")
    if kv_heads is not None and heads is None:
        raise WeftError(f"{name}: expected heads=... with kv_heads, got kv_heads={kv_heads} alone")
    if "head_dim" in read and head_dim is None:
        raise WeftError(f"{name}: the mask reads head_dim: pass head_dim=...")
    heads = heads or head + 1
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        expected = f"a multiple of kv_heads {kv_heads}"
        raise WeftError.of(name, Problem(option="heads", expected=expected, got=str(heads)))
    if head >= heads:
        raise WeftError.of(name, Problem(option="head", expected=f"0 to {heads - 1}", got=str(head)))
    group = heads // kv_heads
    return {"head": head, "kv_head": head // group, "group": group, "head_dim": head_dim or 64}


def _which(attention: Attention, drawn: Mapping[str, int], batch: int) -> str:
    """What a picture is of, as far as the mask tells heads and batch rows apart: ", head 5 (kv_head 1)"."""
    read = symbols(attention.canonical.folded_mask)
    kv_head = f" (kv_head {drawn['kv_head']})" if "kv_head" in read else ""
    head = f", head {drawn['head']}{kv_head}" if read & {"head", "kv_head"} else ""
    return head + (f", batch row {batch}" if "batch" in read else "")


def _check_counts(name: str, counts: Mapping[str, object], least: int) -> None:
    """Raise WeftError, naming all of them, for what is no int of at least `least`."""
    problems = [
        Problem(option=n, expected=f"an int of at least {least}", got=shown(value))
        for n, value in counts.items()
        if not is_int(value, least)
    ]
    if problems:
        raise collected(name, problems)


def _ranges_by_position(facts: Facts, env: Mapping[str, Any], block_q: int, block_kv: int) -> picture.Ranges:
    sizes = {"block": block_kv, "length": env["kv_len"]}  # whatever operands have such names

    def runs(first_row: int, last_row: int) -> tuple[list[range], list[range]]:
        ends = {"q_first": first_row + env["q_offset"], "q_last": last_row + env["q_offset"]}
        return tile_runs(facts.kv_tiles, env, {**sizes, **ends})

    return runs


def _measured_ranges(
    facts: Facts, env: Mapping[str, Any], block_q: int, block_kv: int, given: Mapping[str, Any]
) -> picture.Ranges:
    """given: the operands as they are."""
    assert facts.survey is not None
    lengths = {name: env[name] for name in ("q_len", "kv_len", "q_offset")}
    blocks = pair_blocks(facts, {**env, **given}) if facts.survey.by_pair else None
    tiles = Measurement(facts.survey, env, **lengths, blocks=blocks).tiles(facts.kv_tiles, block_q, block_kv)

    def runs(first_row: int, last_row: int) -> tuple[list[range], list[range]]:
        edge, full = tiles(first_row // block_q)
        return [range(t, t + 1) for t in edge], [range(t, t + 1) for t in full]

    return runs


def _check_drawable(attention: Attention, program: TileProgram, options: Mapping[str, Any]) -> None:
    """Raise WeftError where the tiles depend on an operand that was not given."""
    if not attention.canonical.is_masked:
        return
    needed = {s.name for s in attention.canonical.scalars if s.dtype == "int"}
    needed |= {s.name for line in program.body for s in scalars(line.value)}
    needed |= {t.name for line in program.body for t in tensors(line.value)}
    missing = sorted(name for name in needed if name not in options)
    if missing:
        made = {t.name: "a tensor" for t in attention.canonical.tensors}
        raise collected(
            f"{attention.name}: show_mask",
            [Problem(operand=n, what="missing", expected=made.get(n, ""), next_step=f"pass {n}=...") for n in missing],
        )


def _dense(attention: Attention, env: Mapping[str, Any]) -> Any:
    """The mask of one head itself, where it is small enough to draw. env: of the picture, with operands as given."""
    q_len, kv_len = env["q_len"], env["kv_len"]
    if q_len * kv_len > 1 << 22:
        return None
    device = torch.device("cpu")
    own = positions(1, 1, 1, q_len, kv_len, env["q_offset"], device)
    values = {**env, "q_pos": own["q_pos"], "kv_pos": own["kv_pos"]}
    return dense_mask(attention, values, (1, 1, q_len, kv_len), torch.float32, device)[0, 0].numpy()
