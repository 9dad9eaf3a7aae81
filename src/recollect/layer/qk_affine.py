"""Learned factors of queries and keys, with biases or shared by heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["QKAffine", "QKScale"]


class QKAffine(nn.Module):
    """x ⊙ w + b for queries and keys, with one w and b per query head and per key of a token."""

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
        return ", ".join(map(str, self.weight.shape))


class QKScale(nn.Module):
    """x ⊙ w, or x ⊙ (1 + w) if zero-centered, with one w for all queries and one for all keys."""

    def __init__(self, size: int, *, zero_centered: bool) -> None:
        super().__init__()
        self.is_zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(2, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the factors to 1."""
        nn.init.constant_(self.weight, 0.0 if self.is_zero_centered else 1.0)

    def forward(self, qk: Tensor, num_heads: Sequence[int]) -> Tensor:
        """Scale queries and keys ``[B, T, heads, K]``, whose numbers are ``num_heads``."""
        work = torch.promote_types(qk.dtype, torch.float32)
        factors = self.weight.to(work)
        if self.is_zero_centered:
            factors = 1 + factors
        pairs = zip(factors.split(1), num_heads, strict=True)
        factors = torch.cat([row.expand(count, -1) for row, count in pairs])
        return (qk.to(work) * factors).to(qk.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}" + ", zero_centered=True" * self.is_zero_centered
