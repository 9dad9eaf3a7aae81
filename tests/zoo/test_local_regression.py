"""Local and kernel regression against dense solves written from TTR 43 and 48–54, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import recollect as rc

B, T, H, K, V = 2, 26, 2, 3, 4
TOL = {"atol": 1e-10, "rtol": 1e-10}
# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


Q, KEY, X = normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)
ROOT = math.sqrt(K)


def local(degree: int, ridge: float, kernel: rc.features.Kernel | None = None) -> rc.Recipe:
    return rc.Recipe(
        memory=rc.memory.LocalPolynomial(degree=degree),
        context=rc.context.KernelWeighted(kernel=kernel or rc.features.Exponential()),
        algorithm=rc.algorithm.Analytic(ridge=ridge),
    )


def per_query(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """answer(q, K, V) of every prefix, row by row and head by head."""
    y = torch.zeros(B, T, H, V, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                y[b, t, h] = answer(Q[b, t, h], KEY[b, : t + 1, h], X[b, : t + 1, h])
    return y


def basis(q: Tensor, k: Tensor, degree: int) -> Tensor:
    """[1, d] or [1, d, d_i d_j], each product as often as it occurs."""
    d = k - q
    columns = [torch.ones(len(k), dtype=torch.float64), *d.T]
    if degree == 2:
        for i in range(K):
            for j in range(i, K):
                columns.append((1.0 if i == j else math.sqrt(2)) * d[:, i] * d[:, j])
    return torch.stack(columns, dim=1)


@METHODS
@pytest.mark.parametrize("degree", [1, 2])
def test_equation_52(degree: int, method: str) -> None:
    """[M0 M1] = (Vᵀ W X)(Xᵀ W X + R)⁻¹, R on the slopes in units of the total weight."""

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = (k @ q / ROOT).exp()
        Z = basis(q, k, degree)
        R = torch.eye(Z.shape[1]).double()
        R[0, 0] = 0
        A = Z.T @ torch.diag(w) @ Z + 0.3 * w.sum() * R
        return (v.T @ torch.diag(w) @ Z @ torch.linalg.inv(A))[:, 0]

    y, _ = rc.recall(local(degree, 0.3), Q, KEY, X, engine=method)
    torch.testing.assert_close(y, per_query(answer), **TOL)


@METHODS
def test_equation_54(method: str) -> None:
    """M0 = v̄ − M1 d̄: the other form, with the slopes from centred sums."""

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = (k @ q / ROOT).softmax(0)
        d = k - q
        mean_v, mean_d = w @ v, w @ d
        dv, dd = v - mean_v, d - mean_d
        slopes = (dv.T * w) @ dd @ torch.linalg.inv((dd.T * w) @ dd + 0.3 * torch.eye(K).double())
        return mean_v - slopes @ mean_d

    y, _ = rc.recall(local(1, 0.3), Q, KEY, X, engine=method)
    torch.testing.assert_close(y, per_query(answer), **TOL)


@METHODS
def test_presets_use_these_recipes(method: str) -> None:
    for name, degree in (("local_linear_attention", 1), ("local_quadratic_attention", 2)):
        assert rc.zoo.get(name).recipe == local(degree, 1.0)


def test_a_large_ridge_is_softmax_attention() -> None:
    y, _ = rc.recall(local(1, 1e12), Q, KEY, X)
    plain, _ = rc.recall(rc.zoo.get("softmax_attention").recipe, Q, KEY, X)
    torch.testing.assert_close(y, plain, atol=1e-9, rtol=0)  # the slopes fall with 1/λ


@METHODS
@pytest.mark.parametrize("kernel", [rc.features.Exponential(), rc.features.Gaussian(bandwidth=8.0)])
@pytest.mark.parametrize(("degree", "coefficients"), [(1, 4), (2, 10)])
def test_polynomials_are_reproduced_without_a_ridge(
    degree: int, coefficients: int, kernel: rc.features.Kernel, method: str
) -> None:
    """p = 1 any affine map, p = 2 any quadratic, once there are as many tokens as coefficients."""
    M0, M1, M2 = normal(V, seed=5), normal(V, K, seed=6), normal(V, K, K, seed=7)

    def truth(x: Tensor) -> Tensor:
        y = M0 + x @ M1.T
        return y + torch.einsum("...i,vij,...j->...v", x, M2, x) if degree == 2 else y

    y, _ = rc.recall(local(degree, 0.0, kernel), Q, KEY, truth(KEY), engine=method)
    later = slice(2 * coefficients, None)
    # The solve squares the basis's condition, about 1e3 here.
    torch.testing.assert_close(y[:, later], truth(Q)[:, later], atol=1e-7, rtol=1e-7)
    # Even with the minimal number of points, which can be badly placed.
    at = coefficients - 1
    torch.testing.assert_close(y[:, at], truth(Q)[:, at], atol=1e-3, rtol=1e-3)


@METHODS
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_first_output_is_the_first_value(degree: int, method: str) -> None:
    """The ridge does not apply to the constant, so a single association is repeated."""
    y, _ = rc.recall(local(degree, 0.5), Q[:, :1], KEY[:, :1], X[:, :1], engine=method)
    torch.testing.assert_close(y, X[:, :1], **TOL)


def test_rotation_of_queries_and_keys_changes_nothing() -> None:
    """A rotation of queries and keys does not change the norm of the slopes."""
    rotation = torch.linalg.qr(normal(K, K, seed=8)).Q
    for degree in (1, 2):
        y, _ = rc.recall(local(degree, 0.4), Q, KEY, X)
        turned, _ = rc.recall(local(degree, 0.4), Q @ rotation, KEY @ rotation, X)
        torch.testing.assert_close(turned, y, **TOL)


def test_not_causal_reads_after_everything() -> None:
    for recipe in (local(1, 0.2), local(2, 0.2), regression(rc.features.Gaussian())):
        y, state = rc.recall(recipe, Q, KEY, X, causal=False)
        last, _ = rc.recall(recipe, Q, KEY, X)
        torch.testing.assert_close(y[:, -1], last[:, -1], **TOL)
        torch.testing.assert_close(rc.read(recipe, Q, state=state), y, **TOL)
        want, _ = rc.recall(recipe, Q, KEY, X, causal=False, engine="reference")
        torch.testing.assert_close(y, want, **TOL)


# -- kernel regression -----------------------------------------------------------------------------


def regression(kernel: rc.features.Kernel, ridge: float = 0.4, **prefix: object) -> rc.Recipe:
    return rc.Recipe(
        features=kernel,
        context=rc.context.Prefix(**prefix),  # type: ignore[arg-type]
        algorithm=rc.algorithm.Analytic(ridge=ridge),
    )


@METHODS
def test_equation_43(method: str) -> None:
    """Vᵀ (κ(K, K) + λ)⁻¹ κ(K, q) by one inverse per prefix."""

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gram = (-torch.cdist(k, k).square() / (2 * ROOT)).exp() + torch.eye(len(k)).double()
        near = (-(k - q).square().sum(-1) / (2 * ROOT)).exp()
        return v.T @ torch.linalg.inv(gram) @ near

    y, _ = rc.recall(rc.zoo.get("kernel_regression_attention").recipe, Q, KEY, X, engine=method)
    torch.testing.assert_close(y, per_query(answer), **TOL)


@METHODS
def test_a_linear_kernel_is_ridge_least_squares(method: str) -> None:
    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        W = v.T @ k @ torch.linalg.inv(k.T @ k + 0.4 * torch.eye(K).double())
        return W @ q

    y, _ = rc.recall(regression(rc.features.LinearKernel()), Q, KEY, X, engine=method)
    torch.testing.assert_close(y, per_query(answer), **TOL)


@METHODS
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_weights_and_decay_of_the_prefix(decay: float, method: str) -> None:
    """min Σ γ^(t−i) w_i ½e_i² + ½λ‖W‖², in the primal; a decay runs in the reference."""
    weight = normal(B, T, H, seed=9).abs()

    def run(b: int, h: int, t: int) -> Tensor:
        k, v, w = KEY[b, : t + 1, h], X[b, : t + 1, h], weight[b, : t + 1, h]
        w = w * decay ** torch.arange(t, -1, -1).double()
        gram = (k.T * w) @ k + 0.4 * torch.eye(K).double()
        return (v.T * w) @ k @ torch.linalg.inv(gram) @ Q[b, t, h]

    want = torch.stack(
        [
            torch.stack([torch.stack([run(b, h, t) for h in range(H)]) for t in range(T)])
            for b in range(B)
        ]
    )
    recipe = regression(rc.features.LinearKernel(), decay=decay, weight="input")
    y, _ = rc.recall(recipe, Q, KEY, X, {"weight": weight}, engine=method)
    torch.testing.assert_close(y, want, **TOL)
    assert rc.explain(recipe).engine == ("kernel" if decay == 1.0 else "reference")


def test_the_exponential_is_ridge_least_squares_on_taylor_features() -> None:
    """In two dimensions exp(q·k/√2) to order 14 is exact to 1e-10: 120 explicit features."""
    q, k, v = (0.5 * normal(1, 9, 1, size, seed=s) for size, s in ((2, 1), (2, 2), (3, 3)))
    taylor = rc.features.Taylor(order=14)
    at = torch.zeros(1, 9).long()
    fq, fk = (taylor.phi(x.unsqueeze(3), {}, "key", at)[0, :, 0, 0] for x in (q, k))
    y, _ = rc.recall(regression(rc.features.Exponential()), q, k, v)
    for t in range(9):
        past = fk[: t + 1]
        W = v[0, : t + 1, 0].T @ past @ torch.linalg.inv(past.T @ past + 0.4 * torch.eye(120))
        torch.testing.assert_close(y[0, t, 0], W @ fq[t], atol=1e-8, rtol=0)


def test_value_is_recovered_as_the_ridge_falls() -> None:
    y, _ = rc.recall(regression(rc.features.Gaussian(bandwidth=0.5), 1e-10), KEY, KEY, X)
    torch.testing.assert_close(y, X, atol=1e-6, rtol=0)


def test_kernel_without_a_gram_factor_is_refused() -> None:
    with pytest.raises(rc.RecipeError, match=r"Analytic\(ridge=1\.0\)"):
        regression(rc.features.Gaussian(), 0.0)
    with pytest.raises(rc.RecipeError, match="not positive definite for"):
        regression(rc.features.ReluKernel())
    with pytest.raises(rc.RecipeError, match="Prefix"):
        regression(rc.features.Gaussian()).replace(context=rc.context.Online())
    with pytest.raises(rc.RecipeError, match="under bias"):
        regression(rc.features.Gaussian()).replace(bias=rc.bias.DotProduct())
    with pytest.raises(rc.RecipeError, match="use bias"):
        local(1, 0.1).replace(bias=rc.bias.DotProduct())


def along(size: float, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return long queries of one direction, keys 1 or more apart along it, and a mask.

    The other keys have a weight below exp(−size / √K): the fit is the value of the farthest visible
    key.
    """
    u = torch.nn.functional.normalize(normal(K, seed=11), dim=0)
    place = torch.tensor([0.0, 3.0, -2.0, 5.0, 1.0, 4.0, 7.0], dtype=torch.float64)
    aside = normal(7, K, seed=12)
    k = place[:, None] * u + aside - (aside @ u)[:, None] * u
    q = (size * u).expand(7, K)
    v = normal(7, V, seed=13)
    return q[None, :, None], k[None, :, None], v[None, :, None], v[[0, 1, 1, 3, 3, 3, 6]]


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(
    ("method", "degree", "channels"),
    [
        ("reference", 1, 5),
        ("reference", 2, 2),
        ("reference", 2, 5),
        ("kernel", 1, 5),
        ("kernel", 2, 2),
    ],
)
def test_long_queries_are_not_singular(
    method: str, degree: int, channels: int, size: float
) -> None:
    """The system has monomials of 1e24 next to the constant's 1."""
    q, k, v, recorded = along(size, channels)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y, _ = rc.recall(local(degree, 1.0), *leaves, engine=method)
    torch.testing.assert_close(y[0, :, 0], recorded, **TOL)
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), leaves))


