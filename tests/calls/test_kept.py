"""What is measured of tiles is kept for calls with the same tensors, and never used for others."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, kv_pos, masks, q_pos, score
from weft.codegen.launch import launching
from weft.runtime.run import kept

from ..support import long_from

pytest.importorskip("triton")

allowed, doc, slope = weft.tensor("allowed", 3, bool), weft.tensor("doc", 1, int), weft.scalar("slope", float)
PAIRS = weft.Attention(mask=allowed[batch, q_pos, kv_pos] & masks.causal, name="pairs")
OTHER = weft.Attention(score + slope * kv_pos, PAIRS.mask, name="other")  # another layer, with the same mask
DOCUMENTS = weft.Attention(mask=masks.document(doc), name="documents")
LENGTH = 40


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    kept.forget()
    yield
    kept.forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    seen: list[str] = []
    made = launching.interpreted

    def noticed(kernel, binding, options):  # type: ignore[no-untyped-def]
        run = made(kernel, binding, options)
        return lambda *given: (given[0] and seen.append(binding.name), run(*given))[1]  # given[0]: programs

    monkeypatch.setattr(launching, "interpreted", noticed)
    for variant in (PAIRS, OTHER, DOCUMENTS):
        variant._variant.forget()
    return seen


def rows(length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, 16, generator=generator).requires_grad_() for _ in range(3)]


def pairs(share: float = 0.3) -> Tensor:
    return torch.rand(1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < share


def check(variant: weft.Attention, **given) -> None:
    """Forward and backward against the definition, with what the tensors hold now."""
    tensors = rows()
    out = variant(*tensors, target="interpret", **given)
    exact = variant.reference(*tensors, **given)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=0)
    for mine, true in zip(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(exact.sum(), tensors)):
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=0)


def measuring(launched: list[str]) -> list[str]:
    found = [name for name in launched if name.endswith(("_lists", "_spans", "_cells", "_ends"))]
    launched.clear()
    return found


def test_forward_backward_and_layers_share_one_measurement(launched: list[str]) -> None:
    table = pairs()
    with weft.settings(keep_tiles=True):
        check(PAIRS, allowed=table)
        assert measuring(launched) == ["pair_cells", "kv_lists", "q_lists"]
        check(PAIRS, allowed=table)
        check(OTHER, allowed=table, slope=0.25)
        assert measuring(launched) == []
        table[0, :, 5] ^= True  # in place: the version moves on
        check(PAIRS, allowed=table)
        assert measuring(launched) == ["pair_cells", "kv_lists", "q_lists"]
        table[0].fill_(True)  # a view shares the version
        check(PAIRS, allowed=table)
        assert measuring(launched) == ["pair_cells", "kv_lists", "q_lists"]
    check(PAIRS, allowed=table)
    assert measuring(launched)[:2] == ["pair_cells", "kv_lists"]  # the promise holds inside the block


def test_nothing_is_kept_without_the_promise(launched: list[str]) -> None:
    table = pairs()
    for _ in range(2):
        check(PAIRS, allowed=table)
        assert measuring(launched) == ["pair_cells", "kv_lists", "pair_cells", "kv_lists", "q_lists"]
    assert not kept.any_kept()


def test_other_tensors_sizes_and_numbers_are_measured_anew(launched: list[str]) -> None:
    ids = torch.arange(LENGTH + 8) // 9
    with weft.settings(keep_tiles=True):
        for given, length, offset in (
            (ids, LENGTH, None), (ids.clone(), LENGTH, None), (ids[8:], LENGTH, None), (ids, LENGTH, 8), (ids, 33, None)
        ):  # fmt: skip
            q, k, v = (t.detach() for t in rows(length))
            options = {"doc": given} if offset is None else {"doc": given, "q_offset": offset}
            out = DOCUMENTS(q, k, v, target="interpret", **options)
            torch.testing.assert_close(out, DOCUMENTS.reference(q, k, v, **options), atol=1e-5, rtol=0)
            assert measuring(launched) == ["kv_spans"], (length, offset)


def test_what_long_axes_leave_is_kept_too(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    long_from(monkeypatch, LENGTH - 1)
    ids = torch.arange(LENGTH) // 9
    with weft.settings(keep_tiles=True):
        check(DOCUMENTS, doc=ids)
        assert measuring(launched) == ["kv_ends", "kv_long_spans", "q_ends", "q_long_spans"]
        check(DOCUMENTS, doc=ids)
        assert measuring(launched) == []
        ids[:20] = 7
        check(DOCUMENTS, doc=ids)
        assert measuring(launched) == ["kv_ends", "kv_long_spans", "q_ends", "q_long_spans"]


def test_a_tensor_that_is_gone_takes_what_was_kept_with_it(launched: list[str]) -> None:
    """Another one may lie in its place, with its address and version."""
    with weft.settings(keep_tiles=True):
        for share in (0.1, 0.9, 0.4):
            check(PAIRS, allowed=pairs(share))
            assert measuring(launched) == ["pair_cells", "kv_lists", "q_lists"]
            gc.collect()
            gc.freeze()  # what is left is not looked at again, which takes seconds
            assert not kept.any_kept()


def test_tensors_without_a_version_are_not_kept(launched: list[str]) -> None:
    with torch.inference_mode():
        table = pairs()
    q, k, v = (t.detach() for t in rows())
    with weft.settings(keep_tiles=True):
        for _ in range(2):
            PAIRS(q, k, v, allowed=table, target="interpret")
            assert measuring(launched) == ["pair_cells", "kv_lists"]
    assert not kept.any_kept()


def test_few_masks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 2)
    tables = [pairs(share) for share in (0.1, 0.2, 0.3)]
    q, k, v = (t.detach() for t in rows())
    with weft.settings(keep_tiles=True):
        for table in tables:
            PAIRS(q, k, v, allowed=table, target="interpret")
    assert len(kept._all) == 2
