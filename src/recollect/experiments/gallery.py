"""Page of all runs, as HTML and as Markdown: each figure with its claims and verdicts."""

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


def _load_runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
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
    articles = [_article(run_folder, data) for run_folder, data in _load_runs(folder)]
    if not articles:
        return None
    body = f'<h1>Reproductions</h1>\n<div class="gallery">\n{"".join(articles)}</div>\n'
    return write_atomic(folder / "index.html", render_page("Reproductions", body))


_FILES = ("figure.svg", "figure-narrow.svg")
"""Drawings of a run: for a page, and for narrow screens."""

RULE_CHANGED = "This rule was changed after a run:"


def _read(path: Path) -> str:
    """Return the text of a file, or an empty text if it does not exist."""
    return path.read_text("utf-8") if path.exists() else ""


def _article(folder: Path, data: dict[str, Any]) -> str:
    experiment = EXPERIMENTS[data["experiment"]]
    name, changes = experiment.name, _rule_changes(experiment)
    wide, narrow = (data_uri(_read(folder / file)) for file in _FILES)
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
        f'<p class="faint">{text_to_html(data["source"])}; {html.escape(_source_line(data))}</p>\n'
        f"{drawing}<ul>\n{claims}</ul></article>\n"
    )


def _rule_changes(experiment: Experiment) -> dict[str, str]:
    """Return the histories of changed rules by the names of their claims."""
    return {claim.name: claim.rule_history for claim in experiment.claims if claim.rule_history}


def _source_line(data: dict[str, Any]) -> str:
    records = data["records"]
    seeds = len({record["seed"] for record in records})
    return (
        f"{data['scale']} scale, {seeds} seed{'s' if seeds > 1 else ''}, {data['seconds']:,.0f} s, "
        f"{records[-1]['device']}, commit {records[-1]['commit']}"
        + ("" if data["complete"] else ", interrupted")
    )


_STATUSES = {
    "holds": "hold",
    "does not hold": "do not hold",
    "not testable at this scale": "cannot be tested at this scale",
}


def _summary(runs: Sequence[tuple[Path, dict[str, Any]]]) -> list[str]:
    """Return the numbers of claims by status, in all and by experiment, as lines of Markdown."""
    counts = {
        data["experiment"]: Counter(claim["verdict"] for claim in data["claims"])
        for _, data in runs
    }
    if not counts:
        return []
    total = sum(counts.values(), Counter[str]())
    parts = ", ".join(f"{total[status]} {plural}" for status, plural in _STATUSES.items())
    lines = [
        f"Of {total.total()} claims {parts}. The verdicts hold for these small runs and seeds.",
        "",
        f"| | shows | {' | '.join(_STATUSES)} |",
        "|---|---|---|---|---|",
    ]
    for name, count in counts.items():
        cells = " | ".join(str(count[status] or "") for status in _STATUSES)
        lines.append(f"| [{name}](#{name}) | {EXPERIMENTS[name].title} | {cells} |")
    return [*lines, ""]


def _claims(experiment: Experiment, data: dict[str, Any]) -> list[str]:
    """Return the claims with their verdicts, and their numbers and rules in a folded block."""
    changes = _rule_changes(experiment)
    claims: list[str] = []
    details: list[str] = []
    for number, claim in enumerate(data["claims"], 1):
        change = changes.get(claim["name"])
        remark = " (rule changed after a run)" if change else ""
        claims.append(f"{number}. **{claim['verdict'].capitalize()}**{remark}: {claim['claim']}")
        details.append(f"{number}. *Numbers:* {claim['evidence']}")
        rule, _, condition = claim["rule"].partition(", provided that ")
        details += ["", f"    *Rule:* {rule.removesuffix('.')}.", ""]
        if condition:
            details += [f"    *Tested only if* {condition}", ""]
        if change:
            details += [f"    *{RULE_CHANGED}* {change}", ""]
    if experiment.notes:
        details += [f"*Other configurations:* {experiment.notes}", ""]
    summary = "<summary>Numbers and rules</summary>"
    return [*claims, "", "<details markdown>", summary, "", *details, "</details>", ""]


INTRO = (
    "`recollect reproduce NAME --scale small` drew every figure below from the files in "
    "`results/reproduce/NAME`. Each claim of a paper has a verdict. Open *Numbers and rules* for "
    "the measurements and for the rule of the verdict, which was written before the run. Rules "
    "that were changed after a run are marked. [How this works](reproduce.md)."
)


def save_gallery_markdown(
    runs: str | PathLike[str], page: str | PathLike[str], *, intro: str = INTRO
) -> Path:
    """Write a Markdown page over all runs of a folder, and copies of its figures.

    Args:
        runs: the folder of runs.
        page: the page. Figures go to a folder of the page's name.
        intro: text above the first figure.
    """
    page, loaded = Path(page), _load_runs(Path(runs))
    lines = ["# Gallery", "", intro, ""]
    missing = [name for name in EXPERIMENTS if name not in {d["experiment"] for _, d in loaded}]
    if missing:
        lines += [f"Not run yet: {', '.join(missing)}.", ""]
    lines += _summary(loaded)
    for folder, data in loaded:
        experiment = EXPERIMENTS[data["experiment"]]
        lines += [f"## {experiment.name}", "", f"**{experiment.title}** ({data['source']})", ""]
        paths = [""] * len(_FILES)
        for index, (file, text) in enumerate((file, _read(folder / file)) for file in _FILES):
            if text:
                paths[index] = f"{page.stem}/{file.replace('figure', experiment.name)}"
                write_atomic(page.parent / paths[index], text)
        if paths[0]:
            lines += [picture(experiment.title, *paths), ""]
        lines += _claims(experiment, data)
        lines += [f"Run: {_source_line(data)}.", ""]
    return write_atomic(page, "\n".join(lines).rstrip() + "\n")
