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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from ..analysis.records import Axis, Measuring
from ..analysis.survey import CELL
from .signature import Direction, SequenceKind

Bound = Literal["matrix", "exp", "other", "mask", "tiles", "memory", "L2", "latency", "passes", "calls"]
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
ROW_STATISTIC = 4  # bytes of one number a row (lse, delta, running maximum or sum): always float32
RUNNING = 4  # bytes of an element of a running sum in HBM: float32
REORDERING = 8192  # bytes that Triton takes to change the order of a tile's registers
SPAN = 16  # bytes of a range of tiles: four int32
LEAST_AND_GREATEST = 16  # bytes of the ends of a value in a tile: two int64
READ = 8  # bytes of what a mask reads at a position, at most


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


Formula: TypeAlias = Callable[[Sizes], float]


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

    @property
    def reads_pairs(self) -> bool:
        """Whether its loop evaluates the variant's score or mask, for each pair of a query and a key."""
        return self.name in _READ_PAIRS


def traffic(kernel: Kernel) -> Formula:
    """Bytes that pass between SRAM and what lies behind it: of sizes with k = j = 1, the algorithmic traffic."""
    return lambda x: kernel.read(x) + kernel.written(x)


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
    """A sum and the place of an entry for each diagonal of each head."""
    return (RUNNING + 8) * 2 * x.B * x.Hq * (x.nq * x.bq + x.nkv * x.bkv)


def pair_sums_flops(x: Sizes) -> float:
    """S = Q K^T, dP = dO V^T."""
    return 2 * score_count(x) * (x.C + x.Cv)


def diagonal_programs(x: Sizes) -> float:
    return x.B * x.Hq * (x.nq + x.nkv - 1)


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


def hopper_drawn_sram(x: Sizes) -> float:
    """The same, and a bit for each pair of a visited tile, whether it is dropped."""
    return hopper_backward_sram(x) + x.s * x.bq * x.bkv / 8


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


_KEY = Again(key_visits, one_head_key)
_VALUE = Again(key_visits, one_head_value)
_QUERY = Again(query_visits, one_head_query)
_OUTPUT = Again(query_visits, one_head_output)
_KEYS = Again(key_visits, head_keys)
_QUERIES = Again(query_visits, head_queries)
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
    statistics_read, statistics_written, none, none, _KEYS,
)  # fmt: skip
FLASH = (
    Kernel(
        "flash_forward", "forward", "forward", "kv", _OVER_KEYS, query_programs, flash_forward_sram,
        flash_forward_read, flash_forward_written, forward_flops, forward_exps, _KEYS,
    ),
    ROW_STATISTICS,
    Kernel(
        "flash_dquery", "backward", "backward_q", "kv", _OVER_KEYS, query_programs, flash_dquery_sram,
        flash_dquery_read, query_bytes, flash_dquery_flops, score_count, _KEYS,
    ),
    Kernel(
        "flash_dkey_dvalue", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, flash_dkey_dvalue_sram,
        flash_dkey_dvalue_read, key_value_gradient_bytes, flash_dkey_dvalue_flops, score_count, _QUERIES,
    ),
)  # fmt: skip
SPLIT_KV = (
    Kernel(
        "split_forward", "forward", "forward", "kv", _OWN_PART, split_programs, flash_forward_sram,
        flash_forward_read, split_written, forward_flops, forward_exps, _KEYS,
    ),
    Kernel(
        "join_parts", "forward", "forward", "kv", _PARTS, row_programs, none,
        parts_bytes, joined_written, none, none, _KEYS, "split_forward",
    ),
)  # fmt: skip
# What sums the gradients of reads of pairs, after the others (tables.py)
PAIR_SUMS = (
    Kernel(
        "flash_dpairs", "backward", "backward_q", "kv", _SHARING, pair_programs, pair_sums_sram,
        pair_sums_read, pair_sums_written, pair_sums_flops, score_count, _KEYS,
    ),
    Kernel(
        "flash_ddiagonals", "backward", "backward_q", "kv", _DIAGONAL, diagonal_programs, pair_sums_sram,
        pair_sums_read, diagonal_sums_written, pair_sums_flops, score_count, _KEYS,
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
        cpu_backward_read, cpu_backward_written, streaming_backward_flops, score_count, _KEYS,
    ),
)  # fmt: skip


