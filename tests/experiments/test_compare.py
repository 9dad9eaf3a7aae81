"""`compare` at toy sizes: measurements, equal conditions, interrupts, failures, the report."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from torch import Tensor

import recollect as rc

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from recollect.cli.compare import _show
from recollect.cli.progress import CompareDisplay
from recollect.experiments import Schedule, Sizes, compare, read_corpus
from recollect.experiments.comparison.compare import build_configs, resolve_model
from recollect.experiments.comparison.report import (
    comparison_caveats,
    eval_size_note,
    options_table,
    table,
)
from recollect.experiments.comparison.results import DEFAULTS, History, ModelRun, NoProgress
from recollect.experiments.comparison.tasks import RECALL_TASKS
from recollect.experiments.comparison.training import Job, run_jobs
from recollect.report import describe_environment

SMALL = {
    "text": Sizes(width=16, depth=1, heads=2, length=32, schedule=Schedule(steps=4, batch=2)),
    "mqar": Sizes(width=16, depth=1, heads=1, length=48, schedule=Schedule(steps=3, batch=4)),
    "capacity": Sizes(
        width=16, depth=1, heads=1, head_dim=8, length=48, schedule=Schedule(steps=3, batch=4)
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    paragraphs = [" ".join(draw.choices(words, k=40)) + "." for _ in range(150)]
    path.write_text("\n\n".join(paragraphs))
    return str(path)


def run(
    models: Sequence[Any], tasks: Sequence[str], text: str, **options: Any
) -> rc.experiments.Comparison:
    read = text if "text" in tasks else None
    return compare(models, tasks, text=read, sizes=SMALL, **options)


def test_models_have_equal_conditions_and_reports_are_complete(text: str, tmp_path: Path) -> None:
    result = run(["linear_attention", "softmax_attention"], ["text", "mqar"], text)
    assert [(r.task, r.model) for r in result.runs] == [
        (task, model)
        for task in ("text", "mqar")
        for model in ("linear_attention", "softmax_attention")
    ]
    for task in ("text", "mqar"):
        first, second = result.of(task)
        assert (
            first.tokens
            == second.tokens
            == SMALL[task].schedule.steps * (SMALL[task].schedule.batch * SMALL[task].length)
        )
        # Feed-forward widths are multiples of 8: counts agree to half a step.
        assert abs(first.parameters - second.parameters) <= 12 * SMALL[task].width * 1
        assert not first.grows
        assert second.grows
        assert first.finished
        assert first.tokens_per_second > 0
    assert result.bigram is not None
    assert 0 < result.bigram < 8
    recall = RECALL_TASKS["mqar"]
    assert set(result.of("mqar")[0].by_pairs) == {*recall.train_pairs, *recall.test_pairs}

    paths = result.save(tmp_path, command="recollect compare ...")
    page = paths["report"].read_text()
    for word in ("linear_attention", "softmax_attention", "bigram", "recollect compare"):
        assert word in page
    data = json.loads(paths["json"].read_text())
    assert data["bigram"] == result.bigram
    assert data["environment"]["commit"]
    rows = list(csv.DictReader(paths["csv"].read_text().splitlines()))
    assert [float(row["value"]) for row in rows] == [r.value for r in result.runs]
    assert paths["text-curves"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_note_on_a_value_that_differs_from_the_end_of_its_curve(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recollect.experiments.comparison import tasks
    from recollect.tasks import load_text

    same = run(["gla"], ["text", "mqar"], text)
    few, many = same.eval_sizes["text"]
    held_out = load_text(text).heldout.numel() - 1
    assert few == many == held_out, "less text than either needs"
    (read,) = same.of("text")
    assert read.value == pytest.approx(read.curve[-1][1], rel=1e-6)
    page = same.save(tmp_path / "same")["report"].read_text()
    assert "so that a curve may end elsewhere" in page.split("<h2>Recall: accuracy")[1]
    assert "so that a curve may end elsewhere" not in page.split("<h2>Recall: accuracy")[0]
    assert same.eval_sizes["mqar"] == (64, 256)

    monkeypatch.setitem(tasks.EVAL_SIZES, "text", (64, 100_000))
    other = run(["gla"], ["text"], text)
    assert other.eval_sizes["text"] == (64, held_out)
    assert other.to_dict()["measured"] == {"text": [64, held_out]}
    (result,) = other.runs
    assert result.value is not None and result.value == read.value
    assert abs(result.value - result.curve[-1][1]) > 1e-4
    page = other.save(tmp_path / "other")["report"].read_text()
    notes = (
        f"on {held_out:,} bytes of held-out text; points of the learning curves on 64 of them, "
        f"evenly spread, so that a curve may end elsewhere (gla ends at {result.curve[-1][1]:.3f} "
        f"there and at {result.value:.3f} here)."
    )
    assert notes in page, "beside the table"
    assert f"Each point is measured on 64 of the {held_out:,} bytes of the table." in page
    console = Console(file=io.StringIO(), width=400)
    _show(console, other)
    assert isinstance(console.file, io.StringIO) and notes in console.file.getvalue()


def test_capacity_asks_more_pairs_than_a_memory_has_dimensions(tmp_path: Path) -> None:
    result = run(["linear_attention", "titans"], ["capacity"], "")
    recall, size = RECALL_TASKS["capacity"], DEFAULTS["capacity"]
    assert size.head_dim is not None
    assert max(recall.test_pairs) > size.head_dim
    linear, titans = result.of("capacity")
    assert set(linear.by_pairs) == {*recall.train_pairs, *recall.test_pairs}
    # One memory of 8 x 8 in float32, in addition to the convolution's tail of q, k and v.
    assert linear.state_bytes - (8 * 8 * 4 + 3 * 3 * 8 * 4) in (0, 8)
    assert titans.state_bytes > linear.state_bytes
    paths = result.save(tmp_path)
    assert {"capacity-curves", "capacity-pairs", "capacity-state"} <= paths.keys()
    assert "Keys and values have 8 channels" in paths["report"].read_text()


def test_the_same_seed_gives_the_same_numbers(text: str) -> None:
    first, second = (run(["gla"], ["text"], text, seed=3).runs[0] for _ in range(2))
    assert first.value == second.value
    assert first.curve == second.curve
    assert run(["gla"], ["text"], text, seed=4).runs[0].value != first.value


def test_custom_recipe_is_compared(text: str) -> None:
    mine = rc.Recipe(retention=rc.retention.Decay(per="key"), bias=rc.bias.DotProduct())
    result = run([("mine", mine), "retnet"], ["text"], text)
    assert [r.model for r in result.runs] == ["mine", "retnet"]


def test_all_models_can_have_the_same_layer_options(text: str) -> None:
    """Softmax attention gets the short convolution and output gate of Gated DeltaNet."""
    mine = ("mine", rc.Recipe(), rc.LayerOptions(conv_size=0, token_shift="learned", qk_norm="rms"))
    models = ["gated_delta_net", "softmax_attention", "samba", "ffn_swiglu", mine]
    result = run(models, ["text"], text, layer_options="same")
    names = "gated_delta_net softmax_attention-same samba-same ffn_swiglu mine-same"
    assert [r.model for r in result.runs] == names.split()
    by_layer = {name: options for r in result.runs for name, options in r.options.items()}
    assert len(by_layer) == 6, "samba has two layers"
    assert by_layer.pop("ffn_swiglu")["conv_size"] == 0, "it has no sequence to convolve"
    shared = {
        "conv_size": 4, "conv_activation": "silu", "token_shift": "none", "value_skip": False,
        "output_norm": "rms", "output_gate": "silu",
    }  # fmt: skip
    for name, options in by_layer.items():
        assert options.items() >= shared.items(), name
    attention = by_layer["softmax_attention"]
    assert (attention["qk_norm"], attention["rope_theta"]) == ("none", 10000.0), "the preset's own"
    assert by_layer["mine"]["qk_norm"] == "rms"
    assert result.runs[1].options["softmax_attention"] == attention
    bare, gated = (
        run(["softmax_attention"], ["text"], text, layer_options=which).runs[0]
        for which in ("preset", "same")
    )
    assert bare.value != gated.value and gated.parameters > bare.parameters
    with pytest.raises(ValueError, match="layer_options must be 'preset' or 'same', not 'alike'"):
        run(["gla"], ["text"], text, layer_options="alike")


def test_a_text_is_read_as_train_reads_it(text: str, tmp_path: Path) -> None:
    """One file, several files, a pattern, a folder and JSON lines of the same paragraphs."""
    paragraphs = Path(text).read_text().split("\n\n")
    half = len(paragraphs) // 2
    for number, part in enumerate((paragraphs[:half], paragraphs[half:])):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(part))
    lines = tmp_path / "lines"
    lines.mkdir()
    rows = "\n".join(json.dumps({"id": i, "body": x}) for i, x in enumerate(paragraphs))
    (lines / "all.jsonl").write_text(rows)
    (lines / "notes.csv").write_text("no text")
    one = rc.tasks.load_text(text)
    two = [str(tmp_path / f"{number}.txt") for number in (0, 1)]
    for paths in (text, Path(text), two, str(tmp_path / "?.txt")):
        assert read_corpus(paths).sha256 == one.sha256
    with pytest.raises(ValueError, match="read_corpus: text is empty"):
        read_corpus([])
    assert read_corpus(lines, column="body").sha256 == one.sha256
    assert read_corpus([*two, str(lines)], column="body").sha256 == one.sha256, "no paragraph twice"
    by_path, by_folder = (run(["gla"], ["text"], x) for x in (text, two))
    assert by_folder.text["source"] == ", ".join(two)
    assert by_path.runs[0].value == by_folder.runs[0].value
    with pytest.raises(ValueError, match=r"text: no file matches '.*/none' \(in a folder: \.txt"):
        read_corpus(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"all.jsonl:1: no field 'text'; its fields are: id, body"):
        read_corpus(lines)


def test_the_command_takes_several_texts_and_a_column(text: str, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from recollect.cli import build

    rows = [json.dumps({"body": x}) for x in Path(text).read_text().split("\n\n")]
    for number, part in enumerate((rows[:70], rows[70:])):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(part))
    small = {"steps": 2, "width": 16, "depth": 1, "heads": 2, "length": 32, "batch": 2}
    sizes = [part for name, size in small.items() for part in (f"--{name}", str(size))]
    texts = [part for number in range(2) for part in ("--text", str(tmp_path / f"{number}.jsonl"))]
    arguments = ["compare", "--models", "gla", *sizes, "--out", str(tmp_path / "out"), *texts]
    finished = CliRunner().invoke(build(), [*arguments, "--column", "body", "--json"])
    assert finished.exit_code == 0, finished.output
    stored = json.loads((tmp_path / "out" / "results.json").read_text())["text"]
    assert stored["sha256"] == rc.tasks.load_text(text).sha256
    refused = CliRunner().invoke(build(), arguments)
    assert refused.exit_code == 2
    assert "its fields are: body (name one as --column); repair it\n" in refused.stderr
    none = CliRunner().invoke(build(), [*arguments, "--text", "nowhere"])
    assert "--text: no file matches 'nowhere'" in none.stderr
    column_only = CliRunner().invoke(build(), ["compare", "--models", "gla", "--column", "body"])
    assert "--column names a field of --text or --dataset" in column_only.stderr


def test_a_report_lists_the_options_that_differ(text: str, tmp_path: Path) -> None:
    """Between these presets: the short convolution, the norms, the gate and the rotation."""
    names = ["gated_delta_net", "softmax_attention"]
    result = run(names, ["text"], text)
    options = options_table(result, "text")
    assert options is not None
    gated, attention = (dict(zip(options.column_names, row, strict=True)) for row in options.rows)
    presets = [rc.zoo.get(name).options for name in names]
    differing = {
        field.name
        for field in dataclasses.fields(rc.LayerOptions)
        if getattr(presets[0], field.name) != getattr(presets[1], field.name)
    }
    assert {*options.column_names[2:]} == differing >= {"conv_size", "output_gate"}
    assert (gated["conv_size"], gated["output_gate"], gated["rope_theta"]) == ("4", "silu", None)
    assert (attention["conv_size"], attention["output_gate"]) == ("0", None)
    assert attention["rope_theta"] == "10000.0"
    page = result.save(tmp_path)["report"].read_text()
    assert "Layer options in which the models differ" in page and "--layer-options same" in page
    loaded = rc.experiments.load_comparison(tmp_path)
    assert options_table(loaded, "text") == options
    console = Console(file=io.StringIO(), width=200)
    _show(console, result)
    assert isinstance(console.file, io.StringIO)
    assert "Layer options in which" in console.file.getvalue()
    alike = run(names, ["text"], text, layer_options="same")
    remaining = options_table(alike, "text")
    assert remaining is not None and {*remaining.column_names[2:]} == {"qk_norm", "rope_theta"}
    assert options_table(run(["gated_delta_net", "delta_net"], ["text"], text), "text") is None


def test_the_byte_bigram_is_a_row_of_the_page(text: str, tmp_path: Path) -> None:
    result = run(["gla", "retnet"], ["text", "mqar"], text)
    *models, last = table(result, "text").rows
    assert [row[0] for row in models] == ["gla", "retnet"]
    assert last[:2] == ["byte bigram", f"{result.bigram:.3f}"]
    page = result.save(tmp_path)["report"].read_text()
    text_table, _, recall_table = page.partition("<h2>Recall")
    assert '<th scope="row">byte bigram</th>' in text_table
    assert '<th scope="row">byte bigram</th>' not in recall_table


class Stopper:
    """Interrupts a model after some steps, like Ctrl-C."""

    def __init__(self, model: str, num_steps: int) -> None:
        self.model, self.num_steps = model, num_steps
        self.events: list[tuple[str, str]] = []

    def on_start(self, task: str, model: str, parameters: int, steps: int) -> None:
        self.events.append(("start", model))

    def on_step(
        self, task: str, model: str, step: int, loss: float | None, history: History
    ) -> None:
        if model == self.model and step >= self.num_steps:
            raise KeyboardInterrupt

    def on_end(self, run: ModelRun) -> None:
        self.events.append(("end", run.model))

    def on_failure(self, task: str, model: str, message: str) -> None:
        self.events.append(("failure", model))


def test_interrupt_stores_finished_runs(text: str, tmp_path: Path) -> None:
    models = ["retnet", "gla", "delta_net"]
    result = run(models, ["text"], text, progress=Stopper("gla", num_steps=3))
    assert result.interrupted
    assert [(r.model, r.finished) for r in result.runs] == [("retnet", True), ("gla", False)]
    half = result.runs[1]
    assert half.tokens == 3 * SMALL["text"].schedule.batch * SMALL["text"].length
    assert half.curve
    page = result.save(tmp_path)["report"].read_text()
    assert "stopped early" in page


def test_interrupt_in_a_callback_stores_the_model(text: str) -> None:
    class Late(Stopper):
        def on_end(self, run: ModelRun) -> None:
            raise KeyboardInterrupt

    result = run(["retnet", "gla"], ["text"], text, progress=Late("nobody", 0))
    assert result.interrupted
    assert [(r.model, r.finished) for r in result.runs] == [("retnet", True)]


def test_other_models_are_kept_if_one_cannot_be_built(text: str) -> None:
    broken = ("broken", rc.Recipe(memory=rc.memory.MLP(residual=False, depth=1, bias=True)))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    watcher = Stopper("nobody", 0)
    watcher.on_start = lambda task, model, parameters, steps: (  # type: ignore[method-assign]
        fail() if model == "broken" else None
    )
    result = run([broken, "retnet"], ["text"], text, progress=watcher)
    assert [r.model for r in result.runs] == ["retnet"]
    assert result.failures == (("text", "broken", "no room"),)


@pytest.mark.slow
def test_processes_equal_one_process(text: str) -> None:
    watcher = Stopper("nobody", 0)

    @rc.member
    class Nameless(rc.bias.Bias):
        """No process can import it, because its class is local to a function."""

        def loss(self, prediction: Tensor, value: Tensor, gates: Any = None) -> Tensor:
            return (prediction - value).square().sum(-1)

    models = ["retnet", ("nameless", rc.Recipe(bias=Nameless())), "delta_net"]
    single = run(["retnet", "delta_net"], ["text"], text, parameters=12_000)
    shared = run(models, ["text"], text, parameters=12_000, jobs=2, progress=watcher)
    assert [r.model for r in shared.runs] == ["retnet", "delta_net"]
    for one, other in zip(single.runs, shared.runs, strict=True):
        assert other.value == pytest.approx(one.value, abs=1e-6)
        assert [at for at, _ in other.curve] == [at for at, _ in one.curve]
        assert (other.tokens, other.parameters) == (one.tokens, one.parameters)
    assert shared.environment.threads == 1
    ((_, failed, reason),) = shared.failures
    assert failed == "nameless"
    assert "no member named 'Nameless' is registered: import the module" in reason
    assert not shared.interrupted
    assert (shared.processes, single.processes) == (2, 1)
    assert ("failure", "nameless") in watcher.events
    for model in ("retnet", "delta_net"):
        assert watcher.events.index(("start", model)) < watcher.events.index(("end", model))


class Fatal:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


@pytest.mark.slow
def test_a_model_whose_process_dies_is_a_failure_with_its_reason() -> None:
    size = SMALL["mqar"]
    broken = {"fatal": Fatal(), "bound": lambda: None}
    jobs = [
        Job(task="mqar", model=name, config=cast(Any, config), size=size, seed=0)
        for name, config in broken.items()
    ]
    outcomes = {job.model: str(outcome) for job, outcome in run_jobs(jobs, None, 2, NoProgress())}
    assert "its process died" in outcomes["fatal"]
    assert "cannot be sent to another process" in outcomes["bound"]


def compared_side_by_side(**options: Any) -> tuple[CompareDisplay, str]:
    """Return a display that received three models, and its output."""
    output = io.StringIO()
    display = CompareDisplay(Console(file=output, width=120, **options), models=3, tasks=1)
    with display:
        for model in ("a", "b"):
            display.on_start("text", model, 10, 5)
        display.on_step("text", "b", 1, 2.0, History(tokens=1234, seconds=1.0, curve=[(9, 0.25)]))
        display.live_display.refresh()
        display.on_failure("text", "a", "no room")
        display.on_failure("text", "c", "never began")
        display.on_end(
            ModelRun(task="text", model="b", parameters=10, state_bytes=1, grows=False, value=1.5)
        )
        display.on_step("text", "b", 2, 2.0, History())  # received late
        display.live_display.refresh()
    return display, output.getvalue()


def test_a_display_follows_runs_side_by_side() -> None:
    display, output = compared_side_by_side()
    assert not display.running
    assert display.bars.task_ids == []
    assert "text: b 1.500" in output
    assert "text: a failed" in output
    assert "measured" not in output, "no table where nobody looks"


def test_a_terminal_shows_a_table_and_no_lines() -> None:
    _, output = compared_side_by_side(force_terminal=True)
    assert "failed" not in output
    for shown in ("[2/3] text: b", "1/5", "1,234", "2.000", "0.250", "1.500"):
        assert shown in output


@pytest.mark.slow
def test_interrupt_stops_every_process_and_stores_finished_runs(text: str) -> None:
    long = SMALL["mqar"].replace(steps=3000)
    watcher = Stopper("gla", num_steps=1)
    result = compare(
        ["gla", "retnet", "delta_net"], ["mqar"], sizes={"mqar": long}, jobs=2, progress=watcher
    )
    assert result.interrupted
    assert 1 <= len(result.runs) <= 2, "the third never began"
    assert all(not r.finished and r.tokens < 3000 * 4 * 48 for r in result.runs)


def test_sizes_of_a_single_task() -> None:
    single = compare("gla", "mqar", sizes=SMALL["mqar"])
    by_task = compare("gla", "mqar", sizes=SMALL)
    assert single.sizes == by_task.sizes == {"mqar": SMALL["mqar"]}
    assert single.runs[0].value == by_task.runs[0].value


@pytest.mark.parametrize(
    ("models", "tasks", "says"),
    [
        ([], ["text"], "at least one model"),
        (["gla", "gla"], ["text"], "named twice"),
        (["gla"], ["poetry"], "unknown task 'poetry'"),
        (["glaa"], ["text"], "gla"),
    ],
)
def test_refusals(models: list[str], tasks: list[str], says: str, text: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(models, tasks, text)
    with pytest.raises(ValueError, match="jobs must be a whole number >= 1, not 0"):
        run(["gla"], ["text"], text, jobs=0)


def test_keys_of_another_size() -> None:
    """A memory has V × key_dim numbers, and a preset with an explicit size keeps it."""
    custom = ("own", rc.Recipe(), rc.LayerOptions(key_dim=5))

    def key_dims(size: Sizes) -> list[int | None]:
        configs = build_configs(
            [resolve_model(model) for model in (custom, "retnet")],
            8,
            size,
            "auto",
            None,
            conv=False,
        )
        leaves = [config.mixer(name).leaves for config in configs for name in config.recipes]
        return [leaf.options.key_dim for parts in leaves for leaf in parts.values()]

    small = SMALL["text"].replace(key_dim=4)
    assert key_dims(small) == [5, 4]
    assert key_dims(SMALL["text"]) == [5, None]
    with pytest.raises(ValueError, match="Sizes: key_dim must be a whole number >= 1, not 0"):
        small.replace(key_dim=0)


def test_sizes_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="Schedule: steps must be a whole number >= 1, not 0"):
        DEFAULTS["text"].replace(steps=0)
    assert DEFAULTS["text"].replace().schedule == DEFAULTS["text"].schedule


def test_several_seeds_have_mean_and_deviation(text: str, tmp_path: Path) -> None:
    """Each seed equals the comparison of that seed; mean and deviation by hand."""
    models = ["gla", "retnet"]
    three = run(models, ["text"], text, seed=3, seeds=3)
    single = [run(models, ["text"], text, seed=seed) for seed in (3, 4, 5)]
    assert [(r.model, r.seed) for r in three.runs] == [
        (model, seed) for seed in (3, 4, 5) for model in models
    ]
    for model in models:
        values = [r.value for one in single for r in one.of("text") if r.model == model]
        assert [r.value for r in three.of("text") if r.model == model] == values
        assert None not in values
        numbers = np.array(values, dtype=float)
        (summary,) = [one for one in three.summaries("text") if one.model == model]
        assert summary.mean == pytest.approx(numbers.mean())
        assert summary.sd == pytest.approx(numbers.std(ddof=1))
        assert summary.format() == f"{numbers.mean():.3f} ± {numbers.std(ddof=1):.3f}"
        assert summary.format() in str(three) and summary.format() in repr(three)
    paths = three.save(tmp_path)
    page, data = paths["report"].read_text(), json.loads(paths["json"].read_text())
    assert "seeds 3 to 5 (the mean ± the standard deviation of 3)" in page
    assert "3 of 3 seeds" in page and " ± " in page
    assert data["seeds"] == 3
    assert [one["seeds"] for one in data["summary"]] == [[3, 4, 5], [3, 4, 5]]
    first = data["summary"][0]
    assert first["min"] <= first["value"] <= first["max"] and first["sd"] > 0
    rows = list(csv.DictReader(paths["csv"].read_text().splitlines()))
    assert [int(row["seed"]) for row in rows] == [3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("curves", "values", "says"),
    [
        ([0.8341], [0.8339], ""),
        ([0.834], [0.821], "gla ends at 0.834 there and at 0.821 here"),
        ([0.5, 0.7], [0.6, 0.8], "gla's mean ends at 0.600 there and at 0.700 here"),
        ([0.5, 0.7], [0.7, 0.5], ""),
    ],
)
def test_notes_on_ends_of_curves_compare_printed_values(
    curves: list[float], values: list[float], says: str
) -> None:
    """Numbers that print alike, or a single seed next to a mean, would mislead."""
    runs = tuple(
        ModelRun(
            task="mqar",
            model="gla",
            parameters=1,
            state_bytes=1,
            grows=False,
            value=value,
            curve=((9, end),),
            tokens=9,
            seed=seed if len(curves) > 1 else None,
        )
        for seed, (end, value) in enumerate(zip(curves, values, strict=True))
    )
    result = rc.experiments.Comparison(
        runs=runs,
        sizes={"mqar": SMALL["mqar"]},
        seed=0,
        seeds=len(curves),
        environment=describe_environment(),
        eval_sizes={"mqar": (64, 256)},
    )
    assert "channels. Trained on" in table(result, "mqar").caption, "of one head"
    ends = f"a curve may end elsewhere ({says})." if says else "a curve may end elsewhere."
    assert ends in eval_size_note(result, "mqar")


@pytest.mark.parametrize(
    ("names", "tokens", "says"),
    [
        (["gla", "softmax_attention"], 5, "With 0.5 training tokens per parameter"),
        (["gla"], 199, "With 20 training tokens per parameter"),
        (["gla", "mine"], 200, ""),
    ],
)
def test_caveats_of_a_table_of_text(names: list[str], tokens: int, says: str) -> None:
    conv = {name: 0 if name == "softmax_attention" else 4 for name in names}
    runs = tuple(
        ModelRun(
            task=task, model=name, parameters=10, state_bytes=1, grows=False, value=1.0, curve=(),
            tokens=tokens, options={name: {"conv_size": conv[name]}},
        )
        for task in ("text", "mqar")
        for name in names
    )  # fmt: skip
    result = rc.experiments.Comparison(
        runs=runs, sizes=dict(SMALL), seed=0, environment=describe_environment()
    )
    caveats = comparison_caveats(result, "text")
    assert caveats.startswith(says) and (not says) == (not caveats)
    bare = "softmax_attention has no short convolution, which helps small models to begin."
    assert (bare in caveats) == ("softmax_attention" in names)
    assert comparison_caveats(result, "mqar") == ""


@pytest.mark.slow
def test_two_seeds_have_both_values() -> None:
    two = run(["gla"], ["mqar"], "", seeds=2, jobs=2)
    low, high = sorted(r.value or 0.0 for r in two.runs)
    (summary,) = two.summaries("mqar")
    assert summary.format() == f"{(low + high) / 2:.3f} ({low:.3f}–{high:.3f})"
    assert summary.sd is None
    (mean, minimum, greatest) = summary.by_pairs[4]
    each = [r.by_pairs[4] for r in two.runs]
    assert (mean, minimum, greatest) == (sum(each) / 2, min(each), max(each))


def test_one_seed_is_reported_as_before(text: str, tmp_path: Path) -> None:
    """No field and no cell for seeds."""
    one = run(["gla"], ["text"], text)
    data = one.to_dict()
    assert list(data) == [
        *("runs", "sizes", "seed", "environment", "bigram", "text", "chance", "interrupted"),
        *("processes", "failures", "measured", "schema"),
    ]
    (row,) = cast(list[dict[str, Any]], data["runs"])
    assert list(row) == [
        *("task", "model", "parameters", "state_bytes", "grows", "value", "by_pairs", "curve"),
        *("tokens", "tokens_per_second", "seconds", "cpu_seconds", "finished", "options"),
    ]
    paths = one.save(tmp_path)
    assert paths["csv"].read_text().startswith("task,model,value,parameters,")
    assert "seed 0. The feed-forward" in paths["report"].read_text()


def test_a_comparison_prints_its_tables(text: str) -> None:
    result = run(["gla", "retnet"], ["text", "mqar"], text)
    lines = str(result).splitlines()
    assert lines[0] == "Text: held-out bits per byte (lower is better)"
    assert lines[1].split()[:2] == ["model", "bits"]
    for line, one in zip(lines[2:4], result.of("text"), strict=True):
        assert line.split()[:2] == [one.model, f"{one.value:.3f}"]
    assert lines[4].split()[:3] == ["byte", "bigram", f"{result.bigram:.3f}"]
    assert len({len(line) for line in lines[1:4]}) == 1, "columns are aligned"
    values = {one.model: f"{one.value:.3f}" for one in result.of("text")}
    assert repr(result).startswith(
        f"Comparison(text: gla {values['gla']}, retnet {values['retnet']}; mqar: gla "
    )
    assert len(repr(result)) < 200


def test_interrupt_among_several_seeds_stores_finished_ones() -> None:
    result = run(["gla"], ["mqar"], "", seeds=3, progress=Stopper("gla, seed 1", num_steps=1))
    assert result.interrupted
    assert [(r.seed, r.finished) for r in result.runs] == [(0, True), (1, False)]
    (summary,) = result.summaries("mqar")
    assert summary.mean == result.runs[0].value
    assert "1 of 3 seeds" in str(result)


def test_diverged_model_is_reported_and_others_are_kept(text: str) -> None:
    sizes = {"text": SMALL["text"].replace(steps=60, lr=1e4)}
    result = compare(["gla", "retnet"], ["text"], text=text, sizes=sizes)
    assert {model for _, model, _ in result.failures} == {"gla", "retnet"}
    for _, _, reason in result.failures:
        assert reason.startswith("training diverged at step "), reason
        assert "layer 0, in model.blocks.0.mlp." in reason and reason.endswith("take a lower lr")


def test_missing_device_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^compare: device 'cuda:99' is not here: torch sees cpu"):
        run(["gla"], ["text"], text, device="cuda:99")
    with pytest.raises(ValueError, match=r"compare: seeds must be a whole number from 1 to"):
        run(["gla"], ["text"], text, seeds=0)
    result = run(["gla"], ["text"], text, device="cpu")
    assert result.environment.device_type == "cpu"
