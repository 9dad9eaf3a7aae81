"""DLA, SWLA, OmegaNet and Atlas against loops of their equations, and their limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement
from math import factorial

import pytest
import torch
from tests.zoo.loops import (
    ALPHA,
    KEY,
    LR,
    NORM,
    REDUCED_LR,
    THETA,
    TOL,
    B,
    D,
    H,
    M,
    Q,
    T,
    Weights,
    X,
    at,
    gelu,
    half_square,
    layer_norm,
    normalised,
    rows,
    run,
    start,
    times,
    uniform,
)
from torch import Tensor
from torch.nn import functional

import recollect as rc

# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)
C = 8
F = 1 + D + D * (D + 1) // 2
GAMMA = uniform(0.0, 0.4, B, T, H, C, seed=21)
# log a_i of a_0 + a_1 (q·k) + a_2 (q·k)²
LOG_A = uniform(-1.0, 0.3, H, 3, seed=22)
POLY = start((M, F), (D, M), seed=23)
GATED = start((M, F), (M, F), (D, M), seed=26)
DECAY = {"log_decay": ALPHA.log()}
LINEAR = rc.memory.Matrix()
PLAIN = rc.features.Identity()


def phi(x: Tensor) -> Tensor:
    """Monomials up to degree 2 with φ(q)·φ(k) = Σ a_i (q·k)^i, ``[B, H, D]`` to ``[B, H, F]``."""
    a = LOG_A.exp().sqrt()
    result = [a[:, 0].expand(B, H)]
    result += [a[:, 1] * x[..., i] for i in range(D)]
    for i, j in combinations_with_replacement(range(D), 2):
        result.append(a[:, 2] * x[..., i] * x[..., j] * (1.0 if i == j else 2**0.5))
    return torch.stack(result, -1)


def test_the_loops_features_are_the_polynomial() -> None:
    q, k = Q[:, 0], KEY[:, 0]
    s, a = (q * k).sum(-1), LOG_A.exp()
    want = a[:, 0] + a[:, 1] * s + a[:, 2] * s**2
    torch.testing.assert_close((phi(q) * phi(k)).sum(-1), want, **TOL)
    (param,) = rc.features.Polynomial().params()
    torch.testing.assert_close(
        torch.tensor(param.init), -torch.tensor([factorial(i) for i in range(3)]).float().log()
    )


def perceptron(W: Weights, x: Tensor) -> Tensor:
    return x + times(W[1], gelu(times(W[0], phi(x))))


def normed(W: Weights, x: Tensor) -> Tensor:
    return x + layer_norm(times(W[1], gelu(times(W[0], phi(x)))))


def gated(W: Weights, x: Tensor) -> Tensor:
    return x + times(W[2], functional.silu(times(W[0], phi(x))) * times(W[1], phi(x)))


def lifted(W: Weights, x: Tensor) -> Tensor:
    return times(W[0], phi(x))


def recall(
    recipe: rc.Recipe,
    method: str = "auto",
    init: tuple[Tensor, ...] | None = None,
    **gates: Tensor,
) -> Tensor:
    known = {**NORM, "log_coefficients": LOG_A}
    params = {param.name: known[param.name] for param in recipe.params()}
    return rc.recall(recipe, Q, KEY, X, gates, params=params, initial_memory=init, engine=method)[0]


def zoo(name: str, method: str = "auto", **gates: Tensor) -> Tensor:
    recipe = rc.zoo.get(name).recipe
    init = GATED if name == "atlas_plus_plus" else None if recipe.memory.linear else POLY
    return recall(recipe, method, init, **gates)


def omega(memory, W: Weights, t: int, loss=half_square) -> Weights:  # type: ignore[no-untyped-def]
    """∇ Σ_(i>t−c) γ_i^(t) ℓ(M(W; k_i), v_i), γ of the current token, nothing before the first."""
    points = [w.detach().clone().requires_grad_() for w in W]
    total = torch.zeros(B, H, dtype=torch.float64)
    for back in range(min(C, t + 1)):
        i = t - back
        total = total + GAMMA[:, t, :, back] * loss(memory(points, KEY[:, i]), X[:, i])
    return list(torch.autograd.grad(total.sum(), points))


def dot(p: Tensor, v: Tensor) -> Tensor:
    return -(p * v).sum(-1)


# -- linear attention, deep and over windows -------------------------------------------------------


@METHODS
def test_dla(method: str) -> None:
    def step(A: Weights, W: Weights, t: int) -> Weights:
        points = [w.detach().clone().requires_grad_() for w in W]
        grad = torch.autograd.grad((normed(points, KEY[:, t]) * X[:, t]).sum(), points)
        return [at(ALPHA, t) * a + at(LR, t) * g for a, g in zip(A, grad, strict=True)]

    want = run(step, normed, rows(POLY))
    torch.testing.assert_close(zoo("dla", method, lr=LR, **DECAY), want, **TOL)


@METHODS
def test_dla_with_a_matrix_is_decaying_linear_attention(method: str) -> None:
    """M_t = α_t M_(t−1) + v_t k_tᵀ (ATLAS 51), for any inner batch."""
    recipe = rc.zoo.get("dla").recipe.replace(memory=LINEAR, features=PLAIN)
    want = _attention(lambda t, i: (ALPHA[:, i + 1 : t + 1]).prod(1), Q, KEY)
    torch.testing.assert_close(recall(recipe, method, lr=torch.ones_like(LR), **DECAY), want, **TOL)


def _attention(weight, q: Tensor, k: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Σ_(i≤t) weight(t, i) (k_i·q_t) v_i."""
    outputs = []
    for t in range(T):
        y = torch.zeros(B, H, D, dtype=torch.float64)
        for i in range(t + 1):
            score = weight(t, i) * (k[:, i] * q[:, t]).sum(-1)
            y = y + score.unsqueeze(-1) * X[:, i]
        outputs.append(y)
    return torch.stack(outputs, 1)


