"""Hugging Face transformers: `register()`, and models take `attn_implementation="weft"`.

transformers builds masks and computes attention by name, through two tables. In the table of masks stands `mask`, which
takes a mask function of indices down as an expression in place of evaluating it for all pairs, and in the table of
attention `attention`, which calls the variant that has this mask, and what else a model asks for.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..attention import Attention
from ..ir import functions
from ..ir.errors import UnavailableError, WeftError
from ..ir.expr import Scalar, TensorOperand, scalar, symbol, tensor
from ..ir.parse import parse
from ..runtime.torch_private import constant_while_tracing
from .traced import Index, MaskFunction, at_positions, kind_of, traced

__all__ = ["register"]

NAME = "weft"
OLDEST, TOO_NEW = (5, 20), (5, 24)  # those between were tested
MOST_MASKS = 64  # a model has two or three: more come from a function whose numbers differ from call to call

_TYPES = {"bool": bool, "int": int, "float": float}
# arguments that change what is computed, and what to say of them
_REFUSED = {
    "output_attentions": "weights are never in memory",
    "head_mask": "heads are not masked one by one",
    "layer_head_mask": "heads are not masked one by one",
    "indices": "keys cannot be chosen one by one",
    "block_indices": "blocks of keys cannot be chosen one by one",
    "sinks": "a sink for each query is not computed",
    "cache": "paged caches are not read",
}


def register() -> None:
    """Give models of Hugging Face transformers the name "weft" for their attention.

    After it `from_pretrained(..., attn_implementation="weft")`, `from_config(..., attn_implementation="weft")` and
    `model.set_attn_implementation("weft")` take it, on a CPU and on a GPU, forward, backward, in `generate` and under
    torch.compile. Calling it again changes nothing.

    Raises UnavailableError where transformers is missing, or is of a version that was not tested.
    """
    try:
        package = importlib.import_module("transformers")
        masks = importlib.import_module("transformers.masking_utils")
    except ImportError as error:
        raise UnavailableError(
            f"weft.integrations.transformers: transformers cannot be imported ({error}); pip install 'weft[transformers]'"
        ) from None
    version = tuple(int(part) for part in package.__version__.split(".")[:2])
    if not OLDEST <= version < TOO_NEW:
        oldest, too_new = (".".join(map(str, given)) for given in (OLDEST, TOO_NEW))
        raise UnavailableError(
            f"weft.integrations.transformers: expected transformers of a version from {oldest} on and below {too_new}, "
            f"whose masks were tested, got {package.__version__}; pip install 'transformers>={oldest},<{too_new}'"
        )
    package.AttentionInterface.register(NAME, attention)
    masks.AttentionMaskInterface.register(NAME, mask)


class Mask(BlockMask):
    """A mask of transformers [batch, 1, queries, keys], as the rule that it follows.

    It is a BlockMask by name only, because what is made once for all layers is handed on where it is that or a tensor.

    text: bool expression of `q_idx`, `kv_idx`, `batch` and tensors `t0`, `t1`, ...; `valid` is one of them where it is
    read. stays: whether a shift of both indices leaves it as it is. q_first, kv_first: index of the first query, an int
    or a tensor on the device, and of the first key, 0 where it stays. seen: bool [batch, keys], keys that are no
    padding, or None.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], text: str, stays: bool, tensors: tuple[Tensor, ...],
        q_first: int | Tensor, kv_first: int, seen: Tensor | None,
    ) -> None:  # fmt: skip
        self.sizes, self.text, self.stays, self.tensors = shape, text, stays, tensors
        self.q_first, self.kv_first, self.seen = q_first, kv_first, seen

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        return self.sizes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sizes)}, {self.text}{'' if self.seen is None else ', padding'})"

    __str__ = __repr__  # type: ignore[assignment]

    def contiguous(self) -> Mask:
        return self

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Mask:  # type: ignore[override]
        """On another device: a model may lie on several."""
        q_first = self.q_first.to(device) if isinstance(self.q_first, Tensor) else self.q_first
        seen = None if self.seen is None else self.seen.to(device)
        tensors = tuple([t.to(device) for t in self.tensors])
        return Mask(self.sizes, self.text, self.stays, tensors, q_first, self.kv_first, seen)

    def _no_tensor(self, *_: Any) -> NoReturn:
        raise UnavailableError(
            f"{NAME}: the model computes with its mask itself, and this is a rule, no tensor; load it with "
            'attn_implementation="sdpa" or "eager"'
        )

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _no_tensor  # type: ignore


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: MaskFunction | None = None, attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu", **options: Any,
) -> Mask | Tensor:  # fmt: skip
    """What transformers' table of masks has under this name; arguments as those of its `sdpa_mask`.

    attention_mask: bool [batch, keys seen so far], False where a key is padding. A mask function that the language
    has no words for is evaluated for all pairs, with a warning.
    """
    assert mask_function is not None
    try:
        rule = traced(mask_function)
        kinds = tuple([kind_of(t) for t in rule.tensors])
        problem = not_understood(rule.text, kinds)
    except Exception as error:  # whatever a function does with an index that is no tensor
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warn_of_pairs(" and ".join(own_functions(mask_function)), problem)
        return every_pair(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device, **options,
        )  # fmt: skip
    # a decode step of a static cache, which may be compiled and replayed: what differs from step to step is in tensors
    replayed = q_length == 1 and options.get("allow_is_causal_skip") is False and torch.device(device).type == "cuda"
    if isinstance(q_offset, Tensor):  # the cache's own, to which it adds before attention is computed
        q_offset = int(q_offset) if q_offset.device.type == "cpu" and may_look(q_offset) else q_offset.clone()
    seen = seen_keys(rule, attention_mask, q_length, kv_length, q_offset, kv_offset, look=not replayed)
    stays = rule.shift == 0
    if stays:
        q_offset, kv_offset = q_offset - kv_offset, 0
        if replayed and not isinstance(q_offset, Tensor):
            q_offset = torch.full((), q_offset, dtype=torch.int64, device=device)
    return Mask((batch_size, 1, q_length, kv_length), rule.text, stays, tuple(rule.tensors), q_offset, kv_offset, seen)


