"""Dropout in training: which weights fall away follows from a seed, so that a checkpoint computes the same ones again.

A layer learns 48 sequences by heart, once without and once with dropout of attention weights, and is then asked about
sequences that it has not seen. Weights are dropped in training alone (`train=self.training`), before they meet the
values, and no matrix of them is ever in memory (Philox, Salmon et al. 2011; dropout, Srivastava et al. 2014).
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from weft import kv_pos, q_pos

share = weft.scalar("share", float)  # of the weights that are dropped; a new value compiles nothing
dropped = weft.Attention(mask=kv_pos <= q_pos, dropout=share, name="dropped")


class Layer(nn.Module):
    """One layer of attention from tokens to the next token."""

    def __init__(self, tokens: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.embedding = nn.Embedding(tokens, heads * width)
        self.positions = nn.Parameter(torch.randn(256, heads * width) * 0.1)
        self.projection = nn.Linear(heads * width, 3 * heads * width)
        self.head = nn.Linear(heads * width, tokens)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = dropped(query, key, value, share=self.dropout, train=self.training)
        return out.transpose(1, 2).flatten(2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(x + checkpoint(self.attend, x, use_reentrant=False))
        return logits


def sequences(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Each token is one of the two before it, or noise."""
    tokens = torch.randint(16, (count, length), generator=generator)
    for i in range(2, length):
        pick = torch.randint(1, 3, (count,), generator=generator)
        copied = torch.rand(count, generator=generator) < 0.8
        tokens[:, i] = torch.where(copied, tokens[torch.arange(count), i - pick], tokens[:, i])
    return tokens


def loss_of(model: Layer, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main(steps: int = 120, length: int = 65) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    learned, unseen = (sequences(48, length, generator).to(device) for _ in range(2))
    for dropout in (0.0, 0.3):
        torch.manual_seed(1)
        model = Layer(16, 2, 32, dropout).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(steps):
            loss = loss_of(model.train(), learned)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            seen, new = loss_of(model.eval(), learned).item(), loss_of(model, unseen).item()
        print(f"dropout {dropout:.1f}: loss {seen:.2f} on what it learned, {new:.2f} on what it has not seen")


if __name__ == "__main__":
    main()
