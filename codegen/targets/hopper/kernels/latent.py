"""Schedule split_kv of latent caches: a tile of keys lies in SRAM once, and is both key and value."""

from __future__ import annotations

from typing import Any

from .....compiler.planning.kernel import DESCALES, Kernel, KernelId
from .....compiler.planning.quantities import (
    flash_forward_read,
    forward_exps,
    forward_flops,
)
from .....compiler.planning.records import Stage
from .....compiler.planning.stage_words import AHEAD, EACH_KV, Tiles, computes, loads, stores
from ...gluon.program import Columns, Program, plain
from ...triton.kernels.split_kv import joining, split_programs, split_written
from ..forms import HopperLatentForm
from ..held import ROLES, Held, declared
from .backward import HANDSHAKES

SUMMERS = 2  # warpgroups, each of which has half of the columns
ROTARY_COLUMNS = 64  # of a latent tile behind its pieces; weights of 64 keys take their place


def program(form: HopperLatentForm, held: Held) -> Program:
    """Pieces of keys in slots, those of a query that no registers hold, and rotary columns of two tiles of keys."""
    p = Program("split_forward", _constants(form), besides=HANDSHAKES,
                about="All shared memory. Tiles keep the shape of the TMA boxes.")  # fmt: skip
    p.ring("query", "PIECES - HALF, 1, ROWS // HEADS, HEADS", [Columns("PIECE")],
           about="the pieces that are not in registers")  # fmt: skip
    pieces: dict[str, Any] = {}
    scaled = form.stored > 0 and held.scaled_rows
    if form.stored:
        swizzled = f"gl.NVMMASharedLayout.get_default_for([{held.ones}, BLOCK_KV, PIECE], gl.float16)"
        pieces = {"dtype": "gl.float16", "element": 2, "layout": swizzled}
    p.ring("pieces", f"SLOTS, {held.ones}, BLOCK_KV", [Columns("PIECE")], of="key", **pieces)
    if form.stored:
        p.ring("stored", f"STORED, {held.ones}, BLOCK_KV", [Columns("PIECE")], of="key", dtype="key_desc.dtype",
               element=1, about="pieces of keys in FP8")  # fmt: skip
    p.ring("rotary", f"2, {held.ones}, BLOCK_KV", [Columns("ROTARY")], of="key_rotary",
           about="then weights [ROWS, BLOCK_KV]")  # fmt: skip
    p.tile("factor", "2, ROWS", dtype="gl.float32", layout=plain(1),
           about="by which sums are multiplied before a tile's product is added")  # fmt: skip
    if scaled:
        for name, extents, about in (
            ("descale", "2, BLOCK_KV", "of the keys of two tiles"),
            ("descale_in_units", "2, BLOCK_KV", "what weights are multiplied by"),
            ("unit", "2, 1", "of the sums of values, one for all rows"),
            ("unit_factor", "2, 1", "the unit of the tile before, in units of this one"),
        ):
            p.tile(name, extents, dtype="gl.float32", layout=plain(1), about=about)
    p.tile("inverse", "ROWS", dtype="gl.float32", layout=plain(1), about="what the output is multiplied by")
    _add_mbarriers(p, form, scaled)
    weighing, others = (160, 32) if form.stored else (168, 24)  # registers
    p.role("summer", warps=4, count=SUMMERS, registers=160, empties=["pieces"],
           body=f"{ROLES}/split_summer.py.jinja")  # fmt: skip
    p.role("weigher", warps=4, registers=weighing, empties=["query", "rotary"], body=f"{ROLES}/split_weigher.py.jinja")
    if form.stored:  # the producer brings some queries to slots of pieces, too
        p.role("converter", warps=1, count=form.converters, registers=others, fills=["pieces"], empties=["stored"],
               body=f"{ROLES}/split_converter.py.jinja")  # fmt: skip
    brought = "stored" if form.stored else "pieces"
    p.role("producer", warps=1, registers=others, fills=["query", "rotary", brought],
           body=f"{ROLES}/split_{'fp8_' if form.stored else ''}producer.py.jinja")  # fmt: skip
    return p.check()


def _constants(form: HopperLatentForm) -> dict[str, str | int]:
    pieces = f"Cv / {form.piece}"
    return {
        "PIECES": pieces, "HALF": f"{pieces} / 2", "PIECE": form.piece, "ROTARY": ROTARY_COLUMNS, "SLOTS": "s",
        "STORED": form.stored, "BLOCK_KV": "bkv", "ROWS": "bq", "HEADS": 1,
    }  # fmt: skip


def _add_mbarriers(p: Program, form: HopperLatentForm, scaled: bool) -> None:
    p.mbarrier("query_ready", about="mbarriers")
    p.mbarrier("query_free")
    p.mbarrier("inverse_ready")
    p.mbarrier("inverse_free", arrivals=SUMMERS)
    p.mbarrier("piece_ready", "SLOTS", about="one for each slot")
    p.mbarrier("piece_free", "SLOTS")
    if form.stored:
        p.mbarrier("stored_ready", "STORED")
        p.mbarrier("stored_free", "STORED")
    p.mbarrier("rotary_ready", "2", about="one for each of two tiles")
    p.mbarrier("rotary_free", "2", arrivals=2)
    if scaled:
        p.mbarrier("descale_ready", "2")
        p.mbarrier("descale_free", "2")
    p.mbarrier("factor_ready", "2")
    p.mbarrier("weights_ready", "2")


def _stages(t: Tiles) -> list[Stage]:
    """Of latent caches: a producer warp loads, one warpgroup finds weights, two sum values."""
    rows = f"{t.query()}, rows of all queries and heads that share the keys; half stays in SRAM, half in registers"
    rotary = "; P = exp2(S - reference) takes the place of the rotary columns"
    weights = f"reference raised to the maximum, or a little less{rotary}"
    parts = f"{t.output('O / sum')}, {t.rows('lse = reference + log(sum)')}; of one part of several in float32"
    form = t.form
    assert isinstance(form, HopperLatentForm)
    said = "FP8 as fp16, a piece after another, by several warps; descales go to queries or scores, and to weights"
    real = [Stage("convert key", "compute", said, "SRAM -> registers -> SRAM", EACH_KV)] if form.stored else []
    early = "+prefetch: to L2 two tiles before, where tiles of rows of few queries share them"
    later = "+ordered: after the next tile's scores, where tiles of rows share keys"
    return [
        loads("query", rows, "part of a sequence", AHEAD),
        loads("key", f"{t.key()}, in pieces, used as V too; {early}", EACH_KV, AHEAD),
        *real,
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
    _stages, programs=split_programs, read=flash_forward_read, written=split_written, program=declared(program),
    flops=forward_flops, exps=forward_exps, weighs=True, divides=True, is_optional=True, options=DESCALES,
)  # fmt: skip
JOIN_PARTS = joining(SPLIT_FORWARD)
