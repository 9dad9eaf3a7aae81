"""Single tokens of a layer against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect import algorithm, bias, context, features, memory, retention
from recollect.engines.common.problem import Problem
from recollect.functional.binding import bind
from recollect.functional.recall import memorise
from recollect.recipe.bound import BoundRecipe
from recollect.state.state import State

EXACT = 1e-10
GD, Momentum = algorithm.GradientDescent, algorithm.Momentum


@rc.member
class Quartic(bias.Bias):
    """Σ e⁴, whose error is not affine and comes from autograd."""

    def loss(self, prediction: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return (prediction - value).pow(4).sum(-1)


CHAINS = {
    "titans": rc.Recipe(
        memory=memory.MLP(),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=4, normalized_steps=True),
    ),
    "plain steps": rc.Recipe(
        memory=memory.MLP(activation="silu"),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=3),
    ),
    "nothing fades": rc.Recipe(
        memory=memory.MLP(depth=3, activation="tanh"),
        algorithm=Momentum(batch_size=4, normalized_steps=True),
    ),
    "no momentum": rc.Recipe(
        memory=memory.MLP(activation="gelu_tanh", expansion=1),
        retention=retention.Decay(),
        algorithm=GD(batch_size=5, normalized_steps=True),
    ),
    "neither": rc.Recipe(memory=memory.MLP(activation="relu"), algorithm=GD(batch_size=4)),
    "one map": rc.Recipe(
        memory=memory.MLP(depth=1), algorithm=GD(batch_size=2, normalized_steps=True)
    ),
    "a curved loss": rc.Recipe(
        memory=memory.MLP(), bias=bias.Lp(p=3), algorithm=GD(batch_size=4, normalized_steps=True)
    ),
}

OTHERS = {
    "a window": CHAINS["titans"].replace(context=context.Window(size=2)),
    "features": CHAINS["titans"].replace(features=features.EluPlusOne()),
    "a constant rate": CHAINS["neither"].replace(algorithm=GD(batch_size=4, lr=0.5)),
    "a number of the loss": CHAINS["neither"].replace(bias=bias.Huber(threshold="input")),
    "a decay per channel": CHAINS["neither"].replace(retention=retention.Decay(per="key")),
    "a norm": CHAINS["titans"].replace(memory=memory.MLP(norm="rms")),
    "no residual": CHAINS["titans"].replace(memory=memory.MLP(residual=False)),
    "batches of one": CHAINS["titans"].replace(algorithm=Momentum(batch_size=1)),
    "averages": rc.zoo.get("ttt_mlp").recipe,
}


def _call(bound: BoundRecipe, x: generate.Inputs, t: int, state: State, **more: Any) -> Problem:
    """Call the layer's path for token t."""
    piece = slice(t, t + 1)
    gates = {name: gate[:, piece] for name, gate in x.gates.items()}
    arguments = {"q": x.q[:, piece], "k": x.k[:, piece], "v": x.v[:, piece], "gates": gates} | more
    return Problem(bound=bound, params=x.params, state=state, trusted=True, **arguments)


def _prompt(recipe: rc.Recipe, x: generate.Inputs, tokens: int) -> State:
    _, state = generate.run_recall(recipe, x.slice_tokens(0, tokens), engine="deep")
    return state


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("start", [3, 4])
@pytest.mark.parametrize("recipe", CHAINS.values(), ids=CHAINS)
@torch.no_grad()
def test_tokens_across_boundaries_equal_the_reference(
    recipe: rc.Recipe, start: int, G: int
) -> None:
    x = generate.inputs(recipe, B=2, T=11, H=2, G=G, K=4, V=4)
    expected, end = generate.run_recall(recipe, x, engine="reference")
    bound, state = bind(recipe, H=2, K=4, V=4), _prompt(recipe, x, start)
    outputs: list[Tensor] = []
    for t in range(start, 11):
        y, later = memorise(_call(bound, x, t, state))
        assert later is not None
        outputs.append(y)
        state = later
    assert generate.relative_error(torch.cat(outputs, dim=1), expected[:, start:]) < EXACT
    wrong, name = generate.largest_error(generate.flatten_state(state), generate.flatten_state(end))
    assert wrong < EXACT, name
    assert state.host_position == 11


