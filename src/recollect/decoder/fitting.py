"""Which modules decode in fixed tensors: how often the host decides alike, and what is refused."""

from __future__ import annotations

import math
from typing import NoReturn

from torch import nn

from recollect.blocks.as_context import AsContextLayer
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["inside", "refuse", "rhythm", "without_slots"]


def without_slots(part: nn.Module) -> str | None:
    """Why states that grow cannot be kept in slots where a module has this part, if so.

    Args:
        part: of the module.
    """
    if isinstance(part, AsContextLayer):
        return "beside a memory whose segments begin anew (AsContext) no slots are kept"
    if isinstance(part, MemoryLayer) and part.recipe.dual and part.recipe.algorithm.batch > 1:
        return (
            "the host counts open inner batches by tokens seen, and with empty slots it does not "
            f"know them ({part.recipe.algorithm.title} with batches over infinitely many features)"
        )
    return None


def rhythm(module: nn.Module) -> tuple[int, int]:
    """Tokens until every buffer has filled, and after how many the host decides alike again.

    Args:
        module: with all of its parts.
    """
    warm, periods = 0, [1]
    for part in module.modules():
        if isinstance(part, MemoryLayer):
            batch = part.recipe.algorithm.batch
            warm = max(warm, batch + (part.recipe.history or 0))
            if batch > 1:
                periods.append(batch)
        elif isinstance(part, AsContextLayer):
            warm = max(warm, part.segment)
            periods.append(part.segment)
    return warm, math.lcm(*periods)


def inside(module: nn.Module, name: str) -> bool:
    """Whether a part belongs to a composition, which answers for its parts.

    Args:
        module: whose part. name: of the part in it.
    """
    parents = name.split(".")[:-1]
    paths = [".".join(parents[:n]) for n in range(len(parents) + 1)]
    return any(hasattr(module.get_submodule(path), "mixer") for path in paths)


def refuse(why: str) -> NoReturn:
    """Raise a ValueError that begins with what cannot be done.

    Args:
        why: in a sentence, and what to do instead.
    """
    raise ValueError(f"this cannot be decoded in fixed tensors: {why}")
