"""What explain prints, how fast, and how pictures show tiles."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from tests import fresh
from tests.planned import planned
from weft import batch, head, kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.programs import tile_ranges, tile_runs
from weft.compiler.analysis.tiles.results import TileCounts
from weft.compiler.planning.explain import bytes_text, count_text, explain
from weft.compiler.planning.machines.hardware import H200, KNOWN
from weft.compiler.planning.picture import TileGrid, grid_of, mask_picture, mask_text
from weft.compiler.planning.plan import counter
from weft.compiler.planning.records import Shape
from weft.compiler.planning.schedule import parse_schedule
from weft.ir.attention import Attention
from weft.ir.expr import scalar, symbol
from weft.tools import drawing

Q_POS, KV_POS = symbol("q_pos"), symbol("kv_pos")
LOCAL = Attention(mask=(KV_POS <= Q_POS) & (Q_POS - KV_POS < scalar("window", int)), name="local")
SHAPE = Shape(2, 16, 4, 8192, 8192, 128, 128)


def text_of(hardware=H200, algorithm: str = "flash", **notes) -> str:
    facts = facts_of(LOCAL)
    count = counter(facts.kv_tiles, facts.q_tiles, SHAPE, env={"window": 1024})
    target = "triton" if hardware.kind != "cpu" else "cpu" if algorithm == "flash" else "interpret"
    shape = replace(SHAPE, dtype="fp16") if target == "interpret" else SHAPE
    plan = planned(shape, hardware, target, algorithm, attention=LOCAL, count=count, **notes)
    return explain(plan, LOCAL, facts.kv_bounds, facts.q_bounds)


def test_what_is_printed() -> None:
    text = text_of(notes=("hopper: needs bf16 or fp16 operands, got fp32",))
    for part in (
        "mask          (kv_pos <= q_pos) & (q_pos - kv_pos < window)",
        "problem       B 2  Hq 16  Hkv 4  L 8192  T 8192  D 128  Dv 128  bf16",
        "hardware      NVIDIA H200 SXM",
        "queries q_first..q_last see keys [q_first - window + 1, q_last + 1)",
        "keys kv_first..kv_last are seen by queries [kv_first, kv_last + window)",
        "empty/edge/full",
        "forward: 169MB through HBM, 145GFLOP, predicted",
        "rates         matrix 794TFLOP/s, HBM 4.24TB/s, L2 7.632TB/s, exp 3.865T/s, other 30.92T/s, launch 3",
        "kernel            matrix    exp  other   mask  tiles    HBM     L2 launch     ms bound",
        "HBM read     2*B*D*Hq*L + 2*B*Hkv*T*(D + Dv) = 100,663,296",
        "HBM -> SRAM, ahead  per key tile",
        "- hopper: needs bf16 or fp16 operands, got fp32",
        "schedule      flash\n",
        "              flash_forward=triton:128x64w8s4\n",
        "              flash_dquery=triton:128x64w8s3\n",
        "flash_forward (triton 128x64w8s4): a program loops over the key tiles that its queries see",
    ):
        assert part in text, part
    rows = [line.split() for line in text.splitlines() if line.startswith("flash_") and "(" not in line]
    bounds = {"matrix", "exp", "other", "mask", "tiles", "HBM", "L2", "launch"}
    assert all(row[-2] in bounds and 0 < int(row[-1].rstrip("%")) <= 100 for row in rows[len(rows) // 2 :])


@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
@pytest.mark.parametrize("algorithm", ["standard", "streaming", "flash"])
def test_lines_fit_and_text_is_stable(hardware, algorithm) -> None:
    text = text_of(hardware, algorithm)
    assert text == text_of(hardware, algorithm)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text  # nothing is cut off


def test_the_kernels_of_a_hopper_and_of_a_cpu() -> None:
    plan = planned(SHAPE, H200, attention=LOCAL)
    text = explain(plan)
    assert f"flash_forward=hopper:{plan.kernels[0].form}" in text and "row_statistics (hopper 64x128s2)" in text
    assert f"flash_forward (hopper {plan.kernels[0].form}): a program loops over" in text
    text = text_of(KNOWN["cpu"])
    assert "flash_forward (cpu 256x256): a program" in text and "flash_backward (cpu 256x256+tiles): a program" in text
    assert "flash_dquery" not in text and "row_statistics" not in text


def test_every_choice_that_is_shown_reads_back() -> None:
    plan = planned(SHAPE, H200, attention=LOCAL)
    lines = explain(plan).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("schedule "))
    own = [kernel for kernel in plan.kernels if not kernel.code.kernel.follows]
    shown = [line.split()[-1] for line in lines[first : first + 1 + len(own)]]
    assert parse_schedule("/".join(shown)) == plan.schedule


def test_a_mask_without_closed_form_says_so() -> None:
    table = Attention(mask=(Q_POS * KV_POS) % 7 < 3, name="odd")
    facts = facts_of(table)
    plan = planned(SHAPE, H200, "triton", attention=table)
    assert facts.kv_bounds.notes
    assert "no closed form: " in explain(plan, table, facts.kv_bounds, facts.q_bounds)


# -- masks that read tensors by position ------------------------------------------------------------------------------
ids, window = weft.tensor("ids", 2, int), weft.scalar("window", int)
DOCUMENTS = weft.Attention(mask=masks.causal & masks.document(ids), name="documents")
PACKED = {"ids": (torch.arange(8192) // 1024).expand(2, -1)}
MEASURED = "what the mask reads is measured in each call by {}: tiles that cannot match are skipped"
EVALUATED = "the mask of each tile is evaluated first: the tile is skipped where nothing is visible"
OPEN = "`ids[batch, kv_pos] == ids[batch, q_pos]` has no closed form: it skips no tile and makes none full"
UPPER = "tiles are counted by positions alone, an upper limit"


def explained(variant: weft.Attention = DOCUMENTS, **options) -> str:
    """The text in one line, as if the page were wide."""
    shape = weft.shape(batch=2, heads=4, q_len=8192, head_dim=64, dtype=options.pop("dtype", "bf16"))
    return " ".join(variant.explain(shape, **options).split())


def counts_of(text: str, kernel: str) -> str:
    """empty/edge/full of a kernel's row."""
    return text.split(f" {kernel} ")[1].split()[1]


