"""The dtypes of operands: the one table that other tables name theirs from.

A dtype that a room does not know is refused there, in words: nothing takes it for one of as many bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...ir.errors import WeftError

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


class Dtype(NamedTuple):
    """What plans and targets know of a dtype."""

    name: str  # what users and schedules write: "bf16"
    torch_name: str  # an attribute of torch
    bytes: int  # of an element
    units: str  # that multiply it: a key of Hardware.peaks
    rate: float = 1.0  # of products, beside the peak of these units
    sums: str = "float32"  # the dtype that scores and sums are computed in, an attribute of torch

    @property
    def torch(self) -> torch.dtype:
        import torch  # lazy: plans do without it

        found: torch.dtype = getattr(torch, self.torch_name)
        return found

    @property
    def is_narrow(self) -> bool:
        """Whether its exponent has few bits, so that large numbers overflow and small ones lose digits."""
        import torch  # lazy: plans do without it

        return torch.finfo(self.torch).max < 2.0**64

    def of_units(self, table: Mapping[str, T]) -> T:
        """What a table has of the units that multiply it. Raises WeftError where it has nothing of them."""
        if self.units not in table:
            raise WeftError(f"dtype: {self.name} has {self.units} products, and a table has {', '.join(table)} alone")
        return table[self.units]


BF16, FP16 = Dtype("bf16", "bfloat16", 2, "16-bit"), Dtype("fp16", "float16", 2, "16-bit")
FP32 = Dtype("fp32", "float32", 4, "fp32")
FP64 = Dtype("fp64", "float64", 8, "fp32", 0.5, "float64")  # of target cpu alone
E4M3, E5M2 = Dtype("e4m3", "float8_e4m3fn", 1, "8-bit"), Dtype("e5m2", "float8_e5m2", 1, "8-bit")
ALL: dict[str, Dtype] = {dtype.name: dtype for dtype in (BF16, FP16, FP32, FP64, E4M3, E5M2)}
EIGHTHS = frozenset({E4M3.name, E5M2.name})  # FP8: stored numbers, which a factor beside them makes real ones
HALVES = frozenset({BF16.name, FP16.name})  # what kernels with 16-bit products take
ON_GPUS = (BF16.name, FP16.name, FP32.name)


def dtype_named(name: str) -> Dtype:
    """The record of a dtype. Raises WeftError where the table has none of that name."""
    if name not in ALL:
        raise WeftError(f"dtype: expected one of {', '.join(ALL)}, got {name!r}")
    return ALL[name]


def product_dtype(left: str, right: str) -> str:
    """The dtype in which a product of operands is computed: one that holds the numbers of both exactly.

    Both FP8 formats fit fp16, and converting to it is the shortest. A 16-bit operand beside an FP8 one stays as it is,
    but for a bf16 query, whose rows are scaled to fit fp16 (`Dtypes.scales_rows`).
    """
    wide = [name for name in (left, right) if name not in EIGHTHS]
    return wide[0] if wide else FP16.name


def copies_values(dtype: str, arch: str) -> bool:
    """Whether `split_forward` keeps a tile of these values in SRAM once more, as the fp16 numbers that FP8 ones become.

    Two values in one instruction are PTX, from compute capability 8.9 on. On 10.0 Triton 3.6 cannot pipeline a loop
    that has it, and puts values into SRAM by itself.
    """
    return dtype in EIGHTHS and arch in ("sm_89", "sm_90")


def named_by_torch() -> dict[torch.dtype, str]:
    """The names of torch's dtypes."""
    return {dtype.torch: name for name, dtype in ALL.items()}
