"""The commands that run things, at toy sizes."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

import recollect as rc
from recollect.benchmarks.results import Case
from recollect.benchmarks.suites import SUITES, Shape
from recollect.benchmarks.suites.calls import gates_of, params_of, tensors
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
    given = ("compare", "--models", "retnet", "--text", str(text), "--out", str(tmp_path), *TINY)
    result = invoke(*given, "--seeds", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    values = [run["value"] for run in data["runs"]]
    (told,) = data["summary"]
    assert told["seeds"] == [0, 1]
    assert (told["min"], told["max"]) == (min(values), max(values))
    assert f"({min(values):.3f}–{max(values):.3f})" in (tmp_path / "report.html").read_text()
    shown = invoke(*given, "--seeds", "2")
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


def test_bench_times_every_case_and_stores_where_and_what(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = invoke("bench", "--json", "--save", str(path), *SMALL)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert json.loads(result.stdout) == data
    names = {timing["name"] for timing in data["timings"]}
    assert names == {case.name for case in SUITES["linear"].cases(Shape(T=32, H=1, K=8, V=8))}
    assert data["environment"]["commit"]
    assert data["shape"]["T"] == 32
    assert set(data["ratios"]) == {what for what, _, _ in SUITES["linear"].pairs(Shape())}


def test_suites_have_sizes_of_their_own_where_the_command_says_none() -> None:
    assert SUITES["linear"].shape == Shape() and SUITES["local"].shape == Shape(T=1024)
    said = SUITES["local"].cases
    asked: list[Shape] = []

    def cases(shape: Shape) -> list[Case]:
        asked.append(shape)
        return said(replace(shape, T=16, H=1, K=8, V=8))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "local", replace(SUITES["local"], cases=cases))
        assert invoke("bench", "--suite", "local", "--rounds", "1").exit_code == 0
        assert invoke("bench", "--suite", "local", "--rounds", "1", "--size", "4").exit_code == 0
    assert asked == [Shape(T=1024), Shape(T=1024, K=4, V=4)]


def test_the_suite_of_one_memory_refuses_several() -> None:
    result = invoke("bench", "--suite", "titans", "--heads", "8")
    assert result.exit_code == 2 and "times one memory" in result.stderr


def test_the_suite_of_one_memory_runs_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sides, forward and backward: what a case is made with says sizes and device."""
    asked: list[tuple[object, str]] = []

    def case(label: str, *rest: object, backward: bool, device: str) -> Case:
        asked.append((rest[-1], device))
        return Case(name=label, make=lambda: lambda: None)

    for name in ("own_case", "titans_case"):
        monkeypatch.setattr(f"recollect.benchmarks.suites.registry.{name}", case)
    suite = SUITES["titans"]
    cases = suite.cases(replace(suite.shape, device="cuda"))
    assert asked == [((2, 256, 64), "cuda")] * len(cases) and len(cases) == 12
    asked.clear()
    suite.cases(replace(suite.shape, B=3, T=32, K=8, V=8))
    assert asked == [((3, 32, 8), "cpu")] * 12


def test_what_bench_times_is_what_the_recipe_means() -> None:
    shape = Shape(T=16, H=2, K=4, V=4)
    cases = {case.name: case for case in SUITES["linear"].cases(shape)}
    recipe = rc.zoo.get("gated_delta_net").recipe
    q, k, v = tensors(shape, grad=True)
    gates = gates_of(recipe, shape, grad=True)
    expected, _ = rc.recall(recipe, q, k, v, gates, engine="reference")
    # float32, 16 tokens: rounding only.
    torch.testing.assert_close(cases["gated_delta_net"].make()(), expected, rtol=1e-4, atol=1e-5)
    leaves = [q, k, v, *gates.values()]
    slopes = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
    found = cases["gated_delta_net, fwd+bwd"].make()()
    assert isinstance(found, tuple)
    for got, wanted in zip(found, slopes, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_bench_times_every_row_of_a_matrix_memory() -> None:
    """Each row runs at its own sizes, and what is timed is what the recipe means."""
    shape = Shape(T=12, H=2, K=8, V=8)
    cases = {case.name: case for case in SUITES["matrix"].cases(shape)}
    rows = [name for name in rc.zoo.names() if rc.zoo.get(name).family in FAMILIES]
    assert list(cases) == [label for name in rows for label in (name, f"{name}, fwd+bwd")]
    for name in rows:
        recipe = rc.zoo.get(name).recipe
        decay = recipe.retention.decay
        K = 16 if decay is not None and decay.per == "entry" else 8
        sizes = replace(shape, K=K)
        q, k, v = tensors(sizes, grad=False, n=recipe.associations_per_token)
        gates, params = gates_of(recipe, sizes, grad=False), params_of(recipe, sizes)
        expected, _ = rc.recall(recipe, q, k, v, gates, params=params, engine="reference")
        found = cases[name].make()()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        slopes = cases[f"{name}, fwd+bwd"].make()()
        assert isinstance(slopes, tuple)
        assert all(x is None or torch.isfinite(x).all() for x in slopes)


FAMILIES = (
    *("linear_attention", "feature_maps", "decay", "state_space", "rwkv", "xlstm"),
    *("delta_rule", "least_mean_squares"),
)


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
    said = CliRunner().invoke(build(), ["bench", "--help"]).output
    words = set(re.findall(r"\w+", said.replace("│", " ")))
    assert {*SUITES, "train", "memory"} <= words


def test_bench_of_memory_counts_peaks(tmp_path: Path) -> None:
    refused = invoke("bench", "--suite", "memory", "--only", "nothing")
    assert refused.exit_code == 2
    assert "has no 'nothing'; it has logits of all tokens;" in refused.stderr