@pytest.mark.parametrize("options", [{"device": "h100"}, {"device": "a100"}, {"device": "mi300x", "target": "triton"}])
def test_tiles_that_are_measured(options) -> None:
    text = explained(**options)
    for kernel in ("kv_spans", "q_spans"):
        assert MEASURED.format(kernel) in text
        assert counts_of(text, kernel) == "0/0/0"
    assert f"by positions alone, {OPEN}" in text
    assert "no closed form: `" not in text and "every tile is visited" not in text and EVALUATED not in text


def test_tiles_of_the_interpreter_are_measured_too() -> None:
    assert MEASURED.format("kv_spans") in explained(device="cpu", target="interpret", dtype="fp32")


@pytest.mark.parametrize("schedule", ["standard", "streaming"])
def test_other_schedules_visit_every_tile(schedule) -> None:
    text = explained(device="h100", schedule=schedule, **PACKED)
    assert f"no closed form: {OPEN}; every tile is visited and masked" in text
    assert "spans" not in text and "by positions alone" not in text


def test_a_cpu_evaluates_the_mask_first() -> None:
    text = explained(device="cpu", dtype="fp32")
    assert text.count(EVALUATED) == 1 and f"by positions alone, {OPEN}" in text
    assert "spans" not in text and "every tile" not in text
    assert text.endswith(UPPER)


def test_counts_are_measured_where_the_tensors_are_given() -> None:
    options = {"device": "h100", "target": "triton"}
    given, alone = (explained(**options, **more) for more in (PACKED, {}))
    schedule = DOCUMENTS.plan(weft.shape(heads=4, q_len=8192, head_dim=64), **options).schedule
    form, documents = schedule.form("flash_forward"), 2 * 4 * 8  # of all batch rows and heads
    assert form.block_q == form.block_kv == 64
    edge, full = documents * 16, documents * 16 * 15 // 2
    expected = "/".join(map(count_text, (8 * 128**2 - edge - full, edge, full)))
    assert counts_of(given, "flash_forward") == expected
    assert UPPER not in given
    assert counts_of(alone, "flash_forward") == f"{count_text(8 * 127 * 64)}/{count_text(8 * 129 * 64)}/0"
    assert f"{UPPER}: give ids=... for those of a call" in alone


