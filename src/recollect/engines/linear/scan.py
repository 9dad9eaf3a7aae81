"""A scan over time for memories with elementwise recurrences h_t = α_t h_(t−1) + b_t.

Decays per entry (Mamba) and vector memories (LRU, RG-LRU) use this scan. With elementwise α_t,

    A_t = α_t ⊙ A_{t−1} + u_t k_tᵀ,     y_t = A_t q_t

Tokens are processed in *groups* that fit the processor's cache. The blocks of a group run in
parallel, one token of every block at a time. Products of decays then carry the state from block to
block. All factors are in [0, 1], without quotients or differences of cumulative logs, so the result
is exact for any decay. See `docs/design/scan.md`.

The backward pass stores the states at group starts, O((T / group) V F), and recomputes the others.
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

from recollect.choices.autograd import CustomFunction, differentiable_backward

__all__ = ["GROUP", "ScanInputs", "ScanLayout", "scan"]

GROUP = 1 << 18
"""Entries of the states of a group on a CPU: 1 MB per intermediate."""

MIN_WIDE_STATE = 256
"""Smallest number of entries of a state at which a CPU runs blocks sequentially."""


@dataclass(frozen=True)
class ScanInputs:
    """Inputs of a scan, in the state's dtype."""

    A: Tensor  # initial state, [B, H, V, F]
    q: Tensor  # [B, T, H, G, F]
    k: Tensor  # [B, T, H, F]
    u: Tensor  # writes, [B, T, H, V]
    # log α [B, T, H, V, F], or α of any sign if decays are not logs; with scale, [B, T, H, V]
    decay: Tensor
    # a ≥ 0 [H, V, F] with log α_t = decay_t ⊙ a, which avoids a tensor [B, T, H, V, F]; or None
    scale: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the inputs in field order."""
        return self.A, self.q, self.k, self.u, self.decay, self.scale


def scan(
    x: ScanInputs, *, log: bool = True, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Run A_t = α_t ⊙ A_{t−1} + u_t k_tᵀ, y_t = A_t q_t; return y ``[B, T, H, G, V]`` and A.

    Decays are logs if ``log``. ``chunk_size`` is the number of tokens of a block, which has no
    influence on results.
    """
    B, T, H, V = x.u.shape
    if not (B and T and H):
        return x.u.new_zeros(B, T, H, x.q.shape[3], V), x.A
    # −inf times a scale of 0 would be NaN.
    decay = x.decay.clamp_min(-1e30) if log else x.decay
    layout = ScanLayout.of(B * H * V * x.k.shape[-1], T, chunk_size, cpu=x.u.device.type == "cpu")
    q, k, u = x.q.transpose(0, 1), x.k.transpose(0, 1), x.u.transpose(0, 1)  # time first
    plan, x = (
        _Plan(layout=layout, log=log),
        ScanInputs(x.A, q, k, u, decay.transpose(0, 1), x.scale),
    )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x.tensors()):
        y, A = cast(tuple[Tensor, Tensor], _Scan.apply(plan, *x.tensors()))
    else:
        y, A, _ = _forward(plan, x, save=False)
    return y.transpose(0, 1), A


