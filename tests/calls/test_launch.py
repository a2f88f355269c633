"""How launchers are put together: parts that know little of each other, and buffers that are written once."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.compiler.planning.buffer import ALWAYS, Buffer

pytest.importorskip("triton")
from weft.codegen.launch.binding import Binding, Packer, Texts, direct, evaluating
from weft.codegen.launch.buffers import ALLOCATING, PLACING, ROOMS, apart, in_rooms, place_text
from weft.codegen.launch.job import KernelLaunch, Mode, Part
from weft.codegen.launch.launcher import KernelLauncher
from weft.ir.errors import InternalError

CODEGEN = Path(__file__).parents[2] / "codegen"
LAUNCHERS = [*(CODEGEN / "launch").glob("*.py"), *(CODEGEN / "targets").rglob("*launcher.py")]
LAUNCHERS += (CODEGEN / "targets").glob("*/parts/*.py")
MODE = Mode(True, False, True, 64)


def trees() -> dict[str, ast.Module]:
    """By path from the folder of code generation, as modules are named."""
    return {
        ".".join(path.relative_to(CODEGEN).with_suffix("").parts): ast.parse(path.read_text()) for path in LAUNCHERS
    }


def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


# -- structure ---------------------------------------------------------------------------------------------------------
def test_a_class_that_is_derived_adds_to_records_and_hooks_alone() -> None:
    """No class that does something is derived from another one that does: parts are lists of hooks."""
    found, hooks = classes(), {"Part", "OwnPart", "SummingPart"}
    for name, node in found.items():
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in found]
        assert set(bases) <= hooks or name.endswith("Box"), f"{name} is derived from {bases}"
    for name in hooks:
        assert not any(isinstance(x, ast.Assign | ast.AnnAssign) for x in found[name].body), f"{name} has a state"


def test_what_a_class_reads_of_itself_it_has() -> None:
    found = classes()
    planned = ast.parse((CODEGEN.parent / "compiler" / "planning" / "by_distance.py").read_text())
    known = found | {node.name: node for node in planned.body if isinstance(node, ast.ClassDef)}
    for name, node in found.items():
        own = [node, *(known[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in known)]
        has = {x.name for each in own for x in each.body if isinstance(x, ast.FunctionDef)}
        read = set()
        for each in own:
            has |= {x.target.id for x in each.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
            has |= {
                t.id for x in each.body if isinstance(x, ast.Assign) for t in ast.walk(x) if isinstance(t, ast.Name)
            }
            for x in ast.walk(each):
                if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == "self":
                    (read if isinstance(x.ctx, ast.Load) else has).add(x.attr)
        is_builtin = any(
            isinstance(b, ast.Subscript) or getattr(b, "attr", "") == "NodeTransformer" for b in node.bases
        )
        assert is_builtin or read <= has | set(dir(object)), f"{name} reads {sorted(read - has)}"


def test_files_of_launches_import_no_circle() -> None:
    """Nor for the sake of types."""
    edges: dict[str, set[str]] = {}
    for name, tree in trees().items():
        nodes = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and 0 < x.level <= name.count(".") + 1]
        folders = name.split(".")
        edges[name] = {".".join([*folders[: -x.level], x.module or ""]) for x in nodes} & trees().keys()

    assert "launch.job" in edges["launch.launcher"] and "targets.triton.parts.sums" in edges["targets.hopper.launcher"]

    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        for other in () if name in done else edges[name]:
            walk(other, (*path, name))
        done.add(name)

    for name in edges:
        walk(name, ())


def test_functions_of_launches_are_short() -> None:
    branching = (ast.If, ast.IfExp, ast.For, ast.While, ast.comprehension, ast.ExceptHandler, ast.match_case)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                branches = sum(isinstance(x, branching) for x in ast.walk(node))
                branches += sum(len(x.values) - 1 for x in ast.walk(node) if isinstance(x, ast.BoolOp))
                assert branches <= 20, f"{file}: {node.name} has {branches} branches"


# -- parts -------------------------------------------------------------------------------------------------------------
class _Launching(Part):
    def launch(self, kernel: Any, mode: Mode) -> KernelLaunch | None:
        return KernelLaunch("1", {}, {"ROWS": 4}) if kernel.name == "mine" else None


def bound(parts: list[Part], constants: dict[str, object], name: str = "mine") -> Binding:
    """The binding of a kernel that has these constants, with their defaults."""
    launcher: Any = KernelLauncher.__new__(KernelLauncher)
    device = SimpleNamespace(parameters_of=lambda function: (["q_len"], constants))
    signature = SimpleNamespace(offset="number")
    launcher.job = SimpleNamespace(device=device, signature=signature, blocks=lambda name, mode: {"BLOCK_Q": 16})
    launcher.parts, launcher._function = parts, lambda name: None
    return launcher._bound(SimpleNamespace(name=name, kernel=SimpleNamespace(name=name, axis="kv")), MODE)[0]


def test_a_kernel_belongs_to_one_part() -> None:
    assert bound([_Launching(), Part()], {"BLOCK_Q": 0, "ROWS": 0}).constants == {"BLOCK_Q": 16, "ROWS": 4}
    for parts in ([Part()], [_Launching(), _Launching()]):
        with pytest.raises(InternalError, match=f"one part of the launcher to launch it, got {len(parts) - 1 and 2}"):
            bound(parts, {})


def test_constants_of_one_kernel_are_not_handed_to_another() -> None:
    """One that no part knows is said, and not left to a compilation."""
    from inspect import Parameter

    class Other(Part):
        def launch(self, kernel: Any, mode: Mode) -> KernelLaunch | None:
            return KernelLaunch("1", {}) if kernel.name == "other" else None

    with pytest.raises(InternalError, match="other: no part of its launcher knows the constants ROWS"):
        bound([_Launching(), Other()], {"ROWS": Parameter.empty}, "other")


# -- buffers -----------------------------------------------------------------------------------------------------------
BUFFERS = [
    Buffer("flags", ("batches", "heads"), "uint8"),
    Buffer("counts", ("batches", "2"), "int32", ALWAYS),
    Buffer("rows", ("batches", "heads", "q_len + 3")),
    Buffer("stored", ("batches", "q_len"), fill="q_len > 5"),
    Buffer("ends", ("2 * heads", "q_len"), "int64", when="q_len > 5"),
]


def allocated(text: str, query: torch.Tensor, buffers: list[Buffer]) -> dict[str, Any]:
    """What the direct way makes of these buffers, by name, on memory that holds ones."""

    def empty(size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, strides, dtype=dtype).fill_(1)

    names = [*text.replace(",", " ").split()]
    packer = Packer({"query": "call", "lse": "call"}, {"query", "lse", *ROOMS})
    tools = {**ALLOCATING, "empty": empty, "current_stream": lambda device: 0, "device": 0}
    made = in_rooms(buffers) if buffers and buffers[0].name != "own" else apart(buffers[0])
    texts = Texts("call", [], ["q_len > 0"], made, f"({', '.join(names)},)")
    way = direct(packer, [], [], texts, tools, lambda name, meta: ("", {}))
    return dict(zip(names, way.function()(query)))


@pytest.mark.parametrize("q_len", [4, 9])
def test_buffers_of_the_direct_way_lie_apart_and_are_as_large_as_their_tensors(q_len: int) -> None:
    query = torch.zeros(2, 3, q_len, 16)
    given = evaluating(Packer({"query": "given['query']"}, {"query"}), [*map(place_text, BUFFERS)], dict(PLACING))
    places = dict(zip([b.name for b in BUFFERS], given({"query": query})))
    found = allocated("flags counts rows stored ends room zeros", query, BUFFERS)
    spans = []
    for name, place in places.items():
        size = torch.Size(place.size).numel() * place.dtype.itemsize
        room = found["zeros" if name in ("counts", "stored") else "room"]
        first = found[name] - room.data_ptr()
        is_used = name != "ends" or q_len > 5
        assert first % 128 == 0 and (not is_used or first + size <= room.numel() * 4)
        spans += [(found[name], found[name] + size)] if is_used else []
        floats = room[first // 4 : (first + size) // 4]
        if name in ("counts", "stored"):
            assert (place.fill == 0.0) == (not floats.any()) == (name == "counts" or q_len > 5)
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert places["ends"].size == ((6, 9) if q_len > 5 else (1, 1))
    assert places["rows"].stride == (3 * (q_len + 3), q_len + 3, 1) and places["rows"].fill is None


def test_nothing_is_allocated_where_no_buffer_is_used() -> None:
    query = torch.zeros(2, 3, 4, 16)
    assert allocated("room", query, [BUFFERS[-1]])["room"] is query
    assert allocated("room", torch.zeros(2, 3, 9, 16), [BUFFERS[-1]])["room"].numel() * 4 == 512


@pytest.mark.parametrize("q_len", [4, 9])
def test_a_buffer_apart_is_the_tensor_of_its_place(q_len: int) -> None:
    query = torch.zeros(2, 3, q_len, 16)
    buffer = Buffer("own", ("batches", "q_len"), "query.dtype", "q_len > 5", pitch="16")
    found = allocated("own own_size own_strides", query, [buffer])
    (place,) = evaluating(Packer({"query": "given['query']"}, {"query"}), [place_text(buffer)], dict(PLACING))(
        {"query": query}
    )
    assert tuple(found["own"].shape) == found["own_size"] == place.size == (2, q_len)
    assert found["own"].stride() == found["own_strides"] == place.stride == (16, 1)
    assert found["own"].dtype == place.dtype and bool(found["own"].any()) == (place.fill is None) == (q_len <= 5)


def test_two_buffers_cannot_begin_as_zeros_in_some_calls() -> None:
    with pytest.raises(InternalError, match="one buffer that begins as zeros or not, got"):
        in_rooms([Buffer("a", ("q_len",), fill="q_len > 5"), Buffer("b", ("q_len",), fill="q_len > 6")])