@METHODS
def test_swla(method: str) -> None:
    def step(A: Weights, W: Weights, t: int) -> Weights:
        (g,) = omega(lifted, W, t, dot)
        return [at(ALPHA, t) * A[0] - at(LR, t) * g]

    zero = [torch.zeros(B, H, D, F, dtype=torch.float64)]
    want = run(step, lifted, zero, batch=1)
    torch.testing.assert_close(zoo("swla", method, lr=LR, window=GAMMA, **DECAY), want, **TOL)


@METHODS
def test_swla_of_one_association_is_linear_attention(method: str) -> None:
    one = torch.ones_like(LR)
    recipe = rc.zoo.get("swla").recipe.replace(features=PLAIN, context=rc.context.Window(size=1))
    result = recall(
        recipe, method, lr=one, window=one.unsqueeze(-1), log_decay=torch.zeros_like(LR)
    )
    linear = recall(rc.zoo.get("linear_attention").recipe, method)
    torch.testing.assert_close(result, linear, **TOL)


# -- OmegaNet --------------------------------------------------------------------------------------


def omega_step(memory, W: Weights, t: int) -> Weights:  # type: ignore[no-untyped-def]
    """Every association of the window has a separate ρ, and the γ of the current token."""
    total = [torch.zeros_like(w) for w in W]
    for back in range(min(C, t + 1)):
        i = t - back
        g = normalised(memory, half_square, W, KEY[:, i], X[:, i], under=memory is normed)
        total = [s + at(GAMMA[..., back], t) * x for s, x in zip(total, g, strict=True)]
    return [at(REDUCED_LR, t) * x for x in total]


