"""Sequences of their own lengths, padded and packed: the cpu target and Triton's interpreter against float64."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_pos, score
from weft.codegen.launch import launching
from weft.compiler.planning.sources import kind_named
from weft.runtime.driver import builds

from ..support import check_variant, long_from, poisoned
from .cases import CAUSAL, cases, doc

slopes = weft.tensor("slopes", 2)
rows = weft.tensor("rows", 2)
columns = weft.tensor("columns", 2)

VARIANTS = cases("dense", "causal", "window", "cap", "lengths", "documents", "far", rows=80) | {
    "by head": (
        weft.Attention(mask=doc[head, q_pos] >= doc[head, kv_pos], name="by_head"),
        {"doc": torch.stack([torch.arange(80) // n for n in (7, 30)])},
    ),
}
BIASES = weft.Attention(
    score * (1.0 + 0.1 * slopes[batch, head]) + rows[head, q_pos] + columns[batch, kv_pos], masks.causal, name="biases"
)
TARGETS = ("cpu", "interpret")

PADDED = {
    "q_lens": torch.tensor([42, 0, 3, 33, 42, 20]),
    "kv_lens": torch.tensor([64, 5, 3, 0, 75, 40], dtype=torch.int32),
}
# one sequence without queries, one without keys, one of one token; rows behind the last one
PACKED = {
    "cu_seqlens_q": torch.tensor([0, 20, 20, 53, 54, 70, 90], dtype=torch.int32),
    "cu_seqlens_kv": torch.tensor([0, 33, 40, 40, 41, 90, 120]),
}


def padded(heads=2, kv_heads=1, dim=16, value_dim=None, dtype=torch.float32, **options):
    """Operands with NaN behind every length, and around."""
    made = [
        poisoned((6, heads, 42, dim), dtype, seed=0, **options),
        poisoned((6, kv_heads, 75, dim), dtype, seed=1, **options),
        poisoned((6, kv_heads, 75, value_dim or dim), dtype, seed=2, **options),
    ]  # fmt: skip
    for tensor, lens in zip(made, (PADDED["q_lens"], PADDED["kv_lens"], PADDED["kv_lens"])):
        for b, length in enumerate(lens.tolist()):
            tensor[b, :, length:] = torch.nan
    return made


def packed(heads=2, kv_heads=1, dim=16, value_dim=None, dtype=torch.float32, given=None, **options):
    """The same, one sequence after the other, with NaN behind the last one."""
    given = given or PACKED
    ends = [int(given["cu_seqlens_q"][-1]), int(given.get("cu_seqlens_kv", given["cu_seqlens_q"])[-1])]
    made = [
        poisoned((1, heads, ends[0] + 9, dim), dtype, seed=0, **options),
        poisoned((1, kv_heads, ends[1] + 9, dim), dtype, seed=1, **options),
        poisoned((1, kv_heads, ends[1] + 9, value_dim or dim), dtype, seed=2, **options),
    ]
    for tensor, end in zip(made, (ends[0], ends[1], ends[1])):
        tensor[:, :, end:] = torch.nan
    return made


KINDS = {"padded": (padded, PADDED), "packed": (packed, PACKED)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_masks_and_scores(name, kind, target):
    (make, lengths), (variant, operands) = KINDS[kind], VARIANTS[name]
    check_variant(variant, *make(), target=target, operands=operands | lengths)


@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["documents", "by head"])
def test_tiles_of_long_axes_that_are_measured_in_stretches(name, kind, order, monkeypatch):
    """Every axis counts as long, and 2 tiles of 16 are a stretch: their ends lie where each sequence has its own."""
    long_from(monkeypatch, 0, 2)
    (make, lengths), (variant, operands) = KINDS[kind], VARIANTS[name]
    ids = operands["doc"] if order == "sorted" else operands["doc"][:, torch.randperm(80)]
    schedule = (
        "flash/flash_forward=interpret:16x16w4s1/flash_dquery=interpret:16x16w4s1/flash_dkey_dvalue=interpret:16x16w4s1"
    )
    try:
        variant._variant.forget()
        given = {"doc": ids} | lengths
        check_variant(variant, *make(), target="interpret", operands=given, schedule=schedule)
    finally:
        variant._variant.forget()


@pytest.mark.parametrize("order", ["sorted", "unsorted"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["documents", "by head"])
def test_stretches_leave_the_runs_that_tiles_do(name, kind, order, monkeypatch):
    """What is visited is the same, not right alone: a place of other ends would mostly show as tiles too many."""
    found, made = [], launching.interpreted

    def written_down(kernel, binding, options):
        run = made(kernel, binding, options)

        def launch(programs, arguments, stream):
            if not programs or not binding.name.endswith("_spans"):
                return run(programs, arguments, stream)
            spans = arguments[binding.parameters.index("spans")].fill_(-1)  # not all slots have a tile
            run(programs, arguments, stream)
            return found.append((binding.name, spans.clone()))

        return launch

    monkeypatch.setattr(launching, "interpreted", written_down)
    (make, lengths), (variant, operands) = KINDS[kind], VARIANTS[name]
    ids = operands["doc"] if order == "sorted" else operands["doc"][:, torch.randperm(80)]
    schedule = "flash/flash_forward=interpret:16x16w4s1"
    try:
        for few in (200, 0):
            long_from(monkeypatch, few, 2)
            variant._variant.forget()
            tensors = [t.requires_grad_() for t in make()]
            out = variant(*tensors, doc=ids, target="interpret", schedule=schedule, **lengths)
            torch.autograd.grad(out, tensors, torch.ones_like(out))
    finally:
        variant._variant.forget()
    names = ["kv_spans", "kv_spans", "q_spans"]
    assert [kernel for kernel, _ in found] == [*names, *(n.replace("_", "_long_") for n in names)]
    for (_, by_tiles), (_, by_stretches) in zip(found[:3], found[3:]):
        assert torch.equal(by_tiles, by_stretches) and (by_tiles >= 0).any()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_operands(kind, target):
    make, lengths = KINDS[kind]
    operands = {"slopes": torch.rand(6, 2), "rows": torch.randn(2, 80), "columns": torch.randn(6, 80)}
    check_variant(BIASES, *make(), target=target, operands=operands | lengths, differentiate=tuple(operands))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32)], ids=["int", "tensor"])
def test_offsets(offset, kind, target):
    make, lengths = KINDS[kind]
    check_variant(CAUSAL, *make(), target=target, operands=lengths, q_offset=offset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("interpret", torch.float16), ("cpu", torch.float16), ("cpu", torch.bfloat16)],
    ids=str,
)
def test_dtypes(target, dtype, kind):
    make, lengths = KINDS[kind]
    check_variant(CAUSAL, *make(dtype=dtype), target=target, operands=lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_on_a_cpu(kind):
    make, lengths = KINDS[kind]
    made = make(dtype=torch.float64)
    torch.testing.assert_close(CAUSAL(*made, **lengths), CAUSAL.reference(*made, **lengths), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_views_widths_and_rows_that_are_not_aligned(kind, target):
    make, lengths = KINDS[kind]
    check_variant(CAUSAL, *make(dim=20, value_dim=40, blhd=True), target=target, operands=lengths)
    query, key, value = make()
    check_variant(CAUSAL, query[..., 1:], key[..., 1:], value[..., 1:], target=target, operands=lengths)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["q_lens", "kv_lens"])
def test_one_side_has_lengths(name, target):
    made = [poisoned((6, heads, length, 16), torch.float32, seed=n) for n, (heads, length) in
            enumerate([(2, 42), (1, 75), (1, 75)])]  # fmt: skip
    check_variant(CAUSAL, *made, target=target, operands={name: PADDED[name]})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "starts", [[0, 50], [0, 0, 0, 0], [0, 1, 2, 3, 4, 5], [0, 31, 63, 96], [0, 32, 64, 96, 97]], ids=str
)
def test_one_sequence_none_with_rows_and_tile_edges(starts, target):
    given = {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32)}
    check_variant(CAUSAL, *packed(given=given), target=target, operands=given)


@pytest.mark.parametrize("target", TARGETS)
def test_no_sequence_at_all(target):
    query, key, value = packed()
    query.requires_grad_()
    out, lse = CAUSAL(query, key, value, cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
                      cu_seqlens_kv=torch.zeros(1, dtype=torch.int32), target=target, return_lse=True)  # fmt: skip
    assert not out.any() and bool((lse == -torch.inf).all())
    out.sum().backward()
    assert not query.grad.any()


@pytest.mark.parametrize("call", [CAUSAL, CAUSAL.reference], ids=["call", "reference"])
def test_no_batch_row_at_all(call):
    query, lens = torch.randn(0, 2, 5, 16), torch.zeros(0, dtype=torch.int32)
    assert call(query, query, query, q_lens=lens, kv_lens=lens).shape == query.shape


def test_sequences_that_see_nothing_read_nothing():
    """An operand need not have what no sequence reads."""
    table = weft.Attention(score + weft.tensor("table", 1)[batch], name="table_of_some")
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 3, 16)
    starts = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_kv": torch.tensor([0, 3, 3])}
    query.requires_grad_()
    for call in (table, table.reference):
        out = call(query, key, key, **starts, table=torch.ones(1))
        assert not out[:, :, 3:].any() and out[:, :, :3].all()
        out.sum().backward()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_a_length_reaches_nothing(kind, target):
    """Not NaN in operands, nor in the gradient of the output, nor an index beyond an operand."""
    make, lengths = KINDS[kind]
    most = 75 if kind == "padded" else 49
    operands = {"slopes": torch.rand(6, 2), "rows": torch.randn(2, most), "columns": torch.randn(6, most)}
    leaves = [*make(), *operands.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = BIASES(*leaves[:3], **operands, **lengths, target=target, return_lse=True)
    exists = lse.detach() != -torch.inf
    if kind == "padded":
        assert not exists[3].any()
    assert not out[~exists].any() and not torch.isnan(out).any()
    dout = torch.where(exists[..., None], torch.randn_like(out), torch.nan)
    dlse = torch.where(exists, torch.randn_like(lse), torch.nan)
    found = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    assert all(not torch.isnan(g).any() for g in found)
    clean = [torch.nan_to_num(leaf.detach()).requires_grad_() for leaf in leaves]
    exact = BIASES.reference(*clean[:3], **dict(zip(operands, clean[3:])), **lengths, return_lse=True)
    wanted = torch.autograd.grad(exact, clean, [torch.nan_to_num(dout), torch.nan_to_num(dlse)])
    for got, right in zip(found, wanted):
        torch.testing.assert_close(got, right, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("query", "value")])
def test_some_gradients(wanted, kind, target):
    make, lengths = KINDS[kind]
    names = ("query", "key", "value")

    def gradients(call):
        given = {n: t.detach().clone() for n, t in zip(names, make())}
        leaves = [given[n].requires_grad_() for n in wanted]
        out = call(*given.values(), **lengths)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    mine, exact = gradients(lambda *x, **o: CAUSAL(*x, **o, target=target)), gradients(CAUSAL.reference)
    for got, right in zip(mine, exact):
        torch.testing.assert_close(got, right, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("kind", KINDS)
def test_latent_attention(kind, form, target):
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=32, rope=16), name="mla")
    make, lengths = KINDS[kind]
    query, cache, _ = make(heads=2, kv_heads=1, dim=48)
    trained = form == "expanded"
    leaves = [query[..., :32].clone(), cache, torch.randn(2, 32, 16) / 6, torch.randn(2, 32, 24) / 6]

    def results(call, **options):
        own = [t.detach().clone().requires_grad_(trained) for t in leaves]
        out = call(own[0], own[1], uk=own[2], uv=own[3], **lengths, **options)
        return [out, *torch.autograd.grad(out, own, torch.ones_like(out))] if trained else [out]

    for got, right in zip(results(mla, form=form, target=target), results(mla.reference), strict=True):
        torch.testing.assert_close(got, right, atol=5e-4, rtol=1e-3)


def test_runs_of_equal_sequences_and_many_of_them():
    """On a CPU equal neighbours are one dense call; 2,000 sequences of which none is as long as the next."""
    lens = torch.tensor([8, 8, 8, 0, 8, 3, 3] + [1 + i % 5 for i in range(2000)])
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    query, key, value = (torch.randn(1, h, int(starts[-1]), 8) for h in (2, 1, 1))
    out = CAUSAL(query, key, value, cu_seqlens_q=starts)
    exact = CAUSAL.reference(query.double(), key.double(), value.double(), cu_seqlens_q=starts)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_new_lengths_build_nothing(kind, target):
    make, lengths = KINDS[kind]
    make = make()
    for tensor in make:
        tensor.requires_grad_()
    CAUSAL(*make, **lengths, target=target).sum().backward()
    before = builds()
    halved = {n: t // 2 for n, t in lengths.items()}
    CAUSAL(*make, **halved, target=target).sum().backward()
    fewer = {n: t[:4] for n, t in lengths.items()} if kind == "packed" else halved
    CAUSAL(*make, **fewer, target=target).sum().backward()
    assert builds() == before


# -- the list of tiles -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most_sorted", [16384, 0], ids=["longest first", "in order"])
@pytest.mark.parametrize("lens", [[5, 0, 70, 33, 32, 1], [0], [200], [0, 0, 0, 64], list(range(40))], ids=str)
def test_the_list_of_tiles(lens, most_sorted):
    """Every tile once, rows behind all sequences too, and those that see most first."""
    from weft.compiler.planning.machines.hardware import this_machine
    from weft.compiler.planning.signature import Dtypes, Signature, Widths
    from weft.runtime.driver import compile_kernels

    signature = Signature(
        "forward", "cpu", Dtypes.all("fp32"), Widths(16, 16), sequences=kind_named("packed"), offset="bottom_right"
    )
    module = compile_kernels(CAUSAL, signature, this_machine(), "interpret").modules[0]
    starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    extent, number, block = int(starts[-1]) + 40, len(lens), 32
    n_slots = extent // block + number + 1
    work = torch.full((n_slots, 2), 77, dtype=torch.int32)
    grid = (number // 16 + 1,)
    module.query_work[grid](
        work, starts, starts, extent, extent, number, n_slots, BLOCK_Q=block, OTHERS=16, MOST_SORTED=most_sorted
    )
    listed = [(b, t) for b, t in work.tolist() if b >= 0]
    rooms = [*lens, 40]
    assert sorted(listed) == [(b, t) for b, room in enumerate(rooms) for t in range(-(-room // block))]
    if most_sorted:
        seen = [0 if b == number else lens[b] for b, _ in listed]
        assert seen == sorted(seen, reverse=True)
    for b, room in enumerate(rooms):  # later queries first
        assert [t for s, t in listed if s == b] == list(reversed(range(-(-room // block))))


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_were_not_checked_stay_within_the_operands(kind, monkeypatch):
    """On a GPU nobody looks at them unasked: kernels then cut them, and read no NaN from around the operands."""
    monkeypatch.setattr("weft.runtime.run.variant.check_contents", lambda *given: None)
    bad = {"padded": {"q_lens": [-5, 43, 1000, 2, 2, 2], "kv_lens": [2**30, -1, 76, 5, 5, 5]},
           "packed": {"cu_seqlens_q": [-7, 30, 20, 2**30], "cu_seqlens_kv": [0, 500, 3, 40]}}[kind]  # fmt: skip
    shape = (6, 2, 42, 16) if kind == "padded" else (1, 2, 60, 16)
    made = [poisoned(shape, torch.float32, seed=n).requires_grad_() for n in range(3)]
    out = CAUSAL(*made, **{n: torch.tensor(x) for n, x in bad.items()}, target="interpret")
    dout = torch.ones_like(out)
    found = [out, *torch.autograd.grad(out, made, dout)]
    assert all(torch.isfinite(x).all() for x in found)


def test_indices_are_proved_sequence_by_sequence():
    """What all lengths together could do, no sequence need do: positions and lengths of one belong together."""
    last_first = weft.Attention(score + columns[batch, kv_len - 1 - kv_pos], name="last_first")
    given = {"columns": torch.randn(6, 75)}
    check_variant(last_first, *padded(), operands=given | PADDED, differentiate=("columns",))
    with pytest.raises(weft.WeftError, match=r"sequence 4: .*columns"):
        last_first(*padded(), **PADDED, columns=torch.randn(6, 70))


# -- errors ------------------------------------------------------------------------------------------------------------
REFUSED = {
    "both kinds": ({"q_lens": torch.ones(2, dtype=torch.int32), "cu_seqlens_q": torch.zeros(3, dtype=torch.int32)},
                   r"expected lengths of one kind, got q_lens, cu_seqlens_q: q_lens and kv_lens are for padded"),
    "list": ({"q_lens": [3, 4]}, r"q_lens: expected a tensor int32 or int64 \[2\], got list; torch.tensor"),
    "dtype": ({"kv_lens": torch.ones(2)}, r"kv_lens: expected a tensor int32 or int64 \[2\], got torch.float32 \[2\]"),
    "shape": ({"q_lens": torch.ones(3, dtype=torch.int32)}, r"q_lens: .* one for each batch row, got \[3\]"),
    "dims": ({"q_lens": torch.ones(2, 1, dtype=torch.int32)}, r"q_lens: expected a tensor .* got torch.int32 \[2, 1\]"),
    "device": ({"q_lens": torch.ones(2, dtype=torch.int32, device="meta")}, r"q_lens: expected device cpu"),
    "not packed": ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)},
                   r"query: expected packed operands \[1, heads, total, dim\] with cu_seqlens_q, got \[2, 2, 8, 16\]"),
    "negative": ({"q_lens": torch.tensor([3, -1])}, r"q_lens\[1\]: expected a length from 0 to 8.* got -1"),
    "too long": ({"kv_lens": torch.tensor([9, 3])}, r"kv_lens\[0\]: expected a length from 0 to 8.* of key, got 9"),
    "offset": ({"q_lens": torch.tensor([3, 1]), "q_offset": torch.zeros(3, dtype=torch.int32)},
               r"q_offset: expected an int or an int32 tensor \[2\]"),
}  # fmt: skip
REFUSED_PACKED = {
    "start": ([1, 3, 8], r"cu_seqlens_q\[0\]: expected 0, where the first sequence begins, got 1"),
    "falls": ([0, 5, 3], r"cu_seqlens_q\[2\]: expected at least 5, where sequence 1 begins, got 3"),
    "beyond": ([0, 5, 9], r"cu_seqlens_q\[2\]: expected at most 8, the rows of query, got 9"),
    "empty": ([], r"cu_seqlens_q: .* got no entry"),
}


@pytest.mark.parametrize("method", ["call", "reference", "plan"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, method):
    options, message = REFUSED[name]
    call = {"call": CAUSAL, "reference": CAUSAL.reference, "plan": CAUSAL.plan}[method]
    query = torch.randn(2, 2, 8, 16)
    with pytest.raises(weft.WeftError, match=message):
        call(query, query, query, **options)


@pytest.mark.parametrize("method", ["call", "reference", "plan"])
@pytest.mark.parametrize("name", REFUSED_PACKED)
def test_packed_calls_that_are_refused(name, method):
    starts, message = REFUSED_PACKED[name]
    call = {"call": CAUSAL, "reference": CAUSAL.reference, "plan": CAUSAL.plan}[method]
    query = torch.randn(1, 2, 8, 16)
    with pytest.raises(weft.WeftError, match=message):
        call(query, query, query, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))


def test_starts_that_cannot_be_left_out_or_do_not_match():
    query, key = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 9, 16)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(weft.WeftError, match=r"cu_seqlens_kv: missing; .* query has 8 rows and key 9"):
        CAUSAL(query, key, key, cu_seqlens_q=starts)
    with pytest.raises(weft.WeftError, match=r"cu_seqlens_q: missing"):
        CAUSAL(query, key, key, cu_seqlens_kv=starts)
    with pytest.raises(weft.WeftError, match=r"cu_seqlens_kv: expected as many entries as in cu_seqlens_q"):
        CAUSAL(query, key, key, cu_seqlens_q=starts, cu_seqlens_kv=torch.tensor([0, 4, 9]))
    same = CAUSAL(query, query, query, cu_seqlens_kv=starts)
    assert torch.equal(same, CAUSAL(query, query, query, cu_seqlens_q=starts, cu_seqlens_kv=starts))


def test_other_schedules_and_targets_say_what_they_lack():
    query = torch.randn(2, 2, 8, 16)
    lens = torch.tensor([3, 8])
    for schedule in ("streaming", "standard"):
        with pytest.raises(weft.UnavailableError, match=rf"schedule {schedule} computes sequences of one length"):
            CAUSAL(query, query, query, q_lens=lens, target="interpret", schedule=schedule)
    sizes = weft.shape(batch=2, heads=2, q_len=80, head_dim=64)
    allowed = CAUSAL.replace(mask=weft.tensor("allowed", 3, bool)[batch, q_pos, kv_pos], name="allowed")
    said = allowed.explain(sizes, device="h100", q_lens=lens)
    said = " ".join(said.split())
    assert "hopper: a mask that reads a tensor by both positions pair by pair is for the triton target" in said
    assert "flash_forward=triton" in said


def test_what_hopper_computes_of_lengths():
    lens, sizes = torch.tensor([3, 8]), weft.shape(batch=2, heads=2, q_len=80, head_dim=64)
    documents = CAUSAL.replace(mask=CAUSAL.mask & weft.masks.document(weft.tensor("doc", 2, int)), name="documents")
    for variant in (CAUSAL, documents):
        said = variant.explain(sizes, device="h100", q_lens=lens)
        assert "flash_forward=hopper" in said and "flash_backward=hopper" in said
        said = variant.explain(sizes, device="h100", q_lens=lens, deterministic=True)
        assert "flash_dquery=hopper" in said and "flash_dkey_dvalue=hopper" in said
    sizes, starts = weft.shape(heads=2, q_len=80, head_dim=256), torch.tensor([0, 80])
    wide = CAUSAL.explain(sizes, device="h100", cu_seqlens_q=starts)
    assert "flash_dquery=hopper" in wide and "flash_dkey_dvalue=hopper" in wide


# -- plans -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_a_plan_counts_the_pairs_of_sequences(target):
    starts, sizes = torch.arange(0, 4097, 1024), weft.shape(heads=2, q_len=4096, head_dim=128)
    packed_plan = CAUSAL.plan(sizes, device="h100", target=target, cu_seqlens_q=starts)
    dense = CAUSAL.plan(weft.shape(batch=4, heads=2, q_len=1024, head_dim=128), device="h100", target=target)
    assert packed_plan.useful("forward") == dense.useful("forward")
    assert packed_plan.useful("backward") == dense.useful("backward")
    assert packed_plan.flops("forward") == dense.flops("forward")
    assert [k.name for k in packed_plan.kernels][:2] == ["query_work", "flash_forward"]


def test_sources_name_what_they_read():
    query = torch.randn(2, 2, 8, 16)
    padded_source = CAUSAL.source(query, query, query, kv_lens=torch.tensor([3, 8]), target="interpret")
    assert "q_lens, kv_lens" in padded_source and "cu_q" not in padded_source
    packed_source = CAUSAL.source(*[query[:1]] * 3, cu_seqlens_q=torch.tensor([0, 8]), target="interpret")
    assert "def query_work(" in packed_source and "cu_q, cu_kv, work" in packed_source


def test_a_plan_of_packed_sequences_that_are_shorter_than_a_tile():
    """Of half a tile each the diagonals were nothing, by which a number of programs was divided."""
    table = weft.tensor("table", 2)
    distance = weft.maximum(weft.minimum(kv_pos - q_pos, 9), -9) + 9
    declared = weft.Attention(score + table[head, distance], masks.causal, name="short_sequences")
    query, key, value = torch.randn(3, 1, 4, 40, 64).bfloat16()
    starts, entries = torch.tensor([0, 9, 40], dtype=torch.int32), torch.zeros(4, 19, requires_grad=True)
    told = declared.explain(query, key, value, table=entries, cu_seqlens_q=starts, device="h100", deterministic=True)
    assert "flash_ddiagonals" in told


# -- jagged nested tensors ---------------------------------------------------------------------------------------------
def jagged(heads, dim, offsets, seed):
    """A nested tensor [B, heads, j, dim] and the leaf [total, heads, dim] that it is a view of."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(int(offsets[-1]), heads, dim, generator=generator).requires_grad_()
    return torch.nested.nested_tensor_from_jagged(rows, offsets=offsets).transpose(1, 2), rows


