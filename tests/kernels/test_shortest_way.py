"""The shortest way of a call with lengths launches what the longer one does: told from the arguments of its kernels.

The way is for GPUs. Here its function is made on a CPU for Triton's interpreter, and its launches are written down.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import batch, kv_pos, masks, q_pos

pytest.importorskip("triton")
from weft.codegen import launching
from weft.codegen.binding import Launch
from weft.codegen.targets.triton_launcher import TritonLauncher

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
# of a decode with one query a sequence, and functions that such a call calls at most, launches counted
DECODES: dict[str, tuple[dict[str, Any], int]] = {
    "contiguous": ({}, 78),
    "lengths": ({"kv_lens": torch.tensor([64, 40, 3], dtype=torch.int32)}, 86),
    "pages": (
        {"kv_lens": torch.tensor([64, 40, 3], dtype=torch.int32), "block_table": torch.arange(12).int().view(3, 4)}, 90
    ),
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
    compiled, made = TritonLauncher._compiled, TritonLauncher.__init__

    def here(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.device = -1  # what CPU tensors say of theirs
        self.empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)

    def recorded(self: Any, bindings: Any, options: Any, typed: Any) -> list[Any]:
        runs = compiled(self, bindings, options, typed)
        return [_Run(run, binding, longer, shortest) for run, binding in zip(runs, bindings)]

    monkeypatch.setattr(TritonLauncher, "__init__", here)
    monkeypatch.setattr(TritonLauncher, "_compiled", recorded)
    monkeypatch.setattr(TritonLauncher, "_may_go_directly", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
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


@pytest.mark.parametrize("kind", DECODES)
def test_what_a_step_of_a_decode_costs_the_host(kind: str, launched: tuple[Launched, Launched]) -> None:
    longer, shortest = launched
    options, most = DECODES[kind]
    variant = VARIANTS["causal"][0].replace(name=f"shortest_decode_{kind}")
    key = torch.randn(12, 1, 16, 16) if kind == "pages" else torch.randn(3, 1, 64, 16)
    query = torch.randn(3, 2, 1, 16)
    number = calls_of(lambda: variant(query, key, key, **options, target="interpret", schedule="split_kv"))
    assert len(longer) and len(shortest) == 2 * len(longer)
    assert number <= most
