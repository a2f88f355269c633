"""A slice of the fuzzer (tests/fuzz): random declarations and calls against a definition that shares nothing with Weft.

A failure prints a script that repeats it; `python -m tests.fuzz --only <seed> --target <target>` draws it again.
"""

import re
from collections import Counter
from random import Random

import pytest
import torch

from tests.fuzz.calls import UNALIGNED, build
from tests.fuzz.declare import draw_variant
from tests.fuzz.dense import FP32, Environment, Undefined, evaluate
from tests.fuzz.invoke import KINDS, draw_call, has_few, kind_of
from tests.fuzz.judge import Verdict, actual, judge, start
from tests.fuzz.kinds import kinds
from tests.fuzz.run import Plan, variant_calls
from tests.fuzz.script import script
from tests.fuzz.sequences import Lens, Pages
from tests.fuzz.tree import Num, Op, Scalar, Sym, text

CPU = [f"suite.{n}" for n in range(110)]  # a variant each, of eight calls
INTERPRET = [f"suite.{n}" for n in range(10)]  # of two calls: the interpreter is slow


def check(seed: str, target: str) -> None:
    for event in variant_calls(seed, target, Plan()):
        assert event.failure is None, f"\n{event.failure.script}"
        assert event.kind != "declaration raised", event.message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", CPU)
def test_cpu(seed):
    check(seed, "cpu")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", INTERPRET)
def test_interpret(seed):
    check(seed, "interpret")


def environment(**scalars):
    positions = {"q_pos": torch.arange(4), "kv_pos": torch.arange(4)}
    return Environment(positions, None, scalars, {}, 4, torch.float64, FP32)


def test_text_of_expressions():
    tree = Op("mul", (Op("sub", (Sym("q_pos"), Num(-3)), "int"), Op("tanh", (Scalar("x", "float"),), "float")), "float")
    assert text(tree) == "(q_pos - (-3)) * weft.tanh(x)"


def test_ints_round_down():
    found = evaluate(Op("floordiv", (Op("sub", (Sym("q_pos"), Num(2)), "int"), Num(2)), "int"), environment())
    assert found.value.tolist() == [-1, -1, 0, 0]


def test_where_evaluates_what_is_taken():
    log = Op("log", (Op("mul", (Num(1.0), Sym("q_pos")), "float"),), "float")
    tree = Op("where", (Op("lt", (Num(0), Sym("q_pos")), "bool"), log, Num(7.0)), "float")
    assert evaluate(tree, environment()).value[:2].tolist() == [7.0, 0.0]


def test_comparisons_near_a_tie_are_no_calls_to_judge_by():
    third = Op("div", (Scalar("x", "float"), Num(3.0)), "float")
    with pytest.raises(Undefined, match="near a tie"):
        evaluate(Op("lt", (Op("mul", (third, Num(3.0)), "float"), Scalar("x", "float")), "bool"), environment(x=0.7))


@pytest.mark.parametrize("seed", range(6))
def test_scripts_repeat_the_call(seed, capsys):
    built = next(b for n in range(99) if (b := first_call(f"script.{seed}.{n}")) is not None)
    check_script(built, capsys)


@pytest.mark.parametrize("kind", ["paged", "packed paged"])
def test_scripts_of_pages_repeat_the_call(kind, capsys):
    seeds = (f"pages.{n}" for n in range(999))
    built = next(b for seed in seeds if (b := first_call(seed, kind)) is not None)
    assert "block_table=torch.tensor(" in script(built, Verdict("wrong"))
    check_script(built, capsys)


def check_script(built, capsys):
    found = actual(built, *start(built))
    name, result = list(found.items())[-1]
    at = (0,) * result.dim()
    exec(script(built, Verdict("wrong", place=(name, at, 0.5, 0.0))), {})
    assert capsys.readouterr().out == f"{name}{list(at)}: got {result[at].item()} expected 0.5\n"


def first_call(seed, kind=None, fp8=False):
    """A call that Weft computes, or None; of one kind of sequences."""
    random = Random(seed)
    variant = draw_variant(random)
    call = draw_call(random, variant, "cpu", fp8=fp8)
    if kind not in (None, kind_of(call)):
        return None
    try:
        built = build(variant, call)
        return built if judge(built).kind == "right" and built.call.pairs else None
    except Undefined:
        return None


