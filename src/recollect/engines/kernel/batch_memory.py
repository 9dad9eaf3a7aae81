"""The memory of `recollect.engines.kernel.deep` at the borders of inner batches.

Maps that read a kernel's features are rows by key, to which every batch adds its own; the others
are ordinary weights. A border decays both, adds the batch's steps, and moves momentum likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from recollect.engines.common.coefficients import Coefficients
from recollect.engines.common.decayed_keys import least
from recollect.engines.common.problem import Problem
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State

__all__ = ["Batch", "BatchMemory", "GrowingRows", "Maps", "gains"]

Maps = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One inner batch.

    Attributes:
        low, start, stop: of joined tokens: the window's first, the batch's own.
        C: of gradient i in A_t, ``[B, H, n, m]``. CS: of gradient i in S at the end ``[B, H, m]``.
        c: the coefficients without rates and windows.
    """

    low: int
    start: int
    stop: int
    C: Tensor
    CS: Tensor | None
    c: Coefficients


def gains(first: Sequence[bool], kappa: Tensor, inputs: Maps, deltas: Sequence[Tensor]) -> Tensor:
    """Σ_l |h_l|²|δ_l|² of associations ``[B, H, m]``, where |φ(k)|² = κ(k, k).

    Args:
        first: which maps read features. kappa: κ(k, k) ``[B, H, m]``.
        inputs: h of the other maps. deltas: δ of every map.
    """
    gain, others = torch.zeros_like(kappa), iter(inputs)
    for reads, delta in zip(first, deltas, strict=True):
        size = kappa if reads else next(others).square().sum(-1)
        gain = gain + size * delta.square().sum(-1)
    return gain


class GrowingRows:
    """Rows ``[B, H, n, D]`` to which batches are added, in place where nobody differentiates."""

    def __init__(self, x: Tensor, more: int, *, fixed: bool) -> None:
        self.count, self.fixed, self.buffer = x.shape[2], fixed, x
        if fixed:
            self.buffer = x.new_empty(*x.shape[:2], x.shape[2] + more, x.shape[3])
            self.buffer[:, :, : self.count] = x

    def upto(self, n: int) -> Tensor:
        """The first n rows."""
        return self.buffer[:, :, :n]

    @property
    def rows(self) -> Tensor:
        """Those that are there."""
        return self.upto(self.count)

    def add(self, x: Tensor) -> None:
        """More rows."""
        if self.fixed:
            self.buffer[:, :, self.count : self.count + x.shape[2]] = x
        else:
            self.buffer = torch.cat([self.rows, x], dim=2)
        self.count += x.shape[2]

    def scale(self, a: Tensor, other: Tensor | None = None) -> None:
        """x ← a x (+ other).

        What has decayed to the end of the dtype's range is set to 0: products with subnormal
        numbers take a processor ten times as long. Its gradient stays: a row may be 0 because
        its token wrote 0.
        """
        x = a * self.rows
        x = x if other is None else x + other
        finfo = torch.finfo(x.dtype)
        normal = functional.hardshrink(x.detach(), finfo.tiny / finfo.eps)
        if self.fixed:
            self.buffer[:, :, : self.count] = normal
        else:
            x.detach().copy_(normal)  # the values alone
            self.buffer = x

    def put(self, x: Tensor) -> None:
        """Other values of the same rows."""
        if self.fixed:
            self.buffer[:, :, : self.count] = x
        else:
            self.buffer = x

    def write(self, step: Tensor, back: int) -> None:
        """Rows less the steps: ``back`` of them stand already, the others are new."""
        if back:
            n = self.count - back
            if self.fixed:
                self.buffer[:, :, n : self.count] -= step[:, :, :back]
            else:
                last = self.buffer[:, :, n:] - step[:, :, :back]
                self.buffer = torch.cat([self.upto(n), last], dim=2)
        self.add(-step[:, :, back:])


class BatchMemory:
    """A and S at the start of an inner batch, and the keys up to the end of it.

    ``U`` and ``SU`` are rows of maps that read features, ``D`` and ``SD`` the other maps. Columns
    of ``mass`` are the keys' mass and, where it is known, what rows and masses may lack; ``None``
    without a decay.
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
        """A, S and mass at the border after a batch.

        Args:
            batch: the batch.
            inputs: of the other maps, h at the window's associations.
            deltas: δ of every map there.
            gone: which rows are gone after the batch ``[B, H, rows]``; ``None`` where none is.
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
            mass = torch.cat([mass[..., :1].clamp_min(least(mass.dtype)), mass[..., 1:]], dim=-1)
            if gone is not None:
                mass = mass.masked_fill(gone[..., : mass.shape[2]].unsqueeze(-1), 0.0)
            self.mass.count = mass.shape[2]
            self.mass.put(mass)
        self.n = self.keys.count

    def state_after(self, problem: Problem) -> State:
        """The state after a call: the memory at the last border, and the tokens since."""
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
