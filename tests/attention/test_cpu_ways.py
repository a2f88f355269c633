"""Every way that target `cpu` computes a call, times every input that once gave a wrong number in one of them.

A generated module tries ways in turn: torch's own attention as it is or with a mask, all scores in one piece, tiles.
WAYS lists them, and a module that has another one fails `test_every_way_is_in_the_list`: so a new way meets the old
inputs. CASES lists the inputs; a defect that is mended gets a line there.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.codegen import at_once, products
from weft.ir.errors import WeftError
from weft.runtime.run.variant import variant_of

from ..support import through_python

X, WINDOW = weft.scalar("x", float), weft.scalar("window", int)
SEEN, BIAS, SLOPES = weft.tensor("seen", 2, bool), weft.tensor("bias", 3), weft.tensor("slopes", 1)
PADS = weft.tensor("pads", 2)
HEADS, KV_HEADS, DIM = 4, 2, 16

AWAY = q_pos - kv_pos
VARIANTS = {
    "full": weft.Attention(scale=X, name="ways_full"),
    "causal": weft.Attention(mask=masks.causal, scale=X, name="ways_causal"),
    "window": weft.Attention(mask=masks.causal & (q_pos - kv_pos < WINDOW), scale=X, name="ways_window"),
    "seen": weft.Attention(mask=SEEN[q_pos, kv_pos], scale=X, name="ways_seen"),
    "bias": weft.Attention(score + BIAS[head, q_pos, kv_pos], SEEN[q_pos, kv_pos], scale=X, name="ways_bias"),
    "alibi": weft.Attention(score - weft.abs(SLOPES[head] * AWAY), masks.causal, scale=X, name="ways_alibi"),
    "pads": weft.Attention(score + PADS[batch, kv_pos], scale=X, name="ways_pads"),  # each sequence has its own
    "softcap": weft.Attention(20.0 * weft.tanh(score / 20.0), masks.causal, scale=X, name="ways_softcap"),
}  # fmt: skip


# -- the ways ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Way:
    """How calls are made to take a way in one direction, and which variants have it."""

    function: str  # of the generated module
    variants: tuple[str, ...]
    form: str = "256x256"
    own: bool = False  # by torch's own attention
    constants: dict[str, Any] = field(default_factory=dict)  # of the module
    at_once: bool = False  # weights are kept, and every call is short enough

    def force(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """Leave the other ways out."""
        if self.at_once:
            keep_weights(monkeypatch)
        if hasattr(module, "BY_TORCH"):
            ways = [way for way in module.BY_TORCH if self.own and way.__name__ == self.function]
            monkeypatch.setattr(module, "BY_TORCH", tuple(ways))
        for name, value in self.constants.items():
            monkeypatch.setattr(module, name, value, raising=False)


def keep_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every call that has such a way; products of bf16 are those of a processor that has them."""
    monkeypatch.setattr(at_once, "MOST_OF_A_HEAD", 1 << 14)
    monkeypatch.setattr(at_once, "MOST_A_COLUMN", 1 << 10)
    monkeypatch.setattr(at_once, "_has_products", lambda dtype: dtype == torch.bfloat16)


