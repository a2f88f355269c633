"""The gallery page, docs/gallery.md: each ready part with its source and a picture, drawn anew.

python -m tests.gallery         writes the page; a test says where it is not as it would be written
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import weft

PAGE = Path(__file__).parents[1] / "docs" / "gallery.md"
_INTRODUCTION = """\
# Gallery

Ready masks, scores and whole variants: what each is called, where it comes from, and the tiles that it leaves. They are
lines of the public [language](language.md) and compose: masks with `&`, `|` and `~`, scores as functions of scores. `█`
is a tile in which all pairs see each other, `▒` one of which some may, and nothing is computed where there is no mark;
queries go down and keys across. `python -m tests.gallery` writes this page, and a test holds it to what is drawn.

In each block `import weft` and `from weft import head, masks, score, scores, variants` come first; tensors that a call
gives are declared where they are used, as `weft.tensor("slopes", 1)`.
"""


@dataclass(frozen=True)
class Entry:
    """One part of the gallery."""

    title: str
    code: str  # an expression that gives the variant
    source: str
    words: str = ""  # what else there is to say
    q_len: int = 64
    kv_len: int = 64
    block: int = 4
    operands: Mapping[str, Any] = field(default_factory=dict)  # that the picture is drawn with
    q_offset: int | None = None

    @property
    def variant(self) -> weft.Attention:
        """The variant that the code declares."""
        names = {n: getattr(weft, n) for n in ("head", "masks", "score", "scores", "variants")}
        found = eval(self.code, {"weft": weft, **names})
        assert isinstance(found, weft.Attention), self.code
        return found

    @property
    def text(self) -> str:
        """The entry as the page has it."""
        picture = self.variant.show_mask(
            self.q_len, self.kv_len, block_q=self.block, block_kv=self.block, q_offset=self.q_offset, **self.operands
        ).removeprefix("attention: ")
        said = f"{self.source}.{' ' + self.words if self.words else ''}"
        return f"### {self.title}\n\n{said}\n\n```python\n{self.code}\n```\n\n```text\n{picture.rstrip()}\n```\n"


def _of_mask(title: str, mask: str, source: str, words: str = "", **more: Any) -> Entry:
    return Entry(title, f"weft.Attention(mask={mask})", source, words, **more)


def _of_score(title: str, score: str, source: str, words: str = "") -> Entry:
    code = f"weft.Attention({score}, masks.causal)"
    return Entry(title, code, source, words, 32, 32)


def _drawn() -> torch.Tensor:
    return torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) < 0.12


def _blocks() -> torch.Tensor:
    """Causal blocks: a query block's own, the first, and random ones before."""
    return torch.tril(_drawn() | torch.eye(16, dtype=torch.bool) | (torch.arange(16) == 0))


def _bits() -> torch.Tensor:
    """Pairs whose distance is a power of two, or 0, eight to a byte."""
    distance = torch.arange(64)[:, None] - torch.arange(64)
    pairs = (distance >= 0) & (distance & (distance - 1) == 0)
    return (pairs.view(64, 8, 8) << torch.arange(8)).sum(-1).to(torch.uint8)


