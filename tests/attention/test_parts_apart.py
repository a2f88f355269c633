"""Documents in several parts: tiles between them are not visited, and results are those of float64.

On `cpu`, in Triton's interpreter, and on `hopper` in gluon.py. NaN in values and in gradients of the output of one
document shows who visits its tiles: a weight of 0 does not hide it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft import head, kv_pos, masks, q_pos
from weft.codegen.targets.triton.parts.measures import Measures
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.measured import Measurement, Table, visited
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed

from ..support import check_errors, long_from, mostly
from .test_flash_on_hopper import launch

pytest.importorskip("triton")

ids, of_heads = weft.tensor("ids", 2, int), weft.tensor("of_heads", 2, int)
same = masks.document(ids)
MASKS = {
    "causal": masks.causal & same,
    "both ways": same,
    "two ranges": same & masks.global_window(70, 200),
    "of heads": masks.causal & (of_heads[head, q_pos] == of_heads[head, kv_pos]),
}
VARIANTS = {name: weft.Attention(mask=mask, name=f"parts_{n}") for n, (name, mask) in enumerate(MASKS.items())}
TARGETS = ["cpu", "interpret", "hopper"]
LENGTH = {"cpu": 700, "interpret": 330, "hopper": 450}  # several tiles of each
BLOCK = {"cpu": 256, "interpret": 128, "hopper": 128}  # rows of a part of a document, and of no tile more


def in_blocks(order: list[int], block: int) -> Tensor:
    """Ids of documents in parts of so many rows, in this order: far apart, and multiples of 64."""
    return (torch.tensor(order) * 6400 + 2**40).repeat_interleave(block)


def in_runs(length: int, seed: int) -> Tensor:
    """Ids of documents in runs of any length, each in several places."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(20, 200, (length // 20 + 1,), generator=draw)
    return (torch.randint(0, 7, sizes.shape, generator=draw) * 977).repeat_interleave(sizes)[:length]


def operands(length: int, heads: int = 4, kv_heads: int = 2, batches: int = 2, dim: int = 64) -> list[Tensor]:
    """query, key, value and the gradient of the output."""
    draw = torch.Generator().manual_seed(length)
    size = [(batches, h, length, dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=draw).bfloat16() for s in size]


NAMES = ("out", "dquery", "dkey", "dvalue")


def computed(variant: weft.Attention, target: str, given: list[Tensor], lengths: list[int] | None = None,
             deterministic: bool = False, **own: Tensor) -> list[Tensor]:  # fmt: skip
    """out, dquery, dkey, dvalue. lengths: of packed sequences where the batch is 1, else of rows of the batch."""
    if target == "hopper":
        return on_hopper(variant, given, lengths, deterministic, own)
    width = torch.float32 if target == "interpret" else torch.bfloat16
    *leaves, dout = (t.to(width) for t in given)
    leaves = [t.requires_grad_() for t in leaves]
    out = variant(*leaves, target=target, deterministic=deterministic, **options_of(given, lengths), **own)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def options_of(given: list[Tensor], lengths: list[int] | None) -> dict[str, Tensor]:
    if lengths is None:
        return {}
    if len(given[0]) > 1:
        return {"q_lens": torch.tensor(lengths), "kv_lens": torch.tensor(lengths)}
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}


def on_hopper(variant: weft.Attention, given: list[Tensor], lengths: list[int] | None, deterministic: bool,
              own: dict[str, Tensor]) -> list[Tensor]:  # fmt: skip
    query, key, value, dout = given
    numbers = [t.int() for t in options_of(given, lengths).values()]
    sequences = Dense(0) if not numbers else (Lengths if len(query) > 1 else Packed)(*numbers, None)
    call = Call(query, key, value, None, own, sequences, Choices(), query.shape[3])
    out, lse = torch.zeros_like(dout), torch.zeros(query.shape[:3])
    launch(variant, call, {"out": out, "lse": lse})
    results = {f"d{n}": torch.zeros_like(t) for n, t in zip(("query", "key", "value"), (query, key, value))}
    statistics = {"out": out, "lse": lse, "dout": dout, "dlse": None}
    launch(variant, call, statistics | results, ("query", "key", "value"), deterministic)
    return [out, *results.values()]


def expected(variant: weft.Attention, given: list[Tensor], lengths: list[int] | None, dtype: torch.dtype,
             **own: Tensor) -> list[Tensor]:  # fmt: skip
    *leaves, dout = (t.to(dtype) for t in given)
    leaves = [t.requires_grad_() for t in leaves]
    out = variant.reference(*leaves, **options_of(given, lengths), **own)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.fixture(params=mostly([None], [None, 4]), ids=["by_tiles", "by_stretches"])
