"""Processes of many kinds must end in order: python -m tests.gpu.exits --processes 300 --at-once 16.

Each process is of one kind: what it has done, what still runs, and how it leaves. It must end with the code that is
meant, say what it is to say, and leave no word of an abort. A process that aborts prints the native frames of its
threads, which are kept in the folder of --logs. --device cpu needs no GPU. --unprotected takes away what the package
does for threads of autograd (runtime/ending.py), to see whether a machine shows what it is for.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

import weft
from weft import masks, score
from weft.codegen.launch import starting
from weft.runtime import ending

ROOT = Path(__file__).parents[2]
BAD = ("terminate called", "Fatal Python error", "Segmentation fault", "Aborted", "SIGABRT")
CACHES = ("WEFT_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
LIMIT_S = 180  # of one process; a slower one hangs
VARIANT = weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, name="exits")
DEVICE = os.environ.get("EXITS_DEVICE", "cpu")
LONG_S = float(os.environ.get("EXITS_LONG_S", "8"))
ALIVE: list[object] = []  # when the process ends


class Kind(NamedTuple):
    run: Callable[[], object]
    code: int  # that the process is to end with; negative: a signal
    says: str  # on stdout
    share: int  # of the processes, in which the others have one
    on_cpu: bool


KINDS: dict[str, Kind] = {}


def ends(code: int = 0, says: str = "", share: int = 1, on_cpu: bool = True) -> Callable[[Callable[[], object]], None]:
    """A kind, by its function's name. One that is to end with 0 says something at least: that it reached its end."""

    def register(run: Callable[[], object]) -> None:
        KINDS[run.__name__] = Kind(run, code, says or ("" if code else "reached its end"), share, on_cpu)

    return register


# -- what processes do -------------------------------------------------------------------------------------------------
def operands(length: int = 1024) -> list[Tensor]:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return [torch.randn(1, 8, length, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]


def trained(variant: weft.Attention = VARIANT, length: int = 1024) -> Tensor:
    """The sum of what a call gives, after its backward."""
    given = operands(length)
    out = variant(*given).float().sum()
    out.backward()
    assert all(x.grad is not None for x in given)
    return out.detach()


def fresh() -> weft.Attention:
    """A variant that no process had before: its kernels are generated and compiled."""
    return VARIANT.replace(score=score * (1.0 + os.getpid() / 2**24), name="fresh")


def begun(work: Callable[[], object]) -> threading.Thread:
    """A thread that has been at its work for a moment, and goes on when this one is done."""
    under_way = threading.Event()

    def run() -> None:
        under_way.set()
        work()
        print("the thread is done", flush=True)

    thread = threading.Thread(target=run)
    thread.start()
    under_way.wait()
    time.sleep(0.3)
    return thread


# -- kinds -------------------------------------------------------------------------------------------------------------
@ends()
def called() -> None:
    with torch.no_grad():
        ALIVE.append(VARIANT(*operands()))


@ends(share=4)
def learned() -> None:
    ALIVE.append(trained())


@ends(share=4)
def graph_alive() -> None:
    ALIVE.append(VARIANT(*operands()))  # with what its backward would read


@ends(share=8)
def dropped() -> None:
    """The last thing that happens is a backward whose results nobody keeps; nobody else asks for Python's lock."""
    trained()
    sys.setswitchinterval(10)
    for _ in range(20):
        given = operands()
        torch.autograd.grad(VARIANT(*given), given, operands()[0].detach())


@ends(share=6)
def long_loop() -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        trained()


@ends(share=2)
def generated() -> None:
    trained(fresh())


@ends(says="the thread is done", share=4)
def still_compiling() -> None:
    begun(lambda: trained(fresh()))


@ends(code=4, says="the thread is done", share=2)
def left_while_compiling() -> NoReturn:
    begun(lambda: trained(fresh()))
    sys.exit(4)


@ends(code=1, says="the thread is done", share=2)
def failed_while_compiling() -> NoReturn:
    begun(lambda: trained(fresh()))
    raise ZeroDivisionError


@ends(code=3, share=4)
def left_while_starting() -> NoReturn:
    """What a first call does beside generating code has only begun."""
    starting.begin()
    sys.exit(3)


@ends(code=-signal.SIGINT, share=2)
def interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    trained(fresh())
    time.sleep(60)


@ends(code=-signal.SIGTERM)
def ended_from_outside() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        trained()


@ends(code=1, share=2)
def failed() -> NoReturn:
    ALIVE.append(trained())
    raise ZeroDivisionError


@ends(code=1)
def refused() -> None:
    query, key, value = operands()
    VARIANT(query, key[:, :3], value)


@ends(code=7, share=2)
def left() -> NoReturn:
    ALIVE.append(trained())
    sys.exit(7)


@ends(says="the thread is done", share=4)
def thread_goes_on() -> None:
    """Python waits for it, but begins no work in pools of threads any more."""
    trained()

    def work() -> None:
        until = time.monotonic() + min(2.0, LONG_S)
        while time.monotonic() < until:
            trained(length=random.choice((1024, 1100)))

    begun(work)


@ends(share=2)
def in_threads() -> None:
    threads = [threading.Thread(target=trained) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@ends(says="computed at exit", share=2)
def called_at_exit() -> None:
    """Python starts no threads any more."""

    def late() -> None:
        trained()
        trained(fresh())
        print("computed at exit", flush=True)

    atexit.register(late)


@ends(share=2)
def under_pytest() -> int:
    import pytest  # no other kind does

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test_it.py")
        path.write_text("from tests.gpu.exits import trained\n\n\ndef test_it() -> None:\n    trained()\n")
        return int(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, str(path)]))


