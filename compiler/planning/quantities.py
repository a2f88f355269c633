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

from .tables import DIAGONAL_PARTS

ROW_STATISTIC = 4  # bytes of one number a row (lse, delta, running maximum or sum): always float32
RUNNING = 4  # bytes of an element of a running sum in HBM: float32
REORDERING = 8192  # bytes that Triton takes to change the order of a tile's registers
SPAN = 16  # bytes of a range of tiles: four int32
FLAG = 4  # bytes that say whether tiles are listed behind ranges: an int32
LEAST_AND_GREATEST = 16  # bytes of the ends of a value in a tile: two int64
BITS = 8  # bytes of the bits of a value in a tile
READ = 8  # bytes of what a mask reads at a position, at most


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
    h: float  # 1 where the tiles that a program owns lie in SRAM, 0 where registers hold them
    p: float  # SRAM bytes of a score between its two matrix products; 0 where registers hold it
    n: float  # pairs (query tile, key tile) visited, in the whole problem
    nq: float  # query tiles of one head
    nkv: float  # key tiles of one head
    k: float  # share of repeated reads and writes that reaches HBM: 1 without an L2
    j: float  # the same of reads by neighbours that run at the same time: 0 with an L2 of any size, 1 without
    w: float  # 1 where the score is not linear in q.k, so that its derivative needs q.k; else 0
    S: float = 1  # parts of the keys that are computed apart
    d: float = 0  # 1 where these are joined by another kernel, else 0
    m: float = 0  # tiles that need the mask
    r: float = 0  # 1 where the axis whose tiles are measured is long: they are looked at in stretches; else 0
    t: float = 0  # tiles of a CPU where neighbours that need no mask are joined
    R: float = 0  # columns of the key that are those of all heads
    u: float = 0  # visited tiles whose pairs are not all level, where level ones have a loop of their own
    z: float = 1  # 1 where sums of dQ begin as zeros even if first shares can be stored: query heads share keys; else 0


Formula: TypeAlias = Callable[[Sizes], float]


# -- parts of formulas -----------------------------------------------------------------------------------------------
def query_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hq * x.L * x.D


def output_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hq * x.L * x.Dv


def common_bytes(x: Sizes) -> float:
    """Of keys, what heads have in common and an L2 holds for all but the first of them, which are neighbours."""
    return x.e * x.B * (x.Hkv - 1) * x.T * x.R * (1 - x.j)


def key_gradient_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hkv * x.T * x.D


def key_bytes(x: Sizes) -> float:
    return key_gradient_bytes(x) - common_bytes(x)


def value_bytes(x: Sizes) -> float:
    return x.e * x.B * x.Hkv * x.T * x.Du


def key_value_bytes(x: Sizes) -> float:
    return key_value_gradient_bytes(x) - common_bytes(x)


def key_value_gradient_bytes(x: Sizes) -> float:
    """Each head's own, also of columns that heads share."""
    return x.e * x.B * x.Hkv * x.T * (x.D + x.Du)


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
    return 1 + (query_visits(x) - 1) * x.j


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
    return x.h * x.bq * x.C * x.e + x.s * x.bkv * (x.C + x.Cu) * x.e + x.p * x.bq * x.bkv


def hopper_forward_sram(x: Sizes) -> float:
    """Q, K and V in s slots each, and O on its way out; barriers add less than 1 KiB."""
    return x.e * (x.bq * x.C + x.s * x.bkv * (x.C + x.Cv) + x.bq * x.Cv)


def hopper_forward_sram_two_queries(x: Sizes) -> float:
    """The same with Q double-buffered, as three consumers have it."""
    return hopper_forward_sram(x) + x.e * x.bq * x.C


def hopper_forward_sram_in_place(x: Sizes) -> float:
    """The same with O in the place of Q."""
    return hopper_forward_sram(x) - x.e * x.bq * x.Cv


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
    owned = x.h * x.bq * (x.C + x.Cv) * x.e
    return owned + x.s * x.bkv * (x.C + x.Cv) * x.e + x.p * x.bq * x.bkv


def flash_dquery_read(x: Sizes) -> float:
    return query_bytes(x) + output_bytes(x) + 2 * row_bytes(x) + keys_again(x) * key_value_bytes(x)


def flash_dquery_flops(x: Sizes) -> float:
    """S = Q K^T, dP = dO V^T, dQ = dS K."""
    return 2 * score_count(x) * (2 * x.C + x.Cv)


def flash_dkey_dvalue_sram(x: Sizes) -> float:
    owned = x.h * x.bkv * (x.C + x.Cv) * x.e
    ahead = x.s * x.bq * (x.C + x.Cv) * x.e
    return owned + ahead + 2 * x.s * x.bq * ROW_STATISTIC + 2 * x.p * x.bq * x.bkv


