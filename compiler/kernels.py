"""What each kernel moves and computes, as formulas over the letters of a problem.

Every formula is written once, as a function of `Sizes`, whose fields are numbers when a cost is asked for and sympy
symbols when `explain` prints it (formulas.py). Two figures are kept apart:

- *algorithmic traffic*: what a kernel's loads and stores add up to, as the papers count it with SRAM as the only cache
  (FlashAttention, arXiv 2205.14135, Theorem 2: O(N^2 d^2 / M) elements). On a GPU it is traffic between SRAM and L2.
- *HBM traffic*: what a DRAM counter sees. Tiles that several programs read, or one program several times, mostly hit L2.
  The letter r is the number of times that re-read operands come from HBM; cost.py works it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Axis = Literal["kv", "q"]
Direction = Literal["forward", "backward"]
Slot = Literal["forward", "backward_q", "backward_kv"]

ROW_STATISTIC = 4  # bytes of one number a row (lse, delta, running maximum or sum): always float32


@dataclass(frozen=True)
class Sizes:
    """The letters of the formulas: numbers, or sympy symbols of the same names."""

    B: float  # batch
    Hq: float  # query heads
    Hkv: float  # key and value heads
    L: float  # queries
    T: float  # keys
    D: float  # columns of query and key
    Dv: float  # columns of value and output
    C: float  # columns of a query or key tile, padding included
    Cv: float  # columns of a value or output tile, padding included
    e: float  # bytes of an element of an operand
    bq: float  # rows of a query tile
    bkv: float  # rows of a key tile
    s: float  # SRAM buffers of a tile that is loaded ahead
    h: float  # 1 where the tiles that a program owns lie in SRAM, 0 where registers hold them
    p: float  # SRAM bytes of a score between its two matrix products; 0 where registers hold it
    a: float  # bytes of an intermediate in HBM: a stored score, an element of the running output
    n: float  # pairs (query tile, key tile) visited, in the whole problem
    nq: float  # query tiles of one head
    nkv: float  # key tiles of one head
    r: float  # times that re-read operands come from HBM


Formula = Callable[[Sizes], float]


Formula = Callable[[Sizes], float]


@dataclass(frozen=True)
class Again:
    """Operands that a kernel reads more than once."""

    rows: Formula  # rows that all programs fetch
    rows_once: Formula  # rows that exist
    head_bytes: Formula  # bytes of one head of these operands


@dataclass(frozen=True)
class Kernel:
    """A kernel as formulas. Bytes are of the whole kernel, `sram` of one program."""

    name: str
    direction: Direction
    slot: Slot  # the tiling of the schedule that it uses
    axis: Axis  # what a program loops over: "kv" for a kernel that owns query tiles
    loop: str  # the same in words
    programs: Formula
    sram: Formula
    read: Formula
    written: Formula
    flops: Formula  # of matrix products; padding and masked parts of visited tiles included
    exps: Formula
    again: Again


# -- parts of formulas --------------------------------------------------------------------------------------------------
def query_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hq * x.L * x.D


def output_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hq * x.L * x.Dv


def key_value_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hkv * x.T * (x.D + x.Dv)


def row_bytes(x: Sizes) -> float:
    """One float32 a query row."""
    return ROW_STATISTIC * x.B * x.Hq * x.L


def score_count(x: Sizes) -> float:
    """Scores of the visited tiles."""
    return x.n * x.bq * x.bkv


def query_programs(x: Sizes) -> float:
    return x.B * x.Hq * x.nq


def key_programs(x: Sizes) -> float:
    return x.B * x.Hkv * x.nkv


# -- flash: FlashAttention-2, arXiv 2307.08691 ----------------------------------------------------------------------------
def flash_forward_sram(x: Sizes) -> float:
    """Q, then K and V loaded ahead. With tiles as registers allow, this is what Triton reports to the byte."""
    return x.h * x.bq * x.C * x.e + x.s * x.bkv * (x.C + x.Cv) * x.e + x.p * x.bq * x.bkv


def flash_forward_read(x: Sizes) -> float:
    return query_bytes(x) + x.r * key_value_bytes(x)


def flash_forward_written(x: Sizes) -> float:
    return output_bytes(x) + row_bytes(x)


def flash_forward_flops(x: Sizes) -> float:
    return 2 * score_count(x) * (x.C + x.Cv)


def forward_exps(x: Sizes) -> float:
    """One a score, one a row and visited tile to rescale."""
    return score_count(x) + x.n * x.bq


def statistics_read(x: Sizes) -> float:
    return 2 * output_bytes(x) + row_bytes(x)


def statistics_written(x: Sizes) -> float:
    return 2 * row_bytes(x)


def flash_dquery_sram(x: Sizes) -> float:
    owned = x.h * x.bq * (x.C + x.Cv) * x.e
    return owned + x.s * x.bkv * (x.C + x.Cv) * x.e + x.p * x.bq * x.bkv


def flash_dquery_read(x: Sizes) -> float:
    return query_bytes(x) + output_bytes(x) + 2 * row_bytes(x) + x.r * key_value_bytes(x)


def flash_dquery_flops(x: Sizes) -> float:
    """S = Q K^T, dP = dO V^T, dQ = dS K."""
    return 2 * score_count(x) * (2 * x.C + x.Cv)


def flash_dkey_dvalue_sram(x: Sizes) -> float:
    owned = x.h * x.bkv * (x.C + x.Cv) * x.e
    ahead = x.s * x.bq * (x.C + x.Cv) * x.e
    return owned + ahead + 2 * x.s * x.bq * ROW_STATISTIC + 2 * x.p * x.bq * x.bkv


def flash_dkey_dvalue_read(x: Sizes) -> float:
    return key_value_bytes(x) + x.r * (query_bytes(x) + output_bytes(x) + 2 * row_bytes(x))


def flash_dkey_dvalue_flops(x: Sizes) -> float:
    """S^T = K Q^T, dP^T = V dO^T, dV = P^T dO, dK = dS^T Q."""
    return 2 * score_count(x) * (2 * x.C + 2 * x.Cv)


# -- streaming: FlashAttention, arXiv 2205.14135, algorithms 1 and 4 --------------------------------------------------------
def streaming_forward_sram(x: Sizes) -> float:
    """K and V stay; Q is loaded ahead; the running output is in registers while a tile is worked on."""
    return x.h * x.bkv * (x.C + x.Cv) * x.e + x.s * x.bq * x.C * x.e + x.p * x.bq * x.bkv


def running_bytes(x: Sizes) -> float:
    """The running output of all rows, with its maximum and sum."""
    return x.a * x.B * x.Hq * x.L * x.Dv + 2 * row_bytes(x)


def streaming_forward_read(x: Sizes) -> float:
    """Each query head's program reads K and V once, and Q and the running rows once a key tile."""
    return x.e * x.B * x.Hq * x.T * (x.D + x.Dv) + x.r * (query_bytes(x) + running_bytes(x))


