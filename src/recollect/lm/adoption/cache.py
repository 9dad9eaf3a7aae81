"""Layers of a model's cache that can be cropped: the memory alone is run again."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from recollect.layer.recorded_call import RecordedCall, roll_back
from recollect.lm.adoption.subclass import specialize

__all__ = ["CountingCache", "LayerMemory", "memory_of"]


def _moving_method(name: str) -> Callable[..., None]:
    """Return a method of cache layers that moves tensors without a change of their values."""

    def method(self: Any, *args: Any) -> None:
        is_own = self._is_own()
        getattr(super(LayerMemory, self), name)(*args)
        if is_own:
            self._mark()

    return method


_reorder = _moving_method("reorder_cache")


def _last_inputs(layer: Any, num_kept: int) -> Tensor | None:
    """Return the last inputs of the convolution ``[B, num_kept, C]``, zeros before the first."""
    conv = layer.conv_states[0]
    if conv is None:
        return None
    missing = max(num_kept - conv.shape[-1], 0)
    return nn.functional.pad(conv[..., max(conv.shape[-1] - num_kept, 0) :], (missing, 0)).mT


def _write(layer: Any, name: str, x: Tensor) -> None:
    """Overwrite the tensor of a cache layer in place."""
    tensors = getattr(layer, name)
    if tensors[0] is None:
        layer.lazy_initialization(**{name: x})
    if tensors[0].shape != x.shape:  # inputs of the convolution that another model recorded
        tensors[0] = torch.empty_like(x)
    tensors[0].copy_(x)


class MemoryInGraph:
    """A layer of a cache of transformers in a compiled graph, in which no class can be changed."""

    record_past = False

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def load(self, num_kept: int) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
        if not self.layer.has_previous_state[0]:
            return None, None
        return _last_inputs(self.layer, num_kept), (self.layer.recurrent_states[0],)

    def refuse_documents(self) -> None:
        raise ValueError("packed documents have no cache in a compiled model: pass use_cache=False")

    def store(
        self, conv: Tensor | None, memory: tuple[Tensor, ...], T: int, recorded: None
    ) -> None:
        if conv is not None:
            _write(self.layer, "conv_states", conv.mT)
        _write(self.layer, "recurrent_states", memory[0])
        self.layer.has_previous_state[0] = True


class LayerMemory(ABC):  # noqa: B024  (a base that cache layers of transformers share)
    """The memory of an adopted layer in a cache layer of transformers, in the model's own layout.

    It is a mixin: cache layers that an adopted layer writes become objects of a subclass.
    """

    _calls: Sequence[RecordedCall] = ()
    num_columns = 0
    _has_documents = False
    _version: int | None = None

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` restores earlier states exactly: keys and values next to a memory do."""
        return not isinstance(self, CacheLayerMixin) or isinstance(self, DynamicLayer)

    def load(self: Any, num_kept: int) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
        """Return the last inputs of the convolution ``[B, num_kept, C]``, and the stored memory."""
        if self._has_documents:
            self.refuse_documents()
        if not self.has_previous_state[0]:
            return None, None
        return _last_inputs(self, num_kept), self._read_memory()

    def refuse_documents(self: Any) -> None:
        """Store nothing of a call with packed documents, and refuse any call before or after it."""
        if self.has_previous_state[0] or self._has_documents:
            raise ValueError(
                "a cache has one state per sequence, so calls with packed documents can neither "
                "continue nor be continued: pass use_cache=False"
            )
        self._has_documents = True

    def store(
        self: Any,
        conv: Tensor | None,
        memory: tuple[Tensor, ...],
        T: int,
        recorded: RecordedCall | None,
    ) -> None:
        """Write the state after a call of T columns."""
        if self.num_columns and not self._is_own():
            self.disown()
        self._write_all(conv, memory)
        self._calls = [*self._calls, recorded] if recorded is not None else []
        self.num_columns += T if self.num_columns >= 0 else 0
        self._mark()

    def _read_memory(self: Any) -> tuple[Tensor, ...] | None:
        return (self.recurrent_states[0],)

    def _write_memory(self: Any, memory: tuple[Tensor, ...]) -> None:
        _write(self, "recurrent_states", memory[0])

    def _write_all(self: Any, conv: Tensor | None, memory: tuple[Tensor, ...] | None) -> None:
        """Overwrite the state; a memory of ``None`` is the state before the first token."""
        if conv is not None:
            _write(self, "conv_states", conv.mT)
        if memory is not None:
            self._write_memory(memory)
        self.has_previous_state[0] = memory is not None

    def _mark(self: Any) -> None:
        self._version = self._current_version()

    def _is_own(self: Any) -> bool:
        return self._version == self._current_version()

    def _current_version(self: Any) -> int | None:
        memory = self.recurrent_states[0]
        if torch.compiler.is_compiling() or memory is None or memory.is_inference():
            return None
        return int(memory._version)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_version": self._is_own()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._calls = [call for call in self._calls if call is not None]
        self._version = self._current_version() if self._version else -1

    def crop(self: Any, tokens_to_remove: int) -> None:
        """Restore the state before the last tokens, whose number transformers passes negated."""
        n = abs(int(tokens_to_remove))
        if n:
            self._crop_memory(n)
        self._calls = self._calls[-1:]  # generation never goes back behind an earlier crop
        if isinstance(self, DynamicSlidingWindowLayer):  # keys and values next to the memory
            DynamicSlidingWindowLayer.crop(self, tokens_to_remove)
        elif isinstance(self, DynamicLayer):
            DynamicLayer.crop(self, tokens_to_remove)

    def disown(self) -> None:
        """Forget the recorded calls and the length, because another model writes the memory."""
        self._calls = []
        if self.num_columns:
            self.num_columns = -1

    def _crop_memory(self: Any, n: int) -> None:
        available = sum(call.num_tokens for call in self._calls)
        if n > available or not self._is_own():
            raise ValueError(
                f"cannot remove {n} tokens from a memory of which {available} are recorded: call "
                "cache.activate_past_recording() before the model processes them"
            )
        self._calls, state = roll_back(self._calls, n)
        self._write_all(*state)
        self.num_columns -= n
        self._mark()

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        """Keep these sequences, in this order."""
        _reorder(self, beam_idx)
        self._calls = []

    offload = _moving_method("offload")
    prefetch = _moving_method("prefetch")

    def reset(self: Any) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[misc]
        self._calls, self.num_columns, self._has_documents = [], 0, False
        self._mark()


