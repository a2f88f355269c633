"""Which pairs a dropout keeps, in numpy's unsigned integers: the fuzzer's own, from the paper and docs/language.md."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)


def kept(seed: int, dropout: float, batch: Tensor, head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
    """What the weight of each pair is multiplied by, float64: 0, or 1 over the share that is kept."""
    of_pairs = max(1, min(32768, int(np.floor((np.float32(1.0) - np.float32(dropout)) * np.float32(32768.0) + 0.5))))
    kv = _words(kv_pos)
    counter = [
        kv // np.uint64(64) * np.uint64(4) + kv // np.uint64(2) % np.uint64(4),
        _words(q_pos),
        _words(head),
        _words(batch),
    ]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(7):
        one, two = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            two >> np.uint64(32) ^ counter[1] ^ np.uint64(keys[0]), two & _LOW,
            one >> np.uint64(32) ^ counter[3] ^ np.uint64(keys[1]), one & _LOW,
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    word = np.choose((kv // np.uint64(8) % np.uint64(4)).astype(np.int64), counter)
    first = np.where(kv // np.uint64(32) % np.uint64(2) == 1, 24, 0) + np.where(kv % np.uint64(2) == 1, 16, 0)
    twice = word | word << np.uint64(32)  # so that a number that goes round the word's end is in one piece
    number = twice >> first.astype(np.uint64) & np.uint64(0x7FFF)
    dropped = number < np.uint64(32768 - of_pairs)
    return torch.from_numpy(np.where(dropped, 0.0, 32768.0 / of_pairs)).to(batch.device)


def _words(numbers: Tensor) -> np.ndarray:
    return numbers.cpu().numpy().astype(np.int64).astype(np.uint64) & _LOW
