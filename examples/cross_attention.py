"""Cross attention: queries of a decoder over keys of an encoder, whose sequences are padded.

A mask that reads no positions of queries needs no more. Where the first query stands at the first key, as in an
alignment of speech and text, a call gives `q_offset=0`: without it the last query stands at the last key.
"""

import torch
from torch import Tensor, nn

import weft
from weft import batch, kv_len, kv_pos, q_len, q_pos

everything = weft.Attention(name="everything")  # kv_lens= of the call hides the padding
where_valid = weft.Attention(mask=weft.tensor("valid", 2, bool)[batch, kv_pos], name="where_valid")
# query i looks at keys up to `near` from kv_len / q_len * i: both sides, times q_len, stay whole numbers
near = weft.scalar("near", int)
aligned = weft.Attention(mask=weft.abs(kv_pos * q_len - q_pos * kv_len) <= near * q_len, name="aligned")


class CrossAttention(nn.Module):
    """queries [B, L, width] over memory [B, T, width], of which each row has its own length."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """lengths: int32 [B], of the memory."""
        out = everything(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)), kv_lens=lengths)
        y: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return y


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """The definition; seen: bool, which broadcasts to [B, H, L, T]. A query that sees nothing gives 0."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out: Tensor = weights.nan_to_num(0.0) @ value
    return out


def main(queries: int = 40, keys: int = 24) -> None:
    """More queries than keys, as a summary is shorter than its text, and speech longer than its transcript."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, (key, value) = torch.randn(2, 4, queries, 32, device=device), torch.randn(2, 2, 4, keys, 32, device=device)
    lengths = torch.tensor([keys, keys // 3], dtype=torch.int32, device=device)
    valid = torch.arange(keys, device=device) < lengths[:, None]
    q, k, v = (t.double() for t in (query, key, value))

    exact = by_hand(q, k, v, valid[:, None, None])
    for name, out in (
        ("kv_lens=", everything(query, key, value, kv_lens=lengths)),
        ("a bool operand", where_valid(query, key, value, valid=valid)),
    ):
        print(f"padded keys by {name}: largest error {(out - exact).abs().max().item():.1e}")

    places = torch.arange(queries, device=device, dtype=torch.float64)[:, None] * keys / queries
    diagonal = (torch.arange(keys, device=device) - places).abs() <= 3
    out = aligned(query, key, value, near=3, q_offset=0)
    print(f"aligned: largest error {(out - by_hand(q, k, v, diagonal)).abs().max().item():.1e}")
    print(aligned.show_mask(queries, keys, block_q=4, block_kv=2, near=3, q_offset=0))

    layer = CrossAttention(128, heads=4).to(device)
    memory = torch.randn(2, keys, 128, device=device, requires_grad=True)
    layer(torch.randn(2, queries, 128, device=device), memory, lengths).sum().backward()
    assert memory.grad is not None
    print("gradients of padding:", memory.grad[1, keys // 3 :].abs().max().item())


if __name__ == "__main__":
    main()
