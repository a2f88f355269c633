"""Programs of Gluon kernels: what is refused and printed, and that planning counts what generated code allocates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product

import pytest
import sympy

import weft
from weft.codegen.targets.gluon.program import REGISTERS, Columns, Program, plain
from weft.codegen.targets.hopper.forms import HopperForm
from weft.codegen.targets.hopper.held import Held
from weft.codegen.targets.hopper.kernels import forward
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.results import Traits
from weft.compiler.planning.formulas import formula_text
from weft.compiler.planning.plan import CodePlan, KernelCode
from weft.compiler.planning.quantities import Sizes
from weft.compiler.planning.signature import Widths
from weft.ir.errors import InternalError, WeftError

from ..same.corpus import Triple, corpus


def toy(**given: int) -> Program:
    """A ring of keys, a consumer or several, and a producer."""
    constants = {"STAGES": "s", "BLOCK_KV": "bkv", "COLUMNS": "C"}
    p = Program("toy", constants, besides=64)
    p.ring("key", "STAGES, BLOCK_KV", [Columns("COLUMNS")])
    p.mbarrier("key_ready", "STAGES", about="one for each slot")
    p.role("consumer", warps=4, count=2, registers=given.get("registers", 240), empties=["key"])
    p.role("producer", warps=1, registers=24, fills=["key"])
    p.free("key", given.get("stages", 2))
    return p


SIZES = Sizes(*[1] * 23)._replace(e=2, s=3, bkv=128, C=64, bq=64, Cv=32)


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_a_program_that_can_run_is_taken() -> None:
    assert toy().check().registers == 504 * 128 <= REGISTERS


def test_roles_with_more_registers_than_an_sm_has_are_refused() -> None:
    p = toy(registers=248)
    wanted = r"program of toy: its roles take 66560 registers, an SM has 65536: consumer 2 x 4 warps of 248, producer 1"
    with pytest.raises(InternalError, match=wanted):
        p.check()


@pytest.mark.parametrize("registers", [236, 16, 264])
def test_registers_that_no_warp_can_have_are_refused(registers: int) -> None:
    wanted = f"role consumer: expected registers a thread in steps of 8 from 24 to 256, got {registers}"
    with pytest.raises(InternalError, match=wanted):
        toy(registers=registers).check()


def test_warps_that_fill_up_a_warpgroup_have_as_many_registers_as_the_others() -> None:
    p = toy(registers=232)
    p.role("sender", warps=1, registers=48)
    assert p.check().registers == (232 + 232 + 48) * 128


def test_hardware_barriers_that_collide_are_refused() -> None:
    p = toy()
    p.named("SHARE", 2, meets=("consumer", "producer"), first=9)
    with pytest.raises(InternalError, match=r"SHARE: hardware barrier 9 is that of FIRST_FREE_KEY"):
        p.check()
    low = toy()
    low.named("LOW", 1, meets=("consumer",), first=3)
    with pytest.raises(InternalError, match=r"LOW: hardware barrier 3 is that of Triton"):
        low.check()


def test_there_are_sixteen_hardware_barriers() -> None:
    assert toy(stages=8).check().barrier("FIRST_FREE_KEY").numbers == range(8, 16)
    with pytest.raises(InternalError, match=r"FIRST_FREE_KEY: expected hardware barriers below 16, got 8 to 16"):
        toy(stages=9).check()


def test_a_ring_has_one_filler_and_someone_who_empties_it() -> None:
    p = toy()
    p.role("other", warps=1, registers=24, fills=["key"])
    with pytest.raises(InternalError, match=r"ring key: expected one role that fills it, got producer, other"):
        p.check()
    for role, wanted in (("producer", "one role that fills it, got none"), ("consumer", "a role that empties it")):
        p = toy()
        p.roles = [r for r in p.roles if r.name != role]
        with pytest.raises(InternalError, match=f"ring key: expected {wanted}"):
            p.check()


def test_names_and_places_are_checked() -> None:
    p = toy()
    p.role("reader", warps=1, registers=24, empties=["value"])
    with pytest.raises(InternalError, match=r"expected rings key, got value"):
        p.check()
    p = toy()
    p.tile("key", "2, 2", layout=plain(1))
    with pytest.raises(InternalError, match=r"expected fields of different names, got key twice"):
        p.check()
    p = toy()
    p.tile("out", "2, 2", place="query")
    with pytest.raises(InternalError, match=r"out: expected a tile in whose place it lies, got query"):
        p.check()
    p = toy()
    p.tile("out", "2, BLOCK_Q")
    with pytest.raises(InternalError, match=r"expected extents of BLOCK_KV, COLUMNS, STAGES, got BLOCK_Q"):
        p.sram_bytes(SIZES)


def test_who_waits_for_a_slot_meets_who_gives_it_back() -> None:
    p = toy()
    p.role("drawer", warps=1, count=2, registers=24, awaits=["key"])
    p.free("key", 2)
    assert [b.threads for b in p.barriers] == [288, 352]
    with pytest.raises(InternalError, match=r"expected rings of as many threads each, got \[288, 352\]"):
        _ = p.ring_threads


# -- what is printed ---------------------------------------------------------------------------------------------------
RECORD = '''
class Sram(NamedTuple):
    """All shared memory."""

    key: gl.shared_memory_descriptor  # [STAGES, BLOCK_KV, COLUMNS]
    key_ready: gl.shared_memory_descriptor  # one for each slot
'''
ALLOCATED = """
sram = Sram(
    gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, COLUMNS], key_desc.layout),
    gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
)
"""
INITIALISED = """
for i in gl.static_range(STAGES):
    mbarrier.init(sram.key_ready.index(i), count=1)
