"""Recursive least squares over chunks: their systems and ridge borders; see the backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import smallest_ridge
from recollect.choices.runtime import can_read_values
from recollect.engines.common.linalg import bmm, plus
from recollect.engines.common.resolution import loss, lost_within, resolved
from recollect.engines.least_squares.inputs import RidgeProblem, RidgeState
from recollect.engines.least_squares.recursion_layout import Border, Layout, Parts, Saved, to_end

__all__ = ["forward"]


def _half(S: Tensor, out: Tensor) -> Tensor:
    """L⁻¹ of positive definite ``S = L Lᵀ [N, F, F]``, written into zeros.

    By blocks: for many small matrices at once, products are several times faster than LAPACK.
    """
    F = S.shape[-1]
    if F <= 16:
        L = torch.linalg.cholesky_ex(S)[0]
        eye = torch.eye(F, dtype=S.dtype, device=S.device)
        return out.copy_(torch.linalg.solve_triangular(L, eye.expand_as(S), upper=False))
    m = F // 2
    above = _half(S[:, :m, :m], out[:, :m, :m])
    across = torch.bmm(S[:, m:, :m], above.mT)
    rest = torch.baddbmm(S[:, m:, m:], across, across.mT, alpha=-1)
    below = _half(rest, out[:, m:, m:])
    out[:, m:, :m] = torch.bmm(below, torch.bmm(across, above)).neg_()
    return out


def _halves(S: Tensor) -> Tensor:
    """`_half` of matrices with any leading axes."""
    flat = S.flatten(0, -3)
    return _half(flat, torch.zeros_like(flat)).view(S.shape)


def _inverse(system: Tensor) -> Tensor:
    """The inverse of positive definite matrices."""
    half = _halves(system).flatten(0, -3)
    return torch.bmm(half.mT, half).view(system.shape)


# -- forward -------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Some chunks on their way: what they are made of, and what comes out.

    Attributes:
        keys: ``[n, BH, C, F]``. logs: sums of log decays ``[n, BH, C]`` where there are any, and
            their ``reach``, a.
        ridge: λ ``[BH, F]``. origin: W₀ᵀ ``[BH, F, V]``.
        solved: ``[n, BH, C, F + V]``: 0 and the values; then −K P and V − K M; then −X and R.
        states: ``[n + 1, BH, F, F + V]``: P and M before each chunk and after the last.
        factors: L, ``[n, BH, C, C]``, or L⁻¹ where there is decay; where backward needs them.
        parts: where memories start anew, if any may.
    """

    first: int
    keys: Tensor
    logs: Tensor
    reach: Tensor
    ridge: Tensor
    origin: Tensor
    solved: Tensor
    states: Tensor
    factors: Tensor | None
    parts: Parts | None

    @property
    def least(self) -> float:
        """Noise, in parts of K P Kᵀ, below which the dtype would not keep A positive."""
        return 2 * self.keys.shape[2] * torch.finfo(self.keys.dtype).eps


def forward(
    layout: Layout, p: RidgeProblem, *, save: bool
) -> tuple[tuple[Tensor, RidgeState, Tensor], Saved]:
    """What `recursion_backward.recursion` returns, and what its backward needs."""
    spans, C = layout.spans, layout.spans.chunk
    k, v, F, V = p.k, p.v, p.k.shape[-1], p.v.shape[-1]
    ridge, origin = layout.heads(p.ridge), layout.heads(p.origin)
    M, D, kappa, P = p.state.map(layout.heads).tensors()
    before = None if spans.unresolved is None else spans.unresolved.flatten()
    if before is not None:
        # NaN would reach through products what starts anew; it is put in at the end.
        lacking = ~M.isfinite().flatten(1).all(-1)
        before, M = before | lacking, M.masked_fill(lacking[:, None, None], 0.0)
    Z = torch.cat([P, M], dim=-1)  # [BH, F, F + V]
    y = v.new_empty(*p.q.shape[:-1], V)
    saved = Saved(states=[], solved=[], factors=[], borders=[], lost=[], tokens=[])
    nothing = v.new_zeros(())
    for start, stop in layout.groups:
        keys = layout.split(k[:, start:stop])
        n, BH = keys.shape[:2]
        parts = layout.parts(start, stop)
        logs = layout.cumulated(p.log_decay[:, start:stop], parts) if spans.forgets else nothing
        group = _Group(
            first=start // C,
            keys=keys.contiguous() if spans.forgets else keys,
            logs=logs,
            reach=logs.exp().to(v.dtype),
            ridge=ridge,
            origin=origin,
            solved=keys.new_empty(n, BH, C, F + V),
            states=keys.new_empty(n + 1, BH, F, F + V),
            factors=keys.new_empty(n, BH, C, C) if save else None,
            parts=parts,
        )
        group.solved[..., :F] = 0
        group.solved[..., F:] = layout.split(v[:, start:stop])
        group.states[0] = Z
        if not spans.forgets:
            _without_decay(group)
        else:
            D, kappa = _with_decay(layout, group, D, kappa, saved)
        Z = group.states[-1]
        # Rounding leaves P a little unsymmetric, and the recursion would feed on that.
        Z[..., :F] = (Z[..., :F] + Z[..., :F].mT) / 2
        queries = layout.queries(p.q[:, start:stop]).contiguous()
        scores = layout.causal(bmm(queries, group.solved[..., :F].mT, alpha=-1), parts)
        out = bmm(queries, group.states[:-1, ..., F:])
        if parts is not None:
            fresh = layout.per_query(parts.fresh).unsqueeze(-1)
            out = torch.where(fresh, queries @ origin, out)
        y[:, start:stop] = layout.unqueries(plus(out, scores, group.solved[..., F:]))
        if group.factors is not None:
            saved.states.append(group.states[:-1])
            saved.solved.append(group.solved)
            saved.factors.append(group.factors)
    if spans.continues and not spans.forgets:
        flat = k.transpose(1, 2).flatten(0, 1)
        D = torch.baddbmm(D, flat.mT, flat)
    P, M = Z.split([F, V], dim=-1)
    shape = (layout.B, layout.H)
    if before is not None:
        nan, after = _unresolved(layout, saved, before)
        y.masked_fill_(nan[..., None, None], torch.nan)
        saved.nan, M = nan, M.masked_fill(after[:, None, None], torch.nan)
    end = RidgeState(M.clone(), D, kappa, P.clone()).map(lambda x: x.unflatten(0, shape))
    lost = torch.cat([*saved.lost, kappa.new_zeros(0, *shape).flatten(1)]).unflatten(1, shape)
    return (y, end, lost), saved


