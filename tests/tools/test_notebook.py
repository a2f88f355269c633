"""What notebooks and prompts show of pictures, variants, expressions and plans."""

from __future__ import annotations

import copy
import doctest
import pickle
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import weft
from tests.planning.test_pictures import comparison, tiles
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.planning import picture
from weft.compiler.planning.picture import EDGE, FULL, Picture, TileGrid
from weft.tools import notebook
from weft.tools.cli import main

SVG = "{http://www.w3.org/2000/svg}"
WINDOW, SLOPES, SINKS = weft.scalar("window", int), weft.tensor("slopes", 1), weft.tensor("sinks", 1)
LOCAL = weft.Attention(score + SLOPES[head] * (kv_pos - q_pos), masks.causal & (q_pos - kv_pos < WINDOW), name="local")
SHAPE = weft.shape(heads=4, q_len=512, head_dim=64)


def filled(svg: str, colour: str, q_len: int, kv_len: int) -> np.ndarray:
    """How often each pair is painted in a colour, by the rectangles of its path."""
    found = np.zeros((q_len, kv_len), dtype=int)
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.get("fill") == colour:
            text = str(path.get("d"))
            parts = re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z", text)
            assert "".join("M{} {}h{}v{}h-{}z".format(*part) for part in parts) == text
            for x, y, wide, high, _ in (map(int, part) for part in parts):
                found[y : y + high, x : x + wide] += 1
    return found


def painted(grid: TileGrid, which: int) -> np.ndarray:
    rows = [np.frombuffer(row, dtype=np.uint8) == which for row in grid.classes]
    whole = np.repeat(np.repeat(np.array(rows), grid.block_q, 0), grid.block_kv, 1)
    return whole[: grid.q_len, : grid.kv_len].astype(int)


# -- pictures ----------------------------------------------------------------------------------------------------------
def test_the_last_line_of_a_cell_is_the_picture() -> None:
    """Not the repr of a str, with its quotes and escaped line ends; text everywhere else."""
    shown = LOCAL.show_mask(64, 64, block_q=16, block_kv=16, window=20)
    assert isinstance(shown, str) and isinstance(shown, Picture)
    assert repr(shown) == str(shown) == f"{shown}" and repr(shown).startswith("local: 64 queries, 64 keys\n┌────┐\n")
    assert type(str(shown)) is str and shown == str(shown) and hash(shown) == hash(str(shown))
    assert ElementTree.fromstring(shown._repr_svg_()).tag == f"{SVG}svg"


@pytest.mark.parametrize("seed", range(12))
def test_the_svg_has_the_tiles_of_the_text(seed: int) -> None:
    rng = random.Random(seed)
    q_len, kv_len, block_q, block_kv = (rng.choice(sizes) for sizes in ((60, 96), (50, 128), (8, 16), (5, 16)))
    mask = comparison(rng) & masks.causal
    while re.search("limits|ids", str(mask)):
        mask = comparison(rng) & masks.causal
    shown = weft.Attention(mask=mask, name="drawn").show_mask(
        q_len, kv_len, block_q=block_q, block_kv=block_kv, heads=6, kv_heads=2, head=3, batch=1, head_dim=32
    )
    for which, colour in ((EDGE, picture._COLOURS[EDGE]), (FULL, picture._COLOURS[FULL])):
        found = filled(shown.svg(), colour, q_len, kv_len)
        assert (found == painted(shown.grid, which)).all() and found.max() <= 1
    for which, count in zip((picture.EMPTY, EDGE, FULL), re.findall(r">(?:empty|edge|full) ([\d,]+)<", shown.svg())):
        assert int(count.replace(",", "")) == (tiles(str(shown)) == which).sum()


def test_a_large_picture_is_small_as_a_file() -> None:
    """Tiles of many positions are joined as text joins them, and tiles alike are one rectangle."""
    mask = weft.Attention(mask=masks.causal & masks.sliding_window(1 << 14), name="long")
    shown = mask.show_mask(1 << 18, 1 << 18).svg()
    assert len(shown) < 60_000
    colours = [filled(shown, picture._COLOURS[which], 1 << 10, 1 << 10) for which in (EDGE, FULL)]
    assert colours[0].sum() + colours[1].sum() > 0
    random_classes = tuple(bytes(random.Random(n).choices((0, 1, 2), k=256)) for n in range(256))
    assert len(picture.mask_svg(TileGrid(256, 256, 1, 1, random_classes))) < 1_500_000


