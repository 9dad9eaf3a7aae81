"""Precision limits of normalised reads over decayed keys, with a fallback to float64.

A normalised read of x is Σ_j κ_j u_j / Σ_j m_j κ_j. A row u_j and its mass m_j may decay to e^−100
and still dominate the read, if κ_j is e^110 times the similarity of every newer key. Therefore
masses are clamped to a minimum, so that no sum is divided by an underflowed zero::

    m_j = 0           the key is forgotten: α was 0, and no token wrote to the row since
    m_j ≥ `min_mass`  every other key

With similarities relative to the largest visible one, κ_j ≤ 1, the clamp changes n rows and masses
by at most n times that minimum. If Σ m κ is not well above this bound, the call runs again in
float64. An error is raised if float64 is not precise enough or the initial state has lost the
precision. The bounds are derived in ``docs/design/kernel-delta.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from recollect.choices.runtime import can_read_values
from recollect.engines.common.problem import Problem, state_dtype
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State

__all__ = [
    "KernelRun",
    "is_significant",
    "min_mass",
    "possible_loss",
    "precision_error",
    "relative_tolerance",
    "run_with_float64_fallback",
]

KernelRun = Callable[[Problem, Tensor | None], tuple[Tensor, State, Tensor]]
"""Function from a problem and the missing mass of its state ``[B, n, H]``, or ``None`` without one.

It returns outputs, state, and whether a read lost significant digits."""


def min_mass(dtype: torch.dtype) -> float:
    """Return the minimum of a row or mass; products with smaller values are subnormal and slow."""
    finfo = torch.finfo(dtype)
    return finfo.tiny / finfo.eps


def relative_tolerance(dtype: torch.dtype) -> float:
    """Return the fraction of Σ m κ that may be missing: ε^1.5, below ε for typical values."""
    return float(torch.finfo(dtype).eps ** 1.5)


def is_significant(total: Tensor, keys: int, missing: Tensor | None = None) -> Tensor:
    """Return whether Σ κ × missing mass ``[..., 1]`` is significant in the total Σ m κ."""
    significant = total.detach() < keys * min_mass(total.dtype) / relative_tolerance(total.dtype)
    if missing is not None:
        significant = significant | (
            missing.detach() > relative_tolerance(torch.float32) * total.detach()
        )
    return significant


def possible_loss(dual: KernelRows) -> Tensor:
    """Return the missing mass of the rows of a state ``[B, n, H]``."""
    dtype = dual.mass.dtype
    faint = (dual.mass > 0) & (dual.mass < min_mass(dtype) / relative_tolerance(dtype))
    return faint.double() * min_mass(dtype)


def _cast_rows(dual: KernelRows, dtype: torch.dtype) -> KernelRows:
    """Return the state in a dtype with a smaller range; visible keys stay visible."""
    mass = torch.where(dual.mass > 0, dual.mass.clamp_min(min_mass(dtype)), 0.0)
    return dataclasses.replace(
        dual.map(lambda x: x if x.dtype is torch.bool else x.to(dtype)), mass=mass.to(dtype)
    )


def run_with_float64_fallback(run: KernelRun, problem: Problem) -> tuple[Tensor, State]:
    """Run the problem in its dtype, or in float64 if the dtype is not precise enough.

    If the host would have to synchronise with the device, a decay runs in float64 and imprecise
    outputs are NaN.

    Raises:
        ValueError: float64 is not precise enough, or the state has lost the precision.
    """
    dtype, old_rows = state_dtype(problem.q, problem.k, problem.v), problem.state.kernel_rows
    decays, can_read = problem.recipe.retention.decay is not None, can_read_values(problem.k)
    assert old_rows is not None
    if decays and dtype is not torch.float64:
        if can_read:
            y, state, precision_lost = run(problem, None)
            if not bool(precision_lost) and bool(y.isfinite().all()):
                return y, state
        wide = problem.map(lambda x: x.double() if x.is_floating_point() else x)
        y, state, precision_lost = run(wide, possible_loss(old_rows))
        assert state.kernel_rows is not None
        weights = tuple(w.to(dtype) for w in state.weights)
        slots = {n: tuple(s.to(dtype) for s in slot) for n, slot in state.algorithm_state.items()}
        dual = _cast_rows(state.kernel_rows, dtype)
        y, state = (
            y.to(problem.v.dtype),
            problem.final_state(weights=weights, algorithm_state=slots, kernel_rows=dual),
        )
    else:
        y, state, precision_lost = run(problem, None)
    if not can_read:
        return y.masked_fill(precision_lost, torch.nan) if decays else y, state
    if bool(precision_lost):
        raise precision_error(problem)
    return y, state


def precision_error(problem: Problem) -> ValueError:
    """Return the error for keys that decayed below the precision of float64."""
    return ValueError(
        f"{problem.recipe.retention.title} has left less of a key than the state or float64 can "
        "represent, but a query or key is so similar to it that the read depends on it; shorten "
        "queries and keys, raise the temperature of the features, decay less (or set log_decay to "
        "−inf), or use float64 for state and inputs"
    )
