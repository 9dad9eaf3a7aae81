"""The command-line application: its commands, their common option and their exit codes.

Each command is a function in `COMMANDS`, which imports its dependencies beyond torch itself. A
refused command prints one sentence and exits with code 2. A closed pipe, as in ``recollect zoo |
head``, neither stops a command nor changes its exit code.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import recollect as rc
from recollect.cli.adopt import adopt
from recollect.cli.bench import bench
from recollect.cli.compare import compare
from recollect.cli.console import exit_interrupted, print_stderr, redirect_closed_streams
from recollect.cli.convert import convert
from recollect.cli.coordinates import coordinates
from recollect.cli.describe import explain, sizes, zoo
from recollect.cli.eval import eval  # noqa: A004
from recollect.cli.export import export
from recollect.cli.generate import generate
from recollect.cli.look import look
from recollect.cli.options import ImportOption
from recollect.cli.page import page
from recollect.cli.plan import plan
from recollect.cli.reproduce import reproduce
from recollect.cli.search import search
from recollect.cli.train import train
from recollect.messages import UnregisteredMemberError
from recollect.report.ranks import is_collective, rank, should_log_error, world_size
from recollect.report.signals import (
    TERMINATION_SIGNALS,
    TerminationRequested,
    handle_signals,
    received_signals,
)

COMMANDS: tuple[Callable[..., None], ...] = (
    *(zoo, explain, compare, search, reproduce, train, export, plan, sizes, generate, adopt, eval),
    *(bench, convert, coordinates, look, page),
)

__all__ = ["COMMANDS", "build", "main"]

_IMPORT_HINT = "with --import MODULE, or import = [...] in the file of a run"
_EXTRAS = {
    "accelerate": "lm",
    "datasets": "lm",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "safetensors": "lm",
    "tokenizers": "lm",
    "transformers": "lm",
}
"""Extra of recollect that installs a module."""


def main() -> None:
    """Run the ``recollect`` command."""
    try:
        build()()
    except SystemExit as leave:
        # typer exits with 1 if the pipe of a help text or of a usage error is closed.
        closed = leave.__context__
        if leave.code != 1 or not isinstance(closed, BrokenPipeError):
            raise
        redirect_closed_streams()
        sys.exit(getattr(closed.__context__, "exit_code", 0))


class Group(TyperGroup):
    """Group of commands that points from ``recollect recall`` to the Python function."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in rc.__all__ and self.get_command(ctx, name) is None:
            hint = f"In Python it is rc.{name}: see help(rc.{name})."
            ctx.fail(f"No such command {name!r}. {hint}")
        return super().resolve_command(ctx, args)


def build() -> typer.Typer:
    """Return the application with all `COMMANDS`."""
    app = typer.Typer(
        name="recollect",
        help="Sequence layers stated as the regression problem that their memory solves.",
        cls=Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # "rich" drops words in brackets, such as [run]
    )
    app.callback()(_root)
    for command in COMMANDS:
        app.command()(_wrap_command(command))
    return app


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"recollect {rc.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of ``recollect`` itself."""


def _wrap_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--import`` to a command, and turn its errors into one sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, imports: Sequence[str] = (), **options: Any) -> None:
        name = command.__name__
        received_signals.clear()
        with _handle_signals():
            try:
                if imports:
                    from recollect.plugins import import_modules

                    import_modules(imports)
                command(*args, **options)
                if sys.stdout is not None:  # None if closed before the start
                    sys.stdout.flush()
            except KeyboardInterrupt:
                exit_interrupted(f"recollect {name}: interrupted")
            except (ValueError, OSError) as error:  # a RecipeError is a ValueError
                if isinstance(error, BrokenPipeError) and redirect_closed_streams():
                    return  # the work is done, and its output has no reader
                if should_log_error(error):
                    # Functions that put their own name before a message do so for Python.
                    message = _explain_error(error).removeprefix(f"{name}: ")
                    print_stderr(f"recollect {name}{_process_label(error)}: {message}")
                raise typer.Exit(2) from None
            except ImportError as error:
                print_stderr(f"recollect {name}: {_explain_import_error(error)}")
                raise typer.Exit(2) from None

    # typer reads the options of a command from its signature.
    signature = inspect.signature(command, eval_str=True)
    imports = inspect.Parameter(
        "imports", inspect.Parameter.KEYWORD_ONLY, default=[], annotation=ImportOption
    )
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), imports]
    )
    run.__annotations__ = {**command.__annotations__, "imports": ImportOption}
    return run


@contextmanager
def _handle_signals() -> Iterator[None]:
    """Context manager in which signals that end a process interrupt the command.

    During an import they end the process, because torch would replace the exception by another.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                os.write(2, b"recollect: interrupted\n")
                os._exit(128 + number)
            caller = caller.f_back
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise TerminationRequested(number)

    with (
        handle_signals((signal.SIGINT,), interrupt),
        handle_signals(TERMINATION_SIGNALS, interrupt, default=True),
    ):
        yield


def _process_label(error: Exception) -> str:
    """Return the label of this process for an error that the other processes do not have."""
    is_own = rank() > 0 and not is_collective(error)
    return f" (process {rank()} of {world_size()})" if is_own else ""


def _explain_error(error: Exception) -> str:
    """Return the message of an error, with a hint for a member that is not registered."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnregisteredMemberError):
            return f"{error}, {_IMPORT_HINT}"
        cause = cause.__context__
    return str(error)


def _explain_import_error(error: ImportError) -> str:
    """Return the extra to install for a missing module; raise any other import error again."""
    if error.name is None:  # raised by recollect with a complete message
        return str(error)
    missing = error.name.partition(".")[0]
    if missing not in _EXTRAS:
        raise error
    return (
        f"this needs {missing}, which is not installed: "
        f'pip install -e ".[{_EXTRAS[missing]}]" in its checkout'
    )
