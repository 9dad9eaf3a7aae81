"""A user's member whose code breaks its contract gives one sentence at the first call.

Unknown arguments are refused with the nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.misuse.sentences import is_one_sentence

import recollect as rc
import recollect.testing  # registers the library's members before the fixture copies them
from recollect.choices import member as registry


@pytest.fixture(autouse=True)
def unregister(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unregister the members of these tests after each."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def memory(
    shapes: Callable[..., Any] = lambda self, F, V: ((V, F),),
    forward: Callable[..., Any] = lambda self, weights, x, raw, params: x @ weights[0].mT,
) -> type[rc.memory.Memory]:
    body = {"shapes": shapes, "forward": forward}
    return rc.member(type("OwnMap", (rc.memory.Memory,), body))


def first_call(cls: type[Any]) -> torch.Tensor:
    recipe = rc.Recipe(**{cls.choice: cls()})
    return rc.MemoryLayer(16, 2, recipe)(torch.randn(1, 3, 16))[0]


def refused(cls: type[Any], says: str) -> None:
    """Check that the first call and `check_member` refuse the member in one sentence each."""
    with pytest.raises(rc.RecipeError) as error:
        first_call(cls)
    is_one_sentence(str(error.value))
    assert says in str(error.value)
    refused_by_contract(cls, says)


def refused_by_contract(cls: type[Any], says: str) -> None:
    with pytest.raises(AssertionError) as failure:
        rc.testing.check_member(cls, count=1)
    assert says in str(failure.value)
    assert "TypeError" not in str(failure.value) and "KeyError" not in str(failure.value)


@pytest.mark.parametrize(
    "stated",
    [(4, 4), None, 5, ((4, 2.5),), ((4, -1),), (), ("ab",), "ab", torch.Size([4, 4])],
    ids=repr,
)
def test_invalid_shapes(stated: object) -> None:
    says = "OwnMap.shapes must return one tuple of sizes for each of its weights"
    refused(memory(shapes=lambda self, F, V: stated), says)


def test_shapes_that_are_wrong_at_other_sizes_only() -> None:
    cls = memory(shapes=lambda self, F, V: ((V, F),) if V == 4 else (V, F))
    with pytest.raises(rc.RecipeError, match=r"OwnMap.shapes must return .*, and not \(8, 8\)"):
        rc.MemoryLayer(16, 2, rc.Recipe(memory=cls()))


def test_lists_are_shapes() -> None:
    assert first_call(memory(shapes=lambda self, F, V: [[V, F]])).shape == (1, 3, 16)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda y: torch.cat([y, y], -1), "("),
        (lambda y: y[..., :1], "("),
        (lambda y: y.sum(-1), "("),
        (lambda y: None, "NoneType"),
    ],
)
def test_an_output_of_the_wrong_size(gives: Callable[..., Any], message: str) -> None:
    cls = memory(forward=lambda self, weights, x, raw, params: gives(x @ weights[0].mT))
    refused(
        cls, "OwnMap.forward must return a tensor [B, H, N, V]: expected a tensor of shape (1, "
    )
    with pytest.raises(rc.RecipeError, match=re.escape(f"not {message}")):
        first_call(cls)


MUST_RETURN = "must return W, a tensor of the shape of A: expected a tensor of shape ("
LINKS: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda self, A, gates: None, MUST_RETURN),
    "a number": (lambda self, A, gates: 1.0, MUST_RETURN),
    "reduced": (lambda self, A, gates: A.sum(-1), MUST_RETURN),
    "fewer": (lambda self, A, gates: A[..., :1], MUST_RETURN),
    "narrower": (lambda self, A, gates: A.float(), "a tensor of the dtype of its argument"),
    "detached": (lambda self, A, gates: A.detach().tanh(), "carries no gradient"),
    "constant": (lambda self, A, gates: torch.zeros_like(A), "carries no gradient"),
    "over the batch": (lambda self, A, gates: A / (1 + A.norm()), "reduce over the last two axes"),
    "over the heads": (
        lambda self, A, gates: A / (1 + A.norm(dim=1, keepdim=True)),
        "reduce over the last two axes of A only",
    ),
    "in place": (lambda self, A, gates: A.clamp_(-1, 1), "changes its argument in place"),
    "undeclared": (
        lambda self, A, gates: A * gates["radius"],
        "reads the quantity 'radius', and it declares none: declare it as a field",
    ),
}


@pytest.mark.parametrize("name", LINKS)
def test_a_wrong_link_is_refused(name: str) -> None:
    link, says = LINKS[name]
    cls = rc.member(type("OwnLink", (rc.retention.Retention,), {"link": link}))
    (refused if says is MUST_RETURN else refused_by_contract)(cls, says)


def test_a_link_of_one_argument_is_refused() -> None:
    with pytest.raises(rc.RecipeError, match=r"OwnLink.link must take \(A, gates\), not \(A\)"):
        type("OwnLink", (rc.retention.Retention,), {"link": lambda self, A: A.tanh()})


def test_a_link_of_square_maps_only() -> None:
    def link(self: Any, A: torch.Tensor, gates: Any) -> torch.Tensor:
        return torch.linalg.matrix_exp(A)

    cls = rc.member(type("OwnLink", (rc.retention.Retention,), {"link": link}))
    assert first_call(cls).shape == (1, 3, 16)


def test_features_of_another_number_than_declared() -> None:
    def phi(self: Any, x: Any, params: Any, side: Any, position: Any) -> Any:
        return torch.cat([x, x], -1)

    cls = rc.member(type("OwnLift", (rc.features.Features,), {"phi": phi}))
    with pytest.raises(rc.RecipeError, match=r"OwnLift.phi must return F = dim\(K\) features"):
        first_call(cls)
    refused_by_contract(cls, "OwnLift declares dim(4) = 4, and phi gives 8 features")


def test_undeclared_numbers() -> None:
    def loss(self: Any, prediction: Any, value: Any, gates: Any) -> Any:
        return (gates["sharp"] * (prediction - value) ** 2).sum(-1)

    says = (
        "reads the quantity 'sharp', and it declares none: declare it as a field, such as sharp ="
    )
    cls = rc.member(type("OwnLoss", (rc.bias.Bias,), {"loss": loss}))
    refused_by_contract(cls, f"OwnLoss.loss {says}")
    refused_by_contract(
        memory(forward=lambda self, weights, x, raw, params: params["sharp"] * x),
        f"OwnMap.forward {says}",
    )

    def phi(self: Any, x: Any, params: Any, side: Any, position: Any) -> Any:
        return x * params["sharp"]

    cls = rc.member(type("OwnPhi", (rc.features.Features,), {"phi": phi}))
    refused_by_contract(cls, f"OwnPhi.phi {says}")


def test_declared_number_is_accepted() -> None:
    def loss(self: Any, prediction: Any, value: Any, gates: Any) -> Any:
        return (gates["sharp"] * (prediction - value) ** 2).sum(-1)

    body = {"loss": loss, "sharp": rc.quantity("input", above=0, init=1.0)}
    assert rc.member(type("OwnSharp", (rc.bias.Bias,), body))().brief == "OwnSharp()"


def test_bias_without_a_loss() -> None:
    refused(rc.member(type("OwnNothing", (rc.bias.Bias,), {})), "must override loss or error")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: rc.Recipe(memmory=None),
            "Recipe has no argument 'memmory'; did you mean 'memory'?",
        ),
        (lambda: rc.memory.MLP(dpeth=2), "MLP has no argument 'dpeth'; did you mean 'depth'?"),
        (lambda: rc.LayerOptions(qknorm="l2"), "'qknorm'; did you mean 'qk_norm'?"),
        (lambda: rc.GateOptions(inti=0.3), "'inti'; did you mean 'init'?"),
        (lambda: rc.bias.L2(zzz=1), "L2 has no argument 'zzz'; it has probe"),
        (lambda: rc.Recipe(rc.memory.MLP()), "takes its arguments by name, such as Recipe(memory"),
    ],
)
def test_unknown_arguments(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError) as error:
        make()
    assert says in str(error.value)
    assert "__init__" not in str(error.value)


def test_the_nearest_argument_of_a_configuration_and_of_data() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(rc.RecipeError, match="'hiden_size': did you mean 'hidden_size'"):
        rc.lm.RecollectConfig.from_recipes("gla", hiden_size=32)
    data = rc.Recipe(memory=rc.memory.MLP()).to_dict()
    data["memory"]["dpeth"] = data["memory"].pop("depth")
    with pytest.raises(rc.RecipeError, match="no field 'dpeth'; did you mean 'depth'"):
        rc.Recipe.from_dict(data)


@pytest.mark.parametrize("argument", [rc.bias, rc.bias.L2, "l2", None], ids=repr)
def test_choice_must_be_a_member(argument: object) -> None:
    with pytest.raises(rc.RecipeError, match=r"must be a member such as rc.bias.L2\(\), not"):
        rc.Recipe(bias=argument)  # type: ignore[arg-type]


def test_a_memory_that_needs_several_channels() -> None:
    narrow = memory(
        shapes=lambda self, F, V: ((F // 8, F), (V, F // 8)),
        forward=lambda self, weights, x, raw, params: x @ weights[0].mT @ weights[1].mT,
    )
    y, _ = rc.MemoryLayer(64, 1, rc.Recipe(memory=narrow()))(torch.randn(1, 3, 64))
    assert y.shape == (1, 3, 64)


def test_member_keeps_its_constructor() -> None:
    @rc.member
    class Powered(rc.bias.Bias):
        exponent: float = rc.fields.number(2.0)

        def __init__(self, power: float = 2.0) -> None:
            object.__setattr__(self, "exponent", power)

        def loss(self, prediction: Any, value: Any, gates: Any) -> torch.Tensor:
            return (prediction - value).abs().pow(self.exponent).sum(-1)

    assert Powered(3.0).exponent == Powered(power=3.0).exponent == 3.0
