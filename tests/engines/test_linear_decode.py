"""One token of the linear engine: what `decode.one_token` computes is what the reference does."""

from __future__ import annotations

import pytest
import torch

import recollect as rc
from recollect.choices.algorithm.descent import GradientDescent, Implicit
from recollect.choices.bias.losses import L2, DotProduct
from recollect.choices.features.finite import EluPlusOne, Identity
from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.engines.linear.engine import plan
from recollect.recipe.sized import sized
from recollect.testing.compare import gradients, same, worst
from recollect.testing.engines import fitting

RETENTIONS = (
    Keep(),
    Decay(),
    Decay(when="before"),
    Decay(per="key"),
    Decay(per="key", when="before"),
)


def _plain(recipe: rc.Recipe) -> bool:
    return plan(sized(recipe, H=2, K=4, V=3)).plain


@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
@pytest.mark.parametrize("bias", [L2(), DotProduct()], ids=str)
@pytest.mark.parametrize("features", [Identity(), EluPlusOne()], ids=str)
def test_one_token_and_all_its_gradients(
    retention: Retention, bias: L2 | DotProduct, features: Identity | EluPlusOne
) -> None:
    for algorithm in (GradientDescent(), Implicit()):
        if isinstance(algorithm, Implicit) and isinstance(bias, DotProduct):
            continue
        recipe = rc.Recipe(features=features, bias=bias, retention=retention, algorithm=algorithm)
        assert _plain(recipe)
        x = fitting(recipe, B=2, T=1, H=2, G=3)
        y, state, slopes = gradients(recipe, x, method="linear")
        expected, kept, wanted = gradients(recipe, x, method="reference")
        same((y, state), (expected, kept), 1e-12, "of one token")
        assert worst(slopes, wanted)[0] < 1e-12


def test_presets_that_decode_so_and_those_that_do_not() -> None:
    """Windows, momentum, probes and decays over values take the general way."""
    ways = {
        name: _plain(preset.recipe)
        for name in (
            "linear_attention",
            "delta_net",
            "gated_delta_net",
            "mamba2",
            "gla",
            "longhorn",
        )
        for preset in [rc.zoo.get(name)]
    }
    assert all(ways.values()), ways
    for recipe in (
        rc.Recipe(context=rc.context.Window(size=3)),
        rc.Recipe(algorithm=rc.algorithm.Momentum()),
        rc.Recipe(bias=DotProduct(), retention=Decay(per="value")),
        rc.Recipe(memory=rc.memory.Matrix(read=rc.memory.Read(when="before"))),
    ):
        assert not _plain(recipe)


@torch.no_grad()
def test_padded_rows_are_left_alone() -> None:
    recipe = rc.Recipe(retention=Decay())
    x = fitting(recipe, B=2, T=1, H=2)
    mask = torch.tensor([[1], [0]])
    y, state = rc.recall(recipe, x.q, x.k, x.v, x.gates, init=x.init, attention_mask=mask)
    assert state is not None and x.init is not None
    assert state.position.tolist() == [1, 0]
    assert y[1].eq(0).all()
    torch.testing.assert_close(state.weights[0][1], x.init[0].to(state.weights[0].dtype))
