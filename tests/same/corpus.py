"""What `make same` generates: calls of every kernel, kind of sequences, normalizer, kind of gradient, form and card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score, scores, variants

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Triple:
    """A variant, a call of it, and a target on a card."""

    name: str  # also the folder of its texts
    variant: weft.Attention
    sizes: Mapping[str, Any]  # of weft.shape
    target: str
    card: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of the call, and operands
    schedule: str | None = None
    form: str | None = None
    fp8: tuple[str, ...] = ()  # which of query, key and value are e4m3
    page: int = 0  # rows of a block, of FP8 keys in pools

    @property
    def operands(self) -> list[Any]:
        """What its plan is of: sizes, or tensors where their dtypes differ."""
        if not self.fp8:
            return [weft.shape(**self.sizes)]
        s = self.sizes
        rows = {"query": (s["batch"], s["heads"], s["q_len"], s["head_dim"])}
        keys = (s["batch"], s["kv_heads"], s.get("kv_len", s["q_len"]))
        if self.page:
            keys = (self.options["block_table"].numel(), s["kv_heads"], self.page)
        latent = self.variant.latent
        rows["key"] = (*keys, s["head_dim"] if latent is None else latent.rank)
        if latent is None:
            rows["value"] = (*keys, s["value_dim"])
        dtypes = {name: torch.float8_e4m3fn for name in self.fp8}
        return [torch.zeros(size, dtype=dtypes.get(name, torch.bfloat16)) for name, size in rows.items()]


# -- variants ----------------------------------------------------------------------------------------------------------
_window = weft.scalar("window", int)
_slopes, _sinks, _temperatures = (weft.tensor(n, 1) for n in ("slopes", "sinks", "temperatures"))
_doc, _valid = weft.tensor("doc", 2, int), weft.tensor("valid", 2, bool)
_bias, _key_bias = weft.tensor("bias", 4), weft.tensor("key_bias", 2)
_table, _blocks, _allowed = weft.tensor("table", 2), weft.tensor("blocks", 2, bool), weft.tensor("allowed", 3, bool)
_places, _encoding = weft.tensor("places", 2, int), weft.tensor("encoding", 1)

CAUSAL = weft.Attention(mask=masks.causal, name="causal")
ALIBI = weft.Attention(scores.alibi(_slopes)(score), masks.causal, name="alibi")
SINK = weft.Attention(mask=masks.causal, sink=_sinks[head], name="sinks")
DROPOUT = weft.Attention(mask=masks.causal, dropout=0.1, name="dropped")
SIGMOID = variants.sigmoid_attention()
DOCUMENTS = weft.Attention(mask=masks.causal & masks.document(_doc), name="documents")
T5 = weft.Attention(scores.t5_bias(_table)(score), name="t5")
FAR = weft.Attention(score + _key_bias[batch, kv_pos], masks.causal, name="far")
PLAIN = {
    "full": weft.Attention(name="full"),
    "causal": CAUSAL,
    "window": weft.Attention(mask=masks.causal & masks.sliding_window(_window), name="window"),
    "window-1024": weft.Attention(mask=masks.causal & masks.sliding_window(1024), name="window_1024"),
    "prefix": weft.Attention(mask=masks.prefix_lm(256), name="prefix"),
    "dilated": weft.Attention(mask=masks.dilated(3, 300), name="dilated"),
    "block-causal": weft.Attention(mask=masks.block_causal(64), name="block_causal"),
    "natten": weft.Attention(mask=masks.natten_2d(32, 3), name="natten"),
    "documents": DOCUMENTS,
    "padding": weft.Attention(mask=masks.causal & _valid[batch, kv_pos], name="padding"),
    "blocks": weft.Attention(mask=masks.causal & _blocks[q_pos // 128, kv_pos // 128], name="blocks"),
    "pairs": weft.Attention(mask=_allowed[batch, q_pos, kv_pos], name="pairs"),
    "softcap": weft.Attention(scores.softcap(50.0)(score), masks.causal, name="softcap"),
    "alibi": ALIBI,
    "far": FAR,
    "t5": T5,
    "t5-causal": weft.Attention(scores.t5_bias(_table, bidirectional=False)(score), masks.causal, name="t5_causal"),
    "bias": weft.Attention(score + _bias[batch, head, q_pos, kv_pos], name="bias"),
    "encoding": weft.Attention(score + _encoding[_places[q_pos, kv_pos]], name="encoding"),
    "temperature": weft.Attention(score * _temperatures[head], masks.causal, name="temperature"),
    "scale": weft.Attention(mask=masks.causal, scale=_temperatures[head], name="scaled"),
    "sink": SINK,
    "sink-constant": variants.softmax1(),
    "dropout": DROPOUT,
    "sigmoid": SIGMOID,
    "relu": variants.relu_attention(),
}
LATENT = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=512, rope=64), name="mla")

# -- operands ----------------------------------------------------------------------------------------------------------
_LENGTHS = (700, 33, 256, 1)


def _operands(variant: weft.Attention, rows: int, sequences: int) -> dict[str, Any]:
    """Values for what the mask reads, on which tile counts of a plan depend."""
    made: dict[str, Callable[[], Any]] = {
        "window": lambda: 300,
        "doc": lambda: torch.arange(rows).div(100, rounding_mode="floor").repeat(sequences, 1),
        "valid": lambda: torch.arange(rows).repeat(sequences, 1) < rows - 50,
        "blocks": lambda: torch.ones(-(-rows // 128), -(-rows // 128), dtype=torch.bool).tril(),
        "allowed": lambda: torch.ones(sequences, rows, rows, dtype=torch.bool).tril(),
    }
    return {p.name: made[p.name]() for p in variant.canonical.parameters if p.name in made}


def _sizes(head_dim: int = 128, value_dim: int | None = None, **more: Any) -> dict[str, Any]:
    return {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 1024, "head_dim": head_dim, "dtype": "bf16",
            "value_dim": value_dim or head_dim, **more}  # fmt: skip


# -- triples -----------------------------------------------------------------------------------------------------------
_GPU = (("hopper", "h200"), ("triton", "h200"))
_ALL = (*_GPU, ("cpu", "cpu"))


def corpus() -> list[Triple]:
    """Every triple; names are apart."""
    parts = _variants, _widths, _sequences, _decode, _repeats, _schedules, _latents, _fp8, _cards
    found = [triple for part in parts for triple in part()]
    assert len({t.name for t in found}) == len(found)
    return found


def _dense(label: str, variant: weft.Attention, sizes: Mapping[str, Any], on: tuple[str, str], **more: Any) -> Triple:
    rows = max(sizes["q_len"], sizes.get("kv_len", 0))
    given = {**_operands(variant, rows, sizes["batch"]), **more.pop("options", {})}
    name = f"{label}-{on[0]}-{on[1]}"
    return Triple(name, variant, sizes, on[0], on[1], given, **more)


def _variants() -> Iterator[Triple]:
    for on in _ALL:
        for name, variant in PLAIN.items():
            yield _dense(name, variant, _sizes(), on)


def _widths() -> Iterator[Triple]:
    for on in _GPU:
        for name in ("causal", "alibi", "documents", "dropout", "sink", "sigmoid", "blocks", "softcap"):
            for head_dim, value_dim in ((64, 64), (80, 80), (192, 128), (256, 256)):
                sizes = _sizes(head_dim, value_dim)
                yield _dense(f"{name}-{head_dim}x{value_dim}", PLAIN[name], sizes, on)
        for dtype in ("fp16", "fp32"):
            yield _dense(f"causal-{dtype}", CAUSAL, _sizes(64, dtype=dtype), on)
        yield _dense("causal-short", CAUSAL, _sizes(64, q_len=200), on)
        rows = torch.tensor([3, 40], dtype=torch.int32)
        yield _dense("causal-offset-by-row", CAUSAL, _sizes(q_len=900, kv_len=1024), on, options={"q_offset": rows})
    for dtype in ("fp16", "fp32"):
        yield _dense(f"causal-{dtype}", CAUSAL, _sizes(64, dtype=dtype), ("cpu", "cpu"))


def _sequence_options(kind: str, q_lens: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes and options of a call of sequences with lengths of their own."""
    kv = torch.tensor(_LENGTHS, dtype=torch.int32)
    q = torch.tensor(q_lens, dtype=torch.int32)
    cu_q, cu_kv = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (q, kv))
    table = torch.arange(4 * 64, dtype=torch.int32).reshape(4, 64)
    padded, packed = {"batch": 4, "q_len": max(q_lens)}, {"batch": 1, "q_len": sum(q_lens)}
    match kind:
        case "lengths":
            return padded | {"kv_len": max(_LENGTHS)}, {"q_lens": q, "kv_lens": kv}
        case "packed":
            return packed | {"kv_len": sum(_LENGTHS)}, {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        case "paged":
            return padded | {"kv_len": 1024}, {"q_lens": q, "kv_lens": kv, "block_table": table}
        case "packed_paged":
            return packed | {"kv_len": 1024}, {"cu_seqlens_q": cu_q, "kv_lens": kv, "block_table": table}
    raise AssertionError(kind)


def _ragged(label: str, variant: weft.Attention, kind: str, q_lens: tuple[int, ...], on: tuple[str, str]) -> Triple:
    own, options = _sequence_options(kind, q_lens)
    sizes = _sizes(**own)
    given = _operands(variant, 1024 if kind == "packed" else sizes["kv_len"], 4)
    return Triple(f"{label}-{kind}-{on[0]}", variant, sizes, on[0], on[1], {**given, **options})


def _sequences() -> Iterator[Triple]:
    named = ("causal", "alibi", "documents", "dropout", "sink", "far", "t5", "blocks", "sigmoid")
    for on in _ALL:
        for kind in ("lengths", "packed", "paged", "packed_paged"):
            for name in named:
                yield _ragged(name, PLAIN[name], kind, _LENGTHS, on)


def _decode() -> Iterator[Triple]:
    for on in _ALL:
        for name in ("causal", "alibi", "sink", "sigmoid", "far", "documents", "window-1024"):
            yield _dense(f"{name}-decode", PLAIN[name], _sizes(q_len=1, kv_len=4096), on)
        for kind in ("lengths", "paged", "packed_paged"):
            for name in ("causal", "sink", "far"):
                yield _ragged(f"{name}-decode", PLAIN[name], kind, (1, 1, 1, 1), on)
        yield _dense("causal-few", CAUSAL, _sizes(64, q_len=8, kv_len=4096), on)


def _repeats() -> Iterator[Triple]:
    for on in _GPU:
        for name in ("causal", "alibi", "documents", "dropout", "t5", "bias", "encoding", "blocks"):
            yield _dense(f"{name}-repeats", PLAIN[name], _sizes(), on, options={"deterministic": True})
        yield _dense("encoding-any-order", PLAIN["encoding"], _sizes(), on, options={"deterministic": False})


def _schedules() -> Iterator[Triple]:
    for schedule in ("standard", "streaming"):
        for name in ("causal", "alibi", "window", "softcap", "full"):
            yield _dense(f"{name}-{schedule}", PLAIN[name], _sizes(64), ("triton", "h200"), schedule=schedule)


def _latents() -> Iterator[Triple]:
    for on in _ALL:
        for form, q_len in (("expanded", 1024), ("absorbed", 1024), ("absorbed", 1)):
            sizes = _sizes(192, 128, kv_heads=8, q_len=q_len, kv_len=1024)
            yield _dense(f"mla-{form}-{q_len}", LATENT, sizes, on, form=form)
        for q_lens in (_LENGTHS, (1, 1, 1, 1)):
            own, options = _sequence_options("paged", q_lens)
            sizes = _sizes(192, 128, **(own | {"kv_heads": 8}))
            name = f"mla-paged-{max(q_lens)}-{on[0]}"
            yield Triple(name, LATENT, sizes, on[0], on[1], options, form="absorbed")


_ALL_FP8, _CACHE = ("query", "key", "value"), ("key", "value")


def _descales(names: tuple[str, ...], *size: int) -> dict[str, torch.Tensor]:
    return {f"{name[0]}_descale": torch.ones(*size) for name in names}


def _fp8() -> Iterator[Triple]:
    """Products of FP8 operands, and caches of FP8 beside queries of 16 bits."""
    hopper, triton, head = _GPU[0], _GPU[1], (1, 1, 1, 1)
    widths = [(128, 128), (64, 64), (192, 128), (256, 256)]
    for name, (head_dim, value_dim) in [(n, widths[0]) for n in ("softcap", "alibi", "documents", "sink")] + [
        ("causal", width) for width in widths
    ]:
        options, sizes = _descales(_ALL_FP8, *head), _sizes(head_dim, value_dim)
        label = f"{name}-fp8-{head_dim}x{value_dim}"
        yield _dense(label, PLAIN[name], sizes, hopper, options=options, fp8=_ALL_FP8)
    for kind in ("lengths", "packed"):
        one = _ragged("causal-fp8", CAUSAL, kind, _LENGTHS, hopper)
        yield replace(one, options={**one.options, **_descales(_ALL_FP8, *head)}, fp8=_ALL_FP8)
    for on in (triton, ("cpu", "cpu"), hopper):
        decode = _sizes(q_len=1, kv_len=4096)
        if on is not hopper:
            yield _dense("causal-fp8-decode", CAUSAL, decode, on, options=_descales(_CACHE, *head), fp8=_CACHE)
            one = _ragged("causal-fp8-decode", CAUSAL, "paged", (1, 1, 1, 1), on)
            by_token = _descales(_CACHE, one.options["block_table"].numel(), 2, 16, 1)
            yield replace(one, options={**one.options, **by_token}, fp8=_CACHE, page=16)
        vectors = _sizes(512 + 64, q_len=1, kv_len=4096, kv_heads=1)
        options = {"rope": torch.zeros(2, 1, 4096, 64, dtype=torch.bfloat16), **_descales(("key",), *head)}
        mla = LATENT.replace(scale=0.1, name="mla_fp8")  # whose query is latent, so that its width says nothing
        yield Triple(f"mla-fp8-decode-{on[0]}", mla, vectors, *on, options, fp8=("key",))


def _cards() -> Iterator[Triple]:
    for card in ("a100", "h100", "b200", "mi300x"):
        for name in ("causal", "alibi", "softcap", "documents", "dropout"):
            yield _dense(f"{name}-card", PLAIN[name], _sizes(), ("triton", card))
    for name in ("causal", "alibi", "dropout"):
        yield _dense(f"{name}-interpreted", PLAIN[name], _sizes(64, dtype="fp32"), ("interpret", "cpu"))