def every_pair(**given: Any) -> Tensor:
    """The mask as a bool tensor, made by transformers."""
    dense = importlib.import_module("transformers.masking_utils").sdpa_mask
    return dense(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})  # type: ignore


def seen_keys(
    rule: Index, given: Tensor | None, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, look: bool
) -> Tensor | None:
    """bool [batch, kv_length], or None where there is no padding that the rule would not hide.

    look: whether to look if there is. It costs a GPU one wait a forward, as it does under "sdpa", and spares every
    layer reading it.
    """
    if given is None:
        return None
    seen = given[:, kv_offset : kv_offset + kv_length]
    behind = kv_length - seen.shape[1]  # not written yet, in a static cache
    ahead = not isinstance(q_offset, Tensor) and rule.causal and q_offset + q_length <= given.shape[1]
    if look and (behind == 0 or ahead) and may_look(seen) and bool(seen.all()):
        return None
    return nn.functional.pad(seen, (0, behind)) if behind else seen


def may_look(values: Tensor) -> bool:
    """Whether what lies in a tensor may decide what is done: not while something else is made of the calls."""
    if torch.compiler.is_compiling() or values.is_meta or torch.jit.is_tracing():
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None,
    scaling: float | Tensor | None = None, dropout: float = 0.0, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' table of attention has under this name.

    query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv]; gives [B, L, Hq, Dv], and no weights.
    attention_mask: a `Mask`; a tensor [B or 1, Hq or 1, L or 1, T or more], of bools, True where a key is seen, or of
    floats, added to scores; or None, which is causal where the module is. position_bias: floats of that shape too.
    s_aux: sinks [Hq]. cu_seq_lens_q, cu_seq_lens_k: first rows of packed sequences, where position_ids told of none.
    Gradients flow into whatever is float.
    """
    for name, reason in _REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise UnavailableError(f'{NAME}: {name}: {reason}; load the model with attn_implementation="eager"')
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    rule = attention_mask if isinstance(attention_mask, Mask) else rule_of(module, query, key, attention_mask, is_causal)
    pairs = [
        (name, *by_pair(name, given, query, key))
        for name, given in (("position_bias", position_bias), ("attention_mask", attention_mask))
        if isinstance(given, Tensor)
    ]
    if rule.shape[2:] != (query.shape[2], key.shape[2]):
        raise WeftError(
            f"{NAME}: attention_mask: expected one of {query.shape[2]} queries and {key.shape[2]} keys, got {rule}"
        )
    call: dict[str, Any] = {}
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and not rule.tensors:
        text, operands = packed_rule(rule, pairs), {}
        call = {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_kv": cu_seq_lens_k}
    else:
        text, operands, call["q_offset"] = placed(rule, by_row=bool(pairs))
    biases = []
    for name, index, given in pairs:
        operands[name] = given
        if given.dtype is torch.bool:
            text = f"{text} & {name}{index}"
        else:
            biases.append(f"{name}{index}")
    if s_aux is not None:
        operands["sinks"] = s_aux
    drops = dropout > 0.0 and module.training
    if drops:
        operands["share"] = dropout
    kinds = tuple([(name, kind_of(given) if isinstance(given, Tensor) else "int") for name, given in operands.items()])
    variant = getattr(DECLARED, declared(text, kinds, tuple(biases), softcap, scaling, s_aux is not None, drops))
    return variant(query, key, value, **call, **operands).transpose(1, 2).contiguous(), None


def rule_of(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: object, is_causal: bool | None
) -> Mask:  # fmt: skip
    """What holds besides a mask that is a tensor, or without one."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise WeftError(f"{NAME}: attention_mask: expected a mask of transformers, got {type(attention_mask).__name__}")
    (batch, _, q_len, _), kv_len = query.shape, key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or not causal or q_len == 1:
        return Mask((batch, 1, q_len, kv_len), "True", True, (), 0, 0, None)
    if q_len != kv_len:
        raise WeftError(
            f"{NAME}: attention_mask: expected one, for {q_len} queries and {kv_len} keys of a causal layer: without it "
            "the position of the queries is not known"
        )
    return Mask((batch, 1, q_len, kv_len), "(kv_idx <= q_idx)", True, (), 0, 0, None)


