"""Decoding deep memories: what an open inner batch gathered is kept, and can be done without."""

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
    here = slice(start, stop)
    return {
        "q": x.q[:, here],
        "k": x.k[:, here],
        "v": x.v[:, here],
        "gates": {name: gate[:, here] for name, gate in x.gates.items()},
        "params": x.params,
    }


def _decoded(
    recipe: rc.Recipe, x: generate.Inputs, *, keep: bool, start: int = 0
) -> tuple[Tensor, State]:
    """One token at a time after ``start`` tokens at once."""
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
    """The recipe's algorithm with inner batches of four tokens."""
    algorithm: Any = recipe.algorithm
    return dataclasses.replace(algorithm, batch_size=4)


def _length(recipe: rc.Recipe) -> int:
    b = recipe.algorithm.batch_size
    return min(2 * b + b // 2 + 1, 41)


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
    x = generate.inputs(recipe, T=_length(recipe))
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
def test_a_token_takes_the_gradient_of_its_own_key_alone(
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
    # A new batch asks again for what the window still holds, at the new weights.
    assert rows == [1 + window, 1, 1, 1, 1 + window, 1, 1, 1, 1 + window]
    rows.clear()
    _decoded(recipe, x, keep=False)
    assert rows == [n + window for n in (1, 2, 3, 4, 1, 2, 3, 4, 1)]


@torch.no_grad()
def test_nothing_stale_is_taken() -> None:
    """Another recipe, changed parameters and other rows go on from what the state says."""
    recipe = RECIPES["ttt_linear"]
    x = generate.inputs(recipe, B=3, T=6)
    begin = rc.recall(recipe, **_tokens(x, 0, 3), initial_memory=x.init)[1]
    prior = rc.recall(recipe, **_tokens(x, 3, 4), state=begin)[1]
    assert begin is not None and prior is not None and prior.cache
    prior = dataclasses.replace(prior, recipe_id=None)  # so that another recipe may go on
    bare = dataclasses.replace(prior, cache={})
    here = _tokens(x, 4, 5)
    changed = {**here, "params": {name: 1.5 * value for name, value in x.params.items()}}
    other = recipe.replace(bias=bias.Lp(p=3))
    assert x.params
    for tokens, one in ((here, recipe), (changed, recipe), (here, other)):
        expected = rc.recall(one, **tokens, state=bare, engine="reference")[0]
        y = rc.recall(one, **tokens, state=prior, engine="deep")[0]
        assert generate.relative_error(y, expected) < EXACT
    rows = torch.tensor([2, 0])
    some = {
        **{name: here[name][rows] for name in ("q", "k", "v")},
        "gates": {name: gate[rows] for name, gate in here["gates"].items()},
        "params": x.params,
    }
    expected = rc.recall(recipe, **here, state=prior)[0][rows]
    assert (
        generate.relative_error(rc.recall(recipe, **some, state=prior.select(rows))[0], expected)
        < EXACT
    )


@torch.no_grad()
def test_what_is_kept_ends_with_the_batch() -> None:
    recipe = RECIPES["titans"].replace(algorithm=_of_four(RECIPES["titans"]))
    x, state, sizes = generate.inputs(recipe, T=12), None, []
    for t in range(12):
        begin: dict[str, Any] = {"initial_memory": x.init} if state is None else {"state": state}
        _, state = rc.recall(recipe, **_tokens(x, t, t + 1), **begin)
        assert state is not None
        sizes.append(sum(value.numel() for value in state.cache.values()))
    assert sizes[3] == 0 < sizes[0] < sizes[1] < sizes[2]
    assert sizes == sizes[:4] * 3
