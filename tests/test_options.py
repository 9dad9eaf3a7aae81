"""Layer options are data that survives JSON, and meaningless options are refused."""

from __future__ import annotations

import copy
import importlib
import json
import re
from dataclasses import replace

import pytest
import torch

import recollect as rc
from recollect import GateOptions, LayerOptions
from recollect.layer.options import Tie


def test_options_survive_json() -> None:
    options = LayerOptions(
        conv_size=3,
        rope_theta=500.0,
        qk_norm="none",
        gate_options={
            "lr": GateOptions(low=0, high=2, init=(0.5, 1.5)),
            "log_decay": GateOptions(temperature=16, rank=8, head_spread=2),
            "decay": GateOptions(source="constant", init_schedule="alibi"),
        },
        ties=(Tie(target="k", source="log_decay", rule="complement"),),
    )
    back = LayerOptions.from_dict(json.loads(json.dumps(options.to_dict())))
    assert back == options
    assert hash(back) == hash(options)
    assert back.gate("lr").init == (0.5, 1.5)
    assert back.gate("never named") == GateOptions()


@pytest.mark.parametrize("name", rc.zoo.names())
def test_every_presets_options_survive_json(name: str) -> None:
    options = rc.zoo.get(name).options
    assert LayerOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options


def test_order_of_gate_options_does_not_matter() -> None:
    a, b = GateOptions(rank=4), GateOptions(init=0.1)
    assert LayerOptions(gate_options={"x": a, "y": b}) == LayerOptions(
        gate_options={"y": b, "x": a}
    )
    assert replace(LayerOptions(gate_options={"x": a}), conv_size=2).gate("x") == a


def test_no_convolution_has_two_spellings() -> None:
    assert LayerOptions(conv_size=None) == LayerOptions(conv_size=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LayerOptions(conv_size=-1), "conv_size"),
        (lambda: LayerOptions(conv_size=True), "conv_size"),
        (lambda: LayerOptions(conv_activation="relu"), "'silu', 'none'"),
        (lambda: LayerOptions(qk_norm="l1"), "'l2', 'rms', 'scaled', 'none'"),
        (lambda: LayerOptions(rope_theta=0.0), "rope_theta"),
        (lambda: LayerOptions(gate_options={"lr": 0.5}), "GateOptions"),  # type: ignore[dict-item]
        (lambda: LayerOptions(gate_options=3), "GateOptions"),  # type: ignore[arg-type]
        (lambda: GateOptions(source="magic"), "'input', 'learned', 'constant'"),
        (lambda: GateOptions(low=1, high=0), "low must be below high"),
        (lambda: GateOptions(low="1"), r"^GateOptions\(low=...\) must be a number, not '1'$"),
        (lambda: GateOptions(init=(0.1, 1e400)), r"\(init=...\) must be a finite number, not inf$"),
        (
            lambda: LayerOptions(value_skip=1),
            r"^LayerOptions\(value_skip=...\) must be true or false, not 1$",
        ),
        (lambda: LayerOptions(key_dim=0), r"\(key_dim=...\) must be a whole number >= 1, not 0$"),
        (
            lambda: Tie(target="", source="lr", rule="rate"),
            r"^Tie\(target=...\) must be a non-empty",
        ),
        (
            lambda: Tie(target="lr", source="lr", rule="speed"),
            r"^Tie\(rule=...\) must be one of 'c",
        ),
        (lambda: GateOptions(temperature=0), "temperature"),
        (lambda: GateOptions(head_spread=0.5), "head_spread"),
        (lambda: GateOptions(rank=-1), "rank"),
        (lambda: GateOptions(init=float("nan")), "finite"),
        (lambda: GateOptions(init_schedule="dyadic", init=0.1), "drop init"),
        (lambda: LayerOptions(ties=("k",)), "tuple of Tie"),  # type: ignore[arg-type]
        (lambda: Tie(target="k", source="log_decay", rule="rate"), "cannot make 'k'"),
        (lambda: Tie(target="lr", source="lr", rule="rate"), "follow itself"),
        (
            lambda: LayerOptions(
                ties=(
                    Tie(target="a", source="b", rule="rate"),
                    Tie(target="b", source="c", rule="rate"),
                )
            ),
            "a gate needs one tie",
        ),
        (lambda: LayerOptions.from_dict({"convolution": 4}), "no field 'convolution'"),
        (lambda: LayerOptions.from_dict({None: 4}), "no field None"),
        (lambda: LayerOptions.from_dict([4]), "mapping"),
        (lambda: LayerOptions.from_dict({"gate_options": nested(10_000)}), r"not \[\[\[\["),
        (lambda: LayerOptions.from_dict({"ties": 10**5000}), "about 5,001 digits"),
        (
            lambda: LayerOptions.from_dict({"gate_options": {"lr": {"speed": 1}}}),
            "no field 'speed'",
        ),
    ],
)
def test_bad_options_are_refused_by_name(make: object, says: str) -> None:
    with pytest.raises(rc.RecipeError, match=says):
        make()  # type: ignore[operator]


