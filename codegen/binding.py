"""From a call to the arguments of its kernels, by the names that the kernels give them.

A kernel's parameters are bound by name, through one vocabulary: a new call option that kernels read is one more row in
it. Because a launch must cost the host little, the vocabulary is not interpreted at each call: for each set of kernels
it is turned once into a small Python function, whose text `Packer.source` shows.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..ir.errors import InternalError

# Sizes of a call: what a name stands for, over other names. Tensors are [batch, heads, length, dim].
SIZES = {
    "batches": "query.shape[0]",
    "heads": "query.shape[1]",
    "q_len": "query.shape[2]",
    "kv_heads": "key.shape[1]",
    "kv_len": "key.shape[2]",
    "group": "heads // kv_heads",
    "batch_heads": "batches * heads",
    "batch_kv_heads": "batches * kv_heads",
    "padded_len": "lse2.shape[2]",
    "row_units": "matrix.shape[3] // 16",
    "q_offset": "given['q_offset']",
}
_STRIDE = re.compile(r"(\w+)_s([bhl])")
OPERAND_STRIDE = re.compile(r"(arg_\w+)_s(\d)")
_GROUP = re.compile(r"group(\d+)")
_NAME = re.compile(r"(?<![\w.'\"])([a-z_]\w*)")
_files = count()


@dataclass(frozen=True)
class Binding:
    """One kernel of a module, and what its arguments are."""

    name: str
    parameters: Sequence[str]  # run-time parameters, in order
    programs: str  # size of the grid, over names and constants
    constants: Mapping[str, object] = field(default_factory=dict)  # constexpr parameters, in order
    renamed: Mapping[str, str] = field(default_factory=dict)  # parameter -> the name that the call has for it


class Packer:
    """A function of the given tensors that returns, for each kernel, (programs, arguments).

    tensors, numbers: names of what a call hands over.
    absent: names of tensors that kernels know and this kind of call does not have.
    extra: more rows for the vocabulary. pointers: addresses in place of tensors, as compiled kernels take them.
    ranks: number of dimensions of each tensor operand, by `arg_<name>`.
    """

    def __init__(
        self, bindings: Sequence[Binding], tensors: Iterable[str], numbers: Iterable[str], *, absent: Iterable[str] = (),
        extra: Mapping[str, str] | None = None, ranks: Mapping[str, int] | None = None, pointers: bool = True,
        tools: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self._bindings, self._tensors, self._numbers = bindings, frozenset(tensors), frozenset(numbers)
        self._absent = frozenset(absent)
        self._extra, self._ranks, self._pointers = dict(extra or {}), dict(ranks or {}), pointers
        self._tools = dict(tools or {})
        self._rows = {**SIZES, **self._extra}
        self._lines: dict[str, str] = {}  # name -> the line that makes it, in order
        self.source = self._write()
        self.pack = _function(self.source, "pack", dict(self._tools))

    def of_tensors(self) -> Packer:
        """The same with tensors in place of their addresses, for whoever wants their dtypes."""
        return Packer(
            self._bindings, self._tensors, self._numbers, absent=self._absent, extra=self._extra, ranks=self._ranks, pointers=False,
            tools=self._tools,
        )  # fmt: skip

    # -- text ----------------------------------------------------------------------------------------------------------
    def _write(self) -> str:
        results = [f"        ({self._expression(b.programs)}, ({self._arguments(b)}))," for b in self._bindings]
        body = [f"    {line}" for line in dict.fromkeys(self._lines.values())]
        return "\n".join(["def pack(given):", *body, "    return (", *results, "    )"]) + "\n"

    def _arguments(self, binding: Binding) -> str:
        values = [self._argument(binding.renamed.get(p, p)) for p in binding.parameters]
        return ", ".join([*values, *map(repr, binding.constants.values()), ""])

    def _argument(self, name: str) -> str:
        if name in self._absent:
            return "None"
        self._need(name)
        return f"{name}.data_ptr()" if name in self._tensors and self._pointers else name

    def _expression(self, text: str) -> str:
        for name in _NAME.findall(text):
            if name in self._rows or name in self._tensors or _STRIDE.fullmatch(name) or _GROUP.fullmatch(name):
                self._need(name)
        return text

    def _need(self, name: str) -> None:
        """Make sure that a line makes this name before it is used."""
        if name in self._lines:
            return
        if name in self._rows:
            value = self._expression(self._rows[name])
            self._lines[name] = f"{name} = {value}"
        elif name in self._tensors | self._numbers:
            self._lines[name] = f"{name} = given[{name!r}]"
        elif found := OPERAND_STRIDE.fullmatch(name):
            self._need(found[1])
            rank = self._ranks[found[1]]
            self._lines[name] = f"{', '.join(f'{found[1]}_s{d}' for d in range(rank))}, = {found[1]}.stride()"
        elif found := _STRIDE.fullmatch(name):
            self._need(found[1])
            self._lines[name] = f"{found[1]}_sb, {found[1]}_sh, {found[1]}_sl, _ = {found[1]}.stride()"
        elif found := _GROUP.fullmatch(name):
            self._need("heads")
            self._need(f"key{found[1]}")
            self._lines[name] = f"{name} = heads // key{found[1]}.shape[1]"
        else:
            raise InternalError(f"binding: no kernel argument is known by the name {name}")


def _function(source: str, name: str, space: dict[str, object]) -> Callable[..., Any]:
    """The function that the text defines, with its lines where tracebacks look for them."""
    file = f"<weft binding {next(_files)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), space)
    return space[name]  # type: ignore[return-value]


def alignment(tensors: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[bool, int]]:
    """A function of the given tensors [B, H, rows, D]: (is every address and stride a multiple of 16 bytes, the longest
    stride of a row in elements)."""
    lines = ["def alignment(given):"]
    for name in tensors:
        lines += [f"    {name} = given[{name!r}]", f"    {name}_sb, {name}_sh, {name}_sl, _ = {name}.stride()"]
    addresses = " | ".join(f"{name}.data_ptr()" for name in tensors)
    strides = " | ".join(f"{name}_s{axis}" for name in tensors for axis in "bhl")
    rows = ", ".join(f"{name}_sl" for name in tensors)
    lines += [
        f"    bits = {addresses} | ({strides}) * {tensors[0]}.element_size()",
        f"    return bits & 15 == 0, max({rows}{', 0' if len(tensors) == 1 else ''})",
    ]
    return _function("\n".join(lines) + "\n", "alignment", {})
