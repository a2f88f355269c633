"""Target `cpu`: tiles of plain torch code. The default where operands are on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ....compiler.analysis.cse import of_positions
from ....compiler.analysis.distances import of_distance
from ....compiler.analysis.facts import Facts
from ....compiler.planning.dtypes import FP32, FP64, HALVES, dtype_named
from ....compiler.planning.form import Form
from ....compiler.planning.hardware import CPU, Hardware
from ....compiler.planning.kernel import Algorithm, Kernel
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.records import Shape
from ....compiler.planning.segments import Segments, segments_of
from ....compiler.planning.signature import PACKED, Direction, Signature, Widths
from ....compiler.planning.target import WHOLE, CallTensors, Context, Launcher, Named, Partition, Place, Printing
from ....ir.attention import Attention
from ....ir.errors import UnavailableError, WeftError
from ....ir.expr import Expr, Load, Scalar, TensorOperand, call, symbol
from ....ir.normalizer import SOFTMAX
from ....ir.walk import nodes, symbols
from ... import at_once, products
from ...dialects import is_uniform
from ...functions import TORCH_LANGUAGE
from ...launch.allocating import keep_tiles_at_hand
from ...launch.binding import Packer, fitting, function, like
from ...launch.runs import runs_of
from ...loader import load
from ...normalizers import lacks
from ...products import one_dnn_linear, own_attention, own_backward
from .choice import USUAL, cpu_forms
from .forms import CpuForm
from .kernels import FLASH_BACKWARD, FLASH_FORWARD

COMPUTED = HALVES | {FP32.name, FP64.name}


class CpuTarget:
    name = measured_by = "cpu"
    by_name_only = False
    partial = False
    language = TORCH_LANGUAGE
    family = "cpu"
    printing = Printing(adds=True)

    def kernels(self, algorithm: Algorithm, signature: Signature, facts: Facts) -> Sequence[Kernel]:
        if algorithm != "flash":
            return []
        return [FLASH_FORWARD if signature.direction == "forward" else FLASH_BACKWARD]

    def refusal(self, algorithm: Algorithm, direction: Direction) -> str:
        """Why it has no kernels of an algorithm."""
        return f"cpu: has schedule flash only; {algorithm} runs on targets triton and interpret"

    def supports(self, kernel: Kernel, signature: Signature, facts: Facts) -> str | None:
        if signature.arch != "cpu":
            return "cpu: the operands are on a GPU"
        if signature.dtype not in COMPUTED:
            return f"cpu: expected {', '.join(sorted(COMPUTED))} operands, got {signature.dtype}"
        lacking = lacks(facts.attention.weighs, self.family)
        return None if lacking is None else f"cpu: {lacking}"

    def misfit(self, signature: Signature, call: CallTensors) -> str | None:
        return None

    def parts(self, attention: Attention, widths: Widths) -> Segments:
        return segments_of(attention, widths)

    def forms(self, kernel: Kernel, signature: Signature, hardware: Hardware, facts: Facts) -> Sequence[Form]:
        machine = hardware if hardware.cpu else CPU
        widths, own = signature.widths, _own(kernel.direction)
        shape = Shape(1, 1, 1, 1, 1, widths.head_dim, widths.value_dim, signature.dtype)
        return list(
            cpu_forms(
                kernel, shape, machine, self.parts(facts.attention, widths), facts.traits,
                whole=_needed(signature) if own is not None and _has_whole(facts, signature) else None,
                one_dnn=one_dnn_linear() is not None,
            )
        )  # fmt: skip

    def check(self, kernel: Kernel, form: Form, signature: Signature, hardware: Hardware, facts: Facts) -> None:
        if not isinstance(form, CpuForm) or min(form.block_q, form.block_kv, form.cache_kib) < 1:
            raise WeftError(
                f"schedule: {kernel.name} {form}: expected <queries>x<keys> for target cpu, as in {USUAL}, "
                f"and perhaps c<KiB of joined scores>, +onednn, +tiles"
            )
        if form.one_dnn and one_dnn_linear() is None:
            raise UnavailableError(
                f"schedule: {kernel.name} {form}: this torch has no product of oneDNN that can be called; "
                "leave +onednn out"
            )

    def template(self, code: CodePlan) -> str:
        return f"cpu/flash_{code.signature.direction}.py.jinja"

    def context(self, code: CodePlan, facts: Facts) -> Context:
        """What the mask depends on decides which chunks share their tiles."""
        open_mask, read = not facts.kv_bounds.closed_form, symbols(facts.attention.folded_mask)
        by_head = _differs_by_head(facts)
        mask = facts.attention.folded_mask
        uniform = (scale := _scale(facts)) is not None and is_uniform(scale)
        form = code.kernels[-1].form
        assert isinstance(form, CpuForm)
        return {
            "most_scores": form.most_scores,
            "one_dnn": form.one_dnn,
            "widths": sorted({*_widths_of_tiles(code.signature.widths)}),
            "in_tiles": form.in_tiles,
            "whole": _has_whole(facts, code.signature),
            "with_mask": _takes_a_mask(facts, code.signature),
            "at_once": weighs_short(facts, code.signature),
            "by_distance": facts.scale_and_rest is not None and of_distance(facts.scale_and_rest[1]) is not None,
            "mask_reads": _axes_of_mask(facts),
            "remembers": all(not isinstance(p, TensorOperand) and p.dtype == "int" for p in facts.attention.parameters),
            "settles": _settles(facts, code.signature),
            "nothing": ", None" * len(facts.attention.parameters),
            "one_run": len(facts.kv_tiles.outputs) == 4,  # what a query may see is one run of keys
            "causal": mask.text == call("le", symbol("kv_pos"), symbol("q_pos")).text,
            "open_mask": open_mask,
            "per_head_bounds": facts.bounds_differ_by_head,
            "uniform": uniform,
            "mask_of": "heads" if by_head else "rows" if "batch" in read else "all",
            "score_by_batch": "batch" in symbols(facts.attention.folded_score),
            "rows_first": "head" in (read := symbols(facts.attention.folded_score)) and "batch" not in read,
            "whole_rows": code.signature.direction == "backward" and bool(code.signature.widths.rope_dim),
        }

    def load(self, path: Path, source: str) -> ModuleType:
        keep_tiles_at_hand()
        return load(path, source=source)

    def bind(self, modules: Sequence[ModuleType], code: CodePlan, facts: Facts, device: Any) -> Launcher:
        return _CpuLauncher(modules[0], code, facts)


def _widths_of_tiles(widths: Widths) -> tuple[int, ...]:
    """Columns of the products of a tile: those of key and value, and of a rotary part."""
    return widths.head_dim, widths.head_dim - widths.rope_dim, widths.value_dim, widths.rope_dim


def _scale(facts: Facts) -> Expr | None:
    """What q.k is multiplied by, where that is one number for a head."""
    return facts.linear_scale if facts.scale_and_rest is None else facts.scale_and_rest[0]


def _differs_by_head(facts: Facts) -> bool:
    return bool(symbols(facts.attention.folded_mask) & {"head", "kv_head"}) or facts.bounds_differ_by_head


def _axes_of_mask(facts: Facts) -> frozenset[str]:
    """Which of batch and head what torch's own attention is handed differs by."""
    rest = () if facts.scale_and_rest is None else symbols(facts.scale_and_rest[1])
    read = symbols(facts.attention.folded_mask).union(rest)
    return frozenset(axis for axis in ("batch", "head") if read & {axis, f"kv_{axis}"})


