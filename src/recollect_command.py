"""Entry point of the ``recollect`` command."""

import sys
from importlib.util import find_spec

__all__ = ["MISSING", "main"]

MISSING = (
    "recollect's commands need typer and rich: pip install typer rich, or in its checkout "
    'pip install -e ".[cli]"'
)
"""Message if the extra [cli] is missing."""


def main() -> None:
    """Run the command line."""
    if not all(map(find_spec, ("typer", "rich"))):
        sys.exit(MISSING)
    from recollect.cli.app import main as run

    run()