def flash_dkey_dvalue_read(x: Sizes) -> float:
    return key_value_bytes(x) + queries_again(x) * (query_bytes(x) + output_bytes(x) + 2 * row_bytes(x))


def flash_dkey_dvalue_flops(x: Sizes) -> float:
    """S^T = K Q^T, dP^T = V dO^T, dV = P^T dO, dK = dS^T Q."""
    return 2 * score_count(x) * (2 * x.C + 2 * x.Cv)


ROTARY_COLUMNS = 64  # of a latent tile behind its pieces; weights of 64 keys take their place
PIECE_COLUMNS, NARROW_COLUMNS = 128, 64  # of its pieces


def hopper_latent_sram(x: Sizes) -> float:
    """Pieces of keys in s slots, half of a query's latent columns, its and keys' rotary ones twice; handshakes."""
    rotary = 2 * x.bkv * ROTARY_COLUMNS
    return x.e * (x.s * x.bkv * PIECE_COLUMNS + x.bq * x.Cv / 2 + rotary) + 3 * x.bq * ROW_STATISTIC + HANDSHAKES


def hopper_narrow_latent_sram(x: Sizes) -> float:
    """The same with narrow pieces."""
    return hopper_latent_sram(x) - x.e * x.s * x.bkv * (PIECE_COLUMNS - NARROW_COLUMNS)


# -- flash: gradients of what pairs read, where a program owns the pairs ---------------------------------------------
def pair_sums_sram(x: Sizes) -> float:
    """Q, dO, K and V of a visited tile, loaded ahead, and the statistics; of a diagonal also its sums, to be turned."""
    return x.s * ((x.bq + x.bkv) * (x.C + x.Cv) * x.e + 2 * x.bq * ROW_STATISTIC) + RUNNING * x.bq * x.bkv


def pair_sums_read(x: Sizes) -> float:
    """Everything at every visit: what programs that run together share comes from L2."""
    rows = query_bytes(x) + output_bytes(x) + 2 * row_bytes(x)
    return queries_again(x) * rows + keys_again(x) * key_value_bytes(x)


def pair_sums_written(x: Sizes) -> float:
    """A sum of each pair of visited tiles at most; what is shared by heads is written once."""
    return RUNNING * score_count(x)


def diagonal_sums_written(x: Sizes) -> float:
    """A sum and the place of an entry for each diagonal of each head, by each program that has a part of it."""
    return DIAGONAL_PARTS * (RUNNING + 8) * 2 * x.B * x.Hq * (x.nq * x.bq + x.nkv * x.bkv)


def pair_sums_flops(x: Sizes) -> float:
    """S = Q K^T, dP = dO V^T."""
    return 2 * score_count(x) * (x.C + x.Cv)


def diagonal_programs(x: Sizes) -> float:
    return DIAGONAL_PARTS * x.B * x.Hq * (x.nq + x.nkv - 1)


# -- split-KV: Flash-Decoding (Dao, Haziza, Massa and Sizov 2023) ----------------------------------------------------
def split_programs(x: Sizes) -> float:
    """Tiles of the rows that share a key head, and parts of the keys."""
    return x.B * x.Hkv * x.nq * x.S


def row_programs(x: Sizes) -> float:
    """One a row, where there is something to join."""
    return x.d * x.B * x.Hq * x.L


def parts_bytes(x: Sizes) -> float:
    """An output and a log-sum-exp of each part, float32."""
    return x.d * x.S * ROW_STATISTIC * x.B * x.Hq * x.L * (x.Dv + 1)


def split_written(x: Sizes) -> float:
    return parts_bytes(x) + (1 - x.d) * (output_bytes(x) + row_bytes(x))


def joined_written(x: Sizes) -> float:
    return x.d * (output_bytes(x) + row_bytes(x))


# -- streaming: FlashAttention, arXiv 2205.14135, algorithms 1 and 4 -------------------------------------------------
def streaming_forward_sram(x: Sizes) -> float:
    """K and V stay; Q is loaded ahead; the running output is in registers while a tile is worked on."""
    return x.h * x.bkv * (x.C + x.Cv) * x.e + x.s * x.bq * x.C * x.e + x.p * x.bq * x.bkv


def running_output(x: Sizes) -> float:
    """The running output of all rows, float32."""
    return RUNNING * x.B * x.Hq * x.L * x.Dv


def running_gradient(x: Sizes) -> float:
    """The running gradient of the query, float32."""
    return RUNNING * x.B * x.Hq * x.L * x.D


