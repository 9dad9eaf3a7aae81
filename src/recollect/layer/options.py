"""Layer options: everything about a memory layer that is not the regression problem.

They declare the computation of queries, keys, values and gates, and the steps after the read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from recollect.fields import (
    REAL,
    Validated,
    flag,
    float_check,
    int_check,
    integer,
    number,
    option,
    text,
    validated_field,
)
from recollect.messages import RecipeError, short_repr, suggest_arguments
from recollect.recipe.stability import step_limit
from recollect.serialization import fields_to_data, read_fields

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["GateOptions", "LayerOptions", "Options", "Tie"]

TIE_RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "complement": (("k",), ("gate",), "k_t = 1 − α_t"),
    "blend": (("k",), ("gate",), "k_t ← k_t ⊙ (1 + ν ({source} − 1))"),
    "precondition": (("k",), ("k",), "k_t ← {s}^(−r/(1 + |r|)) ⊙ k_t, r = log A_t − χ"),
    "previous": (("k", "v"), ("k", "v"), "{x}_t ← {x}_(t−1)"),
    "mix": (("k", "v"), ("k", "v"), "{x}_t ← (1 − ξ_{x}) {x}_t + ξ_{x} {x}_(t−1)"),
    "leaky_average": (("k",), ("k",), "k_t ← A_t, A_t = λ_t A_(t−1) + k_t"),
    "length": (("k", "v"), ("k", "v"), "{x}_t ← ζ_{x} {x}_t/‖{x}_t‖"),
    "filter": (
        ("k",),
        ("k",),
        "k_t ← w_t k_t/Λ_t, α_t ← α_t (1 − w_t k_t²/Λ_t), "
        "Λ_t = Λ_(t−1)/(α_t² + p_t Λ_(t−1)) + w_t k_t², Λ_0 = {s}",
    ),
    "direction": (("probe",), ("k",), "w_t = (k_t ⊙ ξ_w)/‖k_t ⊙ ξ_w‖"),
    "product": (("probe",), ("k",), "w_t = c_t ⊙ k_t"),
    "sum": (("probe",), ("q",), "w_t = k_t + c_t q_t"),
    "difference": (("q",), ("k",), "q_t ← q_t − ξ_q k_t"),
    "copy": (("q", "probe", "gate"), ("k", "gate"), "{target} = {source}"),
    "rate": (("gate", "angle"), ("gate",), "{target} = c {source}"),
    "negative": (("gate",), ("gate",), "{target} = −{source}"),
    "variance": (("gate",), ("gate",), "{target} ← √(1 − α_t²) {target}"),
    "remainder": (("gate",), ("gate",), "{target} ← (1 − {source}) {target}"),
    "implicit": (("gate",), ("k",), "{target} ← {target}/(1 + {target} ‖k_t‖²)"),
    "normalize": (("gate",), ("k",), "{target} ← {target}/({s} + ‖k_t‖²)"),
    "shrink": (("gate",), ("gate",), "{target} = log(1 − {s} {source})"),
    "diagonal": (("gate",), ("gate",), "{target} = log(1 − {source} k_t²)"),
    "trapezoid": (("gate",), ("gate",), "{target} = (c_t, (1 − c_t) α_t)"),
}
"""Targets, sources and equation of each rule of a tie. ``"gate"`` is a gate or param."""

RECURRENCES = ("filter", "leaky_average", "mix", "precondition", "previous")
"""Rules of keys and values that depend on earlier tokens."""

SELF_RULES = (*RECURRENCES, "length")
"""Rules of keys and values whose source is their target."""

REPLACING_RULES = ("complement", "copy")
"""Rules of queries and keys that ignore the value of an earlier tie."""


class Options(Validated):
    """Base of options whose fields are checked; a wrong value raises `RecipeError`."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise RecipeError(str(error)) from None

    @classmethod
    def field_label(cls, field: str) -> str:
        return f"{cls.__name__}({field}=...)"


