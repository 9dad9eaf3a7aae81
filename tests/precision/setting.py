"""PyTorch's setting for float32 products, at the time of a product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_")


class Watch(TorchDispatchMode):
    """Record the setting at every product of float32 numbers, by the node of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]  # type: ignore[attr-defined]
        if name in PRODUCTS and args[0].dtype == torch.float32:
            backends: Any = torch.backends
            backend = backends.mkldnn if args[0].device.type == "cpu" else backends.cuda
            node = torch._C._current_autograd_node()
            self.settings["" if node is None else node.name()].add(backend.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))

    @property
    def forward(self) -> set[str]:
        """Values outside of backward passes."""
        return self.settings[""]

    @property
    def written_out(self) -> set[str]:
        """Values in backward passes of `CustomFunction`; autograd's own end in ``Backward0``."""
        nodes = (name for name in self.settings if name and not name.endswith("Backward0"))
        return set().union(*(self.settings[name] for name in nodes))
