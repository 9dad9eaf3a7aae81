"""Deep memories over a kernel, by inner batches, against the reference of `test_kernel_rows`."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.contracts import generate
from tests.engines.test_kernel_rows import EXPLICIT

import recollect as rc
from recollect.engines.kernel.delta_rule import KernelDeltaRule
from recollect.engines.kernel.inner_batches import DeepKernelMemory
from recollect.engines.select import select_engine
from recollect.testing.compare import assert_states_equal
from recollect.testing.engines import check_agrees

F, Read = rc.features, rc.memory.Read
LIMIT = 1e-9


def _recipes() -> dict[str, rc.Recipe]:
    """Return the explicit-feature recipes of `test_kernel_rows`, also normalised, and the zoo's."""
    result: dict[str, rc.Recipe] = {}
    for (name, recipe), normalize in itertools.product(EXPLICIT.items(), ("none", "sum")):
        memory = dataclasses.replace(recipe.memory, read=Read(normalize=normalize))
        recipe_with_memory = recipe.replace(memory=memory)
        if KernelDeltaRule().unsupported_reasons(recipe_with_memory):
            result[f"{name}, {normalize}"] = recipe_with_memory
    for name in ("deep_transformer", "swdt", "dot"):
        recipe = rc.zoo.get(name).recipe
        result[name] = recipe.replace(algorithm=dataclasses.replace(recipe.algorithm, batch_size=3))
    for kernel in (F.ReluKernel(), F.Solu(), F.Gaussian()):
        result[kernel.brief] = result["dot"].replace(
            features=kernel, memory=rc.memory.GatedMLP(expansion=1)
        )
    result["static rate, value-robust"] = rc.Recipe(
        memory=rc.memory.MLP(expansion=2, norm="rms"),
        features=F.Exponential(),
        bias=rc.bias.ValueRobust(radius="learned"),
        algorithm=rc.algorithm.Momentum(batch_size=2, lr="learned"),
    )
    return result


RECIPES = _recipes()
SAMPLE = dict(list(RECIPES.items())[::3]) | {
    n: RECIPES[n] for n in ("deep_transformer", "swdt", "dot")
}


@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_reference(name: str) -> None:
    """An odd number of tokens leaves the last inner batch open."""
    recipe = RECIPES[name]
    assert select_engine(recipe).engine.name == "kernel"
    check_agrees(recipe, generate.inputs(recipe, B=2, T=9, H=2, G=2, K=4, V=4), "kernel", LIMIT)


def test_an_error_of_zero_has_one_subgradient() -> None:
    """The norm of a value-robust error has no gradient at 0, for which the reference takes 0."""
    recipe = RECIPES["static rate, value-robust"]
    x = generate.inputs(recipe, B=1, T=5, H=2, K=4, V=4)
    assert x.init is not None
    *first, last = x.init
    x = dataclasses.replace(x, init=(*first, torch.zeros_like(last)), v=x.v.clone())
    x.v[:, :2] = 0.0
    check_agrees(recipe, x, "kernel", LIMIT)


@pytest.mark.parametrize("name", SAMPLE)
def test_any_split_and_other_engines(name: str) -> None:
    recipe = SAMPLE[name]
    x = generate.inputs(recipe, B=2, T=9, H=2, K=4, V=4)
    with torch.no_grad():
        complete = generate.run_recall(recipe, x, engine="reference")
        for cuts in ([1, 1, 4, 7], list(range(1, 9))):
            assert_states_equal(
                generate.run_in_pieces(recipe, x, cuts, ["kernel"]), complete, LIMIT
            )
        assert_states_equal(
            generate.run_in_pieces(recipe, x, [2, 3, 7], ["reference", "kernel"]), complete, LIMIT
        )


MASK = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", SAMPLE)
def test_masked_rows_and_packed_documents_run_separately(name: str) -> None:
    """Rows are at different positions of their inner batches."""
    recipe = SAMPLE[name]
    x = generate.inputs(recipe, B=2, T=9, H=2, K=4, V=4)
    with torch.no_grad():
        y, state = generate.run_recall(recipe, x, attention_mask=MASK, engine="kernel")
        late, _ = generate.run_recall(recipe, x, state=state, engine="kernel")
        one, borders = x.select_row(0), [0, 4, 4, 5, 9]
        packed, _ = generate.run_recall(
            recipe, one, cu_seqlens=torch.tensor(borders), engine="kernel"
        )
        for row in range(2):
            real = MASK[row].bool()
            single = x.select_row(row).map_token_tensors(lambda a, real=real: a[:, real])
            z, final_state = generate.run_recall(recipe, single, engine="reference")
            assert generate.relative_error(y[row : row + 1, real], z) < LIMIT
            z, _ = generate.run_recall(
                recipe, x.select_row(row), state=final_state, engine="reference"
            )
            assert generate.relative_error(late[row : row + 1], z) < LIMIT
        for start, stop in itertools.pairwise(borders):
            z, _ = generate.run_recall(recipe, one.slice_tokens(start, stop), engine="reference")
            assert generate.relative_error(packed[:, start:stop], z) < LIMIT


@pytest.mark.parametrize("name", ["deep_transformer", "swdt", "dot"])
def test_gradients_cross_splits(name: str) -> None:
    recipe = RECIPES[name]
    x = generate.inputs(recipe, B=1, T=9, H=1, K=4, V=4)
    slopes = []
    for cuts in ([], [4, 5]):
        leaves = x.with_grad()
        y, _ = generate.run_in_pieces(recipe, leaves, cuts, ["kernel"])
        named = leaves.tensors()
        result = torch.autograd.grad(
            y.square().sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        slopes.append(dict(zip(named, result, strict=True)))
    assert generate.largest_error(slopes[1], slopes[0])[0] < LIMIT


@pytest.mark.parametrize("name", ["deep_transformer", "swdt", "dot"])
def test_presets_in_single_precision_at_their_batch_size(name: str) -> None:
    """130 tokens are two inner batches of 64 and an open one."""
    recipe = rc.zoo.get(name).recipe
    x = generate.inputs(recipe, B=1, T=130, H=2, K=8, V=8)
    x = dataclasses.replace(x, gates={**x.gates, "lr": x.gates["lr"] / 64})
    with torch.no_grad():
        y, _ = generate.run_recall(recipe, x, engine="kernel")
        single, _ = generate.run_recall(recipe, x.map_tensors(lambda a: a.float()), engine="kernel")
    assert generate.relative_error(single, y) < 1e-5


def test_large_logits_do_not_overflow() -> None:
    recipe = RECIPES["deep_transformer"]
    x = generate.inputs(recipe, B=1, T=9, H=1, K=4, V=4, dtype=torch.float32)
    x = dataclasses.replace(x, q=100 * x.q, k=100 * x.k)
    y, _, slopes = generate.gradients(recipe, x, engine="kernel")
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(slope).all() for slope in slopes.values())


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (rc.Recipe(), "no row per key"),
        (rc.zoo.get("delta_former").recipe, "a probe predicts at every token"),
        (
            rc.Recipe(features=F.Exponential(), algorithm=rc.algorithm.Implicit()),
            "depends on the key",
        ),
    ],
)
def test_errors_state_the_reason(recipe: rc.Recipe, reason: str) -> None:
    assert any(reason in text for text in DeepKernelMemory().unsupported_reasons(recipe))