def _unresolved(layout: Layout, saved: Saved, before: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens' outputs are not resolved ``[B, S, H]``, and which memories after them ``[BH]``.

    A token is not where its part of a chunk has lost too much, or, in the first part, where the
    memory was not resolved before; a memory stays so until it starts anew.
    """
    lost, at_token = ~resolved(torch.cat(saved.lost)), ~resolved(torch.cat(saved.tokens))
    parts = layout.parts(0, lost.shape[0] * layout.spans.chunk)
    assert parts is not None  # who does not look does not know that nothing starts anew
    bad = (at_token.unsqueeze(-2) & parts.same).any(-1) | (lost.unsqueeze(-1) & parts.last)
    # A border is not resolved if it was last found so no earlier than its memory started anew.
    ended = torch.cat([before.unsqueeze(0), bad[..., -1]])
    started = torch.cat([torch.zeros_like(before).unsqueeze(0), parts.reset])
    places = torch.arange(1, ended.shape[0] + 1, device=ended.device)[:, None]
    last, start = (torch.where(x, places, 0).cummax(0).values for x in (ended, started))
    held = (last > 0) & (last >= start)
    return layout.join(bad | (~parts.fresh & held[:-1].unsqueeze(-1))), held[-1]


def _without_decay(group: _Group) -> None:
    """Chunks without decay: the recursion alone."""
    n, BH, C, F = group.keys.shape
    noise = torch.eye(C, dtype=group.keys.dtype, device=group.keys.device).expand(BH, C, C)
    # P only shrinks, so what its start and the longest key allow, all chunks do.
    largest = (
        group.keys.square().sum(-1).max()
        * group.states[0, ..., :F].diagonal(dim1=-2, dim2=-1).max()
    )
    safe = can_read_values(group.keys) and bool(group.least * largest < 1)
    Z = group.states[0].clone()
    for i, (key, solved, after) in enumerate(
        zip(group.keys.unbind(0), group.solved.unbind(0), group.states[1:], strict=True)
    ):
        solved.baddbmm_(key, Z, alpha=-1)
        A = torch.baddbmm(noise, solved[..., :F], key.mT, alpha=-1)
        if not safe:
            _floor(A, noise.diagonal(dim1=-2, dim2=-1), group.least)
        _solve_chunk(group, i, A)
        Z.baddbmm_(solved[..., :F].mT, solved, alpha=-1)
        if group.factors is None and i < n - 1:
            after[..., F:] = Z[..., F:]  # reading needs M alone
        else:
            after.copy_(Z)


def _floor(A: Tensor, noise: Tensor, least: float) -> None:
    """Raise the noise on A's diagonal to what the dtype resolves beside the rest, in place."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    diagonal.add_((least * (diagonal - noise) - noise).clamp_min_(0))
    # A key of zeros after decays that underflow has no noise at all.
    diagonal.clamp_min_(torch.finfo(A.dtype).tiny ** 0.5)


def _solve_chunk(group: _Group, i: int, A: Tensor) -> None:
    """L, then −X and R in place of −K P and V − K M."""
    L = torch.linalg.cholesky_ex(A)[0]
    right = group.solved[i].mT
    torch.linalg.solve_triangular(L.mT, right, upper=True, left=False, out=right)
    if group.factors is not None:
        group.factors[i] = L


def _with_decay(
    layout: Layout, group: _Group, D: Tensor, kappa: Tensor, saved: Saved
) -> tuple[Tensor, Tensor]:
    """Chunks with decay: every P comes from its Gram matrix, so only M is sequential.

    P − XᵀX would lose what strong decay leaves of it. A chunk takes M to T M + U with
    T = I − XᵀL⁻¹K and U = XᵀL⁻¹V, which all chunks find at once; then R = L⁻¹(V − K M). Where
    memories start anew inside a chunk, L falls into blocks of its parts, X and M of the first come
    from P and M, of others from 1/λ and W₀, and only the last is carried on.
    """
    F, parts, ridge = group.keys.shape[-1], group.parts, group.ridge
    ends = group.reach[..., -1]
    systems = _grams(group.keys, group.logs, parts)
    carried = ends if parts is None else torch.where(parts.reset, 0.0, ends)
    for gram, end in zip(systems.unbind(0), carried.unbind(0), strict=True):
        D = gram.addcmul_(D, end[:, None, None])
    D = D.clone()
    borders = _borders(layout, group, systems, kappa)
    saved.borders += borders
    kappa = borders[-1].after
    after = torch.stack([border.after for border in borders])
    systems.diagonal(dim1=-2, dim2=-1).add_(after.unsqueeze(-1) * ridge)
    P = _inverse(systems)
    group.states[1:, ..., :F] = P
    KP = bmm(group.keys, group.states[:-1, ..., :F])
    if parts is not None:
        KP = torch.where(parts.fresh.unsqueeze(-1), group.keys / ridge.unsqueeze(-2), KP)
    A = bmm(KP, group.keys.mT)
    if parts is not None:
        A.masked_fill_(~parts.same, 0.0)
    A.diagonal(dim1=-2, dim2=-1).add_(group.reach)
    _floor(A, group.reach, group.least)
    half = _halves(A)
    floor = torch.stack([border.floor for border in borders]) * ridge.mean(-1)
    at_end, at_token = loss(systems, P, floor), lost_within(A, half)
    if layout.spans.unresolved is None:
        saved.lost.append(torch.maximum(at_end, at_token.amax(-1)))
    else:
        saved.lost.append(at_end)
        saved.tokens.append(at_token)
    if group.factors is not None:
        group.factors = half
    X = bmm(half, KP)
    group.solved[..., :F] = group.keys
    whitened = bmm(half, group.solved)  # L⁻¹K and L⁻¹V
    last = X if parts is None else X * parts.last.unsqueeze(-1)
    step = bmm(last.mT, whitened)
    step[..., :F].neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    _raise(step, P, borders, group)
    states = group.states[..., F:]
    for i, (T, U) in enumerate(x.split([F, x.shape[-1] - F], dim=-1) for x in step.unbind(0)):
        start = states[i]
        if parts is not None:
            start = torch.where(parts.reset[i, :, None, None], group.origin, start)
        torch.baddbmm(U, T, start, out=states[i + 1])
    torch.neg(X, out=group.solved[..., :F])
    rest, across = whitened[..., F:].contiguous(), whitened[..., :F]
    if parts is None:
        group.solved[..., F:] = plus(rest, across, states[:-1], alpha=-1)
    else:
        fresh = parts.fresh.unsqueeze(-1)
        group.solved[..., F:] = rest - torch.where(
            fresh, across @ group.origin, bmm(across, states[:-1])
        )
    return D, kappa


def _grams(keys: Tensor, logs: Tensor, parts: Parts | None) -> Tensor:
    """What each chunk adds to the Gram matrix, decayed to its end, ``[n, BH, F, F]``."""
    return bmm((keys * to_end(logs, parts).to(keys.dtype).unsqueeze(-1)).mT, keys)


def _borders(layout: Layout, group: _Group, grams: Tensor, kappa: Tensor) -> list[Border]:
    """What happens to ρ after each chunk, from the Gram matrices there."""
    spans, ends = layout.spans, group.reach[..., -1]
    floors = smallest_ridge(grams).squeeze(-1) / group.ridge.mean(-1)  # [n, BH]
    borders: list[Border] = []
    for i, (least, end) in enumerate(zip(floors.unbind(0), ends.unbind(0), strict=True)):
        if group.parts is not None:
            kappa = torch.where(group.parts.reset[i], 1.0, kappa)
        kappa = kappa * end
        fixed, target = least > kappa, torch.maximum(kappa, least)
        floor = torch.where(fixed, least, 0.0)
        if spans.ends is not None:
            reached = spans.ends[group.first + i].repeat_interleave(layout.H)
            target = torch.where(reached, 1.0, target)
            fixed = fixed | reached
        borders.append(Border(group.first + i, kappa, target, fixed, floor))
        kappa = target
    return borders


def _raise(step: Tensor, P: Tensor, borders: list[Border], group: _Group) -> None:
    """T and U after ρ is raised from κλ to τλ, in place; P is the inverse with τ."""
    fixed = torch.stack([border.fixed for border in borders])
    if can_read_values(P) and not bool(fixed.any()):
        return
    raised = torch.stack([border.after - border.before for border in borders])
    by = torch.where(fixed, raised, 0.0)[..., None] * group.ridge  # [n, BH, F]
    F = P.shape[-1]
    moved = by.unsqueeze(-1) * step
    moved[..., F:] -= by.unsqueeze(-1) * group.origin
    plus(step, P, moved, alpha=-1)
