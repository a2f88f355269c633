"""The list of the options of a call: name, type, default, argument of the op, rule and meaning, each in its own line.

What follows from it: the signatures of `Attention.__call__` and `reference` (api/calls/signatures.py), which options
the other methods take, the schema of the op, and what transforms of torch map over. So do the check of a value by
itself, docstrings, and the table in docs/language.md.

An option that kernels read by its name is a tensor with a place in the schema. A kernel says that it reads it
(`Kernel.options`), and a call that gives it to others is refused.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import torch
from torch import Tensor

from ..codegen.targets import targets
from ..compiler.planning.schedule import Schedule
from ..ir.errors import Problem, collected, shown

Form = Literal["expanded", "absorbed"]
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Rule = Callable[[object], str | None]  # of a value: what is expected in place of it, where it is not sound


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its name, type and default."""

    doc: str  # its row of the table in the docs
    in_schema: bool = False  # a tensor that the op takes under this name
    defined: bool = True  # the reference takes it: it is part of what is computed
    described: bool = True  # plan, explain and source take it among their options
    rule: Rule | None = None


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _flag_or_none(value: object) -> str | None:
    return None if value is None else _flag(value)


def _target(value: object) -> str | None:
    """A name; whether there is such a target is seen where one is chosen."""
    if value is None or isinstance(value, str):
        return None
    return f"{', '.join(t.name for t in targets())} or None"


def _out_dtype(value: object) -> str | None:
    if value is None or (isinstance(value, torch.dtype) and value in _OUT_DTYPES):
        return None
    return "torch.bfloat16, torch.float16, torch.float32 or None"


def _schedule(value: object) -> str | None:
    """What the text says is read where a schedule is chosen."""
    if value is None or isinstance(value, (str, Schedule)):
        return None
    return "a name such as 'flash', a weft.Schedule or its text"


def _form(value: object) -> str | None:
    is_form = value is None or (isinstance(value, str) and value in ("expanded", "absorbed"))
    return None if is_form else "'expanded' or 'absorbed'"


