"""Tables of the files that `gpu_run.py` writes, as Markdown.

A file holds the lines of one card, run after run. A run begins with the line that lists its
versions. If several runs measured the same thing, the tables contain the last measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["markdown", "read_lines", "strip_folders", "summary"]

Line = Mapping[str, Any]

IMPLEMENTATIONS = {
    "": "PyTorch's `scaled_dot_product_attention`",
    "auto": '`engine="auto"`',
    "fla": '`engine="fla"`',
    "torch": '`engine="torch"`',
    "operator": "flash-linear-attention's operator alone",
    "channels": "flash-linear-attention's operator with a decay per channel",
}
PRECISIONS = ("float32", "tf32")  # files have lines of one that was removed since
PASSES = {False: "forward", True: "forward + backward"}
# torch prints it once in a process, when `torch.cuda.set_sync_debug_mode` is first called.
NOTICE = re.compile(r"__init__\.py:\d+")


def strip_folders(text: str) -> str:
    """Return a text without the folders of its absolute paths."""
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/(?=[\w.+@-])", "", text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, each with the commit of its run."""
    lines: list[dict[str, Any]] = []
    commit = None
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        commit = line["commit"] if line["what"] == "versions" else commit
        lines.append({**line, "commit": commit or "unknown"})
    return lines


def markdown(paths: Iterable[Path]) -> str:
    """Return the sections of all files, one for each card."""
    return "\n\n".join(_section(path) for path in paths) + "\n"


def summary(path: Path) -> str:
    """Return the tables of a file, and each line that reports a failure."""
    failures = [
        f"{line['step']}: {json.dumps({k: v for k, v in line.items() if k not in ('step', 't')})}"
        for line in read_lines(path)
        if line["what"] in ("failed", "cut short", "not run", "check")
    ]
    return "\n".join([markdown([path]), *(text[:600] for text in failures)])


def _section(path: Path) -> str:
    lines = read_lines(path)
    parts = [
        _device(lines, path.name),
        _ceilings(lines),
        _presets(lines),
        _backend(lines),
        _recurrence(lines),
        _adoption(lines),
        _linear(lines),
        _deep(lines),
        _peers(lines),
        _decoding(lines),
        _attention(lines),
        _training(lines),
        _compiled(lines),
        _missing(lines),
    ]
    return "\n\n".join(part for part in parts if part)


# -- parts of a section --------------------------------------------------------------------------


def _device(lines: Sequence[Line], file: str) -> str:
    runs = _select(lines, "device", "versions")
    if not runs:
        return f"### Unknown device\n\nThe run ended before `{file}` contained its versions."
    versions = runs[-1]
    packages = versions["packages"]
    names = ("torch", "triton", "flash-linear-attention", "transformers")
    software = ", ".join(f"{name} {packages[name] or 'missing'}" for name in names)
    cards = _select(lines, "device", "device")
    if not cards:
        title, hardware = "CPU, tiny sizes", "no GPU"
    else:
        card = cards[-1]
        title = card["name"]
        capability = ".".join(str(number) for number in card["capability"])
        hardware = f"{card['memory_gib']} GiB, compute capability {capability}"
    return (
        f"### {title}\n\n{hardware}; Python {versions['python']}, CUDA {versions['cuda']}, "
        f"{software}. Lines: `results/gpu/{file}`."
    )


def _ceilings(lines: Sequence[Line]) -> str:
    rows = []
    for line in _last(_select(lines, "device", "ceilings"), ()):
        side = line["side"]
        rows = [
            [f"product of {name}, {side}³", f"{rate / 1e12:.1f} TFLOP/s", _commit(line)]
            for name, rate in line["matmul"].items()
        ]
        rows.append(["copy, read and written", f"{line['copy'] / 1e12:.2f} TB/s", _commit(line)])
        rows.append(["one small operation", f"{1e6 * line['launch']:.1f} µs", _commit(line)])
    return _table("Device", ["measurement", "value", "commit"], rows)


def _presets(lines: Sequence[Line]) -> str:
    current = [x for x in _select(lines, "presets", "preset") if x["precision"] in PRECISIONS]
    results = _last(current, ("name", "precision"))
    rows = []
    for precision in dict.fromkeys(line["precision"] for line in results):
        group = [line for line in results if line["precision"] == precision]
        rows.append(
            [
                f"`{precision}`",
                f"{sum(line['good'] for line in group)} of {len(group)}",
                *(_worst(group, key) for key in ("y", "gradient", "decoded")),
                _commit(group[-1]),
            ]
        )
    columns = ["precision", "presets within the bounds"]
    columns += ["largest errors of outputs", "of all gradients together", "of decoded tokens"]
    text = _table(
        "Presets against the CPU in float64 (relative errors)", [*columns, "commit"], rows
    )
    waits = {
        line["name"]: sorted(part for part, sites in line["waits"].items() if _waits(sites))
        for line in results
        if any(_waits(sites) for sites in line["waits"].values())
    }
    if waits:
        names = "; ".join(f"`{name}` ({', '.join(parts)})" for name, parts in waits.items())
        text += f"\n\nThe host waits for the device in {names}, and in no other preset."
    return text


