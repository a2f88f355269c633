"""Launching compiled Triton and Gluon kernels: what of Triton's runtime is used, in one place.

Triton's own dispatch takes the host longer than a launch, so a kernel is compiled once for each kind of arguments, and
then handed its arguments as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
from triton import knobs
from triton.runtime import driver

from ...ir.caller import for_threads, warn
from ...ir.errors import UnavailableError
from ..triton_versions import takes_launches_in_c
from . import starting
from .binding import Binding, Launch


@dataclass(frozen=True)
class Run:
    """A kernel that is ready to be launched."""

    launch: Callable[..., None]
    function: object  # what the driver launches
    metadata: object
    compiled: Any

    @property
    def shortest(self) -> Launch:
        """The launch with as little as possible between.

        Triton's launcher is Python around a function in C and looks for scratch memory at each launch. In which order
        that function takes its arguments depends on Triton's version.
        """
        launch, rest = self.launch, (self.metadata, None, None, None)
        sizes = [getattr(launch, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
        if not takes_launches_in_c(launch) or sizes != [0, 0]:
            return Launch(launch, (self.function, *rest))
        ways = (launch.launch_cooperative_grid, launch.launch_pdl)  # type: ignore[attr-defined]
        function: Any = launch.launch  # type: ignore[attr-defined]
        below = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        described: dict[int, Mapping[str, Any]] = {}
        if {"launcher", "tensordesc_indices", "tensordesc_meta"} <= below.keys() and None not in below[
            "tensordesc_meta"
        ]:
            function = below["launcher"]  # what takes the place of a descriptor is made in Python above it
            places = sorted(below["tensordesc_indices"])
            described = dict(zip(places, below["tensordesc_meta"], strict=True))
        return Launch(function, (self.function, *ways, None, None, *rest), described)

    def __call__(self, programs: int, arguments: Sequence[Any], stream: int) -> None:
        if not programs:
            return
        bind_context()
        if not is_heard():
            self.launch(programs, 1, 1, stream, self.function, self.metadata, None, None, None, *arguments)
        else:  # a profiler of Triton's listens
            self.compiled[(programs, 1, 1)](*arguments, stream=stream)


AnyRun = Callable[[int, Sequence[Any], int], None]  # (programs, arguments, stream)


def is_heard() -> bool:
    """Whether somebody listens to launches, as profilers of Triton do."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of hooks, or one, by Triton's version
    return bool(enter is not None and getattr(enter, "calls", True)) or bool(
        leave is not None and getattr(leave, "calls", True)
    )


def parameters_of(kernel: Any) -> tuple[list[str], dict[str, object]]:
    """Run-time parameters of a kernel, and its constexpr parameters with their defaults."""
    found = inspect.signature(kernel.fn).parameters.values()
    is_constant = {p.name: str(getattr(p.annotation, "__name__", p.annotation)).endswith("constexpr") for p in found}
    run_time = [p.name for p in found if not is_constant[p.name]]
    return run_time, {p.name: p.default for p in found if is_constant[p.name]}


def interpreted(kernel: Any, binding: Binding, options: Mapping[str, int]) -> AnyRun:
    """A kernel in Triton's interpreter, which takes tensors themselves, and leaves floats to Python's arithmetic."""
    from ..interpret import as_float32  # lazy: what a GPU needs does without the interpreter

    at = len(binding.parameters)

    def run(programs: int, arguments: Sequence[Any], stream: int) -> None:
        if programs:
            given = [as_float32(a) if isinstance(a, float) else a for a in arguments[:at]]
            kernel[(programs,)](*given, **binding.constants, **options)

    return run


def compiled(kernel: Any, binding: Binding, arguments: Sequence[Any], options: Mapping[str, int]) -> Run:
    """A kernel compiled for arguments of these types on the current device. A dtype stands for a tensor of it.

    Raises UnavailableError where the device has less shared memory than the kernel needs, or ptxas fails.
    """
    given = arguments[: len(binding.parameters)]

    def warmup(options: Mapping[str, int]) -> Any:
        return kernel.warmup(*given, grid=(1,), **binding.constants, **options)

    made = assembled(binding.name, warmup, options)
    try:
        return Run(made.run, made.function, made.packed_metadata, made)
    except triton.runtime.errors.OutOfResources as error:
        raise UnavailableError(
            f"{binding.name}: {error}; pass schedule= with smaller tiles or fewer stages for this kernel"
        ) from error


Made = TypeVar("Made")


def assembled(name: str, compilation: Callable[[Mapping[str, int]], Made], options: Mapping[str, int]) -> Made:
    """What a compilation with these options gives. ptxas has crashed where it moves loads of constant work: without
    loads ahead it has less to move.

    Raises UnavailableError where it fails then too.
    """
    try:
        return compilation(options)
    except triton.runtime.errors.PTXASError as error:
        first, (reason, *_) = error, [*str(error).strip().splitlines(), ""]
    if options.get("num_stages", 1) > 1:
        with contextlib.suppress(triton.runtime.errors.PTXASError):
            made = compilation({**options, "num_stages": 1})
            warn(
                f"{name}: {reason}; it was compiled with one stage in place of {options['num_stages']}, which is "
                "slower: pass schedule= with other tiles for this kernel"
            )
            return made
    raise UnavailableError(
        f"{name}: {reason}; pass schedule= with other tiles or warps for this kernel, or target='cpu'"
    ) from first


Asked = tuple[Any, Binding, Sequence[Any], Mapping[str, int]]  # arguments of `compiled`


