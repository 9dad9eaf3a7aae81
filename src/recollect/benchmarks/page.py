"""Page of a benchmark, from its JSON: times next to the baseline's, or peaks of memory."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.benchmarks.results import BenchResult, format_duration
from recollect.report.environment import Environment
from recollect.report.formatting import format_si
from recollect.report.page import Report
from recollect.report.tables import Table

__all__ = ["save_bench_page"]


def save_bench_page(
    data: Mapping[str, Any], path: str | PathLike[str], *, command: str = ""
) -> Path:
    """Write the page of a suite's result, as `recollect bench --json` prints it."""
    facts = Environment(**data["environment"]).facts()
    if "shape" in data:
        facts["sizes"] = ", ".join(f"{name} {value}" for name, value in data["shape"].items())
    if "timings" in data:
        result = BenchResult.from_dict(data)
        facts["rounds"] = f"{result.rounds}, alternating; order drawn with seed {result.seed}"
        facts["ceilings"] = result.describe_ceilings()
        summary, section = _summarize_times(result), _times(result)
    else:
        summary, section = _summarize_peaks(data["peaks"]), _peaks(data["peaks"])
    sections = [section]
    if data["ratios"]:
        rows = [[name, float(f"{ratio:.4g}")] for name, ratio in data["ratios"].items()]
        sections.append(Table(title="Ratios", columns=["quotient", "ratio"], rows=rows))
    report = Report(
        kind="benchmark",
        title=f"Benchmark: {data['suite']}",
        command=command,
        summary=summary,
        facts=facts,
        sections=sections,
    )
    return report.save(path)


def _times(result: BenchResult) -> Table:
    caption = (
        f"Median and quartiles over rounds. The ratio is the time divided by that of "
        f"{result.baseline} in the same round: less than 1 is faster. Other work of the machine "
        "affects all cases alike."
    )
    if any(timing.share is not None for timing in result.timings):
        caption += (
            " Of ceiling: GFLOP/s of the case, divided by those of the faster of two matrix "
            "products in the same rounds. Only the operations of products are counted."
        )
    return result.to_table(title="Times", caption=caption)


def _peaks(peaks: Mapping[str, Mapping[str, Any]]) -> Table:
    return Table(
        title="Peaks",
        columns=["case", "live tensors", "grown resident memory", "planned", "seconds"],
        rows=[
            [
                name,
                *(
                    None if peak[kind] is None else format_si(peak[kind], "B")
                    for kind in ("live", "resident", "planned")
                ),
                None if peak["seconds"] is None else round(peak["seconds"], 1),
            ]
            for name, peak in peaks.items()
        ],
        caption="Each case runs in a separate process. Planned: the estimate of `recollect plan`.",
    )


def _summarize_times(result: BenchResult) -> str:
    """Return two sentences on the fastest and the slowest case."""
    timings = sorted(result.timings, key=lambda timing: timing.ratio)
    first, last, count = timings[0], timings[-1], len(timings)
    time, factor = format_duration(first.median), f"{last.ratio / first.ratio:.3g}"
    if count == 1:
        return f"{first.name} takes {time}. There is no other case to compare it with."
    if factor == "1":
        return f"All {count} take equal time, {first.name} {time}."
    if first.name == result.baseline:
        fastest = f"{first.name}, the baseline, is the fastest of {count} with {time}"
    else:
        fastest = f"{first.name} is the fastest of {count} with {time}, {first.ratio:.3g} of the "
        fastest += f"time of {result.baseline}"
    return f"{fastest}. {last.name} is the slowest and takes {factor} times as long."


def _summarize_peaks(peaks: Mapping[str, Mapping[str, Any]]) -> str:
    ordered = sorted(peaks.items(), key=lambda item: item[1]["live"])
    (lowest, low), (highest, high) = ordered[0], ordered[-1]
    low_bytes, high_bytes = (format_si(peak["live"], "B") for peak in (low, high))
    if low["live"] != high["live"]:
        text = (
            f"{lowest} needs the least memory, {low_bytes} of live tensors, and {highest} the "
            f"most, {high_bytes}."
        )
    elif len(peaks) == 1:
        text = f"{lowest} needs {low_bytes} of live tensors."
    else:
        text = f"All {len(peaks)} need {low_bytes} of live tensors."
    quotients = [
        peak["planned"] / peak["live"] for peak in peaks.values() if peak["planned"] is not None
    ]
    if len(peaks) == 1 or not quotients:
        return text
    return f"{text} Plans are {min(quotients):.2f} to {max(quotients):.2f} of the measured peaks."
