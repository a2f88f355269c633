"""What FP8 operands cost in accuracy: the error of kernels, and that of the format, as tables for docs/fp8.md.

    python benchmarks/fp8_accuracy.py                   on this machine's device; lengths up to 16k on a CPU
    python benchmarks/fp8_accuracy.py --lengths 131072  seconds on a GPU; on one core a minute or two a line
    python benchmarks/fp8_accuracy.py --products        products of FP8, emulated: sums in two levels and in one

Error of the kernel: of a call with bf16 queries over FP8 keys and values, against float64 over the same numbers. Error
of the format: of float64 over the quantised numbers, against float64 over those that they were made of. Both are
relative, as root mean squares over the output. Outliers: 1 % of the entries are ten times as large. The needle is one
key that decides the output of its query: the error is that of its value.

Products of FP8 are emulated in torch, on any device, as far as the output of `hopper` depends on them: e4m3 operands,
weights rounded to e4m3, and accumulators that keep 14 bits of a sum after each 32 of its terms. In one level all keys
are summed in the accumulator; in two it begins anew for each 128 keys, and is added to sums in float32, as Weft does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft
from weft.fp8 import Quantized

E4M3 = torch.float8_e4m3fn
ATTENTION = weft.Attention(name="all_keys")
SCALES = ("tensor", "head", 128, "token", "rotated")  # rotated: by token, after a Hadamard rotation
KINDS = ("normal", "outliers")
QUERIES, HEADS, KV_HEADS = 64, 4, 2


KEPT_BITS = 14  # of a number in an accumulator of FP8 products
TERMS, TILE = 32, 128  # columns or keys of one product; keys that are summed in an accumulator, in two levels
RAISED = 8.0  # binary places that weights lie above their largest
PRODUCT_SCALES = ("tensor", "head", 128, "rotated")  # rotated: by head here, after a Hadamard rotation


class Errors(NamedTuple):
    kernel: float
    format: float


class Summed(NamedTuple):
    """Errors of a call whose products are FP8."""

    two: float  # against float64 over the same numbers: weights are rounded, and sums are
    one: float  # the same in one level
    two_alone: float  # against the exact sum of the same rounded weights: of sums alone
    one_alone: float


def operands(length: int, dim: int, kind: str, device: torch.device) -> list[Tensor]:
    """query [1, 4, 64, D], key and value [1, 2, T, D], bf16."""
    random = torch.Generator().manual_seed(length + dim)
    found = []
    for heads, rows in ((HEADS, QUERIES), (KV_HEADS, length), (KV_HEADS, length)):
        x = torch.randn(1, heads, rows, dim, generator=random)
        if kind == "outliers":
            x = torch.where(torch.rand(x.shape, generator=random) < 0.01, 10 * x, x)
        found.append(x.bfloat16().to(device))
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def exactly(tensors: list[Tensor]) -> Tensor:
    """float64 over what is quantised."""
    return ATTENTION.reference(*(t.double() for t in tensors))


def errors(tensors: list[Tensor], scale: Any, exact: Tensor | None = None) -> Errors:
    """Of one call with these descales. exact: what `exactly` gives of the tensors, which it is asked for else."""
    query, key, value = tensors
    exact = exactly(tensors) if exact is None else exact
    if scale == "rotated":
        query, key = weft.fp8.rotate(query, key)
    per = "token" if scale == "rotated" else scale
    key8, value8 = weft.fp8.quantize(key, per=per), weft.fp8.quantize(value, per=per)
    options = {"k_descale": key8.descale, "v_descale": value8.descale}
    stored = ATTENTION.reference(query.double(), key8.data, value8.data, **options)
    found = ATTENTION(query, key8.data, value8.data, out_dtype=torch.float32, **options)
    return Errors(relative(found, stored), relative(stored, exact))


# -- products of FP8, emulated ----------------------------------------------------------------------------------------
def kept(x: Tensor) -> Tensor:
    """float32 numbers cut to the bits that an accumulator keeps."""
    dropped = 24 - KEPT_BITS
    return (x.view(torch.int32) >> dropped << dropped).view(torch.float32)


def accumulated(left: Tensor, right: Tensor, before: Tensor | None = None) -> Tensor:
    """left [H, L, n] times right [H, n, D], added up in an accumulator that holds 0, or `before`."""
    found = torch.zeros(*left.shape[:2], right.shape[2], device=left.device) if before is None else before
    for at in range(0, left.shape[2], TERMS):
        found = kept(found + left[..., at : at + TERMS] @ right[:, at : at + TERMS])
    return found


def multiplied(query8: Quantized, key8: Quantized, value8: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [Hq, L, D] in two levels, in one level, and of exact sums, of e4m3 operands [1, H, L, D].

    Descales of keys and values are those of heads, or of blocks of 128.
    """
    query, key, value = (x.data[0].float() for x in (query8, key8, value8))
    unit = weft.fp8.dequantize(Quantized(torch.ones_like(query[None, ..., :1]).to(E4M3), query8.descale))[0]
    unit = unit * query.shape[2] ** -0.5 * math.log2(math.e)  # of scores, in base 2
    k_descales, v_descales = (x.descale[0].expand(key.shape[0], -(-key.shape[1] // TILE), 1) for x in (key8, value8))
    reference = torch.full((*query.shape[:2], 1), -math.inf, device=query.device)
    sums, before = torch.zeros_like(reference), v_descales[:, :1]
    two, one, exact = torch.zeros(3, *query.shape[:2], value.shape[2], device=query.device).double()
    two, one = two.float(), one.float()
    for n in range(k_descales.shape[1]):
        keys, values = (x[:, n * TILE : (n + 1) * TILE] for x in (key, value))
        k_descale, v_descale = k_descales[:, n : n + 1], v_descales[:, n : n + 1]
        score = accumulated(query, keys.mT) * (unit * k_descale)
        moved = torch.maximum(reference, score.amax(2, keepdim=True))
        weights = torch.exp2(score - moved + RAISED).to(E4M3).float()
        factor = torch.exp2(reference - moved)
        sums = sums * factor + weights.sum(2, keepdim=True)
        factor, before, reference = factor * before / v_descale, v_descale, moved
        two = two * factor + accumulated(weights, values)
        one = accumulated(weights, values, one * factor)
        exact = exact * factor + weights.double() @ values.double()
    last = before / sums
    return two * last, one * last, exact * last


def summed(tensors: list[Tensor], scale: Any) -> Summed:
    """Of one call whose operands all are e4m3, with these descales."""
    query, key, value = tensors
    if scale == "rotated":
        query, key = weft.fp8.rotate(query, key)
    made = [weft.fp8.quantize(x, per="head" if scale == "rotated" else scale) for x in (query, key, value)]
    two, one, exact = multiplied(made[0], *(_of_every_head(x) for x in made[1:]))
    stored = ATTENTION.reference(*(weft.fp8.dequantize(x, torch.float64) for x in made))[0]
    return Summed(relative(two, stored), relative(one, stored), relative(two, exact), relative(one, exact))


def _of_every_head(x: Quantized) -> Quantized:
    """Keys or values with heads as queries have them."""
    descale = x.descale.expand(*x.data.shape[:2], -1, 1)
    return Quantized(*(t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (x.data, descale)))


def hidden(length: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of which one key among many decides the output, and its value."""
    query, key, value = operands(length, dim, "normal", device)
    at = length * 2 // 3
    key[:, :, at] = 4.0 * query[:, ::2, 0]  # of the first query of each group
    return query, key, value, value[:, :, at].double().repeat_interleave(HEADS // KV_HEADS, 1)[:, ::2]


def needle(length: int, dim: int, device: torch.device, fp8: bool) -> float:
    """How far the output is from the value of the one key among many that decides it."""
    query, key, value, wanted = hidden(length, dim, device)
    options: dict[str, Any] = {}
    if fp8:
        quantized = weft.fp8.quantize(key, per="head"), weft.fp8.quantize(value, per="head")
        (key, options["k_descale"]), (value, options["v_descale"]) = quantized
    out = ATTENTION(query[:, :, :1], key, value, **options)[:, ::2, 0]
    return relative(out, wanted)


def needle_of_products(length: int, dim: int, device: torch.device) -> tuple[float, float]:
    """The same of products of FP8, in two levels and in one."""
    *tensors, wanted = hidden(length, dim, device)
    query8, *others = (weft.fp8.quantize(x) for x in tensors)
    two, one, _ = multiplied(query8, *(_of_every_head(x) for x in others))
    return relative(two[None, ::2, 0], wanted), relative(one[None, ::2, 0], wanted)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of the operands; none: needles alone")
    parser.add_argument("--products", action="store_true", help="of FP8, emulated, in place of kernels")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problems = [(kind, dim, length) for kind in given.kinds for dim in given.dims for length in given.lengths]
    for line in of_products(problems, device) if given.products else of_kernels(problems, device):
        print(line, flush=True)
    for dim in given.dims:
        for length in given.lengths:
            if given.products:
                print("needle, D{}, {} keys: two levels {:.4f}, one {:.4f}".format(
                    dim, length, *needle_of_products(length, dim, device)), flush=True)  # fmt: skip
                continue
            both = [needle(length, dim, device, fp8) for fp8 in (False, True)]
            print(f"needle, D{dim}, {length} keys: bf16 {both[0]:.4f}, FP8 {both[1]:.4f}", flush=True)


def of_kernels(problems: list[tuple[str, int, int]], device: torch.device) -> Iterator[str]:
    """Lines of the table. problems: kind of operands, D, and keys."""
    yield f"| operands | D | keys | {' | '.join(f'{s}: kernel, format' for s in map(str, SCALES))} |"
    yield "| --- " * (3 + len(SCALES)) + "|"
    for kind, dim, length in problems:
        tensors = operands(length, dim, kind, device)
        exact = exactly(tensors)
        found = [errors(tensors, scale, exact) for scale in SCALES]
        yield f"| {kind} | {dim} | {length} | {' | '.join(f'{e.kernel:.0e}, {e.format:.3f}' for e in found)} |"


def of_products(problems: list[tuple[str, int, int]], device: torch.device) -> Iterator[str]:
    """The same of products of FP8."""
    titles = [*(f"{s}: two, one" for s in PRODUCT_SCALES), "head, sums alone: two, one"]
    yield f"| operands | D | keys | {' | '.join(titles)} |"
    yield "| --- " * (3 + len(titles)) + "|"
    for kind, dim, length in problems:
        found = {scale: summed(operands(length, dim, kind, device), scale) for scale in PRODUCT_SCALES}
        cells = [f"{e.two:.3f}, {e.one:.3f}" for e in found.values()]
        cells.append(f"{found['head'].two_alone:.1e}, {found['head'].one_alone:.1e}")
        yield f"| {kind} | {dim} | {length} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
