"""One token of the common linear memories: a handful of products and nothing else.

A decoded token is bound by the number of operations, not by their size. What `recurrent` asks of
every token (windows, momentum, probes, decays over values) is known to be absent when the engine's
plan is made; what is left is, with P = A_{t−1} or D_t A_{t−1}::

    A_t = D_t A_{t−1} + η_t (b v_t − a P k_t) k_tᵀ,     y_t = A_t q_t

Without an error that sees the prediction (a = 0), η_t may be one number per value channel and D_t
one per entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, scaled, state_dtype
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = [
    "LinearPlan",
    "decodes_in_one_step",
    "one_token",
    "per_value_systems",
    "plan",
    "scans",
    "token",
]


@dataclass(frozen=True)
class LinearPlan:
    """What a recipe decides before any call.

    Attributes:
        plain: whether the recursion above is all there is of it.
        bare: whether, beyond that, keys are their own features, and gates and the second factor of
            a decay its only numbers.
        before: whether the error sees a memory that has decayed.
        split_values: whether value channels are memories of their own (`per_value_systems`).
    """

    plain: bool
    bare: bool
    before: bool
    split_values: bool


def scans(recipe: Recipe) -> bool:
    """Whether every entry of the memory follows a recurrence of its own.

    A decay per entry does not separate into keys and values, but where no error sees the prediction
    it need not; and the one weight of a channel sees nothing but itself.
    """
    decay = recipe.retention.decay
    if not recipe.memory.is_elementwise:
        entry = decay is not None and decay.per == "entry"
        if not entry or recipe.bias.sees_prediction:
            return False
    return recipe.context.horizon == 1 and recipe.algorithm.recursion == "none"


def per_value_systems(recipe: Recipe) -> bool:
    """Whether value channels follow different equations under an error that sees the prediction."""
    decay = recipe.retention.decay
    if decay is not None and decay.per == "entry" and not scans(recipe):
        return True
    if recipe.bias.sees_prediction:
        rows = decay is not None and decay.per in ("value", "key_value", "entry")
        return rows or recipe.algorithm.per_value
    # The dot product's write is η ⊙ v; in a window, one η meets the values of several tokens.
    return recipe.context.horizon != 1 and recipe.algorithm.per_value


def plan(bound: BoundRecipe) -> LinearPlan:
    """What of a recipe decides how it runs."""
    recipe, gates = bound.recipe, set(bound.gates)
    decay, simple = recipe.retention.decay, decodes_in_one_step(bound.recipe)
    factors = ["decay_scale"] if decay is not None and decay.is_input_scaled else []
    return LinearPlan(
        plain=simple,
        bare=simple
        and not bound.needs_lowering
        and not bound.has_features
        and not recipe.algorithm.rate_depends_on_key
        and [name for name, _, _ in bound.learned_rates] == factors
        and gates == ({"lr"} if decay is None else {"lr", "log_decay"}),
        before=decay is not None and decay.when == "before",
        split_values=per_value_systems(recipe),
    )


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
    """Outputs ``[B, 1, H, G, V]`` of a `plain` recipe without padding, and the state after it."""
    bound, rates, position = problem.bound, problem.rates, problem.positions()
    dtype = state_dtype(problem.q, problem.k, problem.v)
    (start,) = problem.state.weights
    B, H, V, F = start.shape
    P = B * H
    q = problem.phi(problem.q, "query", position).reshape(P, problem.q.shape[3], F)
    k = problem.phi(problem.k.unsqueeze(3), "key", position)
    lr, log_decay, scale = rates["lr"], rates.get("log_decay"), rates.get("decay_scale")
    if log_decay is not None and scale is not None and scale.dim() > log_decay.dim():
        log_decay = scaled(log_decay.unsqueeze(-1), scale)
    if bound.rate_depends_on_key:
        assert bound.affine is not None  # linear.refuses
        lr = bound.recipe.algorithm.rate(lr, k.square().sum(-1).squeeze(3), bound.affine[0])
    k, v, A = k.reshape(P, 1, F), problem.v.to(dtype).reshape(P, 1, V), start.to(dtype)
    y, updated = _step(bound, bound.plan, q, k, v, A.reshape(P, V, F), lr, log_decay)
    return y.view(B, 1, H, y.shape[1], V), problem.final_state(weights=(updated.view(B, H, V, F),))


def token(
    bound: BoundRecipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    state: State,
) -> tuple[Tensor, State] | None:
    """`one_token` of a `bare` recipe, of numbers that nobody has to look at; else ``None``.

    ``None`` too where a gate has another type than the memory.

    What lies between a caller and an engine (constants, names, sizes, records of them) takes as
    long as one token's products.

    Args:
        bound: the recipe.
        q: the query ``[B, 1, H·G, K]``.
        k: the key ``[B, 1, H, K]``.
        v: the value ``[B, 1, H, V]``.
        gates: by name, ``[B, 1, H, ...]``; and the params ``[H, ...]``.
        state: before the token.
    """
    plan: LinearPlan = bound.plan
    (A,) = state.weights if plan.bare else (None,)
    if A is None or not (q.dtype == k.dtype == v.dtype == A.dtype == state_dtype(q)):
        return None
    for gate in gates.values():
        if gate.dtype != A.dtype:
            return None  # the general way converts it
    lr, log_decay, scale = gates["lr"], gates.get("log_decay"), gates.get("decay_scale")
    if log_decay is not None and scale is not None:
        has_all_axes = log_decay.dim() == scale.dim() + 2
        log_decay = scaled(log_decay if has_all_axes else log_decay.unsqueeze(-1), scale)
    B, H, V, F = A.shape
    P = B * H
    y, after = _step(
        bound,
        plan,
        q.reshape(P, q.shape[2] // H, F),
        k.reshape(P, 1, F),
        v.reshape(P, 1, V),
        A.reshape(P, V, F),
        lr,
        log_decay,
    )
    return y.view(B, 1, q.shape[2], V), state.replace(
        weights=(after.view(B, H, V, F),), recipe_id=bound.recipe_id
    )


def _step(
    bound: BoundRecipe,
    plan: LinearPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A: Tensor,
    lr: Tensor,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recursion above of P memories: q ``[P, G, F]``, k ``[P, 1, F]``, v ``[P, 1, V]``."""
    assert bound.affine is not None  # linear.refuses
    (a, b), decayed = bound.affine, A
    if log_decay is not None:
        axes = log_decay.shape[3:]  # none, [F] or [V, F]
        decayed = A * log_decay.exp().reshape(k.shape[0], *(1,) * (2 - len(axes)), *axes)
    # Rows times a transposed matrix take half the time of a matrix times columns.
    if a == 0:
        error = v if b == 1 else b * v
    else:
        error = torch.baddbmm(v, k, (decayed if plan.before else A).mT, beta=b, alpha=-a)
    lr = lr.reshape(k.shape[0], 1, *(lr.shape[3:] or (1,)))
    updated = torch.addcmul(decayed, (error * lr).mT, k)
    return torch.bmm(q, updated.mT), updated
