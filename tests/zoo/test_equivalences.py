"""Each preset against the formula or loop of its paper.

In float64 and to 1e-10: the two sides differ by rounding, and 70 tokens cross the boundary of a
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc

B, T, H, K, V = 2, 70, 2, 5, 4
TOL = {"atol": 1e-10, "rtol": 1e-10}
# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)
Step = Callable[[Tensor, int], Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


Q, RAW, X = normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)
KEY = functional.normalize(RAW, dim=-1)
LR = uniform(0.05, 0.95, B, T, H, seed=4)
ALPHA = uniform(0.7, 1.0, B, T, H, seed=5)
CHANNEL = uniform(0.7, 1.0, B, T, H, K, seed=6)
THETA = uniform(0.0, 0.9, B, T, H, seed=7)


def zoo(
    name: str,
    method: str,
    q: Tensor = Q,
    k: Tensor = KEY,
    v: Tensor = X,
    params: dict[str, Tensor] | None = None,
    **gates: Tensor,
) -> Tensor:
    recipe = rc.zoo.get(name).recipe
    return rc.recall(recipe, q, k, v, gates, params=params, engine=method)[0]


def run(step: Step, q: Tensor = Q) -> Tensor:
    """y_t = M_t q_t for M_t = step(M_(t−1), t), from zero."""
    M = torch.zeros(B, H, V, K, dtype=torch.float64)
    outputs = []
    for t in range(q.shape[1]):
        M = step(M, t)
        outputs.append(torch.einsum("bhvk,bhk->bhv", M, q[:, t]))
    return torch.stack(outputs, 1)


def outer(v: Tensor, k: Tensor) -> Tensor:
    return v.unsqueeze(-1) * k.unsqueeze(-2)


def shaped(number: Tensor, t: int) -> Tensor:
    return number[:, t][..., None, None]


def erased(k: Tensor, rate: Tensor, t: int) -> Tensor:
    """I − rate k kᵀ."""
    return torch.eye(K, dtype=torch.float64) - shaped(rate, t) * outer(k[:, t], k[:, t])


def weighted(score: Tensor, mask: Tensor, v: Tensor = X) -> Tensor:
    """Σ s v / Σ s for scores ``[B, H, T, T]``."""
    score = score * mask
    return torch.einsum("bhts,bshv->bthv", score / score.sum(-1, keepdim=True), v)


def past(length: int, window: int | None = None) -> Tensor:
    """Return ``[T, T]``: 1 if the query (row) sees the key (column)."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return ((distance >= 0) & (distance < (window or length))).double()


@METHODS
def test_softmax_attention_is_sdpa(method: str) -> None:
    swap = [x.transpose(1, 2) for x in (Q, RAW, X)]
    want = functional.scaled_dot_product_attention(*swap, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(zoo("softmax_attention", method, k=RAW), want, **TOL)


@METHODS
@pytest.mark.parametrize("length", [1.0, math.sqrt(K)])
def test_qk_norm_attention_is_nadaraya_watson(method: str, length: float) -> None:
    q, k = length * functional.normalize(Q, dim=-1), length * KEY
    distance = (q.unsqueeze(2) - k.unsqueeze(1)).square().sum(-1)  # [B, T, T, H]
    score = (-distance / (2 * math.sqrt(K))).exp().permute(0, 3, 1, 2)
    result = zoo("qk_norm_attention", method, q=q, k=k)
    torch.testing.assert_close(result, weighted(score, past(T)), **TOL)


@METHODS
def test_sliding_window_attention_is_a_banded_softmax(method: str) -> None:
    length, window = 150, 128
    q, k = normal(B, length, H, K, seed=8), normal(B, length, H, K, seed=9)
    v = normal(B, length, H, V, seed=10)
    score = (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)).exp()
    result = zoo("sliding_window_attention", method, q=q, k=k, v=v)
    torch.testing.assert_close(result, weighted(score, past(length, window), v), **TOL)


@METHODS
def test_linear_attention(method: str) -> None:
    want = run(lambda M, t: M + outer(X[:, t], RAW[:, t]))
    torch.testing.assert_close(zoo("linear_attention", method, k=RAW), want, **TOL)


def test_linear_attention_is_one_full_batch_step_on_least_squares() -> None:
    """From W = 0 the error is −v, for any curvature of the loss (TTR 20–24)."""
    recipe = rc.Recipe(
        bias=rc.bias.L2(),
        context=rc.context.Prefix(),
        algorithm=rc.algorithm.GradientDescent(updates_per_token=1, lr=1.0),
    )
    y, _ = rc.recall(recipe, Q, RAW, X)
    torch.testing.assert_close(zoo("linear_attention", "auto", k=RAW), y, **TOL)


@METHODS
def test_normalized_linear_attention_is_a_kernel_average(method: str) -> None:
    fq, fk = functional.elu(Q) + 1, functional.elu(RAW) + 1
    score = torch.einsum("bthk,bshk->bhts", fq, fk)
    result = zoo("normalized_linear_attention", method, k=RAW)
    torch.testing.assert_close(result, weighted(score, past(T)), **TOL)


