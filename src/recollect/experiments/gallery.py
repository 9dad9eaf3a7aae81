"""A page over all runs: every figure with its claims and verdicts, as HTML and as Markdown."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.experiments.framework.experiment import Experiment
from recollect.experiments.registry import EXPERIMENTS
from recollect.report.files import read_regular, write_atomic
from recollect.report.notebook import text_to_html
from recollect.report.page import data_uri
from recollect.report.rendering import picture, render_page
from recollect.serialization import read_json

__all__ = ["save_gallery", "save_gallery_markdown"]


def _runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The runs below a folder, in the order of the registry."""
    found = []
    for name in EXPERIMENTS:
        path = folder / name / "results.json"
        if path.exists():
            try:
                found.append((path.parent, read_json(read_regular(path))))
            except ValueError as error:
                raise ValueError(
                    f"{path} is not JSON ({error}): run the experiment again"
                ) from None
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
    body = f'<h1>Reproductions</h1>\n<div class="gallery">\n{"".join(articles)}</div>\n'
    page = render_page("Reproductions", body)
    return write_atomic(folder / "index.html", page)


_FILES = ("figure.svg", "figure-narrow.svg")
"""Drawings of a run: for a page, and for narrow screens."""


def _read(path: Path) -> str:
    """The text of a file; empty if it does not exist."""
    return path.read_text("utf-8") if path.exists() else ""


def _article(home: Path, data: dict[str, Any]) -> str:
    experiment = EXPERIMENTS[data["experiment"]]
    name = experiment.name
    wide, narrow = (data_uri(_read(home / file)) for file in _FILES)
    drawing = picture(experiment.title, wide, narrow) if wide else ""
    changed = _changed(experiment)
    claims = "".join(
        f"<li>{text_to_html(c['claim'])} <strong>{html.escape(c['verdict'])}</strong>. "
        f"{text_to_html(c['evidence'])}"
        + (f" {CHANGED} {text_to_html(changed[c['name']])}" if c.get("name") in changed else "")
        + "</li>\n"
        for c in data["claims"]
    )
    return (
        f'<article id="{name}"><h2><a href="{name}/report.html">{name}</a>: '
        f"{text_to_html(experiment.title)}</h2>\n"
        f'<p class="faint">{text_to_html(data["source"])}; {html.escape(_where(data))}</p>\n'
        f"{drawing}<ul>\n{claims}</ul></article>\n"
    )


CHANGED = "This rule was changed after a run:"


def _changed(experiment: Experiment) -> dict[str, str]:
    """What rules were before they were changed, by the names of their claims."""
    return {claim.name: claim.rule_history for claim in experiment.claims if claim.rule_history}


def _where(data: dict[str, Any]) -> str:
    records = data["records"]
    seeds = len({record["seed"] for record in records})
    return (
        f"{data['scale']} scale, {seeds} seed{'s' if seeds > 1 else ''}, {data['seconds']:,.0f} s, "
        f"{records[-1]['device']}, commit {records[-1]['commit']}"
        + ("" if data["complete"] else ", interrupted")
    )


_STATUSES = ("holds", "does not hold", "not testable at this scale")
_PLURAL = {"holds": "hold", "does not hold": "do not", _STATUSES[2]: "cannot be tested so small"}


def _summary(found: Sequence[tuple[Path, dict[str, Any]]]) -> list[str]:
    """How many claims hold, in all and by experiment, as lines of Markdown."""
    counts = {
        data["experiment"]: Counter(claim["verdict"] for claim in data["claims"])
        for _, data in found
    }
    if not counts:
        return []
    total = sum(counts.values(), Counter[str]())
    told = ", ".join(f"{total[status]} {_PLURAL[status]}" for status in _STATUSES)
    lines = [
        f"Of {total.total()} claims {told}. A verdict is of these small runs and their seeds.",
        "",
    ]
    lines += [f"| | shows | {' | '.join(_STATUSES)} |", "|---|---|---|---|---|"]
    for name, count in counts.items():
        cells = " | ".join(str(count[status] or "") for status in _STATUSES)
        lines.append(f"| [{name}](#{name}) | {EXPERIMENTS[name].title} | {cells} |")
    return [*lines, ""]


INTRO = (
    "Every figure below was drawn by `recollect reproduce NAME --scale small`, from the files in "
    "`results/reproduce/NAME`. Each claim stands with its verdict, the numbers it rests on and the "
    "rule that was written before the run; where a rule was changed after one, that stands beside "
    "it. [How this works](reproduce.md)."
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
    lines += _summary(found)
    for home, data in found:
        experiment = EXPERIMENTS[data["experiment"]]
        lines += [f"## {experiment.name}", "", f"**{experiment.title}** ({data['source']})", ""]
        paths = [""] * len(_FILES)
        for index, (file, text) in enumerate((file, _read(home / file)) for file in _FILES):
            if text:
                paths[index] = f"{page.stem}/{file.replace('figure', experiment.name)}"
                write_atomic(page.parent / paths[index], text)
        if paths[0]:
            lines += [picture(experiment.title, *paths), ""]
        changed = _changed(experiment)
        for claim in data["claims"]:
            line = f"- {claim['claim']} **{claim['verdict'].capitalize()}.** {claim['evidence']} "
            line += f"*Rule: {claim['rule']}*"
            if claim["name"] in changed:
                line += f" **{CHANGED}** {changed[claim['name']]}"
            lines.append(line)
        lines += ["", f"{_where(data)}.", ""]
        if experiment.notes:
            lines += [f"Other configurations: {experiment.notes}", ""]
    return write_atomic(page, "\n".join(lines).rstrip() + "\n")
