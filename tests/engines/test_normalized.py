"""The normalised step: each association's gradient relative to the step that corrects its error.

The oracle is a loop over tokens with explicit matrices and torch's autograd. It shares no code with
the engines or with the choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contracts import generate, outside
from tests.engines.test_deep import Twice
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.engines.deep.engine import DeepEngine
from recollect.engines.deep.line_search import squared
from recollect.testing.engines import (
    MASKS,
    PACKED,
    check_agrees,
    check_chunks_and_splits,
    check_handover,
    check_single_gradients,
    inputs_for,
    scale_if_divergent,
)
from recollect.testing.sequences import (
    check_gradients_across_splits,
    check_masks,
    check_packing,
)

memory, bias, retention = rc.memory, rc.bias, rc.retention
algorithm, context = rc.algorithm, rc.context

EXACT = 1e-10
T, D, M = 9, 4, 8
GD, Momentum = algorithm.GradientDescent, algorithm.Momentum


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Predict = Callable[[list[Tensor], Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Link = Callable[[Tensor], Tensor]


def matrix(W: list[Tensor], x: Tensor) -> Tensor:
    return W[0] @ x


def perceptron(W: list[Tensor], x: Tensor) -> Tensor:
    return x + W[1] @ functional.gelu(W[0] @ x)


def gated(W: list[Tensor], x: Tensor) -> Tensor:
    return x + W[2] @ (functional.silu(W[0] @ x) * (W[1] @ x))


MEMORIES: dict[str, tuple[rc.memory.Memory, list[tuple[int, int]], Predict]] = {
    "matrix": (memory.Matrix(), [(D, D)], matrix),
    "perceptron": (memory.MLP(expansion=2), [(M, D), (D, M)], perceptron),
    "gated": (memory.GatedMLP(expansion=2), [(M, D), (M, D), (D, M)], gated),
}


def square(p: Tensor, v: Tensor) -> Tensor:
    return 0.5 * (p - v).square().sum()


def cubic(p: Tensor, v: Tensor) -> Tensor:
    return ((p - v).square() + 1e-6).pow(1.5).sum()


def switch(p: Tensor, v: Tensor) -> Tensor:
    e = p - v
    return 0.5 * e.square().sum() if float(e.detach().norm()) <= 0.6 else 0.6 * e.abs().sum()


LOSSES: dict[str, tuple[rc.bias.Bias, Loss]] = {
    "L2": (bias.L2(), square),
    "L3": (bias.Lp(p=3.0), cubic),
    "huber": (bias.Huber(threshold=0.6), switch),
}


def identity(A: Tensor) -> Tensor:
    return A


def curvature(link: Link, A: Tensor, G: Tensor) -> Tensor:
    """Return ⟨G, J G⟩ from the full Jacobian of the link."""
    J = torch.autograd.functional.jacobian(link, A, create_graph=True).flatten(2).flatten(0, 1)
    return G.flatten() @ J @ G.flatten()


def by_hand(
    start: list[Tensor],
    predict: Predict,
    loss: Loss,
    tensors: dict[str, Tensor],
    *,
    b: int,
    c: int,
    link: Link = identity,
    gain: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return outputs of a row and head: ``q, k, v [T, D]``, numbers ``[T]``, window ``[T, c]``."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    A, S = list(start), [torch.zeros_like(w) for w in start]
    border = A
    outputs = []
    for t in range(T):
        if t % b == 0:
            border = A
        W = [link(a) for a in border]
        total = [torch.zeros_like(w) for w in W]
        for m in range(min(c, t + 1)):
            prediction = predict(W, k[t - m])
            ell = loss(prediction, v[t - m])
            slope, *G = torch.autograd.grad(ell, [prediction, *W], create_graph=True)
            below = 1e-6 * slope.square().sum()
            for a, g in zip(border, G, strict=True):
                below = below + (g.square().sum() if gain is None else gain(a, g))
            rho = ((prediction - v[t - m]) * slope).sum() / below
            weight = rho if c == 1 else rho * tensors["window"][t, m]
            total = [x + weight * g for x, g in zip(total, G, strict=True)]
        S = [
            tensors["momentum"][t] * s - tensors["lr"][t] * g for s, g in zip(S, total, strict=True)
        ]
        A = [tensors["log_decay"][t].exp() * a + s for a, s in zip(A, S, strict=True)]
        outputs.append(predict([link(a) for a in A], q[t]))
    return torch.stack(outputs)


def random_inputs(sizes: list[tuple[int, int]], c: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    start = [normal(*s, seed=10 + i) / s[1] ** 0.5 for i, s in enumerate(sizes)]
    result = {name: normal(T, D, seed=i) for i, name in enumerate(("q", "k", "v"))}
    result["lr"], result["momentum"] = (torch.sigmoid(normal(T, seed=i)) for i in (5, 6))
    result["lr"] = 0.3 * result["lr"]  # a large multiple diverges and amplifies rounding
    result["log_decay"] = -0.1 * torch.sigmoid(normal(T, seed=7))
    if c > 1:
        result["window"] = torch.sigmoid(normal(T, c, seed=8))
    return start, result


def equals_by_hand(
    recipe: rc.Recipe,
    shapes: list[tuple[int, int]],
    method: str,
    oracle: Callable[[list[Tensor], dict[str, Tensor]], Tensor],
) -> None:
    """Compare outputs and the gradients of every input and of the first weights."""
    c = recipe.context.horizon or 1
    start, tensors = random_inputs(shapes, c)
    both: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    for side in ("engine", "hand"):
        leaves = [w.clone().requires_grad_() for w in start]
        inputs = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        if side == "hand":
            y = oracle(leaves, inputs)
        else:
            lifted = {name: x[None, :, None] for name, x in inputs.items()}
            q, k, v = (lifted.pop(name) for name in ("q", "k", "v"))
            init = tuple(w[None] for w in leaves)
            y = rc.recall(recipe, q, k, v, lifted, initial_memory=init, engine=method)[0][0, :, 0]
        slopes = torch.autograd.grad((y * normal(T, D, seed=9)).sum(), [*leaves, *inputs.values()])
        both.append((y, slopes))
    (y, slopes), (expected, target) = both
    assert generate.relative_error(y, expected) < EXACT
    for result, slope in zip(slopes, target, strict=True):
        assert generate.relative_error(result, slope) < EXACT


@pytest.mark.parametrize("method", ["reference", "deep"])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MEMORIES)
def test_by_hand(name: str, loss: str, b: int, c: int, method: str) -> None:
    """Every memory, loss, inner batch and window against the loop over explicit matrices."""
    result, shapes, predict = MEMORIES[name]
    recipe = rc.Recipe(
        memory=result,
        bias=LOSSES[loss][0],
        context=context.Online() if c == 1 else context.Window(size=c),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=b, normalized_steps=True),
    )
    equals_by_hand(
        recipe,
        shapes,
        method,
        lambda start, x: by_hand(start, predict, LOSSES[loss][1], x, b=b, c=c),
    )


def softmax(A: Tensor) -> Tensor:
    return 2 * A.softmax(-1)


def centred(A: Tensor, G: Tensor) -> Tensor:
    """Return Σ W G² − 0.999 (Σ W G)²/c, which is ⟨G, J G⟩ up to a thousandth."""
    W = softmax(A)
    return curvature(softmax, A, G) + 0.001 * (W * G).sum(-1).square().sum() / 2


def damped(A: Tensor) -> Tensor:
    return A / (1 + (A.square().sum() + 1e-12).sqrt() / 2)


LINKS: dict[str, tuple[rc.retention.Retention, Link, Callable[[Tensor, Tensor], Tensor]]] = {
    "simplex": (retention.Simplex(scale=2.0, decay=retention.Decay()), softmax, centred),
    "custom": (
        outside.Damped(ceiling=2.0, forget=retention.Decay()),
        damped,
        lambda A, G: curvature(damped, A, G),
    ),
}


@pytest.mark.parametrize("method", ["reference", "deep"])
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("name", LINKS)
def test_links_by_hand(name: str, b: int, method: str) -> None:
    """Under a link a step is measured by the change of W that a step of A causes."""
    retention, link, gain = LINKS[name]
    result, shapes, predict = MEMORIES["perceptron"]
    recipe = rc.Recipe(
        memory=result, retention=retention, algorithm=Momentum(batch_size=b, normalized_steps=True)
    )
    equals_by_hand(
        recipe,
        shapes,
        method,
        lambda start, x: by_hand(start, predict, square, x, b=b, c=1, link=link, gain=gain),
    )


# -- a line search ---------------------------------------------------------------------------------


def orthogonalised(S: Tensor) -> Tensor:
    """Five steps of a X + b (X Xᵀ) X + c (X Xᵀ)² X from S/‖S‖, with the coefficients of ATLAS."""
    X = S / (S.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        G = X @ X.T
        X = 3.4445 * X - 4.7750 * G @ X + 2.0315 * G @ G @ X
    return X


def step_length(
    predict: Predict, W: list[Tensor], D: list[Tensor], k: Tensor, v: Tensor, weight: Tensor
) -> Tensor:
    """Return the length along D that minimises the weighted errors, to first order."""
    above, below = torch.zeros(()).double(), torch.zeros(()).double()
    for key, value, w in zip(k, v, weight, strict=True):
        if not bool(w):
            continue

        def along(s: Tensor, key: Tensor = key) -> Tensor:
            return predict([a + s * d for a, d in zip(W, D, strict=True)], key)

        zero = torch.zeros(()).double()
        moved = torch.autograd.functional.jacobian(along, zero, create_graph=True)
        assert isinstance(moved, Tensor)
        above = above - w * ((predict(W, key) - value) * moved).sum()
        size = sum(d.square().sum() for d in D)
        below = below + w * (moved.square().sum() + 1e-6 * size)
    return (above / below).clamp_min(0)


def muon_by_hand(
    start: list[Tensor], predict: Predict, loss: Loss, x: dict[str, Tensor], *, b: int, c: int,
    update_every: str
) -> Tensor:  # fmt: skip
    """`by_hand` for orthogonalised steps: one row and head, forward differentiation by torch."""
    q, k, v = x["q"], x["k"], x["v"]
    A, S = list(start), [torch.zeros_like(w) for w in start]
    W, outputs = A, []
    log_decay, rate, weights = torch.zeros(()), torch.zeros(()), torch.zeros(T).double()
    for t in range(T):
        if t % b == 0:
            W = A
            log_decay, rate, weights = torch.zeros(()), torch.zeros(()), torch.zeros(T).double()
        added = torch.zeros(T).double()
        for m in range(min(c, t + 1)):
            place = torch.nn.functional.one_hot(torch.tensor(t - m), T)
            added = added + place * (x["window"][t, m] if c > 1 else 1.0)
        weights, log_decay, rate = (
            weights + added,
            log_decay + x["log_decay"][t],
            rate + x["lr"][t],
        )
        total = sum(added[i] * loss(predict(W, k[i]), v[i]) for i in range(t + 1))
        assert isinstance(total, Tensor)
        G = torch.autograd.grad(total, W, create_graph=True)
        S = [x["momentum"][t] * s - g for s, g in zip(S, G, strict=True)]
        D = [orthogonalised(s) for s in S]

        if update_every == "token":
            step = x["lr"][t] * step_length(predict, W, D, k, v, added)
            A = [x["log_decay"][t].exp() * a + step * d for a, d in zip(A, D, strict=True)]
            outputs.append(predict(A, q[t]))
            continue
        outputs.append(predict(W, q[t]))
        if t % b == b - 1:
            step = rate / b * step_length(predict, W, D, k, v, weights)
            A = [log_decay.exp() * a + step * d for a, d in zip(A, D, strict=True)]
    return torch.stack(outputs)


# The tests of structures below compare the engine with the reference.
@pytest.mark.parametrize("method", [pytest.param("reference", marks=pytest.mark.slow), "deep"])
@pytest.mark.parametrize("loss", ["L2", "L3"])
@pytest.mark.parametrize(
    ("b", "c", "update_every"), [(1, 1, "token"), (4, 3, "token"), (4, 1, "batch"), (4, 3, "batch")]
)
@pytest.mark.parametrize("name", MEMORIES)
def test_muon_by_hand(name: str, b: int, c: int, update_every: str, loss: str, method: str) -> None:
    """Orthogonalised steps have the length that minimises the errors of their associations."""
    result, shapes, predict = MEMORIES[name]
    recipe = rc.Recipe(
        memory=result,
        bias=LOSSES[loss][0],
        context=context.Online() if c == 1 else context.Window(size=c),
        retention=retention.Decay(),
        algorithm=algorithm.Muon(batch_size=b, update_every=update_every, normalized_steps=True),
    )
    equals_by_hand(
        recipe,
        shapes,
        method,
        lambda start, x: muon_by_hand(
            start, predict, LOSSES[loss][1], x, b=b, c=c, update_every=update_every
        ),
    )


MUON = algorithm.Muon(batch_size=3, normalized_steps=True)
BORDER = algorithm.Muon(batch_size=3, update_every="batch", normalized_steps=True)


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        pytest.param(MUON, 1, id="token-1"),
        pytest.param(BORDER, 3, id="batch-3"),
        pytest.param(MUON, 3, id="token-3", marks=pytest.mark.slow),
        pytest.param(BORDER, 1, id="batch-1", marks=pytest.mark.slow),
    ],
)
def test_muon_in_the_engine(rule: algorithm.Muon, window: int) -> None:
    """Outputs, state, gradients; splits, handovers, masks, packing; maps applied twice or never."""
    recipe = rc.Recipe(
        memory=memory.GatedMLP(expansion=1, norm="layer", bias=True),
        bias=bias.Huber(),
        context=context.Online() if window == 1 else context.Window(size=window),
        retention=retention.Decay(per="key"),
        algorithm=rule,
    )
    assert rc.select_engine(recipe).engine.name == "deep"
    x = scale_if_divergent(recipe, inputs_for(recipe, B=1, T=13, H=2))
    check_agrees(recipe, x, "deep", 1e-9, chunk_size=4)
    short = inputs_for(recipe, B=2, T=9, H=2)
    check_chunks_and_splits(recipe, short, "deep")
    check_handover(recipe, x, "deep")
    check_packing(recipe, inputs_for(recipe, B=1, T=12, H=2), PACKED, "deep")
    for mask in MASKS.values():
        check_masks(recipe, short, "deep", mask, chunk_size=4)
    other = recipe.replace(memory=Twice(), retention=retention.Decay())
    check_agrees(other, inputs_for(other, B=1, T=7, H=1), "deep", 1e-9)


@pytest.mark.parametrize("method", ["reference", "deep"])
def test_searched_step_is_never_reversed(method: str) -> None:
    """If momentum points against the current gradient, the step is zero and not reversed."""
    recipe = rc.Recipe(algorithm=algorithm.Muon(lr=1.0, momentum=0.99, normalized_steps=True))
    k = torch.eye(3).double()[None, [0, 0, 0], None]
    v = torch.tensor([[5.0, 0, 0], [5.0, 0, 0], [4.0, 0, 0]]).double()[None, :, None]
    y, _ = rc.recall(recipe, k, k, v, {}, engine=method)
    # The first association is stored. Its part of S, 4.9, outweighs the gradient 1 of the third.
    assert generate.relative_error(y[0, :, 0, 0], torch.tensor([5.0, 5.0, 5.0]).double()) < 1e-4
    y, _ = rc.recall(recipe, k, k, v * torch.tensor([1, 1, -1])[:, None, None], {}, engine=method)
    assert generate.relative_error(y[0, :, 0, 0], torch.tensor([5.0, 5.0, -4.0]).double()) < 1e-4


@rc.member
class Signs(algorithm.Algorithm):
    """Searched steps along signs, defined by the step and without a direction."""

    lr: float | str = rc.quantity("input", at_least=0, init=0.1, role="rate")
    momentum: float | str = rc.quantity("input", at_least=0, below=1, init=0.9, role="momentum")
    batch_size: int = rc.fields.integer(3, at_least=1, size=True)
    update_every: str = rc.fields.option("batch", "token")

    slots = ("momentum",)
    uses_line_search = True
    curvature = True
    accumulator = "gradients"

    def update(self, slots: Any, step: algorithm.Step) -> Any:
        S = step.momentum * slots["momentum"] - step.gradient
        return {"momentum": S}, step.lr * S.sign()

    def batch_step(self, slots: Any, lr: Tensor) -> Tensor:
        return lr * slots["momentum"].sign()


@pytest.mark.parametrize("update_every", ["token", "batch"])
def test_direction_defaults_to_the_step_at_rate_one(update_every: str) -> None:
    recipe = rc.Recipe(memory=memory.MLP(), algorithm=Signs(update_every=update_every))
    assert rc.select_engine(recipe).engine.name == "deep"
    x = inputs_for(recipe, B=1, T=7, H=2)
    check_agrees(recipe, x, "deep", 1e-9)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func.jvp
def test_the_size_of_a_direction_has_every_derivative() -> None:
    X, moved = normal(2, 3, 2, 4, 5, seed=1).unbind(0)
    X[0, 0] = 0
    expected = X.square().sum((-2, -1))
    torch.testing.assert_close(squared(X), expected)
    torch.testing.assert_close(torch.vmap(squared)(X), expected)
    _, along = torch.func.jvp(squared, (X,), (moved,))
    torch.testing.assert_close(along, 2 * (X * moved).sum((-2, -1)))
    assert torch.autograd.gradcheck(squared, X.requires_grad_())
    assert torch.autograd.gradgradcheck(squared, X)


# -- gains of links ------------------------------------------------------------------------------

GAINS = {
    "simplex over rows": retention.Simplex(scale=3.0),
    "simplex over columns": retention.Simplex(scale=3.0, axis="out"),
    "simplex over all": retention.Simplex(scale=3.0, axis="all"),
    "L4, printed": retention.Lq(q=4.0, form="as_published"),
    "L3, printed": retention.Lq(q=3.0, form="as_published"),
    "L4": retention.Lq(q=4.0),
    "L1.5": retention.Lq(q=1.5),
    "L2": retention.Lq(q=2.0),
    "elastic net": retention.ElasticNet(tau=0.3),
    "smooth elastic net": retention.ElasticNet(tau=0.3, smooth=True),
    "ball": retention.Ball(radius=1.0),
    "sigmoid": retention.Bregman(link_function="sigmoid"),
    "tanh": retention.Bregman(link_function="tanh"),
    "softplus": retention.Bregman(link_function="softplus"),
    "exp": retention.Bregman(link_function="exp"),
}


@pytest.mark.parametrize("name", GAINS)
def test_gains(name: str) -> None:
    """⟨G, J G⟩ of the full Jacobian: equal, or an upper bound within an order of magnitude."""
    retention = GAINS[name]
    gates = {n: torch.full((1, 1), x).double() for n, x in retention.constants().items()}
    ratios: list[float] = []
    for seed in range(8):
        A = normal(3, 5, seed=seed)
        h, delta = normal(7, 5, seed=20 + seed), normal(7, 3, seed=30 + seed)
        G = delta.unsqueeze(-1) * h.unsqueeze(-2)
        gain = retention.step_gain(A, G, gates)
        fast = retention.rank_one_step_gain(A, h, delta, gates)
        if fast is not None:
            assert generate.relative_error(fast, gain) < 1e-13
        assert bool((gain > 0).all())
        exact = torch.stack([curvature(lambda a: retention.link(a, gates), A, g) for g in G])
        ratios += (exact / gain).tolist()
    if "simplex" in name:  # a thousandth of the squared mean is added to the variance
        assert min(ratios) > 0.9 and max(ratios) <= 1 + 1e-12
    elif name in ("L1.5", "L2"):
        assert min(ratios) > 1 - 1e-9 and max(ratios) < 1 + 1e-9
    elif "printed" in name:  # its norm counts as a constant, which is a bound if A and G differ
        assert 0.5 < torch.tensor(ratios).median() < 1.5
    else:
        assert max(ratios) <= 1 + 1e-12 and torch.tensor(ratios).mean() > 0.1


@pytest.mark.parametrize("name", GAINS)
def test_gains_are_positive(name: str) -> None:
    """A step has a positive divisor also at a flat link (zeros, distant weights)."""
    retention = GAINS[name]
    gates = {n: torch.full((1, 1), x).double() for n, x in retention.constants().items()}
    h, delta = normal(7, 5, seed=1), normal(7, 3, seed=2)
    G = delta.unsqueeze(-1) * h.unsqueeze(-2)
    peak = torch.zeros(3, 5).double()
    peak[:, 2] = 40.0  # the limit of a simplex
    for A in (torch.zeros(3, 5).double(), peak, -peak):
        size = G.square().sum((-2, -1))
        assert bool((retention.step_gain(A, G, gates) > 1e-9 * size).all())


# -- meaning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reference", "deep"])
def test_a_rate_of_one_corrects_the_error(method: str) -> None:
    """After a step at rate 1 a matrix predicts the value, for any sizes: Kaczmarz (NLMS)."""
    recipe = rc.Recipe(algorithm=GD(lr=1.0, normalized_steps=True))
    x = generate.inputs(recipe, B=1, T=12, H=1, K=4, V=3)
    for size in (1e-2, 1.0, 1e3):
        k = size * x.k
        y, _ = rc.recall(recipe, k, k, 7 * x.v, {}, engine=method)
        # ε = 1e-6, added to the smallest |k|² ≥ 1e-4.
        assert (
            generate.relative_error(y, 7 * x.v) < 2e-2
            if size < 1
            else generate.relative_error(y, 7 * x.v) < 2e-6
        )


@pytest.mark.parametrize(
    "rule", [GD(lr="input", normalized_steps=True), algorithm.NLMS(lr="input")]
)
def test_least_mean_squares_is_the_keyed_rule(rule: Any) -> None:
    """On a matrix with L2 and single tokens, ρ is 1/(κ(k, k) + ε)."""
    recipe = rc.Recipe(algorithm=rule)
    x = generate.inputs(recipe, B=1, T=12, H=2, K=4, V=3)
    other = recipe.replace(algorithm=algorithm.NLMS(lr="input"))
    result, expected = (generate.run_recall(r, x)[0] for r in (recipe, other))
    assert generate.relative_error(result, expected) < 1e-5


@pytest.mark.parametrize("method", ["reference", "deep"])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 1000.0])
def test_step_under_a_norm_is_limited_to_its_range(size: float, method: str) -> None:
    """|Δz| = (1 + R/|v|) tan(θ/2) |z| for values of any length beyond R; z = W k, θ from v.

    Derived in docs/design/steps.md. The part of an error outside the range of a norm does not
    lengthen the step.
    """
    recipe = rc.Recipe(
        memory=memory.MLP(depth=1, norm="rms", residual=False),
        algorithm=GD(lr=1.0, normalized_steps=True),
    )
    q, k, W = normal(1, 1, 1, D, seed=1), normal(1, 1, 1, D, seed=2), normal(1, D, D, seed=3)
    R = 1.5 * D**0.5
    v = normal(1, 1, 1, D, seed=4)
    v = size * R * v / v.norm()
    params = {"norm_weight": torch.full((1, D), 1.5, dtype=torch.float64)}
    _, state = rc.recall(recipe, q, k, v, params=params, initial_memory=W, engine=method)
    assert state is not None
    z, moved = (w @ k[0, 0, 0] for w in (W[0], state.weights[0][0, 0] - W[0]))
    cosine = functional.cosine_similarity(z, v[0, 0, 0], dim=0)
    turned = float(moved.norm() / z.norm())
    if size >= 1:
        right = (1 + 1 / size) * ((1 - cosine) / (1 + cosine)).sqrt()
        assert turned == pytest.approx(float(right), rel=1e-4)  # ε of the norm and of ρ
    else:  # within the range the full error counts
        sine = (1 - cosine**2).sqrt()
        right = (1 + size**2 - 2 * size * cosine) / (size * sine)
        assert turned == pytest.approx(float(right), rel=1e-4)


@pytest.mark.parametrize("method", ["reference", "deep"])
def test_muon_step_under_a_norm_ignores_the_length_of_values(method: str) -> None:
    """For an error along the norm's sphere, only the direction of a longer value counts."""
    recipe = rc.Recipe(
        memory=memory.MLP(depth=1, norm="rms", residual=False),
        algorithm=algorithm.Muon(lr=1.0, momentum=0.5, normalized_steps=True),
    )
    q, k, W = normal(1, 1, 1, D, seed=1), normal(1, 1, 1, D, seed=2), normal(1, D, D, seed=3)
    v, params = normal(1, 1, 1, D, seed=4), {"norm_weight": torch.ones(1, D, dtype=torch.float64)}
    moved: list[float] = []
    for size in (10.0, 1000.0):
        _, state = rc.recall(recipe, q, k, size * v, params=params, initial_memory=W, engine=method)
        assert state is not None
        moved.append(float((state.weights[0][0, 0] - W[0]).norm()))
    assert moved[1] == pytest.approx(moved[0], rel=1e-6)


