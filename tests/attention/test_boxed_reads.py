"""Tiles of what pairs read, brought to SRAM by Hopper kernels: generated text, run by gluon.py, against float64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, group, head, kv_head, kv_pos, masks, q_pos, score
from weft.codegen.launch.descriptors import boxed_bytes
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.runtime.call import Call, Choices, Dense, Lengths, Packed
from weft.runtime.driver import compile_kernels

from ..support import check_errors, mostly
from .gluon import OnACpu
from .machine import Deadlock

pytest.importorskip("triton")

HEADS, KEY_HEADS, WIDTH = 4, 2, 64
of_pairs, of_heads, full = (weft.tensor(f"bias{rank}", rank) for rank in (2, 3, 4))
slopes = weft.tensor("slopes", 1)
SCORES = {
    "full": score + full[batch, head, q_pos, kv_pos],
    "pairs": score + of_pairs[q_pos, kv_pos],
    "of_key_heads": score + of_heads[kv_head, q_pos, kv_pos],
    "rows_first": score + of_heads[q_pos, head, kv_pos],
    "further_on": score + full[batch, head // 2, q_pos + 3, kv_pos + 8],
    "of_one": score + full[0, head % group, q_pos, kv_pos],
    "gated": 5.0 * weft.tanh((score * (1.0 + of_heads[head, q_pos, kv_pos])) / 5.0) + slopes[head] * (kv_pos - q_pos),
    "further_on_alone": score + full[batch, head, q_pos + 3, kv_pos + 8],
    "beside_a_slope": 0.5 * score + slopes[head] * (kv_pos - q_pos) + full[batch, head, q_pos, kv_pos],
    "gated_alone": 5.0 * weft.tanh((score * (1.0 + full[batch, head, q_pos, kv_pos])) / 5.0),
    "twice": score + of_heads[head, q_pos, kv_pos] * of_heads[head, q_pos, kv_pos] + of_heads[0, kv_pos, q_pos],
}


def variant(name: str, mask: Any = masks.causal) -> weft.Attention:
    return weft.Attention(SCORES[name], mask, name=name)


class Boxed(OnACpu):
    """The interpreter with two programs at a time; lists of tiles are made here."""

    def processors(self) -> int:
        return 2

    def compiled(self, asked: Any) -> Any:
        rows = self.job.code.kernels[-1].form.block_q

        def lists(one: Any) -> Any:
            return lambda programs, arguments, stream: list_tiles(dict(zip(one.binding.parameters, arguments)), rows)

        runs = super().compiled(asked)
        return [lists(one) if one.binding.name == "query_work" else run for one, run in zip(asked, runs)]


def list_tiles(given: dict[str, Any], rows: int) -> None:
    """(sequence, tile) of all query tiles, those behind the last sequence too, in any order; other slots hold none."""
    ends = given["cu_q"].tolist()
    ends.append(max(ends[-1], given["q_extent"]))
    tiles = [
        (b, t) for b, (first, end) in enumerate(itertools.pairwise(ends)) for t in range(-(-(end - first) // rows))
    ]
    given["work"].fill_(-1)
    given["work"][: len(tiles)] = torch.tensor(tiles[::-1], dtype=torch.int32)


@dataclasses.dataclass(frozen=True)
class Run:
    """How the generated text is run."""

    form: str | None = None
    seed: int = 0
    edit: Any = None

    def launcher(
        self, declared: weft.Attention, sequences: Any, dtype: Any, boxed: int, wanted: Any = frozenset()
    ) -> Any:
        direction, kernel = ("backward", "flash_backward") if wanted else ("forward", "flash_forward")
        signature = Signature(
            direction, "sm_90", Dtypes.all("bf16" if dtype == torch.bfloat16 else "fp16"), Widths(WIDTH, WIDTH),
            sequences=sequences.kind, offset="bottom_right" if sequences.kind.ragged else "number", boxed=boxed,
            wanted=wanted,
        )  # fmt: skip
        schedule = self.form and f"flash/{kernel}=hopper:{self.form}"
        made = compile_kernels(declared, signature, by_name("h200"), "hopper", schedule)
        assert made.resolved.target.name == "hopper"
        launcher = Boxed.of(made, declared, self.seed, self.edit)
        assert boxed and launcher.code.brings_boxes and "pairs_desc" in launcher.device.text
        return launcher


def launched(launcher: Any, call: Call, results: dict[str, Any]) -> list[Tensor]:
    partition = launcher.partition(call, results)
    workspace = {n: place.beside(call.query) for n, place in launcher.workspace(call, results, partition).items()}
    for name, tensor in workspace.items():
        if tensor.dtype.is_floating_point and launcher.workspace(call, results, partition)[name].fill is None:
            tensor.fill_(torch.nan)
    return launcher(call, results, workspace, partition)


def boxed_in(declared: weft.Attention, operands: dict[str, Tensor]) -> int:
    read = facts_of(declared).boxed_read
    assert read is not None
    return boxed_bytes(operands[read.tensor.name])


def run(
    declared: weft.Attention, tensors: list[Tensor], sequences: Any, operands: dict[str, Tensor], how: Run = Run()
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, of a kernel that brings tiles."""
    launcher = how.launcher(declared, sequences, tensors[0].dtype, boxed_in(declared, operands))
    query, _, value = tensors
    call = Call(*tensors, None, operands, sequences, Choices(), WIDTH)
    shape = (*query.shape[:3], value.shape[3])
    far = facts_of(declared).scores_lie_far
    results = {
        "out": torch.full(shape, torch.nan, dtype=query.dtype),
        "lse": torch.full((*([2] if far else []), *shape[:3]), torch.nan),
    }
    launched(launcher, call, results)
    return results["out"], results["lse"].sum(0) if far else results["lse"]


