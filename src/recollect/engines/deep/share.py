"""The share of a normalised step: ρ of every association from the factors of its gradients.

    ρ = ⟨e, g⟩ / (Σ_l ⟨G_l, J_l G_l⟩ + ε|g|²),    G_l = Σ_a δ_la h_laᵀ over the map's applications

(`recollect.choices.algorithm.normalized_steps.polyak_scale`). Scaling δ by it scales the gradients
of all maps, so
that the passes which follow know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import (
    EPS,
    correctable_error,
    nearest_output_value,
    polyak_scale,
)
from recollect.choices.memory.base import Memory
from recollect.choices.retention.base import Retention
from recollect.engines.deep.gradient_factors import Factors, Points, Slopes

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Normalizer", "normalizer_of", "scaled_by"]


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """What decides the shares of a recipe.

    Attributes:
        memory: answers what of a value it can say.
        retention: answers what a step of A does to W. target: of the bias, `Bias.target`.
        builds: whether gradients of single associations are built, for want of a short form.
    """

    memory: Memory
    retention: Retention
    target: float
    builds: bool

    @classmethod
    def of(cls, recipe: Recipe, target: float) -> Normalizer:
        """What a recipe's memory and retention and its bias's target make of it."""
        retention = recipe.retention
        is_overridden = type(retention).rank_one_step_gain is not Retention.rank_one_step_gain
        builds = retention.link_lipschitz is None and not is_overridden
        return cls(memory=recipe.memory, retention=retention, target=target, builds=builds)

    def said(self, v: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return `nearest_output_value` of ``v``, the target of a normalised step.

        Args:
            v: ``[B, H, R, V]``. raw: keys before features. params: of the memory.
        """
        return nearest_output_value(self.memory, self.target * v, raw, params)

    def shares(
        self,
        slopes: Slopes,
        points: Points,
        A: Sequence[Tensor],
        params: Mapping[str, Tensor],
        numbers: Mapping[str, Tensor],
    ) -> Tensor:
        """ρ ``[P, R]``.

        Args:
            slopes: factors, predictions and errors of the associations.
            points: the associations.
            A: the dual weights that W° came from, ``[P, out, in]``.
            params: of the memory.
            numbers: of the link, ``[B, H, 1, 1]`` by name.
        """
        B, H, R = slopes.error.shape[:3]
        gain: Tensor | None = None
        for a, one in zip(A, slopes.factors, strict=True):
            own = self._gain(a.unflatten(0, (B, H)), one, R, numbers)
            gain = own if gain is None else gain + own
        assert gain is not None  # a memory has a map
        value = points.said
        if value is None:
            value = self.said(points.v, points.raw, params)
        above = correctable_error(self.memory, slopes.prediction - value, slopes.error)
        if torch.is_grad_enabled():
            return polyak_scale(above, slopes.error, gain).flatten(0, 1)
        # The same in fewer operations: where nothing is below there is nothing above.
        size = torch.linalg.vector_norm(slopes.error, dim=-1)
        below = torch.addcmul(gain, size, size, value=EPS).clamp_min_(torch.finfo(gain.dtype).tiny)
        return above.div_(below).flatten(0, 1)

    def _gain(self, A: Tensor, one: Factors, R: int, numbers: Mapping[str, Tensor]) -> Tensor:
        """⟨G, J G⟩ of one map, ``[B, H, R]``."""
        h, delta = (x.unflatten(0, A.shape[:2]) for x in (one.h, one.delta))
        if h.shape[2] == R:
            gain = self.retention.rank_one_step_gain(A, h, delta, numbers)
            if gain is not None:
                return gain
        G: Tensor | None = None
        for left, right in zip(delta.split(R, dim=2), h.split(R, dim=2), strict=True):
            part = left.unsqueeze(-1) * right.unsqueeze(-2)
            G = part if G is None else G + part
        assert G is not None
        own = {name: x.unsqueeze(2) for name, x in numbers.items()}
        return self.retention.step_gain(A.unsqueeze(2), G, own)


def normalizer_of(recipe: Recipe) -> Normalizer | None:
    """What scales gradients, where the algorithm does.

    Args:
        recipe: whose algorithm.
    """
    target = recipe.bias.target
    if not recipe.algorithm.uses_normalized_steps or target is None:
        return None
    return Normalizer.of(recipe, target)


def scaled_by(factors: Sequence[Factors], rho: Tensor) -> list[Factors]:
    """The factors with ρ ``[P, R]`` in δ, of every application of a map."""
    made: list[Factors] = []
    for one in factors:
        times = one.delta.shape[1] // rho.shape[1]
        each = rho if times == 1 else torch.cat([rho] * times, dim=1)
        made.append(Factors(one.h, one.delta * each.unsqueeze(-1)))
    return made