@pytest.mark.parametrize("method", ["reference", "deep"])
def test_second_derivatives_at_the_center(method: str) -> None:
    """Values equal to the key, a zero bias, and empty positions of an open batch."""
    recipe = rc.Recipe(
        memory=memory.MLP(expansion=1, norm="layer"),
        algorithm=GD(batch_size=3, normalized_steps=True),
    )
    x = generate.inputs(recipe, B=1, T=7, H=1, K=3, V=3).with_grad()
    v = torch.cat([x.k[:, :2], x.v[:, 2:4], torch.zeros_like(x.v[:, :1]), x.v[:, 5:]], 1).detach()
    params = {n: torch.zeros_like(p) if "bias" in n else p for n, p in x.params.items()}
    params = {n: p.detach().requires_grad_() for n, p in params.items()}
    leaves = [x.k, v.requires_grad_(), *params.values()]
    y, _ = rc.recall(
        recipe, x.q, x.k, v, x.gates, params=params, initial_memory=x.init, engine=method
    )
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    total = sum(g.square().sum() for g in first)
    assert isinstance(total, Tensor)
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, leaves))


@rc.member
class Disc(memory.Stack):
    """A user's memory: W φ(x) + x in the unit ball around the key, and a chain."""

    bounded = True
    residual = True

    @property
    def chain_activation(self) -> str:
        return "identity"

    def maps(self, F: int, V: int) -> tuple[memory.LinearMap, ...]:
        return (
            memory.LinearMap(
                name="W", out_features=V, in_features=F, reads_features=True, is_output=True
            ),
        )

    def compute(self, apply: Any, x: Tensor, raw: Tensor, params: Any) -> Tensor:
        return raw + apply(0, x)

    def nearest_output(self, value: Tensor, raw: Tensor, params: Any) -> Tensor:
        away = value - raw
        return raw + away / away.norm(dim=-1, keepdim=True).clamp_min(1.0)


