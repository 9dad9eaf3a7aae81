"""The local tasks that are shipped: YAML files which lm-eval reads, and their names."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

__all__ = ["local_folder", "local_tasks", "local_version"]


def local_folder() -> Path:
    """Where the local tasks are; lm-eval takes it as ``--include_path``."""
    return Path(str(importlib.resources.files("recollect.lm.evaluation").joinpath("local")))


def local_tasks() -> tuple[str, ...]:
    """Names of the tasks that need no network, in alphabetical order.

    Examples:
        >>> rc.lm.local_tasks()[:2]
        ('fixture_drop', 'fixture_fda')
    """
    return tuple(sorted(path.stem for path in local_folder().glob("*.yaml")))


def local_version(name: str) -> str:
    """The version of a local task, as its file has it or the one that it includes.

    Args:
        name: of the task.
    """
    text = (local_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    own = re.search(r"^  version: (\S+)$", text, re.MULTILINE)
    if own is None:
        (base,) = re.findall(r"^include: (\S+)$", text, re.MULTILINE)
        text = (local_folder() / base).read_text(encoding="utf-8")
        (own,) = re.finditer(r"^  version: (\S+)$", text, re.MULTILINE)
    return own[1]
