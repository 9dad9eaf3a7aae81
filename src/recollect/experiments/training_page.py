"""Report of a training run: its curves, its final values and its plan."""

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

_CURVES = {
    "loss": "training loss, nats per token",
    "eval_bits_per_byte": "held-out bits per byte",
    "tokens_per_second": "tokens per second",
}
"""Plotted entries of a log line, and the labels of their axes."""


def save_run_page(
    trained: Trained,
    plan: TrainPlan,
    *,
    summary: Mapping[str, str] | None = None,
    command: str = "",
) -> Path:
    """Write ``report.html`` into the folder of a finished run."""
    curves = {name: _curve_points(trained.history, name, plan) for name in _CURVES}
    facts = dict(summary or {})
    environment = describe_environment(trained.model.device).facts()
    device = "; ".join(filter(None, (environment["device"], facts.pop("device", ""))))
    sections: list[Table | Figure | Note] = [_final_values(trained), *_curve_figure(curves)]
    if trained.notes or trained.skipped_lines:
        lines = [*trained.notes, *(f"left out: {line}" for line in trained.skipped_lines)]
        sections.append(Note(title="Notes", text="\n".join(lines)))
    plan_text = json.dumps(plan.to_dict(), indent=2, ensure_ascii=False)
    sections.append(Note(title="The plan", text=plan_text, code=True))
    report = Report(
        kind="training",
        title=f"Training run {trained.folder.parent.name}",
        command=command,
        summary=_summary(trained, plan, curves),
        facts={**facts, **environment, "device": device},
        sections=sections,
    )
    return report.save(trained.folder.parent / "report.html")


def _curve_points(history: Sequence[Mapping[str, float]], name: str, plan: TrainPlan) -> Points:
    """Return tokens and value of each logged step. The last line of a repeated step counts."""
    values = {int(line["step"]): float(line[name]) for line in history if name in line}
    return [(step * plan.tokens_per_step, values[step]) for step in sorted(values)]


def _final_values(trained: Trained) -> Table:
    values = {
        "training loss of the last steps, nats per token": trained.loss,
        "held-out loss, nats per token": trained.heldout_loss,
        "held-out bits per byte": trained.heldout,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 1),
        "lines left out": trained.skipped or None,
    }
    return Table(
        title="Final values",
        columns=["quantity", "value"],
        rows=[item for item in values.items() if item[1] is not None],
        caption="Steps, tokens and seconds are those of the last call.",
    )


def _curve_figure(curves: Mapping[str, Points]) -> list[Figure | Note]:
    """Return a figure of the curves with two points or more, or a note without matplotlib."""
    panels: list[Panel] = []
    for name, label in _CURVES.items():
        points = [(x, y) for x, y in curves[name] if math.isfinite(y)]
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            panels.append(Panel(y=label, series=[Series(name="run", x=x, y=y)]))
    if not panels:
        return []
    try:
        files = panel_figure(panels, x="training tokens", title="The run")
    except ImportError as error:
        return [Note(title="The run", text=f"There is no figure: {error}.")]
    alt = "; ".join(f"{panel.y} against training tokens" for panel in panels)
    return [Figure(files=files, alt=alt, caption="Every line of the log.")]


def _summary(trained: Trained, plan: TrainPlan, curves: Mapping[str, Points]) -> str:
    """Return a sentence about the final values, and one about the trend."""
    steps = f"{plan.steps:,} steps ({plan.steps * plan.tokens_per_step:,} tokens)"
    values = [
        f"{name} is {value:.3f} {unit}"
        for name, value, unit in (
            ("the held-out text", trained.heldout, "bits per byte"),
            ("the loss of the last steps", trained.loss, "nats per token"),
        )
        if value is not None and math.isfinite(value)
    ]
    summary = f"After {steps} {' and '.join(values)}." if values else f"The run has {steps}."
    name = "held-out" if curves["eval_bits_per_byte"] else "training"
    curve = curves["eval_bits_per_byte"] or curves["loss"]
    curve = [point for point in curve if math.isfinite(point[1])]
    if len(curve) < 2:
        return summary
    best, previous, last = min(curve, key=lambda point: point[1]), curve[-2], curve[-1]
    if any(round(value, 3) <= round(last[1], 3) for _, value in curve[:-1]):
        return f"{summary} The smallest {name} value is {best[1]:.3f}, after {best[0]:,} tokens."
    return (
        f"{summary} It was still decreasing: the last two {name} values, after {previous[0]:,} "
        f"and {last[0]:,} tokens, are {previous[1]:.3f} and {last[1]:.3f}."
    )
