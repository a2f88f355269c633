"""Every private name of torch that Weft uses, each with what holds where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..ir.versions import missing, refuse, warn_where_untested

_USED = ("register_autograd", "register_fake", "register_vmap", "Library")  # without which there are no ops
refuse("torch", torch.__version__, missing(f"torch.library:{name}" for name in _USED))
warn_where_untested("torch", torch.__version__)


def _found(path: str, otherwise: Any) -> Any:
    """torch.<path>, or `otherwise`."""
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return otherwise
    return value


F = TypeVar("F", bound=Callable[..., Any])


def constant_while_tracing(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which imports all of Dynamo where it only has to leave a mark. Without
    the mark Dynamo would trace the function."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# what torch's region `context_parallel` puts another function in the place of, as others do
SDPA = _found("_C._nn.scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention)


class Region(NamedTuple):
    """Of `torch.distributed.tensor.experimental.context_parallel`."""

    mesh: Any  # of one dimension; None where this version of torch does not say
    deals_pairs_of_chunks: Callable[[], bool]  # a chunk from either end to each rank, else neighbours


_REGIONS = ("_context_parallel._attention", "_attention")  # modules, in versions of torch
_has_all_rows = ContextVar("_has_all_rows", default=False)


def region() -> Region | None:
    """The one that this is inside of, with tensors that hold the rows of one rank."""
    return None if _has_all_rows.get() else _region_of(torch.nn.functional.scaled_dot_product_attention)


def rows_lie_as_torch_deals_them() -> bool:
    """Whether torch's context parallel is on, and may have dealt rows of sharded sequences other than as neighbours.

    True for any state that this version of torch does not tell of.
    """
    found = (sys.modules.get(f"torch.distributed.tensor.experimental.{name}") for name in _REGIONS)
    for module in found:
        options: Any = getattr(module, "_cp_options", None)
        if options is None:
            continue
        handlers = getattr(getattr(module.DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)  # type: ignore[union-attr]
        is_on = handlers is None or torch.ops.aten._scaled_dot_product_flash_attention.default in handlers
        return is_on and bool(getattr(options, "enable_load_balance", True))
    return False


def timeout_of(group: Any) -> timedelta:
    """How long ranks of a process group wait for each other.

    Groups of a mesh have torch's default, whatever `init_process_group` was given; theirs is then that of all ranks.
    """
    module = _found("distributed.distributed_c10d", None)
    usual, every = getattr(module, "_get_default_timeout", None), getattr(module, "_get_default_group", None)
    try:
        found: timedelta = min(group._get_backend(device).options._timeout for device in group._device_types)
        if (
            usual is not None
            and every is not None
            and found == usual(module.get_backend(group))
            and group is not every()
        ):
            return timeout_of(every())
    except (AttributeError, RuntimeError, ValueError):  # of a torch that says it otherwise, or of another backend
        otherwise: timedelta = group.get_group_store().timeout
        return otherwise
    return found


@contextmanager
def group_named(name: str) -> Iterator[None]:
    """Inside, `new_group` gives its group this name, by which ranks find each other.

    torch's own name has the number of groups that a process belongs to, so that ranks which differ in that wait for
    each other forever: pytorch/pytorch#173608. A torch without that function names groups itself.
    """
    module = _found("distributed.distributed_c10d", None)
    own = getattr(module, "_process_group_name", None)
    if own is None:
        yield
        return
    module._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        module._process_group_name = own


@contextmanager
def of_all_rows() -> Iterator[None]:
    """Calls inside are of all rows, wherever they are made."""
    token = _has_all_rows.set(True)
    try:
        yield
    finally:
        _has_all_rows.reset(token)


@lru_cache(maxsize=16)
def _region_of(function: Any) -> Region | None:
    """The region that has put a function in the place of `SDPA`; None where something else has."""
    module = str(getattr(function, "__module__", ""))
    if not module.startswith("torch.distributed.tensor.experimental"):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    options: Any = getattr(sys.modules.get(module), "_cp_options", None)
    if "device_mesh" not in cells or not hasattr(options, "enable_load_balance"):
        return Region(None, bool)
    return Region(cells["device_mesh"].cell_contents, lambda: bool(options.enable_load_balance))


def break_graph(reason: str) -> None:
    """While torch.compile traces: end the graph here, or raise with the reason where it may not end."""
    torch._dynamo.graph_break(msg=reason)


def is_surely_negative(number: int) -> bool:
    """Whether a size that torch.compile traces is below 0 in this graph; False where only the data say."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # lazy: imports sympy, as tracing has

    return guard_or_false(number < 0)