def test_bound_without_a_range_is_refused() -> None:
    @rc.member
    class Bounded(memory.Memory):
        """tanh(W x) with a declared bound of one half."""

        bounded = True

        def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
            return ((V, F),)

        def forward(self, weights: Any, x: Tensor, raw: Tensor, params: Any) -> Tensor:
            return torch.tanh(x @ weights[0].mT)

    with pytest.raises(rc.RecipeError, match=r"declared bounded.*define nearest_output"):
        Bounded()


def test_range_of_a_custom_memory() -> None:
    """The engine calls it also if the memory's other declarations allow a faster path."""
    recipe = rc.Recipe(
        memory=Disc(),
        features=rc.features.Polynomial(),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=3, normalized_steps=True),
    )
    x = scale_if_divergent(recipe, inputs_for(recipe, B=1, T=10, H=2))
    check_agrees(recipe, x, "deep")
    check_chunks_and_splits(recipe, x, "deep")
    y, _ = generate.run_recall(recipe, x)
    other, _ = generate.run_recall(recipe.replace(memory=memory.MLP(depth=1)), x)
    assert generate.relative_error(y, other) > 1e-3


@pytest.mark.parametrize("method", ["reference", "deep"])
def test_zero_error(method: str) -> None:
    """If the prediction equals the value, ρ is 0 and gradients are finite."""
    recipe = rc.Recipe(memory=memory.MLP(), algorithm=Momentum(batch_size=2, normalized_steps=True))
    x = generate.inputs(recipe, B=1, T=5, H=1, K=3, V=3).with_grad()
    # A residual that is the full prediction, with values equal to the keys.
    init = (x.init[0], torch.zeros_like(x.init[1])) if x.init is not None else None
    y, _ = rc.recall(recipe, x.q, x.k, x.k.detach(), x.gates, initial_memory=init, engine=method)
    (slope, rate) = torch.autograd.grad(y.square().sum(), [x.q, x.gates["lr"]])
    assert torch.equal(y, x.q)
    assert bool(torch.isfinite(slope).all()) and not rate.any()


