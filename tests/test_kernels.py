"""Kernels against their formulas, written out entry by entry."""

from __future__ import annotations

import math

import pytest
import torch

import recollect as rc

features = rc.features
ROOT = 2.0  # √K for keys of size 4


@pytest.mark.parametrize(
    ("kernel", "formula"),
    [
        (features.Exponential(), lambda x, q, k: math.exp(x / ROOT)),
        (features.Exponential(temperature=1.5), lambda x, q, k: math.exp(x / 1.5)),
        (features.Gaussian(), lambda x, q, k: math.exp(-(math.dist(q, k) ** 2) / (2 * ROOT))),
        (features.Gaussian(bandwidth=0.7), lambda x, q, k: math.exp(-(math.dist(q, k) ** 2) / 0.7)),
        (features.LinearKernel(), lambda x, q, k: x),
        (features.ReluKernel(), lambda x, q, k: max(x, 0.0)),
        (features.SwishKernel(), lambda x, q, k: x / (1 + math.exp(-x))),
        (features.Solu(), lambda x, q, k: x * math.exp(x / ROOT)),
        (features.Solu(temperature=3.0), lambda x, q, k: x * math.exp(x / 3.0)),
        (features.Round(), lambda x, q, k: float(round(x))),
        (features.Round(decimals=1), lambda x, q, k: round(x, 1)),
    ],
    ids=lambda x: x.brief if hasattr(x, "brief") else "",
)
def test_kernels_are_their_formulas(kernel: rc.features.Kernel, formula: object) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 4, generator=g, dtype=torch.float64) for n in (5, 6))
    result = kernel.kappa(q, k)
    assert result.shape == (2, 5, 6)
    for b in range(2):
        for i, x in enumerate(q[b].tolist()):
            for j, y in enumerate(k[b].tolist()):
                product = sum(a * c for a, c in zip(x, y, strict=True))
                assert float(result[b, i, j]) == pytest.approx(formula(product, x, y), rel=1e-12)  # type: ignore[operator]


def test_gaussian_equals_exponential_for_equal_norms() -> None:
    """TTR 51: equal weights up to a factor that normalisation removes."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, 8, generator=g, dtype=torch.float64) for n in (3, 5))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    gaussian, exponential = (
        features.Gaussian().log_kappa(q, k),
        features.Exponential().log_kappa(q, k),
    )
    torch.testing.assert_close(gaussian.softmax(-1), exponential.softmax(-1), atol=1e-14, rtol=0)


def test_rounding_passes_gradients_straight_through() -> None:
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    q.requires_grad_()
    weights = torch.randn(3, 3, generator=g, dtype=torch.float64)
    for kernel in (features.Round(), features.Round(decimals=2)):
        assert torch.equal(kernel.kappa(q, k), torch.round(q @ k.T, decimals=kernel.decimals))
        (result,) = torch.autograd.grad((kernel.kappa(q, k) * weights).sum(), q)
        torch.testing.assert_close(result, weights @ k, atol=1e-14, rtol=0)


def test_kernels_that_are_not_positive_have_no_logarithm() -> None:
    with pytest.raises(NotImplementedError, match="needs a positive kernel"):
        features.Round().log_kappa(torch.ones(1, 2), torch.ones(1, 2))
