"""Layer options: everything about a memory layer that is not the regression problem.

A recipe says what is memorised and how. How tokens become queries, keys, values and gates, and what
happens to the output, is said here, as plain data beside the recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recollect.choices.member import RecipeError
from recollect.fields import (
    REAL,
    Validated,
    checked,
    flag,
    integer,
    number,
    option,
    real,
    text,
    whole,
)
from recollect.recipe.limit import step_limit
from recollect.wording import named_arguments

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["GateOptions", "LayerOptions", "Options", "Tie"]

TIES = {
    "complement": "k",
    "blend": "k",
    "direction": "probe",
    "rate": "",
    "negative": "",
    "variance": "",
    "implicit": "",
    "diagonal": "",
}
"""Rules of ties, and what each can make: keys, a probe, or (empty) a number of the recipe."""


class Options(Validated):
    """Fields that are checked, and refused as what has no meaning in a recipe."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise RecipeError(str(error)) from None

    @classmethod
    def said(cls, field: str) -> str:
        return f"{cls.__name__}({field}=...)"


def _conv(value: Any) -> int:
    return 0 if value is None else whole()(value)


def _init(value: Any) -> float | tuple[float, ...]:
    several = isinstance(value, list | tuple)
    return tuple(map(real(REAL), value)) if several else real(REAL)(value)


def _gates(value: Any) -> tuple[tuple[str, GateOptions], ...]:
    try:
        pairs = sorted(dict(value).items())
    except (TypeError, ValueError):
        raise ValueError(f"must map names to GateOptions, not {value!r}") from None
    for name, options in pairs:
        if not isinstance(name, str) or not isinstance(options, GateOptions):
            raise ValueError(f"must map names to GateOptions, not {name!r} to {options!r}")
    return tuple(pairs)


def _ties(value: Any) -> tuple[Tie, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(tie, Tie) for tie in value):
        raise ValueError(f"must be a tuple of Tie, not {value!r}")
    return tuple(value)


