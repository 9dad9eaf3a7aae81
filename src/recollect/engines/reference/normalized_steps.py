"""The reference's normalised steps: shares of single associations, and searched lengths.

Both in full matrices and by autograd, as in `recollect.engines.reference.token_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import (
    line_search_scale,
    nearest_output_value,
    polyak_scale_at,
)
from recollect.choices.autograd import inner_leaves
from recollect.choices.memory.base import Forward
from recollect.engines.common.problem import Problem, Tokens, Weights, as_matrix
from recollect.recipe.recipe import Recipe

__all__ = ["Loop", "normalized_gradients", "searched", "weight_of_batch"]


class Loop(Protocol):
    """What is asked of a loop over tokens: see `TokenLoop`."""

    recipe: Recipe
    problem: Problem
    tokens: Tokens
    forward: Forward
    outer: bool
    b: int
    c: int
    origin: tuple[Weights, dict[str, Tensor]]

    def gradients(
        self, W: Sequence[Tensor], j: int, prediction_free: bool = False, only: int | None = None
    ) -> list[Tensor]: ...
    def weight(self, j: int, low: int | None = None) -> Tensor: ...


def normalized_gradients(
    loop: Loop, W: Sequence[Tensor], j: int, *, splits: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The same with each association's gradient scaled by its share, one after another."""
    low = max(j - loop.c + 1, 0)
    A, numbers = loop.origin
    target = loop.recipe.bias.target
    assert target is not None  # requires() asks for one
    totals = [torch.zeros_like(w) for w in W], [torch.zeros_like(w) for w in W]
    for i in range(low, j + 1):
        whole = loop.gradients(W, j, only=i)
        raw, phi, v = (
            x[:, i : i + 1].transpose(1, 2) for x in (loop.tokens.k, loop.tokens.phi, loop.tokens.v)
        )
        prediction = loop.forward(W, phi, raw, loop.problem.params)
        error = loop.recipe.bias.error(
            prediction, v, loop.tokens.numbers_of(loop.recipe.bias, i, i + 1)
        )
        gain = torch.stack(
            [
                loop.recipe.retention.step_gain(as_matrix(a), as_matrix(g), numbers)
                for a, g in zip(A, whole, strict=True)
            ]
        ).sum(0)
        at = (loop.recipe.memory, prediction, target * v, raw, loop.problem.params)
        rho = polyak_scale_at(*at, error=error, gain=gain.unsqueeze(-1))[:, :, 0]
        weight = loop.weight(j, low)[..., i - low] * rho  # [B, H]
        parts = (whole, loop.gradients(W, j, prediction_free=True, only=i) if splits else [])
        for total, part in zip(totals, parts, strict=True):
            for index, g in enumerate(part):
                total[index] = total[index] + weight.view(*weight.shape, *(1,) * (g.dim() - 2)) * g
    return totals[0], totals[1] if splits else []


def searched(
    loop: Loop, W: Sequence[Tensor], D: Sequence[Tensor], j: int, low: int, weight: Tensor
) -> Tensor:
    """λ ``[B, H, 1, 1]`` of direction D at W, for associations ``low`` to j of that weight."""
    tokens, bias, outer = loop.tokens, loop.recipe.bias, loop.outer
    raw, phi, v = (x[:, low : j + 1].transpose(1, 2) for x in (tokens.k, tokens.phi, tokens.v))
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
        (moved,) = torch.autograd.grad(total, u, create_graph=outer, materialize_grads=True)
    size = sum((d.square().sum((-2, -1)) for d in D), torch.zeros_like(moved[:, :, 0, 0]))
    assert bias.target is not None
    along = prediction - nearest_output_value(
        loop.recipe.memory, bias.target * v, raw, loop.problem.params
    )
    along = along if outer else along.detach()
    return line_search_scale(along, moved, weight, size)[..., None, None]


def weight_of_batch(loop: Loop, j: int) -> tuple[int, Tensor]:
    """The first association of an inner batch that ends at j, and Σ_t γ_i^(t) of all."""
    first = max(j - loop.b + 1, 0)
    low = max(first - loop.c + 1, 0)
    parts = []
    for t in range(first, j + 1):
        start = max(t - loop.c + 1, 0)
        weight = loop.weight(t, start)
        weight = weight * loop.tokens.valid[:, None, t : t + 1]
        parts.append(torch.nn.functional.pad(weight, (start - low, j - t)))
    return low, torch.stack(parts).sum(0)
