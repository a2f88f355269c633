"""What is prepared once for calls of one kind: later calls are right and checked, prepare nothing and keep nothing."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import head, kv_pos, masks, q_pos, score
from weft.runtime.call import SLOTS
from weft.runtime.run.variant import Variant

pytest.importorskip("triton")
from weft.codegen.launch.launcher import KernelLauncher

from ..support import through_python

window, heat = weft.scalar("window", int), weft.scalar("heat", float)
gain, doc = weft.tensor("gain", 1), weft.tensor("doc", 1, int)
RECENT = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="prepared_recent")
HEATED = weft.Attention(score=score * weft.exp(heat), mask=masks.causal, name="prepared_heated")
SCALED = weft.Attention(score=score * weft.exp(gain[head]), mask=masks.causal, name="prepared_scaled")
PACKED = weft.Attention(mask=masks.causal & masks.document(doc), name="prepared_packed")
TARGETS = pytest.mark.parametrize("target", ["interpret", "cpu"])


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    torch.manual_seed(0)


def rows(length: int, heads: int = 2, dim: int = 16, batch: int = 1) -> Tensor:
    return torch.randn(batch, heads, length, dim)


def three(length: int, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    return rows(length, **sizes), rows(length, **sizes), rows(length, **sizes)


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    found = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    assert found.data_ptr() % 16
    return found


def check(variant: weft.Attention, target: str, tensors: Sequence[Tensor], **operands: Any) -> None:
    """Output and gradients of the main tensors, against the definition in float64."""

    def found(call: Callable[..., Any], dtype: torch.dtype, **extra: str) -> list[Tensor]:
        # float64 is a copy; float32 keeps the strides and addresses that the call is about
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        out = call(*leaves, **operands, **extra)
        dout = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    for got, wanted in zip(found(variant, torch.float32, target=target), found(variant.reference, torch.float64)):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something was prepared: "Variant" for a kind of calls, "KernelLauncher" for a mode of their tensors."""
    counts: Counter[str] = Counter()

    def count(kind: type) -> None:
        prepare = kind._prepare  # type: ignore[attr-defined]

        def counted(self: Any, *arguments: Any) -> Any:
            counts[kind.__name__] += 1
            return prepare(self, *arguments)

        monkeypatch.setattr(kind, "_prepare", counted)

    count(Variant)
    count(KernelLauncher)
    return counts


def once(target: str) -> dict[str, int]:
    """What one training step prepares: a forward and a backward."""
    return {"Variant": 2} | ({"KernelLauncher": 2} if target == "interpret" else {})


# -- what is prepared anew, and what is not ----------------------------------------------------------------------------
@TARGETS
def test_lengths_batches_heads_and_strides_prepare_nothing(target: str, prepared: Counter[str]) -> None:
    variant = RECENT.replace(name=f"prepared_lengths_{target}")
    check(variant, target, three(35), window=7)
    assert prepared == once(target)
    check(variant, target, three(35), window=20)
    check(variant, target, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in three(35)], window=7)
    check(variant, target, (rows(22), *three(35)[1:]), window=7)
    check(variant, target, (rows(35), *three(35, heads=1)[1:]), window=7)
    check(variant, target, three(20, batch=3), window=7)
    check(variant, target, [t[:, :, ::2] for t in three(40)], window=7)
    assert prepared == once(target)


@TARGETS
def test_keys_that_grow_by_one_prepare_nothing(target: str, prepared: Counter[str]) -> None:
    variant = RECENT.replace(name=f"prepared_growing_{target}")
    key, value = rows(120), rows(120)
    for length in range(1, 120, 7 if target == "interpret" else 1):
        query = rows(1)
        out = variant(query, key[:, :, :length], value[:, :, :length], window=9, target=target)
        exact = variant.reference(query, key[:, :, :length], value[:, :, :length], window=9)
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    assert prepared["Variant"] == 1 and prepared["KernelLauncher"] == (target == "interpret")


