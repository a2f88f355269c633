"""Calls on DTensors: each process computes the batch rows, the heads and the queries that it holds.

Tensor parallel layers shard heads, data parallel ones the batch, and nothing is sent then. Which operand goes along
with which is read off the variant. `slopes[head]` is sharded like the heads of the query, `bias[batch, kv_pos]` like
its batch rows. What all read alike is replicated, and its gradient is summed over processes. A sharded sequence is
computed as `weft.distributed` does, in the rows that DTensors have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codegen.torch_private import break_graph, constant_while_tracing, rows_lie_as_torch_deals_them
from ..ir.attention import SEED, Attention
from ..ir.errors import WeftError, collected
from ..ir.expr import Expr, Load, Symbol, TensorOperand
from ..ir.walk import children
from ..runtime.check.operands import as_number, offset_problems, operand_problems
from ..runtime.check.tensors import dtype_problems, form_problem, rank_problems
from ..runtime.options import READ_BY_KERNELS, CallOptions
from .in_region import unknown_over_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BATCH, HEADS, ROWS = "batch", "head", "rows"  # what a dimension of the mesh divides
UNTRACED = (
    "a call with a sharded sequence sends and receives, which torch.compile does not trace; compile the layers around "
    "it, or leave out fullgraph=True"
)
_DIMENSIONS = {0: BATCH, 1: HEADS, 2: ROWS}  # of operands [B, H, length, dim]


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor."""
    if type(tensor) is Tensor or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # lazy: takes a second to import

    return isinstance(tensor, DTensor)


def replicated(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that each process has whole, as what goes with this DTensor; its gradient is that of all."""
    if is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate  # lazy: as above

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def of_shards(
    attention: Attention, compute: Callable[..., Any], main: Mapping[str, Tensor | None], operands: Mapping[str, Any],
    options: CallOptions,
) -> Any:  # fmt: skip
    """out, or (out, lse), of a call on DTensors, sharded as the query is.

    main: query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv] and the rotary share of keys [B, 1, T, R].
    compute: the call on local tensors, of (main, operands, options). Raises WeftError where a shard by itself
    would compute something else.
    """
    query = main["query"]
    assert query is not None
    if torch.compiler.is_compiling() and _has_sharded_rows(query):
        break_graph(UNTRACED)
        return torch.compiler.disable(of_shards, reason=UNTRACED)(attention, compute, main, operands, options)
    if not torch.compiler.is_compiling():
        _check_forms(attention, main, operands, options)
    call = _Shards(attention, query, main["key"])  # type: ignore[arg-type]
    local = {n: None if t is None else call.local(t, call.of_main(n, t), n) for n, t in main.items()}
    tensors = {p.name for p in attention.canonical.parameters if isinstance(p, TensorOperand)}
    own = {
        n: call.local(t, call.of_operand(n), n) if n in tensors and isinstance(t, Tensor) else t
        for n, t in operands.items()
    }
    found = call.over_rows(local, own, options) if call.rows is not None else compute(local, own, call.options(options))
    return tuple(map(call.whole, found)) if isinstance(found, tuple) else call.whole(found)


def _check_forms(
    attention: Attention, main: Mapping[str, Tensor | None], operands: Mapping[str, Any], options: CallOptions
) -> None:  # fmt: skip
    """Raise WeftError for what is no tensor that could be divided. What else is wrong, calls on shards say."""
    problems = rank_problems({n: t for n, t in main.items() if t is not None})
    problems += [] if problems else dtype_problems(main["query"])  # type: ignore[arg-type]
    named = {n: t for n, t in operands.items() if isinstance(t, Tensor)} | options.lengths
    named |= {n: t for n in ("uk", "uv") if (t := getattr(options, n)) is not None}
    problems += [problem for n, t in named.items() if (problem := form_problem(n, t)) is not None]
    if not isinstance(options.q_offset, (Tensor, type(None))):
        problems += offset_problems(as_number(options.q_offset, int), None, None)
    if problems := problems or operand_problems(attention, _plain(attention, operands), None, all_of=()):
        raise collected(str(attention.name), problems)


def _plain(attention: Attention, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers among operands, as Python's, and what is neither a number nor a tensor."""
    kinds = {s.name: int if s.dtype == "int" else float for s in attention.canonical.scalars}
    plain = {n: v for n, v in operands.items() if not isinstance(v, Tensor) and n != SEED.name}
    return {n: as_number(v, kinds.get(n)) for n, v in plain.items()}


def of_sharded_rows(
    attention: Attention, main: Mapping[str, Tensor | None], operands: Mapping[str, Any], options: CallOptions
) -> Any:
    """The same of a call whose query has a sharded sequence; None of any other."""
    if not _has_sharded_rows(main["query"]):
        return None
    return of_shards(attention, _never, main, operands, options)


