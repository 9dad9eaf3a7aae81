"""Lowering: rewrites of a call into a simpler problem for the engines, undone on the results.

* Several associations per token become several tokens: decay on the first sub-step only, the read
  after the last.
* A normaliser becomes one more value channel of ones; its floor becomes a running maximum m of the
  log gates, by which rates are rescaled so that nothing overflows. The result does not depend on m,
  so no gradient flows through it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.state.state import State

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A problem any engine can run, and the way back.

    Attributes:
        scale: running maximum m_t of a stabilised memory, ``[B, T, H]``.
    """

    original: Problem
    problem: Problem
    scale: Tensor | None

    def finish(self, y: Tensor) -> Tensor:
        """Outputs of the original problem from those of the lowered one."""
        n = self.original.sized.associations
        return self.divide(y[:, n - 1 :: n] if n > 1 else y)

    def divide(self, y: Tensor, *, after_all: bool = False) -> Tensor:
        """Divide by the memory of ones; ``after_all`` reads at the state's own scale."""
        if not self.original.sized.normalised:
            return y
        top, below = y[..., :-1], y[..., -1:]
        if self.original.sized.stabilised:
            scale = self.original.state.log_scale if after_all else self.scale
            assert scale is not None
            if after_all:
                scale = scale[:, None]
            elif self.original.recipe.memory.read.when == "before":
                # What is read still stands at the previous token's scale.
                start = self.original.state.log_scale
                assert start is not None
                scale = torch.cat([start[:, None], scale], dim=1)[:, :-1]
            return top / torch.maximum(below.abs(), (-scale).exp()[..., None, None].to(y.dtype))
        zero = below == 0
        return torch.where(zero, 0.0, top / torch.where(zero, 1.0, below))

    def finish_state(self, after: State) -> State:
        """The state of the original problem."""
        n = self.original.sized.associations
        if n > 1:
            seen = after.seen
            after = dataclasses.replace(after, position=after.position // n)
            after = after.stating(None if seen is None else seen // n)
        if self.original.sized.normalised:
            (joined,) = after.weights
            after = dataclasses.replace(
                after, weights=(joined[..., :-1, :],), ones=joined[..., -1:, :]
            )
        if self.scale is not None:
            old = self.original.state.log_scale
            assert old is not None
            path = torch.cat([old[:, None], self.scale], dim=1)  # [B, T + 1, H]
            last = (after.position - self.original.state.position).view(-1, 1, 1)
            log_scale = path.gather(1, last.expand(-1, 1, path.shape[2])).squeeze(1)
            after = dataclasses.replace(after, log_scale=log_scale)
        return after


def lower(problem: Problem, *, reading: bool = False) -> Lowered:
    """Rewrite associations per token and normalisers away; ``reading`` writes no token.

    Most recipes have neither (`SizedRecipe.plain`) and need no lowering.
    """
    lowered, scale, sized = problem, None, problem.sized
    if sized.associations > 1 and not reading:
        lowered = _one_association(lowered)
    if sized.stabilised and not reading:
        lowered, scale = _stabilise(lowered)
    if sized.normalised:
        lowered = _with_ones(lowered)
    return Lowered(original=problem, problem=lowered, scale=scale)


def _one_association(problem: Problem) -> Problem:
    n = problem.sized.associations
    # Only gates come with an axis n; constants and params are the same for every association.
    gates = problem.recipe.gates()
    travels = {gate.name for gate in gates if problem.recipe.per_association(gate)}
    travels |= {"lr"} & {name.removeprefix("log_") for name in travels}

    def flat(x: Tensor) -> Tensor:  # [B, T, H, n, ...] -> [B, T n, H, ...]
        return x.movedim(3, 2).flatten(1, 2)

    def first(x: Tensor) -> Tensor:  # the first sub-step's; 0 = log 1 for the others
        rest = torch.zeros_like(x).unsqueeze(2).expand(-1, -1, n - 1, *x.shape[2:])
        return torch.cat([x.unsqueeze(2), rest], dim=2).flatten(1, 2)

    def every(x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, n, *x.shape[2:]).flatten(1, 2)

    rates: dict[str, Tensor] = {}
    for name, x in problem.rates.items():
        if name.startswith("log_decay"):
            rates[name] = first(x)
        else:
            rates[name] = flat(x) if name in travels else every(x)
    idle = torch.zeros_like(problem.q).unsqueeze(2).expand(-1, -1, n - 1, *problem.q.shape[2:])
    seen = problem.state.seen
    state = dataclasses.replace(problem.state, position=problem.state.position * n)
    return dataclasses.replace(
        problem,
        q=torch.cat([idle, problem.q.unsqueeze(2)], dim=2).flatten(1, 2),
        k=flat(problem.k),
        v=flat(problem.v),
        rates=rates,
        lengths=None if problem.lengths is None else problem.lengths * n,
        borders=None if problem.borders is None else problem.borders * n,
        state=state.stating(None if seen is None else seen * n),
        steps_per_token=n,
    )


def _stabilise(problem: Problem) -> tuple[Problem, Tensor]:
    """m_t = max(log α_t + m_{t−1}, log η_t); rates rescaled to A exp(−m)."""
    rates = dict(problem.rates)
    if "log_lr" in rates:
        log_lr = rates["log_lr"]
    else:
        # log 0 = -inf, without its infinite slope.
        positive = rates["lr"] > 0
        log_lr = torch.where(positive, torch.where(positive, rates["lr"], 1.0).log(), -torch.inf)
    log_decay = rates.get("log_decay", torch.zeros_like(log_lr))
    before = problem.state.log_scale
    assert before is not None
    with torch.no_grad():
        # In float64: cumulated decays reach −1e5 and beyond, and their differences matter.
        total = log_decay.double().clamp_min(-1e6).cumsum(1)
        peak = torch.cummax(log_lr.double() - total, dim=1).values if total.shape[1] else total
        scale = total + torch.maximum(peak, before[:, None].double())
        shifted = torch.cat([before[:, None].double(), scale[:, :-1]], dim=1)
        shifted = shifted[:, : scale.shape[1]]
    rates["lr"] = (log_lr - scale).exp().to(log_lr.dtype)
    rates["log_decay"] = (log_decay + (shifted - scale)).to(log_decay.dtype)
    rates.pop("log_lr", None)
    return dataclasses.replace(problem, rates=rates), scale.to(log_lr.dtype)


def _with_ones(problem: Problem) -> Problem:
    state = problem.state
    assert state.ones is not None
    return dataclasses.replace(
        problem,
        v=torch.cat([problem.v, torch.ones_like(problem.v[..., :1])], dim=-1),
        state=dataclasses.replace(
            state, weights=(torch.cat([state.weights[0], state.ones], dim=-2),)
        ),
    )
