"""What `weft doctor` says of this machine: rows of (name, text)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import tempfile
import time

from .. import Attention, __version__, installed, parse
from ..codegen.targets import target_named, targets
from ..compiler.planning.machines import hardware
from ..ir.errors import WeftError, counted
from ..runtime import driver
from ..runtime.settings import current, settings
from ..runtime.store import files, prune


def state_of(entry: prune.EntryInfo) -> str:
    if entry.problem:
        return f"unsound: {entry.problem}"
    return f"stale: {entry.stale}" if entry.stale else "sound"


def machine_rows() -> list[tuple[str, str]]:
    import torch

    usable, there = hardware.usable_cores(), os.cpu_count() or 1
    cores = f"{usable} of {there} cores usable by this process, torch threads {torch.get_num_threads()}"
    rows = [("CPU", f"{hardware.processor()}, {cores}"), ("GPU", _no_gpu() if not torch.cuda.is_available() else "")]
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        rows[1:] = [
            ("GPU", f"{p.name}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB") for p in cards
        ]
    here = hardware.this_machine()
    return [*rows, ("figures", f"{here.title}, {here.arch}; {here.figures}")]


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "none that torch can use: this torch is built without CUDA and ROCm"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"none that torch can use: it is built for {built}, and finds no device or no driver"


def version_rows() -> list[tuple[str, str]]:
    names = ("torch", "triton", "sympy", "jinja2", "numpy", "matplotlib")
    others = ((name, _version(name)) for name in names)
    return [("python", platform.python_version()), *installed.rows(__version__), *others]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def setting_rows() -> list[tuple[str, str]]:
    """What is wrong with a setting of the environment; nothing where none is."""
    try:
        current()
    except WeftError as error:
        return [("problem", f"each call raises: {error}")]
    return []


def cache_rows() -> list[tuple[str, str]]:
    if setting_rows():
        return [("folder", "not known while a setting is wrong")]
    try:
        folder, found = files.cache_dir(), prune.entries()
    except WeftError as error:
        return [("folder", f"cannot be used, so that kernels are generated anew in each process: {error}")]
    states = [state_of(entry).partition(":")[0] for entry in found]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("sound", "stale", "unsound") if s in states)
    size = f"{sum(entry.size for entry in found) / 1024:.0f} KiB"
    state = f"{counted(len(found), 'entry')}{f' ({counts})' if counts else ''}, {size}"
    access = "" if os.access(folder, os.W_OK) else "; it may only be read: new kernels are not kept"
    return [("folder", str(folder)), ("state", state + access)]


def target_rows() -> list[tuple[str, str]]:
    """Each target: whether it works here, and for which operands it is what a call takes by itself."""
    found, by_name = driver.available(), {t.name for t in targets() if t.by_name_only}
    chosen = [name for name, reason in found.items() if reason is None and name not in by_name]
    kind = "the CPU" if hardware.this_machine().kind == "cpu" else "the GPU"
    defaults = {t.name: "the CPU" for t in targets() if t.serves == "cpu"} | ({chosen[0]: kind} if chosen else {})
    rows = []
    for name, reason in found.items():
        if reason is not None:
            lacking = re.sub(r", the operands are on the CPU;.*", "; torch can use none here", reason)
            rows.append((name, f"does not work here: {lacking.removeprefix(f'{name}: ')}"))
        elif name in by_name:
            rows.append((name, f"works, where it is asked for: target={name!r}"))
        else:
            rows.append((name, f"works; the default for operands on {defaults[name]}" if name in defaults else "works"))
    return rows


def small_call(target: str) -> str:
    """What became of a small causal call, against the reference in float64; its kernels are kept nowhere."""
    import torch

    found = target_named(target)
    on_cpu = found.serves == "cpu" or found.interprets or not torch.cuda.is_available()
    dtype = torch.float32 if on_cpu else torch.float16
    query, key, value = torch.randn(3, 1, 2, 64, 64, dtype=dtype, device="cpu" if on_cpu else "cuda")
    variant, begun = Attention(mask=parse("kv_pos <= q_pos"), name="doctor"), time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, settings(cache_dir=folder):
            out = variant(query, key, value, target=target)
            seconds = time.perf_counter() - begun
        exact = variant.reference(query.double(), key.double(), value.double())
        return f"right to {float((out.double() - exact).abs().max()):.1g}, {seconds:.1f} s with generating"
    except Exception as error:  # compilers and drivers raise what they like, and that is the answer
        return f"fails with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
