"""Each variant three times: as FlexAttention's functions (which plain torch runs too), and as a Weft declaration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from bench_rows import Row

if TYPE_CHECKING:
    import weft

Tensor = torch.Tensor
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, batch, head, q, kv -> score
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, q, kv -> bool


@dataclass(frozen=True)
class TorchVariant:
    """Functions of broadcasting index tensors; None where the score or the mask is left as it is."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    sinks: Tensor | None = None  # [heads], a leaf: one more logit of every row, without a value
    sigmoid: bool = False  # weights are the sigmoid of scores, and no softmax
    bias: Tensor | None = None  # [B, heads, S, S], a leaf: what score_mod adds, as SDPA takes it
    learned: tuple[Tensor, ...] = ()  # leaves whose gradients are timed beside those of query, key and value
    dropout: float = 0.0  # share of the weights that is dropped


def alibi_slopes(heads: int, device: str) -> Tensor:
    """2 ** (-8 (h + 1) / heads), float32 [heads] (Press et al., 2021)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device, dtype=torch.float32) / heads)


SEED = 7  # of dropout
LATENT_RANK = 512  # columns of a cache that keys and values are expanded from


def sink_logits(heads: int, device: str) -> Tensor:
    """A learned sink for each head, float32 [heads], with a gradient (GPT-OSS, arXiv 2508.10925)."""
    return torch.linspace(-2.0, 4.0, heads, device=device).requires_grad_()


def pair_bias(row: Row, device: str) -> Tensor:
    """bf16 or float32 [B, heads, S, S], a leaf: a bias of its own for every pair."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (row.batch, row.heads, row.length, row.length)
    dtype = torch.float32 if row.variant == "bias_fp32" else torch.bfloat16
    return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()


def t5_table(row: Row, device: str) -> Tensor:
    """float32 [heads, buckets], a leaf (T5, arXiv 1910.10683)."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(row.heads, row.parameter, generator=generator, device=device).requires_grad_()


def by_position(row: Row, device: str) -> Tensor:
    """float32 [heads, S], a leaf: a number of its own for each head and position."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(row.heads, row.length, generator=generator, device=device).requires_grad_()


def t5_bucket(distance: Tensor, buckets: int, most: int = 128) -> Tensor:
    """The bucket of a distance to a key before the query, in one direction; the last one has all from `most` on."""
    exact = buckets // 2
    far = (distance.clamp(min=1) / exact).log2() * ((buckets - exact) / math.log2(most / exact)) + 1e-3
    return torch.where(distance < exact, distance, (exact + far.floor().to(distance.dtype)).clamp(max=buckets - 1))


def document_ids(row: Row, device: str) -> Tensor:
    """int32 [length]: documents of row.parameter tokens each."""
    return torch.arange(row.length, device=device, dtype=torch.int32) // row.parameter


def block_table(row: Row, device: str) -> Tensor:
    """bool [blocks, blocks]: of each block of queries as many blocks of keys, drawn at random."""
    blocks = row.length // row.block
    order = torch.rand(blocks, blocks, generator=torch.Generator(device).manual_seed(2), device=device).argsort(1)
    return order < row.seen_blocks


def starts(row: Row, device: str) -> Tensor:
    """int32 [sequences + 1]: the first token of each packed sequence, and the end."""
    return torch.tensor([0, *row.lens], device=device).cumsum(0).to(torch.int32)


def sequence_numbers(row: Row, device: str) -> Tensor:
    """int32 [length]: of the sequence of each token."""
    numbers = torch.arange(len(row.lens), dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(row.lens)).to(device)


def kept_as_weft(row: Row, dropout: float, device: str) -> Tensor:
    """What Weft multiplies weights [B, heads, S, S] by: 0, or 1 over the share that is kept."""
    from weft.ir.philox import ALL_KEPT, kept_pairs, pairs_kept

    head, kept = torch.arange(row.heads, device=device).view(1, 1, -1, 1), pairs_kept(dropout)
    seed = torch.tensor([SEED], device=device)

    def of(batch: Tensor, length: int) -> Tensor:
        q_pos = torch.arange(length, device=device)
        found = kept_pairs(seed, batch.view(-1, 1, 1, 1), head, q_pos, 0, length, kept)
        return found.permute(0, 2, 3, 1) * (ALL_KEPT / kept)

    if not row.lens:
        return of(torch.arange(row.batch, device=device), row.length)
    own = [of(torch.tensor([number], device=device), length)[0] for number, length in enumerate(row.lens)]
    return torch.stack([torch.block_diag(*(each[h] for each in own)) for h in range(row.heads)])[None]


