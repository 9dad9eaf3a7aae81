"""Line search: the step length λ along directions of all maps (`Algorithm.uses_line_search`).

The change of a prediction along a direction D needs only one product with D. For a gradient u of
the prediction, ⟨u, J D⟩ = Σ_l ⟨δ_l(u), D_l h_l⟩ over the maps' applications. It is linear in u.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import line_search_scale, nearest_output_value
from recollect.choices.autograd import CustomFunction
from recollect.choices.memory.base import Stack
from recollect.engines.deep.gradient_factors import Points
from recollect.engines.deep.step_coefficients import window_rows

__all__ = ["LineSearch", "by_step", "squared"]


@dataclass(frozen=True, kw_only=True)
class LineSearch:
    """Associations of steps with a line search, at weights W°.

    Attributes:
        memory: memory whose program runs.
        W: weights W° ``[P, out, in]``.
        points: associations ``[B, H, S m, ·]``: m for each of S steps in order.
        weight: weights of the associations ``[P, S, m]``.
        params: parameters of the memory.
        target: `Bias.target`.
        outer: whether the step length will be differentiated.
    """

    memory: Stack
    W: Sequence[Tensor]
    points: Points
    weight: Tensor
    params: Mapping[str, Tensor]
    target: float
    outer: bool

    def step_length(self, D: Sequence[Tensor]) -> Tensor:
        """Return λ ``[P, S]`` of directions ``[P, S, out, in]`` per map."""
        S = self.weight.shape[1]
        rows = [d.flatten(0, 1) for d in D]
        calls: list[tuple[Tensor, Tensor]] = []
        weights = self.W if self.outer else [w.detach() for w in self.W]
        with torch.enable_grad():

            def apply(index: int, h: Tensor) -> Tensor:
                z = torch.bmm(h.flatten(0, 1), weights[index].mT).unflatten(0, h.shape[:2])
                if not z.requires_grad:
                    z.requires_grad_()
                each = h.flatten(0, 1).unflatten(1, (S, -1)).flatten(0, 1)
                change = torch.bmm(each, rows[index].mT)
                calls.append((z, change.view_as(z)))
                return z

            points = self.points
            prediction = self.memory.compute(apply, points.phi, points.raw, self.params)
            u = torch.zeros_like(prediction).requires_grad_()
            deltas = torch.autograd.grad(
                prediction, [z for z, _ in calls], u, create_graph=True, materialize_grads=True
            )
            # A view separates δ from u: for a map whose output is the prediction, δ is u itself.
            deltas = tuple(d.view_as(d) for d in deltas)
            (change,) = torch.autograd.grad(
                deltas, u, [m for _, m in calls], create_graph=self.outer, materialize_grads=True
            )
        error = prediction - nearest_output_value(
            self.memory, self.target * points.v, points.raw, self.params
        )
        if not self.outer:
            error, change = error.detach(), change.detach()

        def split_steps(x: Tensor) -> Tensor:  # [B, H, S m, V] -> [P, S, m, V]
            return x.flatten(0, 1).unflatten(1, (S, -1))

        size = sum((squared(d) for d in D), torch.zeros_like(self.weight[..., 0]))
        return line_search_scale(split_steps(error), split_steps(change), self.weight, size)


class _Squared(CustomFunction):
    """‖X‖² of ``X [..., s, l]`` without the intermediate X ⊙ X, forward and backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        return torch.linalg.vector_norm(X, dim=(-2, -1)).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return (2 * above[0])[..., None, None] * X

    @staticmethod
    def jvp(ctx: Any, *moved: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return 2 * (X * moved[0]).sum((-2, -1))


def squared(X: Tensor) -> Tensor:
    """Return ‖X‖² ``[...]``."""
    # Compilers do not support jvp of a custom function.
    if torch.compiler.is_compiling():
        return X.square().sum((-2, -1))
    return cast(Tensor, _Squared.apply(X))


def by_step(points: Points, n: int, c: int) -> Points:
    """Gather the associations of every step in order of its window: ``[B, H, n c, ·]``."""
    if c == 1:
        return points

    def rows(x: Tensor) -> Tensor:
        return window_rows(x, n, c)

    gates = {name: rows(x) for name, x in points.gates.items()}
    return Points(phi=rows(points.phi), raw=rows(points.raw), v=rows(points.v), gates=gates)
