"""Memories over a kernel against autograd on weights over explicit features; zeros and −∞.

`written_out` uses no rows: W2 multiplies the Taylor series of the exponential, the divisor of a
normalised read is a separate vector, and autograd supplies every gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from tests.contracts import generate
from tests.engines.test_kernel_deep import RECIPES
from torch import Tensor
from torch.nn import functional

import recollect as rc

PRESETS = ("deep_transformer", "swdt", "dot")
FORGOTTEN = (-700.0, -800.0, -math.inf)
"""Log decays that leave a normal float64, and two that leave nothing."""
ORDER = 12  # |x·z|/√3 ≤ 0.58, so the remainder of the series is below 1e-12
EXACT = 1e-9  # a layer norm of a small hidden vector amplifies rounding


POWERS = torch.tensor([p for p in itertools.product(range(ORDER + 1), repeat=3) if sum(p) <= ORDER])


def phi(x: Tensor) -> Tensor:
    """Return features of exp(x·z/√3): Π x_i^p_i / √(p_i! √3^p_i) for all p, ``[3]`` to ``[F]``."""
    p = torch.arange(ORDER + 1, dtype=x.dtype)
    scale = torch.exp(torch.lgamma(p + 1) / 2) * 3 ** (p / 4)
    table = x[:, None] ** p / scale
    return torch.stack([table[i, POWERS[:, i]] for i in range(3)]).prod(0)


def written_out(recipe: rc.Recipe, x: generate.Inputs, *, sums: bool = True) -> Tensor:
    """A perceptron x + LN(W1 gelu(W2 φ*(x) / n·φ*(x))), token by token, ``[1, T, H, V]``.

    ``sums``: autograd's gradient by W2 is multiplied by n·φ*(k_i) again.
    """
    _, T, H, _ = x.v.shape
    assert x.init is not None
    learns_dot = isinstance(recipe.bias, rc.bias.DotProduct)
    c, b = recipe.context.horizon or 1, recipe.algorithm.batch_size
    outputs = []
    for h in range(H):
        keys = [phi(x.k[0, t, h]) for t in range(T)]
        anchors = torch.stack([phi(z) for z in x.init[0][h]])
        W2, W1, n = x.init[1][h].mT @ anchors, x.init[2][h], anchors.sum(0)

        def M(W2: Tensor, W1: Tensor, n: Tensor, f: Tensor, raw: Tensor, h: int = h) -> Tensor:
            y = W1 @ functional.gelu(W2 @ f / (n @ f))
            y = (y - y.mean()) / torch.sqrt((y - y.mean()).square().mean() + 1e-6)
            return raw + y * x.params["norm_weight"][h] + x.params["norm_bias"][h]

        for t in range(T):
            if t % b == 0:
                start = (W2, W1, n)
            alpha = torch.ones(())
            if "log_decay" in x.gates:
                alpha = x.gates["log_decay"][0, t, h].exp()
            W2, W1, n = alpha * W2, alpha * W1, alpha * n + keys[t]
            for i in range(max(t - c + 1, 0), t + 1):
                prediction, v = M(*start, keys[i], x.k[0, i, h]), x.v[0, i, h]
                loss = -(prediction @ v) if learns_dot else (prediction - v).square().sum() / 2
                by2, by1 = torch.autograd.grad(loss, start[:2], create_graph=True)
                rate = x.gates["lr"][0, t, h]
                if "window" in x.gates:
                    rate = rate * x.gates["window"][0, t, h, t - i]
                W2 = W2 - rate * by2 * (start[2] @ keys[i] if sums else 1.0)
                W1 = W1 - rate * by1
            outputs.append(M(W2, W1, n, phi(x.q[0, t, h]), x.q[0, t, h]))
    return torch.stack(outputs).unflatten(0, (H, T)).transpose(0, 1)[None]


def _inputs(recipe: rc.Recipe, T: int = 5) -> generate.Inputs:
    x = generate.inputs(recipe, B=1, T=T, H=1, K=3, V=3)
    assert x.init is not None
    z = functional.normalize(x.init[0], dim=-1)
    return dataclasses.replace(x, init=(z, *x.init[1:]))


def _compare(recipe: rc.Recipe, x: generate.Inputs, method: str) -> None:
    """Compare outputs and the gradient of every input with `written_out`."""
    leaves = x.with_grad()
    y, _ = generate.run_recall(recipe, leaves, engine=method)
    expected = written_out(recipe, leaves)
    assert generate.relative_error(y, expected) < EXACT
    named = leaves.tensors()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    slopes = (
        torch.autograd.grad((z * weights).sum(), list(named.values()), allow_unused=True)
        for z in (y, expected)
    )
    for what, a, e in zip(named, *slopes, strict=True):
        assert a is not None and e is not None, what
        assert generate.relative_error(a, e) < 10 * EXACT, what


@pytest.mark.parametrize("method", ["reference", "kernel"])
@pytest.mark.parametrize("name", PRESETS)
def test_step_of_w2_has_no_sum_and_explain_states_it(name: str, method: str) -> None:
    """Autograd's ∂ℓ/∂W2 has the factor 1/Σκ, which the rows of attention lack (ATLAS 24, 26)."""
    recipe = RECIPES[name]
    x = _inputs(recipe)
    _compare(recipe, x, method)
    leaves = x.with_grad()
    plain, times_the_sum = (written_out(recipe, leaves, sums=sums) for sums in (False, True))
    assert generate.relative_error(plain, times_the_sum) > 0.02
    mass = "Σ_j m_j κ" if name == "swdt" else "Σ_j κ"
    i = "t" if name == "deep_transformer" else "i"
    text = str(rc.explain(name))
    assert (
        f"∂(W2 φ*(k_{i}))/∂W2 counts as φ*(k_{i}): {mass}(k_j, k_{i}) divides what is read, "
        "and no step" in text
    )


