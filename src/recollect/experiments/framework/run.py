"""One run of an experiment, and the interface for progress."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recollect.experiments.framework.experiment import Claim, Experiment, Verdict
from recollect.experiments.framework.records import Record, Results
from recollect.report.environment import Environment

__all__ = ["Nobody", "Run", "Viewer", "command_of"]


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
        jobs: processes that measured side by side.
        command: that repeats it.

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
                    **({"rule_changed": claim.changed} if claim.changed else {}),
                }
                for claim, verdict in self.verdicts
            ],
            "rules": self.experiment.rules,
            "seconds": round(self.results.seconds, 1),
            "environment": self.environment.to_dict(),
            "records": [record.to_dict() for record in self.results.records],
        }


def command_of(
    name: str, *, scale: str, seeds: int | None, jobs: int, device: str, out: str
) -> str:
    """The command that runs an experiment so; what is as by default is left out, but for the scale.

    Args:
        name: of the experiment.
        scale: as `recollect.experiments.reproduce` takes it, like all that follow.
        seeds: how many; ``None`` for the scale's own.
        jobs: processes.
        device: where models and tensors live.
        out: the folder of the runs.
    """
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
