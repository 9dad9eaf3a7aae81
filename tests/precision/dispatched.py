"""Products as torch's kernels get them, below autograd and whatever wrote them.

`Unrounded` names the products whose factors have bits that bfloat16 has not, and `Rounding` gives
every product bfloat16's factors: what tensor cores do, with no code of the library's in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
FACTORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addmm_", "baddbmm_", "addmv_"), (1, 2)),
    ATTENTION: (0, 1, 2),
    f"{ATTENTION}_backward": (0, 1, 2, 3),
}
"""Kernels that multiply matrices, and which of their arguments they multiply."""

SOLVES = ("Linalg", "Cholesky")
"""What autograd calls the derivatives of solves, which are products of torch's own."""


def rounded(x: Tensor) -> Tensor:
    """To the nearest number of eight bits."""
    if x.dtype != torch.float32:
        return x
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 256).round(), exponent - 8)


class Unrounded(TorchDispatchMode):
    """Counts products, and those of factors that are not bfloat16's, by kernel and derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.found = 0, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]
        factors = [args[i] for i in FACTORS.get(name, ()) if args[i].dtype != torch.float64]
        node = torch._C._current_autograd_node()
        within = "" if node is None else node.name()
        if factors and not within.startswith(SOLVES):
            self.products += 1
            if not all(torch.equal(rounded(x).nan_to_num(), x.nan_to_num()) for x in factors):
                self.found[f"{name} in {within or 'forward'}"] += 1
        return func(*args, **(kwargs or {}))


class Rounding(TorchDispatchMode):
    """Every product gets bfloat16's factors, but for those in derivatives of solves."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]  # type: ignore[attr-defined]
        node = torch._C._current_autograd_node()
        if node is None or not node.name().startswith(SOLVES):
            places = FACTORS.get(name, ())
            args = tuple(rounded(x) if i in places else x for i, x in enumerate(args))
        return func(*args, **(kwargs or {}))