# where it is not found, as if something watched: the way through torch's dispatcher is always right
_dispatch_modes: Callable[[], int] = _found("_C._len_torch_dispatch_stack", lambda: 1)
_function_mode: Callable[[], bool] = _found("_C._is_torch_function_mode_enabled", lambda: False)
_transform: Callable[[], object] = _found("_C._functorch.peek_interpreter_stack", lambda: None)
_tracer: Callable[[], object] = _found("_C._get_tracing_state", lambda: None)
_profiler: Callable[[], bool] = _found("_C._autograd._profiler_enabled", lambda: False)
# of a gradient, whether it stands for many: torch.autograd.grad(is_grads_batched=True) runs a backward once for all
stands_for_many: Callable[[Tensor], bool] = _found("_C._functorch.is_legacy_batchedtensor", lambda tensor: False)
_record = _found("_C._profiler._RecordFunctionFast", None)
_below_autograd = _found("_C._AutoDispatchBelowAutograd", None)
# the GPU that launches go to, where CUDA is up; torch.cuda's own makes sure of that, which a call on a GPU need not
current_gpu: Callable[[], int] = _found("_C._cuda_getDevice", torch.cuda.current_device)
# (size, stride, dtype) -> a tensor on the current GPU, past the dispatcher and with Python's lock held; or None
empty_on_gpu: Callable[..., Tensor] | None = _found("_C._dynamo.guards._empty_strided_cuda", None)
_TensorGuards = _found("_C._dynamo.guards.TensorGuards", None)
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
# False where autocast is off for every kind of device
may_autocast: Callable[[], bool] = _found("_C._is_any_autocast_enabled", lambda: True)


def _guard(*tensors: Tensor, free: Sequence[int | None] = ()) -> Callable[..., bool]:
    """Whether as many others are tensors of the same types, devices, dtypes, sizes, strides and flags (of a gradient to
    be computed, of a view that is negated, of inference mode), under the same modes. It does not keep the tensors.

    free: for each tensor, the dimension whose size does not count.
    """
    free = free or [None] * len(tensors)
    first = {id(t): n for n, t in reversed(list(enumerate(tensors)))}
    if len(first) < len(tensors):  # torch's own says no where one is in two places: it must be in the same ones
        own, twins = sorted(first.values()), [(n, first[id(t)]) for n, t in enumerate(tensors) if first[id(t)] != n]
        alike = _guard(*[tensors[n] for n in own], free=[free[n] for n in own])
        return lambda *others: alike(*[others[n] for n in own]) and all([others[a] is others[b] for a, b in twins])
    sizes = [[None if d == which else size for d, size in enumerate(t.shape)] for t, which in zip(tensors, free)]
    strides = [list(t.stride()) for t in tensors]
    found: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return found


def _has_guards() -> bool:
    """Whether guards tell tensors apart as is said of them."""
    try:
        with torch.inference_mode(False):
            whole = torch.empty(2, 4, device="cpu")
            left = whole[:, :2]
            others: list[Any] = [
                whole,
                left[:1],
                whole[:, ::2],
                whole.mT[:2],
                left.int(),
                left.to("meta"),
                torch._neg_view(left),
            ]
            others += [whole[:, :2].requires_grad_(), torch.nn.Parameter(left), left[0], None]
            alike, right = _guard(left, whole), whole[:, 2:]
            of_any_rows = _guard(left, whole, free=(0, None))  # what differs in nothing else comes first
            any_rows = of_any_rows(left[:1], whole) and not any(of_any_rows(t, whole) for t in (whole, *others[2:]))
            return any_rows and alike(right, whole) is True and not any(alike(t, whole) for t in others)
    except Exception:  # another torch may take, or raise, anything
        return False


# of tensors: whether others are like them; or None
guard = _guard if _has_guards() else None


def called_by_the_engine(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """With a gradient function that the engine calls itself: torch's own, which it calls, only looks for that."""
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    return function


def is_traced() -> bool:
    """Whether torch.jit.trace watches."""
    return _tracer() is not None


def forward_level() -> int:
    """Level of forward-mode differentiation; negative where there is none."""
    return getattr(forward_ad, "_current_level", -1)


def unwatched() -> bool:
    """Whether nothing but its caller is to see an op of plain tensors: no mode, transform, tracer or profiler."""
    return (
        _dispatch_modes() == 0
        and not _function_mode()
        and _transform() is None
        and _tracer() is None
        and not _profiler()
        and forward_level() < 0
    )


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether none is of a subclass, which may watch what is done with it."""
    return all([t is None or type(t) in PLAIN_TYPES for t in tensors])


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether forward-mode differentiation flows through one of these."""
    return forward_level() >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def under_transform() -> bool:
    """Whether torch.func.grad, vmap or one of their relatives runs."""
    return _transform() is not None


def named(name: str) -> AbstractContextManager[object]:
    """A row of this name in profiles, since all variants share their ops."""
    return nullcontext() if _record is None else _record(name)


def below_autograd() -> AbstractContextManager[object]:
    """Nothing to record: passing by the autograd key halves what a dispatch costs the host."""
    return nullcontext() if _below_autograd is None else _below_autograd()
