"""A call that a compiler leaves as it is. Whoever imports this loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["uncompiled"]


def _run(function: Callable[[Any], Any], given: object) -> Any:
    return function(given)


uncompiled: Callable[[Callable[[Any], Any], Any], Any] = torch.compiler.disable(_run)  # type: ignore[assignment]
"""``uncompiled(f, x)`` is f(x), at which a compiler breaks its graph."""
