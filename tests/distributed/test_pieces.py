"""Rows that come run by run, and parts of calls whose gradients are summed over parts of the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft import kv_pos, masks, q_pos, score
from weft.distributed import plan
from weft.distributed.copies import copy_rows, joined_copy
from weft.distributed.pieces import Pieces
from weft.distributed.placed import placed, positions_divided_by
from weft.distributed.portions import Given, Portions, Sum, gradients
from weft.ir.expr import expression
from weft.ir.reference import evaluate
from weft.runtime.call import Call, Choices, Dense
from weft.runtime.run.variant import variant_of

slopes = weft.tensor("slopes", 1)
ALIBI = weft.Attention(score - slopes[weft.head] * (q_pos - kv_pos), masks.causal, name="alibi")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [1, 3, 16, 64])
def test_copies_in_wide_elements_have_the_same_bits(dtype: torch.dtype, width: int) -> None:
    def of(*shape: int) -> torch.Tensor:
        bits = torch.randint(-128, 128, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.int8)
        return bits.view(dtype)  # NaN of any kind among them

    def bits_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.int8)

    whole = of(2, 3, 40, width)
    for rows in (whole, whole[:, 1:], whole[:, :, 5:21], whole.transpose(1, 2)[:, 2:5], whole[..., width // 2 :]):
        for room in (of(*rows.shape), of(*rows.shape[:2], rows.shape[2] + 3, rows.shape[3])[:, :, 3:]):
            copy_rows(room, rows)
            assert torch.equal(bits_of(room), bits_of(rows))
    parts = whole[:, :, :7], whole[:, :, 7:7], whole[:, :, 20:]
    assert torch.equal(bits_of(joined_copy(parts)), bits_of(torch.cat(parts, 2)))
    assert torch.equal(bits_of(joined_copy((whole, whole[:, :1]), 1)), bits_of(torch.cat((whole, whole[:, :1]), 1)))


def test_rows_that_came_once_are_kept_as_they_are() -> None:
    pieces, part = Pieces(-2), torch.rand(1, 2, 10, 3)
    assert pieces.put((0, 10), (part,)) == []
    assert pieces.alone(10) == (part,) and pieces.alone(11) is None
    ((known, new),) = pieces.put((4, 6), (torch.ones(1, 2, 2, 3),))
    assert torch.equal(known[0], part[:, :, 4:6]) and known[0].data_ptr() == part[:, :, 4:6].data_ptr()
    assert torch.equal(new[0], torch.ones(1, 2, 2, 3))


def test_rows_of_several_runs_fill_the_whole() -> None:
    pieces, right = Pieces(-2), torch.zeros(1, 1, 12, 2)
    for run in ((2, 5), (4, 9), (0, 3), (3, 4)):
        part = torch.rand(1, 1, run[1] - run[0], 2)
        right[:, :, run[0] : run[1]] += part
        for (known,), (more,) in pieces.put(run, (part,)):
            known.add_(more)
    assert torch.equal(pieces.whole((torch.zeros(1, 1, 12, 2),))[0], right)


def test_sums_of_parts() -> None:
    """In one tensor, where a part that has all rows is taken as it is; of three parts the sum is rounded once."""
    generator, like = torch.Generator().manual_seed(4), torch.empty(1, 2, 12, 3, dtype=torch.bfloat16)
    for most, among in ((2, None), (3, None), (3, (2, 9))):
        exact, total = torch.zeros(1, 2, 12, 3), Sum(like, most, among)
        for run in ((2, 9), (4, 6), (5, 8))[:most]:
            part = torch.randn(1, 2, run[1] - run[0], 3, generator=generator).bfloat16()
            exact[:, :, run[0] : run[1]] += part
            total.add(run, part)
            assert run != (2, 9) or (total.whole is part) == (among is not None)
        for rows in ((3, 9), (0, 4), (9, 12), (2, 9)):
            assert torch.equal(total.result(rows), exact[:, :, rows[0] : rows[1]].bfloat16())
        assert torch.equal(total.result(), exact.bfloat16()) and total.result((0, 0)).shape == (1, 2, 0, 3)
    assert torch.equal(Sum(like, 2).result(), torch.zeros_like(like))


def test_a_part_of_the_keys_takes_no_error_for_one_of_rounding() -> None:
    """Kernels for GPUs free sums over a row's keys of what rounding took, which only a call with all keys can tell."""
    generator = torch.Generator().manual_seed(2)
    query, key, value, dout = (torch.randn(1, 2, 64, 16, generator=generator).half() for _ in range(4))
    operands = {"slopes": torch.tensor([0.5, 0.25])}
    exact = [t.double().requires_grad_() for t in (query, key, value, operands["slopes"])]
    right = torch.autograd.grad(ALIBI.reference(*exact[:3], slopes=exact[3]), exact[3], dout.double())[0]
    variant, choices = variant_of(ALIBI), Choices(target="interpret")
    whole = Call(query, key, value, None, operands, Dense(0), choices, 16)
    out, lse = variant.forward(whole)
    found = torch.zeros(2)
    for first in (0, 32):
        keys = (t[:, :, first : first + 32] for t in (key, value))
        part = Call(query, *keys, None, operands, Dense(-first), replace(choices, part=True), 16)
        found += gradients(variant, part, Given(out, lse, dout, None), frozenset({"slopes"}))["slopes"]
    of_all = gradients(variant, whole, Given(out, lse, dout, None), frozenset({"slopes"}))["slopes"]
    assert bool(((of_all - right).abs() <= 0.02 * right.abs().max()).all())
    assert bool(((found - right).abs() <= 0.1 * right.abs().max()).all())


