"""`Comparison`: what `compare` returns, to print and to save."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from recollect.experiments.comparison.report import save_comparison, table
from recollect.experiments.comparison.results import Outcomes
from recollect.report.notebook import text_to_html
from recollect.report.tables import Column, Table

__all__ = ["Comparison"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Outcomes):
    """A comparison, whole or interrupted: ``print`` shows its tables, `save` writes its report.

    Examples:
        >>> from recollect.report.environment import describe_environment
        >>> schedule = rc.experiments.Schedule(steps=600, batch=16)
        >>> found = rc.experiments.Comparison(
        ...     runs=(
        ...         rc.experiments.ModelRun(
        ...             task="mqar", model="gla", parameters=9000, state_bytes=4096, grows=False,
        ...             value=0.93,
        ...         ),
        ...     ),
        ...     sizes={
        ...         "mqar": rc.experiments.Sizes(
        ...             width=64, depth=1, heads=1, length=48, schedule=schedule
        ...         )
        ...     },
        ...     seed=0,
        ...     environment=describe_environment("cpu"),
        ... )
        >>> [run.value for run in found.of("mqar")]
        [0.93]
    """

    def save(self, folder: str | PathLike[str], *, command: str = "") -> dict[str, Path]:
        """Write ``report.html``, ``results.json``, ``results.csv`` and the figures into a folder.

        Args:
            folder: it is made where it is missing.
            command: the command line to print on the page.

        Returns:
            Paths by what they are. Every file is written whole or not at all.

        Raises:
            ValueError: a run that is under way owns the folder, or it cannot be written.
        """
        return save_comparison(self, folder, command=command)

    def failed(self) -> list[str]:
        """What could not be trained and why, a sentence for each task and reason."""
        models: dict[tuple[str, str], list[str]] = {}
        for task, model, reason in self.failures:
            models.setdefault((task, reason), []).append(model)
        return [
            f"{', '.join(names)} could not be trained on {task}: {reason}"
            for (task, reason), names in models.items()
        ]

    def __str__(self) -> str:
        parts = [_table(self, task).to_text() for task in self.sizes if self.of(task)]
        parts += self._said_below()
        return "\n\n".join(parts) or "A comparison without results."

    def _repr_html_(self) -> str:
        pages = [_table(self, task) for task in self.sizes if self.of(task)]
        tables = [page.to_html(notebook=True) for page in pages]
        said = "".join(f"<p>{text_to_html(line)}</p>" for line in self._said_below())
        return "".join(tables) + said or "<p>A comparison without results.</p>"

    def _said_below(self) -> list[str]:
        stopped = "This comparison was stopped early; it shows what was done."
        return [*self.failed(), *([stopped] if self.interrupted else [])]

    def __repr__(self) -> str:
        tasks = [
            f"{task}: "
            + ", ".join(f"{one.model} {one.told() or '–'}" for one in self.summaries(task))
            for task in self.sizes
        ]
        rest = [f"{len(self.failures)} failed"] if self.failures else []
        rest += ["interrupted"] if self.interrupted else []
        return f"Comparison({'; '.join(tasks + rest)})"


def _table(comparison: Outcomes, task: str) -> Table:
    """Return a task's table with its title, without its caption."""
    page = table(comparison, task)
    first, *others = page.column_names
    return Table(
        title=page.title,
        columns=[first, *(Column(name=name, align="right") for name in others)],
        rows=[["–" if cell is None else str(cell) for cell in row] for row in page.rows],
    )
