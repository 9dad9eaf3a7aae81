"""The reference against the equations of the framework, written out as plain loops.

No expectation uses the library: each oracle is the recurrence of the definition, or the paper's
form, on one head. Both sides are float64 and differ by a few hundred rounding errors: 1e-10 is
generous, and a wrong term is of order 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.contracts import generate
from torch import Tensor
from torch.nn import functional

import recollect as rc

T, K, V = 9, 4, 3
TOL = {"atol": 1e-10, "rtol": 1e-10}
Numbers = dict[str, Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


Q, X = normal(T, K, seed=1), functional.normalize(normal(T, K, seed=2), dim=-1)
Y = normal(T, V, seed=3)
START = 0.3 * normal(V, K, seed=4)
LR = uniform(0.1, 0.9, T, seed=5)
ALPHA = uniform(0.5, 1.0, T, seed=6)
THETA = uniform(0.0, 0.9, T, seed=7)


def recall(
    recipe: rc.Recipe,
    *,
    init: Tensor | list[Tensor] | None = START,
    v: Tensor = Y,
    k: Tensor = X,
    q: Tensor = Q,
    params: Numbers | None = None,
    causal: bool = True,
    **gates: Tensor,
) -> Tensor:
    """Return outputs ``[T, V]`` of one row and one head; inputs and gates have no such axes."""
    state = [init.unsqueeze(0)] if isinstance(init, Tensor) else init and [a[None] for a in init]
    y, _ = rc.recall(
        recipe,
        q[None, :, None],
        k[None, :, None],
        v[None, :, None],
        {name: x[None, :, None] for name, x in gates.items()},
        params={name: x[None] for name, x in (params or {}).items()},
        initial_memory=state,
        engine="reference",
        causal=causal,
    )
    return y[0, :, 0]


def check(actual: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, torch.stack(expected), **TOL)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] * b[None, :]


def test_delta_rule() -> None:
    W, expected = START, []
    for t in range(T):
        W = W @ (torch.eye(K).double() - LR[t] * outer(X[t], X[t])) + LR[t] * outer(Y[t], X[t])
        expected.append(W @ Q[t])
    check(recall(rc.Recipe(), lr=LR), expected)


def test_linear_attention() -> None:
    expected = [START @ Q[t] + sum(Y[i] * (X[i] @ Q[t]) for i in range(t + 1)) for t in range(T)]
    recipe = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
    check(recall(recipe), expected)


def test_gated_delta_rule_decays_before_the_error() -> None:
    W, expected = START, []
    for t in range(T):
        W = ALPHA[t] * W @ (torch.eye(K).double() - LR[t] * outer(X[t], X[t]))
        W = W + LR[t] * outer(Y[t], X[t])
        expected.append(W @ Q[t])
    recipe = rc.Recipe(retention=rc.retention.Decay(when="before"))
    check(recall(recipe, lr=LR, log_decay=ALPHA.log()), expected)


def test_ttr_38_to_41_map_one_decay_order_to_the_other() -> None:
    """α W (I − β kkᵀ) + β v kᵀ (before) is W̃-after of W̃_t = W_t/Π…: checked by substitution.

    With when="before", W_t = α_t W_{t−1}(I − β_t k kᵀ) + β_t v kᵀ. Put A_t = W_t · α_{t+1}: then
    A_t = α_{t+1} A_{t−1} − (α_{t+1} β_t)(A_{t−1} k − v) kᵀ, which is the leaky LMS with decay
    α_{t+1} and step α_{t+1} β_t, from α_1 W_0.
    """
    following = torch.cat([ALPHA[1:], torch.ones(1).double()])  # α_{T+1} is free
    initial = rc.Recipe(retention=rc.retention.Decay(when="before"))
    later = rc.Recipe(retention=rc.retention.Decay(when="after"))
    y = recall(initial, lr=LR, log_decay=ALPHA.log())
    twin = recall(later, init=ALPHA[0] * START, lr=following * LR, log_decay=following.log())
    torch.testing.assert_close(twin / following[:, None], y, **TOL)


@pytest.mark.parametrize("order", ["after", "before"])
def test_momentum_decay_and_window(order: str) -> None:
    c = 3
    gamma = uniform(0.0, 0.5, T, c, seed=8)
    A, S, expected = START, torch.zeros(V, K).double(), []
    for t in range(T):
        at = ALPHA[t] * A if order == "before" else A
        g = torch.zeros(V, K).double()
        for m in range(min(c, t + 1)):
            i = t - m
            g = g + gamma[t, m] * outer(at @ X[i] - Y[i], X[i])
        S = THETA[t] * S - LR[t] * g
        A = ALPHA[t] * A + S
        expected.append(A @ Q[t])
    recipe = rc.Recipe(
        context=rc.context.Window(size=c),
        retention=rc.retention.Decay(when=order),
        algorithm=rc.algorithm.Momentum(),
    )
    result = recall(recipe, lr=LR, momentum=THETA, log_decay=ALPHA.log(), window=gamma)
    check(result, expected)


def test_momentum_on_the_write_only() -> None:
    W, C, expected = START, torch.zeros(V, K).double(), []
    for t in range(T):
        C = THETA[t] * C + LR[t] * outer(Y[t], X[t])
        W = W - LR[t] * outer(W @ X[t], X[t]) + C
        expected.append(W @ Q[t])
    recipe = rc.Recipe(algorithm=rc.algorithm.Momentum(momentum_on="value"))
    check(recall(recipe, lr=LR, momentum=THETA), expected)


def test_inner_batches_take_gradients_at_their_start() -> None:
    b = 4
    A, W0, expected = START, START, []
    for t in range(T):
        if t % b == 0:
            W0 = A
        A = ALPHA[t] * A - LR[t] * outer(W0 @ X[t] - Y[t], X[t])
        expected.append(A @ Q[t])
    recipe = rc.Recipe(
        retention=rc.retention.Decay(), algorithm=rc.algorithm.GradientDescent(batch_size=b)
    )
    check(recall(recipe, lr=LR, log_decay=ALPHA.log()), expected)


def test_windows_cross_inner_batches() -> None:
    """All gradients of a window are at the current W°, also those of the previous batch."""
    b, c = 3, 2
    A, W0, expected = START, START, []
    for t in range(T):
        if t % b == 0:
            W0 = A
        g = sum(outer(W0 @ X[i] - Y[i], X[i]) for i in range(max(t - c + 1, 0), t + 1))
        A = A - LR[t] * g
        expected.append(A @ Q[t])
    recipe = rc.Recipe(
        context=rc.context.Window(size=c, gated=False),
        algorithm=rc.algorithm.GradientDescent(batch_size=b),
    )
    check(recall(recipe, lr=LR), expected)


def test_mlp_with_a_gradient_by_hand() -> None:
    """x + W1 gelu(W2 x), ℓ2: δ1 = e, δ2 = W1ᵀe ⊙ gelu'(z)."""
    M, b = 2 * K, 2
    W2, W1 = 0.4 * normal(M, K, seed=9), 0.4 * normal(K, M, seed=10)
    v = normal(T, K, seed=11)
    init = [W2, W1]

    def slope(z: Tensor) -> Tensor:
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density

    A2, A1, at2, at1, expected = W2, W1, W2, W1, []
    for t in range(T):
        if t % b == 0:
            at2, at1 = A2, A1
        z = at2 @ X[t]
        h = functional.gelu(z)
        e = X[t] + at1 @ h - v[t]
        A1 = A1 - LR[t] * outer(e, h)
        A2 = A2 - LR[t] * outer((at1.T @ e) * slope(z), X[t])
        expected.append(Q[t] + A1 @ functional.gelu(A2 @ Q[t]))
    recipe = rc.Recipe(
        memory=rc.memory.MLP(expansion=2), algorithm=rc.algorithm.GradientDescent(batch_size=b)
    )
    check(recall(recipe, init=init, v=v, lr=LR), expected)


