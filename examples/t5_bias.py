"""A T5 bias that learns: a number for each head and bucket of distances, trained through the attention it is added to.

The task: each token is to bring back the token that came `back` places before it. Queries and keys are the same random
vectors for all tokens, so that a head can find the place by distance alone, from its table. Kernels sum the gradient of
the table over diagonals of the scores; no tensor of all pairs is made.
"""

import torch

import weft
from weft import kv_pos, q_pos, score

table = weft.tensor("table", 2)  # [heads, buckets]
t5 = weft.Attention(
    weft.scores.t5_bias(table, buckets=16, max_distance=32, bidirectional=False)(score),
    mask=kv_pos <= q_pos,
    scale=1.0,
    name="t5",
)


def main(length: int = 64, heads: int = 2, steps: int = 60, back: int = 3) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key = (0.1 * torch.randn(1, heads, length, 16, device=device) for _ in "qk")
    embedding = torch.nn.Embedding(16, heads, device=device)  # as T5 keeps it; the call takes its transpose
    torch.nn.init.zeros_(embedding.weight)

    exact = t5.reference(*(x.double() for x in (query, key, key)), table=embedding.weight.T.double())
    out = t5(query, key, key, table=embedding.weight.T)
    print(f"largest error against float64 {(out - exact).abs().max():.1e}")

    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.15)
    for step in range(steps):
        value = torch.randn(4, heads, length, 16, device=device)
        found = t5(query.expand(4, -1, -1, -1), key.expand(4, -1, -1, -1), value, table=embedding.weight.T)
        loss = (found[:, :, back:] - value[:, :, :-back]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0 or step == steps - 1:
            print(f"step {step:3d}   mean square error {loss.item():.3f}")
    learned = embedding.weight.T.argmax(-1).tolist()
    print(f"bucket that each head learned to read: {learned}, of distance {back}")


if __name__ == "__main__":
    main()
