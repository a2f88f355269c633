"""What every call of a variant reads, worked out once: torch.compile then traces attributes, and no analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.attention import Attention as Declaration
from ..ir.errors import collected
from ..ir.expr import Scalar, TensorOperand
from ..runtime import descales
from ..runtime.check.tensors import rank_problems, trainable_problems
from ..runtime.options import READ_BY_KERNELS, CallOptions
from ..runtime.run.variant import Variant, variant_of

Result = Tensor | tuple[Tensor, Tensor]


class Main(NamedTuple):
    """The tensors of a call that come before the variant's own operands."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    rope: Tensor | None = None


@dataclass(frozen=True)
class Internals:
    """Of one variant. `Attention._internals` has it."""

    names: tuple[str, ...]  # of the operands
    kinds: tuple[str, ...]  # "tensor", "int" or "float"
    numbers: tuple[tuple[str, type], ...]  # the scalars, each with the type that kernels take
    operands: frozenset[str]
    tensors: tuple[str, ...]  # those of them that are tensors
    plain: frozenset[str]  # the same where no option has the name of one, as a seed has
    unread: frozenset[str]
    has_lse: bool
    counts_rows: bool  # positions of queries are read
    drops: bool
    latent_width: int | None  # columns of a latent cache
    share: str | None  # the scalar that the dropout is
    undropped: Any  # the same variant without dropout, where there is one
    variant: Variant

    @staticmethod
    def of(declared: Declaration) -> Internals:
        kinds = tuple("tensor" if isinstance(p, TensorOperand) else p.dtype for p in declared.canonical.parameters)
        names = tuple(p.name for p in declared.canonical.parameters)
        latent, drops, variant = declared.latent, declared.canonical.drops, variant_of(declared)
        return Internals(
            names, kinds,
            numbers=tuple((n, int if kind == "int" else float) for n, kind in zip(names, kinds) if kind != "tensor"),
            operands=frozenset(names), tensors=tuple(n for n, kind in zip(names, kinds) if kind == "tensor"),
            plain=frozenset() if drops else frozenset(names), unread=declared.canonical.unread,
            has_lse=declared.canonical.weighs.saves_lse, counts_rows=variant.first_key.matters, drops=drops,
            latent_width=None if latent is None else latent.rank + latent.rope,
            share=declared.dropout.name if isinstance(declared.dropout, Scalar) else None,
            undropped=declared.replace(dropout=0.0) if drops else None, variant=variant,
        )  # fmt: skip

    def read(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """Operands without those that nothing depends on."""
        return {name: value for name, value in operands.items() if name not in self.unread}


_AS_THEY_ARE = frozenset({torch.float64, *descales.FP8})


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, float operands take the autocast dtype, as those of torch's own attention do.

    float64 and FP8 stay.
    """
    first, *_ = tensors
    kind = first.device.type if isinstance(first, Tensor) else "cpu"
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast knows no meta
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype not in _AS_THEY_ARE else t
        for t in tensors
    )


def read_by_kernels(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, options: CallOptions
) -> Mapping[str, Tensor] | None:
    """The options that kernels read by their names, descales as they read them."""
    main = {"query": query, "key": key, "value": value}
    if problems := rank_problems({n: t for n, t in main.items() if t is not None}):
        raise collected(name, problems)
    read = {n: t for n in READ_BY_KERNELS if n not in descales.NAMES and (t := getattr(options, n)) is not None}
    read |= descales.read_by_kernels(name, main, options, options.block_table is not None)
    return read or None


def dequantized(
    name: str, main: Main, options: CallOptions, dtype: torch.dtype | None = None
) -> tuple[Main, CallOptions, torch.dtype]:
    """The real numbers of operands that may be FP8, the options of a call with these, and the dtype of its output.

    dtype: of the real numbers; that of the definition where not given.
    """
    named: dict[str, Tensor | None] = {"query": main.query, "key": main.key, "value": main.value}
    descales.refuse_bare(name, named, options)
    read = descales.read_by_kernels(name, named, options, options.block_table is not None)
    given = {n: t for n, t in named.items() if t is not None}
    wanted = [n for n, t in given.items() if t.requires_grad and torch.is_grad_enabled()]
    if descales.are_quantized([*given.values()]) and (problems := trainable_problems([*named.values()], wanted, False)):
        raise collected(name, problems)
    real = dtype or descales.real_dtype([*given.values()], options.out_dtype)
    found = {n: descales.dequantized(t, read.get(descales.OF[n]), real) for n, t in given.items()}
    out = descales.out_dtype_of(main.query, main.key, main.value, descales.out_name(options))
    weights = {n: w.to(real) for n in ("uk", "uv", "rope") if (w := getattr(options, n)) is not None}
    none = dict.fromkeys((*descales.NAMES, "out_dtype"))
    return Main(found["query"], found["key"], found.get("value")), options.having(**none, **weights), out
