"""`recollect bench`: speed and memory against peers."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from recollect.cli.console import check_device, console_of_page, named_or_loaded
from recollect.cli.progress import BenchDisplay

__all__ = ["bench"]

# Written out, because the suites take longer to import than `recollect --help` should.
_NAMES = (
    "adopt",
    "decode",
    "least_squares",
    "deep",
    "titans",
    "attention",
    "local",
    "linear",
    "matrix",
    "presets",
    "rows",
    "train",
    "memory",
)

_CONTEXT = 512  # tokens of a row of the suite ``train``, where nothing is said


def bench(
    suite: Annotated[
        str | None, typer.Option(help=f"What to time: {', '.join(_NAMES)}; linear.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_FILE",
            help="Time an architecture, or a .json/.toml recipe, next to gated_delta_net and SDPA.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds; every case once in each. 7, of --recipe 5.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="T, tokens; 4096, of titans 256, local 1024, adopt, train, presets, --recipe 512."
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="H, memories; 8, of presets and --recipe 4, of titans 1.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="K = V, channels per head; 64.")] = None,
    only: Annotated[
        str, typer.Option(help="A few of the suite's names, separated by commas, and the baseline.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[int | None, typer.Option(help="B, batch size; of --recipe only, 1.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Where to store the result as JSON, a page beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Time implementations alternately in one run, beside the device's own ceiling."""
    if recipe is not None and (suite is not None or only):
        other = "--only" if suite is None else "--suite"
        raise ValueError(f"--recipe and {other} exclude each other: leave one of them out")
    if recipe is None and batch is not None:
        raise ValueError("--batch is an option of --recipe: leave it out, or name a recipe")
    suite = suite or "linear"
    if suite not in _NAMES:
        raise ValueError(f"there is no suite {suite!r}; there are {', '.join(_NAMES)}")
    numbers = {"rounds": rounds, "length": length, "heads": heads, "size": size, "batch": batch}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    check_device(device)
    _check_place(save)
    if recipe is not None:
        keys = {"rounds": rounds, "T": length, "H": heads, "K": size, "V": size, "B": batch}
        _bench_recipe(recipe, {k: n for k, n in keys.items() if n}, device, save, as_json)
        return
    rounds = rounds or 7
    names = [name.strip() for name in only.split(",") if name.strip()]
    if suite == "train":
        _bench_train(rounds, length or _CONTEXT, save, as_json)
        return
    if suite == "memory":
        _bench_memory(names, save, as_json)
        return
    from recollect.benchmarks.harness import run
    from recollect.benchmarks.suites.registry import SUITES, chosen_cases, document, ratios

    chosen = SUITES[suite]
    keys = {"T": length, "H": heads, "K": size, "V": size}
    sizes = {name: number for name, number in keys.items() if number is not None}
    shape = replace(chosen.shape, device=device, **sizes)
    cases = chosen_cases(chosen, shape, names)
    errors = chosen.errors(shape)
    with BenchDisplay(console_of_page(stderr=True), suite, rounds) as display:
        result = run(
            cases,
            baseline=chosen.baseline,
            min_seconds=chosen.min_seconds,
            rounds=rounds,
            device=device,
            timer=chosen.timer,
            progress=display.count,
        )
    extra = ratios(chosen, shape, result)
    data = document(suite, shape, result, extra)
    if errors:
        data["errors"] = errors
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        _save(save, data)
        return
    result.print(console_of_page())
    for what, ratio in extra.items():
        typer.echo(f"{what}: {ratio:.2f}")
    for name, error in errors.items():
        typer.echo(f"{name}: relative error {error:.1e}")
    _told(save, data)


def _bench_recipe(
    name: str, sizes: Mapping[str, int], device: str, save: Path | None, as_json: bool
) -> None:
    """One recipe next to its peers."""
    from recollect.benchmarks.recipe import bench as bench_recipe

    timed = named_or_loaded(name)
    with BenchDisplay(console_of_page(stderr=True), name, sizes.get("rounds", 5)) as display:
        result = bench_recipe(timed, device=device, progress=display.count, **sizes)
    data = result.to_dict()
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        _save(save, data)
        return
    typer.echo(str(result))
    _told(save, data)


def _bench_train(rounds: int, context: int, save: Path | None, as_json: bool) -> None:
    """The suite ``train``: whole steps, in the callback of a run, so it times them itself."""
    from recollect.benchmarks.suites.train import BARE, RUN, measure

    with BenchDisplay(console_of_page(stderr=True), "train", rounds) as display:
        result = measure(
            rounds=rounds,
            context=context,
            progress=display.count,
        )
    ratio = 1 / result[RUN].ratio
    data = {
        "suite": "train",
        "shape": {"context": context, "batch": 4, "parameters": 3_000_000},
        **json.loads(result.to_json()),
        "ratios": {"tokens per second: recollect train / bare loop": ratio},
    }
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        _save(save, data)
        return
    result.print(console_of_page())
    typer.echo(f"tokens per second of {RUN} by the {BARE}'s: {ratio:.2f}")
    _told(save, data)


def _bench_memory(only: list[str], save: Path | None, as_json: bool) -> None:
    """The suite ``memory``: peaks of training steps, each in a process of its own."""
    from recollect.benchmarks.suites.memory import CASES, measure
    from recollect.report.units import readable

    cases = [name for name in CASES if not only or any(word in name for word in only)]
    if not cases:
        raise ValueError(f"this suite has no {only[0]!r}; it has {'; '.join(CASES)}")
    with BenchDisplay(console_of_page(stderr=True), "memory", len(cases)) as display:
        data = measure(cases, progress=display.count)
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        _save(save, data)
        return
    for name, peak in data["peaks"].items():
        resident = "" if peak["resident"] is None else f", {readable(peak['resident'], 'B')} grown"
        typer.echo(f"{name}: {readable(peak['live'], 'B')} live{resident}")
    for what, ratio in data["ratios"].items():
        typer.echo(f"{what}: {ratio:.3f}")
    _told(save, data)


def _check_place(save: Path | None) -> None:
    """That a result could be written there, before minutes are spent on it."""
    if save is None:
        return
    if save.suffix == ".html":
        raise ValueError(f"--save {save} takes a JSON file: its page is written beside it")
    folder = save.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if save.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--save {save} cannot be written: give a file in a folder of yours")


def _told(save: Path | None, data: Mapping[str, Any]) -> None:
    """Write a result, and say where it is."""
    if save is not None:
        kept = _save(save, data)
        if kept is not None:
            typer.echo(f"what stood there is kept: {kept}")
        typer.echo(f"saved: {save}")
        typer.echo(f"report: {save.with_suffix('.html')}")


def _save(save: Path | None, data: Mapping[str, Any]) -> Path | None:
    """Write a result that was shown already, and its page beside it.

    Returns:
        The copy of another file that stood there, or ``None``.
    """
    from recollect.benchmarks.page import save_bench_page
    from recollect.report.files import rescue, set_aside, write_atomic

    if save is None:
        return None
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        kept = set_aside(save, text)
        write_atomic(save, text)
        command = shlex.join(["recollect", *sys.argv[1:]])
        save_bench_page(data, save.with_suffix(".html"), command=command)
    except OSError as error:
        raise ValueError(rescue({save.name: text}, wanted=save, error=error)) from error
    return kept
