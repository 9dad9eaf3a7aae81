"""What the host may ask of a device, and what stays there between calls.

A host that asks a GPU for a value waits until all work before it is done, and the GPU idles while
the host decides. So decisions rest on shapes and on what members declare; a value is looked at only
where nobody has to wait for it (`looks`). Constants are made once and stay where they are needed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake  # pyright: ignore[reportUnknownVariableType]
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "autocasts",
    "constant",
    "constants",
    "holds",
    "lasts",
    "looks",
    "room",
    "shapes_alone",
    "stamp",
    "without_autocast",
    "written_down",
]

KEPT = 512
"""Constants that are kept at a time; more sizes than that in one process are made anew."""

_Key = tuple[Callable[..., Tensor], tuple[object, ...], torch.device, torch.dtype | None]
_made: dict[_Key, Tensor] = {}


def looks(x: Tensor) -> bool:
    """Whether numbers may be looked at, token by token.

    A GPU would have to wait at each; a compiled graph would break; what is `written_down` holds for
    other numbers; where there are none (`holds`), nobody could answer.
    """
    if x.device.type != "cpu" or _written_down or torch.compiler.is_compiling():
        return False
    return type(x) in _ORDINARY or not is_fake(x)  # asked for every token: the type tells sooner


_ORDINARY = (Tensor, nn.Parameter)


# Asked for every token, and torch 2.9's compiler does not follow the question.
_WITH_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
)


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device, of which not all have it.

    Args:
        kind: as ``torch.device.type`` has it.
    """
    known = kind in _WITH_AUTOCAST or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Without autocast, where it is on.

    Args:
        kind: as ``torch.device.type`` has it.
    """
    return torch.autocast(kind, enabled=False) if autocasts(kind) else contextlib.nullcontext()


def holds(x: Tensor) -> bool:
    """Whether a tensor has numbers: those of the meta device, and fake ones, have shapes alone.

    A graph that is being compiled will have them, outside of `shapes_alone`, and so will operations
    that are `written_down`.
    """
    will = torch.compiler.is_compiling() and not _shapes_alone
    return will or bool(_written_down) or not (x.is_meta or bool(is_fake(x)))


_shapes_alone: list[bool] = []
_written_down: list[bool] = []


def shapes_alone() -> AbstractContextManager[None]:
    """Inside, a compiler asks for the shapes of an operation that it does not look into."""
    return _during(_shapes_alone)


def written_down() -> AbstractContextManager[None]:
    """Inside, operations on fake tensors are written down, to be done on numbers later."""
    return _during(_written_down)


@contextlib.contextmanager
def _during(true: list[bool]) -> Generator[None]:
    true.append(True)
    try:
        yield
    finally:
        true.pop()


DEVICE_ROOM = 2**32
"""Bytes that intermediates of a group may take on a device that does not say what memory it has."""


def room(x: Tensor) -> int:
    """Bytes that intermediates of one group of tokens may take on the device of ``x``.

    A sixteenth of its memory, because there launches cost more than memory does. On a CPU what its
    caches and its allocator make cheap is less, and each engine has measured that.

    Args:
        x: of the call, on another device than a CPU.
    """
    if x.device.type == "cuda":
        return torch.cuda.get_device_properties(x.device).total_memory // 16
    return DEVICE_ROOM


def lasts(x: Tensor) -> bool:
    """Whether a tensor may be kept for later calls: it holds numbers, and stands for no other."""
    if torch.compiler.is_compiling():  # first: a compiler does not follow the other question
        return False
    return not (x.is_meta or bool(is_fake(x)))


def _fake_mode() -> bool:
    """Whether tensors that are made now are fake, beside which kept ones are refused."""
    key = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportPrivateUsage]
    return torch._C._get_dispatch_mode(key) is not None  # pyright: ignore


def constant(
    make: Callable[..., Tensor],
    *sizes: object,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``make(*sizes)`` on a device, the same tensor each time: nothing may be written to it.

    Args:
        make: a function of a module, from sizes alone to a tensor of the default device.
        sizes: what it takes; hashable.
        device: where the constant is needed.
        dtype: of the constant; what ``make`` gives when omitted.
    """
    if torch.compiler.is_compiling() or _fake_mode():
        return make(*sizes).to(device=device, dtype=dtype)
    key = (make, sizes, device, dtype)
    if key in _made:
        return _made[key]
    # It will be used outside of modes too, and stands where it is needed whatever is being built.
    with torch.inference_mode(False), torch.device(device):
        made = make(*sizes).to(device=device, dtype=dtype)
    if lasts(made):
        if len(_made) >= KEPT:
            _made.clear()
        _made[key] = made
    return made


def constants() -> tuple[Tensor, ...]:
    """All constants that are kept now, for who must hold them longer: a recorded graph does."""
    return tuple(_made.values())


_serials, _next = WeakTensorKeyDictionary(), itertools.count()


def stamp(tensors: Iterable[Tensor]) -> str | None:
    """A name for what tensors hold now; another once one is written to or another takes its place.

    It stands for comparing their numbers, where the host would have to wait for the answer.
    Writing past autograd's counter (``x.data``, a replayed CUDA graph) goes unnoticed.

    Args:
        tensors: parameters, in an order that stays.

    Returns:
        ``None`` where torch does not count writes: in tensors made in inference mode.
    """
    parts: list[str] = []
    for x in tensors:
        if x.is_inference():
            return None
        if x not in _serials:
            _serials[x] = next(_next)
        parts.append(f"{_serials[x]}.{x._version}")  # pyright: ignore[reportPrivateUsage]
    return " ".join(parts)
