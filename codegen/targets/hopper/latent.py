"""What target hopper has of latent caches: which calls and forms its split_kv takes."""

from __future__ import annotations

from ....compiler.planning.cost import sram_bytes
from ....compiler.planning.kernel import Kernel
from ....compiler.planning.machines.hardware import Hardware
from ....compiler.planning.records import Segment, Shape
from ....compiler.planning.segments import Segments
from ....compiler.planning.signature import Signature
from .forms import PIECE_COLUMNS, ROWS, HopperLatentForm
from .kernels.latent import ROTARY_COLUMNS

SLOTS_OF_FP8 = 8, 6  # for pieces of keys as fp16, and as FP8
LEAST_PAGE = 8  # rows of the pattern in which tiles are swizzled in SRAM


def uneven_group(group: int) -> str | None:
    """Why so many query heads of a key head have no tiles."""
    if ROWS % group == 0 or group % ROWS == 0:
        return None
    return (
        f"hopper: of a latent cache the query heads of a key head must divide {ROWS} or be a multiple of it, got "
        f"{group}"
    )


def best_latent_form(signature: Signature) -> HopperLatentForm:
    """The form that measured best (docs/experiments). Keys in FP8 take SRAM of their own."""
    narrow = signature.widths.value_dim % (2 * PIECE_COLUMNS) > 0
    if signature.dtypes.quantized:
        slots, stored = SLOTS_OF_FP8
        return HopperLatentForm(slots * (1 + narrow), stored * (1 + narrow), narrow=narrow)
    return HopperLatentForm(HopperLatentForm.slots * (1 + narrow), ordered=True, prefetch=True, narrow=narrow)


def no_latent_form(kernel: Kernel, form: HopperLatentForm, signature: Signature, hardware: Hardware) -> str | None:
    """Why the kernel of latent caches cannot have this form."""
    widths = signature.widths
    least = 2 * (widths.value_dim // form.piece)
    if widths.value_dim % (2 * form.piece):
        return f"expected +narrow: a rank of {widths.value_dim} has no even number of pieces of {form.piece} columns"
    if form.slots < least:
        return f"expected {least} slots or more, for two tiles of keys"
    if bool(form.stored) != bool(signature.dtypes.quantized):
        return "r is for keys in FP8, and these have no form without"
    if form.stored > form.slots:  # else a converter would wait for a slot that the last but one has not filled
        return f"expected {form.slots} slots for pieces in FP8 at most, as many as for pieces, got {form.stored}"
    sizes = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
    parts = Segments((Segment(0, widths.value_dim, "key"), Segment(widths.value_dim, ROTARY_COLUMNS, "key")),
                     (Segment(0, widths.value_dim, "value"),), value_is_key=True)  # fmt: skip
    needed = sram_bytes(kernel, form, sizes, hardware, parts)
    if needed > hardware.sram_per_block:
        return f"it needs {needed} bytes of SRAM, a program of {hardware.title} has {hardware.sram_per_block}"
    return None
