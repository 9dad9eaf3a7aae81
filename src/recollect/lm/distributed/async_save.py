"""Checkpoints that all processes write together while training goes on.

Every process copies its tensors to the CPU and goes on, and a thread writes the copies
(`torch.distributed.checkpoint.async_save`). The threads communicate through a group of their own,
because the collectives of one group must have the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from recollect.lm.model.checkpoint import CheckpointError
from recollect.report.ranks import mark_collective

__all__ = ["AsyncSave"]


class AsyncSave:
    """The save in progress, at most one. All processes call `start` and then `finalize`."""

    def __init__(self, timeout: timedelta) -> None:  # of a thread that waits for the others
        self.timeout = timeout
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._shards: Future[Any] | None = None
        self._result: Future[None] | None = None

    @property
    def in_progress(self) -> bool:
        """Whether a save was started and not finalized."""
        return self._shards is not None

    @property
    def failed(self) -> bool:
        """Whether a finalized save has failed."""
        result = self._result
        return result is not None and result.done() and result.exception() is not None

    def start(self, write: Callable[[dist.ProcessGroup], Future[Any]]) -> None:
        """Copy this process's tensors, and write the copies in a thread of the given group."""
        assert self._result is None, "one checkpoint is written at a time"
        if self._group is None:
            group = dist.new_group(backend="gloo", timeout=self.timeout)
            self._group = cast(dist.ProcessGroup, group)
        self._shards = write(self._group)

    def finalize(
        self,
        commit: Callable[[], None],  # gives the checkpoint its name
        discard: Callable[[], None],  # frees the space of a failed checkpoint
        error_context: Callable[[], AbstractContextManager[None]],  # translates errors of writing
        error: Exception | None = None,  # error of this process, from the files next to the shards
    ) -> None:
        """Let the first process commit or discard the checkpoint once all have written."""
        assert self._shards is not None and self._group is not None
        args = (self._shards, self._group, commit, discard, error_context, error)
        self._shards, self._result = None, self._threads.submit(_finalize, *args)

    def wait(self) -> None:
        """Wait for the save in progress. Raise CheckpointError on all processes if it failed."""
        if self._result is None:
            return
        self._result.exception()  # an interrupt during this line changes nothing
        result, self._result = self._result, None
        result.result()

    def drain(self) -> None:
        """Wait for the save in progress and ignore its errors."""
        with suppress(Exception):
            self.wait()
        if self._shards is not None:
            self._shards.exception()
            self._shards = None


def _finalize(
    shards: Future[Any],
    group: dist.ProcessGroup,
    commit: Callable[[], None],
    discard: Callable[[], None],
    error_context: Callable[[], AbstractContextManager[None]],
    error: Exception | None,
) -> None:
    try:
        with error_context():
            shards.result()
    except Exception as failure:
        error = error or failure
    message = _first_error(group, error)
    if dist.get_rank(group) == 0:
        if message is None:
            try:
                with error_context():
                    commit()
            except Exception as failure:
                error = failure
        if message is not None or error is not None:
            discard()
    message = _first_error(group, error) or message
    if message is not None:
        raise mark_collective(CheckpointError(message)) from error


def _first_error(group: dist.ProcessGroup, error: Exception | None) -> str | None:
    """Return the message of the first process with an error."""
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if error is None else str(error), group=group)
    return next((message for message in messages if message is not None), None)
