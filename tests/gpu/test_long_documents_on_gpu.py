"""Documents in long sequences, whose tiles are measured in stretches, against float64 attention of single documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.measured import LONG_AXIS

from ..support import check_errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ids = weft.tensor("ids", 2, int)
by_head = weft.tensor("by_head", 2, int)
DOCUMENTS = weft.Attention(mask=masks.causal & masks.document(ids), name="long_documents")
OF_HEADS = weft.Attention(mask=masks.causal & (by_head[head, q_pos] == by_head[head, kv_pos]), name="long_by_head")
SEEN = 4  # documents that are looked at


def documents(rows: int, length: int, order: str, seed: int = 5) -> Tensor:
    """Ids of documents of any length: sorted, in any order, or each in several parts."""
    generator = torch.Generator().manual_seed(seed)
    number = max(2, length // 700)
    found = torch.randint(0, number, (rows, length), generator=generator).sort().values
    if order == "any order":
        found = torch.randperm(number, generator=generator)[found]
    if order == "parts":
        size = next(n for n in range(250, length + 1) if length % n == 0)
        parts = torch.randperm(length // size, generator=generator)
        found = found.view(rows, -1, size)[:, parts].reshape(rows, length)
    return (found + (1 << 40)).cuda()


def operands(rows: int, length: int, heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(11)
    return [
        torch.randn(rows, h, length, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def of_document(given: list[Tensor], row: int, heads: slice, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """out, dquery, dkey, dvalue of the tokens of one document, in plain torch. heads: of queries, whole groups."""
    group = given[0].shape[1] // given[1].shape[1]
    kv = slice(heads.start // group, -(-heads.stop // group))
    query, key, value, dout = (
        t[row, h][:, tokens].to(dtype) for t, h in zip(given, (heads, kv, kv, heads))
    )  # fmt: skip
    leaves = [t.requires_grad_() for t in (query, key, value)]
    scores = query @ key.repeat_interleave(group, 0).mT / query.shape[-1] ** 0.5
    later = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device="cuda").triu(1)
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 0)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(found: list[Tensor], given: list[Tensor], row: int, heads: slice, tokens: Tensor, label: str) -> None:
    exact = of_document(given, row, heads, tokens, torch.float64)
    plain = of_document(given, row, heads, tokens, torch.bfloat16)
    group = given[0].shape[1] // given[1].shape[1]
    kv = slice(heads.start // group, -(-heads.stop // group))
    for name, got, true, close in zip(("out", "dquery", "dkey", "dvalue"), found, exact, plain):
        mine = got[row, kv if name in ("dkey", "dvalue") else heads][:, tokens]
        check_errors(mine, true, close, f"{label} {name}")


def computed(variant: weft.Attention, given: list[Tensor], **options: object) -> list[Tensor]:
    query, key, value, dout = (t.detach() for t in given)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = variant(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def skip_without(target: str) -> None:
    if target == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper target needs compute capability 9.0")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("order", ["sorted", "any order", "parts"])
@pytest.mark.parametrize("length", [LONG_AXIS, LONG_AXIS + 1, 20_000, 66_000, 200_000])
def test_documents(length: int, order: str, deterministic: bool, target: str) -> None:
    skip_without(target)
    rows = 1 if length > 70_000 else 2
    marks, given = documents(rows, length, order), operands(rows, length, 4, 2, 64)
    found = computed(DOCUMENTS, given, ids=marks, target=target, deterministic=deterministic)
    for row in range(rows):
        for mark in (marks[row, 0], *marks[row, torch.randint(0, length, (SEEN,))], marks[row, -1]):
            tokens = (marks[row] == mark).nonzero()[:, 0]
            check(found, given, row, slice(0, 4), tokens, f"{target} {order} {length} row {row} document {mark}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("length", [8192, 65_536])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_between_the_parts_of_documents_are_not_visited(dim: int, length: int, target: str) -> None:
    """NaN in one document's values and gradients of the output stays there: tiles have rows of one document here."""
    skip_without(target)
    marks = (torch.arange(length) // 768 % 8)[None].expand(2, -1).cuda()  # document 1 lies between parts of others
    given = operands(2, length, 4, 2, dim)
    for tensor in given[2:]:
        tensor[:, :, marks[0] == 1] = torch.nan
    found = computed(DOCUMENTS, given, ids=marks, target=target)
    for name, tensor in zip(("out", "dquery", "dkey", "dvalue"), found):
        assert tensor[:, :, marks[0] != 1].isfinite().all(), name
    tokens = (marks[1] == 6).nonzero()[:, 0]
    check(found, given, 1, slice(0, 4), tokens, f"{target} {length} document 6")


@pytest.mark.slow(10)
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_masks_that_differ_by_head(target: str) -> None:
    skip_without(target)
    marks, given = documents(4, 30_000, "sorted"), operands(1, 30_000, 4, 4, 128)
    found = computed(OF_HEADS, given, by_head=marks, target=target)
    for h in range(4):
        for mark in (marks[h, 0], *marks[h, torch.randint(0, 30_000, (2,))], marks[h, -1]):
            tokens = (marks[h] == mark).nonzero()[:, 0]
            check(found, given, 0, slice(h, h + 1), tokens, f"{target} head {h} document {mark}")


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_sequences_of_their_own_lengths(kind: str) -> None:
    """A long one, a short one, an empty one; NaN behind each. Measured masks of such are not for hopper."""
    target, lengths = "triton", [41_000, 300, 0, 17_500]
    rows = max(lengths) if kind == "padded" else sum(lengths) + 50  # lengths on the device are not looked at
    marks = documents(len(lengths), rows, "sorted")
    if kind == "padded":
        given = operands(len(lengths), max(lengths), 4, 2, 64)
        for b, length in enumerate(lengths):
            for tensor in given:
                tensor[b, :, length:] = torch.nan
        lens = torch.tensor(lengths, device="cuda")
        options, first = {"q_lens": lens, "kv_lens": lens}, [0] * len(lengths)
    else:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        given = operands(1, int(starts[-1]) + 50, 4, 2, 64)
        for tensor in given:
            tensor[:, :, int(starts[-1]) :] = torch.nan
        cu = starts.int().cuda()
        options, first = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}, starts.tolist()
    found = computed(DOCUMENTS, given, ids=marks, target=target, **options)
    for b, length in enumerate(lengths):
        for place in [0, length // 3, length - 1] if length else []:
            tokens = (marks[b, :length] == marks[b, place]).nonzero()[:, 0] + first[b]
            row = b if kind == "padded" else 0
            check(found, given, row, slice(0, 4), tokens, f"{target} {kind} sequence {b} at {place}")


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_a_graph_measures_what_it_finds(target: str) -> None:
    """Nothing of a capture depends on what ids are: replays see those that are there."""
    skip_without(target)
    length = 40_000
    marks, given = documents(1, length, "sorted"), operands(1, length, 4, 2, 64)
    place = torch.zeros_like(marks)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        computed(DOCUMENTS, given, ids=place, target=target)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = computed(DOCUMENTS, given, ids=place, target=target)
    for seed in (1, 2):
        place.copy_(documents(1, length, "sorted", seed))
        graph.replay()
        for at in (0, 12_345, length - 1):
            tokens = (place[0] == place[0, at]).nonzero()[:, 0]
            check(found, given, 0, slice(0, 4), tokens, f"{target} replayed at {at}")


@pytest.mark.slow(14)
def test_ids_as_far_apart_as_can_be() -> None:
    """Neighbours lie at both ends of int64, so that every stretch may hold any document."""
    length = 20_000
    marks, given = documents(1, length, "sorted"), operands(1, length, 4, 2, 64)
    far = torch.where(marks % 2 == 0, 2**62 + marks, -(2**62) - marks)
    found = computed(DOCUMENTS, given, ids=far)
    for at in (0, 9_999, length - 1):
        tokens = (far[0] == far[0, at]).nonzero()[:, 0]
        check(found, given, 0, slice(0, 4), tokens, f"far apart at {at}")


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_short_and_long_calls_take_turns_from_the_first_on(target: str) -> None:
    """The first short call compiles nothing for long axes, and each later one finds what it needs."""
    variant = DOCUMENTS.replace(name=f"turns_{target}")
    for length in (2048, LONG_AXIS + 1024, 2048, LONG_AXIS + 1024):
        given = operands(1, length, 2, 1, 64)
        found_ids = documents(1, length, "sorted")
        leaves = [t.detach().requires_grad_() for t in given[:3]]
        out = variant(*leaves, ids=found_ids, target=target)
        found = [out.detach(), *torch.autograd.grad(out, leaves, given[3])]
        tokens = (found_ids[0] == found_ids[0, -1]).nonzero()[:, 0]
        check(found, given, 0, slice(0, 2), tokens, f"{target} {length}")
