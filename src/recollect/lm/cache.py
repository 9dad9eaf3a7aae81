"""The cache: one state per layer, in the shape that text generation asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from recollect.layer import LayerState

__all__ = ["RecollectCache"]


class RecollectCache:
    """States of all layers after some tokens.

    A forward pass makes a new one and leaves the one it was given as it is, so a prompt can be
    continued several times.

    Args:
        states: one per layer.
        seen: columns of the batch so far, padding included.
    """

    is_compileable = False  # the decoding loop must not put it into fixed buffers
    is_sliding = ()

    def __init__(self, states: Iterable[LayerState], seen: int) -> None:
        self.states, self.seen = tuple(states), seen

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[LayerState]:
        return iter(self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included."""
        return self.seen

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.states)

    def map(self, f: Callable[[LayerState], LayerState]) -> RecollectCache:
        """Apply ``f`` to every layer's state."""
        return RecollectCache((f(state) for state in self.states), self.seen)

    def detach(self) -> RecollectCache:
        """Cut the graph (truncated backpropagation)."""
        return self.map(LayerState.detach)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order: the survivors of a beam."""
        self.states = tuple(state.select(beam_idx) for state in self.states)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times in a row."""
        self.states = tuple(state.repeat(repeats) for state in self.states)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.reorder_cache(indices)
