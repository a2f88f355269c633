"""The fast ways of target `cpu`: calls that torch's own operations compute, without what stands around tiles.

`direct` is a generated function, as on a GPU. What serves calls like one before is written out: the few things that
may differ are asked for, and what follows from sizes is found once.
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
from ....ir.expr import TensorOperand
from ... import torch_private
from ..binding import Packer, fitting, function, like
from .own import Own, OwnKernel, strides_like
from .ways import Again, Guard, Ways, nothing_yet

MAIN = ("query", "key", "value")  # whose gradients torch's own kernel has
_FARTHEST = 2**30  # offset of a query


class CpuWays:
    """Those of a module of torch code."""

    def __init__(self, module: ModuleType, code: CodePlan, facts: Facts) -> None:
        self.module, self.code, self.facts = module, code, facts
        self.own: OwnKernel | None = None
        self.recorded: Callable[[Any], Any] = nothing_yet
        self.guard = torch_private.guard  # what tells whether tensors are like others; None: nothing does
        self.pair = "2, " if facts.scores_lie_far else ""  # statistics of a row
        parameters = facts.attention.canonical.parameters
        self.tensors = tuple(p.name for p in parameters if isinstance(p, TensorOperand))
        self.numbers = tuple(p.name for p in parameters if not isinstance(p, TensorOperand))
        self.sink = facts.attention.canonical.folded_sink is not None
        form: Any = code.kernels[-1].form
        self.in_tiles = form.in_tiles
        self.blocks = {"block_q": form.block_q, "block_kv": form.block_kv}
        self.sums = [(g.load.tensor.name, g.kind) for g in facts.operand_gradients(code.signature.wanted)]

    def ways(self) -> Ways:
        """Those of dense calls whose keys and values are tensors of their own; others have none."""
        signature, module = self.code.signature, self.module
        widths, found = signature.widths, Ways()
        if signature.sequences.ragged or widths.value_is_key or widths.rope_dim or signature.dtypes.quantized:
            return found
        if signature.direction == "backward":
            self.finish = _finish_of(self.sums, self.tensors, signature.wanted)
            if self.finish is None or not (hasattr(module, "BY_TORCH") or hasattr(module, "gradients_of_weights")):
                return found
            return Ways(self._gradients_where_operands_fit, like=self._backward_like)
        found = found._replace(direct=self._direct())
        if hasattr(module, "attended_at_once"):
            found = found._replace(keeping=self._keeping())
        if hasattr(module, "BY_TORCH"):
            self.own = None if self.sink else OwnKernel(module, self.facts, self.in_tiles)
            if self.own is not None:
                self.recorded = self._recorded(self.own)
            found = found._replace(like=self._like, growing=partial(self._like, grows=True), recorded=self.recorded)
        return found

    # -- a forward whose operands fit ----------------------------------------------------------------------------------
    def _direct(self) -> Callable[[Any], Any]:
        """From a call to (out, lse) with nothing between."""
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
        """From a short call to (out, lse, weights)."""
        out, packed, operands = self._packed()
        text = [
            "def keeping(call):", *packed, "    sizes = batches, heads, kv_heads, q_len, kv_len, call.head_dim",
            f"    found = module.attended_at_once(query, key, value, {operands}, q_offset, sizes, True)",
            "    if found is None:", "        return None", "    attended, lse, weights = found",
            "    if attended.stride() != out_strides:", f"        attended = {out['out']}.copy_(attended)",
            "    return attended, lse, weights",
        ]  # fmt: skip
        return self._made("keeping", text)

    def _recorded(self, own: OwnKernel) -> Callable[[Any], Any]:
        """From a call to its output, where torch records the gradients."""
        _, packed, _ = self._packed()
        text = [
            "def recorded(call):", "    if not is_free(call):", "        return None", *packed,
            "    sizes = batches, heads, kv_heads, q_len, kv_len, call.head_dim",
            "    found = own.of(query, key, value, call.operands, q_offset, sizes)",
            "    return None if found.record is None else found.record(call)",
        ]  # fmt: skip
        return self._made("recorded", text, own=own, is_free=self._is_free)

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

    def _made(self, name: str, text: list[str], **more: object) -> Callable[[Any], Any]:
        tools = {
            "forward": self.module.forward, "module": self.module, "blocks": self.blocks, "float32": torch.float32,
            "autocast": torch.is_autocast_enabled,
        }  # fmt: skip
        return function("\n".join(text), name, {**tools, **more})

    # -- forwards like one before --------------------------------------------------------------------------------------
    def _like(self, call: Any, grows: bool = False) -> Again | None:
        """What serves calls like this one, which the direct way took. grows: whatever their number of keys."""
        fits = None if self.guard is None else self._fits(call, self.guard, grows)
        if fits is None:
            return None
        (_, heads, q_len, _), (_, kv_heads, kv_len, _) = call.query.shape, call.value.shape
        sizes = call.query.shape[0], heads, kv_heads, q_len, kv_len, call.head_dim
        q_offset = call.sequences.q_offset
        given = call.query, call.key, call.value, call.operands.values(), q_offset, sizes
        ways = self.module.BY_TORCH
        if not grows:  # the same one computes all of them
            ways = next(([way] for way in ways if way(*given) is not None), [])
        if not ways:
            return None
        launch, keeping = self._launches(call, ways, sizes, grows)
        query, key, value, *_ = given
        own = Own(None, None) if self.own is None else Own(None, self.recorded)
        if self.own is not None and not grows:
            own = self.own.of(query, key, value, call.operands, q_offset, sizes)
        kept = keeping if hasattr(self.module, "attended_at_once") else None
        by_own, record = own
        return Again(fits, by_own or launch, kept, record if self._is_free(call) else None, checked=not grows)

    def _is_free(self, call: Any) -> bool:
        """Whether nobody asked for a schedule, and none was timed for such calls: torch may record them."""
        return call.choices.schedule is None and self.code.signature.lengths is None

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
        given = call.query, call.key, call.value, *[call.operands[n] for n in tensors]
        alike = guard(*given, free=free if grows else ())

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
        batch, heads, kv_heads, q_len, _, head_dim = sizes
        shape, strides = (batch, heads, q_len, width), strides_like(first.query, width)

        def placed(call: Any) -> tuple[Any, ...]:
            given = call.query, call.key, call.value, call.operands.values()
            if not grows:
                return *given, q_offset, sizes
            offset, now = call.sequences.q_offset, call.key.shape[2]
            if now != call.value.shape[2] or not 0 < now <= _FARTHEST or not -_FARTHEST < offset < _FARTHEST:
                return ()
            return *given, offset, (batch, heads, kv_heads, q_len, now, head_dim)

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

    # -- backwards -----------------------------------------------------------------------------------------------------
    def _backward_like(self, b: Any) -> Again | None:
        """What serves backwards like this one."""
        guard, names, tensors = self.guard, self.numbers, self.tensors
        if guard is None or torch.is_autocast_enabled("cpu"):
            return None
        q_offset, numbers = b.call.sequences.q_offset, [b.call.operands[n] for n in names]
        threads, n_threads, keeps = torch.get_num_threads, torch.get_num_threads(), b.weights is not None

        def given_to(b: Any) -> list[Tensor]:
            call = b.call
            found = [call.query, call.key, call.value, b.out, b.lse, b.dout]
            return [*found, b.weights] if keeps else found

        alike = guard(*given_to(b), *[b.call.operands[n] for n in tensors])

        def fits(b: Any) -> bool:
            call = b.call
            offset, operands = call.sequences.q_offset, call.operands
            if b.dlse is not None or (b.weights is not None) != keeps or type(offset) is not int or offset != q_offset:
                return False
            if numbers and [operands[n] for n in names] != numbers:
                return False
            given = given_to(b)
            if threads() != n_threads or not alike(*given, *[operands[n] for n in tensors]):
                return False
            return all([t.data_ptr() for t in given])  # none was given back

        return Again(fits, self._gradients)

    def _gradients_where_operands_fit(self, b: Any) -> tuple[Tensor | None, ...] | None:
        """Gradients of a call that torch's own kernel computes, or whose weights were kept, in their layout: copies
        would take a tenth of its time."""
        call, out, lse, dout, weights = b.call, b.out, b.lse, b.dout, b.weights
        query, key, value = call.query, call.key, call.value
        if b.dlse is not None or type(call.sequences.q_offset) is not int or torch.is_autocast_enabled("cpu"):
            return None
        if not out.shape == query.shape == dout.shape or key.shape != value.shape or not query.dim() == key.dim() == 4:
            return None  # operands are not what they were: `check_kept` says so
        (batch, heads, q_len, width), (key_batch, kv_heads, kv_len, key_width) = query.shape, key.shape
        if batch != key_batch or width != key_width or not kv_heads or heads % kv_heads:
            return None
        if weights is not None and weights.shape != (batch * kv_heads, heads // kv_heads * q_len, kv_len):
            return None
        read = (lse, dout) if weights is None else (lse, dout, weights)
        if lse.shape[-3:] != (batch, heads, q_len) or not all([t.data_ptr() for t in read]):
            return None
        if not all([t.data_ptr() and t.stride(3) == 1 and t.dtype == out.dtype for t in (query, key, value, out)]):
            return None
        return self._gradients(b)

    def _gradients(self, b: Any) -> tuple[Tensor | None, ...] | None:
        """Those of query, key, value, rope and operands; None where neither computes such a call."""
        call, finish, module = b.call, self.finish, self.module
        query, key, value, operands, q_offset = call.query, call.key, call.value, call.operands, call.sequences.q_offset
        way = getattr(module, "gradients_by_torch" if b.weights is None else "gradients_of_weights", None)
        if way is None or finish is None:
            return None
        (batch, heads, q_len, width), (_, kv_heads, kv_len, _) = query.shape, key.shape
        sizes, own = (batch, heads, kv_heads, q_len, kv_len, width), [*operands.values()]
        if b.weights is None:
            found, sums = way(b.dout, b.out, b.lse, query, key, value, own, q_offset, sizes), ()
        else:
            both = way(b.dout, b.weights, query, key, value, own, q_offset, sizes)
            found, sums = (None, ()) if both is None else both
        if found is None:
            return None
        wanted = self.code.signature.wanted
        main = [g if n in wanted else None for n, g in zip(MAIN, found)]
        of_operands = [None if at is None else sums[at].to(operands[n].dtype) for n, at in zip(self.tensors, finish)]
        return *main, None, *of_operands


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
