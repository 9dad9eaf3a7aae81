"""A memory that is a chain of maps: its activation, its output head, and the records of a call.

With z the output of the last map, the output head is a residual or a norm, and the loss:

    M = output_map(z, k),    g = ∂ℓ/∂M,    δ_L = (∂M/∂z)ᵀ g,    N = ⟨e, g⟩

(`Stack.output_map`; a normalized step needs N). A member defines this function, which has one entry
per value channel, and autograd computes its gradients. `forward` and `backward` contain the
equations of the maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.algorithm.normalized_steps import nearest_output_value
from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack
from recollect.choices.memory.norms import NORM_EPS, layer_norm_vjp

if TYPE_CHECKING:
    from recollect.engines.deep.recurrence.runner import RecurrenceRunner

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Chain",
    "ChainInputs",
    "ChainSpec",
    "Commits",
    "ForwardTrace",
    "HeadGradients",
    "OutputHead",
    "is_supported_activation",
]

Values = Mapping[str, Tensor]
Tensors = list[Tensor]
aten = torch.ops.aten


# -- activations -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation σ with its first and second derivatives."""

    name: str
    forward: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor, Tensor], Tensor]  # (g, z) -> σ′(z) ⊙ g, differentiable again
    second_derivative: Callable[[Tensor], Tensor]  # z -> σ″(z), without a graph

    def derivative(self, z: Tensor) -> Tensor:
        """Return σ′(z)."""
        return self.vjp(z.new_ones(()).expand_as(z), z)


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


