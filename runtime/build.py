"""Build ahead: generate and compile what calls will want, on all cores, for a GPU that need not be there.

What is built lies in Weft's cache folder and in Triton's; copied along with them, as into a container's image, it makes
the first call on such a GPU compile nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compiler.analysis.tiles.facts import facts_of
from ..compiler.planning.dtypes import ON_GPUS, dtype_named
from ..compiler.planning.machines import hardware
from ..compiler.planning.signature import Described, Direction, Widths, signature_of
from ..compiler.planning.sources import kind_named
from ..ir.attention import Attention
from ..ir.errors import Problem, UnavailableError, WeftError, counted, shown
from ..ir.expr import TensorOperand
from ..ir.numbers import is_int
from ..ir.parse import parse_attention
from . import driver
from .call import LARGEST_PAGE, Call, Choices, Dense, Lengths, Operand, Packed, PackedPaged, Paged, Sequences, is_page
from .run.key import boxed_of, offset_kind
from .run.variant import Variant, variant_of

if TYPE_CHECKING:
    from ..codegen.ahead import Compilation

TORCH_DTYPES = {name: dtype_named(name).torch for name in ON_GPUS}
_KINDS = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


@dataclass(frozen=True)
class Job:
    """One module: a direction of a variant for a dtype and widths."""

    variant: str  # canonical text
    direction: Direction
    dtype: str
    head_dim: int
    value_dim: int
    device: str  # "h100"-style name
    target: str | None = None
    schedule: str | None = None
    sequences: str = "dense"  # the name of a kind
    page: int = 16  # rows of a block, of paged sequences
    group: int = 0  # query heads of a key head, of a decode step; 0: not one of those

    def __str__(self) -> str:
        name = parse_attention(self.variant).name
        what = f"decode of {counted(self.group, 'head')} a key head" if self.group else self.direction
        pages = f" in pages of {self.page}"
        rows = {"dense": "", "paged": pages, "packed_paged": f" packed queries{pages}"}.get(
            self.sequences, f" {self.sequences}"
        )
        return f"{name} {what}{rows} {self.dtype} D{self.head_dim} for {self.device}"


@dataclass(frozen=True)
class Built:
    """What became of a job."""

    job: Job
    kernels: tuple[str, ...]  # compiled ones
    seconds: float
    problem: str = ""  # why nothing was built; "" where it was


def jobs_of(
    attentions: Sequence[Attention], *, device: str, head_dims: Sequence[int] = (64, 128),
    dtypes: Sequence[str] = ("bf16",), directions: Sequence[Direction] = ("forward", "backward"),
    target: str | None = None, schedule: str | None = None, sequences: Sequence[str] = ("dense",),
    page: int = 16, decode: Sequence[int] = (),
) -> list[Job]:  # fmt: skip
    """Every combination that there is: pages have no backward, and packed sequences no decode step.

    sequences: how rows of sequences lie; lengths are int32, as are tables. page: rows of a block. decode: steps of few
    queries too, for so many query heads a key head. Raises WeftError for a dtype, a device or a page that is not known,
    and for latent attention.
    """
    hardware.by_name(device)
    given: dict[str, object] = {
        "variants": attentions, "head_dims": head_dims, "dtypes": dtypes, "directions": directions,
        "sequences": sequences, "decode": decode,
    }  # fmt: skip
    if problems := [p for name, values in given.items() for p in _list_problems(name, values)]:
        raise WeftError.of("build", *problems)
    latent = [str(a.name) for a in attentions if a.latent is not None]
    if latent:
        raise WeftError(f"build: latent attention is not built ahead yet, got {', '.join(latent)}")
    if not is_int(page) or not is_page(page):
        raise WeftError(f"build: page: expected a power of two from 1 to {LARGEST_PAGE}, got {shown(page)}")
    attentions = [each for a in attentions for each in ((a, a.replace(dropout=0.0)) if a.canonical.drops else (a,))]
    kinds = [(d, k, 0) for k in sequences for d in directions if d == "forward" or not kind_named(k).keys.pooled]
    kinds += [("forward", k, group) for k in sequences if not kind_named(k).keys.packed for group in decode]
    return [
        Job(a.canonical.text, direction, dtype, width, width, device, target, schedule, kind, page, group)
        for a in attentions for dtype in dtypes for width in head_dims for direction, kind, group in kinds
    ]  # fmt: skip


# Of each list that `build` takes: what an entry is, in words and as a predicate.
_ENTRIES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "variants": ("weft.Attention", lambda a: isinstance(a, Attention)),
    "head_dims": ("positive ints", lambda n: is_int(n, least=1)),
    "dtypes": (f"some of {', '.join(TORCH_DTYPES)}", lambda d: isinstance(d, str) and d in TORCH_DTYPES),
    "directions": ("forward or backward", lambda d: isinstance(d, str) and d in ("forward", "backward")),
    "sequences": ("names of how rows lie, such as dense", lambda k: isinstance(k, str)),
    "decode": ("positive ints, query heads a key head", lambda n: is_int(n, least=1)),
}


def _list_problems(name: str, values: object) -> Iterator[Problem]:
    """What keeps this from being the list of that name."""
    expected, is_right = _ENTRIES[name]
    if not isinstance(values, (tuple, list)):
        yield Problem(option=name, expected=f"a list of {expected}", got=shown(values))
    else:
        wrong = [value for value in values if not is_right(value)]
        if wrong:
            yield Problem(option=name, expected=expected, got=", ".join(map(shown, wrong[:8])))


def build(jobs: Sequence[Job], processes: int | None = None) -> Iterator[Built]:
    """Do the jobs in a pool of processes, all cores where not given; each as it is done. A job that fails says why."""
    workers = min(processes or os.cpu_count() or 1, len(jobs))
    if workers <= 1:
        yield from map(build_one, jobs)
        return
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with _interrupts_held():  # and so in the processes that are started: Ctrl-C reaches all of a terminal's
                started = [pool.submit(build_one, job) for job in jobs]
            for done in as_completed(started):
                yield done.result()
        except BaseException:  # also where whoever asks for more is interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.terminate()  # nothing is torn: caches are written under other names, and renamed
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits; in processes that are started here for good. Not on Windows, which cannot hold it.

    A mask alone holds it of this thread: where another one takes the signal, Python still interrupts the main one.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask, held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), []
    is_main = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None
    handler = signal.signal(signal.SIGINT, lambda *_: held.append(True)) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if held:
            signal.raise_signal(signal.SIGINT)


def build_one(job: Job) -> Built:
    """Generate and compile one module, in this process."""
    begun = time.perf_counter()
    try:
        kernels = _kernels(job)
    except WeftError as error:
        return Built(job, (), time.perf_counter() - begun, str(error))
    except Exception as error:  # a compiler's own: the other jobs go on
        lines = str(error).strip().splitlines() or ["no message"]
        return Built(job, (), time.perf_counter() - begun, f"{type(error).__name__}: {lines[-1]}")
    return Built(job, kernels, time.perf_counter() - begun)


def _kernels(job: Job) -> tuple[str, ...]:
    machine, found = compilations_of(job)
    for compilation in found:
        compilation.compile(machine)
    return tuple(compilation.name for compilation in found)


def compilations_of(job: Job) -> tuple[hardware.Hardware, list[Compilation]]:
    """The machine of a job, and the kernels of its modules, generated and not yet compiled."""
    from ..codegen.ahead import compilations  # lazy: imports triton

    attention, machine = parse_attention(job.variant), hardware.by_name(job.device)
    if machine.kind == "cpu":
        raise UnavailableError("build: the cpu target compiles nothing; name a GPU, as in device='h100'")
    variant = variant_of(attention)
    call = sample_call(variant, job)
    wanted = frozenset({"query", "key", "value"}) if job.direction == "backward" else frozenset()
    described = Described(
        job.direction, machine.arch, job.dtype, Widths(job.head_dim, job.value_dim), kind_named(job.sequences),
        offset_kind(call.sequences.q_offset), wanted, boxed=boxed_of(variant.facts, call.operands),
    )  # fmt: skip
    signature = replace(
        signature_of(described, masked=attention.canonical.is_masked, sums_pairs=False), serves="all",
        few_queries=job.group > 0, short_call=job.group > 0,  # as a step of few queries is
    )  # fmt: skip
    signatures = [signature]
    resolved = driver.resolve(attention, signature, machine, job.target, job.schedule)
    if not job.group and resolved.by_length:
        signatures += [replace(signature, short_call=True)]
    if not job.group:  # forms that were timed, which other calls do not have
        signatures += [replace(signature, short_call=short, lengths=timed) for short, timed in sorted(resolved.timed)]
    if kind_named(job.sequences).is_mixed:  # what may be mixed has a module of long sequences, and one of short ones
        mixed = replace(signature, few_queries=False, serves="long")
        shares = driver.shared_out(attention, mixed, machine, job.target, job.schedule)
        signatures += [s for s in shares if s.serves == ("short" if job.group else "long")]
    results, found = _results(variant, call, job.direction), []
    for own in signatures:
        made = driver.compile_kernels(attention, own, machine, job.target, job.schedule)
        code, target = made.resolved.code, made.resolved.target
        found += compilations(target, made.modules, code, facts_of(attention), call, results)
    return machine, found


def sample_call(variant: Variant, job: Job) -> Call:
    """A tiny call of these dtypes and widths. Tensor operands are float32, int64 or bool."""
    dtype = TORCH_DTYPES[job.dtype]
    rows = job.page if kind_named(job.sequences).keys.pooled else 16
    sizes = ((job.group or 1, 1 if job.group else 32, job.head_dim), (1, rows, job.head_dim), (1, rows, job.value_dim))
    query, key, value = (torch.empty(1, *size, dtype=dtype, device="cpu") for size in sizes)
    operands: dict[str, Operand] = {}
    for p in variant.attention.canonical.parameters:
        is_tensor = isinstance(p, TensorOperand)
        operands[p.name] = torch.empty([16] * p.rank, dtype=_KINDS[p.dtype], device="cpu") if is_tensor else 1  # type: ignore[union-attr]
        if not is_tensor and p.dtype == "float":
            operands[p.name] = 1.0
    options = Choices(job.target, job.schedule)
    return Call(query, key, value, None, operands, _sequences(job), options, job.head_dim)


def _sequences(job: Job) -> Sequences:
    """One sequence that lies as a job says."""
    starts = torch.zeros(2, dtype=torch.int32, device="cpu")
    kv_lens = starts[1:]
    table = torch.zeros(1, 1, dtype=torch.int32, device="cpu")
    q_lens = None if job.group else kv_lens
    match job.sequences:
        case "dense":
            return Dense(0)
        case "lengths":
            return Lengths(q_lens, kv_lens, None)
        case "packed":
            return Packed(starts, starts, None)
        case "paged":
            return Paged(q_lens, kv_lens, table, job.page, None)
        case "packed_paged":
            return PackedPaged(starts, kv_lens, table, job.page, None)
        case _:
            raise WeftError(f"build: {job.sequences} sequences are not built ahead")


def _results(variant: Variant, call: Call, direction: Direction) -> dict[str, Tensor | None]:
    out, lse = (
        place.beside(call.query) for place in variant.forward_places(call.query, call.key, call.value, call.choices)
    )
    results: dict[str, Tensor | None] = {"out": out, "lse": lse}
    if direction == "backward":
        results |= {"dout": torch.empty_like(out), "dlse": None}
        results |= {f"d{name}": torch.empty_like(tensor) for name, tensor in call.tensors.items()}
    return results
