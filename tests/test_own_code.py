"""Members of one's own whose code does not do what it says: one sentence when they are made.

And arguments that nothing takes: the nearest name there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.misuse.sentences import is_one_sentence

import recollect as rc
from recollect.choices import member as registry


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that these tests register are free again after each."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def memory(
    shapes: Callable[..., Any] = lambda self, F, V: ((V, F),),
    forward: Callable[..., Any] = lambda self, weights, x, raw, params: x @ weights[0].mT,
) -> type[rc.memory.Memory]:
    body = {"shapes": shapes, "forward": forward}
    return rc.member(type("OwnMap", (rc.memory.Memory,), body))


def refused(cls: type[Any], says: str) -> None:
    """By its own making, and by `check_member`, in one sentence each."""
    with pytest.raises(rc.RecipeError) as error:
        cls()
    is_one_sentence(str(error.value))
    assert says in str(error.value)
    with pytest.raises(AssertionError) as failure:
        rc.testing.check_member(cls, count=1)
    assert says in str(failure.value)
    assert "TypeError" not in str(failure.value) and "KeyError" not in str(failure.value)


@pytest.mark.parametrize(
    "stated",
    [(4, 4), None, 5, ((4, 2.5),), ((4, -1),), (), ("ab",), "ab", torch.Size([4, 4])],
    ids=repr,
)
def test_shapes_that_are_none(stated: object) -> None:
    says = "OwnMap.shapes must return one tuple of sizes for each of its weights"
    refused(memory(shapes=lambda self, F, V: stated), says)


def test_shapes_that_are_wrong_at_other_sizes_only() -> None:
    """What is asked later is looked at again."""
    cls = memory(shapes=lambda self, F, V: ((V, F),) if V == 4 else (V, F))
    with pytest.raises(rc.RecipeError, match=r"OwnMap.shapes must return .*, and not \(8, 8\)"):
        rc.MemoryLayer(16, 2, rc.Recipe(memory=cls()))


def test_lists_are_shapes_too() -> None:
    recipe = rc.Recipe(memory=memory(shapes=lambda self, F, V: [[V, F]])())
    y, _ = rc.MemoryLayer(16, 2, recipe)(torch.randn(1, 3, 16))
    assert y.shape == (1, 3, 16)


@pytest.mark.parametrize(
    ("gives", "found"),
    [
        (lambda y: torch.cat([y, y], -1), "(1, 1, 3, 8)"),
        (lambda y: y.sum(-1), "(1, 1, 3)"),
        (lambda y: None, "NoneType"),
    ],
)
def test_an_output_of_the_wrong_size(gives: Callable[..., Any], found: str) -> None:
    cls = memory(forward=lambda self, weights, x, raw, params: gives(x @ weights[0].mT))
    refused(
        cls, f"OwnMap.forward must return a tensor [B, H, N, V], here (1, 1, 3, 4), and not {found}"
    )


MUST_RETURN = "must return W, a tensor of the shape and dtype of A"
EXPECTED = "here (2, 3, 4, 5) of torch.float32, not"
LINKS: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda self, A, gates: None, f"{MUST_RETURN}, not NoneType"),
    "a number": (lambda self, A, gates: 1.0, f"{MUST_RETURN}, not float"),
    "reduced": (lambda self, A, gates: A.sum(-1), f"{MUST_RETURN}, {EXPECTED} (2, 3, 4) of"),
    "transposed": (lambda self, A, gates: A.mT, f"{EXPECTED} (2, 3, 5, 4) of"),
    "wider": (lambda self, A, gates: A.double(), f"{EXPECTED} (2, 3, 4, 5) of torch.float64"),
    "detached": (lambda self, A, gates: A.detach().tanh(), "carries no gradient"),
    "constant": (lambda self, A, gates: torch.zeros_like(A), "carries no gradient"),
    "over the batch": (lambda self, A, gates: A / (1 + A.norm()), "reduce over the last two axes"),
    "over the heads": (
        lambda self, A, gates: A / (1 + A.norm(dim=1, keepdim=True)),
        "next to the maps of other sequences and heads",
    ),
    "in place": (lambda self, A, gates: A.clamp_(-1, 1), "changes A in place"),
    "undeclared": (
        lambda self, A, gates: A * gates["radius"],
        "reads the number 'radius', and it declares none: declare it as a field",
    ),
    "one argument": (lambda self, A: A.tanh(), "must take (A, gates), not (A)"),
}


@pytest.mark.parametrize("name", LINKS)
def test_a_wrong_link_is_refused(name: str) -> None:
    link, says = LINKS[name]
    refused(rc.member(type("OwnLink", (rc.retention.Retention,), {"link": link})), says)


def test_a_link_that_raises_is_left_to_its_own_call() -> None:
    def link(self: Any, A: torch.Tensor, gates: Any) -> torch.Tensor:
        return torch.linalg.matrix_exp(A)  # of square maps only, and the trial's are not

    cls = rc.member(type("OwnLink", (rc.retention.Retention,), {"link": link}))
    recipe = rc.Recipe(retention=cls())
    y, _ = rc.MemoryLayer(16, 2, recipe)(torch.randn(1, 3, 16))
    assert y.shape == (1, 3, 16)


def test_features_of_another_number_than_declared() -> None:
    def phi(self: Any, x: Any, params: Any, side: Any, position: Any) -> Any:
        return torch.cat([x, x], -1)

    refused(
        rc.member(type("OwnLift", (rc.features.Features,), {"phi": phi})),
        "OwnLift.phi must return a tensor [B, T, H, N, F] with F = dim(4) = 4",
    )


def test_numbers_that_nobody_declared() -> None:
    def loss(self: Any, prediction: Any, value: Any, gates: Any) -> Any:
        return (gates["sharp"] * (prediction - value) ** 2).sum(-1)

    says = "reads the number 'sharp', and it declares none: declare it as a field, such as sharp ="
    refused(rc.member(type("OwnLoss", (rc.bias.Bias,), {"loss": loss})), f"OwnLoss.loss {says}")
    refused(
        memory(forward=lambda self, weights, x, raw, params: params["sharp"] * x),
        f"OwnMap.forward {says}",
    )

    def phi(self: Any, x: Any, params: Any, side: Any, position: Any) -> Any:
        return x * params["sharp"]

    refused(rc.member(type("OwnPhi", (rc.features.Features,), {"phi": phi})), f"OwnPhi.phi {says}")


def test_a_declared_number_is_no_fault() -> None:
    def loss(self: Any, prediction: Any, value: Any, gates: Any) -> Any:
        return (gates["sharp"] * (prediction - value) ** 2).sum(-1)

    body = {"loss": loss, "sharp": rc.quantity("token", above=0, init=1.0)}
    assert rc.member(type("OwnSharp", (rc.bias.Bias,), body))().brief == "OwnSharp()"


def test_a_bias_that_states_nothing() -> None:
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
def test_arguments_that_nothing_takes(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError) as error:
        make()
    assert says in str(error.value)
    assert "__init__" not in str(error.value)


def test_the_nearest_argument_of_a_configuration_and_of_data() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(rc.RecipeError, match="'hiden_size'; did you mean 'hidden_size'"):
        rc.lm.RecollectConfig.from_recipes("gla", hiden_size=32)
    data = rc.Recipe(memory=rc.memory.MLP()).to_dict()
    data["memory"]["dpeth"] = data["memory"].pop("depth")
    with pytest.raises(rc.RecipeError, match="no field 'dpeth'; did you mean 'depth'"):
        rc.Recipe.from_dict(data)


@pytest.mark.parametrize("given", [rc.bias, rc.bias.L2, "l2", None], ids=repr)
def test_what_to_pass_for_a_choice_is_a_member(given: object) -> None:
    with pytest.raises(rc.RecipeError, match=r"must be a member such as rc.bias.L2\(\), not"):
        rc.Recipe(bias=given)  # type: ignore[arg-type]


def test_sizes_that_a_trial_is_too_small_for() -> None:
    """An eighth of four channels is none; of the layer's 64 it is 8."""
    narrow = memory(
        shapes=lambda self, F, V: ((F // 8, F), (V, F // 8)),
        forward=lambda self, weights, x, raw, params: x @ weights[0].mT @ weights[1].mT,
    )
    y, _ = rc.MemoryLayer(64, 1, rc.Recipe(memory=narrow()))(torch.randn(1, 3, 64))
    assert y.shape == (1, 3, 64)


def test_what_a_table_of_ones_own_lacks_is_no_number_of_the_memory() -> None:
    def forward(self: Any, weights: Any, x: Any, raw: Any, params: Any) -> torch.Tensor:
        scale = {"cuda": 2.0}[x.device.type]
        return scale * x @ weights[0].mT

    memory(forward=forward)()


def test_a_member_with_a_way_of_its_own_to_be_made_keeps_it() -> None:
    @rc.member
    class Powered(rc.bias.Bias):
        exponent: float = rc.number(2.0)

        def __init__(self, power: float = 2.0) -> None:
            object.__setattr__(self, "exponent", power)

        def loss(self, prediction: Any, value: Any, gates: Any) -> torch.Tensor:
            return (prediction - value).abs().pow(self.exponent).sum(-1)

    assert Powered(3.0).exponent == Powered(power=3.0).exponent == 3.0


def test_a_trial_leaves_what_is_drawn_later_as_it_was() -> None:
    def forward(self: Any, weights: Any, x: Any, raw: Any, params: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ weights[0].mT, 0.5)

    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    memory(forward=forward)()
    torch.testing.assert_close(torch.rand(3), first, rtol=0, atol=0)
