"""What leaves the cache of generated modules, by itself and by `prune`, and what stays."""

import errno
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

import weft.runtime.store.modules as cache
from weft.ir.errors import WeftError
from weft.runtime.settings import size_of
from weft.runtime.store import files, prune
from weft.runtime.store.modules import Key, load_or_build

from .caching import TEXT, build, die, forking, never, said_once, start

TODAY = Key("gemma_local", "flash_forward", "triton", "d128-bf16", "score=score mask=True", "flash 128x64")
DAY = 86400


def age(entry: cache.Entry, days: float) -> None:
    """As if it was last used so long ago."""
    then = time.time() - days * DAY
    os.utime(entry.path.with_name("meta.json"), (then, then))


def days_since_use(entry: cache.Entry) -> float:
    return (time.time() - entry.path.with_name("meta.json").stat().st_mtime) / DAY


def due(root: Path) -> None:
    """As if the last automatic prune was long ago."""
    os.utime(root / ".pruned", (0, 0))


def names() -> list[str]:
    return [info.folder.split("-")[0] for info in prune.entries()]


STALE = {
    "generator": ("other", "made by other code of weft"),
    "triton": ("1.0", "made for triton 1.0, here is .+"),
    "torch": ("0.4", "made for torch 0.4, here is .+"),
}


@pytest.mark.parametrize("field", STALE)
def test_what_other_code_and_versions_made_is_stale(root, field):
    value, match = STALE[field]
    load_or_build(TODAY, build)
    load_or_build(replace(TODAY, name="older", **{field: value}), build)
    sound, older = prune.entries()
    assert sound.stale == "" and re.fullmatch(match, older.stale) and (sound.problem, older.problem) == ("", "")
    assert prune.prune() == prune.Pruned(stale=1, over=0, size=older.size, left_overs=0)
    assert names() == ["gemma_local"] and not load_or_build(TODAY, never).built


def test_an_entry_under_another_name_than_its_keys_is_stale(root):
    entry = load_or_build(TODAY, build).path.parent
    entry.rename(root / f"{TODAY.label}-0123456789ab")  # as entries were named before they told the variant
    assert [info.stale for info in prune.entries()] == ["named after another key"]
    assert prune.prune().stale == 1


@pytest.mark.parametrize("meta", ["", "[1]", "{}", '{"key": {"name": "x", "new": "field"}}', '{"key": [1]}'])
def test_an_entry_without_a_key_is_stale(root, meta):
    load_or_build(TODAY, build).path.with_name("meta.json").write_text(meta)
    assert [info.stale for info in prune.entries()] == ["it has no key that can be read"]
    assert prune.prune().stale == 1


def test_prune_removes_unsound_entries_and_left_overs_and_nothing_else(root):
    sound, torn = load_or_build(TODAY, build), load_or_build(replace(TODAY, name="torn"), build)
    torn.path.write_text("half")
    others = [root / name for name in (".tmp-old", ".tmp-young", ".tuned", "branch-0123456789ab")]
    for folder in others:
        folder.mkdir()
        (folder / "work.c").write_text("mine")
    os.utime(root / ".tmp-old", (0, 0))
    os.utime(root / ".locks" / f"{torn.path.parent.name}.lock", (0, 0))
    assert (prune.prune().left_overs, names()) == (2, ["gemma_local"])
    assert [folder.exists() for folder in others] == [False, True, True, True]
    assert [lock.stem for lock in (root / ".locks").iterdir()] == [sound.path.parent.name]


def test_prune_to_a_size_removes_the_least_recently_used(root):
    loaded = {name: load_or_build(replace(TODAY, name=name), build) for name in ("a", "b", "c", "d")}
    for name, days in zip(loaded, (1, 4, 2, 3), strict=True):
        age(loaded[name], days)
    each = prune.size() // 4
    assert prune.prune(4 * each).over == 0
    assert prune.prune(2 * each + 1) == prune.Pruned(stale=0, over=2, size=2 * each, left_overs=0)
    assert names() == ["a", "c"]
    assert prune.prune(0).over == 2 and names() == []


def test_stale_entries_go_before_any_that_is_used(root):
    for name, days in (("used", 9), ("stale", 0)):
        age(load_or_build(replace(TODAY, name=name, torch="0.4" if name == "stale" else TODAY.torch), build), days)
    assert prune.prune(max(info.size for info in prune.entries())).over == 0
    assert names() == ["used"]


def test_a_hit_notes_the_day_and_not_each_hit(root):
    entry = load_or_build(TODAY, build)
    for days, expected in ((3, 0), (0.5, 0.5), (-400, 0)):  # -400: by a clock that was wrong
        age(entry, days)
        load_or_build(TODAY, never)
        assert days_since_use(entry) == pytest.approx(expected, abs=0.01)


def test_listing_is_no_use(root):
    entry = load_or_build(TODAY, build)
    age(entry, 5)
    assert time.time() - prune.entries()[0].used == pytest.approx(5 * DAY, abs=60)
    assert days_since_use(entry) == pytest.approx(5, abs=0.01)


