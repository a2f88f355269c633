"""Weft inside other libraries, each imported when it is first asked for.

>>> import weft
>>> weft.integrations.transformers.register()  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import transformers as transformers

__all__ = ["transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
