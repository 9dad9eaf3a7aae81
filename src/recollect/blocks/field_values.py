"""Conversions of fields that several compositions have."""

from __future__ import annotations

from typing import Any

from recollect.blocks.mixers import Mixer, as_mixer
from recollect.messages import short_repr

__all__ = ["gate_name", "gate_names", "mixers"]


def mixers(value: Any) -> tuple[Mixer, ...]:
    """Return a list of mixers, or of values that `as_mixer` converts, as a tuple."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("needs at least one mixer")
    return tuple(as_mixer(part) for part in value)  # pyright: ignore[reportUnknownVariableType]


def gate_name(value: Any) -> str:
    """Return the name of a gate."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be the name of a gate, not {short_repr(value)}")
    return value


def gate_names(value: Any) -> tuple[str, ...]:
    """Return a list of names of gates as a tuple."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f"must be a list of names of gates, not {short_repr(value)}")
    return tuple(gate_name(one) for one in value)  # pyright: ignore[reportUnknownVariableType]
