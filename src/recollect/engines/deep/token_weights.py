"""Explicit weights of every token of an inner batch, computed token by token.

Gradients are factors from one batched pass. The algorithm's update, the retention's advance and the
link use the functions of these choices, as in the reference. The link acts on all tokens in one
call.
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
    """Inputs of the tokens of a segment.

    Attributes:
        factors: gradient factors of every map.
        writes: factors of the part that is independent of the prediction.
        gamma: window weights ``[P, n, c]``. Entry m of row t weights association t − m.
        c: associations in a window.
        numbers: lr, momentum and log_decay per token by name, one factor per map.
        gates: gates of the link per token.
        count: position of each token in its document, ``[B, n]``.
        shape: (B, H).
        search: line search of the step length, or ``None``.
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
    """A and slots ``[P, out, in]`` after the last token, and the weights that tokens read."""

    A: Weights
    slots: dict[str, Weights]
    readable: Weights  # [P n, out, in]


def advance(
    work: TokenStep, W: Sequence[Tensor], A: Sequence[Tensor], slots: Mapping[str, Weights]
) -> Built:
    """Run all tokens from A, the slots and the read weights W at the start."""
    if work.search is not None:
        return _searched(work, work.search, W, A, slots)
    final_A: list[Tensor] = []
    next_slots: dict[str, Weights] = {name: [] for name in slots}
    readable: Weights = []
    for i, a in enumerate(A):
        old = {name: _rows(slot[i], work) for name, slot in slots.items()}
        end, old, read_weights = _map(work, i, _rows(W[i], work), _rows(a, work), old)
        final_A.append(end.flatten(0, 1))
        readable.append(read_weights)
        for name, value in old.items():
            next_slots[name].append(value.flatten(0, 1))
    return Built(A=final_A, slots=next_slots, readable=readable)


def _rows(w: Tensor, work: TokenStep) -> Tensor:
    return w.unflatten(0, work.shape)


def _gradient(work: TokenStep, one: Factors, t: int) -> Tensor:
    """Sum the rank-one terms of token t's window: the gradient of one map."""  # [B, H, out, in]
    window = slice(t, t + work.c)
    h, delta = one.h, one.delta
    times = h.shape[1] // (len(work.numbers) + work.c - 1)
    weight = work.gamma[:, t].flip(-1).unsqueeze(-1)  # [P, c, 1]
    total: Tensor | None = None
    each = h.shape[1] // times
    for start in range(0, h.shape[1], each):
        rows = slice(start + window.start, start + window.stop)
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
    read_weights: list[Tensor] = []
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
        read_weights.append(W if recipe.links_at_batch_end else A)
    return A, slots, _readable(work, read_weights)


def _directed(
    work: TokenStep, i: int, W: Tensor, A: Tensor, slots: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Run one map whose steps are functions of the accumulated gradients, for all tokens."""
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
    """Run all maps with a line search along their directions."""
    sums: Weights = []
    directions: Weights = []
    for i, a in enumerate(A):
        rates = _rates(work, i, _rows(a, work))
        S, token_slots = _accumulated(work, i, _rows(slots["momentum"][i], work), rates)
        sums.append(S.flatten(0, 1))
        directions.append(work.recipe.algorithm.batch_direction(token_slots))
    length = search.step_length([d.flatten(0, 1) for d in directions]).unflatten(0, work.shape)
    final_A: Weights = []
    readable: Weights = []
    for i, (a, D) in enumerate(zip(A, directions, strict=True)):
        rates = torch.stack(_rates(work, i, _rows(a, work)), dim=2)
        steps = rates * length[..., None, None] * D
        end, read_weights = _taken(work, i, _rows(W[i], work), _rows(a, work), steps)
        final_A.append(end.flatten(0, 1))
        readable.append(read_weights)
    return Built(A=final_A, slots={"momentum": sums}, readable=readable)


def _rates(work: TokenStep, i: int, A: Tensor) -> list[Tensor]:
    one = torch.ones_like(A[..., :1, :1])
    return [_rows(n["lr"][i], work) if "lr" in n else one for n in work.numbers]


def _accumulated(
    work: TokenStep, i: int, S: Tensor, rates: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return S after the last token, and the slots ``[B, H, n, out, in]`` after every token."""
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
    """Return A after all steps, and the weights that every token reads."""
    read_weights: list[Tensor] = []
    for t, (numbers, step) in enumerate(zip(work.numbers, steps.unbind(2), strict=True)):
        log_decay = _rows(numbers["log_decay"][i], work) if "log_decay" in numbers else None
        A, W = _settled(work, t, A, W, step, log_decay)
        read_weights.append(W if work.recipe.links_at_batch_end else A)
    return A, _readable(work, read_weights)


def _settled(
    work: TokenStep, t: int, A: Tensor, W: Tensor, step: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return A after a token, and W for links at the batch boundary."""
    if work.recipe.links_at_batch_end:
        W = step + (W if log_decay is None else log_decay.exp() * W)
    return work.recipe.retention.advance(A, step, log_decay, work.gates[t]), W


def _readable(work: TokenStep, read_weights: Sequence[Tensor]) -> Tensor:
    """Stack the weights that every token reads, after the link."""  # [P n, out, in]
    recipe, retention = work.recipe, work.recipe.retention
    stacked = torch.stack(list(read_weights), dim=2)  # [B, H, n, out, in]
    if retention.has_link and not recipe.links_at_batch_end:
        names = work.gates[0]
        gates = {name: torch.stack([g[name] for g in work.gates], dim=2) for name in names}
        stacked = retention.link(stacked, gates)
    return stacked.flatten(0, 2)
