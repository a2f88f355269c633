"""Target `hopper`: Gluon kernels for sm_90, persistent and warp-specialised: the forward of schedule flash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...compiler.analysis.facts import Facts
from ...compiler.planning.cost import sram_bytes
from ...compiler.planning.forms import Form, HopperForm
from ...compiler.planning.hardware import Hardware
from ...compiler.planning.kernels import FLASH, SPANS, Algorithm, Kernel, with_measuring
from ...compiler.planning.plan import CodePlan
from ...compiler.planning.records import Shape
from ...compiler.planning.segments import for_heads
from ...compiler.planning.signature import Direction, Signature
from ...compiler.planning.target import CallTensors, Context, Launcher, Named, Partition
from ...ir.errors import WeftError
from ..binding import Binding
from ..functions import GLUON_LANGUAGE
from ..loader import load
from ..normalizers import softmax_only
from .triton import has_triton
from .triton_launcher import Mode, TritonLauncher

if TYPE_CHECKING:
    pass

L2_BYTES = 40_000_000  # of an H100's or H200's 50 MB: what K and V of the heads in flight may take
WIDTHS = (64, 128)
_ROWS = 64  # of a consumer


class HopperTarget:
    name = "hopper"
    measured_by = "triton"
    by_name_only = False
    language = GLUON_LANGUAGE
    family = "hopper"

    def kernels(
        self, algorithm: Algorithm, direction: Direction, facts: Facts, wanted: frozenset[str]
    ) -> Sequence[Kernel]:
        if algorithm != "flash" or direction != "forward":
            return []
        measured = facts.traits.measured
        return FLASH[:1] if measured is None else with_measuring(FLASH[:1], measured)

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm or direction."""
        return "hopper: has the forward of schedule flash only"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        widths = signature.widths
        if signature.arch == "cpu":
            return "hopper: needs a GPU, the operands are on the CPU; use target='cpu' or 'interpret'"
        if not has_triton():
            return "hopper: needs Triton; pip install triton"
        if signature.arch != "sm_90":
            return f"hopper: needs compute capability 9.0, this is {signature.arch}"
        if signature.dtype not in ("bf16", "fp16"):
            return f"hopper: needs bf16 or fp16 operands, got {signature.dtype}"
        if lacking := softmax_only(facts.attention.weighs):
            return f"hopper: {lacking}"
        if widths.rope_dim or widths.value_is_key:
            return "hopper: latent attention is computed by the triton target"
        if widths.head_dim not in WIDTHS or widths.value_dim != widths.head_dim:
            return f"hopper: needs D = Dv = 64 or 128, got D {widths.head_dim}, Dv {widths.value_dim}"
        if signature.offset == "per_row":
            return "hopper: a q_offset for each batch row is computed by the triton target"
        return None

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        """Tensors that the tensor memory accelerator cannot read in place."""
        assert call.value is not None
        for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
            # a stride in a dimension of one entry leads nowhere: Box gives another in its place
            strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()) if size > 1]
            if any(n % 16 for n in (tensor.data_ptr(), *(tensor.element_size() * stride for stride in strides))):
                return (
                    f"hopper: {name}: its address and strides must be multiples of 16 bytes for the tensor memory "
                    "accelerator"
                )
        return None

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        best = best_form(signature.widths.head_dim, facts)
        others = [
            form for form in best.neighbours() if form != best and self._why_not(form, signature, hardware) is None
        ]
        return [best, *others]

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if not isinstance(form, HopperForm):
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected a form like {best_form(signature.widths.head_dim, facts)} "
                "for target hopper (<queries>x<keys>s<stages>q<query buffers> and its switches)"
            )
        reason = self._why_not(form, signature, hardware)
        if reason is not None:
            raise WeftError(f"schedule: {kernel.name} {form}: {reason}")

    def _why_not(self, form: HopperForm, signature: Signature, hardware: Hardware) -> str | None:
        width = signature.widths.head_dim
        if form.consumers not in (2, 3) or form.block_kv not in (64, 128) or not 2 <= form.stages <= 4:
            return "expected 2 or 3 consumers of 64 rows, 64 or 128 keys and 2 to 4 stages"
        if form.query_buffers not in (1, 2):
            return "expected 1 or 2 query buffers"
        if form.consumers == 3 and width > 64:
            return "three consumers have too few registers for D 128"
        sizes = Shape(1, 1, 1, 1, 1, width, width, signature.dtype)
        needed = sram_bytes(FLASH[0], form, sizes, hardware, for_heads(width, width))
        if needed + 2048 > hardware.sram_per_block:  # barriers and cards
            return f"it needs {needed} bytes of SRAM, a program of {hardware.title} has {hardware.sram_per_block}"
        return None

    def template(self, code: CodePlan) -> str:
        return "hopper/flash_forward.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        form = code.form("flash_forward")
        assert isinstance(form, HopperForm)
        widths = {"head_dim": code.signature.widths.head_dim, "loads_at_positions": facts.loads_at_positions}
        return {"config": asdict(form) | widths}

    def load(self, path: Path, source: str) -> ModuleType:
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: torch.device) -> Launcher:
        return HopperLauncher(modules, code, facts, device.index or 0, False)


