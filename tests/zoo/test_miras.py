"""MONETA, YAAD, MEMORA and MIRAS's other rules against loops of their equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.zoo.loops import (
    ALPHA,
    CHANNEL,
    KEY,
    LR,
    MLP,
    NORM,
    REDUCED_LR,
    TOL,
    B,
    D,
    H,
    Loss,
    Memory,
    Q,
    T,
    Weights,
    X,
    at,
    channels,
    gradient,
    half_square,
    matrix,
    normalised,
    normed,
    rows,
    run,
    start,
    uniform,
)
from torch import Tensor

import recollect as rc

# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)
ZERO = (torch.zeros(H, D, D, dtype=torch.float64),)
DESCENT = rc.algorithm.GradientDescent


def recall(
    recipe: rc.Recipe,
    method: str = "auto",
    init: tuple[Tensor, ...] | None = None,
    state: rc.State | None = None,
    cut: slice = slice(None),
    **gates: Tensor,
) -> tuple[Tensor, rc.State]:
    params = {param.name: NORM[param.name] for param in recipe.params()}
    if init is None and state is None:
        init = None if recipe.memory.linear else MLP
    y, later = rc.recall(
        recipe,
        *(x[:, cut] for x in (Q, KEY, X)),
        {name: x[:, cut] for name, x in gates.items()},
        params=params,
        initial_memory=init,
        state=state,
        engine=method,
    )
    assert later is not None
    return y, later


def zoo(name: str, method: str = "auto", **options: Any) -> Tensor:
    return recall(rc.zoo.get(name).recipe, method, **options)[0]


def descent(
    memory: Memory,
    loss: Callable[[int], Loss],
    alpha: Tensor,
    lr: Tensor = LR,
    slopes: Callable[[Memory, Loss, Weights, Tensor, Tensor], Weights] = gradient,
) -> Callable[[Weights, Weights, int], Weights]:
    """α_t A − η_t ∇ℓ_t(W°), α per head or per value channel."""

    def step(A: Weights, W: Weights, t: int) -> Weights:
        g = slopes(memory, loss(t), W, KEY[:, t], X[:, t])
        decay = channels(alpha, t, W) if alpha.dim() == 4 else [at(alpha, t)] * len(W)
        return [d * a - at(lr, t) * x for d, a, x in zip(decay, A, g, strict=True)]

    return step


def cube(p: Tensor, v: Tensor) -> Tensor:
    return ((p - v).square() + 1e-6).pow(1.5).sum(-1)


CHANNELS = {"lr": LR, "log_decay": CHANNEL.log()}
HEADS = {"lr": LR, "log_decay": ALPHA.log()}
SMALL = {"lr": LR / 20, "log_decay": CHANNEL.log()}


# -- MONETA ----------------------------------------------------------------------------------------


def printed(A: Tensor) -> Tensor:
    """A / ‖A‖_4², the norm at least 0.1 (MIRAS 24)."""
    size = A.pow(4).sum((-2, -1), keepdim=True).pow(0.25)
    return A / size.clamp_min(0.1).square()


def mirror(A: Tensor) -> Tensor:
    """sign(A)|A|³ / ‖A‖_4²: the gradient of ½‖·‖_4², whose inverse is that of ½‖·‖²_(4/3)."""
    points = A.detach().clone().requires_grad_()
    half = 0.5 * points.pow(4).sum((-2, -1)).sqrt()
    (result,) = torch.autograd.grad(half.sum(), points)
    return result


@METHODS
def test_moneta(method: str) -> None:
    """A step of A moves W = A / ‖A‖_4² by 1 / ‖A‖_4², which is ‖W‖_4² where ‖A‖_4 ≥ 0.1."""
    slow = CHANNEL.pow(0.25)

    def sizes(W: Weights) -> list[Tensor]:
        return [w.pow(4).sum((-2, -1)).sqrt() for w in W]

    step = descent(
        normed,
        lambda t: cube,
        slow,
        lr=REDUCED_LR,
        slopes=lambda *args: normalised(*args, sizes=sizes),
    )
    want = run(step, normed, rows(MLP), link=printed)
    result = zoo("moneta", method, lr=LR, log_decay=slow.log())
    torch.testing.assert_close(result, want, **TOL)


@METHODS
def test_moneta_exact(method: str) -> None:
    step = descent(normed, lambda t: cube, CHANNEL, lr=LR / 20)
    want = run(step, normed, rows(MLP), link=mirror, chunks=False)
    torch.testing.assert_close(zoo("moneta_exact", method, **SMALL), want, **TOL)


def test_printed_link_is_finite_for_a_vanishing_memory() -> None:
    tiny = tuple(1e-9 * w for w in MLP)
    y = zoo("moneta", init=tiny, **{**SMALL, "lr": torch.zeros_like(LR)})
    assert y.isfinite().all()
    link = rc.zoo.get("moneta").recipe.retention.link
    assert link(tiny[0], {}).abs().max() < 1e-6  # without the floor: about 1e9


def test_moneta_at_p_2_and_q_2_is_titans_minus() -> None:
    """ℓ_2 is twice the half square, and steps are measured by the error that they correct."""
    recipe = rc.zoo.get("moneta").recipe
    flat = recipe.replace(
        bias=rc.bias.Lp(p=2, eps=0), retention=replace(recipe.retention, q=2, form="as_published")
    )
    titans = rc.zoo.get("titans_minus").recipe.replace(retention=rc.retention.Decay(per="value"))
    for method in ("auto", "reference"):
        result, want = recall(flat, method, **CHANNELS)[0], recall(titans, method, **CHANNELS)[0]
        torch.testing.assert_close(result, want, **TOL)


# -- YAAD ------------------------------------------------------------------------------------------

DELTA = uniform(1.0, 4.0, B, T, H, seed=11)


@METHODS
def test_yaad(method: str) -> None:
    """∇ℓ_2 while ‖e‖ ≤ δ_t, else δ_t ∇ℓ_1 (MIRAS 26)."""
    inside = []

    def loss(t: int) -> Loss:
        def huber(p: Tensor, v: Tensor) -> Tensor:
            e, delta = p - v, DELTA[:, t]
            near = e.norm(dim=-1) <= delta
            inside.append(near)
            return torch.where(near, half_square(p, v), delta * e.abs().sum(-1))

        return huber

    want = run(descent(normed, loss, CHANNEL, lr=REDUCED_LR, slopes=normalised), normed, rows(MLP))
    torch.testing.assert_close(zoo("yaad", method, threshold=DELTA, **CHANNELS), want, **TOL)
    share = torch.stack(inside).double().mean()
    assert 0.1 < share < 0.9  # both branches were taken


@METHODS
def test_yaad_without_a_threshold_is_titans_minus(method: str) -> None:
    titans = rc.zoo.get("titans_minus").recipe.replace(retention=rc.retention.Decay(per="value"))
    large_threshold = zoo("yaad", method, threshold=torch.full_like(DELTA, 1e9), **CHANNELS)
    torch.testing.assert_close(large_threshold, recall(titans, method, **CHANNELS)[0], **TOL)


# -- MEMORA ----------------------------------------------------------------------------------------


C = 64.0
"""Sum of the rows of MEMORA's maps."""


