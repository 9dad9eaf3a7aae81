"""Unused results are not differentiated, such as the memory after the last training token.

The oracle is the reference, which is autograd per token: gradients of the outputs, of the memory
and of both, and second gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.choices.algorithm import muon

RULES: dict[str, Any] = {
    "border": rc.algorithm.Muon(
        batch_size=4, update_every="batch", normalized_steps=True, ns_steps=2
    ),
    "tokens": rc.algorithm.Muon(batch_size=4, ns_steps=1),
    "table": rc.algorithm.Momentum(batch_size=4, normalized_steps=True),
}


def recipe_of(kind: str) -> rc.Recipe:
    return rc.Recipe(
        memory=rc.memory.GatedMLP(expansion=1),
        context=rc.context.Window(size=2),
        retention=rc.retention.Decay(),
        algorithm=RULES[kind],
    )


def slopes(recipe: rc.Recipe, x: Any, targets: str, method: str) -> dict[str, Tensor]:
    """Return gradients of outputs, memory or both, and of the squared norm of those gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.tensors().items()}
    size = {"chunk_size": 4} if method == "deep" else {}
    y, state = generate.run_recall(recipe, x.replace_tensors(leaves), engine=method, **size)
    total = torch.zeros((), dtype=y.dtype)
    if targets != "memory":
        total = total + (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    if targets != "outputs":
        total = total + sum(w.square().sum() for w in state.weights)
    first = torch.autograd.grad(total, list(leaves.values()), create_graph=True, allow_unused=True)
    size = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
    second = torch.autograd.grad(size, list(leaves.values()), allow_unused=True)
    result = {}
    for order, grads in (("first", first), ("second", second)):
        for name, g in zip(leaves, grads, strict=True):
            result[f"{order} {name}"] = torch.zeros_like(leaves[name]) if g is None else g.detach()
    return result


@pytest.mark.parametrize("T", [8, pytest.param(12, marks=pytest.mark.slow), 11])
@pytest.mark.parametrize("targets", ["outputs", "memory", "both"])
@pytest.mark.parametrize("kind", RULES)
def test_gradients_of_used_results(kind: str, targets: str, T: int) -> None:
    recipe = recipe_of(kind)
    x = generate.inputs(recipe, B=1, T=T, H=1)
    wrong, name = generate.largest_error(
        slopes(recipe, x, targets, "deep"), slopes(recipe, x, targets, "reference")
    )
    assert wrong < 1e-8, f"{name}: {wrong:.1e}"


def test_last_step_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step at the end of the last inner batch is needed only by the caller."""
    recipe = recipe_of("border")
    x = generate.inputs(recipe, B=1, T=12, H=1)
    calls: list[int] = []

    def counted(S: Tensor, steps: int) -> Tensor:
        calls.append(steps)
        return original(S, steps)

    original = muon.newton_schulz
    monkeypatch.setattr(muon, "newton_schulz", counted)
    leaves = {name: t.detach().requires_grad_() for name, t in x.tensors().items()}
    y, state = generate.run_recall(recipe, x.replace_tensors(leaves), engine="deep", chunk_size=4)
    maps = len(state.weights)
    assert len(calls) == 3 * maps
    torch.autograd.grad(y.sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
    assert len(calls) == (3 + 2) * maps
    torch.autograd.grad(state.weights[0].sum(), list(leaves.values()), allow_unused=True)
    assert len(calls) == (3 + 2 + 3) * maps
