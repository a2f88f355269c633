"""The records that cross stages: small, frozen, a comment on every field.

Letters: B batch, Hq/Hkv query and key heads, L queries, T keys, D width of query and key, Dv width of value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .dtypes import dtype_named


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
    dtype: str = "bf16"  # "bf16", "fp16", "fp32" or, on a CPU, "fp64"

    kv_dtype: str | None = None  # of key and value, where these are FP8

    @property
    def element_bytes(self) -> int:
        return dtype_named(self.dtype).bytes

    @property
    def kv_share(self) -> float:
        """Bytes of an element of key and value, beside those of the others."""
        return 1 if self.kv_dtype is None else dtype_named(self.kv_dtype).bytes / self.element_bytes

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
