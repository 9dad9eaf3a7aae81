"""Causal kernel-matrix products computed for one block of query tokens at a time.

A row is made of κ(x_t, z_i) over the keys that token t may see: all before it (``strict``, what is
erased), or itself too (what is read). It may be divided by its sum over the keys' mass, decays
with the distance, and mixes several probe keys of one token.

`solve` and `attend` are the two products in which rows meet values. Both go through the tokens in
blocks and have a backward of their own that makes each block's rows once more, so that a matrix
of T² entries never exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.features.base import Kernel
from recollect.choices.gradients import again

__all__ = ["Spec", "attend", "solve"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How rows are made; N = B·H memories, n keys of the state before T of the call.

    Attributes:
        kernel: κ.
        normalize: divided by Σ_i mass_i κ.
        strict: a token does not see its own key.
        heads: keys x per token.
        block: tokens whose rows exist at a time.
        steep: decays inside a block are too strong for differences of sums in the keys' dtype.
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
        seen: Tensor | None,
        start: int,
    ) -> Tensor:
        """Weights of the block's tokens, ``[N, C·heads, e]``.

        Args:
            x: ``[N, C·heads, K]``. k: every key up to the block's last token, ``[N, e, K]``.
            logs: log mass of the keys ``[N, e]``, which the decay since has lowered.
            seen: log decay of the tokens ``[N, C]``, relative to the same moment.
            start: how many keys come before the block's.
        """
        heads, C = self.heads, x.shape[1] // self.heads
        dark = torch.ones(C, C, dtype=torch.bool, device=x.device).triu(0 if self.strict else 1)
        dark = dark if heads == 1 else dark.repeat_interleave(heads, dim=0)
        exponent = self.kernel.exponent(x.shape[-1])
        faded = (not self.normalize and exponent is None) or self.steep
        fade = None
        if faded and logs is not None and seen is not None:
            fade = seen.repeat_interleave(heads, dim=1).unsqueeze(-1) + logs.unsqueeze(1)
            fade = fade.to(x.dtype)
        if not self.normalize and exponent is None:
            found = self.kernel.kappa(x, k)
            if fade is not None:
                fade[..., start:].masked_fill_(dark, -torch.inf)
                return found * fade.exp()
            if found.requires_grad:  # a kernel may keep its values for its own gradient
                mine = found[..., start:].masked_fill(dark, 0.0)
                return torch.cat([found[..., :start], mine], dim=-1)
            found[..., start:].masked_fill_(dark, 0.0)
            return found
        if exponent is not None and exponent[1] == 0.0:
            found = (exponent[0] * x) @ k.mT
        else:
            found = self.kernel.log_kappa(x, k)
        if fade is not None:
            found = found + fade
        elif logs is not None:
            found = found + logs.unsqueeze(1)
        if not self.normalize:
            if seen is not None and fade is None:
                found = found + seen.repeat_interleave(heads, dim=1).unsqueeze(-1)
            found[..., start:].masked_fill_(dark, -torch.inf)
            return found.exp_() if not found.requires_grad else found.exp()
        found[..., start:].masked_fill_(dark, -torch.inf)
        if not self._may_be_empty(start, logs):
            return torch.softmax(found, dim=-1)
        empty = found.detach().amax(-1, keepdim=True) == -torch.inf
        return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, found), dim=-1))

    def _may_be_empty(self, start: int, logs: Tensor | None) -> bool:
        return self.strict and (start == 0 or logs is not None)


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _mixed(rows: Tensor, scale: Tensor, heads: int) -> Tensor:
    """Σ_j scale_j rows_j: ``[N, C·J, e]`` and ``[N, C, J]`` to ``[N, C, e]``."""
    if heads == 1:
        return rows * scale
    return (rows.unflatten(1, (-1, heads)) * scale.unsqueeze(-1)).sum(2)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """One block: tokens ``s`` to ``e`` of the call, behind ``n`` keys of the state."""

    s: int
    e: int
    n: int

    @property
    def start(self) -> int:
        return self.n + self.s

    @property
    def stop(self) -> int:
        return self.n + self.e


def _cuts(T: int, n: int, block: int) -> list[_Cut]:
    return [_Cut(s=s, e=min(s + block, T), n=n) for s in range(0, T, block)]


def _take(spec: Spec, cut: _Cut, x: Tensor, k: Tensor, logs: Any, seen: Any) -> Parts:
    """The inputs of a block's rows."""
    J = spec.heads
    return (
        x[:, cut.s * J : cut.e * J],
        k[:, : cut.stop],
        None if logs is None else logs[:, : cut.stop],
        None if seen is None else seen[:, cut.s : cut.e],
    )


