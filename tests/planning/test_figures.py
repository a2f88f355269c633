"""Every figure that `explain` prints, worked out again from what it prints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import ceil

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.compiler.planning.machines.hardware import by_name

SLOPES, WINDOW, IDS = weft.tensor("slopes", 1), weft.scalar("window", int), weft.tensor("ids", 2, int)
DENSE = weft.Attention(name="dense")
LOCAL = weft.Attention(mask=(kv_pos <= q_pos) & (q_pos - kv_pos < WINDOW), name="local")
ALIBI = weft.Attention(weft.tanh(score + SLOPES[head] * (kv_pos - q_pos)), mask=kv_pos <= q_pos, name="alibi")
PACKED = weft.Attention(mask=masks.causal & masks.document(IDS), name="packed")
BY_HEAD = weft.Attention(mask=(q_pos - kv_pos < 32 * (head + 1)) & (kv_pos <= q_pos), name="by_head")
OPEN = weft.Attention(mask=(q_pos * kv_pos) % 7 < 3, name="odd")
LATENT = weft.Attention(mask=kv_pos <= q_pos, latent=weft.Latent(rank=512, rope=64), name="mla")
PAIRS = weft.Attention(score + weft.tensor("bias", 4)[weft.batch, head, q_pos, kv_pos], name="biased")

SMALL = {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 1000, "kv_len": 1100, "head_dim": 80, "dtype": "fp16"}
LONG = {"heads": 16, "kv_heads": 4, "q_len": 8192, "head_dim": 128}
WIDE = {"batch": 64, "heads": 16, "q_len": 4096, "head_dim": 64, "dtype": "fp16"}  # streaming sweeps over more than L2
DOCUMENTS = {"ids": (torch.arange(1100) // 128).expand(2, -1)}
CASES = [
    (DENSE, LONG, {"device": "h200"}),
    (DENSE, {**LONG, "q_len": 1 << 17}, {"device": "h200", "target": "triton"}),
    (DENSE, SMALL, {"device": "mi300x"}),
    (DENSE, WIDE, {"device": "a100", "schedule": "streaming"}),
    (DENSE, SMALL, {"device": "h100", "schedule": "standard"}),
    (LOCAL, LONG, {"device": "h100", "window": 1000}),
    (LOCAL, LONG, {"device": "b200"}),
    (LOCAL, {**SMALL, "dtype": "fp32"}, {"device": "cpu", "window": 100}),
    (LOCAL, SMALL, {"device": "l40s", "window": 100, "q_offset": 7}),
    (ALIBI, LONG, {"device": "h100 pcie"}),
    (ALIBI, {**SMALL, "dtype": "fp32"}, {"device": "cpu", "target": "interpret"}),
    (ALIBI, SMALL, {"device": "a100", "schedule": "standard"}),
    (PACKED, SMALL, {"device": "h100", "target": "triton", **DOCUMENTS}),
    (PACKED, SMALL, {"device": "h100"}),
    (PACKED, {**SMALL, "dtype": "fp32"}, {"device": "cpu", **DOCUMENTS}),
    (BY_HEAD, {**LONG, "heads": 32}, {"device": "h200"}),
    (OPEN, SMALL, {"device": "h200"}),
    (PAIRS, SMALL, {"device": "h200"}),
    (LATENT, {"heads": 16, "q_len": 1, "kv_len": 4096, "head_dim": 192, "value_dim": 128}, {"device": "h200"}),
    (LOCAL, {**LONG, "q_len": 1, "kv_len": 1 << 17}, {"device": "h200", "window": 5000}),
    (LATENT, {"heads": 16, "q_len": 512, "head_dim": 192, "value_dim": 128}, {"device": "h200", "form": "expanded"}),
]  # fmt: skip
COUNTS = re.compile(r"= ([\d,]+) = ([\d,]+) empty \+ ([\d,]+) edge \+ ([\d,]+) full; visited n = ([\d,]+)")
IN_WAVES = re.compile(r"([\d,]+) at once in ([\d,]+) waves?: busy ([\d.]+)")
LAST_OF_A_FORWARD = ("flash_forward", "streaming_forward", "standard_output", "split_forward", "join_parts")
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def number(text: str) -> float:
    """The value of "16.4K", "1,024" or "65.5KB"."""
    found = re.fullmatch(r"([\d.,]+)([KMGT]?)B?", text)
    assert found, text
    return float(found[1].replace(",", "")) * UNITS[found[2]]


@dataclass
class Printed:
    """One kernel as it is printed: a row of each table, and its block."""

    name: str
    amounts: list[str]
    times: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    form: dict[str, float] = field(default_factory=dict)  # rows of its tiles, as its title has them
    target: str = ""

    @property
    def busy(self) -> float:
        return float(IN_WAVES.search(self.lines["programs"])[3])  # type: ignore[index]


@dataclass(frozen=True)
class Work:
    """What one kernel holds, moves and computes."""

    sram: float
    read: float
    written: float
    moved: float  # through L2
    flops: float
    useful: float
    exps: float

    @property
    def bytes(self) -> float:
        return self.read + self.written


class Page:
    """The text of `explain`, taken apart; what was broken over lines is joined again."""

    def __init__(self, text: str, cpu: bool = False) -> None:
        self.text = text
        self.memories = ("cache", "L3", "RAM") if cpu else ("SRAM", "L2", "HBM")
        joined: list[str] = []
        for line in text.splitlines():
            if re.match(r" {10,}\S", line) and not re.match(r" +\w+=\w+:", line):
                joined[-1] += " " + line.strip()
            else:
                joined.append(line)
        self.lines = joined
        self.kernels: list[Printed] = []
        tables = [k for k, line in enumerate(joined) if line.startswith("kernel ")]
        for name, *amounts in self._rows(tables[0]):
            self.kernels.append(Printed(name, amounts))
        for kernel, (name, *times) in zip(self.kernels, self._rows(tables[1]), strict=True):
            assert kernel.name == name
            kernel.times = times
        blocks, current = iter(self.kernels), None
        for line in joined[tables[1] :]:
            if found := re.match(r"(\w+) \((\w+) (\d+)x(\d+)\S*\): a program", line):
                current = next(blocks)
                assert current.name == found[1]
                current.target, current.form = found[2], {"bq": int(found[3]), "bkv": int(found[4])}
            elif current and (found := re.match(r"  (\S+(?: \S+)?)  +(.*)", line)):
                current.lines[found[1]] = found[2]
        self.titles = joined[tables[1]].split()
        self.on_cpu = "passes" in self.titles

    def _rows(self, start: int) -> list[list[str]]:
        end = next(k for k in range(start, len(self.lines)) if not self.lines[k].strip())
        return [line.split() for line in self.lines[start + 1 : end]]

    def row(self, name: str) -> str:
        return next(line for line in self.lines if line.startswith(name + " ")).removeprefix(name).strip()

    @property
    def letters(self) -> dict[str, float]:
        """Of the problem; v where pairs were counted."""
        found = {k: float(v) for k, v in re.findall(r"\b(B|Hq|Hkv|L|T|D|Dv) +(\d+)", self.row("problem"))}
        if any(line.startswith("visible ") for line in self.lines):
            found["v"] = number(re.match(r"v = ([\d,]+) of", self.row("visible"))[1])  # type: ignore[index]
        return found

    def rate(self, name: str) -> float:
        return number(re.search(rf"\b{name} ([\d.]+[KMGT]?)\w*/s", self.row("rates"))[1])  # type: ignore[index]

    def call_milliseconds(self) -> float:
        """Of a launch."""
        return float(re.search(r"launch ([\d.]+) us", self.row("rates"))[1]) * 1e-3  # type: ignore[index]


def value(line: str, letters: dict[str, float]) -> float:
    """The number of "formula = number", which the formula gives."""
    formula, printed = re.match(r"(.*?) = ([\d,]+)", line).groups()  # type: ignore[union-attr]
    assert eval(formula, {}, letters) == pytest.approx(number(printed), abs=0.5, rel=1e-5), line
    return number(printed)


def near(shown: str, exact: float) -> None:
    """A figure with three digits."""
    assert number(shown) == pytest.approx(exact, rel=0.006, abs=0.5), (shown, exact)


@pytest.fixture(
    scope="module", params=CASES, ids=lambda c: f"{c[0].name}-{'-'.join(str(v) for v in c[2].values())[:40]}"
)
def page(request: pytest.FixtureRequest) -> Page:
    variant, sizes, options = request.param
    return Page(variant.explain(weft.shape(**sizes), **options), cpu=options["device"] == "cpu")


# -- by kernel ---------------------------------------------------------------------------------------------------------
def letters_of(page: Page, kernel: Printed) -> dict[str, float]:
    """Of the problem and of the kernel; n where its tiles were counted."""
    found = {k: float(v) for k, v in re.findall(r"(\w+) ([\d.e-]+)", kernel.lines.get("letters", ""))}
    if "tiles" in kernel.lines:
        found["n"] = number(re.search(r"visited n = ([\d,]+)", kernel.lines["tiles"])[1])  # type: ignore[index]
    return page.letters | found


def work_of(page: Page, kernel: Printed) -> Work:
    """What the printed formulas give."""
    sram, l2, hbm = page.memories
    titles = (f"{sram} bytes", f"{hbm} read", f"{hbm} written", f"{l2} traffic", "FLOPs", "useful FLOPs", "exps")
    letters, lines = letters_of(page, kernel), kernel.lines
    return Work(*(value(lines[title], letters) if title in lines else 0.0 for title in titles))


def test_tiles_are_those_of_the_problem(page: Page) -> None:
    problem = page.letters
    for kernel in page.kernels:
        if "tiles" not in kernel.lines:
            continue
        letters = letters_of(page, kernel)
        counts = COUNTS.search(kernel.lines["tiles"])
        total, empty, edge, full, visited = map(number, counts.groups())  # type: ignore[union-attr]
        grouped = kernel.name == "split_forward"  # rows of heads that share keys are in one tile, as small as they fit
        heads, rows = problem["Hkv" if grouped else "Hq"], problem["L"]
        assert total == empty + edge + full == problem["B"] * heads * letters["nq"] * letters["nkv"]
        assert visited == edge + full
        if grouped:
            rows *= problem["Hq"] // heads
            as_few = letters["nq"] > 1 or letters["bq"] < max(17, 2 * rows)
            assert letters["bq"] <= kernel.form["bq"] and (as_few or kernel.target == "hopper")  # tiles of 64 rows
        else:
            assert letters["bq"] == kernel.form["bq"]
        assert letters["bkv"] == kernel.form["bkv"]
        assert letters["nq"] == ceil(rows / letters["bq"])
        assert letters["nkv"] == ceil(problem["T"] / letters["bkv"])
        for shown, exact in zip(kernel.amounts[1].split("/"), (empty, edge, full)):
            near(shown, exact)


def test_programs_come_in_waves(page: Page) -> None:
    for kernel in page.kernels:
        line = kernel.lines["programs"]
        count = value(line, letters_of(page, kernel))
        near(kernel.amounts[0], count)
        at_once, waves, _ = map(number, IN_WAVES.search(line).groups())  # type: ignore[union-attr]
        assert waves == ceil(count / at_once)
        assert kernel.busy == pytest.approx(count / (waves * at_once), abs=1e-4)


def test_amounts_are_those_of_their_formulas(page: Page) -> None:
    for kernel in page.kernels:
        work = work_of(page, kernel)
        _, _, sram, read, written, flops, useful, intensity = kernel.amounts
        for shown, exact in ((sram, work.sram), (read, work.read), (written, work.written), (flops, work.flops)):
            near(shown, exact)
        if "v" in page.letters:
            near(useful, work.useful)
            assert work.useful <= work.flops
        else:
            assert useful == "?"
        assert float(intensity) == pytest.approx(work.flops / work.bytes, abs=0.51)


CORE = re.compile(
    r"products of \w+ ([\d.]+[KMGT])FLOP/s, speedup ([\d.]+) of (\d+) cores?; passes ([\d.]+[KMGT])B/s over "
    r"tiles of ([\d.]+[KMGT])B: ((?:\d+% in \w+(?:, )?)+); call ([\d.]+) us"
)


def test_times_of_a_cpu_add_up(page: Page) -> None:
    if not page.on_cpu:
        return
    assert page.titles == ["kernel", "matrix", "RAM", "passes", "exp", "calls", "torch", "ms", "bound"]
    for kernel in page.kernels:
        work, busy, letters = work_of(page, kernel), kernel.busy, letters_of(page, kernel)
        passes, calls = (value(kernel.lines[title], letters) for title in ("passes", "calls"))
        *rates, held, shares, call = CORE.fullmatch(kernel.lines["a core"]).groups()  # type: ignore[union-attr]
        products, speedup, _, bandwidth = map(number, rates)
        near(held, work.sram)
        assert sum(map(int, re.findall(r"(\d+)%", shares))) == pytest.approx(100, abs=2)
        milliseconds = [
            1e3 * work.flops / products / speedup / busy, 1e3 * work.bytes / page.rate("RAM"),
            1e3 * passes / bandwidth / speedup / busy, 1e3 * work.exps / page.rate("exp") / speedup / busy,
            1e-3 * calls * float(call), 0.0,
        ]  # fmt: skip
        *parts, whole = map(float, kernel.times[:-2])
        if parts[-1]:  # torch's own kernel, for which there are no formulas
            milliseconds = [0.0] * 5 + parts[-1:]
        assert parts == pytest.approx(milliseconds, rel=2e-3, abs=1e-4)
        assert whole == pytest.approx(sum(parts), abs=4e-4, rel=2e-3)
        bound, share = kernel.times[-2:]
        assert parts[page.titles.index(bound) - 1] == max(parts)
        assert int(share[:-1]) == pytest.approx(100 * max(parts) / whole, abs=1 + 3e-2 / whole)


PACE = re.compile(
    r"\w+ (\w+)(?: [a-z ]+)? \((?:not fitted|fitted on an H[12]00)\): "
    r"matrix ([\d.]+), exp ([\d.]+)(?:, start ([\d.]+) us)?(?:, ([\d.,]+) steps of ([\d.]+) us)?; "
    r"the longest program visits ([\d.,e+]+) tiles: tail ([\d.]+)"
)


def test_times_follow_from_rates(page: Page) -> None:
    if page.on_cpu:
        return  # above
    _, l2, hbm = page.memories
    titles = ["kernel", "matrix", "exp", "other", "mask", "tiles", hbm, l2, "launch", "ms", "bound"]
    assert page.titles == titles
    sms = int(re.search(r"(\d+) (?:SM|core)s", page.row("rates"))[1])  # type: ignore[index]
    for kernel in page.kernels:
        work, letters = work_of(page, kernel), letters_of(page, kernel)
        matrix, exp, start, steps, step, tail = 1.0, 1.0, 0.0, 0.0, 0.0, 1.0
        if "pace" in kernel.lines:
            said = PACE.fullmatch(kernel.lines["pace"])
            assert said is not None and said[1] == kernel.name, kernel.lines["pace"]
            matrix, exp, start, steps, step, longest, tail = (
                float((x or "0").replace(",", "")) for x in said.groups()[1:]
            )
            if letters.get("n"):
                assert tail == pytest.approx(max(1.0, longest * sms / letters["n"]), rel=1e-3)
        other, mask, tiles = (
            value(kernel.lines[title], letters) if title in kernel.lines else 0.0
            for title in ("other", "mask", "tile us")
        )
        milliseconds = [
            matrix * 1e3 * work.flops / page.rate("matrix") * tail, exp * 1e3 * work.exps / page.rate("exp") * tail,
            1e3 * other / page.rate("other") * tail, 1e3 * mask / page.rate("other") * tail, 1e-3 * tiles / sms * tail,
            1e3 * work.bytes / page.rate(hbm), 1e3 * work.moved / page.rate(l2),
        ]  # fmt: skip
        *parts, launch, whole = map(float, kernel.times[:-2])
        assert parts == pytest.approx(milliseconds, rel=2e-3, abs=1e-4)
        assert launch == pytest.approx(page.call_milliseconds() + 1e-3 * (start + steps * step), abs=1e-4)
        units = 1e3 * work.exps / page.rate("exp") * tail
        assert whole == pytest.approx(launch + max(sum(parts[:5]), units, *parts[5:]), abs=5e-4, rel=2e-3)
        bound, share = kernel.times[-2:]
        bounds = (*parts, launch)[page.titles.index(bound) - 1]
        if bound == "exp":
            bounds = max(bounds, units)
        assert int(share[:-1]) == pytest.approx(100 * bounds / whole, abs=1 + 3e-2 / whole)


# -- totals ------------------------------------------------------------------------------------------------------------
def kernels_by_direction(page: Page) -> dict[str, list[Printed]]:
    lasts = [k for k, kernel in enumerate(page.kernels) if kernel.name in LAST_OF_A_FORWARD]
    end = max(k for k in lasts if k <= lasts[0] + 1) + 1
    return {"forward": page.kernels[:end], "backward": page.kernels[end:]}


def sums_of_operands(page: Page) -> float:
    """Milliseconds that adding up gradients of operands takes, from the terms that are printed."""
    line = next((x.strip() for x in page.lines if x.strip().startswith("of which adding up")), None)
    if line is None:
        return 0.0
    said = re.match(r"of which adding up gradients of operands takes ([\d.]+) ms: ([\d.]+) of the last sums", line)
    assert said is not None, line
    terms = re.findall(r"= ([\d,]+) [a-z ]+ at ([\d.]+) ns", line)
    whole = float(said[2]) + sum(1e-6 * float(n.replace(",", "")) * float(each) for n, each in terms)
    assert whole == pytest.approx(float(said[1]), abs=1e-4, rel=2e-3)
    return whole


def test_totals_are_sums_over_kernels(page: Page) -> None:
    for direction, kernels in kernels_by_direction(page).items():
        line = next((x for x in page.lines if x.startswith(f"{direction}: ")), None)
        assert (line is None) == (not kernels)
        if line is None:
            continue
        said = re.fullmatch(
            rf"{direction}: (\S+)B through {page.memories[2]}, (\S+)FLOP(?:, (\S+) useful)?, "
            r"predicted (\S+) ms \((\S+)FLOP/s(?: useful)?\)", line
        )  # fmt: skip
        assert said is not None, line
        work = [work_of(page, kernel) for kernel in kernels]
        flops, useful = sum(w.flops for w in work), sum(w.useful for w in work)
        near(said[1], sum(w.bytes for w in work))
        near(said[2], flops)
        assert (said[3] is not None) == ("v" in page.letters)
        besides = sums_of_operands(page) if direction == "backward" else 0.0
        assert float(said[4]) == pytest.approx(
            sum(float(k.times[-3]) for k in kernels) + besides, abs=1e-4 * len(page.kernels), rel=2e-3
        )
        done, slack = (useful if said[3] else flops) / 1e-3, 5e-5  # ms are rounded to 1e-4
        assert done / (float(said[4]) + slack) * 0.994 <= number(said[5]) <= done / (float(said[4]) - slack) * 1.006


# -- pairs and reads ---------------------------------------------------------------------------------------------------
def test_the_share_of_repeated_reads_is_printed_where_it_is_one() -> None:
    pages = [Page(variant.explain(weft.shape(**sizes), **options)) for variant, sizes, options in CASES[1:4:2]]
    shares = [re.search(r"\bk ([\d.]+)", k.lines.get("letters", "")) for page in pages for k in page.kernels]
    assert any(share and 0 < float(share[1]) < 1 for share in shares)


def test_visible_pairs_are_those_of_the_mask() -> None:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 200, "head_dim": 64}
    rows, columns = torch.arange(150)[:, None] + 50, torch.arange(200)
    causal, ids = columns <= rows, torch.arange(200) // 37
    for variant, options, exact in (
        (DENSE, {}, 8 * 150 * 200),
        (LOCAL, {"window": 33}, 8 * int((causal & (rows - columns < 33)).sum())),
        (LOCAL, {"window": 33, "q_offset": 0}, 8 * int(((columns <= rows - 50) & (rows - 50 - columns < 33)).sum())),
        (PACKED, {"ids": ids.expand(2, -1)}, 8 * int((causal & (ids[rows] == ids)).sum())),
        (BY_HEAD, {}, 2 * sum(int((causal & (rows - columns < 32 * (h + 1))).sum()) for h in range(4))),
        (OPEN, {}, 8 * int(((rows * columns) % 7 < 3).sum())),
    ):
        found = variant.plan(weft.shape(**sizes), device="h100", target="triton", **options).visible
        assert found is not None and found.count == exact, variant.name
        assert found.looked_at == found.rows
    assert LOCAL.plan(weft.shape(**sizes), device="h100").visible is None
    long = LOCAL.plan(weft.shape(heads=1, q_len=100_000, head_dim=64), device="h100", window=100_000).visible
    assert (
        long is not None and long.looked_at < long.rows and long.count == pytest.approx(100_000 * 100_001 / 2, rel=0.01)
    )


def test_the_words_of_a_cpu_are_those_of_a_cpu() -> None:
    for target in ("cpu", "interpret"):
        text = LOCAL.explain(weft.shape(heads=2, q_len=256, head_dim=64, dtype="fp32"), device="cpu", target=target)
        assert not re.search("SRAM|HBM", text)
        assert "RAM -> cache" in text and "through RAM" in text
    assert ("interpreter is for debugging" in text) and f"CPU, {by_name('cpu').sms} core" in text
    on_a_gpu = LOCAL.explain(weft.shape(heads=2, q_len=256, head_dim=64), device="h100")
    assert not re.search(r"\bRAM|cache|L3", on_a_gpu.split("\n\n", 1)[1])
