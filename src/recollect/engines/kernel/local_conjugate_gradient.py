"""Local polynomials of degree 1 and 2 by conjugate gradients, with no basis per pair.

The notation is that of `recollect.engines.kernel.local_regression`. Monomials of k − q are the
monomials of k times a triangular matrix S(q) that depends on q only. The product with a vector x is
therefore two products in the form of attention,

    s_ti = (S(q_t)ᵀ x_t)·(φ_i − φ̄_t),    S(q_t) Σ_i p_ti s_ti φ_i + λ x_t,

and all iterations of a piece use its weights. The gradient is implicit: x solves A x = b, so
x + A⁻¹(b − A x) with constant A⁻¹ has the value and the derivative of x. The backward pass solves
one more system with A.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, once_differentiable
from recollect.choices.context.weights import VisibleAssociations
from recollect.choices.runtime import cached_constant, can_read_values
from recollect.engines.common.conjugate_gradient import conjugate_gradient

__all__ = ["Fit", "Shares", "Shift", "conjugate_gradients", "iterative"]

Shares = Callable[[slice, slice], Tensor]
"""Function that returns the weights p ``[B, H, G, C, m]`` of a piece. Rows sum to 1 or 0."""

Fit = Callable[[slice, slice, Tensor], Tensor]
"""Function that returns p_i (1 − c_i·x) of a piece."""


@lru_cache(maxsize=8)
def _pairs(K: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return i, j and the weight of each monomial of degree two, in the order of the basis."""
    pairs = list(combinations_with_replacement(range(K), 2))
    weights = tuple(1.0 if i == j else 2**0.5 for i, j in pairs)
    return tuple(i for i, _ in pairs), tuple(j for _, j in pairs), weights


