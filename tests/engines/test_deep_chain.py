"""Chains of maps: the written-out pass between boundaries, its gradient, and its activations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.contracts import generate, outside
from tests.engines.test_deep import check, recipes
from torch import Tensor

import recollect as rc
from recollect.engines.deep.chain import backward, forward
from recollect.engines.deep.chain import engine as borders
from recollect.engines.deep.chain.chain import ACTIVATIONS, ChainInputs
from recollect.engines.deep.engine import DeepEngine
from recollect.engines.deep.structure import chain_of

memory, bias, retention = rc.memory, rc.bias, rc.retention
algorithm, context = rc.algorithm, rc.context

EXACT = 1e-10


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_of_activations(name: str) -> None:
    """First and second derivatives equal autograd's to the last digits of float64."""
    activation = ACTIVATIONS[name]
    z = torch.linspace(-6, 6, 241, dtype=torch.float64) + 1e-3  # away from the kink of relu
    z.requires_grad_()
    y = activation.forward(z)
    (slope,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    bend = torch.zeros_like(z)
    if slope.requires_grad:
        (bend,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(
        activation.derivative(z.detach()), slope.detach(), atol=1e-14, rtol=1e-13
    )
    torch.testing.assert_close(
        activation.second_derivative(z.detach()), bend, atol=1e-13, rtol=1e-12
    )
    g = torch.linspace(-1, 2, 241, dtype=torch.float64)
    pulled = g * slope.detach()
    torch.testing.assert_close(activation.vjp(g, z).detach(), pulled, atol=1e-14, rtol=1e-13)


def _chains() -> dict[str, rc.Recipe]:
    """Return chains of every depth, shape, residual, base, error, window, decay and momentum."""
    plain = rc.Recipe(
        memory=memory.MLP(expansion=2),
        retention=retention.Decay(),
        algorithm=algorithm.Momentum(batch_size=3),
    )
    result = {
        "momentum": plain,
        "no decay": plain.replace(retention=retention.Keep()),
        "no momentum": plain.replace(algorithm=algorithm.GradientDescent(batch_size=3)),
        "neither": plain.replace(
            retention=retention.Keep(), algorithm=algorithm.GradientDescent(batch_size=3)
        ),
        "mean": plain.replace(
            retention=retention.Keep(),
            algorithm=algorithm.GradientDescent(batch_size=3, reduction="mean", offset="learned"),
        ),
        "window": plain.replace(context=context.Window(size=3)),
        "dot product": plain.replace(bias=bias.DotProduct()),
        "robust": plain.replace(bias=bias.Huber(form="norm", threshold="learned")),
        "matrix": plain.replace(memory=memory.Matrix()),
        "narrow": plain.replace(memory=memory.MLP(depth=3, expansion=1, residual=False)),
    }
    shares = plain.replace(algorithm=algorithm.Momentum(batch_size=3, normalized_steps=True))
    result |= {
        "shares": shares,
        "shares of a matrix": shares.replace(memory=memory.Matrix()),
        "shares of three maps": shares.replace(memory=memory.MLP(depth=3, expansion=2)),
        "shares, as wide as high": shares.replace(memory=memory.MLP(depth=3, expansion=1)),
        "shares, robust": shares.replace(bias=bias.Huber(form="norm", threshold="learned")),
        "shares, window": shares.replace(context=context.Window(size=3)),
    }
    based = plain.replace(memory=memory.MLP(expansion=2, static_weights=True))
    for name in ("momentum", "no decay", "no momentum", "neither"):
        result[f"a base, {name}"] = result[name].replace(memory=based.memory)
    result |= {
        "a base, as wide as high": based.replace(
            memory=memory.MLP(depth=3, expansion=1, static_weights=True)
        ),
        "a base, window": based.replace(context=context.Window(size=3)),
        "a base, robust": based.replace(bias=bias.Huber(form="norm", threshold="learned")),
        "a base, shares": based.replace(
            algorithm=algorithm.Momentum(batch_size=3, normalized_steps=True)
        ),
        "a base, shares by keys": based.replace(
            algorithm=algorithm.GradientDescent(
                batch_size=3, normalized_steps=True, batch_overlap="measured"
            )
        ),
    }
    normed = {norm: memory.MLP(expansion=2, norm=norm) for norm in ("layer", "rms")}
    normed["depth"] = memory.MLP(depth=3, expansion=1, norm="layer", residual=False)
    normed["matrix"] = memory.MLP(depth=1, norm="layer")
    normed["base"] = memory.MLP(expansion=2, norm="layer", static_weights=True)
    for name, one in normed.items():
        result[f"a norm, {name}"] = plain.replace(memory=one)
        result[f"a norm, {name}, shares"] = shares.replace(memory=one)
    for name in ("robust", "dot product", "window", "neither"):
        result[f"a norm, {name}"] = result[name].replace(memory=normed["layer"])
    for name in ("robust", "window"):
        result[f"a norm, shares, {name}"] = result[f"shares, {name}"].replace(
            memory=normed["layer"]
        )
    for name, one in (("steps", plain), ("shares", shares)):  # a and b differ, and neither is 1
        result[f"a norm, {name}, affine"] = one.replace(
            memory=normed["layer"], bias=outside.Eager()
        )
    erases = plain.replace(algorithm=algorithm.Momentum(batch_size=3, erasure=1.0))
    chains = {
        "an erasure": erases,
        "an erasure of a matrix": erases.replace(memory=memory.Matrix()),
        "an erasure, norm": erases.replace(memory=normed["layer"]),
        "an erasure, robust": erases.replace(
            memory=memory.MLP(depth=3, expansion=1),
            bias=bias.Huber(form="norm", threshold="learned"),
            context=context.Window(size=3),
        ),
        "an erasure, no momentum": plain.replace(
            algorithm=algorithm.GradientDescent(batch_size=3, erasure=0.5)
        ),
    }
    result.update(chains)
    for name in sorted(ACTIVATIONS.keys() - {"gelu", "identity"}):
        result[name] = plain.replace(memory=memory.MLP(depth=3, expansion=2, activation=name))
    return result


@rc.member
class Named(bias.Bias):
    """(c/2) ‖M(k) − v‖² with a gate c whose name is used elsewhere."""

    c: float | str = rc.quantity("input", at_least=0, init=0.5)

    def loss(self, prediction: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * gates["c"].squeeze(-1) * (prediction - value).square().sum(-1)


CHAINS = _chains()
CHAINS["a number called c"] = CHAINS["momentum"].replace(bias=Named())
for name, start, sizes in (
    ("a bias", "momentum", {"expansion": 2}),
    ("a bias, mean", "mean", {"expansion": 2, "norm": "layer"}),
    ("a bias, shares", "shares", {"depth": 3, "expansion": 1}),
    ("a bias, one map", "window", {"depth": 1}),
    ("a bias, a base", "a base, momentum", {"expansion": 2, "static_weights": True}),
    ("a bias, an erasure", "an erasure", {"depth": 3, "expansion": 2, "residual": False}),
):
    CHAINS[name] = CHAINS[start].replace(memory=memory.MLP(**sizes, bias=True))


def _threes(spec: object, group: tuple[int, int], start: object) -> list[tuple[int, int]]:
    """Spans of three batches and of the rest."""
    first, stop = group
    return [(s, min(s + 3, stop)) for s in range(first, stop, 3)]


def _pairs(spec: object, inputs: ChainInputs) -> list[tuple[int, int]]:
    """Groups of two batches and of the rest."""
    N = len(inputs.k)
    return [(s, min(s + 2, N)) for s in range(0, N, 2)]


SCHEDULES = ("batch by batch", "some at once", "all at once", "as on a device", "in groups")


# Every structure is fast for one of the schedules, in turn, and slow for the others.
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(
            name,
            schedule,
            marks=[pytest.mark.slow] * (SCHEDULES[index % len(SCHEDULES)] != schedule),
        )
        for index, name in enumerate(CHAINS)
        for schedule in SCHEDULES
    ],
)
def test_equals_the_reference(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of single, several and all batches, as on a device; rows end at different tokens."""
    monkeypatch.setattr(borders, "MAX_SPAN_BYTES", 0 if schedule == "batch by batch" else 2**30)
    if schedule == "some at once":
        monkeypatch.setattr(borders, "_spans", _threes)
    if schedule == "in groups":
        monkeypatch.setattr(borders, "_groups", _pairs)
    if schedule == "as on a device":
        for module in (backward, borders, forward):
            monkeypatch.setattr(module, "is_cpu", lambda _: False)
    recipe = CHAINS[name]
    assert chain_of(recipe) is not None
    x = generate.inputs(recipe, B=2, T=17, H=2, G=2)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, 10:] = False
    for options in ({}, {"attention_mask": mask}):
        expected, expected_state, slopes = generate.gradients(
            recipe, x, engine="reference", **options
        )
        y, state, grads = generate.gradients(recipe, x, engine="deep", **options)
        assert generate.relative_error(y, expected) < EXACT
        assert (
            generate.largest_error(
                generate.flatten_state(state), generate.flatten_state(expected_state)
            )[0]
            < EXACT
        )
        assert generate.largest_error(grads, slopes)[0] < EXACT
        with torch.no_grad():
            y, state = generate.run_recall(recipe, x, engine="deep", **options)
        assert generate.relative_error(y, expected) < EXACT
        assert (
            generate.largest_error(
                generate.flatten_state(state), generate.flatten_state(expected_state)
            )[0]
            < EXACT
        )


def test_a_second_pass_over_the_same_graph() -> None:
    """A second gradient of one graph equals the first."""
    recipe = CHAINS["momentum"]
    x = generate.inputs(recipe, B=1, T=8, H=2).with_grad()
    y, _ = generate.run_recall(recipe, x, engine="deep")
    leaves = [t for t in x.tensors().values() if t.requires_grad]
    weight = torch.randn_like(y)

    def slopes() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, weight, retain_graph=True)

    copy = weight.clone()
    for first, second in zip(slopes(), slopes(), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(weight, copy)


def test_single_precision_agrees() -> None:
    """The written-out gradient loses no more digits than float32 has."""
    recipe = CHAINS["momentum"]
    x = generate.inputs(recipe, B=2, T=33, H=2, K=8, V=8, dtype=torch.float64)
    expected, _, slopes = generate.gradients(recipe, x, engine="deep")
    low = x.replace_tensors({name: t.float() for name, t in x.tensors().items()})
    y, _, grads = generate.gradients(recipe, low, engine="deep")
    assert y.dtype == torch.float32
    assert generate.relative_error(y, expected) < 1e-5
    assert generate.largest_error(grads, slopes)[0] < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"memory": memory.GatedMLP()},
        {
            "retention": retention.Decay(per="key"),
            "algorithm": algorithm.GradientDescent(batch_size=3),
        },
        {
            "memory": memory.Matrix(),
            "algorithm": algorithm.Momentum(batch_size=3, momentum_on="value"),
        },
    ],
    ids=["gates", "channels", "write only"],
)
def test_other_memories_take_the_general_path(change: dict[str, Any]) -> None:
    recipe = CHAINS["momentum"].replace(**change)
    assert DeepEngine().unsupported_reasons(recipe) == []
    assert chain_of(recipe) is None


def _random_chains(count: int) -> list[tuple[int, rc.Recipe]]:
    chains = ((i, recipe) for i, recipe in recipes(10**6) if chain_of(recipe) is not None)
    return list(itertools.islice(chains, count))


def test_drawn_chains() -> None:
    """Recipes as in `test_deep`, restricted to this path, which few of them take."""
    for index, recipe in _random_chains(5):
        check(recipe, index)


@pytest.mark.slow
def test_many_drawn_chains() -> None:
    for index, recipe in _random_chains(60):
        check(recipe, index)
