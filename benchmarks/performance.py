"""docs/performance.md, written from the results that are stored in benchmarks/results.

    python benchmarks/performance.py                     the page, and the table of README.md
    python benchmarks/performance.py --add bench.json    stores a report of benchmarks/attention.py --json first

The prose of the page is benchmarks/performance.md.jinja. Of each row the newest run counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench_results import FITTED, RESULTS, Rates, Result, of_report, stored
from jinja2 import Environment, StrictUndefined

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
COLUMNS = {
    "cudnn": "cuDNN", "fa4": "FA4", "flex_flash": "Flex (FLASH)", "flex": "Flex (Triton)", "fa2": "FA2",
    "weft_triton": "Weft triton", "weft_hopper": "Weft hopper", "weft_repeats": "repeats",
}  # fmt: skip
PEERS = ("cudnn", "fa4", "flex_flash", "flex", "fa2")
SHOWN = (
    "decode", "decode_us", "latent_decode", "mixed", "chunks", "host", "host_decode", "first_calls", "cpu", "memory",
    "traffic", "fp8", "fp8_rows", "fp8_decode", "fp8_latent", "fp8_appends", "fp8_quantize", "two_gpus",
    "two_gpus_decode",
)  # fmt: skip
AIMS = {  # of backwards on an H200, TFLOP/s
    "D64 H32 S2048 causal": 440, "D64 H32 S8192 causal": 560, "D64 H32 S8192 full": 585, "D80 H25 S4096 causal": 480,
    "D96 H21 S4096 causal": 530, "D128 H16 S2048 causal": 510, "D128 H16 S8192 causal": 640, "D128 H16 S8192 full": 685,
    "D256 H8 S8192 causal": 460, "D256 H8 S8192 full": 470, "D128 H32/8 S8192 causal": 620,
    "D64 H32/4 S2048 causal": 420, "D128 H8 S131072 B1 causal": 640,
}  # fmt: skip
OF_README = (
    "D128 H16 S8192 causal", "D256 H8 S8192 causal", "D128 H16 S8192 softcap 20", "D128 H16 S8192 alibi",
    "D128 H16 S8192 window 1024", "D128 H16 S8192 documents 1024",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The newest figures of a row on one card, each with the run that it is of."""

    name: str
    cells: dict[str, tuple[Rates, Result]]  # by column

    @property
    def newest(self) -> Result:
        """The run that has the figures of Weft, or of anything."""
        return max(
            (result for _, result in self.cells.values()), key=lambda r: (r.date, len(r.rates.get(self.name, {})))
        )


def rows_of(results: Sequence[Result], card: str) -> list[Row]:
    """Rows by name, in the order of the benchmark, then of files; `results` are the newest first."""
    found: dict[str, dict[str, tuple[Rates, Result]]] = {}
    for result in (r for r in results if r.short_card == card):
        for name, cells in result.rates.items():
            row = found.setdefault(name, {})
            for column, rates in cells.items():
                if column in COLUMNS and (column not in row or _wholer(rates, row[column][0])):
                    row[column] = rates, result
    rows = [Row(name, cells) for name, cells in found.items()]
    return sorted(rows, key=lambda row: _order(row.name))


def _wholer(one: Rates, other: Rates) -> bool:
    """Whether an older figure has both directions, and the newer one not."""
    return None in other and None not in one


def _order(name: str) -> tuple[object, ...]:
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    variant = " ".join(re.sub(r"[A-Z]\S+", "", name).split())
    plain = {"causal": 0, "full": 1}.get(variant, 2)
    return plain == 2, variant if plain == 2 else "", *numbers[:3], plain, name


def text_of(rates: Rates) -> str:
    return " / ".join("-" if rate is None else f"{rate:.0f}" for rate in rates)


# --- parts of the page ------------------------------------------------------------------------------------------------
def letters(results: Sequence[Result]) -> dict[str, str]:
    """A letter for each run that has rates; the oldest has the first one."""
    rated = sorted((r for r in results if r.rates), key=lambda r: (r.date, r.name))
    return {r.name: chr(ord("A") + n) if n < 26 else f"A{chr(ord('A') + n - 26)}" for n, r in enumerate(rated)}


