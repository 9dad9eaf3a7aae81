"""Run a context-parallel layer on a fake group of ranks, to measure its memory.

The code of `recollect.parallel` runs, so gathered and saved tensors are counted. Received tensors
have the right shapes and no values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recollect.layer.memory_layer import MemoryLayer
from recollect.parallel.layer import ContextRanks, forward_over_ranks
from recollect.parallel.link import Link
from recollect.parallel.models import sequence_layers
from recollect.parallel.strategies import strategy_for

__all__ = ["FakeRankGroup", "simulate_context_parallel"]


class FakeRankGroup(Link):
    """One rank of a group without processes. All ranks have equally many tokens."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks, lambda: None)

    def numbers(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        return [list(values)] * self.ranks

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return torch.stack([torch.empty_like(x) for _ in range(self.ranks)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.empty_like(x.contiguous()[0])

    def send_meta(self, state: Any, to: int, device: torch.device) -> None:
        pass  # about a kilobyte, which is not counted

    def isend(self, x: Tensor, to: int) -> None:
        self.pending = deque([(None, x)])  # one message is in transit at a time

    def recv(self, x: Tensor, of: int) -> Tensor:
        return x

    def flush(self) -> None:
        self.pending.clear()


def simulate_context_parallel(block: nn.Module, ranks: int) -> None:
    """Make a block's layers run, in place, as on the rank of R ≥ 2 that needs most memory.

    The last rank reads all gathered tensors. With the sequential strategy the first rank computes
    as much as the others, and sends.
    """
    for _, layer in sequence_layers(block, ""):
        is_parallel = (
            isinstance(layer, MemoryLayer) and strategy_for(layer.recipe).name != "sequential"
        )
        group = FakeRankGroup(ranks - 1 if is_parallel else 0, ranks)
        layer.forward = forward_over_ranks(layer, ContextRanks(link=group))
