"""What a target is to the rest of the compiler: one object that says what it computes, in which forms, and how.

Nothing outside a target's own module (codegen/targets/<name>.py) matches on its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...ir.attention import Attention
from ...ir.errors import InternalError
from ...ir.sequences import Rows
from ..analysis.tiles.facts import Facts
from .form import Form
from .kernel import Algorithm, Kernel
from .machines.hardware import Hardware
from .plan import CodePlan, KernelCode
from .records import Shape
from .segments import Segments, segments_of
from .signature import Direction, Signature, Widths
from .sources import SequenceKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Place(NamedTuple):
    """How a tensor that is to be made lies in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None  # what it holds at first; None: anything

    def beside(self, tensor: Tensor) -> Tensor:
        """A tensor there, on the device of `tensor`."""
        made = tensor.new_empty_strided(self.size, self.stride, dtype=self.dtype)
        return made if self.fill is None else made.fill_(self.fill)


class Partition(NamedTuple):
    """How one call's work is divided. Decided at each call; code never depends on it."""

    splits: int = 1  # parts of the keys that are computed apart and joined
    mode: object = None  # what of these tensors a launcher's code depends on: alignment, widths of integers
    least: int = 1  # tiles of keys that a part has at least
    known: frozenset[str] = frozenset()  # kernels whose results lie in the workspace already


WHOLE = Partition()


class AnyRows(Protocol):
    """Where rows of a call lie, as targets see it."""

    @property
    def kind(self) -> SequenceKind: ...
    @property
    def q_offset(self) -> int | Tensor | None: ...
    @property
    def tensors(self) -> Mapping[str, Tensor | None]: ...


class RaggedRows(AnyRows, Protocol):
    """Sequences of their own lengths as targets see them."""

    def number(self, query: Tensor) -> int: ...
    def rows(self, query: Tensor, key: Tensor) -> list[Rows]: ...


class CallTensors(Protocol):
    """A call as targets see it (runtime/call.py has the record)."""

    @property
    def query(self) -> Tensor: ...
    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor | None: ...
    @property
    def rope(self) -> Tensor | None: ...
    @property
    def operands(self) -> Mapping[str, Tensor | int | float]: ...
    @property
    def read(self) -> Mapping[str, Tensor] | None: ...
    @property
    def q_offset(self) -> int | Tensor: ...
    @property
    def sequences(self) -> AnyRows: ...
    @property
    def ragged(self) -> RaggedRows | None: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_rows(self) -> int: ...
    @property
    def keys(self) -> list[Tensor]: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...


Named = Mapping[str, "Tensor"]  # tensors by the names that kernels have for them


class Launcher(Protocol):
    """A loaded module that is ready for calls of one signature, on one device: lengths, strides and values may vary."""

    @property
    def fast(self) -> Any:
        """Its fast ways, which a call asks first: `Ways` of codegen/launch/fast."""

    def partition(self, call: CallTensors, results: Named) -> Partition:
        """How to divide the work of this call."""

    def measures(self, partition: Partition) -> dict[str, str]:
        """Kernels that measure which tiles to visit, each with a text of its form: what a call with the same mask,
        tensors and forms finds again in the workspace, under the kernel's name."""

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        """What the kernels need besides operands and results, by name."""

    def __call__(self, call: CallTensors, results: Named, workspace: Named, partition: Partition) -> list[Tensor]:
        """Launch. `results`: out and lse of a forward; of a backward also dout, dlse and what is to be filled: dquery,
        dkey, dvalue and drope where they are wanted.

        Returns the sums for the gradients of operands, one for each read that has one (Facts.operand_gradients): total
        [B, Hq], row [B, Hq, L], column [B, Hq, T], float32.
        """


class Printing(NamedTuple):
    """What a family's templates want printed: properties of its kernels, not of the language that they are in."""

    distance: str = "q_offset + q_first - kv_first"  # of a tile's first pair, for functions that read by distance
    adds: bool = False  # scores are a number times q.k plus a rest wherever they can be
    visits_empty: bool = False  # rows of a sequence without a pair are computed, whose lengths may be 0
    joins_sink: bool = False  # the normalizer's texts of a forward have the sink
    narrow_columns: int = 0  # up to which special units are busy longer than products
    splits_tables: bool = False  # what tiles read by distance is added to a number times q.k, in backwards


class PlannedCall(NamedTuple):
    """A call that is planned, as a target is asked about it."""

    facts: Facts
    sizes: Shape
    machine: Hardware
    codes: Mapping[Direction, CodePlan]  # of the directions that the target computes
    ragged: bool  # sequences have lengths of their own
    q_offset: object  # of a dense call
    visible: int | None  # pairs that see each other, where that is known
    free: bool = True  # no schedule is asked for


class Said(NamedTuple):
    """What a target says of a call beside the plan of its kernels."""

    seconds: Mapping[Direction, float] = {}  # of directions that it computes by other means, as predicted
    notes: tuple[str, ...] = ()
    may_be_whole: bool = False  # a library computes such calls, where scores are as it needs them


class Target(Protocol):
    """One way to compute attention. What has a body here is what most targets answer, for those that inherit it."""

    name: str
    family: str  # of templates, and of texts of normalizers: targets that share them have one
    measured_by: str  # the target whose kernels measure which tiles its own visit; mostly itself
    by_name_only: bool  # never chosen for a call that does not ask for it
    serves: str  # the kind of machine, "cuda" or "cpu", on which it takes what other targets leave; "" on none
    interprets: bool  # kernels are interpreted on a CPU, for debugging
    multiplies_fp8: bool  # it has products of FP8 operands as they are stored
    partial: bool  # backwards that it cannot compute are left to other targets, also where a call names it
    language: Any  # what the variant's functions are printed in: a Dialect of codegen
    printing: Printing

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        """The kernels of one direction, in order of execution; none where the target does not have it."""

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it does not have them, in words for `explain`."""

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        """Why it cannot compute such calls, in words for `explain`; None where it can."""

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        """Why it cannot take these tensors, by alignment or strides; None where it can."""
        return None

    def parts(self, attention: Attention, widths: Widths) -> Segments:
        """The columns of its tiles."""
        return segments_of(attention, widths)

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        """Forms of a kernel: the one to use, then others worth timing. Raises WeftError where none fits."""

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        """Raise WeftError if the kernel cannot have this form."""

    def remarks(self, code: CodePlan, facts: Facts) -> Sequence[str]:
        """What `explain` says of its kernels besides."""
        return ()

    def says(self, call: PlannedCall) -> Said:
        """What it says of one call."""
        return Said()

    def template(self, code: CodePlan) -> str:
        """Name of the template of these kernels."""

    def context(self, code: CodePlan, facts: Facts) -> tuple[object, ...]:
        """Records of what its template is told besides what every template is (codegen/context.py)."""

    def source_beside(self, kernel: KernelCode, code: CodePlan, facts: Facts) -> str:
        """Source of a module beside a plan's own, where the first kernel of it belongs to this target."""
        raise InternalError(f"{self.name}: {kernel.name} is in its plan's own module")

    def load(self, path: Path, source: str) -> ModuleType:
        """The generated module."""

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        """The module made ready for calls, with the one that measures tiles where there is one."""
