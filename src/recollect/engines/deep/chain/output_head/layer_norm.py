"""A layer norm after the last map with an affine error, and its gradient, in few operations.

The error is a M − b v. With n and r the norm's unit output and scale, and w and β its weight and
bias, the derivative J = ∂n/∂z = r (1 − mean − n mean(n ·)) is symmetric:

    M = k + w ⊙ n + β,    g = a M − b v,    s = w ⊙ g,    δ_L = J s,    N = ⟨e, g⟩,  e = M − v̂

Here v̂ is the closest output to a value. Without a residual, M does not contain k.

In the backward pass, with the gradients δ̄, N̄ = π/N and ḡ = 2εQ̄ g (`step_scales`):

    s̄ = J δ̄,    ḡ_t = w ⊙ s̄ + N̄ e + ḡ,    M̄ = a ḡ_t + N̄ g,    k̄ = β̄ = M̄,    v̄ = −b ḡ_t
    w̄ = g ⊙ s̄ + n ⊙ M̄,    v̂̄ = −N̄ g
    z̄ = J (w ⊙ M̄ − r mean(s ⊙ n) δ̄ − r mean(δ̄ ⊙ n) s) − r mean(δ̄ ⊙ δ_L) n
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.memory.norms import NORM_EPS, layer_norm_vjp
from recollect.engines.deep.chain.output_head.head import HeadGradients, OutputHead

__all__ = ["LayerNormBackward", "LayerNormHead"]

Values = Mapping[str, Tensor]


def _per_matrix(x: Tensor, like: Tensor) -> Tensor:
    """Expand a parameter ``[H, V]`` to ``[P, 1, V]`` in the type of ``like``."""
    P = like.shape[-3]
    return x.to(like.dtype).expand(P // len(x), *x.shape).reshape(P, 1, -1)


def _normalize(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return n, the mean and r of z."""
    return torch.native_layer_norm(z, z.shape[-1:], None, None, NORM_EPS)


class LayerNormHead:
    """`OutputHead.gradients` of single batches, without a graph."""

    def __init__(self, output_head: OutputHead, head_inputs: Values, params: Values) -> None:
        """Precompute the terms of all batches.

        Args:
            output_head: Layer norm (`OutputHead.layer_norm`).
            head_inputs: Inputs of `OutputHead.gradients` for all batches, ``[N, P, R, ·]``.
            params: Learned parameters of the memory.
        """
        assert output_head.bias.affine is not None
        self.memory, (self.a, b), v = output_head.memory, output_head.bias.affine, head_inputs["v"]
        self.weight = _per_matrix(params["norm_weight"], v)
        if self.a == 0:
            self.offset = -b * v
        else:  # g = offset + a w ⊙ n
            center = _per_matrix(params["norm_bias"], v)
            center = center + head_inputs["raw"] if output_head.residual else center
            self.offset = torch.sub(center if self.a == 1 else self.a * center, v, alpha=b)
            self.scale = self.weight if self.a == 1 else self.a * self.weight
        self.target_offset: Tensor | None = None
        if output_head.target is not None:  # e = target_offset + g/a
            self.target_offset = (v if b == self.a else (b / self.a) * v) - head_inputs[
                "nearest_value"
            ]

    def error(self, unit: Tensor, offset: Tensor) -> Tensor:
        """Return g from n and ``offset``."""
        return offset if self.a == 0 else torch.addcmul(offset, unit, self.scale)

    def target_error(self, g: Tensor, target_offset: Tensor) -> Tensor:
        """Return e from g and ``target_offset``."""
        return torch.add(target_offset, g, alpha=1 / self.a)

    def gradients(self, z: Tensor, n: int) -> HeadGradients:
        """Return δ_L, g and e of batch n from the last map's outputs ``[P, R, V]``."""
        unit, mean, r = _normalize(z)
        g = self.error(unit, self.offset[n])
        delta = layer_norm_vjp(g * self.weight, z, mean, r)
        target_error = (
            None if self.target_offset is None else self.target_error(g, self.target_offset[n])
        )
        return HeadGradients(memory=self.memory, delta=delta, error=g, target_error=target_error)