def _settles(facts: Facts, signature: Signature) -> bool:
    """Whether something of what is added to scores follows from positions alone, and needs no operand."""
    if facts.scale_and_rest is None:
        return False
    derivatives = [g.derivative for g in facts.operand_gradients(signature.wanted)]
    parts, _ = of_positions([facts.scale_and_rest[1], *derivatives])
    return bool(parts) and not any(isinstance(n, (Load, Scalar)) for _, part in parts for n in nodes(part))


def computes_whole(code: CodePlan, facts: Facts) -> bool:
    """Whether torch's own attention, which is there, computes those calls of this code."""
    form = code.kernels[-1].form
    assert isinstance(form, CpuForm)
    return _has_whole(facts, code.signature) and not form.in_tiles and _own(code.signature.direction) is not None


def short_heads(code: CodePlan, facts: Facts) -> int:
    """Queries times keys times columns of a head below which it computes them although tiles are faster; or 0."""
    form, direction = code.kernels[-1].form, code.signature.direction
    assert isinstance(form, CpuForm)
    if not form.in_tiles or not _has_whole(facts, code.signature) or _own(direction) is None:
        return 0
    return products.short_head(direction == "backward", code.signature.dtype in HALVES)


def heads_with_mask(code: CodePlan, facts: Facts) -> int:
    """The same of heads that it computes where it is handed a mask; 0 where it is handed none."""
    if not _takes_a_mask(facts, code.signature) or not products.takes_masks():
        return 0
    backward_in = None if code.signature.direction == "forward" else dtype_named(code.signature.dtype).torch
    return products.short_head_with_mask(backward_in)


