"""One decoded token of a memory that the fused walk is for, in one launch.

What it is given and what it leaves are the batched path's (`recollect.engines.deep.decode`): the
memory at the batch's start, the factors of its tokens beside each other and the coefficients after
the last of them. Either path goes on where the other has stopped. Products are float32 here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.fused.fitting import Build
from recollect.engines.deep.fused.walk import Launch, aligned, launcher
from recollect.engines.deep.step_coefficients import Row

__all__ = ["Decoded", "TokenTask", "run_token", "token_launch"]

Weights = list[Tensor]


class _Source(ctypes.Structure):
    """``Source`` of ``cuda/decode.cuh``: an address, and how far apart rows and heads are."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        ("row", ctypes.c_longlong),
        ("head", ctypes.c_longlong),
    ]


class TokenTask(ctypes.Structure):
    """``TokenTask`` of ``cuda/decode.cuh``: addresses and sizes."""

    _fields_ = [
        *((name, _Source) for name in ("q", "k", "v", "rate", "log_decay", "momentum")),
        ("tau", ctypes.c_void_p),
        ("start", ctypes.c_void_p * 4),
        ("end", ctypes.c_void_p * 4),
        *((name, ctypes.c_void_p) for name in ("factors", "C", "last")),
        *((name, ctypes.c_void_p) for name in ("y", "factors_after", "C_after", "last_after")),
        *((name, ctypes.c_int) for name in ("n", "P", "H")),
    ]


@dataclass(kw_only=True)  # not frozen: made for every decoded token
class Decoded:
    """Outputs ``[P, V]``, and what the next token takes up.

    Attributes:
        y: what the token reads.
        memory: A and S, one after the other, after a batch's last token; else ``None``: they stay.
        after: factors beside each other ``[P, n + 1, ·]`` and coefficients; not after the last.
    """

    y: Tensor
    memory: Weights | None
    after: tuple[Tensor, Row] | None


def token_launch(build: Build | None, x: Tensor, *, queries: int) -> Launch | None:
    """Who runs the token: where the fused walk was asked for and somebody runs it.

    Args:
        build: of the walk, if it was asked for.
        x: the query.
        queries: per key; the kernel takes one.
    """
    if build is None or queries != 1 or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return None
    return launcher(build, x.device)


def run_token(
    build: Build,
    launch: Launch,
    tokens: tuple[Tensor, Tensor, Tensor],
    gates: Mapping[str, Tensor],
    memory: tuple[Weights, Weights | None],
    before: tuple[Tensor, Row] | None,
    *,
    tau: Tensor | None = None,
    ends: bool,
) -> Decoded:
    """One token of every memory, by one launch.

    Args:
        build: for the recipe and the sizes.
        launch: of `token_launch`.
        tokens: query, key and value ``[B, H, D]``.
        gates: ``"lr"``, ``"log_decay"`` and ``"momentum"``, those that there are, ``[B, H]``.
        memory: A and S at the batch's start ``[P, out, in]``.
        before: factors ``[P, n, ·]`` and coefficients of the batch's tokens so far, if it has any.
        tau: where steps are averaged, τ of this token ``[P]``.
        ends: whether the token is its batch's last.
    """
    q = tokens[0]
    (B, H, D), (A, S) = q.shape, memory
    P, n = B * H, 0 if before is None else before[0].shape[1]
    y, rows, row = q.new_empty(P, D), None, None
    starts = [aligned(w) for w in (*A, *(S or ()))]
    stops: Weights = []
    if ends:
        stops = [torch.empty_like(w) for w in starts]
    else:
        rows = q.new_empty(P, n + 1, 2 * (D + build.HS * build.CS))
        row = Row(C=q.new_empty(P, 1 + build.momentum + n + 1))
        if build.momentum or tau is not None:
            row.D = q.new_empty(P, 2 * build.momentum + n + 1)
    # All that is read is held until the launch is queued, after which its memory is safe.
    given = [x if x.stride(2) == 1 else x.contiguous() for x in tokens]
    sources = [*given, *(gates.get(name) for name in ("lr", "log_decay", "momentum"))]
    kept = [None] * 3
    if before is not None:
        kept = [None if x is None else aligned(x) for x in (before[0], before[1].C, before[1].D)]
    made = (y, rows, None if row is None else row.C, None if row is None else row.D)
    four = ctypes.c_void_p * 4
    task = TokenTask(
        *map(_source, sources),
        _address(tau),
        four(*map(_address, starts)),
        four(*map(_address, stops)),
        *map(_address, (*kept, *made)),
        n=n,
        P=P,
        H=H,
    )
    launch("token", build, task, q.device)
    after = None if rows is None or row is None else (rows, row)
    return Decoded(y=y, memory=stops if ends else None, after=after)


def _source(x: Tensor | None) -> _Source:
    """Where ``[B, H, ...]`` is; nowhere for what there is not."""
    return _Source() if x is None else _Source(x.data_ptr(), x.stride(0), x.stride(1))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