def orthogonal(S: Tensor, steps: int) -> Tensor:
    """Newton–Schulz written from ATLAS 5.1, on the smaller side."""
    if S.shape[0] > S.shape[1]:
        return orthogonal(S.T, steps).T
    Z = S / (S.norm() + 1e-7)
    for _ in range(steps):
        R = Z @ Z.T
        Z = 3.4445 * Z - 4.7750 * R @ Z + 2.0315 * R @ R @ Z
    return Z


@pytest.mark.parametrize("scale", ["outside", "inside"])
@pytest.mark.parametrize("update_every", ["token", "batch"])
def test_muon(scale: str, update_every: str) -> None:
    b = 3
    A, S, W0, expected = START, torch.zeros(V, K).double(), START, []
    a_bar, lr_sum = 1.0, 0.0
    for t in range(T):
        if t % b == 0:
            W0, a_bar, lr_sum = A, torch.ones(()).double(), torch.zeros(()).double()
        g = outer(W0 @ X[t] - Y[t], X[t])
        S = THETA[t] * S - (LR[t] * g if scale == "inside" else g)
        a_bar, lr_sum = a_bar * ALPHA[t], lr_sum + LR[t]
        if update_every == "token":
            A = ALPHA[t] * A + (LR[t] if scale == "outside" else 1.0) * orthogonal(S, 5)
            expected.append(A @ Q[t])
        else:
            expected.append(W0 @ Q[t])  # also the batch's last token, before the update
            if t % b == b - 1:
                A = a_bar * A + (lr_sum / b if scale == "outside" else 1.0) * orthogonal(S, 5)
    recipe = rc.Recipe(
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.Muon(batch_size=b, lr_position=scale, update_every=update_every),
    )
    check(recall(recipe, lr=LR, momentum=THETA, log_decay=ALPHA.log()), expected)


