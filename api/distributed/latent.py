"""What latent attention computes with over ranks: caches travel, and are expanded where they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compiler.planning.latent_forms import Form, cheaper_form
from ..compiler.planning.records import Shape
from ..ir.attention import Attention, Latent
from ..ir.errors import Problem, WeftError, collected
from ..runtime.check.tensors import trainable_problems
from .exchange import Tensors
from .rows import Runs, common, count


class Keys(NamedTuple):
    """What portions of a step read: of all its rows, or of a run of them."""

    key: Tensor
    value: Tensor | None = None  # None: the first columns of the key
    rope: Tensor | None = None  # columns that all heads share

    @property
    def named(self) -> dict[str, Tensor]:
        """Those that there are, by the names of a call."""
        return {n: t for n, t in self._asdict().items() if t is not None}

    def of(self, first: int, end: int) -> Keys:
        """These rows."""
        key, value, rope = (None if t is None else t[:, :, first:end] for t in self)
        assert key is not None
        return Keys(key, value, rope)


class Projected(NamedTuple):
    """What a call of latent attention gives besides."""

    uk: Tensor | None  # [H, rank, nope]
    uv: Tensor | None  # [H, rank, Dv]
    form: Form | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are given, by name."""
        return {n: t for n, t in (("uk", self.uk), ("uv", self.uv)) if t is not None}


def form_of(attention: Attention, sizes: Shape, given: Projected, others: Sequence[object]) -> Form:
    """The form of a call, the same on all ranks. others: query, cache, operands. Raises WeftError for a wrong one."""
    assert attention.latent is not None
    tensors = [t for t in (*others, *given.tensors.values()) if isinstance(t, Tensor)]
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    form, is_projected = given.form, bool(given.tensors)
    if form == "expanded" and not is_projected:
        problem = Problem(option="form", what="form='expanded' needs uk and uv", named=True)
        raise WeftError.of(str(attention.name), problem)
    if form is None and is_projected:
        form = "expanded" if learns else cheaper_form(attention.latent, sizes)
    if form != "expanded" and learns and (problems := trainable_problems((None,) * 3, ("query",), False)):
        raise collected(str(attention.name), problems)
    return form or "absorbed"


class Projections(NamedTuple):
    """Of a call in the expanded form: rows of a cache become keys and values of all heads, gradients the way back."""

    latent: Latent
    uk: Tensor  # [H, rank, nope]
    uv: Tensor  # [H, rank, Dv]

    def expanded(self, cache: Tensor) -> Keys:
        """Keys [B, H, rows, nope] and values [B, H, rows, Dv] of a cache [B, 1, rows, rank + rope]."""
        vectors = cache[:, 0, :, : self.latent.rank]
        key, value = (torch.einsum("btr,hrd->bhtd", vectors, w) for w in (self.uk, self.uv))
        return Keys(key, value, cache[..., self.latent.rank :] if self.latent.rope else None)

    def gradients(self, cache: Tensor, found: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Tensor]]:
        """Of the cache, and of uk and uv. found: those of what it was expanded to."""
        vectors = cache[:, 0, :, : self.latent.rank]
        sides = ("uk", self.uk, found["key"]), ("uv", self.uv, found["value"])
        of_vectors = sum(torch.einsum("bhtd,hrd->btr", gradient, w) for _, w, gradient in sides)
        assert isinstance(of_vectors, Tensor)
        parts = [of_vectors[:, None], *([found["rope"]] if self.latent.rope else [])]
        own = {n: torch.einsum("btr,bhtd->hrd", vectors, gradient) for n, _, gradient in sides}
        return (torch.cat(parts, 3),), own


def without_rest(cache: Tensor, own: Runs, starts: tuple[int, ...]) -> Tensor:
    """A cache with zeros behind the last of packed sequences: what lies there must not reach gradients of uk and uv.

    own: positions of its rows.
    """
    kept = count(common(own, ((0, starts[-1]),)))
    if kept == cache.shape[2]:
        return cache
    return torch.cat([cache[:, :, :kept], torch.zeros_like(cache[:, :, kept:])], 2)


def absorbed(query: Tensor, uk: Tensor, rope: int) -> Tensor:
    """The query [B, H, rows, rank + rope] that meets a cache."""
    nope = query.shape[3] - rope
    return torch.cat([torch.einsum("bhln,hrn->bhlr", query[..., :nope], uk), query[..., nope:]], 3)