def streaming_forward_written(x: Sizes) -> float:
    return x.r * running_bytes(x)


def streaming_backward_sram(x: Sizes) -> float:
    owned = x.h * x.bkv * (x.C + x.Cv) * x.e
    return owned + x.s * x.bq * (x.C + x.Cv) * x.e + 2 * x.p * x.bq * x.bkv


def streaming_backward_read(x: Sizes) -> float:
    """K and V once; Q, O, dO, the running dQ and two statistics once a key tile."""
    running = x.a * x.B * x.Hq * x.L * x.D
    again = query_bytes(x) + 2 * output_bytes(x) + running + 2 * row_bytes(x)
    return x.e * x.B * x.Hq * x.T * (x.D + x.Dv) + x.r * again


def streaming_backward_written(x: Sizes) -> float:
    return key_value_bytes(x) + x.r * x.a * x.B * x.Hq * x.L * x.D


def streaming_backward_flops(x: Sizes) -> float:
    """S, dV, dP, dQ, dK: five products."""
    return 2 * score_count(x) * (3 * x.C + 2 * x.Cv)


# -- standard: FlashAttention paper, algorithms 0 and 3 ---------------------------------------------------------------------
def stored_bytes(x: Sizes) -> float:
    """One matrix [B, Hq, L, T] in HBM: scores, weights or their gradients."""
    return x.a * x.B * x.Hq * x.L * x.T


def product_sram(x: Sizes) -> float:
    """Both factors of a matrix product, loaded ahead."""
    return x.s * (x.bq + x.bkv) * x.C * x.e


def standard_scores_read(x: Sizes) -> float:
    return query_bytes(x) + x.r * x.e * x.B * x.Hkv * x.T * x.D


def standard_softmax_read(x: Sizes) -> float:
    return stored_bytes(x)


def standard_softmax_written(x: Sizes) -> float:
    return stored_bytes(x) + row_bytes(x)


def standard_output_read(x: Sizes) -> float:
    return stored_bytes(x) + x.r * x.e * x.B * x.Hkv * x.T * x.Dv


def scores_flops(x: Sizes) -> float:
    return 2 * score_count(x) * x.C


def output_flops(x: Sizes) -> float:
    return 2 * score_count(x) * x.Cv


def standard_dvalue_read(x: Sizes) -> float:
    return stored_bytes(x) + x.r * output_bytes(x)


def standard_dvalue_written(x: Sizes) -> float:
    return x.e * x.B * x.Hkv * x.T * x.Dv


def standard_dscores_read(x: Sizes) -> float:
    """dP = dO V^T and dS = P * (dP - delta): reads P, dO and V."""
    return stored_bytes(x) + output_bytes(x) + row_bytes(x) + x.r * x.e * x.B * x.Hkv * x.T * x.Dv


def standard_dquery_read(x: Sizes) -> float:
    return stored_bytes(x) + x.r * x.e * x.B * x.Hkv * x.T * x.D


def standard_dkey_read(x: Sizes) -> float:
    return stored_bytes(x) + x.r * query_bytes(x)


