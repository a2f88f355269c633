"""Where templates lie compiled, as compiling them is most of the time of a first call. It imports nothing, so that the
runtime can say where without what generating takes."""

from __future__ import annotations

from typing import Protocol


class Shelf(Protocol):
    """Keeps bytes by name from process to process, or does not: nobody relies on it."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, content: bytes) -> None: ...


class _Nowhere:
    """Keeps nothing."""

    def read(self, name: str) -> bytes | None:
        return None

    def write(self, name: str, content: bytes) -> None:
        pass


_own: Shelf = _Nowhere()


def use(shelf: Shelf) -> None:
    global _own
    _own = shelf


def shelf() -> Shelf:
    return _own
