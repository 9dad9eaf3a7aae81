"""Counting parameters without making them, and bringing models to equal counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recollect.lm.config import RecollectConfig
from recollect.lm.model import RecollectForCausalLM

__all__ = ["match_parameters", "parameter_count"]

STEP = 8  # feed-forward widths stay multiples of this


def parameter_count(config: RecollectConfig) -> int:
    """Trained numbers of the model, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = RecollectForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


def match_parameters(configs: Sequence[RecollectConfig], target: int) -> list[RecollectConfig]:
    """Configurations with their feed-forward widths set so that models come close to ``target``.

    Widths are multiples of 8, so counts agree to within 12 · width · depth numbers.

    Raises:
        ValueError: a model that is larger than ``target`` without any feed-forward block.
    """
    found: list[RecollectConfig] = []
    for config in configs:
        unit = 3 * config.hidden_size * config.num_hidden_layers
        width = config.intermediate_size or 0
        wanted = width + (target - parameter_count(config)) / unit
        width = STEP * max(0, round(wanted / STEP))
        if wanted < 0:
            raise ValueError(
                f"a model of {', '.join(config.layers or [])} at width {config.hidden_size} has more "
                f"than {target:,} parameters without a feed-forward block: raise the target"
            )
        found.append(config.but(intermediate_size=width))
    return found
