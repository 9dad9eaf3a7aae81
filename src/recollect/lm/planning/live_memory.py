"""Bytes of tensors that live at once, counted: on any device, the same in every run.

The resident size of a process also has code, threads and what the allocator keeps, and the peak of
a small model drowns in it. Here every storage that an operation makes is counted until it is freed,
so the number is that of the tensors alone. What an operation allocates and frees inside itself is
not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveMemory"]


class LiveMemory(TorchDispatchMode):
    """Inside, the storages of tensors are counted while they live.

    Args:
        held: tensors from before, such as weights, to be counted from the beginning.

    Attributes:
        now, peak: bytes, and the most that there were.

    Examples:
        >>> from recollect.lm.planning.live_memory import LiveMemory
        >>> with LiveMemory() as memory:
        ...     x = torch.zeros(1000)
        ...     del x
        >>> memory.peak, memory.now
        (4000, 0)
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}
        self._count(list(held))

    def reset_peak(self) -> None:
        """Let the peak begin again at what there is."""
        self.peak = self.now

    def _count(self, made: Any) -> None:
        for x in pytree.tree_leaves(made):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            self._known[key] = weakref.finalize(storage, self._freed, key, size)
            self._known[key].atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(out)
        return out

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        for one in self._known.values():
            one.detach()
