"""The kernels of every schedule and target, each as formulas of what it moves and computes (quantities.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..analysis.records import Axis
from .quantities import (
    Formula,
    cpu_backward_read,
    cpu_backward_written,
    diagonal_programs,
    diagonal_sums_written,
    dscores_flops,
    flash_dkey_dvalue_flops,
    flash_dkey_dvalue_read,
    flash_dkey_dvalue_sram,
    flash_dquery_flops,
    flash_dquery_read,
    flash_dquery_sram,
    flash_forward_read,
    flash_forward_sram,
    flash_forward_written,
    forward_exps,
    forward_flops,
    gathering_sram,
    head_keys,
    head_programs,
    head_queries,
    head_running,
    head_running_gradient,
    hopper_backward_sram,
    hopper_backward_written,
    hopper_drawn_keys_sram,
    hopper_drawn_sram,
    hopper_statistics_and_zeros_sram,
    joined_written,
    key_gradient_bytes,
    key_programs,
    key_value_gradient_bytes,
    key_visits,
    kv_head_programs,
    matrix_bytes,
    none,
    one_head_key,
    one_head_output,
    one_head_query,
    one_head_value,
    output_bytes,
    pair_programs,
    pair_sums_flops,
    pair_sums_read,
    pair_sums_sram,
    pair_sums_written,
    parts_bytes,
    product_sram,
    query_bytes,
    query_programs,
    query_visits,
    round_dquery_sram,
    row_programs,
    score_count,
    score_flops,
    split_programs,
    split_written,
    standard_dkey_read,
    standard_dquery_read,
    standard_dscores_read,
    standard_dvalue_read,
    standard_dweights_read,
    standard_output_read,
    standard_scores_read,
    standard_softmax_exps,
    standard_softmax_written,
    standard_weights_read,
    statistics_and_group_zeros,
    statistics_and_zeros,
    statistics_read,
    statistics_written,
    streaming_backward_flops,
    streaming_backward_read,
    streaming_backward_sram,
    streaming_backward_written,
    streaming_forward_read,
    streaming_forward_sram,
    streaming_forward_written,
    sums_of_dquery,
    value_bytes,
    value_flops,
    weighing_sram,
)
from .signature import Direction

Bound = Literal["matrix", "exp", "other", "mask", "tiles", "memory", "L2", "latency", "passes", "calls", "torch"]
Algorithm = Literal["standard", "streaming", "flash", "split_kv"]
Slot = Literal["forward", "backward_q", "backward_kv"]

_READ_PAIRS = frozenset(
    {
        "flash_forward",
        "split_forward",
        "flash_dquery",
        "flash_dkey_dvalue",
        "streaming_forward",
        "streaming_backward",
        "flash_dpairs",
        "flash_ddiagonals",
    }
)


@dataclass(frozen=True)
class Again:
    """Operands that a kernel reads more than once."""

    visits: Formula  # how often each row is fetched
    head_bytes: Formula  # bytes of one head of these operands


@dataclass(frozen=True)
class Kernel:
    """A kernel as formulas. Bytes are of the whole kernel, `sram` of one program."""

    name: str
    direction: Direction
    slot: Slot  # which column of the tables of tilings is its own
    axis: Axis  # what a program loops over: "kv" for a kernel that owns query tiles
    loop: str  # the same in words
    programs: Formula
    sram: Formula
    read: Formula
    written: Formula
    flops: Formula  # of matrix products; padding and masked parts of visited tiles included (`useful` leaves them out)
    exps: Formula
    again: Again
    follows: str | None = None  # the kernel whose form it has, being cut as that one is; None: a form of its own
    steps: Formula = none  # of a program, where that is what takes time: each waits for what the one before has read

    @property
    def reads_pairs(self) -> bool:
        """Whether its loop evaluates the variant's score or mask, for each pair of a query and a key."""
        return self.name in _READ_PAIRS


def traffic(kernel: Kernel) -> Formula:
    """Bytes that pass between SRAM and what lies behind it: of sizes with k = j = 1, the algorithmic traffic."""
    return lambda x: kernel.read(x) + kernel.written(x)


