"""Functions in several processes that communicate over gloo, one rank each."""

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

__all__ = ["on_ranks", "run_processes"]

SECONDS = 60
"""Time limit of an exchange without an answer."""

IMPORTED = ["recollect.parallel", "recollect.lm", "recollect.lm.training.train"]


def run_processes(
    count: int, job: Callable[..., None], *arguments: object, seconds: float = 240
) -> None:
    """Run ``job(index, *arguments)`` in several processes; raise the first error of any.

    A server without threads imports torch once for all tests; these processes are its forks.

    Args:
        count: number of processes.
        job: a function of a module.
        arguments: pickled arguments.
        seconds: time limit, after which remaining processes are killed.
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
    """Run ``job(rank, *arguments)`` in several processes; raise the first error of any.

    Args:
        ranks: number of ranks R.
        job: a function of a module.
        arguments: pickled arguments.
        seconds: the time limit of the group.
        meet: whether all ranks meet again at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        run_processes(ranks, _begin, ranks, str(rendezvous), job, arguments, seconds, meet)


def _begin(
    rank: int,
    ranks: int,
    rendezvous: str,
    job: Callable[..., None],
    arguments: tuple[object, ...],
    seconds: int,
    meet: bool,
) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=wait
    )
    try:
        job(rank, *arguments)
        if meet:
            dist.barrier()
    finally:
        dist.destroy_process_group()
