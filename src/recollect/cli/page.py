"""`recollect page`: the page of six knobs, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recollect.cli.console import make_console
from recollect.cli.options import OutOption, check_models, check_writable, named_list
from recollect.cli.progress import CountDisplay

__all__ = ["page"]


def page(
    out: OutOption = Path("runs/page"),
    systems: Annotated[
        str | None,
        typer.Option(
            help="Names of the zoo, separated by commas. [default: all with a single recipe]"
        ),
    ] = None,
) -> None:
    """Write the page of six knobs, where you change a recipe next to a memory at work."""
    names = named_list(systems, "--systems")
    check_models(names)
    import recollect as rc
    from recollect.page import save

    for name in names:
        rc.zoo.get(name)  # refuses a hybrid before the folder is created
    check_writable(out)
    with CountDisplay(make_console(stderr=True), "systems and their neighbours") as display:
        path = save(out, names or None, progress=display.update)
    typer.echo(path)
