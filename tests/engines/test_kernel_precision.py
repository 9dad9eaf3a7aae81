"""Keys that a decay has reduced to little, and queries far more similar to them than to others.

`digits` is the recursion on rows in 60 decimal digits with unbounded exponents: the oracle for
every dtype. Results beyond the range of a dtype are refused; all others are exact, with their
gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from tests.contracts import generate
from tests.engines.test_kernel_deep import RECIPES as DEEP
from torch import Tensor

import recollect as rc

T, K, V = 7, 2, 2
FAST = ("decay before", "window and momentum")
SUM = rc.memory.Read(normalize="sum")
DECAYS = (-1.0, -30.0, -95.0, -110.0, -200.0, -700.0, -math.inf)
DIGITS = 60


def _recipe(c: int, b: int, order: str = "after", *, momentum: bool = False) -> rc.Recipe:
    rates: dict[str, float] = {"lr": 0.5, "batch_size": b}
    kind = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
    return rc.Recipe(
        memory=rc.memory.Matrix(read=SUM),
        features=rc.features.Exponential(),
        retention=rc.retention.Decay(when=order),
        context=rc.context.Online() if c == 1 else rc.context.Window(size=c),
        algorithm=kind(**rates, **({"momentum": 0.5} if momentum else {})),
    )


RECIPES = {
    "online": _recipe(1, 1),
    "decay before": _recipe(1, 1, "before"),
    "inner batch": _recipe(1, 3),
    "window": _recipe(3, 1),
    "window and inner batch": _recipe(3, 2),
    "window and momentum": _recipe(3, 2, momentum=True),
}
# Fast are a decay before the write, and one after it with all other options.
CASES = [
    pytest.param(name, method, marks=[pytest.mark.slow] * (name not in FAST))
    for name, method in itertools.product(RECIPES, ("reference", "kernel"))
]


def make_inputs(recipe: rc.Recipe, scale: float, log_decay: float, seed: int) -> generate.Inputs:
    """Return float32 numbers in float64, with a decay at some tokens or at all but the first."""
    x = generate.inputs(recipe, B=1, T=T, H=1, K=K, V=V, seed=seed, dtype=torch.float32, zero=True)
    decay = x.gates["log_decay"].clone()
    places = [slice(1, None), slice(3, 4), slice(2, None, 3)][seed % 3]
    decay[:, places] = log_decay
    x = x.replace_tensors({"q": scale * x.q, "k": scale * x.k, "gate log_decay": decay})
    return x.map_tensors(lambda a: a.double())


def digits(recipe: rc.Recipe, x: generate.Inputs) -> list:
    """Return y ``[T][V]``."""
    with mpmath.workdps(DIGITS):
        return [[float(a) for a in row] for row in _walk(recipe, x, {}, mpmath.mpf(0))]


WEIGHTS = torch.randn(T * V, generator=torch.Generator().manual_seed(5)).double()


def change_along(
    recipe: rc.Recipe, x: generate.Inputs, moved: dict[str, Tensor], weights: Tensor
) -> float:
    """Return the change of Σ y · weights along ``moved``, by a central difference."""
    with mpmath.workdps(DIGITS):
        h = mpmath.mpf(10) ** -20
        sides = []
        for sign in (1, -1):
            y = itertools.chain(*_walk(recipe, x, moved, sign * h))
            sides.append(sum(w * a for w, a in zip(weights.tolist(), y, strict=True)))
        return float((sides[0] - sides[1]) / (2 * h))


def _walk(recipe: rc.Recipe, x: generate.Inputs, moved: dict[str, Tensor], h: mpmath.mpf) -> list:
    """Run the recursion, one number at a time."""

    def numbers(name: str) -> list:
        value = x.tensors()[name][0, :, 0]
        along = moved[name][0, :, 0] if name in moved else torch.zeros_like(value)
        flat = [
            mpmath.mpf(a) + h * mpmath.mpf(d) if math.isfinite(a) else mpmath.mpf(a)
            for a, d in zip(value.flatten().tolist(), along.flatten().tolist(), strict=True)
        ]
        size = value[0].numel()
        return [flat[i : i + size] for i in range(0, len(flat), size)]

    q, k, v = (numbers(n) for n in "qkv")
    logs = [a for (a,) in numbers("gate log_decay")]
    window = numbers("gate window") if "gate window" in x.tensors() else None
    c, b, eta = recipe.context.horizon or 1, recipe.algorithm.batch_size, mpmath.mpf("0.5")
    theta = mpmath.mpf("0.5") if recipe.algorithm.slots else None
    assert recipe.retention.decay is not None
    initial = recipe.retention.decay.when == "before"

    def kappa(a: list, z: list) -> mpmath.mpf:
        return mpmath.exp(sum(s * t for s, t in zip(a, z, strict=True)) / mpmath.sqrt(K))

    def read(a: list, rows: list, mass: list) -> list:
        total = sum((m * kappa(a, k[j]) for j, m in enumerate(mass)), mpmath.mpf(0))
        if total == 0:
            return [mpmath.mpf(0)] * V
        each = [sum(kappa(a, k[j]) * u[i] for j, u in enumerate(rows)) for i in range(V)]
        return [e / total for e in each]

    assert not initial or b == 1  # α multiplies rows and mass alike, so their mean is unchanged
    rows: list = []
    mass: list = []
    slow: list = []
    outputs = []
    for t in range(T):
        if t % b == 0:
            start = [list(u) for u in rows], list(mass)
        alpha = mpmath.exp(logs[t]) if logs[t] > -mpmath.inf else mpmath.mpf(0)
        rows.append([mpmath.mpf(0)] * V)
        slow.append([mpmath.mpf(0)] * V)
        mass = [alpha * m for m in mass] + [mpmath.mpf(1)]
        rows = [[alpha * a for a in u] for u in rows]
        slow = [[(theta or 0) * a for a in s] for s in slow]
        for i in range(max(t - c + 1, 0), t + 1):
            rate = eta if window is None else eta * window[t][t - i]
            result = read(k[i], *start)
            for n in range(V):
                slow[i][n] -= rate * (result[n] - v[i][n])
        rows = [[a + s for a, s in zip(u, w, strict=True)] for u, w in zip(rows, slow, strict=True)]
        outputs.append(read(q[t], rows, mass))
    return outputs


@functools.cache
def case(name: str, scale: float, log_decay: float, seed: int) -> tuple[generate.Inputs, Tensor]:
    x = make_inputs(RECIPES[name], scale, log_decay, seed)
    return x, torch.tensor(digits(RECIPES[name], x), dtype=torch.float64)


def worst_token(y: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a token within the range of the dtype."""
    size = expected.norm(dim=-1)
    is_in_range = size < torch.finfo(y.dtype).max ** 0.4
    wrong = (y[0, :, 0].double() - expected).norm(dim=-1) / size.clamp_min(1e-2)
    return float(wrong[is_in_range].nan_to_num(math.inf).max())


