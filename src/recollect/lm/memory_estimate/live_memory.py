"""Number of bytes of the live tensors, on any device and equal in every run.

The resident size of a process also has code, threads and the allocator's reserve, which hide the
peak of a small model. Here every storage that an operation creates is counted until it is freed.
Temporary allocations inside an operation are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveMemory"]


class LiveMemory(TorchDispatchMode):
    """Context manager that counts the storages of live tensors.

    Args:
        preexisting: earlier tensors, such as weights, that are counted from the start.

    Attributes:
        current: number of bytes.
        peak: largest number of bytes so far.

    Examples:
        >>> from recollect.lm.memory_estimate.live_memory import LiveMemory
        >>> with LiveMemory() as memory:
        ...     x = torch.zeros(1000)
        ...     del x
        >>> memory.peak, memory.current
        (4000, 0)
    """

    def __init__(self, preexisting: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._storages: dict[int, weakref.finalize[Any, Any]] = {}
        self._count(list(preexisting))

    def reset_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak = self.current

    def _count(self, outputs: Any) -> None:
        for x in pytree.tree_leaves(outputs):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._storages:
                self.current += size
                self.peak = max(self.peak, self.current)
                self._storages[key] = weakref.finalize(storage, self._free, key, size)
                self._storages[key].atexit = False

    def _free(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.current -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self._count(outputs)
        return outputs

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for finalizer in self._storages.values():
            finalizer.detach()
