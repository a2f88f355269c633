"""What a command is about: a variant and sizes of a call, out of the words of its options."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch

from .. import Attention, parse, scalar, score, shape, tensor
from ..codegen.targets import targets
from ..compiler.analysis.values.ranges import Ranges
from ..compiler.planning.records import Shape
from ..ir.attention import SEED
from ..ir.errors import Problem, WeftError, listed, shown
from ..ir.expr import Const, Expr, Number, Scalar, TensorOperand
from ..ir.normalizer import SOFTMAX, normalizers
from ..plans import request
from ..plans.stored import STORED
from ..runtime.check.tensors import DTYPES
from ..runtime.descales import ROWS
from .drawn import drawn_operands

_KINDS = {"int": int, "float": float, "bool": bool}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
SHARED = "weft.cli.shared"
_DECLARED = ("score", "mask", "scale", "sink", "dropout", "name", "normalizer")  # what options write of a variant
RANDOM = "random"  # --set NAME=random draws a tensor


def in_options(error: WeftError, given: Mapping[str, object], known: Container[str]) -> str:
    """An error about a call in the words of the command: options in place of arguments.

    Of a variant that the options write, places in files are left out: they are of no file of the user. known: the names
    of all options.
    """
    if not error.problems:
        return str(error)
    is_written = given.get("variant") is None
    texts = [_told(problem, is_written, known) for problem in error.problems]
    if len(texts) == 1 and texts[0].startswith("--"):  # the variant's name says nothing beside the option's
        return texts[0]
    title = error.title if is_written or not error.declared else f"{error.title} (declared at {error.declared})"
    return listed(title, texts)


def _told(problem: Problem, is_written: bool, known: Container[str]) -> str:
    if problem.what == "missing" and problem.operand:
        return _how_to_give(problem)
    where = "" if is_written else problem.where
    if problem.option in known and (is_written or problem.option not in _DECLARED):
        return problem.text(f"--{problem.option.replace('_', '-')}", where)
    return str(replace(problem, where=where))


def _how_to_give(problem: Problem) -> str:
    """What to write for an operand that was not given: options hold numbers, and tensors that are drawn."""
    name = problem.operand
    if problem.expected.startswith("a tensor"):
        return (
            f"--set: missing {name}, a tensor; write --set {name}={RANDOM}, or draw what it holds in Python, "
            f".show_mask(..., {name}=...)"
        )
    return f"--set: missing {name}; write --set {name}=NUMBER"


def _of_option(option: str, error: WeftError, hint: str = "") -> WeftError:
    """What is wrong with the text of an option, without the places in files: they are of no file of the user."""
    texts = [str(replace(problem, where="")) for problem in error.problems] or [str(error)]
    return WeftError(f"--{option}: {'; '.join(texts)}{hint}")


@dataclass(frozen=True)
class Request:
    """A variant and a call of it, as the options describe them."""

    variant: Attention
    shape: Shape
    values: dict[str, Any]  # what --set gives, by name: numbers for scalar operands, drawn tensors for others
    device: str | None
    target: str | None
    schedule: str | None


def _keep(ctx: click.Context, option: click.Parameter, value: object) -> None:
    ctx.meta.setdefault(SHARED, {})[option.name] = value


def _shared(*declarations: str, **settings: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that many commands have: it is kept in the context, where `request_of` finds it."""
    return click.option(*declarations, callback=_keep, expose_value=False, **settings)  # type: ignore[arg-type]


VARIANT_OPTIONS = (
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
    _shared(
        "--set",
        multiple=True,
        metavar="NAME=NUMBER|random",
        help="Value of a scalar operand, e.g. window=1024; or slopes=random, which draws a tensor of the needed shape.",
    ),
)


SHAPE_OPTIONS = (
    _shared("--batch", type=click.IntRange(1), default=1, show_default=True),
    _shared("--heads", type=click.IntRange(1), default=16, show_default=True),
    _shared("--kv-heads", type=click.IntRange(1), help="As many as --heads if not given."),
    _shared("--q-len", type=click.IntRange(1), default=4096, show_default=True),
    _shared("--kv-len", type=click.IntRange(1), help="As many as --q-len if not given."),
    _shared("--head-dim", type=click.IntRange(1), default=128, show_default=True),
    _shared("--value-dim", type=click.IntRange(1), help="As wide as --head-dim if not given."),
    _shared(
        "--dtype",
        type=click.Choice(STORED),
        default="bf16",
        show_default=True,
        help="e4m3 or e5m2: all are FP8.",
    ),
    _shared("--kv-dtype", type=click.Choice(STORED), help="Of key and value; that of --dtype if not given."),
    _shared(
        "--descale",
        type=click.Choice([*map(str, ROWS)]),
        help="What shares a descale of FP8 operands, 64 and 128 rows of a head; head if not given.",
    ),
)