def answer(call: Callable[[], tuple[Tensor, rc.State]]) -> Tensor | None:
    """Return outputs, or ``None`` if the call is refused because of a decay."""
    try:
        return call()[0]
    except ValueError as caught:
        if "has left less of a key" not in str(caught):
            raise
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "method"), CASES)
def test_large_keys_whose_mass_decays(name: str, method: str, dtype: torch.dtype) -> None:
    """Logits of up to 1600: a call is refused only if e^−617 of a float64 would decide."""
    answered, requested = 0, list(itertools.product((1.0, 12.0, 40.0), DECAYS, range(3)))
    for scale, log_decay, seed in requested:
        x, expected = case(name, scale, log_decay, seed)
        y = answer(
            lambda x=x: generate.run_recall(
                RECIPES[name], x.map_tensors(lambda a: a.to(dtype)), engine=method
            )
        )
        if y is None:
            assert scale == 40.0
            continue
        limit = 1e-3 if dtype is torch.float32 else 1e-10
        assert worst_token(y, expected) < limit, (scale, log_decay, seed)
        answered += 1
    assert answered >= len(requested) - 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "method"), CASES)
@pytest.mark.parametrize("log_decay", [-95.0, -110.0, -math.inf])
def test_gradients_by_decayed_keys(
    name: str, method: str, log_decay: float, dtype: torch.dtype
) -> None:
    """Along a random direction of every input, against a difference in 60 digits."""
    recipe = RECIPES[name]
    x, expected = case(name, 12.0, log_decay, 2)
    leaves = x.map_tensors(lambda a: a.to(dtype)).with_grad()
    y, _ = generate.run_recall(recipe, leaves, engine=method)
    # Tokens are weighted by their size, so that not only the largest counts; overflows are left
    # out.
    size = expected.abs().clamp_min(1e-2)
    is_in_range = (size < torch.finfo(dtype).max ** 0.4).all(-1, keepdim=True).expand_as(size)
    weights = torch.where(is_in_range, WEIGHTS.view_as(size) / size, 0.0).flatten()
    inputs = {n: a for n, a in leaves.tensors().items() if n in ("q", "k", "v", "gate log_decay")}
    total = torch.where(weights != 0, y.double().flatten() * weights, 0.0).sum()
    slopes = torch.autograd.grad(total, list(inputs.values()))
    g = torch.Generator().manual_seed(3)
    for (what, a), slope in zip(inputs.items(), slopes, strict=True):
        along = torch.randn(a.shape, generator=g, dtype=torch.float64)
        change = change_along(recipe, x, {what: along}, weights)
        parts = slope.double() * along
        parts = torch.where(a.isneginf(), 0.0, parts)
        size = float(parts.abs().sum())
        limit = 1e-3 if dtype is torch.float32 else 1e-10
        assert abs(float(parts.sum()) - change) <= limit * max(size, abs(change)), what


