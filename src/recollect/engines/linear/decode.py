"""One token of the common linear memories: a handful of products and nothing else.

A decoded token is bound by the number of operations, not by their size. What `recurrent` asks of
every token (windows, momentum, probes, decays over values) is known to be absent when the engine's
plan is made; what is left is, with P = A_{t−1} or D_t A_{t−1}::

    A_t = D_t A_{t−1} + η_t (b v_t − a P k_t) k_tᵀ,     y_t = A_t q_t
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, state_dtype
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe
    from recollect.recipe.sized import SizedRecipe

__all__ = ["LinearPlan", "one_token", "plan", "token"]


@dataclass(frozen=True)
class LinearPlan:
    """What a recipe decides before any call.

    Attributes:
        plain: whether the recursion above is all there is of it.
        bare: whether, beyond that, keys are their own features and gates its only numbers.
        before: whether the error sees a memory that has decayed.
    """

    plain: bool
    bare: bool
    before: bool


def plan(sized: SizedRecipe) -> LinearPlan:
    """What of a recipe decides how it runs."""
    recipe, gates = sized.recipe, set(sized.gates)
    decay, simple = recipe.retention.decay, _plain(sized.recipe)
    return LinearPlan(
        plain=simple,
        bare=simple
        and sized.plain
        and not sized.lifts
        and not recipe.algorithm.keyed
        and not sized.statics
        and gates == ({"lr"} if decay is None else {"lr", "log_decay"}),
        before=decay is not None and decay.when == "before",
    )


def _plain(recipe: Recipe) -> bool:
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    return (
        not memory.diagonal
        and (memory.read.when == "after" and memory.read.bonus == 0.0)
        and (recipe.context.horizon == 1 and "window" not in recipe.context.numbers)
        and recipe.bias.probe is None
        and (algorithm.momentum_of == "none" and not algorithm.per_value)
        and (decay is None or decay.per in ("head", "key"))
    )


def one_token(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, 1, H, G, V]`` of a `plain` recipe without padding, and the state after it."""
    recipe, rates, position = problem.recipe, problem.rates, problem.positions()
    dtype = state_dtype(problem.q, problem.k, problem.v)
    (start,) = problem.state.weights
    B, H, V, F = start.shape
    P = B * H
    q = problem.phi(problem.q, "query", position).reshape(P, problem.q.shape[3], F)
    k = problem.phi(problem.k.unsqueeze(3), "key", position)
    lr, log_decay = rates["lr"], rates.get("log_decay")
    if recipe.algorithm.keyed:
        assert recipe.bias.affine is not None  # linear.refuses
        lr = recipe.algorithm.rate(lr, k.square().sum(-1).squeeze(3), recipe.bias.affine[0])
    k, v, A = k.reshape(P, 1, F), problem.v.to(dtype).reshape(P, 1, V), start.to(dtype)
    y, after = _step(recipe, problem.plan, q, k, v, A.reshape(P, V, F), lr, log_decay)
    return y.view(B, 1, H, y.shape[1], V), problem.after(weights=(after.view(B, H, V, F),))


def token(
    sized: SizedRecipe,
    plan: LinearPlan,
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
        sized: the recipe.
        plan: what was derived from it.
        q: the query ``[B, 1, H·G, K]``.
        k: the key ``[B, 1, H, K]``.
        v: the value ``[B, 1, H, V]``.
        gates: by name, ``[B, 1, H, ...]``.
        state: before the token.
    """
    (A,) = state.weights if plan.bare else (None,)
    if A is None or not (q.dtype == k.dtype == v.dtype == A.dtype == state_dtype(q)):
        return None
    lr, log_decay = gates["lr"], gates.get("log_decay")
    if lr.dtype != A.dtype or (log_decay is not None and log_decay.dtype != A.dtype):
        return None  # the general way converts them
    B, H, V, F = A.shape
    P = B * H
    y, after = _step(
        sized.recipe,
        plan,
        q.reshape(P, q.shape[2] // H, F),
        k.reshape(P, 1, F),
        v.reshape(P, 1, V),
        A.reshape(P, V, F),
        lr,
        log_decay,
    )
    return y.view(B, 1, q.shape[2], V), state.moved(
        weights=(after.view(B, H, V, F),), written_by=sized.written
    )


def _step(
    recipe: Recipe,
    plan: LinearPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A: Tensor,
    lr: Tensor,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recursion above of P memories: q ``[P, G, F]``, k ``[P, 1, F]``, v ``[P, 1, V]``."""
    assert recipe.bias.affine is not None  # linear.refuses
    (a, b), decayed = recipe.bias.affine, A
    if log_decay is not None:
        channels = k.shape[2] if log_decay.dim() == 4 else 1
        decayed = A * log_decay.exp().reshape(k.shape[0], 1, channels)
    # Rows times a transposed matrix take half the time of a matrix times columns.
    if a == 0:
        error = v if b == 1 else b * v
    else:
        error = torch.baddbmm(v, k, (decayed if plan.before else A).mT, beta=b, alpha=-a)
    after = torch.addcmul(decayed, (error * lr.reshape(k.shape[0], 1, 1)).mT, k)
    return torch.bmm(q, after.mT), after
