"""Functions run by several processes that talk over gloo, one rank each."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["on_ranks"]

SECONDS = 60
"""After which an exchange that nobody answers ends with an error."""


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
        given = (ranks, str(where), job, arguments, seconds, meet)
        spawn(_begin, args=given, nprocs=ranks)


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
