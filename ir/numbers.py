"""Numbers: what counts as one, never a bool, which Python takes for one; and powers of two."""

from __future__ import annotations

from math import inf
from typing import TypeGuard


def is_int(value: object, least: float = -inf, most: float = inf) -> TypeGuard[int]:
    """
    >>> is_int(3), is_int(True), is_int(3.0), is_int(0, least=1)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def next_power(number: int) -> int:
    """The least power of two that is as large.

    >>> next_power(64), next_power(65), next_power(0)
    (64, 128, 1)
    """
    return 1 << max(number - 1, 0).bit_length()


def is_number(value: object) -> TypeGuard[int | float]:
    """
    >>> is_number(3), is_number(0.5), is_number(True), is_number("3")
    (True, True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)
