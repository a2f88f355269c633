"""Compiled templates, kept in a folder of the cache: one for the code, the Python and the Jinja of this process.

As entries of the cache, what lies there is believed only if it is ours and whole, since it is code. Nothing here may
stop a calculation: what cannot be kept is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from ...codegen import template_shelf
from ..settings import CACHE, trace
from . import files
from .modules import TEMPLATES, generator_digest

_DIGEST = hashlib.sha256().digest_size


class _Folder:
    def read(self, name: str) -> bytes | None:
        folder = _folder()
        try:
            content = b"" if folder is None else files.read_ours(folder / name)[0]
        except (OSError, files.Unsound):
            return None
        digest, found = content[:_DIGEST], content[_DIGEST:]
        return found if digest == hashlib.sha256(found).digest() else None

    def write(self, name: str, content: bytes) -> None:
        folder = _folder()
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            files.write(folder / name, hashlib.sha256(content).digest() + content)
        except OSError as error:
            trace(CACHE, f"cache keeps no compiled template: {error}")


def _folder() -> Path | None:
    root = files.usable_root()
    return None if root is None else root / f"{TEMPLATES}{_kind()}"


@functools.cache
def _kind() -> str:
    """What compiled templates depend on besides their text."""
    made_by = (generator_digest(), sys.implementation.cache_tag, files.version_of("jinja2"))
    return hashlib.sha256(" ".join(map(str, made_by)).encode()).hexdigest()[:12]


template_shelf.use(_Folder())
