"""Branches of generated text that its own constants decide: what is never run is left out.

    decided(text)    `FAR = gl.constexpr(False)` ... `if FAR: a` `else: b`  -->  b

Templates print a switch once, as a constant with its meaning beside it, and test it where it matters. A reader of one
variant sees neither the switch nor what it switches off. Lines that stay are as they were, but for their indentation.
"""

from __future__ import annotations

import ast
import contextlib
import re
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

_SWITCH = re.compile(r"^([A-Z][A-Z0-9_]*) = (?:gl|tl)\.constexpr\((True|False)\)(?:  #.*)?$", re.MULTILINE)
_BEGINS = re.compile(r"\n\n+(?=[@A-Za-z_])(?!else\b|elif\b)")  # a statement of a module, behind blank lines
_LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
_ROUNDS = 16  # branches within branches, at most
Switches: TypeAlias = "dict[str, bool]"


class _Edit(NamedTuple):
    """Lines first to last (from 1), and what stands there instead."""

    first: int
    last: int
    lines: list[str]


def decided(text: str) -> str:
    """The text without switches, and without what they switch off.

    >>> print(decided("A = gl.constexpr(True)\\nif A and x:\\n    f()\\nif not A:\\n    g()\\nelse:\\n    h()"))
    if x:
        f()
    h()
    """
    switches = {name: value == "True" for name, value in _SWITCH.findall(text)}
    if not switches:
        return text
    named = re.compile(rf"\b(?:{'|'.join(switches)})\b")
    for parts in (_statements(text), [text]):  # the whole where what looks like a statement is in a string
        with contextlib.suppress(SyntaxError):  # in the whole: `generate` says so, and shows the lines
            return "".join(_without_unused([_settled(p, switches, named) for p in parts], switches, named))
    return text