def stretch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How kernels look at tiles: each of them, or four at once first."""
    if request.param is not None:
        long_from(monkeypatch, 0, request.param)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("target", TARGETS)
def test_documents_in_runs(target: str, name: str, deterministic: bool, stretch: None) -> None:
    given = operands(LENGTH[target], batches=1 if target == "interpret" else 2)  # the next test has it compute three
    rows = [in_runs(LENGTH[target], seed) for seed in range(4)]
    own = {p.name: torch.stack(rows) for p in VARIANTS[name].canonical.parameters}
    found = computed(VARIANTS[name], target, given, deterministic=deterministic, **own)
    exact, usual = (expected(VARIANTS[name], given, None, dtype, **own) for dtype in (torch.float64, torch.bfloat16))
    for label, *tensors in zip(NAMES, found, exact, usual):
        check_errors(*tensors, f"{target} {name} {label}")


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["causal", "two ranges"])
@pytest.mark.parametrize("target", TARGETS)
def test_sequences_of_their_own_lengths(target: str, name: str, packed: bool, stretch: None) -> None:
    lengths = [LENGTH[target] - 50, 0, LENGTH[target] // 2 + 20]
    given = operands(sum(lengths), batches=1) if packed else operands(max(lengths), batches=3)
    marks = torch.stack([in_runs(max(lengths), seed) for seed in range(3)])
    found = computed(VARIANTS[name], target, given, lengths, ids=marks)
    exact, usual = (
        expected(VARIANTS[name], given, lengths, dtype, ids=marks) for dtype in (torch.float64, torch.bfloat16)
    )
    for label, *tensors in zip(NAMES, found, exact, usual):
        check_errors(*tensors, f"{target} {name} {label}")


@pytest.mark.parametrize("name", ["causal", "two ranges", "of heads"])
def test_few_queries_whose_keys_are_divided(name: str) -> None:
    query, key, value, _ = operands(700)
    own = {p.name: torch.stack([in_runs(700, seed) for seed in range(4)]) for p in VARIANTS[name].canonical.parameters}
    query = query[:, :, -6:]
    found = VARIANTS[name](
        *(t.float() for t in (query, key, value)), **own, target="interpret", schedule="split_kv", return_lse=True
    )
    exact, usual = (
        VARIANTS[name].reference(*(t.to(dtype) for t in (query, key, value)), **own, return_lse=True)
        for dtype in (torch.float64, torch.float32)
    )
    for label, *tensors in zip(("out", "lse"), found, exact, usual):
        check_errors(*tensors, f"{name} {label}")


# -- what is visited ---------------------------------------------------------------------------------------------------
ORDER = [0, 1, 2, 1, 0, 2]  # document 1 lies between the parts of the others


def untouched(target: str, variant: weft.Attention, deterministic: bool = False) -> bool:
    """Whether nobody but document 1 visits its tiles: where another one did, there is NaN."""
    marks = in_blocks(ORDER, BLOCK[target])[None]
    heads = 2 if "of_heads" in variant.canonical.text else 1
    given, poisoned = marks[0] == marks[0, BLOCK[target]], operands(marks.shape[1], heads, 1, 1)
    for tensor in poisoned[2:]:  # values, and gradients of the output
        tensor[:, :, given] = torch.nan
    own = {p.name: marks.expand(2, -1) for p in variant.canonical.parameters}
    found = computed(variant, target, poisoned, deterministic=deterministic, **own)
    return all(bool(t[:, :, ~given].isfinite().all()) for t in found)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", mostly(["causal", "of heads"], ["causal", "both ways", "of heads"]))
@pytest.mark.parametrize("target", TARGETS)
def test_tiles_between_parts_are_not_visited(target: str, name: str, deterministic: bool, stretch: None) -> None:
    assert untouched(target, VARIANTS[name], deterministic)


@pytest.mark.parametrize("target", ["interpret", "hopper"])
def test_runs_alone_would_visit_them(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Measures.__init__
    monkeypatch.setattr(Measures, "__init__", lambda self, job, neighbours=1: made(self, job, 0))
    assert not untouched(target, VARIANTS["causal"].replace(name=f"runs_{target}"))


def test_long_documents_in_two_parts_visit_what_is_visible() -> None:
    """64k tokens of documents of 1024, each in two runs anywhere: nearly all tiles were visited."""
    length, block = 1 << 16, 128
    draw = torch.Generator().manual_seed(2)
    cuts = torch.randint(100, 924, (64,), generator=draw)
    sizes = torch.stack([cuts, 1024 - cuts], 1).flatten()
    order = torch.randperm(128, generator=draw)
    marks = (torch.arange(64).repeat_interleave(2)[order]).repeat_interleave(sizes[order])
    facts = facts_of(VARIANTS["causal"])
    env = {"ids": Table("ids", lambda: [marks.tolist()]), "batch": 0}
    measurement = Measurement(facts.survey, env, q_len=length, kv_len=length)
    runs, found = (of(facts.kv_tiles, block, block) for of in (measurement.spans, measurement.tiles))
    by_run = by_list = visible = 0
    for tile in range(3, length // block, 7):
        rows = slice(tile * block, (tile + 1) * block)
        seen = (marks[rows].unique()[:, None] == marks[: rows.stop]).any(0).view(-1, block).any(1)
        edge, full = visited(runs(tile))
        by_run, visible = by_run + len(edge) + len(full), visible + int(seen.sum())
        edge, full = found(tile)
        assert set(seen.nonzero().flatten().tolist()) <= {*edge, *full}
        by_list += len(edge) + len(full)
    assert by_list < 1.1 * visible and by_run > 15 * visible, (by_list, by_run, visible)