def _silu_vjp(g: Tensor, z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return g * gate * (1 + z * (1 - gate))


def _silu_second_derivative(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 - gate) * (2 + z * (1 - 2 * gate))


def _tanh_second_derivative(z: Tensor) -> Tensor:
    y = torch.tanh(z)
    return -2 * y * (1 - y * y)


_ACTIVATIONS = (
    Activation(
        name="gelu",
        forward=functional.gelu,
        vjp=lambda g, z: aten.gelu_backward(g, z),
        second_derivative=_gelu_second_derivative,
    ),
    Activation(
        name="gelu_tanh",
        forward=lambda z: functional.gelu(z, approximate="tanh"),
        vjp=lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
        second_derivative=_tanh_gelu_second_derivative,
    ),
    Activation(
        name="silu",
        forward=functional.silu,
        vjp=_silu_vjp,
        second_derivative=_silu_second_derivative,
    ),
    Activation(
        name="tanh",
        forward=torch.tanh,
        vjp=lambda g, z: g * (1 - torch.tanh(z).square()),
        second_derivative=_tanh_second_derivative,
    ),
    Activation(
        name="relu",
        forward=functional.relu,
        vjp=lambda g, z: g * (z > 0),
        second_derivative=torch.zeros_like,
    ),
    Activation(
        name="identity",
        forward=lambda z: z,
        vjp=lambda g, z: g,
        second_derivative=torch.zeros_like,
    ),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _ACTIVATIONS}
"""Activations between the maps of a chain, by name."""


def is_supported_activation(activation: str) -> bool:
    """Return whether the chain path has the derivatives of an activation."""
    return activation in ACTIVATIONS


# -- the output head -------------------------------------------------------------------------------


@dataclass(kw_only=True)  # not frozen: created for every inner batch
class HeadGradients:
    """Gradients at the output head, ``[P, R, V]``."""

    delta: Tensor  # δ_L
    error: Tensor  # g
    target_error: Tensor | None  # e with step scales


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """Output head of a memory with H heads, and the loss."""

    memory: Stack
    bias: Bias
    heads: int
    target: float | None  # `Bias.target` with step scales

    @property
    def residual(self) -> bool:
        """Whether the prediction contains the key."""
        return self.memory.residual

    @property
    def affine(self) -> tuple[float, float] | None:
        """a and b if δ_L = a (z + k) − b v and e = g/a, without k if there is no residual."""
        bounded = self.target is not None and self.memory.bounded
        return None if self.memory.has_output_map or bounded else self.bias.affine

    @property
    def layer_norm(self) -> bool:
        """Whether the head is a layer norm with an affine error, and e is a function of g."""
        affine = self.bias.affine
        if self.memory.output_norm != "layer" or affine is None:
            return False
        return self.target is None or (self.memory.bounded and affine[0] != 0)

    def _per_head(self, *xs: Tensor) -> Tensors:
        """Return ``[..., P, R, ·]`` as ``[B, H, R, ·]``."""
        return [x.reshape(-1, self.heads, *x.shape[-2:]) for x in xs]

    def finish(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
        """Return M ``[..., P, R, V]`` from the last map's outputs and raw keys or queries."""
        if not self.memory.has_output_map:  # equal for all heads
            return self.memory.output_map(z, raw, params)
        outputs, key = self._per_head(z, raw)
        return self.memory.output_map(outputs, key, params).reshape(z.shape)

    def inputs(self, v: Tensor, raw: Tensor, params: Values) -> dict[str, Tensor]:
        """Return the inputs of `gradients` from values and raw keys ``[..., P, R, ·]``.

        The closest outputs to the values are among them if the memory cannot output every value.
        """
        inputs = {"raw": raw, "v": v}
        if self.target is not None and self.memory.bounded:
            value, key = self._per_head(self.target * v, raw)
            nearest = nearest_output_value(self.memory, value, key, params)
            inputs["nearest_value"] = nearest.reshape(v.shape)
        return inputs

    def norm_params(self, params: Values, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm's weight and bias, ``[P, 1, V]`` for ``like [..., P, R, V]``."""
        P, V = like.shape[-3], like.shape[-1]
        weight, bias = (
            params[name].to(like.dtype).expand(P // self.heads, -1, -1).reshape(P, 1, V)
            for name in ("norm_weight", "norm_bias")
        )
        return weight, bias

    def _layer_norm_gradients(
        self, z: Tensor, inputs: Values, gates: Values, params: Values
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return M, g and δ_L of a layer norm in few operations."""
        unit, mean, r = torch.native_layer_norm(z, z.shape[-1:], None, None, NORM_EPS)
        weight, bias = self.norm_params(params, z)
        prediction = torch.addcmul(bias, unit, weight)
        if self.residual:
            prediction += inputs["raw"]
        error = self.bias.error(prediction, inputs["v"], gates)
        return prediction, error, layer_norm_vjp(error * weight, z, mean, r)

    def gradients(
        self, z: Tensor, inputs: Values, gates: Values, params: Values, *, create_graph: bool
    ) -> HeadGradients:
        """Return δ_L, g and e for outputs ``z [P, R, V]`` of the last map."""
        raw, v = inputs["raw"], inputs["v"]
        if self.memory.output_norm == "layer" and not create_graph:
            prediction, error, delta = self._layer_norm_gradients(z, inputs, gates, params)
        elif not self.memory.has_output_map:
            prediction = self.memory.output_map(z, raw, params)
            delta = error = self.bias.error(prediction, v, gates)
        else:
            if not create_graph:
                raw = raw.detach()
                params = {name: x.detach() for name, x in params.items()}
            with torch.enable_grad():
                z = z if create_graph and z.requires_grad else z.detach().requires_grad_()
                prediction = self.finish(z, raw, params)
                at = prediction if create_graph else prediction.detach()
                error = self.bias.error(at, v, gates)
                (delta,) = torch.autograd.grad(prediction, z, error, create_graph=create_graph)
            if not create_graph:
                prediction, error, delta = prediction.detach(), error.detach(), delta.detach()
        target_error = None
        if self.target is not None:
            value = inputs.get("nearest_value")
            if value is None:
                value = v if self.target == 1 else self.target * v
            target_error = prediction - value
        return HeadGradients(delta=delta, error=error, target_error=target_error)


# -- the chain -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of maps, its activation and its output head."""

    activation: str
    memory: Stack  # defines the maps and the output head
    bias: Bias
    target: float | None  # target of the loss with step scales
    params: tuple[str, ...] = ()  # learned parameters of the memory, except ``bases``
    bases: tuple[str, ...] = ()  # parameters that are added to the maps
    erasure: float = 0.0  # c of δ + c z, which replaces δ

    def output_head(self, heads: int) -> OutputHead:
        """Return the function after the last map, for a memory of ``heads`` heads."""
        return OutputHead(memory=self.memory, bias=self.bias, heads=heads, target=self.target)

    def base_weights(self, W: Sequence[Tensor], params: Values) -> Tensors:
        """Return W̄ of every map ``[P, out, in]``, or an empty list without a base."""
        heads = [params[name].to(W[0].dtype) for name in self.bases]  # [H, out, in]
        return [w.expand(W[0].shape[0] // w.shape[0], *w.shape).flatten(0, 1) for w in heads]


Commits = Sequence[bool | Tensor]
"""Whether a batch commits its update, per batch: a boolean, or a mask ``[P, 1, 1]``."""


@dataclass(frozen=True, kw_only=True)
class ChainSpec:
    """Properties of a chain that are the same for all inner batches."""

    activation: Activation
    output_head: OutputHead
    transposed: tuple[bool, ...]  # whether a map is stored as [in, out]
    save_for_backward: bool  # whether a backward pass follows
    erasure: float = 0.0  # `Chain.erasure`
    group_size: int | None = None  # batches whose intermediates are stored at once, None for all
    runner: RecurrenceRunner | None = None  # kernels that replace `forward` and `backward`

    @property
    def uses_step_scales(self) -> bool:
        """Whether a step scale multiplies the gradient of every association."""
        return self.output_head.target is not None


@dataclass(frozen=True, kw_only=True)
class ChainInputs:
    """Associations and queries of all inner batches, and their coefficients.

    P is the number of memories, R of associations, Q of queries and J of stacks (A, then S).
    """

    k: Tensor  # features of keys [N, P, R, F]
    head: Values  # inputs of `OutputHead.gradients` [N, P, R, ·]
    T: Tensor | None  # boundary transitions [N, P, J, J], None if A is not scaled
    c: Tensor  # write coefficients [N, P, R, J]
    q: Tensor  # features of queries [N, P, Q, F]
    C: Tensor  # coefficients of the associations in reads [N, P, Q, R]
    scale: Tensor | None  # coefficients of the stacks in reads [N, P, Q, J], None for ones
    gates: Values  # hyperparameters of the loss [N, P, R, 1 or V]
    params: Values  # learned parameters of the memory [H, ...]

    def slice_batches(self, start: int, stop: int) -> ChainInputs:
        """Return the inputs of the batches from ``start`` to ``stop``."""
        batches = slice(start, stop)
        return replace(
            self,
            k=self.k[batches],
            head={name: x[batches] for name, x in self.head.items()},
            T=None if self.T is None else self.T[batches],
            c=self.c[batches],
            q=self.q[batches],
            C=self.C[batches],
            scale=None if self.scale is None else self.scale[batches],
            gates={name: x[batches] for name, x in self.gates.items()},
        )


@dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """M at the start of every batch, and h and δ of every map, for reads and the backward pass."""

    M: Tensors  # A and S per map [N, P, J, narrow, wide]
    final_maps: Tensors  # M after the last batch per map [P, J, narrow, wide]
    h: Tensors  # inputs per map [N, P, R, ·]
    delta: Tensors  # δ, or δ + c z, per map [N, P, R, ·], without step scales
    z: Tensors  # outputs per map [N, P, R, ·]
    u: Tensors  # gradients before the activation's derivative, per map but the last
    rho: Tensor | None  # step scales [N, P, R]
    alignment: Tensor | None  # N of the step scales [N, P, R]
    weights: Tensor  # c, or c′ = ρ c [N, P, R, J]
    runner_state: object = None  # tensors that `ChainSpec.runner` stores for its backward pass
