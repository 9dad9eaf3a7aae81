"""Scaling of each token's rate by the overlap of its key with earlier keys of the inner batch.

The rate is η_t r_t instead of η_t. The factor r_t (`overlap_discount` of
`recollect.choices.algorithm.normalized_steps`) depends only on the keys, so all engines receive
scaled rates. The state also stores scaled rates. The factors of an open batch are recomputed from
the stored keys, except between calls of one token. These store the scaled keys and u_t of the open
batch in the state's cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.normalized_steps import (
    effective_batch_size,
    overlap_discount,
    overlap_scale,
    signed_discount,
)
from recollect.state.state import State

__all__ = ["limit_rates_by_keys"]


def limit_rates_by_keys(
    algorithm: Algorithm,
    k: Tensor,  # [B, T, H, K]
    state: State,
    rates: Mapping[str, Tensor],  # [B, T, H, ...] by name
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the rates with η_t r_t as ``"lr"``, and entries of the next state's cache.

    ``state`` is the state before these tokens.
    """
    if k.numel() == 0:
        return rates, {}
    b, lr, entries = algorithm.batch_size, rates["lr"], {}
    n, keys = effective_batch_size(algorithm), k.to(torch.promote_types(k.dtype, torch.float32))
    position = state.host_position
    if position is None:
        r = _discount_ragged(keys, state, b, n)
    elif keys.shape[1] == 1 and not (torch.is_grad_enabled() and keys.requires_grad):
        r, entries = _discount_token(keys, state, b, n, position % b)
    else:
        r = _discount_aligned(keys, state, b, n, position % b)
    r = r.to(lr.dtype).view(*r.shape, *(1,) * (lr.dim() - 3))
    return {**rates, "lr": lr * r}, entries


def _discount_token(
    keys: Tensor, state: State, b: int, n: int, num_open: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return r ``[B, 1, H]`` of one token, and the cache of the next token.

    The cache is ``[B, H, num_open + 1, K + 1]``: the scaled keys of the open batch, and u.
    """
    name, B, H = f"overlap {n}", keys.shape[0], keys.shape[2]
    key = _scaled(keys, n).reshape(B * H, 1, -1)  # keys of any strides
    if num_open == 0:
        u = torch.ones_like(key[..., :1])
        new = torch.cat([key, u], dim=-1)
    else:
        old = state.cache.get(name)
        if old is None or old.shape[2] != num_open or old.dtype != keys.dtype:
            assert state.buffer is not None  # it contains the open batch
            past = state.buffer.k[:, -num_open:].transpose(1, 2).to(keys)
            old = torch.cat([_scaled(past, n), signed_discount(past, n).unsqueeze(-1)], dim=-1)
        old = old.flatten(0, 1)
        overlap = torch.bmm(key, old[..., :-1].mT).abs_()
        u = 1 - torch.bmm(overlap, old[..., -1:])  # [B H, 1, 1]
        new = torch.cat([old, torch.cat([key, u], dim=-1)], dim=1)
    entries = {} if num_open + 1 == b else {name: new.view(B, H, *new.shape[1:])}
    return u.clamp_min(0).view(B, 1, H), entries


def _scaled(keys: Tensor, n: int) -> Tensor:
    return keys * overlap_scale(keys.square().sum(-1, keepdim=True), n)


def _discount_aligned(keys: Tensor, state: State, b: int, n: int, num_open: int) -> Tensor:
    """Return r ``[B, T, H]`` if all open batches have ``num_open`` tokens."""
    T = keys.shape[1]
    if num_open:
        assert state.buffer is not None  # it contains the open batch
        old = state.buffer.k
        keys = torch.cat([old[:, old.shape[1] - num_open :].to(keys), keys], dim=1)
    width = min(b, num_open + T)
    if num_padding := -keys.shape[1] % width:
        keys = pad(keys, (0, 0, 0, 0, 0, num_padding))
    return _discount_per_batch(keys, width, n)[:, num_open : num_open + T]


def _discount_ragged(keys: Tensor, state: State, b: int, n: int) -> Tensor:
    """Return r ``[B, T, H]`` if the positions of batch elements differ."""
    (B, T), buffered = keys.shape[:2], 0
    if state.buffer is not None:
        buffered = state.buffer.k.shape[1]
        keys = torch.cat([state.buffer.k.to(keys), keys], dim=1)
    num_open = (state.position % b)[:, None]
    columns = torch.arange(b * -(-(b - 1 + T) // b), device=keys.device)
    index = columns + buffered - num_open  # the open batch is at the end of the buffer
    is_inside = (index < keys.shape[1])[..., None, None]
    index = index.clamp_max(keys.shape[1] - 1)[..., None, None].expand(-1, -1, *keys.shape[2:])
    r = _discount_per_batch(torch.where(is_inside, keys.gather(1, index), 0.0), b, n)
    positions = num_open + torch.arange(T, device=keys.device)
    return r.gather(1, positions.unsqueeze(-1).expand(B, T, r.shape[2]))


def _discount_per_batch(keys: Tensor, width: int, n: int) -> Tensor:
    """Return r ``[B, N width, H]`` of keys ``[B, N width, H, K]``."""
    batches = keys.unflatten(1, (-1, width)).transpose(2, 3)
    return overlap_discount(batches, n).transpose(2, 3).flatten(1, 2)
