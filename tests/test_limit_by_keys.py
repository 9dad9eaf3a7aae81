"""Rates of batches whose limit is measured by their keys: the recursion that defines r_t."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.contracts import generate
from tests.zoo import loops
from torch import Tensor

import recollect as rc
from recollect.choices.algorithm.normalized_steps import MAX_OVERLAP, overlap_discount
from recollect.recipe.stability import step_limit
from recollect.state.state import join_states
from recollect.testing import engines, sequences


@rc.member
class Unrated(rc.algorithm.Algorithm):
    """A_t = α_t A_(t−1) − ρ_t g_t, without a rate."""

    batch_size = 4
    uses_normalized_steps = True
    batch_overlap = "measured"

    def update(self, slots: Any, step: Any) -> tuple[dict[str, Tensor], Tensor]:
        return {}, -step.gradient


DEEP = rc.memory.MLP()
GD, Momentum = rc.algorithm.GradientDescent, rc.algorithm.Momentum
RECIPES = {
    "momentum": rc.Recipe(
        memory=DEEP,
        retention=rc.retention.Decay(),
        algorithm=Momentum(batch_size=4, normalized_steps=True, batch_overlap="measured"),
    ),
    "window": rc.Recipe(
        memory=DEEP,
        context=rc.context.Window(size=3),
        algorithm=GD(batch_size=5, normalized_steps=True, batch_overlap="measured"),
    ),
    "rates per channel": rc.Recipe(
        memory=DEEP,
        algorithm=GD(batch_size=3, per="value", normalized_steps=True, batch_overlap="measured"),
    ),
    "matrix": rc.Recipe(
        algorithm=GD(batch_size=4, normalized_steps=True, batch_overlap="measured")
    ),
    "link": rc.Recipe(
        memory=DEEP,
        retention=rc.retention.ElasticNet(),
        algorithm=GD(batch_size=4, normalized_steps=True, batch_overlap="measured"),
    ),
}


def without(recipe: rc.Recipe) -> rc.Recipe:
    return recipe.replace(
        algorithm=dataclasses.replace(recipe.algorithm, batch_overlap="worst_case")
    )


def definition(k: Tensor, b: int) -> Tensor:
    """Return r ``[B, T, H]`` of full documents, token by token."""
    return loops.remaining_rate(k, b=b, n=min(b, MAX_OVERLAP))


def similar_keys(x: generate.Inputs, mean: float = 0.8) -> generate.Inputs:
    """Return x with keys that have a common part."""
    return dataclasses.replace(x, k=x.k + mean * x.k[:, :1])


def scaled(x: generate.Inputs, b: int) -> generate.Inputs:
    """Return x with η_t r_t in place of η_t."""
    r = definition(x.k, b)
    lr = x.gates["lr"]
    lr = lr * r.view(*r.shape, *(1,) * (lr.dim() - 3))
    return dataclasses.replace(x, gates={**x.gates, "lr": lr})


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rate_is_reduced_by_earlier_keys_of_the_batch(recipe: rc.Recipe, method: str) -> None:
    x = similar_keys(generate.inputs(recipe, T=11))
    y, state, slopes = generate.gradients(recipe, x, engine=method)
    leaves = x.with_grad()
    y2, state2 = generate.run_recall(
        without(recipe), scaled(leaves, recipe.algorithm.batch_size), engine="reference"
    )
    named = leaves.tensors()
    result = torch.autograd.grad(
        generate.random_projection(y2, state2),
        list(named.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    assert generate.relative_error(y, y2) < 1e-10
    assert (
        generate.largest_error(generate.flatten_state(state), generate.flatten_state(state2))[0]
        < 1e-10
    )
    assert generate.largest_error(slopes, dict(zip(named, result, strict=True)))[0] < 1e-9
    plain, _ = generate.run_recall(without(recipe), x, engine=method)
    assert generate.relative_error(y, plain) > 1e-3  # r differs from 1


@pytest.mark.parametrize("lr", ["log_input", "learned", 0.3])
def test_rates_of_any_kind(lr: float | str) -> None:
    recipe = rc.Recipe(
        algorithm=GD(batch_size=4, normalized_steps=True, batch_overlap="measured", lr=lr)
    )
    x = similar_keys(generate.inputs(recipe, T=11))
    rate = torch.full((2, 11, 2), 0.3, dtype=torch.float64)
    if lr == "log_input":
        rate = x.gates["log_lr"].exp()
    elif lr == "learned":
        rate = x.params["lr"].expand(2, 11, 2)
    expected, _ = generate.run_recall(
        RECIPES["matrix"].replace(algorithm=GD(batch_size=4, normalized_steps=True)),
        dataclasses.replace(x, gates={"lr": rate * definition(x.k, 4)}, params={}),
        engine="reference",
    )
    for cuts in ([], list(range(1, 11))):
        y, _ = generate.run_in_pieces(recipe, x, cuts, ["auto"])
        assert generate.relative_error(y, expected) < 1e-10


def test_decoded_tokens_with_keys_of_other_strides() -> None:
    """Keys stored with heads before the batch give the outputs of contiguous keys."""
    recipe = RECIPES["matrix"]
    x = similar_keys(generate.inputs(recipe, T=6))
    head_major = x.k.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    cuts = list(range(1, 6))
    with torch.no_grad():
        expected, _ = generate.run_in_pieces(recipe, x, cuts, ["auto"])
        y, _ = generate.run_in_pieces(recipe, dataclasses.replace(x, k=head_major), cuts, ["auto"])
    assert generate.relative_error(y, expected) < 1e-12


def test_memories_over_kernels_in_pieces() -> None:
    """Their stored rows grow, and the open batch is in the buffer."""
    recipe = RECIPES["matrix"].replace(features=rc.features.Exponential())
    x = similar_keys(generate.inputs(recipe, T=11))
    y, _ = generate.run_recall(recipe, x)
    y2, _ = generate.run_recall(
        without(recipe), scaled(x, recipe.algorithm.batch_size), engine="reference"
    )
    assert generate.relative_error(y, y2) < 1e-10
    engines.check_chunks_and_splits(recipe, x, "auto")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_all_execution_modes_agree(recipe: rc.Recipe) -> None:
    def x(T: int) -> generate.Inputs:
        return similar_keys(engines.inputs_for(recipe, B=2, T=T, K=4, V=4))

    engines.check_chunks_and_splits(recipe, x(11), "auto")
    engines.check_handover(recipe, x(11), "auto")
    sequences.check_gradients_across_splits(recipe, x(9), "auto", [4, 5])
    for mask in engines.MASKS.values():
        sequences.check_masks(recipe, x(9), "auto", mask, chunk_size=4)
    one = x(12).select_row(0)
    sequences.check_packing(recipe, one, engines.PACKED, "auto")
    engines.check_strides(recipe, x(7), "auto")


def test_rows_at_different_positions() -> None:
    recipe = RECIPES["momentum"]
    x = similar_keys(generate.inputs(recipe, T=13))
    starts = (2, 7)
    states = [
        generate.run_recall(recipe, x.select_row(row).slice_tokens(0, start))[1]
        for row, start in enumerate(starts)
    ]
    joint = join_states(states)
    rest = [x.select_row(row).slice_tokens(start, start + 6) for row, start in enumerate(starts)]
    assert joint.host_position is None
    joined = dataclasses.replace(
        x,
        q=torch.cat([r.q for r in rest]),
        k=torch.cat([r.k for r in rest]),
        v=torch.cat([r.v for r in rest]),
        gates={n: torch.cat([r.gates[n] for r in rest]) for n in x.gates},
    )
    y, _ = generate.run_recall(recipe, joined, state=joint)
    for row in range(2):
        full, _ = generate.run_recall(recipe, x.select_row(row).slice_tokens(0, starts[row] + 6))
        assert generate.relative_error(y[row : row + 1], full[:, starts[row] :]) < 1e-10


def test_second_derivatives() -> None:
    recipe = RECIPES["momentum"]
    x = similar_keys(generate.inputs(recipe, B=1, T=5, H=1, K=3, V=3))

    def slope(lowered: bool) -> Tensor:
        k = x.k.clone().requires_grad_()
        keys = dataclasses.replace(x, k=k)
        result = without(recipe) if lowered else recipe
        keys = scaled(keys, recipe.algorithm.batch_size) if lowered else keys
        y, _ = generate.run_recall(result, keys, engine="reference" if lowered else "auto")
        (g,) = torch.autograd.grad(y.square().sum(), k, create_graph=True)
        return torch.autograd.grad(g.square().sum(), k)[0]

    assert generate.relative_error(slope(lowered=False), slope(lowered=True)) < 1e-8


def test_keys_of_zeros_and_of_any_length() -> None:
    k = torch.randn(2, 9, 1, 4, dtype=torch.float64)
    k[0, 3] = 0.0
    k[1, 5] *= 1e6
    k[1, 6] *= 1e-3
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        keys = k.to(dtype).requires_grad_()
        r = overlap_discount(keys.transpose(1, 2), MAX_OVERLAP).transpose(1, 2)
        torch.testing.assert_close(
            r.double(), definition(k, 9 + MAX_OVERLAP), rtol=tolerance, atol=tolerance
        )
        assert r[0, 3] == 1
        (g,) = torch.autograd.grad(r.sum(), keys)
        assert g.isfinite().all()


@pytest.mark.parametrize("b", [2, 8, 16, 32, 64])
def test_rates_of_equal_and_orthogonal_keys(b: int) -> None:
    n = min(b, MAX_OVERLAP)
    taken = overlap_discount(torch.ones(b, 3, dtype=torch.float64), n).sum() / n
    assert abs(float(taken) - (1 - (1 - 1 / n) ** b)) < 1e-12
    assert torch.equal(overlap_discount(torch.eye(b), n), torch.ones(b))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("b", [8, 32])
def test_error_of_a_repeated_token_never_grows(b: int, share: float) -> None:
    """4,096 times one association: (1 − 2 s (1 − (1 − 1/n)^b))^m of its error after m batches."""
    n = min(b, MAX_OVERLAP)
    step = GD(batch_size=b, normalized_steps=True, batch_overlap="measured", lr=2 * share / n)
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 1, 1, 4, generator=draw, dtype=torch.float64)
    k, v = (torch.nn.functional.normalize(k, dim=-1).expand(1, 4096, 1, 4), v.expand(1, 4096, 1, 4))
    y, _ = rc.recall(rc.Recipe(algorithm=step), k, k, v)
    relative_error = ((y - v).norm(dim=-1) / v.norm(dim=-1)).flatten()
    assert relative_error.max() <= 1 + 1e-6
    ratio = abs(1 - 2 * share * (1 - (1 - 1 / n) ** b))
    batches = torch.arange(4096 // b, dtype=torch.float64)
    # the first token of each batch has been written
    expected = ratio**batches * abs(1 - 2 * share / n)
    torch.testing.assert_close(relative_error[::b], expected, rtol=1e-3, atol=1e-6)


def test_layer_states_its_multiple_of_the_limit() -> None:
    for b, n in ((4, 4), (16, 8), (64, 8)):
        recipe = rc.Recipe(
            memory=DEEP, algorithm=GD(batch_size=b, normalized_steps=True, batch_overlap="measured")
        )
        limit = step_limit(recipe)
        assert limit is not None and limit.batch_size == n
        layer = rc.MemoryLayer(8, 2, recipe)
        inputs = layer.memory_inputs(torch.randn(1, 5, 8))
        share = layer.gates["lr"](torch.zeros(1, 5, 8))
        torch.testing.assert_close(share, torch.full_like(share, 0.5))
        assert inputs.gates["lr"].max() < 2 / n


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes(mode: type) -> None:
    recipe = RECIPES["momentum"]
    x = similar_keys(generate.inputs(recipe, T=9))
    y, _ = generate.run_recall(recipe, x)
    with mode():
        _, state = generate.run_recall(recipe, x.slice_tokens(0, 5))
    last, _ = generate.run_recall(recipe, x.slice_tokens(5, 9), state=state)
    assert generate.relative_error(last, y[:, 5:]) < 1e-10
    low = x.map_tensors(lambda a: a.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert generate.relative_error(generate.run_recall(recipe, low)[0].double(), y) < 1e-5


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (GD(batch_size=4, batch_overlap="measured"), "set normalized_steps=True"),
        (
            GD(batch_size=4, reduction="mean", normalized_steps=True, batch_overlap="measured"),
            "reduction='mean' averages",
        ),
        (Unrated(), "it declares none: give it a field lr"),
    ],
)
def test_nonlinear_steps_are_refused(algorithm: rc.Algorithm, why: str) -> None:
    with pytest.raises(rc.RecipeError, match=why):
        rc.Recipe(memory=DEEP, algorithm=algorithm)


def test_explain_states_the_measured_limit() -> None:
    write = rc.explain(RECIPES["momentum"], full=True).write_equations
    assert "η_t r_t ρ_t" in write[0]
    assert "r_t = max(0, u_t),   u_t = 1 − Σ_j |cos(k_t, k_j)| u_j / 4" in write[1]
