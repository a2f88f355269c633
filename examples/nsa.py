"""Native sparse attention (NSA, Yuan et al. 2025, arXiv 2502.11089): three branches, and a sum with learned gates.

Keys are compressed to one a block, and every query sees all complete blocks before it. What it sees there ranks the
blocks, of which it reads the best ones token by token. The third branch is a window.
"""

import torch
from torch import Tensor

import weft
from weft import batch, kv_head, kv_pos, masks, q_pos

chosen = weft.tensor("chosen", 4, bool)  # [B, Hkv, L, blocks]: which blocks a query of a group of heads reads
block, window = weft.scalar("block", int), weft.scalar("window", int)

compressed = weft.Attention(mask=masks.compressed(block), name="compressed")
selected = weft.Attention(mask=masks.causal & chosen[batch, kv_head, q_pos, kv_pos // block], name="selected")
local = weft.Attention(mask=masks.causal & masks.sliding_window(window), name="local")


def choose(query: Tensor, key: Tensor, lse: Tensor, size: int, count: int) -> Tensor:
    """The blocks that each query reads, bool [B, Hkv, L, blocks]: its own, and the best complete ones before.

    query [B, Hq, L, D], key [B, Hkv, L // size, D] compressed, lse [B, Hq, L] of the compressed branch. The heads that
    share a key head choose together. Nothing here has a gradient, as in the paper.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, Hkv, group, L, D]
    scores = grouped @ key.unsqueeze(2).mT / query.shape[-1] ** 0.5
    weights = (scores - lse.unflatten(1, (key.shape[1], -1)).unsqueeze(-1)).exp().sum(2)  # [B, Hkv, L, blocks]
    own = torch.arange(query.shape[2], device=query.device)[:, None] // size
    blocks = torch.arange(key.shape[2], device=query.device)
    ranked = weights.masked_fill(blocks >= own, 0.0).masked_fill(blocks == own, float("inf"))
    best = ranked.topk(min(count, len(blocks)), -1)
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best.indices, best.values > 0)


def attend(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, pool: Tensor, size: int, count: int, near: int
) -> Tensor:
    """query [B, Hq, L, D], key and value [B, Hkv, L, D], L a multiple of size; gates [B, Hq, L, 3]; out [B, Hq, L, D].

    pool: the share of each token in its compressed key and value, [size], learned here in place of the paper's MLP.
    """
    short = [(x.unflatten(2, (-1, size)) * pool[:, None]).sum(3) for x in (key, value)]
    # queries are tokens and keys are blocks: the first query stands at token 0
    coarse, lse = compressed(query, *short, block=size, q_offset=0, return_lse=True)
    with torch.no_grad():
        blocks = choose(query, short[0], lse, size, count)
    fine = selected(query, key, value, chosen=blocks, block=size)
    return (torch.stack([coarse, fine, local(query, key, value, window=near)], -1) * gates.unsqueeze(-2)).sum(-1)


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, pool: Tensor, size: int, count: int, near: int
) -> Tensor:
    """The same with every score written out, a query at a time."""
    group, length, scale = query.shape[1] // key.shape[1], query.shape[2], query.shape[3] ** -0.5
    outs = []
    for t in range(length):
        heads = []
        for h in range(query.shape[1]):
            q, k, v = query[:, h, t], key[:, h // group], value[:, h // group]
            done = (t + 1) // size  # complete blocks
            ck, cv = ((x[:, : done * size].unflatten(1, (done, size)) * pool[:, None]).sum(2) for x in (k, v))
            coarse = _softmax_read(q, ck, cv, scale) if done else torch.zeros_like(q)
            fine = torch.stack([_read_best(query[b], key[b], value[b], pool, h, t, size, count) for b in range(len(q))])
            near_by = slice(max(0, t - near + 1), t + 1)
            branches = (coarse, fine, _softmax_read(q, k[:, near_by], v[:, near_by], scale))
            heads.append((torch.stack(branches, -1) * gates[:, h, t, None]).sum(-1))
        outs.append(torch.stack(heads, 1))
    return torch.stack(outs, 2)


def _softmax_read(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, D], k and v [B, T, D]."""
    return torch.einsum("bt,btd->bd", (torch.einsum("bd,btd->bt", q, k) * scale).softmax(-1), v)


def _read_best(
    query: Tensor, key: Tensor, value: Tensor, pool: Tensor, h: int, t: int, size: int, count: int
) -> Tensor:
    """Query t of head h, of one batch row: attention over its own block and the best ones before."""
    group, scale, own = len(query) // len(key), query.shape[-1] ** -0.5, t // size
    k, v, done = key[h // group], value[h // group], (t + 1) // size
    votes = torch.zeros(own, dtype=query.dtype)
    for other in range(h // group * group, h // group * group + group):
        short = (k[: done * size].unflatten(0, (done, size)) * pool[:, None]).sum(1)
        votes = votes + (short @ query[other, t] * scale).softmax(0)[:own] if own else votes
    best = sorted([*sorted(range(own), key=lambda n: -votes[n].item())[: count - 1], own])
    rows = [n for b in best for n in range(b * size, min(t + 1, (b + 1) * size))]
    read: Tensor = (k[rows] @ query[h, t] * scale).softmax(0) @ v[rows]
    return read


def main(length: int = 128, size: int = 16, count: int = 3, near: int = 24, steps: int = 30) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query = torch.randn(1, 4, length, 32, device=device)
    key, value = torch.randn(2, 1, 2, length, 32, device=device)
    pool = torch.full((size,), 1 / size, device=device, requires_grad=True)
    logits = torch.zeros(1, 4, length, 3, device=device, requires_grad=True)

    out = attend(query, key, value, logits.sigmoid(), pool, size, count, near)
    q, k, v, gates, shares = (t.double().cpu() for t in (query, key, value, logits.sigmoid(), pool))
    exact = by_hand(q, k, v, gates, shares, size, count, near)
    print(f"largest difference to three branches by hand: {(out.cpu() - exact).abs().max().item():.1e}")
    print(compressed.show_mask(length, length // size, block_q=size // 2, block_kv=1, q_offset=0, block=size))

    target = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    optimizer = torch.optim.Adam([pool, logits], lr=0.1)
    for step in range(steps + 1):
        loss = (attend(query, key, value, logits.sigmoid(), pool, size, count, near) - target).square().mean()
        if step % max(1, steps // 3) == 0:
            print(f"step {step:3d}  mean square error {loss.item():.4f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
