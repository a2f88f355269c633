"""Calls that repeat launch what they would launch if nothing were known of them, and see everything that changes.

Launches of the GPU targets on CPU tensors, which are written down: each call once with guards of its tensors, by which
a call like the last one is found, and once without.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import batch, head, kv_pos, masks, q_pos, score

pytest.importorskip("triton")
from weft.codegen import launching
from weft.codegen.binding import Launch
from weft.codegen.targets.hopper_launcher import Box
from weft.codegen.targets.triton_launcher import TritonLauncher
from weft.runtime import torch_private
from weft.runtime.call import Call, Dense, Lengths, Packed, Paged
from weft.runtime.repeated import MOST_PATIENCE, WORTH, Repeats

from ..support import calls_of
from .without_gpu import go_without_a_gpu

pytestmark = pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")

FAR = 1 << 32  # addresses lie beyond


class _Launches:
    def __init__(self) -> None:
        self.found: list[tuple[object, ...]] = []
        self.addresses: dict[int, str] = {}  # of operands

    def written(self, name: str, programs: int, arguments: Any) -> None:
        self.found.append((name, programs, *map(self._named, arguments)))

    def _named(self, value: Any) -> object:
        if isinstance(value, Tensor):
            value = value.data_ptr()
        if isinstance(value, tuple):
            return tuple(map(self._named, value))
        return self.addresses.get(value, "made") if isinstance(value, int) and value > FAR else value


class _Run:
    """A kernel of which nothing is launched."""

    def __init__(self, binding: Any, values: Any, launches: _Launches) -> None:
        self.name, self.launches = binding.name, launches
        self.described = {n: {} for n, value in enumerate(values) if isinstance(value, Box)}

    def __call__(self, programs: int, arguments: Any, stream: int) -> None:
        boxes = [(v.base.data_ptr(), tuple(v.shape), tuple(v.strides)) if isinstance(v, Box) else v for v in arguments]
        self.launches.written(self.name, programs, boxes)

    @property
    def shortest(self) -> Launch:
        def launch(programs: int, _y: int, _z: int, stream: int, fixed: object, *arguments: Any) -> None:
            self.launches.written(self.name, programs, arguments)

        return Launch(launch, (None,), self.described)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    found = _Launches()
    go_without_a_gpu(monkeypatch, lambda binding, values: _Run(binding, values, found))
    monkeypatch.setattr(launching, "encoder", lambda meta: lambda address, places: ((address, *map(tuple, places)),))
    monkeypatch.setattr(launching, "is_heard", lambda: False)
    return found


slopes, window, bias = weft.tensor("slopes", 1), weft.scalar("window", int), weft.tensor("bias", 4)
CAUSAL = weft.Attention(mask=masks.causal, name="repeated")
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="repeated_alibi")
WINDOW = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="repeated_window")
BIAS = weft.Attention(score + bias[batch, head, q_pos, kv_pos], name="repeated_bias")


def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size).to(dtype)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(rows: int = 64, kv_rows: int = 64) -> list[Tensor]:
    return [normal(2, heads, n, 64) for heads, n in ((4, rows), (2, kv_rows), (2, kv_rows))]


def packed(rows: int = 64) -> list[Tensor]:
    return [normal(1, heads, rows, 64) for heads in (4, 2, 2)]


def pools(blocks: int = 16, rows: int = 1) -> list[Tensor]:
    return [normal(2, 4, rows, 64), normal(blocks, 2, 16, 64), normal(blocks, 2, 16, 64)]


LENS, TABLE = ints(3, 50), torch.arange(8, dtype=torch.int32).view(2, 4)
CALLS: dict[str, tuple[weft.Attention, list[Tensor], dict[str, Any]]] = {
    "dense": (CAUSAL, dense(), {}),
    "one token": (CAUSAL, dense(1), {}),
    "an offset a row": (CAUSAL, dense(), {"q_offset": ints(0, 3)}),
    "lengths": (CAUSAL, dense(), {"kv_lens": LENS}),
    "both lengths": (CAUSAL, dense(), {"kv_lens": LENS, "q_lens": LENS}),
    "one token, lengths": (CAUSAL, dense(1), {"kv_lens": LENS}),
    "packed": (CAUSAL, packed(), {"cu_seqlens_q": ints(0, 3, 64)}),
    "pages": (CAUSAL, pools(), {"kv_lens": LENS, "block_table": TABLE}),
    "an operand": (ALIBI, dense(), {"slopes": torch.rand(4)}),
    "a scalar": (WINDOW, dense(), {"window": 20}),
    "a scalar, one token": (WINDOW, dense(1), {"window": 20}),
    "boxes of an operand": (BIAS, dense(), {"bias": normal(2, 4, 64, 64)}),
}


class _Calls:
    """One variant, called with guards and without, and what both launched and gave."""

    def __init__(self, launches: _Launches, variant: weft.Attention, target: str) -> None:
        self.launches, self.target = launches, target
        self._with, self._without = (variant.replace(name=f"{variant.name}_{n}") for n in ("known", "never"))
        for own in (self._with, self._without):
            own._variant.forget()

    def __call__(self, tensors: list[Tensor], backward: bool, **given: Any) -> bool:
        """Whether it was found to be like the last one, both ways alike."""
        hits = self.hits
        found = [self._one(own, tensors, backward, given) for own in (self._with, self._without)]
        assert found[0] == found[1]
        assert found[0][0] or found[0][1] or 0 in tensors[1].shape
        return self.hits > hits

    @property
    def hits(self) -> int:
        known = self._with._variant
        return known.repeats.hits + sum(kind.repeats.hits for kind in known.recorded.values())

    def _one(
        self, own: weft.Attention, tensors: list[Tensor], backward: bool, given: dict[str, Any]
    ) -> tuple[Any, str]:
        self.launches.found = []
        operands = [t for t in (*tensors, *given.values()) if isinstance(t, Tensor)]
        self.launches.addresses = {t.data_ptr(): f"operand {n}" for n, t in enumerate(operands)}
        try:
            with _guards(own is self._with):
                out = own(*tensors, **{"target": self.target, **given})
                if backward:
                    found = out if isinstance(out, tuple) else (out,)
                    wanted = [t for t in tensors if t.requires_grad]
                    torch.autograd.grad(found, wanted, [torch.ones_like(t) for t in found])
        except weft.WeftError as error:
            return self.launches.found, str(error).replace(str(own.name), "it")
        return self.launches.found, ""


@contextmanager
def _guards(are_used: bool) -> Iterator[None]:
    """What is bound while they are not used knows of none."""
    init = TritonLauncher.__init__

    def here(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.guard = torch_private.guard if are_used else None

    TritonLauncher.__init__ = here  # type: ignore[method-assign]
    try:
        yield
    finally:
        TritonLauncher.__init__ = init  # type: ignore[method-assign]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", CALLS)
def test_what_repeats_launches_the_same(name: str, target: str, backward: bool, launches: _Launches) -> None:
    variant, tensors, given = CALLS[name]
    if (backward and "pages" in name) or (target == "hopper" and "token" in name + "pages"):
        pytest.skip("no such way")
    calls = _Calls(launches, variant, target)
    tensors = leaves(tensors) if backward else tensors
    found = [calls(tensors, backward, **given) for _ in range(5)]
    assert found[-2:] == [True, True], found
    for _ in range(3):  # at other addresses
        others = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        clones = {id(t): t.clone() for t in given.values() if isinstance(t, Tensor)}  # one where one is given twice
        moved = {n: clones.get(id(t), t) for n, t in given.items()}
        assert calls(others, backward, **moved)


def beside(tensor: Tensor, by: int = 1) -> Tensor:
    """The same numbers, some elements behind a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return memory[by:].view(tensor.shape).copy_(tensor)