def test_mean_over_the_open_batch_is_ttts_matrix() -> None:
    """W̃ = W° − C G with C = diag(τ) tril(1) diag(lr); the last batch is partial."""
    b = 4
    offset = 0.3 * normal(b, seed=12)
    offset[1] = -2.0  # τ is clamped at 0
    tau = (1 / torch.arange(1, b + 1, dtype=torch.float64) + offset).clamp_min(0)
    W0, expected = START, []
    for start in range(0, T, b):
        stop = min(start + b, T)
        n = stop - start
        G = torch.stack([outer(W0 @ X[t] - Y[t], X[t]) for t in range(start, stop)])
        C = torch.diag(tau[:n]) @ torch.ones(n, n).tril().double() @ torch.diag(LR[start:stop])
        W = W0 - torch.einsum("ti,ivk->tvk", C, G)
        expected += [W[i] @ Q[start + i] for i in range(n)]
        W0 = W[-1]
    recipe = rc.Recipe(
        algorithm=rc.algorithm.GradientDescent(batch_size=b, reduction="mean", offset="learned")
    )
    check(recall(recipe, lr=LR, params={"offset": offset}), expected)


def test_simplex_in_inner_batches() -> None:
    """MIRAS 30: W_1 = link(A_1) replaces W° for the gradients and reads of tokens 2..b."""
    b, c = 4, 2.0
    A, W0, W, expected = START, START, START, []
    for t in range(T):
        if t % b == 0:
            W0 = c * A.softmax(-1)
            W = W0
        step = -LR[t] * outer(W0 @ X[t] - Y[t], X[t])
        A = ALPHA[t] * A + step
        W = ALPHA[t] * W + step
        if t % b == 0:
            W0 = W = c * A.softmax(-1)
        expected.append(W @ Q[t])
    recipe = rc.Recipe(
        retention=rc.retention.Simplex(scale=c, decay=rc.retention.Decay(), link_every="batch"),
        algorithm=rc.algorithm.GradientDescent(batch_size=b),
    )
    check(recall(recipe, lr=LR, log_decay=ALPHA.log()), expected)


