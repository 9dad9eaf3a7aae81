"""`recollect zoo`, `recollect explain` and `recollect sizes`: recipes and models in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any, Literal

import typer

import recollect as rc
from recollect.cli.console import make_console, print_json
from recollect.cli.options import JsonOption, check_models, comma_list, load_model_spec
from recollect.messages import RecipeError
from recollect.report.formatting import hanging_indent
from recollect.report.tables import Column, Table

__all__ = ["explain", "sizes", "zoo"]


def zoo(
    family: Annotated[str | None, typer.Option(help="Family to list. [default: all]")] = None,
    since: Annotated[
        int | None, typer.Option(help="Year of the earliest publication to list. [default: all]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the architectures, from their recipes."""
    names = rc.zoo.names(family)
    names += rc.zoo.names(kind="hybrid") if family is None else []
    presets = [rc.zoo.get(name) for name in names]
    if since is not None:
        newest = max(preset.year or 0 for preset in presets)
        if since > newest:
            raise RecipeError(
                f"no architecture is from {since} or later: give a year up to {newest}"
            )
        presets = [preset for preset in presets if preset.year and preset.year >= since]
    rows = [_hybrid_row(p) if p.kind == "hybrid" else _preset_row(p) for p in presets]
    if as_json:
        print_json(rows)
        return
    table = Table(columns=_ZOO_COLUMNS, rows=[_format_row(row) for row in rows])
    table.print(make_console(bounded=True), also_in="--json")
    typer.echo("state at K = V = 64, per row and head; `recollect explain NAME` says more")


_CHOICES = ("memory", "features", "bias", "context", "retention", "algorithm")
_SHOWN_CHOICES = ("memory", "bias", "retention", "algorithm")
_ZOO_COLUMNS = (
    Column(name="name"),
    Column(name="fidelity", priority=2),
    Column(name="memory", min_width=12, priority=8),
    Column(name="bias", min_width=12, priority=7),
    Column(name="retention", min_width=12, priority=6),
    Column(name="algorithm", min_width=12, priority=9),
    Column(name="write", min_width=24, priority=3),
    Column(name="state", priority=1),
    Column(name="has", min_width=14, priority=10),
    Column(name="engine", priority=4),
)


_PROPERTY_LABELS = {
    "dynamic decay": "decay",
    "deep memory": "depth",
    "nonlinear capacity": "capacity",
    "locally optimal": "optimality",
    "flexible context": "context",
}


def _format_row(row: dict[str, Any]) -> list[str]:
    """Return the cells of one architecture, in the order of `_ZOO_COLUMNS`."""
    properties = [label for name, label in _PROPERTY_LABELS.items() if row["properties"][name]]
    return [
        row["name"],
        row["fidelity"],
        *(row[choice].removesuffix("()") for choice in _SHOWN_CHOICES),
        "\n".join(row["write"]).replace(";   ", "\n"),
        row["state"],
        ", ".join(properties) or "–",
        row["engine"],
    ]


def _preset_row(preset: Any) -> dict[str, Any]:
    explained = rc.explain(preset)
    return {
        **_identity(preset),
        **{choice: getattr(preset.recipe, choice).brief for choice in _CHOICES},
        "write": list(explained.write_equations),
        **_state_size([explained.cost]),
        "properties": dict(explained.properties),
        "engine": explained.engine,
        "fidelity": preset.fidelity.kind,
    }


def _hybrid_row(hybrid: Any) -> dict[str, Any]:
    """Return the data of a system of several recipes, joined in the order of its layers."""
    explained = rc.explain(hybrid)
    parts = explained.parts.values()

    def join(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    return {
        **_identity(hybrid),
        **{
            choice: join(getattr(part.recipe, choice).brief.removesuffix("()") for part in parts)
            for choice in _CHOICES
        },
        "write": [hybrid.rule.replace(",  ", ";   ")],
        **_state_size(explained.costs.values()),
        "properties": {
            name: any(part.properties[name] for part in parts) for name in _PROPERTY_LABELS
        },
        "engine": join(part.engine for part in parts),
        "fidelity": hybrid.fidelity.kind,
    }


def _identity(system: Any) -> dict[str, Any]:
    names = ("name", "title", "year", "family", "kind", "twin_of")
    return {name: getattr(system, name) for name in names}


def _state_size(costs: Iterable[Any]) -> dict[str, Any]:
    """Return the size of the states in words and in bytes."""
    from recollect.report.formatting import format_si

    known = [cost for cost in costs if cost is not None]
    size = sum(cost.state_bytes for cost in known) if known else None
    growth = sum(cost.state_bytes_per_token for cost in known)
    words = "–" if size is None else format_si(size, "B")
    return {
        "state": f"{format_si(growth, 'B')} per token" if growth else words,
        "state_bytes": None if growth else size,
        "state_grows_per_token": growth,
    }


def explain(
    name: Annotated[
        str, typer.Argument(metavar="NAME_OR_FILE", help="Architecture, or .json/.toml recipe.")
    ],
    engine: Annotated[str, typer.Option(help="Engine to explain the recipe for.")] = "auto",
    precision: Annotated[
        Literal["float32", "tf32"] | None,
        typer.Option(help="Precision of matrix products to explain the recipe for."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print the equations of normalised steps, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the problem that a recipe solves, its update rule, and the engine that runs it."""
    spec = load_model_spec(name)
    recipe = spec if isinstance(spec, str) else spec[1]
    explained = rc.explain(recipe, engine=engine, precision=precision, full=full)
    if as_json:
        print_json(explained.to_dict())
    else:
        console = make_console()
        typer.echo(hanging_indent(str(explained), console.width if console.bounded else None))


def sizes(
    models: Annotated[
        str, typer.Option(help="Names of the zoo, separated by commas.")
    ] = "softmax_attention,gated_delta_net,titans",
    as_json: JsonOption = False,
) -> None:
    """List the papers' sizes with their learning rates, and the parameter counts of models."""
    names = comma_list(models)
    check_models(names)
    stored = json.loads(resources.files("recollect.cli").joinpath("sizes.json").read_text("utf-8"))
    if set(names) <= set(stored[0]["parameters"]):  # without torch
        rows = [
            {**size, "parameters": {name: size["parameters"][name] for name in names}}
            for size in stored
        ]
    else:
        rows = _count_sizes(names)
    if as_json:
        print_json(rows)
        return
    columns = [Column(name="papers' name")]
    ranks = {"layers": 4, "width": 3, "heads": 5, "lr": 2, "tokens": 1}
    columns += [Column(name=name, align="right", priority=rank) for name, rank in ranks.items()]
    columns += [Column(name=name, align="right") for name in names]
    table = Table(
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
    table.print(make_console(), also_in="--json")
    typer.echo("parameters with 32,000 tokens of vocabulary, an MLP of 8/3 and an untied output")


def _count_sizes(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the papers' sizes, with the parameters of each model by part."""
    from recollect.lm.model.counts import count_parameters
    from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_config

    rows = []
    for size in PAPER_SIZES.values():
        counts = {name: count_parameters(paper_config(size.name, name)) for name in names}
        totals = {name: {**parts, "total": sum(parts.values())} for name, parts in counts.items()}
        rows.append({**asdict(size), "parameters": totals})
    return rows