@METHODS
def test_omega_net(method: str) -> None:
    def step(A: Weights, W: Weights, t: int) -> Weights:
        return [at(ALPHA, t) * a - x for a, x in zip(A, omega_step(normed, W, t), strict=True)]

    want = run(step, normed, rows(POLY))
    torch.testing.assert_close(zoo("omega_net", method, lr=LR, window=GAMMA, **DECAY), want, **TOL)


@METHODS
def test_omega_net_with_base(method: str) -> None:
    """W̄ + W_t = W̄ + α_t W_(t−1) − …: only the memory decays."""
    base = rows(POLY)

    def step(A: Weights, W: Weights, t: int) -> Weights:
        moved = zip(base, A, omega_step(perceptron, W, t), strict=True)
        return [w + at(ALPHA, t) * (a - w) - x for w, a, x in moved]

    want = run(step, perceptron, base)
    recipe = rc.zoo.get("omega_net_with_base").recipe
    params = {"base_W2": POLY[0], "base_W1": POLY[1], "log_coefficients": LOG_A}
    gates = {"lr": LR, "window": GAMMA, **DECAY}
    y, _ = rc.recall(recipe, Q, KEY, X, gates, params=params, engine=method)
    torch.testing.assert_close(y, want, **TOL)


@METHODS
def test_omega_net_of_one_association_is_titans_minus(method: str) -> None:
    one = rc.zoo.get("omega_net").recipe.replace(features=PLAIN, context=rc.context.Window(size=1))
    init = start((M, D), (D, M), seed=24)
    window = torch.ones(B, T, H, 1, dtype=torch.float64)
    result = recall(one, method, init, lr=LR, window=window, **DECAY)
    titans = recall(rc.zoo.get("titans_minus").recipe, method, init, lr=LR, **DECAY)
    torch.testing.assert_close(result, titans, **TOL)


# -- Atlas -----------------------------------------------------------------------------------------


