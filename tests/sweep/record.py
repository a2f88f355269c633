"""What the sweep found, as a file and as a table of the docs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

import transformers

from .judge import Found

RECORD = Path(__file__).parent / "record.json"
PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
TITLES = {
    "refused": "Refused, with a message",
    "no attention": "Never call Weft: they have an attention of their own, or none. Their numbers are those of `eager`",
    "not built": "Not built small by the sweep, so not looked at",
}  # fmt: skip
OPTIONAL = ("detectron2", "natten", "scipy", "timm", "torchaudio", "torchvision")
UNBUILT = {  # reasons in a few words, by what transformers says
    "has no `forward` of its own": "no forward of its own",
    "fails in transformers itself, under any attention": "no attribute 'image_outputs'",
}


def write(results: Sequence[Found], whole: bool = True) -> None:
    """Both, for the installed version. whole: all classes; else what is known of others stays."""
    known = {} if whole or version() != transformers.__version__ else recorded()
    found = sorted((known | {one.name: one for one in results}).items())
    record = {
        "transformers": transformers.__version__, "besides": libraries(),
        "classes": {name: [one.status, one.why] for name, one in found},
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:begin]}{BEGIN}\n{table(recorded())}{text[end:]}")


def libraries() -> dict[str, str]:
    """Those that some classes need, and Weft does not, by what is installed."""
    found = {}
    for name in OPTIONAL:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = installed(name).partition("+")[0]
    return found


def recorded() -> dict[str, Found]:
    return {name: Found(name, *what) for name, what in json.loads(RECORD.read_text())["classes"].items()}


def version() -> str:
    """The transformers that the record is of."""
    return str(json.loads(RECORD.read_text())["transformers"])


def besides() -> dict[str, str]:
    """The optional libraries, and their versions, that the record was made with."""
    return dict(json.loads(RECORD.read_text())["besides"])


def table(found: Mapping[str, Found]) -> str:
    """The part of the page that is generated."""
    counts = {status: sum(f.status == status for f in found.values()) for status in ("agrees", *TITLES)}
    lines = [
        f"Of {len(found)} classes of transformers {version()}, {counts['agrees']} agree, {counts['refused']} are "
        f"refused, {counts['no attention']} never call Weft, and {counts['not built']} were not built.", "",
    ]  # fmt: skip
    if besides():
        them = ", ".join(f"{name} {number}" for name, number in besides().items())
        lines += [f"These libraries were installed besides: {them}. Weft does not need them; some classes do.", ""]
    for status, title in TITLES.items():
        lines += [f"**{title}:**", ""]
        reasons: dict[str, list[str]] = {}
        for one in found.values():
            if one.status == status:
                reasons.setdefault(reason(one), []).append(one.name)
        lines += [f"- {why + ': ' if why else ''}{', '.join(names)}" for why, names in sorted(reasons.items())]
        lines.append("")
    return "\n".join(lines)


def reason(found: Found) -> str:
    """Why, in a few words that many classes share."""
    if found.status == "refused":
        return (
            found.why.removeprefix("UnavailableError: ")
            .removeprefix("WeftError: ")
            .removeprefix("weft: ")
            .partition(";")[0]
        )
    if found.status == "not built":
        needs = re.search(r"requires? the (\w+) library", found.why)
        missing = needs or re.search(r"No module named '(\w+)'", found.why)
        if missing:
            return f"needs {missing[1]}"
        if "million parameters" in found.why or "no configuration" in found.why:
            return "stays larger than 110 million parameters by every recipe, or has no input that is known"
        for why, words in UNBUILT.items():
            if re.search(words, found.why):
                return why
        inputs = r"missing|specif|unpack|multipl|[Dd]imension|shape|size|channel|has to be|tensor|NoneType|index out"
        return (
            "asks for inputs that the sweep does not make"
            if re.search(inputs, found.why)
            else ("has a configuration that cannot be made small by the names of its fields")
        )
    return ""


def differing(found: Iterable[Found], known: Mapping[str, Found]) -> list[str]:
    """What is not as it is written down. A class whose library is not installed is not looked at."""
    return [
        f"{one.name}: {one.status} ({one.why}), and {known[one.name].status if one.name in known else 'nothing'} before"
        for one in found
        if (one.name not in known or known[one.name].status != one.status) and not reason(one).startswith("needs ")
    ]
