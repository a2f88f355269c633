"""Pictures of tiles against brute force: the head and the batch row that were asked for, whatever the grouping."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import weft
from weft import batch, group, head, head_dim, kv_head, kv_len, kv_pos, q_pos
from weft.compiler.planning import picture
from weft.ir.expr import Expr
from weft.tools.cli import main

from ..analysis.tiling import Case, classes

LETTERS = {" ": picture.EMPTY, "▒": picture.EDGE, "█": picture.FULL}
LIMITS, IDS = weft.tensor("limits", 1, int), weft.tensor("ids", 2, int)
Q_LEN, KV_LEN, BLOCK = 96, 128, 16


def tiles(text: str) -> np.ndarray:
    """The classes that a picture shows."""
    return np.array([[LETTERS[c] for c in row] for row in re.findall(r"│(.*)│", text)])


def truth(mask: Expr, which: dict[str, int], operands: dict[str, np.ndarray] = {}) -> np.ndarray:  # noqa: B006
    """The same by looking at every pair. which: heads, kv_heads, head, batch, head_dim."""
    share = which["heads"] // which["kv_heads"]
    symbols = {n: which[n] for n in ("head", "batch", "head_dim")} | {"group": share, "kv_head": which["head"] // share}
    return classes(Case(mask, Q_LEN, KV_LEN, BLOCK, BLOCK, operands={**symbols, **operands}))


def drawn(mask: Expr, which: dict[str, int], operands: dict[str, np.ndarray] = {}) -> np.ndarray:  # noqa: B006
    variant = weft.Attention(mask=mask, name="drawn")
    given: dict[str, Any] = {n: torch.from_numpy(a) for n, a in operands.items()}
    return tiles(variant.show_mask(Q_LEN, KV_LEN, block_q=BLOCK, block_kv=BLOCK, **which, **given))


EXACT = (
    kv_pos <= q_pos + 16 * kv_head,
    (kv_pos <= q_pos) & (q_pos - kv_pos < 16 * (group + kv_head)),
    (kv_pos <= q_pos) & (kv_pos // head_dim == q_pos // head_dim),
    (kv_pos < 16 * (batch + 1)) | (q_pos - kv_pos > 16 * head),
    kv_pos < LIMITS[kv_head],
)
HEADS = [
    {"heads": heads, "kv_heads": kv_heads, "head": at, "batch": row, "head_dim": dim}
    for heads, kv_heads, at, row, dim in ((1, 1, 0, 0, 16), (6, 2, 0, 1, 32), (6, 2, 5, 0, 16), (8, 1, 7, 2, 48),
                                          (4, 4, 3, 1, 32))
]  # fmt: skip
OPERANDS = {"limits": np.array([16, 64, 112, 128]), "ids": np.arange(3)[:, None] * 0 + np.arange(KV_LEN) // 40}


@pytest.mark.parametrize("which", HEADS, ids=str)
@pytest.mark.parametrize("mask", EXACT, ids=str)
def test_each_tile_of_the_head_that_is_asked_for_has_its_class(mask: Expr, which: dict[str, int]) -> None:
    operands = {"limits": OPERANDS["limits"]} if "limits" in str(mask) else {}
    assert (drawn(mask, which, operands) == truth(mask, which, operands)).all()


def comparison(rng: random.Random) -> Expr:
    """A random comparison of a position with heads, the batch row, widths and operands."""
    limit = rng.choice([LIMITS[kv_head], LIMITS[head // group]])
    number = rng.choice([kv_head, group, batch, head, head_dim // 16, limit // 16, limit // 8])
    step, sign, shift = rng.choice([3, 8, 16]), rng.choice([-1, 1]), rng.choice([-20, 0, 5, 16])
    distance = rng.choice([kv_pos - q_pos, q_pos - kv_pos, kv_pos, q_pos, kv_pos // 8 - q_pos // 8])
    right = sign * step * number + shift
    same = IDS[batch, q_pos] == IDS[batch, kv_pos]
    return rng.choice([distance <= right, distance > right, distance % 5 < right, same, kv_pos + 16 * number < kv_len])


@pytest.mark.parametrize("seed", range(60))
def test_random_masks_of_grouped_heads(seed: int) -> None:
    """What is left blank is hidden, what is drawn full is seen; both occur, so that nothing is drawn as edge alone."""
    rng = random.Random(seed)
    parts = [comparison(rng) for _ in range(rng.choice([1, 2, 3]))]
    mask = parts[0]
    for part in parts[1:]:
        mask = rng.choice([lambda m, p: m & p, lambda m, p: m | p, lambda m, p: m & ~p])(mask, part)
    which = rng.choice(HEADS)
    used = {n: a for n, a in OPERANDS.items() if n in str(mask)}
    if not weft.Attention(mask=mask).canonical.is_masked:
        return
    found, real = drawn(mask, which, used), truth(mask, which, used)
    assert found.shape == real.shape
    assert not ((found == picture.EMPTY) & (real != picture.EMPTY)).any(), f"{mask}\n{found}\n{real}"
    assert not ((found == picture.FULL) & (real != picture.FULL)).any(), f"{mask}\n{found}\n{real}"


def test_the_mask_over_the_tiles_is_of_that_head_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[np.ndarray] = []
    monkeypatch.setattr(picture, "mask_picture", lambda grid, path, title, dense: shown.append(dense))
    mask = (kv_pos <= q_pos + kv_head) & (kv_pos < 8 * group + 4 * batch + head_dim)
    variant = weft.Attention(mask=mask, name="seen")
    variant.show_mask(64, 64, path=tmp_path / "m.png", heads=6, kv_heads=2, head=4, batch=3, head_dim=10)
    (seen,) = shown
    rows, columns = np.arange(64)[:, None], np.arange(64)
    assert (seen == ((columns <= rows + 1) & (columns < 8 * 3 + 12 + 10))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 1}, "by_group: show_mask: the mask reads group, kv_head: pass heads=..., and kv_heads=..."),
        ({"kv_heads": 2}, "by_group: show_mask: the mask reads group: pass heads=..."),
        ({"heads": 6, "kv_heads": 4}, "by_group: show_mask: heads: expected a multiple of kv_heads 4, got 6"),
        ({"heads": 6, "head": 6}, "by_group: show_mask: head: expected 0 to 5, got 6"),
        ({"heads": 0}, "by_group: show_mask: heads: expected an int of at least 1, got 0"),
        ({"heads": 2, "head": -1}, "by_group: show_mask: head: expected an int of at least 0, got -1"),
        ({"heads": 2, "batch": 1.5}, "by_group: show_mask: batch: expected an int of at least 0, got 1.5"),
        ({"heads": 2, "block_q": 0}, "by_group: show_mask: block_q: expected an int of at least 1, got 0"),
        ({"heads": 2, "hedas": 2}, "by_group: hedas: unknown operand or option; .* operands are: none"),
        ({"heads": 2, "q_offset": 0.5}, "q_offset: expected an int, got 0.5"),
        ({"heads": 2, "path": "mask.jpg"}, "picture: expected a file that ends in .png or .svg, got mask.jpg"),
        ({"heads": 2, "path": "no/such/mask.png"}, "picture: no/such/mask.png: there is no folder no/such; make it"),
    ],
)
def test_what_a_picture_cannot_be_of(options: dict[str, Any], message: str) -> None:
    variant = weft.Attention(mask=kv_pos < q_pos + group * kv_head, name="by_group")
    with pytest.raises(weft.WeftError, match=message):
        variant.show_mask(32, 32, **options)


def test_sizes_that_the_mask_reads_are_asked_for() -> None:
    with pytest.raises(weft.WeftError, match=r"wide: show_mask: the mask reads head_dim: pass head_dim=..."):
        weft.Attention(mask=kv_pos < head_dim, name="wide").show_mask(32, 32)
    with pytest.raises(weft.WeftError, match="show_mask: expected heads=... with kv_heads, got kv_heads=2 alone"):
        weft.Attention(mask=kv_pos < q_pos, name="plain").show_mask(32, 32, kv_heads=2)


def test_an_operand_may_have_the_name_of_a_size() -> None:
    variant = weft.Attention(mask=kv_pos < weft.scalar("heads", int), name="named")
    assert "2 empty, 2 edge ▒" in variant.show_mask(32, 32, block_q=16, block_kv=16, heads=3)


def test_the_command_draws_the_head_and_batch_row_that_are_asked_for() -> None:
    text = "kv_pos < 32 * (kv_head + 1) + 16 * group + head_dim + 16 * batch"
    sizes = ["--heads", "6", "--kv-heads", "3", "--head-dim", "16", "--batch", "2", "--q-len", "256"]
    for at, row in ((0, 0), (5, 1)):
        arguments = ["mask", "--mask", text, *sizes, "--block-q", "16", "--block-kv", "16"]
        result = CliRunner().invoke(main, [*arguments, "--head", str(at), "--batch-row", str(row)])
        assert result.exit_code == 0, result.output
        full = (32 * (at // 2 + 1) + 32 + 16 + 16 * row) // 16
        assert (tiles(result.output) == np.where(np.arange(16) < full, picture.FULL, picture.EMPTY)).all()
        assert f"head {at} (kv_head {at // 2}), batch row {row}" in result.output
    refused = CliRunner().invoke(main, ["mask", "--mask", text, *sizes, "--head", "6"])
    assert refused.exit_code == 2 and "Error: --head: expected 0 to 5, got 6" in refused.output
    refused = CliRunner().invoke(main, ["mask", "--mask", text, *sizes, "--batch-row", "2"])
    assert refused.exit_code == 2 and "--batch-row: expected 0 to 1 (--batch 2), got 2" in refused.output


def test_a_png_asks_for_matplotlib_by_name_and_an_svg_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    weft.masks.causal.show_mask(8, 8, path=tmp_path / "mask.svg")
    with pytest.raises(weft.UnavailableError, match="pip install 'weft-attention\\[pictures\\]', or write an .svg"):
        weft.masks.causal.show_mask(8, 8, path=tmp_path / "mask.png")
