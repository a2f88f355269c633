"""The kernels of a backward, in one pass or two."""

from __future__ import annotations

from ....compiler.planning.kernel import Kernel
from ..triton.kernels.pair_sums import FLASH_DDIAGONALS
from .gradients import OWNED_BY_KEYS
from .kernels.backward import FIRST_STORED_BACKWARD, FLASH_BACKWARD, FLASH_DKEY_DVALUE
from .kernels.dquery import FLASH_DQUERY
from .kernels.statistics import FIRST_STORED, ROUND_DQUERY, ROW_STATISTICS, statistics_for

ONE_PASS: tuple[Kernel, ...] = (ROW_STATISTICS, FLASH_BACKWARD, ROUND_DQUERY)
ONE_PASS_STORED: tuple[Kernel, ...] = (FIRST_STORED, FIRST_STORED_BACKWARD, ROUND_DQUERY)
DIAGONAL_SUMS = FLASH_DDIAGONALS  # of another target, in a module of its own


def two_passes(wanted: frozenset[str], summed: bool = False, by_keys: bool = False) -> tuple[Kernel, ...]:
    """The kernels of wanted gradients, each sum with one owner; of both sides where only a sink has one.

    Statistics are as the keys' pass wants them, if it runs. summed, by_keys: gradients of the score's operands, which
    the queries' or the keys' pass sums, are wanted too.
    """
    owns_queries, owns_keys = "query" in wanted or summed, bool(wanted & OWNED_BY_KEYS) or by_keys
    both = not (owns_queries or owns_keys)
    passes = [FLASH_DQUERY] if owns_queries or both else []
    passes += [FLASH_DKEY_DVALUE] if owns_keys or both else []
    return statistics_for(passes[-1].name), *passes
