"""Makes a call of Weft and says what is wrong with what came, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import weft

from .calls import DTYPES, LAYOUTS, Built, Call, Variant
from .dense import Undefined
from .expected import Want, expected
from .tree import INTS, Read, nodes, symbols, text


@dataclass(frozen=True)
class Refusal:
    """What may be refused: the words of the refusal, and what must be so of the call for it to be right."""

    words: re.Pattern[str]
    right: Callable[[Built, re.Match[str]], bool]


def _anything(built: Built, words: re.Match[str]) -> bool:
    """Ranges are bounds: what may be refused by them need not happen for the numbers of this call."""
    return True


def _reads_pairs(built: Built) -> bool:
    """Whether a wanted gradient is that of a read whose index has both positions."""
    wanted = [r for r in built.variant.reads if r.name in built.call.wanted]
    return any({"q_pos", "kv_pos"} <= set().union(*map(symbols, r.index)) for r in wanted)


def _has_no_flash(built: Built, words: re.Match[str]) -> bool:
    return built.call.schedule in ("streaming", "standard") and _reads_pairs(built)


def _lists_packed(built: Built, words: re.Match[str]) -> bool:
    call = built.call
    packed = call.lens is not None and call.lens.packed and call.target not in ("cpu", "reference")
    return packed and call.deterministic is not False and _reads_pairs(built)


def _may_be_absorbed(built: Built, words: re.Match[str]) -> bool:
    return built.variant.latent is not None and built.call.form != "expanded" and bool(built.call.wanted)


def _for_hopper(right: Callable[[Built], bool]) -> Callable[[Built, re.Match[str]], bool]:
    """Of a call that names hopper, which then may not be computed by another target."""
    return lambda built, words: built.call.target == "hopper" and right(built)


def _named(built: Built, name: str) -> Tensor:
    """The tensor that a refusal names: the key of a latent cache is the cache."""
    return built.tensors[name if name in built.tensors else "cache"]


def _is_unaligned(built: Built, words: re.Match[str]) -> bool:
    """An address, or a step to another row, head or batch row that there is, is no multiple of 16 bytes."""
    tensor = _named(built, words["name"])
    steps = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()) if size > 1]
    in_bytes = [tensor.data_ptr(), *(tensor.element_size() * step for step in steps)]
    return built.call.target == "hopper" and any(n % 16 for n in in_bytes)


def _is_apart(built: Built, words: re.Match[str]) -> bool:
    """Padded operands whose batch rows do not lie a whole number of rows of a head apart."""
    tensor = _named(built, words["name"])
    batch, _, row, _ = tensor.stride()
    whole = row > 0 and row * tensor.element_size() % 16 == 0 and batch % row == 0
    return built.call.target == "hopper" and built.call.lens is not None and not whole


def _reads_by_pair(built: Built) -> bool:
    """A tensor that the mask reads at both positions."""
    reads = [n for n in nodes(built.variant.mask) if isinstance(n, Read)]
    return any({"q_pos", "kv_pos"} <= symbols(read) for read in reads)


def _reads_of_packed_pages(built: Built) -> bool:
    """A tensor that the mask reads by position, of packed queries over pages."""
    call, reads = built.call, [n for n in nodes(built.variant.mask) if isinstance(n, Read)]
    packed = call.pages is not None and call.lens is not None and call.lens.packed
    return packed and any({"q_pos", "kv_pos"} & symbols(read) for read in reads)


def _refusal(words: str, right: Callable[[Built, re.Match[str]], bool]) -> Refusal:
    return Refusal(re.compile(words), right)


REFUSALS = {
    "index": _refusal(r"index \d+, `.*`, (ranges from|is read from)", _anything),
    "overflow": _refusal(r"integer overflow", _anything),
    "divisor": _refusal(r"the divisor `.*` can be 0", _anything),
    "gradient of pairs": _refusal(r"has no gradient of `.*`, whose index has q_pos and kv_pos; use", _has_no_flash),
    "packed gradient": _refusal(
        r"in packed sequences the gradient of `.*`, whose entries several pairs read", _lists_packed
    ),
    "absorbed gradient": _refusal(r"the absorbed form has no backward", _may_be_absorbed),
    "hopper: latent": _refusal(
        r"UnavailableError: .*hopper: (.*(absorbed|expanded) latent attention|(a )?rotary key|(.* )?latent caches?)",
        _for_hopper(lambda built: built.variant.latent is not None),
    ),
    "hopper: normalizer": _refusal(
        r"UnavailableError: .*hopper: (.* of (sigmoid|relu) are computed by|.*has the normalizer softmax only)",
        _for_hopper(lambda built: built.variant.normalizer != "softmax"),
    ),
    "hopper: cache": _refusal(
        r"UnavailableError: .*hopper: (?P<name>key): its address .* and blocks or batch rows must lie",
        lambda built, words: _is_unaligned(built, words) or _is_apart(built, words),
    ),
    "hopper: alignment": _refusal(
        r"UnavailableError: .*hopper: (?P<name>query|key|value): its address and strides must be multiples of 16 bytes",
        _is_unaligned,
    ),
    "hopper: batch rows": _refusal(
        r"UnavailableError: .*hopper: (?P<name>query|key|value): with lengths, (batch rows|blocks) must lie", _is_apart
    ),
    "hopper: small pages": _refusal(
        r"UnavailableError: .*hopper: pages of \d+ rows are too small",
        _for_hopper(lambda built: built.call.pages is not None and built.call.pages.rows < 8),
    ),
    "hopper: packed over pages": _refusal(
        r"UnavailableError: .*hopper: masks that read tensors, of packed queries over pages",
        _for_hopper(_reads_of_packed_pages),
    ),
    "hopper: widths": _refusal(
        r"UnavailableError: .*hopper: needs D and Dv to be multiples of 8 from 16 to 256, got D (\d+), Dv (\d+)",
        lambda built, words: any(int(n) % 8 or not 16 <= int(n) <= 256 for n in words.groups()),
    ),
    "hopper: lists": _refusal(
        r"UnavailableError: .*hopper: (?:lists of tiles, of )?a mask that reads a tensor by both positions",
        _for_hopper(_reads_by_pair),
    ),
}


@dataclass(frozen=True)
class Verdict:
    """What became of one call."""

    kind: str  # "right", "wrong", "raised", "refused: <why>"
    message: str = ""
    place: tuple[str, tuple[int, ...], float, float] | None = None  # result, element, expected, got
    ratio: float = 0.0  # largest error, in units of what is allowed

    @property
    def fails(self) -> bool:
        return self.kind in ("wrong", "raised")

    @property
    def ends_the_process(self) -> bool:
        """Whether the device computes nothing more for this process."""
        return "CUDA error" in self.message


@lru_cache(maxsize=64)
def declared(variant: Variant) -> weft.Attention:
    """The variant in Weft: its text, read as Python by a user would be."""
    space: dict[str, Any] = {"weft": weft, **{n: getattr(weft, n) for n in (*INTS, "score")}}
    exec(declaration(variant), space)
    return space["variant"]


def declaration(variant: Variant) -> str:
    """Lines of Python that declare operands and the variant."""
    lines = [f'{n} = weft.scalar("{n}", {kind})' for n, kind in variant.scalars.items()]
    lines += [f'{n}_ = weft.tensor("{n}", {rank}, {kind})' for n, (kind, rank) in sorted(variant.tensors.items())]
    parts = [f"score={text(variant.score)}", f"mask={text(variant.mask)}"]
    if variant.scale is not None:
        parts.append(f"scale={text(variant.scale)}")
    if variant.sink is not None:
        parts.append(f"sink={text(variant.sink)}")
    if variant.normalizer != "softmax":
        parts.append(f'normalizer="{variant.normalizer}"')
    if variant.dropout is not None:
        parts.append(f"dropout={text(variant.dropout)}")
    if variant.latent is not None:
        parts.append(f"latent=weft.Latent({variant.latent.rank}, {variant.latent.rope})")
    names = sorted(variant.tensors, key=len, reverse=True)
    whole = ", ".join(parts)
    for name in names:  # declared objects have other names than the tensors that are passed
        whole = re.sub(rf"\b{name}\[", f"{name}_[", whole)
    return "\n".join([*lines, f'variant = weft.Attention({whole}, name="fuzz")'])


def gradients_of(call: Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients that a backward starts from; 0 for an output that has none."""
    generator = torch.Generator().manual_seed(call.seed)
    dout = torch.randn(out.shape, generator=generator).to(out.device, DTYPES[call.dtype])
    space = {"torch": torch, "x": dout, "nan": float("nan")}
    exec(LAYOUTS[call.dout].format(x="x", poison="nan"), space)
    dout = torch.zeros_like(dout) if call.dout == "none" else space["x"]  # type: ignore[assignment]
    if not call.lse:
        return dout, None
    dlse = torch.randn(lse.shape, generator=generator).to(lse.device, lse.dtype)
    return dout, dlse.masked_fill_(lse.isinf(), 0.0)


