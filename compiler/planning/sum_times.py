"""What a backward with gradients of operands takes besides its kernels: what adds up what these left.

The constants are of one H200: first and third of T5 tables and biases by key, whose kernels a profiler timed, the
others of what half a million sums took alone.
"""

from __future__ import annotations

from ..analysis.tiles.facts import Facts
from ..analysis.tiles.results import PAIR_KINDS
from .gradient_sums import DIAGONAL_PARTS, ways_of
from .plan import Sums
from .records import Quantity, Shape
from .signature import Signature

LAST = 5e-6  # seconds: of the last sum of all, and of those of rows and keys that lie as the operand does
PUT = 1.26e-9  # of a sum of a row or key that lies otherwise, by index_put_, which sorts
DIAGONAL = 4e-12  # of a sum along a diagonal, by a kernel of ours
LISTED = 0.14e-9  # of a pair's sum that is listed with its entry: sorted, and each entry's added up by a block
_AS_IT_LIES = {"batch", "head", "q_pos", "kv_pos", "0"}  # indices


def sums_of(facts: Facts, signature: Signature, shape: Shape) -> Sums | None:
    """None where gradients of operands are those of heads, which are few, or where there is none."""
    reads = [(load, kind) for load, kind in facts.gradient_kinds if load.tensor.name in signature.wanted]
    kinds = [kind for _, kind in reads]
    if signature.arch == "cpu" or not {"row", "column", *PAIR_KINDS} & {*kinds}:
        return None
    heads, q_len, kv_len = shape.batch * shape.heads, shape.q_len, shape.kv_len
    ways = [way for way in ways_of(reads, signature).of_reads if way is not None and way.finish == "list"]
    diagonals = sum(way.owner == "diagonals" for way in ways)
    put = [kind for load, kind in reads if not {i.text for i in load.index} <= _AS_IT_LIES]
    rows = _sum_of(("B*Hq*L", heads * q_len, put.count("row")), ("B*Hq*T", heads * kv_len, put.count("column")))
    sums = 2 * DIAGONAL_PARTS
    along = _sum_of((f"{sums}*B*Hq*(L + T)", sums * heads * (q_len + kv_len), diagonals))
    listed = _sum_of(("B*Hq*L*T", heads * q_len * kv_len, len(ways) - diagonals))
    return Sums(LAST, rows, along, listed, LAST + PUT * rows.value + DIAGONAL * along.value + LISTED * listed.value)


def _sum_of(*terms: tuple[str, int, int]) -> Quantity:
    """Of (formula, value, how often)."""
    there = [(text if times == 1 else f"{times}*{text}", value * times) for text, value, times in terms if times]
    return Quantity(" + ".join(text for text, _ in there) or "0", sum(value for _, value in there))
