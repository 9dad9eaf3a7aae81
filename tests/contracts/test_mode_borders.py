"""Where two modes meet: states that cross from one to another, checkpoints, torch's kernels."""

from __future__ import annotations

import random

import pytest
import torch
from tests.contracts import generate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import recollect as rc

ROUNDING = 1e-9
PRESETS = {name: rc.zoo.get(name).recipe for name in rc.zoo.names()}

# Least squares, local polynomials, and the platform's softmax on a CPU.
ONE_DERIVATIVE = {
    "ffn_normalized", "fox", "gated_kalmanet", "geometric_rls", "local_linear_attention",
    "local_quadratic_attention", "memory_mosaics", "mesa_net", "moba", "parallax",
    "qk_norm_attention", "rls", "sliding_window_attention", "softmax_attention",
}  # fmt: skip
PLATFORM = {
    "ffn_normalized", "fox", "memory_mosaics", "moba", "qk_norm_attention",
    "sliding_window_attention", "softmax_attention",
}  # fmt: skip


def inputs(name: str, T: int = 5) -> generate.Inputs:
    recipe = PRESETS[name]
    K, V = generate.sizes(recipe, random.Random(0))
    return generate.inputs(recipe, B=1, T=T, H=1, K=K, V=V)


def bend(name: str, x: generate.Inputs) -> dict[str, Tensor]:
    """Gradients of the squared gradient of the outputs."""
    leaves = x.with_grad()
    y, _ = generate.run_recall(PRESETS[name], leaves)
    named = {n: a for n, a in leaves.tensors().items() if n in ("q", "k", "v")}
    slopes = torch.autograd.grad(
        y.square().sum(), list(named.values()), create_graph=True, materialize_grads=True
    )
    total = sum((g.square().sum() for g in slopes), torch.zeros(()))
    result = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
    return dict(zip(named, result, strict=True))


@pytest.mark.parametrize("name", generate.first_presets())
def test_no_other_preset_refuses_a_second_derivative(name: str) -> None:
    if name in ONE_DERIVATIVE:
        with pytest.raises(rc.RecipeError, match="can be differentiated once, not its gradient"):
            bend(name, inputs(name))
    else:
        bend(name, inputs(name))


@pytest.mark.parametrize("name", sorted(PLATFORM))
def test_the_platforms_plain_kernel_can_be_differentiated_twice(name: str) -> None:
    """Which kernel runs is torch's choice: only fused ones have a single derivative."""
    x = inputs(name)
    with sdpa_kernel(SDPBackend.MATH):
        result = bend(name, x)

        def squared(q: Tensor) -> float:
            leaves = x.replace_tensors({"q": q}).with_grad()
            y, _ = generate.run_recall(PRESETS[name], leaves)
            slopes = torch.autograd.grad(y.square().sum(), [leaves.q, leaves.k, leaves.v])
            return float(sum(g.square().sum() for g in slopes))

        way = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(3), dtype=x.q.dtype)
        h = 1e-5
        slope = (squared(x.q + h * way) - squared(x.q - h * way)) / (2 * h)
    assert abs(float((result["q"] * way).sum()) - slope) < 1e-6 * max(1.0, abs(slope))


@pytest.mark.parametrize("name", generate.first_presets())
def test_a_state_made_in_inference_mode_is_trained_through(name: str) -> None:
    x = inputs(name, T=6)
    with torch.inference_mode():
        _, inside = generate.run_recall(
            PRESETS[name], x.slice_tokens(0, 3).map_tensors(torch.clone)
        )
    with torch.no_grad():
        _, outside = generate.run_recall(PRESETS[name], x.slice_tokens(0, 3))
    slopes = []
    for state in (inside, outside):
        leaves = x.slice_tokens(3, 6).with_grad()
        y, _ = generate.run_recall(PRESETS[name], leaves, state=state)
        given = [leaves.q, leaves.k, leaves.v]
        slopes.append(torch.autograd.grad(y.square().sum(), given, materialize_grads=True))
    for result, expected in zip(*slopes, strict=True):
        assert generate.relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("name", ["rls", "geometric_rls", "mesa_net", "local_linear_attention",
                                  "gated_delta_net", "titans", "softmax_attention"])  # fmt: skip
def test_checkpoints_under_create_graph(name: str) -> None:
    """A checkpoint hands saved tensors out once."""
    recipe, slopes = PRESETS[name], []
    for kept in (False, True):
        leaves = inputs(name).with_grad()

        def call(q: Tensor, k: Tensor, v: Tensor, x: generate.Inputs = leaves) -> Tensor:
            return rc.recall(recipe, q, k, v, x.gates, params=x.params, initial_memory=x.init)[0]

        given = (leaves.q, leaves.k, leaves.v)
        y = checkpoint(call, *given, use_reentrant=False) if kept else call(*given)
        slopes.append(torch.autograd.grad(y.square().sum(), given, create_graph=kept))
    for result, expected in zip(slopes[1], slopes[0], strict=True):
        assert generate.relative_error(result, expected) < ROUNDING


def test_reading_on_meta_has_a_shape() -> None:
    """A device without autocast."""
    recipe = rc.Recipe()
    q = torch.empty(1, 3, 2, 4, device="meta")
    y = rc.read(recipe, q, initial_memory=torch.empty(2, 5, 4, device="meta"))
    assert y.shape == (1, 3, 2, 5)


def test_one_graph_holds_a_call_of_softmax_attention() -> None:
    """Neither a cached property's lock, nor a look at a field, nor at a mode breaks it."""
    recipe = rc.zoo.get("softmax_attention").recipe
    x = inputs("softmax_attention", T=8).map_tensors(Tensor.float)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rc.recall(recipe, q, k, v, x.gates, params=x.params, initial_memory=x.init)[0]

    told = torch._dynamo.explain(call)(x.q, x.k, x.v)
    assert not told.break_reasons
