"""Calls that are short, and others: each launches the kernel of its plan, whatever came before, and that one is right.

Launches on CPU tensors are written down; kernels run in gluon.py.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import weft
from weft import head, kv_pos, masks, q_pos, score

pytest.importorskip("triton")
from weft.codegen import torch_private
from weft.codegen.launch.launcher import KernelLauncher
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.machines.hardware import by_name
from weft.compiler.planning.signature import is_short_call
from weft.runtime import driver
from weft.runtime.call import Call, Choices, Dense

from ..attention.gluon import OnACpu
from ..support import calls_of, check_errors, mostly
from .written_launches import Launches, written

CAUSAL = weft.Attention(mask=masks.causal, name="short_causal")
FULL = weft.Attention(name="short_full")
FORWARD = "flash_forward"


class Forms:
    """What was compiled and launched, as (kernel, form), in order."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []
        self.launched: list[tuple[str, str]] = []

    def forwards(self) -> list[str]:
        """Forms of the forwards that were launched since this was asked."""
        found = [form for name, form in self.launched if name == FORWARD]
        self.launched.clear()
        return found


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Forms:
    launches, found = written(monkeypatch), Forms()
    compile_these = KernelLauncher._compile_these

    def one_by_one(self: Any, due: Any, ready: Any, *given: Any) -> None:
        before = set(ready.runs)
        compile_these(self, due, ready, *given)
        for n in sorted(ready.runs.keys() - before):
            name = ready.bindings[n].name
            known = {name: str(choice.form) for name, choice in self.code.schedule.kernels.items()}
            found.compiled.append((name, known.get(name, "")))
            ready.runs[n].launches = _Named(launches, found.launched, found.compiled[-1])

    monkeypatch.setattr(KernelLauncher, "_compile_these", one_by_one)
    return found


class _Named:
    """Writes down which kernel was launched besides."""

    def __init__(self, launches: Launches, seen: list[tuple[str, str]], name: tuple[str, str]) -> None:
        self.launches, self.seen, self.name = launches, seen, name

    def written(self, *given: Any) -> None:
        self.seen.append(self.name)
        self.launches.written(*given)


def qkv(
    q_len: int, kv_len: int | None = None, dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    return [torch.randn(1, heads, n, dim).to(dtype) for heads, n in zip((4, 2, 2), (q_len, *(kv_len or q_len,) * 2))]


def planned(variant: weft.Attention, tensors: list[torch.Tensor], **options: Any) -> str:
    shape = weft.shape(
        heads=4, kv_heads=2, q_len=tensors[0].shape[2], kv_len=tensors[1].shape[2], head_dim=tensors[0].shape[3],
        dtype={torch.bfloat16: "bf16", torch.float16: "fp16"}[tensors[0].dtype],
    )  # fmt: skip
    plan = variant.plan(shape, device="h200", target="hopper", **options)
    return str(plan.code("forward").form(FORWARD))


LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 192, 193, 197, 255, 256, 257, 384, 385, 512, 513, 1023, 1024, 1025, 1100]


