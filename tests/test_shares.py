"""Rates in multiples of the stability limit, and initial norms and features."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect import GateOptions, LayerOptions
from recollect.blocks import ResidualMemory, build

SHARE = {"lr": GateOptions(unit="stability_limit")}
NORMALISED = rc.algorithm.GradientDescent(batch_size=4, normalized_steps=True)


def layer(recipe: rc.Recipe, d_model: int = 16, **gates: GateOptions) -> rc.MemoryLayer:
    options = LayerOptions(gate_options={**SHARE, **gates})
    return rc.MemoryLayer(d_model, 2, recipe, options)


def numbers_of(module: rc.MemoryLayer, x: Tensor) -> dict[str, Tensor]:
    """Return the numbers of the memory, and the multiple that the projection gives."""
    inputs = module.memory_inputs(x)
    return {**inputs.gates, **inputs.params, "share": module.gates["lr"](x)}


def tokens(d_model: int = 16, rows: int = 2, length: int = 6) -> Tensor:
    return torch.randn(rows, length, d_model, generator=torch.Generator().manual_seed(0))


DEEP = rc.memory.MLP()
WINDOW = rc.context.Window(size=3)
AVERAGED = rc.algorithm.GradientDescent(
    batch_size=8, reduction="mean", offset="learned", normalized_steps=True
)


def test_steps_within_the_limit_do_not_amplify_differences() -> None:
    """Under a norm, with heads of 8 channels, whose random keys overlap most in a batch of 16."""
    preset = rc.zoo.get("titans")
    rate = GateOptions(unit="stability_limit", source="constant", init=1.0, high=2.0)
    gates = {**dict(preset.options.gate_options), "lr": rate}
    module = rc.MemoryLayer(
        16, 2, preset.recipe, replace(preset.options, gate_options=gates)
    ).double()
    x, change = torch.randn(2, 1, 2048, 16, dtype=torch.float64)
    with torch.no_grad():
        y, other = module(x)[0], module(x + 1e-10 * change)[0]
    assert (y - other).abs().max() < 1e-8  # 0.09 at 1.5, the rate of the preset


@rc.member
class HeadMean(rc.algorithm.Algorithm):
    """A member of another package whose correction is one number per head."""

    lr: float | str = rc.quantity("input", at_least=0, init=0.5, role="rate")
    offset: float | str = rc.quantity("learned", init=0.0)
    batch_size: int = rc.fields.integer(8, at_least=1, size=True)  # type: ignore[assignment]
    reduction: str = "mean"


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [
        (rc.Recipe(memory=DEEP, algorithm=NORMALISED), lambda n: 2 / 4),
        (
            rc.Recipe(
                memory=DEEP,
                algorithm=rc.algorithm.GradientDescent(
                    batch_size=4, reduction="mean", normalized_steps=True
                ),
            ),
            lambda n: 2.0,
        ),
        (
            rc.Recipe(
                memory=DEEP, algorithm=rc.algorithm.Momentum(batch_size=8, normalized_steps=True)
            ),
            lambda n: 2 * (1 - n["momentum"]) / 8,
        ),
        (
            rc.Recipe(
                memory=DEEP,
                algorithm=rc.algorithm.Momentum(
                    batch_size=8, normalized_steps=True, momentum="learned"
                ),
            ),
            lambda n: 2 * (1 - n["momentum"]) / 8,
        ),
        (
            rc.Recipe(
                memory=DEEP,
                algorithm=rc.algorithm.Momentum(batch_size=8, normalized_steps=True, momentum=0.75),
            ),
            lambda n: 2 * 0.25 / 8,
        ),
        (
            rc.Recipe(
                memory=DEEP,
                context=WINDOW,
                algorithm=rc.algorithm.Muon(
                    batch_size=4, update_every="batch", normalized_steps=True
                ),
            ),
            lambda n: 2.0,
        ),
        (
            rc.Recipe(
                memory=DEEP,
                context=WINDOW,
                algorithm=rc.algorithm.Muon(batch_size=4, normalized_steps=True),
            ),
            lambda n: 2 / 4,
        ),
        (
            rc.Recipe(memory=DEEP, context=WINDOW, algorithm=NORMALISED),
            lambda n: 2 / 4 / n["window"].sum(-1),
        ),
        (
            rc.Recipe(
                memory=DEEP, context=rc.context.Window(size=3, gated=False), algorithm=NORMALISED
            ),
            lambda n: 2 / 4 / 3,
        ),
    ],
)
def test_a_share_is_a_rate_by_batch_window_and_momentum(recipe, limit) -> None:  # type: ignore[no-untyped-def]
    numbers = numbers_of(layer(recipe), tokens())
    torch.testing.assert_close(numbers["lr"], numbers["share"] * limit(numbers))
    assert (numbers["share"] > 0).all() and (numbers["share"] < 1).all()


@pytest.mark.parametrize(
    ("algorithm", "shares"),
    [
        (NORMALISED, True),
        (rc.algorithm.Muon(batch_size=4, normalized_steps=True), True),
        (rc.algorithm.GradientDescent(batch_size=4), False),
        (rc.algorithm.GradientDescent(batch_size=4, normalized_steps=True, lr="learned"), False),
        (rc.algorithm.GradientDescent(batch_size=4, normalized_steps=True, lr=0.1), False),
    ],
)
def test_rates_of_measured_steps_are_multiples_by_default(
    algorithm: rc.Algorithm, shares: bool
) -> None:
    recipe = rc.Recipe(memory=DEEP, algorithm=algorithm)
    torch.manual_seed(0)
    bare = rc.MemoryLayer(16, 2, recipe)
    assert (bare.limit is not None) == shares
    assert ("lr" in rc.explain(recipe).units) == shares
    if not shares:
        return
    torch.manual_seed(0)
    x = tokens()
    torch.testing.assert_close(layer(recipe)(x)[0], bare(x)[0], rtol=0, atol=0)
    raw = layer(recipe, lr=GateOptions(unit="raw", source="constant", init=0.25))
    assert raw.limit is None
    rate = numbers_of(raw, x)["lr"]
    torch.testing.assert_close(rate, torch.full_like(rate, 0.25))


def test_second_memory_uses_the_rates_of_the_first() -> None:
    recipe = rc.Recipe(memory=DEEP, algorithm=NORMALISED)
    shared = build(ResidualMemory(rc.Recipe(), recipe, share=("lr",)), 16, 2)
    assert shared.second.limit is None
    assert build(ResidualMemory(rc.Recipe(), recipe), 16, 2).second.limit is not None


def test_a_share_per_value_channel_has_the_tokens_momentum() -> None:
    algorithm = rc.algorithm.Momentum(batch_size=2, per="value", normalized_steps=True)
    numbers = numbers_of(layer(rc.Recipe(algorithm=algorithm)), tokens())
    want = numbers["share"] * (1 - numbers["momentum"]).unsqueeze(-1)
    torch.testing.assert_close(numbers["lr"], want)


@pytest.mark.parametrize(("share", "grows"), [(0.45, False), (0.95, False), (1.05, True)])
def test_repeated_association_diverges_beyond_the_limit(share: float, grows: bool) -> None:
    """A batch of b equal associations multiplies the error by 1 − 2 s: at s = 1 by −1."""
    result = layer(
        rc.Recipe(algorithm=NORMALISED),
        lr=GateOptions(unit="stability_limit", source="constant", init=share, high=2.0),
    )
    x = tokens(rows=1, length=1).expand(1, 84, 16)
    with torch.no_grad():
        # The first tokens of a convolution differ from later ones.
        inputs = result.memory_inputs(x)
        k, v, lr = inputs.k[:, 4:], inputs.v[:, 4:], inputs.gates["lr"][:, 4:]

        def error(n: int) -> Tensor:
            y, _ = rc.recall(result.recipe, k[:, :n], k[:, :n], v[:, :n], {"lr": lr[:, :n]})
            return (y - v[:, :n])[:, -1].norm()

        errors = torch.stack([error(n) for n in (4, 8, 40)])
    ratio = errors[1] / errors[0]
    torch.testing.assert_close(ratio, torch.tensor(abs(1 - 2 * share)), atol=1e-3, rtol=1e-2)
    assert (errors[2] > errors[0]) == grows


@pytest.mark.parametrize("d_model", [8, 64, 256])
def test_initial_multiple_does_not_depend_on_width(d_model: int) -> None:
    result = layer(rc.Recipe(memory=DEEP, algorithm=NORMALISED), d_model=d_model)
    initial = result.gates["lr"].initial()
    torch.testing.assert_close(initial, torch.full_like(initial, 0.5))


@pytest.mark.parametrize(
    ("recipe", "gates", "says"),
    [
        (
            rc.Recipe(memory=DEEP),
            SHARE,
            "GradientDescent(normalized_steps=True)",
        ),
        (
            rc.Recipe(memory=DEEP, algorithm=rc.algorithm.Muon()),
            SHARE,
            "algorithm.Muon(normalized_steps=True)",
        ),
        (
            rc.Recipe(memory=DEEP, algorithm=rc.algorithm.Momentum(normalized_steps=True)),
            {"momentum": GateOptions(unit="stability_limit")},
            "options of 'momentum': unit='stability_limit' is a multiple of the stability limit",
        ),
        (
            rc.Recipe(
                memory=DEEP,
                algorithm=rc.algorithm.GradientDescent(normalized_steps=True, lr="learned"),
            ),
            SHARE,
            "is constant over tokens: use lr='input'",
        ),
        (
            rc.Recipe(retention=rc.retention.Decay()),
            {"log_decay": GateOptions(unit="value_rms")},
            "options of 'log_decay': unit='value_rms' is for numbers that a bias compares with "
            "values",
        ),
        (
            rc.Recipe(),
            {"lr": GateOptions(unit="value_rms", init=0.1)},
            "options of 'lr': unit='value_rms' is for numbers that a bias compares with values",
        ),
        (
            rc.Recipe(bias=rc.bias.Huber()),
            {"threshold": GateOptions(unit="value_rms", init_schedule="integers")},
            "options of 'threshold': unit='value_rms' needs one initial value",
        ),
        (
            rc.Recipe(memory=DEEP, algorithm=AVERAGED),
            {"lr": GateOptions(unit="batch_mean")},
            "options of 'lr': unit='batch_mean' is 1/position, for the correction 'offset'",
        ),
        (
            rc.Recipe(memory=DEEP, algorithm=HeadMean()),
            {"offset": GateOptions(unit="batch_mean", init=-0.5)},
            "one value per position of the inner batch (axes 'b')",
        ),
    ],
)
def test_unit_of_a_number_without_one_is_refused(
    recipe: rc.Recipe, gates: dict[str, GateOptions], says: str
) -> None:
    with pytest.raises(rc.RecipeError) as result:
        rc.MemoryLayer(16, 2, recipe, LayerOptions(gate_options=gates))
    assert says in str(result.value)
    assert "\n" not in str(result.value)


def test_options_name_the_units_there_are() -> None:
    with pytest.raises(rc.RecipeError, match="'stability_limit', 'value_rms'"):
        GateOptions(unit="percent")


@pytest.mark.parametrize("V", [4, 64])
@pytest.mark.parametrize("init", [None, 2.0, (1.0, 3.0)])
def test_a_threshold_in_lengths_of_values(V: int, init: float | tuple[float, ...] | None) -> None:
    """unit="value_rms": √V at any width; errors of such values are on one side of it."""
    recipe = rc.Recipe(bias=rc.bias.Huber(), memory=rc.memory.MLP())
    gates = {"threshold": GateOptions(unit="value_rms", source="constant", init=init)}
    layer = rc.MemoryLayer(8, 2, recipe, LayerOptions(gate_options=gates), value_dim=V, head_dim=V)
    threshold = layer.memory_inputs(torch.randn(1, 3, 8)).gates["threshold"]
    expected = torch.tensor(init if isinstance(init, tuple) else (1.0 if init is None else init,))
    torch.testing.assert_close(threshold, (V**0.5 * expected).expand(1, 3, 2))


@pytest.mark.parametrize("squash", ["softplus", "celu"])
@pytest.mark.parametrize("source", ["learned", "constant"])
def test_a_correction_in_units_of_the_mean(source: str, squash: str) -> None:
    """unit="batch_mean": o starts at p/place, and the bound of p bounds τ at every place."""
    recipe, place = rc.Recipe(memory=DEEP, algorithm=AVERAGED), torch.arange(1.0, 9.0)
    options = {"unit": "batch_mean", "source": source, "activation": squash, "low": -0.8}
    x = tokens(8)
    for init in (0.0, 0.5, (-0.8, 1.0)):
        offset = GateOptions(**options, init=init)  # type: ignore[arg-type]
        layer_with_offset = rc.MemoryLayer(
            8, 2, recipe, LayerOptions(gate_options={"offset": offset})
        )
        offsets = layer_with_offset.memory_inputs(x).params["offset"]
        p = torch.tensor(init).expand(2)[:, None]
        # The inverse reaches 1e-4 of its end.
        torch.testing.assert_close(offsets, p / place, atol=1e-4, rtol=1e-5)


def test_celu_bounds_a_correction_from_below_only() -> None:
    """squash="celu": a correction is a free parameter above, and bounded below."""
    recipe = rc.Recipe(memory=DEEP, algorithm=AVERAGED)
    offset = GateOptions(unit="batch_mean", activation="celu", low=-0.8)
    layer_with_offset = rc.MemoryLayer(8, 2, recipe, LayerOptions(gate_options={"offset": offset}))
    bias, place = layer_with_offset.params["offset"].bias, torch.arange(1.0, 9.0)
    assert isinstance(bias, torch.nn.Parameter) and not bias.any()
    for moved in (0.3, -0.3):
        with torch.no_grad():
            bias.fill_(moved)
        offsets = layer_with_offset.memory_inputs(tokens(8)).params["offset"]
        end = 0.8 / place
        below = end * ((-0.3 / end).exp() - 1)
        torch.testing.assert_close(offsets, (bias if moved > 0 else below.expand(2, 8)).detach())


@pytest.mark.parametrize("bad", [{}, {"low": 0.0}, {"low": -0.8, "high": 1.0}])
def test_a_celu_without_a_lower_end_is_refused(bad: dict[str, float]) -> None:
    offset = GateOptions(unit="batch_mean", activation="celu", **bad)  # type: ignore[arg-type]
    recipe = rc.Recipe(memory=DEEP, algorithm=AVERAGED)
    with pytest.raises(rc.RecipeError, match="set low, and leave high out"):
        rc.MemoryLayer(8, 2, recipe, LayerOptions(gate_options={"offset": offset}))


@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp"])
def test_every_place_of_a_batch_has_a_gradient(name: str) -> None:
    """Places with a τ of 0 beyond −1/place get a fifth of the mean, and a gradient."""
    preset_layer = rc.zoo.get(name).build(d_model=16, num_heads=2)
    bias = preset_layer.params["offset"].bias
    assert isinstance(bias, torch.nn.Parameter)
    with torch.no_grad():
        bias.sub_(0.3)
    x = tokens(length=16)
    place = torch.arange(1.0, 17.0)
    tau = 1 / place + preset_layer.memory_inputs(x).params["offset"]
    assert (tau * place > 0.2 - 1e-6).all() and (tau[:, 0] > 0.5).all()
    preset_layer(x)[0].square().sum().backward()
    assert bias.grad is not None and (bias.grad != 0).all()


@pytest.mark.parametrize(("norm", "length"), [("l2", 1.0), ("rms", 4.0)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_inner_norm_starts_at_the_norm_of_the_key(norm: str, length: float, kind: str) -> None:
    """The memory reads x + norm(...): initially both have one norm at any width."""
    recipe = rc.Recipe(memory=rc.memory.MLP(norm=kind))
    result = rc.MemoryLayer(32, 2, recipe, LayerOptions(qk_norm=norm))
    x = tokens(32)
    with torch.no_grad():
        inputs = result.memory_inputs(x)
        params = {**inputs.params}
        y = rc.read(recipe, inputs.k, initial_memory=result.initial_memory, params=params)
    torch.testing.assert_close(inputs.k.norm(dim=-1), torch.full(inputs.k.shape[:-1], length))
    added = (y - inputs.k).norm(dim=-1)
    torch.testing.assert_close(added, torch.full_like(added, length), rtol=1e-3, atol=1e-3)


def test_inner_norm_without_a_residual_starts_at_one() -> None:
    no_residual = rc.memory.MLP(norm="layer", residual=False)
    for memory, qk_norm in ((no_residual, "l2"), (rc.memory.MLP(norm="layer"), "none")):
        preset_layer = rc.MemoryLayer(
            32, 2, rc.Recipe(memory=memory), LayerOptions(qk_norm=qk_norm)
        )
        assert (preset_layer.params["norm_weight"].initial() == 1).all()
    options = LayerOptions(gate_options={"norm_weight": GateOptions(init=0.5)})
    preset_layer = rc.MemoryLayer(32, 2, rc.Recipe(memory=rc.memory.MLP(norm="layer")), options)
    assert (preset_layer.params["norm_weight"].initial() == 0.5).all()


def test_map_of_features_starts_at_the_scale_of_the_key() -> None:
    """1,128 monomials have the norm of their 46 channels."""
    torch.manual_seed(0)
    lifted = rc.Recipe(memory=rc.memory.MLP(expansion=16), features=rc.features.Polynomial())
    plain = lifted.replace(features=rc.features.Identity())
    stds = []
    for recipe in (plain, lifted):
        maps = rc.MemoryLayer(46, 1, recipe).initial_memory
        assert maps is not None
        stds.append([float(w.detach().std()) for w in maps])
    assert stds[1] == pytest.approx(stds[0], rel=0.02)
    assert stds[0][0] == pytest.approx(1 / math.sqrt(46), rel=0.02)


@pytest.mark.parametrize("memory", [rc.memory.MLP(norm="layer"), rc.memory.GatedMLP()])
def test_memory_with_a_zero_last_map_outputs_zero(memory: rc.memory.Memory) -> None:
    """Except for its residual; writes are read, and every map learns from the start."""
    recipe = rc.Recipe(memory=memory, algorithm=NORMALISED)
    memory_layer = rc.MemoryLayer(
        16, 2, recipe, LayerOptions(gate_options=SHARE, last_map_init_scale=0.0)
    )
    maps = memory_layer.initial_memory
    assert maps is not None
    assert all(weight.any() for weight in maps[:-1])
    assert not maps[-1].any()
    x = tokens()
    inputs = memory_layer.memory_inputs(x)
    silent = rc.read(recipe, inputs.k, initial_memory=maps, params=inputs.params)
    torch.testing.assert_close(silent, inputs.k, rtol=0, atol=0)
    numbers = {"gates": inputs.gates, "params": inputs.params, "initial_memory": maps}
    y, _ = rc.recall(recipe, inputs.k, inputs.k, inputs.v, **numbers)
    assert ((y - inputs.v).norm(dim=-1) < (silent - inputs.v).norm(dim=-1)).all()
    memory_layer(x)[0].square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in maps)


@pytest.mark.parametrize("recipe", [rc.Recipe(), rc.zoo.get("deep_transformer").recipe])
def test_last_map_of_other_memories_is_refused(recipe: rc.Recipe) -> None:
    with pytest.raises(
        rc.RecipeError, match=r"last_map_init_scale=0\) scales random initial weights"
    ):
        rc.MemoryLayer(16, 2, recipe, LayerOptions(last_map_init_scale=0.0))


def test_multiple_ends_at_the_limit_by_default() -> None:
    """A lower end does not change the upper end: beyond 1 a repeated association diverges."""
    recipe = rc.Recipe(memory=DEEP, algorithm=NORMALISED)
    for options, ends in (
        (GateOptions(unit="stability_limit"), (0.0, 1.0)),
        (GateOptions(low=0.1), (0.1, 1.0)),  # an unstated unit is a multiple here
        (GateOptions(unit="stability_limit", low=0.2, high=2.0), (0.2, 2.0)),
    ):
        result = layer(recipe, lr=options)
        assert result.gates["lr"].activation.ends == ends