def test_conjugate_gradients_at_long_queries() -> None:
    q, k, v, _ = along(1e6, 5)
    with pytest.raises(ValueError, match=r"lose their digits.*engine='reference'"):
        rc.recall(local(2, 1.0), q, k, v)


def test_ridge_lost_in_rounding() -> None:
    """Six keys determine five slopes of nine, and the ridge determines the others."""
    k, v = normal(1, 6, 1, 3, seed=14).float(), normal(1, 6, 1, V, seed=15).float()
    for method in ("reference", "kernel"):
        recipe = local(2, 1e-30) if method == "reference" else local(3, 1e-30)
        with pytest.raises(ValueError, match=r"a ridge of 1e-30 is lost in torch\.float64"):
            rc.recall(recipe, 0 * k, k, v, engine=method)


@METHODS
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("length", [1.0, 30.0, 1000.0])
def test_float32_at_long_queries(length: float, degree: int, method: str) -> None:
    """Monomials of k − q are as large as q², so float32 would round off the ridge."""
    recipe, low = local(degree, 1e-2), [x.float() for x in (length * Q, KEY, X)]
    expected, _ = rc.recall(recipe, *(x.double() for x in low), engine="reference")
    try:
        y, _ = rc.recall(recipe, *low, engine=method)
    except ValueError as error:  # conjugate gradients, whose slopes are differences
        sentence = str(error)
    else:
        assert float((y - expected).norm() / expected.norm()) < 1e-4
        return
    assert method != "reference"
    assert "normalise q and k" in sentence