def biases(declared: weft.Attention, rows: int, columns: int, batches: int, dtype: Any) -> dict[str, Tensor]:
    """Operands with entries for more positions than there are."""
    sizes = {"batch": batches, "head": HEADS, "kv_head": KEY_HEADS}
    made = {}
    for t in declared.canonical.tensors:
        read = next(r for r in facts_of(declared).attention.canonical.gradient_loads if r.tensor == t)
        extents = [
            rows if "q_pos" in i.text else columns if "kv_pos" in i.text else sizes.get(i.text, HEADS)
            for i in read.index
        ]
        made[t.name] = torch.randn(extents).to(dtype if t.rank > 1 else torch.float32)
    return made


def check(
    name: str, q_len: int, kv_len: int, mask: Any = masks.causal, dtype: Any = torch.bfloat16, of: Any = torch.bfloat16,
    batches: int = 1, **options: Any,
) -> None:  # fmt: skip
    torch.manual_seed(q_len)
    declared = variant(name, mask)
    tensors = [torch.randn(batches, n, h, WIDTH).to(dtype).transpose(1, 2)
               for n, h in ((q_len, HEADS), (kv_len, KEY_HEADS), (kv_len, KEY_HEADS))]  # fmt: skip
    more = -(-max(q_len, kv_len) // 8) * 8 + 16
    operands = biases(declared, more, more, batches, of)
    offset = max(0, kv_len - q_len)
    found = run(declared, tensors, Dense(offset), operands, Run(**options))
    compare(declared, tensors, operands, found, {"q_offset": offset})


def compare(
    declared: Any, tensors: list[Tensor], operands: dict[str, Tensor], found: Any, given: dict[str, Any]
) -> None:
    results = []
    for kind in (torch.float64, tensors[0].dtype):
        own = {n: t.to(kind) for n, t in operands.items()}
        results.append(declared.reference(*(t.to(kind) for t in tensors), **given, **own, return_lse=True))
    for label, *three in zip(("out", "lse"), found, *results):
        check_errors(*three, label)


@pytest.mark.parametrize("name", mostly(["full", "further_on"], list(SCORES)))
def test_indices(name: str) -> None:
    check(name, 200, 230, batches=2 if name in ("full", "of_one") else 1)


CASES = [
    (130, 130, True, torch.bfloat16, torch.float32, "128x64s2q1p4+regs"),
    (70, 300, masks.sliding_window(90), torch.float16, torch.float16, None),
    (257, 129, True, torch.bfloat16, torch.bfloat16, "192x128s2q1p2+pairs"),
    (129, 257, masks.causal, torch.bfloat16, torch.float32, "128x64s3q1p4+lazy+overlap"),
    (1, 40, masks.causal, torch.bfloat16, torch.bfloat16, "128x128s2q1p2+inplace"),
]


@pytest.mark.parametrize(("q_len", "kv_len", "mask", "dtype", "of", "form"), mostly([CASES[0], CASES[1]], CASES))
def test_forms_masks_and_dtypes(q_len: int, kv_len: int, mask: Any, dtype: Any, of: Any, form: str | None) -> None:
    check("full", q_len, kv_len, mask, dtype, of, form=form)


@pytest.mark.parametrize("kind", ["lengths", "packed"])
def test_sequences_of_their_own_lengths(kind: str) -> None:
    """What lies behind a length is NaN, of biases too."""
    torch.manual_seed(3)
    declared, lens = variant("full"), ([70, 0, 130], [90, 5, 130])
    rows = [max(x) for x in lens] if kind == "lengths" else [sum(x) + 9 for x in lens]
    batches = 3 if kind == "lengths" else 1
    tensors = [torch.full((batches, h, n, WIDTH), torch.nan, dtype=torch.bfloat16)
               for h, n in ((HEADS, rows[0]), (KEY_HEADS, rows[1]), (KEY_HEADS, rows[1]))]  # fmt: skip
    bias = torch.full((3, HEADS, 136, 136), torch.nan, dtype=torch.bfloat16)
    own, starts = [], [0, 0]
    for b, (q_len, kv_len) in enumerate(zip(*lens)):
        mine = [torch.randn(1, t.shape[1], n, WIDTH).bfloat16() for t, n in zip(tensors, (q_len, kv_len, kv_len))]
        bias[b, :, :q_len, :kv_len] = 0.0
        at = [0, 0] if kind == "lengths" else list(starts)
        for t, m, side in zip(tensors, mine, (0, 1, 1)):
            t[b if kind == "lengths" else 0, :, at[side] : at[side] + m.shape[2]] = m[0]
        starts = [starts[0] + q_len, starts[1] + kv_len]
        own.append((at, mine))
    for b, (q_len, kv_len) in enumerate(zip(*lens)):  # positions are bottom right
        bias[b, :, max(0, kv_len - q_len) : kv_len, :kv_len] = torch.randn(HEADS, min(q_len, kv_len), kv_len).bfloat16()
    counts = [torch.tensor(x, dtype=torch.int32) for x in lens]
    sequences: Any = Lengths(*counts, None)
    if kind == "packed":
        sequences = Packed(*(torch.cat([c.new_zeros(1), c.cumsum(0).int()]) for c in counts), None)
    out, lse = run(declared, tensors, sequences, {"bias4": bias})
    for b, (at, mine) in enumerate(own):
        if not mine[0].numel():
            continue
        place = b if kind == "lengths" else 0
        rows_ = slice(at[0], at[0] + mine[0].shape[2])
        found = out[place : place + 1, :, rows_], lse[place : place + 1, :, rows_]
        offset = mine[1].shape[2] - mine[0].shape[2]
        compare(declared, mine, {"bias4": bias[b : b + 1]}, found, {"q_offset": offset})
    if kind == "lengths":
        assert not out[1].any() and torch.isinf(lse[1]).all()


def test_hidden_pairs_may_read_nan() -> None:
    torch.manual_seed(5)
    declared, length = variant("full"), 150
    tensors = [torch.randn(1, h, length, WIDTH).bfloat16() for h in (HEADS, KEY_HEADS, KEY_HEADS)]
    bias = torch.randn(1, HEADS, 160, 160).bfloat16()
    shown = bias.clone()
    bias[:, :, ~torch.ones(160, 160).tril().bool()] = torch.nan
    shown[bias.isnan()] = 0.0
    compare(declared, tensors, {"bias4": shown}, run(declared, tensors, Dense(0), {"bias4": bias}), {"q_offset": 0})


def test_roles_take_turns_in_any_order() -> None:
    for seed in range(3):
        check("full", 130, 600, form="128x64s2q1p2+regs" if seed else None, seed=seed)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    release_read(FIRST_FREE_KEY, count, highest)\n", ""),  # nobody gives back the tile
        ("    wait_arrived(sram.pairs_ready, count)\n    return", "    return"),  # it is read before it is there
    ],
)
def test_a_broken_protocol_is_noticed(right: str, wrong: str) -> None:
    def edit(text: str) -> str:
        if right not in text:  # no assertion, which would pass for a mistake that was noticed
            pytest.fail(f"the kernel has no {right!r}")
        return text.replace(right, wrong)

    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(4):
            check("full", 70, 600, form="128x64s2q1p2+regs", edit=edit, seed=seed)


