"""Calls of target `cpu` that torch's own kernel computes at once, of all batch rows.

Everything but operands is settled when one of them is looked at, so that a call like it is one operation and what looks
at its log-sum-exp. torch records that operation itself: a function of Python in autograd's graph takes as long as half
of a short call. What the caller gets is then no more than the output, and operands of the variant want no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.values.distances import of_distance
from ....ir.errors import second_derivative
from ....ir.walk import symbols
from ...at_once import LEAST_WEIGHT, Sizes, records_at_once, weighs_at_once
from ...products import (
    FINITE,
    MOST_OF_A_MASK,
    NEAR_0,
    VERY_SHORT,
    overlap,
    own_attention,
    own_backward,
    short_head,
    short_head_with_mask,
    takes_masks,
    told_apart,
    whole_attention,
)

MOST_COMPARED = 1 << 12  # numbers of an operand: to compare more takes as long as to make a mask of them
MOST_SCORES = 1 << 18  # of a call; with more, a product that is spared is worth more than a function of Python costs
GRAIN = 1 << 15  # places that torch reads in one thread
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of numbers with so many bytes
Operands = Mapping[str, Any]
MaskOf = Callable[[Operands], Tensor]


Computed = tuple[Tensor, Any]  # out, and its log-sum-exp where that is known
Record = Callable[[Any], Computed | None]


class _Once(torch.autograd.Function):
    """Gradients as they are, which are not differentiated again."""

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise second_derivative(ctx.name)


def _once(name: str) -> Callable[..., tuple[Tensor | None, ...] | None]:
    """A hook on what torch records: of its own kernel, torch would refuse them in words that name a private op."""

    def hook(gradients: tuple[Tensor | None, ...], above: object) -> tuple[Tensor | None, ...] | None:
        return _Once.apply(name, *gradients) if torch.is_grad_enabled() else None

    return hook


class Own(NamedTuple):
    """What computes a call and those like it, each None where it does not."""

    launch: Record | None  # with the log-sum-exp; None where that is not what it has to be
    record: Record | None  # with gradients that torch records


def strides_like(query: Tensor, width: int) -> tuple[int, ...]:
    """Of an output in the memory order of its query."""
    _, heads, q_len, _ = query.shape
    if query.stride(1) < query.stride(2):
        return heads * q_len * width, width, heads * width, 1
    return heads * q_len * width, q_len * width, width, 1


def axes_of_mask(facts: Facts) -> frozenset[str]:
    """Which of batch and head what torch's own attention is handed differs by."""
    rest = () if facts.scale_and_rest is None else symbols(facts.scale_and_rest[1])
    return _axes_of(symbols(facts.attention.canonical.folded_mask).union(rest))


def _axes_of(read: frozenset[str]) -> frozenset[str]:
    return frozenset(axis for axis in ("batch", "head") if read & {axis, f"kv_{axis}"})


def numbers_of_mask(axes: frozenset[str], sizes: Sizes) -> int:
    """Of a mask that differs by these axes."""
    batch, heads, _, q_len, kv_len, _ = sizes
    return (batch if "batch" in axes else 1) * (heads if "head" in axes else 1) * q_len * kv_len


def records_with_mask(dtype: torch.dtype, sizes: Sizes) -> bool:
    """Whether torch records its own kernel where that is handed a mask: not long calls whose weights would be kept."""
    batch, heads, _, q_len, kv_len, head_dim = sizes
    if dtype.itemsize == 2 or q_len * kv_len * head_dim >= short_head_with_mask(dtype):
        return False
    return batch * heads * q_len * kv_len <= MOST_SCORES or not weighs_at_once(sizes, dtype, keeps=True)


def in_one_order(facts: Facts, sizes: Sizes) -> bool:
    """Whether torch adds up gradients of what is added to scores in one order: in threads it does not, of many places.
    What depends on distances alone is read once for each distance."""
    rest = None if facts.scale_and_rest is None else facts.scale_and_rest[1]
    if rest is None or torch.get_num_threads() == 1 or of_distance(rest) is not None:
        return True
    return numbers_of_mask(_axes_of(symbols(rest)), sizes) < GRAIN


