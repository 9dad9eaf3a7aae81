"""Several processes as a launcher starts them, with a limit of time on all of them."""

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
from tests.parallel.ranks import IMPORTED, together
from tests.processes import begun

ROOT = Path(__file__).parents[2]


def told(count: int) -> dict[str, str]:
    """What a launcher tells all of so many processes."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port = str(result.getsockname()[1])
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    return {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@contextmanager
def group(
    count: int, code: str, place: Path, *, arguments: tuple[str, ...] = (), **environment: str
) -> Iterator[list[Popen[str]]]:
    """So many processes that run the same code, each in a session of its own; none survives."""
    shared = told(count)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                begun(
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


def ended(processes: list[Popen[str]], seconds: float = 240) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each."""
    result: list[tuple[int, str, str]] = []
    for place, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=seconds)
        except TimeoutExpired:
            raise AssertionError(f"process {place} has not ended; before it: {result}") from None
        result.append((process.returncode, out, err))
    return result


def job(call: str, count: int, place: Path, **environment: str) -> list[Any]:
    """What `tests.parallel.jobs` makes of a call in each of several processes, in their order."""
    together(count, _make, call, str(place), told(count) | environment)
    return [json.loads((place / f"made-{rank}.json").read_text()) for rank in range(count)]


def survivors(call: str, count: int, place: Path, *, killed: int) -> list[Any]:
    """Run a call as `job` does, where one process is killed; return what the others make of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    processes = [
        context.Process(target=_make, args=(rank, call, str(place), shared))
        for shared in [told(count)]
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
