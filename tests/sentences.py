"""python -m tests.sentences [PAGE ...]: sentences of more than 35 words, of pages and of public docstrings."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 35
PAGES = sorted(str(p.relative_to(ROOT)) for f in ("docs", "templates") for p in (ROOT / f).rglob("*.md"))


def sentences(text: str) -> list[str]:
    """Sentences of a page: an item of a list and a cell of a table begin a new one, code and addresses do not count."""
    text = re.sub(r"<!-- sweep: begin -->.*?<!-- sweep: end -->|```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"``.*?``|`[^`]*`", "x", text)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#>])|(?<=\|)\n", text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            found += re.split(r"(?<=[.!?])['\")*\]]*\s+", " ".join(cell.split()))
    return [sentence for sentence in found if sentence]


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def docstrings() -> Iterator[tuple[str, str]]:
    """Of what `import weft` gives and its modules hold in public: (place, text)."""
    for path in sorted((ROOT / "api").rglob("*.py")):
        if "src" in path.parts or any(p.is_symlink() for p in path.parents if p.is_relative_to(ROOT / "api")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = getattr(node, "name", path.stem)
                if not name.startswith("_") and (text := ast.get_docstring(node)):
                    prose = re.split(r"\n\s*>>> ", text)[0]
                    place = f"{path.relative_to(ROOT)}:{name}"
                    yield place, re.sub(r"(?:\n|(?<=\.)\s)(\w+(, \w+)*: )", r"\n\n\1", prose)


def long_sentences(pages: list[str]) -> list[tuple[str, int, str]]:
    """(place, words, sentence)"""
    texts = [(page, (ROOT / page).read_text()) for page in pages if page.endswith(".md")]
    texts += docstrings() if "docstrings" in pages else []
    return [(place, words(s), s) for place, text in texts for s in sentences(text) if words(s) > MOST_WORDS]


if __name__ == "__main__":
    found = long_sentences(sys.argv[1:] or ["README.md", *PAGES, "docstrings"])
    for place, count, sentence in found:
        print(f"{place}: {count}: {sentence}")
    print(f"{len(found)} sentences of more than {MOST_WORDS} words")
