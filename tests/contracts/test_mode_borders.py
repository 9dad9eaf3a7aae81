"""Combinations of modes: states that change mode, checkpoints, and torch's kernels."""

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

# Least squares, local polynomials, and scaled dot-product attention on a CPU.
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


def differentiate_twice(name: str, x: generate.Inputs) -> dict[str, Tensor]:
    """Return gradients of the squared gradient of the outputs."""
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
            differentiate_twice(name, inputs(name))
    else:
        differentiate_twice(name, inputs(name))


@pytest.mark.parametrize("name", sorted(PLATFORM))
def test_math_kernel_has_second_derivatives(name: str) -> None:
    """Torch selects the kernel, and only fused kernels lack a second derivative."""
    x = inputs(name)
    with sdpa_kernel(SDPBackend.MATH):
        result = differentiate_twice(name, x)

        def squared(q: Tensor) -> float:
            leaves = x.replace_tensors({"q": q}).with_grad()
            y, _ = generate.run_recall(PRESETS[name], leaves)
            slopes = torch.autograd.grad(y.square().sum(), [leaves.q, leaves.k, leaves.v])
            return float(sum(g.square().sum() for g in slopes))

        direction = torch.randn(
            x.q.shape, generator=torch.Generator().manual_seed(3), dtype=x.q.dtype
        )
        h = 1e-5
        slope = (squared(x.q + h * direction) - squared(x.q - h * direction)) / (2 * h)
    assert abs(float((result["q"] * direction).sum()) - slope) < 1e-6 * max(1.0, abs(slope))


@pytest.mark.parametrize("name", generate.first_presets())
def test_training_continues_a_state_of_inference_mode(name: str) -> None:
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
        qkv = [leaves.q, leaves.k, leaves.v]
        slopes.append(torch.autograd.grad(y.square().sum(), qkv, materialize_grads=True))
    for result, expected in zip(*slopes, strict=True):
        assert generate.relative_error(result, expected) < ROUNDING


@pytest.mark.parametrize("name", ["rls", "geometric_rls", "mesa_net", "local_linear_attention",
                                  "gated_delta_net", "titans", "softmax_attention"])  # fmt: skip
def test_checkpoints_under_create_graph(name: str) -> None:
    """A checkpoint returns saved tensors once."""
    recipe, slopes = PRESETS[name], []
    for saves in (False, True):
        leaves = inputs(name).with_grad()

        def call(q: Tensor, k: Tensor, v: Tensor, x: generate.Inputs = leaves) -> Tensor:
            return rc.recall(recipe, q, k, v, x.gates, params=x.params, initial_memory=x.init)[0]

        qkv = (leaves.q, leaves.k, leaves.v)
        y = checkpoint(call, *qkv, use_reentrant=False) if saves else call(*qkv)
        slopes.append(torch.autograd.grad(y.square().sum(), qkv, create_graph=saves))
    for result, expected in zip(slopes[1], slopes[0], strict=True):
        assert generate.relative_error(result, expected) < ROUNDING


def test_read_on_the_meta_device() -> None:
    """The meta device has no autocast."""
    recipe = rc.Recipe()
    q = torch.empty(1, 3, 2, 4, device="meta")
    y = rc.read(recipe, q, initial_memory=torch.empty(2, 5, 4, device="meta"))
    assert y.shape == (1, 3, 2, 5)


def test_softmax_attention_is_one_graph() -> None:
    """Cached properties, field access and mode checks do not break the graph."""
    recipe = rc.zoo.get("softmax_attention").recipe
    x = inputs("softmax_attention", T=8).map_tensors(Tensor.float)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rc.recall(recipe, q, k, v, x.gates, params=x.params, initial_memory=x.init)[0]

    report = torch._dynamo.explain(call)(x.q, x.k, x.v)
    assert not report.break_reasons
