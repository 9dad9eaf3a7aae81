"""The command line: one file per command."""

from recollect.cli.app import COMMANDS, build, main
from recollect.recipe.files import load_recipe

__all__ = ["COMMANDS", "build", "load_recipe", "main"]
