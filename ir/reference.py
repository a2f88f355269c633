"""The definition: every variant evaluated densely in plain torch, differentiable, in any dtype. Slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

import torch
from torch import Tensor

from .attention import SEED, Attention
from .errors import InternalError
from .expr import Call, Const, Expr, Load, Scalar, Symbol
from .normalizer import Normalizer
from .operators import LARGEST_FLOOR, OPERATORS
from .parse import parse
from .philox import ALL_KEPT, kept_at, kept_pairs, pairs_kept
from .sequences import Rows

Value = Tensor | int | float | bool


_PRECISE: dict[str, Callable[..., Tensor]] = {
    "softplus": lambda x: -torch.nn.functional.logsigmoid(-x),  # torch's own is rounded to x from 20 on
}


@cache
def _torch_function(name: str) -> Callable[..., Tensor]:
    """The function below torch that a record of the table names."""
    try:
        return _PRECISE.get(name) or attrgetter(name)(torch)
    except AttributeError:
        raise InternalError(f"reference: torch has no {name}, which an operator names as its function") from None


for _operator in OPERATORS.values():
    _torch_function(_operator.torch)


def evaluate(
    root: Expr, env: Mapping[str, Value], dtype: torch.dtype, device: torch.device, visible: Tensor | None = None
) -> Tensor:
    """Value of an expression; `env` maps symbol, scalar and tensor names to values that broadcast together.

    Integers are computed in int64, floats in `dtype`. Where `visible` is False no operand is read: an index may lie
    outside its extent there, and no gradient comes back from there, not even a NaN. Likewise from the branch of a
    float `where` that is not taken.
    """
    return _Evaluation(env, dtype, device, visible).of(root)


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """A class, as functions that name each other would keep tensors until Python looks for circles."""

    env: Mapping[str, Value]
    dtype: torch.dtype
    device: torch.device
    visible: Tensor | None

    def of(self, node: Expr) -> Tensor:
        match node:
            case Const(value):
                return self._tensor(value, node.dtype)
            case Symbol(name) | Scalar(name):
                given = self.env[name]
                found = self._tensor(given, node.dtype)
                return self._seen(found) if isinstance(given, Tensor) and node.dtype == "float" else found
            case Load(tensor, index):
                operand = _operand(self.env, tensor.name)
                if not index:
                    found = self._tensor(operand, node.dtype)
                    return self._seen(found) if node.dtype == "float" else found  # an int may be divided by
                places = [self.of(i) for i in index]
                if self.visible is None:
                    return self._tensor(operand[torch.broadcast_tensors(*places)], node.dtype)
                places = [torch.where(self.visible, i, 0) for i in places]
                return self._seen(self._tensor(operand[torch.broadcast_tensors(*places)], node.dtype))
            case Call("where", (condition, a, b)) if node.dtype == "float":
                taken = self.of(condition)
                return self._apply("where", [taken, self._where(taken).of(a), self._where(~taken).of(b)], node)
            case Call(op, args):
                return self._apply(op, [self.of(a) for a in args], node)
            case _:
                raise InternalError(f"reference: unknown node {type(node).__name__}")

    def _where(self, taken: Tensor) -> _Evaluation:
        """What is evaluated there alone: torch.where multiplies an infinite derivative elsewhere by 0, which is NaN."""
        return replace(self, visible=taken if self.visible is None else self.visible & taken)

    def _seen(self, found: Tensor) -> Tensor:
        return found if self.visible is None else found.masked_fill(~self.visible, 0)

    def _tensor(self, value: Value, kind: str) -> Tensor:
        wanted = {"int": torch.int64, "float": self.dtype, "bool": torch.bool}[kind]
        if isinstance(value, Tensor):
            return value.to(self.device, wanted)
        # filled, as a CUDA graph refuses a copy from the host; and rounded then, as fill takes nothing that overflows
        exact = torch.float64 if kind == "float" else wanted
        return torch.full((), value, dtype=exact, device=self.device).to(wanted)

    def _apply(self, op: str, values: list[Tensor], node: Call) -> Tensor:
        operator = OPERATORS[op]
        if node.dtype == "float" or (operator.gives != "same" and any(v.is_floating_point() for v in values)):
            values = [v if v.dtype == torch.bool else v.to(self.dtype) for v in values]
        result = _torch_function(operator.torch)(*values)
        return result.double().clamp(-LARGEST_FLOOR, LARGEST_FLOOR).long() if operator.makes_ints else result


def _operand(env: Mapping[str, Value], name: str) -> Tensor:
    value = env[name]
    if not isinstance(value, Tensor):
        raise InternalError(f"reference: operand {name} is not a tensor")
    return value


def dense_mask(
    attention: Attention,
    env: Mapping[str, Value],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The mask as a bool tensor [B, Hq, L, T], for operands of this dtype; only the reference ever makes it."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return evaluate(attention.canonical.folded_mask, env, dtype, device).expand(shape)


def positions(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, q_offset: int | Tensor | None, device: torch.device,
    first_batch: int = 0,
) -> dict[str, Value]:  # fmt: skip
    """Values of the symbols, shaped to broadcast over [B, Hq, L, T]. first_batch: number of the first batch row."""
    offset = kv_len - q_len if q_offset is None else q_offset
    if isinstance(offset, Tensor):
        offset = offset.to(device=device, dtype=torch.int64).view(-1, 1, 1, 1)
    head = torch.arange(heads, device=device).view(1, -1, 1, 1)
    return {
        "q_pos": torch.arange(q_len, device=device).view(1, 1, -1, 1) + offset,
        "kv_pos": torch.arange(kv_len, device=device).view(1, 1, 1, -1),
        "batch": torch.arange(first_batch, first_batch + batch, device=device).view(-1, 1, 1, 1),
        "head": head, "kv_head": head // (heads // kv_heads), "group": heads // kv_heads,
        "q_len": q_len, "kv_len": kv_len,
    }  # fmt: skip


def reference(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operands: Mapping[str, Value],
    q_offset: int | Tensor | None = None,
    head_dim: int | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Dense attention from its definition.

    query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], operands by name; any float dtype.
    head_dim: the value of the symbol `head_dim`, D where not given. first_batch: that of `batch` in batch row 0.
    Returns out [B, Hq, L, Dv] and lse [B, Hq, L], NaN under a normalizer that has none.
    A row that sees nothing gives out 0 and lse -inf, with zero gradients. A variant with dropout has the operand
    `seed`, int64 [1], and drops weights.
    """
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    dtype, device = query.dtype, query.device
    env = positions(batch, heads, kv_heads, q_len, kv_len, q_offset, device, first_batch)
    env |= {"head_dim": head_dim or dim, **operands}
    key = key.repeat_interleave(heads // kv_heads, dim=1)
    value = value.repeat_interleave(heads // kv_heads, dim=1)
    shape = (batch, heads, q_len, kv_len)
    if kv_len:
        mask = dense_mask(attention, env, shape, dtype, device)
    else:  # positions of queries lie before the first key, where operands need have nothing
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
    # A hidden score may be NaN, or have an infinite derivative: it must reach neither softmax nor gradients.
    env["qk"] = torch.where(mask, query @ key.transpose(-1, -2), 0)
    score = evaluate(attention.canonical.folded_score, env, dtype, device, mask).to(dtype).expand(shape)
    score = torch.where(mask, score, -math.inf)
    if attention.canonical.folded_sink is None:
        weights, lse = _weights(attention.canonical.weighs, score, mask)
        return _dropped(attention, weights, env) @ value, lse
    sink = evaluate(attention.canonical.folded_sink, env, dtype, device).expand(*shape[:-1], 1)
    weights, lse = _weights(
        attention.canonical.weighs, torch.cat([score, sink], -1), torch.cat([mask, sink > -math.inf], -1)
    )
    # infinity less infinity is NaN in the weights, as in torch.softmax; so it is here
    return _dropped(attention, weights[..., :-1], env) @ value, torch.where(sink[..., 0] == math.inf, math.nan, lse)


def _dropped(attention: Attention, weights: Tensor, env: Mapping[str, Value]) -> Tensor:
    """Weights [B, Hq, L, T] without those that dropout takes, the others larger by what they are fewer."""
    if not attention.canonical.drops:
        return weights
    kept = pairs_kept(
        float(env[attention.dropout.name] if isinstance(attention.dropout, Scalar) else attention.dropout)
    )
    device, seed = weights.device, _operand(env, SEED.name)
    batch, head, q_pos = (torch.as_tensor(env[n], device=device).transpose(2, 3) for n in ("batch", "head", "q_pos"))
    head = head.transpose(1, 2)
    if not attention.canonical.folded_origin:
        found = kept_pairs(seed, batch, head, q_pos, 0, weights.shape[3], kept)
    else:
        first, first_head, first_batch = (
            torch.as_tensor(evaluate(e, env, weights.dtype, device), device=device)
            for e in attention.canonical.folded_origin
        )
        keys = torch.arange(weights.shape[3], device=device).view(-1, 1, 1)
        found = kept_at(seed, batch + first_batch, head + first_head, q_pos + first, keys + first, kept)
    return weights * found.permute(0, 2, 3, 1).to(weights.dtype) * (ALL_KEPT / kept)


def ragged_reference(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, operands: Mapping[str, Value],
    rows: Sequence[Rows], head_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition of a call with lengths: each sequence by itself, and 0 and lse -inf (NaN) in rows of none.

    query [B, Hq, L, D], key and value likewise; rows: of all sequences, in the order of their batch rows, and of first
    rows in one. Returns out [B, Hq, L, Dv] and lse [B, Hq, L].
    """
    batch, q_rows, kv_rows = query.shape[0], query.shape[2], key.shape[2]
    if batch == 0:
        return reference(attention, query, key, value, operands, 0, head_dim)
    nothing = -math.inf if attention.canonical.weighs.saves_lse else math.nan
    outs, lses = [], []
    for b in range(batch):
        own = [r for r in rows if r.row == b]
        # split and cat, so that a gradient is put together once and not once a sequence
        q_parts = query[b : b + 1].split(_cuts([(r.q_first, r.q_len) for r in own], q_rows), 2)
        kv_cuts = _cuts([(r.kv_first, r.kv_len) for r in own], kv_rows)
        k_parts, v_parts = key[b : b + 1].split(kv_cuts, 2), value[b : b + 1].split(kv_cuts, 2)
        row_outs, row_lses = [], []
        for i, part in enumerate(q_parts):
            r = own[i // 2] if i % 2 else None
            sees = r is not None and r.q_len and (r.kv_len or attention.canonical.folded_sink is not None)
            if r is None or not sees:  # between sequences, or nothing to see
                row_outs.append(part.new_zeros(*part.shape[:3], value.shape[3]))
                row_lses.append(part.new_full(part.shape[:3], nothing))
                continue
            out, lse = reference(
                attention, part, k_parts[i], v_parts[i], operands, r.q_offset, head_dim or query.shape[3], r.number
            )
            row_outs.append(out)
            row_lses.append(lse)
        outs.append(torch.cat(row_outs, 2))
        lses.append(torch.cat(row_lses, 2))
    connected = sum(t[:, :, :0].sum() for t in (query, key, value))  # 0, with gradients where no sequence has any
    return torch.cat(outs) + connected, torch.cat(lses) + connected


def _cuts(places: Sequence[tuple[int, int]], rows: int) -> list[int]:
    """Sizes of parts of an axis of this many rows: rows between places (first, length), then those of one, in turn."""
    cuts, at = [], 0
    for first, length in places:
        cuts += [first - at, length]
        at = first + length
    return [*cuts, rows - at]


def _weights(normalizer: Normalizer, score: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [B, Hq, L, T], 0 where hidden, and the lse [B, Hq, L], from scores that are -inf where hidden."""
    if normalizer.weight is not None:
        visible = torch.where(mask, score, 0.0)  # the weight of -inf may have no derivative
        weight = evaluate(parse(normalizer.weight), {"score": visible}, score.dtype, score.device)
        return torch.where(mask, weight, 0.0), score.new_full(score.shape[:-1], math.nan)
    if normalizer.name not in _RULES:
        raise InternalError(f"reference: no rule for the normalizer {normalizer.name}, which has no weight= either")
    return _RULES[normalizer.name](score, mask)


def _softmax(score: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    sees = (score != -math.inf).any(-1, keepdim=True)  # a visible score may be -inf too
    weights = torch.where(mask & sees, torch.softmax(torch.where(sees, score, 0.0), dim=-1), 0.0)
    lse = torch.where(sees[..., 0], torch.logsumexp(torch.where(sees, score, 0.0), dim=-1), -math.inf)
    return weights, lse


# of normalizers whose weights depend on the whole row, by name
_RULES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {"softmax": _softmax}


def expand_latent(
    attention: Attention, query: Tensor, cache: Tensor, uk: Tensor, uv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Latent attention written out: key = [latent @ uk, rope], value = latent @ uv (DeepSeek-V2, section 2.1).

    query [B, H, L, nope + rope], cache [B, 1, T, rank + rope], uk [H, rank, nope], uv [H, rank, Dv];
    returns query, key [B, H, T, nope + rope] and value [B, H, T, Dv].
    """
    assert attention.latent is not None
    rank = attention.latent.rank
    latent, rope = cache[..., :rank], cache[..., rank:]
    key = torch.cat([latent @ uk, rope.expand(-1, uk.shape[0], -1, -1)], dim=-1)
    return query, key, latent @ uv
