"""Tables of what was measured, for the README and for pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recollect.report.html import Cell, Table

__all__ = ["ceiling_table", "decoding_table", "markdown", "speed_tables", "training_tables"]

Data = Mapping[str, Any]

_GROUPS = {
    "linear": "Linear memories, bfloat16",
    "deep": "Titans' memory, bfloat16 inputs",
    "titans-pytorch": "Titans between titans-pytorch's projections, float32, one head",
}


def markdown(table: Table) -> str:
    """A table as Markdown, with its title and caption.

    Args:
        table: cells may hold ``code``, and no line ends.
    """

    def row(cells: Sequence[Cell]) -> str:
        shown = ["–" if cell is None else str(cell).replace("|", "\\|") for cell in cells]
        return f"| {' | '.join(shown)} |"

    lines = [f"### {table.title}", ""] if table.title else []
    lines += [row(table.columns), "|" + " --- |" * len(table.columns), *map(row, table.rows)]
    return "\n".join([*lines, *(["", table.caption] if table.caption else [])])


def ceiling_table(bench: Data) -> Table:
    """What the device reached at best.

    Args:
        bench: of `recollect.benchmarks.gpu.speed.measure`.
    """
    found = bench["ceilings"]
    rows: list[list[Cell]] = [
        [f"product of {name}, {found['side']}³", f"{rate / 1e12:,.4g} TFLOP/s"]
        for name, rate in found["matmul"].items()
    ]
    rows.append(
        [f"copy of {found['copied'] / 1e9:,.3g} GB, read and written", _bytes(found["copy"])]
    )
    rows.append(["launch of a small operation, on the host", f"{1e6 * found['launch']:.3g} µs"])
    return Table(columns=["what", "measured"], rows=rows, title="Ceilings")


def _bytes(rate: float) -> str:
    return f"{rate / 1e12:,.3g} TB/s" if rate >= 1e12 else f"{rate / 1e9:,.3g} GB/s"


def speed_tables(bench: Data) -> Iterator[Table]:
    """A table per kind of memory and direction: cases by lengths.

    Args:
        bench: of `recollect.benchmarks.gpu.speed.measure`.
    """
    keys = dict.fromkeys((one["group"], one["way"]) for one in bench["speeds"])
    for group, way in sorted(keys, key=lambda key: (list(_GROUPS).index(key[0]), len(key[1]))):
        here = [one for one in bench["speeds"] if (one["group"], one["way"]) == (group, way)]
        lengths = sorted({one["T"] for one in here})
        found = {(one["name"], one["T"]): one for one in here}
        names = list(dict.fromkeys(one["name"] for one in here))
        rows: list[list[Cell]] = [
            [name, *(_timed(found.get((name, T))) for T in lengths)] for name in names
        ]
        rows += _against_peers(names, lengths, found)
        yield Table(
            columns=["ms, share of bfloat16's products", *(f"T = {T:,}" for T in lengths)],
            rows=rows,
            title=f"{_GROUPS[group]}, {way}",
            caption=f"{bench['sizes']['tokens']:,} tokens in all, in rows of T.",
        )


def _timed(one: Data | None) -> str | None:
    if one is None:
        return None
    share = "" if one["share"] is None else f" ({one['share']:.1%})"
    return f"{1e3 * one['median']:.4g}{share}"


_PEER = "flash-linear-attention"


def _against_peers(
    names: Sequence[str], lengths: Sequence[int], found: Mapping[tuple[str, int], Data]
) -> Iterator[list[Cell]]:
    """Rows of how many times as fast as the peer ours are."""
    pairs = [(name, f"{name}, {_PEER}") for name in names]
    pairs.append(("ours, b = 16", "titans-pytorch, b = 16"))
    for own, peer in pairs:
        if peer not in names:
            continue
        cells: list[Cell] = []
        for T in lengths:
            ours, theirs = found.get((own, T)), found.get((peer, T))
            both = ours is not None and theirs is not None
            cells.append(f"{theirs['median'] / ours['median']:.2f} ×" if both else None)  # pyright: ignore[reportOptionalSubscript]
        yield [f"**speed: {own} by {peer.rpartition(', ')[2] if _PEER in peer else peer}**", *cells]


def decoding_table(bench: Data) -> Table:
    """Decoding: seconds of a token, and which share of the copy's rate its bytes make.

    Args:
        bench: of `recollect.benchmarks.gpu.speed.measure`.
    """
    copy = bench["ceilings"]["copy"]
    rows: list[list[Cell]] = [
        [
            f"`{one['name']}`",
            one["rows"],
            "CUDA graph" if one["graphs"] else "step by step",
            f"{1e6 * one['seconds']:.4g}",
            f"{one['bytes'] / 1e6:.3g}",
            f"{one['bytes'] / one['seconds'] / copy:.1%}",
        ]
        for one in bench["decoded"]
    ]
    return Table(
        columns=["layer", "rows", "how", "µs a token", "MB", "of the copy's rate"],
        rows=rows,
        title="Decoding",
        caption=(
            f"A layer of {bench['sizes']['heads']} heads of {bench['sizes']['size']} channels in "
            f"bfloat16 after {bench['sizes']['prompt']:,} tokens. MB: what a token of all rows "
            "must move at the least, the state read, and written once per inner batch, and the "
            "parameters read."
        ),
    )


def training_tables(training: Data) -> Iterator[Table]:
    """What a run was, how it went, and the longest kernels of a step.

    Args:
        training: of `recollect.benchmarks.gpu.training.measure_training`.
    """
    model, history = training["model"], training["history"]
    if not history:
        return
    rows: list[list[Cell]] = [
        ["recipe", f"`{training['recipe']}`"],
        ["parameters", f"{model['parameters']:,}"],
        ["a step", f"{model['rows']:,} rows of {model['context']:,} tokens"],
        ["types", model["dtype"]],
    ]
    if "tokens_per_second" in training:
        peak = training["peak_bytes"]
        rows += [
            ["steps", f"{training['steps']:,} in {training['seconds']:,.0f} s"],
            ["tokens per second", f"{training['tokens_per_second']:,.0f}"],
            ["share of bfloat16's products", f"{training['ceiling_share']:.1%}"],
            ["peak memory", None if peak is None else f"{peak / 1e9:,.3g} GB"],
        ]
    first, last = history[0], history[-1]
    rows.append(
        [
            f"loss, step {first['step']} → {last['step']}",
            f"{first['loss']:.3f} → {last['loss']:.3f}",
        ]
    )
    yield Table(columns=["training", ""], rows=rows)
    if training.get("kernels"):
        yield Table(
            title="Where a step's time goes",
            columns=["kernel", "calls", "ms", "share"],
            rows=[
                [
                    f"`{one['name'][:70]}`",
                    one["count"],
                    f"{1e3 * one['seconds']:.3g}",
                    f"{one['share']:.1%}",
                ]
                for one in training["kernels"]
            ],
            caption="Forward and backward, by the profiler, without the optimizer.",
        )
