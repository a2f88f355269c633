"""What was measured of the tiles of a call, kept for the calls that follow with the same tensors.

Only where the user asks for it (`weft.settings(keep_tiles=True)`, WEFT_KEEP_TILES=1), which promises that what masks
read is changed by torch's own operations alone. These count: a tensor has a version, shared with its views, and what
was measured is dropped where it has moved on. Nothing counts what is written through `.data`, by kernels of others, by
numpy, or by a graph that is replayed. Without the promise it cannot be known that a tensor holds what it held.

Nothing is kept of tensors without a version (those of inference mode), while a CUDA graph is captured (its replays find
other values), nor in streams that are not torch's, whose handles are used again. A tensor that is gone takes with it
what was measured of it, so that no other one in its place is taken for it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ...compiler.analysis.tiles.facts import Facts
from ...ir.attention import Attention
from ...ir.walk import scalars, tensors
from ..call import Call

MOST = 16  # masks with their tensors, of which what was measured is kept


class _Kept(NamedTuple):
    references: tuple[weakref.ref[Tensor], ...]
    found: dict[str, Tensor]  # by kernel and form


_all: OrderedDict[object, _Kept] = OrderedDict()
_lock = Lock()


def any_kept() -> bool:
    return bool(_all)


def forget() -> None:
    """Drop all that is kept."""
    with _lock:
        _all.clear()


def measured_of(facts: Facts, call: Call, make: bool) -> dict[str, Tensor] | None:
    """What is kept of a call's tiles, by kernel and form, to be looked up and added to; None where nothing may be.

    make: begin where nothing is there.
    """
    read = _read(facts.attention, call)
    if any(t.is_inference() for t in read):
        return None
    stream = _stream_of(call.query)
    if stream is None:
        return None
    key = (_mask_key(facts, call), stream, *map(_identity, read))
    with _lock:
        kept = _all.get(key)
        if kept is not None and all(ref() is t for ref, t in zip(kept.references, read)):
            _all.move_to_end(key)
            return kept.found
        if not make:
            return None
        references = tuple(weakref.ref(t, lambda _: _all.pop(key, None)) for t in read)
        kept = _all[key] = _Kept(references, {})
        while len(_all) > MOST:
            _all.popitem(last=False)
        return kept.found


def _read(attention: Attention, call: Call) -> list[Tensor]:
    """The tensors that decide which tiles are visited."""
    own = [call.operands[name] for name in _tensors(attention)]
    sequences = call.sequences
    given: Iterable[object] = (*own, *getattr(sequences, "tensors", {}).values(), sequences.q_offset)
    return [t for t in given if isinstance(t, Tensor)]


@lru_cache(maxsize=256)
def _tensors(attention: Attention) -> tuple[str, ...]:
    """Names of the tensors that the mask reads."""
    return tuple(sorted(t.name for t in tensors(attention.canonical.folded_mask)))


@lru_cache(maxsize=256)
def _scalars(attention: Attention) -> tuple[str, ...]:
    """Names of the scalars that it reads."""
    return tuple(sorted(s.name for s in scalars(attention.canonical.folded_mask)))


def _mask_key(facts: Facts, call: Call) -> tuple[object, ...]:
    """What besides tensors decides it: the mask, sizes, and numbers."""
    query, key, sequences = call.query, call.key, call.sequences
    offset = None if isinstance(sequences.q_offset, Tensor) else sequences.q_offset
    lengths: Mapping[str, object] = getattr(sequences, "tensors", {})
    given = tuple(name for name, value in lengths.items() if value is not None)
    numbers = tuple(call.operands[name] for name in _scalars(facts.attention))
    sizes = (*query.shape[:3], *key.shape[1:3], call.head_dim)
    return facts.attention.canonical.folded_mask.text, sequences.kind, given, offset, numbers, sizes


def _identity(tensor: Tensor) -> tuple[object, ...]:
    place = tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return id(tensor), tensor._version, *place


def _stream_of(tensor: Tensor) -> tuple[int, int] | None:
    """Device and stream of a call, in whose order what is kept is written and read; None where there is none."""
    if not tensor.is_cuda:
        return -1, 0
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(tensor.device)
    own = stream.cuda_stream == 0 or stream.stream_id != stream.cuda_stream  # any other's id is its handle
    return (tensor.get_device(), stream.cuda_stream) if own else None
