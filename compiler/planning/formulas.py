"""Formulas of quantities.py as text. The one place that shows them to sympy, imported where a text is asked for."""

from __future__ import annotations

from functools import lru_cache

import sympy

from .quantities import Formula, Sizes

# Letters that are a property of the machine or the schedule rather than of the problem: written as numbers.
_SWITCHES = (
    "R",
    "begins_zero",
    "e",
    "joined",
    "kv_share",
    "long_axis",
    "neighbours_miss",
    "nonlinear",
    "owned_in_sram",
    "q_share",
    "s",
    "score_bytes",
    "v_copy",
    "v_share",
)


def formula_text(formula: Formula, sizes: Sizes) -> str:
    """The formula as text over the letters of `Sizes`.

    Element sizes, buffer counts and switches of `sizes` are filled in, and the share k of repeated reads where it is 0
    or 1, so that what does not apply is not printed.

    >>> from .quantities import query_bytes
    >>> formula_text(query_bytes, Sizes(*[1] * 23))
    'B*D*Hq*L'
    """
    filled = {name: getattr(sizes, name) for name in _SWITCHES}
    if sizes.k in (0, 1):
        filled["k"] = sizes.k
    own_value = sizes.Du != 0
    return _text(formula, tuple(sorted(filled.items())), own_value)


USEFUL = {"C": "D", "Cv": "Dv", "n": "v", "bq": 1, "bkv": 1}  # pairs that see each other, and columns that exist


def useful_text(formula: Formula, sizes: Sizes) -> str:
    """A formula of FLOPs without padding and without what a mask hides: v is the number of visible pairs.

    >>> from .quantities import forward_flops
    >>> useful_text(forward_flops, Sizes(*[1] * 23))
    '2*v*(D + Dv)'
    """
    letters = {name: sympy.Symbol(to, positive=True) if isinstance(to, str) else to for name, to in USEFUL.items()}
    rest = {name: value for name, value in sizes._asdict().items() if name not in letters}
    # A sympy symbol behaves like the number that it stands for, as below.
    return str(sympy.sstr(sympy.sympify(formula(Sizes(**letters, **rest)))))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _text(formula: Formula, filled: tuple[tuple[str, float], ...], own_value: bool) -> str:
    numbers = dict(filled)
    letters = {name: numbers.get(name, sympy.Symbol(name, positive=True)) for name in Sizes._fields}
    for stored, whole in (("Du", "Dv"), ("Cu", "Cv")):
        letters[stored] = letters[whole] if own_value else 0
    # A sympy symbol behaves like the number that it stands for, which is all that a formula relies on.
    return _printed(sympy.sympify(formula(Sizes(**letters))))


@lru_cache(maxsize=4096, typed=True)
def _printed(expression: sympy.Basic) -> str:
    """Formulas of many plans are the same expression, and to print one takes longer than to make it."""
    return str(sympy.sstr(expression))
