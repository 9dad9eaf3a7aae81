"""Inputs of a layer's memory, and the state of a layer between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from recollect.state.state import State
from recollect.state.tree import TensorTree, where_rows
from recollect.typing import Init

__all__ = ["LayerState", "MemoryInputs"]

PER_TOKEN = ("q", "k", "v", "unrotated_values", "phase", "gate_input", "conv_inputs", "keys")
"""Fields of `MemoryInputs` with an axis of tokens, besides the gates."""


@dataclass(kw_only=True)  # one per decoded token: a frozen one takes five times as long
class MemoryInputs:
    """The inputs of a layer's memory, and the tensors that the layer needs after it was read.

    T tokens have n associations each; with n = 1 the axis of n is missing.
    """

    q: Tensor  # queries [B, T, Hq, K] of Hq heads
    k: Tensor  # keys [B, T, H, (n,) K] of H memories
    v: Tensor  # values [B, T, H, (n,) V]
    # gates of each token by name, [B, T, H, (n,) ...], as `recollect.recall` takes them
    gates: dict[str, Tensor]
    params: dict[str, Tensor]  # params by name, as `recollect.recall` takes them
    unrotated_values: Tensor  # values before any rotation, with the shape of v
    phase: Tensor | None  # angles of the rotation of a complex decay, or None
    gate_input: Tensor  # input of the output gate [B, T, d_model]
    conv: Tensor | None  # last inputs of the short convolution, or None
    final_phase: Tensor | None  # last angles of a complex decay, or None
    shift: Tensor | None  # last token of the token shift, or None
    conv_inputs: Tensor | None = None  # inputs of the short convolution [B, T, D], if requested
    # states of n recurrences of keys and values after every token [B, T, n, H, D], or None
    keys: Tensor | None = None
    final_keys: Tensor | None = None  # the last ones [B, n, H, D], or None

    def first(self, n: int) -> MemoryInputs:
        """Return the inputs at the first n tokens; the final tensors remain those of the call."""
        tensors = {name: getattr(self, name) for name in PER_TOKEN}
        cut = {name: x[:, :n] for name, x in tensors.items() if x is not None}
        return replace(self, gates={name: x[:, :n] for name, x in self.gates.items()}, **cut)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerState(TensorTree):
    """State of a `MemoryLayer`. Its batch elements are independent sequences.

    Attributes:
        memory: state of the recipe, see `recollect.state.state.State`.
        conv: last inputs of the short convolution ``[B, width − 1, D]``, with the channels of q, k
            and v concatenated, or ``None``.
        phase: cumulated angle of a complex decay ``[B, H, D/2]`` in float64, or ``None``.
        shift: the last token ``[B, 1, d_model]`` for the token shift, or ``None``.
        keys: states of n recurrences of keys and values ``[B, n, H, D]`` (`recollect.Tie`), or
            ``None``.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
        >>> y, state = layer(torch.randn(2, 5, 8))
        >>> state.position
        tensor([5, 5])
        >>> y, state = layer(torch.randn(2, 1, 8), state)
        >>> state.position
        tensor([6, 6])
        >>> state = state.reset(torch.tensor([True, False]))
        >>> state.position
        tensor([0, 6])
    """

    memory: State
    conv: Tensor | None = None
    phase: Tensor | None = None
    shift: Tensor | None = None
    keys: Tensor | None = None

    @property
    def layer_tensors(self) -> dict[str, Tensor]:
        """Tensors besides the state of the memory, by name."""
        named = {"conv": self.conv, "phase": self.phase, "shift": self.shift, "keys": self.keys}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def position(self) -> Tensor:
        """Number of tokens of the current document ``[B]``, used by the rotary embedding."""
        return self.memory.position

    @property
    def rows(self) -> int:
        """Batch size B."""
        return self.memory.rows

    @property
    def host_position(self) -> int | None:
        """Number of tokens of every batch element, if the host knows it."""
        return self.memory.host_position

    def map_memories(self, f: Callable[[State], State]) -> LayerState:
        """Apply ``f`` to the state of the memory."""
        return replace(self, memory=f(self.memory))

    def reset(self, mask: Tensor, init: Init | None = None) -> LayerState:
        """Restart the batch elements at which ``mask`` is True.

        Args:
            mask: ``[B]``, True for batch elements that restart.
            init: initial memory, as for `recollect.recall`, for example ``layer.initial_memory``;
                zeros by default.
        """
        zeros = {
            name: where_rows(mask, x.new_zeros(()), x) for name, x in self.layer_tensors.items()
        }
        return LayerState(memory=self.memory.reset(mask, init), **zeros)

    def where(self, rows: Tensor, other: LayerState) -> LayerState:
        """Choose between two states for each batch element.

        Args:
            rows: ``[B]``, True for this state and False for the other.
            other: a state of the same layer.
        """
        pairs = {name: (x, other.layer_tensors[name]) for name, x in self.layer_tensors.items()}
        chosen = {name: where_rows(rows, x, y.to(x.dtype)) for name, (x, y) in pairs.items()}
        return LayerState(memory=self.memory.where(rows, other.memory), **chosen)

    def trim(self, n: int) -> LayerState:
        """Drop all but the newest n slots of associations, see `State.trim`."""
        return replace(self, memory=self.memory.trim(n))
