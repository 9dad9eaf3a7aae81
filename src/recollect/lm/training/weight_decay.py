"""Weight-decay groups: projections and embeddings decay; gates and memories do not."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from recollect.blocks.composed import PersistentTokens
from recollect.blocks.routed import Router
from recollect.layer.convolution import ShortConvolution
from recollect.layer.gates import GateProjection
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.numbers import InitialMemory, InitialPairs
from recollect.layer.rotation import Phase
from recollect.layer.ties import Ties
from recollect.layer.token_shift import TokenShift

__all__ = ["decayed_names", "parameter_groups"]

# Weights whose zero is no neutral value: a gate at 0 is a gate at half, a memory that starts at 0
# has no gradient through its layers, a filter at 0 is deaf.
_KEPT = (
    *(GateProjection, Ties, InitialMemory, InitialPairs, Phase, TokenShift, ShortConvolution),
    PersistentTokens,
    Router,
)


def parameter_groups(model: nn.Module, *, weight_decay: float = 0.1) -> list[dict[str, object]]:
    """Parameters as ``torch.optim`` takes them, with weight decay only where it belongs.

    Matrices of linear maps, embeddings and the learned pairs of feed-forward memories decay. Gates
    and their projections, norms, biases, initial memories, decays, phases, token shifts, skips,
    short convolutions, persistent tokens and routers do not. Frozen parameters are left out, tied
    ones stand once. Works for any module: what is not recollect's own decays when it has two axes
    or more.

    Args:
        model: the model.
        weight_decay: of the first group, ≥ 0.

    Returns:
        Two groups, ``{"params": ..., "weight_decay": ...}``; an empty one is left out.

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
    return [group for group in groups if group["params"]]


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
