"""Calls that repeat: what follows from the sizes, strides and numbers of a call is found once.

The direct way of a call (binding.py) is one function. Here its lines are divided. A factory takes a call, and computes
what neither addresses nor the values of scalars change. It gives two functions: `fits`, whether another call is like
it in all that was made use of, and `launch`, which does the rest for such a call:

    def repeated(call):                             def fits(call):
        query = call.query                              return call.choices is options and alike(call.query, ...)
        batches, heads, q_len, q_dim = query.shape  def launch(call):
        ...                                             query = call.query
        settled_0 = (batches, heads, q_len)             at_query = query.data_ptr()
                                                        lse = empty(settled_0, ...)

Nothing is asked less than by the way itself. Conditions on sizes and strides held for the call that the factory took.
`fits` asks torch in one step for all tensors whether type, device, dtype, sizes, strides and views are the same.
Where a size is free, as that of a cache that grows, the lines and conditions that depend on it stay in `launch`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import indent
from types import MappingProxyType
from typing import Any, NamedTuple

from ..binding import CURRENT_STREAM, SHAPES, WayText, function
from .ways import Again, Guard

# methods and attributes of a tensor that a guard of it settles, and those of them that follow from its sizes
_SETTLED = frozenset({"shape", "dtype", "stride", "numel", "dim", "get_device", "is_neg", "is_contiguous"})
_OF_SIZES = frozenset({"shape", "numel", "is_contiguous"})
# what differs from call to call, among the tools of a way
_CHANGING = frozenset({"empty", "counter", "is_heard", "current_device", "current_stream"})


class Pin(NamedTuple):
    """What of a call must be as it was: an expression, and how it is compared, `is` or `==`."""

    name: str  # that lines of the way have for it, or a free one
    expression: str
    compared: str = "is"
    of_address: bool = False  # asked where the tensor is known to be one


def repeated(
    way: WayText, tensors: Mapping[str, str], pins: Sequence[Pin], conditions: Iterable[str], guard: Guard,
    free: Mapping[str, int] = MappingProxyType({}),
) -> Callable[[Any], Again | None]:  # fmt: skip
    """The factory of a way: from a call to what serves all calls like it; None for one that the way turns away.

    tensors: those that the call brings, as expressions by name; what is known of them is settled by a guard.
    conditions: what else must hold, as expressions. free: of tensors that have names for their sizes, a dimension whose
    size may be another one in each call: what follows from it is asked for and computed in each, as by the way itself.
    """
    text = _text(way, tensors, pins, conditions, free)
    return function(text, "repeated", {**way.scope, "guard": guard, "Again": Again})


def _text(
    way: WayText, tensors: Mapping[str, str], pins: Sequence[Pin], conditions: Iterable[str],
    free: Mapping[str, int],
) -> str:  # fmt: skip
    pinned = {pin.name for pin in pins}
    divided = _Divided(way, frozenset(tensors), pinned, free)
    launch = [*way.opening, *(divided.line(line) for line in way.checked)]
    asked = [text for condition in way.conditions if (text := divided.expression(condition)) is not None]
    launch += [f"if not ({' and '.join(asked)}): return None"] if asked else []
    launch += [divided.line(line) for line in way.lines]
    for due in way.due:
        text = divided.expression(due)
        if text is None:
            divided.settled.append(f"if {due}: return None")
        else:
            launch.append(f"if {text}: return None")
    launch += [CURRENT_STREAM, *map(divided.statement, way.launches), f"return {way.returns}"]
    same = {pin: f"{pin.expression} {pin.compared} {pin.name}" for pin in pins}
    fitting = [*(text for pin, text in same.items() if not pin.of_address), *conditions]
    fitting += [f"alike({', '.join(tensors.values())})"]
    fitting += [text for pin, text in same.items() if pin.of_address]
    lines = [
        *way.opening, *way.checked, f"if not ({' and '.join(way.conditions)}): return None",
        *(f"{name} = {expression}" for name, expression in tensors.items() if name != expression),
        *(f"{pin.name} = {pin.expression}" for pin in pins), *divided.settled,
        f"alike = guard({', '.join(tensors)}{_freedom(tensors, free)})",
        f"def fits({way.given}):", *(f"    {line}" for line in way.opening), f"    return {' and '.join(fitting)}",
        f"def launch({way.given}):", *(indent(line, "    ") for line in launch if line), "return Again(fits, launch)",
    ]  # fmt: skip
    return "\n".join([f"def repeated({way.given}):", *(indent(line, "    ") for line in lines)])


def _freedom(tensors: Iterable[str], free: Mapping[str, int]) -> str:
    """What a guard is told of the dimensions of these tensors."""
    return f", free={[free.get(name) for name in tensors]}" if free else ""


class _Divided(ast.NodeTransformer):
    """Lines of a way without what is settled by the sizes, strides and numbers of a call, which `settled` has."""

    def __init__(
        self, way: WayText, tensors: frozenset[str], pinned: set[str], free: Mapping[str, int]
    ) -> None:  # fmt: skip
        self.settled: list[str] = []
        self._tensors, self._pinned, self._checked = tensors, pinned, frozenset(way.checked)
        self._free = free
        tools = {n for n in way.scope if not n.startswith(("kept_", "launch_"))} - _CHANGING
        self._known = tools | pinned | {"int", "min", "max"}
        self._names: dict[str, str] = {}  # of settled expressions

    def line(self, text: str) -> str:
        """An assignment as the function of a repeated call has it; "" for one that is settled."""
        (statement,) = ast.parse(text).body
        assert isinstance(statement, ast.Assign)
        names = {node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)}
        if names <= self._pinned or ast.unparse(statement.targets[0]) == ast.unparse(statement.value):
            return ""
        match statement.value:
            case ast.Attribute(ast.Name(tensor), "shape") if tensor in self._free:
                assert text in self._checked, "there all sizes of the first call have names"
                dimension = self._free[tensor]
                size = SHAPES[tensor][dimension]
                self._known = (self._known | names) - {size}
                return f"{size} = {tensor}.shape[{dimension}]"
        if self._is_settled(statement.value):
            self._known |= names
            self.settled += [] if text in self._checked else [text]
            return ""
        self._known -= names
        statement.value = self.visit(statement.value)
        return ast.unparse(statement)

    def expression(self, text: str) -> str | None:
        """What is left of an expression, or None for nothing."""
        found = ast.parse(text, mode="eval").body
        return None if self._is_settled(found) else f"({ast.unparse(self.visit(found))})"

    def statement(self, text: str) -> str:
        (found,) = ast.parse(text).body
        return ast.unparse(self.visit(found))

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr) or isinstance(node, (ast.Name, ast.Constant, ast.Starred)):
            return self.generic_visit(node)
        if self._is_settled(node):
            text = ast.unparse(node)
            if text not in self._names:
                self._names[text] = f"settled_{len(self._names)}"
                self.settled.append(f"{self._names[text]} = {text}")
            return ast.Name(self._names[text], ast.Load())
        return self._kept(node) or self.generic_visit(node)

    def _kept(self, node: ast.expr) -> ast.expr | None:
        """Descriptors that are kept by address, sizes and strides: the latter are settled, or all but a size."""
        match node:
            case ast.Subscript(ast.Name(kept), ast.Tuple([address, *numbers])) if kept.startswith("kept_"):
                texts, found = [*map(ast.unparse, numbers)], ast.Name(f"of_{kept}", ast.Load())
                free = [n for n, number in enumerate(numbers) if not self._is_settled(number)]
                if not free:
                    self.settled.append(f"of_{kept} = {kept}.of({', '.join(texts)})")
                    return ast.Subscript(found, address, ast.Load())
                if len(free) == 1 and isinstance(numbers[free[0]], ast.Name):
                    self.settled.append(f"of_{kept} = {kept}.along({free[0]}, {', '.join(texts)})")
                    return ast.Call(found, [address, numbers[free[0]]], [])
        return None

    def _is_settled(self, node: ast.AST) -> bool:
        match node:
            case ast.Constant():
                return True
            case ast.Name(name):
                return name in self._known
            case ast.Attribute(ast.Name(tensor), attribute):
                free = attribute in _OF_SIZES and tensor in self._free
                return tensor in self._tensors and attribute in _SETTLED and not free
            case ast.Attribute():
                return False
            case ast.Call(called, arguments, []):
                return self._is_settled(called) and all(map(self._is_settled, arguments))
            case _:
                children = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
                return all(map(self._is_settled, children))
