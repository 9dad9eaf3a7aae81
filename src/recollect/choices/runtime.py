"""Device, autocast and tracing state, and constants cached per device.

A host that reads a value of a CUDA tensor waits for all queued work. Decisions therefore use shapes
and declared structure. Values are read only if `can_read_values` is true.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake  # pyright: ignore[reportUnknownVariableType]
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "autocast_enabled",
    "cached_constant",
    "cached_constants",
    "can_read_values",
    "fake_shapes_mode",
    "has_data",
    "intermediate_budget",
    "is_cacheable",
    "product_dtype",
    "seeded_generators",
    "tracing_mode",
    "version_tag",
    "without_autocast",
]

MAX_CACHED = 512
"""Maximum number of cached constants. The cache is cleared when it is full."""

DEFAULT_BUDGET_BYTES = 2**32
"""Value of `intermediate_budget` on a device with an unknown memory size."""


class _Flags(threading.local):
    tracing = False
    fake_shapes = False


_flags = _Flags()

_Key = tuple[Callable[..., Tensor], tuple[object, ...], torch.device, torch.dtype | None]
_cache: dict[_Key, Tensor] = {}

_PLAIN_TYPES = (Tensor, nn.Parameter)

# A constant, because the compiler of torch 2.9 cannot trace the query.
_AUTOCAST_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
)


def can_read_values(x: Tensor) -> bool:
    """Whether Python may read values: of CPU tensors with data, without compiling or tracing."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or _flags.tracing:
        return False
    return type(x) in _PLAIN_TYPES or not is_fake(x)  # the type check is faster


def autocast_enabled(kind: str) -> bool:
    """Whether autocast is enabled for a device type; False if the type has no autocast."""
    available = kind in _AUTOCAST_DEVICES or torch.amp.is_autocast_available(kind)
    return available and torch.is_autocast_enabled(kind)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies ``x``, under autocast or without it."""
    if x.dtype == torch.float64 or not autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Disable autocast for a device type."""
    enabled = autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else contextlib.nullcontext()


def has_data(x: Tensor) -> bool:
    """Whether a tensor has, or will have, values: False for meta and fake tensors.

    Tensors of a graph that is being compiled or traced will have values, except inside
    `fake_shapes_mode`.
    """
    if _flags.tracing or (torch.compiler.is_compiling() and not _flags.fake_shapes):
        return True
    return not (x.is_meta or bool(is_fake(x)))


def fake_shapes_mode() -> AbstractContextManager[None]:
    """Mark this thread as computing output shapes of an opaque operator for a compiler."""
    return _flag_set("fake_shapes")


def tracing_mode() -> AbstractContextManager[None]:
    """Mark this thread as tracing operations on fake tensors, to be run on data later."""
    return _flag_set("tracing")


@contextlib.contextmanager
def _flag_set(name: str) -> Generator[None]:
    previous = getattr(_flags, name)
    setattr(_flags, name, True)
    try:
        yield
    finally:
        setattr(_flags, name, previous)


@contextlib.contextmanager
def seeded_generators(seed: int, devices: Iterable[torch.device]) -> Generator[None]:
    """Context manager that seeds the generators of the CPU and of devices, and restores them.

    `torch.manual_seed` also seeds the generators of all other devices, which nothing restores.
    """
    others = [device for device in set(devices) if device.type not in ("cpu", "meta")]
    with torch.random.fork_rng(others, device_type=others[0].type if others else "cpu"):
        torch.default_generator.manual_seed(seed)
        for device in others:
            state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(state, device)
        yield


def intermediate_budget(x: Tensor) -> int:
    """Return the maximum bytes of a token group's intermediates: 1/16 of a GPU's memory.

    Engines have budgets of their own for a CPU.
    """
    if x.device.type == "cuda":
        return torch.cuda.get_device_properties(x.device).total_memory // 16
    return DEFAULT_BUDGET_BYTES


def is_cacheable(x: Tensor) -> bool:
    """Whether a tensor may be kept for later calls: it has data and is not being traced."""
    if torch.compiler.is_compiling():  # first, because a compiler cannot trace is_fake
        return False
    return not (x.is_meta or bool(is_fake(x)))


def _fake_mode() -> bool:
    """Whether new tensors are fake, which cannot be mixed with cached ones."""
    key = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportPrivateUsage]
    return torch._C._get_dispatch_mode(key) is not None  # pyright: ignore


def cached_constant(
    make: Callable[..., Tensor],
    *sizes: object,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``make(*sizes)`` on a device, cached. The result must not be modified.

    ``make`` is a module-level function that returns a tensor on the default device. Its arguments
    ``sizes`` are hashable. ``dtype`` is by default that of its result.
    """
    if torch.compiler.is_compiling() or _fake_mode():
        return make(*sizes).to(device=device, dtype=dtype)
    key = (make, sizes, device, dtype)
    if key in _cache:
        return _cache[key]
    # Cached constants are used later, outside the modes and device contexts of this call.
    with torch.inference_mode(False), torch.device(device):
        value = make(*sizes).to(device=device, dtype=dtype)
    if is_cacheable(value):
        if len(_cache) >= MAX_CACHED:
            _cache.clear()
        _cache[key] = value
    return value


def cached_constants() -> tuple[Tensor, ...]:
    """Return all cached constants. A recorded CUDA graph must keep references to them."""
    return tuple(_cache.values())


_tensor_ids, _next_id = WeakTensorKeyDictionary(), itertools.count()


def version_tag(tensors: Iterable[Tensor]) -> str | None:
    """Return a string that changes when a tensor is replaced or written to.

    Comparing tags avoids comparing values, for which the host would wait. Writes that bypass
    autograd's version counter (``x.data``, a replayed CUDA graph) are not detected. The result is
    ``None`` for tensors created in inference mode, whose writes torch does not count.
    """
    parts: list[str] = []
    for x in tensors:
        if x.is_inference():
            return None
        if x not in _tensor_ids:
            _tensor_ids[x] = next(_next_id)
        parts.append(f"{_tensor_ids[x]}.{x._version}")  # pyright: ignore[reportPrivateUsage]
    return " ".join(parts)
