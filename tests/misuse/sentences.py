"""What every refusal is: one sentence that says what is wrong, and nothing lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

LONGEST = 400


def is_one_sentence(said: str) -> None:
    """One line, no longer than somebody reads, and in our words."""
    assert "\n" not in said, said
    assert 15 < len(said) < LONGEST, (len(said), said)
    for noise in ("Traceback", "object at 0x", "NoneType' object", "unexpected keyword"):
        assert noise not in said, said


def refuses(
    call: Callable[[], object], *says: str, error: type[Exception] | tuple[type[Exception], ...]
) -> str:
    """A call raises one sentence that holds every part of ``says``."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    is_one_sentence(message)
    for part in says:
        assert part in message, message
    return message


def digests(folder: Path) -> dict[str, str]:
    """Every file of a folder and what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def short_plan(steps: int, **run: int) -> str:
    """The text of a run.toml over text.txt: a tiny model, its steps, and more of ``[run]``."""
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
