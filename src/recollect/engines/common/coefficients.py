"""Coefficient matrices of one chunk: decay, momentum and step as one small matrix per head.

With P^a[t, i] = Π_{j=i+1..t} a_j (lower triangular, ones on the diagonal), the state after token t
of a chunk with initial values A°, S° is

    A_t = a_t A° + m_t S° + Σ_i E[t, i] (contribution of step i),   E = P^α diag(σ) P^θ,
    a = cumprod(α),   m = P^α (σ ⊙ cumprod(θ)),

with σ the outer rate of momentum, 0 at padded tokens (without momentum E = P^α). Letters follow
`recollect.typing`: inputs per token ``[..., C]``, matrices ``[..., C, C]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction
from recollect.choices.runtime import cached_constant, can_read_values

__all__ = [
    "MAX_LOG_RANGE",
    "Coefficients",
    "causal",
    "coefficients",
    "cumulative_log_decay",
    "decay_matrix",
    "fits_float32_range",
    "flush_subnormals",
    "products",
    "repeat_rows",
    "shift_right",
]

MAX_LOG_RANGE = 30.0
"""Log range whose exponentials and their inverses are safe to multiply in float32."""
MIN_LOG_DECAY = -1e3
"""Log decay with exp(·) = 0 in float64. Lower values are clamped, because −inf gives NaN."""


def cumulative_log_decay(log_decay: Tensor, dim: int) -> Tensor:
    """Return inclusive sums of log decays in float64.

    Differences of these sums are decays. A chunk may contain both −50 and −0.01 per token, and
    float32 sums would lose the small values.
    """
    return log_decay.double().clamp_min(MIN_LOG_DECAY).cumsum(dim)


def fits_float32_range(total: Tensor) -> bool:
    """Return whether exp(total) and exp(−total) are both well within the range of float32.

    False if the host would have to synchronise with the device.
    """
    if not can_read_values(total):
        return False
    return not total.numel() or float(-total.detach().amin()) < MAX_LOG_RANGE


def decay_matrix(
    later: Tensor, earlier: Tensor, dtype: torch.dtype, *, strict: bool = False
) -> Tensor:
    """Return exp(later_t − earlier_i) of log decays ``[..., C]``, zero for i > t (i ≥ t)."""
    C = later.shape[-1]
    differences = (later.unsqueeze(-1) - earlier.unsqueeze(-2)).to(dtype)
    future = torch.ones(C, C, dtype=torch.bool, device=later.device).triu(0 if strict else 1)
    return differences.masked_fill(future, -torch.inf).exp()


def repeat_rows(total: Tensor, rows: int) -> Tensor:
    """Repeat per-token values ``[..., C, D]`` to ``rows`` rows per token."""
    return total if rows == 1 else total.repeat_interleave(rows, dim=-2)


def causal(products: Tensor, tokens: int, *, strict: bool) -> Tensor:
    """Zero products ``[..., C a, C b]`` of x rows with later (``strict``: not earlier) y rows."""
    rows, columns = products.shape[-2] // tokens, products.shape[-1] // tokens
    if rows == columns == 1:
        return products.tril_(-1 if strict else 0)  # in place: autograd does not save the product
    mask = torch.ones(tokens, tokens, dtype=products.dtype, device=products.device)
    mask = mask.tril(-1 if strict else 0).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return products * mask


def flush_subnormals(x: Tensor) -> Tensor:
    """Set subnormal values to zero; CPUs multiply them many times slower."""
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny * 1e8, 0.0)


def products(x: Tensor) -> Tensor:
    """Return the products P[t, i] = x_{i+1} ⋯ x_t, ``[..., n] -> [..., n, n]``.

    The recursion P[t] = x_t P[t − 1] + e_t is exact for x = 0 and needs no logarithm. The gradient
    is

        ∂P/∂x_j:  x̄_j = Σ_{t ≥ j > i} P̄[t, i] P[t, j] P[j − 1, i] = Σ_i (Pᵀ P̄)[j, i] P[j − 1, i].
    """
    return cast("Tensor", _Products.apply(x))


MAX_VECTORIZED_ENTRIES = 2**17
"""Maximum number of entries for which a CPU computes all rows at once."""


def _later(n: int) -> Tensor:
    """Whether t > i, ``[t, i]``."""
    return torch.ones(n, n, dtype=torch.bool).tril(-1)


class _Products(CustomFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        n, on_cpu = x.shape[-1], x.device.type == "cpu"
        if on_cpu and x.numel() * n > MAX_VECTORIZED_ENTRIES:
            P = x.new_zeros(*x.shape, n)
            P.diagonal(dim1=-2, dim2=-1).fill_(1.0)
            for t in range(1, n):
                torch.mul(P[..., t - 1, :t], x[..., t, None], out=P[..., t, :t])
        else:
            later = cached_constant(_later, n, device=x.device)
            P = torch.where(later, x.unsqueeze(-1), 1.0).cumprod(-2).tril()
        P = flush_subnormals(P) if on_cpu else P
        ctx.save_for_backward(x, P)
        return P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, P = ctx.saved_tensors
        if torch.is_grad_enabled():
            P = products(x)
        row_grads = P.mT @ grads[0]  # [..., j, i]
        grad_x = (row_grads[..., 1:, :] * P[..., :-1, :]).sum(-1)  # P is 0 for i ≥ j
        return torch.nn.functional.pad(grad_x, (1, 0))


def shift_right(x: Tensor, dim: int, first: float) -> Tensor:
    """Return the values shifted by one token, with ``first`` at the first token."""
    first_value = torch.full_like(x.narrow(dim, 0, 1), first)
    return torch.cat([first_value, x.narrow(dim, 0, x.shape[dim] - 1)], dim=dim)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Coefficients of one chunk with decay per head."""

    a: Tensor  # coefficient of A° in A_t, [..., C]
    E: Tensor  # coefficient of step i in A_t, [..., C, C], lower triangular
    P: Tensor  # coefficient of step i in A_t by decay without momentum, [..., C, C]
    alpha: Tensor  # α_t = exp(log decay), [..., C]
    m: Tensor | None = None  # coefficient of S° in A_t, [..., C], or None without momentum
    theta: Tensor | None = None  # P^θ, the coefficient of step i in S_t, or None without momentum
    theta_end: Tensor | None = None  # coefficient of S° in S_C, [...], or None without momentum

    def at_previous_token(self, x: Tensor, *, decayed: bool, first: float) -> Tensor:
        """Return the coefficient ``[..., C]`` of A_{t−1}, or of α_t A_{t−1}, from that of A_t."""
        earlier = shift_right(x, -1, first)
        return self.alpha * earlier if decayed else earlier

    def matrix_at_previous_token(self, x: Tensor, *, decayed: bool) -> Tensor:
        """Return the coefficient matrix of A_{t−1} or α_t A_{t−1}, strictly lower triangular."""
        earlier = shift_right(x, -2, 0.0)
        return self.alpha.unsqueeze(-1) * earlier if decayed else earlier


