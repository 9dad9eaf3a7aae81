"""Feed-forward networks: the module, the plain network, and `rc.read` over its pairs are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.layer import FeedForward

D, TOL = 12, {"atol": 1e-12, "rtol": 1e-10}


def build(name: str, heads: int = 1) -> tuple[FeedForward, Tensor]:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(D, heads).double()
    assert isinstance(layer, FeedForward)
    return layer, torch.randn(2, 7, D, dtype=torch.float64)


def relu(layer: FeedForward, x: Tensor) -> Tensor:
    return functional.relu(x @ layer.keys[0].T) @ layer.values[0]


def swiglu(layer: FeedForward, x: Tensor) -> Tensor:
    gate = x @ layer.gates["gate_key"][0].T
    return (gate * functional.silu(x @ layer.keys[0].T)) @ layer.values[0]


def mixture(layer: FeedForward, x: Tensor) -> Tensor:
    """Expert by expert: 16 pairs each, the two best by the router, weighted by their softmax."""
    scores = x @ layer.gates["router"][0].T
    best = scores.topk(2, dim=-1)
    share = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1))
    y = torch.zeros_like(x)
    for e in range(scores.shape[-1]):
        mine = slice(16 * e, 16 * (e + 1))
        expert = functional.relu(x @ layer.keys[0, mine].T) @ layer.values[0, mine]
        y = y + share[..., e, None] * expert
    return y


def normalized(layer: FeedForward, x: Tensor) -> Tensor:
    return (x @ layer.keys[0].T / D**0.5).softmax(-1) @ layer.values[0]


NETWORKS = {
    "ffn_relu": relu,
    "ffn_swiglu": swiglu,
    "ffn_moe": mixture,
    "ffn_normalized": normalized,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("heads", [1, 3])
def test_equals_the_plain_network(name: str, heads: int) -> None:
    layer, x = build(name, heads)
    y, state = layer(x)
    torch.testing.assert_close(y, NETWORKS[name](layer, x), **TOL)
    assert state is not None
    assert state.position.tolist() == [7, 7]
    want = torch.autograd.grad(NETWORKS[name](layer, x).square().sum(), list(layer.parameters()))
    result = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    for a, b in zip(result, want, strict=True):
        torch.testing.assert_close(a, b, **TOL)


def test_several_heads_read_their_slices() -> None:
    layer, x = build("ffn_multi_head", 3)
    slices = [
        functional.relu(part @ k.T) @ v
        for part, k, v in zip(x.chunk(3, dim=-1), layer.keys, layer.values, strict=True)
    ]
    assert layer.out is not None
    torch.testing.assert_close(layer(x)[0], layer.out(torch.cat(slices, dim=-1)), **TOL)


@pytest.mark.parametrize("name", [*NETWORKS, "ffn_multi_head"])
def test_equals_a_read_over_persistent_pairs(name: str) -> None:
    layer, x = build(name, 3)
    q = x.unflatten(-1, (layer.num_heads, layer.head_dim))
    gates = {name: q for part in layer.recipe.context.restrictions for name in part.query_gates}
    y = rc.read(layer.recipe, q, gates=gates, initial_memory=layer.initial_associations()).flatten(
        2
    )
    y = y if layer.out is None else layer.out(y)
    torch.testing.assert_close(layer(x)[0], y, **TOL)


def test_bundle_equals_pairs_before_the_first_token() -> None:
    """recall from a bundle equals recall of the pairs and then of the tokens."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 9, 2, n, generator=g, dtype=torch.float64) for n in (4, 4, 3))
    for name in ("softmax_attention", "moba", "local_linear_attention"):
        recipe = rc.zoo.get(name).recipe
        pairs = (k[:1, :5].expand(2, -1, -1, -1), v[:1, :5].expand(2, -1, -1, -1))
        _, state = rc.recall(recipe, q[:, :5], *pairs)
        want, _ = rc.recall(recipe, q[:, 5:], k[:, 5:], v[:, 5:], state=state)
        init = (k[0, :5].transpose(0, 1), v[0, :5].transpose(0, 1))
        y, _ = rc.recall(recipe, q[:, 5:], k[:, 5:], v[:, 5:], initial_memory=init)
        torch.testing.assert_close(y, want, **TOL)


def test_errors() -> None:
    recipe = rc.zoo.get("ffn_swiglu").recipe
    q = torch.randn(1, 3, 1, 4)
    five, six = torch.ones(1, 5, 4), torch.ones(1, 6, 4)
    with pytest.raises(rc.RecipeError, match="tuple of associations"):
        rc.read(recipe, q, gates={"gate_query": q}, initial_memory=five)
    with pytest.raises(rc.RecipeError, match="tuple of keys, values, gate_key"):
        rc.read(recipe, q, gates={"gate_query": q}, initial_memory=(five, five))
    with pytest.raises(rc.RecipeError, match="values must have shape"):
        rc.read(recipe, q, gates={"gate_query": q}, initial_memory=(five, six, five))
    with pytest.raises(rc.RecipeError, match="is written"):
        rc.zoo.get("delta_net").build(8, 2, options=rc.LayerOptions(persistent=4.0))
    with pytest.raises(rc.RecipeError, match="conv_size=0"):
        rc.zoo.get("ffn_relu").build(8, 2, options=rc.LayerOptions(persistent=4.0))
