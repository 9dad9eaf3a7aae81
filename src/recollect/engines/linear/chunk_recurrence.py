"""The recurrence over the chunks of a sequence, with an explicit backward.

``prepare`` computes the operands of a *group* of chunks from its tokens. A group is small enough
for short-lived intermediates, and large enough for efficient operations. Per chunk, with Z the
transposed state ``[K, V]``::

    u  = (I + strict(L))⁻¹ (c − X Z)        errors (u = c without a system)
    y  = Q Z + tril(P) u
    Z ← e ⊙ Z + Dᵀ u

The backward pass loops over the groups in reverse. It prepares each group again under autograd, and
backpropagates the gradients of the recurrence below through ``prepare``. It stores only the states
at chunk starts, O((T / C) K V). With g = [−w; ȳ] and w = (I + strict(L))⁻ᵀ (Pᵀ ȳ + D Z̄)::

    L̄, P̄ = g uᵀ,   X̄, Q̄ = g Zᵀ,   D̄ = u Z̄ᵀ,   c̄ = w,   ē = Σ Z ⊙ Z̄,   Z̄ ← e ⊙ Z̄ + Qᵀ ȳ − Xᵀ w

Higher-order gradients use the recurrence in differentiable operations.

On a GPU, launch overhead dominates. The affine map of every chunk is then computed first, for all
chunks in a few products, and each chunk takes one operation in either direction::

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
from recollect.engines.common.linalg import add_bmm_, baddbmm, bmm

__all__ = ["ChunkOperands", "GroupedSequence", "run_chunks"]


@dataclass(frozen=True)
class ChunkOperands:
    """Operands of ``n`` chunks: axes ``[n, B·H]``, J written and R read rows per chunk.

    Attributes:
        system: L ``[.., J, J]``, used below the diagonal, or ``None`` without a system.
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
        """Return the tensors that are not ``None``, in field order."""
        tensors = (self.system, self.scores, self.X, self.Q, self.D, self.c, self.e)
        return [x for x in tensors if x is not None]

    def detach(self) -> ChunkOperands:
        """Return the operands detached from autograd."""
        system, X, e = (None if x is None else x.detach() for x in (self.system, self.X, self.e))
        scores, Q, D, c = (x.detach() for x in (self.scores, self.Q, self.D, self.c))
        return ChunkOperands(system, scores, X, Q, D, c, e)


@dataclass(frozen=True, kw_only=True)
class GroupedSequence:
    """Division of a sequence into groups of chunks.

    Attributes:
        prepare: function from the tokens of one group, ``[B, t, ...]`` each, to its operands.
        groups: first and last token of each group.
        from_chunks: function from outputs ``[n, B·H, R, V]`` and t to ``[B, t, ...]``.
        to_chunks: inverse function, from ``[B, t, ...]`` to ``[n, B·H, R, V]``.
        outputs: function that returns an uninitialised tensor for all outputs, ``[B, T, ...]``.
    """

    prepare: Callable[..., ChunkOperands]
    groups: Sequence[tuple[int, int]]
    from_chunks: Callable[[Tensor, int], Tensor]
    to_chunks: Callable[[Tensor], Tensor]
    outputs: Callable[[], Tensor]


