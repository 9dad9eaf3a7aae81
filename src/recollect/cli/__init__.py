"""The command line: one file per command."""

from recollect.cli.app import COMMANDS, build, load_recipe, main

__all__ = ["COMMANDS", "build", "load_recipe", "main"]
