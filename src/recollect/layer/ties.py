"""Ties: gates, keys and probes that are computed from other gates or keys (`options.Tie`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from recollect.choices.features.finite import Identity
from recollect.fields import Gate, Param
from recollect.layer.gates import GateProjection, normalize_to_length
from recollect.layer.options import LayerOptions, Tie
from recollect.recipe.recipe import Recipe

__all__ = ["RULES_WITH_OWN_VALUE", "Ties", "tie_misfits"]

RULES_WITH_OWN_VALUE = ("rate", "variance", "implicit")
"""Rules that change a target with a projection of its own."""

MAX_ERASURE = 1 - 1e-6
"""Largest fraction that a diagonal erasure removes in one step: log 0 has no gradient."""


def tie_misfits(recipe: Recipe, options: LayerOptions) -> Iterator[tuple[Tie, str]]:
    """Yield the ties that a recipe does not allow, each with the message of the error."""
    gates: dict[str, Gate | Param] = {gate.name: gate for gate in recipe.gates()}
    known = {**gates, **{param.name: param for param in recipe.params()}}
    for tie in options.ties:
        sources = ["k"] if tie.source == "k" else known
        if tie.source not in sources or tie.target not in [*known, "k"]:
            message = f"{tie} ties gates that this recipe does not have; it has: "
            yield tie, f"{message}{', '.join(sorted(known)) or 'none'}"
            continue
        reason = _incompatibility(tie, recipe, gates, known)
        if reason is not None:
            yield tie, f"{tie} {reason}"


def _incompatibility(
    tie: Tie, recipe: Recipe, gates: Mapping[str, object], known: Mapping[str, Gate | Param]
) -> str | None:
    """Return the requirement of the rule that the recipe does not meet, or ``None``."""
    plain = recipe.features == Identity() and recipe.associations_per_token == 1
    axes = {name: item.axes for name, item in known.items()}
    source, target = axes.get(tie.source), axes.get(tie.target)
    if tie.rule == "complement" and (source != ("F",) or not plain or tie.source not in gates):
        return (
            "needs a decay per key channel, as Decay(per='key') has, and one association per token"
        )
    if tie.rule == "blend" and (source != ("F",) or not plain):
        return "needs a gate per key channel, and one association per token"
    if tie.rule == "direction" and not plain:
        return "needs keys that are their own features, and one association per token"
    if tie.rule == "rate" and not (tie.source in gates and tie.target in gates):
        return "needs two gates"
    if tie.rule in ("negative", "variance") and source != target:
        both = [f"[{', '.join(('H', *(axes or ())))}]" for axes in (target, source)]
        return f"needs quantities of one shape, not {' and '.join(both)}"
    if tie.rule == "negative" and not (tie.source in gates and tie.target in gates):
        return "needs two gates"
    if tie.rule == "variance" and known[tie.source].role != "decay":
        return f"needs a decay as source, not {tie.source!r}"
    if tie.rule == "implicit" and not plain:
        return "needs keys that are their own features, and one association per token"
    if tie.rule == "diagonal" and (target != ("V", "F") or source != ("V",) or not plain):
        return (
            "needs a decay per entry and a rate per value channel, as Decay(per='entry') and "
            "GradientDescent(per='value') have"
        )
    return None


class Ties(nn.Module):
    """Rules and learned factors ξ ``[H, K]`` of the ties of a layer."""

    def __init__(self, options: LayerOptions, recipe: Recipe, *, heads: int, key_dim: int) -> None:
        super().__init__()
        self.ties, self.log_gates = options.ties, recipe.log_gates
        self.factors = nn.ParameterDict(
            {tie.target: torch.empty(heads, key_dim) for tie in options.ties if _has_parameter(tie)}
        )
        self.key = next((tie for tie in options.ties if tie.target == "k"), None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every factor to 1."""
        for factor in self.factors.values():
            nn.init.ones_(factor)

    @property
    def makes_keys(self) -> bool:
        """Whether keys have no projection."""
        return self.key is not None and self.key.rule == "complement"

    def keys(self, k: Tensor | None, values: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the keys, after their tie if there is one."""
        if self.key is None:
            assert k is not None
            return k
        source = values[self.key.source]
        if k is None:
            return -torch.expm1(source).to(like.dtype)  # 1 − α
        blend = 1 + self.factors["k"].to(source.dtype) * (source - 1)
        return k * blend.to(k.dtype)

    def apply_ties(
        self, values: dict[str, Tensor], k: Tensor, gates: nn.ModuleDict
    ) -> dict[str, Tensor]:
        """Return all gates and params by name, with ties applied."""
        tied = dict(values)
        for tie in self.ties:
            if tie.target != "k":
                source = k if tie.source == "k" else tied[tie.source]
                tied[tie.target] = self._tied_value(tie, tied, source, k, gates)
        return tied

    def _tied_value(
        self,
        tie: Tie,
        values: Mapping[str, Tensor],
        source: Tensor,
        k: Tensor,
        gates: nn.ModuleDict,
    ) -> Tensor:
        if tie.rule == "negative":
            return -source
        if tie.rule == "direction":
            return normalize_to_length(k * self.factors[tie.target].to(k.dtype), 1.0)
        if tie.rule == "diagonal":
            erased = source.unsqueeze(-1) * k.to(source.dtype).square().unsqueeze(-2)
            return torch.log1p(-erased.clamp_max(MAX_ERASURE))
        value = values[tie.target]
        if tie.rule == "variance":
            alpha = source
            if tie.source in self.log_gates:
                alpha = (source * values.get("decay_scale", source.new_ones(()))).exp()
            return value * (1 - alpha.square()).clamp_min(1e-12).sqrt()
        if tie.rule == "implicit":
            size = k.to(value.dtype).square().sum(-1)
            size = size.view(*size.shape, *(1,) * (value.dim() - size.dim()))
            return value / (1 + value * size)
        # The value is that of the target's own projection if the source is at its initial value.
        projection = cast(GateProjection, gates[tie.source])
        ratio = source / projection.value_at_zero(source.device, source.dtype)
        return value * ratio.view(*ratio.shape, *(1,) * (value.dim() - ratio.dim()))


def _has_parameter(tie: Tie) -> bool:
    return tie.rule in ("blend", "direction")
