"""Associations visible to the queries: buffered and new ones as one sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.context.weights import VisibleAssociations
from recollect.engines.common.problem import Problem
from recollect.state.state import Buffer

__all__ = ["gather_visible", "values"]


def gather_visible(
    problem: Problem,
    dtype: torch.dtype,
    query_rates: Mapping[str, Tensor] | None = None,
    joined: Buffer | None = None,
) -> VisibleAssociations:
    """The associations that a problem's queries may see, in ``dtype``.

    Old associations stand right-aligned and new ones left-aligned, so that distance in slots is
    distance in tokens.

    Args:
        problem: whose queries.
        dtype: of what is gathered.
        query_rates: numbers of queries that only read what stands there; ``None`` when each query
            comes with an association of its own.
        joined: the buffer after the call where it holds all associations in order, so that they are
            joined once.
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
        rates = {name: torch.cat([buffer.rates[name].to(x), x], 1) for name, x in rates.items()}
        valid = torch.cat([buffer.mask, valid], dim=1)
    n, start = buffered + T, problem.state.position[:, None]
    num_seen = problem.state.host_position
    # As many slots as tokens that each row has seen, and no padding.
    full = problem.lengths is None and (buffered == 0 or num_seen == buffered)
    end = (
        num_seen + T if num_seen is not None else n if problem.recipe.buffer_size is None else None
    )
    slot = torch.arange(n, device=device)
    position = start + slot - buffered
    first = problem.recipe.context.num_sinks
    if first and buffered:  # a document's first associations stand before the latest
        position = torch.where((slot < first) & (start > buffered), slot, position)
    if query_rates is None:
        slots = torch.arange(buffered, n, device=device)
        return VisibleAssociations(
            q=q,
            k=k,
            rates=rates,
            query_rates=problem.rates,
            valid=valid,
            position=position,
            query_position=position[:, buffered:],
            query_slots=slots,
            first_slot=buffered,
            is_full=full,
            max_position=end,
        )
    count = q.shape[1]
    return VisibleAssociations(
        q=q,
        k=k,
        rates=rates,
        query_rates=query_rates,
        valid=valid,
        position=position,
        query_position=(start - 1).expand(-1, count),
        query_slots=torch.full((count,), max(n - 1, 0), device=device),
        first_slot=n,
        is_full=full,
        max_position=end,
    )


def values(problem: Problem, dtype: torch.dtype, joined: Buffer | None = None) -> Tensor:
    """The values in the same run, ``[B, n, H, V]``.

    Args:
        problem: whose values.
        dtype: theirs.
        joined: as in `gather_visible`.
    """
    if joined is not None:
        return joined.v.to(dtype)
    v, buffer = problem.v.to(dtype), problem.state.buffer
    return v if buffer is None else torch.cat([buffer.v.to(dtype), v], dim=1)
