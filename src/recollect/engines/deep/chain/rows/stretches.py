"""Tensors of a chain as arguments of its two kernels (`kernels` has their equations in Triton)."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import EPS
from recollect.engines.deep.chain.rows.launch import Launch
from recollect.engines.deep.chain.trace import ChainSpec, Family

__all__ = ["BackwardRows", "ForwardRows"]

ENTRIES = 1024
"""Entries of a program's rows: eight for each of 128 threads."""


def _above(x: int) -> int:
    """The power of two that is not below."""
    return 1 << (x - 1).bit_length()


class _Rows:
    """What both stretches need.

    Attributes:
        sizes: what a kernel is compiled for. counts: N, P R and R. programs: how many.
    """

    def __init__(self, launch: Launch, spec: ChainSpec, stacks: Family) -> None:
        assert spec.families == ((0, 1),) and spec.tall == (True, False)
        self.launch = launch
        N, P, _, J, D, W = stacks.M.shape
        R = stacks.wide.shape[3]
        block = _above(W)
        each = max(1, ENTRIES // block)
        self.programs = -(-P * R // each)
        self.counts = N, P * R, R
        self.sizes: dict[str, object] = {"W": W, "D": D, "J": J, "ROWS": each}
        self.sizes |= {"BW": block, "BD": _above(D), "SHARE": spec.normalised}
        self.sizes |= {"EPS": EPS, "TINY": torch.finfo(stacks.M.dtype).tiny}


class ForwardRows(_Rows):
    """From u of a batch to what is written of it.

    Attributes:
        weights: c′ ``[N, P, R, J]``, of the batches up to the last `step`.
    """

    def __init__(
        self,
        launch: Launch,
        spec: ChainSpec,
        stacks: Family,
        c: Tensor,
        inside: tuple[Tensor, Tensor],
    ) -> None:
        """For all batches.

        Args:
            launch: runs a kernel. spec: of the chain. stacks: of its maps.
            c: ``[N, P, R, J]``. inside: z and u of the hidden units ``[N or 1, P, R, W]``.
        """
        super().__init__(launch, spec, stacks)
        assert spec.ending.affine is not None
        c = c.contiguous()
        self._rho, self.weights = None, c
        if spec.normalised:
            self._rho, self.weights = c.new_empty(c.shape[:3]), torch.empty_like(c)
        self.sizes |= {"CURVE": spec.curve.name, "SLOPE": float(spec.ending.affine[0])}
        rho = c if self._rho is None else self._rho
        self.kept = len(inside[0]) > 1
        self.tensors = (*inside, stacks.wide, stacks.narrow, c, rho, self.weights, stacks.Q)
        assert all(x.is_contiguous() for x in self.tensors)

    def rho(self) -> Tensor | None:
        """ρ of all batches ``[N, P, R]``, ``None`` where steps are plain."""
        return self._rho

    def step(self, n: int) -> None:
        """δ_1, ρ, c′ and Q of batch n, of which z, h_1, δ_2 and u are there."""
        arguments = (*self.tensors, n, n if self.kept else 0, *self.counts)
        self.launch("forward", self.programs, arguments, self.sizes)


class BackwardRows(_Rows):
    """From a batch's border to its own maps."""

    def __init__(
        self,
        launch: Launch,
        spec: ChainSpec,
        stacks: Family,
        weights: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor, Tensor],
        scales: Tensor,
        key_wide: Tensor,
    ) -> None:
        """For all batches.

        Args:
            launch: runs a kernel. spec: of the chain. stacks: of its maps.
            weights: c′ ``[N, P, R, J]``.
            gradients: of ``wide`` ``[N, P, 2, R, W]``, of h_0 and δ_2 ``[N, P, R, D]``, which may
                lie apart from one matrix to the next, and of Q ``[N, P, 2, R, J, D]``.
            scales: σ″ ⊙ u and σ′ ``[N, P, 2, R, W]``.
            key_wide: where their products with δ̄_1 go, ``[N, P, 2, 2 R, W]``.
        """
        super().__init__(launch, spec, stacks)
        to_wide, to_k, to_e, to_Q = gradients
        assert all(x[0, 0].is_contiguous() for x in (to_k, to_e))
        own = weights.contiguous()
        self.tensors = (
            stacks.wide, to_wide, stacks.narrow, to_k, to_e, own, to_Q, scales, key_wide,
        )  # fmt: skip
        assert all(x.is_contiguous() for x in self.tensors if x is not to_k and x is not to_e)
        self.strides = *to_k.stride()[:2], *to_e.stride()[:2]

    def step(self, n: int) -> None:
        """h̄, δ̄ and ū of batch n, of which h̄ and δ̄ have what reads and the border ask."""
        arguments = (*self.tensors, n, *self.counts, *self.strides)
        self.launch("backward", self.programs, arguments, self.sizes)
