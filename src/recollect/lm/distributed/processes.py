"""Processes of one run: initialize, fail together, and detect a process that has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object

from recollect.messages import short_repr
from recollect.report.ranks import mark_collective

__all__ = [
    "TIMEOUT_ENV",
    "ProcessEnded",
    "check_agreement",
    "detect_lost_peers",
    "fail_together",
    "init_distributed",
    "process_timeout",
]

TIMEOUT_ENV = "RECOLLECT_TIMEOUT"
"""Environment variable with the seconds that a process waits for the others; 1,800 by default."""


class ProcessEnded(ValueError):
    """Another process of the run has ended or does not answer. Saved checkpoints are intact.

    Examples:
        >>> str(rc.lm.ProcessEnded("process 1 has ended; runs/a/step-100 is complete"))
        'process 1 has ended; runs/a/step-100 is complete'
    """


def init_distributed() -> PartialState:
    """Initialize the process group if a launcher started several processes."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        if os.environ.get(name, "").lower() in ("true", "1"):
            raise mark_collective(
                ValueError(
                    f"the launcher sets {name}, but [run] parallel decides how processes share a "
                    "model: configure accelerate without it (accelerate launch --multi_gpu)"
                )
            )
    timeout = process_timeout()
    try:
        # Without an accelerator, PartialState initializes no group unless cpu=True.
        return PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        reason = str(error).splitlines()[0]
        raise mark_collective(
            ValueError(f"the processes of this run could not connect: {reason}"), reporting_ranks=2
        ) from error


def process_timeout() -> timedelta:
    """Return the time that a process waits for the others, from the environment."""
    seconds = os.environ.get(TIMEOUT_ENV, "1800")
    if not seconds.isdecimal() or not int(seconds):
        message = f"{TIMEOUT_ENV} must be a number of seconds, not {short_repr(seconds)}"
        raise mark_collective(ValueError(message))
    return timedelta(seconds=int(seconds))


@contextmanager
def fail_together() -> Iterator[None]:
    """Context manager in which an error of one process raises on all; the first one reports it.

    The block must not wait for other processes.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        if PartialState().num_processes == 1:
            raise
        error = failure
    if PartialState().num_processes == 1:
        return
    messages = _gather(None if error is None else str(error))
    rank = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if rank is not None:
        raise mark_collective(
            error or ValueError(f"process {rank} of {len(messages)}: {messages[rank]}")
        )


def check_agreement(values: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Raise ValueError if the named values of processes differ, compared by their ``repr``.

    ``advice`` has the end of the message by the beginning of the name.
    """
    ranks = _gather({name: repr(value) for name, value in values.items()})
    for rank, other in enumerate(ranks):
        for name in {**ranks[0], **other}:
            expected, actual = ranks[0].get(name, "nothing"), other.get(name, "nothing")
            if actual != expected:
                hint = next(text for prefix, text in advice.items() if name.startswith(prefix))
                raise mark_collective(
                    ValueError(
                        f"process {rank} has {name} = {_truncate(actual)}, and process 0 "
                        f"{_truncate(expected)}: {hint}"
                    )
                )


@contextmanager
def detect_lost_peers(last_checkpoint: Callable[[], Path | None]) -> Iterator[None]:
    """Context manager that raises `ProcessEnded` for a backend error due to a lost process."""

    def outcome() -> str:
        if (checkpoint := last_checkpoint()) is None:
            return "no checkpoint was written yet, so the run has to restart"
        return f"{checkpoint} is complete: continue with --resume, on any number of processes"

    with _translated_errors(outcome):
        yield


@contextmanager
def _translated_errors(outcome: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # NCCL and the store have an error class. Gloo raises a RuntimeError with its file's name.
        is_lost = isinstance(error, dist.DistError) or "gloo/" in str(error)
        if not is_lost or PartialState().num_processes == 1:
            raise
        message = (
            "another process of this run has ended or does not answer (its own error is printed "
            f"too, unless it was killed); {outcome()}"
        )
        # Process 0 may be the lost one, so the first two report.
        raise mark_collective(ProcessEnded(message), reporting_ranks=2) from error


def _gather(value: Any) -> list[Any]:
    """Return the values of all processes, in their order."""
    with _translated_errors(lambda: "the run has not started"):
        return cast(list[Any], gather_object([value]))


def _truncate(text: str) -> str:
    return text if len(text) < 60 else text[:57] + "..."
