"""The variant as a value: what is scored, what is masked, and nothing about how it is computed."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from . import foreign
from .caller import outside_of_graphs, source_line
from .canonical import canonical
from .errors import Problem, WeftError, collected, shown
from .expr import (
    SYMBOLS,
    Const,
    Expr,
    Load,
    Node,
    Operand,
    Scalar,
    TensorOperand,
    call,
    expression,
    symbol,
)
from .normalizer import SOFTMAX, Normalizer, normalizer_named
from .numbers import is_int
from .page import code_html, lines_html, table_html
from .verify import verify
from .walk import loads, scalars, substitute, tensors

Self = TypeVar("Self", bound="Attention")
SEED = TensorOperand("seed", 1, "int")  # int64 [1]: the option `seed` of a call, as kernels take it


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): one cached vector a token, `rank` wide, is key and value of
    all heads, followed by `rope` rotary columns that only the key has."""

    rank: int  # width of the latent vector
    rope: int  # width of the rotary part of the key, already rotated

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("rope", self.rope, 0)):
            if not is_int(value, least):
                expected = f"{name} to be an int of at least {least}"
                raise WeftError.of("Latent", Problem(option=name, expected=expected, got=shown(value), named=True))


@outside_of_graphs
def _check_positions(given: tuple[object, ...]) -> None:
    """Refuse a call where a declaration belongs: query, key and value are given to what is declared."""
    if len(given) > 2 or (len(given) == 2 and all(foreign.is_array(value) for value in given)):
        raise WeftError(
            "weft.Attention: expected score and mask by position, which declare a variant, got "
            f"{', '.join(type(value).__name__ for value in given)}; tensors are given to the variant: "
            "causal = weft.Attention(mask=weft.kv_pos <= weft.q_pos), then causal(query, key, value)"
        )


def _check_fields(given: Mapping[str, object]) -> None:
    """Refuse fields that are none, with how other attentions' options are declared, and a latent= that is none."""
    known = [f.name for f in dataclasses.fields(Attention)]
    problems = []
    for name, value in given.items():
        if name not in known:
            meant = {"score_mod": "score", "mask_mod": "mask", "attn_mask": "mask"}.get(name, "")
            hint = foreign.field_hint(meant, value, _symbols()) if meant else None
            hint = hint or foreign.option_hint(name)
            what = f"unknown field, expected some of {', '.join(n for n in known if not n.startswith('_'))}"
            problems.append(Problem(option=name, what=what, next_step=hint or ""))
        elif name == "latent" and not isinstance(value, (Latent, NoneType)):
            expected = "weft.Latent(rank=..., rope=...) or None"
            problems.append(Problem(option=name, expected=expected, got=shown(value)))
    if problems:
        raise collected("weft.Attention", problems, source_line())


def _symbols() -> dict[str, Expr]:
    return {name: symbol(name) for name in SYMBOLS}


def _field(item: str, value: Operand) -> Expr:
    """The expression of score, mask or scale; what others take there is refused with how it is written here."""
    if not isinstance(value, (Node, TensorOperand)) and foreign.number_in(value) is None:
        hint = foreign.field_hint(item, value, _symbols()) or foreign.nothing_hint(value)
        if hint is not None:
            raise WeftError.of("", Problem(option=item, what=hint, where=source_line()))
    return expression(value)


