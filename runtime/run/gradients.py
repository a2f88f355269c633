"""What no kernel computes of a call: gradients of operands from the sums of their reads, and calls without pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...codegen.launch.finish import as_read, read_of, sizes_as_read
from ...compiler.analysis.tiles.facts import Facts
from ...compiler.analysis.tiles.results import PAIR_KINDS, OperandGradient
from ...compiler.planning.target import Place
from ...ir.reference import evaluate
from ..call import BackwardCall, Call, Dense
from ..rows import queries_of, rows_of, summed_by_sequence


def rows_like(tensor: Tensor, heads: int, width: int) -> Place:
    """[B, heads, rows, width] in the memory order of `tensor` ([B, L, H, D] views stay such)."""
    batch, _, rows, _ = tensor.shape
    of_head, of_row = (width, heads * width) if tensor.stride(1) < tensor.stride(2) else (rows * width, width)
    return Place((batch, heads, rows, width), (heads * rows * width, of_head, of_row, 1), tensor.dtype)


def contiguous_like(tensor: Tensor) -> Place:
    strides = tuple([math.prod(tensor.shape[n + 1 :]) for n in range(tensor.dim())])
    return Place(tuple(tensor.shape), strides, tensor.dtype)


# -- calls without pairs -----------------------------------------------------------------------------------------------
def lse_of_nothing(facts: Facts, call: Call, lse: Tensor) -> Tensor:
    """The log-sum-exp of rows where there is no key at all: the sink, if there is one."""
    sink = facts.attention.canonical.folded_sink
    if sink is None or 0 in lse.shape:
        return lse.fill_(-torch.inf)
    ragged = call.ragged
    if ragged is None:
        value = evaluate(sink, _env(call), lse.dtype, lse.device)
    elif ragged.number(call.query) == 0:
        return lse.fill_(-torch.inf)
    else:
        own, exists = queries_of(ragged, call.query, call.key)
        value = evaluate(sink, _heads(call) | own, lse.dtype, lse.device, exists)
        value = torch.where(exists, value, -torch.inf)  # what no sequence has
    if not facts.scores_lie_far:
        return lse.copy_(value.expand(lse.shape))
    lse[0].copy_(value.expand(lse.shape[1:]))
    lse[1].zero_()
    return lse


def gradients_of_nothing(facts: Facts, b: BackwardCall, gradients: Mapping[str, Place]) -> dict[str, Tensor]:
    """Gradients where there are no pairs: 0, but for what a sink reads, which is all of the log-sum-exp."""
    call, wanted, lse, dlse = b.call, b.wanted, b.lse, b.dlse
    found = {name: place.beside(call.query).zero_() for name, place in gradients.items()}
    tensors = {n: t for n, t in call.operands.items() if n in wanted and isinstance(t, Tensor)}
    none = call.ragged is not None and call.ragged.number(call.query) == 0
    if none or not tensors or dlse is None or 0 in dlse.shape:
        return found | {n: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for n, t in tensors.items()}
    if facts.scores_lie_far:
        lse, dlse = lse[0], dlse[0]  # of the sum of both statistics, which is what callers see
    dlse = torch.where(lse == -torch.inf, 0.0, dlse)  # of rows without a sink, and of those that no sequence has
    exists, sums = None, []
    if call.ragged is None:
        of_sinks, env = dlse.sum(-1), _env(call)
    else:
        of_sinks, own, exists = summed_by_sequence(dlse, call.ragged, call.query, call.key)
        env = _heads(call) | own
    read = [g for g in facts.operand_gradients(wanted) if g.kind == "sink"]
    for gradient in read:
        slope = evaluate(gradient.derivative, env, dlse.dtype, dlse.device, exists).expand(*of_sinks.shape, 1)
        sums.append(torch.where(of_sinks == 0.0, 0.0, of_sinks * slope[..., 0]))
    return found | operand_gradients(call, wanted, read, sums)


# -- operands ----------------------------------------------------------------------------------------------------------
def operand_gradients(
    call: Call, wanted: frozenset[str], gradients: Sequence[OperandGradient], sums: Sequence[Tensor]
) -> dict[str, Tensor]:
    operands = {n: t for n, t in call.operands.items() if n in wanted and isinstance(t, Tensor)}
    totals = {}
    for name, tensor in operands.items():
        own = [(g, total) for g, total in zip(gradients, sums) if g.load.tensor.name == name]
        match own:
            case [(gradient, total)] if gradient.kind in PAIR_KINDS:
                totals[name] = total  # in its shape already: a large one is not gone through again
                continue
        dtype = torch.float64 if torch.float64 in {total.dtype for _, total in own} else torch.float32
        totals[name] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
        for gradient, total in own:
            if gradient.kind in PAIR_KINDS:
                totals[name].add_(total)
            else:
                scatter(gradient, total, call, totals[name])
    return {n: total.to(operands[n].dtype) for n, total in totals.items()}


def _env(call: Call) -> dict[str, Any]:
    """Values of the symbols and operands of a dense call, to broadcast over [B, Hq, L] or [B, Hq, T]."""
    return _heads(call) | _dense_rows(call, call.query.device)


def _heads(call: Call) -> dict[str, Any]:
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    head = torch.arange(heads, device=call.query.device).view(1, -1, 1)
    return {
        "head": head, "kv_head": head // (heads // kv_heads), "group": heads // kv_heads, "head_dim": call.head_dim,
        **call.operands,
    }  # fmt: skip


def scatter(gradient: OperandGradient, total: Tensor, call: Call, result: Tensor) -> None:
    """Add the sums of one read, shaped [B, Hq], [B, Hq, L] or [B, Hq, T], to the places that it was read from."""
    device, read = total.device, read_of(gradient)
    sums = total if total.dim() == 3 else total[..., None]
    if device.type == "cuda" and read is not None and type(call.sequences) is Dense:
        is_whole = result.shape == sizes_as_read(read, *sums.shape)
        if is_whole and (gradient.kind != "row" or (type(call.q_offset) is int and call.q_offset == 0)):
            result += as_read(sums, read.over, read.order, result)  # the usual one, as the direct way does it
            return
    by_head = total.dim() == 2 and [i.text for i in gradient.load.index] == ["head"]
    if by_head and result.shape[0] >= total.shape[1]:  # in few launches; nobody reads a shorter operand
        result[: total.shape[1]] += total.sum(0)
        return
    env = _heads(call)
    ragged, exists = call.ragged, None
    if ragged is None:
        env |= _dense_rows(call, device)
    else:
        own, exists = rows_of(ragged, gradient.kind, call.query, call.key)
        env |= own
        sums = torch.where(exists, sums, 0.0)  # what no sequence has was not written
    index = [evaluate(i, env, torch.float64, device, exists).expand(sums.shape) for i in gradient.load.index]
    if exists is not None:
        index = [torch.where(exists, places, 0) for places in index]
    if not index:  # the one number of a tensor without dimensions
        result.add_(sums.sum())
        return
    if device.type == "cuda":
        result.index_put_(tuple(index), sums, accumulate=True)  # sorts, so the order of additions is fixed
        return
    flat = torch.zeros(sums.shape, dtype=torch.int64, device=device)
    for places, extent in zip(index, result.shape):
        flat = flat * extent + places
    # index_put_ adds in any order on a CPU; bincount goes through its input once, from first to last
    result += torch.bincount(flat.flatten(), sums.flatten(), result.numel()).view(result.shape).to(result.dtype)


def _dense_rows(call: Call, device: torch.device) -> dict[str, Any]:
    """Symbols of rows, that broadcast over [B, Hq, rows]."""
    batch, _, q_len, _ = call.query.shape
    kv_len = call.key.shape[2]
    offset = call.q_offset.view(-1, 1, 1) if isinstance(call.q_offset, Tensor) else call.q_offset
    rows = call.sequences
    assert isinstance(rows, Dense)
    return {
        "batch": torch.arange(batch, device=device).view(-1, 1, 1), "q_len": q_len, "kv_len": kv_len,
        "q_pos": rows.q_rows(q_len, device) + offset, "kv_pos": rows.kv_rows(kv_len, device),
    }  # fmt: skip
