"""Queries before the first key: a call whose own q_offset is negative says so once, and is refused under check=True."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft import kv_pos, q_pos

_numbers = itertools.count()
FEW = torch.randn(1, 2, 4, 16)
MANY = torch.randn(1, 2, 9, 16)


def fresh(mask: Any = None, score: Any = weft.score) -> weft.Attention:
    """A variant of which nothing was said yet."""
    return weft.Attention(score, kv_pos <= q_pos if mask is None else mask, name=f"first_{next(_numbers)}")


def packed(v: weft.Attention, **more: Any) -> torch.Tensor:
    return v(MANY, FEW, FEW, cu_seqlens_q=torch.tensor([0, 2, 9]), cu_seqlens_kv=torch.tensor([0, 2, 4]), **more)


def paged(v: weft.Attention, **more: Any) -> torch.Tensor:
    pages = {"block_table": torch.tensor([[0]], dtype=torch.int32), "kv_lens": torch.tensor([3], dtype=torch.int32)}
    with torch.no_grad():
        return v(MANY, FEW, FEW, **pages, **more)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "dense": lambda v, **more: v(MANY, FEW, FEW, **more),
    "reference": lambda v, **more: v.reference(MANY, FEW, FEW, **more),
    "padded keys": lambda v, **more: v(MANY, MANY, MANY, kv_lens=torch.tensor([5]), **more),
    "reference of lengths": lambda v, **more: v.reference(MANY, MANY, MANY, kv_lens=torch.tensor([5]), **more),
    "packed": packed,
    "paged": paged,
    "interpret": lambda v, **more: v(MANY, FEW, FEW, target="interpret", **more),
    "compiled": lambda v, **more: torch.compile(lambda: v(MANY, FEW, FEW, **more), fullgraph=True, backend="eager")(),
}
EVERY = pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))


@EVERY
def test_it_is_said_once_at_the_line_of_the_caller(call: Callable[..., torch.Tensor]) -> None:
    variant = fresh()
    with pytest.warns(UserWarning, match=r"before the first key; pass q_offset=0 to count queries from") as told:
        call(variant)
    assert [w.filename for w in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(variant)


@EVERY
def test_it_is_an_error_where_values_are_checked(call: Callable[..., torch.Tensor]) -> None:
    torch.compiler.reset()
    with weft.settings(check=True), pytest.raises(Exception, match="before the first key; pass q_offset=0") as caught:
        call(fresh())
    assert isinstance(caught.value, weft.WeftError) or "WeftError" in str(caught.value)


@EVERY
@pytest.mark.parametrize("offset", [0, -5])
def test_nothing_is_said_where_an_offset_is_given(call: Callable[..., torch.Tensor], offset: int) -> None:
    with warnings.catch_warnings(), weft.settings(check=True):
        warnings.simplefilter("error")
        call(fresh(), q_offset=offset)


@pytest.mark.parametrize("many", [MANY, FEW])
def test_nothing_is_said_where_positions_do_not_matter(many: torch.Tensor) -> None:
    with warnings.catch_warnings(), weft.settings(check=True):
        warnings.simplefilter("error")
        fresh(mask=kv_pos < 3)(MANY, FEW, FEW)
        fresh()(many, MANY, MANY)
        fresh()(MANY, FEW[:, :, :0], FEW[:, :, :0])  # no key at all
        packed(fresh(), q_offset=0)
        fresh()(MANY, MANY, MANY, kv_lens=torch.tensor([5]), q_lens=torch.tensor([5]))


def test_a_score_that_reads_positions_counts() -> None:
    with pytest.warns(UserWarning, match="before the first key"):
        fresh(mask=True, score=weft.score + 0.1 * (kv_pos - q_pos))(MANY, FEW, FEW)


def test_what_queries_see_then() -> None:
    """A row of compressed keys: positions of a decode hide all of them from most queries."""
    compressed = fresh(kv_pos * 2 + 1 <= q_pos)
    hidden = [
        compressed(MANY, FEW, FEW, **more).abs().sum(-1)[0, 0].eq(0).sum().item() for more in ({}, {"q_offset": 0})
    ]
    assert hidden == [6, 1]


def test_padded_keys_alone_are_told_of_the_queries() -> None:
    with pytest.warns(UserWarning, match="sequence 0 has 9 queries and 5 keys: .*; pass q_lens= too"):
        CALLS["padded keys"](fresh())


def test_plans_note_it() -> None:
    sizes = weft.shape(heads=2, q_len=192, kv_len=11, head_dim=16)
    text = " ".join(fresh().explain(sizes, device="cpu").split())
    assert "query has 192 rows and key 11: where none is given" in text and "pass q_offset=0" in text
    assert "pass q_offset=0" not in fresh().explain(sizes, device="cpu", q_offset=0)


def test_sizes_that_are_symbols_are_compiled_once() -> None:
    """The question adds no size to a graph, and a program of any lengths is exported."""
    variant = fresh()

    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return variant(q, k, k)

    sizes = {"q": {2: torch.export.Dim("L")}, "k": {2: torch.export.Dim("T")}}
    program = torch.export.export(Module(), (FEW, MANY), dynamic_shapes=sizes)
    torch.testing.assert_close(program.module()(FEW, MANY), variant(FEW, MANY, MANY))
