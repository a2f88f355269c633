"""When FP8 operands become 16-bit ones before a call, by a pass through memory of their own.

On compute capability 9.0 kernels that read FP8 have tiles of at most 32 queries (codegen/targets/triton/forms.py). Few
queries are bound by the bytes of keys, and gain. Many are bound by products, which 16-bit kernels do several times
faster; the copies then cost little.
"""

from __future__ import annotations

LEAST_QUERIES = 256  # that read one key: fewer do not pay for the copies


def pays(arch: str, queries: int) -> bool:
    """Whether a call is faster with copies of its FP8 operands. queries: of all heads that share a key."""
    return arch == "sm_90" and queries >= LEAST_QUERIES


def copied_bytes(elements: int) -> int:
    """What the copies read and write: a byte and two of each element."""
    return 3 * elements
