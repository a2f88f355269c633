"""The `weft` command: look at a variant's plan, kernels and mask, measure schedules, tend the cache, check the machine.

A variant is text of the language (`--score`, `--mask`) or the name of a declared one (`module:name`, `file.py:name`).
Nothing here needs a GPU; `tune` times whatever machine it runs on. Progress is shown on a terminal, on stderr.
"""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click

from .. import __version__
from ..codegen.targets import target_named, targets
from ..compiler.planning.dtypes import EIGHTHS, ON_GPUS
from ..compiler.planning.kernel import Algorithm
from ..compiler.planning.machines import hardware
from ..compiler.planning.machines.rates import rates_in_words
from ..compiler.planning.picture import SUFFIXES
from ..compiler.planning.signature import class_of, in_words
from ..compiler.planning.tuner import Outcome, Spread
from ..ir.errors import WeftError, counted, shown
from ..plans import describe
from ..runtime import driver
from ..runtime.check.tensors import MAX_HEAD_DIM
from ..runtime.settings import size_of
from ..runtime.store import calibrated, files, prune
from . import drawing
from .cli_options import (
    PLAN_OPTIONS,
    SHAPE_OPTIONS,
    SHARED,
    TORCH_DTYPES,
    VARIANT_OPTIONS,
    check_all_given,
    declared_at,
    having,
    in_options,
    request_of,
    values_of,
    variant_of,
)
from .doctor import cache_rows, machine_rows, setting_rows, small_call, state_of, target_rows, version_rows


class _Mistake(click.ClickException):
    """A WeftError as people see it: the message without a traceback, exit code 2."""

    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except WeftError as error:
            known = {option.name for command in self.commands.values() for option in command.params}
            raise _Mistake(in_options(error, ctx.meta.get(SHARED, {}), known)) from error
        except OSError as error:
            if error.filename is None:  # a closed pipe, which click takes as the end
                raise
            raise _Mistake(f"{error.filename}: {error.strerror}") from error


@contextmanager
def _busy(doing: str) -> Iterator[None]:
    """Say what takes long, once it has taken a second: on a terminal, to stderr."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # lazy: pipes do without

    status = Console(stderr=True).status(doing)
    timer = threading.Timer(1.0, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def _counted(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of what is done, on a terminal, to stderr; what is given is called after each."""
    from rich.console import Console  # lazy: most commands do without
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


# -- commands --------------------------------------------------------------------------------------------------------
@click.group(
    cls=_Group, help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__)
def main() -> None:
    """Entry point of the command line."""


def _ranks(ctx: click.Context, option: click.Parameter, text: str | None) -> int | tuple[int, int] | None:
    match = None if text is None else re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
    if text is not None and match is None:
        raise WeftError(f"--mesh: expected N, or OUTERxINNER, got {shown(text)}")
    return None if match is None else int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


@main.command()
@having(*VARIANT_OPTIONS, *SHAPE_OPTIONS, *PLAN_OPTIONS)
@click.option("--short", is_flag=True, help="The schedule, and time and bound of each kernel: one screen.")
@click.option(
    "--mesh", callback=_ranks, help="Devices that share the sequence, N or OUTERxINNER: rows of each, and time."
)
@click.option("--per-host", type=click.IntRange(1), default=8, show_default=True, help="Of them, those of a host.")
@click.pass_context
def explain(ctx: click.Context, short: bool, mesh: int | tuple[int, int] | None, per_host: int) -> None:
    """Print the plan: stages, loops, tile classes, bytes, predicted time and what bounds it.

    Attention is full where neither VARIANT nor --mask is given.
    """
    r = request_of(ctx)
    if mesh is not None:
        from ..distributed import planner  # lazy: few want it

        with _busy("planning"):
            text = planner.plan_of_sizes(r.variant, r.shape, mesh, per_host, r.device, r.values).explain()
        click.echo(text)
        return
    with _busy("planning"):
        text = describe.explain(r.variant, [r.shape], r.device, r.target, r.schedule, None, r.values, short)
    click.echo(text)


