"""Options of a layer around its memory, against loops over tokens, heads and groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_layer import check_splits
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.lm.distributed.head_sharding import check_divisible, keep_local_heads, shard_specs
from recollect.lm.mup.roles import config_at_width, roles
from recollect.lm.training.weight_decay import decay_parameter_names

Decay = rc.retention.Decay
COPY = rc.Tie(target="q", source="k", rule="copy")

D, HEADS, T = 12, 4, 11
TOL = {"atol": 1e-10, "rtol": 1e-10}
DOT = rc.Recipe(bias=rc.bias.DotProduct(), retention=Decay())
DELTA = rc.Recipe(retention=Decay(when="before"))
ALL = rc.LayerOptions(
    conv_bias=True,
    qk_norm="none",
    key_group_size=2,
    value_skip=True,
    value_skip_per="head",
    norm_group_size=2,
    norm_before_gate=False,
)
CASES: dict[str, tuple[rc.Recipe, rc.LayerOptions]] = {
    "all": (DOT, ALL),
    "convolution bias": (DELTA, rc.LayerOptions(conv_bias=True)),
    "shared keys": (DELTA, rc.LayerOptions(key_group_size=2, rope_theta=100.0)),
    "one key": (DELTA, rc.LayerOptions(key_group_size=4, qk_affine=True)),
    "scaled queries and keys": (
        DELTA,
        rc.LayerOptions(qk_scale="learned", qk_norm="none", key_group_size=2, rope_theta=100.0),
    ),
    "zero-centered scale": (DELTA, rc.LayerOptions(qk_scale="zero_centered", qk_affine=True)),
    "skip per head": (DELTA, rc.LayerOptions(value_skip=True, value_skip_per="head")),
    "norm of a head": (DELTA, rc.LayerOptions(norm_group_size=1)),
    "norm of all heads": (DELTA, rc.LayerOptions(norm_group_size=4)),
    "gate before norm": (DELTA, rc.LayerOptions(norm_before_gate=False)),
    "low-rank gate before norm": (
        DELTA,
        rc.LayerOptions(norm_before_gate=False, output_gate="sigmoid", output_gate_rank=3),
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    recipe, options = CASES[name]
    layer = rc.MemoryLayer(D, HEADS, recipe, options, head_dim=4, value_dim=3).double()
    for weight in layer.parameters():  # no factor is 1, and no bias 0
        torch.nn.init.normal_(weight, std=0.5)
    return layer


def tokens(B: int = 2, length: int = T) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, length, D, dtype=torch.float64, generator=generator)


def loop(layer: Any, x: Tensor) -> Tensor:
    """Return outputs of one sequence ``[T, D]``, one token and head after another."""
    o, K, V = layer.options, 4, 3
    groups = HEADS // o.key_group_size
    sizes = [groups * K, groups * K, HEADS * V]
    u = x @ layer.qkv.weight.T
    rows: list[Tensor] = []
    for t in range(x.shape[0]):
        taps = [layer.conv.weight[3 - j] * u[t - j] for j in range(4) if t >= j]
        row = sum(taps)
        rows.append(row if layer.conv.bias is None else row + layer.conv.bias)
    q, k, v = functional.silu(torch.stack(rows)).split(sizes, -1)
    gates = {name: layer.gates[name](x.unsqueeze(0))[0] for name in ("log_decay", "lr")}
    heads = []
    for h in range(HEADS):
        g = h // o.key_group_size
        W, outputs = torch.zeros(V, K, dtype=x.dtype), []
        for t in range(x.shape[0]):
            qt, kt, vt = q[t, g * K :][:K], k[t, g * K :][:K], v[t, h * V :][:V]
            if o.qk_norm == "l2":
                qt, kt = (
                    qt / (qt.square().sum() + 1e-12) ** 0.5,
                    kt / (kt.square().sum() + 1e-12) ** 0.5,
                )
            if layer.qk_scale is not None:
                offset = 1 if o.qk_scale == "zero_centered" else 0
                qt, kt = (
                    qt * (offset + layer.qk_scale.weight[0]),
                    kt * (offset + layer.qk_scale.weight[1]),
                )
            if layer.qk_affine is not None:
                qt = qt * layer.qk_affine.weight[g] + layer.qk_affine.bias[g]
                kt = kt * layer.qk_affine.weight[groups + g] + layer.qk_affine.bias[groups + g]
            if o.rope_theta is not None:
                qt, kt = (rotated(z, t, o.rope_theta) for z in (qt, kt))
            W = gates["log_decay"][t, h].exp() * W
            error = vt - W @ kt if layer.recipe.retention.decay.when == "before" else vt
            W = W + gates["lr"][t, h] * torch.outer(error, kt)
            y = W @ qt
            if layer.skip is not None:
                y = y + layer.skip[h, 0] * vt
            outputs.append(y)
        heads.append(torch.stack(outputs))
    y = torch.stack(heads, 1)  # [T, heads, V]
    down = layer.output_gate_down
    z = (x if down is None else x @ down.weight.T) @ layer.output_gate.weight.T
    if layer.output_gate.bias is not None:
        z = z + layer.output_gate.bias
    gate = (torch.sigmoid(z) if o.output_gate == "sigmoid" else z * torch.sigmoid(z)).view_as(y)
    if not o.norm_before_gate:
        y = y * gate
    size = o.norm_group_size or 1
    factors = layer.norm.weight.expand(HEADS, V)
    normed = []
    for h in range(HEADS):
        group = y[:, h // size * size : h // size * size + size]
        scale = (group.square().mean((1, 2)) + 1e-6).sqrt()
        normed.append(y[:, h] / scale[:, None] * factors[h])
    y = torch.stack(normed, 1)
    if o.norm_before_gate:
        y = y * gate
    return y.flatten(1) @ layer.out.weight.T


def rotated(z: Tensor, t: int, base: float) -> Tensor:
    half = z.shape[0] // 2
    angle = t * base ** -(torch.arange(half, dtype=z.dtype) / half)
    a, b = z[:half], z[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_a_loop(name: str) -> None:
    layer, x = build(name), tokens().requires_grad_()
    expected = torch.stack([loop(layer, row) for row in x])
    y, _ = layer(x)
    torch.testing.assert_close(y, expected, **TOL)
    inputs = (x, *layer.parameters())
    weight = torch.randn_like(y)
    result, target = (torch.autograd.grad((z * weight).sum(), inputs) for z in (y, expected))
    torch.testing.assert_close(result, target, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_splits_padding_and_packed_documents_change_nothing(name: str) -> None:
    layer, x = build(name), tokens()
    check_splits(layer, x)
    mask = torch.ones(2, T)
    mask[0, :4], mask[1, [2, 9]] = 0, 0
    y, state = layer(x.masked_fill(mask[..., None] == 0, torch.nan), attention_mask=mask)
    more, _ = layer(x[:, :2], state)
    for row in range(2):
        valid = mask[row].bool()
        single, end = layer(x[row : row + 1, valid])
        torch.testing.assert_close(y[row : row + 1, valid], single, **TOL)
        torch.testing.assert_close(more[row : row + 1], layer(x[row : row + 1, :2], end)[0], **TOL)
    cuts = (0, 4, 4, 5, T)
    packed, _ = layer(x[:1], cu_seqlens=torch.tensor(cuts))
    for a, b in pairwise(cuts):
        if a < b:
            torch.testing.assert_close(packed[:, a:b], layer(x[:1, a:b])[0], **TOL)


@pytest.mark.parametrize("name", CASES)
def test_modes_agree(name: str) -> None:
    """Inference mode, recorded calls, and a second derivative."""
    layer, x = build(name), tokens(1, 5)
    y, _ = layer(x)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x)[0], y, **TOL)
    calls: list[Any] = []
    layer(x, calls=calls)
    recorded = calls[0].state_at(3)
    torch.testing.assert_close(layer(x[:, 3:], recorded)[0], y[:, 3:], **TOL)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["all", "zero-centered scale"])
def test_compiled_and_half_precision_layers_agree(name: str) -> None:
    layer, x = build(name).float(), tokens().float()
    y, _ = layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], y, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = layer(x)
    assert (half.float() - y).norm() < 0.03 * y.norm()
    half, _ = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - y).norm() < 0.03 * y.norm()
    assert layer(x[:, :0].bfloat16())[0].shape == (2, 0, D)


def test_shared_keys_are_repeated_keys() -> None:
    """Also with several associations per token and a tie."""
    for system in ("delta_product", "rwkv7", "comba"):
        preset = rc.zoo.get(system)
        torch.manual_seed(0)
        shared = rc.MemoryLayer(
            16, 4, preset.recipe, replace(preset.options, key_group_size=2)
        ).double()
        full = rc.MemoryLayer(16, 4, preset.recipe, preset.options).double()
        weights = shared.state_dict()
        n = preset.recipe.associations_per_token
        for name in ("qkv.weight", "conv.weight"):
            if name in weights:
                axis = int(name == "conv.weight")
                q, k, v = weights[name].split(shared.qkv_sizes, axis)
                q, k = (
                    z.unflatten(axis, (2, -1)).repeat_interleave(2, axis).flatten(axis, axis + 1)
                    for z in (q, k)
                )
                weights[name] = torch.cat([q, k, v], axis)
        full.load_state_dict(weights)
        x = torch.randn(2, 7, 16, dtype=torch.float64)
        torch.testing.assert_close(shared(x)[0], full(x)[0], **TOL)
        assert shared.memory_inputs(x).k.shape[2] == 4
        assert n == 1 or shared.memory_inputs(x).k.shape[3] == n


@pytest.mark.parametrize("name", ["all", "one key", "norm of a head", "scaled queries and keys"])
def test_parts_of_the_heads_add_up(name: str) -> None:
    layer, x = build(name), tokens()
    if name == "one key":
        with pytest.raises(rc.RecipeError, match=r"num_heads / key_group_size = 1"):
            check_divisible(layer, 2, name="layer 0")
        return
    check_divisible(layer, 2)
    specs, total = shard_specs(layer), torch.zeros_like(x)
    for index in range(2):
        part = build(name)
        for path, weight in layer.named_parameters():
            owner, _, attribute = path.rpartition(".")
            spec = specs.get(path)
            value = weight if spec is None else spec.local_shard(weight, index, 2)
            setattr(part.get_submodule(owner), attribute, torch.nn.Parameter(value.detach()))
        keep_local_heads(part, index, 2)
        total += part(x)[0]
    torch.testing.assert_close(total, layer(x)[0], **TOL)


def test_width_rules_and_weight_decay_know_the_new_weights() -> None:
    config = rc.lm.RecollectConfig.from_recipes(
        {"memory": (DOT, ALL)},
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    result = roles(config, 16)
    prefix = "model.blocks.0.layer"
    for name in ("conv.bias", "norm.weight", "skip"):
        assert result[f"{prefix}.{name}"] == "input"
    assert result[f"{prefix}.qkv.weight"] == "hidden"
    model = rc.lm.RecollectForCausalLM(config)
    decayed = decay_parameter_names(model)
    assert not {f"{prefix}.{name}" for name in ("conv.bias", "norm.weight", "skip")} & {*decayed}
    assert rc.explain(model) is not None
    layer: Any = model.model.blocks[0].layer
    assert rc.cost(layer, T=64).total > 0
    report = rc.diagnose(layer, torch.randn(1, 6, 32))
    assert report is not None


def sized(**fields: Any) -> Any:
    return rc.lm.RecollectConfig.from_recipes(
        ["gated_delta_net", "softmax_attention"],
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        **fields,
    )


def test_layers_of_a_recipe_may_have_different_sizes(tmp_path: Path) -> None:
    recipe_sizes = {"num_attention_heads": 4, "head_dim": 3, "value_dim": 5}
    config = sized(recipe_sizes={"gated_delta_net": recipe_sizes})
    model = rc.lm.RecollectForCausalLM(config)
    shapes = [
        (x.num_heads, x.num_kv_heads, x.head_dim, x.value_dim)
        for x in (block.layer for block in model.model.blocks)
    ]
    assert shapes == [(4, 4, 3, 5), (2, 2, 8, 8)]
    model.save_pretrained(tmp_path)
    loaded = rc.lm.RecollectForCausalLM.from_pretrained(tmp_path)
    assert loaded.config == config
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    wider = config_at_width(config, 32)
    assert wider.recipe_sizes["gated_delta_net"] == {**recipe_sizes, "num_attention_heads": 8}
    assert config.recipe_sizes["gated_delta_net"] == recipe_sizes
    for sizes, message in (
        ({"mamba": recipe_sizes}, "recipe_sizes names the recipe 'mamba'"),
        ({"gated_delta_net": {"heads": 2}}, "has no size 'heads'"),
        ({"gated_delta_net": {"head_dim": 0}}, "whole number from 1"),
        ([1], "must map names of recipes to sizes"),
    ):
        with pytest.raises(rc.RecipeError, match=message):
            sized(recipe_sizes=sizes)


def test_zero_centered_norms_start_at_one_and_may_be_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = rc.lm.RecollectForCausalLM(sized(zero_centered_norms=True))
    plain = rc.lm.RecollectForCausalLM(sized())
    norms = {n for n, _ in model.named_parameters() if n.endswith("norm.weight")}
    norms -= {"model.blocks.0.layer.norm.weight"}
    assert len(norms) == 5
    weights = model.state_dict()
    for name in norms:
        assert not weights[name].any()
        torch.nn.init.normal_(weights[name])
    plain.load_state_dict({n: 1 + x if n in norms else x for n, x in weights.items()})
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-6, rtol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = rc.lm.RecollectForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_models_without_mlps() -> None:
    config = sized(intermediate_size=0)
    model = rc.lm.RecollectForCausalLM(config)
    assert not any("mlp" in name for name, _ in model.named_parameters())
    assert config_at_width(config, 32).intermediate_size == 0


def test_options_survive_json() -> None:
    assert rc.LayerOptions.from_dict(ALL.to_dict()) == ALL


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"conv_bias": True, "conv_size": 0},
            "conv_bias=True.* needs a convolution: set conv_size",
        ),
        ({"value_skip_per": "head"}, "value_skip_per='head'.* needs a skip: set value_skip"),
        ({"norm_group_size": 2, "output_norm": "none"}, "norm_group_size.* needs an output norm"),
        ({"norm_before_gate": False, "output_gate": "none"}, "norm and an output gate: set"),
        ({"norm_eps": 1e-3, "output_norm": "none"}, "norm_eps=0.001.* needs an output norm: set"),
        ({"qk_norm_eps": 1e-3, "qk_norm": "none"}, "qk_norm_eps=0.001.* set qk_norm='l2' or 'rms'"),
        ({"qk_norm_eps": 1e-3, "qk_norm": "scaled"}, "qk_norm='scaled'.* needs a norm of queries"),
        ({"conv_activation_on": "qk", "qk": "ones"}, "'qk', qk='ones'.* set qk='input', or leave"),
        ({"conv_activation_on": "q", "qk": "ones"}, "'q', qk='ones'.* needs projections of"),
        ({"conv_activation_on": "q", "ties": (COPY,)}, "needs a projection of queries, which"),
        ({"key_group_size": 0}, "key_group_size=...* must be a whole number >= 1"),
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(rc.RecipeError, match=message):
        rc.LayerOptions(**fields)


def test_options_next_to_those_without_effect_are_accepted() -> None:
    rc.LayerOptions(conv_activation_on="v", qk="ones")
    rc.LayerOptions(conv_activation_on="qk", ties=(COPY,))
    rc.LayerOptions(qk_norm="rms", qk_norm_eps=1e-3, output_norm="rms", norm_eps=1e-3)
    rc.LayerOptions(qk_norm="none", output_norm="none")
    leaf = rc.Recipe(), rc.LayerOptions(qk_norm_eps=1e-3, norm_eps=1e-3)
    slots = rc.blocks.SlotMemory(leaf, leaf, num_slots=4)
    assert rc.blocks.build(slots, d_model=8, num_heads=2)(torch.randn(1, 3, 8))[0].isfinite().all()


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        ({"key_group_size": 3}, {}, "a number of memories that it divides, not 4 heads of 4"),
        ({"key_group_size": 2}, {"num_kv_heads": 2}, "one query head per memory"),
        ({"norm_group_size": 3}, {}, "norm_group_size=3.* must divide num_heads = 4"),
        ({"key_group_size": 2, "qk": "ones"}, {}, "shares projections of queries and keys"),
        ({"qk_scale": "learned", "qk": "ones"}, {}, "qk_scale='learned'.* needs projections"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    fields: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    recipe = (
        rc.Recipe(memory=rc.memory.Vector(), bias=rc.bias.DotProduct()) if "qk" in fields else DOT
    )
    with pytest.raises(rc.RecipeError, match=message):
        rc.MemoryLayer(16, 4, recipe, rc.LayerOptions(**fields), **sizes)
