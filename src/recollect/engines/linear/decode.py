"""Decoding of one token for common linear memories, in a few products.

The number of operations bounds decoding time. The plan of the engine excludes windows, momentum,
probes and decays over values, which `recurrent` supports. With P = A_{t−1} or D_t A_{t−1}::

    A_t = D_t A_{t−1} + η_t (b v_t − a P k_t) k_tᵀ,     y_t = A_t q_t or A_tᵀ q_t

If the error does not depend on the prediction (a = 0), η_t may be per value channel and D_t per
entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, factored_log_decay, state_dtype
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = [
    "LinearPlan",
    "decodes_in_one_step",
    "erases_along_key",
    "one_token",
    "per_value_systems",
    "scans",
    "step",
    "transposition_misfits",
]


@dataclass(frozen=True)
class LinearPlan:
    """Properties of a recipe for the linear engine, computed before any call."""

    plain: bool  # whether the recursion above describes the recipe completely
    # whether the recipe is plain, has no features, and has no params other than gates and the scale
    # of a decay
    bare: bool
    decays_first: bool  # whether the error is measured after the decay
    transposed: bool  # whether the read is y = Aᵀ q
    split_values: bool  # whether value channels are separate memories (`per_value_systems`)
    erases_along_key: bool  # whether a probe has one rate and erases along the key


def scans(recipe: Recipe) -> bool:
    """Whether every entry of the memory follows a separate recurrence.

    A decay per entry does not separate into keys and values. It does not have to if the error does
    not depend on the prediction, or if a channel has a single weight.
    """
    decay = recipe.retention.decay
    if not recipe.memory.is_elementwise:
        entry = decay is not None and decay.per == "entry"
        if not entry or recipe.step_sees_prediction:
            return False
    return recipe.context.horizon == 1 and recipe.algorithm.recursion == "none"


def per_value_systems(recipe: Recipe) -> bool:
    """Whether value channels require separate systems of error equations."""
    decay = recipe.retention.decay
    if decay is not None and decay.per == "entry" and not scans(recipe):
        return True
    if recipe.step_sees_prediction:
        if decay is not None and decay.per in ("value", "key_value", "entry"):
            return True
        # The rate of the algorithm also scales the erasure, unless a probe has its own rate.
        return recipe.algorithm.per_value and recipe.bias.probe is None
    # The write of a dot product is η ⊙ v; in a window, one η scales the values of several tokens.
    return recipe.context.horizon != 1 and recipe.algorithm.per_value


def erases_along_key(recipe: Recipe) -> bool:
    """Whether a probe has one rate and erases along the key of the write."""
    probe = recipe.bias.probe
    return probe is not None and probe.write == "key" and probe.per == "head"


def transposition_misfits(recipe: Recipe) -> list[str]:
    """Return the reasons why a transposed read has no second memory of keys."""
    reasons: list[str] = []
    if recipe.context.horizon != 1 or recipe.algorithm.recursion != "none":
        reasons.append("its transposed read needs one association per step, without momentum")
    if recipe.bias.probe is not None:
        reasons.append("its transposed read needs an error at the key, without a probe")
    if scans(recipe) or per_value_systems(recipe):
        reasons.append("its transposed read needs one equation for all value channels")
    return reasons


def decodes_in_one_step(recipe: Recipe) -> bool:
    """Whether one token is a write of one association and a read, without special cases."""
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    return (
        not memory.is_elementwise
        and (memory.read.when == "after" and memory.read.bonus == 0.0)
        and (recipe.context.horizon == 1 and "window" not in recipe.context.quantity_axes)
        and recipe.bias.probe is None
        and algorithm.recursion == "none"
        and not per_value_systems(recipe)
        and not (algorithm.per_value and algorithm.rate_depends_on_key)
        and (decay is None or decay.per in ("head", "key", "entry"))
    )


def one_token(problem: Problem) -> tuple[Tensor, State]:
    """Return outputs ``[B, 1, H, G, V]`` and the next state of a plain recipe without padding."""
    bound, rates, position = problem.bound, problem.rates, problem.positions()
    dtype = state_dtype(problem.q, problem.k, problem.v)
    (start,) = problem.state.weights
    B, H, V, F = start.shape
    P = B * H
    q = problem.phi(problem.q, "query", position).reshape(P, problem.q.shape[3], F)
    k = problem.phi(problem.k.unsqueeze(3), "key", position)
    lr, log_decay, scale = rates["lr"], rates.get("log_decay"), rates.get("decay_scale")
    if log_decay is not None and scale is not None and scale.dim() > log_decay.dim():
        log_decay = factored_log_decay(log_decay.unsqueeze(-1), scale)
    if bound.rate_depends_on_key:
        assert bound.affine is not None  # LinearEngine.unsupported_reasons
        lr = bound.recipe.algorithm.rate(lr, k.square().sum(-1).squeeze(3), bound.affine[0])
    k, v, A = k.reshape(P, 1, F), problem.v.to(dtype).reshape(P, 1, V), start.to(dtype)
    y, updated = step(bound, bound.plan, q, k, v, A.reshape(P, V, F), lr, log_decay)
    return y.view(B, 1, H, y.shape[1], V), problem.final_state(weights=(updated.view(B, H, V, F),))


def step(
    bound: BoundRecipe,
    plan: LinearPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A: Tensor,
    lr: Tensor,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recursion of P memories: q ``[P, G, F]``, k ``[P, 1, F]``, v ``[P, 1, V]``."""
    assert bound.affine is not None  # LinearEngine.unsupported_reasons
    (a, b), decayed = bound.affine, A
    if log_decay is not None:
        axes = log_decay.shape[3:]  # none, [F] or [V, F]
        decayed = A * log_decay.exp().reshape(k.shape[0], *(1,) * (2 - len(axes)), *axes)
    # A row times a transposed matrix is faster than a matrix times a column.
    if a == 0:
        error = v if b == 1 else b * v
    else:
        error = torch.baddbmm(v, k, (decayed if plan.decays_first else A).mT, beta=b, alpha=-a)
    lr = lr.reshape(k.shape[0], 1, *(lr.shape[3:] or (1,)))
    updated = torch.addcmul(decayed, (error * lr).mT, k)
    return torch.bmm(q, updated if plan.transposed else updated.mT), updated
