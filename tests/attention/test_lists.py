"""Lists of tiles, of masks that read a tensor by both positions: what kernels write against the model that plans count
with, and what is computed against float64, in Triton's interpreter and on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos
from weft.codegen.targets.triton.parts import measures
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.measured import LIST_HEAD, Measurement, Table
from weft.compiler.analysis.tiles.survey import CELL

from ..analysis.test_spans import measured

pytest.importorskip("triton")

blocks, few = weft.tensor("blocks", 4, bool), weft.tensor("few", 2, bool)
allowed, chosen = weft.tensor("allowed", 3, bool), weft.tensor("chosen", 3, bool)
bits, doc = weft.tensor("bits", 2, int), weft.tensor("doc", 2, int)

MASKS = {
    "blocks": masks.block_sparse(blocks, 64, 32),
    "causal_blocks": masks.causal & blocks[batch, head, q_pos // 48, kv_pos // 24] & masks.document(doc),
    "hidden_blocks": ~few[q_pos // 32, kv_pos // 32] & (kv_pos - q_pos < 40),
    "bigbird": masks.bigbird(16, few),
    "chosen": masks.causal & chosen[batch, q_pos, kv_pos // 64],
    "allowed": allowed[batch, q_pos, kv_pos],
    "causal_allowed": masks.causal & (allowed[batch, q_pos, kv_pos] | few[q_pos // 64, kv_pos // 64]),
    "bits": masks.bit_packed(bits) & masks.document(doc),
}
ROWS = 320


def operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def drawn(*size: int, share: float) -> Tensor:
        return torch.rand(size, generator=generator) < share

    pairs = drawn(2, ROWS, ROWS, share=0.0004)
    pairs[:, 64:128, 128:256] = True  # whole tiles
    ids = torch.randint(0, 9, (2, ROWS // 16), generator=generator).repeat_interleave(16, 1)
    return {
        "blocks": drawn(2, 4, 20, 20, share=0.3), "few": drawn(20, 20, share=0.3), "allowed": pairs,
        "chosen": drawn(2, ROWS, 20, share=0.02), "doc": ids,
        "bits": drawn(ROWS, 40, share=0.003) * torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8),
    }  # fmt: skip


def given(variant: weft.Attention) -> dict[str, Tensor]:
    return {p.name: operands()[p.name] for p in variant.canonical.parameters}


def block_classes(mask: Tensor) -> list[list[int]]:
    """0, 1 or 2 where none, some or all pairs of a block of CELL x CELL see each other."""
    rows = [part.split(CELL, 1) for part in mask.split(CELL)]
    return [[int(part.any()) + int(part.all()) for part in row] for row in rows]


def seen_by(variant: weft.Attention, q_len: int, kv_len: int, b: int, h: int, offset: int) -> Tensor:
    """The mask of a head, [q_len, kv_len], by the definition: what values of one at a key does to the output."""
    values = {n: v for n, v in given(variant).items()}
    own = torch.zeros(1, 2, q_len, 4), torch.zeros(1, 2, kv_len, 4), torch.eye(kv_len).expand(1, 2, -1, -1)
    return variant.reference(*own, q_offset=offset, **values)[b, h] > 0


@pytest.mark.parametrize("name", ["causal_blocks", "hidden_blocks", "bigbird", "chosen", "causal_allowed", "bits"])
def test_lists_are_those_of_the_model_and_sound(name: str) -> None:
    """No visible tile is left out and no hidden pair lies in a full one, for tiles of both axes and other sizes."""
    variant = weft.Attention(mask=MASKS[name], name=name)
    facts, values = facts_of(variant), given(variant)
    assert facts.tile_source == "lists" and facts.survey is not None
    tables = {n: Table(n, v.tolist) for n, v in values.items()}
    heads = 2 if facts.mask_differs_by_head else 1
    for (q_len, kv_len, offset), (block_q, block_kv) in (((70, 130, 30), (32, 16)), ((70, 140, 10), (64, 128))):
        seen = {(b, h): seen_by(variant, q_len, kv_len, b, h, offset) for b in range(1) for h in range(heads)}
        for axis in ("kv", "q"):
            found = measured(variant, axis, (block_q, block_kv), (q_len, kv_len), offset, values, (1, 2, 1))
            program = facts.kv_tiles if axis == "kv" else facts.q_tiles
            for (b, h), mask in seen.items():
                env = {**tables, "batch": b, "head": h, "kv_head": 0, "group": 2}
                classes = block_classes(mask)
                model = Measurement(
                    facts.survey, env, q_len=q_len, kv_len=kv_len, q_offset=offset, blocks=classes.__getitem__
                ).lists(program, block_q, block_kv)
                for tile, row in enumerate(found[b * heads + h].tolist()):
                    edge, full = listed(row)
                    label = f"{name}, {axis}, tile {tile} of {(q_len, kv_len, block_q, block_kv)}"
                    assert (sorted(edge), sorted(full)) == model(tile), label
                    check_sound(mask if axis == "kv" else mask.T, tile, edge, full, block_q, block_kv, axis, label)


def listed(row: list[int]) -> tuple[list[int], list[int]]:
    n_edge, n_full, first_behind, n_behind, *entries = row
    return [*entries[:n_edge], *range(first_behind, first_behind + n_behind)], entries[len(entries) - n_full :]


def check_sound(
    mask: Tensor, tile: int, edge: list[int], full: list[int], block_q: int, block_kv: int, axis: str, label: str
) -> None:
    own, other = (block_q, block_kv) if axis == "kv" else (block_kv, block_q)
    parts = mask[tile * own : (tile + 1) * own].split(other, 1)
    assert len({*edge, *full}) == len(edge) + len(full), label
    visible = {n for n, part in enumerate(parts) if part.any()}
    assert visible <= {*edge, *full}, f"{label}: a visible tile is left out"
    assert all(parts[n].all() and parts[n].shape[1] == other for n in full), f"{label}: a hidden pair in a full tile"


def results(variant: weft.Attention, target: str, q_len: int, kv_len: int, **options) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    make = [(2, 4, q_len), (2, 2, kv_len), (2, 2, kv_len)]
    tensors = [torch.randn(*size, 16, generator=generator) for size in make]
    exactly = target == "reference"
    tensors = [(t.double() if exactly else t).requires_grad_() for t in tensors]
    call = variant.reference if exactly else variant
    named = {} if exactly else {"target": target}
    out = call(*tensors, **named, **given(variant), **options)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, dout)]


def assert_close(variant: weft.Attention, target: str, q_len: int, kv_len: int, **options) -> None:
    schedule = {"schedule": options.pop("schedule")} if "schedule" in options else {}
    for mine, true in zip(
        results(variant, target, q_len, kv_len, **options, **schedule),
        results(variant, "reference", q_len, kv_len, **options),
    ):
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MASKS)
def test_what_the_cpu_computes(name: str) -> None:
    """Two batch rows of four heads, in tiles of 64: empty, full and edge tiles, and rows that see nothing."""
    schedule = "flash/flash_forward=cpu:64x64/flash_backward=cpu:64x64"
    variant = weft.Attention(mask=MASKS[name], name=name)
    assert_close(variant, "cpu", 200, 310, schedule=schedule)
    assert_close(variant, "cpu", 150, 150, q_offset=0)


@pytest.mark.parametrize("name", ["causal_blocks", "causal_allowed"])
def test_what_the_interpreter_computes(name: str) -> None:
    assert_close(weft.Attention(mask=MASKS[name], name=name), "interpret", 40, 70)


def test_a_list_without_room_goes_on_as_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 2 tiles: what follows is visited from the first to the last, with the mask."""
    monkeypatch.setattr(measures, "LIST_ROOM", 2)
    monkeypatch.setattr(measures, "TILES_TOGETHER", 1)
    variant = weft.Attention(mask=MASKS["hidden_blocks"], name="no_room")
    found = measured(variant, "kv", (32, 16), (33, 250), 200, given(variant), (1, 2, 1))
    assert found.shape[-1] == LIST_HEAD + 2
    for row in found.flatten(0, 1).tolist():
        n_edge, n_full, _, n_behind, *_ = row
        assert n_edge + n_full == 2 or not n_behind
    assert (found[..., 3] > 0).any()
    assert_close(variant, "interpret", 20, 130)


