"""The two families of errors: the user's mistakes and ours."""


class WeftError(ValueError):
    """A mistake in a declaration or a call: what was expected, what was got, where, and what to do."""


class InternalError(Exception):
    """A defect in Weft itself: please report it with the message."""


class UnavailableError(WeftError, NotImplementedError):
    """A target or capability that cannot be used here; the message says why and what to use instead."""


def shown(value: object) -> str:
    """A value in a message; an int of thousands of digits by its size, as Python refuses to print it.

    >>> shown(-3), shown(2**20000)
    ('-3', 'an int of 20001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


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


def collected(title: str, problems: list[str]) -> WeftError:
    """One error that lists several independent problems, so that a user fixes them in one round.

    >>> print(collected("alibi", ["mask: expected bool", "scale: expected a number"]))
    alibi:
      - mask: expected bool
      - scale: expected a number
    """
    if len(problems) == 1:
        return WeftError(f"{title}: {problems[0]}")
    return WeftError(f"{title}:\n" + "\n".join(f"  - {p}" for p in problems))
