"""The recurrence over the chunks of a sequence, with an explicit backward.

``prepare`` computes the operands of a *group* of chunks from its tokens. A group is small enough
for short-lived intermediates, and large enough for efficient operations. Per chunk, with Z the
transposed state ``[K, V]``::

    u  = (I + L)⁻¹ (c − X Z) = U − W Z       negative errors
    y  = f ⊙ (Q Z) + y° + P u
    Z ← e ⊙ Z + N + Dᵀ u

y° and N are the contributions of writes that do not depend on Z. Under momentum, Z is the state
above its momentum, and e ⊙ Z is followed by adding m times the lower half to the upper half.

The backward pass loops over the groups in reverse. It prepares each group again under autograd, and
backpropagates the gradients of the recurrence above through ``prepare``. It stores only the states
at chunk starts, O((T / C) K V). With ū = Pᵀ ȳ + D Z̄ and w = (I + L)⁻ᵀ ū::

    L̄ = −w uᵀ,   X̄ = −w Zᵀ,   c̄ = w,   P̄ = ȳ uᵀ,   D̄ = u Z̄ᵀ,   ȳ° = ȳ,   N̄ = Z̄
    Q̄ = (f ⊙ ȳ) Zᵀ,   f̄ = ȳ ⊙ (Q Z),   ē = Σ Z ⊙ Z̄,   Z̄ ← e ⊙ Z̄ + Qᵀ (f ⊙ ȳ) − Wᵀ ū

Higher-order gradients use the recurrence in differentiable operations.

On a GPU, launch overhead dominates. The affine map of every chunk is then computed first, for all
chunks in a few products, and each chunk takes one operation in either direction::

    M = diag(e) − Dᵀ W,   Z ← M Z + N + Dᵀ U,   Z̄ ← Mᵀ Z̄ + Qᵀ (f ⊙ ȳ) − Wᵀ Pᵀ ȳ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.engines.common.linalg import add_bmm_, bmm

__all__ = ["ChunkLayout", "ChunkOperands", "ChunkSystem", "Prepare", "run_chunks"]


class ChunkSystem(NamedTuple):
    """System of the errors of ``n`` chunks: axes ``[n, B·H]``, J written and R read rows."""

    L: Tensor  # [.., J, J], strictly lower triangular
    scores: Tensor  # P, [.., R, J]
    X: Tensor  # [.., J, K]
    D: Tensor  # [.., J, K]
    c: Tensor  # [.., J, V]


class ChunkOperands(NamedTuple):
    """Operands of ``n`` chunks: axes ``[n, B·H]``, R read rows. Momentum doubles K."""

    Q: Tensor  # [.., R, K]
    decay: Tensor  # e, [.., K or 1, V or 1]
    coupling: Tensor | None = None  # m, [.., 1, 1]
    outputs: Tensor | None = None  # y°, [.., R, V]
    writes: Tensor | None = None  # N, [.., K, V]
    output_decay: Tensor | None = None  # f, [.., R, V]
    system: ChunkSystem | None = None


Prepare = Callable[..., ChunkOperands]
"""Function from the tokens of one group, ``[B, t, ...]`` each, to its operands."""


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """T tokens of B·H memories in chunks of C, in groups of ``size`` tokens."""

    B: int
    T: int
    H: int
    G: int  # rows read per token
    C: int
    size: int

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, t, H, rows, D] -> [n, B·H, C·rows, D]``, contiguous and padded with ``fill``."""
        if missing := -x.shape[1] % self.C:
            x = torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)], dim=1)
        x = x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 2, 4, 5)  # [n, B, H, C, rows, D]
        return x.reshape(x.shape[0], self.B * self.H, -1, x.shape[-1]).contiguous()

    def join(self, y: Tensor) -> Tensor:
        """``[n, B·H, C·G, V] -> [B, n, C, H, G, V]``, a view."""
        y = y.unflatten(2, (self.C, self.G)).unflatten(1, (self.B, self.H))
        return y.permute(1, 0, 3, 2, 4, 5)


