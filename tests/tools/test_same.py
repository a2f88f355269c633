"""The gate of changes of structure, `make same`: what it covers, and that it finds what differs."""

from __future__ import annotations

import json

from tests.same.__main__ import RECORDED, differences, hashes
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
