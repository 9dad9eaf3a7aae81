"""Sequence mixers as data: a recipe, or a composition of several, frozen and written to JSON.

A recipe states one memory. The models of the literature put several to work together: one after the
other, beside each other, or one as the context of the other. What is composed, and how, is data
like the recipes themselves, so it is compared, hashed and saved like them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recollect.choices.member import RecipeError
from recollect.layer.options import LayerOptions, Options
from recollect.recipe.recipe import Recipe
from recollect.wording import shown

__all__ = ["Leaf", "Mixer", "Stream", "mixer_of"]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one of a composition's mixers runs over, for a text of T tokens.

    Attributes:
        rows: streams beside or after each other, per text.
        tokens: of each.
        per_token: how many of them come with each token of the text.
        queries: further queries of every memory per token.
        asks: C, where every token also reads the memory without writing, as it stood when its
            segment of C tokens began; 0 where none does.
        fresh: whether each of the rows begins anew, and only the last is remembered.
    """

    rows: int = 1
    tokens: int
    per_token: float = 1
    queries: int = 0
    asks: int = 0
    fresh: bool = False


class Mixer(Options):
    """A way to mix the tokens of a sequence, causally: a recipe, or a composition of mixers.

    Attributes:
        kind: its name in JSON.
        holds: its fields that hold mixers.

    Examples:
        >>> mixer = rc.blocks.Chain("gated_delta_net", "sliding_window_attention")
        >>> isinstance(mixer, rc.blocks.Mixer), list(mixer.children)
        (True, ['0', '1'])
    """

    kind: ClassVar[str]
    holds: ClassVar[tuple[str, ...]] = ()

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

    def streams(self, T: int) -> Mapping[str, Stream]:
        """What each of its children runs over.

        Args:
            T: tokens of the text.
        """
        return {name: Stream(tokens=T) for name in self.children}

    def own_parameters(self, d_model: int) -> Mapping[str, int]:
        """Trained numbers of what composes the children, by part.

        Args:
            d_model: width of the tokens.
        """
        return {}

    def with_leaves(self, change: Callable[[Leaf], Leaf]) -> Mixer:
        """The same composition of changed recipes.

        Args:
            change: what each of them becomes.
        """
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mixer):
                value = value.with_leaves(change)
            elif isinstance(value, tuple):
                value = tuple(x.with_leaves(change) if isinstance(x, Mixer) else x for x in value)  # pyright: ignore[reportUnknownVariableType]
            changed[field.name] = value
        return self.rebuilt(changed)

    @classmethod
    def rebuilt(cls, fields: Mapping[str, Any]) -> Mixer:
        """A composition of these fields by name.

        Args:
            fields: as the constructor takes them.
        """
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out."""
        data: dict[str, Any] = {"mixer": self.kind}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mixer):
                value = value.to_dict()
            elif isinstance(value, tuple):
                value = [x.to_dict() if isinstance(x, Mixer) else x for x in value]  # pyright: ignore[reportUnknownVariableType]
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
    if isinstance(value, str):  # mixers do not depend on the zoo: a name imports it
        value = importlib.import_module("recollect.zoo").find(value)
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