def best_form(width: int, facts: Facts) -> HopperForm:
    """The form that measured best for these widths (docs/performance.md).

    What reads positions needs registers for them: fewer consumers at D64, the query in SRAM at D128.
    """
    spare = not facts.traits.positional  # registers
    if width == 64:
        return HopperForm(3 if spare else 2, 128, 3, 2 if spare else 1, query_in_registers=not spare, pair_maximum=True)
    return HopperForm(
        2, 128, 2, query_in_registers=spare, lazy_rescale=True, overlap_edges=facts.score_reads_positions
    )  # fmt: skip


# -- launching ---------------------------------------------------------------------------------------------------------
class Box:
    """What a launch needs of a tensor descriptor: far cheaper to build than the checked one, at every call."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, tensor: Tensor, width: int) -> None:
        self.base = tensor
        self.shape = sizes = list(tensor.shape)
        # multiples of 16 bytes even where, the size being 1, they are never used
        batch, head, row, _ = tensor.stride()
        self.strides = [
            batch if sizes[0] > 1 else width,
            head if sizes[1] > 1 else width,
            row if sizes[2] > 1 else width,
            1,
        ]


def sharing_l2(batch_heads: int, kv_bytes: float) -> int:
    """Query heads whose K and V fit L2 together, of as many equal groups as it takes."""
    groups = -(-batch_heads // max(1, int(L2_BYTES / max(1.0, kv_bytes))))
    return -(-batch_heads // groups)


class HopperLauncher(TritonLauncher):
    """Launches of the persistent forward: descriptors, a counter for the work, and a grid of one program an SM."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tools = {"box": Box, "sharing_l2": sharing_l2, "least": min, "counter": self._launching.counter}

    def partition(self, call: CallTensors, results: Named) -> Partition:
        return Partition(mode=Mode(True, False, True, call.head_dim))

    def _given(self, call: CallTensors, results: Named) -> dict[str, Any]:
        given = super()._given(call, results)
        given["counter_ptr"] = self._counter()
        return given

    def _made(self, mode: Mode) -> dict[str, str]:
        return {**super()._made(mode), "counter_ptr": "counter(device)"}

    def _counter(self) -> Tensor:
        return self._launching.counter(self.device)

    def _processors(self) -> int:
        return processors(self.device)

    def form(self, kernel: str, aligned: bool) -> Any:
        return self.code.form(kernel)

    def _options(self, form: Any) -> dict[str, int]:
        return {"num_warps": 4, **self._rounding()} if isinstance(form, HopperForm) else super()._options(form)

    def _programs(self, kernel: Kernel, constants: Mapping[str, object]) -> str:
        if kernel.name in SPANS:
            return super()._programs(kernel, constants)
        return f"least({self._processors()}, query_tiles * batch_heads)"

    def _rows(self, aligned: bool) -> dict[str, str]:
        width, form = self.code.signature.widths.head_dim, self.code.form("flash_forward")
        boxes = {f"{name}_desc": f"box({name}, {width})" for name in ("query", "key", "value", "out")}
        return {
            **super()._rows(aligned), **boxes,
            "lse_ptr": "lse",
            "n_heads": "heads",
            "query_tiles": f"(q_len + {form.block_q - 1}) // {form.block_q}",
            "kv_bytes": f"{2 * width} * kv_len * key.element_size() / group",  # of one query head
            "heads_together": "sharing_l2(batch_heads, kv_bytes)",
        }  # fmt: skip

    def _types(self, binding: Binding, arguments: Sequence[Any]) -> list[Any]:
        form = self.code.form("flash_forward")
        rows = {"query_desc": _ROWS, "key_desc": form.block_kv, "value_desc": form.block_kv, "out_desc": _ROWS}
        types = super()._types(binding, arguments)
        return [
            self._launching.descriptor(value, rows[name]) if isinstance(value, Box) else value
            for name, value in zip([*binding.parameters, *binding.constants], types)
        ]


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
