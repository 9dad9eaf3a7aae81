"""Inputs of a chain's recurrence, and its results for reads and the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from recollect.engines.deep.chain.activations import Activation
from recollect.engines.deep.chain.output_head.head import OutputHead

if TYPE_CHECKING:
    from recollect.engines.deep.recurrence.runner import RecurrenceRunner

__all__ = [
    "ChainInputs",
    "ChainSpec",
    "Commits",
    "ForwardTrace",
    "MapStack",
    "ReadGradients",
    "SavedStacks",
]

Tensors = list[Tensor]
Commits = Sequence[bool | Tensor]
"""Whether a batch commits its update, per batch: a boolean, or a mask ``[P, 1, 1]``."""


@dataclass(frozen=True, kw_only=True)
class ChainSpec:
    """Properties of a chain that are the same for all inner batches.

    Attributes:
        activation: Activation between the maps.
        output_head: Function after the last map.
        gates: Names of the loss's hyperparameters.
        params: Names of the memory's learned parameters.
        transposed: Whether a map is stored as ``[in, out]``, per map.
        map_groups: Indices of the maps of equal sizes, in order.
        save_for_backward: Whether a backward pass follows.
        runner: Kernels that replace `forward` and `backward`, or ``None``.
    """

    activation: Activation
    output_head: OutputHead
    gates: tuple[str, ...]
    params: tuple[str, ...]
    transposed: tuple[bool, ...]
    map_groups: tuple[tuple[int, ...], ...]
    save_for_backward: bool
    runner: RecurrenceRunner | None = None

    @property
    def uses_step_scales(self) -> bool:
        """Whether a step scale multiplies the gradient of every association."""
        return self.output_head.target is not None


@dataclass(frozen=True, kw_only=True)
class ChainInputs:
    """Associations of all inner batches, ``[N, P, R, ·]``, and their coefficients.

    Attributes:
        k: Features of keys.
        v: Values.
        raw: Keys before the feature map.
        T: Boundary transitions ``[N, P, J, J]``, or ``None`` if A is not scaled.
        c: Write coefficients ``[N, P, R, J]``.
        gates: Hyperparameters of the loss.
        nearest_value: Closest outputs to the values (`OutputHead.nearest_value`).
        params: Learned parameters of the memory, ``[H, ...]``.
    """

    k: Tensor
    v: Tensor
    raw: Tensor
    T: Tensor | None
    c: Tensor
    gates: Mapping[str, Tensor]
    nearest_value: Tensor | None = None
    params: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def head_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of `OutputHead.gradients` for all associations."""
        inputs = {"raw": self.raw, "v": self.v}
        return (
            inputs
            if self.nearest_value is None
            else {**inputs, "nearest_value": self.nearest_value}
        )

    def slice_batches(self, start: int, stop: int) -> ChainInputs:
        """Return the inputs of the batches from ``start`` to ``stop``."""
        batches = slice(start, stop)
        return ChainInputs(
            k=self.k[batches],
            v=self.v[batches],
            raw=self.raw[batches],
            T=None if self.T is None else self.T[batches],
            c=self.c[batches],
            gates={name: x[batches] for name, x in self.gates.items()},
            nearest_value=None if self.nearest_value is None else self.nearest_value[batches],
            params=self.params,
        )


@dataclass(frozen=True, kw_only=True)
class MapStack:
    """Stacks of L maps of equal sizes.

    Attributes:
        M: A and S at the start of every batch, ``[N, P, L, J, narrow, wide]``.
        wide: The wider of h and δ, ``[N, P, L, R, wide]``.
        narrow: The narrower of h and δ, ``[L, N, P, R, narrow]``.
        Q: c times ``narrow``, ``[N, P, L, R, J, narrow]``. N is 1 without a backward pass.
    """

    M: Tensor
    wide: Tensor
    narrow: Tensor
    Q: Tensor


@dataclass(frozen=True, kw_only=True)
class SavedStacks:
    """Tensors for the backward pass.

    Attributes:
        map_groups: Stacks per group of maps.
        z: Outputs of every map but the last, ``[N, P, R, ·]``.
        u: Gradients before the activation's derivative, for every map but the last.
        z_last: Outputs of the last map, or ``None`` if δ_L is affine in them.
        alignment: N ``[N, P, R]`` with step scales and an error that is not affine.
        error_norm_sq: |g|² ``[N, P, R]``, under the same condition as ``alignment``.
    """

    map_groups: list[MapStack]
    z: Tensors
    u: Tensors
    z_last: Tensor | None
    alignment: Tensor | None
    error_norm_sq: Tensor | None


@dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """M at the start of every batch, and h and δ of every map.

    Attributes:
        M: Per map ``[N, P, J, narrow, wide]``.
        final_maps: M after the last batch, per group ``[P, L, J, narrow, wide]``.
        delta: Gradients δ per map, ``[N, P, R, ·]``, without step scales.
        h: Inputs per map, ``[N, P, R, ·]``.
        saved: Tensors for the backward pass.
        rho: Step scales ρ, ``[N, P, R]``.
        weights: c′ = ρ c, with step scales.
        runner_state: Tensors that `ChainSpec.runner` stores for its backward pass.
    """

    M: Tensors
    final_maps: Tensors
    delta: Tensors
    h: Tensors
    saved: SavedStacks | None
    rho: Tensor | None = None
    weights: Tensor | None = None
    runner_state: object = None


@dataclass(frozen=True, kw_only=True)
class ReadGradients:
    """Gradients through reads.

    Attributes:
        q: Gradient of `QueryBatch.q`.
        C: Gradient of `QueryBatch.C`.
        scale: Gradient of `QueryBatch.scale`.
        h: Gradients of the inputs at the keys, ``[N, P, R, ·]`` per map.
        delta: Gradients of δ at the keys, ``[N, P, R, ·]`` per map.
        left_factors: Left factors of M̄ ``[J narrow, wide]``, ``[N, P, rows, ·]`` per map.
        right_factors: Right factors of M̄, ``[N, P, rows, ·]`` per map.
    """

    q: Tensor
    C: Tensor
    scale: Tensor | None
    h: Tensors
    delta: Tensors
    left_factors: Tensors
    right_factors: Tensors
