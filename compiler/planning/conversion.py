"""When FP8 operands become 16-bit ones before a call, by a pass through memory of their own.

On compute capability 9.0 kernels that read FP8 have tiles of at most 32 queries (codegen/targets/triton/forms.py). Few
queries are bound by the bytes of keys, and gain. Many are bound by products, which 16-bit kernels do several times
faster; the copies then cost little. The figures are those of one H100 (docs/experiments/2026-11-27-fp8-copies.md), and
of one H200 for latent caches whose tiles become 16-bit numbers in SRAM (2026-11-29-fp8-latent-tiles.md).
"""

from __future__ import annotations

OF_HEADS, _OF_16_BITS = 150e12, 600e12  # FLOP/s of the two kinds of kernels
OF_LATENT = 80e12  # of those that read latent caches of FP8, which have tiles of 512 columns and 32 keys
OF_LATENT_IN_SRAM = 400e12  # of those that make tiles of such a cache 16-bit numbers in SRAM
_COPIED = 2e12  # bytes/s, read and written
_LAUNCHED = 50e-6  # seconds that the copies take the host


def pays(arch: str, flops: float, copied: int, rate: float = OF_HEADS) -> bool:
    """Whether a call of so many FLOPs is faster with copies that read and write so many bytes.

    rate: FLOP/s of the kernels that read its operands in FP8.

    >>> pays("sm_90", 4e9 * 128, 3 << 25), pays("sm_90", 4e8, 3 << 25)
    (True, False)
    """
    gained = flops * (1 / rate - 1 / _OF_16_BITS)
    return arch == "sm_90" and gained > copied / _COPIED + _LAUNCHED
