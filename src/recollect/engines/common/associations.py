"""Associations visible to the queries: buffered and new associations as one sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.context.weights import VisibleAssociations
from recollect.engines.common.problem import Problem
from recollect.state.state import Buffer

__all__ = ["gather_visible", "visible_values"]


def gather_visible(
    problem: Problem,
    dtype: torch.dtype,
    query_rates: Mapping[str, Tensor] | None = None,  # gates of read-only queries
    joined: Buffer | None = None,  # buffer after the call, if it has all associations in order
) -> VisibleAssociations:
    """Return the associations that are visible to a problem's queries, in ``dtype``.

    Old associations are right-aligned and new associations are left-aligned, so that the distance
    in slots is the distance in tokens. Read-only queries have no new association.
    """
    buffer, q = problem.state.buffer, problem.q.to(dtype)
    k, rates = problem.k.to(dtype), dict(problem.rates)
    B, T = k.shape[:2]
    device = k.device
    valid = problem.token_mask
    if valid is None:
        valid = torch.ones(B, T, dtype=torch.bool, device=device)
    buffered = 0
    if joined is not None:
        buffered = joined.k.shape[1] - T
        k, rates, valid = joined.k.to(dtype), dict(joined.rates), joined.mask
    elif buffer is not None:
        buffered = buffer.k.shape[1]
        k = torch.cat([buffer.k.to(dtype), k], dim=1)
        rates = {
            name: torch.cat([buffer.rates[name].to(x), x], 1)
            for name, x in rates.items()
            if name != problem.recipe.memory.slope_gate  # only queries have a slope
        }
        valid = torch.cat([buffer.mask, valid], dim=1)
    n, start = buffered + T, problem.state.position[:, None]
    num_seen = problem.state.host_position
    # All batch elements fill all slots, without padding.
    is_full = problem.lengths is None and (buffered == 0 or num_seen == buffered)
    max_position = (
        num_seen + T if num_seen is not None else n if problem.recipe.buffer_size is None else None
    )
    slot = torch.arange(n, device=device)
    position = start + slot - buffered
    num_sinks = problem.recipe.context.num_sinks
    if num_sinks and buffered:  # sinks are before the latest associations
        position = torch.where((slot < num_sinks) & (start > buffered), slot, position)
    if query_rates is None:
        first_slot, query_slots, query_position = buffered, slot[buffered:], position[:, buffered:]
    else:
        count, first_slot = q.shape[1], n
        query_slots = torch.full((count,), max(n - 1, 0), device=device)
        query_position = (start - 1).expand(-1, count)
    return VisibleAssociations(
        q=q,
        k=k,
        rates=rates,
        query_rates=problem.rates if query_rates is None else query_rates,
        valid=valid,
        position=position,
        query_position=query_position,
        query_slots=query_slots,
        first_slot=first_slot,
        is_full=is_full,
        max_position=max_position,
    )


def visible_values(problem: Problem, dtype: torch.dtype, joined: Buffer | None = None) -> Tensor:
    """Return the values of the associations of `gather_visible`, ``[B, n, H, V]``."""
    if joined is not None:
        return joined.v.to(dtype)
    v, buffer = problem.v.to(dtype), problem.state.buffer
    return v if buffer is None else torch.cat([buffer.v.to(dtype), v], dim=1)