def nested(levels: int) -> list[object]:
    """Return nested lists."""
    data: list[object] = []
    for _ in range(levels):
        data = [data]
    return data


def test_constant_number_cannot_depend_on_the_input() -> None:
    # Only a member that accepts 'input' is advised to use it.
    def layer(algorithm: rc.algorithm.Algorithm, name: str) -> rc.MemoryLayer:
        options = LayerOptions(gate_options={name: GateOptions(source="input")})
        return rc.MemoryLayer(16, 2, rc.Recipe(algorithm=algorithm), options)

    with pytest.raises(
        rc.RecipeError, match=r"'learned' or 'constant'; set it to 'input' in the member"
    ):
        layer(rc.algorithm.GradientDescent(lr="learned"), "lr")
    averaged = rc.algorithm.GradientDescent(batch_size=4, reduction="mean", offset="learned")
    with pytest.raises(rc.RecipeError, match=r"source is 'learned' or 'constant'$"):
        layer(averaged, "offset")


def test_gate_options_refer_to_the_table_of_their_defaults() -> None:
    (module,) = re.findall(
        r"see `(recollect[.a-z]+)`", (GateOptions.__doc__ or "").split("Args")[0]
    )
    assert "declared range" in (importlib.import_module(module).__doc__ or "")


def test_a_gate_without_a_bias_starts_at_its_activation_of_zero() -> None:
    options = rc.LayerOptions(gate_options={"lr": rc.GateOptions(low=0.0, high=2.0, bias=False)})
    layer = rc.MemoryLayer(8, 2, rc.Recipe(), options)
    assert layer.gates["lr"].bias is None
    x = torch.zeros(1, 3, 8)
    assert torch.equal(layer.compute_gates(x, {})["lr"], torch.ones(1, 3, 2))
    assert torch.equal(layer.gates["lr"].initial(), torch.ones(2, dtype=torch.float64))
    assert rc.LayerOptions.from_dict(options.to_dict()) == options
    for wrong in ({"source": "learned"}, {"init": 0.0}, {"init_schedule": "dyadic"}):
        with pytest.raises(rc.RecipeError, match="bias=False"):
            rc.GateOptions(bias=False, **wrong)
    learned = rc.Recipe(retention=rc.retention.Decay(alpha="learned"))
    with pytest.raises(rc.RecipeError, match="'decay': bias=False is for gates of the input"):
        rc.MemoryLayer(
            *(8, 2, learned),
            rc.LayerOptions(gate_options={"decay": rc.GateOptions(bias=False)}),
        )


def test_the_eps_of_norms() -> None:
    options = rc.LayerOptions(norm_eps=0.5, qk_norm_eps=3.0, conv_size=0)
    layer = rc.MemoryLayer(8, 2, rc.Recipe(), options).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = layer.memory_inputs(x)
    k = torch.nn.functional.silu(x @ layer.qkv.weight[8:16].T).unflatten(-1, (2, 4))
    assert torch.allclose(inputs.k, k / (k.square().sum(-1, keepdim=True) + 3).sqrt(), rtol=1e-12)
    y, _ = rc.recall(layer, inputs.q, inputs.k, inputs.v, inputs.gates)
    y = (y / (y.square().mean(-1, keepdim=True) + 0.5).sqrt()).flatten(2)
    gate = torch.nn.functional.silu(x @ layer.output_gate.weight.T)
    assert torch.allclose(layer(x)[0], (y * gate) @ layer.out.weight.T, rtol=1e-10)


