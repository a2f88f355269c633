"""Which weights are dropped: random numbers that depend on nothing but the seed and the pair, in torch.

Philox-4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3; 7 rounds pass
all tests of BigCrush). A counter of four words gives four words of 32 bits, from which sixteen keys that one query sees
take a number of 15 bits each. Of these the upper 7 are the pair's own. It shares the lower 8, which decide where the
upper ones do not, with another pair. So the share that is dropped is exact to 1/32768, and what falls to two pairs is
correlated by less than 1/250. The keys that share a counter differ in bits 0, 3, 4 and 5 of their
position, because on a GPU one thread has those of a tile:

    counter  (kv_pos // 64 * 4 + kv_pos // 2 % 4, q_pos, head, batch)      key  (low, high word of the seed)
    word     number kv_pos // 8 % 4 of the four, rotated left by 8 bits where kv_pos // 32 is odd
    number   the lower 15 bits of the word's lower half where kv_pos is even, else of its upper half

A pair is dropped where its number is less than ALL_KEPT - `pairs_kept(dropout)`. Kernels of every target compute the
same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALL_KEPT = 32768  # pairs, of which dropout keeps a whole number
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85  # of the key, from round to round
TOGETHER = 64  # keys in a row whose counters are the next four
_WORD = 0xFFFFFFFF


def pairs_kept(dropout: float) -> int:
    """How many of ALL_KEPT pairs are kept where `dropout` of them are not: at least one, rounded as float32 is."""
    kept = 1.0 - torch.tensor(dropout, dtype=torch.float32, device="cpu")
    return min(max(int((kept * ALL_KEPT + 0.5).floor()), 1), ALL_KEPT)


def drawn_seed(device: torch.device) -> Tensor:
    """A seed, int64 [1], by torch's generator of the device, which torch.manual_seed sets and checkpoints restore."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 bits of the four words of a counter and the two of a key; int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 64 bits, of which the sign is one
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0, second & _WORD, (first >> 32 & _WORD) ^ c3 ^ k1, first & _WORD
        )  # fmt: skip
        k0, k1 = k0 + INCREMENTS[0] & _WORD, k1 + INCREMENTS[1] & _WORD
    return c0, c1, c2, c3


def kept_pairs(
    seed: Tensor, batch: Tensor | int, head: Tensor | int, q_pos: Tensor, first: int, end: int, kept: int
) -> Tensor:
    """Whether pairs are kept, bool [N, end - first, ...]: of the keys at positions first to end - 1.

    seed: int64, one element. batch, head, q_pos: of queries, int tensors or numbers that broadcast to [N, 1, ...].
    kept: `pairs_kept` of the dropout.
    """
    blocks = torch.arange(first // TOGETHER, -(-end // TOGETHER), device=seed.device)
    groups = (blocks[:, None] * 4 + torch.arange(4, device=seed.device)).flatten()
    batch, head, q_pos = (torch.as_tensor(x, dtype=torch.int64, device=seed.device) for x in (batch, head, q_pos))
    rank = max(x.dim() for x in (batch, head, q_pos))
    seed = seed.view(())
    words = philox(
        (groups.view(-1, *(1,) * (rank - 2)), q_pos & _WORD, head, batch), (seed & _WORD, seed >> 32 & _WORD)
    )
    by_block = torch.stack(torch.broadcast_tensors(*words), 1)  # [N, words, blocks * 4, ...]
    by_block = by_block.unflatten(2, (len(blocks), 4)).transpose(1, 2)  # [N, blocks, words, 4, ...]
    rotated = (by_block << 8 | by_block >> 24) & _WORD
    halves = torch.stack([by_block, rotated], 2)  # [N, blocks, 2, words, 4, ...]
    numbers = torch.stack([halves, halves >> 16], 5) & ALL_KEPT - 1  # [N, blocks, 2, words, 4, 2, ...]
    skipped = first % TOGETHER
    return numbers.flatten(1, 5)[:, skipped : skipped + end - first] >= ALL_KEPT - kept


def kept_at(
    seed: Tensor, batch: Tensor | int, head: Tensor | int, q_pos: Tensor, kv_pos: Tensor, kept: int
) -> Tensor:  # fmt: skip
    """Whether pairs at any positions are kept, bool. All but the seed broadcast to the pairs; each draws its own words.

    seed, kept: as of `kept_pairs`.
    """
    batch, head, q_pos, kv_pos = (
        torch.as_tensor(x, dtype=torch.int64, device=seed.device) for x in (batch, head, q_pos, kv_pos)
    )
    seed = seed.view(())
    group = (kv_pos // TOGETHER * 4 + kv_pos // 2 % 4) & _WORD
    words = philox((group, q_pos & _WORD, head, batch), (seed & _WORD, seed >> 32 & _WORD))
    number, word = kv_pos // 8 % 4, words[3]
    for n in range(3):
        word = torch.where(number == n, words[n], word)
    word = torch.where(kv_pos // 32 % 2 == 1, (word << 8 | word >> 24) & _WORD, word)
    return (word >> kv_pos % 2 * 16 & ALL_KEPT - 1) >= ALL_KEPT - kept
