"""A small character-level GPT whose attention is handed in: any function of query, key and value will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft import kv_pos, q_pos, score

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, Hq, L, D], [B, Hkv, T, D] twice -> [B, Hq, L, D]
Cache = list[tuple[Tensor, Tensor]]  # key and value so far [B, Hkv, T, D], one pair a layer

window = weft.scalar("window", int)
capped_window = weft.Attention(
    score=20.0 * weft.tanh(score / 20.0),
    mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window),
    name="capped_window",
)


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2  # grouped: each key head serves two query heads

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    """Attention, then a two-layer network, each added to its own input."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        inner = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.before_attention, self.before_network = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, inner, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.network = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(
        self, x: Tensor, rotation: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        c = self.config
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        query, key, value = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        x = x + self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.network(self.before_network(x)), (key, value)


class CharGPT(nn.Module):
    """Decoder-only transformer over characters; the same `attend` serves training, prefill and decode."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [B, L, vocabulary] of tokens [B, L]; `cache` holds what came before and is brought up to date."""
        seen = cache[0][0].shape[2] if cache else 0
        rotation = rotation_of(torch.arange(seen, seen + tokens.shape[1], device=tokens.device), self.config.head_dim)
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x, pair = block(x, rotation, cache[layer] if seen and cache else None)
            if cache is not None:
                cache[layer : layer + 1] = [pair]
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats a character, of predicting each next token of [B, L + 1]."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def rotation_of(positions: Tensor, dim: int) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864): one complex turn a position and pair of columns, [L, dim / 2]."""
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2, device=positions.device) / dim)
    angles = torch.outer(positions.float(), frequency)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn pairs of columns of [B, H, L, D] by the angles of their positions."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


@torch.no_grad()
def generate(model: CharGPT, prompt: Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
    """`count` tokens that follow `prompt` [1, L]: one pass over the prompt, then one query a step against the cache."""
    random = torch.Generator(prompt.device).manual_seed(seed)
    cache: Cache = []
    tokens, last = [prompt], prompt
    for _ in range(count):
        logits = model(last, cache)[:, -1].float() / temperature
        last = torch.multinomial(logits.softmax(-1), 1, generator=random)
        tokens.append(last)
    return torch.cat(tokens, dim=1)


class Text:
    """A text as character numbers."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        numbers = {c: i for i, c in enumerate(self.characters)}
        self.tokens = torch.tensor([numbers[c] for c in text])

    def batch(self, random: torch.Generator, count: int, length: int) -> Tensor:
        """`count` pieces of `length + 1` characters, from places that `random` picks."""
        starts = torch.randint(len(self.tokens) - length, (count,), generator=random)
        return torch.stack([self.tokens[s : s + length + 1] for s in starts.tolist()])

    def encode(self, text: str) -> Tensor:
        return torch.tensor([[self.characters.index(c) for c in text]])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.flatten().tolist())


def python_manual() -> Text:
    """The language reference that every Python carries for its `help()`: 465,000 characters."""
    from pydoc_data.topics import topics

    return Text("\n\n".join(topics[name] for name in sorted(topics)))
