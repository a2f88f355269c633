"""Packed queries over pages whose sequences are shared out: long ones to flash, short ones to split_kv, in one call."""

from __future__ import annotations

import pytest
import torch

from weft.codegen.launch.division import Division
from weft.codegen.launch.launcher import KernelLauncher
from weft.codegen.launch.shared import SharedLauncher
from weft.compiler.planning.signature import MOST_SHARED, MOST_SHORT, has_few_queries, serves_of
from weft.compiler.planning.sources import PACKED, PACKED_PAGED
from weft.compiler.planning.splits import Parts
from weft.runtime.driver import builds
from weft.runtime.run.variant import variant_of

from ..attention import test_packed_pages as packed
from ..attention.test_packed_pages import CAUSAL, OTHERS, check, planned, starts_of
from ..attention.test_pages import VARIANTS, paged
from ..support import mostly

BOTH = ("interpret", None)
AROUND = (70, 0, 1, MOST_SHORT, MOST_SHORT + 1, 7)  # queries
KV_LENS = torch.tensor([90, 5, 3, 64, 96, 40], dtype=torch.int32)
NO_KEYS = torch.tensor([90, 5, 0, 70, 0, 2], dtype=torch.int32)  # none, fewer than queries
SHARED = ["flash_forward", "join_parts", "query_work", "split_forward"]


