"""Rates of tokens whose inner batch measures its limit by their keys: η_t r_t in place of η_t.

r_t (`overlap_discount` of `recollect.choices.algorithm.normalized_steps`) depends on
the keys alone, so all engines are
given rates that have it. Those that a state keeps have it too; what earlier tokens of an open batch
have taken is worked out again from the keys that stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.normalized_steps import effective_batch_size, overlap_discount
from recollect.state.state import State

__all__ = ["rates_by_keys"]


def rates_by_keys(
    algorithm: Algorithm, k: Tensor, state: State, rates: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The numbers with η_t r_t for ``"lr"``.

    Args:
        algorithm: which asks for it (`measures_overlap`). k: keys of new tokens ``[B, T, H, K]``.
        state: before them. rates: their numbers by name, ``[B, T, H, ...]``.
    """
    if k.numel() == 0:
        return rates
    b, lr = algorithm.batch_size, rates["lr"]
    n, keys = effective_batch_size(algorithm), k.to(torch.promote_types(k.dtype, torch.float32))
    if state.host_position is None:
        r = _row_by_row(keys, state, b, n)
    else:
        r = _aligned(keys, state, b, n, state.host_position % b)
    r = r.to(lr.dtype).view(*r.shape, *(1,) * (lr.dim() - 3))
    return {**rates, "lr": lr * r}


def _aligned(keys: Tensor, state: State, b: int, n: int, opened: int) -> Tensor:
    """r ``[B, T, H]`` where every row's open batch has so many tokens."""
    T = keys.shape[1]
    if opened:
        assert state.buffer is not None  # it keeps the open batch
        old = state.buffer.k
        keys = torch.cat([old[:, old.shape[1] - opened :].to(keys), keys], dim=1)
    width = min(b, opened + T)
    if missing := -keys.shape[1] % width:
        keys = pad(keys, (0, 0, 0, 0, 0, missing))
    return _by_batch(keys, width, n)[:, opened : opened + T]


def _row_by_row(keys: Tensor, state: State, b: int, n: int) -> Tensor:
    """The same where rows have come differently far."""
    (B, T), buffered = keys.shape[:2], 0
    if state.buffer is not None:
        buffered = state.buffer.k.shape[1]
        keys = torch.cat([state.buffer.k.to(keys), keys], dim=1)
    opened = (state.position % b)[:, None]
    columns = torch.arange(b * -(-(b - 1 + T) // b), device=keys.device)
    index = columns + buffered - opened  # the open batch ends where the buffer does
    there = (index < keys.shape[1])[..., None, None]
    index = index.clamp_max(keys.shape[1] - 1)[..., None, None].expand(-1, -1, *keys.shape[2:])
    r = _by_batch(torch.where(there, keys.gather(1, index), 0.0), b, n)
    places = opened + torch.arange(T, device=keys.device)
    return r.gather(1, places.unsqueeze(-1).expand(B, T, r.shape[2]))


def _by_batch(keys: Tensor, width: int, n: int) -> Tensor:
    """r ``[B, N width, H]`` of keys ``[B, N width, H, K]``."""
    return (
        overlap_discount(keys.unflatten(1, (-1, width)).transpose(2, 3), n)
        .transpose(2, 3)
        .flatten(1, 2)
    )
