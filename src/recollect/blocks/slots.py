"""A memory of slots, which one memory addresses and another one fills, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from recollect.blocks.field_values import gate_names
from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer, why_not_one_memory
from recollect.fields import integer, option, validated_field
from recollect.messages import RecipeError

__all__ = ["SlotMemory"]

_DECAY = "log_decay"


@dataclass(frozen=True)
class SlotMemory(Mixer):
    """One memory that is queried by the output of another, through m slots (Zhang et al. 2024).

    With q, k, v of the first part's layer, s_t ∈ R^m the weights with which token t writes the
    slots, M the first memory and N the second::

        M learns (k_t, s_t),   N learns (s_t, v_t)
        y_t = N_t(softmax(M_t(q_t)))

    The layer's norm, gate and output map follow y.

    Args:
        first: a recipe with its layer; its values are the m slots.
        second: a recipe with the layer options of its gates, params and initial memory; its keys
            are the slots, and its values those of ``first``.
        num_slots: m ≥ 1. Default: K, the number of key channels.
        write: s_t, for a learned linear map W:

            * ``"input"``: σ(W x_t), divided by the sum over the slots.
            * ``"complement"``: 1 − α_t, α_t = exp(``"log_decay"``) per slot, a gate of ``first``.
            * ``"running_softmax"``: exp(W x_t)/Z_t, Z_t = Z_(t−1) + exp(W x_t), Z_0 = 0. The gate
              ``"log_decay"`` of ``first`` is log(Z_(t−1)/Z_t), and 0 at the first token, so a slot
              is a mean of what it learned. W x is limited to ±32.
        top_k: number of slots that a token writes; ``None``: all, as for a number above m. With w_t
            the k largest entries of σ(W x_t), divided by their sum, s_t is w_t for ``"input"``. For
            ``"complement"``, the log decay is multiplied by w_t, so other slots neither decay nor
            learn.
        share: names of gates that the second memory takes from the first.
        activation: ``"softmax"`` of the queries of the second memory, or ``"none"``.

    Raises:
        RecipeError: a part that is a composition, a recipe without a matrix of keys and values, or
            a gate that the recipes do not have per slot.

    Examples:
        >>> slots = rc.blocks.SlotMemory("delta_net", "delta_net", num_slots=8)
        >>> layer = rc.blocks.build(slots, d_model=16, num_heads=2)
        >>> layer(torch.randn(1, 6, 16))[0].shape
        torch.Size([1, 6, 16])
        >>> slots.equations[-1]
        'y_t = N_t(softmax(M_t(q_t)))'
    """

    kind: ClassVar[str] = "slot_memory"
    mixer_fields: ClassVar[tuple[str, ...]] = ("first", "second")

    first: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    second: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)
    _: KW_ONLY
    num_slots: int | None = integer(None, at_least=1, optional=True)
    write: str = option("input", "complement", "running_softmax")
    top_k: int | None = integer(None, at_least=1, optional=True)
    share: tuple[str, ...] | list[str] = validated_field((), gate_names)
    activation: str = option("softmax", "none")

    def validate(self) -> None:
        for name, part in self.children.items():
            reason = why_not_one_memory(part)
            if reason:
                raise ValueError(
                    f"SlotMemory({name}=...) needs one recipe that is written with a key and a "
                    f"value per token, and {reason}"
                )
            assert isinstance(part, RecipeMixer)  # why_not_one_memory
            if part.recipe.memory.read.transposed:
                raise ValueError(
                    f"SlotMemory({name}=...) reads M q, and {part.recipe.memory.brief} reads Mᵀ q: "
                    "take a memory without a transposed read"
                )
        if self.top_k is not None and self.write == "running_softmax":
            raise ValueError(
                f"SlotMemory(top_k={self.top_k}) chooses slots by a router, which "
                "write='running_softmax' does not have: leave top_k out, or take another write"
            )
        # Sizes that differ show which axis of a gate is that of the slots.
        first, second = (_gate_shapes(self.first, K=5, V=7), _gate_shapes(self.second, K=7, V=11))
        if self.write != "input" and first.get(_DECAY) != (7,):
            raise ValueError(
                f"SlotMemory(write={self.write!r}) writes 1 − α, and the first memory has no gate "
                f"{_DECAY!r} per value channel: take retention.Decay(per='value'), or write='input'"
            )
        for name in self.share:
            if name not in first or first[name] != second.get(name):
                both = [other for other in first if second.get(other) == first[other]]
                raise ValueError(
                    f"SlotMemory(share=...) names {name!r}, which is not a gate of both memories, "
                    f"per slot or per head; both have: {', '.join(both) or 'none'}"
                )

    def streams(self, T: int) -> Mapping[str, Stream]:
        m = self.num_slots
        return {"first": Stream(tokens=T, value_dim=m), "second": Stream(tokens=T, key_dim=m)}

    @property
    def routes(self) -> bool:
        """Whether a learned map of the token chooses or weighs the slots."""
        return self.write == "input" or self.top_k is not None

    @property
    def equations(self) -> tuple[str, ...]:
        chosen = "" if self.top_k is None else f"the {self.top_k} largest of "
        weights = (f"w_t = {chosen}σ(W x_t), divided by their sum",) if self.routes else ()
        power = "" if self.top_k is None else ", α_t ← α_t^(w_t)"
        slots = {
            "input": "s_t = w_t",
            "complement": f"s_t = 1 − α_t{power}",
            "running_softmax": "s_t = exp(W x_t)/Z_t = 1 − α_t,  Z_t = Z_(t−1) + exp(W x_t)",
        }[self.write]
        shared = f", with the first's {', '.join(self.share)}" if self.share else ""
        query = "softmax(M_t(q_t))" if self.activation == "softmax" else "M_t(q_t)"
        return (
            *weights,
            slots,
            f"M learns (k_t, s_t), N learns (s_t, v_t){shared}",
            f"y_t = N_t({query})",
        )


def _gate_shapes(mixer: Mixer, *, K: int, V: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of gates after the axis of heads, by name."""
    assert isinstance(mixer, RecipeMixer)
    try:
        sizes = mixer.recipe.axes(K, V)
    except RecipeError:  # the memory needs keys and values of equal sizes
        sizes = mixer.recipe.axes(7, 7)
    return {gate.name: tuple(sizes[axis] for axis in gate.axes) for gate in mixer.recipe.gates()}
