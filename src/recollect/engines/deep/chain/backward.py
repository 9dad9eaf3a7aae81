"""Backward of the recurrence over inner-batch boundaries.

Given the gradients M̄′ of what stands at the border after, and h̄, δ̄ of the reads, in the letters of
`forward`:

    M̄_i = Σ_j T[j, i] M̄_j′,    δ̄ += Σ_j c_j M̄_j′ h,    h̄ += Σ_j c_j M̄_j′ᵀ δ
    ū_l = σ′(z_(l−1)) ⊙ δ̄_(l−1),    δ̄_l += A_l ū_l,    z̄_L = (∂ error / ∂ z_L)ᵀ δ̄_L
    h̄_(l−1) += A_lᵀ z̄_l,    z̄_(l−1) = σ′ ⊙ h̄_(l−1) + σ″ ⊙ u_l ⊙ δ̄_(l−1)
    Ā_l += δ_l ū_lᵀ + z̄_l h_(l−1)ᵀ

Where associations are scaled by their shares, c′ stands for c, and after the first line h̄ and δ̄ get
what `shares` adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.chain.forward import ChainSpec, Commits, ForwardTrace, Keys
from recollect.engines.deep.chain.reads import ReadGradients
from recollect.engines.deep.chain.shares import Shares

__all__ = ["InputGradients", "backward"]


class _Map:
    """One map's stacks batch by batch, ``[P, R, ·]`` each, and the gradients gathered for them.

    Attributes:
        up: gradient of M at the border after the batch at hand, ``[P, J, entries]``.
        to_h, to_delta: what reads ask of h and δ, and then what the batch's own end does.
        back: z̄; turn: ū (``None`` for the first map).
        first, second: factors of Ā; (h, z̄) for the first map, with (u, δ) above them for others.
    """

    def __init__(
        self,
        spec: ChainSpec,
        index: int,
        trace: ForwardTrace,
        back: ReadGradients,
        end: Tensor,
    ) -> None:
        assert trace.saved is not None
        M, h, delta = trace.M[index], trace.h[index], trace.delta[index]
        R = h.shape[2]
        self.tall, self.head = spec.tall[index], index == 0
        self.shape = M.shape[1:]
        # The keys' share of what the border asks waits until all are there, unless ρ needs it.
        self.later = self.head and self.tall and trace.shares is None
        self.h_all, self.delta_all = h, delta
        self.to_h_all, self.to_delta_all = back.h[index], back.delta[index]
        self.h, self.delta = h.unbind(0), delta.unbind(0)
        self.to_h, self.to_delta = self.to_h_all.unbind(0), self.to_delta_all.unbind(0)
        self.A_all = M[:, :, 0] if self.tall else M[:, :, 0].mT  # [N, P, in, out]
        self.A = self.A_all.unbind(0)
        self.flat = M.flatten(3).unbind(0)
        self.left, self.right = back.left[index].unbind(0), back.right[index].unbind(0)
        self.Q = trace.saved.Q[index].flatten(3).unbind(0)
        self.to_Q_all = h.new_empty(*h.shape[:3], *M.shape[2:4])  # [N, P, R, J, narrow]
        self.to_Q = self.to_Q_all.unbind(0)
        if self.head:
            second = torch.empty_like(delta)
            self.first, self.turn = self.h, None
        else:
            # Both pairs of factors one above the other, to be one product.
            first = h.new_empty(*h.shape[:2], 2 * R, h.shape[-1])
            second = delta.new_empty(*delta.shape[:2], 2 * R, delta.shape[-1])
            first[:, :, R:].copy_(h)
            second[:, :, :R].copy_(delta)
            self.first, self.turn = first.unbind(0), first[:, :, :R].unbind(0)
        self.second = second.unbind(0)
        self.back_all = second[:, :, -R:]
        self.back = self.back_all.unbind(0)
        self.up, self.spare = end, torch.empty_like(end)

    def end(self, n: int, T: Tensor | None, c: Tensor, commit: Tensor | None) -> Tensor:
        """Back through the border after batch n; M̄′ of the rows that moved."""
        moved = self.up if commit is None else torch.where(commit, self.up, 0.0)
        P, J, narrow, wide = self.shape
        flat = moved.view(P, J * narrow, wide)
        sides = (self.h[n], self.to_h[n]), (self.delta[n], self.to_delta[n])
        (_, to_narrow), (x, to_wide) = sides if self.tall else sides[::-1]
        to_wide.baddbmm_(self.Q[n], flat)
        torch.bmm(x, flat.mT, out=self.to_Q[n].flatten(2))
        if not self.later:
            for part in (self.to_Q[n] * c).unbind(2):
                to_narrow.add_(part)
        after = self.spare
        if T is None:
            after.copy_(moved)
        elif J == 1:
            torch.mul(moved, T, out=after)
        else:
            torch.bmm(T.mT, moved, out=after)
        if commit is not None:
            after.add_(torch.where(commit, 0.0, self.up))
        self.up, self.spare = after, self.up
        return moved

    def pi(self, n: int) -> Tensor:
        """⟨h̄, h⟩ = ⟨δ̄, δ⟩ of what is read and written, ``[P, R]``."""
        x, to_x = (self.h, self.to_h) if self.tall else (self.delta, self.to_delta)
        return (x[n] * to_x[n]).sum(-1)

    def skip(self, n: int) -> None:
        """Back through a border that was not crossed."""
        self.to_Q[n].zero_()

    def write(self, n: int) -> None:
        """The products of reads into M̄, and of keys into Ā."""
        P, J, narrow, wide = self.shape
        self.up.view(P, J * narrow, wide).baddbmm_(self.left[n].mT, self.right[n])
        first, second = self.first[n], self.second[n]
        if not self.tall:
            first, second = second, first
        own = self.up.view(self.shape)[:, 0]
        if self.shape[1] == 1:
            own.baddbmm_(first.mT, second)
        else:
            own.add_(torch.bmm(first.mT, second))


class _Errors:
    """z̄ = (∂ error / ∂ prediction)ᵀ δ̄, and what values and the bias's numbers get of it."""

    def __init__(
        self, spec: ChainSpec, keys: Keys, trace: ForwardTrace, needs: Mapping[str, bool]
    ) -> None:
        assert trace.saved is not None
        self.spec, self.keys, self.points = spec, keys, trace.saved.prediction
        self.leaves = {"v": keys.v, **{f"gate {name}": x for name, x in keys.gates.items()}}
        self.gradients = {
            name: torch.zeros_like(x) for name, x in self.leaves.items() if needs[name]
        }

    def pull(self, n: int, up: Tensor, out: Tensor) -> None:
        affine = self.spec.bias.affine
        if affine is not None:
            torch.mul(up, affine[0], out=out)
            return
        assert self.points is not None
        with torch.enable_grad():
            point = self.points[n].detach().requires_grad_()
            leaves = {
                name: x[n].detach().requires_grad_(name in self.gradients)
                for name, x in self.leaves.items()
            }
            gates = {name: leaves[f"gate {name}"] for name in self.keys.gates}
            error = self.spec.bias.error(point, leaves["v"], gates)
            wanted = [point, *(leaves[name] for name in self.gradients)]
            grads = torch.autograd.grad(
                error, wanted, up, allow_unused=True, materialize_grads=True
            )
        out.copy_(grads[0])
        for total, grad in zip(self.gradients.values(), grads[1:], strict=True):
            total[n] = grad

    def pull_share(self, n: int, per: Tensor, error: Tensor, out: Tensor) -> None:
        """Adds ē = N̄ g to z̄, and takes it from the values."""
        assert self.spec.target is not None
        more = per * error
        out.add_(more)
        if "v" in self.gradients:
            self.gradients["v"][n].sub_(more, alpha=self.spec.target)

    def away(self, n: int) -> Tensor:
        """e where the error is not affine."""
        assert self.points is not None and self.spec.target is not None
        return self.points[n] - self.spec.target * self.keys.v[n]

    def values(self, up: Tensor) -> dict[str, Tensor]:
        """Gradients of v and the numbers, given δ̄ of all batches."""
        affine = self.spec.bias.affine
        if affine is not None and "v" in self.gradients:
            torch.mul(up, -affine[1], out=self.gradients["v"])
        return self.gradients


