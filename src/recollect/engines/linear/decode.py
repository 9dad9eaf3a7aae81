"""One token of the common linear memories: a handful of products and nothing else.

A decoded token is bound by the number of operations, not by their size. What `recurrent` asks of
every token (windows, momentum, probes, decays over values) is known to be absent when the engine's
plan is made; what is left is, with P = A_{t−1} or D_t A_{t−1}::

    A_t = D_t A_{t−1} + η_t (b v_t − a P k_t) k_tᵀ,     y_t = A_t q_t
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, state_dtype

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["one_token", "plain"]


def plain(recipe: Recipe) -> bool:
    """Whether the recursion above is all there is of a linear recipe."""
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    return (
        not memory.diagonal
        and (memory.read.when == "after" and memory.read.bonus == 0.0)
        and (recipe.context.horizon == 1 and "window" not in recipe.context.numbers)
        and recipe.bias.probe is None
        and (algorithm.momentum_of == "none" and not algorithm.per_value)
        and (decay is None or decay.per in ("head", "key"))
    )


def one_token(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output ``[B, 1, H, G, V]`` of a `plain` recipe without padding, and A after the token."""
    recipe, rates = problem.recipe, problem.rates
    assert recipe.bias.affine is not None  # linear.refuses
    a, b = recipe.bias.affine
    dtype, position = state_dtype(problem.q, problem.k, problem.v), problem.positions()
    (start,) = problem.state.weights
    B, H, V, F = start.shape
    P = B * H
    A = start.to(dtype).reshape(P, V, F)
    q = problem.phi(problem.q, "query", position).reshape(P, -1, F)
    k = problem.phi(problem.k.unsqueeze(3), "key", position)
    lr = rates["lr"]
    if recipe.algorithm.keyed:
        lr = recipe.algorithm.rate(lr, k.square().sum(-1).squeeze(3), a)
    # Rows times a transposed matrix take half the time of a matrix times columns.
    k, v = k.reshape(P, 1, F), problem.v.to(dtype).reshape(P, 1, V)
    decay, decayed = recipe.retention.decay, A
    if decay is not None:
        log_decay = rates["log_decay"]
        channels = F if log_decay.dim() == 4 else 1
        decayed = A * log_decay.exp().reshape(P, 1, channels)
    if a == 0:
        error = v if b == 1 else b * v
    else:
        before = decay is not None and decay.when == "before"
        error = torch.baddbmm(v, k, (decayed if before else A).mT, beta=b, alpha=-a)
    after = torch.addcmul(decayed, (error * lr.reshape(P, 1, 1)).mT, k)
    y = torch.bmm(q, after.mT)
    return y.view(B, 1, H, -1, V), after.view(B, H, V, F)
