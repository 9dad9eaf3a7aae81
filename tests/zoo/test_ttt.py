"""TTT-Linear and TTT-MLP against loops that take every gradient by autograd."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.loops import (
    KEY,
    LR,
    NORM,
    TOL,
    B,
    D,
    H,
    M,
    Q,
    T,
    X,
    layer_norm,
    normal,
    project,
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
LENGTH = D**0.5  # keys of TTT are not of unit norm
# A correction that also goes below −1/place, for which τ is 0.
OFFSET = uniform(-0.4, 0.4, H, 16, seed=20)

Named = dict[str, Tensor]


def linear(p: Named, x: Tensor) -> Tensor:
    return times(p["W1"], x) + p["b1"]


def mlp(p: Named, x: Tensor) -> Tensor:
    h = functional.gelu(times(p["W2"], x) + p["b2"], approximate="tanh")
    return times(p["W1"], h) + p["b1"]


PARTS = {
    "ttt_linear": (linear, {"W1": (D, D), "b1": (D,)}),
    "ttt_mlp": (mlp, {"W2": (M, D), "b2": (M,), "W1": (D, M), "b1": (D,)}),
}


def initial_params(name: str) -> Named:
    shapes = PARTS[name][1]
    return {n: 0.5 * normal(H, *shape, seed=30 + i) for i, (n, shape) in enumerate(shapes.items())}


def join_biases(p: Named) -> tuple[Tensor, ...]:
    """Return biases as last columns, maps in order of application."""
    return tuple(
        torch.cat([p[f"W{i}"], p[f"b{i}"].unsqueeze(-1)], -1) for i in (2, 1) if f"W{i}" in p
    )


def split_biases(weights: tuple[Tensor, ...]) -> Named:
    names = [("W2", "b2"), ("W1", "b1")][-len(weights) :]
    result: Named = {}
    for (w, b), x in zip(names, weights, strict=True):
        result |= {w: x[..., :-1], b: x[..., -1]}
    return result


def loop(name: str, offset: Tensor, length: int = T) -> tuple[Tensor, Named]:
    """Outputs, and W at the end: W̃_t = W° − τ_t Σ_(s≤t) η_s ρ_s ∇ℓ_s in batches of 16."""
    f = PARTS[name][0]
    W = {n: w.expand(B, *w.shape) for n, w in initial_params(name).items()}
    outputs = []
    for first in range(0, length, 16):
        total = {n: torch.zeros_like(w) for n, w in W.items()}
        now = W
        for t in range(first, min(first + 16, length)):
            points = {n: w.detach().clone().requires_grad_() for n, w in W.items()}
            # The reconstruction target is v − k (TTT 2.7).
            e = layer_norm(f(points, LENGTH * KEY[:, t])) - (X[:, t] - LENGTH * KEY[:, t])
            loss = 0.5 * e.square().sum()
            slopes = torch.autograd.grad(loss, list(points.values()))
            # The part of the step that is in the range of the norm and corrects the error to first
            # order: ρ = max(0, ⟨M − v̂, e⟩) / (‖∂ℓ/∂W‖² + 1e-6 |e|²).
            size = torch.stack([g.flatten(2).square().sum(-1) for g in slopes]).sum(0)
            e = e.detach()
            k, v = LENGTH * KEY[:, t], X[:, t]
            above = (e * (e + v - project(k, v))).sum(-1).clamp(min=0)
            rate = LR[:, t] * above / (size + 1e-6 * e.square().sum(-1))
            for n, g in zip(W, slopes, strict=True):
                total[n] = total[n] + rate.view(B, H, *(1,) * (g.dim() - 2)) * g
            place = t - first
            tau = (1 / (place + 1) + offset[:, place]).clamp_min(0)  # [H]
            now = {n: w - tau.view(H, *(1,) * (w.dim() - 2)) * total[n] for n, w in W.items()}
            outputs.append(LENGTH * Q[:, t] + layer_norm(f(now, LENGTH * Q[:, t])))
        W = now
    return torch.stack(outputs, 1), W


def run_layer(name: str, offset: Tensor, method: str, length: int = T) -> tuple[Tensor, rc.State]:
    q, k, v, lr = (x[:, :length] for x in (LENGTH * Q, LENGTH * KEY, X, LR))
    y, state = rc.recall(
        rc.zoo.get(name).recipe,
        *(q, k, v),
        {"lr": lr},
        params={**NORM, "offset": offset},
        initial_memory=join_biases(initial_params(name)),
        engine=method,
    )
    assert state is not None
    return y, state


@METHODS
@pytest.mark.parametrize("name", PARTS)
def test_against_a_loop(name: str, method: str) -> None:
    want, _ = loop(name, OFFSET)
    y, _ = run_layer(name, OFFSET, method)
    torch.testing.assert_close(y, want, **TOL)
    assert (OFFSET + 1 / torch.arange(1, 17) < 0).any()  # the clamp is active


@METHODS
@pytest.mark.parametrize("name", PARTS)
def test_the_batch_ends_in_its_last_average(name: str, method: str) -> None:
    _, W = loop(name, OFFSET, length=32)
    _, state = run_layer(name, OFFSET, method, length=32)
    for n, w in split_biases(state.weights).items():
        torch.testing.assert_close(w, W[n], **TOL)


@METHODS
def test_partial_batch_is_averaged_over_its_tokens(method: str) -> None:
    """Token 37 is the fifth of its batch: with o = 0 the mean of five steps, at every split."""
    zero = torch.zeros_like(OFFSET)
    want, _ = loop("ttt_mlp", zero)
    y, _ = run_layer("ttt_mlp", zero, method)
    torch.testing.assert_close(y, want, **TOL)
    head, state = run_layer("ttt_mlp", zero, method, length=19)
    tail, _ = rc.recall(
        rc.zoo.get("ttt_mlp").recipe,
        *(LENGTH * Q[:, 19:], LENGTH * KEY[:, 19:], X[:, 19:]),
        {"lr": LR[:, 19:]},
        params={**NORM, "offset": zero},
        state=state,
        engine=method,
    )
    torch.testing.assert_close(torch.cat([head, tail], 1), want, **TOL)


def test_rows_count_their_tokens() -> None:
    """Padding takes no position of a batch: a row padded on the left equals the unpadded row."""
    mask = torch.ones(B, T)
    mask[0, :7] = 0
    recipe, init = rc.zoo.get("ttt_linear").recipe, join_biases(initial_params("ttt_linear"))
    params = {**NORM, "offset": OFFSET}
    full, _ = rc.recall(
        recipe, Q, KEY, X, {"lr": LR}, params=params, initial_memory=init, attention_mask=mask
    )
    single, _ = rc.recall(
        recipe,
        *(x[:1, 7:] for x in (Q, KEY, X)),
        {"lr": LR[:1, 7:]},
        params=params,
        initial_memory=init,
    )
    torch.testing.assert_close(full[:1, 7:], single, **TOL)


@pytest.mark.parametrize(("name", "share"), [("ttt_linear", 3.0), ("ttt_mlp", 0.9)])
def test_the_layer_is_ready_to_train(name: str, share: float) -> None:
    """Keys of norm √K, an initial rate relative to the limit 2, no correction."""
    layer = rc.zoo.get(name).build(128, 2)
    assert layer.options.qk_norm == "rms"
    x = torch.zeros(1, 3, 128)
    lr = layer.memory_inputs(x).gates["lr"]
    torch.testing.assert_close(lr, torch.full_like(lr, 2 * share))
    assert not layer.params["offset"](x[:, :1]).any()
