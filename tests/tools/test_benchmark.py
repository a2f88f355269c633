"""The parts of the benchmarks that need no GPU: rows, work, variants, failures, reports."""

import dataclasses
import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import attention
import bench_measure
import bench_peers
import bench_report
import traffic
from bench_first_call import FirstCall
from bench_measure import Ceilings, Cell, Effort, HostTime, RowResult, launch_times, measure_row, relative_error
from bench_peers import COLUMNS, TITLES, NotOffered
from bench_report import Report, as_markdown, print_report, speed_grid
from bench_rows import DENSE, FP8, PACKED, QUICK, ROWS, SHAPES, VARIANTS, Row
from bench_variants import torch_variant, weft_variant

SMALL = [
    Row("full", 2, 2, 24, 16),
    Row("causal", 2, 2, 24, 16),
    Row("softcap", 1, 2, 24, 16, 20),
    Row("alibi", 1, 4, 24, 16),
    Row("window", 1, 2, 24, 16, 7),
    Row("sink", 1, 4, 24, 16),
    Row("sigmoid", 1, 4, 24, 16),
    Row("documents", 1, 2, 24, 16, 8),
    Row("prefix", 1, 2, 24, 16, 6),
    Row("blocks", 1, 2, 24, 16, 40),
    Row("packed", 1, 2, 24, 16, 6),
    Row("ragged", 1, 2, 24, 16, 4),
    Row("bias_by_key", 2, 2, 24, 16),
    Row("factor_by_query", 2, 2, 24, 16),
    Row("latent", 2, 2, 24, 24, 8, own_value_dim=16),
    Row("latent", 1, 2, 24, 24, 8, own_value_dim=16, spread=(4, 2, 10)),
    Row("causal", 1, 4, 24, 16, own_kv_heads=2),
    Row("full", 1, 2, 24, 24, own_value_dim=16),
]


def named(row: Row) -> str:
    return row.variant


# --- rows and work ------------------------------------------------------------------------------------------------


def test_the_dense_rows_are_those_of_the_published_table():
    assert [f"D{r.dim} H{r.heads} S{r.length} {r.variant}" for r in DENSE] == [
        "D64 H32 S2048 causal",
        "D64 H32 S8192 causal",
        "D64 H32 S8192 full",
        "D128 H16 S2048 causal",
        "D128 H16 S2048 full",
        "D128 H16 S8192 causal",
        "D128 H16 S8192 full",
        "D256 H8 S8192 causal",
        "D256 H8 S8192 full",
    ]
    assert {r.batch * r.length for r in DENSE} == {16384}


def test_the_variant_rows_are_those_of_the_published_table():
    assert {(r.batch, r.heads, r.length, r.dim) for r in VARIANTS} == {(2, 16, 8192, 128)}
    found = {r.variant: r.parameter for r in VARIANTS}
    assert found == {
        "softcap": 20,
        "alibi": 0,
        "sink": 0,
        "sigmoid": 0,
        "dropout": 10,
        "window": 1024,
        "documents": 1024,
        "prefix": 2048,
    }
    assert len({r.name for r in ROWS}) == len(ROWS) == 43 and set(QUICK) <= set(ROWS)


@pytest.mark.parametrize("row", SMALL, ids=named)
def test_visible_pairs_against_counting(row):
    mask_mod = torch_variant(row, "cpu").mask_mod
    position = torch.arange(row.length)
    zero = torch.zeros((), dtype=torch.long)
    seen = mask_mod(zero, zero, position[:, None], position[None, :]).sum().item() if mask_mod else row.length**2
    assert row.visible_pairs == seen


def test_flops_follow_the_published_convention():
    full, causal = Row("full", 2, 16, 8192, 128), Row("causal", 2, 16, 8192, 128)
    assert full.flops("forward") == 4 * 2 * 16 * 8192**2 * 128
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert causal.flops("forward") == pytest.approx(full.flops("forward") / 2, rel=2e-4)
    apart = Row("full", 1, 1, 8, 192, own_value_dim=128)
    assert (apart.flops("forward"), apart.flops("backward")) == (2 * 64 * 320, 2 * 64 * (3 * 192 + 2 * 128))


