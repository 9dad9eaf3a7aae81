"""Groups of parameters: which of them decay, and which learning rate each has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from recollect.blocks.layers import PersistentTokens
from recollect.blocks.routed import Router
from recollect.layer.gates import GateProjection
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialKernelRows, InitialMemory
from recollect.layer.rotary import ComplexDecayPhase
from recollect.layer.short_conv import ShortConvolution
from recollect.layer.ties import Ties
from recollect.layer.token_shift import TokenShift
from recollect.lm.width.rules import rules_of

__all__ = ["decayed_names", "parameter_groups", "rates_of", "split_by_rate"]

# Weights whose zero is no neutral value: a gate at 0 is a gate at half, a memory that starts at 0
# has no gradient through its layers, a filter at 0 is deaf.
_KEPT = (
    *(
        GateProjection,
        Ties,
        InitialMemory,
        InitialKernelRows,
        ComplexDecayPhase,
        TokenShift,
        ShortConvolution,
    ),
    PersistentTokens,
    Router,
)


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    lr: float | None = None,
    base_width: int | None = None,
) -> list[dict[str, object]]:
    """Parameters as ``torch.optim`` takes them, with weight decay only where it belongs.

    Matrices of linear maps, embeddings and the learned pairs of feed-forward memories decay. Gates
    and their projections, norms, biases, initial memories and bases, decays, phases, token shifts,
    skips, short convolutions, persistent tokens and routers do not. Frozen parameters are left out,
    tied ones stand once. Works for any module: what is not recollect's own decays when it has two
    axes or more.

    Args:
        model: the model.
        weight_decay: of the weights that decay, ≥ 0.
        lr: the learning rate, > 0, which every group then states.
        base_width: of the rules for width (muP): matrices that read m = width / base_width times as
            many channels have the learning rate lr / m and the weight decay m · weight_decay. For a
            `RecollectForCausalLM` that began by `recollect.lm.scale_for_width`; needs ``lr``.

    Returns:
        Two groups, ``{"params": ..., "weight_decay": ...}``; an empty one is left out. With a base
        width each falls into one per learning rate, the largest first.

    Raises:
        ValueError: a base width without a learning rate.
        RecipeError: a model that the rules for width do not cover.

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
    names = set(decayed_names(model))
    decayed = [p for name, p in _trained(model) if name in names]
    others = [p for name, p in _trained(model) if name not in names]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if lr is not None:
        groups = [{**group, "lr": lr} for group in groups]
    if base_width is None:
        return groups
    if lr is None:
        raise ValueError(
            "parameter_groups(base_width=...) states a learning rate of every group: give lr too"
        )
    return split_by_rate(groups, rates_of(model, base_width))


def rates_of(model: nn.Module, base_width: int) -> dict[nn.Parameter, float]:
    """The factor of the learning rate of every parameter, by the rules for width.

    Args:
        model: a `RecollectForCausalLM`, whole or shared among processes: its configuration says
            how large its parameters are.
        base_width: of the rules.

    Raises:
        RecipeError: a model that they do not cover.
    """
    rules = rules_of(model, base_width)
    return {weight: rules[name].rate for name, weight in model.named_parameters()}


def split_by_rate(
    groups: Iterable[Mapping[str, Any]], rates: Mapping[nn.Parameter, float]
) -> list[dict[str, Any]]:
    """Groups of an optimizer, each divided by learning rates; as stated comes first.

    What decays in a step, the learning rate times the weight decay, stays as it was.

    Args:
        groups: with ``params``, ``lr`` and ``weight_decay``.
        rates: of `rates_of`.
    """
    divided: list[dict[str, Any]] = []
    for group in groups:
        for rate in sorted({rates[p] for p in group["params"]}, key=lambda x: (x != 1, -x)):
            own = [p for p in group["params"] if rates[p] == rate]
            decay = group["weight_decay"] / rate
            stated = {"params": own, "lr": group["lr"] * rate, "weight_decay": decay}
            divided.append({**group, **stated})
    return divided


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters that decay, as `parameter_groups` says."""
    owned: set[int] = set()
    for module in model.modules():
        if isinstance(module, _KEPT):
            owned.update(id(weight) for weight in module.parameters())
        elif isinstance(module, MemoryLayer):
            owned.update(id(weight) for weight in module.parameters(recurse=False))
    return [name for name, p in _trained(model) if p.dim() > 1 and id(p) not in owned]


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
