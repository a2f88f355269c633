"""Each setting from the environment and from a block, and how they stack."""

import threading
from pathlib import Path

import pytest

from weft.ir.errors import WeftError
from weft.runtime import settings as module
from weft.runtime.settings import Settings, current, settings, trace


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("WEFT_DEBUG", "WEFT_CACHE_DIR", "WEFT_TARGET"):
        monkeypatch.delenv(name, raising=False)


def test_defaults():
    assert current() == Settings(debug=0, cache_dir=None, target=None)


def test_environment(monkeypatch):
    monkeypatch.setenv("WEFT_DEBUG", "3")
    monkeypatch.setenv("WEFT_CACHE_DIR", "/x/y")
    monkeypatch.setenv("WEFT_TARGET", "cpu")
    assert current() == Settings(3, Path("/x/y"), "cpu")
    monkeypatch.delenv("WEFT_TARGET")
    assert current().target is None


def test_a_block_goes_before_the_environment_and_inherits_the_rest(monkeypatch):
    monkeypatch.setenv("WEFT_DEBUG", "1")
    with settings(target="triton"):
        with settings(debug=4, cache_dir="/c") as inner:
            assert inner == current() == Settings(4, Path("/c"), "triton")
        assert current() == Settings(1, None, "triton")
    assert current() == Settings(1, None, None)


def test_a_block_ends_with_an_error_too_and_holds_for_its_own_thread():
    seen = []
    with pytest.raises(KeyError, match="x"), settings(debug=2):
        thread = threading.Thread(target=lambda: seen.append(current().debug))
        thread.start()
        thread.join()
        raise KeyError("x")
    assert seen == [0] and current().debug == 0


@pytest.mark.parametrize("text", ["5", "-1", "yes", "1.5"])
def test_a_wrong_level_in_the_environment_is_refused(monkeypatch, text):
    monkeypatch.setenv("WEFT_DEBUG", text)
    with pytest.raises(WeftError, match=f"WEFT_DEBUG.*expected a whole number from 0 to 4, got '?{text}"):
        current()


def test_a_wrong_level_in_a_block_is_refused():
    with pytest.raises(WeftError, match="expected a whole number from 0 to 4, got 9"), settings(debug=9):
        pass


def test_trace_prints_up_to_the_level(capsys):
    with settings(debug=module.CACHE):
        trace(module.PLAN, "plan")
        trace(module.CACHE, "cache")
        trace(module.IR, "ir")
    assert capsys.readouterr().err == "weft: plan\nweft: cache\n"


def test_the_table_names_every_setting():
    for name in Settings.__dataclass_fields__:
        assert f"`{name}=`" in (module.__doc__ or "")
