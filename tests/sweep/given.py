"""Numbers and words that a model is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LENGTH = 11


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_words(config: Any, length: int = LENGTH) -> Tensor:
    """Words that are none of the special ones."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = min([size for size in (getattr(text, "vocab_size", None), 90) if isinstance(size, int)])
    special = {v for k, v in vars(text).items() if k.endswith("_token_id") and isinstance(v, int)}
    special |= {v for k, v in vars(config).items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    usable = torch.tensor([word for word in range(3, most) if word not in special])
    return usable[torch.randint(len(usable), (2, length), generator=torch.Generator().manual_seed(2))]


def marked(config: Any, token: int, count: int) -> Tensor:
    """Words after `count` of one that stands for a part of an image or of a sound."""
    return torch.cat([torch.full((2, count), token), some_words(config)], 1)


def padding(side: str, length: int = LENGTH) -> Tensor:
    seen = torch.ones(2, length, dtype=torch.long)
    if side == "left":
        seen[0, :4] = 0
    elif side == "right":
        seen[1, -5:] = 0
    return seen
