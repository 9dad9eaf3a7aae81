"""The local tasks that are shipped: YAML files which lm-eval reads, and their names."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

__all__ = ["local_folder", "local_tasks"]


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
