"""Modules that can decode in tensors at fixed addresses, and the period of host decisions."""

from __future__ import annotations

import math
from typing import NoReturn

from torch import nn

from recollect.blocks.as_context import MemoryAsContextLayer
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["is_composition_part", "refuse", "warmup_and_period", "why_no_slots"]


def why_no_slots(part: nn.Module) -> str | None:
    """Return the reason why this part of a module prevents a fixed number of slots, or ``None``."""
    if isinstance(part, MemoryAsContextLayer):
        return "MemoryAsContext resets its attention in each segment, which slots do not support"
    if (
        isinstance(part, MemoryLayer)
        and part.recipe.uses_kernel_rows
        and part.recipe.algorithm.batch_size > 1
    ):
        return (
            f"{part.recipe.algorithm.title} with batches over infinitely many features needs the "
            "position on the host, which is unknown with empty slots"
        )
    return None


def warmup_and_period(module: nn.Module) -> tuple[int, int]:
    """Return the number of tokens until all buffers are full, and the period of host decisions."""
    warm, periods = 0, [1]
    for part in module.modules():
        if isinstance(part, MemoryLayer):
            batch, n = part.recipe.algorithm.batch_size, part.recipe.associations_per_token
            warm = max(warm, batch + (part.recipe.num_past_associations or 0) // n)
            if batch > 1:
                periods.append(batch)
        elif isinstance(part, MemoryAsContextLayer):
            warm = max(warm, part.segment)
            periods.append(part.segment)
    return warm, math.lcm(*periods)


def is_composition_part(module: nn.Module, name: str) -> bool:
    """Return whether a part belongs to a composition."""
    parents = name.split(".")[:-1]
    paths = [".".join(parents[:n]) for n in range(len(parents) + 1)]
    return any(hasattr(module.get_submodule(path), "mixer") for path in paths)


def refuse(why: str) -> NoReturn:
    """Raise a ValueError with the reason why a module cannot decode in fixed tensors."""
    raise ValueError(f"this cannot be decoded in fixed tensors: {why}")
