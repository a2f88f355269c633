"""What sums the gradients of reads of pairs, after the others (planning/gradient_sums.py): programs own pairs."""

from __future__ import annotations

from .....compiler.planning import quantities as of
from .....compiler.planning.gradient_sums import DIAGONAL_PARTS
from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import ROW_STATISTIC, RUNNING, Sizes
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import AHEAD, Tiles, computes, keeps, loads, stores, weights_text
from ..features import OF_A_BACKWARD
from .backward import dload


def pair_sums_sram(x: Sizes) -> float:
    """Q, dO, K and V of a visited tile, loaded ahead, and the statistics; of a diagonal also its sums, to be turned."""
    return x.s * ((x.bq + x.bkv) * (x.C + x.Cv) * x.e + 2 * x.bq * ROW_STATISTIC) + RUNNING * x.bq * x.bkv


def pair_sums_read(x: Sizes) -> float:
    """Everything at every visit: what programs that run together share comes from L2."""
    rows = of.query_bytes(x) + of.output_bytes(x) + 2 * of.row_bytes(x)
    return of.queries_again(x) * rows + of.keys_again(x) * of.key_value_bytes(x)


def diagonal_sums_written(x: Sizes) -> float:
    """A sum and the place of an entry for each diagonal of each head, by each program that has a part of it."""
    return DIAGONAL_PARTS * (RUNNING + 8) * 2 * x.B * x.Hq * (x.nq * x.bq + x.nkv * x.bkv)


def pair_sums_flops(x: Sizes) -> float:
    """S = Q K^T, dP = dO V^T."""
    return 2 * of.score_count(x) * (x.C + x.Cv)


def _registers(block_q: int, block_kv: int, qk_columns: int, v_columns: int) -> float:
    """The sum, S, dP, and the gradient of what is read."""
    return block_q * block_kv * 4


def _pair_sums(t: Tiles, per: str, store: str) -> list[Stage]:
    """P and dS of tiles of pairs once more, for what is summed over heads or along a diagonal."""
    return [
        keeps("sums", f"{t.scores('sums for operands')} float32"),
        loads("query", ", ".join([t.query(), t.output("dO"), *t.saved("lse", "delta")]), per, AHEAD),
        loads("key", f"{t.key()}, {t.value()}", per, AHEAD),
        computes("scores", f"{t.scores()} = Q K^T", per),
        computes("dweights", f"{t.scores('dP')} = {t.kept('dO V^T')}", per),
        computes("weights", weights_text(t), per),
        computes("dscores", f"dload = {dload(t)}{t.mask_text}", per),
        stores("sums", store),
    ]


def _flash_ddiagonals(t: Tiles) -> list[Stage]:
    per = "tile of a diagonal whose pairs do not all read one entry" if "level" in t.sums else "tile of the diagonal"
    return _pair_sums(t, per, "a sum for each diagonal of the tile, and the entry that it read")


FLASH_DPAIRS = Kernel(
    KernelId("triton", "flash_dpairs"), "backward", "backward_q", "kv",
    "the heads that read what its tile of pairs reads",
    lambda t: _pair_sums(t, "head", "sums of the tile, to the entries that were read"),
    programs=of.pair_programs, read=pair_sums_read,
    # of each pair of visited tiles at most: what is shared by heads is written once
    written=lambda x: RUNNING * of.score_count(x), sram=pair_sums_sram, flops=pair_sums_flops, exps=of.score_count,
    registers=_registers, weighs=True, has_level_loop=True, features=OF_A_BACKWARD,
)  # fmt: skip
FLASH_DDIAGONALS = Kernel(
    KernelId("triton", "flash_ddiagonals"), "backward", "backward_q", "kv", "the tiles of its diagonal",
    _flash_ddiagonals, programs=lambda x: DIAGONAL_PARTS * x.B * x.Hq * (x.nq + x.nkv - 1), read=pair_sums_read,
    written=diagonal_sums_written, sram=pair_sums_sram, flops=pair_sums_flops, exps=of.score_count,
    registers=_registers, weighs=True, visits="uneven",
    longest=lambda x: min(x.nq, x.nkv) / DIAGONAL_PARTS,  # most have no tile, those in the middle have all of theirs
    is_lent=True, features=OF_A_BACKWARD,
)  # fmt: skip
DPAIRS, DDIAGONALS = FLASH_DPAIRS.name, FLASH_DDIAGONALS.name
