"""A page over all runs: every figure with its claims and verdicts, as HTML and as Markdown."""

from __future__ import annotations

import base64
import html
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.experiments.registry import EXPERIMENTS
from recollect.recipe.json_text import read_json
from recollect.report.files import write_atomic
from recollect.report.html import prose

__all__ = ["save_gallery", "save_gallery_markdown"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #5b6470; --paper: #fff;
  --line: #d5dae0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --faint: #a0a9b4; --paper: #15181c;
  --line: #363c44; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.05rem; margin: 0 0 .2rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(34rem, 100%), 1fr));
  gap: 1.5rem; }
article { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; }
img { width: 100%; height: auto; background: #fff; border-radius: 6px; }
p, li { font-size: .9rem; margin: .3rem 0; } .faint { color: var(--faint); }
ul { padding-left: 1.1rem; margin: .4rem 0; }
"""


def _runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The runs below a folder, in the order of the registry."""
    found = []
    for name in EXPERIMENTS:
        path = folder / name / "results.json"
        if path.exists():
            found.append((path.parent, read_json(path.read_text("utf-8"))))
    return found


def save_gallery(folder: str | PathLike[str]) -> Path | None:
    """Write ``index.html`` over all runs of a folder; it needs nothing else.

    Returns:
        Its path, or nothing where there is no run.
    """
    folder = Path(folder)
    articles = [_article(home, data) for home, data in _runs(folder)]
    if not articles:
        return None
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Reproductions</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Reproductions</h1>\n<main>\n{''.join(articles)}</main>\n</body>\n</html>\n"
    )
    return write_atomic(folder / "index.html", page)


def _article(home: Path, data: dict[str, Any]) -> str:
    experiment = EXPERIMENTS[data["experiment"]]
    name = experiment.name
    picture = ""
    if (home / "figure.svg").exists():
        inline = base64.b64encode((home / "figure.svg").read_bytes()).decode("ascii")
        source = f"data:image/svg+xml;base64,{inline}"
        picture = f'<img alt="{html.escape(experiment.title)}" src="{source}">'
    claims = "".join(
        f"<li>{prose(c['claim'])} <strong>{html.escape(c['verdict'])}</strong>. "
        f"{prose(c['because'])}</li>\n"
        for c in data["claims"]
    )
    return (
        f'<article id="{name}"><h2><a href="{name}/report.html">{name}</a>: '
        f"{prose(experiment.title)}</h2>\n"
        f'<p class="faint">{prose(data["source"])}; {html.escape(_where(data))}</p>\n'
        f"{picture}<ul>\n{claims}</ul></article>\n"
    )


def _where(data: dict[str, Any]) -> str:
    records = data["records"]
    seeds = len({record["seed"] for record in records})
    return (
        f"{data['scale']} scale, {seeds} seed{'s' if seeds > 1 else ''}, {data['seconds']:,.0f} s, "
        f"{records[-1]['device']}, commit {records[-1]['commit']}"
        + ("" if data["complete"] else ", interrupted")
    )


INTRO = (
    "Every figure below was drawn by `recollect reproduce NAME --scale small`, from the files in "
    "`results/reproduce/NAME`. Each claim stands with its verdict, the numbers it rests on and the "
    "rule that was committed before the run. [How this works](reproduce.md)."
)


def save_gallery_markdown(
    runs: str | PathLike[str], page: str | PathLike[str], *, intro: str = INTRO
) -> Path:
    """Write a Markdown page over all runs of a folder, its figures copied beside it.

    Args:
        runs: the folder of runs.
        page: the page; figures go to a folder of the page's name.
        intro: what stands above the first figure.
    """
    page = Path(page)
    found = _runs(Path(runs))
    lines = ["# Gallery", "", intro, ""]
    missing = [name for name in EXPERIMENTS if name not in {d["experiment"] for _, d in found}]
    if missing:
        lines += [f"Not run yet: {', '.join(missing)}.", ""]
    for home, data in found:
        experiment = EXPERIMENTS[data["experiment"]]
        lines += [f"## {experiment.name}", "", f"**{experiment.title}** ({data['source']})", ""]
        if (home / "figure.svg").exists():
            picture = Path(page.stem) / f"{experiment.name}.svg"
            write_atomic(page.parent / picture, (home / "figure.svg").read_bytes())
            lines += [f"![{experiment.title}]({picture.as_posix()})", ""]
        for claim in data["claims"]:
            lines += [
                f"- {claim['claim']} **{claim['verdict'].capitalize()}.** {claim['because']} "
                f"*Rule: {claim['rule']}*"
            ]
        lines += ["", f"{_where(data)}.", ""]
        if experiment.tried:
            lines += [f"Tried: {experiment.tried}", ""]
    return write_atomic(page, "\n".join(lines).rstrip() + "\n")
