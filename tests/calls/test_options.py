"""The list of the options of a call, and what follows from it: signatures, docs, the op's schema, and a new option."""

from __future__ import annotations

import inspect
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import batch, head, kv_pos, masks, q_pos, score
from weft.compiler.planning.signature import Signature
from weft.ir.expr import CALL_OPTIONS
from weft.plans.request import request_of
from weft.runtime import driver
from weft.runtime.call import SCHEMA, SLOTS
from weft.runtime.options import OPTIONS, taken
from weft.runtime.run import prepared

from .. import fresh
from .. import options as written

ROOT = Path(__file__).parents[2]
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
ALIBI = weft.Attention(score + weft.tensor("slopes", 1)[head] * kv_pos, masks.causal, name="alibi")
TOY = '    toy: Annotated[Tensor | None, Option("a toy", in_schema=True, defined=False)] = None\n'
WITH_A_TOY = """
import dataclasses
import torch
import weft
from weft.codegen import targets
from weft.codegen.launch.fast.ways import Ways
from weft.codegen.targets.cpu.target import CpuTarget


class Times:  # a launcher whose out is that of another, times the toy
    def __init__(self, launcher):
        self.launcher, self.fast = launcher, Ways()
        self.partition, self.workspace = launcher.partition, launcher.workspace

    def __call__(self, call, results, *rest):
        found = self.launcher(call, results, *rest)
        results["out"].mul_(call.read["toy"])
        return found


class Toy(CpuTarget):
    name = measured_by = "toy"
    by_name_only = True

    def kernels(self, algorithm, signature, facts):
        found = super().kernels(algorithm, signature, facts)
        forward = signature.direction == "forward"
        return [dataclasses.replace(k, options=frozenset({"toy"})) if forward else k for k in found]

    def bind(self, modules, code, facts, device):
        return Times(super().bind(modules, code, facts, device))


def refused(call):
    try:
        call()
    except weft.UnavailableError as error:
        return str(error)


targets.register(Toy())
causal = weft.Attention(mask=weft.masks.causal, name="causal")
x, two = torch.randn(1, 2, 80, 16), torch.tensor(2.0)
plain = causal(x, x, x)
for _ in range(4):  # repeated calls too
    torch.testing.assert_close(causal(x, x, x, toy=two, target="toy"), 2 * plain)
torch.testing.assert_close(causal(x, x, x), plain)
graph = torch.compile(lambda x: causal(x, x, x, toy=two, target="toy"), backend="eager", fullgraph=True)
torch.testing.assert_close(graph(x), 2 * plain)
mapped = torch.func.vmap(lambda x: causal(x, x, x, toy=two, target="toy"))
torch.testing.assert_close(mapped(torch.stack([x, x]))[1], 2 * plain)
assert causal.plan(x, x, x, toy=two, target="toy").code("forward").signature.options == {"toy"}
print(refused(lambda: causal(x, x, x, toy=two)))
print(refused(lambda: causal.plan(x, x, x, toy=two)))
print(refused(lambda: causal(x.clone().requires_grad_(), x, x, toy=two, target="toy").sum().backward()))
try:
    causal.reference(x, x, x, toy=two)
except weft.WeftError as error:
    print(error)
"""


def test_what_follows_from_the_list_is_written() -> None:
    """python -m tests.options writes both."""
    assert written.SIGNATURES.read_text() == written.signatures()
    assert written.PAGE.read_text() == written.page()