@pytest.mark.parametrize("form", ["mirror", "as_published"])
@pytest.mark.parametrize("link_every", ["batch", "token"])
def test_lq_in_inner_batches(form: str, link_every: str) -> None:
    b, q = 3, 4.0

    def link(A: Tensor) -> Tensor:
        size = (A.abs() ** q).sum() ** (1 / q)
        top = A if form == "as_published" else A.sign() * A.abs() ** (q - 1)
        return top / size ** (q - 2)

    A, W0, W, expected = START, START, START, []
    for t in range(T):
        if t % b == 0:
            W0 = W = link(A)
        step = -LR[t] * outer(W0 @ X[t] - Y[t], X[t])
        A, W = A + step, W + step
        expected.append((W if link_every == "batch" else link(A)) @ Q[t])
    recipe = rc.Recipe(
        retention=rc.retention.Lq(q=q, form=form, link_every=link_every),
        algorithm=rc.algorithm.GradientDescent(batch_size=b),
    )
    check(recall(recipe, lr=LR), expected)


def test_proximal_elastic_net_is_rebuilt_from_w() -> None:
    tau = uniform(0.0, 0.2, T, seed=13)
    W, expected = START, []
    for t in range(T):
        A = ALPHA[t] * W - LR[t] * outer(W @ X[t] - Y[t], X[t])
        W = A.sign() * (A.abs() - tau[t]).clamp_min(0)
        expected.append(W @ Q[t])
    recipe = rc.Recipe(
        retention=rc.retention.ElasticNet(form="proximal", decay=rc.retention.Decay())
    )
    check(recall(recipe, lr=LR, tau=tau, log_decay=ALPHA.log()), expected)


def test_delta_product() -> None:
    """n sub-steps: the decay before the first, the read after the last."""
    n = 2
    k, v = functional.normalize(normal(T, n, K, seed=14), dim=-1), normal(T, n, V, seed=15)
    lr = uniform(0.0, 2.0, T, n, seed=16)
    W, expected = START, []
    for t in range(T):
        W = ALPHA[t] * W
        for j in range(n):
            W = W - lr[t, j] * outer(W @ k[t, j] - v[t, j], k[t, j])
        expected.append(W @ Q[t])
    recipe = rc.Recipe(
        retention=rc.retention.Decay(when="before"),
        algorithm=rc.algorithm.GradientDescent(updates_per_token=n),
    )
    check(recall(recipe, k=k, v=v, lr=lr, log_decay=ALPHA.log()), expected)


@pytest.mark.parametrize("rate", [0.4, "learned"])
def test_delta_product_with_one_rate_for_all(rate: float | str) -> None:
    n = 3
    k, v = functional.normalize(normal(T, n, K, seed=14), dim=-1), normal(T, n, V, seed=15)
    W, expected = START, []
    for t in range(T):
        for j in range(n):
            W = W - 0.4 * outer(W @ k[t, j] - v[t, j], k[t, j])
        expected.append(W @ Q[t])
    recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(updates_per_token=n, lr=rate))
    params = {"lr": torch.tensor(0.4, dtype=torch.float64)} if rate == "learned" else None
    check(recall(recipe, k=k, v=v, params=params), expected)


def test_rwkv7() -> None:
    """S ← S diag(w) − (S κ̂)(a ⊙ κ̂)ᵀ + v kᵀ, the erasure measured on the undecayed state."""
    kappa = functional.normalize(normal(T, K, seed=17), dim=-1)
    a, w = uniform(0, 1, T, K, seed=18), uniform(0.5, 1, T, K, seed=19)
    S, expected = START, []
    for t in range(T):
        S = S @ torch.diag(w[t]) - outer(S @ kappa[t], a[t] * kappa[t]) + outer(Y[t], X[t])
        expected.append(S @ Q[t])
    recipe = rc.Recipe(
        bias=rc.bias.L2(probe=rc.bias.Probe(write="probe", per="key")),
        retention=rc.retention.Decay(per="key"),
        algorithm=rc.algorithm.GradientDescent(lr=1.0),
    )
    check(recall(recipe, probe=kappa, erase=a, log_decay=w.log()), expected)


