"""`recollect coordinates`: whether activations and their updates keep their size as width grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.cli.console import check_exists, console_of_page, print_json

if TYPE_CHECKING:
    from recollect.lm.width.coordinates import Coordinate, Coordinates

__all__ = ["coordinates"]


def coordinates(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file of the run.")],
    widths: Annotated[
        str | None, typer.Option(help="Such as 64,128,256; three of whole heads if not given.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of AdamW at each width.")] = 4,
    seeds: Annotated[int, typer.Option(help="Initial weights that are averaged over.")] = 2,
    depth: Annotated[
        int | None, typer.Option(help="Layers; each of the file's once, and at least two.")
    ] = None,
    parametrization: Annotated[
        str | None, typer.Option(help="standard or mup, in place of [optimizer].")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest slope that counts as flat.")] = 0.25,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the changes here, as .png and .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the rules for width: sizes of activations and updates at several widths.

    Exit status 1: a slope over the width is steeper than the tolerance.
    """
    for name, number in (("steps", steps), ("seeds", seeds), ("depth", depth)):
        if number is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    if parametrization not in (None, "standard", "mup"):
        raise ValueError(f"--parametrization must be standard or mup, not {parametrization!r}")
    if not 0 < tolerance < 10:
        raise ValueError(f"--tolerance must be above 0 and below 10, not {tolerance}")
    sizes = None if widths is None else _numbers(widths)
    check_exists(config)
    from recollect.lm.training.plan import load_plan
    from recollect.lm.width.of_plan import check_plan
    from recollect.plugins import import_modules

    run = load_plan(config)
    import_modules(run.imports, folder=run.beside, option="import")
    found = check_plan(
        run,
        widths=sizes,
        steps=steps,
        seeds=seeds,
        depth=depth,
        parametrization=parametrization,
        tolerance=tolerance,
    )
    if figure is not None:
        _draw(found, figure)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if not found.flat:
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--widths must be numbers such as 64,128,256, not {text!r}") from None


def _print(found: Coordinates) -> None:
    from rich.table import Table

    page = console_of_page()
    rules = "" if found.base_width is None else f" from base width {found.base_width}"
    page.print(
        f"{found.parametrization} parametrization{rules}: {found.steps} steps at learning rate "
        f"{found.lr:g}, {found.seeds} seeds",
        soft_wrap=True,
        highlight=False,
    )
    table = Table(title="how far activations moved, by width", title_justify="left")
    table.add_column("of", no_wrap=True)
    for width in found.widths:
        table.add_column(str(width), justify="right", no_wrap=True)
    table.add_column("slope", justify="right", no_wrap=True)
    table.add_column("of size", justify="right", no_wrap=True)
    table.add_column("flat", no_wrap=True)
    for one in found.coordinates:
        table.add_row(*_row(one))
    page.print(table)
    steep = sum(not one.flat for one in found.coordinates)
    worst = found.steepest
    said = (
        f"flat: no slope is steeper than {found.tolerance:g}"
        if found.flat
        else f"not flat: {steep} of {len(found.coordinates)} are steeper than "
        f"{found.tolerance:g}, most of all {worst.name} ({_slope(worst.change_slope)})"
    )
    page.print(said, soft_wrap=True, highlight=False)


def _row(one: Coordinate) -> list[str]:
    changes = [f"{x:.3g}" for x in one.changes.values()]
    slopes = [_slope(one.change_slope), _slope(one.size_slope)]
    return [one.name, *changes, *slopes, "yes" if one.flat else "no"]


def _slope(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _draw(found: Coordinates, path: Path) -> None:
    from recollect.report.figures import Series, line_figure

    moved = [one for one in found.coordinates if all(x > 0 for x in one.changes.values())]
    series = [Series(name=one.name, x=found.widths, y=[*one.changes.values()]) for one in moved]
    line_figure(
        series,
        x="width",
        y="change of activations, rms",
        title=f"Coordinates, {found.parametrization} parametrization",
        log_x=True,
        log_y=True,
    ).save(path)