def run_chunks(sequence: GroupedSequence, Z: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs ``[B, T, ...]`` and the last state ``[B·H, K, V]``."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (Z, *tokens)):
        return _ChunkRecurrence.apply(sequence, Z, *tokens)
    return _forward(sequence, Z, tokens, save=False)[:2]


def _inverse_system(system: Tensor) -> Tensor:
    """Return (I + strict(L))⁻¹ by substitution, which is backward stable."""
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(
        system, eye.expand_as(system), upper=False, unitriangular=True
    )


def _states(p: ChunkOperands, inverse: Tensor | None, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before every chunk and after the last, ``[n + 1, ...]``, and all u."""
    n = p.Q.shape[0]
    states = Z.new_empty(n + 1, *Z.shape)
    states[0] = Z
    steps = states.unbind(0)
    factors = (None,) * n if p.e is None else p.e.unbind(0)
    if p.X is None or inverse is None:
        torch.bmm(p.D.flatten(0, 1).mT, p.c.flatten(0, 1), out=states[1:].flatten(0, 1))
        for state, next_state, e in zip(steps, steps[1:], factors, strict=False):
            next_state.add_(state) if e is None else next_state.addcmul_(state, e)
        return states, p.c
    if Z.device.type != "cpu":
        W, M = _chunk_maps(p, inverse)
        u = bmm(inverse, p.c)
        added = bmm(p.D.mT, u)
        for state, next_state, m, n in zip(
            steps[:-1], steps[1:], M.unbind(0), added.unbind(0), strict=True
        ):
            torch.baddbmm(n, m, state, out=next_state)
        return states, add_bmm_(u, W, states[:-1], alpha=-1)
    u = p.c.new_empty(p.c.shape)
    right_side = u.new_empty(u.shape[1:])
    for state, next_state, e, c, X, D, inv, error in zip(
        *(steps[:-1], steps[1:], factors, p.c.unbind(0), p.X.unbind(0)),
        *(p.D.mT.unbind(0), inverse.unbind(0), u.unbind(0)),
        strict=True,
    ):
        torch.bmm(inv, right_side.copy_(c).baddbmm_(X, state, alpha=-1), out=error)
        (next_state.copy_(state) if e is None else torch.mul(state, e, out=next_state)).baddbmm_(
            D, error
        )
    return states, u


def _chunk_maps(p: ChunkOperands, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return W ``[n, B·H, J, K]`` and M ``[n, B·H, K, K]`` of every chunk."""
    assert p.X is not None
    W = bmm(inverse, p.X)
    M = bmm(p.D.mT, W, alpha=-1)
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    diagonal += 1.0 if p.e is None else p.e.squeeze(-1)
    return W, M


def _forward(
    sequence: GroupedSequence, Z: Tensor, tokens: Sequence[Tensor], *, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return outputs, the last state, and, if ``save``, the states of every group."""
    saved: list[Tensor] = []
    y = sequence.outputs()
    for start, stop in sequence.groups:
        p = sequence.prepare(*(x[:, start:stop] for x in tokens))
        inverse = None if p.system is None else _inverse_system(p.system)
        states, u = _states(p, inverse, Z)
        Z = states[-1]
        out = p.Q @ states[:-1]
        out.flatten(0, 1).baddbmm_(p.scores.flatten(0, 1), u.flatten(0, 1))
        y[:, start:stop] = sequence.from_chunks(out, stop - start)
        if save:
            saved.append(states)
    return y, Z.clone(), saved


def _differentiable(
    sequence: GroupedSequence, Z: Tensor, tokens: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in operations that autograd differentiates to any order."""
    outputs: list[Tensor] = []
    for start, stop in sequence.groups:
        p = sequence.prepare(*(x[:, start:stop] for x in tokens))
        inverse = None if p.system is None else _inverse_system(p.system.tril(-1))
        chunk_outputs: list[Tensor] = []
        for i in range(p.Q.shape[0]):
            u = p.c[i]
            if p.X is not None and inverse is not None:
                u = inverse[i] @ (u - p.X[i] @ Z)
            chunk_outputs.append(p.Q[i] @ Z + p.scores[i] @ u)
            Z = (Z if p.e is None else p.e[i] * Z) + p.D[i].mT @ u
        outputs.append(sequence.from_chunks(torch.stack(chunk_outputs), stop - start))
    return torch.cat(outputs, dim=1), Z


def _backward_errors(
    p: ChunkOperands, inverse: Tensor, state_grads: Tensor, error_grads: Tensor
) -> Tensor:
    """Return −w of every chunk, and write the gradients of all states to ``state_grads``.

    Args:
        p: operands with a system.
        inverse: (I + strict(L))⁻¹.
        state_grads: Qᵀ ȳ of every chunk, then Z̄ after the last; overwritten.
        error_grads: Pᵀ ȳ; overwritten.
    """
    assert p.X is not None
    steps = state_grads.unbind(0)
    if state_grads.device.type != "cpu":
        W, M = _chunk_maps(p, inverse)
        add_bmm_(state_grads[:-1], W.mT, error_grads, alpha=-1)
        for grad, next_grad, m in zip(
            steps[-2::-1], steps[:0:-1], M.mT.unbind(0)[::-1], strict=True
        ):
            grad.baddbmm_(m, next_grad)
        return bmm(inverse.mT, add_bmm_(error_grads, p.D, state_grads[1:]), alpha=-1)
    neg_w, factors = (
        torch.empty_like(error_grads),
        (None,) * len(steps) if p.e is None else p.e.unbind(0),
    )
    inverse_t, X_t = inverse.mT.unbind(0), p.X.mT.unbind(0)
    chunk_error_grads, D = error_grads.unbind(0), p.D.unbind(0)
    for i in reversed(range(len(steps) - 1)):
        grad, next_grad, e = steps[i], steps[i + 1], factors[i]
        torch.bmm(inverse_t[i], chunk_error_grads[i].baddbmm_(D[i], next_grad), out=neg_w[i])
        grad.add_(next_grad) if e is None else grad.addcmul_(next_grad, e)
        grad.baddbmm_(X_t[i], neg_w[i].neg_())
    return neg_w


def _backward_group(
    p: ChunkOperands, starts: Tensor, dy: Tensor, dZ: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return gradients of the operands, in the order of ``tensors``, and of the initial state."""
    n = p.Q.shape[0]
    state_grads = torch.empty(n + 1, *dZ.shape, dtype=dZ.dtype, device=dZ.device)
    torch.bmm(p.Q.flatten(0, 1).mT, dy.flatten(0, 1), out=state_grads[:-1].flatten(0, 1))
    state_grads[n] = dZ
    steps, ends = state_grads.unbind(0), state_grads[1:]  # gradients of the states between chunks
    factors = (None,) * n if p.e is None else p.e.unbind(0)
    error_grads = bmm(p.scores.mT, dy)
    if p.X is None or p.system is None:
        for i in reversed(range(n)):
            grad, next_grad, e = steps[i], steps[i + 1], factors[i]
            grad.add_(next_grad) if e is None else grad.addcmul_(next_grad, e)
        grads = [bmm(dy, p.c.mT).tril_(), bmm(dy, starts.mT), bmm(p.c, ends.mT)]
        error_grads.flatten(0, 1).baddbmm_(p.D.flatten(0, 1), ends.flatten(0, 1))
        grads.append(error_grads)
    else:
        inverse = _inverse_system(p.system)
        u = bmm(inverse, baddbmm(p.c, p.X, starts, alpha=-1))
        neg_w = _backward_errors(p, inverse, state_grads, error_grads)
        grads = [bmm(neg_w, u.mT).tril_(-1), bmm(dy, u.mT), bmm(neg_w, starts.mT)]
        grads += [bmm(dy, starts.mT), bmm(u, ends.mT), -neg_w]
    if p.e is not None:
        grads.append((starts * ends).sum_to_size(p.e.shape))
    return grads, steps[0]


class _ChunkRecurrence(CustomFunction):
    """The recurrence with an explicit backward."""

    @staticmethod
    def forward(
        ctx: Any, sequence: GroupedSequence, Z: Tensor, *tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, end, ctx.states = _forward(sequence, Z, tokens, save=True)
        ctx.sequence = sequence
        ctx.save_for_backward(Z, *tokens)
        return y, end

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy, dZ = grad_outputs
        sequence: GroupedSequence = ctx.sequence
        Z, *tokens = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *differentiable_backward(
                lambda inputs: _differentiable(sequence, inputs[0], inputs[1:]),
                [Z, *tokens],
                needs,
                (dy, dZ),
            )
        totals = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
            for x, need in zip(tokens, needs[1:], strict=True)
        ]
        for (start, stop), starts in zip(
            reversed(sequence.groups), reversed(ctx.states), strict=True
        ):
            with torch.enable_grad():
                group_tokens = [
                    x[:, start:stop].detach().requires_grad_(total is not None)
                    for x, total in zip(tokens, totals, strict=True)
                ]
                p = sequence.prepare(*group_tokens)
            grads, dZ = _backward_group(
                p.detach(), starts[:-1], sequence.to_chunks(dy[:, start:stop]), dZ
            )
            pairs = [(x, g) for x, g in zip(p.tensors(), grads, strict=True) if x.requires_grad]
            inputs = [x for x in group_tokens if x.requires_grad]
            if not inputs or not pairs:
                continue
            outputs, output_grads = zip(*pairs, strict=True)
            token_grads = torch.autograd.grad(outputs, inputs, output_grads, allow_unused=True)
            grads_iter = iter(cast("tuple[Tensor | None, ...]", token_grads))
            for total in totals:
                if total is not None:
                    grad = next(grads_iter)
                    total[:, start:stop] = 0.0 if grad is None else grad
        return None, dZ if needs[0] else None, *totals
