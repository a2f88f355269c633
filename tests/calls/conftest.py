"""Fixtures of tests of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import weft.runtime.store.files as files
from weft.runtime.settings import settings


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache, of which nothing was said yet."""
    monkeypatch.setattr(files, "_warned", set())
    folder = tmp_path / "cache"
    with settings(cache_dir=folder):
        yield folder
