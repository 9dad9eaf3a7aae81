"""The function after the last map of a chain: a residual or a norm, and the loss.

With z the output of the last map,

    M = finish(z, k),    g = ∂ℓ/∂M,    δ_L = (∂M/∂z)ᵀ g,    N = ⟨e, g⟩

(`Stack.output_map`; a normalized step needs N). `forward` and `backward` contain the equations of
the maps. A member defines the function after the maps, which has one entry per value channel.
Autograd computes its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import correctable_error, nearest_output_value
from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack

__all__ = ["HeadGradients", "OutputHead", "affine_coefficients"]

Values = Mapping[str, Tensor]


def affine_coefficients(
    memory: Stack, bias: Bias, target: float | None
) -> tuple[float, float] | None:
    """Return `OutputHead.affine` for the attributes of an output head."""
    bounded = target is not None and memory.bounded
    return None if memory.has_output_map or bounded else bias.affine


@dataclass(frozen=True, kw_only=True)
class HeadGradients:
    """Gradients at the output head, ``[P, R, V]``.

    Attributes:
        memory: Memory of the output head.
        delta: δ_L.
        error: g.
        target_error: e with step scales, else ``None``.
    """

    memory: Stack
    delta: Tensor
    error: Tensor
    target_error: Tensor | None

    def alignment(self) -> Tensor:
        """Return N ``[P, R]`` with step scales."""
        assert self.target_error is not None
        return correctable_error(self.memory, self.target_error, self.error)


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Output head of a memory with H heads, and the loss.

    Attributes:
        memory: Memory with `Stack.output_map` and the bounds of its outputs.
        bias: Loss.
        heads: Number of heads H.
        target: `Bias.target` with step scales, else ``None``.
    """

    memory: Stack
    bias: Bias
    heads: int
    target: float | None

    @property
    def residual(self) -> bool:
        """Whether the prediction contains the key."""
        return self.memory.residual

    @property
    def affine(self) -> tuple[float, float] | None:
        """a and b if δ_L = a (z + k) − b v and e = g/a, without k if there is no residual."""
        return affine_coefficients(self.memory, self.bias, self.target)

    @property
    def layer_norm(self) -> bool:
        """Whether the head is a layer norm with an affine error, as in `layer_norm`.

        Step scales require `nearest_value` and e as a function of g.
        """
        affine = self.bias.affine
        if self.memory.output_norm != "layer" or affine is None:
            return False
        return self.target is None or (self.memory.bounded and affine[0] != 0)

    def finish(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
        """Return M ``[..., P, R, V]``.

        Args:
            z: Outputs of the last map, ``[..., P, R, V]``.
            raw: Keys or queries before the feature map.
            params: Learned parameters of the memory.
        """
        if not self.memory.has_output_map:  # equal for all heads
            return self.memory.output_map(z, raw, params)
        parts = [x.reshape(-1, self.heads, *x.shape[-2:]) for x in (z, raw)]
        return self.memory.output_map(parts[0], parts[1], params).reshape(z.shape)

    def nearest_value(self, v: Tensor, raw: Tensor, params: Values) -> Tensor | None:
        """Return the closest outputs to values ``[..., P, R, V]``.

        The result is ``None`` without step scales, and if the memory can output every value.

        Args:
            v: Values.
            raw: Keys before the feature map.
            params: Learned parameters of the memory.
        """
        if self.target is None or not self.memory.bounded:
            return None
        parts = [x.reshape(-1, self.heads, *x.shape[-2:]) for x in (self.target * v, raw)]
        return nearest_output_value(self.memory, parts[0], parts[1], params).reshape(v.shape)

    def head_inputs(self, v: Tensor, raw: Tensor, params: Values) -> dict[str, Tensor]:
        """Return the inputs of `gradients`; arguments as in `nearest_value`."""
        inputs, nearest_value = {"raw": raw, "v": v}, self.nearest_value(v, raw, params)
        return inputs if nearest_value is None else {**inputs, "nearest_value": nearest_value}

    def gradients(
        self, z: Tensor, head_inputs: Values, gates: Values, params: Values, *, create_graph: bool
    ) -> HeadGradients:
        """Return δ_L, g and e.

        Args:
            z: Outputs of the last map, ``[P, R, V]``.
            head_inputs: ``"v"``, ``"raw"`` and, if it is not ``None``, ``"nearest_value"``.
            gates: Hyperparameters of the loss, ``[P, R, 1 or V]``.
            params: Learned parameters of the memory.
            create_graph: Whether the gradients are differentiated again.
        """
        raw, v = head_inputs["raw"], head_inputs["v"]
        if not self.memory.has_output_map:
            prediction = self.memory.output_map(z, raw, params)
            delta = error = self.bias.error(prediction, v, gates)
        else:
            if not create_graph:
                z, raw = z.detach(), raw.detach()
                params = {name: x.detach() for name, x in params.items()}
            with torch.enable_grad():
                z = z if z.requires_grad else z.detach().requires_grad_()
                prediction = self.finish(z, raw, params)
                error = self.bias.error(
                    prediction if create_graph else prediction.detach(), v, gates
                )
                (delta,) = torch.autograd.grad(prediction, z, error, create_graph=create_graph)
            if not create_graph:
                prediction, error, delta = prediction.detach(), error.detach(), delta.detach()
        target_error = None
        if self.target is not None:
            value = head_inputs.get("nearest_value")
            if value is None:
                value = v if self.target == 1 else self.target * v
            target_error = prediction - value
        return HeadGradients(
            memory=self.memory, delta=delta, error=error, target_error=target_error
        )
