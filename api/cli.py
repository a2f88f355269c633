"""The `weft` command: look at a variant's plan, kernels and mask, measure schedules, tend the cache, check the machine.

A variant is text of the language (`--score`, `--mask`) or the name of a declared one (`module:name`, `file.py:name`).
Nothing here needs a GPU; `tune` times whatever machine it runs on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import click

from . import Attention, describe, parse, scalar, score, shape, tensor
from .codegen.targets import targets
from .compiler.planning import hardware
from .compiler.planning.kernels import Algorithm
from .compiler.planning.records import DTYPE_BYTES, Shape
from .ir.errors import WeftError
from .ir.expr import Expr, Number, Scalar, TensorOperand
from .runtime import cache, driver
from .runtime.settings import size_of

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
            raise _Mistake(str(error)) from error


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


def _with(*options: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def _request(ctx: click.Context) -> _Request:
    given = ctx.meta[_SHARED]
    sizes = {k: given[k] for k in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "dtype")}
    values = dict(_value_of(text) for text in given["set"])
    return _Request(_variant(given), shape(**sizes), values, given["device"], given["target"], given["schedule"])


def _variant(given: Mapping[str, object]) -> Attention:
    place, texts = given["variant"], {k: given[k] for k in ("score", "mask", "scale") if given[k] is not None}
    if isinstance(place, str):
        if texts:
            raise WeftError(f"expected {place} or --{' --'.join(texts)}, got both")
        return _declared(place)
    if not texts:
        raise WeftError(
            "expected a variant: --score and --mask, or the name of a declared one (module:name, file.py:name)"
        )
    operands = _operands(given["scalar"], given["tensor"])  # type: ignore[arg-type]
    parts = {k: _parsed(k, str(text), operands) for k, text in texts.items()}
    name = str(given["name"])
    return Attention(parts.get("score", score), parts.get("mask", True), scale=parts.get("scale"), name=name)


def _parsed(option: str, text: str, operands: Mapping[str, Scalar | TensorOperand]) -> Expr:
    try:
        return parse(text, operands)
    except WeftError as error:
        message = str(error).split("\n  at ")[0]  # the line of this file says nothing to a user
        hint = "; declare operands with --scalar and --tensor" if "unknown name" in message else ""
        raise WeftError(f"--{option}: {message}{hint}") from error


def _operands(scalars: tuple[str, ...], tensors: tuple[str, ...]) -> dict[str, Scalar | TensorOperand]:
    found: list[Scalar | TensorOperand] = [*map(_scalar_of, scalars), *map(_tensor_of, tensors)]
    return {operand.name: operand for operand in found}


def _scalar_of(text: str) -> Scalar:
    match = re.fullmatch(r"(\w+):(int|float)", text)
    if not match:
        raise WeftError(f"--scalar: expected NAME:int or NAME:float, got {text!r}")
    return scalar(match[1], _KINDS[match[2]])


def _tensor_of(text: str) -> TensorOperand:
    match = re.fullmatch(r"(\w+):(\d+)(?::(int|float|bool))?", text)
    if not match:
        raise WeftError(f"--tensor: expected NAME:RANK or NAME:RANK:TYPE with type int, float or bool, got {text!r}")
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
    source, separator, name = place.rpartition(":")
    if not separator:
        raise WeftError(f"expected module:name or file.py:name, got {place!r}")
    module = _file_module(Path(source)) if source.endswith(".py") else _named_module(source)
    found = getattr(module, name, None)
    if isinstance(found, Attention):
        return found
    known = sorted(n for n, v in vars(module).items() if isinstance(v, Attention))
    raise WeftError(f"{place}: expected a weft.Attention, got {type(found).__name__}; {source} declares {known}")


def _file_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise WeftError(f"{path}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    spec.loader.exec_module(module)
    return module


def _named_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise WeftError(f"{name}: cannot be imported ({error})") from error


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
    click.echo(describe.explain(r.variant, [r.shape], r.device, r.target, r.schedule, None, r.values))


@main.command()
@_with(*_VARIANT_OPTIONS, *_SHAPE_OPTIONS, *_PLAN_OPTIONS)
@click.option("--direction", type=click.Choice(["forward", "backward"]), default="forward", show_default=True)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file instead.")
@click.pass_context
def source(ctx: click.Context, direction: Literal["forward", "backward"], output: Path | None) -> None:
    """Print the generated kernels."""
    r = _request(ctx)
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
    click.echo(
        describe.show_mask(
            r.variant, r.shape.q_len, r.shape.kv_len, block_q, block_kv, output, None, head, batch_row, options
        )
    )
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
    for kernel, seconds in found.seconds.items():
        click.echo(f"{kernel:18} {seconds * 1000:9.3f} ms")
    for text, reason in found.failed.items():
        click.echo(f"passed over {text}: {reason}")
    click.echo(f"fastest of {found.tried}: schedule={str(found.schedule)!r}")


@main.command()
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT...")
@click.option("--device", required=True, help="GPU to compile for: h100, h200, a100, b200, mi300x.")
@click.option("--head-dim", "head_dims", type=int, multiple=True, default=(64, 128), show_default=True)
@click.option("--dtype", "dtypes", multiple=True, default=("bf16",), show_default=True)
@click.option("--direction", "directions", multiple=True, default=("forward", "backward"), show_default=True)
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
    work = ahead.jobs_of(
        declared, device=device, head_dims=head_dims, dtypes=dtypes, directions=directions, target=target
    )  # fmt: skip
    failed = 0
    for done in ahead.build(work, jobs):
        failed += bool(done.problem)
        click.echo(f"{done.job}: {done.problem or ', '.join(done.kernels)} ({done.seconds:.1f} s)")
    if failed:
        raise _Mistake(f"{failed} of {len(work)} could not be built")


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

    Stale entries were made by other code of weft, or for other versions of torch and triton.
    """
    found = cache.entries()
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


# -- doctor ----------------------------------------------------------------------------------------------------------
@main.command()
def doctor() -> None:
    """Print versions, the device, and which targets can be used here or why not."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, rows in (("versions", _versions()), ("machine", _machine()), ("targets", _targets())):
        table = Table(title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _versions() -> list[tuple[str, str]]:
    names = ("weft", "torch", "triton", "sympy", "jinja2", "numpy", "matplotlib")
    return [("python", platform.python_version()), *((name, _version(name)) for name in names)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> list[tuple[str, str]]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
    here = hardware.this_machine()
    try:
        folder = f"{cache.cache_dir()} ({len(cache.entries())} entries)"
    except WeftError as error:
        folder = str(error)
    return [("GPU", gpu), ("hardware record", f"{here.name}, {here.arch}"), ("cache", folder)]


def _targets() -> list[tuple[str, str]]:
    found = driver.available()
    return [(name, (reason or "available").removeprefix(f"{name}: ")) for name, reason in found.items()]
