"""A layer as one rank of several runs it, with nobody at the other ends.

The code of `recollect.parallel` runs, so what it gathers and keeps is what is counted. Among
tensors without numbers an exchange has only to give back the right shapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import MemoryLayer
from recollect.parallel.layer import ContextRanks, run_feed_forward, run_layer, run_memory_layer
from recollect.parallel.link import Link
from recollect.parallel.models import sequence_layers
from recollect.parallel.strategies import strategy_for

__all__ = ["PaperRanks", "lay_along"]


class PaperRanks(Link):
    """One rank of a sequence without processes: the others have as many tokens.

    Received tensors have the right shapes and no values. One message is in transit at a time.

    Args:
        rank: this one.
        ranks: R.
    """

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
        self.pending = deque([(None, x)])

    def recv(self, x: Tensor, of: int) -> Tensor:
        return x

    def flush(self) -> None:
        self.pending.clear()


def lay_along(block: nn.Module, ranks: int) -> None:
    """Let a block's layers run as on the rank that holds most, in place.

    Of what is gathered the last rank uses all; in a hand-over the first one computes as much as any
    other, and sends.

    Args:
        block: of a model. ranks: R ≥ 2.
    """
    for _, layer in sequence_layers(block, ""):
        run, rank = run_layer, 0
        if isinstance(layer, MemoryLayer):
            run = run_memory_layer
            rank = 0 if strategy_for(layer.recipe).name == "sequential" else ranks - 1
        elif isinstance(layer, FeedForward):
            run = run_feed_forward
        layer.forward = partial(run, ContextRanks(link=PaperRanks(rank, ranks)), layer)
