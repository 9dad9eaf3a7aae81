"""`recollect plan`: memory, time and launch of a run, estimated before it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.cli.console import make_console, print_json, print_line
from recollect.cli.options import ConfigArgument, JsonOption, load_config, positive

if TYPE_CHECKING:
    from recollect.lm.memory_estimate.estimate import Estimate, RankMemory
    from recollect.lm.training.plan import TrainPlan
    from recollect.report.tables import Table

__all__ = ["plan"]

_H100 = 989.0
"""TFLOP/s of an H100 in dense bfloat16, by its data sheet."""


def plan(
    config: ConfigArgument,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 1,
    memory: Annotated[str, typer.Option(help="Memory per device, such as 80GB or 80GiB.")] = "80GB",
    peak: Annotated[
        float,
        typer.Option(
            callback=positive(1e9),
            help="Peak of a device in TFLOP/s; 989 is that of an H100 in dense bfloat16.",
        ),
    ] = _H100,
    share: Annotated[
        float | None,
        typer.Option(
            callback=positive(1), help="Fraction of the peak that the run reaches. [default: 0.4]"
        ),
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="Number of devices per node.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory per device, the time and the launch of a run before you rent devices."""
    size = _parse_bytes(memory)
    run = load_config(config)
    from recollect.lm.memory_estimate.estimate import DEFAULT_MFU, build_config, estimate

    result = estimate(
        run,
        build_config(run),
        devices=devices,
        memory=size,
        peak_flops=peak * 1e12,
        mfu=DEFAULT_MFU if share is None else share,
        file=str(config),
        per_node=per_node,
    )
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result, run)


def _parse_bytes(text: str) -> int:
    """Return the bytes of a size with a unit; a number alone is refused as ambiguous."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)\s*", text)
    if size is not None and float(size[1]) > 0:
        base = 1024 if "i" in size[2] else 1000
        return int(float(size[1]) * base ** "BKMGT".index(size[2][0]))
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*", text)
    example = number[1] if number and float(number[1]) else "80"
    raise ValueError(
        f"--memory must be a size with its unit, such as {example}GB or {example}GiB, not {text!r}"
    )


def _print(result: Estimate, run: TrainPlan) -> None:
    """Print the numbers of the run, a table of the meshes, and the launch."""
    from recollect.lm.memory_estimate.estimate import USABLE_FRACTION
    from recollect.report.formatting import format_si

    console = make_console()

    def line(text: str) -> None:
        print_line(console, text)

    devices = f"{result.devices:,} devices" if result.devices > 1 else "one device"
    line(f"parameters  {result.parameters:,}")
    line(f"state       {format_si(result.state, 'B')} of one row")
    line(f"training    {format_si(result.flops, 'FLOP')} per token")
    for index, text in enumerate(_duration(result, run, devices)):
        line(f"{'' if index else 'time':<11} {text}")
    line(
        f"memory      {format_si(result.memory, 'B')} each (--memory), "
        f"of which {USABLE_FRACTION:.0%} may be filled\n"
    )
    possible = [rank for rank in result.ranks if rank.error is None]
    if possible:
        each = f"each of {devices}" if result.devices > 1 else devices
        line(f"{each}, at the fullest moment of a step")
        for table in _tables(possible, result.memory, console.width):
            table.print(console)
            line("")
        if any(rank.parts["gradients"] < rank.parts["parameters"] for rank in possible):
            line("gradients come as activations go: a step never holds all of both\n")
    for rank in result.ranks:
        if rank.error is not None:
            line(f"{_label(rank)}: {rank.error}")
    if result.smallest is None or result.largest is None or result.launch is None:
        reason = "one device does not hold it"
        if result.devices > 1:
            reason = f"no mesh of up to {devices} that recollect train starts holds it"
        line(
            f"{reason}: set "
            "checkpointing = true in [run], lower batch, or raise segments of [data] or --devices"
        )
        return
    line(f"smallest    {_label(result.smallest)}: {format_si(result.smallest.total, 'B')} each")
    if result.largest != result.smallest:
        line(f"largest     {_label(result.largest)}: {format_si(result.largest.total, 'B')} each")
    if result.largest.dims.world_size < result.devices:
        line(f"            no more of the {devices} can share this run, and the others remain idle")
    setting, command = result.launch
    line(f"launch      {command}" + (f"  (with {setting} in [run])" if setting else ""))


def _format_time(seconds: float) -> str:
    """Return a time in days, hours, minutes or seconds."""
    days, hours = divmod(seconds / 3600, 24)
    if days:
        return f"{days:.0f} days {hours:.0f} h"
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{max(seconds, 0.1):.2g} s"


def _duration(result: Estimate, run: TrainPlan, devices: str) -> Iterator[str]:
    """Yield the time of the run with its assumptions, a line each."""
    from recollect.lm.memory_estimate.estimate import DEFAULT_MFU
    from recollect.report.formatting import format_si

    if result.seconds is None:
        yield "no estimate, because [run] device is a CPU"
        return
    yield f"{_format_time(result.seconds)} for {result.tokens:,} tokens on {devices}, assuming that"
    is_h100 = result.peak_flops == _H100 * 1e12
    source = ", an H100's in dense bfloat16 (--peak for another device)" if is_h100 else " (--peak)"
    yield f"each states {format_si(result.peak_flops, 'FLOP/s')}{source}"
    unconfirmed = ", an assumption that no run has confirmed" if result.mfu == DEFAULT_MFU else ""
    yield f"and reaches {result.mfu:.3g} of it (--share){unconfirmed}"
    if is_h100 and not run.run.bf16:
        yield "though this run multiplies in float32, which is slower: bf16 = true in [run]"


def _tables(ranks: list[RankMemory], memory: int, width: int) -> Iterator[Table]:
    """Yield tables with a row per part and a column per mesh, as many meshes as fit the width."""
    from recollect.report.tables import Column, Table

    parts = list(dict.fromkeys(part for rank in ranks for part in rank.parts))
    labels = ["rows at once", *parts, "in all", "fits"]

    def table(ranks: list[RankMemory]) -> Table:
        meshes = [_label(rank).replace(" × ", " ×\n") for rank in ranks]
        cells = [_cells(rank, parts, memory) for rank in ranks]
        return Table(
            columns=[Column(name="bytes of"), *(Column(name=x, align="right") for x in meshes)],
            rows=[list(row) for row in zip(labels, *cells, strict=True)],
        )

    while ranks:
        n = 1
        while n < len(ranks) and table(ranks[: n + 1]).width <= width:
            n += 1
        yield table(ranks[:n])
        ranks = ranks[n:]


def _label(rank: RankMemory) -> str:
    return rank.dims.degrees or "one device"


def _cells(rank: RankMemory, parts: list[str], memory: int) -> list[str]:
    from recollect.report.formatting import format_si

    def size(part: str) -> str:
        count = rank.parts.get(part)
        if part == "gradients" and not count:
            return "none yet"
        return "–" if count is None else format_si(count, "B")

    fits = "yes" if rank.fits_in(memory) else "no"
    return [str(rank.rows), *map(size, parts), format_si(rank.total, "B"), fits]
