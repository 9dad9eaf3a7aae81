"""The page of `recollect bench --suite gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.benchmarks.gpu.tables import ceiling_table, decoding_table, speed_tables
from recollect.report.environment import Environment
from recollect.report.html import Report, Table

__all__ = ["save_gpu_page"]


def save_gpu_page(data: Mapping[str, Any], path: str | PathLike[str], *, command: str = "") -> Path:
    """Write the page.

    Args:
        data: of `recollect.benchmarks.gpu.speed.measure`.
        path: of the page.
        command: the command line to print on it.

    Raises:
        OSError: it cannot be written.
    """
    facts = Environment(**data["environment"]).facts()
    versions = data["packages"].items()
    facts["beside it"] = ", ".join(
        f"{name} {version}" if version else f"no {name}" for name, version in versions
    )
    left = [[what, why] for what, why in data["left_out"].items()]
    sections = [ceiling_table(data), *speed_tables(data), decoding_table(data)]
    if left:
        sections.append(Table(columns=["not timed", "why"], rows=left, title="Not timed"))
    summary = f"{len(data['speeds'])} times of calls, {len(data['decoded'])} of decoding."
    if data["tiny"]:
        summary += " Sizes are tiny: they show that the suite runs, and nothing about speed."
    report = Report(
        kind="benchmark",
        title="Benchmark: gpu",
        command=command,
        summary=summary,
        facts=facts,
        sections=sections,
    )
    return report.save(path)
