"""Compositions of mixers: after each other, beside each other, one as the context of another.

Each is frozen data with its equations. The layers are in `beside`, `as_context`, `boosted` and
`routed`.
"""

# More than 400 lines: every composition with its equations, arguments and an example.

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from recollect.blocks.mixers import Leaf, Mixer, Stream, mixer_of
from recollect.fields import checked, integer, number, option
from recollect.wording import shown

__all__ = ["SEVERAL", "AsContext", "Boosted", "Chain", "Gated", "Routed", "Together"]

SEVERAL = ("parts", "memories")
"""Fields that hold several mixers."""


def _mixers(value: Any) -> tuple[Mixer, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("needs at least one mixer")
    return tuple(mixer_of(part) for part in value)  # pyright: ignore[reportUnknownVariableType]


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be the name of a gate, not {shown(value)}")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of names of gates, not {shown(value)}")
    return tuple(_name(one) for one in value)  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True, init=False)
class Chain(Mixer):
    """One mixer after the other, y = m_n(… m_1(x)): Titans' MAL is a memory, then attention.

    Args:
        *parts: mixers, or what stands for one (`mixer_of`), in the order in which tokens meet them.
        persistent: learned tokens that stand before every document.

    Raises:
        RecipeError: no part, or one whose window would lose the persistent tokens.

    Examples:
        >>> chain = rc.blocks.Chain("titans", "sliding_window_attention")
        >>> list(chain.children)
        ['0', '1']
        >>> rc.blocks.read_mixer(chain.to_dict()) == chain
        True
    """

    kind: ClassVar[str] = "chain"
    holds: ClassVar[tuple[str, ...]] = ("parts",)

    parts: tuple[Mixer, ...] = checked(dataclasses.MISSING, _mixers)
    persistent: int = integer(0, size=True)

    def __init__(self, *parts: Any, persistent: int = 0) -> None:
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "persistent", persistent)
        self.__post_init__()

    def validate(self) -> None:
        _check_persistent(self, self.persistent)

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {str(index): part for index, part in enumerate(self.parts)}

    @classmethod
    def rebuilt(cls, fields: Mapping[str, Any]) -> Mixer:
        rest = {name: value for name, value in fields.items() if name != "parts"}
        return cls(*fields["parts"], **rest)

    def streams(self, T: int) -> Mapping[str, Stream]:
        return _after(self, T)

    def own_parameters(self, d_model: int) -> Mapping[str, int]:
        return {"other": d_model * self.persistent}

    @property
    def equations(self) -> tuple[str, ...]:
        said = _behind(self.persistent)
        for name in self.children:
            said = f"m_{name}({said})"
        return (f"y = {said}",)


@dataclass(frozen=True, init=False)
class Gated(Mixer):
    """Two mixers beside each other, one the gate of the other (Titans' MAG, eqs. 26–28).

    y = w_a ⊙ RMS(attention(x)) ⊙ σ(w_m ⊙ RMS(memory(x))), w learned per channel.

    Args:
        memory: the mixer whose normed output is the gate.
        attention: the mixer whose normed output passes it.
        persistent: learned tokens that stand before every document, for both.

    Raises:
        RecipeError: no mixer, or one whose window would lose the persistent tokens.

    Examples:
        >>> rc.blocks.Gated("titans", "sliding_window_attention").persistent
        0
    """

    kind: ClassVar[str] = "gated"
    holds: ClassVar[tuple[str, ...]] = ("memory", "attention")

    memory: Mixer = checked(dataclasses.MISSING, mixer_of)
    attention: Mixer = checked(dataclasses.MISSING, mixer_of)
    persistent: int = integer(0, size=True)

    def __init__(self, memory: Any, attention: Any, *, persistent: int = 0) -> None:
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "persistent", persistent)
        self.__post_init__()

    def validate(self) -> None:
        _check_persistent(self, self.persistent)

    def streams(self, T: int) -> Mapping[str, Stream]:
        return _after(self, T)

    def own_parameters(self, d_model: int) -> Mapping[str, int]:
        return {"norms": 2 * d_model, "other": d_model * self.persistent}

    @property
    def equations(self) -> tuple[str, ...]:
        x = _behind(self.persistent)
        return (f"y = w_a ⊙ RMS(attention({x})) ⊙ σ(w_m ⊙ RMS(memory({x})))",)

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {"memory": self.memory, "attention": self.attention}


