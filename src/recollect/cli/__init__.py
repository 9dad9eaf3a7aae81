"""The command line: one file per command."""

from typing import TYPE_CHECKING, Any

from recollect_command import main

if TYPE_CHECKING:
    from recollect.cli.app import COMMANDS, build

__all__ = ["COMMANDS", "build", "main"]


def __getattr__(name: str) -> Any:
    """Import the application, and with it typer, on first use."""
    if name not in ("COMMANDS", "build"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recollect.cli import app

    return getattr(app, name)
