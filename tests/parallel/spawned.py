"""Several processes started as by a launcher, with one time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import torch
from tests.parallel.ranks import IMPORTED, run_processes
from tests.processes import run_command

ROOT = Path(__file__).parents[2]


def launch_environment(count: int) -> dict[str, str]:
    """Return the environment that a launcher gives to all processes."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port = str(result.getsockname()[1])
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    return {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@contextmanager
def group(
    count: int, code: str, place: Path, *, arguments: tuple[str, ...] = (), **environment: str
) -> Iterator[list[Popen[str]]]:
    """Start several processes that run the same code, each in a separate session; all are ended."""
    shared = launch_environment(count)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                run_command(
                    *arguments,
                    place=place,
                    code=code,
                    PYTHONPATH=f"{ROOT / 'src'}:{ROOT}",
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    **shared,
                    **environment,
                )
            )
            for rank in range(count)
        ]


def wait_for_exit(processes: list[Popen[str]], seconds: float = 240) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each."""
    result: list[tuple[int, str, str]] = []
    for place, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=seconds)
        except TimeoutExpired:
            raise AssertionError(f"process {place} has not ended; before it: {result}") from None
        result.append((process.returncode, out, err))
    return result


def job(call: str, count: int, place: Path, **environment: str) -> list[Any]:
    """Return results of a call of `tests.parallel.jobs` in several processes, in their order."""
    run_processes(count, _make, call, str(place), launch_environment(count) | environment)
    return [json.loads((place / f"made-{rank}.json").read_text()) for rank in range(count)]


def survivors(call: str, count: int, place: Path, *, killed: int) -> list[Any]:
    """Run a call as `job` does, but one process is killed; return the results of the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    processes = [
        context.Process(target=_make, args=(rank, call, str(place), shared))
        for shared in [launch_environment(count)]
        for rank in range(count)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        expected = [-signal.SIGKILL if rank == killed else 0 for rank in range(count)]
        assert [process.exitcode for process in processes] == expected
    finally:
        for process in processes:
            process.kill()
    others = [rank for rank in range(count) if rank != killed]
    return [json.loads((place / f"made-{rank}.json").read_text()) for rank in others]


def _make(rank: int, call: str, place: str, environment: dict[str, str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(place)
    torch.set_num_threads(1)
    from tests.parallel import jobs

    result = eval(f"jobs.{call}", {"jobs": jobs})
    Path(f"made-{rank}.json").write_text(json.dumps(result))
