"""Backward pass of an output head: from δ̄_L, and π of the step scale, to z̄.

There are three forms:

* An affine error is multiplied by a number.
* A layer norm with an affine error has its own equations (`layer_norm`).
* All other heads use autograd, one batch at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from recollect.engines.deep.chain.output_head.layer_norm import LayerNormBackward
from recollect.engines.deep.chain.trace import ChainInputs, ChainSpec

__all__ = ["HeadBackward", "make_head_backward"]


class HeadBackward(Protocol):
    """Backward pass of an output head, from the last batch to the first."""

    def backward(self, n: int, grad_delta: Tensor, pi: Tensor | None, out: Tensor) -> None:
        """Write z̄ of batch n to ``out``.

        Args:
            n: Index of the batch.
            grad_delta: δ̄ ``[P, R, V]``.
            pi: π ``[P, R]`` with step scales and an error that is not affine.
            out: Output tensor.
        """

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        """Return the gradients of the head's other inputs by name, after all batches.

        Args:
            needs: Whether a gradient is needed, by name.
            pi: π of all batches ``[N, P, R]``.
        """
        ...


def make_head_backward(
    spec: ChainSpec,
    inputs: ChainInputs,
    z: Tensor | None,
    needs: Mapping[str, bool],
    *,
    buffers: tuple[Tensor, Tensor],
    step_scales: tuple[Tensor, Tensor] | None,
) -> HeadBackward:
    """Return the backward pass of a chain's output head.

    Args:
        spec: Properties of the chain.
        inputs: Inputs of all batches.
        z: Outputs of the last map ``[N, P, R, V]`` if the error is not affine.
        needs: Whether a gradient is needed, by name.
        buffers: δ̄ and z̄ of all batches, complete after the last call of ``backward``.
        step_scales: `StepScaleGradients.head`.
    """
    if spec.output_head.affine is not None:
        return _AffineBackward(spec, *buffers)
    assert z is not None
    if spec.output_head.layer_norm:
        return LayerNormBackward(
            spec.output_head, inputs.head_inputs, inputs.params, z, step_scales
        )
    return _AutogradBackward(spec, inputs, z, needs, buffers[1], step_scales)


class _AffineBackward:
    """Backward pass of the error a z − b v or a (z + k) − b v."""

    def __init__(self, spec: ChainSpec, grad_delta: Tensor, to_z: Tensor) -> None:
        assert spec.output_head.affine is not None
        (self.a, self.b), self.residual = spec.output_head.affine, spec.output_head.residual
        self.grad_delta, self.to_z = grad_delta, to_z

    def backward(self, n: int, grad_delta: Tensor, pi: Tensor | None, out: Tensor) -> None:
        torch.mul(grad_delta, self.a, out=out)

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        grads = {"v": -self.b * self.grad_delta} if needs["v"] else {}
        if needs["raw"] and self.residual:
            grads["raw"] = self.to_z.clone()
        return grads


class _AutogradBackward:
    """Backward pass of any `OutputHead` by autograd."""

    def __init__(
        self,
        spec: ChainSpec,
        inputs: ChainInputs,
        z: Tensor,
        needs: Mapping[str, bool],
        to_z: Tensor,
        step_scales: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.output_head, self.inputs, self.z, self.step_scales = (
            spec.output_head,
            inputs,
            z,
            step_scales,
        )
        self.leaves = inputs.head_inputs | {f"gate {name}": x for name, x in inputs.gates.items()}
        self.params = {f"param {name}": x for name, x in inputs.params.items()}
        memory = spec.output_head.memory
        needed = {name: needs[name] for name in self.leaves | self.params}
        self.grad_z: Tensor | None = None
        if not memory.has_output_map:  # the key's gradient is z̄ or zero
            self.grad_z = to_z if needed.pop("raw") and memory.residual else None
        leaves = self.leaves | self.params
        self.grads = {name: torch.zeros_like(leaves[name]) for name, need in needed.items() if need}

    def backward(self, n: int, grad_delta: Tensor, pi: Tensor | None, out: Tensor) -> None:
        z = self.z[n].detach().requires_grad_()
        parts = {name: x[n] for name, x in self.leaves.items()} | self.params
        leaves = {name: x.detach().requires_grad_(name in self.grads) for name, x in parts.items()}
        gates = {name: leaves[f"gate {name}"] for name in self.inputs.gates}
        params = {name: leaves[f"param {name}"] for name in self.inputs.params}
        with torch.enable_grad():
            head = self.output_head.gradients(z, leaves, gates, params, create_graph=True)
        pairs = [(head.delta, grad_delta)]
        if pi is not None and self.step_scales is not None and head.target_error is not None:
            e, g = head.target_error.detach(), head.error.detach()
            to_alignment, to_g = (x[n] * pi.unsqueeze(-1) for x in self.step_scales)
            pairs += [
                (head.target_error, to_alignment * g),
                (head.error, (to_alignment * e).addcmul_(to_g, g)),
            ]
        pairs = [(y, grad) for y, grad in pairs if y.requires_grad]
        sources = [z, *(leaves[name] for name in self.grads)]
        grads = torch.autograd.grad(
            [y for y, _ in pairs],
            sources,
            [grad for _, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        out.copy_(grads[0])
        for (name, total), grad in zip(self.grads.items(), grads[1:], strict=True):
            if name in self.params:
                total += grad
            else:
                total[n] = grad

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        return self.grads if self.grad_z is None else {**self.grads, "raw": self.grad_z.clone()}
