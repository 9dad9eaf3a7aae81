"""The five maps: the inputs of each output, and the attention by a plain loop."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from recollect.tasks import MappingConfig, draw_mapping
from recollect.tasks.learnability import MappingName


def draw(name: str, seed: int = 0, **sizes: int):
    config = MappingConfig(name=name, **({"size": 6, "length": 24, "rank": 2, "window": 4} | sizes))  # type: ignore[arg-type]
    return draw_mapping(config, 2, torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(seed: int, length: int = 24, d: int = 6):
    """Return the numbers of one generator, in order: inputs, the network, q, k and v."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, d, generator=g, dtype=torch.float64)
    return x, [torch.randn(2, d, d, generator=g, dtype=torch.float64) / d**0.5 for _ in range(5)]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def test_low_rank_maps_are_linear_of_that_rank() -> None:
    result = draw("low_rank", length=40)
    for x, y in zip(result.inputs, result.outputs, strict=True):
        W = torch.linalg.lstsq(x, y).solution
        torch.testing.assert_close(x @ W, y, atol=1e-10, rtol=0)
        assert torch.linalg.matrix_rank(W, rtol=1e-8) == 2


def test_mlp_maps_inputs_separately() -> None:
    x, (up_proj, down, *_) = weights(3)
    result = draw("mlp", seed=3)
    for row in range(2):
        for t in range(24):
            by_hand = gelu(x[row, t] @ up_proj[row]) @ down[row]
            torch.testing.assert_close(result.outputs[row, t], by_hand, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "window"), [("attention", 24), ("sliding", 4)])
def test_attention_by_a_loop(name: str, window: int) -> None:
    x, (up_proj, down, wq, wk, wv) = weights(5)
    result = draw(name, seed=5)
    inputs = draw("attention_inputs", seed=5)
    assert torch.equal(result.inputs, x)
    for row in range(2):
        q, k, v = (x[row] @ w[row] for w in (wq, wk, wv))
        for t in range(24):
            scores = {i: float(q[t] @ k[i]) / 6**0.5 for i in range(max(0, t - window + 1), t + 1)}
            total = sum(math.exp(s) for s in scores.values())
            a = sum(math.exp(s) / total * v[i] for i, s in scores.items())
            out = gelu(a @ up_proj[row]) @ down[row]
            torch.testing.assert_close(result.outputs[row, t], out, atol=1e-10, rtol=0)
            if name == "attention":
                torch.testing.assert_close(inputs.inputs[row, t], a, atol=1e-10, rtol=0)
                torch.testing.assert_close(inputs.outputs[row, t], out, atol=1e-10, rtol=0)


def test_the_loss_is_relative() -> None:
    result = draw("mlp")
    assert torch.equal(result.loss(result.outputs), torch.zeros(2, 24).double())
    torch.testing.assert_close(
        result.loss(torch.zeros_like(result.outputs)), torch.ones(2, 24).double()
    )
    torch.testing.assert_close(result.loss(3 * result.outputs), 4 * torch.ones(2, 24).double())


def test_the_published_sizes() -> None:
    config = MappingConfig(name="sliding")
    assert (config.size, config.window) == (256, 512)
    assert len(get_args(MappingName)) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "linear"}, "name must be"),
        ({"rank": 9}, "at most size"),
        ({"window": 0}, "window"),
    ],
)
def test_bad_sizes_are_refused(changes: dict[str, object], message: str) -> None:
    good = {"name": "mlp", "size": 8, "length": 4, "rank": 2}
    with pytest.raises(ValueError, match=message):
        MappingConfig(**(good | changes))  # type: ignore[arg-type]
