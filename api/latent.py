"""Both forms of latent attention (DeepSeek-V2, arXiv 2405.04434): the same numbers, computed in two orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .calls.internals import Internals, Main, Result, autocast, dequantized
from .compiler.planning.latent_forms import cheaper_form
from .compiler.planning.records import Shape
from .ir.attention import Attention as Declaration
from .ir.errors import Problem, WeftError
from .runtime import descales
from .runtime.call import sequences_of
from .runtime.check.operands import check_absorbed
from .runtime.check.sequences import checked
from .runtime.check.tensors import check_latent, check_no_value
from .runtime.options import CallOptions, Form
from .runtime.rows import cleared


def attended(
    attention: Declaration, run: Callable[..., Result], over_ranks: Callable[[Main, CallOptions], Result | None],
    main: Main, options: CallOptions, operands: Mapping[str, Any],
) -> Result:  # fmt: skip
    """The form that is asked for, else the cheaper one.

    run: computes attention that is not latent. over_ranks: a call whose cache lies on several ranks, None for another.
    """
    assert attention.latent is not None
    query, cache, value, _ = main
    uk, uv, form, rope = options.uk, options.uv, options.form, options.rope
    check_no_value(attention, value)
    query, cache, rope = autocast(query, cache, rope)
    if uk is not None and uv is not None:
        uk, uv = autocast(uk, uv)
    paged = options.block_table is not None
    if (found := over_ranks(Main(query, cache, None), options.having(uk=uk, uv=uv))) is not None:
        return found
    check_latent(attention, query, cache, uk, uv, paged, rope)
    if uk is None or uv is None:
        if form == "expanded":
            what = "form='expanded' needs uk and uv"
            raise WeftError.of(str(attention.name), Problem(option="form", what=what, named=True))
        return run(query, cache, None, rope, options, operands)
    if paged:
        check_absorbed(attention, form, (query, cache, uk, uv))
        form = "absorbed"
    form = form or latent_form(attention, query, cache, uk, uv, operands)
    if form == "expanded":
        return _expanded(attention, run, Main(query, cache, None, rope), options, operands)
    # a product a head, of all batch rows: by rows, copies of uk and uv would be made
    nope = query.shape[3] - attention.latent.rope
    absorbed = torch.cat([torch.einsum("bhln,hrn->bhlr", query[..., :nope], uk), query[..., nope:]], dim=-1)
    result = run(absorbed, cache, None, rope, options, operands, head_dim=query.shape[3])
    if isinstance(result, tuple):
        out, lse = result
        return torch.einsum("bhlr,hrd->bhld", out, uv), lse
    return torch.einsum("bhlr,hrd->bhld", result, uv)


def _expanded(
    attention: Declaration, run: Callable[..., Result], main: Main, options: CallOptions, operands: Mapping[str, Any]
) -> Result:
    """Latent attention with keys and values of all heads."""
    assert attention.latent is not None
    query, cache, uk, uv = main.query, main.key, options.uk, options.uv
    if cache.dtype in descales.FP8:
        real, options, _ = dequantized(str(attention.name), Main(query, cache, None), options, query.dtype)
        cache = real.key
    if main.rope is not None:
        cache = torch.cat([cache, main.rope.to(cache.dtype)], dim=-1)
    if options.are_ragged:  # what lies behind a length must not reach gradients of uk and uv
        sequences = sequences_of(checked(str(attention.name), query, cache, options))
        cache = cleared(cache, sequences, query)  # type: ignore[arg-type]
    rank = attention.latent.rank
    latent, rope = cache[..., :rank], cache[..., rank:] if attention.latent.rope else None
    # one product of all heads, [B, T, rank] by [rank, H * width]: by heads, copies of the cache would be made
    key, value = (torch.einsum("btr,hrd->bhtd", latent[:, 0], w) for w in (uk, uv))
    return run(query, key, value, rope, options, operands)


def is_absorbed(attention: Declaration, own: Internals, main: Main, options: CallOptions) -> bool:
    """Whether shapes are those of a latent query and its cache, contiguous or in pages, and nothing is traced."""
    if attention.scale is None or torch.compiler.is_compiling():
        return False
    query, cache, _, rope = main
    try:
        (batches, _, _, width), (others, heads, rows, columns) = query.shape, cache.shape
        if rope is not None:
            if columns != attention.latent.rank or rope.dtype in descales.FP8:  # type: ignore[union-attr]
                return False
            *beside, rotary = rope.shape
            if beside != [others, heads, rows]:
                return False
            columns += rotary
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return (
        width == columns == own.latent_width and heads == 1 and (batches == others or options.block_table is not None)
    )


def latent_form(
    attention: Declaration, query: Tensor, cache: Tensor, uk: Tensor, uv: Tensor, operands: Mapping[str, Any]
) -> Form:
    """The form of a call: expanded wherever gradients are wanted, absorbed over FP8, else the cheaper one."""
    if cache.dtype in descales.FP8:
        return "absorbed"  # which reads the cache as it is
    if torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in (query, cache, uk, uv, *operands.values())
    ):
        return "expanded"
    sizes = Shape(
        query.shape[0], query.shape[1], query.shape[1], query.shape[2], cache.shape[2], query.shape[3], uv.shape[2]
    )
    assert attention.latent is not None
    return cheaper_form(attention.latent, sizes)