def torch_variant(row: Row, device: str) -> TorchVariant:
    """The row's variant for FlexAttention and for plain torch."""
    n = row.parameter

    def causal(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q

    match row.variant:
        case "full":
            return TorchVariant()
        case "causal":
            return TorchVariant(mask_mod=causal)
        case "softcap":
            return TorchVariant(lambda score, _b, _h, _q, _kv: n * torch.tanh(score / n), causal)
        case "alibi":
            slopes = alibi_slopes(row.heads, device)
            return TorchVariant(lambda score, _b, h, q, kv: score + slopes[h] * (kv - q), causal)
        case "bias" | "bias_fp32":
            bias = pair_bias(row, device)
            return TorchVariant(lambda score, b, h, q, kv: score + bias[b, h, q, kv], bias=bias, learned=(bias,))
        case "t5":
            table = t5_table(row, device)

            def bucketed(score: Tensor, _b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return score + table[h, t5_bucket((q - kv).clamp(min=0), n)]

            return TorchVariant(bucketed, causal, learned=(table,))
        case "bias_by_key":
            key_bias = by_position(row, device)
            return TorchVariant(lambda score, _b, h, _q, kv: score + key_bias[h, kv], causal, learned=(key_bias,))
        case "factor_by_query":
            factor = by_position(row, device)
            return TorchVariant(lambda score, _b, h, q, _kv: score * factor[h, q], causal, learned=(factor,))
        case "sink":
            return TorchVariant(mask_mod=causal, sinks=sink_logits(row.heads, device))
        case "sigmoid":  # with a bias of -log(n), Ramapuram et al. 2024, arXiv 2409.04431
            return TorchVariant(lambda score, _b, _h, _q, _kv: score - math.log(row.length), causal, sigmoid=True)
        case "dropout":
            return TorchVariant(mask_mod=_packed(row, device) if row.lens else causal, dropout=n / 100)
        case "latent":
            return TorchVariant(mask_mod=_packed(row, device) if row.lens else causal)
        case "window":
            return TorchVariant(mask_mod=lambda _b, _h, q, kv: (kv <= q) & (q - kv < n))
        case "documents":
            doc = document_ids(row, device)
            return TorchVariant(mask_mod=lambda _b, _h, q, kv: (kv <= q) & (doc[kv] == doc[q]))
        case "packed" | "ragged":
            return TorchVariant(mask_mod=_packed(row, device))
        case "blocks":
            table = block_table(row, device)
            return TorchVariant(mask_mod=lambda _b, _h, q, kv: table[q // row.block, kv // row.block])
        case "prefix":
            return TorchVariant(mask_mod=lambda _b, _h, q, kv: (kv <= q) | (kv < n))
        case other:
            raise ValueError(f"variant {other!r} has no torch form")


def _packed(row: Row, device: str) -> MaskMod:
    """Causal in each of the row's sequences."""
    number = sequence_numbers(row, device)
    return lambda _b, _h, q, kv: (kv <= q) & (number[kv] == number[q])


def weft_variant(row: Row, device: str) -> tuple[weft.Attention, dict[str, int | Tensor]]:
    """The row's variant for Weft, and the operands that a call of it needs."""
    import weft
    from weft import batch, head, kv_pos, q_pos, score

    n, causal = row.parameter, kv_pos <= q_pos
    packed = {"cu_seqlens_q": starts(row, device)} if row.lens else {}
    match row.variant:
        case "full":
            return weft.Attention(name="full"), {}
        case "causal":
            return weft.Attention(mask=causal, name="causal"), {}
        case "packed" | "ragged":
            return weft.Attention(mask=causal, name="causal"), packed
        case "latent":
            latent = weft.Latent(LATENT_RANK, n)
            return weft.Attention(mask=causal, latent=latent, name="expanded_latent"), packed
        case "softcap":
            return weft.Attention(float(n) * weft.tanh(score / float(n)), causal, name="softcap"), {}
        case "alibi":
            slopes = weft.tensor("slopes", 1)
            declared = weft.Attention(score + slopes[head] * (kv_pos - q_pos), causal, name="alibi")
            return declared, {"slopes": alibi_slopes(row.heads, device)}
        case "bias" | "bias_fp32":
            bias = weft.tensor("bias", 4)
            declared = weft.Attention(score + bias[batch, head, q_pos, kv_pos], name="bias")
            return declared, {"bias": pair_bias(row, device)}
        case "t5":
            biased = weft.scores.t5_bias(weft.tensor("table", 2), n, bidirectional=False)(score)
            return weft.Attention(biased, causal, name="t5"), {"table": t5_table(row, device)}
        case "bias_by_key":
            biased = score + weft.tensor("key_bias", 2)[head, kv_pos]
            return weft.Attention(biased, causal, name="bias_by_key"), {"key_bias": by_position(row, device)}
        case "factor_by_query":
            scaled = score * weft.tensor("factor", 2)[head, q_pos]
            return weft.Attention(scaled, causal, name="factor_by_query"), {"factor": by_position(row, device)}
        case "sink":
            sinks = weft.tensor("sinks", 1)
            return weft.Attention(mask=causal, sink=sinks[head], name="sunk"), {"sinks": sink_logits(row.heads, device)}
        case "sigmoid":
            shifted = score - weft.log(1.0 * weft.kv_len)
            return weft.Attention(shifted, causal, name="sigmoid_attention", normalizer="sigmoid"), {}
        case "dropout":
            return weft.Attention(mask=causal, dropout=n / 100, name="dropped"), {"seed": SEED, **packed}
        case "window":
            window = weft.scalar("window", int)
            return weft.Attention(mask=causal & (q_pos - kv_pos < window), name="window"), {"window": n}
        case "documents":
            doc = weft.tensor("doc", 1, int)
            declared = weft.Attention(mask=causal & (doc[kv_pos] == doc[q_pos]), name="documents")
            return declared, {"doc": document_ids(row, device)}
        case "blocks":
            mask = weft.masks.block_sparse(weft.tensor("blocks", 2, bool), row.block)
            return weft.Attention(mask=mask, name="block_sparse"), {"blocks": block_table(row, device)}
        case "prefix":
            prefix = weft.scalar("prefix", int)
            return weft.Attention(mask=causal | (kv_pos < prefix), name="prefix_lm"), {"prefix": n}
        case other:
            raise ValueError(f"variant {other!r} has no Weft form")
