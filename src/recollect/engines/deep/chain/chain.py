"""A memory that is a chain of maps: what of a recipe decides how it runs, and its factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack
from recollect.engines.deep.chain.activations import CURVES
from recollect.engines.deep.chain.ends.ending import Ending
from recollect.engines.deep.chain.forward import slopes
from recollect.engines.deep.chain.shares import share_now
from recollect.engines.deep.gradient_factors import Factors, Points

__all__ = ["Chain", "chain_slopes", "slope_of"]

Tensors = list[Tensor]


def slope_of(activation: str) -> bool:
    """Whether this path knows the derivatives of an activation."""
    return activation in CURVES


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of maps: the activation between them, and what follows them.

    Attributes:
        activation: between maps. memory: of whose maps. bias: the loss.
        target: the loss's, where every association is scaled by its share, else ``None``.
        affine: `Ending.affine`, asked once.
        params: names of what the memory has learned, but for `bases`: of what is added to the maps.
    """

    activation: str
    memory: Stack
    bias: Bias
    target: float | None
    affine: tuple[float, float] | None
    params: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    def ending(self, heads: int) -> Ending:
        """What follows the last map.

        Args:
            heads: of the memory.
        """
        return Ending(memory=self.memory, bias=self.bias, heads=heads, target=self.target)

    def bases_of(self, W: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensors:
        """W̄ of every map ``[P, out, in]``; none where the memory has no base."""
        heads = [params[name].to(W[0].dtype) for name in self.bases]  # [H, out, in]
        return [w.expand(W[0].shape[0] // w.shape[0], *w.shape).flatten(0, 1) for w in heads]


def chain_slopes(
    chain: Chain, W: Sequence[Tensor], points: Points, params: Mapping[str, Tensor]
) -> list[Factors]:
    """h and δ of every map at weights ``W [P, out, in]``, without a graph; shares are in δ.

    Args:
        chain: the memory.
        W: its maps.
        points: where gradients are taken.
        params: the memory's own.
    """
    A, bases = W, chain.bases_of(W, params)
    if bases:
        A = [w + base for w, base in zip(W, bases, strict=True)]
    ending, own = chain.ending(points.v.shape[1]), {name: params[name] for name in chain.params}
    given = ending.given(points.v.flatten(0, 1), points.raw.flatten(0, 1), own)
    flat: dict[str, Tensor] = {}
    for name, x in points.gates.items():
        flat[name] = x.flatten(0, 1)
    h, delta, end = slopes(
        CURVES[chain.activation],
        ending,
        [w.mT for w in A],
        points.phi.flatten(0, 1),
        given,
        flat,
        own,
        outer=False,
    )
    if end.away is not None:
        rho = share_now(h, delta, end).unsqueeze(-1)
        delta = [rho * x for x in delta]
    return list(map(Factors, h, delta))
