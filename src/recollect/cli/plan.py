"""`recollect plan`: what a run takes, on paper."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.cli.console import console_of_page, print_json

if TYPE_CHECKING:
    from recollect.lm.planning.estimate import Estimate, Rank

__all__ = ["plan"]


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file of the run.")],
    devices: Annotated[int, typer.Option(help="Devices that there would be.")] = 1,
    memory: Annotated[str, typer.Option(help="Of each, such as 80GB or 80GiB.")] = "80GB",
    peak: Annotated[
        float, typer.Option(help="TFLOP/s that each states; 989 is an H100's dense bfloat16.")
    ] = 989.0,
    share: Annotated[float, typer.Option(help="Share of them that the run reaches.")] = 0.4,
    per_node: Annotated[int, typer.Option(help="Devices of a machine.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run takes before anything is rented: memory per device, time, the launch."""
    from recollect.lm.planning.estimate import config_of, estimate
    from recollect.lm.training.plan import load_plan
    from recollect.recipe.modules import import_modules

    size = _bytes(memory)
    for name, number in (("devices", devices), ("per-node", per_node)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    if not 0 < peak < math.inf:
        raise ValueError(f"--peak must be above 0 and finite, not {peak}")
    if not 0 < share <= 1:
        raise ValueError(f"--share must be above 0 and at most 1, not {share}")
    run = load_plan(config)
    import_modules(run.imports, beside=run.beside, said="import")
    found = estimate(
        run,
        config_of(run),
        devices=devices,
        memory=size,
        peak=peak * 1e12,
        share=share,
        file=str(config),
        per_node=per_node,
    )
    if as_json:
        print_json(found.to_dict())
        return
    _print(found)


_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _bytes(text: str) -> int:
    """Bytes, of a number with a unit."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--memory must be a size such as 80GB or 80GiB, not {text!r}")
    return int(float(found[1]) * {**_UNITS, **_BINARY}[found[2] or ""])


def _print(found: Estimate) -> None:
    from rich.table import Table

    from recollect.lm.planning.estimate import MARGIN
    from recollect.report.units import readable

    page = console_of_page()
    days, hours = divmod(found.seconds / 3600, 24)
    time = f"{days:.0f} days {hours:.0f} h" if days else f"{hours:.3g} h"
    facts = [
        ("parameters", f"{found.parameters:,}"),
        ("state", f"{readable(found.state, 'B')} of one row"),
        ("training", f"{readable(found.flops, 'FLOP')} per token"),
        (
            "time",
            f"{time}: {found.tokens:,} tokens on {found.devices:,} × {found.share:g} of "
            f"{readable(found.peak, 'FLOP/s')}",
        ),
        ("memory", f"{readable(found.memory, 'B')} each, of which {MARGIN:.0%} may be filled"),
    ]
    for name, text in facts:
        page.print(f"{name:<11} {text}", soft_wrap=True, highlight=False)
    table = Table(title=f"of each of {found.devices:,} devices", title_justify="left")
    names = list(dict.fromkeys(part for rank in found.ranks for part in rank.parts))
    for name in ("way", "rows", *names, "in all", "fits"):
        side = "left" if name in ("way", "fits") else "right"
        table.add_column(name, justify=side, no_wrap=name == "way")
    for rank in found.ranks:
        table.add_row(*_row(rank, names, found.memory))
    page.print(table)
    for rank in found.ranks:
        if rank.refused is not None:
            page.print(f"{rank.way}: {rank.refused}", soft_wrap=True, highlight=False)
    if found.smallest is None or found.launch is None:
        page.print(
            f"no mesh of up to {found.devices:,} devices that recollect train starts holds it: set "
            "checkpointing = true in [run], lower batch, or raise segments of [data] or --devices",
            soft_wrap=True,
            highlight=False,
        )
        return
    line, command = found.launch
    page.print(
        f"smallest    {found.smallest.way}: {readable(found.smallest.total, 'B')} each",
        soft_wrap=True,
        highlight=False,
    )
    said = f"  (with {line} in [run])" if line else ""
    page.print(f"launch      {command}{said}", soft_wrap=True, highlight=False)


def _row(rank: Rank, names: list[str], memory: int) -> list[str]:
    from recollect.report.units import readable

    if rank.refused is not None:
        return [str(rank.way), *("–" for _ in range(len(names) + 2)), "no"]
    sizes = (rank.parts.get(name) for name in names)
    shown = ("–" if size is None else readable(size, "B") for size in sizes)
    fits = "yes" if rank.fits(memory) else "no"
    return [str(rank.way), str(rank.rows), *shown, readable(rank.total, "B"), fits]
