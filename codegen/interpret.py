"""Triton's interpreter in a process that was started without TRITON_INTERPRET, and that may compile kernels as well.

Triton (3.6 and 3.7) decides at *decoration* time: `triton.jit` makes an interpreted function while
`knobs.runtime.interpret` is set. That is enough for the functions of a generated module, and leaves two difficulties:

1. Functions that Triton itself decorates (`tl.max`, `tl.sum`, `tl.cdiv`, ...: the modules `standard` and `random`) were
   decorated at import, for the compiler, and refuse to be called. We execute these two files once more, with the knob
   set, as private modules, and put their functions in place during a launch.
2. During a launch the interpreter replaces the builtins of `triton.language` by its own, and calls between jitted
   functions leave some of these behind, which would break the next compilation in this process. We note the
   contents of every namespace that it touches, and put them back after the launch.

A third of what a launch takes is Triton asking the same of types and shapes at each operation, and another working out
whether ints overflow, for an assertion that it then leaves out: `_quicker`.

A private second import of the whole of triton was the alternative. It costs another 0.3 s, and functions in it
that import at call time would still find the first copy.
"""

import ast
import dataclasses
import functools
import importlib.util
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon  # a launch imports it, and must not do so while triton.language is patched
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from . import quick_tiles, triton_versions
from .compiling import in_parts, of_file

triton_versions.check("interpret")

_ASSIGNMENTS = interpreter.ASTTransformer()
_JITTED_MODULES = ("standard", "random")
_JITS = {"triton.jit", "run_time_kernel"}  # decorators of functions that the interpreter runs
_BUILDER = interpreter.InterpreterBuilder
_OF_A_LAUNCH = interpreter.interpreter_builder
_NAMESPACES = (
    tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.block_type, tl.core.tensor_descriptor_base, _BUILDER,
    _OF_A_LAUNCH, interpreter,
)  # fmt: skip
_Override = tuple[object, str, object]  # holder, attribute, value

# the interpreter's builtins live in global state, so one launch at a time
_launch = threading.RLock()


def execute_interpreted(text: str, module: ModuleType) -> None:
    """Execute a module so that its kernels run in the interpreter when launched as `kernel[grid](...)`.

    The interpreter wants numbers that a function assigns to be tiles, and writes each function again when it is called
    first. Here the whole module is written so at once, which is four times as fast.
    """
    parts, path = in_parts(text, _written), str(module.__file__)
    written = {name for _, (_, names) in parts for name in names}
    with _knob_set():
        for lines, (code, _) in parts:
            exec(of_file(code, path, lines), module.__dict__)
    for name, value in vars(interpreter).items():
        vars(module).setdefault(name, value)
    for value in vars(module).values():
        if isinstance(value, InterpretedFunction):
            if value.__name__ in written:
                InterpretedFunction.rewritten_fn[value.fn] = value.fn
            value.run = _isolated(value.run)


@functools.lru_cache(maxsize=2048)
def _written(text: str) -> tuple[CodeType, tuple[str, ...]]:
    """The code of a part of a module, and the names of its functions that were written so."""
    tree, names = ast.parse(text), []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and _JITS & {*map(_dotted, function.decorator_list)}:
            _assign_tiles(function.body)
            names.append(function.name)
    return compile(tree, "<generated>", "exec", dont_inherit=True), tuple(names)


def _dotted(name: ast.expr) -> str:
    """The text of a name; "" of another expression."""
    if isinstance(name, ast.Attribute):
        return f"{_dotted(name.value)}.{name.attr}"
    return name.id if isinstance(name, ast.Name) else ""


def _place(node: ast.stmt) -> dict[str, Any]:
    return {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}


def _assign_tiles(statements: list[ast.stmt]) -> None:
    """Write these, and those in them, as Triton would. Expressions, which are most of a tree, are not walked."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            value, statement.value = statement.value, ast.Constant(None)
            made: Any = _ASSIGNMENTS.visit_Assign(statement).value
            for node in ast.walk(made):
                node.__dict__.update(_place(statement))
            made.args[0] = value
        for within in ("body", "orelse", "finalbody"):
            _assign_tiles(getattr(statement, within, []))


def _isolated(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def launch(*args: object, **kwargs: object) -> None:  # the signature is the kernel's own
        # floats overflow in silence on a GPU, and so they do here
        with _launch, _restored(), _builtins_patched_once(), np.errstate(all="ignore"):
            for holder, name, value in _interpreted_library():
                setattr(holder, name, value)
            run(*args, **kwargs)

    return launch


@contextmanager
def _knob_set() -> Iterator[None]:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield


@contextmanager
def _restored() -> Iterator[None]:
    before = [dict(vars(holder)) for holder in _NAMESPACES]
    try:
        yield
    finally:
        for holder, attributes in zip(_NAMESPACES, before, strict=True):
            _restore(holder, attributes)


def _restore(holder: object, attributes: dict[str, object]) -> None:
    now = dict(vars(holder))
    for name in now.keys() - attributes.keys():
        delattr(holder, name)
    for name, value in attributes.items():
        if now.get(name) is not value:
            setattr(holder, name, value)


@contextmanager
def _builtins_patched_once() -> Iterator[None]:
    """Builtins are replaced here for the whole launch.

    The interpreter would do it again at each call of one jitted function by another, which takes longer than the call.
    It looks through all of the language for them; they are the same at every launch.
    """
    patch = interpreter._patch_lang
    for holder, name, value in _builtins(patch):
        setattr(holder, name, value)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    try:
        yield
    finally:
        interpreter._patch_lang = patch


@functools.cache
def _builtins(patch: Callable[[Any], Any]) -> tuple[_Override, ...]:
    """What the interpreter puts in place of builtins."""
    with _restored():
        before = [dict(vars(holder)) for holder in _NAMESPACES]
        patch(_sees_all_of_the_language)
        return tuple(
            (holder, name, value)
            for holder, attributes in zip(_NAMESPACES, before, strict=True)
            for name, value in vars(holder).items()
            if attributes.get(name) is not value
        )


_core = tl.core


def _sees_all_of_the_language() -> None:
    """The interpreter patches the language modules that are globals of a function: here `tl` and `_core`."""


@functools.cache
def _interpreted_library() -> tuple[_Override, ...]:
    """What to put in place during a launch. Triton's own functions are right if imported under TRITON_INTERPRET."""
    # 3.6 makes an int of a 1-element array by a conversion that numpy deprecated, and 2.4 removed
    index = (tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
    ours = (index, *_comparisons(), *_quicker(), (interpreter, "_convert_float", _of_fp8(interpreter._convert_float)))
    if isinstance(tl.max, InterpretedFunction):
        return ours
    return (*ours, *(override for name in _JITTED_MODULES for override in _overrides(name)))


def as_float32(value: float) -> tl.tensor:
    """A number as kernels take it on a GPU: infinite where it exceeds float32, and divided as floats are."""
    with np.errstate(over="ignore"):
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)


