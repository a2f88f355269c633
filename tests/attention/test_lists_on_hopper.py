"""Lists of tiles in the Hopper kernels, of masks that are the same in blocks of pairs: their generated text, run by
gluon.py, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.codegen.targets.triton.parts import measures
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed, Sequences

from ..support import check_errors, mostly
from .test_flash_on_hopper import launch

pytest.importorskip("triton")

blocks, few, doc = weft.tensor("blocks", 4, bool), weft.tensor("few", 2, bool), weft.tensor("doc", 2, int)
VARIANTS = {
    "blocks": {"mask": masks.block_sparse(blocks)},
    "causal": {"mask": masks.causal & masks.block_sparse(few)},
    "narrow": {"mask": masks.block_sparse(few, 192, 64) | (kv_pos < 8)},
    "documents": {"mask": masks.document(doc) & ~few[q_pos // 64, kv_pos // 128]},
    "sigmoid": {"mask": masks.causal & masks.block_sparse(few), "normalizer": "sigmoid"},
    "clamped": {"mask": few[weft.maximum(q_pos // 100, 0), kv_pos // 64]},
    "cap": {"mask": blocks[batch, head, q_pos // 70, kv_pos // 64], "score": 20.0 * weft.tanh(score / 20.0)},
}


def operands_for(declared: weft.Attention, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {
        "blocks": torch.rand(3, 4, 8, 8, generator=generator) < 0.4,
        "few": torch.rand(8, 8, generator=generator) < 0.4,
        "doc": (torch.arange(rows)[None] // 110).repeat(3, 1),
    }
    return {p.name: made[p.name] for p in declared.canonical.parameters}


def check(
    name: str, sequences: Sequences, lengths: tuple[int, int], heads: tuple[int, int] | None = None, width: int = 64,
    batches: int = 2, deterministic: bool = False, options: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """A forward and a backward of queries and keys of these lengths; of several groups of heads where lists differ."""
    heads = heads or ((4, 2) if name in ("blocks", "cap") else (2, 1))
    declared = weft.Attention(**VARIANTS[name], name=f"listed_{name}")
    given, nan = operands_for(declared, max(lengths)), float("nan")
    torch.manual_seed(sum(lengths))
    shapes = {"query": (batches, heads[0], lengths[0], width)}
    shapes |= dict.fromkeys(("key", "value"), (batches, heads[1], lengths[1], width))
    tensors = {n: torch.randn(shape).bfloat16() for n, shape in shapes.items()}
    call = Call(*tensors.values(), None, given, sequences, Choices(), width)
    rows = tensors["query"].shape[:3]
    results = {"out": torch.full_like(tensors["query"], nan), "lse": torch.full(rows, nan)}
    launch(declared, call, results)
    saves = declared.canonical.weighs.saves_lse
    dout, dlse = torch.randn(shapes["query"]).bfloat16(), torch.randn(rows) if saves else None
    gradients = {f"d{n}": torch.full_like(t, nan) for n, t in tensors.items()}
    launch(declared, call, {**results, "dout": dout, "dlse": dlse, **gradients}, list(tensors), deterministic)
    expected = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = {n: t.to(dtype).requires_grad_() for n, t in tensors.items()}
        own = options or {"q_offset": sequences.q_offset}
        made = declared.reference(*leaves.values(), return_lse=saves, **own, **given)
        out, lse = made if saves else (made, None)
        ends = [(out, dout.to(dtype))] + ([(lse, dlse.to(lse.dtype))] if saves else [])
        found = torch.autograd.grad([end for end, _ in ends], list(leaves.values()), [grad for _, grad in ends])
        expected.append({"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(leaves, found)}})
    for label, got in {**results, **gradients}.items():
        if label == "lse" and not saves:
            continue
        check_errors(got, expected[0][label], expected[1][label], f"{name} {label}")


DENSE = [(300, 300), (130, 400), (300, 200)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", [pytest.param(p, id=f"{p[0]}x{p[1]}") for p in DENSE])
@pytest.mark.parametrize("name", VARIANTS)
def test_dense(name: str, lengths: tuple[int, int], deterministic: bool) -> None:
    """Some queries see no key, some keys no query; positions begin before 0 where there are more queries than keys."""
    if name == "documents" and lengths[0] > lengths[1]:
        lengths = lengths[::-1]  # ids of positions before 0 are not there
    offset = max(0, lengths[1] - lengths[0])
    check(name, Dense(offset), lengths, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_positions_before_the_first_key(deterministic: bool) -> None:
    check("clamped", Dense(-130), (300, 300), deterministic=deterministic)


@pytest.mark.parametrize("width", mostly([128], [32, 96, 128, 256]))
def test_widths(width: int) -> None:
    check("causal", Dense(0), (300, 300), (2, 2), width, batches=1)


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("name", ["causal", "blocks"])
def test_lists_without_room(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a list has no room for is visited as a run, with the mask."""
    monkeypatch.setattr(measures, "LIST_ROOM", room)
    check(name, Dense(0), (520, 520), (2, 2), batches=1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", mostly(["causal", "documents"], VARIANTS))
@pytest.mark.parametrize("kind", ["lengths", "packed", "per_row"])
def test_sequences(kind: str, name: str, deterministic: bool) -> None:
    """Sequences of their own lengths, of none, and offsets of their own."""
    lens = torch.tensor([190, 0, 141], dtype=torch.int32)
    starts = torch.tensor([0, 190, 190, 331], dtype=torch.int32)
    if kind == "per_row":
        offsets = torch.tensor([100, 7, 64], dtype=torch.int32)
        check(name, Dense(offsets), (130, 300), batches=3, deterministic=deterministic)
    elif kind == "lengths":
        own = {"q_lens": lens, "kv_lens": lens}
        check(name, Lengths(lens, lens, None), (200, 200), batches=3, deterministic=deterministic, options=own)
    else:
        own = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        check(name, Packed(starts, starts, None), (340, 340), batches=1, deterministic=deterministic, options=own)