def test_the_mask_itself_is_drawn_over_edge_tiles_of_small_pictures() -> None:
    shown = LOCAL.show_mask(40, 48, block_q=16, block_kv=16, window=20)
    rows, columns = np.arange(40)[:, None] + 8, np.arange(48)
    seen = (columns <= rows) & (rows - columns < 20)
    assert (filled(shown.svg(), "#000000", 40, 48) == seen).all()
    order = [shown.svg().index(f'fill="{colour}"') for colour in (picture._COLOURS[EDGE], "#000000")]
    assert order == sorted(order)
    assert 'fill="#000000"' not in LOCAL.show_mask(512, 512, window=20).svg()
    # what the mask reads was not given: tiles are there, pairs are not
    hazy = weft.Attention(mask=masks.causal & (SLOPES[head] * (q_pos - kv_pos) < 3.0), name="hazy")
    assert 'fill="#000000"' not in hazy.show_mask(16, 16, block_q=4, block_kv=4).svg()
    with_slopes = hazy.show_mask(16, 16, block_q=4, block_kv=4, slopes=torch.ones(1))
    assert filled(with_slopes.svg(), "#000000", 16, 16).sum() == 16 + 15 + 14


def test_an_svg_says_what_the_text_says_and_escapes_it() -> None:
    grid = TileGrid(4, 4, 2, 2, (b"\1\0", b"\2\1"))
    root = ElementTree.fromstring(picture.mask_svg(grid, title="a < b & <script>alert(1)</script> " * 4))
    assert not list(root.iter("script")) and "a < b & <script>" in "".join(root.itertext())
    said = [text.text for text in root.iter(f"{SVG}text")]
    assert {"0", "4", "key", "query", "empty 1", "edge 2", "full 1", "tile 2 queries x 2 keys"} <= {*said}


def test_pictures_are_copied_and_sent_whole() -> None:
    shown = LOCAL.show_mask(64, 64, block_q=16, block_kv=16, window=20)
    for other in (copy.copy(shown), copy.deepcopy(shown), pickle.loads(pickle.dumps(shown))):
        assert other == shown and repr(other) == repr(shown) and other.svg() == shown.svg()


def test_pictures_are_files_by_their_suffix(tmp_path: Path) -> None:
    shown = LOCAL.show_mask(64, 64, window=20, path=tmp_path / "mask.SVG")
    assert (tmp_path / "mask.SVG").read_text(encoding="utf-8") == shown.svg()
    assert shown.save(str(tmp_path / "mask.png")).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(weft.WeftError, match=r"picture: .*folder.svg: cannot be written \(Is a directory\)"):
        shown.save(tmp_path / "folder.svg")
    with pytest.raises(weft.WeftError, match=r"picture: expected a file that ends in .png or .svg, got mask.pdf"):
        shown.save("mask.pdf")
    arguments = ["mask", "--mask", "kv_pos <= q_pos", "-o", str(tmp_path / "other.svg")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0 and f"picture: {tmp_path / 'other.svg'}" in result.output
    assert ElementTree.parse(tmp_path / "other.svg").getroot().tag == f"{SVG}svg"


# -- masks -------------------------------------------------------------------------------------------------------------
def test_masks_draw_themselves() -> None:
    """In tiles so small that the picture shows pairs, or fills with up to 64 a side."""
    shown = masks.causal.show_mask(8, 8)
    assert (tiles(str(shown)) == np.where(np.tri(8, dtype=bool), FULL, picture.EMPTY)).all()
    for q_len, kv_len, block_q, block_kv in ((1, 64, 1, 1), (65, 128, 2, 2), (129, 4096, 4, 64), (8192, 100, 128, 2)):
        grid = masks.causal.show_mask(q_len, kv_len, q_offset=0).grid
        assert (grid.block_q, grid.block_kv) == (block_q, block_kv)
    doc = weft.tensor("doc", 1, int)
    own = masks.document(doc).show_mask(6, 6, doc=torch.tensor([0, 0, 0, 1, 1, 1]), block_q=3, block_kv=3)
    assert "2 empty, 0 edge ▒, 2 full █" in own
    assert (kv_pos < q_pos).show_mask(8, 8, block_q=4, block_kv=4) == weft.Attention(
        mask=kv_pos < q_pos, name="visible"
    ).show_mask(8, 8, block_q=4, block_kv=4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: (kv_pos - q_pos).show_mask(8, 8),
            "expected a mask, which is bool, got int: kv_pos - q_pos",
        ),
        (lambda: masks.causal.show_mask(0, 8), "visible: show_mask: q_len: expected an int of at least 1, got 0"),
        (lambda: masks.causal.show_mask("8", 8), "visible: show_mask: q_len: expected an int of at least 1, got '8'"),
        (lambda: masks.causal.show_mask(8, 8, window=3), "visible: window: unknown operand or option"),
        (lambda: masks.sliding_window(WINDOW).show_mask(8, 8), "window: missing; pass window=..."),
        (
            lambda: (score > 0).show_mask(8, 8),
            r"visible .*mask: `score` cannot be used inside a mask; use where",
        ),
    ],
)
def test_what_no_mask_can_draw(make, match: str) -> None:
    with pytest.raises(weft.WeftError, match=match):
        make()


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(notebook)
    assert found.attempted > 1 and found.failed == 0