# -- engines -------------------------------------------------------------------------------------


def _structures() -> dict[str, rc.Recipe]:
    plain = rc.Recipe(
        memory=memory.MLP(expansion=2),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=3, normalized_steps=True),
    )
    window, descent = context.Window(size=3), GD(batch_size=3, normalized_steps=True)
    return {
        "momentum": plain,
        "matrix": plain.replace(memory=memory.Matrix()),
        "descent": plain.replace(algorithm=descent, retention=retention.Keep()),
        "batches of one": plain.replace(algorithm=Momentum(normalized_steps=True)),
        "window": plain.replace(context=window),
        "three maps": plain.replace(memory=memory.MLP(depth=3, expansion=2, activation="silu")),
        "no residual": plain.replace(memory=memory.MLP(residual=False, activation="tanh")),
        "narrowing": plain.replace(memory=memory.MLP(depth=2, expansion=1)),
        "huber": plain.replace(bias=bias.Huber(), context=window),
        "own loss": plain.replace(bias=outside.Emphasis()),
        "affine": plain.replace(bias=outside.Eager()),
        "norm": plain.replace(memory=memory.MLP(norm="layer", bias=True)),
        "norm alone": plain.replace(
            memory=memory.MLP(expansion=1, norm="rms", residual=False), bias=bias.Huber()
        ),
        "gated, channels, window": plain.replace(
            memory=memory.GatedMLP(expansion=2), retention=retention.Decay(per="key"),
            algorithm=descent, context=window,
        ),
        "rates per value": plain.replace(
            algorithm=Momentum(batch_size=3, per="value", normalized_steps=True)
        ),
        "mean": plain.replace(
            retention=retention.Keep(),
            algorithm=GD(batch_size=3, reduction="mean", offset="learned", normalized_steps=True),
        ),
        "on the write only": plain.replace(
            memory=memory.Matrix(),
            algorithm=Momentum(batch_size=3, momentum_on="value", normalized_steps=True),
        ),
        "on the write only, token by token": plain.replace(
            memory=memory.Matrix(), retention=retention.Decay(per="key", when="before"),
            algorithm=Momentum(momentum_on="value", normalized_steps=True),
        ),
        "simplex at borders": plain.replace(retention=retention.Simplex(link_every="batch")),
        "printed L4": plain.replace(
            retention=retention.Lq(form="as_published", link_every="batch", decay=retention.Decay())
        ),
        "steps": plain.replace(
            memory=memory.Matrix(), algorithm=GD(updates_per_token=2, normalized_steps=True)
        ),
    }  # fmt: skip


