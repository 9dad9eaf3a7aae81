"""What a loss of one's own may return: asked once, when the bias is made."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import recollect as rc
from recollect.choices.trial import sample_numbers

Values = Mapping[str, Tensor]

PER = "per association"
LOSSES: dict[str, tuple[str, Any]] = {
    "a mean over everything": (PER, lambda p, v: F.mse_loss(p, v)),
    "a sum over everything": (PER, lambda p, v: (p - v).square().sum()),
    "reduced over the batch": (PER, lambda p, v: (p - v).square().sum((0, -1))),
    "not reduced at all": (r"made \(2, 3, 4\); sum over the last", lambda p, v: (p - v).square()),
    "an axis too many": (PER, lambda p, v: (p - v).square().sum(-1, keepdim=True)),
    "normalised over the batch": (
        "alone than beside others",
        lambda p, v: ((p - v) / (1 + (p - v).square().mean((0, 1)))).square().sum(-1),
    ),
    "less its mean over time": (
        "alone than beside others",
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
    "less its mean": ("alone than beside others", lambda p, v: p - v - (p - v).mean((0, 1))),
}


def _bias(name: str, function: Any) -> type[rc.bias.Bias]:
    def own(self: rc.bias.Bias, prediction: Tensor, value: Tensor, gates: Values) -> Any:
        return function(prediction, value)

    return rc.member(type("OwnReturn", (rc.bias.Bias,), {name: own, "__module__": __name__}))


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_is_none_is_refused(what: str) -> None:
    match, function = LOSSES[what]
    with pytest.raises(rc.RecipeError, match=match) as caught:
        _bias("loss", function)()
    said = str(caught.value)
    assert said.startswith("bias.OwnReturn.loss ")
    assert "\n" not in said and len(said) < 400


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_that_is_none_is_refused(what: str) -> None:
    match, function = ERRORS[what]
    with pytest.raises(rc.RecipeError, match=match) as caught:
        _bias("error", function)()
    said = str(caught.value)
    assert said.startswith("bias.OwnReturn.error ")
    assert "\n" not in said and len(said) < 400


def test_a_wrong_signature_is_refused() -> None:
    def own(self: rc.bias.Bias, prediction: Tensor, value: Tensor) -> Tensor:
        return (prediction - value).square().sum(-1)

    cls = rc.member(type("TwoArguments", (rc.bias.Bias,), {"loss": own, "__module__": __name__}))
    with pytest.raises(rc.RecipeError, match=r"must take \(prediction, value, gates\), not \(pred"):
        cls()  # pyright: ignore[reportCallIssue]


def test_what_raises_is_left_to_its_own_call() -> None:
    weights = torch.arange(7.0)  # made for values of seven channels
    cls = _bias("loss", lambda p, v: (weights * (p - v).square()).sum(-1))
    q, k, v = torch.randn(3, 1, 2, 1, 7)
    y, _ = rc.recall(rc.Recipe(bias=cls()), q, k, v, {"lr": torch.full((1, 2, 1), 0.1)})
    assert y.shape == (1, 2, 1, 7)


@pytest.mark.parametrize("where", ["inference", "no_grad", "meta", "float64", "autocast"])
def test_it_is_asked_the_same_everywhere(where: str) -> None:
    contexts: dict[str, Any] = {
        "inference": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "meta": torch.device("meta"),
        "float64": torch.no_grad(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
    }
    before, usual = torch.get_rng_state(), torch.get_default_dtype()
    try:
        if where == "float64":
            torch.set_default_dtype(torch.float64)
        with contexts[where]:
            for good in (rc.bias.Huber(threshold=0.7), rc.bias.Lp(p=3.25), rc.bias.DotProduct()):
                assert pickle.loads(pickle.dumps(good)) == good
            _bias("loss", lambda p, v: (p - v).abs().sum(-1))()
            with pytest.raises(rc.RecipeError, match=PER):
                _bias("loss", lambda p, v: F.mse_loss(p, v))()
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(before, torch.get_rng_state())


def test_where_nothing_can_be_tried_it_is_asked_later() -> None:
    cls = _bias("loss", lambda p, v: F.mse_loss(p, v))

    def made(x: Tensor) -> Tensor:
        cls()
        return x.sum()

    torch.func.grad(made)(torch.randn(3))
    torch.vmap(made)(torch.randn(3, 2))
    with FakeTensorMode():
        cls()
    with pytest.raises(rc.RecipeError, match=PER):
        cls()


def test_equal_biases_are_asked_once() -> None:
    asked = []
    cls = _bias("loss", lambda p, v: asked.append(1) or (p - v).square().sum(-1))
    cls()
    once = len(asked)
    assert once == 2  # beside others, and alone
    rc.Recipe(bias=cls()).but(retention=rc.retention.Decay())
    assert len(asked) == once


def test_numbers_are_handed_inside_their_ranges() -> None:
    @rc.member
    class Ranged(rc.bias.Bias):
        low = rc.quantity("token", above=0, below=1, init=0.5)
        high = rc.quantity("static", at_most=-2, init=-2, axes=("V",))
        scale = rc.quantity("static", above=0, init=2.0, log=True)

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return (gates["low"] * (prediction - value).square()).sum(-1)

    found = sample_numbers(Ranged(), (50,), 3)
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "low": (50, 1),
        "high": (50, 3),
        "log_scale": (50, 1),
    }
    assert ((found["low"] > 0) & (found["low"] < 1)).all() and found["low"].unique().numel() > 40
    assert (found["high"] <= -2).all()
