"""The report of a training run: how it went, where it ended, and the plan that says it again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import Trained
from recollect.report.environment import describe_environment
from recollect.report.figures import Panel, Series, panel_figure
from recollect.report.page import Figure, Note, Report
from recollect.report.tables import Table

__all__ = ["save_run_page"]

Points = Sequence[tuple[int, float]]

_CURVES = (
    ("loss", "training loss, nats per token"),
    ("eval_bits_per_byte", "held-out bits per byte"),
    ("tokens_per_second", "tokens per second"),
)
"""Of a log line what is drawn, and what it is."""


def save_run_page(
    trained: Trained,
    plan: TrainPlan,
    *,
    summary: Mapping[str, str] | None = None,
    command: str = "",
) -> Path:
    """Write ``report.html`` into the folder of a run that came to its end.

    Args:
        trained: what the run ended with.
        plan: that it followed.
        summary: lines of the summary, by name.
        command: the command line to print on the page.

    Raises:
        OSError: the folder cannot be written.
    """
    found = {name: _points(trained.history, name, plan) for name, _ in _CURVES}
    facts = dict(summary or {})
    about = describe_environment(trained.model.device).facts()
    device = facts.pop("device", "")
    facts |= {**about, "device": f"{about['device']}; {device}" if device else about["device"]}
    sections: list[Table | Figure | Note] = [_end(trained)]
    sections += _drawn(found)
    if trained.notes or trained.skipped_lines:
        lines = [*trained.notes, *(f"left out: {line}" for line in trained.skipped_lines)]
        sections.append(Note(title="Notes", text="\n".join(lines)))
    written = json.dumps(plan.to_dict(), indent=2, ensure_ascii=False)
    sections.append(Note(title="The plan", text=written, code=True))
    report = Report(
        kind="training",
        title=f"Training run {trained.folder.parent.name}",
        command=command,
        summary=_found(trained, plan, found),
        facts=facts,
        sections=sections,
    )
    return report.save(trained.folder.parent / "report.html")


def _points(history: Sequence[Mapping[str, float]], name: str, plan: TrainPlan) -> Points:
    """(tokens, value) of the log's lines; of a step that was taken again the last one."""
    found = {int(line["step"]): float(line[name]) for line in history if name in line}
    return [(step * plan.tokens_per_step, found[step]) for step in sorted(found)]


def _end(trained: Trained) -> Table:
    rows: list[tuple[str, str | int | float | None]] = [
        ("training loss of the last steps, nats per token", trained.loss),
        ("held-out loss, nats per token", trained.heldout_loss),
        ("held-out bits per byte", trained.heldout),
        ("steps taken", trained.steps),
        ("tokens read", trained.tokens),
        ("seconds", round(trained.seconds, 1)),
        ("lines left out", trained.skipped or None),
    ]
    return Table(
        title="Where it ended",
        columns=["what", "value"],
        rows=[row for row in rows if row[1] is not None],
        caption="Steps, tokens and seconds are those of the call that ended the run.",
    )


def _drawn(found: Mapping[str, Points]) -> list[Figure | Note]:
    """The curves of the log, of those that have two points; or why there is no drawing."""
    panels: list[Panel] = []
    for name, what in _CURVES:
        points = [(x, y) for x, y in found[name] if math.isfinite(y)]
        if len(points) > 1:
            line = Series(name="run", x=[x for x, _ in points], y=[y for _, y in points])
            panels.append(Panel(y=what, series=[line]))
    if not panels:
        return []
    try:
        files = panel_figure(panels, x="training tokens", title="The run")
    except ImportError as error:
        return [Note(title="The run", text=f"Its curves are not drawn: {error}.")]
    alt = "; ".join(f"{panel.y} against training tokens" for panel in panels)
    return [Figure(files=files, alt=alt, caption="Every line of the log.")]


def _found(trained: Trained, plan: TrainPlan, found: Mapping[str, Points]) -> str:
    """Two sentences: where the run ended, and whether it was still getting better."""
    taken = f"{plan.steps:,} steps ({plan.steps * plan.tokens_per_step:,} tokens)"
    ends = [
        f"{name} is {value:.3f} {unit}"
        for name, value, unit in (
            ("the held-out text", trained.heldout, "bits per byte"),
            ("the loss of the last steps", trained.loss, "nats per token"),
        )
        if value is not None and math.isfinite(value)
    ]
    first = f"After {taken} {' and '.join(ends)}." if ends else f"The run has taken {taken}."
    curve = found["eval_bits_per_byte"] or found["loss"]
    curve = [point for point in curve if math.isfinite(point[1])]
    what = "held-out" if found["eval_bits_per_byte"] else "training"
    if len(curve) < 2:
        return first
    best, last = min(curve, key=lambda point: point[1]), curve[-1]
    before = curve[-2]
    if any(round(value, 3) <= round(last[1], 3) for _, value in curve[:-1]):
        return f"{first} Its least {what} value, {best[1]:.3f}, was that after {best[0]:,} tokens."
    return (
        f"{first} It was still getting better: its last two {what} values, after {before[0]:,} and "
        f"{last[0]:,} tokens, are {before[1]:.3f} and {last[1]:.3f}."
    )
