"""Ties: gates, queries, keys, values and probes computed from others (`options.Tie`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from recollect.choices.features.finite import Identity
from recollect.fields import Gate, Param, Range
from recollect.layer.gates import GateProjection, normalize_to_length
from recollect.layer.key_recurrence import KeyHistory, Sequences, decayed_sums, filtered_precisions
from recollect.layer.options import RECURRENCES, LayerOptions, Tie
from recollect.recipe.recipe import Recipe

__all__ = ["TiedInputs", "Ties", "declared_for_tie", "tie_gates", "tie_misfits"]

RULES_WITH_PROJECTION = (
    *("rate", "variance", "remainder", "implicit", "normalize"),
    *("product", "sum", "trapezoid"),
)
"""Rules whose target keeps its projection."""

SCALAR_RULES = ("sum", "trapezoid")
"""Rules whose target has a projection of one value per head."""

FACTORS = {
    "blend": 1.0,
    "direction": 1.0,
    "precondition": -0.2,
    "difference": 1.0,
    "mix": 0.5,
    "length": 0.0,
}
"""Initial values of the learned factors of rules; per channel for the first two, else per head."""

MOMENT_EPS = 1e-6
"""Added to a second moment of keys before its logarithm."""

MAX_ERASURE = 1 - 1e-6
"""Largest fraction that a diagonal erasure removes in one step: log 0 has no gradient."""


_GATES_OF_RULES = {
    "leaky_average": (
        Gate(
            name="log_average_decay",
            owner="Tie(rule='leaky_average')",
            range=Range(high=0.0),
            init=math.log(0.2),
            role="decay",
            is_log=True,
        ),
    ),
    "precondition": (
        Gate(
            name="log_moment_decay",
            owner="Tie(rule='precondition')",
            range=Range(high=0.0),
            init=math.log(0.98),
            role="decay",
            is_log=True,
        ),
        Gate(
            name="moment_rate",
            owner="Tie(rule='precondition')",
            range=Range(low=0.0),
            init=0.5,
            role="rate",
        ),
    ),
    "filter": (
        Gate(
            name="observation_precision", owner="Tie(rule='filter')", range=Range(low=0.0), init=1.0
        ),
        Gate(
            name="process_noise",
            owner="Tie(rule='filter')",
            axes=("F",),
            range=Range(low=0.0, low_open=True),
            init=0.01,
        ),
    ),
}
"""Gates of rules that no recipe declares."""


def tie_gates(options: LayerOptions) -> tuple[Gate, ...]:
    """Return the gates that ties need and the recipe does not declare."""
    return tuple(gate for tie in options.ties for gate in _GATES_OF_RULES.get(tie.rule, ()))


def declared_for_tie(declared: Gate | Param, rule: str | None) -> Gate | Param:
    """Return the declaration of the projection of a target."""
    return replace(declared, axes=()) if rule in SCALAR_RULES else declared


def _makes_queries(tie: Tie) -> bool:
    """Return whether the queries of a layer are its keys."""
    return (tie.target, tie.rule) == ("q", "copy")


def tie_misfits(recipe: Recipe, options: LayerOptions) -> Iterator[tuple[Tie, str]]:
    """Yield the ties that a recipe does not allow, each with the message of the error."""
    gates: dict[str, Gate | Param] = {gate.name: gate for gate in recipe.gates()}
    known = {**gates, **{param.name: param for param in recipe.params()}}
    targets = {tie.target for tie in options.ties}
    for tie in options.ties:
        sources = [tie.source] if tie.source in ("q", "k", "v") else known
        if tie.source not in sources or tie.target not in [*known, "q", "k", "v", "angle"]:
            message = f"{tie} ties gates that this recipe does not have; it has: "
            yield tie, f"{message}{', '.join(sorted(known)) or 'none'}"
            continue
        if tie.target == "angle":
            reason, gate = None, gates.get(tie.source)
            if options.complex_decay == "none" or tie.source in targets:
                reason = "needs complex_decay, and a source without a tie"
            elif gate is None or gate.axes or _varies_in_token(gate, recipe, options):
                reason = "needs a gate per head as source, with one value per token: set mimo=True"
        else:
            reason = _incompatibility(tie, recipe, gates, known)
            pair = [gates[name] for name in (tie.source, tie.target) if name in gates]
            if tie.rule in ("rate", "negative", "shrink", "copy", "variance", "remainder") and (
                len({_varies_in_token(gate, recipe, options) for gate in pair}) > 1
            ):
                reason = reason or (
                    "needs gates that both have one value per token, or both one per association: "
                    "set mimo=True, or updates_per_token=1"
                )
            if tie.target == "v" and options.complex_decay != "none":
                reason = "needs complex_decay='none'"
            if _makes_queries(tie) and (
                options.qk == "ones" or any(other.rule == "complement" for other in options.ties)
            ):
                reason = "needs a projection of keys"
            is_limited = options.gate("lr").resolve_unit("lr", recipe) == "stability_limit"
            if tie.rule in ("normalize", "shrink") and "lr" in known and is_limited:
                reason = reason or "needs a rate that is no multiple of the stability limit"
        if reason is not None:
            yield tie, f"{tie} {reason}"


def _varies_in_token(gate: Gate | Param, recipe: Recipe, options: LayerOptions) -> bool:
    """Return whether the associations of a token have different values of a gate."""
    return isinstance(gate, Gate) and recipe.per_association(gate) and not options.mimo


def _incompatibility(
    tie: Tie, recipe: Recipe, gates: Mapping[str, object], known: Mapping[str, Gate | Param]
) -> str | None:
    """Return the requirement of the rule that the recipe does not meet, or ``None``."""
    plain = recipe.features == Identity() and recipe.associations_per_token == 1
    axes = {name: item.axes for name, item in known.items()}
    source, target = axes.get(tie.source), axes.get(tie.target)
    decay = recipe.retention.decay
    is_scaled = decay is not None and decay.is_input_scaled
    if (
        tie.rule == "complement" and (source != ("F",) or not plain or tie.source not in gates)
    ) or (tie.rule == "filter" and (axes.get("log_decay") != ("F",) or not plain or is_scaled)):
        return (
            "needs a decay per key channel, as Decay(per='key') has, and one association per token"
        )
    if tie.rule == "blend" and (source != ("F",) or not plain):
        return "needs a gate per key channel, and one association per token"
    if tie.rule == "direction" and not plain:
        return "needs keys that are their own features, and one association per token"
    on_tokens = (*RECURRENCES, "difference", "length")
    if (tie.rule in on_tokens or _makes_queries(tie)) and recipe.associations_per_token > 1:
        return "needs one association per token"
    if _makes_queries(tie):
        return None
    if (tie.rule in ("product", "sum") or (tie.source == "k" and tie.rule == "copy")) and (
        target != ("K",) or recipe.associations_per_token > 1
    ):
        return "needs one probe of K channels, and one association per token"
    both_gates = tie.source in gates and tie.target in gates
    if tie.rule == "rate" and not both_gates:
        return "needs two gates"
    if (
        tie.rule in ("negative", "variance", "remainder", "shrink", "copy")
        and tie.source != "k"
        and source != target
    ):
        both = [f"[{', '.join(('H', *(axes or ())))}]" for axes in (target, source)]
        return f"needs quantities of one shape, not {' and '.join(both)}"
    if tie.rule in ("negative", "copy", "shrink") and tie.source != "k" and not both_gates:
        return "needs two gates"
    if tie.rule == "shrink" and known[tie.target].role != "decay":
        return f"needs a decay as target, not {tie.target!r}"
    if tie.rule in ("variance", "trapezoid") and known[tie.source].role != "decay":
        return f"needs a decay as source, not {tie.source!r}"
    if tie.rule == "trapezoid" and (
        target != ("c",) or recipe.context.horizon != 2 or source or tie.source not in gates
    ):
        return "needs a window of two associations, and a decay per head"
    if tie.rule in ("implicit", "normalize") and not plain:
        return "needs keys that are their own features, and one association per token"
    if tie.rule == "diagonal" and (target != ("V", "F") or source != ("V",) or not plain):
        return (
            "needs a decay per entry and a rate per value channel, as Decay(per='entry') and "
            "GradientDescent(per='value') have"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class TiedInputs:
    """Queries, keys, values, and gates and params by name, after all ties."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    history: KeyHistory | None  # states of recurrences of keys and values, or None