def _comparisons() -> Iterator[_Override]:
    """Comparisons that give bools: 3.6 calls the result a float, and broadcasting one number makes it one."""
    for name in [n for n in vars(_BUILDER) if n.startswith(("create_fcmp", "create_icmp"))]:
        yield _BUILDER, name, _as_bool(getattr(_BUILDER, name))


def _as_bool(compare: Callable[..., Any]) -> Callable[..., object]:
    return lambda builder, left, right: interpreter.TensorHandle(compare(builder, left, right).data, tl.int1)


_OF_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp32": torch.float32,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _of_fp8(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions of FP8 by torch: Triton's lose denormal numbers, and make numbers of NaN."""

    def found(source: Any, source_type: Any, target_type: Any, rounding_mode: object) -> Any:
        if 8 not in (source_type.primitive_bitwidth, target_type.primitive_bitwidth):
            return convert(source, source_type, target_type, rounding_mode)
        stored = torch.from_numpy(np.ascontiguousarray(source)).view(_OF_TORCH[source_type.name])
        made = stored.to(_OF_TORCH[target_type.name])
        return made.view(_BITS[made.element_size()]).numpy()

    return found


def _quicker() -> Iterator[_Override]:
    """The same answers in a third of the time."""
    yield _OF_A_LAUNCH, "options", dataclasses.replace(_OF_A_LAUNCH.options, sanitize_overflow=False)
    yield interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype)
    yield tl.tensor, "__init__", _with_shared_shape
    yield tl.core.block_type, "__init__", _made_once(tl.core.block_type.__init__)
    yield interpreter, "ReduceOps", _Reduced
    yield from quick_tiles.operations()


class _Reduced(interpreter.ReduceOps):  # type: ignore[misc]
    """Reduces bits as sums and extremes are, where Triton goes from one element to the next."""

    def apply_impl(self, input: Any) -> Any:
        if self.combine_fn != tl.standard._or_combine:
            return super().apply_impl(input)
        found = np.bitwise_or.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, input[0].dtype)


def _by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_type(dtype)
        return known[name]

    return found


_SIZES = "_weft_sizes"  # of a type that was made here: shape and number of elements of its tiles


def _with_shared_shape(tensor: Any, handle: object, dtype: Any) -> None:
    """tl.tensor.__init__, which makes its shape of new records each time."""
    tensor.handle, tensor.type, tensor.dtype = handle, dtype, dtype.scalar
    sizes = vars(dtype).get(_SIZES)
    if sizes is None:
        sizes = _shape(tuple(map(tl.core._unwrap_if_constexpr, dtype.shape)) if dtype.is_block() else ())
    tensor.shape, tensor.numel = sizes


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _made_once(init: Callable[..., None]) -> Callable[..., None]:
    """The type of a tile, whose name and size are worked out from its element's type and its shape."""
    known: dict[tuple[object, ...], dict[str, object]] = {}

    def found(block: Any, element: Any, shape: Any) -> None:
        key = (element.name, *map(tl.core._unwrap_if_constexpr, shape))
        if key not in known:
            init(block, element, shape)
            known[key] = {**vars(block), _SIZES: _shape(key[1:])}
        vars(block).update(known[key])

    return found


def _overrides(name: str) -> Iterator[_Override]:
    original = getattr(tl, name)
    with _restored():  # the file also attaches its functions to tl.tensor as methods
        before = dict(vars(tl.tensor))
        private = _execute_again(original)
        methods = {key: value for key, value in vars(tl.tensor).items() if before.get(key) is not value}
    yield tl, name, private  # the interpreter knows `tl.standard._elementwise_max` and others by identity
    yield from ((tl.tensor, key, value) for key, value in methods.items())
    for key, value in vars(private).items():
        if isinstance(value, InterpretedFunction) and getattr(tl, key, None) is getattr(original, key):
            yield tl, key, value


def _execute_again(original: ModuleType) -> ModuleType:
    spec = importlib.util.spec_from_file_location(original.__name__, original.__file__)
    if spec is None or spec.loader is None:
        raise ImportError(f"{original.__name__} has no source file, so the target `interpret` cannot run")
    private = importlib.util.module_from_spec(spec)
    with _knob_set():
        spec.loader.exec_module(private)
    return private
