"""Schedule split_kv of latent caches: a tile of keys lies in SRAM once, and is both key and value."""

from __future__ import annotations

from functools import lru_cache

from .....compiler.planning.form import Form
from .....compiler.planning.kernel import Kernel, KernelId
from .....compiler.planning.quantities import (
    ROW_STATISTIC,
    Formula,
    Sizes,
    flash_forward_read,
    forward_exps,
    forward_flops,
)
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import AHEAD, EACH_KV, Tiles, computes, loads, stores
from ...triton.kernels.split_kv import joining, split_programs, split_written
from ..forms import HopperLatentForm
from .backward import HANDSHAKES

ROTARY_COLUMNS = 64  # of a latent tile behind its pieces; weights of 64 keys take their place


@lru_cache(maxsize=64)
def _sram(form: Form) -> Formula:
    """Pieces of keys in s slots, half of a query's latent columns, its and keys' rotary ones twice; handshakes."""
    assert isinstance(form, HopperLatentForm)

    def found(x: Sizes) -> float:
        rotary = 2 * x.bkv * ROTARY_COLUMNS
        return x.e * (x.s * x.bkv * form.piece + x.bq * x.Cv / 2 + rotary) + 3 * x.bq * ROW_STATISTIC + HANDSHAKES

    return found


def _stages(t: Tiles) -> list[Stage]:
    """Of latent caches: a producer warp loads, one warpgroup finds weights, two sum values."""
    rows = f"{t.query()}, rows of all queries and heads that share the keys; half stays in SRAM, half in registers"
    rotary = "; P = exp2(S - reference) takes the place of the rotary columns"
    weights = f"reference raised to the maximum, or a little less{rotary}"
    parts = f"{t.output('O / sum')}, {t.rows('lse = reference + log(sum)')}; of one part of several in float32"
    early = "+prefetch: to L2 two tiles before, where tiles of rows of few queries share them"
    later = "+ordered: after the next tile's scores, where tiles of rows share keys"
    return [
        loads("query", rows, "part of a sequence", AHEAD),
        loads("key", f"{t.key()}, in pieces, used as V too; {early}", EACH_KV, AHEAD),
        computes("scores", f"{t.scores()} = {t.score_text}, asynchronous{t.mask_text}", EACH_KV),
        computes("weights", weights, EACH_KV),
        Stage(
            "keep sums",
            "keep",
            f"{t.output('O')} float32, half of the columns a warpgroup",
            "registers",
            "part of a sequence",
        ),
        computes(
            "output", f"sums rescaled where a row's reference moved; O += P V, beside the softmax; {later}", EACH_KV
        ),
        stores("output", parts, "part of a sequence"),
    ]


SPLIT_FORWARD = Kernel(
    KernelId("hopper", "split_forward"), "forward", "forward", "kv", "its part of the key tiles that its rows see",
    _stages, programs=split_programs, read=flash_forward_read, written=split_written, sram_in=_sram,
    flops=forward_flops, exps=forward_exps, weighs=True, divides=True, is_optional=True,
)  # fmt: skip
JOIN_PARTS = joining(SPLIT_FORWARD)
