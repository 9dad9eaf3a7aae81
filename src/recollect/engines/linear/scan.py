"""The scan: memories whose every entry follows a recurrence of its own, h_t = α_t h_(t−1) + b_t.

Decays per entry (Mamba) and vector memories (LRU, RG-LRU) end here. With α_t ⊙ entry by entry,

    A_t = α_t ⊙ A_{t−1} + u_t k_tᵀ,     y_t = A_t q_t

Tokens go through in *groups* whose numbers fit the processor's cache. A group is cut into blocks
that run side by side, one token of every block at a time; products of decays then carry the state
from block to block. Only products of numbers in [0, 1] are formed, never quotients or differences
of cumulated logs, so the result is exact at any decay. See `docs/design/scan.md`.

The backward keeps the states at the starts of groups, O((T / group) V F), and recomputes the rest.
With ȳ and Ā the gradients of outputs and of the state, from the last token to the first::

    g_t = ȳ_t q_tᵀ + α_{t+1} ⊙ g_{t+1}      (g after the last token is Ā)
    q̄_t = A_tᵀ ȳ_t,   k̄_t = g_tᵀ u_t,   ū_t = g_t k_t,   ᾱ_t = g_t ⊙ A_{t−1}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.gradients import again

__all__ = ["GROUP", "scan"]

GROUP = 1 << 18
"""Entries of the states of a group on a CPU: 1 MB per intermediate."""

WIDE = 256
"""Entries of one state from which a CPU gains nothing from running blocks side by side."""


def scan(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    decay: Tensor,
    *,
    scale: Tensor | None = None,
    log: bool = True,
    A0: Tensor,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run A_t = α_t ⊙ A_{t−1} + u_t k_tᵀ, y_t = A_t q_t; all inputs in the state's dtype.

    Args:
        q: ``[B, T, H, G, F]``. k: ``[B, T, H, F]``. u: what is written, ``[B, T, H, V]``.
        decay: log α ``[B, T, H, V, F]`` (α itself, of any sign, unless ``log``); or, with
        scale: a ``[H, V, F]`` ≥ 0: ``[B, T, H, V]``, one factor of log α_t = decay_t ⊙ a, so that
            ``[B, T, H, V, F]`` is never made.
        A0: ``[B, H, V, F]``.
        chunk_size: tokens of a block; no influence on results.

    Returns:
        y ``[B, T, H, G, V]`` and A after the last token.
    """
    B, T, H, V = u.shape
    if not (B and T and H):
        return u.new_zeros(B, T, H, q.shape[3], V), A0
    # −inf times a scale of 0 would be NaN.
    decay = decay.clamp_min(-1e30) if log else decay
    cut = _Cut.of(B * H * V * k.shape[-1], T, chunk_size, cpu=u.device.type == "cpu")
    tokens = [x.transpose(0, 1) for x in (q, k, u, decay)]  # time first
    plan = _Plan(cut=cut, log=log)
    given = (A0, *tokens) if scale is None else (A0, *tokens, scale)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        y, A = cast(tuple[Tensor, Tensor], _Scan.apply(plan, *given))
    else:
        y, A, _ = _forward(plan, given, keep=False)
    return y.transpose(0, 1), A


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How T tokens are cut: groups of ``group`` tokens, blocks of ``block``."""

    T: int
    group: int
    block: int

    @classmethod
    def of(cls, entries: int, T: int, chunk_size: int | None, *, cpu: bool) -> _Cut:
        group = min(T, max(16, GROUP // entries)) if cpu else T
        if chunk_size is not None:
            block = min(chunk_size, group)
        elif cpu and entries >= WIDE:
            block = group
        else:
            block = max(1, math.isqrt(group))
        return cls(T=T, group=group, block=block)

    def groups(self) -> list[tuple[int, int]]:
        """First and last token of each group."""
        return [(s, min(s + self.group, self.T)) for s in range(0, self.T, self.group)]

    def blocks(self, tokens: int) -> list[tuple[int, int]]:
        """Runs of whole blocks of one length inside a group: the whole ones, then the rest."""
        whole = tokens - tokens % self.block
        return [run for run in ((0, whole), (whole, tokens)) if run[1] > run[0]]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    cut: _Cut
    log: bool

    def alpha(self, decay: Tensor, scale: Tensor | None) -> Tensor:
        """α of some tokens ``[C, B, H, V, F]``."""
        if scale is not None:
            return (decay.unsqueeze(-1) * scale).exp()
        return decay.exp() if self.log else decay


def _outer(u: Tensor, k: Tensor) -> Tensor:
    return u.unsqueeze(-1) * k.unsqueeze(-2)


def _apply(A: Tensor, q: Tensor) -> Tensor:
    """A q for every query: ``[C, B, H, V, F], [C, B, H, G, F] -> [C, B, H, G, V]``."""
    if A.shape[-1] == 1:
        return q * A.mT
    return q @ A.mT


def _states(a: Tensor, b: Tensor, A: Tensor, block: int) -> Tensor:
    """States before the first token and after each, ``[C + 1, ...]``; b is used up."""
    C = a.shape[0]
    states = torch.empty(C + 1, *A.shape, dtype=b.dtype, device=b.device)
    states[0] = A
    if block >= C:
        steps = states.unbind(0)
        for now, after, x, y in zip(steps, steps[1:], a.unbind(0), b.unbind(0), strict=False):
            torch.addcmul(y, x, now, out=after)
        return states
    # Blocks side by side from zero, with the products of their decays; then what each began with.
    n = C // block
    x, h = a.unflatten(0, (n, block)), states[1:].unflatten(0, (n, block))
    h.copy_(b.unflatten(0, (n, block)))
    reach = x.clone()
    for t in range(1, block):
        h[:, t].addcmul_(x[:, t], h[:, t - 1])
        reach[:, t].mul_(reach[:, t - 1])
    start = states[0]
    for j in range(n):
        h[j].addcmul_(reach[j], start)
        start = h[j, -1]
    return states


def _slopes(a: Tensor, o: Tensor, end: Tensor, block: int) -> Tensor:
    """g from o = ȳ qᵀ (used up) and the gradient of the state at the end; g of the start's state.

    o becomes g.
    """
    C = a.shape[0]
    if block >= C:
        o[C - 1].add_(end)
        found, factors = o.unbind(0), a.unbind(0)
        for t in range(C - 2, -1, -1):
            found[t].addcmul_(factors[t + 1], found[t + 1])
        return factors[0] * found[0]
    n = C // block
    x, g = a.unflatten(0, (n, block)), o.unflatten(0, (n, block))
    reach = torch.empty_like(x)
    reach[:, -1] = 1
    for t in range(block - 2, -1, -1):
        g[:, t].addcmul_(x[:, t + 1], g[:, t + 1])
        torch.mul(x[:, t + 1], reach[:, t + 1], out=reach[:, t])
    for j in range(n - 1, -1, -1):
        g[j].addcmul_(reach[j], end)
        end = x[j, 0] * g[j, 0]
    return end


def _forward(
    plan: _Plan, given: Sequence[Tensor], *, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    A, q, k, u, decay, *rest = given
    scale = rest[0] if rest else None
    y = u.new_empty(u.shape[0], *q.shape[1:4], u.shape[-1])
    kept: list[Tensor] = []
    for start, stop in plan.cut.groups():
        if keep:
            kept.append(A)
        for first, last in plan.cut.blocks(stop - start):
            run = slice(start + first, start + last)
            a = plan.alpha(decay[run], scale)
            states = _states(a, _outer(u[run], k[run]), A, plan.cut.block)
            y[run] = _apply(states[1:], q[run])
            A = states[-1]
        A = A.clone()
    return y, A, kept


def _pull(
    plan: _Plan,
    run: slice,
    given: Sequence[Tensor],
    A: Tensor,
    dy: Tensor,
    dA: Tensor,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Gradients of the tokens of one run, written into ``grads``; that of the state before it."""
    _, q, k, u, decay, *rest = given
    dq, dk, du, ddecay, dscale = grads
    scale = rest[0] if rest else None
    a = plan.alpha(decay[run], scale)
    states = _states(a, _outer(u[run], k[run]), A, plan.cut.block)
    if q.shape[3] == 1:
        g = _outer(dy[run].squeeze(3), q[run].squeeze(3))
    else:
        g = dy[run].mT @ q[run]
    dA = _slopes(a, g, dA, plan.cut.block)
    if dq is not None:
        dq[run] = dy[run] @ states[1:]
    if dk is not None:
        dk[run] = (u[run].unsqueeze(-2) @ g).squeeze(-2)
    if du is not None:
        du[run] = _apply(g, k[run].unsqueeze(-2)).squeeze(-2)
    if ddecay is None and dscale is None:
        return dA
    slope = g.mul_(states[:-1])
    if plan.log:
        slope.mul_(a)
    if scale is None:
        if ddecay is not None:
            ddecay[run] = slope
        return dA
    if dscale is not None:
        dscale += torch.mul(slope, decay[run].unsqueeze(-1), out=a).sum((0, 1))
    if ddecay is not None:
        ddecay[run] = slope.mul_(scale).sum(-1)
    return dA


