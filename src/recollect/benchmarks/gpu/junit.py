"""What pytest has written about its tests, with what they noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["read_tests"]


def read_tests(path: Path) -> dict[str, Any]:
    """What pytest says of its tests in its file of results.

    Args:
        path: of the file.
    """
    cases: list[dict[str, Any]] = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome, why = "passed", ""
        for kind in ("failure", "error", "skipped"):
            for told in case.iter(kind):
                outcome = "skipped" if kind == "skipped" else "failed"
                why = told.get("message") or (told.text or "").strip()
        cases.append(
            {
                "name": case.get("name", ""),
                "outcome": outcome,
                "why": why[:600],
                "seconds": float(case.get("time") or 0.0),
                "found": {
                    one.get("name", ""): _number(one.get("value", ""))
                    for one in case.iter("property")
                },
            }
        )
    return {"tests": cases}


def _number(text: str) -> Any:
    """A number or a list that a test noted; what is not finite stays a word, as JSON has none."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text
