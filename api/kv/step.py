"""A step of a cache: room for new rows of some sequences, and what a call over them needs."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..ir.errors import Problem, WeftError, collected, counted, shown
from ..runtime.descales import OF_CACHE
from ..runtime.ops.append import append_rows
from ..runtime.options import LENGTHS
from .given import check_flag

if TYPE_CHECKING:
    from ..attention import Attention
    from .cache import Cache

_SHORTER = "leave it out; a mask hides keys, and cache.truncate(sequence, length) drops them"
_BROUGHT = dict.fromkeys(("query", "key", "value", *LENGTHS, "k_descale", "v_descale", "rope"), "")  # by a step
_BROUGHT["kv_lens"] = _SHORTER


class Step:
    """Some sequences of a cache, in this order, with the rows that a step adds to each; made by `cache.extend`.

    All that lies on the device is written once a step, whatever the number of layers, and nothing is read back.

    sequences: their ids. starts, ends: tokens of each before and after the step, on the host.
    length: L, the most rows that a sequence gets. New rows are handed over as [B, Hkv, L, D], padded.
    q_lens, kv_lens: int32 [B], rows that each gets, and tokens that it has with them.
    positions: int32 [B, L], of the new rows; those behind q_lens go on counting.
    block_table: int32 [B, pages], the block of each page; None in a DenseCache.
    slots: int32 [B, L], where each new row goes: block * page + row of the block; -1 behind q_lens.
    cu_seqlens_q: int32 [B + 1], of a packed step the first new row of each sequence, and the end; else None. Its new
    rows are [1, Hkv, total, D], positions and slots [1, total], and length is the total.
    own_lens: int32 [B], rows of each that lie in this cache; kv_lens, where it holds whole sequences.

    In a `with` block it commits at the end, and cancels where an error leaves the block.
    """

    def __init__(
        self, cache: Cache, sequences: tuple[int, ...], starts: tuple[int, ...], ends: tuple[int, ...],
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], rows: slice | None,
        state: Literal["open", "committed", "cancelled", "read only", "fixed"], cu_seqlens_q: Tensor | None = None,
        own_lens: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.sequences, self.starts, self.ends = cache, sequences, starts, ends
        self.q_lens, self.kv_lens, self.positions, self.slots, self.block_table = tensors
        self.length = self.slots.shape[1]
        self.cu_seqlens_q = cu_seqlens_q
        self.own_lens = self.kv_lens if own_lens is None else own_lens
        self.state = state
        # how often rows had gone from the cache, and from each sequence, when the step was made
        self.moved: tuple[int, tuple[int, ...]] = (cache.moved, ())
        self._rows = rows  # of a DenseCache: where these sequences lie
        self._appended: set[int] = set()  # layers, where append was seen to run
        self._is_watched = True  # what a compiled function appends is not seen
        self.has_written = False  # rows of its own, or a fixed step did for it
        self._all_full = state != "fixed" and all(end - start == self.length for start, end in zip(starts, ends))
        self._has_rows = starts != ends  # of a fixed step: of those that filled it

    # -- what a call takes -------------------------------------------------------------------------------------------
    def keys(self, layer: int = 0) -> Tensor:
        """The key operand of a call over these sequences: the pool of a layer, or rows [B, Hkv, capacity, D] of it."""
        return self._given(self.cache.keys(layer))

    def values(self, layer: int = 0) -> Tensor:
        """The value operand, likewise."""
        return self._given(self.cache.values(layer))

    def _given(self, pool: Tensor) -> Tensor:
        """What of a pool is an operand; of FP8 it says that there are descales beside it."""
        found = pool if self._rows is None else pool[self._rows]
        if self.cache.scales is not None:
            setattr(found, OF_CACHE, True)
        return found

    @property
    def last(self) -> Tensor:
        """int32 [B], the last new row of each sequence: of its batch row, or of a packed step's one."""
        return self.q_lens - 1 if self.cu_seqlens_q is None else self.cu_seqlens_q[1:] - 1

    @property
    def options(self) -> dict[str, Any]:
        """Options of a call whose queries are the new rows: `variant(query, step.keys(0), step.values(0),
        **step.options)`. Of a cache of FP8 with several layers they differ: `step.options_of(layer)`."""
        if self.cache.scales is not None and self.cache.layers > 1:
            raise WeftError("options: descales of FP8 differ by layer; pass **step.options_of(layer)")
        return self.options_of(0)

    @property
    def _options(self) -> dict[str, Any]:
        """Those that all layers have."""
        found: dict[str, Any] = {"kv_lens": self.own_lens}
        if self.cu_seqlens_q is not None:
            found["cu_seqlens_q"] = self.cu_seqlens_q
        elif not self._all_full:
            found["q_lens"] = self.q_lens
        if self.block_table is not None:
            found["block_table"] = self.block_table
        return found

    def options_of(self, layer: int = 0) -> dict[str, Any]:
        """The same with what a cache of FP8 has beside the keys and values of a layer: descales, and rotary columns.

        Raises WeftError where the step no longer describes its sequences: it was cancelled, or rows of them are gone.
        """
        self._check_rows_are_there()
        layer = self.cache._checked_layer("options_of", layer)
        scales, rope = self.cache.scales, self.cache.ropes(layer)
        if scales is None:
            return self._options
        found = self._options | scales.of(layer, self._rows)
        if rope is not None:
            found["rope"] = rope if self._rows is None else rope[self._rows]
        return found

    def _check_rows_are_there(self) -> None:
        if torch.compiler.is_compiling() or (self.moved[0] == self.cache.moved and self.state != "cancelled"):
            return
        what = "it was cancelled" if self.state == "cancelled" else self.cache.changed(self)
        if what is not None:
            raise WeftError(
                f"step: {what}, and its rows may be those of others now; make another, cache.view(sequences)"
            )

    def attend(self, layer: int, variant: Attention, query: Tensor, /, **given: Any) -> Any:
        """What the variant gives for queries of the new rows, [B, Hq, L, D], over all that their sequences have.

        Of `view(sequences)`, which has no new rows, queries are as many as wanted. given: operands of the variant, and
        options of its call, such as return_lse. Raises WeftError for those that the step brings itself.
        """
        _check_variant(variant)
        given = self._beside(variant, query, given)
        value = self.values(layer) if self.cache.has_values else None
        return variant(query, self.keys(layer), value, **self.options_of(layer), **given)

    def _beside(self, variant: Attention, query: object, given: dict[str, Any]) -> dict[str, Any]:
        """What a caller gives beside what the step brings. Raises WeftError for that, and for queries of other rows."""
        problems = []
        for n in (n for n in given if n in _BROUGHT and given[n] is not None):
            problems.append(Problem(option=n, what="the step brings its own", next_step=_BROUGHT[n] or "leave it out"))
        if problems := problems + self.row_problems(query):
            raise collected(f"{variant.name}: attend", problems)
        return {n: value for n, value in given.items() if n not in _BROUGHT}

    def row_problems(self, query: object) -> list[Problem]:
        """Queries that are not of the new rows, where there are new ones."""
        rows = _rows_of(query)
        if rows is None or self.state == "read only" or rows == self.length:
            return []
        expected, how = f"{counted(self.length, 'row')}, the new ones of the step", "cache.view(sequences) takes others"
        return [Problem(operand="query", expected=expected, got=str(rows), next_step=how)]

    def append(self, layer: int, key: Tensor, value: Tensor | None = None) -> None:
        """Write the new rows of one layer: key [B, Hkv, L, D] and value [B, Hkv, L, Dv], of the cache's dtype.

        Rows behind q_lens are not read. Of a packed step B is 1 and L the total. Of a latent cache: the cached vectors
        [B, 1, L, rank + rope], and no value.
        Raises WeftError for rows that do not fit, and for a step that is not open.
        """
        if self.state not in ("open", "fixed"):
            raise WeftError(f"append: this step is {self.state}; make the next one with extend(...)")
        self.cache._check_rows(self.slots.shape[0], self.length, layer, key, value)
        cache = self.cache
        if cache.scales is not None:
            cache.scales.append(cache, layer, key, value, self.slots, self._has_rows)
        else:
            append_rows(key, value, cache.keys(layer), cache.values(layer) if cache.has_values else None, self.slots)
        self.has_written = True
        if torch.compiler.is_compiling():
            self._is_watched = False
        else:
            self._appended.add(layer)

    def fill(self, step: Step) -> None:
        """Of a fixed step: let its tensors describe another one, with as many sequences and rows, or fewer.

        A CUDA graph that was captured with this step then computes that one.
        """
        if (
            self.state != "fixed"
            or not isinstance(step, Step)
            or step.cache is not self.cache
            or step.block_table is None
            or self.block_table is None
        ):
            raise WeftError(f"fill: expected a fixed step and one of the same cache, got {self!r} and {shown(step)}")
        if step.cu_seqlens_q is not None:
            raise WeftError("fill: expected a padded step, as a fixed one is, got a packed one")
        there = (*self.slots.shape, self.block_table.shape[1])
        given = (*step.slots.shape, step.block_table.shape[1])
        if any(n > most for n, most in zip(given, there)):
            raise WeftError(
                f"fill: expected at most {counted(there[0], 'sequence')}, {counted(there[1], 'row')} and "
                f"{counted(there[2], 'page')}, got {list(given)}"
            )
        self._has_rows = self._has_rows or step._has_rows
        step.has_written = True
        self.slots.fill_(-1)
        self.q_lens.zero_()
        self.kv_lens.zero_()
        self.slots[: given[0], : given[1]].copy_(step.slots)
        self.positions[: given[0], : given[1]].copy_(step.positions)
        self.block_table[: given[0], : given[2]].copy_(step.block_table)
        self.q_lens[: given[0]].copy_(step.q_lens)
        self.kv_lens[: given[0]].copy_(step.kv_lens)
        if self.own_lens is not self.kv_lens:
            self.own_lens.zero_()
            self.own_lens[: given[0]].copy_(step.own_lens)

    # -- the end of a step -------------------------------------------------------------------------------------------
    def commit(self, *, partial: bool = False) -> None:
        """The rows of every layer are written: they are part of the sequences now, and full pages can be reused.

        Raises WeftError where rows were appended to some layers and not to others, unless `partial`: then those of the
        others are written otherwise, or not read before `truncate` takes them away. The step is open as before. Where
        none was seen to be appended, a captured graph wrote them, or somebody through `slots`.
        """
        check_flag("commit", "partial", partial)
        left = set(range(self.cache.layers)) - self._appended
        is_partial = self._is_watched and self._appended and left and self.starts != self.ends
        if self.state == "open" and is_partial and not partial:
            numbers = ", ".join(map(str, sorted(left)))
            raise WeftError(
                f"commit: nothing was appended to layer {numbers} of {self.cache.layers}, whose new rows would be "
                "garbage; append(layer, ...) to each, say commit(partial=True) if they are written otherwise or never "
                "read, or cancel()"
            )
        self.cache._close(self, keeps=True)

    def cancel(self) -> None:
        """Take the room away again: the sequences are as long as before."""
        self.cache._close(self, keeps=False)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.state == "open" and kind is None:
                self.commit()
        finally:
            if self.state == "open":
                self.cancel()

    def __repr__(self) -> str:
        if self.state == "fixed":
            return f"Step(fixed; {list(self.slots.shape)} rows)"
        rows = ", ".join(f"{s}: {a} + {b - a}" for s, a, b in zip(self.sequences, self.starts, self.ends))
        return f"Step({self.state}; tokens of each sequence: {{{rows}}})"


def _rows_of(query: object) -> int | None:
    """Of queries [B, Hq, L, D]; None of what a call refuses."""
    return query.shape[2] if isinstance(query, Tensor) and not query.is_nested and query.dim() == 4 else None


def _check_variant(variant: object) -> None:
    """Raise WeftError for what has no reference, as variants have: `attend` takes it behind the layer."""
    if not (callable(variant) and hasattr(variant, "reference")):
        expected = "a weft.Attention behind the layer, step.attend(layer, variant, query)"
        raise WeftError(f"attend: variant: expected {expected}, got {shown(variant)}")


def on_device(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tensors of the host on the device, in one copy that nobody waits for."""
    if device.type != "cuda":
        return [part.to(device) for part in parts]
    whole = torch.empty(sum(p.numel() for p in parts), dtype=torch.int32, device="cpu", pin_memory=True)
    torch.cat([p.reshape(-1) for p in parts], out=whole)
    moved = whole.to(device, non_blocking=True).split([p.numel() for p in parts])
    return [m.view(p.shape) for m, p in zip(moved, parts)]