def keeps_weights(code: CodePlan, facts: Facts, sizes: at_once.Sizes) -> bool:
    """Whether the backward of a dense call takes the weights that its forward kept."""
    dtype = dtype_named(code.signature.dtype).torch
    return weighs_short(facts, code.signature) and at_once.weighs_at_once(sizes, dtype, keeps=True)


def _own(direction: Direction) -> Callable[..., Any] | None:
    return own_attention() if direction == "forward" else own_backward()


def _is_own(facts: Facts, signature: Signature) -> bool:
    """Whether it is a softmax of a multiple of q.k, and perhaps of what is added, as torch's own attention has it. Its
    backward gives the gradients of query, key and value alone."""
    widths, scale = signature.widths, _scale(facts)
    return (
        signature.wanted <= _PRODUCTS.keys()
        and widths.head_dim == widths.value_dim
        and not (widths.value_is_key or widths.rope_dim)
        and scale is not None
        and is_uniform(scale)
        and not facts.attention.drops
        and facts.attention.weighs == SOFTMAX
    )


def weighs_short(facts: Facts, signature: Signature) -> bool:
    """Whether short calls may be torch's product, softmax and product, whose weights are kept for the backward."""
    widths, scale = signature.widths, _scale(facts)
    return (
        signature.sequences == "dense"
        and not (widths.value_is_key or widths.rope_dim)
        and scale is not None
        and is_uniform(scale)
        and not facts.attention.drops
        and facts.attention.weighs == SOFTMAX
        and facts.attention.folded_sink is None
        and _adds_to_products(facts)
    )


def _adds_to_products(facts: Facts) -> bool:
    return facts.attention.is_masked or facts.scale_and_rest is not None


def _has_whole(facts: Facts, signature: Signature) -> bool:
    """Whether it computes some calls as they are: where every query sees all keys, or all up to its own."""
    return (
        _is_own(facts, signature)
        and facts.linear_scale is not None
        and facts.kv_bounds.closed_form
        and not _differs_by_head(facts)
        and "batch" not in symbols(facts.attention.folded_mask)
    )


def _takes_a_mask(facts: Facts, signature: Signature) -> bool:
    """Whether it computes short calls where it is handed a mask, to which what a score adds belongs."""
    return _is_own(facts, signature) and _adds_to_products(facts)


_PRODUCTS = {"query": {"dP", "dQ"}, "key": {"dP", "dK"}, "value": {"dV"}}  # that a gradient needs, besides scores


def _needed(signature: Signature) -> float:
    """Which share of torch's own products tiles need: torch's backward computes every gradient."""
    return (1 + len(set().union(*map(_PRODUCTS.__getitem__, signature.wanted)))) / 5 if signature.wanted else 1.0