@dataclass(frozen=True, kw_only=True)
class ScanLayout:
    """Division of T tokens into groups of ``group`` tokens and blocks of ``block``."""

    T: int
    group: int
    block: int

    @classmethod
    def of(cls, entries: int, T: int, chunk_size: int | None, *, cpu: bool) -> ScanLayout:
        group = min(T, max(16, GROUP // entries)) if cpu else T
        if chunk_size is not None:
            block = min(chunk_size, group)
        elif cpu and entries >= MIN_WIDE_STATE:
            block = group
        else:
            block = max(1, math.isqrt(group))
        return cls(T=T, group=group, block=block)

    def groups(self) -> list[tuple[int, int]]:
        """Return the first and last token of each group."""
        return [(s, min(s + self.group, self.T)) for s in range(0, self.T, self.group)]

    @property
    def steps(self) -> int:
        """Number of dependent steps: tokens of a block, then a step from block to block."""
        total = 0
        for start, stop in self.groups():
            for first, last in self.blocks(stop - start):
                inside = min(self.block, last - first)
                total += inside + ((last - first) // inside if inside < last - first else 0)
        return total

    def blocks(self, tokens: int) -> list[tuple[int, int]]:
        """Return the runs of equal blocks in a group: the complete blocks, then the remainder."""
        complete = tokens - tokens % self.block
        return [run for run in ((0, complete), (complete, tokens)) if run[1] > run[0]]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    layout: ScanLayout
    log: bool

    def alpha(self, decay: Tensor, scale: Tensor | None) -> Tensor:
        """Return α of tokens ``[C, B, H, V, F]``."""
        if scale is not None:
            return (decay.unsqueeze(-1) * scale).exp()
        return decay.exp() if self.log else decay


def _outer(u: Tensor, k: Tensor) -> Tensor:
    return u.unsqueeze(-1) * k.unsqueeze(-2)


def _apply(A: Tensor, q: Tensor) -> Tensor:
    """Return A q: ``[C, B, H, V, F], [C, B, H, G, F] -> [C, B, H, G, V]``."""
    if A.shape[-1] == 1:
        return q * A.mT
    return q @ A.mT


def _states(a: Tensor, b: Tensor, A: Tensor, block: int) -> Tensor:
    """Return the states before and after each token, ``[C + 1, ...]``; overwrites ``b``."""
    C = a.shape[0]
    states = torch.empty(C + 1, *A.shape, dtype=b.dtype, device=b.device)
    states[0] = A
    if block >= C:
        steps = states.unbind(0)
        for state, next_state, x, y in zip(
            steps, steps[1:], a.unbind(0), b.unbind(0), strict=False
        ):
            torch.addcmul(y, x, state, out=next_state)
        return states
    # Run blocks in parallel from zero with their products of decays, then add initial states.
    n = C // block
    x, h = a.unflatten(0, (n, block)), states[1:].unflatten(0, (n, block))
    h.copy_(b.unflatten(0, (n, block)))
    cumulative_decay = x.clone()
    for t in range(1, block):
        h[:, t].addcmul_(x[:, t], h[:, t - 1])
        cumulative_decay[:, t].mul_(cumulative_decay[:, t - 1])
    start = states[0]
    for j in range(n):
        h[j].addcmul_(cumulative_decay[j], start)
        start = h[j, -1]
    return states


def _reverse_scan(a: Tensor, o: Tensor, end: Tensor, block: int) -> Tensor:
    """Replace o = ȳ qᵀ by g, and return the gradient of the initial state."""
    C = a.shape[0]
    if block >= C:
        o[C - 1].add_(end)
        grads, factors = o.unbind(0), a.unbind(0)
        for t in range(C - 2, -1, -1):
            grads[t].addcmul_(factors[t + 1], grads[t + 1])
        return factors[0] * grads[0]
    n = C // block
    x, g = a.unflatten(0, (n, block)), o.unflatten(0, (n, block))
    cumulative_decay = torch.empty_like(x)
    cumulative_decay[:, -1] = 1
    for t in range(block - 2, -1, -1):
        g[:, t].addcmul_(x[:, t + 1], g[:, t + 1])
        torch.mul(x[:, t + 1], cumulative_decay[:, t + 1], out=cumulative_decay[:, t])
    for j in range(n - 1, -1, -1):
        g[j].addcmul_(cumulative_decay[j], end)
        end = x[j, 0] * g[j, 0]
    return end


def _scan_run(plan: _Plan, x: ScanInputs, run: slice, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return α and the states of one run that starts from A."""
    a = plan.alpha(x.decay[run], x.scale)
    return a, _states(a, _outer(x.u[run], x.k[run]), A, plan.layout.block)


def _forward(plan: _Plan, x: ScanInputs, *, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return outputs, the last state, and, if ``save``, the states before every group."""
    A, starts = x.A, []
    y = x.u.new_empty(x.u.shape[0], *x.q.shape[1:4], x.u.shape[-1])
    for start, stop in plan.layout.groups():
        if save:
            starts.append(A)
        for first, last in plan.layout.blocks(stop - start):
            run = slice(start + first, start + last)
            _, states = _scan_run(plan, x, run, A)
            y[run] = _apply(states[1:], x.q[run])
            A = states[-1]
        A = A.clone()
    return y, A, starts


def _backward_run(
    plan: _Plan,
    run: slice,
    x: ScanInputs,
    A: Tensor,
    dy: Tensor,
    dA: Tensor,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Write the gradients of one run to ``grads``; return that of its initial state."""
    dq, dk, du, ddecay, dscale = grads
    a, states = _scan_run(plan, x, run, A)
    q, k = x.q[run], x.k[run]
    if q.shape[3] == 1:
        g = _outer(dy[run].squeeze(3), q.squeeze(3))
    else:
        g = dy[run].mT @ q
    dA = _reverse_scan(a, g, dA, plan.layout.block)
    if dq is not None:
        dq[run] = dy[run] @ states[1:]
    if dk is not None:
        dk[run] = (x.u[run].unsqueeze(-2) @ g).squeeze(-2)
    if du is not None:
        du[run] = _apply(g, k.unsqueeze(-2)).squeeze(-2)
    if ddecay is None and dscale is None:
        return dA
    decay_grad = g.mul_(states[:-1])
    if plan.log:
        decay_grad.mul_(a)
    if x.scale is None:
        if ddecay is not None:
            ddecay[run] = decay_grad
        return dA
    if dscale is not None:
        dscale += torch.mul(decay_grad, x.decay[run].unsqueeze(-1), out=a).sum((0, 1))
    if ddecay is not None:
        ddecay[run] = decay_grad.mul_(x.scale).sum(-1)
    return dA


def _differentiable(plan: _Plan, x: ScanInputs) -> tuple[Tensor, Tensor]:
    """Run the scan token by token in operations that autograd differentiates to any order."""
    A, outputs = x.A, []
    for t in range(x.u.shape[0]):
        A = plan.alpha(x.decay[t], x.scale) * A + _outer(x.u[t], x.k[t])
        outputs.append(_apply(A, x.q[t]))
    return torch.stack(outputs), A


class _Scan(CustomFunction):
    """The recurrence with an explicit backward."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, A, starts = _forward(plan, ScanInputs(*inputs), save=True)
        ctx.plan, ctx.starts = plan, starts
        ctx.save_for_backward(*inputs)
        return y, A

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy, dA), plan = gradients, cast(_Plan, ctx.plan)
        dy = dy.contiguous()  # expanded gradients (of a sum) make products slow
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        x, needs = ScanInputs(*inputs), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *differentiable_backward(
                lambda xs: _differentiable(plan, ScanInputs(*xs)), inputs, needs, (dy, dA)
            )
        grads = [
            torch.zeros_like(t, memory_format=torch.contiguous_format) if need else None
            for t, need in zip(inputs[1:], needs[1:], strict=True)
        ]
        for (start, stop), A in zip(
            reversed(plan.layout.groups()), reversed(ctx.starts), strict=True
        ):
            runs = [
                slice(start + first, start + last)
                for first, last in plan.layout.blocks(stop - start)
            ]
            starts = [A]
            for run in runs[:-1]:  # initial states of the later runs
                starts.append(_scan_run(plan, x, run, starts[-1])[1][-1])
            for run, begin in zip(reversed(runs), reversed(starts), strict=True):
                dA = _backward_run(plan, run, x, begin, dy, dA, grads)
        return None, dA if needs[0] else None, *grads
