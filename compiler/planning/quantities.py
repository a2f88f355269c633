"""What each kernel moves and computes, as formulas over the letters of a problem.

Every formula is written once, as a function of `Sizes`, whose fields are numbers when a cost is asked for and sympy
symbols when `explain` prints it (formulas.py). Two figures are kept apart:

- *algorithmic traffic*: what a kernel's loads and stores add up to, as the papers count it with SRAM as the only cache
  (FlashAttention, arXiv 2205.14135, Theorem 2: O(N^2 d^2 / M) elements). On a GPU it is traffic between SRAM and L2.
- *HBM traffic*: what a DRAM counter sees. Tiles that several programs read, or one program several times, mostly hit
  L2. The letter k is the share of such repeated reads and writes that reaches HBM; cost.py works it out.

With k = 1 the same formula gives the algorithmic traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

ROW_STATISTIC = 4  # bytes of one number a row (lse, delta, running maximum or sum): always float32
RUNNING = 4  # bytes of an element of a running sum in HBM: float32


class Sizes(NamedTuple):  # hundreds are made where forms are ranked: a dataclass takes ten times as long
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
    Du: float  # columns of the value as a tensor of its own: Dv, or 0 where the value is part of the key
    Cu: float  # the same of its tile, padding included
    e: float  # bytes of an element of an operand
    bq: float  # rows of a query tile
    bkv: float  # rows of a key tile
    s: float  # SRAM buffers of a tile that is loaded ahead
    owned_in_sram: float  # 1 where the tiles that a program owns lie in SRAM, 0 where registers hold them
    score_bytes: float  # SRAM bytes of a score between its two matrix products; 0 where registers hold it
    n: float  # pairs (query tile, key tile) visited, in the whole problem
    nq: float  # query tiles of one head
    nkv: float  # key tiles of one head
    k: float  # share of repeated reads and writes that reaches HBM: 1 without an L2
    neighbours_miss: float  # the same of reads by neighbours at one time: 0 with an L2 of any size, 1 without
    nonlinear: float  # 1 where the score is not linear in q.k, so that its derivative needs q.k; else 0
    S: float = 1  # parts of the keys that are computed apart
    joined: float = 0  # 1 where these are joined by another kernel, else 0
    m: float = 0  # tiles that need the mask
    long_axis: float = 0  # 1 where the axis whose tiles are measured is long, and looked at in stretches; else 0
    t: float = 0  # tiles of a CPU where neighbours that need no mask are joined
    R: float = 0  # columns of the key that are those of all heads
    u: float = 0  # visited tiles whose pairs are not all level, where level ones have a loop of their own
    begins_zero: float = 1  # 1 where sums of dQ begin as zeros, as where query heads share keys; else 0
    kv_share: float = 1  # bytes of an element of key and value, beside e
    q_share: float = 1  # the same of the query
    v_share: float = 1  # bytes of an element of the value, beside those of the key
    v_copy: float = (
        0  # SRAM bytes of an element of a tile of values once more, where FP8 ones become fp16 there; else 0
    )


Formula: TypeAlias = Callable[[Sizes], float]


# -- parts of formulas -----------------------------------------------------------------------------------------------
def query_bytes(x: Sizes) -> float:
    return x.q_share * x.e * x.B * x.Hq * x.L * x.D


def output_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hq * x.L * x.Dv


def key_elements(x: Sizes) -> float:
    """A row of keys in elements of e bytes. Columns that heads have in common are not FP8 beside others that are."""
    return x.kv_share * (x.D - x.R) + x.R


def common_bytes(x: Sizes) -> float:
    """Of keys, what heads have in common and an L2 holds for all but the first of them, which are neighbours."""
    return x.e * x.B * (x.Hkv - 1) * x.T * x.R * (1 - x.neighbours_miss)


def key_gradient_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hkv * x.T * key_elements(x)


def key_bytes(x: Sizes) -> float:
    return key_gradient_bytes(x) - common_bytes(x)


def value_bytes(x: Sizes) -> float:
    return x.v_share * x.kv_share * x.e * x.B * x.Hkv * x.T * x.Du


def key_value_bytes(x: Sizes) -> float:
    return key_value_gradient_bytes(x) - common_bytes(x)


def key_value_gradient_bytes(x: Sizes) -> float:
    """Each head's own, also of columns that heads share."""
    return x.e * x.B * x.Hkv * x.T * (key_elements(x) + x.v_share * x.kv_share * x.Du)


def row_bytes(x: Sizes) -> float:
    """One float32 a query row."""
    return ROW_STATISTIC * x.B * x.Hq * x.L


def matrix_bytes(x: Sizes) -> float:
    """One matrix [B, Hq, L, T] in HBM: scores, weights or their gradients."""
    return x.e * x.B * x.Hq * x.L * x.T


def score_count(x: Sizes) -> float:
    """Scores of the visited tiles."""
    return x.n * x.bq * x.bkv


def uneven_count(x: Sizes) -> float:
    """Scores of those that read tables by distance pair by pair, where others do not."""
    return x.u * x.bq * x.bkv