def standard_dkey_written(x: Sizes) -> float:
    return x.e * x.B * x.Hkv * x.T * x.D


# -- the kernels ----------------------------------------------------------------------------------------------------------
def query_rows(x: Sizes) -> float:
    return x.B * x.Hq * x.L


def key_rows(x: Sizes) -> float:
    return x.B * x.Hkv * x.T


def query_rows_again(x: Sizes) -> float:
    return x.n * x.bq


def key_rows_again(x: Sizes) -> float:
    return x.n * x.bkv


def head_keys(x: Sizes) -> float:
    return x.e * x.T * (x.D + x.Dv)


def head_queries(x: Sizes) -> float:
    return x.e * x.L * (x.D + x.Dv) + 2 * ROW_STATISTIC * x.L


def head_running(x: Sizes) -> float:
    return (x.e * x.D + x.a * x.Dv + 2 * ROW_STATISTIC) * x.L


def head_running_gradient(x: Sizes) -> float:
    return (x.e * (x.D + 2 * x.Dv) + x.a * x.D + 2 * ROW_STATISTIC) * x.L


def score_programs(x: Sizes) -> float:
    return x.B * x.Hq * x.nq * x.nkv


def head_programs(x: Sizes) -> float:
    return x.B * x.Hq


def none(x: Sizes) -> float:
    return 0 * x.n


_KEYS = Again(key_rows_again, key_rows, head_keys)
_QUERIES = Again(query_rows_again, query_rows, head_queries)
_RUNNING = Again(query_rows_again, query_rows, head_running)
_RUNNING_GRADIENT = Again(query_rows_again, query_rows, head_running_gradient)
_OVER_KEYS, _OVER_QUERIES = "key tiles that its queries see", "query tiles that see its keys, of each head of the group"
_ONE_TILE, _ROWS = "one tile of scores", "its rows, once"

FLASH = (
    Kernel(
        "flash_forward", "forward", "forward", "kv", _OVER_KEYS, query_programs, flash_forward_sram,
        flash_forward_read, flash_forward_written, flash_forward_flops, forward_exps, _KEYS,
    ),
    Kernel(
        "row_statistics", "backward", "backward_q", "kv", _ROWS, query_programs, none,
        statistics_read, statistics_written, none, none, _KEYS,
    ),
    Kernel(
        "flash_dquery", "backward", "backward_q", "kv", _OVER_KEYS, query_programs, flash_dquery_sram,
        flash_dquery_read, query_bytes, flash_dquery_flops, score_count, _KEYS,
    ),
    Kernel(
        "flash_dkey_dvalue", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, flash_dkey_dvalue_sram,
        flash_dkey_dvalue_read, key_value_bytes, flash_dkey_dvalue_flops, score_count, _QUERIES,
    ),
)  # fmt: skip
STREAMING = (
    Kernel(
        "streaming_forward", "forward", "forward", "q", "key tiles, and for each all query tiles that see it",
        head_programs, streaming_forward_sram, streaming_forward_read, streaming_forward_written,
        flash_forward_flops, forward_exps, _RUNNING,
    ),
    Kernel(
        "streaming_backward", "backward", "backward_q", "q", "key tiles, and for each all query tiles that see it",
        head_programs, streaming_backward_sram, streaming_backward_read, streaming_backward_written,
        streaming_backward_flops, score_count, _RUNNING_GRADIENT,
    ),
)  # fmt: skip
STANDARD = (
    Kernel(
        "standard_scores", "forward", "forward", "kv", _ONE_TILE, score_programs, product_sram,
        standard_scores_read, stored_bytes, scores_flops, none, _KEYS,
    ),
    Kernel(
        "standard_softmax", "forward", "forward", "kv", _ROWS, query_programs, none,
        standard_softmax_read, standard_softmax_written, none, score_count, _KEYS,
    ),
    Kernel(
        "standard_output", "forward", "forward", "kv", _OVER_KEYS, query_programs, product_sram,
        standard_output_read, output_bytes, output_flops, none, _KEYS,
    ),
    Kernel(
        "row_statistics", "backward", "backward_q", "kv", _ROWS, query_programs, none,
        statistics_read, statistics_written, none, none, _KEYS,
    ),
    Kernel(
        "standard_dvalue", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, product_sram,
        standard_dvalue_read, standard_dvalue_written, output_flops, none, _QUERIES,
    ),
    Kernel(
        "standard_dscores", "backward", "backward_q", "kv", _ONE_TILE, score_programs, product_sram,
        standard_dscores_read, stored_bytes, output_flops, none, _KEYS,
    ),
    Kernel(
        "standard_dquery", "backward", "backward_q", "kv", _OVER_KEYS, query_programs, product_sram,
        standard_dquery_read, query_bytes, scores_flops, none, _KEYS,
    ),
    Kernel(
        "standard_dkey", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, product_sram,
        standard_dkey_read, standard_dkey_written, scores_flops, none, _QUERIES,
    ),
)  # fmt: skip
KERNELS = {"flash": FLASH, "streaming": STREAMING, "standard": STANDARD}