STRUCTURES = _structures()


FAST = (
    "batches of one", "matrix", "three maps", "own loss", "norm", "gated, channels, window", "mean",
    "on the write only, token by token", "printed L4",
)  # fmt: skip
"""Structures that combine the parts of the others."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in STRUCTURES],
)
def test_the_engine_is_the_reference(name: str) -> None:
    """Outputs, state, gradients; splits, single tokens, handovers, masks, packing."""
    recipe = STRUCTURES[name]
    assert DeepEngine().unsupported_reasons(recipe) == []
    assert rc.select_engine(recipe).engine.name == "deep"
    x = scale_if_divergent(recipe, inputs_for(recipe, B=1, T=13, H=2))
    check_agrees(recipe, x, "deep", chunk_size=4)
    check_agrees(recipe, inputs_for(recipe, B=2, T=8, H=1, G=3), "deep")
    short = inputs_for(recipe, B=2, T=9, H=2)
    check_chunks_and_splits(recipe, short, "deep")
    check_gradients_across_splits(recipe, short, "deep", [4, 5])
    check_handover(recipe, x, "deep")
    check_packing(recipe, inputs_for(recipe, B=1, T=12, H=2), PACKED, "deep")
    for mask in MASKS.values():
        check_masks(recipe, short, "deep", mask, chunk_size=4)
    check_single_gradients(recipe, x, engine="deep")


KERNELS = {
    "matrix": rc.Recipe(features=rc.features.Exponential(), algorithm=GD(normalized_steps=True)),
    "perceptron": rc.Recipe(
        memory=memory.MLP(expansion=1),
        features=rc.features.Gaussian(),
        bias=bias.Huber(),
        context=context.Window(size=3),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=3, normalized_steps=True),
    ),
    "norm": rc.Recipe(
        memory=memory.MLP(expansion=1, norm="layer"),
        features=rc.features.Gaussian(),
        algorithm=GD(batch_size=3, normalized_steps=True),
    ),
    "gated": rc.Recipe(
        memory=memory.GatedMLP(expansion=1),
        features=rc.features.Exponential(),
        retention=retention.Decay(when="before"),
        algorithm=GD(normalized_steps=True),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    """Over infinitely many features |φ(k)|² is κ(k, k)."""
    recipe = KERNELS[name]
    assert rc.select_engine(recipe).engine.name == "kernel"
    x = scale_if_divergent(recipe, inputs_for(recipe, B=1, T=9, H=2))
    check_agrees(recipe, x, "kernel")
    check_chunks_and_splits(recipe, x, "kernel")
    check_gradients_across_splits(recipe, x, "kernel", [4, 5])
    check_handover(recipe, x, "kernel")


@pytest.mark.parametrize("batch", [1, 3])
def test_a_linear_kernel_is_a_matrix(batch: int) -> None:
    recipe = rc.Recipe(
        bias=bias.Huber(), algorithm=Momentum(batch_size=batch, normalized_steps=True)
    )
    x = generate.inputs(recipe, B=2, T=8, H=2, K=4, V=3, zero=True)
    other = recipe.replace(features=rc.features.LinearKernel())
    result, expected = (rc.recall(r, x.q, x.k, x.v, x.gates)[0] for r in (other, recipe))
    assert generate.relative_error(result, expected) < EXACT


@pytest.mark.parametrize("name", ["momentum", "huber", "affine", "norm", "gated, channels, window"])
def test_gradients_of_gradients(name: str) -> None:
    """Second derivatives with create_graph equal the reference's."""
    recipe = STRUCTURES[name]
    x = inputs_for(recipe, B=1, T=7, H=1)
    second: list[dict[str, Tensor]] = []
    for method in ("reference", "deep"):
        leaves = x.with_grad()
        y, state = generate.run_recall(recipe, leaves, engine=method)
        named = leaves.tensors()
        first = torch.autograd.grad(
            generate.random_projection(y, state),
            list(named.values()),
            create_graph=True,
            allow_unused=True,
        )
        total = sum(g.square().sum() for g in first if g is not None)
        assert isinstance(total, Tensor)
        result = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
        second.append(dict(zip(named, result, strict=True)))
    wrong, what = generate.largest_error(second[1], second[0])
    assert wrong < 1e-9, what


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [None, "layer"])
def test_zero_error_at_long_keys(norm: str | None, dtype: torch.dtype) -> None:
    """An error of exactly 0 gives a step of 0, for any length of the key."""
    recipe = rc.Recipe(
        memory=memory.MLP(expansion=1, norm=norm),
        retention=retention.Decay(),
        algorithm=Momentum(batch_size=3, normalized_steps=True),
    )
    x = inputs_for(recipe, B=1, T=6, H=1).map_tensors(lambda t: t.to(dtype))
    empty = [name for name in x.tensors() if name.startswith("init") or name.endswith("norm_bias")]
    named = x.tensors()
    keys = 40 * named["k"]
    changed = x.replace_tensors(
        {"k": keys, "v": keys, **{name: torch.zeros_like(named[name]) for name in empty}}
    )
    expected, result = (
        generate.gradients(recipe, changed, engine=method)[2] for method in ("reference", "deep")
    )
    assert all(bool(one.isfinite().all()) for one in result.values())
    wrong, what = generate.largest_error(result, expected)
    assert wrong < (1e-4 if dtype == torch.float32 else 1e-9), what