def test_the_rows_of_fp8_operands() -> None:
    of_tensors = [r for r in FP8 if r.fp8_per == "tensor"]
    columns, rows = ([r for r in of_tensors if r.fp8 == layout] for layout in ("columns", "rows"))
    assert len(columns) == len(rows) == 13 and len(of_tensors) == 26 and len(FP8) == 33 == len({r.name for r in FP8})
    assert FP8[-1].name == "D192/128 H16 S8192 causal FP8, values by columns, a descale for 128 rows"
    assert [r.name.removesuffix(" FP8, values by columns") for r in columns] == [
        "D128 H16 S8192 causal", "D128 H16 S8192 full", "D128 H16 S16384 causal", "D64 H32 S8192 causal",
        "D256 H8 S8192 causal", "D256 H8 S8192 full", "D192/128 H16 S8192 causal", "D128 H16 S8192 softcap 20",
        "D128 H16 S8192 alibi", "D128 H16 S8192 window 1024", "D128 H16 S8192 documents 1024",
        "D128 H16 S16384 packed 1024", "D128 H8 S524288 B1 ragged 64",
    ]  # fmt: skip
    assert {r.batch * r.length for r in FP8 if r.variant != "ragged"} == {16384}


def test_rows_of_other_shapes_say_what_is_other():
    names = [row.name for row in SHAPES]
    assert names[:5] == [
        "D80 H25 S4096 causal", "D96 H21 S4096 causal", "D192/128 H16 S4096 causal", "D128 H32/8 S8192 causal",
        "D64 H32/4 S2048 causal",
    ]  # fmt: skip
    assert names[5:] == [
        "D64 H16 S512 B64 causal", "D64 H16 S1024 B64 causal", "D64 H12 S256 full", "D128 H16 S1024 B1 causal",
        "D128 H8 S131072 B1 causal",
    ]  # fmt: skip


def test_ragged_rows_are_as_much_work_as_equal_ones():
    documents, ragged, equal = PACKED
    assert documents.lens == (1024,) * 16
    assert len(ragged.lens) == 64 and sum(ragged.lens) == ragged.length
    assert (min(ragged.lens), max(ragged.lens)) == (1, 16384)
    assert equal.flops("forward") == pytest.approx(ragged.flops("forward"), rel=0.01)


def test_an_unknown_variant_has_no_work():
    with pytest.raises(ValueError, match="variant 'other': its visible pairs are not known"):
        _ = Row("other", 1, 1, 8, 16).visible_pairs


# --- variants and peers -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")  # of eager FlexAttention, about being slow
@pytest.mark.parametrize("row", SMALL, ids=named)
def test_plain_torch_and_eager_flex_agree(row):
    operands = bench_peers.make_operands(row, "cpu", torch.float32)
    plain = bench_peers.contender("math", row, operands).results()
    names = ("query", "key", "value")  # its backward does not run on a CPU
    without_gradients = dataclasses.replace(operands, **{n: getattr(operands, n).detach() for n in names})
    if row.variant == "sigmoid":
        with pytest.raises(bench_peers.NotOffered, match="FlexAttention takes a softmax"):
            bench_peers.flex(None, compiled=False)(row, without_gradients)
    else:
        eager = bench_peers.flex(None, compiled=False)(row, without_gradients)
        assert relative_error(eager.forward(), plain[0]) < 1e-5
    assert plain[0].shape == (row.batch, row.heads, row.length, row.value_dim)
    assert [x.shape for x in plain[1:4]] == [x.shape for x in operands.leaves]


@pytest.mark.parametrize("row", SMALL, ids=named)
def test_weft_declares_the_same_variant(row):
    operands = bench_peers.make_operands(row, "cpu", torch.float32)
    declared, given = weft_variant(row, "cpu")
    expected = bench_peers.contender("math", row, operands).forward()
    own = (operands.query, operands.key, operands.value)
    if isinstance(operands, bench_peers.LatentOperands):
        own, given = own[:2], {"uk": operands.uk, "uv": operands.uv, **given}
    assert relative_error(declared.reference(*own, **given), expected) < 1e-5


