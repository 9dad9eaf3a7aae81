"""Coefficient matrices of one chunk: decay, momentum, step and window as one small matrix per head.

With P^a[t, i] = Π_{j=i+1..t} a_j (lower triangular, ones on the diagonal), the state after token t
of a chunk that began with A°, S° is

    A_t = a_t A° + m_t S° + Σ_i E[t, i] (contribution of step i),   E = P^α diag(σ) P^θ,
    a = cumprod(α),   m = P^α (σ ⊙ cumprod(θ)),

where σ is 0 at padded tokens and 1 elsewhere (without momentum E = P^α). Letters as in
`recollect.typing`: ``[..., C]`` per-token numbers in, ``[..., C, C]`` matrices out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction
from recollect.choices.runtime import can_read_values

__all__ = [
    "SAFE",
    "Coefficients",
    "absorbable",
    "coefficients",
    "cumulated",
    "decay_matrix",
    "flushed",
    "product_matrix",
    "products",
    "shift",
]

SAFE = 30.0
"""Log decays in float32 whose exponentials, and those of their negatives, are multiplied safely."""
FORGOTTEN = -1e3
"""A log decay at which nothing is left in float64; lower ones are cut here: −inf has no NaN."""


def cumulated(log_decay: Tensor, dim: int) -> Tensor:
    """Inclusive sums of log decays in float64.

    A chunk may hold both −50 and −0.01 per token: in float32 their sum would lose the small ones,
    and differences of these sums are what is needed.
    """
    if torch.is_grad_enabled() and log_decay.requires_grad:
        return _Cumulated.apply(log_decay, dim)  # type: ignore[no-any-return]
    return log_decay.double().clamp_min(FORGOTTEN).cumsum(dim)


def absorbable(total: Tensor) -> bool:
    """Whether exp(total) and exp(−total) both stay far from the ends of float32.

    False where the host would have to wait for the answer.
    """
    if not can_read_values(total):
        return False
    return not total.numel() or float(-total.detach().amin()) < SAFE


class _Cumulated(CustomFunction):
    """The sum, with a backward without flipped copies: Σ_{t≥i} g_t = g_i + Σ_t g_t − Σ_{t≤i} g_t.

    In float64 the difference costs nothing that a gradient of float32 could hold.
    """

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, dim: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(log_decay)
        ctx.dim = dim
        return log_decay.double().clamp_min(FORGOTTEN).cumsum(dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (log_decay,) = ctx.saved_tensors
        later = grad + (grad.sum(ctx.dim, keepdim=True) - grad.cumsum(ctx.dim))
        return later.to(log_decay.dtype).masked_fill(log_decay < FORGOTTEN, 0.0), None


def decay_matrix(total: Tensor, dtype: torch.dtype) -> Tensor:
    """P^α from inclusive sums ``[..., C]`` of log decays; exponents are masked before ``exp``."""
    C = total.shape[-1]
    rest = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(dtype)
    future = torch.ones(C, C, dtype=torch.bool, device=total.device).triu(1)
    return rest.masked_fill(future, -torch.inf).exp()


def product_matrix(theta: Tensor) -> Tensor:
    """P^θ by masked products, because θ may be exactly 0 and logs of it may not be subtracted."""
    C = theta.shape[-1]
    later = torch.ones(C, C, dtype=torch.bool, device=theta.device).tril(-1)  # t > i
    factors = torch.where(later, theta.unsqueeze(-1), 1.0)
    return factors.cumprod(-2).tril()


def flushed(x: Tensor) -> Tensor:
    """Numbers of no consequence as zeros: products with subnormal ones are many times slower."""
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny * 1e8, 0.0)


def products(x: Tensor) -> Tensor:
    """`product_matrix` with a gradient of its own: P[t, i] = x_{i+1} ⋯ x_t, ``[..., n, n]``.

    The rows follow from each other, P[t] = x_t P[t − 1] + e_t, which is exact for numbers that are
    exactly 0 (a momentum may be) and needs no logarithm. Their gradient is

        ∂P/∂x_j:  x̄_j = Σ_{t ≥ j > i} P̄[t, i] P[t, j] P[j − 1, i] = Σ_i (Pᵀ P̄)[j, i] P[j − 1, i].
    """
    return cast("Tensor", _Products.apply(x))


SMALL = 2**17
"""Entries up to which a few large operations beat one small operation per row on a CPU."""


def _rows(x: Tensor) -> Tensor:
    n = x.shape[-1]
    if x.numel() * n <= SMALL:
        return product_matrix(x)
    P = x.new_zeros(*x.shape, n)
    P.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for t in range(1, n):
        torch.mul(P[..., t - 1, :t], x[..., t, None], out=P[..., t, :t])
    return P


class _Products(CustomFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        on_cpu = x.device.type == "cpu"
        P = flushed(_rows(x.detach())) if on_cpu else product_matrix(x.detach())
        ctx.save_for_backward(x, P)
        return P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, P = ctx.saved_tensors
        if torch.is_grad_enabled():
            P = products(x)
        above = P.mT @ grads[0]  # [..., j, i]
        slope = (above[..., 1:, :] * P[..., :-1, :]).sum(-1)  # P is 0 from i = j on
        return torch.nn.functional.pad(slope, (1, 0))


def shift(x: Tensor, dim: int, first: float) -> Tensor:
    """The value one token earlier; ``first`` stands before the first."""
    head = torch.full_like(x.narrow(dim, 0, 1), first)
    return torch.cat([head, x.narrow(dim, 0, x.shape[dim] - 1)], dim=dim)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Coefficients of one chunk with decay per head.

    Attributes:
        a, m: of A° and S° in A_t, ``[..., C]``; m is ``None`` without momentum.
        E: of step i in A_t, ``[..., C, C]``, lower triangular.
        P: of step i in A_t by decay alone (what momentum does not touch).
        theta: P^θ, of step i in S_t, or ``None``; ``theta_end``: of S° in S_C, ``[...]``.
        alpha: α_t = exp(log decay), ``[..., C]``.
    """

    a: Tensor
    E: Tensor
    P: Tensor
    alpha: Tensor
    m: Tensor | None = None
    theta: Tensor | None = None
    theta_end: Tensor | None = None

    def before(self, x: Tensor, *, decayed: bool, first: float) -> Tensor:
        """A coefficient of A_{t−1} (``decayed``: of α_t A_{t−1}) from that of A_t, ``[..., C]``."""
        earlier = shift(x, -1, first)
        return self.alpha * earlier if decayed else earlier

    def matrix_before(self, x: Tensor, *, decayed: bool) -> Tensor:
        """The same for matrices ``[..., C, C]``: strictly lower triangular."""
        earlier = shift(x, -2, 0.0)
        return self.alpha.unsqueeze(-1) * earlier if decayed else earlier


