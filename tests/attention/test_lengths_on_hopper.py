"""Sequences of their own lengths on `hopper`: the text of its kernels, run by gluon.py, against float64."""

from __future__ import annotations

import inspect

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_len, q_pos, score
from weft.codegen.targets.triton.modules import measures
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.sources import PACKED
from weft.runtime.call import Call, Choices, Lengths, Packed, Paged
from weft.runtime.run.gradients import operand_gradients

from ..support import check_errors, mostly, poisoned
from . import cases
from .cases import CAUSAL, doc, pad
from .gluon import portable_module
from .test_flash_on_hopper import joined, launch

pytest.importorskip("triton")

sinks_of = weft.tensor("sinks_of", 2)
VARIANTS = {
    **{name: cases.VARIANTS[name] for name in ("dense", "causal", "cap")},
    "window": weft.Attention(mask=masks.sliding_window(50), name="window"),
    "lengths": weft.Attention(score * (1.0 + 0.002 * q_len) + 0.1 * batch, masks.causal, name="lengths"),
    "sunk": CAUSAL.replace(sink=sinks_of[batch, head], name="sunk"),
    "far": weft.Attention(score + pad[batch, kv_pos], masks.causal, name="far"),
}
MAIN = ("query", "key", "value")
# one sequence without queries, one without keys, one of one token, more queries than keys; tiles have 64 rows and more
LENS = ([150, 0, 70, 1, 129, 40], [200, 9, 0, 1, 100, 40])
DTYPE = torch.bfloat16
NUMBER, MORE = len(LENS[0]), (33, 21)  # rows behind all


