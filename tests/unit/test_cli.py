"""The `weft` command, run as a person would run it."""

import ast
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import weft
from weft.cli import main
from weft.runtime import cache, driver

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


def test_explain_takes_a_schedule_in_part() -> None:
    wide = ["--head-dim", "64", "--device", "h200"]
    text = succeeds("explain", "--mask", "True", *wide, "--schedule", "flash/flash_dquery=triton:64x32w4s2")
    choices = re.findall(r"^ +(\w+=\w+:\S+)$", text, re.MULTILINE)
    assert "flash_dquery=triton:64x32w4s2" in choices and len(choices) == 4
    again = succeeds("explain", "--mask", "True", *wide, "--schedule", "/".join(["flash", *choices]))
    assert again == text


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
    assert "0 entries" in succeeds("cache", "list")
    query = torch.randn(1, 1, 4, 16)
    weft.Attention(score=weft.score * 1.25, name="for_the_cache")(query, query, query)
    assert "for_the_cache" in succeeds("cache", "list")
    assert "removed 1 entries" in succeeds("cache", "clear")
    assert "0 entries" in succeeds("cache", "list")


def test_cache_list_gives_the_name_of_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    query = torch.randn(1, 1, 4, 16)
    variant = weft.Attention(score=weft.score * 1.75, name="to_be_edited")
    variant(query, query, query)
    command = succeeds("cache", "list").splitlines()[-1]
    (tmp_path / "edits").mkdir()
    monkeypatch.setenv("WEFT_EDITED_DIR", str(tmp_path / "edits"))
    subprocess.run(command, shell=True, check=True)
    assert f"-{variant.digest}.py" in command
    driver.forget()
    again = weft.Attention(score=weft.score * 1.75, name="to_be_edited")
    with pytest.warns(RuntimeWarning, match="to_be_edited runs the edited module"):
        again(*[torch.randn(1, 1, 8, 16)] * 3, target="cpu")  # a call of another kind, for which nothing is loaded yet


def test_cache_prune(tmp_path: Path) -> None:
    key = cache.Key("v", "forward", "cpu", "d16", "text", "flash")
    for made in (key, replace(key, name="old", torch="0.4"), replace(key, name="torn")):
        cache.load_or_build(made, lambda: "answer = 42\n")
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
    for kernel in ("flash_forward", "flash_backward"):
        assert re.search(rf"^{kernel} +\d+\.\d+ ms$", output, re.MULTILINE)
    for asked in (["--schedule", schedule[1]], []):  # also where nothing is asked for: it is remembered
        shown = succeeds("explain", *LOCAL, *small, *asked)
        assert re.search(rf"^schedule +{algorithm}$", shown, re.MULTILINE)
        assert all(re.search(rf"^ +{choice}$", shown, re.MULTILINE) for choice in choices)
    assert "missing values of window" in fails("tune", *LOCAL[:-2], *small)
    assert "without tensor operands" in fails("tune", "--score", "score + t[head]", "--tensor", "t:1", *small)


def test_doctor_names_versions_and_targets() -> None:
    import torch

    output = succeeds("doctor")
    assert torch.__version__.split("+")[0] in output
    for target in ("hopper", "triton", "interpret", "cpu"):
        assert re.search(rf"{target} .*\w", output)
    if not torch.cuda.is_available():
        assert "needs a GPU" in output


# -- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "expected a variant: --score and --mask, or the name of a declared one"),
        (["--mask", "kv_pos <="], "--mask: not an expression of the language: 'kv_pos <='"),
        (["--mask", "kv_pos <= w"], "--mask: unknown name 'w': .*; declare operands with --scalar and --tensor"),
        (["--mask", "kv_pos < 1 and q_pos < 2"], "--mask: .*write `a & b` for `and`"),
        (["--score", "q_pos < 1"], "score: expected a number, got a bool"),
        (["--mask", "score > 0"], "mask: `score` cannot be used inside a mask"),
        (["--mask", "True", "--scalar", "w"], "--scalar: expected NAME:int or NAME:float, got 'w'"),
        (["--mask", "True", "--scalar", "head:int"], "the name 'head' is reserved"),
        (["--mask", "True", "--tensor", "t:1:text"], "--tensor: expected NAME:RANK or NAME:RANK:TYPE"),
        (["--mask", "True", "--tensor", "t:9"], "tensor 't': expected a rank from 1 to 4, got 9"),
        (["--mask", "True", "--set", "w=x"], "--set: expected NAME=NUMBER, got 'w=x'"),
        (["--mask", "True", "--heads", "4", "--kv-heads", "3"], "heads: expected a multiple of kv_heads 3, got 4"),
        (["--mask", "True", "--heads", "0"], "Invalid value for '--heads'"),
        (["--mask", "True", "--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--mask", "True", "--device", "abacus"], "abacus"),
        (["--mask", "True", "--target", "abacus"], "Invalid value for '--target'"),
        (["--mask", "True", "--schedule", "abacus"], "abacus"),
        (["--mask", "True", "--schedule", "flash/cpu/64x64"], "expected standard, streaming, flash, or text like"),
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
    assert "expected a weft.Attention, got int" in message and "['causal']" in message


def test_a_missing_scalar_is_named() -> None:
    assert "window" in fails("mask", "--mask", "q_pos - kv_pos < window", "--scalar", "window:int")
