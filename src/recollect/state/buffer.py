"""Raw associations that a state keeps: those of the window and of the open inner batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.devices import constant
from recollect.recipe.recipe import Recipe

__all__ = ["Buffer", "roll"]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Raw associations with their gates, newest last and aligned right.

    Attributes:
        k: ``[B, n, H, K]``. v: ``[B, n, H, V]``.
        rates: every resolved number by name, ``[B, n, H, ...]``.
        mask: ``[B, n]``, False where a slot holds nothing (its numbers are then 0).
    """

    k: Tensor
    v: Tensor
    rates: Mapping[str, Tensor]
    mask: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Buffer:
        """Apply ``f`` to every tensor."""
        return Buffer(
            k=f(self.k),
            v=f(self.v),
            rates={name: f(x) for name, x in self.rates.items()},
            mask=f(self.mask),
        )


# -- the buffer after new tokens ------------------------------------------------------------------


def _grown(old: Buffer | None, *, k: Tensor, v: Tensor, rates: Mapping[str, Tensor]) -> Buffer:
    """Everything, in rows without padding: what was held, then the new."""
    mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if old is None:
        # The caller's tensors stay the caller's, to be changed or freed.
        own = {name: _copied(x) for name, x in rates.items()}
        return Buffer(k=_copied(k), v=_copied(v), rates=own, mask=mask)
    return Buffer(
        k=torch.cat([old.k.to(k.dtype), k], dim=1),
        v=torch.cat([old.v.to(v.dtype), v], dim=1),
        rates={name: torch.cat([old.rates[name].to(x), x], 1) for name, x in rates.items()},
        mask=torch.cat([old.mask, mask], dim=1),
    )


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def roll(
    recipe: Recipe,
    old: Buffer | None,
    *,
    k: Tensor,
    v: Tensor,
    rates: Mapping[str, Tensor],
    lengths: Tensor | None,
    position: Tensor,
    seen: int | None = None,
    nothing: Collection[str] = (),
) -> Buffer | None:
    """The buffer after new tokens: per row, those of the window and of the open inner batch.

    Cost O(n) in the number of slots, not in T. The first associations that a context keeps
    (`Context.first`) stand in the first slots of a buffer that is full.

    Args:
        recipe: whose span it is.
        old: the buffer before.
        k: new keys ``[B, T, H, K]``. v: values. rates: numbers, by name.
        lengths: real tokens per row ``[B]``, where rows are padded.
        position: after the new tokens, ``[B]``.
        seen: what every entry of ``position`` is, where the host knows it (`State.seen`).
        nothing: names of numbers that are 0 at every token, old and new.
    """
    span = recipe.span
    if span == 0:
        return None
    B, T = k.shape[:2]
    if span is None and lengths is None:
        return _grown(old, k=k, v=v, rates=rates)
    history, first = recipe.history, recipe.context.first
    if old is not None and seen is not None and history is not None and T == 1 and not first:
        batch = recipe.algorithm.batch
        if old.k.shape[1] == span and _only_shifts(seen, batch, history):
            return _shifted(old, k=k, v=v, rates=rates, nothing=nothing)
        if seen % batch + history == 0 and span and not torch.compiler.is_compiling():
            return _emptied(span, k=k, v=v, rates=rates)
    buffered = 0 if old is None else old.k.shape[1]
    slots = buffered + T if span is None else span
    wanted = position if history is None else position % recipe.algorithm.batch + history
    wanted = torch.minimum(position, wanted)
    if lengths is None and not first:
        return _ended(old, slots, wanted, k=k, v=v, rates=rates)
    # Joined tokens form one run per row: old ones aligned right, new ones aligned left.
    count = torch.full_like(position, T) if lengths is None else lengths
    end, slot = buffered + count, torch.arange(slots, device=k.device)
    index = end[:, None] - slots + slot  # [B, n]
    mask = (index >= end[:, None] - wanted[:, None]) & (index >= 0)
    if old is not None:
        inside = index.clamp(0, buffered - 1) if buffered else index
        mask &= (
            torch.where(index < buffered, old.mask.gather(1, inside), True) if buffered else True
        )
    if first:  # those of the document's beginning stay, before the latest
        before = (position - count)[:, None]
        own = torch.where(before > buffered, slot, slot - before + buffered)
        own = torch.where(slot >= before, buffered + slot - before, own)
        stays = (slot < first) & (position > slots)[:, None]
        index, mask = torch.where(stays, own, index), mask | stays
    index = index.clamp(0, max(buffered + T - 1, 0))

    def pick(new: Tensor, past: Tensor | None) -> Tensor:
        # Slice before joining so that a long call does not copy all of its tokens.
        joined = new if past is None else torch.cat([past.to(new.dtype), new], dim=1)
        shaped = index.view(B, slots, *(1,) * (new.dim() - 2)).expand(-1, -1, *new.shape[2:])
        shown = mask.view(B, slots, *(1,) * (new.dim() - 2))
        if joined.shape[1] == 0:
            return new.new_zeros(B, slots, *new.shape[2:])
        return torch.where(shown, joined.gather(1, shaped), new.new_zeros(()))

    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={n: pick(x, None if old is None else old.rates[n]) for n, x in rates.items()},
        mask=mask,
    )


