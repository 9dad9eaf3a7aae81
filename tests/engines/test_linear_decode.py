"""One token: what `linear.decode` and `kernel.softmax` compute is what the reference does."""

from __future__ import annotations

import pytest
import torch

import recollect as rc
from recollect.choices.algorithm.descent import GradientDescent, Implicit
from recollect.choices.bias.losses import L2, DotProduct
from recollect.choices.features.finite import EluPlusOne, Identity
from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.engines.kernel import softmax
from recollect.engines.linear.decode import plan
from recollect.recall.bound import bind
from recollect.recall.call import Call
from recollect.recall.recall import memorise
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


BARE = [
    rc.Recipe(bias=bias, retention=retention, algorithm=GradientDescent())
    for bias in (L2(), DotProduct())
    for retention in RETENTIONS
]
SOFTMAX = rc.zoo.get("softmax_attention").recipe


def _decoded(recipe: rc.Recipe, *, G: int) -> None:
    """A layer's token after a prompt, straight from its numbers: the reference's."""
    x = fitting(recipe, B=2, T=5, H=2, G=G, V=4 if recipe.nonparametric else 3)
    q, k, v = (one.detach() for one in (x.q, x.k, x.v))
    gates = {name: one.detach() for name, one in x.gates.items()}
    prompt = {name: one[:, :4] for name, one in gates.items()}
    token = {name: one[:, 4:] for name, one in gates.items()}
    _, state = rc.recall(recipe, q[:, :4], k[:, :4], v[:, :4], prompt, method="reference")
    last = (q[:, 4:], k[:, 4:], v[:, 4:])
    expected, kept = rc.recall(recipe, *last, token, state=state, method="reference")
    bound = bind(recipe, H=2, K=k.shape[-1], V=v.shape[-1])
    call = Call(
        bound=bound, q=last[0], k=last[1], v=last[2], gates=token, params={}, state=state, sure=True
    )
    y, after = memorise(call)
    same((y, after), (expected, kept), 1e-12, "of a layer's token")


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("recipe", [*BARE, SOFTMAX], ids=str)
def test_a_layers_token_goes_straight_to_the_engine(
    recipe: rc.Recipe, G: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    engine = bind(recipe, H=2, K=4, V=4).engine
    assert engine.token is not None

    def watched(*given: object) -> object:
        result = token(*given)
        seen.append(result is not None)
        return result

    token = engine.token
    monkeypatch.setitem(engine.__dict__, "token", watched)
    with torch.no_grad():
        _decoded(recipe, G=G)
    assert seen == [True]
    _decoded(recipe, G=G)  # where a gradient may be asked for, the general way
    assert seen == [True]


def test_what_a_layers_token_leaves_to_the_general_way() -> None:
    """Features, keyed rates, a cache with empty slots, numbers that are not per token."""
    for recipe in (
        rc.Recipe(features=EluPlusOne()),
        rc.Recipe(algorithm=Implicit()),
        rc.Recipe(algorithm=GradientDescent(lr=0.5)),
        rc.zoo.get("retnet").recipe,
        rc.Recipe(memory=rc.memory.Matrix(read=rc.memory.Read(normalize="sum")), bias=DotProduct()),
    ):
        assert not plan(sized(recipe, H=2, K=4, V=4)).bare, recipe
    x = fitting(SOFTMAX, B=2, T=4, H=2, V=4)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    _, state = rc.recall(SOFTMAX, q[:, :3], k[:, :3], v[:, :3], attention_mask=mask)
    assert state is not None
    with torch.no_grad():
        assert softmax.token(q[:, 3:], k[:, 3:], v[:, 3:], state, scale=1.0) is None
        half = (one[:, 3:].bfloat16() for one in (q, k, v))
        assert softmax.token(*half, state, scale=1.0) is None
