"""What people bring along from torch, numpy, FlexAttention and others, and how the same is written in the language.

Only texts and what they are made from: ir/expr.py and ir/attention.py raise them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .operators import OPERATORS, Number

# Names that torch, numpy and Python's methods have for operators of the language.
_ALIASES = {
    "multiply": "mul", "subtract": "sub", "rsub": "sub", "divide": "div", "truediv": "div", "true_divide": "div",
    "rdiv": "div", "floor_divide": "floordiv", "remainder": "mod", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne", "negative": "neg", "absolute": "abs",
    "fabs": "abs", "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not", "invert": "not",
    "fmax": "maximum", "fmin": "minimum", "max": "maximum", "min": "minimum", "amax": "maximum", "amin": "minimum",
    "expit": "sigmoid", "log_sigmoid": "logsigmoid",
}  # fmt: skip
_WITHOUT_FRACTION = "weft.where(x < 0, -weft.floor(-x), weft.floor(x))"
_CLAMPED = "weft.minimum(weft.maximum(x, low), high)"
# Functions that the language has no operator for, written in it; tests compute each of these, far out too.
FORMULAS = {
    "clamp": _CLAMPED, "clip": _CLAMPED, "clamp_min": "weft.maximum(x, low)", "clamp_max": "weft.minimum(x, high)",
    "relu": "weft.maximum(x, 0.0)", "silu": "x * weft.sigmoid(x)", "square": "x * x", "log1p": "weft.log(1.0 + x)",
    "expm1": "weft.exp(x) - 1.0", "log10": "0.3010299956639812 * weft.log2(x)", "reciprocal": "1.0 / x",
    "tan": "weft.sin(x) / weft.cos(x)",
    # halved inside of the exponential, which is infinite before its half is
    "sinh": "weft.exp(x - 0.6931471805599453) - weft.exp(-x - 0.6931471805599453)",
    "cosh": "weft.exp(x - 0.6931471805599453) + weft.exp(-x - 0.6931471805599453)",
    "ceil": "-weft.floor(-x)", "trunc": _WITHOUT_FRACTION, "fix": _WITHOUT_FRACTION, "int": _WITHOUT_FRACTION,
    "long": _WITHOUT_FRACTION, "fmod": "weft.where(x < 0, -(-x % y), x % y)",
    # not floor(x + 0.5): from 2**23 on, and just below 0.5, the sum is rounded
    "round": "weft.floor(x) + weft.where(x - weft.floor(x) < 0.5, 0, 1)",
    "sign": "weft.where(x > 0, 1, weft.where(x < 0, -1, 0))", "masked_fill": "weft.where(condition, value, x)",
}  # fmt: skip
_POWER = "x * x, or weft.exp2(y * weft.log2(x)) of x above 0"
_WORDS = {
    **dict.fromkeys(("trunc", "fix", "int", "long"), f"{_WITHOUT_FRACTION}, which is an int"),
    "round": f"{FORMULAS['round']}, an int, with halves rounded up",
    "fmod": f"{FORMULAS['fmod']} of ints, of a positive y", "masked_fill":
    f"{FORMULAS['masked_fill']}, or a mask= for what is to be hidden",
    **dict.fromkeys(("pow", "power", "float_power"), _POWER), "softmax": "score=x alone: Weft takes the softmax itself",
    "float": "x as it is: ints become floats where they meet floats", "divmod": "x // y and x % y",
    "shape": "weft.q_len, weft.kv_len or weft.head_dim", "size": "weft.q_len, weft.kv_len or weft.head_dim",
    "to": "x as it is: kernels choose its dtype", "type": "x as it is: kernels choose its dtype",
    "rshift": "x // 2, x // 4, ...", "right_shift": "x // 2, x // 4, ...", "lshift": "x * 2, x * 4, ...",
    "left_shift": "x * 2, x * 4, ...", "bitwise_right_shift": "x // 2", "bitwise_left_shift": "x * 2",
}  # fmt: skip
_WRITTEN = {**FORMULAS, **_WORDS}

# Names that FlexAttention's functions and other kernels have for symbols of the language.
SYMBOL_NAMES = {
    "q_idx": "q_pos", "q_index": "q_pos", "kv_idx": "kv_pos", "kv_index": "kv_pos", "k_idx": "kv_pos",
    "b": "batch", "b_idx": "batch", "batch_idx": "batch", "h": "head", "h_idx": "head", "head_idx": "head",
    "q_head": "head", "seqlen_q": "q_len", "seqlen_k": "kv_len", "seq_len": "kv_len",
}  # fmt: skip

# Functions that look at many pairs, which no expression does.
_OF_MANY = frozenset(
    "all any argmax argmin argsort bmm conv1d conv2d count_nonzero cummax cummin cumprod cumsum diff einsum flip gather"
    " kthvalue log_softmax logcumsumexp logsumexp matmul mean median mm mode norm prod quantile roll softmin sort std"
    " sum topk unique var".split()
)


def operator_named(name: str) -> str | None:
    """The operator that torch, numpy or Python call by this name; None where there is none.

    >>> operator_named("multiply"), operator_named("__rsub__"), operator_named("tanh"), operator_named("cumsum")
    ('mul', 'sub', 'tanh', None)
    """
    plain = name.strip("_")
    found = _ALIASES.get(plain, plain)
    return found if found in OPERATORS else None


def instead_of(name: str) -> str:
    """What to write in place of a function of that name.

    >>> instead_of("tanh"), instead_of("logical_and"), instead_of("relu")
    ('write weft.tanh(x)', 'write a & b', 'write weft.maximum(x, 0.0)')
    """
    plain, operator = name.strip("_"), operator_named(name)
    if operator is not None:
        return f"write {_usage(operator)}"
    if plain in _WRITTEN:
        return f"write {_WRITTEN[plain]}"
    if plain in _OF_MANY:
        return (
            f"{plain} looks at many pairs, and an expression is of one query and one key; compute it in torch, and "
            "give it as an operand that the score reads, such as x[weft.batch, weft.head, weft.q_pos, weft.kv_pos]"
        )
    functions = " ".join(sorted(name for name, op in OPERATORS.items() if op.is_function))
    return f"the language has no {plain}; its functions are those of weft: {functions}"


def is_written_otherwise(name: str) -> bool:
    """Whether `instead_of` knows what to write for a function of that name."""
    return operator_named(name) is not None or name.strip("_") in _WRITTEN.keys() | _OF_MANY


def _usage(operator: str) -> str:
    op = OPERATORS[operator]
    if op.sign is None:
        return f"weft.{op.name}({', '.join(op.operands)})"
    return f"{op.sign}{op.operands[0]}" if op.arity == 1 else f" {op.sign} ".join(op.operands)


# -- values -----------------------------------------------------------------------------------------------------------
def number_in(value: object) -> Number | None:
    """The number that a numpy scalar or a 0-d array or tensor holds; None for anything else.

    None too for a tensor that wants a gradient, which a constant would drop.
    """
    item = getattr(value, "item", None)
    if not callable(item) or getattr(value, "ndim", None) != 0 or getattr(value, "requires_grad", False):
        return None
    try:
        found = item()
    except (RuntimeError, ValueError):  # on the meta device there is none
        return None
    return found if isinstance(found, (bool, int, float)) else None


def is_array(value: object) -> bool:
    """Whether it looks like a tensor of torch or an array of numpy."""
    try:
        return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype") and hasattr(value, "ndim")
    except RuntimeError:  # of a strided nested tensor, which has no shape
        return False


def described(value: object) -> str:
    """What a value is that is no part of an expression, and how it is brought in."""
    if is_array(value):
        kind, shape = kind_of(value), list(value.shape)  # type: ignore[attr-defined]
        index = ", ".join(["..."] * len(shape))
        read = f"x[{index}] at int expressions such as weft.head or weft.kv_pos" if shape else "x as it is"
        return (
            f'{_article(value)} of shape {shape}; declare x = weft.tensor("x", {len(shape)}, {kind}), read {read}, and '
            "give it at each call, x=..."
        )
    if isinstance(value, str):
        return f"str; weft.parse({value!r}, ...) reads text of the language"
    if isinstance(value, (list, tuple)):
        return (
            f'{type(value).__name__}; numbers in a row are a tensor operand: declare x = weft.tensor("x", 1), read '
            "x[weft.head], and give it at each call, x=torch.tensor([...])"
        )
    if callable(value):
        hint = _of_the_library(value) or "write the expression that it computes"
        return f"{type(value).__name__}; {hint}"
    return type(value).__name__


def read_hint(array: Any, index: object) -> str:
    """How entries of a tensor or array are read that was indexed by an expression."""
    at = ", ".join(str(i) for i in index) if isinstance(index, tuple) else str(index)
    return (
        f"{_article(array)} of shape {list(array.shape)} cannot be read at an expression; declare "
        f'x = weft.tensor("x", {array.ndim}, {kind_of(array)}), read x[{at}], and give it at each call, x=...'
    )


def kind_of(array: Any) -> str:
    """The dtype of a tensor or array in the words of `weft.tensor`."""
    name = str(array.dtype)
    return "bool" if "bool" in name else "int" if "int" in name else "float"


def _article(value: object) -> str:
    return "a tensor" if type(value).__module__.partition(".")[0] == "torch" else f"an {type(value).__name__}"


# -- score= and mask= of a variant ------------------------------------------------------------------------------------
def field_hint(field: str, value: object, symbols: Mapping[str, Any]) -> str | None:
    """How a score, mask or sink is written that was given as a tensor or as a function; None for other values.

    symbols: those of the language by name, to call a score_mod or mask_mod with.
    """
    if is_array(value):
        return _tensor_hint(field, value)
    return _call_hint(field, value, symbols) if callable(value) and field in ("score", "mask") else None


def nothing_hint(value: object) -> str | None:
    """What to write for a score or mask that was given as None or as text; None for other values."""
    if value is None:
        return "expected an expression, got None; leave it out"
    if isinstance(value, str):
        return (
            f"expected an expression, got str; weft.parse({value!r}, ...) reads text of the language, and weft.masks "
            "and weft.scores have ready expressions, such as weft.masks.causal"
        )
    return None


def _tensor_hint(field: str, value: Any) -> str:
    shape, kind = list(value.shape), kind_of(value)
    if field == "scale" or not 1 <= len(shape) <= (2 if field == "sink" else 4):
        return f"expected an expression, got {described(value)}"
    if field == "sink" and kind != "bool":
        read = f"sinks[{', '.join(['weft.batch', 'weft.head'][-len(shape) :])}]"
        return (
            f"expected an expression, got {_article(value)} of {value.dtype} and shape {shape}; declare sinks = "
            f'weft.tensor("sinks", {len(shape)}, {kind}) and weft.Attention(sink={read}), and give the tensor at each '
            "call, sinks=..."
        )
    name = "hidden" if kind == "bool" and field == "score" else "seen" if kind == "bool" else "bias"
    read = f"{name}[{', '.join(_indices(shape))}]"
    declared = f'{name} = weft.tensor("{name}", {len(shape)}, {kind})'
    written = f"mask={read}" if kind == "bool" else f"score=weft.score + {read}"
    closed = "; a causal mask is mask=weft.kv_pos <= weft.q_pos, without a tensor" if field == "mask" else ""
    return (
        f"expected an expression, got {_article(value)} of {value.dtype} and shape {shape}; declare {declared} and "
        f"weft.Attention({written}), and give the tensor at each call, {name}=...{closed}"
    )


def _indices(shape: list[int]) -> list[str]:
    """How [batch, head, row, column], or its last dimensions, is read; `q_pos` of row 0 is kv_len - q_len."""
    row = "weft.q_pos"
    if len(shape) > 1 and shape[-2] != shape[-1]:
        row = "weft.q_pos - (weft.kv_len - weft.q_len)"
    names = ["weft.batch", "weft.head", row, "weft.kv_pos"][-len(shape) :]
    if len(shape) == 3:
        names[0] = "weft.head"
    return ["0" if extent == 1 else name for extent, name in zip(shape, names)]


def _call_hint(field: str, function: Any, symbols: Mapping[str, Any]) -> str:
    """A function, as FlexAttention takes them, is called with symbols: what it gives is what to write."""
    own = _of_the_library(function)
    if own is not None:
        return f"expected an expression, got a function; call it: {own}"
    arguments = ["batch", "head", "q_pos", "kv_pos"]
    if field == "score":
        arguments = ["score", *arguments] if _arity(function) != 1 else ["score"]
    elif _arity(function) == 2:
        arguments = ["q_pos", "kv_pos"]
    means = ", ".join(f"weft.{name}" for name in arguments)
    try:
        text: object = function(*(symbols[name] for name in arguments))
    except Exception:
        example = "mask=weft.kv_pos <= weft.q_pos" if field == "mask" else "score=50.0 * weft.tanh(weft.score / 50.0)"
        return f"expected an expression, got a function; write what it computes of {means}, such as {example}"
    return (
        f"expected an expression, got a function; write what it gives for ({', '.join(arguments)}), which are symbols "
        f"of weft: {field}={text}"
    )


def _of_the_library(function: Any) -> str | None:
    """How a function of weft.masks or weft.scores, or what one of scores returned, is used."""
    package, _, module = str(getattr(function, "__module__", "")).partition(".")
    if package != __name__.partition(".")[0] or module not in ("masks", "scores"):
        return None
    name = str(getattr(function, "__qualname__", ""))
    if "<locals>" in name:
        return f"weft.scores.{name.partition('.')[0]}(...)(weft.score)"
    given = "(...)" if module == "masks" else "(...)(weft.score)"
    return f"weft.{module}.{name}{given}"


def _arity(function: Callable[..., Any]) -> int | None:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


# -- options ----------------------------------------------------------------------------------------------------------
_CAUSAL = "declare it: weft.Attention(mask=weft.kv_pos <= weft.q_pos), which is weft.masks.causal"
_MASK = (
    "a mask is declared, weft.Attention(mask=...), as an expression of positions, or of a tensor operand that the call "
    'gives: seen = weft.tensor("seen", 2, bool), mask=seen[weft.q_pos, weft.kv_pos]'
)
_BIAS = (
    'declare it: bias = weft.tensor("bias", 1), weft.Attention(score=weft.score + bias[weft.head]), '
    "called with bias=..."
)
_SCORE = (
    "a score is declared, weft.Attention(score=...), as an expression: 50.0 * weft.tanh(weft.score / 50.0) for "
    "lambda score, b, h, q, k: 50.0 * torch.tanh(score / 50.0)"
)
_SCALE = "declare it: weft.Attention(scale=0.125), or scale=s with s = weft.scalar('s') for one that changes"
_WINDOW = (
    "declare it: n = weft.scalar('n', int), weft.Attention(mask=weft.masks.causal & (weft.q_pos - weft.kv_pos < n)), "
    "called with n=..."
)
_DROPOUT = (
    "declare it: weft.Attention(dropout=0.1), and give train=False where nothing is to be dropped, seed= to drop the "
    "same weights again"
)
_GQA = "leave it out: heads are grouped wherever key and value have fewer heads than the query"
_STARTS = (
    "write cu_seqlens_kv=, with operands packed as [1, heads, total, dim]: x.transpose(0, 1)[None] of [total, heads, "
    "dim]"
)
_LENGTHS = "write kv_lens=: lengths of the keys, int32 [batch], where the cache is longer than what was written"
_PAGES = "write block_table=: int32 [batch, pages], with kv_lens= and pools [blocks, heads, page, dim] as key and value"
_SINK = "declare it: sinks = weft.tensor('sinks', 1), weft.Attention(sink=sinks[weft.head]), called with sinks=..."
OPTIONS = {
    "is_causal": f"{_CAUSAL}; torch counts queries from the first key, q_offset=0, and Weft up to the last one",
    "causal": _CAUSAL, "attn_mask": _MASK, "attention_mask": _MASK, "mask": _MASK,
    "mask_mod": _MASK, "block_mask": _MASK, "key_padding_mask": _MASK, "bias": _BIAS, "attn_bias": _BIAS,
    "alibi_slopes": "declare it: s = weft.tensor('s', 1), weft.Attention(score=weft.scores.alibi(s)(weft.score)), "
                    "called with s=...",
    "score_mod": _SCORE, "score": _SCORE, "scale": _SCALE, "softmax_scale": _SCALE, "sm_scale": _SCALE,
    "window_size": _WINDOW, "window": _WINDOW, "sliding_window": _WINDOW,
    "softcap": "declare it: weft.Attention(score=50.0 * weft.tanh(weft.score / 50.0))",
    "logits_soft_cap": "declare it: weft.Attention(score=50.0 * weft.tanh(weft.score / 50.0))",
    "dropout_p": _DROPOUT, "dropout": _DROPOUT, "p_dropout": _DROPOUT, "enable_gqa": _GQA,
    "return_softmax_lse": "write return_lse=True", "return_attn_probs": "weights are never computed as a whole; "
                                                                        "return_lse=True gives their normalizer",
    "need_weights": "weights are never computed as a whole; return_lse=True gives their normalizer",
    "return_aux": "write return_lse=True", "kernel_options": "write schedule=", "backend": "write target=",
    "device": "leave it out: the operands' device decides, and target= names a target",
    "cu_seqlens_k": _STARTS, "cu_seq_q": _STARTS.replace("_kv", "_q"), "cu_seq_k": _STARTS,
    "cu_seqlens": _STARTS.replace("_kv", "_q"), "max_seqlen_q": "leave it out", "max_seqlen_k": "leave it out",
    "max_seqlen": "leave it out", "max_q": "leave it out", "max_k": "leave it out",
    "qo_indptr": _STARTS.replace("_kv", "_q"), "query_start_loc": _STARTS.replace("_kv", "_q"),
    "seqused_k": _LENGTHS, "cache_seqlens": _LENGTHS, "seq_lens": _LENGTHS, "context_lens": _LENGTHS,
    "page_table": _PAGES, "kv_indptr": _PAGES, "kv_indices": _PAGES, "paged_kv_indptr": _PAGES,
    "paged_kv_indices": _PAGES, "last_page_len": _LENGTHS, "kv_last_page_len": _LENGTHS,
    "paged_kv_last_page_len": _LENGTHS,
    "sink": _SINK, "sinks": _SINK, "learnable_sink": _SINK, "s_aux": _SINK,
    "add_zero_attn": "declare it: weft.Attention(sink=0.0)",
}  # fmt: skip


def option_hint(name: str) -> str | None:
    """How an option of another attention's call is said here; None for names that are none."""
    return OPTIONS.get(name)
