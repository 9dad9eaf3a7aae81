"""The backbone of the layouts of flash-linear-attention, version 0.6.

All models have the backbone of Llama: an embedding, pre-norm blocks with a SwiGLU MLP, a last norm
and a head. Queries are multiplied by K^(−1/2) there. Here keys are, or the ε of the output norm is
multiplied by K, which the norm makes equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from recollect.blocks.mixers import RecipeMixer
from recollect.layer.options import LayerOptions
from recollect.lm.conversion.layout import TAPS, Piece, gated_mlp_pieces, parts
from recollect.lm.model.config import RecollectConfig
from recollect.recipe.recipe import Recipe

__all__ = [
    "BACKBONE",
    "IGNORED",
    "REQUIRED",
    "Options",
    "backbone_options",
    "check_rank",
    "conv_options",
    "expansion",
    "factor_of",
    "first_layer_options",
    "head_sizes",
    "make_config",
    "model_pieces",
    "projections",
    "published_conv",
    "size_per_head",
]

Options = Mapping[str, Any]

BACKBONE: dict[str, Any] = {
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

REQUIRED: dict[str, Any] = {"hidden_act": "swish", "attn": None, "attnres_block_size": None}
IGNORED = frozenset(
    {"attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_swiglu", "use_l2warp"}
    | {"max_position_embeddings"}
)


def make_config(
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


def backbone_options(config: RecollectConfig) -> dict[str, Any]:
    """Return the options of the backbone of a model of ours."""
    return {
        **{name: getattr(config, name) for name in _SAME_NAMES},
        "norm_eps": config.rms_norm_eps,
        "num_heads": config.num_attention_heads,
    }


def first_layer_options(config: RecollectConfig) -> LayerOptions:
    """Return the options of the first layer."""
    mixer, _ = config.layer_specs[0]
    return mixer.options if isinstance(mixer, RecipeMixer) else LayerOptions()


def head_sizes(config: RecollectConfig) -> tuple[int, int]:
    """Return K and V."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return head_dim, config.value_dim or head_dim


def model_pieces(
    layer: Callable[[Options, RecollectConfig], Iterator[Piece]],
) -> Callable[[Options, RecollectConfig], Iterator[Piece]]:
    """Return the pieces of a model from those of the sequence layer in a block."""

    def pieces(options: Options, config: RecollectConfig) -> Iterator[Piece]:
        yield Piece("model.embeddings.weight", "model.embed_tokens.weight")
        for index in range(config.num_hidden_layers):
            block, our_block = f"model.layers.{index}.", f"model.blocks.{index}."
            for piece in layer(options, config):
                yield piece.within(f"{block}attn.", f"{our_block}layer.")
            for piece in (
                Piece("attn_norm.weight", "memory_norm.weight"),
                Piece("mlp_norm.weight", "mlp_norm.weight"),
                *gated_mlp_pieces(config),
            ):
                yield piece.within(block, our_block)
        yield Piece("model.norm.weight", "model.norm.weight")
        if not config.tie_word_embeddings:
            yield Piece("lm_head.weight", "lm_head.weight")

    return pieces


def projections(config: RecollectConfig, *, conv: bool) -> Iterator[Piece]:
    """Yield the pieces of the projections of q, k, v and y, and of the convolutions."""
    K, V = head_sizes(config)
    group_size = first_layer_options(config).key_group_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [heads // group_size * K, kv_heads // group_size * K, kv_heads * V]
    for name, part in zip("qkv", parts("qkv.weight", sizes), strict=True):
        yield Piece(f"{name}_proj.weight", part)
    if conv:
        for name, part in zip("qkv", parts("conv.weight", sizes, dim=1), strict=True):
            yield Piece(f"{name}_conv1d.weight", part, (TAPS,))
    yield Piece("o_proj.weight", "out.weight")


def conv_options(options: Options) -> dict[str, Any]:
    """Return the layer options of the convolution."""
    return {"conv_size": options["conv_size"] if options["use_short_conv"] else 0}


def published_conv(options: LayerOptions) -> dict[str, Any]:
    """Return the published options of the convolution."""
    size = options.conv_size
    return {"use_short_conv": size > 0, "conv_size": size or 4}


def size_per_head(options: Options, name: str) -> int:
    """Return the integer part of hidden_size · options[name], per head."""
    size, heads = options["hidden_size"] * options[name], options["num_heads"]
    if not heads <= size < math.inf or int(size) % heads:
        raise ValueError(
            f"hidden_size · {name} is {size:g}, and num_heads, {heads}, must divide its integer "
            "part"
        )
    return int(size) // heads


def expansion(config: RecollectConfig, size: int) -> float:
    """Return the option that `size_per_head` maps to a size of heads."""
    return factor_of((config.hidden_size, size * config.num_attention_heads))


def factor_of(*products: tuple[int, int]) -> float:
    """Return a number x such that int(n · x) = m for all pairs (n, m) of one ratio."""
    n, m = products[0]
    x = m / n
    while any(int(n * x) < m for n, m in products):  # a quotient that was rounded down
        x = math.nextafter(x, math.inf)
    return x


def check_rank(options: Options, rank: int, size: int) -> int:
    """Return the rank of a map to ``size`` numbers, which has to be low here."""
    if rank >= min(size, options["hidden_size"]):
        raise ValueError(
            f"a gate has the rank {rank} and maps {options['hidden_size']} numbers to {size}, and "
            "a rank must be smaller than both"
        )
    return rank
