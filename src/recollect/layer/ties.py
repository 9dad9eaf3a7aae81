"""Ties: gates, keys and probes computed from other gates or keys, as `options.Tie` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from recollect.choices.features.finite import Identity
from recollect.choices.fields import Gate, Param
from recollect.layer.gates import GateProjection, scaled
from recollect.layer.options import LayerOptions, Tie
from recollect.recipe.recipe import Recipe

__all__ = ["OWNED", "Ties", "tie_misfits"]

OWNED = ("rate", "variance", "implicit")
"""Rules whose target has a number of its own, which the source then changes."""

NEARLY = 1 - 1e-6
"""Largest share of an entry that a diagonal erasure takes in one step: log 0 has no gradient."""


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
        reason = _misfit(tie, recipe, gates, known)
        if reason is not None:
            yield tie, f"{tie} {reason}"


def _misfit(
    tie: Tie, recipe: Recipe, gates: Mapping[str, object], known: Mapping[str, Gate | Param]
) -> str | None:
    """What the rule needs and the recipe lacks."""
    plain = recipe.features == Identity() and recipe.associations == 1
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
        return f"needs numbers of one shape, not {' and '.join(both)}"
    if tie.rule == "negative" and not (tie.source in gates and tie.target in gates):
        return "needs two gates"
    if tie.rule == "variance" and "decay" not in tie.source:
        return f"follows a decay, and {tie.source!r} is none"
    if tie.rule == "implicit" and not plain:
        return "needs keys that are their own features, and one association per token"
    if tie.rule == "diagonal" and (target != ("V", "F") or source != ("V",) or not plain):
        return (
            "needs a decay per entry and a rate per value channel, as Decay(per='entry') and "
            "GradientDescent(per='value') have"
        )
    return None


class Ties(nn.Module):
    """What the ties of a layer compute, and what they learn.

    Args:
        options: with the ties.
        heads: H. key_dim: K, of the learned ξ ``[H, K]``.
    """

    def __init__(self, options: LayerOptions, *, heads: int, key_dim: int) -> None:
        super().__init__()
        self.ties = options.ties
        self.factors = nn.ParameterDict(
            {tie.target: torch.empty(heads, key_dim) for tie in options.ties if _learns(tie)}
        )
        self.key = next((tie for tie in options.ties if tie.target == "k"), None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start: every factor is 1."""
        for factor in self.factors.values():
            nn.init.ones_(factor)

    @property
    def makes_keys(self) -> bool:
        """Whether keys need no projection."""
        return self.key is not None and self.key.rule == "complement"

    def keys(self, k: Tensor | None, values: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The keys, tied or not."""
        if self.key is None:
            assert k is not None
            return k
        source = values[self.key.source]
        if k is None:
            return -torch.expm1(source).to(like.dtype)  # 1 − α
        blend = 1 + self.factors["k"].to(source.dtype) * (source - 1)
        return k * blend.to(k.dtype)

    def numbers(
        self, values: dict[str, Tensor], k: Tensor, gates: nn.ModuleDict
    ) -> dict[str, Tensor]:
        """Every gate and param by name, with the tied ones in place.

        Args:
            values: those that the layer made. k: keys, before ties. gates: what made its gates.
        """
        tied = dict(values)
        for tie in self.ties:
            if tie.target != "k":
                source = k if tie.source == "k" else tied[tie.source]
                tied[tie.target] = self._tied(tie, tied, source, k, gates)
        return tied

    def _tied(
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
            return scaled(k * self.factors[tie.target].to(k.dtype), 1.0)
        if tie.rule == "diagonal":
            taken = source.unsqueeze(-1) * k.to(source.dtype).square().unsqueeze(-2)
            return torch.log1p(-taken.clamp_max(NEARLY))
        own = values[tie.target]
        if tie.rule == "variance":
            alpha = source
            if tie.source.startswith("log_"):
                alpha = (source * values.get("decay_scale", source.new_ones(()))).exp()
            return own * (1 - alpha.square()).clamp_min(1e-12).sqrt()
        if tie.rule == "implicit":
            size = k.to(own.dtype).square().sum(-1)
            size = size.view(*size.shape, *(1,) * (own.dim() - size.dim()))
            return own / (1 + own * size)
        # Its own value is what it is where the other gate is at its start.
        number = cast(GateProjection, gates[tie.source])
        pace = source / number.start(source.device, source.dtype)
        return own * pace.view(*pace.shape, *(1,) * (own.dim() - pace.dim()))


def _learns(tie: Tie) -> bool:
    return tie.rule in ("blend", "direction")
