"""A memory whose keys, values and gates are outputs of memories, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer, why_not_one_memory
from recollect.choices.memory.base import Stack
from recollect.fields import validated_field

__all__ = ["SelfModifyingMemory"]

MAX_RATE, MAX_TOTAL_RATE = 0.05, 0.4
"""Largest default rate of a token, and of all steps of an inner batch, for keys of length 1."""


def _with_rate(value: Any) -> Mixer:
    """Convert a value to a mixer whose rate has the default range of the composition."""
    mixer = as_mixer(value)
    if not isinstance(mixer, RecipeMixer):
        return mixer
    recipe, options = mixer.recipe, mixer.options
    rate = options.gate("lr")
    has_rate = any(x.name == "lr" for x in (*recipe.gates(), *recipe.params()))
    has_range = (rate.activation, rate.low, rate.high, rate.init) != (None,) * 4
    if not has_rate or has_range or rate.resolve_unit("lr", recipe) is not None:
        return mixer
    num_tokens = 1 if recipe.algorithm.reduction == "mean" else recipe.algorithm.batch_size
    high = min(MAX_RATE, MAX_TOTAL_RATE / (num_tokens * (recipe.context.horizon or 1)))
    rate = replace(rate, activation="sigmoid", high=high, init=high / 5)
    gates = {**dict(options.gate_options), "lr": rate}
    return replace(mixer, options=replace(options, gate_options=gates))


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
    and norm scales to length 1 (``qk_norm="l2"`` of the layer): a memory that writes its output at
    v'_t may grow without bound if v'_t is longer than k'_t. The layer's norm, gate and output map
    follow y.

    By default, the rate ``"lr"`` is below η = min(0.05, 0.4/n) and starts at η/5, with n the number
    of losses of an inner batch. Larger sums of steps may diverge.

    Args:
        memory: a recipe with its layer. Its memory consists of linear maps without features, and
            its output before the first write is not 0. Tokens of an inner batch read its start
            (``update_every="batch"``, or ``batch_size=1``).

    Raises:
        RecipeError: another recipe, or ties, rotations or factors of queries and keys.

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

    memory: Mixer | Any = validated_field(dataclasses.MISSING, _with_rate)

    def validate(self) -> None:
        reason = _why_not_self_modifying(self.memory)
        if reason:
            raise ValueError(
                "SelfModifyingMemory reads keys, values and gates from memories at the start of "
                f"inner batches, and {reason}"
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
            "k, k', v and v' have length 1, and every m learns (k', m(v'))",
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
    if options.qk_norm != "l2":
        return (
            f"LayerOptions(qk_norm={options.qk_norm!r}) has keys that are longer than 1, for which "
            "its rates diverge: use 'l2'"
        )
    for name, default in (("rope_theta", None), ("qk_scale", "none"), ("qk_affine", False)):
        value = getattr(options, name)
        if value != default:
            return f"LayerOptions({name}={value!r}) changes queries and not k': leave {name} out"
    if any(gate.role == "key" for gate in recipe.gates()):
        return f"{recipe.bias.title} has a key from the layer: use bias.Probe(at='key')"
    if memory.linear:
        return f"{memory.brief} starts at 0, so that its keys stay 0: use memory.MLP()"
    for name in ("memory_init_scale", "last_map_init_scale"):
        if not memory.residual and recipe.needs_init() and getattr(options, name) == 0:
            return f"LayerOptions({name}=0) starts at 0, so that its keys stay 0: leave {name} out"
    return ""