@pytest.mark.parametrize("q_offset", [None, 2])
@pytest.mark.parametrize("same", [True, False])
def test_nested_tensors_are_packed_sequences(same, q_offset):
    starts = torch.tensor([0, 5, 5, 14]), torch.tensor([0, 7, 10, 20])
    starts = (starts[0], starts[0]) if same else starts
    query, q_rows = jagged(4, 16, starts[0], 0)
    (key, k_rows), (value, v_rows) = (jagged(2, 16, starts[1], seed) for seed in (1, 2))
    packed_rows = [t.transpose(0, 1)[None] for t in (q_rows, k_rows, v_rows)]
    exact, exact_lse = CAUSAL.reference(
        *packed_rows, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], q_offset=q_offset, return_lse=True
    )
    wanted = torch.autograd.grad(exact.sum(), (q_rows, k_rows, v_rows), retain_graph=True)
    for call in (CAUSAL, CAUSAL.reference):
        out, lse = call(query, key, value, q_offset=q_offset, return_lse=True)
        assert out.is_nested and (out + query).shape == query.shape  # the same ragged dimension
        torch.testing.assert_close(out.values()[None], exact)
        torch.testing.assert_close(lse.values()[None], exact_lse)
        for got, right in zip(torch.autograd.grad(out.values().sum(), (q_rows, k_rows, v_rows)), wanted):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4)


