"""A table that grows row by row: each model's result is a file, and those that stand are kept.

Runs of an hour each are not repeated because one of them failed. Rows lie side by side only under
equal terms, so every file says its own, and a table of unequal ones is refused. How the width is
divided into heads is no such term but a row's own, as its recipe is, and stands in the table:
polynomial features of degree 2 are 2,145 of a key of 64 channels and 153 of a key of 16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.blocks.compositions import read_mixer
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.experiments.comparison.compare import SHARED, Named, compare, named, named_alike
from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.jobs import training_environment
from recollect.experiments.comparison.results import ModelRun, Nobody, Sizes, Watcher
from recollect.experiments.comparison.tasks import MEASURED, read_corpus
from recollect.layer.options import LayerOptions
from recollect.messages import argument_name
from recollect.recipe.recipe import Recipe
from recollect.report.devices import resolve_device
from recollect.report.files import read_regular, save_to_temp_on_error, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.signals import defer_signals
from recollect.serialization import read_json
from recollect.tasks.text import TextCorpus, bigram_bits_per_byte, load_text
from recollect.zoo.preset import names, variants

__all__ = ["add_rows", "write_rows_table"]

SCHEMA = 2
PER_ROW = ("heads", "key_dim")
"""Terms that the rows of one table need not share; the same model is not made twice, though."""


def add_rows(
    models: Sequence[Named],
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
    watcher: Watcher | None = None,
    command: str = "",
) -> Comparison | None:
    """Train the models whose rows a folder lacks, on text; the table is rewritten after each.

    Args:
        models, text, corpus, seed, engine, layer_options, parameters, jobs, device, watcher: as in
            `compare`.
        folder: holds ``NAME.json`` for each model and ``README.md``, the table.
        sizes: of every model and run.
        command: that makes the table, to be printed above it.

    Returns:
        What was measured now, ``None`` if every row stood. A model that was interrupted leaves no
        row.

    Raises:
        ValueError: a row that stands was made under other terms; a run that is under way owns the
            folder; or it cannot be written, and the rows are kept in a temporary one.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=16,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, evaluations=1),
        ... )
        >>> bytes_of = lambda text: torch.tensor(list(text), dtype=torch.uint8)
        >>> corpus = rc.tasks.TextCorpus(
        ...     train=bytes_of(b"key value " * 99), heldout=bytes_of(b"key value " * 9),
        ...     sha256="of both", source="made up",
        ... )
        >>> found = rc.experiments.add_rows(
        ...     ["gla"], "rows", sizes=sizes, parameters=9000, corpus=corpus
        ... )
        >>> [run.model for run in found.runs]
        ['gla']
        >>> rc.experiments.add_rows(["gla"], "rows", sizes=sizes, parameters=9000, corpus=corpus)
    """
    with folder_lock(folder):
        return _added(
            models,
            Path(folder),
            corpus or (load_text() if text is None else read_corpus(text)),
            sizes=sizes,
            parameters=parameters,
            seed=seed,
            engine=engine,
            layer_options=layer_options,
            jobs=jobs,
            device=device,
            watcher=watcher or Nobody(),
            command=command,
        )


def _added(
    models: Sequence[Named],
    place: Path,
    corpus: TextCorpus,
    *,
    sizes: Sizes,
    parameters: int,
    seed: int,
    engine: str,
    layer_options: str,
    jobs: int,
    device: str | None,
    watcher: Watcher,
    command: str,
) -> Comparison | None:
    """`add_rows`, in a folder that is this run's own."""
    target_device = resolve_device(
        device, argument_name=argument_name("device", "add_rows: device")
    )
    terms = _terms(sizes, parameters, corpus.sha256, seed, engine)
    for path in sorted(place.glob("*.json")):
        _stands(path, _shared(terms))  # before anything is trained: other terms make no table
    layers: dict[str, dict[str, Any]] = {}
    todo: list[Named] = []
    alike = named_alike(models, layer_options)
    for model, (name, mixers) in zip(models, alike, strict=True):
        layers[name] = _written(mixers)
        path = place / f"{name}.json"
        if path.exists():
            _stands(path, {**terms, **layers[name]})
        else:
            todo.append(model)
    if not todo:
        write_rows_table(place)  # rows may have come from elsewhere
        return None
    common = {
        "schema": SCHEMA,
        "command": command,
        "terms": terms,
        "bigram": bigram_bits_per_byte(corpus),
        "source": corpus.source,
        "environment": training_environment(len(todo), jobs, target_device).to_dict(),
    }

    unwritten: dict[str, str] = {}

    def keep(run: ModelRun) -> None:
        measured = replace(run, options={}).to_dict()  # `layers` has the options
        row = {**common, "model": run.model, **layers[run.model], "run": measured}
        unwritten[f"{run.model}.json"] = json.dumps(row, indent=2, allow_nan=False) + "\n"
        with suppress(OSError), defer_signals():  # the others go on, and it is tried again
            write()

    def write() -> None:
        for name in list(unwritten):
            write_atomic(place / name, unwritten[name])
            del unwritten[name]
        write_rows_table(place)

    found = compare(
        todo,
        ["text"],
        corpus=corpus,
        sizes={"text": sizes},
        seed=seed,
        engine=engine,
        layer_options=layer_options,
        parameters=parameters,
        jobs=jobs,
        device=device,
        watcher=_Keeper(watcher, keep),
    )
    try:
        if unwritten:
            write()
    except OSError as error:
        raise ValueError(save_to_temp_on_error(unwritten, target=place, error=error)) from error
    return found


