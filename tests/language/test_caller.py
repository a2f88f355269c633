"""Warnings and lines of messages name whoever called the package, and what declares is not traced."""

from __future__ import annotations

import ast
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import weft
from weft.codegen.launch import launching
from weft.compiler.planning.machines.rates import Machine
from weft.integrations import rules
from weft.ir.caller import for_threads, source_line, warn
from weft.runtime.store import calibrated, files

ROOT = Path(__file__).parents[2]
FOLDERS = ("ir", "compiler", "codegen", "runtime", "api")


def test_every_warning_is_given_in_one_place() -> None:
    """`ir/caller.py` alone calls the warnings module, so that all others name the caller; but for what must run before
    any other module is imported."""
    found = []
    for path in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit"):
                found.append(path.resolve().relative_to(ROOT.resolve()).as_posix())
    assert set(found) == {"ir/caller.py", "api/installed.py"}


def test_the_line_is_that_of_the_caller() -> None:
    with pytest.warns(RuntimeWarning, match="hello") as told:
        warn("hello")
    assert told[0].filename == __file__ and source_line().startswith(f"{__file__}:")


def test_in_threads_the_line_is_that_of_who_started_them() -> None:
    with pytest.warns(RuntimeWarning, match="hello") as told, ThreadPoolExecutor(2) as threads:
        list(threads.map(for_threads(warn_from_the_package), ["hello 1", "hello 2"]))
    assert [w.filename for w in told] == [__file__] * 2


# as if it were a function of the package
warn_from_the_package = eval("lambda text: warn(text)", {"warn": warn, "__name__": "weft.somewhere"})


def test_warnings_of_the_cache_name_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(files, "_warned", set())
    q = torch.randn(1, 1, 4, 16)
    with pytest.warns(RuntimeWarning, match="expected a folder, got a file") as told:
        weft.Attention(weft.score * 1.25, name="uncached_once")(q, q, q)
    assert {w.filename for w in told} == {__file__}


def test_warnings_of_a_broken_calibration_name_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(name="some processor", kind="cpu", units=3)
    (tmp_path / calibrated._file_name(machine)).write_text("{")
    with pytest.warns(UserWarning, match="Until then figures are those without it") as told:
        calibrated._in_folder(tmp_path, machine)
    assert told[0].filename == __file__


def test_warnings_of_mask_functions_name_the_caller() -> None:
    with pytest.warns(RuntimeWarning, match="is evaluated for every pair") as told:
        rules.warn_of_pairs("a function of this test", "no words")
    assert told[0].filename == __file__


def test_warnings_of_the_assembler_name_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")

    def crashes(options: dict[str, int]) -> str:
        if options["num_stages"] > 1:
            raise triton.runtime.errors.PTXASError("ptxas died")
        return "made"

    with pytest.warns(RuntimeWarning, match="compiled with one stage") as told:
        assert launching.assembled("some_kernel", crashes, {"num_stages": 2}) == "made"
    assert told[0].filename == __file__


# -- declared inside of a compiled function ----------------------------------------------------------------------------
CAUSAL = weft.Attention(mask=weft.masks.causal, name="causal")
INSIDE = {
    "comparison": lambda q: weft.Attention(mask=weft.kv_pos <= weft.q_pos)(q, q, q),
    "nothing": lambda q: weft.Attention()(q, q, q),
    "ready mask": lambda q: weft.Attention(mask=weft.masks.causal)(q, q, q),
    "ready variant": lambda q: weft.variants.gemma2()(q, q, q),
    "replaced": lambda q: CAUSAL.replace(name="other")(q, q, q),
    "function": lambda q: weft.Attention(weft.tanh(weft.score))(q, q, q),
    "operand": lambda q: weft.Attention(weft.score * weft.scalar("s"))(q, q, q, s=2.0),
    "tensor": lambda q: weft.Attention(weft.score + weft.tensor("t", 1)[weft.head])(q, q, q, t=q[0, :, 0, 0]),
    "text": lambda q: weft.parse_attention("weft.Attention(score=score, mask=kv_pos <= q_pos)")(q, q, q),
}


@pytest.mark.parametrize("name", list(INSIDE))
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_declared_inside_of_a_graph(name: str, backend: str) -> None:
    """Where the graph may break it does, and all is as outside; else the error says what to do."""
    q = torch.randn(1, 2, 8, 16)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="weft: a variant is declared outside of what torch compil"):
        torch.compile(INSIDE[name], fullgraph=True, backend=backend)(q)
    if backend == "eager":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about graphs that break
            torch.testing.assert_close(torch.compile(INSIDE[name], backend=backend)(q), INSIDE[name](q))
