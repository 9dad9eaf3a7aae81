"""``recollect train`` and ``recollect sizes`` as a person gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from recollect.cli import build

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


def test_a_run_from_a_file_and_on(tmp_path: Path) -> None:
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

    again = RUN.invoke(build(), ["train", str(config)])
    assert again.exit_code == 2
    assert "recollect train: " in again.output
    assert "already holds checkpoint-2: give --resume" in again.output

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
    found = RUN.invoke(build(), ["train", str(config), "--device", "cuda:99"])
    assert found.exit_code == 2
    assert found.stderr.startswith("recollect train: --device 'cuda:99' is not here: torch sees ")
    assert not (tmp_path / "out").exists()
    assert RUN.invoke(build(), ["train", str(config), "--device", "cpu"]).exit_code == 0


def test_a_misspelled_key_leaves_with_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[data]\ntrain = 'x'\n[optimizer]\nstep = 3\n")
    found = RUN.invoke(build(), ["train", str(config)])
    assert found.exit_code == 2
    assert "[optimizer] has no key 'step'; did you mean 'steps'?" in found.output


def test_sizes_stand_beside_the_papers_names() -> None:
    found = RUN.invoke(build(), ["sizes", "--models", "gla"])
    assert found.exit_code == 0
    for word in ("170M", "340M", "760M", "1.3B", "0.00125", "gla"):
        assert word in found.output
    data = json.loads(RUN.invoke(build(), ["sizes", "--models", "gla", "--json"]).stdout)
    assert [row["name"] for row in data] == ["170M", "340M", "760M", "1.3B"]
    total = data[0]["parameters"]["gla"]
    assert total["total"] == sum(count for part, count in total.items() if part != "total")
    assert f"{total['total']:,}" in found.output


def test_rows_need_a_number_of_parameters(tmp_path: Path) -> None:
    found = RUN.invoke(build(), ["compare", "--models", "gla", "--rows", str(tmp_path)])
    assert found.exit_code == 2
    assert "--rows needs --parameters" in found.output
