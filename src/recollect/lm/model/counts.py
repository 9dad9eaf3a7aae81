"""Parameter counts of a model in closed form."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from recollect.blocks.compositions import ResidualMemory
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.fields import Gate, Param
from recollect.layer.gates import GATE_RANK, range_map
from recollect.layer.options import LayerOptions
from recollect.layer.ties import RULES_WITH_OWN_VALUE
from recollect.layer.token_shift import RANK as SHIFT_RANK
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.messages import argument_name
from recollect.recipe.recipe import Recipe

__all__ = ["count_parameters", "match_parameters", "parameter_count"]


def count_parameters(config: RecollectConfig) -> dict[str, int]:
    """Trained numbers of a model by part, in closed form; nothing is built.

    With vocabulary W, width D, L layers, MLP width M, H query heads, N memories, n associations per
    token, and key and value sizes K and V:

    ===========  =============================================================================
    embedding    W D, and as much again for an output that does not read it
    norms        D (L + 1) and D per MLP, 2 D per gate of a composition
    mlp          3 D M for every layer that one follows
    maps         D (H K + N n (K + V)) for q, k, v, and 2 H V D for the output and its gate
    convolution  w (H K + N n (K + V)) for width w
    gates        for each gate of s numbers: N s, and D N s or, through rank r, r (D + N s)
    other        the output norm's V, initial memories, params, shifts, phases, skips, ties, D per
                 persistent token
    ===========  =============================================================================

    Feed-forward memories with m pairs have 2 m D, D² for the matrix that joins several heads, and m
    or m / block further keys of D.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> parts = rc.lm.count_parameters(config)
        >>> parts["embedding"], parts["norms"]
        (1024, 48)
    """
    D, L, followed = config.hidden_size, config.num_hidden_layers, sum(config.followed)
    total = {
        "embedding": config.vocab_size * D * (1 if config.tie_word_embeddings else 2),
        "norms": D * (L + followed + 1),
        "mlp": 3 * D * config.intermediate_size * followed,
    }
    by_name = {name: _mixer(config, config.mixer(name)) for name in set(config.pattern)}
    for name in config.pattern:
        for part, count in by_name[name].items():
            total[part] = total.get(part, 0) + count
    return {part: count for part, count in total.items() if count}


def _mixer(config: RecollectConfig, mixer: Mixer) -> dict[str, int]:
    """A layer's numbers by part: those of its recipes, and of what composes them."""
    if isinstance(mixer, RecipeMixer):
        return _layer(config, mixer.recipe, mixer.options)
    total = Counter[str](mixer.own_parameters(config.hidden_size))
    for name, child in mixer.children.items():
        if isinstance(mixer, ResidualMemory) and name == "second":
            first = mixer.first
            assert isinstance(first, RecipeMixer) and isinstance(child, RecipeMixer)
            options = replace(child.options, key_dim=first.options.key_dim)
            total.update(_learned(config, child.recipe, options, without=mixer.share))
        else:
            total.update(_mixer(config, child))
    return dict(total)