@dataclass(frozen=True, init=False)
class AsContext(Mixer):
    """A memory as the context of attention to segments (Titans' MAC, eqs. 21–25).

    For a segment S of C tokens that begins after the memory M has learned all segments before it::

        h_j = w_h ⊙ RMS(M(q(x_j)))                            read, not written           (21)
        y_j = attention of x_j to [persistent, h_1 … h_j, x_1 … x_j]                      (22–23)
        M_j = M_(j−1) having learned z_j = w_z ⊙ RMS(y_j)                                 (24)
        o_j = w_a ⊙ RMS(y_j) ⊙ σ(w_m ⊙ RMS(M_j(q(z_j))))                                  (25)

    Token j meets retrievals of tokens ≤ j only, and all of them from the memory as it was when the
    segment began. `docs/design/blocks.md` has the derivation, and why there are norms between.

    Args:
        memory: a recipe that can be read without being written.
        attention: any mixer; it begins anew with every segment.
        segment: C ≥ 1, counted from the start of a document.
        persistent: learned tokens that stand before every segment.

    Raises:
        RecipeError: a memory that cannot be read without writing, or a segment below 1.

    Examples:
        >>> mac = rc.blocks.AsContext("titans", "softmax_attention", segment=128, persistent=8)
        >>> mac.segment
        128
    """

    kind: ClassVar[str] = "as_context"
    holds: ClassVar[tuple[str, ...]] = ("memory", "attention")

    memory: Mixer = checked(dataclasses.MISSING, mixer_of)
    attention: Mixer = checked(dataclasses.MISSING, mixer_of)
    segment: int = integer(at_least=1, size=True)
    persistent: int = integer(0, size=True)

    def __init__(self, memory: Any, attention: Any, *, segment: int, persistent: int = 0) -> None:
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "segment", segment)
        object.__setattr__(self, "persistent", persistent)
        self.__post_init__()

    def validate(self) -> None:
        reason = _unreadable(self.memory)
        if reason:
            raise ValueError(
                f"AsContext reads its memory without writing, and {reason}: take another memory, "
                "or Gated or Chain, which only write and read token by token"
            )
        _check_persistent(self, self.persistent, of={"attention": self.attention})

    def streams(self, T: int) -> Mapping[str, Stream]:
        segments = max(1, -(-T // self.segment))
        tokens = self.persistent + 2 * min(self.segment, T)
        return {
            "memory": Stream(tokens=T, asks=self.segment),
            "attention": Stream(rows=segments, tokens=tokens, per_token=2, fresh=True),
        }

    def own_parameters(self, d_model: int) -> Mapping[str, int]:
        return {"norms": 4 * d_model, "other": d_model * self.persistent}

    @property
    def equations(self) -> tuple[str, ...]:
        context = "[p, h_1 … h_j, x_1 … x_j]" if self.persistent else "[h_1 … h_j, x_1 … x_j]"
        began = f"M as it was when the segment of {self.segment} tokens began"
        return (
            f"h_j = w_h ⊙ RMS(M(q(x_j))), {began}",
            f"y_j = attention of x_j to {context}, of this segment",
            "M_j = M_(j−1) having learned z_j = w_z ⊙ RMS(y_j)",
            "o_j = w_a ⊙ RMS(y_j) ⊙ σ(w_m ⊙ RMS(M_j(q(z_j))))",
        )

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {"memory": self.memory, "attention": self.attention}

    @property
    def grows(self) -> bool:
        return self.memory.grows  # the attention begins anew with every segment


@dataclass(frozen=True, init=False)
class Together(Mixer):
    """Mixers beside each other, summed: y = m_1(x) + … + m_n(x).

    A slow memory of everything and a fast one of the latest are read by every token, and neither
    sees what the other says. Each part has its own projections, norm and output map, which is
    where weights of the sum would stand: there are no others.

    Args:
        *parts: mixers, or what stands for one (`mixer_of`).
        persistent: learned tokens that stand before every document, for all of them.

    Raises:
        RecipeError: no part, or one whose window would lose the persistent tokens.

    Examples:
        >>> both = rc.blocks.Together("retnet", "sliding_window_attention")
        >>> both.equations
        ('y = m_0(x) + m_1(x)',)
    """

    kind: ClassVar[str] = "together"
    holds: ClassVar[tuple[str, ...]] = ("parts",)

    parts: tuple[Mixer, ...] = checked(dataclasses.MISSING, _mixers)
    persistent: int = integer(0, size=True)

    def __init__(self, *parts: Any, persistent: int = 0) -> None:
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "persistent", persistent)
        self.__post_init__()

    def validate(self) -> None:
        _check_persistent(self, self.persistent)

    @classmethod
    def rebuilt(cls, fields: Mapping[str, Any]) -> Mixer:
        rest = {name: value for name, value in fields.items() if name != "parts"}
        return cls(*fields["parts"], **rest)

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {str(index): part for index, part in enumerate(self.parts)}

    def streams(self, T: int) -> Mapping[str, Stream]:
        return _after(self, T)

    def own_parameters(self, d_model: int) -> Mapping[str, int]:
        return {"other": d_model * self.persistent}

    @property
    def equations(self) -> tuple[str, ...]:
        x = _behind(self.persistent)
        return ("y = " + " + ".join(f"m_{name}({x})" for name in self.children),)


@dataclass(frozen=True, init=False)
class Boosted(Mixer):
    """A second memory that learns what the first one gets wrong (Lai et al. 2025).

    With q, k, v of the first part's layer, M the first memory and R the second::

        r_t = clip(v_t − M_(t−1)(k_t))
        M_t = M_(t−1) having learned (k_t, v_t),   R_t = R_(t−1) having learned (k_t, r_t)
        y_t = a_t M_t(q_t) + g_t R_t(q_t)

    M_(t−1)(k_t) is what the first memory says of the key before the token is written: token t sees
    no later one. The layer's norm, gate and output map follow the sum.

    Args:
        first: a recipe with its layer.
        second: a recipe, and of its layer the options of gates, params and initial memory; queries,
            keys and values are those of ``first``.
        clip: c > 0, each channel of r_t is held within [−c, c]; ``None`` leaves it.
        read: ``"after"``: M_t(q_t); ``"before"``: M_(t−1)(q_t), so that of token t's association
            y_t knows only what R_t says.
        share: names of gates that the second memory takes from the first.
        weigh_first: name of the first recipe's gate that is a_t, one number per head; a logarithm
            (``"log_decay"``) enters as what it is the logarithm of. 1 when omitted.
        weigh_second: name of the second recipe's gate that is g_t.

    Raises:
        RecipeError: a part that is a composition; a first memory that cannot be read without
            writing; gates that are not there.

    Examples:
        >>> boosted = rc.blocks.Boosted("gated_delta_net", "gated_delta_net", share=["log_decay"])
        >>> boosted.equations[0]
        'r_t = v_t − M_(t−1)(k_t)'
    """

    kind: ClassVar[str] = "boosted"
    holds: ClassVar[tuple[str, ...]] = ("first", "second")

    first: Mixer = checked(dataclasses.MISSING, mixer_of)
    second: Mixer = checked(dataclasses.MISSING, mixer_of)
    clip: float | None = number(None, above=0, optional=True)
    read: str = option("after", "before")
    share: tuple[str, ...] = checked((), _names)
    weigh_first: str | None = checked(None, _name, optional=True)
    weigh_second: str | None = checked(None, _name, optional=True)

    def __init__(
        self,
        first: Any,
        second: Any,
        *,
        clip: float | None = None,
        read: str = "after",
        share: Sequence[str] = (),
        weigh_first: str | None = None,
        weigh_second: str | None = None,
    ) -> None:
        given = {"first": first, "second": second, "clip": clip, "read": read, "share": share}
        given |= {"weigh_first": weigh_first, "weigh_second": weigh_second}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def validate(self) -> None:
        reason = _unreadable(self.first) or _gated_reads(self.first)
        if reason:
            raise ValueError(
                f"Boosted asks its first memory for a key before it is written, and {reason}: take "
                "another first memory, or Together, which only adds what is read"
            )
        if not isinstance(self.second, Leaf) or self.second.options.persistent:
            raise ValueError(
                "the second memory of Boosted learns the residuals of the first, which needs one "
                "recipe that is written: take a recipe, or Together or Chain for a composition"
            )
        first, second = self.first, self.second
        assert isinstance(first, Leaf)
        for part in (first, second):
            if part.recipe.associations > 1:
                raise ValueError(
                    f"Boosted takes one association per token, and {part.recipe.algorithm.title} "
                    f"takes {part.recipe.associations}: use steps=1"
                )
        if second.recipe.memory.diagonal != first.recipe.memory.diagonal:
            raise ValueError(
                "Boosted gives both memories the same keys and values, and one has a weight per "
                "channel and the other a matrix: take two of a kind"
            )
        gates = [{gate.name: gate.axes for gate in leaf.recipe.gates()} for leaf in (first, second)]
        for name in self.share:
            if any(name not in known for known in gates) or gates[0][name] != gates[1][name]:
                both = [n for n in gates[0] if gates[1].get(n) == gates[0][n]]
                raise ValueError(
                    f"Boosted(share=...) names {name!r}, which is no gate of both memories; both "
                    f"have: {', '.join(both) or 'none'}"
                )
        weighing = (("weigh_first", self.weigh_first), ("weigh_second", self.weigh_second))
        for (field, name), known in zip(weighing, gates, strict=True):
            if name is not None and known.get(name) != ():
                scalars = [n for n, axes in known.items() if axes == ()]
                raise ValueError(
                    f"Boosted({field}={name!r}) is no gate of that memory with one number per "
                    f"head; it has: {', '.join(scalars) or 'none'}"
                )

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {"first": self.first, "second": self.second}

    def streams(self, T: int) -> Mapping[str, Stream]:
        return {"first": Stream(tokens=T, queries=1), "second": Stream(tokens=T)}

    @property
    def equations(self) -> tuple[str, ...]:
        error = "v_t − M_(t−1)(k_t)"
        said = error if self.clip is None else f"clip({error}, ±{self.clip:g})"
        at = "t" if self.read == "after" else "(t−1)"
        weights = [
            "" if name is None else f"exp({name})_t " if name.startswith("log_") else f"{name}_t "
            for name in (self.weigh_first, self.weigh_second)
        ]
        shared = f", with the first's {', '.join(self.share)}" if self.share else ""
        return (
            f"r_t = {said}",
            f"M learns (k_t, v_t), R learns (k_t, r_t){shared}",
            f"y_t = {weights[0]}M_{at}(q_t) + {weights[1]}R_t(q_t)",
        )


@dataclass(frozen=True, init=False)
class Routed(Mixer):
    """A mixture of memories: each token is written to and read from k of M (Du et al. 2025).

    With p = softmax(W x_t) over the M memories, S the k largest of them and m_j the mixers::

        y_t = Σ_(j ∈ S) p_j / (Σ_(i ∈ S) p_i) · m_j(x_t) + m_shared(x_t)

    A memory that is not in S does not know that there was a token: nothing of it decays, its
    convolution, positions and windows count the tokens that came to it. At ``top=1`` the weight is
    1 whatever p is, so the router learns from the balance alone.

    A model adds ``router_aux_loss_coef`` times the load-balancing loss to its training loss
    (Fedus et al. 2022, eqs. 4–6): M Σ_j f_j P_j, f_j the share of tokens that came to memory j and
    P_j the mean of p_j; k where all are equally used.

    Args:
        *memories: M mixers, or what stands for one (`mixer_of`); one list of them will do.
        top: k, from 1 to M.
        shared: one that sees every token, or ``None``.

    Raises:
        RecipeError: no memory, or a ``top`` above their number.

    Examples:
        >>> mixture = rc.blocks.Routed(["gla"] * 4, top=2, shared="gla")
        >>> list(mixture.children)
        ['0', '1', '2', '3', 'shared']
    """

    kind: ClassVar[str] = "routed"
    holds: ClassVar[tuple[str, ...]] = ("memories", "shared")

    memories: tuple[Mixer, ...] = checked(dataclasses.MISSING, _mixers)
    top: int = integer(at_least=1)
    shared: Mixer | None = checked(None, mixer_of, optional=True)

    def __init__(self, *memories: Any, top: int, shared: Any = None) -> None:
        if len(memories) == 1 and isinstance(memories[0], list | tuple):
            memories = tuple(memories[0])  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        object.__setattr__(self, "memories", memories)
        object.__setattr__(self, "top", top)
        object.__setattr__(self, "shared", shared)
        self.__post_init__()

    @classmethod
    def rebuilt(cls, fields: Mapping[str, Any]) -> Mixer:
        rest = {name: value for name, value in fields.items() if name != "memories"}
        return cls(*fields["memories"], **rest)

    def validate(self) -> None:
        if self.top > len(self.memories):
            raise ValueError(
                f"Routed(top={self.top}) chooses among {len(self.memories)} memories: give more "
                "memories, or a smaller top"
            )

    @property
    def children(self) -> Mapping[str, Mixer]:
        memories = {str(index): part for index, part in enumerate(self.memories)}
        return memories if self.shared is None else {**memories, "shared": self.shared}

    def streams(self, T: int) -> Mapping[str, Stream]:
        M = len(self.memories)
        each = Stream(tokens=-(-T * self.top // M), per_token=self.top / M)
        shared = {} if self.shared is None else {"shared": Stream(tokens=T)}
        return {**{str(index): each for index in range(M)}, **shared}

    def own_parameters(self, d_model: int) -> Mapping[str, int]:
        return {"gates": d_model * len(self.memories)}

    @property
    def equations(self) -> tuple[str, ...]:
        shared = "" if self.shared is None else " + m_shared(x)"
        return (
            f"S = the {self.top} largest of p = softmax(W x), over {len(self.memories)} memories",
            f"y = Σ_(j ∈ S) p_j / (Σ_(i ∈ S) p_i) · m_j(x){shared}; the others do not see x",
        )


def _after(mixer: Chain | Gated | Together, T: int) -> Mapping[str, Stream]:
    """Every part runs over the persistent tokens and the text."""
    return {name: Stream(tokens=T + mixer.persistent) for name in mixer.children}


def _behind(persistent: int) -> str:
    """What parts see that all see the text."""
    return "[p, x]" if persistent else "x"


def _unreadable(mixer: Mixer) -> str:
    """Why a mixer cannot be read without writing; nothing where it can."""
    if not isinstance(mixer, Leaf):
        return f"rc.blocks.{type(mixer).__name__} is no single memory"
    memory = mixer.recipe.memory
    if mixer.options.persistent:
        return "LayerOptions(persistent=...) is never written"
    if mixer.options.skip:
        return "LayerOptions(skip=True) adds the value that a token writes to what it reads"
    if memory.read.bonus != 0.0:
        return f"{memory.brief} reads the token's own association with a bonus"
    return ""


def _gated_reads(mixer: Mixer) -> str:
    """Why what a query reads depends on more than the memory and the query; nothing where not."""
    assert isinstance(mixer, Leaf)
    recipe = mixer.recipe
    if recipe.memory.read.when != "after":
        return f"{recipe.memory.brief} reads before it writes, which read='before' asks of Boosted"
    names = {name for part in recipe.context.within for name in part.reads}
    names |= {gate.name for gate in recipe.retention.gates() if "decay" not in gate.name}
    if names:
        return f"what it reads is weighed by the reading token's own {', '.join(sorted(names))}"
    return ""


def _check_persistent(
    mixer: Mixer, persistent: int, *, of: Mapping[str, Mixer] | None = None
) -> None:
    """That tokens before the text stay visible: no window of attention may lose them."""
    for name, leaf, ahead in _behind_tokens(mixer.children if of is None else of, persistent):
        context = leaf.recipe.context
        keeps, first = context.keeps, context.first
        if leaf.recipe.nonparametric and keeps is not None and first < ahead:
            raise ValueError(
                f"persistent={ahead} tokens are to be seen by every token, and the window "
                f"of {name}, {context.brief}, loses them: restrict it by context.SinkWindow("
                f"size={keeps - first}, first={ahead})"
            )


def _behind_tokens(parts: Mapping[str, Mixer], ahead: int) -> Iterator[tuple[str, Leaf, int]]:
    """Recipes that read on from tokens before the text, and how many; segments begin without."""
    for name, part in parts.items():
        if isinstance(part, Leaf):
            yield name, part, ahead
        elif isinstance(part, Boosted):
            for path, leaf in part.leaves.items():
                yield f"{name}.{path}", leaf, ahead
        elif isinstance(part, Routed) and part.shared is not None:  # the others see some of them
            yield from _behind_tokens({f"{name}.shared": part.shared}, ahead)
        elif isinstance(part, Chain | Gated | Together):
            for path, leaf, more in _behind_tokens(part.children, ahead + part.persistent):
                yield f"{name}.{path}", leaf, more
