"""Weft in place of `torch.nn.MultiheadAttention`: the same weights, arguments and masks.

What torch's module gives and this one cannot are the average weights: they are never in memory. `need_weights=True` is
refused, and the default is False. `add_bias_kv` is refused too; `add_zero_attn`, a key of zeros, is a sink.
Where a query sees nothing torch gives NaN, and this gives 0.

In evaluation without gradients `nn.TransformerEncoderLayer` passes its weights to a kernel of torch's own, and calls no
module: `torch.backends.mha.set_fastpath_enabled(False)` has it call this one.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import weft
from weft import batch, head, kv_pos, q_pos, score


@cache
def variant(attn: str, padding: str, has_zero: bool) -> weft.Attention:
    """attn: "", "causal", "bool" or "float"; padding: "", "bool" or "float". Bools are True where a pair is hidden."""
    hidden, bias = weft.tensor("hidden", 4, bool), weft.tensor("bias", 4)  # [B, H, L, T]
    padded, padding_bias = weft.tensor("padded", 2, bool), weft.tensor("padding_bias", 2)  # [B, T]
    summed, mask = 1.0 * score, kv_pos >= 0
    if attn == "causal":
        mask = mask & (kv_pos <= q_pos)
    elif attn == "bool":
        mask = mask & ~hidden[batch, head, q_pos, kv_pos]
    elif attn == "float":
        summed = summed + bias[batch, head, q_pos, kv_pos]
    if padding == "bool":
        mask = mask & ~padded[batch, kv_pos]
    elif padding == "float":
        summed = summed + padding_bias[batch, kv_pos]
    return weft.Attention(summed, mask, sink=0.0 if has_zero else None, dropout=weft.scalar("share", float))


class MultiheadAttention(nn.MultiheadAttention):
    """torch's module, made by its arguments, or from one that is there: `MultiheadAttention.of(module)`."""

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> "MultiheadAttention":
        """The same module, parameters and all, computed by Weft."""
        if module.bias_k is not None:
            raise ValueError("add_bias_kv=True: a key that is not in the sequence; append it to key and value")
        module.__class__ = cls
        assert isinstance(module, cls)
        return module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Tensors, masks and layouts as torch's module takes them; the output, and None in place of weights."""
        if need_weights:
            raise ValueError("need_weights=True: weights are never in memory; pass need_weights=False")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        operands, attn, padding = _operands(q, k, key_padding_mask, attn_mask, is_causal)
        attend = variant(attn, padding, self.add_zero_attn)
        # q_offset=0: masks are read by row, and causal means from the first key on, as in torch
        is_dropping = self.training and self.dropout > 0
        out = attend(q, k, v, q_offset=0, share=self.dropout, train=is_dropping, **operands)
        y = self.out_proj(out.transpose(1, 2).flatten(2))
        y = y if self.batch_first else y.transpose(0, 1)
        return (y if is_batched else y.squeeze(0 if self.batch_first else 1)), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [nn.functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases)]

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return heads


def _operands(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool
) -> tuple[dict[str, Any], str, str]:
    """Operands of the call, and which masks there are."""
    operands: dict[str, Any] = {}
    attn, padding = "", ""
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True: torch's module wants attn_mask too")
    if is_causal:  # a promise of what the mask holds
        attn = "causal"
    elif attn_mask is not None:
        attn = "bool" if attn_mask.dtype == torch.bool else "float"
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        whole = attn_mask.view(shape) if attn_mask.dim() == 3 else attn_mask.expand(shape)
        operands["hidden" if attn == "bool" else "bias"] = whole
    if key_padding_mask is not None:
        padding = "bool" if key_padding_mask.dtype == torch.bool else "float"
        operands["padded" if padding == "bool" else "padding_bias"] = key_padding_mask
    return operands, attn, padding


def main(length: int = 48, width: int = 64) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    theirs = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, device=device)
    ours = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, device=device)
    ours.load_state_dict(theirs.state_dict())
    MultiheadAttention.of(ours.self_attn)

    x = torch.randn(3, length, width, device=device)
    padded = torch.arange(length, device=device) >= torch.tensor([[length], [length // 2], [5]], device=device)
    causal = nn.Transformer.generate_square_subsequent_mask(length, device=device)
    masks: dict[str, dict[str, Any]] = {
        "no mask": {},
        "attn_mask": {"src_mask": causal},
        "attn_mask, is_causal": {"src_mask": causal, "is_causal": True},
        "key_padding_mask": {"src_key_padding_mask": padded},
        "both": {"src_mask": causal.isinf(), "src_key_padding_mask": padded},
    }
    for name, options in masks.items():
        expected, out = theirs(x, **options), ours(x, **options)
        print(f"{name:22} largest difference {(out - expected)[~padded].abs().max().item():.1e}")
    try:
        ours.self_attn(x, x, x, need_weights=True)
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
