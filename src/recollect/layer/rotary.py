"""Rotary position embedding, computed from positions: no table to size, save or lose."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["angles", "rotate"]


def angles(position: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B, T, size/2]`` of position · base^(−2i/size) (RoFormer, eq. 15).

    Args:
        position: ``[B, T]``, from 0.
        size: channels per head, even.
        base: 10000 in the paper.
    """
    exponent = torch.arange(0, size, 2, device=position.device, dtype=torch.float64) / size
    # In float64 the phase of token 100,000 is still exact.
    phase = position.unsqueeze(-1) * base**-exponent
    return phase.cos(), phase.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of ``x [B, T, ..., D]`` by its token's angles."""
    shape = (*cos.shape[:2], *(1,) * (x.dim() - 3), cos.shape[-1])
    cos, sin = cos.view(shape).to(x.dtype), sin.view(shape).to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
