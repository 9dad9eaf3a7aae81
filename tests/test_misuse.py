"""Bad input gives one clear sentence or a correct empty result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.select import ENGINES

GATED = rc.Recipe(retention=rc.retention.Decay(when="before"))
RICH = rc.Recipe(
    features=rc.features.Polynomial(),
    context=rc.context.Window(size=3),
    retention=rc.retention.Decay(alpha="learned"),
    algorithm=rc.algorithm.Momentum(),
)
DEEP = rc.Recipe(memory=rc.memory.MLP(), algorithm=rc.algorithm.GradientDescent(batch_size=3))
PRODUCT = rc.Recipe(algorithm=rc.algorithm.GradientDescent(updates_per_token=2))
SOFTMAX = rc.Recipe(
    memory=rc.memory.LocalConstant(),
    context=rc.context.KernelWeighted(),
    algorithm=rc.algorithm.Analytic(),
)
NORMED = rc.Recipe(
    memory=rc.memory.Matrix(read=rc.memory.Read(normalize="floor")),
    bias=rc.bias.DotProduct(),
    retention=rc.retention.Decay(),
    algorithm=rc.algorithm.GradientDescent(lr="log_input"),
)
PREFIX = rc.Recipe(
    context=rc.context.Prefix(decay="input"),
    algorithm=rc.algorithm.GradientDescent(updates_per_token=2),
)
MODULE = rc.Recipe(memory=rc.memory.Module(factory=generate.FACTORY))
ALL = {
    "gated": GATED,
    "rich": RICH,
    "deep": DEEP,
    "product": PRODUCT,
    "softmax": SOFTMAX,
    "normed": NORMED,
    "prefix": PREFIX,
    "module": MODULE,
}


def refuse(match: str, recipe: rc.Recipe, x: generate.Inputs, **options: Any) -> None:
    """Check that the call raises one sentence that matches ``match``."""
    with pytest.raises((rc.RecipeError, ValueError), match=match) as caught:
        generate.run_recall(recipe, x, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300, message


def put(x: generate.Inputs, **changed: Tensor) -> generate.Inputs:
    return dataclasses.replace(x, **changed)


Change = Callable[[generate.Inputs], generate.Inputs]
SHAPES: dict[str, tuple[str, Change]] = {
    "q without heads": (r"q must have shape \[B, T, H, K\]", lambda x: put(x, q=x.q[:, :, 0])),
    "k with n": (r"k must have shape \[B, T, H, K\]", lambda x: put(x, k=x.k[..., None])),
    "v without T": (r"v must have shape \[B, T, H, V\]", lambda x: put(x, v=x.v[:, 0])),
    "tokens of v": ("k and v must agree", lambda x: put(x, v=x.v[:, :-1])),
    "heads of v": ("k and v must agree", lambda x: put(x, v=x.v[:, :, :1])),
    "tokens of q": ("q and k must agree", lambda x: put(x, q=x.q[:, :-1])),
    "rows of q": ("q and k must agree", lambda x: put(x, q=x.q[:1])),
    "size of q": ("one size K", lambda x: put(x, q=x.q[..., :-1])),
    "heads of q": ("multiple of the 2", lambda x: put(x, q=x.q.repeat(1, 1, 2, 1)[:, :, :3])),
    "no heads": ("multiple", lambda x: put(x, q=x.q, k=x.k[:, :, :0], v=x.v[:, :, :0])),
    "no channels": ("at least one channel", lambda x: put(x, v=x.v[..., :0])),
    "whole numbers": ("floating point", lambda x: put(x, k=x.k.long())),
    "dtypes": ("one dtype; v is torch.float32", lambda x: put(x, v=x.v.float())),
    "devices": ("one device; k is on meta", lambda x: put(x, k=x.k.to("meta"))),
    "a list": ("q must be a tensor", lambda x: put(x, q=x.q.tolist())),
    "NaN in q": ("q has a NaN at row 1, token 2", lambda x: put(x, q=_poison(x.q))),
    "NaN in k": ("k has a NaN at row 1, token 2", lambda x: put(x, k=_poison(x.k))),
    "NaN in v": ("v has a NaN at row 1, token 2", lambda x: put(x, v=_poison(x.v))),
    "NaN in init": ("initial_memory has a NaN", lambda x: put(x, init=(_poison(x.init[0], 0),))),
    "inf in init": ("initial_memory has an infinity", lambda x: put(x, init=(x.init[0] / 0.0,))),
    "shape of init": (r"must have shape \[2, 4, 4\]", lambda x: put(x, init=(x.init[0][:, :3],))),
    "number of maps": (r"1 map\(s\)", lambda x: put(x, init=(x.init[0], x.init[0]))),
}


def _poison(x: Tensor, *place: int) -> Tensor:
    x = x.clone()
    x[place or (1, 2)] = torch.nan
    return x


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("what", SHAPES)
def test_tensors_that_do_not_fit(what: str, method: str) -> None:
    match, change = SHAPES[what]
    refuse(match, GATED, change(generate.inputs(GATED)), engine=method)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("gate 'lr' is missing: algorithm.GradientDescent", lambda g: g.pop("lr")),
        ("gate 'alpha' is unknown", lambda g: g.update(alpha=g["lr"])),
        (r"must have shape \[2, 7, 2\]", lambda g: g.update(lr=g["lr"][..., None])),
        (r"must have shape \[2, 7, 2\]", lambda g: g.update(log_decay=g["log_decay"][:1])),
        ("floating-point tensor", lambda g: g.update(lr=0.5)),
        ("floating-point tensor", lambda g: g.update(lr=g["lr"] > 0)),
        ("'lr' is on meta and q on cpu", lambda g: g.update(lr=g["lr"].to("meta"))),
        ("'log_decay'.*must be <= 0.*logarithms", lambda g: g.update(log_decay=g["lr"])),
        ("'lr'.*must be >= 0, and holds -1", lambda g: g.update(lr=-torch.ones_like(g["lr"]))),
        ("'lr' has a NaN at row 1, token 2", lambda g: g.update(lr=_poison(g["lr"]))),
    ],
)
def test_gates_that_do_not_fit(match: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
    x = generate.inputs(GATED)
    change(x.gates)
    refuse(match, GATED, x)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("param 'decay' is missing: retention.Decay", lambda p: p.pop("decay")),
        ("param 'alpha' is unknown", lambda p: p.update(alpha=p["decay"])),
        (r"must have shape \[2\]", lambda p: p.update(decay=p["decay"][:1])),
        (r"must have shape \[2, 3\]", lambda p: p.update(log_coefficients=p["decay"])),
        ("on meta and q on cpu", lambda p: p.update(decay=p["decay"].to("meta"))),
        (r"'decay'.*must be in \(0, 1\], and holds 1.5", lambda p: p["decay"].fill_(1.5)),
        (r"'decay'.*must be in \(0, 1\], and holds 0", lambda p: p["decay"].zero_()),
        ("param 'log_coefficients' has a NaN", lambda p: p["log_coefficients"].fill_(torch.nan)),
        ("must be a floating-point tensor", lambda p: p.update(decay=0.9)),
    ],
)
def test_params_that_do_not_fit(match: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
    x = generate.inputs(RICH)
    change(x.params)
    refuse(match, RICH, x)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("chunk_size must be a whole number >= 1, not 0", {"chunk_size": 0}),
        ("engine='fast' is unknown: use 'auto', 'torch', 'fla' or one of", {"engine": "fast"}),
        ("engine='kernel' cannot run this recipe.*these can: linear", {"engine": "kernel"}),
        (
            "exclude each other",
            {"attention_mask": torch.ones(2, 7), "cu_seqlens": torch.tensor([0])},
        ),
        (r"attention_mask must have shape \[2, 7\]", {"attention_mask": torch.ones(2, 6)}),
        (r"attention_mask must have shape \[2, 7\]", {"attention_mask": [1] * 7}),
        ("B must be 1, not 2", {"cu_seqlens": torch.tensor([0, 7])}),
    ],
)
def test_options_that_do_not_fit(match: str, options: dict[str, Any]) -> None:
    refuse(match, GATED, generate.inputs(GATED), **options)


@pytest.mark.parametrize(
    "borders",
    [
        torch.tensor([0, 3]),
        torch.tensor([1, 7]),
        torch.tensor([0, 5, 3, 7]),
        torch.tensor([0]),
        torch.tensor([[0, 7]]),
        torch.tensor([0.0, 7.0]),
        [0, 7],
    ],
)
def test_borders_that_do_not_fit(borders: Any) -> None:
    refuse("cu_seqlens must", GATED, generate.inputs(GATED, B=1), cu_seqlens=borders)


def test_states_that_do_not_fit() -> None:
    x = generate.inputs(RICH)
    _, state = generate.run_recall(RICH, x)
    with pytest.raises(rc.RecipeError, match="initial_memory and state exclude each other"):
        rc.recall(RICH, x.q, x.k, x.v, x.gates, params=x.params, initial_memory=x.init, state=state)
    refuse("the state has 2 rows, and this call has 1", RICH, x.select_row(0), state=state)
    y = generate.inputs(GATED)
    _, other = generate.run_recall(GATED, y)
    refuse("state.*another recipe", RICH, x, state=other)
    refuse("state.*another recipe", GATED, y, state=state)
    wide = generate.inputs(GATED, V=5)
    refuse(r"the state is of \(H, K, V\) = \(2, 4, 4\)", GATED, wide, state=other)
    away = other.to(device="meta")
    refuse("the state is on meta", GATED, y, state=away)


def test_deep_memories_require_init() -> None:
    x = dataclasses.replace(generate.inputs(DEEP), init=None)
    refuse("needs initial_memory.*never learns", DEEP, x)


def test_reads_that_do_not_fit() -> None:
    x = generate.inputs(GATED)
    _, state = generate.run_recall(GATED, x)
    for match, call in (
        ("pass state=... or initial_memory=...", lambda: rc.read(GATED, x.q)),
        (
            "pass state=... or initial_memory=...",
            lambda: rc.read(GATED, x.q, state=state, initial_memory=x.init),
        ),
        ("q must have shape", lambda: rc.read(GATED, x.q[0], state=state)),
        ("q has 1 rows and the state has 2", lambda: rc.read(GATED, x.q[:1], state=state)),
        ("q has K = 3", lambda: rc.read(GATED, x.q[..., :3], state=state)),
        ("q has 1 heads", lambda: rc.read(GATED, x.q[:, :, :1], state=state)),
    ):
        with pytest.raises((rc.RecipeError, ValueError), match=match):
            call()
    ball = rc.Recipe(retention=rc.retention.Ball(radius="input"))
    x = generate.inputs(ball)
    _, state = generate.run_recall(ball, x)
    with pytest.raises(rc.RecipeError, match=r"needs the gate 'radius' of retention\.Ball"):
        rc.read(ball, x.q, state=state)
    with pytest.raises(rc.RecipeError, match=r"gate 'radius'.*shape \[2, 7, 2\]"):
        rc.read(ball, x.q, state=state, gates={"radius": x.gates["radius"][:, :1]})
    with pytest.raises(rc.RecipeError, match="gate 'speed' is unknown"):
        rc.read(ball, x.q, state=state, gates={**x.gates, "speed": x.gates["radius"]})


# -- contradictory choices -----------------------------------------------------

Decay, Window, GD = rc.retention.Decay, rc.context.Window, rc.algorithm.GradientDescent
Momentum, MLP, Read = rc.algorithm.Momentum, rc.memory.MLP, rc.memory.Read
CONTRADICTIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "local regression with momentum": (
        "LocalConstant stores associations.*Momentum.*use algorithm.Analytic",
        lambda: SOFTMAX.replace(algorithm=Momentum()),
    ),
    "channel decay on a kernel": (
        "Exponential has infinitely many features",
        lambda: rc.Recipe(features=rc.features.Exponential(), retention=Decay(per="key")),
    ),
    "decay on a cache": ("no state to decay", lambda: SOFTMAX.replace(retention=Decay())),
    "threshold on a cache": (
        "no state to decay",
        lambda: SOFTMAX.replace(retention=rc.retention.ElasticNet(form="proximal")),
    ),
    "threshold on a prefix": (
        "Prefix solves from the origin.*ElasticNet",
        lambda: PREFIX.replace(retention=rc.retention.ElasticNet(form="proximal")),
    ),
    "decay before in batches": (
        "when='before'.*batch_size=1 in algorithm.GradientDescent",
        lambda: rc.Recipe(retention=Decay(when="before"), algorithm=GD(batch_size=2)),
    ),
    "decay before in a deep window": (
        "linear memory.*MLP",
        lambda: rc.Recipe(memory=MLP(), context=Window(size=2), retention=Decay(when="before")),
    ),
    "p below 1": (r"Lp\(p=...\).*>= 1", lambda: rc.bias.Lp(p=0.5)),
    "q at 1": (r"Lq\(q=...\).*> 1", lambda: rc.retention.Lq(q=1.0)),
    "a window of none": (r"Window\(size=...\).*>= 1", lambda: Window(size=0)),
    "a batch of none": (r"GradientDescent\(batch_size=...\).*>= 1", lambda: GD(batch_size=0)),
    "a decay above 1": (r"Decay\(alpha=...\).*\(0, 1\]", lambda: Decay(alpha=1.5)),
    "steps in batches": ("sequential", lambda: GD(updates_per_token=2, batch_size=2)),
    "momentum on a prefix": (
        "Prefix is for algorithms that see all",
        lambda: rc.Recipe(context=rc.context.Prefix(), algorithm=Momentum()),
    ),
    "a mean that forgets": (
        "averages steps from W°, which retention.Decay",
        lambda: rc.Recipe(retention=Decay(), algorithm=GD(batch_size=2, reduction="mean")),
    ),
    "an implicit dot product": (
        "Implicit.*DotProduct has no such slope",
        lambda: rc.Recipe(bias=rc.bias.DotProduct(), algorithm=rc.algorithm.Implicit()),
    ),
    "a normalised error": (
        "dot-product memory of ones, which bias.L2 is not",
        lambda: rc.Recipe(memory=rc.memory.Matrix(read=Read(normalize="sum"))),
    ),
    "a probe of a deep memory": (
        "Probe.*MLP is not linear",
        lambda: rc.Recipe(memory=MLP(), bias=rc.bias.L2(probe=rc.bias.Probe())),
    ),
    "a probe with momentum of a batch": (
        "Probe needs algorithm.GradientDescent.*Momentum",
        lambda: rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()), algorithm=Momentum(batch_size=2)),
    ),
    "a probe with momentum over a kernel": (
        "Probe with features.Exponential.* needs algorithm.GradientDescent",
        lambda: rc.Recipe(
            bias=rc.bias.L2(probe=rc.bias.Probe()),
            features=rc.features.Exponential(),
            algorithm=Momentum(),
        ),
    ),
    "normalised steps with an outer rate": (
        "outer_lr changes it",
        lambda: rc.Recipe(algorithm=Momentum(normalized_steps=True, outer_lr="input")),
    ),
    "a probe with an implicit step": (
        "Probe needs algorithm.GradientDescent.*Implicit",
        lambda: rc.Recipe(
            bias=rc.bias.L2(probe=rc.bias.Probe()), algorithm=rc.algorithm.Implicit()
        ),
    ),
    "an orthogonal vector": (
        "Muon orthogonalises matrices, and memory.Vector",
        lambda: rc.Recipe(memory=rc.memory.Vector(), algorithm=rc.algorithm.Muon()),
    ),
    "a softmax across the decay": (
        "Simplex.*constant along it",
        lambda: rc.Recipe(retention=rc.retention.Simplex(decay=Decay(per="key"))),
    ),
    "two owners of a number": (
        "'lr'.*Greedy and algorithm.GradientDescent",
        lambda: rc.Recipe(bias=_greedy()),
    ),
    "not a member": ("must be a member such as rc.bias.L2", lambda: rc.Recipe(bias=rc.bias.L2)),
    "another choice's member": ("bias=.*must be a member", lambda: rc.Recipe(bias=Decay())),
    "an unknown module": ("no factory named 'nobody'", lambda: rc.memory.Module(factory="nobody")),
    "an unknown member": (
        "no member named 'Nobody'",
        lambda: rc.Recipe.from_dict({"bias": {"member": "Nobody"}}),
    ),
    "an unknown choice": ("no choice 'loss'", lambda: rc.Recipe.from_dict({"loss": {}})),
    "another schema": ("schema 99", lambda: rc.Recipe.from_dict({"schema": 99})),
    "no JSON": ("not JSON", lambda: rc.Recipe.from_json("{")),
    "a choice in the wrong place": (
        "bias=.*must be a member",
        lambda: rc.Recipe.from_dict({"bias": {"member": "Decay"}}),
    ),
}


def _greedy() -> rc.bias.Bias:
    """Return a bias with a number that belongs to the algorithm."""

    @rc.member
    class Greedy(rc.bias.Bias):
        lr: float | str = rc.quantity(1.0, above=0)

        def loss(self, prediction: Tensor, value: Tensor, gates: dict[str, Tensor]) -> Tensor:
            return gates["lr"][..., 0] * (prediction - value).square().sum(-1)

    return Greedy()


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictory_choices(what: str) -> None:
    match, make = CONTRADICTIONS[what]
    with pytest.raises(rc.RecipeError, match=match) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_residual_memories_need_equal_sizes() -> None:
    recipe = rc.Recipe(memory=rc.memory.MLP(residual=False))
    x = generate.inputs(recipe, K=4, V=3)
    refuse("residual=True.*needs K = V", rc.Recipe(memory=rc.memory.MLP()), x)
    vector = rc.Recipe(memory=rc.memory.Vector())
    matrix = generate.inputs(rc.Recipe(), K=4, V=3)
    refuse("Vector.*F = 4 and V = 3", vector, dataclasses.replace(matrix, init=None))


# -- correct empty results ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_no_tokens_change_nothing(name: str, method: str) -> None:
    recipe = ALL[name]
    x = generate.inputs(recipe, T=5, G=2)
    empty = x.slice_tokens(0, 0)
    y, state = generate.run_recall(recipe, empty, engine=method)
    assert y.shape == (2, 0, 4, 4)
    outputs, final_state = generate.run_recall(recipe, x, state=state, engine=method)
    expected, expected_state = generate.run_recall(recipe, x, engine=method)
    # A copy of an initial memory can have another layout, and rounds differently.
    torch.testing.assert_close(outputs, expected, atol=1e-12, rtol=1e-12)
    y, same = generate.run_recall(recipe, empty, state=final_state, engine=method)
    assert y.shape == (2, 0, 4, 4)
    for a, b in zip(same.tensors(), expected_state.tensors(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    _, none = rc.recall(
        recipe,
        x.q,
        x.k,
        x.v,
        x.gates,
        params=x.params,
        initial_memory=x.init,
        output_final_state=False,
    )
    assert none is None


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_no_rows(name: str, method: str) -> None:
    recipe = ALL[name]
    x = generate.inputs(recipe, B=0, T=5)
    y, state = generate.run_recall(recipe, x, engine=method)
    assert y.shape == (0, 5, 2, 4)
    assert state.rows == 0


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_one_token(name: str, method: str) -> None:
    recipe = ALL[name]
    x = generate.inputs(recipe, T=3)
    y, _ = generate.run_recall(recipe, x, engine=method)
    one, _ = generate.run_recall(recipe, x.slice_tokens(0, 1), engine=method)
    assert generate.relative_error(one, y[:, :1]) < 1e-12  # the same operations on one token


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_masked_values_have_no_effect(name: str, method: str) -> None:
    recipe = ALL[name]
    x = generate.inputs(recipe, T=6)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0]])
    gaps = mask == 0

    def poison(a: Tensor) -> Tensor:
        return a.masked_fill(gaps.view(2, 6, *(1,) * (a.dim() - 2)), torch.nan)

    results = generate.gradients(
        recipe, x.map_token_tensors(poison), attention_mask=mask, engine=method
    )
    clean = generate.gradients(recipe, x, attention_mask=mask, engine=method)
    assert torch.equal(results[0], clean[0])
    for name, slope in results[2].items():
        assert torch.equal(slope, clean[2][name]), name


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("name", ALL)
def test_inference_mode(name: str, method: str) -> None:
    """A call, its continuation and a read in inference mode; then a continuation outside it."""
    recipe = ALL[name]
    x = generate.inputs(recipe, T=6)
    expected, _ = generate.run_recall(recipe, x, engine=method)
    with torch.inference_mode():
        # made in inference mode, like the activations of a model
        inside = x.map_tensors(torch.clone)
        y, _ = generate.run_recall(recipe, inside, engine=method)
        first, state = generate.run_recall(recipe, inside.slice_tokens(0, 4), engine=method)
        second, _ = generate.run_recall(
            recipe, inside.slice_tokens(4, 6), state=state, engine=method
        )
        if recipe is not MODULE and not recipe.retention.gates():
            rc.read(recipe, inside.q, state=state, params=inside.params)
    assert torch.equal(y, expected)
    assert (
        generate.relative_error(torch.cat([first, second], 1), expected) < 1e-10
    )  # sums in another order
    with torch.no_grad():
        outside, _ = generate.run_recall(recipe, x.slice_tokens(4, 6), state=state, engine=method)
    assert generate.relative_error(outside, expected[:, 4:]) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_no_graph_without_gradients(name: str) -> None:
    recipe = ALL[name]
    y, state = generate.run_recall(recipe, generate.inputs(recipe, T=4), engine="reference")
    assert not y.requires_grad
    assert not any(a.requires_grad for a in state.tensors())


# -- invalid states, masks and values ----------------------------------------------------------


def test_reading_another_recipes_state_is_refused() -> None:
    gated = rc.zoo.get("gated_delta_net").recipe
    softmax = rc.zoo.get("softmax_attention").recipe
    q, k, v = (torch.randn(1, 3, 2, 4) for _ in range(3))
    gates = {"lr": torch.rand(1, 3, 2), "log_decay": -torch.rand(1, 3, 2)}
    _, state = rc.recall(gated, q, k, v, gates)
    with pytest.raises(rc.RecipeError, match="belongs to another recipe"):
        rc.read(softmax, q, state=state)


@pytest.mark.parametrize("value", [-1e9, 0.5, float("nan")])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused(value: float) -> None:
    q = torch.randn(1, 3, 1, 4)
    mask = torch.tensor([[value, 1.0, 1.0]])
    with pytest.raises(ValueError, match="must be 1 at valid tokens and 0 elsewhere"):
        rc.recall(rc.Recipe(), q, q, q, {"lr": torch.rand(1, 3, 1)}, attention_mask=mask)
    layer = rc.MemoryLayer(8, 2, rc.Recipe())
    with pytest.raises(ValueError, match="must be 1 at valid tokens and 0 elsewhere"):
        layer(torch.randn(1, 3, 8), attention_mask=mask)


@pytest.mark.parametrize("name", ["q", "v", "lr"])
def test_error_names_the_position_of_an_infinity(name: str) -> None:
    inputs = {x: torch.randn(1, 3, 1, 4) for x in ("q", "k", "v")} | {"lr": torch.rand(1, 3, 1)}
    inputs[name][0, 1] = float("inf")
    with pytest.raises(ValueError, match="has an infinity at row 0, token 1"):
        rc.recall(rc.Recipe(), inputs["q"], inputs["k"], inputs["v"], {"lr": inputs["lr"]})


UNREAD: dict[str, tuple[str, str, float]] = {
    "a probe of the first token": ("delta_former", "probe", torch.inf),
    "a probe of the first token, NaN": ("delta_former", "probe", torch.nan),
    "a query of one key": ("softmax_attention", "q", torch.inf),
    "a query of one key, NaN": ("softmax_attention", "q", torch.nan),
    "a ridge": ("mesa_net", "ridge", torch.inf),
    "a query of features that vanish": ("normalized_linear_attention", "q", -torch.inf),
}
"""Numbers that outputs may not depend on: a preset, and the tensor with the replaced number."""


@pytest.mark.parametrize("what", UNREAD)
def test_every_engine_checks_unused_values(what: str) -> None:
    preset, name, value = UNREAD[what]
    recipe = rc.zoo.get(preset).recipe
    x = dataclasses.replace(generate.inputs(recipe, B=1, T=3, H=1, K=4, V=4), init=None)
    {"q": x.q, **x.gates, **x.params}[name].view(-1)[0] = value
    kind = "a NaN" if math.isnan(value) else "an infinity"
    engines = [engine.name for engine in ENGINES if not engine.unsupported_reasons(recipe)]
    assert len(engines) > 1
    for method in engines:
        refuse(f"'?{name}'? has {kind}", recipe, x, engine=method)


def test_an_initial_memory_to_read_is_finite() -> None:
    q = torch.randn(1, 3, 1, 4)
    for value, name in ((torch.nan, "a NaN"), (-torch.inf, "an infinity")):
        with pytest.raises(ValueError, match=f"initial_memory has {name}, and must be finite"):
            rc.read(rc.Recipe(), q, initial_memory=torch.full((1, 4, 4), value))


def test_full_decays_are_legal() -> None:
    x = generate.inputs(GATED)
    x.gates["log_decay"][:, 2] = -torch.inf
    for method in ("auto", "reference"):
        y, _ = generate.run_recall(GATED, x, engine=method)
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("recipe", [3, None, rc.bias.L2()])
def test_invalid_recipes_are_refused(recipe: object) -> None:
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(rc.RecipeError, match=r"rc\.recall takes an rc\.Recipe, or the name"):
        rc.recall(recipe, q, q, q)  # type: ignore[arg-type]
    with pytest.raises(rc.RecipeError, match=r"rc\.read takes an rc\.Recipe, or the name"):
        rc.read(recipe, q, initial_memory=torch.zeros(1, 4, 4))  # type: ignore[arg-type]


def test_invalid_states_are_refused() -> None:
    recipe = rc.Recipe()
    q, gates = torch.randn(1, 3, 1, 4), {"lr": torch.rand(1, 3, 1)}
    _, state = rc.recall(recipe, q, q, q, gates)
    assert state is not None
    with pytest.raises(ValueError, match="a state that recall returned"):
        rc.recall(recipe, q, q, q, gates, state=state.to_dict())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a state that recall returned"):
        rc.read(recipe, q, state={})  # type: ignore[arg-type]
    layer = rc.MemoryLayer(8, 2, recipe)
    with pytest.raises(ValueError, match="a state that this layer returned"):
        layer(torch.randn(1, 3, 8), state)  # type: ignore[arg-type]
    plain = rc.MemoryLayer(8, 2, recipe, rc.LayerOptions(conv_size=0))
    with pytest.raises(ValueError, match="belongs to another layer"):
        plain(torch.randn(1, 3, 8), layer(torch.randn(1, 3, 8))[1])


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "cost": rc.cost,
    "cost by keyword": lambda x: rc.cost(recipe=x),
    "select": lambda x: rc.select_engine(x).engine.name,
    "capacity": lambda x: rc.theory.capacity_bound(x, 8, 8),
    "rank": lambda x: rc.theory.feature_rank(x, 8),
    "fit": lambda x: rc.theory.fit_error(x, 4, K=8, V=8),
    "stream": lambda x: rc.theory.stream_error(x, 4, K=8, V=8),
    "findings": lambda x: rc.theory.findings(x, 8, 8),
    "noise": lambda x: rc.theory.measured_inverse_snr(
        x, num_distractors=4, K=8, V=8, generator=torch.Generator()
    ),
    "kernel": lambda x: rc.theory.recipe_kernel(x, 8)(torch.ones(2, 8), torch.ones(2, 8)),
}


@pytest.mark.parametrize("what", sorted(FUNCTIONS.keys() - {"noise", "kernel"}))  # these are random
def test_name_or_preset_replaces_its_recipe(what: str) -> None:
    preset = rc.zoo.get("delta_net")
    expected, *result = (
        _result_or_message(FUNCTIONS[what], argument)
        for argument in (preset.recipe, "delta_net", preset)
    )
    assert result == [expected, expected]


def _result_or_message(function: Callable[[Any], object], recipe: object) -> str:
    """Return the result or the message of the error."""
    torch.manual_seed(0)
    try:
        return repr(function(recipe))
    except rc.RecipeError as error:
        return str(error)


@pytest.mark.parametrize("argument", [None, 3, rc.bias.L2(), "deltanet"])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_other_arguments_are_refused(what: str, argument: object) -> None:
    match = (
        "did you mean delta_net" if argument == "deltanet" else r"takes an rc\.Recipe, or the name"
    )
    with pytest.raises(rc.RecipeError, match=match):
        FUNCTIONS[what](argument)


def test_names_of_pytorch_and_transformers_are_taken() -> None:
    rc.algorithm.GradientDescent(batch_size=8)
    rc.algorithm.Muon(ns_steps=5)
    assert rc.MemoryLayer(d_model=16, num_heads=4, recipe=rc.Recipe()).num_heads == 4
    rc.LayerOptions(conv_size=4)
    assert rc.Recipe().replace(bias=rc.bias.Huber()).bias == rc.bias.Huber()
    q, k, v = torch.randn(3, 1, 4, 2, 3)
    recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
    y, _ = rc.recall(recipe, q, k, v, initial_memory=torch.zeros(2, 3, 3))
    assert torch.equal(y, rc.recall(recipe, q, k, v)[0])


def test_error_suggests_the_right_name() -> None:
    with pytest.raises(TypeError, match=r"Window takes its arguments by name, .* Window\(size="):
        rc.context.Window(4)  # type: ignore[misc]
    q = torch.randn(1, 4, 2, 3)
    with pytest.raises(
        TypeError, match="has no argument 'initial_state'; did you mean 'initial_memory'"
    ):
        rc.recall("delta_net", q, q, q, initial_state=None)  # type: ignore[call-arg]


def test_functions_of_a_recipe_take_its_name() -> None:
    preset = rc.zoo.get("performer")
    for recipe in ("performer", preset, preset.recipe):
        assert "directions" in rc.initial_params(recipe, H=2, K=4, V=4)
    assert rc.parallel.strategy_for("gated_delta_net") == rc.parallel.strategy_for(
        rc.zoo.get("gated_delta_net").recipe
    )
    assert rc.select_engine("gated_delta_net").engine.name == "linear"
    with pytest.raises(rc.RecipeError, match=r"strategy_for takes an rc\.Recipe"):
        rc.parallel.strategy_for(3)  # type: ignore[arg-type]
