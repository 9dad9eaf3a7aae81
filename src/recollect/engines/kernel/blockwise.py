"""Causal kernel-matrix products computed for one block of query tokens at a time.

A row consists of κ(x_t, z_i) over the visible keys of token t: all earlier keys (``strict``, for
erasure), or also its own key (for reads). A row may be normalised by its sum over the keys' mass.
It decays with the distance, and may mix several probe keys of one token.

`solve_rows` and `apply_rows` multiply rows and values. Both process tokens in blocks, and their
backward passes recompute the rows of each block. A matrix of T² entries never exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.choices.features.base import Kernel

__all__ = ["Spec", "apply_rows", "solve_rows"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Definition of rows for N = B·H memories, with n keys of the state before T of the call."""

    kernel: Kernel  # κ
    normalize: bool  # whether rows are divided by Σ_i mass_i κ
    strict: bool  # whether the own key of a token is hidden
    heads: int  # number of keys x per token
    block: int  # number of tokens whose rows exist at a time
    # whether decays inside a block are too strong for differences of sums in the keys' dtype
    steep: bool = False

    def rows(
        self,
        x: Tensor,  # query or probe keys [N, C·heads, K]
        k: Tensor,  # keys up to the last token of the block [N, e, K]
        logs: Tensor | None,  # log mass of the keys after their decay [N, e]
        query_decay: Tensor | None,  # log decay of the tokens [N, C], from the origin of `logs`
        start: int,  # number of keys before the block
    ) -> Tensor:
        """Return the weights of the C tokens of a block, ``[N, C·heads, e]``."""
        heads, C = self.heads, x.shape[1] // self.heads
        hidden = torch.ones(C, C, dtype=torch.bool, device=x.device).triu(0 if self.strict else 1)
        hidden = hidden if heads == 1 else hidden.repeat_interleave(heads, dim=0)
        exponent, decay = self.kernel.exponent(x.shape[-1]), None
        if logs is not None:
            decay = logs.unsqueeze(1)
            if query_decay is not None and (self.steep or not self.normalize):  # else it cancels
                decay = query_decay.repeat_interleave(heads, dim=1).unsqueeze(-1) + decay
            decay = decay.to(x.dtype)
        if not self.normalize and exponent is None:
            similarity = self.kernel.kappa(x, k)
            if decay is not None:
                decay[..., start:].masked_fill_(hidden, -torch.inf)
                return similarity * decay.exp()
            block_part = similarity[..., start:].masked_fill(hidden, 0.0)
            return torch.cat([similarity[..., :start], block_part], dim=-1)
        if exponent is not None and exponent[1] == 0.0:
            similarity = (exponent[0] * x) @ k.mT
        else:
            similarity = self.kernel.log_kappa(x, k)
        if decay is not None:
            similarity = similarity + decay
        similarity[..., start:].masked_fill_(hidden, -torch.inf)
        if not self.normalize:
            return similarity.exp()
        if not self.strict or (start and logs is None):  # every token has a visible key
            return torch.softmax(similarity, dim=-1)
        empty = similarity.detach().amax(-1, keepdim=True) == -torch.inf
        return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, similarity), dim=-1))


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _mixed(rows: Tensor, scale: Tensor, heads: int) -> Tensor:
    """Return Σ_j scale_j rows_j: ``[N, C·J, e]`` and ``[N, C, J]`` to ``[N, C, e]``."""
    if heads == 1:
        return rows * scale
    return (rows.unflatten(1, (-1, heads)) * scale.unsqueeze(-1)).sum(2)


class _Block(NamedTuple):
    """Block of tokens ``s`` to ``e`` of the call, whose keys are ``start`` to ``stop``."""

    s: int
    e: int
    start: int
    stop: int


def _blocks(T: int, n: int, block: int) -> list[_Block]:
    ends = ((s, min(s + block, T)) for s in range(0, T, block))
    return [_Block(s, e, n + s, n + e) for s, e in ends]


def _take(spec: Spec, block: _Block, x: Tensor, k: Tensor, logs: Any, query_decay: Any) -> Parts:
    """Return the inputs of a block's rows."""
    J = spec.heads
    return (
        x[:, block.s * J : block.e * J],
        k[:, : block.stop],
        None if logs is None else logs[:, : block.stop],
        None if query_decay is None else query_decay[:, block.s : block.e],
    )


