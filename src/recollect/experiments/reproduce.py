"""Runs experiments: every cell and seed once, saved as soon as it is measured.

A record's file is named by a digest of experiment, configuration, cell and seed. An interrupted run
therefore continues with the missing records, and a changed configuration is measured again. Worker
processes measure cells; only the main process writes files.
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
from recollect.experiments.framework.records import Cell, Record, Results
from recollect.experiments.framework.run import NoProgress, ProgressReporter, Run, format_command
from recollect.experiments.framework.workers import WorkerFailure, run_in_workers
from recollect.experiments.registry import EXPERIMENTS
from recollect.report.devices import resolve_device
from recollect.report.environment import describe_environment
from recollect.report.files import read_regular, save_to_temp_on_error, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.signals import defer_signals
from recollect.serialization import read_json

__all__ = ["get_experiment", "reproduce"]


def get_experiment(name: str) -> Experiment:
    """Return an experiment by its name, or raise `ValueError` with a list of all names."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")


def reproduce(
    name: str | Experiment,
    *,
    scale: Scale = "small",
    seeds: int | None = None,
    jobs: int = 1,
    out: str | PathLike[str] = "runs",
    device: str = "cpu",
    overwrite: bool = False,
    progress: ProgressReporter | None = None,
) -> Run:
    """Run an experiment, apply the rules of its claims and write its report.

    Args:
        name: of the experiment, see `EXPERIMENTS`.
        scale: ``"smoke"`` (seconds), ``"small"`` (minutes on two cores) or ``"paper"``.
        seeds: number of seeds, which are 0, 1, …; the configuration's number by default.
        jobs: number of processes, with one thread each if there are several. Each imports the main
            module again, so a script calls this under ``if __name__ == "__main__":``.
        out: ``out/NAME`` gets results.json, results.csv, report.html, figure.png, figure.svg and
            figure-narrow.svg.
        device: of models and tensors, such as ``"cpu"`` or ``"cuda:1"``.
        overwrite: whether to measure again the records that an earlier run saved.
        progress: receives each record.

    Returns:
        The run. After a keyboard interrupt it has the records so far, and the same call continues.

    Raises:
        ValueError: if a name, scale, device or number is not valid; if another run measures this
            experiment in the same folder; if a user's own experiment is run with several jobs; if a
            process died, after all else is measured and reported; if the folder cannot be written,
            after the missing files are saved in a temporary one.

    Examples:
        >>> run = rc.reproduce("ttr-fig2", scale="smoke", out="runs")
        >>> run.complete, run.folder.as_posix()
        (True, 'runs/ttr-fig2')
        >>> [claim.name for claim, verdict in run.verdicts][:1]
        ['linear attention is worst']
    """
    experiment = get_experiment(name) if isinstance(name, str) else name
    if scale not in SCALES:
        raise ValueError(f"--scale must be one of {', '.join(SCALES)}, not {scale!r}")
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    if jobs > 1 and EXPERIMENTS.get(experiment.name) is not experiment:
        raise ValueError(
            f"{experiment.name} is not in the registry, by which other processes find an "
            "experiment: run it with one job"
        )
    resolve_device(device, argument_name="--device")
    config = experiment.config(scale, seeds=seeds)
    folder = Path(out) / experiment.name
    command = format_command(
        experiment.name, scale=scale, seeds=seeds, jobs=jobs, device=device, out=str(out)
    )
    with folder_lock(folder):
        tasks = [
            _CellTask(
                experiment=experiment.name,
                config=config,
                cell=dict(cell),
                seed=seed,
                device=device,
                path=folder / "cells" / scale / _file_name(experiment, config, cell, seed),
            )
            for seed in range(config["seeds"])
            for cell in experiment.cells(config)
        ]
        if overwrite:
            for task in tasks:
                task.path.unlink(missing_ok=True)
        return _run_locked(
            experiment, tasks, folder, scale, jobs, command, progress or NoProgress()
        )


@dataclass(frozen=True, kw_only=True)
class _CellTask:
    """A cell and seed to measure, and the file of the record."""

    experiment: str
    config: dict[str, Any]
    cell: dict[str, Any]
    seed: int
    device: str
    path: Path


