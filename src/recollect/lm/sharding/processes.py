"""Processes of one run: they meet, fail together, and notice that another has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from recollect.messages import short_repr
from recollect.report.ranks import of_all

__all__ = ["PATIENCE", "ProcessEnded", "agree", "alive", "join", "patience", "together"]

PATIENCE = "RECOLLECT_TIMEOUT"
"""Environment variable: seconds that a process waits for the others, 1,800 without it."""

# How the backends say that a peer is gone or silent; they have no error of their own for it.
_LOST = ("gloo/transport", "gloo/", "nccl", "processgroup", "connection closed by peer", "tcpstore")


_ENDED = (
    "another process of this run has ended or does not answer (its own words stand beside these, "
    "unless it was killed)"
)


class ProcessEnded(ValueError):
    """Another process of the run has ended, or does not answer; what was saved stands.

    Examples:
        >>> str(rc.lm.ProcessEnded("process 1 has ended; runs/a/step-100 stands"))
        'process 1 has ended; runs/a/step-100 stands'
    """


def join() -> PartialState:
    """Meet the other processes, if a launcher started several.

    Raises:
        ValueError: a patience that is no number of seconds; others who do not come; a launcher
            that is told to share models in a way of its own.
    """
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        if os.environ.get(name, "").lower() in ("true", "1"):
            raise of_all(
                ValueError(
                    f"the launcher sets {name}, and here [run] parallel says how processes share a "
                    "model: configure accelerate without it (accelerate launch --multi_gpu)"
                )
            )
    wait = patience()
    try:
        # Where there is no accelerator it meets nobody unless it is told so.
        alone = not torch.accelerator.is_available()
        return PartialState(cpu=alone, timeout=wait)
    except (RuntimeError, ValueError) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        reason = str(error).splitlines()[0]
        said = f"the processes of this run could not meet: {reason}"
        raise of_all(ValueError(said), speakers=2) from error


def patience() -> timedelta:
    """How long a process waits for the others.

    Raises:
        ValueError: the environment says what is no number of seconds.
    """
    written = os.environ.get(PATIENCE, "1800")
    if not written.isdecimal() or not int(written):
        message = f"{PATIENCE} must be a number of seconds, not {short_repr(written)}"
        raise of_all(ValueError(message))
    return timedelta(seconds=int(written))


@contextmanager
def together() -> Iterator[None]:
    """Inside, what one process refuses ends all of them, and the first says it.

    Nothing inside may wait for the other processes.

    Raises:
        ValueError: another process refused; else what this one raised.
    """
    state = PartialState()
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        if state.num_processes == 1:
            raise
        failed = error
    if state.num_processes == 1:
        return
    told = _gathered(None if failed is None else str(failed))
    places = [place for place, reason in enumerate(told) if reason is not None]
    if not places:
        return
    if failed is None:
        failed = ValueError(f"process {places[0]} of {len(told)}: {told[places[0]]}")
    raise of_all(failed)


def agree(facts: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """That all processes were given the same.

    Args:
        facts: what each has, by name; compared by its text.
        instead: by the beginning of a name, what to do where it differs.

    Raises:
        ValueError: naming the first that differs and the process.
    """
    every = _gathered({name: repr(value) for name, value in facts.items()})
    for place, other in enumerate(every):
        for name in {**every[0], **other}:
            mine, theirs = every[0].get(name, "nothing"), other.get(name, "nothing")
            if mine != theirs:
                advice = next(x for head, x in instead.items() if name.startswith(head))
                raise of_all(
                    ValueError(
                        f"process {place} has {name} = {_short(theirs)}, and process 0 "
                        f"{_short(mine)}: {advice}"
                    )
                )


@contextmanager
def alive(saved: Callable[[], Path | None]) -> Iterator[None]:
    """Inside, the end of another process is told as what it is.

    Args:
        saved: gives the run's last checkpoint, ``None`` before the first.

    Raises:
        ProcessEnded: in place of the backend's words.
    """
    try:
        yield
    except RuntimeError as error:
        if not _lost(error):
            raise
        checkpoint = None
        with suppress(ValueError):
            checkpoint = saved()
        stands = "no checkpoint was written yet, so the run begins anew"
        if checkpoint is not None:
            stands = f"{checkpoint} is whole, and --resume goes on from it with any number of them"
        raise of_all(
            ProcessEnded(f"{_ENDED}; {stands}"),
            speakers=2,  # the first may be the one
        ) from error


def _gathered(mine: Any) -> list[Any]:
    """What every process has, in their order.

    Raises:
        ProcessEnded: one of them does not come.
    """
    try:
        return cast(list[Any], gather_object([mine]))
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise of_all(ProcessEnded(f"{_ENDED}; the run has not begun"), speakers=2) from error


def _lost(error: RuntimeError) -> bool:
    said = str(error).lower()
    return PartialState().num_processes > 1 and any(word in said for word in _LOST)


def _short(text: str) -> str:
    return text if len(text) < 60 else text[:57] + "..."
