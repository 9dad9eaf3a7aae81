"""Activations between the maps of a chain, with first and second derivatives.

The exact GELU costs its error function; value and slope share it here, and the bend that the outer
gradient needs is a polynomial times the same Gaussian.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.runtime import is_cacheable

__all__ = ["CURVES", "Curve"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One activation σ.

    Attributes:
        name: as memories have it.
        value: σ(z), by torch's own operation.
        pull: from (g, z) to σ′(z) ⊙ g, by operations that autograd can differentiate again.
        rise: writes σ(z) and σ′(z) into its second and third argument, without a graph.
        bend: σ″(z), without a graph.
        store: from (z, out), σ(z) written there in one operation.
        pull_to: from (g, z, σ(z), out), σ′(z) ⊙ g written there in one operation; together with
            ``store`` cheaper than ``rise`` where no slope is kept.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]
    rise: Callable[[Tensor, Tensor, Tensor], object]
    bend: Callable[[Tensor], Tensor]
    store: Callable[[Tensor, Tensor], object]
    pull_to: Callable[[Tensor, Tensor, Tensor, Tensor], object]


@functools.cache
def _kept(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _number(value: float, z: Tensor) -> Tensor:
    """A number of the type and device of ``z``; beside one without numbers, made anew.

    What is made beside a fake tensor is a fake one, and must not be kept for the next call.
    """
    make = _kept if type(z) is Tensor or is_cacheable(z) else _kept.__wrapped__
    return make(value, z.dtype, z.device)


def _gelu_rise(z: Tensor, value: Tensor, slope: Tensor) -> None:
    half, zero = (_number(x, z) for x in (0.5, 0.0))
    torch.erf(torch.mul(z, math.sqrt(0.5), out=value), out=value)
    torch.add(half, value, alpha=0.5, out=value)  # Φ(z)
    torch.exp(torch.addcmul(zero, z, z, value=-0.5, out=slope), out=slope)
    torch.addcmul(value, z, slope, value=1 / math.sqrt(2 * math.pi), out=slope)
    value.mul_(z)


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


def _tanh_gelu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tanh u, 1 − tanh² u and u′ of u = √(2/π) (z + 0.044715 z³)."""
    square = z * z
    t = torch.tanh((1 + _CUBIC * square) * z * _C)
    return t, 1 - t * t, _C * (1 + 3 * _CUBIC * square)


def _tanh_gelu_rise(z: Tensor, value: Tensor, slope: Tensor) -> None:
    t, rest, inner = _tanh_gelu(z)
    torch.add(t, 1, out=value).mul_(0.5)
    torch.addcmul(value, z * inner, rest, value=0.5, out=slope)
    value.mul_(z)


def _tanh_gelu_bend(z: Tensor) -> Tensor:
    t, rest, inner = _tanh_gelu(z)
    second = 6 * _CUBIC * _C * z - 2 * t * inner * inner
    return rest * (inner + 0.5 * z * second)


def _silu_rise(z: Tensor, value: Tensor, slope: Tensor) -> None:
    gate = torch.sigmoid(z)
    torch.mul(z, gate, out=value)
    torch.addcmul(gate, value, 1 - gate, out=slope)


def _silu_bend(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 - gate) * (2 + z * (1 - 2 * gate))


def _silu_pull(g: Tensor, z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return g * gate * (1 + z * (1 - gate))


def _tanh_rise(z: Tensor, value: Tensor, slope: Tensor) -> None:
    torch.tanh(z, out=value)
    torch.mul(value, value, out=slope).neg_().add_(1)


def _tanh_bend(z: Tensor) -> Tensor:
    value = torch.tanh(z)
    return -2 * value * (1 - value * value)


def _relu_rise(z: Tensor, value: Tensor, slope: Tensor) -> None:
    torch.clamp_min(z, 0, out=value)
    slope.copy_(z > 0)


def _identity_rise(z: Tensor, value: Tensor, slope: Tensor) -> None:
    value.copy_(z)
    slope.fill_(1)


_CURVES = (
    Curve(
        name="gelu",
        value=functional.gelu,
        pull=lambda g, z: aten.gelu_backward(g, z),
        rise=_gelu_rise,
        bend=_gelu_bend,
        store=_gelu_store,
        pull_to=lambda g, z, _, out: aten.gelu_backward.grad_input(g, z, grad_input=out),
    ),
    Curve(
        name="gelu_tanh",
        value=lambda z: functional.gelu(z, approximate="tanh"),
        pull=lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
        rise=_tanh_gelu_rise,
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
        rise=_silu_rise,
        bend=_silu_bend,
        store=lambda z, out: aten.silu.out(z, out=out),
        pull_to=lambda g, z, _, out: aten.silu_backward.grad_input(g, z, grad_input=out),
    ),
    Curve(
        name="tanh",
        value=torch.tanh,
        pull=lambda g, z: g * (1 - torch.tanh(z).square()),
        rise=_tanh_rise,
        bend=_tanh_bend,
        store=lambda z, out: torch.tanh(z, out=out),
        pull_to=lambda g, _, y, out: aten.tanh_backward.grad_input(g, y, grad_input=out),
    ),
    Curve(
        name="relu",
        value=functional.relu,
        pull=lambda g, z: g * (z > 0),
        rise=_relu_rise,
        bend=torch.zeros_like,
        store=lambda z, out: torch.clamp_min(z, 0, out=out),
        pull_to=lambda g, z, _, out: aten.threshold_backward.grad_input(g, z, 0, grad_input=out),
    ),
    Curve(
        name="identity",
        value=lambda z: z,
        pull=lambda g, z: g,
        rise=_identity_rise,
        bend=torch.zeros_like,
        store=lambda z, out: out.copy_(z),
        pull_to=lambda g, _, __, out: out.copy_(g),
    ),
)

CURVES: dict[str, Curve] = {curve.name: curve for curve in _CURVES}
"""Those that chains may have between their maps, by the name a memory gives them."""
