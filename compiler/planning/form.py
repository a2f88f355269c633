"""How a kernel is cut and launched: tile sizes and what else may vary. Rooms of targets have a record of each kind.

A form's text and its parser follow from its fields: numbers in order, each behind its letters, then switches. So
`192x128s3q2+lazy` is what a form with these fields prints, and what reads back as that form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from .quantities import Formula

if TYPE_CHECKING:
    from ..analysis.tiles.results import TileCounts, Traits
    from .kernel import Kernel
    from .machines.hardware import Hardware
    from .machines.torch_times import TorchCost
    from .quantities import Sizes
    from .segments import Segments

F = TypeVar("F", bound="Form")
PROGRAMS_PER_SM = 8  # at most, whatever else would fit


class Residence(NamedTuple):
    """Where a kernel keeps its tiles."""

    ahead: int  # SRAM buffers of a tile that is loaded ahead
    owned_in_sram: int  # 1 where the tiles that a program owns lie in SRAM, 0 where registers hold them
    score_bytes: int  # SRAM bytes of a score between its two matrix products; 0 where registers hold it


class Number(NamedTuple):
    """How a number stands in a form's text."""

    letters: str  # before it
    others: tuple[int, ...] = ()  # values worth timing
    unit: int = 1  # the text has so many times the field
    left_out: int | None = None  # the value that is not printed


def number(letters: str, *, default: int | None = None, others: tuple[int, ...] = (), unit: int = 1,
           left_out: int | None = None) -> Any:  # fmt: skip
    """A field of a form that its text prints behind these letters."""
    metadata = {"text": Number(letters, others, unit, left_out)}
    return field(metadata=metadata) if default is None else field(default=default, metadata=metadata)


def switch(word: str) -> Any:
    """A field of a form that is off, and that its text prints as "+word" where it is on."""
    return field(default=False, metadata={"text": word})


@dataclass(frozen=True)
class Form:
    """What planning asks of a form. block_q and block_kv are rows of its tiles."""

    numbers: ClassVar[dict[str, Number]]  # of the text, by field: `register` fills these in
    switches: ClassVar[dict[str, str]]  # words of the text, likewise
    pattern: ClassVar[re.Pattern[str]]
    prefix: ClassVar[str] = ""  # of its text, where tiles have one size
    looks_first: ClassVar[bool] = False  # the mask of a tile is evaluated first, which is skipped where none is seen
    loads_reads: ClassVar[bool] = False  # what a tile reads of operands is loaded ahead, as its keys and values are
    computes_bound: ClassVar[bool] = False  # a kernel that divides keys computes as long as it reads
    packed_program: ClassVar[float] = 0.0  # us of a program that finds its place among packed rows

    if TYPE_CHECKING:  # kinds have fields or properties of these names

        @property
        def block_q(self) -> int: ...
        @property
        def block_kv(self) -> int: ...
        @property
        def pair_bytes(self) -> int:
            """Of an element of what pairs read, where tiles of it are brought to SRAM; else 0."""
    else:
        pair_bytes = 0

    def products(self, dtype: str) -> str:
        """The dtype of what is multiplied. dtype: in which kernels multiply that have no other in mind."""
        return dtype

    @property
    def span_rows(self) -> int:
        """Queries for which tiles are measured together."""
        return self.block_q

    def of_rows(self, rows: int) -> Form:
        """The same for tiles of as few queries as hold so many rows that share keys."""
        return self

    def sram(self, kernel: Kernel, parts: Segments, traits: Traits) -> Formula:
        """SRAM bytes of one program."""
        return kernel.sram if kernel.program is None else kernel.program(self, parts, traits).sram_bytes

    def residence(self, kernel: Kernel, hardware: Hardware, element: int, columns: int = 0) -> Residence:
        """element: bytes of an operand's; columns: of the widest result of a product."""
        raise NotImplementedError

    def programs_per_sm(self, kernel: Kernel, parts: Segments, sram: float, hardware: Hardware) -> int:
        return 1

    def pace_family(self, kernel: Kernel, parts: Segments) -> str:
        """The name of the kernel's family of forms, for paces."""
        return f"{kernel.id.family} {kernel.name}"

    def torch_work(
        self, kernel: Kernel, x: Sizes, tiles: TileCounts, traits: Traits, machine: Machine
    ) -> TorchCost | None:  # fmt: skip
        """What a model of torch operations says (torch_times.py); None where the model of a GPU holds."""
        return None

    def in_tiles_as(self, other: Form) -> Form:
        """The same, but that as many calls are left to torch's own kernel as `other` leaves to it."""
        return self

    # -- text ----------------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        text = self.prefix
        for name, n in self.numbers.items():
            value = getattr(self, name)
            text += "" if value == n.left_out else f"{n.letters}{n.unit * value}"
        return text + "".join(f"+{word}" for name, word in self.switches.items() if getattr(self, name))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read back the text of a form of this kind; None for any other text."""
        found = cls.pattern.fullmatch(text)
        if found is None:
            return None
        given: dict[str, Any] = {}
        for name, n in cls.numbers.items():
            if found[name] is None:
                given[name] = n.left_out
            elif int(found[name]) % n.unit:
                return None
            else:
                given[name] = int(found[name]) // n.unit
        named = {word: name for name, word in cls.switches.items()}
        words = [word for word in found["switches"].split("+") if word]
        if not named.keys() >= set(words):
            return None
        return cls(**given, **{named[word]: True for word in words})

    def neighbours(self) -> Iterator[Self]:
        """Forms that differ in one choice."""
        for name in self.switches:
            yield replace(self, **{name: not getattr(self, name)})
        for name, n in self.numbers.items():
            for value in n.others:
                yield replace(self, **{name: value})


class Machine(NamedTuple):
    """What a model of times needs of the machine and the problem besides letters."""

    hardware: Hardware
    dtype: str
    sram: float  # bytes of a program
    busy: float  # share of the machine that works


_kinds: list[type[Form]] = []


def register(kind: type[F]) -> type[F]:
    """Let texts of this kind of form be printed and read back. A decorator for the records of targets."""
    texts = {f.name: f.metadata["text"] for f in fields(kind) if "text" in f.metadata}
    kind.numbers = {name: text for name, text in texts.items() if isinstance(text, Number)}
    kind.switches = {name: text for name, text in texts.items() if isinstance(text, str)}
    kind.pattern = re.compile(_pattern(kind))
    _kinds.append(kind)
    return kind


def _pattern(kind: type[Form]) -> str:
    text = re.escape(kind.prefix)
    for name, n in kind.numbers.items():
        one = rf"{n.letters}(?P<{name}>\d{{1,7}})"
        text += one if n.left_out is None else f"(?:{one})?"
    return rf"{text}(?P<switches>(?:\+[a-z][a-z0-9]*)*)"


def parse_form(text: str) -> Form | None:
    """Read back the text of a form of any target: parse_form(str(form)) == form; None for any other text."""
    return next((form for kind in _kinds if (form := kind.parse(text)) is not None), None)
