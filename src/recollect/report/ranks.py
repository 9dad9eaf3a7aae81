"""Who of several processes says what: the first for all, and one that fails alone for itself.

A launcher (`torchrun`, `accelerate launch`) tells every process its number and how many there are
in its environment.
"""

from __future__ import annotations

import os

__all__ = ["is_first", "is_of_all", "of_all", "rank", "speaks", "world_size"]

_SPEAKERS = "_recollect_speakers"


def rank() -> int:
    """The number of this process among those that a launcher started; 0 without one."""
    return _number("RANK", 0)


def world_size() -> int:
    """How many processes a launcher started; 1 without one."""
    return _number("WORLD_SIZE", 1)


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return rank() == 0


def of_all(error: Exception, *, speakers: int = 1) -> Exception:
    """Note of an error that every process has it, so that the first alone says it.

    Args:
        error: what is raised.
        speakers: how many of the first processes say it, where the first may be gone.
    """
    setattr(error, _SPEAKERS, speakers)
    return error


def is_of_all(error: BaseException) -> bool:
    """Whether every process has an error."""
    return hasattr(error, _SPEAKERS)


def speaks(error: BaseException) -> bool:
    """Whether this process is one that says an error."""
    return rank() < getattr(error, _SPEAKERS, rank() + 1)


def _number(name: str, otherwise: int) -> int:
    written = os.environ.get(name, "")
    return int(written) if written.isdecimal() else otherwise