# The hopper target: keys outer in the backward, five products in one pass, sums of dQ in HBM.
HOPPER_STATISTICS = Kernel(
    "row_statistics", "backward", "backward_q", "kv", _ROWS, query_programs, hopper_statistics_and_zeros_sram,
    statistics_read, statistics_and_zeros, none, none, _KEYS, "flash_backward",
)  # fmt: skip
HOPPER_BACKWARD = Kernel(
    "flash_backward", "backward", "backward_kv", "q", _OVER_QUERIES, key_programs, hopper_backward_sram,
    flash_dkey_dvalue_read, hopper_backward_written, streaming_backward_flops, score_count, _QUERIES,
)  # fmt: skip
DRAWN_BACKWARD = replace(HOPPER_BACKWARD, sram=hopper_drawn_sram)  # where weights are dropped
ROUND_DQUERY = Kernel(
    "round_dquery", "backward", "backward_q", "kv", _ROWS, query_programs, round_dquery_sram,
    sums_of_dquery, query_bytes, none, none, _KEYS, "flash_backward",
)  # fmt: skip


# -- what measures tiles, for the flash kernels of masks that read tensors by position -------------------------------
SPANS = ("kv_spans", "q_spans")
ENDS, LONG_SPANS = ("kv_ends", "q_ends"), ("kv_long_spans", "q_long_spans")  # those of long axes
RUNS = (*SPANS, *ENDS, *LONG_SPANS)  # all that measure runs of tiles
LISTS = ("kv_lists", "q_lists")
PAIR_CELLS = "pair_cells"
MEASURES = (*RUNS, *LISTS, PAIR_CELLS)
DISTANCE_TABLES = "distance_tables"
BESIDE = (*MEASURES, DISTANCE_TABLES)  # kernels of modules of their own, whose form is no choice
LIST_ROOM = 1024  # tiles that a list holds at most; those behind the last of them are visited as a run
FEW = 1 << 14  # positions of an axis above which it is long: ends of its tiles are written before tiles are measured
STRETCH = 128  # tiles that are looked at as one before they are looked at each
CELLS_TOGETHER = 8  # blocks of keys that a program of pair_cells looks at, one after the other
LIST_HEAD = 4  # numbers before the tiles of a list
_VISITORS = (FLASH[0], SPLIT_KV[0], FLASH[2], FLASH[3], HOPPER_BACKWARD)
_ONCE_EACH = Again(lambda x: 1, none)
_OF_A_STRETCH = f"{STRETCH} tiles, many at a time"
_A_FEW_CELLS = f"a few blocks of {CELL} keys, each with {CELL} queries"
_MANY_KEYS, _MANY_QUERIES = (f"the {what} tiles that positions leave over, many at a time" for what in ("key", "query"))