# -- variants of a part ------------------------------------------------------------------------------------------------
blocks = weft.tensor("blocks", 2, bool)
OF_BLOCKS = {  # a mask, what it divides positions by where it reads tensors, and what all its constants divide
    "block_sparse": (masks.causal & masks.block_sparse(blocks, 8, 4), 8, 8),
    "chunked": (masks.causal & (q_pos // 6 == kv_pos // 6), 1, 6),
    "of sums": ((q_pos + 3 * kv_pos) // 4 % 3 != (2 * q_pos - kv_pos) // 6 % 2, 1, 12),
    "of a negative": (-q_pos // 8 <= -(kv_pos // 8), 1, 8),
    "strided": (masks.causal & ((q_pos - kv_pos) % 5 == 0) & (kv_pos % 10 < 7), 1, 10),
    "by positions alone": (masks.causal & (kv_pos // weft.maximum(q_pos, 1) < 2), 1, 1),
    "nested": (blocks[q_pos // 4 // 3, kv_pos // 5 % 40] & (kv_pos % 7 < 6), 120, 840),
}


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_blocks_of_a_mask_are_blocks_of_a_part(name: str) -> None:
    """With a first key that is a multiple of what positions are divided by, or any where that is not promised."""
    mask, expected, multiple = OF_BLOCKS[name]
    variant = weft.Attention(mask=mask, name="blocked")
    assert positions_divided_by(variant) == expected
    table = torch.rand(160, 160, generator=torch.Generator().manual_seed(1)) < 0.5
    rows, device = torch.arange(60), torch.device("cpu")
    for promised, first in ((multiple, 2 * multiple), (multiple, 0), (1, 7)):
        part = placed(variant, multiple=promised)
        where = [{"q_pos": rows[:, None] + n, "kv_pos": rows + n, "blocks": table} for n in (first, 0)]
        whole, own = (
            evaluate(expression(v.mask), {**env, "first_key": first}, torch.float64, device)
            for v, env in zip((variant, part), where)
        )
        assert torch.equal(whole.expand(60, 60), own.expand(60, 60)), (promised, first)


@pytest.mark.parametrize("length", [8192, 8000])
@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "pairs", "striped"])
def test_hidden_blocks_of_a_part_are_not_visited(balance: str, length: int) -> None:
    """Also where chunks begin within a block: keys of all of it are brought."""
    table = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.1
    sparse = weft.Attention(mask=masks.causal & masks.block_sparse(blocks, 128), name="sparse")
    made = plan(
        sparse, ranks=2, heads=2, length=length, head_dim=64, balance=balance, strategy="exchange", blocks=table
    )
    parts = Portions(made)
    for rank in range(2):
        for portion in (p for step in parts.portions(rank) for p in step):
            assert portion.keys[0] % 128 == 0
            survey = parts.variant(portion.sink, False, 128).facts.survey
            assert survey is not None and survey.cells and not survey.by_pair
