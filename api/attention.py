"""`weft.Attention`: the variant of `weft.ir` with its methods: call it, define it, plan it, explain it, print it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from . import latent, reference
from .calls import conversion, dtensors, in_graphs, in_region, nested
from .calls.internals import Internals, Main, Result, autocast
from .calls.nested import are_jagged, lengths_given_twice, packed
from .calls.signatures import Methods
from .codegen.torch_private import SDPA, may_autocast
from .compiler.planning.picture import Picture
from .compiler.planning.plan import Plan
from .compiler.planning.records import Shape
from .compiler.planning.schedule import Schedule
from .ir import parse
from .ir.attention import SEED
from .ir.attention import Attention as Declaration
from .ir.errors import Problem, WeftError
from .ir.philox import drawn_seed
from .plans import describe
from .runtime import options as call_options
from .runtime.call import (
    Call,
    Dense,
    Sequences,
    choices_of,
    dense_offset,
)
from .runtime.check import check_call
from .runtime.check.operands import (
    as_number,
    by_position,
    check_dropout,
    check_memory,
    check_no_latent,
    check_operands,
    explain_failure,
    seed_of,
)
from .runtime.check.sequences import checked, given_sequences
from .runtime.check.tensors import check_latent, main_problems
from .runtime.check.values import check_offsets
from .runtime.descales import FP8, out_name
from .runtime.ops import dispatch
from .runtime.options import DEFINED, PLAIN, CallOptions, Form, doc_of, signature_of
from .runtime.run.variant import Variant
from .runtime.settings import default_target
from .tools import drawing


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Methods, Declaration):
    __doc__ = Declaration.__doc__

    if TYPE_CHECKING:  # set when the variant is made; ClassVar keeps it out of the dataclass's fields
        _internals: ClassVar[Internals]  # all that no user has to know

    def __post_init__(self) -> None:
        super().__post_init__()
        self._derive()

    def _derive(self) -> None:
        self.__dict__["_internals"] = Internals.of(self)  # frozen for users

    @property
    def _variant(self) -> Variant:
        return self._internals.variant

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
            raise by_position(self, more)
        own, options, variant, operands = self._internals, PLAIN, self, given
        if given and given.keys() != own.plain:
            options, operands = call_options.read(str(self.name), given)
        if own.drops or options.seed is not None or options.train is not True:
            variant, operands = self._as_trained(options.train, operands)
            operands, own = variant._seeded(operands, options.seed, query), variant._internals
        if options.return_lse:
            self._check_lse()
        if options.deterministic is None and torch.are_deterministic_algorithms_enabled():
            options = options.having(deterministic=True)
        if own.unread:
            operands = own.read(operands)
        if self.latent is not None:
            return variant._of_latent(query, key, value, options, operands)
        if options.form is not None or not options.uk is options.uv is options.rope is None:
            check_no_latent(self, options.uk, options.uv, options.form, options.rope)
        return variant._run(query, key, value, None, options, operands)

    def _as_trained(self, train: bool, operands: Mapping[str, Any]) -> tuple[Attention, dict[str, Any]]:
        """The variant that a call computes, with its operands: that without dropout where nothing is to be dropped."""
        own = self._internals
        if own.undropped is None or train:
            return self, dict(operands)
        return own.undropped, {n: v for n, v in operands.items() if n != own.share}

    def _seeded(self, operands: Mapping[str, Any], seed: Any, query: Any) -> dict[str, Any]:
        """Operands with the seed as kernels take it, where weights are dropped."""
        device = query.device if isinstance(query, Tensor) else torch.device("cpu")  # what else it is, is refused later
        given = seed_of(str(self.name), seed, device)
        if not self._internals.drops:
            return dict(operands)
        check_dropout(self, operands)
        check_memory(self, query)
        return {**operands, SEED.name: drawn_seed(device) if given is None else given}

    def _check_lse(self) -> None:
        if not self._internals.has_lse:
            what, how = f"the normalizer {self.normalizer} has no log-sum-exp", "leave return_lse=False"
            raise WeftError.of(str(self.name), Problem(option="return_lse", what=what, next_step=how))

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, options: CallOptions,
        operands: Mapping[str, Any], head_dim: int | None = None,
    ) -> Result:  # fmt: skip
        """head_dim: the value of the symbol, where it is not the query's."""
        own, is_traced = self._internals, torch.compiler.is_compiling()
        if is_traced or may_autocast():
            query, key, value, rope = autocast(query, key, value, rope)
        if functional.scaled_dot_product_attention is not SDPA and not dtensors.is_sharded(query):
            found = in_region.over_ranks(self, Main(query, key, value, rope), options, operands)
            if found is not None:
                return found
        if is_traced or type(query) is not Tensor:
            found = self._elsewhere(Main(query, key, value, rope), options, operands, head_dim)
            if found is not None:
                return found
        is_ragged = options is not PLAIN and options.are_ragged
        q_offset: Any = options.q_offset
        q_rows: Any = None
        kv_rows: Any = None
        try:  # no more than a call of any kind needs: what else is wrong with it fails below, and is told there
            (_, _, q_rows, _), (_, _, kv_rows, _) = query.shape, key.shape
            is_known = operands.keys() == own.operands if operands else not own.operands
            is_known = is_known and not (query.is_meta or key.is_meta or (value is not None and value.is_nested))
            for name in own.tensors:  # torch ends a process whose guards ask nested ones for strides
                is_known = is_known and not operands[name].is_nested
        except (AttributeError, RuntimeError, TypeError, ValueError):
            is_known = False
        if not is_known or (value is None and self.latent is None):
            self._check_unknown(query, key, value, options, operands)
        if q_offset is None and not is_ragged:
            try:
                q_offset = kv_rows - q_rows
            except (AttributeError, RuntimeError, TypeError):  # nested tensors have no such sizes
                return self._nested(query, key, value, options, operands)
            if type(q_offset) is not Tensor and q_offset < 0:  # sizes are tensors under torch.jit.trace
                own.variant.first_key.dense(q_rows, kv_rows)
        elif q_offset is not None:
            q_offset = as_number(q_offset, int)
            if query.is_nested and are_jagged(query, key, value):
                return self._jagged(query, key, value, options.having(q_offset=q_offset), operands)
            if isinstance(q_offset, (int, Tensor)):  # else it is refused with what else is wrong
                check_offsets(str(self.name), q_offset)
        given = {name: operands[name] for name in own.names} if operands else {}
        for name, kind in own.numbers:
            if type(given[name]) is not kind:
                given[name] = as_number(given[name], kind)
        sequences: Sequences
        if is_ragged:
            if q_offset is not options.q_offset:
                options = options.having(q_offset=q_offset)
            sequences = given_sequences(str(self.name), query, key, options)
        else:
            sequences = Dense(q_offset) if type(q_offset) is int else dense_offset(q_offset)
        target, schedule = options.target, None if options.schedule is None else str(options.schedule)
        target = default_target() if target is None else target
        named = None if options.out_dtype is None else out_name(options)
        choices = choices_of(target, schedule, options.deterministic, named)
        call = Call(query, key, value, rope, given, sequences, choices, head_dim or query.shape[3])
        found = None
        try:
            if options.are_read or key.dtype in FP8:
                call, found = conversion.scaled(own.variant, call, options, operands)
            out, lse = found or dispatch.run(own.variant, call, options.return_lse)
        except WeftError:
            raise
        except (RuntimeError, TypeError, LookupError, ArithmeticError, ValueError, AttributeError) as error:
            self._explain(call, options, error)
            raise
        return (out, self._shown(lse)) if options.return_lse else out

    @staticmethod
    def _shown(lse: Tensor) -> Tensor:
        """[B, Hq, L], of what an op gives, which keeps two statistics of a row where scores may lie far from 0."""
        return lse.sum(0) if lse.dim() == 4 else lse.contiguous()

    def _elsewhere(
        self, main: Main, options: CallOptions, operands: Mapping[str, Any], head_dim: int | None
    ) -> Result | None:
        """A call that is traced, or of tensors that lie on several devices; None for any other."""
        if type(main.query) is not Tensor and dtensors.is_sharded(main.query):

            def compute(main: Mapping[str, Any], operands: Mapping[str, Any], options: CallOptions) -> Result:
                return self._run(main["query"], main["key"], main["value"], main["rope"], options, operands, head_dim)

            return dtensors.of_shards(self, compute, main._asdict(), operands, options)
        if not torch.compiler.is_compiling():
            return None
        if options.are_read or main.key.dtype in FP8:
            main, options = conversion.converted(self._variant, main, options, operands)
        out, lse = in_graphs.traced(self, self._internals, main, options, operands, head_dim)
        return (out, self._shown(lse)) if options.return_lse else out

    def _nested(self, query: Any, key: Any, value: Any, options: CallOptions, operands: Mapping[str, Any]) -> Result:
        """A call whose sizes cannot be told apart: of nested tensors, or of none. The error is being handled."""
        if are_jagged(query, key, value):
            return self._jagged(query, key, value, options, operands)
        self._check(query, key, key if value is None else value, operands)
        raise

    def _explain(self, call: Call, options: CallOptions, error: Exception) -> None:
        """Raise WeftError where the call is to blame for the error: torch and Python know no operand's name."""
        if are_jagged(call.query, call.key, call.value):
            if options.are_ragged:
                raise lengths_given_twice(str(self.name), options)
            packed(str(self.name), call.query, call.key, call.value)  # says which dimension is ragged
        self._check(call.query, call.key, call.value, call.operands, options.block_table is not None)
        if options.are_ragged:
            checked(str(self.name), call.query, call.key, options)
        check_call(self, call)
        explain_failure(self, call, error)

    def _jagged(
        self, query: Any, key: Any, value: Any, options: CallOptions, operands: Mapping[str, Any]
    ) -> Result:  # fmt: skip
        """Nested operands [B, H, j, D], packed."""
        if options.are_ragged:
            raise lengths_given_twice(str(self.name), options)
        made = packed(str(self.name), query, key, value)
        cu_q, cu_kv = made.starts
        found = self._run(*made.tensors, None, options.having(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv), operands)
        if isinstance(found, Tensor):
            return made.nested(found)
        out, lse = found
        return made.nested(out), made.nested(lse)

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor | None, operands: Mapping[str, Any], paged: bool = False
    ) -> None:
        """Raise for a call that cannot be put together, naming all that is wrong with it."""
        problems = main_problems(query, key, value, paged) if self.latent is None else []
        check_operands(self, operands, query.device if isinstance(query, Tensor) else None, problems)

    def _check_unknown(
        self, query: Tensor, key: Tensor, value: Tensor | None, options: CallOptions, operands: Mapping[str, Any]
    ) -> None:  # fmt: skip
        """The same for one that is not known at once; of nested sequences, whose call looks at them later, lengths."""
        if not are_jagged(query, key, value):
            self._check(query, key, value, operands, options.block_table is not None)
        elif options.are_ragged:
            raise lengths_given_twice(str(self.name), options)

    def _of_latent(
        self, query: Tensor, cache: Tensor, value: Tensor | None, options: CallOptions, operands: Mapping[str, Any]
    ) -> Result:  # fmt: skip
        """Latent attention: a step of a decode as it is, all else as latent.py says."""
        is_plain, rope = options.form is None and value is options.uk is options.uv is None, options.rope
        if is_plain and latent.is_absorbed(self, self._internals, Main(query, cache, None, rope), options):
            try:  # every step of a decode: what else is wrong with a call fails in it, and is told then
                return self._run(query, cache, None, rope, options, operands)
            except Exception:
                check_latent(self, query, cache, None, None, options.block_table is not None, rope)
                raise

        def over_ranks(main: Main, options: CallOptions) -> Result | None:
            """Caches travel, and are expanded where they arrive."""
            if dtensors.is_sharded(main.query):
                return dtensors.of_sharded_rows(self, main._asdict(), operands, options)
            if functional.scaled_dot_product_attention is not SDPA:
                return in_region.over_ranks(self, main, options, operands)
            return None

        return latent.attended(self, self._run, over_ranks, Main(query, cache, value), options, operands)

    def _reference(self, query: Tensor, key: Tensor, value: Tensor | None = None, *more: Any, **given: Any) -> Any:
        """The definition: the same call in dense, differentiable torch, in any dtype including float64; slow.

        With lengths, each sequence by itself; their values are read, on whatever device they are.
        """
        if more:
            raise by_position(self, more)
        in_region.refuse(self, "reference")
        own = given.keys() & call_options.OPTIONS.keys()
        if undefined := own - DEFINED:
            device = query.device if isinstance(query, Tensor) else None
            check_operands(self, {n: given[n] for n in given if n in undefined or n not in own}, device)
        options, operands = call_options.read(str(self.name), given)
        if options.return_lse:
            self._check_lse()
        variant: Attention = self
        if self._internals.drops or options.seed is not None or options.train is not True:
            variant, operands = self._as_trained(options.train, operands)
            operands = variant._seeded(operands, options.seed, query)
        out, lse = reference.defined(variant, variant._internals, Main(query, key, value), options, operands)
        return (out, lse) if options.return_lse else out

    def _as_called(
        self, operands: Sequence[Tensor | Shape], options: Mapping[str, Any]
    ) -> tuple[Attention, Sequence[Tensor | Shape], dict[str, Any]]:
        """The variant whose kernels a call takes, its operands, and the options that are left to describe."""
        seed, train = options.get("seed"), options.get("train", True)
        call_options.check_values(str(self.name), {"train": train})
        seed_of(str(self.name), seed, seed.device if isinstance(seed, Tensor) else torch.device("cpu"))
        more = options.get("operands")
        options = {n: value for n, value in options.items() if n not in ("seed", "train", "operands")}
        options = options if more is None else call_options.joined(str(self.name), options, more)
        variant, options = self._as_trained(train, options)
        check_dropout(variant, options)
        # a call may say that it has no values
        if self.latent is not None and len(operands) == 3 and operands[2] is None:
            operands = operands[:2]
        operands, options = nested.described(str(self.name), operands, options)
        return variant, operands, variant._internals.read(options)

    # -- the plan -----------------------------------------------------------------------------------------------------
    def plan(self, *operands: Tensor | Shape, device: str | None = None, target: str | None = None,
             schedule: str | Schedule | None = None, form: Form | None = None, **options: Any) -> Plan:  # fmt: skip
        """The schedule as data, for these tensors or for `weft.shape(...)`; needs no GPU.

        device: "h100"-style name of a hardware record; the operands' device or this machine where not given.
        options: values of scalar operands (for the tile counts), or any operand of the call.
        """
        variant, described, options = self._as_called(operands, options)
        return describe.plan(variant, described, device, target, schedule, form, options)

    def explain(self, *operands: Tensor | Shape, device: str | None = None, target: str | None = None,
                schedule: str | Schedule | None = None, form: Form | None = None, **options: Any) -> str:  # fmt: skip
        """The plan for a person: stages, loops, tile classes, bytes (formula and number), predicted time, its bound."""
        variant, described, options = self._as_called(operands, options)
        return describe.explain(variant, described, device, target, schedule, form, options)

    def source(self, *operands: Tensor | Shape, direction: Literal["forward", "backward"] = "forward",
               device: str | None = None, target: str | None = None, schedule: str | Schedule | None = None,
               form: Form | None = None, **options: Any) -> str:  # fmt: skip
        """All that is generated for one direction: Python for a person to read. Where a call launches kernels of
        several modules (those that measure tiles, or make tables by distance), each has a heading, in launch order."""
        variant, described, options = self._as_called(operands, options)
        return describe.source(variant, described, direction, device, target, schedule, form, options)

    def show_mask(self, q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128,
                  path: str | Path | None = None, q_offset: int | None = None, head: int = 0, batch: int = 0,
                  **options: Any) -> Picture:  # fmt: skip
        """A picture of the tile classes (skipped, masked or full tiles): text for a terminal, an SVG in a notebook, and
        by `.svg()`, and a file at `path`, which ends in .png or .svg.

        head, batch: the query head and the row of the batch that it is of. options: the variant's operands, and the
        sizes that its mask may read: heads, kv_heads and head_dim.
        """
        return drawing.show_mask(
            self, q_len, kv_len, block_q, block_kv, path, q_offset, head, batch, self._internals.read(options)
        )


def parse_attention(text: str) -> Attention:
    """The variant that `str(variant)` printed."""
    declared = parse.parse_attention(text)
    return Attention(**{field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)})


def _as_method(function: Any, name: str, defined: bool) -> Any:
    """A method of keyword arguments with the signature and the docstring that follow from the list of options."""
    function.__name__, function.__qualname__ = name, f"Attention.{name}"
    function.__signature__ = signature_of(defined)
    function.__doc__ = f"{function.__doc__.rstrip()}\n\n{doc_of(defined)}        "
    return function


if not TYPE_CHECKING:  # there, api/calls/signatures.py has what is typed of them
    Attention.__call__ = _as_method(Attention._call, "__call__", defined=False)
    Attention.reference = _as_method(Attention._reference, "reference", defined=True)