def test_probe_written_at_the_key() -> None:
    w, rate = normal(T, K, seed=17), uniform(0, 0.5, T, seed=18)
    A, expected = START, []
    for t in range(T):
        A = A - rate[t] * outer(A @ w[t], X[t]) + LR[t] * outer(Y[t], X[t])
        expected.append(A @ Q[t])
    recipe = rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe(write="key")))
    check(recall(recipe, probe=w, erase=rate, lr=LR), expected)


def test_normalised_read() -> None:
    def phi(x: Tensor) -> Tensor:
        return functional.elu(x) + 1

    top, below, expected = torch.zeros(V, K).double(), torch.zeros(K).double(), []
    for t in range(T):
        top = ALPHA[t] * top + LR[t] * outer(Y[t], phi(X[t]))
        below = ALPHA[t] * below + LR[t] * phi(X[t])
        expected.append(top @ phi(Q[t]) / (below @ phi(Q[t])))
    recipe = rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="sum")),
        features=rc.features.EluPlusOne(),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(),
    )
    check(recall(recipe, init=None, lr=LR, log_decay=ALPHA.log()), expected)


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_mlstm_floor_without_its_stabiliser(order: str, size: float) -> None:
    """y = num / max(|den|, 1) in the unscaled memory; large gates would overflow float32 only."""
    log_i = size * normal(T, seed=20)
    top, below, expected = torch.zeros(V, K).double(), torch.zeros(K).double(), []
    for t in range(T):
        old = top @ Q[t], below @ Q[t]
        top = ALPHA[t] * top + log_i[t].exp() * outer(Y[t], X[t])
        below = ALPHA[t] * below + log_i[t].exp() * X[t]
        num, den = old if order == "before" else (top @ Q[t], below @ Q[t])
        expected.append(num / den.abs().clamp_min(1.0))
    recipe = rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="floor", when=order)),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.GradientDescent(lr="log_input"),
    )
    check(recall(recipe, init=None, log_lr=log_i, log_decay=ALPHA.log()), expected)


def test_mlstm_stabiliser_saves_float32() -> None:
    """Gates of e^±300 overflow float32 unless rescaled, and not float64.

    A log gate of size 300 has an error of 3e-5 in float32, which the exponential passes on.
    """
    recipe = rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="floor")),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.GradientDescent(lr="log_input"),
    )
    log_i, log_f = 100 * normal(T, seed=20), -100 * uniform(0, 1, T, seed=6)
    exact = recall(recipe, init=None, log_lr=log_i, log_decay=log_f)
    single = recall(
        recipe,
        init=None,
        q=Q.float(),
        k=X.float(),
        v=Y.float(),
        log_lr=log_i.float(),
        log_decay=log_f.float(),
    )
    torch.testing.assert_close(single.double(), exact, atol=1e-3, rtol=1e-3)
    assert float(exact.abs().max()) > 0.1


def test_rwkv6_reads_before_the_write_with_a_bonus() -> None:
    u, w = normal(K, seed=21), uniform(0.5, 1, T, K, seed=19)
    S, expected = START, []
    for t in range(T):
        expected.append(S @ Q[t] + (Q[t] @ (u * X[t])) * Y[t])
        S = S @ torch.diag(w[t]) + outer(Y[t], X[t])
    recipe = rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(when="before", bonus="learned")),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(per="key"),
        algorithm=rc.algorithm.GradientDescent(lr=1.0),
    )
    check(recall(recipe, log_decay=w.log(), params={"bonus": u}), expected)


def _optimised(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> list[Tensor]:
    W = START.clone().requires_grad_()
    optimizer, expected = make([W]), []
    for t in range(T):
        W.grad = outer(W.detach() @ X[t] - Y[t], X[t])
        optimizer.step()
        expected.append(W.detach() @ Q[t])
    return expected


def test_adam_is_torchs() -> None:
    rule = rc.algorithm.Adam(lr=0.05, beta1=0.8, beta2=0.95)
    twin = _optimised(lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.95), eps=1e-8))
    check(recall(rc.Recipe(algorithm=rule)), twin)


