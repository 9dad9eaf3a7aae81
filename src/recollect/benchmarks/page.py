"""The report of a benchmark, from its JSON: times beside the baseline's, or peaks of memory."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.report.environment import Environment
from recollect.report.formatting import format_si
from recollect.report.page import Note, Report
from recollect.report.tables import CellValue, Table

__all__ = ["save_bench_page"]


def save_bench_page(
    data: Mapping[str, Any], path: str | PathLike[str], *, command: str = ""
) -> Path:
    """Write the page.

    Args:
        data: of a suite, as `recollect bench --json` prints it.
        path: of the page.
        command: the command line to print on it.

    Raises:
        OSError: it cannot be written.
    """
    timed = "timings" in data
    facts = Environment(**data["environment"]).facts()
    if "shape" in data:
        facts["sizes"] = ", ".join(f"{name} {value}" for name, value in data["shape"].items())
    if timed:
        facts["rounds"] = f"{data['rounds']}, alternating; order drawn with seed {data['seed']}"
        facts["ceilings in float32"] = ", ".join(
            f"{one['name']} {one['gflops']:,.0f} GFLOP/s" for one in data["ceilings"]
        )
    sections: list[Table | Note] = [_times(data) if timed else _peaks(data)]
    if data["ratios"]:
        rows = [[name, float(f"{ratio:.4g}")] for name, ratio in data["ratios"].items()]
        sections.append(Table(title="Ratios", columns=["what", "ratio"], rows=rows))
    report = Report(
        kind="benchmark",
        title=f"Benchmark: {data['suite']}",
        command=command,
        summary=_fastest(data) if timed else _least(data),
        facts=facts,
        sections=sections,
    )
    return report.save(path)


def _times(data: Mapping[str, Any]) -> Table:
    columns = ["case", "ms", "first quartile", "third quartile", "ratio", "GFLOP/s", "of ceiling"]
    columns.append("peak MB")
    rows: list[list[CellValue]] = [
        [
            one["name"],
            *(_ms(one[name]) for name in ("median", "lower", "upper")),
            f"{one['ratio']:.3g}",
            _rounded(one["gflops"]),
            None if one["share"] is None else f"{one['share']:.0%}",
            _rounded(None if one["peak_bytes"] is None else one["peak_bytes"] / 1e6),
        ]
        for one in data["timings"]
    ]
    caption = (
        f"Median over rounds; ratio is the time by that of {data['baseline']} in the same "
        "round, so that less than 1 is faster. What the machine did besides met all cases alike."
    )
    if any(one["share"] is not None for one in data["timings"]):
        caption += (
            " Of ceiling: the GFLOP/s of a case by those that a plain matrix product reached on "
            "this device in the same rounds (the higher of the ceilings below). What a case does "
            "besides products is not counted, and takes its time."
        )
    here = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    return Table(
        title="Times",
        columns=[columns[i] for i in here],
        rows=[[row[i] for i in here] for row in rows],
        caption=caption,
    )


def _peaks(data: Mapping[str, Any]) -> Table:
    return Table(
        title="Peaks",
        columns=["case", "live tensors", "grown resident memory", "planned", "seconds"],
        rows=[
            [
                name,
                *(
                    None if one[kind] is None else format_si(one[kind], "B")
                    for kind in ("live", "resident", "planned")
                ),
                None if one["seconds"] is None else round(one["seconds"], 1),
            ]
            for name, one in data["peaks"].items()
        ],
        caption="Each case runs in a process of its own; planned is what `recollect plan` says.",
    )


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _fastest(data: Mapping[str, Any]) -> str:
    """Two sentences: which case is the fastest, and how the slowest stands to it."""
    timings = sorted(data["timings"], key=lambda one: one["ratio"])
    first, last = timings[0], timings[-1]
    time = f"{_ms(first['median']):g} ms"
    if len(timings) == 1:
        return f"{first['name']} takes {time}. There is nothing beside it to compare it with."
    leads = f"{first['name']} is the fastest of {len(timings)} with {time}"
    if first["name"] == data["baseline"]:
        leads = f"{first['name']}, the baseline, is the fastest of {len(timings)} with {time}"
    else:
        leads += f", {first['ratio']:.3g} of the time of {data['baseline']}"
    times = f"{last['ratio'] / first['ratio']:.3g}"
    if times == "1":
        return f"All {len(timings)} take the same time, {first['name']} {time}."
    return f"{leads}. {last['name']} is the slowest and takes {times} times as long."


def _least(data: Mapping[str, Any]) -> str:
    peaks = sorted(data["peaks"].items(), key=lambda item: item[1]["live"])
    (least, low), (most, high) = peaks[0], peaks[-1]
    if least == most:
        return f"{least} needs {format_si(low['live'], 'B')} of live tensors."
    said = f"All {len(peaks)} need {format_si(low['live'], 'B')} of live tensors."
    if low["live"] != high["live"]:
        said = (
            f"{least} needs the least memory, {format_si(low['live'], 'B')} of live tensors, and "
            f"{most} the most, {format_si(high['live'], 'B')}."
        )
    shares = [x["planned"] / x["live"] for _, x in peaks if x["planned"] is not None]
    if not shares:
        return said
    return (
        f"{said} A plan on paper is between {min(shares):.2f} and {max(shares):.2f} of what is "
        "measured."
    )
