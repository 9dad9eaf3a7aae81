"""Whether a dtype is precise enough for least squares whose past and ridge decay.

After F tokens of decay γ the Gram matrix D holds weights from 1 down to γ^F, and W = J (D + ρI)⁻¹
needs the smallest. With G = D + ρI and P = G⁻¹, rounding in G moves W by about ε ‖G‖‖P‖, and a
ridge raised by δ, where the dtype resolves no smaller, by at most δ‖P‖. `loss` takes both from
diagonals that are at hand. What it says was calibrated: `docs/design/least-squares.md`.

Local polynomials have a ridge that stays: `digits` is the dtype that holds it beside the monomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.runtime import can_read_values
from recollect.engines.common.problem import Problem, state_dtype

__all__ = [
    "RESET",
    "Unresolved",
    "digits",
    "loss",
    "lost_within",
    "refuse",
    "resolved",
    "ridged",
    "unresolved",
]

RESET = math.log(torch.finfo(torch.float32).tiny)
"""Log decays below this are −∞: they forget everything."""

MOST = 2e-5
"""The largest loss at which outputs count as the minimum."""


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    """A dtype does not hold the digits: in which of several losses, of which row and head."""

    index: int
    row: int
    head: int
    worst: float


def loss(G: Tensor, P: Tensor, raised: Tensor) -> Tensor:
    """Relative error of W to be feared, ``[...]``.

    Args:
        G, P: the system and its inverse ``[..., F, F]``.
        raised: what the ridge was raised to where the dtype resolves no smaller one, else 0,
            ``[...]``.
    """
    size, inverse = (x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (G, P))
    rounding = 5 * torch.finfo(G.dtype).eps * size * inverse / G.shape[-1] ** 2
    return torch.maximum(rounding, raised * inverse)


def lost_within(A: Tensor, half: Tensor) -> Tensor:
    """The same of tokens, ``[..., C]``: what L Lᵀ = A ``[..., C, C]`` takes from A's diagonal.

    ``half`` is L⁻¹. The square of L's diagonal is what earlier tokens of the chunk leave of A's,
    and rounding in the latter stays.
    """
    left = half.diagonal(dim1=-2, dim2=-1).square() * A.diagonal(dim1=-2, dim2=-1)
    return torch.finfo(A.dtype).eps * left


def unresolved(lost: Tensor) -> Unresolved | None:
    """The first `loss` of ``[n, B, H]`` that is too large. A GPU has to wait for the answer."""
    lost = lost.detach()
    if not lost.numel() or float(lost.max()) <= MOST:
        return None
    first = (~(lost <= MOST)).int().argmax()  # also where it is no number
    index, row, head = (int(x) for x in torch.unravel_index(first, lost.shape))
    return Unresolved(index=index, row=row, head=head, worst=float(lost[index, row, head]))


def resolved(lost: Tensor) -> Tensor:
    """Where a `loss` is small enough; nowhere else may an answer count as the minimum."""
    return lost <= MOST


def refuse(problem: Problem, lost: Unresolved, *, token: int) -> ValueError:
    """The sentence, with the row and the token as the caller counts them."""
    worst = lost.worst if lost.worst < 1 else 1.0  # also where it is no number
    row, token = problem.caller_index(lost.row, token)
    return ValueError(
        f"{problem.recipe.algorithm.title} is not determined at row {row}, token {token}, head "
        f"{lost.head}: decays this strong leave less of older tokens than float64 resolves beside "
        f"new ones, and the ridge fades with them (relative error {worst:.0e}): decay less, use "
        "fewer features, refresh the ridge sooner (refresh_every=...), or use "
        "ridge_schedule='constant', whose ridge "
        "stays"
    )


def digits(problem: Problem) -> torch.dtype:
    """The dtype that holds the monomials of k − q of degree ≤ p, beside the ridge.

    A covariance of monomials as large as r = (1 + |k| + |q|)^p is rounded by ε r². Where float32
    would lose a thousandth of the ridge, the fit is made in float64; without a ridge it always is,
    because rounding alone then says which directions the keys do not span.
    """
    dtype, degree = state_dtype(problem.q, problem.k, problem.v), problem.recipe.memory.degree
    if not degree or dtype == torch.float64 or not can_read_values(problem.q):
        return dtype
    buffered = [] if problem.state.buffer is None else [problem.state.buffer.k]
    longest = [
        x.detach().norm(dim=-1).max() for x in (problem.q, problem.k, *buffered) if x.numel()
    ]
    size = (1.0 + float(sum(longest))) ** (2 * degree)
    resolved = torch.finfo(dtype).eps * size < 1e-3 * min(problem.recipe.ridge, 1.0)
    return dtype if resolved else torch.float64


def ridged(covariance: Tensor, ridge: float, right: Tensor) -> Tensor:
    """(C + λ)⁻¹ right for covariances ``[..., D, D]``.

    Raises:
        ValueError: the ridge is lost in the rounding of the covariance; where nobody looks, the
        answer is NaN.
    """
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor, failed = torch.linalg.cholesky_ex(covariance + ridge * eye)
    # A NaN that came in goes out, and is told of by name.
    lost = (failed > 0) & right.isfinite().all(-1).all(-1)
    if not can_read_values(right):  # no error can be raised: undetermined entries become NaN
        return torch.cholesky_solve(right, factor).masked_fill(lost[..., None, None], torch.nan)
    if bool(lost.any()):
        raise ValueError(
            f"local regression: a ridge of {ridge:g} is lost in {covariance.dtype} beside keys so "
            "far from their query: normalise q and k, or take a larger ridge in algorithm.Analytic"
        )
    return torch.cholesky_solve(right, factor)
