"""Members written by a user, as CONTRIBUTING.md shows them, without touching the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.select import select

Values = Mapping[str, Tensor]


@rc.member
class LogCosh(rc.bias.Bias):
    """Σ s² log cosh(e/s): only a loss, so autograd supplies the error."""

    scale: float | str = rc.quantity("token", above=0, init=1.0, travels=True)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        s = gates["scale"]
        return (s**2 * torch.cosh((prediction - value) / s).log()).sum(-1)


@rc.member
class Overshoot(rc.bias.Bias):
    """Aims half as far again as the value: affine, so the linear engine takes it unasked."""

    affine = (1.0, 1.5)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return prediction - 1.5 * value


@rc.member
class Leak(rc.retention.Retention):
    """W = A/(1 + ‖A‖_F/c): a soft ball, with a number of its own."""

    ceiling: float | str = rc.quantity("token", above=0, init=2.0)

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size = (A.square().sum((-2, -1), keepdim=True) + 1e-12).sqrt()
        return A / (1 + size / gates["ceiling"])


@rc.member
class Signed(rc.algorithm.Algorithm):
    """Lion's step on one buffer: S = β S + (1 − β) g, A += −η tanh(S/0.1)."""

    lr: float | str = rc.quantity("token", at_least=0, init=0.1)
    beta: float = 0.9

    slots = ("average",)
    linear = False

    def update(self, slots: Values, step: rc.algorithm.Step) -> tuple[dict[str, Tensor], Tensor]:
        S = self.beta * slots["average"] + (1 - self.beta) * step.gradient
        return {"average": S}, -step.lr * torch.tanh(S / 0.1)


@rc.member
class Unhurried(rc.algorithm.Algorithm):
    """Plain descent at rate 1, with no number at all."""


@rc.member
class Squared(rc.features.Features):
    """φ(x) = (x, x²)."""

    def dim(self, K: int) -> int:
        return 2 * K

    def phi(self, x: Tensor, params: Values, side: str, position: Tensor) -> Tensor:
        return torch.cat([x, x.square()], dim=-1)


