"""Forward pass of recursive least squares over chunks; equations in `recursion_backward`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import smallest_ridge
from recollect.choices.runtime import can_read_values
from recollect.engines.common.linalg import add_bmm_, bmm
from recollect.engines.common.precision_checks import (
    estimate_relative_error,
    is_resolved,
    per_token_relative_error,
)
from recollect.engines.least_squares.inputs import RidgeProblem, RidgeState
from recollect.engines.least_squares.recursion_layout import (
    Layout,
    ResetSegments,
    RidgeUpdate,
    Saved,
    decay_to_end,
)

__all__ = ["forward"]


# -- forward -------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Inputs and results of a group of chunks."""

    first: int  # index of the first chunk
    keys: Tensor  # [n, BH, C, F]
    logs: Tensor  # cumulative log decays [n, BH, C], zero without decay
    decay: Tensor  # a, the exponential of logs
    ridge: Tensor  # λ [BH, F]
    origin: Tensor  # W₀ᵀ [BH, F, V]
    solved: Tensor  # [n, BH, C, F + V]: 0 and the values; then −K P and V − K M; then −X and R
    states: Tensor  # [n + 1, BH, F, F + V]: P and M before each chunk and after the last
    factors: Tensor | None  # L, [n, BH, C, C], or L⁻¹ with decay; None without gradients
    segments: ResetSegments | None  # segments between resets, or None without resets

    @property
    def noise_floor(self) -> float:
        """Smallest fraction of K P Kᵀ as noise for which A stays positive in the dtype."""
        return 2 * self.keys.shape[2] * torch.finfo(self.keys.dtype).eps


def forward(
    layout: Layout, p: RidgeProblem, *, save: bool
) -> tuple[tuple[Tensor, RidgeState, Tensor], Saved]:
    """Return the results of `recursion_backward.recursion`, and intermediates for its backward."""
    C = layout.chunk
    k, v, F, V = p.k, p.v, p.k.shape[-1], p.v.shape[-1]
    ridge, origin = layout.merge_heads(p.ridge), layout.merge_heads(p.origin)
    M, D, kappa, P = p.state.map(layout.merge_heads).tensors()
    unresolved = None if layout.unresolved is None else layout.unresolved.flatten()
    if unresolved is not None:
        # NaN would spread past resets in products; insert it at the end.
        nonfinite = ~M.isfinite().flatten(1).all(-1)
        unresolved, M = unresolved | nonfinite, M.masked_fill(nonfinite[:, None, None], 0.0)
    Z = torch.cat([P, M], dim=-1)  # [BH, F, F + V]
    y = v.new_empty(*p.q.shape[:-1], V)
    saved = Saved(states=[], solved=[], factors=[], ridge_updates=[], losses=[], token_losses=[])
    zero = v.new_zeros(())
    for start, stop in layout.groups:
        keys = layout.split(k[:, start:stop])
        n, BH = keys.shape[:2]
        segments = layout.segments(start, stop)
        logs = (
            layout.cumulative_log_decay(p.log_decay[:, start:stop], segments)
            if layout.has_decay
            else zero
        )
        group = _Group(
            first=start // C,
            keys=keys.contiguous() if layout.has_decay else keys,
            logs=logs,
            decay=logs.exp().to(v.dtype),
            ridge=ridge,
            origin=origin,
            solved=keys.new_empty(n, BH, C, F + V),
            states=keys.new_empty(n + 1, BH, F, F + V),
            factors=keys.new_empty(n, BH, C, C) if save else None,
            segments=segments,
        )
        group.solved[..., :F] = 0
        group.solved[..., F:] = layout.split(v[:, start:stop])
        group.states[0] = Z
        if not layout.has_decay:
            _without_decay(group)
        else:
            D, kappa = _with_decay(layout, group, D, kappa, saved)
        Z = group.states[-1]
        # Rounding makes P asymmetric, and the recursion would amplify the asymmetry.
        Z[..., :F] = (Z[..., :F] + Z[..., :F].mT) / 2
        queries = layout.split_queries(p.q[:, start:stop]).contiguous()
        scores = layout.causal(bmm(queries, group.solved[..., :F].mT, alpha=-1), segments)
        out = bmm(queries, group.states[:-1, ..., F:])
        if segments is not None:
            after_reset = layout.per_query(segments.after_reset).unsqueeze(-1)
            out = torch.where(after_reset, queries @ origin, out)
        y[:, start:stop] = layout.join_queries(add_bmm_(out, scores, group.solved[..., F:]))
        if group.factors is not None:
            saved.states.append(group.states[:-1])
            saved.solved.append(group.solved)
            saved.factors.append(group.factors)
    if layout.needs_final_gram and not layout.has_decay:
        flat = k.transpose(1, 2).flatten(0, 1)
        D = torch.baddbmm(D, flat.mT, flat)
    P, M = Z.split([F, V], dim=-1)
    shape = (layout.B, layout.H)
    if unresolved is not None:
        unresolved_tokens, unresolved_end = _unresolved_masks(layout, saved, unresolved)
        y.masked_fill_(unresolved_tokens[..., None, None], torch.nan)
        saved.nan, M = unresolved_tokens, M.masked_fill(unresolved_end[:, None, None], torch.nan)
    end = RidgeState(M.clone(), D, kappa, P.clone()).map(lambda x: x.unflatten(0, shape))
    losses = torch.cat([*saved.losses, kappa.new_zeros(0, *shape).flatten(1)]).unflatten(1, shape)
    return (y, end, losses), saved


