"""What FP8 operands cost in accuracy: the error of kernels, and that of the format, as a table for docs/fp8.md.

    python benchmarks/fp8_accuracy.py                   on this machine's device; lengths up to 16k on a CPU
    python benchmarks/fp8_accuracy.py --lengths 131072  seconds on a GPU; on one core a minute or two a line

Error of the kernel: of a call with bf16 queries over FP8 keys and values, against float64 over the same numbers. Error
of the format: of float64 over the quantised numbers, against float64 over those that they were made of. Both are
relative, as root mean squares over the output. Outliers: 1 % of the entries are ten times as large. The needle is one
key that decides the output of its query: the error is that of its value.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft

ATTENTION = weft.Attention(name="all_keys")
SCALES = ("tensor", "head", 128, "token", "rotated")  # rotated: by token, after a Hadamard rotation
KINDS = ("normal", "outliers")
QUERIES, HEADS, KV_HEADS = 64, 4, 2


class Errors(NamedTuple):
    kernel: float
    format: float


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


def needle(length: int, dim: int, device: torch.device, fp8: bool) -> float:
    """How far the output is from the value of the one key among many that decides it."""
    query, key, value = operands(length, dim, "normal", device)
    at = length * 2 // 3
    key[:, :, at] = 4.0 * query[:, ::2, 0]  # of the first query of each group
    wanted = value[:, :, at].double().repeat_interleave(HEADS // KV_HEADS, 1)[:, ::2]
    options: dict[str, Any] = {}
    if fp8:
        quantized = weft.fp8.quantize(key, per="head"), weft.fp8.quantize(value, per="head")
        (key, options["k_descale"]), (value, options["v_descale"]) = quantized
    out = ATTENTION(query[:, :, :1], key, value, **options)[:, ::2, 0]
    return relative(out, wanted)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of the operands; none: needles alone")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"| operands | D | keys | {' | '.join(f'{s}: kernel, format' for s in map(str, SCALES))} |")
    print("| --- " * (3 + len(SCALES)) + "|")
    for kind in given.kinds:
        for dim in given.dims:
            for length in given.lengths:
                tensors = operands(length, dim, kind, device)
                exact = exactly(tensors)
                found = [errors(tensors, scale, exact) for scale in SCALES]
                cells = " | ".join(f"{e.kernel:.0e}, {e.format:.3f}" for e in found)
                print(f"| {kind} | {dim} | {length} | {cells} |", flush=True)
    for dim in given.dims:
        for length in given.lengths:
            both = [needle(length, dim, device, fp8) for fp8 in (False, True)]
            print(f"needle, D{dim}, {length} keys: bf16 {both[0]:.4f}, FP8 {both[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
