"""A recipe in one line that tells it from others: what a state carries to be known by."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from recollect.choices.member import Member
from recollect.wording import shown

__all__ = ["differing", "is_normal_form", "normal_form"]


def normal_form(members: Mapping[str, Member]) -> str:
    """Members by choice as JSON text, without the fields that have their defaults.

    Equal members have equal texts: 1 and 1.0 are written alike. A field that a later version adds
    leaves the text as it was where its default does nothing.

    Args:
        members: of the canonical recipe, by choice.
    """
    plain = {choice: _plain(member) for choice, member in members.items()}
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def is_normal_form(text: object) -> bool:
    """Whether something that may come from a file says what a recipe's choices are.

    Args:
        text: anything.
    """
    return isinstance(text, str) and bool(_choices(text))


def differing(old: str, new: str) -> tuple[str, str, str]:
    """The first choice in which two normal forms differ, and what each has there.

    Args:
        old: that may come from a file.
        new: of a recipe at hand.
    """
    theirs, ours = _choices(old), _choices(new)
    for choice, member in ours.items():
        if theirs.get(choice) != member:
            return choice, _said(theirs.get(choice)), _said(member)
    return "meaning", shown(old), "another"


def _plain(value: Any) -> Any:
    if isinstance(value, Member):
        fields = {field.name: field.default for field in dataclasses.fields(value)}  # type: ignore[arg-type]
        own = {name: getattr(value, name) for name in fields}
        changed = {name: _plain(x) for name, x in own.items() if x != fields[name]}
        return {"member": type(value).__name__, **changed}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _choices(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _said(member: Any) -> str:
    """A member's data as one would type it, cut where it is long."""
    return f"{_typed(member):.100}"


def _typed(value: Any, depth: int = 0) -> str:
    if not isinstance(value, dict) or depth > 3:
        return shown(value)
    # What is typed are words; text of a file that was altered may hold anything, line ends too.
    if not all(isinstance(x, str) and x.isidentifier() for x in (*value, value.get("member"))):
        return shown(value)
    fields = [f"{k}={_typed(v, depth + 1)}" for k, v in value.items() if k != "member"]
    return f"{value['member']}({', '.join(fields)})"