def _relative(spec: Spec, parts: Parts) -> Parts:
    """Logs relative to the block's start: differences of long sums, in the keys' dtype.

    Steep ones stay in float64: of two that are −6000, float32 would keep three decimals.
    """
    x, k, logs, seen = parts
    if logs is None or seen is None or spec.steep:
        return parts
    here = seen[:, :1].detach()
    return x, k, (logs + here).to(x.dtype), (seen - here).to(x.dtype)


# -- U = (I + B)⁻¹ C -----------------------------------------------------------------------------


def solve(
    spec: Spec,
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    write: Tensor,
    past: Tensor,
    logs: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    """u_t = write_t − Σ_j scale_tj Σ_(i<t) κ̄(x_tj, z_i) u_i, one unit-triangular system.

    Forward substitution by blocks (AM 9.3): O(T²(K + V) + T C (K + V)) and memory O(T C).

    Args:
        x: probe keys ``[N, T·J, K]``. k: keys ``[N, n + T, K]``.
        scale: ``[N, T, J]``. write: ``[N, T, V]``. past: u of the state ``[N, n, V]``.
        logs: ``[N, n + T]`` and seen: ``[N, T]``, as for `Spec.rows`.

    Returns:
        ``[N, T, V]``.
    """
    inputs = (x, k, scale, write, past, logs, seen)
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs):
        return cast(Tensor, _Solve.apply(spec, *inputs))
    return _substitute(spec, *inputs)


def _substitute(
    spec: Spec,
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    write: Tensor,
    past: Tensor,
    logs: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    n, T = past.shape[1], write.shape[1]
    differentiable = torch.is_grad_enabled()
    U = past if differentiable else write.new_empty(past.shape[0], n + T, past.shape[2])
    if not differentiable:
        U[:, :n] = past
    for cut in _cuts(T, n, spec.block):
        parts = _relative(spec, _take(spec, cut, x, k, logs, seen))
        rows, mine = spec.rows(*parts, cut.start), scale[:, cut.s : cut.e]
        right = write[:, cut.s : cut.e]
        if spec.heads == 1:  # scale what was summed, not every weight
            if cut.start:
                found = torch.bmm(rows[..., : cut.start], U[:, : cut.start])
                right = torch.addcmul(right, mine, found, value=-1)
            own = rows[..., cut.start :] * mine
        else:
            rows = _mixed(rows, mine, spec.heads)
            if cut.start:
                right = torch.baddbmm(right, rows[..., : cut.start], U[:, : cut.start], alpha=-1)
            own = rows[..., cut.start :]
        u = torch.linalg.solve_triangular(own, right, upper=False, unitriangular=True)
        if differentiable:
            U = torch.cat([U, u], dim=1)
        else:
            U[:, cut.start : cut.stop] = u
    return U[:, n:]


class _Solve(torch.autograd.Function):
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
            return (None, *again(lambda a: [_substitute(spec, *a)], inputs, needs, outer))
        x, k, scale, write, past, logs, seen = inputs
        n, T = past.shape[1], write.shape[1]
        U = torch.cat([past, u], dim=1)
        g = torch.cat([torch.zeros_like(past), du], dim=1)
        sums = _Sums(spec, (x, k, logs, seen))
        dscale = torch.zeros_like(scale)
        for cut in reversed(_cuts(T, n, spec.block)):
            parts = sums.leaves(cut)
            mine = scale[:, cut.s : cut.e].detach().requires_grad_()
            with torch.enable_grad():
                B = _mixed(spec.rows(*_relative(spec, parts), cut.start), mine, spec.heads)
            b = B.detach()
            r = torch.linalg.solve_triangular(
                b[..., cut.start :].mT, g[:, cut.start : cut.stop], upper=True, unitriangular=True
            )
            g[:, cut.start : cut.stop] = r
            if cut.start:
                g[:, : cut.start].baddbmm_(b[..., : cut.start].mT, r, alpha=-1)
            dB = torch.bmm(r.neg(), U[:, : cut.stop].mT)
            (dscale[:, cut.s : cut.e],) = sums.pull(cut, B, dB, parts, mine)
        dx, dk, dlogs, dseen = sums.found
        return None, dx, dk, dscale, g[:, n:], g[:, :n], dlogs, dseen


# -- Y = R U -------------------------------------------------------------------------------------


def attend(
    spec: Spec, x: Tensor, k: Tensor, u: Tensor, logs: Tensor | None, seen: Tensor | None
) -> Tensor:
    """y_t = Σ_(i≤t) κ̄(x_t, z_i) u_i for ``heads`` queries per token: ``[N, T·G, V]``.

    Args:
        x: queries ``[N, T·G, K]``. k: keys ``[N, n + T, K]``. u: ``[N, n + T, V]``.
        logs, seen: as for `solve`.
    """
    inputs = (x, k, u, logs, seen)
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs):
        return cast(Tensor, _Attend.apply(spec, *inputs))
    return _products(spec, *inputs)