@pytest.mark.parametrize("row", [row for row in SMALL if row.variant == "latent"], ids=lambda row: str(row.lens))
def test_weft_expands_a_latent_cache_as_plain_torch_does(row):
    operands = bench_peers.make_operands(row, "cpu", torch.float32)
    expected = bench_peers.contender("math", row, operands).results()
    found = bench_peers._weft("cpu")(row, operands).results()
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("row", [Row("dropout", 2, 2, 24, 16, 10), Row("dropout", 1, 2, 24, 16, 10, spread=(4, 2, 10))])
def test_plain_torch_drops_what_weft_drops(row):
    operands = bench_peers.make_operands(row, "cpu", torch.float32)
    declared, given = weft_variant(row, "cpu")
    own = (operands.query, operands.key, operands.value)
    expected = bench_peers.contender("math", row, operands).forward()
    assert relative_error(declared.reference(*own, **given), expected) < 1e-5


@pytest.mark.parametrize("row", [row for row in ROWS if row.spread], ids=lambda row: row.name)
def test_lengths_that_are_spread(row):
    number, least, longest = row.spread
    assert len(row.lens) == number and sum(row.lens) == row.length
    assert min(row.lens) == least and abs(max(row.lens) - longest) < 64


def test_every_column_has_a_title_and_a_builder():
    assert set(COLUMNS) == set(TITLES) and set(bench_measure.REFERENCES) < set(COLUMNS)


def test_what_a_peer_cannot_do_is_said():
    operands = bench_peers.make_operands(SMALL[4], "cpu")
    for column in ("fa2", "cudnn"):
        with pytest.raises(NotOffered, match="SDPA has no such variant"):
            bench_peers.contender(column, SMALL[4], operands)


# --- measuring ----------------------------------------------------------------------------------------------------


def broken(*_):
    raise RuntimeError("\n  out of shared memory\nmore")


def works_forward_only(row, operands):
    made = bench_peers.contender("math", row, operands)
    detached = made.forward().detach()
    return bench_peers.Contender(lambda: detached, made.leaves, made.grad_out)


def off_by_a_half(row, operands):
    made = bench_peers.contender("math", row, operands)
    return bench_peers.Contender(lambda: made.forward() * 1.5, made.leaves, made.grad_out)


@pytest.fixture
def result(monkeypatch) -> RowResult:
    columns = {"fa4": broken, "weft_triton": works_forward_only, "weft_hopper": off_by_a_half}
    monkeypatch.setattr(bench_peers, "COLUMNS", {**COLUMNS, **columns})
    return measure_row(SMALL[1], ("math", "cudnn", "fa4", "weft_triton", "weft_hopper"), Effort(2, 2), "cpu")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of SDPA, saying why no backend takes a CPU
def test_a_row_holds_times_errors_and_reasons(result):
    assert result.reference == "math" and result.cells["math"].forward_ms > 0 and result.cells["math"].backward_ms > 0
    assert result.cells["fa4"].forward_reason == "RuntimeError: out of shared memory"
    assert result.cells["cudnn"].forward_reason
    forward_only = result.cells["weft_triton"]
    assert forward_only.forward_ms is not None and forward_only.backward_ms is None
    assert "does not require grad" in forward_only.backward_reason
    assert result.cells["weft_hopper"].out_error == pytest.approx(0.5, rel=0.02)
    assert result.cells["weft_hopper"].is_wrong and not result.cells["math"].is_wrong


@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize(
    "row", [row for row in SMALL if row.variant in ("full", "causal", "alibi", "window")], ids=named
)
def test_a_row_of_fp8_operands_has_forwards_alone(row, layout, monkeypatch):
    monkeypatch.setattr(bench_peers, "COLUMNS", {**COLUMNS, "weft_triton": bench_peers._weft("cpu")})
    result = measure_row(dataclasses.replace(row, fp8=layout), tuple(COLUMNS), Effort(2, 2), "cpu")
    cells = result.cells
    own = cells["weft_triton"]
    assert result.reference == "math" and own.out_error < 0.02 and own.grad_error is None and not own.is_wrong
    assert own.forward_ms > 0 and own.backward_ms is None and own.backward_reason == "no backward of FP8 operands"
    assert cells["fa4"].forward_reason == "NotOffered: its operands are of 16 bits"
    assert cells["cudnn_fp8"].forward_reason.startswith("NotOffered: ")
    assert cells["weft_chosen"].out_error == own.out_error and cells["weft_chosen"].by == "cpu"
    report = Report("card", tuple(COLUMNS), "command", [result])
    assert f"FP8, values by {layout}" in as_markdown(report) and " by cpu |" in as_markdown(report)
    (line,) = bench_report.error_grid(report.rows, ("weft_triton",)).lines
    assert float(line[1]) == pytest.approx(own.out_error, rel=0.06)