@pytest.mark.parametrize("name", ["causal_allowed"])
def test_sequences_of_their_own_lengths(name: str) -> None:
    """Padded and packed sequences, positions of each its own; a sequence without keys among them."""
    variant = weft.Attention(mask=MASKS[name], name=name)
    lens = {"q_lens": torch.tensor([40, 7]), "kv_lens": torch.tensor([70, 40])}
    assert_close(variant, "interpret", 40, 70, **lens)
    packed = {"cu_seqlens_q": torch.tensor([0, 20, 20, 38]), "cu_seqlens_kv": torch.tensor([0, 30, 40, 70])}
    values = {n: v if n not in ("blocks", "allowed") else torch.cat([v, v[:1]]) for n, v in given(variant).items()}
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randn(1, h, n, 16, generator=generator, requires_grad=True) for h, n in ((4, 38), (2, 70), (2, 70))
    ]
    found = variant(*tensors, **packed, **values, target="interpret")
    exact = variant.reference(*(t.double() for t in tensors), **packed, **values)
    dout = torch.randn(found.shape, generator=generator)
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=0)
    for mine, true in zip(
        torch.autograd.grad(found, tensors, dout), torch.autograd.grad(exact, tensors, dout.double())
    ):
        torch.testing.assert_close(mine.double(), true.double(), atol=2e-5, rtol=0)
