"""Models of transformers whose sequences lie on several ranks: what `context_parallel` makes of a mask and a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import Attention
from ..ir.errors import UnavailableError, WeftError
from ..ir.expr import symbol
from ..runtime.check.tensors import DTYPES
from .masking import NAME, Mask, Rule, handed

if TYPE_CHECKING:
    from ..distributed import ContextParallel, ShardPlan

WHAT = f"{NAME}: context_parallel"
IGNORED = -100  # a label that transformers leaves out of the loss
_READS_ROWS = re.compile(r"\bt\d+\[[^\]]*\b(q_idx|kv_idx)\b")
_of_this_process: list[Sharded] = []  # not of a thread: a backward that computes layers again runs in another one


class Sharded:
    """Sequences of one length whose rows lie on the ranks of a `ContextParallel`, the same rows in every layer."""

    def __init__(self, cp: ContextParallel, length: int) -> None:
        self.cp, self.length = cp, length
        self.balance = "zigzag" if cp.balance == "auto" else cp.balance
        if self.balance == "pairs":
            raise WeftError(
                f"{WHAT}: balance='pairs': layers with other masks would hold other rows; use 'zigzag', 'striped' or "
                "'contiguous'"
            )
        causal = Attention(mask=symbol("kv_pos") <= symbol("q_pos"), name="rows")
        self._dealt = cp.plan(causal, heads=1, length=length, head_dim=16, strategy="exchange", balance=self.balance)
        self.positions = cp.rows(self._dealt)
        self._plan = lru_cache(maxsize=64)(self._planned)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that it has whole."""
        return self.cp.shard(tensor, self._dealt, dim)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor, such as logits, from the rows of all ranks."""
        return self.cp.unshard(tensor, self._dealt, dim)

    def inputs(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        """Arguments of a model for this rank's rows of whole tensors [B, L].

        The loss is then this rank's part of the mean over the labels of all ranks: losses and gradients of ranks add
        up to those of one process.
        """
        own = self.shard(input_ids)
        positions = self.positions.to(input_ids.device).expand(len(own), -1)
        # with a mask, transformers does not take positions that jump for the starts of packed sequences
        found: dict[str, Any] = {"input_ids": own, "position_ids": positions, "attention_mask": torch.ones_like(own)}
        if labels is not None:
            following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            found |= {"labels": self.shard(labels), "shift_labels": self.shard(following)}
            found["num_items_in_batch"] = (following != IGNORED).sum()
        return found

    # -- what models do ------------------------------------------------------------------------------------------------
    def mask(self, rule: Rule, device: torch.device | str) -> Mask:
        """The mask that a model gets for its rows; its rule is that of the whole sequence."""
        rows = len(self.positions)
        if rule.shape[2:] != (rows, rows) or isinstance(rule.q_first, Tensor) or rule.q_first != 0 or rule.kv_first:
            raise WeftError(
                f"{WHAT}: expected {rows} queries and keys, the rows of rank {self.cp.rank} of {self.length}, and no "
                f"cache that holds others, got {rule.shape[2]} queries and {rule.shape[3]} keys; `inputs` gives what a "
                "model takes"
            )
        if rule.seen is not None:
            raise UnavailableError(
                f"{WHAT}: padding: an attention_mask of one rank does not tell others; pad at the end, leave "
                f"attention_mask out of the batch, and give padding the label {IGNORED}"
            )
        if _READS_ROWS.search(rule.text):
            raise UnavailableError(
                f"{WHAT}: the mask reads a tensor by row ({rule.text}), which this rank has no whole copy of. Packed "
                "sequences are not divided yet; where positions only jump between the runs of a rank, pass the "
                "attention_mask that `inputs` gives"
            )
        rule.over = self
        return handed(rule, self._no_pairs, device)

    def _no_pairs(self) -> Tensor:
        raise UnavailableError(
            f"{WHAT}: the model computes with its mask, which would be that of this rank's rows alone; it is not "
            "trained over ranks"
        )

    def attention(
        self, variant: Attention, query: Tensor, key: Tensor, value: Tensor, operands: dict[str, Any],
        deterministic: bool | None,
    ) -> Tensor:  # fmt: skip
        """out [B, Hq, rows, Dv] of this rank's rows of query, key and value [B, H, rows, D]."""
        sizes = query.shape[0], query.shape[1], key.shape[1], query.shape[3], value.shape[3], DTYPES[query.dtype]
        decisive = {n: v for n, v in operands.items() if n != "sinks" and isinstance(v, Tensor)}
        numbers = {n: v for n, v in operands.items() if not isinstance(v, Tensor)}
        # a plan that stands on tensors, such as those of padding at the left of chunks, holds for these alone
        plan_of = self._planned if decisive else self._plan
        with self.cp.heard(variant.name):
            plan = plan_of(variant, sizes, tuple((numbers | decisive).items()))
        own: dict[str, Any] = {
            n: self.cp.share(v) if isinstance(v, Tensor) and v.requires_grad else v for n, v in operands.items()
        }
        found: Tensor = self.cp.attention(
            variant, query, key, value, plan=plan, deterministic=deterministic, **own
        )  # fmt: skip
        return found

    def _planned(self, variant: Attention, sizes: tuple[Any, ...], numbers: tuple[tuple[str, Any], ...]) -> ShardPlan:
        batch, heads, kv_heads, head_dim, value_dim, dtype = sizes
        return self.cp.plan(
            variant, batch=batch, heads=heads, kv_heads=kv_heads, length=self.length, head_dim=head_dim,
            value_dim=value_dim, dtype=dtype, balance=self.balance, **dict(numbers),
        )  # fmt: skip


@contextmanager
def context_parallel(cp: ContextParallel, length: int) -> Iterator[Sharded]:
    """Inside, models with attn_implementation="weft" compute this rank's rows of sequences of `length` tokens.

    Any mask that transformers describes by indices alone is computed: causal, sliding windows, chunks, with sinks and
    soft caps. cp: its `balance` deals rows, zigzag where it is "auto". Gives a `Sharded`, whose `inputs` are those of
    a model. Gradients of parameters are this rank's part of a sum over ranks, as FSDP and DDP expect.

    Raises WeftError for other rows, and UnavailableError for padding, packed sequences and biases.

    >>> with context_parallel(cp, 131072) as rows:                              # doctest: +SKIP
    ...     loss = model(**rows.inputs(tokens, labels=tokens)).loss
    """
    if _of_this_process:
        raise WeftError(f"{WHAT}: regions are not put into each other")
    sharded = Sharded(cp, length)
    _of_this_process.append(sharded)
    try:
        yield sharded
    finally:
        _of_this_process.remove(sharded)


def current() -> Sharded | None:
    """Where a model is called from now."""
    return _of_this_process[0] if _of_this_process else None


def refuse_inside(what: str) -> None:
    """Raise where sequences lie on several ranks: what would be computed of one rank's rows is not what is meant."""
    if _of_this_process:
        raise UnavailableError(f"{WHAT}: {what}")
