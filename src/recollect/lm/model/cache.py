"""The cache of transformers with one state per layer.

A `LayerState` holds all that a layer stores (a memory and its momentum, the associations of a
window, the last inputs of a convolution), so there is one class of cache layers. Caches of decoders
with replaced layers mix it with layers of keys and values.
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

__all__ = [
    "CACHE_KEY",
    "RecollectCache",
    "StateLayer",
    "cache_of",
    "has_growing_state",
    "resolve_cache",
]

_FIELDS = BaseModelOutputWithPast.__dataclass_fields__
CACHE_KEY = "cache" if "cache" in _FIELDS else "past_key_values"
"""Name of the cache in outputs and arguments of transformers: ``cache`` since 5.24."""


def cache_of(outputs: Any) -> Any:
    """Return the cache in the outputs of a model or of ``generate``.

    It is ``outputs.cache`` since transformers 5.24. Before, it is ``outputs.past_key_values``, or
    ``outputs.cache_params`` of Mamba.

    Args:
        outputs: outputs of a causal language model with ``use_cache=True``.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> model = rc.lm.RecollectForCausalLM(config).eval()
        >>> rc.lm.cache_of(model(torch.tensor([[1, 2, 3]]))).get_seq_length()
        3
    """
    names = (CACHE_KEY, "cache_params")
    return getattr(outputs, next((name for name in names if hasattr(outputs, name)), CACHE_KEY))


def resolve_cache(cache: Any, past_key_values: Any) -> Any:
    """Return the cache under its name or the one before transformers 5.24, ``past_key_values``."""
    if cache is None:
        return past_key_values
    if past_key_values is not None and past_key_values is not cache:
        raise ValueError("cache and past_key_values are two names of one argument: give cache")
    return cache


def has_growing_state(layer: MemoryLayer) -> bool:
    """Whether a layer's state grows with the text: all associations, or a row per key."""
    return layer.recipe.buffer_size is None or layer.recipe.uses_kernel_rows


class StateLayer(CacheLayerMixin):
    """State of one layer in a cache of transformers.

    Args:
        state: state after the tokens so far; ``None`` before the first.
        past_length: number of tokens so far, padding included.

    Attributes:
        record_past: whether calls are recorded, so that `crop` can remove their tokens.
        calls: recorded calls since the last crop, and the call that it cut.
    """

    is_compileable = False  # the decoding loop must not put it into fixed buffers
    is_sliding = False
    supports_early_init = False

    def __init__(self, state: AnyState | None = None, past_length: int = 0) -> None:
        super().__init__()
        self.state, self.past_length = state, past_length
        self.is_initialized = state is not None
        self.record_past = False
        self.calls: tuple[RecordedCall, ...] = ()

    def __repr__(self) -> str:
        size = 0 if self.state is None else self.state.nbytes
        return f"{type(self).__name__}({self.past_length} tokens, {size} bytes)"

    @property
    def batch_size(self) -> int:
        """Number of sequences; −1 before the first token."""
        return -1 if self.state is None else self.state.rows

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the next call is recorded, so that `crop` can remove its tokens."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """Record each call from now on: the state before it, and the inputs of its memory."""
        self.record_past = True

    def advance(
        self, state: AnyState | None, num_tokens: int, calls: Sequence[RecordedCall] = ()
    ) -> None:
        """Store the state after ``num_tokens`` more tokens, and the recorded calls."""
        self.state, self.is_initialized = state, True
        self.past_length += num_tokens
        self.calls = (*self.calls, *calls)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, padding included."""
        return self.past_length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the length of a mask over past and new tokens, and its offset 0."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.past_length + new, 0

    def get_max_length(self) -> int:
        """Return −1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # name before transformers 5.24

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_state(lambda state: state.select(beam_idx))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_state(lambda state: state.repeat(repeats))

    def reset(self) -> None:
        self.state, self.past_length, self.is_initialized = None, 0, False
        self.calls = ()

    def offload(self) -> None:
        """Do nothing, because a state is small."""

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as if the model had never read them.

        The memory runs again over the remaining tokens of the last call. Earlier calls are dropped,
        so ``crop(0)`` frees their memory.

        Args:
            tokens_to_remove: number of tokens, as a negative number or 0.

        Raises:
            ValueError: a positive number, or more tokens than were recorded.
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
            tokens = "1 token that was" if recorded == 1 else f"{recorded} tokens that were"
            raise ValueError(
                f"crop({-count}) removes more than the {tokens} recorded since the last crop: read "
                "the text again, up to the last token to keep"
            )
        calls, state = roll_back(self.calls, count) if count else ([*self.calls], self.state)
        self.advance(state, -count)
        self.calls, self.is_initialized = (*calls[-1:],), state is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        calls = (call for call in state["calls"] if call is not None)  # recorded calls pickle as it
        vars(self).update(state | {"calls": tuple(calls)})

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: there are no keys and values."""
        raise TypeError("this cache layer holds a memory's state, not keys and values")

    update = lazy_initialization

    def _map_state(self, f: Callable[[AnyState], AnyState]) -> None:
        if self.state is not None:
            self.state, self.calls = f(self.state), ()