def test_rmsprop_is_torchs() -> None:
    rule = rc.algorithm.RMSProp(lr=0.05, decay_rate=0.9)
    twin = _optimised(lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9, eps=1e-8))
    check(recall(rc.Recipe(algorithm=rule)), twin)


def test_prefix_takes_full_batch_steps_from_the_origin() -> None:
    """TTR 20–23 with geometric weights Π_{l=i+1..t} γ_l and a weight of each association."""
    steps, weight = 3, uniform(0.2, 1.0, T, seed=22)
    expected = []
    for t in range(T):
        W = START
        for _ in range(steps):
            g = torch.zeros(V, K).double()
            for i in range(t + 1):
                factor = ALPHA[i + 1 : t + 1].prod() * weight[i]
                g = g + factor * outer(W @ X[i] - Y[i], X[i])
            W = W - LR[t] * g
        expected.append(W @ Q[t])
    recipe = rc.Recipe(
        context=rc.context.Prefix(decay="input", weight="input"),
        algorithm=rc.algorithm.GradientDescent(updates_per_token=steps),
    )
    check(recall(recipe, lr=LR, log_decay=ALPHA.log(), weight=weight), expected)


def test_linear_attention_is_one_full_batch_step_on_least_squares() -> None:
    full = rc.Recipe(context=rc.context.Prefix(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
    linear = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
    torch.testing.assert_close(recall(full, init=None), recall(linear, init=None), **TOL)


def test_softmax_attention() -> None:
    expected = []
    for t in range(T):
        score = torch.stack([Q[t] @ X[i] for i in range(t + 1)]) / math.sqrt(K)
        expected.append(score.exp() @ Y[: t + 1] / score.exp().sum())
    recipe = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        context=rc.context.KernelWeighted(),
        algorithm=rc.algorithm.Analytic(),
    )
    check(recall(recipe, init=None), expected)


def test_longhorn_and_nlms_solve_for_their_association() -> None:
    """TTR 30: argmin ½‖W − W°‖² + δ/2‖W k − v‖²; NLMS stores the newest pair exactly."""
    k = 1.7 * X
    W, expected = START, []
    for t in range(T):
        lhs = torch.eye(K).double() + LR[t] * outer(k[t], k[t])
        W = torch.linalg.solve(lhs, (W + LR[t] * outer(Y[t], k[t])).T).T
        expected.append(W @ Q[t])
    check(recall(rc.Recipe(algorithm=rc.algorithm.Implicit()), k=k, lr=LR), expected)
    stored = recall(rc.Recipe(algorithm=rc.algorithm.NLMS()), k=k, q=k)
    torch.testing.assert_close(stored, Y, **TOL)


def test_the_flow_is_the_limit_of_small_steps() -> None:
    """dW/ds = −∇½‖W k − v‖² over a time δ: the matrix exponential, and a key of 0."""
    k = 1.7 * X
    k[3] = 0
    W, expected = START, []
    for t in range(T):
        generator = torch.zeros(K + 1, K + 1).double()
        generator[:K, :K], generator[K, :K] = -outer(k[t], k[t]), k[t]
        flow = torch.linalg.matrix_exp(LR[t] * generator)
        W = (torch.cat([W, Y[t][:, None]], -1) @ flow)[:, :K]
        expected.append(W @ Q[t])
    check(recall(rc.Recipe(algorithm=rc.algorithm.Flow()), k=k, lr=LR), expected)


def test_channel_decays_and_rates() -> None:
    rows, columns = uniform(0.5, 1, T, V, seed=23), uniform(0.5, 1, T, K, seed=24)
    lr = uniform(0.1, 0.9, T, V, seed=25)
    A, expected = START, []
    for t in range(T):
        e = A @ X[t] - Y[t]
        A = rows[t][:, None] * A * columns[t] - outer(lr[t] * e, X[t])
        expected.append(A @ Q[t])
    recipe = rc.Recipe(
        retention=rc.retention.Decay(per="key_value"),
        algorithm=rc.algorithm.GradientDescent(per="value"),
    )
    result = recall(recipe, lr=lr, log_decay=columns.log(), log_decay_value=rows.log())
    check(result, expected)


def test_channel_decay_in_an_mlp() -> None:
    """Keys act on the first map, values on the last, and every other map takes the mean."""
    recipe = rc.Recipe(
        memory=rc.memory.MLP(expansion=1, residual=False, depth=3),
        retention=rc.retention.Decay(per="key_value"),
        algorithm=rc.algorithm.GradientDescent(lr=0.0),
    )
    shapes = [(V, K), (V, V), (V, V)]
    init = [normal(*shape, seed=30 + i) for i, shape in enumerate(shapes)]
    rows, columns = uniform(0.5, 1, T, V, seed=23), uniform(0.5, 1, T, K, seed=24)
    maps, expected = list(init), []
    for t in range(T):
        row, column = rows[t].log().mean().exp(), columns[t].log().mean().exp()
        maps[0] = row * maps[0] * columns[t]
        maps[1] = row * column * maps[1]
        maps[2] = rows[t][:, None] * maps[2] * column
        h = functional.gelu(maps[1] @ functional.gelu(maps[0] @ Q[t]))
        expected.append(maps[2] @ h)
    result = recall(recipe, init=init, log_decay=columns.log(), log_decay_value=rows.log())
    check(result, expected)


def test_read_equals_the_last_output() -> None:
    recipe = rc.Recipe(
        retention=rc.retention.Decay(), algorithm=rc.algorithm.Momentum(batch_size=4)
    )
    q, k, v = (x[None, :, None] for x in (Q, X, Y))
    gates = {"lr": LR, "momentum": THETA, "log_decay": ALPHA.log()}
    y, state = rc.recall(
        recipe, q, k, v, {n: x[None, :, None] for n, x in gates.items()}, initial_memory=START[None]
    )
    torch.testing.assert_close(rc.read(recipe, q[:, -1:], state=state), y[:, -1:], **TOL)
    first = rc.read(recipe, q, initial_memory=START[None])
    torch.testing.assert_close(first[0, :, 0], Q @ START.T, **TOL)


def test_read_after_all_tokens() -> None:
    recipe = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
    W = START + sum(outer(Y[t], X[t]) for t in range(T))
    torch.testing.assert_close(recall(recipe, causal=False), Q @ W.T, **TOL)
    softmax = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        context=rc.context.KernelWeighted(),
        algorithm=rc.algorithm.Analytic(),
    )
    weights = (Q @ X.T / math.sqrt(K)).softmax(-1)
    torch.testing.assert_close(recall(softmax, init=None, causal=False), weights @ Y, **TOL)