def _statements(text: str) -> list[str]:
    """The statements of a module, those between blank lines together."""
    cuts = [found.end() for found in _BEGINS.finditer(text)]
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def _lines(node: ast.stmt) -> tuple[int, int]:
    """The first and the last one of a statement, with its decorators."""
    above = [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
    return min([node.lineno, *above]), node.end_lineno or node.lineno


def _settled(text: str, switches: Switches, named: re.Pattern[str]) -> str:
    """What stays of a statement of a module."""
    for _ in range(_ROUNDS):
        if not named.search(text) or (changed := _once(text, switches, named)) == text:
            break
        text = changed
    return text


def _once(text: str, switches: Switches, named: re.Pattern[str]) -> str:
    """Every innermost branch that is decided, and every test of which a part is."""
    lines = text.split("\n")
    naming = [0, *accumulate(named.search(line) is not None for line in lines)]  # lines before this one that name any
    edits = [edit for node in _walk(ast.parse(text), naming) if (edit := _edit_of(node, lines, switches)) is not None]
    last = len(lines) + 1
    for edit in sorted(edits, key=lambda e: (e.first, -e.last), reverse=True):
        if edit.last < last:  # else it lies around one that was made: the next round has it
            lines[edit.first - 1 : edit.last] = edit.lines
            last = edit.first
    return "\n".join(lines)


def _walk(tree: ast.AST, naming: list[int]) -> list[ast.AST]:
    """As ast.walk, without statements that name no switch: most of them. naming: lines that do, before each line."""
    nodes = [tree]
    for node in nodes:  # which grows
        for field in node._fields:
            value = getattr(node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if not isinstance(child, ast.AST) or isinstance(child, _LEAVES):
                    continue
                first, last = _lines(child) if isinstance(child, ast.stmt) else (1, len(naming) - 1)
                if naming[last] > naming[first - 1]:
                    nodes.append(child)
    return nodes


def _edit_of(node: ast.AST, lines: list[str], switches: Switches) -> _Edit | None:
    if isinstance(node, ast.If):
        value = _value(node.test, switches)
        return None if value is None else _branch(node, value, lines)
    if isinstance(node, (ast.IfExp, ast.BoolOp)) and node.lineno == node.end_lineno:
        shorter = _shorter(node, switches)
        return None if shorter is None else _in_line(node, shorter, lines)
    return None


def _value(test: ast.expr, switches: Switches) -> bool | None:
    """What an expression of switches is; None where it is not decided."""
    match test:
        case ast.Name(id=name):
            return switches.get(name)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _value(operand, switches)
            return None if value is None else not value
        case ast.BoolOp(op=op, values=values):
            found, ends = [_value(v, switches) for v in values], isinstance(op, ast.Or)
            return ends if ends in found else None if None in found else not ends
    return None


def _shorter(node: ast.IfExp | ast.BoolOp, switches: Switches) -> ast.expr | None:
    """The same expression without what is decided; None where all of it is open, or stands in a branch's test."""
    if isinstance(node, ast.IfExp):
        value = _value(node.test, switches)
        return None if value is None else node.body if value else node.orelse
    if _value(node, switches) is not None:
        return None
    left = [v for v in node.values if _value(v, switches) is None]
    if len(left) == len(node.values):
        return None
    return left[0] if len(left) == 1 else ast.BoolOp(node.op, left)


def _in_line(node: ast.expr, shorter: ast.expr, lines: list[str]) -> _Edit:
    line = lines[node.lineno - 1].encode()  # columns count bytes
    inside, after = ast.unparse(shorter), line[node.end_col_offset :].decode()
    before = line[: node.col_offset].decode()
    if before.endswith("(") and after.startswith(")") and not re.search(r"\w\($", before):
        before, after = before[:-1], after[1:]
        inside = inside if isinstance(shorter, (ast.Name, ast.Call, ast.Subscript, ast.Attribute)) else f"({inside})"
    return _Edit(node.lineno, node.lineno, [before + inside + after])


def _branch(node: ast.If, value: bool, lines: list[str]) -> _Edit | None:
    """The branch that is run in place of the whole."""
    if any("\n" in n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)):
        return None
    first, last = node.lineno, node.end_lineno or node.lineno
    begins = (node.test.end_lineno or first) + 1
    follows = _else_of(node, lines)
    indent = re.match(r" *", lines[first - 1])[0]  # type: ignore[index]
    body = lines[begins - 1 : (follows or last + 1) - 1]
    body = [*_why(lines[first - 1], indent), *body]
    if lines[first - 1].lstrip().startswith("elif"):
        if value:
            return _Edit(first, last, [f"{indent}else:", *body])
        return _Edit(first, (follows or last + 1) - 1, [])
    if value:
        return _Edit(first, last, _outdented(body))
    if follows is None:
        return _Edit(first, last, [])
    if lines[follows - 1].lstrip().startswith("elif"):
        return _Edit(first, follows, [lines[follows - 1].replace("elif", "if", 1)])
    return _Edit(first, last, _outdented([*_why(lines[follows - 1], indent), *lines[follows:last]]))


def _why(line: str, indent: str) -> list[str]:
    """The comment behind a test, for the branch that stays."""
    found = re.search(r":  (# .*)$", line)
    return [f"{indent}    {found[1]}"] if found else []


def _else_of(node: ast.If, lines: list[str]) -> int | None:
    """The line of its `else:` or `elif`, if it has one."""
    if not node.orelse:
        return None
    indent = re.match(r" *", lines[node.lineno - 1])[0]  # type: ignore[index]
    last = node.body[-1].end_lineno or node.lineno
    return next(n for n in range(last + 1, len(lines) + 1) if re.match(rf"{indent}(else:|elif )", lines[n - 1]))


def _outdented(lines: list[str]) -> list[str]:
    return [line.removeprefix("    ") for line in lines]


def _without_unused(parts: list[str], switches: Switches, named: re.Pattern[str]) -> list[str]:
    """Without the switches that nothing reads any more."""
    read = set[str]()
    for part in parts:
        if named.search("\n".join(line for line in part.split("\n") if not _SWITCH.match(line))):
            names = (node for node in ast.walk(ast.parse(part)) if isinstance(node, ast.Name))
            read |= {name.id for name in names if isinstance(name.ctx, ast.Load)}
    unused = switches.keys() - read

    def stays(line: str) -> bool:
        return not ((found := _SWITCH.match(line)) and found[1] in unused)

    return ["\n".join(filter(stays, part.split("\n"))) for part in parts]
