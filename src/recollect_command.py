"""Entry point of the ``recollect`` command: an interrupt while it is being imported ends it.

It stands beside the package because importing anything of the package takes seconds, most of them
torch's. Nothing has begun by then, so there is nothing to finish or to keep.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

__all__ = ["MISSING", "main"]

MISSING = (
    "recollect's commands need typer and rich: pip install typer rich, or in its checkout "
    'pip install -e ".[cli]"'
)
"""What is said where the extra [cli] is missing; before torch is imported, which takes seconds."""


def _leave(number: int, frame: FrameType | None) -> None:
    # No exception: halfway through an import it would come out as another one, with a traceback.
    try:
        os.write(2, b"recollect: interrupted\n")
    finally:
        os._exit(128 + number)


def _refused(sentence: str) -> int:
    print(f"recollect: {sentence}", file=sys.stderr)
    return 2


def main() -> None:
    """Import the command line and run it; in a folder that is gone, torch cannot be imported."""
    if not all(map(find_spec, ("typer", "rich"))):
        sys.exit(MISSING)
    try:
        os.getcwd()
    except OSError:
        sys.exit(_refused("the working folder is gone: change to one that is there"))
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # with nohup, or as a shell's job, it is ignored
        signal.signal(signal.SIGINT, _leave)
    from recollect.cli.app import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    run()