@TARGETS
def test_a_float_that_is_annealed_prepares_nothing(target: str, prepared: Counter[str]) -> None:
    variant = HEATED.replace(name=f"prepared_annealed_{target}")
    tensors = three(8)
    steps = 2000 if target == "cpu" else 100
    for step in range(steps):
        out = variant(*tensors, heat=1.0 - 2.0 * step / steps, target=target)
        if step % (steps // 10) == 0:
            exact = variant.reference(*tensors, heat=1.0 - 2.0 * step / steps)
            torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    assert prepared["Variant"] == 1 and prepared["KernelLauncher"] == (target == "interpret")


@TARGETS
def test_an_int_given_for_a_float_prepares_nothing(
    target: str, prepared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    through_python(monkeypatch)
    variant = HEATED.replace(name=f"prepared_int_for_float_{target}")
    tensors = three(8)
    check(variant, target, tensors, heat=0.5)
    assert prepared == once(target)
    for number in (1, 0, -2, 0.25):
        check(variant, target, tensors, heat=number)
    assert prepared == once(target)
    assert torch.equal(variant(*tensors, heat=1, target=target), variant(*tensors, heat=1.0, target=target))


@TARGETS
def test_values_of_a_tensor_operand_and_its_strides_prepare_nothing(target: str, prepared: Counter[str]) -> None:
    variant = PACKED.replace(name=f"prepared_packed_{target}")
    for length in (10, 1, 40):
        check(variant, target, three(40), doc=torch.arange(40) // length)
    check(variant, target, three(40), doc=(torch.arange(80) // 20)[::2])
    check(variant, target, three(40), doc=torch.tensor([7]).expand(40))
    assert prepared == once(target)


def test_gradients_of_a_shared_key_have_one_type_whatever_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for one number of heads serves all: one head has nothing to share, and yet a share."""
    latent = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=8, rope=8), name="prepared_latent")
    launch, types = KernelLauncher.__call__, []

    def recorded(self: Any, call: Any, results: Any, workspace: Any, partition: Any) -> Any:
        if self.job.is_backward:
            given = {**self._given(call, results), **workspace}
            types.append({name: value.dtype for name, value in given.items() if isinstance(value, Tensor)})
        return launch(self, call, results, workspace, partition)

    monkeypatch.setattr(KernelLauncher, "__call__", recorded)
    for heads in (2, 1):
        query, cache = rows(9, heads=heads).half().requires_grad_(), rows(9, heads=1).half().requires_grad_()
        up = [torch.randn(heads, 8, width).half() for width in (8, 16)]
        latent(query, cache, uk=up[0], uv=up[1], form="expanded", target="interpret").sum().backward()
    assert types[0] == types[1] and torch.float32 in types[0].values()


def test_dtypes_widths_options_and_wanted_gradients_are_prepared_each(prepared: Counter[str]) -> None:
    variant = SCALED.replace(name="prepared_kinds")
    weights = torch.randn(2)
    kinds: list[Callable[[], Any]] = [
        lambda: variant(*three(8), gain=weights),
        lambda: variant(*(t.half() for t in three(8)), gain=weights),
        lambda: variant(*(t.double() for t in three(8)), gain=weights),
        lambda: variant(*three(8), gain=weights.double()),
        lambda: variant(*three(8, dim=24), gain=weights),
        lambda: variant(*three(8)[:2], rows(8, dim=24), gain=weights),
        lambda: variant(*three(8), gain=weights, target="interpret"),
        lambda: variant(*three(8), gain=weights, target="interpret", schedule="standard"),
        lambda: variant(*three(8), gain=weights, q_offset=torch.zeros(1, dtype=torch.int32)),
    ]
    for number, call in enumerate(kinds, start=1):
        for _ in range(2):
            call()
            assert prepared["Variant"] == number
    prepared.clear()
    for wanted in ([0], [0, 1, 2], [3], [0, 3]):
        leaves = [t.requires_grad_(n in wanted) for n, t in enumerate((*three(8), weights.clone()))]
        for _ in range(2):
            variant(*leaves[:3], gain=leaves[3]).sum().backward()
    assert prepared["Variant"] == 4


# -- alignment is of each call -----------------------------------------------------------------------------------------
@TARGETS
def test_operands_at_odd_addresses(target: str, prepared: Counter[str]) -> None:
    """How query, key, value and out lie decides how they are loaded; an operand of the variant decides nothing."""
    variant = SCALED.replace(name=f"prepared_addresses_{target}")
    tensors, weights = three(35), torch.randn(2)
    check(variant, target, tensors, gain=misaligned(weights))
    check(variant, target, [misaligned(t) for t in tensors], gain=weights)
    check(variant, target, (misaligned(tensors[0]), *tensors[1:]), gain=weights)
    check(variant, target, (*tensors[:2], misaligned(tensors[2])), gain=torch.randn(4)[::2])
    check(variant, target, tensors, gain=weights)
    assert prepared["Variant"] == 2 and prepared["KernelLauncher"] <= 4


@TARGETS
def test_a_gradient_of_the_output_at_an_odd_address(target: str) -> None:
    leaves = [t.requires_grad_() for t in three(35)]
    out = RECENT(*leaves, window=9, target=target)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for same in (misaligned(dout), dout.transpose(2, 3).contiguous().transpose(2, 3)):
        for got, wanted in zip(torch.autograd.grad(out, leaves, same, retain_graph=True), expected):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@TARGETS
def test_an_offset_of_each_batch_row_in_any_strides(target: str) -> None:
    query, key, value = rows(12, batch=3), rows(40, batch=3), rows(40, batch=3)
    given = torch.tensor([3, 28, 0], dtype=torch.int32)
    strided = torch.stack([given, given + 100], 1)[:, 0]
    assert strided.stride() == (2,)
    whole = RECENT(query, key, value, window=9, q_offset=given, target=target)
    assert torch.equal(RECENT(query, key, value, window=9, q_offset=strided, target=target), whole)
    check(RECENT, target, (query, key, value), window=9, q_offset=strided)
    check(RECENT, target, (query, key, value), window=9, q_offset=given[1:2].expand(3))


# -- checks ------------------------------------------------------------------------------------------------------------
def test_a_sound_call_makes_no_other_call_sound() -> None:
    q, k, v = three(8)
    RECENT(q, k, v, window=1)
    for wrong in (True, 1.0, torch.tensor(1)):
        with pytest.raises(weft.WeftError, match="window: expected"):
            RECENT(q, k, v, window=wrong)
    with pytest.raises(weft.WeftError, match="expected dtype torch.float32 as in query"):
        RECENT(q, k, v.half(), window=1)
    with pytest.raises(weft.WeftError, match="value: expected length 8 as in key, got 7"):
        RECENT(q, k, v[:, :, :7], window=1)
    with pytest.raises(weft.WeftError, match="key: expected device cpu as in query, got meta"):
        RECENT(q, k.to("meta"), v, window=1)
    with pytest.raises(weft.WeftError, match="query: expected a contiguous last dimension"):
        RECENT(q.mT.contiguous().mT, k, v, window=1)
    with pytest.raises(weft.WeftError, match="target: expected one of"):
        RECENT(q, k, v, window=1, target="tpu")


WRONG_OFFSETS = [
    False, 1.0, torch.zeros(2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32),
    torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.zeros(1, dtype=torch.int32, device="meta"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_OFFSETS, ids=str)
def test_a_sound_offset_makes_no_other_offset_sound(wrong: Any) -> None:
    (q, k, v), sound = three(8), torch.zeros(1, dtype=torch.int32)
    latent = weft.Attention(
        mask=masks.causal, scale=0.2, latent=weft.Latent(rank=16, rope=0), name="prepared_latent_offset"
    )
    for offset in (0, sound):
        RECENT(q, k, v, window=1, q_offset=offset)
        latent(q, k[:, :1], q_offset=offset)
    with pytest.raises(weft.WeftError, match="q_offset: expected"):
        RECENT(q, k, v, window=1, q_offset=wrong)
    with pytest.raises(weft.WeftError, match="q_offset: expected"):
        latent(q, k[:, :1], q_offset=wrong)


def test_a_sound_operand_makes_no_other_operand_sound() -> None:
    q, k, v = three(8)
    SCALED(q, k, v, gain=torch.ones(2))
    with pytest.raises(weft.WeftError, match="gain: expected a tensor of float"):
        SCALED(q, k, v, gain=torch.ones(2, dtype=torch.int64))
    with pytest.raises(weft.WeftError, match="gain: expected device cpu as in query, got meta"):
        SCALED(q, k, v, gain=torch.ones(2, device="meta"))
    with pytest.raises(weft.WeftError, match=r"gain\[head\]"):
        SCALED(q, k, v, gain=torch.ones(1))
    HEATED(q, k, v, heat=1.0)
    for value in (True, "1", None, torch.tensor(1.0)):
        with pytest.raises(weft.WeftError, match="heat: expected a"):
            HEATED(q, k, v, heat=value)


LENS = torch.tensor([64, 40, 3], dtype=torch.int32)
TABLE = torch.arange(12, dtype=torch.int32).view(3, 4)
WRONG_LENGTHS: list[dict[str, Any]] = [
    {"kv_lens": LENS[:2]}, {"kv_lens": LENS.float()}, {"kv_lens": LENS[None]}, {"kv_lens": [1, 2, 3]},
    {"kv_lens": LENS.to("meta")}, {"kv_lens": LENS + 1}, {"kv_lens": LENS, "q_lens": LENS[:2]},
    {"kv_lens": LENS, "cu_seqlens_q": LENS}, {"kv_lens": LENS, "q_offset": 1.5},
    {"kv_lens": LENS, "q_offset": torch.zeros(2, dtype=torch.int32)}, {"block_table": TABLE},
    {"kv_lens": LENS, "block_table": TABLE[:2]}, {"kv_lens": LENS, "block_table": TABLE.long()},
    {"kv_lens": LENS, "block_table": TABLE[0]}, {"kv_lens": LENS, "block_table": [[1]]},
    {"kv_lens": LENS, "block_table": TABLE + 9}, {"kv_lens": LENS[:2], "block_table": TABLE},
]  # fmt: skip


def test_lengths_are_refused_in_the_same_words_before_and_after_a_sound_call() -> None:
    q, k, pool = torch.randn(3, 2, 1, 16), torch.randn(3, 1, 64, 16), torch.randn(12, 1, 16, 16)
    fresh, ready = (RECENT.replace(name="prepared_lengths") for _ in range(2))

    def said(variant: weft.Attention, wrong: dict[str, Any]) -> str:
        kv = pool if "block_table" in wrong else k
        with pytest.raises(weft.WeftError, match="prepared_lengths|block_table|q_offset") as found:
            variant(q, kv, kv, window=5, target="cpu", **wrong)
        return str(found.value)

    before = [said(fresh, wrong) for wrong in WRONG_LENGTHS]
    ready(q, k, k, window=5, kv_lens=LENS, target="cpu")
    ready(q, pool, pool, window=5, kv_lens=LENS, block_table=TABLE, target="cpu")
    assert [said(ready, wrong) for wrong in WRONG_LENGTHS] == before


@pytest.mark.parametrize("fresh", [True, False])
def test_the_backward_op_refuses_what_does_not_fit_the_forward(fresh: bool) -> None:
    """A graph of torch reaches the op without the checks of a call."""
    variant = RECENT.replace(name=f"prepared_backward_op_{fresh}")
    q, k, v = three(8)
    call = (q, k, v, None, [], [], [3], 0, *[None] * len(SLOTS), 16, variant.canonical.text, "")
    out, lse = torch.ops.weft.attention(*call)
    wanted = [True, True, True, False]
    if not fresh:
        torch.ops.weft.attention_backward(out, lse, out, lse, *call, wanted)
    for dout in (out[:, :, :7], out[:, :1], out[..., :8], out[0], out.double()):
        with pytest.raises(weft.WeftError, match=rf"prepared_backward_op_{fresh}: dout: expected \[1, 2, 8, 16\]"):
            torch.ops.weft.attention_backward(dout, None, out, lse, *call, wanted)
    with pytest.raises(weft.WeftError, match=r"dlse: expected \[1, 2, 8\]"):
        torch.ops.weft.attention_backward(out, lse[..., :7], out, lse, *call, wanted)
    with pytest.raises(weft.WeftError, match=r"lse: expected \[1, 2, 8\]"):
        torch.ops.weft.attention_backward(out, None, out, lse[:, :1], *call, wanted)
    with pytest.raises(weft.WeftError, match=r"out: expected \[1, 2, 8, 16\]"):
        torch.ops.weft.attention_backward(out, None, out[:, :, :7], lse, *call, wanted)


# -- what is kept ------------------------------------------------------------------------------------------------------
@TARGETS
def test_no_tensor_of_a_call_is_kept(target: str) -> None:
    gc.freeze()  # what is older is not looked at, which takes seconds
    made = [t.requires_grad_() for t in three(20)]
    ids, offset = torch.zeros(20, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    PACKED(*made, doc=ids, target=target).sum().backward()
    PACKED(*made, doc=ids, q_offset=offset, target=target).sum().backward()
    seen = [weakref.ref(t) for t in (*made, ids, offset)]
    del made, ids, offset
    gc.collect()
    assert not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("method", ["__call__", "reference"])
def test_tensors_go_with_their_last_name(method: str) -> None:
    """And not when Python next looks for circles, as gradients of operands and the definition would have it."""
    variant = weft.Attention(score * gain[head], sink=gain[head], name="prepared_no_circles")
    attend = getattr(variant, method)
    gc.freeze()  # what is older is not looked at, which takes seconds
    attend(*three(20), gain=torch.ones(2))
    gc.collect()
    gc.disable()
    try:
        made = [t.requires_grad_() for t in (*three(20), torch.ones(2))]
        sum(t.sum() for t in attend(*made[:3], gain=made[3], return_lse=True)).backward()
        seen = [weakref.ref(t) for t in made]
        del made
        assert [ref() is None for ref in seen] == [True] * 4
    finally:
        gc.enable()


def test_a_variant_that_is_called_in_many_sizes_hardly_grows() -> None:
    variant = RECENT.replace(name="prepared_bounded")
    for length in range(1, 200):
        variant(rows(1), rows(length), rows(length), window=length)
    assert len(variant._variant._sizes._proven) <= 16  # powers of two of the length and of the offset


class Layer(torch.nn.Module):
    def __init__(self, attention: weft.Attention) -> None:
        super().__init__()
        self.attention = attention
        self.gain = torch.nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.attention(query, key, value, gain=self.gain)


def saved_and_loaded(found: Any) -> Any:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), saved_and_loaded],
    ids=["copy", "deepcopy", "pickle", "save"],
)  # fmt: skip
def test_copies_and_pickles(again: Callable[[Any], Any], called: bool) -> None:
    """Of a variant and of a module that holds one: the same variant, whether it was called or not."""
    variant, tensors = SCALED.replace(name=f"prepared_copied_{called}"), three(12)
    layer = Layer(variant)
    expected = layer(*tensors) if called else None
    found, module = again(variant), again(layer)
    assert found == variant and found._variant is variant._variant and module.attention == variant
    assert hash(found) == hash(variant) and str(found) == str(variant)
    out = module(*tensors)
    assert torch.equal(out, layer(*tensors)) and (expected is None or torch.equal(out, expected))
    out.sum().backward()
    assert module.gain.grad is not None
    assert torch.equal(found(*tensors, gain=module.gain), out)


def attend(layer: Layer, tensors: Sequence[Tensor]) -> list[Tensor]:
    """In another process: plain numbers come back."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = layer(*leaves)
    return [t.detach() for t in (out, *torch.autograd.grad(out.sum(), leaves))]


def attend_in_numbers(layer: Layer, tensors: Sequence[Tensor]) -> list[Any]:
    return [t.numpy() for t in attend(layer, tensors)]


def test_a_module_in_a_spawned_process() -> None:
    layer, tensors = Layer(SCALED), three(12)
    expected = attend(layer, tensors)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(attend_in_numbers, (layer, tensors))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), wanted)


# -- threads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("repeat", range(3))
@TARGETS
def test_threads_that_declare_and_call_at_once(target: str, repeat: int) -> None:
    tensors, weights = three(20), torch.randn(2)
    together = threading.Barrier(8)

    def work(number: int) -> tuple[Variant, list[Tensor]]:
        together.wait()
        variant = weft.Attention(
            score=score * weft.exp(gain[head]) + 0.25 * repeat * (kv_pos - q_pos), mask=masks.causal,
            name=f"prepared_threads_{target}",
        )  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = variant(*leaves, gain=weights, target=target)
        return variant._variant, [out, *torch.autograd.grad(out.sum(), leaves)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert len({id(variant) for variant, _ in found}) == 1
    for _, results in found[1:]:
        assert all(map(torch.equal, results, found[0][1]))
    check(weft.parse_attention(found[0][0].text), target, tensors, gain=weights)


# -- the op ------------------------------------------------------------------------------------------------------------
def test_gradients_of_a_call_that_is_ready_are_those_of_the_op() -> None:
    variant = SCALED.replace(name="prepared_recorded")
    leaves = [rows(12).requires_grad_() for _ in range(3)] + [torch.randn(2, requires_grad=True)]

    def attended(query: Tensor, key: Tensor, value: Tensor, gain: Tensor) -> Tensor:
        out, lse = variant(query, key, value, gain=gain, return_lse=True)
        return (out * out).sum() + lse.sin().sum()

    def watched() -> list[Tensor]:
        with torch.profiler.profile():
            return list(torch.autograd.grad(attended(*leaves), leaves))

    through_op = watched()  # the first call, and under a profiler: dispatched by torch
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(attended(*leaves), leaves), through_op))
    some = torch.autograd.grad(attended(*leaves), [leaves[1], leaves[3]])
    assert torch.equal(some[0], through_op[1]) and torch.equal(some[1], through_op[3])
    kept = torch.autograd.grad(checkpoint(attended, *leaves, use_reentrant=False), leaves)
    assert all(map(torch.equal, kept, through_op))
    frozen = [leaves[0].detach(), *leaves[1:]]
    assert torch.equal(torch.autograd.grad(attended(*frozen), leaves[1])[0], through_op[1])
    frozen[3] = leaves[3].detach()  # nothing reads q.k then, so that the cpu target scales rows in place of scores
    same = torch.autograd.grad(attended(*frozen), leaves[1])[0]
    torch.testing.assert_close(same, through_op[1], rtol=1e-4, atol=1e-4)
    (first,) = torch.autograd.grad(attended(*leaves), leaves[0], create_graph=True)
    with pytest.raises(weft.WeftError, match="second derivatives are not available"):
        first.sum().backward()


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_tensors_whose_memory_was_given_back_are_refused(target: str) -> None:
    q, k, v = three(8)
    pair, gain = torch.randn(2, *k.shape), torch.ones(2)
    SCALED(q, k, v, gain=gain, target=target)
    views = pair[0], pair[1]  # one begins where its storage does, and one behind it
    pair.untyped_storage().resize_(0)
    for freed in views:
        with pytest.raises(weft.WeftError, match="key: expected a tensor with memory.*resized to 0 bytes"):
            SCALED(q, freed, v, gain=gain, target=target)
    gain.untyped_storage().resize_(0)
    with pytest.raises(weft.WeftError, match="gain: expected a tensor with memory"):
        SCALED(q, k, v, gain=gain, target=target)
    SCALED(q, k, v, gain=torch.ones(2), target=target)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize("repeats", [0, 3])
def test_a_tensor_that_is_gone_before_the_backward_is_named(target: str, repeats: int) -> None:
    causal = weft.Attention(mask=weft.masks.causal, name="causal")

    def after(change: Callable[..., object]) -> None:
        leaves, gradient = [t.requires_grad_() for t in three(8)], torch.ones(three(8)[0].shape)
        for _ in range(repeats):
            causal(*leaves, target=target).sum().backward()
        out, lse = causal(*leaves, target=target, return_lse=True)
        change(*leaves, out, lse, gradient)
        torch.autograd.grad(out, leaves, gradient)

    names = ("query", "key", "value", "out", "lse", "dout")
    for place, name in enumerate(names):
        if target == "cpu" and name == "lse":  # callers have a copy of what torch's own kernel gave
            after(lambda *given, place=place: given[place].untyped_storage().resize_(0))
            continue
        with pytest.raises(weft.WeftError, match=rf"causal: {name}: expected a tensor with memory.*resized"):
            after(lambda *given, place=place: given[place].untyped_storage().resize_(0))
        if place < 3:
            with pytest.raises(weft.WeftError, match=rf"{name}: expected what the forward read, got .* \[0\]"):
                after(lambda *given, place=place: setattr(given[place], "data", torch.empty(0)))
