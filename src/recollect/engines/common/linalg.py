"""Batched products, pseudo-inverses, and powers of symmetric matrices with finite derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, once_differentiable

__all__ = ["add_bmm_", "bmm", "inverse_power", "symmetric_pinv"]


def inverse_power(S: Tensor, power: float) -> Tensor:
    """Return S^(−p) of positive definite matrices ``[..., F, F]``, differentiable once.

    The backward pass is the Daleckii–Krein formula with divided differences of x^(−p). They are
    smooth for equal eigenvalues, while autograd through the eigenvectors divides by their gap. The
    cost is about 10 F³ per matrix.
    """
    if power == 0:
        return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device).expand_as(S)
    if power == 1:
        return torch.cholesky_inverse(torch.linalg.cholesky(S))
    return _InversePower.apply(S, power)


def _divided_differences(x: Tensor, p: float) -> Tensor:
    """Return (x_i^(−p) − x_j^(−p))/(x_i − x_j), or −p x^(−p−1) if equal, ``[..., F, F]``."""
    low, high = (
        torch.minimum(x[..., :, None], x[..., None, :]),
        x[..., :, None].maximum(x[..., None, :]),
    )
    gap = (high / low).log()
    # (h^−p − l^−p)/(h − l) = l^(−p−1) expm1(−p g)/expm1(g), g = log(h/l).
    near = gap < 1e-12
    safe = torch.where(near, 1.0, gap)
    ratio = torch.where(near, -p, torch.expm1(-p * safe) / torch.expm1(safe))
    return low.pow(-p - 1) * ratio


class _InversePower(CustomFunction):
    @staticmethod
    def forward(ctx: Any, S: Tensor, power: float) -> Tensor:
        values, vectors = torch.linalg.eigh(S)
        # Rounding may make the smallest eigenvalue negative.
        values = values.clamp_min(torch.finfo(S.dtype).tiny ** 0.5)
        ctx.save_for_backward(values, vectors)
        ctx.power = power
        return (vectors * values.pow(-power).unsqueeze(-2)) @ vectors.mT

    @staticmethod
    @once_differentiable(
        "algorithm.Preconditioned(kind='spectral')",
        "use kind='conjugate_gradient', or power 1 or 0, which can be",
    )
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        values, vectors = saved
        inner = vectors.mT @ grads[0] @ vectors
        return vectors @ (_divided_differences(values, ctx.power) * inner) @ vectors.mT, None


def symmetric_pinv(covariance: Tensor) -> Tensor:
    """Return the pseudo-inverse of a covariance ``[..., D, D]``, truncated at rounding errors."""
    eps, not_finite = torch.finfo(covariance.dtype).eps, ~covariance.isfinite().all(-1).all(-1)
    not_finite = not_finite[..., None, None]
    inverse = torch.linalg.pinv(
        torch.where(not_finite, 0.0, covariance),
        hermitian=True,
        rtol=eps * 100 * covariance.shape[-1],
    )
    return torch.where(not_finite, torch.nan, inverse)


def bmm(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """Return the matrix products alpha x y over both leading axes."""
    if alpha == 1.0:
        return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
    unused = x.new_empty(()).expand(x.shape[0] * x.shape[1], x.shape[-2], y.shape[-1])
    product = torch.baddbmm(unused, x.flatten(0, 1), y.flatten(0, 1), beta=0, alpha=alpha)
    return product.unflatten(0, x.shape[:2])


def add_bmm_(z: Tensor, x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha x y to z in place over both leading axes."""
    z.flatten(0, 1).baddbmm_(x.flatten(0, 1), y.flatten(0, 1), alpha=alpha)
    return z
