"""Cost of a run before it starts: FLOPs, memory and time of every cell and seed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from recollect.experiments.framework.experiment import Experiment, Scale
from recollect.experiments.framework.run import command_of
from recollect.report.formatting import format_si

__all__ = ["Plan", "machine_rate", "plan"]

EFFICIENCY = 0.1
"""Share of a matrix product's rate that small models reach; more would be a promise."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The price of a run.

    Attributes:
        cells, seeds: their product is how often something is measured.
        flops: of all. memory: bytes of the largest cell. longest: FLOPs of the dearest cell.
        rate: FLOP/s of a matrix product on this device, measured now.
        command: that launches the run.
    """

    experiment: str
    scale: str
    cells: int
    seeds: int
    flops: float
    memory: float
    longest: float
    rate: float
    device: str
    command: str

    @property
    def seconds(self) -> float:
        """Estimated for one process on this device."""
        return self.flops / (EFFICIENCY * self.rate)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        slowest = self.longest / (EFFICIENCY * self.rate)
        rows = [
            ("experiment", f"{self.experiment}, {self.scale} scale"),
            ("grid", f"{self.cells} cells × {self.seeds} seeds"),
            ("work", format_si(self.flops, "FLOP")),
            ("memory", f"{format_si(self.memory, 'B')} for the largest cell"),
            (
                "time",
                f"{_clock(self.seconds)} in one process on {self.device}, estimated at "
                f"{EFFICIENCY:.0%} of its {format_si(self.rate, 'FLOP')}/s; the longest cell "
                f"{_clock(slowest)}, so more than {max(1, round(self.seconds / slowest))} jobs "
                "gain nothing",
            ),
            ("launch", self.command),
        ]
        return "\n".join(f"{name:<12}{text}" for name, text in rows)


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def machine_rate(device: str = "cpu") -> float:
    """FLOP/s of a float32 matrix product here, from some tenths of a second."""
    on_cpu = torch.device(device).type == "cpu"
    size = 512 if on_cpu else 2048
    a = torch.randn(size, size, device=device)
    b = a @ a  # the first product sets up what the others use
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.2:
        b = a @ a
        count += 1
        if not on_cpu:
            b[0, 0].item()
    return 2 * size**3 * count / (time.perf_counter() - began)


def plan(
    experiment: Experiment,
    scale: Scale,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    out: str = "runs",
) -> Plan:
    """Price every cell of a configuration, and say how to launch it."""
    config = experiment.config(scale, seeds=seeds)
    works = [experiment.work(config, cell) for cell in experiment.cells(config)]
    return Plan(
        experiment=experiment.name,
        scale=scale,
        cells=len(works),
        seeds=config["seeds"],
        flops=config["seeds"] * sum(work.flops for work in works),
        memory=max(work.memory for work in works),
        longest=max(work.flops for work in works),
        rate=machine_rate(device),
        device=device,
        command=command_of(
            experiment.name, scale=scale, seeds=seeds, jobs=jobs, device=device, out=out
        ),
    )
