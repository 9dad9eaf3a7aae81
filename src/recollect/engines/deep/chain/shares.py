"""Shares of a normalised step in the recurrence over borders, and their gradient.

Every association's gradients are scaled by ρ (`recollect.choices.algorithm.share`). ρ is one number
for all maps, so it is put into the coefficients, c′ = ρ c and C′ = ρ C, and h and δ stay as they
are:

    N = ⟨e, g⟩,    Q = Σ_l |h_(l−1)|²|δ_l|² + ε|g|²,    ρ = N/Q            (0 where Q is)

Backwards, what is written and read depends on ρ δ_l h_(l−1)ᵀ alone, so with the gradients h̄, δ̄
of that

    π = ρ ρ̄ = Σ_l ⟨h̄_(l−1), h_(l−1)⟩ = Σ_l ⟨δ̄_l, δ_l⟩,    N̄ = π/N,    Q̄ = −π/Q
    h̄_(l−1) += 2Q̄|δ_l|² h_(l−1),    δ̄_l += 2Q̄|h_(l−1)|² δ_l,    ḡ += N̄ e + 2εQ̄ g,    ē += N̄ g

Where the error is affine, a·prediction − b·value, e = g/a.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.choices.algorithm.share import EPS, share

__all__ = ["Shares", "share_of"]

Tensors = Sequence[Tensor]


def share_of(h: Tensors, delta: Tensors, prediction: Tensor, v: Tensor, target: float) -> Tensor:
    """ρ ``[P, R]`` by operations that autograd follows.

    Args:
        h: inputs of every map ``[P, R, ·]``. delta: gradients of their outputs.
        prediction: ``[P, R, V]``. v: values. target: `Bias.target`.
    """
    gain: Tensor | None = None
    for x, y in zip(h, delta, strict=True):
        own = x.square().sum(-1) * y.square().sum(-1)
        gain = own if gain is None else gain + own
    assert gain is not None  # a chain has a map
    return share(prediction - target * v, delta[-1], gain)


class Shares:
    """ρ of all inner batches, and per batch what its gradient needs; without a graph.

    Attributes:
        rho: ``[N, P, R]``.
        weights: c′ ``[N, P, R, J]``, one batch's only where no backward pass will come, as below.
        sizes: |h_(l−1)|² of every map, then |δ_l|², ``[N, 2L, P, R]``.
        below: 1/Q, or 0, ``[N, P, R]``. along: N.
        back: what `pull` adds to δ̄_l and then to h̄_(l−1), in units of δ_l and h_(l−1).
    """

    def __init__(self, k: Tensor, c: Tensor, maps: int, *, slope: float | None, keep: bool) -> None:
        N, P, R, J = c.shape
        count = N if keep else 1
        self.L, self.slope = maps, slope
        self.rho, self.along = k.new_empty(N, P, R), k.new_empty(count, P, R)
        self.below, self.sizes = k.new_empty(count, P, R), k.new_empty(count, 2 * maps, P, R)
        self.weights = k.new_empty(count, P, R, J)
        self.back: Tensor | None = None
        self.rho_, self.of_keys = self.rho.unbind(0), _squares(k).unbind(0)
        batches = zip(
            self.sizes.unbind(0),
            [one.unbind(0) for one in self.sizes.unbind(0)],
            self.along.unbind(0),
            self.below.unbind(0),
            self.weights.unbind(0),
            strict=True,
        )
        places = list(batches)
        self.places = places if keep else places * N

    def step(self, n: int, h: Tensors, delta: Tensors, away: Tensor | None, c: Tensor) -> Tensor:
        """c′ of batch n, ``[P, R, J, 1]``.

        Args:
            n: the batch. h, delta: its factors.
            away: e, ``None`` where the error is affine. c: ``[P, R, J]``.
        """
        sizes, each, along, below, weights = self.places[n]
        for x, out in zip((*h[1:], *delta), each[1:], strict=True):
            torch.linalg.vector_norm(x, dim=-1, out=out)
        sizes.mul_(sizes)
        each[0].copy_(self.of_keys[n])
        total = torch.sum(sizes[: self.L] * sizes[self.L :], dim=0).add_(each[-1], alpha=EPS)
        torch.reciprocal(total, out=below).masked_fill_(total == 0, 0.0)
        if away is None:
            assert self.slope is not None
            torch.mul(each[-1], 1 / self.slope, out=along)
        else:
            torch.sum(away * delta[-1], dim=-1, out=along)
        rho = torch.mul(along, below, out=self.rho_[n])
        return torch.mul(c, rho.unsqueeze(-1), out=weights).unsqueeze(-1)

    def pull(
        self, n: int, pi: Tensor, h: Tensors, delta: Tensors, to_h: Tensors, to_delta: Tensors
    ) -> Tensor | None:
        """Adds to the gradients of batch n but those of keys; N̄ where the error is not affine.

        Args:
            pi: π ``[P, R]``. h, delta: factors. to_h, to_delta: their gradients.
        """
        sizes, _, along, below, _ = self.places[n]
        if self.back is None:
            self.back = torch.empty_like(self.sizes)
        twice = (pi * below).mul_(-2)
        back = torch.mul(sizes, twice, out=self.back[n])
        each = back.unsqueeze(-1).unbind(0)
        per = pi / along.masked_fill(along == 0, torch.inf)
        each[self.L - 1].squeeze(-1).add_(twice, alpha=EPS)
        if self.slope is not None:
            each[self.L - 1].squeeze(-1).add_(per, alpha=2 / self.slope)
        for x, out, weight in zip(delta, to_delta, each, strict=False):
            out.addcmul_(x, weight)
        for x, out, weight in zip(h[1:], to_h[1:], each[self.L + 1 :], strict=True):
            out.addcmul_(x, weight)
        return per.unsqueeze(-1) if self.slope is None else None

    def of_first(self) -> Tensor:
        """What `pull` leaves to be added to the gradients of all keys, in units of the keys."""
        assert self.back is not None
        return self.back[:, self.L].unsqueeze(-1)


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1).square_()
