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

Where a memory starts anew, a chunk starts from D = 0, ρ = λ and M = M₀ in place of what was.

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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.choices.gradients import once
from recollect.engines.common.linalg import bmm, plus
from recollect.engines.least_squares.recursion_forward import Kept, Layout, Spans, forward

__all__ = ["Spans", "recursion"]


def recursion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    M: Tensor,
    D: Tensor,
    kept: Tensor,
    origin: Tensor,
    *,
    inverse: Tensor,
    spans: Spans,
) -> tuple[Tensor, ...]:
    """Outputs and the state after all tokens.

    Args:
        q: ``[B, S, H, G, F]``. k, v: ``[B, S, H, F]``, ``[B, S, H, V]``, zero where nothing is
            written, with ``log_decay [B, S, H]`` zero there.
        ridge: λ ``[B, H, F]``.
        M, D, kept, origin: Wᵀ ``[B, H, F, V]``, the data's Gram matrix, ρ/λ ``[B, H]``, W₀ᵀ.
        inverse: (D + ρI)⁻¹; the gradient goes through what it is the inverse of.

    Returns:
        y ``[B, S, H, G, V]``, M, D, kept and the inverse, and what each chunk has lost
        (`common.resolution`), ``[n, B, H]``; nothing is lost without decay, and n = 0.
    """
    layout = Layout.of(q, spans)
    tensors = (q, k, v, log_decay, ridge, M, D, kept, origin)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Recursion.apply(layout, inverse, *tensors)
    return forward(layout, inverse, *tensors, keep=False)[0]


# -- backward ------------------------------------------------------------------------------------


