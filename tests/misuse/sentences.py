"""Properties of every error message: one sentence that names the fault, and no lost file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

LONGEST = 400


def is_one_sentence(message: str) -> None:
    """Check for one line of moderate length, without Python's own messages."""
    assert "\n" not in message, message
    assert 15 < len(message) < LONGEST, (len(message), message)
    for noise in ("Traceback", "object at 0x", "NoneType' object", "unexpected keyword"):
        assert noise not in message, message


def refuses(
    call: Callable[[], object], *says: str, error: type[Exception] | tuple[type[Exception], ...]
) -> str:
    """Check that a call raises one sentence that contains every part of ``says``."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    is_one_sentence(message)
    for part in says:
        assert part in message, message
    return message


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of every file of a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def short_plan(steps: int, **run: int) -> str:
    """Return a run.toml over text.txt: a tiny model, its steps, and more of ``[run]``."""
    return f"""
[model]
recipe = "delta_net"
width = 16
depth = 1
heads = 1
[data]
train = "text.txt"
context = 16
[optimizer]
steps = {steps}
batch = 2
[run]
out = "out"
save_every = 0
""" + "".join(f"{name} = {value}\n" for name, value in run.items())
