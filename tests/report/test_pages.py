"""Reports of commands, from crafted numbers and from those in results/."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.report.reader import check_page

from recollect.benchmarks.page import save_bench_page
from recollect.report import describe_environment

ABOUT = describe_environment("cpu").to_dict()
STORED = Path(__file__).parents[2] / "results" / "bench"


@pytest.mark.parametrize("path", sorted(STORED.glob("*.json")), ids=lambda path: path.stem)
def test_a_stored_benchmark_has_a_page(path: Path, tmp_path: Path) -> None:
    data = json.loads(path.read_text("utf-8"))
    if "suite" not in data:
        pytest.skip("not what `recollect bench --save` writes")
    page = save_bench_page(data, tmp_path / "x.html", command="recollect bench --save x.json")
    text = check_page(page.read_text("utf-8"))
    assert data["environment"]["commit"] in text and data["environment"]["device"] in text
    assert "recollect bench --save x.json" in text
    for one in data.get("timings", []):
        assert one["name"] in text


def timing(name: str, seconds: float, ratio: float) -> dict[str, Any]:
    unknown = dict.fromkeys(("flops", "bytes", "gflops", "share", "peak_bytes"))
    times = {"median": seconds, "lower": seconds, "upper": seconds}
    return {"name": name, "ratio": ratio, "calls": 1, "seconds": [seconds], **times, **unknown}


def timed(*timings: dict[str, Any]) -> dict[str, Any]:
    run = {"suite": "linear", "shape": {"T": 9}, "rounds": 3, "seed": 0, "ratios": {}}
    return {**run, "baseline": "b", "ceilings": [], "timings": [*timings], "environment": ABOUT}


def test_a_benchmark_begins_with_the_fastest_and_the_slowest(tmp_path: Path) -> None:
    cases = timing("a", 0.002, 0.5), timing("b", 0.004, 1.0), timing("c", 0.008, 2.0)

    def first_sentence(*timings: dict[str, Any]) -> str:
        return check_page(save_bench_page(timed(*timings), tmp_path / "x.html").read_text("utf-8"))

    assert (
        "a is the fastest of 3 with 2 ms, 0.5 of the time of b. "
        "c is the slowest and takes 4 times as long."
    ) in first_sentence(*cases)
    assert "b, the baseline, is the fastest of 2 with 4 ms. c is the slowest" in first_sentence(
        *cases[1:]
    )
    assert "a takes 2 ms. There is no other case" in first_sentence(cases[0])


def trained(folder: Path, **more: Any) -> Any:
    from recollect.lm.training.progress import Trained

    history = [
        {"step": 1, "loss": 3.0, "tokens_per_second": 90.0},
        {"step": 2, "loss": 2.5, "tokens_per_second": 99.0},
        {"step": 2, "eval_bits_per_byte": 3.5, "eval_loss": 2.4},
        {"step": 4, "loss": math.nan, "tokens_per_second": 98.0},
        {"step": 4, "eval_bits_per_byte": 3.25, "eval_loss": 2.3},
    ]
    values = {"steps": 4, "tokens": 128, "seconds": 1.0, "loss": 2.25, "heldout": 3.25}
    values |= {"heldout_loss": 2.3, "notes": ("<compiled>",), "history": tuple(history)}
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    return Trained(model=model, folder=folder / "model", **(values | more))


def a_plan(folder: Path) -> Any:
    from recollect.lm.training.plan import TrainPlan

    return TrainPlan.from_dict(
        {
            "model": {"recipe": "gated_delta_net", "width": 16, "depth": 1, "heads": 2},
            "data": {"train": "text.txt", "context": 16},
            "optimizer": {"steps": 4, "batch": 2},
            "run": {"out": str(folder)},
        }
    )


def run_page(folder: Path, **more: Any) -> str:
    from recollect.experiments.training_page import save_run_page

    page = save_run_page(trained(folder, **more), a_plan(folder), command="recollect train a.toml")
    assert page == folder / "report.html"
    return page.read_text("utf-8")


def test_a_training_run_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    page = run_page(tmp_path)
    text = check_page(page)
    assert (
        "After 4 steps (128 tokens) the held-out text is 3.250 bits per byte and the loss of the "
        "last steps is 2.250 nats per token. It was still decreasing: the last two held-out "
        "values, after 64 and 128 tokens, are 3.500 and 3.250."
    ) in text
    for part in (
        "recollect train a.toml",
        ABOUT["commit"],
        '"recipe": "gated_delta_net"',
        "<compiled>",
    ):
        assert str(part) in text
    plots = json.loads(page.split('class="plots">')[1].split("</script>")[0])
    assert [(p["y"]["label"], p["curves"][0]["x"]) for p in plots] == [
        ("training loss, nats per token", [32, 64]),
        ("held-out bits per byte", [64, 128]),
        ("tokens per second", [32, 64, 128]),
    ]


def test_page_of_a_run_that_got_worse_or_has_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    worse = tuple({"step": n, "eval_bits_per_byte": x} for n, x in ((2, 3.0), (4, 3.5)))
    text = check_page(run_page(tmp_path, history=worse, heldout=3.5))
    assert "The smallest held-out value is 3.000, after 64 tokens." in text
    bare = {"loss": None, "heldout": None, "heldout_loss": None, "history": ()}
    page = run_page(tmp_path, **bare)
    assert "The run has 4 steps (128 tokens)." in check_page(page)
    assert "<figure>" not in page


def test_page_of_a_run_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = check_page(run_page(tmp_path))
    assert "There is no figure: figures need matplotlib" in text


def test_an_evaluation_has_a_page(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from recollect.experiments.evaluation_page import save_evaluation_page
    from recollect.experiments.framework.paper_values import PaperComparison
    from recollect.lm.evaluation.results import Evaluation, TaskResult

    def result(task: str, lower: tuple[str, ...] = (), **metrics: float) -> TaskResult:
        return TaskResult(
            task=task, metrics=metrics, errors={"acc": 0.01}, lower_is_better=lower, documents=50,
            version="1", settings={"limit": 50, "model": "ab" * 32}, notes=("of <words>",),
        )  # fmt: skip

    tasks = (result("piqa", acc=0.7), result("wikitext", ("ppl",), ppl=20.0), result("none"))
    actual = Evaluation(model="m", tasks=tasks, environment={**ABOUT, "transformers": "5"})
    rows = {"table": "miras_table2", "group": "", "note": ""}
    papers = (
        PaperComparison(
            task="piqa", metric="acc", value=70.0, column="piqa acc", rows=(("x", 71.0),), **rows
        ),
        PaperComparison(
            task="wikitext", metric="ppl", value=20.0, column="ppl", rows=(("x", 21.0),), **rows
        ),
    )

    def first_sentence(papers: tuple[PaperComparison, ...]) -> str:
        page = save_evaluation_page(actual, papers, tmp_path, command="recollect eval m --tasks a")
        assert page == tmp_path / "report.html"
        return check_page(page.read_text("utf-8"))

    text = first_sentence(papers)
    assert (
        "m was evaluated on 150 documents of 3 tasks (none gave no finite number). 1 of 2 numbers "
        "that papers report too is better than at least one model of the papers."
    ) in text
    for part in (
        "0.7 ± 0.01",
        "recollect eval m --tasks a",
        ABOUT["commit"],
        "71 (x)",
        "of <words>",
        "abababababab…",
    ):
        assert str(part) in text
    assert "None of the stored papers reports these tasks." in first_sentence(())


def test_gallery_has_the_style_of_pages(tmp_path: Path) -> None:
    from recollect.experiments.gallery import save_gallery

    record = {"seed": 0, "device": "a device", "commit": "c0ffee"}
    claim = {"claim": "<it> grows", "verdict": "holds", "evidence": "so"}
    data = {"experiment": "am-snr", "source": "AM", "scale": "small", "seconds": 1.0}
    (tmp_path / "am-snr").mkdir()
    text = json.dumps({**data, "complete": True, "records": [record], "claims": [claim]})
    (tmp_path / "am-snr" / "results.json").write_text(text)
    path = save_gallery(tmp_path)
    assert path is not None
    page = path.read_text("utf-8").replace('href="am-snr/report.html"', "")
    assert "commit c0ffee" in check_page(page)
