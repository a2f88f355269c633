"""`weft.Attention`: the variant of `weft.ir` with its methods: call it, define it, plan it, explain it, print it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import planning, validate
from .compiler.planning.records import Plan, Schedule, Shape
from .compiler.planning.target import check_name
from .ir.attention import Attention as Declaration
from .ir.errors import UnavailableError, WeftError
from .ir.reference import expand_latent, reference
from .runtime.checks import check_q_offset, check_tensors
from .runtime.ops import Ops, ops_of, unwatched
from .runtime.settings import default_target

Result = Tensor | tuple[Tensor, Tensor]
Form = Literal["expanded", "absorbed"]


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Declaration):
    __doc__ = Declaration.__doc__

    if TYPE_CHECKING:  # set when the variant is declared; ClassVar keeps them out of the dataclass's fields
        _ops: ClassVar[Ops]
        _operand_names: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        # Registered here and not at the first call, so that torch.compile finds an op and traces no registration.
        object.__setattr__(self, "_ops", ops_of(self))
        object.__setattr__(self, "_operand_names", tuple(p.name for p in self.parameters))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        return_lse: bool = False,
        q_offset: int | Tensor | None = None,
        target: str | None = None,
        schedule: str | Schedule | None = None,
        deterministic: bool = True,
        uk: Tensor | None = None,
        uv: Tensor | None = None,
        form: Form | None = None,
        kv_lens: Tensor | None = None,
        q_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        block_table: Tensor | None = None,
        **operands: Any,
    ) -> Result:
        """Attention of query [B, Hq, L, D] over key [B, Hkv, T, D] and value [B, Hkv, T, Dv]; out [B, Hq, L, Dv].

        bf16, fp16 or fp32 (float64 too on the CPU); any strides with a contiguous last dim; Hq a multiple of Hkv.
        operands: the variant's own scalars and tensors, by name. With `latent=`: query [B, H, L, nope + rope], cache
        [B, 1, T, rank + rope] in place of key, `uk` [H, rank, nope] and `uv` [H, rank, Dv]; without uk and uv the
        query is latent already and the output is [B, H, L, rank].

        return_lse: also give the log-sum-exp of the visible scores, [B, Hq, L], natural log, float32.
        q_offset: position of query row 0, an int or int32 [B] on the device (which must keep positions within
          0 .. T - 1 where operands are indexed by q_pos); T - L where not given.
        target: "hopper", "triton", "interpret" or "cpu"; from the operands' device where not given.
        schedule: "flash", "streaming", "standard", or a Schedule or its text.
        deterministic: accepted for either value; every kernel's result is bitwise repeatable.
        form: "expanded" or "absorbed", for latent attention.

        A row that sees no key gives 0 and lse -inf, with zero gradients. Raises WeftError for operands that do not
        fit, listing every problem, and UnavailableError where a target cannot compute the call.
        """
        if not (kv_lens is q_lens is cu_seqlens_q is cu_seqlens_kv is block_table is None):
            self._refuse(kv_lens=kv_lens, q_lens=q_lens, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
                         block_table=block_table)  # fmt: skip
        if self.latent is not None:
            return self._latent(query, key, value, uk, uv, form, return_lse, q_offset, target, schedule, operands)
        if uk is not None or uv is not None or form is not None:
            raise WeftError(f"{self.name}: uk, uv and form belong to variants declared with latent=weft.Latent(...)")
        query, key, value = _autocast(query, key, value)
        return self._run(query, key, value, None, return_lse, q_offset, target, schedule, operands)

    def _refuse(self, **options: Tensor | None) -> NoReturn:
        names = [name for name, option in options.items() if option is not None]
        raise UnavailableError(f"{self.name}: the option {names[0]} is not available; pass padded operands and a mask")

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, return_lse: bool,
        q_offset: int | Tensor | None, target: str | None, schedule: str | Schedule | None, operands: Mapping[str, Any],
        head_dim: int | None = None,
    ) -> Result:  # fmt: skip
        if torch.compiler.is_compiling():
            self._check_traced(query, key, value, operands)
            out, lse = self._ops.forward(
                *self._arguments(query, key, value, rope, q_offset, head_dim, target, schedule, operands)
            )
            return (out, lse) if return_lse else out
        target = target or default_target()
        try:
            arguments = self._arguments(query, key, value, rope, q_offset, head_dim, target, schedule, operands)
        except (AttributeError, IndexError, KeyError):  # something is missing, or is no tensor: the checks say what
            self._check(query, key, value, q_offset, target, operands)
            raise
        needs_gradient = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        known = len(operands) == len(self._operand_names) and unwatched(arguments)
        ready = self._ops.variant.ready(arguments) if known else None
        if ready is None:
            self._check(query, key, value, q_offset, target, operands)
            result = self._dispatch(arguments, needs_gradient)
        elif needs_gradient:
            result = self._ops.variant.record(ready, arguments)
        else:
            result = self._ops.variant.repeat(ready, arguments)
        return result if return_lse else result[0]

    def _arguments(
        self, query: Tensor, key: Tensor, value: Tensor | None, rope: Tensor | None, q_offset: int | Tensor | None,
        head_dim: int | None, target: str | None, schedule: str | Schedule | None, operands: Mapping[str, Any],
    ) -> tuple[Any, ...]:  # fmt: skip
        """The arguments of the op."""
        if q_offset is None:
            q_offset = key.shape[2] - query.shape[2]
        q_offset, q_offsets = (0, q_offset) if isinstance(q_offset, Tensor) else (q_offset, None)
        return (
            query, key, value, rope, *[operands[n] for n in self._operand_names], q_offset, q_offsets,
            head_dim or query.shape[3], target or "", "" if schedule is None else str(schedule),
        )  # fmt: skip

    def _check_traced(self, query: Tensor, key: Tensor, value: Tensor | None, operands: Mapping[str, Any]) -> None:
        """What torch.compile can trace of the checks; the op makes the others when it runs."""
        if self.latent is None:
            check_tensors(str(self.name), query, key, value)
        if set(operands) != set(self._operand_names):
            raise WeftError(f"{self.name}: expected the operands {self._operand_names}, got {tuple(operands)}")

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor | None, q_offset: int | Tensor | None, target: str | None,
        operands: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Raise for a call that is not sound, naming all that is wrong with it."""
        if self.latent is None:
            check_tensors(str(self.name), query, key, value)
        validate.check_operands(self, operands, query.device)
        if q_offset is not None:
            check_q_offset(q_offset, query.shape[0], query.device)
        if target is not None:
            check_name(target)

    def _dispatch(self, arguments: tuple[Any, ...], needs_gradient: bool) -> tuple[Tensor, Tensor]:
        _refuse_transforms(str(self.name), [a for a in arguments if isinstance(a, Tensor)])
        if needs_gradient:
            return self._ops.forward(*arguments)
        # Nothing to record: going past the autograd key halves what the dispatch costs the host.
        with torch._C._AutoDispatchBelowAutograd():
            return self._ops.forward(*arguments)

    def _latent(
        self, query: Tensor, cache: Tensor, value: Tensor | None, uk: Tensor | None, uv: Tensor | None,
        form: Form | None, return_lse: bool, q_offset: int | Tensor | None, target: str | None,
        schedule: str | Schedule | None, operands: Mapping[str, Any],
    ) -> Result:  # fmt: skip
        """Both forms of latent attention (DeepSeek-V2, arXiv 2405.04434): the same numbers, computed in two orders."""
        assert self.latent is not None
        if value is not None:
            raise WeftError(
                f"{self.name}: value: latent attention takes query and cache only; its values come from the cache"
            )
        query, cache = _autocast(query, cache)
        if uk is not None and uv is not None:
            uk, uv = _autocast(uk, uv)
        validate.check_latent(self, query, cache, uk, uv)
        rank, rope_dim = self.latent.rank, self.latent.rope
        tail = (return_lse, q_offset, target, schedule, operands)
        if uk is None or uv is None:
            if form == "expanded":
                raise WeftError(f"{self.name}: form='expanded' needs uk and uv")
            return self._run(query, cache, None, None, *tail)
        nope = query.shape[3] - rope_dim
        form = form or planning.latent_form(self, query, cache, uk, uv)
        if form == "expanded":
            latent = cache[..., :rank]
            rope = cache[..., rank:] if rope_dim else None
            return self._run(query, latent @ uk, latent @ uv, rope, *tail)
        if form != "absorbed":
            raise WeftError(f"{self.name}: form: expected 'expanded' or 'absorbed', got {form!r}")
        absorbed = torch.cat([query[..., :nope] @ uk.transpose(1, 2), query[..., nope:]], dim=-1)
        result = self._run(absorbed, cache, None, None, *tail, head_dim=query.shape[3])
        if return_lse:
            return result[0] @ uv, result[1]
        assert isinstance(result, Tensor)
        return result @ uv

    def reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        return_lse: bool = False,
        q_offset: int | Tensor | None = None,
        uk: Tensor | None = None,
        uv: Tensor | None = None,
        **operands: Any,
    ) -> Result:
        """The definition: the same call in dense, differentiable torch, in any dtype including float64; slow."""
        head_dim = query.shape[3]
        if self.latent is not None:
            validate.check_latent(self, query, key, uk, uv)
            if uk is not None and uv is not None:
                query, key, value = expand_latent(self, query, key, uk, uv)
            else:
                value = key[..., : self.latent.rank]
        else:
            check_tensors(str(self.name), query, key, value)
            assert value is not None
        validate.check_operands(self, operands, query.device)
        result = reference(self, query, key, value, operands, q_offset, head_dim)
        return result if return_lse else result[0]

    # -- the plan -----------------------------------------------------------------------------------------------------
    def plan(self, *operands: Tensor | Shape, device: str | None = None, target: str | None = None,
             schedule: str | Schedule | None = None, form: Form | None = None, **options: Any) -> Plan:  # fmt: skip
        """The schedule as data, for these tensors or for `weft.shape(...)`; needs no GPU.

        device: "h100"-style name of a hardware record; the operands' device or this machine where not given.
        options: values of scalar operands (for the tile counts), or any operand of the call.
        """
        return planning.plan(self, operands, device, target, schedule, form, options)

    def explain(self, *operands: Tensor | Shape, device: str | None = None, target: str | None = None,
                schedule: str | Schedule | None = None, form: Form | None = None, **options: Any) -> str:  # fmt: skip
        """The plan for a person: stages, loops, tile classes, bytes (formula and number), predicted time, its bound."""
        return planning.explain(self, operands, device, target, schedule, form, options)

    def source(self, *operands: Tensor | Shape, direction: Literal["forward", "backward"] = "forward",
               device: str | None = None, target: str | None = None, schedule: str | Schedule | None = None,
               form: Form | None = None, **options: Any) -> str:  # fmt: skip
        """The generated module of one direction as text: Python that can be read, edited and loaded."""
        return planning.source(self, operands, direction, device, target, schedule, form, options)

    def show_mask(self, q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128,
                  path: str | Path | None = None, q_offset: int | None = None, head: int = 0, batch: int = 0,
                  **options: Any) -> str:  # fmt: skip
        """A picture of the tile classes (skipped, masked or full tiles): text for a terminal, and a PNG at `path`."""
        return planning.show_mask(self, q_len, kv_len, block_q, block_kv, path, q_offset, head, batch, options)


def _refuse_transforms(name: str, tensors: list[Tensor]) -> None:
    """Derivatives that torch would drop or refuse in its own words: forward mode, and torch.func's grad and jvp."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnavailableError(f"{name}: forward-mode derivatives are not available; use {name}.reference(...)")
    if torch._C._functorch.peek_interpreter_stack() is not None and any(
        torch._C._functorch.is_gradtrackingtensor(t) for t in tensors
    ):
        raise UnavailableError(
            f"{name}: torch.func.grad and its relatives are not available; use torch.autograd.grad or .backward()"
        )


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, float operands take the autocast dtype, as those of torch's own attention do."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors)
