"""Normalised steps of the reference engine: Polyak scales and line searches.

Matrices are full and gradients come from autograd, as in `recollect.engines.reference.token_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import (
    line_search_scale,
    nearest_output_value,
    polyak_scale_at,
)
from recollect.choices.autograd import inner_leaves
from recollect.engines.common.problem import as_matrix

if TYPE_CHECKING:
    from recollect.engines.reference.token_loop import TokenLoop

__all__ = ["batch_weights", "line_search_length", "normalized_gradients"]


def normalized_gradients(
    loop: TokenLoop, W: Sequence[Tensor], j: int, *, has_split_error: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the split gradients of token j with each association scaled by its ρ."""
    window = loop.tokens.in_window(j)
    weights = loop.weight(j)  # [B, 1 or H, m]
    A, link_gates = loop.linearization_point
    target = loop.recipe.bias.target
    assert target is not None  # checked by requires()
    totals = [torch.zeros_like(w) for w in W], [torch.zeros_like(w) for w in W]
    for m, i in enumerate(range(window.start, window.stop, window.step)):
        own_gradients = loop.gradients(W, j, association=i)
        raw, phi, v = (
            x[:, i : i + 1].transpose(1, 2) for x in (loop.tokens.k, loop.tokens.phi, loop.tokens.v)
        )
        prediction = loop.forward(W, phi, raw, loop.problem.params)
        error = loop.recipe.bias.error(
            prediction, v, loop.tokens.bias_gates(loop.recipe.bias, slice(i, i + 1))
        )
        gain = torch.stack(
            [
                loop.recipe.retention.step_gain(as_matrix(a), as_matrix(g), link_gates)
                for a, g in zip(A, own_gradients, strict=True)
            ]
        ).sum(0)
        at = (loop.recipe.memory, prediction, target * v, raw, loop.problem.params)
        rho = polyak_scale_at(*at, error=error, gain=gain.unsqueeze(-1))[:, :, 0]
        weight = weights[..., m] * rho  # [B, H]
        parts = (
            own_gradients,
            loop.gradients(W, j, without_prediction=True, association=i) if has_split_error else [],
        )
        for total, part in zip(totals, parts, strict=True):
            for index, g in enumerate(part):
                total[index] = total[index] + weight.view(*weight.shape, *(1,) * (g.dim() - 2)) * g
    return totals[0], totals[1] if has_split_error else []


def line_search_length(
    loop: TokenLoop, W: Sequence[Tensor], D: Sequence[Tensor], associations: slice, weight: Tensor
) -> Tensor:
    """Return λ ``[B, H, 1, 1]`` of direction D at W for weighted associations."""
    tokens, bias, outer = loop.tokens, loop.recipe.bias, loop.outer
    raw, phi, v = (x[:, associations].transpose(1, 2) for x in (tokens.k, tokens.phi, tokens.v))
    with torch.enable_grad():
        points = inner_leaves(W, outer=outer)
        prediction = loop.forward(points, phi, raw, loop.problem.params)
        # ⟨u, J D⟩ = ⟨Jᵀu, D⟩ is linear in u.
        u = torch.zeros_like(prediction).requires_grad_()
        pulled = torch.autograd.grad(
            prediction, points, u, create_graph=True, materialize_grads=True
        )
        total = sum((as_matrix(p) * d).sum() for p, d in zip(pulled, D, strict=True))
        assert isinstance(total, Tensor)
        (output_change,) = torch.autograd.grad(total, u, create_graph=outer, materialize_grads=True)
    direction_norm = sum(
        (d.square().sum((-2, -1)) for d in D), torch.zeros_like(output_change[:, :, 0, 0])
    )
    assert bias.target is not None
    residual = prediction - nearest_output_value(
        loop.recipe.memory, bias.target * v, raw, loop.problem.params
    )
    residual = residual if outer else residual.detach()
    return line_search_scale(residual, output_change, weight, direction_norm)[..., None, None]


def batch_weights(loop: TokenLoop, j: int) -> tuple[slice, Tensor]:
    """Return the associations of the inner batch that ends at j, and all Σ_t γ_i^(t)."""
    first = max(j - loop.b + 1, 0)
    low = loop.tokens.in_window(first).start
    parts = []
    for t in range(first, j + 1):
        weight = loop.weight(t) * loop.tokens.valid[:, None, t : t + 1]
        start = loop.tokens.in_window(t).start
        parts.append(torch.nn.functional.pad(weight, (start - low, j - t)))
    return slice(low, j + 1), torch.stack(parts).sum(0)
