"""What nobody reads is not differentiated: the memory after the last token, in a training step.

Held to the reference, which is autograd token by token: gradients of the outputs alone, of the
memory alone and of both, and gradients of those.
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


def recipe_of(way: str) -> rc.Recipe:
    return rc.Recipe(
        memory=rc.memory.GatedMLP(expansion=1),
        context=rc.context.Window(size=2),
        retention=rc.retention.Decay(),
        algorithm=RULES[way],
    )


def slopes(recipe: rc.Recipe, x: Any, of: str, method: str) -> dict[str, Tensor]:
    """Gradients of outputs, memory or both, and of the squared length of those gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.tensors().items()}
    y, state = generate.run_recall(
        recipe, x.replace_tensors(leaves), engine=method, **sizes(method)
    )
    total = torch.zeros((), dtype=y.dtype)
    if of != "memory":
        total = total + (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    if of != "outputs":
        total = total + sum(w.square().sum() for w in state.weights)
    first = torch.autograd.grad(total, list(leaves.values()), create_graph=True, allow_unused=True)
    size = sum(g.square().sum() for g in first if g is not None and g.requires_grad)
    second = torch.autograd.grad(size, list(leaves.values()), allow_unused=True)
    result = {}
    for order, grads in (("first", first), ("second", second)):
        for name, g in zip(leaves, grads, strict=True):
            result[f"{order} {name}"] = torch.zeros_like(leaves[name]) if g is None else g.detach()
    return result


def sizes(method: str) -> dict[str, int]:
    return {"chunk_size": 4} if method == "deep" else {}


@pytest.mark.parametrize("T", [8, pytest.param(12, marks=pytest.mark.slow), 11])
@pytest.mark.parametrize("of", ["outputs", "memory", "both"])
@pytest.mark.parametrize("way", RULES)
def test_gradients_of_what_is_read(way: str, of: str, T: int) -> None:
    recipe = recipe_of(way)
    x = generate.inputs(recipe, B=1, T=T, H=1)
    wrong, name = generate.largest_error(
        slopes(recipe, x, of, "deep"), slopes(recipe, x, of, "reference")
    )
    assert wrong < 1e-8, f"{name}: {wrong:.1e}"


def test_the_last_step_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step at the border of the last inner batch is for the caller: no backward pass makes it."""
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
