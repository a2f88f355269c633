"""Rooms import upwards only, nothing goes in a circle, and what is imported late says why."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import weft

ROOT = Path(__file__).parents[2]
# from the bottom up; a room imports itself and what comes before it
ROOMS = ("ir", "compiler.analysis", "compiler.planning", "codegen", "runtime", "")
FOLDERS = {"api": "", "ir": "ir", "compiler": "compiler", "codegen": "codegen", "runtime": "runtime"}


def modules() -> dict[str, Path]:
    """Every module of the package, by its name inside it."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*([package] if package else []), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


@cache
def imports_of(name: str) -> list[tuple[str, bool, str]]:
    """(module, inside a function?, the line) of what a module imports of this package; type checking aside."""
    path = MODULES[name]
    text = path.read_text()
    lines = text.splitlines()
    is_package = path.name == "__init__.py"
    package = name.split(".") if is_package and name else name.split(".")[:-1]
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{target}.{alias.name}" if target else alias.name
                found.append((whole if whole in MODULES else target, inside, lines[node.lineno - 1]))
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(ast.parse(text), False)
    return [(module, inside, line) for module, inside, line in found if module in MODULES]


def room_of(module: str) -> int:
    found = [n for n, room in enumerate(ROOMS) if room and (module == room or module.startswith(f"{room}."))]
    return found[0] if found else len(ROOMS) - 1


def test_imports_go_up_the_rooms_only() -> None:
    wrong = [
        f"{name} imports {module}: {line.strip()}"
        for name in MODULES
        if name != "compiler"
        for module, _, line in imports_of(name)
        if room_of(module) > room_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_top_of_the_package_has_the_face_of_a_call_and_public_modules() -> None:
    """What is internal lies in packages that say what they are."""
    top = {name.partition(".")[0] for name in MODULES} - {room.partition(".")[0] for room in ROOMS}
    face = {"__main__", "attention", "latent", "reference", "installed"}
    internal = {"calls", "plans", "tools"}
    public = {name for name in weft.__all__ if isinstance(getattr(weft, name), ModuleType)}
    assert top == {*face, *internal, *public, "buckets"}  # whose one function is weft.bucket
    assert all((ROOT / "api" / name / "__init__.py").is_file() for name in internal)


def test_an_import_inside_a_function_says_that_it_is_lazy() -> None:
    wrong = [
        f"{name} imports {module} inside a function: {line.strip()}"
        for name in MODULES
        for module, inside, line in imports_of(name)
        if inside and "# lazy: " not in line
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_goes_in_a_circle() -> None:
    """Late imports count: a circle through a function is a circle."""
    edges = {name: {m for m, _, _ in imports_of(name) if m != name} for name in MODULES}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for target in sorted(edges[name]):
            walk(target, (*path, name))
        done.add(name)

    for name in sorted(MODULES):
        walk(name, ())


def test_ir_knows_torch_in_the_reference_only() -> None:
    """And in the random numbers of dropout, which are a part of it."""
    for path in (ROOT / "ir").glob("*.py"):
        imports = re.findall(r"^ *(?:import|from) (torch|sympy|triton)\b", path.read_text(), re.MULTILINE)
        assert set(imports) <= ({"torch"} if path.name in ("reference.py", "philox.py") else set()), path.name


def test_sympy_is_known_at_the_border_and_where_formulas_are_printed() -> None:
    known = {"symbolic.py", "formulas.py"}
    for folder in ("compiler", "codegen", "runtime", "api"):
        for path in (ROOT / folder).rglob("*.py"):
            found = re.search(r"^ *(?:import|from) sympy\b", path.read_text(), re.MULTILINE)
            assert not found or path.name in known, path


def test_private_names_of_torch_stand_in_one_module() -> None:
    for folder in ("ir", "compiler", "codegen", "runtime", "api"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "torch_private.py":
                assert not re.search(r"\btorch\._|_dynamo_marked", path.read_text()), path