_KEY = Again(key_visits, one_head_key)
_VALUE = Again(key_visits, one_head_value)
_QUERY = Again(query_visits, one_head_query)
_OUTPUT = Again(query_visits, one_head_output)
KEYS_AGAIN = Again(key_visits, head_keys)
QUERIES_AGAIN = Again(query_visits, head_queries)
_RUNNING = Again(query_visits, head_running)
_RUNNING_GRADIENT = Again(query_visits, head_running_gradient)


# -- the kernels -----------------------------------------------------------------------------------------------------
_OVER_KEYS, _OVER_QUERIES = "the key tiles that its queries see", "the query tiles that see its keys"
_ALL_KEYS, _ALL_QUERIES = "all key tiles", "all query tiles"
_SWEEPS = "key tiles, and for each of them the query tiles that see it"
_ONE_TILE, _ROWS = "nothing: one tile of scores", "its rows"
_OWN_PART, _PARTS = "its part of the key tiles that its rows see", "the parts of its row"
_SHARING, _DIAGONAL = "the heads that read what its tile of pairs reads", "the tiles of its diagonal"

ROW_STATISTICS = Kernel(
    "row_statistics", "backward", "backward_q", "kv", _ROWS, query_programs, none,
    statistics_read, statistics_written, none, none, KEYS_AGAIN,
)  # fmt: skip
FLASH = (
    Kernel(
        "flash_forward", "forward", "forward", "kv", _OVER_KEYS, query_programs, flash_forward_sram,
        flash_forward_read, flash_forward_written, forward_flops, forward_exps, KEYS_AGAIN,
    ),
    ROW_STATISTICS,
    Kernel(
        "flash_dquery", "backward", "backward_q", "kv", _OVER_KEYS, query_programs, flash_dquery_sram,
        flash_dquery_read, query_bytes, flash_dquery_flops, score_count, KEYS_AGAIN,
    ),
    Kernel(
        "flash_dkey_dvalue", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, flash_dkey_dvalue_sram,
        flash_dkey_dvalue_read, key_value_gradient_bytes, flash_dkey_dvalue_flops, score_count, QUERIES_AGAIN,
    ),
)  # fmt: skip
SPLIT_KV = (
    Kernel(
        "split_forward", "forward", "forward", "kv", _OWN_PART, split_programs, flash_forward_sram,
        flash_forward_read, split_written, forward_flops, forward_exps, KEYS_AGAIN,
    ),
    Kernel(
        "join_parts", "forward", "forward", "kv", _PARTS, row_programs, none,
        parts_bytes, joined_written, none, none, KEYS_AGAIN, "split_forward",
    ),
)  # fmt: skip
# What sums the gradients of reads of pairs, after the others (tables.py)
PAIR_SUMS = (
    Kernel(
        "flash_dpairs", "backward", "backward_q", "kv", _SHARING, pair_programs, pair_sums_sram,
        pair_sums_read, pair_sums_written, pair_sums_flops, score_count, KEYS_AGAIN,
    ),
    Kernel(
        "flash_ddiagonals", "backward", "backward_q", "kv", _DIAGONAL, diagonal_programs, pair_sums_sram,
        pair_sums_read, diagonal_sums_written, pair_sums_flops, score_count, KEYS_AGAIN,
    ),
)  # fmt: skip
STREAMING = (
    Kernel(
        "streaming_forward", "forward", "forward", "q", _SWEEPS, head_programs, streaming_forward_sram,
        streaming_forward_read, streaming_forward_written, forward_flops, forward_exps, _RUNNING,
    ),
    ROW_STATISTICS,
    Kernel(
        "streaming_backward", "backward", "backward_q", "q", _SWEEPS, kv_head_programs, streaming_backward_sram,
        streaming_backward_read, streaming_backward_written, streaming_backward_flops, score_count, _RUNNING_GRADIENT,
    ),
)  # fmt: skip
STANDARD = (
    Kernel(
        "standard_scores", "forward", "forward", "kv", _ONE_TILE, pair_programs, product_sram,
        standard_scores_read, matrix_bytes, score_flops, none, _KEY,
    ),
    Kernel(
        "standard_softmax", "forward", "forward", "kv", _ROWS, query_programs, none,
        matrix_bytes, standard_softmax_written, none, standard_softmax_exps, _KEY,
    ),
    Kernel(
        "standard_output", "forward", "forward", "kv", _ALL_KEYS, query_programs, weighing_sram,
        standard_output_read, output_bytes, value_flops, none, _VALUE,
    ),
    ROW_STATISTICS,
    Kernel(
        "standard_weights", "backward", "backward_q", "kv", _ONE_TILE, pair_programs, product_sram,
        standard_weights_read, matrix_bytes, score_flops, score_count, _KEY,
    ),
    Kernel(
        "standard_dvalue", "backward", "backward_kv", "q", _ALL_QUERIES, key_programs, gathering_sram,
        standard_dvalue_read, value_bytes, value_flops, none, _OUTPUT,
    ),
    Kernel(
        "standard_dweights", "backward", "backward_q", "kv", _ONE_TILE, pair_programs, product_sram,
        standard_dweights_read, matrix_bytes, value_flops, none, _VALUE,
    ),
    Kernel(
        "standard_dscores", "backward", "backward_q", "kv", _ONE_TILE, pair_programs, none,
        standard_dscores_read, matrix_bytes, dscores_flops, none, _KEY,
    ),
    Kernel(
        "standard_dquery", "backward", "backward_q", "kv", _ALL_KEYS, query_programs, weighing_sram,
        standard_dquery_read, query_bytes, score_flops, none, _KEY,
    ),
    Kernel(
        "standard_dkey", "backward", "backward_kv", "q", _ALL_QUERIES, key_programs, gathering_sram,
        standard_dkey_read, key_gradient_bytes, score_flops, none, _QUERY,
    ),
)  # fmt: skip
KERNELS: dict[Algorithm, tuple[Kernel, ...]] = {
    "flash": FLASH, "split_kv": SPLIT_KV, "streaming": STREAMING, "standard": STANDARD,
}  # fmt: skip

