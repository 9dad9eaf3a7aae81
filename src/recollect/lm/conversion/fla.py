"""Layouts of flash-linear-attention: DeltaNet, Gated DeltaNet, KDA, GLA, HGRN2 and RetNet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.lm.conversion.fla_backbone import (
    BACKBONE,
    IGNORED,
    REQUIRED,
    Options,
    backbone_options,
    check_rank,
    conv_options,
    expansion,
    factor_of,
    first_layer_options,
    head_sizes,
    make_config,
    model_pieces,
    projections,
    published_conv,
    size_per_head,
)
from recollect.lm.conversion.layout import NEGATE, Layout, Piece, parts, reshape
from recollect.lm.model.config import RecollectConfig
from recollect.recipe.recipe import Recipe

__all__ = ["FLA_LAYOUTS"]


# -- the delta rule --------------------------------------------------------------------------------


def _rate(options: Options) -> GateOptions:
    """Return the options of β = sigmoid(W x), or twice that."""
    return GateOptions(
        activation="sigmoid",
        unit="raw",
        low=0.0,
        high=2.0 if options["allow_neg_eigval"] else 1.0,
        bias=False,
    )


def _published_rate(options: LayerOptions) -> dict[str, Any]:
    return {"allow_neg_eigval": options.gate("lr").high == 2.0}


def _delta_net(options: Options) -> RecollectConfig:
    K = size_per_head(options, "expand_k")
    layer = LayerOptions(
        **conv_options(options),
        qk_norm_eps=1e-6,
        norm_eps=options["norm_eps"] * K,  # outputs are √K times as large there
        output_gate="silu" if options["use_gate"] else "none",
        gate_options={"lr": _rate(options)},
    )
    return make_config(
        options, Recipe(), layer, head_dim=K, value_dim=size_per_head(options, "expand_v")
    )


def _published_delta_net(config: RecollectConfig) -> dict[str, Any]:
    layer, (K, V) = first_layer_options(config), head_sizes(config)
    return {
        **backbone_options(config),
        **published_conv(layer),
        **_published_rate(layer),
        "expand_k": expansion(config, K),
        "expand_v": expansion(config, V),
        "use_gate": layer.output_gate != "none",
    }


def _delta_net_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from projections(config, conv=options["use_short_conv"])
    yield from _delta_rule_output(options)


def _delta_rule_output(options: Options) -> Iterator[Piece]:
    yield Piece("b_proj.weight", "gates.lr.weight")
    yield Piece("o_norm.weight", "norm.weight")
    if options["use_gate"]:
        yield Piece("g_proj.weight", "output_gate.weight")


def _sizes(options: Options) -> tuple[int, int, int]:
    """Return K, V and the number of heads."""
    K, heads = options["head_dim"], options["num_heads"]
    value_heads = options["num_v_heads"] or heads
    V = K * options["expand_v"]
    if not 1 <= V < math.inf or not math.isclose(V, int(V), rel_tol=1e-5):
        raise ValueError(f"head_dim · expand_v is {V:g}, and a head needs a whole number")
    if value_heads % heads:
        raise ValueError(f"num_v_heads is {value_heads}, and num_heads, {heads}, must divide it")
    return K, int(V), value_heads


def _published_sizes(config: RecollectConfig) -> dict[str, Any]:
    (K, V), value_heads = head_sizes(config), config.num_attention_heads
    heads = value_heads // first_layer_options(config).key_group_size
    return {
        "head_dim": K,
        "expand_v": factor_of((K, V), (value_heads * K, value_heads * V)),
        "num_heads": heads,
        "num_v_heads": None if heads == value_heads else value_heads,
    }


_DECAY_SCALE = GateOptions(activation="exp", per="head")
"""e^A of a log decay −e^A · softplus(z), one per head."""


def _gated_deltanet(options: Options) -> RecollectConfig:
    K, V, heads = _sizes(options)
    activation = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
    name = options["output_gate_activation"]
    if name not in activation:
        raise ValueError(f"output_gate_activation is {name!r}, which is none of {[*activation]}")
    layer = LayerOptions(
        **conv_options(options),
        qk_norm_eps=1e-6,
        key_group_size=heads // options["num_heads"],
        norm_eps=options["norm_eps"] * K,  # outputs are √K times as large there
        output_gate=activation[name] if options["use_gate"] else "none",
        gate_options={
            "lr": _rate(options),
            "log_decay": GateOptions(activation="logsigmoid"),
            "decay_scale": _DECAY_SCALE,
        },
    )
    recipe = Recipe(retention=Decay(when="before", alpha="input_scaled"))
    return make_config(options, recipe, layer, head_dim=K, value_dim=V, num_heads=heads)


def _published_gated_delta_rule(config: RecollectConfig) -> dict[str, Any]:
    layer = first_layer_options(config)
    return {
        **backbone_options(config),
        **_published_sizes(config),
        **published_conv(layer),
        **_published_rate(layer),
    }


def _published_gated_deltanet(config: RecollectConfig) -> dict[str, Any]:
    layer = first_layer_options(config)
    return {
        **_published_gated_delta_rule(config),
        "use_gate": layer.output_gate != "none",
        "output_gate_activation": "sigmoid" if layer.output_gate == "sigmoid" else "swish",
    }


def _gated_deltanet_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from projections(config, conv=options["use_short_conv"])
    yield from _delta_rule_output(options)
    # softplus(z) = −logsigmoid(−z)
    yield Piece("a_proj.weight", "gates.log_decay.weight", (NEGATE,))
    yield Piece("dt_bias", "gates.log_decay.bias", (NEGATE,))
    yield Piece("A_log", "params.decay_scale.bias")


def _kda(options: Options) -> RecollectConfig:
    K, V, heads = _sizes(options)
    rank = check_rank(options, V, heads * min(K, V))
    layer = LayerOptions(
        **conv_options(options),
        qk_norm_eps=1e-6,
        key_group_size=heads // options["num_heads"],
        norm_eps=options["norm_eps"] * K,  # outputs are √K times as large there
        output_gate="sigmoid",
        output_gate_rank=rank,
        gate_options={
            "lr": _rate(options),
            "log_decay": GateOptions(activation="logsigmoid", rank=rank),
            "decay_scale": _DECAY_SCALE,
        },
    )
    recipe = Recipe(retention=Decay(per="key", when="before", alpha="input_scaled"))
    return make_config(options, recipe, layer, head_dim=K, value_dim=V, num_heads=heads)


def _kda_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    shape = config.num_attention_heads, head_sizes(config)[0]
    yield from projections(config, conv=options["use_short_conv"])
    yield Piece("b_proj.weight", "gates.lr.weight")
    yield Piece("o_norm.weight", "norm.weight")
    yield Piece("g_proj.0.weight", "output_gate_down.weight")
    yield Piece("g_proj.1.weight", "output_gate.weight")
    yield Piece("g_proj.1.bias", "output_gate.bias")
    yield Piece("f_proj.0.weight", "gates.log_decay.down")
    yield Piece("f_proj.1.weight", "gates.log_decay.weight", (NEGATE,))
    yield Piece("dt_bias", "gates.log_decay.bias", (NEGATE, reshape((-1,), shape)))
    yield Piece("A_log", "params.decay_scale.bias", (reshape((-1,), (shape[0], 1)),))


# -- gated linear attention ------------------------------------------------------------------------


def _gla(options: Options) -> RecollectConfig:
    recipe = Recipe(
        bias=DotProduct(), retention=Decay(per="key"), algorithm=GradientDescent(lr=1.0)
    )
    K, kv_heads = size_per_head(options, "expand_k"), options["num_kv_heads"]
    rank = check_rank(options, 16, (kv_heads or options["num_heads"]) * K)
    layer = LayerOptions(
        **conv_options(options),
        conv_activation="silu" if options["use_short_conv"] else "none",
        qk_norm="scaled",
        norm_eps=options["norm_eps"],
        output_gate="silu" if options["use_output_gate"] else "none",
        gate_options={"log_decay": GateOptions(temperature=16.0, rank=rank)},
    )
    return make_config(
        options,
        recipe,
        layer,
        head_dim=K,
        value_dim=size_per_head(options, "expand_v"),
        num_kv_heads=kv_heads,
    )


def _published_gla(config: RecollectConfig) -> dict[str, Any]:
    layer, (K, V) = first_layer_options(config), head_sizes(config)
    kv_heads = config.num_key_value_heads
    return {
        **backbone_options(config),
        **published_conv(layer),
        "expand_k": expansion(config, K),
        "expand_v": expansion(config, V),
        "num_kv_heads": None if kv_heads == config.num_attention_heads else kv_heads,
        "use_output_gate": layer.output_gate != "none",
    }


def _gla_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from projections(config, conv=options["use_short_conv"])
    yield from _gated_norm(options)
    shape = config.num_key_value_heads, head_sizes(config)[0]
    yield Piece("gk_proj.0.weight", "gates.log_decay.down")
    yield Piece("gk_proj.1.weight", "gates.log_decay.weight")
    yield Piece("gk_proj.1.bias", "gates.log_decay.bias", (reshape((-1,), shape),))


def _gated_norm(options: Options) -> Iterator[Piece]:
    """Yield the pieces of a norm that may be fused with its gate."""
    has_gate = options["use_output_gate"]
    if has_gate:
        yield Piece("g_proj.weight", "output_gate.weight")
    is_fused = has_gate and options["fuse_norm"]
    yield Piece(f"{'g_norm_swish_gate' if is_fused else 'g_norm'}.weight", "norm.weight")


# -- retention -------------------------------------------------------------------------------------


def _retnet(options: Options) -> RecollectConfig:
    heads, kv_heads = options["num_heads"], options["num_kv_heads"]
    if kv_heads not in (None, heads):
        raise ValueError(
            f"num_kv_heads is {kv_heads}, and it must be num_heads, {heads}: the decays differ "
            "among heads with one key"
        )
    recipe = Recipe(
        bias=DotProduct(), retention=Decay(alpha="learned"), algorithm=GradientDescent(lr=1.0)
    )
    layer = LayerOptions(
        conv_size=0,
        conv_activation="none",
        qk_norm="scaled",
        rope_theta=10000.0,
        norm_eps=options["norm_eps"],
        output_gate="silu" if options["use_output_gate"] else "none",
        gate_options={"decay": GateOptions(source="constant", init_schedule="dyadic")},
    )
    return make_config(
        options,
        recipe,
        layer,
        head_dim=size_per_head(options, "expand_k"),
        value_dim=size_per_head(options, "expand_v"),
    )


def _published_retnet(config: RecollectConfig) -> dict[str, Any]:
    layer, (K, V) = first_layer_options(config), head_sizes(config)
    return {
        **backbone_options(config),
        "expand_k": expansion(config, K),
        "expand_v": expansion(config, V),
        "use_output_gate": layer.output_gate != "none",
    }


def _retnet_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from projections(config, conv=False)
    yield from _gated_norm(options)


# -- linear attention with keys that complement decays ---------------------------------------------


def _hgrn2(options: Options) -> RecollectConfig:
    width, K = options["hidden_size"], options["expand_ratio"]
    if width % K:
        raise ValueError(f"hidden_size is {width}, and expand_ratio, {K}, must divide it")
    heads = width // K
    if options["num_heads"] not in (None, heads):
        raise ValueError(
            f"num_heads is {options['num_heads']}, and hidden_size / expand_ratio is {heads}: set "
            f"num_heads to {heads}"
        )
    recipe = Recipe(
        bias=DotProduct(), retention=Decay(per="key"), algorithm=GradientDescent(lr=1.0)
    )
    layer = LayerOptions(
        conv_size=0,
        conv_activation_on="q",
        qk_norm="scaled",
        norm_eps=1e-5,  # the published layer ignores its norm_eps
        norm_group_size=heads,
        output_gate="none",
        gate_options={
            "log_decay": GateOptions(
                activation="logsigmoid", rank=0, bias=False, depth_floor=options["use_lower_bound"]
            )
        },
        ties=(Tie(target="k", source="log_decay", rule="complement"),),
    )
    return make_config(options, recipe, layer, head_dim=K, value_dim=K, num_heads=heads)


def _published_hgrn2(config: RecollectConfig) -> dict[str, Any]:
    return {
        **backbone_options(config),
        "expand_ratio": head_sizes(config)[0],
        "use_lower_bound": first_layer_options(config).gate("log_decay").depth_floor,
    }


def _hgrn2_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    heads, (K, V) = config.num_attention_heads, head_sizes(config)
    query, value = parts("qkv.weight", [heads * K, heads * V])
    yield Piece("q_proj.weight", query)
    yield Piece("i_proj.weight", value)
    yield Piece("f_proj.weight", "gates.log_decay.weight")
    yield Piece("g_norm.weight", "norm.weight", (reshape((-1,), (heads, V)),))
    yield Piece("o_proj.weight", "out.weight")


def _hgrn2_model_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from model_pieces(_hgrn2_pieces)(options, config)
    if options["use_lower_bound"]:
        layers = config.num_hidden_layers
        shape = config.num_attention_heads, head_sizes(config)[0]
        transforms = (reshape((layers, -1), (layers, *shape)),)
        yield Piece("model.lower_bounds", "model.decay_floors.weight", transforms)


# -- all layouts --------------------------------------------------------------------------------

_GATED_DELTA_RULE: dict[str, Any] = {
    "num_v_heads": None,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
}

FLA_LAYOUTS = (
    Layout(
        model_type="delta_net",
        architecture="DeltaNetForCausalLM",
        defaults={
            **BACKBONE,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "num_heads": 16,
            "use_gate": False,
            "use_short_conv": True,
            "conv_size": 4,
            "allow_neg_eigval": False,
        },
        required={
            **REQUIRED,
            "use_beta": True,
            "use_output_norm": True,
            "qk_norm": "l2",
            "qk_activation": "silu",
        },
        ignored=IGNORED | {"fuse_norm"},
        to_ours=_delta_net,
        to_published=_published_delta_net,
        pieces=model_pieces(_delta_net_pieces),
    ),
    Layout(
        model_type="gated_deltanet",
        architecture="GatedDeltaNetForCausalLM",
        defaults={
            **BACKBONE,
            **_GATED_DELTA_RULE,
            "num_hidden_layers": 21,
            "expand_v": 2.0,
            "head_dim": 256,
            "num_heads": 6,
            "use_gate": True,
            "output_gate_activation": "swish",
        },
        required=REQUIRED,
        ignored=IGNORED | {"fuse_norm"},
        to_ours=_gated_deltanet,
        to_published=_published_gated_deltanet,
        pieces=model_pieces(_gated_deltanet_pieces),
    ),
    Layout(
        model_type="kda",
        architecture="KDAForCausalLM",
        defaults={
            **BACKBONE,
            **_GATED_DELTA_RULE,
            "expand_v": 1.0,
            "head_dim": 128,
            "num_heads": 16,
        },
        required={**REQUIRED, "safe_gate": False, "lower_bound": None},
        ignored=IGNORED | {"fuse_norm"},
        to_ours=_kda,
        to_published=_published_gated_delta_rule,
        pieces=model_pieces(_kda_pieces),
    ),
    Layout(
        model_type="gla",
        architecture="GLAForCausalLM",
        defaults={
            **BACKBONE,
            "expand_k": 0.5,
            "expand_v": 1.0,
            "num_heads": 4,
            "num_kv_heads": None,
            "use_short_conv": False,
            "conv_size": 4,
            "use_output_gate": True,
            "fuse_norm": True,
        },
        required={
            **REQUIRED,
            "feature_map": None,
            "clamp_min": None,
            "elementwise_affine": True,
            "use_gk": True,
            "use_gv": False,
        },
        ignored=IGNORED,
        to_ours=_gla,
        to_published=_published_gla,
        pieces=model_pieces(_gla_pieces),
    ),
    Layout(
        model_type="hgrn2",
        architecture="HGRN2ForCausalLM",
        defaults={**BACKBONE, "num_heads": None, "expand_ratio": 128, "use_lower_bound": True},
        required={**REQUIRED, "use_short_conv": False, "elementwise_affine": True},
        ignored=IGNORED | {"conv_size", "fuse_norm"},
        to_ours=_hgrn2,
        to_published=_published_hgrn2,
        pieces=_hgrn2_model_pieces,
    ),
    Layout(
        model_type="retnet",
        architecture="RetNetForCausalLM",
        defaults={
            **BACKBONE,
            "hidden_ratio": 2,
            "expand_k": 1.0,
            "expand_v": 2.0,
            "num_heads": 8,
            "num_kv_heads": None,
            "use_output_gate": True,
            "fuse_norm": True,
        },
        required={
            **REQUIRED,
            "feature_map": None,
            "use_short_conv": False,
            "elementwise_affine": True,
        },
        ignored=IGNORED | {"conv_size"},
        to_ours=_retnet,
        to_published=_published_retnet,
        pieces=model_pieces(_retnet_pieces),
    ),
)
