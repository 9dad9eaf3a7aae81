"""Compositions of mixers: in sequence, as a gate, as context, as a residual, or as a mixture.

Each composition is frozen data with its equations. The layers are in `sequential`, `as_context`,
`residual_memory` and `routed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from recollect.blocks.cached import CachedMemory
from recollect.blocks.field_values import gate_name, gate_names, mixers
from recollect.blocks.levels import Levels
from recollect.blocks.local import LocalMemories
from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer
from recollect.blocks.self_modifying import SelfModifyingMemory
from recollect.blocks.slots import SlotMemory
from recollect.fields import integer, number, option, validated_field
from recollect.layer.options import LayerOptions
from recollect.messages import RecipeError, short_repr
from recollect.recipe.files import read_data
from recollect.recipe.recipe import Recipe
from recollect.serialization import limited_nesting, read_fields

__all__ = [
    "KINDS",
    "LIST_FIELDS",
    "MemoryAsContext",
    "MemoryAsGate",
    "MixtureOfMemories",
    "ResidualMemory",
    "Sequential",
    "load_recipe_mixer",
    "read_mixer",
]

LIST_FIELDS = ("parts", "memories", "local")
"""Fields that are lists of mixers."""


class _ListMixer(Mixer):
    """Base of compositions that take a list of mixers as positional arguments."""

    list_field: ClassVar[str]

    def _set_fields(self, **fields: Any) -> None:
        """Set and check the fields of a frozen dataclass."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Mixer:
        others = dict(fields)
        return cls(*others.pop(cls.list_field), **others)

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {str(index): part for index, part in enumerate(getattr(self, self.list_field))}


@dataclass(frozen=True, init=False)
class Sequential(_ListMixer):
    """Mixers in sequence: y = m_n(… m_1(x)). Titans' MAL is a memory followed by attention.

    Args:
        *parts: mixers, or values that `as_mixer` converts, in the order of application.
        persistent: number of learned tokens in front of every document.

    Raises:
        RecipeError: no part, or a window of attention that loses the persistent tokens.

    Examples:
        >>> chain = rc.blocks.Sequential("titans", "sliding_window_attention")
        >>> list(chain.children)
        ['0', '1']
        >>> rc.blocks.read_mixer(chain.to_dict()) == chain
        True
    """

    kind: ClassVar[str] = "sequential"
    mixer_fields: ClassVar[tuple[str, ...]] = ("parts",)
    list_field: ClassVar[str] = "parts"

    parts: tuple[Mixer, ...] = validated_field(dataclasses.MISSING, mixers)
    persistent: int = integer(0, size=True)

    def __init__(self, *parts: Any, persistent: int = 0) -> None:
        self._set_fields(parts=parts, persistent=persistent)

    def validate(self) -> None:
        _check_persistent(self.children, self.persistent)

    def streams(self, T: int) -> Mapping[str, Stream]:
        return {name: Stream(tokens=T + self.persistent) for name in self.children}

    @property
    def equations(self) -> tuple[str, ...]:
        output = _input_text(self.persistent)
        for name in self.children:
            output = f"m_{name}({output})"
        return (f"y = {output}",)


# Fields of mixers accept `Any`: the constructor converts names and presets by `as_mixer`.
@dataclass(frozen=True)
class MemoryAsGate(Mixer):
    """Two mixers of the same tokens, one as the gate of the other (Titans' MAG, eqs. 26–28).

    y = w_a ⊙ RMS(attention(x)) ⊙ σ(w_m ⊙ RMS(memory(x))), w learned per channel.

    Args:
        memory: the mixer whose normalised output is the gate.
        attention: the mixer whose normalised output is gated.
        persistent: number of learned tokens in front of every document, for both mixers.

    Raises:
        RecipeError: not a mixer, or a window of attention that loses the persistent tokens.

    Examples:
        >>> rc.blocks.MemoryAsGate("titans", "sliding_window_attention").persistent
        0
    """

    kind: ClassVar[str] = "memory_as_gate"
    mixer_fields: ClassVar[tuple[str, ...]] = ("memory", "attention")

    memory: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    attention: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    _: KW_ONLY
    persistent: int = integer(0, size=True)

    def validate(self) -> None:
        _check_persistent(self.children, self.persistent)

    def streams(self, T: int) -> Mapping[str, Stream]:
        return {name: Stream(tokens=T + self.persistent) for name in self.children}

    @property
    def equations(self) -> tuple[str, ...]:
        x = _input_text(self.persistent)
        return (f"y = w_a ⊙ RMS(attention({x})) ⊙ σ(w_m ⊙ RMS(memory({x})))",)


