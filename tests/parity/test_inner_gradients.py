"""The gradient inside: one step from A₀ is A₀ − η ∇ℓ, and ∇ℓ is autograd's of the printed loss.

The losses and memories are written here from the papers' equations, without the library. Two
public implementations of such layers carry a wrong gradient of the layer norm that their own tests
miss, because all of their forms share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc

B, T, H, D = 3, 5, 2, 6
M = 2 * D
TOL = {"atol": 1e-12, "rtol": 1e-12}
LR = 0.5


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


K, X = normal(B, T, H, D, seed=1), normal(B, T, H, D, seed=2)
WEIGHT, SHIFT = 1 + 0.3 * normal(H, D, seed=3), 0.3 * normal(H, D, seed=4)
DELTA = 1 + normal(B, T, H, seed=5).abs()
CHANNELS = 0.2 + normal(B, T, H, D, seed=6).abs()

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""ℓ of predictions, values and the gate, each ``[..., D]`` or ``[..., 1]``."""


@rc.member
class QuarticOfTests(rc.bias.Bias):
    """A user's bias that is defined by its loss alone."""

    scale: float | str = rc.quantity("input", above=0, init=1.0, per_association=True)

    def loss(self, prediction: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return ((prediction - value) / gates["scale"]).pow(4).sum(-1)


def switch(p: Tensor, v: Tensor, d: Tensor) -> Tensor:
    e = p - v
    near = e.norm(dim=-1) <= d.squeeze(-1)
    return torch.where(near, e.square().sum(-1) / 2, d.squeeze(-1) * e.abs().sum(-1))


def by_norm(p: Tensor, v: Tensor, d: Tensor) -> Tensor:
    size, d = (p - v).norm(dim=-1), d.squeeze(-1)
    return torch.where(size <= d, size**2 / 2, d * (size - d / 2))


def by_coordinate(p: Tensor, v: Tensor, d: Tensor) -> Tensor:
    size = (p - v).abs()
    return torch.where(size <= d, size**2 / 2, d * (size - d / 2)).sum(-1)


BIASES: dict[str, tuple[rc.bias.Bias, dict[str, Tensor], Loss]] = {
    "dot product": (rc.bias.DotProduct(), {}, lambda p, v, _: -(p * v).sum(-1)),
    "L2": (rc.bias.L2(), {}, lambda p, v, _: (p - v).square().sum(-1) / 2),
    "L1": (rc.bias.Lp(p=1, eps=0), {}, lambda p, v, _: (p - v).abs().sum(-1)),
    "L1, smooth": (
        rc.bias.Lp(p=1),
        {},
        lambda p, v, _: ((p - v).square() + 1e-6).sqrt().sum(-1),
    ),
    "L1.5": (rc.bias.Lp(p=1.5, eps=0), {}, lambda p, v, _: (p - v).abs().pow(1.5).sum(-1)),
    "L3": (rc.bias.Lp(p=3, eps=0), {}, lambda p, v, _: (p - v).abs().pow(3).sum(-1)),
    "L3, smooth": (
        rc.bias.Lp(p=3),
        {},
        lambda p, v, _: ((p - v).square() + 1e-6).pow(1.5).sum(-1),
    ),
    "Huber, coordinate": (rc.bias.Huber(form="coordinate"), {"threshold": DELTA}, by_coordinate),
    "Huber, channel": (
        rc.bias.Huber(form="coordinate", per="value"),
        {"threshold": CHANNELS},
        by_coordinate,
    ),
    "Huber, norm": (rc.bias.Huber(form="norm"), {"threshold": 2 * DELTA}, by_norm),
    "Huber, switch": (rc.bias.Huber(), {"threshold": 2 * DELTA}, switch),
    "value-robust": (
        rc.bias.ValueRobust(),
        {"value_radius": DELTA},
        lambda p, v, d: (p - v).square().sum(-1) / 2 + d.squeeze(-1) * (p - v).norm(dim=-1),
    ),
    "a user's": (
        QuarticOfTests(),
        {"scale": 2 * DELTA},
        lambda p, v, s: ((p - v) / s).pow(4).sum(-1),
    ),
}


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * WEIGHT + SHIFT


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * WEIGHT


def of(w: Tensor, x: Tensor) -> Tensor:
    return (w @ x.unsqueeze(-1)).squeeze(-1)


def one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


Memory = Callable[[list[Tensor], Tensor], Tensor]
MEMORIES: dict[str, tuple[rc.memory.Memory, list[tuple[int, int]], Memory]] = {
    "matrix": (rc.memory.Matrix(), [(D, D)], lambda W, x: of(W[0], x)),
    "perceptron": (
        rc.memory.MLP(expansion=2),
        [(M, D), (D, M)],
        lambda W, x: x + of(W[1], gelu(of(W[0], x))),
    ),
    "layer norm": (
        rc.memory.MLP(expansion=2, norm="layer"),
        [(M, D), (D, M)],
        lambda W, x: x + layer_norm(of(W[1], gelu(of(W[0], x)))),
    ),
    "TTT-Linear": (
        rc.memory.MLP(depth=1, norm="layer", bias=True),
        [(D, D + 1)],
        lambda W, x: x + layer_norm(of(W[0], one(x))),
    ),
    "TTT-MLP": (
        rc.memory.MLP(expansion=2, activation="gelu_tanh", norm="layer", bias=True),
        [(M, D + 1), (D, M + 1)],
        lambda W, x: (
            x + layer_norm(of(W[1], one(functional.gelu(of(W[0], one(x)), approximate="tanh"))))
        ),
    ),
    "three layers": (
        rc.memory.MLP(depth=3, expansion=2, activation="tanh", norm="rms", residual=False),
        [(M, D), (M, M), (D, M)],
        lambda W, x: rms_norm(of(W[2], torch.tanh(of(W[1], torch.tanh(of(W[0], x)))))),
    ),
    "gated": (
        rc.memory.GatedMLP(expansion=2),
        [(M, D), (M, D), (D, M)],
        lambda W, x: x + of(W[2], functional.silu(of(W[0], x)) * of(W[1], x)),
    ),
}


def recipe(memory: str, bias: str, batch: int) -> rc.Recipe:
    return rc.Recipe(
        memory=MEMORIES[memory][0],
        bias=BIASES[bias][0],
        algorithm=rc.algorithm.GradientDescent(batch_size=batch, lr=LR),
    )


def weights(memory: str) -> list[Tensor]:
    shapes = MEMORIES[memory][1]
    return [normal(H, *s, seed=10 + i) / s[1] ** 0.5 for i, s in enumerate(shapes)]


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("bias", BIASES)
def test_inner_gradient(bias: str, memory: str, method: str) -> None:
    """All tokens of one inner batch: Σ_t ∇ℓ_t at A₀, for every row and head."""
    _, gates, loss = BIASES[bias]
    start = weights(memory)
    params = {"norm_weight": WEIGHT, "norm_bias": SHIFT}
    result = recipe(memory, bias, T)
    _, state = rc.recall(
        result,
        *(K, K, X),
        gates,
        params={param.name: params[param.name] for param in result.params()},
        initial_memory=tuple(start),
        engine=method,
    )
    assert state is not None
    (gate,) = gates.values() or (torch.ones(B, T, H, dtype=torch.float64),)
    gate = gate if gate.dim() == 4 else gate.unsqueeze(-1)
    points = [w.expand(B, *w.shape).clone().requires_grad_() for w in start]
    total = sum(
        loss(MEMORIES[memory][2](points, K[:, t]), X[:, t], gate[:, t]).sum() for t in range(T)
    )
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, points)
    for A, point, g in zip(state.weights, points, gradients, strict=True):
        assert g.any()
        torch.testing.assert_close((point.detach() - A) / LR, g, **TOL)