def heads_last(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def first(change: Any) -> Any:
    return lambda tensors: [change(tensors[0]), *tensors[1:]]


def every(change: Any) -> Any:
    return lambda tensors: [change(t) for t in tensors]


# of query, key and value
CHANGES = {
    "rows": first(lambda t: t[:, :, :33]),
    "all rows": every(lambda t: t[:, :, :33]),
    "heads": first(lambda t: t[:, :2]),
    "strides": first(heads_last),
    "all strides": every(heads_last),
    "an address between": first(beside),
    "all addresses between": every(beside),
    "dtype": every(lambda t: t.to(torch.float16)),
    "one dtype": first(lambda t: t.to(torch.float16)),
    "width": every(lambda t: t[..., :32].contiguous()),
    "negated": first(torch._neg_view),
    "key and value are one": lambda tensors: [tensors[0], tensors[1], tensors[1]],  # of one memory, as leaves
    "other memory": every(torch.clone),
    "nothing": every(lambda t: t),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize(("name", "target"), [("dense", "triton"), ("lengths", "hopper")])
@pytest.mark.parametrize("change", CHANGES)
def test_operands_that_change_are_seen(
    change: str, name: str, target: str, backward: bool, launches: _Launches
) -> None:  # fmt: skip
    variant, tensors, given = CALLS[name]
    calls = _Calls(launches, variant, target)
    changed = CHANGES[change]([t.clone() for t in tensors])
    if backward:
        tensors, changed = leaves(tensors), leaves(changed)
    for _ in range(4):
        calls(tensors, backward, **given)
    is_like = change in ("other memory", "nothing") or (backward and change == "key and value are one")
    assert calls(changed, backward, **given) == is_like
    for _ in range(3):
        calls(changed, backward, **given)
    calls(tensors, backward, **given)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"q_offset": 3}, {"q_offset": ints(3, 3)}, {"kv_lens": LENS}, {"deterministic": True}, {"schedule": "flash"},
        {"target": "triton"}, {"return_lse": True},
    ],
    "lengths": [
        {"q_lens": LENS}, {"kv_lens": ints(2, 70)}, {"kv_lens": LENS.long()}, {"kv_lens": LENS[:1]}, {"kv_lens": None},
        {"q_offset": 3}, {"q_offset": ints(0, 1)}, {"kv_lens": ints(3, 0, 50, 0)[::2]},
    ],
    "pages": [
        {"block_table": TABLE[:, :2]}, {"block_table": TABLE.t().contiguous().t()}, {"block_table": TABLE.long()},
        {"q_lens": ints(1, 1)}, {"q_offset": 2}, {"kv_lens": ints(2, 70)},
    ],
    "an operand": [{"slopes": torch.rand(5)}, {"slopes": torch.rand(8)[::2]}, {"slopes": torch.rand(4).double()}],
    "a scalar": [{"window": 21}, {"window": 2**40}, {"window": 3.0}, {"window": torch.tensor(4)}],
    "a scalar, one token": [{"window": 21}, {"window": 1}],
    "boxes of an operand": [
        {"bias": beside(normal(2, 4, 64, 64))}, {"bias": normal(1, 4, 64, 64).expand(2, 4, 64, 64)},
        {"bias": normal(2, 4, 64, 64, dtype=torch.float32)}, {"bias": normal(2, 4, 64, 64).mT},
    ],
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_change_are_seen(name: str, target: str, backward: bool, launches: _Launches) -> None:
    variant, tensors, given = CALLS[name]
    if (backward and name == "pages") or (target == "hopper" and "token" in name):
        pytest.skip("no such way")
    tensors = leaves(tensors) if backward else tensors
    for change in OPTIONS[name]:
        calls = _Calls(launches, variant, target)
        for _ in range(4):
            calls(tensors, backward, **given)
        for _ in range(4):
            calls(tensors, backward, **{**given, **change})
        calls(tensors, backward, **given)


