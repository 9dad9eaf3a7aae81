"""Runs experiments: every cell and seed once, kept on disk as soon as it is measured.

A cell's file is named by a digest of experiment, configuration, cell and seed, so that a run that
was stopped goes on where it was, and a changed configuration measures anew. Processes (`jobs`) take
cells as they come; only this one writes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from recollect.experiments.framework.experiment import SCALES, Experiment, Scale
from recollect.experiments.framework.processes import Lost, in_processes
from recollect.experiments.framework.records import Cell, Record, Results
from recollect.experiments.framework.run import Nobody, Run, Viewer, command_of
from recollect.experiments.registry import EXPERIMENTS, PLANNED
from recollect.report.environment import describe_environment
from recollect.report.files import read_regular, save_to_temp_on_error, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.signals import defer_signals
from recollect.serialization import read_json

__all__ = ["chosen", "reproduce"]


def chosen(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: an unknown name, or one that is only planned.
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    for row in PLANNED:
        if row.name == name:
            raise ValueError(f"{name} is planned and cannot be run yet: it needs {row.needs}")
    raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")


def reproduce(
    name: str | Experiment,
    *,
    scale: Scale = "small",
    seeds: int | None = None,
    jobs: int = 1,
    out: str | PathLike[str] = "runs",
    device: str = "cpu",
    fresh: bool = False,
    viewer: Viewer | None = None,
) -> Run:
    """Run an experiment, judge its claims and write its report.

    Args:
        name: of the experiment, see `EXPERIMENTS`.
        scale: ``"smoke"`` (seconds), ``"small"`` (minutes on two cores) or ``"paper"``.
        seeds: how many, 0, 1, …; the configuration's number by default.
        jobs: processes; each has one thread when there are several. They begin by importing the
            main module again, so a script calls this under ``if __name__ == "__main__":``.
        out: ``out/NAME`` gets results.json, results.csv, report.html, figure.png, figure.svg and
            figure-narrow.svg.
        device: where models and tensors live.
        fresh: measures anew what an earlier run left.
        viewer: told about progress.

    Returns:
        The run. After a keyboard interrupt it holds what was measured, and the same call goes on.

    Raises:
        ValueError: an unknown name or scale, or numbers out of range; another run that measures
            this experiment in the same folder; an experiment of one's own with several jobs; a
            process that died, when all else is measured and reported; a folder that cannot be
            written, when what it lacks is kept in a temporary one.

    Examples:
        >>> run = rc.reproduce("ttr-fig2", scale="smoke", out="runs")
        >>> run.complete, run.folder.as_posix()
        (True, 'runs/ttr-fig2')
        >>> [claim.name for claim, verdict in run.verdicts][:1]
        ['linear attention is worst']
    """
    experiment = chosen(name) if isinstance(name, str) else name
    if scale not in SCALES:
        raise ValueError(f"--scale must be one of {', '.join(SCALES)}, not {scale!r}")
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    if jobs > 1 and EXPERIMENTS.get(experiment.name) is not experiment:
        raise ValueError(
            f"{experiment.name} is not in the registry, by which other processes find an "
            "experiment: run it with one job"
        )
    config = experiment.config(scale, seeds=seeds)
    folder = Path(out) / experiment.name
    with folder_lock(folder):
        return _reproduced(
            experiment,
            config,
            folder,
            scale=scale,
            jobs=jobs,
            device=device,
            fresh=fresh,
            viewer=viewer or Nobody(),
            command=command_of(
                experiment.name, scale=scale, seeds=seeds, jobs=jobs, device=device, out=str(out)
            ),
        )


def _reproduced(
    experiment: Experiment,
    config: dict[str, Any],
    folder: Path,
    *,
    scale: Scale,
    jobs: int,
    device: str,
    fresh: bool,
    viewer: Viewer,
    command: str,
) -> Run:
    """`reproduce`, in a folder that is this run's own."""
    from recollect.experiments.framework.report import save_run

    store = folder / "cells" / scale
    wanted = [
        (cell, seed, store / _file(experiment, config, cell, seed))
        for seed in range(config["seeds"])
        for cell in experiment.cells(config)
    ]
    if fresh:
        for _, _, path in wanted:
            path.unlink(missing_ok=True)
    todo = [(cell, seed, path) for cell, seed, path in wanted if not path.exists()]
    viewer.begin(experiment, len(wanted) - len(todo), len(wanted))
    environment = describe_environment(device)
    stamp = {
        "commit": environment.commit,
        "device": environment.device,
        "date": environment.date,
        "rules": experiment.rules,
    }
    lost: list[str] = []
    measured: dict[Path, Record] = {}
    interrupted = False
    try:
        for path, found in _measured(experiment, config, todo, jobs, device):
            if isinstance(found, str):
                lost.append(found)
                continue
            with defer_signals():
                measured[path] = replace(found, **stamp)
                with suppress(OSError):  # a full disk: the others go on, and it is tried again
                    write_atomic(path, _written(measured[path]))
            viewer.cell(measured[path])
    except KeyboardInterrupt:
        interrupted = True  # the report shows what there is
    _kept(measured, folder)
    records = tuple(_read(path) for _, _, path in wanted if path.exists())
    said = f"{lost[0]}; {len(lost)} of {len(wanted)} cells were lost so" if lost else ""
    if not records:
        raise ValueError(said) if lost and not interrupted else KeyboardInterrupt
    results = Results(records=records, scale=scale, config=config)
    run = Run(
        experiment=experiment,
        results=results,
        verdicts=tuple(experiment.verdicts(results)),
        environment=environment,
        complete=len(records) == len(wanted),
        folder=folder,
        jobs=jobs,
        command=command,
    )
    with defer_signals():
        save_run(run)
    if lost and not interrupted:
        raise ValueError(f"{said}, and the same command tries them again; {folder} has the others")
    return run


