"""Memory of `recollect.engines.kernel.deep` at the boundaries of inner batches.

Maps that read a kernel's features are rows by key, and every batch appends rows. The other maps are
ordinary weights. A boundary decays both, adds the steps of the batch, and updates the momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from recollect.engines.common.coefficients import Coefficients
from recollect.engines.common.kernel_precision import min_mass
from recollect.engines.common.problem import Problem
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State

__all__ = ["Batch", "BatchMemory", "GrowingRows", "Maps", "gains"]

Maps = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One inner batch.

    Attributes:
        low: first token of the window.
        start: first token of the batch.
        stop: end of the batch.
        C: coefficients of gradient i in A_t, ``[B, H, n, m]``.
        CS: coefficients of gradient i in S at the end, ``[B, H, m]``.
        c: coefficients without rates and windows.
    """

    low: int
    start: int
    stop: int
    C: Tensor
    CS: Tensor | None
    c: Coefficients


def gains(first: Sequence[bool], kappa: Tensor, inputs: Maps, deltas: Sequence[Tensor]) -> Tensor:
    """Return Σ_l |h_l|²|δ_l|² of associations ``[B, H, m]``, with |φ(k)|² = κ(k, k).

    Args:
        first: whether each map reads features.
        kappa: κ(k, k) ``[B, H, m]``.
        inputs: h of the other maps.
        deltas: δ of every map.
    """
    gain, others = torch.zeros_like(kappa), iter(inputs)
    for reads, delta in zip(first, deltas, strict=True):
        size = kappa if reads else next(others).square().sum(-1)
        gain = gain + size * delta.square().sum(-1)
    return gain


class GrowingRows:
    """Rows ``[B, H, n, D]`` that batches append to, in place if no gradient is needed."""

    def __init__(self, x: Tensor, more: int, *, fixed: bool) -> None:
        self.count, self.fixed, self.buffer = x.shape[2], fixed, x
        if fixed:
            self.buffer = x.new_empty(*x.shape[:2], x.shape[2] + more, x.shape[3])
            self.buffer[:, :, : self.count] = x

    def upto(self, n: int) -> Tensor:
        """Return the first n rows."""
        return self.buffer[:, :, :n]

    @property
    def rows(self) -> Tensor:
        """All current rows."""
        return self.upto(self.count)

    def add(self, x: Tensor) -> None:
        """Append rows."""
        if self.fixed:
            self.buffer[:, :, self.count : self.count + x.shape[2]] = x
        else:
            self.buffer = torch.cat([self.rows, x], dim=2)
        self.count += x.shape[2]

    def scale(self, a: Tensor, other: Tensor | None = None) -> None:
        """Set x ← a x (+ other).

        Values at the end of the dtype's range are set to 0, because products with subnormal numbers
        are slow on a CPU. Their gradient is unchanged: a row may be 0 because its token wrote 0.
        """
        x = a * self.rows
        x = x if other is None else x + other
        finfo = torch.finfo(x.dtype)
        normal = functional.hardshrink(x.detach(), finfo.tiny / finfo.eps)
        if self.fixed:
            self.buffer[:, :, : self.count] = normal
        else:
            x.detach().copy_(normal)  # values only, without their gradient
            self.buffer = x

    def put(self, x: Tensor) -> None:
        """Replace the values of all rows."""
        if self.fixed:
            self.buffer[:, :, : self.count] = x
        else:
            self.buffer = x

    def write(self, step: Tensor, back: int) -> None:
        """Subtract steps from the last ``back`` rows, and append rows for the other steps."""
        if back:
            n = self.count - back
            if self.fixed:
                self.buffer[:, :, n : self.count] -= step[:, :, :back]
            else:
                last = self.buffer[:, :, n:] - step[:, :, :back]
                self.buffer = torch.cat([self.upto(n), last], dim=2)
        self.add(-step[:, :, back:])