def _column(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Matrix S(q) of degree 1 or 2. Monomials of k − q, less the constant, are S(q) φ(k) + s(q)."""

    K: int
    i: Tensor
    j: Tensor
    w: Tensor

    @classmethod
    def of(cls, degree: int, like: Tensor) -> Shift:
        i, j, w = _pairs(like.shape[-1]) if degree == 2 else ((), (), ())
        device = like.device
        return cls(
            K=like.shape[-1],
            i=cached_constant(_column, i, device=device, dtype=torch.long),
            j=cached_constant(_column, j, device=device, dtype=torch.long),
            w=cached_constant(_column, w, device=device, dtype=like.dtype),
        )

    def monomials(self, x: Tensor) -> Tensor:
        """Return φ(x)."""
        if not len(self.i):
            return x
        return torch.cat([x, self.w * x[..., self.i] * x[..., self.j]], dim=-1)

    def apply(self, q: Tensor, f: Tensor) -> Tensor:
        """Return S(q) f."""
        if not len(self.i):
            return f
        one, two = f[..., : self.K], f[..., self.K :]
        cross = self.w * (q[..., self.i] * one[..., self.j] + q[..., self.j] * one[..., self.i])
        return torch.cat([one, two - cross], dim=-1)

    def apply_transpose(self, q: Tensor, x: Tensor) -> Tensor:
        """Return S(q)ᵀ x."""
        if not len(self.i):
            return x
        one, two = x[..., : self.K], self.w * x[..., self.K :]
        cross = torch.zeros_like(q).index_add(-1, self.j, two * q[..., self.i])
        cross = cross.index_add(-1, self.i, two * q[..., self.j])
        return torch.cat([one - cross, x[..., self.K :]], dim=-1)

    def mean(self, q: Tensor, f: Tensor) -> Tensor:
        """Return S(q) f + s(q), the mean of the basis for the mean f of φ."""
        offset = self.monomials(q)
        offset = torch.cat([-offset[..., : self.K], offset[..., self.K :]], dim=-1)
        return self.apply(q, f) + offset


def iterative(
    visible: VisibleAssociations,
    degree: int,
    shares: Shares,
    ridge: float,
    solutions: Tensor,  # x of every query [B, H, G, T, D], an output unless `solved`
    *,
    solved: bool,
) -> Fit:
    """Return the fit of a piece; ``solutions [B, H, G, T, D]`` are an output unless ``solved``."""
    shift = Shift.of(degree, visible.k)
    phi = shift.monomials(visible.k).transpose(1, 2).unsqueeze(2)  # [B, H, 1, n, D]

    def fit(queries: slice, keys: slice, q: Tensor) -> Tensor:
        p, f = shares(queries, keys), phi[..., keys, :]
        mean = p @ f  # [B, H, G, C, D]
        system = _System(shift=shift, ridge=ridge, p=p, q=q, f=f, mean=mean)
        b = shift.mean(q, mean)
        if not solved:
            solution = conjugate_gradients(system.product, b)
            system.check(solution)
            solutions[..., queries, :] = solution
        x = solutions[..., queries, :]
        if torch.is_grad_enabled():
            x = x + _Inverse.apply(b - system.product(x), shift, ridge, p, q, f, mean)
        return p * (1 - system.slopes(x))

    return fit


@dataclass(frozen=True, kw_only=True)
class _System:
    """Matrix A = Σ p_i c_i c_iᵀ + λ of every query of a piece, as a product."""

    shift: Shift
    ridge: float
    p: Tensor
    q: Tensor
    f: Tensor
    mean: Tensor

    def slopes(self, x: Tensor) -> Tensor:
        """Return c_i·x ``[B, H, G, C, m]``."""
        u = self.shift.apply_transpose(self.q, x)
        return u @ self.f.mT - (u * self.mean).sum(-1, keepdim=True)

    def check(self, x: Tensor) -> None:
        """Check that `slopes`, differences of products as large as the query, have half precision.

        The dense solve centres the basis and has no such limit.

        Raises:
            ValueError: More than half of the digits may be lost. The bound assumes the largest
                rounding errors of equal sign. The factor 256 accounts for smaller errors in high
                dimension.
        """
        size = self.shift.apply_transpose(self.q, x).norm(dim=-1) * self.f.norm(dim=-1).amax(
            -1, keepdim=True
        )
        eps = torch.finfo(x.dtype).eps
        if can_read_values(x) and bool((eps * size > 256 * eps**0.5).any()):
            raise ValueError(
                f"local regression: conjugate gradients in {x.dtype} lose their digits for queries "
                "of this norm: normalise q and k, use a larger ridge in algorithm.Analytic, or use "
                "engine='reference', which solves densely"
            )

    def product(self, x: Tensor) -> Tensor:
        """Return A x."""
        return self.shift.apply(self.q, (self.p * self.slopes(x)) @ self.f) + self.ridge * x


class _Inverse(CustomFunction):
    """A⁻¹ r of a residual that is 0 up to rounding, with value 0 and gradient A⁻¹ grad_output."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, shift: Shift, ridge: float, *system: Tensor) -> Tensor:
        ctx.shift, ctx.ridge = shift, ridge
        ctx.save_for_backward(*system)
        return torch.zeros_like(residual)

    @staticmethod
    @once_differentiable("local regression (engine kernel)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        p, q, f, mean = saved
        system = _System(shift=ctx.shift, ridge=ctx.ridge, p=p, q=q, f=f, mean=mean)
        return conjugate_gradients(system.product, grad), *[None] * 6


def conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """Solve A x = right ``[..., D]`` until each residual reaches rounding.

    In exact arithmetic D steps suffice.
    """
    readable, limit = can_read_values(right), 2 * right.shape[-1] + 20
    tolerance = 8 * torch.finfo(right.dtype).eps
    x, size, _ = conjugate_gradient(
        product, right, steps=limit, tolerance=tolerance, check_every=4 if readable else 0
    )
    # A residual at the level of rounding is no failure, but a residual of a thousandth is.
    bad = size > right.square().sum(-1, keepdim=True) * 1e-6
    if readable and bool(bad.any()):
        warnings.warn(
            f"local regression: {int(bad.sum())} queries did not converge in {limit} steps of "
            "conjugate gradients: use a larger ridge in algorithm.Analytic",
            RuntimeWarning,
            stacklevel=2,
        )
    return x
