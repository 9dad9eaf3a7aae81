"""What every task's configuration checks, in one wording."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["at_least", "below", "distinct", "one_of", "same_batch"]


def at_least(owner: str, lowest: int, **numbers: object) -> None:
    """Refuse what is no whole number from ``lowest`` on.

    Raises:
        ValueError: naming the owner and the argument.
    """
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ValueError(
                f"{owner}: {name} must be a whole number of at least {lowest}, got {value!r}"
            )


def below(owner: str, low: float, high: float, **numbers: object) -> None:
    """Refuse what is no number in [low, high].

    Raises:
        ValueError: naming the owner and the argument.
    """
    for name, value in numbers.items():
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or math.isnan(float(value)) or not low <= float(value) <= high:  # type: ignore[arg-type]
            raise ValueError(f"{owner}: {name} must be from {low} to {high}, got {value!r}")


def one_of(owner: str, choices: Sequence[str], **words: object) -> None:
    """Refuse a word that is not among the choices.

    Raises:
        ValueError: naming the owner, the argument and the choices.
    """
    for name, value in words.items():
        if value not in choices:
            said = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
            raise ValueError(f"{owner}: {name} must be {said}, got {value!r}")


def same_batch(task: str, batch: int) -> None:
    """Refuse a negative batch.

    Raises:
        ValueError: naming the task.
    """
    if batch < 0:
        raise ValueError(f"{task}: batch must not be negative, got {batch}")


def distinct(rows: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` different whole numbers below ``size`` per row, in random order ``[rows, count]``.

    Uniform: the places of the largest of ``size`` independent numbers. In float64 ties, which would
    favour low places, are too rare to matter.
    """
    noise = torch.rand(
        rows, size, generator=generator, device=generator.device, dtype=torch.float64
    )
    return noise.topk(count, dim=1).indices