@main.command()
@having(*VARIANT_OPTIONS, *SHAPE_OPTIONS, *PLAN_OPTIONS)
@click.option("--direction", type=click.Choice(["forward", "backward"]), default="forward", show_default=True)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file instead.")
@click.pass_context
def source(ctx: click.Context, direction: Literal["forward", "backward"], output: Path | None) -> None:
    """Print the generated kernels."""
    r = request_of(ctx)
    if output is not None:
        _check_output(output, (".py",))
    with _busy("generating"):
        text = describe.source(r.variant, [r.shape], direction, r.device, r.target, r.schedule, None, r.values)
    if output is not None:
        output.write_text(text)
        click.echo(f"{output}: {counted(len(text.splitlines()), 'line')}")
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "python", background_color="default"))
    else:
        click.echo(text)


def _check_output(path: Path, suffixes: Sequence[str]) -> None:
    """Before anything is computed: the file's kind, and a folder to write it in."""
    if path.suffix.lower() not in suffixes:
        raise WeftError(f"--output: expected a file that ends in {' or '.join(suffixes)}, got {path}")
    if not path.parent.is_dir():
        raise WeftError(f"--output: {path}: there is no folder {path.parent}; make it first")


@main.command()
@having(*VARIANT_OPTIONS, *SHAPE_OPTIONS, *PLAN_OPTIONS)
@click.option("--block-q", type=click.IntRange(1), default=128, show_default=True, help="Queries a tile.")
@click.option("--block-kv", type=click.IntRange(1), default=128, show_default=True, help="Keys a tile.")
@click.option("--head", type=click.IntRange(0), default=0, show_default=True, help="The query head to draw.")
@click.option("--batch-row", type=click.IntRange(0), default=0, show_default=True, help="The batch row to draw.")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture too: .png or .svg."
)
@click.pass_context
def mask(ctx: click.Context, block_q: int, block_kv: int, head: int, batch_row: int, output: Path | None) -> None:
    """Draw which tiles are skipped, masked or full."""
    r = request_of(ctx)
    if batch_row >= r.shape.batch:
        raise WeftError(f"--batch-row: expected 0 to {r.shape.batch - 1} (--batch {r.shape.batch}), got {batch_row}")
    sizes = {"heads": r.shape.heads, "kv_heads": r.shape.kv_heads, "head_dim": r.shape.head_dim}
    own = {p.name for p in r.variant.canonical.parameters}
    options = {**{name: size for name, size in sizes.items() if name not in own}, **r.values}
    if output is not None:
        _check_output(output, SUFFIXES)
    with _busy("drawing"):
        picture = drawing.show_mask(
            r.variant, r.shape.q_len, r.shape.kv_len, block_q, block_kv, output, None, head, batch_row, options
        )
    click.echo(picture)
    if output is not None:
        click.echo(f"picture: {output}")


@main.command()
@having(*VARIANT_OPTIONS, *SHAPE_OPTIONS)
@click.option("--target", type=click.Choice([t.name for t in targets()]), help="From this machine if not given.")
@click.option("--algorithm", type=click.Choice(["flash", "streaming", "standard"]), default="flash", show_default=True)
@click.pass_context
def tune(ctx: click.Context, target: str | None, algorithm: Algorithm) -> None:
    """Time the forms of kernels worth trying on this machine and remember the fastest.

    Keys of few queries are divided by kernels of their own (schedule split_kv), which are not timed. Decode keeps the
    form that its target chooses. So does the short side of a call that mixes chunks of prompts and single tokens over
    pages. Its long side takes what is found for flash.

    Tensor operands are drawn at random, whether --set NAME=random says so or not. What is found serves calls whose
    queries and keys are about as many: up to 1.4 times more or less.
    """
    from . import tuning  # lazy: only this command wants it

    ctx.meta[SHARED] |= {"device": None, "target": target, "schedule": None}
    r = request_of(ctx)
    numbers = {name: value for name, value in r.values.items() if isinstance(value, int | float)}
    values = tuning.with_drawn(r.variant, r.shape, numbers)
    for name in sorted(values.keys() - numbers.keys()):
        click.echo(f"{name}: drawn at random, {_extents_text(values[name])}")
    found = tuning.tune(r.variant, r.shape, values, target=target, algorithm=algorithm)
    for kernel, outcome in found.outcomes.items():
        click.echo(f"{kernel:18} {_outcome_text(outcome)}")
    if any(len({getattr(form, "in_tiles", None) for form in each.spreads}) > 1 for each in found.outcomes.values()):
        click.echo("forms without +tiles leave this call to torch's own kernel")
    for text, reason in found.failed.items():
        click.echo(f"passed over {text}: {reason}")
    about = in_words(class_of(r.shape.q_len, r.shape.kv_len))
    click.echo(f"fastest of {found.tried}: schedule={str(found.schedule)!r}")
    click.echo(f"kept for calls of about {about} queries and keys")
    chosen = [target_named(choice.target) for choice in found.schedule.kernels.values()]
    if algorithm == "flash" and any(target.serves != "cpu" for target in chosen):
        click.echo("of calls of few queries, and of short sequences in mixed ones (split_kv), nothing is tuned")


