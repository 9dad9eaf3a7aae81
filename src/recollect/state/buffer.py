"""Associations that a state stores: those of the window and of the open inner batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recollect.choices.runtime import cached_constant
from recollect.recipe.recipe import Recipe
from recollect.state.tree import TensorTree

__all__ = ["Buffer", "update_buffer"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Buffer(TensorTree):
    """Associations with their gates, newest last and aligned right."""

    k: Tensor  # keys [B, n, H, K]
    v: Tensor  # values [B, n, H, V]
    # gates and constants by name, [B, n, H, ...]
    rates: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Tensor  # [B, n], False at empty slots, whose tensors are 0


def update_buffer(
    recipe: Recipe,  # determines the number of slots
    old: Buffer | None,  # buffer before the new tokens
    *,
    k: Tensor,  # new keys [B, T, H, K]
    v: Tensor,  # new values [B, T, H, V]
    rates: Mapping[str, Tensor],  # new gates and constants by name, without the slope of a query
    lengths: Tensor | None,  # number of valid tokens [B]; None without padding
    position: Tensor,  # number of tokens of the document after the call, [B]
    host_position: int | None = None,  # value of every entry of position, if the host knows it
) -> Buffer | None:
    """Return the buffer after new tokens.

    The cost is O(n) in the number of slots, not in T. If the buffer is full, the attention sinks of
    a context (`Context.num_sinks`) are in its first slots. The slope of a query is not stored.
    """
    size, history = recipe.buffer_size, recipe.num_past_associations
    batch_size, num_sinks = recipe.algorithm.batch_size, recipe.context.num_sinks
    num_old, T = 0 if old is None else old.k.shape[1], k.shape[1]
    is_dense = lengths is None and not num_sinks
    if size == 0:
        return None
    if size is None and lengths is None:
        mask, pick = _append(old, k)
    elif (
        is_dense
        and old is not None
        and T == 1
        and num_old == size
        and history is not None
        and _evicts_oldest(host_position, batch_size, history)
    ):
        mask, pick = _shift_one(old, k)
    elif is_dense and T == 1 and old is not None and size and _is_emptied(host_position, recipe):
        mask, pick = _empty(k, size)
    else:
        num_slots, num_kept = num_old + T if size is None else size, position
        if history is not None:
            num_kept = torch.minimum(position, position % batch_size + history)
        if is_dense:
            mask, pick = _keep_last(old, k, num_slots, num_kept)
        else:
            count = torch.full_like(position, T) if lengths is None else lengths
            mask, pick = _gather(old, k, num_slots, num_kept, count, position, num_sinks)
    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={
            name: pick(x, None if old is None else old.rates[name])
            for name, x in rates.items()
            if name != recipe.memory.slope_gate
        },
        mask=mask,
    )


Pick = Callable[[Tensor, Tensor | None], Tensor]
"""From a new and an old tensor to the tensor of the updated buffer."""


def _append(old: Buffer | None, k: Tensor) -> tuple[Tensor, Pick]:
    """Keep all old and new associations, without padding."""

    def pick(new: Tensor, old: Tensor | None) -> Tensor:
        if old is None:  # the caller may change or free its tensors
            return new.clone(memory_format=torch.contiguous_format)
        return torch.cat([old.to(new.dtype), new], dim=1)

    mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    return mask if old is None else torch.cat([old.mask, mask], dim=1), pick


def _evicts_oldest(host_position: int | None, batch_size: int, history: int) -> bool:
    """Return whether the last token evicts the oldest slot of a full buffer and no other."""
    if host_position is None or torch.compiler.is_compiling():  # one graph for all positions
        return False
    num_old, num_kept = (
        min(n, n % batch_size + history) for n in (host_position - 1, host_position)
    )
    return num_kept == min(num_old + 1, batch_size - 1 + history)


def _is_emptied(host_position: int | None, recipe: Recipe) -> bool:
    """Return whether the last token ends an inner batch and nothing else is stored."""
    if host_position is None or torch.compiler.is_compiling():
        return False
    return recipe.num_past_associations == 0 == host_position % recipe.algorithm.batch_size


def _empty(k: Tensor, num_slots: int) -> tuple[Tensor, Pick]:
    """Drop all associations."""
    mask = torch.zeros(k.shape[0], num_slots, dtype=torch.bool, device=k.device)
    return mask, lambda new, _: new.new_zeros(new.shape[0], num_slots, *new.shape[2:])


def _shift_one(old: Buffer, k: Tensor) -> tuple[Tensor, Pick]:
    """Drop the oldest association and append one token."""

    def pick(new: Tensor, old: Tensor | None) -> Tensor:
        assert old is not None
        return torch.cat([old[:, 1:].to(new.dtype), new], dim=1)

    valid = cached_constant(_true, k.shape[0], device=k.device)
    return torch.cat([old.mask[:, 1:], valid], dim=1), pick


def _true(B: int) -> Tensor:
    return torch.ones(B, 1, dtype=torch.bool)


def _keep_last(
    old: Buffer | None, k: Tensor, num_slots: int, num_kept: Tensor
) -> tuple[Tensor, Pick]:
    """Keep the last ``num_slots`` associations without padding; ``num_kept [B]`` are valid."""
    T = k.shape[1]
    num_old = max(num_slots - T, 0)  # slots that new tokens do not reach
    num_empty = num_old - (0 if old is None else min(old.k.shape[1], num_old))
    mask = torch.arange(num_slots, 0, -1, device=k.device) <= num_kept[:, None]
    if num_empty:
        mask[:, :num_empty] = False
    if old is not None and num_empty < num_old:
        mask[:, num_empty:num_old] &= old.mask[:, old.mask.shape[1] - num_old + num_empty :]
    is_empty = ~mask
    by_dim: dict[int, Tensor] = {}

    def pick(new: Tensor, old: Tensor | None) -> Tensor:
        parts = [new if num_slots - num_old == T else new[:, T - num_slots :]]
        if old is not None and num_empty < num_old:
            parts.insert(0, old[:, old.shape[1] - num_old + num_empty :].to(new.dtype))
        if num_empty:
            parts.insert(0, new.new_zeros(new.shape[0], num_empty, *new.shape[2:]))
        last = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if new.dim() not in by_dim:
            by_dim[new.dim()] = is_empty.view(*is_empty.shape, *(1,) * (new.dim() - 2))
        return last.masked_fill(by_dim[new.dim()], 0.0)

    return mask, pick


def _gather(
    old: Buffer | None,
    k: Tensor,
    num_slots: int,
    num_kept: Tensor,
    count: Tensor,
    position: Tensor,
    num_sinks: int,
) -> tuple[Tensor, Pick]:
    """Keep the last ``num_kept [B]`` associations after ``count [B]`` valid new ones, and sinks."""
    # Joined tokens form one run per batch element: old ones aligned right, new ones aligned left.
    num_old, T = 0 if old is None else old.k.shape[1], k.shape[1]
    end, slot = num_old + count, torch.arange(num_slots, device=k.device)
    index = end[:, None] - num_slots + slot  # [B, n]
    mask = (index >= end[:, None] - num_kept[:, None]) & (index >= 0)
    if old is not None and num_old:
        is_filled = old.mask.gather(1, index.clamp(0, num_old - 1))
        mask &= torch.where(index < num_old, is_filled, True)
    if num_sinks:
        old_position = (position - count)[:, None]
        sink_index = torch.where(old_position > num_old, slot, slot - old_position + num_old)
        sink_index = torch.where(slot >= old_position, num_old + slot - old_position, sink_index)
        is_sink = (slot < num_sinks) & (position > num_slots)[:, None]
        index, mask = torch.where(is_sink, sink_index, index), mask | is_sink
    index = index.clamp(0, max(num_old + T - 1, 0))

    def pick(new: Tensor, old: Tensor | None) -> Tensor:
        joined = new if old is None else torch.cat([old.to(new.dtype), new], dim=1)
        ones = (1,) * (new.dim() - 2)
        if joined.shape[1] == 0:
            return new.new_zeros(*index.shape, *new.shape[2:])
        picked = joined.gather(1, index.view(*index.shape, *ones).expand(-1, -1, *new.shape[2:]))
        return torch.where(mask.view(*mask.shape, *ones), picked, new.new_zeros(()))

    return mask, pick