def simplex(A: Tensor) -> Tensor:
    return C * A.exp() / A.exp().sum(-1, keepdim=True)


@METHODS
def test_memora_in_batches(method: str) -> None:
    """The other gradients are taken at the memory of the first token (MIRAS 30)."""
    step = descent(normed, lambda t: half_square, CHANNEL)
    A = R = W = rows(MLP)
    outputs = []
    for t in range(T):
        if t % 16 == 0:
            W = [simplex(a) for a in A]
            A = step(A, W, t)
            W = R = [simplex(a) for a in A]
        else:
            A, R = step(A, W, t), step(R, W, t)
        outputs.append(normed(R, Q[:, t]))
    torch.testing.assert_close(zoo("memora", method, **CHANNELS), torch.stack(outputs, 1), **TOL)


def memora_at_every_token() -> rc.Recipe:
    recipe = rc.zoo.get("memora").recipe
    return recipe.replace(
        algorithm=DESCENT(), retention=replace(recipe.retention, link_every="token")
    )


@METHODS
def test_memora_token_by_token_is_its_equation(method: str) -> None:
    """W_t = c softmax(α_t log W_(t−1) − η_t ∇ℓ_2) (MIRAS 27), with the logarithm taken."""
    # Distinct rows, or the layer norm amplifies the rounding of the logarithm.
    wide = tuple(4 * w for w in MLP)
    W = [simplex(a) for a in rows(wide)]
    outputs = []
    for t in range(T):
        g = gradient(normed, half_square, W, KEY[:, t], X[:, t])
        decay = channels(CHANNEL, t, W)
        moved = [d * (w / C).log() - at(LR, t) * x for d, w, x in zip(decay, W, g, strict=True)]
        W = [C * m.softmax(-1) for m in moved]
        outputs.append(normed(W, Q[:, t]))
    result, _ = recall(memora_at_every_token(), method, init=wide, **CHANNELS)
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("link_every", "batch"), [("token", 1), ("token", 16), ("batch", 16)])
def test_memora_stays_on_the_simplex(link_every: str, batch: int, dtype: torch.dtype) -> None:
    """Rows of every map sum to c and are not negative: to 1e-6 of c, in float32 too."""
    recipe = rc.zoo.get("memora").recipe
    recipe = recipe.replace(
        retention=replace(recipe.retention, link_every=link_every),
        algorithm=DESCENT(batch_size=batch),
    )
    inputs = [x.to(dtype) for x in (Q, KEY, X)]
    gates = {name: x.to(dtype) for name, x in CHANNELS.items()}
    params = {name: x.to(dtype) for name, x in NORM.items()}
    state, init = None, tuple(w.to(dtype) for w in MLP)
    checked = 0
    for t in range(32):
        _, state = rc.recall(
            recipe,
            *(x[:, t : t + 1] for x in inputs),
            {name: x[:, t : t + 1] for name, x in gates.items()},
            params=params,
            initial_memory=init if state is None else None,
            state=state,
        )
        assert state is not None
        if link_every == "batch" and (t + 1) % batch:
            continue
        for W in _readable(recipe, state, params):
            assert (W >= 0).all()
            torch.testing.assert_close(W.sum(-1) / C, torch.ones_like(W[..., 0]), atol=1e-6, rtol=0)
            checked += 1
    assert checked == 2 * (32 if link_every == "token" else 2)


