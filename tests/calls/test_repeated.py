"""Calls that repeat launch what they would launch if nothing were known of them, and see everything that changes.

Launches of the GPU targets on CPU tensors, which are written down: each call once with guards of its tensors, by which
a call like the last one is found, and once without.
"""

from __future__ import annotations

import linecache
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import masks

pytest.importorskip("triton")
from weft.codegen import torch_private
from weft.codegen.launch.fast.repeats import MOST_PATIENCE, WORTH, Repeats
from weft.codegen.launch.fast.ways import Again
from weft.runtime.call import Call, Dense, Lengths, Packed, Paged

from .written_launches import (
    ALIBI,
    BIAS,
    CAUSAL,
    LENS,
    WINDOW,
    Calls,
    Launches,
    dense,
    heads_last,
    ints,
    leaves,
    normal,
    written,
)

pytestmark = pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return written(monkeypatch)


def packed(rows: int = 64) -> list[Tensor]:
    return [normal(1, heads, rows, 64) for heads in (4, 2, 2)]


def pools(blocks: int = 16, rows: int = 1) -> list[Tensor]:
    return [normal(2, 4, rows, 64), normal(blocks, 2, 16, 64), normal(blocks, 2, 16, 64)]


def latent_calls() -> dict[str, tuple[weft.Attention, list[Tensor], dict[str, Any]]]:
    """A rotary key that is a tensor of its own, beside latent columns of 16 bits and of FP8."""
    found: dict[str, tuple[weft.Attention, list[Tensor], dict[str, Any]]] = {}
    for name, rows in (("rows", 64), ("one token", 1)):
        found[name] = MLA, [normal(2, 4, rows, 80), normal(2, 1, 64, 64)], {"rope": normal(2, 1, 64, 16)}
    cache, pool = (weft.fp8.quantize(normal(*sizes), per="token") for sizes in ((2, 1, 64, 64), (16, 1, 16, 64)))
    found["FP8"] = MLA, [normal(2, 4, 1, 80), cache.data], {"rope": normal(2, 1, 64, 16), "k_descale": cache.descale}
    pages = {"rope": normal(16, 1, 16, 16), "k_descale": pool.descale, "kv_lens": LENS, "block_table": TABLE}
    found["FP8 pages"] = MLA, [normal(2, 4, 1, 80), pool.data], pages
    return found


def fp8_calls() -> dict[str, tuple[weft.Attention, list[Tensor], dict[str, Any]]]:
    """Operands of FP8 whose descales are those of heads, or of tokens."""

    def call(tensors: list[Tensor], per: Any, first: int) -> tuple[weft.Attention, list[Tensor], dict[str, Any]]:
        made = {n: weft.fp8.quantize(t, per) for n, t in list(zip("qkv", tensors))[first:]}
        return CAUSAL, [*tensors[:first], *(x.data for x in made.values())], {
            f"{n}_descale": x.descale for n, x in made.items()
        }  # fmt: skip

    variant, pages, descales = call(pools(), "token", 1)
    return {
        "FP8": call(dense(), "head", 0),
        "FP8 keys": call(dense(16), "head", 1),
        "FP8 keys, one token": call(dense(1), "head", 1),
        "FP8 keys, one token, by token": call(dense(1), "token", 1),
        "FP8 keys, one token, pages": (variant, pages, descales | {"kv_lens": LENS, "block_table": TABLE}),
    }


MLA = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=64, rope=16), scale=0.1, name="repeated_latent")
TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)
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
    **{f"latent, {kind}": call for kind, call in latent_calls().items()},
    **fp8_calls(),
}


def lack(name: str, target: str, backward: bool) -> bool:
    """Whether there is no such way."""
    if backward:
        return any(word in name for word in ("pages", "latent", "FP8"))
    return target == "hopper" and ("token" in name or "pages" in name or "FP8 keys" in name)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", CALLS)
