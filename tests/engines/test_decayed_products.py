"""Products under a decay per channel, computed without reading the decay's values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recollect.engines.common import decayed_products
from recollect.engines.common.coefficients import fits_float32_range
from recollect.engines.common.decayed_products import decayed_gram, decayed_matmul


@pytest.fixture(autouse=True)
def _blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decayed_products, "can_read_values", lambda _: False)


def totals(C: int, D: int, strength: float, generator: torch.Generator) -> Tensor:
    """Return sums of log decays ``[2, C, D]``, some of which forget everything (`cumulated`)."""
    logs = -strength * torch.rand(2, C, D, generator=generator, dtype=torch.float64)
    logs[:, C // 2, 0] = -1e3
    return logs.cumsum(1)


def pairs(x_total: Tensor, y_total: Tensor, *, strict: bool) -> Tensor:
    """Return exp(X_t − Y_i) of every causal pair, entry by entry ``[2, C, C, D]``."""
    C = y_total.shape[1]
    factor = torch.zeros(2, C, C, y_total.shape[2], dtype=torch.float64)
    for t in range(C):
        for i in range(t + (0 if strict else 1)):
            factor[:, t, i] = (x_total[:, t] - y_total[:, i]).exp()
    return factor


@pytest.mark.parametrize("strength", [0.01, 3.0, 60.0])
@pytest.mark.parametrize("C", [1, 2, 13, 32, 40])
@pytest.mark.parametrize(("a", "b", "strict"), [(1, 1, True), (3, 2, False), (2, 1, True)])
def test_gram(
    C: int, a: int, b: int, strict: bool, strength: float, generator: torch.Generator
) -> None:
    K = 5
    x = torch.randn(2, C * a, K, generator=generator, dtype=torch.float64).requires_grad_()
    y = torch.randn(2, C * b, K, generator=generator, dtype=torch.float64).requires_grad_()
    total = totals(C, K, strength, generator).requires_grad_()
    # A strict product may use a memory before the decay of its token.
    recorded = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1) if strict else total
    assert not fits_float32_range(total), "blind, nothing is known to be mild"
    result = decayed_gram(x, recorded, y, total, strict=strict)
    factor = pairs(recorded, total, strict=strict)
    rows_x, rows_y = x.unflatten(1, (C, a)), y.unflatten(1, (C, b))
    expected = torch.einsum("ntak,ntik,nibk->ntaib", rows_x, factor, rows_y)
    expected = expected.flatten(3, 4).flatten(1, 2)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    slopes = [
        torch.autograd.grad(out, (x, y, total), cotangent, allow_unused=True, retain_graph=True)
        for out in (result, expected)
    ]
    for mine, theirs in zip(*slopes, strict=True):
        mine, theirs = (torch.zeros(()) if s is None else s for s in (mine, theirs))
        torch.testing.assert_close(mine.double(), theirs.double().expand_as(mine))


@pytest.mark.parametrize("strength", [0.01, 60.0])
@pytest.mark.parametrize("C", [1, 13, 32])
def test_mix(C: int, strength: float, generator: torch.Generator) -> None:
    V, g, b = 3, 2, 2
    total = totals(C, V, strength, generator).requires_grad_()
    values = torch.randn(2, C * b, V, generator=generator, dtype=torch.float64).requires_grad_()
    causal = torch.ones(C, C, dtype=torch.float64).tril()
    causal = causal.repeat_interleave(g, 0).repeat_interleave(b, 1)
    scores = torch.randn(2, C * g, C * b, generator=generator, dtype=torch.float64) * causal
    result = decayed_matmul(scores, values, total)
    factor = pairs(total, total, strict=False)
    expected = torch.einsum(
        "ntgib,ntiv,nibv->ntgv",
        scores.unflatten(1, (C, g)).unflatten(3, (C, b)),
        factor,
        values.unflatten(1, (C, b)),
    ).flatten(1, 2)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(result.square().sum(), (values, total), retain_graph=True),
        torch.autograd.grad(expected.square().sum(), (values, total)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_float32_precision_at_any_decay(generator: torch.Generator) -> None:
    """exp(±sum) overflows float32 at e^88; the chunk decays by e^−1000."""
    C, K = 64, 8
    total = totals(C, K, 30.0, generator)
    x, y = (torch.randn(2, C, K, generator=generator) for _ in range(2))
    result = decayed_gram(x, total, y, total, strict=False)
    factor = pairs(total, total, strict=False)
    expected = torch.einsum("ntk,ntik,nik->nti", x.double(), factor, y.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
