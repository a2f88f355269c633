"""`weft.Attention`: the variant of `weft.ir` with its methods: call it, define it, plan it, explain it, print it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from . import describe, distributed, drawing, request, validate
from .compiler.planning.picture import Picture
from .compiler.planning.plan import Plan
from .compiler.planning.records import Shape
from .compiler.planning.schedule import Schedule
from .ir.attention import SEED
from .ir.attention import Attention as Declaration
from .ir.errors import WeftError
from .ir.expr import Scalar, TensorOperand
from .ir.philox import drawn_seed
from .ir.reference import expand_latent, ragged_reference, reference
from .nested import are_jagged, lengths_given_twice, packed
from .runtime import ops
from .runtime import options as call_options
from .runtime.call import (
    SLOTS,
    Arguments,
    Call,
    Dense,
    Lengths,
    Packed,
    PackedPaged,
    Pages,
    Sequences,
    choices_of,
    choices_text,
    dense_offset,
    float_tensor,
    sequences_of,
)
from .runtime.checks import check_call, check_q_offset, check_tensors, main_problems
from .runtime.lengths import check_contents, checked, cleared, gathered, given_sequences, packed_of_pages
from .runtime.options import DEFINED, PLAIN, READ_BY_KERNELS, CallOptions, Form, doc_of, signature_of
from .runtime.settings import default_target, traced_target
from .runtime.torch_private import is_surely_negative, may_autocast
from .runtime.values import check_offsets, check_reads
from .runtime.variant import Variant, say_of_first_key, variant_of
from .signatures import Methods

Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Methods, Declaration):
    __doc__ = Declaration.__doc__

    if TYPE_CHECKING:  # set when the variant is made; ClassVar keeps them out of the dataclass's fields
        _names: ClassVar[tuple[str, ...]]  # of the operands
        _kinds: ClassVar[tuple[str, ...]]  # "tensor", "int" or "float"
        _numbers: ClassVar[tuple[tuple[str, type], ...]]  # the scalars, each with the type that kernels take
        _operands: ClassVar[frozenset[str]]
        _plain: ClassVar[frozenset[str]]  # the same where no option has the name of one, as a seed has
        _unread: ClassVar[frozenset[str]]
        _has_lse: ClassVar[bool]
        _counts_rows: ClassVar[bool]  # positions of queries are read
        _drops: ClassVar[bool]
        _latent_width: ClassVar[int | None]  # columns of a latent cache
        _dropout_scalar: ClassVar[str | None]  # the scalar that the dropout is
        _undropped: ClassVar[Attention | None]  # the same without dropout, where there is one
        _variant: ClassVar[Variant]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._derive()

    def _derive(self) -> None:
        """What every call reads, worked out once: torch.compile then traces attributes, and no analysis."""
        kinds = tuple("tensor" if isinstance(p, TensorOperand) else p.dtype for p in self.parameters)
        names = tuple(p.name for p in self.parameters)
        numbers = tuple((n, int if kind == "int" else float) for n, kind in zip(names, kinds) if kind != "tensor")
        found = {
            "_names": names, "_kinds": kinds, "_numbers": numbers, "_operands": frozenset(names),
            "_plain": frozenset() if self.drops else frozenset(names),
            "_unread": self.unread, "_has_lse": self.weighs.saves_lse, "_variant": variant_of(self),
            "_counts_rows": variant_of(self).first_key.matters,
            "_drops": self.drops, "_dropout_scalar": self.dropout.name if isinstance(self.dropout, Scalar) else None,
            "_undropped": self.replace(dropout=0.0) if self.drops else None,
            "_latent_width": None if self.latent is None else self.latent.rank + self.latent.rope,
        }  # fmt: skip
        self.__dict__.update(found)  # frozen for users

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold what was declared, and nothing of this process."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._derive()

    def _call(self, query: Tensor, key: Tensor, value: Tensor | None = None, *more: Any, **given: Any) -> Any:
        """Attention of query [B, Hq, L, D] over key [B, Hkv, T, D] and value [B, Hkv, T, Dv]; out [B, Hq, L, Dv].

        bf16, fp16 or fp32 (float64 too on the CPU); any strides with a contiguous last dim; Hq a multiple of Hkv.
        operands: the variant's own scalars and tensors, by name. With `latent=`: query [B, H, L, nope + rope], cache
        [B, 1, T, rank + rope] in place of key, `uk` [H, rank, nope] and `uv` [H, rank, Dv]; without uk and uv the
        query is latent already and the output is [B, H, L, rank].

        With lengths, the symbols batch, q_len, kv_len and positions are those of a sequence, and rows that no sequence
        has give 0, lse -inf and zero gradients, whatever lies there. A row that sees no key gives 0 and lse -inf (or
        the sink), with zero gradients. Raises WeftError for operands that do not fit, listing every problem, and
        UnavailableError where a target cannot compute the call.
        """
        if more:
            raise WeftError(validate.by_position(self, more))
        options, variant, operands = PLAIN, self, given
        if given and given.keys() != self._plain:
            options, operands = call_options.read(str(self.name), given)
        if self._drops or options.seed is not None or options.train is not True:
            variant, operands = self._as_trained(options.train, operands)
            operands = variant._seeded(operands, options.seed, query)
        if options.return_lse:
            self._check_lse()
        if options.deterministic is None and torch.are_deterministic_algorithms_enabled():
            options = options.having(deterministic=True)
        if variant._unread:
            operands = variant._read(operands)
        if self.latent is not None:
            return variant._latent(query, key, value, options, operands)
        if options.uk is not None or options.uv is not None or options.form is not None:
            validate.check_no_latent(self, options.uk, options.uv, options.form)
        return variant._run(query, key, value, None, options, operands)

    def _as_trained(self, train: bool, operands: Mapping[str, Any]) -> tuple[Attention, dict[str, Any]]:
        """The variant that a call computes, with its operands: that without dropout where nothing is to be dropped."""
        if self._undropped is None or train:
            return self, dict(operands)
        return self._undropped, {n: v for n, v in operands.items() if n != self._dropout_scalar}

    def _seeded(self, operands: Mapping[str, Any], seed: Any, query: Any) -> dict[str, Any]:
        """Operands with the seed as kernels take it, where weights are dropped."""
        device = query.device if isinstance(query, Tensor) else torch.device("cpu")  # what else it is, is refused later
        given = validate.seed_of(str(self.name), seed, device)
        if not self._drops:
            return dict(operands)
        validate.check_dropout(self, operands)
        return {**operands, SEED.name: drawn_seed(device) if given is None else given}

    def _check_lse(self) -> None:
        if not self._has_lse:
            raise WeftError(
                f"{self.name}: return_lse: the normalizer {self.normalizer} has no log-sum-exp; leave return_lse=False"
            )

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, options: CallOptions,
        operands: Mapping[str, Any], head_dim: int | None = None,
    ) -> Result:  # fmt: skip
        """head_dim: the value of the symbol, where it is not the query's."""
        is_traced = torch.compiler.is_compiling()
        if is_traced or may_autocast():
            query, key, value = _autocast(query, key, value)
        if type(query) is not Tensor and distributed.is_sharded(query):
            main = {"query": query, "key": key, "value": value, "rope": rope}
            compute = partial(self._run_of_shards, head_dim)
            return distributed.of_shards(self, compute, main, operands, options)
        if is_traced:
            out, lse = self._traced(query, key, value, rope, options, operands, head_dim)
            return (out, self._lse(lse)) if options.return_lse else out
        is_ragged = options is not PLAIN and options.are_ragged
        q_offset: Any = options.q_offset
        q_rows: Any = None
        kv_rows: Any = None
        try:  # no more than a call of any kind needs: what else is wrong with it fails below, and is told there
            (_, _, q_rows, _), (_, _, kv_rows, _) = query.shape, key.shape
            is_known = operands.keys() == self._operands if operands else not self._operands
            is_known = is_known and not (query.is_meta or key.is_meta)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            is_known = False
        if not is_known:
            self._check(query, key, value, operands, options.block_table is not None)
        if value is None and self.latent is None:
            self._check(query, key, value, operands)
        if q_offset is None and not is_ragged:
            try:
                q_offset = kv_rows - q_rows
            except (AttributeError, RuntimeError, TypeError):  # nested tensors have no such sizes
                if are_jagged(query, key, value):
                    return self._jagged(query, key, value, options, operands)
                self._check(query, key, key if value is None else value, operands)
                raise
            if type(q_offset) is not Tensor and q_offset < 0:  # sizes are tensors under torch.jit.trace
                self._variant.first_key.dense(q_rows, kv_rows)
        elif q_offset is not None:
            q_offset = validate.as_number(q_offset, int)
            if query.is_nested and are_jagged(query, key, value):
                if is_ragged:
                    raise lengths_given_twice(str(self.name), options)
                return self._jagged(query, key, value, options.having(q_offset=q_offset), operands)
            if isinstance(q_offset, (int, Tensor)):  # else it is refused with what else is wrong
                check_offsets(str(self.name), q_offset)
        given = {n: operands[n] for n in self._names} if operands else {}
        for name, kind in self._numbers:
            if type(given[name]) is not kind:
                given[name] = validate.as_number(given[name], kind)
        sequences: Sequences
        if is_ragged:
            if q_offset is not options.q_offset:
                options = options.having(q_offset=q_offset)
            sequences = given_sequences(str(self.name), query, key, options)
        else:
            sequences = Dense(q_offset) if type(q_offset) is int else dense_offset(q_offset)
        target, schedule = options.target, options.schedule
        choices = choices_of(
            default_target() if target is None else target, None if schedule is None else str(schedule),
            options.deterministic,
        )  # fmt: skip
        read = _read_by_kernels(options) if READ_BY_KERNELS and options is not PLAIN else None
        call = Call(query, key, value, rope, given, sequences, choices, head_dim or query.shape[3], read)
        try:
            found = ops.run(self._variant, call, options.return_lse)
        except WeftError:
            raise
        except (RuntimeError, TypeError, LookupError, ArithmeticError, ValueError, AttributeError) as error:
            self._explain(call, options, error)
            raise
        return (found[0], self._lse(found[1])) if options.return_lse else found[0]

    def _run_of_shards(
        self, head_dim: int | None, main: Mapping[str, Any], operands: Mapping[str, Any], options: CallOptions
    ) -> Result:  # fmt: skip
        """What one device computes of a call."""
        return self._run(main["query"], main["key"], main["value"], main["rope"], options, operands, head_dim)

    def _explain(self, call: Call, options: CallOptions, error: Exception) -> None:
        """Raise WeftError where the call is to blame for the error: torch and Python know no operand's name."""
        if options.are_ragged and are_jagged(call.query, call.key, call.value):
            raise lengths_given_twice(str(self.name), options)
        self._check(call.query, call.key, call.value, call.operands, options.block_table is not None)
        if options.are_ragged:
            checked(str(self.name), call.query, call.key, options)
        check_call(self, call)
        validate.explain_failure(self, call, error)

    def _jagged(
        self, query: Any, key: Any, value: Any, options: CallOptions, operands: Mapping[str, Any]
    ) -> Result:  # fmt: skip
        """Nested operands [B, H, j, D], packed."""
        made = packed(str(self.name), query, key, value)
        cu_q, cu_kv = made.starts
        found = self._run(*made.tensors, None, options.having(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv), operands)
        return made.nested(found) if isinstance(found, Tensor) else (made.nested(found[0]), made.nested(found[1]))

    def _lse(self, saved: Tensor) -> Tensor:
        """[B, Hq, L]: what an op gives, which keeps two statistics of a row where scores may lie far from 0."""
        return saved.sum(0) if saved.dim() == 4 else saved.contiguous()

    def _read(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """Operands without those that nothing depends on."""
        return {name: value for name, value in operands.items() if name not in self._unread}

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor | None, operands: Mapping[str, Any], paged: bool = False
    ) -> None:
        """Raise for a call that cannot be put together, naming all that is wrong with it."""
        problems = main_problems(query, key, value, paged) if self.latent is None else []
        validate.check_operands(self, operands, query.device if isinstance(query, Tensor) else None, problems)

    def _traced(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, options: CallOptions,
        operands: Mapping[str, Any], head_dim: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The op in a graph of torch.compile: what it can trace of the checks here, the others when the op runs."""
        is_ragged, paged = options.are_ragged, options.block_table is not None
        if self.latent is None:
            check_tensors(str(self.name), query, key, value, paged, longest=None)
        if set(operands) != set(self._names):
            unknown = [f"{n}: unknown operand or option" for n in operands if n not in self._names]
            missing = [f"{n}: missing; pass {n}=..." for n in self._names if n not in operands]
            raise WeftError(f"{self.name}: {'; '.join([*unknown, *missing])}; the operands are {self._names}")
        tensors, floats, ints = [], [], []
        for name, kind in zip(self._names, self._kinds):
            given = operands[name]
            if isinstance(given, bool) or (kind == "int" and isinstance(given, float)):
                raise WeftError(
                    f"{self.name}: {name}: expected {'an int' if kind == 'int' else 'a ' + kind}, got {given!r}"
                )
            if isinstance(given, Tensor) != (kind == "tensor") or given is None or isinstance(given, str):
                raise WeftError(f"{self.name}: {name}: expected a {kind}, got {type(given).__name__}")
            if kind == "tensor":
                tensors.append(given)
            elif kind == "float":
                floats.append(float_tensor(given))
            else:
                ints.append(given)
        if torch.compiler.is_exporting():  # packages of AOTInductor give None in place of an empty list
            tensors, floats, ints = tensors or [query], floats or [query], ints or [0]  # which nobody reads
        offset = options.q_offset
        if offset is None and not is_ragged:
            offset = own = key.shape[2] - query.shape[2]
            if self._counts_rows and is_surely_negative(own):
                say_of_first_key(self.line)
        if isinstance(offset, (bool, float)):
            raise WeftError(f"{self.name}: q_offset: expected an int or an int32 tensor, got {offset!r}")
        number, per_row = (None, offset) if isinstance(offset, Tensor) else (offset, None)
        if is_ragged:
            options = checked(str(self.name), query, key, options.having(q_offset=offset))
        slots = tuple([per_row if name == "q_offsets" else getattr(options, name) for name in SLOTS])
        target = traced_target() if options.target is None else options.target
        schedule = None if options.schedule is None else str(options.schedule)
        arguments = Arguments(
            query, key, value, rope, tensors, floats, ints, number, slots, head_dim or query.shape[3], self.line,
            choices_text(target, schedule, options.deterministic),
        )  # fmt: skip
        return ops.FORWARD(*arguments.flat)

    def _latent(
        self, query: Tensor, cache: Tensor, value: Tensor | None, options: CallOptions, operands: Mapping[str, Any]
    ) -> Result:  # fmt: skip
        """Both forms of latent attention (DeepSeek-V2, arXiv 2405.04434): the same numbers, computed in two orders."""
        assert self.latent is not None
        uk, uv, form = options.uk, options.uv, options.form
        if value is uk is uv is None and form is None and self._is_absorbed(query, cache, options):
            try:  # every step of a decode: what else is wrong with a call fails in it, and is told then
                return self._run(query, cache, None, None, options, operands)
            except Exception:
                validate.check_latent(self, query, cache, None, None, options.block_table is not None)
                raise
        if value is not None:
            raise WeftError(
                f"{self.name}: value: latent attention takes query and cache only; its values come from the cache"
            )
        if form not in (None, "expanded", "absorbed"):
            raise WeftError(f"{self.name}: form: expected 'expanded' or 'absorbed', got {form!r}")
        query, cache = _autocast(query, cache)
        if uk is not None and uv is not None:
            uk, uv = _autocast(uk, uv)
        paged = options.block_table is not None
        validate.check_latent(self, query, cache, uk, uv, paged)
        if uk is None or uv is None:
            if form == "expanded":
                raise WeftError(f"{self.name}: form='expanded' needs uk and uv")
            return self._run(query, cache, None, None, options, operands)
        if paged:
            validate.check_absorbed(self, form, (query, cache, uk, uv))
            form = "absorbed"
        form = form or request.latent_form(self, query, cache, uk, uv, operands)
        if form == "expanded":
            return self._expanded(query, cache, uk, uv, options, operands)
        # a product a head, of all batch rows: by rows, copies of uk and uv would be made
        nope = query.shape[3] - self.latent.rope
        absorbed = torch.cat([torch.einsum("bhln,hrn->bhlr", query[..., :nope], uk), query[..., nope:]], dim=-1)
        result = self._run(absorbed, cache, None, None, options, operands, head_dim=query.shape[3])
        out = result[0] if isinstance(result, tuple) else result
        out = torch.einsum("bhlr,hrd->bhld", out, uv)
        return (out, result[1]) if isinstance(result, tuple) else out

    def _expanded(
        self, query: Tensor, cache: Tensor, uk: Tensor, uv: Tensor, options: CallOptions, operands: Mapping[str, Any]
    ) -> Result:  # fmt: skip
        """Latent attention with keys and values of all heads."""
        assert self.latent is not None
        if options.are_ragged:  # what lies behind a length must not reach gradients of uk and uv
            sequences = sequences_of(checked(str(self.name), query, cache, options))
            cache = cleared(cache, sequences, query)  # type: ignore[arg-type]
        rank = self.latent.rank
        latent, rope = cache[..., :rank], cache[..., rank:] if self.latent.rope else None
        # one product of all heads, [B, T, rank] by [rank, H * width]: by heads, copies of the cache would be made
        key, value = (torch.einsum("btr,hrd->bhtd", latent[:, 0], w) for w in (uk, uv))
        return self._run(query, key, value, rope, options, operands)

    def _is_absorbed(self, query: Tensor, cache: Tensor, options: CallOptions) -> bool:
        """Whether shapes are those of a latent query and its cache, contiguous or in pages, and nothing is traced."""
        if self.scale is None or torch.compiler.is_compiling():
            return False
        try:
            (batches, _, _, width), (others, heads, _, columns) = query.shape, cache.shape
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        return (
            width == columns == self._latent_width
            and heads == 1
            and (batches == others or options.block_table is not None)
        )

    def _reference(self, query: Tensor, key: Tensor, value: Tensor | None = None, *more: Any, **given: Any) -> Any:
        """The definition: the same call in dense, differentiable torch, in any dtype including float64; slow.

        With lengths, each sequence by itself; their values are read, on whatever device they are.
        """
        if more:
            raise WeftError(validate.by_position(self, more))
        own = given.keys() & call_options.OPTIONS.keys()
        if undefined := own - DEFINED:
            validate.check_operands(self, {n: given[n] for n in given if n in undefined or n not in own}, query.device)
        options, operands = call_options.read(str(self.name), given)
        if options.return_lse:
            self._check_lse()
        variant: Attention = self
        if self._drops or options.seed is not None or options.train is not True:
            variant, operands = self._as_trained(options.train, operands)
            operands = variant._seeded(operands, options.seed, query)
        result = variant._defined(query, key, value, options, operands)
        return result if options.return_lse else result[0]

    def _defined(
        self, query: Tensor, key: Tensor, value: Tensor | None, options: CallOptions, operands: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """out and lse by the definition."""
        uk, uv, q_offset, name = options.uk, options.uv, options.q_offset, str(self.name)
        if are_jagged(query, key, value):
            if options.are_ragged:
                raise lengths_given_twice(name, options)
            made = packed(name, query, key, value)
            cu_q, cu_kv = made.starts
            inner = options.having(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
            out, lse = self._defined(*made.tensors, inner, operands)
            return made.nested(out), made.nested(lse)
        paged = options.block_table is not None
        if self.latent is not None:
            validate.check_latent(self, query, key, uk, uv, paged)
        else:
            validate.check_no_latent(self, uk, uv)
            check_tensors(name, query, key, value, paged)
        if paged:  # from here on padded or packed rows, of which those behind a length belong to nobody
            key, value, options = _out_of_pages(name, query, key, value, options)
        if self.latent is not None:
            head_dim = query.shape[3]
            if options.are_ragged:
                sequences = sequences_of(checked(name, query, key, options))
                key = cleared(key, sequences, query)  # type: ignore[arg-type]
            if uk is not None and uv is not None:
                query, key, value = expand_latent(self, query, key, uk, uv)
            else:
                value = key[..., : self.latent.rank]
        else:
            assert value is not None
            head_dim = query.shape[3]
        operands = {name: validate.as_number(given, dict(self._numbers).get(name)) for name, given in operands.items()}
        operands = self._read(operands)
        validate.check_operands(self, operands, query.device)
        validate.check_floats(self, operands, query.dtype)
        if q_offset is not None:
            q_offset = validate.as_number(q_offset, int)
            if not options.are_ragged:
                check_q_offset(q_offset, query.shape[0], query.device)
        elif not options.are_ragged:
            self._variant.first_key.dense(query.shape[2], key.shape[2])
        if options.are_ragged:
            return self._ragged_reference((query, key, value), operands, options.having(q_offset=q_offset), head_dim)
        check_reads(self, query, key, operands, q_offset, head_dim)
        return reference(self, query, key, value, operands, q_offset, head_dim)

    def _ragged_reference(
        self, main: tuple[Tensor, Tensor, Tensor], operands: Mapping[str, Any], options: CallOptions, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """main: query, key and value."""
        name, (query, key, value) = str(self.name), main
        sequences = sequences_of(checked(name, query, key, options))
        assert isinstance(sequences, (Lengths, Packed))
        check_contents(name, query, key, sequences)
        self._variant.first_key.ragged(sequences, query, key)
        rows = sequences.rows(query, key)
        for r in rows:
            q_part = query[r.row : r.row + 1, :, r.q_first : r.q_first + r.q_len]
            kv_part = key[r.row : r.row + 1, :, r.kv_first : r.kv_first + r.kv_len]
            if r.q_len and (r.kv_len or self.folded_sink is not None):
                check_reads(self, q_part, kv_part, operands, r.q_offset, head_dim, r.number)
        return ragged_reference(self, query, key, value, operands, rows, head_dim)

    def _as_called(self, options: Mapping[str, Any]) -> tuple[Attention, dict[str, Any]]:
        """The variant whose kernels a call with these options takes, and the options that are left to describe."""
        seed, train = options.get("seed"), options.get("train", True)
        validate.seed_of(str(self.name), seed, seed.device if isinstance(seed, Tensor) else torch.device("cpu"))
        more = options.get("operands")
        options = {n: value for n, value in options.items() if n not in ("seed", "train", "operands")}
        options = options if more is None else call_options.joined(str(self.name), options, more)
        variant, options = self._as_trained(train, options)
        validate.check_dropout(variant, options)
        return variant, variant._read(options)

    # -- the plan -----------------------------------------------------------------------------------------------------
    def plan(self, *operands: Tensor | Shape, device: str | None = None, target: str | None = None,
             schedule: str | Schedule | None = None, form: Form | None = None, **options: Any) -> Plan:  # fmt: skip
        """The schedule as data, for these tensors or for `weft.shape(...)`; needs no GPU.

        device: "h100"-style name of a hardware record; the operands' device or this machine where not given.
        options: values of scalar operands (for the tile counts), or any operand of the call.
        """
        variant, options = self._as_called(options)
        return describe.plan(variant, operands, device, target, schedule, form, options)

    def explain(self, *operands: Tensor | Shape, device: str | None = None, target: str | None = None,
                schedule: str | Schedule | None = None, form: Form | None = None, **options: Any) -> str:  # fmt: skip
        """The plan for a person: stages, loops, tile classes, bytes (formula and number), predicted time, its bound."""
        variant, options = self._as_called(options)
        return describe.explain(variant, operands, device, target, schedule, form, options)

    def source(self, *operands: Tensor | Shape, direction: Literal["forward", "backward"] = "forward",
               device: str | None = None, target: str | None = None, schedule: str | Schedule | None = None,
               form: Form | None = None, **options: Any) -> str:  # fmt: skip
        """All that is generated for one direction: Python for a person to read. Where a call launches kernels of
        several modules (those that measure tiles, or make tables by distance), each has a heading, in launch order."""
        variant, options = self._as_called(options)
        return describe.source(variant, operands, direction, device, target, schedule, form, options)

    def show_mask(self, q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128,
                  path: str | Path | None = None, q_offset: int | None = None, head: int = 0, batch: int = 0,
                  **options: Any) -> Picture:  # fmt: skip
        """A picture of the tile classes (skipped, masked or full tiles): text for a terminal, an SVG in a notebook, and
        by `.svg()`, and a file at `path`, which ends in .png or .svg.

        head, batch: the query head and the row of the batch that it is of. options: the variant's operands, and the
        sizes that its mask may read: heads, kv_heads and head_dim.
        """
        return drawing.show_mask(
            self, q_len, kv_len, block_q, block_kv, path, q_offset, head, batch, self._read(options)
        )


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, float operands take the autocast dtype, as those of torch's own attention do; float64 stays."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast knows no meta
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def _out_of_pages(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, options: CallOptions
) -> tuple[Tensor, Tensor | None, CallOptions]:
    """Keys and values of a paged call as padded or packed rows, and the lengths of these."""
    options = checked(name, query, key, options)
    pages = sequences_of(options, page=key.shape[2])
    assert isinstance(pages, Pages)
    check_contents(name, query, key, pages)
    options = options.having(block_table=None)
    if isinstance(pages, PackedPaged):  # rows of queries that no sequence has, none of keys
        rows, starts = packed_of_pages(key, pages)
        values = None if value is None else packed_of_pages(value, pages)[0]
        return rows, values, options.having(kv_lens=None, cu_seqlens_kv=starts)
    return gathered(key, pages), None if value is None else gathered(value, pages), options


def _read_by_kernels(options: CallOptions) -> Mapping[str, Tensor] | None:
    """The options that kernels read by their names, where they are given."""
    return {n: value for n in READ_BY_KERNELS if (value := getattr(options, n)) is not None} or None


def _as_method(function: Any, name: str, defined: bool) -> Any:
    """A method of keyword arguments with the signature and the docstring that follow from the list of options."""
    function.__name__, function.__qualname__ = name, f"Attention.{name}"
    function.__signature__ = signature_of(defined)
    function.__doc__ = f"{function.__doc__.rstrip()}\n\n{doc_of(defined)}        "
    return function


if not TYPE_CHECKING:  # there, api/signatures.py has what is typed of them
    Attention.__call__ = _as_method(Attention._call, "__call__", defined=False)
    Attention.reference = _as_method(Attention._reference, "reference", defined=True)
