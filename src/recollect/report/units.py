"""Numbers with units that a person can read."""

from __future__ import annotations

__all__ = ["readable"]


def readable(count: float, unit: str) -> str:
    """A count with three digits and a prefix: powers of 1024 for bytes, of 1000 otherwise."""
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1000, "\0kMGTP")
    index = 0
    while abs(count) >= step and index < len(prefixes) - 1:
        count, index = count / step, index + 1
    digits = f"{count:.0f}" if index == 0 or count >= 100 else f"{count:.3g}"
    return f"{digits} {prefixes[index].strip(chr(0))}{unit}"
