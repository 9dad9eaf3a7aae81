"""Findings of `diagnose` about multiples of the stability limit and inner batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect import GateOptions, LayerOptions


def tokens(length: int = 24, d_model: int = 8) -> Tensor:
    return torch.randn(2, length, d_model, generator=torch.Generator().manual_seed(0))


def build(algorithm: rc.algorithm.Algorithm, **gates: GateOptions) -> rc.MemoryLayer:
    torch.manual_seed(1)
    recipe = rc.Recipe(memory=rc.memory.MLP(), algorithm=algorithm)
    return rc.MemoryLayer(8, 2, recipe, LayerOptions(gate_options=gates)).double()


def eigenvalues(layer: rc.MemoryLayer, x: Tensor, b: int, normalized: bool) -> Tensor:
    """Return those of the first batch, by autograd's gradient of every association: ``[H]``."""
    inputs = layer.memory_inputs(x.double())
    start = layer.initial_memory
    assert start is not None
    tops = torch.zeros(x.shape[0], 2, dtype=torch.float64)
    for row in range(x.shape[0]):
        for head in range(2):
            W2, W1 = (w[head].detach().clone().requires_grad_() for w in start)
            slopes, errors, rates = [], [], []
            for t in range(b):
                k, v = inputs.k[row, t, head], inputs.v[row, t, head]
                error = k + W1 @ torch.nn.functional.gelu(W2 @ k) - v
                parts = torch.autograd.grad(0.5 * error.square().sum(), [W2, W1])
                slope = torch.cat([p.flatten() for p in parts])
                rate = inputs.gates["lr"][row, t, head].detach()
                if normalized:
                    square = error.detach().square().sum()
                    rate = rate * square / (slope.square().sum() + 1e-6 * square)
                slopes.append(slope)
                errors.append(error.detach().norm())
                rates.append(rate)
            J, e, eta = torch.stack(slopes), torch.stack(errors), torch.stack(rates)
            K = (J @ J.T) / (e[:, None] * e[None, :])
            tops[row, head] = torch.linalg.eigvals(eta[:, None] * K).real.max()
    return tops.mean(0)


@pytest.mark.parametrize("normalized", [True, False])
def test_top_eigenvalue_of_the_rates_times_the_tangent_kernel(normalized: bool) -> None:
    layer, x = (
        build(rc.algorithm.GradientDescent(batch_size=6, normalized_steps=normalized)),
        tokens(),
    )
    result = rc.diagnose(layer, x.double())
    assert result.curvature is not None
    assert result.curvature.shape == (4, 2)
    want = eigenvalues(layer, x, 6, normalized)
    torch.testing.assert_close(result.curvature[0].double(), want, rtol=1e-4, atol=1e-6)


def test_equal_tokens_double_the_multiple() -> None:
    """b equal associations of multiple s make 2 s: the limit of 2 is at s = 1."""
    share = GateOptions(unit="stability_limit", source="constant", init=0.75)
    layer = build(
        rc.algorithm.Momentum(batch_size=4, normalized_steps=True, momentum=0.5), lr=share
    )
    layer.conv = None
    x = tokens(length=1).double().expand(2, 16, 8)
    result = rc.diagnose(layer, x)
    assert result.limit_multiple is not None and result.curvature is not None
    torch.testing.assert_close(result.limit_multiple, torch.full_like(result.limit_multiple, 0.75))
    torch.testing.assert_close(result.curvature[0], torch.full((2,), 1.5), rtol=1e-3, atol=1e-3)
    assert "of limit" in str(result) and "0.75" in str(result)
    assert result.to_dict()["curvature"] is not None
    assert not any("lr" in line for line in result.findings)


def test_steps_beyond_the_limit_are_found() -> None:
    large = GateOptions(source="constant", init=40.0, high=80.0)
    diagnosis = rc.diagnose(
        build(rc.algorithm.GradientDescent(batch_size=6), lr=large), tokens().double()
    )
    assert any("a multiple of the stability limit" in line for line in diagnosis.findings)


@pytest.mark.parametrize(
    "recipe",
    [
        rc.Recipe(algorithm=rc.algorithm.NLMS()),
        rc.Recipe(memory=rc.memory.MLP(), algorithm=rc.algorithm.Adam(batch_size=2)),
        rc.zoo.get("softmax_attention").recipe,
        rc.zoo.get("memora").recipe,
    ],
)
def test_nonlinear_steps_have_no_eigenvalue(recipe: rc.Recipe) -> None:
    result = rc.diagnose(rc.MemoryLayer(8, 2, recipe), tokens())
    assert result.curvature is None
    assert result.limit_multiple is None
    assert result.to_dict()["curvature"] is None


def test_steps_that_overflow_are_attributed_to_the_memory() -> None:
    """Inputs × 100 under rates that are not measured: advice that does not contradict itself."""
    torch.manual_seed(0)
    layer = rc.zoo.get("moneta_exact").build(d_model=64, num_heads=4)
    result = rc.diagnose(layer, torch.randn(1, 64, 64) * 100)
    assert result.first_fault is not None
    assert "the memory's own steps left the range of torch.float32" in result.findings[0]
    assert result.findings[0].endswith(
        "measure them (normalized_steps=True of its algorithm), or take a smaller inner batch or "
        "rate"
    )
    assert not any("larger steps" in line for line in result.findings)
