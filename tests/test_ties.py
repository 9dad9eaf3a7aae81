"""Ties, angles, shifts and skips: each invalid option gives one sentence with a remedy."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import recollect as rc
from recollect import GateOptions, LayerOptions, MemoryLayer
from recollect.layer.options import Tie

Decay, GD = rc.retention.Decay, rc.algorithm.GradientDescent
TRANSPOSED = rc.memory.Matrix(read=rc.memory.Read(transposed=True))
DOT = rc.bias.DotProduct()


def build(options: LayerOptions, **choices: object) -> MemoryLayer:
    return MemoryLayer(8, 2, rc.Recipe(**choices), options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tie", "says"),
    [
        ({"target": "lr", "source": "log_decay", "rule": "complement"}, "cannot make 'lr'"),
        ({"target": "k", "source": "log_decay", "rule": "negative"}, "cannot make 'k'"),
        ({"target": "probe", "source": "k", "rule": "rate"}, "cannot make 'probe'"),
        ({"target": "probe", "source": "erase", "rule": "direction"}, "its source is 'k'"),
        ({"target": "lr", "source": "log_decay", "rule": "implicit"}, "its source is 'k'"),
        ({"target": "lr", "source": "k", "rule": "negative"}, "its source is a gate or param"),
        ({"target": "lr", "source": "lr", "rule": "negative"}, "follow itself"),
        ({"target": "lr", "source": "log_decay", "rule": "guess"}, "'complement'"),
        ({"target": "probe", "source": "k", "rule": "sum"}, "its source is 'q'"),
        ({"target": "lr", "source": "k", "rule": "copy"}, "k to a probe and a gate to a gate"),
        ({"target": "q", "source": "k", "rule": "previous"}, "it makes 'k'"),
    ],
)
def test_ties_that_no_recipe_allows(tie: dict[str, str], says: str) -> None:
    with pytest.raises(rc.RecipeError, match=says):
        Tie(**tie)


@pytest.mark.parametrize(
    ("tie", "choices", "says"),
    [
        (
            {"target": "k", "source": "log_decay", "rule": "complement"},
            {"retention": Decay()},
            "decay per key channel",
        ),
        (
            {"target": "k", "source": "k", "rule": "filter"},
            {"retention": Decay()},
            "decay per key channel",
        ),
        (
            {"target": "k", "source": "k", "rule": "filter"},
            {"retention": Decay(per="key", alpha="input_scaled")},
            "decay per key channel",
        ),
        (
            {"target": "k", "source": "log_decay", "rule": "blend"},
            {"retention": Decay()},
            "gate per key channel",
        ),
        (
            {"target": "log_decay", "source": "lr", "rule": "negative"},
            {"retention": Decay(per="key")},
            "of one shape",
        ),
        (
            {"target": "log_decay", "source": "lr", "rule": "variance"},
            {"retention": Decay()},
            "needs a decay as source",
        ),
        (
            {"target": "log_decay", "source": "lr", "rule": "diagonal"},
            {"retention": Decay()},
            "decay per entry",
        ),
        (
            {"target": "probe", "source": "k", "rule": "direction"},
            {"retention": Decay()},
            "does not have",
        ),
        (
            {"target": "lr", "source": "k", "rule": "implicit"},
            {"algorithm": GD(updates_per_token=2)},
            "one association per token",
        ),
        (
            {"target": "k", "source": "k", "rule": "previous"},
            {"algorithm": GD(updates_per_token=2)},
            "one association per token",
        ),
        (
            {"target": "log_decay", "source": "lr", "rule": "rate"},
            {"algorithm": GD(updates_per_token=2), "retention": Decay()},
            "one value per token, or both one per association",
        ),
        (
            {"target": "window", "source": "log_decay", "rule": "trapezoid"},
            {"context": rc.context.Window(size=3), "retention": Decay()},
            "a window of two associations",
        ),
        (
            {"target": "lr", "source": "log_decay", "rule": "shrink"},
            {"retention": Decay()},
            "needs a decay as target",
        ),
        (
            {"target": "erase", "source": "lr", "rule": "copy"},
            {"bias": rc.bias.L2(probe=rc.bias.Probe(per="key"))},
            "of one shape",
        ),
        (
            {"target": "angle", "source": "lr", "rule": "rate"},
            {"retention": Decay()},
            "needs complex_decay",
        ),
        (
            {"target": "log_decay", "source": "lr", "rule": "shrink"},
            {"retention": Decay(), "algorithm": GD(normalized_steps=True)},
            "no multiple of the stability limit",
        ),
    ],
)
def test_ties_that_this_recipe_does_not_allow(
    tie: dict[str, str], choices: dict[str, object], says: str
) -> None:
    with pytest.raises(rc.RecipeError, match=says):
        build(LayerOptions(ties=(Tie(**tie),)), **choices)


def test_ties_apply_to_tied_values() -> None:
    first = Tie(target="lr", source="k", rule="implicit")
    then = Tie(target="log_decay", source="lr", rule="diagonal")
    assert LayerOptions(ties=(first, then)).ties == (first, then)
    with pytest.raises(rc.RecipeError, match="the tie of its source must come first"):
        LayerOptions(ties=(then, first))


@pytest.mark.parametrize(
    ("options", "choices", "says"),
    [
        ({"complex_decay": "input"}, {"memory": rc.memory.MLP()}, "linear memory"),
        ({"complex_decay": "input"}, {"features": rc.features.EluPlusOne()}, "features.Identity"),
        (
            {"complex_decay": "input"},
            {"bias": DOT, "retention": Decay(per="entry")},
            "pairs of channels",
        ),
        ({"complex_decay": "input"}, {"memory": rc.memory.Vector(), "bias": DOT}, "qk='ones'"),
        ({"complex_decay": "input", "qk": "ones"}, {"memory": rc.memory.Vector()}, "DotProduct"),
        ({"complex_decay": "input"}, {"memory": TRANSPOSED}, "compares queries with values"),
        ({"rope_theta": 100.0}, {"memory": TRANSPOSED}, "compares queries with values"),
        ({"value_skip": True}, {"algorithm": GD(updates_per_token=2)}, "one association per token"),
        ({"qk": "ones"}, {"algorithm": GD(updates_per_token=2)}, "one association per token"),
        ({"zero_values": 1}, {}, "leaves a token without a value"),
        ({"mimo": True}, {}, "set updates_per_token"),
        (
            {"mimo": True, "zero_values": 1},
            {"algorithm": GD(updates_per_token=2)},
            "one value per token",
        ),
        ({"partial_rotary_factor": 0.5}, {}, "needs rope_theta or complex_decay"),
        (
            {
                "complex_decay": "input",
                "ties": (Tie(target="angle", source="log_decay", rule="rate"),),
            },
            {"bias": DOT, "retention": Decay(per="key")},
            "needs a gate per head as source",
        ),
        ({"qk_affine": True, "qk": "ones"}, {"bias": DOT}, "projections of queries and keys"),
        (
            {"complex_decay": "input", "partial_rotary_factor": 0.5},
            {"bias": DOT, "retention": Decay(per="key")},
            "a decay per head",
        ),
    ],
)
def test_options_that_this_recipe_does_not_allow(
    options: dict[str, object], choices: dict[str, object], says: str
) -> None:
    with pytest.raises(rc.RecipeError, match=says):
        build(LayerOptions(**options), **choices)  # type: ignore[arg-type]


def test_angles_need_pairs() -> None:
    with pytest.raises(rc.RecipeError, match="even size, not 3"):
        MemoryLayer(8, 2, rc.Recipe(), LayerOptions(complex_decay="input"), head_dim=3)
    options = LayerOptions(gate_options={"decay": GateOptions(init_schedule="xpos")})
    with pytest.raises(rc.RecipeError, match="even number of channels"):
        build(options, retention=Decay(alpha="learned"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("complex_decay", "sometimes"),
        ("token_shift", "left"),
        ("qk", "twos"),
        ("value_skip", 1),
        ("key_dim", 0),
    ],
)
def test_options_of_the_wrong_kind(field: str, value: object) -> None:
    with pytest.raises(rc.RecipeError, match=field):
        LayerOptions(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["mamba", "rwkv6", "rwkv7", "lru", "gateloop", "longhorn_diagonal", "mamba3", "falcon_1"],
)
def test_options_survive_json(name: str) -> None:
    options = rc.zoo.get(name).options
    assert LayerOptions.from_dict(options.to_dict()) == options


def test_factored_decays_require_separate_factors() -> None:
    with pytest.raises(rc.RecipeError, match="two decays to scale"):
        Decay(per="key_value", alpha="input_scaled")
    with pytest.raises(rc.RecipeError, match="keeps its factors separate"):
        rc.Recipe(bias=rc.bias.Huber(), retention=Decay(per="entry", alpha="input_scaled"))
    deep = rc.Recipe(memory=rc.memory.MLP(), retention=Decay(per="value", alpha="input_scaled"))
    assert {gate.name for gate in deep.gates()} >= {"log_decay"}
    assert {param.name for param in deep.params()} == {"decay_scale"}


def test_angles_of_grouped_heads_follow_their_memory() -> None:
    """Two query heads on one memory equal two memories with equal weights."""
    torch.manual_seed(0)
    preset = rc.zoo.get("gateloop")
    options = replace(preset.options, conv_size=0)
    shared = MemoryLayer(8, 2, preset.recipe, options, num_kv_heads=1).double()
    full = MemoryLayer(8, 2, preset.recipe, options).double()
    weights = shared.state_dict()
    for key, value in list(weights.items()):
        if key == "qkv.weight":
            q, k, v = value.split(shared.qkv_sizes)
            weights[key] = torch.cat([q, k, k, v, v])
        elif key.startswith(("gates.", "phase.")) and not key.endswith("down"):
            weights[key] = torch.cat([value, value])
    full.load_state_dict(weights)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(full(x)[0], shared(x)[0], atol=1e-10, rtol=1e-10)


def test_ties_apply_in_their_order() -> None:
    """A probe that is copied from keys has the keys before or after their tie."""
    recipe = rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()))
    copy, previous = (
        Tie(target="probe", source="k", rule="copy"),
        Tie(target="k", source="k", rule="previous"),
    )
    x = torch.randn(1, 5, 8)
    for ties, shift in (((copy, previous), 1), ((previous, copy), 0)):
        inputs = MemoryLayer(8, 2, recipe, LayerOptions(ties=ties)).memory_inputs(x)
        keys, probes = inputs.k[:, shift:], inputs.gates["probe"]
        assert torch.equal(keys, probes[:, : 5 - shift])


def test_an_explanation_has_the_equations_of_ties() -> None:
    assert rc.explain("rwkv7").ties == (
        "w_t = (k_t ⊙ ξ_w)/‖k_t ⊙ ξ_w‖",
        "k_t ← k_t ⊙ (1 + ν (erase − 1))",
    )
    assert rc.explain("memory_mosaics").ties == (
        "k_t ← A_t, A_t = λ_t A_(t−1) + k_t",
        "k_t ← ζ_k k_t/‖k_t‖",
        "q_t = k_t",
        "k_t ← k_(t−1)",
        "v_t ← (1 − ξ_v) v_t + ξ_v v_(t−1)",
        "v_t ← ζ_v v_t/‖v_t‖",
    )
    assert "ties     k_t ← k_(t−1)\n" in str(rc.explain("falcon_1"))
    assert rc.explain(rc.zoo.get("q_delta").recipe).ties == ()


def test_learned_factors_have_distinct_letters() -> None:
    ties = (
        Tie(target="probe", source="k", rule="direction"),
        Tie(target="q", source="k", rule="difference"),
        Tie(target="k", source="erase", rule="blend"),
        *(Tie(target="k", source="k", rule=rule) for rule in ("precondition", "mix", "length")),
    )
    letters = [{*re.findall("[ξνχζ](?:_.)?", tie.equation)} for tie in ties]
    assert [len(x) for x in letters] == [1] * len(ties)
    assert len(set.union(*letters)) == len(ties)


def test_filter_changes_the_decay_of_an_earlier_tie() -> None:
    """α = a_0 c lr/lr_0 of the tie, times 1 − w k²/Λ of the filter, in this order alone."""
    filtered = Tie(target="k", source="k", rule="filter")
    rate = Tie(target="log_decay", source="lr", rule="rate")
    recipe = rc.Recipe(bias=DOT, retention=Decay(per="key"))
    with pytest.raises(rc.RecipeError, match="tie of 'log_decay' must come before it"):
        LayerOptions(ties=(filtered, rate))
    torch.manual_seed(0)
    layer = MemoryLayer(8, 2, recipe, LayerOptions(ties=(rate, filtered))).double()
    only_rate = MemoryLayer(8, 2, recipe, LayerOptions(ties=(rate,))).double()
    only_rate.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(1, 1, 8, dtype=torch.float64)
    inputs, plain = layer.memory_inputs(x), only_rate.memory_inputs(x)
    removed = 1 - inputs.k * plain.k  # w k²/Λ
    torch.testing.assert_close(
        inputs.gates["log_decay"], plain.gates["log_decay"] + removed.log(), rtol=1e-10, atol=1e-10
    )


def test_part_of_the_channels_is_rotated() -> None:
    torch.manual_seed(0)
    full = MemoryLayer(16, 2, rc.Recipe(), LayerOptions(rope_theta=100.0)).double()
    part = LayerOptions(rope_theta=100.0, partial_rotary_factor=0.5)
    half = MemoryLayer(16, 2, rc.Recipe(), part).double()
    half.load_state_dict(full.state_dict())
    bare = MemoryLayer(16, 2, rc.Recipe(), LayerOptions()).double()
    bare.load_state_dict(full.state_dict())
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    k, q = half.memory_inputs(x).k, bare.memory_inputs(x).k
    torch.testing.assert_close(k[..., 4:], q[..., 4:])
    assert not torch.allclose(k[:, 1:, :, :4], q[:, 1:, :, :4])
    torch.testing.assert_close(k[..., :4].norm(dim=-1), q[..., :4].norm(dim=-1))