def compiled_together(device: int, asked: Sequence[Asked]) -> list[Run]:
    """Kernels of a device, compiled at the same time: most of a compilation is LLVM's and ptxas', outside of Python."""
    starting.wait()
    if len(asked) < 2:  # none where another thread was faster
        return [compiled(*each) for each in asked]

    def one(each: Asked) -> Run | None:
        try:
            with torch.cuda.device(device):
                return compiled(*each)
        except SystemError:  # two threads that parse at once, in a CPython that counts how deep for all (`PARSING`)
            return None

    with ThreadPoolExecutor(len(asked)) as threads:
        try:
            begun = threads.map(for_threads(one), asked)
        except RuntimeError:  # the process ends, and Python starts no work in threads any more
            begun = iter([None] * len(asked))
        found = list(begun)
    return [run or compiled(*each) for run, each in zip(found, asked)]


_thread = threading.local()


def bind_context() -> None:
    """Give this thread the context of its GPU, which a descriptor is not made without.

    The CUDA runtime does so at a thread's first call. Descriptors are made by the driver, and kernels may have been
    compiled in other threads: those of autograd, and of users, may not have called anything yet.
    """
    if not hasattr(_thread, "is_bound") and torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing()  # a call that is allowed at any time
        _thread.is_bound = True


def current_stream(device: int) -> int:
    """Handle of the stream that the caller launches in."""
    return driver.active.get_current_stream(device)


def stream_function() -> Callable[[int], int]:
    """`current_stream` without a frame of Python, for a function that is bound to a process whose driver is up."""
    found: Callable[[int], int] = driver.active.get_current_stream
    return found


def types_of(arguments: Sequence[Any]) -> list[Any]:
    """Arguments with their dtypes in place of tensors, as a compilation takes them."""
    return [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]


MOST_DESCRIPTORS = 1024  # that are kept of one parameter: half a megabyte


Places = tuple[Sequence[int], Sequence[int]]  # sizes and strides of a tensor descriptor


class Descriptors(dict[tuple[int, ...], tuple[object, ...]]):
    """What launches are handed for a tensor descriptor, by its address and the numbers that `places` takes.

    A descriptor is these numbers in the form that the GPU reads, and a launch copies it: one that is found again is
    right for whatever tensor lies there now, in any thread and stream. Making one takes the host as long as a launch.
    """

    def __init__(self, encode: Callable[[int, Places], tuple[object, ...]], places: Callable[..., Places]) -> None:
        super().__init__()
        self._encode, self._places = encode, places

    def __missing__(self, key: tuple[int, ...]) -> tuple[object, ...]:
        made = self._encode(key[0], self._places(*key[1:]))
        if len(self) >= MOST_DESCRIPTORS:
            self.clear()
        self[key] = made
        return made

    def of(self, *numbers: int) -> _OfOnePlace:
        """The same of one place, by address alone."""
        return _OfOnePlace(self, numbers)

    def along(self, at: int, *numbers: int) -> Callable[[int, int], tuple[object, ...]]:
        """The same of places that differ in the number at `at`, by address and this number: for those that never
        return, which nothing is kept of."""
        encode, places, before, after = self._encode, self._places, numbers[:at], numbers[at + 1 :]
        return lambda address, number: encode(address, places(*before, number, *after))


class _OfOnePlace(dict[int, tuple[object, ...]]):
    def __init__(self, kept: Descriptors, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self._kept, self._numbers = kept, numbers

    def __missing__(self, address: int) -> tuple[object, ...]:
        if len(self) >= MOST_DESCRIPTORS:
            self.clear()
        found = self[address] = self._kept[address, *self._numbers]
        return found


def encoder(meta: Mapping[str, Any]) -> Callable[[int, Places], tuple[object, ...]]:
    """What Triton's launcher makes of a tensor descriptor, given what the compiled kernel says of it."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # lazy: of GPUs that have descriptors

    fill = driver.active.utils.fill_tma_descriptor
    first = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"])

    def encode(address: int, places: Places) -> tuple[object, ...]:
        bind_context()
        shape, strides = places
        return fill(address, *first, shape, strides, 0), *shape, *strides

    return encode


def descriptor(box: Any, block: Sequence[int]) -> Any:
    """The tensor descriptor that Triton compiles for, of tiles of these sizes, of what a launch hands over."""
    from triton.experimental.gluon import language as gl  # lazy: only the hopper target wants Gluon
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if box.in_order:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    else:
        dtypes = {
            torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
            torch.float8_e4m3fn: gl.float8e4nv,
        }  # fmt: skip
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtypes[box.base.dtype])
    return TensorDescriptor(box.base, box.shape, box.strides, list(block), layout)


_counters: dict[tuple[int, int], torch.Tensor] = {}  # (device, stream) -> int32 tensor of one zero


def counter(device: int) -> torch.Tensor:
    """A zero for a persistent kernel to hand out work with: it leaves it zero, so launches in one stream share it.

    torch's own streams live as long as the process. The handle of another stream may be that of one that is gone while
    its work still runs, and a captured graph may be replayed beside anything: such a launch gets a counter of its own.
    """
    stream = current_stream(device)
    found = _counters.get((device, stream))
    if found is None or torch.cuda.is_current_stream_capturing():
        fresh = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
        # of a stream that is not torch's own the id is its handle
        is_of_torch = stream == 0 or torch.cuda.current_stream(device).stream_id != stream
        if torch.cuda.is_current_stream_capturing() or not is_of_torch:
            return fresh
        found = _counters[device, stream] = fresh
    return found
