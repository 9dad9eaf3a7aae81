"""Conversions of fields that several compositions have."""

from __future__ import annotations

from typing import Any

from recollect.messages import short_repr

__all__ = ["gate_name", "gate_names"]


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