def _fields(cls: type, data: object) -> dict[str, Any]:
    """The constructor's arguments out of plain data; unknown names are refused."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{cls.__name__} is a mapping of fields, not {type(data).__name__}")
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(data) - set(names), key=str)
    if unknown:
        raise RecipeError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(names)}")
    return dict(data)


@named_arguments
@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """Where one number of the recipe comes from: a gate (per token), or a param (per head).

    The number is ``squash(z)``; z is a projection of the token plus a bias (``"input"``), the bias
    alone (``"learned"``), or the number is the initial value for good (``"fixed"``). What is left
    ``None`` follows from what the recipe declares about the number, see `recollect.layer`.

    Args:
        source: ``"input"``, ``"learned"`` or ``"fixed"``; gates default to the first, params to the
            second and cannot have the first.
        unit: ``"share"``, of the rate ``"lr"`` of normalised steps: a share s of the limit beyond
            which one repeated association diverges, η_t = s_t · 2 (1 − θ_t) / (b Σγ), see
            `recollect.recipe.limit`; between 0 and 1 and beginning at one half unless said
            otherwise, at every width, inner batch, window and momentum. ``"rms"``, of numbers that
            are compared with values or errors: √V, the length of a value whose channels have unit
            root mean square; ``init``, ``low`` and ``high`` are stated in it. ``"mean"``, of the
            correction ``"offset"`` of averaged steps: 1/place, what the mean gives a step at its
            place in the inner batch; ``init``, ``low`` and ``high`` are stated in it, so that
            ``low=-0.8`` keeps at least a fifth, while what is learned stays in the correction's
            own unit and moves as far at every place. ``"own"``: as `recollect.recall` takes the
            number. ``None``: a share for the rates of tokens where
            steps are normalised, else its own.
        squash: ``"sigmoid"``: low + (high − low)·sigmoid(z). ``"softplus"``: low + softplus(z).
            ``"logsigmoid"``: high + logsigmoid(z)/temperature, for log decays (GLA divides by 16).
            ``"exp"``: low + exp(z), or high − exp(z) for what has no lower end. ``"celu"``: z above
            0, and −low (exp(−z/low) − 1) below, which ends at ``low`` < 0. ``"identity"``: z.
        low, high: ends of the squashing, e.g. 0 and 2 for a delta rule with negative eigenvalues; a
            share ends at 1 unless ``high`` says otherwise.
        temperature: > 0; larger values hold a log decay nearer to its upper end.
        init: value at a zero input, in the number's own unit (a logarithm for log decays) or in
            ``unit``, one for all heads or one per head. ``None``: the initial value that the recipe
            declares. If ``low`` or ``high`` excludes that value or is close to it, the gate starts
            inside the range: at a twentieth of the range from that end, or nearer only if the
            declared value is nearer to its own end.
        spread: ≥ 1. Memory times −1/log α of a decay start geometrically spread over the heads
            (over the channels, when per channel), from 1/spread to spread times that of ``init``.
        rank: of the projection; 0 is a full matrix. ``None``: 32 for gates per channel, else full.
        schedule: initial decays by head h and by layer l of L, in place of ``init``.
            ``"dyadic"``: α = 1 − 2^(−5−h). ``"alibi"``: log α = −2^(−8(h+1)/H)·(1 − l/L).
            ``"xpos"``: dyadic, times ζ_i^(1/512) for each pair i of K channels, ζ_i =
            (2i/K + 0.4)/1.4. ``"integers"``: 1, 2, … along the last axis, of any number ≥ 0.

    Raises:
        RecipeError: a value that its field refuses.

    Examples:
        >>> options = rc.LayerOptions(gates={"lr": rc.GateOptions(low=0.0, high=2.0)})
        >>> layer = rc.MemoryLayer(8, 2, rc.Recipe(), options)
        >>> y, state = layer(torch.randn(1, 4, 8))
        >>> y.shape
        torch.Size([1, 4, 8])
    """

    source: str | None = option(None, "input", "learned", "fixed", optional=True)
    unit: str | None = option(None, "share", "rms", "mean", "own", optional=True)
    squash: str | None = option(
        None, "sigmoid", "softplus", "logsigmoid", "exp", "celu", "identity", optional=True
    )
    low: float | None = number(None, optional=True)
    high: float | None = number(None, optional=True)
    temperature: float = number(1.0, above=0)
    init: float | tuple[float, ...] | None = checked(None, _init, optional=True)
    spread: float | None = number(None, at_least=1, optional=True)
    rank: int | None = integer(None, optional=True)
    schedule: str | None = option(None, "dyadic", "alibi", "integers", "xpos", optional=True)

    def validate(self) -> None:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise RecipeError(
                f"GateOptions(low={self.low:g}, high={self.high:g}): low must be below high"
            )
        if self.schedule is not None and (self.init is not None or self.spread is not None):
            raise RecipeError(
                f"GateOptions(schedule={self.schedule!r}) gives the values: drop init and spread"
            )

    def lengths(self, length: float) -> GateOptions:
        """Convert options stated in √V to the number's own unit.

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

    def unit_of(self, name: str, recipe: Recipe) -> str | None:
        """The unit of a number of a recipe; ``None`` where it is stated as the recipe takes it.

        What these options leave open is a share for the rate that a token has of measured steps:
        one of a size of its own would be right for one inner batch, window and momentum only
        (`recollect.recipe.limit`).

        Args:
            name: of the gate or param.
            recipe: that asks for it.
        """
        unit = self.unit
        if unit is None and name == "lr" and step_limit(recipe) is not None:
            unit = "share" if "lr" in {gate.name for gate in recipe.gates()} else None
        return None if unit == "own" else unit

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**data, "init": list(self.init) if isinstance(self.init, tuple) else self.init}

    @classmethod
    def from_dict(cls, data: object) -> GateOptions:
        """Rebuild what `to_dict` wrote; fields left out take their defaults.

        Raises:
            RecipeError: an unknown field, or a value its field refuses.
        """
        return cls(**_fields(cls, data))


