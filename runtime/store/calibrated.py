"""Where what `weft calibrate` measured is kept, and found again: one small file a machine in the cache folder.

The setting `WEFT_CALIBRATION` names a file in its place. A file of the cache folder that cannot be read, or is broken,
is left aside with a warning; one that the setting names is refused.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ...compiler.planning.machines import hardware
from ...compiler.planning.machines.rates import Calibration, Machine, calibration_of, text_of
from ...ir.caller import warn
from ...ir.errors import WeftError
from ..settings import calibration_file
from . import files

FOLDER = ".calibrated"
SETTING = "WEFT_CALIBRATION"


def file_of(machine: Machine) -> Path:
    """Where the calibration of a machine is kept, in a folder that is made if it is missing.

    Raises WeftError where the cache folder cannot be used.
    """
    return files.folder_of(FOLDER, "calibrations") / _file_name(machine)


def _file_name(machine: Machine) -> str:
    name = "-".join(re.findall(r"[a-z0-9]+", machine.name.lower()))
    return f"{machine.kind}-{name}-{machine.units}.json"


def write(found: Calibration, path: Path) -> None:
    """Keep a calibration in a file, which is whole at any time. Raises WeftError where it cannot be written."""
    try:
        files.write(path, text_of(found).encode())
    except OSError as error:
        raise WeftError(f"calibration {path}: cannot be written ({error.strerror})") from error
    forget()


def read(path: Path) -> Calibration:
    """Raises WeftError for a file that is missing or broken."""
    try:
        return calibration_of(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeftError(
            f"calibration {path}: cannot be read ({reason}); measure with `weft calibrate -o {path}`"
        ) from error


def found_of(machine: Machine) -> Calibration | None:
    """What was measured of a machine; None where nothing was.

    Raises WeftError where `WEFT_CALIBRATION` names a file that is broken, or is of another machine of this kind.
    """
    named = calibration_file()
    if named:
        found = _named(named)
        if found.machine.kind != machine.kind:
            return None
        if found.machine != machine:
            raise WeftError(
                f"{SETTING}: {named} is of {_words(found.machine)}, this is {_words(machine)}; "
                f"measure with `weft calibrate -o {named}`, or unset it"
            )
        return found
    try:
        folder = files.cache_dir() / FOLDER
    except WeftError:
        return None  # of which the cache itself warns
    return _in_folder(folder, machine)


def _words(machine: Machine) -> str:
    return f"{machine.name} ({machine.units} {'cores' if machine.kind == 'cpu' else 'SMs'})"


@cache
def _named(path: Path) -> Calibration:
    return read(path)


@cache
def _in_folder(folder: Path, machine: Machine) -> Calibration | None:
    path = folder / _file_name(machine)
    if not path.is_file():
        return None
    try:
        found = read(path)
    except WeftError as error:
        warn(f"weft: {error}. Until then figures are those without it", UserWarning)
        return None
    return found if found.machine == machine else None


def forget() -> None:
    """Look at the files again."""
    _named.cache_clear()
    _in_folder.cache_clear()


hardware.look_up_calibrations(found_of)
