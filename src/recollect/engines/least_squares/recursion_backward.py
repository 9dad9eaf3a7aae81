"""Recursive least squares over chunks of tokens: exact at every token, no iteration.

Per head, with P = (D + ρI)⁻¹ and M = Wᵀ at a chunk's start, a_t the product of the decays inside
it, keys and values already times the root of their weights::

    A = diag(a) + K P Kᵀ = L Lᵀ,   X = L⁻¹ K P,   R = L⁻¹ (V − K M)
    y_t = q_t M + Σ_{s≤t} (q_t·X_s) R_s            leading blocks of L are the prefixes' factors
    M ← M + XᵀR,   P ← (P − XᵀX)/a_C

A row of A is that of the classical recursion times √a_t, so no decay is ever divided by inside a
chunk. The last line for P holds without decay; with it P − XᵀX loses digits, so every chunk starts
from P = (D + ρI)⁻¹ of its Gram matrix. At a *border* ρ is raised from κλ to τλ, which keeps
(D + ρI)M − ρM₀ and so moves M::

    P ← (D + τλ)⁻¹,   M ← M − (τ − κ) P λ (M − M₀)

Where a memory starts anew inside a chunk, the tokens from there on are another part of it: their
blocks of A, X and R start from D = 0, ρ = λ and M = M₀, and what was before goes no further.

Backward works on the statistics G = D + ρI and J = WG, on which everything above is linear. With
z_t = P_t q_t, m_t = W_tᵀ ȳ_t, U = ∂/∂J, N = −∂/∂G and g_i = a_C/a_i the decay from i to the end::

    q̄_t = m_t
    v̄_i = Σ_{t≥i} (a_t/a_i)(k_i·z_t) ȳ_t + g_i U k_i
    k̄_i = Σ_{t≥i} (a_t/a_i) [((v_i − W_t k_i)·ȳ_t) z_t − (k_i·z_t) m_t] + g_i (Uᵀv_i − (N + Nᵀ) k_i)

and the sums inside the chunk need no division either, because with ẑ_t = a_t z_t::

    (a_t/a_i) k_i·z_t           = (L⁻ᵀ triu(X Qᵀ))_{it}
    (1/a_i) (v_i − W_t k_i)·ȳ_t = (L⁻ᵀ triu(R Ȳᵀ))_{it}

A decay's gradient is what the statistics before it carry: ∂/∂log γ_l falls by ½(k_l·k̄_l +
v_l·v̄_l) from one token to the next, summed in float64 from the end. Derivations:
`docs/design/least-squares.md`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, once_differentiable
from recollect.engines.common.linalg import bmm, plus
from recollect.engines.least_squares.inputs import RidgeProblem, RidgeState
from recollect.engines.least_squares.recursion_forward import forward
from recollect.engines.least_squares.recursion_layout import Layout, Saved, Spans, to_end

__all__ = ["recursion"]


def recursion(p: RidgeProblem, spans: Spans) -> tuple[Tensor, RidgeState, Tensor]:
    """Outputs, the state after all tokens, and what each chunk has lost.

    Args:
        p: tokens and where they start from.
        spans: how tokens are cut; they are aligned to it.

    Returns:
        y ``[B, S, H, G, V]``, the state, and losses (`common.resolution`) ``[n, B, H]``; nothing is
        lost without decay, and n = 0.
    """
    layout = Layout.of(p.q, spans)
    if p.wants_gradient():
        y, *state, lost = _Recursion.apply(layout, *p.tensors())
        return y, RidgeState(*state), lost
    return forward(layout, p, save=False)[0]


# -- backward ------------------------------------------------------------------------------------


class _Recursion(CustomFunction):
    """The recursion with its written-out backward."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        (y, state, lost), saved = forward(layout, RidgeProblem.rebuild(tensors), save=True)
        ctx.layout, ctx.saved = layout, saved
        ctx.mark_non_differentiable(lost)
        ctx.save_for_backward(*tensors, *state.tensors())
        return y, *state.tensors(), lost

    @staticmethod
    @once_differentiable("least squares over all of the past (engine least_squares)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        p, end = RidgeProblem.rebuild(saved[:-4]), RidgeState(*saved[-4:])
        dy, *dstate, _ = grads
        slopes = _backward(ctx.layout, ctx.saved, p, end, dy, RidgeState(*dstate))
        needs = ctx.needs_input_grad[1:]
        return None, *(x if need else None for x, need in zip(slopes, needs, strict=True))


def _backward(
    layout: Layout, saved: Saved, p: RidgeProblem, end: RidgeState, dy: Tensor, dend: RidgeState
) -> tuple[Tensor | None, ...]:
    """Gradients in the order of `RidgeProblem.tensors`, but for the inverse."""
    q, k, v, log_decay = p.q, p.k, p.v, p.log_decay
    if saved.nan is not None:  # the gradient of what is no number is none
        dy = dy.masked_fill(saved.nan[..., None, None], torch.nan)
    flat = layout.heads
    F, V = k.shape[-1], v.shape[-1]
    lam, W0 = flat(p.ridge), flat(p.origin).mT  # [BH, F], [BH, V, F]
    M, D, kappa, P = end.map(flat).tensors()
    dM, dD, dkappa, dP = dend.map(flat).tensors()
    # The final state as a function of its statistics J and G = D + κλ.
    G = D + torch.diag_embed(kappa[:, None] * lam)
    U = (P @ dM).mT
    N = M @ (dM.mT @ P) + P @ ((dP + dP.mT) / 2) @ P - (dD + dD.mT) / 2
    flow = ((U * (G @ M).mT).sum((-2, -1)) - (N * G).sum((-2, -1))).double()  # ∂/∂log γ after all
    lifted = (dD.diagonal(dim1=-2, dim2=-1) * lam).sum(-1)
    # What reaches log κ beside G, which holds κ: the same for every token of the open span.
    opened = (kappa * (dkappa - lifted)).double()
    dlam = -kappa[:, None] * dD.diagonal(dim1=-2, dim2=-1)
    dW0 = torch.zeros_like(W0)
    both = torch.cat([U, N], dim=-2)  # [BH, V + F, F]
    begun = torch.zeros_like(both)  # what reaches G = λ and J = λW₀ of new starts
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    falls = torch.zeros(log_decay.shape, dtype=torch.float64, device=k.device)
    C = layout.spans.chunk
    shape = (layout.B, layout.H)
    chunks = k.shape[1] // C
    # ∂/∂log γ of a token beside the flow: through κ at the next border.
    own = torch.zeros(*k.shape[:3], dtype=torch.float64, device=k.device)
    drop = torch.zeros(chunks, *shape, dtype=torch.float64, device=k.device)
    borders = {border.chunk: border for border in saved.borders}
    for (start, stop), states, solved, factors in reversed(
        list(zip(layout.groups, saved.states, saved.solved, saved.factors, strict=True))
    ):
        n = states.shape[0]
        parts = layout.parts(start, stop)
        logs = layout.cumulated(log_decay[:, start:stop], parts)
        ends = logs[..., -1].exp().to(k.dtype)[..., None, None]
        Q, Y = layout.queries(q[:, start:stop]), layout.queries(dy[:, start:stop]).contiguous()
        X, R = solved[..., :F], solved[..., F:]  # X is −X throughout
        S = layout.causal(bmm(Q, X.mT), parts)  # −tril(Q Xᵀ)
        T = layout.causal(bmm(Y, R.mT), parts)
        m, z = bmm(Y, states[..., F:].mT), bmm(Q, states[..., :F])
        fresh = None
        if parts is not None:
            fresh = layout.per_query(parts.fresh).unsqueeze(-1)
            m = torch.where(fresh, Y @ W0, m)
            z = torch.where(fresh, Q / lam.unsqueeze(-2), z)
        m, z = plus(m, T, X, alpha=-1), plus(z, S, X, alpha=-1)
        dq[:, start:stop] = layout.unqueries(m)
        pairs = torch.cat([Y, m], dim=-1)
        add = bmm(pairs.mT, z if fresh is None else z.masked_fill(fresh, 0.0))  # [.., V + F, F]
        if fresh is not None:
            begun = begun + bmm(pairs.mT, z.masked_fill(~fresh, 0.0)).sum(0)
        later = torch.empty_like(add)
        held = torch.empty(n, *kappa.shape, dtype=torch.float64, device=k.device)
        for i in reversed(range(n)):
            chunk = start // C + i
            border = borders.get(chunk)
            if border is not None:
                raised = torch.where(border.fixed, border.after - border.before, 0.0)
                slope = (both[:, :V] * W0).sum(-2) - both[:, V:].diagonal(dim1=-2, dim2=-1)
                total = (slope * lam).sum(-1)
                dlam = dlam + raised[:, None] * slope
                dW0 = dW0 + raised[:, None, None] * both[:, :V] * lam.unsqueeze(-2)
                drop[chunk] = (raised * total).double().view(shape)
                opened = torch.where(border.fixed, -(border.before * total).double(), opened)
            held[i] = opened
            later[i] = both
            both = both * ends[i]
            if parts is not None:
                reset = parts.reset[i]
                begun = begun + torch.where(reset[:, None, None], both, 0.0)
                both = both.masked_fill(reset[:, None, None], 0.0)
                opened = opened.masked_fill(reset, 0.0)
            both = both + add[i]
        of_span = held.unsqueeze(-1).expand(*held.shape, C)
        own[:, start:stop] = layout.join(of_span if parts is None else of_span * parts.last)
        keys = layout.split(k[:, start:stop]).contiguous()
        values = layout.split(v[:, start:stop]).contiguous()
        near = torch.cat([plus(bmm(T.mT, z), S.mT, m), bmm(S.mT, Y).neg_()], dim=-1)
        if layout.spans.forgets:
            near = bmm(factors.mT, near)
        else:
            near = torch.linalg.solve_triangular(factors.mT, near, upper=True)
        g = to_end(logs, parts).to(k.dtype).unsqueeze(-1)
        far = bmm(keys, later.mT)  # [.., C, V + F]: U k, N k
        near[..., F:] += g * far[..., :V]
        cross = plus(bmm(values, later[..., :V, :]), keys, later[..., V:, :], alpha=-1)
        near[..., :F] += g * (cross - far[..., V:])
        dk[:, start:stop] = layout.join(near[..., :F])
        dv[:, start:stop] = layout.join(near[..., F:])
        fall = (near[..., :F] * keys).sum(-1) + (near[..., F:] * values).sum(-1)
        falls[:, start:stop] = layout.join(fall.double() / 2)
    if layout.spans.anew is not None:
        dlam = dlam + (begun[:, :V] * W0).sum(-2) - begun[:, V:].diagonal(dim1=-2, dim2=-1)
        dW0 = dW0 + begun[:, :V] * lam.unsqueeze(-2)
    dlog = _decays(flow.view(shape), falls, drop, own, layout.spans)
    M, D, kappa, _ = p.state.map(flat).tensors()
    G = D + torch.diag_embed(kappa[:, None] * lam)
    U, N = both.split([V, F], dim=-2)
    dM = G @ U.mT
    dD = M @ U - N
    dD = (dD + dD.mT) / 2
    through = dD.diagonal(dim1=-2, dim2=-1)
    dlam = dlam + kappa[:, None] * through
    dkappa = (through * lam).sum(-1) + (opened / kappa).to(through.dtype)
    back = (x.unflatten(0, shape) for x in (dlam, dW0.mT, dM, dD, dkappa))
    return dq, dk, dv, dlog.to(log_decay.dtype), *back, None


def _decays(flow: Tensor, falls: Tensor, drop: Tensor, own: Tensor, spans: Spans) -> Tensor:
    """∂/∂log γ ``[B, S, H]``: the flow from the end, less what falls out on the way."""
    C, tokens = spans.chunk, falls.shape[1]
    falls = falls.clone()
    falls[:, C - 1 :: C] += drop.movedim(0, 1)  # at a border, after its chunk's last token
    after = falls.flip(1).cumsum(1).flip(1)
    if spans.anew is None:
        return flow[:, None] - after + own
    # All that is left at a new start falls out there: before it nothing flows from behind.
    places = torch.arange(tokens, device=falls.device)[:, None]
    starts = torch.where(spans.anew, places, tokens).flip(1).cummin(1).values.flip(1)
    next_start = torch.cat([starts[:, 1:], torch.full_like(starts[:, :1], tokens)], dim=1)
    ended = torch.cat([after, flow[:, None]], dim=1).gather(1, next_start)
    return ended - after + own