def _only_shifts(seen: int, batch: int, history: int) -> bool:
    """Whether the last of ``seen`` tokens pushes out what no slot is left for, and nothing else.

    Where it ends an inner batch, what only that batch needed goes too.
    """
    if torch.compiler.is_compiling():  # a graph per number of tokens
        return False
    before, now = (min(n, n % batch + history) for n in (seen - 1, seen))
    return now == min(before + 1, batch - 1 + history)


def _shifted(
    old: Buffer,
    *,
    k: Tensor,
    v: Tensor,
    rates: Mapping[str, Tensor],
    nothing: Collection[str],
) -> Buffer:
    """The buffer one token on, of as many slots, where no other slot becomes empty."""
    kept = old.k.shape[1] - 1

    def pick(past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past.narrow(1, 1, kept).to(new.dtype), new], dim=1)

    mask = old.mask.narrow(1, 1, kept)
    there = constant(_there, k.shape[0], device=mask.device)
    return Buffer(
        k=pick(old.k, k),
        v=pick(old.v, v),
        rates={
            name: old.rates[name] if name in nothing else pick(old.rates[name], x)
            for name, x in rates.items()
        },
        mask=torch.cat([mask, there], dim=1),
    )


def _emptied(span: int, *, k: Tensor, v: Tensor, rates: Mapping[str, Tensor]) -> Buffer:
    """The buffer of an inner batch that has just ended, where nothing else is kept."""

    def none(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], span, *x.shape[2:])

    return Buffer(
        k=none(k),
        v=none(v),
        rates={name: none(x) for name, x in rates.items()},
        mask=torch.zeros(k.shape[0], span, dtype=torch.bool, device=k.device),
    )


def _there(B: int) -> Tensor:
    return torch.ones(B, 1, dtype=torch.bool)


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
    buffered = 0 if old is None else min(old.k.shape[1], past)
    mask = torch.arange(slots, 0, -1, device=k.device) <= wanted[:, None]
    if past > buffered:
        mask[:, : past - buffered] = False
    if old is not None and buffered:
        mask[:, past - buffered : past] &= old.mask[:, old.mask.shape[1] - buffered :]
    empty = ~mask
    shaped: dict[int, Tensor] = {}

    def pick(new: Tensor, older: Tensor | None) -> Tensor:
        parts = [new if slots - past == T else new[:, T - (slots - past) :]]
        if older is not None and buffered:
            parts.insert(0, older[:, older.shape[1] - buffered :].to(new.dtype))
        if buffered < past:
            parts.insert(0, new.new_zeros(B, past - buffered, *new.shape[2:]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if new.dim() not in shaped:
            shaped[new.dim()] = empty.view(B, slots, *(1,) * (new.dim() - 2))
        return joined.masked_fill(shaped[new.dim()], 0.0)

    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={n: pick(x, None if old is None else old.rates[n]) for n, x in rates.items()},
        mask=mask,
    )
