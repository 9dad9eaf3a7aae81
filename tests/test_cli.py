"""The command line: output, errors and exit codes."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import recollect as rc
from recollect.cli import app as cli
from recollect.cli import describe
from recollect.experiments import EXPERIMENTS

pytest.importorskip("typer")
import typer
from rich.cells import cell_len
from typer.testing import CliRunner, Result


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have unlimited width, for any terminal of the test run."""
    monkeypatch.delenv("COLUMNS", raising=False)


ROW_OF = functools.cache(describe._preset_row)


@pytest.fixture(autouse=True)
def _described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of `recollect zoo` is built once for all tests: all lines take two seconds."""
    monkeypatch.setattr(describe, "_preset_row", ROW_OF)


RECIPE = rc.Recipe(bias=rc.bias.Huber(threshold=0.5), retention=rc.retention.Decay(per="value"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.build(), list(arguments))


def refusal(*arguments: str) -> str:
    """Return the one sentence of a call that is refused."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (sentence,) = result.stderr.strip().split("\n")
    assert "Traceback" not in sentence
    return sentence


def test_version() -> None:
    assert call("--version").output == f"recollect {rc.__version__}\n"


def test_error_names_a_function_that_is_not_a_command() -> None:
    result = CliRunner().invoke(cli.build(), ["diagnose"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "No such command 'diagnose'. In Python it is rc.diagnose: see help(rc.diagnose)." in (
        result.stderr
    )
    other = CliRunner().invoke(cli.build(), ["annotations"], env={"COLUMNS": "200"}).stderr
    assert "No such command 'annotations'" in other and "Python" not in other


WITHOUT_TORCH = """
import contextlib, io, json, sys
import recollect_command
from recollect.cli.app import COMMANDS

names = [command.__name__ for command in COMMANDS]
calls = [[*x] for name in names for x in ((name, "--help"), (name, "--no-such-option"))]
for call in [*calls, *json.load(sys.stdin)]:
    sys.argv = ["recollect", *call]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            recollect_command.main()
            code = 0
        except SystemExit as leave:
            code = leave.code or 0
    loaded = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([call, code, out.getvalue(), err.getvalue(), loaded]))
"""
"""Runs calls in one process: the help of every command, a wrong option of each, and more."""

REFUSED_WITHOUT_TORCH = {
    "nope": "No such command",
    "recall": "In Python it is rc.recall",
    "explain": "Missing argument",
    "explain gated_delta_nt": "did you mean gated_delta_net or",
    "explain xyz": "recollect zoo lists all",
    "explain none.json": "there is no file none.json",
    "zoo --family": "requires an argument",
    "sizes --models glaa": "did you mean gla",
    "compare --models gla,glaa": "did you mean gla",
    "compare --models gla --steps x": "Invalid value",
    "compare --models none.toml": "there is no file none.toml",
    "train none.toml": "there is no file none.toml",
    "plan none.toml": "there is no file none.toml",
    "plan none.toml --devices 0": "Invalid value for '--devices'",
    "coordinates none.toml": "there is no file none.toml",
    "coordinates none.toml --widths a": "--widths must be numbers",
    "export none out": "there is no folder none",
    "generate folder --tokens 0": "Invalid value for '--tokens'",
    "adopt folder --tokens 0": "Invalid value for '--tokens'",
    "eval": "name a model and --tasks",
    "reproduce": "name one experiment",
    "compare --models gla --task nope": "'nope' is not one of 'text', 'mqar', 'capacity'",
    "compare --models gla --layer-options sme": "'sme' is not one of 'preset', 'same'",
    "reproduce ttr-fig2 --scale huge": "'huge' is not one of 'smoke', 'small', 'paper'",
    "bench --suite nope": "Invalid value for '--suite'",
    "bench --rounds 0": "Invalid value for '--rounds'",
    "page --systems glaa": "did you mean gla",
}


def test_help_version_sizes_and_refusals_do_not_import_torch(tmp_path: Path) -> None:
    """The import takes seconds of processor time."""
    printed = [[], ["--help"], ["--version"], ["sizes"], ["sizes", "--json"]]
    calls = [*printed, *(line.split() for line in REFUSED_WITHOUT_TORCH)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(Path(rc.__file__).parents[1])},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 2 * len(cli.COMMANDS) + len(calls)
    for call, code, out, err, loaded in results:
        assert loaded == [], call
        words = REFUSED_WITHOUT_TORCH.get(" ".join(call), "No such option")
        if call in printed[1:] or call[-1:] == ["--help"]:
            assert code == 0 and out, call
        elif call:
            assert code == 2 and words in err, (call, err)
    assert not list(tmp_path.iterdir())


def test_stored_sizes_equal_counted_sizes() -> None:
    pytest.importorskip("transformers")
    stored = json.loads(call("sizes", "--json").stdout)
    counted = describe._count_sizes(list(stored[0]["parameters"]))
    assert stored == counted, "store the new counts in src/recollect/cli/sizes.json"
    titans = json.loads(call("sizes", "--json", "--models", "titans").stdout)
    assert [row["parameters"] for row in titans] == [
        {"titans": row["parameters"]["titans"]} for row in counted
    ]


def test_command_line_choices_equal_those_of_experiments() -> None:
    from recollect.cli.compare import Task
    from recollect.cli.reproduce import Scale
    from recollect.experiments.comparison import tasks
    from recollect.experiments.framework import experiment

    assert (tuple(Task), get_args(Scale)) == (tasks.TASKS, experiment.SCALES)


def test_names_in_the_source_of_the_zoo_are_registered() -> None:
    from recollect.cli.options import _zoo_names

    registered = (*rc.zoo.names(), *rc.zoo.names(kind="hybrid"), *rc.zoo.variants())
    ours = [name for name in registered if rc.zoo.get(name).family in dir(rc.zoo)]
    assert sorted(_zoo_names()) == sorted(ours)


def test_zoo_lists_every_architecture() -> None:
    result = call("zoo")
    assert result.exit_code == 0
    for name in rc.zoo.names():
        assert name in result.stdout
    assert "α_t W_(t−1)" in result.stdout


def test_zoo_of_one_family() -> None:
    result = call("zoo", "--family", "delta_rule")
    assert "gated_delta_net" in result.stdout
    assert "retnet" not in result.stdout
    assert "has no family 'delta'" in refusal("zoo", "--family", "delta")


def test_zoo_since_a_year() -> None:
    years = {row["name"]: row["year"] for row in json.loads(call("zoo", "--json").stdout)}
    expected = {
        "softmax_attention": 2017,
        "gated_delta_net": 2024,
        "titans_mac": 2024,
        "atlas_mac": 2025,
        "moneta_h": 2025,
        "gated_delta_net_2": 2026,
    }
    assert {name: years[name] for name in expected} == expected
    recent = [row["name"] for row in json.loads(call("zoo", "--since", "2025", "--json").stdout)]
    assert recent == [name for name, year in years.items() if year >= 2025]
    assert 0 < len(recent) < len(years)
    assert "no architecture" in refusal("zoo", "--since", "2400")


@pytest.mark.parametrize(
    "arguments",
    [("zoo",), ("reproduce", "--list"), pytest.param(("sizes",), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_table_fits_every_terminal(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] == "sizes":
        pytest.importorskip("transformers")
    full = json.loads(call(*arguments, "--json").stdout)
    for width in (20, 40, 60, 80, 120) if arguments[0] != "sizes" else (40, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        result = call(*arguments)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        if arguments[0] != "reproduce":
            lines.pop()  # the sentence below the table, which terminals break
        # A combining overline is a character of width zero.
        assert max(map(cell_len, lines)) <= width
        for row in full:
            assert row["name"] in result.stdout.replace("\n", "").replace(" ", "")
            for parts in row.get("parameters", {}).values():
                assert f"{parts['total']:,}" in result.stdout
        if arguments == ("zoo",):
            assert "left out" in result.stdout or "algorithm:" in result.stdout


def test_the_zoo_in_a_pipe_has_120_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    page = call("zoo").stdout
    assert max(map(cell_len, page.splitlines())) <= 120
    assert "left out at 120 columns: memory, bias, retention, algorithm, has" in page
    monkeypatch.setenv("COLUMNS", "300")
    wide = call("zoo").stdout
    assert "left out" not in wide and "…" not in wide
    assert "optimality" in wide and "GradientDescent(batch_size=" in wide.replace("\n", "")


def test_the_zoo_has_a_column_of_fidelity() -> None:
    head, _, *rows = call("zoo").stdout.splitlines()
    begin, end = head.index("fidelity"), head.index("write")
    kinds = {row[:begin].split()[-1]: row[begin:end].strip() for row in rows if row[:2].strip()}
    assert kinds["softmax_attention"] == "exact"
    assert kinds["titans"] == "reconstruction"
    assert kinds["atlas"] == "approximation"
    assert kinds["samba"] == "reconstruction"


def test_help_shows_texts_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """``[run]`` and ``[optimizer]`` are not markup."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    for command in cli.COMMANDS:
        shown = " ".join(call(command.__name__, "--help").stdout.replace("│", " ").split())
        assert " ".join((command.__doc__ or "").split()) in shown
        for one in inspect.signature(command, eval_str=True).parameters.values():
            for option in getattr(one.annotation, "__metadata__", ()):
                assert " ".join((option.help or "").split()) in shown, command.__name__
    assert "in place of [run] out" in call("train", "--help").stdout
    assert "in place of [optimizer]" in call("train", "--help").stdout


def test_help_without_rich_has_no_backslashes() -> None:
    code = "from recollect.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TYPER_USE_RICH": "0"},
    )
    assert "in place of [run] out" in result.stdout
    assert "\\" not in result.stdout


def test_brackets_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in a text raise no error of rich."""
    from recollect.cli import compare as command
    from recollect.cli.console import make_console
    from recollect.cli.progress import CompareDisplay
    from recollect.experiments.comparison.comparison import Comparison
    from recollect.experiments.comparison.results import DEFAULTS, ModelRun
    from recollect.report import describe_environment

    name, reason = "mine[bold]", "see [mine/x] and [red]"
    run = ModelRun(
        task="text", model=name, parameters=1, state_bytes=1, grows=False, value=1.5, tokens=1
    )
    result = Comparison(
        runs=(run,),
        sizes={"text": DEFAULTS["text"]},
        seed=0,
        environment=describe_environment(),
        text={"source": "x", "sha256": "y"},
        failures=(("text", "theirs", reason),),
    )
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    console = make_console()
    command._show(console, result)
    with pytest.raises(typer.Exit):
        command._report_outcome(console, tmp_path / "none", result)
    display = CompareDisplay(console, models=1, tasks=1)
    display.on_start("text", name, 1, 1)
    console.print(display._render())
    assert output.getvalue().count(name) == 5  # table, line, measured value, live table, bar
    assert reason in output.getvalue()


def test_shared_reason_of_failures_is_printed_once() -> None:
    from recollect.experiments.comparison.comparison import Comparison
    from recollect.experiments.comparison.results import DEFAULTS
    from recollect.report import describe_environment

    result = Comparison(
        runs=(),
        sizes={"text": DEFAULTS["text"]},
        seed=0,
        environment=describe_environment(),
        failures=(
            ("text", "gla, seed 0", "no room"),
            ("text", "gla, seed 1", "no room"),
            ("mqar", "gla, seed 0", "no room"),
            ("text", "retnet, seed 0", "it diverged"),
        ),
    )
    assert result.failure_messages() == [
        "gla, seed 0, gla, seed 1 could not be trained on text: no room",
        "gla, seed 0 could not be trained on mqar: no room",
        "retnet, seed 0 could not be trained on text: it diverged",
    ]
    assert str(result).count("no room") == 2


def test_an_explanation_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminals limit the width; a pipe gets full lines."""
    full = call("explain", "titans").stdout
    assert full == f"{rc.explain('titans')}\n"
    monkeypatch.setenv("COLUMNS", "60")
    narrow = call("explain", "titans").stdout
    assert max(map(len, full.splitlines())) > 60 >= max(map(len, narrow.splitlines()))
    assert narrow.split() == full.split()
    labels = [line[:9] for line in full.splitlines()[1:]]
    assert [x[:9] for x in narrow.splitlines() if x[:9].strip()][-3:] == [
        x for x in labels if x.strip()
    ][-3:]


def test_zoo_as_json() -> None:
    rows = {row["name"]: row for row in json.loads(call("zoo", "--json").stdout)}
    assert list(rows) == [*rc.zoo.names(), *rc.zoo.names(kind="hybrid")]
    row = rows["gated_delta_net"]
    assert (row["kind"], row["engine"], row["bias"]) == ("matrix", "linear", "L2()")
    assert rows["titans_with_base"]["twin_of"] == "titans"
    assert row["properties"]["dynamic decay"] is True
    assert row["write"] == list(rc.explain("gated_delta_net").write_equations)
    assert rows["softmax_attention"]["state_bytes"] is None
    assert rows["softmax_attention"]["state_grows_per_token"] > 0


def test_explain_by_name() -> None:
    assert call("explain", "longhorn").stdout == f"{rc.explain('longhorn')}\n"
    forced = call("explain", "longhorn", "--engine", "reference").stdout
    assert "engine   reference" in forced


def test_explain_in_full() -> None:
    output = call("explain", "titans", "--full").stdout
    assert output == f"{rc.explain('titans', full=True)}\n"
    assert "\n         ρ_t = max(0, ⟨" in output


def test_explain_as_json() -> None:
    data = json.loads(call("explain", "retnet", "--json").stdout)
    assert {match["name"] for match in data["same_recipe_systems"]} == {
        "retnet",
        "lightning_attention",
    }
    assert rc.Recipe.from_dict(data["recipe"]) == rc.zoo.get("retnet").recipe


def test_explain_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(RECIPE.to_json(), encoding="utf-8")
    assert rc.load_recipe(path) == RECIPE
    assert call("explain", str(path)).stdout == f"{rc.explain(RECIPE)}\n"


TOML = """
schema = 2
bias = { member = "Huber", threshold = 0.5 }

[retention]
member = "Decay"
per = "value"
"""


def test_explain_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.TOML"
    path.write_text(TOML, encoding="utf-8")
    assert rc.load_recipe(path) == RECIPE
    assert "huber_0.5(W k_t − v_t)" in call("explain", str(path)).stdout


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.toml", "x == 1", "is not TOML"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.json", "3", "Recipe is a mapping of choices, not int"),
        ("a.json", '{"bias": {"member": "L3"}}', "no member named 'L3'"),
        ("a.json", '{"bias": {"member": "L2", "p": 3}}', "L2 has no field 'p'"),
        ("a.json", '{"bais": {"member": "L2"}}', "no choice 'bais'"),
        ("a.json", '{"schema": 99}', "schema 99"),
        ("a.json", '{"bias": {"member": "Huber", "threshold": NaN}}', "threshold"),
        ("a.json", '{"memory": {"member": "LocalConstant"}}', "context.KernelWeighted"),
        ("a.toml", "[algorithm]\nmember = 'Muon'\nlr = 2020-01-01", "lr"),
        ("a.yaml", "bias: L2", "neither .json nor .toml"),
    ],
)
def test_files_without_a_recipe(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    sentence = refusal("explain", str(path))
    assert reason in sentence
    assert name in sentence


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "there is no file" in refusal("explain", str(tmp_path / "none.json"))
    (tmp_path / "folder.json").mkdir()
    assert "cannot be read" in refusal("explain", str(tmp_path / "folder.json"))
    (tmp_path / "latin.json").write_bytes(b"\xff")
    assert "not UTF-8" in refusal("explain", str(tmp_path / "latin.json"))


def test_a_file_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "retnet").mkdir()
    assert call("explain", "retnet").exit_code == 0


def test_errors_are_one_sentence() -> None:
    assert "did you mean gated_delta_net" in refusal("explain", "gated_delta_nt")
    assert "cannot run this recipe" in refusal("explain", "softmax_attention", "--engine", "linear")
    assert "unknown" in refusal("explain", "retnet", "--engine", "fast")


def test_error_without_typer_names_the_package_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from recollect.cli import main\n"
        "main()\n"
    )  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert (
        result.stderr.strip().split("\n")[-1].endswith('or in its checkout pip install -e ".[cli]"')
    )
    assert "Traceback" not in result.stderr


NEEDS_TRANSFORMERS = (
    ("compare", "--models", "retnet"),
    ("train", "run.toml"),
    ("sizes", "--models", "gla"),
    ("generate", "folder"),
    ("adopt", "folder"),
    ("eval", "folder", "--tasks", "local_text"),
    ("bench", "--suite", "train"),
)
WITHOUT_TRANSFORMERS = """
import json, sys
sys.modules["transformers"] = None
from typer.testing import CliRunner
from recollect.cli import app as cli
from recollect.cli import describe
for line in sys.stdin:
    found = CliRunner().invoke(cli.build(), json.loads(line))
    print(json.dumps([found.exit_code, found.stdout, found.stderr]))
"""


EXPERIMENT_CALLS = (
    ("reproduce", "--list", "--json"),
    ("reproduce", "--list"),
    ("reproduce", "am-state-exchange", "--scale", "smoke", "--out", "runs"),
)


@pytest.fixture(scope="module")
def results_without_transformers(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[tuple[str, ...], tuple[int, str, str]]]:
    """Return a folder, and exit code, output and errors of calls in it without transformers."""
    folder = tmp_path_factory.mktemp("without_transformers")
    (folder / "run.toml").touch()
    calls = (*EXPERIMENT_CALLS, *NEEDS_TRANSFORMERS)
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS],
        input="\n".join(map(json.dumps, calls)),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(rc.__file__).parents[1])},
    )
    return folder, dict(zip(calls, map(json.loads, result.stdout.splitlines()), strict=True))


def test_list_of_experiments_without_transformers(
    results_without_transformers: tuple[Path, dict[tuple[str, ...], tuple[int, str, str]]],
) -> None:
    """Nor do experiments that train no language model."""
    folder, results = results_without_transformers
    data, shown, run = (results[call] for call in EXPERIMENT_CALLS)
    assert data[0] == shown[0] == run[0] == 0, (data, shown, run)
    names = [row["name"] for row in json.loads(data[1])]
    assert names == list(EXPERIMENTS)
    assert all(name in shown[1] for name in names)
    assert list((folder / "runs").glob("*/report.html"))


def test_error_names_a_missing_extra(
    results_without_transformers: tuple[Path, dict[tuple[str, ...], tuple[int, str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, results = results_without_transformers
    for call_arguments in NEEDS_TRANSFORMERS:
        command, (code, _, stderr) = call_arguments[0], results[call_arguments]
        assert code == 2
        (sentence,) = stderr.strip().split("\n")
        assert sentence.startswith(f"recollect {command}: ")
        assert sentence.endswith(
            'transformers, which is not installed: pip install -e ".[lm]" in its checkout'
        )
    monkeypatch.setitem(sys.modules, "datasets", None)
    sentence = refusal("compare", "--models", "retnet", "--dataset", "x", "--out", str(tmp_path))
    assert sentence == (
        "recollect compare: this needs datasets, which is not installed: "
        'pip install -e ".[lm]" in its checkout'
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = refusal("compare", "--models", "retnet", "--out", str(tmp_path / "new"))
    assert sentence == (
        "recollect compare: this needs matplotlib, which is not installed: "
        'pip install -e ".[plot]" in its checkout'
    )
    assert not (tmp_path / "new").exists()  # it is refused before training