def coefficients(
    log_decay: Tensor | None,  # per token, 0 at padded tokens
    theta: Tensor | None,  # momentum per token, 1 at padded tokens
    outer_lr: Tensor | None,  # σ, the rate at which S enters A, 0 at padded tokens; None for 1
    like: Tensor,  # [..., C], of the working dtype
) -> Coefficients:
    """Return all coefficients of chunks ``[..., C]``."""
    C = like.shape[-1]
    if log_decay is None:
        a = alpha = torch.ones_like(like)
        P = torch.ones(C, C, dtype=like.dtype, device=like.device).tril()
    else:
        total = cumulative_log_decay(log_decay, -1)
        P = decay_matrix(total, total, like.dtype)
        a, alpha = total.to(like.dtype).exp(), log_decay.to(like.dtype).exp()
    if theta is None:
        return Coefficients(a=a, E=P, P=P, alpha=alpha)
    # The backward pass of torch.cumprod synchronises with the device to find zeros.
    momentum = products(theta)
    initial_weights = theta[..., :1] * momentum[..., 0]
    scaled_decay = P if outer_lr is None else P * outer_lr.unsqueeze(-2)
    return Coefficients(
        a=a,
        E=scaled_decay @ momentum,
        P=P,
        alpha=alpha,
        m=(scaled_decay @ initial_weights.unsqueeze(-1)).squeeze(-1),
        theta=momentum,
        theta_end=initial_weights[..., -1],
    )
