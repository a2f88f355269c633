"""Multi-token prediction with registers (MuToR, Gerontopoulos et al. 2025, arXiv 2505.10518).

Behind each token stands a register, which is asked for the token `ahead` steps later. No other row sees a register, so
that tokens are computed as without them: a trained model leaves them out. What is asked for is told by the position
that a register's rotary embedding has, that of the token before the one it predicts.

Heads that predict further tokens from the same row (Gloeckle et al. 2024, arXiv 2404.19737) and the modules of
DeepSeek-V3, which shift their inputs, are causal attention as it is.
"""

import torch
from torch import Tensor, nn

import weft

# how many registers stand behind each token is told by the call: 1 in training, 0 afterwards
mutor = weft.Attention(mask=weft.masks.registers(weft.scalar("registers", int)), name="mutor")


def interleaved(tokens: Tensor, register: Tensor) -> Tensor:
    """Embeddings [B, L, width] with a register [width] behind each: [B, 2 * L, width]."""
    return torch.stack([tokens, register.expand_as(tokens)], 2).flatten(1, 2)


def positions(length: int, ahead: int, device: torch.device) -> Tensor:
    """Positions of the rows, for the rotary embedding: [2 * L]. The mask counts rows, and needs none of this."""
    tokens = torch.arange(length, device=device)
    return torch.stack([tokens, tokens + ahead - 1], 1).flatten()


class Model(nn.Module):
    """One layer of attention between an embedding and a projection to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed, self.register = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(width))
        self.attend = weft.nn.Attention(width, heads=heads, rope=weft.nn.Rotary(width // heads), variant=mutor)
        self.mix = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.read = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, ahead: int | None = None) -> Tensor:
        """Logits [B, L, vocabulary]; with registers that look `ahead`, [B, L, 2, vocabulary]."""
        x, places = self.embed(tokens), None
        if ahead is not None:
            x, places = interleaved(x, self.register), positions(tokens.shape[1], ahead, tokens.device)[None]
        x = x + self.attend(x, positions=places, registers=0 if ahead is None else 1)
        logits: Tensor = self.read(x + self.mix(x))
        return logits if ahead is None else logits.unflatten(1, (-1, 2))


def losses(model: Model, text: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
    """Of the next token, and of registers: text int64 [B, L + ahead]."""
    length = text.shape[1] - ahead
    logits = model(text[:, :length], ahead)
    following = nn.functional.cross_entropy(logits[:, :, 0].flatten(0, 1), text[:, 1 : length + 1].flatten())
    registers = nn.functional.cross_entropy(logits[:, :, 1].flatten(0, 1), text[:, ahead:].flatten())
    return following, registers


def main(length: int = 32, ahead: int = 3, steps: int = 60) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(mutor.show_mask(32, 32, block_q=4, block_kv=2, registers=1))
    model = Model(vocabulary=16, width=32, heads=2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps + 1):
        start = torch.randint(16, (8, 1), device=device)
        text = (start + 3 * torch.arange(length + ahead, device=device)) % 16  # a step of 3: both losses can be learned
        following, registers = losses(model, text, ahead)
        if step % max(1, steps // 3) == 0:
            print(f"step {step:3d}  next token {following.item():.3f}  {ahead} ahead {registers.item():.3f}")
        optimizer.zero_grad()
        (following + registers).backward()
        optimizer.step()
    with torch.no_grad():
        same = (model(text[:, :length], ahead)[:, :, 0] - model(text[:, :length])).abs().max().item()
    print(f"tokens with and without registers: largest difference {same:.1e}")


if __name__ == "__main__":
    main()
