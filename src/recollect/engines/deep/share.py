"""Scale ρ of a normalised step: one per association, from the factors of its gradients.

    ρ = ⟨e, g⟩ / (Σ_l ⟨G_l, J_l G_l⟩ + ε|g|²),    G_l = Σ_a δ_la h_laᵀ over the map's applications

(`recollect.choices.algorithm.normalized_steps.polyak_scale`). Multiplying δ by ρ scales the
gradients of all maps. The following passes are independent of ρ.
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
    """Step scales ρ of a recipe.

    Attributes:
        memory: memory that defines the representable outputs.
        retention: retention that defines the effect of a step of A on W.
        target: `Bias.target` of the recipe's bias.
        builds: whether the full gradients of single associations are built, because the retention
            has no closed form.
    """

    memory: Memory
    retention: Retention
    target: float
    builds: bool

    @classmethod
    def of(cls, recipe: Recipe, target: float) -> Normalizer:
        """Return the normalizer of a recipe with a target of its bias."""
        retention = recipe.retention
        is_overridden = type(retention).rank_one_step_gain is not Retention.rank_one_step_gain
        builds = retention.link_lipschitz is None and not is_overridden
        return cls(memory=recipe.memory, retention=retention, target=target, builds=builds)

    def representable_target(self, v: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return `nearest_output_value` of ``v [B, H, R, V]``, the target of a normalised step."""
        return nearest_output_value(self.memory, self.target * v, raw, params)

    def shares(
        self,
        slopes: Slopes,
        points: Points,
        A: Sequence[Tensor],  # dual weights of W°, [P, out, in]
        params: Mapping[str, Tensor],
        numbers: Mapping[str, Tensor],  # hyperparameters of the link, [B, H, 1, 1]
    ) -> Tensor:
        """Return ρ ``[P, R]``."""
        B, H, R = slopes.error.shape[:3]
        gain: Tensor | None = None
        for a, one in zip(A, slopes.factors, strict=True):
            map_gain = self._gain(a.unflatten(0, (B, H)), one, R, numbers)
            gain = map_gain if gain is None else gain + map_gain
        assert gain is not None  # a memory has at least one map
        value = points.representable_target
        if value is None:
            value = self.representable_target(points.v, points.raw, params)
        above = correctable_error(self.memory, slopes.prediction - value, slopes.error)
        if torch.is_grad_enabled():
            return polyak_scale(above, slopes.error, gain).flatten(0, 1)
        # Equivalent with fewer operations: a zero denominator implies a zero numerator.
        size = torch.linalg.vector_norm(slopes.error, dim=-1)
        below = torch.addcmul(gain, size, size, value=EPS).clamp_min_(torch.finfo(gain.dtype).tiny)
        return above.div_(below).flatten(0, 1)

    def _gain(self, A: Tensor, one: Factors, R: int, numbers: Mapping[str, Tensor]) -> Tensor:
        """Return ⟨G, J G⟩ of one map, ``[B, H, R]``."""
        h, delta = (x.unflatten(0, A.shape[:2]) for x in (one.h, one.delta))
        if h.shape[2] == R:
            gain = self.retention.rank_one_step_gain(A, h, delta, numbers)
            if gain is not None:
                return gain
        G: Tensor | None = None
        for grads, inputs in zip(delta.split(R, dim=2), h.split(R, dim=2), strict=True):
            part = grads.unsqueeze(-1) * inputs.unsqueeze(-2)
            G = part if G is None else G + part
        assert G is not None
        per_association = {name: x.unsqueeze(2) for name, x in numbers.items()}
        return self.retention.step_gain(A.unsqueeze(2), G, per_association)


def normalizer_of(recipe: Recipe) -> Normalizer | None:
    """Return the normalizer of a recipe, or ``None`` if its algorithm has none."""
    target = recipe.bias.target
    if not recipe.algorithm.uses_normalized_steps or target is None:
        return None
    return Normalizer.of(recipe, target)


def scaled_by(factors: Sequence[Factors], rho: Tensor) -> list[Factors]:
    """Multiply δ of every application of a map by ρ ``[P, R]``."""
    scaled: list[Factors] = []
    for one in factors:
        times = one.delta.shape[1] // rho.shape[1]
        each = rho if times == 1 else torch.cat([rho] * times, dim=1)
        scaled.append(Factors(one.h, one.delta * each.unsqueeze(-1)))
    return scaled
