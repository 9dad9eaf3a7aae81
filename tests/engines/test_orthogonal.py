"""Newton–Schulz against its definition, matrix by matrix, with the paper's order of products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recollect.choices.algorithm import muon
from recollect.choices.algorithm.muon import newton_schulz, newton_schulz_flops
from recollect.choices.matmul_precision import matmul_precision


def _defined(S: Tensor, steps: int) -> Tensor:
    """By singular values: X ← aX + bXXᵀX + c(XXᵀ)²X maps each σ to aσ + bσ³ + cσ⁵."""
    U, sigma, Vh = torch.linalg.svd(S, full_matrices=False)
    sigma = sigma / (sigma.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return U @ torch.diag(sigma) @ Vh


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("steps", [1, 5])
def test_singular_values_follow_the_polynomial(shape: tuple[int, int], steps: int) -> None:
    g = torch.Generator().manual_seed(0)
    S = torch.randn(2, 3, 4, *shape, dtype=torch.float64, generator=g)  # rows, heads, tokens
    result = newton_schulz(S, steps)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        expected = _defined(S[tuple(index)], steps)
        assert (result[tuple(index)] - expected).abs().amax() < 1e-12


@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_products_are_of_the_smaller_side(steps: int) -> None:
    """Three iterations share one Gram matrix and one product with the wide side."""
    s, wide, many = 4, 16, 3
    borders, last = divmod(steps, 3)
    counts = [3] * borders + [last] * (last > 0)
    flops = sum(4 * s * s * wide + (4 * n - 3) * 2 * s**3 for n in counts)
    for shape in ((s, wide), (wide, s)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(many, *shape), steps)
        assert (
            counter.get_total_flops() == many * flops == many * newton_schulz_flops(*shape, steps)
        )


@pytest.mark.parametrize("spectrum", ["normal", "of low rank", "steep"])
def test_joint_iterations_are_as_exact_in_float32_as_single_ones(spectrum: str) -> None:
    g = torch.Generator().manual_seed(0)
    S = torch.randn(4, 32, 128, generator=g)
    if spectrum == "of low rank":
        S = torch.randn(4, 32, 8, generator=g) @ torch.randn(4, 8, 128, generator=g)
    if spectrum == "steep":
        U, _, Vh = torch.linalg.svd(S, full_matrices=False)
        S = U * 10 ** torch.linspace(0, -6, 32) @ Vh
    expected = _defined(S[0].double(), 5)
    assert (newton_schulz(S, 5)[0] - expected).abs().amax() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1.0, 1e4, 1e30])
def test_direction_does_not_depend_on_size(dtype: torch.dtype, size: float) -> None:
    """The direction does not depend on the size of S, once 1e-7 is negligible against ‖S‖."""
    g = torch.Generator().manual_seed(0)
    S = (size * torch.randn(2, 4, 12, generator=g, dtype=torch.float64)).to(dtype)
    if not S.isfinite().all():
        return
    S.requires_grad_()
    X = newton_schulz(S, 5)
    (slope,) = torch.autograd.grad(X.double().square().sum(), S)
    assert X.dtype == dtype
    assert X.isfinite().all()
    assert slope.isfinite().all()
    expected = torch.stack([_defined(s.double(), 5) for s in S.detach()])
    near = {torch.float16: 0.05, torch.bfloat16: 0.3, torch.float32: 1e-5}[dtype]
    assert (X - expected).abs().amax() < near


def test_half_precision_recomputes_every_gram_matrix() -> None:
    """The error of small singular values grows with the number of iterations per Gram matrix."""
    g = torch.Generator().manual_seed(0)
    S = torch.randn(2, 16, 64, generator=g)
    expected = torch.stack([_defined(s.double(), 5) for s in S])
    with matmul_precision("tf32", "cpu"), FlopCounterMode(display=False) as counter:
        result = newton_schulz(S, 5)
    assert counter.get_total_flops() == 2 * 5 * (4 * 16 * 16 * 64 + 2 * 16**3)
    assert (result - expected).abs().amax() < 1e-4


def test_is_one_graph() -> None:
    S = torch.randn(2, 4, 12, requires_grad=True)
    call = torch.compile(lambda S: newton_schulz(S, 5), backend="aot_eager", fullgraph=True)
    for X, expected in zip(
        _gradients(call, S), _gradients(lambda S: newton_schulz(S, 5), S), strict=True
    ):
        torch.testing.assert_close(X, expected, atol=1e-5, rtol=1e-4)


def _gradients(call: Callable[[Tensor], Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    X = call(S)
    (slope,) = torch.autograd.grad(X.square().sum(), S)
    return X, slope


def test_autocast_does_not_apply() -> None:
    S = torch.randn(2, 4, 12)
    with torch.autocast("cpu", torch.bfloat16):
        result = newton_schulz(S, 5)
    assert torch.equal(result, newton_schulz(S, 5))


def test_zero_stays_zero_with_a_finite_slope() -> None:
    S = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    X = newton_schulz(S, 5)
    (slope,) = torch.autograd.grad(X.sum(), S)
    assert X.abs().amax() == 0
    assert torch.isfinite(slope).all()


def test_gram_matrix_has_one_product_in_the_backward_pass() -> None:
    """Six products with the wide side, instead of autograd's eight (one for each X in XXᵀ)."""
    s, wide = 4, 16
    S = torch.randn(3, s, wide, requires_grad=True)
    X = newton_schulz(S, 5)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(X.sum(), S)
    counts = (3, 2)  # joint iterations; each of their products has two in the backward pass
    small = sum((4 * n - 3) * 4 * s**3 for n in counts)
    assert counter.get_total_flops() == 3 * (2 * 3 * 2 * s * s * wide + small)


