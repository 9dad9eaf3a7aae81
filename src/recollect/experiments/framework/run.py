"""One run of an experiment, and the interface for progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recollect.experiments.framework.experiment import Claim, Experiment, Verdict
from recollect.experiments.framework.records import Record, Results
from recollect.report.environment import Environment

__all__ = ["Nobody", "Run", "Viewer"]


class Viewer(Protocol):
    """Whoever shows progress."""

    def begin(self, experiment: Experiment, done: int, total: int) -> None:
        """So many cells and seeds of an experiment were measured earlier, of so many."""

    def cell(self, record: Record) -> None:
        """One more was measured."""


class Nobody(Viewer):
    """Watches nothing."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """An experiment that was run, with its verdicts.

    Attributes:
        complete: whether every cell was measured with every seed.
        folder: where its files are.
    """

    experiment: Experiment
    results: Results
    verdicts: tuple[tuple[Claim, Verdict], ...]
    environment: Environment
    complete: bool
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "schema": 1,
            "experiment": self.experiment.name,
            "source": self.experiment.source,
            "scale": self.results.scale,
            "config": dict(self.results.config),
            "complete": self.complete,
            "claims": [
                {
                    "name": claim.name,
                    "claim": claim.text,
                    "rule": claim.rule,
                    "verdict": verdict.status,
                    "because": verdict.because,
                }
                for claim, verdict in self.verdicts
            ],
            "rules": self.experiment.rules,
            "seconds": round(self.results.seconds, 1),
            "environment": self.environment.to_dict(),
            "records": [record.to_dict() for record in self.results.records],
        }
