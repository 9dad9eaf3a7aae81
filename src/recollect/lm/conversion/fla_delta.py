"""Layouts of flash-linear-attention with the delta rule: DeltaNet, Gated DeltaNet and KDA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
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
from recollect.lm.conversion.layout import NEGATE, Layout, Piece, reshape
from recollect.lm.model.config import RecollectConfig
from recollect.recipe.recipe import Recipe

__all__ = ["DELTA_LAYOUTS"]


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


# -- all layouts --------------------------------------------------------------------------------

_GATED_DELTA_RULE: dict[str, Any] = {
    "num_v_heads": None,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
}

DELTA_LAYOUTS = (
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
)