def test_explain_states_the_decay_of_the_softmax_sum() -> None:
    assert (
        "W2 φ*(x) = Σ_i κ(k_i, x) u_i / Σ_i m_i κ(k_i, x), m_i starts at 1, and decays like u_i"
        in str(rc.explain("swdt"))
    )


def test_explain_names_every_divided_map() -> None:
    recipe = rc.zoo.get("dot").recipe.replace(
        memory=rc.memory.GatedMLP(read=rc.memory.Read(normalize="sum"))
    )
    text = str(rc.explain(recipe))
    assert "counts as φ*(k_i), likewise for W3" in text
    assert "a row u_i per key, likewise for W3" in text


def test_explain_of_an_undivided_read() -> None:
    recipe = rc.zoo.get("dot").recipe.replace(memory=rc.memory.MLP())
    assert "counts as" not in str(rc.explain(recipe))


# -- exact zeros ---------------------------------------------------------------------------------

DECAYING = [n for n, r in RECIPES.items() if r.retention.decay is not None]
SAMPLE = DECAYING[::5]


def _zeroed(x: generate.Inputs) -> dict[str, generate.Inputs]:
    """Yield inputs with zeros at two tokens, or in the first row, one input at a time."""
    result: dict[str, generate.Inputs] = {}
    for name, value in x.tensors().items():
        if name in ("q", "gate log_decay"):
            continue
        z = value.clone()
        if name.startswith("init"):
            z[:, 0] = 0
        elif name.startswith("param"):
            z[:] = 0
        else:
            z[:, [0, 2]] = 0
        result[name] = x.replace_tensors({name: z})
    return result


@pytest.mark.parametrize("name", SAMPLE)
def test_rows_of_exact_zeros_have_gradients(name: str) -> None:
    """A decaying row is cut at the end of the dtype's range; a row of 0 has a slope of 1."""
    recipe = RECIPES[name]
    for what, x in _zeroed(generate.inputs(recipe, B=1, T=7, H=1, K=4, V=4)).items():
        y, _, slopes = generate.gradients(recipe, x, engine="reference")
        z, _, grads = generate.gradients(recipe, x, engine="kernel")
        assert generate.relative_error(z, y) < EXACT, what
        wrong = generate.largest_error(grads, slopes)
        assert wrong[0] < 10 * EXACT, (what, wrong)