@dataclass(frozen=True)
class MemoryAsContext(Mixer):
    """A memory as the context of attention to segments (Titans' MAC, eqs. 21–25).

    For a segment of C tokens that starts after the memory M has learned all segments before it::

        h_j = w_h ⊙ RMS(M(q(x_j)))                            read, not written           (21)
        y_j = attention of x_j to [persistent, h_1 … h_j, x_1 … x_j]                      (22–23)
        M_j = M_(j−1) having learned z_j = w_z ⊙ RMS(y_j)                                 (24)
        o_j = w_a ⊙ RMS(y_j) ⊙ σ(w_m ⊙ RMS(M_j(q(z_j))))                                  (25)

    Token j attends to retrievals of tokens ≤ j only. All retrievals of a segment read the memory as
    of the start of the segment. `docs/design/blocks.md` has the derivation, and the reason for the
    norms.

    Args:
        memory: a recipe that can be read without being written.
        attention: any mixer; its state is reset at the start of every segment.
        segment: C ≥ 1, counted from the start of a document.
        persistent: number of learned tokens in front of every segment.

    Raises:
        RecipeError: a memory that cannot be read without writing, or a segment below 1.

    Examples:
        >>> mac = rc.blocks.MemoryAsContext(
        ...     "titans", "softmax_attention", segment=128, persistent=8
        ... )
        >>> mac.segment
        128
    """

    kind: ClassVar[str] = "memory_as_context"
    mixer_fields: ClassVar[tuple[str, ...]] = ("memory", "attention")

    memory: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    attention: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    _: KW_ONLY
    segment: int = integer(at_least=1, size=True)
    persistent: int = integer(0, size=True)

    def validate(self) -> None:
        reason = _why_not_readable(self.memory)
        if reason:
            raise ValueError(
                f"MemoryAsContext reads its memory without writing, and {reason}: take another "
                "memory, or MemoryAsGate or Sequential, which only write and read token by token"
            )
        _check_persistent({"attention": self.attention}, self.persistent)

    def streams(self, T: int) -> Mapping[str, Stream]:
        segments = max(1, -(-T // self.segment))
        tokens = self.persistent + 2 * min(self.segment, T)
        return {
            "memory": Stream(tokens=T, retrieval_segment=self.segment),
            "attention": Stream(rows=segments, tokens=tokens, tokens_per_token=2, restarts=True),
        }

    @property
    def equations(self) -> tuple[str, ...]:
        context = "[p, h_1 … h_j, x_1 … x_j]" if self.persistent else "[h_1 … h_j, x_1 … x_j]"
        memory = f"M as it was when the segment of {self.segment} tokens began"
        return (
            f"h_j = w_h ⊙ RMS(M(q(x_j))), {memory}",
            f"y_j = attention of x_j to {context}, of this segment",
            "M_j = M_(j−1) having learned z_j = w_z ⊙ RMS(y_j)",
            "o_j = w_a ⊙ RMS(y_j) ⊙ σ(w_m ⊙ RMS(M_j(q(z_j))))",
        )

    @property
    def grows(self) -> bool:
        return self.memory.grows  # the state of the attention is reset with every segment


@dataclass(frozen=True)
class ResidualMemory(Mixer):
    """A second memory that learns the errors of the first one (Lai et al. 2025).

    With q, k, v of the first part's layer, M the first memory and R the second::

        r_t = clip(v_t − M_(t−1)(k_t))
        M_t = M_(t−1) having learned (k_t, v_t),   R_t = R_(t−1) having learned (k_t, r_t)
        y_t = a_t M_t(q_t) + g_t R_t(q_t)

    M_(t−1)(k_t) is the output of the first memory for the key before the token is written, so token
    t depends on no later token. The layer's norm, gate and output map follow the sum.

    Args:
        first: a recipe with its layer.
        second: a recipe with the layer options of its gates, params and initial memory; queries,
            keys and values are those of ``first``.
        clip: c > 0: each channel of r_t is clipped to [−c, c]; ``None``: no clipping.
        read: ``"after"``: M_t(q_t); ``"before"``: M_(t−1)(q_t), so that only R_t contributes
            token t's own association to y_t.
        share: names of gates that the second memory takes from the first.
        weigh_first: name of the first recipe's gate that is a_t, one value per head. A logarithm
            such as ``"log_decay"`` is exponentiated. Default: a_t = 1.
        weigh_second: name of the second recipe's gate that is g_t. Default: g_t = 1.

    Raises:
        RecipeError: a part that is a composition, a first memory that cannot be read without
            writing, or the name of a gate that a recipe does not have.

    Examples:
        >>> boosted = rc.blocks.ResidualMemory(
        ...     "gated_delta_net", "gated_delta_net", share=["log_decay"]
        ... )
        >>> boosted.equations[0]
        'r_t = v_t − M_(t−1)(k_t)'
    """

    kind: ClassVar[str] = "residual_memory"
    mixer_fields: ClassVar[tuple[str, ...]] = ("first", "second")

    first: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    second: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    _: KW_ONLY
    clip: float | None = number(None, above=0, optional=True)
    read: str = option("after", "before")
    share: tuple[str, ...] | list[str] = validated_field((), gate_names)
    weigh_first: str | None = validated_field(None, gate_name, optional=True)
    weigh_second: str | None = validated_field(None, gate_name, optional=True)

    def validate(self) -> None:
        reason = _why_not_readable(self.first) or _why_read_is_gated(self.first)
        if reason:
            raise ValueError(
                "ResidualMemory reads its first memory at a key before the key is written, and "
                f"{reason}: take another first memory"
            )
        first, second = self.first, self.second
        if not isinstance(second, RecipeMixer) or second.options.persistent:
            raise ValueError(
                "the second memory of ResidualMemory learns the residuals of the first, which "
                "needs one recipe that is written: take a recipe, or Sequential for a composition"
            )
        assert isinstance(first, RecipeMixer)
        for part in (first, second):
            if part.recipe.associations_per_token > 1:
                raise ValueError(
                    "ResidualMemory takes one association per token, and "
                    f"{part.recipe.algorithm.title} "
                    f"takes {part.recipe.associations_per_token}: use updates_per_token=1"
                )
        if second.recipe.memory.is_elementwise != first.recipe.memory.is_elementwise:
            raise ValueError(
                "the memories of ResidualMemory share keys and values, so both must have one "
                "weight per channel, or both a matrix"
            )
        gates = [{gate.name: gate.axes for gate in leaf.recipe.gates()} for leaf in (first, second)]
        for name in self.share:
            if any(name not in known for known in gates) or gates[0][name] != gates[1][name]:
                both = [n for n in gates[0] if gates[1].get(n) == gates[0][n]]
                raise ValueError(
                    f"ResidualMemory(share=...) names {name!r}, which is not a gate of both "
                    f"memories; both have: {', '.join(both) or 'none'}"
                )
        weights = (("weigh_first", self.weigh_first), ("weigh_second", self.weigh_second))
        for (field, name), known in zip(weights, gates, strict=True):
            if name is not None and known.get(name) != ():
                scalars = [n for n, axes in known.items() if axes == ()]
                raise ValueError(
                    f"ResidualMemory({field}={name!r}) is not a gate of that memory with one "
                    f"number per head; it has: {', '.join(scalars) or 'none'}"
                )

    def streams(self, T: int) -> Mapping[str, Stream]:
        return {"first": Stream(tokens=T, queries=1), "second": Stream(tokens=T)}

    @property
    def equations(self) -> tuple[str, ...]:
        error = "v_t − M_(t−1)(k_t)"
        residual = error if self.clip is None else f"clip({error}, ±{self.clip:g})"
        at = "t" if self.read == "after" else "(t−1)"
        first, second = self.first, self.second
        assert isinstance(first, RecipeMixer) and isinstance(second, RecipeMixer)
        weights = [
            "" if name is None else f"exp({name})_t " if name in logs else f"{name}_t "
            for name, logs in (
                (self.weigh_first, first.recipe.log_gates),
                (self.weigh_second, second.recipe.log_gates),
            )
        ]
        shared = f", with the first's {', '.join(self.share)}" if self.share else ""
        return (
            f"r_t = {residual}",
            f"M learns (k_t, v_t), R learns (k_t, r_t){shared}",
            f"y_t = {weights[0]}M_{at}(q_t) + {weights[1]}R_t(q_t)",
        )


@dataclass(frozen=True, init=False)
class MixtureOfMemories(_ListMixer):
    """A mixture of memories: each token is written to and read from k of M (Du et al. 2025).

    With p = softmax(W x_t) over the M memories, S the k largest of them and m_j the mixers::

        y_t = Σ_(j ∈ S) p_j / (Σ_(i ∈ S) p_i) · m_j(x_t) + m_shared(x_t)

    The state of a memory outside S does not change: it does not decay, and its convolution,
    positions and windows count its own tokens only. At ``top=1`` the weight is 1 for every p, so
    the router learns from the balance loss only.

    A model adds ``router_aux_loss_coef`` times the load-balancing loss to its training loss
    (Fedus et al. 2022, eqs. 4–6): M Σ_j f_j P_j, f_j the fraction of tokens that are routed to
    memory j and P_j the mean of p_j. The loss is k if all memories are used equally.

    Args:
        *memories: M mixers, or values that `as_mixer` converts; also one list of them.
        top: k, from 1 to M.
        shared: mixer of all tokens, or ``None``.

    Raises:
        RecipeError: no memory, or a ``top`` above their number.

    Examples:
        >>> mixture = rc.blocks.MixtureOfMemories(["gla"] * 4, top=2, shared="gla")
        >>> list(mixture.children)
        ['0', '1', '2', '3', 'shared']
    """

    kind: ClassVar[str] = "mixture_of_memories"
    mixer_fields: ClassVar[tuple[str, ...]] = ("memories", "shared")
    list_field: ClassVar[str] = "memories"

    memories: tuple[Mixer, ...] = validated_field(dataclasses.MISSING, mixers)
    top: int = integer(at_least=1)
    shared: Mixer | None = validated_field(None, as_mixer, optional=True)

    def __init__(self, *memories: Any, top: int, shared: Any = None) -> None:
        if len(memories) == 1 and isinstance(memories[0], list | tuple):
            memories = tuple(memories[0])  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        self._set_fields(memories=memories, top=top, shared=shared)

    def validate(self) -> None:
        if self.top > len(self.memories):
            raise ValueError(
                f"MixtureOfMemories(top={self.top}) chooses among {len(self.memories)} memories: "
                "give more memories, or a smaller top"
            )

    @property
    def children(self) -> Mapping[str, Mixer]:
        memories = super().children
        return memories if self.shared is None else {**memories, "shared": self.shared}

    def streams(self, T: int) -> Mapping[str, Stream]:
        M = len(self.memories)
        routed = Stream(tokens=-(-T * self.top // M), tokens_per_token=self.top / M)
        return {name: Stream(tokens=T) if name == "shared" else routed for name in self.children}

    @property
    def equations(self) -> tuple[str, ...]:
        shared = "" if self.shared is None else " + m_shared(x)"
        return (
            f"S = the {self.top} largest of p = softmax(W x), over {len(self.memories)} memories",
            f"y = Σ_(j ∈ S) p_j / (Σ_(i ∈ S) p_i) · m_j(x){shared}; the others do not see x",
        )


KINDS: Mapping[str, type[Mixer]] = {
    cls.kind: cls
    for cls in (
        *(Sequential, MemoryAsGate, MemoryAsContext, SelfModifyingMemory),
        *(ResidualMemory, MixtureOfMemories, SlotMemory, CachedMemory, Levels, LocalMemories),
    )
}
"""Compositions by their names in JSON."""


@limited_nesting()
def read_mixer(data: Any) -> Mixer:
    """Rebuild a mixer from the result of `Mixer.to_dict`, without running code in it.

    Args:
        data: ``{"recipe": ..., "options": ...}``, or ``{"mixer": kind, ...}`` with the fields of a
            composition.

    Raises:
        RecipeError: an unknown kind or field, a missing field, an invalid value, or mixers nested
            deeper than Python's recursion limit.

    Examples:
        >>> gated = rc.blocks.MemoryAsGate("gated_delta_net", "sliding_window_attention")
        >>> rc.blocks.read_mixer(gated.to_dict()) == gated
        True
    """
    if not isinstance(data, Mapping) or not {"mixer", "recipe"} & set(data):
        raise RecipeError(
            "a mixer is {'recipe': ..., 'options': ...} or {'mixer': kind, ...}, not "
            f"{short_repr(data)}"
        )
    if "mixer" not in data:
        fields = read_fields(RecipeMixer, data)
        options = LayerOptions.from_dict(fields.get("options", {}))
        return RecipeMixer(recipe=Recipe.from_dict(fields["recipe"]), options=options)
    kind = data["mixer"]
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RecipeError(f"there is no mixer {short_repr(kind)}; there are {', '.join(KINDS)}")
    fields = read_fields(cls, data, tag="mixer")
    for name in cls.mixer_fields:
        value = fields.get(name)
        if isinstance(value, list | tuple):
            fields[name] = [read_mixer(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        elif name in LIST_FIELDS:
            raise RecipeError(
                f"{cls.__name__}: {name} must be a list of mixers, not {short_repr(value)}"
            )
        elif value is not None:
            fields[name] = read_mixer(value)
    return cls.from_fields(fields)


def load_recipe_mixer(path: Path) -> RecipeMixer:
    """Return the recipe in a JSON or TOML file, with layer options if the file contains both."""
    data = read_data(path)
    has_options = isinstance(data, Mapping) and set(data) == {"recipe", "options"}
    try:
        return cast(RecipeMixer, read_mixer(data if has_options else {"recipe": data}))
    except RecipeError as error:
        raise type(error)(f"{path}: {error}") from None


def _input_text(persistent: int) -> str:
    """Input of parts that run over the persistent tokens and the text."""
    return "[p, x]" if persistent else "x"


def _why_not_readable(mixer: Mixer) -> str:
    """Return the reason why a mixer cannot be read without writing; empty if it can."""
    if not isinstance(mixer, RecipeMixer):
        return f"rc.blocks.{type(mixer).__name__} is not a single memory"
    memory = mixer.recipe.memory
    if mixer.options.persistent:
        return "LayerOptions(persistent=...) is never written"
    if mixer.options.value_skip:
        return "LayerOptions(value_skip=True) adds the value of a token to its output"
    if memory.read.bonus != 0.0:
        return f"{memory.brief} reads the token's own association with a bonus"
    return ""


def _why_read_is_gated(mixer: Mixer) -> str:
    """Return the reason why an output depends on more than memory and query; empty if not."""
    assert isinstance(mixer, RecipeMixer)
    recipe = mixer.recipe
    if recipe.memory.read.transposed:
        return f"{recipe.memory.brief} reads Mᵀ q and not M k"
    if recipe.memory.read.when != "after":
        return f"{recipe.memory.brief} reads before it writes: set read='before' of ResidualMemory"
    if recipe.read_gates:
        names = ", ".join(sorted(recipe.read_gates))
        return f"its output also depends on the gates {names} of the reading token"
    return ""


def _check_persistent(parts: Mapping[str, Mixer], persistent: int) -> None:
    """Check that no window of attention loses the tokens in front of the text."""
    for name, leaf, num_prefix_tokens in _leaves_with_prefix(parts, persistent):
        context = leaf.recipe.context
        keeps, num_sinks = context.num_kept, context.num_sinks
        if leaf.recipe.nonparametric and keeps is not None and num_sinks < num_prefix_tokens:
            raise ValueError(
                f"all tokens must read the persistent={num_prefix_tokens} tokens, which leave the "
                f"window of {name}, {context.brief}: restrict it by "
                f"context.SinkWindow(size={keeps - num_sinks}, num_sinks={num_prefix_tokens})"
            )


_FULL_STREAM = (
    *(Sequential, MemoryAsGate, ResidualMemory, SlotMemory, LocalMemories),
    SelfModifyingMemory,
)
"""Compositions whose parts run over all tokens from the first one on."""


def _leaves_with_prefix(
    parts: Mapping[str, Mixer], num_prefix_tokens: int
) -> Iterator[tuple[str, RecipeMixer, int]]:
    """Yield the recipes that run over tokens in front of the text, and the number of tokens.

    Segments of `MemoryAsContext` start without these tokens, and memories of `MixtureOfMemories`
    receive some of them only.
    """
    for name, part in parts.items():
        if isinstance(part, RecipeMixer):
            yield name, part, num_prefix_tokens
            continue
        children: Mapping[str, Mixer] = {}
        if isinstance(part, _FULL_STREAM):
            children = part.children
        elif isinstance(part, MixtureOfMemories) and part.shared is not None:
            children = {"shared": part.shared}
        inner = num_prefix_tokens + getattr(part, "persistent", 0)
        for path, leaf, count in _leaves_with_prefix(children, inner):
            yield f"{name}.{path}", leaf, count
