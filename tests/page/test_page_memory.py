"""The page's memory in JavaScript equals `rc.recall`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tests.page.node import node
from torch import Tensor

import recollect as rc

K, V, T = 5, 4, 12
Numbers = dict[str, Tensor]

BIASES = (rc.bias.L2(), rc.bias.DotProduct())
CONTEXTS = (rc.context.Online(), rc.context.Window(size=3), rc.context.Window(size=4, gated=False))
RETENTIONS = (
    rc.retention.Keep(),
    rc.retention.Decay(),
    rc.retention.Decay(when="before"),
    rc.retention.Decay(per="key", when="before"),
    rc.retention.Decay(alpha=0.75),
    rc.retention.Decay(alpha="learned"),
)
ALGORITHMS = (
    rc.algorithm.GradientDescent(),
    rc.algorithm.GradientDescent(lr=0.4),
    rc.algorithm.GradientDescent(per="value"),
    rc.algorithm.Momentum(),
    rc.algorithm.Momentum(momentum=0.6),
    rc.algorithm.Momentum(momentum_on="value"),
    rc.algorithm.Implicit(),
    rc.algorithm.Flow(),
    rc.algorithm.NLMS(lr="input"),
)


def combined() -> list[rc.Recipe]:
    """Return every meaningful combination."""
    result = []
    for bias, context, retention, algorithm in itertools.product(
        BIASES, CONTEXTS, RETENTIONS, ALGORITHMS
    ):
        try:
            result.append(
                rc.Recipe(bias=bias, context=context, retention=retention, algorithm=algorithm)
            )
        except rc.RecipeError:
            continue
    return result


def random_data() -> tuple[list[Tensor], Numbers]:
    """Return queries, keys and values [T, .] and one number of each name per token, in float64."""
    q, k = torch.randn(2, T, K, dtype=torch.float64).div(K**0.5).unbind()
    v = torch.randn(T, V, dtype=torch.float64)
    uniform = torch.rand(3, T, dtype=torch.float64)
    numbers = {
        "lr": 0.1 + 0.5 * uniform[0],
        "decay": 0.6 + 0.4 * uniform[1],
        "momentum": 0.8 * uniform[2],
    }
    return [q, k, v], numbers


def constant(numbers: Numbers) -> Numbers:
    """Return numbers that are equal at every token, like a param."""
    return {name: value[:1].expand(T) for name, value in numbers.items()}


def recalled(recipe: rc.Recipe, qkv: list[Tensor], numbers: Numbers) -> Tensor:
    """Return the library's outputs [T, V]."""
    sizes = recipe.axes(K, V)

    def spread(value: Tensor, axes: tuple[str, ...]) -> Tensor:
        shape = [sizes[axis] for axis in axes]
        return value.reshape(-1, *[1] * len(axes)).expand(-1, *shape)

    named = {
        "lr": numbers["lr"],
        "log_lr": numbers["lr"].log(),
        "log_decay": numbers["decay"].log(),
        "log_decay_value": torch.zeros(T, dtype=torch.float64),
        "momentum": numbers["momentum"],
        "window": torch.ones(T, dtype=torch.float64),
        "decay": numbers["decay"],
    }
    gates = {x.name: spread(named[x.name], x.axes)[None, :, None] for x in recipe.gates()}
    params = {x.name: spread(named[x.name][:1], x.axes) for x in recipe.params()}
    q, k, v = (x[None, :, None] for x in qkv)
    y, _ = rc.recall(recipe, q, k, v, gates, params=params)
    return y[0, :, 0]


def cases(recipes: list[rc.Recipe], qkv: list[Tensor], numbers: Numbers) -> list[dict[str, Any]]:
    q, k, v = (x.tolist() for x in qkv)
    rows = [{name: float(value[t]) for name, value in numbers.items()} for t in range(T)]
    sequences = {"keys": k, "values": v, "queries": q, "numbers": rows}
    return [{"recipe": recipe.to_dict(), **sequences} for recipe in recipes]


def test_every_combination_that_the_page_runs_equals_recall() -> None:
    recipes = combined()
    assert len(recipes) > 150
    qkv, moving = random_data()
    for numbers in (moving, constant(moving)):
        chosen = [x for x in recipes if bool(x.params()) == (numbers is not moving)]
        assert chosen
        result = node("run_memory.js", cases(chosen, qkv, numbers), ["memory.js"])
        for recipe, one in zip(chosen, result, strict=True):
            assert one["replaced"] == [], recipe
            expected = recalled(recipe, qkv, numbers)
            read = torch.tensor(one["read"], dtype=torch.float64)
            torch.testing.assert_close(
                read, expected, rtol=1e-6, atol=1e-6, msg=lambda m, r=recipe: f"{r}: {m}"
            )
            assert expected.abs().max() > 1e-2