def _readable(recipe: rc.Recipe, state: rc.State, params: dict[str, Tensor]) -> list[Tensor]:
    """Return the current weights, by the reference's loop over the open inner batch."""
    from recollect.engines.common.problem import Problem
    from recollect.engines.reference.token_loop import TokenLoop
    from recollect.functional.binding import bind

    empty = torch.zeros(B, 0, H, D, dtype=state.weights[0].dtype)
    rates = {} if state.buffer is None else {n: x[:, :0] for n, x in state.buffer.rates.items()}
    loop = TokenLoop(
        Problem(
            bound=bind(recipe, H=H, K=D, V=D),
            q=empty.unsqueeze(3),
            k=empty,
            v=empty,
            rates=rates,
            params=params,
            state=state,
        )
    )
    loop.run(loop.problem)
    return list(loop.weights_for_read({}, 0))


# -- elastic nets ----------------------------------------------------------------------------------

TAU = uniform(0.01, 0.1, B, T, H, seed=12)
DENSE = start((D, D), seed=13)


def shrunk(x: Tensor, tau: Tensor) -> Tensor:
    return torch.where(x.abs() > tau, x - tau * x.sign(), torch.zeros_like(x))


@METHODS
def test_elastic_net_of_accumulated_steps(method: str) -> None:
    """W = S_τ(A) (MIRAS 23), at the boundaries of inner batches of 16."""
    step = descent(matrix, lambda t: half_square, ALPHA)
    A = R = W = rows(DENSE)
    outputs = []
    for t in range(T):
        if t % 16 == 0:
            W = R = [shrunk(a, at(TAU, t)) for a in A]
        A, R = step(A, W, t), step(R, W, t)
        outputs.append(matrix(R, Q[:, t]))
    result = zoo("elastic_net", method, init=DENSE, tau=TAU, **HEADS)
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