@pytest.mark.parametrize("method", ["reference", "linear"])
@pytest.mark.parametrize("rate", [None, 1.0, 0.5])
def test_floor_without_a_decay(rate: float | None, method: str) -> None:
    """y = C q / max(|n·q|, 1) with steps e^(log η): without a decay the scale still changes."""
    memory_decay = rc.retention.Keep() if rate is None else rc.retention.Decay(alpha=rate)
    recipe = rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="floor")),
        bias=rc.bias.DotProduct(),
        retention=memory_decay,
        algorithm=rc.algorithm.GradientDescent(lr="log_input"),
    )
    log_lr, alpha = 2 * normal(T, seed=42), rate or 1.0
    C, n, expected = torch.zeros(V, K).double(), torch.zeros(K).double(), []
    for t in range(T):
        C = alpha * C + log_lr[t].exp() * outer(Y[t], X[t])
        n = alpha * n + log_lr[t].exp() * X[t]
        expected.append(C @ Q[t] / max(abs(float(n @ Q[t])), 1.0))
    q, k, v = (x[None, :, None] for x in (Q, X, Y))
    y, _ = rc.recall(recipe, q, k, v, {"log_lr": log_lr[None, :, None]}, engine=method)
    torch.testing.assert_close(y[0, :, 0], torch.stack(expected), **TOL)


