"""The `weft` command: look at a variant's plan, kernels and mask, measure schedules, tend the cache, check the machine.

A variant is text of the language (`--score`, `--mask`) or the name of a declared one (`module:name`, `file.py:name`).
Nothing here needs a GPU; `tune` times whatever machine it runs on. Progress is shown on a terminal, on stderr.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import click

from . import Attention, describe, drawing, parse, request, scalar, score, shape, tensor
from .codegen.targets import targets
from .compiler.planning import hardware
from .compiler.planning.kernels import Algorithm
from .compiler.planning.rates import rates_in_words
from .compiler.planning.records import DTYPE_BYTES, Shape
from .compiler.planning.tuner import Outcome, Spread
from .ir.errors import WeftError
from .ir.expr import Const, Expr, Number, Scalar, TensorOperand
from .ir.normalizer import SOFTMAX, normalizers
from .runtime import cache, calibrated, driver
from .runtime.checks import MAX_HEAD_DIM
from .runtime.settings import settings, size_of

_KINDS = {"int": int, "float": float, "bool": bool}
_SHARED = "weft.cli.shared"


class _Mistake(click.ClickException):
    """A WeftError as people see it: the message without a traceback, exit code 2."""

    exit_code = 2


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except WeftError as error:
            raise _Mistake(_in_options(str(error), ctx.meta.get(_SHARED, {}))) from error
        except OSError as error:
            if error.filename is None:  # a closed pipe, which click takes as the end
                raise
            raise _Mistake(f"{error.filename}: {error.strerror}") from error


_PLACE = re.compile(r" \(declared at [^\n]*?:\d+\)|\n +at [^\n]*:\d+(?=\n|$)|, declared at [^\n]*?:\d+(?=\))")
_WRITTEN = re.compile(r"^( *- |[\w ]+: |)(score|mask|scale|sink|dropout|name|normalizer)(?=: )", re.MULTILINE)
_SIZE, _RECORD = re.compile(r"\bshape: (\w+)(?=: )"), re.compile(r"^hardware(?=: )")


def _in_options(message: str, given: Mapping[str, object]) -> str:
    """A message about a call in the words of the command: options in place of arguments.

    Of a variant that the options write, the places in files are left out: they are of no file of the user.
    """
    message = _SIZE.sub(lambda found: f"--{found[1].replace('_', '-')}", _RECORD.sub("--device", message))
    if given.get("variant") is not None:
        return message
    message = _WRITTEN.sub(lambda found: f"{found[1]}--{found[2]}", _PLACE.sub("", message))
    return re.sub(r"^\w+: (?=--[\w-]+: )", "", message)  # the variant's name says nothing beside the option's


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


# -- what a command is about -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Request:
    """A variant and a call of it, as the options describe them."""

    variant: Attention
    shape: Shape
    values: dict[str, Any]  # numbers for scalar operands, by name
    device: str | None
    target: str | None
    schedule: str | None


def _keep(ctx: click.Context, option: click.Parameter, value: object) -> None:
    ctx.meta.setdefault(_SHARED, {})[option.name] = value


def _shared(*declarations: str, **settings: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that many commands have: it is kept in the context, where `_request` finds it."""
    return click.option(*declarations, callback=_keep, expose_value=False, **settings)  # type: ignore[arg-type]


