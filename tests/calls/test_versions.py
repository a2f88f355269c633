"""Versions of torch, Triton and transformers that were not tested are tried; those that lack something are refused."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from weft import UnavailableError
from weft.ir import versions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _anew() -> None:
    versions.warn_where_untested.cache_clear()


@pytest.mark.parametrize("version", ["2.8.1", "2.14.0", "2.14.0a0+git1234", "3.0"])
def test_an_unknown_version_is_tried_with_one_warning(version: str) -> None:
    with pytest.warns(RuntimeWarning, match=rf"torch {re.escape(version)} is tried.*tested are 2\.9 to 2\.13"):
        versions.warn_where_untested("torch", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_where_untested("torch", version)


def test_tested_versions_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("2.9.1", "2.11.0+cu130", "2.13.0"):
            versions.warn_where_untested("torch", version)


def test_what_is_missing_is_named() -> None:
    names = ("re:match", "re:no_such", "no_such_module:x", "pathlib:Path.no_such")
    lacks = versions.missing(names)
    assert lacks == list(names[1:])
    with pytest.raises(UnavailableError, match=r"triton 4\.0 lacks.*re:no_such.*pip install 'triton>=3\.6,<3\.8'"):
        versions.refuse("triton", "4.0", lacks)
    versions.refuse("triton", "4.0", [])


def test_an_import_that_fails_elsewhere_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers beside a torchvision of another torch: another version of transformers would not help."""
    (tmp_path / "lazy_library.py").write_text(
        "def __getattr__(name):\n"
        "    try:\n"
        "        raise RuntimeError('operator vision::nms does not exist')\n"
        "    except RuntimeError as error:\n"
        "        raise ModuleNotFoundError(f'Could not import module {name}') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lacks = versions.missing(["lazy_library:Interface.register"])
    with pytest.raises(UnavailableError, match=r"cannot be imported: lazy_library:.*nms does not exist.*mend") as found:
        versions.refuse("transformers", "5.24.0", lacks)
    assert "pip install" not in str(found.value)


def test_the_installed_triton_has_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from weft.codegen import triton_versions

    for target in ("triton", "hopper", "interpret"):
        triton_versions.check(target)
    triton_versions.check.cache_clear()
    monkeypatch.delattr("triton.runtime.cache.triton_key")
    with pytest.raises(UnavailableError, match=r"lacks what Weft uses of it: triton\.runtime\.cache:triton_key"):
        triton_versions.check("triton")
    triton_versions.check.cache_clear()


def test_the_lowest_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    for library, (lowest, _) in versions.TESTED.items():
        bounds = {line for line in wanted if re.match(rf"{library}\b", line)}
        assert bounds == {f"{library}>={lowest[0]}.{lowest[1]}"}
