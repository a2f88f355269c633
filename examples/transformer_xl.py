"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): relative positions, and the segment before as memory.

The score of query i and key j is (q_i + u) . k_j + (q_i + v) . r_(i-j), where u and v are learned for each head, and r
is a projection of a sinusoid of the distance. Keys are those of memory and segment, so that there are more of them than
queries; the last query stands at the last key, as it does without q_offset.
"""

import torch
from torch import Tensor, nn

import weft
from weft import batch, head, kv_len, kv_pos, q_len, q_pos, score

# [B, H, L, T + L - 1]: what a query gives to each distance, from T - 1 behind it to L - 1 ahead; one entry a pair
far = weft.tensor("far", 4)
row = q_pos - (kv_len - q_len)
xl = weft.Attention(score + far[batch, head, row, kv_pos - q_pos + kv_len - 1], mask=kv_pos <= q_pos, name="xl")


def sinusoids(distances: Tensor, width: int) -> Tensor:
    """[N, width], of distances [N]: sines, then cosines."""
    rates = 10_000 ** (-torch.arange(0, width, 2, device=distances.device, dtype=distances.dtype) / width)
    angles = distances[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """query [B, H, L, D], key and value [B, H, T, D], u and v [H, D]; out [B, H, L, D].

    r [H, T + L - 1, D]: of distances T - 1, T - 2 and so on to -(L - 1).
    """
    distant = (query + v[:, None]) @ r.mT * query.shape[-1] ** -0.5
    return xl(query + u[:, None], key, value, far=distant)


def by_hand(query: Tensor, key: Tensor, value: Tensor, r: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The same with all four terms of the paper."""
    length, total, scale = query.shape[2], key.shape[2], query.shape[3] ** -0.5
    i, j = torch.arange(total - length, total)[:, None], torch.arange(total)
    of_pair = r[:, (total - 1) - (i - j)]  # [H, L, T, D]
    terms = (
        torch.einsum("bhid,bhjd->bhij", query, key)
        + torch.einsum("bhid,hijd->bhij", query, of_pair)
        + torch.einsum("hd,bhjd->bhj", u, key)[:, :, None]
        + torch.einsum("hd,hijd->hij", v, of_pair)
    )
    out: Tensor = (terms * scale).masked_fill(j > i, float("-inf")).softmax(-1) @ value
    return out


class Layer(nn.Module):
    """Attention of a segment over itself and the memory before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v, self.r, self.out = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.u_bias, self.v_bias = (nn.Parameter(torch.zeros(heads, width // heads)) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        return heads

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x [B, L, width], memory [B, M, width], which gets no gradient."""
        seen = torch.cat([memory.detach(), x], 1)
        distances = torch.arange(seen.shape[1] - 1, -x.shape[1], -1, device=x.device, dtype=x.dtype)
        r = self.split(self.r(sinusoids(distances, self.width)))
        query, key, value = self.split(self.q(x)), self.split(self.k(seen)), self.split(self.v(seen))
        out = attend(query, key, value, r, self.u_bias, self.v_bias)
        y: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return y


def main(length: int = 32, memory: int = 32, steps: int = 60) -> None:
    """Learns to give back what stood `length` tokens before: it lies in the memory."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value = (torch.randn(2, 2, n, 16, device=device) for n in (length, length + memory, length + memory))
    r, u, v = (torch.randn(*s, 16, device=device) for s in ((2, 2 * length + memory - 1), (2,), (2,)))
    exact = by_hand(*(t.double().cpu() for t in (query, key, value, r, u, v)))
    difference = (attend(query, key, value, r, u, v).cpu() - exact).abs().max().item()
    print(f"largest difference to the four terms by hand: {difference:.1e}")

    layer = Layer(width=32, heads=2).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for step in range(steps + 1):
        before, x = torch.randn(2, 8, length, 32, device=device)
        loss = (layer(x, before[:, -memory:]) - before).square().mean()
        if step % max(1, steps // 3) == 0:
            print(f"step {step:3d}  mean square error {loss.item():.4f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"u and v learned: {layer.u_bias.abs().max().item():.2f}, {layer.v_bias.abs().max().item():.2f} at most")


if __name__ == "__main__":
    main()
