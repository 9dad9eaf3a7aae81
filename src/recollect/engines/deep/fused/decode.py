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

from recollect.choices.runtime import is_cacheable
from recollect.engines.deep.fused.fitting import Build
from recollect.engines.deep.fused.walk import Launch, aligned, launcher
from recollect.engines.deep.step_coefficients import Row
from recollect.recipe.bound import BoundRecipe
from recollect.state.buffer import Buffer
from recollect.state.state import State

__all__ = ["Decoded", "Shift", "TokenTask", "run_token", "shift_of", "token_launch"]

Weights = list[Tensor]

_GATES = ("lr", "log_decay", "momentum")


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
        ("kept", ctypes.c_void_p * 5),
        ("kept_after", ctypes.c_void_p * 5),
        *((name, ctypes.c_void_p) for name in ("held", "held_after")),
        *((name, ctypes.c_void_p) for name in ("position", "position_after")),
        *((name, ctypes.c_int) for name in ("n", "P", "H", "slots")),
    ]


@dataclass(kw_only=True)  # not frozen: made for every decoded token
class Shift:
    """Raw associations and counts of tokens ``[B]``, before the token and after it."""

    before: Buffer
    after: Buffer
    position: Tensor
    position_after: Tensor


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
    if build is None or queries != 1 or x.dtype != torch.float32 or not is_cacheable(x):
        return None
    return launcher(build, x.device)


def shift_of(bound: BoundRecipe, state: State, gates: Mapping[str, Tensor]) -> Shift | None:
    """Room for the raw associations one token on, where every row is as far and all slots shift.

    Args:
        bound: the recipe, whose window is its inner batch.
        state: before the token.
        gates: what is kept of a token beside its key and value.
    """
    old, recipe = state.buffer, bound.recipe
    if (
        old is None
        or recipe.num_past_associations != 0
        or old.k.shape[1] != recipe.algorithm.batch_size - 1
    ):
        return None
    if any(bound.constants.get(name) != 0 for name in old.rates if name not in gates):
        return None
    floats = [old.k, old.v, *(old.rates[name] for name in gates)]
    if any(x.dtype != torch.float32 for x in floats):
        return None
    if not all(x.is_contiguous() for x in (*floats, old.mask, state.position)):
        return None
    rates = {name: torch.empty_like(x) if name in gates else x for name, x in old.rates.items()}
    after = Buffer(
        k=torch.empty_like(old.k),
        v=torch.empty_like(old.v),
        rates=rates,
        mask=torch.empty_like(old.mask),
    )
    to = torch.empty_like(state.position)
    return Shift(before=old, after=after, position=state.position, position_after=to)


def run_token(
    build: Build,
    launch: Launch,
    tokens: tuple[Tensor, Tensor, Tensor],
    gates: Mapping[str, Tensor],
    memory: tuple[Weights, Weights | None],
    before: tuple[Tensor, Row] | None,
    *,
    tau: Tensor | None = None,
    shift: Shift | None = None,
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
        shift: raw associations that are moved on too; the caller does where there is none.
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
    sources = [*given, *map(gates.get, _GATES)]
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
    if shift is not None:
        _note(task, shift)
    launch("token", build, task, q.device)
    after = None if rows is None or row is None else (rows, row)
    return Decoded(y=y, memory=stops if ends else None, after=after)


def _note(task: TokenTask, shift: Shift) -> None:
    """Tell the kernel what it moves on."""
    five, old, after = ctypes.c_void_p * 5, shift.before, shift.after
    task.kept = five(*map(_address, (old.k, old.v, *map(old.rates.get, _GATES))))
    task.kept_after = five(*map(_address, (after.k, after.v, *map(after.rates.get, _GATES))))
    task.held, task.held_after = old.mask.data_ptr(), after.mask.data_ptr()
    task.position = shift.position.data_ptr()
    task.position_after = shift.position_after.data_ptr()
    task.slots = old.k.shape[1]


def _source(x: Tensor | None) -> _Source:
    """Where ``[B, H, ...]`` is; nowhere for what there is not."""
    return _Source() if x is None else _Source(x.data_ptr(), x.stride(0), x.stride(1))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