def _waits(sites: Iterable[str]) -> list[str]:
    return [site for site in sites if not NOTICE.fullmatch(site)]


def _worst(group: Iterable[Line], key: str) -> str:
    largest = sorted(((line.get(key, 0.0), line["name"]) for line in group), reverse=True)[:2]
    return ", ".join(f"{error:.1e} `{name}`" for error, name in largest)


def _backend(lines: Sequence[Line]) -> str:
    results = _last(_select(lines, "backend", "equal"), ("name", "method", "D", "backward"))
    rows = [
        [
            f"`{line['name']}`",
            IMPLEMENTATIONS[line["method"]],
            line["D"],
            "gradients" if line["backward"] else "outputs",
            f"{max(line['far']):.1e}",
            _commit(line),
        ]
        for line in results
    ]
    title = "flash-linear-attention in bfloat16 against PyTorch in float32 (relative errors)"
    columns = ["recurrence", "implementation", "channels", "compared", "largest error", "commit"]
    return _table(title, columns, rows)


def _recurrence(lines: Sequence[Line]) -> str:
    rows = [
        [
            f"`{line['name']}`" if " " not in line["name"] else line["name"],
            line["T"],
            f"`{line['precision']}`",
            f"{line['worst']:.1e}",
            f"{line['torch_worst']:.1e}",
            "equal" if line["alike"] else "not equal",
            _commit(line),
        ]
        for line in _last(_select(lines, "recurrence", "equal"), ("name", "T", "precision"))
        if line["precision"] in PRECISIONS
    ]
    title = "Triton's recurrence of deep memories against PyTorch in float64 (relative errors)"
    columns = ["memory", "T", "precision", "largest error of outputs, states and gradients"]
    return _table(title, [*columns, "PyTorch's path", "two runs", "commit"], rows)


def _adoption(lines: Sequence[Line]) -> str:
    rows = [
        [
            f"`{line['name'].removesuffix('ForCausalLM')}`",
            line["checks"],
            f"{line['worst']:.1e}",
            line["check"],
            _commit(line),
        ]
        for line in _last(_select(lines, "adoption", "equal"), ("name",))
    ]
    title = "Adopted models against the originals, in float32 (relative errors of logits)"
    columns = ["class of transformers", "checks passed", "largest error", "in the check", "commit"]
    return _table(title, columns, rows)


def _linear(lines: Sequence[Line]) -> str:
    keys = ("T", "B", "H", "D", "name", "method", "operator")
    columns = ["T", "B", "preset", "implementation", *PASSES.values(), "peak MiB", "commit"]
    speeds = _select(lines, "linear", "speed")
    title = f"Linear memories in bfloat16{_heads(speeds)} (ms)"
    return _table(title, columns, _both_passes(speeds, keys, _names))


def _names(line: Line) -> list[Any]:
    name = "" if line["name"] == "SDPA" else f"`{line['name']}`"
    operator = line.get("operator")
    method = f"`{operator}` alone" if operator else IMPLEMENTATIONS[line["method"]]
    return [line["T"], line["B"], name, method]


def _both_passes(
    lines: Sequence[Line], keys: Sequence[str], first: Callable[[Line], list[Any]]
) -> list[list[Any]]:
    """Return a row for each case, with its forward time and its time with the backward pass."""
    cases: dict[tuple[Any, ...], dict[bool, Line]] = {}
    for line in lines:
        cases.setdefault(tuple(line.get(key) for key in keys), {})[line["backward"]] = line
    rows = []
    for case in cases.values():
        times = [f"{case[b]['ms']:.2f}" if b in case else "" for b in PASSES]
        line = case[max(case)]
        rows.append([*first(line), *times, _rounded(line["peak_mib"]), _commit(line)])
    return rows


def _deep(lines: Sequence[Line]) -> str:
    keys = ("name", "method", "precision", "B", "T", "H", "D", "backward")
    # Files have lines of engines that were removed since.
    deep = [x for x in lines if x["what"] == "deep" and x["method"] in IMPLEMENTATIONS]
    results = _last(deep, keys)
    rows = [
        [
            f"`{line['name']}`" if " " not in line["name"] else line["name"],
            IMPLEMENTATIONS[line["method"]],
            f"`{line['precision'] or 'float32'}`",
            line["B"],
            PASSES[line["backward"]],
            f"{line['ms']:.1f}",
            f"{line['graph_ms']:.1f}" if "graph_ms" in line else "",
            line.get("launches", ""),
            f"{line['tflops']:.2f}",
            _rounded(line["peak_mib"]),
            _commit(line),
        ]
        for line in results
    ]
    title = f"Deep memories{_heads(results)}, T = {results[-1]['T']:,}" if results else ""
    columns = ["memory", "implementation", "precision", "B", "passes", "ms", "ms as one CUDA graph"]
    return _table(title, [*columns, "launches", "TFLOP/s", "peak MiB", "commit"], rows)


