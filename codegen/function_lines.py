"""Lines of printed functions, and the functions that they call in every variant."""

from __future__ import annotations

import re
from collections.abc import Sequence

HERE = "here"  # what functions on a GPU are told of the head that a tile is of, and operands


def taken_from_here(names: Sequence[str], width: int = 112) -> list[str]:
    """Lines that give names of their own to what `here` has.

    >>> taken_from_here(["head", "q_len"])
    ['head, q_len = here.head, here.q_len']
    """
    lines: list[str] = []
    some: list[str] = []
    for name in [*names, ""]:
        if some and (not name or 2 * len(", ".join([*some, name])) + 6 * (len(some) + 1) > width):
            lines.append(f"{', '.join(some)} = {', '.join(f'{HERE}.{each}' for each in some)}")
            some = []
        some.append(name)
    return lines


def called(functions: list[str], text: str) -> list[str]:
    """Those of the functions that the text calls, or a later one of them that is called."""
    found: list[str] = []
    for function in reversed(functions):
        name = function.split("def ", 1)[1].split("(", 1)[0]
        if re.search(rf"(?<![\w.]){name}\(", "".join([text, *found])):
            found.insert(0, function)
    return found


def commented(line: str, comment: str) -> list[str]:
    """The comment behind the line where it fits, else above it."""
    if not comment:
        return [line]
    together = f"{line}  # {comment}"
    return [together] if len(together) <= 112 else [f"# {comment}", line]


def returned(values: list[str]) -> list[str]:
    """A return statement, one value a line where it would be long."""
    line = f"return {', '.join(values)}"
    return [line] if len(line) <= 112 else ["return (", *(f"    {v}," for v in values), ")"]


# -- functions of every variant ----------------------------------------------------------------------------------------
IEEE = '''
def ieee(on_numbers, on_tensors, *x):
    """on_numbers(*x), and where Python raises what floats give there: infinity or NaN."""
    try:
        return on_numbers(*x)
    except (ArithmeticError, ValueError):
        return on_tensors(*(torch.tensor(each, dtype=torch.float64, device="cpu") for each in x)).item()
'''.lstrip()
IN_RANGE = '''
def in_range(factor):
    """A number that torch's kernels multiply by: infinite where it is that in float32, times log2(e) too."""
    return factor if abs(factor) <= 2.358e38 or factor != factor else math.copysign(math.inf, factor)
'''.lstrip()
AS_INT = '''{jit}
def as_int(x):
    """An int read from a tensor, in at least 32 bits."""
    if x.dtype.primitive_bitwidth < 32:
        x = x.to({m}.int32)
    return x
'''
AS_BOUND = '''{jit}
def as_bound(x):
    """An int read from a tensor, for the arithmetic of tile bounds: in 64 bits, and about 2**31 from 0 at most."""
    # A limit may be the largest value of its dtype, where limit + 1 would wrap. Ints of a mask have 32 bits, and what
    # it adds or multiplies is promised to be below 2**30: bounds keep their meaning beside what is cut one further off.
    return {m}.minimum({m}.maximum(x.to({m}.int64), -2147483649), 2147483648)
'''
