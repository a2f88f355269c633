"""Variants that are tested wherever rows may lie and on whatever target, with operands of each: one table of them."""

from __future__ import annotations

from typing import Any

import torch

import weft
from weft import batch, head, kv_len, kv_pos, masks, q_len, q_pos, score

slopes, sinks = weft.tensor("slopes", 1), weft.tensor("sinks", 1)
doc, pad = weft.tensor("doc", 2, int), weft.tensor("pad", 2)
window = weft.scalar("window", int)

CAUSAL = weft.Attention(mask=masks.causal, name="causal")
DENSE = weft.Attention(name="dense")
FAR = weft.Attention(score + pad[batch, kv_pos], name="far")
VARIANTS = {
    "dense": DENSE,
    "causal": CAUSAL,
    "window": weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="windowed"),
    "cap": weft.Attention(5.0 * weft.tanh(score / 5.0), masks.causal, name="cap"),
    "negative": weft.Attention(mask=masks.causal, scale=-0.2, name="negative"),
    "alibi": weft.Attention(
        score * (1.0 + 0.01 * kv_len) + slopes[head] * (kv_pos - q_pos), masks.causal, name="alibi"
    ),
    "lengths": weft.Attention(  # the symbols are those of the sequence
        score * (1.0 + 0.01 * q_len) + 0.1 * batch, kv_pos * 2 <= q_pos + kv_len, name="lengths"
    ),
    "documents": weft.Attention(mask=masks.causal & (doc[batch, q_pos] == doc[batch, kv_pos]), name="documents"),
    "far": FAR,
    "sink": weft.Attention(mask=masks.causal, sink=sinks[head], name="sinks"),
    "sigmoid": weft.Attention(mask=masks.causal, normalizer="sigmoid", name="sigmoids"),
    "relu": weft.Attention(mask=masks.causal, normalizer="relu", name="relus"),
    "dropout": weft.Attention(mask=masks.causal, dropout=0.3, name="dropped"),
}  # fmt: skip


def cases(
    *names: str, rows: int, batch: int = 6, window: int = 20, document: int = 11
) -> dict[str, tuple[weft.Attention, dict[str, Any]]]:
    """These variants, each with its operands for up to so many sequences and positions, and for up to six heads.

    document: the length of documents in `doc`.
    """
    known = {
        "window": window,
        "slopes": torch.tensor([0.1, 0.3, 0.01, 0.5, 0.2, 0.05]),
        "doc": (torch.arange(rows) // document).repeat(batch, 1),
        "pad": torch.where(torch.arange(rows) % 5 == 3, -1e9, 0.0).repeat(batch, 1),
        "sinks": torch.randn(6, generator=torch.Generator().manual_seed(1)),
        "seed": 5,
    }
    return {n: (VARIANTS[n], {p.name: known[p.name] for p in VARIANTS[n].canonical.parameters}) for n in names}
