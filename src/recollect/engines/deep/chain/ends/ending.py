"""What follows the last map of a chain: a residual or a norm, the loss, what shares ask of them.

With z what the last map says,

    M = finish(z, k),    g = ∂ℓ/∂M,    δ_L = (∂M/∂z)ᵀ g,    N = ⟨e, g⟩

(`Stack.output_map`; a normalised step needs N). Maps are written out in `forward` and `backward`. A
member defines the function after the maps, of one number per value channel: autograd takes its
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import correctable_error, nearest_output_value
from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack

__all__ = ["End", "Ending", "affine_of"]

Values = Mapping[str, Tensor]


def affine_of(memory: Stack, bias: Bias, target: float | None) -> tuple[float, float] | None:
    """`Ending.affine`; arguments as there."""
    bounded = target is not None and memory.bounded
    return None if memory.has_output_map or bounded else bias.affine


@dataclass(frozen=True, kw_only=True)
class End:
    """Of associations: δ_L, g and, where steps are normalised, e, ``[P, R, V]``."""

    memory: Stack
    delta: Tensor
    error: Tensor
    away: Tensor | None

    def above(self) -> Tensor:
        """N ``[P, R]``, where steps are normalised."""
        assert self.away is not None
        return correctable_error(self.memory, self.away, self.error)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a memory of H heads, under a loss.

    Attributes:
        memory: answers `Stack.output_map`, and what of a value can be said where it is bounded.
        bias: the loss. heads: H.
        target: `Bias.target` where every association is scaled by its share, else ``None``.
    """

    memory: Stack
    bias: Bias
    heads: int
    target: float | None

    @property
    def residual(self) -> bool:
        """Whether the key itself is part of the prediction."""
        return self.memory.residual

    @property
    def affine(self) -> tuple[float, float] | None:
        """a and b where δ_L is a (z + k) − b v, with k where there is a residual, and e is g/a."""
        return affine_of(self.memory, self.bias, self.target)

    @property
    def layer_norm(self) -> bool:
        """Whether it is a layer norm under an affine error, which `norm` writes out.

        Under shares that asks what of a value can be said (`said`), and e of g.
        """
        affine = self.bias.affine
        if self.memory.output_norm != "layer" or affine is None:
            return False
        return self.target is None or (self.memory.bounded and affine[0] != 0)

    def finish(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
        """M ``[..., P, R, V]``.

        Args:
            z: what the last map says, ``[..., P, R, V]``.
            raw: keys or queries before features. params: the memory's.
        """
        if not self.memory.has_output_map:  # heads are all alike
            return self.memory.output_map(z, raw, params)
        parts = [x.reshape(-1, self.heads, *x.shape[-2:]) for x in (z, raw)]
        return self.memory.output_map(parts[0], parts[1], params).reshape(z.shape)

    def said(self, v: Tensor, raw: Tensor, params: Values) -> Tensor | None:
        """What of values can be said ``[..., P, R, V]``; ``None`` where nobody asks, or all can.

        Args:
            v: the values. raw: keys before features. params: the memory's.
        """
        if self.target is None or not self.memory.bounded:
            return None
        parts = [x.reshape(-1, self.heads, *x.shape[-2:]) for x in (self.target * v, raw)]
        return nearest_output_value(self.memory, parts[0], parts[1], params).reshape(v.shape)

    def given(self, v: Tensor, raw: Tensor, params: Values) -> dict[str, Tensor]:
        """What `of` is given of associations; arguments as in `said`."""
        found, said = {"raw": raw, "v": v}, self.said(v, raw, params)
        return found if said is None else {**found, "said": said}

    def of(self, z: Tensor, given: Values, gates: Values, params: Values, *, outer: bool) -> End:
        """δ_L, g and e.

        Args:
            z: what the last map says, ``[P, R, V]``.
            given: ``"v"``, ``"raw"`` (keys before features) and, where `said` is not ``None``, that
                as ``"said"``.
            gates: the bias's numbers ``[P, R, 1 or V]``. params: the memory's.
            outer: whether they will be differentiated again.
        """
        raw, v = given["raw"], given["v"]
        if not self.memory.has_output_map:
            prediction = self.memory.output_map(z, raw, params)
            delta = error = self.bias.error(prediction, v, gates)
        else:
            if not outer:
                z, raw = z.detach(), raw.detach()
                params = {name: x.detach() for name, x in params.items()}
            with torch.enable_grad():
                z = z if z.requires_grad else z.detach().requires_grad_()
                prediction = self.finish(z, raw, params)
                error = self.bias.error(prediction if outer else prediction.detach(), v, gates)
                (delta,) = torch.autograd.grad(prediction, z, error, create_graph=outer)
            if not outer:
                prediction, error, delta = prediction.detach(), error.detach(), delta.detach()
        away = None
        if self.target is not None:
            value = given.get("said")
            if value is None:
                value = v if self.target == 1 else self.target * v
            away = prediction - value
        return End(memory=self.memory, delta=delta, error=error, away=away)
