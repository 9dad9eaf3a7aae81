"""The page of six knobs as part of the documentation: `mkdocs.yml` names this file as a hook."""

from __future__ import annotations

from typing import Any

from recollect.page.write import PAGE, render

__all__ = ["on_files"]


def on_files(files: Any, *, config: Any) -> Any:
    """Add the page to the files of the site, so that links to it are checked like others.

    Args:
        files: of the site, as mkdocs has found them. config: of the site.
    """
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=render()))
    return files