def _unresolved_masks(layout: Layout, saved: Saved, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of unresolved outputs ``[B, S, H]`` and unresolved final memories ``[BH]``.

    An output is unresolved if its segment loses too much, or the segment continues an unresolved
    memory. A memory stays unresolved until a reset.
    """
    chunk_unresolved, token_unresolved = (
        ~is_resolved(torch.cat(saved.losses)),
        ~is_resolved(torch.cat(saved.token_losses)),
    )
    segments = layout.segments(0, chunk_unresolved.shape[0] * layout.chunk)
    assert segments is not None  # values cannot be read, so resets are always present
    unresolved = (token_unresolved.unsqueeze(-2) & segments.same_segment).any(-1) | (
        chunk_unresolved.unsqueeze(-1) & segments.in_last
    )
    # A chunk end is unresolved if no reset follows the last unresolved chunk end.
    at_chunk_ends = torch.cat([initial.unsqueeze(0), unresolved[..., -1]])
    has_reset = torch.cat([torch.zeros_like(initial).unsqueeze(0), segments.has_reset])
    positions = torch.arange(1, at_chunk_ends.shape[0] + 1, device=at_chunk_ends.device)[:, None]
    last_unresolved, last_reset = (
        torch.where(x, positions, 0).cummax(0).values for x in (at_chunk_ends, has_reset)
    )
    persists = (last_unresolved > 0) & (last_unresolved >= last_reset)
    return layout.join(
        unresolved | (~segments.after_reset & persists[:-1].unsqueeze(-1))
    ), persists[-1]


def _without_decay(group: _Group) -> None:
    """Run chunks without decay by the recursion alone."""
    n, BH, C, F = group.keys.shape
    noise = torch.eye(C, dtype=group.keys.dtype, device=group.keys.device).expand(BH, C, C)
    # P only shrinks, so its start and the longest key bound all chunks.
    largest = (
        group.keys.square().sum(-1).max()
        * group.states[0, ..., :F].diagonal(dim1=-2, dim2=-1).max()
    )
    safe = can_read_values(group.keys) and bool(group.noise_floor * largest < 1)
    Z = group.states[0].clone()
    for i, (key, solved, next_state) in enumerate(
        zip(group.keys.unbind(0), group.solved.unbind(0), group.states[1:], strict=True)
    ):
        solved.baddbmm_(key, Z, alpha=-1)
        A = torch.baddbmm(noise, solved[..., :F], key.mT, alpha=-1)
        if not safe:
            _raise_diagonal(A, noise.diagonal(dim1=-2, dim2=-1), group.noise_floor)
        _solve_chunk(group, i, A)
        Z.baddbmm_(solved[..., :F].mT, solved, alpha=-1)
        if group.factors is None and i < n - 1:
            next_state[..., F:] = Z[..., F:]  # outputs need M alone
        else:
            next_state.copy_(Z)


def _raise_diagonal(A: Tensor, noise: Tensor, fraction: float) -> None:
    """Raise the noise on A's diagonal to the smallest resolved value, in place."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    diagonal.add_((fraction * (diagonal - noise) - noise).clamp_min_(0))
    # Keep the diagonal positive when a zero key meets an underflowed decay.
    diagonal.clamp_min_(torch.finfo(A.dtype).tiny ** 0.5)


def _solve_chunk(group: _Group, i: int, A: Tensor) -> None:
    """Compute L, and replace −K P and V − K M by −X and R."""
    L = torch.linalg.cholesky_ex(A)[0]
    right = group.solved[i].mT
    torch.linalg.solve_triangular(L.mT, right, upper=True, left=False, out=right)
    if group.factors is not None:
        group.factors[i] = L


def _with_decay(
    layout: Layout, group: _Group, D: Tensor, kappa: Tensor, saved: Saved
) -> tuple[Tensor, Tensor]:
    """Run chunks with decay: P comes from Gram matrices, so only M is sequential.

    P − XᵀX would lose precision under strong decay. A chunk maps M to T M + U with
    T = I − XᵀL⁻¹K and U = XᵀL⁻¹V, in parallel for all chunks. Then R = L⁻¹(V − K M). With resets,
    L is block diagonal in segments. The first segment uses P and M, the others 1/λ and W₀. Only the
    last segment reaches the next chunk.
    """
    F, segments, ridge = group.keys.shape[-1], group.segments, group.ridge
    end_decay = group.decay[..., -1]
    systems = _chunk_grams(group.keys, group.logs, segments)
    carry = end_decay if segments is None else torch.where(segments.has_reset, 0.0, end_decay)
    for gram, end in zip(systems.unbind(0), carry.unbind(0), strict=True):
        D = gram.addcmul_(D, end[:, None, None])
    D = D.clone()
    updates = _ridge_updates(layout, group, systems, kappa)
    saved.ridge_updates += updates
    kappa = updates[-1].updated
    tau = torch.stack([update.updated for update in updates])
    systems.diagonal(dim1=-2, dim2=-1).add_(tau.unsqueeze(-1) * ridge)
    factor, failed = torch.linalg.cholesky_ex(systems)
    eye = torch.eye(F, dtype=factor.dtype, device=factor.device)
    factor = torch.where(failed[..., None, None] > 0, eye, factor)  # an inverse must exist
    P = torch.cholesky_inverse(factor).mT  # contiguous
    group.states[1:, ..., :F] = P
    KP = bmm(group.keys, group.states[:-1, ..., :F])
    if segments is not None:
        KP = torch.where(segments.after_reset.unsqueeze(-1), group.keys / ridge.unsqueeze(-2), KP)
    A = bmm(KP, group.keys.mT)
    if segments is not None:
        A.masked_fill_(~segments.same_segment, 0.0)
    A.diagonal(dim1=-2, dim2=-1).add_(group.decay)
    _raise_diagonal(A, group.decay, group.noise_floor)
    L, token_failed = torch.linalg.cholesky_ex(A)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    # With the inverse on the left and L transposed, the fastest of the four ways on a CPU.
    inverse_factor = torch.linalg.solve_triangular(L.mT, eye, upper=True, left=False).mT
    floor = torch.stack([update.floor for update in updates]) * ridge.mean(-1)
    end_loss = estimate_relative_error(systems, P, floor).masked_fill_(failed > 0, torch.inf)
    token_loss = per_token_relative_error(A, L)
    token_loss.masked_fill_(token_failed.unsqueeze(-1) > 0, torch.inf)
    if layout.unresolved is None:
        saved.losses.append(end_loss + token_loss.amax(-1))
    else:
        saved.losses.append(end_loss)
        saved.token_losses.append(token_loss)
    if group.factors is not None:
        group.factors = inverse_factor
    X = bmm(inverse_factor, KP)
    group.solved[..., :F] = group.keys
    whitened = bmm(inverse_factor, group.solved)  # L⁻¹K and L⁻¹V
    X_last = X if segments is None else X * segments.in_last.unsqueeze(-1)
    maps = bmm(X_last.mT, whitened)
    maps[..., :F].neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    _apply_ridge_updates(maps, P, updates, group)
    states = group.states[..., F:]
    for i, (T, U) in enumerate(x.split([F, x.shape[-1] - F], dim=-1) for x in maps.unbind(0)):
        start = states[i]
        if segments is not None:
            start = torch.where(segments.has_reset[i, :, None, None], group.origin, start)
        torch.baddbmm(U, T, start, out=states[i + 1])
    torch.neg(X, out=group.solved[..., :F])
    whitened_values, whitened_keys = whitened[..., F:].contiguous(), whitened[..., :F]
    if segments is None:
        group.solved[..., F:] = add_bmm_(whitened_values, whitened_keys, states[:-1], alpha=-1)
    else:
        after_reset = segments.after_reset.unsqueeze(-1)
        group.solved[..., F:] = whitened_values - torch.where(
            after_reset, whitened_keys @ group.origin, bmm(whitened_keys, states[:-1])
        )
    return D, kappa


def _chunk_grams(keys: Tensor, logs: Tensor, segments: ResetSegments | None) -> Tensor:
    """Return the contribution of each chunk to the Gram matrix at its end, ``[n, BH, F, F]``."""
    return bmm((keys * decay_to_end(logs, segments).to(keys.dtype).unsqueeze(-1)).mT, keys)


def _ridge_updates(
    layout: Layout, group: _Group, grams: Tensor, kappa: Tensor
) -> list[RidgeUpdate]:
    """Return the changes of ρ after each chunk, from the Gram matrices at chunk ends."""
    end_decays = group.decay[..., -1]
    # Float64 defines the smallest ridge. A larger one in float32 would be another problem.
    scale = torch.finfo(torch.float64).eps / torch.finfo(grams.dtype).eps
    floors = scale * smallest_ridge(grams).squeeze(-1) / group.ridge.mean(-1)  # [n, BH]
    updates: list[RidgeUpdate] = []
    for i, (minimum, end) in enumerate(zip(floors.unbind(0), end_decays.unbind(0), strict=True)):
        if group.segments is not None:
            kappa = torch.where(group.segments.has_reset[i], 1.0, kappa)
        kappa = kappa * end
        changed, target = minimum > kappa, torch.maximum(kappa, minimum)
        floor = torch.where(changed, minimum, 0.0)
        if layout.span_ends is not None:
            at_span_end = layout.span_ends[group.first + i].repeat_interleave(layout.H)
            target = torch.where(at_span_end, 1.0, target)
            changed = changed | at_span_end
        updates.append(RidgeUpdate(group.first + i, kappa, target, changed, floor))
        kappa = target
    return updates


def _apply_ridge_updates(
    maps: Tensor, P: Tensor, updates: list[RidgeUpdate], group: _Group
) -> None:
    """Update T and U in place for ridges that change from κλ to τλ; P is the inverse with τ."""
    changed = torch.stack([update.changed for update in updates])
    if can_read_values(P) and not bool(changed.any()):
        return
    increase = torch.stack([update.updated - update.previous for update in updates])
    increase_ridge = torch.where(changed, increase, 0.0)[..., None] * group.ridge  # [n, BH, F]
    F = P.shape[-1]
    correction = increase_ridge.unsqueeze(-1) * maps
    correction[..., F:] -= increase_ridge.unsqueeze(-1) * group.origin
    add_bmm_(maps, P, correction, alpha=-1)