class Ties(nn.Module):
    """Rules and learned factors ``[H, K]`` or ``[H, 1]`` of the ties of a layer."""

    def __init__(self, options: LayerOptions, recipe: Recipe, *, heads: int, key_dim: int) -> None:
        super().__init__()
        self.ties, self.log_gates = options.ties, recipe.log_gates
        self.gate_names = [gate.name for gate in tie_gates(options)]
        self.num_recurrences = sum(tie.rule in RECURRENCES for tie in options.ties)
        factors = [tie for tie in options.ties if tie.rule in FACTORS]
        sizes = [key_dim if tie.rule in ("blend", "direction") else 1 for tie in factors]
        self.initial = {self._factor_name(tie): FACTORS[tie.rule] for tie in factors}
        self.factors = nn.ParameterDict(
            {name: torch.empty(heads, size) for name, size in zip(self.initial, sizes, strict=True)}
        )
        self.reset_parameters()

    def _factor_name(self, tie: Tie) -> str:
        """Return the target of a tie, with the rule if several ties of the target have factors."""
        rules = [other.rule for other in self.ties if other.target == tie.target]
        is_only = sum(rule in FACTORS for rule in rules) == 1
        return tie.target if is_only else f"{tie.target}_{tie.rule}"

    def _factor(self, tie: Tie, like: Tensor) -> Tensor:
        return self.factors[self._factor_name(tie)].to(like.dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every factor to its initial value."""
        for name, factor in self.factors.items():
            nn.init.constant_(factor, self.initial[name])

    @property
    def makes_keys(self) -> bool:
        """Whether keys have no projection."""
        return any(tie.rule == "complement" for tie in self.ties)

    @property
    def makes_queries(self) -> bool:
        """Whether queries have no projection."""
        return any(map(_makes_queries, self.ties))

    @property
    def follows_query(self) -> bool:
        """Whether a tie follows the queries."""
        return any(tie.source == "q" for tie in self.ties)

    def complement(self, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the keys of a layer without a projection of keys."""
        tie = next(tie for tie in self.ties if tie.rule == "complement")
        return -torch.expm1(values[tie.source]).to(dtype)  # 1 − α

    def angle_factor(self, values: Mapping[str, Tensor], gates: nn.ModuleDict) -> Tensor | None:
        """Return the factor ``[B, T, H]`` of the angles of tokens."""
        tie = next((tie for tie in self.ties if tie.target == "angle"), None)
        return None if tie is None else _ratio(tie.source, values[tie.source], gates)

    def apply_ties(
        self,
        q: Tensor,  # queries [B, T, heads, K]
        k: Tensor,  # keys [B, T, H, K], of several associations if no tie uses them
        v: Tensor,  # values [B, T, H, V], of several associations if no tie uses them
        values: Mapping[str, Tensor],  # gates and params by name
        gates: nn.ModuleDict,
        sequences: Sequences,  # state and boundaries of the sequences
    ) -> TiedInputs:
        """Apply the ties in their order."""
        tied, states = dict(values), list[tuple[Tensor, Tensor]]()
        qkv = {"q": q, "k": k, "v": v}
        for tie in self.ties:
            if tie.rule == "complement" or tie.target == "angle":
                continue
            if tie.rule in RECURRENCES:
                x, state = self._recurrence(tie, tied, qkv[tie.target], sequences, len(states))
                qkv[tie.target] = x
                states.append(state)
            elif tie.target in qkv:
                qkv[tie.target] = self._tied_qkv(tie, tied, qkv)
            else:
                source = qkv.get(tie.source)
                source = tied[tie.source] if source is None else source
                tied[tie.target] = self._tied_value(tie, tied, source, qkv["k"], gates)
        for name in self.gate_names:
            del tied[name]
        return TiedInputs(**qkv, gates=tied, history=KeyHistory.stack(states))

    def _tied_qkv(
        self, tie: Tie, values: Mapping[str, Tensor], qkv: Mapping[str, Tensor]
    ) -> Tensor:
        """Return queries, keys or values after a rule that acts on each token."""
        q, k, x = qkv["q"], qkv["k"], qkv[tie.target]
        if tie.rule == "copy":
            return k
        factor = self._factor(tie, x)
        if tie.rule == "length":
            return factor.exp() * normalize_to_length(x, tie.constant)
        if tie.rule == "difference":
            return q - (factor * k).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        source = values[tie.source]
        return k * (1 + self._factor(tie, source) * (source - 1)).to(k.dtype)

    def _recurrence(
        self, tie: Tie, values: dict[str, Tensor], x: Tensor, sequences: Sequences, index: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return keys or values after a recurrence, and its states after every token and the last.

        A filter also changes the decay in ``values``.
        """
        if tie.rule in ("previous", "mix"):
            shifted, last = sequences.previous(x, sequences.initial(index, x))
            if tie.rule == "previous":
                return shifted, (x, last)
            return x + self._factor(tie, x) * (shifted - x), (x, last)
        if tie.rule == "leaky_average":
            log_decay = values["log_average_decay"]
            u = x.to(log_decay.dtype)
            initial = sequences.initial(index, u)
            A = decayed_sums(u, log_decay, initial, sequences.cu_seqlens)
            return A.to(x.dtype), (A, sequences.previous(A, initial)[1])
        if tie.rule == "filter":
            log_decay, w = values["log_decay"], values["observation_precision"].unsqueeze(-1)
            u = w * x.to(w.dtype).square()
            prior = sequences.initial(index, u)  # the state is Λ − s, so that 0 is the prior
            precision = filtered_precisions(
                *(u, log_decay, values["process_noise"]),
                initial=tie.constant + prior,
                cu_seqlens=sequences.cu_seqlens,
            )
            log_factor = torch.log1p(-(u / precision).clamp_max(MAX_ERASURE))
            values["log_decay"] = log_decay + log_factor.to(log_decay.dtype)
            states = precision - tie.constant
            gain = x * (w / precision).to(x.dtype)
            return gain, (states, sequences.previous(states, prior)[1])
        log_decay, rate = values["log_moment_decay"], values["moment_rate"]
        squares = rate.unsqueeze(-1) * x.to(rate.dtype).square()
        initial = sequences.initial(index, squares)
        A = decayed_sums(squares, log_decay, initial, sequences.cu_seqlens)
        r = (A + MOMENT_EPS).log() - self._factor(tie, A)
        M = (-math.log(tie.constant) * r / (1 + r.abs())).exp()
        return x * M.to(x.dtype), (A, sequences.previous(A, initial)[1])

    def _tied_value(
        self,
        tie: Tie,
        values: Mapping[str, Tensor],
        source: Tensor,
        k: Tensor,
        gates: nn.ModuleDict,
    ) -> Tensor:
        if tie.rule == "copy":
            return source
        if tie.rule == "negative":
            return -source
        if tie.rule == "direction":
            return normalize_to_length(k * self._factor(tie, k), 1.0)
        if tie.rule == "diagonal":
            erased = source.unsqueeze(-1) * k.to(source.dtype).square().unsqueeze(-2)
            return torch.log1p(-erased.clamp_max(MAX_ERASURE))
        if tie.rule == "shrink":
            return torch.log1p(-(tie.constant * source).clamp_max(MAX_ERASURE))
        value = values[tie.target]
        if tie.rule == "product":
            return value.to(k.dtype) * k
        if tie.rule == "sum":
            return torch.addcmul(k, value.to(k.dtype).unsqueeze(-1), source)
        if tie.rule == "variance":
            alpha = self._alpha(tie.source, source, values)
            return value * (1 - alpha.square()).clamp_min(1e-12).sqrt()
        if tie.rule == "remainder":
            return value * (1 - source)
        if tie.rule == "trapezoid":
            alpha = self._alpha(tie.source, source, values)
            return torch.stack([value, (1 - value) * alpha], dim=-1)
        if tie.rule in ("implicit", "normalize"):
            size = k.to(value.dtype).square().sum(-1)
            size = size.view(*size.shape, *(1,) * (value.dim() - size.dim()))
            return value / (1 + value * size if tie.rule == "implicit" else tie.constant + size)
        # The value is that of the target's projection if the source is at its initial value.
        ratio = _ratio(tie.source, source, gates)
        return value * ratio.view(*ratio.shape, *(1,) * (value.dim() - ratio.dim()))

    def _alpha(self, name: str, source: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Return a decay from its gate, which may be a logarithm."""
        if name not in self.log_gates:
            return source
        return (source * values.get("decay_scale", source.new_ones(()))).exp()


def _ratio(name: str, source: Tensor, gates: nn.ModuleDict) -> Tensor:
    """Return a gate divided by its initial value."""
    projection = cast(GateProjection, gates[name])
    return source / projection.value_at_zero(source.device, source.dtype)
