"""Bounds of a layer's output: TTR section 3.1 and appendix A, equations 13 and 67.

    ‖y_t‖ = ‖V_tᵀK_t (K_tᵀK_t + λI)⁻¹ q_t‖ ≤ ‖q_t‖ Σ_i ‖v_i‖ ‖k_i‖ / (λ_min(K_tᵀK_t) + λ)

Numerator and denominator grow like t, so the output of least squares is bounded. The output of
linear attention has no denominator. It grows like √t for keys without preferred directions and
values of mean 0 (`linear_attention_growth`), and like t if keys and values correlate with a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear_attention_growth", "output_bound"]


def output_bound(q: Tensor, k: Tensor, v: Tensor, *, ridge: float = 0.0) -> Tensor:
    """Return TTR 67 at every token.

    Args:
        q, k: Queries and keys ``[..., T, K]``.
        v: Values ``[..., T, V]``.
        ridge: λ ≥ 0.

    Returns:
        ``[..., T]``; infinite while K_tᵀK_t + λI is singular (t < K without a ridge).

    Cost: O(T K³).

    Raises:
        ValueError: The ridge is negative.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
        >>> rc.theory.output_bound(q, k, v).shape
        torch.Size([1, 6, 2])
    """
    if ridge < 0:
        raise ValueError(f"output_bound: ridge must be at least 0, got {ridge}")
    gram = torch.cumsum(k[..., :, None] * k[..., None, :], dim=-3)  # [..., T, K, K]
    spectrum = torch.linalg.eigvalsh(gram)
    # An eigenvalue below the rounding error of the largest is 0: the system is singular.
    floor = spectrum[..., -1] * k.shape[-1] * torch.finfo(k.dtype).eps
    denominator = torch.where(spectrum[..., 0] > floor, spectrum[..., 0], 0) + ridge
    norms = torch.cumsum(v.norm(dim=-1) * k.norm(dim=-1), dim=-1)
    return q.norm(dim=-1) * norms / denominator


def linear_attention_growth(tokens: Tensor, *, size: int, value_norm: float = 1.0) -> Tensor:
    """Return √E ‖y_t‖² of linear attention for unit keys and queries without preferred directions.

    y_t = Σ_i v_i (k_i·q) with independent values of mean 0: E ‖y_t‖² = t ‖v‖²/K.

    Args:
        tokens: Numbers of tokens t.
        size: K.
        value_norm: ‖v‖.

    Examples:
        >>> rc.theory.linear_attention_growth(torch.tensor([4.0, 16.0]), size=4)
        tensor([1., 2.])
    """
    return value_norm * (tokens / size).sqrt()