# -- what is drawn -----------------------------------------------------------------------------------------------------
def test_a_pool_holds_each_sequence_once_or_shared():
    for shares in (False, True):
        pages, kv = Pages(4, 7, shares, spare=2), (9, 0, 4, 13)
        table, blocks, used = pages.table(kv), pages.blocks(kv), pages.used(kv)
        named = [row[i] for row, n in zip(table, (3, 0, 1, 4)) for i in range(n)]
        assert all(0 <= block < blocks for block in named) and blocks == 10
        assert (len(set(named)) == len(named)) != shares
        assert {b for b, rows in enumerate(used) if rows} == set(named) and sum(used) <= 26
        assert [len(places) for places in pages.places(kv)] == [*kv]
        assert {*map(len, table)} == {6} and named != sorted(named)


def test_lengths_that_are_those_of_the_operands_may_be_left_out():
    padded = Lens(False, (8, 8), (3, 5), brief=True)
    assert [*padded.options("cpu", 8, 5, None)] == ["kv_lens"]
    assert [*padded.options("cpu", 9, 5, None)] == ["q_lens", "kv_lens"]
    packed = Lens(True, (3, 5), (3, 5), brief=True)
    assert [*packed.options("cpu", 8, 8, None)] == ["cu_seqlens_q"]
    assert [*packed.options("cpu", 8, 8, Pages(4, 0, False, 0))] == ["cu_seqlens_q", "kv_lens", "block_table"]


WORDS = (
    *(f"sequences: {kind}" for kind in KINDS), *(f"page of {2**n}" for n in range(9)), "pages: blocks shared",
    "packed paged: long and short sequences", "one of the lengths not given", "few queries, 64 keys or more each",
    "q_offset: a tensor", "grouped heads", "layout: some unaligned", "normalizer: sigmoid", "normalizer: relu", "sink",
    "dropout: a scalar", "dropout: a number", "dropout: a number, train=False",
    *(f"latent, {form}: {kind}" for kind in ("dense", "padded", "packed") for form in ("absorbed", "expanded")),
    "latent, absorbed: paged", "latent, latent query: paged", "latent, absorbed: packed paged",
    "mask reads by both positions", "gradients: of lse alone", "deterministic=True", "deterministic=False",
    "gradient of a tensor of rank 0", "gradient of a table of pairs", "gradient of a sink's operand",
    "gradient of a table read at a function of both positions",
)  # fmt: skip


def test_every_kind_of_call_is_drawn():
    found = set()
    for n in range(3000):
        random = Random(f"kinds.{n}")
        variant = draw_variant(random)
        found |= set(kinds(variant, draw_call(random, variant, "cpu")))
    assert found >= set(WORDS)


@pytest.mark.parametrize("seed", [f"ends-suite.{n}" for n in range(12)])
def test_scores_without_a_value_behind_an_end(seed):
    check(seed, "cpu")


@pytest.mark.parametrize("target", ["cpu", "interpret"])
@pytest.mark.parametrize("seed", [f"fp8-suite.{n}" for n in range(8)])
def test_fp8_operands(seed, target):
    check(seed, target)


FP8_WORDS = (
    *(f"FP8 operands: {names}" for names in ("query, key, value", "key, value", "query", "cache", "query, cache")),
    *(f"FP8 cache: {kind}{few}" for kind in set(KINDS) for few in ("", ", few queries")),
    *(f"FP8 latent cache: {kind}" for kind in set(KINDS)),
    *(f"FP8 format: {kind}" for kind in ("e4m3", "e5m2", "both")),
    *(f"FP8 descales: {of}" for of in ("none", "a number", "one a head", "one a head of all", "one a row")),
    *(f"FP8 descales: one for {n} rows" for n in (64, 128)),
    *(f"FP8 value by columns: {kind}" for kind in set(KINDS)),
    *(f"rotary columns apart, FP8: {kind}" for kind in set(KINDS)),
    *(f"FP8 output: {dtype}" for dtype in ("float32", "float16", "left open")),
)  # fmt: skip
PRODUCT_WORDS = (  # what decides whether hopper multiplies as stored
    *(f"FP8 products: {kind}, descales of {of}" for kind in set(KINDS) for of in ("heads", "rows")),
    *(f"FP8 products: value by {layout}" for layout in ("rows", "columns")),
    *(f"FP8 products: D to {d}, Dv to {dv}" for d, dv in ((64, 64), (128, 64), (128, 128), (256, 128), (256, 256))),
)


