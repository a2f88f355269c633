"""Sequences of their own lengths: packed one after the other to train, padded behind a cache to serve.

Packed rows are `[1, heads, tokens, dim]`, with the first token of each sequence in `cu_seqlens_q`. A cache that is
longer than what was written takes `kv_lens`, on the device: nothing waits for it, and new lengths compile nothing.
Positions are those of each sequence, so that one declaration serves both.
"""

import torch

import weft
from weft import kv_pos, masks, q_pos

window = weft.scalar("window", int)
local = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="local")


def main(lengths: tuple[int, ...] = (700, 30, 1, 400), heads: int = 4, dim: int = 64) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    # training: no padding, and gradients that stay inside each sequence
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    query, key, value = (rows(1, heads, sum(lengths), dim).requires_grad_() for _ in range(3))
    out = local(query, key, value, cu_seqlens_q=starts, window=128)
    out[:, :, : lengths[0]].sum().backward()
    assert key.grad is not None
    inside = key.grad[:, :, : lengths[0]].any() and not key.grad[:, :, lengths[0] :].any()
    print("gradients stay in the sequence that the loss reads:", bool(inside))

    first, last = int(starts[-2]), int(starts[-1])
    alone = local(*(x[:, :, first:last] for x in (query, key, value)), window=128)
    print(f"packed against alone: largest difference {(out[:, :, first:last] - alone).abs().max().item():.1e}")

    # serving: one new token a sequence, behind caches that are filled up to kv_lens
    room, filled = max(lengths) + 8, torch.tensor(lengths, device=device, dtype=torch.int32)
    keys, values = rows(len(lengths), 1, room, dim), rows(len(lengths), 1, room, dim)
    token = rows(len(lengths), heads, 1, dim)
    steps = []
    for _ in range(3):
        steps.append(local(token, keys, values, kv_lens=filled, window=128))
        filled += 1  # in place: what was prepared, or captured in a CUDA graph, reads the new lengths
    print("three tokens decoded:", [list(step.shape) for step in steps])

    keys[:, :, int(filled.max()) :] = torch.nan
    clean = local(token, keys, values, kv_lens=filled, window=128)
    print("what lies behind a length reaches nothing:", bool(torch.isfinite(clean).all()))


if __name__ == "__main__":
    main()
