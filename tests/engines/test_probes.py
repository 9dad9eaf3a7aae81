"""Probes on the linear engine, with one system per chunk, against the reference."""

from __future__ import annotations

import pytest
import torch

import recollect as rc

Probe, Decay, GD = rc.bias.Probe, rc.retention.Decay, rc.algorithm.GradientDescent
B, T, H, K, V = 2, 67, 2, 5, 4


def recipe(
    probe: rc.bias.Probe, decay: str = "key", *, order: str = "before", bonus: float = 0.0
) -> rc.Recipe:
    return rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(bonus=bonus)),
        bias=rc.bias.L2(probe=probe),
        retention=Decay(per=decay, when=order),
        algorithm=GD(per="value"),
    )


def with_momentum(probe: rc.bias.Probe, on: str = "gradient", **options: str) -> rc.Recipe:
    algorithm = rc.algorithm.Momentum(momentum_on=on, outer_lr="input", **options)
    return rc.Recipe(bias=rc.bias.L2(probe=probe), retention=Decay(), algorithm=algorithm)


MOMENTUM = {
    "momentum": with_momentum(Probe()),
    "momentum of the value": with_momentum(Probe(), "value"),
    "momentum along the probe": with_momentum(Probe(write="probe")),
    "momentum of the value, along the probe": with_momentum(Probe(write="probe"), "value"),
    "momentum, a rate per key channel": with_momentum(Probe(at="key", per="key")),
    "momentum, a rate per value channel": with_momentum(Probe(), per="value"),
    "momentum, a decay per key channel": with_momentum(Probe()).replace(
        retention=Decay(per="key", when="before")
    ),
}
RECIPES = MOMENTUM | {
    "at the token": recipe(Probe()),
    "at the key": recipe(Probe(at="key"), "head", order="after"),
    "without a rate": recipe(Probe(rate=1.0)),
    "with a bonus": recipe(Probe(), "head", bonus=0.5),
    "a rate per key channel": recipe(Probe(per="key")),
    "along the probe": recipe(Probe(write="probe")),
    "a decay per value channel": recipe(Probe(), "value"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_probes_with_rates_and_momentum(name: str) -> None:
    one = RECIPES[name]
    g = torch.Generator().manual_seed(0)
    sizes = one.axes(K, V)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    q, k, v = (draw(B, T, H, size) - 0.5 for size in (K, K, V))
    gates = {gate.name: draw(B, T, H, *(sizes[axis] for axis in gate.axes)) for gate in one.gates()}
    gates["log_decay"] = -0.2 * gates["log_decay"]
    if "momentum" in gates:
        gates["momentum"] = 0.9 * gates["momentum"]
    inputs = [x.requires_grad_() for x in (q, k, v, *gates.values())]
    results = []
    for engine in ("linear", "reference"):
        y, state = rc.recall(one, q, k, v, gates, engine=engine)
        loss = y.square().sum() + state.weights[0].square().sum()
        results.append((y, state.weights[0], *torch.autograd.grad(loss, inputs)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-10, rtol=1e-10)


def test_the_rate_of_a_write_needs_no_system_per_value_channel() -> None:
    """Needed only if the rate also scales the erasure, or if the decay is per value channel."""
    for name, one in RECIPES.items():
        several = name == "a decay per value channel"
        assert ("per value channel" in rc.explain(one).engine_mode) == several
    rate = rc.Recipe(algorithm=GD(per="value"))
    assert "per value channel" in rc.explain(rate).engine_mode
