"""Versions of the libraries that Weft is tested with, and what becomes of others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module

from .caller import warn
from .errors import UnavailableError

Version = tuple[int, int]
TESTED: dict[str, tuple[Version, Version]] = {
    "torch": ((2, 9), (2, 13)), "triton": ((3, 6), (3, 7)), "transformers": ((5, 17), (5, 24)),
}  # fmt: skip


def version_of(text: str) -> Version:
    """The first two numbers of a version.

    >>> version_of("2.13.0+cu130"), version_of("6.0.0.dev0")
    ((2, 13), (6, 0))
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@cache
def warn_where_untested(library: str, version: str) -> None:
    """Warn, once in a process, where a version is none of those tested: it is tried all the same."""
    oldest, newest = TESTED[library]
    if not oldest <= version_of(version) <= newest:
        warn(f"weft: {library} {version} is tried, and was not tested: tested are {tested(library)}")


def tested(library: str) -> str:
    """The versions of a library that were tested.

    >>> tested("triton")
    '3.6 to 3.7'
    """
    return " to ".join(".".join(map(str, version)) for version in TESTED[library])


def missing(names: Iterable[str]) -> list[str]:
    """Of names `module:attribute.attribute`, those that are not there; with what failed, where an import did."""
    return [name + why for name in names if (why := _absence(name)) is not None]


def _absence(name: str) -> str | None:
    """None where it is there; else the failure of another library that its import met, or ""."""
    module, _, path = name.partition(":")
    try:
        found: object = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        return "" if root is error else f" ({type(root).__name__}: {str(root).splitlines()[0] if str(root) else ''})"
    return None


def refuse(library: str, version: str, lacks: list[str]) -> None:
    """Raise UnavailableError where a library lacks what Weft uses of it."""
    if lacks:
        (low, lower), (high, higher) = TESTED[library]
        wanted = f"{library}>={low}.{lower},<{high}.{higher + 1}"
        if broken := [lack for lack in lacks if lack.endswith(")")]:
            raise UnavailableError(
                f"weft: {library} {version} cannot be imported: {broken[0]}; mend or remove what fails, which is most "
                "often a library beside it that was built for another version"
            )
        raise UnavailableError(
            f"weft: {library} {version} lacks what Weft uses of it: {', '.join(lacks)}; tested are {tested(library)}: "
            f"pip install '{wanted}'"
        )