_VARIANT_OPTIONS = (
    click.argument("variant", required=False, callback=_keep, expose_value=False),
    _shared("--score", metavar="TEXT", help="Score expression, e.g. '50.0 * tanh(score / 50.0)'."),
    _shared("--mask", metavar="TEXT", help="Mask expression, e.g. 'kv_pos <= q_pos'."),
    _shared("--scale", metavar="TEXT", help="Scale expression; 1 / sqrt(head_dim) if not given."),
    _shared("--sink", metavar="TEXT", help="Sink expression, one more logit of each row, e.g. 0.0; none if not given."),
    _shared(
        "--normalizer",
        metavar="NAME",
        help=f"What makes weights of scores: {', '.join(normalizers())}.",
    ),
    _shared(
        "--dropout", metavar="TEXT", help="Share of the weights to drop, a number or a float scalar; 0.0 if not given."
    ),
    _shared("--name", default="attention", show_default=True, help="Name of the variant."),
    _shared("--scalar", multiple=True, metavar="NAME:TYPE", help="Declare a scalar operand, e.g. window:int."),
    _shared("--tensor", multiple=True, metavar="NAME:RANK[:TYPE]", help="Declare a tensor operand, e.g. slopes:1."),
    _shared("--set", multiple=True, metavar="NAME=NUMBER", help="Value of a scalar operand, e.g. window=1024."),
)
_SHAPE_OPTIONS = (
    _shared("--batch", type=click.IntRange(1), default=1, show_default=True),
    _shared("--heads", type=click.IntRange(1), default=16, show_default=True),
    _shared("--kv-heads", type=click.IntRange(1), help="As many as --heads if not given."),
    _shared("--q-len", type=click.IntRange(1), default=4096, show_default=True),
    _shared("--kv-len", type=click.IntRange(1), help="As many as --q-len if not given."),
    _shared("--head-dim", type=click.IntRange(1), default=128, show_default=True),
    _shared("--value-dim", type=click.IntRange(1), help="As wide as --head-dim if not given."),
    _shared("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bf16", show_default=True),
)
_PLAN_OPTIONS = (
    _shared("--device", metavar="NAME", help="A hardware record, e.g. h100; this machine if not given."),
    _shared("--target", type=click.Choice([t.name for t in targets()]), help="From the device if not given."),
    _shared("--schedule", metavar="TEXT", help="flash, streaming, standard, or the text of a schedule."),
)


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


def _with(*options: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def _request(ctx: click.Context) -> _Request:
    given = ctx.meta[_SHARED]
    sizes = {k: given[k] for k in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "dtype")}
    variant = _variant(given)
    values = _values(variant, given)
    return _Request(variant, shape(**sizes), values, given["device"], given["target"], given["schedule"])


def _values(variant: Attention, given: Mapping[str, Any]) -> dict[str, Any]:
    """What --set gives to scalar operands."""
    pairs = [_value_of(text) for text in given["set"]]
    twice = sorted({name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1})
    if twice:
        raise WeftError(f"--set: expected each operand once, got {', '.join(twice)} several times")
    values, read = dict(pairs), {operand.name for operand in variant.parameters}
    declared = {text.partition(":")[0] for text in (*given["scalar"], *given["tensor"])}
    unread = sorted((declared & values.keys()) - read)
    if unread:
        raise WeftError(
            f"--set: {', '.join(unread)}: declared, but neither score, mask, scale, sink nor dropout reads it"
        )
    request.check_operands("--set", variant, values)
    return values


def _variant(given: Mapping[str, object]) -> Attention:
    fields = ("score", "mask", "scale", "sink", "dropout")
    place, texts = given["variant"], {k: given[k] for k in fields if given[k] is not None}
    if isinstance(place, str):
        written = [*texts, *(["normalizer"] if given["normalizer"] is not None else [])]
        if written:
            raise WeftError(f"expected {place} or --{' --'.join(written)}, got both")
        return _declared(place)
    if not texts:
        raise WeftError(
            "expected a variant: --score and --mask, or the name of a declared one (module:name, file.py:name)"
        )
    operands = _operands(given["scalar"], given["tensor"])  # type: ignore[arg-type]
    if given["mask"] is None and given["score"] is None:
        raise WeftError(f"expected --score or --mask, got --{' and --'.join(texts)} alone")
    parts = {k: _parsed(k, str(text), operands) for k, text in texts.items()}
    dropout: Any = parts.get("dropout", Const(0.0))
    return Attention(
        parts.get("score", score), parts.get("mask", True), scale=parts.get("scale"), sink=parts.get("sink"),
        dropout=dropout.value if isinstance(dropout, Const) else dropout, name=str(given["name"]),
        normalizer=str(given["normalizer"] or SOFTMAX.name),
    )  # fmt: skip


def _parsed(option: str, text: str, operands: Mapping[str, Scalar | TensorOperand]) -> Expr:
    try:
        return parse(text, operands)
    except WeftError as error:
        message = str(error)
        hint = "; declare operands with --scalar and --tensor" if "unknown name" in message else ""
        raise WeftError(f"--{option}: {_PLACE.sub('', message)}{hint}") from error


