"""Names and versions of the local tasks, which are YAML files of lm-eval."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

__all__ = ["local_folder", "local_tasks", "local_version"]


def local_folder() -> Path:
    """Return the folder of the local tasks, which lm-eval takes as ``--include_path``."""
    return Path(str(importlib.resources.files("recollect.lm.evaluation").joinpath("local")))


def local_tasks() -> tuple[str, ...]:
    """Return the names of the tasks that need no network, in alphabetical order.

    Examples:
        >>> rc.lm.local_tasks()[:2]
        ('fixture_drop', 'fixture_fda')
    """
    return tuple(sorted(path.stem for path in local_folder().glob("*.yaml")))


def local_version(name: str) -> str:
    """Return the version of a local task, which its file or the file that it includes states."""
    text = (local_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    if (base := re.search(r"^include: (\S+)$", text, re.MULTILINE)) is not None:
        text += (local_folder() / base[1]).read_text(encoding="utf-8")
    (version, *_) = re.findall(r"^  version: (\S+)$", text, re.MULTILINE)
    return version