def operands_of(variant):
    generator = torch.Generator().manual_seed(3)
    known = {
        "sinks_of": torch.randn(NUMBER, 4, generator=generator),
        "pad": torch.where(torch.arange(400) % 5 == 3, -1e9, 0.0).repeat(NUMBER, 1),
        "doc": torch.stack([torch.arange(400) // n for n in (30, 50, 7, 30, 130, 300)]),
    }
    return {p.name: known[p.name] for p in variant.canonical.parameters}


def sequences_of(kind, offset):
    """Of the runtime, and the options of a call."""
    counts = [torch.tensor(x, dtype=torch.int32) for x in LENS]
    if kind == "padded":
        return Lengths(*counts, offset), {"q_lens": counts[0], "kv_lens": counts[1]}
    starts = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in counts]
    return Packed(*starts, offset), {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}


def rows_of(kind, side):
    """(batch row, rows) of each sequence."""
    ends = torch.tensor(LENS[side]).cumsum(0).tolist()
    if kind == "padded":
        return [(b, slice(0, n)) for b, n in enumerate(LENS[side])]
    return [(0, slice(end - n, end)) for n, end in zip(LENS[side], ends)]


def made(kind, heads, side, dim, seed, fill=torch.nan):
    """Rows [B, heads, rows, dim] with NaN behind every length, and around; elsewhere 0 behind lengths."""
    size = (NUMBER, max(LENS[side]) + 5) if kind == "padded" else (1, sum(LENS[side]) + MORE[side])
    whole = poisoned((size[0], heads, size[1], dim), DTYPE, seed=seed)
    there = torch.zeros(size, dtype=torch.bool)
    for b, rows in rows_of(kind, side):
        there[b, rows] = True
    return whole.masked_fill_(~there[:, None, :, None], fill), there


def check(
    variant, kind, dim=64, value_dim=None, heads=2, kv_heads=1, deterministic=True, wanted=MAIN, offset=None,
    operands=None, seed=0, rope_dim=0,
):  # fmt: skip
    """Gradients of one call; its output and log-sum-exp are those of the definition. NaN behind lengths everywhere.

    rope_dim: the last columns of all heads' keys are those of a tensor of their own.
    """
    operands = operands_of(variant) if operands is None else operands
    sequences, lengths = sequences_of(kind, offset)
    query, of_queries = made(kind, heads, 0, dim, 0)
    key, value = (made(kind, kv_heads, 1, d, n)[0] for n, d in ((1, dim - rope_dim), (2, value_dim or dim)))
    tensors = dict(zip(MAIN, (query, key, value)))
    if rope_dim:
        tensors["rope"] = made(kind, 1, 1, rope_dim, 4)[0]
    dout, _ = made(kind, heads, 0, value_dim or dim, 3)
    exact, usual = (
        of_definition(variant, tensors, operands, lengths, offset, dout, dtype, wanted)
        for dtype in (torch.float64, DTYPE)
    )
    exists = of_queries[:, None].expand(exact["lse"].shape)
    lse = torch.where(exists, exact["lse"].float(), torch.nan)
    if facts_of(variant).scores_lie_far:
        lse = torch.stack([lse, torch.zeros_like(lse)])
    out = torch.where(exists[..., None], exact["out"].to(DTYPE), torch.nan)
    call = Call(query, key, value, tensors.get("rope"), operands, sequences, Choices(), dim)
    found = {f"d{n}": torch.full_like(tensors[n], torch.nan) for n in wanted if n in tensors}
    results = {"out": out, "lse": lse, "dout": dout, "dlse": None, **found}
    kind_of_offset = "bottom_right" if offset is None else "per_row" if isinstance(offset, torch.Tensor) else "number"
    launched = variant.replace(latent=weft.Latent(16, rope_dim)) if rope_dim else variant
    sums = launch(launched, call, results, wanted, deterministic, seed, kind_of_offset)
    if sums:
        read = variant._variant.facts.operand_gradients(frozenset(wanted))
        own = operand_gradients(call, frozenset(wanted), read, sums)
        found |= {f"d{n}": g for n, g in own.items()}
    assert found.keys() == {f"d{n}" for n in wanted}
    for name, gradient in found.items():
        check_errors(gradient, exact[name], usual[name], f"{variant.name} {kind} {name}")
    return found


def of_definition(variant, tensors, operands, lengths, offset, dout, dtype, wanted):
    """out, lse and gradients by name."""
    own = {n: torch.nan_to_num(t).to(dtype) if t.is_floating_point() else t for n, t in operands.items()}
    leaves = {n: torch.nan_to_num(t).to(dtype) for n, t in tensors.items()} | own
    for n in wanted:
        leaves[n] = leaves[n].detach().clone().requires_grad_()
    given = {n: leaves[n] for n in own}
    key = joined(leaves["key"], leaves.get("rope"))
    out, lse = reference_of(variant, leaves["query"], key, leaves["value"], **given, **lengths, q_offset=offset)
    found = torch.autograd.grad(out, [leaves[n] for n in wanted], torch.nan_to_num(dout).to(dtype))
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(wanted, found)}}


def reference_of(variant, *tensors, **options):
    """out and lse; NaN of each row for a variant that has no log-sum-exp."""
    if variant.canonical.weighs.saves_lse:
        return variant.reference(*tensors, **options, return_lse=True)
    out = variant.reference(*tensors, **options)
    return out, torch.full_like(out[..., 0], torch.nan)


KINDS = ["padded", "packed"]
# statistics in tiles of 128, 64 and 32 rows; keys by rows and by columns, in one piece and in two
WIDTHS = [(64, 64), (128, 128), (192, 128), (80, 64), (256, 256)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "value_dim"), mostly([WIDTHS[0], WIDTHS[2], WIDTHS[4]], WIDTHS))
def test_widths(dim, value_dim, kind):
    check(CAUSAL, kind, dim, value_dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", mostly(["cap", "lengths", "far"], [n for n in VARIANTS if n != "causal"]))
def test_masks_and_scores(name, kind):
    check(VARIANTS[name], kind, 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [3, torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32)], ids=["int", "tensor"])
