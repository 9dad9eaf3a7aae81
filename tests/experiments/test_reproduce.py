"""Experiments: every row at smoke scale, resuming, processes, files, the command."""

from __future__ import annotations

import csv
import functools
import html
import importlib
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from recollect.cli import build
from recollect.experiments import (
    EXPERIMENTS,
    Claim,
    Experiment,
    Results,
    Run,
    reproduce,
)
from recollect.experiments.framework.experiment import SCALES
from recollect.experiments.framework.records import NotMeasured, Record
from recollect.experiments.framework.report import save_run
from recollect.experiments.framework.rules import special, verdict
from recollect.experiments.framework.run import format_command
from recollect.experiments.framework.workers import WorkerFailure
from recollect.experiments.gallery import save_gallery
from recollect.experiments.papers.ttr.recall import _y_range
from recollect.report import RenderedFigure, Series, line_figure
from recollect.serialization import plain

ROWS = (
    *("ttr-fig2", "ttr-fig3", "ttr-stability"),
    *("am-snr", "am-fig4", "am-fig5", "am-fig6", "am-fig7", "am-fig8"),
    *("am-icl", "am-state-exchange"),
    *("atlas-learnability", "atlas-capacity", "mqar", "mad", "word-problems"),
    *("am-fig2", "miras-table2", "miras-pq", "miras-ablation"),
    *("atlas-table2", "atlas-window", "atlas-ablation", "scaling", "ttt-reduction"),
    *("niah", "babilong", "recall-real"),
)
# The fast tests run every kind of row at smoke scale. Of the rows that train language models they
# run miras-pq, scaling and niah.
LANGUAGE = (
    *("miras-table2", "miras-ablation", "atlas-table2", "atlas-window", "atlas-ablation"),
    "ttt-reduction",
)
SLOW_RUNS = (*LANGUAGE, "am-fig2", "am-fig8", "babilong", "recall-real")