class RecollectCache(Cache):
    """States of all layers after some tokens.

    A forward pass returns a new cache and does not change its argument, so a prompt can be
    continued several times. After `activate_past_recording`, the caches of later passes can be
    cropped in place.

    Args:
        states: one per layer; none before the first token.
        past_length: number of tokens so far, padding included.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
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

    def __init__(self, states: Iterable[AnyState] = (), past_length: int = 0) -> None:
        super().__init__(layers=[StateLayer(state, past_length) for state in states])
        self.past_length = past_length
        self._record_first_call = False

    def __repr__(self) -> str:
        return (
            f"RecollectCache({len(self)} layers, {self.batch_size} sequences, {self.past_length} "
            f"tokens, {self.nbytes_per_sequence} bytes per sequence)"
        )

    def __iter__(self) -> Iterator[AnyState]:
        return iter(self.states)

    @property
    def states(self) -> tuple[AnyState, ...]:
        """One per layer."""
        return tuple(layer.state for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 before the first token."""
        return self.states[0].rows if self.states else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, padding included."""
        return self.past_length

    @property
    def is_croppable(self) -> bool:
        """Whether the next call is recorded, so that `crop` can remove its tokens."""
        return super().is_croppable if self.layers else self._record_first_call

    def activate_past_recording(self) -> None:
        """Record each call that continues this cache, so that `crop` can remove its tokens."""
        self._record_first_call = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of recorded calls, see `StateLayer.crop`.

        Raises:
            ValueError: a positive number, or more tokens than were recorded.
        """
        if tokens_to_remove and not self.layers:
            raise ValueError(
                f"crop({int(tokens_to_remove)}) removes tokens, and this cache has none: pass it "
                "to the model with the tokens first"
            )
        super().crop(tokens_to_remove)
        self.past_length = self.layers[0].get_seq_length() if self.layers else 0
        if not self.past_length:
            self.layers = []

    def continued(
        self, states: Sequence[AnyState], num_tokens: int, calls: Sequence[RecordedCall] = ()
    ) -> RecollectCache:
        """Return the cache after more tokens.

        Args:
            states: one per layer.
            num_tokens: number of new tokens.
            calls: one per layer, if they were recorded.
        """
        cache = RecollectCache(states, self.past_length + num_tokens)
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
        """Remove all tokens."""
        self.layers, self.past_length = [], 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.states)

    @property
    def nbytes_per_sequence(self) -> int:
        """Bytes of all tensors, per sequence."""
        return self.nbytes // max(1, self.batch_size)

    def map(self, f: Callable[[AnyState], AnyState]) -> RecollectCache:
        """Return a cache of ``f`` of every layer's state."""
        return RecollectCache((f(state) for state in self.states), self.past_length)

    def detach(self) -> RecollectCache:
        """Return a cache without a graph, for truncated backpropagation."""
        return self.map(lambda state: state.detach())