PLAN_OPTIONS = (
    _shared("--device", metavar="NAME", help="A hardware record, e.g. h100; this machine if not given."),
    _shared("--target", type=click.Choice([t.name for t in targets()]), help="From the device if not given."),
    _shared("--schedule", metavar="TEXT", help="flash, split_kv, streaming, standard, or the text of one."),
)


def having(*options: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def request_of(ctx: click.Context, on: torch.device | str = "cpu") -> Request:
    """What a command's options describe. on: where drawn tensors are to lie."""
    given = ctx.meta[SHARED]
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "dtype", "kv_dtype")
    per = given["descale"]
    sizes = {k: given[k] for k in names} | {"descale": int(per) if per in ("64", "128") else per}
    variant, made = variant_of(given), shape(**sizes)
    values = values_of(variant, given, request.ranges_of(made, None), on, TORCH_DTYPES[made.dtype])
    return Request(variant, made, values, given["device"], given["target"], given["schedule"])


def values_of(
    variant: Attention, given: Mapping[str, Any], ranges: Ranges, on: torch.device | str, dtype: torch.dtype,
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """What --set gives to operands: numbers, and tensors that are drawn, as large as calls read them.

    ranges: of symbols in these calls. on, dtype: of drawn tensors, the latter of those of floats.
    """
    numbers, names = _numbers_and_names(variant, given)
    drawn = drawn_operands(variant, names, ranges, numbers, device=on, dtype=dtype, seed=seed)
    return {**numbers, **drawn}


def check_all_given(variant: Attention, values: Mapping[str, Any]) -> None:
    """Raise WeftError where a call would miss operands."""
    missing = [p for p in variant.canonical.parameters if p.name not in values and p.name != SEED.name]
    if missing:
        texts = [f"{p.name}={RANDOM if isinstance(p, TensorOperand) else 'NUMBER'}" for p in missing]
        names = ", ".join(p.name for p in missing)
        raise WeftError(f"--set: missing {names}; write {' '.join(f'--set {text}' for text in texts)}")


def _numbers_and_names(variant: Attention, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The numbers of --set by name, and the names of what is to be drawn."""
    pairs = [_value_of(text) for text in given["set"]]
    twice = sorted({name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1})
    if twice:
        raise WeftError(f"--set: expected each operand once, got {', '.join(twice)} several times")
    values, read = dict(pairs), {operand.name for operand in variant.canonical.parameters}
    declared = {text.partition(":")[0] for text in (*given["scalar"], *given["tensor"])}
    unread = sorted((declared & values.keys()) - read)
    if unread:
        raise WeftError(
            f"--set: {', '.join(unread)}: declared, but neither score, mask, scale, sink nor dropout reads it"
        )
    tensors = {operand.name for operand in variant.canonical.tensors}
    names = [name for name, value in values.items() if value == RANDOM and name in tensors]
    numbers: dict[str, Any] = {name: value for name, value in values.items() if name not in names}
    request.check_operands("--set", variant, numbers)
    return numbers, names


def variant_of(given: Mapping[str, object]) -> Attention:
    """The variant that options name or write; what they leave out is that of full attention."""
    fields = ("score", "mask", "scale", "sink", "dropout")
    place, texts = given["variant"], {k: given[k] for k in fields if given[k] is not None}
    if isinstance(place, str):
        written = [*texts, *(["normalizer"] if given["normalizer"] is not None else [])]
        if written:
            raise WeftError(f"expected {place} or --{' --'.join(written)}, got both")
        return declared_at(place)
    operands = _operands(given["scalar"], given["tensor"])  # type: ignore[arg-type]
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
        hint = "; declare operands with --scalar and --tensor" if error.what.startswith("unknown name") else ""
        raise _of_option(option, error, hint) from error


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
        raise _of_option(option, error) from error


def _scalar_of(text: str) -> Scalar:
    match = re.fullmatch(r"(\w+):(int|float)", text)
    if not match:
        raise WeftError(f"expected NAME:int or NAME:float, got {shown(text)}")
    return scalar(match[1], _KINDS[match[2]])


def _tensor_of(text: str) -> TensorOperand:
    match = re.fullmatch(r"(\w+):(\d+)(?::(int|float|bool))?", text)
    if not match:
        raise WeftError(f"expected NAME:RANK or NAME:RANK:TYPE with type int, float or bool, got {shown(text)}")
    return tensor(match[1], int(match[2]), _KINDS[match[3] or "float"])


def _value_of(text: str) -> tuple[str, Number | str]:
    name, _, number = text.partition("=")
    if number.strip() == RANDOM:
        return name.strip(), RANDOM
    for kind in (int, float):
        try:
            return name.strip(), kind(number)
        except ValueError:
            continue
    raise WeftError(f"--set: expected NAME=NUMBER, or NAME={RANDOM} for a tensor, got {shown(text)}")


def declared_at(place: str) -> Attention:
    """The variant at `module:name` or `file.py:name`."""
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise WeftError(f"expected module:name or file.py:name, got {shown(place)}")
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
