"""From a call to the arguments of its kernels, by the names that the kernels give them.

A kernel's parameters are bound by name, through one vocabulary: a new call option that kernels read is one more row in
it. Because a launch must cost the host little, the vocabulary is not interpreted at each call: for each set of kernels
it is turned once into a small Python function, whose text stands in tracebacks.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

from ...compiler.planning.sources import KeySource
from ...ir.errors import InternalError

# Sizes of a call: what a name stands for, over other names. Tensors are [batch, heads, length, dim].
SHAPES = {
    "query": ("batches", "heads", "q_len", "q_dim"),
    "key": ("key_batches", "kv_heads", "kv_len", "key_dim"),
    "value": ("value_batches", "value_heads", "value_len", "value_dim"),
    # a rotary key, by the number of the piece that it is of the key's columns
    **{f"key{n}": tuple(f"key{n}_{size}" for size in ("batches", "heads", "len", "dim")) for n in range(1, 9)},
}
SIZES = {
    "group": "heads // kv_heads",
    "batch_heads": "batches * heads",
    "batch_kv_heads": "batches * kv_heads",
}
_EXTENTS = {name: tensor for tensor, names in SHAPES.items() for name in names}
_STRIDE = re.compile(r"(\w+)_s([bhld])")
OPERAND_STRIDE = re.compile(r"s(\d)_(\w+)")  # no operand's own name, which is arg_<name>
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
    launched_if: str = ""  # where it has something to do, over names; "" everywhere


class Launch(NamedTuple):
    """How a kernel is started: function(programs, 1, 1, stream, *fixed, *arguments)."""

    function: Callable[..., object]
    fixed: tuple[object, ...]
    # by the place of a tensor descriptor, for which the function takes several arguments: what the kernel says of it
    described: Mapping[int, Mapping[str, Any]] = MappingProxyType({})


Kept = Callable[[str, Mapping[str, Any]], tuple[str, Mapping[Any, Sequence[object]]]]


class Packer:
    """Text of Python functions that bind kernels: lines that make names, each once and before it is used.

    sources: what a call hands over, as expressions over the function's parameter: `{"query": "given['query']"}`.
    tensors: the names that are tensors; others are numbers. absent: tensors that this kind of call does not have.
    rows: more rows for the vocabulary. ranks: number of dimensions of each tensor operand, by `arg_<name>`.
    pointers: addresses in place of tensors, as compiled kernels take them.
    """

    def __init__(
        self, sources: Mapping[str, str], tensors: Iterable[str], *, absent: Iterable[str] = (),
        rows: Mapping[str, str] | None = None, ranks: Mapping[str, int] | None = None, pointers: bool = True,
    ) -> None:  # fmt: skip
        self._sources, self._tensors, self._absent = dict(sources), frozenset(tensors), frozenset(absent)
        self._rows = {**SIZES, **(rows or {})}
        self._ranks, self._pointers = dict(ranks or {}), pointers
        self._lines: dict[str, str] = {}  # name -> the line that makes it, in order

    @property
    def lines(self) -> list[str]:
        """What was needed so far, in order."""
        return list(dict.fromkeys(self._lines.values()))

    def launch(self, binding: Binding, several: Mapping[int, str] = MappingProxyType({})) -> tuple[str, str]:
        """(programs, arguments) of a kernel, as text. several: names of what stands for more than one argument."""
        values = [
            f"*{several[place]}" if place in several else self._argument(binding.renamed.get(p, p))
            for place, p in enumerate(binding.parameters)
        ]
        return self.expression(binding.programs), ", ".join([*values, *map(repr, binding.constants.values()), ""])

    def _argument(self, name: str) -> str:
        if name in self._absent:
            return "None"
        self.need(name)
        return self.address(name) if name in self._tensors and self._pointers else name

    def address(self, name: str) -> str:
        """The name of a tensor's address, which is asked for once; no operand's, which begins with arg_."""
        self.need(name)
        self._lines.setdefault(f"at_{name}", f"at_{name} = {name}.data_ptr()")
        return f"at_{name}"

    def expression(self, text: str) -> str:
        """The text, with what it names made before."""
        for name in _NAME.findall(text):
            if name.startswith("at_") and name.removeprefix("at_") in self._tensors:
                self.address(name.removeprefix("at_"))
            known = name in self._rows or name in self._sources or name in _EXTENTS
            if known or _STRIDE.fullmatch(name) or _GROUP.fullmatch(name):
                self.need(name)
        return text

    def define(self, name: str, value: str) -> None:
        """Make a name by an expression."""
        self._rows[name] = value
        self.need(name)

    def need(self, name: str) -> None:
        """Make sure that a line makes this name."""
        if name in self._lines:
            return
        if name in _EXTENTS:
            tensor = _EXTENTS[name]
            self.need(tensor)
            self._lines[name] = f"{', '.join(SHAPES[tensor])} = {tensor}.shape"
        elif name in self._rows:
            value = self.expression(self._rows[name])
            self._lines[name] = f"{name} = {value}"
        elif name in self._sources:
            self._lines[name] = f"{name} = {self._sources[name]}"
        elif found := OPERAND_STRIDE.fullmatch(name):
            operand = f"arg_{found[2]}"
            self.need(operand)
            strides = "".join(f"s{d}_{found[2]}, " for d in range(self._ranks[operand]))
            self._lines[name] = f"{strides.strip()} = {operand}.stride()"
        elif found := _STRIDE.fullmatch(name):
            tensor = found[1]
            self.need(tensor)
            strides = f"{tensor}_strides"
            if strides in self._rows:
                self.need(strides)
            else:
                strides = f"{tensor}.stride()"
            self._lines[name] = f"{tensor}_sb, {tensor}_sh, {tensor}_sl, {tensor}_sd = {strides}"
        elif found := _GROUP.fullmatch(name):
            self.need("heads")
            self.need(f"key{found[1]}")
            self._lines[name] = f"{name} = heads // key{found[1]}.shape[1]"
        else:
            raise InternalError(f"binding: no kernel argument is known by the name {name}")


def fitting(absorbed: bool, keys: KeySource, rotary: Sequence[str] = ()) -> list[str]:
    """Conditions that operands of a call fit each other, with something to compute. rotary: keys of their own."""
    value = [] if absorbed else ["key_batches == value_batches", "kv_heads == value_heads", "kv_len == value_len"]
    something = "batches * heads * kv_heads * q_len * kv_len > 0"
    lengths = f"q_len | kv_len <= {2**30}"  # else the slower way looks closely
    width = " + ".join(["key_dim", *(f"{name}_dim" for name in rotary)])
    own = (("batches", "key_batches"), ("heads", "1"), ("len", "kv_len"))
    beside = [f"{name}_{size} == {expected}" for name in rotary for size, expected in own]
    return [something, lengths, *keys.fits, f"q_dim == {width}", "heads % kv_heads == 0", *value, *beside]


def like(
    made: str, name: str, heads: str, rows: str, width: str, make: str = "empty({}, {}, dtype)"
) -> dict[str, str]:  # fmt: skip
    """Expressions of a tensor `made` [batches, heads, rows, width] in the memory order of `name`, and of its strides.

    make: the expression, given its sizes and strides.
    """
    blhd = f"({heads} * {rows} * {width}, {width}, {heads} * {width}, 1)"
    bhld = f"({heads} * {rows} * {width}, {rows} * {width}, {width}, 1)"
    return {
        f"{made}_strides": f"{blhd} if {name}_sh < {name}_sl else {bhld}",
        made: make.format(f"(batches, {heads}, {rows}, {width})", f"{made}_strides"),
    }


def evaluating(
    packer: Packer, expressions: Sequence[str], tools: Mapping[str, object]
) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function of the given tensors that returns what these expressions are."""
    values = [packer.expression(text) for text in expressions]
    body = [f"    {line}" for line in packer.lines]
    lines = ["def evaluate(given):", *body, "    return (", *(f"        {value}," for value in values), "    )"]
    return function("\n".join(lines), "evaluate", tools)


