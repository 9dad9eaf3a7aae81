"""`recollect zoo`, `recollect explain` and `recollect sizes`: recipes and models in words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.table
import rich.text
import typer

import recollect as rc
from recollect.cli.console import ROOMY, TABLE_COLUMNS, console_of_page, print_json
from recollect.recipe.files import load_recipe


def zoo(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the architectures, from their recipes."""
    rows = [_row(rc.zoo.get(name)) for name in rc.zoo.names(family)]
    if as_json:
        print_json(rows)
        return
    console = console_of_page(TABLE_COLUMNS)
    choices = ("memory", "bias", "retention", "algorithm") if console.width >= ROOMY else ()
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
    recipe, explained = preset.recipe, rc.explain(preset)
    price = explained.cost
    size = None if price is None else price.state_bytes
    grows = 0 if price is None else price.grows
    return {
        "row": preset.row,
        "name": preset.name,
        "title": preset.title,
        "family": preset.family,
        **{choice: getattr(recipe, choice).brief for choice in _CHOICES},
        "write": list(explained.write),
        "state": _size(grows, size),
        "state_bytes": None if grows else size,
        "state_grows_per_token": grows,
        "properties": dict(explained.properties),
        "engine": explained.engine,
        "fidelity": preset.fidelity.kind,
    }


_CHOICES = ("memory", "features", "bias", "context", "retention", "algorithm")


def _size(grows: int, size: int | None) -> str:
    from recollect.report.units import readable

    if size is None:
        return "–"
    return f"{readable(grows, 'B')} per token" if grows else readable(size, "B")


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
    explained = rc.explain(load_recipe(Path(name)) if of_file else name, method=method)
    if as_json:
        print_json(explained.to_dict())
    else:
        typer.echo(str(explained))


def sizes(
    models: Annotated[
        str, typer.Option(help="Zoo names, separated by commas.")
    ] = "softmax_attention,gated_delta_net,titans",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the papers' sizes with their learning rates, and the parameters that models have."""
    from recollect.lm.model.counts import count_parameters
    from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_config

    names = [name.strip() for name in models.split(",") if name.strip()]
    rows = []
    for size in PAPER_SIZES.values():
        counts = {name: count_parameters(paper_config(size.name, name)) for name in names}
        rows.append((size, counts))
    if as_json:
        data = [
            {
                **asdict(size),
                "parameters": {
                    name: {**parts, "total": sum(parts.values())} for name, parts in counts.items()
                },
            }
            for size, counts in rows
        ]
        typer.echo(json.dumps(data, indent=2))
        return
    console = console_of_page()
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name in ("papers' name", "layers", "width", "heads", "lr", "tokens", *names):
        table.add_column(name, justify="left" if name == "papers' name" else "right")
    for size, counts in rows:
        table.add_row(
            *(size.name, str(size.depth), str(size.width), str(size.heads), f"{size.lr:g}"),
            f"{size.tokens / 1e9:g}B",
            *(f"{sum(parts.values()):,}" for parts in counts.values()),
        )
    console.print(table)
    typer.echo("parameters with 32,000 tokens of vocabulary, an MLP of 8/3 and an untied output")
