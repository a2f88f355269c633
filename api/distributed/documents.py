"""Documents of a sequence: runs of equal ids, found in one operation on all of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..compiler.analysis.tiles.survey import Survey
from ..ir.expr import Expr, Load, Symbol
from .rows import Run

_MOST = 1 << 14  # documents of a sequence that a plan looks at one by one


def ids_of(survey: Survey | None) -> Load | None:
    """What a mask reads at a query and at a key, where all that it asks of tensors is that both are equal."""
    if survey is None or survey.by_pair or survey.cells or len(survey.equal) != 1:
        return None
    ((n, m),) = survey.equal
    of_query, of_key = survey.q_values[n], survey.kv_values[m]
    others: list[Expr] = [v for k, v in enumerate(survey.q_values) if k != n]
    others += [v for k, v in enumerate(survey.kv_values) if k != m]
    if not (isinstance(of_query, Load) and isinstance(of_key, Load) and all(isinstance(v, Symbol) for v in others)):
        return None
    same = of_query.tensor == of_key.tensor and _outer(of_query, "q_pos") == _outer(of_key, "kv_pos")
    return of_query if same and _outer(of_query, "q_pos") in ([], ["batch"]) else None


def _outer(load: Load, last: str) -> list[str] | None:
    """Names of the indices before the last one, which is a position; None of other reads."""
    names = [i.name if isinstance(i, Symbol) else "" for i in load.index]
    return names[:-1] if names and names[-1] == last else None


def starts_of(ids: Tensor) -> list[int] | None:
    """The first position of each document, and the end of the last. ids: [rows]. None where an id comes again behind
    another one, or where there are too many."""
    changes = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
    if not len(ids) or len(changes) >= _MOST:
        return None
    starts = [0, *changes.tolist(), len(ids)]
    firsts = ids[starts[:-1]]
    return starts if len(firsts.unique()) == len(firsts) else None


def inside(starts: Sequence[int], run: Run) -> Iterator[tuple[int, Run]]:
    """The documents, or packed sequences, that have rows in a run: number, and those rows.

    >>> list(inside([0, 5, 5, 9], (3, 7)))
    [(0, (3, 5)), (2, (5, 7))]
    """
    for n in range(max(0, bisect_right(starts, run[0]) - 1), len(starts) - 1):
        if starts[n] >= run[1]:
            return
        first, end = max(run[0], starts[n]), min(run[1], starts[n + 1])
        if first < end:
            yield n, (first, end)
