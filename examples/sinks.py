"""A layer of GPT-OSS: a sliding window, grouped heads, and a learned logit a head that takes weight and gives nothing.

Where no key is worth reading, a softmax must still give its weight to some. A sink takes it: one more term in the
denominator, without a value (GPT-OSS, arXiv 2508.10925; with the constant 0 it is softmax1, "attention is off by one").
"""

import torch

import weft
from weft import head, kv_pos, q_pos

window = weft.scalar("window", int)
sinks = weft.tensor("sinks", 1)  # [Hq]

gpt_oss = weft.Attention(
    mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window),
    sink=sinks[head],
    name="gpt_oss",
)


def by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int, table: torch.Tensor
) -> torch.Tensor:
    """The same as models write it: a column of sinks beside the scores, dropped after the softmax."""
    batch, heads, length, dim = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    scores = (query @ key.mT / dim**0.5).masked_fill((distance < 0) | (distance >= size), float("-inf"))
    column = table.view(1, heads, 1, 1).expand(batch, heads, length, 1).to(scores.dtype)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def main(length: int = 512, size: int = 64, steps: int = 40) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value = (torch.randn(1, heads, length, 64, device=device) for heads in (8, 2, 2))
    table = torch.linspace(-2.0, 5.0, 8, device=device)

    out, lse = gpt_oss(query, key, value, window=size, sinks=table, return_lse=True)
    exact = by_hand(query.double(), key.double(), value.double(), size, table.double())
    print(f"largest error against float64 by hand {(out - exact).abs().max():.1e}")
    taken = (table[:, None] - lse[0]).exp().mean(-1)
    print("weight that the sinks take, by head:", ", ".join(f"{share:.2f}" for share in taken.tolist()))

    learned = torch.zeros(8, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([learned], lr=0.5)
    for step in range(steps):
        loss = (gpt_oss(query, key, value, window=size, sinks=learned) - out).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0 or step == steps - 1:
            print(f"step {step:3d}   mean square error {loss.item():.2e}")
    print("learned", [round(x, 1) for x in learned.tolist()], "for", [round(x, 1) for x in table.tolist()])


if __name__ == "__main__":
    main()
