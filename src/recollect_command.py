"""Entry point of the ``recollect`` command: an interrupt while it is being imported ends it.

It is next to the package, so that an interrupt during the import of the package is handled too.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

__all__ = ["MISSING", "leave", "main"]

MISSING = (
    "recollect's commands need typer and rich: pip install typer rich, or in its checkout "
    'pip install -e ".[cli]"'
)
"""Message if the extra [cli] is missing."""


def leave(number: int, frame: FrameType | None) -> None:
    """End the process after a signal that came during an import.

    No exception is raised: the import might turn it into another one.
    """
    try:
        os.write(2, b"recollect: interrupted\n")
    finally:
        os._exit(128 + number)


def _refused(sentence: str) -> int:
    print(f"recollect: {sentence}", file=sys.stderr)
    return 2


def main() -> None:
    """Import the command line and run it."""
    if not all(map(find_spec, ("typer", "rich"))):
        sys.exit(MISSING)
    try:
        os.getcwd()
    except OSError:
        sys.exit(_refused("the working folder is gone: change to one that is there"))
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # with nohup, or as a shell's job, it is ignored
        signal.signal(signal.SIGINT, leave)
    from recollect.cli.app import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    run()