def _ancestors() -> torch.Tensor:
    """Of a binary tree of 31 drafted tokens, level by level."""
    found = torch.eye(31, dtype=torch.bool)
    for token in range(1, 31):
        found[token] |= found[(token - 1) // 2]
    return found


_IDS = torch.arange(64) // 24
_MASKS = (
    _of_mask("Causal", "masks.causal", "Vaswani et al. 2017, arXiv 1706.03762"),
    _of_mask("Sliding window", "masks.causal & masks.sliding_window(24)", "Mistral 7B, arXiv 2310.06825"),
    _of_mask("Prefix", "masks.prefix_lm(24)", "T5's prefix LM, arXiv 1910.10683"),
    _of_mask("Documents", 'masks.causal & masks.document(weft.tensor("doc", 1, int))', "Packed sequences",
             "Ids may have any order; tiles are measured at each call.", operands={"doc": _IDS}),
    _of_mask("Documents with prefixes",
             'masks.prefix_document(weft.tensor("doc", 1, int), weft.tensor("prompt", 1, bool))',
             "Prefix LM in packed sequences", operands={"doc": _IDS, "prompt": torch.arange(64) % 24 < 12}),
    _of_mask("Padding on the left", 'masks.causal & masks.padding_left(weft.tensor("pads", 1, int))',
             "Prompts of several lengths, generated from together", operands={"pads": torch.tensor([10])}),
    _of_mask("Padding on the right", 'masks.padding_right(weft.tensor("lengths", 1, int))', "Encoders",
             "`kv_lens=` of a call does the same for any variant.", operands={"lengths": torch.tensor([42])}),
    _of_mask("Chunks", "masks.chunked(16)", "The local layers of Llama 4"),
    _of_mask("Blocks, causal", "masks.block_causal(16)", "Frames of a video, turns of a dialogue"),
    _of_mask("First keys and a window", "masks.global_window(4, 24)", "StreamingLLM, arXiv 2309.17453"),
    _of_mask("Dilated", "masks.dilated(2, 24)", "LongNet, arXiv 2307.02486", block=2, q_len=32, kv_len=32),
    _of_mask("Strided", "masks.strided(8, 8)", "Sparse Transformer, arXiv 1904.10509", block=2),
    _of_mask("Fixed", "masks.fixed(16, 4)", "Sparse Transformer, arXiv 1904.10509"),
    _of_mask("Longformer", "masks.longformer(8, 4)", "Beltagy et al. 2020, arXiv 2004.05150",
             "`shared` may be a bool tensor: any tokens see all, and are seen by all."),
    _of_mask("BigBird", 'masks.bigbird(4, weft.tensor("drawn", 2, bool))', "Zaheer et al. 2020, arXiv 2007.14062",
             "The random blocks are an operand.", operands={"drawn": _drawn()}),
    _of_mask("Block-sparse", 'masks.block_sparse(weft.tensor("blocks", 2, bool), 4)',
             "Block-sparse FlashAttention, arXiv 2205.14135",
             "Which blocks see each other is an operand, `[heads, ...]` and `[batch, heads, ...]` too; only these are "
             "visited. Blocks of 64 and more, as large as tiles, cost what is visible.",
             operands={"blocks": _blocks()}),
    _of_mask("Pairs, a bit each", 'masks.bit_packed(weft.tensor("bits", 2, int))', "`numpy.packbits`, little end first",
             "A bool tensor is read as it is: `allowed[batch, q_pos, kv_pos]`.", operands={"bits": _bits()}),
    _of_mask("Block diffusion", "masks.block_diffusion(32, 8)", "BD3-LM, arXiv 2503.09573",
             "The first half is noised, the second clean."),
    _of_mask("Tree", 'masks.tree(weft.tensor("ancestors", 2, bool))',
             "SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774",
             "31 drafted tokens behind a context of 33; a path is accepted after one call.", q_len=31, kv_len=64,
             operands={"ancestors": _ancestors()}),
    _of_mask("Compressed keys", "masks.compressed(4)", "The compressed branch of NSA, arXiv 2502.11089",
             "Queries are tokens and keys are blocks of 4 tokens, so that a call gives `q_offset=0`. "
             "[examples/nsa.py](../examples/nsa.py) has all three branches.",
             kv_len=16, q_offset=0),
    _of_mask("Registers", "masks.registers()", "Multi-token prediction needs registers, arXiv 2505.10518",
             "A register behind each token predicts a later one; no other row sees it. "
             "[examples/multi_token.py](../examples/multi_token.py) trains so."),
    _of_mask("NATTEN in a sequence", "masks.natten_1d(8, length=64)", "Neighbourhood attention, arXiv 2204.07143"),
    _of_mask("NATTEN in a sequence, dilated", "masks.natten_1d(3, length=64, dilation=4)",
             "DiNA, arXiv 2209.15001", block=2),
    _of_mask("NATTEN on a grid", "masks.natten_2d(8, 1, height=8)", "Neighbourhood attention, arXiv 2204.07143",
             "An image of 8 x 8, row by row.", block=2),
    _of_mask("NATTEN on a grid, dilated", "masks.natten_2d(8, 1, height=8, dilation=2)",
             "DiNA, arXiv 2209.15001", block=2),
    _of_mask("NATTEN in a volume", "masks.natten_3d(4, 4, 1, depth=4)", "NATTEN", "Four frames of 4 x 4.", block=2),
    _of_mask("Swin", "masks.swin(8, 4)", "Liu et al. 2021, arXiv 2103.14030", "Windows of 4 x 4 of an image of 8 x 8."),
    _of_mask("Swin, shifted", "masks.swin(8, 4, shift=2)", "Liu et al. 2021, arXiv 2103.14030",
             "Tokens keep their places, so that nothing is rolled and no copy made.", block=2),
)  # fmt: skip
_SCORES = (
    _of_score("Soft cap", "scores.softcap(50.0)(score)", "Gemma 2, arXiv 2408.00118"),
    _of_score("ALiBi, learned or not", 'scores.alibi(weft.tensor("slopes", 1))(score)',
              "Press et al. 2021, arXiv 2108.12409",
              "Slopes that require a gradient get one."),
    _of_score("Relative bias", 'scores.relative_bias(weft.tensor("table", 2), 16)(score)',
              "Shaw et al. 2018, arXiv 1803.02155"),
    _of_score("T5's bias", 'scores.t5_bias(weft.tensor("table", 2))(score)', "Raffel et al. 2019, arXiv 1910.10683"),
    _of_score("Forget gates", 'scores.forgetting(weft.tensor("decay", 3))(score)',
              "Forgetting Transformer, Lin et al. 2025, arXiv 2503.02130",
              "`decay` is the running sum of the logarithms of forget gates, which get gradients."),
    _of_score("Log-n scaling", "scores.log_n(2048)(score)",
              "Chiang and Cholak 2022, arXiv 2202.12172; Qwen, arXiv 2309.16609"),
    _of_score("Scalable softmax", 'scores.ssmax(weft.tensor("s", 1)[head])(score)', "Nakanishi 2025, arXiv 2501.19399"),
    _of_score("YaRN's temperature", "scores.yarn(4.0)(score)", "Peng et al. 2023, arXiv 2309.00071",
              "NTK-aware scaling changes the rotary embedding, and no score."),
    _of_score("Temperature", 'scores.temperature(weft.tensor("t", 1)[head])(score)', "Any number, scalar or read"),
)  # fmt: skip
_VARIANTS = (
    Entry("Softmax1", "variants.softmax1()", "Miller 2023, attention is off by one", "A sink of 0.", 32, 32),
    Entry("Sigmoid attention", "variants.sigmoid_attention()", "Ramapuram et al. 2024, arXiv 2409.04431", "", 32, 32),
    Entry("ReLU attention", "variants.relu_attention()", "Wortsman et al. 2023, arXiv 2309.08586", "", 32, 32),
    Entry("Learned ALiBi", 'variants.learned_alibi(weft.tensor("slopes", 1))',
          "Press et al. 2021, arXiv 2108.12409", "", 32, 32),
    Entry("Forgetting Transformer", 'variants.fox(weft.tensor("decay", 3))',
          "Lin et al. 2025, arXiv 2503.02130", "Forget gates of tokens and heads, learned.", 32, 32),
    Entry("StreamingLLM", "variants.streaming_llm(4, 24)", "Xiao et al. 2023, arXiv 2309.17453"),
    Entry("GPT-OSS", 'variants.gpt_oss(weft.tensor("sinks", 1), 24)', "arXiv 2508.10925",
          "A learned sink for each head; a window in every other layer."),
    Entry("Gemma 2", "variants.gemma2(24)", "arXiv 2408.00118", "Capped scores; a window in every other layer."),
    Entry("Gemma 3", "variants.gemma3(24)", "arXiv 2503.19786", "A window in five layers of six."),
    Entry("Llama 4", "variants.llama4(16)", "Meta 2025", "Chunks; layers without have a temperature that grows."),
    Entry("PaliGemma", 'variants.paligemma(weft.tensor("prefix", 1, int))', "arXiv 2407.07726",
          "Image and prompt are seen by all.", operands={"prefix": torch.tensor([20])}),
)  # fmt: skip
SECTIONS = (("Masks", _MASKS), ("Scores", _SCORES), ("Variants", _VARIANTS))
RECIPES = (
    ("Differential attention", "Ye et al. 2024, arXiv 2410.05258, and version 2, 2026",
     "Two calls of one variant; in version 2 one call with twice the query heads.", "differential"),
    ("Transformer-XL", "Dai et al. 2019, arXiv 1901.02860",
     "Relative positions with the biases u and v, and keys of the segment before; all of them learn.",
     "transformer_xl"),
    ("Native sparse attention", "Yuan et al. 2025, arXiv 2502.11089",
     "Compressed keys, blocks that a query selects, and a window: three calls, and a sum with learned gates.", "nsa"),
    ("Mixture of block attention", "Lu et al. 2025, arXiv 2502.13189",
     "A query attends to the blocks whose mean key suits it best: the routing is a bool operand.", "moba"),
    ("Multi-token prediction", "Gerontopoulos et al. 2025, arXiv 2505.10518",
     "Registers behind tokens, with positions of the tokens that they predict.", "multi_token"),
    ("Cross attention", "Vaswani et al. 2017, arXiv 1706.03762",
     "Padded keys, by lengths or by a bool operand; `q_offset=0` where positions of both sides begin together.",
     "cross_attention"),
    ("torch's `nn.MultiheadAttention`", "torch",
     "A module in its place: the same weights, masks and arguments, but for the average weights, which do not exist.",
     "multihead"),
)  # fmt: skip


def _recipe(title: str, source: str, words: str, example: str) -> str:
    return f"### {title}\n\n{source}. {words} [examples/{example}.py](../examples/{example}.py).\n"


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for title, entries in SECTIONS:
        parts += [f"## {title}\n", *(entry.text for entry in entries)]
    parts += ["## Recipes\n", "A few calls each, in an example that checks itself against plain torch.\n"]
    return "\n".join([*parts, *(_recipe(*r) for r in RECIPES)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