def test_a_plan_of_nested_tensors_is_that_of_packed_ones():
    starts = torch.tensor([0, 5, 14])
    given = [jagged(heads, 16, starts, 0) for heads in (4, 2, 2)]
    nested_ones, packed_ones = [each for each, _ in given], [rows.transpose(0, 1)[None] for _, rows in given]
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    for method in (CAUSAL.plan, CAUSAL.explain, CAUSAL.source):
        assert str(method(*nested_ones)) == str(method(*packed_ones, **lengths))
        with pytest.raises(weft.WeftError, match=r"cu_seqlens_q, cu_seqlens_kv: expected none with nested tensors"):
            method(*nested_ones, **lengths)
        with pytest.raises(weft.WeftError, match=r"query: expected a nested tensor .* dimension 1 ragged"):
            method(*[each.transpose(1, 2) for each in nested_ones])
    with pytest.raises(weft.WeftError, match=r"quantize: x: .* got a nested one; quantise its rows, x.values"):
        weft.fp8.quantize(nested_ones[1])
    eighth = nested_ones[1].detach().transpose(1, 2)
    eighth = torch.nested.nested_tensor_from_jagged(eighth.values().to(torch.float8_e4m3fn), offsets=eighth.offsets())
    text = str(CAUSAL.plan(nested_ones[0], *[eighth.transpose(1, 2)] * 2, k_descale=2.0))
    assert "keys and values e4m3" in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_plan_refuses_nested_tensors_that_are_not_all_jagged():
    strided = torch.nested.nested_tensor([torch.randn(2, 5, 16), torch.randn(2, 6, 16)])
    query, dense = jagged(2, 16, torch.tensor([0, 5, 14]), 0)[0], torch.randn(2, 2, 9, 16)
    for operands in ([strided] * 3, (query, dense, dense), (strided, dense, dense)):
        with pytest.raises(weft.WeftError, match=r"query: expected a dense tensor, got a nested one; .*=torch.jagged"):
            CAUSAL.plan(*operands)
    with pytest.raises(weft.WeftError, match="query: expected 4 dimensions"):
        CAUSAL.plan(torch.tensor(1.0), dense, dense)


