"""Rotary embeddings and the usual ways to stretch them over longer sequences than a model was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ..codegen.torch_private import unwatched
from ..ir.errors import WeftError, collected, shown
from ..ir.numbers import is_int, is_number
from ..runtime.check.tensors import INTS, form_problem

Rotation = tuple[Tensor, Tensor]  # cosine and sine of each position and pair of columns, [B or 1, 1, L, dim / 2]

_MOST_COLUMNS = 2**16


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class NtkScaling:
    """A larger base, base * factor ** (dim / (dim - 2)): low frequencies are stretched by `factor`, high ones not."""

    factor: float


@dataclass(frozen=True)
class DynamicNtkScaling:
    """NtkScaling by what a sequence needs: n tokens beyond `original_length` take factor * n / original_length -
    (factor - 1). With a cache a key keeps the rotation of the step that wrote it."""

    factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies that turn less than `slow` times in `original_length` are
    divided by `factor`, those that turn more than `fast` times stay, and a ramp lies between. Cosine and sine are
    multiplied by `0.1 ln(factor) + 1`; as DeepSeek has it, by that of `mscale` over that of `mscale_all_dim`, where the
    square of the latter belongs to the scale of the scores (`score_scale`).
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_scale(self) -> float:
        """What the scale of scores is multiplied by: 1 but for models with `mscale_all_dim`."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: waves longer than original_length / low are divided by `factor`, those shorter than original_length /
    high stay, and the others lie between."""

    factor: float
    original_length: int
    low: float = 1.0
    high: float = 4.0


Scaling = LinearScaling | NtkScaling | DynamicNtkScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of the first `dim` columns of a head.

    base: of the frequencies. scaling: one of the records above. interleaved: neighbours are a pair, as in GPT-J and
    DeepSeek; else column i and i + dim / 2 are, as in Llama. It holds no tensors: nothing to load, or to be lost on the
    meta device.
    """

    dim: int
    base: float = 10_000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    # radians a position of each pair of columns, scaled; of DynamicNtkScaling up to its original length
    frequencies: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = []
        if not is_int(self.dim, 2, _MOST_COLUMNS) or self.dim % 2:
            problems.append(f"dim: expected an even int from 2 to {_MOST_COLUMNS}, got {shown(self.dim)}")
        if not is_number(self.base) or not 1 < self.base < math.inf:
            problems.append(f"base: expected a number above 1, got {shown(self.base)}")
        if not isinstance(self.interleaved, bool):
            problems.append(f"interleaved: expected True or False, got {shown(self.interleaved)}")
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            names = ", ".join(kind.__name__ for kind in Scaling.__args__)
            problems.append(f"scaling: expected None or one of {names}, got {shown(self.scaling)}")
        elif self.scaling is not None:
            problems += _scaling_problems(self.scaling)
        if isinstance(self.scaling, (NtkScaling, DynamicNtkScaling)) and self.dim == 2:
            problems.append("dim: expected more than 2 columns, whose base could be changed")
        if problems:
            raise collected("Rotary", problems)
        object.__setattr__(self, "frequencies", _frequencies(self))

    def __call__(self, positions: Tensor, lengths: Tensor | int | None = None) -> Rotation:
        """Cosine and sine, float32 [B, 1, L, dim / 2], of positions [B, L] or [L].

        lengths: tokens of each sequence, an int or a tensor [B], which DynamicNtkScaling needs.
        """
        if not isinstance(positions, Tensor) or positions.is_nested or positions.dim() not in (1, 2):
            got = shown(positions)
            raise WeftError(f"Rotary: positions: expected a tensor [B, L] or [L], got {got}")
        frequencies = _on(self.frequencies, positions.device)
        angles = positions.to(torch.float32)[..., None] * frequencies
        if isinstance(self.scaling, DynamicNtkScaling):
            angles = angles * self._stretched(self.scaling, lengths, positions)
        angles = angles[None, None] if angles.dim() == 2 else angles[:, None]
        magnitude = self.scaling.magnitude if isinstance(self.scaling, YarnScaling) else 1.0
        return angles.cos() * magnitude, angles.sin() * magnitude

    def _stretched(self, scaling: DynamicNtkScaling, lengths: Tensor | int | None, positions: Tensor) -> Tensor:
        """What frequencies are multiplied by, [pairs] or [B, 1, pairs]: base ** (-2 i / dim) with a larger base."""
        if lengths is None:
            raise WeftError("Rotary: lengths: missing; DynamicNtkScaling depends on the tokens of a sequence")
        _check_lengths(lengths)
        powers = _on(tuple(-2 * i / (self.dim - 2) for i in range(self.dim // 2)), positions.device)
        factor = float(scaling.factor)
        if isinstance(lengths, Tensor):
            if lengths.shape[0] != 1 and positions.dim() > 1 and lengths.shape[0] != positions.shape[0]:
                raise WeftError(
                    f"Rotary: lengths: expected {positions.shape[0]}, one for each row of positions, got "
                    f"{lengths.shape[0]}: DynamicNtkScaling turns the rows of a packed step by lengths of their own"
                )
            longer = (factor * lengths.to(torch.float32) / scaling.original_length - (factor - 1)).clamp(min=1.0)
            return longer[:, None, None] ** powers
        length = torch.full((), lengths, dtype=torch.float64, device=positions.device)  # torch may know it as a symbol
        stretch = (factor * length / scaling.original_length - (factor - 1)).clamp(min=1.0)
        return stretch.to(torch.float32) ** powers

    def _check_rotated(self, x: Tensor, rotation: Rotation) -> None:
        """Raise WeftError for what are no rows [B, H, L, D], or no cosine and sine of these."""
        if (problem := form_problem("x", x)) is not None:
            raise WeftError(f"Rotary: rotate: {problem}")
        if x.dim() != 4 or x.shape[3] < self.dim:
            expected = f"a tensor [B, H, L, D] with {self.dim} columns or more"
            raise WeftError(f"Rotary: rotate: x: expected {expected}, got {list(x.shape)}")
        pair = rotation if isinstance(rotation, (tuple, list)) else ()
        if len(pair) != 2 or not all(self._turns(t, x) for t in pair):
            expected = f"cosine and sine of the rows of x {list(x.shape)}, as rope(positions) gives them"
            raise WeftError(f"Rotary: rotate: rotation: expected {expected}, got {shown(rotation)}")

    def _turns(self, t: object, x: Tensor) -> bool:
        """Whether this is the cosine or the sine of rows of x."""
        if not isinstance(t, Tensor) or form_problem("rotation", t) is not None or not t.is_floating_point():
            return False
        sizes = (x.shape[0], x.shape[1], x.shape[2])
        fits = t.dim() == 4 and t.shape[3] == self.dim // 2 and all(n in (1, m) for n, m in zip(t.shape, sizes))
        return fits and t.device == x.device

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [B, H, L, D] with its first `dim` columns turned, computed in float32."""
        self._check_rotated(x, rotation)
        cos, sin = rotation
        turned = x[..., : self.dim].to(torch.float32)
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
            pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            pairs = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        pairs = pairs.to(x.dtype)
        return pairs if x.shape[-1] == self.dim else torch.cat([pairs, x[..., self.dim :]], dim=-1)


def _check_lengths(lengths: object) -> None:
    """Raise WeftError for what are no tokens of sequences."""
    if isinstance(lengths, Tensor):
        problem = form_problem("lengths", lengths)
        if problem is None and lengths.dim() == 1 and lengths.dtype in INTS:
            return
    elif isinstance(lengths, torch.SymInt) or is_int(lengths, 0, 2**31 - 1):
        return
    raise WeftError(f"Rotary: lengths: expected an int, or a tensor [B] of ints, got {shown(lengths)}")


def _scaling_problems(scaling: Scaling) -> list[str]:
    problems = []
    if not is_number(scaling.factor) or not 1 <= scaling.factor < math.inf:
        problems.append(f"scaling: factor: expected a number from 1 on, got {shown(scaling.factor)}")
    if isinstance(scaling, (DynamicNtkScaling, YarnScaling, Llama3Scaling)):
        length = scaling.original_length
        if not is_int(length, 1, 2**30):
            problems.append(f"scaling: original_length: expected a positive int up to 2**30, got {shown(length)}")
    for name in ("mscale", "mscale_all_dim") if isinstance(scaling, YarnScaling) else ():
        value = getattr(scaling, name)
        if value is not None and not (is_number(value) and 0 <= value < math.inf):
            problems.append(f"scaling: {name}: expected a number from 0 on, or None, got {shown(value)}")
    if isinstance(scaling, (YarnScaling, Llama3Scaling)):
        names = ("slow", "fast") if isinstance(scaling, YarnScaling) else ("low", "high")
        few, many = (getattr(scaling, name) for name in names)
        if not is_number(few) or not is_number(many) or not 0 < few < many < math.inf:
            problems.append(f"scaling: expected 0 < {names[0]} < {names[1]}, got {shown(few)} and {shown(many)}")
    return problems


def _frequencies(rotary: Rotary) -> tuple[float, ...]:
    dim, base, scaling = rotary.dim, rotary.base, rotary.scaling
    if isinstance(scaling, NtkScaling):
        base *= scaling.factor ** (dim / (dim - 2))
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    match scaling:
        case LinearScaling(factor):
            return tuple(f / factor for f in plain)
        case YarnScaling():
            return _yarn(plain, rotary, scaling)
        case Llama3Scaling():
            return tuple(_llama3(f, scaling) for f in plain)
        case _:
            return tuple(plain)


def _yarn(plain: Sequence[float], rotary: Rotary, scaling: YarnScaling) -> tuple[float, ...]:
    """`kept` of a pair falls from 1 to 0 between the pairs that turn `fast` and `slow` times."""

    def pair_that_turns(times: float) -> float:
        return rotary.dim * math.log(scaling.original_length / (times * 2 * math.pi)) / (2 * math.log(rotary.base))

    low = max(math.floor(pair_that_turns(scaling.fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.slow)), rotary.dim - 1)
    kept = [1 - min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(len(plain))]
    return tuple(f * k + f / scaling.factor * (1 - k) for f, k in zip(plain, kept))


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    turns = scaling.original_length * frequency / (2 * math.pi)  # of the wave in the original length
    kept = min(max((turns - scaling.low) / (scaling.high - scaling.low), 0.0), 1.0)
    return frequency * kept + frequency / scaling.factor * (1 - kept)


def _on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 numbers on a device; copied there once, but for a mode of torch, which may want tensors of its own."""
    if torch.compiler.is_compiling() or not unwatched():
        return torch.tensor(numbers, dtype=torch.float32, device=device)
    return _kept(numbers, device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that training may use it too
        return torch.tensor(numbers, dtype=torch.float32, device=device)