def _extents_text(tensor: Any) -> str:
    sizes = " x ".join(map(str, tensor.shape)) or "one number"
    return f"{sizes} of {str(tensor.dtype).removeprefix('torch.')}"


def _outcome_text(outcome: Outcome) -> str:
    """What won, by how much over what is used without tuning, and how far its runs are spread."""
    chosen, default = (outcome.spreads.get(form) for form in (outcome.chosen, outcome.default))
    assert chosen is not None
    text = f"{outcome.chosen}  {_spread_text(chosen)}"
    if outcome.is_tie:
        kept = "the default stays" if outcome.chosen == outcome.default else "the default is slower"
        return f"{text}; a tie of {', '.join(map(str, outcome.tied))}: {kept}"
    if outcome.chosen == outcome.default:
        return f"{text}; it is the default too"
    if default is None:
        return f"{text}; the default {outcome.default} did not run"
    gain = default.median / chosen.median
    return f"{text}; {gain:.2f} times as fast as the default {outcome.default}, {_spread_text(default)}"


def _spread_text(spread: Spread) -> str:
    low, high = (f"{seconds * 1e3:.4g}" for seconds in spread.quartiles)
    return f"{spread.median * 1e3:.4g} ms ({low} to {high} between quartiles of {len(spread.runs)} runs)"


@main.command()
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT...")
@click.option("--device", required=True, metavar="NAME", help=f"GPU to compile for: {', '.join(hardware.NAMES[:-1])}.")
@click.option(
    "--head-dim", "head_dims", type=click.IntRange(1, MAX_HEAD_DIM), multiple=True, default=(64, 128), show_default=True
)
@click.option("--dtype", "dtypes", type=click.Choice(ON_GPUS), multiple=True, default=("bf16",), show_default=True)
@click.option(
    "--direction",
    "directions",
    type=click.Choice(["forward", "backward"]),
    multiple=True,
    default=("forward", "backward"),
    show_default=True,
)
@click.option(
    "--sequences",
    type=click.Choice(["dense", "lengths", "packed", "paged", "packed_paged"]),
    multiple=True,
    default=("dense",),
    show_default=True,
    help="How rows of sequences lie; lengths and tables are int32.",
)
@click.option("--page", type=int, default=16, show_default=True, help="Rows of a block, of paged sequences.")
@click.option(
    "--decode", type=click.IntRange(1), multiple=True, help="Decode steps too, of so many query heads a key head."
)
@click.option("--target", type=click.Choice([t.name for t in targets()]), help="From the device if not given.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; all cores if not given.")
def build(
    variants: tuple[str, ...], device: str, head_dims: tuple[int, ...], dtypes: tuple[str, ...],
    directions: tuple[Literal["forward", "backward"], ...], sequences: tuple[str, ...], page: int,
    decode: tuple[int, ...], target: str | None, jobs: int | None,
) -> None:  # fmt: skip
    """Generate and compile kernels ahead of time, so that a first call compiles nothing. The GPU need not be here.

    VARIANT is module:name or file.py:name of a declared variant.
    """
    from ..runtime import build as ahead  # lazy: only this command wants it

    declared = [declared_at(name) for name in variants]
    if hardware.by_name(device).kind == "cpu":
        raise WeftError("--device: expected a GPU to compile for, got cpu; the cpu target compiles nothing")
    work = ahead.jobs_of(
        declared, device=device, head_dims=head_dims, dtypes=dtypes, directions=directions, target=target,
        sequences=sequences, page=page, decode=decode,
    )  # fmt: skip
    failed = 0
    with _counted("building", len(work)) as advance:
        for done in ahead.build(work, jobs):
            failed += bool(done.problem)
            click.echo(f"{done.job}: {done.problem or ', '.join(done.kernels)} ({done.seconds:.1f} s)")
            advance()
    if failed:
        raise _Mistake(f"{failed} of {len(work)} could not be built")


