"""Fake and meta tensors: layers run and store none of them."""

from __future__ import annotations

import pytest
import torch
from tests.misuse.sentences import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

import recollect as rc

# Constants of rotations, monomials, sketches and activations; solvers that check numbers. One
# preset per engine is fast.
FAST = ("softmax_attention", "gated_delta_net", "titans", "rls")
OTHERS = (
    "based",
    "dijiang",
    "atlas",
    "geometric_rls",
    "mesa_net",
    "kernel_regression_attention",
    "delta_former",
)
NAMES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def _build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return rc.zoo.get(name).build(d_model=16, num_heads=2)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_run_and_are_not_stored(name: str) -> None:
    """Before a real call, which could meet their constants, and after one, which has constants."""
    x = torch.randn(1, 5, 16)
    layer = _build(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shapes, state = layer(mode.from_tensor(x))
        with torch.no_grad():
            layer(mode.from_tensor(x[:, :1]), state)
    y, _ = layer(x)
    assert type(y) is torch.Tensor and bool(y.isfinite().all()) and shapes.shape == y.shape
    with FakeTensorMode():
        fake = _build(name)
        fake(torch.randn(1, 5, 16))[0].sum().backward()
    assert torch.equal(layer(x)[0], y)


@pytest.mark.parametrize("name", NAMES)
def test_the_meta_device_has_shapes(name: str) -> None:
    with torch.device("meta"):
        layer, x = _build(name), torch.empty(2, 5, 16)
        y, state = layer(x)
        later, _ = layer(x[:, :1], state)
    assert y.is_meta and y.shape == x.shape and later.shape == (2, 1, 16)


def test_decisions_by_values_are_refused() -> None:
    with torch.device("meta"):
        layer, x = _build("titans"), torch.empty(2, 5, 16)
        says = "have shapes alone"
        refuses(lambda: layer(x, attention_mask=torch.ones(2, 5)), says, error=ValueError)
        borders = torch.tensor([0, 2, 5])
        refuses(lambda: layer(x[:1], cu_seqlens=borders), says, error=ValueError)
        state = layer(x)[1].reset(torch.empty(2, dtype=torch.bool))
        refuses(lambda: layer(x, state), "start without a state", error=ValueError)
