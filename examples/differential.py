"""Differential attention: the difference of two softmaxes, as two calls of one variant on the same values.

What both maps have in common is noise, and cancels (Differential Transformer, Ye et al. 2024, arXiv 2410.05258):
(softmax(Q1 K1^T) - lambda * softmax(Q2 K2^T)) V, where lambda is learned.
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


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The same with both maps written out."""
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(group, 1).mT / query.shape[3] ** 0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    first, second = scores.masked_fill(hidden, float("-inf")).softmax(-1).chunk(2, 1)
    out: torch.Tensor = (first - share * second) @ value.repeat_interleave(group, 1)
    return out


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


if __name__ == "__main__":
    main()
