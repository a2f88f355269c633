"""The random numbers of dropout: those of the paper's generator, one for each pair, whatever is computed beside it."""

from __future__ import annotations

import pytest
import torch

from weft.ir import philox
from weft.ir.philox import kept_pairs, pairs_kept

ONES = 0xFFFFFFFF
# Of the authors' own table of known answers (Random123, kat_vectors), for philox4x32.
KNOWN = [
    (7, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (10, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize(("rounds", "word", "expected"), KNOWN)
def test_known_answers(rounds: int, word: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "ROUNDS", rounds)
    x = torch.tensor(word)
    assert tuple(int(found) for found in philox.philox((x,) * 4, (x, x))) == expected


def number(seed: int, batch: int, head: int, q_pos: int, kv_pos: int) -> int:
    """The number of one pair from its definition, in Python's integers."""
    counter = [kv_pos // 64 * 4 + kv_pos // 2 % 4, q_pos % 2**32, head, batch]
    key = [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(7):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second // 2**32 ^ counter[1] ^ key[0], second % 2**32, first // 2**32 ^ counter[3] ^ key[1], first % 2**32
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    word = counter[kv_pos // 8 % 4]
    if kv_pos // 32 % 2:
        word = word * 2**8 % 2**32 + word // 2**24
    return word // 2**16 % 2**15 if kv_pos % 2 else word % 2**15


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -1, -(2**63)])
@pytest.mark.parametrize(("first", "end"), [(0, 70), (33, 34), (90, 131)])
def test_each_pair_has_its_number(seed: int, first: int, end: int) -> None:
    batch, head, q_pos = torch.tensor([0, 5]).view(-1, 1, 1, 1), torch.arange(2).view(1, 1, 2, 1), torch.arange(-2, 3)
    found = kept_pairs(torch.tensor([seed]), batch, head, q_pos, first, end, 20000)
    assert found.shape == (2, end - first, 2, 5)
    for b, j, h, i in torch.randint(10**6, (200, 4), generator=torch.Generator().manual_seed(1)).tolist():
        b, j, h, i = b % 2, j % (end - first), h % 2, i % 5
        kept = number(seed, (0, 5)[b], h, i - 2, first + j) >= 2**15 - 20000
        assert bool(found[b, j, h, i]) == kept


@pytest.mark.parametrize("dropout", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.9999999])
def test_the_share_that_is_kept(dropout: float) -> None:
    """To the nearest 1/32768, and never nothing; of a million pairs as many as chance allows (six sigma)."""
    kept = pairs_kept(dropout)
    assert 1 <= kept <= 32768 and abs(kept / 32768 - (1 - dropout)) <= 2**-15
    found = kept_pairs(torch.tensor([3]), 0, torch.zeros(1, 1, 1, 1).long(), torch.arange(1000), 0, 1000, kept)
    share = kept / 32768
    assert abs(found.double().mean().item() - share) <= 6 * (share * (1 - share) / 1e6) ** 0.5


def test_pairs_do_not_go_together() -> None:
    """Neighbours, other heads, batch rows and seeds: correlations of a million pairs as chance has them."""
    rows, heads = torch.arange(500), torch.arange(2).view(1, 1, 2, 1)
    batches = torch.arange(2).view(-1, 1, 1, 1)
    signs = [
        kept_pairs(torch.tensor([s]), batches, heads, rows, 0, 500, 16384).double() * 2 - 1 for s in (1, 2, 2**32 + 1)
    ]
    x = signs[0]
    pairs = [(x[:, 1:], x[:, :-1]), (x[..., 1:], x[..., :-1]), (x[:, :, 0], x[:, :, 1]), (x[0], x[1])]
    pairs += [(x[:, 8:], x[:, :-8]), (x[:, 16:], x[:, :-16]), (x[:, 32:], x[:, :-32])]
    pairs += [(x, other) for other in signs[1:]]
    for one, other in pairs:
        assert abs((one * other).mean().item()) <= 5 / one.numel() ** 0.5
