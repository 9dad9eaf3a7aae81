"""Switching autoregression: the recursion, its noise and the forecast."""

from __future__ import annotations

import math

import pytest
import torch

from recollect.tasks import SwitchingConfig, switching


def noiseless(**changes: object) -> SwitchingConfig:
    return SwitchingConfig(**({"size": 6, "length": 16} | changes))  # type: ignore[arg-type]


def draw(config: SwitchingConfig, batch: int = 3, seed: int = 0):
    return switching(config, batch, torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_keys_follow_the_recursion_and_values_are_the_next_keys() -> None:
    """Without noise after the start there is only decay: 0.9 for t < T/4, then 0.999."""
    result = draw(noiseless(noise=1e-9, start="step"))
    noisy = draw(noiseless(noise=1e-9, start="stationary"))
    for data in (result, noisy):
        for row in range(3):
            for t in range(16):
                following = data.q[row, t]
                if t + 1 < 16:
                    assert torch.equal(following, data.k[row, t + 1])
                    assert torch.equal(data.target[row, t], data.v[row, t + 1])
                assert torch.allclose(data.v[row, t], following / following.norm(), atol=1e-15)
    # The steps ε = (k_{t+1} − a_t k_t)/σ of the same generator do not depend on a.
    steps = {}
    for early, late in ((0.9, 0.999), (0.3, 0.5)):
        data = draw(noiseless(early_scale=early, late_scale=late, start="step"))
        rows = []
        for t in range(1, 17):  # k_1 is index 0
            a = early if t < 16 / 4 else late
            rows.append((data.q[:, t - 1] - a * data.k[:, t - 1]) / 0.02)
        steps[early] = torch.stack(rows, 1)
    torch.testing.assert_close(steps[0.9], steps[0.3], atol=1e-9, rtol=0)


@pytest.mark.parametrize("length", [4, 5, 16, 18, 256])
def test_the_switch_is_at_a_quarter(length: int) -> None:
    assert noiseless(length=length).switch_time == sum(t < length / 4 for t in range(1, length + 1))


def test_noise_has_the_requested_covariance() -> None:
    config = SwitchingConfig(size=4, length=4000, early_scale=0.0, late_scale=0.0, correlation=0.3)
    noise = draw(config, batch=5).k.flatten(0, 1) / config.noise
    count = noise.shape[0]
    result = noise.T @ noise / count
    expected = torch.full((4, 4), 0.3).double().fill_diagonal_(1.0)
    # A sample covariance has a standard error of √((1 + ρ²)/N), √(2/N) on the diagonal.
    assert (result - expected).abs().max() < 5 * math.sqrt(2 / count)


def test_a_drawn_covariance_has_a_unit_diagonal_and_differs_by_row() -> None:
    config = SwitchingConfig(
        size=3, length=20_000, early_scale=0.0, late_scale=0.0, covariance="drawn"
    )
    noise = draw(config, batch=2).k / config.noise
    result = noise.mT @ noise / 20_000
    assert (result.diagonal(dim1=1, dim2=2) - 1).abs().max() < 5 * math.sqrt(2 / 20_000)
    assert (result[0] - result[1]).abs().max() > 0.1
    assert result[:, 0, 1].abs().min() > 0.02


def test_the_start_is_stationary() -> None:
    config = SwitchingConfig(size=2, length=4, correlation=0.0)
    k = draw(config, batch=20_000).k[:, 0]
    spread = 0.02 / math.sqrt(1 - 0.9**2)
    assert abs(float(k.std()) / spread - 1) < 5 / math.sqrt(2 * 40_000)


def test_losses() -> None:
    data = draw(noiseless())
    assert torch.equal(data.loss(data.target), torch.zeros(3, 16).double())
    torch.testing.assert_close(data.loss(torch.zeros_like(data.v)), torch.ones(3, 16).double())
    by_hand = [float(((data.v[0, t + 1] - data.v[0, t]) ** 2).sum()) for t in range(15)]
    torch.testing.assert_close(data.loss(data.repeat_last)[0, :15], torch.tensor(by_hand).double())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "size must be a whole number"),
        ({"length": 3}, "length must be a whole number >= 4, not 3"),
        ({"early_scale": 1.5}, r"early_scale must be a finite number in \[0, 1\], not 1.5"),
        ({"correlation": float("nan")}, "correlation must be"),
        ({"covariance": "none"}, "covariance must be one of 'equal', 'drawn', not 'none'"),
        ({"early_scale": 1.0}, "no stationary spread"),
    ],
)
def test_bad_numbers_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noiseless(**changes)
