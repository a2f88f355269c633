"""Generated source -> Python module, compiled by Triton or run by Triton's interpreter."""

import hashlib
import linecache
import re
import sys
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from ..ir.errors import WeftError
from .compiling import compiled, of_file

TEMPLATES = Path(__file__).parents[1] / "templates"
WITHOUT_HOLES = ("append_rows", "join_results", "quantize", "sum_listed")  # modules that are the same for all variants
_INCLUDED = re.compile(r'^\{% include "(.+)" %\}\n', re.MULTILINE)
_HEAD = re.compile(r"^\{#-.*?-#\}\n", re.DOTALL)  # the comment in which a template says what it is
_folders = [TEMPLATES]
_modules: dict[tuple[str, str, bool], ModuleType] = {}
_lock = threading.RLock()


def load(path: Path, interpret: bool = False, source: str | None = None) -> ModuleType:
    """The module of one generated file, loaded once per (path, content, interpret).

    source: the file's text if it was read before, as the cache does to check it. What runs is this text, whatever
    happens to the file afterwards; it need not be on disk at all.
    interpret: kernels of the module run in Triton's interpreter, on CPU tensors, in any process.

    Raises WeftError if the file cannot be read. Errors in the source itself are raised as they are, with a note.
    """
    text = _read(path) if source is None else source
    digest = hashlib.sha256(text.encode()).hexdigest()
    identity = (str(path), digest, interpret)
    with _lock:
        if identity not in _modules:
            _modules[identity] = _execute(path, text, digest, interpret)
        return _modules[identity]


def register_templates(folder: Path) -> None:
    """Find templates in another folder, too: kernels, features or sources of rows of another package."""
    _folders.append(folder)


def unregister_templates(folder: Path) -> None:
    """Take that folder away again."""
    _folders.remove(folder)


def folders_of_templates() -> tuple[Path, ...]:
    """Where templates are looked for, in order."""
    return tuple(_folders)


def digest_of_templates(names: Iterable[str]) -> str:
    """A mark of the texts of these templates, for the key of what is generated; "" for Weft's own."""
    outside = [folder / name for name in names for folder in _folders[1:] if not (TEMPLATES / name).exists()]
    texts = [_read(path) for path in outside if path.exists()]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest() if texts else ""


@cache
def without_holes(kernel: str, interpret: bool) -> ModuleType:
    """The module of a kernel whose template has no holes: its text is loaded, and Jinja is not imported for it."""
    path = TEMPLATES / "triton" / f"{kernel}.py.jinja"
    text = text_without_holes(kernel)
    return load(path.with_suffix(""), interpret=interpret, source=text[text.index('"""') :])


def text_without_holes(kernel: str) -> str:
    """The text of such a template, with the parts that it includes: these have no holes either."""
    text = _read(TEMPLATES / "triton" / f"{kernel}.py.jinja")
    return _INCLUDED.sub(lambda found: _HEAD.sub("", _read(TEMPLATES / found[1])), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(f"{path}: expected a generated module to load, got {error}") from error


def _execute(path: Path, text: str, digest: str, interpret: bool) -> ModuleType:
    module = ModuleType(_module_name(path, digest, interpret))
    module.__file__ = str(path)
    # triton.jit asks inspect for the source of each kernel. An entry without a time stamp is never read again from
    # disk, so what is compiled is the text that was checked, also if the file is edited or gone.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    try:
        if interpret:
            from .interpret import execute_interpreted  # lazy: imports triton

            execute_interpreted(text, module)
        else:
            for lines, code in compiled(text):
                exec(of_file(code, str(path), lines), module.__dict__)
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, SyntaxError) and error.filename == "<generated>":
            error.filename = str(path)
        error.add_note(f"while loading the generated module {path}")
        raise
    return module


def _module_name(path: Path, digest: str, interpret: bool) -> str:
    """The same in every process, because Triton's own cache of compiled kernels sees it."""
    label = re.sub(r"\W", "_", path.parent.name or path.stem)
    return f"weft_generated_{label}_{digest[:8]}{'_interpreted' if interpret else ''}"
