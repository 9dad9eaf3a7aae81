"""Groups of parameters for an optimizer, by weight decay and learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from recollect.blocks.layers import PersistentTokens
from recollect.blocks.routed import Router
from recollect.layer.depth_floors import DepthFloors
from recollect.layer.gates import GateProjection
from recollect.layer.head_factors import GroupedRMSNorm, InputOutputFactors, QKAffine, QKScale
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialKernelRows, InitialMemory
from recollect.layer.rotary import ComplexDecayPhase
from recollect.layer.short_conv import ShortConvolution
from recollect.layer.ties import Ties
from recollect.layer.token_shift import TokenShift
from recollect.lm.mup.rules import lr_scales, split_groups_by_lr

__all__ = ["decay_parameter_names", "parameter_groups"]

_NO_DECAY_MODULES = (
    *(GateProjection, Ties, QKAffine, QKScale, InitialMemory, InitialKernelRows, ComplexDecayPhase),
    *(TokenShift, ShortConvolution, GroupedRMSNorm, InputOutputFactors),
    *(DepthFloors, PersistentTokens, Router),
)
"""Modules whose weights do not decay, because zero is not a neutral value for them.

A gate with zero weights is half open, a memory that starts at zero has no gradient through its
layers, and a zero filter has no output.
"""


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    lr: float | None = None,
    base_width: int | None = None,
) -> list[dict[str, Any]]:
    """Return the parameters in groups for ``torch.optim``, with weight decay only where it belongs.

    Weights of linear layers, embeddings and learned pairs of feed-forward memories decay. Gates and
    their projections, norms, biases, initial memories and bases, decays, phases, token shifts,
    skips, short convolutions, persistent tokens and routers do not. Frozen parameters are left out,
    and tied ones occur once. In modules of other libraries, parameters with two or more axes decay.

    Args:
        model: the model.
        weight_decay: weight decay of the parameters that decay, ≥ 0.
        lr: learning rate, > 0; every group then contains it.
        base_width: base width of the rules for width (muP). Matrices with m = width / base_width
            times as many input channels get the learning rate lr / m and the weight decay
            m · weight_decay. For a `RecollectForCausalLM` after `recollect.lm.scale_for_width`;
            needs ``lr``.

    Returns:
        Two groups, ``{"params": ..., "weight_decay": ...}``, without empty ones. With a base width,
        one group per weight decay and learning rate, the largest learning rate first.

    Raises:
        ValueError: a base width without a learning rate.
        RecipeError: the rules for width do not cover the model.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = rc.lm.RecollectForCausalLM(config)
        >>> groups = rc.lm.parameter_groups(model, weight_decay=0.1)
        >>> optimizer = torch.optim.AdamW(groups, lr=3e-3)
        >>> [group["weight_decay"] for group in groups]
        [0.1, 0.0]
    """
    names = set(decay_parameter_names(model))
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in _trainable(model) if name in names]},
        {"params": [p for name, p in _trainable(model) if name not in names]},
    ]
    for group, decay in zip(groups, (weight_decay, 0.0), strict=True):
        group |= {"weight_decay": decay} | ({} if lr is None else {"lr": lr})
    groups = [group for group in groups if group["params"]]
    if base_width is None:
        return groups
    if lr is None:
        raise ValueError(
            "parameter_groups(base_width=...) sets a learning rate in every group: pass lr, too"
        )
    return split_groups_by_lr(groups, lr_scales(model, base_width))


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that decay, see `parameter_groups`."""
    excluded: set[int] = set()
    for module in model.modules():
        if isinstance(module, (*_NO_DECAY_MODULES, MemoryLayer)):
            recurse = not isinstance(module, MemoryLayer)
            excluded.update(id(weight) for weight in module.parameters(recurse=recurse))
    return [name for name, p in _trainable(model) if p.dim() > 1 and id(p) not in excluded]


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
