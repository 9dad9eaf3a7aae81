"""Precision checks for least squares with a decaying past and ridge.

After F tokens with decay γ, the weights in the Gram matrix D range from 1 down to γ^F, and
W = J (D + ρI)⁻¹ depends on the smallest. Let G = D + ρI and P = G⁻¹. Rounding in G changes W by
about ε ‖G‖‖P‖. Raising the ridge by δ to a value that the dtype can resolve changes W by at most
δ‖P‖. `estimate_relative_error` estimates both from diagonals. Its calibration is in
`docs/design/least-squares.md`.

Local polynomials have a constant ridge. `solve_dtype` returns a dtype that resolves it next to the
monomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.runtime import can_read_values
from recollect.engines.common.problem import Problem, state_dtype

__all__ = [
    "RESET_LOG_DECAY",
    "Unresolved",
    "estimate_relative_error",
    "first_unresolved",
    "is_resolved",
    "per_token_relative_error",
    "solve_dtype",
    "solve_with_ridge",
    "unresolved_error",
]

RESET_LOG_DECAY = math.log(torch.finfo(torch.float32).tiny)
"""Log decays below this value count as −∞ and reset the statistics."""

MAX_RELATIVE_ERROR = 2e-5
"""Maximum estimated relative error of a determined minimum."""


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    """The first estimate that exceeds the maximum relative error."""

    index: int  # along the first axis of the estimates
    row: int  # batch element
    head: int
    worst: float


def estimate_relative_error(
    G: Tensor,  # [..., F, F]
    P: Tensor,  # [..., F, F], inverse of G
    raised: Tensor,  # [...], the smallest ridge if the ridge was raised to it, else 0
) -> Tensor:
    """Return the estimated relative error of W, ``[...]``."""
    g, p = (x.diagonal(dim1=-2, dim2=-1) for x in (G, P))
    eps = torch.finfo(G.dtype).eps
    if G.dtype == torch.float64:
        rounding = 5 * eps * g.mean(-1) * p.mean(-1)
    else:  # decides between float32 and float64: rescaling the features changes nothing
        rounding = 16 * eps * (g * p).mean(-1)
    return torch.maximum(rounding, raised * p.sum(-1))


def per_token_relative_error(A: Tensor, L: Tensor) -> Tensor:  # [..., C, C], A = L Lᵀ -> [..., C]
    """Return the estimated relative error per token inside a chunk.

    The estimate is the cancellation in L's diagonal: earlier tokens reduce A's diagonal to the
    square of L's diagonal, but not the rounding errors of A.
    """
    remaining = A.diagonal(dim1=-2, dim2=-1) / L.diagonal(dim1=-2, dim2=-1).square()
    return (1 if A.dtype == torch.float64 else 12) * torch.finfo(A.dtype).eps * remaining


def first_unresolved(relative_error: Tensor) -> Unresolved | None:
    """Return the first of the errors ``[n, B, H]`` that is too large (synchronises with a GPU)."""
    relative_error = relative_error.detach()
    if not relative_error.numel() or float(relative_error.max()) <= MAX_RELATIVE_ERROR:
        return None
    first = (~(relative_error <= MAX_RELATIVE_ERROR)).int().argmax()  # also for NaN
    index, row, head = (int(x) for x in torch.unravel_index(first, relative_error.shape))
    return Unresolved(
        index=index, row=row, head=head, worst=float(relative_error[index, row, head])
    )


def is_resolved(relative_error: Tensor) -> Tensor:
    """Return whether each relative error is small enough for a determined minimum."""
    return relative_error <= MAX_RELATIVE_ERROR


def unresolved_error(problem: Problem, failure: Unresolved, *, token: int) -> ValueError:
    """Return the error message with the caller's row and token."""
    worst = failure.worst if failure.worst < 1 else 1.0  # also for NaN
    row, token = problem.caller_index(failure.row, token)
    return ValueError(
        f"{problem.recipe.algorithm.title} is not determined at row {row}, token {token}, head "
        f"{failure.head}: after such a strong decay float64 does not resolve older tokens "
        f"and the ridge next to new tokens (relative error {worst:.0e}): decay less, use fewer "
        "features, refresh the ridge sooner (refresh_every=...), or use ridge_schedule='constant'"
    )


def solve_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype for the ridge and the monomials of k − q of degree ≤ p.

    The rounding error of a covariance of monomials of size r = (1 + |k| + |q|)^p is ε r². If this
    exceeds a thousandth of the ridge in float32, the dtype is float64. Without a ridge it is always
    float64, because rounding then determines which directions the keys span.
    """
    dtype, degree = state_dtype(problem.q, problem.k, problem.v), problem.recipe.memory.degree
    is_fitted = bool(degree) and problem.recipe.memory.slope_gate is None
    if not degree or not is_fitted or dtype == torch.float64 or not can_read_values(problem.q):
        return dtype
    buffered = [] if problem.state.buffer is None else [problem.state.buffer.k]
    longest = [
        x.detach().norm(dim=-1).max() for x in (problem.q, problem.k, *buffered) if x.numel()
    ]
    size = (1.0 + float(sum(longest))) ** (2 * degree)
    is_resolved = torch.finfo(dtype).eps * size < 1e-3 * min(problem.recipe.ridge, 1.0)
    return dtype if is_resolved else torch.float64


def solve_with_ridge(covariance: Tensor, ridge: float, right: Tensor) -> Tensor:
    """Return (C + λ)⁻¹ right for covariances ``[..., D, D]``.

    The result is NaN instead of an error if the host cannot read values.
    """
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor, failed = torch.linalg.cholesky_ex(covariance + ridge * eye)
    # NaN inputs give NaN outputs without this error.
    is_singular = (failed > 0) & right.isfinite().all(-1).all(-1)
    if not can_read_values(right):  # undetermined entries become NaN
        return torch.cholesky_solve(right, factor).masked_fill(
            is_singular[..., None, None], torch.nan
        )
    if bool(is_singular.any()):
        raise ValueError(
            f"local regression: a ridge of {ridge:g} is lost in {covariance.dtype} next to keys "
            "so distant from their query: normalise q and k, or use a larger ridge in "
            "algorithm.Analytic"
        )
    return torch.cholesky_solve(right, factor)
