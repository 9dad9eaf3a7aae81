"""A second run in one folder ends with a sentence and changes no file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tests.report.test_lock import locked
from tests.test_run_train import PLAN
from typer.testing import CliRunner

from recollect.cli import build
from recollect.report.lock import LOCK_NAME

RUN = CliRunner()
TINY = ("--steps", "2", "--width", "16", "--depth", "1", "--heads", "2")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "t.txt"
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(150)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def arguments(command: str, text: Path, out: Path) -> tuple[list[str], Path]:
    """Return a command that writes, and its folder."""
    if command == "train":
        config = text.with_name("run.toml")
        config.write_text(PLAN.format(text=text, out=out))
        return ["train", str(config)], out
    if command == "reproduce":
        return ["reproduce", "ttr-fig2", "--scale", "smoke", "--out", str(out)], out / "ttr-fig2"
    rest = ["compare", "--models", "linear_attention", "--text", str(text), *TINY]
    if command == "rows":
        return [*rest, "--parameters", "20000", "--rows", str(out)], out
    return [*rest, "--out", str(out)], out


@pytest.mark.parametrize(
    "command",
    ["train", *(pytest.param(x, marks=pytest.mark.slow) for x in ("compare", "rows", "reproduce"))],
)
def test_folder_of_another_run_is_unchanged(command: str, text: Path, tmp_path: Path) -> None:
    requested, folder = arguments(command, text, tmp_path / "out")
    with locked(folder) as holder:
        (folder / "kept.txt").write_text("of the first run")
        initial = contents(folder)
        second = RUN.invoke(build(), requested)
        assert second.exit_code == 2, second.output
        assert f"belongs to another run (process {holder.pid} on " in second.stderr
        assert second.stderr.count("\n") == 1 and "Traceback" not in second.output
        assert contents(folder) == initial
    later = RUN.invoke(build(), requested)
    assert later.exit_code == 0, later.output
    assert not (folder / LOCK_NAME).exists()
    assert (folder / "kept.txt").read_text() == "of the first run"


def test_model_of_another_plan_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "run.toml"
    config.write_text(PLAN.format(text=text, out=out).replace("save_every = 1", "save_every = 0"))
    assert RUN.invoke(build(), ["train", str(config)]).exit_code == 0
    initial = contents(out)
    config.write_text(config.read_text().replace("width = 16", "width = 24"))
    other = RUN.invoke(build(), ["train", str(config)])
    assert other.exit_code == 2
    assert "already contains the model of another run" in other.stderr
    assert contents(out) == initial
    config.write_text(config.read_text().replace("width = 24", "width = 16"))
    repeated = RUN.invoke(build(), ["train", str(config), "--json"])
    assert repeated.exit_code == 0, repeated.output
    assert json.loads(repeated.stdout)["steps"] == 2
