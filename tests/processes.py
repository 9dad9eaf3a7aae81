"""The command in a process of its own, watched while it runs."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def paragraphs(many: int) -> str:
    """A text to train on, the same every time."""
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    return "\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(many))


@contextmanager
def begun(
    *arguments: str, place: Path | None = None, code: str | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A command in a folder, as the installed one begins, in a group of its own."""
    code = code or "import recollect_command; recollect_command.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def heard(stream: IO[str] | None, what: str) -> None:
    """Wait until the command says so."""
    assert stream is not None
    said = []
    for line in stream:
        said.append(line)
        if re.search(what, line):
            return
    raise AssertionError(f"nobody said {what!r}: {said}")
