"""The templates of generated modules, as Jinja reads them. Imported where a module is generated, and not before."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from .shelf import shelf


@lru_cache(maxsize=1)
def environment(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_Shelved(),
    )


class _Shelved(jinja2.BytecodeCache):
    """Compiled templates on the shelf. Jinja looks whether they are those of the text that a template has now."""

    def load_bytecode(self, bucket: Bucket) -> None:
        found = shelf().read(bucket.key)
        if found is not None:
            bucket.bytecode_from_string(found)

    def dump_bytecode(self, bucket: Bucket) -> None:
        shelf().write(bucket.key, bucket.bytecode_to_string())
