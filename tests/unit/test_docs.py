"""What the documents show is what happens."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import weft
from weft.cli import main
from weft.runtime.settings import Settings

ROOT = Path(__file__).parents[2]


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_the_example_of_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,), (expected,) = blocks("README.md", "python"), blocks("README.md", "text")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == expected


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith("weft ")]
    assert len(lines) >= 4
    for line in lines:
        arguments = re.findall(r"'[^']*'|\S+", line.split("    #")[0])[1:]
        given = [
            a.strip("'").replace("examples/", f"{ROOT}/examples/").replace("mask.png", f"{tmp_path}/m.png")
            for a in arguments
        ]
        result = CliRunner().invoke(main, given)
        assert result.exit_code == 0, f"{line}: {result.output}"


def test_examples_of_the_language_page_run() -> None:
    namespace: dict[str, object] = {"__name__": "language"}
    for code in blocks("docs/language.md", "python"):
        declarations = "\n".join(line for line in code.splitlines() if not line.startswith("out = "))
        exec(compile(declarations, "language.md", "exec"), namespace)
    assert isinstance(namespace["local_alibi"], weft.Attention) and isinstance(namespace["mla"], weft.Attention)


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


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
