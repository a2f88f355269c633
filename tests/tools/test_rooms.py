"""The rooms of the core: planning knows no target, and what is added from outside needs its own place alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jinja2
import pytest
import torch

import weft
from weft import kv_pos, masks, q_pos, score
from weft.codegen import loader, targets
from weft.codegen import normalizers as texts
from weft.codegen.dialects import GLUON
from weft.codegen.generate import generate
from weft.codegen.loader import TEMPLATES
from weft.codegen.normalizers import Blocks
from weft.codegen.targets import cpu, hopper, triton
from weft.codegen.targets.gluon.program import Columns, Program
from weft.codegen.targets.triton.forms import Tiling
from weft.codegen.targets.triton.kernels.forward import FLASH_FORWARD
from weft.codegen.targets.triton.kernels.measures import with_measuring
from weft.codegen.targets.triton.target import KERNELS, InterpretTarget, TritonTarget
from weft.codegen.templates import environment
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import Traits
from weft.compiler.planning import dtypes
from weft.compiler.planning import form as forms
from weft.compiler.planning.form import Form, Residence, number, parse_form, switch
from weft.compiler.planning.kernel import Feature, KernelId
from weft.compiler.planning.machines.hardware import H200, KNOWN
from weft.compiler.planning.plan import CodePlan
from weft.compiler.planning.schedule import parse_schedule
from weft.compiler.planning.segments import Segments
from weft.compiler.planning.signature import Described, Dtypes, Widths, signature_of
from weft.compiler.planning.stage_words import EACH_KV, loads, stores
from weft.ir import normalizer as normalizers
from weft.ir.errors import InternalError, WeftError
from weft.ir.expr import call
from weft.ir.normalizer import Normalizer
from weft.ir.operators import OPERATORS, Operator
from weft.runtime.driver import cache_key, forget

from ..same.corpus import Triple, corpus
from ..support import check_variant

TOP = Path(weft.__file__).resolve().parents[1]
ROOMS = {room: sorted((TOP / room).rglob("*.py")) for room in ("compiler", "codegen", "runtime", "api", "ir")}


def text_without_comments(path: Path) -> str:
    """Code alone: words about kernels may stand in docstrings and comments."""
    text = re.sub(r'"""(?:[^"\\]|\\.|"(?!""))*"""', "", path.read_text())
    return re.sub(r"(?m)#.*$", "", text)


def places(room: str, pattern: str) -> list[str]:
    """Lines of code in a room that have this in them, as path:line."""
    found = []
    for path in ROOMS[room]:
        lines = text_without_comments(path).splitlines()
        found += [f"{path.relative_to(TOP)}: {line.strip()}" for line in lines if re.search(pattern, line)]
    return found


# -- what planning does not know ---------------------------------------------------------------------------------------
def test_planning_names_no_kernel() -> None:
    names = {k.name for kernels in KERNELS.values() for k in kernels} | {"flash_backward", "round_dquery", "kv_spans"}
    quoted = rf"""["'](?:{"|".join(sorted(names))})["']"""
    assert places("compiler", quoted) == []


def test_planning_knows_no_target_and_no_form_by_class() -> None:
    assert places("compiler", r"family ==|\.startswith\(\"(hopper|triton|cpu)") == []
    assert places("compiler", r"\b(HopperForm|HopperBackwardForm|HopperLatentForm|Tiling|CpuForm)\b") == []
    assert places("compiler", r"from \.+codegen") == []


def test_what_gluon_targets_share_names_none_of_them() -> None:
    shared = sorted((TOP / "codegen/targets/gluon").rglob("*.py"))
    named = "|".join(target.name for target in targets.targets() if target.name != "triton")  # also a compiler's name
    assert shared and not any(re.search(rf"\b({named})\b", path.read_text().lower()) for path in shared)


@pytest.mark.parametrize("room", ["api", "runtime"])
def test_what_uses_targets_names_none_of_them(room: str) -> None:
    """What one is told from others by is in its record. Devices have such names too: "cpu" may be one."""
    names = "|".join(target.name for target in targets.targets())
    compared = rf"""(target|\.name) *(==|!=|in|not in) *[(\[{{]?["'](?:{names})["']"""
    asked = rf"""target_named\(["']|["'](?:{names})["'] *(==|!=|in\b) *target|isinstance\([^)]*(Target|Launcher)\b"""
    assert [*places(room, compared), *places(room, asked)] == []


def test_stores_have_one_writer() -> None:
    """And one lock, and one way to ask for the version of a package."""
    wrote = [p for room in ("runtime", "api") for p in places(room, r"os\.(replace|O_CREAT)|mkstemp|FileLock\(")]
    wrote += places("runtime", r"importlib\.metadata")
    assert {place.split(":")[0] for place in wrote} == {"runtime/store/files.py"}


def test_nothing_outside_targets_asks_for_the_class_of_a_form() -> None:
    own = [place for room in ("compiler", "runtime", "api") for place in places(room, r"isinstance\([^)]*Form\b")]
    assert own == []


def test_signatures_have_one_maker() -> None:
    made = [place for room in ROOMS for place in places(room, r"(?<!inspect\.)\bSignature\($")]
    made += [place for room in ROOMS for place in places(room, r"return Signature\(|= Signature\(")]
    assert {place.split(":")[0] for place in made if "inspect" not in place} == {"compiler/planning/signature.py"}


def test_kinds_of_sequences_are_asked_for_fields() -> None:
    """Their names are words of users alone: of `weft build`, the table of targets, and the module of the records."""
    own = ("compiler/planning/sources.py", "runtime/build.py", "api/tools/cli.py", "api/tools/matrix.py")
    named = [
        p for room in ("compiler", "codegen", "runtime", "api") for p in places(room, r"[\"'](packed_paged|paged)[\"']")
    ]
    assert {place.split(":")[0] for place in named} <= set(own)
    by_name = r"(sequences|kind)(\.name)? *(==|!=|in) *[({]?[\"'](dense|lengths|packed|paged)"
    compared = [place for room in ("compiler", "codegen", "runtime", "api") for place in places(room, by_name)]
    assert compared == []
    for template in sorted((TOP / "templates").rglob("*.jinja")):
        assert not re.search(r"sequences(\.name)? *(==|!=|in\b)", template.read_text()), template


def test_kernels_of_one_name_differ_by_their_ids() -> None:
    from weft.codegen.targets.hopper.kernels import backward, forward, statistics

    rooms = (forward, backward, statistics)
    records = [record for room in rooms for record in vars(room).values() if hasattr(record, "id")]
    ids = {record.id for record in records}
    assert len(ids) == len(set(map(id, records))) and KernelId("hopper", "flash_backward", "first stored") in ids
    assert hopper.__doc__ and triton.__doc__ and cpu.__doc__


# -- a form ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Toy(Form):
    """Numbers, one of them in other units and one left out, and a switch."""

    block_q: int = number("t", unit=16, others=(1, 2))
    block_kv: int = number("x")
    buffers: int = number("b", default=2, left_out=2)
    quick: bool = switch("quick")

    def residence(self, *_: Any) -> Residence:
        return Residence(self.buffers, 1, 0)


@pytest.fixture
def toy() -> Iterator[type[Toy]]:
    forms.register(Toy)
    yield Toy
    forms._kinds.remove(Toy)


def test_a_form_reads_back_from_its_fields_alone(toy: type[Toy]) -> None:
    for form, text in ((toy(4, 32), "t64x32"), (toy(1, 8, 3, True), "t16x8b3+quick")):
        assert str(form) == text and parse_form(text) == form
    for text in ("t8x32", "t64x32+slow", "t64x32b", "64x32q1"):
        assert parse_form(text) is None
    assert [str(near) for near in toy(1, 8).neighbours()] == ["t16x8+quick", "t16x8", "t32x8"]


# -- a kernel ----------------------------------------------------------------------------------------------------------
OWN = replace(FLASH_FORWARD, id=KernelId("outside", "toy_forward"), loop="whatever a toy loops over")


class Outside(TritonTarget):
    """The triton target with a forward kernel of its own name."""

    name = measured_by = "outside"
    by_name_only = True

    def kernels(self, algorithm: Any, signature: Any, facts: Any) -> Any:
        if signature.direction == "backward":
            return super().kernels(algorithm, signature, facts)
        return with_measuring([OWN], facts.traits.measured, signature.sequences)

    def supports(self, *_: Any) -> None:
        return None

    def forms(self, kernel: Any, *given: Any) -> Any:
        return [Tiling(64, 64, 4, 2)] if kernel is OWN else super().forms(kernel, *given)

    def check(self, kernel: Any, *given: Any) -> None:
        return None if kernel is OWN else super().check(kernel, *given)


@pytest.fixture
def outside() -> Iterator[Outside]:
    target = Outside()
    targets.register(target)
    yield target
    targets.unregister("outside")


def test_a_kernel_from_outside_is_planned_scheduled_and_explained(outside: Outside) -> None:
    variant = weft.Attention(mask=masks.causal, name="outside")
    shape = weft.shape(heads=2, q_len=256, head_dim=64)
    plan = variant.plan(shape, device="h200", target="outside")
    assert [(k.name, str(k.form)) for k in plan.kernels if k.direction == "forward"] == [("toy_forward", "64x64w4s2")]
    assert plan.kernels[0].seconds > 0 and plan.kernels[0].tiles.edge > 0
    text = "flash/toy_forward=outside:32x64w4s2"
    assert str(variant.plan(shape, device="h200", schedule=text).schedule).startswith(text)
    assert "whatever a toy loops over" in variant.explain(shape, device="h200", target="outside")


def test_a_kernel_from_outside_measures_masks_as_others_do(outside: Outside) -> None:
    doc = weft.tensor("doc", 2, int)
    variant = weft.Attention(mask=(doc[weft.batch, q_pos] == doc[weft.batch, kv_pos]) & (kv_pos <= q_pos), name="own")
    plan = variant.plan(weft.shape(heads=2, q_len=256, head_dim=64), device="h200", target="outside")
    spans, forward = (k for k in plan.kernels if k.direction == "forward")
    assert (spans.name, spans.code.kernel.measures) == ("kv_spans", forward.name)


# -- a Gluon target ----------------------------------------------------------------------------------------------------
TEMPLATE = '''"""{{ name }}, by warps of two kinds."""
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr({{ form.block_q }})
BLOCK_KV = gl.constexpr({{ form.block_kv }})
STAGES = gl.constexpr({{ form.num_stages }})
{% for barrier in program.barriers %}
{{ barrier.name }} = gl.constexpr({{ barrier.first }})  # {{ barrier.threads }} threads
{% endfor %}

{{ functions }}


{{ program.written() }}


@gluon.jit
def brings(sram, key_desc):
    {{ stage("two_kinds", "load key") }}
    mbarrier.expect(sram.key_ready.index(0), key_desc.block_type.nbytes)


@gluon.jit
def computes(warpgroup: gl.constexpr, sram, out):
    {{ stage("two_kinds", "store output") }}
    gl.store(out, warpgroup)


@gluon.jit
def two_kinds(key_desc, out):
    dtype: gl.constexpr = key_desc.dtype
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    :: program.allocated()
    :: program.initialised()
    :: program.launched({"computes": ["out"], "brings": ["key_desc"]})
'''


def two_kinds(form: Form, parts: Segments, traits: Traits, registers: int = 232) -> Program:
    """A ring of keys, which one warp fills and two warpgroups empty; Q in place, O in the place of Q."""
    p = Program("two_kinds", {"ROWS": "bq", "BLOCK_KV": "bkv", "STAGES": "s", "COLUMNS": "C"}, besides=128)
    p.tile("query", "ROWS", [Columns("COLUMNS")])
    p.ring("key", "STAGES, BLOCK_KV", [Columns("COLUMNS")])
    p.tile("out", "ROWS", [Columns("COLUMNS")], place="query")
    p.mbarrier("key_ready", "STAGES")
    p.role("computes", warps=4, count=2, registers=registers, empties=["key"])
    p.role("brings", warps=1, registers=40, fills=["key"])
    p.free("key", 2)
    return p.check()


TWO_KINDS = replace(
    FLASH_FORWARD, id=KernelId("warped", "two_kinds"), program=two_kinds,
    stages=lambda t: [loads("key", t.key(), EACH_KV), stores("output", t.output("O"))],
)  # fmt: skip


@dataclass(frozen=True)
class TwoKinds:
    """What its template is told."""

    form: Any
    program: Program


class Warped(TritonTarget):
    """A target whose forward is a Gluon kernel of its own, with a template from outside."""

    name = measured_by = family = "warped"
    by_name_only = True
    language = GLUON
    forward = TWO_KINDS

    def kernels(self, algorithm: Any, signature: Any, facts: Any) -> Any:
        return [self.forward] if signature.direction == "forward" else super().kernels(algorithm, signature, facts)

    def supports(self, *_: Any) -> None:
        return None

    def forms(self, kernel: Any, *given: Any) -> Any:
        return [Tiling(64, 32, 4, 2)] if kernel is self.forward else super().forms(kernel, *given)

    def check(self, kernel: Any, *given: Any) -> None:
        return None if kernel is self.forward else super().check(kernel, *given)

    def template(self, code: CodePlan) -> str:
        return "warped/two_kinds.py.jinja"

    def context(self, code: CodePlan, facts: Any) -> tuple[object, ...]:
        form = code.form("two_kinds")
        return (TwoKinds(form, two_kinds(form, code.segments, facts.traits)),)


@pytest.fixture
def warped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Warped]:
    texts = environment(TEMPLATES)
    own = jinja2.DictLoader({"warped/two_kinds.py.jinja": TEMPLATE})
    monkeypatch.setattr(texts, "loader", jinja2.ChoiceLoader([own, texts.loader]))
    target = Warped()
    targets.register(target)
    yield target
    targets.unregister("warped")


def test_a_gluon_target_from_outside_declares_a_program_and_is_planned_and_printed(warped: Warped) -> None:
    variant = weft.Attention(mask=masks.causal, name="warped")
    shape = weft.shape(heads=2, q_len=256, head_dim=64)
    (kernel,) = (k for k in variant.plan(shape, device="h200", target="warped").kernels if k.direction == "forward")
    sram = kernel.sram_bytes
    assert (kernel.name, sram.value, sram.formula) == (
        "two_kinds",
        2 * 64 * (64 + 2 * 32) + 128,
        "4*C*bkv + 2*C*bq + 128",
    )
    assert f"{sram.formula} = 16,512" in variant.explain(shape, device="h200", target="warped")
    source = variant.source(shape, direction="forward", device="h200", target="warped")
    assert "FIRST_FREE_KEY = gl.constexpr(8)  # 288 threads" in source
    assert (
        "    query = gl.allocate_shared_memory(dtype, [ROWS, COLUMNS], query_desc.layout)\n    sram = Sram(" in source
    )
    assert "(computes, (1, sram, out)),\n        (brings, (sram, key_desc)),\n    ], [4, 1], [232, 40])" in source


def test_a_program_from_outside_that_cannot_run_is_refused_when_it_is_planned(warped: Warped) -> None:
    warped.forward = replace(TWO_KINDS, program=partial(two_kinds, registers=248))
    variant = weft.Attention(mask=masks.causal, name="warped_too_wide")
    with pytest.raises(InternalError, match=r"program of two_kinds: its roles take 68608 registers, an SM has 65536"):
        variant.plan(weft.shape(heads=2, q_len=256, head_dim=64), device="h200", target="warped")


# -- a dtype -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def tiny() -> Iterator[str]:
    dtypes.ALL["toy8"] = dtypes.Dtype("toy8", "float8_e4m3fn", 1, "4-bit")
    yield "toy8"
    del dtypes.ALL["toy8"]


def test_a_dtype_is_refused_wherever_a_table_lacks_it(tiny: str) -> None:
    facts = facts_of(weft.Attention(mask=masks.causal, score=score, name="eight"))
    for machine in KNOWN.values():
        with pytest.raises(WeftError, match=r"has no peak of 4-bit products; its record has 16-bit, fp32"):
            machine.matrix_flops(tiny)
        for target in targets.targets():
            call = Described("forward", machine.arch, tiny, Widths(64, 64))
            signature = signature_of(call, masked=True, sums_pairs=False)
            kernels = target.kernels("flash", signature, facts)
            assert target.supports(kernels[0], signature, facts), f"{target.name} takes {tiny} on {machine.name}"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_dtype_is_refused_where_kernels_convert_to_it(tiny: str, direction: Literal["forward", "backward"]) -> None:
    """Also of a plan for which its target forgot to refuse it."""
    variant = weft.Attention(mask=masks.causal, dropout=0.1, name="eight")
    shape = weft.shape(heads=2, q_len=256, head_dim=64)
    code = variant.plan(shape, device="h200", target="hopper").code(direction)
    given = replace(code, signature=replace(code.signature, dtypes=Dtypes.all(tiny)))
    with pytest.raises(InternalError, match=r"template: expected one of (bf16, fp16|fp16, bf16), got toy8"):
        generate(facts_of(variant), given, targets.target_named("hopper"))


def test_tilings_are_of_the_units_that_a_table_has(tiny: str) -> None:
    with pytest.raises(WeftError, match=r"dtype: toy8 has 4-bit products, and a table has 16-bit, fp32 alone"):
        dtypes.dtype_named(tiny).of_units({"16-bit": 1, "fp32": 2})


def test_a_dtype_without_a_record_is_refused_in_words() -> None:
    with pytest.raises(WeftError, match=r"dtype: expected one of bf16, fp16, fp32, fp64, e4m3, e5m2, got 'fp4'"):
        H200.matrix_flops("fp4")


def test_schedules_of_kernels_from_outside_read_back() -> None:
    text = "flash/toy_forward=outside:64x64w4s2"
    assert str(parse_schedule(text)) == text


# -- a feature ---------------------------------------------------------------------------------------------------------
PART = """\
{#- Weights, and what they are summed to, in halves: a toy. -#}
{% set on = masked %}
{% macro functions(tiles=[]) %}
@triton.jit
def quieter(weights):
    return weights * 0.5
{% endmacro %}
{% macro begin() %}
loudness = 3.0
{% endmacro %}
{% macro after_weights() %}
p = quieter(p)
{% endmacro %}
{% macro factor() %} * loudness{% endmacro %}
"""
QUIET = Feature("quiet", "outside/quiet.py.jinja")
QUIET_FORWARD = replace(
    FLASH_FORWARD, id=KernelId("outside", "flash_forward", "quiet"), features=(*FLASH_FORWARD.features, QUIET)
)


class Quiet(InterpretTarget):
    """The interpreted kernels, with a feature of another package in the forward."""

    name = measured_by = "quiet"

    def kernels(self, algorithm: Any, signature: Any, facts: Any) -> Any:
        own = super().kernels(algorithm, signature, facts)
        return [QUIET_FORWARD if kernel is FLASH_FORWARD else kernel for kernel in own]

    def supports(self, *_: Any) -> None:
        return None


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Path]:
    part = tmp_path / QUIET.part
    part.parent.mkdir()
    part.write_text(PART)
    loader.register_templates(tmp_path)
    targets.register(Quiet())
    yield part
    targets.unregister("quiet")
    loader.unregister_templates(tmp_path)
    forget()