@dataclass(frozen=True, kw_only=True)
class InputGradients:
    """Gradients of the inputs of a forward pass; ``None`` where none was asked for."""

    T: Tensor | None
    k: Tensor | None
    v: Tensor | None
    raw: Tensor | None
    c: Tensor | None
    gates: dict[str, Tensor]
    start: list[Tensor]


def backward(
    spec: ChainSpec,
    keys: Keys,
    trace: ForwardTrace,
    commits: Commits,
    needs: Mapping[str, bool],
    back: ReadGradients,
    ends: Sequence[Tensor],
) -> InputGradients:
    """Backward through a forward pass, from its last batch to its first.

    Args:
        needs: whether a gradient is asked for of T, k, v, raw, c, and of the bias's numbers, which
            are called ``"gate …"``.
        back: what reads say. ends: gradients of A and S after the last batch, ``[P, J, entries]``,
            which this pass may overwrite.
    """
    assert trace.saved is not None
    maps = [_Map(spec, i, trace, back, end) for i, end in enumerate(ends)]
    errors = _Errors(spec, keys, trace, needs)
    N, P, _, J = keys.c.shape
    gram = keys.c.new_zeros(len(maps), N, P, J, J) if needs["T"] else None
    slopes = [x.unbind(0) for x in trace.saved.slope]
    bends = [
        spec.curve.bend(z).mul_(u).unbind(0)
        for z, u in zip(trace.saved.z, trace.saved.u, strict=True)
    ]
    shares = trace.shares
    weights = (keys.c if shares is None else shares.weights).unsqueeze(-1).unbind(0)
    pairs = list(zip(maps, maps[1:], slopes, bends, strict=False))
    for n in reversed(range(N)):
        commit = commits[n]
        for i, one in enumerate(maps):
            if commit is False:
                one.skip(n)
                continue
            T = None if keys.T is None else keys.T[n]
            moved = one.end(n, T, weights[n], None if commit is True else commit)
            if gram is not None:
                torch.bmm(moved, one.flat[n].mT, out=gram[i, n])
        per = None if shares is None else _pull_shares(n, shares, maps, errors)
        for below, one, slope, _ in pairs:
            assert one.turn is not None
            torch.mul(below.to_delta[n], slope[n], out=one.turn[n])
            one.to_delta[n].baddbmm_(one.turn[n], one.A[n])
        last = maps[-1]
        errors.pull(n, last.to_delta[n], last.back[n])
        if per is not None:
            errors.pull_share(n, per, last.delta[n], last.back[n])
        for below, one, slope, bend in reversed(pairs):
            one.to_h[n].baddbmm_(one.back[n], one.A[n].mT)
            z = torch.mul(one.to_h[n], slope[n], out=below.back[n])
            z.addcmul_(below.to_delta[n], bend[n])
        for one in maps:
            one.write(n)
    to_values = errors.values(maps[-1].to_delta_all)
    return InputGradients(
        T=None if gram is None else gram.sum(0),
        k=_of_keys(maps[0], keys.c, shares) if needs["k"] else None,
        v=to_values.pop("v", None),
        raw=maps[-1].back_all.clone() if needs["raw"] and spec.residual else None,
        c=_of_coefficients(maps, shares) if needs["c"] else None,
        gates=to_values,
        start=[one.up.view(one.shape) for one in maps],
    )


