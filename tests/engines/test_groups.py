"""Inner batches run in groups: how many borders a training step keeps, and that it changes nothing.

Between groups the memory is kept, inside of one its intermediates are: N/g borders and g batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.deep import engine
from recollect.engines.deep.chain import engine as chain

RULES: dict[str, Any] = {
    "chain": rc.algorithm.Momentum(batch_size=2, normalized_steps=True),
    "border": rc.algorithm.Muon(batch_size=2, update_every="batch", ns_steps=1),
}


def recipe_of(way: str) -> rc.Recipe:
    """Polynomial features make its weights most of what a batch of two tokens takes."""
    return rc.Recipe(
        memory=rc.memory.MLP(expansion=8),
        features=rc.features.Polynomial(degree=3),
        retention=rc.retention.Decay(),
        algorithm=RULES[way],
    )


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups of every call that ran in more than one."""
    result: list[int] = []
    run_groups, groups_of_chain = engine.run_groups, chain._groups

    def counted(call: Any, groups: Any, *rest: Any) -> Any:
        result.append(len(groups))
        return run_groups(call, groups, *rest)

    def counted_of_chain(*arguments: Any) -> Any:
        groups = groups_of_chain(*arguments)
        result.append(len(groups))
        return groups

    monkeypatch.setattr(engine, "run_groups", counted)
    monkeypatch.setattr(chain, "_groups", counted_of_chain)
    return result


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is more than a group may take."""
    monkeypatch.setattr(engine, "GROUP_BYTES", 1)
    monkeypatch.setattr(engine, "WHOLE_BYTES", 1)


def slopes(recipe: rc.Recipe, x: Any, method: str = "deep") -> tuple[Tensor, dict[str, Tensor]]:
    y, _, grads = generate.gradients(recipe, x, engine=method)
    return y, grads


@pytest.mark.parametrize("way", RULES)
def test_a_memory_too_large_for_a_group_keeps_few_borders(
    way: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """√N to 2 √N groups, where one batch each keeps N borders; numbers as the reference has."""
    recipe, batches = recipe_of(way), 100
    x = generate.inputs(recipe, B=1, T=2 * batches, H=1)
    small(monkeypatch)
    y, result = slopes(recipe, x)
    assert len(groups) == 1
    assert batches**0.5 <= groups[0] <= 2 * batches**0.5
    expected, exact = slopes(recipe, x, "reference")
    assert generate.relative_error(y, expected) < 1e-8
    wrong, name = generate.largest_error(result, exact)
    assert wrong < 1e-8, f"{name}: {wrong:.1e}"


def test_without_gradients_nothing_is_kept_and_groups_stay_small(
    groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("chain")
    x = generate.inputs(recipe, B=1, T=40, H=1)
    small(monkeypatch)
    with torch.no_grad():
        generate.run_recall(recipe, x, engine="deep")
    assert groups == [20]


@pytest.mark.parametrize("N", [1, 2, 7, 32, 256])
@pytest.mark.parametrize("share", [0.03, 0.3, 0.63, 0.99])
def test_borders_and_one_group_take_next_to_the_least(N: int, share: float) -> None:
    """In units of a border's bytes: N/g of them and g batches of 1/share each.

    Groups are whole, so that a quarter more than the least is left where N is small.
    """

    def taken(g: int) -> float:
        return -(-N // g) + g / share

    g = engine._least_memory(N, share)  # pyright: ignore[reportPrivateUsage]
    assert 1 <= g <= N
    assert taken(g) <= 1.25 * min(map(taken, range(1, N + 1)))
