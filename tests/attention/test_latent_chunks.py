"""Chunks of prompts in the Hopper kernel of latent caches, on a CPU as in test_latent_on_hopper.py."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import weft
from weft import batch, kv_pos, masks, q_pos
from weft.runtime.call import Call, Choices, Dense, Lengths, PackedPaged

from ..support import mostly
from .gluon import Kernels
from .machine import Pointer
from .test_latent_on_hopper import ALL_SWITCHES, CAUSAL, VARIANTS, check, check_packed, launcher_of, variant

CHUNKS = {
    **VARIANTS,
    "later rows see less": variant("latent_suffix", mask=kv_pos >= q_pos),
    "two ranges": variant("latent_ranges", mask=masks.causal & ((q_pos - kv_pos < 40) | (kv_pos < 20))),
}


@pytest.mark.parametrize(
    ("heads", "q_len", "kv_lens", "q_lens", "page", "parts"),
    mostly(
        [(16, 20, [330, 5, 129], [20, 2, 17], 16, 0), (64, 17, None, None, 0, 1)],
        [
            (16, 20, [330, 5, 129], [20, 2, 17], 16, 0),
            (64, 17, None, None, 0, 1),
            (128, 18, None, None, 0, 2),
            (2, 100, [330, 0, 70], [100, 3, 0], 0, 2),
            (16, 70, [330, 100], None, 64, 1),
        ],
    ),
)
def test_chunks_dense_padded_and_paged(heads, q_len, kv_lens, q_lens, page, parts):
    check(CAUSAL, heads, q_len, kv_lens, q_lens, page, parts=parts, few_queries=False)


PACKED = [
    # heads, lengths of queries and keys, page, rows behind, programs that run together
    (16, [1, 65, 0, 30], [330, 300, 5, 129], 16, 5, 7),
    (128, [1, 9, 2], [330, 129, 40], 64, 0, 11),
    (64, [20, 0, 3], [330, 64, 200], 128, 30, 7),
    (2, [140, 1, 70], [200, 64, 90], 8, 1, 132),
    (192, [1, 0, 12], [330, 64, 200], 64, 1, 7),
    (16, [0, 40], [0, 40], 16, 0, 5),
]


@pytest.mark.parametrize(
    ("heads", "q_lens", "kv_lens", "page", "behind", "at_once"), mostly([PACKED[0], PACKED[1]], PACKED)
)
def test_packed_chunks(heads, q_lens, kv_lens, page, behind, at_once):
    parts = check_packed(CAUSAL, heads, q_lens, kv_lens, page, behind, at_once=at_once, few_queries=False)
    assert max(parts, default=0) > 1 or max(kv_lens) < 4 * 64  # cut where shares end, which have four tiles or more


@pytest.mark.parametrize("name", mostly(["later rows see less", "far and a sink"], list(CHUNKS)))
def test_masks_and_scores_of_chunks(name):
    check(CHUNKS[name], 16, 18, [330, 70], page=16, parts=2, few_queries=False)
    check_packed(CHUNKS[name], 16, [1, 40, 6], [330, 200, 70], behind=1, at_once=7, few_queries=False)


@pytest.mark.parametrize("few_queries", [False, True])
@pytest.mark.parametrize("name", mostly(["sink"], ["sink", "far and a sink"]))
def test_rows_behind_all_sequences_have_no_sink_where_shares_cut_them(name, few_queries):
    if few_queries:
        check_packed(VARIANTS[name], 16, [1] * 5, [330, 5, 0, 640, 1025], behind=2, at_once=132)
    else:
        check_packed(VARIANTS[name], 64, [1, 40, 3], [330, 200, 64], behind=50, at_once=11, few_queries=False)


START = 3  # tiles of keys take as long as what a tile of rows takes beside its own


def rounds_of_programs(declared, q_lens, kv_lens, heads, at_once=132, q_offset=0, per_row=False):
    """(sequence, tile of rows, first and last tile of keys) of each program of packed queries."""
    source = launcher_of(declared, "packed_paged", few_queries=False).device.text
    kernels = Kernels(source)
    space, number, rows = kernels.space, len(q_lens), sum(q_lens)
    starts, lens = (
        Pointer.to(torch.tensor(n, dtype=torch.int32)) for n in ([0, *itertools.accumulate(q_lens)], kv_lens)
    )
    sizes = (number, rows, max(kv_lens), heads, 576)
    n_row_tiles = space["tiles_of_round"](starts, number, rows, heads)
    for program in range(max(at_once, int(n_row_tiles))):
        kernels.gl.program = program
        share, first, first_round, n_rounds, start, divided = space["divide"](
            (starts, lens, q_offset, *sizes, n_row_tiles), n_row_tiles, at_once
        )
        own = space["Sizes"](
            rows, max(kv_lens), q_offset, 1, heads, 576, number, n_row_tiles, share, first, first_round, n_rounds,
            start, divided,
        )  # fmt: skip
        found, sequence, round = [], first, first_round - 1
        for _ in range(int(n_rounds)):
            sequence, round = space["round_after"](sequence, round, own, (starts, lens))
            _, _, _, tile, _, _, _, start, _, _, begin, end, *_ = space["part_of"](
                sequence, round, start, own, (starts, lens)
            )
            found.append((int(sequence), int(tile), int(begin), int(end)))
        yield found


def visited(q_len, kv_len, heads, tile):
    """Tiles of keys that a tile of rows sees under a causal mask."""
    last = (min(tile * 64 + 64, q_len * heads) - 1) // heads
    return -(-max(0, min(kv_len, kv_len - q_len + last + 1)) // 64)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "least"),
    mostly(
        [([512], [512], 16, 0.75), ([1] * 60 + [512], [4096] * 61, 128, 0.98)],
        [
            ([512], [512], 16, 0.75), ([1] * 60 + [512], [4096] * 61, 128, 0.98), ([2048], [2048], 128, 0.95),
            ([2048], [2048], 16, 0.95), ([512], [4096], 16, 0.95),
            ([300, 0, 17, 1, 900], [300, 9, 4000, 30000, 900], 16, 0.75),
        ],
    ),
)  # fmt: skip
def test_programs_have_as_much_work_whatever_rounds_see(q_lens, kv_lens, heads, least):
    """Each tile of keys of each tile of rows is one program's, in order."""
    seen, loads = Counter(), []
    for parts in rounds_of_programs(CAUSAL, q_lens, kv_lens, heads):
        for sequence, tile, begin, end in parts:
            assert begin == seen[sequence, tile] and end >= begin
            seen[sequence, tile] = end
        loads.append(sum(end - begin + START for *_, begin, end in parts))
    wanted = {
        (b, tile): visited(q_len, kv_len, heads, tile)
        for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)) for tile in range(-(-q_len * heads // 64))
    }  # fmt: skip
    assert all(seen[place] == tiles for place, tiles in wanted.items())
    assert sum(seen.values()) == sum(wanted.values()) and sum(loads) >= least * len(loads) * max(loads)


def test_the_longest_sequences_are_counted_without_overflow():
    """2**23 queries of 128 heads behind 2**30 keys: places of rows have no more room."""
    space = Kernels(launcher_of(CAUSAL, "packed_paged", few_queries=False).device.text).space
    q_len, kv_len = 1 << 23, 1 << 30
    first, further = space["counts_of_rounds"](
        q_len, kv_len - q_len, 2, space["Here"](0, 0, 0, 128, q_len, kv_len, 576)
    )
    rounds = torch.tensor([1, 2, q_len - 1, q_len])
    exact = [n * int(first) + n * (n - 1) // 2 * int(further) for n in rounds.tolist()]
    assert space["count_before"](rounds, first, further).tolist() == exact and max(exact) < 2**63


@pytest.mark.parametrize("mask", [True, kv_pos < q_pos - 329, kv_pos >= q_pos])
def test_no_round_counts_nothing(mask):
    space = Kernels(
        launcher_of(variant("latent_counted", mask=mask), "packed_paged", few_queries=False).device.text
    ).space
    for q_len, kv_len in ((1, 0), (300, 300), (300, 5000), (0, 7), (7, 64)):
        first, further = space["counts_of_rounds"](
            q_len, kv_len - q_len, 1, space["Here"](0, 0, 0, 64, q_len, kv_len, 576)
        )
        assert min(int(first), int(first + further * max(q_len - 1, 0))) > 0


def test_parts_of_packed_chunks_take_memory_by_programs():
    launcher = launcher_of(CAUSAL, "packed_paged", few_queries=False)
    launcher.device.at_once = 132

    def rows(q_len):
        query, pool = torch.empty(1, 128, q_len, 576, device="meta"), torch.empty(64, 1, 64, 576, device="meta")
        starts, table = torch.tensor([0, q_len]).int(), torch.zeros(1, 64).int()
        call = Call(query, pool, None, None, {}, PackedPaged(starts, starts[1:], table, 64, None), Choices(), 576)
        results = {"out": query}
        places = launcher.workspace(call, results, launcher.partition(call, results))
        return [places[name].size[0] for name in ("part_lse", "joins")]

    assert rows(100)[0] == rows(4000)[0] == 2 * 64 * 132
    assert rows(100)[1] == rows(4000)[1] == 4 * 132 + 4


@pytest.mark.parametrize("kind", ["dense", "lengths"])
def test_parts_of_chunks_take_memory_by_programs(kind):
    launcher = launcher_of(CAUSAL, kind, few_queries=False)
    launcher.device.at_once = 132
    for batches, heads, q_len in ((1, 16, 65), (1, 16, 300), (1, 128, 70), (2, 16, 300), (1, 128, 4000), (9, 64, 20)):
        query, key = (torch.empty(batches, *n, 576, device="meta") for n in ((heads, q_len), (1, 4096)))
        sequences = Dense(4096 - q_len) if kind == "dense" else Lengths(None, torch.ones(batches).int(), None)
        call = Call(query, key, None, None, {}, sequences, Choices(), 576)
        results = {"out": query}
        places = launcher.workspace(call, results, launcher.partition(call, results))
        assert places["part_lse"].size[0] <= 2 * 2 * 64 * 132, (batches, heads, q_len)


@pytest.mark.parametrize("q_offset", mostly([[200, -4, 63]], [[200, -4, 63], 40]))
def test_offsets_of_packed_chunks(q_offset):
    declared = variant("latent_offsets", sink=weft.tensor("sinks", 2)[batch, weft.head])
    given = q_offset if isinstance(q_offset, int) else torch.tensor(q_offset, dtype=torch.int32)
    check_packed(
        declared, 16, [3, 30, 1], [330, 129, 64], at_once=5, q_offset=given, form=ALL_SWITCHES, few_queries=False
    )
