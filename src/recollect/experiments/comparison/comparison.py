"""`Comparison`: what `compare` returns, to print and to save."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from recollect.experiments.comparison.report import save_comparison, table
from recollect.experiments.comparison.results import Outcomes

__all__ = ["Comparison"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Outcomes):
    """A comparison, whole or interrupted: ``print`` shows its tables, `save` writes its report."""

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
        parts = [_page(self, task) for task in self.sizes if self.of(task)]
        parts += self.failed()
        if self.interrupted:
            parts.append("This comparison was stopped early; it shows what was done.")
        return "\n\n".join(parts) or "A comparison without results."

    def __repr__(self) -> str:
        tasks = [
            f"{task}: "
            + ", ".join(f"{one.model} {one.told() or '–'}" for one in self.summaries(task))
            for task in self.sizes
        ]
        rest = [f"{len(self.failures)} failed"] if self.failures else []
        rest += ["interrupted"] if self.interrupted else []
        return f"Comparison({'; '.join(tasks + rest)})"


def _page(comparison: Outcomes, task: str) -> str:
    """A task's table as text, with its title."""
    page = table(comparison, task)
    rows = [["–" if cell is None else str(cell) for cell in row] for row in page.rows]
    if task == "text" and comparison.bigram is not None:
        rows.append(["byte bigram", f"{comparison.bigram:.3f}", *[""] * (len(page.columns) - 2)])
    widths = [max(map(len, column)) for column in zip(page.columns, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (page.columns, *rows)
    ]
    return "\n".join([page.title, *lines])