class BatchMemory:
    """A and S at the start of an inner batch, and the keys up to its end.

    ``U`` and ``SU`` are rows of maps that read features, ``D`` and ``SD`` the other maps. Columns
    of ``mass`` are the mass of the keys and, if it is tracked, the missing mass. ``mass`` is
    ``None`` without a decay.
    """

    def __init__(
        self, state: State, slot: str | None, first: Sequence[bool], more: int, mass: Tensor | None,
        *, outer: bool,
    ) -> None:  # fmt: skip
        dual = state.kernel_rows
        assert dual is not None

        def grow(x: Tensor) -> GrowingRows:
            return GrowingRows(x.transpose(1, 2), more, fixed=not outer)

        self.slot, self.first = slot, first
        self.n = dual.k.shape[1]  # keys at the start of the inner batch
        self.keys = grow(dual.k)
        self.mass = None if mass is None else grow(mass)
        self.U = [grow(u) for u in dual.rows]
        self.D: Maps = list(state.weights)
        self.SU = [] if slot is None else [grow(u) for u in dual.slots[slot]]
        self.SD: Maps = [] if slot is None else list(state.algorithm_state.get(slot, ()))

    def move(self, batch: Batch, inputs: Maps, deltas: Maps, gone: Tensor | None) -> None:
        """Update A, S and mass at the boundary after a batch.

        Args:
            batch: the batch.
            inputs: h of the other maps at the window's associations.
            deltas: δ of every map at the window's associations.
            gone: mask of erased rows after the batch ``[B, H, rows]``, or ``None``.
        """
        c, decays = batch.c, self.mass is not None
        a, last = c.a[..., -1:, None], batch.C[..., -1, :, None]  # [B, H, 1, 1], [B, H, m, 1]
        back = batch.start - batch.low
        kinds = iter(range(len(self.U))), iter(range(len(self.D)))
        for first, delta in zip(self.first, deltas, strict=True):
            index = next(kinds[0] if first else kinds[1])
            step = last * delta
            if c.m is None:
                if first:
                    if decays:
                        self.U[index].scale(a)
                    self.U[index].write(step, back)
                else:
                    decayed = a * self.D[index] if decays else self.D[index]
                    self.D[index] = decayed - step.mT @ inputs[index]
                continue
            assert c.theta_end is not None and batch.CS is not None
            m, theta = c.m[..., -1:, None], c.theta_end[..., None, None]
            push = batch.CS.unsqueeze(-1) * delta
            if first:
                self.U[index].scale(a, m * self.SU[index].rows)
                self.SU[index].scale(theta)
                self.U[index].write(step, back)
                self.SU[index].write(push, back)
            else:
                S, h = self.SD[index], inputs[index]
                self.D[index] = a * self.D[index] + m * S - step.mT @ h
                self.SD[index] = theta * S - push.mT @ h
        if self.mass is not None:
            fresh = c.P[..., -1, :].unsqueeze(-1).expand(*a.shape[:2], -1, 1)
            fresh = functional.pad(fresh, (0, self.mass.rows.shape[-1] - 1))
            mass = torch.cat([a * self.mass.rows, fresh], dim=2)
            mass = torch.cat([mass[..., :1].clamp_min(min_mass(mass.dtype)), mass[..., 1:]], dim=-1)
            if gone is not None:
                mass = mass.masked_fill(gone[..., : mass.shape[2]].unsqueeze(-1), 0.0)
            self.mass.count = mass.shape[2]
            self.mass.put(mass)
        self.n = self.keys.count

    def state_after(self, problem: Problem) -> State:
        """Return the state after a call: memory at the last boundary, and the tokens since."""
        n = self.n

        def lower(x: GrowingRows) -> Tensor:
            return x.upto(n).transpose(1, 2)

        slots = {} if self.slot is None else {self.slot: tuple(map(lower, self.SU))}
        keys = lower(self.keys)
        dual = KernelRows(
            k=keys,
            rows=tuple(map(lower, self.U)),
            mass=keys.new_ones(keys.shape[:3]) if self.mass is None else lower(self.mass)[..., 0],
            mask=torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device),
            slots=slots,
        )
        dense = {self.slot: tuple(self.SD)} if self.slot is not None and self.D else {}
        return problem.final_state(weights=tuple(self.D), algorithm_state=dense, kernel_rows=dual)
