"""Hugging Face transformers: after `register()` models take `attn_implementation="weft"`.

transformers makes masks and computes attention by name, through two tables. The table of masks has `rules.mask`, which
takes a mask function of indices down as an expression in place of evaluating it for all pairs. The table of attention
has `attention`, which calls the variant that has this mask and whatever else a layer asks for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, wraps
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..codegen.torch_private import constant_while_tracing
from ..ir import functions
from ..ir.errors import UnavailableError, WeftError
from ..ir.expr import Expr, TensorOperand, symbol
from ..ir.parse import parse
from ..ir.versions import missing, refuse, warn_where_untested
from . import over_ranks, rules
from .caches import descales_of
from .caches import fp8_cache as fp8_cache
from .masking import NAME, Mask, Rule, tensor_of, written
from .over_ranks import context_parallel as context_parallel
from .rules import knows_floats_alone, operand_of, placed
from .traced import at_positions, kind_of

__all__ = ["context_parallel", "fp8_cache", "register", "variants"]

F = TypeVar("F", bound=Callable[..., Any])

# what is used of transformers
USED = (
    "transformers:AttentionInterface.register", "transformers.masking_utils:AttentionMaskInterface.register",
    "transformers.masking_utils:sdpa_mask", "transformers.masking_utils:create_causal_mask",
)  # fmt: skip
# what a function of its table of masks is called with
ASKED = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "device")

# arguments of layers that would change what is computed, and what to say of them
REFUSED = {
    "output_attentions": "weights are never in memory",
    "head_mask": "heads are not masked one by one",
    "layer_head_mask": "heads are not masked one by one",
    "indices": "keys are not chosen one by one",
    "block_indices": "blocks of keys are not chosen one by one",
    "sinks": "there are no sinks of each query",
    "cache": "paged caches are not read",
}


def register() -> None:
    """Give models of Hugging Face transformers the name "weft" for their attention.

    After it `from_pretrained(..., attn_implementation="weft")`, `from_config(..., attn_implementation="weft")` and
    `model.set_attn_implementation("weft")` take it. Calling it again changes nothing.

    A version that was not tested is tried, with a warning. Raises UnavailableError where transformers is missing, or
    lacks what this uses of it.
    """
    try:
        package = importlib.import_module("transformers")
        masks = importlib.import_module("transformers.masking_utils")
    except ImportError as error:
        raise UnavailableError(
            f"weft.integrations.transformers: transformers is not to be had ({error}); "
            "pip install 'weft-attention[transformers]'"
        ) from None
    refuse("transformers", package.__version__, lacking())
    warn_where_untested("transformers", package.__version__)
    package.AttentionInterface.register(NAME, attention)
    masks.AttentionMaskInterface.register(NAME, rules.mask)


def lacking() -> list[str]:
    """What the installed transformers lacks of what this uses: names, and arguments of masks."""
    names = missing(USED)
    if names:
        return names
    made = importlib.import_module("transformers.masking_utils").sdpa_mask
    known = inspect.signature(made).parameters
    return [f"the argument {name} of masks" for name in ASKED if name not in known]


def variants() -> tuple[Attention, ...]:
    """The variants that models have wanted so far in this process: to print, explain, tune or build ahead."""
    return tuple(vars(DECLARED).values())


def naming_the_layer(function: F) -> F:
    """The same, with errors that say which layer of a model they come from."""

    @wraps(function)
    def named(module: nn.Module, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(module, *args, **options)
        try:
            return function(module, *args, **options)
        except WeftError as error:
            error.args = (f"{error}\n  in {layer_of(module)}",)
            raise
        except Exception as error:
            error.add_note(f"{NAME}: in {layer_of(module)}")
            raise

    return named  # type: ignore[return-value]


def layer_of(module: nn.Module) -> str:
    """Where a layer is in the running model: `model.layers.1.self_attn (LlamaAttention) of LlamaForCausalLM`."""
    owners: list[nn.Module] = []
    frame = inspect.currentframe()
    while frame is not None:
        given = frame.f_locals.get("self")
        if isinstance(given, nn.Module):
            owners.append(given)
        frame = frame.f_back
    for owner in reversed(owners):  # from the outermost on
        for name, part in owner.named_modules():
            if part is module and name:
                return f"{name} ({type(module).__name__}) of {type(owner).__name__}"
    index = getattr(module, "layer_idx", None)
    return f"layer {index} ({type(module).__name__})" if index is not None else f"a layer ({type(module).__name__})"


@naming_the_layer
def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None,
    scaling: float | Tensor | None = None, dropout: float = 0.0, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, deterministic: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' table of attention has under the name "weft".

    query [B, Hq, L, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv]; gives [B, L, Hq, Dv], and no weights.
    attention_mask: a `Mask`, or a tensor [B or 1, Hq or 1, L or 1, T or more]: bools, True where a key is seen, or
    floats, added to scores. None is causal where the module is. position_bias: floats of that shape too.
    s_aux: sinks [Hq]. cu_seq_lens_q, cu_seq_lens_k: first rows of packed sequences, where position_ids told of none.
    Gradients flow into whatever is float. Raises WeftError for a mask that does not fit, UnavailableError for what
    this cannot compute.
    """
    for name, reason in REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise UnavailableError(f'{NAME}: {name}: {reason}; load the model with attn_implementation="eager"')
    descales = descales_of(key, value)
    query, key, value = (readable(given) for given in (query, key, value))
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    rule, attention_mask = rule_of(attention_mask, module, query, key, is_causal)
    pairs = {
        name: by_pair(name, given, query, key)
        for name, given in (("position_bias", position_bias), ("attention_mask", attention_mask))
        if isinstance(given, Tensor)
    }
    if rule.over is not None and (pairs or descales or cu_seq_lens_q is not None):
        given = [*pairs, *descales, *(["cu_seq_lens_q"] if cu_seq_lens_q is not None else [])]
        raise UnavailableError(f"{over_ranks.WHAT}: {', '.join(given)}: not divided over ranks; leave it out")
    operands: dict[str, Any] = {}
    call: dict[str, Any] = {"deterministic": True if deterministic else None, **descales}
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and not rule.tensors:
        text = inside_sequences(rule, pairs)
        call |= {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_kv": cu_seq_lens_k}
    else:
        text, operands, call["q_offset"] = placed(rule, by_row=len(pairs) > 0)
    biases: list[str] = []
    for name, (read, part) in pairs.items():
        operands[name] = part
        if part.dtype is torch.bool:
            text = f"{text} & {read}"
        else:
            biases.append(read)
    if s_aux is not None:
        operands["sinks"] = s_aux
    kinds = [(name, kind_of(given) if isinstance(given, Tensor) else "int") for name, given in operands.items()]
    if dropout > 0.0 and module.training:
        operands["share"] = dropout
        kinds.append(("share", "float"))
    # an attribute of its own: torch.compile guards what it takes, and what is declared later is no matter to it
    variant = getattr(DECLARED, declared(text, tuple(kinds), tuple(biases), softcap, scaling))
    if rule.over is None:
        out = variant(query, key, value, **call, **operands)
    else:
        out = rule.over.attention(variant, query, key, value, operands, call["deterministic"])
    return out.transpose(1, 2).contiguous(), None


def rule_of(
    attention_mask: Mask | Tensor | None, module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None
) -> tuple[Rule, Tensor | None]:  # fmt: skip
    """The rule that hides pairs of these queries and keys, and the mask where that is a tensor besides.

    Raises WeftError for a mask of other lengths.
    """
    if isinstance(attention_mask, Mask) and (written(attention_mask) or of_one_query(attention_mask.rule, query)):
        attention_mask = tensor_of(attention_mask)
    if isinstance(attention_mask, Mask):
        rule, attention_mask = attention_mask.rule, None
    else:
        over_ranks.refuse_inside("expected the mask that transformers makes inside, got a tensor or none")
        rule = besides(attention_mask, module, query, key, is_causal)
    if rule.hides_nothing:
        rule = Rule((query.shape[0], 1, query.shape[2], key.shape[2]))
    if rule.shape[3] > key.shape[2]:  # layers under "eager" cut it
        rule = rule.of_first_keys(key.shape[2])
    if rule.shape[2:] != (query.shape[2], key.shape[2]):
        raise WeftError(
            f"{NAME}: attention_mask: expected one of {query.shape[2]} queries and {key.shape[2]} keys, got {rule}"
        )
    return rule, attention_mask


def of_one_query(rule: Rule, query: Tensor) -> bool:
    """Whether a mask was made for one query, and is for all of them: scores of L queries take one of any shape to
    which they broadcast."""
    return rule.shape[2] == 1 < query.shape[2] and not rule.hides_nothing


def readable(given: Tensor) -> Tensor:
    """With a contiguous last dimension: what a model does to its keys is not in the hands of who calls it."""
    return given if given.stride(-1) == 1 or given.shape[-1] == 1 else given.contiguous()


def besides(given: object, module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None) -> Rule:
    """The rule that holds besides a mask that is a tensor, or where there is none."""
    if given is not None and not isinstance(given, Tensor):
        raise WeftError(f"{NAME}: attention_mask: expected a mask of transformers, got {type(given).__name__}")
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if given is None and causal and knows_floats_alone(type(getattr(module, "config", None))):
        causal = False  # under "eager" no mask hides nothing
    if given is not None or not causal or q_len == 1:
        return Rule((batch, 1, q_len, kv_len))
    if q_len != kv_len:
        raise WeftError(
            f"{NAME}: attention_mask: expected one, for {q_len} queries and {kv_len} keys of a causal layer: without "
            "it the position of the queries is not known"
        )
    return Rule((batch, 1, q_len, kv_len), "(kv_idx <= q_idx)")


def by_pair(name: str, given: Tensor, query: Tensor, key: Tensor) -> tuple[str, Tensor]:
    """How a tensor [B or 1, Hq or 1, L or 1, T or more] is read for a pair, and the part of it that is."""
    sizes = (*query.shape[:3], key.shape[2])
    fits = given.dim() == 4 and given.shape[3] >= sizes[3]
    fits = fits and all(found in (1, size) for found, size in zip(given.shape[:3], sizes))
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
    return f"{name}[{', '.join(places)}]", part


def inside_sequences(rule: Rule, pairs: dict[str, tuple[str, Tensor]]) -> str:
    """A rule inside each of the sequences that cu_seq_lens_q and cu_seq_lens_k tell of."""
    if (
        len(pairs) > 0
        or rule.seen is not None
        or isinstance(rule.q_first, Tensor)
        or rule.q_first != 0
        or rule.kv_first != 0
    ):
        raise UnavailableError(
            f"{NAME}: cu_seq_lens_q: expected packed sequences without a cache, a padding mask or a bias; leave it "
            "out, and give position_ids that start anew in each sequence"
        )
    return at_positions(rule.text, "q_pos", "kv_pos")


class Declared:
    """The variants that were wanted so far, each an attribute."""


DECLARED = Declared()
_numbers = count()


@constant_while_tracing
def declared(
    text: str, kinds: tuple[tuple[str, str], ...], biases: tuple[str, ...], softcap: float | None, scale: float | None
) -> str:
    """The name, in `DECLARED`, of the variant with this mask, which is declared when it is first wanted.

    kinds: operands, by name. One that is called sinks is the sink of a head, one that is called share the dropout.
    """
    return _declared(text, kinds, biases, softcap, scale)


@cache
def _declared(
    text: str, kinds: tuple[tuple[str, str], ...], biases: tuple[str, ...], softcap: float | None, scale: float | None
) -> str:
    operands = {name: operand_of(name, kind) for name, kind in kinds}
    score: Expr = symbol("score")
    if softcap is not None:
        score = softcap * functions.tanh(score / softcap)
    for bias in biases:
        score = score + parse(bias, operands)
    share = operands.get("share", 0.0)
    assert not isinstance(share, TensorOperand)
    sink = parse("sinks[head]", operands) if "sinks" in operands else None
    name = f"variant_{next(_numbers)}"
    mask = parse(text, operands)
    setattr(DECLARED, name, Attention(score, mask, scale=scale, sink=sink, dropout=share, name="transformers"))
    return name