class OwnKernel:
    """torch's own kernel for calls of one module."""

    def __init__(self, module: ModuleType, facts: Facts, in_tiles: bool) -> None:
        self.module, self.facts, self.far, self.in_tiles = module, facts, facts.scores_lie_far, in_tiles
        self.axes, self.once = axes_of_mask(facts), _once(str(facts.attention.name))
        self.whole = hasattr(module, "attended_as_a_whole")
        self.masked, self.weighs = hasattr(module, "attended_with_a_mask"), hasattr(module, "attended_at_once")

    def of(
        self, query: Tensor, key: Tensor, value: Tensor, operands: Operands, q_offset: int, sizes: Sizes
    ) -> Own:  # fmt: skip
        """For a call whose operands fit each other."""
        if torch.empty_like(query).stride() != strides_like(query, value.shape[3]) or overlap(query, key, value):
            return Own(None, None)
        env = (0, 0, 0, sizes[1] // sizes[2], *sizes[3:], *operands.values())
        scale = self.module.score_scale(*env)
        mask_of = partial(self._mask, query.dtype, q_offset, sizes)
        found = Own(None, None)
        if own_attention() is not None and not weighs_at_once(sizes, query.dtype, keeps=False):
            if self.whole and (run := self.module.run_of_keys(q_offset, scale, env)) is not None:
                found = self._whole(query, scale, run, sizes)
            elif self.masked and takes_masks():
                found = self._with_mask(query, mask_of, scale, sizes)
        if any([isinstance(v, Tensor) and v.requires_grad for v in operands.values()]):
            in_order = self._adds_in_order(mask_of, operands, sizes)
            return Own(found.launch, self._weighed(query, mask_of, scale, sizes) if in_order else None)
        # torch's kernel computes all three gradients, tiles those that are wanted
        few = sizes[0] * sizes[1] * sizes[3] * sizes[4] <= VERY_SHORT
        wants_all = query.requires_grad and key.requires_grad and value.requires_grad
        return Own(found.launch, self._refusing(found.record) if few or wants_all else None)

    def _refusing(self, record: Record | None) -> Record | None:
        """The same, whose gradients are not differentiated again."""
        if record is None:
            return None
        once = self.once

        def refusing(call: Any) -> Computed | None:
            found = record(call)
            if found is not None and (node := found[0].grad_fn) is not None:
                node.register_hook(once)
            return found

        return refusing

    def _whole(self, query: Tensor, scale: float, run: tuple[int, int, bool], sizes: Sizes) -> Own:
        (batch, heads, _, q_len, kv_len, head_dim), (first, end, up_to_own) = sizes, run
        of_a_head, in_16_bits = q_len * kv_len * head_dim, query.dtype.itemsize == 2
        scores, rows = batch * heads * q_len * kv_len, batch * heads * q_len
        attend = whole_attention(scores, of_a_head >> up_to_own, self.in_tiles, in_16_bits)
        if attend is None or end - first < kv_len:
            return Own(None, None)
        count, strides = torch.count_nonzero, torch.empty_like(query).stride()

        def launch(call: Any) -> Computed | None:
            found = out, lse = attend(call.query, call.key, call.value, 0.0, up_to_own, scale=scale)
            # as `attended_as_a_whole` has it
            if out.stride() != strides or int(count(lse)) < rows or (in_16_bits and not math.isfinite(lse.sum())):
                return None
            return found

        is_short = not in_16_bits and (scores <= VERY_SHORT or of_a_head < short_head(backward=True))
        return Own(launch, launch if is_short and own_backward() is not None else None)

    def _with_mask(self, query: Tensor, mask_of: MaskOf, scale: float, sizes: Sizes) -> Own:
        batch, heads, _, q_len, kv_len, head_dim = sizes
        of_a_head, rows = q_len * kv_len * head_dim, batch * heads * q_len
        if of_a_head >= short_head_with_mask() or not 0 < numbers_of_mask(self.axes, sizes) <= MOST_OF_A_MASK:
            return Own(None, None)
        attend, made, far, most = own_attention(), Made(mask_of), self.far, NEAR_0 if self.far else FINITE
        assert attend is not None
        with torch.inference_mode(False):
            zeros = torch.zeros((batch, heads, q_len) if far else 0, dtype=_type_of_scores(query.dtype), device="cpu")
        count, norm, strides = torch.count_nonzero, torch.linalg.vector_norm, torch.empty_like(query).stride()

        def launch(call: Any) -> Computed | None:
            mask = made(call.operands)[0]
            out, lse = attend(call.query, call.key, call.value, 0.0, False, attn_mask=mask, scale=scale)
            # as `attend_with_mask` has it
            if out.stride() != strides or not float(norm(lse)) <= most:
                return None
            if int(count(lse)) < rows and (out.requires_grad or not told_apart(out, lse, mask)):
                return None  # torch's own gradients of a row that sees no key are NaN
            return out, torch.stack((lse, zeros)) if far else lse

        def record(call: Any) -> Computed | None:
            return None if made(call.operands)[1] else launch(call)

        return Own(launch, record if records_with_mask(query.dtype, sizes) else None)

    def _weighed(self, query: Tensor, mask_of: MaskOf, scale: float, sizes: Sizes) -> Record | None:
        """A product, a softmax and a product, of a call whose operands want gradients."""
        batch, heads, kv_heads, q_len, kv_len, _ = sizes
        pairs, rows = (batch, heads, q_len, kv_len), batch * kv_heads
        if not self.weighs or not records_at_once(sizes, query.dtype):
            return None

        def record(call: Any) -> Computed | None:
            queries, keys, values = (x.reshape(rows, -1, x.shape[3]) for x in (call.query, call.key, call.value))
            # a view of an expanded tensor would share its gradient out among all places of one number
            operands = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in call.operands.items()}
            added = mask_of(operands).expand(pairs).reshape(rows, -1, kv_len)
            weights = torch.softmax(torch.baddbmm(added, queries, keys.mT, alpha=scale), -1)
            torch.threshold_(weights.data, LEAST_WEIGHT, 0.0)  # what the backward sees too
            out = torch.bmm(weights, values)
            if not math.isfinite(out.detach().sum()):  # a row sees no key, or a hidden one holds NaN
                return None
            return out.view(*pairs[:3], -1), None

        return record

    def _adds_in_order(self, mask_of: MaskOf, operands: Operands, sizes: Sizes) -> bool:
        if in_one_order(self.facts, sizes):
            return True
        with torch.no_grad():
            mask = mask_of(operands)
        return any([isinstance(v, Tensor) and _share(mask, v) for v in operands.values()])  # a view reads none twice

    def _mask(self, dtype: torch.dtype, q_offset: int, sizes: Sizes, operands: Operands) -> Tensor:
        batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
        scores = _type_of_scores(dtype)
        given = self.module.in_compute_type(operands.values(), scores)
        env = (0, 0, 0, heads // kv_heads, q_len, kv_len, head_dim, *given)
        found: Tensor = self.module.mask_of_pairs(q_offset, 0, batch, heads, env, scores)
        return found


class Made:
    """A mask, and whether it is known to hide all keys from some row; made anew where operands hold other numbers.

    They are compared number by number: that takes a microsecond, and sees whatever was written, by whomever. Where a
    mask is a view of the one operand, as a learned bias is, no more than its place is kept.
    """

    def __init__(self, make: MaskOf) -> None:
        self._make = make
        self._kept: tuple[Tensor, bool, list[tuple[str, Tensor]]] | None = None
        self._place: tuple[str, tuple[int, ...], tuple[int, ...], int] | None = None

    def __call__(self, operands: Operands) -> tuple[Tensor, bool]:
        if self._place is not None:
            name, shape, strides, offset = self._place
            operand = operands[name].detach()
            return operand.as_strided(shape, strides, operand.storage_offset() + offset), False
        kept = self._kept
        if kept is not None and all([torch.equal(_bits(operands[name]), then) for name, then in kept[2]]):
            return kept[:2]
        with torch.no_grad():
            mask = self._make(operands)
            tensors = [(n, v) for n, v in operands.items() if isinstance(v, Tensor)]
            if not all([v.numel() <= MOST_COMPARED for _, v in tensors]):
                if len(tensors) == 1 and _share(mask, tensors[0][1]):
                    (name, operand) = tensors[0]
                    place = int(mask.storage_offset() - operand.storage_offset())
                    self._place = name, tuple(mask.shape), mask.stride(), place
                return mask, False
            with torch.inference_mode(False):  # what is made in that mode may not be used everywhere
                copies = [(n, _bits(v).clone()) for n, v in tensors]
                self._kept = mask.clone(), bool((mask.amax(-1) == -math.inf).any()), copies
        return self._kept[:2]


def _share(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _type_of_scores(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bits(tensor: Tensor) -> Tensor:
    """The numbers as whole ones: there 0.0 is not -0.0, and NaN equals itself."""
    return tensor.view(_BITS[tensor.itemsize]) if tensor.is_floating_point() else tensor
