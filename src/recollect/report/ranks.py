"""Ranks of the processes that a launcher (`torchrun`, `accelerate launch`) starts.

Only the main process prints a message or an error that all processes have in common.
"""

from __future__ import annotations

import os

__all__ = [
    "is_collective",
    "is_main_process",
    "mark_collective",
    "rank",
    "should_log_error",
    "world_size",
]

_REPORTING_RANKS = "_recollect_reporting_ranks"


def rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return _environment_number("RANK", 0)


def world_size() -> int:
    """Return the number of processes; 1 without a launcher."""
    return _environment_number("WORLD_SIZE", 1)


def is_main_process() -> bool:
    """Whether this process has rank 0."""
    return rank() == 0


def mark_collective(error: Exception, *, reporting_ranks: int = 1) -> Exception:
    """Mark an error as raised by every process, and return it.

    The processes below ``reporting_ranks`` print the error. More than one is useful if the main
    process may have ended.
    """
    setattr(error, _REPORTING_RANKS, reporting_ranks)
    return error


def is_collective(error: BaseException) -> bool:
    """Whether every process raises the error."""
    return hasattr(error, _REPORTING_RANKS)


def should_log_error(error: BaseException) -> bool:
    """Whether this process prints the error."""
    return rank() < getattr(error, _REPORTING_RANKS, rank() + 1)


def _environment_number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
