"""What memories over a kernel mean: autograd on weights over explicit features.

`written_out` knows nothing of rows: W2 multiplies the exponential's Taylor series, the sum that a
normalised read divides by is a vector beside it, and autograd supplies every gradient.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.contracts import generate
from tests.engines.test_kernel_deep import RECIPES
from torch import Tensor
from torch.nn import functional

import recollect as rc

PRESETS = ("deep_transformer", "swdt", "dot")
ORDER = 12  # |x·z|/√3 ≤ 0.58: what the series leaves out is below 1e-12
EXACT = 1e-9  # a layer norm of a small hidden vector magnifies rounding


POWERS = torch.tensor([p for p in itertools.product(range(ORDER + 1), repeat=3) if sum(p) <= ORDER])


def phi(x: Tensor) -> Tensor:
    """Features of exp(x·z/√3): Π x_i^p_i / √(p_i! √3^p_i) for all powers p, ``[3]`` to ``[F]``."""
    p = torch.arange(ORDER + 1, dtype=x.dtype)
    scale = torch.exp(torch.lgamma(p + 1) / 2) * 3 ** (p / 4)
    table = x[:, None] ** p / scale
    return torch.stack([table[i, POWERS[:, i]] for i in range(3)]).prod(0)


def written_out(recipe: rc.Recipe, x: generate.Inputs, *, sums: bool = True) -> Tensor:
    """A perceptron x + LN(W1 gelu(W2 φ*(x) / n·φ*(x))), token by token, ``[1, T, H, V]``.

    ``sums``: the gradient by W2, autograd's, is multiplied by n·φ*(k_i) again.
    """
    _, T, H, _ = x.v.shape
    assert x.init is not None
    learns_dot = isinstance(recipe.bias, rc.bias.DotProduct)
    c, b = recipe.context.horizon or 1, recipe.algorithm.batch
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


def _given(recipe: rc.Recipe, T: int = 5) -> generate.Inputs:
    x = generate.inputs(recipe, B=1, T=T, H=1, K=3, V=3)
    assert x.init is not None
    z = functional.normalize(x.init[0], dim=-1)
    return dataclasses.replace(x, init=(z, *x.init[1:]))


def _compare(recipe: rc.Recipe, x: generate.Inputs, method: str) -> None:
    """Outputs and the gradient of every input, against `written_out`."""
    leaves = x.leaves()
    y, _ = generate.run(recipe, leaves, method=method)
    expected = written_out(recipe, leaves)
    assert generate.error(y, expected) < EXACT
    named = leaves.tensors()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    slopes = (
        torch.autograd.grad((z * weights).sum(), list(named.values()), allow_unused=True)
        for z in (y, expected)
    )
    for what, a, e in zip(named, *slopes, strict=True):
        assert a is not None and e is not None, what
        assert generate.error(a, e) < 10 * EXACT, what


@pytest.mark.parametrize("method", ["reference", "kernel"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_step_of_w2_lacks_the_sum_and_explain_says_so(name: str, method: str) -> None:
    """Autograd's ∂ℓ/∂W2 has 1/Σκ, which attention's rows have not (ATLAS 24, 26)."""
    recipe = RECIPES[name]
    x = _given(recipe)
    _compare(recipe, x, method)
    leaves = x.leaves()
    plain, times_the_sum = (written_out(recipe, leaves, sums=sums) for sums in (False, True))
    assert generate.error(plain, times_the_sum) > 0.02
    mass = "Σ_j m_j κ" if name == "swdt" else "Σ_j κ"
    i = "t" if name == "deep_transformer" else "i"
    text = str(rc.explain(name))
    assert (
        f"∂(W2 φ*(k_{i}))/∂W2 counts as φ*(k_{i}): {mass}(k_j, k_{i}) divides what is read, "
        "and no step" in text
    )


def test_explain_left_out_that_the_softmax_sum_decays() -> None:
    assert (
        "W2 φ*(x) = Σ_i κ(k_i, x) u_i / Σ_i m_i κ(k_i, x), m_i 1 at first and decayed like u_i"
        in str(rc.explain("swdt"))
    )


def test_explain_names_every_map_that_is_divided() -> None:
    recipe = rc.zoo.get("dot").recipe.but(
        memory=rc.memory.GatedMLP(read=rc.memory.Read(normalize="sum"))
    )
    text = str(rc.explain(recipe))
    assert "counts as φ*(k_i), likewise for W3" in text
    assert "a row u_i per key, likewise for W3" in text


def test_an_undivided_read_has_nothing_to_say() -> None:
    recipe = rc.zoo.get("dot").recipe.but(memory=rc.memory.MLP())
    assert "counts as" not in str(rc.explain(recipe))
