"""Masks of transformers as rules: how they are made of its mask functions, and how a variant is declared with one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import Attention
from ..codegen.torch_private import constant_while_tracing
from ..compiler.analysis.values.ranges import check_integers
from ..ir.caller import warn
from ..ir.errors import WeftError
from ..ir.expr import Scalar, TensorOperand, scalar, tensor
from ..ir.parse import parse
from . import over_ranks
from .masking import NAME, Mask, Rule, handed
from .traced import Index, MaskFunction, at_positions, kind_of, traced

MOST_MASKS = 64  # a model has two or three: more come from a function whose numbers differ from call to call
COMPILED_BITS = (16, 20, 20)
_TYPES = {"bool": bool, "int": int, "float": float}


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: MaskFunction | None = None, attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu", **options: Any,
) -> Mask | Tensor | None:  # fmt: skip
    """What transformers' table of masks has under the name "weft"; arguments are those of its `sdpa_mask`.

    attention_mask: bool [batch, keys so far], False where a key is padding. A mask function that the language has no
    words for is evaluated for every pair, with a warning.
    """
    assert mask_function is not None
    pairs = partial(
        every_pair, batch_size=batch_size, q_length=q_length, kv_length=kv_length, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **options,
    )  # fmt: skip
    over = over_ranks.current()
    if knows_floats_alone(type(options.get("config"))):
        over_ranks.refuse_inside("the model adds its mask itself, and would see this rank's rows alone")
        # none where nothing is hidden, as under "eager": a model that shortens its keys between layers counts on it
        return pairs(q_offset=q_offset, of="eager_mask", skips=options.get("allow_is_bidirectional_skip", False))
    try:
        rule = traced(mask_function)
        kinds = tuple([kind_of(given) for given in rule.tensors])
        lengths = (q_length, kv_length) if over is None else (over.length, over.length)
        problem = not_understood(rule.text, kinds, bits_of(batch_size, *lengths, q_offset, kv_offset))
    except Exception as error:  # whatever a function does with an index that is no tensor
        problem = "call the model without torch.compile to see which, and why"
        if not torch.compiler.is_compiling():
            problem = f"{type(error).__name__}: {error}"
    if problem:
        over_ranks.refuse_inside(f"the language has no words for the mask function ({problem})")
        warn_of_pairs("" if torch.compiler.is_compiling() else ", ".join(own_functions(mask_function)), problem)
        return pairs(q_offset=q_offset)
    # a decode step of a static cache may be compiled, and replayed as a CUDA graph: what differs between steps must
    # then lie in tensors
    replayed = q_length == 1 and options.get("allow_is_causal_skip") is False and torch.device(device).type == "cuda"
    if isinstance(q_offset, Tensor):  # the cache's own, to which it adds before attention is computed
        q_offset = int(q_offset) if not replayed and may_look(q_offset) else q_offset.clone()
    pairs = partial(pairs, q_offset=q_offset)
    seen = seen_keys(rule, attention_mask, q_length, kv_length, q_offset, kv_offset, look=not replayed)
    if rule.shift == 0:
        q_offset, kv_offset = q_offset - kv_offset, 0
        if replayed and not isinstance(q_offset, Tensor):
            q_offset = torch.full((), q_offset, dtype=torch.int64, device=device)
    shape = (batch_size, 1, q_length, kv_length)
    found = Rule(shape, rule.text, tuple(rule.tensors), q_offset, kv_offset, seen)
    size = options.get("local_size")
    if options.get("allow_is_bidirectional_skip") and seen is None and (size is None or kv_length < size):
        found = Rule(shape)  # transformers' own masks are None then, and layers may have more keys than they told of
    return handed(found, pairs, device) if over is None else over.mask(found, device)


def every_pair(of: str = "sdpa_mask", skips: bool = False, **given: Any) -> Any:
    """The mask as a tensor that transformers makes: of bools, or of floats that are added to scores ("eager_mask").

    skips: None where nothing is hidden.
    """
    from transformers import masking_utils  # it is an extra, but whoever calls this has it

    own = {**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": skips}
    return getattr(masking_utils, of)(**own)


@constant_while_tracing
def knows_floats_alone(config: type) -> bool:
    """Whether models of a configuration have no use for masks of bools: they run under "eager" alone."""
    return _knows_floats_alone(config)


@cache
def _knows_floats_alone(config: type) -> bool:
    """By what their classes say of implementations whose masks are no floats."""
    from transformers import PreTrainedModel  # likewise

    classes = list(subclasses(PreTrainedModel))
    package = config.__module__.rpartition(".")[0]
    own = [c for c in classes if getattr(c, "config_class", None) is config]
    own = own or [c for c in classes if package and c.__module__.rpartition(".")[0] == package]
    others = ("_supports_sdpa", "_supports_flex_attn", "_supports_flash_attn")
    return bool(own) and not any(getattr(c, name, False) for c in own for name in others)


def subclasses(of: Any) -> Iterator[Any]:
    for found in of.__subclasses__():
        yield found
        yield from subclasses(found)


def seen_keys(
    rule: Index, given: Tensor | None, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, look: bool
) -> Tensor | None:
    """bool [batch, kv_length], or None where there is no padding that the rule would not hide.

    look: whether to look if it hides any. That costs a GPU a wait, as under "sdpa", and spares every layer reading it.
    """
    if given is None:
        return None
    seen = given[:, kv_offset : kv_offset + kv_length]
    behind = kv_length - seen.shape[1]  # not written yet, in a static cache
    ahead = not isinstance(q_offset, Tensor) and rule.causal and q_offset + q_length <= given.shape[1]
    if look and (behind == 0 or ahead) and may_look(seen) and bool(seen.all()):
        return None
    return pad(seen, (0, behind)) if behind else seen


def may_look(values: Tensor) -> bool:
    """Whether what lies in a tensor may decide what is done: not while calls are recorded."""
    if torch.compiler.is_compiling() or values.is_meta:
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def placed(rule: Rule, by_row: bool) -> tuple[str, dict[str, Any], int | Tensor]:
    """A rule at Weft's positions, what it reads, and the option q_offset.

    Key row j has position j here, and index kv_first + j there. by_row: q_pos is to be the row of the query, because
    tensors are read by it; the rest is in `start`.
    """
    operands: dict[str, Any] = {f"t{number}": given for number, given in enumerate(rule.tensors)}
    q_idx, kv_idx, start = "q_pos", "kv_pos", rule.q_first - rule.kv_first
    if rule.kv_first != 0:
        operands["first"] = rule.kv_first
        q_idx, kv_idx = "(q_pos + first)", "(kv_pos + first)"
    if isinstance(start, Tensor):
        start = start.to(torch.int32).expand(rule.shape[0]).contiguous()
    q_offset: int | Tensor = 0
    if by_row and "q_idx" in rule.text:
        operands["start"] = start
        q_idx = q_idx.replace("q_pos", "(q_pos + start[batch])" if isinstance(start, Tensor) else "(q_pos + start)")
    elif "q_idx" in rule.text:
        q_offset = start
    text = at_positions(rule.text, q_idx, kv_idx)
    if rule.seen is not None:
        operands["valid"] = rule.seen
        text = f"{text} & valid[batch, kv_pos]"
    return text, operands, q_offset


def operand_of(name: str, kind: str) -> Scalar | TensorOperand:
    """The operand that a kind of `kind_of` declares, or "int" and "float"."""
    dtype, rank = kind.rstrip("0123456789"), kind.lstrip("abcdefghijklmnopqrstuvwxyz")
    return tensor(name, int(rank), _TYPES[dtype]) if rank else scalar(name, _TYPES[dtype])


def bits_of(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> tuple[int, int, int]:
    """Bits of the largest batch row, index of a query and index of a key that a call has; of a compiled one, of any."""
    if torch.compiler.is_compiling():
        return COMPILED_BITS
    keys = kv_length + kv_offset
    queries = keys if isinstance(q_offset, Tensor) else q_offset + q_length
    return batch_size.bit_length(), max(queries, keys).bit_length(), keys.bit_length()


@constant_while_tracing
def not_understood(text: str, kinds: tuple[str, ...], bits: tuple[int, int, int]) -> str:
    """Why text is no mask that kernels compute at such indices; empty where it is one."""
    return _problem_of(text, kinds) or _overflow_of(text, kinds, bits)


@cache
def _overflow_of(text: str, kinds: tuple[str, ...], bits: tuple[int, int, int]) -> str:
    """What leaves 32 bits, or divides by what may be 0."""
    operands = {f"t{number}": operand_of(f"t{number}", kind) for number, kind in enumerate(kinds)}
    expression = parse(at_positions(text, "q_pos", "kv_pos"), operands)
    indices = {name: (0, 2**most - 1) for name, most in zip(("batch", "q_pos", "kv_pos"), bits)}
    extents = {name: (2**31,) * int(kind[-1]) for name, kind in zip(operands, kinds)}  # a layer looks at reads itself
    return "; ".join(check_integers(expression, indices, extents)[:1])


@cache
def _problem_of(text: str, kinds: tuple[str, ...]) -> str:
    try:
        operands = {f"t{number}": operand_of(f"t{number}", kind) for number, kind in enumerate(kinds)}
        Attention(mask=parse(at_positions(text, "q_pos", "kv_pos"), operands))
    except WeftError as error:
        return str(error)
    if _problem_of.cache_info().currsize == MOST_MASKS - 1:
        warn(
            f"{NAME}: {MOST_MASKS} masks were declared, the last one {text}: each is compiled by itself; a mask "
            "function whose numbers differ from call to call should read them from a tensor"
        )
    return ""


def own_functions(mask_function: Any) -> Iterator[str]:
    """Names of the functions that a mask function is made of, without transformers' own."""
    module = getattr(mask_function, "__module__", "")
    if module != "transformers.masking_utils":
        yield f"{module}.{getattr(mask_function, '__qualname__', type(mask_function).__name__)}"
        return
    for cell in getattr(mask_function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part):
                yield from own_functions(part)


@constant_while_tracing
def warn_of_pairs(names: str, problem: str) -> None:
    """Once for each function."""
    _warn_of_pairs(names, problem)


@cache
def _warn_of_pairs(names: str, problem: str) -> None:
    warn(
        f"{NAME}: the mask function {names or 'of the model'} is evaluated for every pair, in memory of [batch, "
        f"queries, keys]: the language has no words for it ({problem})"
    )
