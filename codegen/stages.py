"""The stages of a plan as comments of the code that does them: what `explain` says is what the kernel's source says."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ..compiler.planning.records import Stage
from ..ir.errors import InternalError

_MARK = "#stage#"
_MARKED = re.compile(rf"^( *){_MARK} (.*)$", re.MULTILINE)
WIDTH = 118


class StageComments:
    """The hole `stage(kernel, key)` of a template: prints a stage's words, and knows which stages were placed."""

    def __init__(self, stages: Mapping[str, Sequence[Stage]]) -> None:
        """stages: of every kernel that the template writes, by name."""
        self._words = {kernel: {stage.key: stage for stage in found} for kernel, found in stages.items()}
        self._placed: Counter[tuple[str, str]] = Counter()

    def __call__(self, kernel: str, key: str) -> str:
        stage = self._words.get(kernel, {}).get(key)
        if stage is None:
            raise InternalError(f"template: the plan has no stage {key!r} of kernel {kernel}")
        self._placed[kernel, key] += 1
        moves = f", {stage.moves}" if stage.moves else ""
        return f"{_MARK} {stage.kind} (each {stage.per}): {stage.what}{moves}"

    def has(self, kernel: str, key: str) -> bool:
        """Whether the plan has this stage: some depend on the variant."""
        return key in self._words.get(kernel, {})

    def check(self) -> None:
        """Raise InternalError unless every stage of the plan was placed exactly once."""
        for kernel, stages in self._words.items():
            for key in stages:
                times = self._placed[kernel, key]
                if times != 1:
                    raise InternalError(f"template: stage {key!r} of kernel {kernel} is placed {times} times, not once")


def wrapped(text: str) -> str:
    """Marked stages as comments, wrapped at the indentation of the line that they stand on."""

    return _MARKED.sub(lambda found: _comment(found[1], found[2]), text)


@lru_cache(maxsize=1024)
def _comment(indentation: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - len(indentation) - 2, subsequent_indent="  ")
    return "\n".join(f"{indentation}# {line}" for line in lines)
