"""The launcher of target `cpu`: runs a module of torch code.

A call takes the first of these that serves it, and a short one pays for all that it is asked on the way:

    repeated   one like the call before: nothing is asked but whether it is
    direct     one whose operands fit, and that torch's own kernel computes, or tiles; `backward_of` in a backward
    __call__   any
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ....compiler.analysis.tiles.facts import Facts
from ....compiler.analysis.tiles.results import PAIR_KINDS
from ....compiler.planning.dtypes import FP32, dtype_named
from ....compiler.planning.plan import CodePlan
from ....compiler.planning.sources import DENSE
from ....compiler.planning.target import WHOLE, CallTensors, Named, Partition, Place
from ....ir.expr import TensorOperand
from ...launch.binding import Packer, fitting, function, like
from ...launch.repeating import Again, Guard
from ...launch.runs import runs_of
from .forms import CpuForm
from .own import OwnKernel, strides_like

MAIN = ("query", "key", "value")  # whose gradients torch's own kernel has
_FARTHEST = 2**30  # offset of a query


class CpuLauncher:
    """Runs a module of torch code."""

    guard: Guard | None = None  # what tells whether tensors are like others; calls repeat where there is one

    def __init__(self, module: ModuleType, code: CodePlan, facts: Facts) -> None:
        self.module, self.code = module, code
        self.pair = "2, " if facts.scores_lie_far else ""  # statistics of a row
        parameters = facts.attention.parameters
        self.tensors = tuple(p.name for p in parameters if isinstance(p, TensorOperand))
        self.numbers = tuple(p.name for p in parameters if not isinstance(p, TensorOperand))
        self.sink = facts.attention.folded_sink is not None
        form = code.kernels[-1].form
        assert isinstance(form, CpuForm)
        self.blocks = {"block_q": form.block_q, "block_kv": form.block_kv}
        signature = code.signature
        widths, forward = signature.widths, signature.direction == "forward"
        plain = not signature.sequences.ragged and not (widths.value_is_key or widths.rope_dim)
        self.direct = self._direct() if plain and forward else _never
        self.keeping = self._keeping() if plain and hasattr(module, "attended_at_once") else None
        by_torch = plain and hasattr(module, "BY_TORCH")
        self.repeated: Callable[..., Again | None] = _never
        self.growing: Callable[..., Again | None] = _never
        self.backward_of: Callable[..., Any] = _never
        self.own = None if self.sink or not (by_torch and forward) else OwnKernel(module, facts, form.in_tiles)
        self.recorded = _never if self.own is None else self._recorded()
        if by_torch and forward:
            self.repeated, self.growing = self._like, partial(self._like, grows=True)
        elif plain and not forward and (by_torch or hasattr(module, "gradients_of_weights")):
            sums = [(g.load.tensor.name, g.kind) for g in facts.operand_gradients(signature.wanted)]
            self.finish = _finish_of(sums, self.tensors, signature.wanted)
            self.repeated, self.backward_of = self._backward_like, self._backward_of

    def _direct(self) -> Callable[[Any], Any]:
        """From a call to (out, lse) with nothing between, where operands fit."""
        out, packed, operands = self._packed()
        by_torch = hasattr(self.module, "BY_TORCH")
        dtype = "float32" if dtype_named(self.code.signature.dtype).sums == FP32.torch_name else "query.dtype"
        attended = [
            "    sizes = batches, heads, kv_heads, q_len, kv_len, call.head_dim",
            "    for way in module.BY_TORCH:",
            f"        found = way(query, key, value, {operands}, q_offset, sizes)",
            "        if found is not None:", "            attended, lse = found",  # laid out as the query is
            "            if attended.stride() == out_strides:", "                return attended, lse",
            f"            return {out['out']}.copy_(attended), lse",
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

    def _recorded(self) -> Callable[[Any], Any]:
        """From a call to its output, where torch records the gradients."""
        _, packed, _ = self._packed()
        text = [
            "def recorded(call):", *packed, "    sizes = batches, heads, kv_heads, q_len, kv_len, call.head_dim",
            "    found = own.of(query, key, value, call.operands, q_offset, sizes)",
            "    return None if found.record is None else found.record(call)",
        ]  # fmt: skip
        return self._made("recorded", text, own=self.own)

    def _packed(self) -> tuple[dict[str, str], list[str], str]:
        """Texts of the output, of what takes a call apart and leaves where operands do not fit, and of the operands."""
        sources = {n: f"call.{n}" for n in ("query", "key", "value")} | {"q_offset": "call.sequences.q_offset"}
        packer = Packer(sources, ())
        conditions = [
            "not autocast('cpu')", "key.is_cpu", "value.is_cpu", *fitting(False, DENSE.keys),
            "query_sd == key_sd == value_sd == 1", f"isinstance(q_offset, int) and -{2**30} < q_offset < {2**30}",
        ]  # fmt: skip
        for condition in conditions:
            packer.expression(condition)
        out = like("out", "query", "heads", "q_len", "value_dim", "query.new_empty_strided({}, {})")
        lines = [f"    {line}" for line in packer.lines]
        lines += [f"    if not ({' and '.join(conditions)}):", "        return None"]
        lines += [f"    out_strides = {out['out_strides']}"]
        return out, lines, "call.operands.values()" if self.tensors or self.numbers else "()"

    def _made(self, name: str, text: list[str], **more: Any) -> Callable[[Any], Any]:
        tools = {
            "forward": self.module.forward,
            "module": self.module,
            "blocks": self.blocks,
            "float32": torch.float32,
            **more,
        }
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
        return {n: g for n, g in zip(MAIN, found[0], strict=True) if g is not None}, found[1]

    # -- calls that repeat ---------------------------------------------------------------------------------------------
    def _like(self, call: Any, grows: bool = False) -> Again | None:
        """What serves calls like this one, which the direct way took. grows: whatever their number of keys."""
        q_offset, found = call.sequences.q_offset, None if self.guard is None else self._fits(call, self.guard, grows)
        if found is None:
            return None
        (_, heads, q_len, _), (_, kv_heads, kv_len, _) = call.query.shape, call.value.shape
        sizes = call.query.shape[0], heads, kv_heads, q_len, kv_len, call.head_dim
        given = call.query, call.key, call.value, call.operands.values(), q_offset, sizes
        ways = self.module.BY_TORCH
        if not grows:  # the same one computes all of them
            ways = next(([way] for way in ways if way(*given) is not None), [])
        if not ways:
            return None
        launch, keeping = self._launches(call, ways, sizes, grows)
        own = None if grows or self.own is None else self.own.of(*given[:3], call.operands, *given[4:])
        by_own, record = (None, None) if own is None else own
        kept = None if self.keeping is None else keeping
        return Again(found, by_own or launch, kept, record, checked=not grows)

    def _fits(self, call: Any, guard: Guard, grows: bool) -> Callable[[Any], bool] | None:
        """Whether a call is like this one; None where none would be."""
        q_offset, free = call.sequences.q_offset, (None, 2, 2, *[None] * len(self.tensors))
        if type(q_offset) is not int or call.value is None or call.read is not None:
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        kind, choices, head_dim = type(call.sequences), call.choices, call.head_dim
        names, tensors, numbers = self.numbers, self.tensors, [call.operands[n] for n in self.numbers]
        threads, n_threads = torch.get_num_threads, torch.get_num_threads()
        alike = guard(
            call.query, call.key, call.value, *[call.operands[n] for n in tensors], free=free if grows else ()
        )

        def fits(call: Any) -> bool:
            given, where = call.operands, call.sequences
            if call.choices is not choices or type(where) is not kind:
                return False
            offset = where.q_offset  # sizes are tensors under torch.jit.trace, and so is it
            if type(offset) is not int or (offset != q_offset and not grows) or call.rope is not None:
                return False
            if call.head_dim != head_dim or call.read is not None or (numbers and [given[n] for n in names] != numbers):
                return False
            return threads() == n_threads and alike(call.query, call.key, call.value, *[given[n] for n in tensors])

        return fits

    def _launches(
        self, first: Any, ways: Sequence[Callable[..., Any]], sizes: tuple[int, ...], grows: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What computes calls like the first one, and what keeps the weights of one too."""
        module, q_offset, width = self.module, first.sequences.q_offset, first.value.shape[3]
        shape, strides = (*sizes[:2], sizes[3], width), strides_like(first.query, width)

        def placed(call: Any) -> tuple[Any, ...]:
            given = call.query, call.key, call.value, call.operands.values()
            if not grows:
                return *given, q_offset, sizes
            offset, now = call.sequences.q_offset, call.key.shape[2]
            if now != call.value.shape[2] or not 0 < now <= _FARTHEST or not -_FARTHEST < offset < _FARTHEST:
                return ()
            return *given, offset, (*sizes[:4], now, sizes[5])

        def laid_out(out: Tensor) -> Tensor:
            return out.new_empty_strided(shape, strides).copy_(out)

        def launch(call: Any) -> tuple[Tensor, Tensor] | None:
            if given := placed(call):
                for way in ways:
                    found = way(*given)
                    if found is not None:
                        out, lse = found
                        return (out if out.stride() == strides else laid_out(out)), lse
            return None

        def keeping(call: Any) -> tuple[Tensor, Tensor, Tensor] | None:
            given = placed(call)
            found = module.attended_at_once(*given, True) if given else None
            if found is None:
                return None
            out, lse, weights = found
            return (out if out.stride() == strides else laid_out(out)), lse, weights

        return launch, keeping

    def _backward_like(self, *first: Any) -> Again | None:
        """What serves backwards like the one that these are the arguments of, which `_backward_of` computed."""
        guard, names = self.guard, self.numbers
        query, key, value, operands, q_offset, out, lse, dout, _, *weights = first
        tensors, numbers = self.tensors, [operands[n] for n in names]
        threads, n_threads, n_given = torch.get_num_threads, torch.get_num_threads(), len(first)
        if guard is None or torch.is_autocast_enabled("cpu"):
            return None
        alike = guard(query, key, value, out, lse, dout, *weights, *[operands[n] for n in tensors])

        def fits(*given: Any) -> bool:
            query, key, value, operands, offset, out, lse, dout, dlse, *weights = given
            if dlse is not None or len(given) != n_given or type(offset) is not int or offset != q_offset:
                return False
            if numbers and [operands[n] for n in names] != numbers:
                return False
            own = [operands[n] for n in tensors]
            if not alike(query, key, value, out, lse, dout, *weights, *own) or threads() != n_threads:
                return False
            return all([t.data_ptr() for t in (query, key, value, out, lse, dout, *weights)])  # none was given back

        return Again(fits, self._gradients)

    def _backward_of(
        self, query: Any, key: Any, value: Any, operands: Any, q_offset: Any, out: Any, lse: Any, dout: Any, dlse: Any,
        *weights: Any,
    ) -> Any:  # fmt: skip
        """Gradients of a call that torch's own kernel computes, or whose weights were kept, in their layout: copies
        would take a tenth of its time."""
        if dlse is not None or type(q_offset) is not int or torch.is_autocast_enabled("cpu"):
            return None
        if not out.shape == query.shape == dout.shape or key.shape != value.shape or not query.dim() == key.dim() == 4:
            return None  # operands are not what they were: `check_kept` says so
        (batch, heads, q_len, width), (key_batch, kv_heads, kv_len, key_width) = query.shape, key.shape
        if batch != key_batch or width != key_width or not kv_heads or heads % kv_heads:
            return None
        if weights and weights[0].shape != (batch * kv_heads, heads // kv_heads * q_len, kv_len):
            return None
        if lse.shape[-3:] != (batch, heads, q_len) or not all([t.data_ptr() for t in (lse, dout, *weights)]):
            return None
        if not all([t.data_ptr() and t.stride(3) == 1 and t.dtype == out.dtype for t in (query, key, value, out)]):
            return None
        return self._gradients(query, key, value, operands, q_offset, out, lse, dout, dlse, *weights)

    def _gradients(
        self, query: Any, key: Any, value: Any, operands: Any, q_offset: Any, out: Any, lse: Any, dout: Any, dlse: Any,
        *weights: Any,
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        """Those of query, key, value, rope and operands; None where neither computes such a call."""
        finish, module = self.finish, self.module
        way = getattr(module, "gradients_of_weights" if weights else "gradients_by_torch", None)
        if way is None or finish is None:
            return None
        (batch, heads, q_len, width), (_, kv_heads, kv_len, _) = query.shape, key.shape
        sizes, own = (batch, heads, kv_heads, q_len, kv_len, width), [*operands.values()]
        if not weights:
            found, sums = way(dout, out, lse, query, key, value, own, q_offset, sizes), ()
        else:
            both = way(dout, *weights, query, key, value, own, q_offset, sizes)
            found, sums = (None, ()) if both is None else both
        if found is None:
            return None
        wanted = self.code.signature.wanted
        main = [g if n in wanted else None for n, g in zip(MAIN, found)]
        of_operands = [None if at is None else sums[at].to(operands[n].dtype) for n, at in zip(self.tensors, finish)]
        return *main, None, *of_operands

    # -- any call ------------------------------------------------------------------------------------------------------
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
            where = runs_of(rows, ragged.kind.rows.packed, self.sink, ragged.tensors.get("table"))
        arguments = (call.query, call.keys, call.value, operands, where, call.head_dim)
        if self.code.signature.direction == "forward":
            self.module.forward(*arguments, out=results["out"], lse=results["lse"], **self.blocks)
            return []
        given = {n: results.get(n) for n in ("out", "lse", "dquery", "dvalue")}
        dkeys = [results.get("dkey"), *([] if call.rope is None else [results.get("drope")])]
        sums = self.module.backward(results["dout"], results["dlse"], *arguments, dkeys=dkeys, **given, **self.blocks)
        return list(sums)


def _never(*call: Any, **more: Any) -> None:
    """There is one way only."""


def _finish_of(
    sums: Sequence[tuple[str, str]], tensors: Sequence[str], wanted: frozenset[str]
) -> list[int | None] | None:  # fmt: skip
    """Which of the sums of reads is the gradient of each of these operands; None where one takes more than that.

    sums: the operand and the kind of each.
    """
    own = {n: [at for at, (name, _) in enumerate(sums) if name == n] for n in tensors if n in wanted}
    if any(len(at) != 1 or sums[at[0]][1] not in PAIR_KINDS for at in own.values()):
        return None
    return [own[n][0] if n in own else None for n in tensors]
