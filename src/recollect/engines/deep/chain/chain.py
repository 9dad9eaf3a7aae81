"""A memory that is a chain of maps, and the factors of its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack
from recollect.engines.deep.chain.activations import ACTIVATIONS
from recollect.engines.deep.chain.forward import map_gradients
from recollect.engines.deep.chain.output_head.head import OutputHead
from recollect.engines.deep.chain.step_scales import compute_step_scales
from recollect.engines.deep.gradient_factors import Factors, Points

__all__ = ["Chain", "chain_gradient_factors", "is_supported_activation"]

Tensors = list[Tensor]


def is_supported_activation(activation: str) -> bool:
    """Return whether the chain path has the derivatives of an activation."""
    return activation in ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of maps, its activation and its output head.

    Attributes:
        activation: Name of the activation between the maps.
        memory: Memory that defines the maps.
        bias: Loss.
        target: Target of the loss with step scales, else ``None``.
        affine: `OutputHead.affine`.
        params: Names of the memory's learned parameters, except ``bases``.
        bases: Names of the parameters that are added to the maps.
    """

    activation: str
    memory: Stack
    bias: Bias
    target: float | None
    affine: tuple[float, float] | None
    params: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    def output_head(self, heads: int) -> OutputHead:
        """Return the function after the last map, for a memory of ``heads`` heads."""
        return OutputHead(memory=self.memory, bias=self.bias, heads=heads, target=self.target)

    def base_weights(self, W: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensors:
        """Return W̄ of every map ``[P, out, in]``, or an empty list without a base."""
        heads = [params[name].to(W[0].dtype) for name in self.bases]  # [H, out, in]
        return [w.expand(W[0].shape[0] // w.shape[0], *w.shape).flatten(0, 1) for w in heads]


def chain_gradient_factors(
    chain: Chain, W: Sequence[Tensor], points: Points, params: Mapping[str, Tensor]
) -> list[Factors]:
    """Return h and δ of every map at weights ``W [P, out, in]``, without a graph.

    Step scales are included in δ.

    Args:
        chain: Chain of the memory.
        W: Maps of the memory.
        points: Associations at which gradients are taken.
        params: Learned parameters of the memory.
    """
    A, bases = W, chain.base_weights(W, params)
    if bases:
        A = [w + base for w, base in zip(W, bases, strict=True)]
    output_head = chain.output_head(points.v.shape[1])
    head_params = {name: params[name] for name in chain.params}
    head_inputs = output_head.head_inputs(
        points.v.flatten(0, 1), points.raw.flatten(0, 1), head_params
    )
    gates: dict[str, Tensor] = {}
    for name, x in points.gates.items():
        gates[name] = x.flatten(0, 1)
    h, delta, head = map_gradients(
        ACTIVATIONS[chain.activation],
        output_head,
        [w.mT for w in A],
        points.phi.flatten(0, 1),
        head_inputs,
        gates,
        head_params,
        create_graph=False,
    )
    if head.target_error is not None:
        rho = compute_step_scales(h, delta, head).unsqueeze(-1)
        delta = [rho * x for x in delta]
    return list(map(Factors, h, delta))