@pytest.mark.parametrize("bias", BIASES)
def test_the_stated_error_is_the_losss_derivative(bias: str) -> None:
    """∂ℓ/∂prediction as a member states it, against autograd of the printed loss."""
    stated, gates, loss = BIASES[bias]
    (gate,) = gates.values() or (torch.ones(B, T, H, dtype=torch.float64),)
    gate = gate if gate.dim() == 4 else gate.unsqueeze(-1)
    p = normal(B, T, H, D, seed=20).requires_grad_()
    (want,) = torch.autograd.grad(loss(p, X, gate).sum(), p)
    result = stated.error(p.detach(), X, {**stated.constants(), **dict.fromkeys(gates, gate)})
    torch.testing.assert_close(result, want, **TOL)


def test_both_branches_of_every_huber_are_taken() -> None:
    e = X - of(weights("matrix")[0], K)
    for sizes, deltas in (
        (e.abs(), DELTA.unsqueeze(-1)),
        (e.abs(), CHANNELS),
        (e.norm(dim=-1), 2 * DELTA),
    ):
        share = (sizes <= deltas).double().mean()
        assert 0.1 < share < 0.9


@pytest.mark.parametrize("method", ["auto", "deep", "reference"])
def test_a_value_robust_error_of_zero(method: str) -> None:
    """At v = W k nothing is written, and the derivative is that of ½‖e‖²."""
    W, q, weight = normal(1, D, D, seed=20), normal(1, 1, 1, D, seed=21), normal(D, seed=22)
    k = torch.zeros(1, 1, 1, D, dtype=torch.float64)
    k[..., 2] = 1.0
    v = W[:, :, 2].reshape(1, 1, 1, D).clone()
    radius = torch.full((1, 1, 1), 0.3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, W, radius)]
    robust = recipe("matrix", "value-robust", 1)
    y, state = rc.recall(robust, q, k, v, {"value_radius": radius}, initial_memory=W, engine=method)
    assert state is not None
    assert torch.equal(state.weights[0][0], W)
    slopes = torch.autograd.grad((y * weight).sum(), leaves)
    step = LR * q[0, 0, 0, 2]
    back = W[0].mT @ weight
    expected = [
        back,
        -step * back,
        step * weight,
        torch.outer(weight, q.flatten() - step * k.flatten()),
        torch.zeros(1, dtype=torch.float64),
    ]
    for slope, want in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope.flatten(), want.flatten(), **TOL)
