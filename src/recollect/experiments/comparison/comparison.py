"""Results of a comparison, with their tables and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.experiments.comparison.report import save_report, table
from recollect.experiments.comparison.results import ModelRun, Schedule, Sizes, Summary
from recollect.report.environment import Environment
from recollect.report.notebook import text_to_html
from recollect.report.tables import Table
from recollect.serialization import plain

__all__ = ["Comparison"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Results of `compare`: ``print`` shows their tables, `save` writes a report.

    Attributes:
        runs: By task and seed, in the order of the models.
        sizes: Sizes of each task.
        seed, seeds: First seed and number of seeds; each model is trained once with each.
        environment: Device and versions of the training.
        bigram: Bits per byte of a smoothed byte bigram on the held-out text.
        text: Source and digest of the text.
        chance: Accuracy of guessing in the task mqar.
        interrupted: Whether the comparison was interrupted.
        processes: Number of processes that trained in parallel.
        failures: Task, model and reason of each model that could not be trained.
        eval_sizes: By task, evaluation size of a point of a curve and of a value in the table, in
            bytes of held-out text or examples of each number of pairs.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=48,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, lr=1e-3),
        ... )
        >>> comparison = rc.compare(["linear_attention"], ["mqar"], sizes=sizes)
        >>> [(run.model, run.tokens) for run in comparison.of("mqar")]
        [('linear_attention', 48)]
    """

    runs: tuple[ModelRun, ...]
    sizes: Mapping[str, Sizes]
    seed: int
    environment: Environment
    bigram: float | None = None
    text: Mapping[str, str] = field(default_factory=dict)
    chance: float | None = None
    interrupted: bool = False
    processes: int = 1
    failures: tuple[tuple[str, str, str], ...] = ()
    eval_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seeds: int = 1

    def of(self, task: str) -> list[ModelRun]:
        """Return the runs of one task."""
        return [run for run in self.runs if run.task == task]

    def summaries(self, task: str) -> list[Summary]:
        """Return the runs of one task by model."""
        runs: dict[str, list[ModelRun]] = {}
        for run in self.of(task):
            runs.setdefault(run.model, []).append(run)
        return [Summary(task=task, model=model, runs=tuple(x)) for model, x in runs.items()]

    def failure_messages(self) -> list[str]:
        """Return a sentence for each task and reason of failure."""
        models: dict[tuple[str, str], list[str]] = {}
        for task, model, reason in self.failures:
            models.setdefault((task, reason), []).append(model)
        return [
            f"{', '.join(names)} could not be trained on {task}: {reason}"
            for (task, reason), names in models.items()
        ]

    def save(self, folder: str | PathLike[str], *, command: str = "") -> dict[str, Path]:
        """Write ``report.html``, ``results.json``, ``results.csv`` and the figures into a folder.

        Args:
            folder: Created if it does not exist. Its earlier ``results.json`` is renamed.
            command: Command line for the page.

        Returns:
            Path of each file. Every file is written completely or not at all.

        Raises:
            ValueError: another run uses the folder; or the folder cannot be written, and the
                results are in a temporary one, which the message names.
        """
        return save_report(self, Path(folder), command)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; with several seeds also the ``summary`` of each model."""
        data = {("measured" if k == "eval_sizes" else k): v for k, v in asdict(self).items()}
        if self.seeds == 1:
            del data["seeds"]
        else:
            data["summary"] = [x.to_dict() for task in self.sizes for x in self.summaries(task)]
        return {
            **plain(data),
            "runs": [run.to_dict() for run in self.runs],
            "environment": self.environment.to_dict(),
            "schema": 1,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """Return the comparison that `to_dict` wrote, perhaps in an older version.

        Raises:
            ValueError: the data has another schema.
            KeyError, TypeError, AttributeError: the data is no comparison.
        """
        if data["schema"] != 1:
            raise ValueError(f"schema {data['schema']!r}")
        converted = ("runs", "sizes", "environment", "failures", "measured")
        return cls(
            **{k: v for k, v in data.items() if k not in ("schema", "summary", *converted)},
            runs=tuple(map(ModelRun.from_dict, data["runs"])),
            sizes={
                task: Sizes(**{**size, "schedule": Schedule(**size["schedule"])})
                for task, size in data["sizes"].items()
            },
            environment=Environment(**data["environment"]),
            failures=tuple(tuple(failure) for failure in data["failures"]),
            eval_sizes={task: tuple(x) for task, x in data.get("measured", {}).items()},
        )

    def _tables(self) -> list[Table]:
        return [replace(table(self, task), caption="") for task in self.sizes if self.of(task)]

    def _notes(self) -> list[str]:
        note = "This comparison was interrupted. It contains the results up to then."
        return [*self.failure_messages(), *([note] if self.interrupted else [])]

    def __str__(self) -> str:
        parts = [*(table.to_text() for table in self._tables()), *self._notes()]
        return "\n\n".join(parts) or "A comparison without results."

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{text_to_html(note)}</p>" for note in self._notes())
        tables = "".join(table.to_html(notebook=True) for table in self._tables())
        return tables + notes or "<p>A comparison without results.</p>"

    def __repr__(self) -> str:
        parts: list[str] = []
        for task in self.sizes:
            values = [f"{x.model} {x.format() or '–'}" for x in self.summaries(task)]
            parts.append(f"{task}: {', '.join(values)}")
        parts += [f"{len(self.failures)} failed"] if self.failures else []
        parts += ["interrupted"] if self.interrupted else []
        return f"Comparison({'; '.join(parts)})"