def _layer(config: RecollectConfig, recipe: Recipe, options: LayerOptions) -> dict[str, int]:
    D, heads = config.hidden_size, config.num_attention_heads
    if options.persistent:
        return _feed_forward(D, heads, recipe, options)
    N = config.num_key_value_heads
    K = config.head_dim or options.key_dim or D // heads
    V = config.value_dim or config.head_dim or D // heads
    streams = {"q": heads * K, "k": N * recipe.associations_per_token * K}
    streams["v"] = N * recipe.associations_per_token * V
    key_tie = next((tie for tie in options.ties if tie.target == "k"), None)
    if options.qk == "ones":
        streams["q"] = streams["k"] = 0
    elif key_tie is not None and key_tie.rule == "complement":
        streams["k"] = 0
    qkv, width = sum(streams.values()), heads * V
    gated = options.output_gate == "silu"
    counts = _learned(config, recipe, options)
    counts |= {
        "maps": D * qkv + width * D * (2 if gated else 1),
        "convolution": (options.conv_size or 0) * qkv,
        "other": counts["other"] + (V if options.output_norm == "rms" else 0),
    }
    if options.complex_decay != "none":
        size = V if recipe.memory.is_elementwise else K
        counts["other"] += N * (size // 2) * (1 + (D if options.complex_decay == "input" else 0))
    if options.token_shift != "none":
        numbers = _numbers(recipe, options, D=D, N=N, K=K, V=V)
        made = sum(from_input for _, from_input in numbers)
        n = sum(1 for size in streams.values() if size) + made + gated
        rank = min(SHIFT_RANK, D)
        counts["other"] += n * D + (D + 2 * n * D * rank if options.token_shift == "input" else 0)
    if options.value_skip:
        counts["other"] += N * V
    return counts


def _learned(
    config: RecollectConfig, recipe: Recipe, options: LayerOptions, without: Sequence[str] = ()
) -> dict[str, int]:
    """What belongs to the recipe itself: its gates and params, ties, and the initial memory."""
    D, heads = config.hidden_size, config.num_attention_heads
    N = config.num_key_value_heads
    K = config.head_dim or options.key_dim or D // heads
    V = config.value_dim or config.head_dim or D // heads
    numbers = _numbers(recipe, options, D=D, N=N, K=K, V=V, without=without)
    counts = {"gates": sum(count for count, _ in numbers)}
    counts["other"] = sum(N * K for tie in options.ties if tie.rule in ("blend", "direction"))
    if recipe.learns_init:
        shapes = recipe.shapes(K, V)
        if recipe.uses_kernel_rows:
            shapes = recipe.init_shapes(K, V, pairs=options.num_anchors)
        counts["other"] += N * sum(math.prod(shape) for shape in shapes)
    return counts


def _numbers(
    recipe: Recipe,
    options: LayerOptions,
    *,
    D: int,
    N: int,
    K: int,
    V: int,
    without: Sequence[str] = (),
) -> Iterator[tuple[int, bool]]:
    """Of every gate and param that a layer makes: trained numbers, and whether tokens make it."""
    rules = {tie.target: tie.rule for tie in options.ties}
    axes = recipe.axes(K, V)
    for item in (*recipe.gates(), *recipe.params()):
        rule = rules.get(item.name)
        if (rule is not None and rule not in RULES_WITH_OWN_VALUE) or item.name in without:
            continue
        own = options.gate(item.name)
        if isinstance(item, Gate):
            default_source, several = "input", recipe.per_association(item)
        else:
            default_source, several = "learned" if item.learned else "constant", False
        source = "learned" if rule == "rate" else own.source or default_source
        halves = _paired(item, recipe, options)
        inner = [max(1, axes[axis] // 2) if halves else axes[axis] for axis in item.axes]
        size = N * math.prod(inner) * (recipe.associations_per_token if several else 1)
        key = range_map(item, own).kind == "identity" and item.axes[-1:] == ("K",)
        count = 0
        if source == "learned" or (source == "input" and not key):
            count += size
        if source == "input":
            rank = own.rank
            if rank is None:
                rank = GATE_RANK if inner and "c" not in item.axes and not key else 0
            low = 0 < rank < min(D, size)
            count += rank * (D + size) if low else D * size
        yield count, source == "input"


def _paired(item: Gate | Param, recipe: Recipe, options: LayerOptions) -> bool:
    """Whether the real and imaginary channels of a phase share this number."""
    if options.complex_decay == "none":
        return False
    if recipe.memory.is_elementwise:
        return item.axes in (("F",), ("V",))
    return item.axes == ("F",) and item.role == "decay"


def _feed_forward(D: int, heads: int, recipe: Recipe, options: LayerOptions) -> dict[str, int]:
    heads = 1 if options.joined else heads
    block = max((part.block for part in recipe.context.restrictions), default=1)
    m = -(-max(1, round(options.persistent * D)) // block) * block
    keys = sum(
        m // (block if gate.name == "router" else 1)
        for gate in recipe.gates()
        if gate.per_association
    )
    return {"maps": (2 * m + keys) * D + (D * D if heads > 1 else 0)}


STEP = 8  # MLP widths stay multiples of this


def parameter_count(config: RecollectConfig) -> int:
    """Trained numbers of a model of this configuration, tied ones once; nothing is allocated.

    Raises:
        ValueError: sizes whose product is no size.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = rc.lm.RecollectForCausalLM(config)
        >>> rc.lm.parameter_count(config) == sum(p.numel() for p in model.parameters())
        True
    """
    try:
        with torch.device("meta"):
            model = RecollectForCausalLM(config)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
        size_text = " and ".join(f"{argument_name(name)} = {x:,}" for name, x in sizes.items() if x)
        raise ValueError(
            f"{size_text} ask for a matrix of more bytes than 64 bits can count: take smaller ones"
        ) from None
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def match_parameters(configs: Sequence[RecollectConfig], target: int) -> list[RecollectConfig]:
    """Copies whose MLP widths bring each model as near to ``target`` parameters as they can.

    Widths are multiples of 8, so counts agree to within 12 · hidden_size · num_hidden_layers.

    Args:
        configs: one per model; they are left as they are.
        target: trained numbers to come near to.

    Raises:
        ValueError: a model that has more parameters than ``target`` even with the narrowest MLP.

    Examples:
        >>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> configs = [rc.lm.RecollectConfig.from_recipes(n, **sizes) for n in ("delta_net", "gla")]
        >>> matched = rc.lm.match_parameters(configs, 20_000)
        >>> [abs(rc.lm.parameter_count(config) - 20_000) < 12 * 16 for config in matched]
        [True, True]
    """
    matched: list[RecollectConfig] = []
    for config in configs:
        config = copy.deepcopy(config)
        config.intermediate_size = STEP
        least = parameter_count(config)
        step = 3 * STEP * config.hidden_size * max(1, sum(config.followed))
        if target < least - step // 2:
            raise ValueError(
                f"{', '.join(config.layers)}: {least:,} parameters with the narrowest MLP are more "
                f"than the {target:,} asked for; raise {argument_name('target')} or lower "
                f"{argument_name('hidden_size')}"
            )
        config.intermediate_size = STEP * (1 + round((target - least) / step))
        matched.append(config)
    return matched