class _CpuLauncher:
    """Runs a module of torch code."""

    def __init__(self, module: ModuleType, code: CodePlan, facts: Facts) -> None:
        self.module, self.code = module, code
        self.pair = "2, " if facts.scores_lie_far else ""  # statistics of a row
        self.reads_operands = bool(facts.attention.parameters)
        self.sink = facts.attention.folded_sink is not None
        form = code.kernels[-1].form
        self.blocks = {"block_q": form.block_q, "block_kv": form.block_kv}
        widths = code.signature.widths
        dense = code.signature.sequences == "dense"
        plain = dense and code.signature.direction == "forward" and not (widths.value_is_key or widths.rope_dim)
        self.direct = self._direct() if plain else _never
        self.keeping = self._keeping() if plain and hasattr(module, "attended_at_once") else None
        whole = getattr(module, "gradients_by_torch", None)
        n_operands = sum(isinstance(p, TensorOperand) for p in facts.attention.parameters)
        wanted = code.signature.wanted
        self.backward_of = _never if whole is None or not dense else _as_they_come(whole, wanted, n_operands)

    def _direct(self) -> Callable[[Any], Any]:
        """From a call to (out, lse) with nothing between, where operands fit."""
        out, packed, operands = self._packed()
        by_torch = hasattr(self.module, "BY_TORCH")
        dtype = "query.dtype" if self.code.signature.dtype == "fp64" else "float32"
        attended = [
            "    sizes = batches, heads, kv_heads, q_len, kv_len, call.head_dim",
            "    for way in module.BY_TORCH:",
            f"        found = way(query, key, value, {operands}, q_offset, sizes)",
            "        if found is not None:", "            attended, lse = found",  # laid out as the query is
            "            if attended.stride() == out_strides:", "                return attended, lse.contiguous()",
            f"            return {out['out']}.copy_(attended), lse.contiguous()",
        ]  # fmt: skip
        text = [
            "def direct(call):", *packed, *(attended if by_torch else []), f"    out = {out['out']}",
            f"    lse = query.new_empty(({self.pair}batches, heads, q_len), dtype={dtype})",
            f"    forward(query, [key], value, {operands}, q_offset, call.head_dim, out, lse, **blocks)",
            "    return out, lse",
        ]  # fmt: skip
        return self._made("direct", text)

    def _keeping(self) -> Callable[[Any], Any]:
        """From a short call to (out, lse, weights), which its backward takes."""
        out, packed, operands = self._packed()
        text = [
            "def keeping(call):", *packed, "    sizes = batches, heads, kv_heads, q_len, kv_len, call.head_dim",
            f"    found = module.attended_at_once(query, key, value, {operands}, q_offset, sizes, True)",
            "    if found is None:", "        return None", "    attended, lse, weights = found",
            "    if attended.stride() != out_strides:", f"        attended = {out['out']}.copy_(attended)",
            "    return attended, lse, weights",
        ]  # fmt: skip
        return self._made("keeping", text)

    def _packed(self) -> tuple[dict[str, str], list[str], str]:
        """Texts of the output, of what takes a call apart and leaves where operands do not fit, and of the operands."""
        sources = {n: f"call.{n}" for n in ("query", "key", "value")} | {"q_offset": "call.sequences.q_offset"}
        packer = Packer(sources, ())
        conditions = [
            "not autocast('cpu')", "key.is_cpu", "value.is_cpu", *fitting(False),
            "query_sd == key_sd == value_sd == 1", f"isinstance(q_offset, int) and -{2**30} < q_offset < {2**30}",
        ]  # fmt: skip
        for condition in conditions:
            packer.expression(condition)
        out = like("out", "query", "heads", "q_len", "value_dim", "query.new_empty_strided({}, {})")
        lines = [f"    {line}" for line in packer.lines]
        lines += [f"    if not ({' and '.join(conditions)}):", "        return None"]
        lines += [f"    out_strides = {out['out_strides']}"]
        return out, lines, "call.operands.values()" if self.reads_operands else "()"

    def _made(self, name: str, text: list[str]) -> Callable[[Any], Any]:
        tools = {"forward": self.module.forward, "module": self.module, "blocks": self.blocks, "float32": torch.float32}
        return function("\n".join(text), name, {**tools, "autocast": torch.is_autocast_enabled})

    def from_weights(self, b: Any) -> tuple[dict[str, Any], list[Any]] | None:
        """The gradients of a call whose weights were kept, by name, and the sums of reads; None where it has tiles."""
        way = getattr(self.module, "gradients_of_weights", None)
        call, weights = b.call, b.weights
        (batch, heads, q_len, _), (kv_heads, kv_len) = call.query.shape, call.key.shape[1:3]
        fits = weights.shape == (batch * kv_heads, heads // kv_heads * q_len, kv_len)
        if way is None or b.dlse is not None or not fits or torch.is_autocast_enabled("cpu"):
            return None
        sizes = batch, heads, kv_heads, q_len, kv_len, call.head_dim
        operands = list(call.operands.values())
        found = way(b.dout, weights, call.query, call.key, call.value, operands, call.q_offset, sizes)
        if found is None:
            return None
        return {n: g for n, g in zip(_PRODUCTS, found[0], strict=True) if g is not None}, found[1]

    def partition(self, call: CallTensors, results: Named) -> Partition:
        return WHOLE

    def measures(self, partition: Partition) -> dict[str, str]:
        return {}

    def workspace(self, call: CallTensors, results: Named, partition: Partition) -> dict[str, Place]:
        return {}

    def __call__(self, call: CallTensors, results: Any, workspace: Named, partition: Partition) -> list[Any]:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self._run(call, results)
        return self._run(call, results)

    def _run(self, call: CallTensors, results: Any) -> list[Any]:
        operands = list(call.operands.values())
        ragged = call.ragged
        if ragged is None:
            where: Any = call.q_offset
        else:
            rows = ragged.rows(call.query, call.key)
            where = runs_of(rows, ragged.kind in PACKED, self.sink, ragged.tensors.get("table"))
        arguments = (call.query, call.keys, call.value, operands, where, call.head_dim)
        if self.code.signature.direction == "forward":
            self.module.forward(*arguments, out=results["out"], lse=results["lse"], **self.blocks)
            return []
        given = {n: results.get(n) for n in ("out", "lse", "dquery", "dvalue")}
        dkeys = [results.get("dkey"), *([] if call.rope is None else [results.get("drope")])]
        sums = self.module.backward(results["dout"], results["dlse"], *arguments, dkeys=dkeys, **given, **self.blocks)
        return list(sums)


def _never(*call: Any) -> None:
    """There is one way only."""


def _as_they_come(whole: Callable[..., Any], wanted: frozenset[str], n_operands: int) -> Callable[..., Any]:
    """Gradients of a call that torch's own kernel computes, in its layout: copies would take a tenth of its time."""
    nothing = (None,) * (1 + n_operands)  # of a rotary key, and of operands

    def backward_of(
        query: Any, key: Any, value: Any, operands: Any, q_offset: Any, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Any:
        if dlse is not None or type(q_offset) is not int or torch.is_autocast_enabled("cpu"):
            return None
        if not out.shape == query.shape == dout.shape or key.shape != value.shape or not query.dim() == key.dim() == 4:
            return None  # operands are not what they were: `check_kept` says so
        (batch, heads, q_len, width), (key_batch, kv_heads, kv_len, key_width) = query.shape, key.shape
        if batch != key_batch or width != key_width or not kv_heads or heads % kv_heads:
            return None
        if lse.shape != (batch, heads, q_len) or not (lse.data_ptr() and dout.data_ptr()):  # empty, or given back
            return None
        if not all([t.data_ptr() and t.stride(3) == 1 and t.dtype == out.dtype for t in (query, key, value, out)]):
            return None
        sizes = batch, heads, kv_heads, q_len, kv_len, width
        found = whole(dout, out, lse, query, key, value, operands.values(), q_offset, sizes)
        return found and (*[g if n in wanted else None for n, g in zip(_PRODUCTS, found, strict=True)], *nothing)

    return backward_of
