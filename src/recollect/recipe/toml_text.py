"""TOML of recipes and run files, with limited nesting and in linear time."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from recollect.serialization import limited_nesting

__all__ = ["MAX_BYTES", "read_toml"]

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
    """Return the tables of a TOML text.

    Args:
        text: the complete text.

    Raises:
        ValueError: it is not TOML, is nested too deep, or has a key of more than 32 parts.
    """
    if _LONG_KEY.search(_STRING_OR_COMMENT.sub("x", text)):
        raise ValueError(f"a key has more than {MAX_KEY_PARTS} dotted parts")
    return tomllib.loads(text)
