"""`weft.nn.Attention`: projections around a variant, the same module for training, prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..attention import Attention as Variant
from ..calls.dtensors import is_sharded, replicated
from ..ir.errors import WeftError, collected, counted, shown
from ..ir.expr import Load, Symbol, symbol
from ..ir.numbers import is_int
from ..ir.walk import children, symbols
from ..kv import Step
from ..runtime.check.tensors import MAX_HEAD_DIM
from .rotary import Rotary, Rotation

CAUSAL = Variant(mask=symbol("kv_pos") <= symbol("q_pos"), name="causal")
_PACKED = ("cu_seqlens_q", "cu_seqlens_kv")
_LENGTHS = ("q_lens", "kv_lens", *_PACKED, "block_table")  # what a step brings


class Attention(nn.Module):
    """Attention of x [B, L, width]: queries, keys and values by projections, a variant, and a projection back.

    width: of the input and the output. heads, kv_heads: Hq and Hkv, all of their own where kv_heads is not given.
    head_dim: width / heads where not given. variant: a `weft.Attention` without `latent=`; causal where not given.
    rope: rotary embedding of queries and keys. qk_norm: an RMS norm of each query and key before it, over head_dim, as
    in Qwen 3; True, or its eps. bias: of the projections of query, key and value; out_bias: of the last.
    layer: which layer of a cache is this module's.

    Weights have the names that Llama and Qwen have in transformers: q_proj, k_proj, v_proj, o_proj, q_norm, k_norm.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None, *,
        variant: Variant | None = None, rope: Rotary | None = None, qk_norm: bool | float = False, bias: bool = False,
        out_bias: bool = False, layer: int = 0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        variant = CAUSAL if variant is None else variant
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads}
        problems = positive(sizes if head_dim is None else {**sizes, "head_dim": head_dim})
        if not problems and heads % kv_heads:
            problems.append(f"kv_heads: expected a divisor of {counted(heads, 'head')}, got {kv_heads}")
        if not problems and head_dim is None and width % heads:
            problems.append(f"head_dim: missing; it is width / heads only where {heads} divides {width}")
        if not isinstance(qk_norm, bool) and not (isinstance(qk_norm, float) and qk_norm > 0):
            problems.append(
                f"qk_norm: expected True, False or the eps of the norms, a positive float, got {shown(qk_norm)}"
            )
        problems += making_problems(device, dtype, bias=bias, out_bias=out_bias)
        problems += layer_problems(layer) + variant_problems(variant, latent=False)
        if not problems:
            head_dim = width // heads if head_dim is None else head_dim
            if head_dim > MAX_HEAD_DIM:
                problems.append(f"head_dim: expected at most {MAX_HEAD_DIM}, as calls have it, got {head_dim}")
            problems += [] if rope is None else rope_problems(rope, head_dim)
        if problems or head_dim is None:
            raise collected("nn.Attention", problems)
        self.width, self.heads, self.kv_heads, self.head_dim = width, heads, kv_heads, head_dim
        self.variant, self.rope, self.layer = variant, rope, layer
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(width, heads * head_dim, bias, **made)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias, **made)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias, **made)
        self.o_proj = nn.Linear(heads * head_dim, width, out_bias, **made)
        eps = 1e-6 if qk_norm is True else qk_norm
        self.q_norm = nn.RMSNorm(head_dim, eps, **made) if eps else None
        self.k_norm = nn.RMSNorm(head_dim, eps, **made) if eps else None

    def forward(
        self, x: Tensor, *, cache: Step | None = None, rotation: Rotation | None = None,
        positions: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """x [B, L, width] -> [B, L, width].

        cache: the step of a cache (`cache.extend(...)`) whose new rows are x: their keys and values are appended, and x
        attends to all that its sequences have. rotation: `rope(positions)`, where a model computes it once for all
        layers. positions: of the rows, [B, L] or [L]; those of the step, or from 0 on, where not given. options:
        operands of the variant, and options of its call.
        """
        check_rows("nn.Attention", x, self.width)
        options = options_of(x, cache, options)
        query, key, value = (p(x).unflatten(2, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if query.shape[2] != self.heads or key.shape[2] != self.kv_heads:
            self._check_part(query.shape[2], key.shape[2])
        if self.q_norm is not None and self.k_norm is not None:
            query, key = normed(self.q_norm, query), normed(self.k_norm, key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.rope is not None:
            if rotation is None:
                rotation = rotation_of(self.rope, x, cache, positions, options)
            check_rotation("nn.Attention", rotation, x, self.rope)
            if is_sharded(query):
                rotation = replicated(rotation[0], query), replicated(rotation[1], query)
            query, key = self.rope.rotate(query, rotation), self.rope.rotate(key, rotation)
        if self.variant.canonical.drops:
            options.setdefault("train", self.training)
        if cache is not None:
            cache.append(self.layer, key, value)
            out = cache.attend(self.layer, self.variant, query, **options)
        else:
            out = self.variant(query, key, value, **options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _check_part(self, heads: int, kv_heads: int) -> None:
        """Raise where projections that give so many heads, as parallelize_module leaves of them, are no part."""
        given = f"{counted(heads, 'head')} and {counted(kv_heads, 'key head')}"
        got = f"nn.Attention: projections give {given} of {self.heads} and {self.kv_heads}"
        told = "use module.shard(rank, ranks), or ColwiseParallel(use_local_output=False) for q_proj, k_proj and v_proj"
        if heads * self.kv_heads != kv_heads * self.heads and self.kv_heads != 1:
            raise WeftError(f"{got}, which belong to other queries: {told}")
        if any(symbols(e) & {"head", "kv_head", "group"} for e in self.variant.canonical.expressions):
            raise WeftError(f"{got}, and {self.variant.name} reads the number of a head, which is not known: {told}")

    def shard(self, rank: int, ranks: int) -> Attention:
        """The part of one of `ranks` devices, with heads / ranks heads: the sum of all parts' outputs is the whole's.

        Rank r has rows r * n / ranks on of the weights and biases of q_proj, k_proj and v_proj (n rows, whole heads).
        It has the same columns of o_proj.weight, and the norms. o_proj.bias is rank 0's alone. Where there are fewer
        key heads than ranks, ranks / kv_heads neighbours have the same one. Weights are views.

        A variant whose operands are indexed by heads is called with the part of them that belongs to these heads.
        Refused where it computes with the number of a head, as a part counts its heads from 0.
        """
        check_shard("nn.Attention", self.variant, self.heads, rank, ranks)
        kv_ranks = min(ranks, self.kv_heads)
        if ranks % kv_ranks or self.kv_heads % kv_ranks:
            raise WeftError(
                f"nn.Attention.shard: expected ranks that divide, or are a multiple of, {self.kv_heads} key heads, got "
                f"{ranks}"
            )
        kv_rank = rank * kv_ranks // ranks
        state = self.state_dict(keep_vars=False)
        for name in ("q_proj", "k_proj", "v_proj"):
            part = (rank, ranks) if name == "q_proj" else (kv_rank, kv_ranks)
            for kind in ("weight", "bias"):
                if (full := state.get(f"{name}.{kind}")) is not None:
                    state[f"{name}.{kind}"] = full.chunk(part[1], 0)[part[0]]
        state["o_proj.weight"] = state["o_proj.weight"].chunk(ranks, 1)[rank]
        has_bias = state.pop("o_proj.bias", None) if rank else state.get("o_proj.bias")
        made = Attention(
            self.width, self.heads // ranks, self.kv_heads // kv_ranks, self.head_dim, variant=self.variant,
            rope=self.rope, qk_norm=self.q_norm.eps or True if self.q_norm is not None else False,
            bias=self.q_proj.bias is not None, out_bias=has_bias is not None and rank == 0, layer=self.layer,
            device="meta",
        )  # fmt: skip
        return assigned(made, state, self.training)

    def extra_repr(self) -> str:
        return (
            f"{self.variant.name}, heads={self.heads}, kv_heads={self.kv_heads}, rope={self.rope}, layer={self.layer}"
        )


# -- what modules have in common ---------------------------------------------------------------------------------------
def positive(sizes: Mapping[str, object]) -> list[str]:
    """What of these is no positive int, or more than a dimension of a tensor."""
    most = 2**31 - 1
    return [
        f"{name}: expected a positive int{' below 2**31' * (is_int(size) and size > most)}, got {shown(size)}"
        for name, size in sizes.items()
        if not is_int(size, 1, most)
    ]


def making_problems(device: object, dtype: object, **flags: object) -> list[str]:
    """What weights cannot be made with. flags: what is True or False, by name."""
    unclear = {n: flag for n, flag in flags.items() if not isinstance(flag, bool)}
    problems = [f"{n}: expected True or False, got {shown(flag)}" for n, flag in unclear.items()]
    try:
        torch.device("cpu" if device is None else device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError):
        problems.append(f"device: expected a device such as 'cuda', or None, got {shown(device)}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        problems.append(f"dtype: expected one of floats such as torch.bfloat16, or None, got {shown(dtype)}")
    return problems


def layer_problems(layer: object) -> list[str]:
    if is_int(layer, least=0):
        return []
    return [f"layer: expected the number of a cache's layer, an int from 0 on, got {shown(layer)}"]


def variant_problems(variant: object, latent: bool) -> list[str]:
    if not isinstance(variant, Variant):
        return [f"variant: expected a weft.Attention, got {shown(variant)}"]
    if latent and variant.latent is None:
        return [f"variant: expected one with latent=, got {variant.name} without; nn.Attention takes it"]
    if not latent and variant.latent is not None:
        return [f"variant: expected one without latent=, got {variant.name}; nn.LatentAttention takes it"]
    return []


def rope_problems(rope: object, columns: int) -> list[str]:
    if not isinstance(rope, Rotary):
        return [f"rope: expected a weft.nn.Rotary, got {shown(rope)}"]
    return [f"rope: expected at most {counted(columns, 'column')}, got {rope.dim}"] if rope.dim > columns else []


def rotation_of(
    rope: Rotary, x: Tensor, cache: Step | None, positions: Tensor | None, options: Mapping[str, Any]
) -> Rotation:
    """The rotation of the rows of x [B, L, width], where none was given."""
    if cache is not None:
        return rope(cache.positions if positions is None else positions, cache.kv_lens)
    lengths = options.get("kv_lens")
    starts = next((options[n] for n in _PACKED if options.get(n) is not None), None)
    if positions is None:
        moved = [n for n in (*_PACKED, "q_offset") if options.get(n) is not None]
        moved += ["q_lens"] if options.get("q_lens") is not lengths else []  # the last query stands at the last key
        if moved:
            raise WeftError(f"nn: positions: missing; with {', '.join(moved)} rows do not count from 0: give [B, L]")
        positions = torch.arange(x.shape[1], device=x.device)
    if starts is not None:
        return rope(positions.view(1, -1), starts.diff())
    return rope(positions, x.shape[1] if lengths is None else lengths)


def check_rotation(name: str, rotation: Rotation, x: Tensor, rope: Rotary) -> None:
    """Raise where it is not that of the rows of x: torch would take that of one row for all of them."""
    batch, length, _ = x.shape
    rows = (1, length, rope.dim // 2)
    if (
        isinstance(rotation, (tuple, list))
        and len(rotation) == 2
        and all(
            isinstance(t, Tensor)
            and not t.is_nested
            and t.dim() == 4
            and t.shape[1:] == rows
            and t.shape[0] in (1, batch)
            for t in rotation
        )
    ):
        return
    pair = rotation if isinstance(rotation, (tuple, list)) else (rotation,)
    got = " and ".join(str(list(t.shape)) if is_dense(t) else shown(t) for t in pair)
    raise WeftError(
        f"{name}: positions, rotation: expected positions [{length}] or [{batch}, {length}], of each row of x, or the "
        f"rotation of these by {rope}, {[batch, *rows]}, got a rotation {got}"
    )


def is_dense(x: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with sizes: nested ones have none."""
    return isinstance(x, Tensor) and not x.is_nested


def normed(norm: nn.RMSNorm, rows: Tensor) -> Tensor:
    """The norm in the dtype of its weight: under autocast rows have another, and keep it."""
    given = rows.to(norm.weight.dtype)
    if is_sharded(rows):
        weight = replicated(norm.weight, rows)
        found = nn.functional.rms_norm(given, tuple(norm.normalized_shape), weight, norm.eps)
    else:
        found = norm(given)
    return found.to(rows.dtype)


def check_rows(name: str, x: Tensor, width: int) -> None:
    """Raise for what is no x [B, L, width]."""
    if not is_dense(x) or x.dim() != 3 or x.shape[2] != width:
        got = list(x.shape) if is_dense(x) else "a nested tensor" if isinstance(x, Tensor) else type(x).__name__
        raise WeftError(f"{name}: x: expected [batch, length, {width}], got {got}")


def options_of(x: Tensor, cache: Step | None, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call whose queries and keys are the rows of x, or are appended to a cache; raises for others.

    Of the lengths of queries and keys one alone stands for both: without a cache they are the same rows.
    """
    if options.get("return_lse", False) is not False:
        raise WeftError("nn: return_lse: a module gives its output alone; call its variant to have the log-sum-exp")
    if cache is not None:
        check_cache(cache, x.shape[0], x.shape[1], options)
        return options
    given = [options[n] for n in ("q_lens", "kv_lens") if options.get(n) is not None]
    return {**options, "q_lens": given[0], "kv_lens": given[0]} if len(given) == 1 else options


def check_cache(cache: Step, batch: int, length: int, options: Mapping[str, Any]) -> None:
    """Raise for what no step of a cache is called with."""
    if not isinstance(cache, Step):
        raise WeftError(f"nn: cache: expected a step of a cache, cache.extend(...), got {type(cache).__name__}")
    taken = [n for n in _LENGTHS if options.get(n) is not None]
    if taken:
        raise WeftError(f"nn: {', '.join(taken)}: expected none beside cache=, which brings its own")
    number = cache.slots.shape[0]
    if number != batch and cache.cu_seqlens_q is not None:
        raise WeftError(
            f"nn: x: expected [1, {cache.length}, width], as the step is packed, got {counted(batch, 'row')}"
        )
    if number != batch:
        raise WeftError(f"nn: cache: expected a step of {counted(batch, 'sequence')}, as x has rows, got {number}")
    if length != cache.length:
        raise WeftError(f"nn: x: expected [batch, {cache.length}, width], the new rows of the step, got {length}")


def check_shard(name: str, variant: Variant, heads: int, rank: int, ranks: int) -> None:
    """Raise for a part that cannot be computed by itself."""
    if not is_int(ranks, least=1) or heads % ranks or not is_int(rank, 0, ranks - 1):
        raise WeftError(
            f"{name}.shard: expected ranks that divide {counted(heads, 'head')} and a rank below, got "
            f"{shown(rank)} of {shown(ranks)}"
        )
    if ranks > 1 and any(_computes_with_heads(e) for e in variant.canonical.expressions):
        raise WeftError(
            f"{name}.shard: {variant.name} computes with the number of a head, and a part counts its heads from 0; put "
            "what depends on it into an operand, x[head], and give each part its own"
        )


def _computes_with_heads(node: Any) -> bool:
    """Whether the number of a head is read other than as an index by itself."""
    if isinstance(node, Symbol):
        return node.name in ("head", "kv_head")
    below = children(node)
    if isinstance(node, Load):
        below = tuple(index for index in below if not isinstance(index, Symbol))
    return any(map(_computes_with_heads, below))


def assigned(made: Any, state: Mapping[str, Tensor], training: bool) -> Any:
    """A module with these weights in place of its own."""
    made.load_state_dict(dict(state), assign=True)
    return made.train(training)