def _operands(scalars: tuple[str, ...], tensors: tuple[str, ...]) -> dict[str, Scalar | TensorOperand]:
    found = [
        _operand_of(option, text) for option, texts in (("scalar", scalars), ("tensor", tensors)) for text in texts
    ]
    names = [operand.name for operand in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise WeftError(f"--scalar, --tensor: expected each operand once, got {', '.join(twice)} several times")
    return {operand.name: operand for operand in found}


def _operand_of(option: str, text: str) -> Scalar | TensorOperand:
    try:
        return _scalar_of(text) if option == "scalar" else _tensor_of(text)
    except WeftError as error:
        raise WeftError(f"--{option}: {_PLACE.sub('', str(error))}") from error


def _scalar_of(text: str) -> Scalar:
    match = re.fullmatch(r"(\w+):(int|float)", text)
    if not match:
        raise WeftError(f"expected NAME:int or NAME:float, got {text!r}")
    return scalar(match[1], _KINDS[match[2]])


def _tensor_of(text: str) -> TensorOperand:
    match = re.fullmatch(r"(\w+):(\d+)(?::(int|float|bool))?", text)
    if not match:
        raise WeftError(f"expected NAME:RANK or NAME:RANK:TYPE with type int, float or bool, got {text!r}")
    return tensor(match[1], int(match[2]), _KINDS[match[3] or "float"])


def _value_of(text: str) -> tuple[str, Number]:
    name, _, number = text.partition("=")
    for kind in (int, float):
        try:
            return name.strip(), kind(number)
        except ValueError:
            continue
    raise WeftError(f"--set: expected NAME=NUMBER, got {text!r}")


def _declared(place: str) -> Attention:
    """The variant at `module:name` or `file.py:name`."""
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise WeftError(f"expected module:name or file.py:name, got {place!r}")
    module = _file_module(Path(source)) if source.endswith(".py") else _named_module(source)
    found = getattr(module, name, None)
    if isinstance(found, Attention):
        return found
    known = sorted(n for n, v in vars(module).items() if isinstance(v, Attention))
    got = f"got {_article(type(found).__name__)}" if hasattr(module, name) else "there is no such name"
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else f"; {source} declares {', '.join(known) or 'no variant'}"
    raise WeftError(f"{place}: expected a weft.Attention, {got}{meant}")


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _file_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise WeftError(f"{path}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # a file may have the name of a module that is in use
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    with _running(str(path)):
        spec.loader.exec_module(module)
    return module


def _named_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does
    with _running(name):
        return importlib.import_module(name)


@contextmanager
def _running(place: str) -> Iterator[None]:
    """The user's own code: what it raises is said in one line, with the line of it that raised."""
    try:
        yield
    except WeftError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
        if isinstance(error, SyntaxError) and error.filename == place:
            lines.append(error.lineno)
        line = lines[-1] if lines else None
        at = f", line {line}" if line else ""
        raise WeftError(f"{place}{at}: cannot be imported ({type(error).__name__}: {error})") from error


# -- commands --------------------------------------------------------------------------------------------------------
@click.group(
    cls=_Group, help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(importlib.metadata.version("weft"), package_name="weft")
def main() -> None:
    """Entry point of the command line."""


@main.command()
@_with(*_VARIANT_OPTIONS, *_SHAPE_OPTIONS, *_PLAN_OPTIONS)
@click.pass_context
def explain(ctx: click.Context) -> None:
    """Print the plan: stages, loops, tile classes, bytes, predicted time and what bounds it."""
    r = _request(ctx)
    with _busy("planning"):
        text = describe.explain(r.variant, [r.shape], r.device, r.target, r.schedule, None, r.values)
    click.echo(text)


@main.command()
@_with(*_VARIANT_OPTIONS, *_SHAPE_OPTIONS, *_PLAN_OPTIONS)
@click.option("--direction", type=click.Choice(["forward", "backward"]), default="forward", show_default=True)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file instead.")
@click.pass_context
def source(ctx: click.Context, direction: Literal["forward", "backward"], output: Path | None) -> None:
    """Print the generated kernels."""
    r = _request(ctx)
    if output is not None:
        _check_output(output, ".py")
    with _busy("generating"):
        text = describe.source(r.variant, [r.shape], direction, r.device, r.target, r.schedule, None, r.values)
    if output is not None:
        output.write_text(text)
        click.echo(f"{output}: {len(text.splitlines())} lines")
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "python", background_color="default"))
    else:
        click.echo(text)


def _check_output(path: Path, suffix: str) -> None:
    """Before anything is computed: the file's kind, and a folder to write it in."""
    if path.suffix.lower() != suffix:
        raise WeftError(f"--output: expected a file that ends in {suffix}, got {path}")
    if not path.parent.is_dir():
        raise WeftError(f"--output: {path}: there is no folder {path.parent}; make it first")


@main.command()
@_with(*_VARIANT_OPTIONS, *_SHAPE_OPTIONS, *_PLAN_OPTIONS)
@click.option("--block-q", type=click.IntRange(1), default=128, show_default=True, help="Queries a tile.")
@click.option("--block-kv", type=click.IntRange(1), default=128, show_default=True, help="Keys a tile.")
@click.option("--head", type=click.IntRange(0), default=0, show_default=True, help="The query head to draw.")
@click.option("--batch-row", type=click.IntRange(0), default=0, show_default=True, help="The batch row to draw.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG too.")
@click.pass_context
def mask(ctx: click.Context, block_q: int, block_kv: int, head: int, batch_row: int, output: Path | None) -> None:
    """Draw which tiles are skipped, masked or full."""
    r = _request(ctx)
    if batch_row >= r.shape.batch:
        raise WeftError(f"--batch-row: expected 0 to {r.shape.batch - 1} (--batch {r.shape.batch}), got {batch_row}")
    sizes = {"heads": r.shape.heads, "kv_heads": r.shape.kv_heads, "head_dim": r.shape.head_dim}
    own = {p.name for p in r.variant.parameters}
    options = {**{name: size for name, size in sizes.items() if name not in own}, **r.values}
    if output is not None:
        _check_output(output, ".png")
    with _busy("drawing"):
        picture = drawing.show_mask(
            r.variant, r.shape.q_len, r.shape.kv_len, block_q, block_kv, output, None, head, batch_row, options
        )
    click.echo(picture)
    if output is not None:
        click.echo(f"picture: {output}")


@main.command()
@_with(*_VARIANT_OPTIONS, *_SHAPE_OPTIONS)
@click.option("--target", type=click.Choice([t.name for t in targets()]), help="From this machine if not given.")
@click.option("--algorithm", type=click.Choice(["flash", "streaming", "standard"]), default="flash", show_default=True)
@click.pass_context
def tune(ctx: click.Context, target: str | None, algorithm: Algorithm) -> None:
    """Time the forms of kernels worth trying on this machine and remember the fastest."""
    from .tuning import tune as search  # lazy: only this command wants it

    ctx.meta[_SHARED] |= {"device": None, "target": target, "schedule": None}
    r = _request(ctx)
    found = search(r.variant, r.shape, r.values, target=target, algorithm=algorithm)
    for kernel, outcome in found.outcomes.items():
        click.echo(f"{kernel:18} {_outcome_text(outcome)}")
    for text, reason in found.failed.items():
        click.echo(f"passed over {text}: {reason}")
    click.echo(f"fastest of {found.tried}: schedule={str(found.schedule)!r}")


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
@click.option("--device", required=True, help="GPU to compile for: h100, h200, a100, b200, mi300x.")
@click.option(
    "--head-dim", "head_dims", type=click.IntRange(1, MAX_HEAD_DIM), multiple=True, default=(64, 128), show_default=True
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(list(DTYPE_BYTES)), multiple=True, default=("bf16",), show_default=True
)
@click.option(
    "--direction",
    "directions",
    type=click.Choice(["forward", "backward"]),
    multiple=True,
    default=("forward", "backward"),
    show_default=True,
)
@click.option("--target", type=click.Choice([t.name for t in targets()]), help="From the device if not given.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; all cores if not given.")
def build(
    variants: tuple[str, ...], device: str, head_dims: tuple[int, ...], dtypes: tuple[str, ...],
    directions: tuple[Literal["forward", "backward"], ...], target: str | None, jobs: int | None,
) -> None:  # fmt: skip
    """Generate and compile kernels ahead of time, so that a first call compiles nothing. The GPU need not be here.

    VARIANT is module:name or file.py:name of a declared variant.
    """
    from .runtime import build as ahead  # lazy: only this command wants it

    declared = [_declared(name) for name in variants]
    if hardware.by_name(device).kind == "cpu":
        raise WeftError("--device: expected a GPU to compile for, got cpu; the cpu target compiles nothing")
    work = ahead.jobs_of(
        declared, device=device, head_dims=head_dims, dtypes=dtypes, directions=directions, target=target
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
        raise WeftError(f"--{str(option.name).replace('_', '-')}: expected N or LEAST:MOST, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


@main.command("bench-serve")
@_with(*_VARIANT_OPTIONS)
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
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="bf16 on a GPU, fp32 on a CPU if not given.")
@click.option("--on", type=click.Choice(["cpu", "cuda"]), help="The GPU, where there is one, if not given.")
@click.option("--graphs/--no-graphs", default=None, help="Decode by CUDA graphs; on a GPU if not given.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.pass_context
def bench_serve(
    ctx: click.Context,
    /,
    on: str | None,
    dtype: str | None,
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

    given = ctx.meta[_SHARED]
    if all(given[k] is None for k in ("variant", "score", "mask", "scale", "sink", "dropout", "normalizer")):
        given["mask"] = "kv_pos <= q_pos"
    variant = _variant(given)
    device = torch.device(on or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WeftError("--on: expected cpu, as torch can use no GPU here, got cuda")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    on_gpu = device.type == "cuda"
    kind = dtypes[dtype or ("bf16" if on_gpu else "fp32")]
    made = Load(prompts=prompt_len, graphs=on_gpu if graphs is None else graphs, **load)
    with _counted("serving", load["requests"]) as advance:
        lines = list(measure(made, variant, _values(variant, given), device, kind, advance))
    for line in lines:
        click.echo(line)


# -- cache -----------------------------------------------------------------------------------------------------------
@main.group("cache")
def cache_group() -> None:
    """The folder of generated kernels."""


@cache_group.command("path")
def cache_path() -> None:
    """Print where it is."""
    click.echo(cache.cache_dir())


@cache_group.command("list")
def cache_list() -> None:
    """Print its entries, and how to run an edit of one in its place.

    Stale entries were made by other code of weft, or for other versions of torch and triton. In a pipe: one entry a
    line and nothing else, fields apart by tabs: name, state, bytes, seconds since 1970 when made and when last used,
    path, and why it is not sound.
    """
    found = cache.entries()
    if not sys.stdout.isatty():
        for entry in found:
            state, _, reason = _state(entry).partition(": ")
            fields = (entry.folder, state, entry.size, int(entry.created), int(entry.used), entry.path, reason)
            click.echo("\t".join(map(str, fields)))
        return
    size = sum(entry.size for entry in found)
    click.echo(f"{len(found)} entries, {size / 1024:.0f} KiB in {cache.cache_dir()}")
    if found:
        click.echo(f"{'KiB':>8}  {'made':16}  {'used':10}  entry")
    for entry in found:  # plain lines with the name unbroken: it is there to be copied
        made, used = time.localtime(entry.created), time.localtime(entry.used)
        dates = f"{time.strftime('%Y-%m-%d %H:%M', made)}  {time.strftime('%Y-%m-%d', used)}"
        click.echo(f"{entry.size / 1024:8.1f}  {dates}  {entry.folder}  {_state(entry)}")
    _say_how_to_edit(found)


def _state(entry: cache.EntryInfo) -> str:
    if entry.problem:
        return f"unsound: {entry.problem}"
    return f"stale: {entry.stale}" if entry.stale else "sound"


def _say_how_to_edit(found: list[cache.EntryInfo]) -> None:
    usable = next((entry for entry in found if _state(entry) == "sound"), None)
    if usable is not None:
        click.echo("An edited module is named as its entry, without the last dash and what follows:")
        click.echo(f'  cp {shlex.quote(str(usable.path))} "$WEFT_EDITED_DIR/{usable.edited_name}"')


@cache_group.command("prune")
@click.option("--max-size", metavar="SIZE", help="Then remove the least recently used entries beyond it, e.g. 200MB.")
def cache_prune(max_size: str | None) -> None:
    """Remove stale and unsound entries, and what processes that died left behind."""
    done = cache.prune(None if max_size is None else size_of(max_size, "--max-size"))
    counts = f"{done.stale} stale entries, {done.over} beyond the size, {done.left_overs} left-overs"
    click.echo(f"removed {counts} ({done.size / 1024:.0f} KiB) from {cache.cache_dir()}")


@cache_group.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    click.echo(f"removed {cache.clear()} entries from {cache.cache_dir()}")


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
    from .calibration import calibrate as measure  # lazy: no other command measures

    path = None if output is None else Path(output)
    if path is not None and not path.parent.is_dir():
        raise WeftError(f"--output: {path.parent} is no folder")
    with _busy("measuring this machine"):
        found = measure(device)
    path = path or calibrated.file_of(found.machine)
    calibrated.write(found, path)
    unit = "core" if found.machine.kind == "cpu" else "SM"
    click.echo(f"{found.machine.name}, {found.machine.units} {unit}{'s' * (found.machine.units > 1)}")
    for name, text in rates_in_words(found.rates):
        click.echo(f"  {name:14}  {text}")
    click.echo(f"kept in {path}, measured in {found.seconds:.0f} s")
    if output is not None:
        click.echo(f"to use it, set WEFT_CALIBRATION={shlex.quote(str(path))}")


# -- doctor ----------------------------------------------------------------------------------------------------------
@main.command()
@click.option("--run", "runs", is_flag=True, help="Also compute a small call on each target that works here.")
def doctor(runs: bool) -> None:
    """Say what this machine is, which targets work on it and why others do not, and in what state the cache is."""
    for title, rows in (
        ("machine", _machine()),
        ("versions", _versions()),
        ("cache", _cache()),
        ("targets", _targets()),
    ):
        click.echo(title)
        for name, text in rows:
            click.echo(f"  {name:10}  {text}")
    if runs:
        click.echo("a small call")
        for name, reason in driver.available().items():
            if reason is None:
                with _busy(f"computing on {name}"):
                    text = _small_call(name)
                click.echo(f"  {name:10}  {text}")


def _machine() -> list[tuple[str, str]]:
    import torch

    usable, there = hardware.usable_cores(), os.cpu_count() or 1
    cores = f"{usable} of {there} cores usable by this process, torch threads {torch.get_num_threads()}"
    rows = [("CPU", f"{hardware.processor()}, {cores}"), ("GPU", _no_gpu() if not torch.cuda.is_available() else "")]
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        rows[1:] = [
            ("GPU", f"{p.name}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB") for p in cards
        ]
    here = hardware.this_machine()
    return [*rows, ("figures", f"{here.title}, {here.arch}; {here.figures}")]


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "none that torch can use: this torch is built without CUDA and ROCm"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"none that torch can use: it is built for {built}, and finds no device or no driver"


def _versions() -> list[tuple[str, str]]:
    names = ("weft", "torch", "triton", "sympy", "jinja2", "numpy", "matplotlib")
    return [("python", platform.python_version()), *((name, _version(name)) for name in names)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cache() -> list[tuple[str, str]]:
    try:
        folder, found = cache.cache_dir(), cache.entries()
    except WeftError as error:
        return [("folder", f"cannot be used, so that kernels are generated anew in each process: {error}")]
    states = [_state(entry).partition(":")[0] for entry in found]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("sound", "stale", "unsound") if s in states)
    size = f"{sum(entry.size for entry in found) / 1024:.0f} KiB"
    state = f"{len(found)} entries{f' ({counts})' if counts else ''}, {size}"
    access = "" if os.access(folder, os.W_OK) else "; it may only be read: new kernels are not kept"
    return [("folder", str(folder)), ("state", state + access)]


def _targets() -> list[tuple[str, str]]:
    """Each target: whether it works here, and for which operands it is what a call takes by itself."""
    found, by_name = driver.available(), {t.name for t in targets() if t.by_name_only}
    chosen = [name for name, reason in found.items() if reason is None and name not in by_name]
    kind = "the CPU" if hardware.this_machine().kind == "cpu" else "the GPU"
    defaults = {"cpu": "the CPU"} | ({chosen[0]: kind} if chosen else {})
    rows = []
    for name, reason in found.items():
        if reason is not None:
            lacking = re.sub(r", the operands are on the CPU;.*", "; torch can use none here", reason)
            rows.append((name, f"does not work here: {lacking.removeprefix(f'{name}: ')}"))
        elif name in by_name:
            rows.append((name, f"works, where it is asked for: target={name!r}"))
        else:
            rows.append((name, f"works; the default for operands on {defaults[name]}" if name in defaults else "works"))
    return rows


def _small_call(target: str) -> str:
    """What became of a small causal call, against the reference in float64; its kernels are kept nowhere."""
    import torch

    on_cpu = target in ("cpu", "interpret") or not torch.cuda.is_available()
    dtype = torch.float32 if target == "cpu" else torch.float16
    query, key, value = torch.randn(3, 1, 2, 64, 64, dtype=dtype, device="cpu" if on_cpu else "cuda")
    variant, begun = Attention(mask=parse("kv_pos <= q_pos"), name="doctor"), time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, settings(cache_dir=folder):
            out = variant(query, key, value, target=target)
            seconds = time.perf_counter() - begun
        exact = variant.reference(query.double(), key.double(), value.double())
        return f"right to {float((out.double() - exact).abs().max()):.1g}, {seconds:.1f} s with generating"
    except Exception as error:  # compilers and drivers raise what they like, and that is the answer
        return f"fails with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