RECIPES: dict[str, tuple[rc.Recipe, str]] = {
    "log cosh": (rc.Recipe(bias=LogCosh()), "reference"),
    "log cosh in a window": (
        rc.Recipe(
            memory=rc.memory.MLP(),
            bias=LogCosh(),
            context=rc.context.Window(size=3),
            algorithm=rc.algorithm.Momentum(batch=2),
        ),
        "reference",
    ),
    # Empty slots of a window hold zeros, where e/s has no value: they must not poison the rest.
    "log cosh, one scale per head": (
        rc.Recipe(bias=LogCosh(scale="static"), context=rc.context.Window(size=3)),
        "reference",
    ),
    "log cosh, one scale for all": (
        rc.Recipe(bias=LogCosh(scale=2.0), context=rc.context.Window(size=3)),
        "reference",
    ),
    "overshoot": (rc.Recipe(bias=Overshoot(), retention=rc.retention.Decay()), "linear"),
    "overshoot, implicit": (
        rc.Recipe(bias=Overshoot(), algorithm=rc.algorithm.Implicit()),
        "linear",
    ),
    "leak": (rc.Recipe(retention=Leak(), algorithm=rc.algorithm.Momentum(batch=2)), "reference"),
    "signed": (rc.Recipe(algorithm=Signed(), retention=rc.retention.Decay()), "reference"),
    "unhurried": (rc.Recipe(algorithm=Unhurried(), bias=rc.bias.DotProduct()), "linear"),
    "squared": (rc.Recipe(features=Squared()), "linear"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_they_run_differentiate_decode_and_round_trip(name: str) -> None:
    recipe, engine = RECIPES[name]
    assert rc.Recipe.from_json(recipe.to_json()) == recipe
    selection = select(recipe)
    # "deep" is where a loss on its own goes once there is such an engine.
    assert selection.engine.name in {engine, *(("deep",) if engine == "reference" else ())}
    x = generate.inputs(recipe, T=9)
    if recipe.needs_init():
        x = generate.smaller(recipe, x, 0.3)  # cosh overflows once a deep memory diverges
    y, state, slopes = generate.gradients(recipe, x, method="auto")
    assert all(torch.isfinite(slope).all() for slope in slopes.values())
    assert slopes["k"].abs().max() > 0
    expected, kept, twins = generate.gradients(recipe, x, method="reference")
    # Another grouping of the same float64 sums.
    assert generate.error(y, expected) < 1e-10
    assert generate.worst(generate.parts(state), generate.parts(kept))[0] < 1e-10
    assert generate.worst(slopes, twins)[0] < 1e-9
    decoded, last = generate.split(recipe, x, list(range(1, 9)), ["auto"])
    assert generate.error(decoded, y) < 1e-10
    assert generate.worst(generate.parts(last), generate.parts(state))[0] < 1e-10


def test_log_cosh_follows_its_own_slope() -> None:
    """The oracle: error = s tanh(e/s), by hand."""
    recipe = RECIPES["log cosh"][0]
    x = generate.inputs(recipe, B=1, T=6, H=1)
    y, _ = generate.run(recipe, x)
    assert x.init is not None
    W, outputs = x.init[0][0], []
    for t in range(6):
        q, k, v = x.q[0, t, 0], x.k[0, t, 0], x.v[0, t, 0]
        s, eta = x.gates["scale"][0, t, 0], x.gates["lr"][0, t, 0]
        W = W - eta * (s * torch.tanh((W @ k - v) / s))[:, None] * k
        outputs.append(W @ q)
    torch.testing.assert_close(y[0, :, 0], torch.stack(outputs), atol=1e-11, rtol=1e-11)


def test_overshoot_is_the_delta_rule_on_larger_values() -> None:
    recipe = RECIPES["overshoot"][0]
    x = generate.inputs(recipe)
    larger = dataclasses.replace(x, v=1.5 * x.v)
    y, _ = generate.run(recipe, x)
    twin, _ = generate.run(recipe.but(bias=rc.bias.L2()), larger)
    torch.testing.assert_close(y, twin, atol=1e-12, rtol=1e-12)


def test_a_false_declaration_is_what_the_contract_would_catch() -> None:
    p, v = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    a, b = Overshoot.affine
    torch.testing.assert_close(Overshoot().error(p, v, {}), a * p - b * v)


def test_members_must_be_declared() -> None:
    with pytest.raises(rc.RecipeError, match="extends no choice"):

        @rc.member
        class Homeless:
            pass

    @rc.member
    class Mute(rc.bias.Bias):
        pass

    with pytest.raises(rc.RecipeError, match="must override loss or error"):
        Mute()

    class Forgotten(rc.bias.Bias):
        affine = (1.0, 1.0)

    with pytest.raises(rc.RecipeError, match=r"Forgotten is not a member yet.*@rc\.member"):
        rc.Recipe(bias=Forgotten())
    with pytest.raises(rc.RecipeError, match="a member named L2 exists already"):

        @rc.member
        class L2(rc.bias.Bias):
            def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
                return prediction.sum(-1)

    with pytest.raises(rc.RecipeError, match="plain data"):
        Signed(beta=torch.tensor(0.5))  # type: ignore[arg-type]


def here(name: str) -> bool:
    """Whether this part of the package is there."""
    try:
        getattr(rc, name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.skipif(not here("explain"), reason="explain is not here yet")
@pytest.mark.parametrize("name", RECIPES)
def test_they_explain_themselves(name: str) -> None:
    recipe, _ = RECIPES[name]
    text = str(rc.explain(recipe))
    assert select(recipe).engine.name in text
    assert "problem" in text
    assert "write" in text


@pytest.mark.skipif(not here("MemoryLayer"), reason="the layer is not here yet")
@pytest.mark.parametrize("name", RECIPES)
def test_they_make_a_layer(name: str) -> None:
    recipe, _ = RECIPES[name]
    layer = rc.MemoryLayer(16, 2, recipe)
    x = torch.randn(2, 6, 16, requires_grad=True)
    y, state = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    first, state = layer(x[:, :4])
    rest, _ = layer(x[:, 4:], state)
    # float32 in another grouping
    torch.testing.assert_close(torch.cat([first, rest], 1), y, atol=1e-5, rtol=1e-4)