"""
LAUNCHED = """
gl.warp_specialize([
    (consumer, (0, sram, out_desc, sizes, window)),
    (consumer, (1, sram, out_desc, sizes, window)),
    (producer, (sram, key_desc)),
], [4, 1], [240, 24])
"""


def test_a_program_prints_its_record_allocations_barriers_and_launch() -> None:
    p = toy().check()
    launched = p.launched({"consumer": ["out_desc", "sizes, window"], "producer": ["key_desc", ""]})
    printed = (p.written(), p.allocated(), p.initialised(), launched)
    assert printed == tuple(text.strip() for text in (RECORD, ALLOCATED, INITIALISED, LAUNCHED))


def test_a_tile_in_the_place_of_another_takes_nothing() -> None:
    p = toy()
    before = p.sram_bytes(SIZES)
    p = toy()
    p.tile("out", "STAGES, BLOCK_KV", [Columns("COLUMNS")], place="key")
    assert p.check().sram_bytes(SIZES) == before
    assert p.allocated().splitlines()[:2] == [
        "key = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, COLUMNS], key_desc.layout)", "sram = Sram(",
    ]  # fmt: skip
    assert "    key,\n" in p.allocated() and p.allocated().count("allocate") == 2


def test_one_sum_serves_numbers_and_the_formula_of_explain() -> None:
    p = toy().check()
    assert p.sram_bytes(SIZES) == 2 * 3 * 128 * 64 + 64
    assert formula_text(p.sram_bytes, SIZES) == "6*C*bkv + 64"
    pieces = Program("pieces", {"BLOCK_KV": "bkv"}, widths={80: "C"})
    pieces.tile("key", "BLOCK_KV", [Columns("64", "_left", "_left"), Columns("16", "_right", "_right")])
    assert formula_text(pieces.sram_bytes, SIZES) == "2*C*bkv"
    assert [t.name for t in pieces.tiles] == ["key_left", "key_right"]
    assert sympy.sympify(formula_text(pieces.sram_bytes, SIZES)).subs({"C": 80, "bkv": 8}) == 1280


def test_a_form_that_a_kernel_takes_has_a_program() -> None:
    """Rules of forms say in words what programs check: drawers want hardware barriers, or registers."""
    refused = []
    for consumers, stages, drawers in product((2, 3), (2, 3, 4), (False, True)):
        form = HopperForm(consumers, 128, stages, drawers=drawers)
        widths = Widths(64, 64)
        try:
            forward.program(form, Held(widths, 64, 64, drops=drawers))
        except InternalError as error:
            assert drawers and re.search("hardware barriers|registers", str(error))
            refused.append((consumers, stages))
            refuses = forward.FLASH_FORWARD.refuses
            assert refuses is not None and refuses(form, widths, Traits(drops=drawers))
    assert refused == [(2, 4), (3, 2), (3, 3), (3, 4)]


# -- generated code ----------------------------------------------------------------------------------------------------
DECLARED = [t for t in corpus() if t.target == "hopper"][::3]
BYTES = {"gl.float32": 4, "gl.int32": 4, "gl.uint32": 4, "gl.int64": 8, "dtype": 2}


def _codes(triple: Triple) -> Iterator[tuple[str, CodePlan, list[KernelCode], dict[str, float]]]:
    """Source of each direction, its kernels with programs, and the SRAM that planning says they take."""
    asked = {"device": triple.card, "target": triple.target, **triple.options}
    asked |= {n: v for n, v in (("schedule", triple.schedule), ("form", triple.form)) if v is not None}
    shape = weft.shape(**triple.sizes)
    plan = triple.variant.plan(shape, **asked)
    planned = {k.name: k.sram_bytes.value for k in plan.kernels}
    for code in plan.codes:
        own = [k for k in code.kernels if k.kernel.program is not None]
        if own:
            yield triple.variant.source(shape, direction=code.signature.direction, **asked), code, own, planned


def _constants(module: ast.Module) -> dict[str, int]:
    """Whole numbers that the module names."""
    text = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and re.fullmatch(r"gl\.constexpr\((\d+)\)", ast.unparse(node.value)):
            text[ast.unparse(node.targets[0])] = int(ast.unparse(node.value)[len("gl.constexpr(") : -1])
    return text


def _allocated(module: ast.Module, kernel: str, pair_bytes: int) -> tuple[int, int]:
    """Bytes of tiles, and of cards and mbarriers, that a kernel allocates."""
    known = _constants(module) | {"HEADS": 1}  # a parameter of kernels, by which rows are divided and multiplied
    function = next(f for f in module.body if isinstance(f, ast.FunctionDef) and f.name == kernel)
    tiles = others = 0
    for call in (c for c in ast.walk(function) if isinstance(c, ast.Call)):
        if not ast.unparse(call.func).endswith("allocate_shared_memory"):
            continue
        dtype, shape, _ = (ast.unparse(a) for a in call.args)
        size = BYTES.get(dtype, pair_bytes)
        for extent in eval(shape, {}, known):
            size *= extent
        if dtype == "gl.int64" or "CARD" in shape:
            others += size
        else:
            tiles += size
    return tiles, others


@pytest.mark.sampled(2)
@pytest.mark.parametrize("triple", DECLARED, ids=lambda t: t.name)
def test_planning_counts_what_generated_code_allocates(triple: Triple) -> None:
    try:
        found = list(_codes(triple))
    except WeftError:
        pytest.skip("refused, as the recorded texts say")
    assert found
    for source, code, kernels, planned in found:
        module = ast.parse(source)
        for k in kernels:
            assert k.kernel.program is not None
            program = k.kernel.program(k.form, code.segments, facts_of(triple.variant).traits)
            assert isinstance(program, Program)
            tiles, others = _allocated(module, k.name, k.form.pair_bytes)
            assert planned[k.name] == tiles + program.besides, k.name
            assert others <= program.besides + program.spare, f"{k.name}: cards and mbarriers take {others} bytes"
