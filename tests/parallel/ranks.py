"""Functions run by several processes that talk over gloo, one rank each."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["on_ranks", "together"]

SECONDS = 60
"""After which an exchange that nobody answers ends with an error."""

IMPORTED = ["recollect.parallel", "recollect.lm", "recollect.lm.training.train"]


def together(
    count: int, job: Callable[..., None], *arguments: object, seconds: float = 240
) -> None:
    """Run ``job(index, *arguments)`` in so many processes; the first error of any is raised here.

    Torch is imported once for all tests, by a server without threads of its own; these processes
    are its forks.

    Args:
        count: of processes.
        job: a function of a module.
        arguments: what is pickled for it.
        seconds: after which those that have not ended are killed.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    started = start_processes(
        job, args=arguments, nprocs=count, join=False, start_method="forkserver"
    )
    assert started is not None
    last = time.monotonic() + seconds
    try:
        while not started.join(timeout=1.0):
            assert time.monotonic() < last, f"a process has not ended in {seconds} seconds"
    finally:
        for process in started.processes:
            process.kill()


def on_ranks(
    ranks: int,
    job: Callable[..., None],
    *arguments: object,
    seconds: int = SECONDS,
    meet: bool = True,
) -> None:
    """Run ``job(rank, *arguments)`` in so many processes; the first error of any is raised here.

    Args:
        ranks: R.
        job: a function of a module.
        arguments: what is pickled for it.
        seconds: the time-out of the group.
        meet: whether all ranks meet again at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "rendezvous"
        together(ranks, _begin, ranks, str(where), job, arguments, seconds, meet)


def _begin(
    rank: int,
    ranks: int,
    where: str,
    job: Callable[..., None],
    arguments: tuple[object, ...],
    seconds: int,
    meet: bool,
) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{where}", rank=rank, world_size=ranks, timeout=wait
    )
    try:
        job(rank, *arguments)
        if meet:
            dist.barrier()
    finally:
        dist.destroy_process_group()
