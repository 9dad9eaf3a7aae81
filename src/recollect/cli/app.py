"""The command line as one application: its commands, what they share, and how it leaves.

A command is a function in `COMMANDS`; what it needs beyond torch it imports itself. Every command
takes ``--import``. Refusals leave with exit code 2 and one sentence. A reader who leaves, as in
``recollect zoo | head``, changes nothing: the work goes on, nothing is said of it, and the exit
status is what it would have been.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import recollect as rc
from recollect.messages import RecipeError
from recollect.report.ranks import is_of_all, rank, speaks, world_size
from recollect.report.signals import ENDINGS, Ended, answered, received
from recollect_command import MISSING

if TYPE_CHECKING:
    import typer
else:
    try:
        import rich  # noqa: F401
        import typer
    except ModuleNotFoundError as error:  # the extra [cli]
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        typer = None

COMMANDS: tuple[Callable[..., None], ...] = ()
if typer is not None:
    from recollect.cli.adopt import adopt
    from recollect.cli.bench import bench
    from recollect.cli.compare import compare
    from recollect.cli.coordinates import coordinates
    from recollect.cli.describe import explain, sizes, zoo
    from recollect.cli.eval import eval  # noqa: A004
    from recollect.cli.export import export
    from recollect.cli.generate import generate
    from recollect.cli.page import page
    from recollect.cli.plan import plan
    from recollect.cli.reproduce import reproduce
    from recollect.cli.train import train

    COMMANDS = (
        *(zoo, explain, compare, reproduce, train, export, plan, sizes, generate, adopt, eval),
        *(bench, coordinates, page),
    )

__all__ = ["COMMANDS", "build", "main"]

_UNREGISTERED = (
    "import the module that defines it (its class has @rc.member) before loading this recipe"
)
_IMPORT_IT = (
    "name the module that defines it with --import MODULE (or import = [...] in a run's file); "
    "nothing is imported unasked"
)
_EXTRAS = {
    "accelerate": "lm",
    "datasets": "lm",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "safetensors": "lm",
    "tokenizers": "lm",
    "transformers": "lm",
}
"""Which extra of recollect brings a module that a command may need."""


def main() -> None:
    """Entry point of the ``recollect`` command."""
    if not COMMANDS:
        sys.exit(MISSING)
    try:
        build()()
    except SystemExit as leave:
        # Help, or what is wrong with an option, that nobody reads: typer and rich leave with 1.
        closed = leave.__context__
        if leave.code != 1 or not isinstance(closed, BrokenPipeError):
            raise
        from recollect.cli.console import nobody_reads

        nobody_reads()
        sys.exit(getattr(closed.__context__, "exit_code", 0))


def build() -> typer.Typer:
    """The application, with every command of `COMMANDS`."""
    app = typer.Typer(
        name="recollect",
        help="Sequence layers stated as the regression problem their memory solves.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(cls=_commands())(_options)
    for command in COMMANDS:
        app.command()(_plainly(command))
    return app


def _commands() -> Any:
    """The group of commands; its refusal of an unknown one names the library's own of that name."""
    from typer.core import TyperGroup

    class Commands(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            try:
                return super().resolve_command(ctx, args)
            except Exception as error:  # a UsageError of typer's own click, or of click's
                message = getattr(error, "message", None)
                if args[0] in rc.__all__ and message is not None:
                    text = f"{message} In Python it is rc.{args[0]}: see help(rc.{args[0]})."
                    setattr(error, "message", text)  # noqa: B010  # which Exception itself has not
                raise

    return Commands


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"recollect {rc.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


def _plainly(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with what it refuses said in one sentence and no traceback."""

    @functools.wraps(command)
    def run(*args: Any, imports: Sequence[str] = (), **options: Any) -> None:
        from recollect.cli.console import INTERRUPTED, nobody_reads

        name = command.__name__
        received.clear()
        with _interrupts():
            try:
                if imports:
                    from recollect.plugins import import_modules

                    import_modules(imports)
                command(*args, **options)
                if sys.stdout is not None:  # closed from the beginning
                    sys.stdout.flush()
            except typer.Exit as leave:
                if leave.exit_code == INTERRUPTED:
                    raise typer.Exit(_status()) from None
                raise
            except KeyboardInterrupt:
                _say(f"recollect {name}: interrupted")
                raise typer.Exit(_status()) from None
            except (ValueError, OSError) as error:  # a RecipeError is a ValueError
                if isinstance(error, BrokenPipeError) and nobody_reads():
                    return  # as with `| head`: the work is done, and nobody wants to hear more
                # A function that names itself to its caller says it once here.
                if speaks(error):
                    said = _to_import(error).removeprefix(f"{name}: ")
                    _say(f"recollect {name}{_which(error)}: {said}")
                raise typer.Exit(2) from None
            except ImportError as error:
                _say(f"recollect {name}: {_to_install(error)}")
                raise typer.Exit(2) from None

    # typer reads what a command takes from its signature.
    given = _as_written(inspect.signature(command, eval_str=True))
    own = inspect.Parameter(
        "imports", inspect.Parameter.KEYWORD_ONLY, default=[], annotation=_imports()
    )
    run.__signature__ = given.replace(parameters=[*given.parameters.values(), own])  # type: ignore[attr-defined]
    taken = {name: x.annotation for name, x in given.parameters.items()}
    run.__annotations__ = {**command.__annotations__, **taken, "imports": _imports()}
    return run


@contextmanager
def _interrupts() -> Iterator[None]:
    """Inside, signals that end a process interrupt the command.

    During an import they end the process: torch would turn the interrupt into another exception.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith("<frozen importlib"):
                # No exception: the import might turn it into another one.
                os.write(2, b"recollect: interrupted\n")
                os._exit(128 + number)
            caller = caller.f_back
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Ended(number)

    with answered((signal.SIGINT,), interrupt), answered(ENDINGS, interrupt, default=True):
        yield


def _which(error: Exception) -> str:
    """Of several processes the one that failed alone."""
    alone = rank() > 0 and not is_of_all(error)
    return f" (process {rank()} of {world_size()})" if alone else ""


def _as_written(signature: inspect.Signature) -> inspect.Signature:
    """The signature with help texts that are shown as they are written.

    Rich takes ``[run]`` for markup and drops it.
    """
    from rich.markup import escape
    from typer.core import HAS_RICH

    parameters = list(signature.parameters.values())
    if HAS_RICH:  # and is not told to be silent
        for index, one in enumerate(parameters):
            kind, *told = get_args(one.annotation)
            told = [copy.copy(x) for x in told]
            for x in told:
                if getattr(x, "help", None):
                    x.help = escape(x.help)
            parameters[index] = one.replace(annotation=Annotated[(kind, *told)])
    return signature.replace(parameters=parameters)


def _status() -> int:
    """Exit status after an interrupt, as shells have it: 128 and the signal's number."""
    return 128 + next((number for number in received if number in ENDINGS), signal.SIGINT)


def _say(sentence: str) -> None:
    """A sentence on the standard error, if anybody reads it."""
    from recollect.cli.console import nobody_reads

    try:
        typer.echo(sentence, err=True)
    except BrokenPipeError:
        nobody_reads()


def _imports() -> Any:
    text = "Import this module first: members or presets of your own. May be given several times."
    return Annotated[list[str], typer.Option("--import", metavar="MODULE", help=text)]


def _to_import(error: Exception) -> str:
    """What to say of an error; of a member that nobody registered, how a command learns of it."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, RecipeError) and _UNREGISTERED in said:
        return said.replace(_UNREGISTERED, _IMPORT_IT)
    return said


def _to_install(error: ImportError) -> str:
    """What to install for a command that lacks an extra; any other import that fails is raised."""
    if error.name is None:  # a sentence of ours, which says it
        return str(error)
    missing = error.name.partition(".")[0]
    if missing not in _EXTRAS:
        raise error
    extra = _EXTRAS[missing]
    return (
        f'this needs {missing}, which is not installed: pip install -e ".[{extra}]" in its checkout'
    )