# -- variants, expressions and plans -----------------------------------------------------------------------------------
def parsed(html: str) -> ElementTree.Element:
    """HTML whose every tag is closed, and whose every text is escaped."""
    root = ElementTree.fromstring(f"<page>{html}</page>")
    assert not {"script", "style"} & {node.tag for node in root.iter()}
    return root


def text_of(node: ElementTree.Element) -> str:
    return "".join(node.itertext())


VARIANTS = (
    LOCAL,
    weft.variants.gpt_oss(SINKS),
    weft.variants.sigmoid_attention(),
    weft.Attention(score / weft.tensor("t", 0), dropout=weft.scalar("share", float), name="warm"),
    weft.Attention(mask=masks.causal, latent=weft.Latent(16, 8), scale=0.5, name="mla"),
    weft.Attention(),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_variant_shows_its_declaration_which_reads_back(variant: weft.Attention) -> None:
    root = parsed(variant._repr_html_())
    (declared,) = root.iter("pre")
    *operands, call = text_of(declared).split("weft.Attention(")
    names = {"weft": weft, **{name: getattr(weft, name) for name in weft.__all__}}
    exec("".join(operands), names)
    assert eval(f"weft.Attention({call}", names) == variant
    assert [text_of(node) for node in root.iter("code")] == [
        p.name for p in variant.canonical.parameters if p.name != "seed"
    ]


def test_operands_say_what_a_call_gives() -> None:
    rows = [[text_of(cell) for cell in row] for row in parsed(LOCAL._repr_html_()).iter("tr")]
    assert rows[1:] == [["slopes", "float tensor, 1 dimension, gets a gradient"], ["window", "int number"]]
    ids = weft.Attention(mask=masks.document(weft.tensor("doc", 2, int)))
    assert "int tensor, 2 dimensions<" in ids._repr_html_()


def test_an_expression_is_shown_escaped() -> None:
    assert masks.causal._repr_html_() == "<code>kv_pos &lt;= q_pos</code>"
    for shown in (score + SLOPES[head], (kv_pos < 4) & ~(q_pos >= 3), weft.scores.softcap(2.0)(score), WINDOW, q_pos):
        assert text_of(parsed(shown._repr_html_())) == str(shown)


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        (LOCAL, {"device": "h100"}),
        (LOCAL, {"device": "a100", "window": 64}),
        (LOCAL, {"target": "cpu"}),
        (weft.variants.gpt_oss(SINKS), {"device": "h100"}),
        (masks.document(weft.tensor("doc", 1, int)), {"device": "h200"}),
    ],
    ids=str,
)
def test_a_plan_shows_what_explain_prints(variant, more: dict) -> None:
    """Every line of text and every figure, but for the score, the mask and where tiles look, which a plan has not."""
    variant = variant if isinstance(variant, weft.Attention) else weft.Attention(mask=variant, name="documents")
    plan = variant.plan(SHAPE, **more)
    root = parsed(plan._repr_html_())
    words = set(text_of(root).split()) | {w for node in root.iter() for w in (node.text or "").split()}
    printed = re.sub(r"(?s)\nWhere tiles look.*?\n\n", "\n", variant.explain(SHAPE, **more))
    printed = re.sub(r"(?m)^(score|mask|sink) {2,}.*\n( {6,}.*\n)*", "", printed)
    missing = [word for word in printed.split() if word not in words]
    assert not missing, missing
    opened = [text_of(node) for node in root.iter("summary")]
    assert [title.split(" ")[0] for title in opened] == [*(k.name for k in plan.kernels), "What"]


def test_a_plan_prints_what_explain_says() -> None:
    """At a prompt it is a line, and printed it is the text, less the score, the mask and where tiles look."""
    plan = LOCAL.plan(SHAPE, device="h100")
    assert set(str(plan).splitlines()) <= set(LOCAL.explain(SHAPE, device="h100").splitlines())
    assert repr(plan).startswith(f"<plan of {LOCAL.name} for h100: flash_forward=hopper:") and len(repr(plan)) < 300


def test_colours_are_those_of_the_page() -> None:
    """So that they read on a dark page too; a picture has a background of its own."""
    for html in (LOCAL._repr_html_(), LOCAL.plan(SHAPE, device="h100")._repr_html_(), masks.causal._repr_html_()):
        assert not re.search(r"#[0-9a-f]{3,6}\b|rgb\(|color: (?!inherit|transparent)", html)
    svg = ElementTree.fromstring(masks.causal.show_mask(4, 4).svg())
    card = svg.find(f"{SVG}rect")
    assert card is not None and card.get("fill") == "#ffffff" and svg.get("fill") == "#222222"
