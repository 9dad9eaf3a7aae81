"""Plain data of frozen dataclasses: conversion to JSON values and back, without running code."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from recollect.messages import RecipeError, short_repr, suggestion

__all__ = ["fields_to_data", "limited_nesting", "plain", "read_fields", "read_json"]


def fields_to_data(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values, by name."""
    return {
        field.name: _to_data(getattr(instance, field.name))
        for field in dataclasses.fields(instance)
    }


def _to_data(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_data(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def plain(data: object) -> Any:
    """Return JSON-ready data. NaN and infinity, as in a run that diverged, become null."""
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def read_fields(
    cls: type, data: Any, *, tag: str | None = None, kind: str = "field"
) -> dict[str, Any]:
    """Return the arguments of a dataclass in plain data, whose values are not converted.

    Args:
        cls: the dataclass.
        data: result of its ``to_dict``; fields with defaults may be missing.
        tag: key that is not a field.
        kind: noun for a field in messages.

    Raises:
        RecipeError: not a mapping, an unknown or a missing field.
    """
    title = cls.__name__
    if not isinstance(data, Mapping):
        raise RecipeError(f"{title} is a mapping of {kind}s, not {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    arguments = dict(data)
    if tag is not None:
        arguments.pop(tag, None)
    for name in arguments:
        if name not in fields:
            hint = suggestion(str(name), list(fields))
            raise RecipeError(f"{title} has no {kind} {short_repr(name)}; {hint}")
    for name, field in fields.items():
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if not has_default and name not in arguments:
            raise RecipeError(f"{title} needs {name}, which is missing")
    return arguments


@contextmanager
def limited_nesting() -> Generator[None, None, None]:
    """Raise a `RecipeError` for data nested deeper than Python's recursion limit."""
    try:
        yield
    except RecursionError:
        raise RecipeError("the data is nested too deep: use fewer levels") from None


@limited_nesting()
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
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text at byte {error.start}") from None


def _parse_int(digits: str) -> int:
    if len(digits) > 4000:
        raise ValueError(f"it contains a number of {len(digits):,} digits")
    return int(digits)


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {key[:60]!r} occurs twice in one object: keep one of them")
    return data
