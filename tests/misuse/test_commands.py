"""Commands that cannot run: one sentence on stderr, exit code 2, and unchanged files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.misuse.sentences import LONGEST, digests, is_one_sentence, short_plan

import recollect as rc

pytest.importorskip("typer")
from typer.testing import CliRunner

from recollect.cli import app as cli

PLAN = short_plan(steps=1)
RESERVED = {"model_type": "recollect", "__class__": 5}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, recipes and plans, and files of a user."""
    (tmp_path / "text.txt").write_text("a memory is a map from keys to values. " * 20)
    (tmp_path / "run.toml").write_text(PLAN)
    (tmp_path / "key.toml").write_text(PLAN + "learning_rate = 1.0\n")
    (tmp_path / "wide.toml").write_text(PLAN.replace("width = 16", "width = 10_000_000"))
    (tmp_path / "gpu.toml").write_text(PLAN + 'device = "gpu"\n')
    (tmp_path / "half.toml").write_text("[model\n")
    (tmp_path / "mine.json").write_text(rc.Recipe().to_json())
    (tmp_path / "half.json").write_text('{"bias": ')
    (tmp_path / "twice.json").write_text('{"bias": {"member": "L2"}, "bias": {"member": "L2"}}')
    (tmp_path / "typo.json").write_text('{"memory": {"member": "Matriks"}}')
    (tmp_path / "deep.json").write_text("[" * 50_000 + "]" * 50_000)
    (tmp_path / "dots.toml").write_text("a" + ".a" * 50_000 + " = 1")
    os.mkfifo(tmp_path / "pipe.toml")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "latin.json").write_bytes(b'{"bias": "\xe9"}')
    (tmp_path / "raises.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('gone')\n")
    (tmp_path / "syntax.py").write_text("def\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "piped").mkdir()
    (tmp_path / "piped" / "config.json").write_text(json.dumps({"model_type": "recollect"}))
    os.mkfifo(tmp_path / "piped" / "model.safetensors")
    (tmp_path / "reserved").mkdir()
    (tmp_path / "reserved" / "config.json").write_text(json.dumps(RESERVED))
    (tmp_path / "runs" / "compare").mkdir(parents=True)
    (tmp_path / "runs" / "compare" / "notes.md").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


REFUSED: dict[str, tuple[str, ...]] = {
    "zoo --family deltarule": ("has no family 'deltarule'",),
    "explain glaa": ("did you mean gla",),
    "explain none.json": ("there is no file none.json",),
    "explain folder.json": ("Is a directory",),
    "explain half.json": ("half.json is not JSON",),
    "explain twice.json": ("twice.json is not JSON", "'bias' occurs twice"),
    "explain typo.json": ("did you mean 'Matrix'", "--import MODULE"),
    "explain deep.json": ("deep.json is not JSON", "too deep"),
    "explain latin.json": ("latin.json", "not UTF-8"),
    "explain pipe.json": ("pipe.json cannot be read: it is a pipe",),
    "explain dots.toml": ("dots.toml is not TOML", "more than 32 dotted parts"),
    "explain text.txt": ("neither .json nor .toml",),
    "explain ./nothing": ("neither .json nor .toml",),
    "explain run.toml": ("run.toml", "no choice"),
    "explain gla --engine fast": ("'fast' is unknown",),
    "explain gla --engine kernel": ("cannot run this recipe",),
    "explain gla --import nobody_has_this": ("no module nobody_has_this",),
    "explain gla --import a-b": ("names no module",),
    "explain gla --import raises.py": ("raises could not be imported", "not today"),
    "explain gla --import leaves.py": ("leaves could not be imported", "gone"),
    "explain gla --import syntax.py": ("syntax could not be imported", "SyntaxError"),
    "sizes --models glaa": ("did you mean gla",),
    "compare --models glaa --task mqar": ("did you mean gla",),
    "compare --models gla,gla --task mqar": ("named twice",),
    "compare --models , --task mqar": ("at least one model",),
    "compare --models half.json --task mqar": ("half.json is not JSON",),
    "compare --models pipe.toml --task mqar": ("pipe.toml cannot be read: it is a pipe",),
    "compare --models gla --task mqar --steps 0": ("--steps must be", ">= 1"),
    "compare --models gla --task mqar --steps -3": ("--steps must be", "-3"),
    "compare --models gla --task mqar --lr 0": ("--lr must be", "> 0"),
    "compare --models gla --task mqar --lr nan": ("--lr must be", "nan"),
    "compare --models gla --task mqar --lr inf": ("--lr must be", "inf"),
    "compare --models gla --task mqar --width 0": ("--width must be",),
    "compare --models gla --task mqar --depth 0": ("--depth must be",),
    "compare --models gla --task mqar --heads 0": ("--heads must be",),
    "compare --models gla --task mqar --heads 5": ("--width", "--heads"),
    "compare --models gla --task mqar --length 0": ("--length must be",),
    "compare --models gla --task mqar --batch 0": ("--batch must be",),
    "compare --models gla --task mqar --tokens 0": ("--tokens must be",),
    "compare --models gla --task mqar --steps 1 --tokens 9": ("--steps and --tokens exclude",),
    "compare --models gla --task mqar --seed -1": ("--seed must be", "-1"),
    "compare --models gla --task mqar --seeds 0": ("--seeds must be",),
    "compare --models gla --task mqar --seeds -2": ("--seeds must be", "-2"),
    "compare --models gla --task mqar --device tpu": ("--device 'tpu' is not here", "cpu"),
    "compare --models gla --task mqar --device cuda:99": ("--device 'cuda:99' is not here",),
    "compare --models gla --rows r --parameters 9000 --seeds 2": ("--seeds and --rows exclude",),
    "compare --models gla --task mqar --jobs 0": ("--jobs must be",),
    "compare --models gla --task mqar --engine fast": ("'fast' is unknown",),
    "compare --models gla --task mqar --parameters 5": ("parameters", "gla"),
    "compare --models gla --text a --dataset b": ("--text and --dataset exclude",),
    "compare --models gla --task mqar --text text.txt": ("--text is read by the task text alone",),
    "compare --models gla --task mqar --text none.txt": ("--task has only mqar",),
    "compare --models gla --task mqar --task capacity --dataset b": ("--dataset is read by the",),
    "compare --models gla --text none.txt": ("--text: no file matches 'none.txt'",),
    "compare --models gla --text folder": ("--text: no file matches 'folder' (in a folder: .txt",),
    "compare --models gla --rows r": ("--rows needs --parameters",),
    "compare --models gla --task mqar --out text.txt": ("--out text.txt cannot be written",),
    "train none.toml": ("there is no file none.toml",),
    "train folder": ("folder is a folder", "TOML"),
    "train half.toml": ("half.toml is not TOML",),
    "train pipe.toml": ("cannot be read: it is a pipe",),
    "train dots.toml": ("dots.toml is not TOML", "more than 32 dotted parts"),
    "plan pipe.toml": ("cannot be read: it is a pipe",),
    "train mine.json": ("mine.json is not TOML",),
    "train key.toml": ("'learning_rate'", "is a key of [optimizer]"),
    "train wide.toml": ("[model] has", "smaller width"),
    "train run.toml --steps 0": ("--steps must be",),
    "train run.toml --steps -1": ("--steps must be",),
    "train run.toml --out text.txt": ("text.txt", "cannot be written"),
    "train run.toml --device tpu": ("--device 'tpu' is not here", "cpu"),
    "train run.toml --device cuda:99": ("--device 'cuda:99' is not here", "cpu"),
    "train gpu.toml": ("[run] device 'gpu' is not here", "cpu"),
    "train run.toml --import nobody_has_this": ("no module nobody_has_this",),
    "generate nope": ("there is no folder 'nope'", "name the folder of a saved model"),
    "generate ./nope": ("there is no folder './nope'",),
    "generate text.txt": ("there is no folder 'text.txt'",),
    "generate folder": ("folder is not a checkpoint", "config.json"),
    "generate model": ("config.json is not JSON",),
    "generate other": ("'llama'",),
    "generate piped": ("piped/model.safetensors cannot be read: it is a pipe",),
    "generate reserved": ("config.json has the key '__class__', which is not an option",),
    "generate folder --device tpu": ("--device 'tpu' is not here", "cpu"),
    "reproduce nope": ("there is no experiment 'nope'",),
    "reproduce": ("name one experiment, or give --all",),
    "reproduce ttr-fig2 --all": ("name one experiment, or give --all",),
    "reproduce ttr-fig2 --device tpu": ("--device 'tpu' is not here", "cpu"),
    "reproduce ttr-fig2 --scale smoke --out text.txt": ("--out text.txt cannot be written",),
    "reproduce ttr-fig2 --scale smoke --seeds 0": ("seeds",),
    "reproduce ttr-fig2 --scale smoke --seeds -1": ("seeds",),
    "reproduce ttr-fig2 --scale smoke --jobs 0": ("jobs",),
    "bench --device tpu": ("--device 'tpu' is not here", "cpu"),
    "bench --only nope": ("nope",),
    "bench --only ,": ("--only names nothing",),
    "page --systems ,": ("--systems names nothing",),
    "look other hello --out text.txt": ("--out text.txt must be an HTML file",),
    "look other text.txt": ("TEXT is the text itself, and text.txt is a file",),
    "export nope out": ("there is no folder nope",),
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_in_one_sentence(line: str, place: Path) -> None:
    initial = digests(place)
    result = CliRunner().invoke(cli.build(), line.split(" "))
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    message = result.stderr.strip()
    is_one_sentence(message)
    assert message.startswith(f"recollect {line.split(' ')[0]}: ")
    for part in REFUSED[line]:
        assert part in message, message
    later = digests(place)
    assert {name: later.get(name) for name in initial} == initial


USAGE = (
    *("nope", "--nope", "explain", "explain gla dla", "zoo extra", "zoo --family", "train"),
    *("train run.toml more.toml", "train run.toml --steps x", "train run.toml --steps 1.5"),
    *("compare", "compare --models", "compare --models gla --steps x", "generate"),
    *("compare --models gla --lr fast", "compare --models gla --seed 0.5", "bench --rounds many"),
    *("generate folder --tokens x", "reproduce a b", "reproduce a --seeds x", "sizes gla"),
)
OUT_OF_RANGE = {
    "compare --models gla --task nope": "'nope' is not one of 'text', 'mqar', 'capacity'",
    "compare --models gla --layer-options x": "'x' is not one of 'preset', 'same'",
    "coordinates run.toml --parametrization ntk": "'ntk' is not one of 'standard', 'mup'",
    "coordinates run.toml --steps 0": "Invalid value for",
    "coordinates run.toml --tolerance 11": "must be above 0 and at most 10, not 11.0",
    "explain gla --precision bf16": "'bf16' is not one of 'float32', 'tf32'",
    "generate folder --tokens 0": "Invalid value for",
    "generate folder --temperature -1": "Invalid value for",
    "generate folder --temperature nan": "Invalid value for",
    "generate folder --top-p 2": "must be above 0 and at most 1, not 2.0",
    "generate folder --top-p 0": "must be above 0 and at most 1, not 0.0",
    "generate folder --top-k 0": "Invalid value for",
    "generate folder --beams 0": "Invalid value for",
    "adopt folder --tokens 0": "Invalid value for",
    "plan run.toml --devices 0": "Invalid value for",
    "plan run.toml --per-node 0": "Invalid value for",
    "plan run.toml --share 1.5": "must be above 0 and at most 1, not 1.5",
    "plan run.toml --peak 0": "must be above 0 and at most 1e+09, not 0.0",
    "plan run.toml --peak inf": "must be above 0 and at most 1e+09, not inf",
    "plan run.toml --peak nan": "must be above 0 and at most 1e+09, not nan",
    "reproduce ttr-fig2 --scale huge": "'huge' is not one of 'smoke', 'small', 'paper'",
    "bench --suite nope": "'nope' is not one of 'adopt', 'decode'",
    "bench --recipe delta_net --batch 0": "Invalid value for",
    "bench --rounds 0": "Invalid value for",
    "bench --length 0": "Invalid value for",
    "bench --heads -1": "Invalid value for",
    "bench --size 0": "Invalid value for",
}


@pytest.mark.parametrize("line", [*USAGE, *OUT_OF_RANGE])
def test_invalid_commands(line: str, place: Path) -> None:
    """The parser's errors: fault, usage, and no action."""
    initial = digests(place)
    result = CliRunner(env={"COLUMNS": "120"}).invoke(cli.build(), line.split(" "))
    assert result.exit_code == 2, result.output
    assert OUT_OF_RANGE.get(line, "Error") in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert "Error" in result.stderr and "Traceback" not in result.output
    assert len(result.stderr) < 3 * LONGEST
    assert digests(place) == initial