def test_what_repeats_launches_the_same(name: str, target: str, backward: bool, launches: Launches) -> None:
    variant, tensors, given = CALLS[name]
    if lack(name, target, backward):
        pytest.skip("no such way")
    if target == "hopper" and "latent" in name:
        pytest.skip("rotary columns apart are for triton")
    calls = Calls(launches, variant, target)
    tensors = leaves(tensors) if backward else tensors
    found = [calls(tensors, backward, **given) for _ in range(5)]
    assert found[-2:] == [True, True], found
    for _ in range(3):  # at other addresses
        others = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        clones = {id(t): t.clone() for t in given.values() if isinstance(t, Tensor)}  # one where one is given twice
        moved = {n: clones.get(id(t), t) for n, t in given.items()}
        assert calls(others, backward, **moved)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_keys_of_all_heads_with_a_rotary_one(target: str, backward: bool, launches: Launches) -> None:
    """Gradients of the rotary columns arrive by the longer way, whose forward was like one before."""
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=64, rope=64), name="repeated_expanded")
    calls = Calls(launches, variant, target)
    tensors, given = [normal(2, 4, 64, 192), normal(2, 1, 64, 128)], {n: normal(4, 64, 128) for n in ("uk", "uv")}
    tensors = leaves(tensors) if backward else tensors
    found = [calls(tensors, backward, form="expanded", **given) for _ in range(6)]
    assert found[-2:] == [True, True], found
    assert not backward or any("dkey" in name for name, *_ in launches.found)