def _has_sharded_rows(query: Any) -> bool:
    return any([p.is_shard(2) for p in query.placements])


def _never(*call: Any) -> Any:
    raise AssertionError("rows that are sharded are computed over ranks")


class _Shards:
    """How one call is divided: `divided` says what each dimension of the mesh divides: BATCH, HEADS, ROWS, nothing."""

    def __init__(self, attention: Attention, query: DTensor, key: Tensor) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard  # lazy: as above

        self.partial, self.replicate, self.shard = Partial, Replicate, Shard
        self.attention, self.mesh = attention, query.device_mesh
        self.placements = [Replicate() if p.is_partial() else p for p in query.placements]
        self.query, self.key = query, key
        self.heads, self.kv_heads = query.shape[1], key.shape[1]
        self.divided = [self._divides(p) for p in self.placements]
        if self.divided.count(ROWS) > 1:
            raise self._refuse("query: its sequence is sharded along two dimensions of the mesh; flatten them into one")
        for what, size in ((BATCH, query.shape[0]), (HEADS, self.heads)):
            self._check(what, size)
        self._check_symbols()

    def _refuse(self, text: str) -> WeftError:
        return WeftError(f"{self.attention.name}: {text}")

    def _divides(self, placement: Any) -> str | None:
        if placement.is_replicate():
            return None
        if type(placement) is not self.shard or placement.dim not in _DIMENSIONS:
            raise self._refuse(
                "query: expected a DTensor that is replicated, or sharded by batch (Shard(0)), heads (Shard(1)) or "
                f"sequence (Shard(2)), got {placement}; redistribute it"
            )
        return _DIMENSIONS[placement.dim]

    def _parts(self, what: str) -> int:
        """Into how many shards."""
        return math.prod([self.mesh.size(n) for n, d in enumerate(self.divided) if d == what])

    def _check(self, what: str, size: int) -> None:
        parts = self._parts(what)
        if size % parts:
            raise self._refuse(f"query: expected a number of {'heads' if what == HEADS else 'batch rows'} that {parts} "
                               f"shards divide, got {size}")  # fmt: skip
        if what == HEADS and self.kv_heads % parts and self.kv_heads != 1:
            raise self._refuse(f"key: expected one head, or a number that {parts} shards divide, got {self.kv_heads}")

    @property
    def rows(self) -> int | None:
        """The dimension of the mesh that divides the sequence."""
        return self.divided.index(ROWS) if ROWS in self.divided else None

    @property
    def shares_keys(self) -> bool:
        """Whether all shards of heads have the one head of the keys."""
        return self.kv_heads == 1 and self._parts(HEADS) > 1

    def _check_symbols(self) -> None:
        """A shard counts batch rows and heads from 0: what a variant computes of their numbers would differ."""
        used = set(_symbols(self.attention))
        bad = (used & {"batch"} if self._parts(BATCH) > 1 else set()) | (
            used & ({"head", "group"} if self.shares_keys else {"head", "kv_head"}) if self._parts(HEADS) > 1 else set()
        )
        if bad:
            raise self._refuse(
                f"{', '.join(sorted(bad))}: a shard counts from 0, so that what is computed of it would differ; read a "
                "tensor at it instead, as in table[head], or call on local tensors"
            )
        if self.attention.canonical.drops and {BATCH, HEADS} & {*self.divided}:
            raise self._refuse(
                "dropout: which weights are dropped follows from batch row and head, which a shard counts from 0; "
                "call on local tensors (to_local()) with a seed of each process"
            )

    # -- placements ----------------------------------------------------------------------------------------------------
    def of_main(self, name: str, tensor: Tensor) -> list[int | None]:
        """The dimension of a tensor that each dimension of the mesh divides."""
        lone = name != "query" and tensor.shape[1] == 1
        return [None if d is None or (d == HEADS and lone and self._parts(HEADS) > 1) else [BATCH, HEADS, ROWS].index(d)
                for d in self.divided]  # fmt: skip

    def of_rows(self) -> list[int | None]:
        """The same of one number for each batch row."""
        return [0 if d == BATCH else None for d in self.divided]

    def of_heads(self) -> list[int | None]:
        """The same of what has one entry for each head."""
        return [0 if d == HEADS else None for d in self.divided]

    def of_operand(self, name: str) -> list[int | None]:
        """The same of an operand of the variant's own, by the symbols that it is read at."""
        return [None if d is None or d == ROWS else self._read_at(name, d) for d in self.divided]

    def _read_at(self, name: str, what: str) -> int | None:
        counts = (what,) if what == BATCH or self.shares_keys else (HEADS, "kv_head")
        places = _places(self.attention, name, counts)
        if places in (((),), ()):
            return None
        if len(places) > 1 or len(places[0]) != 1:
            raise self._refuse(f"{name}: expected one dimension that is read at {what} wherever it is read")
        return places[0][0]

    # -- tensors -------------------------------------------------------------------------------------------------------
    def local(self, tensor: Tensor, dims: list[int | None], name: str) -> Tensor:
        """This process's part; the gradient of what is replicated is summed over the shards that read it."""
        from torch.distributed.tensor import DTensor  # lazy: as above

        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, [self.replicate()] * self.mesh.ndim, run_check=False)
        if tensor.device_mesh != self.mesh:
            raise self._refuse(f"{name}: expected the device mesh of query, {self.mesh}, got {tensor.device_mesh}")
        placements = [self.replicate() if dim is None else self.shard(dim) for dim in dims]
        summed = [
            self.partial() if dim is None and what not in (None, ROWS) else placement  # over rows it is summed already
            for dim, what, placement in zip(dims, self.divided, placements)
        ]
        return tensor.redistribute(self.mesh, placements).to_local(grad_placements=summed)

    def options(self, options: CallOptions) -> CallOptions:
        """Those of this process's part."""
        if options.block_table is not None:
            raise self._refuse("block_table: pages of DTensors are not read; call on local tensors (to_local())")
        if unknown := [n for n in READ_BY_KERNELS if getattr(options, n) is not None]:
            raise self._refuse(f"{', '.join(unknown)}: not known of DTensors; call on local tensors (to_local())")
        rows: list[int | None] = self.of_rows()
        none: list[int | None] = [None] * self.mesh.ndim
        given: dict[str, Tensor] = dict(options.lengths)
        if isinstance(options.q_offset, Tensor):
            given["q_offset"] = options.q_offset
        of_all = ("cu_seqlens_q", "cu_seqlens_kv")
        return options.having(**{n: self.local(t, none if n in of_all else rows, n) for n, t in given.items()})

    def whole(self, part: Tensor) -> Tensor:
        """The DTensor of which this process has computed its part."""
        from torch.distributed.tensor import DTensor  # lazy: as above

        if self.rows is None:
            return DTensor.from_local(part, self.mesh, self.placements, run_check=False)
        shape = torch.Size([*self.query.shape[:3], *part.shape[3:]])  # shards of rows may differ in size
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part.contiguous(), self.mesh, self.placements, run_check=False, shape=shape, stride=strides
        )

    # -- a sharded sequence --------------------------------------------------------------------------------------------
    def over_rows(self, main: Mapping[str, Tensor | None], operands: Mapping[str, Any], options: CallOptions) -> Any:
        """The call on the rows of this process. main, operands: its parts."""
        from ..distributed.over_mesh import over_mesh  # lazy: it imports torch.distributed

        if unknown := unknown_over_rows(options):
            raise self._refuse(f"{', '.join(unknown)}: not known where the sequence is sharded; use weft.distributed")
        if rows_lie_as_torch_deals_them():
            raise self._refuse(
                "query: torch's context parallel is on, and deals rows of a sequence otherwise than DTensors do; turn "
                "its load balancing off, or call on local tensors inside its region"
            )
        if isinstance(options.q_offset, Tensor):
            raise self._refuse("q_offset: expected an int where the sequence is sharded, got a tensor")
        query, key, value = main["query"], main["key"], main["value"]
        assert self.rows is not None and query is not None and key is not None
        projected = {"uk": options.uk, "uv": options.uv}
        given = {n: self.local(t, self.of_heads(), n) for n, t in projected.items() if t is not None}
        options = options.having(**given)
        lengths = self.query.shape[2], self.key.shape[2]
        variant: Any = self.attention
        return over_mesh(self.mesh, self.rows, variant, (query, key, value), lengths, operands, options)


@lru_cache(maxsize=256)
def _reads(attention: Attention) -> tuple[Expr, ...]:
    """Loads, and symbols that are used other than as an index by themselves."""
    return tuple({n.text: n for part in attention.canonical.expressions for n in _uses(part)}.values())


@constant_while_tracing
def _symbols(attention: Attention) -> tuple[str, ...]:
    """Names of the symbols among these."""
    return tuple(sorted({n.name for n in _reads(attention) if isinstance(n, Symbol)}))


@constant_while_tracing
def _places(attention: Attention, name: str, counts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The dimensions of an operand that are read at one of these symbols, wherever it is read."""
    loads = [n for n in _reads(attention) if isinstance(n, Load) and n.tensor.name == name]
    found = {tuple(n for n, i in enumerate(load.index) if isinstance(i, Symbol) and i.name in counts) for load in loads}
    return tuple(sorted(found))


def _uses(node: Expr) -> Iterator[Expr]:
    if isinstance(node, Symbol):
        yield node
    elif isinstance(node, Load):
        yield node
        for index in node.index:
            if not isinstance(index, Symbol) or index.name == "group":
                yield from _uses(index)
    else:
        for child in children(node):
            yield from _uses(child)