@pytest.mark.parametrize("target", ["cpu", "triton"])
def test_every_kind_of_fp8_call_is_drawn(target):
    found = Counter()
    for n in range(1500):
        random = Random(f"fp8.{n}")
        variant = draw_variant(random, target)
        call = draw_call(random, variant, target, fp8=True)
        assert call.fp8 and not call.wanted and call.dtype != "float64"
        found += Counter(kinds(variant, call))
    assert found.keys() >= set(FP8_WORDS), set(FP8_WORDS) - found.keys()
    assert not (seldom := {word: found[word] for word in PRODUCT_WORDS if found[word] < 15}), seldom


def test_rotary_columns_apart_are_drawn_without_fp8():
    found = set()
    for n in range(2000):
        random = Random(f"apart.{n}")
        variant = draw_variant(random)
        found |= set(kinds(variant, draw_call(random, variant, "cpu")))
    assert {k for k in found if k.startswith("rotary columns apart, of 16")}


@pytest.mark.parametrize("seed", range(4))
def test_scripts_of_fp8_calls_repeat_them(seed, capsys):
    seeds = (f"fp8.script.{seed}.{n}" for n in range(99))
    check_script(next(b for own in seeds if (b := first_call(own, fp8=True)) is not None), capsys)


def test_scores_without_a_value_behind_an_end_are_drawn():
    """On request all scores, else some."""
    drawn = [draw_variant(Random(f"ends.{n}"), ends=n % 2 == 0) for n in range(200)]
    left = re.compile(r"weft\.(?:log2?|r?sqrt|exp2?)\(.*(?:kv_len|q_pos)|/ .*(?:kv_len|q_pos)")
    found = [bool(left.search(text(variant.score))) for variant in drawn]
    assert all(found[::2]) and 5 < sum(found[1::2]) < 60


def test_quotients_that_decide_are_drawn():
    drawn = [text(draw_variant(Random(f"quotients.{n}")).mask) for n in range(300)]
    assert sum(bool(re.search(r"weft\.floor\(\S+ / ", mask)) for mask in drawn) > 3


def test_keys_are_divided_in_calls_of_the_interpreter():
    found = set()
    for n in range(300):
        random = Random(f"divided.{n}")
        variant = draw_variant(random)
        found |= set(kinds(variant, draw_call(random, variant, "interpret")))
    assert found >= {"schedule: split_kv", "schedule: streaming", "schedule: standard", "schedule: flash"}


def test_latent_caches_of_models_are_drawn_for_a_gpu():
    found = set()
    for n in range(1600):
        random = Random(f"latent.{n}")
        variant = draw_variant(random, "hopper")
        if variant.latent is not None and variant.latent.rope == 64:
            call = draw_call(random, variant, "hopper")
            found |= {f"{kind_of(call)}, few: {has_few(call)}"}
    kinds_of_sequences = ("dense", "padded", "paged", "packed paged")
    assert found >= {f"{kind}, few: {few}" for kind in kinds_of_sequences for few in (True, False)}


@pytest.mark.parametrize("target", ["triton", "hopper"])
def test_calls_on_a_gpu_share_kernels(target):
    """A variant's calls have one direction, form and alignment; most have few queries where the first has."""
    alike = 0
    for n in range(60):
        random = Random(f"alike.{n}")
        variant = draw_variant(random)
        first = draw_call(random, variant, target)
        other = draw_call(random, variant, target, first)
        assert (other.dim, other.dtype, other.wanted, other.form) == (first.dim, first.dtype, first.wanted, first.form)
        alike += has_few(other) == has_few(first)
        if first.lens is not None and other.lens is not None:
            assert kind_of(other) == kind_of(first)
            assert (other.pages and other.pages.rows) == (first.pages and first.pages.rows)
        assert [g.layout in UNALIGNED for g in other.main] == [g.layout in UNALIGNED for g in first.main]
    assert alike >= 57