# The cpu target: queries outer in both directions, five products in one backward pass.
CPU_FLASH = (
    FLASH[0],
    Kernel(
        "flash_backward", "backward", "backward_q", "kv", _OVER_KEYS, query_programs, flash_dquery_sram,
        cpu_backward_read, cpu_backward_written, streaming_backward_flops, score_count, KEYS_AGAIN,
    ),
)  # fmt: skip


# The hopper target: keys outer in the backward, five products in one pass, sums of dQ in HBM.
HOPPER_STATISTICS = Kernel(
    "row_statistics", "backward", "backward_q", "kv", _ROWS, query_programs, hopper_statistics_and_zeros_sram,
    statistics_read, statistics_and_zeros, none, none, KEYS_AGAIN, "flash_backward",
)  # fmt: skip
# where a head's first shares of dQ are stored
FIRST_STORED_STATISTICS = replace(HOPPER_STATISTICS, written=statistics_and_group_zeros)
HOPPER_BACKWARD = Kernel(
    "flash_backward", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, hopper_backward_sram,
    flash_dkey_dvalue_read, hopper_backward_written, streaming_backward_flops, score_count, QUERIES_AGAIN,
)  # fmt: skip
DRAWN_BACKWARD = replace(HOPPER_BACKWARD, sram=hopper_drawn_sram)  # where weights are dropped
DRAWN_KEYS = replace(FLASH[3], sram=hopper_drawn_keys_sram)  # likewise, in two passes
ROUND_DQUERY = Kernel(
    "round_dquery", "backward", "backward_q", "kv", _ROWS, query_programs, round_dquery_sram,
    sums_of_dquery, query_bytes, none, none, KEYS_AGAIN, "flash_backward",
)  # fmt: skip
