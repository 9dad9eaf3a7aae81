"""The cache: one state per layer, behind the interface that transformers generates with.

Whatever a layer remembers (a memory and its momentum, the associations of a window, all keys and
values, the tail of a convolution, an angle, a last token) is one `LayerState`, so there is one kind
of cache layer. It serves `RecollectForCausalLM`, and layers swapped into other decoders, whose
caches mix it with layers of keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from recollect.blocks.state import AnyState
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recorded_call import RecordedCall, roll_back

__all__ = ["CACHE", "RecollectCache", "StateLayer", "cache_of", "grows", "one_cache"]

_FIELDS = BaseModelOutputWithPast.__dataclass_fields__
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
"""What outputs and arguments of transformers call a cache: ``cache`` since 5.24."""


def cache_of(outputs: Any) -> Any:
    """Return the cache in the outputs of a model or of ``generate``.

    Transformers calls it ``outputs.cache`` from 5.24 on; before, ``outputs.past_key_values``, or
    ``outputs.cache_params`` of Mamba.

    Args:
        outputs: outputs of any causal language model, with ``use_cache=True``.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = rc.lm.RecollectForCausalLM(config).eval()
        >>> rc.lm.cache_of(model(torch.tensor([[1, 2, 3]]))).get_seq_length()
        3
    """
    names = (CACHE, "cache_params")
    return getattr(outputs, next((name for name in names if hasattr(outputs, name)), CACHE))


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache that was given, by its name or by the one it had before transformers 5.24.

    Raises:
        ValueError: two of them.
    """
    if cache is None:
        return past_key_values
    if past_key_values is not None and past_key_values is not cache:
        raise ValueError("cache and past_key_values are two names of one argument: give cache")
    return cache


def grows(layer: MemoryLayer) -> bool:
    """Whether a layer's state grows with the text: all associations, or a row per key."""
    return layer.recipe.buffer_size is None or layer.recipe.uses_kernel_rows