@METHODS
def test_elastic_net_as_a_proximal_step(method: str) -> None:
    """W_t = S_τ(α_t W_(t−1) − η_t ∇ℓ) (MIRAS 22), which is an argmin."""
    W = rows(DENSE)
    step = descent(matrix, lambda t: half_square, ALPHA)
    outputs = []
    for t in range(T):
        Z = step(W, W, t)
        W = [shrunk(z, at(TAU, t)) for z in Z]
        # 0 is a subgradient of ½‖W − Z‖² + τ‖W‖₁.
        for z, w in zip(Z, W, strict=True):
            slack = (z - w).abs() - at(TAU, t)
            assert slack.max() < 1e-12
            assert (slack[w != 0].abs() < 1e-12).all()
        outputs.append(matrix(W, Q[:, t]))
    result = zoo("elastic_net_proximal", method, init=DENSE, tau=TAU, **HEADS)
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


@METHODS
@pytest.mark.parametrize("name", ["elastic_net", "elastic_net_proximal"])
def test_elastic_nets_have_exact_zeros(name: str, method: str) -> None:
    recipe = rc.zoo.get(name).recipe
    tau = torch.full_like(TAU, 0.05)
    _, state = recall(recipe, method, init=DENSE, cut=slice(0, 32), tau=tau, **HEADS)
    one = torch.eye(D, dtype=torch.float64).view(1, D, 1, D).expand(B, D, H, D)
    W = rc.read(recipe, one, state=state, gates={"tau": tau[:, :D]})  # its columns
    share = (W == 0).double().mean()
    assert 0.05 < share < 0.95
    dense = rc.read(recipe, one, state=state, gates={"tau": torch.zeros_like(tau[:, :D])})
    assert (dense == 0).any() == (name == "elastic_net_proximal")  # the zeros are part of the state


# -- sigmoid, f-divergence -------------------------------------------------------------------------


@METHODS
def test_sigmoid_bregman(method: str) -> None:
    fast = {**HEADS, "lr": 5 * LR}
    step = descent(matrix, lambda t: half_square, ALPHA, lr=5 * LR)
    want = run(step, matrix, rows(ZERO), link=lambda A: 1 / (1 + (-A).exp()))
    torch.testing.assert_close(zoo("sigmoid_bregman", method, **fast), want, **TOL)


def test_sigmoid_token_by_token_is_mirror_descent() -> None:
    """logit W_t = logit W_(t−1) − η_t ∇ℓ(W_(t−1)), and entries stay in [0, 1]."""
    recipe = rc.zoo.get("sigmoid_bregman").recipe.replace(
        algorithm=DESCENT(), retention=rc.retention.Bregman(link_function="sigmoid")
    )
    W = [torch.full((B, H, D, D), 0.5, dtype=torch.float64)]
    outputs = []
    for t in range(T):
        (g,) = gradient(matrix, half_square, W, KEY[:, t], X[:, t])
        W = [torch.sigmoid(torch.logit(W[0]) - 9 * at(LR, t) * g)]
        assert 0 <= W[0].min() < W[0].max() <= 1
        outputs.append(matrix(W, Q[:, t]))
    result, _ = recall(recipe, lr=9 * LR)
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


@pytest.mark.parametrize("method", ["auto", "reference"])
def test_f_divergence(method: str) -> None:
    """W_t = W̄ ⊙ g(−ζ − η ∇ℓ), g(y) = (1 − y)⁻², ζ such that rows sum to 8 (MIRAS 18)."""
    W = torch.full((B, H, D, D), 8 / D, dtype=torch.float64)
    outputs = []
    for t in range(T):
        (g,) = gradient(matrix, half_square, [W], KEY[:, t], X[:, t])
        base = W.pow(at(ALPHA, t))
        base = 8 * base / base.sum(-1, keepdim=True)
        s = -at(LR, t) * g
        # The sum falls with ζ from +inf at max(s) − 1: Newton from the left of the root.
        low = (s.amax(-1, keepdim=True) - 1).nextafter(torch.tensor(torch.inf).double())
        high = s.amax(-1, keepdim=True)
        for _ in range(200):
            zeta = (low + high) / 2
            more = (base * (1 - s + zeta).pow(-2)).sum(-1, keepdim=True) > 8
            low, high = torch.where(more, zeta, low), torch.where(more, high, zeta)
        W = base * (1 - s + (low + high) / 2).pow(-2)
        outputs.append(matrix([W], Q[:, t]))
    torch.testing.assert_close(zoo("f_divergence", method, **HEADS), torch.stack(outputs, 1), **TOL)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "hellinger", "chi_square"])
