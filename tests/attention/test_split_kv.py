"""Schedule split_kv in Triton's interpreter against float64: rows of all heads of a group in a tile, parts joined."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, group, head, kv_head, kv_len, kv_pos, masks, q_len, q_pos, score
from weft.codegen.targets.triton.forms import Tiling
from weft.codegen.targets.triton.target import KERNELS
from weft.compiler.planning.cost import parts_of, sizes_of
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.records import Shape
from weft.compiler.planning.segments import segments_of
from weft.compiler.planning.signature import Widths
from weft.compiler.planning.splits import MOST_PARTS, divided, longest_visits, tile_rows
from weft.distributed.interleaved import Division, interleaved
from weft.runtime.run.variant import variant_of

from ..support import check_errors, check_variant, mostly, poisoned
from .cases import CAUSAL, FAR, cases, doc
from .test_pages import GARBAGE, paged

SPLIT_KV = KERNELS["split_kv"]

sinks = weft.tensor("sinks", 2)
heat = weft.tensor("heat", 1)

SINK = weft.Attention(mask=masks.causal, sink=sinks[batch, head], name="sunk")
OF_ALL = ("dense", "window", "cap", "alibi", "documents", "far", "sigmoid", "relu")
VARIANTS = cases(*OF_ALL, rows=128, batch=4, window=40, document=45) | {
    "prefix": (weft.Attention(mask=masks.prefix_lm(30) & (kv_pos % 3 < 2), name="prefix"), {}),
    "factors": (  # of a linear score, of any sign, one for each head
        weft.Attention(score * heat[head] * (1.0 + 0.01 * kv_len), masks.causal, name="heated"),
        {"heat": torch.tensor([1.0, -2.0, 0.0, 0.3, 1e-30, 2.0])},
    ),
    "windows by head": (
        weft.Attention(mask=masks.causal & (q_pos - kv_pos < 8 * (head + 1)), name="by_head"), {}
    ),
    "windows by group": (
        weft.Attention(mask=(q_pos - kv_pos < 20 * (kv_head + group)) & (kv_pos <= q_pos + q_len), name="by_group"), {}
    ),
    "documents by head": (
        weft.Attention(mask=doc[head, q_pos] >= doc[head, kv_pos], name="documents_by_head"),
        {"doc": torch.stack([torch.arange(128) // n for n in (7, 30, 64, 1, 50, 128)])},
    ),
    "all far": (FAR, {"pad": torch.full((4, 128), -1e9)}),
    "sink": (SINK, {"sinks": torch.linspace(-3.0, 3.0, 24).view(4, 6)}),
    "far sink": (
        FAR.replace(sink=2.0, name="far_sink"), {"pad": torch.where(torch.arange(128) > 60, -1e9, 0.0).repeat(4, 1)}
    ),
}  # fmt: skip
NO_LSE = ("sigmoid", "relu")


def operands(q_len, kv_rows=117, heads=6, kv_heads=2, dim=16, value_dim=None, dtype=torch.float32, batch=4):
    widths = ((heads, q_len, dim), (kv_heads, kv_rows, dim), (kv_heads, kv_rows, value_dim or dim))
    return [poisoned((batch, *w), dtype, seed=n) for n, w in enumerate(widths)]


def parts_taken(variant, schedule="split_kv"):
    """Into how many parts the calls of a variant were divided."""
    ready = variant_of(variant)._forwards.values()
    launchers = [r.launcher for r in ready if r.launcher.code.schedule.algorithm == schedule]
    return {parts.parts for launcher in launchers for parts in launcher.division.divided.values()}


OFTEN = ("window", "factors", "windows by head", "documents by head", "far sink", "sink", "sigmoid")


@pytest.mark.parametrize("name", mostly(OFTEN, [*VARIANTS]))
def test_masks_scores_sinks_and_normalizers(name):
    variant, given = VARIANTS[name]
    lse = name not in NO_LSE
    variant_of(variant).forget()  # variants that read alike share what is prepared, in tests before too
    check_variant(variant, *operands(3), target="interpret", operands=given, gradients=False, lse=lse)
    if "window" not in name and name != "prefix":
        assert max(parts_taken(variant)) == 4, "tiles of 32 keys are parts of their own here"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len"), [(1, 1, 1), (4, 4, 8), (8, 1, 1), (5, 1, 7), (12, 4, 2), (8, 1, 9)]
)
def test_rows_of_a_group_are_in_one_tile(heads, kv_heads, q_len):
    """Any ratio of heads, few rows and more than a tile has."""
    made = operands(q_len, heads=heads, kv_heads=kv_heads, dim=20, value_dim=40, batch=2)
    check_variant(CAUSAL, *made, target="interpret", gradients=False)


LENS = {
    "q_lens": torch.tensor([5, 0, 1, 3]), "kv_lens": torch.tensor([117, 33, 0, 40], dtype=torch.int32)
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [("window", "lengths"), ("window", 1), ("documents", 16), ("sink", 128), ("far", 16), ("sigmoid", 16),
     ("windows by head", "lengths")],
)  # fmt: skip
def test_lengths_and_pages(name, kind):
    """Sequences without queries and without keys among them, NaN behind every length, garbage behind tables."""
    variant, given = VARIANTS[name]
    query, key, value = operands(5)
    for b in range(4):
        query[b, :, LENS["q_lens"][b] :] = torch.nan
        for tensor in (key, value):
            tensor[b, :, LENS["kv_lens"][b] :] = torch.nan
    tensors, options = (query, key, value), dict(LENS)
    if kind != "lengths":
        *pools, options["block_table"] = paged(key, value, kind, LENS["kv_lens"], rows_first=kind == 16)
        tensors = (query, *pools)
    lse = name not in NO_LSE
    found = variant(*tensors, **given, **options, return_lse=lse, target="interpret")
    results = [found]
    for dtype in (torch.float64, torch.float32):
        own = {n: v.to(dtype) if v.is_floating_point() else v for n, v in given.items() if torch.is_tensor(v)}
        rows = (t.to(dtype) for t in (query, key, value))
        results.append(variant.reference(*rows, **{**given, **own}, **LENS, return_lse=lse))
    for label, *three in zip(("out", "lse"), *(r if lse else [r] for r in results)):
        check_errors(*three, f"{name} {label}")


@pytest.mark.parametrize("offset", [40, torch.tensor([100, 3, -2, 114], dtype=torch.int32)], ids=["int", "tensor"])
def test_offsets(offset):
    check_variant(CAUSAL, *operands(3), target="interpret", gradients=False, q_offset=offset)


def test_half_precision_and_rows_that_are_not_aligned():
    check_variant(CAUSAL, *operands(2, dtype=torch.float16), target="interpret", gradients=False)
    query, key, value = operands(2)
    check_variant(CAUSAL, query[..., 1:], key[..., 1:], value[..., 1:], target="interpret", gradients=False)


def test_a_backward_takes_what_such_a_forward_leaves():
    variant, given = VARIANTS["sink"]
    made = operands(2, kv_rows=40)
    check_variant(variant, *made, target="interpret", operands=given, differentiate=("sinks",), schedule="split_kv")


def test_outputs_repeat_bit_for_bit():
    made = operands(2)
    first = CAUSAL(*made, target="interpret", return_lse=True)
    again = CAUSAL(*made, target="interpret", return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    lens = torch.full((4,), 117)
    ragged = CAUSAL(*made, kv_lens=lens, target="interpret", return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, ragged)), "lengths on the device divide as those of operands"


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("kind", ["dense", "pages"])
def test_latent_caches(kind, q_len):
    """Absorbed, with twenty heads over one latent head: the tile of a cache is key and value."""
    rank, rope, heads = 32, 16, 20
    torch.manual_seed(3)
    lens = torch.tensor([96, 40, 0], dtype=torch.int32)
    cache = torch.randn(3, 1, 96, rank + rope)
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank, rope), name="mla")
    weights = {"uk": torch.randn(heads, rank, 8) / 4, "uv": torch.randn(heads, rank, 24)}
    query = torch.randn(3, heads, q_len, 8 + rope)
    given, tensors = {"kv_lens": lens}, (query, cache)
    if kind == "pages":
        pool, _, table = paged(cache, cache, 16, lens)
        tensors, given = (query, pool), {"kv_lens": lens, "block_table": table}
    got = variant(*tensors, **weights, **given, target="interpret", form="absorbed", return_lse=True)
    exact = {n: t.double() for n, t in weights.items()}
    wanted = variant.reference(query.double(), cache.double(), kv_lens=lens, return_lse=True, **exact)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


# -- what is chosen ----------------------------------------------------------------------------------------------------
def plan_of(q_len, kv_len=8192, batch=16, variant=CAUSAL, **options):
    sizes = weft.shape(batch=batch, heads=32, kv_heads=8, q_len=q_len, kv_len=kv_len, head_dim=128)
    return variant.plan(sizes, device="h200", **options)


def test_few_queries_are_divided_and_others_are_not():
    assert plan_of(1).codes[0].schedule.algorithm == plan_of(16).codes[0].schedule.algorithm == "split_kv"
    assert plan_of(17).codes[0].schedule.algorithm == "flash"
    assert plan_of(1, target="triton").codes[0].schedule.algorithm == "split_kv"
    assert plan_of(1, target="hopper").codes[0].target == "hopper", "who names a target gets it"
    assert plan_of(1, schedule="flash").codes[0].schedule.algorithm == "flash"
    assert plan_of(64, schedule="split_kv").codes[0].schedule.algorithm == "split_kv"
    assert plan_of(1).codes[1].schedule.algorithm == "flash", "a backward is that of flash"
    dropped = CAUSAL.replace(dropout=0.1, name="dropped")
    assert plan_of(1, variant=dropped).codes[0].schedule.algorithm == "flash"


def test_what_is_asked_for_and_not_there_says_so():
    dropped = CAUSAL.replace(dropout=0.1, name="dropped")
    with pytest.raises(weft.UnavailableError, match=r"triton: schedule split_kv has no dropout; use schedule='flash'"):
        plan_of(1, variant=dropped, schedule="split_kv", target="triton")
    starts = torch.tensor([0, 1, 2])
    sizes = weft.shape(heads=2, q_len=2, head_dim=64)
    with pytest.raises(weft.UnavailableError, match=r"triton: schedule split_kv has no packed sequences; use"):
        CAUSAL.plan(sizes, device="h100", target="triton", schedule="split_kv", cu_seqlens_q=starts)
    with pytest.raises(weft.UnavailableError, match=r"cpu: has schedule flash only; split_kv runs on targets triton"):
        CAUSAL(*operands(1), schedule="split_kv")


def test_explain_shows_the_parts_and_what_they_cost():
    said = CAUSAL.explain(
        weft.shape(heads=32, kv_heads=8, q_len=1, kv_len=1 << 17, head_dim=128), device="h200", target="triton"
    )
    kernel = plan_of(1, 1 << 17, 1, target="triton").kernels[0]
    parts = int(kernel.letters["S"])
    assert 16 <= parts <= 64 and f"S {parts}" in said and "join_parts" in said and "split_kv" in said
    seconds = plan_of(1, 1 << 17, 1, target="triton").seconds("forward")
    assert 537e6 / 4.3e12 < seconds < 1.5 * 537e6 / 4.3e12, "bound by the keys that are read"
    local = weft.Attention(mask=masks.sliding_window(1024), name="window_of_1024")
    assert plan_of(1, 1 << 17, 1, variant=local).seconds("forward") < 0.2 * seconds, "a window costs the window"


def test_texts_of_its_schedules_read_back():
    plan = plan_of(1)
    text = str(plan.schedule)
    again = plan_of(1, schedule=text)
    assert str(again.schedule) == text and again.codes[1].schedule.algorithm == "flash"
    with pytest.raises(weft.WeftError, match=r"schedule: expected kernels among .*split_forward.*, got split"):
        plan_of(1, schedule="split_kv/split=triton:64x64w4s3")


def test_division():
    """Programs fill the machine, parts are as long as each other, and what is short is not divided."""
    keys, rate = 32768.0, 4.2e12  # bytes of a tile, bytes a second
    for units, tiles in ((128, 128), (512, 128), (8, 2048), (8, 64), (1, 1), (1, 3), (4096, 7)):
        parts, size = divided(units, tiles, 396, 190, keys, rate)
        assert 1 <= parts <= MOST_PARTS and (parts - 1) * size < tiles <= parts * size
    assert divided(4096, 7, 396, 190, keys, rate).parts == 1
    for enough in (100, 190, 300):
        parts = divided(8, 2048, 396, enough, keys, rate).parts
        assert enough - 8 < parts * 8 < enough + 128, "as many as read as fast as the memory can"
    assert divided(8, 64, 396, 120, keys, rate).parts == 16, "a second round of joining costs more than it saves"
    assert [tile_rows(64, rows) for rows in (1, 16, 17, 64, 512)] == [16, 16, 32, 64, 64]


@pytest.mark.parametrize(
    ("device", "wanted"), [("h100", [3, 10, 10, 11, 16, 32]), ("h200", [3, 3, 6, 11, 32, 32])], ids=lambda x: str(x)[:4]
)
def test_divisions_of_pages_that_were_timed(device, wanted):
    """B16 and B64 of 8k, 64 of up to 16k, B4 of 4k, B1 of 4k and of 64k (docs/experiments, "Divided keys")."""
    form, parts, machine = Tiling(16, 64, 4, 3), segments_of(CAUSAL, Widths(128, 128)), by_name(device)
    found = []
    for number, tokens in ((16, 8192), (64, 8192), (64, 16384), (4, 4096), (1, 4096), (1, 65536)):
        shape = Shape(number, 32, 8, 1, tokens, 128, 128, "bf16")
        sizes = sizes_of(SPLIT_KV[0], form, shape, machine, parts, 1)
        found.append(parts_of(SPLIT_KV[0], form, sizes, tokens // 64, machine, parts, uneven=True).parts)
    assert found == wanted


def test_what_the_longest_sequence_visits():
    facts = variant_of(VARIANTS["window"][0]).facts
    seen = lambda n, **env: longest_visits(facts.kv_tiles, 1, 1 << 17, 64, 64, None, {"head_dim": 64, **env})  # noqa: E731
    assert seen(1, window=1024) in (16, 17)
    assert seen(1) == (1 << 17) // 64, "without the window's value: all"


@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_the_longest_sequence_visits_on_one_of_several_ranks(name, ranks):
    """Positions go up to `ranks` times the keys that lie here: they were taken for a sequence of these alone."""
    whole = CAUSAL if name == "causal" else VARIANTS["window"][0]
    facts, env = variant_of(interleaved(whole, Division(ranks))).facts, {"head_dim": 64, "window": 4096, "first_key": 0}
    tokens, own = 8192, 8192 // ranks
    seen = lambda offset, **more: longest_visits(facts.kv_tiles, 1, own, 64, 64, offset, env, **more)  # noqa: E731
    right = seen(tokens - 1)
    assert right == (tokens if name == "causal" else 4096) // ranks // 64
    assert seen(None, unknown=True) == seen(own - 1, unknown=True) == right
    if ranks > 2:
        assert seen(None) < right


def test_a_table_is_read_up_to_the_length_alone():
    query, key, value = operands(1, batch=2, kv_rows=64)
    lens = torch.tensor([64, 1], dtype=torch.int32)
    *pools, table = paged(key, value, 16, lens)
    assert table[1, 1] == GARBAGE
    out = CAUSAL(query, *pools, block_table=table, kv_lens=lens, target="interpret")
    assert bool(out.isfinite().all())
