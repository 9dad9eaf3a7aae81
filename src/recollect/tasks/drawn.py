"""Different whole numbers, drawn for each row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distinct"]


def distinct(rows: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` different whole numbers below ``size`` per row, in random order ``[rows, count]``.

    Uniform: the places of the largest of ``size`` independent numbers. In float64 ties, which would
    favour low places, are too rare to matter.
    """
    noise = torch.rand(
        rows, size, generator=generator, device=generator.device, dtype=torch.float64
    )
    return noise.topk(count, dim=1).indices