class StateLayer(CacheLayerMixin):
    """One layer's state in a cache of transformers.

    Args:
        state: after the columns so far; ``None`` before the first.
        seen: columns of the batch so far, padding included.

    Attributes:
        record_past: whether calls are recorded, so that `crop` can remove their tokens.
        calls: recorded calls since the last crop, and the call that it cut.
    """

    is_compileable = False  # the decoding loop must not put it into fixed buffers
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: AnyState | None = None, seen: int = 0) -> None:
        super().__init__()
        self.state, self.seen = state, seen
        self.is_initialized = state is not None
        self.record_past = False
        self.calls: tuple[RecordedCall, ...] = ()

    def __repr__(self) -> str:
        size = 0 if self.state is None else self.state.nbytes
        return f"{type(self).__name__}({self.seen} columns, {size} bytes)"

    @property
    def batch_size(self) -> int:
        """Rows; −1 before the first column."""
        return -1 if self.state is None else self.state.rows

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can remove the tokens of the next call: whether it is recorded."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """Record each call from now on: the state before it, and the inputs of its memory."""
        self.record_past = True

    def advance(
        self, state: AnyState | None, columns: int, calls: Sequence[RecordedCall] = ()
    ) -> None:
        """Take the state after ``columns`` more, and the calls that computed it, if recorded."""
        self.state, self.seen, self.is_initialized = state, self.seen + columns, True
        self.calls = (*self.calls, *calls)

    def get_seq_length(self) -> int:
        """Columns of the batch so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Columns that a mask spans, and the first of them."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + new, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its earlier name

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order: the survivors of a beam."""
        self._change(lambda state: state.select(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times in a row."""
        self._change(lambda state: state.repeat(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self.is_initialized = None, 0, False
        self.calls = ()

    def offload(self) -> None:
        """Stay: a state is small."""

    def prefetch(self) -> None:
        """Nothing to fetch."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns of recorded calls, as if they had never been read.

        The memory runs again over the columns of the last call that remain. Earlier calls are
        dropped, so ``crop(0)`` frees their memory.

        Args:
            tokens_to_remove: number of columns, as a negative number or 0.

        Raises:
            ValueError: a positive number, or more columns than were recorded.
        """
        count = -int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if count < 0:
            raise ValueError(
                "crop takes minus the number of tokens to remove, as transformers passes it, not "
                f"{-count}"
            )
        if count and not self.record_past:
            raise ValueError(
                f"crop({-count}) removes tokens whose calls were not recorded: call "
                "cache.activate_past_recording() before the model reads them"
            )
        recorded = sum(call.num_tokens for call in self.calls)
        if count > recorded:
            columns = "1 column that was" if recorded == 1 else f"{recorded} columns that were"
            raise ValueError(
                f"crop({-count}) removes more than the {columns} recorded since the last "
                "crop: read the text again, up to the token to go back to"
            )
        calls, state = roll_back(self.calls, count) if count else ([*self.calls], self.state)
        self.advance(state, -count)
        self.calls, self.is_initialized = (*calls[-1:],), state is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        calls = tuple(call for call in state["calls"] if call is not None)  # those of a pickle are
        vars(self).update(state | {"calls": calls})

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        """There are no keys and values to hold.

        Raises:
            TypeError: always.
        """
        raise TypeError("this cache layer holds a memory's state, not keys and values")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """As `lazy_initialization`."""
        self.lazy_initialization(key_states, value_states)

    def _change(self, f: Callable[[AnyState], AnyState]) -> None:
        if self.state is not None:
            self.state, self.calls = f(self.state), ()


class RecollectCache(Cache):
    """States of all layers after some tokens.

    A forward pass makes a new one and leaves the one it was given as it is, so a prompt can be
    continued several times. After `activate_past_recording`, the caches of following passes can be
    cropped, which changes them in place.

    Args:
        states: one per layer; none before the first token.
        seen: columns of the batch so far, padding included.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = rc.lm.RecollectForCausalLM(config).eval()
        >>> cache = rc.lm.cache_of(model(torch.tensor([[1, 2, 3]]), use_cache=True))
        >>> cache.get_seq_length()
        3
        >>> out = model(torch.tensor([[4]]), cache=cache, use_cache=True)
        >>> rc.lm.cache_of(out).get_seq_length(), cache.get_seq_length()
        (4, 3)
        >>> cache.activate_past_recording()
        >>> cache = rc.lm.cache_of(model(torch.tensor([[4, 5, 6]]), cache=cache, use_cache=True))
        >>> cache.crop(-2)
        >>> cache.get_seq_length()
        4
    """

    def __init__(self, states: Iterable[AnyState] = (), seen: int = 0) -> None:
        super().__init__(layers=[StateLayer(state, seen) for state in states])
        self.seen = seen
        self._record_first_call = False

    def __repr__(self) -> str:
        return (
            f"RecollectCache({len(self)} layers, {self.rows} rows, {self.seen} columns, "
            f"{self.nbytes_per_sequence} bytes per sequence)"
        )

    def __iter__(self) -> Iterator[AnyState]:
        return iter(self.states)

    @property
    def states(self) -> tuple[AnyState, ...]:
        """One per layer."""
        return tuple(layer.state for layer in self.layers)

    @property
    def rows(self) -> int:
        """B; 0 before the first token."""
        return self.states[0].rows if self.states else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included."""
        return self.seen

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove the tokens of the next call: whether it is recorded."""
        return super().is_croppable if self.layers else self._record_first_call

    def activate_past_recording(self) -> None:
        """Record each call that continues this cache, so that `crop` can remove its tokens."""
        self._record_first_call = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns of recorded calls, see `StateLayer.crop`.

        Args:
            tokens_to_remove: number of columns, as a negative number or 0.

        Raises:
            ValueError: a positive number, or more columns than were recorded.
        """
        if tokens_to_remove and not self.layers:
            raise ValueError(
                f"crop({int(tokens_to_remove)}) removes tokens, and this cache has none: pass it "
                "to the model with the tokens first"
            )
        super().crop(tokens_to_remove)
        self.seen = self.layers[0].get_seq_length() if self.layers else 0
        if not self.seen:
            self.layers = []

    def continued(
        self, states: Sequence[AnyState], columns: int, calls: Sequence[RecordedCall] = ()
    ) -> RecollectCache:
        """Return the cache after more columns.

        Args:
            states: one per layer.
            columns: number of columns that were read.
            calls: one per layer, if they were recorded.
        """
        cache = RecollectCache(states, self.get_seq_length() + columns)
        if calls:
            cache.activate_past_recording()
            earlier = [layer.calls for layer in self.layers] or [()] * len(calls)
            for layer, previous, call in zip(cache.layers, earlier, calls, strict=True):
                layer.calls = (*previous, call)
        return cache

    def copy(self) -> RecollectCache:
        """Return a cache of the same states and calls, which can be cropped separately."""
        cache = copy.copy(self)
        cache.layers = [copy.copy(layer) for layer in self.layers]
        return cache

    def reset(self) -> None:
        """Forget everything."""
        self.layers, self.seen = [], 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.states)

    @property
    def nbytes_per_sequence(self) -> int:
        """Bytes of all tensors, per row."""
        return self.nbytes // max(1, self.rows)

    def map(self, f: Callable[[AnyState], AnyState]) -> RecollectCache:
        """Apply ``f`` to every layer's state."""
        return RecollectCache((f(state) for state in self.states), self.seen)

    def detach(self) -> RecollectCache:
        """Cut the graph (truncated backpropagation)."""
        return self.map(lambda state: state.detach())
