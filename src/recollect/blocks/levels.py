"""Memories at several levels of a Fenwick tree: each level stores an aligned part of the past."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer
from recollect.engines.linear.engine import LinearEngine
from recollect.fields import integer, validated_field
from recollect.recipe.recipe import Recipe

__all__ = ["CHUNK_SIZE", "Levels", "level_flops"]

CHUNK_SIZE = 64
"""Default number of tokens per chunk, which does not affect results."""


@dataclass(frozen=True)
class Levels(Mixer):
    """A linear memory at the levels of a Fenwick tree (Guo et al. 2025, log-linear attention).

    Token s has level 0 for itself, and level ℓ(t, s) = the number of binary digits of t XOR s for a
    later token t, at most L − 1. With the recurrence M_t = A_t(M_(t−1)) + write_t, A_t linear::

        M_t^ℓ = Σ_(s: ℓ(t, s) = ℓ) A_t(… A_(s+1)(write_s))
        y_t = Σ_ℓ λ_t^ℓ M_t^ℓ(q_t)

    Levels 1, 2, 3, 4, … store 1, 2, 4, 8, … tokens each, or none. The last level also stores all
    older tokens. λ_t^ℓ ≥ 0 is a softplus of a linear map of the token, per query head and level. It
    starts at 1, and the layer then outputs what its memory alone would output.

    The sum of all M_t^ℓ is the memory M_t. Its layer computes q, k, v and gates, and applies its
    norm, gate and output map to y_t. The state has L memories, of any text. `docs/design/blocks.md`
    derives the chunks.

    Args:
        memory: a recipe with a matrix whose write is linear in the values: an affine error, one
            association at a time, no momentum, and gates that do not depend on the value channel.
        num_levels: L ≥ 2. Tokens that are fewer than 2^(L−2) tokens old have levels of their own.

    Raises:
        RecipeError: another kind of memory.

    Examples:
        >>> levels = rc.blocks.Levels("gated_delta_net", num_levels=8)
        >>> layer = rc.blocks.build(levels, d_model=8, num_heads=2)
        >>> y, state = layer(torch.randn(1, 5, 8))
        >>> y.shape, state.parts["memory"].memory.weights[0].shape  # [B, heads, L V, K]
        (torch.Size([1, 5, 8]), torch.Size([1, 2, 32, 4]))
    """

    kind: ClassVar[str] = "levels"
    mixer_fields: ClassVar[tuple[str, ...]] = ("memory",)

    memory: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    _: KW_ONLY
    num_levels: int = integer(16, at_least=2)

    def validate(self) -> None:
        reason = _why_not_linear(self.memory)
        if reason:
            raise ValueError(
                "Levels needs a matrix memory whose write is linear in the values, and "
                f"{reason}: take a memory such as gated_delta_net"
            )

    def streams(self, T: int) -> Mapping[str, Stream]:
        return {"memory": Stream(tokens=T, levels=self.num_levels)}

    @property
    def equations(self) -> tuple[str, ...]:
        last = self.num_levels - 1
        return (
            f"ℓ(t, s) = min(number of binary digits of t XOR s, {last})",
            "M_t^ℓ = the part of M_t that the tokens s ≤ t with ℓ(t, s) = ℓ wrote",
            "y_t = Σ_ℓ λ_t^ℓ M_t^ℓ(q_t),  λ_t = softplus(W x_t + b)",
        )


def level_flops(recipe: Recipe, num_levels: int, *, K: int, V: int, G: int, T: int) -> int:
    """Return the FLOPs of one sequence and memory after the calls of chunks from unit matrices.

    G is the number of query heads per memory.
    """
    C, F = min(CHUNK_SIZE, T), recipe.axes(K, V)["F"]
    num_chunks = -(-T // C) if T else 0
    last = 1 << (num_levels - 2)  # number of tokens from which the last level stores some
    starts = range(0, num_chunks * C, C or 1)
    stored = sum((start % last).bit_count() + (start >= last) for start in starts)
    transition = 2 * F * F * V if recipe.step_sees_prediction else 0
    chunk = 2 * C * C * V * G + 2 * C * F * V
    return num_chunks * chunk + stored * (2 * C * G * F * V + transition)


def _why_not_linear(mixer: Mixer) -> str:
    """Return the reason why the state is not a matrix that is linear in values; empty if it is."""
    if not isinstance(mixer, RecipeMixer):
        return f"rc.blocks.{type(mixer).__name__} is not a single memory"
    recipe = mixer.recipe
    if mixer.options.persistent:
        return "LayerOptions(persistent=...) is never written"
    if recipe.nonparametric or recipe.memory.is_elementwise:
        return f"{recipe.memory.brief} is none"
    if reasons := LinearEngine().unsupported_reasons(recipe):
        return reasons[0]
    read, algorithm = recipe.memory.read, recipe.algorithm
    if not read.plain:
        return f"{recipe.memory.brief} reads more than the matrix after the write"
    if recipe.context.horizon != 1:
        return f"{recipe.context.brief} writes associations of earlier tokens"
    if algorithm.recursion != "none":
        return f"{algorithm.title} has momentum"
    if recipe.associations_per_token > 1:
        return f"{algorithm.title} writes {recipe.associations_per_token} associations per token"
    for declared in (*recipe.gates(), *recipe.params()):
        if "V" in declared.axes:
            return f"{declared.name} of {declared.owner} depends on the value channel"
    return ""