EVERY = tuple(VARIANTS)
SHORT = ("causal", "window", "seen", "bias", "alibi", "pads")  # of a softmax of q.k, a mask and what is added
_TILES_FORWARD: dict[str, Any] = {"MOST_IN_ONE_PIECE": -1}
_TILES_BACKWARD: dict[str, Any] = {"fits_one_piece": lambda scores: False}
FORWARD = {
    "torch's own": Way("attended_as_a_whole", ("full", "causal", "window"), own=True),
    "torch's own, with a mask": Way("attended_with_a_mask", SHORT, own=True),
    "at once": Way("attended_at_once", SHORT, at_once=True),
    "one piece": Way("forward_in_one_piece", ("full", "causal", "window", "alibi", "pads", "softcap")),
    "a tile": Way("forward_in_tiles", EVERY, constants=_TILES_FORWARD),
    "tiles": Way("forward_in_tiles", EVERY, "16x16", constants=_TILES_FORWARD),
    "tiles, oneDNN": Way("forward_in_tiles", EVERY, "16x16+onednn", constants=_TILES_FORWARD),
}
BACKWARD = {
    "torch's own": Way("gradients_as_a_whole", ("full", "causal", "window"), own=True),
    "torch's own, with a mask": Way("gradients_with_a_mask", SHORT, own=True),
    "of weights that were kept": Way("gradients_of_weights", SHORT, at_once=True),
    "one piece": Way("backward_in_one_piece", EVERY),
    "a tile": Way("backward_in_tiles", EVERY, constants=_TILES_BACKWARD),
    "tiles": Way("backward_in_tiles", EVERY, "16x16", constants=_TILES_BACKWARD),
    "tiles, oneDNN": Way("backward_in_tiles", EVERY, "16x16+onednn", constants=_TILES_BACKWARD),
}
DISPATCH = {"forward", "forward_run", "backward", "backward_run", "attended_by_torch", "gradients_by_torch"}
# what these call besides ways: nothing that computes attention
HELPERS = {
    "forward_without_keys",
    "backward_without_keys",
    "compute_type",
    "in_compute_type",
    "new_tables",
    "fits_one_piece",
    "where_seen",  # clears rows of dout
}


KEPT = {"attended_at_once", "gradients_of_weights"}  # ways that a launcher asks for by name


def needed(way: Way) -> None:
    if way.own and not products.takes_masks():
        pytest.skip("torch's own attention is not there")
    if "onednn" in way.form and products.one_dnn_linear() is None:
        pytest.skip("this torch has no oneDNN product to call")


