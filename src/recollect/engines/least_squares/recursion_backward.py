"""Recursive least squares over chunks of tokens: exact at every token, no iteration.

Per head, let P = (D + ρI)⁻¹ and M = Wᵀ at the start of a chunk. Let a_t be the product of decays
from its start to token t. Keys and values are already scaled by the root of their weights::

    A = diag(a) + K P Kᵀ = L Lᵀ,   X = L⁻¹ K P,   R = L⁻¹ (V − K M)
    y_t = q_t M + Σ_{s≤t} (q_t·X_s) R_s            leading blocks of L are the prefixes' factors
    M ← M + XᵀR,   P ← (P − XᵀX)/a_C

Rows of A are rows of the classical recursion times √a_t, which avoids divisions by decays inside a
chunk. The last line for P holds without decay. With decay P − XᵀX loses digits, so every chunk
starts from P = (D + ρI)⁻¹ of its Gram matrix. After a chunk, ρ may increase from κλ to τλ at
constant (D + ρI)M − ρM₀, which changes M::

    P ← (D + τλ)⁻¹,   M ← M − (τ − κ) P λ (M − M₀)

A reset inside a chunk starts another segment. The blocks of A, X and R of that segment start from
D = 0, ρ = λ and M = M₀, and earlier tokens have no effect on it.

The backward pass uses the statistics G = D + ρI and J = WG, in which the recursion is linear. Let
z_t = P_t q_t, m_t = W_tᵀ ȳ_t, U = ∂/∂J and N = −∂/∂G. Let g_i = a_C/a_i be the decay from i to the
end::

    q̄_t = m_t
    v̄_i = Σ_{t≥i} (a_t/a_i)(k_i·z_t) ȳ_t + g_i U k_i
    k̄_i = Σ_{t≥i} (a_t/a_i) [((v_i − W_t k_i)·ȳ_t) z_t − (k_i·z_t) m_t] + g_i (Uᵀv_i − (N + Nᵀ) k_i)

The sums inside the chunk need no division either::

    (a_t/a_i) k_i·z_t           = (L⁻ᵀ triu(X Qᵀ))_{it}
    (1/a_i) (v_i − W_t k_i)·ȳ_t = (L⁻ᵀ triu(R Ȳᵀ))_{it}

The gradient of a decay is that of the statistics before it: ∂/∂log γ_l decreases by ½(k_l·k̄_l +
v_l·v̄_l) from one token to the next. It is summed in float64 from the end. Derivations:
`docs/design/least-squares.md`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, once_differentiable
from recollect.engines.common.linalg import add_bmm_, bmm
from recollect.engines.least_squares.inputs import RidgeProblem, RidgeState
from recollect.engines.least_squares.recursion_forward import forward
from recollect.engines.least_squares.recursion_layout import Layout, Saved, decay_to_end

__all__ = ["recursion"]


def recursion(p: RidgeProblem, layout: Layout) -> tuple[Tensor, RidgeState, Tensor]:
    """Return y ``[B, S, H, G, V]``, the final state, and relative errors ``[n, B, H]``.

    n is 0 without decay (`common.precision_checks`).
    """
    if p.wants_gradient():
        y, *state, losses = _Recursion.apply(layout, *p.tensors())
        return y, RidgeState(*state), losses
    return forward(layout, p, save=False)[0]


# -- backward ------------------------------------------------------------------------------------


class _Recursion(CustomFunction):
    """The recursion with an explicit backward."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        (y, state, losses), saved = forward(layout, RidgeProblem.rebuild(tensors), save=True)
        ctx.layout, ctx.saved = layout, saved
        ctx.mark_non_differentiable(losses)
        ctx.save_for_backward(*tensors, *state.tensors())
        return y, *state.tensors(), losses

    @staticmethod
    @once_differentiable("least squares over all of the past (engine least_squares)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        p, end = RidgeProblem.rebuild(saved[:-4]), RidgeState(*saved[-4:])
        dy, *dstate, _ = grads
        grad_inputs = _backward(ctx.layout, ctx.saved, p, end, dy, RidgeState(*dstate))
        needs = ctx.needs_input_grad[1:]
        return None, *(x if need else None for x, need in zip(grad_inputs, needs, strict=True))


def _backward(
    layout: Layout, saved: Saved, p: RidgeProblem, end: RidgeState, dy: Tensor, dend: RidgeState
) -> tuple[Tensor | None, ...]:
    """Return gradients in the order of `RidgeProblem.tensors`, ``None`` for the inverse."""
    q, k, v, log_decay = p.q, p.k, p.v, p.log_decay
    if saved.nan is not None:  # unresolved outputs have NaN gradients
        dy = dy.masked_fill(saved.nan[..., None, None], torch.nan)
    flat = layout.merge_heads
    F, V = k.shape[-1], v.shape[-1]
    lam, W0 = flat(p.ridge), flat(p.origin).mT  # [BH, F], [BH, V, F]
    M, D, kappa, P = end.map(flat).tensors()
    dM, dD, dkappa, dP = dend.map(flat).tensors()
    # The final state as a function of its statistics J and G = D + κλ.
    G = D + torch.diag_embed(kappa[:, None] * lam)
    U = (P @ dM).mT
    N = M @ (dM.mT @ P) + P @ ((dP + dP.mT) / 2) @ P - (dD + dD.mT) / 2
    # ∂/∂log γ at the end.
    end_term = ((U * (G @ M).mT).sum((-2, -1)) - (N * G).sum((-2, -1))).double()
    gram_term = (dD.diagonal(dim1=-2, dim2=-1) * lam).sum(-1)
    # Gradient of log κ other than through G, equal for every token of the open span.
    ridge_grad = (kappa * (dkappa - gram_term)).double()
    dlam = -kappa[:, None] * dD.diagonal(dim1=-2, dim2=-1)
    dW0 = torch.zeros_like(W0)
    grad_JG = torch.cat([U, N], dim=-2)  # [BH, V + F, F]
    reset_grad = torch.zeros_like(grad_JG)  # gradients of J = λW₀ and G = λ after resets
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    token_terms = torch.zeros(log_decay.shape, dtype=torch.float64, device=k.device)
    C = layout.chunk
    shape = (layout.B, layout.H)
    chunks = k.shape[1] // C
    # ∂/∂log γ of a token through κ at the next ridge update.
    ridge_terms = torch.zeros(*k.shape[:3], dtype=torch.float64, device=k.device)
    update_terms = torch.zeros(chunks, *shape, dtype=torch.float64, device=k.device)
    updates = {update.chunk: update for update in saved.ridge_updates}
    for (start, stop), states, solved, factors in reversed(
        list(zip(layout.groups, saved.states, saved.solved, saved.factors, strict=True))
    ):
        n = states.shape[0]
        segments = layout.segments(start, stop)
        logs = layout.cumulative_log_decay(log_decay[:, start:stop], segments)
        ends = logs[..., -1].exp().to(k.dtype)[..., None, None]
        Q = layout.split_queries(q[:, start:stop])
        Y = layout.split_queries(dy[:, start:stop]).contiguous()
        X, R = solved[..., :F], solved[..., F:]  # X is −X throughout
        S = layout.causal(bmm(Q, X.mT), segments)  # −tril(Q Xᵀ)
        T = layout.causal(bmm(Y, R.mT), segments)
        m, z = bmm(Y, states[..., F:].mT), bmm(Q, states[..., :F])
        after_reset = None
        if segments is not None:
            after_reset = layout.per_query(segments.after_reset).unsqueeze(-1)
            m = torch.where(after_reset, Y @ W0, m)
            z = torch.where(after_reset, Q / lam.unsqueeze(-2), z)
        m, z = add_bmm_(m, T, X, alpha=-1), add_bmm_(z, S, X, alpha=-1)
        dq[:, start:stop] = layout.join_queries(m)
        pairs = torch.cat([Y, m], dim=-1)
        before_reset = z if after_reset is None else z.masked_fill(after_reset, 0.0)
        chunk_grads = bmm(pairs.mT, before_reset)  # [.., V + F, F]
        if after_reset is not None:
            reset_grad = reset_grad + bmm(pairs.mT, z.masked_fill(~after_reset, 0.0)).sum(0)
        end_grads = torch.empty_like(chunk_grads)
        chunk_ridge_grad = torch.empty(n, *kappa.shape, dtype=torch.float64, device=k.device)
        for i in reversed(range(n)):
            chunk = start // C + i
            update = updates.get(chunk)
            if update is not None:
                increase = torch.where(update.changed, update.updated - update.previous, 0.0)
                slope = (grad_JG[:, :V] * W0).sum(-2) - grad_JG[:, V:].diagonal(dim1=-2, dim2=-1)
                update_grad = (slope * lam).sum(-1)
                dlam = dlam + increase[:, None] * slope
                dW0 = dW0 + increase[:, None, None] * grad_JG[:, :V] * lam.unsqueeze(-2)
                update_terms[chunk] = (increase * update_grad).double().view(shape)
                ridge_grad = torch.where(
                    update.changed, -(update.previous * update_grad).double(), ridge_grad
                )
            chunk_ridge_grad[i] = ridge_grad
            end_grads[i] = grad_JG
            grad_JG = grad_JG * ends[i]
            if segments is not None:
                has_reset = segments.has_reset[i]
                reset_grad = reset_grad + torch.where(has_reset[:, None, None], grad_JG, 0.0)
                grad_JG = grad_JG.masked_fill(has_reset[:, None, None], 0.0)
                ridge_grad = ridge_grad.masked_fill(has_reset, 0.0)
            grad_JG = grad_JG + chunk_grads[i]
        token_ridge_grad = chunk_ridge_grad.unsqueeze(-1).expand(*chunk_ridge_grad.shape, C)
        ridge_terms[:, start:stop] = layout.join(
            token_ridge_grad if segments is None else token_ridge_grad * segments.in_last
        )
        keys = layout.split(k[:, start:stop]).contiguous()
        values = layout.split(v[:, start:stop]).contiguous()
        inner = torch.cat([add_bmm_(bmm(T.mT, z), S.mT, m), bmm(S.mT, Y).neg_()], dim=-1)
        if layout.has_decay:
            inner = bmm(factors.mT, inner)
        else:
            inner = torch.linalg.solve_triangular(factors.mT, inner, upper=True)
        g = decay_to_end(logs, segments).to(k.dtype).unsqueeze(-1)
        outer = bmm(keys, end_grads.mT)  # [.., C, V + F]: U k, N k
        inner[..., F:] += g * outer[..., :V]
        cross = add_bmm_(bmm(values, end_grads[..., :V, :]), keys, end_grads[..., V:, :], alpha=-1)
        inner[..., :F] += g * (cross - outer[..., V:])
        dk[:, start:stop] = layout.join(inner[..., :F])
        dv[:, start:stop] = layout.join(inner[..., F:])
        token_term = (inner[..., :F] * keys).sum(-1) + (inner[..., F:] * values).sum(-1)
        token_terms[:, start:stop] = layout.join(token_term.double() / 2)
    if layout.resets is not None:
        dlam = (
            dlam + (reset_grad[:, :V] * W0).sum(-2) - reset_grad[:, V:].diagonal(dim1=-2, dim2=-1)
        )
        dW0 = dW0 + reset_grad[:, :V] * lam.unsqueeze(-2)
    dlog = _log_decay_grad(end_term.view(shape), token_terms, update_terms, ridge_terms, layout)
    M, D, kappa, _ = p.state.map(flat).tensors()
    G = D + torch.diag_embed(kappa[:, None] * lam)
    U, N = grad_JG.split([V, F], dim=-2)
    dM = G @ U.mT
    dD = M @ U - N
    dD = (dD + dD.mT) / 2
    diagonal = dD.diagonal(dim1=-2, dim2=-1)
    dlam = dlam + kappa[:, None] * diagonal
    dkappa = (diagonal * lam).sum(-1) + (ridge_grad / kappa).to(diagonal.dtype)
    others = (x.unflatten(0, shape) for x in (dlam, dW0.mT, dM, dD, dkappa))
    return dq, dk, dv, dlog.to(log_decay.dtype), *others, None


def _log_decay_grad(
    end_term: Tensor,
    token_terms: Tensor,
    update_terms: Tensor,
    ridge_terms: Tensor,
    layout: Layout,
) -> Tensor:  # [B, S, H]
    """Return ∂/∂log γ: the gradient from the end minus the terms of later tokens."""
    C, tokens = layout.chunk, token_terms.shape[1]
    token_terms = token_terms.clone()
    # A ridge update follows the last token of its chunk.
    token_terms[:, C - 1 :: C] += update_terms.movedim(0, 1)
    sums = token_terms.flip(1).cumsum(1).flip(1)
    if layout.resets is None:
        return end_term[:, None] - sums + ridge_terms
    # No gradient flows back through a reset.
    positions = torch.arange(tokens, device=token_terms.device)[:, None]
    reset_index = torch.where(layout.resets, positions, tokens).flip(1).cummin(1).values.flip(1)
    next_reset = torch.cat([reset_index[:, 1:], torch.full_like(reset_index[:, :1], tokens)], dim=1)
    segment_end = torch.cat([sums, end_term[:, None]], dim=1).gather(1, next_reset)
    return segment_end - sums + ridge_terms
