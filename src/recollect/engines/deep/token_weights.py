"""Explicit weights of every token of an inner batch, computed token by token.

Gradients still come as factors from one batched pass; what cannot be a coefficient is done with the
members' own functions, as the reference does it: the algorithm's update, the retention's advance,
and the link, which acts on all tokens at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Step
from recollect.engines.deep.gradient_factors import Factors
from recollect.engines.deep.line_search import LineSearch
from recollect.recipe.recipe import Recipe

__all__ = ["Built", "TokenStep", "advance"]

Weights = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """What the tokens of a segment bring.

    Attributes:
        factors: of every map; ``writes``: of the part that no prediction enters.
        gamma: ``[P, n, c]``, entry m of row t for association t − m.
        search: how far steps go whose length is searched.
        numbers: per token, by name (lr, momentum, log_decay), one factor per map.
        gates: per token, what a link may use.
        count: number of each token in its document, ``[B, n]``.
        shape: (B, H).
    """

    recipe: Recipe
    factors: Sequence[Factors]
    writes: Sequence[Factors] | None
    gamma: Tensor
    c: int
    numbers: Sequence[Mapping[str, Sequence[Tensor]]]
    gates: Sequence[Mapping[str, Tensor]]
    count: Tensor
    shape: tuple[int, int]
    search: LineSearch | None = None


@dataclass(frozen=True, kw_only=True)
class Built:
    """A and slots ``[P, out, in]`` after the last token, and what every token reads."""

    A: Weights
    slots: dict[str, Weights]
    readable: Weights  # [P n, out, in]


def advance(
    work: TokenStep, W: Sequence[Tensor], A: Sequence[Tensor], slots: Mapping[str, Weights]
) -> Built:
    """Move A and the slots through the tokens; ``W`` is what stood at the start to be read."""
    if work.search is not None:
        return _searched(work, work.search, W, A, slots)
    after: list[Tensor] = []
    moved: dict[str, Weights] = {name: [] for name in slots}
    readable: Weights = []
    for i, a in enumerate(A):
        old = {name: _rows(slot[i], work) for name, slot in slots.items()}
        end, old, seen = _map(work, i, _rows(W[i], work), _rows(a, work), old)
        after.append(end.flatten(0, 1))
        readable.append(seen)
        for name, value in old.items():
            moved[name].append(value.flatten(0, 1))
    return Built(A=after, slots=moved, readable=readable)


def _rows(w: Tensor, work: TokenStep) -> Tensor:
    return w.unflatten(0, work.shape)


def _gradient(work: TokenStep, one: Factors, t: int) -> Tensor:
    """g_t ``[B, H, out, in]`` of one map: its window's rank-one terms."""
    here = slice(t, t + work.c)
    h, delta = one.h, one.delta
    times = h.shape[1] // (len(work.numbers) + work.c - 1)
    weight = work.gamma[:, t].flip(-1).unsqueeze(-1)  # [P, c, 1]
    total: Tensor | None = None
    each = h.shape[1] // times
    for start in range(0, h.shape[1], each):
        rows = slice(start + here.start, start + here.stop)
        term = torch.bmm((delta[:, rows] * weight).mT, h[:, rows])
        total = term if total is None else total + term
    assert total is not None
    return _rows(total, work)


