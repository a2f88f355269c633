"""What a call must give: out, lse and gradients in float64, and how far off a kernel may be at every element.

Attention is written out over the visible pairs alone, so that hidden ones cannot matter. The error allowed has three
parts: twice the error of plain dense torch in the dtype that scores are computed in; the roundings that matrix products
of tiles make, each weighed by the absolute values that it meets; and the rounding of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import (
    DTYPES,
    Built,
    Call,
    cleaned,
    environment,
    existing,
    row_environment,
    sink_rows,
    symbol_values,
)
from .dense import FAST_TANH, FP32, FP64, Environment, Gather, Precision, Undefined, Value, evaluate
from .philox import kept
from .tree import Node, Num, Scalar

EPS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDINGS = 6.0  # of a product of tiles, in units of eps: sums in another order, weights rescaled
HOPELESS = 2.0**-5  # a score that may be off by more: only what plain torch makes of it says what to expect
COARSEST = 0.25  # the same where 16 bits are kept, or functions approximated, on the way to it
NEGLIGIBLE = 2.0**-40  # a weight that no rounding of its score makes matter
LARGEST = 2.0**13  # of a log-sum-exp whose rounding is allowed for; beyond, weights must not be taken from it


@dataclass(frozen=True)
class Want:
    """One result: what it is, and how far from that a kernel may be."""

    exact: Tensor
    allowed: Tensor


@dataclass
class Dense:
    """Attention of one call, written out in one dtype."""

    leaves: dict[str, Tensor]  # as they are given
    query: Tensor  # [B, H, L, D]
    key: Tensor  # [B, H, T, D], a head for each query head
    value: Tensor
    pairs: tuple[Tensor, ...]  # batch, head, row, column of visible pairs
    products: Tensor  # q.k of visible pairs
    scores: Tensor
    bound: Tensor | None  # of the rounding of scores
    weights: Tensor  # [B, H, L, T]
    kept: Tensor | float  # what dropout multiplies them by, [B, H, L, T] or 1
    out: Tensor
    lse: Tensor
    gathers: list[Gather]
    sink: Sink | None


@dataclass
class Sink:
    """The logit of each head that no value belongs to."""

    logits: Tensor  # [B, H]
    bound: Tensor | None  # of its rounding, [B, H, L]
    weights: Tensor  # [B, H, L]
    gathers: list[Gather]  # of entries of `rows`
    rows: tuple[Tensor, ...]  # batch row, head and row of those that a sequence has


def multiplies_fp8(call: Call) -> bool:
    """Whether hopper may multiply the operands as they are stored."""
    formats = [kind for name, kind, _ in call.fp8 if name in ("query", "key", "value")]
    return call.target == "hopper" and formats == ["e4m3"] * 3


def precision_of(call: Call) -> Precision:
    if call.dtype == "float64":
        return FP64
    return FAST_TANH if call.target in ("triton", "hopper") and "16" in call.dtype else FP32


def visible_pairs(built: Built, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Where the mask is True; raises Undefined where rounding may decide that."""
    call = built.call
    env = environment(built, tensors)
    env.precision = precision_of(call)
    seen = evaluate(built.variant.mask, env).value
    if call.lens is not None:
        exist = existing(call, seen.device)
        seen = torch.zeros_like(exist).masked_scatter(exist, seen)
    return seen.view(call.batch, call.heads, call.q_len, call.kv_len).nonzero(as_tuple=True)


def expected(built: Built, dout: Tensor, dlse: Tensor | None) -> dict[str, Want]:
    """What the call must give, by name: out, lse where asked for, and d<name> for each gradient that is wanted."""
    built = cleaned(built)
    call = built.call
    exact64 = {n: t.to(torch.float64) if t.is_floating_point() else t for n, t in built.tensors.items()}
    pairs = visible_pairs(built, exact64)
    symbols = _symbols_of(built, pairs)
    exact = _dense(built, pairs, symbols, torch.float64, precision_of(call))
    _refuse_wild(exact)
    _refuse_coarse(built, exact)
    _refuse_undecided(built, exact)
    results = _results(exact, call, dout, dlse)
    # plain torch in float64 is what is expected: it has no error to compare with, but rounds as a kernel does
    plain = results
    if call.dtype != "float64":
        plain = _results(_dense(built, pairs, symbols, torch.float32, None), call, dout, dlse)
    roundings = _roundings(built, exact, dout, dlse)
    _refuse_overflow(results, plain, roundings)
    if call.dtype == "float64":
        roundings = {name: 2 * allowed for name, allowed in roundings.items()}
    return {name: _want(name, built, results[name], plain[name], roundings[name], exact) for name in results}


