"""Sensitivity of a delta rule to errors of its similarities, in writes and in reads: AM 50 to 52.

    u = A₁⁻¹ v,   A₁ = I + β strict(κ₁(K, K));      o = A₂ u,   A₂ = tril(κ₂(Q, K))

A small error ΔA₁ changes u by at most ‖A₁⁻¹‖² ‖ΔA₁‖ ‖V‖ (51, to first order). An error ΔA₂ changes
o by at most ‖ΔA₂‖ ‖U‖ (52). Norms are spectral.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Conditioning", "conditioning"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditioning:
    """The two systems of a kernel delta rule.

    Attributes:
        write: A₁ ``[T, T]``, unit lower triangular.
        read: A₂ ``[T, T]``.
        u: A₁⁻¹ v ``[T, V]``.
        v: Values ``[T, V]``.

    Examples:
        >>> k, v = torch.randn(2, 6, 8, dtype=torch.float64)
        >>> systems = rc.theory.conditioning(k @ k.T / 8, v)
        >>> systems.number >= 1
        True
    """

    write: Tensor
    read: Tensor
    u: Tensor
    v: Tensor

    @property
    def inverse_norm(self) -> float:
        """‖A₁⁻¹‖."""
        return float(1 / torch.linalg.svdvals(self.write)[-1])

    @property
    def number(self) -> float:
        """‖A₁‖ ‖A₁⁻¹‖, the condition number."""
        return float(torch.linalg.cond(self.write, 2))

    def write_bound(self, error: Tensor) -> float:
        """Return AM 51's bound of u's change for a small error of A₁; ‖V‖ is Frobenius's."""
        return self.inverse_norm**2 * _norm(error) * float(self.v.norm())

    def read_bound(self, error: Tensor) -> float:
        """Return AM 52's bound of o's change for an error of A₂."""
        return _norm(error) * float(self.u.norm())

    def write_change(self, error: Tensor) -> float:
        """Return the norm of u's change for an error of A₁."""
        changed = torch.linalg.solve(self.write + error, self.v)
        return float((changed - self.u).norm())

    def read_change(self, error: Tensor) -> float:
        """Return the norm of o's change for an error of A₂."""
        return float((error @ self.u).norm())


def _norm(x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(x, 2))


def conditioning(
    similarities: Tensor, v: Tensor, *, reads: Tensor | None = None, rate: float = 1.0
) -> Conditioning:
    """Return the systems of one sequence.

    Args:
        similarities: κ₁(w_t, k_i) ``[T, T]``, normalised for a softmax; only i < t counts.
        v: Values ``[T, V]``.
        reads: κ₂(q_t, k_i) ``[T, T]``; ``similarities`` if omitted. Only i ≤ t counts.
        rate: β.

    Cost: O(T³).

    Examples:
        >>> k, v = torch.randn(2, 6, 8, dtype=torch.float64)
        >>> systems = rc.theory.conditioning(k @ k.T / 8, v)
        >>> torch.allclose(systems.write @ systems.u, v)
        True
    """
    eye = torch.eye(len(v), dtype=v.dtype)
    first = eye + rate * similarities.tril(-1)
    u = torch.linalg.solve_triangular(first, v, upper=False, unitriangular=True)
    second = (similarities if reads is None else reads).tril()
    return Conditioning(write=first, read=second, u=u, v=v)