def streaming_forward_read(x: Sizes) -> float:
    """K and V once. At every visit Q, the running output, maximum and sum, and the last three again at the end.

    A running row is there because the program wrote it, so its first read is a repeated one.
    """
    running = query_visits(x) * x.k * running_output(x) + (query_visits(x) + 1) * x.k * 2 * row_bytes(x)
    return key_value_bytes(x) + queries_again(x) * query_bytes(x) + running


def streaming_forward_written(x: Sizes) -> float:
    """The running output at every visit, maximum and sum also before the first one; then the output and lse."""
    running = queries_again(x) * running_output(x) + (1 + query_visits(x) * x.k) * 2 * row_bytes(x)
    return running + output_bytes(x) + row_bytes(x)


def streaming_backward_sram(x: Sizes) -> float:
    owned = x.h * x.bkv * (x.C + x.Cv) * x.e
    return owned + x.s * x.bq * (x.C + x.Cv) * x.e + 2 * x.p * x.bq * x.bkv


def streaming_backward_read(x: Sizes) -> float:
    """K and V once; at every visit Q, dO, lse, delta and the running dQ, and that again at the end."""
    again = query_bytes(x) + output_bytes(x) + running_gradient(x) + 2 * row_bytes(x)
    return key_value_bytes(x) + queries_again(x) * again + x.k * running_gradient(x)


def streaming_backward_written(x: Sizes) -> float:
    """The running dQ as zeros and then at every visit; dQ, dK and dV."""
    return (1 + queries_again(x)) * running_gradient(x) + query_bytes(x) + key_value_gradient_bytes(x)


def streaming_backward_flops(x: Sizes) -> float:
    """S, dV, dP, dQ, dK: five products."""
    return 2 * score_count(x) * (3 * x.C + 2 * x.Cv)


HANDSHAKES = 512  # bytes of cards and mbarriers, each aligned to 16


# -- the hopper target's one backward pass ---------------------------------------------------------------------------
def sums_of_dquery(x: Sizes) -> float:
    """The sums of dQ, float32, of all columns of tiles."""
    return RUNNING * x.B * x.Hq * x.L * x.C


def statistics_and_zeros(x: Sizes) -> float:
    """lse and delta, and zeros for the sums of dQ."""
    return statistics_written(x) + sums_of_dquery(x)


def statistics_and_group_zeros(x: Sizes) -> float:
    """lse and delta, and zeros for the sums of dQ where query heads share keys."""
    return statistics_written(x) + x.z * sums_of_dquery(x)


def hopper_statistics_sram(x: Sizes) -> float:
    """O and dO."""
    return 2 * x.bq * x.Cv * x.e


def hopper_statistics_and_zeros_sram(x: Sizes) -> float:
    """The same, and zeros for the half of a tile's sums that one consumer adds to."""
    return hopper_statistics_sram(x) + RUNNING * x.bq * x.C / 2


def round_dquery_sram(x: Sizes) -> float:
    """The sums, dQ, and room to change their order."""
    return x.bq * x.C * (RUNNING + x.e) + REORDERING


def hopper_loaded_sram(x: Sizes) -> float:
    """K and V; Q, dO and the statistics in s slots each; cards and barriers."""
    ahead = x.s * (x.bq * (x.C + x.Cv) * x.e + 2 * x.bq * ROW_STATISTIC)
    return x.bkv * (x.C + x.Cv) * x.e + ahead + HANDSHAKES + shared_dkey_sram(x)


def shared_dkey_sram(x: Sizes) -> float:
    """The gradient of key columns that heads share, float32, on its way out."""
    return x.bkv * x.R * RUNNING


def hopper_backward_sram(x: Sizes) -> float:
    """The same, dS twice, and dQ on its way out."""
    return hopper_loaded_sram(x) + 2 * x.bq * x.bkv * x.e + x.bq * x.C * RUNNING


def hopper_ahead_sram(x: Sizes) -> float:
    """The same, and the next K and V."""
    return hopper_backward_sram(x) + x.bkv * (x.C + x.Cv) * x.e


def drawn_sram(x: Sizes) -> float:
    """A bit for each pair of visited tiles, whether it is dropped."""
    return x.s * x.bq * x.bkv / 8


def hopper_drawn_sram(x: Sizes) -> float:
    """Of one pass that drops weights."""
    return hopper_backward_sram(x) + drawn_sram(x)


def hopper_drawn_keys_sram(x: Sizes) -> float:
    """Of the pass that owns keys."""
    return hopper_loaded_sram(x) + drawn_sram(x)


