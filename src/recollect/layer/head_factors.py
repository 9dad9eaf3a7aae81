"""Learned factors of a layer per head and channel: of queries, keys, values, gates and outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GroupedRMSNorm", "InputOutputFactors", "QKAffine", "QKScale"]


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