def test_decoding_with_the_cache() -> None:
    """Single tokens with the cache equal one call; half precision and float32 stay finite."""
    recipe = STRUCTURES["window"]
    x = inputs_for(recipe, B=2, T=11, H=2)
    with torch.no_grad():
        complete, end = generate.run_recall(recipe, x, engine="deep")
        pieces, state = generate.run_in_pieces(recipe, x, list(range(1, 11)), ["deep"])
    assert "factors" in state.cache
    assert generate.relative_error(pieces, complete) < EXACT
    assert (
        generate.largest_error(generate.flatten_state(state), generate.flatten_state(end))[0]
        < EXACT
    )


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
def test_repeated_tokens_and_large_values_stay_finite(size: float) -> None:
    """A repeated token: multiples below 2/b contract, for values of any size."""
    recipe = rc.Recipe(
        memory=memory.MLP(),
        algorithm=GD(batch_size=16, lr=1 / 16, normalized_steps=True),
    )
    x = generate.inputs(recipe, B=1, T=1, H=2, K=8, V=8, dtype=torch.float32)
    k, v = x.k.expand(1, 1024, 2, 8), (size * x.v).expand(1, 1024, 2, 8)
    y, _ = rc.recall(recipe, k, k, v, {}, initial_memory=x.init)
    assert float((y[:, -1] - v[:, -1]).norm() / v[:, -1].norm()) < 0.01


