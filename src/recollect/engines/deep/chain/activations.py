"""Activations between the maps of a chain, with first and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["CURVES", "Curve"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One activation σ.

    Attributes:
        name: name that memories use.
        value: σ(z).
        pull: from (g, z) to σ′(z) ⊙ g, by operations that autograd can differentiate again.
        bend: σ″(z), without a graph.
        store: writes σ(z), from (z, out), in one operation.
        pull_to: writes σ′(z) ⊙ g, from (g, z, σ(z), out), in one operation.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor], Tensor]
    store: Callable[[Tensor, Tensor], object]
    pull_to: Callable[[Tensor, Tensor, Tensor, Tensor], object]

    def slope(self, z: Tensor) -> Tensor:
        """Return σ′(z)."""
        return self.pull(z.new_ones(()).expand_as(z), z)


def _gelu_store(z: Tensor, out: Tensor) -> None:
    if out.device.type == "cpu" and not out.is_contiguous():
        # torch 2.13 leaves memory with gaps as it was, in float32.
        out.copy_(functional.gelu(z))
    else:
        aten.gelu.out(z, out=out)


def _gelu_bend(z: Tensor) -> Tensor:
    """(2 − z²) φ(z)."""
    square = z * z
    density = (square * -0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return square.neg_().add_(2).mul_(density)


_C, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_gelu_bend(z: Tensor) -> Tensor:
    """From tanh u and u = √(2/π) (z + 0.044715 z³)."""
    square = z * z
    t = torch.tanh((1 + _CUBIC * square) * z * _C)
    first, second = _C * (1 + 3 * _CUBIC * square), 6 * _CUBIC * _C * z
    return (1 - t * t) * (first + 0.5 * z * (second - 2 * t * first * first))


def _silu_bend(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 - gate) * (2 + z * (1 - 2 * gate))


def _silu_pull(g: Tensor, z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return g * gate * (1 + z * (1 - gate))


def _tanh_bend(z: Tensor) -> Tensor:
    value = torch.tanh(z)
    return -2 * value * (1 - value * value)


_CURVES = (
    Curve(
        name="gelu",
        value=functional.gelu,
        pull=lambda g, z: aten.gelu_backward(g, z),
        bend=_gelu_bend,
        store=_gelu_store,
        pull_to=lambda g, z, _, out: aten.gelu_backward.grad_input(g, z, grad_input=out),
    ),
    Curve(
        name="gelu_tanh",
        value=lambda z: functional.gelu(z, approximate="tanh"),
        pull=lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
        bend=_tanh_gelu_bend,
        store=lambda z, out: aten.gelu.out(z, approximate="tanh", out=out),
        pull_to=lambda g, z, _, out: aten.gelu_backward.grad_input(
            g, z, approximate="tanh", grad_input=out
        ),
    ),
    Curve(
        name="silu",
        value=functional.silu,
        pull=_silu_pull,
        bend=_silu_bend,
        store=lambda z, out: aten.silu.out(z, out=out),
        pull_to=lambda g, z, _, out: aten.silu_backward.grad_input(g, z, grad_input=out),
    ),
    Curve(
        name="tanh",
        value=torch.tanh,
        pull=lambda g, z: g * (1 - torch.tanh(z).square()),
        bend=_tanh_bend,
        store=lambda z, out: torch.tanh(z, out=out),
        pull_to=lambda g, _, y, out: aten.tanh_backward.grad_input(g, y, grad_input=out),
    ),
    Curve(
        name="relu",
        value=functional.relu,
        pull=lambda g, z: g * (z > 0),
        bend=torch.zeros_like,
        store=lambda z, out: torch.clamp_min(z, 0, out=out),
        pull_to=lambda g, z, _, out: aten.threshold_backward.grad_input(g, z, 0, grad_input=out),
    ),
    Curve(
        name="identity",
        value=lambda z: z,
        pull=lambda g, z: g,
        bend=torch.zeros_like,
        store=lambda z, out: out.copy_(z),
        pull_to=lambda g, _, __, out: out.copy_(g),
    ),
)

CURVES: dict[str, Curve] = {curve.name: curve for curve in _CURVES}
"""Those that chains may have between their maps, by the name a memory gives them."""
