"""What the documents show is what happens."""

import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

import weft
from weft.compiler.planning import tuner
from weft.runtime import build
from weft.runtime.settings import Settings
from weft.tools.cli import main

from .. import fresh, sentences

ROOT = Path(__file__).parents[2]


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def page(path: str) -> str:
    return (ROOT / path).read_text()


def test_all_code_of_the_readme_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Its Python blocks, one after the other, and a block of text after each: what it prints."""
    found = re.findall(r"```(python|text)\n(.*?)```", page("README.md"), re.DOTALL)
    assert [language for language, _ in found] == ["python", "text"] * 2
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # FlexAttention traces its functions, and asks for their module
    for (_, code), (_, expected) in zip(found[::2], found[1::2]):
        with warnings.catch_warnings():
            if "flex_attention" in code:
                warnings.simplefilter("ignore")  # torch's own warns where it is not compiled
            exec(compile(code, "README.md", "exec"), module.__dict__)
        assert capsys.readouterr().out == expected


def commands(path: str) -> list[list[str]]:
    """The shell commands of a page: lines of its sh blocks, and what of the weft command stands in its text."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", page(path), flags=re.DOTALL)
    lines += [line for line in re.findall(r"`(weft [^`]+)`", text)]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


PAGES = [
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for f in ("docs", "templates") for p in (ROOT / f).rglob("*.md")),
]
WEFT = [(path, words) for path in PAGES for words in commands(path) if words[0] == "weft"]


def test_commands_are_shown() -> None:
    shown = {words[1] for _, words in WEFT}
    assert shown >= {"explain", "source", "mask", "doctor", "build", "tune", "cache"}


