"""Members of a user, as in CONTRIBUTING.md, without changes of the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.select import select_engine

Values = Mapping[str, Tensor]


@rc.member
class LogCosh(rc.bias.Bias):
    """Σ s² log cosh(e/s) without an error, which autograd supplies."""

    scale: float | str = rc.quantity("input", above=0, init=1.0, per_association=True)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        s = gates["scale"]
        return (s**2 * torch.cosh((prediction - value) / s).log()).sum(-1)


@rc.member
class Overshoot(rc.bias.Bias):
    """The target is 1.5 times the value: affine, so the linear engine runs it."""

    affine = (1.0, 1.5)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return prediction - 1.5 * value


@rc.member
class Leak(rc.retention.Retention):
    """W = A/(1 + ‖A‖_F/c): a soft ball with a quantity c."""

    ceiling: float | str = rc.quantity("input", above=0, init=2.0)

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size = (A.square().sum((-2, -1), keepdim=True) + 1e-12).sqrt()
        return A / (1 + size / gates["ceiling"])


@rc.member
class Signed(rc.algorithm.Algorithm):
    """Lion's step on one buffer: S = β S + (1 − β) g, A += −η tanh(S/0.1)."""

    lr: float | str = rc.quantity("input", at_least=0, init=0.1, role="rate")
    beta: float = 0.9

    slots = ("average",)
    linear = False

    def update(self, slots: Values, step: rc.algorithm.Step) -> tuple[dict[str, Tensor], Tensor]:
        S = self.beta * slots["average"] + (1 - self.beta) * step.gradient
        return {"average": S}, -step.lr * torch.tanh(S / 0.1)


