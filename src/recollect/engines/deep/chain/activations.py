"""Activations between the maps of a chain, with first and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "Activation"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation σ.

    Attributes:
        name: Name in the memory's configuration.
        forward: Return σ(z).
        vjp: Return σ′(z) ⊙ g from (g, z), by operations that autograd can differentiate again.
        second_derivative: Return σ″(z) without a graph.
        forward_out: Write σ(z), from (z, out), in one operation.
        vjp_out: Write σ′(z) ⊙ g, from (g, z, σ(z), out), in one operation.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor, Tensor], Tensor]
    second_derivative: Callable[[Tensor], Tensor]
    forward_out: Callable[[Tensor, Tensor], object]
    vjp_out: Callable[[Tensor, Tensor, Tensor, Tensor], object]

    def derivative(self, z: Tensor) -> Tensor:
        """Return σ′(z)."""
        return self.vjp(z.new_ones(()).expand_as(z), z)


def _gelu_out(z: Tensor, out: Tensor) -> None:
    if out.device.type == "cpu" and not out.is_contiguous():
        # torch 2.13 does not write strided float32 outputs.
        out.copy_(functional.gelu(z))
    else:
        aten.gelu.out(z, out=out)


def _gelu_second_derivative(z: Tensor) -> Tensor:
    """Return (2 − z²) φ(z)."""
    square = z * z
    density = (square * -0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return square.neg_().add_(2).mul_(density)


_C, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_gelu_second_derivative(z: Tensor) -> Tensor:
    """Return σ″(z) from tanh u and u = √(2/π) (z + 0.044715 z³)."""
    square = z * z
    t = torch.tanh((1 + _CUBIC * square) * z * _C)
    first, second = _C * (1 + 3 * _CUBIC * square), 6 * _CUBIC * _C * z
    return (1 - t * t) * (first + 0.5 * z * (second - 2 * t * first * first))


def _silu_second_derivative(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 - gate) * (2 + z * (1 - 2 * gate))


def _silu_vjp(g: Tensor, z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return g * gate * (1 + z * (1 - gate))


def _tanh_second_derivative(z: Tensor) -> Tensor:
    y = torch.tanh(z)
    return -2 * y * (1 - y * y)


_ACTIVATIONS = (
    Activation(
        name="gelu",
        forward=functional.gelu,
        vjp=lambda g, z: aten.gelu_backward(g, z),
        second_derivative=_gelu_second_derivative,
        forward_out=_gelu_out,
        vjp_out=lambda g, z, _, out: aten.gelu_backward.grad_input(g, z, grad_input=out),
    ),
    Activation(
        name="gelu_tanh",
        forward=lambda z: functional.gelu(z, approximate="tanh"),
        vjp=lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
        second_derivative=_tanh_gelu_second_derivative,
        forward_out=lambda z, out: aten.gelu.out(z, approximate="tanh", out=out),
        vjp_out=lambda g, z, _, out: aten.gelu_backward.grad_input(
            g, z, approximate="tanh", grad_input=out
        ),
    ),
    Activation(
        name="silu",
        forward=functional.silu,
        vjp=_silu_vjp,
        second_derivative=_silu_second_derivative,
        forward_out=lambda z, out: aten.silu.out(z, out=out),
        vjp_out=lambda g, z, _, out: aten.silu_backward.grad_input(g, z, grad_input=out),
    ),
    Activation(
        name="tanh",
        forward=torch.tanh,
        vjp=lambda g, z: g * (1 - torch.tanh(z).square()),
        second_derivative=_tanh_second_derivative,
        forward_out=lambda z, out: torch.tanh(z, out=out),
        vjp_out=lambda g, _, y, out: aten.tanh_backward.grad_input(g, y, grad_input=out),
    ),
    Activation(
        name="relu",
        forward=functional.relu,
        vjp=lambda g, z: g * (z > 0),
        second_derivative=torch.zeros_like,
        forward_out=lambda z, out: torch.clamp_min(z, 0, out=out),
        vjp_out=lambda g, z, _, out: aten.threshold_backward.grad_input(g, z, 0, grad_input=out),
    ),
    Activation(
        name="identity",
        forward=lambda z: z,
        vjp=lambda g, z: g,
        second_derivative=torch.zeros_like,
        forward_out=lambda z, out: out.copy_(z),
        vjp_out=lambda g, _, __, out: out.copy_(g),
    ),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _ACTIVATIONS}
"""Activations between the maps of a chain, by name."""
