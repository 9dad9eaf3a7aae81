"""Limits of precision of normalised reads over decayed keys: when float64 is needed, or a refusal.

A normalised read of x is Σ_j κ_j u_j / Σ_j m_j κ_j. A row u_j and its mass m_j may have decayed to
e^−100 and still be most of what is read: where κ_j is e^110 times the likeness of every newer key.
So small numbers may not silently become 0, and nothing that is 0 may be divided by::

    m_j = 0           α was 0, and nothing was written to the row since: the key is not seen
    m_j ≥ `least`     every other key, also where less of it is left

With likenesses relative to the largest of keys that are seen, κ_j ≤ 1, what a dtype took from n
rows and masses is at most n · least. Where Σ m κ is not far above that, it may count, and the call
is computed once more in float64. Where float64 does not hold it either, or the state that was
handed in had lost it, the call is refused. The bounds are derived in
``docs/design/kernel-delta.md``.
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

__all__ = ["Run", "bearable", "counts", "doubtful", "least", "too_faint", "with_enough_digits"]

Run = Callable[[Problem, Tensor | None], tuple[Tensor, State, Tensor]]
"""Outputs, state, and whether something counted that the dtype does not hold; given what the
state's rows and masses may lack, ``[B, n, H]``, or ``None`` where they are all there."""


def least(dtype: torch.dtype) -> float:
    """What a row or a mass is cut at: products with smaller numbers are subnormal, and slow."""
    finfo = torch.finfo(dtype)
    return finfo.tiny / finfo.eps


def bearable(dtype: torch.dtype) -> float:
    """Which part of Σ m κ may be missing: ε^1.5, less than ε for values of any usual size."""
    return float(torch.finfo(dtype).eps ** 1.5)


def counts(total: Tensor, keys: int, missing: Tensor | None = None) -> Tensor:
    """Whether what is missing counts in Σ m κ, for ``total [..., 1]`` over so many keys.

    Args:
        missing: Σ of likenesses times what the state may lack, like ``total``.
    """
    missed = total.detach() < keys * least(total.dtype) / bearable(total.dtype)
    if missing is not None:
        missed = missed | (missing.detach() > bearable(torch.float32) * total.detach())
    return missed


def doubtful(dual: KernelRows) -> Tensor:
    """What rows and masses of a state may lack ``[B, n, H]``."""
    dtype = dual.mass.dtype
    faint = (dual.mass > 0) & (dual.mass < least(dtype) / bearable(dtype))
    return faint.double() * least(dtype)


def _narrowed(dual: KernelRows, dtype: torch.dtype) -> KernelRows:
    """The state in a dtype of a smaller range: a key that is there stays there."""
    mass = torch.where(dual.mass > 0, dual.mass.clamp_min(least(dtype)), 0.0)
    return dataclasses.replace(
        dual.map(lambda x: x if x.dtype is torch.bool else x.to(dtype)), mass=mass.to(dtype)
    )


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _widened(problem: Problem) -> Problem:
    """The problem in float64."""
    return dataclasses.replace(
        problem,
        q=problem.q.double(),
        k=problem.k.double(),
        v=problem.v.double(),
        rates={name: _wide(x) for name, x in problem.rates.items()},
        params={name: _wide(x) for name, x in problem.params.items()},
        state=problem.state.map(_wide),
    )


def with_enough_digits(run: Run, problem: Problem) -> tuple[Tensor, State]:
    """The problem in its own dtype, or in float64 where that one does not hold what is read.

    Where the host would have to wait to know, decays are computed in float64, and outputs that
    would be refused are NaN.

    Raises:
        ValueError: float64 does not hold it either, or the state has lost it.
    """
    dtype, old_rows = state_dtype(problem.q, problem.k, problem.v), problem.state.kernel_rows
    decays, asks = problem.recipe.retention.decay is not None, can_read_values(problem.k)
    assert old_rows is not None
    if decays and dtype is not torch.float64:
        if asks:
            y, state, lost_digits = run(problem, None)
            if not bool(lost_digits) and bool(y.isfinite().all()):
                return y, state
        y, state, lost_digits = run(_widened(problem), doubtful(old_rows))
        assert state.kernel_rows is not None
        weights = tuple(w.to(dtype) for w in state.weights)
        slots = {n: tuple(s.to(dtype) for s in slot) for n, slot in state.algorithm_state.items()}
        dual = _narrowed(state.kernel_rows, dtype)
        y, state = (
            y.to(problem.v.dtype),
            problem.final_state(weights=weights, algorithm_state=slots, kernel_rows=dual),
        )
    else:
        y, state, lost_digits = run(problem, None)
    if not asks:
        return y.masked_fill(lost_digits, torch.nan) if decays else y, state
    if bool(lost_digits):
        raise too_faint(problem)
    return y, state


def too_faint(problem: Problem) -> ValueError:
    """The refusal."""
    return ValueError(
        f"{problem.recipe.retention.title} has left less of a key than the state or float64 can "
        "hold, and a query or key is so much more like it than like every newer one that it would "
        "still be read; shorten queries and keys, raise the temperature of the features, forget "
        "less (or all, with log_decay −inf), or keep state and inputs in float64"
    )
