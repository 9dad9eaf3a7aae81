"""Padding and document boundaries of a model's call, delivered to each of its adopted layers.

Decoder layers of several models drop these arguments on the way to their recurrent layer, or get
them only for some calls. A hook on the model reads them once per call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from recollect.choices.runtime import has_data
from recollect.functional.packing import CompactedBatch, compact
from recollect.lm.model.arguments import cu_seqlens_from_starts

__all__ = [
    "CallContext",
    "argument_names",
    "boundaries_of",
    "cache_name",
    "passed_cache",
    "watch_calls",
]

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Names of the cache in forward methods of transformers."""


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module's forward method."""
    return tuple(inspect.signature(module.forward).parameters)


def cache_name(module: nn.Module) -> str | None:
    """Return the name of the cache among a model's arguments, or ``None``."""
    return next((name for name in argument_names(module) if name in CACHE_NAMES), None)


def boundaries_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return boundaries of documents ``[N + 1]`` of ``cu_seq_lens_q`` or ``seq_idx``, or ``None``.

    Transformers' collator for packed documents makes these arguments.
    """
    boundaries: Tensor | None = arguments.get("cu_seq_lens_q")
    index: Tensor | None = arguments.get("seq_idx")
    if boundaries is None and index is not None:
        boundaries = cu_seqlens_from_starts(index[:, 1:] != index[:, :-1])
    return boundaries


def passed_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache that the caller passed, or ``None``."""
    caches = (arguments.get(name) for name in CACHE_NAMES)
    return next((cache for cache in caches if cache is not None), None)


class CallContext:
    """The current call of an adopted model."""

    def __init__(self) -> None:
        self._depth = 0
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def _clear(self) -> None:
        # mask [B, T], or longer if a cache contains earlier tokens; None without padding
        self.attention_mask: Tensor | None = None
        # boundaries [N + 1] of documents in the flattened batch, or None
        self.boundaries: Tensor | None = None
        self.cache: Any = None  # cache that the model or one of its layers got, or None
        # number of tokens per sequence, if the model got the tokens
        self.num_columns: int | None = None
        self._batches: dict[int, CompactedBatch | None] = {}
        self._model: nn.Module | None = None

    @property
    def recomputes(self) -> bool:
        """Whether gradient checkpointing will call layers again in the backward pass."""
        model = self._model
        if model is None or not model.training:
            return False
        return any(getattr(m, "gradient_checkpointing", False) for m in model.modules())

    @property
    def is_active(self) -> bool:
        """Whether the model is in a call; a layer may also be called alone."""
        return self._depth > 0

    def enter(
        self, names: tuple[str, ...], model: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Read the arguments of the outermost call; the hook before a call of the model."""
        if model is self._model:  # a KeyboardInterrupt ended its last call, without `leave`
            self._depth = 0
            self._clear()
        self._depth += 1
        if self._depth > 1:
            return
        self._model = model
        arguments: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        mask = arguments.get("attention_mask")
        if isinstance(mask, Mapping):  # one mask per type of layer
            mask = mask.get("linear_attention")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.attention_mask = mask
        self.cache = passed_cache(arguments)
        tokens = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
        self.num_columns = next((x.shape[1] for x in tokens if x is not None), None)
        self.boundaries = boundaries_of(arguments)
        if self.boundaries is None and self.attention_mask is None:
            self.boundaries = _boundaries_from_positions(arguments.get("position_ids"))

    def leave(
        self, cache_name: str | None, model: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        """Forget the call; the hook after a call of the model."""
        if self.cache is not None and cache_name and isinstance(output, ModelOutput):
            vars(output).setdefault(cache_name, self.cache)  # assisted generation reads it there
        self._depth -= 1
        if not self._depth:
            self._clear()

    def padding(self, T: int) -> CompactedBatch | None:
        """Return the indices of the real ones of the last T tokens; ``None`` if all are real."""
        if T not in self._batches:
            self._batches[T] = padding_of(self.attention_mask, T)
        return self._batches[T]

    def check_num_columns(self, T: int) -> None:
        """Check that a layer with T tokens can locate padding and documents."""
        n = self.num_columns
        if n is None or n == T:
            return
        if self.boundaries is not None or padding_of(self.attention_mask, n) is not None:
            raise ValueError(
                f"padding or documents in {n} tokens, of which the model passes {T} at once to "
                "this layer: pass fewer tokens to the model"
            )

    def is_first(self, T: int) -> Tensor | None:
        """Return which sequences have no real token before the last T, ``[B]``, or ``None``."""
        mask = self.attention_mask
        return None if mask is None or mask.shape[1] <= T else ~mask[:, :-T].bool().any(1)


def padding_of(mask: Tensor | None, T: int) -> CompactedBatch | None:
    """Return the indices of the real ones of the last T tokens; ``None`` if all are real."""
    if mask is None or mask.dim() != 2 or mask.shape[1] < T:
        return None
    mask = mask[:, -T:]
    # Once per call of the model, as the generation loop of transformers also waits for the device.
    is_readable = has_data(mask) and not torch.compiler.is_compiling()
    return None if is_readable and bool(mask.all()) else compact(mask)


def _boundaries_from_positions(positions: Any) -> Tensor | None:
    """Return boundaries if positions of a sequence start again, as for packed documents."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    if torch.compiler.is_compiling() or not has_data(positions):
        return None
    changes = positions.diff(dim=1) != 1
    return cu_seqlens_from_starts(changes) if bool(changes.any()) else None


def watch_calls(module: nn.Module, context: CallContext) -> list[Any]:
    """Read the arguments of each call of a module; return the handles that end this."""
    enter: Any = functools.partial(context.enter, argument_names(module))
    leave: Any = functools.partial(context.leave, cache_name(module))
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]
