"""The result of a search: its recipes and trials, as tables and files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.blocks.compositions import read_mixer
from recollect.experiments.comparison.tasks import RECALL_TASKS
from recollect.experiments.recipe_search.halving import Trial, is_better, rank
from recollect.experiments.recipe_search.report import save_report, table
from recollect.experiments.recipe_search.space import Candidate, changes
from recollect.layer.options import LayerOptions
from recollect.recipe.toml_text import write_toml
from recollect.report.environment import Environment
from recollect.report.notebook import text_to_html
from recollect.serialization import plain

__all__ = ["Search"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Search:
    """Result of `search`: ``print`` shows its table, `save` writes a report.

    Attributes:
        settings: start, tasks, sizes, seed and limits, as JSON-ready data. A search is continued
            only with equal settings.
        candidates: start, baselines and drawn recipes.
        trials: finished trials, in their order.
        environment: device and versions of the training.
        interrupted: whether the search was interrupted.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=48,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1),
        ... )
        >>> search = rc.experiments.search("linear_attention", "mqar", trials=1, sizes=sizes)
        >>> [trial.candidate for trial in search.trials]
        ['linear_attention', 'recipe-1']
    """

    settings: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    environment: Environment
    interrupted: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(self.settings["sizes"])

    @property
    def num_rungs(self) -> int:
        """Number of lengths of training."""
        return self.settings["rungs"]

    @property
    def start(self) -> Candidate:
        """The recipe near which recipes are drawn."""
        return self.candidates[0]

    def candidate(self, name: str) -> Candidate:
        """Return the candidate with a name."""
        return next(x for x in self.candidates if x.name == name)

    def changes(self, candidate: Candidate) -> str:
        """Return the choices of a candidate that differ from the start, as text."""
        changed = changes(candidate.mixer.recipe, self.start.mixer.recipe)
        return ", ".join(f"{choice}={member.brief}" for choice, member in changed.items())

    @property
    def complete(self) -> list[Trial]:
        """Trials with all steps, from the best to the worst."""
        trials = [trial for trial in self.trials if trial.rung == self.num_rungs - 1]
        return rank(trials, self.tasks)

    @property
    def has_best(self) -> bool:
        """Whether the start or a drawn recipe was trained with all steps."""
        return any(not self.candidate(trial.candidate).is_baseline for trial in self.complete)

    @property
    def best(self) -> Candidate:
        """The best of the start and the drawn recipes.

        Raises:
            ValueError: no recipe was trained with all steps.
        """
        candidates = (self.candidate(trial.candidate) for trial in self.complete)
        best = next((x for x in candidates if not x.is_baseline), None)
        if best is None:
            raise ValueError("search: no recipe was trained with all steps")
        return best

    def points(self, task: str, cost: str) -> list[tuple[float, float, str]]:
        """Return cost, value and name of each completely trained recipe with a finite value.

        Args:
            task: name of a task.
            cost: ``"state"`` (bytes per sequence) or ``"time"`` (estimated, as in
                `Candidate.relative_time`).
        """
        runs = [(trial.candidate, trial.run(task)) for trial in self.complete]
        return [
            (
                float(run.state_bytes) if cost == "state" else self.candidate(name).relative_time,
                run.value,
                name,
            )
            for name, run in runs
            if run is not None and run.value is not None and math.isfinite(run.value)
        ]

    def front(self, task: str, cost: str = "state") -> list[tuple[float, float, str]]:
        """Return the points that no other point equals or exceeds in both cost and value.

        Args:
            task, cost: as in `points`.
        """
        front: list[tuple[float, float, str]] = []
        sign = -1 if task in RECALL_TASKS else 1
        for point in sorted(self.points(task, cost), key=lambda x: (x[0], sign * x[1])):
            if not front or is_better(task, point[1], front[-1][1]):
                front.append(point)
        return front

    def best_toml(self) -> str:
        """Return the best recipe as TOML, with layer options if they are not the defaults."""
        mixer = self.best.mixer
        has_options = mixer.options != LayerOptions()
        return write_toml(mixer.to_dict() if has_options else mixer.recipe.to_dict())

    def save(self, folder: str | PathLike[str], *, command: str = "") -> dict[str, Path]:
        """Write ``report.html``, ``results.json``, ``results.csv``, ``best.toml`` and the figures.

        Args:
            folder: created if it does not exist.
            command: command line for the page.

        Returns:
            Path of each file.

        Raises:
            ValueError: another run uses the folder.
        """
        return save_report(self, Path(folder), command)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "schema": SCHEMA,
            "settings": plain(self.settings),
            "interrupted": self.interrupted,
            "environment": self.environment.to_dict(),
            "candidates": [
                {
                    "name": x.name,
                    "changes": self.changes(x),
                    "relative_time": x.relative_time,
                    "draws": x.draws,
                    "is_baseline": x.is_baseline,
                    **x.mixer.to_dict(),
                }
                for x in self.candidates
            ],
            "trials": [trial.to_dict() for trial in self.trials],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Search:
        """Return the search that `to_dict` wrote.

        Raises:
            ValueError: the data has another schema.
            KeyError, TypeError, AttributeError: the data is no search.
        """
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return cls(
            settings=data["settings"],
            candidates=tuple(_read_candidates(data["candidates"])),
            trials=tuple(map(Trial.from_dict, data["trials"])),
            environment=Environment(**data["environment"]),
            interrupted=data["interrupted"],
        )

    def __str__(self) -> str:
        return table(self).to_text() if self.complete else "A search without results."

    def _repr_html_(self) -> str:
        if not self.complete:
            return f"<p>{text_to_html(str(self))}</p>"
        return table(self).to_html(notebook=True)

    def __repr__(self) -> str:
        best = f", best {self.best.name}" if self.has_best else ""
        return f"Search({len(self.candidates)} recipes, {len(self.trials)} trials{best})"


def _read_candidates(items: list[Any]) -> Iterator[Candidate]:
    for item in items:
        fields = dict(item)
        del fields["changes"]
        layer = {name: fields.pop(name) for name in ("recipe", "options") if name in fields}
        yield Candidate(mixer=read_mixer(layer), **fields)  # type: ignore[arg-type]
