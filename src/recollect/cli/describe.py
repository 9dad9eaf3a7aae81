"""`recollect zoo`, `recollect explain` and `recollect sizes`: recipes and models in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any

import typer

import recollect as rc
from recollect.cli.console import check_models, console_of_page, named_or_loaded, print_json
from recollect.report.terminal import Column, TerminalTable, hung


def zoo(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the architectures, from their recipes."""
    together = family in (None, rc.zoo.hybrid_systems.FAMILY)
    alone = [] if together and family is not None else rc.zoo.names(family)
    rows = [_row(rc.zoo.get(name)) for name in alone]
    rows += [_hybrid_row(rc.zoo.find(name)) for name in rc.zoo.hybrids() if together]
    if as_json:
        print_json(rows)
        return
    table = TerminalTable(columns=_ZOO_COLUMNS, rows=[_cells(row) for row in rows])
    table.print(console_of_page(bounded=True), elsewhere="--json")
    typer.echo("state at K = V = 64, per row and head; `recollect explain NAME` says more")


_SHOWN_CHOICES = ("memory", "bias", "retention", "algorithm")
_ZOO_COLUMNS = (
    Column(name="#", right=True, rank=5),
    Column(name="name"),
    Column(name="fidelity", rank=2),
    Column(name="memory", least=12, rank=8),
    Column(name="bias", least=12, rank=7),
    Column(name="retention", least=12, rank=6),
    Column(name="algorithm", least=12, rank=9),
    Column(name="write", least=24, rank=3),
    Column(name="state", rank=1),
    Column(name="has", least=14, rank=10),
    Column(name="engine", rank=4),
)


def _cells(row: dict[str, Any]) -> list[str]:
    """One architecture in words, in the order of `_ZOO_COLUMNS`."""
    return [
        str(row["row"]),
        row["name"],
        row["fidelity"],
        *(row[choice].removesuffix("()") for choice in _SHOWN_CHOICES),
        "\n".join(row["write"]).replace(";   ", "\n"),
        row["state"],
        ", ".join(_SHORT[name] for name, holds in row["properties"].items() if holds) or "–",
        row["engine"],
    ]


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
    grows = 0 if price is None else price.state_bytes_per_token
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


def _hybrid_row(hybrid: Any) -> dict[str, Any]:
    """A system of several recipes as data: what they are, in the order of its layers."""
    explained = rc.explain(hybrid)
    parts = explained.parts.values()
    prices = [price for price in explained.costs.values() if price is not None]
    grows, size = (
        sum(getattr(p, name) for p in prices) for name in ("state_bytes_per_token", "state_bytes")
    )
    return {
        "row": hybrid.row,
        "name": hybrid.name,
        "title": hybrid.title,
        "family": hybrid.family,
        **{
            choice: ", ".join(
                dict.fromkeys(getattr(p.recipe, choice).brief.removesuffix("()") for p in parts)
            )
            for choice in _CHOICES
        },
        "write": [hybrid.rule.replace(",  ", ";   ")],
        "state": _size(grows, size),
        "state_bytes": None if grows else size,
        "state_grows_per_token": grows,
        "properties": {name: any(p.properties[name] for p in parts) for name in _SHORT},
        "engine": ", ".join(dict.fromkeys(p.engine for p in parts)),
        "fidelity": hybrid.fidelity.kind,
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
    engine: Annotated[str, typer.Option(help="Explain as if this engine were asked for.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="And this precision of products: float32 or tf32.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print the equations of normalised steps, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a recipe solves, how it moves, and which engine runs it."""
    recipe = named_or_loaded(name)
    explained = rc.explain(recipe, engine=engine, precision=precision, full=full)
    if as_json:
        print_json(explained.to_dict())
    else:
        page = console_of_page()
        typer.echo(hung(str(explained), page.width if page.bounded else None))


def sizes(
    models: Annotated[
        str, typer.Option(help="Zoo names, separated by commas.")
    ] = "softmax_attention,gated_delta_net,titans",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the papers' sizes with their learning rates, and the parameters that models have."""
    names = [name.strip() for name in models.split(",") if name.strip()]
    check_models(names)
    stored = json.loads(resources.files("recollect.cli").joinpath("sizes.json").read_text("utf-8"))
    if set(names) <= set(stored[0]["parameters"]):  # without torch
        rows = [
            {**size, "parameters": {name: size["parameters"][name] for name in names}}
            for size in stored
        ]
    else:
        rows = _sizes(names)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    columns = [Column(name="papers' name")]
    facts = (("layers", 4), ("width", 3), ("heads", 5), ("lr", 2), ("tokens", 1))
    columns += [Column(name=name, right=True, rank=rank) for name, rank in facts]
    columns += [Column(name=name, right=True) for name in names]
    table = TerminalTable(
        columns=columns,
        rows=[
            [
                *(size["name"], str(size["depth"]), str(size["width"]), str(size["heads"])),
                f"{size['lr']:g}",
                f"{size['tokens'] / 1e9:g}B",
                *(f"{parts['total']:,}" for parts in size["parameters"].values()),
            ]
            for size in rows
        ],
    )
    table.print(console_of_page(), elsewhere="--json")
    typer.echo("parameters with 32,000 tokens of vocabulary, an MLP of 8/3 and an untied output")


def _sizes(names: Sequence[str]) -> list[dict[str, Any]]:
    """The papers' sizes, with the parameters of each model by part."""
    from recollect.lm.model.counts import count_parameters
    from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_config

    rows = []
    for size in PAPER_SIZES.values():
        counts = {name: count_parameters(paper_config(size.name, name)) for name in names}
        totals = {name: {**parts, "total": sum(parts.values())} for name, parts in counts.items()}
        rows.append({**asdict(size), "parameters": totals})
    return rows
