"""Functions that stay finite at their singular points."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recollect.numerics import safe_divide, safe_log, safe_pow, safe_sqrt

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], float]] = {
    "sqrt": (safe_sqrt, torch.sqrt, 0.0),
    "log": (safe_log, torch.log, -torch.inf),
    "pow": (lambda x: safe_pow(x, 0.5), lambda x: x.pow(0.5), 0.0),
    "divide": (lambda x: safe_divide(3.0, x), lambda x: 3.0 / x, 0.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives_at_and_away_from_zero(name: str) -> None:
    safe, plain, limit = FUNCTIONS[name]
    x = torch.tensor([0.0, 0.25, 2.0], dtype=torch.float64, requires_grad=True)
    y, expected = safe(x), plain(x)
    assert y[0] == limit
    for _ in range(3):
        torch.testing.assert_close(y[1:], expected[1:], rtol=0, atol=0)
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad(expected[1:].sum(), x, create_graph=True)
        assert y[0] == 0
    assert safe(x.detach().bfloat16()).dtype == torch.bfloat16
