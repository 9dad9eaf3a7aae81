"""muP: what the role of a parameter makes of its learning rate and of its initial scale.

With m = width / base width, σ₀ the initial deviation at the base width, and Adam or AdamW (Yang and
Hu et al. 2022, Tensor Programs V, table 3):

=========  =================  ======================  ============================
role       learning rate      initial deviation       weight decay (decoupled)
=========  =================  ======================  ============================
input      η                  σ₀                      λ
hidden     η / m              σ₀ / √m                 λ m
output     η / m              σ₀ / m                  λ m
=========  =================  ======================  ============================

so that what a step takes away, ηλ, is the same everywhere. At the base width, and only there, it is
the standard parametrization. An output that reads the embedding is an input by what it stores, so
the rule for outputs stands in the forward pass: ``config.logit_scale`` = 1 / m. See
docs/design/width.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from recollect.lm.model.config import RecollectConfig
from recollect.lm.width.roles import Role, built, follows_width, roles
from recollect.messages import RecipeError

__all__ = ["BASE_WIDTH", "Rule", "check_tied", "rules_of", "scale_for_width", "width_rules"]

BASE_WIDTH = 256
"""Of the base model, where none is stated: the width of a plan that states none."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a parameter's width asks for.

    Attributes:
        role: ``"input"``, ``"hidden"`` or ``"output"``, see `recollect.lm.width.roles`.
        rate: factor of the learning rate, > 0; its inverse is that of the weight decay.
        start: factor of the initial weights, as the model draws them at its own width, > 0.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gla", vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        ... )
        >>> rules = rc.lm.width_rules(config, base_width=64)  # the width itself: nothing changes
        >>> {(rule.rate, rule.start) for rule in rules.values()}
        {(1.0, 1.0)}
    """

    role: Role
    rate: float
    start: float


def width_rules(config: RecollectConfig, base_width: int = BASE_WIDTH) -> dict[str, Rule]:
    """The rule of every parameter of a model, by name.

    Args:
        config: of the model.
        base_width: the width at which learning rates are what is stated, ≥ 1.

    Raises:
        RecipeError: a model that the rules do not cover, see `recollect.lm.width.roles.roles`.

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
    found, m = roles(config, base_width), config.hidden_size / base_width
    backbone = _of_backbone(config)
    # σ₀ / σ, of what is drawn with one deviation; all else is drawn with in^(−1/2).
    ratio = m**0.5 if follows_width(config) else 1.0
    starts = {
        True: {"input": ratio, "hidden": ratio * m**-0.5, "output": ratio / m},
        False: {"input": 1.0, "hidden": 1.0, "output": m**-0.5},
    }
    return {
        name: Rule(
            role=role,
            rate=1.0 if role == "input" else 1 / m,
            start=starts[name in backbone][role],
        )
        for name, role in found.items()
    }


def rules_of(model: nn.Module, base_width: int) -> dict[str, Rule]:
    """The rule of every parameter that a model has.

    Args:
        model: with fresh or trained weights.
        base_width: of the base model, ≥ 1.

    Raises:
        RecipeError: a model that is no bare `RecollectForCausalLM`, or that the rules do not cover.
    """
    config = getattr(model, "config", None)
    rules = width_rules(config, base_width) if isinstance(config, RecollectConfig) else {}
    other = next((name for name, _ in model.named_parameters() if name not in rules), None)
    if other is not None:
        raise RecipeError(
            f"the rules for width know the parameters of a RecollectForCausalLM, and "
            f"{type(model).__name__} has {other}: give that model itself, before it is wrapped"
        )
    return rules


@torch.no_grad()
def scale_for_width(model: nn.Module, base_width: int = BASE_WIDTH) -> None:
    """Give a new model the initial scales of its width, in place, before its first step.

    Call it once. Of a model whose output reads the embedding it also sets ``config.logit_scale``,
    which is saved with the model.

    Args:
        model: a `RecollectForCausalLM` with fresh weights.
        base_width: of the base model, ≥ 1.

    Raises:
        RecipeError: a model that the rules do not cover.

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
    rules = rules_of(model, base_width)
    config = cast(RecollectConfig, model.config)
    for name, weight in model.named_parameters():
        weight.mul_(rules[name].start)
    if config.tie_word_embeddings:
        config.logit_scale = base_width / config.hidden_size


def check_tied(config: RecollectConfig, base_width: int) -> None:
    """That a model's output, where it reads the embedding, was begun under the rules.

    Args:
        config: of a saved model.
        base_width: of the base model.

    Raises:
        RecipeError: it was not, and no learning rate of the embedding is right for both uses.
    """
    wanted = base_width / config.hidden_size
    if config.tie_word_embeddings and abs(config.logit_scale / wanted - 1) > 1e-6:
        raise RecipeError(
            f'[optimizer] parametrization = "mup" with base_width = {base_width} asks for '
            f"logit_scale = {wanted:g} of a model whose output reads its embedding, and this one "
            f"has {config.logit_scale:g}: take the base_width that it was begun with, or "
            'parametrization = "standard"'
        )


def _of_backbone(config: RecollectConfig) -> set[str]:
    """Weights that begin with deviation ``initializer_range``."""
    return {
        f"{path}.weight"
        for path, module in built(config).named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