def _products(
    spec: Spec, x: Tensor, k: Tensor, u: Tensor, logs: Tensor | None, seen: Tensor | None
) -> Tensor:
    T = x.shape[1] // spec.heads
    found: list[Tensor] = []
    for cut in _cuts(T, u.shape[1] - T, spec.block):
        parts = _relative(spec, _take(spec, cut, x, k, logs, seen))
        found.append(torch.bmm(spec.rows(*parts, cut.start), u[:, : cut.stop]))
    return torch.cat(found, dim=1)


class _Attend(torch.autograd.Function):
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
            return (None, *again(lambda a: [_products(spec, *a)], inputs, needs, outer))
        x, k, u, logs, seen = inputs
        T, G = x.shape[1] // spec.heads, spec.heads
        sums, du = _Sums(spec, (x, k, logs, seen)), torch.zeros_like(u)
        for cut in _cuts(T, u.shape[1] - T, spec.block):
            parts = sums.leaves(cut)
            with torch.enable_grad():
                R = spec.rows(*_relative(spec, parts), cut.start)
            above = dy[:, cut.s * G : cut.e * G]
            du[:, : cut.stop].baddbmm_(R.detach().mT, above)
            sums.pull(cut, R, torch.bmm(above, u[:, : cut.stop].mT), parts)
        dx, dk, dlogs, dseen = sums.found
        return None, dx, dk, du, dlogs, dseen


# -- gradients -----------------------------------------------------------------------------------


class _Sums:
    """Gradients of what rows are made of, gathered over blocks."""

    def __init__(self, spec: Spec, inputs: tuple[Any, ...]) -> None:
        self.spec, self.inputs = spec, inputs
        self.found: list[Tensor | None] = [
            None if a is None else torch.zeros_like(a) for a in inputs
        ]

    def leaves(self, cut: _Cut) -> Parts:
        """The block's inputs, ready to be differentiated."""
        taken = _take(self.spec, cut, *self.inputs)
        return cast(Parts, tuple(None if a is None else a.detach().requires_grad_() for a in taken))

    def pull(
        self, cut: _Cut, rows: Tensor, above: Tensor, parts: Parts, *more: Tensor
    ) -> tuple[Tensor, ...]:
        """Add the block's share; gradients of ``more`` are returned."""
        wanted = [a for a in parts if a is not None]
        got = torch.autograd.grad(rows, [*wanted, *more], above, materialize_grads=True)
        shares = iter(got)
        totals = _take(self.spec, cut, *self.found)  # type: ignore[arg-type]
        for part, total in zip(parts, totals, strict=True):
            if part is not None and total is not None:
                total += next(shares)
        return got[len(wanted) :]