@dataclass(frozen=True, kw_only=True)
class Tie(Options):
    """One number that follows another instead of a projection of its own.

    Args:
        target: ``"k"``, or a gate or param of the recipe.
        source: the gate or param it follows, or ``"k"``, the keys before a tie of their own.
        rule: what it then is. Learned numbers of its own are c (for a tied gate) and ξ (per head
            and channel):

            * ``"complement"``: k = 1 − α, α = exp(source) per key channel (HGRN2).
            * ``"blend"``: k ⊙ (1 + ξ (source − 1)), a source per key channel (RWKV-7's k̃).
            * ``"direction"``: the probe (k ⊙ ξ)/‖k ⊙ ξ‖, source ``"k"`` (RWKV-7's κ̂).
            * ``"rate"``: c · source (Mamba-2's one Δ drives ``lr``, and log α = −aΔ).
            * ``"negative"``: −source (Mamba's Δ).
            * ``"variance"``: target · √(1 − α²), α that of the source, a decay (LRU, RG-LRU).
            * ``"implicit"``: target/(1 + target ‖k‖²), source ``"k"`` (Longhorn).
            * ``"diagonal"``: the decay per entry log(1 − source_v k_n²), of a rate η in [0, 1/‖k‖²)
              per value channel: the diagonal of a delta rule's erasure (Longhorn's own layer).

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
    rule: str = option(dataclasses.MISSING, *TIES)

    def validate(self) -> None:
        if self.target == self.source:
            raise RecipeError(f"Tie: {self.target!r} cannot follow itself")
        if self.target != (TIES[self.rule] or self.target) or (
            self.target in ("k", "probe") and not TIES[self.rule]
        ):
            raise RecipeError(
                f"Tie(rule={self.rule!r}) cannot make {self.target!r}: complement and blend make "
                "keys, direction makes a probe, the others make gates"
            )
        if (self.source == "k") != (self.rule in ("direction", "implicit")):
            raise RecipeError(
                f"Tie(rule={self.rule!r}) cannot follow {self.source!r}: direction and implicit "
                "follow the key, the others a gate"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"target": self.target, "source": self.source, "rule": self.rule}

    @classmethod
    def from_dict(cls, data: object) -> Tie:
        """Rebuild what `to_dict` wrote.

        Raises:
            RecipeError: an unknown or missing field, or a value its field refuses.
        """
        fields = _fields(cls, data)
        for name in ("target", "source", "rule"):
            if name not in fields:
                raise RecipeError(f"Tie needs {name}: what follows what, and by which rule")
        return cls(**fields)


@named_arguments
@dataclass(frozen=True, kw_only=True)
class LayerOptions(Options):
    """What a `MemoryLayer` does around its memory; defaults as in MIRAS 5.4 and ATLAS 5.1.

    Args:
        conv: width of the causal depthwise convolution on q, k and v; 0 or ``None`` is none.
        conv_activation: ``"silu"`` or ``"none"``, after the convolution (also when there is none).
        qk_norm: ``"l2"``: queries and keys of unit length per head; ``"rms"``: of length √K;
            ``"scaled"``: keys times K^(−1/2); or ``"none"``.
        qk: ``"input"``: queries and keys are projections; ``"ones"``: they are 1 in every channel
            (a vector memory that only adds up).
        key_dim: K, when the layer is not told ``head_dim`` (Mamba's 16); V stays d_model / heads.
        rope: base of the rotary position embedding on q and k, e.g. 10000.0; ``None`` is none.
        phase: a complex decay's angle per pair of channels: from the token (``"input"``), a learned
            constant (``"learned"``), or ``"none"``. Pairs (i, i + D/2) are then real and imaginary
            parts, and share their decay; see `recollect.layer.rotation`.
        shift: every projection sees x_t + μ ⊙ (x_{t−1} − x_t), with a learned μ per channel
            (``"static"``), one that depends on the token too (``"input"``), or ``"none"``.
        skip: adds D ⊙ v to what is read, D learned per channel, 1 at the start.
        output_norm: ``"rms"`` per head, or ``"none"``.
        output_gate: ``"silu"``: the output is multiplied by SiLU(linear(x)); or ``"none"``.
        gates: for gates and params of the recipe by name; those not named follow their
            declarations. Any mapping is accepted, pairs are kept.
        ties: numbers that follow others.
        memory_scale: deviation of a deep memory's initial weights, in units of in^(−1/2). Weights
            behind a link (a softmax, a power) may need other units than those that are read. Beside
            a base (`memory.MLP`) they begin at zero, and neither this nor ``last_map`` applies.
        last_map: of the last map's initial weights, a factor more; 0 is a memory that says nothing
            until something is written (but for its residual). For memories made of linear maps.
        persistent: the layer reads this many learned pairs per head and channel of d_model, in
            place of its tokens (`FeedForward`); 0 memorises the tokens.
        joined: with ``persistent``, all heads are one memory of d_model channels.
        anchors: learned pairs that a deep memory over a kernel's features starts from.

    Raises:
        RecipeError: a value that its field refuses.

    Examples:
        >>> options = rc.LayerOptions(conv=0, rope=10000.0, output_gate="none")
        >>> layer = rc.MemoryLayer(8, 2, rc.Recipe(), options)
        >>> layer.options.conv, layer.options.qk_norm
        (0, 'l2')
    """

    conv: int = checked(4, _conv)
    conv_activation: str = option("silu", "none")
    qk_norm: str = option("l2", "rms", "scaled", "none")
    qk: str = option("input", "ones")
    key_dim: int | None = integer(None, at_least=1, optional=True)
    rope: float | None = number(None, above=1, optional=True)
    phase: str = option("none", "input", "learned")
    shift: str = option("none", "static", "input")
    skip: bool = flag(False)
    output_norm: str = option("rms", "none")
    output_gate: str = option("silu", "none")
    gates: tuple[tuple[str, GateOptions], ...] | Mapping[str, GateOptions] = checked((), _gates)
    ties: tuple[Tie, ...] = checked((), _ties)
    memory_scale: float = number(1.0, above=0)
    last_map: float = number(1.0, at_least=0)
    anchors: int = integer(16, at_least=1)
    persistent: float = number(0.0, at_least=0)
    joined: bool = flag(False)

    def validate(self) -> None:
        targets = [tie.target for tie in self.ties]
        later = [set(targets[i:]) for i in range(len(targets))]
        pairs = zip(self.ties, later, strict=True)
        early = any(tie.source in rest - {"k"} for tie, rest in pairs)
        if len(set(targets)) < len(targets) or early:
            raise RecipeError(
                "LayerOptions(ties=...): a number follows one other, which follows none or was "
                "tied before"
            )

    def gate(self, name: str) -> GateOptions:
        """Options of one gate or param; those of `GateOptions()` when nothing was said."""
        return dict(self.gates).get(name, GateOptions())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        gates = {name: gate.to_dict() for name, gate in dict(self.gates).items()}
        return {**data, "gates": gates, "ties": [tie.to_dict() for tie in self.ties]}

    @classmethod
    def from_dict(cls, data: object) -> LayerOptions:
        """Rebuild what `to_dict` wrote; fields left out take their defaults.

        Raises:
            RecipeError: an unknown field, or a value its field refuses.
        """
        fields = _fields(cls, data)
        gates = fields.get("gates", {})
        if not isinstance(gates, Mapping):
            raise RecipeError(f"LayerOptions: gates is a mapping, not {type(gates).__name__}")
        fields["gates"] = {name: GateOptions.from_dict(gate) for name, gate in gates.items()}
        ties = fields.get("ties", ())
        if not isinstance(ties, list | tuple):
            raise RecipeError(f"LayerOptions: ties is a list, not {type(ties).__name__}")
        fields["ties"] = tuple(Tie.from_dict(tie) for tie in ties)
        return cls(**fields)
