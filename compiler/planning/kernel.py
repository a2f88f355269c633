"""A kernel as planning sees it: formulas of what it moves and computes, and answers to what planning asks.

Rooms of targets make the records (codegen/targets/<family>/kernels/). Planning knows no kernel by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from ..analysis.tiles.results import Axis
from .paces import Pace
from .quantities import Formula, head_keys, head_queries, key_visits, none, query_visits
from .signature import Direction, Widths
from .sources import SequenceKind, Side

if TYPE_CHECKING:
    from ..analysis.tiles.results import Traits
    from .form import Form
    from .quantities import Sizes
    from .records import Stage
    from .segments import Segments
    from .stage_words import Tiles

Bound = Literal["matrix", "exp", "other", "mask", "tiles", "memory", "L2", "latency", "passes", "calls", "torch"]
Algorithm = Literal["standard", "streaming", "flash", "split_kv"]
Slot = Literal["forward", "backward_q", "backward_kv"]
# Which tiles of a problem its loop visits: those that are visible, all, those whose pairs are not all level, or none
Visits = Literal["visible", "all", "uneven", "none"]
Finds = Literal["", "runs", "ends", "lists", "cells"]  # what a kernel that measures tiles writes
Module = Literal["", "measures", "tables"]  # "": that of the target; else one of its own, for kernels of any target


DESCALES = frozenset({"q_descale", "k_descale", "v_descale"})  # options of a call with FP8 operands


Words: TypeAlias = "Callable[[Tiles], list[Stage]]"  # of what a program loads, keeps, computes and stores, in order


class Declared(Protocol):
    """The program that a room declares (codegen/targets/gluon/program.py)."""

    @property
    def spare(self) -> int:
        """Bytes of SRAM that a form must leave besides what the sum has."""

    @property
    def registers_of_roles(self) -> str:
        """Of a thread of each role, in words."""

    def sram_bytes(self, x: Sizes) -> float:
        """The sum of what it allocates."""


class KernelId(NamedTuple):
    """What tells kernels apart: of one name, a family may have several variants."""

    family: str  # of the target whose room has it
    name: str
    variant: str = ""


class Feature(NamedTuple):
    """What adds lines of its own to kernels, at hooks that their templates name."""

    name: str
    part: str  # its template
    sums: bool = False  # it adds up gradients of operands, at hooks of the sums of a kernel


@dataclass(frozen=True)
class Again:
    """Operands that a kernel reads more than once."""

    visits: Formula  # how often each row is fetched
    head_bytes: Formula  # bytes of one head of these operands


KEYS_AGAIN = Again(key_visits, head_keys)
QUERIES_AGAIN = Again(query_visits, head_queries)


def nothing_kept(block_q: int, block_kv: int, qk_columns: int, v_columns: int) -> float:
    """The sums of a kernel that is not about tiles of scores: scores, and the wider of its operands."""
    return block_q * block_kv + block_q * max(qk_columns, v_columns)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as formulas. Bytes are of the whole kernel, `sram` of one program."""

    id: KernelId
    direction: Direction
    slot: Slot  # which column of the tables of tilings is its own
    axis: Axis  # what a program loops over: "kv" for a kernel that owns query tiles
    loop: str  # the same in words
    stages: Words
    programs: Formula
    read: Formula
    written: Formula
    sram: Formula = none
    flops: Formula = none  # of matrix products; padding and masked parts of visited tiles included
    exps: Formula = none
    again: Again = KEYS_AGAIN
    # -- the form --
    follows: str | None = None  # the kernel whose form it has, being cut as that one is; None: a form of its own
    program: Callable[[Form, Segments, Traits], Declared] | None = None  # that it declares, in place of `sram`
    # a form that its text cannot have for calls of these widths, in words why
    refuses: Callable[[Form, Widths, Traits], str | None] | None = None
    registers: Callable[[int, int, int, int], float] = nothing_kept  # 32-bit: of block_q, block_kv, columns of both
    # -- the loop --
    visits: Visits = "visible"
    visits_measured: bool = False  # it visits the tiles that kernels before it measure
    weighs: bool = False  # it makes weights of the scores of pairs, so it evaluates the variant's score or mask
    sums_levels: bool = False  # of a backward: it sums the pairs of level tiles
    has_level_loop: bool = False  # of a backward: full tiles of level pairs have a loop without tables
    drop_work: float = 8.0  # instructions of a pair that draw and drop a weight, as they were timed
    steps: Formula = none  # of a program, where that is what takes time: each waits for what the one before has read
    longest: Formula | None = None  # tiles of the longest program, where that is no share of all
    pace: Pace | None = None  # where it is not that of a family of forms
    # -- the plan --
    divides: bool = False  # its programs have parts of the keys, and rows of all heads that share them
    joins: Kernel | None = None  # the kernel whose parts it joins
    lists: tuple[Side, ...] = ()  # of packed sequences: the sides of whose tiles it has lists
    is_optional: bool = False  # some calls have no programs of it
    measures: str = ""  # the kernel that visits what it finds
    finds: Finds = ""
    of_long_axis: bool = False  # of what it finds: it runs where the axis is long
    own_form: Callable[[Form | None, SequenceKind], Form] | None = None  # no choice: of the form of `measures`
    module: Module = ""
    options: frozenset[str] = frozenset()  # of a call, that it reads by their names
    features: tuple[Feature, ...] = ()  # in the order of their lines
    is_lent: bool = False  # to other targets, whose plans have it from the target that measures for them

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def shares_keys(self) -> bool:
        """Whether a tile has rows of all query heads that share keys."""
        return self.divides or self.joins is not None

    @property
    def divider(self) -> Kernel:
        """The kernel that divides the keys: this one, or the one whose parts it joins."""
        return self.joins or self

    @property
    def has_choice(self) -> bool:
        """Whether a schedule gives it a form."""
        return not self.follows and self.own_form is None
