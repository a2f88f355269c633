"""The source of the Hopper forward: its plan in words, its shape, and the order in which tiles are visited.

The order is integer code of the generated kernel, run here as the Python that it also is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from weft import kv_pos, q_pos, score
from weft.codegen.dialects import GLUON
from weft.codegen.functions import FunctionPrinter
from weft.codegen.launch.descriptors import RaggedBox
from weft.codegen.loader import TEMPLATES
from weft.codegen.targets.hopper.target import HopperTarget
from weft.codegen.templates import environment
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.planning.form import parse_form
from weft.compiler.planning.machines.hardware import H200
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.compiler.planning.sources import DENSE, PACKED_PAGED, kind_named
from weft.runtime.driver import resolve

causal = kv_pos <= q_pos
WINDOW, PREFIX = 100, 150
within, prefix = weft.scalar("within", int), weft.scalar("prefix", int)
VARIANTS = {
    "dense": weft.Attention(name="dense"),
    "causal": weft.Attention(mask=causal, name="causal"),
    "within": weft.Attention(mask=causal & (q_pos - kv_pos < within), name="within"),
    "prefix": weft.Attention(score=20.0 * weft.tanh(score / 20.0), mask=causal | (kv_pos < prefix), name="prefix"),
    "documents": weft.Attention(mask=causal & weft.masks.document(weft.tensor("doc", 2, int)), name="documents"),
}
CLOSED = ["dense", "causal", "within", "prefix"]  # what is seen follows from positions
VISIBLE: dict[str, Callable[[int, int], bool]] = {
    "dense": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "within": lambda q, k: k <= q and q - k < WINDOW,
    "prefix": lambda q, k: k <= q or k < PREFIX,
}


def sizes(head_dim: int) -> weft.Shape:
    return weft.shape(heads=2, q_len=2048, head_dim=head_dim, dtype="bf16")


def source(name: str, head_dim: int) -> str:
    return VARIANTS[name].source(sizes(head_dim), device="h200", target="hopper")


# -- what a person reads ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_source_says_what_the_plan_says(name: str, head_dim: int) -> None:
    plan = VARIANTS[name].plan(sizes(head_dim), device="h200", target="hopper")
    (kernel,) = (k for k in plan.kernels if k.name == "flash_forward" and k.direction == "forward")
    comments = " ".join(re.sub(r"\n *#", "", source(name, head_dim)).split())
    assert {s.key for s in kernel.stages} >= {"load work", "load query", "load key", "load value", "store output"}
    for stage in kernel.stages:
        assert comments.count(f"{stage.kind} (each {stage.per}): {' '.join(stage.what.split())}") == 1, stage.key
    consumers = kernel.form.block_q // 64
    assert f"{consumers} consumers of 64 rows" in comments and f"CONSUMERS = gl.constexpr({consumers})" in comments


def backward_plan(name: str, head_dim: int) -> weft.Plan:
    return VARIANTS[name].plan(sizes(head_dim), device="h200", target="hopper")


def backward_source(name: str, head_dim: int) -> str:
    return VARIANTS[name].source(sizes(head_dim), device="h200", target="hopper", direction="backward")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_source_of_the_backward_says_what_the_plan_says(name: str, head_dim: int) -> None:
    kernels = [k for k in backward_plan(name, head_dim).kernels if k.direction == "backward" and "spans" not in k.name]
    assert [k.name for k in kernels] == ["row_statistics", "flash_backward", "round_dquery"]
    comments = " ".join(re.sub(r"\n *#", "", backward_source(name, head_dim)).split())
    for kernel in kernels:
        for stage in kernel.stages:
            said = f"{stage.kind} (each {stage.per}): {' '.join(stage.what.split())}"
            assert comments.count(said) == 1, f"{kernel.name}: {stage.key}"
    form = kernels[1].form
    assert f"BLOCK_Q = gl.constexpr({form.block_q})" in comments and f"STAGES = gl.constexpr({form.stages})" in comments


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_source_of_two_passes_says_what_the_plan_says(name: str, head_dim: int) -> None:
    given = {"device": "h200", "target": "hopper", "deterministic": True}
    plan = VARIANTS[name].plan(sizes(head_dim), **given)
    kernels = [k for k in plan.kernels if k.direction == "backward" and "spans" not in k.name]
    assert [k.name for k in kernels] == ["row_statistics", "flash_dquery", "flash_dkey_dvalue"]
    text = VARIANTS[name].source(sizes(head_dim), **given, direction="backward")
    comments = " ".join(re.sub(r"\n *#", "", text).split())
    for kernel in kernels:
        for stage in kernel.stages:
            said = f"{stage.kind} (each {stage.per}): {' '.join(stage.what.split())}"
            assert said in comments, f"{kernel.name}: {stage.key}"
    assert "tma_reduce_add" not in text  # nothing adds in any order
    assert [line for line in text.splitlines() if "atomic" in line] == ["    fetched = gl.atomic_add(counter_ptr, 1)"]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_a_backward_of_one_head_kind_multiplies_at_the_end(head_dim: int) -> None:
    """A factor that is one for all heads is applied to sums; one that differs by head, to each tile of dS."""
    by_head = weft.Attention(score * weft.tensor("t", 1)[weft.head], name="by_head")
    plain = backward_source("causal", head_dim)
    apart = by_head.source(
        sizes(head_dim), device="h200", target="hopper", direction="backward", t=torch.ones(2, device="meta")
    )
    assert "times the factor of the score, at the end" in plain and "dkey = dkey * (scale * LN2)" in plain
    assert "dqk = (p * dp * (scale * LN2)).to(dtype)" in apart and "dkey = dkey *" not in apart
    # products that run ahead start from 0, and a factor that may be 0 divides nothing
    assert ("-lse / factor" in plain) == (head_dim == 128) and "-lse / factor" not in apart


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VARIANTS)
def test_functions_of_the_kernel_are_short(name: str, direction: str) -> None:
    text = source(name, 128) if direction == "forward" else backward_source(name, 128)
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    longest = max(functions, key=lambda f: f.end_lineno - f.lineno)  # type: ignore[operator]
    assert longest.end_lineno - longest.lineno <= 80, longest.name  # type: ignore[operator]


# -- the order of tiles ----------------------------------------------------------------------------------------------
GL = SimpleNamespace(
    where=lambda chosen, a, b: a if chosen else b, minimum=min, maximum=max, cast=lambda x, dtype: x, int32=int,
    int64=int, constexpr=lambda x: x, static_range=range,
)  # fmt: skip


def run_as_python(text: str, *, needs: list[str], **constants: int) -> dict[str, Any]:
    """The integer functions of a generated text, and what they call, as plain Python."""
    defined = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    wanted, names = list(needs), set()
    while wanted:
        name = wanted.pop()
        if name in defined and name not in names:
            names.add(name)
            wanted += [n.id for n in ast.walk(defined[name]) if isinstance(n, ast.Name)]
    body = [defined[name] for name in sorted(names)]
    for function in body:
        function.decorator_list = []
    space: dict[str, Any] = {"gl": GL, **constants}
    exec(compile(ast.Module(list(body), []), "generated", "exec", dont_inherit=True), space)
    return space


def here_of(attention: weft.Attention, q_len: int, kv_len: int) -> SimpleNamespace:
    """What functions are told: one head of one batch row."""
    values = {"arg_within": WINDOW, "arg_prefix": PREFIX, "group": 1, "head_dim": 64, "q_len": q_len, "kv_len": kv_len}
    return SimpleNamespace(**{name: values.get(name, 0) for name in FunctionPrinter(facts_of(attention), GLUON).known})


def seen_by(name: str, axis: str, row: int, rows: int, tile: int, q_len: int, kv_len: int) -> tuple[bool, bool]:
    """Whether rows [row, row + rows) of the other axis see any of a tile of 128, and whether all see all of it."""
    own = range(row, min(row + rows, q_len if axis == "kv" else kv_len))
    others = range(128 * tile, 128 * tile + 128)
    end, offset, visible = kv_len if axis == "kv" else q_len, kv_len - q_len, VISIBLE[name]
    pairs = [
        o < end and (visible(offset + r, o) if axis == "kv" else visible(offset + o, r)) for r in own for o in others
    ]
    return any(pairs), bool(pairs) and all(pairs)


LENGTHS = [(1, 1), (200, 200), (64, 500), (257, 300), (300, 130)]


def check_order(name: str, axis: str, code: dict[str, Any], unit_rows: int, lengths: tuple[int, int]) -> None:
    """Each tile is visited once; a consumer passes over none that it sees, and masks all that it does not see whole."""
    q_len, kv_len = lengths
    place = [kv_len - q_len, here_of(VARIANTS[name], q_len, kv_len)]
    for unit in range(0, q_len if axis == "kv" else kv_len, unit_rows):
        n_edge, n_full, *bounds = code["tiles_seen_from"](unit, unit_rows, *place)
        order = [code[f"{axis}_tile"](i, n_edge, *bounds) for i in range(n_edge + n_full)]
        assert len(set(order)) == len(order)
        for row in range(unit, unit + unit_rows, 64):
            first, edge_end = code["own_tiles"](row, n_edge, n_full, bounds, *place)
            assert 0 <= first <= len(order)
            tiles = range(-(-max(q_len, kv_len) // 128))
            found = {tile: seen_by(name, axis, row, 64, tile, q_len, kv_len) for tile in tiles}
            assert {tile for tile in tiles if found[tile][0]} <= set(order[first:]), (lengths, row)
            assert all(found[tile][1] for tile in order[max(first, edge_end) :]), (lengths, row)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CLOSED)
def test_consumers_of_the_forward_visit_what_they_see(name: str, lengths: tuple[int, int]) -> None:
    needs = ["tiles_seen_from", "kv_tile", "own_tiles"]
    code = run_as_python(source(name, 64), needs=needs, ROWS=64, BLOCK_KV=128)
    check_order(name, "kv", code, 192, lengths)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CLOSED)
def test_the_same_part_orders_query_tiles_for_kernels_that_own_keys(name: str, lengths: tuple[int, int]) -> None:
    facts = facts_of(VARIANTS[name])
    printer = FunctionPrinter(facts, GLUON)
    part = environment(TEMPLATES).get_template("hopper/parts/tiles_seen.py.jinja")
    text = part.render(
        seen="q", lookups="q_", ranges=", ".join(facts.q_tiles.outputs), env=printer.env, measured=False,
        source="program", masked=name != "dense",
    )  # fmt: skip
    needs = ["tiles_seen_from", "q_tile", "own_tiles"]
    code = run_as_python(printer.backward(()) + text, needs=needs, ROWS=64, BLOCK_Q=128)
    check_order(name, "q", code, 128, lengths)


@pytest.mark.parametrize(("longest", "packed"), [("last", False), ("first", False), ("last", True), ("first", True)])
@pytest.mark.parametrize(("head_tiles", "batch_heads", "together"), [(1, 1, 1), (5, 6, 4), (3, 7, 7), (4, 9, 2)])
def test_every_unit_of_work_is_handed_out_once(
    longest: str, packed: bool, head_tiles: int, batch_heads: int, together: int
) -> None:
    """Units that see most come first; of a list, which packed sequences have, these are the first ones."""
    part = environment(TEMPLATES).get_template("hopper/parts/work_order.py.jinja")
    launch = SimpleNamespace(head_tiles=head_tiles, batch_heads=batch_heads, heads_together=together)
    everything = [(tile, head) for tile in range(head_tiles) for head in range(batch_heads)]
    for masked in (False, True):
        text = part.render(longest=longest, packed=packed, masked=masked)
        place_of = run_as_python(text, needs=["place_of"])["place_of"]
        places = [place_of(i, launch) for i in range(head_tiles * batch_heads)]
        assert sorted(places) == everything
        if masked:
            assert places[0][0] == (head_tiles - 1 if longest == "last" and not packed else 0)
            assert {head for _, head in places[: min(together, batch_heads) * head_tiles]} == set(
                range(min(together, batch_heads))
            )


SIZE, ALIGNED = (1, 4, 256, 64), (1 << 16, 1 << 14, 64, 1)


@pytest.mark.parametrize(
    ("size", "stride", "offset", "fits"),
    [
        (SIZE, ALIGNED, 0, True),
        (SIZE, ALIGNED, 8, True),  # elements of two bytes
        (SIZE, ALIGNED, 4, False),
        (SIZE, (1 << 16, (1 << 14) + 4, 64, 1), 0, False),
        (SIZE, (3, 1 << 14, 64, 1), 0, True),  # of one batch row: it leads nowhere
        ((2, 4, 256, 64), ((1 << 16) + 3, 1 << 14, 64, 1), 0, False),
        ((1, 4, 1, 64), (1 << 16, 64, 65, 1), 0, True),  # decode
    ],
)
def test_addresses_and_strides_that_are_used_are_multiples_of_16_bytes(size, stride, offset, fits):
    sound = torch.empty(SIZE, dtype=torch.bfloat16)
    odd = torch.empty(1 << 18, dtype=torch.bfloat16).as_strided(size, stride, offset)
    for name in ("query", "key", "value"):
        call = SimpleNamespace(**{**dict.fromkeys(("query", "key", "value"), sound), "rope": None, name: odd})
        found = HopperTarget().misfit(SimpleNamespace(sequences=DENSE, dtypes=Dtypes.all("bf16")), call)
        assert found is None if fits else f"hopper: {name}: its address and strides" in found


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        (torch.empty(2, 1, 8, 576, dtype=torch.bfloat16)[..., 512:], None),
        (torch.empty(2, 1, 8, 575, dtype=torch.bfloat16)[..., 511:], "hopper: rotary key: its address and strides"),
        (torch.empty(2, 2, 8, 64), "hopper: a rotary key of 2 heads is for the triton target"),
    ],
)
def test_a_rotary_key_has_one_head_at_such_an_address(rope, reason):
    sound = torch.empty(2, 4, 8, 128, dtype=torch.bfloat16)
    call = SimpleNamespace(query=sound, key=sound, value=sound, rope=rope)
    found = HopperTarget().misfit(SimpleNamespace(sequences=DENSE, dtypes=Dtypes.all("bf16")), call)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("stride", "fits"),
    [
        ((1 << 16, 1 << 14, 64, 1), True),
        ((1 << 16, 64, 1 << 8, 1), True),  # [B, L, H, D]
        ((1 << 18, 8, 1 << 8, 1), True),  # a part of each row
        ((1 << 16, 1 << 14, 0, 1), False),  # one row for all
        (((1 << 16) + 8, 1 << 14, 64, 1), False),
    ],
)
def test_batch_rows_of_sequences_with_lengths_are_a_whole_number_of_rows_apart(stride, fits):
    sound = torch.empty((2, 4, 256, 64), dtype=torch.bfloat16)
    key = torch.empty(1 << 20, dtype=torch.bfloat16).as_strided((2, 4, 256, 64), stride)
    found = HopperTarget().misfit(
        SimpleNamespace(sequences=kind_named("lengths"), dtypes=Dtypes.all("bf16")),
        SimpleNamespace(query=sound, key=key, value=sound, rope=None),
    )
    assert (
        found is None
        if fits
        else "key: with lengths, batch rows must lie a whole number of rows of a head apart" in found
    )


@pytest.mark.parametrize("stride", [(1 << 16, 1 << 14, 64, 1), (1 << 16, 64, 256, 1), (1536 << 9, 192, 1536, 1)])
def test_rows_that_end_anywhere(stride):
    """Coordinates of sequences.py.jinja lead to the rows of a sequence, and past its end out of the descriptor."""
    box = RaggedBox(torch.empty(1 << 21, dtype=torch.bfloat16).as_strided((2, 4, 256, 64), stride), 64)
    part = '{% import "hopper/parts/sequences.py.jinja" as seq with context %}'
    render = environment(TEMPLATES).from_string(part + '{{ seq.at("key", "head", "row", "8", "length") }}')
    text = render.render(sequences=kind_named("lengths"), offset_kind="bottom_right")
    for batch, head, row, length in ((0, 0, 0, 1), (1, 3, 77, 78), (1, 2, 0, 256), (0, 1, 78, 77), (1, 1, 5, 0)):
        names = {"key_start": batch * (stride[0] // stride[2]), "head": head, "row": row, "length": length}
        place = eval(text, {"WRAP": 2**30, "LAST_ROW": 2**30, **names})
        element = sum(at * step for at, step in zip(place, box.strides, strict=True))
        assert 2 * element % 2**64 == 2 * (batch * stride[0] + head * stride[1] + row * stride[2] + 8)
        inside = [0 <= at < size < 2**31 for at, size in zip(place, box.shape, strict=True)]
        assert all(inside) == (row < length) and all(inside[:3]) and inside[4]
        assert all(0 < 2 * step < 2**40 for step in box.strides)


def test_explain_says_which_tensors_go_elsewhere() -> None:
    """As the call does: tensors that are given are looked at."""
    fits = torch.empty((2, 4, 80, 64), dtype=torch.bfloat16)
    odd = torch.empty((2, 4, 80, 68), dtype=torch.bfloat16)[..., 4:]
    variant = VARIANTS["causal"]
    assert "flash_forward=hopper" in variant.explain(fits, fits, fits, device="h200")
    said = " ".join(variant.explain(fits, odd, fits, device="h200").split())
    assert "hopper: key: its address and strides must be multiples of 16 bytes" in said
    assert "flash_forward=triton" in said and "flash_dquery=triton" in said
    with pytest.raises(weft.UnavailableError, match="causal: target hopper: key: its address and strides"):
        variant.plan(fits, odd, fits, device="h200", target="hopper")


# -- tiles of what pairs read ----------------------------------------------------------------------------------------
PAIRS = weft.tensor("pairs", 4)
READ = PAIRS[weft.batch, weft.head, q_pos, kv_pos]
BIASED = weft.Attention(score + READ, causal, name="biased")
ALL = frozenset({"query", "key", "value", "pairs"})


def chosen(
    variant: weft.Attention, head_dim: int, boxed: int, wanted: frozenset[str] = frozenset(), **more: Any
) -> str:
    """The schedule of calls whose operand has so many bytes an entry, or cannot be brought by tiles."""
    direction: Any = "backward" if wanted else "forward"
    sizes_ = Widths(head_dim, head_dim)
    signature = Signature(direction, "sm_90", Dtypes.all("bf16"), sizes_, wanted=wanted, boxed=boxed, **more)
    return str(resolve(variant, signature, H200).code.schedule)


@pytest.mark.parametrize(
    ("head_dim", "boxed", "form"),
    [
        (64, 0, "128x128s3q1+regs+pairs"),
        (64, 2, "128x128s3q1p2+regs+lazy+pairs"),
        (64, 4, "128x128s2q1p4+regs+lazy+pairs"),  # a slot less
        (128, 2, "128x128s2q1p2+lazy+overlap+inplace"),
        (128, 4, "128x64s2q1p4+lazy+overlap"),
        (256, 2, "128x64s2q1p2+lazy+inplace"),
        (256, 4, "128x64s2q1+lazy+inplace"),  # no room
    ],
)
def test_forms_have_room_for_tiles_of_what_pairs_read(head_dim: int, boxed: int, form: str) -> None:
    assert chosen(BIASED, head_dim, boxed) == f"flash/flash_forward=hopper:{form}"
    assert str(parse_form(form)) == form


@pytest.mark.parametrize(
    ("value", "is_stored"),
    [
        (score + READ, True),
        (2.0 * score + READ - 0.5 * (q_pos - kv_pos), True),
        (score - READ, False),  # the gradient is -dS
        (score + 2.0 * READ, False),
        (weft.tanh(score) + READ, False),  # q.k has no one factor
        (score * weft.tensor("heat", 1)[weft.head] + READ, False),
        (score + weft.tensor("pairs", 3)[weft.head, q_pos, kv_pos], False),  # read by all batch rows
        (score + READ + PAIRS[weft.batch, weft.head, kv_pos, q_pos], False),  # read twice
    ],
)
def test_one_pass_stores_the_gradient_of_what_is_added(value: weft.Expr, is_stored: bool) -> None:
    found = chosen(weft.Attention(value, causal, name="added"), 64, 2, ALL)
    assert found.startswith("flash/flash_backward=hopper:64x128s3p2") == is_stored
    assert ("triton" in found) != is_stored


def test_calls_whose_gradient_of_pairs_goes_to_triton() -> None:
    assert "p2" in chosen(BIASED, 128, 2, ALL) and "p4" in chosen(BIASED, 96, 4, ALL)
    for head_dim, boxed, wanted, more in (
        (64, 0, ALL, {}), (128, 4, ALL, {}), (192, 2, ALL, {}),
        (64, 2, ALL - {"query"}, {}), (64, 2, frozenset({"pairs"}), {}),
        (64, 2, ALL, {"deterministic": True}),
    ):  # fmt: skip
        assert "hopper" not in chosen(BIASED, head_dim, boxed, wanted, **more)
    assert "p2" in chosen(BIASED, 64, 2, ALL, sequences=kind_named("lengths"), offset="bottom_right")
    assert (
        chosen(BIASED, 64, 4, ALL - {"pairs"}) == "flash/flash_backward=hopper:64x128s2p4+ahead"
    )  # read, but without one


def test_explain_says_how_pairs_are_read() -> None:
    shape = weft.shape(batch=1, heads=2, q_len=512, head_dim=64, dtype="bf16")
    assert "tiles of pairs[batch, head, q_pos, kv_pos] are brought to SRAM" in str(BIASED.explain(shape, device="h200"))
    odd = torch.empty(1, 2, 512, 516, dtype=torch.bfloat16)
    assert "is read pair by pair: tiles of it want" in " ".join(
        str(BIASED.explain(shape, device="h200", pairs=odd)).split()
    )
    wide = weft.shape(batch=1, heads=2, q_len=512, head_dim=256, dtype="bf16")
    full = torch.empty(1, 2, 512, 512)
    assert "have no room in SRAM" in " ".join(str(BIASED.explain(wide, device="h200", pairs=full)).split())


def test_a_form_says_what_it_wants_of_the_operand() -> None:
    message = "p4 is for a float operand of 4 bytes an element whose last index is kv_pos"
    with pytest.raises(weft.WeftError, match=message):
        BIASED.plan(sizes(64), device="h200", schedule="flash/flash_forward=hopper:128x128s2q1p4")
    with pytest.raises(weft.WeftError, match="expected p2, tiles of the operand whose gradient is wanted"):
        BIASED.plan(sizes(64), device="h200", schedule="flash/flash_backward=hopper:64x128s2")
    with pytest.raises(weft.WeftError, match="tiles of what pairs read are brought in one pass, with 64 queries"):
        BIASED.plan(sizes(64), device="h200", schedule="flash/flash_backward=hopper:128x128s2p2")


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_measured_masks_of_packed_queries_over_pages_go_to_triton(name: str) -> None:
    """What is measured would have places of packed rows and of padded ones: nothing is, and no module measures it."""
    signature = Signature(
        "forward", "sm_90", Dtypes.all("bf16"), Widths(64, 64), sequences=PACKED_PAGED, offset="bottom_right"
    )
    found = resolve(VARIANTS[name], signature, H200)
    assert found.target.name == ("hopper" if name == "causal" else "triton")
    assert found.code.tile_source == "program"