def by_pair(name: str, given: Tensor, query: Tensor, key: Tensor) -> tuple[str, Tensor]:
    """How a tensor [B or 1, Hq or 1, L or 1, T or more] is read for a pair, and the part of it that is."""
    sizes = (*query.shape[:3], key.shape[2])
    fits = given.dim() == 4 and all(n in (1, size) for n, size in zip(given.shape[:3], sizes)) and (
        given.shape[3] >= sizes[3]
    )
    if not fits or not (given.dtype is torch.bool or given.is_floating_point()):
        raise WeftError(
            f"{NAME}: {name}: expected bools or floats [batch or 1, heads or 1, queries or 1, keys] for {list(sizes)}, "
            f"got {given.dtype} {list(given.shape)}"
        )
    part, places = given[..., : sizes[3]], ["kv_pos"]
    for dim, place in ((2, "q_pos"), (1, "head"), (0, "batch")):
        if given.shape[dim] == 1:
            part = part.select(dim, 0)
        else:
            places.insert(0, place)
    return f"[{', '.join(places)}]", part


def placed(rule: Mask, by_row: bool) -> tuple[str, dict[str, Any], int | Tensor]:
    """A rule at Weft's positions, what it reads, and the option q_offset.

    Key row j has position j here, and index kv_first + j there. by_row: q_pos is to be the row of the query, because tensors are read by it; the rest is in `start`.
    """
    operands: dict[str, Any] = {f"t{number}": given for number, given in enumerate(rule.tensors)}
    q_idx, kv_idx, start = "q_pos", "kv_pos", rule.q_first - rule.kv_first
    if rule.kv_first != 0:
        operands["first"] = rule.kv_first
        q_idx, kv_idx = "(q_pos + first)", "(kv_pos + first)"
    if isinstance(start, Tensor):
        start = start.to(torch.int32).expand(rule.shape[0]).contiguous()
    q_offset: int | Tensor = 0
    if "q_idx" not in rule.text:
        pass
    elif by_row:
        operands["start"] = start
        q_idx = q_idx.replace("q_pos", "(q_pos + start[batch])" if isinstance(start, Tensor) else "(q_pos + start)")
    else:
        q_offset = start
    text = at_positions(rule.text, q_idx, kv_idx)
    if rule.seen is not None:
        operands["valid"] = rule.seen
        text = f"{text} & valid[batch, kv_pos]"
    return text, operands, q_offset


