"""Titans against loops of its equations, and its special cases."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.loops import (
    ALPHA,
    KEY,
    LR,
    MLP,
    NORM,
    REDUCED_LR,
    THETA,
    TOL,
    Memory,
    Q,
    Weights,
    X,
    at,
    half_square,
    normalised,
    normed,
    perceptron,
    rows,
    run,
)
from torch import Tensor

import recollect as rc
from recollect.layer import MemoryLayer

# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)


def recall(recipe: rc.Recipe, method: str = "auto", **gates: Tensor) -> Tensor:
    linear = recipe.memory.linear
    init, params = (None, None) if linear else (MLP, NORM)
    return rc.recall(recipe, Q, KEY, X, gates, params=params, initial_memory=init, engine=method)[0]


def zoo(name: str, method: str = "auto", **gates: Tensor) -> Tensor:
    return recall(rc.zoo.get(name).recipe, method, **gates)


def surprise(memory: Memory, W: Weights, t: int) -> Weights:
    return normalised(memory, half_square, W, KEY[:, t], X[:, t])


@METHODS
def test_titans(method: str) -> None:
    """S_t = θ_t S_(t−1) − η_t ρ_t ∇ℓ, M_t = α_t M_(t−1) + S_t, gradients at the batch's start."""
    A, W, S = rows(MLP), rows(MLP), [torch.zeros_like(w) for w in rows(MLP)]
    outputs = []
    for t in range(Q.shape[1]):
        if t % 16 == 0:
            W = A
        S = [
            at(THETA, t) * s - at(REDUCED_LR, t) * g
            for s, g in zip(S, surprise(normed, W, t), strict=True)
        ]
        A = [at(ALPHA, t) * a + s for a, s in zip(A, S, strict=True)]
        outputs.append(normed(A, Q[:, t]))
    result = zoo("titans", method, lr=LR, log_decay=ALPHA.log(), momentum=THETA)
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


@METHODS
def test_titans_with_base(method: str) -> None:
    """W̄ + W_t = W̄ + α_t W_(t−1) + S_t: only the memory decays."""
    base, A, W, S = rows(MLP), rows(MLP), rows(MLP), [torch.zeros_like(w) for w in rows(MLP)]
    outputs = []
    for t in range(Q.shape[1]):
        if t % 16 == 0:
            W = A
        S = [
            at(THETA, t) * s - at(REDUCED_LR, t) * g
            for s, g in zip(S, surprise(perceptron, W, t), strict=True)
        ]
        A = [w + at(ALPHA, t) * (a - w) + s for w, a, s in zip(base, A, S, strict=True)]
        outputs.append(perceptron(A, Q[:, t]))
    gates = {"lr": LR, "log_decay": ALPHA.log(), "momentum": THETA}
    params = dict(zip(("base_W2", "base_W1"), MLP, strict=True))
    recipe = rc.zoo.get("titans_with_base").recipe
    y, _ = rc.recall(recipe, Q, KEY, X, gates, params=params, engine=method)
    torch.testing.assert_close(y, torch.stack(outputs, 1), **TOL)


@METHODS
def test_titans_minus(method: str) -> None:
    def step(A: Weights, W: Weights, t: int) -> Weights:
        g = surprise(normed, W, t)
        return [at(ALPHA, t) * a - at(REDUCED_LR, t) * x for a, x in zip(A, g, strict=True)]

    result = zoo("titans_minus", method, lr=LR, log_decay=ALPHA.log())
    torch.testing.assert_close(result, run(step, normed, rows(MLP)), **TOL)


@METHODS
def test_without_momentum_titans_is_titans_minus(method: str) -> None:
    gates = {"lr": LR, "log_decay": ALPHA.log()}
    still = zoo("titans", method, **gates, momentum=torch.zeros_like(THETA))
    torch.testing.assert_close(still, zoo("titans_minus", method, **gates), **TOL)


def test_a_linear_memory_token_by_token_is_the_linear_engines() -> None:
    recipe = rc.zoo.get("titans").recipe.replace(
        memory=rc.memory.Matrix(), algorithm=rc.algorithm.Momentum()
    )
    assert rc.explain(recipe).engine == "linear"
    gates = {"lr": LR, "log_decay": ALPHA.log(), "momentum": THETA}
    linear = recall(recipe, "linear", **gates)
    torch.testing.assert_close(recall(recipe, "reference", **gates), linear, **TOL)
    M = S = torch.zeros(*Q.shape[:1], *Q.shape[2:], X.shape[-1], dtype=torch.float64)
    outputs = []
    for t in range(Q.shape[1]):
        k = KEY[:, t]
        error = torch.einsum("bhvk,bhk->bhv", M, k) - X[:, t]
        S = at(THETA, t) * S - at(LR, t) * error.unsqueeze(-1) * k.unsqueeze(-2)
        M = at(ALPHA, t) * M + S
        outputs.append(torch.einsum("bhvk,bhk->bhv", M, Q[:, t]))
    torch.testing.assert_close(linear, torch.stack(outputs, 1), **TOL)


@pytest.mark.parametrize(
    "name", ["titans", "titans_with_base", "titans_minus", "yaad", "moneta", "memora", "ttt_mlp"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_repeated_token_does_not_diverge(name: str, seed: int) -> None:
    """Sixteen equal keys of an inner batch are sixteen steps in one direction."""
    torch.manual_seed(seed)
    preset = rc.zoo.get(name)
    layer = MemoryLayer(256, 4, preset.recipe, preset.options)
    token = torch.nn.functional.rms_norm(torch.randn(1, 1, 256), (256,))
    with torch.no_grad():
        y = layer(token.expand(1, 512, 256), output_final_state=False)[0]
    assert float(y.abs().max()) < 10
