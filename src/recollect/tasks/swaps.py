"""Swaps as tokens: n items in n positions, each token swaps two, and the label is the first item.

AM section 3.2 and listing 2: with n = 5 there are C(5, 2) = 10 tokens and 5 answers. The label at
every step is the item at the first position after the step. The state is a permutation, so a model
that is correct at every length tracks S_n. AM figure 6 has lengths 32, 64, 128 and 256: a
`SwapConfig` per length. In figure 5 the inputs are keys instead of tokens:
`recollect.tasks.swap_stream` with ``ask="first"``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.fields import Validated, int_check, integer, validate

__all__ = ["SwapConfig", "position_pairs", "swap_batch"]


@dataclass(frozen=True, kw_only=True)
class SwapConfig(Validated):
    """Sequences of swaps; the defaults are AM figure 4's.

    Args:
        items: n, at least 2.
        length: number of swaps per sequence, 16 in figure 4.

    Raises:
        ValueError: a size is too small.

    Examples:
        >>> config = rc.tasks.SwapConfig(items=5, length=16)
        >>> inputs, labels = rc.tasks.swap_batch(config, 2, torch.Generator().manual_seed(0))
        >>> inputs.shape, labels.shape
        (torch.Size([2, 16]), torch.Size([2, 16]))
    """

    items: int = integer(5, at_least=2)
    length: int = integer(16, at_least=1)

    @property
    def vocab(self) -> int:
        """Number of input tokens, n(n−1)/2, ordered as `position_pairs`. Answers are 0..n−1."""
        return self.items * (self.items - 1) // 2


def position_pairs(items: int) -> Tensor:
    """Return the positions i < j of each token's swap in lexicographic order, ``[n(n−1)/2, 2]``."""
    return torch.combinations(torch.arange(items))


def swap_batch(config: SwapConfig, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw uniform swaps, and the first item after each.

    Args:
        config: sizes.
        batch: batch size B.
        generator: the only source of randomness; the result is on its device.

    Returns:
        ``(inputs, labels)``, int64 ``[B, length]``: swaps below ``config.vocab`` and items below
        ``config.items``. Item i is at position i before the first swap, and the label is the item
        at position 0.

    Raises:
        ValueError: ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.SwapConfig(items=3, length=6)
        >>> inputs, labels = rc.tasks.swap_batch(config, 2, draw)
        >>> inputs.shape, int(labels[labels >= 0].max())
        (torch.Size([2, 6]), 2)
    """
    validate("swap_batch: batch", int_check(), batch)
    device = generator.device
    tokens = torch.randint(config.vocab, (batch, config.length), generator=generator, device=device)
    pairs = position_pairs(config.items).to(device)
    permutation = torch.arange(config.items, device=device).repeat(batch, 1)
    labels = torch.empty_like(tokens)
    for t in range(config.length):
        pair = pairs[tokens[:, t]]  # [B, 2]
        permutation = permutation.scatter(1, pair.flip(1), permutation.gather(1, pair))
        labels[:, t] = permutation[:, 0]
    return tokens, labels
