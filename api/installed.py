"""What of Weft is installed here, and the other project of that name on the package index."""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from pathlib import Path

DISTRIBUTION = "weft-attention"  # what pip calls this project
OTHER = "weft"  # what pip calls another one, whose package is also imported as `weft`
_HERE = Path(__file__).parents[1]
_METADATA = re.compile(rf"{OTHER}(-.+)?\.(dist|egg)-info")  # that of OTHER, and of no name that begins like it


def warn_of_the_other(folder: Path = _HERE) -> None:
    """Warn where another project wrote its package into this one's folder. Looks at the names in one folder only."""
    try:
        found = sorted(filter(_METADATA.fullmatch, os.listdir(folder)))
    except OSError:  # imported from an archive
        return
    if found:
        warnings.warn(
            f"weft: another project is installed over this one ({found[0]} in {folder}): pip calls it {OTHER!r}, this "
            f"one {DISTRIBUTION!r}, and each overwrites modules of the other. Run `pip uninstall {OTHER} "
            f"{DISTRIBUTION}`, then install Weft again",
            RuntimeWarning,
            stacklevel=3,
        )


def rows(version: str) -> list[tuple[str, str]]:
    """For `weft doctor`: this version and where it is imported from, and what else pip installed under its name."""
    found = [("weft", f"{version}, in {_HERE / 'weft'}{'' if _of(DISTRIBUTION) else '; not installed by pip'}")]
    other = _of(OTHER)
    if other is not None:
        where = other.locate_file(OTHER)
        found.append((
            "problem",
            f"pip also installed {OTHER!r} {other.version} ({where}): another project, or this one under its former "
            f"name. Whichever Python finds first is imported: run `pip uninstall {OTHER}`, then install Weft again",
        ))  # fmt: skip
    return found


def _of(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
