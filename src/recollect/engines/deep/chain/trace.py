"""What the walk along a chain is given, and what it leaves for reads and for the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from recollect.engines.deep.chain.activations import Curve
from recollect.engines.deep.chain.ends.ending import Ending

if TYPE_CHECKING:
    from recollect.engines.deep.recurrence.runner import RecurrenceRunner

__all__ = [
    "ChainSpec",
    "Commits",
    "Family",
    "ForwardTrace",
    "Keys",
    "ReadGradients",
    "SavedStacks",
]

Tensors = list[Tensor]
Commits = Sequence[bool | Tensor]
"""Per batch, whether its end is kept: for all rows, for none, or a mask ``[P, 1, 1]``."""


@dataclass(frozen=True, kw_only=True)
class ChainSpec:
    """What of a chain stays the same from batch to batch.

    Attributes:
        curve: the activation. ending: what follows the last map.
        gates: names of the loss's numbers. params: of what the memory has learned.
        tall: per map, whether it is kept as ``[in, out]``.
        families: maps of the same sizes, in order.
        keep: whether the backward pass will come.
        walker: kernels that replace `forward` and `backward`, if there are any.
    """

    curve: Curve
    ending: Ending
    gates: tuple[str, ...]
    params: tuple[str, ...]
    tall: tuple[bool, ...]
    families: tuple[tuple[int, ...], ...]
    keep: bool
    walker: RecurrenceRunner | None = None

    @property
    def normalised(self) -> bool:
        """Whether every association is scaled by its share."""
        return self.ending.target is not None


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Associations of all inner batches, ``[N, P, R, ·]``, and their coefficients.

    Attributes:
        k, v, gates: keys' features, values, the bias's numbers. raw: keys, for the ending.
        said: what of values can be said (`Ending.said`).
        T: ``[N, P, J, J]``, or ``None`` where A stays as it is. c: ``[N, P, R, J]``.
        params: the memory's own, ``[H, ...]``.
    """

    k: Tensor
    v: Tensor
    raw: Tensor
    T: Tensor | None
    c: Tensor
    gates: Mapping[str, Tensor]
    said: Tensor | None = None
    params: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Tensor]:
        """What `Ending.of` is given of every association."""
        found = {"raw": self.raw, "v": self.v}
        return found if self.said is None else {**found, "said": self.said}

    def cut(self, start: int, stop: int) -> Keys:
        """Some of the batches."""
        here = slice(start, stop)
        return Keys(
            k=self.k[here],
            v=self.v[here],
            raw=self.raw[here],
            T=None if self.T is None else self.T[here],
            c=self.c[here],
            gates={name: x[here] for name, x in self.gates.items()},
            said=None if self.said is None else self.said[here],
            params=self.params,
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """The stacks of maps of the same sizes, ``L`` of them.

    Attributes:
        M: A and S at every batch's start, ``[N, P, L, J, narrow, wide]``.
        wide: the wider of h and δ, ``[N, P, L, R, wide]``.
        narrow: the narrower, ``[L, N, P, R, narrow]``.
        Q: c times it, ``[N, P, L, R, J, narrow]``, of all batches if there is a backward pass.
    """

    M: Tensor
    wide: Tensor
    narrow: Tensor
    Q: Tensor


@dataclass(frozen=True, kw_only=True)
class SavedStacks:
    """Stacks for the backward pass: z and u of every batch, of all maps but the last.

    ``last`` is z of the last map, and ``above`` and ``size`` are N and |g|² ``[N, P, R]`` under
    shares, if δ_L is no affine function of z.
    """

    families: list[Family]
    z: Tensors
    u: Tensors
    last: Tensor | None
    above: Tensor | None
    size: Tensor | None


@dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """M at every batch's start; inputs h and gradients δ of every map.

    Attributes:
        M: per map ``[N, P, J, narrow, wide]``.
        ends: after the last batch, per family ``[P, L, J, narrow, wide]``.
        delta, h: per map ``[N, P, R, ·]``; shares are not in δ, where there are any.
        saved: for the backward pass.
        rho: shares ρ, ``[N, P, R]``. weights: c′ = ρ c, where there are shares.
        walked: tensors that `ChainSpec.walker` keeps for its backward pass.
    """

    M: Tensors
    ends: Tensors
    delta: Tensors
    h: Tensors
    saved: SavedStacks | None
    rho: Tensor | None = None
    weights: Tensor | None = None
    walked: object = None


@dataclass(frozen=True, kw_only=True)
class ReadGradients:
    """Gradients through reads.

    Attributes:
        q, C, scale: as in `QueryBatch`.
        h, delta: of the keys' factors, ``[N, P, R, ·]`` per map.
        left, right: factors of M̄ ``[J narrow, wide]`` per map, ``[N, P, rows, ·]``.
    """

    q: Tensor
    C: Tensor
    scale: Tensor | None
    h: Tensors
    delta: Tensors
    left: Tensors
    right: Tensors
