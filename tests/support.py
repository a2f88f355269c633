"""What the kernel tests share: the error rule, random operands, operands surrounded by NaN."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.codegen.targets.triton.kernels.measures import STRETCH
from weft.codegen.targets.triton.parts import measures

EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
TILE = 64  # rows over which errors are also compared as norms
FEW = 32  # values of a tile whose norm is not compared with that of plain torch's own errors there


def mostly(kept: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Parameters of a test: `make test` runs those kept, `make test-all` the others of `values`, too."""
    values = [*(k for k in kept if k not in values), *values]
    single = [v if isinstance(v, tuple) else (v,) for v in values]
    return [v if v in kept else pytest.param(*one, marks=pytest.mark.thorough) for v, one in zip(values, single)]


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of Python and of C functions of a repeated run: what it costs the host, on a busy machine too.

    It is the fewest of three runs, as what was freed elsewhere is at times finalized in one of them.
    """
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    found = []
    with torch.no_grad():
        function()
        function()
        for _ in range(3):
            count = 0
            sys.setprofile(profile)
            try:
                function()
            finally:
                sys.setprofile(None)
            found.append(count)
    return min(found) - 2  # itself, and the end of the profile


def lost_by_a_cache(module: Any, cache: Any, x: Tensor) -> float:
    """Relative error of a module's last token, whose cache has those before it. x: [2, L, width]."""
    expected, rows = module(x)[:, -1:], x.shape[1] - 1
    sequences = [cache.allocate(), cache.allocate()]
    with cache.extend(sequences, [rows, rows]) as step:
        module(x[:, :-1], cache=step)
    with cache.extend(sequences, [1, 1]) as step:
        last = module(x[:, -1:], cache=step)
    return float((last - expected).norm() / expected.norm())


def poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", blhd: bool = False, seed: int = 0
) -> Tensor:
    """A random [B, H, L, D] tensor inside a larger NaN-filled one; `blhd`: memory is [B, L, H, D]."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    batch, heads, length, dim = shape
    pad = 8  # keeps rows aligned to 16 bytes for every dtype
    room = (
        (batch + 2, length + 2 * pad, heads + 2, dim + 2 * pad)
        if blhd
        else (batch + 2, heads + 2, length + 2 * pad, dim + 2 * pad)
    )
    whole = torch.full(room, float("nan"), dtype=dtype, device=device)
    view = whole.transpose(1, 2) if blhd else whole
    inner = view[1:-1, 1:-1, pad:-pad, pad:-pad]
    inner.copy_(torch.randn(shape, generator=generator).to(dtype))
    return inner


def check_errors(actual: Tensor, exact: Tensor, plain: Tensor, label: str, of_few: float = 2.0) -> None:
    """Error against float64 at most twice that of plain torch in the same dtype plus rounding, per element and tile.

    of_few: the same of an element of fewer than FEW, the largest of whose errors may be small in plain torch by luck.
    """
    assert actual.shape == exact.shape, f"{label}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    # fp32 kernels recompute softmax weights from a log-sum-exp, which costs a few more roundings of the score's size
    eps = max(EPS[actual.dtype], EPS[plain.dtype], 8 * EPS[torch.float32] if actual.dtype == torch.float32 else 0.0)
    if not exact.numel():
        return
    actual, exact, plain = (x.double().to(exact.device) for x in (actual, exact, plain))
    infinite = torch.isinf(exact)
    assert torch.equal(torch.isinf(actual), infinite), f"{label}: infinities differ"
    actual, exact, plain = (torch.where(infinite, 0.0, x) for x in (actual, exact, plain))
    assert not torch.isnan(actual).any(), f"{label}: {int(torch.isnan(actual).sum())} NaN"
    error, allowed = (actual - exact).abs(), (plain - exact).abs()
    size = exact.abs().mean()
    times = of_few if exact.numel() < FEW else 2
    worst = (error - times * allowed.max() - 2 * eps * (exact.abs() + size)).max()
    assert worst <= 0, f"{label}: an element is off by {error.max():.3g}, plain torch by {allowed.max():.3g}"
    tile_error, tile_allowed, tile = (of_tiles(torch.linalg.vector_norm, x) for x in (error, allowed, exact))
    values = of_tiles(torch.count_nonzero, exact).double()
    number = torch.full_like(tile, TILE * exact.shape[-1] if exact.dim() > 1 else TILE)
    number[-1] = exact.numel() - number[:-1].sum()
    # plain torch may be lucky with a few values, whose norm then says no more than the check of each
    few = torch.where(values < FEW, allowed.max() * values.sqrt(), 0.0)
    bound = 2 * torch.maximum(tile_allowed, few) + 2 * eps * (tile + size * number.sqrt())
    at = int((tile_error - bound).argmax())
    assert tile_error[at] <= bound[at], f"{label}: a tile is off by {tile_error[at]:.3g}, allowed {bound[at]:.3g}"


def of_tiles(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Of each TILE rows, in one step for all of them but the last, which may have fewer."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(-1, 1)
    whole = (len(rows) - 1) // TILE
    tiles = rows[: whole * TILE].reshape(whole, TILE * rows.shape[1]), rows[whole * TILE :].reshape(1, -1)
    return torch.cat([function(tile, dim=1) for tile in tiles])


def check_variant(
    variant: Any, query: Tensor, key: Tensor, value: Tensor, *, target: str | None = None,
    operands: dict[str, Any] | None = None, gradients: bool = True, differentiate: tuple[str, ...] = (),
    q_offset: Any = None, label: str = "", run: Callable[..., Any] | None = None, lse: bool = True, of_few: float = 2.0,
    **options: Any,
) -> None:  # fmt: skip
    """Compare out, lse and every gradient of a call with the float64 reference and with plain torch in its dtype.

    lse: False for variants that have none. of_few: as of check_errors.
    """
    operands = operands or {}

    def compute(call: Callable[..., Any], dtype: torch.dtype, **extra: Any) -> dict[str, Tensor]:
        tensors = {"query": query, "key": key, "value": value}
        inputs = {n: t.detach().to(dtype) if t.dtype != dtype else t.detach() for n, t in tensors.items()}
        mine = {
            n: v.detach().to(dtype) if isinstance(v, Tensor) and v.is_floating_point() and dtype == torch.float64 else v
            for n, v in operands.items()
        }
        mine = {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in mine.items()}
        leaves = {**inputs, **{n: mine[n] for n in differentiate}}
        for leaf in leaves.values():
            leaf.requires_grad_(gradients)
        given = call(*inputs.values(), return_lse=lse, q_offset=q_offset, **mine, **extra)
        results = dict(zip(("out", "lse"), given if lse else [given]))
        found = {n: result.detach() for n, result in results.items()}
        if gradients:
            generator = torch.Generator().manual_seed(7)
            out = found["out"]
            douts = [torch.randn(out.shape, generator=generator).to(query.dtype).to(out.device, out.dtype)]
            if lse:
                dlse = torch.randn(found["lse"].shape, generator=generator).to(found["lse"])
                douts.append(torch.where(torch.isinf(found["lse"]), 0.0, dlse))
            pairs = torch.autograd.grad(list(results.values()), list(leaves.values()), douts)
            found |= {f"d{n}": g for n, g in zip(leaves, pairs)}
        return found

    exact = compute(variant.reference, torch.float64)
    plain = compute(variant.reference, query.dtype)
    actual = compute(run or variant, query.dtype, target=target, **options)
    for name, got in actual.items():
        check_errors(got, exact[name], plain[name], f"{label or variant.name} {name}", of_few)


def check_operands(
    variant: Any, draws: Sequence[tuple[Sequence[Tensor], dict[str, Tensor]]], *, lse: bool = False,
    given: dict[str, Any] | None = None, q_offset: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Errors of operands' gradients, over all draws: at most twice those of plain torch in the same dtype, as norms.

    A gradient of few numbers is a matter of luck in one draw. draws: query, key and value, and operands by name.
    lse: it has a gradient, too. given: of every call.
    """
    errors: dict[str, list[list[Tensor]]] = {}
    shared = {**(given or {}), "q_offset": q_offset, "return_lse": lse}
    for draw, (tensors, operands) in enumerate(draws):
        dtype = tensors[0].dtype
        ways = (
            _gradients(variant.reference, tensors, operands, torch.float64, draw, **shared),
            _gradients(variant.reference, tensors, operands, dtype, draw, **shared),
            _gradients(variant, tensors, operands, dtype, draw, **shared, **options),
        )
        for name, *each in zip(operands, *ways, strict=True):
            errors.setdefault(name, []).append([t.double() for t in each])
    for name, found in errors.items():
        exact, plain, mine = (torch.stack(way) for way in zip(*found))
        error, allowed = (x.sub(exact).norm() for x in (mine, plain))
        bound = 2 * allowed + 16 * EPS[torch.float32] * exact.norm()
        assert error <= bound, f"{variant.name} {name}: off by {error:.3g} of {exact.norm():.3g}, allowed {bound:.3g}"


def _gradients(
    call: Callable[..., Any], tensors: Sequence[Tensor], operands: dict[str, Tensor], dtype: torch.dtype, draw: int,
    return_lse: bool = False, **given: Any,
) -> list[Tensor]:  # fmt: skip
    """Those of the operands; of a call in float64 these have 64 bits, too."""
    generator = torch.Generator().manual_seed(draw)
    exact = dtype == torch.float64
    inputs = [t.detach().to(dtype).requires_grad_() for t in tensors]
    leaves = {n: (t.double() if exact else t.clone()).requires_grad_() for n, t in operands.items()}
    found = call(*inputs, **leaves, return_lse=return_lse, **given)
    results = list(found) if return_lse else [found]
    above = [torch.randn(results[0].shape, generator=generator).to(tensors[0].dtype).to(results[0])]
    if return_lse:
        dlse = torch.randn(results[1].shape, generator=generator).to(results[1])
        above.append(torch.where(results[1].isinf(), 0.0, dlse))
    return list(torch.autograd.grad(results, list(leaves.values()), above))


def long_from(monkeypatch: pytest.MonkeyPatch, positions: int, stretch: int = STRETCH) -> None:
    """Axes of more positions than these are measured in stretches of so many tiles."""
    monkeypatch.setattr(measures, "LONG_AXIS", positions)
    monkeypatch.setattr(measures, "STRETCH", stretch)


def through_python(monkeypatch: Any) -> None:
    """Calls on a CPU whose gradients torch would record itself go through Weft's own function of autograd."""
    from weft.codegen.launch.fast import own

    monkeypatch.setattr(own.OwnKernel, "of", lambda *call: own.Own(None, None))