def _run_locked(
    experiment: Experiment,
    tasks: list[_CellTask],
    folder: Path,
    scale: Scale,
    jobs: int,
    command: str,
    progress: ProgressReporter,
) -> Run:
    """Measure the missing records in a folder that no other run may use, and write the report."""
    from recollect.experiments.framework.report import save_run

    missing = [task for task in tasks if not task.path.exists()]
    progress.begin(experiment, len(tasks) - len(missing), len(tasks))
    environment = describe_environment(tasks[0].device)
    stamp = {
        "commit": environment.commit,
        "device": environment.device,
        "date": environment.date,
        "rules": experiment.rules_digest,
    }
    failures: list[str] = []
    measured: dict[Path, Record] = {}
    interrupted = False
    try:
        for path, outcome in _measure_all(experiment, missing, jobs):
            if isinstance(outcome, str):
                failures.append(outcome)
                continue
            with defer_signals():
                record = measured[path] = replace(outcome, **stamp)
                with suppress(OSError):  # _save_missing tries again after the last cell
                    write_atomic(path, _to_json(record))
            progress.on_record(record)
    except KeyboardInterrupt:
        interrupted = True
    _save_missing(measured, folder)
    records = tuple(_read(task.path) for task in tasks if task.path.exists())
    message = f"{failures[0]}; {len(failures)} of {len(tasks)} cells failed" if failures else ""
    if not records:
        raise ValueError(message) if failures and not interrupted else KeyboardInterrupt
    results = Results(records=records, scale=scale, config=tasks[0].config)
    run = Run(
        experiment=experiment,
        results=results,
        verdicts=tuple(experiment.verdicts(results)),
        environment=environment,
        complete=len(records) == len(tasks),
        folder=folder,
        jobs=jobs,
        command=command,
    )
    with defer_signals():
        save_run(run)
    if failures and not interrupted:
        raise ValueError(
            f"{message}, and the same command tries them again; {folder} has the others"
        )
    return run


def _read(path: Path) -> Record:
    try:
        return Record.from_dict(read_json(read_regular(path)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no measured cell ({error}): delete it to measure that cell again"
        ) from None


def _to_json(record: Record) -> str:
    return json.dumps(record.to_dict(), allow_nan=False) + "\n"


def _save_missing(measured: dict[Path, Record], folder: Path) -> None:
    """Write the records that are not on disk, for example since the folder was removed."""
    missing = {path: _to_json(record) for path, record in measured.items() if not path.exists()}
    try:
        with defer_signals():
            for path, text in missing.items():
                write_atomic(path, text)
    except OSError as error:
        files = {str(path.relative_to(folder)): text for path, text in missing.items()}
        raise ValueError(save_to_temp_on_error(files, target=folder, error=error)) from error


def _file_name(experiment: Experiment, config: dict[str, Any], cell: Cell, seed: int) -> str:
    """Return a name that identifies a record. It does not depend on the number of seeds."""
    terms = {k: v for k, v in config.items() if k != "seeds"}
    text = json.dumps([experiment.name, terms, dict(cell), seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20] + ".json"


def _measure_all(
    experiment: Experiment, tasks: list[_CellTask], jobs: int
) -> Iterator[tuple[Path, Record | str]]:
    """Yield records as they are measured, in order with one job, or the message of a failure."""
    if jobs == 1:
        for task in tasks:
            yield task.path, _measure_cell(experiment, task)
        return
    for task, record in run_in_workers(_measure_by_name, tasks, jobs):
        if isinstance(record, WorkerFailure):
            yield task.path, f"{task.experiment}, {task.cell}, seed {task.seed}: {record.message}"
        else:
            yield task.path, record


def _measure_by_name(task: _CellTask) -> Record:
    if task.experiment not in EXPERIMENTS:
        raise ValueError(
            f"{task.experiment} is not registered where processes import it: run one job"
        )
    return _measure_cell(EXPERIMENTS[task.experiment], task)


def _measure_cell(experiment: Experiment, task: _CellTask) -> Record:
    """Measure one cell. Randomness without a generator, as of initial weights, has the seed too."""
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        values = experiment.measure(task.config, task.cell, task.seed, torch.device(task.device))
    seconds = round(time.perf_counter() - started, 3)
    return Record(cell=task.cell, seed=task.seed, values=values, seconds=seconds)