# -- the inputs --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One call. edit: what is done to query, key, value and operands before."""

    scale: float = 0.25
    q_len: int = 40
    kv_len: int = 40
    edit: Callable[..., None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True  # whether they are compared, beside the output
    or_nan: bool = False  # where a result is NaN, that will do
    only: tuple[str, ...] = EVERY


def _scaled_query(by: float) -> Callable[..., None]:
    return lambda query, key, value, operands: query.mul_(by)


def _hide(*rows: int) -> Callable[..., None]:
    def edit(query: Tensor, key: Tensor, value: Tensor, operands: dict[str, Any]) -> None:
        operands["seen"][list(rows) if rows else slice(None)] = False

    return edit


def _hidden_key(of: float) -> Callable[..., None]:
    def edit(query: Tensor, key: Tensor, value: Tensor, operands: dict[str, Any]) -> None:
        operands["seen"][:, 3] = False
        key[:, :, 3] = of

    return edit


def _query_row(of: float, n: int = -1) -> Callable[..., None]:
    def edit(query: Tensor, key: Tensor, value: Tensor, operands: dict[str, Any]) -> None:
        query[0, 1, n, 5] = of
        key[..., 5] = 1.0

    return edit


def _hiding_bias(of: float) -> Callable[..., None]:
    def edit(query: Tensor, key: Tensor, value: Tensor, operands: dict[str, Any]) -> None:
        operands["seen"][:, 0] = True  # in 32 bits nothing is left of a score beside -1e9
        operands["bias"][:, 1::3, 2:] = of

    return edit


_BY_POSITION = ("full", "causal", "window", "alibi", "softcap")  # they read nothing by a negative position
_MASKED = ("seen", "bias")
LENGTHS, NONE = torch.tensor([40, 13], dtype=torch.int32), torch.tensor([0, 40], dtype=torch.int32)
CASES = {
    "scale 0": Case(0.0),
    "scale -0": Case(-0.0),
    "a scale that float32 takes for 0": Case(math.exp(-150.0)),
    "a denormal scale": Case(1e-40),
    "the least normal scale": Case(float(torch.finfo(torch.float32).tiny)),
    "a negative scale": Case(-1.5),
    "a negative scale near 0": Case(-1e-40),
    "a scale of inf": Case(math.inf, gradients=False, or_nan=True),
    "a scale of -inf": Case(-math.inf, gradients=False, or_nan=True),
    "a pair": Case(q_len=1, kv_len=1),
    "a pair, scale 0": Case(0.0, q_len=1, kv_len=1),
    "a query": Case(q_len=1, kv_len=9),
    "a key": Case(q_len=9, kv_len=1, only=_BY_POSITION),
    "queries before the first key": Case(q_len=30, kv_len=12, only=_BY_POSITION),
    "fewer queries": Case(q_len=7, kv_len=33),
    "from the first position on": Case(q_len=12, kv_len=30, options={"q_offset": 0}),
    "behind all keys": Case(q_len=12, kv_len=30, options={"q_offset": 50}),
    "lengths": Case(options={"kv_lens": LENGTHS, "q_offset": 0}),
    "a length of 0": Case(options={"kv_lens": NONE, "q_offset": 0}),
    "scale 0, lengths": Case(0.0, options={"kv_lens": LENGTHS, "q_offset": 0}),
    "huge scores": Case(edit=_scaled_query(1e4), gradients=False),
    "scores of 1e30": Case(edit=_scaled_query(1e30), gradients=False, only=("full", "causal", "window", "seen")),
    "a query of NaN": Case(edit=_query_row(math.nan), gradients=False),
    "a query of inf": Case(edit=_query_row(math.inf), gradients=False, or_nan=True),
    "a query of -inf": Case(edit=_query_row(-math.inf), gradients=False),
    "all rows hidden": Case(edit=_hide(), only=_MASKED),
    "some rows hidden": Case(edit=_hide(0, 7, 39), only=_MASKED),
    "scale 0, some rows hidden": Case(0.0, edit=_hide(0, 7, 39), only=_MASKED),
    "one row, hidden": Case(q_len=1, kv_len=5, edit=_hide(), only=_MASKED),
    "NaN in a hidden key": Case(edit=_hidden_key(math.nan), only=_MASKED),
    "inf in a hidden key": Case(edit=_hidden_key(math.inf), only=_MASKED),
    "a bias of -1e9": Case(edit=_hiding_bias(-1e9), only=("bias",)),
    "a bias of -inf": Case(edit=_hiding_bias(-math.inf), only=("bias",)),
    "a bias of 2000": Case(edit=_hiding_bias(2000.0), only=("bias",)),
    "one window": Case(q_len=1, kv_len=40, options={"window": 7}, only=("window",)),
}  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def drawn(variant: weft.Attention, case: Case, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(case.q_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = [normal(2, heads, n, DIM) for heads, n in ((HEADS, case.q_len), *[(KV_HEADS, case.kv_len)] * 2)]
    longest = max(case.q_len, case.kv_len) + 51  # positions that a query may have
    known = {
        "x": case.scale, "window": 11, "bias": normal(HEADS, longest, longest), "slopes": normal(HEADS).abs(),
        "seen": torch.rand(longest, longest, generator=generator) < 0.7, "pads": normal(2, longest),
    }  # fmt: skip
    operands = {p.name: known[p.name] for p in variant.canonical.parameters} | case.options
    if case.edit is not None:
        case.edit(*tensors, operands)
    return tensors, operands


def found(call: Callable[..., Any], tensors: list[Tensor], operands: dict[str, Any], **options: Any) -> list[Tensor]:
    """out, lse, and the gradients of query, key and value."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    out, lse = call(*tensors, return_lse=True, **operands, **options)
    assert not options or out._base is None, "autograd lets nobody write to a view of a function's own"
    dout = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view(out.shape)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]


_defined: dict[tuple[str, str, torch.dtype], tuple[list[Tensor], dict[str, Any], list[Tensor]]] = {}


def defined(name: str, what: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """An input of a variant, and what is exact of it: the same for all ways."""
    if (name, what, dtype) not in _defined:
        tensors, operands = drawn(VARIANTS[name], CASES[what], dtype)
        _defined[name, what, dtype] = tensors, operands, exact_of(VARIANTS[name], tensors, operands)
    return _defined[name, what, dtype]


def exact_of(variant: weft.Attention, tensors: list[Tensor], operands: dict[str, Any]) -> list[Tensor]:
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in operands.items()}
    return found(variant.reference, [t.double() for t in tensors], wide)


def assert_right(what: str, results: list[Tensor], exact: list[Tensor], dtype: torch.dtype, case: Case) -> None:
    error = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    names = ["out", "lse", "dquery", "dkey", "dvalue"]
    for name, got, wanted in list(zip(names, results, exact, strict=True))[: 5 if case.gradients else 2]:
        got = torch.where(got.isnan(), wanted, got.double()) if case.or_nan else got.double()
        largest = float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).amax())  # of those that are finite
        bounds: dict[str, Any] = {"rtol": error, "atol": error * max(1.0, largest), "equal_nan": True}
        if got.shape != wanted.shape or not torch.allclose(got, wanted, **bounds):
            torch.testing.assert_close(
                got, wanted, **bounds, msg=lambda text, name=name: f"{what}: {name}: {text}"
            )  # which says where, and takes as long as the call


# -- tests -------------------------------------------------------------------------------------------------------------
def pairs(ways: dict[str, Way]) -> list[Any]:
    return [pytest.param(w, v, id=f"{name}-{v}") for name, w in ways.items() for v in w.variants]


def take(
    way: Way, variant: weft.Attention, direction: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str], Callable[[], None]]:
    """The schedule, the functions that were called since, and what makes all modules of the variant take the way."""
    taken: list[str] = []
    done: set[int] = set()

    def force() -> None:
        ready = variant_of(variant)
        for known in (ready._forwards if direction == "forward" else ready._backwards).values():
            module = known.launcher.module  # type: ignore[attr-defined]
            if id(module) in done:
                continue
            done.add(id(module))
            for name in {w.function for w in (*FORWARD.values(), *BACKWARD.values())}:
                if hasattr(module, name):
                    _record(module, name, taken, monkeypatch)
            way.force(module, monkeypatch)

    return f"flash/flash_{direction}=cpu:{way.form}", taken, force


def _record(module: ModuleType, name: str, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(module, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if result is not None or not name.startswith(("attended", "gradients")):
            taken.append(name)
        return result

    recorded.__name__ = name
    monkeypatch.setattr(module, name, recorded)
    if hasattr(module, "BY_TORCH"):
        ways = tuple(recorded if way is function else way for way in module.BY_TORCH)
        monkeypatch.setattr(module, "BY_TORCH", ways)


@pytest.fixture(autouse=True)
def calls_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways of short calls too, which other tests leave to tiles."""
    monkeypatch.setattr(at_once, "MOST_OF_A_HEAD", 0)  # `force` says when
    monkeypatch.setattr(products, "SHORT_HEAD", 1 << 24)
    monkeypatch.setattr(products, "SHORT_HEAD_BACKWARD", 1 << 23)
    monkeypatch.setattr(products, "MOST_OF_A_HEAD", 1 << 16)
    monkeypatch.setattr(products, "multiplies", lambda dtype: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("way", "name"), pairs(FORWARD))
def test_forwards(way: Way, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(way, name, dtype, "forward", monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("way", "name"), pairs(BACKWARD))
def test_backwards(way: Way, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(way, name, dtype, "backward", monkeypatch)


def _check(way: Way, name: str, dtype: torch.dtype, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input three times: prepared, by what was prepared, and as a call that is known."""
    needed(way)
    variant, times = VARIANTS[name], 0
    schedule, taken, force = take(way, variant, direction, monkeypatch)
    for what, case in CASES.items():
        if name not in case.only:
            continue
        tensors, operands, exact = defined(name, what, dtype)
        for _ in range(3):
            results = found(variant, tensors, operands, target="cpu", schedule=schedule)
            assert_right(f"{name}, {what}", results, exact, dtype, case)
            force()
        times += way.function in taken
        taken.clear()
    assert times > 2, f"{way.function} was taken by {times} inputs"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", ("full", *SHORT))
def test_what_torch_records(name: str, learns: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input again, of who wants no log-sum-exp: gradients of operands too, where these are learned."""
    monkeypatch.setattr(at_once, "MOST_RECORDED", 1 << 16)
    variant, times = VARIANTS[name], 0
    learned = [n for n in ("bias", "slopes", "pads") if learns and n in {p.name for p in variant.canonical.parameters}]
    if learns and not learned:
        pytest.skip("nothing of it is learned")
    for what, case in CASES.items():
        if name not in case.only:
            continue
        tensors, operands = drawn(variant, case, dtype)
        wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in operands.items()}
        exact, _ = without_lse(variant.reference, [t.double() for t in tensors], wide, learned)
        for _ in range(4):
            results, is_torchs = without_lse(variant, tensors, operands, learned, target="cpu")
            names = ["out", "dquery", "dkey", "dvalue", *learned]
            pairs = list(zip(names, results, exact, strict=True))[: None if case.gradients else 1]
            for part, got, wanted in pairs:
                got = torch.where(got.isnan(), wanted, got.double()) if case.or_nan else got.double()
                largest = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 0.0
                error = 1e-9 if dtype == torch.float64 else 2e-4
                torch.testing.assert_close(
                    got, wanted, rtol=error, atol=error * max(1.0, float(largest)), equal_nan=True,
                    msg=lambda text, what=what, part=part: f"{name}, {what}: {part}: {text}",
                )  # fmt: skip
            times += is_torchs
    assert times > 8, f"torch recorded {times} calls"


def without_lse(
    call: Callable[..., Any], tensors: list[Tensor], operands: dict[str, Any], learned: list[str], **options: Any
) -> tuple[list[Tensor], bool]:
    """out and the gradients, and whether the graph has no function of Python."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    own = {n: operands[n].detach().requires_grad_() for n in learned}
    out = call(*tensors, **{**operands, **own}, **options)
    dout = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view(out.shape)
    found = torch.autograd.grad(out, [*tensors, *own.values()], dout.to(out.dtype))
    return [out.detach(), *found], "Recorded" not in out.grad_fn.name()


def test_a_mask_that_is_kept_is_made_anew_of_other_numbers() -> None:
    """Whoever wrote them: torch, `.data`, or numpy. A view of an operand sees them anyway."""
    tensors = [torch.randn(1, heads, 40, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    seen, bias = torch.rand(40, 40) < 0.7, torch.randn(HEADS, 40, 40)
    operands = {"seen": seen, "slopes": torch.rand(HEADS), "bias": bias, "pads": torch.randn(1, 40)}
    seen[:, 0] = True

    def check() -> None:
        for name in ("seen", "alibi", "bias", "pads"):
            own = {p.name: {"x": 0.25, **operands}[p.name] for p in VARIANTS[name].canonical.parameters}
            wanted = VARIANTS[name].reference(*tensors, **own)
            for _ in range(3):
                torch.testing.assert_close(VARIANTS[name](*tensors, **own, target="cpu"), wanted, rtol=1e-4, atol=1e-4)

    check()
    with torch.inference_mode():
        check()
    seen.numpy()[3, 1:] = False
    operands["slopes"].data.mul_(2.0)
    bias.numpy()[1] = 0.0
    operands["pads"][0, 3] = -math.inf
    check()
    operands["slopes"].set_(torch.rand(HEADS))
    bias.data = torch.randn(HEADS, 40, 40)
    check()


@pytest.mark.parametrize("times", [1, 4])
def test_gradients_of_an_operand_whose_places_are_one_number(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place has its own gradient, as torch has it of an expanded leaf; views of other strides too."""
    monkeypatch.setattr(at_once, "MOST_RECORDED", 1 << 16)
    tensors = [torch.randn(1, heads, 40, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    given = {"seen": torch.ones(40, 40, dtype=torch.bool), "x": 0.25}
    for bias in (torch.randn(1, 40, 40).expand(HEADS, -1, -1), torch.randn(HEADS, 40, 40).mT):
        for _ in range(times):
            wide, own = bias.double().requires_grad_(), bias.detach().requires_grad_()
            exact = VARIANTS["bias"].reference(*(t.double() for t in tensors), bias=wide, **given).square().sum()
            found = VARIANTS["bias"](*tensors, bias=own, target="cpu", **given).square().sum()
            pair = [torch.autograd.grad(x, leaf)[0] for x, leaf in ((found, own), (exact, wide))]
            torch.testing.assert_close(pair[0].double(), pair[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ("full", *SHORT))
def test_layers_are_computed_again_as_they_were(name: str) -> None:
    """By torch.utils.checkpoint, which counts what is kept: the first call is recorded as the ones that are known."""
    tensors, operands = drawn(VARIANTS[name], CASES["scale 0"], torch.float32)
    operands["x"] = 0.25
    variant = VARIANTS[name].replace(name=f"again_{name}")
    tensors = [t.requires_grad_() for t in tensors]

    def layer(x: Tensor) -> Tensor:
        return variant(x, *tensors[1:], target="cpu", **operands)

    out = tensors[0]
    for _ in range(4):
        out = checkpoint(layer, out, use_reentrant=False)
    plain = layer(layer(layer(layer(tensors[0]))))
    for got, wanted in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (out, plain)), strict=True):
        assert torch.equal(got, wanted)


def modules() -> Iterator[ModuleType]:
    """Modules of all variants, both directions, dense calls and lengths."""
    for variant in VARIANTS.values():
        for what in ("fewer queries", "lengths"):
            tensors, operands = drawn(variant, CASES[what], torch.float32)
            found(variant, tensors, operands, target="cpu")
        ready = variant_of(variant)
        for known in (*ready._forwards.values(), *ready._backwards.values()):
            yield known.launcher.module  # type: ignore[attr-defined]


def test_every_way_is_in_the_list() -> None:
    """What a module's dispatch calls is a way of the lists above, or known to compute nothing."""
    listed = {w.function for w in (*FORWARD.values(), *BACKWARD.values())}
    seen = set()
    for module in modules():
        ways = {way.__name__ for way in getattr(module, "BY_TORCH", ())}
        ways |= {name for name in KEPT if hasattr(module, name)}
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and node.name in DISPATCH:
                calls = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
                ways |= {call for call in calls if inspect.isfunction(getattr(module, call, None))}
        assert not (new := ways - listed - DISPATCH - HELPERS), f"{module.__name__}: {new} are in neither list"
        seen |= ways & listed
    assert seen == listed, f"no module has {listed - seen}"


def test_a_plan_says_which_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_weights(monkeypatch)
    sizes, longer = (weft.shape(heads=2, q_len=n, head_dim=16, dtype="fp32") for n in (64, 512))
    words = "the backward of this call takes the weights that its forward kept"
    assert words in " ".join(VARIANTS["seen"].explain(sizes, x=0.25, device="cpu", schedule="flash").split())
    assert words in " ".join(VARIANTS["alibi"].explain(sizes, x=0.25, device="cpu").split())
    assert words not in " ".join(VARIANTS["seen"].explain(longer, x=0.25, device="cpu").split())
    assert words not in " ".join(VARIANTS["softcap"].explain(sizes, x=0.25, device="cpu").split())
    if products.takes_masks():
        plan = VARIANTS["seen"].plan(sizes, x=0.25, device="cpu")
        assert all(kernel.computed_whole and kernel.bound == "torch" for kernel in plan.kernels)


def test_a_plan_says_what_torch_records() -> None:
    """As calls do: not where a schedule is asked for, and only where their output alone is wanted."""
    words = "torch itself records this call where its output alone is wanted"
    seen = torch.ones(800, 800, dtype=torch.bool)
    for length, dtype in ((64, "fp32"), (800, "fp32"), (64, "bf16")):
        for schedule in (None, "flash"):
            sizes = weft.shape(heads=HEADS, kv_heads=KV_HEADS, q_len=length, head_dim=DIM, dtype=dtype)
            given = {"x": 0.25, "seen": seen[:length, :length], "schedule": schedule}
            says = words in " ".join(VARIANTS["seen"].explain(sizes, device="cpu", **given).split())
            type_of = torch.float32 if dtype == "fp32" else torch.bfloat16
            tensors = [torch.randn(1, n, length, DIM, dtype=type_of) for n in (HEADS, KV_HEADS, KV_HEADS)]
            for times in range(3):
                _, is_torchs = without_lse(VARIANTS["seen"], tensors, given, [], target="cpu")
                assert is_torchs == says, f"{length}, {dtype}, {schedule}, call {times}"


@pytest.mark.parametrize("name", ("full", *SHORT))
def test_second_derivatives_of_what_torch_records_are_refused(name: str) -> None:
    """In our words, whether a call is the first or is known; first derivatives with a graph are what they are."""
    tensors, operands = drawn(VARIANTS[name], CASES["scale 0"], torch.float32)
    operands["x"] = 0.25
    leaves = [t.requires_grad_() for t in tensors]
    for _ in range(3):
        out = VARIANTS[name](*leaves, target="cpu", **operands)
        plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, first, strict=True))
        with pytest.raises(WeftError, match=f"second derivatives are not available; use ways_{name}.reference"):
            torch.autograd.grad(first[0].sum(), leaves)


def test_layers_of_two_layouts_are_computed_again_as_they_were() -> None:
    """Those whose layouts differ in the number of keys are known together, and recorded as the first ones."""
    variant, seen = VARIANTS["seen"].replace(name="again_two"), torch.ones(48, 48, dtype=torch.bool)
    query = torch.randn(2, HEADS, 40, DIM, requires_grad=True)
    keys = {n: [torch.randn(2, KV_HEADS, n, DIM, requires_grad=True) for _ in range(2)] for n in (40, 48)}

    def layer(x: Tensor, length: int) -> Tensor:
        return variant(x, *keys[length], x=0.25, seen=seen, q_offset=0, target="cpu")

    out = query
    for turn in range(12):
        out = checkpoint(layer, out, (40, 48)[turn % 2], use_reentrant=False)
        assert "Recorded" not in layer(query, 40).grad_fn.name()
    assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()


def test_weights_are_kept_where_a_backward_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short calls alone, and let go with the graph."""
    keep_weights(monkeypatch)
    through_python(monkeypatch)
    variant, saved = VARIANTS["seen"], list[torch.Size]()

    def look(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    for length, kept in ((40, True), (200, False)):
        tensors = [torch.randn(2, 4, length, DIM).requires_grad_() for _ in range(3)]
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            variant(*tensors, x=0.25, seen=torch.rand(length, length) < 0.7, target="cpu")
        assert ((8, length, length) in saved) == kept


# -- calls that are computed piece by piece ----------------------------------------------------------------------------
VALID, TABLE = weft.tensor("valid", 2, bool), weft.tensor("table", 2)
BY_ROW = weft.tensor("by_row", 3)
PIECES = {
    "padded": weft.Attention(mask=VALID[batch, kv_pos], name="pieces_padded"),
    "padded, by head": weft.Attention(
        score + TABLE[head, weft.minimum(weft.abs(q_pos - kv_pos), 9)], VALID[batch, kv_pos] & masks.causal,
        name="pieces_table"),
    "a bias by batch row": weft.Attention(score + BY_ROW[batch, q_pos, kv_pos], name="pieces_by_row"),
    "a temperature and a column": weft.Attention(
        score * TABLE[head, 0] + TABLE[head, weft.minimum(kv_pos, 9)], name="pieces_temperature"),
    "softcap of a bias": weft.Attention(
        20.0 * weft.tanh((score + TABLE[head, weft.minimum(kv_pos, 9)]) / 20.0), VALID[batch, kv_pos],
        name="pieces_softcap"),
    "a table by distance and a row": weft.Attention(
        score + TABLE[head, weft.minimum(weft.abs(q_pos - kv_pos), 9)] * TABLE[head, weft.minimum(q_pos, 9)],
        name="pieces_two"),
}  # fmt: skip


@pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])
@pytest.mark.parametrize("learns", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("most", [1, 3 * 24 * 30, 1 << 20])
@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str, most: int, learns: bool, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, and scores of short backwards, of few batch rows or heads at once; operands have gradients, or none.

    kept: weights are those of the forward, where no gradient of the log-sum-exp arrives.
    """
    variant = PIECES[name]
    monkeypatch.setattr(products, "MOST_OF_A_MASK", most)
    monkeypatch.setattr(at_once, "MOST_IN_A_PIECE", most)
    if kept:
        keep_weights(monkeypatch)
    known: dict[str, Any] = {
        "valid": torch.arange(30) < torch.tensor([30, 7, 0, 29, 1])[:, None],
        "table": 0.5 + torch.rand(HEADS, 10),
        "by_row": torch.randn(5, 30, 30),
    }
    operands = {p.name: known[p.name] for p in variant.canonical.parameters}
    tensors = [torch.randn(5, heads, n, DIM) for heads, n in ((HEADS, 24), (KV_HEADS, 30), (KV_HEADS, 30))]
    dout, dlse = torch.randn(5, HEADS, 24, DIM), torch.randn(5, HEADS, 24)

    def all_of(call: Callable[..., Any], dtype: torch.dtype, **options: Any) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        given = {n: x.to(dtype).requires_grad_(learns) if x.is_floating_point() else x for n, x in operands.items()}
        out, lse = call(*leaves, return_lse=True, **given, **options)
        wanted = leaves + [x for x in given.values() if x.requires_grad]
        blind = lse == -math.inf
        loss = (out * dout).sum() + (lse.masked_fill(blind, 0.0) * dlse).sum() * (learns and not kept)
        return [out, lse, *torch.autograd.grad(loss, wanted)]

    exact = all_of(variant.reference, torch.float64)
    for _ in range(2):
        for got, wanted in zip(all_of(variant, torch.float32, target="cpu"), exact, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
        for ready in variant_of(variant)._backwards.values():
            monkeypatch.setattr(ready.launcher.module, "MOST_AT_ONCE", most, raising=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("normalizer", ["softmax", "sigmoid", "relu"])
@pytest.mark.parametrize("rows", [2, 40])
def test_scores_that_lie_in_memory_as_an_operand_does(rows: int, normalizer: str) -> None:
    """They read no product, and the operand's first dimension is contiguous."""
    variant = weft.Attention(PADS[head, kv_pos], masks.causal, name=f"ways_{normalizer}", normalizer=normalizer)
    query, key, value = (torch.randn(2, heads, rows, 4) for heads in (2, 1, 1))
    pads = torch.randn(rows, 2).T
    expected = variant.reference(query, key, value, pads=pads)
    torch.testing.assert_close(variant(query, key, value, pads=pads, target="cpu"), expected, rtol=1e-4, atol=1e-5)