@ends()
def child_of_its_own() -> int:
    trained()
    child = multiprocessing.get_context("spawn").Process(target=trained)  # torch's threads are of no use in a fork
    child.start()
    child.join()
    return child.exitcode or 0


@ends(share=2)
def compiled_by_torch() -> None:
    """With the processes that torch starts to compile in, where a compiler is there."""
    backend = "inductor" if shutil.which("g++") or shutil.which("gcc") else "aot_eager"
    given = operands()
    torch.compile(lambda *x: VARIANT(*x).float().sum() * 2, fullgraph=True, backend=backend)(*given).backward()


@ends(on_cpu=False, share=3)
def replayed() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        given = operands()
        VARIANT(*given)
        with torch.cuda.graph(graph):
            ALIVE.append(VARIANT(*given))
    for _ in range(10):
        graph.replay()
    ALIVE.append(graph)


@ends(code=6, on_cpu=False, share=2)
def left_while_capturing() -> None:
    with torch.no_grad():
        given = operands()
        VARIANT(*given)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            VARIANT(*given)
            sys.exit(6)


@ends(code=1, on_cpu=False, share=2)
def failed_while_capturing() -> None:
    with torch.no_grad():
        given = operands()
        VARIANT(*given)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            VARIANT(*given)
            raise ZeroDivisionError


# -- processes ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ended:
    kind: str
    number: int
    problem: str  # "" for none
    seconds: float


def process(kind: str, number: int, settings: dict[str, str], logs: Path, unprotected: bool = False) -> Ended:
    """Run one to its end, and say what was wrong with it."""
    command = [sys.executable, "-m", "tests.gpu.exits", "--run", kind, *(["--unprotected"] if unprotected else [])]
    at = time.monotonic()
    with subprocess.Popen(
        command, env=settings, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as started:  # fmt: skip
        try:
            said = started.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # and those that it started
            said = ("", f"it did not end in {LIMIT_S} s")
    done = subprocess.CompletedProcess(command, started.returncode, *said)
    problem = problem_of(KINDS[kind], done)
    if problem:
        (logs / f"{kind}.{number}.log").write_text(f"{problem}\n{done.stdout}\n{done.stderr}")
    return Ended(kind, number, problem, time.monotonic() - at)


def problem_of(kind: Kind, done: subprocess.CompletedProcess[str]) -> str:
    words = [word for word in BAD if word in done.stderr]
    if words:
        return f"ended with {done.returncode} and {words[0]!r}"
    if done.returncode != kind.code:
        last = done.stderr.strip().splitlines()[-1:]
        return f"ended with {done.returncode}, meant was {kind.code}: {' '.join(last)[:200]}"
    return "" if kind.says in done.stdout else f"did not say {kind.says!r}"


def drawn(options: argparse.Namespace) -> list[str]:
    """Kinds in turn, each as often as its share, in an order that mixes them."""
    chosen = options.kinds.split(",") if options.kinds else list(KINDS)
    kinds = [n for n in chosen for _ in range(KINDS[n].share) if KINDS[n].on_cpu or options.device == "cuda"]
    every = [*dict.fromkeys(kinds), *(kinds * (options.processes // len(kinds) + 1))][: options.processes]
    random.Random(0).shuffle(every)
    return every


def run(name: str, unprotected: bool) -> int:
    """Be a process of a kind."""
    if hasattr(torch._C, "_set_print_stack_traces_on_fatal_signal"):
        torch._C._set_print_stack_traces_on_fatal_signal(True)
    if unprotected:
        atexit.unregister(ending.let_threads_finish)
    code = KINDS[name].run()
    print("reached its end", flush=True)
    return code if isinstance(code, int) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.exits", description=__doc__)
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", default="", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--logs", type=Path, default=Path("build/exits"))
    parser.add_argument("--unprotected", action="store_true")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run(options.run, options.unprotected)
    options.logs.mkdir(parents=True, exist_ok=True)
    at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        settings = {**os.environ, "OMP_NUM_THREADS": "2", "EXITS_DEVICE": options.device}
        settings |= {name: f"{folder}/{name}" for name in CACHES}
        kinds = drawn(options)
        every = list(
            pool.map(lambda one: process(one[1], one[0], settings, options.logs, options.unprotected), enumerate(kinds))
        )
    bad = [one for one in every if one.problem]
    for name, count in Counter(kinds).items():
        longest = max(one.seconds for one in every if one.kind == name)
        wrong = Counter(one.problem for one in bad if one.kind == name)
        print(f"{name:24} {count:4} processes, up to {longest:.0f} s, {sum(wrong.values())} out of order")
        print("".join(f"    {number} times: {problem}\n" for problem, number in wrong.items()), end="")
    print(f"{len(every)} processes in {time.monotonic() - at:.0f} s, {len(bad)} out of order; logs in {options.logs}")
    return 1 if bad else 0


if __name__ == "__main__":
    if code := main():
        sys.exit(code)
