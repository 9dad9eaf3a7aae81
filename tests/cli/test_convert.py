"""``recollect convert`` between layouts of saved models: both directions, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
from tests.lm.conversion.published import make, save
from typer.testing import CliRunner

from recollect.cli.app import build


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(build(), ["convert", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def test_both_directions(tmp_path: Path) -> None:
    source = save(tmp_path / "published", *make("delta_net"))
    assert run(source, tmp_path / "ours")[0] == f"model: {tmp_path / 'ours'}\n"
    printed, _ = run(tmp_path / "ours", tmp_path / "back", "--to", "delta_net", "--json")
    assert json.loads(printed) == {"model": str(tmp_path / "back")}
    first, second = (folder / "model.safetensors" for folder in (source, tmp_path / "back"))
    assert first.stat().st_size == second.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "out"), "there is no folder nowhere: name that of a saved model"),
        (("in", "out", "--text", "a.txt"), "--text can be set only to replace attention: add"),
        (("in", "out", "--resume"), "--resume can be set only to replace attention: add"),
        *(
            (
                ("in", "out", option, value, "--to", "gla"),
                f"{option} can be set only to replace attention: add --attention-to RECIPE",
            )
            for option, value in (
                ("--device", "cpu"),  # a default
                ("--steps", "1,1,1"),
                ("--layers", "0"),
                ("--keep-attention", "1"),
                ("--heldout", "a.txt"),
                ("--batch", "2"),
                ("--context", "4"),
                ("--save-every", "9"),
                ("--seed", "3"),
            )
        ),
        (("in", "out", "--seed", "1", "--batch", "2"), "--batch, --seed can be set only"),
        (("in", "out", "--attention-to", "gla"), "trains on a text: add --text FILE"),
        (
            ("in", "out", "--attention-to", "gla", "--text", "a.txt", "--to", "gla"),
            "exclude each other",
        ),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    printed, error = run(*arguments, code=2)
    assert not printed
    assert message in error and error.count("\n") == 1
