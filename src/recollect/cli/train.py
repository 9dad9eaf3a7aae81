"""``recollect train`` and ``recollect sizes``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import rich.box
import rich.console
import rich.progress
import rich.table
import typer

if TYPE_CHECKING:
    from recollect.lm.training.train import Progress

__all__ = ["sizes", "train"]

INTERRUPTED = 130
WIDE = 120


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see the manual.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")
    ] = False,
    out: Annotated[str | None, typer.Option(help="Folder, in place of [run] out.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, in place of [optimizer].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a language model as a file says; a run that was stopped goes on with --resume."""
    from recollect.lm import train as run
    from recollect.lm.training.plan import load_plan

    plan = load_plan(config)
    if out is not None:
        plan = replace(plan, run=replace(plan.run, out=out))
    if steps is not None:
        plan = replace(plan, optimizer=replace(plan.optimizer, steps=steps, tokens=None))
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        console = rich.console.Console(stderr=True, width=WIDE)

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    try:
        with _Bar(console, plan.steps) as bar:
            result = run(plan, resume=resume, watch=bar.show, say=say)
    except KeyboardInterrupt:
        console.print("interrupted; --resume goes on from the last checkpoint")
        raise typer.Exit(INTERRUPTED) from None
    facts = {
        "model": str(result.folder),
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "loss": result.loss if math.isfinite(result.loss or 0.0) else None,
        "heldout_bits_per_byte": result.heldout,
        "skipped_lines": result.skipped,
        "notes": list(result.notes),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for note in result.notes:
        say(note)
    measured = "" if result.heldout is None else f", held-out {result.heldout:.3f} bits per byte"
    lost = f"; {result.skipped:,} lines were left out" if result.skipped else ""
    loss = "" if result.loss is None else f", loss {result.loss:.3f} nats per token"
    typer.echo(
        f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds:,.0f} s{loss}"
        f"{measured}{lost}"
    )
    typer.echo(f"model: {result.folder}")


class _Bar:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: rich.console.Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self.every = max(1, steps // 20)
        self.printed = -1
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("training"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[facts]}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("training", total=steps, facts="")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def show(self, progress: Progress) -> None:
        """One step's news."""
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}  "
        heldout = "" if progress.heldout is None else f"held-out {progress.heldout:.3f} bits/byte  "
        facts = (
            f"{loss}{heldout}{progress.tokens_per_second:,.0f} tokens/s  "
            f"{progress.ceiling_share:.0%} of the matmul ceiling"
        )
        self.bar.update(self.task, completed=progress.step, facts=facts)
        last = progress.step == self.steps
        if self.console.is_terminal or progress.loss is None or progress.step == self.printed:
            return
        if progress.step % self.every == 0 or last or self.printed < 0:
            self.printed = progress.step
            self.console.print(f"step {progress.step:,}/{self.steps:,}  {facts}", highlight=False)


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
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=WIDE)
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