def _range(ctx: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise WeftError(f"--{str(option.name).replace('_', '-')}: expected N or LEAST:MOST, got {shown(text)}")
    return int(match[1]), int(match[2] or match[1])


@main.command("bench-serve")
@having(*VARIANT_OPTIONS)
@click.option("--requests", type=click.IntRange(1), default=24, show_default=True)
@click.option("--prompt-len", callback=_range, default="32:256", show_default=True, help="Tokens, or LEAST:MOST.")
@click.option("--shared", type=click.IntRange(0), default=0, show_default=True, help="Tokens that all begin with.")
@click.option("--new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of each request.")
@click.option("--most", type=click.IntRange(1), default=8, show_default=True, help="Sequences at once.")
@click.option("--chunk", type=click.IntRange(1), default=512, show_default=True, help="Prompt tokens of a step.")
@click.option("--blocks", type=click.IntRange(1), help="Of the cache; room for --most requests if not given.")
@click.option("--page", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a block.")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--kv-heads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--head-dim", type=click.IntRange(2, MAX_HEAD_DIM), default=32, show_default=True)
@click.option("--vocabulary", type=click.IntRange(2), default=1000, show_default=True)
@click.option("--dtype", type=click.Choice(ON_GPUS), help="bf16 on a GPU, fp32 on a CPU if not given.")
@click.option("--cache-dtype", type=click.Choice(sorted(EIGHTHS)), help="Of an FP8 cache; --dtype if not given.")
@click.option("--on", type=click.Choice(["cpu", "cuda"]), help="The GPU, where there is one, if not given.")
@click.option("--graphs/--no-graphs", default=None, help="Decode by CUDA graphs; on a GPU if not given.")
@click.option("--mixed", is_flag=True, help="Prompts and single tokens in one packed step.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.pass_context
def bench_serve(
    ctx: click.Context,
    /,
    on: str | None,
    dtype: str | None,
    cache_dtype: str | None,
    prompt_len: tuple[int, int],
    graphs: bool | None,
    **load: Any,
) -> None:
    """Serve random prompts through a decoder with random weights, and say how fast.

    Continuous batching over a paged cache: prefill and decode tokens a second, latencies, and how full the cache was.
    The variant is causal if none is given.
    """
    import torch

    from .bench_serve import Load, measure  # lazy: only this command wants it

    given = ctx.meta[SHARED]
    if all(given[k] is None for k in ("variant", "score", "mask", "scale", "sink", "dropout", "normalizer")):
        given["mask"] = "kv_pos <= q_pos"
    variant = variant_of(given)
    device = torch.device(on or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WeftError("--on: expected cpu, as torch can use no GPU here, got cuda")
    on_gpu = device.type == "cuda"
    kind = TORCH_DTYPES[dtype or ("bf16" if on_gpu else "fp32")]
    made = Load(
        prompts=prompt_len, graphs=on_gpu if graphs is None else graphs,
        cache_dtype=None if cache_dtype is None else TORCH_DTYPES[cache_dtype], **load,
    )  # fmt: skip
    values = values_of(variant, given, made.ranges, device, kind, made.seed)
    check_all_given(variant, values)
    with _counted("serving", load["requests"]) as advance:
        lines = list(measure(made, variant, values, device, kind, advance))
    for line in lines:
        click.echo(line)


# -- cache -----------------------------------------------------------------------------------------------------------
@main.group("cache")
def cache_group() -> None:
    """The folder of generated kernels."""


@cache_group.command("path")
def cache_path() -> None:
    """Print where it is."""
    click.echo(files.cache_dir())


@cache_group.command("list")
def cache_list() -> None:
    """Print its entries, and how to run an edit of one in its place.

    Stale entries were made by other code of weft, or for other versions of torch and triton. In a pipe: one entry a
    line and nothing else, fields apart by tabs: name, state, bytes, seconds since 1970 when made and when last used,
    path, and why it is not sound.
    """
    found = prune.entries()
    if not sys.stdout.isatty():
        for entry in found:
            state, _, reason = state_of(entry).partition(": ")
            fields = (entry.folder, state, entry.size, int(entry.created), int(entry.used), entry.path, reason)
            click.echo("\t".join(map(str, fields)))
        return
    size = sum(entry.size for entry in found)
    click.echo(f"{counted(len(found), 'entry')}, {size / 1024:.0f} KiB in {files.cache_dir()}")
    if found:
        click.echo(f"{'KiB':>8}  {'made':16}  {'used':10}  entry")
    for entry in found:  # plain lines with the name unbroken: it is there to be copied
        made, used = time.localtime(entry.created), time.localtime(entry.used)
        dates = f"{time.strftime('%Y-%m-%d %H:%M', made)}  {time.strftime('%Y-%m-%d', used)}"
        click.echo(f"{entry.size / 1024:8.1f}  {dates}  {entry.folder}  {state_of(entry)}")
    _say_how_to_edit(found)


def _say_how_to_edit(found: list[prune.EntryInfo]) -> None:
    usable = next((entry for entry in found if state_of(entry) == "sound"), None)
    if usable is not None:
        click.echo("An edited module is named as its entry, without the last dash and what follows:")
        click.echo(f'  cp {shlex.quote(str(usable.path))} "$WEFT_EDITED_DIR/{usable.edited_name}"')


@cache_group.command("prune")
@click.option("--max-size", metavar="SIZE", help="Then remove the least recently used entries beyond it, e.g. 200MB.")
def cache_prune(max_size: str | None) -> None:
    """Remove stale and unsound entries, and what processes that died left behind."""
    done = prune.prune(None if max_size is None else size_of(max_size, "--max-size"))
    counts = f"{done.stale} stale entries, {done.over} beyond the size, {done.left_overs} left-overs"
    click.echo(f"removed {counts} ({done.size / 1024:.0f} KiB) from {files.cache_dir()}")


@cache_group.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    click.echo(f"removed {counted(prune.clear(), 'entry')} from {files.cache_dir()}")


# -- calibrate -------------------------------------------------------------------------------------------------------
@main.command()
@click.option(
    "--device", metavar="NAME", help="cpu or cuda, with a number where there are several; the GPU if there is one."
)
@click.option(
    "-o", "--output", metavar="FILE", help="Keep it there, for WEFT_CALIBRATION; the cache folder if not given."
)
def calibrate(device: str | None, output: str | None) -> None:
    """Measure what this machine does, in less than a minute, for plans and for the choice of forms."""
    from .. import tools  # lazy: no other command measures

    with _busy("measuring this machine"):
        found = tools.calibrate(device, output)
    path = Path(output) if output is not None else calibrated.file_of(found.machine)
    unit = "core" if found.machine.kind == "cpu" else "SM"
    click.echo(f"{found.machine.name}, {found.machine.units} {unit}{'s' * (found.machine.units > 1)}")
    for name, text in rates_in_words(found.rates):
        click.echo(f"  {name:14}  {text}")
    click.echo(f"kept in {path}, measured in {found.seconds:.0f} s")
    click.echo(f"spread of the same steps {found.spread:.1%}, load before {found.load:.1f}")
    if found.doubts:
        reasons = "; ".join(found.doubts)
        click.echo(f"these figures are not to be trusted: {reasons}. Measure again on a quiet machine", err=True)
    if output is not None:
        click.echo(f"to use it, set WEFT_CALIBRATION={shlex.quote(str(path))}")


# -- doctor ----------------------------------------------------------------------------------------------------------
@main.command()
@click.option("--run", "runs", is_flag=True, help="Also compute a small call on each target that works here.")
@click.option("--matrix", "asks", is_flag=True, help="Print what each target computes, on this machine or not.")
def doctor(runs: bool, asks: bool) -> None:
    """Say what this machine is, which targets work on it and why others do not, and in what state the cache is."""
    if asks:
        from .matrix import matrix  # lazy: nothing else asks for it

        with _busy("asking each target"):
            text = matrix()
        click.echo(text, nl=False)
        return
    for title, rows in (
        ("settings", setting_rows()),
        ("machine", machine_rows()),
        ("versions", version_rows()),
        ("cache", cache_rows()),
        ("targets", target_rows()),
    ):
        if rows:
            click.echo(title)
        for name, text in rows:
            click.echo(f"  {name:10}  {text}")
    if runs:
        click.echo("a small call")
        for name, reason in driver.available().items():
            if reason is None:
                with _busy(f"computing on {name}"):
                    text = small_call(name)
                click.echo(f"  {name:10}  {text}")