def _differentiable(plan: _Plan, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same token by token, in operations that can be differentiated any number of times."""
    A, q, k, u, decay, *rest = given
    scale = rest[0] if rest else None
    outputs: list[Tensor] = []
    for t in range(u.shape[0]):
        A = plan.alpha(decay[t], scale) * A + _outer(u[t], k[t])
        outputs.append(_apply(A, q[t]))
    return torch.stack(outputs), A


class _Scan(torch.autograd.Function):
    """The recurrence with its written-out backward."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *given: Tensor) -> tuple[Tensor, Tensor]:
        y, A, kept = _forward(plan, given, keep=True)
        ctx.plan, ctx.kept = plan, kept
        ctx.save_for_backward(*given)
        return y, A

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy, dA), plan = gradients, cast(_Plan, ctx.plan)
        dy = dy.contiguous()  # of a sum it is one number, on which products are slow
        given: tuple[Tensor, ...] = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *again(lambda x: _differentiable(plan, x), given, needs, (dy, dA))
        grads = [
            torch.zeros_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(given[1:], needs[1:], strict=True)
        ]
        room = [*grads, None] if len(grads) == 4 else grads
        groups = plan.cut.groups()
        for (start, stop), A in zip(reversed(groups), reversed(ctx.kept), strict=True):
            runs = plan.cut.blocks(stop - start)
            starts = [A]
            for first, last in runs[:-1]:  # where the rest of a group begins
                run = slice(start + first, start + last)
                _, _, k, u, decay, *rest = given
                a = plan.alpha(decay[run], rest[0] if rest else None)
                starts.append(_states(a, _outer(u[run], k[run]), starts[-1], plan.cut.block)[-1])
            for (first, last), begin in zip(reversed(runs), reversed(starts), strict=True):
                run = slice(start + first, start + last)
                dA = _pull(plan, run, given, begin, dy, dA, room)
        return None, dA if needs[0] else None, *grads
