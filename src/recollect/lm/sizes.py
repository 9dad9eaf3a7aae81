"""Counting parameters without making them, and bringing models to equal counts."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["match_parameters", "parameter_count"]

STEP = 8  # MLP widths stay multiples of this


def parameter_count(config: RecollectConfig) -> int:
    """Trained numbers of a model of this configuration, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = RecollectForCausalLM(config)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def match_parameters(configs: Sequence[RecollectConfig], target: int) -> list[RecollectConfig]:
    """Copies whose MLP widths bring each model as near to ``target`` parameters as they can.

    Widths are multiples of 8, so counts agree to within 12 · hidden_size · num_hidden_layers.

    Raises:
        ValueError: a model that has more parameters than ``target`` even with the narrowest MLP.
    """
    matched: list[RecollectConfig] = []
    for config in configs:
        config = copy.deepcopy(config)
        config.intermediate_size = STEP
        least = parameter_count(config)
        step = 3 * STEP * config.hidden_size * config.num_hidden_layers
        if target < least - step // 2:
            raise ValueError(
                f"{', '.join(config.layers)}: {least:,} parameters with the narrowest MLP are more "
                f"than the {target:,} asked for; raise the target or lower hidden_size"
            )
        config.intermediate_size = STEP * (1 + round((target - least) / step))
        matched.append(config)
    return matched
