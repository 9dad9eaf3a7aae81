"""Layouts of transformers, version 5.24: Mamba-2, and the text models of Qwen3.5 without experts.

Models of Mamba-2 have the same tensors in flash-linear-attention, and other names of a few options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recollect.blocks.mixers import RecipeMixer
from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.memory.local import LocalConstant
from recollect.choices.retention.base import Decay
from recollect.fields import int_check, validate
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.lm.conversion.layout import (
    NEGATE,
    TAPS,
    Layout,
    Part,
    Piece,
    gated_mlp_pieces,
    parts,
    reshape,
)
from recollect.lm.model.config import MAX_LAYERS, RecollectConfig
from recollect.messages import short_repr
from recollect.recipe.recipe import Recipe

__all__ = ["HUGGINGFACE_LAYOUTS"]

Options = Mapping[str, Any]

_SAME_NAMES = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "use_cache", "tie_word_embeddings"),
    *("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Options that have the same name and meaning here."""

_DECAY_SCALE = GateOptions(activation="exp", per="head")
"""e^A of a log decay −e^A · softplus(z), one per head."""


def _same(source: Any) -> dict[str, Any]:
    """Return the options with the same name here, of options or a configuration of ours."""
    get = source.__getitem__ if isinstance(source, Mapping) else source.__getattribute__
    return {name: get(name) for name in _SAME_NAMES}


def _layers_by_kind(config: RecollectConfig) -> dict[bool, tuple[str, LayerOptions]]:
    """Return name and options of a layer of attention (``True``) and of another one."""
    layers: dict[bool, tuple[str, LayerOptions]] = {}
    for name, (mixer, _) in zip(config.layer_names, config.layer_specs, strict=True):
        if isinstance(mixer, RecipeMixer):
            layers.setdefault(mixer.recipe.nonparametric, (name, mixer.options))
    return layers


def _sizes(config: RecollectConfig, name: str) -> tuple[int, int, int, int]:
    """Return heads, memories, K and V of a layer."""
    sizes = config.sizes_of(name)
    heads = sizes["num_attention_heads"] or 1
    K = sizes["head_dim"] or config.hidden_size // heads
    return heads, sizes["num_key_value_heads"] or heads, K, sizes["value_dim"] or K


# -- Mamba-2 ---------------------------------------------------------------------------------------

_NO_LIMIT = [0.0, {"__float__": "Infinity"}]
"""The range of all step sizes, as transformers writes it."""


def _mamba2_forms(options: Options) -> dict[str, Any]:
    """Return options with one form of each value."""
    limit: Any = options.get("time_step_limit")
    is_list = isinstance(limit, list | tuple)
    if is_list and list(limit) in ([0, float("inf")], _NO_LIMIT):
        return {**options, "time_step_limit": _NO_LIMIT}
    return dict(options)


def _mamba2(options: Options) -> RecollectConfig:
    width, V = options["expand"] * options["hidden_size"], options["head_dim"]
    heads = width // V if options["num_heads"] is None else options["num_heads"]
    if heads * V != width:
        raise ValueError(
            f"expand · hidden_size is {width}, and num_heads · head_dim is {heads} · {V}"
        )
    if heads % options["n_groups"]:
        raise ValueError(f"n_groups is {options['n_groups']}, and it must divide {heads} heads")
    group_size = heads // options["n_groups"]
    layer = LayerOptions(
        conv_size=options["conv_kernel"],
        conv_bias=options["use_conv_bias"],
        qk_norm="none",
        key_group_size=group_size,
        value_skip=True,
        value_skip_per="value" if options["D_has_hdim"] else "head",
        norm_eps=options["layer_norm_epsilon"],
        norm_group_size=group_size,
        norm_before_gate=False,
        gate_options={"lr": GateOptions(activation="softplus"), "decay_scale": _DECAY_SCALE},
        ties=(Tie(target="log_decay", source="lr", rule="negative"),),
    )
    recipe = Recipe(bias=DotProduct(), retention=Decay(alpha="input_scaled"))
    return RecollectConfig.from_recipes(
        {"memory": (recipe, layer)},
        **_same(options),
        num_attention_heads=heads,
        head_dim=options["state_size"],
        value_dim=V,
        intermediate_size=0,
        rms_norm_eps=options["layer_norm_epsilon"],
    )


