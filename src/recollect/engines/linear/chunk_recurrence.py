"""The recurrence over the chunks of a sequence, with its written-out backward.

What a chunk needs is made by ``prepare`` from the tokens of a *group* of chunks: few enough that
intermediates are small and short-lived, many enough that operations are large. Per chunk, with Z
the transposed state ``[K, V]``::

    u  = (I + strict(L))⁻¹ (c − X Z)        the unknown errors (u = c when there are none)
    y  = Q Z + tril(P) u
    Z ← e ⊙ Z + Dᵀ u

Backward runs the groups in reverse: it prepares each once more, under autograd, and pulls the
gradients of the recurrence, written out below, through that. Only the states at chunk starts are
kept, O((T / C) K V). With g = [−w; ȳ] and w = (I + strict(L))⁻ᵀ (Pᵀ ȳ + D Z̄)::

    L̄, P̄ = g uᵀ,   X̄, Q̄ = g Zᵀ,   D̄ = u Z̄ᵀ,   c̄ = w,   ē = Σ Z ⊙ Z̄,   Z̄ ← e ⊙ Z̄ + Qᵀ ȳ − Xᵀ w

Gradients of gradients go through the same recurrence written with differentiable operations.

Five small operations a chunk cost a CPU little. A device would spend its time launching them, so
there the map of a chunk is formed once, for all chunks in a few products, and one operation a chunk
is left, in either direction::

    W = (I + strict(L))⁻¹ X,   M = diag(e) − Dᵀ W,   Z ← M Z + Dᵀ (I + strict(L))⁻¹ c
    Z̄ ← Mᵀ Z̄ + Qᵀ ȳ − Wᵀ Pᵀ ȳ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.engines.common.linalg import baddbmm, bmm, plus

__all__ = ["Pieces", "Plan", "run_chunks"]


@dataclass(frozen=True)
class Pieces:
    """What ``n`` chunks need; leading axes ``[n, B·H]``, J rows written and R rows read per chunk.

    Attributes:
        system: L ``[.., J, J]``, whose strictly lower part counts, or ``None`` without unknowns.
        scores: P ``[.., R, J]``, zero above the diagonal.
        X: ``[.., J, K]`` or ``None``. Q: ``[.., R, K]``. D: ``[.., J, K]``. c: ``[.., J, V]``.
        e: ``[.., K or 1, 1]``, or ``None`` for ones.
    """

    system: Tensor | None
    scores: Tensor
    X: Tensor | None
    Q: Tensor
    D: Tensor
    c: Tensor
    e: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Those that are there, in the order of the fields."""
        every = (self.system, self.scores, self.X, self.Q, self.D, self.c, self.e)
        return [x for x in every if x is not None]

    def detach(self) -> Pieces:
        """The same numbers without their history."""
        system, X, e = (None if x is None else x.detach() for x in (self.system, self.X, self.e))
        scores, Q, D, c = (x.detach() for x in (self.scores, self.Q, self.D, self.c))
        return Pieces(system, scores, X, Q, D, c, e)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a sequence is cut.

    Attributes:
        prepare: from the tokens of one group, ``[B, t, ...]`` each, to its pieces.
        groups: first and last token of each group.
        finish: from outputs ``[n, B·H, R, V]`` and the number of tokens to ``[B, t, ...]``.
        unfinish: the way back, from ``[B, t, ...]`` to ``[n, B·H, R, V]``.
        outputs: an uninitialised tensor for all outputs, ``[B, T, ...]``.
    """

    prepare: Callable[..., Pieces]
    groups: Sequence[tuple[int, int]]
    finish: Callable[[Tensor, int], Tensor]
    unfinish: Callable[[Tensor], Tensor]
    outputs: Callable[[], Tensor]


def run_chunks(plan: Plan, Z: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, ...]`` and the last state ``[B·H, K, V]``."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (Z, *tokens)):
        return _ChunkRecurrence.apply(plan, Z, *tokens)
    return _forward(plan, Z, tokens, save=False)[:2]


def _inverse(system: Tensor) -> Tensor:
    """(I + strict(L))⁻¹ by substitution, which is backward stable; doubling products are not.

    One inverse serves every right side, forward and back, by matrix products.
    """
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(
        system, eye.expand_as(system), upper=False, unitriangular=True
    )


def _states(p: Pieces, inverse: Tensor | None, Z: Tensor) -> tuple[Tensor, Tensor]:
    """States before every chunk and after the last, ``[n + 1, ...]``, and all u."""
    n = p.Q.shape[0]
    states = Z.new_empty(n + 1, *Z.shape)
    states[0] = Z
    steps = states.unbind(0)
    factors = (None,) * n if p.e is None else p.e.unbind(0)
    if p.X is None or inverse is None:
        torch.bmm(p.D.flatten(0, 1).mT, p.c.flatten(0, 1), out=states[1:].flatten(0, 1))
        for now, after, e in zip(steps, steps[1:], factors, strict=False):
            after.add_(now) if e is None else after.addcmul_(now, e)
        return states, p.c
    if Z.device.type != "cpu":
        W, M = _maps(p, inverse)
        u = bmm(inverse, p.c)
        added = bmm(p.D.mT, u)
        for now, after, m, n in zip(
            steps[:-1], steps[1:], M.unbind(0), added.unbind(0), strict=True
        ):
            torch.baddbmm(n, m, now, out=after)
        return states, plus(u, W, states[:-1], alpha=-1)
    u = p.c.new_empty(p.c.shape)
    rest = u.new_empty(u.shape[1:])
    for now, after, e, c, X, D, inner, solved in zip(
        *(steps[:-1], steps[1:], factors, p.c.unbind(0), p.X.unbind(0)),
        *(p.D.mT.unbind(0), inverse.unbind(0), u.unbind(0)),
        strict=True,
    ):
        torch.bmm(inner, rest.copy_(c).baddbmm_(X, now, alpha=-1), out=solved)
        (after.copy_(now) if e is None else torch.mul(now, e, out=after)).baddbmm_(D, solved)
    return states, u


def _maps(p: Pieces, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """W ``[n, B·H, J, K]`` and M ``[n, B·H, K, K]`` of every chunk."""
    assert p.X is not None
    W = bmm(inverse, p.X)
    M = bmm(p.D.mT, W, alpha=-1)
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    diagonal += 1.0 if p.e is None else p.e.squeeze(-1)
    return W, M


def _forward(
    plan: Plan, Z: Tensor, tokens: Sequence[Tensor], *, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, the last state, and the states around every group's chunks where they are saved."""
    saved: list[Tensor] = []
    y = plan.outputs()
    for start, stop in plan.groups:
        p = plan.prepare(*(x[:, start:stop] for x in tokens))
        inverse = None if p.system is None else _inverse(p.system)
        states, u = _states(p, inverse, Z)
        Z = states[-1]
        out = p.Q @ states[:-1]
        out.flatten(0, 1).baddbmm_(p.scores.flatten(0, 1), u.flatten(0, 1))
        y[:, start:stop] = plan.finish(out, stop - start)
        if save:
            saved.append(states)
    return y, Z.clone(), saved


