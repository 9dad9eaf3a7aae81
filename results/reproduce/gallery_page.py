"""Markdown page of all runs, with copies of their figures: ``docs/gallery.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.experiments.framework.experiment import Experiment
from recollect.experiments.gallery import (
    FIGURE_FILES,
    RULE_CHANGED,
    describe_run,
    load_runs,
    read_if_exists,
    rule_changes,
)
from recollect.experiments.registry import EXPERIMENTS
from recollect.report.files import write_atomic
from recollect.report.rendering import picture

__all__ = ["save_gallery_markdown"]

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
    changes = rule_changes(experiment)
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
    page, loaded = Path(page), load_runs(Path(runs))
    lines = ["# Gallery", "", intro, ""]
    missing = [name for name in EXPERIMENTS if name not in {d["experiment"] for _, d in loaded}]
    if missing:
        lines += [f"Not run yet: {', '.join(missing)}.", ""]
    lines += _summary(loaded)
    for folder, data in loaded:
        experiment = EXPERIMENTS[data["experiment"]]
        lines += [f"## {experiment.name}", "", f"**{experiment.title}** ({data['source']})", ""]
        paths = [""] * len(FIGURE_FILES)
        for index, (file, text) in enumerate(
            (file, read_if_exists(folder / file)) for file in FIGURE_FILES
        ):
            if text:
                paths[index] = f"{page.stem}/{file.replace('figure', experiment.name)}"
                write_atomic(page.parent / paths[index], text)
        if paths[0]:
            lines += [picture(experiment.title, *paths), ""]
        lines += _claims(experiment, data)
        lines += [f"Run: {describe_run(data)}.", ""]
    return write_atomic(page, "\n".join(lines).rstrip() + "\n")
