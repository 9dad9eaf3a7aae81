"""Reference engine: the definition, one token at a time.

All other engines are tested against this engine. It follows `docs/design/meaning.md` literally,
computes the inner gradient by autograd, imports no fast path, and runs in any dtype. The letters
match the equations::

    g_t = Σ_m γ_(t,m) ∇_W ℓ(M(W°; φ(k_(t−m))), v_(t−m))
    S_t, step_t = algorithm(S_(t−1), g_t)
    A_t = retention.advance(A_(t−1), step_t)          α_t A_(t−1) + step_t unless rebuilt from W
    W_t = link(A_t),    y_t = M(W_t; φ(q_t))

Batch elements differ in position because of padding and packing. Therefore ``torch.where`` selects
all quantities that depend on the position in the inner batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, join_buffer, memory_forward
from recollect.engines.reference import kernel_token_loop, local_regression
from recollect.engines.reference.full_batch import full_batch, full_batch_weights
from recollect.engines.reference.least_squares import least_squares, read_least_squares
from recollect.engines.reference.token_loop import TokenLoop
from recollect.state.state import State

__all__ = ["read", "run"]


def run(problem: Problem) -> tuple[Tensor, State]:
    """Return the outputs ``[B, T, H, G, V]`` and the final state."""
    if problem.recipe.nonparametric:
        return local_regression.local(problem)
    if problem.recipe.algorithm.inverse is not None:
        return least_squares(problem)
    if problem.recipe.solves_from_gram:
        return local_regression.regression(problem)
    if problem.recipe.context.horizon is None:
        return full_batch(problem)
    if problem.recipe.uses_kernel_rows:
        return kernel_token_loop.run(problem)
    loop = TokenLoop(problem)
    y = loop.run(problem)
    return y.to(problem.v.dtype), loop.state(problem)


def read(problem: Problem, rates: Mapping[str, Tensor]) -> Tensor:
    """Read ``problem.q`` from ``problem.state`` without writing.

    Args:
        problem: The call, with empty k and v.
        rates: Gates of the queries ``[B, T, H, ...]``. A link with gates (a radius, a threshold)
            uses the gates of the query.
    """
    recipe = problem.recipe
    if recipe.nonparametric:
        return local_regression.attend(problem, rates)
    if recipe.solves_from_gram:
        return local_regression.regress(problem, rates)
    if recipe.uses_kernel_rows:
        return kernel_token_loop.read(problem)
    T = problem.q.shape[1]
    position = (problem.state.position - 1).clamp_min(0)[:, None].expand(-1, T)
    phi = problem.phi(problem.q, "query", position)
    if recipe.algorithm.inverse is not None:
        return read_least_squares(problem, phi, rates).to(problem.v.dtype)
    raw, forward = problem.q.to(phi.dtype), memory_forward(problem)
    if recipe.context.horizon is None:
        tokens = join_buffer(problem)
        W = [full_batch_weights(problem, tokens, len(tokens) - 1)] * T
    else:
        loop = TokenLoop(problem)
        loop.run(problem)
        W = [loop.weights_for_read(rates, t) for t in range(T)]
    outputs = [forward(W[t], phi[:, t], raw[:, t], problem.params) for t in range(T)]
    B, _, H, G, _ = phi.shape
    empty = problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])
    return torch.stack(outputs, dim=1).to(problem.v.dtype) if outputs else empty