@lru_cache(maxsize=64)
def spans_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_spans or q_spans: which tiles of `axis` each tile of the other one must visit.

    A program looks at all tiles of `axis`, whose positions all programs read; what one has read, others find in L2.
    """
    own_reads, reads = measuring.q_reads, measuring.kv_reads
    ranges = measuring.kv_ranges
    if axis == "q":
        own_reads, reads, ranges = reads, own_reads, measuring.q_ranges

    def rows(x: Sizes) -> float:
        """Programs of a batch row."""
        return (x.Hq if measuring.by_head else 1) * (x.nq if axis == "kv" else x.nkv)

    def programs(x: Sizes) -> float:
        return x.B * rows(x) * (1 - x.r)

    def read(x: Sizes) -> float:
        own, other = (x.L, x.T) if axis == "kv" else (x.T, x.L)
        return READ * x.B * (own_reads * own + reads * other * (1 + (rows(x) - 1) * x.j))

    def written(x: Sizes) -> float:
        return SPAN * ranges * programs(x)

    name, loop, again = ("kv_spans", _MANY_KEYS, _KEYS) if axis == "kv" else ("q_spans", _MANY_QUERIES, _QUERIES)
    return Kernel(name, direction, slot, axis, loop, programs, none, read, written, none, none, again)


@lru_cache(maxsize=64)
def long_spans_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_long_spans or q_long_spans: the same of a long axis, of which ends were written.

    A program reads those of all stretches, and as many again: of the tiles of one or two.
    """
    by_tiles = spans_kernel(axis, direction, slot, measuring)
    own_reads, values = measuring.q_reads, measuring.kv_values
    if axis == "q":
        own_reads, values = measuring.kv_reads, measuring.q_values

    def programs(x: Sizes) -> float:
        return x.r * by_tiles.programs(replace(x, r=0))

    def read(x: Sizes) -> float:
        own, tiles = (x.L, x.nkv) if axis == "kv" else (x.T, x.nq)
        ends = x.B * tiles * (1 - x.j) + programs(x) * (tiles / STRETCH + 2 * STRETCH) * x.j
        return READ * x.B * own_reads * own + LEAST_AND_GREATEST * values * ends

    def written(x: Sizes) -> float:
        return by_tiles.written(replace(x, r=0))

    name, loop = f"{axis}_long_spans", f"{by_tiles.loop}: in stretches"
    return Kernel(name, direction, slot, axis, loop, programs, none, read, written, none, none, by_tiles.again)