def hopper_by_columns_sram(x: Sizes) -> float:
    """What is loaded, and P and dS, twice each."""
    return hopper_loaded_sram(x) + 4 * x.bq * x.bkv * x.e


def hopper_backward_written(x: Sizes) -> float:
    """dK and dV once; additions to the sums of dQ at every visit."""
    return key_value_gradient_bytes(x) + queries_again(x) * sums_of_dquery(x)


# -- the cpu target's one backward pass ------------------------------------------------------------------------------
def key_value_sums(x: Sizes) -> float:
    """The running gradients of key and value, float32."""
    return RUNNING * x.B * x.Hkv * x.T * (x.D + x.Du)


def cpu_backward_read(x: Sizes) -> float:
    """Q, O, dO and the statistics once; K, V and the sums of their gradients at every visit."""
    rows = query_bytes(x) + 2 * output_bytes(x) + row_bytes(x)
    return rows + keys_again(x) * (key_value_bytes(x) + key_value_sums(x))


def cpu_backward_written(x: Sizes) -> float:
    """dQ once; the sums at every visit, then dK and dV from them."""
    return query_bytes(x) + keys_again(x) * key_value_sums(x) + key_value_gradient_bytes(x)


# -- standard: FlashAttention paper, algorithms 0 and 3 --------------------------------------------------------------
def product_sram(x: Sizes) -> float:
    """Tiles of both factors of a product over columns."""
    return (x.bq + x.bkv) * x.C * x.e


def weighing_sram(x: Sizes) -> float:
    """A stored tile and a tile of the operand that it multiplies, loaded ahead."""
    return x.s * (x.bq * x.bkv + x.bkv * x.C) * x.e


def gathering_sram(x: Sizes) -> float:
    """The same where the stored tile is transposed."""
    return x.s * (x.bq * x.bkv + x.bq * x.C) * x.e


def standard_scores_read(x: Sizes) -> float:
    return queries_beside(x) * query_bytes(x) + keys_again(x) * key_bytes(x)


def standard_softmax_written(x: Sizes) -> float:
    return matrix_bytes(x) + row_bytes(x)


def standard_softmax_exps(x: Sizes) -> float:
    """A running sum in the first sweep, two a score; the weights in the second."""
    return 3 * score_count(x)


def standard_output_read(x: Sizes) -> float:
    return matrix_bytes(x) + keys_again(x) * value_bytes(x)


def standard_weights_read(x: Sizes) -> float:
    return standard_scores_read(x) + queries_beside(x) * row_bytes(x)


def standard_dvalue_read(x: Sizes) -> float:
    return matrix_bytes(x) + queries_again(x) * output_bytes(x)


def standard_dweights_read(x: Sizes) -> float:
    return queries_beside(x) * output_bytes(x) + keys_again(x) * value_bytes(x)


def standard_dscores_read(x: Sizes) -> float:
    """P, dP and delta; Q and K again where the score is not linear."""
    return 2 * matrix_bytes(x) + queries_beside(x) * row_bytes(x) + x.w * standard_scores_read(x)


def standard_dquery_read(x: Sizes) -> float:
    return matrix_bytes(x) + keys_again(x) * key_bytes(x)


def standard_dkey_read(x: Sizes) -> float:
    return matrix_bytes(x) + queries_again(x) * query_bytes(x)


def score_flops(x: Sizes) -> float:
    """A product over the columns of query and key, or into them."""
    return 2 * score_count(x) * x.C


def value_flops(x: Sizes) -> float:
    """A product over the columns of the value, or into them."""
    return 2 * score_count(x) * x.Cv


def dscores_flops(x: Sizes) -> float:
    return x.w * score_flops(x)


# -- what is read again ----------------------------------------------------------------------------------------------
def head_keys(x: Sizes) -> float:
    return x.e * x.T * (x.D + x.Du)


def head_queries(x: Sizes) -> float:
    return (x.e * (x.D + x.Dv) + 2 * ROW_STATISTIC) * x.L


def head_running(x: Sizes) -> float:
    return (x.e * x.D + RUNNING * x.Dv + 2 * ROW_STATISTIC) * x.L


def head_running_gradient(x: Sizes) -> float:
    """Of all query heads of a kv head, since one program works on them."""
    return (x.e * (x.D + x.Dv) + RUNNING * x.D + 2 * ROW_STATISTIC) * x.L * x.Hq / x.Hkv


def one_head_key(x: Sizes) -> float:
    return x.e * x.T * x.D


def one_head_value(x: Sizes) -> float:
    return x.e * x.T * x.Du


def one_head_query(x: Sizes) -> float:
    return x.e * x.L * x.D


def one_head_output(x: Sizes) -> float:
    return x.e * x.L * x.Dv
