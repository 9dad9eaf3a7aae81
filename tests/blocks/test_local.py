"""`LocalMemories`: a memory of the text next to memories that restart with every segment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor, nn

import recollect as rc
from recollect.blocks import LocalMemories, Sequential, build, read_mixer

TOL = {"atol": 1e-10, "rtol": 1e-10}  # float64, sums of order 1
S = 6


def tokens(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, 8, dtype=torch.float64)


def batched(size: int) -> tuple[rc.Recipe, rc.LayerOptions]:
    """A delta rule whose gradients are taken at the start of inner batches."""
    algorithm = rc.algorithm.GradientDescent(batch_size=size)
    return rc.Recipe(algorithm=algorithm), loops.MEMORY


def hierarchy(layer: Any, x: Tensor) -> Tensor:
    """Li et al. 2025, eqs. 5-7, one sequence: sums of gradients at the start of a chunk."""
    first, mixer = layer.first, layer.mixer
    u = nn.functional.silu(x @ first.qkv.weight.T)
    q, k, v = (part.unflatten(-1, (2, -1)) for part in u.split(first.qkv_sizes, dim=-1))
    q, k = (torch.stack([loops.unit(z) for z in part.flatten(0, 1)]).view_as(q) for part in (q, k))
    modules = [first, *(layer.parts[f"local_{i}"] for i in range(len(mixer.local)))]
    rates = [module.gates["lr"](x[None])[0] for module in modules]
    leaves = (mixer.first, *mixer.local)
    sizes = [leaf.recipe.algorithm.batch_size for leaf in leaves]
    outputs = []
    for h in range(2):
        zero = x.new_zeros(v.shape[-1], k.shape[-1])
        W, start = [zero] * len(leaves), [zero] * len(leaves)
        heads = []
        for t in range(len(x)):
            y = x.new_zeros(v.shape[-1])
            for i, (rate, size) in enumerate(zip(rates, sizes, strict=True)):
                if i and t % S == 0:
                    W[i] = zero
                if t % size == 0:
                    start[i] = W[i]
                error = start[i] @ k[t, h] - v[t, h]
                W[i] = W[i] - rate[t, h] * torch.outer(error, k[t, h])
                query = q[t, h]
                if i and mixer.project_queries:
                    open_batch = k[t - t % size : t + 1, h]
                    query = sum(z * (z @ query) / (z @ z) for z in open_batch)
                y = y + W[i] @ query
            heads.append(loops.rms(y, first.norm.weight))
        outputs.append(torch.stack(heads))
    gate = nn.functional.silu(x @ first.output_gate.weight.T)
    return (torch.cat(outputs, -1) * gate) @ first.out.weight.T


@pytest.mark.parametrize("project", [True, False])
def test_the_layer_is_the_loop_of_its_equations(project: bool) -> None:
    mixer = LocalMemories(batched(4), [batched(2), batched(3)], segment=S, project_queries=project)
    layer = build(mixer, 8, 2).double()
    with torch.no_grad():
        layer.first.norm.weight.uniform_(0.5, 1.5)
    x = tokens(2, 19).requires_grad_()
    y = layer(x)[0]
    expected = torch.stack([hierarchy(layer, row) for row in x])
    torch.testing.assert_close(y, expected, **TOL)
    leaves, direction = [x, *layer.parameters()], torch.randn_like(y)
    ours = torch.autograd.grad((y * direction).sum(), leaves)
    theirs = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
        assert b.abs().max() > 1e-6


def small_tnt() -> Any:
    """TNT with inner batches of few tokens."""
    tnt = rc.zoo.get("tnt").mixer

    def resized(part: Any, size: int) -> Any:
        algorithm = replace(part.recipe.algorithm, batch_size=size)
        return replace(part, recipe=part.recipe.replace(algorithm=algorithm))

    local = [resized(part, size) for part, size in zip(tnt.local, (2, 3), strict=True)]
    return replace(tnt, first=resized(tnt.first, 4), local=local, segment=S)


def test_a_deep_hierarchy_is_recall_of_every_segment() -> None:
    layer = build(small_tnt(), 8, 2).double()
    x = tokens(1, 15)
    inputs = layer.first.memory_inputs(x)
    total = rc.recall(
        layer.first.recipe,
        *(inputs.q, inputs.k, inputs.v, inputs.gates),
        params=inputs.params or None,
        initial_memory=layer.first.initial_memory,
    )[0]
    for i, leaf in enumerate(layer.mixer.local):
        part, size = layer.parts[f"local_{i}"], leaf.recipe.algorithm.batch_size
        gates, params = part.gates_and_params(x, inputs.k, {})
        q = torch.zeros_like(inputs.q)
        for t in range(15):
            for z in inputs.k[:, t - t % size : t + 1].unbind(1):
                along = (z * inputs.q[:, t]).sum(-1, keepdim=True) / z.square().sum(
                    -1, keepdim=True
                )
                q[:, t] += along * z
        pieces = []
        for start in range(0, 15, S):
            at = slice(start, min(start + S, 15))
            y, _ = rc.recall(
                part.recipe,
                *(q[:, at], inputs.k[:, at], inputs.v[:, at]),
                {name: gate[:, at] for name, gate in gates.items()},
                params=params or None,
                initial_memory=part.initial_memory,
            )
            pieces.append(y)
        total = total + torch.cat(pieces, 1)
    torch.testing.assert_close(layer(x)[0], layer.first.output(total, inputs), **TOL)


def test_cost_and_state_are_those_of_the_memories() -> None:
    mixer = LocalMemories(batched(4), [batched(2)], segment=S)
    layer = build(mixer, 16, 2)
    _, state = layer(torch.randn(1, 19, 16))
    price = rc.cost(mixer, K=8, V=8, H=2, T=19)
    assert price.state_bytes == state.nbytes
    assert price.state_bytes_per_token == 0
    parts = (
        rc.cost(batched(4)[0], K=8, V=8, H=2, T=19).total,
        rc.cost(batched(2)[0], K=8, V=8, H=2, T=S, B=4).total,
        rc.cost("linear_attention", K=8, V=8, H=2, T=2, B=10).total,
    )
    assert price.total == sum(parts)


def test_explain_prints_the_hierarchy() -> None:
    text = str(rc.explain("tnt"))
    assert "V and W^i learn (k_t, v_t); W^i restarts every 2048 tokens" in text
    assert "P^i_t = Σ k kᵀ/‖k‖² over the open inner batch, of 8, 16 tokens" in text
    assert "y_t = V_t(q_t) + Σ_i W^i_t(P^i_t q_t)" in text


def test_it_is_saved_as_data() -> None:
    mixer = small_tnt()
    assert read_mixer(mixer.to_dict()) == mixer
    assert mixer.map_leaves(lambda leaf: leaf) == mixer


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LocalMemories("gla", [], segment=4), "needs at least one mixer"),
        (lambda: LocalMemories(Sequential("gla"), ["gla"], segment=4), "is a composition"),
        (lambda: LocalMemories("gla", ["delta_product"], segment=4), "use updates_per_token=1"),
        (lambda: LocalMemories("gla", ["rg_lru"], segment=4), "one weight per channel"),
        (lambda: LocalMemories("ffn_relu", ["gla"], segment=4), "is never written"),
        (lambda: LocalMemories("gla", ["oja"], segment=4), "set project_queries=False"),
        (
            lambda: LocalMemories("titans", ["titans"], segment=24),
            "a multiple of the batch_size=16",
        ),
    ],
)
def test_a_composition_that_is_impossible_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        make()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
