"""Groups of inner batches: the number of boundaries in a training step, and equal results.

Boundaries between groups store the memory, and inside a group its intermediates are stored: N/g
boundaries and g batches.
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


def recipe_of(kind: str) -> rc.Recipe:
    """Polynomial features, whose weights are most of the memory of a batch of two tokens."""
    return rc.Recipe(
        memory=rc.memory.MLP(expansion=8),
        features=rc.features.Polynomial(degree=3),
        retention=rc.retention.Decay(),
        algorithm=RULES[kind],
    )


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the groups of every call with more than one."""
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
    """One batch exceeds the limit of a group."""
    monkeypatch.setattr(engine, "GROUP_BYTES", 1)
    monkeypatch.setattr(engine, "WHOLE_BYTES", 1)


def slopes(recipe: rc.Recipe, x: Any, method: str = "deep") -> tuple[Tensor, dict[str, Tensor]]:
    y, _, grads = generate.gradients(recipe, x, engine=method)
    return y, grads


@pytest.mark.parametrize("kind", RULES)
def test_large_memory_stores_few_boundaries(
    kind: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """√N to 2 √N groups instead of N boundaries, with the results of the reference."""
    recipe, batches = recipe_of(kind), 100
    x = generate.inputs(recipe, B=1, T=2 * batches, H=1)
    small(monkeypatch)
    y, result = slopes(recipe, x)
    assert len(groups) == 1
    assert batches**0.5 <= groups[0] <= 2 * batches**0.5
    expected, exact = slopes(recipe, x, "reference")
    assert generate.relative_error(y, expected) < 1e-8
    wrong, name = generate.largest_error(result, exact)
    assert wrong < 1e-8, f"{name}: {wrong:.1e}"


@pytest.mark.parametrize("final", [True, False])
def test_windows_of_chains_are_laid_out_group_by_group(
    final: bool, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their associations are copies: one group of them has the copies of its own batches."""
    recipe = rc.Recipe(
        memory=rc.memory.MLP(expansion=1),
        context=rc.context.Window(size=3),
        retention=rc.retention.Decay(),
        algorithm=RULES["chain"],
    )
    x = generate.inputs(recipe, B=1, T=20, H=1).with_grad()
    small(monkeypatch)
    results: list[dict[str, Tensor]] = []
    for method in ("deep", "reference"):
        y, _ = rc.recall(
            *(recipe, x.q, x.k, x.v, x.gates),
            params=x.params,
            initial_memory=x.init,
            engine=method,
            output_final_state=final,
        )
        leaves = {name: t for name, t in x.tensors().items() if t.requires_grad}
        grads = torch.autograd.grad(y.sin().sum(), [*leaves.values()], allow_unused=True)
        pairs = zip(leaves, grads, strict=True)
        results.append({"y": y.detach(), **{k: g for k, g in pairs if g is not None}})
    assert groups[0] > 1
    assert generate.largest_error(*results)[0] < 1e-10


def test_groups_stay_small_without_gradients(
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
def test_boundaries_and_one_group_take_near_minimal_memory(N: int, share: float) -> None:
    """In units of a boundary's bytes: N/g boundaries and g batches of 1/share each.

    Groups are full, so small N leave a quarter more than the minimum.
    """

    def taken(g: int) -> float:
        return -(-N // g) + g / share

    g = engine._least_memory(N, share)  # pyright: ignore[reportPrivateUsage]
    assert 1 <= g <= N
    assert taken(g) <= 1.25 * min(map(taken, range(1, N + 1)))
