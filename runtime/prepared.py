"""What calls have in common when they differ only in their data: such calls are checked and prepared once."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
MOST_REMEMBERED = 1024  # layouts of calls, for each variant


def layout_of(arguments: Iterable[object]) -> tuple[object, ...]:
    """All of a call that its kernels depend on, but for addresses.

    Shape, strides, dtype and device of every tensor among the arguments, the others with their types (True is no 1),
    and whether every tensor starts at a multiple of 16 bytes, as fast copies want it.
    """
    layout: list[object] = []
    addresses = 0
    for value in arguments:
        if isinstance(value, Tensor):
            layout += (value.shape, value.stride(), value.dtype, value.get_device())
            addresses |= value.data_ptr()
        else:
            layout += (type(value), value)
    layout.append(addresses % 16 == 0)
    return tuple(layout)


class Recent(dict[object, T]):
    """What was found out about layouts; the oldest entry goes when there are too many."""

    def __init__(self) -> None:
        super().__init__()
        self._keeping = Lock()  # backward passes come from other threads

    def found(self, layout: object) -> T | None:
        """What is known of a layout; nothing of one that cannot be hashed, as with symbolic sizes."""
        try:
            return self.get(layout)
        except TypeError:
            return None

    def keep(self, layout: object, found: T) -> T:
        with self._keeping:
            if len(self) >= MOST_REMEMBERED:
                self.pop(next(iter(self)), None)
            self[layout] = found
        return found