def _published_mamba2(config: RecollectConfig) -> dict[str, Any]:
    heads, _, K, V = _sizes(config, config.layer_names[0])
    layer = _layers_by_kind(config).get(False, ("", LayerOptions()))[1]
    expand = heads * V / config.hidden_size
    return {
        **_same(config),
        "expand": int(expand) if expand.is_integer() else expand,
        "num_heads": heads,
        "head_dim": V,
        "state_size": K,
        "n_groups": max(1, heads // layer.key_group_size),
        "conv_kernel": max(1, layer.conv_size),
        "use_conv_bias": layer.conv_bias,
        "layer_norm_epsilon": config.rms_norm_eps,
        "D_has_hdim": layer.value_skip_per == "value",
    }


def _mamba2_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    heads, _, K, V = _sizes(config, "memory")
    width, keys = heads * V, options["n_groups"] * K
    sizes = [width, keys, keys, heads]  # v, k, q and Δ, after the gate
    yield Piece("backbone.embeddings.weight", "model.embed_tokens.weight")
    for index in range(config.num_hidden_layers):
        block, our_block = f"backbone.layers.{index}.", f"model.blocks.{index}."
        yield Piece(f"{block}norm.weight", f"{our_block}memory_norm.weight")
        gate, v, k, q, step = parts("in_proj.weight", [width, *sizes])
        convs = [("conv1d.weight", "conv.weight", 1, (TAPS,))]
        convs += [("conv1d.bias", "conv.bias", 0, ())] if options["use_conv_bias"] else []
        qkv = parts("qkv.weight", [keys, keys, width])
        pieces = [Piece(gate, "output_gate.weight"), Piece(step, "gates.lr.weight")]
        pieces += [Piece(*pair) for pair in zip((q, k, v), qkv, strict=True)]
        for name, our_name, dim, transforms in convs:
            theirs = parts(name, sizes[:3])[::-1]
            ours = parts(our_name, [keys, keys, width], dim=dim)
            pieces += [Piece(*pair, transforms) for pair in zip(theirs, ours, strict=True)]
        skip_size = V if options["D_has_hdim"] else 1
        pieces += [
            Piece("dt_bias", "gates.lr.bias"),
            Piece("A_log", "params.decay_scale.bias"),
            Piece("D", "skip", (reshape((-1,), (heads, skip_size)),)),
            Piece("norm.weight", "norm.weight", (reshape((-1,), (heads, V)),)),
            Piece("out_proj.weight", "out.weight"),
        ]
        for piece in pieces:
            yield piece.within(f"{block}mixer.", f"{our_block}layer.")
    yield Piece("backbone.norm_f.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        yield Piece("lm_head.weight", "lm_head.weight")


# -- Qwen3.5 ---------------------------------------------------------------------------------------

_DELTA, _ATTENTION = "linear_attention", "full_attention"
_PARTIAL_ROTARY_FACTOR = 0.25


def _qwen3_5_forms(options: Options) -> dict[str, Any]:
    """Return options with a type for every layer, and the rotations that text depends on."""
    options = dict(options)
    interval, count = options.pop("full_attention_interval", 4), options.get("num_hidden_layers")
    if not options.get("layer_types") and isinstance(count, int):
        count = validate("num_hidden_layers", int_check(1, MAX_LAYERS), count)
        if type(interval) is not int or interval < 1:
            raise ValueError(
                "the option 'full_attention_interval' of qwen3_5_text must be an integer above 0, "
                f"not {short_repr(interval)}"
            )
        options["layer_types"] = [
            _DELTA if (index + 1) % interval else _ATTENTION for index in range(count)
        ]
    rope = options.get("rope_parameters")
    if isinstance(rope, Mapping):  # the sections of images and videos coincide in text
        rope = {name: x for name, x in rope.items() if not name.startswith("mrope_")}
        options["rope_parameters"] = {"partial_rotary_factor": _PARTIAL_ROTARY_FACTOR, **rope}
    return options


def _qwen3_5(options: Options) -> RecollectConfig:
    kinds, eps = options["layer_types"], options["rms_norm_eps"]
    is_known = all(kind in (_DELTA, _ATTENTION) for kind in kinds)
    if len(kinds) != options["num_hidden_layers"] or not is_known:
        raise ValueError(
            f"layer_types must have {options['num_hidden_layers']} names, each {_DELTA!r} or "
            f"{_ATTENTION!r}, not {short_repr(kinds)}"
        )
    K, heads = options["linear_key_head_dim"], options["linear_num_value_heads"]
    if heads % options["linear_num_key_heads"]:
        raise ValueError(
            f"linear_num_value_heads is {heads}, and linear_num_key_heads, "
            f"{options['linear_num_key_heads']}, must divide it"
        )
    delta = LayerOptions(
        conv_size=options["linear_conv_kernel_dim"],
        qk_norm_eps=1e-6,
        key_group_size=heads // options["linear_num_key_heads"],
        norm_eps=eps * K,  # queries are multiplied by K^(−1/2) there
        gate_options={
            "lr": GateOptions(activation="sigmoid", unit="raw", low=0.0, high=1.0, bias=False),
            "log_decay": GateOptions(activation="logsigmoid"),
            "decay_scale": _DECAY_SCALE,
        },
    )
    delta_rule = Recipe(retention=Decay(when="before", alpha="input_scaled"))
    attention = Recipe(memory=LocalConstant(), context=KernelWeighted(), algorithm=Analytic())
    return RecollectConfig.from_recipes(
        {"memory": (delta_rule, delta), "attention": (attention, _attention_options(options))},
        layers=["attention" if kind == _ATTENTION else "memory" for kind in kinds],
        **_same(options),
        num_attention_heads=options["num_attention_heads"],
        num_key_value_heads=options["num_key_value_heads"],
        head_dim=options["head_dim"],
        recipe_sizes={
            "memory": {
                "num_attention_heads": heads,
                "head_dim": K,
                "value_dim": options["linear_value_head_dim"],
            }
        },
        intermediate_size=options["intermediate_size"],
        rms_norm_eps=eps,
        zero_centered_norms=True,
    )


def _attention_options(options: Options) -> LayerOptions:
    rope, K = options["rope_parameters"], options["head_dim"]
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    if rope.get("rope_type", "default") != "default" or rope.keys() - known:
        raise ValueError(
            "rope_parameters must have the rope_type 'default', a rope_theta and a "
            f"partial_rotary_factor, not {short_repr(dict(rope))}"
        )
    factor, theta = rope["partial_rotary_factor"], rope.get("rope_theta", 10000.0)
    for name, value in (("partial_rotary_factor", factor), ("rope_theta", theta)):
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(
                f"{name} of rope_parameters must be a number above 0, not {short_repr(value)}"
            )
    if int(K * factor) % 2 or int(K * factor) < 2:
        raise ValueError(
            f"head_dim · partial_rotary_factor is {K * factor:g}, and rotations need an even number"
        )
    return LayerOptions(
        conv_size=0,
        conv_activation="none",
        qk_norm="rms",
        qk_norm_eps=options["rms_norm_eps"] * K,  # added to a mean of K squares there
        qk_scale="zero_centered",
        rope_theta=theta,
        partial_rotary_factor=factor,
        output_norm="none",
        output_gate="sigmoid",
    )


def _published_qwen3_5(config: RecollectConfig) -> dict[str, Any]:
    layers = _layers_by_kind(config)
    name, delta = layers.get(False, (config.layer_names[0], LayerOptions()))
    heads, _, K, V = _sizes(config, name)
    name, attention = layers.get(True, (name, LayerOptions()))
    query_heads, kv_heads, head_dim, _ = _sizes(config, name)
    types = [
        _ATTENTION if isinstance(mixer, RecipeMixer) and mixer.recipe.nonparametric else _DELTA
        for mixer, _ in config.layer_specs
    ]
    return {
        **_same(config),
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "linear_num_key_heads": max(1, heads // delta.key_group_size),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": K,
        "linear_value_head_dim": V,
        "linear_conv_kernel_dim": max(1, delta.conv_size),
        "layer_types": types,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta or 10000.0,
            "partial_rotary_factor": attention.partial_rotary_factor,
        },
    }


def _qwen3_5_pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
    yield Piece("model.embed_tokens.weight", "model.embed_tokens.weight")
    for index, kind in enumerate(options["layer_types"]):
        block, our_block = f"model.layers.{index}.", f"model.blocks.{index}."
        is_attention = kind == _ATTENTION
        layer = _qwen3_5_attention(options) if is_attention else _qwen3_5_delta(options)
        for piece in layer:
            prefix = "self_attn." if is_attention else "linear_attn."
            yield piece.within(f"{block}{prefix}", f"{our_block}layer.")
        for piece in (
            Piece("input_layernorm.weight", "memory_norm.weight"),
            Piece("post_attention_layernorm.weight", "mlp_norm.weight"),
            *gated_mlp_pieces(config),
        ):
            yield piece.within(block, our_block)
    yield Piece("model.norm.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        yield Piece("lm_head.weight", "lm_head.weight")


def _qwen3_5_delta(options: Options) -> Iterator[Piece]:
    yield Piece("in_proj_qkv.weight", "qkv.weight")
    yield Piece("conv1d.weight", "conv.weight", (TAPS,))
    yield Piece("in_proj_z.weight", "output_gate.weight")
    yield Piece("in_proj_b.weight", "gates.lr.weight")
    # softplus(z) = −logsigmoid(−z)
    yield Piece("in_proj_a.weight", "gates.log_decay.weight", (NEGATE,))
    yield Piece("dt_bias", "gates.log_decay.bias", (NEGATE,))
    yield Piece("A_log", "params.decay_scale.bias")
    yield Piece("norm.weight", "norm.weight")
    yield Piece("out_proj.weight", "out.weight")


def _qwen3_5_attention(options: Options) -> Iterator[Piece]:
    K, heads = options["head_dim"], options["num_attention_heads"]
    # Each head has the rows of its query, then those of its gate.
    rows = parts("q_proj.weight", [K] * 2 * heads)
    for h in range(heads):
        start, stop = h * K, (h + 1) * K
        yield Piece(rows[2 * h], Part(name="qkv.weight", start=start, stop=stop))
        yield Piece(rows[2 * h + 1], Part(name="output_gate.weight", start=start, stop=stop))
    sizes = [heads * K, *[options["num_key_value_heads"] * K] * 2]
    _, k, v = parts("qkv.weight", sizes)
    yield Piece("k_proj.weight", k)
    yield Piece("v_proj.weight", v)
    for name, part in zip("qk", parts("qk_scale.weight", [1, 1]), strict=True):
        yield Piece(f"{name}_norm.weight", part, (reshape((K,), (1, K)),))
    yield Piece("o_proj.weight", "out.weight")


# -- all layouts -----------------------------------------------------------------------------------

HUGGINGFACE_LAYOUTS = (
    Layout(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        defaults={
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 32768,
            "expand": 2,
            "num_heads": None,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "D_has_hdim": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
            "use_cache": True,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        required={
            "hidden_act": "silu",
            "use_bias": False,
            "time_step_limit": _NO_LIMIT,
            "rmsnorm": True,
            "norm_before_gate": False,
        },
        ignored=frozenset(
            {"time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "chunk_size"}
            | {"rescale_prenorm_residual", "residual_in_fp32"}
            | {"dt_min", "dt_max", "dt_init_floor", "conv_init", "A_init_range"}  # of fla
            | {"fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp"}
        ),
        aliases={"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit"},
        normalize=_mamba2_forms,
        to_ours=_mamba2,
        to_published=_published_mamba2,
        pieces=_mamba2_pieces,
    ),
    Layout(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        defaults={
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "vocab_size": 248320,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "layer_types": [],
            "rope_parameters": {"partial_rotary_factor": _PARTIAL_ROTARY_FACTOR},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        required={
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
        },
        ignored=frozenset(
            {"max_position_embeddings", "mamba_ssm_dtype", "mlp_only_layers"}
            | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
        ),
        normalize=_qwen3_5_forms,
        nested_prefix="model.language_model.",
        ignored_prefixes=("mtp.",),  # heads of several tokens, which transformers does not load
        to_ours=_qwen3_5,
        to_published=_published_qwen3_5,
        pieces=_qwen3_5_pieces,
    ),
)
