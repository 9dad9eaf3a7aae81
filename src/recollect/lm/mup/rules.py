"""Rules for width (muP): learning rate and initial scale of every parameter, by its role.

With m = width / base width, σ₀ the initial deviation at the base width, and Adam or AdamW (Yang and
Hu et al. 2022, Tensor Programs V, table 3):

=========  =================  ======================  ============================
role       learning rate      initial deviation       weight decay (decoupled)
=========  =================  ======================  ============================
input      η                  σ₀                      λ
hidden     η / m              σ₀ / √m                 λ m
output     η / m              σ₀ / m                  λ m
=========  =================  ======================  ============================

The decay per step, ηλ, does not depend on the width. At the base width the rules change nothing. A
tied embedding is an input, so the rule of the output is applied in the forward pass:
``config.logit_scale`` = 1 / m. See docs/design/width.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import meta_model
from recollect.lm.mup.roles import Role, roles, uses_default_init
from recollect.messages import RecipeError

__all__ = [
    "BASE_WIDTH",
    "Rule",
    "check_logit_scale",
    "lr_scales",
    "scale_for_width",
    "split_groups_by_lr",
    "width_rules",
    "width_rules_for",
]

BASE_WIDTH = 256
"""Default base width: the default width of a plan."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Factors of a parameter's learning rate and initial weights.

    Attributes:
        role: ``"input"``, ``"hidden"`` or ``"output"``, see `recollect.lm.mup.roles`.
        rate: factor of the learning rate, > 0; the factor of the weight decay is its inverse.
        start: factor of the initial weights that the model draws at its own width, > 0.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gla", vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        ... )
        >>> rules = rc.lm.width_rules(config, base_width=64)  # no change at the base width
        >>> {(rule.rate, rule.start) for rule in rules.values()}
        {(1.0, 1.0)}
    """

    role: Role
    rate: float
    start: float


def width_rules(config: RecollectConfig, base_width: int = BASE_WIDTH) -> dict[str, Rule]:
    """Return the rule of every parameter of a model, by name.

    Args:
        config: configuration of the model.
        base_width: width at which all factors of the learning rate are 1, ≥ 1.

    Raises:
        RecipeError: the rules do not cover the model, see `recollect.lm.mup.roles.roles`.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4,
        ... )
        >>> rules = rc.lm.width_rules(config, base_width=16)
        >>> rules["model.blocks.0.layer.qkv.weight"]
        Rule(role='hidden', rate=0.25, start=1.0)
        >>> rules["model.embed_tokens.weight"]
        Rule(role='input', rate=1.0, start=2.0)
        >>> rules["lm_head.weight"]
        Rule(role='output', rate=0.25, start=0.5)
    """
    parameter_roles, m = roles(config, base_width), config.hidden_size / base_width
    default_init = {  # drawn with deviation `initializer_range`; all others with in^(−1/2)
        f"{path}.weight"
        for path, module in meta_model(config).named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    ratio = m**0.5 if uses_default_init(config) else 1.0  # σ₀ over the model's own deviation
    init_scales = {
        True: {"input": ratio, "hidden": ratio * m**-0.5, "output": ratio / m},
        False: {"input": 1.0, "hidden": 1.0, "output": m**-0.5},
    }
    return {
        name: Rule(
            role=role,
            rate=1.0 if role == "input" else 1 / m,
            start=init_scales[name in default_init][role],
        )
        for name, role in parameter_roles.items()
    }


def width_rules_for(model: nn.Module, base_width: int) -> dict[str, Rule]:
    """Return the rule of every parameter of a `RecollectForCausalLM`; others raise RecipeError."""
    config = getattr(model, "config", None)
    rules = width_rules(config, base_width) if isinstance(config, RecollectConfig) else {}
    unknown = next((name for name, _ in model.named_parameters() if name not in rules), None)
    if unknown is not None:
        raise RecipeError(
            "the rules for width cover the parameters of a RecollectForCausalLM, and "
            f"{type(model).__name__} has {unknown}: pass the model itself, before it is wrapped"
        )
    return rules


@torch.no_grad()
def scale_for_width(model: nn.Module, base_width: int = BASE_WIDTH) -> None:
    """Apply the initial scales of a model's width in place, once, before its first step.

    With tied embeddings it also sets ``config.logit_scale``, which is saved with the model.

    Args:
        model: a `RecollectForCausalLM` with fresh weights.
        base_width: width of the base model, ≥ 1.

    Raises:
        RecipeError: the rules do not cover the model.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4,
        ... )
        >>> model = rc.lm.RecollectForCausalLM(config)
        >>> rc.lm.scale_for_width(model, base_width=16)
        >>> groups = rc.lm.parameter_groups(model, lr=3e-3, base_width=16)
        >>> sorted({group["lr"] for group in groups})
        [0.00075, 0.003]
    """
    rules = width_rules_for(model, base_width)
    config = cast(RecollectConfig, model.config)
    for name, weight in model.named_parameters():
        weight.mul_(rules[name].start)
    if config.tie_word_embeddings:
        config.logit_scale = base_width / config.hidden_size


def check_logit_scale(config: RecollectConfig, base_width: int) -> None:
    """Refuse a saved model with tied embeddings that was initialised with another base width."""
    expected = base_width / config.hidden_size
    if config.tie_word_embeddings and abs(config.logit_scale / expected - 1) > 1e-6:
        raise RecipeError(
            f'[optimizer] parametrization = "mup" with base_width = {base_width} needs '
            f"logit_scale = {expected:g} in a model with tied embeddings, and this model has "
            f"{config.logit_scale:g}: use the base_width of its first run, or parametrization = "
            '"standard"'
        )


def lr_scales(model: nn.Module, base_width: int) -> dict[nn.Parameter, float]:
    """Return the factor of the learning rate of every parameter, also of sharded ones."""
    rules = width_rules_for(model, base_width)
    return {weight: rules[name].rate for name, weight in model.named_parameters()}


def split_groups_by_lr(
    groups: Iterable[Mapping[str, Any]], scales: Mapping[nn.Parameter, float]
) -> list[dict[str, Any]]:
    """Split an optimizer's groups by the factors of the learning rate; the factor 1 is first.

    The decay per step, learning rate × weight decay, does not change.
    """
    return [
        {
            **group,
            "params": [p for p in group["params"] if scales[p] == scale],
            "lr": group["lr"] * scale,
            "weight_decay": group["weight_decay"] / scale,
        }
        for group in groups
        for scale in sorted({scales[p] for p in group["params"]}, key=lambda s: (s != 1, -s))
    ]