def test_names_of_options_are_reserved_and_stand_in_signatures_and_docstrings() -> None:
    assert OPTIONS.keys() <= CALL_OPTIONS
    for method, defined in ((weft.Attention.__call__, False), (weft.Attention.reference, True)):
        names = [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert names == taken(defined)
        assert all(f"        {name}: " in method.__doc__ for name in names)


def test_the_schema_has_the_tensors_of_options_by_name() -> None:
    schema = torch.ops.weft.attention.default._schema
    assert [a.name for a in schema.arguments if str(a.type) == "Optional[Tensor]"][2:] == [*SLOTS]
    assert f"attention({SCHEMA})".count(",") + 1 == len(schema.arguments)


def test_operands_in_a_dictionary_are_those_given_by_keyword() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    slopes = torch.rand(2)
    for call in (ALIBI, ALIBI.reference):
        assert torch.equal(call(q, k, v, operands={"slopes": slopes}), call(q, k, v, slopes=slopes))
        with pytest.raises(weft.WeftError, match="alibi: slopes: given by keyword and in operands; leave one out"):
            call(q, k, v, slopes=slopes, operands={"slopes": slopes})
        with pytest.raises(weft.WeftError, match="operands: expected a dictionary of operands by name, got list"):
            call(q, k, v, operands=[slopes])
        with pytest.raises(weft.WeftError, match="slope: unknown operand or option.*did you mean slopes"):
            call(q, k, v, operands={"slope": slopes})


def test_plans_take_them_too() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    slopes = torch.rand(2)
    for method in (ALIBI.explain, ALIBI.source):
        assert method(q, k, v, operands={"slopes": slopes}) == method(q, k, v, slopes=slopes)


@pytest.fixture(scope="module")
def with_a_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with one line more in the list of options."""
    folder = tmp_path_factory.mktemp("toy")
    shutil.copytree(ROOT / "src" / "weft", folder / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "weft" / "runtime" / "options.py"
    lines = path.read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if line.startswith("    seed: "))
    path.write_text("".join([*lines[:place], TOY, *lines[place:]]))
    return folder


def test_an_option_of_one_line_reaches_a_kernel_and_is_refused_where_none_reads_it(with_a_toy: Path) -> None:
    env = {"WEFT_CACHE_DIR": str(with_a_toy / "cache"), "PATH": ""}
    ran = fresh.run(WITH_A_TOY, env=env, cwd=with_a_toy)  # where the package is found first
    assert ran.returncode == 0, ran.stderr
    call, plan, backward, reference = ran.stdout.splitlines()
    assert call == plan == "target cpu has no kernel that reads toy"
    assert backward == "target toy has no kernel that reads toy"
    assert reference.startswith("causal: toy: unknown operand or option")


# -- a plan is of the very code that a call runs ----------------------------------------------------------------------
def _drawn(rng: random.Random) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Tensors of a call on a CPU, and options."""
    rows_of_batch, kv_heads, group = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 4])
    rows, keys, width = rng.choice([1, 5, 40, 300]), rng.choice([1, 7, 64, 4096]), rng.choice([16, 64, 128])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    kind, options = rng.choice(["dense", "dense", "lengths", "packed", "paged"]), {}
    if kind == "packed":
        rows_of_batch = 1
        options = {"cu_seqlens_q": torch.tensor([0, rows]), "cu_seqlens_kv": torch.tensor([0, 1, keys])[[0, -1]]}
    elif kind in ("lengths", "paged"):
        options = {"kv_lens": torch.full((rows_of_batch,), keys, dtype=torch.int32)}
    key = [rows_of_batch, kv_heads, keys, width]
    if kind == "paged":
        pages = -(-keys // 16)
        options["block_table"] = torch.zeros(rows_of_batch, pages, dtype=torch.int32)
        key = [4, kv_heads, 16, width]
    elif kind == "dense" and rng.random() < 0.3:
        options = {"q_offset": rng.choice([0, torch.zeros(rows_of_batch, dtype=torch.int32)])}
    if rng.random() < 0.3:
        options["deterministic"] = rng.choice([True, False])
    sizes = ([rows_of_batch, kv_heads * group, rows, width], key, key)
    return [torch.empty(size, dtype=dtype) for size in sizes], options


def _of_call(variant: weft.Attention, tensors: list[torch.Tensor], options: dict[str, Any]) -> list[Signature]:
    """What a call asks for in each direction, with gradients of all that has some; nothing is computed."""
    own, found = prepared.signature_of_call, []

    class Found(Exception):
        pass

    def signature(facts: Any, direction: str, call: Any, wanted: frozenset[str]) -> Signature:
        trained = [*call.tensors, *(n for n, v in call.operands.items() if isinstance(v, torch.Tensor))]
        found.extend([own(facts, "forward", call, wanted), own(facts, "backward", call, frozenset(trained))])
        raise Found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prepared, "signature_of_call", signature)
        variant._variant.forget()
        with pytest.raises(Found):
            variant(*tensors, **options)
    return found


def _agree(variant: weft.Attention, tensors: list[torch.Tensor], options: dict[str, Any]) -> None:
    forward, backward = _of_call(variant, tensors, options)
    asked: list[Signature] = []

    def shared_out(attention: Any, signature: Signature, *rest: Any) -> list[Signature]:
        asked.append(signature)
        return own(attention, signature, *rest)

    own = driver.shared_out
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "shared_out", shared_out)
        request_of(variant, tensors, None, None, None, None, options)
    assert asked[0] == forward, options
    assert asked[1:] in ([], [backward]), options


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(4, 20))])
def test_signatures_of_plans_are_those_of_calls(seed: int) -> None:
    """2,000 drawn calls in all."""
    rng = random.Random(seed)
    variant = weft.Attention(mask=masks.causal, name="drawn")
    for _ in range(100):
        _agree(variant, *_drawn(rng))


def test_a_plan_knows_that_places_in_an_operand_lie_far_apart() -> None:
    bias = weft.tensor("bias", 4)
    variant = weft.Attention(score + bias[batch, head, q_pos, kv_pos], name="biased")
    wide = torch.empty(1, requires_grad=True).expand(2, 2, 32768, 32768)
    tensors = [torch.empty(2, 2, 32768, 16) for _ in range(3)]
    _agree(variant, tensors, {"bias": wide})
    assert _of_call(variant, tensors, {"bias": wide})[0].offsets_64
