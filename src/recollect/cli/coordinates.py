"""`recollect coordinates`: check that activations and their updates keep their size with width."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from recollect.cli.console import make_console, print_json, print_line
from recollect.cli.options import ConfigArgument, JsonOption, comma_list, load_config, positive
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from recollect.lm.mup.coordinate_check import Coordinate, Coordinates

__all__ = ["coordinates"]


def coordinates(
    config: ConfigArgument,
    widths: Annotated[
        str | None,
        typer.Option(help="Widths, such as 64,128,256. [default: three that fit the heads]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of AdamW at each width.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds to average over.")] = 2,
    depth: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of layers. [default: each kind of the file once, at least 2]"
        ),
    ] = None,
    parametrization: Annotated[
        Literal["standard", "mup"] | None,
        typer.Option(help="Rules for width. [default: that of [optimizer]]"),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(callback=positive(10), help="Largest slope that counts as flat.")
    ] = 0.25,
    figure: Annotated[
        Path | None, typer.Option(help="Path of a figure of the changes, as .png and .svg.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the rules for width: sizes of activations and updates at several widths.

    The exit code is 1 if a slope over the width is steeper than the tolerance.
    """
    sizes = None if widths is None else _parse_widths(widths)
    run = load_config(config)
    from recollect.lm.mup.check_plan import check_plan

    result = check_plan(
        run,
        widths=sizes,
        steps=steps,
        seeds=seeds,
        depth=depth,
        parametrization=parametrization,
        tolerance=tolerance,
    )
    if figure is not None:
        _draw(result, figure)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    if not result.flat:
        raise typer.Exit(1)


def _parse_widths(text: str) -> list[int]:
    widths = comma_list(text)
    if not widths or not all(map(str.isdecimal, widths)):
        raise ValueError(f"--widths must be numbers such as 64,128,256, not {text!r}")
    return [*map(int, widths)]


def _print(result: Coordinates) -> None:
    """Print a row per coordinate, and the steepest slope."""
    console = make_console()
    rules = "" if result.base_width is None else f" from base width {result.base_width}"
    print_line(
        console,
        f"{result.parametrization} parametrization{rules}: {result.steps} steps at learning rate "
        f"{result.lr:g}, {result.seeds} seeds",
    )
    numbers = [*map(str, result.widths), "slope", "slope of size"]
    Table(
        title="change of activations by width, root mean square",
        columns=[
            Column(name="activation"),
            *(Column(name=name, align="right") for name in numbers),
            Column(name="flat"),
        ],
        rows=[_row(coordinate) for coordinate in result.coordinates],
    ).print(console, also_in="--json")
    if result.flat:
        print_line(console, f"flat: no slope is steeper than {result.tolerance:g}")
        return
    steep = sum(not coordinate.flat for coordinate in result.coordinates)
    worst = result.steepest
    print_line(
        console,
        f"not flat: {steep} of {len(result.coordinates)} are steeper than {result.tolerance:g}, "
        f"most of all {worst.name} ({_format_slope(worst.change_slope)})",
    )


def _row(coordinate: Coordinate) -> list[str]:
    changes = [f"{change:.3g}" for change in coordinate.changes.values()]
    slopes = [_format_slope(coordinate.change_slope), _format_slope(coordinate.size_slope)]
    return [coordinate.name, *changes, *slopes, "yes" if coordinate.flat else "no"]


def _format_slope(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _draw(result: Coordinates, path: Path) -> None:
    from recollect.report.figures import Series, line_figure

    line_figure(
        [
            Series(name=coordinate.name, x=result.widths, y=[*coordinate.changes.values()])
            for coordinate in result.coordinates
            if all(change > 0 for change in coordinate.changes.values())
        ],
        x="width",
        y="change of activations, rms",
        title=f"Coordinates, {result.parametrization} parametrization",
        log_x=True,
        log_y=True,
    ).save(path)
