"""Draws calls of a variant: sizes, dtypes, layouts, values of operands, options, and which gradients are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from .calls import (
    CACHED_RANKS,
    DESCALED,
    MAIN_LAYOUTS,
    ON_A_GPU,
    OPERAND_LAYOUTS,
    PADDING,
    UNALIGNED,
    Call,
    Given,
    Latent,
    Variant,
    main_names,
)
from .sequences import Lens, Pages
from .tree import symbols

HOPPER_WIDTHS = (  # most often equal powers of two; each other kind of tile
    *[(64, 64), (128, 128)] * 5, (40, 40), (16, 32), (80, 80), (96, 96), (128, 64), (72, 104), (136, 48), (160, 128),
    (192, 128), (256, 256), (200, 64), (64, 256),
)  # fmt: skip
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 40, 50, 63, 64, 65, 96, 100, 127, 128, 129, 150, 200, 257, 300)
LONG_LENGTHS = (129, 150, 200, 257, 300, 400, 600)
LONG = 0.02  # share of the cpu's calls that are long: most have tiles where others are computed in one piece
HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (6, 3), (3, 3), (4, 4), (6, 2))
FEW_HEADS = ((1, 1), (2, 2), (2, 1), (2, 1), (3, 1))  # the interpreter takes a second for a dozen programs
USUAL_WIDTHS = (16, 32, 64, 64, 64, 128, 24, 40, 80, 96)
WIDTHS = (1, 2, 4, 5, 8, 16, 16, 16, 20, 24, 32, 40, 64, 80)
NUMBERS = {
    "int": (0, 1, 2, 3, 4, 7, 16, 17, 40, -2, 100, 1000),
    "drop": (0.0, 0.1, 0.5, 0.9),
    "float": (0.5, 0.25, 1.0, 2.0, -1.5, 0.7, 3.0, 0.0, 30.0, -0.3, 1, 2),
}
_CPU_TILES = (5, 8, 16, 17, 32, 64)
TRIES = 24  # at a call that the kernels of another serve
TARGETS = ("cpu", "reference", "interpret", "triton", "hopper")
MOST_LONG_PAIRS = 300_000
MOST_PAIRS = {"cpu": 40_000, "reference": 10_000, "interpret": 4_000, "triton": 400_000, "hopper": 400_000}
CALL_DTYPES = {
    "cpu": ("float32", "float32", "float32", "float64", "float16", "bfloat16"),
    "reference": ("float64", "float64", "float32"),
    "interpret": ("float32", "float32", "float16"),
    "triton": ("float32", "bfloat16", "bfloat16", "float16"),
    "hopper": ("bfloat16", "float16"),
}
# Of sequences; in pages, queries are padded or packed.
KINDS = (*["dense"] * 7, *["padded"] * 3, *["packed"] * 3, *["paged"] * 2, *["packed paged"] * 2)
PAGE_ROWS = (1, 2, 4, 8, 16, 16, 32, 64, 128, 256)
FEW, MOST_SHORT = 16, 64  # queries of calls whose keys may be divided, and of such sequences that are packed over pages
FEW_SHARE = 0.2  # of calls that decode: few queries behind many keys
CHUNKS = ((68, 17), (80, 30), (90, 40), (129, 20))  # rows of queries, and keys, of such sequences with a long one
FEW_LENGTHS, CACHED = (1, 1, 1, 2, 3, 5, 8, 16), (33, 64, 100, 129, 200, 257, 300, 400, 600)
DOUT = ("plain", "plain", "rows first", "padded", "one row", "one batch")
# What an operand of a name, or of a kind where its name is not here, is filled with.
NAMED_FILLS = {
    "padding": PADDING,
    "doc": ("documents",),
    "ids": ("ids", "documents"),
    "apart": ("ints", "tiny ints", "documents"),
    "warmth": ("normal", "positive", "quarters"),
    "keep": ("bits",),
    "lens": ("signed", "ints"),
    "pair": ("normal", "small", "some -inf", "some least", "quarters"),
    "sinks": ("normal", "normal", "zero", "some -inf", "some -1e9", "quarters"),
    "slopes": ("normal", "positive", "quarters", "small"),
}
KIND_FILLS = {
    "float": ("normal", "normal", "small", "quarters", "positive", "zero"),
    "int": ("tiny ints", "ints", "ints", "signed", "documents"),
    "bool": ("bits",),
}
OPERAND_DTYPES = {
    "float": ("float32", "float32", "float32", "float64", "float16", "bfloat16"),
    "int": ("int64", "int64", "int32", "int16", "int8", "uint8"),
    "bool": ("bool",),
}


FP8_SHARE = 0.15  # of calls that may have FP8 operands
FP8_OPERANDS = (*[("key", "value")] * 4, ("query", "key", "value"), ("key",), ("value",), ("query",))
# of calls whose operands all are e4m3, which hopper may multiply as they are stored
PRODUCTS = 0.4  # of calls that have FP8 operands for sure
PRODUCT_WIDTHS = ((32, 32), (64, 64), (96, 128), (128, 128), (128, 64), (192, 128), (256, 256), (40, 24))
OF_HEADS = ("head", "head", "heads", "number", "")


def with_fp8(variant: Variant, call: Call, always: bool = False) -> Call:
    """Perhaps, or always, the same with FP8 operands; drawn by its own seed, so that other draws are what they were."""
    random = Random(call.seed)
    if always and call.dtype == "float64":
        call = replace(call, dtype="float32")
    refused = call.dtype == "float64" or call.target == "hopper"
    if (refused and not always) or random.random() > (1.0 if always else FP8_SHARE):
        return call
    names = random.choice(FP8_OPERANDS)
    if variant.latent is not None:  # up-projections multiply real numbers
        names = ("query", "cache") if call.form == "latent query" and random.random() < 0.3 else ("cache",)
    if call.target == "interpret" and variant.normalizer != "softmax":  # weights would be bf16, which it lacks
        names = tuple(n for n in names if n != "query") or ("key", "value")
        call = replace(call, dtype="float32")
    granular = DESCALED if call.pages is None else [of for of in DESCALED if not of.isdigit()]
    fp8 = tuple((name, random.choice(("e4m3", "e4m3", "e5m2")), random.choice((*granular, "token"))) for name in names)
    schedule = None if call.schedule in ("streaming", "standard") else call.schedule
    # products have 16 bits where none of what is multiplied has more
    dtype = "float16" if "query" in names and len(fp8) == len(call.main) and call.dtype == "float32" else call.dtype
    columns = "value" in names and random.random() < 0.3
    found = replace(call, fp8=fp8, wanted=(), schedule=schedule, dtype=dtype, columns=columns)
    found = replace(found, dout="plain" if call.dout == "none" else call.dout)
    softmax = call.target != "interpret" or variant.normalizer == "softmax"
    if always and variant.latent is None and softmax and random.random() < PRODUCTS:
        return _as_products(random, found, granular)
    return found


def _as_products(random: Random, call: Call, granular: Sequence[str]) -> Call:
    """The same with operands that all are e4m3, of widths to 256. granular: what may have a descale."""
    of_rows = [of for of in (*granular, "token") if of not in OF_HEADS]
    others = of_rows if random.random() < 0.35 else OF_HEADS
    descaled = random.choice((*granular, "token")), random.choice(others), random.choice(others)
    fp8 = tuple((name, "e4m3", of) for name, of in zip(("query", "key", "value"), descaled))
    dim, value_dim = random.choice(PRODUCT_WIDTHS)
    dtype = "float16" if call.target == "interpret" or random.random() < 0.3 else "bfloat16"
    columns = random.random() < 0.4
    return replace(call, fp8=fp8, dim=dim, value_dim=value_dim, dtype=dtype, columns=columns)


def with_rotary_apart(variant: Variant, call: Call) -> Call:
    """Perhaps the same with the rotary columns of a latent cache as a tensor of their own; by its own seed too."""
    if variant.latent is None or not variant.latent.rope or call.wanted:
        return call
    return replace(call, apart=Random(call.seed + 1).random() < (0.6 if call.fp8 else 0.3))


def draw_call(
    random: Random, variant: Variant, target: str, like: Call | None = None, fp8: bool = False
) -> Call:  # fmt: skip
    """A call, as records; whether it is defined is seen when it is built and evaluated.

    like: a call whose kernels are to serve this one too, as generating and compiling them is most of the time.
    fp8: whether it has FP8 operands for sure.
    """
    if like is None:
        call = _draw_call(random, variant, target, random.choice(KINDS))
        return with_rotary_apart(variant, with_fp8(variant, call, fp8))
    for _ in range(TRIES):
        call = _draw_call(random, variant, target, kind_of(like))
        if target not in ON_A_GPU or _divided_as(call) == _divided_as(like):
            break
    if like.lens is not None and call.lens is not None:
        call = replace(call, lens=replace(call.lens, dtype=like.lens.dtype))
        if call.pages is not None and like.pages is not None:
            call = replace(call, pages=replace(call.pages, rows=like.pages.rows))
        other = isinstance(call.q_offset, tuple) != isinstance(like.q_offset, tuple)
        if other or (target in ON_A_GPU and (call.q_offset is None) != (like.q_offset is None)):
            offset = None if like.q_offset is None else 0 if isinstance(like.q_offset, int) else (0,) * len(call.lens.q)
            call = replace(call, q_offset=offset)
    dtypes = {name: given.dtype for name, given in like.tensors}
    tensors = tuple((name, replace(given, dtype=dtypes[name])) for name, given in call.tensors)
    offset = call.q_offset if isinstance(call.q_offset, tuple) == isinstance(like.q_offset, tuple) else None
    if isinstance(like.q_offset, tuple) and offset is None and call.lens is None:
        offset = (max(0, call.kv_len - call.q_len),) * call.batch
    dout = call.dout if like.lse or call.dout != "none" else "plain"
    main = call.main if len(call.main) == len(like.main) else like.main
    if target in ON_A_GPU:
        main = tuple(map(_as_aligned, main, like.main))
    return replace(
        call, dim=like.dim, value_dim=like.value_dim, dtype=like.dtype, tensors=tensors, schedule=like.schedule,
        train=like.train, form=like.form, lse=like.lse, wanted=like.wanted, dout=dout, q_offset=offset, main=main,
        fp8=like.fp8, columns=like.columns, apart=like.apart,
    )  # fmt: skip


def kind_of(call: Call) -> str:
    """One of KINDS."""
    if call.lens is None:
        return "dense"
    paged = call.pages is not None
    return ("packed paged" if paged else "packed") if call.lens.packed else "paged" if paged else "padded"


def has_few(call: Call) -> bool:
    """Whether keys may be divided: other kernels then compute the call."""
    if call.pages is not None and call.lens is not None and call.lens.packed:
        return call.q_len < len(call.lens.q) + MOST_SHORT
    return call.q_len <= FEW


def _divided_as(call: Call) -> tuple[bool, int]:
    """What of its sizes decides which kernels compute a call."""
    return has_few(call), call.heads // call.kv_heads if has_few(call) else 0


def _as_aligned(given: Given, like: Given) -> Given:
    """In an unaligned layout where `like` has one, and only there: other kernels compute such calls."""
    return given if (given.layout in UNALIGNED) == (like.layout in UNALIGNED) else replace(given, layout=like.layout)


def _draw_call(random: Random, variant: Variant, target: str, kind: str) -> Call:
    heads, kv_heads = random.choice(FEW_HEADS if target == "interpret" else HEADS)
    batch = random.choice((1, 1, 2) if target == "interpret" else (1, 1, 2, 3))
    packed, paged = kind in ("packed", "packed paged"), kind in ("paged", "packed paged")
    batch = 1 if packed else batch
    if target == "cpu" and random.random() < LONG:
        q_len, kv_len = _lengths(random, batch * heads, MOST_LONG_PAIRS, LONG_LENGTHS)
    else:
        decodes = variant.latent is not None and variant.latent.rank in CACHED_RANKS and random.random() < 0.5
        q_len, kv_len = _lengths(random, batch * heads, MOST_PAIRS[target], LENGTHS, decodes)
    chunked = packed and paged and target != "cpu" and random.random() < 0.4
    if chunked:  # a sequence that is long beside short ones, which are two modules by default
        q_len, kv_len = random.choice(CHUNKS)
    lens = None if kind == "dense" or 0 in (q_len, kv_len) else _lens(random, packed, batch, q_len, kv_len, chunked)
    pages = None
    if paged and lens is not None:
        pages = Pages(random.choice(PAGE_ROWS), random.randrange(1000), random.random() < 0.4, random.choice((0, 1, 3)))
        lens = replace(lens, dtype="int32" if random.random() < 0.7 else lens.dtype)
        kv_len = max(1, lens.starts("kv")[-1] if packed else max(lens.kv))
    dtype = random.choice(CALL_DTYPES[target])
    dim, value_dim = random.choice(WIDTHS), random.choice(WIDTHS)
    if target == "triton" and random.random() < 0.75:  # rows of multiples of 16 bytes, mostly
        dim, value_dim = random.choice(USUAL_WIDTHS), random.choice(USUAL_WIDTHS)
    if target == "hopper":
        dim, value_dim = random.choice(HOPPER_WIDTHS)
    form = None
    if variant.latent is not None:
        kv_heads, form, dim = 1, _form(random, variant), dim + variant.latent.rope
        form = None if form == "expanded" and pages is not None else form
        dtype = dtype if "16" not in dtype or target in ON_A_GPU else "float32"
        if form == "latent query":
            dim, value_dim = variant.latent.rank + variant.latent.rope, variant.latent.rank
    call = Call(
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        dim,
        value_dim,
        dtype,
        (),
        lens=lens,
        pages=pages,
        target=target,
        form=form,
    )
    names = main_names(variant, call)
    softmax = variant.normalizer == "softmax"
    lse = random.random() < 0.6 and softmax
    made = replace(
        call,
        main=tuple(_main(random, name, target) for name in names),
        scalars=tuple((n, random.choice(NUMBERS.get(n, NUMBERS[kind]))) for n, kind in variant.scalars.items()),
        tensors=tuple((n, _operand(random, n, kind, rank)) for n, (kind, rank) in variant.tensors.items()),
        q_offset=_offset(random, variant, batch if lens is None else len(lens.q), q_len, kv_len),
        schedule=None if chunked else _schedule(random, call, variant), lse=lse,
        wanted=() if pages is not None else _wanted(random, variant, names, form),
        dout=random.choice((*DOUT, "none" if lse else "plain")),
        seed=random.randrange(10**6), train=random.random() < 0.9,
    )  # fmt: skip
    return replace(made, schedule=_with_cache(made))


def _lengths(
    random: Random, rows: int, most: int, lengths: tuple[int, ...], decodes: bool = False
) -> tuple[int, int]:  # fmt: skip
    few = random.random() < FEW_SHARE or decodes
    while True:
        q_len = random.choice(FEW_LENGTHS if few else lengths)
        kv_len = random.choice(CACHED) if few else q_len if random.random() < 0.4 else random.choice(lengths)
        if random.random() < 0.02:
            q_len, kv_len = random.choice(((0, kv_len), (q_len, 0), (0, 0)))
        if rows * q_len * kv_len <= most:
            return q_len, kv_len


def _lens(random: Random, packed: bool, batch: int, q_rows: int, kv_rows: int, chunked: bool = False) -> Lens:
    """Lengths that fit operands; some are 0, and some as long as there is room."""

    def one(rows: int) -> int:
        return random.choice((0, rows, random.randint(0, rows), random.randint(0, rows), min(rows, 1)))

    def many(rows: int, number: int) -> tuple[int, ...]:
        if not packed:
            return tuple(one(rows) for _ in range(number))
        end = rows if random.random() < 0.6 else random.randint(0, rows)
        cuts = sorted([random.randint(0, end) for _ in range(number - 1)])
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, end]))

    number = random.choice((2, 3) if chunked else (1, 2, 3, 5, 9)) if packed else batch
    q = many(q_rows, number)
    kv = q if q_rows == kv_rows and random.random() < 0.5 else many(kv_rows, number)
    roll = random.random()
    if roll < 0.15 and not chunked:  # sequences that are alike may be computed together
        q, kv = ((rows // number if packed else one(rows),) * number for rows in (q_rows, kv_rows))
    elif (roll < 0.3 or chunked) and packed and q_rows > number:  # a chunk of a prompt beside sequences that decode
        q = tuple(random.sample([q_rows - number + 1, *[1] * (number - 1)], number))
    elif roll < 0.3 and not packed:  # all of the operand's, which need not be said
        q, kv = ((q_rows,) * number, kv) if random.random() < 0.5 else (q, (kv_rows,) * number)
    return Lens(packed, q, kv, random.choice(("int32", "int64")), random.random() < 0.5)


def _form(random: Random, variant: Variant) -> str | None:
    assert variant.latent is not None
    decodes = variant.latent.rank in CACHED_RANKS
    forms = ("absorbed",) if decodes else ("expanded", "expanded", "absorbed", None)
    return random.choice((*forms, "latent query") if variant.scale is not None else forms)


def _main(random: Random, name: str, target: str) -> Given:
    layouts = ("plain", "offset") if name in ("uk", "uv") else MAIN_LAYOUTS
    layout = "plain" if random.random() < 0.35 else random.choice(layouts)
    return Given(random.choice(("normal", "normal", "normal", "quarters")), "", layout, random.randrange(1000))


def _operand(random: Random, name: str, kind: str, rank: int) -> Given:
    fill = random.choice(NAMED_FILLS.get(name, KIND_FILLS[kind]))
    dtypes = OPERAND_DTYPES[kind]
    if fill == "ids":
        dtypes = ("int64",)
    elif fill == "signed":
        dtypes = dtypes[:-1]
    elif "least" in fill:
        dtypes = ("float32", "float16", "bfloat16")
    layouts = tuple(n for n in OPERAND_LAYOUTS if kind != "bool" or n != "offset")
    layout = "plain" if random.random() < 0.5 or rank == 0 else random.choice(layouts)
    return Given(fill, random.choice(dtypes), layout, random.randrange(1000), random.choice((0, 0, 1, 3)))


def _offset(random: Random, variant: Variant, batch: int, q_len: int, kv_len: int) -> int | tuple[int, ...] | None:
    """Where operands are indexed by q_pos, offsets on the device must keep positions among those of the keys."""
    roll = random.random()
    if roll < 0.55:
        return None
    indexed = any("q_pos" in symbols(i) for read in variant.reads for i in read.index)
    inside = max(0, kv_len - q_len)
    if roll < 0.75 or (indexed and kv_len < q_len):
        return random.choice((0, 0, 3, inside, kv_len, -5, 40))
    choices = (0, inside, inside // 2) if indexed else (0, inside, 3, kv_len, -4, 100)
    return tuple(random.choice(choices) for _ in range(batch))


def _schedule(random: Random, call: Call, variant: Variant) -> str | None:
    target = call.target
    if random.random() < 0.3:
        return None
    if target == "cpu":
        forward, backward = (f"{random.choice(_CPU_TILES)}x{random.choice(_CPU_TILES)}" for _ in range(2))
        return f"flash/flash_forward=cpu:{forward}/flash_backward=cpu:{backward}"
    if target in ("hopper", "reference"):
        return None
    divides = variant.dropout is None and kind_of(call) != "packed"
    if divides and random.random() < (0.5 if has_few(call) else 0.1):
        return "split_kv"
    if random.random() < 0.45 and call.lens is None and variant.normalizer == "softmax" and variant.dropout is None:
        return random.choice(("streaming", "standard"))
    if target == "triton":
        return random.choice((None, "flash"))
    names = ("flash_forward", "flash_dquery", "flash_dkey_dvalue")
    tiles = [f"{name}={target}:{random.choice((16, 32, 64))}x{random.choice((16, 32, 64))}w4s1" for name in names]
    return "/".join(["flash", *tiles])


def _with_cache(call: Call) -> str | None:
    """The schedule, in half of the calls with a cache of a few KiB: heads are computed one by one, as in long calls.

    It follows from the seed of the call, so that it takes no draw from others.
    """
    if call.target != "cpu" or call.schedule is None:
        return call.schedule
    kib = Random(call.seed).choice(("", "", "", "c1", "c4", "c16"))
    return "/".join(part if part == "flash" else part + kib for part in call.schedule.split("/"))


def _wanted(random: Random, variant: Variant, names: tuple[str, ...], form: str | None) -> tuple[str, ...]:
    """Names of tensors whose gradients are asked for."""
    if random.random() < 0.15 or (form in ("absorbed", "latent query") and random.random() < 0.9):
        return ()
    main = names if random.random() < 0.7 else tuple(n for n in names if random.random() < 0.5)
    floats = [n for n, (kind, _) in variant.tensors.items() if kind == "float"]
    return (*main, *(n for n in floats if random.random() < 0.8))


__all__ = ["TARGETS", "Latent", "draw_call"]
