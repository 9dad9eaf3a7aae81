"""Valid files changed at random: one number, one value, one key, or a few characters."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

NUMBERS = (
    *("0", "1", "-1", "2", "3", "7", "0.5", "-0.25", "1.5", "1e-3", "1e30", "1e40", "1e400"),
    *("-0.0", "9007199254740993", "1" + "0" * 40, "1" + "0" * 400, "1" + "0" * 5000, "1e-400"),
)
RAN = "ran-by-a-file"
CODE = f"__import__('pathlib').Path('{RAN}').touch()"
VALUES = (
    *NUMBERS,
    *("true", "false", '""', '"1"', '"token"', '"static"', '"L2"', "[]", "{}", "[1, 2]"),
    *("[" * 3000, '{"member": "Keep"}', f'"{CODE}"', '"os.system"', '"\\u0000"', '"' + "x" * 5000),
)
JSON_ONLY = ("null", "NaN", "Infinity", "-Infinity")
TOML_ONLY = ("nan", "inf", "0x10", "1_000", "1979-05-27", "07:32:00", "'single'")
NUMBER = re.compile(r"(?<=[\s:\[,=])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?=[\s,\]}])")
SCALAR = re.compile(NUMBER.pattern + r'|(?<=[:=]\s)"[^"\n]*"|\b(?:true|false|null)\b')
PAIR = re.compile(r'"[^"\n]*"\s*:\s*(?:"[^"\n]*"|[-\d.eE]+|true|false|null)(?=\s*[,}])')
LINE = re.compile(r"^\w+ = .*$", re.MULTILINE)


def changed_text(text: str, draw: random.Random, *, toml: bool = False) -> str:
    """Return the text with one change.

    Args:
        text: of a valid file.
        draw: selects the change.
        toml: whether it is TOML; JSON otherwise.
    """
    kind = draw.choices(
        ("number", "value", "twice", "drop", "insert", "flip", "cut", "swap"),
        weights=(35, 25, 10, 6, 6, 8, 4, 6),
    )[0]
    at = draw.randrange(max(len(text), 1))
    if kind in ("number", "value"):
        result = list((NUMBER if kind == "number" else SCALAR).finditer(text))
        among = NUMBERS if kind == "number" else VALUES + (TOML_ONLY if toml else JSON_ONLY)
        if result:
            one = draw.choice(result)
            return text[: one.start()] + draw.choice(among) + text[one.end() :]
    if kind == "twice":
        result = list((LINE if toml else PAIR).finditer(text))
        if result:
            one, other = draw.choice(result), draw.choice(result)
            repeated = SCALAR.sub(draw.choice(NUMBERS[:9]), other[0], count=draw.randint(0, 1))
            return text[: one.end()] + ("\n" if toml else ", ") + repeated + text[one.end() :]
    if kind == "drop":
        return text[:at] + text[at + draw.randint(1, 20) :]
    if kind == "cut":
        return text[:at]
    if kind == "swap":
        a, b = sorted((at, draw.randrange(len(text))))
        return text[:a] + text[b : b + 5] + text[a + 5 : b] + text[a : a + 5] + text[b + 5 :]
    new = draw.choice("0123456789eE.-+\"'{}[],:=# \n\\abcxyz\u00e9\u0000")
    return text[:at] + new + text[at + (kind == "flip") :]


def changed_bytes(data: bytes, draw: random.Random, *, within: int | None = None) -> bytes:
    """Return the bytes with one change, in the first ``within`` of them."""
    at = draw.randrange(within or len(data))
    kind = draw.choice(("flip", "byte", "zeros", "cut", "insert", "drop", "swap"))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == "byte":
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == "zeros":
        n = min(draw.randint(1, 64), len(data) - at)
        return data[:at] + bytes(n) + data[at + n :]
    if kind == "cut":
        return data[:at]
    if kind == "insert":
        return data[:at] + draw.randbytes(draw.randint(1, 9)) + data[at:]
    if kind == "drop":
        return data[:at] + data[at + draw.randint(1, 9) :]
    b = draw.randrange(within or len(data))
    a, b = min(at, b), max(at, b)
    return data[:a] + data[b : b + 4] + data[a + 4 : b] + data[a : a + 4] + data[b + 4 :]


def parsed(text: str) -> Any:
    """Parse JSON whose objects name each key once.

    Raises:
        ValueError: it is not JSON, or a key occurs twice.
    """

    def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=check_unique)


def missing(expected: Any, loaded: Any, path: str = "") -> str | None:
    """Return the position of a written number, flag or word that the loaded data lack.

    null means the default.
    """
    if expected is None:
        return None
    if isinstance(expected, dict):
        if not isinstance(loaded, dict):
            return f"{path}: {loaded!r} in place of a table"
        for key, value in expected.items():
            if key not in loaded:
                return f"{path}.{key} is not there"
            result = missing(value, loaded[key], f"{path}.{key}")
            if result is not None:
                return result
        return None
    if isinstance(expected, list):
        if not isinstance(loaded, list | tuple) or len(expected) != len(loaded):
            return f"{path}: {loaded!r} in place of {expected!r}"
        pairs = enumerate(zip(expected, loaded, strict=True))
        return next((s for i, (a, b) in pairs if (s := missing(a, b, f"{path}[{i}]"))), None)
    same = expected == loaded and isinstance(expected, bool) == isinstance(loaded, bool)
    if isinstance(expected, float) and math.isnan(expected):
        same = False
    return None if same else f"{path}: {loaded!r:.80} in place of {expected!r:.80}"


def named_twice(data: bytes) -> bytes:
    """Return a safetensors file whose header names its first tensor twice."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    twice = f"{json.dumps(header)[:-1]}, {json.dumps({name: header[name]})[1:]}".encode()
    return len(twice).to_bytes(8, "little") + twice + data[8 + size :]