def test_nested_tensors_that_do_not_serve():
    starts, others = torch.tensor([0, 5, 14]), torch.tensor([0, 6, 14])
    query, _ = jagged(2, 16, starts, 0)
    with pytest.raises(weft.WeftError, match=r"key: expected a nested tensor .* dimension 1 ragged; pass x.transpose"):
        CAUSAL(query, query.transpose(1, 2), query)
    with pytest.raises(weft.WeftError, match=r"value: expected the lengths of key, made from the same offsets"):
        CAUSAL(query, query, jagged(2, 16, others, 1)[0])
    with pytest.raises(
        weft.WeftError, match=r"query: expected a dense tensor, got a nested one; pad it, .* and give q"
    ):
        CAUSAL(query, torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16))
    turned = query.transpose(1, 2)
    with pytest.raises(weft.WeftError, match=r"query: expected a nested .* dimension 1 ragged; pass x.transpose"):
        CAUSAL(turned, turned, turned)
    holes = torch.nested.narrow(
        torch.randn(2, 8, 2, 16), 1, torch.tensor([0, 0]), starts[1:] - starts[:-1] - 2, layout=torch.jagged
    )
    with pytest.raises(weft.WeftError, match=r"value: .* without holes, .* copy it, x.transpose.1, 2..contiguous"):
        CAUSAL(*[holes.transpose(1, 2)] * 3)


@pytest.mark.parametrize("q_offset", [None, 2])
def test_nested_tensors_take_no_lengths_besides(q_offset):
    """They were left out of a call with an offset, and of the reference, without a word."""
    query, _ = jagged(2, 16, torch.tensor([0, 5, 14]), 0)
    for call in (CAUSAL, CAUSAL.reference):
        with pytest.raises(weft.WeftError, match=r"kv_lens: expected none with nested tensors"):
            call(query, query, query, q_offset=q_offset, kv_lens=torch.tensor([5, 3]))
    window = weft.Attention(mask=weft.q_pos - weft.kv_pos < weft.scalar("window", int), name="window")
    with pytest.raises(weft.WeftError, match=r"kv_lens: expected none with nested tensors"):  # whatever else is wrong
        window(query, query, query, q_offset=q_offset, kv_lens=torch.tensor([5, 3]))
