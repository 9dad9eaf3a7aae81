"""A memory next to the states that it had at the ends of earlier segments, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer
from recollect.fields import flag, integer, option, validated_field

__all__ = ["CachedMemory"]


@dataclass(frozen=True)
class CachedMemory(Mixer):
    """A memory, and its states at the ends of earlier segments (Behrouz et al. 2026).

    Segments have C tokens, counted from the start of a document. With M_t the memory in segment s
    of token t, and M^i its state after segment i < s::

        y_t = γ_(t,s) M_t(q_t) + Σ_(i < s) γ_(t,i) M^i(q_t)

    The state grows by one memory with every C tokens. The layer's norm, gate and output map follow
    y.

    Args:
        memory: a recipe with its layer.
        segment: C ≥ 1.
        restart: whether every segment starts with the initial memory; if not, with the last state
            of the segment before.
        weights: γ:

            * ``"softmax"``: softmax over the segments of ⟨W x_t, x̄_i⟩, W learned, x̄_i the mean of
              the tokens of segment i, and of the tokens up to t for segment s.
            * ``"sum"``: 1.
            * ``"mean"``: 1/s.
        top_k: number of earlier segments with the largest ⟨W x_t, x̄_i⟩ that a token reads;
            ``None``: all. With ``weights="softmax"`` only.

    Raises:
        RecipeError: a part that is a composition, a memory whose output depends on the written
            token, or ``top_k`` without a softmax.

    Examples:
        >>> cached = rc.blocks.CachedMemory("gated_delta_net", segment=4)
        >>> layer = rc.blocks.build(cached, d_model=8, num_heads=2)
        >>> y, state = layer(torch.randn(1, 10, 8))
        >>> y.shape, sorted(state.parts)
        (torch.Size([1, 10, 8]), ['memory', 'segment_0', 'segment_1'])
    """

    kind: ClassVar[str] = "cached_memory"
    mixer_fields: ClassVar[tuple[str, ...]] = ("memory",)

    memory: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    _: KW_ONLY
    segment: int = integer(at_least=1)
    restart: bool = flag(True)
    weights: str = option("softmax", "sum", "mean")
    top_k: int | None = integer(None, at_least=1, optional=True)

    def validate(self) -> None:
        reason = _why_not_cached(self.memory)
        if reason:
            raise ValueError(f"CachedMemory reads earlier states of its memory, and {reason}")
        if self.top_k is not None and self.weights != "softmax":
            raise ValueError(
                f"CachedMemory(top_k={self.top_k}) chooses segments by their weights, which are "
                f"equal for weights={self.weights!r}: take weights='softmax'"
            )

    def streams(self, T: int) -> Mapping[str, Stream]:
        C = self.segment
        lengths = [min(C, T - start) for start in range(0, T, C)]
        return {
            "memory": Stream(
                rows=max(1, len(lengths)) if self.restart else 1,
                tokens=min(C, T) if self.restart else T,
                cached_states=max(0, len(lengths) - 1),
                cached_reads=sum(i * length for i, length in enumerate(lengths)),
                cached_segment=C,
            )
        }

    @property
    def grows(self) -> bool:
        return True

    @property
    def equations(self) -> tuple[str, ...]:
        start = "the initial memory" if self.restart else "the last state of the segment before"
        weight = {"softmax": "γ_(t,s) ", "sum": "", "mean": "1/s ("}[self.weights]
        others = {"softmax": "γ_(t,i) ", "sum": "", "mean": ""}[self.weights]
        end = ")" if self.weights == "mean" else ""
        chosen = "i < s" if self.top_k is None else "i ∈ S_t"
        lines = [f"M starts every segment of {self.segment} tokens with {start}"]
        if self.top_k is not None:
            lines.append(f"S_t = the {self.top_k} earlier segments with the largest ⟨W x_t, x̄_i⟩")
        if self.weights == "softmax":
            lines.append("γ_t = softmax of ⟨W x_t, x̄_i⟩ over s and these segments, x̄ their means")
        return (*lines, f"y_t = {weight}M_t(q_t) + Σ_({chosen}) {others}M^i(q_t){end}")


def _why_not_cached(mixer: Mixer) -> str:
    """Return the reason why earlier states of a memory cannot be read; empty if they can."""
    if not isinstance(mixer, RecipeMixer):
        return f"rc.blocks.{type(mixer).__name__} is a composition: take a recipe"
    if mixer.options.persistent:
        return "LayerOptions(persistent=...) is never written: leave it out"
    if mixer.recipe.memory.read.bonus != 0.0:
        return (
            f"{mixer.recipe.memory.brief} reads the token's own association with a bonus: take "
            "another memory"
        )
    return ""