@pytest.mark.parametrize(("name", "method"), CASES)
def test_state_that_decayed_to_zero_is_refused(name: str, method: str) -> None:
    """Token by token in float32: exact, or refused if e^−72 in the state would decide."""
    refused = 0
    for scale, log_decay in itertools.product((1.0, 5.0, 12.0), (-1.0, -30.0, -110.0, -math.inf)):
        x, expected = case(name, scale, log_decay, 0)
        single = x.map_tensors(lambda a: a.float())
        y = answer(
            lambda x=single: generate.run_in_pieces(RECIPES[name], x, list(range(1, T)), [method])
        )
        if y is None:
            assert scale == 12.0
            refused += 1
            continue
        assert worst_token(y, expected) < 1e-3, (scale, log_decay)
    assert refused <= 3


def test_forgotten_key_with_a_large_logit() -> None:
    """Two tokens: the second forgets the first, whose similarity is e^102 times larger."""
    k, q = (torch.tensor(a).view(1, 2, 1, 2) for a in ([12.0, 0, 0, 1], [12.0, 0, 12, 0]))
    v = torch.tensor([1.0, 2, 3, 4]).view(1, 2, 1, 2)
    recipe = RECIPES["online"].replace(algorithm=rc.algorithm.GradientDescent(lr=1.0))
    for log_decay, first in ((-math.inf, 2.0), (-200.0, 2.0), (-110.0, 1.99971893)):
        decay = torch.tensor([0.0, log_decay]).view(1, 2, 1)
        for method in ("reference", "kernel"):
            y, _ = rc.recall(recipe, q, k, v, {"log_decay": decay}, engine=method)
            assert y[0, 1, 0].tolist() == pytest.approx([first, 2.0], abs=1e-6)


DECAYING = [
    n for n, r in DEEP.items() if r.retention.decay is not None and r.memory.read.normalize == "sum"
]


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("method", ["reference", "kernel"])
def test_deep_memories_of_large_keys_in_single_precision(name: str, method: str) -> None:
    """Against float64 in the reference, which refuses the calls that float32 refuses."""
    recipe = DEEP[name]
    base = generate.inputs(recipe, B=1, T=6, H=1, K=4, V=4, dtype=torch.float32)
    for scale, log_decay in itertools.product((8.0, 16.0), (-95.0, -math.inf)):
        decay = base.gates["log_decay"].clone()
        decay[:, 2:5:2] = log_decay
        x = base.replace_tensors(
            {"q": scale * base.q, "k": scale * base.k, "gate log_decay": decay}
        )
        with torch.no_grad():
            y, _ = generate.run_recall(
                recipe, x.map_tensors(lambda a: a.double()), engine="reference"
            )
            z, _ = generate.run_recall(recipe, x, engine=method)
        if not bool(y.isfinite().all()) or float(y.abs().max()) > 1e12:
            continue  # a window writes to rows that have decayed to zero: W is as large
        assert generate.relative_error(z, y) < 1e-3, (scale, log_decay)


PROBED = rc.Recipe(
    memory=rc.memory.Matrix(read=SUM),
    features=rc.features.Exponential(),
    bias=rc.bias.L2(probe=rc.bias.Probe(at="token", normalize="sum")),
    retention=rc.retention.Decay(),
)


def test_strong_decays_inside_a_block() -> None:
    """Sums of −50 per token reach −3200 in a block, relative to which float32 rounds to 1e-4."""
    x = generate.inputs(PROBED, B=1, T=130, H=2, K=4, V=4, dtype=torch.float32)
    decay = x.gates["log_decay"].clone()
    decay[:, ::2] = -200.0
    x = x.replace_tensors({"gate log_decay": decay})
    y, _, slopes = generate.gradients(PROBED, x.map_tensors(lambda a: a.double()), engine="kernel")
    z, _, grads = generate.gradients(PROBED, x, engine="kernel")
    assert generate.relative_error(z, y) < 1e-6
    assert generate.largest_error(grads, slopes)[0] < 3e-6
