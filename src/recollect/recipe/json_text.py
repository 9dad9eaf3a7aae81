"""Strict JSON: unique keys, limited nesting and limited digits."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["read_json"]


def read_json(text: str | bytes) -> Any:
    """Return the data of a JSON text.

    Args:
        text: the complete text.

    Raises:
        ValueError: it is not text or not JSON, is nested too deep, contains a number of more than
            4000 digits, or an object with a repeated key.
    """
    if not isinstance(text, str | bytes | bytearray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"it must be text, not {type(text).__name__}")
    try:
        return json.loads(text, object_pairs_hook=_parse_object, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text at byte {error.start}") from None


def _parse_int(digits: str) -> int:
    """Return an int of at most 4000 digits, because `int` takes quadratic time."""
    if len(digits) > 4000:
        raise ValueError(f"it contains a number of {len(digits):,} digits")
    return int(digits)


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object with unique keys."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:60]!r} stands twice in one object: keep one of them")
        result[key] = value
    return result
