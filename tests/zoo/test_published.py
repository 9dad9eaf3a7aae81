"""Published variants against loops of the papers' printed equations, in float64.

Each loop follows one equation token by token. Gradients of the printed losses are by autograd, and
nothing of the library is used: weights are lists of ``[B, H, out, in]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement

import pytest
import torch
from tests.zoo.loops import (
    ALPHA,
    CHANNEL,
    KEY,
    LR,
    MLP,
    NORM,
    THETA,
    TOL,
    B,
    D,
    H,
    M,
    Memory,
    Q,
    T,
    Weights,
    X,
    at,
    channels,
    gelu,
    gradient,
    layer_norm,
    normal,
    normed,
    perceptron,
    rows,
    start,
    times,
    uniform,
)
from torch import Tensor
from torch.nn import functional

import recollect as rc

METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)
C = 8
RATE = LR / 10
GAMMA = uniform(0.0, 0.02, B, T, H, C, seed=21)
DECAY = {"log_decay": ALPHA.log()}
LOG_A = uniform(-1.0, 0.3, H, 3, seed=22)  # log a_i of a_0 + a_1 (q·k) + a_2 (q·k)²
F = 1 + D + D * (D + 1) // 2
POLY = start((M, F), (D, M), seed=23)
GATED = start((M, F), (M, F), (D, M), seed=26)
LINEAR = start((D, D), seed=40)

Loss = Callable[[Tensor, Tensor], Tensor]


def square(p: Tensor, v: Tensor) -> Tensor:
    """‖M(k) − v‖²_2, without a factor ½."""
    return (p - v).square().sum(-1)


def half_square(p: Tensor, v: Tensor) -> Tensor:
    """ℓ_2 of MIRAS eq. 31, whose gradient is (W k − v) kᵀ."""
    return 0.5 * (p - v).square().sum(-1)


def cube(p: Tensor, v: Tensor) -> Tensor:
    """‖M(k) − v‖_3^3 (MIRAS eq. 11)."""
    return (p - v).abs().pow(3).sum(-1)


def minus_dot(p: Tensor, v: Tensor) -> Tensor:
    return -(p * v).sum(-1)


def library(
    name: str, method: str, init: tuple[Tensor, ...], length: int = T, **gates: Tensor
) -> tuple[Tensor, rc.State]:
    recipe = rc.zoo.get(name, variant="published").recipe
    known = {**NORM, "log_coefficients": LOG_A}
    y, state = rc.recall(
        recipe,
        *(x[:, :length] for x in (Q, KEY, X)),
        {gate: x[:, :length] for gate, x in gates.items()},
        params={param.name: known[param.name] for param in recipe.params()},
        initial_memory=init,
        engine=method,
    )
    assert state is not None
    return y, state


def compare(
    name: str,
    method: str,
    init: tuple[Tensor, ...],
    loop: Iterator[tuple[Tensor, Weights]],
    length: int = T,
    **gates: Tensor,
) -> None:
    """Compare all outputs, and the accumulated weights after the last token."""
    steps = list(loop)
    y, state = library(name, method, init, length, **gates)
    torch.testing.assert_close(y, torch.stack([y_t for y_t, _ in steps], 1), **TOL)
    for result, expected in zip(state.weights, steps[-1][1], strict=True):
        torch.testing.assert_close(result, expected, **TOL)


def window(memory: Memory, W: Weights, t: int, loss: Loss) -> Weights:
    """∇ Σ_(i=t−c+1)^t γ_i^(t) ℓ(M(φ(k_i)), v_i)."""
    points = [w.detach().clone().requires_grad_() for w in W]
    total = torch.zeros(B, H, dtype=torch.float64)
    for i in range(max(0, t - C + 1), t + 1):
        total = total + GAMMA[:, t, :, t - i] * loss(memory(points, KEY[:, i]), X[:, i])
    return list(torch.autograd.grad(total.sum(), points))


# -- Titans ----------------------------------------------------------------------------------------


@METHODS
def test_titans(method: str) -> None:
    """M_t = α_t M_(t−1) + S_t,  S_t = θ_t S_(t−1) − η_t ∇‖M_(t−1)(k_t) − v_t‖² (ATLAS 12–13)."""

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = rows(MLP)
        S = [torch.zeros_like(w) for w in W]
        for t in range(T):
            g = gradient(perceptron, square, W, KEY[:, t], X[:, t])
            S = [at(THETA, t) * s - at(RATE, t) * x for s, x in zip(S, g, strict=True)]
            W = [at(ALPHA, t) * w + s for w, s in zip(W, S, strict=True)]
            yield perceptron(W, Q[:, t]), W

    compare("titans", method, MLP, loop(), lr=RATE, momentum=THETA, **DECAY)


@METHODS
def test_titans_minus(method: str) -> None:
    """M_t = α_t M_(t−1) − η_t ∇‖M_(t−1)(k_t) − v_t‖² (ATLAS table 1)."""

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = rows(MLP)
        for t in range(T):
            g = gradient(perceptron, square, W, KEY[:, t], X[:, t])
            W = [at(ALPHA, t) * w - at(RATE, t) * x for w, x in zip(W, g, strict=True)]
            yield perceptron(W, Q[:, t]), W

    compare("titans_minus", method, MLP, loop(), lr=RATE, **DECAY)


# -- TTT -------------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_ttt(name: str, method: str) -> None:
    """W_t = W_t' − Σ_(s=t'+1)^t η_s ∇‖f(k_s; W_t') − v_s‖², t' the start of a batch of 16."""

    def f(W: Weights, x: Tensor) -> Tensor:
        if name == "ttt_linear":
            return x + layer_norm(times(W[0], x))
        hidden = functional.gelu(times(W[0], x), approximate="tanh")
        return x + layer_norm(times(W[1], hidden))

    init = LINEAR if name == "ttt_linear" else MLP
    length = 32  # the state of an open batch has the weights of its start

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = base = rows(init)
        for t in range(length):
            if t % 16 == 0:
                base = W
            g = gradient(f, square, base, KEY[:, t], X[:, t])
            W = [w - at(RATE, t) * x for w, x in zip(W, g, strict=True)]
            yield f(W, Q[:, t]), W

    compare(name, method, init, loop(), length, lr=RATE)


# -- MIRAS -----------------------------------------------------------------------------------------


@METHODS
def test_moneta(method: str) -> None:
    """A_t = α_t A_(t−1) − η_t ∇ℓ_3(W_(t−1); k_t, v_t),  W_t = A_t / ‖A_t‖_4² (MIRAS 24–25)."""

    def link(A: Weights) -> Weights:
        return [a / a.pow(4).sum((-2, -1), keepdim=True).sqrt() for a in A]

    slow = CHANNEL.pow(0.25)

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        A = rows(MLP)
        for t in range(T):
            g = gradient(normed, cube, link(A), KEY[:, t], X[:, t])
            decay = channels(slow, t, A)
            A = [d * a - at(RATE / 20, t) * x for d, a, x in zip(decay, A, g, strict=True)]
            yield normed(link(A), Q[:, t]), A

    compare("moneta", method, MLP, loop(), lr=RATE / 20, log_decay=slow.log())


@METHODS
def test_yaad(method: str) -> None:
    """∇ℓ_2 if ‖M(k_t) − v_t‖ ≤ δ_t, else δ_t ∇ℓ_1 (MIRAS 26)."""
    delta = uniform(0.5, 4.0, B, T, H, seed=31)
    inside = []

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = rows(MLP)
        for t in range(T):
            k, v = KEY[:, t], X[:, t]
            near = (normed(W, k) - v).norm(dim=-1) <= delta[:, t]
            inside.append(near)
            quadratic = gradient(normed, half_square, W, k, v)
            linear = gradient(normed, lambda p, v: (p - v).abs().sum(-1), W, k, v)
            g = [
                torch.where(near[..., None, None], a, at(delta, t) * b)
                for a, b in zip(quadratic, linear, strict=True)
            ]
            decay = channels(CHANNEL, t, W)
            W = [d * w - at(RATE, t) * x for d, w, x in zip(decay, W, g, strict=True)]
            yield normed(W, Q[:, t]), W

    compare("yaad", method, MLP, loop(), lr=RATE, threshold=delta, log_decay=CHANNEL.log())
    assert 0.1 < torch.stack(inside).double().mean() < 0.9  # both cases occur


@METHODS
def test_memora(method: str) -> None:
    """W_t = softmax(α_t log W_(t−1) − η_t ∇ℓ_2(W_(t−1); k_t, v_t)) (MIRAS 27), over all weights."""

    def softmax(A: Tensor) -> Tensor:
        return A.flatten(-2).softmax(-1).view_as(A)

    W = [softmax(a) for a in rows(MLP)]
    outputs = []
    for t in range(T):
        g = gradient(normed, half_square, W, KEY[:, t], X[:, t])
        W = [softmax(at(ALPHA, t) * w.log() - at(RATE, t) * x) for w, x in zip(W, g, strict=True)]
        outputs.append(normed(W, Q[:, t]))
    y, state = library("memora", method, MLP, lr=RATE, **DECAY)
    # A layer norm of outputs near 1e-3 amplifies rounding.
    torch.testing.assert_close(y, torch.stack(outputs, 1), **TOL)
    for result, expected in zip(state.weights, W, strict=True):
        torch.testing.assert_close(softmax(result), expected, **TOL)


# -- ATLAS -----------------------------------------------------------------------------------------


def phi(x: Tensor) -> Tensor:
    """Monomials with φ(q)·φ(k) = a_0 + a_1 (q·k) + a_2 (q·k)²."""
    a = LOG_A.exp().sqrt()
    features = [a[:, 0].expand(B, H), *(a[:, 1] * x[..., i] for i in range(D))]
    for i, j in combinations_with_replacement(range(D), 2):
        features.append(a[:, 2] * x[..., i] * x[..., j] * (1.0 if i == j else math.sqrt(2)))
    return torch.stack(features, -1)


def polynomial(W: Weights, x: Tensor) -> Tensor:
    return x + times(W[1], gelu(times(W[0], phi(x))))


def gated(W: Weights, x: Tensor) -> Tensor:
    return x + times(W[2], functional.silu(times(W[0], phi(x))) * times(W[1], phi(x)))


@METHODS
def test_dla(method: str) -> None:
    """M_t = α_t M_(t−1) + η_t ∇⟨M_(t−1)(φ(k_t)), v_t⟩ (ATLAS 19, maximised)."""

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = rows(POLY)
        for t in range(T):
            g = gradient(polynomial, minus_dot, W, KEY[:, t], X[:, t])
            W = [at(ALPHA, t) * w - at(RATE, t) * x for w, x in zip(W, g, strict=True)]
            yield polynomial(W, Q[:, t]), W

    compare("dla", method, POLY, loop(), lr=RATE, **DECAY)


@METHODS
def test_omega_net(method: str) -> None:
    """M_t = α_t M_(t−1) − ∇Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ(k_i)) − v_i‖² (ATLAS 10)."""

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = rows(POLY)
        for t in range(T):
            g = window(polynomial, W, t, square)
            W = [at(ALPHA, t) * w - x for w, x in zip(W, g, strict=True)]
            yield polynomial(W, Q[:, t]), W

    compare("omega_net", method, POLY, loop(), window=GAMMA, **DECAY)


def newton_schulz(S: Tensor) -> Tensor:
    """Five iterations X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X from S/‖S‖."""
    X = S / (S.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


@METHODS
@pytest.mark.parametrize(
    ("name", "memory", "init"), [("atlas", polynomial, POLY), ("atlas_plus_plus", gated, GATED)]
)
def test_atlas(name: str, memory: Memory, init: tuple[Tensor, ...], method: str) -> None:
    """M_t = α_t M_(t−1) − η_t NS5(S_t),  S_t = θ_t S_(t−1) + ∇Σ γ ‖M(φ(k_i)) − v_i‖² (32–33)."""

    def loop() -> Iterator[tuple[Tensor, Weights]]:
        W = rows(init)
        S = [torch.zeros_like(w) for w in W]
        for t in range(T):
            g = window(memory, W, t, square)
            S = [at(THETA, t) * s + x for s, x in zip(S, g, strict=True)]
            W = [
                at(ALPHA, t) * w - at(RATE, t) * newton_schulz(s) for w, s in zip(W, S, strict=True)
            ]
            yield memory(W, Q[:, t]), W

    gates = {"lr": RATE, "momentum": THETA, "window": GAMMA, **DECAY}
    compare(name, method, init, loop(), **gates)


# -- memories over φ*, with φ*(q)·φ*(k) = exp(q·k/√K) ----------------------------------------------

ANCHORS = 3
KERNEL = (
    normal(H, ANCHORS, D, seed=50),  # keys of the anchors
    normal(H, ANCHORS, M, seed=51),  # their rows of W_2
    normal(H, D, M, seed=52) / M**0.5,  # W_1
)


def hidden(keys: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """W_2 φ*(x) for W_2 = Σ_j values_j φ*(keys_j)ᵀ; keys ``[B, H, n, D]``."""
    scores = torch.einsum("bhnd,bhd->bhn", keys, x) / D**0.5
    return torch.einsum("bhn,bhnm->bhm", scores.exp(), values)


KERNEL_GATES = {
    "deep_transformer": {},
    "swdt": {"lr": RATE / 4, **DECAY},
    "dot": {"window": GAMMA},
}


@METHODS
@pytest.mark.parametrize("name", KERNEL_GATES)
def test_a_memory_over_the_exponential_kernel(name: str, method: str) -> None:
    """ATLAS eqs. 25 and 27 and table 1: a step adds −∂ℓ/∂h φ*(k)ᵀ to W_2, with h = W_2 φ*(k)."""
    length = 8 if name == "deep_transformer" else 21  # steps of rate 1 grow exponentially
    v = X[:, :length] * (0.1 if name == "deep_transformer" else 1.0)
    keys = KERNEL[0].expand(B, H, ANCHORS, D)
    values = KERNEL[1].expand(B, H, ANCHORS, M)
    W1 = KERNEL[2].expand(B, H, D, M)
    loss = square if name == "dot" else minus_dot
    outputs = []
    for t in range(length):
        step, added = torch.zeros_like(W1), []
        first = t if name == "deep_transformer" else max(0, t - C + 1)
        for i in range(first, t + 1):
            k = KEY[:, i]
            h = hidden(keys, values, k).requires_grad_()
            w = W1.detach().clone().requires_grad_()
            slopes = torch.autograd.grad(loss(k + times(w, gelu(h)), v[:, i]).sum(), [w, h])
            weight = {
                "deep_transformer": torch.ones_like(LR[:, t]),
                "swdt": RATE[:, t] / 4,
                "dot": GAMMA[:, t, :, t - i],
            }[name]
            step = step + weight[..., None, None] * slopes[0]
            added.append((k, -weight[..., None] * slopes[1]))
        decay = at(ALPHA, t) if name == "swdt" else 1.0
        W1 = decay * W1 - step
        keys = torch.cat([keys, *(k.unsqueeze(2) for k, _ in added)], 2)
        values = torch.cat([decay * values, *(u.unsqueeze(2) for _, u in added)], 2)
        q = Q[:, t]
        outputs.append(q + times(W1, gelu(hidden(keys, values, q))))
    recipe = rc.zoo.get(name, variant="published").recipe
    gates = {gate: x[:, :length] for gate, x in KERNEL_GATES[name].items()}
    y, state = rc.recall(
        *(recipe, Q[:, :length], KEY[:, :length], v, gates),
        initial_memory=KERNEL,
        engine=method,
    )
    torch.testing.assert_close(y, torch.stack(outputs, 1), **TOL)
    assert state is not None and state.kernel_rows is not None
    torch.testing.assert_close(state.weights[0], W1, **TOL)
    result, probe = state.kernel_rows, normal(B, H, D, seed=60)  # W_2 at another input
    rows_of = (result.k.transpose(1, 2), result.rows[0].transpose(1, 2))
    torch.testing.assert_close(hidden(*rows_of, probe), hidden(keys, values, probe), **TOL)


# -- names -----------------------------------------------------------------------------------------


# The tests of the family "ttt_2025" take the steps of their papers.
DEEP = [x for x in rc.zoo.names(kind="deep") if rc.zoo.get(x).family != "ttt_2025"]


@pytest.mark.parametrize("name", DEEP)
def test_every_deep_preset_has_its_printed_equation(name: str) -> None:
    """The preset or its base preset has an equation; matrices of MIRAS have none."""
    preset = rc.zoo.get(name, variant="published")
    assert preset.name == f"{rc.zoo.get(name).twin_of or name}:published"
    assert preset.variant == "published" and preset.fidelity.kind == "exact"
    recipe = preset.recipe
    assert not recipe.algorithm.uses_normalized_steps
    assert not getattr(recipe.algorithm, "normalized_steps", False)
    assert recipe.algorithm.batch_size == (16 if name.startswith("ttt") else 1)
    assert preset.options.last_map_init_scale == preset.options.memory_init_scale == 1
    units = {options.unit for _, options in preset.options.gate_options}
    assert units <= {None, "value_rms"}
    assert rc.explain(preset).title == preset.name


def test_both_spellings_of_variants() -> None:
    assert rc.zoo.get("titans:published") == rc.zoo.get("titans", variant="published")
    assert all(name not in rc.zoo.names() for name in rc.zoo.variants())
    with pytest.raises(rc.RecipeError, match="gla has no variant 'published'"):
        rc.zoo.get("gla:published")
    with pytest.raises(rc.RecipeError, match="no architecture named 'titanz:published'"):
        rc.zoo.get("titanz", variant="published")


@pytest.mark.parametrize("name", [*rc.zoo.variants()])
def test_a_layer_of_a_variant_trains(name: str) -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=32, num_heads=2)
    x = torch.randn(2, 12, 32)
    y, _ = layer(x)
    assert y.isfinite().all()
    y.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
