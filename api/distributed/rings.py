"""What the steps of a ring take, whose transfers run beside products."""

from __future__ import annotations


def forward(inside: int, beyond: int, of_inside: float, of_beyond: float, own: float, others: float) -> float:
    """Seconds of steps that each compute while the keys of the next one arrive: own keys, those of so many ranks of the
    host, then of ranks of other hosts.

    of_inside, of_beyond: seconds that keys of one of them take to arrive. own, others: of products.

    >>> forward(1, 2, 1.0, 5.0, 3.0, 6.0)  # 3 while 1 arrives, 5 for products of 2, and again, then products of 2
    15.0
    """
    number = inside + beyond
    if not number:
        return own
    each = others / number
    first = of_inside if inside else of_beyond
    rest = inside * max(each, of_inside) + beyond * max(each, of_beyond) - max(each, first)
    return max(own, first) + rest + each


def backward(inside: int, beyond: int, of_inside: float, of_beyond: float, own: float, others: float) -> float:
    """The same of a backward. It waits for the keys of the first, and computes its own last. While it computes those of
    one rank, keys of the next arrive, and gradients of the one before travel.

    >>> backward(1, 2, 1.0, 5.0, 3.0, 6.0)  # 1, then 5, 6 and 5 for products of 2, then 5 for products of 3
    22.0
    """
    number = inside + beyond
    if not number:
        return own
    each, more = others / number, (max(0, inside - 2), max(0, beyond - 2))  # between others of their kind
    arriving = [*[of_inside] * (inside - more[0]), *[of_beyond] * (beyond - more[1])]
    around = [0.0, *arriving, 0.0]
    steps = sum(max(each, before + after) for before, after in zip(around, around[2:]))
    steps += sum(n * max(each, 2 * seconds) for n, seconds in zip(more, (of_inside, of_beyond)))
    return arriving[0] + steps + max(own, arriving[-1])


def links(beyond: int) -> str:
    """Those that rows of so many ranks of other hosts come by."""
    return "links between hosts" if beyond else "links of a host"
