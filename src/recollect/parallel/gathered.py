"""Associations of earlier ranks, for states that store only associations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.parallel.segment import Segment
from recollect.state.buffer import Buffer

__all__ = ["with_earlier_associations"]


def with_earlier_associations(
    problem: Problem, segment: Segment, initial: Buffer | None, last_piece: Buffer | None
) -> Problem:
    """Return the problem of this rank's tokens with the associations of earlier ranks as its state.

    ``initial`` are those before the sequence. ``last_piece`` are those of a later piece of this
    segment, which the next rank continues.
    """
    span = problem.recipe.buffer_size
    if span == 0:
        return problem
    bound = problem.bound
    token_invariant = bound.constants.keys() | {name for _, name, _ in bound.learned_rates}
    slope = problem.recipe.memory.slope_gate
    stored = {name: x for name, x in problem.rates.items() if name != slope}
    rates = {name: x for name, x in stored.items() if name not in token_invariant}
    tokens = _by_name(problem.k, problem.v, rates)
    tensors, mask = _gathered(tokens, initial, last_piece, segment, span)
    history = problem.recipe.num_past_associations
    if span is not None and history is not None:
        mask = mask & (torch.arange(span, 0, -1, device=mask.device) <= history)
    rates_by_token: dict[str, Tensor] = {}
    for name, x in stored.items():
        if name in rates:
            rates_by_token[name] = tensors[f"rate {name}"]
        else:
            expanded = x[:, :1].expand(-1, mask.shape[1], *x.shape[2:])
            rates_by_token[name] = torch.where(_broadcast_mask(mask, expanded), expanded, 0.0)
    buffer = Buffer(k=tensors["k"], v=tensors["v"], rates=rates_by_token, mask=mask)
    if not mask.shape[1]:
        return problem
    return replace(problem, state=replace(problem.state, buffer=buffer))


def _by_name(k: Tensor, v: Tensor, rates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"k": k, "v": v, **{f"rate {name}": x for name, x in rates.items()}}


def _gathered(
    tokens: Mapping[str, Tensor],
    initial: Buffer | None,
    last_piece: Buffer | None,
    segment: Segment,
    n: int | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors ``[B, n, H, ...]`` of earlier ranks by name, and the mask of valid tokens.

    Tensors of one dtype share an exchange.
    """
    tensors: dict[str, Tensor] = {}
    mask = torch.empty(0)
    for dtype in dict.fromkeys(x.dtype for x in tokens.values()):
        group = {name: x for name, x in tokens.items() if x.dtype == dtype}

        def from_buffer(
            buffer: Buffer, names: Iterable[str] = group, dtype: torch.dtype = dtype
        ) -> Tensor:
            stored = _by_name(buffer.k, buffer.v, buffer.rates)
            return _concat_channels([stored[name] for name in names]).to(dtype)

        earlier = None if initial is None else (from_buffer(initial), initial.mask)
        last_tokens = None if last_piece is None else from_buffer(last_piece)
        gathered, mask = segment.preceding_tokens(
            _concat_channels(list(group.values())), n, earlier, last_tokens
        )
        sizes = [math.prod(x.shape[3:]) for x in group.values()]
        for (name, x), piece in zip(group.items(), gathered.split(sizes, -1), strict=True):
            tensors[name] = piece.reshape(*piece.shape[:3], *x.shape[3:])
    return tensors, mask


def _concat_channels(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors ``[B, T, H, ...]`` as channels ``[B, T, H, n]``."""
    return torch.cat([x.flatten(3) if x.dim() > 3 else x[..., None] for x in tensors], -1)


def _broadcast_mask(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *(1,) * (x.dim() - 2))
