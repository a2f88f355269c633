"""From `Attention.__call__` to a launch: at most 12 stays, and no climb back up.

A stay is a change of file, in the order in which functions are entered. A climb is a function of a lower room that
enters one of an upper room; a record that is read (runtime/call.py) is none. The first call of a kind plans and
generates besides: there the functions count that are open when a kernel is launched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import weft
from weft import kv_pos, masks, q_pos

pytest.importorskip("triton")
from weft.codegen.targets.cpu.launcher import CpuLauncher

from . import written_launches
from .written_launches import ALIBI, CAUSAL, Launches, leaves, normal, written

TOP = Path(weft.__file__).resolve().parents[1]
ROOMS = ("ir", "compiler/analysis", "compiler/planning", "codegen", "runtime", "api")  # from the bottom up
MOST_STAYS, MOST_PARAMETERS = 12, 7
GENERATED = "<weft binding"  # functions that codegen/launch wrote
_files: dict[str, tuple[int, str] | None] = {}


def place(frame: FrameType) -> tuple[int, str] | None:
    """The room and the file of a function of this package; None for others."""
    name = frame.f_code.co_filename
    if name not in _files:
        path = Path(name).resolve()
        inside = str(path.relative_to(TOP)) if path.is_relative_to(TOP) else ""
        found = [(n, inside) for n, room in enumerate(ROOMS) if inside.startswith(f"{room}/")]
        _files[name] = found[0] if found else (ROOMS.index("codegen"), name) if name.startswith(GENERATED) else None
    return _files[name]


class Walk:
    """Functions that were entered, and those that were open when something was launched."""

    def __init__(self) -> None:
        self.entered: list[str] = []  # files, up to that of the function `launch` of a fast way
        self.launches = False
        self.climbs: list[str] = []
        self.wide: list[str] = []  # functions with too many parameters
        self.to_launches: list[list[str]] = []

    def enter(self, frame: FrameType, event: str, _: Any) -> None:
        entered = event == "call" and not frame.f_code.co_name.endswith("comp>")  # since Python 3.12 no function
        here = place(frame) if entered else None
        if here is None:
            return
        if not self.launches:
            self.entered.append(here[1])
        self.launches = self.launches or frame.f_code.co_name == "launch"
        self._note_parameters(frame, here[1])
        before = next((found for f in _callers(frame) if (found := place(f)) is not None), None)
        if before is not None and before[0] < here[0] and here[1] != "runtime/call.py":
            self.climbs.append(f"{before[1]} -> {here[1]}: {frame.f_code.co_name}")

    def launched(self) -> None:
        """Note what is open now, from the call on."""
        found = [(frame, at) for frame in _callers(sys._getframe()) if (at := place(frame)) is not None][::-1]
        rooms = [room for _, (room, _) in found]
        names = [name for _, (_, name) in found]
        self.climbs += [f"{names[n]} -> {names[n + 1]}" for n in range(len(rooms) - 1) if rooms[n] < rooms[n + 1]]
        for frame, (_, name) in found:
            self._note_parameters(frame, name)
        self.to_launches.append(names)

    def _note_parameters(self, frame: FrameType, file: str) -> None:
        code = frame.f_code
        if file.startswith(("runtime/", "api/")) and code.co_name not in ("__init__", "<lambda>"):
            number = code.co_argcount + code.co_kwonlyargcount
            own = [n for n in code.co_varnames[:number] if n not in ("self", "cls")]
            self.wide += [f"{file}: {code.co_name}"] if len(own) > MOST_PARAMETERS else []


def _callers(frame: FrameType) -> Iterator[FrameType]:
    back = frame.f_back
    while back is not None:
        yield back
        back = back.f_back


def stays(files: list[str]) -> list[str]:
    """Files in the order in which they are come to, as often as that is."""
    return [name for n, name in enumerate(files) if n == 0 or files[n - 1] != name]


@contextmanager
def walking() -> Iterator[Walk]:
    walk = Walk()
    sys.setprofile(walk.enter)
    try:
        yield walk
    finally:
        sys.setprofile(None)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return written(monkeypatch)


def check(walk: Walk) -> None:
    assert walk.launches and len(stays(walk.entered)) <= MOST_STAYS, stays(walk.entered)
    assert walk.climbs == [] and walk.wide == []


def both(variant: weft.Attention, tensors: list[torch.Tensor], given: dict[str, Any]) -> tuple[Walk, Walk]:
    """Walks of a forward and of its backward, where both repeat."""
    dout = torch.ones_like(tensors[0])
    for _ in range(6):
        torch.autograd.grad(variant(*tensors, **given), tensors, dout)
    with walking() as forward:
        out = variant(*tensors, **given)
    with walking() as backward:
        torch.autograd.grad(out, tensors, dout)
    return forward, backward


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("variant", [CAUSAL, ALIBI], ids=["causal", "alibi"])
def test_calls_that_repeat(variant: weft.Attention, target: str, launches: Launches) -> None:
    variant = variant.replace(name=f"way_{variant.name}_{target}")
    variant._variant.forget()
    tensors = leaves([normal(2, heads, 64, 64) for heads in (4, 2, 2)])
    given = {"slopes": torch.rand(4)} if variant.canonical.parameters else {}
    for walk in both(variant, tensors, {"target": target, **given}):
        check(walk)
        assert walk.entered[-1].startswith(GENERATED)


def test_calls_that_repeat_on_a_cpu() -> None:
    window = weft.scalar("window", int)
    for variant, given in (
        (weft.Attention(mask=masks.causal, name="way_cpu"), {}),
        (weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="way_cpu_window"), {"window": 50}),
    ):
        with torch.no_grad():
            tensors = [torch.randn(1, 2, n, 32) for n in (1, 40, 40)]
            for _ in range(6):
                variant(*tensors, **given)
            with walking() as walk:
                variant(*tensors, **given)
        check(walk)
        assert walk.entered[-1].startswith("codegen/launch/fast/")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("target", ["cpu", "hopper"])
def test_first_calls_come_to_a_launch_in_as_few(target: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target != "cpu":
        written(monkeypatch)
    variant = weft.Attention(mask=masks.causal & (q_pos - kv_pos < 9), name=f"way_first_{target}_{direction}")
    variant._variant.forget()
    tensors = leaves([normal(2, heads, 64, 64) for heads in (4, 2, 2)])
    walk = Walk()
    _tell(monkeypatch, walk.launched)
    out, _ = variant(*tensors, target=target, return_lse=True)  # which torch itself does not record
    if direction == "backward":
        walk.to_launches.clear()
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert walk.to_launches and walk.climbs == [] and walk.wide == []
    for files in walk.to_launches:
        assert len(stays(files)) <= MOST_STAYS, stays(files)


def _tell(monkeypatch: pytest.MonkeyPatch, launched: Callable[[], None]) -> None:
    """Have this called at every launch of the longer way."""
    for kind in (written_launches._Run, CpuLauncher):
        name = "__call__" if kind is written_launches._Run else "_run"
        before = getattr(kind, name)

        def told(self: Any, *given: Any, before: Any = before) -> Any:
            launched()
            return before(self, *given)

        monkeypatch.setattr(kind, name, told)


def test_nothing_on_the_way_takes_a_tuple_apart_by_number() -> None:
    """Sizes of a tensor are no such tuple."""
    import ast

    found = []
    for path in (*sorted((TOP / "runtime/ops").glob("*.py")), *sorted((TOP / "runtime/run").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
                continue
            number = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
            is_number = isinstance(number, ast.Constant) and isinstance(number.value, int)
            if is_number and not ast.unparse(node.value).endswith(("shape", "sizes", "lse")):
                found.append(f"{path.relative_to(TOP)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_the_limits_of_parameters_are_those_of_functions() -> None:
    """What is looked at above: methods and functions, with keywords."""

    def eight(a: int, b: int, c: int, d: int, e: int, f: int, g: int, *, h: int) -> FrameType:
        frame = inspect.currentframe()
        assert frame is not None
        return frame

    walk = Walk()
    walk._note_parameters(eight(1, 2, 3, 4, 5, 6, 7, h=8), "runtime/run/variant.py")
    assert walk.wide == ["runtime/run/variant.py: eight"]
