"""State of a composition: the states of its parts, and its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from recollect.layer.state import LayerState
from recollect.state.state import State
from recollect.state.tree import TensorTree, where_rows

__all__ = ["AnyState", "MixerState", "state_from_dict"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixerState(TensorTree):
    """State of a composition. Its batch elements are independent sequences.

    It has the interface of `LayerState`, for caches, beams and truncated backpropagation.

    Attributes:
        parts: the states of the parts by name.
        tensors: further tensors of the composition by name, batch first.
        clock: name of the part, or else of the tensor, that counts the tokens of the text.
        prefix: number of learned tokens that this part read before the text.

    Examples:
        >>> both = rc.blocks.Sequential("gla", "delta_net")
        >>> layer = rc.blocks.build(both, d_model=8, num_heads=2)
        >>> y, state = layer(torch.randn(2, 5, 8))
        >>> state.position
        tensor([5, 5])
        >>> state.select(torch.tensor([1])).rows
        1
    """

    parts: Mapping[str, AnyState]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    clock: str
    prefix: int = 0

    @property
    def _position_part(self) -> AnyState | None:
        return self.parts.get(self.clock)

    @property
    def position(self) -> Tensor:
        """Number of tokens of the text ``[B]``."""
        part = self._position_part
        position = self.tensors[self.clock] if part is None else part.position
        return (position - self.prefix).clamp_min(0) if self.prefix else position

    @property
    def host_position(self) -> int | None:
        """Number of tokens of every batch element, if the host knows it."""
        part = self._position_part
        position = None if part is None else part.host_position
        return None if position is None else max(position - self.prefix, 0)

    @property
    def rows(self) -> int:
        """Batch size B."""
        return self.position.shape[0]

    def map_memories(self, f: Callable[[State], State]) -> MixerState:
        """Apply ``f`` to the state of every memory."""
        return replace(self, parts={n: part.map_memories(f) for n, part in self.parts.items()})

    def reset(self, mask: Tensor, init: Mapping[str, Any] | None = None) -> MixerState:
        """Restart the batch elements at which ``mask`` is True.

        Args:
            mask: ``[B]``, True for batch elements that restart.
            init: initial memories by part, for example ``layer.initial_memory``; zeros for missing
                parts.
        """
        init = {} if init is None else init
        return replace(
            self,
            parts={name: part.reset(mask, init.get(name)) for name, part in self.parts.items()},
            tensors={n: where_rows(mask, x.new_zeros(()), x) for n, x in self.tensors.items()},
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Return contiguous tensors by dotted name, ready for safetensors."""
        flat, used = super().to_dict(), set[int]()
        for name, x in flat.items():
            # Two parts may share a tensor, which safetensors refuses.
            flat[name] = x.clone() if x.data_ptr() in used else x
            used.add(x.data_ptr())
        return flat

    @classmethod
    def _read(cls, flat: Mapping[str, Tensor], prefix: str) -> MixerState:
        state = super()._read(flat, prefix)
        if state.clock not in {*state.parts, *state.tensors}:
            raise ValueError(
                f"this is not a state of a composition: it has no part {state.clock!r}"
            )
        return state


AnyState = LayerState | MixerState
"""State of a recipe's layer, or of a composition."""


def state_from_dict(flat: Mapping[str, Tensor]) -> AnyState:
    """Rebuild either kind of state from the result of its ``to_dict``."""
    return MixerState.from_dict(flat) if "clock" in flat else LayerState.from_dict(flat)
