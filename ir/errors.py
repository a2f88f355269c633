"""The two families of errors: the user's mistakes and ours. A mistake is told in fields, and written at the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

_LONGEST, _MOST = 200, 8  # letters of a value in a message, and entries of a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. `str` writes it for Python, and `api/tools/cli_options.py` for the shell.

    >>> print(Problem(option="kv_lens", place=(2,), expected="a length from 0 to 8", got="9"))
    kv_lens[2]: expected a length from 0 to 8, got 9
    >>> print(Problem(operand="n", what="missing", expected="an int", next_step="pass n=...", where="model.py:7"))
    n: missing; pass n=... (an int, declared at model.py:7)
    """

    operand: str = ""  # what it is about: query, key, value, cache, or an operand of the variant;
    option: str = ""  # or else an option of a call, a field of a declaration, an argument of a function
    place: tuple[int, ...] = ()  # the entry of it, where it is about one
    what: str = ""  # the kind of mistake, such as "missing"; all of it where nothing else can be said to be expected
    expected: str = ""
    got: str = ""
    next_step: str = ""
    where: str = ""  # file:line that declared the operand, or wrote the expression
    named: bool = False  # the text names it in its own way
    of: str = ""  # the function that has the option, where that is not the call: "shape"

    def __str__(self) -> str:
        label = f"{self.of}: {self.option}" if self.of else self.operand or self.option
        return self.text("" if self.named else label, self.where)

    def text(self, label: str, where: str = "") -> str:
        """In one line, with these words for what it is about; where an expression was written stands below."""
        expected, note = self.expected, f"declared at {where}" if where and self.operand else ""
        if self.what == "missing":
            expected, note = "", ", ".join(filter(None, (expected, note)))
        elif note and expected:
            expected, note = f"{expected}, as {note}", ""
        place = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        wanted = [f"{verb} {text}" for verb, text in (("expected", expected), ("got", self.got)) if text]
        said = ": ".join(filter(None, (label and label + place, self.what, ", ".join(wanted))))
        said += f"; {self.next_step}" * bool(self.next_step) + f" ({note})" * bool(note)
        return said if self.operand or not where else f"{said}\n  at {where}"


FIELDS = tuple(field.name for field in fields(Problem) if field.name not in ("named", "of"))


class WeftError(ValueError):
    """A mistake in a declaration or a call: what was expected, what was got, where, and what to do.

    problems: all of them in fields. The error has the fields of the first one, too; empty where a message has none.
    """

    title: str = ""  # the variant, or the function
    declared: str = ""  # file:line of what the title names
    problems: tuple[Problem, ...] = ()
    operand: str = ""
    option: str = ""
    place: tuple[int, ...] = ()
    what: str = ""
    expected: str = ""
    got: str = ""
    next_step: str = ""
    where: str = ""

    @classmethod
    def of(cls, title: str, *problems: Problem, where: str = "") -> Self:
        """where: the line that declared what the title names."""
        error = cls(listed(f"{title} (declared at {where})" if where else title, [str(p) for p in problems]))
        error.title, error.problems, error.declared = title, problems, where
        for name in FIELDS:
            setattr(error, name, getattr(problems[0], name))
        error.where = error.where or where
        return error


class InternalError(Exception):
    """A defect in Weft itself: please report it with the message."""


class UnavailableError(WeftError, NotImplementedError):
    """A target or capability that cannot be used here; the message says why and what to use instead."""


def second_derivative(name: str) -> WeftError:
    return WeftError(
        f"{name}: second derivatives are not available; use {name}.reference(...), which torch can differentiate twice"
    )


def shown(value: object) -> str:
    """A value in a message, in a few words: all that a mistake can be has some.

    An int of thousands of digits is told by its size, as Python refuses to print it. Of a tensor or an array the shape
    and dtype are told, as it may be large, or have no memory to read.

    >>> shown(-3), shown(2**20000), shown("x" * 1000)[:4]
    ('-3', 'an int of 20001 bits', "'xxx")
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (list, tuple)) and type(value).__repr__ in (list.__repr__, tuple.__repr__):
        return _row_shown(value)
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
            return _array_shown(value)
        text = repr(value)
    except Exception:  # of a caller's class, or of a tensor whose sizes are not known
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _row_shown(values: list[object] | tuple[object, ...]) -> str:
    few = [shown(value) for value in values[:_MOST]] + ["..."] * (len(values) > _MOST)
    inside = ", ".join(few)
    return f"[{inside}]" if isinstance(values, list) else f"({inside}{',' * (len(few) == 1)})"


def _array_shown(value: Any) -> str:
    """A numpy scalar as a number; what is longer by its sizes."""
    library = type(value).__module__.partition(".")[0]
    if library == "numpy" and not value.shape and type(value).__name__ != "ndarray":
        return repr(value)
    kind = "a tensor" if library == "torch" else f"an {type(value).__name__}"
    return f"{kind} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "byte"), counted(0, "entry"), counted(3, "key"), counted(2, "index")
    ('1 byte', '0 entries', '3 keys', '2 indices')
    """
    if number == 1:
        return f"1 {noun}"
    if noun == "index":
        return f"{number} indices"
    if noun[-1] == "y" and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}s"


def listed(title: str, texts: Sequence[str]) -> str:
    """Several independent problems in one message, so that a user mends them in one round.

    >>> print(listed("alibi", ["mask: expected bool", "scale: expected a number"]))
    alibi:
      - mask: expected bool
      - scale: expected a number
    """
    if len(texts) == 1:
        return f"{title}: {texts[0]}" if title else texts[0]
    lines = [f"  - {text}".replace("\n", "\n    ") for text in texts]
    return "\n".join([f"{title}:", *lines] if title else lines)


def collected(title: str, problems: Sequence[Problem | str], where: str = "") -> WeftError:
    """One error of several independent problems; of a text alone, no field is known."""
    return WeftError.of(title, *[p if isinstance(p, Problem) else Problem(what=p) for p in problems], where=where)