def row_params(slow: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in ROWS]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(), list(arguments))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return rows at smoke scale, each run once for all tests of this file."""
    out = tmp_path_factory.mktemp("smoke")
    return functools.lru_cache(None)(lambda name: reproduce(name, scale="smoke", out=out))


def test_every_row_is_registered() -> None:
    assert set(EXPERIMENTS) == set(ROWS)


@pytest.mark.parametrize("name", row_params(SLOW_RUNS))
def test_a_row_runs_at_smoke_scale(name: str, smoke: Callable[[str], Run]) -> None:
    run = smoke(name)
    assert run.complete
    folder = run.folder
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure.svg").read_text("utf-8").rstrip().endswith("</svg>")
    data = json.loads((folder / "results.json").read_text("utf-8"))
    assert len(data["records"]) == len(EXPERIMENTS[name].cells(data["config"]))
    assert all(record["commit"] and record["device"] for record in data["records"])
    with (folder / "results.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(data["records"])
    page = (folder / "report.html").read_text("utf-8")
    for claim, outcome in run.verdicts:
        assert outcome.status in page
        assert claim.name in page.replace("&#x27;", "'")
    assert {c["verdict"] for c in data["claims"]} <= {
        "holds",
        "does not hold",
        "not testable at this scale",
    }


@pytest.mark.parametrize(
    "name", ["ttr-fig2", "ttr-stability", "am-state-exchange", "am-icl", "atlas-capacity"]
)
def test_theorems_hold_at_any_scale(name: str, smoke: Callable[[str], Run]) -> None:
    run = smoke(name)
    assert {verdict.status for _, verdict in run.verdicts} == {"holds"}, run.verdicts


def test_recall_is_constructed_without_training(smoke: Callable[[str], Run]) -> None:
    run = smoke("ttr-fig3")
    (verdict,) = [v for claim, v in run.verdicts if claim.name == "construction"]
    assert verdict.status == "holds"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_three_scales(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert set(experiment.configs) == set(SCALES)
    assert json.loads(json.dumps(experiment.configs)) == dict(experiment.configs)


# -- a small custom experiment ---------------------------------------------------------------------


def doubled(results: Results) -> Any:
    return verdict(results.mean("y", x=2) == 4.0, "y at 2")


@functools.cache
def draw_toy(*points: tuple[int, float]) -> RenderedFigure:
    """Draw the figure of the small experiment once for equal points."""
    xs, ys = zip(*points, strict=True)
    return line_figure([Series(name="y", x=xs, y=ys)], x="x", y="y", title="toy")


def toy(measured: list[tuple[int, int]] | None = None, *, stop_at: int | None = None) -> Experiment:
    def measure(
        config: Any, cell: Any, seed: int, device: torch.device
    ) -> dict[str, float | list[float]]:
        if stop_at is not None and measured is not None and len(measured) == stop_at:
            raise KeyboardInterrupt
        if measured is not None:
            measured.append((cell["x"], seed))
        return {"y": 2.0 * cell["x"], "noise": float(torch.rand(())), "curve": [1.0, math.nan]}

    def draw(results: Results) -> RenderedFigure:
        return draw_toy(*((x, results.mean("y", x=x)) for x in results.axis_values("x")))

    return Experiment(
        name="toy",
        title="Doubling",
        source="nowhere",
        protocol="y = 2x",
        claims=(Claim(name="doubles", text="y is 2x.", rule=special("y = 4 at x = 2.", doubled)),),
        configs={scale: {"seeds": 2, "xs": [1, 2, 3]} for scale in SCALES},
        cells=lambda config: [{"x": x} for x in config["xs"]],
        measure=measure,
        figure=draw,
    )


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    first: list[tuple[int, int]] = []
    run = reproduce(toy(first, stop_at=4), out=tmp_path)
    assert not run.complete
    assert len(run.results.records) == 4
    assert json.loads((tmp_path / "toy" / "results.json").read_text())["complete"] is False
    assert "Interrupted" in (tmp_path / "toy" / "report.html").read_text()
    repeated: list[tuple[int, int]] = []
    run = reproduce(toy(repeated), out=tmp_path)
    assert run.complete
    assert first + repeated == [(x, seed) for seed in range(2) for x in (1, 2, 3)]
    nothing: list[tuple[int, int]] = []
    assert reproduce(toy(nothing), out=tmp_path).results.seconds == run.results.seconds
    assert nothing == []
    assert len(reproduce(toy(nothing), out=tmp_path, overwrite=True).results.records) == len(
        nothing
    )


def test_figure_error_is_raised(tmp_path: Path) -> None:
    """The figure of an interrupted run is left out only if results are missing."""

    def fails(results: Results) -> RenderedFigure:
        raise ValueError("a defect of the figure")

    with pytest.raises(ValueError, match="a defect of the figure"):
        reproduce(replace(toy([], stop_at=2), figure=fails), out=tmp_path)

    def missing(results: Results) -> RenderedFigure:
        raise NotMeasured("nothing at x = 3")

    assert not reproduce(replace(toy([], stop_at=1), figure=missing), out=tmp_path / "b").complete


def test_a_broken_cell_is_named(tmp_path: Path) -> None:
    reproduce(toy(), out=tmp_path)
    cell = next((tmp_path / "toy").glob("cells/*/*.json"))
    for text in ("[" * 100_000, "[1]", '{"values": {}, "x": 1}', '{"values": {"y": "z"}}'):
        cell.write_text(text)
        with pytest.raises(ValueError, match=f"{cell.name} is no measured cell"):
            reproduce(toy(), out=tmp_path)
    cell.unlink()
    os.mkfifo(cell)
    with pytest.raises(OSError, match="it is a pipe"):
        reproduce(toy(), out=tmp_path)


def test_more_seeds_measure_only_the_new_ones(tmp_path: Path) -> None:
    reproduce(toy(), out=tmp_path)
    more: list[tuple[int, int]] = []
    run = reproduce(toy(more), out=tmp_path, seeds=3)
    assert more == [(1, 2), (2, 2), (3, 2)]
    assert len(run.results.records) == 9


def test_changed_configuration_is_measured_again(tmp_path: Path) -> None:
    reproduce(toy(), out=tmp_path)
    measured: list[tuple[int, int]] = []
    changed = replace(
        toy(measured), configs={scale: {"seeds": 1, "xs": [1, 2, 3], "more": 1} for scale in SCALES}
    )
    reproduce(changed, out=tmp_path)
    assert len(measured) == 3


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    runs = [reproduce(toy(), out=tmp_path / name) for name in "ab"]
    noise = [[r.values["noise"] for r in run.results.records] for run in runs]
    assert noise[0] == noise[1]
    assert noise[0][0] != noise[0][3], "another seed, other numbers"


def test_rules_that_changed_after_the_measurement_are_reported(tmp_path: Path) -> None:
    def stricter(results: Results) -> Any:
        return verdict(results.mean("y", x=2) == 5.0, "y at 2")

    reproduce(toy(), out=tmp_path)
    page = tmp_path / "toy" / "report.html"
    assert "unchanged since the measurement" in page.read_text()
    claim = replace(toy().claims[0], rule=special("y = 5 at x = 2.", stricter))
    run = reproduce(replace(toy(), claims=(claim,)), out=tmp_path)
    assert run.verdicts[0][1].status == "does not hold"
    assert "changed since a part" in page.read_text()


def test_a_report_prints_the_command_that_repeats_it(tmp_path: Path) -> None:
    """The folder of the run has a name that needs quotes."""
    out = tmp_path / "my runs"
    invoked = invoke(
        *("reproduce", "ttr-fig2", "--scale", "smoke", "--seeds", "1", "--out", str(out))
    )
    assert invoked.exit_code == 0, invoked.output
    page = html.unescape((out / "ttr-fig2" / "report.html").read_text("utf-8"))
    command = f"recollect reproduce ttr-fig2 --scale smoke --seeds 1 --out '{out}'"
    assert command in page
    repeated = invoke(*shlex.split(command)[1:])
    assert "measured earlier" in repeated.output

    run = reproduce(toy(), scale="smoke", out=tmp_path)
    spent = f"{run.results.seconds:,.0f} s, summed over the cells"
    single = save_run(run)["report"].read_text("utf-8")
    assert spent in single and "at a time" not in single
    parallel = save_run(replace(run, jobs=2))["report"].read_text("utf-8")
    assert f"{spent}, of which 2 were measured at a time" in parallel


@pytest.mark.parametrize(("smallest", "bottom", "top"), [(0.95, 0.9, 1.005), (0.07, 0.0, 1.05)])
def test_recall_near_one_fills_its_panels(smallest: float, bottom: float, top: float) -> None:
    rows = [
        (
            {"kind": kind, "layer": layer, "P": P, "T": T},
            0,
            {"accuracy": smallest if P > 8 else 1.0},
        )
        for kind in ("trained", "untrained")
        for layer in ("linear attention", "RLS")
        for P in (8, 16)
        for T in (32, 64)
    ]
    result = _y_range(Results.from_rows(rows, config={"width": 8}))
    assert result == pytest.approx((bottom, top))
    assert result[0] < smallest < 1 < result[1]


def test_command_leaves_out_defaults() -> None:
    plain: dict[str, Any] = {"seeds": None, "jobs": 1, "device": "cpu", "out": "runs"}
    assert format_command("mad", scale="small", **plain) == "recollect reproduce mad --scale small"
    other: dict[str, Any] = {"seeds": 3, "jobs": 2, "device": "cuda", "out": "other"}
    assert format_command("mad", scale="paper", **other) == (
        "recollect reproduce mad --scale paper --launch --seeds 3 --jobs 2 --device cuda "
        "--out other"
    )


@pytest.mark.slow  # each process imports everything again
def test_processes_measure_the_same(tmp_path: Path) -> None:
    one = reproduce("am-icl", scale="smoke", out=tmp_path / "one")
    two = reproduce("am-icl", scale="smoke", out=tmp_path / "two", jobs=2)
    assert [r.cell for r in one.results.records] == [r.cell for r in two.results.records]
    for a, b in zip(one.results.records, two.results.records, strict=True):
        assert a.values["at the end"] == pytest.approx(b.values["at the end"], rel=1e-6)


def test_custom_experiment_cannot_run_in_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"toy is not in the registry.*one job"):
        reproduce(toy(), out=tmp_path, jobs=2)


def test_cell_whose_process_died_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_dies(work: Any, parts: Any, processes: int) -> Any:
        yield parts[0], WorkerFailure("its process was killed")
        for part in parts[1:]:
            yield part, work(part)

    runner = importlib.import_module("recollect.experiments.reproduce")
    monkeypatch.setattr(runner, "run_in_workers", first_dies)
    with pytest.raises(ValueError, match=r"process was killed; 1 of \d+ cells failed.* again"):
        reproduce("ttr-fig2", scale="smoke", out=tmp_path, jobs=2)
    data = json.loads((tmp_path / "ttr-fig2" / "results.json").read_text())
    assert data["complete"] is False
    assert data["records"]
    monkeypatch.undo()
    repeated = reproduce("ttr-fig2", scale="smoke", out=tmp_path)
    assert repeated.complete
    assert len(repeated.results.records) == len(data["records"]) + 1


# -- records ---------------------------------------------------------------------------------------


def test_records_survive_their_files() -> None:
    record = Record(cell={"x": 1}, seed=3, values={"y": math.nan, "curve": [1.0, math.inf]})
    text = json.dumps(record.to_dict(), allow_nan=False)
    back = Record.from_dict(json.loads(text))
    assert (back.cell, back.seed) == (record.cell, record.seed)
    assert math.isnan(back.values["y"])  # type: ignore[arg-type]
    assert back.values["curve"][0] == 1.0  # type: ignore[index]
    assert plain({"a": (1.0, math.nan)}) == {"a": [1.0, None]}


def test_questions_to_results() -> None:
    rows = [
        (
            {"layer": layer, "n": n},
            seed,
            {"y": float(n + seed), "curve": [float(seed)] * (2 + seed)},
        )
        for layer in ("a", "b")
        for n in (10, 20)
        for seed in (0, 1)
    ]
    results = Results.from_rows(rows)
    assert results.axis_values("n", layer="a") == [10, 20]
    assert results.mean("y", layer="a", n=10) == 10.5
    assert (results.min("y", layer="b"), results.max("y", layer="b")) == (10.0, 21.0)
    assert results.mean_and_range("curve", layer="a", n=20) == ([0.5, 0.5], [0.0, 0.0], [1.0, 1.0])
    assert len(results.cells()) == 4
    assert not results.has_cell(layer="c")
    with pytest.raises(NotMeasured, match="y was not measured at layer = c"):
        results.mean("y", layer="c")
    with pytest.raises(NotMeasured, match="nothing was measured along n at layer = c"):
        results.axis_values("n", layer="c")
    rows = [({"x": 1}, 0, {"y": math.nan}), ({"x": 1}, 1, {"y": 1.0})]
    for broken in (Results.from_rows(rows), Results.from_rows(rows[::-1])):
        assert all(math.isnan(x) for x in (broken.min("y"), broken.max("y"), broken.mean("y")))


# -- the command, galleries -----------------------------------------------------------------


def test_the_list_names_all() -> None:
    result = CliRunner().invoke(build(), ["reproduce", "--list"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in ROWS)
    rows = json.loads(invoke("reproduce", "--list", "--json").stdout)
    assert [row["name"] for row in rows] == list(EXPERIMENTS)


@pytest.fixture
def save_gallery_markdown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The function that writes ``docs/gallery.md``, which is next to the stored runs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "results" / "reproduce")
    return importlib.import_module("gallery_page").save_gallery_markdown


def test_the_command_runs_and_writes_a_gallery(
    tmp_path: Path, save_gallery_markdown: Callable[..., Path]
) -> None:
    result = invoke("reproduce", "ttr-fig2", "--scale", "smoke", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)
    assert run["experiment"] == "ttr-fig2"
    assert "ttr-fig2" in (tmp_path / "index.html").read_text("utf-8")
    shown = invoke("reproduce", "ttr-fig2", "--scale", "smoke", "--out", str(tmp_path))
    assert "measured earlier" in shown.output
    assert "Linear attention" in shown.output
    page = tmp_path / "docs" / "gallery.md"
    save_gallery_markdown(tmp_path, page, intro="Figures.")
    text = page.read_text("utf-8")
    for file in ("ttr-fig2.svg", "ttr-fig2-narrow.svg"):
        assert f'="gallery/{file}"' in text
        assert (page.parent / "gallery" / file).exists()
    assert save_gallery(tmp_path / "empty") is None


def test_gallery_equals_the_runs(
    tmp_path: Path, save_gallery_markdown: Callable[..., Path]
) -> None:
    """The committed page counts verdicts, and marks rules that changed after a run."""
    root = Path(__file__).parents[2]
    page = save_gallery_markdown(root / "results" / "reproduce", tmp_path / "gallery.md")
    text = page.read_text("utf-8")
    assert text == (root / "docs" / "gallery.md").read_text("utf-8")
    claims = json.loads((root / "results/reproduce/ttr-fig3/results.json").read_text("utf-8"))
    verdicts = [claim["verdict"] for claim in claims["claims"]]
    row = next(line for line in text.splitlines() if line.startswith("| [ttr-fig3](#ttr-fig3)"))
    counts = [verdicts.count(verdict) for verdict in ("holds", "does not hold")]
    assert [cell.strip() for cell in row.split("|")[3:5]] == [str(n or "") for n in counts]
    for name, claim in (("ttr-fig3", "With P = 128 > d"), ("word-problems", "A rotation of S₃")):
        part = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert part.count("*This rule was changed after a run:*") == 1, name
        marked = re.findall(r"\(rule changed after a run\): (.*)", part)
        assert len(marked) == 1 and marked[0].startswith(claim), name


def test_the_papers_scale_needs_launch(tmp_path: Path) -> None:
    result = invoke("reproduce", "am-fig4", "--scale", "paper", "--jobs", "4")
    assert result.exit_code == 0, result.output
    for words in ("14 cells, 3 seeds each", "--scale paper --launch", "--jobs 4"):
        assert words in result.output
    launches = json.loads(invoke("reproduce", "--all", "--scale", "paper", "--json").stdout)
    assert [row["experiment"] for row in launches] == list(EXPERIMENTS)


def test_progress_estimates_the_remaining_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recollect.cli.progress.time.monotonic", itertools.count(0, 20).__next__)
    lines = invoke(
        *("reproduce", "ttr-stability", "--scale", "smoke", "--out", str(tmp_path))
    ).output.splitlines()
    (first,) = [line for line in lines if "[1/2]" in line]
    assert first.endswith("; 20 s so far, about 20 s left")
    (last,) = [line for line in lines if "[2/2]" in line]
    assert last.endswith(" s)")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ttr-fig9",), "there is no experiment 'ttr-fig9'; there are ttr-fig2"),
        ((), "name one experiment"),
        (("ttr-fig2", "--all"), "name one experiment"),
        (("ttr-fig2", "--scale", "huge"), "Invalid value for '--scale'"),
        (("ttr-fig2", "--seeds", "0", "--scale", "smoke"), "--seeds must be at least 1"),
        (("ttr-fig2", "--jobs", "0", "--scale", "smoke"), "--jobs must be at least 1"),
        (("ttr-fig2", "--device", "tpu"), "--device 'tpu' is not here"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    result = invoke("reproduce", *arguments, "--out", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
