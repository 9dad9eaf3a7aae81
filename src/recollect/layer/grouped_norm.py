"""An RMS norm over groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GroupedRMSNorm"]


class GroupedRMSNorm(nn.Module):
    """x / √(mean(x²) + ε) ⊙ w, the mean over all channels of ``group_size`` consecutive heads."""

    def __init__(self, num_heads: int, head_dim: int, group_size: int, *, eps: float) -> None:
        super().__init__()
        self.group_size, self.eps = group_size, eps
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the factors to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [B, T, num_heads, V]``."""
        groups = x.unflatten(2, (-1, self.group_size)).flatten(3)
        normed = functional.rms_norm(groups, groups.shape[-1:], eps=self.eps)
        return normed.view_as(x) * self.weight

    def extra_repr(self) -> str:
        heads, channels = self.weight.shape
        return f"{heads}, {channels}, group_size={self.group_size}, eps={self.eps}"
