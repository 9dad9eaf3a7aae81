"""TOML of recipes and run files, with limited nesting and in linear time."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from recollect.serialization import limited_nesting

__all__ = ["MAX_BYTES", "read_toml", "write_toml"]

MAX_BYTES = 2**20
"""Largest size of a recipe or a run file."""

MAX_KEY_PARTS = 32
"""Maximum number of parts of a dotted key. `tomllib` takes quadratic time: 13 s for 20,000."""

# Quantifiers are possessive, and unclosed strings match up to the end, so no text is read twice.
# A string of several lines may have two quotes before its three closing quotes.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{MAX_KEY_PARTS}}}")


@limited_nesting()
def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text."""
    if _LONG_KEY.search(_STRING_OR_COMMENT.sub("x", text)):
        raise ValueError(f"a key has more than {MAX_KEY_PARTS} dotted parts")
    return tomllib.loads(text)


def write_toml(data: Mapping[str, Any]) -> str:
    """Return JSON-ready data as TOML, with one table per mapping and inline tables in it.

    TOML has no null. Fields that are ``None`` are left out.

    Examples:
        >>> from recollect.recipe.toml_text import read_toml, write_toml
        >>> data = rc.Recipe().to_dict()
        >>> rc.Recipe.from_dict(read_toml(write_toml(data))) == rc.Recipe()
        True
    """
    fields = {name: value for name, value in data.items() if value is not None}
    tables = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {_inline(x)}" for name, x in _pairs(fields) if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{_key(name)}]", *(f"{key} = {_inline(x)}" for key, x in _pairs(table))]
    return "\n".join(lines).strip() + "\n"


def _pairs(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(_key(name), value) for name, value in table.items() if value is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _text(name)


def _inline(value: Any) -> str:
    """Return a value on one line. JSON's numbers, truth values and strings are TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_inline(x)}" for name, x in _pairs(value)) + "}"
    if isinstance(value, list | tuple):
        if None in value:
            raise ValueError("TOML has no null: leave None out of lists")
        return "[" + ", ".join(map(_inline, value)) + "]"
    return str(value) if isinstance(value, float) else _text(value)


def _text(value: object) -> str:
    """Return JSON that is TOML, which has no pairs of surrogates and no raw U+007F."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