def test_by_itself_only_stale_entries_that_were_long_unused_go(root):
    for name, torch, days in (("old", "0.4", 31), ("young", "0.4", 29), ("mine", TODAY.torch, 99)):
        age(load_or_build(replace(TODAY, name=name, torch=torch), build), days)
    due(root)
    load_or_build(TODAY, build)
    assert names() == ["gemma_local", "mine", "young"]


def test_by_itself_at_most_once_a_day_and_only_after_a_publish(root):
    old = replace(TODAY, name="old", torch="0.4")
    age(load_or_build(old, build), 31)
    load_or_build(TODAY, build)  # the first publish has set the stamp
    assert names() == ["gemma_local", "old"]
    due(root)
    load_or_build(TODAY, never)
    assert names() == ["gemma_local", "old"]
    load_or_build(replace(TODAY, name="new"), build)
    assert names() == ["gemma_local", "new"]
    assert time.time() - (root / ".pruned").stat().st_mtime < 60


def test_by_itself_the_cache_stays_below_its_size(root, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_MAX_SIZE", "5kB")
    for number in range(4):
        age(load_or_build(replace(TODAY, name=f"v{number}"), lambda: "#" * 2000), 4 - number)
    due(root)
    load_or_build(TODAY, build)
    assert prune.size() <= 5000 and names() == ["gemma_local", "v3"]


def test_a_size_that_cannot_be_read_gives_a_warning_and_the_default(root, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_MAX_SIZE", "lots")
    with said_once() as said:
        assert load_or_build(TODAY, build).source == TEXT
    assert (
        "WEFT_CACHE_MAX_SIZE: expected a size such as 200MB or 1GiB, got 'lots'. The cache is kept below 256 MB"
        in said[0]
    )


def test_a_prune_that_fails_by_itself_says_nothing(root, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(prune, "_survey", fails)
    assert load_or_build(TODAY, build).path.parent.parent == root


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("200MB", 200_000_000),
        ("200 mb", 200_000_000),
        ("1GiB", 2**30),
        ("1.5k", 1500),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes_as_people_write_them(text, expected):
    assert size_of(text, "size") == expected


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e3", "3 apples", "1 000", "٣"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(WeftError, match=f"--max-size: expected a size such as 200MB or 1GiB, got {text!r}"):
        size_of(text, "--max-size")


def test_an_entry_used_or_replaced_since_it_was_looked_at_stays(root):
    entry = load_or_build(TODAY, build)
    age(entry, 40)
    (info,) = prune.entries()
    load_or_build(TODAY, never)
    assert prune._retire(root, info) is False and not load_or_build(TODAY, never).built
    assert prune._retire(root, prune.entries()[0]) is True
    assert prune._retire(root, info) is False and not list(root.glob(".tmp-*"))


def test_an_unsound_entry_pruned_while_it_is_replaced_gives_no_warning(root, monkeypatch):
    entry = load_or_build(TODAY, build)
    entry.path.write_text("torn")
    rename = os.rename

    def prune_after_failure(source, target) -> None:
        try:
            rename(source, target)
        except OSError:
            monkeypatch.setattr(os, "rename", rename)
            prune.prune()
            raise

    monkeypatch.setattr(os, "rename", prune_after_failure)
    assert load_or_build(TODAY, build).path == entry.path
    assert not load_or_build(TODAY, never).built


def test_an_entry_removed_while_it_is_read_is_built_again(root, monkeypatch):
    load_or_build(TODAY, build)
    read = files.read_ours

    def read_after_prune(path: Path):
        if path.name == "source.py":
            prune._take_away(root, path.parent)
        return read(path)

    monkeypatch.setattr(cache, "read_ours", read_after_prune)
    assert load_or_build(TODAY, build).source == TEXT


@forking
def test_an_entry_leaves_by_one_rename(root):
    entry = load_or_build(TODAY, build).path.parent

    def die_while_removing() -> None:
        prune.remove = die
        prune.prune(0)

    victim = start(die_while_removing)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL and not entry.exists()
    (aside,) = root.glob(".tmp-*")
    assert sorted(path.name for path in aside.iterdir()) == ["meta.json", "source.py"]
    os.utime(aside, (0, 0))
    assert prune.prune().left_overs == 1 and not aside.exists()


@forking
def test_processes_load_what_others_prune(root):
    keys = [replace(TODAY, name=f"v{number}") for number in range(3)]
    end = time.time() + 1

    def load_all() -> None:
        while time.time() < end:
            for key in keys:
                assert (
                    load_or_build(key, lambda key=key: f"answer = {key.name!r}\n" * 500).source.count(key.name) == 500
                )

    def prune_all() -> None:
        while time.time() < end:
            prune.prune(0)

    workers = [start(work) for work in (load_all, load_all, prune_all, prune_all)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