def run_chunks(
    layout: ChunkLayout, prepare: Prepare, Z: Tensor, *tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs ``[B, T, H, rows, V]`` and the last state ``[B·H, K, V]``."""
    if torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), (Z, *tokens))):
        return _ChunkRecurrence.apply(layout, prepare, Z, *tokens)
    return _forward(layout, prepare, Z, tokens)


def _inverse(L: Tensor) -> Tensor:
    """Return (I + L)⁻¹ by substitution, which is backward stable."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)


def _chunk_maps(p: ChunkOperands, D: Tensor, W: Tensor) -> Tensor:
    """Return M ``[n, B·H, K, K]`` of every chunk."""
    M = bmm(D.mT, W, alpha=-1)
    M.diagonal(dim1=-2, dim2=-1).add_(p.decay.squeeze(-1))
    if p.coupling is not None:
        half = M.shape[-1] // 2
        M[..., :half, half:].diagonal(dim1=-2, dim2=-1).add_(p.coupling.squeeze(-1))
    return M


def _states(p: ChunkOperands, solution: tuple[Tensor, Tensor] | None, Z: Tensor) -> Tensor:
    """Return the states before every chunk and after the last; replace U of (U, W) by u."""
    states = Z.new_empty(p.Q.shape[0] + 1, *Z.shape)
    states[0] = Z
    steps, half = states.unbind(0), Z.shape[1] // 2
    if p.system is not None and solution is not None and not Z.is_cpu:
        (u, W), D = solution, p.system.D
        added = bmm(D.mT, u) if p.writes is None else add_bmm_(p.writes.clone(), D.mT, u)
        for i, M in enumerate(_chunk_maps(p, D, W).unbind(0)):
            torch.baddbmm(added[i], M, steps[i], out=steps[i + 1])
        add_bmm_(u, W, states[:-1], alpha=-1)
        return states
    decays = p.decay.unbind(0)
    updates = None
    if p.system is not None and solution is not None:
        u, W = solution
        updates = list(zip(u.unbind(0), W.unbind(0), p.system.D.mT.unbind(0), strict=True))
    for i, (state, following) in enumerate(pairwise(steps)):
        if p.writes is None:
            torch.mul(state, decays[i], out=following)
        else:
            torch.addcmul(p.writes[i], state, decays[i], out=following)
        if p.coupling is not None:
            following[:, :half].addcmul_(state[:, half:], p.coupling[i])
        if updates is not None:
            errors, of_state, into_state = updates[i]
            following.baddbmm_(into_state, errors.baddbmm_(of_state, state, alpha=-1))
    return states


def _forward(
    layout: ChunkLayout,
    prepare: Prepare,
    Z: Tensor,
    tokens: Sequence[Tensor],
    saved: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state; append the states of every group to ``saved``."""
    y = Z.new_empty(layout.B, -(-layout.T // layout.C), layout.C, layout.H, layout.G, Z.shape[-1])
    parts = map(methodcaller("split", layout.size, 1), tokens)
    for target, *group in zip(y.split(layout.size // layout.C, 1), *parts, strict=True):
        p, solution = prepare(*group), None
        if p.system is not None:
            inverse = _inverse(p.system.L)
            solution = inverse @ p.system.c, inverse @ p.system.X
        states = _states(p, solution, Z)
        if saved is not None:
            saved.append(states)
        Z = states[-1]
        out = p.Q @ states[:-1]
        if p.output_decay is not None:
            out *= p.output_decay
        if p.outputs is not None:
            out += p.outputs
        if p.system is not None and solution is not None:
            add_bmm_(out, p.system.scores, solution[0])
        target.copy_(layout.join(out))
    return y.flatten(1, 2)[:, : layout.T], Z.clone()


def _differentiable(
    layout: ChunkLayout, prepare: Prepare, Z: Tensor, tokens: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in operations that autograd differentiates to any order."""
    outputs: list[Tensor] = []
    for group in zip(*map(methodcaller("split", layout.size, 1), tokens), strict=True):
        p = prepare(*group)
        inverse = None if p.system is None else _inverse(p.system.L)
        for i in range(p.Q.shape[0]):
            y, following = p.Q[i] @ Z, p.decay[i] * Z
            if p.coupling is not None:
                upper, lower = Z.chunk(2, dim=1)
                following += p.coupling[i] * torch.cat([lower, torch.zeros_like(upper)], dim=1)
            if p.output_decay is not None:
                y = p.output_decay[i] * y
            if p.outputs is not None and p.writes is not None:
                y, following = y + p.outputs[i], following + p.writes[i]
            if p.system is not None and inverse is not None:
                _, scores, X, D, c = p.system
                u = inverse[i] @ (c[i] - X[i] @ Z)
                y, following = y + scores[i] @ u, following + D[i].mT @ u
            outputs.append(y)
            Z = following
    return layout.join(torch.stack(outputs)).flatten(1, 2)[:, : layout.T], Z


def _backward_states(
    p: ChunkOperands, state_grads: Tensor, solution: tuple[Tensor, Tensor] | None
) -> None:
    """Replace Qᵀ (f ⊙ ȳ), and Z̄ after the last chunk, by Z̄; replace Pᵀ ȳ of (Pᵀ ȳ, W) by ū."""
    steps, half = state_grads.unbind(0), state_grads.shape[2] // 2
    if p.system is not None and solution is not None and not state_grads.is_cpu:
        (error_grads, W), D = solution, p.system.D
        add_bmm_(state_grads[:-1], W.mT, error_grads, alpha=-1)
        for i, M in reversed(list(enumerate(_chunk_maps(p, D, W).mT.unbind(0)))):
            steps[i].baddbmm_(M, steps[i + 1])
        add_bmm_(error_grads, D, state_grads[1:])
        return
    decays = p.decay.unbind(0)
    updates = None
    if p.system is not None and solution is not None:
        error_grads, W = solution
        updates = list(
            zip(error_grads.unbind(0), W.mT.unbind(0), p.system.D.unbind(0), strict=True)
        )
    for i in reversed(range(len(steps) - 1)):
        grad, following = steps[i], steps[i + 1]
        if updates is not None:
            errors, of_state, into_state = updates[i]
            grad.baddbmm_(of_state, errors.baddbmm_(into_state, following), alpha=-1)
        grad.addcmul_(following, decays[i])
        if p.coupling is not None:
            grad[:, half:].addcmul_(following[:, :half], p.coupling[i])


def _backward_group(
    p: ChunkOperands, starts: Tensor, dy: Tensor, dZ: Tensor
) -> tuple[ChunkOperands, Tensor]:
    """Return the gradients of the operands and of the initial state."""
    state_grads = torch.empty(p.Q.shape[0] + 1, *dZ.shape, dtype=dZ.dtype, device=dZ.device)
    read_grads = dy if p.output_decay is None else dy * p.output_decay
    torch.bmm(p.Q.flatten(0, 1).mT, read_grads.flatten(0, 1), out=state_grads[:-1].flatten(0, 1))
    state_grads[-1] = dZ
    ends, half, system = state_grads[1:], dZ.shape[1] // 2, None
    if p.system is None:
        _backward_states(p, state_grads, None)
    else:
        L, scores, X, _, c = p.system
        inverse = _inverse(L)
        W, error_grads = inverse @ X, scores.mT @ dy
        u = add_bmm_(inverse @ c, W, starts, alpha=-1)
        _backward_states(p, state_grads, (error_grads, W))
        neg_w = (inverse.mT @ error_grads).neg_()
        system = ChunkSystem(
            L=neg_w @ u.mT, scores=dy @ u.mT, X=neg_w @ starts.mT, D=u @ ends.mT, c=-neg_w
        )
    coupling = None
    if p.coupling is not None:
        coupling = (starts[..., half:, :] * ends[..., :half, :]).sum_to_size(p.coupling.shape)
    grads = ChunkOperands(
        Q=read_grads @ starts.mT,
        decay=(starts * ends).sum_to_size(p.decay.shape) if p.decay.requires_grad else p.decay,
        coupling=coupling,
        outputs=None if p.outputs is None else dy,
        writes=None if p.writes is None else ends,
        output_decay=None if p.output_decay is None else dy * (p.Q @ starts),
        system=system,
    )
    return grads, state_grads[0]


class _ChunkRecurrence(CustomFunction):
    """The recurrence with an explicit backward."""

    @staticmethod
    def forward(
        ctx: Any, layout: ChunkLayout, prepare: Prepare, Z: Tensor, *tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.prepare, ctx.states = layout, prepare, []
        y, end = _forward(layout, prepare, Z, tokens, ctx.states)
        ctx.save_for_backward(Z, *tokens)
        return y, end

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy, dZ = grad_outputs
        layout: ChunkLayout = ctx.layout
        prepare: Prepare = ctx.prepare
        Z, *tokens = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (
                None,
                None,
                *differentiable_backward(
                    lambda inputs: _differentiable(layout, prepare, inputs[0], inputs[1:]),
                    [Z, *tokens],
                    needs,
                    (dy, dZ),
                ),
            )
        grads: list[list[Tensor]] = [[] for need in needs[1:] if need]
        parts = [x.split(layout.size, dim=1) for x in (dy, *tokens)]
        for starts, group_dy, *group in reversed(list(zip(ctx.states, *parts, strict=True))):
            with torch.enable_grad():
                group = [
                    x.detach().requires_grad_(need)
                    for x, need in zip(group, needs[1:], strict=True)
                ]
                p = prepare(*group)
            operand_grads, dZ = _backward_group(p, starts[:-1], layout.split(group_dy), dZ)
            inputs = [x for x in group if x.requires_grad]
            if not inputs:
                continue
            pairs = zip(
                (*p[:-1], *(p.system or ())),
                (*operand_grads[:-1], *(operand_grads.system or ())),
                strict=True,
            )
            outputs, output_grads = zip(
                *((x, g) for x, g in pairs if x is not None and x.requires_grad), strict=True
            )
            for total, grad in zip(
                grads,
                torch.autograd.grad(outputs, inputs, output_grads, materialize_grads=True),
                strict=True,
            ):
                total.append(grad)
        totals = (torch.cat(x[::-1], dim=1) if len(x) > 1 else x[0] for x in grads)
        return (
            None,
            None,
            dZ if needs[0] else None,
            *(next(totals) if need else None for need in needs[1:]),
        )
