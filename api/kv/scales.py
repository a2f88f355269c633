"""The descales of a cache of FP8: one a head, which stays, or one a row, which lies in pools beside the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from ..ir.errors import WeftError, shown
from ..runtime.check.tensors import form_problem, known_memory_problems
from ..runtime.descales import is_fp8
from ..runtime.ops.append import append_quantized
from ..runtime.ops.quantize import descale_of, largest
from .share import NOWHERE

if TYPE_CHECKING:
    from .cache import Cache

Scale: TypeAlias = Literal["head", "token"]
Given: TypeAlias = float | Tensor | None  # descales that a caller has: for all layers, or [layers, Hkv]
_FLOAT32 = torch.finfo(torch.float32)
ROOM = 2.0  # of a descale that the first rows decide: later ones may be so many times as large before they saturate


def scale_problems(
    dtype: torch.dtype, scale: object, descales: tuple[Given, Given], has_values: bool, sizes: tuple[object, object]
) -> list[str]:  # fmt: skip
    """What keeps a cache from having such descales. sizes: layers and Hkv."""
    problems, given = [], dict(zip(("k_descale", "v_descale"), descales))
    if scale is not None and not (isinstance(scale, str) and scale in ("head", "token")):
        problems.append(f"scale: expected 'head' or 'token', got {shown(scale)}")
    elif scale is not None and not is_fp8(dtype):
        problems.append(f"scale: expected None, as dtype is {shown(dtype)}; torch.float8_e4m3fn has descales")
    for name, descale in given.items():
        if descale is None:
            continue
        if not isinstance(scale, str) or scale != "head":
            problems.append(f"{name}: expected None; descales that are given are those of scale='head'")
        elif name == "v_descale" and not has_values:
            problems.append("v_descale: expected None, as a latent cache has no values")
        else:
            problems += _given_problems(name, descale, sizes)
    return problems


def _given_problems(name: str, descale: object, sizes: tuple[object, object]) -> list[str]:
    """What keeps a value from being the descales of heads."""
    if isinstance(descale, Tensor) and (problem := form_problem(name, descale)) is not None:
        return [str(problem)]
    try:
        found = descale.detach() if isinstance(descale, Tensor) else torch.as_tensor(descale, device="cpu")
    except (OverflowError, TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    fits = found.dim() <= 2 and all(n in (1, size) for n, size in zip(reversed(found.shape), reversed(sizes)))
    if not fits or found.is_complex() or found.dtype == torch.bool or found.is_meta:
        got = f"{list(found.shape)} on {found.device}" if isinstance(descale, Tensor) else shown(descale)
        return [f"{name}: expected a positive number, or {list(sizes)} of them, [layers, Hkv], got {got}"]
    if problems := known_memory_problems({name: found}):
        return [str(problem) for problem in problems]
    held = torch.as_tensor(descale, dtype=torch.float32, device=found.device)  # as kernels read it
    wrong = found[~((held > 0) & held.isfinite())]
    if wrong.numel():
        return [f"{name}: expected positive numbers that float32 holds, got {wrong[0].item()}"]
    return []


class Scales:
    """One descale for each row of each head: the kernel that appends writes it."""

    by_token = True

    def __init__(self, k_descales: list[Tensor], v_descales: list[Tensor]) -> None:
        self.k_descales, self.v_descales = k_descales, v_descales  # a layer: [blocks, Hkv, page, 1]

    @property
    def pools(self) -> list[Tensor]:
        """What is copied and swapped with the rows."""
        return [*self.k_descales, *self.v_descales]

    def of(self, layer: int, rows: slice | None) -> dict[str, Tensor]:
        """Descales of a call over a layer. rows: of a DenseCache, where its sequences lie."""
        found = {"k_descale": self.k_descales[layer]}
        if self.v_descales:
            found["v_descale"] = self.v_descales[layer]
        return found if rows is None else {name: pool[rows] for name, pool in found.items()}

    def append(
        self, cache: Cache, layer: int, key: Tensor, value: Tensor | None, slots: Tensor, has_rows: bool
    ) -> None:  # fmt: skip
        """Write new rows of a layer. has_rows: whether there are some, as far as the host knows."""
        if cache.latent is not None:
            rank = cache.latent.rank
            key, value, values, v_descale = key[..., :rank], key[..., rank:], cache.ropes(layer), None
        else:
            values, v_descale = cache.values(layer), self.v_descales[layer]
        append_quantized(
            key, value, cache.keys(layer), values, slots, self.k_descales[layer], v_descale, self.by_token
        )  # fmt: skip

    def forget(self) -> None:
        """No row of the cache is left: what rows decided is open again."""


class HeadScales(Scales):
    """One for each head, [1, Hkv, 1, 1] a layer: given, or made of the first rows that a layer gets."""

    by_token = False

    def __init__(self, k_descales: list[Tensor], v_descales: list[Tensor], given: tuple[bool, bool]) -> None:
        """given: whether those of keys, and of values, are what the caller said."""
        super().__init__(k_descales, v_descales)
        self._given = given
        self.forget()

    def forget(self) -> None:
        self._known = [all(self._given)] * len(self.k_descales)

    @property
    def pools(self) -> list[Tensor]:
        return []

    def of(self, layer: int, rows: slice | None) -> dict[str, Tensor]:
        if not self._known[layer]:
            raise WeftError(
                f"layer {layer}: has no descales yet; append to it first, or give k_descale= and v_descale="
            )
        return super().of(layer, None)

    def append(
        self, cache: Cache, layer: int, key: Tensor, value: Tensor | None, slots: Tensor, has_rows: bool
    ) -> None:  # fmt: skip
        if not self._known[layer]:
            if torch.compiler.is_compiling() or (slots.is_cuda and torch.cuda.is_current_stream_capturing()):
                raise WeftError("append: the first rows of a cache with scale='head' decide its descales; append some "
                                "outside of compiled code and captures, or give k_descale= and v_descale="
                                )  # fmt: skip
            there = (slots != NOWHERE)[:, None, :, None]  # tokens of others too: all have the same descales
            stored = key if cache.latent is None else key[..., : cache.latent.rank]
            for new, made, given in zip((stored, value), (self.k_descales, self.v_descales), self._given):
                if new is not None and not given:
                    top = largest(torch.where(there, new.float(), 0.0), 0).amax(0, keepdim=True)
                    made[layer].copy_(descale_of((top * ROOM).clamp(max=_FLOAT32.max), cache.dtype))
            self._known[layer] = has_rows
        super().append(cache, layer, key, value, slots, has_rows)


def scales_of(cache: Cache, blocks: int, scale: Scale | None, given: tuple[Given, Given]) -> Scales:
    """The descales of a cache, by token where nothing is said."""
    layers = [cache.layers, cache.layers if cache.has_values else 0]
    sizes = (blocks, cache.kv_heads, cache.rows, 1) if scale != "head" else (1, cache.kv_heads, 1, 1)
    with torch.inference_mode(False):
        k_descales, v_descales = (
            [torch.ones(sizes, dtype=torch.float32, device=cache.device) for _ in range(n)] for n in layers
        )
        if scale != "head":
            return Scales(k_descales, v_descales)
        for made, descale in zip((k_descales, v_descales), given):
            if descale is not None:
                whole = torch.as_tensor(descale, dtype=torch.float32, device=cache.device).detach()
                for own, numbers in zip(made, whole.expand(cache.layers, cache.kv_heads)):
                    own.copy_(numbers.view(own.shape))
    return HeadScales(k_descales, v_descales, (given[0] is not None, given[1] is not None or not cache.has_values))
