"""JSON as data of ours is read: each key once, and no deeper than Python can follow."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["read_json"]


def read_json(text: str | bytes) -> Any:
    """What a JSON text holds.

    Args:
        text: the whole of it.

    Raises:
        ValueError: it is not text, not JSON, nested too deep, holds a number of thousands of
            digits, or an object names a key twice: the last one would win, whichever was meant.
    """
    if not isinstance(text, str | bytes | bytearray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"it must be text, and is of type {type(text).__name__}")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text at byte {error.start}") from None


def _whole(digits: str) -> int:
    """A whole number, of as many digits as Python reads without taking ever longer."""
    if len(digits) > 4000:
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys differ."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key[:60]!r} stands twice in one object: keep one of them")
        made[key] = value
    return made
