"""What is to be launched, and the records that the parts of a launcher share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ...compiler.analysis.tiles.facts import Facts
from ...compiler.analysis.tiles.results import OperandGradient
from ...compiler.planning.buffer import Buffer
from ...compiler.planning.by_distance import Planned
from ...compiler.planning.gradient_sums import Ways, ways_of
from ...compiler.planning.kernel import Kernel
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.sources import SequenceKind
from ...compiler.planning.target import CallTensors, Named
from ...ir.expr import TensorOperand
from .device import Device

PADDING = 256  # rows of statistics are padded to a multiple of it, and of every BLOCK_Q
Q_TILES, KV_TILES = "(q_len + {BLOCK_Q} - 1) // {BLOCK_Q}", "(kv_len + {BLOCK_KV} - 1) // {BLOCK_KV}"


class Mode(NamedTuple):
    """What of a call's tensors the compiled code depends on, besides its signature."""

    aligned: bool  # every address and stride of query, key, value, out and dout is a multiple of 16 bytes
    per_row: bool  # q_offset is a tensor
    no_dlse: bool
    head_dim: int  # the value of the symbol
    page: int = 0  # rows of a block of a paged cache
    rows: int = 0  # of a tile of queries, where these depend on how many there are
    heads: int = 0  # of a query's rows that are brought together, where a tile has rows of all heads of a group
    joined: bool = False  # whether rows in parts are many, and the parts of each few


class KernelLaunch(NamedTuple):
    """How one kernel is launched, by the part that it belongs to. Texts are over names of a call."""

    programs: str  # size of the grid
    options: Mapping[str, int]  # of its compilation
    constants: Mapping[str, object] = {}  # values of constexpr parameters that kernels do not have in common
    renamed: Mapping[str, str] = {}  # parameter -> the name that a call has for it
    only_if: str = ""  # where it has something to do; "" everywhere


class Part:
    """One concern of a launcher: what it gives to each call. A part has no say in what others give."""

    def tools(self) -> dict[str, Any]:
        """Functions that its texts call."""
        return {}

    def buffers(self, mode: Mode) -> list[Buffer]:
        """Tensors that its kernels need besides operands and results."""
        return []

    def rows(self, mode: Mode) -> dict[str, str]:
        """Rows of the vocabulary: names, and what they stand for over other names."""
        return {}

    def known(self, mode: Mode) -> dict[str, str]:
        """Kernels whose results serve other calls with the same mask and tensors, each with a text of its form."""
        return {}

    def found_by_call(self, mode: Mode) -> dict[str, str]:
        """Rows for the direct way of what the longer one is handed by the caller's partition."""
        return {}

    def conditions(self, mode: Mode) -> list[str]:
        """What the direct way asks of a call besides."""
        return []

    def placed(self) -> frozenset[str]:
        """Operands of whose places in memory the direct way asks no more than `conditions`."""
        return frozenset()

    def launch(self, kernel: Kernel, mode: Mode) -> KernelLaunch | None:
        """How a kernel is launched; None for those of other parts."""
        return None


class SummingPart(Part):
    """The part that sums gradients of operands; those of a launcher of forwards have nothing to do."""

    def listed_by_pairs(self) -> list[int]:
        """Reads of which a kernel lists sums part after part of its programs."""
        return []

    def programs(self, mode: Mode) -> tuple[str, str]:
        """Programs of that kernel, and how many are launched at once, as expressions."""
        return "0", "1"

    def tables(self, call: CallTensors, workspace: Named, mode: Mode) -> dict[int, Tensor]:
        """What the kernels listed, added up in the shape of its operand, by number of the read."""
        return {}

    def of_list(self, mode: Mode, *lists: Tensor) -> Tensor:
        """What the direct way calls of it: sums that are listed, in the shape of their operand."""
        raise NotImplementedError

    def clear(self, workspace: Named, mode: Mode) -> None:
        """Clear what nobody lists."""

    def finished(self, call: CallTensors, workspace: Named, tables: Mapping[int, Tensor]) -> list[Tensor]:
        """The sums of each read, in the shape that the caller adds to operands' gradients."""
        return []


class OwnPart(Part):
    """The part of a target's own kernels: what other parts ask of it, and what only some targets need."""

    def sum_buffers(self, n: int, gradient: OperandGradient, mode: Mode) -> list[Buffer]:
        """Where its kernels leave the sums of a gradient that no portable kernel lists."""
        return []

    def level_sums(self, mode: Mode) -> str:
        """How many sums of level pairs are listed behind those of diagonals."""
        return "0"

    def given(self) -> dict[str, Any]:
        """What each call is given anew."""
        return {}

    def readable(self, results: Named) -> Named:
        """Results as its kernels can read them."""
        return results

    def mode_of(self, mode: Mode, call: CallTensors) -> Mode:
        """The mode with what of a tile follows from the sizes of a call."""
        return mode


