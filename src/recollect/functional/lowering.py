"""Lowering: rewrites of a call into a simpler problem for the engines, undone on the results.

* Several associations per token become several tokens: decay on the first sub-step only, the read
  after the last.
* A normalizer becomes one more value channel of ones. Its floor becomes a running maximum m of the
  log gates, by which rates are rescaled so that nothing overflows. The result does not depend on m,
  so no gradient flows through it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.numerics import safe_divide, safe_log
from recollect.state.state import State

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A problem that any engine can run, and how to restore its results."""

    original: Problem  # the problem before the rewrites
    problem: Problem  # the problem after them
    scale: Tensor | None  # running maximum m_t of a stabilized memory, [B, T, H]

    def restore_output(self, y: Tensor) -> Tensor:
        """Return the outputs of the original problem from those of the lowered one."""
        n = self.original.bound.associations_per_token
        return self.apply_normalizer(y[:, n - 1 :: n] if n > 1 else y)

    def apply_normalizer(self, y: Tensor, *, final_scale: bool = False) -> Tensor:
        """Divide by the memory of ones, at the running scale or at that of the final state."""
        bound = self.original.bound
        if not bound.has_normalizer:
            return y
        values, ones = y[..., :-1], y[..., -1:]
        if not bound.is_stabilized:
            return safe_divide(values, ones)
        start = self.original.state.log_scale
        assert start is not None
        if final_scale:
            scale = start[:, None]
        else:
            assert self.scale is not None
            scale = self.scale
            if bound.recipe.memory.read.when == "before":
                # The memory is read at the previous token's scale.
                scale = torch.cat([start[:, None], scale], dim=1)[:, :-1]
        return values / torch.maximum(ones.abs(), (-scale).exp()[..., None, None].to(y.dtype))

    def restore_state(self, state: State) -> State:
        """Return the state of the original problem."""
        n = self.original.bound.associations_per_token
        if n > 1:
            position = state.host_position
            state = dataclasses.replace(state, position=state.position // n)
            state = state.with_position(None if position is None else position // n)
        if self.original.bound.has_normalizer:
            (joined,) = state.weights
            state = dataclasses.replace(
                state, weights=(joined[..., :-1, :],), normalizer=joined[..., -1:, :]
            )
        if self.scale is not None:
            start = self.original.state.log_scale
            assert start is not None
            scales = torch.cat([start[:, None], self.scale], dim=1)  # [B, T + 1, H]
            last = (state.position - self.original.state.position).view(-1, 1, 1)
            log_scale = scales.gather(1, last.expand(-1, 1, scales.shape[2])).squeeze(1)
            state = dataclasses.replace(state, log_scale=log_scale)
        return state


def lower(problem: Problem, *, reading: bool = False) -> Lowered:
    """Rewrite several associations per token and normalizers; ``reading`` writes no token.

    Most recipes have neither and need no lowering (`BoundRecipe.needs_lowering`).
    """
    lowered, scale, bound = problem, None, problem.bound
    if bound.associations_per_token > 1 and not reading:
        lowered = _one_association(lowered)
    if bound.is_stabilized and not reading:
        lowered, scale = _stabilize(lowered)
    if bound.has_normalizer:
        lowered = _with_ones(lowered)
    return Lowered(original=problem, problem=lowered, scale=scale)


def _one_association(problem: Problem) -> Problem:
    n = problem.bound.associations_per_token
    # Only gates have an axis n; constants and params are shared by the associations.
    gates = problem.recipe.gates()
    per_association = {gate.name for gate in gates if problem.recipe.per_association(gate)}
    per_association |= {"lr"} if "log_lr" in per_association else set()

    def merge_substeps(x: Tensor) -> Tensor:  # [B, T, H, n, ...] -> [B, T n, H, ...]
        return x.movedim(3, 2).flatten(1, 2)

    def first_substep(x: Tensor) -> Tensor:  # 0 = log 1 for the others
        others = torch.zeros_like(x).unsqueeze(2).expand(-1, -1, n - 1, *x.shape[2:])
        return torch.cat([x.unsqueeze(2), others], dim=2).flatten(1, 2)

    def repeat_substeps(x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, n, *x.shape[2:]).flatten(1, 2)

    rates: dict[str, Tensor] = {}
    for name, x in problem.rates.items():
        if name in problem.recipe.log_decays:
            rates[name] = first_substep(x)
        else:
            rates[name] = merge_substeps(x) if name in per_association else repeat_substeps(x)
    q = problem.q.unsqueeze(2)
    unused_queries = torch.zeros_like(q).expand(-1, -1, n - 1, *problem.q.shape[2:])
    position = problem.state.host_position
    state = dataclasses.replace(problem.state, position=problem.state.position * n)
    return dataclasses.replace(
        problem,
        q=torch.cat([unused_queries, q], dim=2).flatten(1, 2),
        k=merge_substeps(problem.k),
        v=merge_substeps(problem.v),
        rates=rates,
        lengths=None if problem.lengths is None else problem.lengths * n,
        cu_seqlens=None if problem.cu_seqlens is None else problem.cu_seqlens * n,
        state=state.with_position(None if position is None else position * n),
        steps_per_token=n,
    )


def _stabilize(problem: Problem) -> tuple[Problem, Tensor]:
    """m_t = max(log α_t + m_{t−1}, log η_t); rates rescaled to A exp(−m)."""
    rates = dict(problem.rates)
    log_lr = rates.pop("log_lr") if "log_lr" in rates else safe_log(rates["lr"])
    log_decay = rates.get("log_decay", torch.zeros_like(log_lr))
    assert problem.state.log_scale is not None
    start = problem.state.log_scale[:, None].double()
    with torch.no_grad():
        # In float64: cumulated decays reach −1e5 and beyond, and their differences matter.
        total = log_decay.double().clamp_min(-1e6).cumsum(1)
        peak = torch.cummax(log_lr.double() - total, dim=1).values if total.shape[1] else total
        scale = total + torch.maximum(peak, start)
        shifted = torch.cat([start, scale[:, :-1]], dim=1)[:, : scale.shape[1]]
    rates["lr"] = (log_lr - scale).exp().to(log_lr.dtype)
    rates["log_decay"] = (log_decay + (shifted - scale)).to(log_decay.dtype)
    return dataclasses.replace(problem, rates=rates), scale.to(log_lr.dtype)


def _with_ones(problem: Problem) -> Problem:
    state = problem.state
    assert state.normalizer is not None
    weights = torch.cat([state.weights[0], state.normalizer], dim=-2)
    return dataclasses.replace(
        problem,
        v=torch.cat([problem.v, torch.ones_like(problem.v[..., :1])], dim=-1),
        state=dataclasses.replace(state, weights=(weights,)),
    )
