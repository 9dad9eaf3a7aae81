"""The command line: ``recollect zoo``, ``recollect explain``.

A command is a function in `COMMANDS`; what it needs beyond torch it imports itself. Refusals leave
with exit code 2 and one sentence.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import recollect as rc
from recollect.recipe.files import load_recipe

if TYPE_CHECKING:
    import rich.box
    import rich.console
    import rich.table
    import rich.text
    import typer
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

__all__ = ["COMMANDS", "build", "load_recipe", "main"]

_MISSING = 'recollect\'s commands need typer and rich: pip install "recollect[cli]"'
_EXTRAS = {
    "accelerate": "lm",
    "datasets": "lm",
    "matplotlib": "plot",
    "safetensors": "lm",
    "tokenizers": "lm",
    "transformers": "lm",
}
"""Which extra of recollect brings a module that a command may need."""

_WIDE = 200  # columns of a table that no terminal bounds
_ROOMY = 150  # columns from which a table shows the choices too


def main() -> None:
    """Entry point of the ``recollect`` command."""
    if not typer:
        sys.exit(_MISSING)
    build()()


def build() -> typer.Typer:
    """The application, with every command of `COMMANDS`."""
    app = typer.Typer(
        name="recollect",
        help="Sequence layers stated as the regression problem their memory solves.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for command in COMMANDS:
        app.command()(_plainly(command))
    return app


def _print_version(asked: bool) -> None:
    if asked:
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
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (ValueError, OSError) as error:  # a RecipeError is a ValueError
            typer.echo(f"recollect {command.__name__}: {error}", err=True)
            raise typer.Exit(2) from None
        except ImportError as error:
            typer.echo(f"recollect {command.__name__}: {_to_install(error)}", err=True)
            raise typer.Exit(2) from None

    return run


def _to_install(error: ImportError) -> str:
    """What to install for a command that lacks an extra; any other import that fails is raised."""
    if error.name is None:  # a sentence of ours, which says it
        return str(error)
    missing = error.name.partition(".")[0]
    if missing not in _EXTRAS:
        raise error
    extra = _EXTRAS[missing]
    return f'this needs {missing}, which is not installed: pip install "recollect[{extra}]"'


def _console() -> rich.console.Console:
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=_WIDE)


def _json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


# -- recollect zoo -------------------------------------------------------------------------------


def zoo(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the architectures, from their recipes."""
    rows = [_row(rc.zoo.get(name)) for name in rc.zoo.names(family)]
    if as_json:
        _json(rows)
        return
    console = _console()
    choices = ("memory", "bias", "retention", "algorithm") if console.width >= _ROOMY else ()
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("#", justify="right")
    for head in ("name", *choices, "write", "state", "has", "engine"):
        table.add_column(head, no_wrap=head in ("name", "state", "engine"))
    for row in rows:
        table.add_row(
            *map(rich.text.Text, (str(row["row"]), row["name"])),
            *(rich.text.Text(row[choice].removesuffix("()")) for choice in choices),
            rich.text.Text("\n".join(row["write"]).replace(";   ", "\n")),
            rich.text.Text(row["state"]),
            ", ".join(_SHORT[name] for name, holds in row["properties"].items() if holds) or "–",
            row["engine"],
        )
    console.print(table)
    typer.echo("state at K = V = 64, per row and head; `recollect explain NAME` says more")


_SHORT = {
    "dynamic decay": "decay",
    "deep memory": "depth",
    "nonlinear capacity": "capacity",
    "locally optimal": "optimality",
    "flexible context": "context",
}


def _row(preset: Any) -> dict[str, Any]:
    """One architecture as data."""
    recipe, found = preset.recipe, rc.explain(preset)
    price = found.cost
    size = None if price is None else price.state_bytes
    grows = 0 if price is None else price.grows
    return {
        "row": preset.row,
        "name": preset.name,
        "title": preset.title,
        "family": preset.family,
        **{choice: getattr(recipe, choice).brief for choice in _CHOICES},
        "write": list(found.write),
        "state": _size(grows, size),
        "state_bytes": None if grows else size,
        "state_grows_per_token": grows,
        "properties": dict(found.properties),
        "engine": found.engine,
        "fidelity": preset.fidelity.kind,
    }


_CHOICES = ("memory", "features", "bias", "context", "retention", "algorithm")


def _size(grows: int, size: int | None) -> str:
    from recollect.cost import readable

    if size is None:
        return "–"
    return f"{readable(grows, 'B')} per token" if grows else readable(size, "B")


# -- recollect explain ---------------------------------------------------------------------------


def explain(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME_OR_FILE", help="An architecture, or a .json/.toml recipe."),
    ],
    method: Annotated[str, typer.Option(help="Explain as if this engine were asked for.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a recipe solves, how it moves, and which engine runs it."""
    # A name of the zoo stays one, whatever files lie around.
    of_file = name not in rc.zoo.names() and ("." in name or "/" in name)
    found = rc.explain(load_recipe(Path(name)) if of_file else name, method=method)
    if as_json:
        _json(found.to_dict())
    else:
        typer.echo(str(found))


COMMANDS: tuple[Callable[..., None], ...] = (zoo, explain)
if typer is not None:
    from recollect.cli.compare import bench, compare, reproduce
    from recollect.cli.generate import generate
    from recollect.cli.train import sizes, train

    COMMANDS = (*COMMANDS, compare, reproduce, train, sizes, generate, bench)
