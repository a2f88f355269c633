"""A score that no library has: distance counts less where a token says so, learned through a tensor operand.

Every query token carries a `reach`, indexed by batch and position. Scores fall off with distance / exp(reach), and a
learned table of per-head temperatures sharpens or softens each head. Both operands get gradients from the kernels.
"""

import torch

import weft
from weft import batch, head, kv_pos, q_pos, score

reach = weft.tensor("reach", 2)  # [B, positions]
temperature = weft.tensor("temperature", 1)  # [Hq]

reaching = weft.Attention(
    score=score * weft.exp(temperature[head]) - weft.log(1.0 + (q_pos - kv_pos) * weft.exp(-reach[batch, q_pos])),
    mask=kv_pos <= q_pos,
    name="reaching",
)


def main(length: int = 128, steps: int = 60) -> None:
    """Teach the operands a target that attends near in even rows and far in odd rows."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, length, 32) for _ in range(3))
    wanted_reach = torch.where(torch.arange(length) % 2 == 0, -2.0, 4.0).expand(1, length)
    wanted = reaching.reference(query, key, value, reach=wanted_reach, temperature=torch.tensor([0.5, 0.0, -0.5, -1.0]))

    learned_reach, learned_temperature = torch.zeros(1, length, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([learned_reach, learned_temperature], lr=0.15)
    for step in range(steps):
        out = reaching(query, key, value, reach=learned_reach, temperature=learned_temperature)
        loss = (out - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 6) == 0 or step == steps - 1:
            print(f"step {step:3d}   mean square error {loss.item():.2e}")
    rows = learned_reach.detach()[0, length // 4 :]
    print(f"reach of even rows {rows[0::2].mean():+.2f} (wanted -2), of odd rows {rows[1::2].mean():+.2f} (wanted +4)")
    print("temperatures", [round(t, 2) for t in learned_temperature.tolist()], "(wanted 0.5, 0.0, -0.5, -1.0)")


if __name__ == "__main__":
    main()
