"""Commands that train and measure, at toy sizes."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from recollect.benchmarks.results import Case
from recollect.benchmarks.suites import SUITES, CaseSpec, Shape
from recollect.cli import build


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(), list(arguments))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    path = folder / "mine.txt"
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) + "." for _ in range(150)))
    return path


TINY = ("--steps", "2", "--width", "16", "--depth", "1")


def test_compare_trains_reports_and_prints_json(text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[bias]\nmember = "DotProduct"\n[retention]\nmember = "Decay"\nper = "key"\n')
    out = tmp_path / "out"
    models = f"retnet,{recipe}"
    result = invoke(
        "compare", "--models", models, "--text", str(text), "--out", str(out), "--json", *TINY
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [run["model"] for run in data["runs"]] == ["retnet", "mine"]
    assert (out / "report.html").exists()
    assert json.loads((out / "results.json").read_text()) == data


def test_compare_takes_several_seeds_and_a_device(text: Path, tmp_path: Path) -> None:
    command = ("compare", "--models", "retnet", "--text", str(text), "--out", str(tmp_path), *TINY)
    result = invoke(*command, "--seeds", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    values = [run["value"] for run in data["runs"]]
    (row,) = data["summary"]
    assert row["seeds"] == [0, 1]
    assert (row["min"], row["max"]) == (min(values), max(values))
    assert f"({min(values):.3f}–{max(values):.3f})" in (tmp_path / "report.html").read_text()
    shown = invoke(*command, "--seeds", "2")
    assert f"({min(values):.3f}–{max(values):.3f})" in shown.stdout
    for line in ("[1/2] text: retnet, seed 0", "[2/2] text: retnet, seed 1"):
        assert line in shown.stdout


def test_compare_streams_a_dataset(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"text": paragraph} for paragraph in text.read_text().split("\n\n")]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "out"
    result = invoke(
        "compare", "--models", "gla", "--dataset", str(folder), "--out", str(out), *TINY
    )
    assert result.exit_code == 0, result.output
    assert str(folder) in json.loads((out / "results.json").read_text())["text"]["source"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--models", "gated_deltanet"), "gated_delta_net"),
        (("--models", ""), "at least one model"),
        (("--models", "gla", "--text", "/nowhere.txt"), "--text: no file matches '/nowhere.txt'"),
        (("--models", "gla", "--text", "a", "--dataset", "b"), "exclude each other"),
        (("--models", "gla", "--steps", "0"), "steps must be a whole number >= 1, not 0"),
        (("--models", "mine.toml"), "no file mine.toml"),
    ],
)
def test_compare_refuses_in_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    result = invoke("compare", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


SMALL = ("--length", "32", "--heads", "1", "--size", "8", "--rounds", "1")


def test_bench_times_every_case_and_stores_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = invoke("bench", "--json", "--save", str(path), *SMALL)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert json.loads(result.stdout) == data
    names = {timing["name"] for timing in data["timings"]}
    assert names == {spec.name for spec in SUITES["linear"].cases}
    assert data["environment"]["commit"]
    assert data["shape"]["T"] == 32
    assert set(data["ratios"]) == {label for label, _, _ in SUITES["linear"].ratios}


def test_suites_have_default_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SUITES["linear"].shape == Shape() and SUITES["local"].shape == Shape(T=1024)
    shapes: list[Shape] = []

    def build(shape: Shape, *, name: str) -> Case:
        shapes.append(shape)
        return Case(name=name, make=lambda: lambda: None)

    cases = [CaseSpec(name="sdpa", build=build)]
    monkeypatch.setitem(SUITES, "local", replace(SUITES["local"], cases=cases))
    assert invoke("bench", "--suite", "local", "--rounds", "1").exit_code == 0
    assert invoke("bench", "--suite", "local", "--rounds", "1", "--size", "4").exit_code == 0
    assert shapes == [Shape(T=1024), Shape(T=1024, K=4, V=4)]


def test_the_suite_of_one_memory_refuses_several() -> None:
    result = invoke("bench", "--suite", "titans", "--heads", "8")
    assert result.exit_code == 2 and "times one memory" in result.stderr


def test_bench_times_a_few_of_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "few.json"
    arguments = ("--suite", "matrix", "--only", "gla, performer", "--save", str(path))
    result = invoke("bench", *arguments, *SMALL)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    subjects = {timing["name"].partition(",")[0] for timing in data["timings"]}
    assert subjects == {"gla", "performer", "gated_delta_net"}
    assert set(data["ratios"]) == {f"{name}: fwd+bwd / fwd" for name in subjects}
    refused = invoke("bench", "--suite", "matrix", "--only", "glla", *SMALL)
    assert refused.exit_code == 2
    assert "has no 'glla'" in refused.stderr


def test_bench_times_a_recipe_of_a_file(tmp_path: Path) -> None:
    file, path = tmp_path / "mine.toml", tmp_path / "mine.json"
    file.write_text('[bias]\nmember = "Huber"\n')
    result = invoke("bench", "--recipe", str(file), "--batch", "2", "--save", str(path), *SMALL)
    assert result.exit_code == 0, result.output
    assert "Recipe(bias=Huber())" in result.stdout
    data = json.loads(path.read_text())
    assert data["recipe"]["bias"]["member"] == "Huber"
    assert [data["shape"][name] for name in "BTHKV"] == [2, 32, 1, 8, 8]
    assert len(data["timings"]) == 9
    assert "training: recipe / SDPA" in path.with_suffix(".html").read_text()
    named = invoke("bench", "--recipe", "delta_net", "--json", *SMALL)
    assert json.loads(named.stdout)["title"] == "delta_net"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "missing.toml"), "there is no file missing.toml"),
        (("--recipe", "delta_nat"), "no architecture named 'delta_nat'; did you mean delta_net"),
        (("--recipe", "titans_mac"), "several recipes in one layer"),
        (("--recipe", "delta_net", "--suite", "linear"), "--recipe and --suite exclude each other"),
        (("--recipe", "delta_net", "--only", "gla"), "--recipe and --only exclude each other"),
        (("--batch", "2"), "--batch is an option of --recipe"),
    ],
)
def test_bench_of_a_recipe_refuses_in_one_sentence(
    arguments: tuple[str, ...], message: str
) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_help_of_bench_names_every_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    output = CliRunner().invoke(build(), ["bench", "--help"]).output
    words = set(re.findall(r"\w+", output.replace("│", " ")))
    assert {*SUITES, "train", "memory"} <= words


def test_bench_of_memory_counts_peaks(tmp_path: Path) -> None:
    refused = invoke("bench", "--suite", "memory", "--only", "nothing")
    assert refused.exit_code == 2
    assert "has no 'nothing'; it has logits of all tokens;" in refused.stderr
