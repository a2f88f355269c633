"""What caches of keys and values have in common: sequences, their rows on the device, and exact accounts."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..calls.dtensors import is_sharded
from ..ir.attention import Latent
from ..ir.errors import WeftError, collected, counted, shown
from ..ir.numbers import is_int
from ..runtime.check.tensors import form_problem, known_memory_problems, width_problems
from ..runtime.descales import FP8, OF_CACHE, is_fp8
from .blocks import NO_SALT, Blocks, Start, start_of
from .given import MOST, check_flag, checked_tokens, device_of, is_size, listed, size_problems, token_ids
from .scales import Given, Scale, scale_problems, scales_of
from .share import ELSEWHERE, NOWHERE, WHOLE, Share
from .step import Step, on_device
from .table import Table

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPES = (*_FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
_MOST_NUMBERS = 2**45  # of all layers: no memory holds more
_ON_HOST = -1  # in place of a block: the page was swapped out


@dataclass(frozen=True)
class Usage:
    """How full a cache is.

    used, shared: blocks that sequences hold, and those of them that several hold; free: the others. kept: free blocks
    whose content a new sequence would find again. tokens: rows that hold a token, those of shared blocks once.
    fragmentation: share of the rows of used blocks that hold none. bytes: of the caches of all layers; used_bytes: of
    the used blocks. swapped, host_bytes: pages on the host.
    """

    page: int
    blocks: int
    used: int
    shared: int
    free: int
    kept: int
    tokens: int
    fragmentation: float
    bytes: int
    used_bytes: int
    swapped: int
    host_bytes: int


class _Swapped(NamedTuple):
    pages: list[int]  # which pages of the sequence
    rows: list[Tensor]  # on the host, [pages, heads, page, width] a pool


@dataclass
class _Sequence:
    row: int  # of the table
    blocks: list[int] = field(default_factory=list)
    length: int = 0  # tokens
    tokens: list[int] = field(default_factory=list)  # ids of the first ones, as far as they are known
    numbers: list[int] = field(default_factory=list)  # of the published pages, from the first on
    start: Start = NO_SALT  # what lies before them
    step: Step | None = None  # the one that is open
    new: int = 0  # rows of that step
    new_tokens: Sequence[int] | None = None  # their ids
    swapped: _Swapped | None = None
    moved: int = 0  # how often rows were dropped from its end, or swapped out: steps of before do not describe it


class Cache:
    """Base of PagedCache and DenseCache: pools [blocks, Hkv, page, D], one of keys and one of values a layer."""

    share: Share = WHOLE  # which tokens of each sequence lie here; blocks are counted in tokens of the whole sequence
    _holds_pages = True  # a sequence takes blocks as it grows, and shares them
    _makes_step: type[Step] = Step

    def __init__(
        self, blocks: int, page: int, layers: int, kv_heads: int | None, head_dim: int | None, value_dim: int | None,
        latent: Latent | None, dtype: torch.dtype, device: torch.device | str, scale: Scale | None = None,
        descales: tuple[Given, Given] = (None, None), rope_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        given = {"layers": layers, **self._sizes(blocks, page)}
        if latent is None:
            given |= {"kv_heads": kv_heads, "head_dim": head_dim}
            if value_dim is not None:
                given["value_dim"] = value_dim
        problems = size_problems(given)
        if latent is None:
            columns = {n: w for n in ("head_dim", "value_dim") if is_size(w := given.get(n))}
            problems += [str(p) for n, width in columns.items() for p in width_problems(n, width, "")]
        if latent is not None:
            if not isinstance(latent, Latent):
                problems.append(f"latent: expected weft.Latent(rank=..., rope=...), got {shown(latent)}")
            if not kv_heads is head_dim is value_dim is None:
                problems.append("latent: a latent cache has one vector a token; leave kv_heads, head_dim and value_dim")
        sizes = layers, kv_heads if latent is None else 1
        problems += scale_problems(dtype, scale, descales, latent is None, sizes)
        is_rope_dtype = isinstance(rope_dtype, torch.dtype) and rope_dtype in _FLOATS
        if rope_dtype is not None and not (latent is not None and is_fp8(dtype) and is_rope_dtype):
            expected = f"one of {', '.join(map(str, _FLOATS))} for a latent cache of FP8, and None for others"
            problems.append(f"rope_dtype: expected {expected}, got {shown(rope_dtype)}")
        if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
            problems.append(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {shown(dtype)}")
        if not problems and blocks * page > MOST:
            problems.append(f"expected at most 2**30 rows, got {counted(blocks, 'block')} of {page}")
        if not problems:
            widths = latent.rank + latent.rope if latent else kv_heads * (head_dim + (value_dim or head_dim))  # type: ignore[operator]
            if layers * blocks * page * widths > _MOST_NUMBERS:
                problems.append(f"expected at most 2**45 numbers, got {shown(layers * blocks * page * widths)}")
        if problems:
            raise collected(name, problems)
        if latent is not None:
            kv_heads, head_dim, value_dim = 1, latent.rank + latent.rope, 0
        assert kv_heads is not None and head_dim is not None
        self.layers, self.kv_heads, self.head_dim, self.page = layers, kv_heads, head_dim, page
        self.value_dim = head_dim if value_dim is None else value_dim
        self.latent, self.dtype, self.device = latent, dtype, device_of(name, device)
        shape = (blocks, kv_heads, self.rows)
        # zeros, so that rows which nobody wrote hold numbers; each pool by itself, so that compiled code sees no views
        apart = latent.rope if latent is not None and dtype in FP8 else 0  # rotary columns, which are no FP8
        made = [(head_dim - apart, dtype), *([(self.value_dim, dtype)] if latent is None else [])]
        made += [(apart, rope_dtype or torch.bfloat16)] if apart else []
        with torch.inference_mode(False):  # so that steps may be made in that mode or outside
            pools = [[torch.zeros(*shape, width, dtype=kind, device=self.device) for _ in range(layers)]
                     for width, kind in made]  # fmt: skip
        self._keys, others = pools[0], (pools[1] if len(pools) > 1 else [])
        self._values, self._ropes = ([], others) if apart else (others, [])
        self.scales = scales_of(self, blocks, scale, descales) if dtype in FP8 else None
        for pool in (*self._keys, *self._values) if dtype in FP8 else ():
            setattr(pool, OF_CACHE, True)
        self._blocks, self._table = Blocks(blocks), Table()
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self.moved = 0  # of all sequences, those that are gone too
        self._lock = threading.RLock()

    def __reduce__(self) -> NoReturn:
        raise WeftError(
            f"{type(self).__name__}: a cache is not copied or pickled, as its blocks belong to sequences of this "
            "process; make another, and copy a sequence with fork(sequence)"
        )

    def _sizes(self, blocks: int, page: int) -> dict[str, object]:
        return {"blocks": blocks, "page": page}

    # -- tensors -----------------------------------------------------------------------------------------------------
    @property
    def rows(self) -> int:
        """Rows of a block: one for each of its tokens that lies here."""
        return self.page // self.share.ranks

    @property
    def has_values(self) -> bool:
        """Whether there are values: a latent cache has none."""
        return self.latent is None

    def keys(self, layer: int = 0) -> Tensor:
        """The keys of a layer, [blocks, Hkv, page, D]; of a latent cache its vectors [blocks, 1, page, rank + rope],
        where that is FP8 without the rotary columns."""
        return self._keys[self._checked_layer("keys", layer)]

    def values(self, layer: int = 0) -> Tensor:
        """The values of a layer, [blocks, Hkv, page, Dv]."""
        if self.latent is not None:
            raise WeftError(f"{type(self).__name__}: a latent cache has no values; they come from keys(layer)")
        return self._values[self._checked_layer("values", layer)]

    def ropes(self, layer: int = 0) -> Tensor | None:
        """The rotary columns of a latent cache of FP8, [blocks, 1, page, rope], of `rope_dtype`; None in others."""
        layer = self._checked_layer("ropes", layer)
        return self._ropes[layer] if self._ropes else None

    @property
    def _pools(self) -> list[Tensor]:
        """All that belongs to blocks, as it is copied: torch copies no FP8 by an index."""
        if self.scales is None:
            return [*self._keys, *self._values]
        stored = (pool.view(torch.uint8) for pool in (*self._keys, *self._values))
        return [*stored, *self._ropes, *self.scales.pools]

    # -- sequences ---------------------------------------------------------------------------------------------------
    def allocate(self, tokens: Iterable[int] | None = None, *, salt: Hashable = None) -> int:
        """The id of a new sequence, which no other ever has.

        tokens: ids of its prompt. Full pages of the same ids that were committed before, in this order from the first
        token on, are shared in place of being computed again: `length(sequence)` tokens are there, at most all but one.
        salt: what rows depend on besides ids, as the digest of an image whose tokens are placeholders, or the name of
        an adapter: bytes, an int, or anything else with a hash. Only sequences with an equal salt share pages.
        """
        prompt = None if tokens is None else token_ids("allocate: tokens", tokens)
        start = start_of("allocate", salt)
        with self._lock:
            found = self._blocks.find(prompt, self.page, start) if prompt and self._holds_pages else []
            made = _Sequence(self._table.take(), [block for block, _ in found], len(found) * self.page)
            made.tokens, made.numbers = (prompt or [])[: made.length], [number for _, number in found]
            made.start = start
            self._blocks.hold(made.blocks)
            self._table.write(made.row, 0, made.blocks)
            return self._add(made)

    def _add(self, made: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next - 1] = made
        return self._next - 1

    def __len__(self) -> int:
        """How many sequences there are, with those that are swapped out."""
        return len(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return is_int(sequence) and sequence in self._sequences

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""
        return self._known("length", sequence).length

    def is_swapped(self, sequence: int) -> bool:
        """Whether pages of a sequence are on the host."""
        return self._known("is_swapped", sequence).swapped is not None

    @property
    def free_blocks(self) -> int:
        """`usage.free`, without counting anything else."""
        return self._blocks.free

    def blocks(self, sequence: int) -> tuple[int, ...]:
        """The block of each page of a sequence, in order; -1 for one that is swapped out."""
        return tuple(self._known("blocks", sequence).blocks)

    def free(self, sequence: int) -> None:
        """Give up a sequence: its blocks are free where no other holds them."""
        with self._lock:
            found = self._idle("free", sequence)
            del self._sequences[sequence]
            self.moved += 1
            self._blocks.drop([b for b in found.blocks if b != _ON_HOST])
            self._table.give(found.row)

    def fork(self, sequence: int) -> int:
        """The id of a copy. It holds the same blocks until one of the two writes into the last of them, which is then
        copied."""
        with self._lock:
            found = self._idle("fork", sequence, resident=True)
            made = _Sequence(self._table.take(), list(found.blocks), found.length, list(found.tokens))
            made.numbers, made.start = list(found.numbers), found.start
            self._blocks.hold(made.blocks)
            self._table.write(made.row, 0, made.blocks)
            return self._add(made)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence, as after drafts that were not accepted."""
        with self._lock:
            found = self._idle("truncate", sequence, resident=True)
            if not is_int(length, 0, found.length):
                raise WeftError(f"truncate: length: expected 0 to {found.length}, got {shown(length)}")
            if length < found.length:
                self._has_moved(found)
            self._cut(found, length)

    def _has_moved(self, found: _Sequence) -> None:
        found.moved += 1
        self.moved += 1

    def _cut(self, found: _Sequence, length: int) -> None:
        pages = self._pages(length)
        self._blocks.drop(found.blocks[pages:])
        del found.blocks[pages:]
        found.length = length
        del found.tokens[length:], found.numbers[length // self.page :]

    # -- steps -------------------------------------------------------------------------------------------------------
    def extend(
        self, sequences: Sequence[int], lengths: Sequence[int], tokens: Sequence[Sequence[int] | None] | None = None,
        *, packed: bool = False,
    ) -> Step:  # fmt: skip
        """Make room for `lengths[b]` more rows in sequence `sequences[b]`: one step of a model, all layers together.

        tokens: ids of the new tokens of each sequence, for reuse; None where they are not known. packed: new rows are
        handed over one after the other, [1, heads, total, D], as chunks of prompts beside single tokens.

        Until the step is committed or cancelled no other may change these sequences. Raises OutOfBlocksError, and
        WeftError for anything that does not fit; then nothing was changed.
        """
        check_flag("extend", "packed", packed)
        if packed and not self._holds_pages:
            raise WeftError(f"extend: packed: {type(self).__name__} takes padded rows; a PagedCache takes packed ones")
        with self._lock:
            found = self._all("extend", sequences)
            new = self._checked_lengths(found, sequences, lengths)
            ids = checked_tokens(new, tokens)
            rows = self._rows_of(found)
            copied, fresh = self._needs(found, new)
            self._blocks.check_free(len(copied) + sum(fresh), f"{type(self).__name__}.extend")
            try:
                self._copy_last(copied)
                for sequence, number in zip(found, fresh):
                    if number:
                        sequence.blocks += self._blocks.take(number)
                        first = len(sequence.blocks) - number
                        self._table.write(sequence.row, first, sequence.blocks[first:])
                step = self._step(tuple(sequences), found, new, rows, "open", packed)
            except BaseException:  # of torch, where the device has no memory left
                for sequence in found:
                    self._cut(sequence, sequence.length)
                raise
            for sequence, number, given in zip(found, new, ids):
                sequence.step, sequence.new, sequence.new_tokens = step, number, given
                if number:  # it may have been full before it was cut, and be known by what it held
                    self._blocks.forget(sequence.blocks[sequence.length // self.page])
            return step

    def view(self, sequences: Sequence[int]) -> Step:
        """These sequences as they are, to be read: `block_table` and `kv_lens`, and no new rows."""
        with self._lock:
            found = self._all("view", sequences)
            return self._step(tuple(sequences), found, [0] * len(found), self._rows_of(found), "read only")

    def append(
        self, sequences: Sequence[int], key: Tensor | Sequence[Tensor], value: Tensor | Sequence[Tensor] | None = None,
        *, lengths: Sequence[int] | None = None, tokens: Sequence[Sequence[int] | None] | None = None,
    ) -> Step:  # fmt: skip
        """extend, write the rows of every layer, and commit.

        key [B, Hkv, L, D] and value [B, Hkv, L, Dv]: a tensor a layer, or the tensor where there is one layer. lengths:
        rows of each sequence; L of each where not given.
        """
        found = self._all("append", sequences)
        keys, values = ([t] if isinstance(t, Tensor) else t for t in (key, value))
        if not isinstance(keys, Sequence) or not (values is None or isinstance(values, Sequence)):
            got = f"{type(key).__name__} and {type(value).__name__}"
            raise WeftError(f"append: key: expected a tensor of each layer, and likewise value, got {got}")
        if any(hasattr(rows, "descale") for rows in (keys, values)):
            how = "pass real numbers, which a cache of FP8 quantises"
            raise WeftError(f"append: key: expected a tensor of each layer, got what weft.fp8.quantize gives; {how}")
        if len(keys) != self.layers or (values is not None and len(values) != self.layers):
            got = f"{len(keys)} and {0 if values is None else len(values)}"
            raise WeftError(f"append: expected key and value of each of {counted(self.layers, 'layer')}, got {got}")
        if not isinstance(keys[0], Tensor):
            raise WeftError(f"append: key: expected a tensor of each layer, got {type(keys[0]).__name__}")
        if (problem := form_problem("key", keys[0])) is not None:
            raise WeftError(f"append: {problem}")
        if lengths is None:
            new = [keys[0].shape[2] if keys[0].dim() == 4 else 0] * len(found)
        else:
            new = self._checked_lengths(found, sequences, lengths)
        pairs = list(zip(keys, [None] * self.layers if values is None else values))
        for layer, pair in enumerate(pairs):
            self._check_rows(len(found), max(new), layer, *pair)
        with self.extend(sequences, new, tokens) as step:
            for layer, pair in enumerate(pairs):
                step.append(layer, *pair)
        return step

    def _needs(self, found: Sequence[_Sequence], new: Sequence[int]) -> tuple[list[_Sequence], list[int]]:
        """Sequences whose last block is to be copied before it is written, and how many fresh blocks each wants."""
        copied: list[_Sequence] = []
        writers: dict[int, int] = {}  # by block
        for sequence, rows in zip(found, new):
            if not rows or sequence.length % self.page == 0:
                continue
            last = sequence.blocks[-1]
            held = self._blocks.holders[last] - writers.setdefault(last, 0)
            if held > 1:
                copied.append(sequence)
                writers[last] += 1
        return copied, [self._pages(s.length + rows) - len(s.blocks) for s, rows in zip(found, new)]

    def _copy_last(self, sequences: Sequence[_Sequence]) -> None:
        """A last block of its own for each, with what the shared one holds."""
        if not sequences:
            return
        shared, fresh = [s.blocks[-1] for s in sequences], self._blocks.take(len(sequences))
        try:
            source, target = (t.long() for t in on_device([_ints(shared), _ints(fresh)], self.device))
            for pool in self._pools:
                pool[target] = pool[source]
        except BaseException:
            self._blocks.drop(fresh)
            raise
        self._blocks.drop(shared)
        for sequence, block in zip(sequences, fresh):
            sequence.blocks[-1] = block
            self._table.write(sequence.row, len(sequence.blocks) - 1, [block])

    def _step(
        self, ids: tuple[int, ...], found: Sequence[_Sequence], new: Sequence[int], rows: slice | None, state: Any,
        packed: bool = False,
    ) -> Step:  # fmt: skip
        starts = [s.length for s in found]
        ends = [start + n for start, n in zip(starts, new)]
        pages = max(self._pages(max(ends)), 1)
        first, q_lens, kv_lens, at = _ints([*starts, *new, *ends, *(s.row for s in found)]).view(4, -1)
        table = self._table.of(at, pages)
        positions = first[:, None] + torch.arange(max(new), dtype=torch.int32, device="cpu")
        block = table.gather(1, (positions // self.page).clamp_(max=pages - 1).long())
        ranks, rows_of = self.share.ranks, self.rows
        slots = block * rows_of + positions // ranks % rows_of
        if ranks > 1:
            slots = torch.where(positions % ranks == self.share.rank, slots, ELSEWHERE)
        slots = torch.where(positions < kv_lens[:, None], slots, NOWHERE)
        cu_q: list[Tensor] = []
        if packed:
            exists = positions < kv_lens[:, None]
            positions, slots, cu_q = positions[exists][None], slots[exists][None], [_ints([0, *accumulate(new)])]
        own = [] if ranks == 1 else [self.share.rows(kv_lens)]
        parts = on_device([q_lens, kv_lens, positions, slots, table, *own, *cu_q], self.device)
        q_lens, kv_lens, positions, slots, table, *more = parts
        tensors = (q_lens, kv_lens, positions, slots, table if self._holds_pages else None)
        cu_seqlens_q, own_lens = more.pop() if packed else None, more.pop() if own else None
        made = self._makes_step(self, ids, tuple(starts), tuple(ends), tensors, rows, state, cu_seqlens_q, own_lens)
        made.moved = self.moved, tuple(s.moved for s in found)
        return made

    def changed(self, step: Step) -> str | None:
        """What has happened to a sequence of a step, which no longer describes it; None where nothing has."""
        with self._lock:
            for number, moved in zip(step.sequences, step.moved[1]):
                found = self._sequences.get(number)
                if found is None:
                    return f"sequence {number} was freed"
                if found.moved != moved:
                    return f"sequence {number} was truncated or swapped out"
            step.moved = self.moved, step.moved[1]
            return None

    def _close(self, step: Step, keeps: bool) -> None:
        with self._lock:
            if step.state != "open":
                word = "commit" if keeps else "cancel"
                raise WeftError(f"{word}: this step is {step.state} already")
            step.state = "committed" if keeps else "cancelled"
            for number, start, end in zip(step.sequences, step.starts, step.ends):
                found = self._sequences[number]
                given = found.new_tokens
                found.step, found.new, found.new_tokens = None, 0, None
                if not keeps:
                    self._cut(found, start)
                    continue
                if given is not None and len(found.tokens) == start:
                    found.tokens += given
                found.length = end
                if len(found.tokens) // self.page > len(found.numbers):
                    self._publish(found)
            if self.scales is not None and not keeps and not self._holds_rows():
                self.scales.forget()

    def _holds_rows(self) -> bool:
        """Whether a sequence has rows, or an open step wrote some, or a new sequence would find some again."""
        open_steps = (s.step for s in self._sequences.values() if s.step is not None)
        has_some = any(s.length for s in self._sequences.values()) or any(step.has_written for step in open_steps)
        return self._blocks.kept > 0 or has_some

    def _publish(self, found: _Sequence) -> None:
        """Let full pages whose tokens are known be found again."""
        if not self._holds_pages:
            return
        for page in range(len(found.numbers), len(found.tokens) // self.page):
            tokens = found.tokens[page * self.page : (page + 1) * self.page]
            before = found.numbers[-1] if found.numbers else found.start
            found.numbers.append(self._blocks.publish(found.blocks[page], before, tokens))

    # -- swapping ----------------------------------------------------------------------------------------------------
    def swap_out(self, sequence: int) -> None:
        """Move the pages that this sequence alone holds to the host, in the order of the current stream.

        Pages that others hold too would free nothing, and stay. What was swapped can be freed, and swapped in.
        """
        with self._lock:
            found = self._idle("swap_out", sequence, resident=True)
            pages = [n for n, block in enumerate(found.blocks) if self._blocks.holders[block] == 1]
            blocks = [found.blocks[n] for n in pages]
            (index,) = on_device([_ints(blocks)], self.device)
            self._has_moved(found)
            found.swapped = _Swapped(pages, [_to_host(pool.index_select(0, index)) for pool in self._pools])
            self._blocks.drop(blocks)
            for n in pages:
                found.blocks[n] = _ON_HOST

    def swap_in(self, sequence: int) -> None:
        """Move a sequence back. Raises OutOfBlocksError, with nothing changed, where there is no room."""
        with self._lock:
            found = self._idle("swap_in", sequence)
            if found.swapped is None:
                raise WeftError(f"swap_in: sequence {sequence} is not swapped out")
            pages, rows = found.swapped
            self._blocks.check_free(len(pages), f"{type(self).__name__}.swap_in")
            blocks = self._blocks.take(len(pages))
            try:
                (index,) = on_device([_ints(blocks)], self.device)
                for pool, held in zip(self._pools, rows):
                    pool.index_copy_(0, index.long(), held.to(self.device, non_blocking=True))
            except BaseException:  # of torch, where the device has no memory left
                self._blocks.drop(blocks)
                raise
            for n, block in zip(pages, blocks):
                found.blocks[n] = block
                self._table.write(found.row, n, [block])
            found.swapped = None

    # -- accounts ----------------------------------------------------------------------------------------------------
    @property
    def usage(self) -> Usage:
        """How full the cache is, as of now."""
        with self._lock:
            blocks = self._blocks
            number, sequences = len(blocks.holders), self._sequences.values()
            used = number - blocks.free
            block_bytes = sum(pool[0].numel() * pool.element_size() for pool in self._pools)
            swapped = sum(len(s.swapped.pages) for s in sequences if s.swapped is not None)
            tokens = used * self.page - self._unfilled()
            return Usage(
                self.page, number, used, blocks.shared, blocks.free, blocks.kept, tokens,
                1 - tokens / (used * self.page) if used else 0.0, number * block_bytes, used * block_bytes, swapped,
                swapped * block_bytes,
            )  # fmt: skip

    def _unfilled(self) -> int:
        """Rows of used blocks that hold no token: of last pages, where no other sequence holds the whole of them."""
        filled: dict[int, list[int]] = {}
        for s in self._sequences.values():
            end = s.length + s.new
            if s.blocks and s.blocks[-1] != _ON_HOST and len(s.blocks) * self.page > end:
                filled.setdefault(s.blocks[-1], []).append(end - (len(s.blocks) - 1) * self.page)
        partial = {b: ends for b, ends in filled.items() if len(ends) == self._blocks.holders[b]}
        return sum(self.page - max(ends) for ends in partial.values())

    # -- checks ------------------------------------------------------------------------------------------------------
    def _pages(self, length: int) -> int:
        return -(-length // self.page)

    def _known(self, method: str, sequence: int) -> _Sequence:
        found = self._sequences.get(sequence) if is_int(sequence) else None
        if found is None:
            was = is_int(sequence, 0, self._next - 1)
            got = f"sequence {sequence}, which was freed" if was else f"{shown(sequence)}, which allocate() never gave"
            raise WeftError(f"{method}: expected the id of a sequence of this cache, got {got}")
        return found

    def _idle(self, method: str, sequence: int, resident: bool = False) -> _Sequence:
        """A sequence that no open step writes; one that is not swapped out, if resident."""
        found = self._known(method, sequence)
        if found.step is not None:
            raise WeftError(
                f"{method}: two writers: sequence {sequence} belongs to a step that is open; commit() or cancel() it "
                "first"
            )
        if resident and found.swapped is not None:
            raise WeftError(f"{method}: sequence {sequence} is swapped out; swap_in({sequence}) first")
        return found

    def _all(self, method: str, sequences: Sequence[int]) -> list[_Sequence]:
        if not isinstance(sequences, Collection) or isinstance(sequences, Tensor):
            raise WeftError(f"{method}: expected a list of the ids of sequences, got {shown(sequences)}")
        found = [self._idle(method, s, resident=True) for s in sequences]
        if len(set(sequences)) != len(found):
            raise WeftError(f"{method}: two writers: expected each sequence once, got {list(sequences)}")
        if not found:
            raise WeftError(f"{method}: expected the ids of some sequences, got none")
        return found

    def _checked_lengths(
        self, found: Sequence[_Sequence], sequences: Sequence[int], lengths: Sequence[int]
    ) -> list[int]:
        is_tensor = isinstance(lengths, Tensor)
        new: list[Any] = [lengths] if is_tensor else listed("extend: lengths", "a list, rows of each sequence", lengths)
        if len(new) != len(found) or not all(is_int(n, least=0) for n in new):
            raise WeftError(
                f"extend: lengths: expected {len(found)} ints from 0 on, rows of each sequence, got {shown(new)}; "
                "those on a device are not read"
            )
        for sequence, number, more in zip(found, sequences, new):
            self._check_length(number, sequence.length + more)
        return new

    def _check_length(self, number: int, length: int) -> None:
        if length > MOST:
            raise WeftError(f"extend: sequence {number}: expected at most 2**30 tokens, got {length}")

    def _rows_of(self, found: Sequence[_Sequence]) -> slice | None:
        """Of a DenseCache: where the sequences lie."""
        return None

    def _checked_layer(self, method: str, layer: int) -> int:
        if not is_int(layer, 0, self.layers - 1):
            raise WeftError(f"{method}: layer: expected 0 to {self.layers - 1}, got {shown(layer)}")
        return layer

    def _check_rows(self, batches: int, length: int, layer: int, key: Tensor, value: Tensor | None) -> None:
        self._checked_layer("append", layer)
        problems = self._problems("key", key, (batches, self.kv_heads, length, self.head_dim))
        if self.has_values:
            problems += self._problems("value", value, (batches, self.kv_heads, length, self.value_dim))
        elif value is not None:
            problems.append("value: expected None, as a latent cache has no values, got a tensor")
        if problems:
            raise collected("append", problems)

    def _problems(self, name: str, rows: Tensor | None, shape: tuple[int, ...]) -> list[str]:
        if not isinstance(rows, Tensor):
            return [f"{name}: expected a tensor {list(shape)}, got {type(rows).__name__}"]
        if (problem := form_problem(name, rows)) is not None:
            return [str(problem)]
        if is_sharded(rows):
            return [f"{name}: expected a plain tensor, got a DTensor; give each process a cache of its own heads, as "
                    "with module.shard(rank, ranks)"]  # fmt: skip
        if rows.shape != shape:
            return [f"{name}: expected {list(shape)}, got {list(rows.shape)}"]
        problems = []
        if self.scales is not None:
            if rows.dtype not in _FLOATS:
                problems.append(f"{name}: expected real numbers, which the cache quantises, got {rows.dtype}")
        elif rows.dtype != self.dtype:
            problems.append(
                f"{name}: expected {self.dtype} as the cache has, got {rows.dtype}; cast it with .to(...), or "
                f"make the cache with dtype={rows.dtype}"
            )
        if rows.device != self.device:
            problems.append(f"{name}: expected device {self.device} as the cache has, got {rows.device}")
        if rows.shape[-1] > 1 and rows.stride(-1) != 1:
            problems.append(f"{name}: expected a contiguous last dimension; pass .contiguous()")
        if rows.requires_grad and torch.is_grad_enabled():
            problems.append(f"{name}: a cache keeps no gradients; call the model under torch.no_grad()")
        return problems or [str(problem) for problem in known_memory_problems({name: rows})]


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _to_host(rows: Tensor) -> Tensor:
    if not rows.is_cuda:
        return rows
    held = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
    return held.copy_(rows, non_blocking=True)