def test_geometric_rls_is_a_weighted_ridge_solution() -> None:
    """M_t = Vᵀ Γ K (Kᵀ Γ K + ρ_t I)⁻¹ (TTR 15); the ridge decays until its first renewal."""
    g = torch.Generator().manual_seed(5)
    size, tokens = 4, 30  # the ridge is renewed every 64 tokens
    q, k, v = torch.randn(3, 1, tokens, 1, size, generator=g, dtype=torch.float64)
    gamma = 0.9 + 0.1 * torch.rand(1, tokens, 1, generator=g, dtype=torch.float64)
    ridge = torch.tensor([0.7], dtype=torch.float64)
    recipe = rc.zoo.get("geometric_rls").recipe
    y, _ = rc.recall(recipe, q, k, v, {"log_decay": gamma.log()}, params={"ridge": ridge})
    outputs = []
    for t in range(tokens):
        weights = torch.stack([gamma[0, i + 1 : t + 1, 0].prod() for i in range(t + 1)])
        K, V = k[0, : t + 1, 0], v[0, : t + 1, 0]
        gram = K.T @ (weights[:, None] * K) + ridge * gamma[0, : t + 1, 0].prod() * torch.eye(size)
        M = torch.linalg.solve(gram, K.T @ (weights[:, None] * V)).T
        outputs.append(M @ q[0, t, 0])
    torch.testing.assert_close(y[0, :, 0], torch.stack(outputs), atol=1e-10, rtol=1e-10)
