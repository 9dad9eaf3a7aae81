"""The command in a separate process, observed while it runs."""

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
    """Return a text to train on, equal in every call."""
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    return "\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(many))


@contextmanager
def run_command(
    *arguments: str, place: Path | None = None, code: str | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a folder and in a separate process group, like the installed command."""
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


def wait_for_output(stream: IO[str] | None, pattern: str) -> None:
    """Wait until the command prints a line that matches ``pattern``."""
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if re.search(pattern, line):
            return
    raise AssertionError(f"nobody said {pattern!r}: {lines}")