def test_over_the_time_budget_nothing_is_started_and_it_is_said():
    result = measure_row(SMALL[0], ("math",), Effort(1, 1, deadline=-1.0), "cpu")
    assert result.cells["math"].forward_reason == "not run: the time budget was used up"


def test_nan_is_wrong():
    assert Cell(out_error=math.nan, grad_error=0.001).is_wrong
    assert bench_measure._worst([0.1, math.nan, 0.2]) != bench_measure._worst([0.1, 0.2])
    assert not Cell(out_error=0.004, grad_error=0.01).is_wrong


def test_launches_are_counted():
    calls = []
    times = launch_times(lambda: calls.append(1), 3)
    assert len(times) == 3 and len(calls) >= 3


def test_columns_take_turns_for_their_host_time():
    found = bench_measure.host_times(("math", "cudnn"), rounds=3, calls=2, device="cpu")
    assert len(found["math"].forward) == len(found["math"].both) == 3 and min(found["math"].both) > 0
    assert isinstance(found["cudnn"], str) and found["cudnn"]
    report = Report("card", ("math", "cudnn"), "command", host_us=found)
    (grid,) = [grid for grid in bench_report.grids(report) if "host" in grid.title]
    (math_line, cudnn_line) = grid.lines
    assert re.fullmatch(r"[\d.]+ \([\d.]+\)", math_line[1]) and cudnn_line[1] == "(a)"
    assert found["cudnn"] in grid.notes[0]


# --- reports ------------------------------------------------------------------------------------------------------


def sample() -> Report:
    row = DENSE[5]
    cells = {
        "cudnn": Cell(1.0, 2.5, extra_mib=2.0),
        "fa4": Cell(forward_reason="NotOffered: not installed", backward_reason="NotOffered: not installed"),
        "flex": Cell(2.0, None, backward_reason="RuntimeError: x | y", setup_ms=1.25),
        "weft_triton": Cell(2.0, 5.0, out_error=0.5, grad_error=0.004),
    }
    return Report(
        "one card",
        tuple(cells),
        "python benchmarks/attention.py",
        [RowResult(row, "cudnn", cells)],
        Ceilings(794.0, 4240.0),
        {"cudnn": HostTime((10.04, 9.0, 12.0), (30.0,)), "fa4": "ImportError: none"},
        {"weft_triton": FirstCall(3.2, 0.31), "flex": FirstCall(None, None, "TimeoutExpired: 60 s")},
        12.0,
    )


def test_speed_cells():
    report = sample()
    grid = speed_grid(report.rows, report.columns)
    assert grid.header[1:] == ("cuDNN (SDPA)", "FA4", "Flex (Triton)", "Weft triton", "Flex mask build")
    assert grid.lines == (("D128 H16 S8192 causal", "550 / 550", "(a)", "275 / (b)", "275 / 275 WRONG", "1.2 ms"),)
    assert grid.notes == ("(a) NotOffered: not installed", "(b) RuntimeError: x | y")


def test_notes_have_letters_for_any_number():
    notes = bench_report.Notes()
    marks = [notes.mark(str(number)) for number in range(30)]
    assert marks[0] == "(a)" and marks[25:28] == ["(z)", "(aa)", "(ab)"] and len(set(marks)) == 30
    assert notes.mark("3") == "(d)"


def test_markdown_has_every_table_and_reason():
    text = as_markdown(sample())
    assert "one card. Matrix product 794 TFLOP/s, copy 4240 GB/s. Whole run 12 s." in text
    assert "| D128 H16 S8192 causal | 550 / 550 | (a) | 275 / (b) | 275 / 275 WRONG | 1.2 ms |" in text
    assert "- (b) RuntimeError: x | y" in text and "reference" in text
    assert "| Weft triton |  |  | 3.20 | 0.31 |" in text and "TimeoutExpired: 60 s" in text
    for table in text.split("###")[1:]:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1 and len(lines) >= 3