@lru_cache(maxsize=64)
def ends_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_ends or q_ends: least and greatest of what a mask reads in tiles of a long axis, and in stretches of them."""
    reads, values = measuring.kv_reads, measuring.kv_values
    if axis == "q":
        reads, values = measuring.q_reads, measuring.q_values

    def tiles(x: Sizes) -> float:
        return x.r * x.B * (x.Hq if measuring.by_head else 1) * (x.nkv if axis == "kv" else x.nq)

    def programs(x: Sizes) -> float:
        return tiles(x) / STRETCH

    def read(x: Sizes) -> float:
        return READ * reads * x.r * x.B * (x.T if axis == "kv" else x.L)

    def written(x: Sizes) -> float:
        return LEAST_AND_GREATEST * values * (tiles(x) + programs(x))

    name = f"{axis}_ends"
    return Kernel(name, direction, slot, axis, _OF_A_STRETCH, programs, none, read, written, none, none, _ONCE_EACH)


def ends_of(measuring: Measuring | None) -> tuple[str, ...]:
    """The kernels that write ends: for runs of tiles, and of values other than the position itself."""
    if measuring is None or measuring.source == "lists":
        return ()
    return tuple(n for n, values in zip(ENDS, (measuring.kv_values, measuring.q_values)) if values)


@lru_cache(maxsize=64)
def lists_kernel(axis: Axis, direction: Direction, slot: Slot, measuring: Measuring) -> Kernel:
    """kv_lists or q_lists: which tiles of `axis` each tile of the other one must visit, one by one.

    It reads what the spans kernel reads, an entry of each condition on cells for each pair of tiles, and what
    pair_cells found; it writes the tiles that are visited.
    """
    spans = spans_kernel(axis, direction, slot, measuring)

    def pairs(x: Sizes) -> float:
        """Pairs of tiles of the problem, each once for heads that see the same."""
        return spans.programs(x) * (x.nkv if axis == "kv" else x.nq)

    def read(x: Sizes) -> float:
        found = spans.read(x) + READ * measuring.cells * pairs(x)
        return found + cells_bytes(x, measuring) if measuring.by_pair else found

    def written(x: Sizes) -> float:
        """The numbers before each list, and a number a visited tile."""
        return 4 * (LIST_HEAD * spans.programs(x) + x.n / (1 if measuring.by_head else x.Hq))

    name = f"{axis}_lists"
    return Kernel(name, direction, slot, axis, spans.loop, spans.programs, none, read, written, none, none, spans.again)


def cells_bytes(x: Sizes, measuring: Measuring) -> float:
    """A byte for each block of CELL x CELL pairs."""
    return x.B * (x.Hq if measuring.by_head else 1) * x.L * x.T / CELL**2


@lru_cache(maxsize=64)
def cells_kernel(direction: Direction, measuring: Measuring) -> Kernel:
    """pair_cells: whether the pairs of each block of CELL x CELL see each other: none, some, or all of them."""

    def programs(x: Sizes) -> float:
        return cells_bytes(x, measuring) / CELLS_TOGETHER

    def read(x: Sizes) -> float:
        return x.B * (x.Hq if measuring.by_head else 1) * x.L * x.T

    def written(x: Sizes) -> float:
        return cells_bytes(x, measuring)

    slot: Slot = "forward" if direction == "forward" else "backward_q"
    return Kernel(PAIR_CELLS, direction, slot, "kv", _A_FEW_CELLS, programs, none, read, written, none, none, _KEYS)


def with_measuring(
    kernels: Sequence[Kernel], measuring: Measuring | None, sequences: SequenceKind = "dense"
) -> list[Kernel]:
    """The kernels, and before each that visits measured tiles the one that measures them; None where nothing is.

    Few queries, whose keys are divided, do not visit lists: they look at what positions leave over. So do packed
    queries over pages, whose tiles of queries have places as packed ones, and those of keys as padded ones.
    """
    lists = measuring is not None and measuring.source == "lists"
    if measuring is None or (lists and SPLIT_KV[0] in kernels) or not any(kernel in _VISITORS for kernel in kernels):
        return list(kernels)
    if sequences == "packed_paged":
        return list(kernels)
    found: list[Kernel] = []
    if measuring.by_pair and sequences != "packed":
        found.append(cells_kernel(kernels[0].direction, measuring))
    for kernel in kernels:
        if kernel in _VISITORS:
            made = [lists_kernel] if lists else [spans_kernel, long_spans_kernel]
            made[1:1] = [ends_kernel] if f"{kernel.axis}_ends" in ends_of(measuring) else []
            found += [make(kernel.axis, kernel.direction, kernel.slot, measuring) for make in made]
        found.append(kernel)
    return found


# -- what lists the tiles of packed sequences ------------------------------------------------------------------------
WORK = ("query_work", "key_work")
LISTED = 16  # sequences that a program of them lists
_LISTS, _ALL_SEQUENCES = 8, "all sequences, many at a time"  # bytes of a tile's place in a list


@lru_cache(maxsize=64)
def work_kernel(follows: str, side: Literal["q", "kv"] | None = None) -> Kernel:
    """query_work or key_work: the tiles of all sequences, for the kernel that owns them, or for a side of one.

    A sequence is as good as nothing beside its rows, so that formulas have the lists alone.
    """
    visitor = next(k for k in (*FLASH, HOPPER_BACKWARD) if k.name == follows)
    owns_queries = visitor.axis == "kv" if side is None else side == "q"
    name = WORK[0] if owns_queries else WORK[1]
    axis: Axis = "kv" if owns_queries else "q"

    def programs(x: Sizes) -> float:
        return x.B

    def written(x: Sizes) -> float:
        return _LISTS * x.B * (x.nq if owns_queries else x.nkv)

    return Kernel(
        name, visitor.direction, visitor.slot, axis, _ALL_SEQUENCES, programs, none, none, written, none, none,
        visitor.again, follows,
    )  # fmt: skip


def with_work(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a packed call: before all others those that list tiles for the ones that own them.

    The kernels around the hopper backward own tiles of queries, as large as those that it visits; its statistics of
    rows have the list of the kernel that owns queries, where there is one.
    """
    if HOPPER_BACKWARD in kernels:
        return [work_kernel(HOPPER_BACKWARD.name, side) for side in ("q", "kv")] + list(kernels)
    found = [work_kernel(k.name) for k in kernels if k in FLASH and k != ROW_STATISTICS]
    of_tiles = any(k.name == ROW_STATISTICS.name and k.follows is not None for k in kernels)
    if of_tiles and FLASH[2] not in kernels:
        found.insert(0, work_kernel(FLASH[3].name, "q"))
    return [*found, *kernels]