# -- messages ------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"declares no target, the minimum of its loss: use bias\.L2\(\)", {"bias": bias.DotProduct()}),
    (r"declares no target", {"bias": outside.Tempered()}),
    (r"scales erasure and write alike", {"bias": bias.L2(probe=bias.Probe())}),
    (r"descends on all of the past at once: use context\.Online", {"context": context.Prefix()}),
    (r"rebuilds A from W: use normalized_steps=False", {"retention": retention.FDivergence()}),
    (
        r"divides by a sum that changes with every key: use memory\.Read\(\)",
        {
            "features": rc.features.Exponential(),
            "memory": memory.Matrix(read=memory.Read(normalize="sum")),
        },
    ),
]


@pytest.mark.parametrize(("match", "changes"), REFUSED)
def test_refusals(match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(rc.RecipeError, match=match) as refused:
        rc.Recipe(algorithm=GD(normalized_steps=True), **changes)
    assert "algorithm.GradientDescent(normalized_steps=True)" in str(refused.value)


MUON_REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("use lr_position='outside'", {"lr_position": "inside"}, {}),
    ("declares no target", {}, {"bias": bias.DotProduct()}),
    ("puts a link between them: use retention.Keep", {}, {"retention": retention.Simplex()}),
    ("puts a link between them: use retention.Keep", {}, {"retention": retention.Ball()}),
]


