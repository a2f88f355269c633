"""The store of generated modules, under the accidents that it must survive."""

import errno
import multiprocessing
import os
import re
import shutil
import signal
import sys
import textwrap
import time
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
from filelock import FileLock

import weft.runtime.store.modules as cache
from tests import fresh
from weft.compiler.planning.machines.hardware import H200
from weft.compiler.planning.signature import Dtypes, Signature, Widths
from weft.ir.attention import Attention
from weft.ir.errors import WeftError
from weft.runtime.settings import settings
from weft.runtime.store import files, prune, tuned
from weft.runtime.store.modules import Key, load_or_build

from .caching import KEY, TEXT, build, die, forking, never, said_once, start

# --- keys ---------------------------------------------------------------------------------------------------------


def test_folder_is_readable_and_ends_in_a_digest():
    name, variant, digest = KEY.folder.rsplit("-", 2)
    assert name == "gemma_local-flash_forward-triton-d128-bf16"
    assert (len(variant), len(digest)) == (8, 12) and int(variant + digest, 16) >= 0
    assert KEY.edited_name == f"{name}-{variant}.py"


@pytest.mark.parametrize("field", [field.name for field in fields(Key)])
def test_every_component_changes_the_folder(field):
    assert replace(KEY, **{field: "other"}).folder != KEY.folder


def test_equal_keys_share_a_folder_and_moving_text_between_fields_does_not():
    assert replace(KEY).folder == KEY.folder
    assert replace(KEY, variant="ab", schedule="c").folder != replace(KEY, variant="a", schedule="bc").folder


def test_a_hostile_name_stays_one_path_component(root):
    key = replace(KEY, name="../../etc/x\n", layout="d" * 500)
    assert "/" not in key.folder and len(key.folder) < 200
    assert load_or_build(key, build).path.parent.parent == root


def test_versions_and_digest_of_this_installation_are_filled_in():
    key = Key("a", "b", "c", "d", "e", "f")
    assert len(key.generator) == 64 and key.torch[0].isdigit()
    assert key == Key("a", "b", "c", "d", "e", "f")


def test_generator_digest_sees_content_and_names_of_code_and_templates(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "runtime" / "store" / "modules.py"))
    template, seen = tmp_path / "templates" / "triton" / "k.py.jinja", set()
    template.parent.mkdir(parents=True)
    for change in (
        lambda: template.write_text("one"),
        lambda: template.write_text("two"),
        lambda: template.rename(template.with_name("l.py.jinja")),
        lambda: (tmp_path / "templates" / "new.py").write_text(""),
    ):
        change()
        seen.add(cache.generator_digest.__wrapped__())
    assert len(seen) == 4
    (tmp_path / "templates" / "notes.txt").write_text("not code")
    assert cache.generator_digest.__wrapped__() in seen


# --- the plain path -----------------------------------------------------------------------------------------------


def test_built_once_then_found(root):
    first, second = load_or_build(KEY, build), load_or_build(KEY, never)
    assert (first.built, second.built) == (True, False)
    assert first.path == second.path == root / KEY.folder / "source.py"
    assert first.source == second.source == first.path.read_text() == TEXT


def test_folders_and_files_are_private(root):
    path = load_or_build(KEY, build).path
    modes = {p: p.stat().st_mode & 0o777 for p in (root, path.parent, path, path.with_name("meta.json"))}
    assert list(modes.values()) == [0o700, 0o700, 0o600, 0o600]


def test_an_error_of_the_builder_is_passed_on_and_leaves_nothing(root):
    def fails() -> str:
        raise OSError(errno.ENOENT, "no template")

    with pytest.raises(OSError, match="no template"):
        load_or_build(KEY, fails)
    assert prune.entries() == [] and not list(root.glob(".tmp-*"))
    assert load_or_build(KEY, build).built


