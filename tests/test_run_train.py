"""``recollect train`` and ``recollect sizes`` on the command line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from rich.console import Console
from typer.testing import CliRunner

from recollect.cli import build
from recollect.cli.progress import TrainDisplay
from recollect.lm.training.progress import Progress

RUN = CliRunner()

PLAN = """
[model]
width = 16
depth = 1
heads = 2
[data]
train = ["{text}"]
context = 16
heldout_share = 0.25
[optimizer]
steps = 2
batch = 2
[run]
out = "{out}"
save_every = 1
log_every = 1
"""


def test_run_from_a_file_and_resume(tmp_path: Path) -> None:
    text, config = tmp_path / "t.txt", tmp_path / "run.toml"
    text.write_text("the memory reads at the query. " * 20)
    config.write_text(PLAN.format(text=text, out=tmp_path / "out"))
    first = RUN.invoke(build(), ["train", str(config)])
    assert first.exit_code == 0, first.output
    assert "2 steps, 64 tokens" in first.output
    assert "bits per byte" in first.output
    assert "of the matmul ceiling" in first.output
    head = dict(line.split(maxsplit=1) for line in first.stdout.splitlines()[:6])
    assert list(head) == ["model", "parameters", "step", "run", "device", "out"]
    for part in ("embedding ", "memory layers ", "MLPs ", "head "):
        assert part in head["parameters"]
    assert head["run"] == "2 steps, 64 tokens"
    assert str(tmp_path / "out" / "model") in head["out"]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()

    repeated = RUN.invoke(build(), ["train", str(config)])
    assert repeated.exit_code == 2
    assert "recollect train: " in repeated.output
    assert "already contains checkpoint-2: use --resume" in repeated.output

    on = RUN.invoke(build(), ["train", str(config), "--resume", "--json"])
    assert on.exit_code == 0, on.output
    assert "from step 3 on" in on.stderr
    data = json.loads(on.stdout)
    assert data["steps"] == 0
    assert data["model"].endswith("model")


def test_a_device_is_named_on_the_command_line(tmp_path: Path) -> None:
    text, config = tmp_path / "t.txt", tmp_path / "run.toml"
    text.write_text("the memory reads at the query. " * 20)
    config.write_text(PLAN.format(text=text, out=tmp_path / "out"))
    result = RUN.invoke(build(), ["train", str(config), "--device", "cuda:99"])
    assert result.exit_code == 2
    assert result.stderr.startswith("recollect train: --device 'cuda:99' is not here: torch sees ")
    assert not (tmp_path / "out").exists()
    assert RUN.invoke(build(), ["train", str(config), "--device", "cpu"]).exit_code == 0


def test_misspelled_key_gives_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[data]\ntrain = 'x'\n[optimizer]\nstep = 3\n")
    result = RUN.invoke(build(), ["train", str(config)])
    assert result.exit_code == 2
    assert "[optimizer] has no key 'step'; did you mean 'steps'?" in result.output


def test_sizes_have_the_names_of_papers() -> None:
    result = RUN.invoke(build(), ["sizes", "--models", "gla"])
    assert result.exit_code == 0
    for word in ("170M", "340M", "760M", "1.3B", "0.00125", "gla"):
        assert word in result.output
    data = json.loads(RUN.invoke(build(), ["sizes", "--models", "gla", "--json"]).stdout)
    assert [row["name"] for row in data] == ["170M", "340M", "760M", "1.3B"]
    total = data[0]["parameters"]["gla"]
    assert total["total"] == sum(count for part, count in total.items() if part != "total")
    assert f"{total['total']:,}" in result.output


def test_rows_need_a_number_of_parameters(tmp_path: Path) -> None:
    result = RUN.invoke(build(), ["compare", "--models", "gla", "--rows", str(tmp_path)])
    assert result.exit_code == 2
    assert "--rows needs --parameters" in result.output


def test_loss_is_printed_once_with_its_step() -> None:
    """A log every 4 of 20 steps: no line repeats the loss of another step."""
    page = StringIO()
    with TrainDisplay(Console(file=page, width=200), steps=20) as display:
        news = Progress(step=0, steps=20)
        for step in range(1, 21):
            news = replace(news, step=step)
            display.on_progress(news)  # the step is over, and its loss not logged yet
            if step == 1 or step % 4 == 0:
                news = replace(news, loss=100.0 + step, loss_step=step)
                display.on_progress(news)
        display.on_progress(replace(news, loss=7.0))  # the mean of the last steps
    printed = re.findall(r"step (\d+)/20  loss ([\d.]+) nats/token", page.getvalue())
    assert printed == [(str(n), f"{100 + n}.000") for n in (1, 4, 8, 12, 16, 20)]


def test_long_run_prints_about_twenty_lines() -> None:
    page = StringIO()
    with TrainDisplay(Console(file=page, width=200), steps=1000) as display:
        news = Progress(step=0, steps=1000)
        for step in range(1, 1001):
            news = replace(news, step=step)
            display.on_progress(news)
            if step == 1 or step % 30 == 0:  # 8 does not divide the 50 of the lines
                news = replace(news, loss=float(step), loss_step=step)
                display.on_progress(news)
        display.on_progress(replace(news, loss=1000.0, loss_step=1000))
    printed = re.findall(r"step ([\d,]+)/1,000  loss ([\d.]+)", page.getvalue())
    assert 15 <= len(printed) <= 25
    assert all(float(step.replace(",", "")) == float(loss) for step, loss in printed)
    assert printed[-1][0] == "1,000"


def test_one_line_has_one_unit(tmp_path: Path) -> None:
    text, config = tmp_path / "t.txt", tmp_path / "run.toml"
    text.write_text("the memory reads at the query. " * 20)
    config.write_text(
        PLAN.format(text=text, out=tmp_path / "out").replace(
            "log_every = 1", "log_every = 1\neval_every = 1"
        )
    )
    run = RUN.invoke(build(), ["train", str(config)])
    assert run.exit_code == 0, run.output
    for line in run.output.splitlines():
        assert not ("nats" in line and "bits" in line), line
    (nats,) = re.findall(
        r"^nats per token: loss ([\d.]+), held-out loss ([\d.]+)$", run.stdout, re.M
    )
    (bits,) = re.findall(r"^bits per byte: held-out ([\d.]+)$", run.stdout, re.M)
    assert re.search(r"^step 2/2  loss [\d.]+  held-out [\d.]+ nats/token", run.stderr, re.M)
    # Bytes are the tokens here, except for the end of a document: the units differ by log 2.
    assert float(bits) == pytest.approx(float(nats[1]) / math.log(2), rel=0.1)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_progress_bar_fits_any_width(columns: int) -> None:
    page = StringIO()
    console = Console(file=page, width=columns, force_terminal=True, color_system=None)
    with TrainDisplay(console, steps=2000) as display:
        display.on_progress(
            Progress(
                step=120,
                steps=2000,
                loss=3.25,
                loss_step=120,
                heldout_loss=3.5,
                tokens_per_second=12_345,
                ceiling_share=0.25,
            )
        )
        page.truncate(0)
        page.seek(0)
        display.live_display.refresh()
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", page.getvalue())
    assert "…" not in printed
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= columns
    words = " ".join(printed.split())
    for part in ("training", "3.250", "held-out", "12,345", "25%", "matmul", "ceiling"):
        assert part in words, (part, printed)
    assert "120/2000" in words.replace(" ", "")
