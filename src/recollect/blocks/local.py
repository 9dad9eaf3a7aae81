"""A memory of the text, and memories that restart with every segment, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from recollect.blocks.field_values import mixers
from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer, why_not_one_memory
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.fields import flag, integer, validated_field
from recollect.recipe.recipe import Recipe

__all__ = ["LocalMemories"]

_SUM_OF_KEYS = RecipeMixer(recipe=Recipe(bias=DotProduct(), algorithm=GradientDescent(lr=1.0)))
"""Memory whose output at q is Σ k kᵀ q, if its values are its keys."""


@dataclass(frozen=True)
class LocalMemories(Mixer):
    """A memory of the text next to memories that restart with every segment (Li et al. 2025).

    With q, k, v of the first part's layer, V the first memory and W^i the local ones, which all
    learn (k_t, v_t)::

        y_t = V_t(q_t) + Σ_i W^i_t(P^i_t q_t)

    Each W^i restarts from its initial memory at every multiple of S tokens. P^i_t is the sum of
    k kᵀ/‖k‖² over the tokens of the open inner batch of W^i up to t, so that W^i reads at a
    combination of keys that it learned. The layer's norm, gate and output map follow y.

    Args:
        first: a recipe with its layer.
        local: recipes with the layer options of their gates, params and initial memory; queries,
            keys and values are those of ``first``.
        segment: S ≥ 1, a multiple of the ``batch_size`` of every local recipe.
        project_queries: whether local memories read at P^i_t q_t; if not, at q_t.

    Raises:
        RecipeError: a part that is a composition, no local memory, a projected query of a
            transposed read, or a segment that does not consist of complete inner batches.

    Examples:
        >>> titans = rc.zoo.get("titans")
        >>> both = rc.blocks.LocalMemories(titans, [titans], segment=32)
        >>> layer = rc.blocks.build(both, d_model=8, num_heads=2)
        >>> layer(torch.randn(1, 6, 8))[0].shape
        torch.Size([1, 6, 8])
    """

    kind: ClassVar[str] = "local_memories"
    mixer_fields: ClassVar[tuple[str, ...]] = ("first", "local")

    first: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    local: tuple[Mixer, ...] | list[Any] = validated_field(dataclasses.MISSING, mixers)
    _: KW_ONLY
    segment: int = integer(at_least=1)
    project_queries: bool = flag(True)

    def validate(self) -> None:
        for part in (self.first, *self.local):
            reason = why_not_one_memory(part)
            if reason:
                raise ValueError(
                    "LocalMemories needs recipes that are written with a key and a value per "
                    f"token, and {reason}"
                )
        for part in self.local:
            assert isinstance(part, RecipeMixer)  # why_not_one_memory
            if self.project_queries and part.recipe.memory.read.transposed:
                raise ValueError(
                    "LocalMemories projects queries on keys, and "
                    f"{part.recipe.memory.brief} compares queries with values: set "
                    "project_queries=False, or take a memory without a transposed read"
                )
            size = batch_size(part)
            if self.segment % size:
                raise ValueError(
                    f"LocalMemories(segment={self.segment}) must be a multiple of the "
                    f"batch_size={size} of a local memory"
                )

    @property
    def children(self) -> Mapping[str, Mixer]:
        numbered = range(len(self.local))
        names: dict[str, Mixer] = {"first": self.first}
        names |= {f"local_{i}": self.local[i] for i in numbered}
        if self.project_queries:
            names |= {f"projection_{i}": _SUM_OF_KEYS for i in numbered}
        return names

    def streams(self, T: int) -> Mapping[str, Stream]:
        def restarting(size: int) -> Stream:
            return Stream(rows=max(1, -(-T // size)), tokens=min(size, T), restarts=True)

        streams = {"first": Stream(tokens=T)}
        for i, part in enumerate(self.local):
            streams[f"local_{i}"] = restarting(self.segment)
            if self.project_queries:
                streams[f"projection_{i}"] = restarting(batch_size(part))
        return streams

    @property
    def equations(self) -> tuple[str, ...]:
        read = "P^i_t q_t" if self.project_queries else "q_t"
        lines = [f"V and W^i learn (k_t, v_t); W^i restarts every {self.segment} tokens"]
        if self.project_queries:
            sizes = ", ".join(str(batch_size(part)) for part in self.local)
            lines.append(f"P^i_t = Σ k kᵀ/‖k‖² over the open inner batch, of {sizes} tokens")
        return (*lines, f"y_t = V_t(q_t) + Σ_i W^i_t({read})")


def batch_size(mixer: Mixer) -> int:
    """Return the number of tokens of an inner batch of a recipe."""
    assert isinstance(mixer, RecipeMixer)
    return getattr(mixer.recipe.algorithm, "batch_size", 1)
