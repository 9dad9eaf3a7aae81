"""`recollect plan`: what a run takes, on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.cli.console import check_exists, console_of_page, print_json

if TYPE_CHECKING:
    from recollect.lm.planning.estimate import Estimate, Rank
    from recollect.lm.training.plan import TrainPlan
    from recollect.report.terminal import TerminalTable

__all__ = ["plan"]

_H100 = 989.0
"""TFLOP/s that an H100 states for dense bfloat16."""


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file of the run.")],
    devices: Annotated[int, typer.Option(help="Devices that there would be.")] = 1,
    memory: Annotated[str, typer.Option(help="Of each, such as 80GB or 80GiB.")] = "80GB",
    peak: Annotated[
        float, typer.Option(help="TFLOP/s that each states; 989 is an H100's dense bfloat16.")
    ] = _H100,
    share: Annotated[
        float | None,
        typer.Option(help="Share of them that the run reaches; 0.4 is assumed if omitted."),
    ] = None,
    per_node: Annotated[int, typer.Option(help="Devices of a machine.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate what a run takes before you rent devices: memory of each, time, the launch."""
    size = _bytes(memory)
    for name, number in (("devices", devices), ("per-node", per_node)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    if not 0 < peak < math.inf:
        raise ValueError(f"--peak must be above 0 and finite, not {peak}")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--share must be above 0 and at most 1, not {share}")
    check_exists(config)
    from recollect.lm.planning.estimate import SHARE, config_of, estimate
    from recollect.lm.training.plan import load_plan
    from recollect.plugins import import_modules

    run = load_plan(config)
    import_modules(run.imports, folder=run.beside, option="import")
    found = estimate(
        run,
        config_of(run),
        devices=devices,
        memory=size,
        peak=peak * 1e12,
        share=SHARE if share is None else share,
        file=str(config),
        per_node=per_node,
    )
    if as_json:
        print_json(found.to_dict())
        return
    _print(found, run)


_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _bytes(text: str) -> int:
    """Bytes, of a number with a unit; a bare number is too likely meant otherwise."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]i?)B?|B)\s*", text)
    if found is None or float(found[1]) == 0:
        bare = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*", text)
        such = f"{bare[1]}GB or {bare[1]}GiB" if bare and float(bare[1]) else "80GB or 80GiB"
        raise ValueError(f"--memory must be a size with its unit, such as {such}, not {text!r}")
    return int(float(found[1]) * {**_UNITS, **_BINARY}[found[2] or ""])


def _print(found: Estimate, run: TrainPlan) -> None:
    from recollect.lm.planning.estimate import MARGIN
    from recollect.report.units import readable

    page = console_of_page()

    def say(text: str) -> None:
        page.print(text, soft_wrap=True, highlight=False)

    several = f"{found.devices:,} devices" if found.devices > 1 else "one device"
    facts = [
        ("parameters", f"{found.parameters:,}"),
        ("state", f"{readable(found.state, 'B')} of one row"),
        ("training", f"{readable(found.flops, 'FLOP')} per token"),
        *zip(("time", "", "", ""), _duration(found, run, several), strict=False),
        (
            "memory",
            f"{readable(found.memory, 'B')} each (--memory), of which {MARGIN:.0%} may be filled",
        ),
    ]
    for name, text in facts:
        say(f"{name:<11} {text}")
    shared = [rank for rank in found.ranks if rank.refused is None]
    if shared:
        whose = f"each of {several}" if found.devices > 1 else several
        say(f"\n{whose}, at the fullest moment of a step")
        for table in _tables(shared, found.memory, page.width):
            table.print(page)
            say("")
        if any(rank.parts["gradients"] < rank.parts["parameters"] for rank in shared):
            say("gradients come as activations go: a step never holds all of both\n")
    else:
        say("")
    for rank in found.ranks:
        if rank.refused is not None:
            say(f"{rank.way}: {rank.refused}")
    if found.smallest is None or found.launch is None:
        whose = "one device does not hold it"
        if found.devices > 1:
            whose = f"no mesh of up to {several} that recollect train starts holds it"
        say(
            f"{whose}: set "
            "checkpointing = true in [run], lower batch, or raise segments of [data] or --devices"
        )
        return
    line, command = found.launch
    say(f"smallest    {found.smallest.way}: {readable(found.smallest.total, 'B')} each")
    assert found.largest is not None
    if found.largest != found.smallest:
        say(f"largest     {found.largest.way}: {readable(found.largest.total, 'B')} each")
    if found.largest.way.devices < found.devices:
        say(f"            no more of the {several} can share this run, and the others remain idle")
    setting = f"  (with {line} in [run])" if line else ""
    say(f"launch      {command}{setting}")


def _time(seconds: float) -> str:
    """A time in the unit that suits it."""
    days, hours = divmod(seconds / 3600, 24)
    if days:
        return f"{days:.0f} days {hours:.0f} h"
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{max(seconds, 0.1):.2g} s"


def _duration(estimated: Estimate, run: TrainPlan, devices: str) -> Iterator[str]:
    """Yield the time of the run with its assumptions, a line each."""
    from recollect.lm.planning.estimate import SHARE
    from recollect.report.units import readable

    if estimated.seconds is None:
        yield "no estimate, because [run] device is a CPU"
        return
    yield f"{_time(estimated.seconds)} for {estimated.tokens:,} tokens on {devices}, assuming that"
    an_h100 = estimated.peak == _H100 * 1e12
    whose = ", an H100's in dense bfloat16 (--peak for another device)" if an_h100 else " (--peak)"
    yield f"each states {readable(estimated.peak, 'FLOP/s')}{whose}"
    unconfirmed = ", an assumption that no run has confirmed" if estimated.share == SHARE else ""
    yield f"and reaches {estimated.share:.3g} of it (--share){unconfirmed}"
    if an_h100 and not run.run.bf16:
        yield "though this run multiplies in float32, which is slower: bf16 = true in [run]"


def _tables(ranks: list[Rank], memory: int, width: int) -> Iterator[TerminalTable]:
    """A row per part, a column per way; as many ways side by side as the page is wide."""
    from recollect.report.terminal import Column, TerminalTable

    names = list(dict.fromkeys(part for rank in ranks for part in rank.parts))
    labels = ["rows at once", *names, "in all", "fits"]

    def table(some: list[Rank]) -> TerminalTable:
        columns = [Column(name=str(rank.way).replace(" × ", " ×\n"), right=True) for rank in some]
        cells = [_cells(rank, names, memory) for rank in some]
        return TerminalTable(
            columns=[Column(name="bytes of"), *columns],
            rows=[list(row) for row in zip(labels, *cells, strict=True)],
        )

    while ranks:
        n = 1
        while n < len(ranks) and table(ranks[: n + 1]).width <= width:
            n += 1
        yield table(ranks[:n])
        ranks = ranks[n:]


def _cells(rank: Rank, names: list[str], memory: int) -> list[str]:
    from recollect.report.units import readable

    def shown(name: str) -> str:
        size = rank.parts.get(name)
        if name == "gradients" and not size:
            return "none yet"
        return "–" if size is None else readable(size, "B")

    fits = "yes" if rank.fits(memory) else "no"
    return [str(rank.rows), *map(shown, names), readable(rank.total, "B"), fits]