@pytest.mark.parametrize("recipe", OTHERS.values(), ids=OTHERS)
@torch.no_grad()
def test_token_of_other_recipes_equals_the_reference(recipe: rc.Recipe) -> None:
    x = generate.inputs(recipe, B=1, T=5, H=2, K=4, V=4)
    expected, _ = generate.run_recall(recipe, x, engine="reference")
    bound = bind(recipe, H=2, K=4, V=4, engine="deep")
    y, _ = memorise(_call(bound, x, 4, _prompt(recipe, x, 4)))
    assert generate.relative_error(y, expected[:, 4:]) < EXACT


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("what", ["q", "k", "v", "lr", "momentum"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "tanh", "relu"])
@torch.no_grad()
def test_error_names_a_non_finite_input(activation: str, what: str, bad: float) -> None:
    """Only outputs are checked, because every non-finite value shows in them."""
    recipe = CHAINS["titans"].replace(memory=memory.MLP(activation=activation))
    x = generate.inputs(recipe, B=2, T=6, H=2, K=4, V=4)
    bound = bind(recipe, H=2, K=4, V=4)
    for start in (4, 5):
        state = _prompt(recipe, x, 4)
        if start == 5:
            state = memorise(_call(bound, x, 4, state))[1]
            assert state is not None
        call = _call(bound, x, start, state)
        qkv = {"q": call.q, "k": call.k, "v": call.v}
        wrong = qkv[what] if what in qkv else call.gates[what]
        wrong = wrong.clone()
        wrong[(1, *[0] * (wrong.dim() - 1))] = bad
        changed = {what: wrong} if what in qkv else {"gates": {**call.gates, what: wrong}}
        name = what if what in qkv else f"gate '{what}'"
        with pytest.raises(ValueError, match=f"{name} .*row 1"):
            memorise(dataclasses.replace(call, **changed))


@torch.no_grad()
def test_full_decay() -> None:
    recipe = CHAINS["titans"]
    x = generate.inputs(recipe, B=2, T=7, H=2, K=4, V=4)
    x.gates["log_decay"][:, 5:, 0] = -torch.inf
    expected, _ = generate.run_recall(recipe, x, engine="reference")
    bound, state = bind(recipe, H=2, K=4, V=4), _prompt(recipe, x, 4)
    for t in range(4, 7):
        y, later = memorise(_call(bound, x, t, state))
        assert later is not None
        assert generate.relative_error(y, expected[:, t : t + 1]) < EXACT
        state = later


@torch.no_grad()
def test_custom_loss() -> None:
    recipe = CHAINS["neither"].replace(bias=Quartic())
    x = generate.inputs(recipe, B=1, T=7, H=2, K=4, V=4)
    expected, _ = generate.run_recall(recipe, x, engine="reference")
    bound, state = bind(recipe, H=2, K=4, V=4), _prompt(recipe, x, 4)
    for t in range(4, 7):
        y, later = memorise(_call(bound, x, t, state))
        assert later is not None
        assert generate.relative_error(y, expected[:, t : t + 1]) < EXACT
        state = later


@pytest.mark.parametrize("inference", [False, True])
def test_decoded_tokens_equal_one_call(inference: bool) -> None:
    """Also in inference mode, and later tokens can require gradients."""
    torch.manual_seed(0)
    layer = rc.MemoryLayer(16, 2, CHAINS["titans"], num_kv_heads=1)
    x = torch.randn(2, 40, 16)
    with torch.inference_mode(inference), torch.no_grad():
        expected, _ = layer(x)
        y, state = layer(x[:, :30])
        for t in range(30, 38):
            y, state = layer(x[:, t : t + 1], state)
            torch.testing.assert_close(y, expected[:, t : t + 1], atol=2e-6, rtol=1e-5)
    y, _ = layer(x[:, 38:], state)
    torch.testing.assert_close(y, expected[:, 38:], atol=2e-6, rtol=1e-5)
    y.sum().backward()
    assert layer.qkv.weight.grad is not None
    assert bool(layer.qkv.weight.grad.isfinite().all())
