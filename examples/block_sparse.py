"""A long context with block-sparse attention: a small classifier learns, and memory grows with the length alone.

Tokens are cut into blocks. A table, an operand like any other, says which blocks see which: their own, the one before,
a few drawn at random, and the last block sees all. Kernels list the tiles of these blocks on the device and visit no
others, so that a step at 64k tokens costs what the table leaves. What is learnt: which of four kinds of token, each a
rare one, a sequence holds; it is read off the last position.

    python examples/block_sparse.py --length 65536     # on a GPU; 512 where no length is given
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import weft
from weft import masks

BLOCK, KINDS, WORDS = 64, 4, 32
blocks = weft.tensor("blocks", 2, bool)
sparse = weft.Attention(mask=masks.causal & masks.block_sparse(blocks, BLOCK), name="sparse")


def table(length: int, drawn: int, device: torch.device) -> Tensor:
    """bool [blocks, blocks]: which blocks of keys each block of queries sees."""
    number = -(-length // BLOCK)
    place = torch.arange(number, device=device)
    seen = (place[:, None] - place).clamp(min=0) <= 1
    seen |= torch.rand(number, number, device=device) < drawn / number
    seen[-1] = True
    return seen


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        rows = self.project(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = rows.unbind(2)  # [B, heads, L, dim], views
        update: Tensor = self.out(sparse(query, key, value, blocks=seen).transpose(1, 2).flatten(2))
        return x + update


class Classifier(nn.Module):
    def __init__(self, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.read = nn.Linear(width, KINDS)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, seen)
        kinds: Tensor = self.read(x[:, -1])
        return kinds


def batch(number: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [number, length], one in ten of the sequence's kind, and the kinds [number]."""
    kinds = torch.randint(KINDS, (number,), device=device)
    tokens = torch.randint(KINDS, WORDS, (number, length), device=device)
    rare = torch.rand(number, length, device=device) < 0.1
    return torch.where(rare, kinds[:, None], tokens), kinds


def saved_bytes(model: nn.Module, length: int, device: torch.device) -> int:
    """What a step of one sequence keeps for its backward pass."""
    kept: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, _ = batch(1, length, device)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        model(tokens, table(length, 4, device))
    return sum(kept.values())


def main(length: int = 512, steps: int = 30, sequences: int = 8) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = table(length, 4, device)
    print(f"{length} tokens in blocks of {BLOCK}: {seen.tril().float().sum().item():.0f} of {seen.numel()} are seen")
    losses = []
    for step in range(steps):
        tokens, kinds = batch(sequences, length, device)
        loss = nn.functional.cross_entropy(model(tokens, seen), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    print("the loss fell:", sum(losses[-3:]) < 0.5 * sum(losses[:3]))
    short, long = (saved_bytes(model, n, device) / n for n in (length // 2, length))
    print(f"kept for the backward pass, bytes a token: {short:.0f} at {length // 2} tokens, {long:.0f} at {length}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    options.add_argument("--steps", type=int, default=30)
    main(**vars(options.parse_args()))