# fmt: off
class CallOptions:
    """The options of one call, as they were given: defaults are the class's. Nobody changes one that others may see."""

    return_lse: Annotated[bool, Option(
        "`True`: also give the log-sum-exp of the visible scores, and of the sink if there is one, `[B, Hq, L]`, "
        "natural logarithm, float32 (to 2**-14 for bf16 and fp16 on a CPU); it has a gradient", rule=_flag,
    )] = False
    q_offset: Annotated[int | Tensor | None, Option(
        "position of query row 0, `kv_len - q_len` where not given ([above](#queries-before-the-first-key)): an "
        "int, or an int32 tensor `[B]` on the device, whose values are looked at only on request "
        "([settings](settings.md#check-of-values))",
    )] = None
    target: Annotated[str | None, Option(
        '`"hopper"`, `"triton"`, `"interpret"` or `"cpu"`; from the operands\' device where not given',
        defined=False, described=False, rule=_target,
    )] = None
    schedule: Annotated[str | Schedule | None, Option(
        '`"flash"`, `"split_kv"` ([below](#few-queries-behind-many-keys)), a `weft.Schedule` or its text; '
        '`"streaming"` and `"standard"` too, for comparison, on the targets `triton` and `interpret` (`standard` '
        "keeps scores in memory in the operands' dtype)", defined=False, described=False, rule=_schedule,
    )] = None
    deterministic: Annotated[bool | None, Option(
        "`True`: gradients repeat bit for bit, on a CPU for the same number of torch's threads. `None`: follow "
        "`torch.use_deterministic_algorithms`; gradients of your own operands repeat either way. `False`: allow any "
        "order of summation. Then `hopper` sums the gradient of the query in any order, and [tables](#biases-that-"
        "learn) may have atomic additions. Outputs repeat always",
        defined=False, rule=_flag_or_none,
    )] = None
    uk: Annotated[Tensor | None, Option(
        "`[H, rank, nope]`, of [latent attention](#latent-attention)",
    )] = None
    uv: Annotated[Tensor | None, Option(
        "`[H, rank, Dv]`, likewise",
    )] = None
    rope: Annotated[Tensor | None, Option(
        "`[B, 1, T, rope]`, or a pool: rotary columns of the cache that are a tensor of their own, likewise; the cache "
        "has the `rank` columns alone, as one in [FP8](fp8.md#caches)",
    )] = None
    form: Annotated[Form | None, Option(
        '`"expanded"` or `"absorbed"`, likewise; by cost where not given', defined=False, described=False, rule=_form,
    )] = None
    kv_lens: Annotated[Tensor | None, Option(
        "keys of each sequence in padded operands or pages, int32 or int64 `[B]` on the device ([below](#sequences-"
        "of-their-own-lengths))", in_schema=True,
    )] = None
    q_lens: Annotated[Tensor | None, Option(
        "queries of each sequence in padded operands, likewise", in_schema=True,
    )] = None
    cu_seqlens_q: Annotated[Tensor | None, Option(
        "first row of each sequence in packed queries, and the end, int32 or int64 `[sequences + 1]`", in_schema=True,
    )] = None
    cu_seqlens_kv: Annotated[Tensor | None, Option(
        "the same of packed keys", in_schema=True,
    )] = None
    block_table: Annotated[Tensor | None, Option(
        "int32 `[B, pages]`: keys and values lie in pools of blocks ([below](#paged-caches))", in_schema=True,
    )] = None
    seed: Annotated[int | Tensor | None, Option(
        "of [dropout](#the-variant), an int or an int64 tensor with one element on the device; drawn by torch's "
        "generator where not given", described=False,
    )] = None
    train: Annotated[bool, Option(
        "`False` drops nothing: kernels of the variant without dropout", described=False, rule=_flag,
    )] = True
    q_descale: Annotated[float | Tensor | None, Option(
        "of an [FP8](fp8.md) query: a real number is a stored one times it. A float, or a float32 tensor that "
        "broadcasts to `[B, Hq, 1, 1]`, or one number a block of 1, 64 or 128 rows, `[B, Hq, ceil(L / n), 1]`",
        in_schema=True,
    )] = None
    k_descale: Annotated[float | Tensor | None, Option(
        "the same of an FP8 key, with Hkv and T; over pages `[1, Hkv, 1, 1]` or one number a row, "
        "`[blocks, Hkv, page, 1]`", in_schema=True,
    )] = None
    v_descale: Annotated[float | Tensor | None, Option(
        "the same of an FP8 value", in_schema=True,
    )] = None
    out_dtype: Annotated[torch.dtype | None, Option(
        "of a call with FP8 operands: the dtype of the output; where not given, that of the query, or of the other "
        "operands where the query is FP8, or bfloat16 where all three are", rule=_out_dtype,
    )] = None
    operands: Annotated[Mapping[str, Any] | None, Option(
        "operands of the variant by name, beside those that are given as keywords", described=False,
    )] = None

    # what follows from the others, but is asked for at each call:
    are_ragged = False  # whether they say where sequences lie
    are_read = False  # whether they have what kernels read by its name, or say the dtype of the output

    @property
    def lengths(self) -> dict[str, Tensor]:
        """Those that say where sequences lie and are given, by name."""
        return {n: value for n in LENGTHS if (value := getattr(self, n)) is not None}

    def having(self, **given: Any) -> CallOptions:
        """The same but for these."""
        found = CallOptions()
        for n in OPTIONS:  # as torch.compile can trace it
            setattr(found, n, given[n] if n in given else getattr(self, n))
        found.are_ragged = any([getattr(found, n) is not None for n in LENGTHS])
        found.are_read = any([getattr(found, n) is not None for n in _READ])
        return found


