"""The records that cross stages: small, frozen, a comment on every field.

Letters: B batch, Hq/Hkv query and key heads, L queries, T keys, D width of query and key, Dv width of value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..analysis.records import TileCounts

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


# -- The problem ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    batch: int  # B
    heads: int  # Hq
    kv_heads: int  # Hkv
    q_len: int  # L
    kv_len: int  # T
    head_dim: int  # D, of query and key as the kernel sees them
    value_dim: int  # Dv
    dtype: str = "bf16"  # "bf16", "fp16" or "fp32"

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Segment:
    """A run of head-dimension columns that a kernel holds as one power-of-two tile."""

    start: int  # first column in its tensor
    width: int  # columns that exist
    source: Literal["key", "rope", "value"] = "key"  # "rope": a tensor of its own with its own heads

    @property
    def block(self) -> int:
        """Columns of the tile: a power of two, at least 16, of which `width` hold data."""
        return max(16, 1 << (self.width - 1).bit_length())


# -- Schedule and plan ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch settings of one kernel."""

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}w{self.num_warps}s{self.num_stages}"


@dataclass(frozen=True)
class Schedule:
    """What the scheduler chose: the algorithm, the target, and a tiling for each kernel."""

    algorithm: Literal["standard", "streaming", "flash"]
    target: Literal["hopper", "triton", "interpret", "cpu"]
    forward: Tiling
    backward_q: Tiling  # the kernel that owns query tiles (dQ); `streaming` and `standard` use it for their one pass
    backward_kv: Tiling  # the kernel that owns key tiles (dK, dV)

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.target}/{self.forward}/{self.backward_q}/{self.backward_kv}"


@dataclass(frozen=True)
class Quantity:
    """A number with the formula it came from."""

    formula: str
    value: float


@dataclass(frozen=True)
class Stage:
    """One step of a kernel as a person reads it."""

    key: str  # what its template calls it: "load query"
    kind: Literal["load", "keep", "compute", "store"]
    what: str  # "K tile [128, 128]"
    moves: str = ""  # "HBM -> SRAM", "SRAM -> registers", "registers -> HBM"
    per: str = ""  # "query tile", "kv tile", "kernel"


@dataclass(frozen=True)
class KernelPlan:
    """One generated kernel: its loops, stages and predicted cost."""

    name: str  # "forward", "backward_preprocess", "backward_dq", "backward_dkv", "standard_scores", ...
    direction: Literal["forward", "backward"]
    tiling: Tiling
    programs: Quantity  # size of the grid
    loop: str  # what one program iterates over
    tiles: TileCounts
    stages: tuple[Stage, ...]
    sram_bytes: Quantity  # of one program
    hbm_read: Quantity  # bytes of the whole kernel
    hbm_written: Quantity
    flops: Quantity
    seconds: float  # predicted
    bound: Literal["matrix", "memory", "exp", "latency"]

    @property
    def intensity(self) -> float:
        """FLOPs per HBM byte."""
        return self.flops.value / max(1.0, self.hbm_read.value + self.hbm_written.value)


@dataclass(frozen=True)
class Plan:
    """The schedule as data: everything code generation and `explain` need."""

    name: str
    shape: Shape
    hardware: str  # name of the Hardware record
    schedule: Schedule
    qk_segments: tuple[Segment, ...]
    v_segments: tuple[Segment, ...]
    value_is_key: bool  # absorbed latent attention: the value tile is key segment 0
    kernels: tuple[KernelPlan, ...]
    notes: tuple[str, ...] = field(default=())  # why a target or closed form was not used

    def _of(self, direction: str) -> tuple[KernelPlan, ...]:
        return tuple(k for k in self.kernels if k.direction == direction)

    def hbm_bytes(self, direction: str) -> float:
        """Predicted bytes read and written, "forward" or "backward"."""
        return sum(k.hbm_read.value + k.hbm_written.value for k in self._of(direction))

    def seconds(self, direction: str) -> float:
        """Predicted time, "forward" or "backward"."""
        return sum(k.seconds for k in self._of(direction))


@dataclass(frozen=True)
class Specialisation:
    """What one generated module is specialised on: never a length, a batch size, a stride or a scalar's value."""

    direction: Literal["forward", "backward"]
    arch: str  # "sm_90", "gfx942", "cpu"
    dtype: str  # of query, key and value: "bf16", "fp16", "fp32" or "fp64"
    head_dim: int  # columns of the query
    value_dim: int
    rope_dim: int = 0  # columns of the key that come from a tensor of their own (expanded latent attention)
    value_is_key: bool = False  # the value is the first columns of the key (absorbed latent attention)
    gradients: tuple[str, ...] = ()  # tensor operands whose gradient the backward computes

    @property
    def layout(self) -> str:
        """A short name for cache folders: "d128-bf16"."""
        dims = f"d{self.head_dim}" if self.value_dim == self.head_dim else f"d{self.head_dim}v{self.value_dim}"
        return f"{dims}-{self.dtype}"