def _relative(spec: Spec, parts: Parts) -> Parts:
    """Subtract the log decay at the start of the block, and convert to the keys' dtype.

    Steep decays stay in float64: at −6000, float32 represents three decimals.
    """
    x, k, logs, query_decay = parts
    if logs is None or query_decay is None or spec.steep:
        return parts
    start_decay = query_decay[:, :1].detach()
    return x, k, (logs + start_decay).to(x.dtype), (query_decay - start_decay).to(x.dtype)


# -- U = (I + B)⁻¹ C -----------------------------------------------------------------------------


def solve_rows(
    spec: Spec,
    x: Tensor,  # probe keys [N, T·J, K]
    k: Tensor,  # keys [N, n + T, K]
    scale: Tensor,  # scale of each probe [N, T, J]
    write: Tensor,  # written values [N, T, V]
    past: Tensor,  # u of the state [N, n, V]
    logs: Tensor | None,  # log mass of the keys [N, n + T], see `Spec.rows`
    query_decay: Tensor | None,  # log decay of the tokens [N, T], see `Spec.rows`
) -> Tensor:
    """Return u_t = write_t − Σ_j scale_tj Σ_(i<t) κ̄(x_tj, z_i) u_i of the new tokens ``[N, T, V]``.

    Forward substitution by blocks (AM 9.3): O(T²(K + V) + T C (K + V)) and memory O(T C).
    """
    inputs = (x, k, scale, write, past, logs, query_decay)
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs):
        return cast(Tensor, _SolveRows.apply(spec, *inputs))
    return _substitute(spec, *inputs)


def _substitute(
    spec: Spec,
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    write: Tensor,
    past: Tensor,
    logs: Tensor | None,
    query_decay: Tensor | None,
) -> Tensor:
    n, T, U = past.shape[1], write.shape[1], past  # U: u of the state and of earlier blocks
    for block in _blocks(T, n, spec.block):
        parts = _relative(spec, _take(spec, block, x, k, logs, query_decay))
        rows, factor = spec.rows(*parts, block.start), scale[:, block.s : block.e]
        right = write[:, block.s : block.e]
        if spec.heads == 1:  # scale the sum, not every weight
            if block.start:
                past_sum = torch.bmm(rows[..., : block.start], U)
                right = torch.addcmul(right, factor, past_sum, value=-1)
            block_part = rows[..., block.start :] * factor
        else:
            rows = _mixed(rows, factor, spec.heads)
            if block.start:
                right = torch.baddbmm(right, rows[..., : block.start], U, alpha=-1)
            block_part = rows[..., block.start :]
        u = torch.linalg.solve_triangular(block_part, right, upper=False, unitriangular=True)
        U = torch.cat([U, u], dim=1)
    return U[:, n:]


class _SolveRows(CustomFunction):
    @staticmethod
    def forward(ctx: Any, spec: Spec, *inputs: Any) -> Tensor:
        u = _substitute(spec, *inputs)
        ctx.spec = spec
        ctx.save_for_backward(*inputs, u)
        return u

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        *inputs, u = ctx.saved_tensors
        spec: Spec = ctx.spec
        (du,), needs = outer, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return (
                None,
                *differentiable_backward(lambda a: [_substitute(spec, *a)], inputs, needs, outer),
            )
        x, k, scale, write, past, logs, query_decay = inputs
        n, T = past.shape[1], write.shape[1]
        U = torch.cat([past, u], dim=1)
        g = torch.cat([torch.zeros_like(past), du], dim=1)
        gradients = _InputGradients(spec, (x, k, logs, query_decay))
        dscale = torch.zeros_like(scale)
        for block in reversed(_blocks(T, n, spec.block)):
            parts = gradients.leaves(block)
            factor = scale[:, block.s : block.e].detach().requires_grad_()
            with torch.enable_grad():
                B = _mixed(spec.rows(*_relative(spec, parts), block.start), factor, spec.heads)
            b = B.detach()
            r = torch.linalg.solve_triangular(
                b[..., block.start :].mT,
                g[:, block.start : block.stop],
                upper=True,
                unitriangular=True,
            )
            g[:, block.start : block.stop] = r
            if block.start:
                g[:, : block.start].baddbmm_(b[..., : block.start].mT, r, alpha=-1)
            dB = torch.bmm(r.neg(), U[:, : block.stop].mT)
            (dscale[:, block.s : block.e],) = gradients.pull(block, B, dB, parts, factor)
        dx, dk, dlogs, dseen = gradients.totals
        return None, dx, dk, dscale, g[:, n:], g[:, :n], dlogs, dseen