def test_counts_with_some_operands_say_which_to_give() -> None:
    recent = weft.Attention(mask=DOCUMENTS.mask & (q_pos - kv_pos < window), name="recent")
    text = explained(recent, device="h100", window=512)
    assert f"{UPPER}: give ids=... for those of a call" in text
    assert counts_of(text, "flash_forward").endswith("/0")
    text = explained(recent, device="h100", **PACKED)
    assert (
        "tiles are counted as without a mask, an upper limit that holds for any value: give window=... for those"
        in text
    )
    assert "tiles are counted" not in explained(recent, device="h100", window=512, **PACKED)


def test_operands_that_the_mask_does_not_read_are_not_asked_for() -> None:
    slopes = weft.tensor("slopes", 1)
    alibi = weft.Attention(score=weft.score + slopes[head] * (kv_pos - q_pos), mask=DOCUMENTS.mask, name="alibi")
    assert "tiles are counted" not in explained(alibi, device="h100", **PACKED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(8192, dtype=torch.int64), r"documents: ids: expected 2 dimensions, .*, got shape \[8192\]"),
        (torch.zeros(2, 8192), r"documents: ids: expected a tensor of int, got torch.float32"),
        (
            torch.zeros(2, 100, dtype=torch.int64),
            r"`ids\[batch, kv_pos\]`: index 1, .* to 8191 in this call, but ids has 100 entries",
        ),
        (
            torch.zeros(1, 8192, dtype=torch.int64),
            r"`ids\[batch, kv_pos\]`: index 0, .* from 0 to 1 in this call, but ids has 1 entry",
        ),
        ([[0] * 8192] * 2, r"documents: ids: expected a tensor of int with 2 dimensions, got list"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(value, message) -> None:
    with pytest.raises(weft.WeftError, match=message):
        explained(device="h100", ids=value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_the_tensors_may_be_those_of_the_call(dtype) -> None:
    q = torch.zeros(2, 2, 300, 16)
    found = DOCUMENTS.plan(q, q, q, target="interpret", ids=(torch.arange(300) // 100).to(dtype).expand(2, -1))
    forward = found.kernels[1]
    assert (forward.name, forward.form.block_q, forward.form.block_kv) == ("flash_forward", 32, 32)
    assert forward.tiles.visited == 4 * (3 * 10 - 2)  # a triangle for each document; two corners are shared


def test_an_offset_moves_the_tiles() -> None:
    shape, given = weft.shape(heads=1, q_len=64, kv_len=512, head_dim=64), {"ids": torch.arange(512)[None] // 128}
    forward = lambda **more: DOCUMENTS.plan(shape, device="a100", **given, **more).kernels[1].tiles  # noqa: E731
    assert forward().visited == forward(q_offset=448).visited == 2
    assert forward(q_offset=256).visited == 1


def test_a_long_sequence_is_explained_in_about_a_second() -> None:
    length = 100_000
    shape = weft.shape(batch=4, heads=8, q_len=length, head_dim=64)
    schedule = "flash/flash_forward=triton:64x64w4s3/flash_dquery=triton:64x64w4s2/flash_dkey_dvalue=triton:64x64w4s2"
    by_head = weft.Attention(mask=DOCUMENTS.mask & (ids[batch, kv_pos] // 2 <= 5 * head), name="by_head")
    explained(device="h100")  # imports sympy

    def seconds(variant: weft.Attention, ordered: bool, seed: int) -> float:
        draws = torch.randint(0, 100, (4, length), generator=torch.Generator().manual_seed(seed))
        begun = time.process_time()
        given = draws.sort().values if ordered else draws
        variant.explain(shape, device="h100", target="triton", schedule=schedule, ids=given)
        return time.process_time() - begun

    def slower() -> float:
        """Than the core on which a second is meant, 1 or more: other processes may share this one."""
        begun = time.process_time()
        sum(n * n for n in range(1_000_000))
        return max(1.0, (time.process_time() - begun) / 0.07)

    for variant in (DOCUMENTS, by_head):
        for ordered in (False, True):  # one of three; 1 s on one core by itself
            assert any(seconds(variant, ordered, seed) < 1.5 * slower() for seed in range(3)), variant.name


def test_a_plan_is_explained_in_under_a_second_beyond_starting_python() -> None:
    code = """
import time, sys
import weft.ir.attention, weft.compiler.analysis.tiles.facts
started = time.process_time()
sys.path.insert(0, sys.argv[1])
from tests.planning import test_explain
started = time.process_time()
import sympy
test_explain.text_of()
print(time.process_time() - started)
"""
    taken = (float(fresh.run(code, str(Path(__file__).parents[2]), check=True).stdout) for _ in range(3))
    assert any(seconds < 1.0 for seconds in taken)  # one of three: a core shared with another process is half as fast


def test_numbers() -> None:
    assert [count_text(v) for v in (0, 999, 1000, 12_345, 123_456, 2.5e12)] == [
        "0",
        "999",
        "1.00K",
        "12.3K",
        "123K",
        "2.50T",
    ]
    assert bytes_text(541_065_216) == "541MB"


# -- pictures --------------------------------------------------------------------------------------------------------
def grid(q_len: int, kv_len: int, window: int, block: int = 32) -> TileGrid:
    program, offset = facts_of(LOCAL).kv_tiles, kv_len - q_len
    env = {"q_len": q_len, "kv_len": kv_len, "q_offset": offset, "block": block, "length": kv_len, "window": window}

    def runs(first: int, last: int) -> tuple[list[range], list[range]]:
        at = {**env, "q_first": first + offset, "q_last": last + offset}
        found = tile_runs(program, at)
        assert tuple([t for run in of for t in run] for of in found) == tile_ranges(program, at)
        return found

    return grid_of(runs, q_len, kv_len, block, block)


def test_the_grid_is_what_the_tile_program_visits() -> None:
    assert grid(128, 128, 64).classes == tuple(map(bytes, ((1, 0, 0, 0), (2, 1, 0, 0), (1, 2, 1, 0), (0, 1, 2, 1))))
    assert grid(128, 128, 64).counts == TileCounts(empty=7, edge=6, full=3)


def test_text_picture() -> None:
    assert mask_text(grid(128, 128, 64), title="local").splitlines() == [
        "local",
        "┌────┐",
        "│▒   │",
        "│█▒  │",
        "│▒█▒ │",
        "│ ▒█▒│",
        "└────┘",
        "7 empty, 6 edge ▒, 3 full █; tile 32 queries x 32 keys",
    ]


def test_a_large_grid_is_thinned() -> None:
    lines = mask_text(grid(4096, 4096, 1000), width=40).splitlines()
    assert all(len(line) <= 42 for line in lines[:-1])
    assert lines[-1].endswith("4 x 4 tiles a character")
    assert lines[1][1] == "▒" and lines[1][2] == " "


def test_a_picture_of_a_million_positions_is_quick(monkeypatch) -> None:
    """Work is by rows of tiles and runs in them: a step of Python for each of 61 million tiles takes a minute."""
    ran = []
    monkeypatch.setattr(drawing, "tile_runs", lambda *given: ran.append(1) or tile_runs(*given))
    begun = time.process_time()
    causal = weft.Attention(mask=weft.masks.causal).show_mask(1_000_000, 1_000_000)
    assert "30517578 empty, 7813 edge ▒, 30517578 full █" in causal and len(ran) == 7813
    assert time.process_time() - begun < 20


def test_a_png_is_written(tmp_path: Path) -> None:
    import numpy

    dense = numpy.tri(128, 128, dtype=bool)
    path = mask_picture(grid(128, 128, 64), tmp_path / "mask.png", title="local", dense=dense)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5000


SMALL = {"ids": torch.arange(512)[None] // 150}


def test_show_mask_draws_what_is_measured() -> None:
    lines = DOCUMENTS.show_mask(512, 512, block_q=64, block_kv=64, **SMALL).splitlines()
    assert lines == [
        "documents: 512 queries, 512 keys, batch row 0",
        "┌────────┐",
        "│▒       │",
        "│█▒      │",
        "│▒▒▒     │",
        "│  ▒▒    │",
        "│  ▒▒▒   │",
        "│    ▒▒  │",
        "│    ▒█▒ │",
        "│    ▒▒▒▒│",
        "└────────┘",
        "44 empty, 18 edge ▒, 2 full █; tile 64 queries x 64 keys",
    ]


def test_show_mask_draws_the_batch_row_and_the_head_that_were_asked_for() -> None:
    variant = weft.Attention(mask=DOCUMENTS.mask & (q_pos - kv_pos < 64 * (head + 1)), name="by_head")
    both = {"ids": torch.stack([torch.zeros(512, dtype=torch.int64), torch.arange(512) // 64])}
    picture = lambda **which: variant.show_mask(512, 512, block_q=64, block_kv=64, **which, **both)  # noqa: E731
    assert "49 empty, 15 edge" in picture() and "56 empty, 8 edge" in picture(batch=1)
    assert "43 empty, 14 edge ▒, 7 full" in picture(head=1)
    with pytest.raises(
        weft.WeftError, match=r"ids\[batch, kv_pos\]`: index 0, `batch`, ranges from 2 to 2 .* but ids has 2 entries"
    ):
        picture(batch=2)


def test_show_mask_without_the_tensors_draws_positions_alone(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    lines = DOCUMENTS.show_mask(512, 512, block_q=64, block_kv=64, path=path).splitlines()
    alone = "by positions alone, give ids=... for the tiles of a call"
    assert lines[0] == f"documents: 512 queries, 512 keys, batch row 0; {alone}"
    assert lines[-1] == "28 empty, 36 edge ▒, 0 full █; tile 64 queries x 64 keys"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_show_mask_asks_for_tensors_that_its_bounds_read() -> None:
    limits = weft.tensor("limits", 1, int)
    variant = weft.Attention(mask=kv_pos < limits[batch], name="lengths")
    with pytest.raises(weft.WeftError, match="lengths: show_mask: limits: missing; pass limits=..."):
        variant.show_mask(64, 64)
    assert "2 empty, 2 edge ▒, 0 full" in variant.show_mask(64, 64, block_q=32, block_kv=32, limits=torch.tensor([20]))


def test_a_picture_of_more_tiles_than_memory_has_room_for_is_refused() -> None:
    causal = weft.Attention(mask=weft.masks.causal, name="causal")
    with pytest.raises(weft.WeftError, match="show_mask: expected up to 67108864 tiles to draw, got .*larger block_q"):
        causal.show_mask(10**14, 10**14)
    assert "tiles a character" in causal.show_mask(1 << 20, 1 << 20, block_q=1 << 14, block_kv=1 << 12)


@pytest.mark.parametrize(
    "offset",
    [None, 3, torch.tensor([0, 30], dtype=torch.int32)],
    ids=["none", "an int", "a tensor"],
)  # fmt: skip
@pytest.mark.parametrize("lengths", [{}, {"kv_lens": torch.tensor([50, 100])}], ids=["dense", "padded"])
def test_a_mask_of_pairs_with_every_kind_of_offset(offset: object, lengths: dict[str, torch.Tensor]) -> None:
    """A tensor, or None written out, took the place of the offsets of parts, and plans ended in errors of Python."""
    allowed = weft.tensor("allowed", 3, bool)
    pairs = weft.Attention(mask=allowed[batch, weft.minimum(weft.maximum(q_pos, 0), 99), kv_pos], name="pairs")
    query, key = torch.randn(2, 2, 60, 16), torch.randn(2, 1, 100, 16)
    text = pairs.explain(
        query,
        key,
        key,
        target="interpret",
        q_offset=offset,
        allowed=torch.ones(2, 100, 100, dtype=torch.bool),
        **lengths,
    )
    assert "visited n = " in text


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_tiles_of_sequences_add_up(target: str) -> None:
    query, starts = torch.randn(1, 4, 50, 16), torch.tensor([0, 1, 2, 10, 50])
    text = weft.Attention(mask=weft.masks.causal, name="packed").explain(
        query, query, query, cu_seqlens_q=starts, target=target
    )
    found = re.findall(r"([\d,]+) = ([\d,]+) empty \+ ([\d,]+) edge \+ ([\d,]+) full; visited n = ([\d,]+)", text)
    assert found
    for counts in found:
        total, empty, edge, full, visited = (int(n.replace(",", "")) for n in counts)
        assert total == empty + edge + full and visited == edge + full


def test_a_backward_is_shown_as_the_tensors_want_it() -> None:
    variant = weft.Attention(mask=weft.masks.causal, name="frozen_key")
    query, key, value = (torch.randn(1, 2, 40, 16) for _ in range(3))
    whole = variant.source(query, key, value, direction="backward")
    query.requires_grad_(), value.requires_grad_()
    assert "dK += dS^T Q" in whole
    assert "dK += dS^T Q" not in variant.source(query, key, value, direction="backward")
