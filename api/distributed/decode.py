"""Caches that several ranks hold together, by key heads, by positions of the sequence, or both; and their steps."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import Attention
from ..calls.dtensors import is_sharded
from ..calls.internals import autocast
from ..ir.attention import Latent
from ..ir.errors import Problem, UnavailableError, WeftError, collected, shown
from ..kv import DenseCache, PagedCache
from ..kv.cache import Cache
from ..kv.given import is_size
from ..kv.scales import Given, Scale
from ..kv.share import Share
from ..kv.step import Step
from ..runtime import options as call_options
from ..runtime.check.operands import check_operands
from .agreement import Agreement, kept
from .asked import as_numbers
from .changes import Changes, some_of
from .interleaved import Division, interleaved
from .joins import Group, gathered_heads, joined
from .placed import Names, names_beside

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Agree = bool | Literal["steps"]
# options of a call that a step takes: others are its own, or are of rows that a rank does not have
_TAKEN = frozenset({
    "return_lse", "target", "schedule", "deterministic", "uk", "uv", "form", "train", "q_descale", "out_dtype",
    "operands",
})  # fmt: skip


class _Part(Attention):
    """A variant over a part of the keys, which gives the statistics of rows as kernels save them."""

    @staticmethod
    def _shown(lse: Tensor) -> Tensor:
        return lse


class _Placed(NamedTuple):
    """The variant that a rank computes, and the operands that it reads."""

    variant: _Part
    names: Names  # of operands beside the variant's own
    reads: frozenset[str]


@lru_cache(maxsize=256)
def _placed(variant: Attention, division: Division) -> _Placed:
    found = interleaved(variant, division)
    part = _Part(**{f.name: getattr(found, f.name) for f in fields(found)})
    return _Placed(part, names_beside(variant), frozenset(p.name for p in part.canonical.parameters))


class ShardedStep(Step):
    """A step of a cache that ranks hold together: every rank makes the same one, of the same sequences and rows."""

    cache: _Sharded
    _filled: ShardedStep | None = None  # of a fixed step: what it computes now
    _first: Tensor | None = None  # positions of the first queries, once they were asked for

    @cached_property
    def _words(self) -> str:
        """Which rows of which sequences, short."""
        rows = [f"{s}: {start} + {end - start}" for s, start, end in zip(self.sequences, self.starts, self.ends)]
        return f"{some_of(rows)} ({crc32(repr(rows).encode()):08x})"

    @property
    def told(self) -> str:
        """The step in a line, for ranks to compare."""
        rows = self._filled._words if self._filled is not None else self._words
        return f"{self.state}, {len(self._appended)} layers appended, {rows}"

    def fill(self, step: Step) -> None:
        """As of other caches."""
        super().fill(step)
        self._filled = step  # type: ignore[assignment]

    def options_of(self, layer: int = 0) -> dict[str, Any]:
        """Raises WeftError: a call with them would see the positions of this rank's rows, not of the sequence."""
        raise WeftError(
            "options: the rows of this cache are a rank's; call step.attend(layer, variant, query, ...) in place of "
            "variant(query, step.keys(layer), step.values(layer), **step.options)"
        )

    def append(self, layer: int, key: Tensor, value: Tensor | None = None) -> None:
        """Write this rank's part of the new rows of one layer: key [B, Hkv, L, D] and value [B, Hkv, L, Dv].

        All rows, of this rank's key heads or of all heads, of which it takes its own. Else as of other caches.
        """
        super().append(layer, self.cache.own_heads(key), None if value is None else self.cache.own_heads(value))

    def attend(self, layer: int, variant: Attention, query: Tensor, /, **given: Any) -> Any:
        """out [B, Hq, L, Dv] of the new rows over all that their sequences have, on every rank; or (out, lse).

        query [B, Hq, L, D]: the heads of this rank. given: operands of the variant, whole on each rank, and options of
        its call, such as return_lse. Positions, heads and lengths in the variant are those of the whole sequence.
        Raises WeftError on all ranks where one of them calls something else.
        """
        if torch.compiler.is_compiling():
            raise UnavailableError(
                "attend: a cache that ranks hold together is not traced by torch.compile; compile what is around it"
            )
        cache, found = self.cache, None
        problem: Exception | None = None
        try:
            if cache.by_sequence.ranks > 1 and _is_captured(query):
                _check_captured(cache.by_sequence)
            found = self._own(layer, variant, query, given)
        except Exception as error:  # whatever it is, as no memory, other ranks hear of it
            problem = error
        if cache.agree is True:  # a device computes meanwhile
            cache.check({**_told(layer, variant, query, given), "step": self.told, "changes": cache.changes}, problem)
        if found is None:
            assert problem is not None
            raise problem
        (out, lse), wants_lse = found, bool(given.get("return_lse"))
        if cache.by_sequence.ranks > 1:
            with cache.kept("sequence", f"attend of {variant.name}"):
                out, lse = joined(cache.by_sequence, out, lse)
        if not wants_lse:
            return out
        assert lse is not None
        return out, Attention._shown(lse)

    def _own(
        self, layer: int, variant: Attention, query: Tensor, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """out and lse of this rank's keys, lse as kernels save it, or None where the normalizer has none."""
        options, operands = _checked(variant, query, given)
        if problems := self.row_problems(query):
            raise collected(str(variant.name), problems)
        heads, sequence = self.cache.by_heads, self.cache.by_sequence
        division = Division(sequence.ranks, self._group(query), sequence.rank == 0)
        placed = _placed(variant, division)
        has_lse = variant.canonical.weighs.saves_lse
        if sequence.ranks > 1:
            options["q_offset"] = self._positions_of(query)
        options = {**super().options_of(layer), **options, "return_lse": has_lse}
        names = placed.names
        beside = {names.first_key: sequence.rank, names.kv_len: self.kv_lens, names.head: heads.rank * query.shape[1]}
        operands = {n: v for n, v in {**beside, **operands}.items() if n in placed.reads}
        value = self.values(layer) if self.cache.has_values else None
        found = placed.variant(query, self.keys(layer), value, **options, operands=operands)
        return found if has_lse else (found, None)

    def _positions_of(self, query: Tensor) -> Tensor:
        """The position of the first query of each sequence, int32 [B]: once a step where what it describes stays."""
        if self.state == "read only":
            return self.kv_lens - query.shape[2]
        if self.state == "fixed" or _is_captured(query):
            return self.kv_lens - self.q_lens
        if self._first is None:
            self._first = self.kv_lens - self.q_lens
        return self._first

    def _group(self, query: Tensor) -> int:
        """Query heads of a key head, where ranks divide the heads; else 0."""
        ranks, kv_heads = self.cache.by_heads.ranks, self.cache.all_kv_heads
        if ranks == 1:
            return 0
        if query.shape[1] * ranks % kv_heads:
            raise WeftError(
                f"attend: query: expected the heads of one of {ranks} ranks, so that all are a multiple of {kv_heads} "
                f"key heads, got {query.shape[1]}; cache.shard(query) takes them of all"
            )
        return query.shape[1] * ranks // kv_heads


def _checked(variant: Attention, query: Tensor, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and operands of a call, as far as ranks would differ in what is wrong with them."""
    if not isinstance(variant, Attention):
        raise WeftError(f"attend: variant: expected a weft.Attention, got {type(variant).__name__}")
    name = str(variant.name)
    options, operands = call_options.read(name, given)
    problems: list[Problem] = []
    if options.return_lse and not variant.canonical.weighs.saves_lse:
        what = f"the normalizer {variant.normalizer} has no log-sum-exp"
        problems.append(Problem(option="return_lse", what=what))
    for n in given:
        if n in call_options.OPTIONS and n not in _TAKEN and given[n] is not None:
            what = "the step says where rows lie" if n in (*call_options.LENGTHS, "q_offset") else "not over ranks"
            problems.append(Problem(option=n, what=what, next_step="leave it out"))
    if variant.canonical.drops and options.train:
        how = "pass train=False"
        problems.append(Problem(option="dropout", what="a cache drops no weights", next_step=how))
    if not isinstance(query, Tensor) or query.dim() != 4 or is_sharded(query):
        got = str([*query.shape]) if isinstance(query, Tensor) else type(query).__name__
        problems.append(Problem(operand="query", expected="a plain tensor [B, Hq, L, D]", got=got))
    elif torch.is_grad_enabled() and query.requires_grad:
        how = "call the model under torch.no_grad()"
        problems.append(Problem(operand="query", what="a cache keeps no gradients", next_step=how))
    if problems:
        raise collected(name, problems)
    operands = {n: v for n, v in operands.items() if n not in variant.canonical.unread}
    if operands.keys() != {p.name for p in variant.canonical.parameters}:
        check_operands(variant, operands, query.device)
    kept = {n: v for n, v in given.items() if n in _TAKEN and n not in ("operands", "return_lse")}
    return kept, operands


def _is_captured(query: object) -> bool:
    """Whether this call becomes a part of a CUDA graph."""
    return isinstance(query, Tensor) and query.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_captured(group: Group) -> None:
    """Raise UnavailableError where a graph could not hold what ranks send each other."""
    if "nccl" not in (backend := str(dist.get_backend(group.group))):
        raise UnavailableError(
            f"attend: a CUDA graph holds what NCCL sends, and sequence= is a group of {backend}; make the cache with a "
            "group of NCCL, or serve without Graphed"
        )


def _told(layer: int, variant: Attention, query: Tensor, given: Mapping[str, Any]) -> dict[str, str]:
    """What ranks compare before they wait for each other: all that a mistake may differ in, by name, short."""
    is_variant = isinstance(variant, Attention)
    (query,) = autocast(query)
    given = as_numbers(variant, given) if is_variant else given
    shapes = [f"{n} {[*t.shape]} {str(t.dtype)[6:]}" for n, t in given.items() if isinstance(t, Tensor)]
    numbers = [f"{n}={v!r}" for n, v in given.items() if not isinstance(v, Tensor)]
    return {
        "variant": f"{variant.name} ({variant.canonical.digest})" if is_variant else type(variant).__name__,
        "layer": repr(layer),
        "query": f"{[*query.shape]} {str(query.dtype)[6:]}" if isinstance(query, Tensor) else type(query).__name__,
        "operands": "; ".join((*shapes, *numbers)),
    }


class _Sharded(Cache):
    """What both caches have in common. Blocks and lengths are those of whole sequences, the same on every rank."""

    _makes_step = ShardedStep
    by_heads: Group
    by_sequence: Group
    agree: Agree
    all_kv_heads: int  # of all ranks

    def _meet(
        self, heads: DeviceMesh | dist.ProcessGroup | None, sequence: DeviceMesh | dist.ProcessGroup | None,
        agree: Agree,
    ) -> None:  # fmt: skip
        """Find out which ranks there are."""
        name = type(self).__name__
        if not dist.is_available() or not dist.is_initialized():
            raise UnavailableError(f"{name}: torch.distributed is not initialised; call init_process_group first")
        if not isinstance(agree, bool) and not (isinstance(agree, str) and agree == "steps"):
            raise WeftError(f"{name}: agree: expected True, 'steps' or False, got {shown(agree)}")
        if heads is None and sequence is None:
            raise WeftError(f"{name}: expected heads=, sequence= or both: the ranks that divide the one or the other")
        self.by_heads, self.by_sequence = _group(name, "heads", heads), _group(name, "sequence", sequence)
        both = [set(dist.get_process_group_ranks(g.group)) for g in (self.by_heads, self.by_sequence) if g.ranks > 1]
        if len(both) == 2 and len(both[0] & both[1]) > 1:
            raise WeftError(
                f"{name}: sequence: expected ranks that have the same key heads, got ranks that heads= divides them "
                "among; pass two dimensions of a mesh, heads=mesh['heads'], sequence=mesh['tokens']"
            )
        self.agree, self._changes = agree, Changes()
        groups = {"heads": self.by_heads, "sequence": self.by_sequence}
        self._agreements = {n: Agreement(g.group, name) for n, g in groups.items() if agree and g.ranks > 1}

    def _divide(self, kv_heads: int | None) -> int | None:
        """Find out what this rank has; the key heads of it."""
        name = type(self).__name__
        self.share = Share(self.by_sequence.rank, self.by_sequence.ranks)
        self.all_kv_heads = kv_heads if is_size(kv_heads) else 1
        ranks = self.by_heads.ranks
        if self.all_kv_heads % ranks and ranks % self.all_kv_heads:
            raise WeftError(
                f"{name}: kv_heads: expected a multiple or a divisor of the {ranks} ranks of heads=, got {kv_heads}"
            )
        return (
            max(1, self.all_kv_heads // ranks) if is_size(kv_heads) else kv_heads
        )  # what is no size is refused as such

    def _own_descale(self, descale: Given) -> Given:
        """Of descales [layers, Hkv] those of this rank's heads."""
        if not isinstance(descale, Tensor) or descale.dim() == 0 or descale.shape[-1] != self.all_kv_heads:
            return descale
        return descale.narrow(-1, *self._heads())

    def _heads(self) -> tuple[int, int]:
        """The first key head of this rank, and how many it has: several ranks may have one of them."""
        ranks = self.by_heads.ranks
        return self.by_heads.rank * self.all_kv_heads // ranks, max(1, self.all_kv_heads // ranks)

    # -- heads ---------------------------------------------------------------------------------------------------------
    def own_heads(self, rows: Tensor) -> Tensor:
        """This rank's key heads of keys or values [B, Hkv, L, D] that have all of them; others as they are."""
        if not isinstance(rows, Tensor) or rows.dim() != 4 or rows.shape[1] != self.all_kv_heads:
            return rows
        return rows if self.by_heads.ranks == 1 else rows.narrow(1, *self._heads())

    def shard(self, query: Tensor) -> Tensor:
        """This rank's heads of a query [B, Hq, L, D] that has all of them: a view."""
        ranks, rank = self.by_heads.ranks, self.by_heads.rank
        if not isinstance(query, Tensor):
            raise WeftError(f"shard: query: expected a tensor [B, Hq, L, D], got {type(query).__name__}")
        if query.dim() != 4 or query.shape[1] % ranks or query.shape[1] % self.all_kv_heads:
            raise WeftError(
                f"shard: query: expected [B, Hq, L, D] with a multiple of {ranks} heads, one or more for each of "
                f"{self.all_kv_heads} key heads, got {[*query.shape]}"
            )
        own = query.shape[1] // ranks
        return query.narrow(1, rank * own, own)

    def unshard(self, out: Tensor) -> Tensor:
        """All heads [B, Hq, ...] on each rank, from the heads of each, as `attend` gives them.

        Raises WeftError on all ranks where one of them has something else.
        """
        if self.by_heads.ranks == 1:
            return out
        problem: Exception | None = None
        if not isinstance(out, Tensor) or out.dim() < 2:
            got = [*out.shape] if isinstance(out, Tensor) else type(out).__name__
            problem = WeftError(f"unshard: out: expected a tensor [B, Hq, ...], got {got}")
        if self.agree is True:
            words = type(out).__name__ if problem else f"{[*out.shape]} {str(out.dtype)[6:]}"
            self._agreements["heads"].check({"call": "unshard", "out": words}, problem)
        if problem is not None:
            raise problem
        with self.kept("heads", "unshard"):
            return gathered_heads(self.by_heads, out)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def extend(
        self, sequences: Sequence[int], lengths: Sequence[int], tokens: Sequence[Sequence[int] | None] | None = None,
        *, packed: bool = False,
    ) -> Step:  # fmt: skip
        """As of other caches. Raises WeftError on all ranks where one extends other sequences, by other tokens."""
        step, told = None, {"call": "extend"}
        problem: Exception | None = None
        try:
            step = super().extend(sequences, lengths, tokens, packed=packed)
        except Exception as error:
            problem = error
        if step is not None:
            rows = zip(step.sequences, step.starts, step.ends)
            told["sequences"] = ", ".join(f"{s}: {start} + {end - start}" for s, start, end in rows)
            told["rows"] = "packed" if packed else "padded"
            new = repr([self._sequences[s].new_tokens for s in step.sequences])
            told["tokens"] = hashlib.sha256(new.encode()).hexdigest()[:8]
        try:
            self.check({**told, "changes": self.changes}, problem)
        except WeftError:
            if step is not None:
                super()._close(step, keeps=False)  # no change, as ranks that have made none know nothing of it
            raise
        if step is None:
            assert problem is not None
            raise problem
        return step

    def append(
        self, sequences: Sequence[int], key: Tensor | Sequence[Tensor], value: Tensor | Sequence[Tensor] | None = None,
        *, lengths: Sequence[int] | None = None, tokens: Sequence[Sequence[int] | None] | None = None,
    ) -> Step:  # fmt: skip
        """As of other caches: all rows, of this rank's key heads or of all."""
        compared = self._changes.compared
        try:
            key, value = (
                [self.own_heads(rows) for rows in t] if isinstance(t, (list, tuple)) else self.own_heads(t)  # type: ignore[arg-type]
                for t in (key, value)
            )
            return super().append(sequences, key, value, lengths=lengths, tokens=tokens)
        except Exception as error:
            if self._changes.compared == compared:  # others extend, and wait
                self.check({"call": "append"}, error)
            raise

    # -- changes of sequences ------------------------------------------------------------------------------------------
    @property
    def changes(self) -> str:
        """How sequences were changed so far, in a line, for ranks to compare with the next step or call."""
        return str(self._changes)

    def allocate(self, tokens: Iterable[int] | None = None, *, salt: Hashable = None) -> int:
        """As of other caches."""
        made = super().allocate(tokens, salt=salt)
        self._changes.add("allocate", made, self.length(made), beside=self._sequences[made].tokens)
        return made

    def free(self, sequence: int) -> None:
        """As of other caches."""
        super().free(sequence)
        self._changes.add("free", sequence)

    def fork(self, sequence: int) -> int:
        """As of other caches."""
        made = super().fork(sequence)
        self._changes.add("fork", sequence, made)
        return made

    def truncate(self, sequence: int, length: int) -> None:
        """As of other caches."""
        super().truncate(sequence, length)
        self._changes.add("truncate", sequence, length)

    def swap_out(self, sequence: int) -> None:
        """As of other caches."""
        super().swap_out(sequence)
        self._changes.add("swap_out", sequence)

    def swap_in(self, sequence: int) -> None:
        """As of other caches."""
        super().swap_in(sequence)
        self._changes.add("swap_in", sequence)

    def _close(self, step: Step, keeps: bool) -> None:
        super()._close(step, keeps)
        self._changes.add("commit" if keeps else "cancel", *step.sequences)

    # -- what ranks tell each other ------------------------------------------------------------------------------------
    def kept(self, dim: str, what: str) -> AbstractContextManager[None]:
        """Around what ranks of one dimension send each other."""
        return kept(self._agreements.get(dim), what)

    @contextmanager
    def _made_by_all(self, *descales: Given) -> Iterator[None]:
        """Around what makes the cache: where one rank makes none, others hear of it. descales: those of all heads."""
        try:
            yield
        except Exception as error:
            self.check({"cache": type(self).__name__}, error)
            raise
        self._agree_on_sizes(descales)

    def check(self, told: Mapping[str, str], problem: Exception | None) -> None:
        """Raise WeftError on all ranks where they differ in what they are told, or where one has a problem."""
        self._changes.compared += 1
        for agreement in self._agreements.values():
            try:
                agreement.check(told, problem)
            except WeftError as error:  # the ranks of the other dimension hear of it, too
                problem = problem or error
        if problem is not None:
            raise problem

    def _agree_on_sizes(self, descales: Sequence[Given]) -> None:
        sizes = self.layers, self.all_kv_heads, self.head_dim, self.value_dim, self.page, len(self._blocks.holders)
        names = ("layers", "kv_heads", "head_dim", "value_dim", "page", "blocks")
        told = {"cache": type(self).__name__, "dtype": str(self.dtype), **dict(zip(names, map(str, sizes)))}
        told |= {"latent": str(self.latent), "scale": "none"}
        if self.scales is not None:
            told["scale"] = "token" if self.scales.by_token else "head"
            told["rope_dtype"] = str(self._ropes[0].dtype) if self._ropes else "none"
            told |= zip(("k_descale", "v_descale"), map(_words_of, descales))
        self.check(told, None)


class ShardedPagedCache(_Sharded, PagedCache):
    """A PagedCache that ranks hold together: each has some key heads, or every n-th token, of all sequences.

    Steps, keys, values and results are the same on every rank:

    >>> with cache.extend([a, b], [1, 1]) as step:                              # doctest: +SKIP
    ...     step.append(0, key, value)
    ...     out = step.attend(0, variant, query)

    heads: a process group, or a DeviceMesh with one dimension, whose ranks divide the key heads. Where there are more
    ranks than heads, several have the same one. sequence: ranks that divide the tokens. Token t lies on rank t % n of
    them, so that causal masks and windows are even work. Both may be given, of a mesh with two dimensions. All ranks
    call the same in the same order. They compare sizes, steps and calls; with agree="steps" no calls, and with
    agree=False nothing.
    kv_heads: of all ranks. page: tokens of a block, n times a power of two; 16 n where not given. The others are those
    of PagedCache. Lengths, forks, prefixes that are found again and swaps are those of whole sequences; bytes are those
    of this rank. Raises WeftError for sizes that ranks cannot divide.
    """

    def __init__(
        self, blocks: int, *, heads: DeviceMesh | dist.ProcessGroup | None = None,
        sequence: DeviceMesh | dist.ProcessGroup | None = None, agree: Agree = True, layers: int = 1,
        kv_heads: int | None = None, head_dim: int | None = None, value_dim: int | None = None,
        latent: Latent | None = None, page: int | None = None, dtype: torch.dtype,
        device: torch.device | str = "cpu", scale: Scale | None = None, k_descale: Given = None,
        v_descale: Given = None, rope_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._meet(heads, sequence, agree)
        with self._made_by_all(k_descale, v_descale):
            kv_heads = self._divide(kv_heads)
            page = 16 * self.share.ranks if page is None else page
            super().__init__(
                blocks, layers=layers, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, latent=latent,
                page=page, dtype=dtype, device=device, scale=scale, k_descale=self._own_descale(k_descale),
                v_descale=self._own_descale(v_descale), rope_dtype=rope_dtype,
            )  # fmt: skip


class ShardedDenseCache(_Sharded, DenseCache):
    """A DenseCache that ranks hold together: each has some key heads, or every n-th token, of all sequences.

    sequences: rows. capacity: tokens of a row, a multiple of the ranks of sequence=. The others are those of
    ShardedPagedCache and DenseCache.
    """

    def __init__(
        self, sequences: int, capacity: int, *, heads: DeviceMesh | dist.ProcessGroup | None = None,
        sequence: DeviceMesh | dist.ProcessGroup | None = None, agree: Agree = True, layers: int = 1,
        kv_heads: int | None = None, head_dim: int | None = None, value_dim: int | None = None,
        latent: Latent | None = None, dtype: torch.dtype, device: torch.device | str = "cpu",
        scale: Scale | None = None, k_descale: Given = None, v_descale: Given = None,
        rope_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._meet(heads, sequence, agree)
        with self._made_by_all(k_descale, v_descale):
            kv_heads = self._divide(kv_heads)
            if is_size(capacity) and capacity % self.share.ranks:
                raise WeftError(
                    f"ShardedDenseCache: capacity: expected a multiple of the {self.share.ranks} ranks of sequence=, "
                    f"got {capacity}"
                )
            super().__init__(
                sequences, capacity, layers=layers, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
                latent=latent, dtype=dtype, device=device, scale=scale, k_descale=self._own_descale(k_descale),
                v_descale=self._own_descale(v_descale), rope_dtype=rope_dtype,
            )  # fmt: skip


def _words_of(descale: Given) -> str:
    """Descales, short, for ranks to compare."""
    if descale is None:
        return "none"
    numbers = torch.as_tensor(descale, dtype=torch.float32).flatten().tolist()
    return f"{some_of(numbers)} ({crc32(repr(numbers).encode()):08x})" if len(numbers) > 1 else repr(numbers[0])


def _group(name: str, option: str, given: Any) -> Group:
    """The ranks that divide something, by a process group or a mesh with one dimension."""
    if given is None:
        return Group(None, 0, 1)
    if hasattr(given, "get_group"):
        if given.ndim != 1:
            dims = ", ".join(map(str, given.mesh_dim_names or range(given.ndim)))
            raise WeftError(f"{name}: {option}: expected a mesh with one dimension, as mesh[name], got one of {dims}")
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        expected = "a process group or a DeviceMesh with one dimension"
        raise WeftError(f"{name}: {option}: expected {expected}, got {type(given).__name__}")
    return Group(given, dist.get_rank(given), dist.get_world_size(given))