@dataclass(frozen=True, eq=False)
class Attention:
    """softmax(score) over the keys that the mask lets a query see, times the values.

    score: expression of `score` (= scale * q.k), positions, heads and operands; what the softmax is taken of.
    mask: bool expression of positions, heads and operands; True where a query may see a key.
    scale: expression of lengths, heads and operands; 1 / sqrt(head_dim) when not given.
    sink: expression of lengths, heads, batch and operands: one more logit in the softmax's denominator, which no value
        belongs to. sink=0.0 is softmax1 ("attention is off by one"). GPT-OSS learns one for each head (arXiv
        2508.10925), and StreamingLLM found sinks (arXiv 2309.17453). The log-sum-exp has it too; -inf is none.
    dropout: share of the weights that a call in training drops, the others divided by what is kept (Srivastava et al.
        2014): a number in [0, 1) or a float scalar operand, to the nearest 1/32768; ir/philox.py says which pairs.
    latent: how keys and values come from one latent vector a token.
    name: an identifier, for messages, kernels and cache entries.
    normalizer: what turns scores into weights, by the name of its record (ir/normalizer.py): "softmax", "sigmoid"
        (arXiv 2409.04431) or "relu" (arXiv 2309.08586), of which the last two take each score by itself.

    Raises WeftError that lists every problem of the declaration with the line that wrote it.
    """

    score: Operand = dataclasses.field(default_factory=lambda: symbol("score"))
    mask: Operand = True
    _: dataclasses.KW_ONLY
    scale: Operand | None = None
    sink: Operand | None = None
    dropout: float | Scalar = 0.0
    latent: Latent | None = None
    name: str | None = None
    normalizer: str = SOFTMAX.name
    # of a part of a call, which no caller declares: the position, the head and the batch row of the whole call where
    # the part counts from 0, int expressions of batch and operands, by which dropout draws
    _origin: tuple[Operand, Operand, Operand] | None = None

    if not TYPE_CHECKING:  # a type checker reads the fields

        def __new__(cls, *args: Any, **fields: Any) -> Any:
            _check_positions(args)
            _check_fields(fields)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        where = source_line()
        for item in ("score", "mask", "scale", "sink"):
            value = getattr(self, item)
            if value is not None or item in ("score", "mask"):
                object.__setattr__(self, item, _field(item, value))
        if not isinstance(self.dropout, (bool, Scalar)):
            number = self.dropout if isinstance(self.dropout, int) else foreign.number_in(self.dropout)
            object.__setattr__(self, "dropout", self.dropout if number is None else float(number))
        if self._origin is not None:
            object.__setattr__(self, "_origin", tuple(map(expression, self._origin)))
        if self.name is None:
            object.__setattr__(self, "name", "attention")
        verify(self, where)

    @cached_property
    def canonical(self) -> CanonicalForm:
        """The form that it shares with all variants equal to it: `.text`, `.digest`, and what the compiler reads."""
        return CanonicalForm(self)

    # -- identity ---------------------------------------------------------------------------------------------------
    def _declarations(self, expressions: tuple[Expr, ...]) -> list[str]:
        if isinstance(self.dropout, Scalar):
            expressions = (*expressions, self.dropout)
        scalar_lines = {
            s.name: f'{s.name} = weft.scalar("{s.name}", {s.dtype})' for e in expressions for s in scalars(e)
        }
        tensor_lines = {
            t.name: f'{t.name} = weft.tensor("{t.name}", {t.rank}, {t.dtype})' for e in expressions for t in tensors(e)
        }
        lines = {**scalar_lines, **tensor_lines}
        return [lines[k] for k in sorted(lines)]

    def _options(self) -> list[str]:
        parts = []
        if self.latent is not None:
            parts.append(f"latent=weft.Latent(rank={self.latent.rank}, rope={self.latent.rope})")
        if self.canonical.drops:
            parts.append(f"dropout={self.dropout}")
        parts.append(f'name="{self.name}"')
        if self.normalizer != SOFTMAX.name:
            parts.append(f'normalizer="{self.normalizer}"')
        if self.canonical.folded_origin:
            parts.append(f"_origin=({', '.join(map(str, self.canonical.folded_origin))})")
        return parts

    def _declared(self) -> tuple[list[str], list[str]]:
        """Lines that declare the operands, and the fields of the variant, as they were written."""
        given = {field: getattr(self, field) for field in ("score", "mask", "scale", "sink")}
        written = {field: expression(value) for field, value in given.items() if value is not None}
        fields = [f"{field}={node}" for field, node in written.items()]
        return self._declarations((*written.values(), *self.canonical.folded_origin)), [*fields, *self._options()]

    def __str__(self) -> str:
        lines, fields = self._declared()
        return "\n".join([*lines, f"weft.Attention({', '.join(fields)})"])

    def _repr_html_(self) -> str:
        """The declaration and its operands, as a notebook shows them."""
        lines, fields = self._declared()
        text = "\n".join([*lines, "weft.Attention(", *(f"    {field}," for field in fields), ")"])
        operands = [
            (code_html(p.name), escape(self._operand_text(p))) for p in self.canonical.parameters if p.name != SEED.name
        ]
        return lines_html(text) + (table_html(operands, ("operands", "")) if operands else "")

    def _operand_text(self, operand: Scalar | TensorOperand) -> str:
        """What a call gives for an operand, in words."""
        if isinstance(operand, Scalar):
            return f"{operand.dtype} number"
        learns = operand.name in {
            load.tensor.name for load in (*self.canonical.gradient_loads, *self.canonical.sink_loads)
        }
        gradient = ", gets a gradient" if learns else ""
        return f"{operand.dtype} tensor, {operand.rank} dimension{'s' * (operand.rank != 1)}{gradient}"

    def __repr__(self) -> str:
        return str(self).splitlines()[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attention) and self.canonical.text == other.canonical.text

    def __hash__(self) -> int:
        return hash(self.canonical.text)

    @outside_of_graphs
    def replace(self: Self, **changes: Any) -> Self:
        """A copy with some fields changed: `causal.replace(score=50 * weft.tanh(score / 50), name="capped")`."""
        known = {f.name for f in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            named = sorted(name for name in known if not name.startswith("_"))
            raise WeftError(f"replace: expected some of {named}, got {', '.join(unknown)}")
        return dataclasses.replace(self, **changes)


class CanonicalForm:
    """What equal variants share, however they were written, each worked out when it is first asked for.

    `Attention.canonical` has it: what the compiler reads of a variant, and its identity.
    """

    def __init__(self, declared: Attention) -> None:
        self.declared = declared

    @cached_property
    def folded_score(self) -> Expr:
        """The canonical score over the raw dot product `qk`, with the scale folded in."""
        scale = call("rsqrt", symbol("head_dim")) if self.declared.scale is None else expression(self.declared.scale)
        score = substitute(expression(self.declared.score), {"score": call("mul", symbol("qk"), scale)})
        return canonical(self._of_own_keys(score))

    @cached_property
    def folded_mask(self) -> Expr:
        """The canonical mask; Const(True) where nothing is masked."""
        return canonical(self._of_own_keys(expression(self.declared.mask)))

    @cached_property
    def folded_sink(self) -> Expr | None:
        """The canonical sink, a float; None where there is none."""
        if self.declared.sink is None:
            return None
        sink = self._of_own_keys(expression(self.declared.sink))
        folded = canonical(sink if sink.dtype == "float" else call("mul", sink, expression(1.0)))
        return None if isinstance(folded, Const) and folded.value == -math.inf else folded

    @cached_property
    def folded_origin(self) -> tuple[Expr, ...]:
        """The canonical origin of a part that drops weights; else none."""
        return tuple(canonical(expression(e)) for e in self.declared._origin or ()) if self.drops else ()

    @property
    def drops(self) -> bool:
        """Whether weights are dropped in training."""
        return isinstance(self.declared.dropout, Scalar) or self.declared.dropout != 0.0

    def _of_own_keys(self, node: Expr) -> Expr:
        """In latent attention every query head has keys of its own, also where they are never written out."""
        return (
            node
            if self.declared.latent is None
            else substitute(node, {"kv_head": symbol("head"), "group": expression(1)})
        )

    @property
    def weighs(self) -> Normalizer:
        """The record of the normalizer."""
        return normalizer_named(self.declared.normalizer)

    @cached_property
    def is_masked(self) -> bool:
        return not (isinstance(self.folded_mask, Const) and self.folded_mask.value is True)

    @cached_property
    def scalars(self) -> tuple[Scalar, ...]:
        """Scalar operands of the call, by name."""
        found = {s.name: s for e in self.expressions for s in scalars(e)}
        if isinstance(self.declared.dropout, Scalar):
            found[self.declared.dropout.name] = self.declared.dropout
        return tuple(found[k] for k in sorted(found))

    @cached_property
    def tensors(self) -> tuple[TensorOperand, ...]:
        """Tensor operands of the call, by name.

        The seed of a variant that drops weights is one of them, so that it goes wherever operands go.
        """
        found = {t.name: t for e in self.expressions for t in tensors(e)}
        if self.drops:
            found[SEED.name] = SEED
        return tuple(found[k] for k in sorted(found))

    @cached_property
    def parameters(self) -> tuple[Scalar | TensorOperand, ...]:
        """Scalar and tensor operands in the order in which ops and kernels take them: by name."""
        found: dict[str, Scalar | TensorOperand] = {s.name: s for s in self.scalars}
        found |= {t.name: t for t in self.tensors}
        return tuple(found[k] for k in sorted(found))

    @cached_property
    def unread(self) -> frozenset[str]:
        """Names of operands that were declared, but that nothing depends on: `0 * x`. A call may bring them along."""
        declared = [
            expression(e)
            for e in (self.declared.score, self.declared.mask, self.declared.scale, self.declared.sink)
            if e is not None
        ]
        names = {s.name for e in declared for s in scalars(e)} | {t.name for e in declared for t in tensors(e)}
        return frozenset(names - {p.name for p in self.parameters})

    @cached_property
    def gradient_loads(self) -> tuple[Load, ...]:
        """The reads of float tensors in the score: where gradients of operands come from."""
        return tuple(load for load in loads(self.folded_score) if load.dtype == "float")

    @cached_property
    def sink_loads(self) -> tuple[Load, ...]:
        """The reads of float tensors in the sink."""
        sink = self.folded_sink
        return () if sink is None else tuple(load for load in loads(sink) if load.dtype == "float")

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """All that kernels evaluate."""
        sink = () if self.folded_sink is None else (self.folded_sink,)
        return (self.folded_score, self.folded_mask, *sink, *self.folded_origin)

    @cached_property
    def text(self) -> str:
        """Text shared by all variants that are equal, however they were written; it reads back as one of them.

        The scale is folded into the score, so that `scale` is 1 here.
        """
        score = substitute(self.folded_score, {"qk": symbol("score")})
        lines = self.declared._declarations(self.expressions)
        fields = [f"score={score}", f"mask={self.folded_mask}", "scale=1.0"]
        fields += [] if self.folded_sink is None else [f"sink={self.folded_sink}"]
        return "\n".join([*lines, f"weft.Attention({', '.join([*fields, *self.declared._options()])})"])

    @cached_property
    def line(self) -> str:
        """The canonical text on one line, as torch ops take it: torch 2.11 prints arguments of ops into comments of the
        code that it generates, and a second line would be code."""
        return self.text.replace("\n", "; ")

    @cached_property
    def digest(self) -> str:
        """Eight hex digits of the canonical text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:8]