@pytest.mark.parametrize("variant", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
def test_a_call_launches_the_form_of_its_plan(variant: weft.Attention, backward: bool, forms: Forms) -> None:
    """In any order, called once or again: and of each form one kernel is compiled, and one module loaded."""
    own = variant.replace(name=f"{variant.name}_{backward}")
    own._variant.forget()
    before, lengths = driver.builds(), 3 * [n for n in LENGTHS if n > 16]
    random.Random(7).shuffle(lengths)
    for n in lengths:
        tensors = [t.requires_grad_(backward) for t in qkv(n)]
        for _ in range(3):
            out = own(*tensors, target="hopper")
            if backward:
                torch.autograd.grad(out, tensors, torch.ones_like(out))
        assert forms.forwards() == 3 * [planned(own, tensors)], n
    compiled = Counter(name for name, _ in forms.compiled)
    assert compiled.pop(FORWARD) == 2 and set(compiled.values()) <= {1}
    assert driver.builds() - before == 2 + backward


@pytest.mark.parametrize("first", [200, 2048])
def test_the_other_form_is_compiled_when_it_is_met(first: int, forms: Forms) -> None:
    own = CAUSAL.replace(name=f"short_met_{first}")
    own._variant.forget()
    before = driver.builds()
    for n in (first, first + 1, first - 5):
        own(*qkv(n), target="hopper")
    assert len(forms.compiled) == 1 and driver.builds() == before + 1
    for n in (2048, 200, 4096, 512, 100):
        own(*qkv(n), target="hopper")
        assert len(forms.compiled) <= 2 and driver.builds() <= before + 2
    assert len(forms.compiled) == 2


@pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")
@pytest.mark.parametrize("lengths", [[512, 513, 514, 515, 640, 900, 512, 700, 300, 512, 2000, 512, 512, 512]])
def test_keys_that_grow_change_the_form(lengths: list[int], forms: Forms) -> None:
    """Chunks of a prompt: the first sees no more keys than it has queries, half of which the mask hides."""
    own = CAUSAL.replace(name="short_grown")
    own._variant.forget()
    query, key, value = qkv(512, 2000)
    for n in 3 * lengths:
        tensors = [query, key[:, :, :n], value[:, :, :n]]
        own(*tensors, target="hopper")
        assert forms.forwards() == [planned(own, tensors)], n
    assert len(forms.compiled) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_schedules_that_are_asked_for(dtype: torch.dtype, forms: Forms) -> None:
    """A form that is named is that of all lengths; an algorithm alone leaves the choice."""
    own = FULL.replace(name=f"short_asked_{str(dtype)[6:]}")
    own._variant.forget()
    text = "flash/flash_forward=hopper:192x128s3q2+pairs"
    for n in (64, 256, 2048):
        tensors = qkv(n, dtype=dtype)
        own(*tensors, schedule=text)
        assert forms.forwards() == ["192x128s3q2+pairs"] == [planned(own, tensors, schedule=text)]
    assert len(forms.compiled) == 1
    for n in (1, 64, 256, 2048):
        tensors = qkv(n, dtype=dtype)
        own(*tensors, schedule="flash", target="hopper")
        assert forms.forwards() == [planned(own, tensors, schedule="flash")]


slopes = weft.tensor("slopes", 1)
ALIBI = weft.Attention(score + slopes[head] * (kv_pos - q_pos), masks.causal, name="short_alibi")


@pytest.mark.parametrize(
    ("variant", "dim", "given"),
    [(CAUSAL, 128, {}), (ALIBI, 64, {"slopes": torch.ones(4)}), (FULL, 64, {"kv_lens": torch.tensor([9])})],
    ids=["D128", "alibi", "lengths"],
)  # fmt: skip
def test_what_has_one_form_is_prepared_once(variant: weft.Attention, dim: int, given: Any, forms: Forms) -> None:
    own = variant.replace(name=f"{variant.name}_once_{dim}")
    own._variant.forget()
    given = {n: v.int() if n == "kv_lens" else v for n, v in given.items()}
    for n in (100, 256, 512, 2048, 17):
        own(*qkv(n, dim=dim), target="hopper", **given)
    assert len(set(forms.forwards())) == 1 and len(forms.compiled) == 1
    assert len(own._variant._forwards) == 1


def test_lengths_that_a_graph_leaves_open(forms: Forms) -> None:
    """A traced call has symbols for lengths: the form is chosen where the op runs."""
    own = FULL.replace(name="short_traced")
    own._variant.forget()
    graphs = []

    def counted(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    traced = torch.compile(lambda q, k, v: own(q, k, v, target="hopper"), backend=counted, dynamic=True, fullgraph=True)
    for n in (300, 200, 129, 2000, 256, 257, 64, 1025):
        tensors = qkv(n)
        traced(*tensors)
        assert forms.forwards() == [planned(own, tensors)], n
    assert len(graphs) == 1 and len(forms.compiled) == 2


@pytest.mark.skipif(torch_private.guard is None, reason="this torch has no guards of tensors")
def test_what_a_repeated_short_call_costs_the_host(forms: Forms) -> None:
    """As much as a long one: of a call like the last one nobody asks whether it is short."""
    own = CAUSAL.replace(name="short_cost")
    own._variant.forget()
    costs = []
    for n in (2048, 512, 100):
        tensors = qkv(n)
        for _ in range(20):
            own(*tensors, target="hopper")
        costs.append(calls_of(lambda tensors=tensors: own(*tensors, target="hopper")))
    assert costs[0] == costs[1] == costs[2]


# -- results -----------------------------------------------------------------------------------------------------------
SCORES = {
    "full": {},
    "causal": {"mask": masks.causal},
    "window": {"mask": masks.sliding_window(70)},
    "cap": {"score": 20.0 * weft.tanh(score / 20.0), "mask": masks.causal},
    "sink": {"mask": masks.causal, "sink": weft.tensor("sinks", 1)[head]},
}
CASES = [("full", 1), ("full", 65), ("full", 197), ("causal", 129), ("causal", 200), ("causal", 257)]


@pytest.mark.parametrize(
    ("name", "q_len"), mostly(CASES, [(name, n) for name in SCORES for n in (1, 63, 65, 128, 129, 197, 255, 257)])
)
def test_results_of_both_forms(name: str, q_len: int) -> None:
    """Grouped heads, behind as many keys and behind others, against float64: the source is that of the plan."""
    declared = weft.Attention(**SCORES[name], name=f"short_right_{name}")
    operands = {"sinks": torch.tensor([0.5, -2.0])} if name == "sink" else {}
    for kv_len in (q_len, q_len + 70):
        torch.manual_seed(q_len)
        query, key, value = (torch.randn(1, h, n, 64).bfloat16() for h, n in ((2, q_len), (1, kv_len), (1, kv_len)))
        shape = weft.shape(heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=64)
        asked = {"target": "hopper", "schedule": "flash"}
        plan = declared.plan(shape, device="h200", **asked)
        signature = plan.code("forward").signature
        assert signature.short_call == is_short_call(q_len, kv_len, name != "full")
        made = driver.compile_kernels(declared, signature, by_name("h200"), **asked)
        assert made.source == declared.source(shape, device="h200", **asked)
        launcher = OnACpu.of(made, declared)
        out, lse = torch.full(query.shape, float("nan")).bfloat16(), torch.full(query.shape[:3], float("nan"))
        call = Call(query, key, value, None, operands, Dense(kv_len - q_len), Choices(), 64)
        results = {"out": out, "lse": lse}
        launcher(call, results, {}, launcher.partition(call, results))
        exact, usual = (
            declared.reference(
                *(t.to(dtype) for t in (query, key, value)), return_lse=True,
                **{n: t.to(dtype) for n, t in operands.items()},
            )
            for dtype in (torch.float64, torch.bfloat16)
        )  # fmt: skip
        for n, label in enumerate(("out", "lse")):
            check_errors(results[label], exact[n], usual[n], f"{label} of {kv_len} keys")
    assert facts_of(declared).traits.masked == (name != "full")