def _dense(
    built: Built, pairs: tuple[Tensor, ...], symbols: dict[str, Tensor | int], dtype: torch.dtype,
    precision: Precision | None,
) -> Dense:  # fmt: skip
    call, latent = built.call, built.variant.latent
    leaves = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in built.tensors.items()}
    for name in call.wanted:
        leaves[name] = leaves[name].clone().requires_grad_()
    if latent is None:
        query, key, value = (leaves[n] for n in ("query", "key", "value"))
        repeats = call.heads // call.kv_heads
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    else:
        query, key, value = _latent(built, leaves)
    b, h, i, j = pairs
    products = (query @ key.transpose(-1, -2))[b, h, i, j]
    sizes = 0.0 if precision is None else (query.abs() @ key.abs().transpose(-1, -2))[b, h, i, j]
    env = Environment(symbols, None, dict(call.scalars), leaves, len(b), dtype, precision)
    bound = None if precision is None else (4 * precision.eps * sizes + _of_rounded_keys(built, leaves, pairs)).detach()
    env.score = _scaled(built, Value(products, bound), env)
    scores = evaluate(built.variant.score, env)
    scores = scores if scores.value.is_floating_point() else Value(scores.value.to(dtype), _zeros(scores, precision))
    logits, sink_env, rows = _sinks(built, leaves, dtype, precision)
    shape = (call.batch, call.heads, call.q_len, call.kv_len)
    if built.variant.normalizer == "softmax":
        weights, lse = _softmax(scores.value, pairs, shape, None if logits is None else logits.value)
    else:
        weights = _by_pair(built.variant.normalizer, scores.value, pairs, shape)
        lse = torch.zeros(shape[:-1], dtype=dtype, device=weights.device)  # of none
    sink = None
    if logits is not None:
        of_sink = torch.exp((logits.value - lse).detach().nan_to_num(nan=-math.inf, neginf=-math.inf))
        sink = Sink(logits.value, logits.bound, of_sink, sink_env.gathers, rows)
    factor = _kept(built, env, pairs, shape)
    factor = factor.to(dtype) if isinstance(factor, Tensor) else factor
    return Dense(leaves, query, key, value, pairs, products, scores.value, scores.bound, weights, factor,
                 (weights * factor) @ value, lse, env.gathers, sink)  # fmt: skip


