"""What flash_ddiagonals lists is added to the entries of a table, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.codegen.launch.summing import SHARES, summing

GROUP = 16


def added(sums: Tensor, entries: Tensor, ranges: Tensor, number: int) -> Tensor:
    shares = torch.full((SHARES, number), torch.nan)
    summing(-1, True)(sums, entries, ranges, GROUP, shares)
    return shares.sum(0)


def listed(dtype: torch.dtype, groups: int, number: int, more: int, spread: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups whose entries lie within `spread` of each other, some of no sums, which hold NaN and any entries."""
    generator = torch.Generator().manual_seed(groups)
    first = torch.randint(0, number - spread, (groups, 1), generator=generator)
    of_groups = first + torch.randint(0, spread, (groups, GROUP), generator=generator)
    entries = torch.cat([of_groups.flatten(), torch.randint(0, number, (more,), generator=generator)])
    sums = torch.randn(len(entries), generator=generator)
    ranges = torch.stack([of_groups.amin(1), of_groups.amax(1) + 1], 1)
    is_empty = torch.arange(groups) % 3 == 1
    ranges[is_empty] = 0
    sums[: groups * GROUP].view(groups, GROUP)[is_empty] = torch.nan
    return sums, entries.to(dtype), ranges.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("groups", "number", "more", "spread"), [(40, 70, 37, 5), (3, 33, 0, 30), (1100, 40, 300, 8)])
def test_sums_reach_their_entries(dtype: torch.dtype, groups: int, number: int, more: int, spread: int) -> None:
    sums, entries, ranges = listed(dtype, groups, number, more, spread)
    wanted = torch.zeros(number, dtype=torch.float64)
    wanted.scatter_add_(0, entries.long(), sums.nan_to_num(0.0).double())
    found = added(sums, entries, ranges, number)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-5)
    assert torch.equal(found, added(sums, entries, ranges, number))


def test_nan_reaches_its_own_entry_alone() -> None:
    sums, entries, ranges = listed(torch.int32, 7, 64, 0, 20)
    sums[0] = torch.nan
    found = added(sums, entries, ranges, 64)
    assert found.isnan().nonzero().flatten().tolist() == [int(entries[0])]
