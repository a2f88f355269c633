"""Mixture of block attention (MoBA, Lu et al. 2025, arXiv 2502.13189): each query is routed to a few blocks of keys.

A block is as good as its mean key is for the query. A query reads the best blocks before its own, and its own up to
itself. Which ones is a bool operand, and tiles that no query of theirs reads are skipped.
"""

import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos

routed = weft.tensor("routed", 4, bool)  # [B, Hq, L, blocks]
block = weft.scalar("block", int)
moba = weft.Attention(mask=masks.causal & routed[batch, head, q_pos, kv_pos // block], name="moba")


def route(query: Tensor, key: Tensor, size: int, count: int) -> Tensor:
    """The blocks that each query reads, bool [B, Hq, L, blocks]; query [B, Hq, L, D], key [B, Hkv, L, D]."""
    length = key.shape[2]
    padded = torch.nn.functional.pad(key, (0, 0, 0, -length % size)).unflatten(2, (-1, size))
    rows = torch.full((padded.shape[2], 1), size, device=key.device)
    rows[-1] -= -length % size
    means = (padded.sum(3) / rows).repeat_interleave(query.shape[1] // key.shape[1], 1)
    own = torch.arange(length, device=key.device)[:, None] // size
    blocks = torch.arange(means.shape[2], device=key.device)
    fit = (query @ means.mT).masked_fill(blocks > own, -torch.inf).masked_fill(blocks == own, torch.inf)
    best = fit.topk(min(count, len(blocks)), -1)
    return torch.zeros_like(fit, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)


def attend(query: Tensor, key: Tensor, value: Tensor, size: int, count: int) -> Tensor:
    """query [B, Hq, L, D], key and value [B, Hkv, L, D]; out [B, Hq, L, D]. The routing has no gradient."""
    with torch.no_grad():
        blocks = route(query, key, size, count)
    return moba(query, key, value, routed=blocks, block=size)


def by_hand(query: Tensor, key: Tensor, value: Tensor, size: int, count: int) -> Tensor:
    """The same, a query at a time: the keys of its blocks are gathered."""
    group, scale = query.shape[1] // key.shape[1], query.shape[3] ** -0.5
    out = torch.zeros_like(query)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        q, k, v = query[b, h, t], key[b, h // group], value[b, h // group]
        before = range(t // size)
        fit = {n: (q @ k[n * size : (n + 1) * size].mean(0)).item() for n in before}
        read = [*sorted(before, key=lambda n: -fit[n])[: count - 1], t // size]
        rows = [j for n in read for j in range(n * size, min(t + 1, (n + 1) * size))]
        weights = (k[rows] @ q * scale).softmax(0)
        out = out.index_put((torch.tensor(b), torch.tensor(h), torch.tensor(t)), weights @ v[rows])
    return out


def main(length: int = 100, size: int = 16, count: int = 3) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query = torch.randn(1, 4, length, 32, device=device)
    key, value = torch.randn(2, 1, 2, length, 32, device=device)
    out = attend(query, key, value, size, count)
    q, k, v = (t.double().cpu() for t in (query, key, value))
    exact = by_hand(q, k, v, size, count)
    print(f"largest difference to keys gathered by hand: {(out.cpu() - exact).abs().max().item():.1e}")
    print("what every eighth query of head 0 reads:")
    for t, row in list(enumerate(route(query, key, size, count)[0, 0].tolist()))[::8]:
        print(f"{t:5d}  " + "".join("█" if is_read else "·" for is_read in row))


if __name__ == "__main__":
    main()
