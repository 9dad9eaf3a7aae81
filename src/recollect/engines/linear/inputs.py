"""What the linear engine reads of a problem: lifted keys and queries, and numbers by token."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, state_dtype

__all__ = ["Numbers", "numbers_of"]


@dataclasses.dataclass(kw_only=True)
class Numbers:
    """What the numeric core takes, ready to be split into channels."""

    q: Tensor  # [B, T, H, G, F]
    k: Tensor  # [B, T, H, F]
    v: Tensor  # [B, T, H, V]
    lr: Tensor | None  # [B, T, H] or [B, T, H, V]; None is 1
    log_decay: Tensor | None = None  # [B, T, H], [.., F]; per entry [.., V, F], factored [.., V]
    log_decay_value: Tensor | None = None
    decay_scale: Tensor | None = None  # [H, V, F], the other factor of a decay per entry
    momentum: Tensor | None = None
    window: Tensor | None = None
    k_past: Tensor | None = None
    v_past: Tensor | None = None
    past_mask: Tensor | None = None
    probe: Tensor | None = None
    erase: Tensor | None = None
    A0: Tensor
    S0: Tensor | None = None


def numbers_of(problem: Problem) -> Numbers:
    """Lifted keys and queries, rates, decays and states of a problem, in the working dtype."""
    recipe, rates = problem.recipe, problem.rates
    affine, decay = recipe.bias.affine, recipe.retention.decay
    assert affine is not None
    dtype = state_dtype(problem.q, problem.k, problem.v)
    position = problem.positions()
    phi_q = problem.phi(problem.q, "query", position)
    phi_k = problem.phi(problem.k.unsqueeze(3), "key", position).squeeze(3)
    lr = rates.get("lr", phi_k.new_ones(()).expand(phi_k.shape[:3]))
    if recipe.algorithm.keyed:
        lr = recipe.algorithm.rate(rates["lr"], phi_k.square().sum(-1), affine[0])
    if recipe.context.horizon == 1 and "window" in rates:
        # One association weighed by γ is a step of η γ.
        lr = lr * (rates["window"] if lr.dim() == 4 else rates["window"][..., 0])
    slots = problem.state.slots
    found = Numbers(
        q=phi_q,
        k=phi_k,
        v=problem.v.to(dtype),
        lr=lr,
        momentum=rates.get("momentum"),
        A0=problem.state.weights[0],
        S0=slots["momentum"][0] if slots else None,
    )
    if decay is not None:
        if decay.per == "value" and rates["log_decay"].dim() == 4:
            found.log_decay_value = rates["log_decay"]
        else:
            found.log_decay = rates["log_decay"]
        if decay.per == "key_value":
            found.log_decay_value = rates["log_decay_value"]
        if decay.factored and decay.per == "entry":
            found.decay_scale = problem.params["decay_scale"].to(dtype)
    if recipe.bias.probe is not None:
        _add_probe(problem, found, position)
    horizon = recipe.context.horizon
    if horizon is not None and horizon > 1:
        _add_window(problem, found, horizon)
    return found


def _add_probe(problem: Problem, found: Numbers, position: Tensor) -> None:
    probe, rates = problem.recipe.bias.probe, problem.rates
    assert probe is not None
    w = found.k
    if probe.at == "token":
        w = problem.phi(rates["probe"].unsqueeze(3), "key", position).squeeze(3)
    rate = rates["erase"] if rates["erase"].dim() == 4 else rates["erase"].unsqueeze(-1)
    found.probe = w
    found.erase = rate * (w if probe.write == "probe" else found.k)


def _add_window(problem: Problem, found: Numbers, horizon: int) -> None:
    shape = (*found.k.shape[:3], horizon)
    found.window = problem.rates.get("window", found.k.new_ones(()).expand(shape))
    buffer = problem.state.buffer
    if buffer is None:
        return
    steps = torch.arange(buffer.k.shape[1], device=found.k.device) - buffer.k.shape[1]
    position = (problem.state.position[:, None] + steps).clamp_min(0)
    found.k_past = problem.phi(buffer.k.unsqueeze(3), "key", position).squeeze(3)
    found.v_past = buffer.v.to(found.v.dtype)
    found.past_mask = buffer.mask