def _peers(lines: Sequence[Line]) -> str:
    keys = ("name", "B", "T", "H", "D")
    columns = ["module", "B", "T", *PASSES.values(), "peak MiB", "commit"]
    rows = _both_passes(
        _select(lines, "deep", "peer"), keys, lambda line: [line["name"], line["B"], line["T"]]
    )
    return _table("titans-pytorch, one head of 64 channels (ms)", columns, rows)


def _decoding(lines: Sequence[Line]) -> str:
    modes = ("eager", "graphs", "compiled")
    cases: dict[tuple[str, int], dict[str, Line]] = {}
    for line in _select(lines, "decoding", "token"):
        cases.setdefault((line["name"], line["B"]), {})[line["way"]] = line
    rows = [
        [
            f"`{name}`",
            batch,
            *(f"{case[mode]['us']:.1f}" if mode in case else "" for mode in modes),
            _commit(list(case.values())[-1]),
        ]
        for (name, batch), case in cases.items()
    ]
    columns = ["preset", "B", "eager", "`rc.StaticDecoder`", "`rc.StaticDecoder(compile=True)`"]
    title = "Decoding, one layer in bfloat16 (µs per token)"
    return _table(title, [*columns, "commit"], rows)


def _training(lines: Sequence[Line]) -> str:
    keys = ("name", "method", "compiled")
    results = _last(_select(lines, "training", "training"), keys)
    rows = [
        [
            f"`{line['name']}`",
            IMPLEMENTATIONS[line["method"]],
            "compiled" if line["compiled"] else "eager",
            f"{line['parameters'] / 1e6:.0f}M",
            f"{line['rows']} × {line['context']:,}",
            f"{line['ms']:.0f}",
            f"{line['tokens_per_second']:,}",
            f"{line['tflops']:.1f}",
            _rounded(line["peak_mib"]),
            _commit(line),
        ]
        for line in results
    ]
    columns = [
        "preset",
        "implementation",
        "blocks",
        "parameters",
        "batch",
        "ms per step",
        "tokens/s",
    ]
    title = "Training in bfloat16"
    return _table(title, [*columns, "TFLOP/s", "peak MiB", "commit"], rows)


def _attention(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["backends"],
            f"{min(line['us'][1:]):,.0f} to {max(line['us'][1:]):,.0f}",
            _commit(line),
        ]
        for line in _last(_select(lines, "attention", "new lengths"), ("backends",))
    ]
    title = "`scaled_dot_product_attention` of one query, at a number of keys that is new (µs)"
    return _table(title, ["kernel", "each call after the first", "commit"], rows)


def _compiled(lines: Sequence[Line]) -> str:
    names = {
        "eager": "eager",
        "operator": "blocks compiled, the memory as one operator",
        "break": "blocks compiled, a graph break at the memory",
    }
    rows = [
        [
            f"`{line['name']}`",
            names[line["mode"]],
            f"{line['rows']} × {line['context']:,}",
            f"{line['ms']:.1f}",
            f"{line['tokens_per_second']:,}",
            _rounded(line["peak_mib"]),
            _commit(line),
        ]
        for line in _last(_select(lines, "compiled", "step"), ("name", "mode"))
    ]
    columns = ["preset", "mode", "batch", "ms", "tokens/s", "peak MiB", "commit"]
    return _table("Four layers of the 170M model, forward + backward in bfloat16", columns, rows)


def _missing(lines: Sequence[Line]) -> str:
    """List the cases without a result, by the last run of each step."""
    runs = {line["step"]: line["commit"] for line in lines}
    counts: dict[str, dict[str, int]] = {}
    for line in lines:
        reason = line["what"]
        if reason in ("left out", "cut short", "failed") and line["commit"] == runs[line["step"]]:
            step = counts.setdefault(line["step"], {})
            step[reason] = step.get(reason, 0) + 1
    rows = [
        [f"`{step}`", *(reasons.get(one, "") for one in ("left out", "cut short", "failed"))]
        for step, reasons in counts.items()
        if not step.startswith("warm ")
    ]
    columns = ["step", "cases left out", "processes ended by their time limit", "cases failed"]
    return _table("Not measured", columns, rows)


# -- lines and cells -----------------------------------------------------------------------------


def _select(lines: Iterable[Line], step: str, what: str) -> list[Line]:
    return [line for line in lines if (line["step"], line["what"]) == (step, what)]


def _last(lines: Iterable[Line], keys: Sequence[str]) -> list[Line]:
    """Return the last line of each case, in the order of the first lines."""
    return list({tuple(line[key] for key in keys): line for line in lines}.values())


def _commit(line: Line) -> str:
    commit = line["commit"]
    return commit[:8] + ("-dirty" if commit.endswith("-dirty") else "")


def _heads(lines: Sequence[Line]) -> str:
    return f", {lines[-1]['H']} heads of {lines[-1]['D']} channels" if lines else ""


def _rounded(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    cells = [list(columns), ["---"] * len(columns), *rows]
    text = "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells)
    return f"**{title}**\n\n{text}"
