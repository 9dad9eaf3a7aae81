"""Parameter counts of a model, from a copy on the meta device, which allocates nothing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from recollect.blocks.routed import Router
from recollect.layer.block import SwiGLU
from recollect.layer.feed_forward import FeedForward
from recollect.layer.short_conv import ShortConvolution
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.messages import argument_name

__all__ = ["count_parameters", "match_parameters", "meta_model", "parameter_count"]

MLP_WIDTH_MULTIPLE = 8


def count_parameters(config: RecollectConfig) -> dict[str, int]:
    """Return the number of trainable parameters of a model by part; nothing is allocated.

    With vocabulary W, width D, L layers, MLP width M, H query heads, N memories, n associations per
    token, and key and value sizes K and V:

    ===========  =============================================================================
    embedding    W D, and as much again for an output that is not tied to it
    norms        D (L + 1) and D per MLP, 2 D per gate of a composition
    mlp          3 D M for every layer that one follows
    maps         D (H K + N n (K + V)) for q, k, v, and 2 H V D for the output and its gate
    convolution  w (H K + N n (K + V)) for width w
    gates        for each gate of size s: N s, and D N s or, through rank r, r (D + N s)
    other        the output norm's V, initial memories, params, shifts, phases, skips, ties, D per
                 persistent token
    ===========  =============================================================================

    Feed-forward memories with m pairs have 2 m D, D² for the matrix that joins several heads, and m
    or m / block further keys of D.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> parts = rc.lm.count_parameters(config)
        >>> parts["embedding"], parts["norms"]  # 32 · 16 twice, 16 (12 + 1) and 16 · 12
        (1024, 400)
    """
    model = meta_model(config)
    modules = dict(model.named_modules())
    total: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            total[_part(name, modules)] += weight.numel()
    return dict(total)


def _part(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the part of `count_parameters` that a parameter belongs to."""
    path = name.split(".")[:-1]
    owners = [modules[".".join(path[:size])] for size in range(1, len(path) + 1)]
    if any(isinstance(owner, SwiGLU) for owner in owners):
        return "mlp"
    if any(isinstance(owner, FeedForward) for owner in owners):
        return "maps"
    if "gates" in path or "params" in path or any(isinstance(x, Router) for x in owners):
        return "gates"
    if isinstance(owners[-1], nn.Embedding) or path == ["lm_head"]:
        return "embedding"
    if isinstance(owners[-1], nn.Linear):
        return "maps"
    if isinstance(owners[-1], ShortConvolution):
        return "convolution"
    # The output norm of a memory, named "norm" within a layer, counts as other.
    is_norm = isinstance(owners[-1], nn.RMSNorm) and ("layer" not in path or path[-1] != "norm")
    return "norms" if is_norm else "other"


def meta_model(config: RecollectConfig) -> RecollectForCausalLM:
    """Return a model on the meta device, which allocates nothing."""
    try:
        with torch.device("meta"):
            return RecollectForCausalLM(config)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
        size_text = " and ".join(f"{argument_name(name)} = {x:,}" for name, x in sizes.items() if x)
        raise ValueError(
            f"{size_text} ask for a matrix of more bytes than 64 bits can count: take smaller ones"
        ) from None


def parameter_count(config: RecollectConfig) -> int:
    """Return the number of trainable parameters, tied ones once; nothing is allocated.

    Raises:
        ValueError: if a matrix would have more bytes than 64 bits can count.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> model = rc.lm.RecollectForCausalLM(config)
        >>> rc.lm.parameter_count(config) == sum(p.numel() for p in model.parameters())
        True
    """
    return sum(count_parameters(config).values())


def match_parameters(configs: Sequence[RecollectConfig], target: int) -> list[RecollectConfig]:
    """Return copies whose MLP widths bring each model closest to ``target`` parameters.

    Widths are multiples of 8, so counts agree to within 12 · hidden_size · num_hidden_layers.

    Args:
        configs: one per model; they are not changed.
        target: number of trainable parameters.

    Raises:
        ValueError: if a model has more parameters than ``target`` even with the narrowest MLP.

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
        config.intermediate_size = MLP_WIDTH_MULTIPLE
        minimum = parameter_count(config)
        step = 3 * MLP_WIDTH_MULTIPLE * config.hidden_size * max(1, sum(config.has_mlp))
        if target < minimum - step // 2:
            raise ValueError(
                f"{', '.join(config.layers)}: {minimum:,} parameters with the narrowest MLP are "
                f"more than the {target:,} asked for; raise {argument_name('target')} or lower "
                f"{argument_name('hidden_size')}"
            )
        config.intermediate_size = MLP_WIDTH_MULTIPLE * (1 + round((target - minimum) / step))
        matched.append(config)
    return matched
