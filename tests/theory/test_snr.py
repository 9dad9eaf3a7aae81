"""Retrieval noise: closed forms, sampling of kernels and sampling of whole recipes agree."""

from __future__ import annotations

import math

import pytest
import torch

import recollect as rc
from recollect.theory import (
    Sampled,
    averaged_inverse_snr,
    inverse_snr,
    kernel_inverse_snr,
    measured_inverse_snr,
    min_key_dim,
    recipe_kernel,
    truncation_order,
)

KERNELS = ["linear", "relu", "exp", "solu"]


def kappa(kernel: str, tau: float):
    return {
        "linear": lambda x: x,
        "relu": lambda x: x.clamp_min(0),
        "exp": lambda x: (x / tau).exp(),
        "solu": lambda x: x * (x / tau).exp(),
    }[kernel]


def hebbian(features: rc.features.Features) -> rc.Recipe:
    return rc.Recipe(
        features=features,
        bias=rc.bias.DotProduct(),
        algorithm=rc.algorithm.GradientDescent(lr=1.0),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size", "tau"), [(16, None), (9, 6.0)])
def test_closed_forms_agree_with_sampled_kernels(kernel, size: int, tau: float | None) -> None:
    """AM 10 with X ~ N(0, K): within five standard errors of 200,000 products."""
    g = torch.Generator().manual_seed(size)
    f = kappa(kernel, tau or math.sqrt(size))
    result = kernel_inverse_snr(f, num_distractors=50, size=size, generator=g, trials=200_000)
    expected = inverse_snr(kernel, num_distractors=50, size=size, temperature=tau)
    assert result.is_within(expected), (result, expected)
    assert result.error < 0.1 * expected, "sharp enough to tell"
    assert not result.is_within(1.6 * expected)


FEATURES = {
    "linear": rc.features.LinearKernel(),
    "relu": rc.features.ReluKernel(),
    "exp": rc.features.Exponential(),
    "solu": rc.features.Solu(temperature=6.0),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_closed_forms_agree_with_recipes(kernel) -> None:
    """Whole memories, written by rc.recall and read once: five standard errors of 400 trials."""
    recipe = hebbian(FEATURES[kernel])
    known = recipe_kernel(recipe, 16)
    assert known is not None and known[0] == kernel
    g = torch.Generator().manual_seed(1)
    result = measured_inverse_snr(recipe, num_distractors=40, K=16, V=8, generator=g, trials=400)
    expected = inverse_snr(kernel, num_distractors=40, size=16, temperature=known[1])
    assert result.is_within(expected), (result, expected)
    assert result.error < 0.3 * expected


def test_the_error_is_that_of_repeated_measurements() -> None:
    """Forty measurements have the spread of their standard errors, as far as forty determine it."""
    recipe, g = hebbian(rc.features.Identity()), torch.Generator().manual_seed(0)
    runs = [
        measured_inverse_snr(recipe, num_distractors=10, K=8, V=4, generator=g, trials=100)
        for _ in range(40)
    ]
    values = torch.tensor([run.value for run in runs])
    claimed = sum(run.error for run in runs) / len(runs)
    assert 0.6 < float(values.std()) / claimed < 1.5
    assert Sampled(value=float(values.mean()), error=claimed / 40**0.5, trials=4000).is_within(
        10 / 8
    )


def test_other_recipes_are_measured() -> None:
    """Least squares and softmax retrieve with less noise than the Hebbian rule."""

    def of(name: str, **gates: float) -> float:
        g = torch.Generator().manual_seed(2)
        recipe = rc.zoo.get(name).recipe
        options = {"num_distractors": 8, "K": 16, "V": 8, "generator": g, "trials": 200}
        return measured_inverse_snr(recipe, gates=gates, **options).value  # type: ignore[arg-type]

    linear = of("linear_attention")
    assert of("rls") < 0.05 * linear
    assert of("softmax_attention") < 0.1 * linear
    with pytest.raises(rc.RecipeError, match="gate 'speed' is unknown"):
        of("delta_net", speed=1.0)


def test_kernels_are_recognised_by_their_values() -> None:
    assert recipe_kernel(hebbian(rc.features.Identity()), 64) == ("linear", None)
    kernel, tau = recipe_kernel(hebbian(rc.features.Exponential(temperature=3.0)), 64) or ("", 0)
    assert kernel == "exp" and tau == pytest.approx(3.0)
    assert recipe_kernel(hebbian(rc.features.Exponential()), 64)[1] == pytest.approx(8.0)  # type: ignore[index]
    for other in (
        hebbian(rc.features.Round()),
        hebbian(rc.features.EluPlusOne()),
        hebbian(rc.features.Gaussian()),
        rc.Recipe(),
        rc.zoo.get("softmax_attention").recipe,
        rc.zoo.get("retnet").recipe,
        rc.zoo.get("titans").recipe,
    ):
        assert recipe_kernel(other, 64) is None


def test_the_size_that_a_kernel_needs() -> None:
    """Linear takes K ~ N, exp takes K ~ log² N at τ = √K."""
    for N in (100, 10_000):
        for kernel in ("linear", "relu"):
            size = min_key_dim(kernel, num_distractors=N, level=0.01)
            assert inverse_snr(kernel, num_distractors=N, size=int(size)) == pytest.approx(0.01)
        size = min_key_dim("exp", num_distractors=N, level=0.01)
        noise = N * math.exp(-2 * (math.sqrt(size) - 1))  # the closed form at a size of any value
        assert noise == pytest.approx(0.01)
        fixed = min_key_dim("exp", num_distractors=N, level=0.01, temperature=4.0)
        assert N * math.exp(-2 * 3 * fixed / 16) == pytest.approx(0.01)
    roots = [math.sqrt(min_key_dim("exp", num_distractors=10.0**e, level=0.01)) for e in (2, 4, 6)]
    assert roots[2] - roots[1] == pytest.approx(roots[1] - roots[0])
    with pytest.raises(ValueError, match="no closed form"):
        min_key_dim("solu", num_distractors=9, level=0.1)
    with pytest.raises(ValueError, match="above 1"):
        min_key_dim("exp", num_distractors=9, level=0.1, temperature=1.0)


def test_two_is_the_most_precise_temperature() -> None:
    """AM: lower is more precise while above 1. That holds down to 2, and no further."""
    noise = {
        tau: inverse_snr("exp", num_distractors=10, size=16, temperature=tau)
        for tau in (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
    }
    assert noise[8.0] > noise[4.0] > noise[3.0] > noise[2.0] < noise[1.5] < noise[1.0]
    assert noise[1.0] == 10
    assert inverse_snr("exp", num_distractors=10, size=16, temperature=0.9) > 10
    g = torch.Generator().manual_seed(0)
    for tau in (3.0, 4.0, 8.0):
        f = kappa("exp", tau)
        result = kernel_inverse_snr(f, num_distractors=10, size=4, generator=g, trials=100_000)
        assert result.is_within(inverse_snr("exp", num_distractors=10, size=4, temperature=tau))


@pytest.mark.parametrize(
    ("kernel", "sliced"),
    [("linear", True), ("linear", False), ("relu", True), ("exp", True), ("solu", True)],
)
def test_averaged_heads(kernel, sliced: bool) -> None:
    """Independent keys per head, shared values, and the mean of the heads' reads."""
    N, K, V, heads, trials = 30, 16, 8, 4, 500
    size = K // heads if sliced else K
    g = torch.Generator().manual_seed(3)
    f = kappa(kernel, math.sqrt(size))
    v = torch.randn(trials, N, V, generator=g, dtype=torch.float64)
    read = torch.zeros(trials, V, dtype=torch.float64)
    for _ in range(heads):
        x = torch.randn(trials, N, generator=g, dtype=torch.float64) * math.sqrt(size)
        read += torch.einsum("tn,tnv->tv", f(x), v) / heads
    noise = read.square().sum(-1) / V / float(f(torch.tensor(float(size)).double())) ** 2
    result = Sampled(
        value=float(noise.mean()), error=float(noise.std()) / trials**0.5, trials=trials
    )
    expected = averaged_inverse_snr(kernel, num_distractors=N, size=K, heads=heads, sliced=sliced)
    assert result.is_within(expected), (result, expected)
    if sliced and kernel == "linear":
        assert expected == pytest.approx(inverse_snr("linear", num_distractors=N, size=K))
    if kernel == "exp":
        assert expected > 5 * inverse_snr("exp", num_distractors=N, size=K), (
            "slices are less precise"
        )
        many = averaged_inverse_snr("exp", num_distractors=N, size=K, heads=10**6, sliced=False)
        one = inverse_snr("exp", num_distractors=N, size=K)
        assert many == pytest.approx(one / math.e, rel=1e-4), "the mean does not average out"
    with pytest.raises(ValueError, match="do not divide"):
        averaged_inverse_snr("linear", num_distractors=1, size=16, heads=3)


def test_end_of_the_exponential_series() -> None:
    """AM's note: in half precision around the 7th to 8th order."""
    assert truncation_order(2.0, 2.0**-8) == 7
    assert truncation_order(3.0, 2.0**-8) == 8
    assert truncation_order(0.0, 0.1) == 0
    for largest, tolerance in ((1.0, 1e-3), (3.0, 1e-2), (5.0, 1e-6)):
        order = truncation_order(largest, tolerance)

        def remainder(m: int, x: float = largest) -> float:
            series = sum(x**i / math.factorial(i) for i in range(m + 1))
            return (math.exp(x) - series) / math.exp(x)

        assert remainder(order) <= tolerance < remainder(order - 1)
    with pytest.raises(ValueError, match="tolerance > 0"):
        truncation_order(1.0, 0.0)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="kernel must be one of"):
        inverse_snr("cosine", num_distractors=1, size=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size ≥ 1"):
        inverse_snr("exp", num_distractors=1, size=0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        inverse_snr("exp", num_distractors=1, size=2, temperature=0.0)
