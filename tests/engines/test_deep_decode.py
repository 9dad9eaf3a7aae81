"""Decoding of deep memories with and without the gathered tokens of an open inner batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect import algorithm, bias, context, features, memory, retention
from recollect.engines.deep import decode
from recollect.state.state import State

EXACT = 1e-10

RECIPES = {
    **{name: rc.zoo.get(name).recipe for name in ("titans", "ttt_linear", "ttt_mlp", "omega_net")},
    "atlas": rc.zoo.get("atlas").recipe,
    "a window over borders": rc.Recipe(
        memory=memory.MLP(),
        features=features.Polynomial(),
        context=context.Window(size=3),
        retention=retention.Decay(),
        algorithm=algorithm.Momentum(batch_size=4),
    ),
    "a curved loss": rc.Recipe(
        memory=memory.MLP(residual=False),
        bias=bias.Huber(threshold="input"),
        algorithm=algorithm.GradientDescent(batch_size=5),
    ),
    "an erasure": rc.Recipe(
        memory=memory.MLP(),
        retention=retention.Decay(),
        algorithm=algorithm.Momentum(batch_size=4, erasure=1.0),
    ),
    "an erasure next to a base": rc.Recipe(
        memory=memory.MLP(static_weights=True),
        algorithm=algorithm.GradientDescent(batch_size=4, erasure=1.0),
    ),
    "one step per batch": rc.Recipe(
        memory=memory.MLP(), algorithm=algorithm.Muon(batch_size=4, update_every="batch")
    ),
}


def _tokens(x: generate.Inputs, start: int, stop: int) -> dict[str, Any]:
    piece = slice(start, stop)
    return {
        "q": x.q[:, piece],
        "k": x.k[:, piece],
        "v": x.v[:, piece],
        "gates": {name: gate[:, piece] for name, gate in x.gates.items()},
        "params": x.params,
    }


def _decoded(
    recipe: rc.Recipe, x: generate.Inputs, *, keep: bool, start: int = 0
) -> tuple[Tensor, State]:
    """Run one token at a time after ``start`` tokens in one call."""
    outputs: list[Tensor] = []
    state: State | None = None
    pieces = [(0, start)] if start else []
    for first, last in [*pieces, *((t, t + 1) for t in range(start, x.T))]:
        begin: dict[str, Any] = {"initial_memory": x.init} if state is None else {"state": state}
        y, state = rc.recall(recipe, **_tokens(x, first, last), **begin, engine="deep")
        assert state is not None
        state = state if keep else dataclasses.replace(state, cache={})
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def _of_four(recipe: rc.Recipe) -> Any:
    """Return the recipe's algorithm with inner batches of four tokens."""
    algorithm: Any = recipe.algorithm
    return dataclasses.replace(algorithm, batch_size=4)


@pytest.mark.parametrize(
    ("start", "keep"),
    [
        (0, True),
        (3, False),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(0, False), (3, True)]),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@torch.no_grad()
def test_decoding_equals_one_pass(recipe: rc.Recipe, start: int, keep: bool) -> None:
    b = recipe.algorithm.batch_size
    x = generate.inputs(recipe, T=min(2 * b + b // 2 + 1, 41))
    expected, end = rc.recall(
        recipe, **_tokens(x, 0, x.T), initial_memory=x.init, engine="reference"
    )
    y, state = _decoded(recipe, x, keep=keep, start=start)
    assert end is not None
    assert generate.relative_error(y, expected) < EXACT
    wrong, name = generate.largest_error(generate.flatten_state(state), generate.flatten_state(end))
    assert wrong < EXACT, name


@pytest.mark.parametrize("name", ["titans", "ttt_linear", "omega_net", "a window over borders"])
@torch.no_grad()
def test_token_takes_the_gradient_of_its_key_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[name].replace(algorithm=_of_four(RECIPES[name]))
    rows: list[int] = []

    def counted(method: Any, memory: Any, points: Any, params: Any) -> Any:
        rows.append(points.phi.shape[2])
        return original(method, memory, points, params)

    original = decode._factors
    monkeypatch.setattr(decode, "_factors", counted)
    x = generate.inputs(recipe, T=9)
    window = (recipe.context.horizon or 1) - 1
    _decoded(recipe, x, keep=True)
    # A new batch needs the gradients of the window again, at the new weights.
    assert rows == [1 + window, 1, 1, 1, 1 + window, 1, 1, 1, 1 + window]
    rows.clear()
    _decoded(recipe, x, keep=False)
    assert rows == [n + window for n in (1, 2, 3, 4, 1, 2, 3, 4, 1)]


@torch.no_grad()
def test_stale_cache_is_ignored() -> None:
    """Other recipes, changed parameters and other rows continue from the state alone."""
    recipe = RECIPES["ttt_linear"]
    x = generate.inputs(recipe, B=3, T=6)
    begin = rc.recall(recipe, **_tokens(x, 0, 3), initial_memory=x.init)[1]
    prior = rc.recall(recipe, **_tokens(x, 3, 4), state=begin)[1]
    assert begin is not None and prior is not None and prior.cache
    prior = dataclasses.replace(prior, recipe_id=None)  # so that another recipe can continue
    bare = dataclasses.replace(prior, cache={})
    token = _tokens(x, 4, 5)
    changed = {**token, "params": {name: 1.5 * value for name, value in x.params.items()}}
    other = recipe.replace(bias=bias.Lp(p=3))
    assert x.params
    for tokens, one in ((token, recipe), (changed, recipe), (token, other)):
        expected = rc.recall(one, **tokens, state=bare, engine="reference")[0]
        y = rc.recall(one, **tokens, state=prior, engine="deep")[0]
        assert generate.relative_error(y, expected) < EXACT
    rows = torch.tensor([2, 0])
    parts = {
        **{name: token[name][rows] for name in ("q", "k", "v")},
        "gates": {name: gate[rows] for name, gate in token["gates"].items()},
        "params": x.params,
    }
    expected = rc.recall(recipe, **token, state=prior)[0][rows]
    assert (
        generate.relative_error(rc.recall(recipe, **parts, state=prior.select(rows))[0], expected)
        < EXACT
    )


@torch.no_grad()
def test_cache_ends_with_the_batch() -> None:
    recipe = RECIPES["titans"].replace(algorithm=_of_four(RECIPES["titans"]))
    x, state, sizes = generate.inputs(recipe, T=12), None, []
    for t in range(12):
        begin: dict[str, Any] = {"initial_memory": x.init} if state is None else {"state": state}
        _, state = rc.recall(recipe, **_tokens(x, t, t + 1), **begin)
        assert state is not None
        sizes.append(sum(value.numel() for value in state.cache.values()))
    assert sizes[3] == 0 < sizes[0] < sizes[1] < sizes[2]
    assert sizes == sizes[:4] * 3
