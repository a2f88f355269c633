"""Packed queries over a paged cache on a GPU: chunks of prompts beside single tokens, against float64; graphs."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.codegen.launch.launcher import KernelLauncher
from weft.codegen.launch.shared import SharedLauncher
from weft.compiler.planning.signature import MOST_SHORT
from weft.runtime.driver import builds
from weft.runtime.run.variant import variant_of

from ..support import check_errors, mostly, poisoned
from .test_decode_on_gpu import CAUSAL, KV_LENS, LATENT, ROWS, VARIANTS, operands_of, paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MIXED = [300, 1, 3, 0, 1]  # queries; KV_LENS has ROWS, 5, 0, 640 and 1025 keys
BATCHES = [MIXED, [1] * 5, [8, 1, 2, 5, 1], [0, 0, 0, 0, 700]]
KINDS = [("triton", "flash"), ("triton", "split_kv"), ("hopper", "flash")]
SHARED = ("triton", None)  # long sequences by flash, short ones by split_kv; unasked on hopper where that can
AROUND = [MOST_SHORT + 1, MOST_SHORT, 300, 0, 1]


def tensor(numbers):
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


def starts_of(q_lens):
    return tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()])


def operands(q_lens=MIXED, heads=8, kv_heads=2, dim=128, value_dim=None, dtype=torch.bfloat16, behind=3):
    query = poisoned((1, heads, sum(q_lens) + behind, dim), dtype, "cuda", blhd=True, seed=0)
    query[:, :, sum(q_lens) :] = torch.nan
    widths = ((kv_heads, ROWS, dim), (kv_heads, ROWS, value_dim or dim))
    return [query, *(poisoned((5, *w), dtype, "cuda", blhd=True, seed=n) for n, w in enumerate(widths, 1))]


def expected(variant, made, q_lens, kv_lens, dtype, lse, **options):
    """Of padded calls, packed; what no sequence has gives 0 and -inf."""
    query, key, value = (t.to(dtype) for t in made)
    starts = starts_of(q_lens).tolist()
    padded = query.new_zeros(5, query.shape[1], max(*q_lens, 1), query.shape[3])
    for b, n in enumerate(q_lens):
        padded[b, :, :n] = query[0, :, starts[b] : starts[b] + n]
    found = variant.reference(
        padded, key, value, q_lens=tensor(q_lens), kv_lens=tensor(kv_lens), return_lse=lse, **options
    )
    packed = []
    for rows, nothing in zip(found if lse else [found], (0.0, -torch.inf)):
        whole = rows.new_full((1, *query.shape[1:3], *rows.shape[3:]), nothing)
        for b, n in enumerate(q_lens):
            whole[0, :, starts[b] : starts[b] + n] = rows[b, :, :n]
        packed.append(whole)
    return packed


def check(name, made, q_lens=MIXED, kv_lens=KV_LENS, page=16, rows_first=True, **options):
    """Several calls, of which the later ones take the direct way; all with the same bits."""
    variant, given, lse = VARIANTS[name], operands_of(name), name != "sigmoid"
    pools, table = paged(made[1:], kv_lens, page, rows_first)
    lens = {"cu_seqlens_q": starts_of(q_lens), "kv_lens": tensor(kv_lens), "block_table": table}
    found = [variant(made[0], *pools, **lens, **given, return_lse=lse, **options) for _ in range(3)]
    results = [found[0] if lse else [found[0]]]
    for dtype in (torch.float64, made[0].dtype):
        own = {n: v.to(dtype) if v.is_floating_point() and dtype == torch.float64 else v for n, v in given.items()}
        results.append(expected(variant, made, q_lens, kv_lens, dtype, lse, **own))
    for label, *three in zip(("out", "lse"), *results):
        check_errors(*three, f"{name} {label} {options}")
    for again in found[1:]:
        pairs = zip(found[0], again) if lse else [(found[0], again)]
        assert all(torch.equal(a, b) for a, b in pairs), "the same bits every time"


@pytest.mark.slow(12)
@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", VARIANTS)
def test_long_and_short_sequences_of_one_call(name):
    for q_lens, kv_lens in ((MIXED, KV_LENS), (AROUND, [ROWS, 70, 500, 640, 1025])):
        for target in (None, SHARED[0]):
            check(name, operands(q_lens), q_lens, kv_lens, target=target)


@pytest.mark.slow(11)
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (8, 1, 128), (6, 2, 80), (32, 8, 128)])
def test_shares_of_groups(heads, kv_heads, dim):
    for q_lens in (AROUND, [MOST_SHORT] * 5, [700, 0, 0, 0, 0], [MOST_SHORT + 1] * 5, [0, 0, 0, 0, 90]):
        check("causal", operands(q_lens, heads, kv_heads, dim), q_lens, kv_lens=[ROWS, 70, 500, 640, 1025])


def of_hopper(name):
    return "documents" not in name and name != "sigmoid"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", VARIANTS)
def test_masks_scores_sinks_and_normalizers(name):
    for target, schedule in KINDS:
        if target == "triton" or of_hopper(name):
            check(name, operands(), target=target, schedule=schedule)
    check(name, operands(BATCHES[2]), BATCHES[2])


@pytest.mark.slow(19)
@pytest.mark.sampled(7)
@pytest.mark.parametrize("page", [1, 8, 16, 64, 256])
def test_pages_and_batches(page):
    for q_lens in BATCHES:
        for target, schedule in KINDS if page >= 8 else KINDS[:2]:
            check("causal", operands(q_lens), q_lens, page=page, target=target, schedule=schedule)
        check("causal", operands(q_lens, behind=0), q_lens, page=page, rows_first=False)


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("target", "schedule"), KINDS)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 1), (6, 2)])
def test_widths_and_groups(dim, value_dim, heads, kv_heads, target, schedule):
    made = operands(heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, dtype=torch.float16)
    check("causal", made, target=target, schedule=schedule)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("offset", ["number", "tensor"])
@pytest.mark.parametrize(("target", "schedule"), KINDS)
def test_offsets(target, schedule, offset):
    given = 7 if offset == "number" else tensor([1000, 2, -3, 600, 5])
    made = operands()
    pools, table = paged(made[1:], KV_LENS, 16)
    lens = {"cu_seqlens_q": starts_of(MIXED), "kv_lens": tensor(KV_LENS)}
    wanted = expected(CAUSAL, made, MIXED, KV_LENS, torch.float64, True, q_offset=given)
    usual = expected(CAUSAL, made, MIXED, KV_LENS, torch.bfloat16, True, q_offset=given)
    found = CAUSAL(made[0], *pools, block_table=table, **lens, q_offset=given, return_lse=True, target=target,
                   schedule=schedule)  # fmt: skip
    for label, *three in zip(("out", "lse"), found, wanted, usual):
        check_errors(*three, f"{label} {target} {schedule}")


@pytest.mark.slow(15)
@pytest.mark.sampled(37)
@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize(("heads", "page"), [(16, 16), (64, 64), (128, 128)])
def test_latent_caches(name, heads, page):
    """Several calls, of which the later ones take the direct way; all with the same bits."""
    variant = LATENT[name]
    width = variant.latent.rank + variant.latent.rope
    cache = torch.randn(5, 1, ROWS, width, device="cuda", dtype=torch.bfloat16)
    (pool,), table = paged((cache,), KV_LENS, page)
    own = {p.name: torch.linspace(-0.3, 0.6, heads, device="cuda") for p in variant.canonical.parameters}
    for q_lens in (MIXED, [1] * 5, [5, 1, 0, 9, 2], [1, 5, 0, 200, 65]):
        query = torch.randn(1, sum(q_lens) + 2, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        query[:, :, sum(q_lens) :] = torch.nan
        given = {"cu_seqlens_q": starts_of(q_lens), "kv_lens": tensor(KV_LENS), "block_table": table}
        given |= {"return_lse": True}
        found = [variant(query, pool, **given, **own) for _ in range(4)]
        for again in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], again))
        exact, usual = (
            variant.reference(
                query.to(t), pool.to(t), **given, **{n: v.to(torch.promote_types(v.dtype, t)) for n, v in own.items()}
            )
            for t in (torch.float64, torch.bfloat16)
        )
        for label, *three in zip(("out", "lse"), found[0], exact, usual):
            check_errors(*three, f"{name} {q_lens} {label}")
        launchers = [r.launcher for r in variant_of(variant)._forwards.values()]
        if torch.cuda.get_device_capability() == (9, 0):
            assert {launcher.code.target for launcher in launchers} == {"hopper"}


@pytest.mark.parametrize(
    ("target", "schedule"), mostly([SHARED, KINDS[2], (None, None)], [*KINDS, SHARED, (None, None)])
)
def test_a_graph_is_replayed_with_other_lengths(target, schedule, captured):
    """Chunks become decodes in the same tensors; nothing waits for the device."""
    query, key, value = operands([64] * 5, behind=0)
    pools, table = paged((key, value), [ROWS] * 5, 16)
    starts, lens = starts_of([64] * 5), tensor([ROWS] * 5)

    def step():
        return CAUSAL(query, *pools, cu_seqlens_q=starts, kv_lens=lens, block_table=table, return_lse=True,
                      target=target, schedule=schedule)  # fmt: skip

    graph, found = captured(step)
    for q_lens in ([1] * 5, [300, 1, 3, 0, 1], [0, 0, 0, 0, 320], [0] * 5, [64] * 5):
        starts.copy_(starts_of(q_lens))
        lens.copy_(tensor([max(n, ROWS - 100 * b) for b, n in enumerate(q_lens)]))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, step())), q_lens


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_of_latent_chunks_is_replayed_with_other_lengths(heads, captured):
    """Which programs have which rows is found on the device."""
    variant = LATENT["causal"]
    query = torch.randn(1, heads, 320, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(5, 1, ROWS, 576, device="cuda", dtype=torch.bfloat16)
    (pool,), table = paged((cache,), [ROWS] * 5, 16)
    starts, lens = starts_of([64] * 5), tensor([ROWS] * 5)

    def step():
        return variant(query, pool, cu_seqlens_q=starts, kv_lens=lens, block_table=table, return_lse=True)

    graph, found = captured(step)
    for q_lens in ([1] * 5, [300, 1, 3, 0, 1], [0, 0, 0, 0, 320], [0] * 5, [64] * 5):
        starts.copy_(starts_of(q_lens))
        lens.copy_(tensor([max(n, ROWS - 100 * b) for b, n in enumerate(q_lens)]))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, step())), q_lens


def test_new_batches_compile_nothing():
    """But the modules of decodes, and the two of batches that may have long sequences."""
    variant = CAUSAL.replace(name="mixed_batches")

    def call(q_lens):
        made = operands(q_lens)
        pools, table = paged(made[1:], KV_LENS, 16)
        variant(made[0], *pools, cu_seqlens_q=starts_of(q_lens), kv_lens=tensor(KV_LENS), block_table=table)

    long = [2 * MOST_SHORT] * 5
    for q_lens in ([1] * 5, MIXED, long):
        call(q_lens)
    before = builds()
    for q_lens in ([0, 1, 1, 2, 1], [250, 0, 20, 1, 1], [*long[:4], 1000]):
        call(q_lens)
    assert builds() == before
    divided, shared = [r.launcher for r in variant_of(variant)._forwards.values()]
    assert type(divided) is KernelLauncher and divided.division is not None and type(shared) is SharedLauncher


@pytest.mark.parametrize("schedule", ["flash", "split_kv"])
def test_contents_are_looked_at_on_request(schedule):
    query, key, value = operands()
    pools, table = paged((key, value), [ROWS] * 5, 16)
    given = {
        "cu_seqlens_q": starts_of(MIXED),
        "kv_lens": tensor([ROWS] * 5),
        "block_table": table,
        "schedule": schedule,
    }
    falling = tensor([0, 300, 200, 304, 304, 305])
    with weft.settings(check=True):
        CAUSAL(query, *pools, **given)
        with pytest.raises(weft.WeftError, match=r"cu_seqlens_q\[2\]: expected at least 300, where sequence 1 begins"):
            CAUSAL(query, *pools, **{**given, "cu_seqlens_q": falling})
        with pytest.raises(weft.WeftError, match=r"kv_lens\[0\]: expected a length from 0 to"):
            CAUSAL(query, *pools, **{**given, "kv_lens": tensor([99999] * 5)})
    for wrong in (falling, tensor([-5, 10**9, 7, 2**31 - 1, -(2**31), 3])):  # unasked: nothing outside
        for target, one in [*KINDS, SHARED]:
            CAUSAL(query, *pools, **{**given, "cu_seqlens_q": wrong, "schedule": one}, target=target)
    torch.cuda.synchronize()
