"""The gate of changes of structure, `make same`: what it covers, and that it finds what differs."""

from __future__ import annotations

import json

import pytest

from tests.same.__main__ import MOST_PARAMETERS, RECORDED, differences, hashes, long_signatures, main
from tests.same.corpus import corpus
from tests.same.texts import texts_of


def test_corpus_has_enough_triples_of_every_target() -> None:
    found = corpus()
    assert len(found) >= 300
    assert {t.target for t in found} == {"hopper", "triton", "interpret", "cpu"}


def test_every_triple_is_recorded_with_its_texts() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert {t.name for t in corpus()} <= recorded.keys()
    refused = [name for name, parts in recorded.items() if "refusal" in parts]
    assert len(refused) <= 4, refused
    assert sum(part.startswith("ptx ") for parts in recorded.values() for part in parts) >= 80


def test_a_difference_is_found_and_named() -> None:
    texts = {"causal": texts_of("causal-cpu-cpu")}
    recorded = hashes(texts)
    assert differences(recorded, hashes(texts)) == []
    changed = {"causal": texts["causal"] | {"forward": texts["causal"]["forward"] + "\n"}}
    assert differences(recorded, hashes(changed)) == ["causal: forward differs"]
    gone = {"causal": {n: text for n, text in texts["causal"].items() if n != "stages"}}
    assert differences(recorded, hashes(gone)) == ["causal: stages is gone"]
    assert differences({}, recorded) == [f"causal: {part} is new" for part in sorted(texts["causal"])]


def test_one_triple_is_compared_with_its_own_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels that every variant has are neither new nor gone where --only leaves them out."""
    monkeypatch.setattr("sys.argv", ["same", "--only", "t5-causal-cpu-cpu", "--jobs", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("1 triples")


@pytest.mark.parametrize(
    "name",
    [
        "t5-packed_paged-hopper", "documents-packed-triton", "blocks-lengths-hopper", "documents-256x256-hopper-h200",
        "mla-paged-700-hopper", "bias-triton-h200", "window-streaming-triton-h200", "alibi-standard-triton-h200",
    ],
)  # fmt: skip
def test_functions_that_generated_code_calls_have_few_parameters(name: str) -> None:
    """`make same` holds it for the whole corpus: these had the longest lists, up to 29."""
    assert long_signatures({name: texts_of(name)}) == []


def test_a_long_list_of_parameters_is_found() -> None:
    names = ", ".join(f"a{n}" for n in range(MOST_PARAMETERS + 1))
    called, launched = f"@triton.jit\ndef f({names}):\n    pass\n", f"@run_time_kernel\ndef g({names}):\n    pass\n"
    assert long_signatures({"one": {"forward": called}, "two": {"backward": launched}}) == ["one: f has 9 parameters"]