@METHODS
@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("retnet", [1 - 2.0**-5, 1 - 2.0**-6]),
        # ALiBi's slopes for two heads are 1/16 and 1/256.
        ("lightning_attention", [math.exp(-1 / 16), math.exp(-1 / 256)]),
    ],
)
def test_fixed_decays(name: str, decay: list[float], method: str) -> None:
    alpha = torch.tensor(decay, dtype=torch.float64)
    layer = rc.zoo.get(name).build(H * 4, H).double()
    stored = layer.params["decay"](torch.zeros(1, 1, 1, dtype=torch.float64))
    torch.testing.assert_close(stored, alpha, **TOL)
    want = run(lambda M, t: alpha[:, None, None] * M + outer(X[:, t], KEY[:, t]))
    torch.testing.assert_close(zoo(name, method, params={"decay": alpha}), want, **TOL)


def test_lightning_attention_decays_slower_in_deeper_layers() -> None:
    zero = torch.zeros(1, 1, 1)
    first, second = (
        rc.zoo.get("lightning_attention").build(8, H, depth=(i, 4)).params["decay"](zero).log()
        for i in (0, 1)
    )
    torch.testing.assert_close(second, 0.75 * first)


@METHODS
def test_gla(method: str) -> None:
    want = run(lambda M, t: M * CHANNEL[:, t].unsqueeze(-2) + outer(X[:, t], KEY[:, t]))
    torch.testing.assert_close(zoo("gla", method, log_decay=CHANNEL.log()), want, **TOL)


@METHODS
def test_delta_net(method: str) -> None:
    def step(M: Tensor, t: int) -> Tensor:
        return M @ erased(KEY, LR, t) + shaped(LR, t) * outer(X[:, t], KEY[:, t])

    torch.testing.assert_close(zoo("delta_net", method, lr=LR), run(step), **TOL)


@METHODS
def test_momentum_delta_net(method: str) -> None:
    C = torch.zeros(B, H, V, K, dtype=torch.float64)

    def step(M: Tensor, t: int) -> Tensor:
        nonlocal C
        C = shaped(THETA, t) * C + shaped(LR, t) * outer(X[:, t], KEY[:, t])
        return M @ erased(KEY, LR, t) + C

    result = zoo("momentum_delta_net", method, lr=LR, momentum=THETA)
    torch.testing.assert_close(result, run(step), **TOL)


@METHODS
def test_gated_delta_net(method: str) -> None:
    def step(M: Tensor, t: int) -> Tensor:
        decayed = shaped(ALPHA, t) * M @ erased(KEY, LR, t)
        return decayed + shaped(LR, t) * outer(X[:, t], KEY[:, t])

    result = zoo("gated_delta_net", method, lr=LR, log_decay=ALPHA.log())
    torch.testing.assert_close(result, run(step), **TOL)


@METHODS
def test_leaky_lms(method: str) -> None:
    def step(M: Tensor, t: int) -> Tensor:
        k = KEY[:, t]
        eye = shaped(ALPHA, t) * torch.eye(K, dtype=torch.float64)
        return M @ (eye - shaped(LR, t) * outer(k, k)) + shaped(LR, t) * outer(X[:, t], k)

    result = zoo("leaky_lms", method, lr=LR, log_decay=ALPHA.log())
    torch.testing.assert_close(result, run(step), **TOL)


@METHODS
def test_gated_delta_net_is_leaky_lms_reparametrised(method: str) -> None:
    """TTR 38–41: β → β/α and v → α v turn the decay after into the decay before."""
    leaky = zoo("leaky_lms", method, lr=LR, log_decay=ALPHA.log())
    gated = zoo(
        "gated_delta_net", method, v=ALPHA[..., None] * X, lr=LR / ALPHA, log_decay=ALPHA.log()
    )
    torch.testing.assert_close(gated, leaky, **TOL)


@METHODS
def test_longhorn_is_the_argmin(method: str) -> None:
    """TTR 30: ½‖M − M_(t−1)‖² + δ/2 ‖M k − v‖² is least at M (I + δ k kᵀ) = M_(t−1) + δ v kᵀ."""
    delta = 10 * LR

    def step(M: Tensor, t: int) -> Tensor:
        k, d = RAW[:, t], shaped(delta, t)
        normal_matrix = torch.eye(K, dtype=torch.float64) + d * outer(k, k)
        right = M + d * outer(X[:, t], k)
        return torch.linalg.solve(normal_matrix, right, left=False)

    torch.testing.assert_close(zoo("longhorn", method, k=RAW, lr=delta), run(step), **TOL)


@METHODS
def test_nlms_stores_the_newest_association_exactly(method: str) -> None:
    torch.testing.assert_close(zoo("nlms", method, q=RAW, k=RAW), X, **TOL)


@METHODS
def test_nlms_is_longhorn_at_infinite_rate(method: str) -> None:
    endless = zoo("longhorn", method, k=RAW, lr=torch.full_like(LR, 1e13))
    torch.testing.assert_close(zoo("nlms", method, k=RAW), endless, **TOL)


@METHODS
def test_nlms_writes_nothing_at_a_zero_key(method: str) -> None:
    k = RAW.clone()
    k[:, 30] = 0
    y = zoo("nlms", method, k=k)
    rest = [t for t in range(T) if t != 30]
    torch.testing.assert_close(
        y[:, rest], zoo("nlms", method, q=Q[:, rest], k=k[:, rest], v=X[:, rest]), **TOL
    )