class _Keeper:
    """Keeps every run that came to its end, and tells another watcher all."""

    def __init__(self, other: Watcher, keep: Callable[[ModelRun], None]) -> None:
        self.begin, self.step, self.fail = other.begin, other.step, other.fail
        self.other, self.keep = other, keep

    def end(self, run: ModelRun) -> None:
        if run.finished:
            self.keep(run)
        self.other.end(run)


def _terms(sizes: Sizes, parameters: int, sha256: str, seed: int, engine: str) -> dict[str, Any]:
    """What two rows must share to be compared, as JSON gives it back."""
    terms = {**asdict(sizes), "parameters": parameters, "sha256": sha256, "seed": seed}
    return json.loads(json.dumps({**terms, "engine": engine}))


def _shared(terms: Mapping[str, Any]) -> dict[str, Any]:
    """What all rows of a table have in common."""
    return {name: value for name, value in terms.items() if name not in PER_ROW}


def _stated(terms: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what is null: rows are older than terms that came later."""
    return {name: value for name, value in _shared(terms).items() if value is not None}


def _stands(path: Path, terms: Mapping[str, Any]) -> None:
    """Refuse a row that was made under other terms."""
    row = _read(path)
    found = {**row["terms"], **_layer(row)}
    for name, value in json.loads(json.dumps(terms)).items():
        if found.get(name) != value:
            what = f": {name} is another" if isinstance(value, dict) else ""
            what = what or f": {name} was {found.get(name)!r}, not {value!r}"
            raise ValueError(
                f"{path} was made under other terms{what}; take another folder for these, or "
                "delete the file to train it anew"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        row = read_json(read_regular(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; delete it to train it anew") from None
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no row of such a table; delete it or take another folder")
    return row


def _written(mixers: Mapping[str, Mixer]) -> dict[str, Any]:
    """What a row holds of its layers: one recipe with its options, or mixers by name."""
    first = next(iter(mixers.values()))
    if len(mixers) == 1 and isinstance(first, RecipeMixer):
        return first.to_dict()
    return {"layers": {name: mixer.to_dict() for name, mixer in mixers.items()}}


def _layer(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's layers, with the defaults of fields that are younger than the row."""
    if "layers" in row:
        mixers = {name: read_mixer(mixer) for name, mixer in row["layers"].items()}
        return json.loads(json.dumps(_written(mixers)))
    return json.loads(
        json.dumps(
            {
                "recipe": Recipe.from_dict(row["recipe"]).to_dict(),
                "options": LayerOptions.from_dict(row["options"]).to_dict(),
            }
        )
    )


def _changed(row: Mapping[str, Any]) -> bool:
    """Whether the preset of that name is another one today."""
    if row["model"] not in (*names(), *names(kind="hybrid"), *variants()):
        return False
    today = _written(named(row["model"])[1])
    return _layer(row) != json.loads(json.dumps(today))


def write_rows_table(folder: str | PathLike[str]) -> Path:
    """Write ``README.md`` from all rows of a folder, best first.

    Raises:
        ValueError: no rows, or rows under different terms.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=16,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, evaluations=1),
        ... )
        >>> text = torch.tensor(list(b"key value " * 99), dtype=torch.uint8)
        >>> corpus = rc.tasks.TextCorpus(train=text, heldout=text, sha256="none", source="made up")
        >>> _ = rc.experiments.add_rows(
        ...     ["gla"], "table", sizes=sizes, parameters=9000, corpus=corpus
        ... )
        >>> rc.experiments.write_rows_table("table").name
        'README.md'
    """
    place = Path(folder)
    rows = [_read(path) for path in sorted(place.glob("*.json"))]
    if not rows:
        raise ValueError(f"{place} has no rows")
    first = rows[0]
    for row in rows[1:]:
        if _stated(row["terms"]) != _stated(first["terms"]):
            raise ValueError(
                f"{place}: {first['model']} and {row['model']} were made under different terms, so "
                "they are no table"
            )
    rows.sort(key=lambda row: (row["run"]["value"] is None, row["run"]["value"]))
    return write_atomic(place / "README.md", _page(rows))


def _page(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    terms, schedule = first["terms"], first["terms"]["schedule"]
    tokens = schedule["steps"] * schedule["batch"] * terms["length"]
    glance, whole = MEASURED["text"]
    devices = dict.fromkeys(
        "{device}, torch {torch}, Python {python}".format_map(row["environment"]) for row in rows
    )
    lines = [
        "# Language models at equal parameters and tokens",
        "",
        f"Held-out bits per byte of text after {tokens:,} training bytes. Every model has "
        f"{terms['depth']} layers of width {terms['width']}, and about "
        f"{terms['parameters']:,} trained parameters, which the width of its MLP is set to. "
        f"{schedule['steps']} steps of {schedule['batch']} × {terms['length']} bytes, AdamW, "
        f"weight decay {schedule['weight_decay']:g}, clipping at {schedule['clip']:g}, peak "
        f"learning rate {schedule['lr']:g} after a warm-up over {schedule['warmup']:.0%} of the "
        f"steps, then a cosine to 0; float32, seed {terms['seed']}. Each row is at its preset's "
        "own defaults but for the layer options of `NAME-same`, nothing is tuned per row. "
        "Keys have K = width / heads channels where no other K is told.",
        "",
        f"Made by `{first['command']}`; a command with other `--models`, "
        "and `--heads` or `--key-dim` of their own, adds rows."
        if first["command"]
        else "",
        "",
        f"Text: {first['source']}, sha256 `{terms['sha256']}`. Held-out: up to {whole:,} bytes of "
        f"paragraphs that the training part does not have; the learning curves in `NAME.json` are "
        f"measured on {glance:,} of them, evenly spread, and may end elsewhere.",
        "",
        f"Device: {'; '.join(devices)}. CPU minutes are of the whole run with its measurements, "
        "summed over its threads; minutes are the clock's, of training alone, on a machine that "
        "other work may have shared.",
        "",
        "Layer options are those of the short convolution, token shift, value skip, output norm "
        "and output gate that differ from `--layer-options same`. Those of a hybrid are the "
        "options of any of its layers. A model `NAME-same` was trained with that option.",
        "",
        "| model | bits per byte | parameters | heads | state, bytes per sequence | threads "
        "| CPU minutes | minutes | layer options | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
        f"| byte bigram | {first['bigram']:.3f} | | | | | | | | |",
        "",
        *(
            ["† The preset has other defaults since: the row is that of its older ones.", ""]
            if any(map(_changed, rows))
            else []
        ),
        "One seed, models this small and a text this short show that a layer learns and how fast, "
        "not which is best at scale. `NAME.json` holds a row's learning curve, recipe and "
        "environment.",
        "",
    ]
    return "\n".join(lines)


def _differing(row: Mapping[str, Any]) -> str:
    """Return the `SHARED` options of a row's layers that differ from the defaults."""
    default = LayerOptions()
    layers: Mapping[str, Any] = row["layers"] if "layers" in row else {"": _layer(row)}
    leaves = [leaf for layer in layers.values() for leaf in read_mixer(layer).leaves.values()]
    cells = [
        f"{name} = {value}"
        for name in SHARED
        for value in dict.fromkeys(getattr(leaf.options, name) for leaf in leaves)
        if value != getattr(default, name)
    ]
    return ", ".join(cells)


def _line(row: Mapping[str, Any]) -> str:
    run = row["run"]
    value = "diverged" if run["value"] is None else f"{run['value']:.3f}"
    state = f"{run['state_bytes']:,}{', grows' if run['grows'] else ''}"
    spent = run.get("cpu_seconds", row.get("cpu_seconds"))
    minutes = "–" if spent is None else f"{spent / 60:.1f}"
    terms, environment = row["terms"], row["environment"]
    heads = str(terms["heads"])
    own = row.get("options", {}).get("key_dim")  # a preset's own comes first
    key_dim = own or terms["key_dim"]
    if key_dim is not None:
        heads += f", K = {key_dim}"
    cells = (
        f"`{row['model']}`{' †' if _changed(row) else ''}",
        value,
        f"{run['parameters']:,}",
        heads,
        state,
        str(environment["threads"]),
        minutes,
        f"{run['seconds'] / 60:.1f}",
        _differing(row),
        environment["commit"][:8],
    )
    return f"| {' | '.join(cells)} |"
