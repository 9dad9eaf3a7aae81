"""Calls that a compiler leaves as they are. Importing this module loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["uncompiled"]


def _run(function: Callable[[Any], Any], argument: object) -> Any:
    return function(argument)


uncompiled: Callable[[Callable[[Any], Any], Any], Any] = torch.compiler.disable(_run)  # type: ignore[assignment]
"""``uncompiled(f, x)`` returns f(x), and breaks the graph of a compiler."""
