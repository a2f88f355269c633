"""The `weft` command, run as a person would run it."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click.testing
import pytest
import torch
from click.testing import CliRunner, Result

import weft
from weft.compiler.planning.machines.hardware import usable_cores
from weft.plans.request import ranges_of
from weft.runtime import driver
from weft.runtime.store import modules, prune
from weft.tools import cli
from weft.tools.cli import main
from weft.tools.drawn import drawn_operands

LOCAL = ["--score", "20.0 * tanh(score / 20.0)", "--mask", "(kv_pos <= q_pos) & (q_pos - kv_pos < window)"]
LOCAL += ["--scalar", "window:int", "--set", "window=64"]
SHAPE = ["--heads", "4", "--kv-heads", "2", "--q-len", "256", "--head-dim", "32", "--dtype", "fp32"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), terminal_width=100)


def succeeds(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def fails(*arguments: str) -> str:
    """The message of a mistake: exit code 2, and no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C ends processes that are started now. Those of a shell's background job would ignore it: what is ignored
    stays ignored in a new process, what has a handler does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are for a person then, and not for another program."""

    monkeypatch.setattr(click.testing._NamedTextIOWrapper, "isatty", lambda self: True, raising=False)


@pytest.fixture
def declared(tmp_path: Path) -> str:
    """A file that declares a variant."""
    path = tmp_path / "my_variants.py"
    path.write_text("import weft\ncausal = weft.Attention(mask=weft.kv_pos <= weft.q_pos, name='causal')\nother = 3\n")
    return str(path)


def test_help_lists_the_commands() -> None:
    output = succeeds("--help")
    for command in ("explain", "source", "mask", "cache", "doctor"):
        assert re.search(rf"^  {command} ", output, re.MULTILINE)


def test_version() -> None:
    assert weft.__version__ in succeeds("--version")


def test_explain_says_what_the_method_says() -> None:
    output = succeeds("explain", *LOCAL, *SHAPE, "--device", "h100")
    variant = weft.parse_attention(
        'window = weft.scalar("window", int)\n'
        "weft.Attention(score=20.0 * tanh(score / 20.0), mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window))"
    )
    shape = weft.shape(heads=4, kv_heads=2, q_len=256, head_dim=32, dtype="fp32")
    assert output == variant.explain(shape, device="h100", window=64) + "\n"


def test_explain_of_fp8_operands() -> None:
    given = [
        "explain",
        "--mask",
        "kv_pos <= q_pos",
        "--heads",
        "8",
        "--q-len",
        "1",
        "--kv-len",
        "4096",
        "--device",
        "h100",
    ]
    sizes = {"heads": 8, "q_len": 1, "kv_len": 4096, "head_dim": 128}
    causal = weft.Attention(mask=weft.kv_pos <= weft.q_pos)
    for per in ("token", 128, None):
        more = [] if per is None else ["--descale", str(per)]
        text = succeeds(*given, "--kv-dtype", "e4m3", *more)
        shape = weft.shape(**sizes, kv_dtype="e4m3", descale=per)
        assert text == causal.explain(shape, device="h100") + "\n" and "bf16, keys and values e4m3" in text
    assert "e5m2" in succeeds(*given, "--dtype", "e5m2", "--short")


def test_explain_of_a_call_over_ranks() -> None:
    causal = ("explain", "--mask", "kv_pos <= q_pos", "--heads", "32", "--kv-heads", "8", "--q-len", "131072",
              "--device", "h100")  # fmt: skip
    assert "over 8 ranks, 8 a host" in succeeds(*causal, "--mesh", "8")
    output = succeeds(*causal, "--mesh", "8x8")
    assert "over 64 ranks (8 x 8), 8 a host" in output and "\n           then " in output


def test_explain_of_a_sink() -> None:
    written = ("--mask", "kv_pos <= q_pos", "--sink", "sinks[head]", "--tensor", "sinks:1", "--name", "learned")
    output = succeeds("explain", *written, *SHAPE, "--device", "h100")
    assert "sink          sinks[head]" in output and "hopper" in output
    assert "sink_logit" in succeeds("source", *written, *SHAPE, "--device", "h100")


def test_explain_of_a_normalizer() -> None:
    written = ("--mask", "kv_pos <= q_pos", "--normalizer", "sigmoid", "--name", "own")
    output = succeeds("explain", *written, "--head-dim", "64", "--device", "h100")
    assert "normalizer    sigmoid" in output and "P = sigmoid(score)" in output and "hopper" in output


def test_explain_takes_a_schedule_in_part() -> None:
    wide = ["--head-dim", "64", "--device", "h200"]
    text = succeeds("explain", "--mask", "True", *wide, "--schedule", "flash/flash_dquery=triton:64x32w4s2")
    choices = re.findall(r"^ +(\w+=\w+:\S+)$", text, re.MULTILINE)
    assert "flash_dquery=triton:64x32w4s2" in choices and len(choices) == 4
    again = succeeds("explain", "--mask", "True", *wide, "--schedule", "/".join(["flash", *choices]))
    # but that a form which is named is that of short calls, too
    assert again.rstrip() == text.split("\nNotes")[0].rstrip() and "another form in short calls" in text


def test_explain_of_a_declared_variant(declared: str) -> None:
    assert "causal" in succeeds("explain", f"{declared}:causal", *SHAPE)


def test_source_is_python(tmp_path: Path) -> None:
    for direction in ("forward", "backward"):
        text = succeeds("source", *LOCAL, *SHAPE, "--direction", direction, "--target", "cpu")
        ast.parse(text)
        assert "window" in text
    path = tmp_path / "kernel.py"
    assert "lines" in succeeds("source", *LOCAL, *SHAPE, "--device", "h100", "-o", str(path))
    ast.parse(path.read_text())


def test_mask_as_text_and_picture(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    output = succeeds("mask", *LOCAL, *SHAPE, "--block-q", "32", "--block-kv", "32", "-o", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in output and len(output.splitlines()) > 8


def test_tensor_operands_are_declared_by_rank_and_type() -> None:
    text = succeeds("source", "--score", "score + slopes[head]", "--mask", "seen[kv_pos] & (doc[batch, kv_pos] == 1)",
                    "--tensor", "slopes:1", "--tensor", "doc:2:int", "--tensor", "seen:1:bool", *SHAPE)  # fmt: skip
    assert all(name in text for name in ("slopes", "doc", "seen"))


def test_cache_commands(tmp_path: Path) -> None:
    import torch

    assert succeeds("cache", "path").strip() == str(tmp_path / "cache")
    assert succeeds("cache", "list") == ""
    query = torch.randn(1, 1, 4, 16)
    weft.Attention(score=weft.score * 1.25, name="for_the_cache")(query, query, query)
    assert "for_the_cache" in succeeds("cache", "list")
    assert "removed 1 entry" in succeeds("cache", "clear")
    assert succeeds("cache", "list") == ""


def test_cache_list_in_a_pipe_is_a_line_an_entry(tmp_path: Path) -> None:
    long = modules.Key("a_name_that_is_long_enough_" * 4, "flash_forward", "cpu", "d16", "text", "flash")
    for key in (long, replace(long, torch="0.4"), replace(long, name="torn")):
        modules.load_or_build(key, lambda: "answer = 42\n")
    (tmp_path / "cache" / replace(long, name="torn").folder / "source.py").write_text("half")
    rows = {row[0]: row for row in (line.split("\t") for line in succeeds("cache", "list").splitlines())}
    assert rows.keys() == {key.folder for key in (long, replace(long, torch="0.4"), replace(long, name="torn"))}
    assert {row[1] for row in rows.values()} == {"sound", "stale", "unsound"}
    name, state, size, made, used, path, reason = rows[long.folder]
    assert Path(path).read_text() == "answer = 42\n" and Path(path).parent.name == name
    assert int(size) == sum(f.stat().st_size for f in Path(path).parent.iterdir())
    assert (
        abs(int(made) - time.time()) < 100 and abs(int(used) - time.time()) < 100 and (state, reason) == ("sound", "")
    )
    assert rows[replace(long, torch="0.4").folder][-1].startswith("made for torch 0.4")


def test_cache_list_on_a_terminal_is_for_a_person(on_a_terminal: None) -> None:
    assert "0 entries, 0 KiB in" in succeeds("cache", "list")


def test_cache_list_gives_the_name_of_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_a_terminal: None
) -> None:
    import torch

    query = torch.randn(1, 1, 4, 16)
    variant = weft.Attention(score=weft.score * 1.75, name="to_be_edited")
    variant(query, query, query)
    command = succeeds("cache", "list").splitlines()[-1]
    (tmp_path / "edits").mkdir()
    monkeypatch.setenv("WEFT_EDITED_DIR", str(tmp_path / "edits"))
    subprocess.run(command, shell=True, check=True)
    assert f"-{variant.canonical.digest}.py" in command
    driver.forget()
    again = weft.Attention(score=weft.score * 1.75, name="to_be_edited")
    with pytest.warns(RuntimeWarning, match="to_be_edited runs the edited module"):
        again(*[torch.randn(1, 1, 8, 16)] * 3, target="cpu")  # a call of another kind, for which nothing is loaded yet


def test_cache_prune(tmp_path: Path, on_a_terminal: None) -> None:
    key = modules.Key("v", "forward", "cpu", "d16", "text", "flash")
    for made in (key, replace(key, name="old", torch="0.4"), replace(key, name="torn")):
        modules.load_or_build(made, lambda: "answer = 42\n")
    (tmp_path / "cache" / replace(key, name="torn").folder / "source.py").write_text("half")
    listed = succeeds("cache", "list")
    for name, state in (
        ("v", "sound"),
        ("old", "stale: made for torch 0.4, here is .+"),
        ("torn", "unsound: .+ edited"),
    ):
        assert re.search(rf"^ .*  {name}-forward-cpu-d16-\S+  {state}$", listed, re.MULTILINE), listed
    assert re.match(
        r"removed 2 stale entries, 0 beyond the size, 0 left-overs \(\d+ KiB\) from", succeeds("cache", "prune")
    )
    assert "0 stale entries, 0 beyond" in succeeds("cache", "prune", "--max-size", "1MB")
    assert "0 stale entries, 1 beyond" in succeeds("cache", "prune", "--max-size", "0.1 kB")
    assert "--max-size: expected a size such as 200MB or 1GiB, got 'all'" in fails(
        "cache", "prune", "--max-size", "all"
    )


def test_tune_times_tilings_and_prints_a_schedule_that_can_be_used() -> None:
    small = ["--heads", "1", "--q-len", "16", "--head-dim", "16", "--dtype", "fp32", "--target", "cpu"]
    output = succeeds("tune", *LOCAL, *small)
    schedule = re.search(r"fastest of 10: schedule='(\S+)'", output)
    assert schedule is not None
    algorithm, *choices = schedule[1].split("/")
    assert [choice.split(":")[0] for choice in choices] == ["flash_forward=cpu", "flash_backward=cpu"]
    runs = r"[\d.e-]+ ms \([\d.e-]+ to [\d.e-]+ between quartiles of \d+ runs\)"
    verdict = rf"a tie of .+: the default (stays|is slower)|it is the default too|[\d.]+ times as fast as .+, {runs}"
    for kernel in ("flash_forward", "flash_backward"):
        assert re.search(rf"^{kernel} +\d+x\d+\S*  {runs}; ({verdict})$", output, re.MULTILINE), output
    for asked in (["--schedule", schedule[1]], []):  # also where nothing is asked for: it is remembered
        shown = succeeds("explain", *LOCAL, *small, *asked)
        assert re.search(rf"^schedule +{algorithm}$", shown, re.MULTILINE)
        assert all(re.search(rf"^ +{re.escape(choice)}$", shown, re.MULTILINE) for choice in choices)
    assert "nothing is tuned" not in output and "(schedule split_kv), which are not timed" in succeeds("tune", "--help")
    assert "missing window; write --set window=NUMBER" in fails("tune", *LOCAL[:-2], *small)
    assert "kept for calls of about 16 x 16 queries and keys" in output


@pytest.mark.parametrize("given", [[], ["--set", "table=random"]])
def test_tune_draws_tensor_operands_and_says_so(given: list[str], monkeypatch) -> None:
    from weft.tools import tuning

    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(tuning, "_clock", lambda a, shape, values, *_: seen.update(values) or (lambda *_: 1.0))
    sizes = ["--heads", "2", "--q-len", "64", "--head-dim", "16", "--dtype", "fp32", "--target", "cpu"]
    output = succeeds("tune", "examples/t5_bias.py:t5", *sizes, *given)
    (table,) = seen.values()
    extents = " x ".join(map(str, table.shape))
    assert f"table: drawn at random, {extents} of float32" in output and table.requires_grad
    assert "flash_backward" in output


def test_doctor_names_versions_and_targets() -> None:
    output = succeeds("doctor")
    assert torch.__version__.split("+")[0] in output
    for target in ("hopper", "triton", "interpret", "cpu"):
        assert re.search(rf"{target} .*\w", output)
    assert re.search(
        rf"CPU +\S.*, {usable_cores()} of {os.cpu_count()} cores usable by this process, torch threads", output
    )
    assert re.search(r"folder +\S+cache\n +state +0 entries, 0 KiB", output)
    assert re.search(r"cpu +works; the default for operands on the CPU", output)
    assert "operands are on the CPU;" not in output  # there are none
    if not torch.cuda.is_available():
        assert re.search(r"GPU +none that torch can use: ", output)
        assert re.search(r"triton +does not work here: needs a GPU; torch can use none here", output)
        assert re.search(r"interpret +works, where it is asked for: target='interpret'", output)


def test_doctor_says_why_the_cache_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    assert re.search(
        r"folder +cannot be used, .+: cache folder \S+file: expected a folder, got a file", succeeds("doctor")
    )


def test_doctor_says_which_setting_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "settings" not in succeeds("doctor")
    monkeypatch.setenv("WEFT_TARGET", "gpu")
    output = succeeds("doctor")
    assert re.search(r"^settings\n +problem +each call raises: setting target \(WEFT_TARGET\): .+'gpu'", output)
    assert re.search(r"folder +not known while a setting is wrong", output)


def test_doctor_computes_a_small_call_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    output = succeeds("doctor", "--run").split("a small call\n")[1]
    assert re.search(r"^  cpu +right to \de-0\d, [\d.]+ s with generating$", output, re.MULTILINE)
    assert succeeds("cache", "list") == ""
    monkeypatch.setattr(weft.Attention, "__call__", lambda *_, **__: 1 / 0)
    assert "cpu         fails with ZeroDivisionError: division by zero" in succeeds("doctor", "--run")


# -- as a process ------------------------------------------------------------------------------------------------------
WEFT = [sys.executable, "-m", "weft"]


def test_a_pipe_that_closes_is_no_mistake() -> None:
    """As in `weft source ... | head -1`: some tools close a pipe before all is written."""
    with subprocess.Popen(
        [*WEFT, "source", "--mask", "kv_pos <= q_pos", "--device", "h100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.usefixtures("interruptible")
def test_control_c_ends_without_a_traceback() -> None:
    waits = (
        "import sys, weft.tools.cli as c\n"
        "c.prune.entries = lambda: (print('here', flush=True), c.time.sleep(60))\n"
        "c.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", waits, "cache", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().strip() == "Aborted!"
    assert process.returncode == 1


def test_nothing_but_results_is_printed_in_a_pipe() -> None:
    done = subprocess.run([*WEFT, "mask", "--mask", "kv_pos <= q_pos"], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.startswith("attention: 4096 queries")


def test_what_takes_long_is_said_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Status:
        def start(self) -> None:
            shown.append("started")

        def stop(self) -> None:
            shown.append("stopped")

    monkeypatch.setattr("rich.console.Console.status", lambda self, text: shown.append(text) or Status())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with cli._busy("planning"):
        pass
    assert shown == ["planning", "stopped"]  # what is quick says nothing
    with cli._busy("planning"):
        time.sleep(1.3)
    assert shown[2:] == ["planning", "started", "stopped"]


# -- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--mask", "kv_pos <="], "--mask: not an expression of the language: 'kv_pos <='"),
        (["--mask", "kv_pos <= w"], "--mask: unknown name 'w': .*; declare operands with --scalar and --tensor"),
        (["--mask", "kv_pos < 1 and q_pos < 2"], "--mask: .*write `a & b` for `and`"),
        (["--score", "q_pos < 1"], "score: expected a number, got a bool"),
        (["--mask", "score > 0"], "mask: `score` cannot be used inside a mask"),
        (["--mask", "True", "--scalar", "w"], "--scalar: expected NAME:int or NAME:float, got 'w'"),
        (["--mask", "True", "--scalar", "head:int"], "--scalar: the name 'head' is reserved for [^/]*$"),
        (
            ["--mask", "True", "--scalar", "w:int", "--tensor", "w:1"],
            "--scalar, --tensor: expected each operand once, got w",
        ),
        (
            ["--mask", "kv_pos + 1"],
            "^Error: --mask: expected a bool expression .a comparison., got int [^/]*$",
        ),
        (
            ["--mask", "score > 0", "--score", "q_pos < 1"],
            "- --score: expected a number, got a bool; .* - --mask: `score`",
        ),
        (["--mask", "t[q_pos] < 1", "--tensor", "t:2"], "--mask: t: expected 2 indices, got 1$"),
        (["--mask", "True", "--name", "a b"], "--name: expected a Python identifier as a name, got 'a b'$"),
        (
            ["--mask", "True", "--normalizer", "softplus"],
            "--normalizer: expected one of softmax, sigmoid, relu, got 'softplus'",
        ),
        (["--sink", "kv_pos", "--mask", "True"], "--sink: expected lengths, heads, batch and operands, got `kv_pos`"),
        (["--scale", "q_pos", "--mask", "True"], "--scale: expected lengths, heads and operands, got `q_pos`"),
        (["--mask", "True", "--mesh", "2x"], "--mesh: expected N, or OUTERxINNER, got '2x'$"),
        ([*LOCAL, "--set", "window=3"], "--set: expected each operand once, got window several times"),
        (
            [*LOCAL[:-2], "--set", "windw=3"],
            "--set: windw: unknown operand or option; .* are: window; did you mean window",
        ),
        ([*LOCAL[:-2], "--set", "window=1.5"], "--set: window: expected an int, got 1.5"),
        (["--mask", "True", "--set", "window=3"], "--set: window: unknown operand or option; .* operands are: none"),
        (
            ["--mask", "True", "--scalar", "w:int", "--set", "w=3"],
            "--set: w: declared, but neither score, mask, scale, sink nor dropout",
        ),
        (
            ["--score", "score + t[q_pos]", "--tensor", "t:1", "--set", "t=3"],
            "--set: t: expected a tensor of float with 1 dimension, got int",
        ),
        (
            ["--mask", "True", "--head-dim", "320"],
            "- --head-dim: expected 1 to 256, got 320; wider heads are for latent",
        ),
        (["--mask", "True", "--q-len", "0"], "Invalid value for '--q-len': 0 is not in the range"),
        (["--mask", "True", "--q-len", "3000000000"], "--q-len: integer overflow: expected a length up to 2\\*\\*30"),
        ([":x"], "expected module:name or file.py:name, got ':x'"),
        ([".a:x"], ".a: cannot be imported"),
        (["weft:nothing"], "weft:nothing: expected a weft.Attention, there is no such name; weft declares no variant"),
        (["--mask", "True", "--tensor", "t:1:text"], "--tensor: expected NAME:RANK or NAME:RANK:TYPE"),
        (["--mask", "True", "--tensor", "t:9"], "--tensor: tensor 't': expected a rank from 0 to 4, got 9"),
        (["--mask", "True", "--set", "w=x"], "--set: expected NAME=NUMBER, or NAME=random for a tensor, got 'w=x'"),
        ([*LOCAL[:-2], "--set", "window=random"], "--set: window: expected an int, got 'random'"),
        (["--mask", "True", "--set", "w=random"], "--set: w: unknown operand or option; .* operands are: none"),
        (
            ["--score", "score + t[q_pos * 16384, kv_pos * 16384]", "--tensor", "t:2", "--set", "t=random"],
            "t: calls of these sizes read .* entries, which are too many to draw",
        ),
        (
            ["--score", "score + t[q_pos // n]", "--tensor", "t:1", "--scalar", "n:int", "--set", "t=random"],
            "--set: missing n; write --set n=NUMBER",
        ),
        (["--mask", "True", "--heads", "4", "--kv-heads", "3"], "--heads: expected a multiple of kv_heads 3, got 4"),
        (["--mask", "True", "--heads", "0"], "Invalid value for '--heads'"),
        (["--mask", "True", "--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--mask", "True", "--kv-dtype", "fp16"], "--kv-dtype: expected 'bf16' as the query has, or FP8, got 'fp16'"),
        (["--mask", "True", "--descale", "64"], "--descale: expected None, as nothing is FP8, got 64"),
        (["--dtype", "e4m3", "--mesh", "4"], "mesh: expected operands of bf16, fp16 or fp32, as FP8 is of one device"),
        (["--mask", "True", "--device", "abacus"], "--device: expected one of a100, .*, got 'abacus'"),
        (["--mask", "True", "--target", "abacus"], "Invalid value for '--target'"),
        (["--mask", "True", "--schedule", "abacus"], "abacus"),
        (
            ["--mask", "True", "--schedule", "flash/cpu/64x64"],
            "expected standard, streaming, flash, split_kv, or text like",
        ),
        (["--mask", "True", "--schedule", "flash/dquery=triton:64x64w4s2"], "expected kernels among .*, got dquery"),
        (
            ["--mask", "True", "--device", "h100", "--target", "triton", "--schedule", "flash/flash_forward=cpu:64x64"],
            "it is for target cpu, the call's target is triton; pass target='cpu'",
        ),
        (["nowhere:x"], "nowhere: cannot be imported"),
        (["nowhere.py:x"], "nowhere.py: no such file"),
        (["nothing"], "expected module:name or file.py:name, got 'nothing'"),
        (["weft:x", "--mask", "True"], "expected weft:x or --mask, got both"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments: list[str], match: str) -> None:
    message = " ".join(fails("explain", *arguments).split())
    assert re.search(match, message), message


def test_a_name_that_is_no_variant(declared: str) -> None:
    message = fails("explain", f"{declared}:other")
    assert "expected a weft.Attention, got an int" in message and "declares causal" in message
    assert "there is no such name; did you mean causal?" in fails("explain", f"{declared}:casual")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("def f(:", r"own.py, line 1: cannot be imported \(SyntaxError: invalid syntax"),
        ("x = 1\n\n1 / 0", r"own.py, line 3: cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("import no_such_module_at_all", r"own.py, line 1: cannot be imported \(ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", r"own.py, line 1: cannot be imported \(SystemExit: 3\)"),
        ("\udcff", r"own.py, line 1: cannot be imported \(SyntaxError"),
        ("import weft\nx = weft.Attention(mask=weft.kv_pos)", r"(?s)x \(declared at \S+own.py:2\)|own.py:2"),
    ],
)
def test_a_file_that_fails_says_where(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "own.py"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert re.search(match, fails("explain", f"{path}:x"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ["source", "-o", "no/such/folder/x.py"],
            "--output: no/such/folder/x.py: there is no folder no/such/folder; make",
        ),
        (["source", "-o", "x.txt"], "--output: expected a file that ends in .py, got x.txt"),
        (["mask", "-o", "no/such/folder/x.png"], "--output: no/such/folder/x.png: there is no folder no/such/folder"),
        (["mask", "-o", "x.jpg"], "--output: expected a file that ends in .png or .svg, got x.jpg"),
        (["mask", "--head", "99"], "Error: --head: expected 0 to 15, got 99"),
        (["tune", "--head-dim", "320", "--q-len", "16", "--target", "cpu"], "--head-dim: expected 1 to 256, got 320"),
        (
            ["tune", "--q-len", "1000000000", "--dtype", "fp32"],
            "query, key and value of these sizes take .* cannot be made",
        ),
    ],
)
def test_mistakes_of_other_commands(arguments: list[str], match: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, *rest = arguments
    message = " ".join(fails(command, "--mask", "kv_pos <= q_pos", *rest).split())
    assert re.search(match, message), message
    assert list(tmp_path.rglob("*x.*")) == [] and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["nothing", "--device", "h100"], "expected module:name or file.py:name, got 'nothing'"),
        (["{}:causal", "--device", "cpu"], "--device: expected a GPU to compile for, got cpu"),
        (["{}:causal", "--device", "abacus"], "--device: expected one of a100"),
        (["{}:causal", "--device", "h100", "--head-dim", "0"], "Invalid value for '--head-dim'"),
        (["{}:causal", "--device", "h100", "--head-dim", "320"], "Invalid value for '--head-dim'"),
        (["{}:causal", "--device", "h100", "--dtype", "int8"], "Invalid value for '--dtype'"),
        (["{}:causal", "--device", "h100", "--direction", "sideways"], "Invalid value for '--direction'"),
    ],
)
def test_mistakes_of_building(arguments: list[str], match: str, declared: str) -> None:
    message = fails("build", *(a.format(declared) for a in arguments))
    assert re.search(match, message), message


@pytest.mark.parametrize("command", [["cache", "list"], ["cache", "prune"], ["cache", "clear"], ["cache", "path"]])
def test_a_cache_that_cannot_be_used_is_said_in_one_line(command: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    assert "expected a folder, got a file" in fails(*command)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "cache" / "x"))

    monkeypatch.setattr(prune, "entries", refused)
    assert re.search(r"Error: \S+cache/x: Permission denied", fails("cache", "list"))


@pytest.mark.parametrize("command", ["mask", "tune"])
def test_a_missing_scalar_is_named_with_its_option(command: str) -> None:
    message = fails(command, "--mask", "q_pos - kv_pos < window", "--scalar", "window:int")
    assert message.strip() == "Error: --set: missing window; write --set window=NUMBER"


def test_a_picture_of_what_a_tensor_holds_wants_the_tensor() -> None:
    written = ("--mask", "kv_pos < n[head]", "--tensor", "n:1:int", "--q-len", "64")
    message = fails("mask", *written)
    assert message.startswith(
        "Error: --set: missing n, a tensor; write --set n=random, or draw what it holds in Python"
    )
    assert "1 edge" in succeeds("mask", *written, "--set", "n=random")


def test_without_score_and_mask_attention_is_full() -> None:
    """What options leave out is as in `weft.Attention()`."""
    sizes = ("--heads", "4", "--q-len", "128", "--device", "h100")
    assert succeeds("explain", *sizes) == succeeds("explain", "--mask", "True", *sizes)
    assert succeeds("explain", "--scale", "1.0", *sizes) == succeeds(
        "explain", "--mask", "True", "--scale", "1.0", *sizes
    )
    assert "sink" in succeeds("explain", "--sink", "0.0", *sizes)


@pytest.mark.parametrize("device", ["h200", "h100", "a100", "cpu"])
def test_a_short_explanation_fits_a_screen(device: str) -> None:
    """Its times and bounds are those of the long one."""
    written = (
        "--score",
        "score + t[head, abs(q_pos - kv_pos)]",
        "--tensor",
        "t:2",
        "--mask",
        "doc[kv_pos] == doc[q_pos]",
    )
    given = ("--tensor", "doc:1:int", "--set", "doc=random", "--set", "t=random", "--q-len", "512", "--device", device)
    whole = succeeds("explain", *written, *given)
    short = succeeds("explain", *written, *given, "--short")
    assert len(short.splitlines()) <= 24 and max(map(len, short.splitlines())) <= 100
    for row in re.findall(r"^(\w+) +\S+ \S+ +\S+ +([\d.]+) +(.+)$", short, re.MULTILINE):
        if row[0] not in ("kernel", "variant", "problem", "hardware"):
            assert re.search(rf"^{row[0]} .* {re.escape(row[1])} +{re.escape(row[2])}$", whole, re.MULTILINE), row
    assert "schedule  flash" in short and "forward: " in short and "backward: " in short
    assert "note" in short.splitlines()[-1]


def test_drawn_tensors_are_as_large_as_they_are_read() -> None:
    """A call with them is sound, and one entry less would not do."""
    table, near, seen = weft.tensor("table", 2), weft.tensor("near", 3, int), weft.tensor("seen", 2, bool)
    n = weft.scalar("n", int)
    score = weft.score + table[weft.head, weft.minimum(weft.abs(weft.q_pos - weft.kv_pos), n)]
    far = near[weft.batch, weft.kv_head, weft.kv_pos // 4]
    variant = weft.Attention(score + far, seen[weft.q_pos, weft.kv_pos + 3], name="drawn")
    names, sizes = ["table", "near", "seen"], weft.shape(batch=2, heads=4, kv_heads=2, q_len=9, kv_len=30, head_dim=8)
    found = drawn_operands(variant, names, ranges_of(sizes, None), {"n": 7})
    assert {name: list(t.shape) for name, t in found.items()} == {"table": [4, 8], "near": [2, 2, 8], "seen": [30, 33]}
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 30, 8)
    assert variant(q, k, k, n=7, **found).isfinite().all()
    for name, t in found.items():
        for axis in range(t.dim()):
            short = found | {name: t.narrow(axis, 0, t.shape[axis] - 1)}
            with pytest.raises(weft.WeftError, match=rf"{name}.* entr(y|ies) there"):
                variant(q, k, k, n=7, **short)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_build_without_tracebacks(tmp_path: Path) -> None:
    """In whichever process it comes, and while these still import what they need."""
    command = [sys.executable, "-m", "weft", "build", "examples/char_gpt.py:capped_window", "--device", "h100"]
    environment = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    started = subprocess.Popen(
        [*command, "--jobs", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    while (
        len(Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()) < 3 and started.poll() is None
    ):
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    said, _ = started.communicate(timeout=60)
    assert "Traceback" not in said and started.returncode == 1
