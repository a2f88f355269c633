"""The direct way of a call with lengths launches what the longer one does: told from the arguments of its kernels.

The way is for GPUs. Here its function is made on a CPU for Triton's interpreter, and its launches are written down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import batch, kv_pos, masks, q_pos

pytest.importorskip("triton")
from weft.codegen.launch import launching
from weft.codegen.launch.binding import Launch
from weft.codegen.launch.device import Device
from weft.codegen.launch.division import Division
from weft.compiler.planning.splits import Parts

from ..recorded import Recorded
from ..support import calls_of, long_from

doc = weft.tensor("doc", 2, int)
VARIANTS = {
    "causal": (weft.Attention(mask=masks.causal, name="shortest_causal"), {}),
    "measured": (
        weft.Attention(mask=masks.causal & (doc[batch, q_pos] == doc[batch, kv_pos]), name="shortest_measured"),
        {"doc": torch.zeros(3, 64, dtype=torch.int64)},
    ),
}
CALLS: dict[str, tuple[int, dict[str, Any]]] = {  # batch rows, options
    "padded": (3, {"q_lens": torch.tensor([3, 40, 0]), "kv_lens": torch.tensor([64, 40, 3], dtype=torch.int32)}),
    "one side, offset": (3, {"kv_lens": torch.tensor([64, 40, 3]), "q_offset": 2}),
    "packed": (1, {"cu_seqlens_q": torch.tensor([0, 3, 44, 60])}),
    "packed, offsets": (
        1, {"cu_seqlens_q": torch.tensor([0, 3, 44, 60]), "q_offset": torch.tensor([1, 2, 3], dtype=torch.int32)}
    ),
    "dense": (3, {}),
}  # fmt: skip
# of a decode with one query a sequence
LENS = {"kv_lens": torch.tensor([64, 40, 3], dtype=torch.int32)}
DECODES: dict[str, dict[str, Any]] = {
    "contiguous": {}, "lengths": LENS, "pages": {**LENS, "block_table": torch.arange(12).int().view(3, 4)},
}  # fmt: skip
Launched = list[tuple[str, int, dict[str, Any]]]


class _Run:
    """A kernel, and its launches by either way."""

    def __init__(self, run: Any, binding: Any, longer: Launched, shortest: Launched) -> None:
        self.run, self.binding, self.longer, self._shortest = run, binding, longer, shortest

    def __call__(self, programs: int, arguments: Any, stream: int) -> None:
        if programs:
            self.longer.append((self.binding.name, programs, dict(zip(self.binding.parameters, arguments))))
        self.run(programs, arguments, stream)

    @property
    def shortest(self) -> Launch:
        def launch(programs: int, _y: int, _z: int, stream: int, fixed: object, *arguments: Any) -> None:
            self._shortest.append((self.binding.name, programs, dict(zip(self.binding.parameters, arguments))))

        return Launch(launch, (None,))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[Launched, Launched]:
    longer: Launched = []
    shortest: Launched = []
    compiled, made = Device.compiled, Device.__init__

    def here(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.number, self.goes_directly = -1, True  # -1: what CPU tensors say of theirs
        self.current = lambda: -1
        self.empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)

    def recorded(self: Any, asked: Any) -> list[Any]:
        runs = compiled(self, asked)
        return [_Run(run, one.binding, longer, shortest) for run, one in zip(runs, asked)]

    monkeypatch.setattr(Device, "__init__", here)
    monkeypatch.setattr(Device, "compiled", recorded)
    monkeypatch.setattr(launching, "stream_function", lambda: lambda device: 0)
    return longer, shortest


@pytest.mark.parametrize(("name", "few"), [("causal", 64), ("measured", 64), ("measured", 8)])
@pytest.mark.parametrize("call", CALLS)
def test_both_ways_launch_the_same(
    name: str, few: int, call: str, launched: tuple[Launched, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """few: positions of an axis that is not long, of which others are measured by other kernels."""
    longer, shortest = launched
    long_from(monkeypatch, few)
    (declared, operands), (rows, options) = VARIANTS[name], CALLS[call]
    variant = declared.replace(name=f"{declared.name}_{list(CALLS).index(call)}_{few}")
    q_rows = 64 if rows == 1 else 40
    leaves = [torch.randn(rows, heads, n, 16).requires_grad_() for heads, n in ((2, q_rows), (1, 64), (1, 64))]

    def step() -> None:
        out = variant(*leaves, **operands, **options, target="interpret")
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    step()
    by_hand = list(longer)
    assert not shortest
    longer.clear()
    step()
    assert not longer
    assert [found[:2] for found in shortest] == [found[:2] for found in by_hand]
    assert ("kv_ends" in [found[0] for found in by_hand]) == (few < 64)
    for (kernel, _, given), (_, _, short) in zip(by_hand, shortest):
        for parameter, value in given.items():
            got, where = short[parameter], f"{kernel}: {parameter}"
            if not isinstance(value, torch.Tensor):
                assert got == value, where
            elif value.data_ptr() in {t.data_ptr() for t in (*leaves, *operands.values())}:
                assert got == value.data_ptr(), where
            else:
                assert isinstance(got, int) and got > 0, where


MLA = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=32, rope=16), scale=0.1, name="shortest_latent")


@pytest.mark.parametrize("kind", ["contiguous", "lengths", "pages"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("per", [None, "head", "token"])
def test_rotary_columns_apart_go_both_ways(
    per: str | None, rows: int, kind: str, launched: tuple[Launched, Launched]
) -> None:
    """per: of what a latent cache of FP8 has a descale; None: it has 32 bits."""
    longer, shortest = launched
    variant = MLA.replace(name=f"shortest_latent_{kind}_{rows}_{per}")
    sizes = (12, 1, 16) if kind == "pages" else (3, 1, 64)
    query, cache = torch.randn(3, 4, rows, 48), torch.randn(*sizes, 32)
    given = {**DECODES[kind], "rope": torch.randn(*sizes, 16)}
    if per is not None and kind == "pages":
        cache8, scale = weft.fp8.quantize(cache, per=per), torch.rand(1, 1, 1, 1) + 0.5
        cache, given["k_descale"] = cache8.data, cache8.descale if per == "token" else scale
    elif per is not None:
        cache, given["k_descale"] = weft.fp8.quantize(cache, per=per)
    variant(query, cache, **given, target="interpret")
    by_hand = list(longer)
    assert by_hand and not shortest
    longer.clear()
    for _ in range(4):
        variant(query, cache, **given, target="interpret")
    assert not longer and len(shortest) == 4 * len(by_hand)
    there = {t.data_ptr() for t in (query, cache, *given.values())}
    for (kernel, programs, own), short in zip(by_hand * 4, shortest, strict=True):
        assert (kernel, programs) == short[:2]
        for parameter, value in own.items():
            got = short[2][parameter]
            if not isinstance(value, torch.Tensor):
                assert got == value, parameter
            else:
                assert got == value.data_ptr() if value.data_ptr() in there else got > 0, parameter
    assert "key1" in by_hand[0][2]


def test_nothing_is_launched_on_memory_that_was_given_back(launched: tuple[Launched, Launched]) -> None:
    variant, shortest = weft.Attention(mask=masks.causal, name="given_back"), launched[1]
    query, *keys = (torch.randn(1, 2, 40, 16) for _ in range(3))
    for _ in range(4):
        variant(query, *keys, target="interpret")
    assert shortest
    shortest.clear()
    freed = torch.randn(1, 2, 40, 16)
    freed.untyped_storage().resize_(0)
    for given in ([freed, *keys], [query, freed, keys[1]], [query, keys[0], freed]):
        with pytest.raises(weft.WeftError, match="expected a tensor with memory"):
            variant(*given, target="interpret")
    assert not shortest


@pytest.mark.parametrize("kind", DECODES)
def test_what_a_step_of_a_decode_costs_the_host(
    kind: str, launched: tuple[Launched, Launched], recorded: Recorded
) -> None:
    """In calls of functions, launches counted."""
    longer, shortest = launched
    variant = VARIANTS["causal"][0].replace(name=f"shortest_decode_{kind}")
    key = torch.randn(12, 1, 16, 16) if kind == "pages" else torch.randn(3, 1, 64, 16)
    query = torch.randn(3, 2, 1, 16)
    number = calls_of(lambda: variant(query, key, key, **DECODES[kind], target="interpret", schedule="split_kv"))
    assert len(longer) and len(shortest) == 4 * len(longer)  # of five runs, the first goes the longer way
    recorded("calls", repeats=number)
    assert number < 100


@pytest.fixture
def asked(launched: tuple[Launched, Launched], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled, in order."""
    names: list[str] = []
    compiled = Device.compiled

    def recorded(self: Any, asked: Any) -> list[Any]:
        names.extend(one.binding.name for one in asked)
        return compiled(self, asked)

    monkeypatch.setattr(Device, "compiled", recorded)
    return names