@pytest.mark.parametrize(("path", "words"), WEFT, ids=lambda x: x if isinstance(x, str) else " ".join(x)[:60])
def test_the_commands_of_the_documents_run(path: str, words: list[str], tmp_path: Path, monkeypatch) -> None:
    """Of what is built ahead two modules, in a process each: the next test has all."""
    jobs_of = build.jobs_of
    monkeypatch.setattr(build, "jobs_of", lambda *given, **options: jobs_of(*given, **options)[:2])
    check_command(words, tmp_path, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("words", [words for _, words in WEFT if words[1] == "build"], ids=" ".join)
def test_all_that_the_documents_build_ahead_compiles(words: list[str], tmp_path: Path, monkeypatch) -> None:
    check_command(words, tmp_path, monkeypatch)


def check_command(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(tuner, "MOST_ROUNDS", tuner.LEAST_ROUNDS)  # test_tuner.py has more
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = (
        words[1:] if len(words) > 2 or words[1] in ("doctor",) else [*words[1:], "--help"]
    )  # named, without a variant
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, f"{words}: {result.output}"
    for named in (words[k + 1] for k, word in enumerate(words) if word == "-o"):
        assert (tmp_path / named).stat().st_size > 0


AS_PYTHON_RUNS_A_FILE = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("path", PAGES)
def test_other_commands_of_the_documents_are_there(path: str) -> None:
    """Words of make, and programs with their options: they take minutes or a GPU; other tests run what they call."""
    for words in commands(path):
        if words[0] == "make":
            for word in words[1:]:
                assert subprocess.run(["make", "-n", word], cwd=ROOT, capture_output=True).returncode == 0, word
        elif words[0] == "python":
            said = fresh.run(AS_PYTHON_RUNS_A_FILE, words[1], "--help", cwd=ROOT)
            assert said.returncode == 0, said.stderr
            assert all(word in said.stdout for word in words[2:] if word.startswith("--")), words
        elif words[0] != "pip":  # test_install.py runs these
            assert words[0] == "weft", f"{path}: no test knows how to run {words}"


def test_all_code_of_the_language_page_runs() -> None:
    """The calls too, on tensors of the shapes that their comments name."""
    length, heads = 24, 2
    tensors = {
        "query": torch.randn(1, heads, length, 16 + 64), "cache": torch.randn(1, 1, length, 512 + 64),
        "uk": torch.randn(heads, 512, 16), "uv": torch.randn(heads, 512, 32),
    }  # fmt: skip
    namespace: dict[str, object] = {"__name__": "language", **tensors}
    for code in blocks("docs/language.md", "python"):
        exec(compile(code, "language.md", "exec"), namespace)
    assert isinstance(namespace["local_alibi"], weft.Attention) and isinstance(namespace["mla"], weft.Attention)
    assert namespace["out"].shape == (1, heads, length, 32)  # type: ignore[attr-defined]


def test_all_code_of_the_page_on_fp8_runs() -> None:
    namespace: dict[str, object] = {"__name__": "fp8_page"}
    for code in blocks("docs/fp8.md", "python"):
        exec(compile(code, "fp8.md", "exec"), namespace)
    assert namespace["out"].shape == (1, 8, 64, 128)  # type: ignore[attr-defined]


def test_all_code_of_the_page_on_several_devices_runs_and_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And its table says what is predicted."""
    found = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page("docs/distributed.md"), re.DOTALL)
    namespace: dict[str, object] = {"__name__": "distributed_page"}
    for code, printed in found:
        exec(compile(code, "distributed.md", "exec"), namespace)
        assert capsys.readouterr().out == printed
    causal, sizes = weft.Attention(mask=weft.masks.causal), {"heads": 32, "kv_heads": 8, "head_dim": 128}
    made = weft.distributed.plan(causal, ranks=(8, 8), length=1 << 20, device="h100", **sizes)
    other = "; ".join(f"{name.split(',')[0]} {gain:.1f}" for name, _, gain in made.others)
    row = f"| causal, 1M | 64 | {made.strategy} | {made.balance} | {made.predicted.gain:.1f} | products | {other} |"
    assert row in page("docs/distributed.md"), row


def test_all_code_of_the_transformers_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")  # the extra weft-attention[transformers]
    namespace: dict[str, object] = {"__name__": "transformers_page"}
    for code in blocks("docs/transformers.md", "python"):
        exec(compile(code, "transformers.md", "exec"), namespace)
    assert "kv_pos <= q_pos" in capsys.readouterr().out.splitlines()


def without_places(message: object) -> str:
    """A message on one line, without the lines of code that it names."""
    text = re.sub(r" \(declared at [^)]*\)", "", str(message))
    return " ".join(re.sub(r"\n +at .*", "", text).split())


def test_all_code_of_the_page_of_limits_runs_or_is_refused_as_it_says() -> None:
    """A block of text after a block of code is the message that refuses it."""
    found = re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page("docs/limits.md"), re.DOTALL)
    namespace: dict[str, object] = {"__name__": "limits"}
    for code, refused in found:
        compiled = compile(code, "limits.md", "exec")
        if not refused:
            exec(compiled, namespace)
            continue
        with pytest.raises((weft.WeftError, AttributeError)) as caught:
            exec(compiled, namespace)
        assert without_places(caught.value) == without_places(refused)
    assert sum(bool(refused) for _, refused in found) >= 7 and len(found) >= 18


def test_every_link_inside_the_documents_leads_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page(path), flags=re.DOTALL)):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            to = (ROOT / path).parent / name if name else ROOT / path
            assert to.exists(), f"{path}: {target}"
            if heading:
                titles = re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
                assert heading in anchors, f"{path}: {target}"


def test_python_stands_in_these_pages_alone() -> None:
    pages = [
        "README.md",
        "docs/distributed.md",
        "docs/fp8.md",
        "docs/gallery.md",
        "docs/language.md",
        "docs/limits.md",
        "docs/transformers.md",
    ]
    assert [path for path in PAGES if blocks(path, "python")] == pages


def test_every_symbol_and_function_is_in_the_language_page() -> None:
    from weft.ir.expr import SYMBOLS
    from weft.ir.operators import function_names

    page = (ROOT / "docs/language.md").read_text()
    for name in (*SYMBOLS, *function_names()):
        assert re.search(rf"[`\s(,]{name}[`\s(,]", page), name


def test_every_setting_is_in_the_settings_page() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    for name in Settings.__dataclass_fields__:
        assert f"weft.settings({name}=" in page and f"WEFT_{name.upper()}" in page


def test_the_table_of_targets_is_what_the_targets_say() -> None:
    """After a change: weft doctor --matrix, between the marks."""
    shown = page("docs/targets.md").partition("<!-- matrix: begin -->\n")[2].partition("<!-- matrix: end -->")[0]
    assert CliRunner().invoke(main, ["doctor", "--matrix"]).output == shown


def launched(variant: weft.Attention, q_len: int, kv_len: int, dim: int = 128, **options) -> set[str]:
    """The kernels of a forward on an H200, with their forms."""
    sizes = weft.shape(heads=8, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=dim, dtype="bf16")
    plan = variant.plan(sizes, device="h200", **options)
    return {f"{k.code.name} {k.form}" for k in plan.kernels if k.direction == "forward"}


def test_what_a_new_length_compiles_is_what_the_readme_says() -> None:
    """That calls compile these once, and others nothing: test_shortest_way.py, and test_kernels_on_gpu.py on a GPU."""
    said = "16,384 keys under a mask that reads tensors, divided keys in decoding, short sequences at D64 on sm_90."
    assert said in " ".join(page("README.md").split())
    causal = weft.Attention(mask=weft.masks.causal, name="causal")
    ids = weft.tensor("ids", 1, int)
    documents = weft.Attention(mask=ids[weft.q_pos] == ids[weft.kv_pos], name="documents")
    assert launched(causal, 200, 200) == launched(causal, 3000, 3000) == launched(causal, 40000, 40000)
    found = [launched(documents, n, n, ids=torch.zeros(n, dtype=torch.int32)) for n in (200, 16384, 16385)]
    assert found[0] == found[1] != found[2]
    decoded = [launched(causal, 1, n, target="triton") for n in (64, 40000, 80000)]
    assert decoded[0] < decoded[1] == decoded[2] and any("join_parts" in name for name in decoded[1])
    assert launched(causal, 200, 200, dim=64) != launched(causal, 3000, 3000, dim=64)


PUBLIC = [path for path in PAGES if path.count("/") < 2 and not path.endswith("design.md")]
LONG_ELSEWHERE = 0  # sentences of pages for contributors and of notes that are too long: this number may only fall


def test_sentences_of_public_pages_and_docstrings_are_short() -> None:
    """At most 35 words: python -m tests.sentences prints those that are longer."""
    assert sentences.long_sentences([*PUBLIC, "docstrings"]) == []
    assert len(sentences.long_sentences([path for path in PAGES if path not in PUBLIC])) <= LONG_ELSEWHERE


def test_words_of_a_sentence_are_counted() -> None:
    text = "A `b c` d, [e f](g/h.md) i. J\nk: l; m.\n\n- n o\n- p\n\n| q | r s |\n| --- | --- |\n\n```python\nt\n```\n"
    found = sentences.sentences(text)
    assert [sentences.words(s) for s in found if sentences.words(s)] == [6, 4, 2, 1, 1, 2]


PLACES = [path for path in PAGES if path.endswith(("architecture.md", "design.md")) or path.startswith("templates")]


@pytest.mark.parametrize("path", PLACES)
def test_files_and_tests_that_pages_for_contributors_name_are_there(path: str) -> None:
    tests = [p for p in (ROOT / "tests").rglob("*.py")]
    functions = {name for p in tests for name in re.findall(r"^def (test_\w+)", p.read_text(), re.MULTILINE)}
    for name in re.findall(r"`(test_\w+)`", page(path)):
        assert name in functions, f"{path}: {name}"
    for name in re.findall(r"`(test_\w+\.py)`", page(path)):
        assert any(p.name == name for p in tests), f"{path}: {name}"
    rooms = ("ir/", "compiler/", "codegen/", "runtime/", "api/", "templates/", "tests/", "benchmarks/")
    for name in re.findall(r"`((?:\w+/)+[\w.]*)`", page(path)):
        if name.startswith(rooms):
            assert (ROOT / name).exists() or list((ROOT / name).parent.glob(Path(name).name + ".*")), f"{path}: {name}"


def test_the_page_of_places_is_short() -> None:
    assert len(page("docs/architecture.md").splitlines()) <= 150 and len(page("README.md").splitlines()) < 150


WORDS = ("question", "change", "setup", "table", "verdict")
HEAD = r"# (.+)\n\n\| \| \|\n\| --- \| --- \|\n" + "".join(rf"\| {word} \| (.+) \|\n" for word in WORDS)


def test_each_note_of_an_experiment_has_its_head_and_a_line_in_the_index() -> None:
    index = page("docs/experiments/README.md")
    for path in (ROOT / "docs/experiments").glob("2*.md"):
        head = re.match(HEAD, path.read_text())
        assert head, f"{path.name}: expected a title, then question, change, setup, table and verdict"
        assert f"| [{head[1]}]({path.name}) | {head[6]} |\n" in index