class _SavedOptions(Options):
    """Base of options that are saved as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with all defaults."""
        return fields_to_data(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return options from the result of `to_dict`; missing fields have their defaults.

        Raises:
            RecipeError: an unknown or missing field, or a value its field refuses.
        """
        return cls(**read_fields(cls, data))


def _conv(value: Any) -> int:
    return 0 if value is None else int_check()(value)


def _init(value: Any) -> float | tuple[float, ...]:
    several = isinstance(value, list | tuple)
    return tuple(map(float_check(REAL), value)) if several else float_check(REAL)(value)


def _gates(value: Any) -> tuple[tuple[str, GateOptions], ...]:
    try:
        pairs = sorted(dict(value).items())
    except (TypeError, ValueError):
        raise ValueError(f"must map names to GateOptions, not {short_repr(value)}") from None
    for name, options in pairs:
        if not isinstance(name, str) or not isinstance(options, GateOptions):
            raise ValueError(
                f"must map names to GateOptions, not {short_repr(name)} to {short_repr(options)}"
            )
    return tuple(pairs)


def _ties(value: Any) -> tuple[Tie, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(tie, Tie) for tie in value):
        raise ValueError(f"must be a tuple of Tie, not {short_repr(value)}")
    return tuple(value)


@suggest_arguments
@dataclass(frozen=True, kw_only=True)
class GateOptions(_SavedOptions):
    """Source, activation and initial value of a gate (per token) or a param (per head).

    The value is ``activation(z)``. z is a projection of the token plus a bias (``"input"``) or a
    bias (``"learned"``); with ``"constant"`` the value stays at its initial value. Options that are
    ``None`` follow from the declaration of the recipe, see `recollect.layer.gates`.

    Args:
        source: ``"input"``, ``"learned"`` or ``"constant"``. Default: ``"input"`` for gates and
            ``"learned"`` for params, which cannot depend on the input.
        unit: unit of the value. ``"stability_limit"``, for the rate ``"lr"`` of normalised steps: a
            multiple s of the limit beyond which one repeated association diverges,
            η_t = s_t · 2 (1 − θ_t) / (b Σγ), see `recollect.recipe.stability`. s is in (0, 1) and
            starts at 0.5 by default. ``"value_rms"``, for values that are compared with values or
            errors: √V, the length of a value whose channels have unit root mean square; ``init``,
            ``low`` and ``high`` are in this unit. ``"batch_mean"``, for the correction ``"offset"``
            of averaged steps: 1/position, the weight of a step at its position in the inner batch;
            ``init``, ``low`` and ``high`` are in this unit, but the learned value is not, so that
            it changes equally fast at every position. ``"raw"``: as `recollect.recall` takes the
            value. Default: ``"stability_limit"`` for the rate of a token if steps are normalised,
            else ``"raw"``.
        activation: ``"sigmoid"``: low + (high − low)·sigmoid(z). ``"softplus"``: low + softplus(z).
            ``"logsigmoid"``: high + logsigmoid(z)/temperature, for log decays (GLA divides by 16).
            ``"exp"``: low + exp(z), or high − exp(z) without a lower end. ``"celu"``: z above 0,
            and −low (exp(−z/low) − 1) below, with the lower end ``low`` < 0. ``"identity"``: z.
        low, high: ends of the range, e.g. 0 and 2 for a delta rule with negative eigenvalues. A
            multiple of the stability limit has ``high=1`` by default.
        temperature: > 0; a larger value keeps a log decay closer to its upper end.
        init: value at a zero input, a logarithm for log decays: one value, or one per head.
            Default: the initial value that the recipe declares. If ``low`` or ``high`` excludes
            that value or is close to it, the gate starts inside the range: at a twentieth of the
            range from that end, or closer if the declared value is closer to its own end.
        head_spread: ≥ 1. Initial memory times −1/log α of a decay are spread geometrically over the
            heads (or over the channels, if per channel), from 1/head_spread to head_spread times
            that of ``init``.
        rank: rank of the projection; 0 is a full matrix. Default: 32 for gates per channel, else 0.
        per: ``"head"`` for one value per head that all channels share. Default: one per channel, if
            the declaration has channels.
        depth_floor: whether a log decay of layer l has a learned lower end γ_l: α becomes
            γ_l + (1 − γ_l) α, with γ_l = Σ_{1 ≤ i ≤ l} softmax(B)_i over layers. The layers of a
            language model share B.
        bias: whether z has a learned bias; without one, a gate starts at activation(0).
        init_schedule: initial decays by head h and by layer l of L, instead of ``init``.
            ``"dyadic"``: α = 1 − 2^(−5−h). ``"alibi"``: log α = −2^(−8(h+1)/H)·(1 − l/L).
            ``"xpos"``: dyadic, times ζ_i^(1/512) for each pair i of K channels, ζ_i =
            (2i/K + 0.4)/1.4. ``"integers"``: 1, 2, … along the last axis, of any gate ≥ 0.

    Raises:
        RecipeError: a value that its field refuses.

    Examples:
        >>> options = rc.LayerOptions(gate_options={"lr": rc.GateOptions(low=0.0, high=2.0)})
        >>> layer = rc.MemoryLayer(8, 2, rc.Recipe(), options)
        >>> y, state = layer(torch.randn(1, 4, 8))
        >>> y.shape
        torch.Size([1, 4, 8])
    """

    source: str | None = option(None, "input", "learned", "constant", optional=True)
    unit: str | None = option(
        None, "stability_limit", "value_rms", "batch_mean", "raw", optional=True
    )
    activation: str | None = option(
        None, "sigmoid", "softplus", "logsigmoid", "exp", "celu", "identity", optional=True
    )
    low: float | None = number(None, optional=True)
    high: float | None = number(None, optional=True)
    temperature: float = number(1.0, above=0)
    init: float | tuple[float, ...] | None = validated_field(None, _init, optional=True)
    head_spread: float | None = number(None, at_least=1, optional=True)
    rank: int | None = integer(None, optional=True)
    per: str | None = option(None, "head", optional=True)
    depth_floor: bool = flag(False)
    bias: bool = flag(True)
    init_schedule: str | None = option(None, "dyadic", "alibi", "integers", "xpos", optional=True)

    def validate(self) -> None:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise RecipeError(
                f"GateOptions(low={self.low:g}, high={self.high:g}): low must be below high"
            )
        if self.init_schedule is not None and (
            self.init is not None or self.head_spread is not None
        ):
            raise RecipeError(
                f"GateOptions(init_schedule={self.init_schedule!r}) gives the values: drop "
                "init and head_spread"
            )
        initial = (self.init, self.head_spread, self.init_schedule)
        has_initial = any(value is not None for value in initial)
        if not self.bias and (self.source in ("learned", "constant") or has_initial):
            raise RecipeError(
                "GateOptions(bias=False) is for gates of the input, which start at activation(0): "
                "leave out source, init, head_spread and init_schedule"
            )

    def in_value_units(self, length: float) -> GateOptions:
        """Convert options in units of √V to the unit of the declaration.

        Args:
            length: √V.
        """

        def scaled(value: float | None) -> float | None:
            return None if value is None else length * value

        init = self.init
        return dataclasses.replace(
            self,
            unit=None,
            init=tuple(length * x for x in init) if isinstance(init, tuple) else scaled(init),
            low=scaled(self.low),
            high=scaled(self.high),
        )

    def resolve_unit(self, name: str, recipe: Recipe) -> str | None:
        """Return the unit of a gate or param; ``None`` for the unit of its declaration.

        By default, the rate of a token is a multiple of the stability limit if steps are
        normalised: another unit fits one inner batch, window and momentum only
        (`recollect.recipe.stability`).

        Args:
            name: name of the gate or param.
            recipe: recipe that declares it.
        """
        unit = self.unit
        if unit is None and name == "lr" and step_limit(recipe) is not None:
            unit = "stability_limit" if "lr" in {gate.name for gate in recipe.gates()} else None
        return None if unit == "raw" else unit


@dataclass(frozen=True, kw_only=True)
class Tie(_SavedOptions):
    """A gate, param, query, key, value or probe that is computed from another one.

    Ties apply in their order: a source has the value that earlier ties gave it. Queries, keys and
    values may have several ties.

    Args:
        target: ``"q"``, ``"k"``, ``"v"``, a gate or param of the recipe, or ``"angle"``, the
            increment of the angle of `LayerOptions.complex_decay`.
        source: ``"q"``, ``"k"``, ``"v"``, or a gate or param of the recipe.
        rule: formula of the target, with a c (the target's projection), a learned factor ξ, ν, χ or
            ζ, and the constant s:

            * ``"complement"``: k = 1 − α, α = exp(source) per key channel (HGRN2).
            * ``"blend"``: k ⊙ (1 + ν (source − 1)), a source per key channel (RWKV-7's k̃).
            * ``"precondition"``: k ⊙ M with M = s^(−r/(1 + |r|)) in (1/s, s), r = log(A + 1e-6) − χ
              and A_t = a_t A_(t−1) + b_t k_t², per key channel (preconditioned delta rules). a and
              b are the gates ``"log_moment_decay"`` and ``"moment_rate"`` of the layer.
            * ``"previous"``: k_(t−1) or v_(t−1), 0 at the first token (Falcon).
            * ``"mix"``: (1 − ξ) v_t + ξ v_(t−1), or of keys, ξ per head (Memory Mosaics).
            * ``"leaky_average"``: A_t = λ_t A_(t−1) + k_t; log λ per head is the gate
              ``"log_average_decay"`` of the layer (Memory Mosaics).
            * ``"length"``: ζ k/‖k‖, or of values, ζ = s e^c per head with a learned c that starts
              at 0 (Memory Mosaics).
            * ``"filter"``: w k/Λ, the gain of a Kalman filter per key channel that observes the
              value as k times the weight. Λ_t = Λ_(t−1)/(α_t² + p_t Λ_(t−1)) + w_t k_t² is its
              precision, with Λ_0 = s. The decay α of the recipe, per key channel, becomes
              α (1 − w k²/Λ). w and p are the gates ``"observation_precision"`` and
              ``"process_noise"`` of the layer (Kalman linear attention).
            * ``"direction"``: the probe (k ⊙ ξ)/‖k ⊙ ξ‖, source ``"k"`` (RWKV-7's κ̂).
            * ``"product"``: the probe c ⊙ k, source ``"k"``, c per key channel (Gated DeltaNet-2).
            * ``"sum"``: the probe k + c q, source ``"q"``, c per head (Q-Delta).
            * ``"difference"``: q − ξ k, source ``"k"``, ξ per head (Comba).
            * ``"copy"``: the source: k for a probe or for queries, which then have no projection,
              or a gate of the same shape.
            * ``"rate"``: c · source, equal to c at the initial value of the source (Mamba-2's one Δ
              drives ``lr``, and log α = −aΔ). c is a learned constant by default.
            * ``"negative"``: −source (Mamba's Δ).
            * ``"variance"``: target · √(1 − α²), α the source, a decay (LRU, RG-LRU).
            * ``"remainder"``: target · (1 − source): momentum θ then adds a mean of the gradients
              instead of their sum.
            * ``"implicit"``: target/(1 + target ‖k‖²), source ``"k"`` (Longhorn).
            * ``"normalize"``: target/(s + ‖k‖²), source ``"k"`` (NLMS with a ridge s).
            * ``"shrink"``: the log decay log(1 − s · source) of a rate (a ridge s on the weights).
            * ``"diagonal"``: the decay per entry log(1 − source_v k_n²), of a rate η in [0, 1/‖k‖²)
              per value channel: the diagonal of a delta rule's erasure (Longhorn's layer).
            * ``"trapezoid"``: the weights (c, (1 − c) α) of a window of two associations, α the
              source, a decay: the trapezoidal rule of an integral (Mamba-3).
        constant: s > 0.

    Raises:
        RecipeError: a value that its field refuses.

    Examples:
        >>> tie = rc.Tie(target="k", source="log_decay", rule="complement")
        >>> recipe = rc.Recipe(bias=rc.bias.DotProduct(), retention=rc.retention.Decay(per="key"))
        >>> layer = rc.MemoryLayer(8, 2, recipe, rc.LayerOptions(ties=(tie,)))
        >>> layer(torch.randn(1, 4, 8))[0].shape
        torch.Size([1, 4, 8])
    """

    target: str = text()
    source: str = text()
    rule: str = option(dataclasses.MISSING, *TIE_RULES)
    constant: float = number(1.0, above=0)

    def validate(self) -> None:
        targets, sources, _ = TIE_RULES[self.rule]
        if self.target == self.source and self.rule not in SELF_RULES:
            raise RecipeError(f"Tie: {self.target!r} cannot follow itself")
        if _kind(self.target) not in targets:
            raise RecipeError(
                f"Tie(rule={self.rule!r}) cannot make {self.target!r}: it makes "
                f"{_kinds_text(targets)}"
            )
        if _kind(self.source, probe="gate") not in sources:
            raise RecipeError(
                f"Tie(rule={self.rule!r}) cannot follow {self.source!r}: its source is "
                f"{_kinds_text(sources)}"
            )
        if self.rule == "copy" and (self.source == "k") == (_kind(self.target) == "gate"):
            raise RecipeError(
                "Tie(rule='copy') copies k to q, k to a probe and a gate to a gate, not "
                f"{self.source!r} to {self.target!r}"
            )
        if self.rule in SELF_RULES and self.target != self.source:
            raise RecipeError(
                f"Tie(rule={self.rule!r}) changes {self.target!r} itself: set "
                f"source={self.target!r}, not {self.source!r}"
            )

    @property
    def equation(self) -> str:
        """The rule as an equation, with the names of gates and params."""
        letters = {name: f"{name}_t" for name in ("q", "k", "v")} | {"probe": "w_t"}
        target, source = (letters.get(name, name) for name in (self.target, self.source))
        equation = TIE_RULES[self.rule][2]
        constant = f"{self.constant:g}"
        return equation.format(target=target, source=source, s=constant, x=self.target)


def _kind(name: str, probe: str = "probe") -> str:
    """Return the kind of a target or source: itself, or ``"gate"`` for a gate or param."""
    return {"probe": probe}.get(name, name if name in ("q", "k", "v", "angle") else "gate")


def _kinds_text(kinds: tuple[str, ...]) -> str:
    return " or ".join("a gate or param" if kind == "gate" else repr(kind) for kind in kinds)


@suggest_arguments
@dataclass(frozen=True, kw_only=True)
class LayerOptions(_SavedOptions):
    """Options of a `MemoryLayer` around its memory; defaults as in MIRAS 5.4 and ATLAS 5.1.

    Args:
        conv_size: width of the causal depthwise convolution on q, k and v; 0 or ``None``: none.
        conv_bias: whether the convolution adds a learned bias per channel, initially 0.
        conv_activation: ``"silu"`` or ``"none"``, after the convolution (also without one).
        conv_activation_on: projections with this activation: ``"qkv"``, ``"qk"``, ``"q"`` or
            ``"v"``.
        qk_norm: ``"l2"``: queries and keys of unit length per head; ``"rms"``: of length √K;
            ``"scaled"``: keys times K^(−1/2); or ``"none"``.
        qk_norm_eps: ε of the norms of queries and keys, added to their squared lengths.
        qk: ``"input"``: queries and keys are projections; ``"ones"``: they are 1 in every channel
            (for a vector memory that sums).
        key_dim: K, if the layer has no ``head_dim`` (Mamba's 16); V stays d_model / num_heads.
        key_group_size: number of consecutive memories that share a query and a key. Each has its
            own values and gates.
        qk_affine: whether queries and keys are multiplied by learned factors and added to learned
            biases, per head and channel and initially 1, after the norm and before rotations.
        qk_scale: whether all queries, and all keys, are multiplied by learned factors per channel
            after the norm and before rotations: w, initially 1 (``"learned"``), 1 + w, with w
            initially 0 (``"zero_centered"``), or ``"none"``.
        rope_theta: base of the rotary position embedding on q and k, e.g. 10000.0; ``None``: no
            embedding.
        partial_rotary_factor: fraction of the channels of q and k that ``rope_theta`` and
            ``complex_decay`` rotate; the others come last.
        complex_decay: angle of a complex decay per pair of channels: from the token (``"input"``),
            a learned constant (``"learned"``), or ``"none"``. Pairs (i, i + D/2) are real and
            imaginary parts, and share their decay; see `recollect.layer.rotary`.
        token_shift: the input of every projection is x_t + μ ⊙ (x_{t−1} − x_t), with a learned μ
            per channel (``"learned"``), one that also depends on the token (``"input"``), or none
            (``"none"``).
        zero_values: number of the first associations of a token whose value is 0, without a
            projection: they only erase.
        mimo: whether the n > 1 associations of a token have one value v and one set of gates
            (multi-input, multi-output). Association j has the value p_j ⊙ v. A head has n queries,
            with outputs y_j that are gated by σ(g_j ⊙ linear(x)) and summed, Σ_j o_j ⊙ y_j. The
            learned factors p, g and o have one entry per head, j and channel, initially 1/n, 1 and
            1/n.
        value_skip: whether to add D ⊙ v to the memory's output, D learned and initially 1.
            With ``mimo``, output j has the value of association j.
        value_skip_per: one D per channel of each memory (``"value"``), or per memory (``"head"``).
        output_norm: ``"rms"``, or ``"none"``.
        norm_eps: ε of the output norm, added to the mean square.
        norm_group_size: number of consecutive heads that are normalized together, with a learned
            factor per head and channel; ``None``: each head by itself, with one factor per channel
            for all heads.
        norm_before_gate: whether the output norm comes before the output gate, or after it.
        output_gate: ``"silu"`` or ``"sigmoid"``: the output is multiplied by this function of
            linear(x); or ``"none"``.
        output_gate_rank: rank of the output gate's map, which then has a bias: W (V x) + b. A rank
            that is no smaller than the map's sizes is ``None``, a full map without a bias.
        gate_options: `GateOptions` of gates and params by name. Default: from their declarations.
            Any mapping is accepted and stored as pairs.
        ties: gates, queries, keys, values and probes that are computed from others (`Tie`).
        memory_init_scale: standard deviation of a deep memory's initial weights, in units of
            in^(−1/2). Weights behind a link (a softmax, a power) may need other units than those
            that are read. Memories with static weights (`memory.MLP`) start at zero, without this
            scale and ``last_map_init_scale``.
        last_map_init_scale: additional factor of the last map's initial weights. At 0 the memory
            outputs only its residual until the first write. For memories made of linear maps.
        persistent: number of learned pairs per head and channel of d_model that the layer reads
            instead of its tokens (`FeedForward`); 0 memorises the tokens.
        joined: with ``persistent``, whether all heads are one memory of d_model channels.
        num_anchors: number of learned pairs that initialise a deep memory over a kernel's features.

    Raises:
        RecipeError: a value that its field refuses.

    Examples:
        >>> options = rc.LayerOptions(conv_size=0, rope_theta=10000.0, output_gate="none")
        >>> layer = rc.MemoryLayer(8, 2, rc.Recipe(), options)
        >>> layer.options.conv_size, layer.options.qk_norm
        (0, 'l2')
    """

    conv_size: int = validated_field(4, _conv)
    conv_bias: bool = flag(False)
    conv_activation: str = option("silu", "none")
    conv_activation_on: str = option("qkv", "qk", "q", "v")
    qk_norm: str = option("l2", "rms", "scaled", "none")
    qk_norm_eps: float = number(1e-12, above=0)
    qk: str = option("input", "ones")
    key_dim: int | None = integer(None, at_least=1, optional=True)
    key_group_size: int = integer(1, at_least=1)
    qk_affine: bool = flag(False)
    qk_scale: str = option("none", "learned", "zero_centered")
    rope_theta: float | None = number(None, above=1, optional=True)
    partial_rotary_factor: float = number(1.0, above=0, at_most=1)
    complex_decay: str = option("none", "input", "learned")
    token_shift: str = option("none", "learned", "input")
    zero_values: int = integer(0)
    mimo: bool = flag(False)
    value_skip: bool = flag(False)
    value_skip_per: str = option("value", "head")
    output_norm: str = option("rms", "none")
    norm_eps: float = number(1e-6, above=0)
    norm_group_size: int | None = integer(None, at_least=1, optional=True)
    norm_before_gate: bool = flag(True)
    output_gate: str = option("silu", "sigmoid", "none")
    output_gate_rank: int | None = integer(None, at_least=1, optional=True)
    gate_options: tuple[tuple[str, GateOptions], ...] | Mapping[str, GateOptions] = validated_field(
        (), _gates
    )
    ties: tuple[Tie, ...] = validated_field((), _ties)
    memory_init_scale: float = number(1.0, above=0)
    last_map_init_scale: float = number(1.0, at_least=0)
    num_anchors: int = integer(16, at_least=1)
    persistent: float = number(0.0, at_least=0)
    joined: bool = flag(False)

    def validate(self) -> None:
        if self.output_gate == "none" and self.output_gate_rank is not None:
            raise RecipeError(
                f"LayerOptions(output_gate_rank={self.output_gate_rank}) needs an output gate: set "
                "output_gate='silu' or 'sigmoid', or leave output_gate_rank out"
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        missing = {
            f"conv_activation_on={self.conv_activation_on!r}": (
                *("an activation", "conv_activation"),
                self.conv_activation_on != "qkv" and self.conv_activation == "none",
            ),
            f"conv_activation_on={self.conv_activation_on!r}, qk='ones'": (
                *("projections of queries and keys", "qk='input'"),
                self.conv_activation_on in ("q", "qk") and self.qk == "ones",
            ),
            "conv_activation_on='q', ties=...": (
                "a projection of queries, which the tie of q by 'copy' removes",
                "conv_activation_on='qk'",
                self.conv_activation_on == "q"
                and any((tie.target, tie.rule) == ("q", "copy") for tie in self.ties),
            ),
            f"qk_norm_eps={self.qk_norm_eps:g}, qk_norm={self.qk_norm!r}": (
                *("a norm of queries and keys", "qk_norm='l2' or 'rms'"),
                self.qk_norm_eps != defaults["qk_norm_eps"] and self.qk_norm not in ("l2", "rms"),
            ),
            "conv_bias=True": ("a convolution", "conv_size", self.conv_bias and not self.conv_size),
            "value_skip_per='head'": (
                *("a skip", "value_skip"),
                self.value_skip_per == "head" and not self.value_skip,
            ),
            f"norm_eps={self.norm_eps:g}": (
                *("an output norm", "output_norm"),
                self.norm_eps != defaults["norm_eps"] and self.output_norm == "none",
            ),
            "norm_group_size=...": (
                *("an output norm", "output_norm"),
                self.norm_group_size is not None and self.output_norm == "none",
            ),
            "norm_before_gate=False": (
                *("an output norm and an output gate", "output_norm and output_gate"),
                not self.norm_before_gate and "none" in (self.output_norm, self.output_gate),
            ),
        }
        for argument, (part, remedy, is_missing) in missing.items():
            if is_missing:
                raise RecipeError(
                    f"LayerOptions({argument}) needs {part}: set {remedy}, or leave "
                    f"{argument.partition('=')[0]} out"
                )
        for i, tie in enumerate(self.ties):
            rules = [earlier.rule for earlier in self.ties[:i] if earlier.target == tie.target]
            is_gate = tie.target not in ("q", "k", "v")
            later = {other.target for other in self.ties[i:]} - {"q", "k", "v"}
            if tie.target == "log_decay" and any(x.rule == "filter" for x in self.ties[:i]):
                raise RecipeError(
                    "LayerOptions(ties=...): rule 'filter' changes the decay of its keys, so the "
                    "tie of 'log_decay' must come before it"
                )
            if (is_gate and rules) or tie.source in later:
                raise RecipeError(
                    "LayerOptions(ties=...): a gate needs one tie, and the tie of its source must "
                    "come first"
                )
            is_repeated = tie.rule in rules and tie.rule != "previous"
            if is_repeated or (rules and tie.rule in REPLACING_RULES):
                raise RecipeError(
                    f"LayerOptions(ties=...): {tie.target!r} has one tie of rule {tie.rule!r}, and "
                    "rules 'complement' and 'copy' come first"
                )

    def gate(self, name: str) -> GateOptions:
        """Return the options of one gate or param; `GateOptions()` by default."""
        return dict(self.gate_options).get(name, GateOptions())

    def to_dict(self) -> dict[str, Any]:
        gates = {name: gate.to_dict() for name, gate in dict(self.gate_options).items()}
        return {**fields_to_data(self), "gate_options": gates}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        fields = read_fields(cls, data)
        if isinstance(gates := fields.get("gate_options"), Mapping):
            fields["gate_options"] = {name: GateOptions.from_dict(x) for name, x in gates.items()}
        if isinstance(ties := fields.get("ties"), list | tuple):
            fields["ties"] = tuple(Tie.from_dict(tie) for tie in ties)
        return cls(**fields)