def _map(
    work: TokenStep, i: int, W: Tensor, A: Tensor, slots: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    recipe = work.recipe
    algorithm = recipe.algorithm
    if algorithm.curvature and algorithm.accumulator is not None:
        return _directed(work, i, W, A, slots)
    seen: list[Tensor] = []
    one = torch.ones_like(A[..., :1, :1])
    for t, numbers in enumerate(work.numbers):
        lr = _rows(numbers["lr"][i], work) if "lr" in numbers else one
        theta = _rows(numbers["momentum"][i], work) if "momentum" in numbers else 0 * one
        log_decay = _rows(numbers["log_decay"][i], work) if "log_decay" in numbers else None
        slots, step = algorithm.update(
            slots,
            Step(
                gradient=_gradient(work, work.factors[i], t),
                write=None if work.writes is None else _gradient(work, work.writes[i], t),
                lr=lr,
                momentum=theta,
                count=work.count[:, t].view(-1, 1, 1, 1).to(A.dtype),
            ),
        )
        A, W = _settled(work, t, A, W, step, log_decay)
        seen.append(W if recipe.links_at_batch_end else A)
    return A, slots, _readable(work, seen)


def _directed(
    work: TokenStep, i: int, W: Tensor, A: Tensor, slots: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The same where a step is a function of what was accumulated: of all tokens at once."""
    rates = _rates(work, i, A)
    S, sums = _accumulated(work, i, slots["momentum"], rates)
    steps = work.recipe.algorithm.batch_step(sums, torch.stack(rates, dim=2))
    A, readable = _taken(work, i, W, A, steps)
    return A, {"momentum": S}, readable


def _searched(
    work: TokenStep,
    search: LineSearch,
    W: Sequence[Tensor],
    A: Sequence[Tensor],
    slots: Mapping[str, Weights],
) -> Built:
    """Where the length of a step is searched along the directions of all maps."""
    sums: Weights = []
    directions: Weights = []
    for i, a in enumerate(A):
        rates = _rates(work, i, _rows(a, work))
        S, made_of = _accumulated(work, i, _rows(slots["momentum"][i], work), rates)
        sums.append(S.flatten(0, 1))
        directions.append(work.recipe.algorithm.batch_direction(made_of))
    far = search.far([d.flatten(0, 1) for d in directions]).unflatten(0, work.shape)
    after: Weights = []
    readable: Weights = []
    for i, (a, D) in enumerate(zip(A, directions, strict=True)):
        rates = torch.stack(_rates(work, i, _rows(a, work)), dim=2)
        steps = rates * far[..., None, None] * D
        end, seen = _taken(work, i, _rows(W[i], work), _rows(a, work), steps)
        after.append(end.flatten(0, 1))
        readable.append(seen)
    return Built(A=after, slots={"momentum": sums}, readable=readable)


def _rates(work: TokenStep, i: int, A: Tensor) -> list[Tensor]:
    one = torch.ones_like(A[..., :1, :1])
    return [_rows(n["lr"][i], work) if "lr" in n else one for n in work.numbers]


def _accumulated(
    work: TokenStep, i: int, S: Tensor, rates: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """S after the last token, and the slots ``[B, H, n, out, in]`` after every token."""
    scales = work.recipe.algorithm.accumulator == "steps"
    sums: list[Tensor] = []
    for t, numbers in enumerate(work.numbers):
        gradient = _gradient(work, work.factors[i], t)
        gradient = rates[t] * gradient if scales else gradient
        S = (
            _rows(numbers["momentum"][i], work) * S - gradient
            if "momentum" in numbers
            else -gradient
        )
        sums.append(S)
    return S, {"momentum": torch.stack(sums, dim=2)}


def _taken(work: TokenStep, i: int, W: Tensor, A: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """A after all steps, and what every token reads."""
    seen: list[Tensor] = []
    for t, (numbers, step) in enumerate(zip(work.numbers, steps.unbind(2), strict=True)):
        log_decay = _rows(numbers["log_decay"][i], work) if "log_decay" in numbers else None
        A, W = _settled(work, t, A, W, step, log_decay)
        seen.append(W if work.recipe.links_at_batch_end else A)
    return A, _readable(work, seen)


def _settled(
    work: TokenStep, t: int, A: Tensor, W: Tensor, step: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A after a token, and W where the link waits for the border."""
    if work.recipe.links_at_batch_end:
        W = step + (W if log_decay is None else log_decay.exp() * W)
    return work.recipe.retention.advance(A, step, log_decay, work.gates[t]), W


def _readable(work: TokenStep, seen: Sequence[Tensor]) -> Tensor:
    """What every token reads, ``[P n, out, in]``."""
    recipe, retention = work.recipe, work.recipe.retention
    stacked = torch.stack(list(seen), dim=2)  # [B, H, n, out, in]
    if retention.has_link and not recipe.links_at_batch_end:
        names = work.gates[0]
        gates = {name: torch.stack([g[name] for g in work.gates], dim=2) for name in names}
        stacked = retention.link(stacked, gates)
    return stacked.flatten(0, 2)
