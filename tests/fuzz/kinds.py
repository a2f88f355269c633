"""What a call has in it, in words: counted over a run, it says what the fuzzer draws and what it seldom does."""

from __future__ import annotations

from collections.abc import Iterator

from .calls import UNALIGNED, Call, Variant
from .invoke import MOST_SHORT, has_few, kind_of
from .tree import Read, Scalar, nodes, symbols

POSITIONS = {"q_pos", "kv_pos"}


def kinds(variant: Variant, call: Call) -> tuple[str, ...]:
    """Every kind that holds of the call, each once."""
    return tuple(
        dict.fromkeys([*_of_sequences(variant, call), *_of_variant(variant, call), *_of_gradients(variant, call)])
    )


def _of_sequences(variant: Variant, call: Call) -> Iterator[str]:
    yield f"sequences: {kind_of(call)}"
    if call.pages is not None and call.lens is not None:
        yield f"page of {call.pages.rows}"
        named = [
            own[i]
            for own, n in zip(call.pages.table(call.lens.kv), call.lens.kv)
            for i in range(-(-n // call.pages.rows))
        ]
        if len(set(named)) < len(named):
            yield "pages: blocks shared"
        if call.lens.packed and min(call.lens.q) <= MOST_SHORT < max(call.lens.q):
            yield "packed paged: long and short sequences"
    if call.lens is not None and len(call.lengths("cpu")) < (2 if call.pages is None else 3):
        yield "one of the lengths not given"
    if 0 in (call.q_len, call.kv_len) or (call.lens is not None and 0 in (*call.lens.q, *call.lens.kv)):
        yield "nothing to see"
    if has_few(call):
        yield "few queries" + (", 64 keys or more each" if max(_keys(call)) >= 64 else "")
    offset = {type(None): "bottom right", int: "an int"}.get(type(call.q_offset), "a tensor")
    yield f"q_offset: {offset}"
    if call.heads != call.kv_heads and variant.latent is None:
        yield "grouped heads"
    layouts = {given.layout in UNALIGNED for given in call.main}
    yield "layout: " + ("some unaligned" if layouts == {True, False} else "unaligned" if True in layouts else "aligned")
    yield f"dtype: {call.dtype}"
    if call.fp8:
        yield from _of_fp8(variant, call)
    if call.apart:
        yield f"rotary columns apart, {'FP8' if call.fp8 else 'of 16 or 32 bits'}: {kind_of(call)}"
    yield f"schedule: {'default' if call.schedule is None else call.schedule.split('/')[0]}"


def _of_fp8(variant: Variant, call: Call) -> Iterator[str]:
    names = [name for name, *_ in call.fp8]
    yield f"FP8 operands: {', '.join(names)}"
    if variant.latent is not None:
        yield f"FP8 latent cache: {kind_of(call)}"
    elif names == ["key", "value"]:
        yield f"FP8 cache: {kind_of(call)}" + (", few queries" if has_few(call) else "")
    yield from (f"FP8 format: {kind}" for _, kind, _ in call.fp8)
    if len({kind for _, kind, _ in call.fp8}) > 1:
        yield "FP8 format: both"
    yield from (f"FP8 descales: {NAMED.get(of, of)}" for *_, of in call.fp8)
    if call.named_target is None and call.target != "reference":
        yield "FP8 operands: target left open"
    if call.columns:
        yield f"FP8 value by columns: {kind_of(call)}"
    if names == ["query", "key", "value"] and {kind for _, kind, _ in call.fp8} == {"e4m3"}:
        rows = {"token", "64", "128"} & {of for name, _, of in call.fp8 if name != "query"}
        yield f"FP8 products: {kind_of(call)}, descales of {'rows' if rows else 'heads'}"
        yield f"FP8 products: value by {'columns' if call.columns else 'rows'}"
        yield f"FP8 products: D to {_power(call.dim)}, Dv to {_power(call.value_dim)}"
    yield f"FP8 output: {'left open' if call.out_dtype is None else call.out_dtype}"


def _power(width: int) -> int:
    """The power of two that a width does not exceed, 64 at least."""
    return max(64, 1 << (width - 1).bit_length())


NAMED = {
    "": "none", "number": "a number", "head": "one a head", "heads": "one a head of all", "token": "one a row",
    "64": "one for 64 rows", "128": "one for 128 rows",
}  # fmt: skip


def _keys(call: Call) -> tuple[int, ...]:
    return (call.kv_len,) if call.lens is None else (*call.lens.kv, 0)


def _of_variant(variant: Variant, call: Call) -> Iterator[str]:
    yield f"normalizer: {variant.normalizer}"
    if variant.sink is not None:
        yield "sink" + (", of the batch row" if "batch" in symbols(variant.sink) else "")
    if variant.scale is not None:
        yield "scale"
    if variant.dropout is not None:
        trained = "" if call.train else ", train=False"
        yield f"dropout: {'a scalar' if isinstance(variant.dropout, Scalar) else 'a number'}{trained}"
    if variant.latent is not None:
        yield f"latent, {call.form or 'form left open'}: {kind_of(call)}"
    for where, tree in (("mask", variant.mask), ("score", variant.score)):
        for read in (n for n in nodes(tree) if isinstance(n, Read)):
            places = symbols(read) & POSITIONS
            yield f"{where} reads by " + (
                "both positions" if len(places) == 2 else "one position" if places else "none"
            )


def _of_gradients(variant: Variant, call: Call) -> Iterator[str]:
    if not call.wanted:
        yield "gradients: none"
        return
    main = [n for n in call.wanted if n not in variant.tensors]
    yield "gradients: " + ("of all operands" if len(main) == len(call.main) else "of some")
    yield f"deterministic={call.deterministic}"
    if call.dout == "none":
        yield "gradients: of lse alone"
    elif call.lse:
        yield "gradients: of out and lse"
    for read in variant.reads:
        if read.name in call.wanted:
            yield f"gradient of {_read_kind(read)}"
    if variant.sink is not None and any(isinstance(n, Read) and n.name in call.wanted for n in nodes(variant.sink)):
        yield "gradient of a sink's operand"


def _read_kind(read: Read) -> str:
    if not read.index:
        return "a tensor of rank 0"
    of_each = [symbols(index) & POSITIONS for index in read.index]
    if any(len(places) == 2 for places in of_each):
        return "a table read at a function of both positions"
    places = set().union(*of_each)
    return (
        "a table of pairs" if len(places) == 2 else "a table by one position" if places else "a table by head or batch"
    )


__all__ = ["kinds"]
