"""The way back of the fused walk on a simulated cluster: gradients against the definition's.

The oracle differentiates the token-by-token definition in float64. What is multiplied in bfloat16
is off by 2⁻⁹ per product, and a gradient adds such products up over the sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.simulator.run import simulated, unnoticed
from tests.gpu.test_fused_walk import drawn, far, plain, titans
from torch import Tensor

import recollect as rc

NEAR = 2e-2
PLACES = (
    "begin",
    "asked",
    "weighed",
    "turned",
    "summed",
    "prediction",
    "gathered",
    "moved",
    "end",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulator")


def gradients(
    recipe: rc.Recipe, x: dict[str, Any], method: str, dtype: torch.dtype, **more: Any
) -> dict[str, Tensor]:
    """Of a sum of outputs, final weights and momentum with fixed weights, by input."""
    names = ["q", "k", "v", *x["gates"], "A1", "A2"]
    tensors = [x["q"], x["k"], x["v"], *x["gates"].values(), *x["initial_memory"]]
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    gates = dict(zip(x["gates"], leaves[3:], strict=False))
    y, state = rc.recall(
        recipe, *leaves[:3], gates, initial_memory=leaves[-2:], engine=method, **more
    )
    assert state is not None
    parts = [y, *state.weights, *state.algorithm_state.get("momentum", ())]
    waves = (torch.arange(p.numel(), dtype=dtype, device=p.device).sin().view_as(p) for p in parts)
    loss = torch.stack([(p * wave).sum() for p, wave in zip(parts, waves, strict=True)]).sum()
    return dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


CASES = {
    "titans, a batch open": (titans(), 40, 64),
}
SLOW = {
    "silu": (plain("silu"), 40, 64),
    "relu, no residual": (plain("relu", residual=False), 40, 64),
    "gelu by tanh": (plain("gelu_tanh"), 40, 64),
    "momentum, no shares": (
        rc.Recipe(
            memory=rc.memory.MLP(expansion=3), algorithm=rc.algorithm.Momentum(batch_size=16)
        ),
        40,
        64,
    ),
    "shares, no momentum": (
        rc.Recipe(
            memory=rc.memory.MLP(expansion=1),
            retention=rc.retention.Decay(),
            algorithm=rc.algorithm.GradientDescent(batch_size=16, normalized_steps=True),
        ),
        40,
        64,
    ),
    "inner product": (
        rc.Recipe(
            memory=rc.memory.MLP(expansion=2),
            bias=rc.bias.DotProduct(),
            algorithm=rc.algorithm.Momentum(batch_size=16),
        ),
        40,
        64,
    ),
    "32 tokens": (titans(b=32), 72, 64),
    "64 tokens": (titans(b=64), 150, 64),
    "64 tokens, silu": (plain("silu", b=64), 150, 64),
    "64 tokens, momentum, no shares": (
        rc.Recipe(
            memory=rc.memory.MLP(activation="gelu_tanh", expansion=3, residual=False),
            algorithm=rc.algorithm.Momentum(batch_size=64),
        ),
        150,
        64,
    ),
    "64 tokens, its own width": (titans(b=64, expansion=1), 150, 64),
    "128 channels": (titans(expansion=2), 40, 128),
    "128 channels, 32 tokens": (plain("silu", b=32), 72, 128),
    "128 channels, 64 tokens": (plain("silu", b=64), 150, 128),
    "128 channels, 64 tokens, titans": (titans(b=64, expansion=2), 150, 128),
    "16 blocks": (titans(), 40, 128),
    "12 blocks, 32 tokens": (titans(b=32, expansion=3), 70, 128),
    # Of 150 tokens the gradient of decays is a small difference of large sums: 2e-2 of its length.
    "16 blocks, 64 tokens": (titans(b=64), 151, 128),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_gradients_are_the_definitions(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, T, D = (CASES | SLOW)[case]
    x = drawn(recipe, T, D=D)
    said = gradients(recipe, x, "reference", torch.float64)
    with simulated(monkeypatch, folder, seed=1) as ran:
        found = gradients(recipe, x, "fused", torch.float32)
    assert ran == ["trace", "back"]
    errors = {name: far(found[name], g) for name, g in said.items()}
    assert all(error < NEAR for error in errors.values()), errors


@pytest.mark.slow
def test_groups_hand_their_gradients_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk per group, from whose borders the way back walks each again; rows end early."""
    recipe = titans()
    x = drawn(recipe, 88, B=2)
    mask = (torch.arange(88) < torch.tensor([88, 43])[:, None]).long()
    said = gradients(recipe, x, "reference", torch.float64, attention_mask=mask)
    with simulated(monkeypatch, folder, seed=1) as ran:
        found = gradients(recipe, x, "fused", torch.float32, attention_mask=mask, chunk_size=32)
    assert ran == ["walk"] * 3 + ["trace", "back"] * 3
    errors = {name: far(found[name], g) for name, g in said.items()}
    assert all(error < NEAR for error in errors.values()), errors


def missed(T: int, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> set[str]:
    """Barriers of the way back that can be left out without changing a digit."""
    recipe = titans()
    x = drawn(recipe, T)

    def digits() -> list[Tensor]:
        return [*gradients(recipe, x, "fused", torch.float32).values()]

    only = {"after": after, "kernels": ("back",)}
    return unnoticed(digits, dict(enumerate(PLACES)), folder, monkeypatch, **only)


@pytest.mark.slow
def test_every_barrier_of_the_way_back_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missed(32, folder, monkeypatch, after=0) == set()
    assert missed(96, folder, monkeypatch, after=2) == {"end"}