def _kept(built: Built, env: Environment, pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor | float:
    """What dropout multiplies weights by, float64 [B, H, L, T]; 1 where nothing is dropped."""
    share, call = built.variant.dropout, built.call
    if share is None or not call.train:
        return 1.0
    dropout = dict(call.scalars)[share.name] if isinstance(share, Scalar) else share.value
    symbols = [torch.as_tensor(env.symbols[n]) for n in ("batch", "head", "q_pos", "kv_pos")]
    factors = torch.zeros(shape, dtype=torch.float64, device=pairs[0].device)
    return factors.index_put(pairs, kept(call.drop_seed, float(dropout), *symbols))


def _sinks(
    built: Built, leaves: dict[str, Tensor], dtype: torch.dtype, precision: Precision | None
) -> tuple[Value | None, Environment, tuple[Tensor, ...]]:
    """The sink of every row [B, H, L], -inf in those of no sequence; the environment of those of one, and these."""
    call, device = built.call, built.tensors["query"].device
    rows = sink_rows(call, device)
    env = row_environment(built, rows, leaves, dtype, precision)
    if built.variant.sink is None:
        return None, env, rows
    found = evaluate(built.variant.sink, env)
    if not found.value.is_floating_point():
        found = Value(found.value.to(dtype), _zeros(found, precision))
    if bool((found.value.isnan() | (found.value == math.inf)).any()):
        raise Undefined("a sink is NaN or infinite")
    shape = (call.batch, call.heads, call.q_len)
    logits = torch.full(shape, -math.inf, dtype=dtype, device=device).index_put(rows, found.value)
    bound = None if found.bound is None else torch.zeros(shape, dtype=found.bound.dtype, device=device)
    return Value(logits, None if bound is None else bound.index_put(rows, found.bound)), env, rows


def _zeros(x: Value, precision: Precision | None) -> Tensor | None:
    return None if precision is None else torch.zeros(x.value.shape, dtype=torch.float64, device=x.value.device)


def _latent(built: Built, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of every head, from one vector a token."""
    latent = built.variant.latent
    assert latent is not None
    query, cache = leaves["query"], leaves["cache"]
    heads = built.call.heads
    if "uk" not in leaves:
        return query, cache.expand(-1, heads, -1, -1), cache[..., : latent.rank].expand(-1, heads, -1, -1)
    narrow, rope = cache[..., : latent.rank], cache[..., latent.rank :]
    key = torch.cat([narrow @ leaves["uk"], rope.expand(-1, heads, -1, -1)], -1)
    return query, key, narrow @ leaves["uv"]


def rounds_keys(built: Built) -> bool:
    """Whether keys, or queries where uk is folded into them, are made by a product and kept in 16 bits."""
    return "16" in built.call.dtype and "uk" in built.tensors


def _of_rounded_keys(built: Built, leaves: dict[str, Tensor], pairs: tuple[Tensor, ...]) -> Tensor:
    """How far that puts q.k off: by the larger of the two forms, where the call leaves it to Weft."""
    b, h, i, j = pairs
    if not rounds_keys(built):
        return torch.zeros(len(b), dtype=leaves["query"].dtype, device=b.device)
    latent, uk = built.variant.latent, leaves["uk"]
    assert latent is not None
    nope = built.call.dim - latent.rope
    query, narrow = leaves["query"][..., :nope], leaves["cache"][..., : latent.rank]
    sizes = {
        "expanded": query.abs() @ (narrow @ uk).abs().mT,
        "absorbed": (query @ uk.mT).abs() @ narrow.abs().mT,
    }
    size = sizes.get(built.call.form or "", torch.maximum(*sizes.values()))
    return (2 * EPS[built.call.dtype] * size)[b, h, i, j]


def _of_kept_scores(call: Call, scores: Tensor) -> Tensor:
    """How far off scores are that schedule standard keeps in memory, in the operands' dtype."""
    return EPS[call.dtype] * _finite(scores).abs() if call.schedule == "standard" else torch.zeros_like(scores)


def _refuse_coarse(built: Built, dense: Dense) -> None:
    """Plain torch keeps neither keys nor scores in 16 bits: where that may change a weight by much, nothing says what
    to expect."""
    if "16" not in built.call.dtype or dense.bound is None:
        return
    bound = _of_kept_scores(built.call, dense.scores.detach())
    if rounds_keys(built):
        bound = bound + dense.bound
    if bool(((bound > COARSEST) & (dense.weights.detach()[dense.pairs] > NEGLIGIBLE)).any()):
        raise Undefined("scores that 16 bits put far off")


def _symbols_of(built: Built, pairs: tuple[Tensor, ...]) -> dict[str, Tensor | int]:
    """Every symbol but the score, of these pairs."""
    call = built.call
    b, h, i, j = pairs
    flat = ((b * call.heads + h) * call.q_len + i) * call.kv_len + j
    symbols = symbol_values(built.variant, call, b.device)
    return {n: v[flat] if isinstance(v, Tensor) else v for n, v in symbols.items()}


def _scaled(built: Built, products: Value, env: Environment) -> Value:
    """The symbol `score`: scale * q.k."""
    scale: Node = Num(1.0 / math.sqrt(built.call.dim)) if built.variant.scale is None else built.variant.scale
    found = evaluate(scale, env)
    factor = found.value.to(env.dtype)
    if products.bound is None:
        return Value(products.value * factor)
    own = torch.zeros_like(products.bound) if found.bound is None else found.bound
    rounded = torch.where(products.bound == 0, 0.0, env.precision.eps * 4)  # type: ignore[union-attr]
    size = products.value.detach().abs()
    return Value(
        products.value * factor, (products.bound * factor.abs() + size * (own + rounded * factor.abs())).detach()
    )


def _softmax(
    scores: Tensor, pairs: tuple[Tensor, ...], shape: tuple[int, ...], sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights [B, H, L, T] and lse [B, H, L]; 0 and -inf for a row whose scores are all -inf, or that sees nothing.

    sink: [B, H, L], one more logit of every row, whose weight is left out.
    """
    dense = torch.full(shape, -math.inf, dtype=scores.dtype, device=scores.device).index_put(pairs, scores)
    if sink is not None:
        more = torch.cat([dense, sink[..., None]], -1)
        places = torch.isfinite(more).nonzero(as_tuple=True)
        weights, lse = _softmax(more[places], places, tuple(more.shape), None)
        return weights[..., :-1], lse
    if shape[-1] == 0:
        return dense, dense.new_full(shape[:-1], -math.inf)
    top = dense.detach().amax(-1, keepdim=True)
    empty = top == -math.inf
    powers = torch.exp(dense - top.masked_fill(empty, 0.0))
    total = powers.sum(-1, keepdim=True)
    lse = torch.where(empty, -math.inf, top + torch.log(total.masked_fill(empty, 1.0)))
    return powers / total.masked_fill(empty, 1.0), lse[..., 0]


def _by_pair(normalizer: str, scores: Tensor, pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """Weights [B, H, L, T] that depend on the score of their pair alone, 0 of hidden ones."""
    weights = torch.sigmoid(scores) if normalizer == "sigmoid" else torch.where(scores > 0.0, scores, 0.0)
    return torch.zeros(shape, dtype=scores.dtype, device=scores.device).index_put(pairs, weights)


def _refuse_undecided(built: Built, dense: Dense) -> None:
    """Where rounding may decide on which side of 0 a score lies, a gradient through relu may be there or not."""
    if built.variant.normalizer != "relu" or not built.call.wanted:
        return
    assert dense.bound is not None
    scores = dense.scores.detach()
    undecided = scores.abs() <= dense.bound + _of_kept_scores(built.call, scores)
    if bool((undecided & ((scores != 0) | (dense.bound > 0))).any()):
        raise Undefined("a score whose sign rounding decides")


def _refuse_wild(dense: Dense) -> None:
    scores = dense.scores.detach()
    if bool((scores.isnan() | (scores == math.inf)).any()):
        raise Undefined("a visible score is NaN or infinite")
    if bool((scores.isfinite() & (scores < -3.4028235e38)).any()):
        raise Undefined("a score beyond float32")
    usual = scores[scores > -5e3]
    if len(usual) and float(usual.abs().max()) > 1e3:
        raise Undefined("scores beyond 1000")


def _refuse_overflow(results: dict[str, Tensor], plain: dict[str, Tensor], roundings: dict[str, Tensor]) -> None:
    """Where what is summed leaves float32, as derivatives of numbers near its largest do, plain torch's too."""
    for name, exact in results.items():
        if bool((exact.isfinite() & ~plain[name].isfinite()).any()) or bool((roundings[name] > 2.0**100).any()):
            raise Undefined(f"{name} is made of numbers beyond float32")


def _results(dense: Dense, call: Call, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """out, lse and gradients, in float64 whatever they were computed in."""
    results = {"out": dense.out.detach(), "lse": dense.lse.detach()}
    if call.wanted:
        dtype = dense.out.dtype
        outputs, weights = [dense.out], [dout.to(dtype)]
        if dlse is not None:
            outputs.append(dense.lse)
            weights.append(dlse.to(dtype))
        leaves = [dense.leaves[n] for n in call.wanted]
        usable = [o for o in outputs if o.requires_grad]
        found = [None] * len(leaves)
        if usable:
            kept = [w for o, w in zip(outputs, weights) if o.requires_grad]
            found = torch.autograd.grad(usable, leaves, kept, allow_unused=True, retain_graph=True)
        for name, leaf, gradient in zip(call.wanted, leaves, found):
            results[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    if not call.lse:
        del results["lse"]
    return {n: t.detach().to(torch.float64) for n, t in results.items()}


# -- how far off a kernel may be -------------------------------------------------------------------------------------
def _roundings(built: Built, dense: Dense, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """The allowance for roundings inside of kernels, for each result."""
    call = built.call
    eps = EPS["float64" if call.dtype == "float64" else "float32"]
    product_eps = EPS[call.dtype]  # kernels round weights, and their gradients, to the operands' dtype
    has_fp8_value = call.target != "cpu" and "value" in [name for name, *_ in call.fp8]
    if has_fp8_value and built.variant.normalizer != "softmax":
        product_eps = max(product_eps, EPS["bfloat16"])  # in which such weights are
    if multiplies_fp8(call):
        product_eps = max(product_eps, 2.0**-4)  # e4m3 has three digits behind the first
    p = dense.weights.detach()
    coarse = rounds_keys(built) or precision_of(call) is FAST_TANH or multiplies_fp8(call)
    off = _off(dense, eps, call, COARSEST if coarse else HOPELESS)
    if multiplies_fp8(call):  # sums of Hopper's products of FP8 keep 14 bits
        off = off + 2.0**-12 * _slopes(dense, dense.query.detach().abs() @ dense.key.detach().abs().mT)
    terms = max(call.q_len * (call.heads // call.kv_heads), call.kv_len)  # a sum of equal ones drifts
    sink_p, sink_off = _of_sink(dense, eps)
    of_sum = ((p * off.expm1()).sum(-1) + sink_p * sink_off.expm1())[..., None]
    softmax, steps = built.variant.normalizer == "softmax", built.variant.normalizer == "relu"
    rounded = ROUNDINGS * product_eps + eps * terms / 4
    if steps:  # a weight is the score, and its slope 1 or 0
        share, slope = p * rounded + off * ((p > 0) | (off > p)), (p > 0).to(p.dtype)
    else:
        share, slope = p * (rounded + off.expm1() + (of_sum if softmax else 0.0)), p
    # kernels take what comes near the smallest normal numbers for 0
    tiny = 2.0**-120 if call.target == "cpu" else 2.0**-125
    if call.target != "cpu" and (call.dtype == "float16" or has_fp8_value):  # weights are fp16, as values become
        tiny = 2.0**-24
    share = share + tiny * (p > 0)
    if multiplies_fp8(call) and p.shape[-1]:  # the least number of e4m3, beside 2**8 of the largest weight
        share = share + 2.0**-17 * p.amax(-1, keepdim=True) * (p > 0)
    moved = slope * rounded if steps else share
    query, key, value = (t.detach().abs() for t in (dense.query, dense.key, dense.value))
    out = (share * dense.kept) @ value + _of_projected_values(built, dense, eps)
    found = {"out": out, "lse": (p * off).sum(-1) + sink_p * sink_off + 4 * eps * (1 + _finite(dense.lse).abs())}
    if multiplies_fp8(call):  # the sum of a row is that of its rounded weights
        found["lse"] = found["lse"] + 2.0**-4
    if call.target == "cpu" and "16" in call.dtype:  # torch's own attention has short exponentials: off by 6.3e-5
        found["lse"] = found["lse"] + 2.0**-13
    if precision_of(call) is FAST_TANH:  # a factor of scores that lie far from 0 may have its error too
        found["lse"] = found["lse"] + _of_pairs(dense, dense.bound, p)
    if not call.wanted:
        return found
    dout = dout.to(torch.float64)
    dweights = (dout.abs() @ value.transpose(-1, -2)) * dense.kept
    delta = (dout.abs() * dense.out.detach().abs()).sum(-1, keepdim=True) * softmax
    if dlse is not None:
        delta = delta + dlse.to(torch.float64).abs()[..., None]
    own = EPS[call.dtype]  # delta is a sum over the rounded output, whose own terms may cancel
    least = own * torch.finfo(DTYPES[call.dtype]).smallest_normal  # what comes near 0 is rounded by as much
    delta_off = ROUNDINGS * own * delta + (dout.abs() * (out + least)).sum(-1, keepdim=True) * softmax
    dscores = moved * (dweights + delta) + p * delta_off + tiny * (p > 0)
    dproducts = dscores * _slopes(dense, dense.products)
    # a slope may be what is left of terms of size 1, as 1 - tanh(x)^2 is
    dproducts = dproducts + ROUNDINGS * eps * slope * (dweights + delta)
    dproducts = dproducts + tiny * (p > 0)  # it is kept in the operands' dtype, after the slope
    main = {"query": dproducts @ key, "key": dproducts.mT @ query, "value": (share * dense.kept).mT @ dout.abs()}
    found |= {f"d{n}": t for n, t in _of_leaves(built, dense, main).items()}
    for name in call.wanted:
        if f"d{name}" not in found:
            # the definition sums gradients of what it reads in the operand's own dtype, as torch's indexing does
            read = dict(call.tensors).get(name)
            eps_of_sums = EPS[read.dtype] if read is not None and call.target == "reference" else 0.0
            summed = ROUNDINGS * eps_of_sums * slope * (dweights + delta)
            found[f"d{name}"] = _of_operand(name, dense, dscores + summed)
            if dense.sink is not None:
                rows = sink_p * (ROUNDINGS * (eps + eps_of_sums) + eps * terms / 4 + sink_off.expm1() + of_sum[..., 0])
                dsinks = (rows + tiny * (sink_p > 0)) * delta[..., 0] + sink_p * delta_off[..., 0]
                found[f"d{name}"] = found[f"d{name}"] + _of_sinks_operand(name, dense, dsinks)
    return found


def _of_sink(dense: Dense, eps: float) -> tuple[Tensor, Tensor]:
    """The weight of the sink in each row, and how far its exponent may be off, [B, H, L]."""
    if dense.sink is None:
        return torch.zeros_like(dense.lse.detach()), torch.zeros_like(dense.lse.detach())
    assert dense.sink.bound is not None
    own = dense.sink.bound.detach() + 2 * eps * _finite(dense.sink.logits.detach()).abs().clamp(max=LARGEST)
    of_lse = 2 * eps * (1 + torch.clamp(_finite(dense.lse.detach()).abs(), max=LARGEST))
    return dense.sink.weights, own.clamp(max=8.0) + of_lse


def _of_sinks_operand(name: str, dense: Dense, dsinks: Tensor) -> Tensor:
    """The allowance of a gradient through the sink, [B, H, L], scattered to the places that were read."""
    leaf, sink = dense.leaves[name], dense.sink
    assert sink is not None
    total = torch.zeros(leaf.numel(), dtype=torch.float64, device=leaf.device)
    reads = [g for g in sink.gathers if g.name == name and len(g.pairs)]
    if reads and sink.logits.requires_grad:
        finite = torch.where(sink.logits.detach().isfinite(), 1.0, 0.0)
        values = [g.values for g in reads]
        slopes = torch.autograd.grad(sink.logits, values, finite, allow_unused=True, retain_graph=True)
        for gather, slope in zip(reads, slopes):
            if slope is not None:
                total.index_add_(0, gather.places, dsinks[sink.rows][gather.pairs] * slope.abs())
    return total.view(leaf.shape)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _of_pairs(dense: Dense, bound: Tensor | None, weights: Tensor) -> Tensor:
    """The bound of visible pairs, summed over keys by their weights."""
    assert bound is not None
    return (weights * torch.zeros_like(weights).index_put(dense.pairs, bound.detach())).sum(-1)


def _of_projected_values(built: Built, dense: Dense, eps: float) -> Tensor:
    """How far out may be off where values are made by uv: terms that cancel, and what is kept in 16 bits between."""
    latent, call = built.variant.latent, built.call
    if latent is None or "uv" not in dense.leaves:
        return torch.zeros_like(dense.out)
    weights, uv = dense.weights.detach() * dense.kept, dense.leaves["uv"].detach().abs()
    narrow = dense.leaves["cache"].detach()[..., : latent.rank]
    terms = ROUNDINGS * eps * (weights @ narrow.abs()) @ uv
    kept = rounds_keys(built) and call.form != "expanded"
    return terms + 2 * EPS[call.dtype] * (weights @ narrow).abs() @ uv if kept else terms


def _off(dense: Dense, eps: float, call: Call, most: float) -> Tensor:
    """How far the exponent of each pair may be off, [B, H, L, T]: rounding of the score and of its log-sum-exp."""
    assert dense.bound is not None
    scores = _finite(dense.scores.detach()).abs()
    bound = dense.bound.detach() + 2 * eps * scores  # kernels multiply it by log2(e)
    bound = torch.where(bound > most, 0.0, bound) + _of_kept_scores(call, scores)
    bound = bound.clamp(max=8.0)  # beyond it weights are negligible
    pairs = torch.zeros_like(dense.weights).index_put(dense.pairs, bound)
    return pairs + 2 * eps * (1 + torch.clamp(_finite(dense.lse.detach()).abs(), max=LARGEST))[..., None]


def _slopes(dense: Dense, of: Tensor) -> Tensor:
    """|d score / d q.k| of each pair, [B, H, L, T], and a share of the usual one for what cancels in it."""
    slope = torch.zeros_like(dense.weights)
    if dense.scores.requires_grad and len(dense.scores) and of.requires_grad:
        finite = torch.where(dense.scores.detach().isfinite(), 1.0, 0.0)
        found = torch.autograd.grad(dense.scores, of, finite, allow_unused=True, retain_graph=True)[0]
        if found is not None:
            slope = slope.index_put(dense.pairs, found.abs())
    return slope + slope.mean()


def _of_leaves(built: Built, dense: Dense, main: dict[str, Tensor]) -> dict[str, Tensor]:
    """From query, key and value of every head to the tensors that were given."""
    call, latent = built.call, built.variant.latent
    if latent is None:
        shape = (call.batch, call.kv_heads, call.heads // call.kv_heads, call.kv_len, -1)
        if 0 in shape:
            return {n: torch.zeros_like(built.tensors[n], dtype=torch.float64) for n in main}
        return main | {n: main[n].view(shape).sum(2) for n in ("key", "value")}
    if "uk" not in built.tensors:
        return {}
    nope = call.dim - latent.rope
    narrow = dense.leaves["cache"].detach().abs()[..., : latent.rank]
    uk, uv = dense.leaves["uk"].detach().abs(), dense.leaves["uv"].detach().abs()
    dkey, dvalue = main["key"][..., :nope], main["value"]
    dnarrow = (dkey @ uk.mT + dvalue @ uv.mT).sum(1, keepdim=True)
    cache = torch.cat([dnarrow, main["key"][..., nope:].sum(1, keepdim=True)], -1)
    weights = {"uk": (narrow.mT @ dkey).sum(0), "uv": (narrow.mT @ dvalue).sum(0)}
    # keys and values are themselves rounded, once more
    return {n: 4 * t for n, t in {"query": main["query"], "cache": cache, **weights}.items()}


def _of_operand(name: str, dense: Dense, dscores: Tensor) -> Tensor:
    """The allowance of an operand's gradient: that of the scores, scattered to the places that were read."""
    leaf = dense.leaves[name]
    total = torch.zeros(leaf.numel(), dtype=torch.float64, device=leaf.device)
    per_pair = dscores[dense.pairs]
    reads = [g for g in dense.gathers if g.name == name and len(g.pairs)]
    if reads and dense.scores.requires_grad:
        finite = torch.where(dense.scores.detach().isfinite(), 1.0, 0.0)
        slopes = torch.autograd.grad(
            dense.scores, [g.values for g in reads], finite, allow_unused=True, retain_graph=True
        )
        for gather, slope in zip(reads, slopes):
            if slope is not None:
                size = slope.abs() + slope.abs().mean()
                total.index_add_(0, gather.places, per_pair[gather.pairs] * size)
    return total.view(leaf.shape)


def _want(name: str, built: Built, exact: Tensor, plain: Tensor, roundings: Tensor, dense: Dense) -> Want:
    if bool(exact.isnan().any()):
        raise Undefined(f"{name} is NaN by definition")
    call = built.call
    dtype = call.dtype if name in ("out", *(f"d{n}" for n in built.names)) else _dtype(name, built)
    exact = torch.where(exact.abs() > torch.finfo(DTYPES[dtype]).max, exact.sign() * math.inf, exact)
    error = _finite((plain - exact).abs())
    hopeless = bool((dense.bound > HOPELESS).any()) if dense.bound is not None and len(dense.bound) else False
    if exact.dim() > 1 and not hopeless and exact.numel():
        error = error.amax(-1, keepdim=True)  # the luck of one element must not decide
    elif exact.numel():
        error = error.amax()
    smallest = torch.finfo(DTYPES[dtype]).smallest_normal * 2.0**-7
    own = 2 * EPS[dtype] * _finite(exact).abs() + smallest
    return Want(exact, (2 * error + roundings + own).detach())


def _dtype(name: str, built: Built) -> str:
    if name == "lse":
        return "float64" if built.call.dtype == "float64" else "float32"
    return dict(built.call.tensors)[name[1:]].dtype
