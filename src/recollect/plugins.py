"""Import of users' modules, which register members and presets.

Nothing else in the library imports a module that a recipe, a configuration or a saved model names.
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

_imported: dict[str, str] = {}  # folder of each imported module


def import_modules(
    names: Sequence[str], *, folder: str | PathLike[str] = ".", option: str = "--import"
) -> None:
    """Import modules that register members and presets.

    Args:
        names: ``mine``, ``lab.members``, or a file, ``mine.py``.
        folder: searched after all installed modules.
        option: name of the option, for messages.

    Raises:
        ValueError: there is no such module, there are two, or its import fails.
    """
    for name in names:
        path = Path(folder)
        if name.endswith(".py"):
            path, name = (path / name).parent, Path(name).stem
        _import(name, path.absolute(), option)


def imported_modules() -> tuple[tuple[str, str], ...]:
    """Return name and folder of each module, for `import_modules` in another process."""
    return tuple(_imported.items())


def _import(name: str, folder: Path, option: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{option} {name!r} names no module: give it as Python's import does, or a .py file"
        )
    top = name.partition(".")[0]
    local = _file(PathFinder.find_spec(top, [str(folder)]))
    try:
        known = _file(sys.modules[top].__spec__) if top in sys.modules else _file(find_spec(top))
    except (AttributeError, ValueError):  # a module without a file
        known = "this process"
    if local is None and known is None:
        raise ValueError(
            f"{option} {name}: there is no module {top} in {folder}, and none is installed"
        )
    if local is not None and known is not None and local != known:
        raise ValueError(
            f"{option} {name}: {local} has the name of another module ({known}): rename yours"
        )
    if local is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        importlib.invalidate_caches()
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f for f in reversed(frames) if f.filename == (local or known)), None)
        place = "" if line is None else f" ({line.filename}, line {line.lineno})"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{option} {name} could not be imported{place}: {reason}") from error
    _imported[name] = str(folder)


def _file(spec: ModuleSpec | None) -> str | None:
    """Return the file of a module, and nothing for a bare folder."""
    return None if spec is None or not spec.origin else str(Path(spec.origin).absolute())
