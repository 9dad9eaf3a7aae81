"""Learned factors and biases of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["QKAffine"]


class QKAffine(nn.Module):
    """x ⊙ w + b for queries and keys, with one w and b per head.

    Args:
        heads: number of query heads plus number of keys of a token.
        size: K.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, size))
        self.bias = nn.Parameter(torch.empty(heads, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set factors and biases to 1."""
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x [B, T, heads, K]``."""
        return torch.addcmul(self.bias.to(x.dtype), x, self.weight.to(x.dtype))

    def extra_repr(self) -> str:
        """Return heads and channels."""
        return ", ".join(map(str, self.weight.shape))