def test_an_edited_module_takes_the_place_of_the_generated_one(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_EDITED_DIR", str(tmp_path))
    assert load_or_build(KEY, build).source == TEXT
    mine = tmp_path / KEY.edited_name
    mine.write_text("answer = 43\n")
    with pytest.warns(RuntimeWarning, match=f"gemma_local runs the edited module {mine}"):
        assert load_or_build(KEY, build).source == "answer = 43\n"
    assert load_or_build(replace(KEY, schedule="flash 64x64"), never).source == "answer = 43\n"
    mine.write_bytes(b"\xff")
    with pytest.raises(WeftError, match=rf"{KEY.edited_name}: expected an edited module to load, got .*decode"):
        load_or_build(KEY, build)
    mine.unlink()
    assert load_or_build(KEY, build).source == TEXT


def test_an_edit_of_one_variant_is_not_loaded_for_another_of_the_same_name(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_EDITED_DIR", str(tmp_path))
    other = replace(KEY, variant="score=score mask=False")
    assert other.label == KEY.label and other.edited_name != KEY.edited_name
    (tmp_path / KEY.edited_name).write_text("answer = 43\n")
    with said_once() as said:
        for _ in range(2):
            assert load_or_build(other, build).source == TEXT
    assert re.fullmatch(
        f".*{KEY.edited_name} is not loaded: its name is of another variant, and gemma_local runs as generated. "
        f"If it is an edit of this variant, rename it to {other.edited_name}", said[0],
    )  # fmt: skip


def test_an_edit_that_does_not_name_its_variant_is_not_loaded(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_EDITED_DIR", str(tmp_path))
    (tmp_path / f"{KEY.label}.py").write_text("answer = 43\n")
    with said_once() as said:
        for _ in range(2):
            assert load_or_build(KEY, build).source == TEXT
    assert re.search(
        f"{KEY.label}.py is not loaded: its name does not say of which .*rename it to {KEY.edited_name}", said[0]
    )
    (tmp_path / f"{KEY.label}.py").rename(tmp_path / KEY.edited_name)
    with pytest.warns(RuntimeWarning, match="runs the edited module"):
        assert load_or_build(KEY, never).source == "answer = 43\n"


def test_files_of_other_names_in_the_folder_of_edits_say_nothing(root, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_EDITED_DIR", str(tmp_path))
    for name in ("notes.py", f"{KEY.label}-draft.py", f"{KEY.label}-0123abcd.txt", f"x{KEY.edited_name}"):
        (tmp_path / name).write_text("answer = 43\n")
    assert load_or_build(KEY, build).source == TEXT


def test_an_edited_kernel_is_the_one_that_runs(tmp_path):
    code = """
        import torch, weft
        q = torch.ones(1, 1, 8, 16)
        print(weft.Attention(mask=weft.masks.causal, name="mine")(q, q, q, target="cpu").sum().item())
    """
    generated, mine = tmp_path / "cache", tmp_path / "edited"
    environment = {**os.environ, "WEFT_CACHE_DIR": str(generated), "WEFT_EDITED_DIR": str(mine)}

    mine.mkdir()
    first = fresh.run(textwrap.dedent(code), env=environment, check=True)
    assert float(first.stdout) == 8 * 16 and "edited" not in first.stderr
    (entry,) = generated.glob("mine-*")
    text = (entry / "source.py").read_text() + textwrap.dedent("""
        generated = forward


        def forward(*arguments, out, **others):
            generated(*arguments, out=out, **others)
            out.mul_(2)
    """)
    (mine / f"{entry.name.rpartition('-')[0]}.py").write_text(text)
    second = fresh.run(textwrap.dedent(code), env=environment, check=True)
    assert float(second.stdout) == 2 * 8 * 16 and "mine runs the edited module" in second.stderr


def test_a_warm_start_is_quick(root):
    code = f"""
        import time
        import weft.runtime.store.modules as cache
        start = time.perf_counter()
        key = cache.Key("a", "b", "c", "d", "e", "f")
        built = cache.load_or_build(key, lambda: {TEXT!r}).built
        print(built, time.perf_counter() - start)
    """
    assert load_or_build(Key("a", "b", "c", "d", "e", "f"), lambda: TEXT).built
    environment = {**os.environ, "WEFT_CACHE_DIR": str(root)}
    built, seconds = fresh.run(textwrap.dedent(code), env=environment, check=True).stdout.split()
    assert built == "False" and float(seconds) < 0.25


def test_a_warm_call_reads_each_file_once_and_imports_nothing_that_only_building_needs(root):
    code = """
        import os, sys
        root, events = os.environ["WEFT_CACHE_DIR"], []
        sys.addaudithook(lambda event, arguments: events.append((event, *arguments)))
        import torch, weft
        query = torch.ones(1, 1, 8, 16)
        weft.Attention(mask=weft.masks.causal, name="warm")(query, query, query, target="cpu")
        print([name for name in ("filelock", "click", "rich") if name in sys.modules])
        print([event for event, *given in events if event != "compile" and str(given[:1]).startswith(f"['{root}")])
        print([os.path.basename(path) for event, path, *_ in events if event == "open" and str(path).startswith(root)])
    """
    environment = {**os.environ, "WEFT_CACHE_DIR": str(root)}
    for _ in range(2):
        said = fresh.run(textwrap.dedent(code), env=environment, check=True).stdout
        imported, touched, opened = said.splitlines()
    assert imported == "[]" and touched == str(["open"] * 2)
    assert opened == str(["meta.json", "source.py"])


# --- many processes, killed processes -----------------------------------------------------------------------------


@forking
def test_six_processes_build_once_and_all_get_the_text(root, tmp_path):
    log, together = tmp_path / "builds", multiprocessing.get_context("fork").Barrier(6)

    def slow_build() -> str:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.2)
        return TEXT

    def work() -> None:
        together.wait()
        assert load_or_build(KEY, slow_build).source == TEXT

    workers = [start(work) for _ in range(6)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert log.read_text() == "built\n"


def die_at(point: str) -> None:
    """Build in this process and die at the point named."""
    write, rename, renames = cache.write_new, os.rename, []

    def torn_write(path: Path, content: bytes) -> None:
        if path.name == point:
            path.write_bytes(content[:5])
            die()
        write(path, content)

    def dying_rename(source, target) -> None:
        renames.append(target)
        if point == "before rename" or (point == "between renames" and len(renames) == 3):
            die()
        rename(source, target)
        if point == "after rename":
            die()

    cache.write_new, os.rename = torn_write, dying_rename
    load_or_build(KEY, die if point == "build" else build)


@forking
@pytest.mark.parametrize(
    "point", ["build", "source.py", "meta.json", "before rename", "between renames", "after rename"]
)
def test_kill_9_leaves_a_usable_cache(root, point):
    if point == "between renames":  # two renames happen only where an unsound entry is replaced
        load_or_build(KEY, build).path.write_text("torn")
    victim = start(die_at, point)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    begin = time.perf_counter()
    assert load_or_build(KEY, build).source == TEXT
    assert time.perf_counter() - begin < 5, "waited for the lock of a dead process"
    assert load_or_build(KEY, never).source == TEXT


def test_old_left_overs_are_swept_and_young_ones_are_not(root, monkeypatch):
    """Not after each publish: looking for them lists the whole folder."""
    load_or_build(KEY, build)
    old, young = root / ".tmp-old", root / ".tmp-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "source.py").write_text("half")
    os.utime(old, (0, 0))
    load_or_build(replace(KEY, name="other"), build)
    assert old.exists()
    monkeypatch.setattr(prune, "SWEPT_SECONDS", 0)
    load_or_build(replace(KEY, name="third"), build)
    assert not old.exists() and young.exists()


def test_a_lock_that_is_never_released_does_not_stop_the_build(root, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    (root / ".locks").mkdir(parents=True)
    with FileLock(root / ".locks" / f"{KEY.folder}.lock"):
        assert load_or_build(KEY, build).source == TEXT
    assert not load_or_build(KEY, never).built


# --- unsound entries ----------------------------------------------------------------------------------------------


def replaced_by_link(path: Path, target: Path) -> None:
    shutil.move(path, target)
    path.symlink_to(target)


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


ACCIDENTS = {
    "torn source": lambda entry, _: (entry / "source.py").write_text(TEXT[:4]),
    "edited source": lambda entry, _: (entry / "source.py").write_text("answer = 41\n"),
    "not text": lambda entry, _: (entry / "source.py").write_bytes(b"\xff\xfe\x00"),
    "no source": lambda entry, _: (entry / "source.py").unlink(),
    "no meta": lambda entry, _: (entry / "meta.json").unlink(),
    "torn meta": lambda entry, _: (entry / "meta.json").write_text('{"sha'),
    "meta of another kind": lambda entry, _: (entry / "meta.json").write_text("[1]"),
    "source is a link": lambda entry, away: replaced_by_link(entry / "source.py", away),
    "entry is a link": lambda entry, away: replaced_by_link(entry, away),
    "entry is a file": lambda entry, _: replaced_by_file(entry),
    "source is a pipe": lambda entry, _: replaced_by_pipe(entry / "source.py"),
    "source writable by all": lambda entry, _: (entry / "source.py").chmod(0o666),
    "entry writable by the group": lambda entry, _: entry.chmod(0o770),
    "empty entry": lambda entry, _: [path.unlink() for path in entry.iterdir()],
}


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_unsound_entry_is_built_again(root, tmp_path, accident):
    entry = load_or_build(KEY, build).path.parent
    ACCIDENTS[accident](entry, tmp_path / "away")
    again = load_or_build(KEY, build)
    assert again.built and again.source == TEXT
    assert load_or_build(KEY, never).source == TEXT
    assert not list(root.glob(".tmp-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("part", ["", "source.py", "meta.json"])
def test_an_entry_of_another_user_is_built_again(root, part):
    entry = load_or_build(KEY, build).path.parent
    os.chown(entry / part, 65534, -1)
    assert load_or_build(KEY, build).built
    assert not load_or_build(KEY, never).built


def test_a_sound_entry_of_another_key_is_not_used(root):
    other = load_or_build(replace(KEY, variant="other"), lambda: "answer = 1\n").path.parent
    other.rename(root / KEY.folder)
    assert load_or_build(KEY, build).source == TEXT


# --- where the cache cannot be used -------------------------------------------------------------------------------


def test_a_full_disk_gives_one_warning_and_still_runs(root, monkeypatch):
    write = cache.write_new

    def full(path: Path, content: bytes) -> None:
        if root in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(cache, "write_new", full)
    with pytest.warns(RuntimeWarning, match="cannot be written .No space left on device.*WEFT_CACHE_DIR"):
        entry = load_or_build(KEY, build)
    assert entry.path.read_text() == entry.source == TEXT and root not in entry.path.parents
    assert not list(root.glob(".tmp-*")) and prune.entries() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_or_build(KEY, build).source == TEXT


def test_with_every_disk_full_the_source_stays_in_memory(root, monkeypatch):
    def full(*_) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(cache, "write_new", full)
    with pytest.warns(RuntimeWarning, match="Disk quota exceeded"):
        entry = load_or_build(KEY, build)
    assert entry.source == TEXT and not entry.path.exists()


def test_a_read_only_folder_serves_what_it_has_and_warns_for_the_rest(root, monkeypatch):
    load_or_build(KEY, build)
    shutil.rmtree(root / ".locks")

    def read_only(*_, **__) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for function in ("rename", "mkdir"):
        monkeypatch.setattr(os, function, read_only)
    assert not load_or_build(KEY, never).built
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert load_or_build(replace(KEY, name="other"), build).source == TEXT


@pytest.fixture
def read_only(root, monkeypatch):
    """Called, it makes the cache folder as on a disk that may only be read, which does not stop root by its mode."""

    def freeze() -> None:
        def refusing(function, writes=lambda *_: True):
            def call(path, *arguments, **named):
                if Path(os.fsdecode(path)).is_relative_to(root) and writes(*arguments):
                    raise OSError(errno.EROFS, "Read-only file system", str(path))
                return function(path, *arguments, **named)

            return call

        for name in ("mkdir", "rename", "replace", "utime", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))
        wanted = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        monkeypatch.setattr(os, "open", refusing(os.open, lambda flags=0, *_: flags & wanted))

    return freeze


@pytest.mark.parametrize("locks", [True, False])
def test_a_read_only_folder_gives_one_warning_for_all_that_it_lacks(root, read_only, locks):
    found = load_or_build(KEY, build).path
    os.utime(found.with_name("meta.json"), (0, 0))
    if not locks:
        shutil.rmtree(root / ".locks")
    read_only()
    others = [replace(KEY, name=name) for name in ("one", "two")]
    with said_once() as said:
        assert load_or_build(KEY, never).path == found
        for key in others:
            entry = load_or_build(key, build)
            assert entry.path.read_text() == entry.source == TEXT and root not in entry.path.parents
    assert re.search(
        rf"cache folder {root}: cannot be written \(Read-only file system\).*; set WEFT_CACHE_DIR to", said[0]
    )


def test_a_read_only_folder_says_so_to_who_prunes_or_clears_it(root, read_only):
    load_or_build(KEY, build)
    read_only()
    for command in (prune.prune, prune.clear):
        with pytest.raises(WeftError, match=rf"cache folder {root}: cannot be written \(Read-only file system\)"):
            command()
    assert not load_or_build(KEY, never).built


CALLS = Signature("forward", "sm_90", Dtypes.all("bf16"), Widths(128, 128))
TUNED = (Attention(name="tuned"), CALLS, H200, "triton")


def test_tuned_schedules_are_looked_up_in_a_read_only_folder_and_not_measured_for_it(root, read_only):
    load_or_build(KEY, build)
    read_only()
    assert tuned.remembered(*TUNED) == {}
    with pytest.raises(WeftError, match=r"folder of tuned schedules .*: cannot be written \(Read-only file system\)"):
        tuned.forget(tuned.key_of(*TUNED))


def nobody_knows_the_user(monkeypatch) -> None:
    import pwd

    def unknown(who):
        raise KeyError(who)

    for name in ("HOME", "XDG_CACHE_HOME", "WEFT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def a_parent_that_may_not_be_written(monkeypatch, tmp_path) -> None:
    mkdir = os.mkdir

    def refused(path, *arguments, **named):
        if Path(path).is_relative_to(tmp_path / "parent"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *arguments, **named)

    monkeypatch.setattr(os, "mkdir", refused)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "parent" / "cache"))


def a_working_folder_that_is_gone(monkeypatch, tmp_path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("WEFT_CACHE_DIR", "cache")


UNUSABLE = {
    "no home": (
        lambda patch, _: nobody_knows_the_user(patch),
        r"~/.cache/weft: no home folder is known of user \d+ \(HOME",
    ),
    "unknown user": (
        lambda patch, _: patch.setenv("WEFT_CACHE_DIR", "~nosuch/x"),
        "~nosuch/x: no home folder is known of user nosuch",
    ),
    "a file": (
        lambda patch, path: patch.setenv("WEFT_CACHE_DIR", str(path / "file")),
        "/file: expected a folder, got a file",
    ),
    "below a file": (
        lambda patch, path: patch.setenv("WEFT_CACHE_DIR", str(path / "file" / "cache")),
        r"/file/cache: cannot be made \(Not a directory\)",
    ),
    "a link to nothing": (
        lambda patch, path: patch.setenv("WEFT_CACHE_DIR", str(path / "link")),
        r"/link: cannot be made \(File exists\)",
    ),
    "no permission": (a_parent_that_may_not_be_written, r"/parent/cache: cannot be made \(Permission denied\)"),
    "no working folder": (a_working_folder_that_is_gone, "cache: the working folder is gone"),
    "a name too long": (
        lambda patch, path: patch.setenv("WEFT_CACHE_DIR", str(path / ("x" * 300))),
        r"cannot be made \(File name too long\)",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
@pytest.mark.parametrize("with_platformdirs", [True, False])
def test_a_folder_that_cannot_be_used_gives_one_warning_and_the_call_goes_on(
    tmp_path, monkeypatch, case, with_platformdirs
):
    arrange, match = UNUSABLE[case]
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    monkeypatch.setattr(files, "_warned", set())
    if not with_platformdirs:
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    arrange(monkeypatch, tmp_path)
    with said_once() as said:
        assert tuned.remembered(*TUNED) == {}
        for key in (KEY, replace(KEY, name="other")):
            assert load_or_build(key, build).path.read_text() == TEXT
    assert re.search(match, said[0]) and "set WEFT_CACHE_DIR to a folder that you own" in said[0]
    with pytest.raises(WeftError, match=match):
        prune.entries()


def test_a_nul_in_the_name_of_the_folder_gives_one_warning(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())
    with settings(cache_dir="/tmp/a\0b"), said_once() as said:
        assert tuned.remembered(*TUNED) == {}
        assert load_or_build(KEY, build).source == TEXT
    assert "cannot be made" in said[0]


@pytest.mark.parametrize("with_platformdirs", [True, False])
def test_the_users_cache_folder_where_none_is_named(tmp_path, monkeypatch, with_platformdirs):
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.delenv("WEFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if not with_platformdirs:
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert files.cache_dir() == tmp_path / "mine" / "weft"
    for unset in ("", None):
        monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert files.cache_dir() == tmp_path / ".cache" / "weft"
    monkeypatch.setenv("XDG_CACHE_HOME", "some/where")
    with said_once() as said:
        for _ in range(2):
            assert load_or_build(KEY, build).path.is_relative_to(tmp_path / ".cache" / "weft")
    assert re.match(
        "XDG_CACHE_HOME: expected an absolute path, got 'some/where'; .*instead. Give it an absolute path", said[0]
    )


def test_a_call_goes_on_without_a_cache(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path / "file")}
    code = """
        import torch, weft
        query = torch.ones(1, 1, 8, 16, requires_grad=True)
        weft.Attention(mask=weft.masks.causal)(query, query, query).sum().backward()
        print(query.grad.shape == query.shape)
    """
    done = fresh.run(textwrap.dedent(code), env=environment, check=True)
    assert done.stdout == "True\n" and done.stderr.count("RuntimeWarning") == 1


def test_a_folder_that_cannot_be_made_gives_a_warning_and_still_runs(root):
    with settings(cache_dir="/proc/weft"), pytest.warns(RuntimeWarning, match="/proc/weft: cannot be made"):
        assert load_or_build(KEY, build).path.read_text() == TEXT


def test_a_folder_that_others_may_write_to_is_not_trusted(root):
    load_or_build(KEY, build)
    root.chmod(0o777)
    with pytest.raises(WeftError, match=r"only its owner may write to, got mode 777; .*chmod 700"):
        files.cache_dir()
    with pytest.warns(RuntimeWarning, match="got mode 777"):
        entry = load_or_build(KEY, build)
    assert entry.built and root not in entry.path.parents


def test_a_folder_of_another_user_is_not_trusted(root, monkeypatch):
    load_or_build(KEY, build)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(WeftError, match=f"expected a folder of user {me + 1}, got one of user {me}"):
        files.cache_dir()
    with pytest.warns(RuntimeWarning, match="expected a folder of user"):
        assert load_or_build(KEY, build).built


# --- for the command line -----------------------------------------------------------------------------------------


def test_entries_size_and_clear(root):
    load_or_build(KEY, build)
    bad = load_or_build(replace(KEY, name="bad"), build).path
    bad.write_text("edited")
    listed = prune.entries()
    assert [info.folder.split("-")[0] for info in listed] == ["bad", "gemma_local"]
    assert [info.problem for info in listed] == ["source and checksum do not match: torn or edited", ""]
    assert prune.size() == sum(p.stat().st_size for p in root.glob("*/*") if p.parent.name != ".locks")
    assert time.time() - 60 < listed[0].created <= time.time() + 1
    assert prune.clear() == 2 and prune.entries() == []


def test_clear_keeps_what_is_not_ours(root):
    load_or_build(KEY, build)
    mine, similar = root / "notes.txt", root / "branch-0123456789ab"
    mine.write_text("mine")
    similar.mkdir()
    (similar / "work.c").write_text("mine")
    assert prune.clear() == 1
    assert sorted(path.name for path in root.iterdir()) == ["branch-0123456789ab", "notes.txt"]


def test_debug_level_2_tells_what_the_cache_does(root, capsys):
    with settings(debug=2):
        load_or_build(KEY, build)
        load_or_build(KEY, never)
    said = capsys.readouterr().err
    assert f"weft: cache wrote {KEY.folder}" in said and f"weft: cache hit {KEY.folder}" in said
    load_or_build(KEY, never)
    assert capsys.readouterr().err == ""