def table_of_rates(rows: Sequence[Row], marks: dict[str, str]) -> str:
    """Rows by columns. A figure that is not of the row's newest run has its letter."""
    columns = [c for c in COLUMNS if any(c in row.cells for row in rows)]
    lines = [["forward / backward, TFLOP/s", "run", *(COLUMNS[c] for c in columns)]]
    for row in rows:
        main = row.newest
        shown = [
            text_of(row.cells[c][0]) + (f" ({marks[row.cells[c][1].name]})" if row.cells[c][1] is not main else "")
            if c in row.cells
            else ""
            for c in columns
        ]
        lines.append([row.name, marks[main.name], *shown])
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *rest))


@dataclass(frozen=True)
class Ratio:
    """Weft's speed over a peer's: the figures that the page shows for a row."""

    card: str
    target: str
    peer: str
    direction: int
    one_run: bool  # or the two are of different runs
    row: str
    value: float


def ratios(results: Sequence[Result]) -> list[Ratio]:
    return [
        Ratio(card, target, peer, direction, runs[0] is runs[1], row.name, ours / theirs)
        for card in ("h200", "h100")
        for row in rows_of(results, card)
        for target, peer in product(("weft_hopper", "weft_triton"), PEERS)
        if target in row.cells and peer in row.cells
        for direction, ours, theirs in zip((0, 1), row.cells[target][0], row.cells[peer][0])
        if ours and theirs
        for runs in [(row.cells[target][1], row.cells[peer][1])]
    ]


def summary(found: Sequence[Ratio]) -> str:
    """A line for each card, target and peer: from the least to the greatest ratio, and the worst rows."""
    lines = [["card", "target", "beside", "in", "rows", "forward", "backward", "worst forward", "worst backward"]]
    groups: dict[tuple[str, str, str, bool], tuple[list[Ratio], list[Ratio]]] = {}
    for r in found:
        groups.setdefault((r.card, r.target, r.peer, r.one_run), ([], []))[r.direction].append(r)
    order = {name: n for n, name in enumerate((*COLUMNS, "h200", "h100"))}
    for key in sorted(groups, key=lambda k: (order[k[0]], -order[k[1]], order[k[2]], not k[3])):
        card, target, peer, one_run = key
        both = groups[key]
        rows, word = str(len({r.row for rs in both for r in rs})), "one run" if one_run else "two runs"
        names = card.upper(), target.removeprefix("weft_"), COLUMNS[peer], word, rows
        lines.append([*names, *map(_span, both), *map(_worst, both)])
    return markdown(lines)


def _span(found: Sequence[Ratio]) -> str:
    values = [r.value for r in found]
    if not values:
        return ""
    return f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f}"


def _worst(found: Sequence[Ratio]) -> str:
    return min(found, key=lambda r: r.value).row if found else ""


def behind(found: Sequence[Ratio]) -> str:
    """Rows of `hopper` on an H200 that are more than 2 % behind cuDNN or FA4."""
    lines = []
    for peer, (direction, word) in product(("cudnn", "fa4"), enumerate(("forwards", "backwards"))):
        key = "h200", "weft_hopper", peer, direction
        slow = [r for r in found if (r.card, r.target, r.peer, r.direction) == key and r.value < 0.98]
        if slow:
            rows = (f"  - {r.row}: {r.value:.2f}." for r in sorted(slow, key=lambda r: r.value))
            lines += [f"- More than 2 % behind {COLUMNS[peer]} on an H200, {word}:", *rows]
    return "\n".join(lines)


def below_aims(results: Sequence[Result]) -> str:
    """Backwards of `hopper` that are short of the project's aims."""
    reached = {
        row.name: row.cells["weft_hopper"][0][1] for row in rows_of(results, "h200") if "weft_hopper" in row.cells
    }
    lines = [["backward, TFLOP/s", "reached", "aim"]]
    lines += [[n, f"{r:.0f}", str(aim)] for n, aim in AIMS.items() if (r := reached[n]) is not None and round(r) < aim]
    return markdown(lines)


