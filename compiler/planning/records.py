"""The records that cross stages: small, frozen, a comment on every field.

Letters: B batch, Hq/Hkv query and key heads, L queries, T keys, D width of query and key, Dv width of value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .dtypes import EIGHTHS, dtype_named


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
    q_dtype: str | None = None  # of the query, likewise
    v_dtype: str | None = None  # of the value, where it is not the key's

    @property
    def element_bytes(self) -> int:
        return dtype_named(self.dtype).bytes

    @property
    def q_share(self) -> float:
        """Bytes of an element of the query, beside those of the output."""
        return self._share(self.q_dtype, self.dtype)

    @property
    def kv_share(self) -> float:
        """The same of the key, and of a value that has no other dtype."""
        return self._share(self.kv_dtype, self.dtype)

    @property
    def v_share(self) -> float:
        """Bytes of an element of the value, beside those of the key."""
        return self._share(self.v_dtype, self.kv_dtype or self.dtype)

    @staticmethod
    def _share(stored: str | None, other: str) -> float:
        sizes = [dtype_named(name).bytes for name in (stored or other, other)]
        return 1 if sizes[0] == sizes[1] else sizes[0] / sizes[1]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def stored_beside(
    dtype: str, query: str, key: str, value: str | None = None
) -> tuple[str | None, str | None, str | None]:  # fmt: skip
    """The kv_dtype, q_dtype and v_dtype of a Shape of this dtype, whose operands are stored in these.

    >>> stored_beside("bf16", "bf16", "e4m3", "bf16"), stored_beside("fp16", *["e4m3"] * 3)
    (('e4m3', None, 'bf16'), ('e4m3', 'e4m3', None))
    """
    sizes = {name: dtype_named(name).bytes for name in (dtype, query, key, value or key)}
    of_query, of_key = (None if sizes[name] == sizes[dtype] else name for name in (query, key))
    alike = value is None or value == key or not EIGHTHS & {key, value}
    return of_key, of_query, None if alike else value


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
