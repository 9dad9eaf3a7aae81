"""Retention by an f-divergence: the step reweights W, and a multiplier preserves its sum.

The member rebuilds A from W at every token, so it overrides ``advance``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.equation_terms import Term, Terms, format_number, render_sum
from recollect.choices.member import member
from recollect.choices.retention.base import Decay, Retention, Values
from recollect.choices.retention.links import DIMS, decay_axis_conflicts
from recollect.choices.retention.multiplier import normalization_multiplier, weighted
from recollect.fields import number, option, slot
from recollect.numerics import safe_pow

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["FDivergence"]


# g = (f')⁻¹, and y* = f'(1) with g(y*) = 1. Outside its domain g is +inf, its limit.
_DIVERGENCES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "kl": (lambda y: (y - 1).exp(), 1.0),
    "reverse_kl": (lambda y: torch.where(y < 0, -1 / torch.where(y < 0, y, -1.0), torch.inf), -1.0),
    "hellinger": (
        lambda y: torch.where(y < 1, (1 - torch.where(y < 1, y, 0.0)).pow(-2), torch.inf),
        0.0,
    ),
    "chi_square": (lambda y: functional.relu(1 + 0.5 * y), 0.0),
}


@member
class FDivergence(Retention):
    """W_t = W̄ ⊙ g(−ζ − η∇), ζ such that ‖W_t‖₁ = c (MIRAS 18), rebuilt from W.

    g = (f')⁻¹. With a decay, W̄ = c·W_{t−1}^α/‖W_{t−1}^α‖₁, so that f = KL is exactly `Simplex`'s
    recurrence. The state A is W itself. The initial measure is c|A₀|/‖A₀‖₁ (uniform if A₀ = 0).

    Args:
        kind: ``"kl"`` f = τ ln τ, ``"reverse_kl"`` −ln τ, ``"hellinger"`` (√τ − 1)²,
            ``"chi_square"`` (τ − 1)² (attains exact zeros).
        scale: c.
        axis: ``"in"``: each row is a measure; ``"out"``: each column; ``"all"``: the whole matrix
            of each map, as in MIRAS 18.

    Examples:
        >>> recipe = rc.Recipe(
        ...     retention=rc.retention.FDivergence(kind="hellinger"),
        ...     algorithm=rc.algorithm.GradientDescent(lr=0.1),
        ... )
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> state.weights[0].sum(-1).allclose(torch.ones(1, 2, 8), atol=1e-4)  # rows are measures
        True
    """

    kind: str = option("kl", *_DIVERGENCES)
    scale: float = number(1.0, above=0)
    axis: str = option("in", "out", "all")
    decay: Decay | None = slot(None, "retention", optional=True)
    link_every: str = option("token", "batch")

    @property
    def _dim(self) -> tuple[int, ...]:
        return DIMS[self.axis]

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size = A.abs()
        total = size.sum(self._dim, keepdim=True)
        zero = total == 0
        uniform = self.scale / math.prod(A.shape[dim] for dim in self._dim)
        return torch.where(zero, uniform, self.scale * size / torch.where(zero, 1.0, total))

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        W = self.link(A, gates)
        if log_decay is not None:
            alpha = log_decay.exp().expand_as(W)
            W = safe_pow(W, alpha)
            W = self.scale * W / W.sum(self._dim, keepdim=True)
        g, unit_point = _DIVERGENCES[self.kind]
        zeta = normalization_multiplier(
            W, step, g, unit_point=unit_point, scale=self.scale, dim=self._dim
        )
        return weighted(W, g, step - zeta)

    has_link = True  # type: ignore[assignment]

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from decay_axis_conflicts(self.axis, self.decay, self.title)

    def link_text(self) -> str:
        return "A_t"

    def state_equations(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        argument = render_sum((*step, Term(("ζ_t",), -1.0)))
        if self.decay is None:
            return (f"{new} = {old} ⊙ g({argument})",)
        rate = format_number(self.decay.symbol("alpha", at))
        scale = Term((f"{old}^{rate} / ‖{old}^{rate}‖₁",)).times(self.scale)
        return (f"{new} = W̄_t ⊙ g({argument})", f"W̄_t = {scale}")

    def notes(self) -> tuple[str, ...]:
        g = {
            "kl": "exp(y − 1)",
            "reverse_kl": "−1/y",
            "hellinger": "(1 − y)⁻²",
            "chi_square": "max(1 + y/2, 0)",
        }[self.kind]
        part = {"in": "row", "out": "column", "all": "matrix"}[self.axis]
        total = format_number(self.scale)
        return (f"g(y) = {g}, ζ_t such that each {part} of the result sums to {total}",)