def beside(tensor: Tensor, by: int = 1) -> Tensor:
    """The same numbers, some elements behind a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return memory[by:].view(tensor.shape).copy_(tensor)


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
    change: str, name: str, target: str, backward: bool, launches: Launches
) -> None:  # fmt: skip
    variant, tensors, given = CALLS[name]
    calls = Calls(launches, variant, target)
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
    "latent, one token": [
        {"rope": None}, {"rope": normal(2, 1, 64, 16).float()}, {"rope": normal(2, 1, 63, 16)}, {"kv_lens": LENS},
        {"rope": normal(2, 1, 64, 32)[..., ::2]}, {"rope": beside(normal(2, 1, 64, 16))},
    ],
    "latent, FP8": [
        {"rope": None}, {"k_descale": None}, {"k_descale": 0.5}, {"k_descale": torch.full((2, 1, 64, 1), 0.5)},
        {"k_descale": torch.ones(2, 1, 1, 1)}, {"rope": normal(2, 1, 64, 32)}, {"out_dtype": torch.float16},
    ],
    "latent, FP8 pages": [
        {"rope": normal(8, 1, 16, 16)}, {"rope": normal(16, 1, 8, 16)}, {"block_table": TABLE[:, :2]},
    ],
    "FP8": [
        {"q_descale": None}, {"k_descale": 0.5}, {"k_descale": torch.ones(2)}, {"k_descale": torch.ones(1, 3, 1, 1)},
        {"k_descale": torch.ones(1, 2, 1, 1).requires_grad_()}, {"k_descale": torch.ones(1, 2, 1, 1).double()},
        {"v_descale": torch.ones(2, 2, 64, 1)}, {"q_descale": torch.ones(2, 4, 64, 1)}, {"out_dtype": torch.float16},
        {"kv_lens": LENS}, {"v_descale": torch.ones(())}, {"v_descale": torch.ones(2, 2, 2, 1)[:, :, ::2]},
    ],
    "FP8 keys, one token, by token": [
        {"k_descale": torch.ones(2, 2, 63, 1)}, {"v_descale": torch.ones(2, 2, 1, 1)}, {"k_descale": torch.ones(2)},
        {"v_descale": torch.ones(2, 2, 128, 1)[:, :, ::2]},
    ],
    "boxes of an operand": [
        {"bias": beside(normal(2, 4, 64, 64))}, {"bias": normal(1, 4, 64, 64).expand(2, 4, 64, 64)},
        {"bias": normal(2, 4, 64, 64, dtype=torch.float32)}, {"bias": normal(2, 4, 64, 64).mT},
    ],
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("target", ["triton", "hopper"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_change_are_seen(name: str, target: str, backward: bool, launches: Launches) -> None:
    variant, tensors, given = CALLS[name]
    if lack(name, "triton", backward) or (target == "hopper" and "token" in name):
        pytest.skip("no such way")
    tensors = leaves(tensors) if backward else tensors
    for change in OPTIONS[name]:
        calls = Calls(launches, variant, target)
        for _ in range(4):
            calls(tensors, backward, **given)
        for _ in range(4):
            calls(tensors, backward, **{**given, **change})
        calls(tensors, backward, **given)


def test_a_scalar_may_be_annealed(launches: Launches) -> None:
    variant, tensors, _ = CALLS["a scalar"]
    calls = Calls(launches, variant, "hopper")
    assert [calls(tensors, False, window=n) for n in range(20, 28)][2:] == [True] * 6


def test_what_a_gradient_is_wanted_of_is_seen(launches: Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls = Calls(launches, variant, "triton")
    for wanted in ((0, 1, 2), (0,), (1, 2), (0, 1, 2)):
        some = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
        assert [calls(some, True, **given) for _ in range(20)][-1]
    with torch.no_grad():
        assert calls(some, False, **given)
    assert not calls([t.detach() for t in tensors], False, **given)


def test_what_hooks_bring_back_is_seen(launches: Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls, tensors = Calls(launches, variant, "hopper"), leaves(tensors)
    for _ in range(4):
        calls(tensors, True, **given)
    for back in (torch.clone, heads_last_of_four, beside, torch._neg_view):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
            for _ in range(3):
                calls(tensors, True, **given)
    calls(tensors, True, **given)


def heads_last_of_four(tensor: Tensor) -> Tensor:
    return heads_last(tensor) if tensor.dim() == 4 else tensor


def test_settings_count_for_calls_that_repeat(launches: Launches) -> None:
    variant, tensors, given = CALLS["pages"]
    calls = Calls(launches, variant, "triton")
    for _ in range(4):
        calls(tensors, False, **given)
    wrong = {**given, "kv_lens": ints(3, 5000)}
    with weft.settings(check=True):
        hits = calls.hits
        calls(tensors, False, **wrong)
        assert not launches.found and calls.hits == hits
        assert "kv_lens" in calls._one(calls._with, tensors, False, wrong)[1]


def test_nothing_is_known_once_all_is_forgotten(launches: Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls = Calls(launches, variant, "triton")
    for _ in range(4):
        calls(tensors, False, **given)
    calls._with._variant.forget()
    assert not calls(tensors, False, **given)


def test_what_a_call_under_way_learns_is_forgotten_too(launches: Launches) -> None:
    variant, tensors, given = CALLS["dense"]
    calls = Calls(launches, variant, "triton")
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
def test_subclasses_of_tensors_see_every_call(name: str, launches: Launches) -> None:
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


def test_no_tensor_is_kept(launches: Launches) -> None:
    import gc
    import weakref

    gc.freeze()  # what is older is not looked at, which takes seconds
    variant, tensors, _ = CALLS["an operand"]
    calls = Calls(launches, variant, "hopper")
    own, slopes = leaves(tensors), torch.rand(4)
    for _ in range(4):
        calls(own, True, slopes=slopes)
    references = [weakref.ref(t) for t in (*own, slopes)]
    del own, slopes
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_layout_that_never_returns_is_looked_at_ever_less() -> None:
    repeats, looks = Repeats(), 0
    found: Any = Again(lambda call: False, lambda call: None)
    for _ in range(4 * MOST_PATIENCE):
        if repeats.wants():
            looks += 1
            repeats.learn(found, False, False)
    assert looks < 16
    repeats.known, repeats.hits = found, WORTH  # one that served
    assert repeats.wants()


@pytest.mark.parametrize("name", CALLS)
def test_every_field_of_a_call_is_asked_for(name: str, launches: Launches) -> None:
    """A new one decides what is launched, or says here why not."""
    variant, tensors, given = CALLS[name]
    calls = Calls(launches, variant, "triton")
    for _ in range(3):
        calls(tensors, False, **given)
    known = calls._with._variant.repeats.known
    assert known is not None
    lines = linecache.getlines(known.fits.__code__.co_filename)
    asked = lines[known.fits.__code__.co_firstlineno]
    options = {"cu_seqlens_q": Packed, "block_table": Paged, "kv_lens": Lengths}
    sequences = next((kind for option, kind in options.items() if option in given), Dense)
    found = {f"call.{field.name}" for field in fields(Call)} - (
        {"call.operands"} if not variant.canonical.parameters else set()
    )
    found |= {f"call.sequences.{field.name}" for field in fields(sequences)} - {"call.sequences.page"}  # key's rows
    assert not [field for field in found if field not in asked], asked


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_memory_that_was_given_back_is_seen(target: str, launches: Launches) -> None:
    calls = Calls(launches, weft.Attention(mask=masks.causal, name="given_back"), target)
    tensors = dense()
    for _ in range(4):
        calls(tensors, backward=False)
    assert calls.hits
    freed = tensors[1].clone()
    freed.untyped_storage().resize_(0)
    assert not calls([tensors[0], freed, tensors[2]], backward=False)
    assert not launches.found