# fmt: on
PLAIN = CallOptions()
OPTIONS: Mapping[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(CallOptions, include_extras=True).items()
}
LENGTHS = ("q_lens", "kv_lens", "cu_seqlens_q", "cu_seqlens_kv", "block_table")
IN_SCHEMA = tuple(name for name, option in OPTIONS.items() if option.in_schema)
READ_BY_KERNELS = tuple(name for name in IN_SCHEMA if name not in LENGTHS)
_READ = (*READ_BY_KERNELS, "out_dtype")
DEFINED = frozenset(name for name, option in OPTIONS.items() if option.defined)
DESCRIBED = tuple(name for name, option in OPTIONS.items() if option.described)
_RULES = {name: option.rule for name, option in OPTIONS.items()}


def check_values(name: str, given: Mapping[str, Any]) -> None:
    """Raise WeftError for an option whose value is none by itself. name: of the variant; given: options by name."""
    for option, value in given.items():
        rule = _RULES[option]
        if rule is not None and (expected := rule(value)) is not None:
            raise collected(name, [Problem(option=option, expected=expected, got=shown(value))])


def read(name: str, given: Mapping[str, Any]) -> tuple[CallOptions, dict[str, Any]]:
    """The options among keyword arguments, and the operands. name: of the variant, for errors.

    Raises WeftError for an option whose value is none by itself, and for operands that are given twice.
    """
    options, own = CallOptions(), {}
    for n, value in given.items():
        if n not in _RULES:
            own[n] = value
            continue
        rule = _RULES[n]
        if rule is not None and rule(value) is not None:
            check_values(name, {n: value})
        setattr(options, n, value)
        if n in LENGTHS and value is not None:
            options.are_ragged = True
        elif n in _READ and value is not None:
            options.are_read = True
    if options.operands is not None:
        own = joined(name, own, options.operands)
    return options, own


def joined(name: str, own: dict[str, Any], more: object) -> dict[str, Any]:
    """Operands given by keyword and those in a dictionary. Raises WeftError where one is in both."""
    if not isinstance(more, Mapping) or not all(isinstance(n, str) for n in more):
        expected, got = "a dictionary of operands by name", type(more).__name__
        raise collected(name, [Problem(option="operands", expected=expected, got=got)])
    if twice := sorted(own.keys() & more.keys()):
        what, how = "given by keyword and in operands", "leave one out"
        raise collected(name, [Problem(operand=n, what=what, next_step=how) for n in twice])
    return own | dict(more)


# -- what is written of them ------------------------------------------------------------------------------------------
def taken(defined: bool) -> list[str]:
    """Names of the options of a call, or of those that its definition takes."""
    return [name for name, option in OPTIONS.items() if option.defined or not defined]


def signature_of(defined: bool) -> inspect.Signature:
    """That of the method: query, key and value by position, options and operands by name."""
    kind, hints = inspect.Parameter, get_type_hints(CallOptions)
    main = [kind(n, kind.POSITIONAL_OR_KEYWORD, annotation=Tensor) for n in ("self", "query", "key")]
    main += [kind("value", kind.POSITIONAL_OR_KEYWORD, default=None, annotation=Tensor | None)]
    own = [kind(n, kind.KEYWORD_ONLY, default=getattr(CallOptions, n), annotation=hints[n]) for n in taken(defined)]
    return inspect.Signature([*main, *own, kind("own", kind.VAR_KEYWORD)])


def doc_of(defined: bool) -> str:
    """Their part of the method's docstring."""
    lines = []
    for name in taken(defined):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", OPTIONS[name].doc).replace("`", "")
        lines += textwrap.wrap(f"{name}: {text}", 108, initial_indent=" " * 8, subsequent_indent=" " * 10)
    return "\n".join(lines) + "\n"


def rows_of_the_table() -> list[str]:
    """The rows of the table in docs/language.md."""
    return [f"| `{name}` | {option.doc} |" for name, option in OPTIONS.items()]
