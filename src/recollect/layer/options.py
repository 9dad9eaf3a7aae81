"""Layer options: everything about a memory layer that is not the regression problem.

A recipe says what is memorised and how. How tokens become queries, keys, values and gates, and what
happens to the output, is said here, as plain data beside the recipe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recollect.choices.member import RecipeError

__all__ = ["GateOptions", "LayerOptions", "Tie"]

SOURCES = ("input", "learned", "fixed")
SQUASHES = ("sigmoid", "softplus", "logsigmoid", "exp", "identity")
SCHEDULES = ("dyadic", "alibi", "integers", "xpos")
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


def _word(where: str, value: object, words: Iterable[str], *, optional: bool = False) -> None:
    if (optional and value is None) or (isinstance(value, str) and value in words):
        return
    raise RecipeError(f"{where} must be one of {', '.join(map(repr, words))}, not {value!r}")


def _real(
    where: str, value: object, *, above: float | None = None, at_least: float | None = None
) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if fits:
        assert isinstance(value, int | float)
        if (above is None or value > above) and (at_least is None or value >= at_least):
            return float(value)
    bound = f" > {above:g}" if above is not None else ""
    bound = f" >= {at_least:g}" if at_least is not None else bound
    raise RecipeError(f"{where} must be a finite number{bound}, not {value!r}")


def _whole(where: str, value: object, *, at_least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return value
    raise RecipeError(f"{where} must be a whole number >= {at_least}, not {value!r}")


def _fields(cls: type, data: object) -> dict[str, Any]:
    """The constructor's arguments out of plain data; unknown names are refused."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{cls.__name__} is a mapping of fields, not {type(data).__name__}")
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(data) - set(names), key=str)
    if unknown:
        raise RecipeError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(names)}")
    return dict(data)


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Where one number of the recipe comes from: a gate (per token), or a param (per head).

    The number is ``squash(z)``; z is a projection of the token plus a bias (``"input"``), the bias
    alone (``"learned"``), or the number is the initial value for good (``"fixed"``). What is left
    ``None`` follows from what the recipe declares about the number, see `recollect.layer`.

    Args:
        source: ``"input"``, ``"learned"`` or ``"fixed"``; gates default to the first, params to the
            second and cannot have the first.
        squash: ``"sigmoid"``: low + (high − low)·sigmoid(z). ``"softplus"``: low + softplus(z).
            ``"logsigmoid"``: high + logsigmoid(z)/temperature, for log decays (GLA divides by 16).
            ``"exp"``: low + exp(z), or high − exp(z) for what has no lower end. ``"identity"``: z.
        low, high: ends of the squashing, e.g. 0 and 2 for a delta rule with negative eigenvalues.
        temperature: > 0; larger values hold a log decay nearer to its upper end.
        init: value at a zero input, in the number's own unit (a logarithm for log decays), one for
            all heads or one per head.
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

    source: str | None = None
    squash: str | None = None
    low: float | None = None
    high: float | None = None
    temperature: float = 1.0
    init: float | tuple[float, ...] | None = None
    spread: float | None = None
    rank: int | None = None
    schedule: str | None = None

    def __post_init__(self) -> None:
        me = "GateOptions"
        _word(f"{me}(source=...)", self.source, SOURCES, optional=True)
        _word(f"{me}(squash=...)", self.squash, SQUASHES, optional=True)
        _word(f"{me}(schedule=...)", self.schedule, SCHEDULES, optional=True)
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                self._set(name, _real(f"{me}({name}=...)", getattr(self, name)))
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise RecipeError(f"{me}(low={self.low:g}, high={self.high:g}): low must be below high")
        self._set("temperature", _real(f"{me}(temperature=...)", self.temperature, above=0))
        if self.spread is not None:
            self._set("spread", _real(f"{me}(spread=...)", self.spread, at_least=1))
        if self.rank is not None:
            _whole(f"{me}(rank=...)", self.rank, at_least=0)
        if isinstance(self.init, list | tuple):
            self._set("init", tuple(_real(f"{me}(init=...)", value) for value in self.init))
        elif self.init is not None:
            self._set("init", _real(f"{me}(init=...)", self.init))
        if self.schedule is not None and (self.init is not None or self.spread is not None):
            raise RecipeError(
                f"{me}(schedule={self.schedule!r}) gives the values: drop init and spread"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

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
class Tie:
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

    target: str
    source: str
    rule: str

    def __post_init__(self) -> None:
        _word("Tie(rule=...)", self.rule, TIES)
        for name in ("target", "source"):
            if not isinstance(getattr(self, name), str):
                raise RecipeError(f"Tie({name}=...) must be a name, not {getattr(self, name)!r}")
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


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
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
            behind a link (a softmax, a power) may need other units than those that are read.
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

    conv: int = 4
    conv_activation: str = "silu"
    qk_norm: str = "l2"
    qk: str = "input"
    key_dim: int | None = None
    rope: float | None = None
    phase: str = "none"
    shift: str = "none"
    skip: bool = False
    output_norm: str = "rms"
    output_gate: str = "silu"
    gates: tuple[tuple[str, GateOptions], ...] | Mapping[str, GateOptions] = ()
    ties: tuple[Tie, ...] = ()
    memory_scale: float = 1.0
    anchors: int = 16
    persistent: float = 0.0
    joined: bool = False

    def __post_init__(self) -> None:
        me = "LayerOptions"
        scale = _real(f"{me}(memory_scale=...)", self.memory_scale, above=0)
        object.__setattr__(self, "memory_scale", scale)
        _whole(f"{me}(anchors=...)", self.anchors, at_least=1)
        object.__setattr__(
            self, "persistent", _real(f"{me}(persistent=...)", self.persistent, at_least=0)
        )
        if not isinstance(self.joined, bool):
            raise RecipeError(f"{me}(joined=...) must be True or False, not {self.joined!r}")
        width = 0 if self.conv is None else _whole(f"{me}(conv=...)", self.conv, at_least=0)
        object.__setattr__(self, "conv", width)
        _word(f"{me}(conv_activation=...)", self.conv_activation, ("silu", "none"))
        _word(f"{me}(qk_norm=...)", self.qk_norm, ("l2", "rms", "scaled", "none"))
        _word(f"{me}(qk=...)", self.qk, ("input", "ones"))
        _word(f"{me}(phase=...)", self.phase, ("input", "learned", "none"))
        _word(f"{me}(shift=...)", self.shift, ("static", "input", "none"))
        if self.key_dim is not None:
            _whole(f"{me}(key_dim=...)", self.key_dim, at_least=1)
        if not isinstance(self.skip, bool):
            raise RecipeError(f"{me}(skip=...) must be True or False, not {self.skip!r}")
        _word(f"{me}(output_norm=...)", self.output_norm, ("rms", "none"))
        _word(f"{me}(output_gate=...)", self.output_gate, ("silu", "none"))
        if self.rope is not None:
            object.__setattr__(self, "rope", _real(f"{me}(rope=...)", self.rope, above=1))
        try:
            pairs = sorted(dict(self.gates).items())
        except (TypeError, ValueError):
            raise RecipeError(
                f"{me}(gates=...) must map names to GateOptions, not {self.gates!r}"
            ) from None
        for name, value in pairs:
            if not isinstance(name, str) or not isinstance(value, GateOptions):
                raise RecipeError(
                    f"{me}(gates=...) must map names to GateOptions, not {name!r} to {value!r}"
                )
        object.__setattr__(self, "gates", tuple(pairs))
        if not isinstance(self.ties, list | tuple) or not all(
            isinstance(tie, Tie) for tie in self.ties
        ):
            raise RecipeError(f"{me}(ties=...) must be a tuple of Tie, not {self.ties!r}")
        object.__setattr__(self, "ties", tuple(self.ties))
        targets = [tie.target for tie in self.ties]
        later = [set(targets[i:]) for i in range(len(targets))]
        pairs = zip(self.ties, later, strict=True)
        early = any(tie.source in rest - {"k"} for tie, rest in pairs)
        if len(set(targets)) < len(targets) or early:
            raise RecipeError(
                f"{me}(ties=...): a number follows one other, which follows none or was tied before"
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
