"""The README of the results: a page for people, made of what the stages have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recollect.benchmarks.gpu.tables import (
    ceiling_table,
    decoding_table,
    markdown,
    speed_tables,
    training_tables,
)
from recollect.report.html import Cell, Table

__all__ = ["not_run", "readme"]

Record = Mapping[str, Any]
Stages = Sequence[tuple[str, str]]
"""Name of a stage, and what it asks."""

_WORDS = {"passed": "passed", "failed": "**failed**", "not run": "not run"}


def readme(stages: Stages, records: Mapping[str, Record]) -> str:
    """The page.

    Args:
        stages: all that there are, in order.
        records: of those of which something is known, by name.
    """
    lines = ["# The day on a GPU", "", _where(records), "", *_overview(stages, records)]
    for name, about in stages:
        record = records.get(name)
        if record is None or record["outcome"] == "not run":
            continue
        lines += ["", f"## {name}: {about}", "", f"{record['sentence']}."]
        if record["found"] is not None:
            lines += _PARTS[name](record["found"])
        if record.get("tail"):
            end = "\n".join(record["tail"].splitlines()[-15:])
            lines += ["", "It ended with", "", "```text", end, "```"]
    return "\n".join([*lines, "", "## Not run", "", not_run(stages, records), ""])


def not_run(stages: Stages, records: Mapping[str, Record]) -> str:
    """What nobody may take for measured, in sentences.

    Args:
        stages: all that there are, in order.
        records: of those of which something is known, by name.
    """
    said: list[str] = []
    names = [
        name
        for name, one in records.items()
        if one["environment"]["device_type"] != "cuda" and one["outcome"] != "not run"
    ]
    if names:
        said.append(
            f"Nothing of {', '.join(names)} ran on a GPU: what stands here of them is of the CPU, "
            "at tiny sizes, and shows that the script runs, nothing else."
        )
    for name, about in stages:
        record = records.get(name)
        if record is None:
            said.append(f"Not run: {name} ({about}): it was not asked for.")
        elif record["outcome"] == "not run":
            said.append(f"Not run: {name} ({about}): {record['sentence']}.")
        else:
            said += _omitted(name, record)
    return " ".join(said) or "Everything was run."


def _omitted(name: str, record: Record) -> Iterator[str]:
    """What a stage that ran has left out."""
    found = record["found"]
    if found is None:
        yield f"Nothing came of {name}: {record['sentence']}."
        return
    skipped = [one["name"] for one in found.get("tests", ()) if one["outcome"] == "skipped"]
    if skipped:
        yield f"Not run of {name}: {len(skipped)} tests, {_some(skipped)}."
    if found.get("left_out"):
        yield f"Not timed: {_some(list(found['left_out']))}."
    if found.get("finished") is False:
        yield f"{name} did not come to its end."
    short = [one for one in found.get("checks", ()) if one["outcome"] in ("did not run", _LONG)]
    if short:
        yield f"Not run of {name}: {', '.join(one['check'] for one in short)}."


_LONG = "took too long"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return "; ".join(names[:4]) + more


def _where(records: Mapping[str, Record]) -> str:
    """Devices, versions and dates of what is there."""
    said: dict[str, list[str]] = {}
    for name, record in records.items():
        here = record["environment"]
        key = (
            f"{here['device']}, torch {here['torch']}, Python {here['python']}, commit "
            f"{here['commit']}, {here['date'][:10]}"
        )
        said.setdefault(key, []).append(name)
    lines = [f"{where}: {', '.join(names)}." for where, names in said.items()]
    written = "Written by `make gpu` from the files beside it, not by hand."
    return "\n".join([written, *lines])


def _overview(stages: Stages, records: Mapping[str, Record]) -> Iterator[str]:
    rows: list[list[Cell]] = []
    for name, about in stages:
        record = records.get(name)
        if record is None:
            rows.append([name, about, "not run", "it was not asked for", None])
            continue
        seconds = f"{record['seconds']:.0f}" if record["seconds"] else None
        rows.append([name, about, _WORDS[record["outcome"]], record["sentence"], seconds])
    yield markdown(Table(columns=["stage", "what it asks", "outcome", "", "s"], rows=rows))


# -- stages ----------------------------------------------------------------------------------------

_ENDLESS = ("Infinity", "-Infinity", "NaN")


def _tests(found: Record) -> list[str]:
    """The worst numbers, and every test that failed."""
    lines: list[str] = []
    numbers: dict[str, tuple[float, str]] = {}
    for case in found["tests"]:
        precision = case["name"].removesuffix("]").rpartition("-")[2]
        kind = f", {precision}" if precision in ("float32", "tf32", "bf16") else ""
        for what, told in case["found"].items():
            value = float(told) if told in _ENDLESS else told
            if isinstance(value, int | float):
                key = what + kind
                if key not in numbers or not value <= numbers[key][0]:
                    numbers[key] = (value, case["name"])
    if numbers:
        rows: list[list[Cell]] = [
            [what, f"{value:.1e}", f"`{name}`"] for what, (value, name) in numbers.items()
        ]
        lines += ["", markdown(Table(columns=["distance, relative", "worst", "of"], rows=rows))]
    failed = [one for one in found["tests"] if one["outcome"] == "failed"]
    if failed:
        rows = [[f"`{one['name']}`", " ".join(one["why"].split())[:400]] for one in failed]
        lines += ["", markdown(Table(columns=["failed", "why"], rows=rows))]
    return lines


def _checks(found: Record) -> list[str]:
    if not found["checks"]:
        return []
    rows: list[list[Cell]] = [
        [one["check"], one["outcome"], one["summary"] or None, f"{one['seconds']:.0f}"]
        for one in found["checks"]
    ]
    return ["", markdown(Table(columns=["check", "outcome", "it says", "s"], rows=rows))]


def _bench(found: Record) -> list[str]:
    versions = [
        f"{name} {version}" if version else f"no {name}"
        for name, version in found["packages"].items()
    ]
    lines = ["", f"Beside it: {', '.join(versions)}.{_tiny(found)}"]
    for table in (ceiling_table(found), *speed_tables(found), decoding_table(found)):
        lines += ["", markdown(table)]
    if found["agreement"]:
        rows: list[list[Cell]] = [[f"`{x}`", f"{y:.1e}"] for x, y in found["agreement"].items()]
        columns = ["outputs by the operator, as it was tuned", "from PyTorch alone, relative"]
        lines += ["", markdown(Table(columns=columns, rows=rows))]
    if found["left_out"]:
        rows = [[what, " ".join(why.split())[:300]] for what, why in found["left_out"].items()]
        lines += ["", markdown(Table(columns=["not timed", "why"], rows=rows))]
    return lines


def _training(found: Record) -> list[str]:
    lines = ["", f"The text is the package's own source, a token a byte.{_tiny(found)}"]
    for table in training_tables(found):
        lines += ["", markdown(table)]
    return lines


def _tiny(found: Record) -> str:
    where = found["environment"]["device"]
    said = f" **Sizes are tiny, and times those of {where}: they say nothing about speed.**"
    return said if found["tiny"] else ""


def _kernels(found: Record) -> list[str]:
    rows: list[list[Cell]] = [
        [one["name"], f"{one['seconds']:.0f}", one["why"] and " ".join(one["why"].split())]
        for one in found["compiled"]
    ]
    return ["", markdown(Table(columns=["recurrence", "s, at the latest", "failed"], rows=rows))]


_PARTS = {
    "kernels": _kernels,
    "parity": _tests,
    "backend": _tests,
    "fused": _tests,
    "sanitizer": _checks,
    "bench": _bench,
    "training": _training,
}
