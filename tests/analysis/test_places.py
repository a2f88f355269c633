"""What is known of the places that pairs read, held against all pairs of small calls."""

from __future__ import annotations

import pytest
import torch

from weft.compiler.analysis.values.places import by_difference, differ_by_pair, read_once, summed_over
from weft.compiler.planning.gradient_sums import Way, ways_of
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.compiler.planning.sources import LENGTHS, PACKED
from weft.ir.expr import Load, scalar, tensor
from weft.ir.parse import parse
from weft.ir.reference import evaluate

OPERANDS = {
    "b1": tensor("b1", 1), "b2": tensor("b2", 2), "b3": tensor("b3", 3), "b4": tensor("b4", 4),
    "lut": tensor("lut", 1, int), "dist": tensor("dist", 2, int), "n": scalar("n", int),
}  # fmt: skip
# read, whether the difference of positions alone decides it, whether it differs from pair to pair
READS = [
    ("b1[q_pos - kv_pos + 20]", True, False),
    ("b1[n - (kv_pos - q_pos)]", True, False),
    ("b2[head, maximum(2 * q_pos - 2 * kv_pos, 0)]", True, False),
    ("b2[head, where(q_pos < kv_pos + 3, abs(q_pos - kv_pos), 3)]", True, False),
    ("b1[lut[q_pos - kv_pos + 20] + 1]", True, False),
    ("b1[abs(kv_pos - q_pos) // 3 + (q_pos - kv_pos) % 2]", True, False),
    ("b1[floor(log2(1.0 + abs(kv_pos - q_pos)))]", True, False),
    ("b1[minimum(q_pos, kv_pos)]", False, False),
    ("b1[q_pos // 2 - kv_pos // 2 + 20]", False, False),
    ("b1[q_pos + kv_pos]", False, False),
    ("b1[dist[q_pos, kv_pos]]", False, False),
    ("b2[q_pos, kv_pos]", False, True),
    ("b2[kv_pos, q_pos]", False, True),
    ("b3[kv_pos, head, q_pos + n]", False, True),
    ("b2[q_pos, q_pos - kv_pos + 20]", False, True),
    ("b2[q_pos + kv_pos, q_pos - kv_pos + 20]", False, True),
    ("b2[q_pos + kv_pos, 2 * q_pos + 2 * kv_pos]", False, False),
    ("b2[q_pos, kv_pos // 2]", False, False),
    ("b2[q_pos, lut[kv_pos]]", False, False),
]


def load(text: str) -> Load:
    found = parse(text, OPERANDS)
    assert isinstance(found, Load)
    return found


def indices(read: Load, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[pairs, rank]"""
    generator = torch.Generator().manual_seed(0)
    env = {
        "q_pos": q, "kv_pos": k, "head": torch.tensor(1), "n": 5, "lut": torch.randperm(64, generator=generator),
        "dist": torch.randint(0, 9, (64, 64), generator=generator),
    }  # fmt: skip
    found = [evaluate(i, env, torch.float64, torch.device("cpu")).expand(q.shape) for i in read.index]
    return torch.stack(found, -1)


@pytest.mark.parametrize(("text", "by_diagonal", "by_pair"), READS, ids=[text for text, _, _ in READS])
def test_each_claim_is_one_and_holds(text: str, by_diagonal: bool, by_pair: bool) -> None:
    read = load(text)
    assert (by_difference(read), differ_by_pair(read)) == (by_diagonal, by_pair)
    q, k = (x.flatten() for x in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    found = indices(read, q, k)
    if by_diagonal:
        assert all(len(found[q - k == d].unique(dim=0)) == 1 for d in range(-15, 16))
    if by_pair:
        assert len(found.unique(dim=0)) == len(found)


def test_what_heads_share() -> None:
    assert summed_over([load("b3[head, q_pos, kv_pos]")]) == {"batch"}
    assert summed_over([load("b3[kv_head, q_pos, kv_pos]")]) == {"batch", "group"}
    assert summed_over([load("b2[q_pos, kv_pos]")]) == {"batch", "head"}
    assert summed_over([load("b2[q_pos, kv_pos]"), load("b3[batch, q_pos, kv_pos]")]) == {"head"}
    assert read_once(load("b4[kv_pos, head, q_pos, batch]"))
    for text in ("b4[batch, head // 2, q_pos, kv_pos]", "b4[batch, kv_head, q_pos, kv_pos]", "b3[head, q_pos, kv_pos]"):
        assert not read_once(load(text))


def signature(**more: object) -> Signature:
    return Signature("backward", "sm_90", Dtypes.all("bf16"), Widths(64, 64), **more)  # type: ignore[arg-type]


STORED, SUMMED = Way("queries", "store"), Way("pairs", "store")
LISTED, DIAGONAL = Way("pairs", "list"), Way("diagonals", "list")


@pytest.mark.parametrize(
    ("text", "more", "way"),
    [
        ("b4[batch, head, q_pos, kv_pos]", {}, STORED),
        ("b4[batch, head, q_pos, kv_pos]", {"sequences": PACKED}, STORED),
        ("b3[head, q_pos, kv_pos]", {}, SUMMED),
        ("b3[head, q_pos, kv_pos]", {"offset": "per_row"}, LISTED),
        ("b3[head, q_pos, kv_pos]", {"sequences": LENGTHS}, LISTED),
        ("b3[head, q_pos, kv_pos]", {"sequences": PACKED, "atomics": True}, Way("queries", "add")),
        ("b2[head, abs(q_pos - kv_pos)]", {"sequences": PACKED}, DIAGONAL),
        ("b2[head, q_pos // 2 * 8 + kv_pos]", {}, LISTED),
        ("b2[head, q_pos // 2 * 8 + kv_pos]", {"atomics": True}, Way("pairs", "add")),
        ("b3[batch, head, q_pos // 2 * 8 + kv_pos]", {"atomics": True}, Way("queries", "add")),
        ("b3[head // 2, q_pos, kv_pos]", {}, LISTED),
    ],
)
def test_ways(text: str, more: dict[str, object], way: Way) -> None:
    read = load(text)
    kind = "diagonal" if by_difference(read) else "pair"
    found = ways_of([(read, kind)], signature(**more))  # type: ignore[list-item]
    assert found.of_reads == (way,) and found.owners == {way.owner} and found.refused is None


def test_what_is_summed_by_atomic_additions_alone_is_named() -> None:
    read = load("b3[head, q_pos, kv_pos]")
    assert ways_of([(read, "pair")], signature(sequences=PACKED)).refused is read
    both = [(read, "pair"), (load("b2[q_pos, kv_pos]"), "pair")]
    assert ways_of(both, signature()).of_reads == (SUMMED, LISTED)  # type: ignore[arg-type]