def packing(
    packer: Packer, bindings: Sequence[Binding], tools: Mapping[str, object]
) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the given tensors that returns, for each kernel, (programs, arguments)."""
    launches = [packer.launch(b) for b in bindings]
    results = [f"        ({programs}, ({arguments}))," for programs, arguments in launches]
    body = [f"    {line}" for line in packer.lines]
    return function("\n".join(["def pack(given):", *body, "    return (", *results, "    )"]), "pack", tools)


class WayText(NamedTuple):
    """The direct way of a call, as the parts of one function of `given`."""

    given: str
    opening: Sequence[str]  # lines that take apart what is given
    checked: Sequence[str]  # lines before the conditions
    conditions: Sequence[str]  # expressions that must hold
    lines: Sequence[str]  # what is made
    due: Sequence[str]  # conditions under which a kernel is launched that is not compiled yet
    launches: Sequence[str]
    returns: str
    scope: Mapping[str, object]

    def function(self) -> Callable[..., Any]:
        """Returns None, with nothing done, where a condition does not hold, or a kernel is due that is not compiled."""
        source = [
            f"def direct({self.given}):", *self.opening, *self.checked, f"if not ({' and '.join(self.conditions)}):",
            "    return None", *self.lines, *(f"if {due}: return None" for due in self.due), CURRENT_STREAM,
            *self.launches, f"return {self.returns}",
        ]  # fmt: skip
        return function("\n    ".join(source), "direct", self.scope)


CURRENT_STREAM = "stream = current_stream(device)"


class Texts(NamedTuple):
    """What a direct way says of its calls."""

    given: str  # parameters of the function
    opening: Sequence[str]  # lines that take apart what is given
    conditions: Sequence[str]  # expressions that must hold
    made: Mapping[str, str]  # results and workspace, as expressions
    returns: str


def direct(
    packer: Packer, bindings: Sequence[Binding], launches: Sequence[Launch | None], texts: Texts,
    tools: Mapping[str, object], kept: Kept,
) -> WayText:  # fmt: skip
    """The way that checks conditions, makes results and workspace, launches, and returns results.

    launches: None for a kernel that is not compiled yet. tools: among them current_stream and device. kept: for the
    name of a parameter that is a tensor descriptor and what its kernel says of it, an expression, and what the launch
    is handed by its value.
    """
    for condition in texts.conditions:
        packer.expression(condition)
    checked = packer.lines
    for name, value in texts.made.items():
        packer.define(name, value)
    scope, due, lines = dict(tools), [], []
    for n, (binding, launch) in enumerate(zip(bindings, launches, strict=True)):
        if launch is None:
            due.append(packer.expression(binding.launched_if) or "True")
            continue
        several = {}
        for place, meta in launch.described.items():
            several[place] = f"described_{n}_{place}"
            key, scope[f"kept_{n}_{place}"] = kept(binding.parameters[place], meta)
            packer.define(several[place], f"kept_{n}_{place}[{key}]")
        programs, arguments = packer.launch(binding, several)
        fixed = {f"fixed_{n}_{i}": value for i, value in enumerate(launch.fixed)}
        scope |= fixed | {f"launch_{n}": launch.function}
        between = ", ".join("None" if value is None else name for name, value in fixed.items())
        only = f"if {packer.expression(binding.launched_if)}: " if binding.launched_if else ""
        lines.append(f"{only}launch_{n}({programs}, 1, 1, stream, {between}, {arguments})")
    unchecked = [line for line in packer.lines if line not in checked]
    return WayText(texts.given, texts.opening, checked, texts.conditions, unchecked, due, lines, texts.returns, scope)


def function(source: str, name: str, space: Mapping[str, object]) -> Callable[..., Any]:
    """The function that the text defines, with its lines where tracebacks look for them."""
    scope = dict(space)
    exec(_compiled(source), scope)
    return scope[name]  # type: ignore[return-value]


@lru_cache(maxsize=512)
def _compiled(source: str) -> CodeType:
    """Variants of one kind have the same texts."""
    file = f"<weft binding {next(_files)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source + "\n", file, "exec")


def alignment(tensors: Sequence[str], mixed: bool = False) -> Callable[[Mapping[str, Any]], tuple[bool, int]]:
    """A function of the given tensors [B, H, rows, D]: (is every address and stride a multiple of 16 bytes, the longest
    stride of a row in elements). mixed: their elements are not of one size."""
    lines = ["def alignment(given):"]
    for name in tensors:
        lines += [f"    {name} = given[{name!r}]", f"    {name}_sb, {name}_sh, {name}_sl, _ = {name}.stride()"]
    addresses = " | ".join(f"{name}.data_ptr()" for name in tensors)
    alike = [[name] for name in tensors] if mixed else [tensors]  # of one size
    strides = (
        f"({' | '.join(f'{name}_s{axis}' for name in names for axis in 'bhl')}) * {names[0]}.element_size()"
        for names in alike
    )
    rows = ", ".join(f"{name}_sl" for name in tensors)
    lines += [
        f"    bits = {addresses} | {' | '.join(strides)}",
        f"    return bits & 15 == 0, max({rows}{', 0' if len(tensors) == 1 else ''})",
    ]
    return function("\n".join(lines), "alignment", {})