# -- Y = R U -------------------------------------------------------------------------------------


def apply_rows(
    spec: Spec, x: Tensor, k: Tensor, u: Tensor, logs: Tensor | None, query_decay: Tensor | None
) -> Tensor:
    """Return y_t = Σ_(i≤t) κ̄(x_t, z_i) u_i for G queries x per token, ``[N, T·G, V]``.

    ``u [N, n + T, V]`` are the rows of the keys. Other arguments are those of `solve_rows`.
    """
    inputs = (x, k, u, logs, query_decay)
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs):
        return cast(Tensor, _ApplyRows.apply(spec, *inputs))
    return _products(spec, *inputs)


def _products(
    spec: Spec, x: Tensor, k: Tensor, u: Tensor, logs: Tensor | None, query_decay: Tensor | None
) -> Tensor:
    T = x.shape[1] // spec.heads
    outputs: list[Tensor] = []
    for block in _blocks(T, u.shape[1] - T, spec.block):
        parts = _relative(spec, _take(spec, block, x, k, logs, query_decay))
        outputs.append(torch.bmm(spec.rows(*parts, block.start), u[:, : block.stop]))
    return torch.cat(outputs, dim=1)


class _ApplyRows(CustomFunction):
    @staticmethod
    def forward(ctx: Any, spec: Spec, *inputs: Any) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(*inputs)
        return _products(spec, *inputs)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        inputs, spec = ctx.saved_tensors, cast(Spec, ctx.spec)
        (dy,), needs = outer, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return (
                None,
                *differentiable_backward(lambda a: [_products(spec, *a)], inputs, needs, outer),
            )
        x, k, u, logs, query_decay = inputs
        T, G = x.shape[1] // spec.heads, spec.heads
        gradients, du = _InputGradients(spec, (x, k, logs, query_decay)), torch.zeros_like(u)
        for block in _blocks(T, u.shape[1] - T, spec.block):
            parts = gradients.leaves(block)
            with torch.enable_grad():
                R = spec.rows(*_relative(spec, parts), block.start)
            above = dy[:, block.s * G : block.e * G]
            du[:, : block.stop].baddbmm_(R.detach().mT, above)
            gradients.pull(block, R, torch.bmm(above, u[:, : block.stop].mT), parts)
        dx, dk, dlogs, dseen = gradients.totals
        return None, dx, dk, du, dlogs, dseen


# -- gradients -----------------------------------------------------------------------------------


class _InputGradients:
    """Gradients of the inputs of rows, summed over blocks."""

    def __init__(self, spec: Spec, inputs: tuple[Any, ...]) -> None:
        self.spec, self.inputs = spec, inputs
        self.totals: list[Tensor | None] = [
            None if a is None else torch.zeros_like(a) for a in inputs
        ]

    def leaves(self, block: _Block) -> Parts:
        """Return the block's inputs as leaves that require gradients."""
        inputs = _take(self.spec, block, *self.inputs)
        leaves = (None if a is None else a.detach().requires_grad_() for a in inputs)
        return cast(Parts, tuple(leaves))

    def pull(
        self, block: _Block, rows: Tensor, above: Tensor, parts: Parts, *more: Tensor
    ) -> tuple[Tensor, ...]:
        """Add the gradients of the block, and return the gradients of ``more``."""
        present = [a for a in parts if a is not None]
        grads = torch.autograd.grad(rows, [*present, *more], above, materialize_grads=True)
        shares = iter(grads)
        totals = _take(self.spec, block, *self.totals)  # type: ignore[arg-type]
        for part, total in zip(parts, totals, strict=True):
            if part is not None and total is not None:
                total += next(shares)
        return grads[len(present) :]
