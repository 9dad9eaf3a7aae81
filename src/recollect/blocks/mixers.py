"""Sequence mixers as data: a recipe, or a composition of several mixers.

A recipe is one memory. Many published models combine several: in sequence, in parallel, or one as
the context of another. A composition is data like a recipe: it is compared, hashed and saved.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recollect.layer.options import LayerOptions, Options
from recollect.messages import RecipeError, short_repr
from recollect.recipe.recipe import Recipe
from recollect.serialization import fields_to_data

__all__ = ["Mixer", "RecipeMixer", "Stream", "as_mixer", "why_not_one_memory"]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Input of one of a composition's mixers, for a text of T tokens."""

    rows: int = 1  # number of sequences per text
    tokens: int  # number of tokens of each sequence
    tokens_per_token: float = 1  # number of tokens of the stream per token of the text
    queries: int = 0  # number of additional queries of every memory per token
    # C if every token also reads the memory as of the start of its C-token segment, without
    # writing; else 0
    retrieval_segment: int = 0
    # whether every sequence starts with an empty state, and only the state of the last sequence is
    # kept
    restarts: bool = False
    # size of the keys, if the composition replaces the keys of its layer
    key_dim: int | None = None
    # size of the values, if the composition replaces the values of its layer
    value_dim: int | None = None
    # number of earlier states of the memory that are stored after the last token
    cached_states: int = 0
    cached_reads: int = 0  # number of reads of earlier states by all tokens of a text
    cached_segment: int = 0  # number of tokens between two stored states; 0 if there are none
    levels: int = 0  # number of memories that store the tokens by their age; 0 for one memory


class Mixer(Options):
    """A causal sequence mixer: a recipe, or a composition of mixers.

    Attributes:
        kind: name of the class in JSON.
        mixer_fields: names of the fields that contain mixers.

    Examples:
        >>> mixer = rc.blocks.Sequential("gated_delta_net", "sliding_window_attention")
        >>> isinstance(mixer, rc.blocks.Mixer), list(mixer.children)
        (True, ['0', '1'])
    """

    kind: ClassVar[str]
    mixer_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def children(self) -> Mapping[str, Mixer]:
        """Mixers of the composition, by name."""
        return {name: getattr(self, name) for name in self.mixer_fields}

    @property
    def leaves(self) -> Mapping[str, RecipeMixer]:
        """All recipes of the composition, by the dotted path of names."""
        leaves: dict[str, RecipeMixer] = {}
        for name, child in self.children.items():
            for path, leaf in child.leaves.items():
                leaves[f"{name}.{path}" if path else name] = leaf
        return leaves

    @property
    def equations(self) -> tuple[str, ...]:
        """Equations of the composition, one per line."""
        return ()

    @property
    def grows(self) -> bool:
        """Whether the state grows with the text."""
        return any(child.grows for child in self.children.values())

    def streams(self, T: int) -> Mapping[str, Stream]:
        """Return the input of each child.

        Args:
            T: number of tokens of the text.
        """
        return {name: Stream(tokens=T) for name in self.children}

    def map_leaves(self, change: Callable[[RecipeMixer], RecipeMixer]) -> Mixer:
        """Return the composition with every recipe replaced.

        Args:
            change: function from a recipe to its replacement.
        """
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mixer):
                value = value.map_leaves(change)
            elif isinstance(value, tuple):
                value = tuple(x.map_leaves(change) if isinstance(x, Mixer) else x for x in value)  # pyright: ignore[reportUnknownVariableType]
            changed[field.name] = value
        return self.from_fields(changed)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Mixer:
        """Return a composition with the given fields.

        Args:
            fields: values by name, as the constructor takes them.
        """
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with all defaults."""
        return {"mixer": self.kind, **fields_to_data(self)}


def as_mixer(value: Any) -> Mixer:
    """Convert a value to a mixer.

    Args:
        value: a mixer, a recipe, a tuple of recipe and options, an object with both, an object with
            a mixer (a preset), or a name of the zoo.

    Raises:
        RecipeError: another value, or an unknown name.

    Examples:
        >>> rc.blocks.as_mixer(rc.Recipe()).kind
        'leaf'
    """
    if isinstance(value, str):  # mixers do not depend on the zoo: a name imports it
        value = importlib.import_module("recollect.zoo").get(value)
    if isinstance(value, Mixer):
        return value
    if isinstance(value, Recipe):
        return RecipeMixer(recipe=value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Recipe):  # pyright: ignore[reportUnknownArgumentType]
        return RecipeMixer(recipe=value[0], options=value[1])
    mixer = getattr(value, "mixer", None)
    if isinstance(mixer, Mixer):
        return mixer
    recipe, options = getattr(value, "recipe", None), getattr(value, "options", None)
    if isinstance(recipe, Recipe) and isinstance(options, LayerOptions):
        return RecipeMixer(recipe=recipe, options=options)
    raise RecipeError(
        "a mixer must be a zoo name, a preset, an rc.Recipe, (recipe, options) or one of "
        f"rc.blocks, not {short_repr(value)}"
    )


@dataclass(frozen=True, kw_only=True)
class RecipeMixer(Mixer):
    """A recipe with the options of its layer.

    Args:
        recipe: the regression problem.
        options: options of the layer.

    Raises:
        RecipeError: values of another type.

    Examples:
        >>> leaf = rc.blocks.as_mixer("gated_delta_net")
        >>> leaf.recipe == rc.zoo.get("gated_delta_net").recipe
        True
    """

    kind: ClassVar[str] = "leaf"

    recipe: Recipe
    options: LayerOptions = dataclasses.field(default_factory=LayerOptions)

    def validate(self) -> None:
        if not isinstance(self.recipe, Recipe):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"the recipe of a leaf must be an rc.Recipe, not {short_repr(self.recipe)}"
            )
        if not isinstance(self.options, LayerOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"a leaf's options are rc.LayerOptions, not {short_repr(self.options)}"
            )

    @property
    def leaves(self) -> Mapping[str, RecipeMixer]:
        return {"": self}

    @property
    def grows(self) -> bool:
        if self.options.persistent:
            return False
        return self.recipe.buffer_size is None or self.recipe.uses_kernel_rows

    def map_leaves(self, change: Callable[[RecipeMixer], RecipeMixer]) -> Mixer:
        return change(self)

    def to_dict(self) -> dict[str, Any]:
        return fields_to_data(self)


def why_not_one_memory(mixer: Mixer) -> str:
    """Return the reason why a part is not one memory of a layer's keys; empty if it is."""
    if not isinstance(mixer, RecipeMixer):
        return f"rc.blocks.{type(mixer).__name__} is a composition: take a recipe"
    recipe = mixer.recipe
    if mixer.options.persistent:
        return "LayerOptions(persistent=...) is never written: leave it out"
    if recipe.associations_per_token > 1:
        return (
            f"{recipe.algorithm.title} takes {recipe.associations_per_token}: use "
            "updates_per_token=1"
        )
    if recipe.memory.is_elementwise:
        return f"{recipe.memory.brief} has one weight per channel: take a matrix"
    return ""