def coefficients(
    log_decay: Tensor | None, theta: Tensor | None, live: Tensor | None, like: Tensor
) -> Coefficients:
    """All coefficients of chunks ``[..., C]``.

    Args:
        log_decay: per token, 0 at padded ones, or ``None``.
        theta: momentum per token, 1 at padded ones, or ``None``.
        live: 1 at real tokens and 0 at padded ones, or ``None``.
        like: a tensor ``[..., C]`` of the working dtype.
    """
    C = like.shape[-1]
    if log_decay is None:
        a = alpha = torch.ones_like(like)
        P = torch.ones(C, C, dtype=like.dtype, device=like.device).tril()
    else:
        total = cumulated(log_decay, -1)
        P = decay_matrix(total, like.dtype)
        a, alpha = total.to(like.dtype).exp(), log_decay.to(like.dtype).exp()
    if theta is None:
        return Coefficients(a=a, E=P, P=P, alpha=alpha)
    # The backward pass of torch.cumprod waits for the device to look for zeros.
    momentum = products(theta)
    reach = theta[..., :1] * momentum[..., 0]
    gated = P if live is None else P * live.unsqueeze(-2)
    return Coefficients(
        a=a,
        E=gated @ momentum,
        P=P,
        alpha=alpha,
        m=(gated @ reach.unsqueeze(-1)).squeeze(-1),
        theta=momentum,
        theta_end=reach[..., -1],
    )
