"""Results of a user's loss: shapes are checked at each call, other properties by `check_member`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import recollect as rc
from recollect.testing.user_code import check_user_code, sample_numbers

Values = Mapping[str, Tensor]

PER = "one number per association"
BATCH_ENTRY = "for an entry of a batch than for the entry alone"
LOSSES: dict[str, tuple[str, Any]] = {
    "a mean over everything": (PER, lambda p, v: F.mse_loss(p, v)),
    "a sum over everything": (PER, lambda p, v: (p - v).square().sum()),
    "reduced over the batch": (PER, lambda p, v: (p - v).square().sum((0, -1))),
    "not reduced at all": (
        r"sum over the last axis only, .sum\(-1\): .* not \(2, 3, 4\)",
        lambda p, v: (p - v).square(),
    ),
    "an axis too many": (PER, lambda p, v: (p - v).square().sum(-1, keepdim=True)),
    "normalised over the batch": (
        BATCH_ENTRY,
        lambda p, v: ((p - v) / (1 + (p - v).square().mean((0, 1)))).square().sum(-1),
    ),
    "less its mean over time": (
        BATCH_ENTRY,
        lambda p, v: ((p - v) - (p - v).mean(1, keepdim=True)).square().sum(-1),
    ),
    "a float": ("not float", lambda p, v: (p - v).square().sum().item()),
    "nothing": ("not NoneType", lambda p, v: None),
    "detached": ("carries no gradient", lambda p, v: (p - v).detach().square().sum(-1)),
    "of the value alone": ("carries no gradient", lambda p, v: v.square().sum(-1)),
}
ERRORS: dict[str, tuple[str, Any]] = {
    "reduced": ("one slope per value channel", lambda p, v: (p - v).sum(-1)),
    "a scalar": ("one slope per value channel", lambda p, v: (p - v).mean()),
    "a list": ("not list", lambda p, v: (p - v).tolist()),
    "detached": ("carries no gradient", lambda p, v: (p - v).detach()),
    "less its mean": (BATCH_ENTRY, lambda p, v: p - v - (p - v).mean((0, 1))),
}


def _bias(name: str, function: Any) -> type[rc.bias.Bias]:
    def method(self: rc.bias.Bias, prediction: Tensor, value: Tensor, gates: Values) -> Any:
        return function(prediction, value)

    return rc.member(type("OwnReturn", (rc.bias.Bias,), {name: method, "__module__": __name__}))


def _refused(name: str, function: Any, match: str) -> None:
    """Check that `check_member` refuses the bias, and for a wrong shape the first call."""
    bias = _bias(name, function)()
    with pytest.raises((rc.RecipeError, AssertionError), match=match) as caught:
        check_user_code(bias)
    if "must return" in str(caught.value):
        p, v = torch.randn(2, 2, 3, 4)
        with pytest.raises(rc.RecipeError, match=match) as caught:
            bias.error(p, v, {})
    message = str(caught.value)
    assert message.startswith(f"bias.OwnReturn.{name} ")
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize("what", LOSSES)
def test_invalid_loss_is_refused(what: str) -> None:
    match, function = LOSSES[what]
    _refused("loss", function, match)


@pytest.mark.parametrize("what", ERRORS)
def test_invalid_error_is_refused(what: str) -> None:
    match, function = ERRORS[what]
    _refused("error", function, match)


def test_a_wrong_signature_is_refused() -> None:
    def loss(self: rc.bias.Bias, prediction: Tensor, value: Tensor) -> Tensor:
        return (prediction - value).square().sum(-1)

    with pytest.raises(rc.RecipeError, match=r"must take \(prediction, value, gates\), not \(pred"):
        type("TwoArguments", (rc.bias.Bias,), {"loss": loss, "__module__": __name__})


def test_a_loss_for_one_number_of_channels() -> None:
    weights = torch.arange(7.0)
    cls = _bias("loss", lambda p, v: (weights * (p - v).square()).sum(-1))
    q, k, v = torch.randn(3, 1, 2, 1, 7)
    y, _ = rc.recall(rc.Recipe(bias=cls()), q, k, v, {"lr": torch.full((1, 2, 1), 0.1)})
    assert y.shape == (1, 2, 1, 7)


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("memory", [rc.memory.Matrix(), rc.memory.MLP()], ids=["Matrix", "MLP"])
@pytest.mark.parametrize("name", ["loss", "error"])
def test_a_mean_over_the_batch_is_refused_by_every_engine(
    name: str, memory: rc.memory.Memory, engine: str
) -> None:
    recipe = rc.Recipe(
        bias=_bias(name, lambda p, v: (p - v).square().mean())(),
        memory=memory,
        algorithm=rc.algorithm.GradientDescent(lr=0.1),
    )
    layer = rc.MemoryLayer(8, 2, recipe, engine=engine)
    with pytest.raises(rc.RecipeError, match=rf"OwnReturn.{name} must return one .* not \(\)"):
        layer(torch.randn(2, 3, 8))


def test_numbers_are_inside_their_ranges() -> None:
    @rc.member
    class Ranged(rc.bias.Bias):
        low = rc.quantity("input", above=0, below=1, init=0.5)
        high = rc.quantity("learned", at_most=-2, init=-2, axes=("V",))
        scale = rc.quantity("learned", above=0, init=2.0, log=True)

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return (gates["low"] * (prediction - value).square()).sum(-1)

    result = sample_numbers(Ranged(), (50,), 3)
    assert {name: tuple(x.shape) for name, x in result.items()} == {
        "low": (50, 1),
        "high": (50, 3),
        "log_scale": (50, 1),
    }
    assert ((result["low"] > 0) & (result["low"] < 1)).all() and result["low"].unique().numel() > 40
    assert (result["high"] <= -2).all()
