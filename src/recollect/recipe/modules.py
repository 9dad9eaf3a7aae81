"""Modules of one's own, imported by name because their owner says so: they register members.

Nothing else in the library imports what a recipe, a configuration or a saved model names. What is
imported here is known, so that other processes can import it before they work for this one.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

__all__ = ["import_modules", "imported_modules"]

_imported: dict[str, str] = {}  # name: the folder beside which it was sought


def import_modules(
    names: Sequence[str], *, beside: str | PathLike[str] = ".", said: str = "--import"
) -> None:
    """Import modules, whose members and presets are known from then on.

    Args:
        names: as ``import`` takes them: ``mine``, ``lab.members``; or a file, ``mine.py``.
        beside: a folder whose modules are found too, after all installed ones.
        said: what names them in messages.

    Raises:
        ValueError: there is no such module, there are two, or it could not be imported.
    """
    for name in names:
        folder = Path(beside)
        if name.endswith(".py"):
            folder, name = (folder / name).parent, Path(name).stem
        _import(name, folder.absolute(), said)


def imported_modules() -> tuple[tuple[str, str], ...]:
    """Name and folder of each, in order, for `import_modules` in another process."""
    return tuple(_imported.items())


def _import(name: str, folder: Path, said: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{said} {name!r} names no module: give it as Python's import does, or a .py file"
        )
    top = name.partition(".")[0]
    local = _file(PathFinder.find_spec(top, [str(folder)]))
    try:
        known = _file(sys.modules[top].__spec__) if top in sys.modules else _file(find_spec(top))
    except (AttributeError, ValueError):  # made by hand: it has no file
        known = "this process"
    if local is None and known is None:
        raise ValueError(
            f"{said} {name}: there is no module {top} in {folder}, and none is installed"
        )
    if local is not None and known is not None and local != known:
        raise ValueError(
            f"{said} {name}: {local} has the name of another module ({known}): rename yours"
        )
    if local is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))  # and its processes, which take over sys.path
    try:
        importlib.invalidate_caches()
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if f.filename == (local or known)), None)
        where = "" if place is None else f" ({place.filename}, line {place.lineno})"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{said} {name} could not be imported{where}: {reason}") from error
    _imported[name] = str(folder)


def _file(spec: ModuleSpec | None) -> str | None:
    """The file of a module; a bare folder is none."""
    return None if spec is None or not spec.origin else str(Path(spec.origin).absolute())
