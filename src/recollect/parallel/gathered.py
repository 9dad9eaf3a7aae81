"""Associations of earlier ranks that a state keeps as they came: windows, keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.parallel.segment import Segment
from recollect.state.buffer import Buffer

__all__ = ["behind"]


def behind(
    problem: Problem, segment: Segment, given: Buffer | None, rest: Buffer | None
) -> Problem:
    """The problem with a state that holds the associations of earlier ranks.

    Args:
        problem: of this rank's tokens.
        segment: this rank's.
        given: associations before the first token of all.
        rest: those of a later piece of this segment, which then go on to the next rank.
    """
    span = problem.recipe.span
    if span == 0:
        return problem
    sized = problem.sized
    still = sized.constants.keys() | {name for _, name, _ in sized.statics}
    rates = {name: x for name, x in problem.rates.items() if name not in still}
    tokens = {"k": problem.k, "v": problem.v, **{f"rate {n}": x for n, x in rates.items()}}
    found, mask = _gathered(tokens, given, rest, segment, span)
    history = problem.recipe.history
    if span is not None and history is not None:
        mask = mask & (torch.arange(span, 0, -1, device=mask.device) <= history)
    kept: dict[str, Tensor] = {}
    for name, x in problem.rates.items():
        if name in rates:
            kept[name] = found[f"rate {name}"]
        else:
            same = x[:, :1].expand(-1, mask.shape[1], *x.shape[2:])
            kept[name] = torch.where(_shaped(mask, same), same, 0.0)
    buffer = Buffer(k=found["k"], v=found["v"], rates=kept, mask=mask)
    if not mask.shape[1]:
        return problem
    return replace(problem, state=replace(problem.state, buffer=buffer))


def _gathered(
    tokens: Mapping[str, Tensor],
    given: Buffer | None,
    rest: Buffer | None,
    segment: Segment,
    n: int | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors ``[B, T, H, ...]`` of earlier ranks by name, and which tokens there are.

    Those of one type share an exchange.
    """
    found: dict[str, Tensor] = {}
    mask = torch.empty(0)
    for dtype in dict.fromkeys(x.dtype for x in tokens.values()):
        group = {name: x for name, x in tokens.items() if x.dtype == dtype}

        def held(buffer: Buffer, group: Mapping[str, Tensor] = group) -> Tensor:
            kept = {
                "k": buffer.k,
                "v": buffer.v,
                **{f"rate {n}": x for n, x in buffer.rates.items()},
            }
            return _beside([kept[name] for name in group]).to(next(iter(group.values())).dtype)

        before = None if given is None else (held(given), given.mask)
        own = None if rest is None else held(rest)
        every, mask = segment.ends(_beside(list(group.values())), n, before, own)
        sizes = [math.prod(x.shape[3:]) for x in group.values()]
        for (name, x), piece in zip(group.items(), every.split(sizes, -1), strict=True):
            found[name] = piece.reshape(*piece.shape[:3], *x.shape[3:])
    return found, mask


def _beside(tensors: Sequence[Tensor]) -> Tensor:
    """Numbers per token and head ``[B, T, H, ...]`` beside each other, ``[B, T, H, n]``."""
    return torch.cat([x.flatten(3) if x.dim() > 3 else x[..., None] for x in tensors], -1)


def _shaped(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *(1,) * (x.dim() - 2))