def test_a_feature_from_outside_prints_its_lines_and_computes(quiet: Path) -> None:
    pytest.importorskip("triton")
    variant = weft.Attention(mask=masks.causal, name="quiet")
    query, key, value = torch.randn(3, 1, 2, 40, 16)
    own = variant.source(query, key, value, direction="forward", target="interpret").splitlines()
    text = variant.source(query, key, value, direction="forward", target="quiet").splitlines()
    added = [line.strip() for line in text if line not in own]
    assert [line for line in own if line not in text and "acc0" not in line] == []
    for line in ("def quieter(weights):", "loudness = 3.0", "p = quieter(p)"):
        assert added.count(line) == 1, line
    out = variant(query, key, value, target="quiet")
    torch.testing.assert_close(out, 1.5 * variant.reference(query, key, value), atol=1e-5, rtol=1e-5)


def test_a_feature_that_is_off_prints_nothing(quiet: Path) -> None:
    pytest.importorskip("triton")
    variant, given = weft.Attention(name="all"), torch.randn(3, 1, 2, 40, 16)
    found = [variant.source(*given, direction="forward", target=target) for target in ("interpret", "quiet")]
    assert found[0] == found[1]


def test_a_changed_feature_is_generated_anew(quiet: Path) -> None:
    """Its text is part of the key of what is kept; of Weft's own features the key of all code is."""
    pytest.importorskip("triton")
    variant, given = weft.Attention(mask=masks.causal, name="quiet"), torch.randn(3, 1, 2, 40, 16)
    code = variant.plan(*given, target="quiet").code("forward")
    before = cache_key(variant, code)
    assert cache_key(variant, code) == before
    quiet.write_text(PART.replace("3.0", "4.0"))
    assert cache_key(variant, code).schedule != before.schedule
    assert loader.digest_of_templates(f.part for f in FLASH_FORWARD.features) == ""


