"""Terminal output that all commands share: the console, JSON, and lines to the standard error."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console

from recollect.report.ranks import is_main_process
from recollect.report.signals import TERMINATION_SIGNALS, received_signals

DEFAULT_WIDTH = 120
"""Width of the output in columns if it is not a terminal."""


class PlainConsole(Console):
    """Console without markup and emoji, because names and paths contain brackets and colons.

    It stops printing after its reader has closed the pipe, and the command continues. Of several
    processes only the first prints.
    """

    bounded = True  # whether tables leave out the columns that do not fit

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, quiet=not is_main_process(), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_closed_streams()


def make_console(*, stderr: bool = False, bounded: bool = False) -> PlainConsole:
    """Return a console of the terminal's width, of ``COLUMNS``, or else of `DEFAULT_WIDTH`."""
    console = PlainConsole(stderr=stderr)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    console = PlainConsole(stderr=stderr, width=DEFAULT_WIDTH)
    console.bounded = bounded
    return console


def print_line(console: Console, text: str) -> None:
    """Print text without wrapping and colors; ignore a closed stream."""
    with contextlib.suppress(OSError):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_stderr(text: str) -> None:
    """Print a line to the standard error; ignore a closed stream."""
    try:
        typer.echo(text, err=True)
    except OSError:
        redirect_closed_streams()


def exit_interrupted(message: str = "") -> NoReturn:
    """Print a message to the standard error, and exit with 128 plus the number of the signal."""
    if message:
        print_stderr(message)
    number = next(
        (number for number in received_signals if number in TERMINATION_SIGNALS), signal.SIGINT
    )
    raise typer.Exit(128 + number) from None


def print_json(data: object) -> None:
    """Print data as JSON to the standard output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def command_line() -> str:
    """Return the command that started this process, for reports."""
    return shlex.join(["recollect", *sys.argv[1:]])


def redirect_closed_streams() -> bool:
    """Redirect closed output streams to ``/dev/null``; return whether any was closed."""
    any_closed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):  # not a file of the system
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            any_closed = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
    return any_closed


def wait_readable(stream: Any, seconds: float) -> bool:
    """Wait until a stream has input or has ended; return whether it has within the time."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLIN)
    except (AttributeError, OSError, ValueError):  # not a file of the system
        return True
    return bool(poll.poll(1000 * seconds))