def test_one_value_per_head_for_all_channels() -> None:
    recipe = rc.Recipe(retention=rc.retention.Decay(per="key", alpha="input_scaled"))
    scale = rc.GateOptions(activation="exp", per="head", init=2.0, head_spread=3.0)
    decay = rc.GateOptions(per="head", rank=2)
    options = rc.LayerOptions(gate_options={"decay_scale": scale, "log_decay": decay})
    layer = rc.MemoryLayer(8, 2, recipe, options, head_dim=4)
    assert layer.params["decay_scale"].bias.shape == (2, 1)
    assert layer.gates["log_decay"].weight.shape == (2, 8)
    values = layer.compute_gates(torch.randn(1, 3, 8), {})
    assert values["log_decay"].shape == (1, 3, 2, 4) and values["decay_scale"].shape == (2, 4)
    assert torch.equal(values["log_decay"], values["log_decay"][..., :1].expand(1, 3, 2, 4))
    expected = torch.tensor([[6.0], [2 / 3]]).expand(2, 4)  # spread over the heads
    torch.testing.assert_close(values["decay_scale"], expected)
    layer(torch.randn(1, 3, 8))[0].sum().backward()
    assert layer.params["decay_scale"].bias.grad is not None


def test_an_activation_on_some_projections() -> None:
    x = torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for on in ("q", "v", "qk"):
        options = rc.LayerOptions(conv_size=0, qk_norm="none", conv_activation_on=on)
        layer = rc.MemoryLayer(8, 2, rc.Recipe(), options).double()
        inputs = layer.memory_inputs(x)
        for name, weight in zip("qkv", layer.qkv.weight.split(8), strict=True):
            y = (x @ weight.T).unflatten(-1, (2, 4))
            expected = torch.nn.functional.silu(y) if name in on else y
            assert torch.allclose(getattr(inputs, name), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(rc.RecipeError, match=r"on='q'.* needs an activation"):
        rc.LayerOptions(conv_activation="none", conv_activation_on="q")


def test_lower_ends_of_decays_grow_with_the_depth() -> None:
    recipe = rc.Recipe(bias=rc.bias.DotProduct(), retention=rc.retention.Decay(per="key"))
    gate = rc.GateOptions(depth_floor=True, rank=0)
    options = rc.LayerOptions(gate_options={"log_decay": gate})
    x = torch.randn(1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = torch.randn(3, 2, 4, dtype=torch.float64).softmax(0)
    for index in range(3):
        layer = rc.MemoryLayer(8, 2, recipe, options, depth=(index, 3)).double()
        projection = layer.gates["log_decay"]
        with torch.no_grad():
            projection.floors.weight.copy_(shares.log())
        floor = sum(shares[1 : index + 1], torch.zeros(2, 4))
        z = (x @ projection.weight.T).unflatten(-1, (2, 4)) + projection.bias
        expected = floor + (1 - floor) * torch.sigmoid(z)
        torch.testing.assert_close(projection(x).exp(), expected, rtol=1e-12, atol=0)
        layer(x)[0].sum().backward()
        assert (projection.floors.weight.grad is None) == (index == 0)
    with pytest.raises(rc.RecipeError, match="'lr': depth_floor=True is for log decays"):
        rc.MemoryLayer(8, 2, recipe, rc.LayerOptions(gate_options={"lr": gate}))


def test_the_layers_of_a_model_share_lower_ends() -> None:
    pytest.importorskip("transformers")

    options = {"num_hidden_layers": 3, "hidden_size": 16, "expand_ratio": 4, "vocab_size": 9}
    config = rc.lm.published_config("hgrn2", **options)
    model = rc.lm.RecollectForCausalLM(config)
    names = [name for name, _ in model.named_parameters() if "floors" in name]
    assert names == ["model.decay_floors.weight"]
    ids = torch.tensor([[1, 2, 3, 4]])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.decay_floors.weight[1] += 1.0
    assert not torch.equal(copied(ids).logits, model(ids).logits)
    copied(ids, labels=ids).loss.backward()
    assert copied.model.decay_floors.weight.grad.abs().sum() > 0
    assert model.model.decay_floors.weight.grad is None
