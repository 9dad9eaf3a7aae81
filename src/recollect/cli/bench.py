"""`recollect bench`: speed and memory against peers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recollect.cli.console import command_line, make_console
from recollect.cli.options import (
    DeviceOption,
    JsonOption,
    check_device,
    load_model_spec,
    named_list,
)
from recollect.cli.progress import CountDisplay

if TYPE_CHECKING:
    from recollect.benchmarks.results import BenchResult

__all__ = ["Suite", "bench"]

# Written out, because the import of the suites takes longer than `recollect --help` should.
Suite = StrEnum(
    "Suite",
    "adopt decode least_squares deep titans attention local linear matrix presets rows "
    "train memory",
)

Measured = tuple[dict[str, Any], "BenchResult | None", list[str]]
"""Data of a result, its times, and the lines below their table."""


def bench(
    suite: Annotated[
        Suite | None,
        typer.Option(metavar="SUITE", help=f"Suite: {', '.join(Suite)}. [default: linear]"),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_FILE", help="Recipe to time, next to gated_delta_net and SDPA."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of rounds; each times every case once. [default: 7; --recipe: 5]"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequence length T in tokens. [default: 4096; titans: 256; local: 1024; adopt, "
            "train, presets and --recipe: 512]",
        ),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of heads H. [default: 8; presets and --recipe: 4; titans: 1]"
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Channels per head, K = V. [default: 64]")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Cases of the suite, separated by commas.")
    ] = None,
    device: DeviceOption = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Batch size B, for --recipe alone.")] = 1,
    save: Annotated[
        Path | None, typer.Option(help="JSON file for the result; a report is written next to it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time implementations alternately in one run, next to the peak of the device."""
    if recipe is not None and (suite is not None or only):
        other = "--only" if suite is None else "--suite"
        raise ValueError(f"--recipe and {other} exclude each other: leave one of them out")
    if recipe is None and batch != 1:
        raise ValueError("--batch is an option of --recipe: leave it out, or name a recipe")
    check_device(device)
    _check_save(save)
    sizes = {"T": length, "H": heads, "K": size, "V": size}
    sizes = {name: number for name, number in sizes.items() if number is not None}
    names = named_list(only, "--only")
    if recipe is not None:
        measured = _bench_recipe(recipe, device, rounds or 5, {**sizes, "B": batch})
    elif suite is Suite.train:
        measured = _bench_train(rounds or 7, length or 512)
    elif suite is Suite.memory:
        measured = _bench_memory(names)
    else:
        measured = _bench_suite(suite or Suite.linear, device, rounds or 7, sizes, names)
    _emit(*measured, save, as_json)


def _bench_suite(
    name: str, device: str, rounds: int, sizes: Mapping[str, int], only: Sequence[str]
) -> Measured:
    from recollect.benchmarks.harness import run
    from recollect.benchmarks.suites import SUITES, build_cases, compute_ratios, to_report

    suite = SUITES[name]
    shape = replace(suite.shape, device=device, **sizes)
    cases = build_cases(suite, shape, only)
    errors = suite.errors(shape)
    with CountDisplay(make_console(stderr=True), f"timing {name}", rounds) as display:
        result = run(
            cases,
            baseline=suite.baseline,
            min_seconds=suite.min_seconds,
            rounds=rounds,
            device=device,
            dtype=shape.dtype,
            timer=suite.timer,
            progress=display.update,
        )
    ratios = compute_ratios(suite, result)
    data = to_report(name, shape, result, ratios)
    if errors:
        data["errors"] = errors
    lines = [f"{label}: {ratio:.2f}" for label, ratio in ratios.items()]
    lines += [f"{label}: relative error {error:.1e}" for label, error in errors.items()]
    return data, result, lines


def _bench_recipe(name: str, device: str, rounds: int, sizes: Mapping[str, int]) -> Measured:
    """Time one recipe next to its peers."""
    spec = load_model_spec(name)
    from recollect.benchmarks.recipe import bench as bench_recipe

    recipe = spec if isinstance(spec, str) else spec[1]
    with CountDisplay(make_console(stderr=True), f"timing {name}", rounds) as display:
        result = bench_recipe(
            recipe, device=device, rounds=rounds, progress=display.update, **sizes
        )
    return result.to_dict(), None, [str(result)]


def _bench_train(rounds: int, context: int) -> Measured:
    """Time whole training steps, of a run and of a bare loop."""
    from recollect.benchmarks.cases.train import PLAIN_LOOP, TRAIN, measure

    with CountDisplay(make_console(stderr=True), "timing train", rounds) as display:
        result = measure(rounds=rounds, context=context, progress=display.update)
    ratio = 1 / result[TRAIN].ratio
    data = {
        "suite": "train",
        "shape": {"context": context, "batch": 4, "parameters": 3_000_000},
        **json.loads(result.to_json()),
        "ratios": {"tokens per second: recollect train / bare loop": ratio},
    }
    return data, result, [f"tokens per second of {TRAIN} by the {PLAIN_LOOP}'s: {ratio:.2f}"]


def _bench_memory(only: Sequence[str]) -> Measured:
    """Measure the peak memory of training steps, each in a separate process."""
    from recollect.benchmarks.cases.memory import CASES, measure
    from recollect.report.formatting import format_si

    cases = [name for name in CASES if not only or any(word in name for word in only)]
    if not cases:
        raise ValueError(f"this suite has no {only[0]!r}; it has {'; '.join(CASES)}")
    with CountDisplay(make_console(stderr=True), "timing memory", len(cases)) as display:
        data = measure(cases, progress=display.update)
    lines = []
    for name, peak in data["peaks"].items():
        resident = "" if peak["resident"] is None else f", {format_si(peak['resident'], 'B')} grown"
        lines.append(f"{name}: {format_si(peak['live'], 'B')} live{resident}")
    lines += [f"{label}: {ratio:.3f}" for label, ratio in data["ratios"].items()]
    return data, None, lines


def _check_save(save: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes of measurement."""
    if save is None:
        return
    if save.suffix == ".html":
        raise ValueError(f"--save {save} takes a JSON file: its page is written beside it")
    folder = save.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if save.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--save {save} cannot be written: give a file in a folder of yours")


def _emit(
    data: dict[str, Any],
    result: BenchResult | None,
    lines: Sequence[str],
    save: Path | None,
    as_json: bool,
) -> None:
    """Print a result as a table and lines or as JSON, and save it."""
    text = json.dumps(data, indent=2, allow_nan=False)
    if as_json:
        lines = [text]
    elif result is not None:
        console = make_console()
        table = result.to_table()
        table.print(console, also_in="--json")
        console.print(table.caption, style="dim", markup=False, highlight=False)
    for line in lines:
        typer.echo(line)
    if save is not None:
        saved = _save(save, data, text + "\n")
        if not as_json:
            typer.echo("\n".join(saved))


def _save(save: Path, data: Mapping[str, Any], text: str) -> list[str]:
    """Write a result and its report; return lines with the paths."""
    from recollect.benchmarks.page import save_bench_page
    from recollect.report.files import backup_existing, save_to_temp_on_error, write_atomic

    report = save.with_suffix(".html")
    try:
        earlier = backup_existing(save, text)
        write_atomic(save, text)
        save_bench_page(data, report, command=command_line())
    except OSError as error:
        raise ValueError(
            save_to_temp_on_error({save.name: text}, target=save, error=error)
        ) from error
    copied = [] if earlier is None else [f"earlier result: {earlier}"]
    return [*copied, f"saved: {save}", f"report: {report}"]
