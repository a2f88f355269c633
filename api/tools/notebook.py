"""Methods of expressions and plans that their own rooms cannot have: expressions know no tiles, plans no page.

>>> from weft import kv_pos, q_pos
>>> (kv_pos <= q_pos).show_mask(2, 3)
visible: 2 queries, 3 keys
┌───┐
│██ │
│███│
└───┘
1 empty, 0 edge ▒, 5 full █; tile 1 query x 1 key
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attention import Attention
from ..compiler.planning.picture import Picture
from ..compiler.planning.plan import Plan
from ..ir.expr import Expr, Node, fail

_MOST_SHOWN = 64  # tiles a side of a picture whose tiles nobody chose


def _tile(length: int) -> int:
    """Rows of a tile: a power of two, 1 where the length allows. What is no length is refused where it is drawn."""
    return 1 << max(0, (-(-length // _MOST_SHOWN) - 1).bit_length()) if isinstance(length, int) else 1


def _show_mask(
    mask: Expr, q_len: int, kv_len: int, *, block_q: int | None = None, block_kv: int | None = None,
    path: str | Path | None = None, q_offset: int | None = None, head: int = 0, batch: int = 0, **options: Any,
) -> Picture:  # fmt: skip
    """The picture of a mask, as `weft.Attention.show_mask` draws it, in tiles so small that up to 64 fill a side."""
    if mask.dtype != "bool":
        fail(f"show_mask: expected a mask, which is bool, got {mask.dtype}: {mask}; a mask is such as kv_pos <= q_pos")
    return Attention(mask=mask, name="visible").show_mask(
        q_len, kv_len, block_q=_tile(q_len) if block_q is None else block_q,
        block_kv=_tile(kv_len) if block_kv is None else block_kv, path=path, q_offset=q_offset, head=head, batch=batch,
        **options,
    )  # fmt: skip


def _plan_html(plan: Plan) -> str:
    """The plan as a notebook shows it: what `explain` prints, without the variant's score and mask."""
    from ..compiler.planning.plan_page import plan_page  # lazy: imports rich

    return plan_page(plan)


def _plan_text(plan: Plan) -> str:
    """The same as text."""
    from ..compiler.planning.explain import explain  # lazy: imports rich

    return explain(plan)


if not TYPE_CHECKING:  # declared in both classes
    Node.show_mask = _show_mask
    Plan._repr_html_ = _plan_html
    Plan.__str__ = _plan_text