def query_visits(x: Sizes) -> float:
    """How often each query row is fetched by programs that own keys."""
    return x.n * x.bq / (x.B * x.Hq * x.L)


def key_visits(x: Sizes) -> float:
    """How often each key row is fetched by programs that own queries."""
    return x.n * x.bkv / (x.B * x.Hkv * x.T)


def queries_again(x: Sizes) -> float:
    """How often a query row comes from HBM."""
    return 1 + (query_visits(x) - 1) * x.k


def queries_beside(x: Sizes) -> float:
    """The same where all fetches of a row are by neighbours, so close together that any L2 has it still."""
    return 1 + (query_visits(x) - 1) * x.neighbours_miss


def keys_again(x: Sizes) -> float:
    return 1 + (key_visits(x) - 1) * x.k


def query_programs(x: Sizes) -> float:
    return x.B * x.Hq * x.nq


def key_programs(x: Sizes) -> float:
    return x.B * x.Hkv * x.nkv


def pair_programs(x: Sizes) -> float:
    return x.B * x.Hq * x.nq * x.nkv


def head_programs(x: Sizes) -> float:
    return x.B * x.Hq


def kv_head_programs(x: Sizes) -> float:
    return x.B * x.Hkv


def none(x: Sizes) -> float:
    return 0 * x.n


# -- flash: FlashAttention-2, arXiv 2307.08691 -----------------------------------------------------------------------
def flash_forward_sram(x: Sizes) -> float:
    """Q, then K and V loaded ahead: what Triton reports, to the byte, where it was compared."""
    keys = x.s * x.bkv * (x.C + x.v_share * x.Cu) * x.e * x.kv_share
    copy = x.v_copy * x.bkv * x.Cu
    return x.owned_in_sram * x.bq * x.C * x.e + keys + copy + x.score_bytes * x.bq * x.bkv


def flash_forward_read(x: Sizes) -> float:
    return query_bytes(x) + keys_again(x) * key_value_bytes(x)


def flash_forward_written(x: Sizes) -> float:
    return output_bytes(x) + row_bytes(x)


def forward_flops(x: Sizes) -> float:
    """S = Q K^T, O = P V."""
    return 2 * score_count(x) * (x.C + x.Cv)


def forward_exps(x: Sizes) -> float:
    """One a score, one a row and visited tile to rescale."""
    return score_count(x) + x.n * x.bq


def statistics_read(x: Sizes) -> float:
    return 2 * output_bytes(x) + row_bytes(x)


def statistics_written(x: Sizes) -> float:
    return 2 * row_bytes(x)


def flash_dquery_sram(x: Sizes) -> float:
    owned = x.owned_in_sram * x.bq * (x.C + x.Cv) * x.e
    return owned + x.s * x.bkv * (x.C + x.Cv) * x.e + x.score_bytes * x.bq * x.bkv


def flash_dquery_read(x: Sizes) -> float:
    return query_bytes(x) + output_bytes(x) + 2 * row_bytes(x) + keys_again(x) * key_value_bytes(x)


def flash_dquery_flops(x: Sizes) -> float:
    """S = Q K^T, dP = dO V^T, dQ = dS K."""
    return 2 * score_count(x) * (2 * x.C + x.Cv)


def flash_dkey_dvalue_sram(x: Sizes) -> float:
    owned = x.owned_in_sram * x.bkv * (x.C + x.Cv) * x.e
    ahead = x.s * x.bq * (x.C + x.Cv) * x.e
    return owned + ahead + 2 * x.s * x.bq * ROW_STATISTIC + 2 * x.score_bytes * x.bq * x.bkv


def flash_dkey_dvalue_read(x: Sizes) -> float:
    return key_value_bytes(x) + queries_again(x) * (query_bytes(x) + output_bytes(x) + 2 * row_bytes(x))


def flash_dkey_dvalue_flops(x: Sizes) -> float:
    """S^T = K Q^T, dP^T = V dO^T, dV = P^T dO, dK = dS^T Q."""
    return 2 * score_count(x) * (2 * x.C + 2 * x.Cv)


# -- streaming: FlashAttention, arXiv 2205.14135, algorithms 1 and 4 -------------------------------------------------


def five_products_flops(x: Sizes) -> float:
    """S, dV, dP, dQ, dK: five products."""
    return 2 * score_count(x) * (3 * x.C + 2 * x.Cv)


# -- standard: FlashAttention paper, algorithms 0 and 3 --------------------------------------------------------------


def score_flops(x: Sizes) -> float:
    """A product over the columns of query and key, or into them."""
    return 2 * score_count(x) * x.C


# -- what is read again ----------------------------------------------------------------------------------------------
def head_keys(x: Sizes) -> float:
    return x.e * x.T * (key_elements(x) + x.v_share * x.kv_share * x.Du)


def head_queries(x: Sizes) -> float:
    return (x.e * (x.D + x.Dv) + 2 * ROW_STATISTIC) * x.L