class LayerNormBackward:
    """Backward pass of `LayerNormHead`: z̄ per batch, then the other gradients."""

    def __init__(
        self,
        output_head: OutputHead,
        head_inputs: Values,
        params: Values,
        z: Tensor,
        step_scales: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Precompute the terms of all batches.

        Args:
            output_head: As in `LayerNormHead`.
            head_inputs: As in `LayerNormHead`.
            params: As in `LayerNormHead`.
            z: Outputs of the last map, ``[N, P, R, V]``.
            step_scales: With step scales, N̄ and ḡ/g per unit of π, ``[N, P, R, 1]``.
        """
        self.output_head, self.params, head = (
            output_head,
            params,
            LayerNormHead(output_head, head_inputs, params),
        )
        assert output_head.bias.affine is not None
        (self.a, self.b), self.weight, V = output_head.bias.affine, head.weight, z.shape[-1]
        unit, mean, r = _normalize(z)
        g = head.error(unit, head.offset)
        s = g * head.weight
        self.unit, self.g = unit, g
        self.stats = [x.unbind(0) for x in (z, mean, r)]
        # Factors of δ̄, mean(δ̄ ⊙ n) and mean(δ̄ ⊙ δ_L) in z̄.
        of_grad = -r * (s * unit).mean(-1, keepdim=True)
        scale = -r / V
        self.projection_factors = [x.unbind(0) for x in (of_grad, scale * s, scale * unit)]
        self.projections = torch.stack([unit, layer_norm_vjp(s, z, mean, r)], dim=-2).unbind(0)
        self.step_scales: list[tuple[Tensor, ...]] | None = None
        self.to_nearest: Tensor | None = None
        if step_scales is not None and head.target_offset is not None:
            to_alignment, to_g = step_scales
            self.to_nearest = to_alignment * g  # per unit of π
            error = (to_alignment * head.target_error(g, head.target_offset)).addcmul_(to_g, g)
            self.step_scales = [x.unbind(0) for x in (error, self.to_nearest)]
        self.grads: dict[int, tuple[Tensor, ...]] = {}

    def backward(self, n: int, grad_delta: Tensor, pi: Tensor | None, out: Tensor) -> None:
        """Write z̄ of batch n to ``out``.

        Args:
            n: Index of the batch.
            grad_delta: δ̄ ``[P, R, V]``.
            pi: π ``[P, R]`` with step scales.
            out: Output tensor.
        """
        stats, grad_delta = [x[n] for x in self.stats], grad_delta.contiguous()
        of_grad, of_unit, of_delta = (x[n] for x in self.projection_factors)
        to_s = layer_norm_vjp(grad_delta, *stats)
        to_g = to_s * self.weight
        if self.step_scales is None or pi is None:
            to_M = to_g if self.a == 1 else self.a * to_g
        else:
            scale = pi.unsqueeze(-1)
            to_g.addcmul_(self.step_scales[0][n], scale)
            to_M = torch.addcmul(
                to_g if self.a == 1 else self.a * to_g, self.step_scales[1][n], scale
            )
        unit, delta = (
            (self.projections[n] * grad_delta.unsqueeze(-2)).sum(-1, keepdim=True).unbind(-2)
        )
        inner = (to_M * self.weight).addcmul_(grad_delta, of_grad).addcmul_(of_unit, unit)
        torch.addcmul(layer_norm_vjp(inner, *stats), of_delta, delta, out=out)
        self.grads[n] = to_s, to_g, to_M

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        """Return the gradients of values, raw keys, nearest values and parameters, by name.

        Args:
            needs: Whether a gradient is needed, by name.
            pi: π of all batches ``[N, P, R]`` with step scales.
        """
        each = zip(*(self.grads[n] for n in range(len(self.grads))), strict=True)
        to_s, to_g, to_M = map(torch.stack, each)
        token_grads = {"v": -self.b * to_g}
        if self.output_head.residual:
            token_grads["raw"] = to_M
        if self.to_nearest is not None and pi is not None:
            token_grads["nearest_value"] = -pi.unsqueeze(-1) * self.to_nearest
        grads = {name: x for name, x in token_grads.items() if needs[name]}
        totals = {"norm_weight": self.g * to_s + self.unit * to_M, "norm_bias": to_M}
        for name, x in self.params.items():
            if name in totals and needs[f"param {name}"]:
                total = totals[name].sum((0, 2)).unflatten(0, (-1, len(x)))
                grads[f"param {name}"] = total.sum(0).to(x.dtype)
        return grads
