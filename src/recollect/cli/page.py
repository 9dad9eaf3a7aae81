"""`recollect page`: the page of six knobs, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recollect.cli.console import check_models, check_writable, console_of_page

__all__ = ["page"]


def page(
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("runs/page"),
    systems: Annotated[
        str, typer.Option(help="Zoo names, separated by commas; all of one recipe if omitted.")
    ] = "",
) -> None:
    """Write the page of six knobs: recipes to turn, explained, beside a memory at work."""
    names = [name.strip() for name in systems.split(",") if name.strip()]
    check_models(names)
    from rich.progress import Progress

    import recollect as rc
    from recollect.page import save

    for name in names:
        rc.zoo.get(name)  # an unknown one is refused before the folder is made
    check_writable(out)
    console = console_of_page(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("systems and their neighbours", total=None)

        def told(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        written = save(out, names or None, progress=told)
    typer.echo(written)
