"""Learned factors of several inputs and outputs per head, of one token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["InputOutputFactors"]


class InputOutputFactors(nn.Module):
    """Values p_j ⊙ v, output gates σ(g_j ⊙ z) and outputs Σ_j o_j ⊙ y_j, for j = 1..n (``count``).

    A token has one value v and one gate z per head, n associations and n queries. The factors p, g
    and o have one entry per head (or memory, for p), j and channel (``size``).
    """

    def __init__(self, heads: int, memories: int, *, count: int, size: int, has_gate: bool) -> None:
        super().__init__()
        self.count = count
        self.values = nn.Parameter(torch.empty(memories, count, size))
        self.gates = nn.Parameter(torch.empty(heads, count, size)) if has_gate else None
        self.outputs = nn.Parameter(torch.empty(heads, count, size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set factors of values and outputs to 1/n, and factors of gates to 1."""
        nn.init.constant_(self.values, 1 / self.count)
        nn.init.constant_(self.outputs, 1 / self.count)
        if self.gates is not None:
            nn.init.ones_(self.gates)

    def expand_values(self, v: Tensor) -> Tensor:
        """Return the values ``[B, T, H, n, V]`` of the associations of tokens."""
        return v.unsqueeze(3) * self.values.to(v.dtype)

    def expand_gates(self, z: Tensor) -> Tensor:
        """Return the gates of the outputs ``[B, T, heads, n, V]``, before their activation."""
        assert self.gates is not None
        factors = self.gates.to(z.dtype)
        return z.unflatten(-1, (factors.shape[0], 1, factors.shape[2])) * factors

    def combine_outputs(self, y: Tensor) -> Tensor:
        """Sum outputs ``[B, T, heads, n, V]`` over n."""
        return (y * self.outputs.to(y.dtype)).sum(3)

    def extra_repr(self) -> str:
        return f"n={self.count}"
