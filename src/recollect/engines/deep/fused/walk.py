"""The fused walk over the inner batches of a call: its tensors, and who launches it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.engines.deep.fused.fitting import Build, runs_on
from recollect.engines.deep.step_coefficients import Table

__all__ = ["LAUNCHERS", "Launch", "Task", "aligned", "kept_batches", "launcher", "run_walk"]

Weights = list[Tensor]


class Task(ctypes.Structure):
    """``Task`` of ``cuda/walk.cuh``: addresses and sizes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "a", "m", "C", "s", "last")),
        *((name, ctypes.c_void_p) for name in ("length", "full")),
        ("start", ctypes.c_void_p * 4),
        ("end", ctypes.c_void_p * 4),
        *((name, ctypes.c_void_p) for name in ("y", "W", "h", "d", "slope", "bend", "e", "sums")),
        ("N", ctypes.c_int),
        ("P", ctypes.c_int),
    ]


Launch = Callable[[str, Build, ctypes.Structure, torch.device], None]
"""Of a kernel by name: ``"walk"``, ``"trace"``, ``"back"`` or ``"token"``."""

LAUNCHERS: dict[str, Launch] = {}
"""Who runs a walk, by type of device; tests put a simulator here."""


def launcher(build: Build, device: torch.device) -> Launch | None:
    """Who runs a walk on a device; ``None`` where nobody does.

    Args:
        build: of the walk.
        device: where the tensors are.
    """
    if device.type in LAUNCHERS:
        return LAUNCHERS[device.type]
    if device.type != "cuda" or not runs_on(build, torch.cuda.get_device_capability(device)):
        return None
    from recollect.engines.deep.fused.launch import launch

    return launch


def run_walk(
    build: Build,
    table: Table,
    tokens: tuple[Tensor, Tensor, Tensor],
    commits: Sequence[bool | Tensor],
    memory: tuple[Weights, Weights | None],
    launch: Launch,
) -> tuple[Tensor, Weights, Weights | None]:
    """Outputs ``[N, P, n, V]``, and A and S after the last batch, in float32.

    Args:
        build: for the recipe and the sizes.
        table: coefficients of n tokens, at most those of an inner batch.
        tokens: queries, keys and values ``[N, P, n, D]``.
        commits: per batch, which rows keep its end.
        memory: A and S, ``[P, out, in]``.
        launch: runs it.
    """
    N, P, n, _ = tokens[0].shape
    more, device = build.R - n, tokens[0].device
    q, k, v = (aligned(pad(x.to(torch.bfloat16), (0, 0, 0, more))) for x in tokens)
    # Of fewer tokens than a batch has, no end is kept.
    C = aligned(pad(table.C, (0, more, 0, more)))

    def row(x: Tensor | None) -> Tensor:
        x = C.new_ones(N, P, n) if x is None else x
        return aligned(pad(x, (0, more)))

    a = row(table.a)
    length = row(k.float().square().sum(-1)[:, :, :n]) if build.normalised else a
    m, last = (row(table.m), row(table.D)) if build.momentum else (a, a)
    s = a if table.s is None else aligned(table.s)
    A, S = memory
    start = [aligned(w) for w in (*A, *(S or ()))]
    ends = [torch.empty_like(w) for w in start]
    y = C.new_empty(N, P, build.R, build.D)
    full = kept_batches(commits, P, device)
    four = ctypes.c_void_p * 4
    task = Task(
        *(x.data_ptr() for x in (q, k, v, a, m, C, s, last, length, full)),
        four(*(w.data_ptr() for w in start)),
        four(*(w.data_ptr() for w in ends)),
        y.data_ptr(),
        N=N,
        P=P,
    )
    launch("walk", build, task, device)
    return y[:, :, :n], ends[: len(A)], None if S is None else ends[len(A) :]


def aligned(x: Tensor) -> Tensor:
    """The same in one piece that begins at a multiple of 16 bytes, as copies of 16 bytes ask."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def kept_batches(commits: Sequence[bool | Tensor], P: int, device: torch.device) -> Tensor:
    """Batches whose end each row keeps, ``[P]``: always the first ones."""
    full = torch.full((P,), sum(x is True for x in commits), dtype=torch.int32, device=device)
    for mask in commits:
        if not isinstance(mask, bool):
            full += mask.view(P)
    return full