def options_of(built: Built) -> dict[str, Any]:
    call = built.call
    options: dict[str, Any] = dict(call.scalars)
    if call.named_target is not None:
        options["target"] = call.named_target
    if call.schedule is not None:
        options["schedule"] = call.schedule
    if call.deterministic is not None and call.target != "reference":
        options["deterministic"] = call.deterministic
    if call.form in ("expanded", "absorbed") and call.target != "reference":
        options["form"] = call.form
    if call.q_offset is not None:
        device = built.tensors["query"].device
        given = call.q_offset
        options["q_offset"] = given if isinstance(given, int) else torch.tensor(given, dtype=torch.int32, device=device)
    if built.variant.dropout is not None:
        for name, text_of in call.dropping(built.tensors["query"].device.type).items():
            options[name] = eval(text_of, {"torch": torch})
    options |= {n: t for n, t in built.stored.items() if n not in built.names}
    if call.out_dtype is not None:
        options["out_dtype"] = DTYPES[call.out_dtype]
    for name, text_of in call.lengths(built.tensors["query"].device.type).items():
        options[name] = eval(text_of, {"torch": torch})
    return options


def actual(built: Built, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """What Weft gives: out, lse where asked for, and the gradients that are wanted."""
    call = built.call
    tensors = {n: t.detach().requires_grad_(n in call.wanted) for n, t in built.tensors.items()}
    main = [built.stored.get(n, tensors[n]) for n in built.names]
    keywords = {
        n: tensors[n] for n in tensors if n not in built.names[:2] + (("value",) if "value" in built.names else ())
    }
    positional = main[:3] if "value" in built.names else main[:2]
    attention = declared(built.variant)
    run = attention.reference if call.target == "reference" else attention
    given = run(*positional, **keywords, **options_of(built), return_lse=call.lse)
    out, lse = given if call.lse else (given, None)
    results = {"out": out.detach()} | ({"lse": lse.detach()} if lse is not None else {})
    if call.wanted:
        results |= _gradients(call, tensors, [(out, dout), (lse, dlse)])
    if out.is_cuda:
        torch.cuda.synchronize()  # what a kernel did wrong shows here
    return results


def _gradients(
    call: Call, tensors: Mapping[str, Tensor], outputs: Sequence[tuple[Tensor | None, Tensor | None]]
) -> dict[str, Tensor]:
    """Gradients of the outputs that have one; 0 for what an output does not depend on."""
    first = 1 if call.dout == "none" else 0
    # of operands alone there may be none: nothing depends on an operand that is multiplied by 0, nor lse on uv
    certain = call.target != "reference" and not {"query", "key", "value", "cache", "uk"}.isdisjoint(call.wanted)
    kept = [(o, w) for o, w in outputs[first:] if o is not None and (o.requires_grad or certain)]
    leaves = [tensors[n] for n in call.wanted]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if kept:
        found = torch.autograd.grad([o for o, _ in kept], leaves, [w for _, w in kept], allow_unused=True)
    return {f"d{n}": torch.zeros_like(t) if g is None else g for n, t, g in zip(call.wanted, leaves, found)}


def start(built: Built) -> tuple[Tensor, Tensor | None]:
    """Gradients for a call, before anything of it is computed: which rows are empty is known from the definition."""
    call = built.call
    shape = (call.batch, call.heads, call.q_len)
    width = call.value_dim if "value" in built.names or "uv" in built.names else built.variant.latent.rank  # type: ignore
    device = built.tensors["query"].device
    lse_dtype = torch.float64 if call.dtype == "float64" else torch.float32
    lse = torch.zeros(shape, dtype=lse_dtype, device=device)
    return gradients_of(call, torch.zeros((*shape, width), device=device), lse)


def judge(built: Built, given: Mapping[str, Tensor] | Exception | None = None) -> Verdict:
    """Make the call, and compare all that it gives. given: the results or the error, where it was made elsewhere.

    Raises Undefined where the language leaves open what the call must give.
    """
    dout, dlse = start(built)
    want = expected(built, dout, dlse)
    try:
        got = actual(built, dout, dlse) if given is None else given
    except Exception as error:
        got = error
    return refusal(built, got) if isinstance(got, Exception) else compare(built, got, want)


def refusal(built: Built, error: Exception) -> Verdict:
    """What an error means: a refusal in words that are known, of a call that may be refused so, or a failure."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, weft.WeftError):
        for why, known in REFUSALS.items():
            found = known.words.search(message)
            if found is not None and known.right(built, found):
                return Verdict(f"refused: {why}", message)
    return Verdict("raised", message)


def compare(built: Built, got: Mapping[str, Tensor], want: Mapping[str, Want]) -> Verdict:
    worst = 0.0
    for name, wanted in want.items():
        result = got[name]
        problem = _kind_problem(name, built, result, wanted)
        if problem:
            return Verdict("wrong", f"{name}: {problem}")
        result = result.detach().to(torch.float64)
        infinite = wanted.exact.isinf()
        error = torch.where(infinite & (result == wanted.exact), 0.0, (result - wanted.exact).abs())
        error = torch.where(error.isnan(), torch.inf, error)
        allowed = torch.where(infinite, 0.0, wanted.allowed)
        if not error.numel():
            continue
        ratio = torch.where(error > 0, error / allowed.clamp(min=1e-300), 0.0)
        worst = max(worst, float(ratio.max()))
        if worst > 1:
            at = tuple(int(x) for x in torch.unravel_index(ratio.argmax(), ratio.shape))
            expect, found = float(wanted.exact[at]), float(result[at])
            message = (
                f"{name}{list(at)}: expected {expect:.6g}, got {found:.6g}, allowed error {float(allowed[at]):.2g}"
            )
            wrong = int((ratio > 1).sum())
            return Verdict("wrong", f"{message}; {wrong} of {ratio.numel()} elements", (name, at, expect, found), worst)
    return Verdict("right", ratio=worst)


def _kind_problem(name: str, built: Built, result: Tensor, wanted: Want) -> str | None:
    if tuple(result.shape) != tuple(wanted.exact.shape):
        return f"expected shape {tuple(wanted.exact.shape)}, got {tuple(result.shape)}"
    call = built.call
    dtype = torch.float64 if call.dtype == "float64" else torch.float32
    if name != "lse":
        dtype = DTYPES[call.dtype] if name == "out" else built.tensors[name[1:]].dtype
    return None if result.dtype == dtype else f"expected {dtype}, got {result.dtype}"


__all__ = ["Undefined", "Verdict", "actual", "compare", "declaration", "declared", "judge", "start"]