def test_a_system_that_the_page_runs_as_it_is_equals_recall() -> None:
    recipes = {name: rc.zoo.get(name).recipe for name in rc.zoo.names()}
    qkv, moving = random_data()
    numbers = constant(moving)
    result = node("run_memory.js", cases(list(recipes.values()), qkv, numbers), ["memory.js"])
    ran = []
    for (name, recipe), one in zip(recipes.items(), result, strict=True):
        if one["replaced"]:
            continue
        ran.append(name)
        read = torch.tensor(one["read"], dtype=torch.float64)
        torch.testing.assert_close(read, recalled(recipe, qkv, numbers), rtol=1e-6, atol=1e-6)
    assert {"linear_attention", "retnet", "gla", "mamba2", "delta_net", "longhorn"} <= set(ran)
    assert {"gated_delta_net", "momentum_delta_net", "nlms", "leaky_lms"} <= set(ran)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (rc.Recipe(memory=rc.memory.MLP()), ["memory.MLP"]),
        (
            rc.Recipe(memory=rc.memory.Matrix(read=rc.memory.Read(transposed=True))),
            ["memory.Matrix"],
        ),
        (
            rc.Recipe(algorithm=rc.algorithm.GradientDescent(erasure=0.5)),
            ["algorithm.GradientDescent"],
        ),
        (rc.Recipe(algorithm=rc.algorithm.Momentum(erasure=0.5)), ["algorithm.Momentum"]),
        (rc.Recipe(features=rc.features.Relu()), ["features.Relu"]),
        (rc.Recipe(bias=rc.bias.Huber()), ["bias.Huber"]),
        (
            rc.Recipe(algorithm=rc.algorithm.GradientDescent(updates_per_token=2)),
            ["algorithm.GradientDescent"],
        ),
        (
            rc.Recipe(algorithm=rc.algorithm.GradientDescent(reduction="mean", offset=0.5)),
            ["algorithm.GradientDescent"],
        ),
        (
            rc.Recipe(algorithm=rc.algorithm.GradientDescent(normalized_steps=True)),
            ["algorithm.GradientDescent"],
        ),
        (rc.Recipe(algorithm=rc.algorithm.Momentum(normalized_steps=True)), ["algorithm.Momentum"]),
        (rc.Recipe(context=rc.context.Prefix()), ["context.Prefix"]),
        (rc.Recipe(algorithm=rc.algorithm.Momentum(batch_size=4)), ["algorithm.Momentum"]),
        (rc.Recipe(retention=rc.retention.Ball()), ["retention.Ball"]),
        (rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe())), ["bias.L2"]),
    ],
)
def test_page_names_unsupported_recipes(recipe: rc.Recipe, names: list[str]) -> None:
    qkv, numbers = random_data()
    (result,) = node("run_memory.js", cases([recipe], qkv, numbers), ["memory.js"])
    assert result["replaced"] == names


def test_random_pairs_have_their_kind() -> None:
    result = node("draw_pairs.js", {"seed": 3, "count": 24}, ["memory.js"])
    for kind, pairs in result["kinds"].items():
        keys = torch.tensor([x["key"] for x in pairs], dtype=torch.float64)
        values = torch.tensor([x["value"] for x in pairs], dtype=torch.float64)
        ones = torch.ones(24, dtype=torch.float64)
        torch.testing.assert_close(keys.norm(dim=1), ones)
        torch.testing.assert_close(values.norm(dim=1), ones)
        likeness = keys @ keys.T
        if kind == "orthogonal":
            eye = torch.eye(16, dtype=torch.float64)
            torch.testing.assert_close(likeness[:16, :16], eye, rtol=0, atol=1e-12)
        elif kind == "rewritten":
            torch.testing.assert_close(likeness.diagonal(8), ones[8:])
            assert [x["of"] for x in pairs[:10]] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
        else:  # independent directions in 16 dimensions
            assert 0.1 < likeness.triu(1).abs().max() < 0.95
    assert result["again"] == result["kinds"]["random"]  # the same seed
    assert result["other"] != result["again"]


def test_measurements_of_a_memory() -> None:
    """Orthogonal keys and a step of one: sixteen pairs are exact, and one more overwrites."""
    result = node("measure.js", {}, ["memory.js"])
    exact = result["delta"]
    assert exact["share"][:17] == [None] + [1] * 16
    assert max(exact["after"][1:17]) < 1e-12
    assert max(x["error"] for x in exact["found16"]) < 1e-12
    assert [x["age"] for x in exact["found16"]] == list(range(15, -1, -1))
    # A second write of a key with a new value: the delta rule replaces the value, the sum adds it.
    assert result["rewritten"]["delta"] == pytest.approx(0, abs=1e-12)
    assert result["rewritten"]["sum"] == pytest.approx(1, abs=1e-12)
    # A decay α after the write leaves α of the value: its error is 1 − α.
    assert result["decayed"] == pytest.approx(1 - 0.9, abs=1e-12)
    assert math.isclose(result["empty"], 1.0)