def packed_rule(rule: Mask, pairs: list[Any]) -> str:
    """A rule inside each of the sequences that cu_seq_lens_q and cu_seq_lens_k tell of."""
    if pairs or rule.seen is not None or isinstance(rule.q_first, Tensor) or rule.q_first != 0:
        raise UnavailableError(
            f"{NAME}: cu_seq_lens_q: expected packed sequences without a cache, a padding mask or a bias; leave it out, "
            "and give position_ids that start anew in each sequence"
        )
    return at_positions(rule.text, "q_pos", "kv_pos")


def operand_of(name: str, kind: str) -> Scalar | TensorOperand:
    """The operand that a kind of `kind_of` declares, or "int" and "float"."""
    dtype, rank = kind.rstrip("0123456789"), kind.lstrip("abcdefghijklmnopqrstuvwxyz")
    return tensor(name, int(rank), _TYPES[dtype]) if rank else scalar(name, _TYPES[dtype])


class Declared:
    """The variants that were wanted so far, each an attribute: torch.compile takes them from here, and guards one each."""


DECLARED = Declared()
_numbers = count()


@constant_while_tracing
def declared(
    text: str, kinds: tuple[tuple[str, str], ...], biases: tuple[str, ...], softcap: float | None,
    scale: float | None, sink: bool, drops: bool,
) -> str:  # fmt: skip
    """The name, in `DECLARED`, of the variant with this mask; it is declared when it is first wanted."""
    return _declared(text, kinds, biases, softcap, scale, sink, drops)


@lru_cache(maxsize=None)
def _declared(
    text: str, kinds: tuple[tuple[str, str], ...], biases: tuple[str, ...], softcap: float | None,
    scale: float | None, sink: bool, drops: bool,
) -> str:  # fmt: skip
    operands = {name: operand_of(name, "float" if name == "share" else kind) for name, kind in kinds}
    score = symbol("score")
    if softcap is not None:
        score = softcap * functions.tanh(score / softcap)
    for bias in biases:
        score = score + parse(bias, operands)
    variant = Attention(
        score, parse(text, operands), scale=scale, sink=parse("sinks[head]", operands) if sink else None,
        dropout=operands["share"] if drops else 0.0, name="transformers",
    )  # fmt: skip
    name = f"variant_{next(_numbers)}"
    setattr(DECLARED, name, variant)
    return name


@constant_while_tracing
def not_understood(text: str, kinds: tuple[str, ...]) -> str:
    """Why text is no mask of the language; empty where it is one."""
    return _problem_of(text, kinds)


@lru_cache(maxsize=None)
def _problem_of(text: str, kinds: tuple[str, ...]) -> str:
    try:
        operands = {f"t{number}": operand_of(f"t{number}", kind) for number, kind in enumerate(kinds)}
        Attention(mask=parse(at_positions(text, "q_pos", "kv_pos"), operands))
    except WeftError as error:
        return str(error)
    if _problem_of.cache_info().currsize == MOST_MASKS:
        warnings.warn(
            f"{NAME}: {MOST_MASKS} masks were declared, the last one {text}: each is compiled by itself; a mask "
            "function whose numbers differ from call to call should read them from a tensor",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
    return ""


def own_functions(mask_function: Any) -> Iterator[str]:
    """Names of the functions that a mask function is made of, without transformers' own."""
    inner = []
    for cell in getattr(mask_function, "__closure__", None) or ():
        held = cell.cell_contents
        inner += [part for part in (held if isinstance(held, tuple) else (held,)) if callable(part)]
    module = getattr(mask_function, "__module__", "")
    if module != "transformers.masking_utils":
        yield f"{module}.{getattr(mask_function, '__qualname__', type(mask_function).__name__)}"
    for part in inner:
        yield from own_functions(part)


@constant_while_tracing
def warn_of_pairs(names: str, problem: str) -> None:
    """Once for each function."""
    _warn_of_pairs(names, problem)


@lru_cache(maxsize=None)
def _warn_of_pairs(names: str, problem: str) -> None:
    warnings.warn(
        f"{NAME}: the mask function {names or 'of the model'} is evaluated for every pair, in memory of [batch, queries, "
        f"keys], because it is not one of indices alone: {problem}",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip
