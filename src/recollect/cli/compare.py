"""The commands that run things: ``recollect compare`` and ``recollect bench``."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.box
import rich.console
import rich.progress
import rich.table
import torch
import typer

from recollect.recipe.recipe import Recipe

if TYPE_CHECKING:
    from recollect.experiments import Comparison
    from recollect.layer.options import LayerOptions
    from recollect.zoo import Preset

__all__ = ["bench", "compare", "reproduce", "stated"]

INTERRUPTED = 130
WIDE = 120  # columns where no terminal bounds them


def stated(name: str) -> Preset | tuple[str, Recipe] | tuple[str, Recipe, LayerOptions]:
    """A model by zoo name, or a recipe of one's own in a JSON or TOML file."""
    from recollect.recipe.files import load_recipe
    from recollect.zoo import get

    path = Path(name)
    if path.suffix in (".json", ".toml"):
        return path.stem, load_recipe(path)
    return get(name)


def compare(
    models: Annotated[
        str, typer.Option(help="Zoo names or recipe files (.json, .toml), separated by commas.")
    ],
    task: Annotated[list[str], typer.Option(help="text or mqar; may be given twice.")] = ["text"],  # noqa: B006
    text: Annotated[str | None, typer.Option(help="A text file of your own.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A hub dataset with a 'text' column, streamed.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per model.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers of the models.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of every layer.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of an example.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples of a step.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Training tokens per model, in place of --steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, examples and their order.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes, one thread each if several.")] = 1,
    method: Annotated[str, typer.Option(help="Engine, or auto.")] = "auto",
    key_dim: Annotated[
        int | None, typer.Option(help="Channels of every memory's keys; width / heads if omitted.")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(help="Of every model; default: the largest one's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("runs/compare"),
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a table that grows: one file per model, and those that are there are "
            "not trained again. In place of the report; needs --parameters and the task text."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train models at equal parameters and tokens, and report."""
    import recollect.experiments as experiments
    from recollect.experiments.comparison.results import DEFAULTS
    from recollect.experiments.monitor import Monitor
    from recollect.lm.data.streaming import stream_text

    chosen = [stated(name.strip()) for name in models.split(",") if name.strip()]
    if text is not None and dataset is not None:
        raise ValueError("--text and --dataset exclude each other: give one text")
    corpus = None if dataset is None else stream_text(dataset)
    sizes = {
        name: DEFAULTS[name].but(
            steps=steps,
            lr=lr,
            width=width,
            depth=depth,
            heads=heads,
            length=length,
            batch=batch,
            tokens=tokens,
            key_dim=key_dim,
        )
        for name in task
        if name in DEFAULTS
    }
    if rows is not None and (parameters is None or list(task) != ["text"]):
        raise ValueError(
            "--rows needs --parameters, so that rows can be laid side by side, and --task text"
        )
    _writable(out if rows is None else rows)
    console = rich.console.Console(stderr=as_json)
    if not console.is_terminal:
        console = rich.console.Console(stderr=as_json, width=WIDE)
    with Monitor(console, models=len(chosen), tasks=len(set(task))) as monitor:
        if rows is not None:
            assert parameters is not None
            made = experiments.add_rows(
                chosen,
                rows,
                sizes=sizes["text"],
                parameters=parameters,
                text=text,
                corpus=corpus,
                seed=seed,
                method=method,
                jobs=jobs,
                watcher=monitor,
                command=shlex.join(["recollect", *sys.argv[1:]]),
            )
            if made is None:
                console.print("every row stands; delete NAME.json to train it anew")
            _ended(console, rows / "README.md", made, as_json=as_json)
            return
        result = experiments.compare(
            chosen,
            task,
            text=text,
            corpus=corpus,
            sizes=sizes,
            seed=seed,
            method=method,
            parameters=parameters,
            jobs=jobs,
            watcher=monitor,
        )
    command = shlex.join(["recollect", *sys.argv[1:]])
    paths = experiments.save_comparison(result, out, command=command)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        _show(console, result)
    _ended(console, paths["report"], result)


def _ended(
    console: rich.console.Console,
    report: Path,
    result: Comparison | None,
    *,
    as_json: bool = False,
) -> None:
    """Say where the report is and what failed, and leave with the code that says so."""
    if as_json:
        data = None if result is None else result.to_dict()
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
    if report.exists():
        console.print(f"report: {report}", soft_wrap=True)
    if result is None:
        return
    for name, model, reason in result.failures:
        console.print(f"{model} could not be trained on {name}: {reason}", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.failures:
        raise typer.Exit(1)


def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment; see --list.")] = "",
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), small (minutes), or paper: prints its plan.")
    ] = "small",
    seeds: Annotated[int | None, typer.Option(help="How many; the scale's own if omitted.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
    list_all: Annotated[bool, typer.Option("--list", help="Name the experiments.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    launch: Annotated[bool, typer.Option("--launch", help="Run the paper's scale.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw a figure or table of the papers from this library, and judge its claims."""
    from recollect.experiments.framework.price import plan
    from recollect.experiments.gallery import save_gallery
    from recollect.experiments.registry import EXPERIMENTS, PLANNED
    from recollect.experiments.reproduce import chosen
    from recollect.experiments.reproduce import reproduce as run_one
    from recollect.experiments.viewer import Bar, listing, show_run

    console = rich.console.Console(stderr=as_json)
    if not console.is_terminal:
        console = rich.console.Console(stderr=as_json, width=WIDE)
    rows = list(EXPERIMENTS.values())
    if list_all:
        if as_json:
            known = [{"name": row.name, "title": row.title, "source": row.source} for row in rows]
            known += [{"name": row.name, "planned": True, "source": row.source} for row in PLANNED]
            typer.echo(json.dumps(known, indent=2, ensure_ascii=False))
        else:
            listing(console, rows, PLANNED)
        return
    if every == bool(name):
        raise ValueError("name one experiment, or give --all; --list names them")
    wanted = rows if every else [chosen(name)]
    _known_scale(scale)
    _known_device(device)
    if scale == "paper" and not launch:
        plans = [
            plan(row, "paper", seeds=seeds, jobs=jobs, device=device, out=str(out))
            for row in wanted
        ]
        if as_json:
            typer.echo(json.dumps([priced.to_dict() for priced in plans], indent=2))
        else:
            typer.echo("\n\n".join(map(str, plans)))
        return
    _writable(out)
    runs = []
    with Bar(console) as bar:
        for row in wanted:
            run = run_one(
                row,
                scale=scale,  # type: ignore[arg-type]
                seeds=seeds,
                jobs=jobs,
                out=out,
                device=device,
                fresh=fresh,
                viewer=bar,
            )
            runs.append(run)
            if not as_json:
                show_run(console, run)
                console.print(f"report: {run.folder / 'report.html'}", soft_wrap=True)
            if not run.complete:
                break
    gallery = save_gallery(out)
    console.print(f"gallery: {gallery}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([run.to_dict() for run in runs], indent=2, allow_nan=False))
    if not all(run.complete for run in runs):
        raise typer.Exit(INTERRUPTED)


def _known_scale(scale: str) -> None:
    from recollect.experiments.framework.experiment import SCALES

    if scale not in SCALES:
        raise ValueError(f"--scale must be one of {', '.join(SCALES)}, not {scale!r}")


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


def _show(console: rich.console.Console, result: Comparison) -> None:
    """The tables of the report, on the terminal."""
    from recollect.experiments.comparison.report import table

    for task in result.sizes:
        if not result.of(task):
            continue
        page = table(result, task)
        grid = rich.table.Table(
            title=page.title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False
        )
        # A terminal has room for less than a page: the rest is in the report.
        shown = [i for i, name in enumerate(page.columns) if name not in ("tokens", "finished")]
        for i in shown:
            name = page.columns[i].removesuffix(" per sequence")
            grid.add_column(name, justify="right" if i else "left", no_wrap=not i)
        for row in page.rows:
            cells = ["–" if cell is None else str(cell) for cell in row]
            grid.add_row(*(cells[i] for i in shown))
        if task == "text" and result.bigram is not None:
            grid.add_row("byte bigram", f"{result.bigram:.3f}", style="dim")
        console.print(grid)


def bench(
    suite: Annotated[str, typer.Option(help="What to time.")] = "linear",
    rounds: Annotated[int, typer.Option(help="Rounds; every case once in each.")] = 7,
    length: Annotated[int, typer.Option(help="T, tokens.")] = 4096,
    heads: Annotated[int, typer.Option(help="H, memories.")] = 8,
    size: Annotated[int, typer.Option(help="K = V, channels per head.")] = 64,
    only: Annotated[
        str, typer.Option(help="A few of the suite's names, separated by commas, and the baseline.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    save: Annotated[Path | None, typer.Option(help="Where to store the result as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Time implementations alternately in one run, beside the device's own ceiling."""
    from recollect.bench import run
    from recollect.bench.suites.registry import SUITES, Shape, chosen_cases, document, ratios

    if suite not in (*SUITES, "train"):
        raise ValueError(f"there is no suite {suite!r}; there are {', '.join([*SUITES, 'train'])}")
    for name, number in (("rounds", rounds), ("length", length), ("heads", heads), ("size", size)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    _known_device(device)
    if suite == "train":
        _bench_train(rounds, length, save, as_json)
        return
    chosen = SUITES[suite]
    shape = Shape(T=length, H=heads, K=size, V=size, device=device)
    cases = chosen_cases(chosen, shape, [name.strip() for name in only.split(",") if name.strip()])
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"timing {suite}", total=rounds)
        result = run(
            cases,
            baseline=chosen.baseline,
            min_seconds=chosen.min_seconds,
            rounds=rounds,
            device=device,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    extra = ratios(chosen, shape, result)
    data = document(suite, shape, result, extra)
    if save is not None:
        from recollect.report.files import write_atomic

        write_atomic(save, json.dumps(data, indent=2, allow_nan=False) + "\n")
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    result.print()
    for what, ratio in extra.items():
        typer.echo(f"{what}: {ratio:.2f}")
    if save is not None:
        typer.echo(f"saved: {save}")


def _bench_train(rounds: int, length: int, save: Path | None, as_json: bool) -> None:
    """The suite ``train``: whole steps, in the callback of a run, so it times them itself."""
    from recollect.bench.suites.train import BARE, RUN, measure

    context = min(length, 512)
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True) as progress:
        bar = progress.add_task("timing train", total=rounds)
        result = measure(
            rounds=rounds,
            context=context,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    ratio = 1 / result[RUN].ratio
    data = {
        "suite": "train",
        "shape": {"context": context, "batch": 4, "parameters": 3_000_000},
        **json.loads(result.to_json()),
        "ratios": {"tokens per second: recollect train / bare loop": ratio},
    }
    if save is not None:
        from recollect.report.files import write_atomic

        write_atomic(save, json.dumps(data, indent=2, allow_nan=False) + "\n")
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    result.print()
    typer.echo(f"tokens per second of {RUN} by the {BARE}'s: {ratio:.2f}")
    if save is not None:
        typer.echo(f"saved: {save}")
