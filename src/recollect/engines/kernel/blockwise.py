"""Causal kernel-matrix products computed for one block of query tokens at a time.

A row consists of κ(x_t, z_i) over the visible keys of token t: all earlier keys (``strict``, for
erasure), or also its own key (for reads). A row may be normalised by its sum over the keys' mass.
It decays with the distance, and may mix several probe keys of one token.

`solve_rows` and `apply_rows` multiply rows and values. Both process tokens in blocks, and their
backward passes recompute the rows of each block. A matrix of T² entries never exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.choices.features.base import Kernel

__all__ = ["Spec", "apply_rows", "solve_rows"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Definition of rows for N = B·H memories, with n keys of the state before T of the call.

    Attributes:
        kernel: κ.
        normalize: whether rows are divided by Σ_i mass_i κ.
        strict: whether the own key of a token is hidden.
        heads: number of keys x per token.
        block: number of tokens whose rows exist at a time.
        steep: whether decays inside a block are too strong for differences of sums in the keys'
            dtype.
    """

    kernel: Kernel
    normalize: bool
    strict: bool
    heads: int
    block: int
    steep: bool = False

    def rows(
        self,
        x: Tensor,
        k: Tensor,
        logs: Tensor | None,
        query_decay: Tensor | None,
        start: int,
    ) -> Tensor:
        """Return the weights of the block's tokens, ``[N, C·heads, e]``.

        Args:
            x: query or probe keys ``[N, C·heads, K]``.
            k: keys up to the last token of the block, ``[N, e, K]``.
            logs: log mass of the keys after their decay ``[N, e]``.
            query_decay: log decay of the tokens ``[N, C]``, with the reference point of ``logs``.
            start: number of keys before the block.
        """
        heads, C = self.heads, x.shape[1] // self.heads
        hidden = torch.ones(C, C, dtype=torch.bool, device=x.device).triu(0 if self.strict else 1)
        hidden = hidden if heads == 1 else hidden.repeat_interleave(heads, dim=0)
        exponent = self.kernel.exponent(x.shape[-1])
        faded = (not self.normalize and exponent is None) or self.steep
        fade = None
        if faded and logs is not None and query_decay is not None:
            fade = query_decay.repeat_interleave(heads, dim=1).unsqueeze(-1) + logs.unsqueeze(1)
            fade = fade.to(x.dtype)
        if not self.normalize and exponent is None:
            similarity = self.kernel.kappa(x, k)
            if fade is not None:
                fade[..., start:].masked_fill_(hidden, -torch.inf)
                return similarity * fade.exp()
            if similarity.requires_grad:  # a kernel may save its values for the backward pass
                block_part = similarity[..., start:].masked_fill(hidden, 0.0)
                return torch.cat([similarity[..., :start], block_part], dim=-1)
            similarity[..., start:].masked_fill_(hidden, 0.0)
            return similarity
        if exponent is not None and exponent[1] == 0.0:
            similarity = (exponent[0] * x) @ k.mT
        else:
            similarity = self.kernel.log_kappa(x, k)
        if fade is not None:
            similarity = similarity + fade
        elif logs is not None:
            similarity = similarity + logs.unsqueeze(1)
        if not self.normalize:
            if query_decay is not None and fade is None:
                similarity = similarity + query_decay.repeat_interleave(heads, dim=1).unsqueeze(-1)
            similarity[..., start:].masked_fill_(hidden, -torch.inf)
            return similarity.exp_() if not similarity.requires_grad else similarity.exp()
        similarity[..., start:].masked_fill_(hidden, -torch.inf)
        if not self._may_be_empty(start, logs):
            return torch.softmax(similarity, dim=-1)
        empty = similarity.detach().amax(-1, keepdim=True) == -torch.inf
        return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, similarity), dim=-1))

    def _may_be_empty(self, start: int, logs: Tensor | None) -> bool:
        return self.strict and (start == 0 or logs is not None)


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _mixed(rows: Tensor, scale: Tensor, heads: int) -> Tensor:
    """Return Σ_j scale_j rows_j: ``[N, C·J, e]`` and ``[N, C, J]`` to ``[N, C, e]``."""
    if heads == 1:
        return rows * scale
    return (rows.unflatten(1, (-1, heads)) * scale.unsqueeze(-1)).sum(2)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Block of tokens ``s`` to ``e`` of the call, after ``n`` keys of the state."""

    s: int
    e: int
    n: int

    @property
    def start(self) -> int:
        return self.n + self.s

    @property
    def stop(self) -> int:
        return self.n + self.e


def _blocks(T: int, n: int, block: int) -> list[_Block]:
    return [_Block(s=s, e=min(s + block, T), n=n) for s in range(0, T, block)]


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
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    write: Tensor,
    past: Tensor,
    logs: Tensor | None,
    query_decay: Tensor | None,
) -> Tensor:
    """Solve the triangular system u_t = write_t − Σ_j scale_tj Σ_(i<t) κ̄(x_tj, z_i) u_i.

    Forward substitution by blocks (AM 9.3): O(T²(K + V) + T C (K + V)) and memory O(T C).

    Args:
        x: probe keys ``[N, T·J, K]``.
        k: keys ``[N, n + T, K]``.
        scale: scale of each probe ``[N, T, J]``.
        write: written values ``[N, T, V]``.
        past: u of the state ``[N, n, V]``.
        logs: log mass of the keys ``[N, n + T]``, see `Spec.rows`.
        query_decay: log decay of the tokens ``[N, T]``, see `Spec.rows`.

    Returns:
        u of the new tokens ``[N, T, V]``.
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
    n, T = past.shape[1], write.shape[1]
    differentiable = torch.is_grad_enabled()
    U = past if differentiable else write.new_empty(past.shape[0], n + T, past.shape[2])
    if not differentiable:
        U[:, :n] = past
    for block in _blocks(T, n, spec.block):
        parts = _relative(spec, _take(spec, block, x, k, logs, query_decay))
        rows, factor = spec.rows(*parts, block.start), scale[:, block.s : block.e]
        right = write[:, block.s : block.e]
        if spec.heads == 1:  # scale the sum, not every weight
            if block.start:
                past_sum = torch.bmm(rows[..., : block.start], U[:, : block.start])
                right = torch.addcmul(right, factor, past_sum, value=-1)
            block_part = rows[..., block.start :] * factor
        else:
            rows = _mixed(rows, factor, spec.heads)
            if block.start:
                right = torch.baddbmm(
                    right, rows[..., : block.start], U[:, : block.start], alpha=-1
                )
            block_part = rows[..., block.start :]
        u = torch.linalg.solve_triangular(block_part, right, upper=False, unitriangular=True)
        if differentiable:
            U = torch.cat([U, u], dim=1)
        else:
            U[:, block.start : block.stop] = u
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
    """Return y_t = Σ_(i≤t) κ̄(x_t, z_i) u_i for ``heads`` queries per token: ``[N, T·G, V]``.

    Args:
        x: queries ``[N, T·G, K]``.
        k: keys ``[N, n + T, K]``.
        u: rows of the keys ``[N, n + T, V]``.
        logs: log mass of the keys, see `solve_rows`.
        query_decay: log decay of the tokens, see `solve_rows`.
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
