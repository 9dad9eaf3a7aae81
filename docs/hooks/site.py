"""Hook of mkdocs that generates pages of the documentation.

The pages are the page of the six choices, the reference of the command line, a page for each system
of the zoo, and the reports of `results/`, a folder outside `docs/`. The addresses of the repository
and of the site come from `pyproject.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import systems
from addresses import project_urls
from recollect.page import write

__all__ = ["on_config", "on_files", "on_page_markdown"]

_NO_RESULTS = "# Results\n\nThis copy of the sources comes without measured results.\n"
_IMAGE_LINK = re.compile(r"\]\(([^)#:]+\.(?:png|svg))\)")
_DOCS_LINK = re.compile(r"\]\(((?:\.\./)+)docs/")
_REPORT_LINK = re.compile(r"\]\((?:\.\./)*(results/[\w/.-]+\.md)")


def on_config(config: Any) -> Any:
    """Set the addresses, and add the generated pages to the sections of the navigation."""
    urls = project_urls(_root(config))
    config.repo_url, config.site_url = urls.get("Repository"), urls.get("Documentation")
    config.repo_name = config.site_name if config.repo_url else None
    sections = {name: pages for entry in config.nav or [] for name, pages in _sections(entry)}
    if "Zoo" in sections:
        sections["Zoo"] += [{"All systems": systems.INDEX}]
        sections["Zoo"] += [
            {family: [{name: f"zoo/{name}.md"} for name in names]}
            for family, names in systems.families().items()
        ]
    if "Reference" in sections:
        sections["Reference"].insert(1, {"Command line": command_line.PAGE})
    if "Papers and results" in sections:
        sections["Papers and results"] += sorted(
            _results(_root(config)), key=lambda path: (path.count("/"), path)
        )
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated files to the files of the site, so that links to them are checked."""
    from mkdocs.structure.files import File

    root = _root(config)
    pages = {
        write.PAGE: write.render(),
        command_line.PAGE: command_line.render_commands(),
        **systems.system_pages(root / "results"),
    }
    for path, text in {**pages, **_results(root)}.items():
        files.append(File.generated(config, path, content=text))
    for path in _images(root):
        files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Adapt links to `results/`, which is next to `docs/` in the repository and inside the site."""
    to_docs = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"](../{to_docs}results/", f"]({to_docs}results/")


def _sections(entry: Any) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(entry, dict):
        yield from ((name, pages) for name, pages in entry.items() if isinstance(pages, list))


def _root(config: Any) -> Path:
    return Path(config.docs_dir).parent


def _reports(root: Path) -> list[Path]:
    return sorted((root / "results").glob("**/*.md"))


def _results(root: Path) -> dict[str, str]:
    """Return the reports of measurements by their path in the site, with adapted links."""
    pages = {
        path.relative_to(root).as_posix(): _DOCS_LINK.sub(r"](\1", path.read_text("utf-8"))
        for path in _reports(root)
    }
    return pages or dict.fromkeys(_linked_reports(root), _NO_RESULTS)


def _linked_reports(root: Path) -> list[str]:
    """Return the paths of the reports to which pages link, for a copy without results."""
    texts = (path.read_text("utf-8") for path in (root / "docs").glob("**/*.md"))
    return sorted({link for text in texts for link in _REPORT_LINK.findall(text)})


def _images(root: Path) -> list[str]:
    """Return the paths of the images in the reports."""
    return [
        (path.parent / link).relative_to(root).as_posix()
        for path in _reports(root)
        for link in _IMAGE_LINK.findall(path.read_text("utf-8"))
    ]
