"""A slice of `make prove`: most masks of the library, some random ones, and mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("z3", reason="z3-solver is not installed: pip install -e '.[dev]'")
import z3

import weft
from tests.prove import gallery
from tests.prove.counterexample import Values, show
from tests.prove.kernels import kernel_question, missing, stretch_question
from tests.prove.mutants import MUTANTS, Mutant, planted
from tests.prove.proving import Tiles, prove, summary
from tests.prove.questions import Question
from tests.prove.solving import answer
from weft import masks, q_pos
from weft.compiler.analysis.tiles import proven

# One mask of each kind: other numbers in their place are left to `make prove`.
LIBRARY = (
    "everything", "not causal", "sliding window 128", "causal window scalar", "causal window by head", "prefix half",
    "attention sinks scalar", "longformer scalars", "swin 56 shifted 3", "natten in a sequence, dilated",
    "window ahead", "heads differ in kind", "lengths by batch", "block causal 64",
    "block causal scalar", "causal block diagonal 12", "dilated scalars", "strided 3", "natten 32",
    "documents in a window", "causal valid documents",
)  # fmt: skip
RANDOM = (3, 4, 5, 6, 9, 10, 12, 13, 14, 15, 16, 18)


@pytest.mark.parametrize("name", LIBRARY)
def test_masks_of_the_library_are_proven(name: str) -> None:
    proof = prove(name, gallery.named(name), seconds=30)
    assert proof.status == "proven", proof.text
    assert len(proof.answers) >= 16 and f"1 masks: {1} proven" in summary([proof])[0]


@pytest.mark.parametrize("seed", RANDOM)
def test_random_masks_are_proven(seed: int) -> None:
    proof = prove(f"random {seed}", gallery.named(f"random {seed}"), seconds=30)
    assert proof.status == "proven", proof.text


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.mistake)
def test_a_mistake_is_refuted(mutant: Mutant) -> None:
    with planted(mutant):
        tiles = Tiles.of(mutant.mask)
        asked = [(q, s) for q, s in tiles.questions(widths=False) if q.title == mutant.shown]
        (given,) = (answer(question, subject, 10) for question, subject in asked)
    assert given.status == "refuted", given
    assert given.counterexample is not None


@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=lambda m: m.mistake)
def test_without_the_mistake_the_same_question_is_proven(mutant: Mutant) -> None:
    def same(question: Question) -> bool:
        return question.title == mutant.shown

    assert [a.status for a in prove("", mutant.mask, wanted=same).answers] == ["proven"]


def test_a_counterexample_is_a_script_that_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    (mutant,) = (m for m in MUTANTS if m.mistake == "full parts are not clipped at the length")
    with planted(mutant):
        proof = prove("causal", mutant.mask, wanted=lambda question: question.title == mutant.shown)
        (script,) = proof.scripts
        weft.compiler.analysis.tiles.facts.facts_of.cache_clear()
        exec(script, {})
        weft.compiler.analysis.tiles.facts.facts_of.cache_clear()
    assert capsys.readouterr().out == "a full tile reaches past the end\n"
    exec(script, {})
    assert capsys.readouterr().out == "nothing is wrong\n"
    assert "refuted" in proof.text and "weft.parse_attention" in proof.text


def test_values_are_accepted_only_where_a_call_is() -> None:
    stride = weft.scalar("stride", int)
    attention = weft.Attention(mask=stride * q_pos <= 100)
    symbols = {"q_len": 9, "kv_len": 9, "q_offset": 0, "q_pos": 1, "kv_pos": 1, "q_first": 0, "q_last": 8,
               "start": 0, "block": 16}  # fmt: skip
    assert not show(attention, "kv", "division", Values(symbols, {"stride": 0}), say=lambda text: None)


def test_the_record_holds_what_is_proven_today() -> None:
    """The masks of the library are all in the file as they are now: else run `make prove`."""
    recorded = proven._digests()
    for name in LIBRARY:
        tiles = Tiles.of(gallery.named(name))
        assert proven.digest(tiles.mask, tiles.kv, tiles.q, tiles.survey) in recorded, name


def test_causal_is_proven_with_its_transpose() -> None:
    proof = prove("causal", Tiles.of(masks.causal).mask)
    assert {a.question for a in proof.answers} >= {"kv skipped", "q skipped", "kv order", "q casts", "q division"}


def test_kernels_count_rows_and_tiles_in_32_bits() -> None:
    assert not list(missing())
    assert answer(kernel_question(), None, 10).status == "proven"
    assert answer(kernel_question(longest=2**31 - 1), None, 10).status != "proven"  # why proofs end at 2**30


def test_no_tile_is_lost_between_stretches() -> None:
    asked = stretch_question()
    assert answer(asked, None, 30).status == "proven"
    solver = z3.Solver()
    solver.add(*asked.given)
    assert solver.check() == z3.sat
    name, tile = z3.Ints("stretch tile")  # of a tile that is looked for in the stretch before its own
    given = (*(g for g in asked.given if not g.eq(asked.given[-1])), name == tile / 128 - 1)
    assert answer(replace(asked, given=given), None, 10).status != "proven"


@pytest.mark.parametrize("name", ["causal", "causal documents by batch", "natten 32"])
def test_nothing_is_proven_for_lack_of_calls(name: str) -> None:
    """What is known of a call can be, with a tile that is visited and one that is not."""
    for question, _ in Tiles.of(gallery.named(name)).questions(widths=False):
        solver = z3.Solver()
        solver.add(*question.given, *question.accepted, *question.terms.everything(exact=True))
        assert solver.check() == z3.sat, question.title
