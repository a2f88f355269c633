"""The program of a Gluon kernel, declared once: its roles, what lies in shared memory, and its barriers.

A declaration is used three times. It prints the record of shared memory, the allocations, the initialisation of
mbarriers and the launch of the roles. Its sum is the SRAM that planning counts. Its checks refuse what a GPU would
answer with a hang or a wrong result.

    program = Program("toy", {"STAGES": 2, "BLOCK_KV": "bkv", "COLUMNS": "C"})
    program.ring("key", "STAGES, 1, 1, BLOCK_KV", key_columns)
    program.mbarrier("key_ready", "STAGES", about="one for each slot")
    program.named("FREE_KEY", 2)
    program.role("consumer", warps=4, count=2, registers=240, empties=["key"])
    program.role("producer", warps=1, registers=24, fills=["key"])
    program.check()

Shapes are expressions of the module's constants. `constants` says what these are in letters of `Sizes`, so that one
sum serves numbers and the formula of `explain`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from types import CodeType
from typing import Literal, NamedTuple

from ....compiler.planning.quantities import Sizes
from ....ir.errors import InternalError

REGISTERS = 65536  # of an SM, 32 bits each
THREADS = 32  # of a warp
WARPGROUP = 4  # warps: registers are moved between groups of so many
HARDWARE_BARRIERS = 16  # of a program
RESERVED_BARRIERS = 2  # which Triton takes besides one for each role that is not the first
FIRST_BARRIER = 8  # room for what Triton takes of six roles
BYTES = {"dtype": "e", "gl.float16": "2", "gl.float32": "4", "gl.int32": "4", "gl.uint32": "4", "gl.int64": "8"}
LINE = 112  # columns of a line of a launch


def plain(rank: int) -> str:
    """The layout of slots of so many extents whose elements lie in order: not swizzled."""
    return f"gl.SwizzledSharedLayout(1, 1, 1, [{', '.join(map(str, reversed(range(rank))))}])"


class Columns(NamedTuple):
    """Columns of a tile that lie together. A tile of two pieces has two fields."""

    width: str  # an expression of constants
    name: str = ""  # what follows the tile's name
    box: str = ""  # what follows the name of its descriptor


class Tile(NamedTuple):
    """A field of shared memory."""

    name: str
    rows: str  # its extents but columns: expressions of constants, with commas between them
    width: str  # the columns of this piece, or "" where `rows` has all extents
    dtype: str
    layout: str  # an expression: of a descriptor, swizzled as copies by TMA leave it
    about: str
    element: str  # bytes, in letters of `Sizes`
    place: str = ""  # the tile in whose place it lies
    kind: Literal["tile", "ring", "card"] = "tile"  # ring: slots that are used in turn; card: counted in `besides`
    whole: str = ""  # the tile that it is a piece of

    @property
    def shape(self) -> str:
        return ", ".join(filter(None, (self.rows, self.width)))


class Mbarrier(NamedTuple):
    """Mbarriers in shared memory."""

    name: str
    number: str  # an expression of constants
    arrivals: str  # likewise, also of `i`, the number of one of them
    about: str
    why: str  # a comment above the initialisation


class Named(NamedTuple):
    """Hardware barriers with numbers one after the other."""

    name: str  # of the constant that has the first number
    first: int
    number: int
    threads: int  # that meet at one of them
    ring: str = ""  # whose free slots they are about

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.number)


@dataclass(frozen=True)
class Role:
    """What warps of a program do: a function of the module. The first role of a program has its first warps."""

    name: str
    warps: int  # of one
    registers: int  # of a thread
    count: int = 1  # how many there are
    body: str = ""  # the template that prints the function
    fills: tuple[str, ...] = ()  # rings
    empties: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()  # rings that another role fills, whose free slots it waits for, too
    numbered: bool = False  # each is told its number


@dataclass(eq=False)
class Program:
    """The declaration; methods add to it. The order is that of fields and of their initialisation."""

    kernel: str
    constants: Mapping[str, str | int] = field(default_factory=dict)  # of the module: numbers, or letters of `Sizes`
    widths: Mapping[int, str] = field(default_factory=dict)  # the letters of columns of tiles that are several pieces
    besides: int = 0  # bytes that the sum has for cards, mbarriers and what Triton takes
    spare: int = 0  # bytes that a form must leave to them besides
    record: str = "Sram"  # the name of the record of shared memory
    about: str = "All shared memory."
    first_barrier: int = FIRST_BARRIER
    fields: list[Tile | Mbarrier] = field(default_factory=list)
    barriers: list[Named] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)

    # -- what is declared ----------------------------------------------------------------------------------------------
    def tile(
        self, name: str, shape: str, columns: Sequence[Columns] = (), *, dtype: str = "dtype", layout: str = "",
        of: str = "", about: str = "", element: str | int = "", place: str = "",
        kind: Literal["tile", "ring", "card"] = "tile",
    ) -> None:  # fmt: skip
        """A tile, or one for each piece of its columns. of: the tensor whose descriptor gives the layout."""
        bytes_of = str(element) or BYTES[dtype]
        dtype_said = " float32" if dtype == "gl.float32" else ""
        for piece in columns or [Columns("")]:
            laid = layout or f"{of or name}{piece.box}_desc.layout"
            whole = ", ".join(filter(None, (shape, piece.width)))
            said = f"the place of {place}" if place else f"[{whole}]{dtype_said}" + (f": {about}" if about else "")
            made = Tile(name + piece.name, shape, piece.width, dtype, laid, said, bytes_of, place, kind, name)
            self.fields.append(made)

    def ring(self, name: str, shape: str, columns: Sequence[Columns] = (), **given: str | int) -> None:
        """Slots of tiles, which one role fills and others empty. `shape` begins with their number."""
        self.tile(name, shape, columns, kind="ring", **given)  # type: ignore[arg-type]

    def cards(self, name: str, shape: str) -> None:
        """Numbers that one role leaves for others."""
        self.tile(name, shape, dtype="gl.int32", layout=plain(1), kind="card")

    def mbarrier(
        self, name: str, number: str = "1", *, arrivals: str | int = 1, about: str = "", why: str = ""
    ) -> None:  # fmt: skip
        """Mbarriers that so many arrivals complete."""
        self.fields.append(Mbarrier(name, number, str(arrivals), about, why))

    def role(
        self, name: str, *, warps: int, registers: int, count: int | None = None, body: str = "",
        fills: Iterable[str] = (), empties: Iterable[str] = (), awaits: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Warps of one task. count: how many of them there are, each of which is told its number."""
        rings = (*fills,), (*empties,), (*awaits,)
        self.roles.append(Role(name, warps, registers, count or 1, body, *rings, numbered=count is not None))

    def named(self, name: str, number: int, *, meets: Sequence[str] = (), first: int | None = None) -> None:
        """Hardware barriers. meets: one of each of these roles at each of them. first: by default the next free one."""
        warps = sum(self._role(role).warps for role in meets)
        self.barriers.append(Named(name, self._next_barrier if first is None else first, number, THREADS * warps))

    def free(self, ring: str, number: int) -> None:
        """Hardware barriers of a ring's slots, at which who empties a slot meets who fills it."""
        meeting = [r for r in self.roles if ring in (*r.fills, *r.empties, *r.awaits)]
        threads = THREADS * sum(r.warps * r.count for r in meeting)
        self.barriers.append(Named(f"FIRST_FREE_{ring.upper()}", self._next_barrier, number, threads, ring))

    @property
    def _next_barrier(self) -> int:
        return max((b.numbers.stop for b in self.barriers), default=self.first_barrier)

    def _role(self, name: str) -> Role:
        found = next((r for r in self.roles if r.name == name), None)
        if found is None:
            raise self._wrong(f"expected a role {name}, declared are {', '.join(r.name for r in self.roles)}")
        return found

    def barrier(self, name: str) -> Named:
        return next(b for b in self.barriers if b.name == name)

    @property
    def ring_barriers(self) -> list[Named]:
        """Those at which slots are given back."""
        return [b for b in self.barriers if b.ring]

    @property
    def ring_threads(self) -> int:
        """Threads that meet where a slot is given back: as many for all rings, since one function does that."""
        found = {b.threads for b in self.ring_barriers}
        if len(found) != 1:
            raise self._wrong(f"expected rings of as many threads each, got {sorted(found)}")
        return found.pop()

    @property
    def waits_elsewhere(self) -> bool:
        """Whether roles wait for free slots that others fill."""
        return any(r.awaits for r in self.roles)

    def has(self, name: str) -> bool:
        """Whether shared memory has a field of this name."""
        return any(f.name == name for f in self.fields)

    def count(self, name: str) -> int:
        """How many there are of a role."""
        return self._role(name).count

    def body(self, name: str) -> str:
        """The template of a role."""
        return self._role(name).body

    # -- SRAM ----------------------------------------------------------------------------------------------------------
    def sram_bytes(self, x: Sizes) -> float:
        """SRAM of one program: tiles, and what is set aside for the rest. Of numbers, or of symbols."""
        return eval(self._sum, {"__builtins__": {}}, x._asdict())

    @cached_property
    def _sum(self) -> CodeType:
        counted = [t for t in self.tiles if not t.place and t.kind != "card"]
        terms = [self._bytes_of(list(pieces)) for _, pieces in groupby(counted, key=lambda tile: tile.whole)]
        terms += [str(self.besides)] if self.besides else []
        return compile(" + ".join(terms), f"SRAM of {self.kernel}", "eval")

    def _bytes_of(self, pieces: list[Tile]) -> str:
        """The pieces of a tile together, so that a letter of all their columns is one term."""
        width = self.widths.get(sum(int(t.width) for t in pieces)) if len(pieces) > 1 else None
        columns = str(width or " + ".join(self._in_letters(t.width) for t in pieces if t.width) or 1)
        factors = [pieces[0].element, *(extent.strip() for extent in pieces[0].rows.split(","))]
        return " * ".join(f"({text})" for text in (*map(self._in_letters, factors), columns))

    def _in_letters(self, text: str) -> str:
        """An expression with what constants are in place of their names; extents divide without a rest."""
        known = {name: f"({value})" for name, value in self.constants.items()}
        found = re.sub(r"[A-Z][A-Z_0-9]+", lambda name: known.get(name[0], name[0]), text).replace("//", "/")
        unknown = sorted(set(re.findall(r"[A-Za-z_]\w*", found)) - set(Sizes._fields))
        if unknown:
            raise self._wrong(f"expected extents of {', '.join(sorted(self.constants))}, got {', '.join(unknown)}")
        return found

    # -- checks --------------------------------------------------------------------------------------------------------
    def check(self) -> Program:
        """The program itself. Raises InternalError where it cannot run."""
        self._check_names()
        self._check_registers()
        self._check_barriers()
        self._check_rings()
        return self

    def _check_names(self) -> None:
        for what, names in (("fields", [f.name for f in self.fields]), ("roles", [r.name for r in self.roles])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise self._wrong(f"expected {what} of different names, got {', '.join(twice)} twice")
        for tile in self.tiles:
            if tile.place and not any(t.name == tile.place for t in self.tiles):
                raise self._wrong(f"{tile.name}: expected a tile in whose place it lies, got {tile.place}")

    def _check_registers(self) -> None:
        for role in self.roles:
            if role.registers % 8 or not 24 <= role.registers <= 256:
                raise self._wrong(
                    f"role {role.name}: expected registers a thread in steps of 8 from 24 to 256, got {role.registers}"
                )
        if self.registers > REGISTERS:
            raise self._wrong(
                f"its roles take {self.registers} registers, an SM has {REGISTERS}: "
                + ", ".join(f"{r.name} {r.count} x {r.warps} warps of {r.registers}" for r in self.roles)
            )

    @property
    def registers(self) -> int:
        """Of all warps: Triton gives those of a warpgroup as many as the role in it that wants most."""
        first, *others = self._singly or [Role("none", 0, 0)]
        each = [role.registers for role in sorted(others, key=lambda role: -role.warps) for _ in range(role.warps)]
        groups = [max(each[at : at + WARPGROUP]) for at in range(0, len(each), WARPGROUP)]
        return THREADS * (first.warps * first.registers + WARPGROUP * sum(groups))

    @property
    def registers_of_roles(self) -> str:
        """Of a thread of each role, in words."""
        return ", ".join(f"{role.name} {role.registers}" for role in self.roles)

    @property
    def _singly(self) -> list[Role]:
        """Each of several of a role as one."""
        return [role for role in self.roles for _ in range(role.count)]

    def _check_barriers(self) -> None:
        taken: dict[int, str] = {n: "Triton" for n in range(RESERVED_BARRIERS + max(0, len(self._singly) - 1))}
        for barrier in self.barriers:
            if barrier.numbers.stop > HARDWARE_BARRIERS:
                raise self._wrong(
                    f"{barrier.name}: expected hardware barriers below {HARDWARE_BARRIERS}, got {barrier.first} to "
                    f"{barrier.numbers.stop - 1}"
                )
            for number in barrier.numbers:
                if number in taken:
                    raise self._wrong(f"{barrier.name}: hardware barrier {number} is that of {taken[number]}")
                taken[number] = barrier.name

    def _check_rings(self) -> None:
        rings = list(dict.fromkeys(t.whole for t in self.tiles if t.kind == "ring"))
        for ring in rings:
            fillers = [r.name for r in self.roles if ring in r.fills]
            if len(fillers) != 1:
                raise self._wrong(f"ring {ring}: expected one role that fills it, got {', '.join(fillers) or 'none'}")
            if not any(ring in r.empties for r in self.roles):
                raise self._wrong(f"ring {ring}: expected a role that empties it, got none")
        known = {ring for r in self.roles for ring in (*r.fills, *r.empties, *r.awaits)}
        if unknown := sorted(known - set(rings)):
            raise self._wrong(f"expected rings {', '.join(rings) or 'none'}, got {', '.join(unknown)}")

    def _wrong(self, words: str) -> InternalError:
        return InternalError(f"program of {self.kernel}: {words}")

    # -- what is printed -----------------------------------------------------------------------------------------------
    @property
    def tiles(self) -> list[Tile]:
        return [f for f in self.fields if isinstance(f, Tile)]

    @property
    def mbarriers(self) -> list[Mbarrier]:
        return [f for f in self.fields if isinstance(f, Mbarrier)]

    def written(self) -> str:
        """The record of shared memory, which roles get as one argument."""
        fields = [f"{f.name}: gl.shared_memory_descriptor{f'  # {f.about}' if f.about else ''}" for f in self.fields]
        lines = [
            f"class {self.record}(NamedTuple):",
            f'    """{self.about}"""',
            "",
            *(f"    {line}" for line in fields),
        ]
        return "\n".join(lines)

    def allocated(self) -> str:
        """The lines that allocate it, as `sram`."""
        places = {t.place for t in self.tiles if t.place}
        before = [f"{t.name} = {_allocation(t)}" for t in self.tiles if t.name in places]
        inside = [self._placed(f, places) for f in self.fields]
        return "\n".join([*before, f"sram = {self.record}(", *(f"    {line}," for line in inside), ")"])

    @staticmethod
    def _placed(item: Tile | Mbarrier, places: set[str]) -> str:
        if isinstance(item, Tile) and (item.place or item.name in places):
            return item.place or item.name
        return _allocation(item)

    def variables(self, *names: str) -> str:
        """The lines that allocate these as variables, of a kernel without roles. Its mbarriers are single ones."""
        found = {f.name: f for f in self.fields}
        lines = [f"{name} = {_allocation(found[name], alone=True)}" for name in names]
        started = [f"mbarrier.init({b.name}, count={b.arrivals})" for b in self.mbarriers if b.name in names]
        return "\n".join([*lines, *started])

    def initialised(self) -> str:
        """The lines that initialise mbarriers: a loop for neighbours of one number."""
        lines: list[str] = []
        for number, group in groupby(self.mbarriers, key=lambda barrier: barrier.number):
            several = number != "1"
            lines += [f"for i in gl.static_range({number}):"] if several else []
            for barrier in group:
                indent, index = ("    ", "i") if several else ("", "0")
                lines += [f"{indent}# {barrier.why}"] if barrier.why else []
                lines.append(f"{indent}mbarrier.init(sram.{barrier.name}.index({index}), count={barrier.arrivals})")
        return "\n".join(lines)

    def launched(self, arguments: Mapping[str, Iterable[str]]) -> str:
        """The lines that begin the roles, with the arguments of each besides its number and shared memory."""
        calls: list[str] = []
        for role in self.roles:
            names = [entry for entry in arguments[role.name] if entry]
            for number in range(role.count):
                calls.append(_call(role.name, [*([str(number)] if role.numbered else []), "sram", *names]))
        others = self._singly[1:]
        numbers = f"{[r.warps for r in others]}, {[r.registers for r in others]}"
        return "\n".join(["gl.warp_specialize([", *calls, f"], {numbers})"])


def _allocation(item: Tile | Mbarrier, alone: bool = False) -> str:
    if isinstance(item, Mbarrier) and alone:
        return "gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())"
    if isinstance(item, Mbarrier):
        return f"gl.allocate_shared_memory(gl.int64, [{item.number}, 1], barriers)"
    return f"gl.allocate_shared_memory({item.dtype}, [{item.shape}], {item.layout})"


def _call(name: str, arguments: list[str]) -> str:
    """A role and its arguments, in one line where there is room."""
    from ...templates import listed  # lazy: imports jinja2

    whole = f"    ({name}, ({', '.join(arguments)})),"
    if len(whole) <= LINE:
        return whole
    rows = listed(arguments, LINE - 8).splitlines()
    return "\n".join([f"    ({name}, (", *(f"        {row}" for row in rows), "    )),"])