def test_gradients_equal_those_of_singular_values() -> None:
    """Second derivatives against finite differences."""
    g = torch.Generator().manual_seed(0)
    S = torch.randn(2, 3, 5, dtype=torch.float64, generator=g, requires_grad=True)
    grad_output = torch.randn(2, 3, 5, dtype=torch.float64, generator=g)
    (result,) = torch.autograd.grad((newton_schulz(S, 5) * grad_output).sum(), S)
    expected = sum(((_defined(S[i], 5) * grad_output[i]).sum() for i in range(2)), torch.zeros(()))
    (of_defined,) = torch.autograd.grad(expected, S)
    assert (result - of_defined).abs().amax() < 1e-9 * of_defined.abs().amax()
    for steps in (1, 4):
        assert torch.autograd.gradgradcheck(lambda S, n=steps: newton_schulz(S, n), S)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func.jvp
def test_function_transforms() -> None:
    g = torch.Generator().manual_seed(0)
    S, moved = torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=g).unbind(0)
    full = newton_schulz(S, 5)
    torch.testing.assert_close(torch.vmap(lambda x: newton_schulz(x, 5))(S), full)
    _, along = torch.func.jvp(lambda x: newton_schulz(x, 5), (S,), (moved,))
    near = (newton_schulz(S + 1e-6 * moved, 5) - newton_schulz(S - 1e-6 * moved, 5)) / 2e-6
    torch.testing.assert_close(along, near, atol=1e-6, rtol=1e-6)
    each = torch.vmap(torch.func.grad(lambda x: newton_schulz(x, 5).square().sum()))(S)
    S.requires_grad_()
    (joint,) = torch.autograd.grad(newton_schulz(S, 5).square().sum(), S)
    torch.testing.assert_close(each, joint)


@pytest.mark.parametrize("tiny", [0.0, 1e-38, 1e-30, 1e-20])
def test_tiny_rows_give_no_subnormal_products(tiny: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden units without a gradient cost no time on a CPU, and their gradients are right."""
    torch.manual_seed(0)
    S = torch.randn(2, 8, 20, dtype=torch.float64)
    S[:, ::2] *= tiny
    products: list[Tensor] = []

    def recorded(X: Tensor) -> Tensor:
        products.append(X @ X.mT)
        return products[-1]

    monkeypatch.setattr(muon, "gram", recorded)
    results: list[Tensor] = []
    for dtype in (torch.float64, torch.float32):
        x = S.to(dtype).requires_grad_()
        y = newton_schulz(x, 5)
        (slope,) = torch.autograd.grad(y.sin().sum(), x)
        results += [y.detach(), slope]
    for G in products[len(products) // 2 :]:
        assert not ((G != 0) & (G.abs() < torch.finfo(G.dtype).tiny)).any()
    y, slope, y32, slope32 = results
    torch.testing.assert_close(y32.double(), y, atol=1e-5, rtol=0)
    torch.testing.assert_close(slope32.double(), slope, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps", [15, 25])
def test_rows_that_many_iterations_enlarge_are_kept(steps: int) -> None:
    torch.manual_seed(0)
    S = torch.randn(2, 8, 16, dtype=torch.float64)
    S[:, 0] *= 1e-15
    y = newton_schulz(S.float(), steps)
    torch.testing.assert_close(y.double(), newton_schulz(S, steps), atol=1e-4, rtol=0)
