"""Rows whose positions are no row numbers, on a GPU: sources that tests/attention/test_sources.py adds from outside."""

from __future__ import annotations

import pytest
import torch

from ..attention.test_sources import VARIANTS, check, registered

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures(registered.__name__),
]  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["zigzag", "ordered", "striped_dense", "striped_zigzag"])
def test_rows_that_lie_otherwise(kind: str, name: str) -> None:
    check(name, kind, device="cuda")
    check(name, kind, device="cuda")  # as a call that repeats


@pytest.mark.parametrize("kind", ["zigzag", "ordered"])
def test_few_queries(kind: str) -> None:
    check("window", kind, q_len=3, device="cuda", schedule="split_kv")
