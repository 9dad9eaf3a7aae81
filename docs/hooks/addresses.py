"""Addresses of the project, from `[project.urls]` of `pyproject.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["PLACEHOLDER", "project_urls"]

PLACEHOLDER = "://example.org/"
"""Part of an address that is not set yet."""


def project_urls(root: Path) -> dict[str, str]:
    """Return the addresses that are set, by name: Repository, Issues, Documentation.

    Args:
        root: Folder of `pyproject.toml`.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return {name: url for name, url in project["urls"].items() if PLACEHOLDER not in url}