def _read(path: Path) -> Record:
    try:
        return Record.from_dict(read_json(read_regular(path)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no measured cell ({error}): delete it to measure that cell again"
        ) from None


def _written(record: Record) -> str:
    return json.dumps(record.to_dict(), allow_nan=False) + "\n"


def _kept(measured: dict[Path, Record], folder: Path) -> None:
    """That all that was measured is on disk, also where the folder vanished meanwhile."""
    missing = {path: _written(record) for path, record in measured.items() if not path.exists()}
    try:
        with defer_signals():
            for path, text in missing.items():
                write_atomic(path, text)
    except OSError as error:
        files = {str(path.relative_to(folder)): text for path, text in missing.items()}
        raise ValueError(save_to_temp_on_error(files, target=folder, error=error)) from error


def _file(experiment: Experiment, config: dict[str, Any], cell: Cell, seed: int) -> str:
    """A name that says what was measured; the number of seeds does not matter to one of them."""
    what = {k: v for k, v in config.items() if k != "seeds"}
    text = json.dumps([experiment.name, what, dict(cell), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20] + ".json"


def _measured(
    experiment: Experiment,
    config: dict[str, Any],
    todo: list[tuple[Cell, int, Path]],
    jobs: int,
    device: str,
) -> Iterator[tuple[Path, Record | str]]:
    """Records as they are done, in order with one job; or why there is none of a cell."""
    if jobs == 1:
        for cell, seed, path in todo:
            yield path, _one(experiment, config, cell, seed, device)
        return
    parts = [
        _Part(experiment.name, config, dict(cell), seed, path, device) for cell, seed, path in todo
    ]
    for part, record in in_processes(_by_name, parts, jobs):
        if isinstance(record, Lost):
            yield part.path, f"{part.name}, {part.cell}, seed {part.seed}: {record.reason}"
        else:
            yield part.path, record


@dataclass(frozen=True)
class _Part:
    """One cell and seed, to be measured in a process of its own."""

    name: str
    config: dict[str, Any]
    cell: dict[str, Any]
    seed: int
    path: Path
    device: str


def _by_name(part: _Part) -> Record:
    if part.name not in EXPERIMENTS:
        raise ValueError(f"{part.name} is not registered where processes import it: run one job")
    return _one(EXPERIMENTS[part.name], part.config, part.cell, part.seed, part.device)


def _one(
    experiment: Experiment, config: dict[str, Any], cell: Cell, seed: int, device: str
) -> Record:
    """Measure one cell; randomness that is no argument (initial weights) follows the seed."""
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        values = experiment.measure(config, cell, seed, torch.device(device))
    seconds = round(time.perf_counter() - began, 3)
    return Record(cell=dict(cell), seed=seed, values=values, seconds=seconds)