def test_a_scalar_may_be_annealed(launches: _Launches) -> None:
    variant, tensors, _ = CALLS["a scalar"]
    calls = _Calls(launches, variant, "hopper")
    assert [calls(tensors, False, window=n) for n in range(20, 28)][2:] == [True] * 6


def test_what_a_gradient_is_wanted_of_is_seen(launches: _Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls = _Calls(launches, variant, "triton")
    for wanted in ((0, 1, 2), (0,), (1, 2), (0, 1, 2)):
        some = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
        assert [calls(some, True, **given) for _ in range(20)][-1]
    with torch.no_grad():
        assert calls(some, False, **given)
    assert not calls([t.detach() for t in tensors], False, **given)


def test_what_hooks_bring_back_is_seen(launches: _Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls, tensors = _Calls(launches, variant, "hopper"), leaves(tensors)
    for _ in range(4):
        calls(tensors, True, **given)
    for back in (torch.clone, heads_last_of_four, beside, torch._neg_view):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
            for _ in range(3):
                calls(tensors, True, **given)
    calls(tensors, True, **given)


def heads_last_of_four(tensor: Tensor) -> Tensor:
    return heads_last(tensor) if tensor.dim() == 4 else tensor


def test_settings_count_for_calls_that_repeat(launches: _Launches) -> None:
    variant, tensors, given = CALLS["pages"]
    calls = _Calls(launches, variant, "triton")
    for _ in range(4):
        calls(tensors, False, **given)
    wrong = {**given, "kv_lens": ints(3, 5000)}
    with weft.settings(check=True):
        hits = calls.hits
        calls(tensors, False, **wrong)
        assert not launches.found and calls.hits == hits
        assert "kv_lens" in calls._one(calls._with, tensors, False, wrong)[1]


def test_nothing_is_known_once_all_is_forgotten(launches: _Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls = _Calls(launches, variant, "triton")
    for _ in range(4):
        calls(tensors, False, **given)
    calls._with._variant.forget()
    assert not calls(tensors, False, **given)


def test_what_a_call_under_way_learns_is_forgotten_too(launches: _Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls = _Calls(launches, variant, "triton")
    own, written = calls._with, launches.written
    own(*tensors, target="triton", **given)

    def written_meanwhile(*launch: Any) -> None:
        written(*launch)
        own._variant.forget()

    launches.written = written_meanwhile  # type: ignore[method-assign]
    own(*tensors, target="triton", **given)
    assert own._variant.repeats.known is None


def test_guards_are_tried_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Weft must not start CUDA, whatever the default device is."""
    devices, empty = [], torch.empty

    def seen(*size: Any, **given: Any) -> Tensor:
        devices.append(given.get("device"))
        return empty(*size, **given)

    monkeypatch.setattr(torch, "empty", seen)
    assert torch_private._has_guards()
    assert set(devices) == {"cpu"}


class _Watching(Tensor):
    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Watching.seen += func is torch.ops.weft.attention.default
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", ["dense", "an operand", "one token, lengths"])
def test_subclasses_of_tensors_see_every_call(name: str, launches: _Launches) -> None:
    """In inference mode the op below finds them under the same guards as the call above."""
    variant, tensors, given = CALLS[name]
    variant._variant.forget()
    of_operand = name == "an operand"
    with torch.inference_mode():
        query = tensors[0] if of_operand else tensors[0].clone().as_subclass(_Watching)
        more = {"slopes": given["slopes"].clone().as_subclass(_Watching)} if of_operand else given
        for n in range(4):
            before = _Watching.seen
            out = variant(query, *tensors[1:], target="triton", **more)
            assert type(out) is _Watching and _Watching.seen == before + 1, n
    for _ in range(4):
        variant(*tensors, target="triton", **given)
    assert variant._variant.repeats.hits  # plain ones still repeat


def test_no_tensor_is_kept(launches: _Launches) -> None:
    import gc
    import weakref

    variant, tensors, _ = CALLS["an operand"]
    calls = _Calls(launches, variant, "hopper")
    own, slopes = leaves(tensors), torch.rand(4)
    for _ in range(4):
        calls(own, True, slopes=slopes)
    references = [weakref.ref(t) for t in (*own, slopes)]
    del own, slopes
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_layout_that_never_returns_is_looked_at_ever_less() -> None:
    repeats, looks = Repeats(), 0
    found: Any = type("Again", (), {"fits": None, "launch": None})
    for _ in range(4 * MOST_PATIENCE):
        if repeats.wants():
            looks += 1
            repeats.learn(found, False, False)
    assert looks < 16
    repeats.known, repeats.hits = found, WORTH  # one that served
    assert repeats.wants()


@pytest.mark.parametrize("name", CALLS)
def test_every_field_of_a_call_is_asked_for(name: str, launches: _Launches) -> None:
    """A new one decides what is launched, or says here why not."""
    variant, tensors, given = CALLS[name]
    calls = _Calls(launches, variant, "triton")
    for _ in range(3):
        calls(tensors, False, **given)
    known = calls._with._variant.repeats.known
    assert known is not None
    lines = linecache.getlines(known.fits.__code__.co_filename)
    asked = lines[known.fits.__code__.co_firstlineno]
    options = {"cu_seqlens_q": Packed, "block_table": Paged, "kv_lens": Lengths}
    sequences = next((kind for option, kind in options.items() if option in given), Dense)
    found = {f"call.{field.name}" for field in fields(Call)} - ({"call.operands"} if not variant.parameters else set())
    found |= {f"call.sequences.{field.name}" for field in fields(sequences)} - {"call.sequences.page"}  # key's rows
    assert not [field for field in found if field not in asked], asked


# -- keys that grow ----------------------------------------------------------------------------------------------------
CACHES = [torch.randn(2, 2, 4200, 64).to(torch.bfloat16) for _ in range(2)]
ROOMY = weft.Attention(score + bias[batch, head, q_pos, kv_pos], masks.causal, name="repeated_roomy")
LENGTHS = sorted(
    {n + by for n in (1, 2, 16, 32, 64, 128, 256, 384, 512, 640, 1024, 1536, 2048, 4096) for by in (-1, 0, 1)}
)
# variant, rows of the query, options
GROWING: dict[str, tuple[weft.Attention, int, dict[str, Any]]] = {
    "one token": (CAUSAL, 1, {}),
    "tokens": (CAUSAL, 16, {}),
    "many rows": (CAUSAL, 200, {}),
    "from the first position on": (CAUSAL, 40, {"q_offset": 0}),
    "an offset a row": (CAUSAL, 1, {"q_offset": ints(0, 3)}),
    "one token, lengths": (CAUSAL, 1, {"kv_lens": ints(1, 1)}),
    "rows, lengths": (CAUSAL, 40, {"kv_lens": ints(1, 1)}),
    "rows, lengths, an offset": (CAUSAL, 40, {"kv_lens": ints(1, 1), "q_offset": 0}),
    "an operand": (ALIBI, 1, {"slopes": torch.rand(4)}),
    "a scalar, one token": (WINDOW, 1, {"window": 100}),
    "a scalar": (WINDOW, 40, {"window": 100}),
    "boxes of an operand": (ROOMY, 40, {"q_offset": 0, "bias": normal(2, 4, 40, 4200)}),
}


class _Growing(_Calls):
    """The same, of keys that are the first ones of a cache; what is known of nothing is prepared anew for each call."""

    def __init__(
        self, launches: _Launches, variant: weft.Attention, target: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(launches, variant, target)
        self.longer = 0  # calls that took the whole way, or the shortest one
        forward = self._with._variant.forward

        def counted(*given: Any) -> Any:
            self.longer += 1
            return forward(*given)

        monkeypatch.setattr(self._with._variant, "forward", counted)

    def __call__(self, tensors: list[Tensor], backward: bool, **given: Any) -> bool:
        """Whether what was found for another call served it."""
        self._without._variant.forget()
        longer, hits = self.longer, self.hits
        super().__call__(tensors, backward, **given)
        return self.longer == longer and self.hits <= hits and bool(self.launches.found)

    def of(self, query: Tensor, length: int, **given: Any) -> bool:
        return self([query, *(cache[:, :, :length] for cache in CACHES)], query.requires_grad, **given)


@pytest.fixture
def growing(launches: _Launches, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Growing]:
    return lambda variant, target: _Growing(launches, variant, target, monkeypatch)


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", GROWING)
def test_keys_that_grow_launch_what_is_launched_for_them_alone(
    name: str, target: str, growing: Callable[..., _Growing]
) -> None:
    variant, rows, given = GROWING[name]
    if target == "hopper" and name in ("one token, lengths", "a scalar, one token"):
        pytest.skip("no such way")
    calls, query = growing(variant, target), normal(2, 4, rows, 64)
    lengths = [n for n in LENGTHS if n > 0]
    for _ in range(2):  # the second time all kernels are compiled
        served = [calls.of(query, n, **given) for n in lengths]
    assert all(served[4:]), [n for n, is_served in zip(lengths, served) if not is_served]
    assert not calls.of(query, 0, **given) and not calls.launches.found
    assert calls.of(query, 777, **given)


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (1, 128), (2, 16)])
def test_a_latent_cache_that_grows(rows: int, heads: int, target: str, growing: Callable[..., _Growing]) -> None:
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=512, rope=64), scale=0.07, name="grown_latent")
    calls, query, cache = growing(variant, target), normal(2, heads, rows, 576), normal(2, 1, 4200, 576)
    lengths = [n for n in LENGTHS if n > 0]
    for _ in range(2):
        served = [calls([query, cache[:, :, :n]], False) for n in lengths]
    assert all(served[4:])


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_keys_that_grow_beyond_an_axis_that_other_kernels_measure(
    target: str, growing: Callable[..., _Growing]
) -> None:
    document = weft.tensor("document", 1, int)
    variant = weft.Attention(mask=masks.causal & masks.document(document), name="grown_documents")
    calls, query, cache = growing(variant, target), normal(1, 4, 40, 64), normal(1, 2, 20_000, 64)
    documents = torch.zeros(20_000, dtype=torch.int32)
    for _ in range(2):
        for first in (100, 16_380, 19_000):
            served = [
                calls([query, *[cache[:, :, :n]] * 2], False, document=documents) for n in range(first, first + 9)
            ]
    assert all(served)


def test_keys_that_grow_are_served_where_a_gradient_is_wanted(growing: Callable[..., _Growing]) -> None:
    for target in ("triton", "hopper"):
        calls, query = growing(CAUSAL, target), normal(2, 4, 40, 64).requires_grad_()
        assert [calls.of(query, n) for n in range(60, 70)][4:] == [True] * 6
        assert not calls.of(query.detach(), 70) and calls.of(query, 71)


# of query, key and value, in place of those that a call would have whose keys grew
GROWN_OTHERWISE: dict[str, Any] = {
    "more values than keys": lambda q, k, v: (q, k, CACHES[1][:, :, : v.shape[2] + 1]),
    "rows": lambda q, k, v: (q[:, :, :20], k, v),
    "heads of keys": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "batch": lambda q, k, v: (q[:1], k[:1], v[:1]),
    "strides": lambda q, k, v: (q, k.contiguous(), v.contiguous()),
    "strides of keys": lambda q, k, v: (q, heads_last(k), v),
    "an address between": lambda q, k, v: (q, CACHES[0].flatten()[1:-63].view(-1, 64)[: 4 * 4199].view(4, 4199, 64), v),
    "every second row": lambda q, k, v: (q, CACHES[0][:, :, : 2 * k.shape[2] : 2], v),
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
    "dtype of values": lambda q, k, v: (q, k, v.half()),
    "negated keys": lambda q, k, v: (q, torch._neg_view(k), v),
    "a gradient of keys": lambda q, k, v: (q, k.detach().requires_grad_(), v),
    "other memory": lambda q, k, v: (q.clone(), CACHES[1][:, :, : k.shape[2]], CACHES[0][:, :, : k.shape[2]]),
    "rows from the middle on": lambda q, k, v: (
        q,
        CACHES[0][:, :, 7 : 7 + k.shape[2]],
        CACHES[1][:, :, 9 : 9 + k.shape[2]],
    ),
}


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("change", GROWN_OTHERWISE)
def test_what_differs_in_more_than_keys_is_seen(change: str, target: str, growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, target), normal(2, 4, 40, 64)
    for n in range(100, 106):
        calls.of(query, n)
    assert calls.of(query, 106)
    own = GROWN_OTHERWISE[change](query, *(cache[:, :, :107] for cache in CACHES))
    assert calls(list(own), False) == (change in ("other memory", "rows from the middle on"))
    for n in range(110, 116):
        calls.of(query, n)
    assert calls.of(query, 116)


OF_GROWN: list[dict[str, Any]] = [
    {"q_offset": 3}, {"q_offset": ints(3, 3)}, {"q_offset": 2**30}, {"q_offset": 2**40}, {"kv_lens": LENS},
    {"schedule": "flash"}, {"deterministic": True},
]  # fmt: skip


@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("option", range(len(OF_GROWN)))
def test_options_of_keys_that_grow_are_seen(option: int, target: str, growing: Callable[..., _Growing]) -> None:
    calls, query, given = growing(CAUSAL, target), normal(2, 4, 40, 64), OF_GROWN[option]
    for n in range(100, 106):
        calls.of(query, n)
    assert calls.of(query, 106, **given) == (option == 0)  # a number of each call, given or not
    assert [calls.of(query, n) for n in range(107, 112)][-1]


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_keys_may_not_grow_beyond_what_kernels_count(target: str, growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, target), normal(2, 4, 40, 64)
    row = [cache[:, :, :1] for cache in CACHES]
    served = [
        calls([query, *(t.expand(2, 2, n, 64) for t in row)], False) for n in (*range(60, 66), 2**20 + 1, 2**30 - 1)
    ]
    assert served[4:] == [True] * 4
    for n in (2**30, 2**30 + 1):
        assert not calls([query, *(t.expand(2, 2, n, 64) for t in row)], False)


def test_a_kernel_that_grown_keys_need_is_compiled_and_served(growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, "triton"), normal(2, 4, 1, 64)
    assert all([calls.of(query, n) for n in range(100, 110)][4:])
    assert not calls.of(query, 1000)  # whose keys are in parts
    assert all([calls.of(query, n) for n in range(1001, 1010)][4:])
    assert calls.of(query, 120)


def test_layers_whose_keys_grow_have_a_layout_of_their_own_in_each_step(growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, "hopper"), normal(2, 4, 40, 64)
    for n in range(100, 104):
        served = [calls.of(query, n) for _ in range(8)]
        assert n < 102 or served == [True] + [False] * 7
        assert calls.hits >= 6


def test_keys_that_grow_are_forgotten_with_all_else(growing: Callable[..., _Growing]) -> None:
    calls, query = growing(CAUSAL, "triton"), normal(2, 4, 1, 64)
    assert [calls.of(query, n) for n in range(100, 110)][-1]
    calls._with._variant.forget()
    assert not calls.of(query, 110)


def test_no_cache_is_kept(growing: Callable[..., _Growing]) -> None:
    import gc
    import weakref

    for target in ("triton", "hopper"):
        calls, tensors = growing(CAUSAL, target), [normal(2, heads, 80, 64) for heads in (4, 2, 2)]
        assert [calls([tensors[0], *(t[:, :, :n] for t in tensors[1:])], False) for n in range(40, 60)][-1]
        references = [weakref.ref(t) for t in tensors]
        calls.launches.addresses, tensors = {}, []
        gc.collect()
        assert not any(reference() is not None for reference in references)


def test_settings_count_for_keys_that_grow(growing: Callable[..., _Growing]) -> None:
    calls, query, lens = growing(CAUSAL, "triton"), normal(2, 4, 1, 64), {"kv_lens": ints(5, 7)}
    assert [calls.of(query, n, **lens) for n in range(100, 110)][-1]
    with weft.settings(check=True):
        assert not calls.of(query, 110, **lens) and calls.launches.found
        assert not calls.of(query, 110, kv_lens=ints(5, 500)) and not calls.launches.found
    assert calls.of(query, 111, **lens)


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_what_keys_that_grow_cost_the_host(target: str, launches: _Launches) -> None:
    """In calls of functions, which no busy machine changes."""
    variant, query = CAUSAL.replace(name=f"repeated_cost_{target}"), normal(2, 4, 1, 64)
    lengths = iter(range(3000, 4000))

    def step(length: int | None = None) -> None:
        length = length or next(lengths)
        variant(query, *(cache[:, :, :length] for cache in CACHES), target=target)

    for _ in range(20):
        step(3001)
    repeated = calls_of(lambda: step(3001))
    for _ in range(20):
        step()
    assert sorted(calls_of(step) for _ in range(31))[15] <= repeated + 10


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_memory_that_was_given_back_is_seen(target: str, launches: _Launches) -> None:
    calls = _Calls(launches, weft.Attention(mask=masks.causal, name="given_back"), target)
    tensors = dense()
    for _ in range(4):
        calls(tensors, backward=False)
    assert calls.hits
    freed = tensors[1].clone()
    freed.untyped_storage().resize_(0)
    assert not calls([tensors[0], freed, tensors[2]], backward=False)
    assert not launches.found
