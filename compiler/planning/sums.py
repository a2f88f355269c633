"""What a backward with gradients of operands takes besides its kernels: what adds up what these left.

The three constants are of one H200 and its host, and of calls before such backwards took the shortest way: the first of
three backwards whose kernels store all of a bias' gradient (0.52 to 0.56 ms more than their kernels are predicted to
take), the second of biases by key, the third of what half a million listed sums took alone.
"""

from __future__ import annotations

from ..analysis.facts import Facts
from ..analysis.records import PAIR_KINDS
from .plan import Sums
from .records import Quantity, Shape
from .signature import Signature
from .tables import DDIAGONALS, ways_of

HOST = 0.53e-3  # seconds: of the host, before the first kernel
PUT = 1.26e-9  # of a sum of a row or key, by index_put_, which sorts
LISTED = 0.14e-9  # of a sum that is listed with its entry: sorted, and each entry's added up by a block


def sums_of(facts: Facts, signature: Signature, shape: Shape) -> Sums | None:
    """None where gradients of operands are those of heads, which are few, or where there is none."""
    reads = [(load, kind) for load, kind in facts.gradient_kinds if load.tensor.name in signature.wanted]
    kinds = [kind for _, kind in reads]
    if signature.arch == "cpu" or not {"row", "column", *PAIR_KINDS} & {*kinds}:
        return None
    heads, q_len, kv_len = shape.batch * shape.heads, shape.q_len, shape.kv_len
    ways = [way for way in ways_of(reads, signature).of_reads if way is not None and way.finish == "list"]
    diagonals = sum(way.kernel == DDIAGONALS for way in ways)
    rows = _sum_of(("B*Hq*L", heads * q_len, kinds.count("row")), ("B*Hq*T", heads * kv_len, kinds.count("column")))
    listed = _sum_of(
        ("2*B*Hq*(L + T)", 2 * heads * (q_len + kv_len), diagonals),
        ("B*Hq*L*T", heads * q_len * kv_len, len(ways) - diagonals),
    )
    return Sums(HOST, rows, listed, HOST + PUT * rows.value + LISTED * listed.value)


def _sum_of(*terms: tuple[str, int, int]) -> Quantity:
    """Of (formula, value, how often)."""
    there = [(text if times == 1 else f"{times}*{text}", value * times) for text, value, times in terms if times]
    return Quantity(" + ".join(text for text, _ in there) or "0", sum(value for _, value in there))
