"""Layouts of flash-linear-attention, version 0.6.

All models have the backbone of Llama: an embedding, pre-norm blocks with a SwiGLU MLP, a last norm
and a head. Queries are multiplied by K^(−1/2) there. Here keys are, or the ε of the output norm is
multiplied by K, which the norm makes equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recollect.blocks.mixers import RecipeMixer
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.lm.conversion.layout import NEGATE, TAPS, Layout, Piece, parts, reshape
from recollect.lm.model.config import RecollectConfig
from recollect.recipe.recipe import Recipe

__all__ = ["FLA_LAYOUTS"]

Options = Mapping[str, Any]

_BACKBONE: dict[str, Any] = {
    "hidden_size": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "num_hidden_layers": 24,
    "norm_eps": 1e-6,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SAME_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "use_cache"),
    *("tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Options of the backbone that have the same name and meaning here."""

_REQUIRED: dict[str, Any] = {"hidden_act": "swish", "attn": None, "attnres_block_size": None}
_IGNORED = frozenset(
    {"attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_swiglu", "use_l2warp"}
    | {"max_position_embeddings"}
)

# -- backbone --------------------------------------------------------------------------------------


def _config(
    options: Options,
    recipe: Recipe,
    layer_options: LayerOptions,
    *,
    head_dim: int,
    value_dim: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> RecollectConfig:
    """Return our configuration with one recipe in all layers."""
    width = options["intermediate_size"]
    if width is None:
        ratio = 4 if options["hidden_ratio"] is None else options["hidden_ratio"]
        width = 256 * -(-int(options["hidden_size"] * ratio * 2 / 3) // 256)
    sizes = {name: options[name] for name in _SAME_NAMES}
    return RecollectConfig.from_recipes(
        {"memory": (recipe, layer_options)},
        **{**sizes, "intermediate_size": width},
        num_attention_heads=num_heads or options["num_heads"],
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        rms_norm_eps=options["norm_eps"],
    )


def _backbone_options(config: RecollectConfig) -> dict[str, Any]:
    """Return the options of the backbone of a model of ours."""
    return {
        **{name: getattr(config, name) for name in _SAME_NAMES},
        "norm_eps": config.rms_norm_eps,
        "num_heads": config.num_attention_heads,
    }


def _layer_options(config: RecollectConfig) -> LayerOptions:
    """Return the options of the first layer."""
    mixer, _ = config.layer_specs[0]
    return mixer.options if isinstance(mixer, RecipeMixer) else LayerOptions()


def _dims(config: RecollectConfig) -> tuple[int, int]:
    """Return K and V."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return head_dim, config.value_dim or head_dim


def _pieces(
    layer: Callable[[Options, RecollectConfig], Iterator[Piece]],
) -> Callable[[Options, RecollectConfig], Iterator[Piece]]:
    """Return the pieces of a model from those of the sequence layer in a block."""

    def pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
        yield Piece("model.embeddings.weight", "model.embed_tokens.weight")
        width = config.intermediate_size
        for index in range(config.num_hidden_layers):
            block, our_block = f"model.layers.{index}.", f"model.blocks.{index}."
            for piece in layer(options, config):
                yield piece.within(f"{block}attn.", f"{our_block}layer.")
            gate, up = parts("mlp.gate_up.weight", [width, width])
            for piece in (
                Piece("attn_norm.weight", "memory_norm.weight"),
                Piece("mlp_norm.weight", "mlp_norm.weight"),
                Piece("mlp.gate_proj.weight", gate),
                Piece("mlp.up_proj.weight", up),
                Piece("mlp.down_proj.weight", "mlp.down.weight"),
            ):
                yield piece.within(block, our_block)
        yield Piece("model.norm.weight", "model.norm.weight")
        if not config.tie_word_embeddings:
            yield Piece("lm_head.weight", "lm_head.weight")

    return pieces


def _projections(config: RecollectConfig, *, conv: bool) -> Iterator[Piece]:
    """Yield the pieces of the projections of q, k, v and y, and of the convolutions."""
    K, V = _dims(config)
    group_size = _layer_options(config).key_group_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [heads // group_size * K, kv_heads // group_size * K, kv_heads * V]
    for name, part in zip("qkv", parts("qkv.weight", sizes), strict=True):
        yield Piece(f"{name}_proj.weight", part)
    if conv:
        for name, part in zip("qkv", parts("conv.weight", sizes, dim=1), strict=True):
            yield Piece(f"{name}_conv1d.weight", part, (TAPS,))
    yield Piece("o_proj.weight", "out.weight")


def _conv_options(options: Options) -> dict[str, Any]:
    return {"conv_size": options["conv_size"] if options["use_short_conv"] else 0}


def _published_conv(options: LayerOptions) -> dict[str, Any]:
    size = options.conv_size
    return {"use_short_conv": size > 0, "conv_size": size or 4}


def _divide(options: Options, name: str) -> int:
    """Return hidden_size · options[name] per head."""
    size = options["hidden_size"] * options[name] / options["num_heads"]
    if not math.isclose(size, round(size)) or round(size) < 1:
        raise ValueError(
            f"hidden_size · {name} / num_heads is {size:g}, and a head needs a whole number of "
            "channels"
        )
    return round(size)


def _expansion(config: RecollectConfig, size: int) -> float:
    """Return the option that `_divide` maps to a size of heads."""
    return size * config.num_attention_heads / config.hidden_size


def _check_rank(options: Options, rank: int, size: int) -> int:
    """Return the rank of a map to ``size`` numbers, which has to be low here."""
    if rank >= min(size, options["hidden_size"]):
        raise ValueError(
            f"a gate has the rank {rank} and maps {options['hidden_size']} numbers to {size}, and "
            "a rank must be smaller than both"
        )
    return rank


def _scaled_eps(options: Options, K: int) -> float:
    """Return the ε of a norm of outputs that are √K times as large."""
    return options["norm_eps"] * K


# -- gated linear attention ------------------------------------------------------------------------


def _gla(options: Options) -> RecollectConfig:
    recipe = Recipe(
        bias=DotProduct(), retention=Decay(per="key"), algorithm=GradientDescent(lr=1.0)
    )
    K, kv_heads = _divide(options, "expand_k"), options["num_kv_heads"]
    rank = _check_rank(options, 16, (kv_heads or options["num_heads"]) * K)
    layer = LayerOptions(
        **_conv_options(options),
        conv_activation="silu" if options["use_short_conv"] else "none",
        qk_norm="scaled",
        norm_eps=options["norm_eps"],
        output_gate="silu" if options["use_output_gate"] else "none",
        gate_options={"log_decay": GateOptions(temperature=16.0, rank=rank)},
    )
    return _config(
        options,
        recipe,
        layer,
        head_dim=K,
        value_dim=_divide(options, "expand_v"),
        num_kv_heads=kv_heads,
    )


def _published_gla(config: RecollectConfig) -> dict[str, Any]:
    layer, (K, V) = _layer_options(config), _dims(config)
    kv_heads = config.num_key_value_heads
    return {
        **_backbone_options(config),
        **_published_conv(layer),
        "expand_k": _expansion(config, K),
        "expand_v": _expansion(config, V),
        "num_kv_heads": None if kv_heads == config.num_attention_heads else kv_heads,
        "use_output_gate": layer.output_gate != "none",
    }


def _gla_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from _projections(config, conv=options["use_short_conv"])
    yield from _gated_norm(options)
    shape = config.num_key_value_heads, _dims(config)[0]
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
    K = _divide(options, "expand_k")
    layer = LayerOptions(
        **_conv_options(options),
        qk_norm_eps=1e-6,
        norm_eps=_scaled_eps(options, K),
        output_gate="silu" if options["use_gate"] else "none",
        gate_options={"lr": _rate(options)},
    )
    return _config(options, Recipe(), layer, head_dim=K, value_dim=_divide(options, "expand_v"))


def _published_delta_net(config: RecollectConfig) -> dict[str, Any]:
    layer, (K, V) = _layer_options(config), _dims(config)
    return {
        **_backbone_options(config),
        **_published_conv(layer),
        **_published_rate(layer),
        "expand_k": _expansion(config, K),
        "expand_v": _expansion(config, V),
        "use_gate": layer.output_gate != "none",
    }


def _delta_net_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from _projections(config, conv=options["use_short_conv"])
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
    if not math.isclose(V, round(V)) or round(V) < 1:
        raise ValueError(f"head_dim · expand_v is {V:g}, and a head needs a whole number")
    if value_heads % heads:
        raise ValueError(f"num_v_heads is {value_heads}, and num_heads, {heads}, must divide it")
    return K, round(V), value_heads


def _published_sizes(config: RecollectConfig) -> dict[str, Any]:
    (K, V), value_heads = _dims(config), config.num_attention_heads
    heads = value_heads // _layer_options(config).key_group_size
    return {
        "head_dim": K,
        "expand_v": V / K,
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
        **_conv_options(options),
        qk_norm_eps=1e-6,
        key_group_size=heads // options["num_heads"],
        norm_eps=_scaled_eps(options, K),
        output_gate=activation[name] if options["use_gate"] else "none",
        gate_options={
            "lr": _rate(options),
            "log_decay": GateOptions(activation="logsigmoid"),
            "decay_scale": _DECAY_SCALE,
        },
    )
    recipe = Recipe(retention=Decay(when="before", alpha="input_scaled"))
    return _config(options, recipe, layer, head_dim=K, value_dim=V, num_heads=heads)


def _published_gated_deltanet(config: RecollectConfig) -> dict[str, Any]:
    layer = _layer_options(config)
    return {
        **_backbone_options(config),
        **_published_sizes(config),
        **_published_conv(layer),
        **_published_rate(layer),
        "use_gate": layer.output_gate != "none",
        "output_gate_activation": "sigmoid" if layer.output_gate == "sigmoid" else "swish",
    }


def _gated_deltanet_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from _projections(config, conv=options["use_short_conv"])
    yield from _delta_rule_output(options)
    # softplus(z) = −logsigmoid(−z)
    yield Piece("a_proj.weight", "gates.log_decay.weight", (NEGATE,))
    yield Piece("dt_bias", "gates.log_decay.bias", (NEGATE,))
    yield Piece("A_log", "params.decay_scale.bias")


def _kda(options: Options) -> RecollectConfig:
    K, V, heads = _sizes(options)
    rank = _check_rank(options, V, heads * min(K, V))
    layer = LayerOptions(
        **_conv_options(options),
        qk_norm_eps=1e-6,
        key_group_size=heads // options["num_heads"],
        norm_eps=_scaled_eps(options, K),
        output_gate="sigmoid",
        output_gate_rank=rank,
        gate_options={
            "lr": _rate(options),
            "log_decay": GateOptions(activation="logsigmoid", rank=rank),
            "decay_scale": _DECAY_SCALE,
        },
    )
    recipe = Recipe(retention=Decay(per="key", when="before", alpha="input_scaled"))
    return _config(options, recipe, layer, head_dim=K, value_dim=V, num_heads=heads)


def _published_kda(config: RecollectConfig) -> dict[str, Any]:
    layer = _layer_options(config)
    return {
        **_backbone_options(config),
        **_published_sizes(config),
        **_published_conv(layer),
        **_published_rate(layer),
    }


def _kda_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    shape = config.num_attention_heads, _dims(config)[0]
    yield from _projections(config, conv=options["use_short_conv"])
    yield Piece("b_proj.weight", "gates.lr.weight")
    yield Piece("o_norm.weight", "norm.weight")
    yield Piece("g_proj.0.weight", "output_gate_down.weight")
    yield Piece("g_proj.1.weight", "output_gate.weight")
    yield Piece("g_proj.1.bias", "output_gate.bias")
    yield Piece("f_proj.0.weight", "gates.log_decay.down")
    yield Piece("f_proj.1.weight", "gates.log_decay.weight", (NEGATE,))
    yield Piece("dt_bias", "gates.log_decay.bias", (NEGATE, reshape((-1,), shape)))
    yield Piece("A_log", "params.decay_scale.bias", (reshape((-1,), (shape[0], 1)),))


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
    return _config(
        options,
        recipe,
        layer,
        head_dim=_divide(options, "expand_k"),
        value_dim=_divide(options, "expand_v"),
    )


def _published_retnet(config: RecollectConfig) -> dict[str, Any]:
    layer, (K, V) = _layer_options(config), _dims(config)
    return {
        **_backbone_options(config),
        "expand_k": _expansion(config, K),
        "expand_v": _expansion(config, V),
        "use_output_gate": layer.output_gate != "none",
    }


def _retnet_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from _projections(config, conv=False)
    yield from _gated_norm(options)


# -- linear attention with keys that complement decays ---------------------------------------------


def _hgrn2(options: Options) -> RecollectConfig:
    width, K = options["hidden_size"], options["expand_ratio"]
    if width % K:
        raise ValueError(f"hidden_size is {width}, and expand_ratio, {K}, must divide it")
    heads = width // K
    recipe = Recipe(
        bias=DotProduct(), retention=Decay(per="key"), algorithm=GradientDescent(lr=1.0)
    )
    layer = LayerOptions(
        conv_size=0,
        conv_activation_on="q",
        qk_norm="scaled",
        norm_eps=1e-5,  # whatever norm_eps is: the layer leaves this argument out
        norm_group_size=heads,
        output_gate="none",
        gate_options={
            "log_decay": GateOptions(
                activation="logsigmoid",
                rank=0,
                bias=False,
                depth_floor=options["use_lower_bound"],
            )
        },
        ties=(Tie(target="k", source="log_decay", rule="complement"),),
    )
    return _config(options, recipe, layer, head_dim=K, value_dim=K, num_heads=heads)


def _published_hgrn2(config: RecollectConfig) -> dict[str, Any]:
    return {
        **_backbone_options(config),
        "expand_ratio": _dims(config)[0],
        "use_lower_bound": _layer_options(config).gate("log_decay").depth_floor,
    }


def _hgrn2_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    heads, (K, V) = config.num_attention_heads, _dims(config)
    query, value = parts("qkv.weight", [heads * K, heads * V])
    yield Piece("q_proj.weight", query)
    yield Piece("i_proj.weight", value)
    yield Piece("f_proj.weight", "gates.log_decay.weight")
    yield Piece("g_norm.weight", "norm.weight", (reshape((-1,), (heads, V)),))
    yield Piece("o_proj.weight", "out.weight")


def _hgrn2_model_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield from _pieces(_hgrn2_pieces)(options, config)
    if options["use_lower_bound"]:
        layers, shape = config.num_hidden_layers, (config.num_attention_heads, _dims(config)[0])
        transforms = (reshape((layers, -1), (layers, *shape)),)
        yield Piece("model.lower_bounds", "model.decay_floors.weight", transforms)


# -- all layouts -----------------------------------------------------------------------------------

_GATED_DELTA_RULE: dict[str, Any] = {
    "num_v_heads": None,
    "use_short_conv": True,
    "conv_size": 4,
    "allow_neg_eigval": False,
}

FLA_LAYOUTS = (
    Layout(
        model_type="gla",
        architecture="GLAForCausalLM",
        defaults={
            **_BACKBONE,
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
            **_REQUIRED,
            "feature_map": None,
            "clamp_min": None,
            "elementwise_affine": True,
            "use_gk": True,
            "use_gv": False,
        },
        ignored=_IGNORED,
        to_ours=_gla,
        to_published=_published_gla,
        pieces=_pieces(_gla_pieces),
    ),
    Layout(
        model_type="delta_net",
        architecture="DeltaNetForCausalLM",
        defaults={
            **_BACKBONE,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "num_heads": 16,
            "use_gate": False,
            "use_short_conv": True,
            "conv_size": 4,
            "allow_neg_eigval": False,
        },
        required={
            **_REQUIRED,
            "use_beta": True,
            "use_output_norm": True,
            "qk_norm": "l2",
            "qk_activation": "silu",
        },
        ignored=_IGNORED | {"fuse_norm"},
        to_ours=_delta_net,
        to_published=_published_delta_net,
        pieces=_pieces(_delta_net_pieces),
    ),
    Layout(
        model_type="gated_deltanet",
        architecture="GatedDeltaNetForCausalLM",
        defaults={
            **_BACKBONE,
            **_GATED_DELTA_RULE,
            "num_hidden_layers": 21,
            "expand_v": 2.0,
            "head_dim": 256,
            "num_heads": 6,
            "use_gate": True,
            "output_gate_activation": "swish",
        },
        required=_REQUIRED,
        ignored=_IGNORED | {"fuse_norm"},
        to_ours=_gated_deltanet,
        to_published=_published_gated_deltanet,
        pieces=_pieces(_gated_deltanet_pieces),
    ),
    Layout(
        model_type="kda",
        architecture="KDAForCausalLM",
        defaults={
            **_BACKBONE,
            **_GATED_DELTA_RULE,
            "expand_v": 1.0,
            "head_dim": 128,
            "num_heads": 16,
        },
        required={**_REQUIRED, "safe_gate": False, "lower_bound": None},
        ignored=_IGNORED | {"fuse_norm"},
        to_ours=_kda,
        to_published=_published_kda,
        pieces=_pieces(_kda_pieces),
    ),
    Layout(
        model_type="hgrn2",
        architecture="HGRN2ForCausalLM",
        defaults={
            **_BACKBONE,
            "num_heads": None,
            "expand_ratio": 128,
            "use_lower_bound": True,
        },
        required={
            **_REQUIRED,
            "use_short_conv": False,
            "elementwise_affine": True,
        },
        ignored=_IGNORED | {"conv_size", "fuse_norm"},
        to_ours=_hgrn2,
        to_published=_published_hgrn2,
        pieces=_hgrn2_model_pieces,
    ),
    Layout(
        model_type="retnet",
        architecture="RetNetForCausalLM",
        defaults={
            **_BACKBONE,
            "hidden_ratio": 2,
            "expand_k": 1.0,
            "expand_v": 2.0,
            "num_heads": 8,
            "num_kv_heads": None,
            "use_output_gate": True,
            "fuse_norm": True,
        },
        required={
            **_REQUIRED,
            "feature_map": None,
            "use_short_conv": False,
            "elementwise_affine": True,
        },
        ignored=_IGNORED | {"conv_size"},
        to_ours=_retnet,
        to_published=_published_retnet,
        pieces=_pieces(_retnet_pieces),
    ),
)