# -- backwards ---------------------------------------------------------------------------------------------------------
def differentiate(
    declared: weft.Attention, tensors: list[Tensor], operands: dict[str, Tensor], offset: int, dout: Tensor, dtype: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """out, lse and gradients by name, of the definition in this dtype. lse: both statistics, where it has two."""
    leaves = {n: t.to(dtype).requires_grad_() for n, t in zip(("query", "key", "value"), tensors)}
    own = {n: t.to(dtype).requires_grad_() for n, t in operands.items()}
    out, lse = declared.reference(*leaves.values(), q_offset=offset, **own, return_lse=True)
    named = {**leaves, **own}
    found = torch.autograd.grad(out, list(named.values()), dout.to(dtype))
    return out.detach(), lse.detach(), dict(zip(named, found))


def check_gradients(
    name: str, q_len: int, kv_len: int, mask: Any = masks.causal, wants_bias: bool = True, of: Any = torch.bfloat16,
    more: int = 16, **options: Any,
) -> None:  # fmt: skip
    torch.manual_seed(q_len)
    declared, dtype, batches = variant(name, mask), torch.bfloat16, 2
    tensors = [torch.randn(batches, n, h, WIDTH).to(dtype).transpose(1, 2)
               for n, h in ((q_len, HEADS), (kv_len, KEY_HEADS), (kv_len, KEY_HEADS))]  # fmt: skip
    offset = max(0, kv_len - q_len)
    rows, columns = q_len + offset + more, kv_len + more
    operands = biases(declared, rows, -(-columns // 8) * 8, batches, of)
    dout = torch.randn(batches, HEADS, q_len, WIDTH).to(dtype)
    out, lse, expected = differentiate(declared, tensors, operands, offset, dout, torch.float64)
    *_, plain = differentiate(declared, tensors, operands, offset, dout, dtype)
    read = facts_of(declared).boxed_read
    assert read is not None
    own = {n: t.clone() for n, t in operands.items()}
    down, right = (3, 8) if "further" in name else (0, 0)
    own[read.tensor.name][..., offset + q_len + down :, :] = torch.nan  # what no query of the call reads
    own[read.tensor.name][..., kv_len + right :] = torch.nan
    wanted = frozenset({"query", "key", "value"} | ({read.tensor.name} if wants_bias else set()))
    launcher = Run(**options).launcher(declared, Dense(offset), dtype, boxed_in(declared, own), wanted)
    call = Call(*tensors, None, own, Dense(offset), Choices(), WIDTH)
    statistics = torch.stack([lse, torch.zeros_like(lse)]) if facts_of(declared).scores_lie_far else lse
    made = {f"d{n}": torch.full(t.shape, torch.nan, dtype=dtype) for n, t in zip(("query", "key", "value"), tensors)}
    sums = launched(
        launcher, call, {"out": out.to(dtype), "lse": statistics.float(), "dout": dout, "dlse": None, **made}
    )
    for n in ("query", "key", "value"):
        check_errors(made[f"d{n}"], expected[n], plain[n], n)
    if wants_bias:
        check_errors(sums[0], expected[read.tensor.name], plain[read.tensor.name], "bias")
        assert sums[0].dtype == of and (of == dtype or not torch.equal(sums[0], sums[0].to(dtype).float()))


BACKWARDS = [
    # score, queries, keys, mask, entries more
    ("full", 130, 130, masks.causal, 16),
    ("full", 128, 256, True, 0),  # every entry is written
    ("full", 70, 200, True, 8),
    ("full", 200, 70, masks.sliding_window(40), 0),
    ("further_on_alone", 100, 140, masks.causal, 16),
    ("beside_a_slope", 65, 64, masks.causal, 0),
]


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "q_len", "kv_len", "mask", "more"), mostly(BACKWARDS[:3], BACKWARDS))
def test_gradients(name: str, q_len: int, kv_len: int, mask: Any, more: int, of: Any) -> None:
    """Those of 32 bits an entry leave from registers, and are more exact than what products are made of."""
    check_gradients(name, q_len, kv_len, mask, more=more, of=of)


def test_gradients_of_the_others_alone() -> None:
    """Of scores whose derivative differs by pair too, and of operands in float32."""
    for name in ("full", "gated_alone"):
        check_gradients(name, 100, 130, wants_bias=False, of=torch.float32 if name == "full" else torch.bfloat16)


def test_a_backward_of_padded_sequences() -> None:
    """Gradients of the others; what lies behind a length is NaN, of biases too."""
    torch.manual_seed(4)
    declared, dtype, lens = variant("full"), torch.bfloat16, ([70, 0, 130], [90, 5, 130])
    shapes = [(3, HEADS, 130, WIDTH), *[(3, KEY_HEADS, 130, WIDTH)] * 2, (3, HEADS, 130, WIDTH), (3, HEADS, 130, WIDTH)]
    query, key, value, dout, out = (torch.full(shape, torch.nan, dtype=dtype) for shape in shapes)
    lse, bias = torch.full((2, 3, HEADS, 130), torch.nan), torch.full((3, HEADS, 136, 136), torch.nan, dtype=dtype)
    expected = []
    for b, (q_len, kv_len) in enumerate(zip(*lens)):
        for t, rows in ((query, q_len), (key, kv_len), (value, kv_len), (dout, q_len)):
            t[b, :, :rows] = torch.randn(t.shape[1], rows, WIDTH).to(dtype)
        offset = kv_len - q_len
        bias[b, :, offset:kv_len, :kv_len] = torch.randn(HEADS, q_len, kv_len).to(dtype)
        mine = [query[b : b + 1, :, :q_len], *(t[b : b + 1, :, :kv_len] for t in (key, value))]
        own = {"bias4": torch.nan_to_num(bias[b : b + 1])}
        if q_len == 0:
            expected.append(None)
            continue
        exact, plain = (
            differentiate(declared, mine, own, offset, dout[b : b + 1, :, :q_len], kind)
            for kind in (torch.float64, dtype)
        )
        out[b, :, :q_len], lse[0, b, :, :q_len], lse[1, b, :, :q_len] = exact[0][0].to(dtype), exact[1][0].float(), 0.0
        expected.append((exact[2], plain[2]))
    sequences = Lengths(*(torch.tensor(x, dtype=torch.int32) for x in lens), None)
    wanted = frozenset({"query", "key", "value"})
    launcher = Run().launcher(declared, sequences, dtype, 2, wanted)
    call = Call(query, key, value, None, {"bias4": bias}, sequences, Choices(), WIDTH)
    made = {
        f"d{n}": torch.full(t.shape, torch.nan, dtype=dtype)
        for n, t in zip(("query", "key", "value"), (query, key, value))
    }
    launched(launcher, call, {"out": out, "lse": lse, "dout": dout, "dlse": None, **made})
    for b, both in enumerate(expected):
        for n, side in (("query", 0), ("key", 1), ("value", 1)):
            found, rows = made[f"d{n}"][b : b + 1], lens[side][b]
            assert not found[:, :, rows:].any()
            if both is None:
                assert not found.any()
            else:
                check_errors(found[:, :, :rows], both[0][n], both[1][n], n)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    tma.async_copy_shared_to_global(dpairs_desc", "    0 and tma.async_copy_shared_to_global(dpairs_desc"),
        # dS of the other consumer is read before it is there
        ("    mbarrier.wait(sram.dscores_ready.index(turn), count // 2 & 1)\n", ""),
        ('        keep = keep & (less_lse != float("-inf"))', "        keep = keep"),  # NaN of rows that do not exist
    ],
)
def test_a_broken_backward_is_noticed(right: str, wrong: str) -> None:
    def edit(text: str) -> str:
        if right not in text:  # no assertion, which would pass for a mistake that was noticed
            pytest.fail(f"the kernel has no {right!r}")
        return text.replace(right, wrong)

    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(4):
            check_gradients("full", 130, 130, seed=seed, edit=edit)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "dtype", "bytes_found"),
    [
        ((2, 3, 64, 64), None, 0, torch.bfloat16, 2),
        ((2, 3, 64, 64), None, 0, torch.float32, 4),
        ((1, 3, 60, 60), None, 0, torch.bfloat16, 0),  # rows that are no multiple of 16 bytes apart
        ((1, 3, 60, 60), (7, 64 * 60, 64, 1), 0, torch.float16, 2),
        ((2, 3, 64, 64), (0, 64 * 64, 64, 1), 0, torch.float16, 0),  # one for all batch rows: expanded
        ((3, 64, 64), (64 * 64, 1, 64), 0, torch.bfloat16, 0),
        ((64, 64), (64, 1), 1, torch.bfloat16, 0),
        ((2, 64, 64), None, 0, torch.int32, 0),
        ((2, 64, 64), None, 0, torch.float64, 0),
    ],
)
def test_which_tensors(shape: Any, strides: Any, offset: int, dtype: Any, bytes_found: int) -> None:
    storage = torch.zeros(torch.Size(shape).numel() * 2 + 8, dtype=dtype)
    contiguous = torch.empty(shape).stride()
    assert boxed_bytes(storage.as_strided(shape, strides or contiguous, offset)) == bytes_found
