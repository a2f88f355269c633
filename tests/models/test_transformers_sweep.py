"""Every class of transformers' auto mappings that can be built small: under "weft" as under "eager", or refused."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")  # the extra weft-attention[transformers]
from ..sweep.judge import Found, classes, timed  # noqa: E402
from ..sweep.record import BEGIN, END, PAGE, differing, recorded, table, version  # noqa: E402

PARTS = 24  # so that workers share them


@pytest.mark.thorough
@pytest.mark.slow(40)
@pytest.mark.parametrize("part", range(PARTS))
def test_classes_agree_or_are_refused(part: int) -> None:
    found = [timed(name)[0] for name in list(classes())[part::PARTS]]
    assert [f for f in found if f.status == "differs"] == []
    if transformers.__version__ == version():
        assert differing(found, recorded()) == [], "python -m tests.sweep --record writes it anew"


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "DogeForCausalLM", "T5ForConditionalGeneration", "BloomForCausalLM", "MptForCausalLM",
             "CanineModel", "ViTModel", "Qwen2VLForConditionalGeneration", "JambaForCausalLM", "DeepseekV3ForCausalLM"],
)  # fmt: skip
def test_a_few_agree(name: str) -> None:
    found, _ = timed(name)
    assert found.status == recorded()[name].status != "differs"


def test_the_page_says_what_the_sweep_found() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) + 1 : text.index(END)] == table(recorded())
    assert all(found.status != "differs" for found in recorded().values())


def test_a_record_that_is_old_is_seen() -> None:
    known = {"A": Found("A", "agrees"), "B": Found("B", "refused", "x")}
    assert differing([Found("A", "agrees"), Found("B", "refused", "y")], known) == []
    assert len(differing([Found("A", "differs"), Found("C", "agrees")], known)) == 2
    assert differing([Found("A", "not built", "ImportError: A requires the timm library")], known) == []
    assert len(differing([Found("A", "not built", "ValueError: of its size")], known)) == 1