def test_f_divergences_are_finite_for_vanishing_weights(kind: str) -> None:
    """In float32, with a step that enlarges such a weight: rounding near the pole of g."""
    W = torch.tensor([[8 - 3e-16, 1e-16, 2e-16], [4.0, 4.0, 1e-30]]).view(1, 1, 2, 3)
    W = W.requires_grad_()
    step = torch.tensor([[-3.0, 0.7, 0.1], [0.3, -0.2, 5.0]]).view(1, 1, 2, 3).requires_grad_()
    result = rc.retention.FDivergence(kind=kind, scale=8.0).advance(W, step, None, {})
    assert result.isfinite().all()
    assert (result >= 0).all()
    result.square().sum().backward()
    assert W.grad is not None
    assert step.grad is not None
    assert step.grad.isfinite().all()
    assert W.grad.isfinite().all()


@METHODS
def test_the_kl_divergence_is_memoras_rule(method: str) -> None:
    """α = 1: W ⊙ exp(−ζ − η∇) with rows that sum to c is c softmax(log W − η∇)."""
    keep = memora_at_every_token()
    keep = keep.replace(retention=replace(keep.retention, decay=None))
    kl = keep.replace(retention=rc.retention.FDivergence(kind="kl", scale=C))
    # One stores log W, and the other W.
    result, _ = recall(kl, method, init=tuple(simplex(w) for w in MLP), lr=LR)
    torch.testing.assert_close(result, recall(keep, method, lr=LR)[0], **TOL)


# -- losses ----------------------------------------------------------------------------------------


@METHODS
def test_value_robust(method: str) -> None:
    """The worst of ½‖e − d‖² over ‖d‖ ≤ Δ (MIRAS 17), at d = −Δ e/‖e‖."""
    radius = uniform(0.0, 0.5, B, T, H, seed=14)

    def loss(t: int) -> Loss:
        def worst(p: Tensor, v: Tensor) -> Tensor:
            e = p - v
            d = -radius[:, t].unsqueeze(-1) * (e / e.norm(dim=-1, keepdim=True)).detach()
            return half_square(p, v + d)

        return worst

    want = run(descent(matrix, loss, ALPHA), matrix, rows(ZERO))
    torch.testing.assert_close(
        zoo("value_robust", method, value_radius=radius, **HEADS), want, **TOL
    )


@METHODS
def test_value_robust_at_radius_0_is_l2(method: str) -> None:
    recipe = rc.zoo.get("value_robust").recipe.replace(bias=rc.bias.L2())
    result = zoo("value_robust", method, value_radius=torch.zeros_like(LR), **HEADS)
    torch.testing.assert_close(result, recall(recipe, method, **HEADS)[0], **TOL)


@METHODS
def test_value_less(method: str) -> None:
    """e/√(e² + 0.01), which is the sign for errors that are not tiny (MIRAS 12)."""
    smooth = partial(
        run,
        descent(matrix, lambda t: lambda p, v: ((p - v).square() + 1e-2).sqrt().sum(-1), ALPHA),
    )
    result = zoo("value_less", method, **HEADS)
    torch.testing.assert_close(result, smooth(matrix, rows(ZERO)), **TOL)
    exact = rc.zoo.get("value_less").recipe.replace(bias=rc.bias.Lp(p=1, eps=0))
    sign = descent(matrix, lambda t: lambda p, v: (p - v).abs().sum(-1), ALPHA)
    want = run(sign, matrix, rows(ZERO))
    torch.testing.assert_close(recall(exact, method, **HEADS)[0], want, **TOL)
