"""Generated pages of the documentation: `mkdocs.yml` names this file as a hook.

They are the page of the six choices, a page for each system of the zoo, and the reports of
`results/`, a folder outside of the documentation's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recollect.page.systems import INDEX, families, system_pages
from recollect.page.write import PAGE, render

__all__ = ["on_config", "on_files"]

_NONE = "# Results\n\nThis copy of the sources comes without measured results.\n"
_LINK = re.compile(r"\]\(([^)#:]+\.(?:png|svg))\)")


def on_config(config: Any) -> Any:
    """Put the made pages into the order of the site: systems by family, and results.

    Args:
        config: of the site; a navigation without these sections is left as it is.
    """
    sections = {name: of for entry in config.nav or [] for name, of in _section(entry)}
    if "Zoo" in sections:
        sections["Zoo"] += [{"All systems": INDEX}]
        sections["Zoo"] += [
            {family: [{name: f"zoo/{name}.md"} for name in names]}
            for family, names in families().items()
        ]
    if "Papers and results" in sections:
        sections["Papers and results"] += sorted(
            _results(_root(config)), key=lambda path: (path.count("/"), path)
        )
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add what is made, so that links to it are checked like others.

    Args:
        files: of the site, as mkdocs has found them. config: of the site.
    """
    from mkdocs.structure.files import File

    root = _root(config)
    made: dict[str, str] = {PAGE: render(), **system_pages(root / "results")}
    made.update(_results(root))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for path in _pictures(root):
        source = str(root / path)
        files.append(File.generated(config, path, abs_src_path=source))
    return files


def _section(entry: Any) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(entry, dict):
        yield from ((name, of) for name, of in entry.items() if isinstance(of, list))


def _root(config: Any) -> Path:
    return Path(config.docs_dir).parent


def _reports(root: Path) -> list[Path]:
    return sorted((root / "results").glob("**/*.md"))


def _results(root: Path) -> dict[str, str]:
    """Reports of measurements by their path in the site; links into docs/ lose that part."""
    found = {
        path.relative_to(root).as_posix(): path.read_text("utf-8").replace("](../docs/", "](../")
        for path in _reports(root)
    }
    return found or dict.fromkeys(("results/README.md", "results/language_models/README.md"), _NONE)


def _pictures(root: Path) -> list[str]:
    """The pictures that reports show."""
    return [
        (path.parent / link).relative_to(root).as_posix()
        for path in _reports(root)
        for link in _LINK.findall(path.read_text("utf-8"))
    ]
