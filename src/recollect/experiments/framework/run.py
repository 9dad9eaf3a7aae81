"""One run of an experiment, and the interface for progress."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recollect.experiments.framework.experiment import Claim, Experiment
from recollect.experiments.framework.records import Record, Results
from recollect.experiments.framework.rules import Verdict
from recollect.report.environment import Environment

__all__ = ["NoProgress", "ProgressReporter", "Run", "format_command"]


class ProgressReporter(Protocol):
    """Receives the progress of a run."""

    def begin(self, experiment: Experiment, done: int, total: int) -> None:
        """Called once, with the number of records already on disk and of all."""

    def on_record(self, record: Record) -> None:
        """Called after each measurement."""


class NoProgress(ProgressReporter):
    """Ignores all progress."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """An experiment that was run, with its verdicts.

    Attributes:
        complete: whether every cell was measured with every seed.
        folder: holds the run's files.
        jobs: number of processes.
        command: repeats the run.

    Examples:
        >>> run = rc.reproduce("am-state-exchange", scale="smoke", out="runs")
        >>> run.complete, [(claim.name, verdict.status) for claim, verdict in run.verdicts]
        (True, [('rounding tracks', 'holds'), ('linear fails', 'holds')])
    """

    experiment: Experiment
    results: Results
    verdicts: tuple[tuple[Claim, Verdict], ...]
    environment: Environment
    complete: bool
    folder: Path
    jobs: int
    command: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "schema": 2,
            "experiment": self.experiment.name,
            "source": self.experiment.source,
            "scale": self.results.scale,
            "config": dict(self.results.config),
            "complete": self.complete,
            "claims": [claim.to_dict(verdict) for claim, verdict in self.verdicts],
            "rules": self.experiment.rules_digest,
            "seconds": round(self.results.seconds, 1),
            "environment": self.environment.to_dict(),
            "records": [record.to_dict() for record in self.results.records],
        }


def format_command(
    name: str, *, scale: str, seeds: int | None, jobs: int, device: str, out: str
) -> str:
    """Return the command line of a run. It omits defaults, but not the scale."""
    words = ["recollect", "reproduce", name, "--scale", scale]
    words += ["--launch"] if scale == "paper" else []
    words += [] if seeds is None else ["--seeds", str(seeds)]
    for option, value, default in (
        ("--jobs", str(max(jobs, 1)), "1"),
        ("--device", device, "cpu"),
        ("--out", out, "runs"),
    ):
        words += [] if value == default else [option, value]
    return shlex.join(words)
