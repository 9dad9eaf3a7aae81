"""TOML as recipes and run files are read: no deeper than Python can follow, and in linear time."""

from __future__ import annotations

import re
import tomllib
from typing import Any

__all__ = ["MAX_BYTES", "read_toml"]

MAX_BYTES = 2**20
"""Largest size of a recipe or a run file."""

_MOST_PARTS = 32
"""Parts of a dotted key. `tomllib` takes time quadratic in their number: 13 s for 20,000."""

# Possessive, and up to the end where a string is not closed, so that no text is read twice.
# A string of several lines may have two quotes before the three that close it.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\\?\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{_MOST_PARTS}}}")


def read_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Args:
        text: all of it.

    Raises:
        ValueError: it is not TOML, is nested too deep, or has a key of more than 32 parts.
    """
    if _LONG_KEY.search(_STRING_OR_COMMENT.sub("x", text)):
        raise ValueError(f"a key has more than {_MOST_PARTS} dotted parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