def _differentiable(plan: Plan, Z: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same, in operations that autograd can differentiate any number of times."""
    outputs: list[Tensor] = []
    for start, stop in plan.groups:
        p = plan.prepare(*(x[:, start:stop] for x in tokens))
        inverse = None if p.system is None else _inverse(p.system.tril(-1))
        rows: list[Tensor] = []
        for i in range(p.Q.shape[0]):
            u = p.c[i]
            if p.X is not None and inverse is not None:
                u = inverse[i] @ (u - p.X[i] @ Z)
            rows.append(p.Q[i] @ Z + p.scores[i] @ u)
            Z = (Z if p.e is None else p.e[i] * Z) + p.D[i].mT @ u
        outputs.append(plan.finish(torch.stack(rows), stop - start))
    return torch.cat(outputs, dim=1), Z


def _unknowns_back(p: Pieces, inverse: Tensor, states: Tensor, rest: Tensor) -> Tensor:
    """−w of every chunk, and the gradients of all states, last one first, in ``states``.

    Args:
        p: with unknowns.
        inverse: (I + strict(L))⁻¹.
        states: Qᵀ ȳ of every chunk, and last Z̄ after all. rest: Pᵀ ȳ; both are written to.
    """
    assert p.X is not None
    steps = states.unbind(0)
    if states.device.type != "cpu":
        W, M = _maps(p, inverse)
        plus(states[:-1], W.mT, rest, alpha=-1)
        for now, after, m in zip(steps[-2::-1], steps[:0:-1], M.mT.unbind(0)[::-1], strict=True):
            now.baddbmm_(m, after)
        return bmm(inverse.mT, plus(rest, p.D, states[1:]), alpha=-1)
    lost, factors = torch.empty_like(rest), (None,) * len(steps) if p.e is None else p.e.unbind(0)
    back, across = inverse.mT.unbind(0), p.X.mT.unbind(0)
    parts, D = rest.unbind(0), p.D.unbind(0)
    for i in reversed(range(len(steps) - 1)):
        now, after, e = steps[i], steps[i + 1], factors[i]
        torch.bmm(back[i], parts[i].baddbmm_(D[i], after), out=lost[i])
        now.add_(after) if e is None else now.addcmul_(after, e)
        now.baddbmm_(across[i], lost[i].neg_())
    return lost


def _pull(p: Pieces, starts: Tensor, dy: Tensor, dZ: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients of the pieces, in the order of `Pieces.tensors`, and of the state at the start."""
    n = p.Q.shape[0]
    states = torch.empty(n + 1, *dZ.shape, dtype=dZ.dtype, device=dZ.device)
    torch.bmm(p.Q.flatten(0, 1).mT, dy.flatten(0, 1), out=states[:-1].flatten(0, 1))
    states[n] = dZ
    steps, ends = states.unbind(0), states[1:]  # gradients of the states at the borders
    factors = (None,) * n if p.e is None else p.e.unbind(0)
    from_scores = bmm(p.scores.mT, dy)
    if p.X is None or p.system is None:
        for i in reversed(range(n)):
            now, after, e = steps[i], steps[i + 1], factors[i]
            now.add_(after) if e is None else now.addcmul_(after, e)
        grads = [bmm(dy, p.c.mT).tril_(), bmm(dy, starts.mT), bmm(p.c, ends.mT)]
        from_scores.flatten(0, 1).baddbmm_(p.D.flatten(0, 1), ends.flatten(0, 1))
        grads.append(from_scores)
    else:
        inverse = _inverse(p.system)
        u = bmm(inverse, baddbmm(p.c, p.X, starts, alpha=-1))
        lost = _unknowns_back(p, inverse, states, from_scores)
        grads = [bmm(lost, u.mT).tril_(-1), bmm(dy, u.mT), bmm(lost, starts.mT)]
        grads += [bmm(dy, starts.mT), bmm(u, ends.mT), -lost]
    if p.e is not None:
        grads.append((starts * ends).sum_to_size(p.e.shape))
    return grads, steps[0]


class _ChunkRecurrence(CustomFunction):
    """The recurrence with its written-out backward."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, Z: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
        y, end, ctx.states = _forward(plan, Z, tokens, save=True)
        ctx.plan = plan
        ctx.save_for_backward(Z, *tokens)
        return y, end

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy, dZ = grad_outputs
        plan: Plan = ctx.plan
        Z, *tokens = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *differentiable_backward(
                lambda inputs: _differentiable(plan, inputs[0], inputs[1:]),
                [Z, *tokens],
                needs,
                (dy, dZ),
            )
        totals = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(tokens, needs[1:], strict=True)
        ]
        for (start, stop), starts in zip(reversed(plan.groups), reversed(ctx.states), strict=True):
            with torch.enable_grad():
                pieces = [
                    x[:, start:stop].detach().requires_grad_(total is not None)
                    for x, total in zip(tokens, totals, strict=True)
                ]
                p = plan.prepare(*pieces)
            grads, dZ = _pull(p.detach(), starts[:-1], plan.unfinish(dy[:, start:stop]), dZ)
            pairs = [(x, g) for x, g in zip(p.tensors(), grads, strict=True) if x.requires_grad]
            wanted = [x for x in pieces if x.requires_grad]
            if not wanted or not pairs:
                continue
            outputs, pulls = zip(*pairs, strict=True)
            pulled = torch.autograd.grad(outputs, wanted, pulls, allow_unused=True)
            slopes = iter(cast("tuple[Tensor | None, ...]", pulled))
            for total in totals:
                if total is not None:
                    slope = next(slopes)
                    total[:, start:stop] = 0.0 if slope is None else slope
        return None, dZ if needs[0] else None, *totals
