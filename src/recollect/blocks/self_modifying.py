"""A memory whose keys, values and gates are outputs of memories, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer, why_not_one_memory
from recollect.choices.memory.base import Stack
from recollect.fields import validated_field

__all__ = ["SelfModifyingMemory"]


@dataclass(frozen=True)
class SelfModifyingMemory(Mixer):
    """A memory that learns keys and values of further memories, and they do too.

    The form is that of the self-modifying Titans of Behrouz et al. (2025, arXiv 2512.24695). With
    the q_t, k_t and v_t of the layer of the recipe, M the memory, and M_k, M_v and one M_g per gate
    of the recipe as further memories of it::

        k'_t = norm(M_k(k_t)),   v'_t = norm(M_v(norm(v_t))),   gate g of t from U M_g(norm(v_t))
        y_t = M(q_t)
        every M_□ of M, M_k, M_v and M_g learns (k'_t, M_□(v'_t)) with these gates

    All of these outputs are those of the memories at the start of the inner batch. U is learned,
    and norm is the ``qk_norm`` of the layer, ``"l2"`` or ``"rms"``: a memory that writes its output
    at v'_t may grow without bound if v'_t is longer than k'_t. The layer's norm, gate and output
    map follow y.

    Args:
        memory: a recipe with its layer. Its memory consists of linear maps without features, and
            tokens of an inner batch read its start (``update_every="batch"``, or ``batch_size=1``).

    Raises:
        RecipeError: another recipe, or ties of its layer.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.MLP(),
        ...     algorithm=rc.algorithm.GradientDescent(
        ...         batch_size=4, update_every="batch", erasure=1.0
        ...     ),
        ... )
        >>> mixer = rc.blocks.SelfModifyingMemory(recipe)
        >>> list(mixer.children)
        ['memory', 'keys', 'values', 'lr']
        >>> layer = rc.blocks.build(mixer, d_model=8, num_heads=2)
        >>> y, state = layer(torch.randn(1, 6, 8))
        >>> y.shape, sorted(state.parts)
        (torch.Size([1, 6, 8]), ['memory', 'projections'])
    """

    kind: ClassVar[str] = "self_modifying_memory"
    mixer_fields: ClassVar[tuple[str, ...]] = ("memory",)

    memory: Mixer | Any = validated_field(dataclasses.MISSING, as_mixer)

    def validate(self) -> None:
        reason = _why_not_self_modifying(self.memory)
        if reason:
            raise ValueError(
                f"SelfModifyingMemory reads its memory at the start of inner batches, and {reason}"
            )

    @property
    def gate_names(self) -> tuple[str, ...]:
        """Names of the gates, each of which has a memory."""
        assert isinstance(self.memory, RecipeMixer)  # validate
        return tuple(gate.name for gate in self.memory.recipe.gates())

    @property
    def children(self) -> Mapping[str, Mixer]:
        return dict.fromkeys(("memory", "keys", "values", *self.gate_names), self.memory)

    def streams(self, T: int) -> Mapping[str, Stream]:
        return {name: Stream(tokens=T, queries=2) for name in self.children}

    @property
    def equations(self) -> tuple[str, ...]:
        gates = ", ".join(f"{name} of U m_{name}(v)" for name in self.gate_names)
        return (
            f"k' = m_keys(k), v' = m_values(v){', ' if gates else ''}{gates}, y = m_memory(q)",
            "k, k', v and v' have the length of qk_norm, and every m learns (k', m(v'))",
            "all outputs are those at the start of the inner batch",
        )


def _why_not_self_modifying(mixer: Mixer) -> str:
    """Return the reason why a recipe cannot have its keys from memories; empty if it can."""
    reason = why_not_one_memory(mixer)
    if reason:
        return reason
    assert isinstance(mixer, RecipeMixer)
    recipe, options = mixer.recipe, mixer.options
    memory, algorithm = recipe.memory, recipe.algorithm
    if not isinstance(memory, Stack) or not memory.read.plain:
        return f"{memory.brief} is not a plain read of linear maps: use memory.MLP()"
    if recipe.features.lifts:
        return f"{recipe.features.brief} lifts its keys: use features.Identity()"
    if recipe.retention.has_link:
        return f"{recipe.retention.title} has a link: use retention.Keep() or Decay()"
    if algorithm.batch_size > 1 and algorithm.update_every != "batch":
        return (
            f"tokens of {algorithm.title} read every update: use update_every='batch' or "
            "batch_size=1"
        )
    if options.ties or options.complex_decay != "none":
        return "its keys or gates come from the layer: leave ties and complex_decay out"
    if options.qk_norm not in ("l2", "rms"):
        return f"LayerOptions(qk_norm={options.qk_norm!r}) lets it diverge: use 'l2' or 'rms'"
    if any(gate.role == "key" for gate in recipe.gates()):
        return f"{recipe.bias.title} has a key from the layer: use bias.Probe(at='key')"
    return ""