@rc.member
class Unhurried(rc.algorithm.Algorithm):
    """Plain descent at rate 1, without quantities."""


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
            algorithm=rc.algorithm.Momentum(batch_size=2),
        ),
        "reference",
    ),
    # Empty slots of a window are zeros, for which e/s is undefined, and must not change other
    # slots.
    "log cosh, one scale per head": (
        rc.Recipe(bias=LogCosh(scale="learned"), context=rc.context.Window(size=3)),
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
    "leak": (
        rc.Recipe(retention=Leak(), algorithm=rc.algorithm.Momentum(batch_size=2)),
        "reference",
    ),
    "signed": (rc.Recipe(algorithm=Signed(), retention=rc.retention.Decay()), "reference"),
    "unhurried": (rc.Recipe(algorithm=Unhurried(), bias=rc.bias.DotProduct()), "linear"),
    "squared": (rc.Recipe(features=Squared()), "linear"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_members_run_differentiate_decode_and_serialise(name: str) -> None:
    recipe, engine = RECIPES[name]
    assert rc.Recipe.from_json(recipe.to_json()) == recipe
    selection = select_engine(recipe)
    # The deep engine may run a recipe in place of the reference.
    assert selection.engine.name in {engine, *(("deep",) if engine == "reference" else ())}
    x = generate.inputs(recipe, T=9)
    if recipe.needs_init():
        x = generate.scaled_down(recipe, x, 0.3)  # cosh overflows once a deep memory diverges
    y, state, slopes = generate.gradients(recipe, x, engine="auto")
    assert all(torch.isfinite(slope).all() for slope in slopes.values())
    assert slopes["k"].abs().max() > 0
    expected, expected_state, twins = generate.gradients(recipe, x, engine="reference")
    # Equal float64 sums in another order.
    assert generate.relative_error(y, expected) < 1e-10
    assert (
        generate.largest_error(
            generate.flatten_state(state), generate.flatten_state(expected_state)
        )[0]
        < 1e-10
    )
    assert generate.largest_error(slopes, twins)[0] < 1e-9
    decoded, last = generate.run_in_pieces(recipe, x, list(range(1, 9)), ["auto"])
    assert generate.relative_error(decoded, y) < 1e-10
    assert (
        generate.largest_error(generate.flatten_state(last), generate.flatten_state(state))[0]
        < 1e-10
    )


def test_log_cosh_follows_its_slope() -> None:
    """The oracle is error = s tanh(e/s)."""
    recipe = RECIPES["log cosh"][0]
    x = generate.inputs(recipe, B=1, T=6, H=1)
    y, _ = generate.run_recall(recipe, x)
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
    y, _ = generate.run_recall(recipe, x)
    twin, _ = generate.run_recall(recipe.replace(bias=rc.bias.L2()), larger)
    torch.testing.assert_close(y, twin, atol=1e-12, rtol=1e-12)


def test_false_declaration_is_refused() -> None:
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
    with pytest.raises(rc.RecipeError, match="a member named LogCosh exists already"):

        @rc.member
        class LogCosh(rc.bias.Bias):
            def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
                return prediction.sum(-1)

    with pytest.raises(rc.RecipeError, match="plain data"):
        Signed(beta=torch.tensor(0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_members_are_explained(name: str) -> None:
    recipe, _ = RECIPES[name]
    text = str(rc.explain(recipe))
    assert select_engine(recipe).engine.name in text
    assert "problem" in text
    assert "write" in text


@pytest.mark.parametrize("name", RECIPES)
def test_members_make_a_layer(name: str) -> None:
    recipe, _ = RECIPES[name]
    layer = rc.MemoryLayer(16, 2, recipe)
    x = torch.randn(2, 6, 16, requires_grad=True)
    y, state = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    first, state = layer(x[:, :4])
    rest, _ = layer(x[:, 4:], state)
    # float32 sums in another order
    torch.testing.assert_close(torch.cat([first, rest], 1), y, atol=1e-5, rtol=1e-4)


def test_gate_whose_name_contains_decay() -> None:
    @rc.member
    class Clamped(rc.retention.Retention):
        undecayed: float | str = rc.quantity("input", above=0)

        def link(self, A: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
            bound = gates["undecayed"]
            return A.clamp(-bound, bound)

    recipe = rc.Recipe(retention=Clamped(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
    q, k, v = torch.randn(3, 1, 4, 2, 3)
    gates = {"undecayed": torch.rand(1, 4, 2) + 0.1}
    y, state = rc.recall(recipe, q, k, v, gates=gates, output_final_state=True)
    last = {"undecayed": gates["undecayed"][:, -1:]}
    y_read = rc.read(recipe, q[:, -1:], state=state, gates=last)
    torch.testing.assert_close(y_read, y[:, -1:])
    rc.testing.check_member(Clamped, count=3)


def test_a_rate_of_any_name_starts_as_a_rate() -> None:
    def kind(role: str) -> str:
        @rc.member
        class Paced(rc.retention.Retention):
            pace: float | str = rc.quantity("input", at_least=0, role=role)

            def link(self, A: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
                return A / (1 + gates["pace"])

        layer = rc.MemoryLayer(8, 2, rc.Recipe(retention=Paced()))
        return layer.gates["pace"].activation.kind

    assert kind("rate") == "sigmoid" and kind("other") == "softplus"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match=r"role must be one of decay, rate, .*, not 'speed'"):
        rc.quantity("input", role="speed")
    with pytest.raises(ValueError, match="gate 'a' of mine: role must be one of"):
        rc.Gate(name="a", owner="mine", role="speed")


def test_a_number_that_engines_read_by_name_needs_its_role() -> None:
    @rc.member
    class Untold(rc.algorithm.Algorithm):
        lr: float | str = rc.quantity("input", at_least=0)

        def update(self, slots: Any, step: rc.algorithm.Step) -> Any:
            return {}, -step.lr * step.gradient

    with pytest.raises(rc.RecipeError, match="declare it with role='rate'"):
        rc.Recipe(algorithm=Untold())


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Register members for one test only."""
    registry = dict(rc.choices.member._REGISTRY)
    monkeypatch.setattr(rc.choices.member, "_REGISTRY", registry)
    return registry


def test_members_named_like_those_of_other_choices_are_saved_and_loaded(
    members: dict[Any, Any],
) -> None:
    @rc.member
    class Gaussian(rc.bias.Bias):  # the name of a kernel of the library
        width: float = rc.fields.number(1.0, above=0)

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return -(-(prediction - value).square().sum(-1) / self.width).exp()

    @rc.member
    class Huber(rc.features.Features):  # the name of a bias of the library
        def dim(self, K: int) -> int:
            return K

        def phi(self, x: Tensor, params: Values, side: str, position: Tensor) -> Tensor:
            return x.clamp(-1, 1)

    recipe = rc.Recipe(bias=Gaussian(width=2.0), features=Huber())
    loaded = rc.Recipe.from_json(recipe.to_json())
    assert loaded == recipe and type(loaded.bias) is Gaussian and type(loaded.features) is Huber
    assert "Gaussian" in str(rc.explain(loaded))
    named = {"bias": {"member": "Gaussian"}, "features": {"member": "Huber"}}
    assert rc.Recipe.from_dict(named) == recipe.replace(bias=Gaussian())
    plain = rc.Recipe(bias=rc.bias.Huber(), features=rc.features.Relu())
    assert rc.Recipe.from_json(plain.to_json()) == plain
    kernel = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        context=rc.context.KernelWeighted(kernel=rc.features.Gaussian()),
        algorithm=rc.algorithm.Analytic(),
    )
    assert rc.Recipe.from_json(kernel.to_json()) == kernel


def test_saved_member_keeps_its_class_if_the_library_adds_the_name(
    members: dict[Any, Any],
) -> None:
    def loss(self: Any, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return (1 + (prediction - value).square()).log().sum(-1)

    mine = rc.member(type("Lorentz", (rc.bias.Bias,), {"__module__": "mine", "loss": loss}))
    text = rc.Recipe(bias=mine()).to_json()
    module = "recollect.choices.bias.losses"
    added = rc.member(type("Lorentz", (rc.bias.Bias,), {"__module__": module, "loss": loss}))
    assert type(rc.Recipe.from_json(text).bias) is mine
    library = rc.Recipe(bias=added())
    assert type(rc.Recipe.from_json(library.to_json()).bias) is added
    assert library.normal_form != rc.Recipe(bias=mine()).normal_form

    other = rc.member(type("Lorentz", (rc.bias.Bias,), {"__module__": "other", "loss": loss}))
    assert type(rc.Recipe.from_json(rc.Recipe(bias=other()).to_json()).bias) is other
    with pytest.raises(rc.RecipeError, match="several members are named 'Lorentz': write mine:L"):
        rc.Recipe.from_json(text.replace("mine:", "moved:"))
    for key in [key for key, cls in members.items() if cls in (mine, other)]:
        del members[key]
    with pytest.raises(rc.RecipeError, match=r"import the module that defines it .*module 'mine'"):
        rc.Recipe.from_json(text)


@pytest.mark.usefixtures("members")
def test_a_value_of_another_type_in_a_file_is_a_recipe_error() -> None:
    @rc.member
    class Compares(rc.bias.Bias):
        """‖M(k) − v‖²/scale."""

        scale: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.scale <= 0:
                raise rc.RecipeError("scale must be positive")

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return (prediction - value).square().sum(-1) / self.scale

    text = rc.Recipe(bias=Compares()).to_json().replace('"scale": 1.0', '"scale": "x"')
    with pytest.raises(rc.RecipeError, match=r"^Compares: '<=' not supported"):
        rc.Recipe.from_json(text)
