"""Stored comparisons: one that is loaded again, and a table with one file per model.

A table is extended model by model, so that an hour of training is not repeated because another run
failed. All its rows have equal training conditions, except for `ROW_FIELDS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.blocks.compositions import read_mixer
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.experiments.comparison.compare import (
    SHARED_OPTIONS,
    ModelSpec,
    compare,
    resolve_model,
    resolve_models,
)
from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.results import ModelRun, NoProgress, ProgressReporter, Sizes
from recollect.experiments.comparison.tasks import EVAL_SIZES, read_corpus
from recollect.experiments.comparison.training import training_environment
from recollect.layer.options import LayerOptions
from recollect.messages import argument_name
from recollect.report.devices import resolve_device
from recollect.report.files import (
    MAX_FILE_BYTES,
    check_regular,
    read_regular,
    save_to_temp_on_error,
    write_atomic,
)
from recollect.report.lock import folder_lock
from recollect.report.signals import defer_signals
from recollect.report.tables import Table
from recollect.serialization import read_json
from recollect.tasks.text import TextCorpus, bigram_bits_per_byte, load_text
from recollect.zoo.preset import names, variants

__all__ = ["extend_table", "load_comparison", "write_rows_table"]

SCHEMA = 2
ROW_FIELDS = ("heads", "key_dim")
"""Conditions in which rows of one table may differ. The features of a polynomial kernel of degree 2
are 2,145 for a key of 64 channels, and 153 for one of 16."""


def load_comparison(folder: str | PathLike[str]) -> Comparison:
    """Return the comparison that `Comparison.save` stored.

    Args:
        folder: Folder of the comparison, or its ``results.json``. Only data is read.

    Returns:
        The comparison. Its `save` writes an equal report.

    Raises:
        ValueError: the file is no comparison, or one of another version.
        OSError: there is no regular file.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=9,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, lr=1e-3),
        ... )
        >>> comparison = rc.compare(["linear_attention"], ["mqar"], sizes=sizes)
        >>> paths = comparison.save("runs/mine")
        >>> rc.experiments.load_comparison("runs/mine").to_dict() == comparison.to_dict()
        True
    """
    path = Path(folder)
    path = path / "results.json" if path.is_dir() else path
    check_regular(path, limit=MAX_FILE_BYTES)
    try:
        return Comparison.from_dict(read_json(path.read_bytes()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is no comparison that this version reads ({type(error).__name__}: {error}): "
            "give the folder of one, or make it again with `recollect compare`"
        ) from None


def extend_table(
    models: Sequence[ModelSpec],
    folder: str | PathLike[str],
    *,
    sizes: Sizes,
    parameters: int,
    text: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    corpus: TextCorpus | None = None,
    seed: int = 0,
    engine: str = "auto",
    layer_options: str = "preset",
    jobs: int = 1,
    device: str | None = None,
    progress: ProgressReporter | None = None,
    command: str = "",
) -> Comparison | None:
    """Train the models that have no row in a folder on text, and write the table after each.

    Args:
        models, text, corpus, seed, engine, layer_options, parameters, jobs, device, progress: As in
            `compare`.
        folder: Contains ``NAME.json`` for each model, and the table as ``README.md``.
        sizes: Sizes of all models.
        command: Command line for the table.

    Returns:
        The new runs, ``None`` if all rows existed. An interrupted model has no row.

    Raises:
        ValueError: a row has other conditions; another run uses the folder; or the folder cannot be
            written, and the rows are in a temporary one, which the message names.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=16,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, evaluations=1),
        ... )
        >>> text = torch.tensor(list(b"key value " * 99), dtype=torch.uint8)
        >>> corpus = rc.tasks.TextCorpus(train=text, heldout=text, sha256="none", source="example")
        >>> settings = {"sizes": sizes, "parameters": 9000, "corpus": corpus}
        >>> comparison = rc.experiments.extend_table(["gla"], "rows", **settings)
        >>> [run.model for run in comparison.runs]
        ['gla']
        >>> rc.experiments.extend_table(["gla"], "rows", **settings)
    """
    folder = Path(folder)
    with folder_lock(folder):
        target_device = resolve_device(
            device, argument_name=argument_name("device", "extend_table: device")
        )
        corpus = corpus or (load_text() if text is None else read_corpus(text))
        conditions = {**asdict(sizes), "parameters": parameters, "sha256": corpus.sha256}
        conditions = {**conditions, "seed": seed, "engine": engine}
        rows = _read_rows(folder)
        for name, row in rows.items():  # before the training, which would be lost
            _check_conditions(folder, name, _common(row["terms"]), _common(conditions))
        specs = resolve_models(models, layer_options)
        layers = {name: _layers_to_json(mixers) for name, mixers in specs}
        missing: list[ModelSpec] = []
        for model, (name, _) in zip(models, specs, strict=True):
            if name not in rows:
                missing.append(model)
                continue
            stored = {**rows[name]["terms"], **_layers_of(rows[name])}
            _check_conditions(folder, name, stored, {**conditions, **layers[name]})
        if not missing:
            write_rows_table(folder)  # a row may have been copied into the folder
            return None
        environment = training_environment(len(missing), jobs, target_device)
        common = {
            "schema": SCHEMA,
            "command": command,
            "terms": conditions,
            "bigram": bigram_bits_per_byte(corpus),
            "source": corpus.source,
            "environment": environment.to_dict(),
        }
        writer = _RowWriter(folder, common, layers, progress or NoProgress())
        comparison = compare(
            missing,
            ["text"],
            corpus=corpus,
            sizes=sizes,
            seed=seed,
            engine=engine,
            layer_options=layer_options,
            parameters=parameters,
            jobs=jobs,
            device=device,
            progress=writer,
        )
        try:
            writer.write()
        except OSError as error:
            raise ValueError(
                save_to_temp_on_error(writer.unwritten, target=folder, error=error)
            ) from error
        return comparison


class _RowWriter:
    """Saves the row of each finished run, and passes all events on."""

    def __init__(
        self,
        folder: Path,
        common: Mapping[str, Any],
        layers: Mapping[str, Mapping[str, Any]],
        progress: ProgressReporter,
    ) -> None:
        self.on_start, self.on_step = progress.on_start, progress.on_step
        self.on_failure = progress.on_failure
        self.folder, self.common, self.layers, self.progress = folder, common, layers, progress
        self.unwritten: dict[str, str] = {}

    def on_end(self, run: ModelRun) -> None:
        if run.finished:
            data = replace(run, options={}).to_dict()  # the layers contain the options
            row = {**self.common, "model": run.model, **self.layers[run.model], "run": data}
            self.unwritten[f"{run.model}.json"] = json.dumps(row, indent=2, allow_nan=False) + "\n"
            with suppress(OSError), defer_signals():  # other models continue, and it is tried again
                self.write()
        self.progress.on_end(run)

    def write(self) -> None:
        """Write the rows that are not written, and the table."""
        if self.unwritten:
            for name in list(self.unwritten):
                write_atomic(self.folder / name, self.unwritten[name])
                del self.unwritten[name]
            write_rows_table(self.folder)


def write_rows_table(folder: str | PathLike[str]) -> Path:
    """Write ``README.md`` from all rows of a folder, the best first.

    Args:
        folder: Folder with ``NAME.json`` of each model.

    Raises:
        ValueError: no rows, or rows with different conditions.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=16,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, evaluations=1),
        ... )
        >>> text = torch.tensor(list(b"key value " * 99), dtype=torch.uint8)
        >>> corpus = rc.tasks.TextCorpus(train=text, heldout=text, sha256="none", source="example")
        >>> _ = rc.experiments.extend_table(
        ...     ["gla"], "table", sizes=sizes, parameters=9000, corpus=corpus
        ... )
        >>> rc.experiments.write_rows_table("table").name
        'README.md'
    """
    folder = Path(folder)
    rows = [*_read_rows(folder).values()]
    if not rows:
        raise ValueError(f"{folder} has no rows")
    for row in rows[1:]:
        difference = _difference(_common(rows[0]["terms"]), _common(row["terms"]))
        if difference:
            raise ValueError(
                f"{folder}: {rows[0]['model']} and {row['model']} have different conditions "
                f"({difference}), so one table cannot contain both"
            )
    rows.sort(key=lambda row: (row["run"]["value"] is None, row["run"]["value"]))
    return write_atomic(folder / "README.md", _page(rows))


def _read_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows by name; fields of layers that are newer than a row have their defaults."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            row = read_json(read_regular(path))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}; delete it to train it again") from None
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            raise ValueError(f"{path} is no row of a table: delete it, or choose another folder")
        layers = row.get("layers") or {"": _layers_of(row)}
        mixers = {name: read_mixer(layer) for name, layer in layers.items()}
        rows[path.stem] = {**row, **_layers_to_json(mixers)}
    return rows


def _layers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("recipe", "options", "layers") if name in row}


def _layers_to_json(mixers: Mapping[str, Mixer]) -> dict[str, Any]:
    """Return one recipe with its options, or several mixers by name."""
    first, *others = mixers.values()
    if not others and isinstance(first, RecipeMixer):
        data = first.to_dict()
    else:
        data = {"layers": {name: mixer.to_dict() for name, mixer in mixers.items()}}
    return json.loads(json.dumps(data))


def _common(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions that all rows of a table share."""
    return {name: value for name, value in conditions.items() if name not in ROW_FIELDS}


