"""The gallery page: written as it stands, its pictures true, and no ready part left out."""

from __future__ import annotations

import re

import pytest
import torch

import weft
from tests.gallery import PAGE, RECIPES, SECTIONS, Entry, page
from weft import masks, scores, variants

from ..analysis.tiling import Case, classes

ENTRIES = [entry for _, entries in SECTIONS for entry in entries]
BESIDE = {"compose", "block_diagonal", "llama4_temperature"}  # what others are made of, or have a picture of


def test_the_page_is_as_it_would_be_written() -> None:
    """Else run `python -m tests.gallery`."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.title)
def test_pictures_are_true(entry: Entry) -> None:
    """By looking at every pair: no mark where nothing is seen, a full one only where everything is."""
    operands = {n: t.numpy() if isinstance(t, torch.Tensor) else t for n, t in entry.operands.items()}
    case = Case(entry.variant.mask, entry.q_len, entry.kv_len, entry.block, entry.block, entry.q_offset, operands)
    truth = classes(case)
    rows = re.findall(r"│(.*)│", entry.text)
    assert [len(row) for row in rows] == [truth.shape[1]] * truth.shape[0]
    for row, of_truth in zip(rows, truth.tolist(), strict=True):
        for mark, tile in zip(row, of_truth, strict=True):
            assert not (mark == " " and tile > 0) and not (mark == "█" and tile < 2)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.title)
def test_they_read_back_and_name_a_source(entry: Entry) -> None:
    named = "" if entry.variant.name == "attention" else f"{entry.variant.name}: "
    assert f"```text\n{named}{entry.q_len} queries, {entry.kv_len} keys" in entry.text
    assert weft.parse_attention(str(entry.variant)) == entry.variant
    assert entry.source and not entry.source.endswith(".")


def test_every_ready_part_is_in_the_page() -> None:
    text = page()
    for part in (masks, scores, variants):
        name = part.__name__.removeprefix("weft.")
        missing = [n for n in part.__all__ if f"{name}.{n}" not in text and n not in BESIDE]
        assert not missing, f"{name}: {missing}"


def test_every_recipe_is_an_example_that_the_readme_or_the_gallery_names() -> None:
    examples = PAGE.parents[1] / "examples"
    for _, source, words, example in RECIPES:
        assert "def main(" in (examples / f"{example}.py").read_text() and source and words.endswith(".")