@pytest.mark.parametrize("method", ["reference", "auto"])
@pytest.mark.parametrize("name", ["gated_delta_net", "mesa_net", "titans", "delta_former"])
def test_float64_inputs_widen_a_float32_state(name: str, method: str) -> None:
    recipe = rc.zoo.get(name).recipe
    x = generate.inputs(recipe, T=6)
    single, rest = x.slice_tokens(0, 4).map_tensors(Tensor.float), x.slice_tokens(4, 6)
    _, state = generate.run_recall(recipe, single)
    y, final_state = generate.run_recall(recipe, rest, state=state, engine=method)
    wide = state.to(dtype=torch.float64)
    expected, _ = generate.run_recall(recipe, rest, state=wide, engine=method)
    assert y.dtype == wide.dtype == torch.float64
    assert all(w.dtype == torch.float64 for w in final_state.weights)
    assert generate.relative_error(y, expected) < 1e-10


def test_read_after_several_associations_per_token() -> None:
    """Kernel rows of several associations per token are read after all of them too."""
    recipe = rc.Recipe(
        features=rc.features.Gaussian(), algorithm=rc.algorithm.GradientDescent(updates_per_token=2)
    )
    sizes = (1, T, 1, K), (1, T, 1, 2, K), (1, T, 1, 2, V)
    gates = {"lr": uniform(0, 1, 1, T, 1, 2, seed=41)}
    q, k, v = (normal(*s, seed=40) for s in sizes)
    y, state = rc.recall(recipe, q, k, v, gates, causal=False)
    assert torch.equal(y, rc.read(recipe, q, state=state))


def test_query_heads_share_memories() -> None:
    """Query head h reads memory h // (Hq / H)."""
    q, k, v = normal(1, T, 4, K, seed=40), normal(1, T, 2, K, seed=41), normal(1, T, 2, V, seed=42)
    recipe = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
    y, _ = rc.recall(recipe, q, k, v, engine="reference")
    for head in range(4):
        memory = slice(head // 2, head // 2 + 1)
        single, _ = rc.recall(recipe, q[:, :, head : head + 1], k[:, :, memory], v[:, :, memory])
        torch.testing.assert_close(y[:, :, head : head + 1], single, **TOL)


def test_recall_accepts_names_and_objects_with_a_recipe() -> None:
    preset = rc.zoo.get("delta_net")
    layer = preset.build(8, 2)
    q, k, v = (normal(1, T, 2, K, seed=seed) for seed in (40, 41, 42))
    gates = {"lr": uniform(0, 1, 1, T, 2, seed=43)}
    expected, state = rc.recall(preset.recipe, q, k, v, gates)
    for stated in ("delta_net", preset, layer):
        y, later = rc.recall(stated, q, k, v, gates)
        assert torch.equal(y, expected)
        assert torch.equal(rc.read(stated, q, state=later), rc.read(preset.recipe, q, state=state))


def test_state_has_one_memory_per_sequence() -> None:
    recipe = rc.zoo.get("gated_delta_net").recipe
    q, k = functional.normalize(torch.randn(2, 3, 5, 2, 4), dim=-1)
    v, memory = torch.randn(3, 5, 2, 6), torch.randn(3, 2, 6, 4)
    gates = {"lr": torch.rand(3, 5, 2), "log_decay": -torch.rand(3, 5, 2)}
    sizes = {"batch_size": 3, "num_heads": 2, "key_dim": 4, "value_dim": 6}
    state = rc.initial_state(recipe, **sizes, initial_memory=memory)
    y, _ = rc.recall(recipe, q, k, v, gates, state=state)
    expected, _ = rc.recall(recipe, q, k, v, gates, initial_memory=memory)
    torch.testing.assert_close(y, expected)
    for b in range(3):
        row = slice(b, b + 1)
        one = {name: gate[row] for name, gate in gates.items()}
        expected, _ = rc.recall(
            recipe, q[row], k[row], v[row], one, initial_memory=memory[b], engine="reference"
        )
        torch.testing.assert_close(y[row], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(rc.RecipeError, match=r"must have shape \[2, 6, 4\] \(or one per row"):
        rc.initial_state(recipe, **sizes, initial_memory=memory[:2])
    assert not rc.initial_state(recipe, **sizes).weights[0].any()