class CountingCache:
    """A mixin for caches with adopted layers.

    Without layers of keys and values, memories report the length. Layers that were never written,
    which some versions of transformers have, are not cropped.
    """

    def get_seq_length(self: Any, layer_idx: int = 0) -> int:
        """Return the number of columns of the batch so far, padding included."""
        layers = self.layers
        if layer_idx == 0 and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
            counts = [layer.num_columns for layer in layers if isinstance(layer, LayerMemory)]
            if counts and counts[0] >= 0:
                return int(counts[0])
        return super().get_seq_length(layer_idx)  # type: ignore[misc, no-any-return]

    def get_recurrent_state(self: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the memory for a layer of the original model, which will overwrite it."""
        layer = self.layers[layer_idx]
        if isinstance(layer, LayerMemory):
            layer.disown()
        return super().get_recurrent_state(layer_idx, *args, **kwargs)  # type: ignore[misc]

    def crop(self: Any, tokens_to_remove: int) -> None:
        """Remove the last tokens from all layers, as `LayerMemory.crop` does."""
        for layer in self.layers:
            states = getattr(layer, "conv_states", {0: layer}).values()
            if isinstance(layer, LayerMemory) or any(x is not None for x in states):
                layer.crop(tokens_to_remove)


def memory_of(cache: Any, index: int) -> Any:
    """Return the cache layer of the recurrent layer with an index."""
    if index >= len(cache.layers) or not hasattr(cache.layers[index], "recurrent_states"):
        raise ValueError(
            f"layer {index} of the cache cannot hold a memory: create the cache with "
            "DynamicCache(config=model.config)"
        )
    layer = cache.layers[index]
    if torch.compiler.is_compiling():
        return layer if isinstance(layer, LayerMemory) else MemoryInGraph(layer)
    specialize(layer, LayerMemory)
    specialize(cache, CountingCache)
    return layer