# -- an operator -------------------------------------------------------------------------------------------------------
@pytest.fixture
def softsign() -> Iterator[str]:
    OPERATORS["softsign"] = Operator(
        "softsign", ("x",), "number", "float", lambda x: x / (1.0 + abs(x)), "nn.functional.softsign",
        ("1.0 / ((1.0 + abs(x)) * (1.0 + abs(x)))",), doc="x / (1 + |x|)",
        gpu="({0} / (1.0 + {m}.abs({0})))", tile="torch.nn.functional.softsign({0})",
        number="({0} / (1.0 + abs({0})))",
    )  # fmt: skip
    yield "softsign"
    del OPERATORS["softsign"]


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_an_operator_from_outside_is_computed_and_differentiated(softsign: str, target: str) -> None:
    if target == "interpret":
        pytest.importorskip("triton")
    variant = weft.Attention(score=call(softsign, score), mask=masks.causal, name="signed")
    assert "softsign(score)" in str(variant)
    check_variant(variant, *torch.randn(3, 1, 2, 40, 16), target=target)


# -- a normalizer ------------------------------------------------------------------------------------------------------
@pytest.fixture
def squares() -> Iterator[str]:
    normalizer = Normalizer("toy_squares", saves="nothing", weight="score * score")
    normalizers.register(normalizer)
    texts.register(normalizer, "triton", lambda terms: Blocks(
        weigh=f"logit = ({terms.score}) * LN_2\np = tl.where(logit == float('-inf'), 0.0, logit * logit)",
        backward_weight=f"logit = ({terms.score}) * LN_2\np = tl.where(logit == float('-inf'), 0.0, logit * logit)",
        backward_score="tl.where(logit == float('-inf'), 0.0, 2.0 * logit * dp)",
    ))  # fmt: skip
    yield normalizer.name
    texts.unregister(normalizer)
    normalizers.unregister(normalizer.name)


def test_a_normalizer_from_outside_is_computed(squares: str) -> None:
    """tests/attention/test_normalizers.py holds more of them, on each target."""
    pytest.importorskip("triton")
    variant = weft.Attention(mask=masks.causal, normalizer=squares, name="squared")
    check_variant(variant, *torch.randn(3, 1, 2, 40, 16), target="interpret", lse=False)


# -- words -------------------------------------------------------------------------------------------------------------
WORDED = [t for t in corpus() if t.target != "cpu"][::5]


@pytest.mark.parametrize("triple", WORDED, ids=lambda t: t.name)
def test_words_say_sram_where_a_program_has_tiles_there(triple: Triple) -> None:
    asked = {"device": triple.card, "target": triple.target, **triple.options}
    asked |= {n: v for n, v in (("schedule", triple.schedule), ("form", triple.form)) if v is not None}
    try:
        plan = triple.variant.plan(weft.shape(**triple.sizes), **asked)
    except WeftError:
        pytest.skip("refused, as the recorded texts say")
    for kernel in plan.kernels:
        brings = any("-> SRAM" in stage.moves for stage in kernel.stages)
        assert brings == (kernel.sram_bytes.value > 0), f"{kernel.name}: words and tiles differ"