class _Recursion(torch.autograd.Function):
    """The recursion with its written-out backward."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, inverse: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, saved = forward(layout, inverse, *tensors, keep=True)
        ctx.layout, ctx.kept = layout, saved
        _, M, D, kept, P, lost = out
        ctx.mark_non_differentiable(lost)
        ctx.save_for_backward(*tensors, M, D, kept, P)
        return out

    @staticmethod
    @once("least squares over all of the past (engine least_squares)")
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, M, D, kept, P = saved
        found = _backward(ctx.layout, ctx.kept, tuple(tensors), (M, D, kept, P), grads)
        needs = ctx.needs_input_grad[2:]
        return (None, None, *(x if need else None for x, need in zip(found, needs, strict=True)))


def _backward(
    layout: Layout,
    saved: Kept,
    tensors: tuple[Tensor, ...],
    end: tuple[Tensor, ...],
    grads: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    q, k, v, log_decay, ridge, M0, D0, kept, origin = tensors
    dy, dM, dD, dkept, dP, _ = grads
    flat = layout.heads
    F, V = k.shape[-1], v.shape[-1]
    lam, W0 = flat(ridge), flat(origin).mT  # [BH, F], [BH, V, F]
    M, D, kappa, P = (flat(x) for x in end)
    dM, dD, dkept, dP = (flat(x) for x in (dM, dD, dkept, dP))
    # The final state as a function of its statistics J and G = D + κλ.
    G = D + torch.diag_embed(kappa[:, None] * lam)
    U = (P @ dM).mT
    N = M @ (dM.mT @ P) + P @ ((dP + dP.mT) / 2) @ P - (dD + dD.mT) / 2
    flow = ((U * (G @ M).mT).sum((-2, -1)) - (N * G).sum((-2, -1))).double()  # ∂/∂log γ after all
    lifted = (dD.diagonal(dim1=-2, dim2=-1) * lam).sum(-1)
    # What reaches log κ beside G, which holds κ: the same for every token of the open span.
    opened = (kappa * (dkept - lifted)).double()
    dlam = -kappa[:, None] * dD.diagonal(dim1=-2, dim2=-1)
    dW0 = torch.zeros_like(W0)
    both = torch.cat([U, N], dim=-2)  # [BH, V + F, F]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    falls = torch.zeros(log_decay.shape, dtype=torch.float64, device=k.device)
    C = layout.spans.chunk
    shape = (layout.B, layout.H)
    chunks = k.shape[1] // C
    anew = None if layout.spans.anew is None else layout.spans.anew.flatten(1)
    # ∂/∂log γ of a chunk's tokens beside the flow: through κ at the next border.
    own = torch.zeros(chunks, *shape, dtype=torch.float64, device=k.device)
    drop = torch.zeros_like(own)
    borders = {border.chunk: border for border in saved.borders}
    for (start, stop), states, solved, factors in reversed(
        list(zip(layout.groups, saved.states, saved.solved, saved.factors, strict=True))
    ):
        n = states.shape[0]
        logs = layout.cumulated(log_decay[:, start:stop])
        ends = logs[..., -1].exp().to(k.dtype)[..., None, None]
        Q, Y = layout.queries(q[:, start:stop]), layout.queries(dy[:, start:stop]).contiguous()
        X, R = solved[..., :F], solved[..., F:]  # X is −X throughout
        S = layout.causal(bmm(Q, X.mT))  # −tril(Q Xᵀ)
        T = layout.causal(bmm(Y, R.mT))
        m = plus(bmm(Y, states[..., F:].mT), T, X, alpha=-1)
        z = plus(bmm(Q, states[..., :F]), S, X, alpha=-1)
        dq[:, start:stop] = layout.unqueries(m)
        pairs = torch.cat([Y, m], dim=-1)
        add = bmm(pairs.mT, z)  # [n, BH, V + F, F]
        later = torch.empty_like(add)
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
            own[chunk] = opened.view(shape)
            later[i] = both
            both = both * ends[i] + add[i]
            if anew is not None:
                # What was before has no part in G = λ and J = λW₀.
                fresh = torch.where(anew[chunk, :, None, None], both, 0.0)
                dlam = dlam + (fresh[:, :V] * W0).sum(-2)
                dlam = dlam - fresh[:, V:].diagonal(dim1=-2, dim2=-1)
                dW0 = dW0 + fresh[:, :V] * lam.unsqueeze(-2)
                both, opened = both - fresh, torch.where(anew[chunk], 0.0, opened)
        keys = layout.split(k[:, start:stop]).contiguous()
        values = layout.split(v[:, start:stop]).contiguous()
        near = torch.cat([plus(bmm(T.mT, z), S.mT, m), bmm(S.mT, Y).neg_()], dim=-1)
        if layout.spans.forgets:
            near = bmm(factors.mT, near)
        else:
            near = torch.linalg.solve_triangular(factors.mT, near, upper=True)
        g = (logs[..., -1:] - logs).exp().to(k.dtype).unsqueeze(-1)
        far = bmm(keys, later.mT)  # [.., C, V + F]: U k, N k
        near[..., F:] += g * far[..., :V]
        cross = plus(bmm(values, later[..., :V, :]), keys, later[..., V:, :], alpha=-1)
        near[..., :F] += g * (cross - far[..., V:])
        dk[:, start:stop] = layout.join(near[..., :F])
        dv[:, start:stop] = layout.join(near[..., F:])
        fall = (near[..., :F] * keys).sum(-1) + (near[..., F:] * values).sum(-1)
        falls[:, start:stop] = layout.join(fall.double() / 2)
    dlog = _decays(flow.view(shape), falls, drop, own, layout.spans)
    G0 = flat(D0) + torch.diag_embed(flat(kept)[:, None] * lam)
    U, N = both.split([V, F], dim=-2)
    dM0 = G0 @ U.mT
    dG0 = flat(M0) @ U - N
    dG0 = (dG0 + dG0.mT) / 2
    through = dG0.diagonal(dim1=-2, dim2=-1)
    dlam = dlam + flat(kept)[:, None] * through
    dkept0 = (through * lam).sum(-1) + (opened / flat(kept)).to(through.dtype)
    back = (dlam, dM0, dG0, dkept0, dW0.mT)
    dlam, dM0, dG0, dkept0, dW0 = (x.unflatten(0, shape) for x in back)
    return dq, dk, dv, dlog.to(log_decay.dtype), dlam, dM0, dG0, dkept0, dW0


def _decays(flow: Tensor, falls: Tensor, drop: Tensor, own: Tensor, spans: Spans) -> Tensor:
    """∂/∂log γ ``[B, S, H]``: the flow from the end, less what falls out on the way."""
    C = spans.chunk
    if spans.anew is not None:
        # All that is left at a new start falls out there.
        left, within = flow, falls.unflatten(1, (-1, C)).sum(2)
        drop = drop.clone()
        for i in reversed(range(len(drop))):
            left = left - drop[i] - within[:, i]
            if i:
                drop[i - 1] += torch.where(spans.anew[i], left, 0.0)
    within = falls.flip(1).cumsum(1).flip(1)
    later = drop.flip(0).cumsum(0).flip(0).repeat_interleave(C, dim=0)  # [S, B, H]
    mine = own.repeat_interleave(C, dim=0)
    return flow[:, None] - within - (later - mine).movedim(0, 1)
