"""Loading generated source, compiled and interpreted."""

import importlib.util
import inspect
import os
import sys
import textwrap
from pathlib import Path

import pytest

from weft.codegen.loader import load
from weft.ir.errors import WeftError

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or "TRITON_INTERPRET" in os.environ,
    reason="needs triton, imported for compiling",
)

KERNELS = textwrap.dedent('''
    """A generated module in small."""

    import triton
    import triton.language as tl


    @triton.jit
    def squashed(x, c):
        """A function of the variant, called by the kernel."""
        return tl.sigmoid(x * c)


    @triton.jit
    def row_kernel(x, out, columns, c, BLOCK: tl.constexpr):
        """out[row] = squashed(sum(exp2(x - max x))) + ceil(columns / 3)."""
        row, column = tl.program_id(0), tl.arange(0, BLOCK)
        tile = tl.load(x + row * columns + column, mask=column < columns, other=float("-inf"))
        total = tl.sum(tl.exp2(tile - tl.max(tile, 0)), axis=0)
        extra = 0.0
        for _ in range(0, tl.cdiv(columns, 3)):
            extra += 1.0
        square = tl.dot(tl.full([16, 16], 1.0, tl.float32), tl.full([16, 16], 0.5, tl.float32))
        tl.store(out + row, squashed(total, c) + extra + square.max() - 8.0)
''')


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some-entry" / "source.py"
    path.parent.mkdir()
    path.write_text(KERNELS)
    return path


def run_rows(module, dtype="float32"):
    import torch

    x = torch.randn(3, 21, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    out = torch.full((3,), float("nan"))
    module.row_kernel[(3,)](x, out, 21, 0.01, BLOCK=32)
    expected = torch.sigmoid(torch.exp2(x.float() - x.float().amax(1, keepdim=True)).sum(1) * 0.01) + 7
    return out, expected


def compile_rows(module) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x": "*fp32", "out": "*fp32", "columns": "i32", "c": "fp32", "BLOCK": "constexpr"}
    source = ASTSource(module.row_kernel, signature, {"BLOCK": 32})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_a_module_is_loaded_once_per_path_and_content(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("values = []\n")
    first = load(path)
    assert load(path) is first and first.values == [] and first.__file__ == str(path)
    path.write_text("values = [1]\n")
    assert load(path) is not first and load(path).values == [1]
    assert load(path, interpret=False, source="values = []\n") is first


def test_dataclasses_find_their_module(tmp_path):
    path = tmp_path / "plain.py"
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 3\n"
    module = load(path, source=text)
    assert module.A().x == 3 and sys.modules[module.__name__] is module


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(WeftError, match=r"absent\.py: expected a generated module to load, got .*No such file"):
        load(tmp_path / "absent.py")


def test_an_error_in_the_source_names_the_file_and_leaves_no_module(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        load(path)
    assert raised.value.__notes__ == [f"while loading the generated module {path}"]
    assert not [name for name in sys.modules if "broken" in name and name.startswith("weft_generated")]


@pytest.mark.compiles
@needs_triton
def test_the_checked_text_is_compiled_even_if_the_file_changes_or_goes(file):
    module = load(file)
    file.unlink()
    assert "squashed(total, c)" in inspect.getsource(module.row_kernel.fn)
    assert "ex2.approx" in compile_rows(module)


@pytest.mark.compiles
@needs_triton
def test_a_module_that_was_never_on_disk(tmp_path):
    module = load(Path("<weft some-entry>"), source=KERNELS)
    assert "ex2.approx" in compile_rows(module)
    interpreted = load(Path("<weft some-entry>"), interpret=True, source=KERNELS)
    out, expected = run_rows(interpreted)
    assert (out - expected).abs().max() < 1e-5


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_interpreted_kernels_run_where_triton_was_imported_for_compiling(file, dtype):
    import triton
    import triton.language as tl

    out, expected = run_rows(load(file, interpret=True), dtype)
    assert (out - expected).abs().max() < 1e-5
    assert "TRITON_INTERPRET" not in os.environ and not triton.knobs.runtime.interpret
    assert isinstance(tl.max, triton.JITFunction)


@pytest.mark.compiles
@needs_triton
def test_the_interpreter_leaves_triton_as_it_was(file):
    import triton.language as tl

    interpreted = load(file, interpret=True)
    holders = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype)
    before = [dict(vars(holder)) for holder in holders]
    run_rows(interpreted)
    assert [dict(vars(holder)) for holder in holders] == before
    assert "ex2.approx" in compile_rows(load(file))
    run_rows(interpreted)


@needs_triton
def test_an_error_in_an_interpreted_kernel_leaves_triton_as_it_was(file):
    import triton.language as tl
    from triton.runtime.errors import InterpreterError

    bad = load(file, interpret=True, source=KERNELS.replace("tl.sigmoid(x * c)", "tl.sigmoid(x * c) + undefined"))
    before = dict(vars(tl.core))
    with pytest.raises(InterpreterError, match=r"undefined.* is not defined"):
        run_rows(bad)
    assert dict(vars(tl.core)) == before


@needs_triton
def test_the_compiled_and_the_interpreted_module_are_two(file):
    from triton.runtime.interpreter import InterpretedFunction

    compiled, interpreted = load(file), load(file, interpret=True)
    assert compiled is not interpreted and load(file, interpret=True) is interpreted
    assert isinstance(interpreted.row_kernel, InterpretedFunction)
    assert not isinstance(compiled.row_kernel, InterpretedFunction)


def test_parts_of_a_module_are_compiled_once_and_know_their_lines(tmp_path):
    """A function stands in two modules at different lines: tracebacks and sources of both are right."""
    function = 'def failing(x):\n    """Twice."""\n    return 1 / x\n'
    modules = []
    for number, before in enumerate(('"""One."""\n', '"""Two,\n\n\nin two lines."""\n\nfrom math import pi\n')):
        path = tmp_path / f"module{number}.py"
        path.write_text(f"{before}\n\n{function}\n\nclass Last:\n    doubled = [2 * x for x in (1, 2)]\n")
        modules.append(load(path))
    for module in modules:
        place = module.failing.__code__
        assert module.Last.doubled == [2, 4] and place.co_filename == module.__file__
        assert inspect.getsource(module.failing) == function
        with pytest.raises(ZeroDivisionError) as raised:
            module.failing(0)
        assert raised.traceback[-1].lineno + 1 == place.co_firstlineno + 2
    one, two = modules
    assert one.__doc__ == "One." and two.__doc__ == "Two,\n\n\nin two lines."
    assert two.failing.__code__.co_firstlineno == one.failing.__code__.co_firstlineno + 5


def test_what_is_no_python_is_refused_with_the_line_of_the_whole_text(tmp_path):
    path = tmp_path / "torn.py"
    path.write_text("def whole():\n    return 1\n\n\ndef torn(:\n    return 2\n")
    for interpret in (False, True) if importlib.util.find_spec("triton") else (False,):
        with pytest.raises(SyntaxError) as raised:
            load(path, interpret=interpret)
        assert raised.value.lineno == 5


def test_a_module_may_speak_of_the_future(tmp_path):
    path = tmp_path / "later.py"
    path.write_text("from __future__ import annotations\n\n\ndef given(x: unknown):\n    return x\n")
    assert load(path).given(3) == 3