def _difference(stored: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    """Return the conditions that differ, or ''. A missing condition is equal to ``None``."""
    texts: list[str] = []
    for name in dict.fromkeys([*stored, *requested]):
        old, new = stored.get(name), requested.get(name)
        if old != new:
            is_long = isinstance(old, dict) or isinstance(new, dict)
            texts.append(f"{name} differs" if is_long else f"{name} was {old!r}, not {new!r}")
    return "; ".join(texts)


def _check_conditions(
    folder: Path, name: str, stored: Mapping[str, Any], requested: Mapping[str, Any]
) -> None:
    if difference := _difference(stored, requested):
        raise ValueError(
            f"{folder / name}.json was trained under other conditions ({difference}): choose "
            "another folder, or delete the file to train it again"
        )


def _preset_changed(row: Mapping[str, Any]) -> bool:
    """Whether the preset with the name of a row has other layers than the row."""
    if row["model"] not in (*names(), *names(kind="hybrid"), *variants()):
        return False
    return _layers_of(row) != _layers_to_json(resolve_model(row["model"])[1])


def _page(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    terms, schedule = first["terms"], first["terms"]["schedule"]
    tokens = schedule["steps"] * schedule["batch"] * terms["length"]
    quick, full = EVAL_SIZES["text"]
    devices = dict.fromkeys(
        "{device}, torch {torch}, Python {python}".format_map(row["environment"]) for row in rows
    )
    columns = ["model", "bits per byte", "parameters", "heads", "state, bytes per sequence"]
    columns += ["threads", "CPU minutes", "minutes", "layer options", "commit"]
    bigram = ["byte bigram", f"{first['bigram']:.3f}", *[None] * (len(columns) - 2)]
    paragraphs = [
        "# Language models at equal parameters and tokens",
        f"Held-out bits per byte of text after {tokens:,} training bytes. Every model has "
        f"{terms['depth']} layers of width {terms['width']}, and an MLP whose width gives it about "
        f"{terms['parameters']:,} trained parameters. {schedule['steps']} steps of "
        f"{schedule['batch']} × {terms['length']} bytes, AdamW, weight decay "
        f"{schedule['weight_decay']:g}, clipping at {schedule['clip']:g}, peak learning rate "
        f"{schedule['lr']:g} after a warm-up over {schedule['warmup']:.0%} of the steps, then a "
        f"cosine to 0; float32, seed {terms['seed']}. Each row has its preset's defaults, except "
        "for the layer options of `NAME-same`. Nothing is tuned per row. Keys have width / heads "
        "channels if the table gives no other K.",
        f"Made by `{first['command']}`. The command adds rows for other `--models`, which may have "
        "`--heads` and `--key-dim` of their own."
        if first["command"]
        else "",
        f"Text: {first['source']}, sha256 `{terms['sha256']}`. Held-out: up to {full:,} bytes of "
        "paragraphs that the training text does not contain. The learning curves in `NAME.json` "
        f"are measured on {quick:,} of them, evenly spread, so they may end elsewhere.",
        f"Device: {'; '.join(devices)}. CPU minutes are those of training and evaluation, summed "
        "over threads. Minutes are wall time of training alone, perhaps next to other work.",
        "Layer options are those of the short convolution, token shift, value skip, output norm "
        "and output gate that differ from `--layer-options same`, in any layer of a hybrid. A "
        "model `NAME-same` was trained with that option.",
        Table(columns=columns, rows=[*map(_cells, rows), bigram]).to_markdown(),
        "† The preset has had other defaults since. The row has the older ones."
        if any(map(_preset_changed, rows))
        else "",
        "With one seed, small models and a short text, the table shows that a layer learns and how "
        "fast, not which is best at scale. `NAME.json` contains the learning curve, recipe and "
        "environment of a row.",
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    run, terms, environment = row["run"], row["terms"], row["environment"]
    cpu_seconds = run.get("cpu_seconds", row.get("cpu_seconds"))
    key_dim = row.get("options", {}).get("key_dim") or terms["key_dim"]
    layers = row.get("layers") or {"": _layers_of(row)}
    leaves = [leaf for layer in layers.values() for leaf in read_mixer(layer).leaves.values()]
    default = LayerOptions()
    differing = [
        f"{name} = {value}"
        for name in SHARED_OPTIONS
        for value in dict.fromkeys(getattr(leaf.options, name) for leaf in leaves)
        if value != getattr(default, name)
    ]
    return [
        f"`{row['model']}`{' †' if _preset_changed(row) else ''}",
        "diverged" if run["value"] is None else f"{run['value']:.3f}",
        f"{run['parameters']:,}",
        str(terms["heads"]) + ("" if key_dim is None else f", K = {key_dim}"),
        f"{run['state_bytes']:,}{', grows' if run['grows'] else ''}",
        str(environment["threads"]),
        "–" if cpu_seconds is None else f"{cpu_seconds / 60:.1f}",
        f"{run['seconds'] / 60:.1f}",
        ", ".join(differing),
        environment["commit"][:8],
    ]
