"""Shared by all commands: the console, JSON output, and checks of options."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import rich.box
import rich.console
import rich.progress
import rich.table
import torch
import typer

from recollect.recipe.recipe import Recipe

if TYPE_CHECKING:
    import rich.box
    import rich.console
    import rich.table
    import rich.text
    import typer

    from recollect.layer.options import LayerOptions
    from recollect.zoo.preset import Preset
else:
    try:
        import rich.box
        import rich.console
        import rich.table
        import rich.text
        import typer
    except ModuleNotFoundError as error:  # the extra [cli]
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        typer = rich = None


_WIDE = 200  # columns of a table that no terminal bounds


_ROOMY = 150  # columns from which a table shows the choices too


def _console() -> rich.console.Console:
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=_WIDE)


def _json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


INTERRUPTED = 130


WIDE = 120  # columns where no terminal bounds them


def stated(name: str) -> Preset | tuple[str, Recipe] | tuple[str, Recipe, LayerOptions]:
    """A model by zoo name, or a recipe of one's own in a JSON or TOML file."""
    from recollect.recipe.files import load_recipe
    from recollect.zoo.preset import get

    path = Path(name)
    if path.suffix in (".json", ".toml"):
        return path.stem, load_recipe(path)
    return get(name)


def _known_device(device: str) -> None:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {device} is not here: use cpu, or cuda where torch sees a GPU")


def _writable(out: Path) -> None:
    """That the report will have a place: better known before hours of training than after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to: {error.strerror}") from None