def test_what_a_call_does_not_launch_is_compiled_by_the_first_that_does(
    launched: tuple[Launched, Launched], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    longer, shortest = launched
    long_from(monkeypatch, 32)
    declared, _ = VARIANTS["measured"]
    variant = declared.replace(name="shortest_first_calls")

    def step(n: int, target: str = "interpret") -> list[torch.Tensor]:
        torch.manual_seed(n)
        leaves = [torch.randn(1, 2, n, 16).requires_grad_() for _ in range(3)]
        out = variant(*leaves, doc=torch.arange(n)[None] // 24, target=target)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def check(n: int) -> None:
        for got, wanted in zip(step(n), step(n, "cpu")):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    check(32)
    forward, backward = ["kv_spans", "flash_forward"], ["kv_spans", "flash_dquery", "q_spans", "flash_dkey_dvalue"]
    assert [name for name in asked if name != "row_statistics"] == [*forward, *backward]
    asked.clear()
    check(64)  # by the longer way, since the shortest would launch what is not there
    assert asked == ["kv_ends", "kv_long_spans", "kv_ends", "kv_long_spans", "q_ends", "q_long_spans"]
    assert not shortest
    asked.clear()
    longer.clear()
    for n in (32, 64):  # by the direct way, either
        step(n)
    assert not asked and not longer
    assert {"kv_spans", "kv_long_spans", "q_spans", "q_long_spans"} <= {name for name, *_ in shortest}


def test_parts_are_joined_by_a_kernel_that_is_compiled_where_there_are_parts(
    launched: tuple[Launched, Launched], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shortest = launched
    parts = [1]
    monkeypatch.setattr(Division, "_parts", lambda *sizes: Parts(parts[0], 1))
    variant = VARIANTS["causal"][0].replace(name="shortest_parts")
    query = torch.randn(1, 2, 1, 16)

    def step(n: int) -> list[str]:
        launched_before = len(shortest)
        key = torch.randn(1, 1, n, 16)
        with torch.no_grad():
            out = variant(query, key, key, target="interpret", schedule="split_kv")
            wanted = variant.reference(query, key, key)
        found = [name for name, *_ in shortest[launched_before:]]
        if not found:
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        return found

    assert not step(64) and asked == ["split_forward"]
    assert step(64) == ["split_forward"]
    parts[0] = 2
    assert not step(512) and asked == ["split_forward", "join_parts"]
    assert step(512) == ["split_forward", "join_parts"]
    assert step(64) == ["split_forward"] and len(asked) == 2