def test_offsets_and_groups_of_heads(offset, kind):
    check(CAUSAL, kind, 192, 128, heads=4, kv_heads=2, offset=offset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value", "query"), ("key", "value")], ids=" ".join)
def test_gradients_that_nobody_wants_are_left_out(wanted, kind):
    check(CAUSAL, kind, 192, 128, wanted=wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "value_dim"), mostly([(192, 128)], [(192, 128), (64, 64), (256, 256)]))
def test_sinks_of_sequences(dim, value_dim, kind):
    """Statistics lie in 4, 1 and 2 tiles of each slot of a list."""
    check(VARIANTS["sunk"], kind, dim, value_dim, heads=4, kv_heads=2, wanted=(*MAIN, "sinks_of"))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_have_one_order(kind):
    """The same bits, whatever turns roles take."""
    first, second = (check(CAUSAL, kind, 192, 128, heads=2, kv_heads=1, seed=seed) for seed in (0, 7))
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_before_the_first_key_have_positions_of_their_own(kind, deterministic):
    """A sequence with more queries than keys has negative positions, also where the score reads operands by key."""
    columns = weft.tensor("columns", 2)
    near = weft.Attention(score + columns[batch, kv_pos] - 1e-3 * (kv_pos - q_pos) * (kv_pos - q_pos), name="near")
    operands = {"columns": torch.randn(NUMBER, 200, generator=torch.Generator().manual_seed(4))}
    check(near, kind, 32, deterministic=deterministic, operands=operands)


# -- keys in two tensors, of which all heads share the second: expanded latent attention ------------------------------
ALL = (*MAIN, "rope")
# two passes, and one
APART = [(192, 128, 64), (136, 64, 8), (96, 64, 32), (80, 128, 16)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "value_dim", "rope_dim"), mostly([APART[0], APART[2]], APART))
def test_rotary_columns_of_keys_are_a_tensor_of_their_own(dim, value_dim, rope_dim, kind, deterministic):
    check(CAUSAL, kind, dim, value_dim, 3, 3, deterministic, ALL, rope_dim=rope_dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "deterministic"),
    mostly(
        [("window", False), ("cap", False), ("sunk", True)],
        [(name, how) for name in ("dense", "window", "cap", "lengths", "sunk", "far") for how in (False, True)],
    ),
)
def test_masks_and_scores_of_keys_in_two_tensors(name, deterministic, kind):
    wanted = (*ALL, "sinks_of") if name == "sunk" else ALL
    heads = 4 if name == "sunk" else 2
    check(VARIANTS[name], kind, 96, 64, heads, heads, deterministic, wanted, rope_dim=32)