@pytest.mark.parametrize("number", ["v", "gate lr", "gate window", "init 1"])
def test_zeros_of_swdt_against_autograd(number: str) -> None:
    recipe = RECIPES["swdt"]
    # rows decay at a second boundary
    _compare(recipe, _zeroed(_inputs(recipe, T=7))[number], "kernel")


# -- decays that leave nothing -------------------------------------------------------------------


def _forgetting(x: generate.Inputs, log_decay: float, tokens: slice) -> generate.Inputs:
    decay = x.gates["log_decay"].clone()
    decay[:, tokens] = log_decay
    return x.replace_tensors({"gate log_decay": decay})


@pytest.mark.parametrize("log_decay", FORGOTTEN)
@pytest.mark.parametrize("tokens", [slice(2, 3), slice(None)])
@pytest.mark.parametrize("method", ["reference", "kernel"])
def test_key_whose_mass_underflows_is_read(log_decay: float, tokens: slice, method: str) -> None:
    """The window of swdt writes to the rows of keys that have weight 0 in the sum."""
    recipe = RECIPES["swdt"]
    _compare(recipe, _forgetting(_inputs(recipe), log_decay, tokens), method)


@pytest.mark.parametrize("name", DECAYING)
def test_engine_and_reference_decay_equally(name: str) -> None:
    recipe = RECIPES[name]
    base = generate.inputs(recipe, B=1, T=5, H=1, K=4, V=4)
    for log_decay, tokens in ((-math.inf, slice(2, 3)), (-700.0, slice(None))):
        x = _forgetting(base, log_decay, tokens)
        y, _, slopes = generate.gradients(recipe, x, engine="reference")
        z, _, grads = generate.gradients(recipe, x, engine="kernel")
        assert generate.relative_error(z, y) < EXACT
        assert generate.largest_error(grads, slopes)[0] < 10 * EXACT
        full = generate.run_recall(recipe, x)[0]
        split = generate.run_in_pieces(recipe, x, [1, 3], ["kernel", "reference"])[0]
        assert generate.relative_error(split, full) < EXACT


@pytest.mark.parametrize("log_decay", [-1.0, *FORGOTTEN])
@pytest.mark.parametrize("method", ["reference", "kernel"])
def test_mean_over_the_past_with_a_decay_before_the_write(log_decay: float, method: str) -> None:
    """α_t multiplies rows and mass alike, so the mean that token t measures is that of W_(t−1)."""
    recipe = rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="sum")),
        features=rc.features.Exponential(),
        retention=rc.retention.Decay(when="before"),
    )
    x = generate.inputs(recipe, B=1, T=6, H=1, K=4, V=3, zero=True)
    x = _forgetting(x, log_decay, slice(3, 4)).with_grad()
    k, logs = x.k[0, :, 0], x.gates["log_decay"][0, :, 0]
    rows: list[Tensor] = []
    outputs: list[Tensor] = []

    def mean(point: Tensor, count: int, upto: int) -> Tensor:
        """Return the mean of the first rows, each decayed by the tokens after it up to ``upto``."""
        if not count:
            return torch.zeros(3, dtype=torch.float64)
        decays = torch.stack([logs[i + 1 : upto + 1].sum() for i in range(count)])
        return torch.softmax(k[:count] @ point / 2 + decays, dim=0) @ torch.stack(rows[:count])

    for t in range(6):
        step = x.v[0, t, 0] - mean(k[t], t, t - 1)
        rows.append(x.gates["lr"][0, t, 0] * step)
        outputs.append(mean(x.q[0, t, 0], t + 1, t))
    expected = torch.stack(outputs)[None, :, None]
    y, _ = generate.run_recall(recipe, x, engine=method)
    assert generate.relative_error(y, expected) < 1e-12
    inputs = [x.q, x.k, x.v, x.gates["lr"]]
    for a, e in zip(
        *(torch.autograd.grad(z.sum(), inputs, retain_graph=True) for z in (y, expected)),
        strict=True,
    ):
        assert generate.relative_error(a, e) < 1e-12
