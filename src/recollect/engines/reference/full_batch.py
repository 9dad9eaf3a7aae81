"""Reference for full-batch descent on all past tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.autograd import inner_leaves
from recollect.engines.common.problem import (
    JoinedTokens,
    Problem,
    Weights,
    as_matrix,
    join_buffer,
    loss_gradients,
    memory_forward,
    requires_grad,
)
from recollect.state.state import State

__all__ = ["full_batch", "full_batch_weights"]


def full_batch(problem: Problem) -> tuple[Tensor, State]:
    """Take I full-batch gradient steps from the origin at every token (TTR 20–23)."""
    tokens = join_buffer(problem)
    forward = memory_forward(problem)
    q_phi = problem.phi(problem.q, "query", problem.positions())
    outputs = [
        forward(
            full_batch_weights(problem, tokens, tokens.buffered + t),
            q_phi[:, t],
            problem.q[:, t].to(q_phi.dtype),
            problem.params,
        )
        for t in range(problem.q.shape[1])
    ]
    B, T, H, G, _ = problem.q.shape
    y = torch.stack(outputs, dim=1) if T else problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])
    if problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return y.to(problem.v.dtype), problem.final_state()


def full_batch_weights(problem: Problem, tokens: JoinedTokens, j: int) -> Weights:
    """Return W after I steps on the first j + 1 joined tokens with the rates of token j."""
    W = list(problem.state.weights)
    if j < 0:
        return W
    forward, bias, recipe = memory_forward(problem), problem.recipe.bias, problem.recipe
    raw, phi, v = (x[:, : j + 1].transpose(1, 2) for x in (tokens.k, tokens.phi, tokens.v))
    logs = tokens.rates["log_decay"][:, : j + 1]
    # γ_i = w_i Π_{l=i+1..t} γ_l: the sum includes only later tokens.
    later = logs.flip(1).cumsum(1).flip(1) - logs
    weight = tokens.rates["weight"][:, : j + 1] * later.exp() * tokens.valid[:, : j + 1, None]
    weight = weight.transpose(1, 2)  # [B, H, i]
    gates = tokens.bias_gates(bias, slice(j + 1))
    lr = tokens.rates["lr"][:, j]
    # A rate per value channel scales the last map, and its mean the maps before.
    is_per_value = lr.dim() == 3
    mean = (lr.mean(-1) if is_per_value else lr)[..., None, None]
    last = lr.unsqueeze(-1) if is_per_value else mean
    factors = [mean] * (len(W) - 1) + [last]
    outer = requires_grad(problem)
    for _ in range(recipe.algorithm.updates_per_token):
        with torch.enable_grad():
            points = inner_leaves(W, outer=outer)
            prediction = forward(points, phi, raw, problem.params)
            gradients = loss_gradients(bias, prediction, v, gates, weight, points, outer=outer)
        W = [
            (as_matrix(w) - f * as_matrix(g)).reshape(w.shape)
            if w.dim() != 3 or lr.dim() != 3
            else w - lr * g
            for w, f, g in zip(W, factors, gradients, strict=True)
        ]
    return W