@dataclass(eq=False)
class Job(Planned):
    """The kernels of one direction with their plan and variant, on a device: all that does not change with calls."""

    modules: Sequence[ModuleType]
    code: CodePlan
    facts: Facts
    device: Device
    unaligned: Callable[[str, Any], Any] = lambda kernel, form: form  # the form where operands are not aligned
    own_keys: list[int] = field(init=False)
    ranks: dict[str, int] = field(init=False)  # of tensor operands, by the name that kernels have for them

    def __post_init__(self) -> None:
        self.own_keys = [i for i, s in enumerate(self.code.segments.qk) if s.source == "rope"]
        parameters = self.facts.attention.canonical.parameters
        self.ranks = {f"arg_{p.name}": p.rank for p in parameters if isinstance(p, TensorOperand)}

    # -- the plan ------------------------------------------------------------------------------------------------------
    @property
    def algorithm(self) -> str:
        return self.code.schedule.algorithm

    @property
    def sequences(self) -> SequenceKind:
        return self.signature.sequences

    @property
    def has_number(self) -> bool:
        """Whether kernels may take q_offset as a number of the call."""
        return self.signature.offset != "bottom_right"

    @property
    def lists_long(self) -> bool:
        """Whether lists have the tiles of long sequences alone, and their number behind them."""
        return self.signature.serves == "long"

    def form(self, kernel: str, aligned: bool = True) -> Any:
        """The form of a kernel; where operands are not aligned it may have another one."""
        form = self.code.form(kernel)
        return form if aligned else self.unaligned(kernel, form)

    def blocks(self, kernel: str, mode: Mode) -> dict[str, int]:
        """The rows of a kernel's tiles, by the names that texts have for them."""
        form = self.form(kernel, mode.aligned)
        return {"BLOCK_Q": form.block_q, "BLOCK_KV": form.block_kv}

    def padding(self, mode: Mode) -> int:
        """What the rows of statistics are padded to a multiple of."""
        return max(PADDING, *(self.form(k.name, mode.aligned).block_q for k in self.code.kernels))

    @property
    def rounding(self) -> dict[str, int]:
        """Options of a compilation. Far from 0 every kernel must round scores alike: where one of them adds to a
        product before that is rounded, their scores differ by as much as neighbouring numbers do there, and weights by
        its power."""
        return {"enable_fp_fusion": False} if self.shifts else {}

    # -- the variant ---------------------------------------------------------------------------------------------------
    @cached_property
    def shifts(self) -> bool:
        """Scores less the maximum of their row: two statistics of it are handed from the forward to the backward."""
        return self.facts.scores_lie_far

    @property
    def saves_lse(self) -> bool:
        return self.facts.attention.canonical.weighs.saves_lse

    @cached_property
    def ways(self) -> Ways:
        return ways_in(self.code, self.facts)

    def columns_of(self, n: int, rotary: Tensor) -> Tensor:
        """Of a rotary key, or its gradient, those that piece n of the key is."""
        piece = self.code.segments.qk[n]
        return rotary if len(self.own_keys) == 1 else rotary.narrow(3, piece.start, piece.width)

    # -- names of a call -----------------------------------------------------------------------------------------------
    @property
    def kv_rows(self) -> str:
        """Keys that a call has room for, as an expression."""
        return self.sequences.keys.rows

    @property
    def operand_names(self) -> list[str]:
        """Tensors [B, H, rows, D] whose alignment decides how they are loaded; those that we make are like these."""
        keys = [f"key{i}" for i in self.own_keys]
        value = [] if self.signature.widths.value_is_key else ["value"]
        return ["query", "key", *keys, *value, *(["dout", "out"] if self.is_backward else ["out"])]

    @property
    def given_names(self) -> list[str]:
        """The tensors [B, H, rows, D], and the statistics of rows, that the direct way is handed."""
        names = [n for n in self.operand_names if n not in ("out", "dout")]
        return [*names, "out", "lse", "dout", "dlse"] if self.is_backward else names

    @property
    def descales(self) -> dict[str, str]:
        """The descales that a call has, each with what the rows of its operand are called."""
        rows = {"q_descale": "q_len", "k_descale": "kv_len", "v_descale": "kv_len"}
        return {n: own for n, own in rows.items() if n in self.signature.options}

    @property
    def arguments(self) -> list[str]:
        return [f"arg_{p.name}" for p in self.facts.attention.canonical.parameters]

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """What a backward may have gradients of, in the order of the op's tensors."""
        return "query", "key", "value", "rope", *(n.removeprefix("arg_") for n in self.ranks)

    def operand(self, n: int, operands: Mapping[str, Any]) -> Tensor:
        """What a read with a gradient is of."""
        found = operands[self.gradients[n].load.tensor.name]
        assert isinstance(found, Tensor)
        return found


def ways_in(code: CodePlan, facts: Facts) -> Ways:
    """How the reads with a gradient are summed, in the order of `Facts.operand_gradients`."""
    signature = code.signature
    if signature.direction == "forward":
        return Ways((), frozenset())
    gradients = facts.operand_gradients(signature.wanted)
    return ways_of([(g.load, g.kind) for g in gradients], signature)