def table_texts(results: Sequence[Result], key: str) -> str:
    """The newest table of that name for each card."""
    found, cards = [], set()
    for result in results:
        if key in result.tables and result.card not in cards:
            cards.add(result.card)
            table = result.tables[key]
            title = "" if found else f"### {table.title}\n\n"
            file = f"[{result.name}](../benchmarks/results/{result.name}.json)"
            found.append(f"{title}{result.card}, {result.date} ({file}).\n\n{table.markdown()}")
    return "\n".join(found)


def listed(results: Sequence[Result]) -> str:
    """Tables that the page leaves to their files."""
    return "\n".join(
        f"- {table.title} ({result.card}): [{result.name}](../benchmarks/results/{result.name}.json)."
        for result in results
        for key, table in result.tables.items()
        if key not in SHOWN
    )


def runs(results: Sequence[Result], marks: dict[str, str]) -> str:
    lines = [["run", "day", "card", "commit", "product TFLOP/s, copy GB/s", "versions, file"]]
    for result in sorted((r for r in results if r.rates), key=lambda r: marks[r.name].rjust(2)):
        ceilings = ", ".join(f"{x:.0f}" for x in (result.matmul_tflops, result.copy_gbs) if x)
        commit = result.commit or (f"({result.reported})" if result.reported else "")
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        file = f"[{result.name}](../benchmarks/results/{result.name}.json)"
        lines.append([marks[result.name], result.date, result.card, commit, ceilings, f"{versions}; {file}"])
    return markdown(lines)


# --- the page and the table of the README -----------------------------------------------------------------------------
def page(results: Sequence[Result]) -> str:
    marks, found = letters(results), ratios(results)
    template = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        Path(__file__).with_suffix(".md.jinja").read_text()
    )
    cards = [
        {"title": f"An {card.upper()}", "table": table_of_rates(rows_of(results, card), marks)}
        for card in ("h200", "h100")
    ]
    text = template.render(
        summary=summary(found),
        behind=behind(found),
        below_aims=below_aims(results),
        cards=cards,
        shown=[text for key in SHOWN if (text := table_texts(results, key))],
        listed=listed(results),
        runs=runs(results, marks),
        fitted=FITTED,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def speed_of_readme(results: Sequence[Result]) -> str:
    """Six rows: Weft, the peer whose forward is the fastest, and FlexAttention."""
    rows = {row.name: row.cells for row in rows_of(results, "h200")}
    lines = [["", "Weft", "best peer", "FlexAttention"]]
    for name in OF_README:
        cells = {column: rates for column, (rates, _) in rows[name].items()}
        best = max((c for c in PEERS if c in cells and c != "flex"), key=lambda c: cells[c][0] or 0.0)
        short = {"flex_flash": "FLASH"}.get(best, COLUMNS[best])
        lines.append([name, text_of(cells["weft_hopper"]), f"{text_of(cells[best])} ({short})", text_of(cells["flex"])])
    return markdown(lines)


def readme(results: Sequence[Result], text: str) -> str:
    """The README with its table of speeds, and the ranges beside FA4 and cuDNN, made anew."""
    begin, end = "<!-- speed: begin -->\n", "<!-- speed: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + speed_of_readme(results) + "\n" + claims(results) + end + after


def claims(results: Sequence[Result]) -> str:
    """How `hopper` stands beside its peers on an H200, over all rows."""
    found = [r for r in ratios(results) if (r.card, r.target) == ("h200", "weft_hopper")]
    said = "Weft's speed over that of the other:"
    for peer in ("fa4", "cudnn", "flex_flash", "flex"):
        forward, backward = (_span([r for r in found if (r.peer, r.direction) == (peer, d)]) for d in (0, 1))
        said += f" {COLUMNS[peer]} {forward} forward and {backward} backward."
    return f"{said}\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="JSON", help="a report of benchmarks/attention.py to store")
    parser.add_argument("--what", default="attention", help="the last word of its file's name")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", help="that was measured; this checkout's if not given")
    given = parser.parse_args(words)
    if given.add:
        asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = given.commit or subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        print(of_report(json.loads(given.add.read_text()), given.date, commit).save(RESULTS, given.what))
    results = stored()
    PAGE.write_text(page(results))
    README.write_text(readme(results, README.read_text()))


if __name__ == "__main__":
    main()