def test_terminal_and_json(tmp_path):
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(sample(), console)
    assert "550 / 550" in (text := console.export_text()) and "(a) NotOffered: not installed" in text
    bench_report.write_json(sample(), tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["rows"][0]["name"] == "D128 H16 S8192 causal"
    assert data["rows"][0]["cells"]["cudnn"]["forward_tflops"] == pytest.approx(549.8, rel=1e-3)
    assert data["rows"][0]["cells"]["flex"]["backward_tflops"] is None
    assert data["first_calls"]["weft_triton"]["warm_s"] == 0.31


def test_arguments(capsys):
    options = attention.arguments(["--rows", "D128 H16.*S(2048|8192) causal", "--columns", "cudnn,weft_hopper"])
    assert options.columns == ("cudnn", "weft_hopper")
    assert [row.length for row in attention.chosen_rows(options)] == [2048, 8192]
    assert attention.chosen_rows(attention.arguments(["--quick"])) == list(QUICK)
    assert options.columns != attention.arguments([]).columns == tuple(COLUMNS)[:-2]
    assert attention.chosen_rows(attention.arguments(["--fp8"])) == list(FP8)
    assert attention.arguments(["--fp8"]).columns == ("math", "cudnn_fp8", "weft_chosen", "weft_triton", "weft_hopper")
    attention.main(["--fp8", "--rows", "D256.*columns$", "--list"])
    listed = capsys.readouterr().out.split("\n")
    assert [line.split(" FP8")[0] for line in listed] == ["D256 H8 S8192 causal", "D256 H8 S8192 full", ""]
    for words, message in ((["--columns", "x"], "got x"), (["--rows", "nothing"], "no row matches 'nothing'")):
        with pytest.raises(SystemExit, match="2"):
            attention.arguments(words)
        assert message in capsys.readouterr().err


# --- traffic ------------------------------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 12
PREDICTED {"read": 3000.0, "written": 1000.0}
==PROF== Disconnected
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum","l1tex__t_bytes.sum"
"","","","byte","byte","byte","byte"
"0","12","forward_kernel, (a)","2,048","512","4096","9000"
"1","12","fill","1024","512.0","0",""
"""


def test_ncu_output_is_read():
    kernels = traffic.parse_ncu(NCU)
    assert [kernel[traffic.READ] for kernel in kernels] == [2048.0, 1024.0]
    assert kernels[1] == {traffic.READ: 1024.0, traffic.WRITTEN: 512.0, traffic.L2: 0.0, traffic.L1: 0.0}
    assert traffic.parse_ncu("==ERROR== no permission\n") == []


def test_traffic_is_set_beside_the_prediction():
    item = traffic._traffic("flash", "forward", NCU, traffic.parse_ncu(NCU), "")
    assert (item.measured, item.predicted, item.kernels) == (4096.0, 4000.0, 2)


def test_verdicts_of_traffic():
    def item(schedule, direction, measured, predicted):
        return traffic.Traffic(schedule, direction, predicted, 0.0, measured, 0.0)

    found = [
        item("standard", "forward", 1000.0, 1100.0),
        item("flash", "forward", 150.0, 100.0),
        item("standard", "backward", 1000.0, 1000.0),
        item("flash", "backward", 300.0, 100.0),
        traffic.Traffic("streaming", "forward", 5.0, 5.0, reason="ncu is not on the PATH"),
    ]
    assert traffic.verdicts(found) == [
        "kept: standard forward: 0.909 of the predicted bytes",
        "NOT KEPT: flash forward: 1.500 of the predicted bytes",
        "kept: flash forward moves 15.0% of what standard moves",
        "NOT KEPT: flash backward moves 30.0% of what standard moves",
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(traffic.as_table(found))
    assert "15%" in console.export_text()


def test_without_ncu_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    monkeypatch.setattr(traffic, "_output", lambda command, timeout_s: ('PREDICTED {"read": 1, "written": 2}', ""))
    item = traffic.measure(traffic.Layer(), "flash", "forward", "triton", 1.0)
    assert (item.predicted, item.measured, item.reason) == (3, None, "ncu is not on the PATH")


def test_the_plan_is_summed_by_direction():
    from types import SimpleNamespace as Record

    def kernel(direction, read, written):
        return Record(direction=direction, hbm_read=Record(value=read), hbm_written=Record(value=written))

    plan = Record(kernels=[kernel("forward", 1.0, 2.0), kernel("backward", 4.0, 8.0), kernel("backward", 16.0, 32.0)])
    assert traffic.predicted_bytes(plan, "forward") == {"read": 1.0, "written": 2.0}
    assert traffic.predicted_bytes(plan, "backward") == {"read": 20.0, "written": 40.0}
