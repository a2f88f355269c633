"""Differential attention: the difference of two softmaxes, as two calls of one variant on the same values.

What both maps have in common is noise, and cancels (Differential Transformer, Ye et al. 2024, arXiv 2410.05258):
(softmax(Q1 K1^T) - lambda * softmax(Q2 K2^T)) V, where lambda is learned.

Version 2 (Ye et al. 2026, from Microsoft) has both queries of a head read the same keys, so that one call computes both
maps; lambda is a projection of each token, and no norm follows.
"""

import torch

import weft

causal = weft.Attention(mask=weft.masks.causal, name="causal")


def differential(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """query [B, 2 * H, L, D], key [B, 2 * Hkv, T, D]: the first half of the heads is the first map's.

    value [B, Hkv, T, Dv]; share: lambda, a number or [H, 1, 1]. Returns [B, H, L, Dv].
    """
    (query_1, query_2), (key_1, key_2) = query.chunk(2, 1), key.chunk(2, 1)
    return causal(query_1, key_1, value) - share * causal(query_2, key_2, value)


def differential_v2(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """query [B, 2 * H, L, D]: heads 2 h and 2 h + 1 are the maps of head h, and read the same key head.

    key [B, Hkv, T, D], value [B, Hkv, T, Dv], H a multiple of Hkv; gate [B, H, L], whose sigmoid is lambda. Returns
    [B, H, L, Dv].
    """
    out = causal(query, key, value)
    return out[:, 0::2] - gate.sigmoid().unsqueeze(-1) * out[:, 1::2]


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The same with both maps written out."""
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(group, 1).mT / query.shape[3] ** 0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    first, second = scores.masked_fill(hidden, float("-inf")).softmax(-1).chunk(2, 1)
    out: torch.Tensor = (first - share * second) @ value.repeat_interleave(group, 1)
    return out


def by_hand_v2(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Version 2, a head at a time."""
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    heads = []
    for h in range(query.shape[1] // 2):
        k, v = key[:, 2 * h // group], value[:, 2 * h // group]
        first, second = (query[:, n] @ k.mT / query.shape[3] ** 0.5 for n in (2 * h, 2 * h + 1))
        first, second = (s.masked_fill(hidden, float("-inf")).softmax(-1) for s in (first, second))
        heads.append((first - gate[:, h].sigmoid().unsqueeze(-1) * second) @ v)
    return torch.stack(heads, 1)


def main(length: int = 512, heads: int = 4, dim: int = 64) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key = (torch.randn(1, 2 * heads, length, dim, device=device) for _ in range(2))
    value = torch.randn(1, heads, length, 2 * dim, device=device)  # as wide as both maps' queries
    share = torch.full((heads, 1, 1), 0.8, device=device, requires_grad=True)

    out = differential(query, key, value, share)
    exact = by_hand(*(t.double() for t in (query, key, value, share)))
    print(f"largest error against float64 {(out.double() - exact).abs().max().item():.2e}")
    (gradient,) = torch.autograd.grad(out.square().sum(), share)
    print("gradient of lambda, by head:", ", ".join(f"{g:.1f}" for g in gradient.flatten().tolist()))

    gate = torch.randn(1, heads, length, device=device)
    shared = key[:, :heads], value  # a key head for each pair of maps
    out, exact = differential_v2(query, *shared, gate), by_hand_v2(*(t.double() for t in (query, *shared, gate)))
    print(f"version 2: largest difference to float64 {(out.double() - exact).abs().max().item():.2e}")


if __name__ == "__main__":
    main()