def newton_schulz(S: Tensor, steps: int = 5) -> Tensor:
    """Run on ``SᵀS`` or ``S Sᵀ``: odd polynomials of the singular values are equal."""
    U, s, Vt = torch.linalg.svd(S, full_matrices=False)
    s = s / (S.norm(dim=(-2, -1)).unsqueeze(-1) + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return U @ (s.unsqueeze(-1) * Vt)


def window(weights: dict[int, Tensor], t: int) -> dict[int, Tensor]:
    """Return ``weights`` by association, plus those of token t's window."""
    result = dict(weights)
    for back in range(min(C, t + 1)):
        result[t - back] = result.get(t - back, 0.0) + GAMMA[:, t, :, back]
    return result


def searched(memory, W: Weights, D: Weights, weights: dict[int, Tensor]) -> Tensor:  # type: ignore[no-untyped-def]
    """Return the λ ≥ 0 that minimises Σ w |e + λ J D|², with 1e-6 ‖D‖² added to |J D|²."""
    along = below = torch.zeros(B, H, dtype=torch.float64)
    size = torch.stack([d.square().sum((-2, -1)) for d in D]).sum(0)
    for i, w in weights.items():
        read, moved = torch.autograd.functional.jvp(
            lambda *W, i=i: memory(list(W), KEY[:, i]), tuple(W), tuple(D)
        )
        along = along - w * ((read - X[:, i]) * moved).sum(-1)
        below = below + w * (moved.square().sum(-1) + 1e-6 * size)
    return (along / below).clamp_min(0)[..., None, None]


def muon(memory, init: tuple[Tensor, ...]):  # type: ignore[no-untyped-def]
    """Token by token: S = θ S − g, A = α A + η λ NS(S), gradients at the batch's start."""
    A, S = rows(init), [torch.zeros_like(w) for w in rows(init)]
    W = A
    for t in range(T):
        if t % 16 == 0:
            W = A
        g = omega(memory, W, t)
        S = [at(THETA, t) * s - x for s, x in zip(S, g, strict=True)]
        D = [newton_schulz(s) for s in S]
        rate = at(LR, t) * searched(memory, W, D, window({}, t))
        A = [at(ALPHA, t) * a + rate * d for a, d in zip(A, D, strict=True)]
        yield t, A, S


GATES = {"lr": LR, "window": GAMMA, "momentum": THETA, **DECAY}


@METHODS
def test_atlas_token_by_token(method: str) -> None:
    want = torch.stack([perceptron(A, Q[:, t]) for t, A, _ in muon(perceptron, POLY)], 1)
    torch.testing.assert_close(zoo("atlas_per_token", method, **GATES), want, **TOL)


@METHODS
@pytest.mark.parametrize(
    ("name", "memory", "init"),
    [("atlas", perceptron, POLY), ("atlas_plus_plus", gated, GATED)],
)
def test_atlas_updates_at_the_boundary(name: str, memory, init, method: str) -> None:  # type: ignore[no-untyped-def]
    """Tokens read W°; then A ← Π α · A + mean(η) λ NS(S), with λ of the full batch."""
    W, S = rows(init), [torch.zeros_like(w) for w in rows(init)]
    outputs, fitted = [], dict[int, Tensor]()
    for t in range(T):
        fitted = window({} if t % 16 == 0 else fitted, t)
        outputs.append(memory(W, Q[:, t]))
        g = omega(memory, W, t)
        S = [at(THETA, t) * s - x for s, x in zip(S, g, strict=True)]
        if t % 16 == 15:
            decay = ALPHA[:, t - 15 : t + 1].prod(1)[..., None, None]
            D = [newton_schulz(s) for s in S]
            rate = LR[:, t - 15 : t + 1].mean(1)[..., None, None] * searched(memory, W, D, fitted)
            W = [decay * w + rate * d for w, d in zip(W, D, strict=True)]
    torch.testing.assert_close(zoo(name, method, **GATES), torch.stack(outputs, 1), **TOL)


@METHODS
def test_atlas_without_newton_schulz_is_omega_net_with_momentum(method: str) -> None:
    """A constant η outside the momentum equals η inside."""
    twin = rc.zoo.get("atlas_per_token").recipe
    plain = twin.replace(algorithm=replace(twin.algorithm, ns_steps=0, normalized_steps=False))
    omega_net = rc.zoo.get("omega_net").recipe.replace(
        memory=twin.memory, algorithm=rc.algorithm.Momentum(batch_size=16)
    )
    gates = {**GATES, "lr": torch.full_like(LR, 0.05)}
    result, want = (recall(recipe, method, POLY, **gates) for recipe in (plain, omega_net))
    torch.testing.assert_close(result, want, **TOL)


@METHODS
@pytest.mark.parametrize("name", ["atlas", "atlas_per_token", "atlas_plus_plus"])
def test_a_doubled_step_changes_atlas(name: str, method: str) -> None:
    """With η inside Newton–Schulz (D.4) it cancels; outside (eq. 32) it does not."""
    recipe = rc.zoo.get(name).recipe
    recipe = recipe.replace(algorithm=replace(recipe.algorithm, normalized_steps=False))
    init = GATED if name == "atlas_plus_plus" else POLY
    inner = recipe.replace(algorithm=replace(recipe.algorithm, lr_position="inside"))
    slow = {**GATES, "log_decay": 0.1 * ALPHA.log()}
    single, double = ({**slow, "lr": torch.full_like(LR, eta)} for eta in (0.05, 0.1))
    first = 16 if recipe.algorithm.update_every == "batch" else 0
    outer = [recall(recipe, method, init, **gates)[:, first:] for gates in (single, double)]
    assert (outer[0] - outer[1]).norm() > 0.01 * outer[0].norm()
    # The 1e-7 added to the norm leaves this much of η.
    cancelled = [recall(inner, method, init, **gates) for gates in (single, double)]
    assert (cancelled[0] - cancelled[1]).norm() < 1e-4 * cancelled[0].norm()