def operands(q_lens, heads=2, kv_heads=1, **more):
    """One group of heads; test_groups_of_heads has others."""
    return packed.operands(q_lens, heads, kv_heads, **more)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that calls launch."""
    names, due = [], KernelLauncher._due

    def recorded(self, *arguments):
        found = due(self, *arguments)
        names.extend(self.code.kernels[n].name for n in found)
        return found

    monkeypatch.setattr(KernelLauncher, "_due", recorded)
    return names


def launchers(variant):
    return [type(ready.launcher) for ready in variant_of(variant)._forwards.values()]


@pytest.mark.parametrize("name", mostly(("window", "alibi", "sink", "far"), [n for n in VARIANTS if n != "dropout"]))
def test_masks_scores_sinks_and_normalizers(name, launched):
    variant, given = VARIANTS[name]
    for kv_lens in (KV_LENS,) if name == "documents" else (KV_LENS, NO_KEYS):  # which no position lies before
        check(variant, operands(AROUND), AROUND, kv_lens, kind=BOTH, lse=name != "sigmoid", **given)
    assert sorted({*launched}) == SHARED


@pytest.mark.parametrize("name", mostly(("windows by head",), [*OTHERS]))
def test_what_differs_by_head_or_is_read_from_tables(name):
    variant, given = OTHERS[name]
    lens = torch.tensor([90, 5, 3, 64, 75, 40], dtype=torch.int32)
    check(variant, operands(AROUND), AROUND, lens, kind=BOTH, **{p.name: given for p in variant.canonical.parameters})


@pytest.mark.parametrize(
    "q_lens",
    [
        (MOST_SHORT,) * 6, (MOST_SHORT + 1,) * 6, (0, 0, 0, 0, 0, 90), (0,) * 6, (90, 1, 1, 1, 1, 1),
        (0, 33, 90, 0, 17, 80),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("parts", [1, 5])
def test_batches(q_lens, parts, monkeypatch):
    """All on one side, none at all, the long one first and last; rows of no sequence; one part, and more than tiles."""
    monkeypatch.setattr(Division, "_parts", lambda *sizes: Parts(parts, 1))
    variant = CAUSAL.replace(name=f"shared_{parts}")
    lens = torch.tensor([96, 70, 91, 64, 75, 96], dtype=torch.int32)
    check(variant, operands(q_lens, behind=5 if sum(q_lens) else 80), q_lens, lens, kind=BOTH)
    assert launchers(variant)[-1] is SharedLauncher


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (6, 2)])
def test_groups_of_heads(heads, kv_heads):
    check(CAUSAL, operands(AROUND, heads, kv_heads, dim=20, value_dim=40), AROUND, KV_LENS, kind=BOTH)


@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5, -2, 20, 0, 20], dtype=torch.int32)], ids=["int", "tensor"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets(offset, dtype):
    check(CAUSAL, operands(AROUND), AROUND, KV_LENS, page=8, kind=BOTH, dtype=dtype, q_offset=offset)


def test_random_batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        q_lens, lens = (torch.randint(0, 97, (6,), generator=generator) for _ in range(2))
        q_lens = torch.where(torch.rand(6, generator=generator) < 0.4, q_lens.clamp(max=2), q_lens).tolist()
        check(CAUSAL, operands(q_lens, behind=70), q_lens, lens.int(), kind=BOTH)


def test_many_sequences(monkeypatch):
    """More than a program of the list looks at together, and more slots than tiles."""
    monkeypatch.setattr(Division, "_parts", lambda *sizes: Parts(1, 1))
    number = 1100
    q_lens = torch.zeros(number, dtype=torch.int64)
    q_lens[5::70], q_lens[7], q_lens[1090], q_lens[1095] = MOST_SHORT, 66, 110, 1
    query = torch.randn(1, 1, int(q_lens.sum()) + 3, 16)
    pool = torch.randn(8, 1, 16, 16)
    table = torch.randint(0, 8, (number, 5), generator=torch.Generator().manual_seed(1)).int()
    lens = torch.full((number,), 80).int()
    given = {"cu_seqlens_q": starts_of(q_lens.tolist()), "kv_lens": lens, "block_table": table, "return_lse": True}
    variant = CAUSAL.replace(name="many_shared")
    found = variant(query, pool, pool, **given, target="interpret")
    for got, exact in zip(found, variant.reference(query, pool, pool, **given)):
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-4)
    assert launchers(variant) == [SharedLauncher]


# -- which kernels run -------------------------------------------------------------------------------------------------
def call(variant, q_lens, **options):
    query, key, value = operands(q_lens, behind=0)
    *pools, table = paged(key, value, 16, KV_LENS)
    given = {"cu_seqlens_q": starts_of(q_lens), "kv_lens": KV_LENS, "block_table": table}
    return variant(query, *pools, **given, **options)


def test_the_host_decides_by_sums_alone(launched):
    variant = CAUSAL.replace(name="by_sums")
    for q_lens, wanted in (
        ((1,) * 6, ["split_forward", "join_parts"]),
        ((0, 0, 0, 0, 0, MOST_SHORT + 5), ["split_forward", "join_parts"]),  # right, though it is a long one
        ((1, 1, 1, 1, 1, MOST_SHORT + 1), ["query_work", "flash_forward", "split_forward", "join_parts"]),
    ):
        launched.clear()
        call(variant, q_lens, target="interpret")
        assert launched == wanted, q_lens
    for schedule in ("flash", "split_kv"):
        launched.clear()
        call(variant, AROUND, target="interpret", schedule=schedule)
        assert "split_forward" not in launched if schedule == "flash" else "flash_forward" not in launched


def test_new_lengths_compile_nothing():
    variant = CAUSAL.replace(name="shared_lengths")
    call(variant, AROUND, target="interpret")
    before = builds()
    for q_lens in ((96,) * 6, (0, 1, 1, 1, 1, 80), (MOST_SHORT,) * 6):
        call(variant, q_lens, target="interpret")
    assert builds() == before and launchers(variant) == [SharedLauncher]


def test_what_has_no_divided_keys_is_flash_for_all():
    variant, given = VARIANTS["dropout"]
    variant = variant.replace(name="shared_dropped")
    check(variant, operands(AROUND), AROUND, KV_LENS, kind=BOTH, **given)
    check(variant, operands(AROUND), AROUND, KV_LENS, kind=("cpu", None), **given)
    assert SharedLauncher not in launchers(variant)


@pytest.mark.parametrize("number", [1, 2, 8, 300, MOST_SHARED, MOST_SHARED + 1])
def test_shares(number):
    few_queries, most = number + MOST_SHORT - 1, MOST_SHORT * number
    assert has_few_queries("forward", PACKED_PAGED, few_queries, number)
    assert serves_of("forward", PACKED_PAGED, few_queries, number) == "all"
    long = "long" if 1 < number <= MOST_SHARED else "all"
    assert serves_of("forward", PACKED_PAGED, most + number, number) == long
    assert not has_few_queries("forward", PACKED_PAGED, most + number, number)
    assert serves_of("forward", PACKED, most + number, number) == "all"


def test_a_plan_has_both():
    sizes, given = planned((1,) * 7 + (512,))
    plan = CAUSAL.plan(sizes, device="h200", **given)
    assert [k.name for k in plan.kernels] == ["query_work", "flash_forward", "split_forward", "join_parts"]
    assert [code.signature.serves for code in plan.codes] == ["long", "short"]
    assert [code.target for code in plan.codes] == ["hopper", "triton"] and plan.schedule.algorithm == "flash"
    said = " ".join(CAUSAL.explain(sizes, device="h200", **given).split())
    assert f"sequences with up to {MOST_SHORT} queries are computed by split_kv/split_forward=triton:" in said
    assert "1 sequence of 512 queries" in said and "7 sequences of 1 query" in said
    text = CAUSAL.source(sizes, device="h200", **given)
    assert "# ######## Of sequences with up to 64 queries\n" in text and "def flash_forward(" in text
    for lens in ((512,) * 8, (MOST_SHORT,) * 8):
        sizes, given = planned(lens)
        assert "no sequence is there" not in CAUSAL.explain(sizes, device="h200", **given)
    assert len(CAUSAL.plan(sizes, device="h200", schedule="flash", **given).codes) == 1


def test_the_plan_is_what_calls_compute():
    variant = CAUSAL.replace(name="shared_plan")
    call(variant, AROUND, target="interpret")
    (ready,) = variant_of(variant)._forwards.values()
    query, key, value = operands(AROUND, behind=0)
    *pools, table = paged(key, value, 16, KV_LENS)
    given = {"cu_seqlens_q": starts_of(AROUND), "kv_lens": KV_LENS, "block_table": table, "target": "interpret"}
    assert variant.plan(query, *pools, **given).codes == (ready.launcher._long.code, ready.launcher._short.code)
    assert variant(query, *pools, **given).shape == query.shape
