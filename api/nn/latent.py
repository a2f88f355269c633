"""`weft.nn.LatentAttention`: multi-head latent attention, as DeepSeek-V2 and V3 have it."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attention import Attention as Variant
from ..calls.dtensors import is_sharded
from ..ir.attention import Latent
from ..ir.errors import WeftError, collected, shown
from ..ir.expr import symbol
from ..ir.numbers import is_number
from ..kv import Step
from .attention import (
    assigned,
    check_rotation,
    check_rows,
    check_shard,
    layer_problems,
    making_problems,
    normed,
    options_of,
    positive,
    rope_problems,
    rotation_of,
    variant_problems,
)
from .rotary import Rotary, Rotation, YarnScaling

Form = Literal["expanded", "absorbed"]


class LatentAttention(nn.Module):
    """Latent attention of x [B, L, width] (DeepSeek-V2, arXiv 2405.04434): one vector [rank + rope] a token is the key
    and value of all heads, and all that a cache holds.

    width: of the input and the output. heads: H. q_lora: rank of the queries' own low-rank projection; none where not
    given. kv_lora: rank of the latent vector. nope, rope_dim: columns of a query head without and with rotation.
    value_dim: of a head, `nope` where not given. rope: the rotation; interleaved, base 10,000, where not given.
    variant: one with `latent=weft.Latent(kv_lora, rope_dim)`; causal where not given, its scale multiplied by what a
    YarnScaling asks for. layer: which layer of a cache is this module's. eps: of the RMS norms.

    Weights have the names that DeepSeek-V3 has in transformers: q_proj, or q_a_proj, q_a_layernorm and q_b_proj; then
    kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj.
    """

    def __init__(
        self, width: int, heads: int, *, q_lora: int | None = None, kv_lora: int, nope: int, rope_dim: int,
        value_dim: int | None = None, rope: Rotary | None = None, variant: Variant | None = None, eps: float = 1e-6,
        layer: int = 0, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        value_dim = nope if value_dim is None else value_dim
        sizes = {"width": width, "heads": heads, "kv_lora": kv_lora, "nope": nope, "rope_dim": rope_dim,
                 "value_dim": value_dim}  # fmt: skip
        problems = positive(sizes if q_lora is None else {**sizes, "q_lora": q_lora}) + layer_problems(layer)
        problems += making_problems(device, dtype)
        if not is_number(eps) or not 0 <= eps < inf:
            problems.append(f"eps: expected a number from 0 on, got {shown(eps)}")
        if not problems:
            rope = Rotary(rope_dim, interleaved=True) if rope is None else rope
            problems += rope_problems(rope, rope_dim)
        if not problems:
            assert rope is not None
            variant = _causal(kv_lora, nope, rope_dim, rope) if variant is None else variant
            problems += variant_problems(variant, latent=True)
        if not problems and variant is not None and variant.latent != Latent(kv_lora, rope_dim):
            problems.append(f"variant: expected latent=weft.Latent({kv_lora}, {rope_dim}), got {variant.latent}")
        if problems:
            raise collected("nn.LatentAttention", problems)
        assert rope is not None and variant is not None
        self.width, self.heads, self.q_lora, self.kv_lora = width, heads, q_lora, kv_lora
        self.nope, self.rope_dim, self.value_dim = nope, rope_dim, value_dim
        self.rope, self.variant, self.eps, self.layer = rope, variant, eps, layer
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if q_lora is None:
            self.q_proj = nn.Linear(width, heads * (nope + rope_dim), bias=False, **made)
        else:
            self.q_a_proj = nn.Linear(width, q_lora, bias=False, **made)
            self.q_a_layernorm = nn.RMSNorm(q_lora, eps, **made)
            self.q_b_proj = nn.Linear(q_lora, heads * (nope + rope_dim), bias=False, **made)
        self.kv_a_proj_with_mqa = nn.Linear(width, kv_lora + rope_dim, bias=False, **made)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora, eps, **made)
        self._make_kv(made)
        self.o_proj = nn.Linear(heads * value_dim, width, bias=False, **made)

    def _make_kv(self, made: dict[str, Any]) -> None:
        self.kv_b_proj = nn.Linear(self.kv_lora, self.heads * (self.nope + self.value_dim), bias=False, **made)

    def _key_and_value_weights(self) -> tuple[Tensor, Tensor]:
        """uk [H, rank, nope] and uv [H, rank, Dv]: views of kv_b_proj."""
        weight = self.kv_b_proj.weight.view(self.heads, self.nope + self.value_dim, self.kv_lora).transpose(1, 2)
        return weight[..., : self.nope], weight[..., self.nope :]

    _form: Form | None = None  # by cost, expanded where gradients are wanted

    def forward(
        self, x: Tensor, *, cache: Step | None = None, rotation: Rotation | None = None,
        positions: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """x [B, L, width] -> [B, L, width]; the arguments are those of `nn.Attention`. cache: of `latent=`."""
        check_rows("nn.LatentAttention", x, self.width)
        options = options_of(x, cache, options)
        if own := [n for n in ("uk", "uv", "rope") if options.pop(n, None) is not None]:
            raise WeftError(f"nn.LatentAttention: {', '.join(own)}: expected none, as the module has its own")
        query = self.q_proj(x) if self.q_lora is None else self.q_b_proj(normed(self.q_a_layernorm, self.q_a_proj(x)))
        if is_sharded(query) or query.shape[2] != self.heads * (self.nope + self.rope_dim):
            raise WeftError(
                "nn.LatentAttention: expected projections with all heads, got those of parallelize_module; use "
                "module.shard(rank, ranks) for tensor parallelism"
            )
        query = query.unflatten(2, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.kv_lora, self.rope_dim], dim=-1)
        if rotation is None:
            rotation = rotation_of(self.rope, x, cache, positions, options)
        check_rotation("nn.LatentAttention", rotation, x, self.rope)
        turned = self.rope.rotate(query[..., self.nope :], rotation)
        query = torch.cat([query[..., : self.nope], turned], dim=-1)
        vector = torch.cat(
            [normed(self.kv_a_layernorm, latent)[:, None], self.rope.rotate(shared[:, None], rotation)], dim=-1
        )
        form: Form | None = options.pop("form", self._form)
        if self.variant.canonical.drops:
            options.setdefault("train", self.training)
        uk, uv = self._key_and_value_weights()
        if cache is not None:
            cache.append(self.layer, vector)
            form = "absorbed" if cache.block_table is not None else form
            out = cache.attend(self.layer, self.variant, query, uk=uk, uv=uv, form=form, **options)
        else:
            out = self.variant(query, vector, uk=uk, uv=uv, form=form, **options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def absorb(self) -> AbsorbedLatentAttention:
        """The same for serving: always in the absorbed form, with uk and uv in place of kv_b_proj, laid out as the call
        takes them. Other weights are shared with this module, and none of it is for training."""
        state = {name: weight.detach() for name, weight in self.state_dict().items() if name != "kv_b_proj.weight"}
        uk, uv = self._key_and_value_weights()
        state |= {"uk": uk.detach().contiguous(), "uv": uv.detach().contiguous()}
        made: AbsorbedLatentAttention = assigned(AbsorbedLatentAttention(**self._sizes, device="meta"), state, False)
        return made.requires_grad_(False)

    def shard(self, rank: int, ranks: int) -> LatentAttention:
        """The part of one of `ranks` devices, with heads / ranks heads: the sum of all parts' outputs is the whole's.

        Rank r has rows r * n / ranks on of q_proj or q_b_proj and of kv_b_proj (n rows, whole heads), and the same
        columns of o_proj. It has the other weights whole: each rank caches the same vectors. As of nn.Attention,
        operands indexed by heads are the part's, and a variant that computes with the number of a head is refused.
        """
        check_shard("nn.LatentAttention", self.variant, self.heads, rank, ranks)
        state = dict(self.state_dict())
        for name in ("q_proj.weight" if self.q_lora is None else "q_b_proj.weight", "kv_b_proj.weight"):
            state[name] = state[name].chunk(ranks, 0)[rank]
        state["o_proj.weight"] = state["o_proj.weight"].chunk(ranks, 1)[rank]
        made: LatentAttention = assigned(
            LatentAttention(**{**self._sizes, "heads": self.heads // ranks}, device="meta"), state, self.training
        )
        return made

    @property
    def _sizes(self) -> dict[str, Any]:
        """The arguments that it was made with."""
        names = (
            "width",
            "heads",
            "q_lora",
            "kv_lora",
            "nope",
            "rope_dim",
            "value_dim",
            "rope",
            "variant",
            "eps",
            "layer",
        )
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        return f"{self.variant.name}, heads={self.heads}, rank={self.kv_lora}, rope={self.rope}, layer={self.layer}"


class AbsorbedLatentAttention(LatentAttention):
    """What `LatentAttention.absorb()` gives: weights uk [H, rank, nope] and uv [H, rank, Dv] in place of kv_b_proj."""

    _form = "absorbed"

    def _make_kv(self, made: dict[str, Any]) -> None:
        self.uk = nn.Parameter(torch.empty(self.heads, self.kv_lora, self.nope, **made))
        self.uv = nn.Parameter(torch.empty(self.heads, self.kv_lora, self.value_dim, **made))

    def _key_and_value_weights(self) -> tuple[Tensor, Tensor]:
        return self.uk, self.uv

    def absorb(self) -> AbsorbedLatentAttention:
        return self

    def shard(self, rank: int, ranks: int) -> LatentAttention:
        raise WeftError(
            "nn.LatentAttention.shard: this one is absorbed; shard the module that it was made from, then absorb"
        )


def _causal(rank: int, nope: int, rope_dim: int, rope: Rotary) -> Variant:
    factor = rope.scaling.score_scale if isinstance(rope.scaling, YarnScaling) else 1.0
    mask, scale = symbol("kv_pos") <= symbol("q_pos"), (nope + rope_dim) ** -0.5 * factor
    return Variant(mask=mask, scale=scale, latent=Latent(rank, rope_dim), name="causal_latent")
