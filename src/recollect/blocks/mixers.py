"""Sequence mixers as data: a recipe, or a composition of several, frozen and written to JSON.

A recipe states one memory. The models of the literature put several to work together: one after the
other, beside each other, or one as the context of the other. What is composed, and how, is data
like the recipes themselves, so it is compared, hashed and saved like them.
"""

# More than 400 lines: every mixer with its equations, arguments and an example.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recollect.choices.member import RecipeError
from recollect.fields import checked, integer
from recollect.layer.options import LayerOptions, Options
from recollect.recipe.recipe import Recipe
from recollect.wording import shown

__all__ = ["AsContext", "Chain", "Gated", "Leaf", "Mixer", "mixer_of", "names_mean"]


class Mixer(Options):
    """A way to mix the tokens of a sequence, causally: a recipe, or a composition of mixers.

    Attributes:
        kind: its name in JSON.
    """

    kind: ClassVar[str]

    @property
    def children(self) -> Mapping[str, Mixer]:
        """The mixers that this one composes, by name."""
        return {}

    @property
    def leaves(self) -> Mapping[str, Leaf]:
        """All recipes of the composition, by the names that lead to them joined with dots."""
        found: dict[str, Leaf] = {}
        for name, child in self.children.items():
            for path, leaf in child.leaves.items():
                found[f"{name}.{path}" if path else name] = leaf
        return found

    @property
    def equations(self) -> tuple[str, ...]:
        """How its children work together, a line each."""
        return ()

    @property
    def grows(self) -> bool:
        """Whether its state grows with the text: all associations, or a row per key."""
        return any(child.grows for child in self.children.values())

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Mixer:
        """The same composition of changed recipes.

        Args:
            change: what each of them becomes.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out."""
        raise NotImplementedError

    def _written(self) -> dict[str, Any]:
        """The fields of a composition as plain data."""
        data: dict[str, Any] = {"mixer": self.kind}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mixer):
                value = value.to_dict()
            elif isinstance(value, tuple):
                value = [part.to_dict() for part in value]
            data[field.name] = value
        return data


def mixer_of(value: Any) -> Mixer:
    """What may stand for a mixer, as one.

    Args:
        value: a mixer, a recipe (or with its options, as a tuple), what has both (a preset), what
            has a mixer, or a name of the zoo.

    Raises:
        RecipeError: something else, or a name that nothing has.

    Examples:
        >>> rc.blocks.mixer_of(rc.Recipe()).kind
        'leaf'
    """
    if isinstance(value, str) and _lookup is not None:
        value = _lookup(value)
    if isinstance(value, Mixer):
        return value
    if isinstance(value, Recipe):
        return Leaf(recipe=value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Recipe):  # pyright: ignore[reportUnknownArgumentType]
        return Leaf(recipe=value[0], options=value[1])
    recipe, options = getattr(value, "recipe", None), getattr(value, "options", None)
    if isinstance(recipe, Recipe) and isinstance(options, LayerOptions):
        return Leaf(recipe=recipe, options=options)
    mixer = getattr(value, "mixer", None)
    if isinstance(mixer, Mixer):
        return mixer
    raise RecipeError(
        "a mixer is given as a zoo name, a preset, an rc.Recipe, (recipe, options) or one of "
        f"rc.blocks, not {shown(value)}"
    )


_lookup: Callable[[str], Any] | None = None


def names_mean(lookup: Callable[[str], Any]) -> None:
    """Say what names mean where a mixer is taken: mixers know no zoo.

    Args:
        lookup: what may stand for a mixer, by its name; raises a `RecipeError` where there is none.
    """
    global _lookup
    _lookup = lookup


def _mixers(value: Any) -> tuple[Mixer, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("needs at least one mixer")
    return tuple(mixer_of(part) for part in value)  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True, kw_only=True)
class Leaf(Mixer):
    """A recipe with the options of its layer.

    Args:
        recipe: the regression problem.
        options: what is not regression.

    Raises:
        RecipeError: something else in the place of either.

    Examples:
        >>> leaf = rc.blocks.mixer_of("gated_delta_net")
        >>> leaf.recipe == rc.zoo.get("gated_delta_net").recipe
        True
    """

    kind: ClassVar[str] = "leaf"

    recipe: Recipe
    options: LayerOptions = dataclasses.field(default_factory=LayerOptions)

    def validate(self) -> None:
        if not isinstance(self.recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a leaf holds an rc.Recipe, not {shown(self.recipe)}")
        if not isinstance(self.options, LayerOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a leaf's options are rc.LayerOptions, not {shown(self.options)}")

    @property
    def leaves(self) -> Mapping[str, Leaf]:
        return {"": self}

    @property
    def grows(self) -> bool:
        if self.options.persistent:
            return False
        return self.recipe.span is None or self.recipe.dual

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Mixer:
        return change(self)

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": self.recipe.to_dict(), "options": self.options.to_dict()}


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

    @property
    def equations(self) -> tuple[str, ...]:
        said = _behind(self.persistent)
        for name in self.children:
            said = f"m_{name}({said})"
        return (f"y = {said}",)

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Mixer:
        parts = (part.with_leaves(change) for part in self.parts)
        return Chain(*parts, persistent=self.persistent)

    def to_dict(self) -> dict[str, Any]:
        return self._written()


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

    @property
    def equations(self) -> tuple[str, ...]:
        x = _behind(self.persistent)
        return (f"y = w_a ⊙ RMS(attention({x})) ⊙ σ(w_m ⊙ RMS(memory({x})))",)

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {"memory": self.memory, "attention": self.attention}

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Mixer:
        changed = {name: child.with_leaves(change) for name, child in self.children.items()}
        return dataclasses.replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        return self._written()


@dataclass(frozen=True, init=False)
class AsContext(Mixer):
    """A memory as the context of attention to segments (Titans' MAC, eqs. 21–25).

    For a segment S of C tokens that begins after the memory M has learned all segments before it::

        h_j = M(q(x_j))                                       read, not written           (21)
        y_j = attention of x_j to [persistent, h_1 … h_j, x_1 … x_j]                      (22–23)
        M_j = M_(j−1) having learned y_j                                                  (24)
        o_j = w_a ⊙ RMS(y_j) ⊙ σ(w_m ⊙ RMS(M_j(q(y_j))))                                  (25)

    Token j meets retrievals of tokens ≤ j only, and all of them from the memory as it was when the
    segment began. `docs/design/blocks.md` has the derivation.

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

    @property
    def equations(self) -> tuple[str, ...]:
        context = "[p, h_1 … h_j, x_1 … x_j]" if self.persistent else "[h_1 … h_j, x_1 … x_j]"
        return (
            f"h_j = M(q(x_j)), M as it was when the segment of {self.segment} tokens began",
            f"y_j = attention of x_j to {context}, of this segment",
            "M_j = M_(j−1) having learned y_j",
            "o_j = w_a ⊙ RMS(y_j) ⊙ σ(w_m ⊙ RMS(M_j(q(y_j))))",
        )

    @property
    def children(self) -> Mapping[str, Mixer]:
        return {"memory": self.memory, "attention": self.attention}

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Mixer:
        changed = {name: child.with_leaves(change) for name, child in self.children.items()}
        return dataclasses.replace(self, **changed)

    @property
    def grows(self) -> bool:
        return self.memory.grows  # the attention begins anew with every segment

    def to_dict(self) -> dict[str, Any]:
        return self._written()


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
        elif isinstance(part, Chain | Gated):
            for path, leaf, more in _behind_tokens(part.children, ahead + part.persistent):
                yield f"{name}.{path}", leaf, more