SOME = ["rope", "query key value", "key", "query", "query rope", "value rope", "key value"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", mostly(SOME[:2], SOME))
def test_gradients_of_keys_in_two_tensors_that_nobody_wants_are_left_out(wanted, kind):
    check(CAUSAL, kind, 192, 128, 2, 2, False, wanted.split(), rope_dim=64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [192, 96])
def test_groups_of_heads_and_offsets_of_keys_in_two_tensors(dim, kind):
    """Heads that share keys are visited by one program, and programs of all key heads add to one gradient."""
    offset = torch.tensor([3, 5, -2, 40, 0, 20], dtype=torch.int32) if dim == 192 else 3
    check(CAUSAL, kind, dim, 64, 4, 2, False, ALL, offset, rope_dim=dim // 3)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_rotary_columns_have_one_order(kind):
    first, second = (check(CAUSAL, kind, 192, 128, 3, 3, True, ALL, rope_dim=64, seed=seed) for seed in (0, 7))
    assert all(torch.equal(first[n], second[n]) for n in first)


# -- masks that read tensors by position: tiles are measured ---------------------------------------------------------
# queries before the first key are of no document; nothing is read at a negative index
OWN_DOC = doc[batch, weft.maximum(q_pos, 0)]
MEASURED = {
    "documents": weft.Attention(mask=masks.causal & (OWN_DOC == doc[batch, kv_pos]), name="documents"),
    "both ways": weft.Attention(mask=OWN_DOC == doc[batch, kv_pos], name="both_ways"),
    "by head": weft.Attention(mask=doc[head, weft.maximum(q_pos, 0)] >= doc[head, kv_pos], name="by_head"),
    "valid keys": weft.Attention(mask=doc[batch, kv_pos] % 3 != 1, name="valid_keys"),
    "sunk": VARIANTS["sunk"].replace(mask=masks.causal & (OWN_DOC == doc[batch, kv_pos]), name="sunk_documents"),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MEASURED)
def test_gradients_of_measured_tiles(name, kind, deterministic):
    check(MEASURED[name], kind, 64, deterministic=deterministic)


def in_blocks(tensor, lens, page, blocks):
    """Rows of padded sequences in a pool [blocks, heads, page, dim]; block 0 is nobody's and holds NaN."""
    pool = poisoned((int(blocks.max()) + 1, tensor.shape[1], page, tensor.shape[3]), tensor.dtype).fill_(torch.nan)
    for b, length in enumerate(lens):
        for n, first in enumerate(range(0, length, page)):
            rows = tensor[b, :, first : min(first + page, length)]
            pool[int(blocks[b, n]), :, : rows.shape[1]] = rows
    return pool


def check_forward(variant, kind, dim, heads=2, kv_heads=1, offset=None, operands=None):
    """Output and log-sum-exp, 0 and -inf behind lengths."""
    operands = operands_of(variant) if operands is None else operands
    of_keys = "padded" if kind == "paged" else kind
    sequences, lengths = sequences_of(of_keys, offset)
    query, key, value = (made(of_keys, h, n > 0, dim, n)[0] for n, h in enumerate((heads, kv_heads, kv_heads)))
    exact, usual = (
        reference_of(
            variant, *(torch.nan_to_num(t).to(dtype) for t in (query, key, value)),
            **{n: t.to(dtype) if t.is_floating_point() else t for n, t in operands.items()}, **lengths,
            q_offset=offset,
        )
        for dtype in (torch.float64, DTYPE)
    )  # fmt: skip
    if kind == "paged":
        page, pages = 64, -(-max(LENS[1]) // 64)
        blocks = 1 + torch.randperm(NUMBER * pages, generator=torch.Generator().manual_seed(1)).view(NUMBER, pages)
        key, value = (in_blocks(t, LENS[1], page, blocks) for t in (key, value))
        sequences = Paged(*sequences.tensors.values(), blocks.int(), page, offset)
    call = Call(query, key, value, None, operands, sequences, Choices(), dim)
    results = {"out": torch.full_like(query, torch.nan), "lse": torch.full(query.shape[:3], torch.nan)}
    launch(variant, call, results)
    for n, name in enumerate(results if variant.canonical.weighs.saves_lse else ["out"]):
        check_errors(results[name], exact[n], usual[n], f"{variant.name} {kind} {name}")


@pytest.mark.parametrize("kind", [*KINDS, "paged"])
@pytest.mark.parametrize("name", MEASURED)
def test_outputs_of_measured_tiles(name, kind):
    check_forward(MEASURED[name], kind, 64)


@pytest.mark.parametrize("kind", [*KINDS, "paged"])
@pytest.mark.parametrize("dim", mostly([256], [32, 128, 256]))
def test_outputs_of_measured_tiles_of_other_widths(dim, kind):
    check_forward(MEASURED["documents"], kind, dim)


# -- gradients of what a score reads, one number for a sequence and head -----------------------------------------------
slopes = weft.tensor("slopes", 2)
SUMMED = {
    "slopes": weft.Attention(score + slopes[batch, head] * 0.05 * (kv_pos - q_pos), masks.causal, name="slopes"),
    "gain": weft.Attention(score * (1.0 + 0.3 * slopes[batch, head]), masks.causal, name="gain"),
    "of heads": weft.Attention(score * weft.exp(slopes[0, head]) + slopes[1, head] * q_len, name="of_heads"),
    "beside a sink": weft.Attention(
        score + slopes[batch, head] * 0.01 * kv_pos, masks.causal, sink=slopes[batch, head], name="beside_a_sink"
    ),
    "documents": MEASURED["documents"].replace(score=score * (1.0 + slopes[batch, head]), name="summed_documents"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUMMED)
def test_gradients_of_operands(name, kind):
    given = {"slopes": torch.randn(NUMBER, 2, generator=torch.Generator().manual_seed(6))}
    own = operands_of(MEASURED["documents"]) if name == "documents" else {}
    check(SUMMED[name], kind, 64, wanted=(*MAIN, "slopes"), operands=given | own)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [("slopes",), ("key", "slopes")], ids=" ".join)
def test_gradients_of_operands_alone(wanted, kind):
    given = {"slopes": torch.randn(NUMBER, 2, generator=torch.Generator().manual_seed(6))}
    check(SUMMED["gain"], kind, 192, 128, wanted=wanted, operands=given)


# -- gradients of what each pair reads: tiles of dS, which one pass stores ---------------------------------------------
bias = weft.tensor("bias", 4)
BIASED = {
    "causal": weft.Attention(score + bias[batch, head, q_pos, kv_pos], masks.causal, name="biased"),
    "full": weft.Attention(score + bias[batch, head, q_pos, kv_pos], name="biased_in_full"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BIASED)
def test_gradients_of_biases(name, kind):
    """NaN where no pair reads, and gradients of 0; rows behind all sequences are not those of the last one."""
    heads, generator = 2, torch.Generator().manual_seed(8)
    given = torch.full((NUMBER, heads, 160, 208), torch.nan, dtype=DTYPE)
    for b, (queries, keys) in enumerate(zip(*LENS)):
        given[b, :, :queries, :keys] = torch.randn(heads, queries, keys, generator=generator).bfloat16()
    options = {"wanted": (*MAIN, "bias"), "operands": {"bias": given}}
    found = check(BIASED[name], kind, 64, heads=heads, deterministic=False, offset=0, **options)
    assert not found["dbias"][given.isnan()].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_operands_beside_keys_in_two_tensors(kind):
    """Of measured tiles, too."""
    given = {"slopes": torch.randn(NUMBER, 4, generator=torch.Generator().manual_seed(6))}
    given |= operands_of(MEASURED["documents"])
    wanted = (*ALL, "slopes")
    check(SUMMED["documents"], kind, 192, 128, 4, 4, wanted=wanted, operands=given, rope_dim=64)


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_without_queries_have_no_weights(deterministic):
    """However large a score would be of what is not there."""
    large = weft.Attention(weft.where(q_len > 0, score, 1e3 * (1 + kv_pos)), name="large_without_queries")
    for kind in KINDS:
        check(large, kind, 32, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_operands_need_have_nothing_of_sequences_without_a_pair(kind, deterministic, monkeypatch):
    """A read outside of an operand would raise here."""
    monkeypatch.setitem(globals(), "LENS", ([70, 5, 0], [90, 0, 9]))
    monkeypatch.setitem(globals(), "NUMBER", 3)
    columns = weft.tensor("columns", 2)
    own = weft.Attention(
        score * (1.0 + slopes[batch, head]) + columns[batch, q_pos] + columns[batch, kv_pos], masks.causal, name="own"
    )
    operands = {"slopes": torch.randn(1, 2), "columns": torch.randn(1, 90)}
    check(own, kind, 32, deterministic=deterministic, operands=operands)
    check(own, kind, 32, wanted=(*MAIN, "slopes"), operands=operands)


def test_measuring_kernels_of_several_masks_keep_their_own_text():
    texts = [measures(facts_of(MEASURED[name]), False, PACKED) for name in ("documents", "valid keys")]
    loaded = [portable_module("tile_spans.py", text) for text in texts]
    for text, module in zip(texts, loaded):
        assert inspect.getsource(module.kv_values.fn) in text
