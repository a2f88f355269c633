"""Calls in what settings and torch put around them: other targets, graphs, modes, programs that are exported."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests import fresh
from weft import head, kv_pos, masks, q_pos, score
from weft.runtime import driver

from .test_prepared import HEATED, RECENT, SCALED, gain, heat, three, window

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Target and direction of everything that is prepared, in order."""
    seen: list[tuple[str, str]] = []
    compile_kernels = driver.compile_kernels

    def recorded(attention: Any, signature: Any, *arguments: Any) -> Any:
        made = compile_kernels(attention, signature, *arguments)
        seen.append((made.resolved.target.name, signature.direction))
        return made

    monkeypatch.setattr(driver, "compile_kernels", recorded)
    return seen


# -- targets that settings name ----------------------------------------------------------------------------------------
def in_a_thread(work: Callable[[], Any]) -> Any:
    """What a thread of its own gives: no block of settings holds there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("run", [lambda work: work(), in_a_thread], ids=["here", "thread"])
def test_the_target_of_a_block_holds_for_backward_passes_anywhere(
    run: Callable[[Any], Any], watched: bool, chosen: list[tuple[str, str]]
) -> None:
    variant = RECENT.replace(name=f"prepared_block_{watched}_{run is in_a_thread}")
    leaves = [t.requires_grad_() for t in three(12)]
    with weft.settings(target="interpret"), torch.profiler.profile() if watched else weft.settings():
        out = variant(*leaves, window=3)
    run(lambda: out.sum().backward())
    assert chosen == [("interpret", "forward"), ("interpret", "backward")]
    variant(*leaves, window=3).sum().backward()
    assert chosen[2:] == [("cpu", "forward"), ("cpu", "backward")]


def test_the_target_of_the_environment(monkeypatch: pytest.MonkeyPatch, chosen: list[tuple[str, str]]) -> None:
    variant, leaves = RECENT.replace(name="prepared_environment"), [t.requires_grad_() for t in three(12)]
    monkeypatch.setenv("WEFT_TARGET", "interpret")
    out = variant(*leaves, window=3)
    monkeypatch.delenv("WEFT_TARGET")
    in_a_thread(lambda: out.sum().backward())
    assert chosen == [("interpret", "forward"), ("interpret", "backward")]
    monkeypatch.setenv("WEFT_TARGET", "interpret")
    with weft.settings(target="cpu"):
        variant(*leaves, window=3)
    variant(*leaves, window=3, target="cpu")
    assert chosen[2:] == [("cpu", "forward")]
    monkeypatch.setenv("WEFT_TARGET", "tpu")
    with pytest.raises(weft.WeftError, match="WEFT_TARGET: expected one of"):
        variant(*leaves, window=3)


@pytest.mark.parametrize("by", ["block", "environment", "argument"])
def test_the_target_of_a_compiled_graph(
    by: str, monkeypatch: pytest.MonkeyPatch, chosen: list[tuple[str, str]]
) -> None:
    torch._dynamo.reset()
    variant, leaves = RECENT.replace(name=f"prepared_graph_{by}"), [t.requires_grad_() for t in three(12)]
    given = {"target": "interpret"} if by == "argument" else {}
    compiled = torch.compile(lambda *t: variant(*t, window=3, **given), fullgraph=True, backend="aot_eager")
    if by == "environment":
        monkeypatch.setenv("WEFT_TARGET", "interpret")
    with weft.settings(target="interpret" if by == "block" else None):
        out = compiled(*leaves)
    found = in_a_thread(lambda: torch.autograd.grad(out.sum(), leaves))
    assert chosen == [("interpret", "forward"), ("interpret", "backward")]
    for got, wanted in zip(found, torch.autograd.grad(variant(*leaves, window=3, target="cpu").sum(), leaves)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# -- torch.compile and export ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_float_scalars_recompile_at_most_once(training: bool) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    tensors = three(12)

    def attended(call: Callable[..., Any], number: float) -> list[Tensor]:
        leaves = [t.clone().requires_grad_(training) for t in tensors]
        out = call(*leaves, number)
        return [out, *(torch.autograd.grad(out.sum(), leaves) if training else ())]

    def scaled(query: Tensor, key: Tensor, value: Tensor, number: float) -> Any:
        return HEATED(query, key, value, heat=number)

    compiled = torch.compile(scaled, fullgraph=True, backend=backend)
    for step in range(20):
        for got, wanted in zip(attended(compiled, 0.3 + 0.07 * step), attended(scaled, 0.3 + 0.07 * step)):
            torch.testing.assert_close(got, wanted)
    assert backend.frame_count <= 2


@pytest.mark.parametrize("wrong", [True, 1.5])
def test_a_compiled_call_refuses_what_an_eager_call_refuses(wrong: Any) -> None:
    torch._dynamo.reset()
    tensors = three(8)
    compiled = torch.compile(lambda *t: RECENT(*t, window=wrong), backend="aot_eager")
    for call in (compiled, lambda *t: RECENT(*t, window=wrong)):
        with pytest.raises(weft.WeftError, match=f"window: expected an int, got {wrong}"):
            call(*tensors)
    # Dynamo wraps what is raised while it traces a whole graph
    whole = torch.compile(lambda *t: RECENT(*t, window=wrong), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"window: expected an int, got {wrong}"):
        whole(*tensors)


def test_an_exported_program_runs_where_only_weft_is_imported(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scored = score * weft.exp(gain[head]) * heat
            self.attention = weft.Attention(scored, masks.causal & (q_pos - kv_pos < window), name="prepared_exported")
            self.gain = torch.nn.Parameter(torch.tensor([0.5, -0.5]))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return self.attention(query, key, value, gain=self.gain, heat=0.7, window=5)

    model, tensors = Model(), three(12)
    torch.export.save(torch.export.export(model, tensors), tmp_path / "model.pt2")
    torch.save((tensors, model(*tensors).detach()), tmp_path / "expected.pt")
    code = f"""
        import torch, weft
        tensors, expected = torch.load({str(tmp_path / "expected.pt")!r})
        found = torch.export.load({str(tmp_path / "model.pt2")!r}).module()(*tensors)
        torch.testing.assert_close(found, expected)
        print("equal")
    """
    run = fresh.run(textwrap.dedent(code))
    assert run.stdout == "equal\n", run.stderr


# -- who watches -------------------------------------------------------------------------------------------------------
class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_who_watches_ops_sees_a_call_that_is_ready() -> None:
    variant = RECENT.replace(name="prepared_watched")
    q, k, v = (t.requires_grad_() for t in three(8))
    for _ in range(2):
        variant(q, k, v, window=3).sum().backward()
    with Seen() as seen:
        variant(q, k, v, window=3).sum().backward()
    assert {"weft.attention.default", "weft.attention_backward.default"} <= set(seen.names)
    out = variant(q, k, v, window=3)
    with Seen() as seen:
        out.sum().backward()
    assert "weft.attention_backward.default" in seen.names
    with torch.profiler.profile() as profile:
        variant(q, k, v, window=3).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"weft::attention", "weft::attention_backward"} <= names
    assert {"weft::prepared_watched", "weft::prepared_watched_backward"} <= names
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(variant(q, k, v, window=3), FakeTensor)
    with Seen() as seen:
        torch.func.vmap(lambda x: variant(x[None], k[:1], v[:1], window=3))(q.detach())
    assert seen.names.count("weft.attention.default") == 1


def test_tensors_without_data_give_results_without_data() -> None:
    query = torch.empty(2, 4, 7, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(2, 2, 9, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    value = torch.empty(2, 2, 9, 24, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(4, device="meta", requires_grad=True)
    out, lse = SCALED(query, key, value, gain=weights, return_lse=True)
    assert out.is_meta and (out.shape, out.dtype) == ((2, 4, 7, 24), torch.bfloat16)
    assert lse.is_meta and (lse.shape, lse.dtype) == ((2, 4, 7), torch.float32)
    leaves = [query, key, value, weights]
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum() + lse.sum(), leaves)):
        assert gradient.is_meta and (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)


def test_latent_tensors_without_data() -> None:
    latent = weft.Attention(mask=masks.causal, scale=0.2, latent=weft.Latent(rank=32, rope=16), name="prepared_meta")
    wide, cache = torch.empty(2, 4, 7, 48, device="meta"), torch.empty(2, 1, 9, 48, device="meta")
    assert latent(wide, cache).shape == (2, 4, 7, 32)


def test_autocast_leaves_float64_alone() -> None:
    tensors = [t.double().requires_grad_() for t in three(12)]
    expected = RECENT(*tensors, window=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = RECENT(*tensors, window=5)
        assert RECENT(*three(12), window=5).dtype == torch.bfloat16
    assert found.dtype == torch.float64 and torch.equal(found, expected)
    for got, wanted in zip(torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors)):
        assert got.dtype == torch.float64 and torch.equal(got, wanted)
