"""Page of all runs as HTML: each figure with its claims and verdicts."""

from __future__ import annotations

import html
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

__all__ = [
    "FIGURE_FILES",
    "RULE_CHANGED",
    "describe_run",
    "load_runs",
    "read_if_exists",
    "rule_changes",
    "save_gallery",
]


def load_runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders and results of the runs below a folder, in the registry's order."""
    runs = []
    for name in EXPERIMENTS:
        path = folder / name / "results.json"
        if path.exists():
            try:
                runs.append((path.parent, read_json(read_regular(path))))
            except ValueError as error:
                raise ValueError(
                    f"{path} is not JSON ({error}): run the experiment again"
                ) from None
    return runs


def save_gallery(folder: str | PathLike[str]) -> Path | None:
    """Write ``index.html``, which needs no other file, over the runs of a folder, if any."""
    folder = Path(folder)
    articles = [_article(run_folder, data) for run_folder, data in load_runs(folder)]
    if not articles:
        return None
    body = f'<h1>Reproductions</h1>\n<div class="gallery">\n{"".join(articles)}</div>\n'
    return write_atomic(folder / "index.html", render_page("Reproductions", body))


FIGURE_FILES = ("figure.svg", "figure-narrow.svg")
"""Drawings of a run: for a page, and for narrow screens."""

RULE_CHANGED = "This rule was changed after a run:"


def read_if_exists(path: Path) -> str:
    """Return the text of a file, or an empty text if it does not exist."""
    return path.read_text("utf-8") if path.exists() else ""


def _article(folder: Path, data: dict[str, Any]) -> str:
    experiment = EXPERIMENTS[data["experiment"]]
    name, changes = experiment.name, rule_changes(experiment)
    wide, narrow = (data_uri(read_if_exists(folder / file)) for file in FIGURE_FILES)
    drawing = picture(experiment.title, wide, narrow) if wide else ""
    claims = "".join(
        f"<li>{text_to_html(c['claim'])} <strong>{html.escape(c['verdict'])}</strong>. "
        f"{text_to_html(c['evidence'])}"
        + (
            f" {RULE_CHANGED} {text_to_html(changes[c['name']])}"
            if c.get("name") in changes
            else ""
        )
        + "</li>\n"
        for c in data["claims"]
    )
    return (
        f'<article id="{name}"><h2><a href="{name}/report.html">{name}</a>: '
        f"{text_to_html(experiment.title)}</h2>\n"
        f'<p class="faint">{text_to_html(data["source"])}; {html.escape(describe_run(data))}</p>\n'
        f"{drawing}<ul>\n{claims}</ul></article>\n"
    )


def rule_changes(experiment: Experiment) -> dict[str, str]:
    """Return the histories of changed rules by the names of their claims."""
    return {claim.name: claim.rule_history for claim in experiment.claims if claim.rule_history}


def describe_run(data: dict[str, Any]) -> str:
    """Return the scale, seeds, time, device and commit of a run."""
    records = data["records"]
    seeds = len({record["seed"] for record in records})
    return (
        f"{data['scale']} scale, {seeds} seed{'s' if seeds > 1 else ''}, {data['seconds']:,.0f} s, "
        f"{records[-1]['device']}, commit {records[-1]['commit']}"
        + ("" if data["complete"] else ", interrupted")
    )