def _pull_shares(n: int, shares: Shares, maps: Sequence[_Map], errors: _Errors) -> Tensor | None:
    """The shares' part in h̄ and δ̄; N̄ where the error is not affine."""
    first, *others = maps
    pi = first.pi(n)
    for one in others:
        pi += one.pi(n)
    to_delta = [one.to_delta[n] for one in maps]
    per = shares.pull(
        n,
        pi,
        [one.h[n] for one in maps],
        [one.delta[n] for one in maps],
        [one.to_h[n] for one in maps],
        to_delta,
    )
    if per is not None:
        to_delta[-1].addcmul_(errors.away(n), per)
    return per


def _of_keys(first: _Map, c: Tensor, shares: Shares | None) -> Tensor:
    k = torch.add(first.to_h_all, first.back_all @ first.A_all.mT)
    if first.later:
        k += (first.to_Q_all * c.unsqueeze(-1)).sum(-2)
    if shares is not None:
        k.addcmul_(first.h_all, shares.of_first())
    return k


def _of_coefficients(maps: Sequence[_Map], shares: Shares | None) -> Tensor:
    total: Tensor | None = None
    for one in maps:
        narrow = one.h_all if one.tall else one.delta_all
        part = (one.to_Q_all @ narrow.unsqueeze(-1)).squeeze(-1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total if shares is None else total.mul_(shares.rho.unsqueeze(-1))