@pytest.mark.parametrize(("match", "fields", "changes"), MUON_REFUSED)
def test_refusals_of_muon(match: str, fields: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(rc.RecipeError, match=match) as refused:
        rc.Recipe(algorithm=algorithm.Muon(normalized_steps=True, **fields), **changes)
    assert "algorithm.Muon(normalized_steps=True)" in str(refused.value)


def test_serialises_and_explains() -> None:
    recipe = STRUCTURES["momentum"]
    assert rc.Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.canonical().algorithm.uses_normalized_steps
    still = recipe.replace(
        algorithm=dataclasses.replace(Momentum(normalized_steps=True), momentum=0.0)
    )
    assert still.canonical().algorithm == GD(normalized_steps=True)
    muon = rc.Recipe(
        memory=memory.MLP(), algorithm=algorithm.Muon(ns_steps=0, normalized_steps=True)
    )
    assert rc.Recipe.from_json(muon.to_json()) == muon == muon.canonical()
    assert any(
        line.startswith("λ_t = max(0, −") for line in rc.explain(muon, full=True).write_equations
    )
    assert any(line.startswith("ρ_t = ⟨") for line in rc.explain(recipe, full=True).write_equations)
    assert "scales gradients" in rc.select_engine(STRUCTURES["steps"]).rejected["linear"][0]
