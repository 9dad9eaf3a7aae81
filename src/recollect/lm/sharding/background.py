"""A checkpoint that is written while steps go on, by all processes together.

Every process copies what it holds to the CPU and goes on; a thread writes the copies
(`torch.distributed.checkpoint.async_save`). What these threads tell each other goes through a group
of their own, because the collectives of a group have to come in one order, and steps have theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from recollect.lm.model.checkpoint import CheckpointError
from recollect.report.ranks import of_all

__all__ = ["Background"]


class Background:
    """The one checkpoint that is under way, if any.

    All processes call `begin` and then `complete`, in this order; each then waits for itself.

    Args:
        patience: how long a thread waits for the others.
    """

    def __init__(self, patience: timedelta) -> None:
        self.patience = patience
        self._group: dist.ProcessGroup | None = None
        self._shards: Future[Any] | None = None
        self._done: Future[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether shards are under way that nobody has completed."""
        return self._shards is not None

    @property
    def failed(self) -> bool:
        """Whether a checkpoint is over that could not be written."""
        return self._done is not None and self._done.done() and bool(self._done.exception())

    def begin(self, write: Callable[[dist.ProcessGroup], Future[Any]]) -> None:
        """Copy what this process holds, and let a thread write it.

        Args:
            write: is given the group of these threads.
        """
        assert self._done is None, "one checkpoint is written at a time"
        if self._group is None:
            made = dist.new_group(backend="gloo", timeout=self.patience)
            self._group = cast(dist.ProcessGroup, made)
        self._shards = write(self._group)

    def complete(
        self,
        place: Callable[[], None],
        drop: Callable[[], None],
        explained: Callable[[], AbstractContextManager[None]],
        failed: Exception | None = None,
    ) -> None:
        """Once every process has written all of its part, let the first one do the rest.

        Args:
            place: what the first process does then.
            drop: what it does if one has failed: gives the space back, when nobody writes any more.
            explained: turns what goes wrong while writing into one sentence.
            failed: why this process could not write what stands beside the shards.
        """
        assert self._shards is not None and self._group is not None
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        given = (self._shards, self._group, place, drop, explained, failed)
        self._shards, self._done = None, thread.submit(_completed, *given)
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint that is under way.

        Raises:
            CheckpointError: it could not be written, at all processes alike.
        """
        if self._done is None:
            return
        self._done.exception()  # an interrupt while it waits leaves all as it is
        done, self._done = self._done, None
        done.result()

    def settle(self) -> None:
        """Wait, whatever comes of it: the run has ended otherwise."""
        with suppress(Exception):
            self.finish()
        if self._shards is not None:
            self._shards.exception()
            self._shards = None


def _completed(
    shards: Future[Any],
    group: dist.ProcessGroup,
    place: Callable[[], None],
    drop: Callable[[], None],
    explained: Callable[[], AbstractContextManager[None]],
    failed: Exception | None,
) -> None:
    try:
        with explained():
            shards.result()
    except Exception as error:
        failed = failed or error
    said = _told(group, failed)
    if dist.get_rank(group) == 0:
        try:
            with explained():
                if said is None:
                    place()
        except Exception as error:
            failed = error
        if said is not None or failed is not None:
            drop()
    said = _told(group, failed) or said
    if said is not None:
        raise of_all(CheckpointError(said)) from failed


def _told(group: dist.ProcessGroup, failed: Exception | None) -> str | None:
    """What the first process that has failed has to say; ``None`` where none has."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if failed is None else str(failed), group=group)
    return next((reason for reason in told if reason is not None), None)
