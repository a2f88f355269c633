"""The Hopper kernel of latent caches on a CPU: its generated text, run by gluon.py, against float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_pos, score
from weft.codegen.targets.hopper import latent_launcher
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.compiler.planning.sources import kind_named
from weft.runtime.call import Call, Choices, Dense, Lengths, PackedPaged, Paged
from weft.runtime.driver import compile_kernels
from weft.runtime.run.key import offset_kind

from ..support import check_errors, mostly
from .gluon import Kernels, OnACpu
from .machine import Deadlock, Pointer

pytest.importorskip("triton")

SCALE = 0.1
slopes, sinks, pad = weft.tensor("slopes", 1), weft.tensor("sinks", 2), weft.tensor("pad", 2)


def variant(name, value=score, mask=masks.causal, rank=512, sink=None, rope=64):
    return weft.Attention(value, mask, latent=weft.Latent(rank, rope), scale=SCALE, sink=sink, name=name)


CAUSAL = variant("latent_causal")
VARIANTS = {
    "dense": variant("latent_dense", mask=True),
    "window": variant("latent_window", mask=masks.sliding_window(100)),
    "cap": variant("latent_cap", 20.0 * weft.tanh(score / 20.0)),
    "alibi": variant("latent_alibi", score + slopes[head] * (kv_pos - q_pos)),
    "factors": variant("latent_heated", score * slopes[head]),  # of any sign
    "sink": variant("latent_sunk", sink=sinks[batch, head]),
    "far": variant("latent_far", score + pad[batch, kv_pos]),
    "far and a sink": variant("latent_far_sunk", score + pad[batch, kv_pos], sink=sinks[batch, head] + 0.01 * kv_len),
    "first rows empty": variant("latent_rows_empty", mask=kv_pos < q_pos - 329, sink=sinks[batch, head]),
}
ALL_SWITCHES = "64x64p11+ordered+prefetch"


def launcher_of(
    declared, kind, dtype=torch.bfloat16, form=None, seed=0, edit=None, few_queries=True, offset=None, descale=None
):  # fmt: skip
    """descale: of keys in FP8."""
    rank, rope = declared.latent.rank, declared.latent.rope
    named = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    dtypes, more = Dtypes.all(named), {}
    if descale is not None:
        dtypes, of_keys = Dtypes.of(named, "e4m3", None), frozenset({"k_descale"})
        more = {"options": of_keys, "scaled_rows": of_keys if descale.shape[2] > 1 else frozenset()}
    signature = Signature(
        "forward", "sm_90", dtypes, Widths(rank + rope, rank, 0 if descale is None else rope, True),
        sequences=kind_named(kind), few_queries=few_queries,
        offset=offset or ("number" if kind == "dense" else "bottom_right"), **more,
    )  # fmt: skip
    schedule = form and f"split_kv/split_forward=hopper:{form}"
    made = compile_kernels(declared, signature, by_name("h200"), "hopper", schedule)
    return OnACpu.of(made, declared, seed, edit)


def operands_of(declared, heads, batches, rows):
    made = {
        "slopes": torch.linspace(-0.3, 0.6, heads),
        "sinks": torch.linspace(-3.0, 6.0, batches * heads).view(batches, -1),
        "pad": torch.where(torch.arange(rows) % 5 == 3, -1e9, 0.0).repeat(batches, 1),
    }  # fmt: skip
    return {p.name: made[p.name] for p in declared.canonical.parameters}


def run(
    declared, query, key, sequences, form=None, parts=0, operands=None, edit=None, seed=0, at_once=3, head_dim=0,
    few_queries=True, rope=None, descale=None,
):  # fmt: skip
    """out, lse and the number of parts of each sequence. rope, descale: of keys in FP8."""
    rank, width = declared.latent.rank, query.shape[3]
    offset = offset_kind(sequences.q_offset)
    launcher = launcher_of(declared, sequences.kind.name, query.dtype, form, seed, edit, few_queries, offset, descale)
    launcher.device.at_once = at_once
    read = None if descale is None else {"k_descale": descale}
    call = Call(query, key, None, rope, operands or {}, sequences, Choices(), head_dim or width, read)
    nan = float("nan")
    results = {
        "out": torch.full((*query.shape[:3], rank), nan, dtype=query.dtype),
        "lse": torch.full((*([2] if launcher.job.shifts else []), *query.shape[:3]), nan),
    }
    partition = launcher.partition(call, results)
    if parts:
        tiles = -(-call.kv_rows // 64)
        partition = partition._replace(splits=parts, least=-(-tiles // parts))
    places = launcher.workspace(call, results, partition)
    workspace = {n: place.beside(query) for n, place in places.items()}
    for tensor in workspace.values():
        tensor.fill_(nan if tensor.dtype.is_floating_point else -(2**31))
    launcher(call, results, workspace, partition)
    joins = workspace["joins"]
    lse = results["lse"].sum(0) if launcher.job.shifts else results["lse"]
    places = slice(1, -1, 2) if not sequences.kind.is_mixed else slice(3, None, 2) if few_queries else slice(4, None, 4)
    return results["out"], lse, joins[places].tolist()


def in_pages(key, lens, page):
    """Pools with NaN wherever no key is, and a table with garbage behind the lengths."""
    batches, _, rows, width = key.shape
    pages = -(-rows // page)
    blocks = torch.randperm(batches * pages).view(batches, pages)
    pool, table = torch.full((batches * pages, 1, page, width), float("nan"), dtype=key.dtype), blocks.int()
    for b, length in enumerate(lens):
        for i in range(-(-length // page)):
            mine = key[b, :, i * page : min((i + 1) * page, length)]
            pool[blocks[b, i], :, : mine.shape[1]] = mine
        table[b, -(-length // page) :] = -(2**31)
    return pool, table


def in_fp8(beside, rank, descale, dtype):
    """Stored numbers of latent columns, exactly, and what a call has beside them.

    beside: real numbers, and in a last column the descale of each row. descale: as the call has it; None: that column.
    """
    stored = (beside[..., :rank] / beside[..., -1:]).round(decimals=6).to(torch.float8_e4m3fn)
    own = beside[..., -1:].contiguous() if descale is None else descale
    return stored, {"rope": beside[..., rank:-1].to(dtype), "descale": own}


def check(
    declared, heads, q_len, kv_lens, q_lens=None, page=0, dtype=torch.bfloat16, rows=330, per=None, sizes=(1.0, 1.0),
    **options,
):  # fmt: skip
    """Padded or paged sequences; everything behind a length is NaN. kv_lens None: sequences of one length.

    per: of what keys in FP8 have a descale each. sizes: powers of two by which queries and keys are multiplied.
    """
    torch.manual_seed(heads + q_len)
    batches, width = 1 if kv_lens is None else len(kv_lens), declared.latent.rank + declared.latent.rope
    query = (torch.randn(batches, q_len, heads, width) * sizes[0]).to(dtype).transpose(1, 2)
    key = (torch.randn(batches, 1, rows, width) * sizes[1]).to(dtype)
    operands = operands_of(declared, heads, batches, rows)
    known, given, sequences, shown = query.clone(), {"q_offset": rows - q_len}, Dense(rows - q_len), key
    if per is not None:
        scaled = key * (1.0 + torch.rand(batches, 1, rows, 1))  # so that each row has a descale of its own
        made = weft.fp8.quantize(scaled[..., : declared.latent.rank].float(), per=per)
        key = torch.cat([weft.fp8.dequantize(made), key[..., declared.latent.rank :]], -1)
        of_rows = made.descale.repeat_interleave(per if isinstance(per, int) else 1, 2)[:, :, :rows]
        shown = torch.cat([key, of_rows.expand(batches, 1, rows, 1)], -1)
    if kv_lens is not None:
        shown = shown.clone()
        for b, length in enumerate(kv_lens):
            shown[b, :, length:] = torch.nan
        lens = {"kv_lens": torch.tensor(kv_lens, dtype=torch.int32)}
        if q_lens is not None:
            lens["q_lens"] = torch.tensor(q_lens, dtype=torch.int32)
            for b, length in enumerate(q_lens):
                query[b, :, length:] = torch.nan
        given = lens
        sequences = Lengths(lens.get("q_lens"), lens["kv_lens"], None)
        if page:
            shown, table = in_pages(shown, kv_lens, page)
            sequences = Paged(lens.get("q_lens"), lens["kv_lens"], table, page, None)
    if per is not None:
        shown, more = in_fp8(shown, declared.latent.rank, None if per == "token" else made.descale, dtype)
        options |= more
    out, lse, parts = run(declared, query, shown, sequences, operands=operands, **options)
    results = []
    for kind in (torch.float64, dtype):
        own = {n: t.to(kind) if kind == torch.float64 else t for n, t in operands.items()}
        results.append(declared.reference(known.to(kind), key.to(kind), **given, **own, return_lse=True))
    for label, *three in zip(("out", "lse"), (out, lse), *results):
        check_errors(*three, label)
    return parts


CASES = [
    # heads, queries, lengths of keys and queries, page, form, parts
    (128, 1, None, None, 0, "64x64p11", 0),
    (64, 1, None, None, 0, "64x64p11+ordered", 3),
    (16, 3, [330, 5, 0, 129], [3, 2, 3, 0], 0, ALL_SWITCHES, 2),
    (16, 4, [330, 5, 0, 129], [3, 2, 4, 1], 16, "64x64p11", 2),
    (32, 1, [330, 64, 0], None, 32, ALL_SWITCHES, 0),
    (128, 2, [330, 129], None, 64, "64x64p11", 1),
    (128, 1, [330, 0, 70], None, 16, ALL_SWITCHES, 0),
    (192, 1, [330, 129], None, 128, "64x64p11+ordered+prefetch", 1),
    (1, 1, [330, 70], None, 256, "64x64p11", 0),
    (16, 1, [330, 67], None, 8, "64x64p11+ordered", 0),
]


@pytest.mark.parametrize(
    ("heads", "q_len", "kv_lens", "q_lens", "page", "form", "parts"), mostly([CASES[1], CASES[3]], CASES)
)
def test_rows_pages_and_parts(heads, q_len, kv_lens, q_lens, page, form, parts):
    check(CAUSAL, heads, q_len, kv_lens, q_lens, page, form=form, parts=parts)


FP8_CASES = [
    # heads, queries, lengths of keys, page, what has a descale, form, parts
    (64, 1, None, 0, "tensor", None, 3),
    (16, 3, [330, 5, 0, 129], 0, "token", "64x64p8r6+ordered", 2),
    (32, 1, [330, 64], 0, 64, "64x64p10r1", 0),
    (16, 4, [330, 5, 0, 129], 16, "token", None, 2),
    (128, 2, [330, 129], 64, "token", "64x64p9r4+ordered", 1),
    (1, 1, [330, 70], 8, "tensor", None, 0),
]


@pytest.mark.parametrize(
    ("heads", "q_len", "kv_lens", "page", "per", "form", "parts"), mostly([FP8_CASES[1], FP8_CASES[3]], FP8_CASES)
)
def test_keys_in_fp8(heads, q_len, kv_lens, page, per, form, parts):
    check(CAUSAL, heads, q_len, kv_lens, page=page, per=per, form=form, parts=parts)


@pytest.mark.parametrize("name", mostly(["far and a sink"], list(VARIANTS)))
def test_masks_and_scores_over_keys_in_fp8(name):
    check(VARIANTS[name], 16, 2, [330, 70], page=16, parts=2, per="token")


@pytest.mark.parametrize(("rank", "rope"), mostly([(384, 32)], [(256, 64), (384, 32), (128, 8)]))
def test_other_ranks_in_fp8(rank, rope):
    check(variant(f"latent_{rank}_{rope}_fp8", rank=rank, rope=rope), 32, 2, [200, 70], page=64, rows=200, per="token")


@pytest.mark.parametrize("per", mostly(["token"], ["token", "head"]))
def test_fp16_queries_of_keys_in_fp8(per):
    page = 64 if per == "token" else 0  # a pool has no descales of batch rows
    check(CAUSAL, 16, 2, [330, 70], page=page, parts=2, dtype=torch.float16, per=per, sizes=(100.0, 0.02))


def powers(extents, least, most):
    return torch.exp2(torch.randint(least, most + 1, extents).float())


SIZES = {  # of queries, and of keys
    "large queries": lambda: (2.0**40, 2.0**-40),
    "small queries": lambda: (2.0**-60, 2.0**60),
    "queries of 0": lambda: (0.0, 1.0),
    "keys of 0": lambda: (1.0, torch.arange(330).view(1, 1, 330, 1) >= 70),
    "queries unlike": lambda: (powers((2, 1, 16, 1), -30, 0), 1.0),
    "keys unlike": lambda: (2.0**-9, powers((1, 1, 330, 1), -8, 8)),  # products with queries are moderate
}


@pytest.mark.parametrize("per", ["token", "tensor"])
@pytest.mark.parametrize("name", mostly(["large queries", "keys unlike"], list(SIZES)))
def test_sizes_that_fp16_does_not_have(name, per):
    """Queries become fp16 times a power of two for each row, and weights times descales those of units."""
    torch.manual_seed(5)
    check(CAUSAL, 16, 1, [330, 200], page=64, parts=2, per=per, sizes=SIZES[name]())


@pytest.mark.parametrize("form", mostly([None], [None, "64x64p9r3", "64x64p9r4+ordered"]))
def test_converters_of_short_sequences_take_turns_in_any_order(form):
    """Queries pass between the keys of sequences, so that slots of keys change the converter."""
    for seed in range(4):
        check(CAUSAL, 16, 1, [330, 64, 1, 200, 64, 0, 64], page=16, per="token", form=form, seed=seed)


def test_roles_take_turns_in_any_order_over_keys_in_fp8():
    for seed in range(3):
        check(CAUSAL, 16, 1, None, rows=520, parts=1, seed=seed, per="head", form="64x64p10r2" if seed else None)


@pytest.mark.parametrize(("heads", "page"), mostly([(16, 16)], [(16, 16), (64, 0), (64, 64)]))
def test_programs_share_ragged_sequences_evenly(heads, page, monkeypatch):
    monkeypatch.setattr(latent_launcher, "MANY_ROWS", 1)  # joined several rows at a time
    lens = [600, 40, 0, 130, 200, 64]
    found = check(CAUSAL, heads, 2, lens, [2, 1, 2, 0, 2, 1], page, rows=600, parts=1)
    assert max(found) > 1 and min(found) == 1


@pytest.mark.parametrize("name", mostly(["alibi", "far and a sink"], list(VARIANTS)))
def test_masks_and_scores(name):
    check(VARIANTS[name], 16, 2, [330, 70], page=16, parts=2)
    check(VARIANTS[name], 64, 1, None, parts=1)
    check_packed(VARIANTS[name], 16, [1, 6], [330, 70], behind=1, at_once=7)


@pytest.mark.parametrize("sink", [None, sinks[batch, head] * weft.log2(1.0 * weft.head_dim)])
def test_the_head_dimension_is_that_of_the_query_before_its_projection(sink):
    """192 for a latent query of 576 columns: so the usual scale is that of the expanded form, and is in both forms."""
    declared = variant("latent_usual", sink=sink).replace(scale=None)
    query, key = torch.randn(1, 16, 1, 576).bfloat16(), torch.randn(1, 1, 330, 576).bfloat16()
    operands = operands_of(declared, 16, 1, 330)
    given = {n: 1.0 * t * math.log2(192) for n, t in operands.items()}
    meant = variant("latent_meant", sink=None if sink is None else sinks[batch, head]).replace(scale=192**-0.5)
    for parts in (1, 2):
        out, lse, _ = run(declared, query, key, Dense(329), parts=parts, operands=operands, head_dim=192)
        results = []
        for kind in (torch.float64, torch.bfloat16):
            own = {n: t.to(kind) if kind == torch.float64 else t for n, t in given.items()}
            results.append(meant.reference(query.to(kind), key.to(kind), q_offset=329, **own, return_lse=True))
        for label, *three in zip(("out", "lse"), (out, lse), *results):
            check_errors(*three, label)


def test_keys_are_divided_by_the_head_dimension_that_a_mask_reads():
    """That of the call, as plans do: a window of 192 times 8 keys is a third of one of 576 times 8."""
    window = variant("latent_by_width", mask=masks.causal & (q_pos - kv_pos < 8 * weft.head_dim))
    launcher, rows = launcher_of(window, "dense"), 1 << 16
    query, key = (torch.empty(1, heads, n, 576, device="meta") for heads, n in ((128, 1), (1, rows)))
    parts = {}
    for head_dim in (192, 576):
        shape = weft.shape(batch=1, heads=128, q_len=1, kv_len=rows, head_dim=head_dim, value_dim=128)
        planned = window.plan(shape, device="h200").kernels[0].letters["S"]
        call = Call(query, key, None, None, {}, Dense(rows - 1), Choices(), head_dim)
        parts[head_dim] = launcher.partition(call, {"out": query}).splits
        assert parts[head_dim] == planned
    assert 1 < parts[192] < parts[576]


@pytest.mark.parametrize("name", ["sink", "far and a sink"])
def test_rows_past_the_queries_have_no_sink(name):
    check(VARIANTS[name], 16, 2, [330, 330], [1, 0], parts=2)


def check_packed(
    declared, heads, q_lens, kv_lens, page=16, behind=0, dtype=torch.bfloat16, q_offset=None, **options
):  # fmt: skip
    """Queries one after the other, NaN behind them.

    -> how many rounds are in how many parts
    """
    torch.manual_seed(heads + sum(q_lens))
    starts, total, rows = [0, *itertools.accumulate(q_lens)], sum(q_lens) + behind, max(kv_lens)
    width = declared.latent.rank + declared.latent.rope
    query = torch.randn(1, total, heads, width).to(dtype).transpose(1, 2)
    key = torch.randn(len(q_lens), 1, rows, width).to(dtype)
    padded = query.new_zeros(len(q_lens), heads, max(q_lens), width)
    for b, length in enumerate(q_lens):
        padded[b, :, :length] = query[0, :, starts[b] : starts[b + 1]]
    query[:, :, sum(q_lens) :] = torch.nan
    operands = operands_of(declared, heads, len(q_lens), rows)
    pool, table = in_pages(key, kv_lens, page)
    lens = {"q_lens": torch.tensor(q_lens, dtype=torch.int32), "kv_lens": torch.tensor(kv_lens, dtype=torch.int32)}
    sequences = PackedPaged(torch.tensor(starts, dtype=torch.int32), lens["kv_lens"], table, page, q_offset)
    out, lse, parts = run(declared, query, pool, sequences, operands=operands, **options)
    results = []
    for kind in (torch.float64, dtype):
        own = {n: t.to(kind) if kind == torch.float64 else t for n, t in operands.items()}
        given = lens | ({} if q_offset is None else {"q_offset": q_offset})
        results.append(declared.reference(padded.to(kind), key.to(kind), **given, **own, return_lse=True))
    for b, length in enumerate(q_lens):
        mine = slice(starts[b], starts[b + 1])
        for n, (label, found) in enumerate((("out", out), ("lse", lse)) if length else ()):
            check_errors(found[0, :, mine], results[0][n][b, :, :length], results[1][n][b, :, :length], label)
    last = slice(sum(q_lens), total)
    assert bool((out[0, :, last] == 0).all() and (lse[0, :, last] == -torch.inf).all())
    return Counter(n for n in parts if n > 0)


PACKED = [
    # heads, lengths of queries and keys, page, rows behind, form
    (128, [1, 2, 0, 1], [330, 129, 5, 40], 64, 0, ALL_SWITCHES),
    (16, [4, 1, 0, 9, 3], [330, 0, 64, 129, 3], 16, 5, "64x64p11"),
    (16, [1, 4, 65, 2, 66], [330, 70, 80, 129, 70], 16, 5, "64x64p11"),
    (64, [3, 3, 2], [330, 64, 200], 128, 70, ALL_SWITCHES),
    (2, [40, 1, 33], [90, 64, 200], 8, 1, "64x64p11"),
    (192, [1, 0, 2], [330, 64, 200], 64, 1, "64x64p11+ordered"),
]


@pytest.mark.parametrize(
    ("heads", "q_lens", "kv_lens", "page", "behind", "form"), mostly([PACKED[0], PACKED[2]], PACKED)
)
def test_packed_queries(heads, q_lens, kv_lens, page, behind, form):
    """Whole rounds, and parts of them as if they cost nothing."""

    def cut(text):
        assert text.count("JOINING = gl.constexpr(8)") == 1
        return text.replace("JOINING = gl.constexpr(8)", "JOINING = gl.constexpr(-9)")

    for edit in (None, cut):
        parts = check_packed(CAUSAL, heads, q_lens, kv_lens, page, behind, form=form, at_once=7, edit=edit)
        assert sum(parts.values()) >= sum(n > 0 for n in q_lens)
        assert edit is None or max(parts) > 1


@pytest.mark.parametrize(
    ("rank", "rope"), mostly([(256, 64), (384, 32)], [(256, 64), (384, 32), (256, 32), (512, 0), (128, 8), (384, 64)])
)
def test_other_ranks_and_dtypes(rank, rope):
    declared = variant(f"latent_{rank}_{rope}", rank=rank, rope=rope)
    check(declared, 32, 2, [200, 70], page=64, dtype=torch.float16, rows=200)
    check(declared, 128, 1, None, rows=200)


def test_roles_take_turns_in_any_order():
    for seed in range(3):
        check(CAUSAL, 16, 1, None, form=ALL_SWITCHES if seed else "64x64p11", rows=520, parts=1, seed=seed)


def divided(lens, heads, q_len=1, room=0):
    """Tiles of keys of each program of one tile of rows, as the kernel divides sequences of these lengths, and the
    number of programs. Every tile is seen to belong to one program."""
    launcher = launcher_of(CAUSAL, "lengths")
    launcher.device.at_once = 132
    batch, room, units = len(lens), room or max(lens), max(1, heads * q_len // 64)
    parts = launcher.division.divide(batch, heads, 1, q_len, room, None, 192, {})
    even = launcher.own.even_shares(batch, units)
    shares = max(parts.parts * batch, even)
    space = Kernels(launcher.device.text).space
    pointer = Pointer.to(torch.tensor(lens, dtype=torch.int32))
    tiles = [max(1, -(-n // 64)) for n in lens]
    seen, loads = [0] * batch, []
    for share in range(shares):
        size, first, last, start, _ = space["divide"](
            pointer, share, batch, room, (parts.parts, parts.tiles, even), units, 132
        )  # fmt: skip
        load, start = 0, int(start)
        for b in range(first, last):
            begin, end = max(share * int(size) - start, 0), min((share + 1) * int(size) - start, tiles[b])
            assert begin == seen[b] and end > begin  # in order, and never nothing
            seen[b], load, start = end, load + end - begin, start + tiles[b]
        loads.append(load)
    assert seen == tiles
    return sorted((load for load in loads if load), reverse=True), units


@pytest.mark.parametrize(
    ("batch", "length", "heads", "q_len"),
    [(64, 4096, 128, 1), (128, 8192, 128, 1), (64, 8192, 64, 1), (64, 4096, 128, 2), (1, 65536, 128, 1)],
)
def test_equal_lengths_are_divided_as_without_lengths(batch, length, heads, q_len):
    loads, units = divided([length] * batch, heads, q_len)
    tiles = length // 64
    parts = -(-tiles // loads[0])
    assert len(loads) == batch * parts and loads[-1] >= loads[0] - parts
    assert parts == 1 if batch * units >= 128 else batch * parts * units <= 132


def test_ragged_lengths_are_balanced():
    torch.manual_seed(0)
    for heads, most in ((128, 16384), (64, 16384), (16, 4096)):
        lens = torch.randint(1, most, (64,)).tolist()
        loads, units = divided(lens, heads, room=2 * most)
        assert len(loads) * units <= 132 and loads[0] * len(loads) <= 1.03 * sum(loads) + 4 * len(loads)
    lens = [8192 - 5 * b for b in range(64)]  # of about one length: whole
    loads, units = divided(lens, 128)
    assert len(loads) == 64 and loads[0] == 128
    divided([0, 5, 0, 1, 64, 65, *[0] * 140, 900], 64)


WAIT = "acc0 = warpgroup_mma_wait(1, deps=[token0])"
RELEASE = "mbarrier.arrive(sram.piece_free.index(slot0), count=1)"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (f"{WAIT}\n{16 * ' '}{RELEASE}", f"{RELEASE}\n{16 * ' '}{WAIT}"),  # before a product is done
        # nobody gives back the query's rotary columns
        ("mbarrier.arrive(sram.rotary_free.index((rotaries - 1) % 2), count=2)", "pass"),
        # weights are read before they are there
        ("mbarrier.wait(sram.weights_ready.index(tiles % 2), tiles // 2 & 1)", "pass"),
    ],
)
def test_a_broken_protocol_is_noticed(right, wrong):
    def edit(text):
        if right not in text:  # no assertion, which would pass for a mistake that was noticed
            pytest.fail(f"the kernel has no {right!r}")
        return text.replace(right, wrong)

    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(4):
            check(CAUSAL, 16, 1, None, form="64x64p11", rows=520, parts=1, edit=edit, seed=seed)
