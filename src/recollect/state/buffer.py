"""Buffered associations that windows and open inner batches still need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.state.state import Buffer

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["roll"]


def _grown(old: Buffer | None, *, k: Tensor, v: Tensor, rates: Mapping[str, Tensor]) -> Buffer:
    """Everything, in rows without padding: what was held, then the new."""
    mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if old is None:
        # A view would hold on to what it is a view of.
        kept = {name: x.contiguous() for name, x in rates.items()}
        return Buffer(k=k.contiguous(), v=v.contiguous(), rates=kept, mask=mask)
    return Buffer(
        k=torch.cat([old.k.to(k.dtype), k], dim=1),
        v=torch.cat([old.v.to(v.dtype), v], dim=1),
        rates={name: torch.cat([old.rates[name].to(x), x], 1) for name, x in rates.items()},
        mask=torch.cat([old.mask, mask], dim=1),
    )


def roll(
    recipe: Recipe,
    old: Buffer | None,
    *,
    k: Tensor,
    v: Tensor,
    rates: Mapping[str, Tensor],
    lengths: Tensor | None,
    position: Tensor,
) -> Buffer | None:
    """The buffer after new tokens: per row, those of the window and of the open inner batch.

    ``position`` is that after the new tokens. Cost O(n) in the number of slots, not in T.
    """
    span = recipe.span
    if span == 0:
        return None
    B, T = k.shape[:2]
    if span is None and lengths is None:
        return _grown(old, k=k, v=v, rates=rates)
    held = 0 if old is None else old.k.shape[1]
    slots = held + T if span is None else span
    history = recipe.history
    wanted = position if history is None else position % recipe.algorithm.batch + history
    wanted = torch.minimum(position, wanted)
    if lengths is None:
        return _ended(old, slots, wanted, k=k, v=v, rates=rates)
    # Joined tokens form one run per row: old ones aligned right, new ones aligned left.
    end = held + lengths  # [B]
    index = end[:, None] - slots + torch.arange(slots, device=k.device)  # [B, n]
    mask = (index >= end[:, None] - wanted[:, None]) & (index >= 0)
    if old is not None:
        inside = index.clamp(0, held - 1) if held else index
        mask &= torch.where(index < held, old.mask.gather(1, inside), True) if held else True
    index = index.clamp(0, max(held + T - 1, 0))

    def pick(new: Tensor, past: Tensor | None) -> Tensor:
        # Slice before joining so that a long call does not copy all of its tokens.
        joined = new if past is None else torch.cat([past.to(new.dtype), new], dim=1)
        shaped = index.view(B, slots, *(1,) * (new.dim() - 2)).expand(-1, -1, *new.shape[2:])
        kept = mask.view(B, slots, *(1,) * (new.dim() - 2))
        if joined.shape[1] == 0:
            return new.new_zeros(B, slots, *new.shape[2:])
        return torch.where(kept, joined.gather(1, shaped), torch.zeros((), dtype=new.dtype).to(new))

    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={n: pick(x, None if old is None else old.rates[n]) for n, x in rates.items()},
        mask=mask,
    )


def _ended(
    old: Buffer | None,
    slots: int,
    wanted: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    rates: Mapping[str, Tensor],
) -> Buffer:
    """The last ``slots`` of what was held and rows without padding, of which ``wanted`` count."""
    B, T = k.shape[:2]
    past = max(slots - T, 0)  # slots that new tokens do not reach
    held = 0 if old is None else min(old.k.shape[1], past)
    mask = torch.arange(slots, 0, -1, device=k.device) <= wanted[:, None]
    if past:
        before = mask.new_zeros(B, past)
        if old is not None and held:
            before[:, past - held :] = old.mask[:, old.mask.shape[1] - held :]
        mask[:, :past] &= before

    def pick(new: Tensor, older: Tensor | None) -> Tensor:
        kept = mask.view(B, slots, *(1,) * (new.dim() - 2))
        parts = [new[:, T - (slots - past) :]]
        if older is not None and held:
            parts.insert(0, older[:, older.shape[1] - held :].to(new.dtype))
        if held < past:
            parts.insert(0, new.new_zeros(B, past - held, *new.shape[2:]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return torch.where(kept, joined, 0.0)

    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={n: pick(x, None if old is None else old.rates[n]) for n, x in rates.items()},
        mask=mask,
    )
