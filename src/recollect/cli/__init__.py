"""The command line: one file per command."""

from recollect.cli.app import COMMANDS, build, main

__all__ = ["COMMANDS", "build", "main"]
